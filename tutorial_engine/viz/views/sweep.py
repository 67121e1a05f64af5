"""Lines over one dial, a panel for each way to measure.

The caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from tutorial_engine.viz.drawing.charts import ROUND, dial_axis, line_look, lines_across, panels
from tutorial_engine.viz.drawing.letters import wrapped
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import DPI, RULE, finish, house_style
from tutorial_engine.viz.words import digits, listed

Line = Sequence[float | None]
LABEL = 370.0  # pixels of an axis' name in a line


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
    facts = []
    for place, (ax, (panel, named)) in enumerate(zip(axes, shown.items(), strict=True)):
        for i, (name, pairs) in enumerate(named.items(), place if alone else 0):
            look = line_look(i) | ({"drawstyle": "steps-pre", "markersize": 4} if steps else {})
            ax.plot(*zip(*pairs, strict=True), label=name, linewidth=2, **look)
        dial_axis(ax, x, 8, xlabel)
        ax.set_xlabel("\n".join(wrapped(ax.get_xlabel(), LABEL, 10 * DPI / 72)))
        largest = max(value for pairs in named.values() for _, value in pairs)
        ax.set(title=panel, ylabel=ylabel, ylim=(0, 1.12 * largest or 1))
        ax.yaxis.set_major_formatter(ROUND)
        lines_across(ax)
        if len(named) > 1:
            ax.legend(loc="best", fontsize=9.5)
        kept = _limits(ax, named, at_most or {}, x if steps else ())
        ways = [f"{name} " * (len(named) > 1) + _way(pairs, x) for name, pairs in named.items()]
        facts.append(f"{panel}{f' ({ylabel})' * bool(ylabel)} {', '.join(ways)}{kept}")
    first, last = f"{x[0]:g}", f"{x[-1]:g}"
    over = f"{xlabel} from {first} to {last}" if first != last else f"{xlabel} = {first}"
    return finish(figure, f"{over[0].upper()}{over[1:]}: {'; '.join(facts)}.")


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
    for name, limit in limits.items():
        colour = line_look(list(named).index(name))["color"]
        ax.axhline(limit, color=colour, linestyle=(0, (1, 2)), linewidth=1.8)
        at: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        words = f"{name}: at most {limit:g}"
        ax.annotate(words, (1, limit), (0, 4), ha="right", fontsize=9.5, **at)
    broken = {a for name, limit in limits.items() for a, value in named[name] if value > limit}
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
