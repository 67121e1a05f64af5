"""Introduced in notebook 03. The parts of a timeline: axis, rows, legend, ruler, budget bars.

Knows rows of a trace and pixels; writes no sentences.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from tutorial_engine.viz.request_look import (
    Look,
    chip,
    cut_to,
    look,
    nice_step,
    patch,
    text_width,
    tint,
)
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.timeline_words import budget
from tutorial_engine.viz.trace_rows import Life, Rows, Share

By = Literal["step", "time"]
PILL = "#e9edf0"
TALL = 80.0  # of the budget bars
NAME = 110.0  # the most that a name takes
TEXT = 11.0
# words that may lie on a line
HALO: dict[str, Any] = {"stroke": PAPER, "stroke_width": 3, "paint_order": "stroke"}
WORDS = {
    "waits": "waits: in the queue",
    "prefill": "prefill n: n tokens of its prompt",
    "decode": "decode 1: its newest token",
    "recompute": "recompute n: again, after preemption",
    "stalls": "stalls: admitted, but no tokens in this step",
    "preempted": "preempted",
}
LEGEND = {"prefill": "n", "recompute": "n", "decode": "1"}


class Axis(NamedTuple):
    """Where time lies, in pixels: `at(seconds)`, and `span(step number)` -> left, right."""

    left: float
    right: float
    by: By
    at: Callable[[float], float]
    span: Callable[[int], tuple[float, float]]


def make_axis(run: Rows, left: float, right: float, by: By, start: float, seconds: float) -> Axis:
    """An axis for a run; by time, the `seconds` from `start` on fill the width."""
    wide = right - left
    if by == "time":

        def at(when: float) -> float:
            return left + wide * (when - start) / (seconds or 1.0)

        spans = {step.number: (at(step.began), at(step.ended)) for step in run.steps}
    else:
        each = wide / len(run.steps)
        places = {step.number: i for i, step in enumerate(run.steps)}
        spans = {n: (left + i * each, left + (i + 1) * each) for n, i in places.items()}

        def at(when: float) -> float:
            return left + each * sum(step.ended <= when for step in run.steps)

    return Axis(left, right, by, at, lambda number: spans.get(number, (right, right)))


def name_width(runs: Iterable[Rows]) -> float:
    """Pixels for the longest name, with its swatch."""
    names = [cut_to(life.request_id, NAME, 13, True) for run in runs for life in run.lives]
    return max(60.0, 42 + max(text_width(name, 13, True) for name in names))


def row_height(num_rows: int) -> float:
    """Pixels for a request: fewer where there are many."""
    return 34.0 if num_rows <= 6 else 26.0 if num_rows <= 12 else 18.0


def draw_rows(
    scene: Scene,
    run: Rows,
    axis: Axis,
    top: float,
    tall: float,
    prefix: str = "",
    looks: Sequence[int] | None = None,
) -> None:
    """All requests: who it is, what each step did with it, how it ended.

    `looks[r]` is the place that gives row r its colour: r, unless told.
    """
    for r, life in enumerate(run.lives):
        one = look(r if looks is None else looks[r])
        name, y = f"{prefix}{r}", top + r * tall
        shown = cut_to(life.request_id, NAME, 13, True)
        chip(scene, f"who.{name}", 10, y + tall / 2, shown, one)
        for kind, x0, x1 in _idle(life, run, axis):
            _pill(scene, f"idle.{name}.{x0:.1f}", kind, (x0, y, x1 - x0, tall))
        for number, share in life.shares.items():
            if share.kind not in ("waits", "stalls"):
                x0, x1 = axis.span(number)
                tip = f"step {number}, {life.request_id}: {said(share)}"
                box = _inside((x0, y, x1 - x0, tall), axis.by)
                _box(scene, f"box.{name}.{number}", share, box, one, said(share), tip)
        if life.ending:
            edge = axis.span(life.end_step or 0)[1 if life.end_step_ran else 0]
            last = max((axis.span(n)[1] for n in life.ran), default=edge)
            edge = axis.at(life.finished or 0.0) if axis.by == "time" else edge
            place = (max(edge, last) + 5, y + tall / 2 + 4)
            scene.text(f"end.{name}", *place, life.ending, TEXT, fill=QUIET, **HALO)


def said(share: Share) -> str:
    """A share in words: `prefill 6`, `decode 1`, `preempted`."""
    return f"{share.kind} {share.num_tokens}" if share.num_tokens else share.kind


def _inside(box: tuple[float, float, float, float], by: By) -> tuple[float, float, float, float]:
    """The same box a little smaller, so that neighbours do not touch."""
    x, y, w, h = box
    gap = min(1.5, w / 8)
    high = 3.0 if h > 20 else 1.5
    return x + gap, y + high, max(w - 2 * gap, 0.5), h - 2 * high


def _idle(life: Life, run: Rows, axis: Axis) -> list[tuple[str, float, float]]:
    """Stretches in which it waits or stalls, as (kind, left, right); neighbours are one."""
    kinds = [(s.number, life.shares[s.number].kind) for s in run.steps if s.number in life.shares]
    found = []
    for kind, group in groupby(kinds, key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        if kind in ("waits", "stalls"):
            found.append((kind, axis.span(numbers[0])[0], axis.span(numbers[-1])[1]))
    if axis.by == "time":  # from its arrival on, not only from the next step on
        begins = axis.at(life.arrival)
        first = life.first_scheduled if life.first_scheduled is not None else life.finished
        ends = axis.at(run.end if first is None else first)
        early = [i for i, (kind, x, _) in enumerate(found) if kind == "waits" and x < ends]
        found = [one for i, one in enumerate(found) if i not in early]
        if ends - begins > 0.5:
            found.append(("waits", begins, ends))
    return found


def _pill(scene: Scene, name: str, kind: str, box: tuple[float, float, float, float]) -> None:
    x, y, w, h = box
    high = min(14.0, h - 4)
    place = (x + min(2.0, w / 8), y + (h - high) / 2, max(w - 4, 0.75 * w), high)
    edge = {"stroke": QUIET, "stroke_dasharray": "3 2"} if kind == "stalls" else {}
    fill = "#ffffff" if kind == "stalls" else PILL
    scene.rect(name, place, fill, kind, rx=min(7.0, w / 3), **edge)
    if text_width(kind, 10) + 10 <= w and h >= 14:
        scene.text(
            f"{name}.word", x + w / 2, y + h / 2 + 3.6, kind, 10, fill=QUIET, text_anchor="middle"
        )


def _box(
    scene: Scene,
    name: str,
    share: Share,
    box: tuple[float, float, float, float],
    one: Look,
    words: str,
    tip: str = "",
) -> None:
    """A box with its words, or as much of them as fits: the last of them, or nothing."""
    x, y, w, h = box
    fill = one.dark if share.kind == "decode" else one.light
    if share.kind == "preempted":
        scene.rect(f"{name}.paper", box, "#ffffff", rx=min(4.0, w / 4))
        fill = HATCHED
    dash = {"stroke_dasharray": "4 2"} if share.kind == "recompute" else {}
    wide = 1.2 if w > 8 else 0.6
    scene.rect(
        name, box, fill, tip, stroke=one.colour, stroke_width=wide, rx=min(4.0, w / 4), **dash
    )
    fits = [word for word in (words, *words.split()[1:]) if text_width(word, TEXT) + 2 <= w]
    if fits and h >= 12:
        scene.text(
            f"{name}.word", x + w / 2, y + h / 2 + 4, fits[0], TEXT,
            text_anchor="middle", pointer_events="none",
        )  # fmt: skip


def legend(scene: Scene, x: float, y: float, runs: Iterable[Rows], by: By) -> float:
    """What the shapes that occur mean, in as many lines as it takes → where the last one is.

    In grey: a box in a row has the row's colour.
    """
    lives = [life for run in runs for life in run.lives]
    seen = {share.kind for life in lives for share in life.shares.values()}
    if by == "time" and any(life.arrival < (life.first_scheduled or 0.0) for life in lives):
        seen.add("waits")
    grey = Look(QUIET, tint(QUIET, 0.16), tint(QUIET, 0.5), "plain")
    left = x
    for kind, words in WORDS.items():
        if kind not in seen:
            continue
        wide = 31 + text_width(words, TEXT)
        if x > left and x + wide > scene.width - 8:
            x, y = left, y + 20
        if kind in ("waits", "stalls"):
            _pill(scene, f"legend.{kind}", kind, (x, y - 13, 26, 18))
        else:
            box = (x, y - 11, 26.0, 14.0)
            _box(scene, f"legend.{kind}", Share(kind), box, grey, LEGEND.get(kind, ""))
        scene.text(f"legend.{kind}.says", x + 31, y, words, TEXT, fill=INK)
        x += wide + 16
    return y


def ruler(scene: Scene, run: Rows, axis: Axis, y: float) -> None:
    """The steps' numbers below the rows; by time, also milliseconds."""
    right = -9.0
    last = run.steps[-1].number
    room = (axis.right - axis.left) / len(run.steps)
    each = max(1, math.ceil(nice_step((text_width(str(last), TEXT) + 6) / room, 1) - 1e-6))
    for step in run.steps:
        x0, x1 = axis.span(step.number)
        words, middle = str(step.number), (x0 + x1) / 2
        half = text_width(words, TEXT) / 2 + 2.5
        wanted = axis.by == "time" or step.number % each == 0
        if wanted and middle - half >= right:
            scene.text(
                f"step.{step.number}", middle, y + 14, words, TEXT, fill=QUIET, text_anchor="middle"
            )
            right = middle + half
    scene.text("step", axis.left - 8, y + 14, "step", TEXT, fill=QUIET, text_anchor="end")


