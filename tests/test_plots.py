"""Plots of notebooks 01 and 02: captions agree with the data, text is text, files are stable."""

import functools
import io
import json
import re
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser
from PIL import Image
from traces import check_plot, plot_words

from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.rope import inverse_frequencies
from tutorial_engine.viz import attention_plots, cache_plots, sampling_plots
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import house_style, new_figure

NASTY = ["<script>", "$x$", "&amp;", "]]>", "😀", "<s>", "$\\frac{1}{2}$", '"--"']
WORDS = "Once ·upon ·a ·time".split()


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


def causal(*shape: int) -> torch.Tensor:
    """Weights as attention makes them: no future, rows that add up to one."""
    scores = draw(*shape).masked_fill(~causal_mask(shape[-1], shape[-1]), float("-inf"))
    return (4 * scores).softmax(-1)


def curve(jump_at: int, last_loss: float) -> list[dict[str, float]]:
    score = [0.03 if i < jump_at else 0.9 for i in range(8)]
    return [
        {"step": 25 * i, "text_loss": 6.0 - i, "repeat_loss": last_loss + 7 - i, "induction": s}
        for i, s in enumerate(score)
    ]


def heads(best: tuple[int, int]) -> Picture:
    scores = 0.3 * draw(2, 3)
    scores[best] = 0.87
    return attention_plots.heads_picture(causal(2, 3, 5, 5), scores, NASTY[:5])


def attention(best: int) -> Picture:
    weights = causal(8, 8)
    weights[-1] = 0.05
    weights[-1, best] = 0.65
    return attention_plots.attention_picture(weights, NASTY, "layer $0$, head <b>1</b>")


def masks(**pairs: Sequence[int]) -> Picture:
    return attention_plots.mask_picture({name: causal_mask(*pair) for name, pair in pairs.items()})


def distances(offset: float, lines: int = 2) -> Picture:
    base = [float(np.cos(d / 3)) for d in range(10)]
    curves = {f"key at n = {50 * i}": [s + i * offset for s in base] for i in range(lines)}
    return attention_plots.distance_picture(range(10), curves)


def latency(no_cache: Sequence[float], virtual: bool) -> Picture:
    lines = {
        "with cache": [(8, 2.0), (32, 2.0)],
        "no cache": [*zip((8, 32), no_cache, strict=True)],
    }
    units = {"with cache": [(8, 1.0), (32, 1.0)], "no cache": [(8, 8.0), (32, 32.0)]}
    return cache_plots.latency_picture(lines, units if virtual else None)


