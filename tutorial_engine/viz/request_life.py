"""Introduced in notebook 03. One request's life on a time line, with the words for its times.

Knows rows of a trace and RequestMetrics; the times are the engine's own.
"""

from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.cache_steps import tokens
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import cut_to, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import INK, QUIET
from tutorial_engine.viz.timeline_parts import (
    Axis,
    draw_rows,
    legend,
    make_axis,
    name_width,
    time_marks,
)
from tutorial_engine.viz.timeline_words import ms, plain
from tutorial_engine.viz.trace_rows import Life, Rows, rows

WIDE, RIGHT = 1000.0, 862.0
TOP = 150.0  # of the request's row
TALL = 40.0


class _Span(NamedTuple):
    """A stretch of time with its word, above or below the row."""

    word: str
    start: float
    end: float
    y: float


def one_request(trace: Trace, request_id: str) -> Picture:
    """Queue time, TTFT, every token, ITL, TPOT and total of one request.

    ValueError for an id that the trace does not have, and for a request that never ran.
    """
    run = rows(trace)
    life = run.life(request_id)
    times = life.metrics
    if times.first_scheduled is None:
        raise ValueError(f"request {request_id!r} never ran in this trace: it has no times yet")
    alone = _alone(run, life)
    if not alone.steps:
        raise ValueError(f"request {request_id!r} has no finished step in this trace")
    end = max([times.finished or alone.end, *times.token_times])
    scene = Scene(WIDE, 0)
    title = f"One request: {cut_to(plain(request_id), 300, 16, True, keep=True)}"
    scene.text("title", 10, 22, title, 16, font_weight="bold")
    legend(scene, 10, 50, [alone], "time")
    left = max(96.0, name_width([alone]))
    axis = make_axis(alone, left, RIGHT, "time", life.arrival, end - life.arrival)
    bottom = TOP + TALL
    low = bottom + (130 if len(times.token_times) > 1 else 52)
    time_marks(scene, axis, life.arrival, end - life.arrival, low, 66)
    draw_rows(scene, alone, axis, TOP, TALL, looks=[run.lives.index(life)])
    for span in _spans(times, bottom):
        _draw_span(scene, axis, span)
    _draw_tokens(scene, axis, life, bottom)
    scene.height = low + 28
    return scene.picture(_caption(life, times))


def _alone(run: Rows, life: Life) -> Rows:
    """The run as if only this request had been drawn: the steps that saw it."""
    steps = tuple(step for step in run.steps if step.number in life.shares)
    return run._replace(steps=steps, lives=(life,))


def _spans(times: RequestMetrics, bottom: float) -> list[_Span]:
    """Every named time of the request that has happened, the longest farthest from the row."""
    begin, found = times.arrival, []
    if times.total is not None and times.finished is not None:
        found.append(_Span(f"total {ms(times.total)}", begin, times.finished, TOP - 66))
    if times.ttft is not None:
        found.append(_Span(f"TTFT {ms(times.ttft)}", begin, times.token_times[0], TOP - 42))
    if times.queue_time is not None and times.first_scheduled is not None:
        words = f"queue time {ms(times.queue_time)}"
        found.append(_Span(words, begin, times.first_scheduled, TOP - 18))
    if times.tpot is not None:
        first, *_, last = times.token_times
        gaps = len(times.itl)
        words = f"TPOT {ms(times.tpot)}, the mean of {gaps} gap{'s' * (gaps != 1)}"
        found.append(_Span(words, first, last, bottom + 96))
    return found


def _draw_span(scene: Scene, axis: Axis, span: _Span) -> None:
    """A bracket with its words in the middle, or behind it where they do not fit."""
    x0, x1, y = axis.at(span.start), axis.at(span.end), span.y
    line = f"M{x0:.1f} {y - 6:.1f}V{y + 6:.1f}M{x0:.1f} {y:.1f}H{x1:.1f}M{x1:.1f} {y - 6:.1f}v12"
    name = span.word.split()[0]
    scene.add(f"span.{name}", "path", d=line, stroke=INK, stroke_width=1.4, fill="none")
    wide = text_width(span.word, 12, True)
    inside = wide + 30 <= x1 - x0
    left = (x0 + x1 - wide) / 2 if inside else x1 + 7
    scene.rect(f"span.{name}.paper", (left - 4, y - 8, wide + 8, 16), "#ffffff")
    scene.text(f"span.{name}.word", left, y + 4.3, span.word, 12, font_weight="bold")


def _draw_tokens(scene: Scene, axis: Axis, life: Life, bottom: float) -> None:
    """A mark where each token came, numbered from 1, and the gaps between them."""
    times = life.token_times
    low, right = bottom + 18, -9.0
    scene.text("tokens", axis.left - 10, low + 14, "tokens", 11.5, fill=QUIET, text_anchor="end")
    for i, when in enumerate(times):
        x = axis.at(when)
        line = f"M{x:.1f} {bottom:.1f}V{low:.1f}"
        scene.add(f"token.{i}.line", "path", d=line, stroke=INK, stroke_width=1.2)
        scene.add(f"token.{i}", "circle", cx=x, cy=low, r=3, fill=INK)
        number = str(i + 1)
        half = text_width(number, 11) / 2 + 2
        if x - half >= right:
            scene.text(f"token.{i}.number", x, low + 15, number, 11, text_anchor="middle")
            right = x + half
    gaps = life.metrics.itl
    if not gaps:
        return
    y = bottom + 62
    scene.text("itl", axis.left - 10, y + 4, "ITL, ms", 11.5, fill=QUIET, text_anchor="end")
    for i, gap in enumerate(gaps):
        x0, x1 = axis.at(times[i]), axis.at(times[i + 1])
        line = f"M{x0 + 1:.1f} {y - 8:.1f}v5H{x1 - 1:.1f}v-5"
        scene.add(f"gap.{i}", "path", d=line, stroke=QUIET, stroke_width=1, fill="none")
        number = ms(gap).removesuffix(" ms")
        if text_width(number, 11) + 2 <= x1 - x0:
            scene.text(f"gap.{i}.ms", (x0 + x1) / 2, y + 11, number, 11, text_anchor="middle")


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
