"""What the block size does to time, to tokens and to waste.

Pools come from traces; the caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tutorial_engine.lab.dial import DialPoint
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.drawing.charts import ROUND, lines_across, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    QUIET,
    SERIES,
    finish,
    house_style,
)

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
    facts = [
        f"{p.name}: {p.milliseconds:.0f} ms, {p.tokens_run} tokens run, waste {p.mean_waste:.1f}"
        for p in (of.get(CELLS), blocks[len(blocks) // 2] if blocks else None, of.get(ROWS))
        if p is not None
    ]
    same = sum(p.tokens_equal for p in points)
    every = f"all {len(points)}" if same == len(points) else f"only {same} of {len(points)}"
    return finish(
        figure,
        f"{points[0].pool.num_slots} slots, milliseconds on the engine's clock. "
        f"{'; '.join(facts)}. At {every} positions the tokens are those of each request alone.",
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
    largest = max(map(number, points)) or 1
    pages = [(x, number(p)) for x, p in order if isinstance(p.position, int)]
    ax.plot([x for x, _ in pages], [y for _, y in pages], "-o", markersize=5.5, color=colour)
    for x, p in order:
        if isinstance(p.position, str):
            mark = "s" if p.position == CELLS else "D"
            ax.plot([x], [number(p)], mark, color=colour, markersize=7.5)
            beside = x + (0.55 if p.position == CELLS else -0.55)
            ax.axvline(beside, color=QUIET, linewidth=0.8, linestyle=":")
    ax.set_xticks([x for x, _ in order], [str(p.position) for _, p in order], fontsize=9)
    ax.set_ylim(-0.04 * largest, 1.14 * largest)
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=largest >= 5))
    ax.yaxis.set_major_formatter(ROUND)
    lines_across(ax)
