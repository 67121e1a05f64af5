"""Introduced in notebook 02. Work, bytes, waste and positions of a cache: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    BLUE,
    INK,
    PLAIN,
    QUIET,
    RED,
    RULE,
    SERIES,
    finish,
    house_style,
    new_figure,
)

HATCH: dict[str, Any] = {"facecolor": "white", "hatch": "////"}
LIGHT = "#c6dcec"


def work_picture(
    without: Sequence[int],
    with_cache: Sequence[int],
    flops_without: Sequence[float],
    flops_with: Sequence[float],
) -> Picture:
    """Tokens run and FLOPs of each step, the prefill first, with a cache and without.

    ValueError when the four are not equally long.
    """
    lengths = [len(x) for x in (without, with_cache, flops_without, flops_with)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"the four series must be equally long and not empty, got {lengths}")
    steps = range(1, len(without) + 1)
    with house_style():
        figure = new_figure(9, 3.6)
        left, right = figure.subplots(1, 2)
        left.bar([s - 0.2 for s in steps], without, 0.4, edgecolor=RED, label="no cache", **HATCH)
        left.bar([s + 0.2 for s in steps], with_cache, 0.4, color=BLUE, label="with cache")
        left.set(title="tokens run", xlabel="step (1 = prefill)")
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_ylim(0, 1.3 * max(*without, *with_cache))
        left.legend(loc="upper left", ncols=2)
        right.plot(steps, flops_without, "x--", color=RED, label="no cache")
        right.plot(steps, flops_with, "o-", color=BLUE, label="with cache", markersize=5)
        right.set(yscale="log", title="FLOPs", xlabel="step (1 = prefill)")
        right.yaxis.set_major_formatter(FLOPS)
        right.yaxis.set_minor_formatter(NullFormatter())
        right.legend(loc="best")
        for ax in (left, right):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_xlim(0.4, len(without) + 0.6)
        run, again = sum(with_cache), sum(without)
        return finish(
            figure,
            f"{len(without)} new tokens: without a cache {again} tokens run, with it {run}, "
            f"{_times(again / run)} fewer; FLOPs {_flops(sum(flops_without))} against "
            f"{_flops(sum(flops_with))}, {_times(sum(flops_without) / sum(flops_with))} fewer.",
        )
