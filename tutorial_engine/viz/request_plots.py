"""The states of a request, and the life of one on a time line.

The diagram's edges are the code's own table; the times are those of a recorded trace.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.engine.request import RequestStatus
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.lanes import (
    TEXT,
    Axis,
    LaneStyle,
    draw_lanes,
    lane_legend,
    name_width,
    time_marks,
)
from tutorial_engine.viz.parts import BOLD, CENTRE, RIGHT, Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import cut_to, text_width
from tutorial_engine.viz.style import INK, PAPER, QUIET, RED
from tutorial_engine.viz.timeline_plots import plain
from tutorial_engine.viz.trace_rows import Life, rows
from tutorial_engine.viz.words import counted, listed, ms, tokens

Point = tuple[float, float]

# -- the states -----------------------------------------------------------------------------------

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
ENDS = {"aborted": "abort()", "error": "a fault of its own"}
SIDE = 9.0  # how far two arrows between the same states are apart, each from the middle


def state_machine(
    transitions: Mapping[RequestStatus, Iterable[RequestStatus]],
) -> Picture:
    """The states of a request and what may follow, drawn from the table it is given.

    ValueError for a state that has no place in the picture, and for one that is missing as a key.
    """
    edges = _edges(transitions)
    scene = Sheet(980, 390)
    scene.heading("The life of a request", size=16)
    names = [status.value for status in transitions]
    final = [name for name in names if not any(a == name for a, _ in edges)]
    for a, b in edges:
        points = _way(a, b, (b, a) in edges)
        _arrow(scene, f"arrow.{a}.{b}", points, b)
        if (a, b) in CAUSES:
            scene.text(f"cause.{a}.{b}", **_beside(points, CAUSES[a, b]))
    for name in names:
        x, y = PLACES[name]
        _state(scene, f"state.{name}", (x, y), HALF, FILLS.get(name, PAPER), name in final)
        scene.text(f"state.{name}.name", x, y + 5, name.upper(), 13, **BOLD, **CENTRE)
    if "waiting" in names:
        x, y = PLACES["waiting"]
        begin = (x - HALF[0] - 46, y)
        scene.add("start", "circle", cx=begin[0], cy=y, r=5, fill=INK)
        scene.text("start.words", 10, y - 14, "add_request", 12)
        _arrow(scene, "start.line", [(begin[0] + 6, y), (x - HALF[0], y)], "waiting")
    x, y = 786.0, 148.0  # the legend: double boxes and the looks of arrows, of those that are there
    if final:
        _state(scene, "legend", (x + 15, y - 2), (15, 10), PAPER, True)
        scene.text("legend.words", x + 38, y + 3, "it is over", 12)
    for name in [name for name in ENDS if name in {b for _, b in edges}]:
        low = y + 24 * (1 + list(ENDS).index(name))
        _arrow(scene, f"arrow.legend.{name}", [(x, low - 1), (x + 30, low - 1)], name)
        scene.text(f"legend.{name}", x + 38, low + 3, ENDS[name], 12)
    most = max(names, key=lambda name: sum(a == name for a, _ in edges))
    ways = sorted(b for a, b in edges if a == most)
    return scene.picture(
        f"{counted(len(names), 'state')} and {counted(len(edges), 'transition')}, as the code has "
        f"them: from {most} a request may become {listed(ways, 'or') if ways else 'none'}; "
        f"{listed(final) if final else 'none'} {'is' if len(final) == 1 else 'are'} final."
    )


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
    return [(a.value, b.value) for a in named for b in named if b in set(transitions[a])]


def _way(a: str, b: str, both_ways: bool) -> list[Point]:
    """The points of an arrow: straight, but for the one that would run through other boxes."""
    (x0, y0), (x1, y1) = PLACES[a], PLACES[b]
    if {a, b} == {"waiting", "error"}:  # around below
        (left, high), (right, bottom) = PLACES["waiting"], PLACES["error"]
        left += 18 - HALF[0]
        around = [(left, high + HALF[1]), (left, LOW), (right, LOW), (right, bottom + HALF[1])]
        return around if a == "waiting" else around[::-1]
    length = math.hypot(x1 - x0, y1 - y0)
    side = SIDE / length if both_ways else 0.0
    aside = (side * (y1 - y0), -side * (x1 - x0))
    start, end = _edge(aside, (x1 - x0, y1 - y0)), _edge(aside, (x0 - x1, y0 - y1))
    return [(x0 + start[0], y0 + start[1]), (x1 + end[0], y1 + end[1])]


def _edge(start: Point, ahead: Point) -> Point:
    """Where a line from `start` on leaves a box; all relative to the box's middle."""
    parts = [
        (math.copysign(half, step) - at) / step
        for half, at, step in zip(HALF, start, ahead, strict=True)
        if step
    ]
    return start[0] + min(parts) * ahead[0], start[1] + min(parts) * ahead[1]