# name -> a picture, and what its caption must say about its own data; two of each function
PICTURES: dict[str, tuple[Callable[[], Picture], list[str]]] = {
    "mask_picture": (
        lambda: masks(prefill=(4, 4), chunk=(3, 7)),
        ["prefill: 10 of 16 pairs", "chunk: 18 of 21 pairs"],
    ),
    "mask_picture 2": (
        lambda: masks(decode=(1, 5), window=(4, 4, 2)),
        ["decode: 5 of 5 pairs", "window: 7 of 16 pairs"],
    ),
    "heads_picture": (
        lambda: heads((0, 2)),
        ["all 6 heads over 5 tokens", "layer 0, head 2 with 0.87", "Framed: 1 head with"],
    ),
    "heads_picture 2": (lambda: heads((1, 0)), ["layer 1, head 0 with 0.87"]),
    "attention_picture": (
        lambda: attention(2),
        ['query 7 “"--"” gives 0.65', "key 2 “&amp;”"],
    ),
    "attention_picture 2": (lambda: attention(0), ["gives 0.65", "key 0 “<script>”"]),
    "clocks_picture": (
        lambda: attention_plots.clocks_picture(inverse_frequencies(32, 10000.0), range(8)),
        ["at positions 0 and 6: its hands are 0.28 rad apart; those of pair 15 are 0.0011 rad"],
    ),
    "clocks_picture 2": (
        lambda: attention_plots.clocks_picture(inverse_frequencies(16, 100.0), range(4)),
        ["at positions 0 and 1: its hands are 1.00 rad apart; those of pair 7 are 0.018 rad"],
    ),
    "distance_picture": (lambda: distances(0.0), ["2 different places", "lie on each other"]),
    "distance_picture 2": (lambda: distances(0.5, 4), ["4 different places", "DIFFER"]),
    "variance_picture": (
        lambda: attention_plots.variance_picture([4, 64, 256], [4.1, 63.6, 254.0], [1.0, 1.0, 0.9]),
        ["From head_dim 4 to 256", "from 4 to 254", "between 0.90 and 1.00"],
    ),
    "variance_picture 2": (
        lambda: attention_plots.variance_picture([8, 32], [7.8, 33.0], [0.91, 1.21]),
        ["From head_dim 8 to 32", "from 8 to 33", "between 0.91 and 1.21"],
    ),
    "training_picture": (
        lambda: attention_plots.training_picture(curve(jump_at=3, last_loss=1.5)),
        [
            "from 6.00 to 0.00 in the first 150 steps and ends at -1.00",
            "Between step 25 and step 75 the best head's induction score goes from 0.03 to 0.90",
            "8.50 at the start, goes from 7.50 to 5.50; it ends at 1.50",
            "In every step 6 of the 32 rows are random tokens",
        ],
    ),
    "training_picture 2": (
        lambda: attention_plots.training_picture(curve(jump_at=6, last_loss=0.25)),
        ["step 100 and step 150", "ends at 0.25"],
    ),
    "cost_picture": (
        lambda: attention_plots.cost_picture([10, 11, 12], prompt_tokens=10),
        ["3 new tokens cost 33 token runs", "21 (64 %) repeat"],
    ),
    "cost_picture 2": (
        lambda: attention_plots.cost_picture([4, 5], prompt_tokens=4),
        ["2 new tokens cost 9 token runs", "4 (44 %) repeat"],
    ),
    "work_picture": (
        lambda: cache_plots.work_picture(
            [10, 11, 12], [10, 1, 1], [1e7, 2e7, 3e7], [1e7, 1e6, 1e6]
        ),
        ["3 new tokens", "33 tokens run, with it 12, a factor of 2.8", "60 MFLOP against 12 MFLOP"],
    ),
    "work_picture 2": (
        lambda: cache_plots.work_picture([4], [4], [8e9], [8e9]),
        ["1 new tokens", "4 tokens run, with it 4, a factor of 1.0", "8 GFLOP", "a factor of 1.0."],
    ),
    "bytes_picture": (
        lambda: cache_plots.bytes_picture([("tiny", 2048, 6144), ("$big$", 114688, None)]),
        ["tiny: 2 KiB instead of 6 KiB;", "$big$: 112 KiB."],
    ),
    "bytes_picture 2": (
        lambda: cache_plots.bytes_picture([("half", 512, 512)]),
        ["half: 512 bytes instead of 512 bytes."],
    ),
    "positions_picture": (
        lambda: cache_plots.positions_picture([0, 1, 2, 3], [0, 1, 3, 4], WORDS, NASTY[:4]),
        [
            "From position 2 on the wrong positions are off by +1 (3 instead of 2); 2 of 2 decoded",
            f"“{NASTY[2]}” instead of “{WORDS[2]}”",
        ],
    ),
    "positions_picture 2": (
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
    ),
    "latency_picture 2": (
        lambda: latency([3.0, 4.0], virtual=False),
        ["Measured here", "no cache goes from 3 at 8 tokens to 4 at 32."],
    ),
    "roofline_picture": (
        lambda: cache_plots.roofline_picture(
            1e10, 1e11, [("decode", 0.5, 2.5e9), ("$prefill$", 40.0, 8e10)]
        ),
        [
            "The ridge of 100 GFLOP/s and 10 GB/s is at 10 FLOP/byte",
            "decode (0.5 FLOP/byte) lies left of it, limited by memory, at 50 % of the roof",
            "$prefill$ (40 FLOP/byte) lies right of it, limited by arithmetic, at 80 % of the roof",
        ],
    ),
    "roofline_picture 2": (
        lambda: cache_plots.roofline_picture(2e12, 3e12, [("at the ridge", 1.5, 3e12)]),
        ["3 TFLOP/s and 2 TB/s is at 1.5 FLOP/byte", "lies right of it", "at 100 % of the roof"],
    ),
    "draws_picture": (
        lambda: sampling_plots.draws_picture(["a", "b", "$a$", "b"], ["<s>", "<s>", "<s>"]),
        ["Seeded once: 3 different in 4 draws", "1 different in 3 draws, beginning with “<s>”"],
    ),
    "draws_picture 2": (
        lambda: sampling_plots.draws_picture(["a"], ["a", "b"]),
        ["Seeded once: 1 different in 1 draw;", "2 different in 2 draws"],
    ),
    "margins_picture": (
        lambda: sampling_plots.margins_picture([0.01, 0.2, 4, 5], {"fp32": 1e-6, "bf16": 0.1}),
        ["Of 4 margins none are below one step of fp32 and 1 is below one step of bf16."],
    ),
    "margins_picture 2": (
        lambda: sampling_plots.margins_picture([3e-7, 1e-6], {"bf16": 0.1}),
        ["Of 2 margins 2 are below one step of bf16."],
    ),
}


