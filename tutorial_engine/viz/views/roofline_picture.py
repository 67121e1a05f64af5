"""The roofline of a machine, and how far some work gets.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorial_engine.viz.drawing.charts import MARKS, SI, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, PAPER, PLAIN, QUIET, SERIES, finish, house_style
from tutorial_engine.viz.words import si, two_digits


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
        f"ridge: {two_digits(ridge)} FLOP/byte", (ridge, peak_flops), (0, 15), ha="center",
        textcoords="offset points", fontsize=9.5,
    )  # fmt: skip
    _name_points(figure, ax, points, corners)
    facts = []
    for name, x, y in points:
        side, limit = ("left", "memory") if x < ridge else ("right", "arithmetic")
        share = y / min(peak_flops, bandwidth * x)
        why = f", limited by {limit}" if share > 0.75 else ""  # farther below it something else is
        facts.append(f"{name}: {side}, {100 * share:.0f} %{why}")
    start = f"The ridge of {si(peak_flops)}FLOP/s and {si(bandwidth)}B/s is at {two_digits(ridge)}"
    how = "Where each point lies, and how much of the roof it reaches"
    return finish(figure, f"{start} FLOP/byte. {how}: {'; '.join(facts)}.")


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
    for (name, x, y), (px, py) in sorted(named, key=lambda point: -point[1][1]):
        wide = 5.6 * unit * max(len(name), 4)
        away = sorted(
            ((dx, -dy) for dx in (14, -14, 40, -40) for dy in range(0, 130, 8)),
            key=lambda shift: shift[0] ** 2 + shift[1] ** 2,
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
