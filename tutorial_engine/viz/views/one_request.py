"""The life of one request on a time line, with the times of a recorded trace."""

from dataclasses import replace

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.drawing.lanes import (
    TEXT,
    Axis,
    LaneStyle,
    draw_lanes,
    lane_legend,
    name_width,
    time_marks,
)
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, RIGHT, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET
from tutorial_engine.viz.run.run import Life, Run
from tutorial_engine.viz.views.timeline import plain
from tutorial_engine.viz.words import counted, ms, tokens

WIDE, LEAST, END = 1000.0, 96.0, 862.0  # pixels: the canvas, and between which time lies
TOP, TALL = 150.0, 40.0  # of the request's lane


def one_request(trace: Trace, request_id: str) -> Picture:
    """Queue time, TTFT, every token, ITL, TPOT and total of one request.

    ValueError for an id that the trace does not have, and for a request that never ran.
    """
    run = Run.of(trace)
    life = run.life(request_id)
    times = life.metrics
    if times.first_scheduled is None:
        raise ValueError(f"request {request_id!r} never ran in this trace: it has no times yet")
    # the run as if only this request had been there: the steps that saw it
    steps = tuple(step for step in run.steps if step.number in life.shares)
    if not steps:
        raise ValueError(f"request {request_id!r} has no finished step in this trace")
    alone = replace(run, steps=steps, lives=(life,))
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
