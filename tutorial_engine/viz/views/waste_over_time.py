"""Where memory goes: slots used, reserved and free, step by step.

Pools come from traces; the caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import PoolHistory
from tutorial_engine.viz.drawing.charts import HATCH, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.pool import USED
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, finish, house_style

MOST = 4  # runs side by side
EMPTY: dict[str, Any] = {**HATCH, "edgecolor": "#8a959d", "linewidth": 0}


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
    facts = []
    for ax, (name, history) in zip(axes, found.items(), strict=True):
        _filled(ax, history)
        ax.set(xlim=(-0.5, steps - 0.5), ylim=(0, 1.12 * slots), xlabel="step")
        ax.set_title(f"{name}: {history.mean_waste:.1f} wasted on average", fontsize=10.5)
        size = history.pool.num_slots
        words = f"pool: {size} slots"
        ax.text(steps - 0.55, size + slots / 90, words, ha="right", fontsize=9.5, color=QUIET)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        facts.append(
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
    return finish(figure, f"Slots reserved without a token in a step: {'; '.join(facts)}.")


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
