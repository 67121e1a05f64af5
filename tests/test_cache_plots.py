"""The plots of notebook 02: captions agree with the data, files are the same every time."""

import functools
import html
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence

import pytest
from PIL import Image

from tutorial_engine.viz import cache_plots, sampling_plots, speed_plots
from tutorial_engine.viz.picture import Picture

NASTY = ["<script>", "$x$", "&amp;", "]]>", "<s>", "$\\frac{1}{2}$", '"--"', "·a"]
WORDS = "Once ·upon ·a ·time".split()


def filters(kept: int) -> Picture:
    flags = {"none": [True] * 4, "top_k": [i < kept for i in range(4)]}
    return sampling_plots.filters_picture(["b", "a", "d", "c"], [0.3, 0.4, 0.1, 0.2], flags)


def latency(no_cache: Sequence[float], virtual: bool) -> Picture:
    lines = {
        "with cache": [(8, 2.0), (32, 2.0)],
        "no cache": [*zip((8, 32), no_cache, strict=True)],
    }
    units = {"with cache": [(8, 1.0), (32, 1.0)], "no cache": [(8, 8.0), (32, 32.0)]}
    return speed_plots.latency_picture(lines, units if virtual else None)


# Function -> two pictures of different data, and what each caption must say about its own.
PICTURES: dict[str, tuple[Callable[[], Picture], list[str], Callable[[], Picture], list[str]]] = {
    "work_picture": (
        lambda: cache_plots.work_picture(
            [10, 11, 12], [10, 1, 1], [1e7, 2e7, 3e7], [1e7, 1e6, 1e6]
        ),
        ["3 new tokens", "33 tokens run, with it 12, a factor of 2.8", "60 MFLOP against 12 MFLOP"],
        lambda: cache_plots.work_picture([4], [4], [8e9], [8e9]),
        ["1 new tokens", "4 tokens run, with it 4, a factor of 1.0", "8 GFLOP", "a factor of 1.0."],
    ),
    "bytes_picture": (
        lambda: cache_plots.bytes_picture([("tiny", 2048, 6144), ("$big$", 114688, None)]),
        ["tiny: 2 KiB instead of 6 KiB;", "$big$: 112 KiB."],
        lambda: cache_plots.bytes_picture([("half", 512, 512)]),
        ["half: 0.5 KiB instead of 0.5 KiB."],
    ),
    "fill_picture": (
        lambda: cache_plots.fill_picture([("A", 17, 40), ("B <s>", 3, 40)]),
        ["2 rows have 80 slots; 20 are used and 60 (75 %)"],
        lambda: cache_plots.fill_picture([("A", 1024, 1024)]),
        ["1 rows have 1024 slots; 1024 are used and 0 (0 %)"],
    ),
    "positions_picture": (
        lambda: cache_plots.positions_picture([0, 1, 2, 3], [0, 1, 3, 4], WORDS, NASTY[:4]),
        ["From token 2", "off by +1 (3 instead of 2)", "4 of 4", "“<script>” instead of “Once”"],
        lambda: cache_plots.positions_picture(range(4), range(4), WORDS, WORDS),
        ["Both start to decode at the same position; 0 of 4 tokens differ."],
    ),
    "latency_picture": (
        lambda: latency([1.0, 4.0], virtual=True),
        [
            "no cache goes from 8 at 8 tokens to 32 at 32;",
            "with cache goes from 2 at 8 tokens to 2 at 32, no cache goes from 1 at 8 tokens to 4",
            "equal at about 16.",
        ],
        lambda: latency([3.0, 4.0], virtual=False),
        ["Measured here", "no cache goes from 3 at 8 tokens to 4 at 32."],
    ),
    "roofline_picture": (
        lambda: speed_plots.roofline_picture(
            1e10, 1e11, [("decode", 0.5, 2.5e9), ("$prefill$", 40.0, 8e10)]
        ),
        [
            "The ridge of 100 GFLOP/s and 10 GB/s is at 10 FLOP/byte",
            "decode (0.5 FLOP/byte) lies left of it, limited by memory, at 50 % of the roof",
            "$prefill$ (40 FLOP/byte) lies right of it, limited by arithmetic, at 80 % of the roof",
        ],
        lambda: speed_plots.roofline_picture(2e12, 3e12, [("at the ridge", 1.5, 3e12)]),
        ["3 TFLOP/s and 2 TB/s is at 1.5 FLOP/byte", "lies right of it", "at 100 % of the roof"],
    ),
    "filters_picture": (
        lambda: filters(2),
        ["Of 4 tokens", "none keeps 4 tokens (100 %)", "top_k keeps 2 tokens (70 %)"],
        lambda: filters(1),
        ["none keeps 4 tokens (100 %)", "top_k keeps 1 token (30 %)"],
    ),
    "temperature_picture": (
        lambda: sampling_plots.temperature_picture(
            NASTY[:3], {1.0: [0.2, 0.5, 0.3], 0.5: [0.1, 0.7, 0.2]}
        ),
        ["likeliest token, “$x$”, has 50 % at T = 1, 70 % at T = 0.5."],
        lambda: sampling_plots.temperature_picture(["one"], {2.0: [1.0]}),
        ["“one”, has 100 % at T = 2."],
    ),
    "draws_picture": (
        lambda: sampling_plots.draws_picture(["a", "b", "$a$", "b"], ["<s>", "<s>", "<s>"]),
        ["Seeded once: 3 different in 4 draws", "1 different in 3 draws, beginning with “<s>”"],
        lambda: sampling_plots.draws_picture(["a"], ["a", "b"]),
        ["Seeded once: 1 different in 1 draw;", "2 different in 2 draws"],
    ),
}
every_plot = pytest.mark.parametrize("name", PICTURES)


