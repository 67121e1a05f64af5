"""Latency and throughput of a served workload: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from tutorial_engine.engine.metrics import percentile
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.charts import ROUND, dial_axis, line_look, lines_across, panels
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import INK, QUIET, RULE, finish, house_style
from tutorial_engine.viz.tokens import cut_label, written
from tutorial_engine.viz.trace_rows import Life, Rows, rows
from tutorial_engine.viz.words import digits, listed, ms

Line = Sequence[float | None]
LABEL = 46  # letters of an axis' name in a line


@house_style()
def sweep(
    x: Sequence[float],
    lines: Mapping[str, Line | Mapping[str, Line]],
    xlabel: str,
    ylabel: str,
    at_most: Mapping[str, float] | None = None,
    steps: bool = False,
) -> Picture:
    """Lines over one dial (batch size, budget, arrival rate), a panel for each way to measure.

    A panel is a line, or {name: line}; a line has a number per x, or None where there is none.
    Panels keep their own scale: a virtual clock's seconds are not this machine's. `at_most` gives
    limits to lines by name: each is dotted, and where all limits are kept the panel is shaded.
    With `steps` a number holds from the x before it to its own.
    """
    shown = {
        panel: {
            name: _pairs(f"{panel}, {name!r}", x, line)
            for name, line in (given if isinstance(given, Mapping) else {ylabel: given}).items()
        }
        for panel, given in lines.items()
    }
    figure, axes = panels(5 * max(len(shown), 1.4), 3.9, columns=len(shown))
    alone = all(len(named) == 1 for named in shown.values())
    told = []
    for place, (ax, (panel, named)) in enumerate(zip(axes, shown.items(), strict=True)):
        for i, (name, pairs) in enumerate(named.items(), place if alone else 0):
            look = line_look(i) | ({"drawstyle": "steps-pre", "markersize": 4} if steps else {})
            ax.plot(*zip(*pairs, strict=True), label=name, linewidth=2, **look)
        dial_axis(ax, x, 8, xlabel)
        ax.set_xlabel(textwrap.fill(ax.get_xlabel(), LABEL))
        most = max(value for pairs in named.values() for _, value in pairs)
        ax.set(title=panel, ylabel=ylabel, ylim=(0, 1.12 * most or 1))
        ax.yaxis.set_major_formatter(ROUND)
        lines_across(ax)
        if len(named) > 1:
            ax.legend(loc="best", fontsize=9.5)
        kept = _limits(ax, named, at_most or {}, x if steps else ())
        ways = [f"{name} " * (len(named) > 1) + _way(pairs, x) for name, pairs in named.items()]
        told.append(f"{panel}{f' ({ylabel})' * bool(ylabel)} {', '.join(ways)}{kept}")
    first, last = f"{x[0]:g}", f"{x[-1]:g}"
    over = f"{xlabel} from {first} to {last}" if first != last else f"{xlabel} = {first}"
    return finish(figure, f"{over[0].upper()}{over[1:]}: {'; '.join(told)}.")


def _limits(
    ax: Axes,
    named: Mapping[str, Sequence[tuple[float, float]]],
    at_most: Mapping[str, float],
    edges: Sequence[float],
) -> str:
    """Draw the limits of these lines, and shade where all are kept; what the caption says of it.

    `edges` are the ends of the steps; none for lines.
    """
    limits = {name: at_most[name] for name in named if name in at_most}
    if not limits:
        return ""
    for name, most in limits.items():
        colour = line_look(list(named).index(name))["color"]
        ax.axhline(most, color=colour, linestyle=(0, (1, 2)), linewidth=1.8)
        at: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        ax.annotate(f"{name}: at most {most:g}", (1, most), (0, 4), ha="right", fontsize=9.5, **at)
    broken = {a for name, most in limits.items() for a, value in named[name] if value > most}
    kept = sorted({a for name in limits for a, _ in named[name]} - broken)
    if not kept:
        return ", nowhere are all limits kept"
    left, right = ax.get_xlim()
    edge = 0.01 * (right - left)  # one value alone is seen as well
    begin, end = kept[0] - edge, kept[-1] + edge
    where = f"at {listed([f'{a:g}' for a in kept])}"
    if edges:
        begin, end = max((a for a in edges if a < kept[0]), default=kept[0]), kept[-1]
        where = f"above {begin:g} and " * (begin < kept[0]) + f"up to {end:g}"
    ax.axvspan(begin, end, color=RULE, alpha=0.6, zorder=0, linewidth=0)
    ax.annotate("all kept", (begin, 0), (4, 5), textcoords="offset points", fontsize=9.5)
    return f", all limits kept {where}"


def _pairs(name: str, x: Sequence[float], line: Line) -> list[tuple[float, float]]:
    """The points of a line that are there. ValueError where there is none."""
    pairs = [(a, b) for a, b in zip(x, line, strict=False) if b is not None]
    if len(line) != len(x) or not pairs:
        raise ValueError(
            f"{name}: give a number (or None) for each of {len(x)} x, and not only None; got "
            f"{list(line)}"
        )
    return pairs


def _way(pairs: Sequence[tuple[float, float]], x: Sequence[float]) -> str:
    """Where a line begins and ends; it says at which x where these are not the first and last."""
    (x0, first), (x1, last) = pairs[0], pairs[-1]
    at = [f" (at {a:g})" * (a != b) for a, b in ((x0, x[0]), (x1, x[-1]))]
    if len(pairs) == 1:
        return f"{digits(last)}{at[1]}"
    return f"from {digits(first)}{at[0]} to {digits(last)}{at[1]}"


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
    told = []
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
        told.append(
            f"“{name}” {f'goes from {first} to {last}' if len(points) > 1 else f'has {last}'}"
        )
    ax.set(xlim=(0, 1.12 * max(speeds) or 1), ylim=(0, 1.15 * max(times) or 1))
    if wide:
        ax.set(yscale="log", ylim=(min(times) / 1.5, 1.5 * max(times)))
    ax.yaxis.set_major_formatter(ROUND)
    ax.set_ylabel(f"{latency}, ms{', logarithmic' if wide else ''}")
    ax.set_xlabel("tokens per second, all requests together")
    ax.set_title(f"Throughput against {latency}")
    if capacity is not None:
        ax.axvline(capacity, color=QUIET, linestyle=(0, (1, 2)), linewidth=1.8)
        at = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        words = f"full: {digits(capacity)} tok/s"
        ax.annotate(words, (capacity, 0.02), (-5, 0), fontsize=9.5, ha="right", **at)
        told.append(f"counted by hand, it is full at {digits(capacity)} tok/s")
    numbers = f"numbers: {label}" if label else None
    ax.legend(loc="best", fontsize=9.5, title=numbers, title_fontsize=9.5, alignment="left")
    lines_across(ax)
    return finish(
        figure, f"{latency[0].upper()}{latency[1:]} against throughput: {'; '.join(told)}."
    )


@house_style()
def itl_over_time(traces: Mapping[str, Trace], request_id: str) -> Picture:
    """Inter-token latency of a request over time, a line per run; marked: a long prompt's arrival.

    The long prompt is the longest of those that came after the request's first token. ValueError
    where none did, and for a request that is not there or has no two tokens.
    """
    figure, (ax,) = panels(10, 4)
    parts, arrivals, top = [], [], 0.0
    for i, (name, trace) in enumerate(traces.items()):
        run = rows(trace)
        life = run.life(request_id)
        gaps = [1000 * gap for gap in life.metrics.itl]
        if not gaps:
            raise ValueError(f"{name}: request {request_id!r} has fewer than two tokens: no gap")
        late = _newcomer(name, run, life)
        times = [1000 * (when - run.start) for when in life.token_times[1:]]
        ax.plot(times, gaps, markersize=5.5, label=name, drawstyle="steps-pre", **line_look(i))
        top = max(top, *gaps)
        arrivals.append(round(1000 * (late.arrival - run.start), 3))
        ttft = late.metrics.ttft
        its = "no token" if ttft is None else f"its first token after {ms(ttft)}"
        middle = ms(percentile(life.metrics.itl, 50))
        longest = ms(max(life.metrics.itl))
        parts.append(f"“{name}” {longest} (p50 {middle}), {_name(late)} has {its}")
    for when in set(arrivals):
        ax.axvline(when, color=INK, linestyle=(0, (4, 2)), linewidth=1.3)
    words = f"{_name(late)} comes, prompt of {late.num_prompt_tokens}"
    at = (min(arrivals), 1.17 * top)
    ax.annotate(words, at, (6, 0), textcoords="offset points", va="top")
    ax.set(
        xlim=(0, None), ylim=(0, 1.2 * top), xlabel="time, ms", ylabel="gap before the token, ms"
    )
    ax.set_title(f"Inter-token latency of {_name(life)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    ax.grid(axis="y", color=QUIET, alpha=0.2)
    return finish(
        figure,
        f"{_name(late)} comes with a prompt of {late.num_prompt_tokens} tokens while "
        f"{_name(life)} decodes; longest gap between two tokens of {_name(life)}: "
        f"{'; '.join(parts)}.",
    )


def _name(life: Life) -> str:
    return cut_label(written(life.request_id), 16)


def _newcomer(name: str, run: Rows, life: Life) -> Life:
    """Who came with the long prompt."""
    others = [o for o in run.lives if o is not life and o.arrival >= life.token_times[0]]
    if not others:
        raise ValueError(f"{name}: nobody came after the first token of {life.request_id!r}")
    return max(others, key=lambda other: other.num_prompt_tokens)