def _beside(points: Sequence[Point], words: str) -> dict[str, Any]:
    """A cause, above a level arrow, beside an upright one: right of the one that goes down."""
    (x0, y0), (x1, y1) = points
    if y0 == y1:
        return {"x": (x0 + x1) / 2, "y": y0 - 8, "words": words, **CENTRE}
    lower = (min(y0, y1) + 7 * max(y0, y1)) / 8
    side = 1 if y1 > y0 else -1
    anchor = "start" if side > 0 else "end"
    return {"x": (x0 + x1) / 2 + 8 * side, "y": lower + 2, "words": words, "text_anchor": anchor}


def _arrow(scene: Sheet, name: str, points: Sequence[Point], to: str) -> None:
    """A line through the points with a head at its end; to an end of its own it looks its own."""
    colour = {"aborted": QUIET, "error": RED}.get(to, INK)
    dash = {"stroke_dasharray": "5 3"} if to == "aborted" else {}
    scene.arrow(name, points, colour, 2.2, **dash)


def _state(scene: Sheet, name: str, at: Point, half: Point, fill: str, is_final: bool) -> None:
    """A rounded box, with a double edge for a state that nothing follows."""
    (x, y), (w, h) = at, half
    gap = 4
    box = (x - w, y - h, 2 * w, 2 * h)
    scene.rect(name, box, fill, rx=h / 2, stroke=INK, stroke_width=1.6)
    if is_final:
        box = (x - w + gap, y - h + gap, 2 * (w - gap), 2 * (h - gap))
        scene.rect(f"{name}.in", box, "none", stroke=INK, stroke_width=1, rx=h / 2 - 3)


# -- one life -------------------------------------------------------------------------------------

WIDE, LEAST, END = 1000.0, 96.0, 862.0  # pixels: the canvas, and between which time lies
TOP, TALL = 150.0, 40.0  # of the request's lane


def one_request(trace: Trace, request_id: str) -> Picture:
    """Queue time, TTFT, every token, ITL, TPOT and total of one request.

    ValueError for an id that the trace does not have, and for a request that never ran.
    """
    run = rows(trace)
    life = run.life(request_id)
    times = life.metrics
    if times.first_scheduled is None:
        raise ValueError(f"request {request_id!r} never ran in this trace: it has no times yet")
    # the run as if only this request had been there: the steps that saw it
    steps = tuple(step for step in run.steps if step.number in life.shares)
    if not steps:
        raise ValueError(f"request {request_id!r} has no finished step in this trace")
    alone = run._replace(steps=steps, lives=(life,))
    end = max([times.finished or alone.end, *times.token_times])
    scene = Sheet(WIDE, 0)
    scene.heading(f"One request: {cut_to(plain(request_id), 300, 16, True, keep=True)}", size=16)
    left, start = max(LEAST, name_width([alone])), life.arrival
    axis = Axis.of(alone, left, END, "time", start, end - start)
    style = LaneStyle.of([(alone, axis)], TALL)
    lane_legend(scene, 10, 50, [alone], "time", style)
    bottom = TOP + TALL
    low = bottom + (130 if times.tpot is not None else 52)
    time_marks(scene, axis, low, 66)
    draw_lanes(scene, alone, axis, TOP, TALL, style, looks=[run.lives.index(life)])
    above = (("total", times.total), ("TTFT", times.ttft), ("queue time", times.queue_time))
    for i, (name, seconds) in enumerate(above):
        if seconds is not None:
            _span(scene, axis, f"{name} {ms(seconds)}", start, seconds, TOP - 66 + 24 * i)
    if times.tpot is not None:
        words = f"TPOT {ms(times.tpot)}, the mean of {counted(len(times.itl), 'gap')}"
        _span(scene, axis, words, times.token_times[0], sum(times.itl), bottom + 96)
    _draw_tokens(scene, axis, times, bottom)
    scene.height = low + 28
    return scene.picture(_caption(life, times))