@functools.cache
def first(name: str) -> Picture:
    return PICTURES[name][0]()


@functools.cache
def second(name: str) -> Picture:
    return PICTURES[name][2]()


def written(picture: Picture) -> list[str]:
    """The words of a matplotlib SVG: drawn as outlines, but kept as comments."""
    return [html.unescape(words) for words in re.findall(r"<!-- (.*?) -->", picture.svg, re.S)]


def test_every_plot_is_tested() -> None:
    drawn = vars(cache_plots).keys() | vars(speed_plots).keys() | vars(sampling_plots).keys()
    assert PICTURES.keys() == {name for name in drawn if name.endswith("_picture")}


@every_plot
def test_plot_is_the_same_every_time(name: str) -> None:
    assert PICTURES[name][0]() == first(name)


@every_plot
def test_caption_has_the_numbers_of_its_own_data(name: str) -> None:
    one, says, other, says_too = first(name), PICTURES[name][1], second(name), PICTURES[name][3]
    for picture, parts in ((one, says), (other, says_too)):
        for part in parts:
            assert part in picture.caption
    assert one.caption != other.caption and one.png != other.png and one.svg != other.svg


@every_plot
def test_plot_is_svg_and_png_with_its_caption_in_it(name: str) -> None:
    for picture in (first(name), second(name)):
        assert ET.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
        with Image.open(io.BytesIO(picture.png)) as image:
            assert image.format == "PNG" and image.width <= 1300
        words = " ".join(" ".join(written(picture)).split())
        assert " ".join(picture.caption.replace("--", "- -").split()) in words


@every_plot
def test_no_number_is_written_as_a_formula(name: str) -> None:
    for picture in (first(name), second(name)):
        words = written(picture)
        assert words and not [w for w in words if "mathdefault" in w or "\\times" in w]


@every_plot
def test_no_text_is_smaller_than_nine_pixels(name: str) -> None:
    for picture in (first(name), second(name)):
        scales = [float(s) for s in re.findall(r"scale\(([\d.]+) -", picture.svg)]
        # matplotlib draws outlines of 100 units a letter height, in points: 100 dots are 72 points
        assert scales and min(scales) * 100 * 100 / 72 >= 9