def time_marks(
    scene: Scene, axis: Axis, start: float, seconds: float, y: float, top: float
) -> None:
    """Milliseconds along the axis, with a thin line up to `top` at each."""
    each = nice_step(seconds * 1000, 10)
    for i in range(int(seconds * 1000 / each + 1e-6) + 1):
        x = axis.at(start + i * each / 1000)
        scene.add(f"ms.{i}.line", "line", x1=x, x2=x, y1=top, y2=y, stroke=RULE, stroke_width=1)
        scene.text(f"ms.{i}", x, y + 13, f"{i * each:g}", TEXT, fill=QUIET, text_anchor="middle")
    scene.text("ms", axis.right + 22, y + 13, "ms", TEXT, fill=QUIET)


def draw_budget(scene: Scene, run: Rows, axis: Axis, base: float) -> None:
    """Tokens of each step, stacked by request in the order of the rows; the line is the budget."""
    most = max(step.num_tokens for step in run.steps)
    limit = budget(run)
    near = limit is not None and limit <= 5 * most
    top = float(max(limit, most)) if limit is not None and near else 1.15 * most
    line = base - TALL * limit / top if limit is not None and near else base - TALL
    for name, y in (("zero", base), ("limit", line)):
        if name == "zero" or near:
            dash = {"stroke_dasharray": "5 3"} if name == "limit" else {}
            scene.add(
                f"budget.{name}", "line", x1=axis.left, x2=axis.right, y1=y, y2=y,
                stroke=INK if name == "limit" else QUIET, stroke_width=1.2, **dash,
            )  # fmt: skip
    for step in run.steps:
        x0, x1 = axis.span(step.number)
        gap = min(1.5, (x1 - x0) / 8)
        y = base
        for r, life in enumerate(run.lives):
            count = life.shares[step.number].num_tokens if step.number in life.shares else 0
            if not count:
                continue
            h = TALL * count / top
            y -= h
            tip = f"step {step.number}: {life.request_id} runs {count} of {step.num_tokens}"
            box = (x0 + gap, y, max(x1 - x0 - 2 * gap, 0.5), h)
            patch(scene, f"budget.{r}.{step.number}", box, look(r), tip)
        number = str(step.num_tokens)
        if text_width(number, TEXT) + 4 <= x1 - x0:
            where = ((x0 + x1) / 2, y - 4)
            scene.text(f"total.{step.number}", *where, number, TEXT, text_anchor="middle", **HALO)
    if limit is None:
        return
    words = [f"budget {limit}"] if near else [f"budget {limit},", "far above"]
    for i, word in enumerate(words):
        scene.text(f"budget.words.{i}", axis.right + 6, line + 4 + 13 * i, word, TEXT)