@functools.cache
def drawn(name: str) -> Picture:
    return check_plot(PICTURES[name][0])


@functools.cache
def words(name: str) -> list[str]:
    return plot_words(drawn(name))


def test_every_plot_is_drawn_from_two_sets_of_data() -> None:
    for module in (attention_plots, cache_plots, sampling_plots):
        for name in vars(module):
            if name.endswith("_picture"):
                one, other = drawn(name), drawn(f"{name} 2")
                assert one.caption != other.caption and one.png != other.png


@pytest.mark.parametrize("name", PICTURES)
def test_plot_is_sound_and_its_caption_has_the_numbers_of_its_own_data(name: str) -> None:
    for part in PICTURES[name][1]:
        assert part in drawn(name).caption


@pytest.mark.parametrize("name", ["mask_picture", "cost_picture", "bytes_picture"])
def test_plot_does_not_depend_on_the_readers_settings(name: str) -> None:
    with matplotlib.rc_context({"font.size": 22, "axes.facecolor": "black", "lines.linewidth": 9}):
        theirs = PICTURES[name][0]()
        assert matplotlib.rcParams["font.size"] == 22  # and leaves them alone
    with Image.open(io.BytesIO(theirs.png)) as image:
        assert image.convert("RGB").getpixel((2, 2)) >= (253, 253, 253)


# -- text is text ---------------------------------------------------------------------------------


def test_tokens_and_names_are_written_literally() -> None:
    both_axes = words("attention_picture")
    for token in ("<script>", "$x$", "&amp;", "]]>", "<s>", "$\\frac{1}{2}$", "😀"):
        assert both_axes.count(token) == 2, token
    assert "layer $0$, head <b>1</b>" in both_axes
    assert {"$big$", "tiny"} <= set(words("bytes_picture"))
    assert {"<script>", "$x$", "&amp;", "]]>"} <= set(words("positions_picture"))
    assert words("roofline_picture").count("$prefill$") == 1
    assert words("draws_picture").count("<s>") == 3


def test_no_text_of_a_prompt_is_read_as_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("parsed as a formula")

    monkeypatch.setattr(MathTextParser, "parse", refuse)
    assert attention(2) == drawn("attention_picture")
    with house_style(), matplotlib.rc_context({"text.parse_math": True}):
        figure = new_figure(3, 3)
        figure.text(0, 0, "$x$")
        with pytest.raises(AssertionError, match="parsed as a formula"):  # the trap is armed
            figure.savefig(io.BytesIO(), format="png")


def test_the_check_of_plots_sees_a_formula() -> None:
    with house_style():
        figure = new_figure(3, 3)
        figure.subplots().plot([1, 2], [1, 1000])
        figure.axes[0].set_yscale("log")
        out = io.StringIO()
        figure.savefig(out, format="svg")
    assert any("mathdefault" in word for word in plot_words(Picture(out.getvalue(), b"", "")))


def test_axis_marks_are_plain_numbers() -> None:
    assert {"1", "10", "100", "4", "64", "256"} <= set(words("variance_picture"))


# -- single pictures ------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 2, 3])
def test_curves_that_ship_do_not_jump_or_are_short_can_be_drawn(points: int) -> None:
    shipped = json.loads((TINY.parent / "curve.json").read_text())
    picture = attention_plots.training_picture(shipped, vocab_size=100)
    assert "pure guessing: 4.61 (left axis)" in plot_words(picture)  # log 100
    caption = picture.caption
    assert f"ends at {shipped[-1]['repeat_loss']:.2f}" in caption
    short = [{"step": i, "text_loss": 6.0, "repeat_loss": 6.0, "induction": 0.1} for i in range(3)]
    caption = attention_plots.training_picture(short[:points]).caption
    before, after = (int(n) for n in re.findall(r"step (\d+)", caption)[:2])
    assert "0.10" in caption and before <= after


def test_more_than_three_curves_have_visible_lines() -> None:
    assert "stroke-width: -" not in drawn("distance_picture 2").svg
    assert {f"key at n = {50 * i}" for i in range(4)} <= set(words("distance_picture 2"))


def test_skipped_and_repeated_positions_are_named_and_only_tokens_that_differ_marked() -> None:
    def said(wrong: list[int], labels: Sequence[str] = WORDS) -> list[str]:
        return plot_words(cache_plots.positions_picture([0, 1, 2, 3], wrong, WORDS, labels))

    assert "2 skipped" in said([0, 1, 3, 4]) and "again" not in said([0, 1, 3, 4])
    assert "2 to 8 skipped" in said([0, 1, 9, 10])
    assert "again" in said([0, 1, 1, 2])
    assert not [w for w in said([0, 1, 2, 3]) if "skipped" in w or w in ("again", "≠")]
    other = said([0, 1, 3, 4], [*WORDS[:3], "else"])
    assert other.count("≠") == 2, "in both rows"
    assert other.count("decoded, from here on →") == 1