def test_labels_are_written_literally() -> None:
    assert {"$big$", "tiny"} <= set(written(first("bytes_picture")))
    assert {"<script>", "$x$", "&amp;", "]]>"} <= set(written(first("positions_picture")))
    assert written(first("roofline_picture")).count("$prefill$") == 1
    assert {"<script>", "$x$", "&amp;"} <= set(written(first("temperature_picture")))
    assert written(first("draws_picture")).count("<s>") == 3


# -- single pictures ----------------------------------------------------------------------------


def test_filters_show_the_likeliest_first_and_renormalised() -> None:
    words = written(first("filters_picture"))
    assert [w for w in words if w in list("abcd")] == list("abcd")
    assert [w for w in words if w.endswith("0 %") and len(w) == 4] == [
        "40 %",
        "30 %",
        "20 %",
        "10 %",
    ]
    # b and a are kept: 0.3 and 0.4 of 0.7
    assert words.count("57 %") == words.count("43 %") == 1 and words.count("dropped") == 2


def test_filters_of_a_large_vocabulary_show_twelve_tokens() -> None:
    labels = [f"t{i}" for i in range(100)]
    picture = sampling_plots.filters_picture(labels, [0.01] * 100, {"all": [True] * 100})
    assert [w for w in written(picture) if w in labels] == labels[:12]


def test_skipped_and_repeated_positions_are_named() -> None:
    def words(wrong: list[int]) -> list[str]:
        return written(cache_plots.positions_picture([0, 1, 2, 3], wrong, WORDS, WORDS))

    assert "2 skipped" in words([0, 1, 3, 4]) and "again" not in words([0, 1, 3, 4])
    assert "2 to 8 skipped" in words([0, 1, 9, 10])
    assert "again" in words([0, 1, 1, 2])
    assert not [w for w in words([0, 1, 2, 3]) if "skipped" in w or w in ("again", "≠")]


def test_a_gap_takes_the_place_of_one_token() -> None:
    assert cache_plots._places([0, 1, 2]) == [0, 1, 2]
    assert cache_plots._places([0, 1, 9, 10, 10]) == [0, 1, 3, 4, 5]


def test_only_tokens_that_differ_are_marked() -> None:
    other = [*WORDS[:3], "else"]
    words = written(cache_plots.positions_picture(range(4), [0, 1, 3, 4], WORDS, other))
    assert words.count("≠") == 1
    assert words.count("decoded, from here on →") == 1


@pytest.mark.parametrize(
    ("no_cache", "where"),
    [([1.0, 4.0], [16.0]), ([3.0, 4.0], []), ([2.0, 2.0], []), ([1.0, 1.5], [])],
)
def test_crossing_is_where_the_lines_meet(no_cache: list[float], where: list[float]) -> None:
    lines = {"a": [(8, 2.0), (32, 2.0)], "b": [(8, no_cache[0]), (32, no_cache[1])]}
    assert [length for *_, length, _ in speed_plots.crossings(lines)] == pytest.approx(where)
    marks = [w for w in written(speed_plots.latency_picture(lines)) if w.startswith("equal at ")]
    assert marks == [f"equal at {n:.0f}" for n in where]


def test_noise_before_the_last_crossing_is_not_marked() -> None:
    lengths, b = (8, 16, 32, 64), (1.0, 3.0, 1.0, 4.0)
    lines = {"a": [(n, 2.0) for n in lengths], "b": list(zip(lengths, b, strict=True))}
    ((_, _, length, time),) = speed_plots.crossings(lines)
    assert length == pytest.approx(32 * 2**0.5) and time == pytest.approx(2.0)


def test_lines_that_were_measured_equal_cross_there() -> None:
    lines = {"a": [(8, 2.0), (16, 2.0), (32, 2.0)], "b": [(8, 1.0), (16, 2.0), (32, 9.0)]}
    ((_, _, length, time),) = speed_plots.crossings(lines)
    assert (length, time) == pytest.approx((16, 2.0))


