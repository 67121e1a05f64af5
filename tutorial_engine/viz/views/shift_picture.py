"""What a shift costs: differences of logits, and of K and V layer by layer.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from tutorial_engine.lab.shift import ShiftGap
from tutorial_engine.viz.drawing.charts import HATCH, log_marks, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    BLUE,
    INK,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    finish,
    house_style,
)
from tutorial_engine.viz.words import tokens

TOLERANCE = 1e-5  # in one layer a shift is exact up to rounding: fp32, positions in the tens
FLOOR = 1e-3  # of the tolerance: where bars begin, and where a difference of 0 is written


# -- the context shift ----------------------------------------------------------------------------


@house_style()
def shift_picture(gaps: Mapping[str, ShiftGap], discard: int) -> Picture:
    """Largest logit difference of each model, and of the last one K and V layer by layer.

    `gaps`: by what the model is called. `discard`: the tokens that were forgotten.
    """
    name, last = list(gaps.items())[-1]
    largest = max(max(gap.logits, *gap.keys, *gap.values) for gap in gaps.values())
    low, high = FLOOR * TOLERANCE, 60 * max(largest, TOLERANCE)
    figure, (left, right) = panels(10, 3.9, columns=2, width_ratios=[1, 1.5], sharey=True)
    for x, gap in enumerate(gaps.values()):
        _bar(left, x, gap.logits, 0.55)
    left.set_xticks(range(len(gaps)), [each.replace(", ", ",\n") for each in gaps])
    log_marks(left, low, high, PLAIN)
    left.set(ylabel="largest difference, log scale", title="logits of the next token")
    plate = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": QUIET}
    named: dict[str, Any] = {"ha": "center", "fontweight": "bold", "fontsize": 10, "bbox": plate}
    for layer, pair in enumerate(zip(last.keys, last.values, strict=True)):
        for at, kind, number in zip((layer - 0.21, layer + 0.21), "KV", pair, strict=True):
            _bar(right, at, number, 0.36)
            right.text(at, low * 1.5, kind, **named)
    layers = range(last.num_layers)
    right.set_xticks(layers, [f"layer {layer}" for layer in layers])
    right.set_title(f"K and V of the tokens that stayed: {name}")
    for ax in (left, right):
        ax.minorticks_off()
        ax.margins(x=0.14)
        ax.axhline(TOLERANCE, color=INK, linewidth=1.4, linestyle="--")
    words, where = f"tolerance\n{shown(TOLERANCE)}", right.get_yaxis_transform()
    right.text(1.015, TOLERANCE, words, va="center", fontsize=9.5, transform=where)
    return finish(figure, _verdict(gaps, discard))


def _bar(ax: Axes, x: float, number: float, width: float) -> None:
    """A bar on a log axis, hatched where it is too high, its number on top; a 0 has no bar."""
    low = FLOOR * TOLERANCE
    top = max(number, low)
    look = {"color": BLUE, "edgecolor": BLUE} if number <= TOLERANCE else HATCH | {"edgecolor": RED}
    ax.bar(x, top - low, width, bottom=low, **look)
    # a 0 stands above the letter that names its place
    ax.text(x, top * (1.6 if number else 9), shown(number), ha="center", fontsize=9.5)


def _verdict(gaps: Mapping[str, ShiftGap], discard: int) -> str:
    """Who is within the tolerance, who is not, and where the difference begins."""
    facts = []
    for name, gap in gaps.items():
        same = gap.logits <= TOLERANCE  # how far within is rounding, and differs between machines
        off = f"off by up to {shown(gap.logits)} where the largest is {gap.largest_logit:.3g}"
        facts.append(f"{name}: {'equal' if same else off}")
    name, last = list(gaps.items())[-1]
    both = zip(last.keys, last.values, strict=True)
    wrong = [i for i, pair in enumerate(both) if max(pair) > TOLERANCE]
    where = f"differ from layer {wrong[0]} on" if wrong else "agree everywhere"
    return (
        f"Forgetting {tokens(discard)}: logits with a context shift against a fresh run: "
        f"{'; '.join(facts)}. K and V ({name}) {where} (tolerance {shown(TOLERANCE)})."
    )


def shown(number: float) -> str:
    """1.1, 0.04, 5e-07, 0: what is left of a difference in a picture."""
    return f"{number:.2g}" if number >= 0.01 else f"{number:.0e}" if number else "0"
