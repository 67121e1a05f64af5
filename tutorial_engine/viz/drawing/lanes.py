"""The lanes of a timeline: a row per request, a box per step of it.

Knows a run and pixels; writes no sentences.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import (
    CENTRE,
    DEAF,
    FAINT,
    GREY,
    IDLE,
    RIGHT,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.request_look import chip, look, nice_step
from tutorial_engine.viz.drawing.style import INK, PAPER, RULE
from tutorial_engine.viz.run.run import Life, Run, Share

By = Literal["step", "time"]
NAME = 110.0  # the most that a name takes
TEXT = 11.0
WORDS = {  # kind -> its number in the legend, what it means
    "waits": ("", "waits: in the queue"),
    "prefill": (" n", "prefill{}: {} tokens of its prompt"),
    "decode": (" 1", "decode{}: its newest token"),
    "recompute": (" n", "recompute{}: again, after preemption"),
    "stalls": ("", "stalls: admitted, but no tokens in this step"),
    "preempted": ("", "preempted"),
}
HATCH = 4.0  # pixels: a narrower box shows no hatching
FEW = 4  # requests that may each say how they ended, if all of them ended in the same way


class Axis(NamedTuple):
    """Where time lies, in pixels from left to right.

    by="step": all steps are equally wide; by="time": `seconds` from `start` on fill the width.
    """

    left: float
    right: float
    by: By
    start: float
    seconds: float
    spans: Mapping[int, tuple[float, float]]  # step number -> left, right

    @classmethod
    def of(
        cls, run: Run, left: float, right: float, by: By, start: float, seconds: float
    ) -> "Axis":
        """The axis of a run."""
        axis = cls(left, right, by, start, seconds or 1.0, {})
        each = (right - left) / len(run.steps)
        spans = {
            step.number: (axis.at(step.began), axis.at(step.ended))
            if by == "time"
            else (left + i * each, left + (i + 1) * each)
            for i, step in enumerate(run.steps)
        }
        return axis._replace(spans=spans)

    def at(self, when: float) -> float:
        """Where that second lies; by time only."""
        return self.left + (self.right - self.left) * (when - self.start) / self.seconds

    def span(self, step: int) -> tuple[float, float]:
        """Where a step begins and ends; one that did not run is at the right end."""
        return self.spans.get(step, (self.right, self.right))


def name_width(runs: Iterable[Run]) -> float:
    """Pixels for the longest name, with its swatch."""
    names = [cut_to(life.request_id, NAME, 13, True) for run in runs for life in run.lives]
    return max(60.0, 42 + max(text_width(name, 13, True) for name in names))


def lane_height(count: int) -> float:
    """Pixels for a request: fewer where there are many."""
    return 34.0 if count <= 6 else 26.0 if count <= 12 else 18.0


class LaneStyle(NamedTuple):
    """What all lanes of a picture have in common: boxes that mean the same look the same."""

    words: Mapping[str, int]  # kind -> 2: its word and its number are written, 1: the number, 0: no
    edge: float  # the outline of a box
    usual: str  # how most requests ended: the legend says it for all of them; empty: each says it
    is_hatched: bool  # is a box of one that is preempted wide enough to show its hatching?

    @classmethod
    def of(cls, drawn: Sequence[tuple[Run, Axis]], tall: float) -> "LaneStyle":
        """As much as fits into every box of its kind, in all of these runs.

        `tall` is the height of a lane, the lowest if they differ.
        """
        boxes = [
            (share, _box_width(axis.span(number)))
            for run, axis in drawn
            for life in run.lives
            for number, share in life.shares.items()
            if share.kind not in IDLE
        ]
        words = dict.fromkeys((share.kind for share, _ in boxes), 0)
        for kind in words if tall >= 18 else ():
            same = [(share, wide) for share, wide in boxes if share.kind == kind]
            fits = (
                level
                for level, more in ((2, 2), (1, 4))
                if all(text_width(_said(share, level), TEXT) + more <= wide for share, wide in same)
            )
            words[kind] = next(fits, 0)
        ends = Counter(life.ending for run, _ in drawn for life in run.lives if life.ending)
        usual, count = ends.most_common(1)[0] if ends else ("", 0)
        narrowest = min((wide for _, wide in boxes), default=9.0)
        edge = 1.2 if narrowest > 8 else 0.6
        preempted = (wide for share, wide in boxes if share.kind == "preempted")
        return cls(words, edge, usual if count > FEW else "", max(preempted, default=0.0) >= HATCH)


def _box_width(span: tuple[float, float]) -> float:
    wide = span[1] - span[0]
    return max(wide - 2 * min(1.5, wide / 8), 0.5)


def _said(share: Share, level: int) -> str:
    """Word and number of a share (level 2), its number alone (1), or nothing (0)."""
    words = [share.kind, *([str(share.num_tokens)] if share.num_tokens else [])]
    return " ".join(words[2 - level :])


def draw_lanes(
    scene: Sheet,
    run: Run,
    axis: Axis,
    top: float,
    tall: float,
    style: LaneStyle,
    prefix: str = "",
    looks: Sequence[int] | None = None,
) -> None:
    """All requests: who it is, what each step did with it, how it ended.

    `looks[r]` is the place that gives row r its colour: r, unless told.
    """
    for r, life in enumerate(run.lives):
        colours = look(r if looks is None else looks[r])
        name, y = f"{prefix}{r}", top + r * tall
        chip(
            scene, f"who.{name}", 10, y + tall / 2, cut_to(life.request_id, NAME, 13, True), colours
        )
        for kind, x0, x1 in _idle(life, run, axis):
            word = kind if text_width(kind, TEXT) + 10 <= x1 - x0 else ""
            side = min(2.0, (x1 - x0) / 8)
            box = (x0 + side, y, x1 - x0 - 2 * side, tall)
            scene.cell(f"idle.{name}.{x0:.1f}", box, kind, None, kind, word, TEXT, FAINT)
        high = 3.0 if tall > 20 else 1.5
        for number, share in life.shares.items():
            if share.kind not in IDLE:
                tip = f"step {number}, {life.request_id}: {_said(share, 2)}"
                x0, x1 = axis.span(number)
                wide = _box_width((x0, x1))
                box = ((x0 + x1 - wide) / 2, y + high, wide, tall - 2 * high)
                words = _said(share, style.words[share.kind])
                edge: Style = {"rx": min(4.0, wide / 4), "stroke_width": style.edge}
                scene.cell(
                    f"box.{name}.{number}", box, share.kind, colours, tip, words, TEXT, **edge
                )
                if share.kind == "preempted" and not style.is_hatched:
                    _cross(scene, f"cross.{name}.{number}", (x0 + x1) / 2, y + tall / 2)
        if life.ending:
            ended = axis.span(life.end_step or 0)[1 if life.end_step_ran else 0]
            if axis.by == "time":
                ended = axis.at(life.finished or 0.0)
            x = max([ended, *(axis.span(number)[1] for number in life.ran)])
            if life.ending == style.usual:
                scene.rect(f"end.{name}", (x, y + high, 3.0, tall - 2 * high), INK, life.ending)
                continue
            paper = (x + 3, y + tall / 2 - 8, text_width(life.ending, TEXT) + 4, 16.0)
            scene.rect(f"end.{name}.paper", paper, PAPER)  # no line runs through the words
            scene.note(f"end.{name}", x + 5, y + tall / 2 + 4, life.ending, TEXT)


def _idle(life: Life, run: Run, axis: Axis) -> list[tuple[str, float, float]]:
    """Stretches in which it waits or stalls, as (kind, left, right); neighbours are one."""
    kinds = [(s.number, life.shares[s.number].kind) for s in run.steps if s.number in life.shares]
    found = []
    for kind, group in groupby(kinds, key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        if kind in IDLE:
            found.append((kind, axis.span(numbers[0])[0], axis.span(numbers[-1])[1]))
    if axis.by == "time":  # from its arrival on, not only from the next step on
        begins, first = axis.at(life.arrival), life.first_scheduled
        over = run.end if life.finished is None else life.finished
        ends = axis.at(over if first is None else first)
        found = [stretch for stretch in found if stretch[0] == "stalls" or stretch[1] >= ends]
        if ends - begins > 0.5:
            found.append(("waits", begins, ends))
    return found


def _cross(scene: Sheet, name: str, x: float, y: float) -> None:
    """Marks a box that is too narrow to show its hatching."""
    d = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    for stroke, ink, wide in (("halo", PAPER, 4.0), ("line", INK, 1.6)):
        scene.add(
            f"{name}.{stroke}", "path", d=d, fill="none", stroke=ink, stroke_width=wide, **DEAF
        )


def lane_legend(
    scene: Sheet, x: float, y: float, runs: Iterable[Run], by: By, style: LaneStyle
) -> float:
    """What the shapes that occur mean, in as many lines as it takes → where the last one is.

    In grey: a box in a row has the row's colour.
    """
    lives = [life for run in runs for life in run.lives]
    seen = {share.kind for life in lives for share in life.shares.values()}
    if by == "time" and any(life.arrival < (life.first_scheduled or 0.0) for life in lives):
        seen.add("waits")
    marks: dict[str, Mark] = {}
    for kind, (number, words) in WORDS.items():
        if kind in seen:
            number = number if style.words.get(kind) else ""
            words = words.format(number, number.strip() or "some")
            edge: Style = {} if kind in IDLE else {"rx": 4, "stroke_width": 1.2}
            marks[words] = scene.sample(kind, GREY, word=number.strip(), **edge)
            if kind == "preempted" and not style.is_hatched:
                marks[words] = lambda name, box: _cross(scene, name, box[0] + 9, box[1] + 7)
    if style.usual:
        marks[f"end: {style.usual}"] = lambda name, box: scene.rect(
            name, (box[0] + 12, box[1] - 2, 3.0, 18.0), INK
        )
    return scene.legend(x, y, marks, 26)[1]


def ruler(scene: Sheet, run: Run, axis: Axis, y: float, prefix: str = "") -> None:
    """The steps' numbers below the lanes, as many as fit."""
    right, last = -9.0, run.steps[-1].number
    room = (axis.right - axis.left) / len(run.steps)
    each = max(1, math.ceil(nice_step((text_width(str(last), TEXT) + 6) / room, 1) - 1e-6))
    for step in run.steps:
        words, middle = str(step.number), sum(axis.span(step.number)) / 2
        half = text_width(words, TEXT) / 2 + 2.5
        wanted = axis.by == "time" or step.number % each == 0
        if wanted and middle - half >= right:
            scene.note(f"{prefix}step.{step.number}", middle, y + 14, words, TEXT, **CENTRE)
            right = middle + half
    scene.note(f"{prefix}step", axis.left - 8, y + 14, "step", TEXT, **RIGHT)


def time_marks(scene: Sheet, axis: Axis, y: float, top: float) -> None:
    """Milliseconds along the axis, with a thin line up to `top` at each."""
    each = nice_step(axis.seconds * 1000, 10)
    for i in range(int(axis.seconds * 1000 / each + 1e-6) + 1):
        x = axis.at(axis.start + i * each / 1000)
        scene.add(f"ms.{i}.line", "line", x1=x, x2=x, y1=top, y2=y, stroke=RULE, stroke_width=1)
        scene.note(f"ms.{i}", x, y + 13, f"{i * each:g}", TEXT, **CENTRE)
    scene.note("ms", axis.right + 22, y + 13, "ms", TEXT)
