"""Introduced in notebook 03. The states of a request, and the life of one on a time line.

The diagram's edges are the code's own table; the times are those of a recorded trace.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tutorial_engine.engine.request import RequestStatus
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_life import one_request
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RED

__all__ = ["one_request", "state_machine"]

Point = tuple[float, float]
HALF = (62.0, 23.0)  # half of a state's box
PLACES: dict[str, Point] = {
    "waiting": (150, 80),
    "running": (490, 80),
    "finished": (830, 80),
    "preempted": (490, 210),
    "aborted": (190, 336),
    "error": (860, 336),
}
LOW = 378.0  # below all boxes
FILLS = {"waiting": "#e9edf0", "running": "#cfe3f1", "preempted": "#fbe9c8"}
# What makes a request go from one state to the next, where there is more to say than the names.
CAUSES = {
    ("waiting", "running"): "place, budget and memory",
    ("running", "preempted"): "memory is out",
    ("preempted", "running"): "room again",
    ("running", "finished"): "stop or length",
}
SIDE = 9.0  # how far two arrows between the same states are apart, each from the middle


class _Arrow(NamedTuple):
    """From one box to another along these points; its words stand at `words_at`."""

    points: Sequence[Point]
    words_at: Point
    anchor: str = "middle"


def state_machine(
    transitions: Mapping[RequestStatus, Iterable[RequestStatus]],
) -> Picture:
    """The states of a request and what may follow, drawn from the table it is given.

    ValueError for a state that has no place in the picture, and for one that is missing as a key.
    """
    edges = _edges(transitions)
    scene = Scene(980, 390)
    scene.text("title", 10, 22, "The life of a request", 16, font_weight="bold")
    names = [status.value for status in transitions]
    final = [name for name in names if not any(a == name for a, _ in edges)]
    for a, b in edges:
        _draw_arrow(scene, f"{a}.{b}", _arrow(a, b, (b, a) in edges), CAUSES.get((a, b), ""), b)
    for name in names:
        _state(scene, name, name in final)
    if "waiting" in names:
        x, y = PLACES["waiting"]
        begin = (x - HALF[0] - 46, y)
        scene.add("start", "circle", cx=begin[0], cy=y, r=5, fill=INK)
        scene.text("start.words", 10, y - 14, "add_request", 12)
        _draw_line(scene, "start.line", [begin, (x - HALF[0], y)], INK)
    _legend(scene, 786, 148, edges, final)
    most = max(names, key=lambda name: sum(a == name for a, _ in edges))
    ways = sorted(b for a, b in edges if a == most)
    said = (
        f"{len(names)} states and {len(edges)} transition{'s' * (len(edges) != 1)}, as the code "
        f"has them: from {most} a request may become {_and(ways, 'or')}; {_and(final, 'and')} "
        f"{'are' if len(final) != 1 else 'is'} final."
    )
    return scene.picture(said)


def _legend(
    scene: Scene, x: float, y: float, edges: Sequence[tuple[str, str]], final: Sequence[str]
) -> None:
    """What double boxes and the looks of arrows mean, of those that are there."""
    ends = {b for _, b in edges}
    if final:
        scene.rect("legend", (x, y - 12, 30, 20), PAPER, stroke=INK, stroke_width=1.4, rx=8)
        scene.rect("legend.in", (x + 3, y - 9, 24, 14), "none", stroke=INK, stroke_width=1, rx=5)
        scene.text("legend.words", x + 38, y + 3, "it is over", 12)
    for name, words in (("aborted", "abort()"), ("error", "a fault of its own")):
        if name in ends:
            y += 24
            arrow = _Arrow([(x, y - 1), (x + 30, y - 1)], (0, 0))
            _draw_arrow(scene, f"legend.{name}", arrow, "", name)
            scene.text(f"legend.{name}", x + 38, y + 3, words, 12)


def _edges(transitions: Mapping[RequestStatus, Iterable[RequestStatus]]) -> list[tuple[str, str]]:
    """The table as pairs of names, in the order of the table's own keys."""
    named = list(transitions)
    missing = {b for after in transitions.values() for b in after} - set(named)
    unknown = [status for status in (*named, *missing) if status.value not in PLACES]
    if unknown:
        raise ValueError(
            f"the picture has no place for the state {unknown[0].value!r}: add it to "
            "request_plots.PLACES"
        )
    if missing or not named:
        raise ValueError(f"every state needs its own entry; missing: {sorted(map(str, missing))}")
    return [
        (a.value, b.value)
        for a in named
        for b in sorted(transitions[a], key=lambda b: named.index(b))
    ]


