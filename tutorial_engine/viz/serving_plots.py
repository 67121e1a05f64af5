"""Introduced in notebook 03. Latency and throughput of a served workload: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from tutorial_engine.engine.metrics import RequestMetrics, percentile
from tutorial_engine.viz.itl_plots import itl_over_time
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.speed_plots import MARKS
from tutorial_engine.viz.style import (
    DASHES,
    INK,
    RULE,
    SERIES,
    finish,
    house_style,
    new_figure,
)
from tutorial_engine.viz.timeline_words import ms

__all__ = ["itl_over_time", "latency_distributions", "sweep", "values_of"]

# What can be asked of a request, as (title, what it means).
KINDS = {
    "queue_time": ("queue time", "arrival to first step"),
    "ttft": ("TTFT", "arrival to first token"),
    "tpot": ("TPOT", "mean gap of a request"),
    "itl": ("ITL", "every gap between two tokens"),
    "total": ("total", "arrival to end"),
}
Line = Sequence[float | None]
ROUND = FuncFormatter(lambda value, _: f"{value:g}")


def values_of(metrics: Sequence[RequestMetrics], kind: str) -> list[float]:
    """All values of one kind in seconds, without those that never happened."""
    if kind not in KINDS:
        raise ValueError(f"there is no {kind!r}, only: {', '.join(KINDS)}")
    if kind == "itl":
        return [gap for one in metrics for gap in one.itl]
    found = [getattr(one, kind) for one in metrics]
    return [value for value in found if value is not None]


def latency_distributions(
    policies: Mapping[str, Sequence[RequestMetrics]],
    kinds: Sequence[str] = ("ttft", "tpot", "total"),
    title: str = "",
) -> Picture:
    """A strip of all values per policy, with its p50 and p95, for each kind of latency.

    `kinds` are of KINDS. ValueError for no policy, and for one without any value.
    """
    if not policies or not kinds:
        raise ValueError("give at least one policy, {name: [RequestMetrics]}, and one kind")
    found = {kind: {name: values_of(m, kind) for name, m in policies.items()} for kind in kinds}
    for kind, strips in found.items():
        empty = [name for name, values in strips.items() if not values]
        if empty:
            raise ValueError(f"{empty[0]!r} has no {KINDS[kind][0]}: did its requests run?")
    with house_style():
        figure = new_figure(10, 0.92 * len(policies) + 1.65)
        axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
        for ax, kind in zip(axes, kinds, strict=True):
            _strips(ax, found[kind])
            ax.set_title(f"{KINDS[kind][0]}, ms")
            ax.set_xlabel(KINDS[kind][1], fontsize=9.5)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        parts = []
        for kind, strips in found.items():
            told = [f"{name} {_p50_p95(values)}" for name, values in strips.items()]
            parts.append(f"{KINDS[kind][0]} {', '.join(told)}")
        return finish(figure, f"p50 (line) / p95 (diamond): {'; '.join(parts)}.")


def _p50_p95(values: Sequence[float]) -> str:
    return f"{ms(percentile(values, 50))[:-3]} / {ms(percentile(values, 95))}"


def _strips(ax: Axes, strips: Mapping[str, Sequence[float]]) -> None:
    """One panel: a row of dots per policy, so spread that equal ones can be seen."""
    most = 1000 * max(max(values) for values in strips.values())
    for y, values in enumerate(strips.values()):
        look: dict[str, Any] = {"color": SERIES[y % 6], "marker": MARKS[y % 6]}
        spread = [((7 * i) % 9 - 4) * 0.035 for i in range(len(values))]  # by order, never random
        many = len(values) > 60
        ax.scatter(
            [1000 * v for v in values],
            [y + s for s in spread],
            s=10 if many else 20,
            alpha=0.35 if many else 0.6,
            linewidths=0,
            **look,
        )
        p50, p95 = (1000 * percentile(values, p) for p in (50, 95))
        ax.plot([p50, p50], [y - 0.27, y + 0.27], color=INK, linewidth=2.4)
        ax.plot([p95], [y], "D", color="white", markeredgecolor=INK, markersize=7, mew=1.8)
        middle: dict[str, Any] = {"fontsize": 9, "color": INK}
        ax.text(p50, y - 0.31, f"p50 {_digits(p50)}", va="bottom", **_side(p50, most), **middle)
        ax.text(p95, y + 0.31, f"p95 {_digits(p95)}", va="top", **_side(p95, most), **middle)
    ax.set_yticks(range(len(strips)), list(strips), color=INK)
    ax.set(ylim=(len(strips) - 0.35, -0.65), xlim=(-0.03 * most, 1.08 * most or 1))
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(ROUND)
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    for y in range(len(strips)):
        ax.axhline(y, color=RULE, linewidth=0.8, zorder=0)


def _side(at: float, most: float) -> dict[str, Any]:
    """Words near an edge of the panel lean inwards."""
    return {"ha": "left" if at < 0.15 * most else "right" if at > 0.85 * most else "center"}


def _digits(value: float) -> str:
    """Three digits at least where there are so many: 8.5, 31.2, 1265."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sweep(
    x: Sequence[float],
    panels: Mapping[str, Line | Mapping[str, Line]],
    xlabel: str,
    ylabel: str,
    title: str = "",
) -> Picture:
    """Lines over one dial (batch size, budget, arrival rate), a panel for each way to measure.

    A panel is a line, or {name: line}; a line has a number per x, or None where there is none.
    Panels keep their own scale: a virtual clock's seconds are not this machine's.
    """
    lines = {
        panel: dict(given) if isinstance(given, Mapping) else {ylabel: given}
        for panel, given in panels.items()
    }
    _check_sweep(x, lines)
    with house_style():
        figure = new_figure(5 * max(len(lines), 1.4), 3.9)
        axes = figure.subplots(1, len(lines), squeeze=False)[0]
        alone = all(len(named) == 1 for named in lines.values())
        for place, (ax, (panel, named)) in enumerate(zip(axes, lines.items(), strict=True)):
            _sweep_panel(ax, x, named, place if alone else 0)
            ax.set_title(panel)
            ax.set(xlabel=xlabel, ylabel=ylabel)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        told = [_told(panel, x, named) for panel, named in lines.items()]
        what = f"{ylabel}, by {xlabel}" if ylabel else f"By {xlabel}"  # panels of several units
        return finish(figure, f"{what}: {'; '.join(told)}.")


