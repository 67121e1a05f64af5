"""Introduced in notebook 04. Is a context shift a fresh run? Measured gaps in, Picture out.

Every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from tutorial_engine.learn.shift_lab import ShiftGap
from tutorial_engine.viz.cache_steps import tokens
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.speed_plots import log_marks
from tutorial_engine.viz.style import (
    BLUE,
    INK,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    finish,
    house_style,
    new_figure,
)

TOLERANCE = 1e-5  # in one layer a shift is exact up to rounding: fp32, positions in the tens
FLOOR = 1e-3  # of the tolerance: where bars begin, and where a difference of 0 is written
BARS: dict[bool, dict[str, Any]] = {  # is it within the tolerance?
    True: {"facecolor": BLUE, "edgecolor": BLUE},
    False: {"facecolor": PAPER, "edgecolor": RED, "hatch": "////"},
}


def shift_picture(
    gaps: Sequence[ShiftGap], discard: int | None = None, tolerance: float = TOLERANCE
) -> Picture:
    """Largest logit difference of each model, and of the deepest one K and V layer by layer.

    `discard`: the tokens that were forgotten, if the caption is to say it.
    """
    if not gaps:
        raise ValueError("there is nothing to draw: give at least one ShiftGap")
    deepest = max(gaps, key=lambda gap: gap.num_layers)
    most = max(max(gap.logits, *gap.keys, *gap.values) for gap in gaps)
    low, high = FLOOR * tolerance, 30 * max(most, tolerance)
    with house_style():
        figure = new_figure(10, 3.7)
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.5], sharey=True)
        _bars(left, range(len(gaps)), [gap.logits for gap in gaps], 0.55, tolerance)
        left.set_xticks(range(len(gaps)), [layers(gap.num_layers) for gap in gaps])
        log_marks(left, low, high, PLAIN)
        left.set_ylabel("largest difference")
        left.set_title("logits of the next token")
        places = range(deepest.num_layers)
        for kind, (name, numbers) in enumerate({"K": deepest.keys, "V": deepest.values}.items()):
            at = [layer + 0.42 * kind - 0.21 for layer in places]
            _bars(right, at, numbers, 0.36, tolerance)
            for x in at:
                right.text(x, low * 1.5, name, ha="center", fontweight="bold", **_PLATE)
        right.set_xticks(list(places), [f"layer {layer}" for layer in places])
        right.set_title(f"K and V that stayed, in {layers(deepest.num_layers)}")
        for ax in (left, right):
            ax.minorticks_off()
            ax.margins(x=0.14)
            ax.axhline(tolerance, color=INK, linewidth=1.4, linestyle="--")
        where = right.get_yaxis_transform()
        words = f"tolerance\n{shown(tolerance)}"
        right.text(1.015, tolerance, words, va="center", fontsize=9.5, transform=where)
        return finish(figure, _caption(gaps, deepest, discard, tolerance))


_PLATE: dict[str, Any] = {
    "fontsize": 10,
    "bbox": {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": QUIET},
}


def _bars(
    ax: Axes, at: Sequence[float], numbers: Sequence[float], width: float, tolerance: float
) -> None:
    """Bars on a log axis with their numbers on top; a 0 has no bar."""
    low = FLOOR * tolerance
    for x, number in zip(at, numbers, strict=True):
        top = max(number, low)
        ax.bar(x, top - low, width, bottom=low, **BARS[number <= tolerance])
        words = shown(number)
        # a 0 stands above the letter that names its place
        ax.text(x, top * (1.6 if number else 9), words, ha="center", fontsize=9.5)


def _caption(
    gaps: Sequence[ShiftGap], deepest: ShiftGap, discard: int | None, tolerance: float
) -> str:
    """Who is within the tolerance, who is not, and where the difference begins."""
    what = "" if discard is None else f" after forgetting {tokens(discard)}"
    told = []
    for gap in gaps:
        same = gap.logits <= tolerance  # how far within is rounding, and differs between machines
        gap_words = "agree" if same else f"are off by up to {shown(gap.logits)}"
        told.append(f"in {layers(gap.num_layers)} the logits {gap_words}")
    both = zip(deepest.keys, deepest.values, strict=True)
    wrong = [i for i, pair in enumerate(both) if max(pair) > tolerance]
    where = f"K and V differ from layer {wrong[0]} on" if wrong else "K and V agree everywhere"
    where = f"with {layers(deepest.num_layers)}, {where} (tolerance {shown(tolerance)})"
    return f"A context shift{what} against a fresh run: {', '.join(told)}; {where}."


def shown(number: float) -> str:
    """1.1, 0.04, 5e-07, 0: what is left of a difference in a picture."""
    return f"{number:.2g}" if number >= 0.01 else f"{number:.0e}" if number else "0"


def layers(n: int) -> str:
    """`1 layer`, `3 layers`."""
    return f"{n} layer{'s' * (n != 1)}"
