"""What a cache saves and costs: work, bytes, positions, latency.

Every caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, takewhile
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tutorial_engine.viz.charts import (
    HATCH,
    MARKS,
    MIDDLE,
    cell_height,
    dial_axis,
    label_bars,
    line_look,
    log_marks,
    no_axis,
    panels,
    rows_of_bars,
    token_cell,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    BLUE,
    INK,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    SERIES,
    finish,
    house_style,
)
from tutorial_engine.viz.words import num_bytes, si

NOISE = 1.1  # two measured times that differ by a smaller factor count as equal
WIDEST = 40  # tokens side by side
VIRTUAL = "on a virtual clock (1 unit per token run)"
SI = FuncFormatter(lambda value, _: si(value))
Lines = Mapping[str, Sequence[tuple[int, float]]]  # name -> (context length, time per token)


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


@house_style()
def bytes_picture(rows: Sequence[tuple[str, float, float | None]]) -> Picture:
    """Bytes that a token leaves in the cache, per model: (name, bytes, bytes with one K/V head for
    each query head, as in MHA, or None).
    """
    figure, (ax,) = panels(8.5, 0.75 * len(rows) + 1.5)
    parts = []
    for y, (name, own, mha) in enumerate(rows):
        up = 0.0 if mha is None else 0.18
        label_bars(ax, ax.barh(y - up, own, 0.34, color=BLUE), [num_bytes(own)])
        parts.append(f"{name}: {num_bytes(own)}")
        if mha is not None:
            words = f"{num_bytes(mha)}, {mha / own:.3g} times as much"
            bar = ax.barh(y + up, mha, 0.34, edgecolor=RED, **HATCH)
            label_bars(ax, bar, [words], color=QUIET)
            parts[-1] += f" instead of {num_bytes(mha)}"
    rows_of_bars(
        ax, [row[0] for row in rows], 1.42 * max(max(own, mha or 0) for _, own, mha in rows)
    )
    no_axis(ax, "bottom", "left")
    ax.set_title("cache per token (solid: as it is, hatched: with MHA)", fontsize=10.5)
    return finish(figure, f"Each token leaves in the cache: {'; '.join(parts)}.")


@house_style()
def positions_picture(
    right: Sequence[int],
    wrong: Sequence[int],
    labels_right: Sequence[str],
    labels_wrong: Sequence[str],
) -> Picture:
    """The same text decoded from the right and from a wrong start position, token by token.

    Each sequence has a position and a label a token. The first position that is not the same begins
    the decoded tokens. Marked in both rows: pairs of tokens that are not the same.
    """
    lengths = [len(x) for x in (right, wrong, labels_right, labels_wrong)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"give positions and labels of as many tokens in both, got {lengths}")
    if lengths[0] > WIDEST:
        raise ValueError(f"{lengths[0]} tokens are too many to read: give the last {WIDEST}")
    differ = [a != b for a, b in zip(labels_right, labels_wrong, strict=True)]
    off = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
    wide = 1 + max(_places(positions)[-1] for positions in (right, wrong))
    tall = cell_height([*labels_right, *labels_wrong])
    figure, (ax,) = panels(max(0.5 * wide + 1.2, 6.5), 0.5 * (2 * tall + 3.55) + 0.5)
    _strip(ax, 0, tall, "right", right, labels_right, differ)
    _strip(ax, tall + 1.5, tall, "wrong", wrong, labels_wrong, differ)
    start = "Both start to decode at the same position"
    if off:
        place = _places(right)[off[0]]
        ax.text(place + 0.1, -0.75, "decoded, from here on →", va="center", fontsize=9)
        a, b = right[off[0]], wrong[off[0]]
        start = (
            f"From position {a} on the wrong positions are off by {b - a:+d} ({b} instead of {a})"
        )
    ax.set(xlim=(-1.9, max(wide, 11)), ylim=(2 * tall + 2.5, -1.05), aspect="equal")
    ax.axis("off")
    begin, decoded = (off[0], "decoded ") if off else (0, "")
    others = [i for i in range(begin, len(differ)) if differ[i]]
    said = f"{len(others)} of {len(differ) - begin} {decoded}tokens differ"
    if others:
        i = others[0]
        said += f" (marked ≠), the first is “{labels_wrong[i]}” instead of “{labels_right[i]}”"
    return finish(figure, f"{start}; {said}.")


def _places(positions: Sequence[int]) -> list[int]:
    """Where to draw each token: side by side, with one empty place where positions are skipped."""
    places = [0]
    for before, here in pairwise(positions):
        places.append(places[-1] + (2 if here > before + 1 else 1))
    return places


def _strip(
    ax: Axes,
    y: float,
    tall: float,
    name: str,
    positions: Sequence[int],
    labels: Sequence[str],
    differ: Sequence[bool],
) -> None:
    """One row of token cells with their positions below; ≠ marks those that differ."""
    ax.text(-0.3, y + tall / 2, name, ha="right", va="center", fontweight="bold")
    expected = positions[0]
    for i, (x, position) in enumerate(zip(_places(positions), positions, strict=True)):
        look: dict[str, Any] = {"facecolor": "#e5f0f8", "edgecolor": QUIET}
        if differ[i]:
            look = {"facecolor": "#fbe6d8", "edgecolor": RED, "linewidth": 2.4}
            ax.text(x + 0.5, y - 0.25, "≠", color=RED, fontweight="bold", fontsize=10, **MIDDLE)
        token_cell(ax, x, y, tall, labels[i], **look)
        jumped = position != expected
        below: dict[str, Any] = {"color": RED if jumped else QUIET, "fontsize": 9, **MIDDLE}
        ax.text(x + 0.5, y + tall + 0.3, str(position), **below)
        if position > expected:
            token_cell(ax, x - 1, y, tall, "", edgecolor=RED, linestyle="--", **HATCH)
            last = f" to {position - 1}" if position - 1 > expected else ""
            ax.text(x - 0.5, y + tall + 0.75, f"{expected}{last} skipped", **below)
        elif jumped:
            ax.text(x + 0.5, y + tall + 0.75, "again", **below)
        expected = position + 1


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
        way = f"goes from {_number(first)} at {start} tokens to {_number(last)} at {end}"
        parts.append(f"{name} " + (way if len(line) > 1 else f"{_number(last)} at {end} tokens"))
    equal = [f"up to {n} tokens {a} and {b} take about the same time" for a, b, n in _alike(lines)]
    return f"{title}, {unit} per token: {', '.join([*parts, *equal])}"


def _alike(lines: Lines) -> list[tuple[str, str, int]]:
    """Lines that begin as one: both names, and the longest context up to which they are alike."""
    found = []
    for (a, one), (b, other) in combinations(lines.items(), 2):
        theirs = dict(other)
        both = [(n, abs(math.log(t / theirs[n]))) for n, t in one if n in theirs]
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


@house_style()
def roofline_picture(
    bandwidth: float, peak_flops: float, points: Sequence[tuple[str, float, float]]
) -> Picture:
    """The most FLOP/s a machine can do for each FLOP/byte, and how far each point gets.

    bandwidth in bytes/s, peak in FLOP/s, points (label, FLOP per byte, FLOP/s): Williams et al.,
    2009.
    """
    ridge = peak_flops / bandwidth
    xs, ys = [ridge, *(x for _, x, _ in points)], [peak_flops, *(y for *_, y in points)]
    corners = [(x, min(peak_flops, bandwidth * x)) for x in (min(xs) / 4, ridge, max(xs) * 8)]
    figure, (ax,) = panels(8.5, 4.4)
    ax.plot(*zip(*corners, strict=True), color=INK, linewidth=2.4)
    ax.plot([ridge], [peak_flops], "o", markersize=11, fillstyle="none", color=INK)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte moved, logarithmic")
    ax.set_ylabel("FLOP/s, logarithmic")
    ax.set(xlim=(corners[0][0], corners[-1][0]))
    ax.set_ylim(min(*ys, corners[0][1]) / 3, peak_flops * 5)
    ax.xaxis.set_major_formatter(PLAIN)
    ax.yaxis.set_major_formatter(SI)
    ax.minorticks_off()
    for i, (_, x, y) in enumerate(points):
        ax.plot([x], [y], MARKS[i % 6], color=SERIES[i % 6], markersize=9)
    ax.annotate(
        f"ridge: {_number(ridge)} FLOP/byte", (ridge, peak_flops), (0, 15), ha="center",
        textcoords="offset points", fontsize=9.5,
    )  # fmt: skip
    _name_points(figure, ax, points, corners)
    told = []
    for name, x, y in points:
        side, limit = ("left", "memory") if x < ridge else ("right", "arithmetic")
        part = y / min(peak_flops, bandwidth * x)
        why = f", limited by {limit}" if part > 0.75 else ""  # farther below it something else is
        told.append(f"{name}: {side}, {100 * part:.0f} %{why}")
    start = f"The ridge of {si(peak_flops)}FLOP/s and {si(bandwidth)}B/s is at {_number(ridge)}"
    how = "Where each point lies, and how much of the roof it reaches"
    return finish(figure, f"{start} FLOP/byte. {how}: {'; '.join(told)}.")


def _name_points(
    figure: Figure,
    ax: Axes,
    points: Sequence[tuple[str, float, float]],
    roof: Sequence[tuple[float, float]],
) -> None:
    """Each name below its point, at the nearest place that covers no point, name or line.

    A thin line leads from a name to its point.
    """
    figure.draw_without_rendering()  # only now is it known where the points are
    unit = figure.dpi / 72  # pixels of a point of type
    corners = [ax.transData.transform(corner) for corner in roof]
    steps = [i / 60 for i in range(61)]
    line = [a + t * (b - a) for a, b in pairwise(corners) for t in steps]
    places = [ax.transData.transform((x, y)) for _, x, y in points]
    taken = [(px - 7 * unit, py - 7 * unit, px + 7 * unit, py + 7 * unit) for px, py in places]
    taken += [(px - unit, py - unit, px + unit, py + unit) for px, py in line]
    named = zip(points, places, strict=True)  # the highest first, so that no two lines cross
    for (name, x, y), (px, py) in sorted(named, key=lambda one: -one[1][1]):
        wide = 5.6 * unit * max(len(name), 4)
        away = sorted(
            ((dx, -dy) for dx in (14, -14, 40, -40) for dy in range(0, 130, 8)),
            key=lambda one: one[0] ** 2 + one[1] ** 2,
        )
        for dx, dy in away:
            left = px + dx * unit - (wide if dx < 0 else 0)
            middle = py + dy * unit
            box = (left, middle - 8 * unit, left + wide, middle + 8 * unit)
            inside = ax.bbox.x0 < box[0] and box[2] < ax.bbox.x1 and ax.bbox.y0 < box[1]
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        ax.annotate(
            name, (x, y), (dx, dy), va="center", fontsize=9.5, textcoords="offset points",
            ha="left" if dx > 0 else "right",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.8, "shrinkB": 4},
        )  # fmt: skip


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _number(value: float) -> str:
    """Two digits, three where they are whole: 0.53, 5.3, 53, 530."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