def _sweep_panel(ax: Axes, x: Sequence[float], named: Mapping[str, Line], first: int) -> None:
    """The lines of one panel, from 0 on; the first has the look of that number."""
    for i, (name, line) in enumerate(named.items(), first):
        pairs = [(a, b) for a, b in zip(x, line, strict=True) if b is not None]
        look: dict[str, Any] = {
            "color": SERIES[i % 6], "linestyle": DASHES[i % 6], "marker": MARKS[i % 6]
        }  # fmt: skip
        ax.plot([a for a, _ in pairs], [b for _, b in pairs], label=name, linewidth=2, **look)
    _dial(ax, x)
    most = max(value for line in named.values() for value in line if value is not None)
    ax.set_ylim(0, 1.12 * most or 1)
    ax.yaxis.set_major_formatter(ROUND)
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    if len(named) > 1:
        ax.legend(loc="best", fontsize=9.5)


def _check_sweep(x: Sequence[float], lines: Mapping[str, Mapping[str, Line]]) -> None:
    if not lines or not x:
        raise ValueError(
            "give at least one x and one panel: {title: line} or {title: {name: line}}"
        )
    for panel, named in lines.items():
        for name, line in named.items():
            if len(line) != len(x) or all(value is None for value in line):
                raise ValueError(
                    f"{panel}, {name!r}: give a number (or None) for each of {len(x)} x, and not "
                    f"only None; got {list(line)}"
                )
        if not named:
            raise ValueError(f"{panel}: give at least one line")


def _dial(ax: Axes, x: Sequence[float]) -> None:
    """The x axis: logarithmic where the values grow by factors; every value that fits is named."""
    values = sorted(set(x))
    if values[0] > 0 and values[-1] / values[0] >= 8 and len(values) > 2:
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
    thin = [v for i, v in enumerate(reversed(values)) if i % -(-len(values) // 8) == 0]
    ax.set_xticks(thin, [f"{v:g}" for v in thin])


def _told(panel: str, x: Sequence[float], named: Mapping[str, Line]) -> str:
    """A panel in words: where each line begins and ends."""
    parts = []
    for name, line in named.items():
        pairs = [(a, b) for a, b in zip(x, line, strict=True) if b is not None]
        (x0, first), (x1, last) = pairs[0], pairs[-1]
        way = f"{_digits(last)} at {x1:g}"
        if len(pairs) > 1:
            way = f"from {_digits(first)} at {x0:g} to {way}"
        parts.append(f"{name} {way}" if len(named) > 1 else way)
    return f"{panel} {', '.join(parts)}"