def test_lines_of_other_lengths_cross_only_where_both_were_measured() -> None:
    assert not speed_plots.crossings({"a": [(8, 1.0), (16, 1.0)], "b": [(32, 2.0), (64, 0.5)]})


def test_latency_of_one_length_can_be_drawn() -> None:
    caption = speed_plots.latency_picture({"a": [(8, 1.0)], "b": [(8, 1.01)]}).caption
    assert caption == "Measured here, ms per token: a 1 at 8 tokens, b 1 at 8 tokens."


def test_virtual_clock_says_its_cost() -> None:
    words = written(first("latency_picture"))
    assert {"on a virtual clock (1 unit per token run)", "measured here"} <= set(words)


def test_names_at_the_roof_do_not_cover_each_other() -> None:
    points = [(f"point {i}", 1.0 + i / 50, 1e9 * (1 + i / 50)) for i in range(4)]
    svg = speed_plots.roofline_picture(1e10, 1e11, points).svg
    found = re.findall(r"<!-- (point \d) -->\s*<g [^>]*translate\(([\d.]+) ([\d.]+)\)", svg)
    boxes = [(float(x), float(y)) for _, x, y in found]
    assert len(boxes) == 4
    for i, (x, y) in enumerate(boxes):
        for other_x, other_y in boxes[:i]:
            assert abs(x - other_x) > 36 or abs(y - other_y) > 9


PROB = [0.5, 0.5]
REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "work of other lengths": (lambda: cache_plots.work_picture([1, 2], [1], [1], [1]), "as many"),
    "no work": (lambda: cache_plots.work_picture([], [], [], []), "one number"),
    "no bytes": (lambda: cache_plots.bytes_picture([]), "at least one row"),
    "overfull": (lambda: cache_plots.fill_picture([("A", 5, 4)]), "'A', 5, 4"),
    "no rows": (lambda: cache_plots.fill_picture([]), "each row"),
    "positions": (lambda: cache_plots.positions_picture([0], [0, 1], ["a"], ["a"]), "as many"),
    "too many tokens": (
        lambda: cache_plots.positions_picture(range(41), range(41), ["a"] * 41, ["a"] * 41),
        "41 tokens are too many.*last 40",
    ),
    "no lines": (lambda: speed_plots.latency_picture({}), "at least one line"),
    "empty line": (lambda: speed_plots.latency_picture({"a": []}), "'a'.*above 0"),
    "time of 0": (lambda: speed_plots.latency_picture({"a": [(1, 0.0)]}), "'a'.*above 0"),
    "no points": (lambda: speed_plots.roofline_picture(1, 1, []), "at least one point"),
    "no bandwidth": (lambda: speed_plots.roofline_picture(0, 1, [("a", 1, 1)]), "above 0"),
    "half a vocabulary": (
        lambda: sampling_plots.filters_picture(["a", "b"], [0.5, 0.25], {"x": [True, True]}),
        "add up to 0.750",
    ),
    "nothing kept": (
        lambda: sampling_plots.filters_picture(["a", "b"], PROB, {"x": [False, False]}),
        "'x' keeps no token",
    ),
    "other vocabulary": (
        lambda: sampling_plots.filters_picture(["a", "b"], PROB, {"x": [True]}),
        "2 labels, but 1 values in 'x'",
    ),
    "no temperature": (lambda: sampling_plots.temperature_picture(["a"], {}), "one temperature"),
    "cold": (
        lambda: sampling_plots.temperature_picture(["a"], {0.5: PROB}),
        "1 labels, but 2 values in 'T = 0.5'",
    ),
    "no draws": (lambda: sampling_plots.draws_picture([], ["a"]), "got 0 and 1"),
    "too many draws": (lambda: sampling_plots.draws_picture(["a"] * 33, ["a"]), "1 to 32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()
