"""Milliseconds per token against the length of the context.

The caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, takewhile

from matplotlib.axes import Axes

from tutorial_engine.viz.drawing.charts import (
    dial_axis,
    line_look,
    log_marks,
    panels,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    PLAIN,
    SERIES,
    finish,
    house_style,
)
from tutorial_engine.viz.words import two_digits

NOISE = 1.1  # two measured times that differ by a smaller factor count as equal
VIRTUAL = "on a virtual clock (1 unit per token run)"
Lines = Mapping[str, Sequence[tuple[int, float]]]  # name -> (context length, time per token)


@house_style()
def latency_picture(measured: Lines, virtual: Lines) -> Picture:
    """Milliseconds per token against context length.

    `virtual`, drawn beside it, counts a stated cost instead: 1 unit a token that is run.
    """
    shown = [(virtual, VIRTUAL, "units"), (measured, "measured here", "ms")]
    figure, axes = panels(11, 3.9, columns=2)
    for ax, (lines, title, unit) in zip(axes, shown, strict=True):
        _lines(ax, lines)
        ax.set_ylabel(f"{unit} per token, logarithmic")
        ax.set_title(title, fontsize=10.5)
    words = "; ".join(_told(*panel) for panel in shown)
    return finish(figure, f"{words[0].upper()}{words[1:]}.")


def _told(lines: Lines, title: str, unit: str) -> str:
    """What one panel shows, in words."""
    parts = []
    for name, line in lines.items():
        (start, first), (end, last) = line[0], line[-1]
        way = f"goes from {two_digits(first)} at {start} tokens to {two_digits(last)} at {end}"
        parts.append(f"{name} " + (way if len(line) > 1 else f"{two_digits(last)} at {end} tokens"))
    equal = [f"up to {n} tokens {a} and {b} take about the same time" for a, b, n in _alike(lines)]
    return f"{title}, {unit} per token: {', '.join([*parts, *equal])}"


def _alike(lines: Lines) -> list[tuple[str, str, int]]:
    """Lines that begin as one: both names, and the longest context up to which they are alike."""
    found = []
    for (a, first), (b, other) in combinations(lines.items(), 2):
        theirs = dict(other)
        both = [(n, abs(math.log(t / theirs[n]))) for n, t in first if n in theirs]
        alike = [n for n, _ in takewhile(lambda pair: pair[1] < math.log(NOISE), both)]
        found += [(a, b, alike[-1])] if alike else []
    return found


def _lines(ax: Axes, lines: Lines) -> None:
    """All lines, log-log, named at the right edge, no name on another."""
    times = [time for line in lines.values() for _, time in line]
    low, high = min(times) / 1.6, max(times) * 1.6
    ax.set_xscale("log")
    lengths = [length for line in lines.values() for length, _ in line]
    dial_axis(ax, lengths, 7, "context length (tokens)")
    log_marks(ax, low, high, PLAIN)
    drawn = []
    for i, (name, line) in enumerate(lines.items()):
        ax.plot(*zip(*line, strict=True), linewidth=2, markersize=5.5, **line_look(i))
        drawn.append((line[-1][1], name, SERIES[i % 6]))
    at = 0.0
    for last, name, color in sorted(drawn):
        at = max(last, at * (high / low) ** 0.08)  # the height of a name, as a factor
        ax.annotate(
            name, (1.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=9.5,
            color=color,
        )  # fmt: skip
