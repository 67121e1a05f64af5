"""The plots: deterministic, no formula where text is meant, captions that agree with the data."""

import functools
import html
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser
from PIL import Image

from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.rope import inverse_frequencies
from tutorial_engine.viz import plots
from tutorial_engine.viz import rope_plots as rope
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import house_style, new_figure

NASTY = ["<script>", "$x$", "&amp;", "]]>", "😀", "<s>", "$\\frac{1}{2}$", '"--"']


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
    return plots.heads_picture(causal(2, 3, 5, 5), scores, NASTY[:5])


def attention(best: int) -> Picture:
    weights = causal(8, 8)
    weights[-1] = 0.05
    weights[-1, best] = 0.65
    return plots.attention_picture(weights, NASTY, "layer $0$, head <b>1</b>")


def distances(offset: float) -> Picture:
    base = [float(np.cos(d / 3)) for d in range(10)]
    return rope.distance_picture(
        range(10), {"key at n = 0": base, "key at n = 50": [s + offset for s in base]}
    )


# Function -> two pictures of different data, and what each caption must say about its own.
PICTURES: dict[str, tuple[Callable[[], Picture], list[str], Callable[[], Picture], list[str]]] = {
    "mask_picture": (
        lambda: plots.mask_picture({"prefill": causal_mask(4, 4), "chunk": causal_mask(3, 7)}),
        ["prefill: 10 of 16 pairs", "chunk: 18 of 21 pairs"],
        lambda: plots.mask_picture({"decode": causal_mask(1, 5), "window": causal_mask(4, 4, 2)}),
        ["decode: 5 of 5 pairs", "window: 7 of 16 pairs"],
    ),
    "heads_picture": (
        lambda: heads((0, 2)),
        ["all 6 heads over 5 tokens", "layer 0, head 2 with 0.87", "the 1 heads that"],
        lambda: heads((1, 0)),
        ["all 6 heads over 5 tokens", "layer 1, head 0 with 0.87", "the 1 heads that"],
    ),
    "attention_picture": (
        lambda: attention(2),
        ['query 7 “"--"” gives 0.65', "key 2 “&amp;”"],
        lambda: attention(0),
        ['query 7 “"--"” gives 0.65', "key 0 “<script>”"],
    ),
    "clocks_picture": (
        lambda: rope.clocks_picture(inverse_frequencies(32, 10000.0), range(8)),
        ["pair 0 by 1 rad", "pair 15 by 0.00018 rad", "at position 7", "1.11 and 0.0002 times"],
        lambda: rope.clocks_picture(inverse_frequencies(16, 100.0), range(4)),
        ["pair 0 by 1 rad", "pair 7 by 0.01778 rad", "at position 3", "0.48 and 0.0085 times"],
    ),
    "distance_picture": (
        lambda: distances(0.0),
        ["2 different places", "lie on each other"],
        lambda: distances(0.5),
        ["2 different places", "DIFFER"],
    ),
    "variance_picture": (
        lambda: plots.variance_picture([4, 64, 256], [4.1, 63.6, 254.0], [1.03, 0.99, 0.98]),
        ["From head_dim 4 to 256", "from 4 to 254", "between 0.98 and 1.03"],
        lambda: plots.variance_picture([8, 32], [7.8, 33.0], [0.91, 1.21]),
        ["From head_dim 8 to 32", "from 8 to 33", "between 0.91 and 1.21"],
    ),
    "dtype_picture": (
        lambda: rope.dtype_picture([1, 81, 161], {"float32": [1e-7, 1e-6, 2e-5], "x": [1, 2, 3]}),
        ["at position 161", "float32 2e-05", "x 3"],
        lambda: rope.dtype_picture([1, 2], {"float16": [0.02, 0.03], "bfloat16": [0.04, 0.05]}),
        ["at position 2", "float16 0.03", "bfloat16 0.05"],
    ),
    "training_picture": (
        lambda: plots.training_picture(curve(jump_at=3, last_loss=1.5)),
        ["step 25 and step 75", "0.03 to 0.90", "ends at 1.50", "on stories at -1.00"],
        lambda: plots.training_picture(curve(jump_at=6, last_loss=0.25)),
        ["step 100 and step 150", "0.03 to 0.90", "ends at 0.25", "on stories at -1.00"],
    ),
    "cost_picture": (
        lambda: plots.cost_picture([10, 11, 12], prompt_tokens=10),
        ["3 new tokens cost 33 token runs", "21 (64 %) repeat"],
        lambda: plots.cost_picture([4, 5], prompt_tokens=4),
        ["2 new tokens cost 9 token runs", "4 (44 %) repeat"],
    ),
}
every_plot = pytest.mark.parametrize("name", PICTURES)


@functools.cache
def first(name: str) -> Picture:
    return PICTURES[name][0]()


@functools.cache
def second(name: str) -> Picture:
    return PICTURES[name][2]()


def written(svg: str) -> list[str]:
    """The words of a matplotlib SVG: drawn as outlines, but kept as comments."""
    return [html.unescape(words) for words in re.findall(r"<!-- (.*?) -->", svg, re.S)]


