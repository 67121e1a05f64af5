"""Introduced in notebook 04. The block-size dial as curves: DialPoints in, Picture out.

Counted and measured are two pictures: the first is the same on every machine.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tutorial_engine.lab.dial import DialPoint
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import DASHES, QUIET, RULE, SERIES, finish, house_style, new_figure

ROUND = FuncFormatter(lambda value, _: f"{value:,.10g}")


class Curve(NamedTuple):
    """What a panel shows of each point, and what it is called there."""

    name: str
    of: Callable[[DialPoint], float]


PANELS: dict[str, tuple[Curve, ...]] = {
    "waste: slots reserved, no token": (
        Curve("mean", lambda p: p.mean_waste),
        Curve("peak", lambda p: p.peak_waste),
    ),
    "table entries kept": (
        Curve("all requests", lambda p: p.total_entries),
        Curve("one request", lambda p: p.most_entries),
    ),
    "tokens found in the cache": (Curve("tokens", lambda p: p.tokens_found),),
    "KiB copied by gathering, a step": (Curve("KiB", lambda p: p.bytes_gathered_per_step / 1024),),
    "requests running at once": (Curve("most", lambda p: p.most_running),),
    "steps until all are done": (
        Curve("steps", lambda p: p.num_steps),
        Curve("preemptions", lambda p: p.preemptions),
    ),
}


def dial(points: Sequence[DialPoint]) -> Picture:
    """What the block size does to waste, tables, sharing, gathering and how many run at once.

    Pages are a line; cells and rows, its two ends, stand beside it. ValueError for fewer than two
    points, and for a position that comes twice.
    """
    places = _places(points)
    with house_style():
        figure = new_figure(10, 5.4)
        axes = figure.subplots(2, 3, squeeze=False).ravel()
        for ax, (title, curves) in zip(axes, PANELS.items(), strict=True):
            _panel(ax, points, places, curves)
            ax.set_title(title, fontsize=10.5)
        for ax in axes[3:]:
            ax.set_xlabel("block size")
        return finish(figure, _told(points))


def _told(points: Sequence[DialPoint]) -> str:
    parts = [
        f"{p.name}: waste {p.mean_waste:.1f}, {p.total_entries} table entries, {p.tokens_found} "
        f"tokens found, {p.bytes_gathered_per_step / 1024:.0f} KiB a step, {p.most_running} at once"
        for p in _ends(points)
    ]
    same = sum(p.tokens_equal for p in points)
    every = f"all {len(points)}" if same == len(points) else f"only {same} of {len(points)}"
    return (
        f"{points[0].pool.num_slots} slots. {'; '.join(parts)}. At {every} positions the tokens "
        "are those of each request alone."
    )


def _ends(points: Sequence[DialPoint]) -> list[DialPoint]:
    """Those that a caption has room for: the two ends, and the middle of the pages."""
    pages = [p for p in points if isinstance(p.position, int)]
    middle = [pages[len(pages) // 2]] if pages else []
    of = {p.position: p for p in points}
    return [*(of[k] for k in (CELLS,) if k in of), *middle, *(of[k] for k in (ROWS,) if k in of)]


def _places(points: Sequence[DialPoint]) -> list[float]:
    """Where each point stands on the axis: log2 of its block size, the two ends beside it."""
    positions = [p.position for p in points]
    if len(positions) < 2 or len(set(positions)) < len(positions):
        raise ValueError(f"give at least two points, each position once; got {positions}")
    pages = [math.log2(p) for p in positions if isinstance(p, int)] or [0.0]
    ends: dict[object, float] = {CELLS: min(pages) - 1.1, ROWS: max(pages) + 1.1}
    return [math.log2(p) if isinstance(p, int) else ends[p] for p in positions]


def _panel(
    ax: Axes, points: Sequence[DialPoint], places: Sequence[float], curves: Sequence[Curve]
) -> None:
    """One or two curves over the dial: pages joined, cells a square and rows a diamond."""
    most = max(curve.of(p) for curve in curves for p in points)
    for i, curve in enumerate(curves):
        look: dict[str, Any] = {"color": SERIES[i], "markersize": 5.5, "linestyle": DASHES[i]}
        values = [(x, curve.of(p), p) for x, p in sorted(zip(places, points, strict=True))]
        pages = [(x, y) for x, y, p in values if isinstance(p.position, int)]
        ax.plot([x for x, _ in pages], [y for _, y in pages], "o", label=curve.name, **look)
        for x, y, p in values:
            if isinstance(p.position, str):
                mark, fill = ("s" if p.position == CELLS else "D"), ("full", "none")[i]
                ax.plot([x], [y], mark, fillstyle=fill, color=SERIES[i], markersize=7.5)
    ticks = dict(sorted(zip(places, (str(p.position) for p in points), strict=True)))
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=9)
    ax.set_ylim(-0.04 * (most or 1), 1.14 * (most or 1))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=most >= 5))
    ax.yaxis.set_major_formatter(ROUND)
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    middle = (min(places) + max(places)) / 2
    for x, p in zip(places, points, strict=True):
        if isinstance(p.position, str):
            beside = x + (0.55 if x < middle else -0.55)
            ax.axvline(beside, color=QUIET, linewidth=0.8, linestyle=":")
    if len(curves) > 1:
        ax.legend(loc="best", fontsize=9.5)