A = [(8, 2.0), (16, 2.0), (32, 2.0), (64, 2.0)]
CROSSINGS = {  # the other line -> where it crosses A for the last time
    "between": ([(8, 1.0), (32, 4.0)], 16),
    "never": ([(8, 3.0), (32, 4.0)], None),
    "equal all along": ([(8, 2.0), (32, 2.0)], None),
    "in the noise": ([(8, 1.95), (16, 2.05), (32, 9.0)], None),
    "after the noise": ([(8, 1.0), (16, 2.05), (32, 4.0)], 16),
    "twice": ([(8, 1.0), (16, 3.0), (32, 1.0), (64, 4.0)], 32 * 2**0.5),
    "where it was measured equal": ([(8, 1.0), (16, 2.0), (32, 9.0)], 16),
    "no length in common": ([(128, 3.0), (256, 0.5)], None),
}


@pytest.mark.parametrize("what", CROSSINGS)
def test_crossing_is_where_the_lines_meet_last(what: str) -> None:
    line, where = CROSSINGS[what]
    lines = {"a": A, "b": line}
    found = [(length, time) for *_, length, time in cache_plots.crossings(lines)]
    assert found == ([] if where is None else [pytest.approx((where, 2.0))])
    marks = [w for w in plot_words(cache_plots.latency_picture(lines)) if "equal at" in w]
    assert [m for m in marks if m.startswith("equal")] == [f"equal at {n:.0f}" for n, _ in found]


def test_latency_says_its_cost_and_that_its_axis_is_logarithmic() -> None:
    caption = cache_plots.latency_picture({"a": [(8, 1.0)], "b": [(8, 1.01)]}).caption
    assert caption == (
        "Measured here, ms per token: a 1 at 8 tokens, b 1 at 8 tokens, up to 8 tokens a and b "
        "take about the same time."
    )
    said = set(words("latency_picture"))
    assert {"on a virtual clock (1 unit per token run)", "measured here"} <= said
    assert "context length (tokens), logarithmic" in said


def test_names_at_the_roof_do_not_cover_each_other() -> None:
    points = [(f"point {i}", 1.0 + i / 50, 1e9 * (1 + i / 50)) for i in range(4)]
    svg = cache_plots.roofline_picture(1e10, 1e11, points).svg
    found = re.findall(r"<!-- (point \d) -->\s*<g [^>]*translate\(([\d.]+) ([\d.]+)\)", svg)
    boxes = [(float(x), float(y)) for _, x, y in found]
    assert len(boxes) == 4
    for i, (x, y) in enumerate(boxes):
        for other_x, other_y in boxes[:i]:
            assert abs(x - other_x) > 36 or abs(y - other_y) > 9


REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "work of other lengths": (lambda: cache_plots.work_picture([1, 2], [1], [1], [1]), "as many"),
    "no work": (lambda: cache_plots.work_picture([], [], [], []), "one number"),
    "no bytes": (lambda: cache_plots.bytes_picture([]), "at least one row"),
    "positions": (lambda: cache_plots.positions_picture([0], [0, 1], ["a"], ["a"]), "as many"),
    "too many tokens": (
        lambda: cache_plots.positions_picture(range(41), range(41), ["a"] * 41, ["a"] * 41),
        "41 tokens are too many.*last 40",
    ),
    "no lines": (lambda: cache_plots.latency_picture({}), "at least one line"),
    "empty line": (lambda: cache_plots.latency_picture({"a": []}), "'a'.*above 0"),
    "time of 0": (lambda: cache_plots.latency_picture({"a": [(1, 0.0)]}), "'a'.*above 0"),
    "no points": (lambda: cache_plots.roofline_picture(1, 1, []), "at least one point"),
    "no bandwidth": (lambda: cache_plots.roofline_picture(0, 1, [("a", 1, 1)]), "above 0"),
    "margin of 0": (lambda: sampling_plots.margins_picture([1, 0], {"a": 1}), "above 0"),
    "no margins": (lambda: sampling_plots.margins_picture([], {"a": 1}), "at least one margin"),
    "no draws": (lambda: sampling_plots.draws_picture([], ["a"]), "got 0 and 1"),
    "too many draws": (lambda: sampling_plots.draws_picture(["a"] * 33, ["a"]), "1 to 32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()
