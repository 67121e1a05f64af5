"""Tokens and FLOPs of each step, without a cache and with it.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from tutorial_engine.viz.drawing.charts import HATCH, SI, log_marks, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, RED, finish, house_style
from tutorial_engine.viz.words import si


@house_style()
def work_picture(
    without: Sequence[int],
    with_cache: Sequence[int],
    flops_without: Sequence[float],
    flops_with: Sequence[float],
) -> Picture:
    """Tokens run and FLOPs of each step, the prefill first, without a cache and with it."""
    num_steps = len(without)
    steps = range(1, num_steps + 1)
    figure, (left, right) = panels(9, 3.6, columns=2)
    left.bar([s - 0.2 for s in steps], without, 0.4, edgecolor=RED, label="no cache", **HATCH)
    left.bar([s + 0.2 for s in steps], with_cache, 0.4, color=BLUE, label="with cache")
    left.set(title="tokens run", ylim=(0, 1.25 * max(*without, *with_cache)))
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.plot(steps, flops_without, "x--", color=RED, label="no cache", markersize=7)
    right.plot(steps, flops_with, "o-", color=BLUE, label="with cache", markersize=5)
    right.set_title("FLOPs, logarithmic")
    numbers = [*flops_without, *flops_with]
    log_marks(right, min(numbers) / 1.5, 4 * max(numbers), SI)
    for ax in (left, right):
        ax.set(xlabel="step (1 = prefill)", xlim=(0.4, num_steps + 0.6))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(loc="upper center", ncols=2)
    again, once = sum(without), sum(with_cache)
    much, little = sum(flops_without), sum(flops_with)
    return finish(
        figure,
        f"{num_steps} new tokens: without a cache {again} tokens run, with it {once}, a "
        f"factor of {again / once:.1f}; that is {si(much)}FLOP against {si(little)}FLOP, "
        f"a factor of {much / little:.1f}.",
    )