def _span(scene: Sheet, axis: Axis, words: str, begin: float, seconds: float, y: float) -> None:
    """A bracket with its words in the middle, or behind it where they do not fit."""
    x0, x1 = axis.at(begin), axis.at(begin + seconds)
    line = f"M{x0:.1f} {y - 6:.1f}V{y + 6:.1f}M{x0:.1f} {y:.1f}H{x1:.1f}M{x1:.1f} {y - 6:.1f}v12"
    name, wide = f"span.{words.split()[0]}", text_width(words, 12, True)
    left = (x0 + x1 - wide) / 2 if wide + 30 <= x1 - x0 else x1 + 7
    scene.add(name, "path", d=line, stroke=INK, stroke_width=1.4, fill="none")
    scene.rect(f"{name}.paper", (left - 4, y - 8, wide + 8, 16), PAPER)
    scene.text(f"{name}.word", left, y + 4.3, words, 12, **BOLD)


def _draw_tokens(scene: Sheet, axis: Axis, times: RequestMetrics, bottom: float) -> None:
    """A mark where each token came, numbered from 1, and the gaps between them."""
    places = [axis.at(when) for when in times.token_times]
    low, right = bottom + 18, -9.0
    scene.note("tokens", axis.left - 10, low + 14, "tokens", 11.5, **RIGHT)
    for i, x in enumerate(places):
        line = f"M{x:.1f} {bottom:.1f}V{low:.1f}"
        scene.add(f"token.{i}.line", "path", d=line, stroke=INK, stroke_width=1.2)
        scene.add(f"token.{i}", "circle", cx=x, cy=low, r=3, fill=INK)
        half = text_width(str(i + 1), TEXT) / 2 + 2
        if x - half >= right:
            scene.text(f"token.{i}.number", x, low + 15, str(i + 1), TEXT, **CENTRE)
            right = x + half
    y = bottom + 62
    if times.itl:
        scene.note("itl", axis.left - 10, y + 4, "ITL, ms", 11.5, **RIGHT)
    for i, gap in enumerate(times.itl):
        x0, x1, number = places[i], places[i + 1], ms(gap).removesuffix(" ms")
        line = f"M{x0 + 1:.1f} {y - 8:.1f}v5H{x1 - 1:.1f}v-5"
        scene.add(f"gap.{i}", "path", d=line, stroke=QUIET, stroke_width=1, fill="none")
        if text_width(number, TEXT) + 2 <= x1 - x0:
            scene.text(f"gap.{i}.ms", (x0 + x1) / 2, y + 11, number, TEXT, **CENTRE)


def _caption(life: Life, times: RequestMetrics) -> str:
    said = [f"Request {plain(life.request_id)} waits {ms(times.queue_time or 0.0)} in the queue"]
    if times.ttft is not None:
        said.append(f"has its first token after {ms(times.ttft)} (TTFT)")
    if times.tpot is not None:
        low, high = ms(min(times.itl)), ms(max(times.itl))
        gaps = f"every gap is {low}" if low == high else f"gaps of {low} to {high}"
        said.append(f"then one every {ms(times.tpot)} on average (TPOT; {gaps})")
    count = tokens(len(times.token_times))
    if times.total is None:
        return f"{', '.join(said)}; so far it has {count}."
    end = f"finished ({life.reason})" if life.ending.startswith("finished") else life.ending
    speed = f", {times.throughput:.1f} tok/s" if times.throughput else ""
    return f"{', '.join(said)}; {end} after {count} and {ms(times.total)}{speed}."
