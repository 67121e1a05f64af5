"""The parts that pictures are made of: cell, legend, bar, grid, arrow.

One drawing for each thing that several views show. Knows scenes and looks; knows no engine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.request_look import Box, Look, tint
from tutorial_engine.viz.drawing.scene import HATCHED, Scene
from tutorial_engine.viz.drawing.style import INK, MAGNITUDE, PAPER, QUIET, RULE

Style = dict[str, Any]
BOLD: Style = {"font_weight": "bold"}
FAINT: Style = {"fill": QUIET}
CENTRE: Style = {"text_anchor": "middle"}
RIGHT: Style = {"text_anchor": "end"}
DEAF: Style = {"pointer_events": "none"}  # hovering reaches what lies below
SHADE: Style = {"class_": "te-shade"}  # a magnitude: by night, too, the most is the brightest
THICK: Style = {"stroke": INK, "stroke_width": 2.6}  # what this step runs and writes
WIDTH = 1000.0  # of a large canvas
MARGIN = 10.0
KEY = 11.0  # letters of legends and notes
TRACK = "#e3e8ec"  # of a bar: what it could be
IDLE: Mapping[str, tuple[str, Style]] = {  # states of a request of which a step runs nothing
    "waits": ("#e9edf0", {}),
    "stalls": (PAPER, {"stroke": QUIET, "stroke_dasharray": "3 2"}),
    "arrives": (PAPER, {"stroke": RULE}),
}
GREY = Look(QUIET, tint(QUIET, 0.16), tint(QUIET, 0.5), "plain")  # nobody's: of legends
Mark = Callable[[str, Box], object]  # draws a sample of that name into that box


# -- places ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Places of equal size, numbered from left to right, `columns` in a line.

    `wide` and `tall` from one to the next; `gap` pixels of these stay empty.
    """

    x: float
    y: float
    wide: float
    tall: float
    columns: int = 1 << 30
    gap: tuple[float, float] = (0.0, 0.0)

    def box(self, index: int, count: int = 1) -> Box:
        """The place of that number, or of so many side by side from it on."""
        row, column = divmod(index, self.columns)
        x, y = self.x + column * self.wide, self.y + row * self.tall
        return (x, y, count * self.wide - self.gap[0], self.tall - self.gap[1])

    def height(self, count: int) -> float:
        """Pixels that so many places take."""
        return -(-count // self.columns) * self.tall


def legend_width(words: Sequence[str], wide: float = 18, gap: float = 16) -> float:
    """Pixels that a legend of these words takes, with the gap behind it."""
    return sum(wide + 6 + text_width(each, KEY) + gap for each in words)


# -- colours --------------------------------------------------------------------------------------


def cell_style(state: str, look: Look | None = None) -> tuple[str, Style]:
    """Fill and edge of a cell. It reads without its colour, which is that of a request.

    "free" and "gone": nobody's. "reserved": a slot without K and V. "cached": they are there,
    "kept" for whoever finds them. "written": this step writes them. "solid": the request's full
    colour. "known": a token that has not run, "sampled" by this step (both dashed). What a step did
    with a request: the kinds of `run.Share`, and "arrives".
    """
    if state in IDLE:
        return IDLE[state]
    if look is None or state in ("free", "gone", "reserved"):
        return (HATCHED if state == "reserved" else PAPER), {"stroke": RULE}
    edge: Style = {"stroke": look.colour}
    return {
        "prefill": (look.light, edge),
        "decode": (look.dark, edge),
        "recompute": (look.light, edge | {"stroke_dasharray": "4 2"}),
        "preempted": (HATCHED, edge),
        "cached": (look.light, edge),
        "kept": (tint(look.colour, 0.14), {"stroke": tint(look.colour, 0.5)}),
        "solid": (look.dark, edge),
        "written": (look.dark, THICK),
        "known": (PAPER, edge | {"stroke_dasharray": "3 3"}),
        "sampled": (PAPER, {"stroke": INK, "stroke_width": 1.8, "stroke_dasharray": "4 2"}),
    }[state]


@cache
def _shade(level: int) -> str:
    """A colour of the 256; asking matplotlib for one takes as long as drawing ten squares."""
    return to_hex(matplotlib.colormaps[MAGNITUDE](level))


def shade(share: float) -> str:
    """The colour of a magnitude: 0 is the least, 1 the most."""
    return _shade(min(max(int(256 * share), 0), 255))


def part_of(value: float, ends: tuple[float, float]) -> float:
    """Where a value lies between the ends: 0 .. 1; in the middle where the ends are one."""
    low, high = ends
    return (value - low) / (high - low) if high > low else 0.5


def _pill(box: Box) -> tuple[Box, Style]:
    """Where nothing runs: lower than a box that something runs in, and round."""
    x, y, w, h = box
    high = min(14.0, h)
    return (x, y + (h - high) / 2, w, high), {"rx": min(7.0, w / 3)}


def _band(box: Box, begin: float, end: float) -> str:
    """The part of a box between two of its diagonals, as points; 0 and 1 are opposite corners."""
    x, y, w, h = box
    a, b = 2 * begin, 2 * end
    upper = [(min(a, 1), max(a - 1, 0)), *([(1, 0)] if a < 1 < b else [])]
    upper.append((min(b, 1), max(b - 1, 0)))
    points = upper + [(v, u) for u, v in reversed(upper)]
    return " ".join(f"{x + u * w:.1f},{y + v * h:.1f}" for u, v in points)


# -- the parts ------------------------------------------------------------------------------------


class Sheet(Scene):
    """A scene that knows the parts which the views are made of."""

    def heading(self, title: str, note: str = "", size: float = 15) -> None:
        """The title of the picture; the note, cut to what is left, at the right end of its line."""
        room = self.width - 2 * MARGIN
        title = cut_to(title, room, size, bold=True, keep=True)
        self.text("title", MARGIN, 22, title, size, **BOLD)
        if note:
            note = cut_to(note, room - MARGIN - text_width(title, size, bold=True), 12, keep=True)
            self.note("title.note", self.width - MARGIN, 22, note, 12, **RIGHT)

    def note(
        self, name: str, x: float, y: float, words: str, size: float = KEY, **style: Any
    ) -> None:
        """Text that explains, and therefore stands back."""
        self.text(name, x, y, words, size, **(FAINT | style))

    def inside(self, name: str, box: Box, words: str, size: float, **style: Any) -> None:
        """Words in the middle of a box; hovering reaches the box."""
        x, y, w, h = box
        self.text(name, x + w / 2, y + h / 2 + 0.36 * size, words, size, **CENTRE, **DEAF, **style)

    def cell(
        self,
        name: str,
        box: Box,
        state: str,
        look: Look | None = None,
        tip: str = "",
        word: str = "",
        size: float = KEY,
        letters: Style | None = None,
        shared: Sequence[Look] = (),
        **edge: Any,
    ) -> None:
        """A slot, a token or what a step did: a box in a state of `cell_style`.

        `word` stands in it as `name`.word, cut to the box, in `letters` of that `size`. Where
        several have it, `shared` has all their looks: a band each, along the diagonal. `edge`
        changes the outline.
        """
        fill, style = cell_style(state, look)
        place, shape = _pill(box) if state in IDLE else (box, {"rx": 2})
        style = shape | style | edge
        self.rect(name, place, fill, tip, **style)
        if len(shared) > 1:
            for i, holder in enumerate(shared):
                points = _band(box, i / len(shared), (i + 1) / len(shared))
                fill = cell_style(state, holder)[0]
                self.add(f"{name}.shared.{i}", "polygon", points=points, fill=fill, **DEAF)
            self.rect(f"{name}.shared", box, "none", **(style | DEAF))
        if word:
            letters = letters or {}
            word = cut_to(word, box[2] - 2, size, letters.get("font_weight") == "bold", keep=True)
            self.inside(f"{name}.word", box, word, size, **letters)

    def outline(self, name: str, box: Box, more: float = 0, **style: Any) -> None:
        """A thick frame around what is new or chosen, `more` pixels outside the box."""
        x, y, w, h = box
        around = (x - more, y - more, w + 2 * more, h + 2 * more)
        self.rect(name, around, "none", **(THICK | style), **DEAF)

    def bar(self, name: str, box: Box, share: float, fill: str, tip: str = "") -> None:
        """A part of a whole, from the left, on its track `name`.track."""
        x, y, w, h = box
        self.rect(f"{name}.track", box, TRACK, tip)
        self.rect(name, (x, y, max(w * share, 0.5), h), fill, **DEAF)

    def colour_scale(self, name: str, box: Box, parts: int = 11) -> None:
        """The magnitudes' colours from the least to the most, side by side."""
        x, y, w, h = box
        for i in range(parts):
            box = (x + w * i / parts, y, w / parts, h)
            self.rect(f"{name}.{i}", box, shade(i / (parts - 1)), **SHADE)

    def sample(self, state: str, look: Look | None = None, **edge: Any) -> Mark:
        """A cell of that state for a legend."""
        return lambda name, box: self.cell(name, box, state, look, **edge)

    def legend(
        self,
        x: float,
        base: float,
        marks: Mapping[str, Mark],
        wide: float = 18,
        gap: float = 16,
    ) -> tuple[float, float]:
        """What marks mean: words -> mark, side by side from x on, in as many lines as it takes.

        Returns where it ends, and where its last line stands.
        """
        left = x
        for words, mark in marks.items():
            if x > left and x + legend_width([words], wide, 0) > self.width - 2:
                x, base = left, base + 20
            mark(f"key.{words}", (x, base - KEY, wide, 14.0))
            self.note(f"key.{words}.words", x + wide + 6, base, words)
            self.keys.append((x - 2, base - 15, legend_width([words], wide, 10), 22))
            x += legend_width([words], wide, gap)
        return x, base

    def arrow(
        self,
        name: str,
        points: Sequence[tuple[float, float]],
        ink: str,
        width: float = 1.4,
        **line_style: Any,
    ) -> None:
        """A line through points that ends in a head; it stands out on anything."""
        (x0, y0), (x, y) = points[-2:]
        far = math.hypot(x - x0, y - y0)
        dx, dy = (x - x0) / far, (y - y0) / far
        wide, half = 5 + 1.5 * width, 1.5 + 1.5 * width
        ends = [*points[:-1], (x - wide * dx / 2, y - wide * dy / 2)]  # inside the head
        line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in ends)
        for stroke, colour, thick in (("halo", PAPER, width + 1.9), ("line", ink, width)):
            style: Style = {"fill": "none", "stroke": colour, "stroke_width": thick}
            style |= line_style if stroke == "line" else {}
            self.add(f"{name}.{stroke}", "path", d=line, **style, **DEAF)
        corners = ((x - wide * dx + s * half * dy, y - wide * dy - s * half * dx) for s in (1, -1))
        head = f"M{x:.1f} {y:.1f}" + "".join(f"L{a:.1f} {b:.1f}" for a, b in corners) + "z"
        self.add(f"{name}.head", "path", d=head, fill=ink, stroke=PAPER, **DEAF)
