"""Introduced in notebook 01. The pictures of RoPE: clocks, distance, and what 16 bits do to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from torch import Tensor

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    DASHES,
    PLAIN,
    QUIET,
    RULE,
    SERIES,
    finish,
    house_style,
    new_figure,
)

MARKS = ("o", "o", "x", "s", "^", "+")


def clocks_picture(inv_freq: Tensor, positions: Sequence[int]) -> Picture:
    """The hands of a few pairs (rows: fast to slow) at some positions (columns)."""
    pairs = [0, len(inv_freq) // 4, len(inv_freq) // 2, len(inv_freq) - 1]
    with house_style():
        figure = new_figure(0.92 * len(positions) + 1.4, 1.05 * len(pairs) + 0.9)
        grid = figure.subplots(len(pairs), len(positions), squeeze=False)
        for row, pair in enumerate(pairs):
            for column, position in enumerate(positions):
                angle = float(inv_freq[pair]) * position
                _clock(grid[row][column], angle, SERIES[row])
                if row == 0:
                    grid[row][column].set_title(f"pos. {position}", fontsize=9, loc="center")
            grid[row][0].set_ylabel(
                f"pair {pair}\n{float(inv_freq[pair]):.4g} rad\na position",
                fontsize=9,
                rotation=0,
                ha="right",
                va="center",
            )
        slow, fast = float(inv_freq[-1]), float(inv_freq[0])
        turns = positions[-1] / (2 * np.pi)
        return finish(
            figure,
            f"One step turns pair 0 by {fast:.0f} rad, pair {len(inv_freq) - 1} by {slow:.5f} rad: "
            f"at position {positions[-1]} they have gone round {fast * turns:.2f} and "
            f"{slow * turns:.4f} times.",
        )


def _clock(ax: Axes, angle: float, color: str) -> None:
    turn = np.linspace(0, 2 * np.pi, 90)
    ax.plot(np.cos(turn), np.sin(turn), color=RULE)
    ax.plot([0, 1], [0, 0], color=RULE, linewidth=1, linestyle=":")
    ax.plot([0, np.cos(angle)], [0, np.sin(angle)], color=color, linewidth=2.2)
    ax.plot([np.cos(angle)], [np.sin(angle)], "o", color=color, markersize=4)
    ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def distance_picture(distances: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Picture:
    """Score against distance n − m; one line for each place m where the pair was put."""
    with house_style():
        figure = new_figure(8, 3.6)
        ax = figure.subplots()
        for i, (name, curve) in enumerate(curves.items()):
            look: dict[str, Any] = {"color": SERIES[i], "label": name}
            if i == 0:
                look |= {"linewidth": 5, "alpha": 0.4}
            else:  # marks, at other places than the others', so that none hides another
                look |= {"linestyle": "none", "marker": MARKS[i], "markevery": (2 * i, 6)}
            ax.plot(distances, curve, **look)
        ax.axhline(0, color=RULE, linewidth=1)
        ax.set_xlabel("distance m − n (query position − key position)")
        ax.set_ylabel("score q · k")
        ax.legend()
        stacked = np.array(list(curves.values()))
        spread = float((stacked.max(0) - stacked.min(0)).max())
        verdict = "lie on each other" if spread < 1e-2 else "DIFFER"
        return finish(
            figure,
            f"The same query and key, put at {len(curves)} different places: the {len(curves)} "
            f"curves {verdict}, so only the distance counts.",
        )


def dtype_picture(positions: Sequence[int], errors: Mapping[str, Sequence[float]]) -> Picture:
    """Worst angle error in radians against position, for frequencies kept in several dtypes."""
    with house_style():
        figure = new_figure(8, 3.6)
        ax = figure.subplots()
        for i, (name, error) in enumerate(errors.items()):
            ax.plot(positions, error, label=name, color=SERIES[i], linestyle=DASHES[i], linewidth=2)
        ax.axhline(np.pi, color=QUIET, linewidth=1, label="π: opposite direction")
        ax.set(yscale="log", xlabel="position", ylabel="worst angle error (rad)")
        ax.yaxis.set_major_formatter(PLAIN)
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.legend(loc="center right", fontsize=9)
        last = ", ".join(f"{name} {error[-1]:.1g}" for name, error in errors.items())
        return finish(
            figure, f"Error of the worst pair at position {positions[-1]}, in radians: {last}."
        )
