"""Where memory goes, the block size, what a shift costs.

Pools come from traces; every caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from tutorial_engine.lab.dial import DialPoint
from tutorial_engine.lab.shift import ShiftGap
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import CELLS, ROWS, PoolHistory
from tutorial_engine.viz.charts import HATCH, ROUND, lines_across, log_marks, panels
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.pool_view import USED
from tutorial_engine.viz.style import (
    BLUE,
    INK,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    SERIES,
    finish,
    house_style,
)
from tutorial_engine.viz.words import tokens

MOST = 4  # runs side by side
EMPTY: dict[str, Any] = {**HATCH, "edgecolor": "#8a959d", "linewidth": 0}
TOLERANCE = 1e-5  # in one layer a shift is exact up to rounding: fp32, positions in the tens
FLOOR = 1e-3  # of the tolerance: where bars begin, and where a difference of 0 is written


# -- waste ----------------------------------------------------------------------------------------


@house_style()
def waste_over_time(runs: Mapping[str, Trace]) -> Picture:
    """A panel per run on the same axes: slots used, reserved but unused (hatched), free, by step.

    ValueError for no run, more than four, and a trace without its memory's sizes.
    """
    if not 1 <= len(runs) <= MOST:
        raise ValueError(f"give 1 to {MOST} runs, name -> trace; got {list(runs)}")
    found = {name: PoolHistory.of(trace) for name, trace in runs.items()}
    steps = max(history.num_steps for history in found.values())
    slots = max(history.pool.num_slots for history in found.values())
    figure, axes = panels(10, 3.7, columns=len(found), sharey=True)
    told = []
    for ax, (name, history) in zip(axes, found.items(), strict=True):
        _filled(ax, history)
        ax.set(xlim=(-0.5, steps - 0.5), ylim=(0, 1.12 * slots), xlabel="step")
        ax.set_title(f"{name}: {history.mean_waste:.1f} wasted on average", fontsize=10.5)
        size = history.pool.num_slots
        words = f"pool: {size} slots"
        ax.text(steps - 0.55, size + slots / 90, words, ha="right", fontsize=9.5, color=QUIET)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        told.append(
            f"{name} {history.mean_waste:.1f} of {size} on average, {history.peak_waste} at most "
            f"(tokens fill {history.peak_used} at most)"
        )
    axes[0].set_ylabel("slots")
    key = [
        Patch(facecolor=USED, label="used: a token is there"),
        Patch(**EMPTY, label="reserved, no token: waste"),
        Patch(facecolor=PAPER, edgecolor=QUIET, label="free"),
    ]
    figure.legend(handles=key, loc="outside upper right", ncols=3, fontsize=9.5)
    return finish(figure, f"Slots reserved without a token in a step: {'; '.join(told)}.")


def _filled(ax: Axes, history: PoolHistory) -> None:
    """Three layers, a column per step."""
    usage = [snapshot.usage for snapshot in history.snapshots]
    usage.append(usage[-1])  # the last column has a right edge, too
    edges = [step - 0.5 for step in range(len(usage))]
    used, taken = [u.used for u in usage], [u.used + u.reserved for u in usage]
    ax.fill_between(edges, 0, used, step="post", color=USED, linewidth=0)
    ax.fill_between(edges, used, taken, step="post", **EMPTY)
    ax.step(edges, taken, where="post", color=INK, linewidth=1.2)
    size = (history.num_steps, history.pool.num_slots)
    ax.add_patch(Rectangle((-0.5, 0), *size, fill=False, edgecolor=QUIET, linewidth=1))


# -- the block size -------------------------------------------------------------------------------

PANELS: dict[str, Callable[[DialPoint], float]] = {
    "look here first: ms in all": lambda p: p.milliseconds,
    "why: tokens run": lambda p: p.tokens_run,
    "why: slots wasted (mean)": lambda p: p.mean_waste,
}


@house_style()
def dial(points: Sequence[DialPoint]) -> Picture:
    """What the block size does to time, and two reasons for it: tokens run, and slots wasted.

    Pages are a line; cells and rows, its two ends, stand beside it. ValueError for fewer than two
    points, and for a position that comes twice.
    """
    places = _places([p.position for p in points])
    figure, axes = panels(10, 3.3, columns=3)
    for i, (ax, (title, number)) in enumerate(zip(axes, PANELS.items(), strict=True)):
        _panel(ax, points, places, number, SERIES[i])
        ax.set_title(title, fontsize=10.5)
        ax.set_xlabel("block size (■ cells, ● pages, ◆ rows)")
    blocks = [p for p in points if isinstance(p.position, int)]
    of = {p.position: p for p in points}  # the caption has room for three: both ends, the middle
    told = [
        f"{p.name}: {p.milliseconds:.0f} ms, {p.tokens_run} tokens run, waste {p.mean_waste:.1f}"
        for p in (of.get(CELLS), blocks[len(blocks) // 2] if blocks else None, of.get(ROWS))
        if p is not None
    ]
    same = sum(p.tokens_equal for p in points)
    every = f"all {len(points)}" if same == len(points) else f"only {same} of {len(points)}"
    return finish(
        figure,
        f"{points[0].pool.num_slots} slots, milliseconds on the engine's clock. {'; '.join(told)}. "
        f"At {every} positions the tokens are those of each request alone.",
    )


def _places(positions: Sequence[int | str]) -> list[float]:
    """Where each point stands on the axis: log2 of its block size, the two ends beside it."""
    if len(positions) < 2 or len(set(positions)) < len(positions):
        raise ValueError(f"give at least two points, each position once; got {positions}")
    pages = [math.log2(p) for p in positions if isinstance(p, int)] or [0.0]
    ends: dict[object, float] = {CELLS: min(pages) - 1.1, ROWS: max(pages) + 1.1}
    return [math.log2(p) if isinstance(p, int) else ends[p] for p in positions]


def _panel(
    ax: Axes,
    points: Sequence[DialPoint],
    places: Sequence[float],
    number: Callable[[DialPoint], float],
    colour: str,
) -> None:
    """One number over the dial: pages joined, cells a square and rows a diamond."""
    order = sorted(zip(places, points, strict=True), key=lambda pair: pair[0])
    most = max(map(number, points)) or 1
    pages = [(x, number(p)) for x, p in order if isinstance(p.position, int)]
    ax.plot([x for x, _ in pages], [y for _, y in pages], "-o", markersize=5.5, color=colour)
    for x, p in order:
        if isinstance(p.position, str):
            mark = "s" if p.position == CELLS else "D"
            ax.plot([x], [number(p)], mark, color=colour, markersize=7.5)
            beside = x + (0.55 if p.position == CELLS else -0.55)
            ax.axvline(beside, color=QUIET, linewidth=0.8, linestyle=":")
    ax.set_xticks([x for x, _ in order], [str(p.position) for _, p in order], fontsize=9)
    ax.set_ylim(-0.04 * most, 1.14 * most)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=most >= 5))
    ax.yaxis.set_major_formatter(ROUND)
    lines_across(ax)


# -- the context shift ----------------------------------------------------------------------------


@house_style()
def shift_picture(gaps: Mapping[str, ShiftGap], discard: int) -> Picture:
    """Largest logit difference of each model, and of the last one K and V layer by layer.

    `gaps`: by what the model is called. `discard`: the tokens that were forgotten.
    """
    name, last = list(gaps.items())[-1]
    most = max(max(gap.logits, *gap.keys, *gap.values) for gap in gaps.values())
    low, high = FLOOR * TOLERANCE, 60 * max(most, TOLERANCE)
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
    told = []
    for name, gap in gaps.items():
        same = gap.logits <= TOLERANCE  # how far within is rounding, and differs between machines
        off = f"off by up to {shown(gap.logits)} where the largest is {gap.largest_logit:.3g}"
        told.append(f"{name}: {'equal' if same else off}")
    name, last = list(gaps.items())[-1]
    both = zip(last.keys, last.values, strict=True)
    wrong = [i for i, pair in enumerate(both) if max(pair) > TOLERANCE]
    where = f"differ from layer {wrong[0]} on" if wrong else "agree everywhere"
    return (
        f"Forgetting {tokens(discard)}: logits with a context shift against a fresh run: "
        f"{'; '.join(told)}. K and V ({name}) {where} (tolerance {shown(TOLERANCE)})."
    )


def shown(number: float) -> str:
    """1.1, 0.04, 5e-07, 0: what is left of a difference in a picture."""
    return f"{number:.2g}" if number >= 0.01 else f"{number:.0e}" if number else "0"
