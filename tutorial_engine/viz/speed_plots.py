"""Introduced in notebook 02. Time per token and the machine's roof: measurements in, Picture out.

Every caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    DASHES,
    INK,
    PLAIN,
    QUIET,
    SERIES,
    finish,
    house_style,
    new_figure,
)

MARKS = ("o", "s", "^", "D", "v", "P")
VIRTUAL = "on a virtual clock (1 unit per token run)"
Lines = Mapping[str, Sequence[tuple[int, float]]]  # name -> (context length, time per token)


def latency_picture(measured: Lines, virtual: Lines | None = None) -> Picture:
    """Milliseconds per token against context length; where two lines cross is marked.

    `virtual`, drawn beside it, counts a stated cost instead: 1 unit a token that is run. ValueError
    for no line, or one that is empty or has a length or a time that is not above 0.
    """
    panels = [(measured, "measured here", "ms")]
    if virtual is not None:
        panels.insert(0, (virtual, VIRTUAL, "units"))
    for lines, title, _ in panels:
        for name, line in lines.items():
            if not line or min(map(min, line)) <= 0:
                raise ValueError(f"{title}, {name!r}: lengths and times must be above 0: {line}")
        if not lines:
            raise ValueError(f"{title}: give at least one line, name -> [(length, time), ...]")
    with house_style():
        figure = new_figure(5.2 * len(panels) + 0.6, 3.9)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, (lines, title, unit) in zip(axes, panels, strict=True):
            _lines(ax, lines)
            ax.set(xlabel="context length (tokens)", ylabel=f"{unit} per token")
            ax.set_title(title, fontsize=10.5)
        words = "; ".join(_told(*panel) for panel in panels)
        return finish(figure, f"{words[0].upper()}{words[1:]}.")


def _told(lines: Lines, title: str, unit: str) -> str:
    """What one panel shows, in words."""
    parts = []
    for name, line in lines.items():
        (start, first), (end, last) = line[0], line[-1]
        way = f"goes from {_number(first)} at {start} tokens to {_number(last)} at {end}"
        parts.append(f"{name} " + (way if len(line) > 1 else f"{_number(last)} at {end} tokens"))
    equal = [f"{a} and {b} are equal at about {n:.0f}" for a, b, n, _ in crossings(lines)]
    return f"{title}, {unit} per token: {', '.join([*parts, *equal])}"


def crossings(lines: Lines) -> list[tuple[str, str, float, float]]:
    """Where two lines cross for the last time: both names, context length, time.

    Lines are straight between points, on logarithmic axes; only lengths that both have count.
    """
    found = []
    for (a, one), (b, other) in combinations(lines.items(), 2):
        theirs = dict(other)
        points = [
            (math.log(n), math.log(t), math.log(t / theirs[n])) for n, t in one if n in theirs
        ]
        apart = [point for point in points if point[2]]
        for (x0, y0, d0), (x1, y1, d1) in reversed(list(pairwise(apart))):
            if d0 * d1 < 0:
                part = d0 / (d0 - d1)
                met = [(x, y) for x, y, d in points if x0 < x < x1 and not d]  # measured equal
                x, y = met[0] if met else (x0 + part * (x1 - x0), y0 + part * (y1 - y0))
                found.append((a, b, math.exp(x), math.exp(y)))
                break
    return found


def log_marks(ax: Axes, low: float, high: float, words: FuncFormatter) -> None:
    """Write the powers of ten on a logarithmic y axis; where these are too few, 2 and 5 as well."""
    few = high / low < 30

    def minor(value: float, _: int) -> str:
        return words(value) if few and f"{value:e}"[0] in "25" else ""

    ax.set(yscale="log", ylim=(low, high))
    ax.yaxis.set_major_formatter(words)
    ax.yaxis.set_minor_formatter(FuncFormatter(minor))


def _lines(ax: Axes, lines: Lines) -> None:
    """All lines, log-log, named at the right edge, no name on another."""
    lengths = sorted({length for line in lines.values() for length, _ in line})
    times = [time for line in lines.values() for _, time in line]
    low, high = min(times) / 1.6, max(times) * 1.6
    ax.set_xscale("log")
    thin = [n for i, n in enumerate(reversed(lengths)) if i % -(-len(lengths) // 7) == 0]
    ax.set_xticks(thin, [str(n) for n in thin])
    ax.xaxis.set_minor_locator(NullLocator())
    log_marks(ax, low, high, PLAIN)
    looks: dict[str, dict[str, Any]] = {}
    for i, (name, line) in enumerate(lines.items()):
        looks[name] = {"color": SERIES[i % 6], "linestyle": DASHES[i % 6], "marker": MARKS[i % 6]}
        ax.plot(
            [n for n, _ in line], [t for _, t in line], linewidth=2, markersize=5.5, **looks[name]
        )
    at = 0.0
    for name, line in sorted(lines.items(), key=lambda pair: pair[1][-1][1]):
        at = max(line[-1][1], at * (high / low) ** 0.08)  # the height of a name, as a factor
        where: Any = ("axes fraction", "data")
        color = looks[name]["color"]
        ax.annotate(name, (1.02, at), xycoords=where, va="center", fontsize=9.5, color=color)
    for _, _, length, time in crossings(lines):
        ax.axvline(length, color=QUIET, linestyle=":", linewidth=1.2)
        ax.plot([length], [time], "o", markersize=13, fillstyle="none", color=INK, linewidth=2)
        where = ("data", "axes fraction")
        said = f"equal at {length:.0f}"
        ax.annotate(said, (length, 0.96), (4, 0), where, "offset points", fontsize=9, va="top")


def roofline_picture(
    bandwidth: float, peak_flops: float, points: Sequence[tuple[str, float, float]]
) -> Picture:
    """The most FLOP/s a machine can do for each FLOP/byte, and how far each point gets.

    bandwidth in bytes/s, peak in FLOP/s, points (label, FLOP per byte, FLOP/s): Williams et al.,
    2009. ValueError for anything not above 0.
    """
    numbers = [bandwidth, peak_flops, *(n for _, *pair in points for n in pair)]
    if not points or min(numbers) <= 0:
        raise ValueError(f"give at least one point, and only numbers above 0; got {numbers}")
    ridge = peak_flops / bandwidth
    xs, ys = [ridge, *(x for _, x, _ in points)], [peak_flops, *(y for *_, y in points)]
    left, right = min(xs) / 4, max(xs) * 8
    with house_style():
        figure = new_figure(8.5, 4.4)
        ax = figure.subplots()
        roof = [min(peak_flops, bandwidth * x) for x in (left, ridge, right)]
        ax.plot([left, ridge, right], roof, color=INK, linewidth=2.4)
        ax.plot([ridge, ridge], [min(ys) / 20, peak_flops], ":", color=QUIET, linewidth=1.2)
        ax.set(xscale="log", yscale="log", xlim=(left, right))
        ax.set(xlabel="FLOP per byte moved", ylabel="FLOP/s")
        ax.set_ylim(min(*ys, roof[0]) / 3, peak_flops * 5)
        ax.xaxis.set_major_formatter(PLAIN)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        ax.minorticks_off()
        for i, (_, x, y) in enumerate(points):
            ax.plot([x], [y], MARKS[i % 6], color=SERIES[i % 6], markersize=9)
        said = [(f"ridge: {_number(ridge)} FLOP/byte", ridge, peak_flops), *points]
        _names(figure, ax, said, [(left, roof[0]), (ridge, roof[1]), (right, roof[2])])
        told = []
        for name, x, y in points:
            side, limit = ("left", "memory") if x < ridge else ("right", "arithmetic")
            reached = 100 * y / min(peak_flops, bandwidth * x)
            told.append(
                f"{name} ({_number(x)} FLOP/byte) lies {side} of it, limited by {limit}, at "
                f"{reached:.0f} % of the roof"
            )
        start = f"The ridge of {si(peak_flops)}FLOP/s and {si(bandwidth)}B/s is at {_number(ridge)}"
        return finish(figure, f"{start} FLOP/byte: {'; '.join(told)}.")


def _names(
    figure: Figure,
    ax: Axes,
    names: Sequence[tuple[str, float, float]],
    roof: Sequence[tuple[float, float]],
) -> None:
    """Write each name beside its point, at the first place where it covers nothing."""
    figure.draw_without_rendering()  # only now is it known where the points are
    place, pixel = ax.transData.transform, figure.dpi / 72
    taken = [_around(place((x, y)), 7) for _, x, y in names]
    down = (roof[1][0], ax.get_ylim()[0])  # below the ridge
    for line in (roof, (roof[1], down)):
        for start, end in pairwise(place(line)):
            taken += [_around(start + (end - start) * part / 100, 2) for part in range(101)]
    frame = ax.get_window_extent()
    tries = [(d * a, d * b) for d in (1, 2, 3.5, 5) for a, b in _AROUND]
    for name, x, y in names:
        wide, tall = 6.1 * len(name) * pixel, 13 * pixel
        for dx, dy in tries:
            px, py = place((x, y))[0] + dx * pixel, place((x, y))[1] + dy * pixel
            corner = px - wide if dx < 0 else px - wide / 2 if dx == 0 else px
            box = Bbox.from_bounds(corner, py - tall / 2, wide, tall)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 < frame.y1 - tall
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        side = "right" if dx < 0 else "center" if dx == 0 else "left"
        look: dict[str, Any] = {"ha": side, "va": "center", "fontsize": 9.5}
        if abs(dx) + abs(dy) > 24:  # far off: a line leads back
            look["arrowprops"] = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.8}
        ax.annotate(name, (x, y), (dx, dy), textcoords="offset points", **look)


def _around(point: Any, reach: float) -> Bbox:
    return Bbox.from_bounds(point[0] - reach, point[1] - reach, 2 * reach, 2 * reach)


_AROUND = ((11, 0), (-11, 0), (0, -15), (0, 15), (11, -13), (-11, -13), (11, 13), (-11, 13))


def si(count: float) -> str:
    """A count in thousands, with a prefix to the unit that follows: 1.2 G."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "


def _number(value: float) -> str:
    """Two digits, three where they are whole: 0.53, 5.3, 53, 530."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
