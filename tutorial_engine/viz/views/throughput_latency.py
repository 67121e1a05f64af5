"""Throughput against latency, a line for each policy.

The caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tutorial_engine.viz.drawing.charts import ROUND, line_look, lines_across, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import QUIET, finish, house_style
from tutorial_engine.viz.words import digits


@house_style()
def throughput_latency(
    curves: Mapping[str, Sequence[tuple[object, float, float]]],
    latency: str = "latency",
    label: str = "",
    capacity: float | None = None,
) -> Picture:
    """Throughput against latency: a line per policy through its points, in the order given.

    A point is (its label, tokens per second, latency in ms); `latency` says which latency it is,
    `label` what the labels count. `capacity`, in tokens per second, is a line.
    """
    figure, (ax,) = panels(8.6, 4.6)
    every = [point for points in curves.values() for point in points]
    speeds, times = [point[1] for point in every], [point[2] for point in every]
    wide = 0 < 10 * min(times) < max(times)  # the small ones would lie on the axis
    facts = []
    for i, (name, points) in enumerate(curves.items()):
        xs, ys = [point[1] for point in points], [point[2] for point in points]
        ax.plot(xs, ys, label=name, linewidth=2, markersize=7, clip_on=False, **line_look(i))
        side = -1 if i % 2 else 1  # neighbours have their labels on different sides
        for words, x, y in points:
            at: dict[str, Any] = {"ha": "left" if side > 0 else "right", "va": "center"}
            on_axis = not wide and y < 0.05 * max(times)
            up = 8 if on_axis else -8 * side
            ax.annotate(str(words), (x, y), (7 * side, up), textcoords="offset points", **at)
        first, last = (f"{digits(ys[j])} ms at {digits(xs[j])} tok/s" for j in (0, -1))
        facts.append(
            f"“{name}” {f'goes from {first} to {last}' if len(points) > 1 else f'has {last}'}"
        )
    ax.set(xlim=(0, 1.12 * max(speeds) or 1), ylim=(0, 1.15 * max(times) or 1))
    if wide:
        ax.set(yscale="log", ylim=(min(times) / 1.5, 1.5 * max(times)))
    ax.yaxis.set_major_formatter(ROUND)
    ax.set_ylabel(f"{latency}, ms{', logarithmic' if wide else ''}")
    ax.set_xlabel("tokens per second, all requests together")
    ax.set_title(f"{latency} against throughput")
    if capacity is not None:
        ax.axvline(capacity, color=QUIET, linestyle=(0, (1, 2)), linewidth=1.8)
        at = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        words = f"full: {digits(capacity)} tok/s"
        ax.annotate(words, (capacity, 0.02), (-5, 0), fontsize=9.5, ha="right", **at)
        facts.append(f"counted by hand, it is full at {digits(capacity)} tok/s")
    numbers = f"numbers: {label}" if label else None
    ax.legend(loc="best", fontsize=9.5, title=numbers, title_fontsize=9.5, alignment="left")
    lines_across(ax)
    return finish(
        figure, f"{latency[0].upper()}{latency[1:]} against throughput: {'; '.join(facts)}."
    )