def test_every_plot_is_tested() -> None:
    drawn = vars(plots).keys() | vars(rope).keys()
    assert PICTURES.keys() == {name for name in drawn if name.endswith("_picture")}


@every_plot
def test_plot_is_the_same_every_time(name: str) -> None:
    assert PICTURES[name][0]() == first(name)


@every_plot
def test_plot_does_not_depend_on_the_readers_settings(name: str) -> None:
    make = PICTURES[name][0]
    with matplotlib.rc_context({"font.size": 22, "axes.facecolor": "black", "lines.linewidth": 9}):
        theirs = make()
        assert matplotlib.rcParams["font.size"] == 22  # and leaves them alone
    assert theirs.caption == first(name).caption
    with Image.open(io.BytesIO(theirs.png)) as image:
        assert image.convert("RGB").getpixel((2, 2)) >= (253, 253, 253)


@every_plot
def test_caption_has_the_numbers_of_its_own_data(name: str) -> None:
    one, says, other, says_too = first(name), PICTURES[name][1], second(name), PICTURES[name][3]
    for picture, parts in ((one, says), (other, says_too)):
        for part in parts:
            assert part in picture.caption
    assert one.caption != other.caption and one.png != other.png and one.svg != other.svg


@every_plot
def test_plot_is_svg_and_png_with_its_caption_in_it(name: str) -> None:
    picture = first(name)
    assert ET.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
    with Image.open(io.BytesIO(picture.png)) as image:
        assert image.format == "PNG" and len(set(image.convert("RGB").getdata())) > 3
    words = " ".join(written(picture.svg)).split()
    assert " ".join(picture.caption.replace("--", "- -").split()) in " ".join(words)


@every_plot
def test_no_number_is_written_as_a_formula(name: str) -> None:
    for picture in (first(name), second(name)):
        words = written(picture.svg)
        assert words
        assert not [word for word in words if "mathdefault" in word or "\\times" in word]


def test_a_narrow_range_of_errors_is_labelled_with_plain_numbers() -> None:
    words = written(rope.dtype_picture([1, 2], {"a": [1.2, 1.4], "b": [2.0, 3.5]}).svg)
    assert not [word for word in words if "$" in word]


def test_tokens_with_dollars_and_markup_are_written_literally() -> None:
    words = written(first("attention_picture").svg)
    for token in ("<script>", "$x$", "&amp;", "]]>", "<s>", "$\\frac{1}{2}$", "😀"):
        assert words.count(token) == 2, token  # one on each axis
    assert "layer $0$, head <b>1</b>" in words


def test_no_text_of_a_prompt_is_read_as_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("parsed as a formula")

    monkeypatch.setattr(MathTextParser, "parse", refuse)
    assert attention(2) == first("attention_picture")
    with house_style(), matplotlib.rc_context({"text.parse_math": True}):
        figure = new_figure(3, 3)
        figure.text(0, 0, "$x$")
        with pytest.raises(AssertionError, match="parsed as a formula"):  # the trap is armed
            figure.savefig(io.BytesIO(), format="png")


def test_axis_marks_of_dtypes_and_variances_are_plain_numbers() -> None:
    assert {"1", "0.01", "1e-04"} <= set(written(first("dtype_picture").svg))
    assert {"1", "10", "100", "4", "64", "256"} <= set(written(first("variance_picture").svg))


def test_the_formula_check_sees_a_formula() -> None:
    with house_style():
        figure = new_figure(3, 3)
        ax = figure.subplots()
        ax.set_yscale("log")
        ax.plot([1, 2], [1, 1000])
        out = io.StringIO()
        figure.savefig(out, format="svg")
    assert any("mathdefault" in word for word in written(out.getvalue()))


def test_curve_that_ships_can_be_drawn() -> None:
    points = json.loads((TINY.parent / "curve.json").read_text())
    caption = plots.training_picture(points).caption
    assert f"ends at {points[-1]['repeat_loss']:.2f}" in caption


def test_curve_without_a_jump_can_be_drawn() -> None:
    flat = [{"step": i, "text_loss": 6.0, "repeat_loss": 6.0, "induction": 0.1} for i in range(3)]
    assert "0.10" in plots.training_picture(flat).caption


@pytest.mark.parametrize("points", [1, 2])
def test_the_shortest_curves_can_be_drawn(points: int) -> None:
    caption = plots.training_picture(curve(jump_at=1, last_loss=1.0)[:points]).caption
    assert "ends at" in caption


def test_curve_that_begins_high_names_steps_in_order() -> None:
    caption = plots.training_picture(curve(jump_at=1, last_loss=1.0)).caption
    before, after = (int(n) for n in re.findall(r"step (\d+)", caption)[:2])
    assert before < after


def test_more_than_three_curves_have_visible_lines() -> None:
    names = [f"key at n = {n}" for n in range(4)]
    line = list(np.linspace(0, 1, 10))
    picture = rope.distance_picture(range(10), {name: line for name in names})
    assert "stroke-width: -" not in picture.svg
    assert all(name in written(picture.svg) for name in names)
