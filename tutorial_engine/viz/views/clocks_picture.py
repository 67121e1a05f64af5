"""RoPE as clocks: a hand for each pair at each position.

The caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from tutorial_engine.viz.drawing.charts import panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    RULE,
    SERIES,
    finish,
    house_style,
)


@house_style()
def clocks_picture(inv_freq: Tensor, positions: Sequence[int]) -> Picture:
    """The hands of a few pairs (rows: fast to slow) at some positions (columns)."""
    pairs = [len(inv_freq) * i // 4 for i in range(4)]  # the slowest hardly turn in a context
    columns = len(positions)
    size = (0.92 * columns + 1.4, 1.05 * len(pairs) + 0.9)
    figure, grid = panels(*size, len(pairs), columns)
    for i, ax in enumerate(grid):
        row, column = divmod(i, columns)
        frequency = float(inv_freq[pairs[row]])
        _clock(ax, frequency * positions[column], SERIES[row])
        if row == 0:
            ax.set_title(f"pos. {positions[column]}", fontsize=9, loc="center")
        if column == 0:
            words = f"pair {pairs[row]}\n{frequency:.4g} rad\nper position"
            ax.set_ylabel(words, fontsize=9, rotation=0, ha="right", va="center")
    fast, slow = float(inv_freq[0]), float(inv_freq[pairs[-1]])
    first, other = min(combinations(positions, 2), key=lambda two: _between(fast, *two))
    return finish(
        figure,
        "Each hand starts at the right and turns anticlockwise. Pair 0 looks nearly the same at "
        f"positions {first} and {other} ({_between(fast, first, other):.2f} rad apart); pair "
        f"{pairs[-1]} does not ({_between(slow, first, other):.2g} rad apart).",
    )


def _between(speed: float, first: int, other: int) -> float:
    """The angle between the hands of two positions, 0 .. π."""
    return abs(math.remainder((first - other) * speed, 2 * math.pi))


def _clock(ax: Axes, angle: float, color: str) -> None:
    turn = np.linspace(0, 2 * np.pi, 90)
    ax.plot(np.cos(turn), np.sin(turn), color=RULE)
    ax.plot([0, 1], [0, 0], color=RULE, linewidth=1, linestyle=":")
    ax.plot([0, np.cos(angle)], [0, np.sin(angle)], color=color, linewidth=2.2)
    ax.plot([np.cos(angle)], [np.sin(angle)], "o", color=color, markersize=4)
    ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