def _arrow(a: str, b: str, both_ways: bool) -> _Arrow:
    """The way of an arrow: straight, but for the one that would run through other boxes."""
    (x0, y0), (x1, y1) = PLACES[a], PLACES[b]
    if {a, b} == {"waiting", "error"}:  # around below
        (left, high), (right, bottom) = PLACES["waiting"], PLACES["error"]
        left += 18 - HALF[0]
        around = [(left, high + HALF[1]), (left, LOW), (right, LOW), (right, bottom + HALF[1])]
        return _Arrow(around if a == "waiting" else around[::-1], ((left + right) / 2, LOW - 6))
    length = math.hypot(x1 - x0, y1 - y0)
    side = SIDE if both_ways else 0.0
    dx, dy = side * (y1 - y0) / length, -side * (x1 - x0) / length
    ahead = (x1 - x0, y1 - y0)
    start, end = _edge((dx, dy), ahead), _edge((dx, dy), (-ahead[0], -ahead[1]))
    points = [(x0 + start[0], y0 + start[1]), (x1 + end[0], y1 + end[1])]
    middle = ((points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2)
    if y0 == y1:
        return _Arrow(points, (middle[0], middle[1] - 8))
    right = dx > 0 or (not both_ways and x1 >= x0)
    lower = (
        (points[0][1] + 3 * points[1][1]) / 4 if y1 > y0 else (3 * points[0][1] + points[1][1]) / 4
    )
    where = (middle[0] + (8 if right else -8), lower + 2)
    return _Arrow(points, where, "start" if right else "end")


def _edge(start: Point, ahead: Point) -> Point:
    """Where a line from `start` on leaves a box; all relative to the box's middle."""
    parts = [
        (math.copysign(half, step) - at) / step
        for half, at, step in zip(HALF, start, ahead, strict=True)
        if step
    ]
    return start[0] + min(parts) * ahead[0], start[1] + min(parts) * ahead[1]


def _draw_arrow(scene: Scene, name: str, arrow: _Arrow, words: str, to: str) -> None:
    colour = {"aborted": QUIET, "error": RED}.get(to, INK)
    _draw_line(scene, f"arrow.{name}", arrow.points, colour, "5 3" if to == "aborted" else "")
    if words:
        x, y = arrow.words_at
        scene.text(f"cause.{name}", x, y, words, 12, text_anchor=arrow.anchor)


def _draw_line(
    scene: Scene, name: str, points: Sequence[Point], colour: str, dash: str = ""
) -> None:
    """A line through the points with an arrow's head at its end."""
    (x0, y0), (x1, y1) = points[-2:]
    length = math.hypot(x1 - x0, y1 - y0)
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    foot = (x1 - 9 * dx, y1 - 9 * dy)
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*points[:-1], foot])
    more = {"stroke_dasharray": dash} if dash else {}
    scene.add(name, "path", d=f"M{way}", stroke=colour, stroke_width=1.6, fill="none", **more)
    corners = [(x1, y1), (foot[0] - 4 * dy, foot[1] + 4 * dx), (foot[0] + 4 * dy, foot[1] - 4 * dx)]
    head = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    scene.add(f"{name}.head", "path", d=f"M{head}Z", fill=colour)


def _state(scene: Scene, name: str, is_final: bool) -> None:
    x, y = PLACES[name]
    w, h = HALF
    fill = FILLS.get(name, PAPER)
    edge: dict[str, Any] = {"stroke": INK, "stroke_width": 1.6}
    scene.rect(f"state.{name}", (x - w, y - h, 2 * w, 2 * h), fill, rx=12, **edge)
    if is_final:
        inner = (x - w + 4, y - h + 4, 2 * w - 8, 2 * h - 8)
        scene.rect(f"state.{name}.in", inner, "none", stroke=INK, stroke_width=1, rx=9)
    scene.text(
        f"state.{name}.name", x, y + 5, name.upper(), 13, font_weight="bold", text_anchor="middle"
    )


def _and(words: Sequence[str], link: str) -> str:
    """`a, b and c`; `none` for none."""
    if not words:
        return "none"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {link} {words[-1]}"
