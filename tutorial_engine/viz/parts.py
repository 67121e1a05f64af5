"""Introduced in notebook 01. The parts that pictures are made of: cell, legend, bar, grid, arrow.

One drawing for each thing that several views show. Knows scenes and looks; knows no engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from tutorial_engine.viz.request_look import Box, Look, cut_to, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, MAGNITUDE, PAPER, QUIET, RULE

Style = dict[str, Any]
BOLD: Style = {"font_weight": "bold"}
FAINT: Style = {"fill": QUIET}
CENTRE: Style = {"text_anchor": "middle"}
RIGHT: Style = {"text_anchor": "end"}
DEAF: Style = {"pointer_events": "none"}  # hovering reaches what lies below
THICK: Style = {"stroke": INK, "stroke_width": 2.6}  # what this step runs and writes
DASHED: Style = {"stroke_dasharray": "3 3"}
WIDTH = 1000.0  # of a large canvas
MARGIN = 10.0
KEY = 11.0  # letters of legends and notes
Mark = Callable[[str, Box], object]  # draws a sample of that name into that box


# -- a cell: a slot, a token, what a step did -----------------------------------------------------


def cell_style(state: str, one: Look | None = None) -> tuple[str, Style]:
    """Fill and edge of a cell. It reads without its colour, which is that of a request.

    "free" and "gone": nobody's. "reserved": a slot without K and V. "cached": they are there.
    "written": this step writes them. "solid": the request's full colour. "known": a token that has
    not run, "sampled" by this step.
    """
    if one is None or state in ("free", "gone", "reserved"):
        return (HATCHED if state == "reserved" else PAPER), {"stroke": RULE}
    edge: Style = {"stroke": one.colour}
    return {
        "cached": (one.light, edge),
        "solid": (one.dark, edge),
        "written": (one.dark, THICK),
        "known": (PAPER, edge | DASHED),
        "sampled": (PAPER, {"stroke": INK, "stroke_width": 1.8, "stroke_dasharray": "4 2"}),
    }[state]


def cell(
    scene: Scene,
    name: str,
    box: Box,
    state: str,
    one: Look | None = None,
    tip: str = "",
    **edge: Any,
) -> None:
    """A box that says in which state it is (see `cell_style`); `edge` changes its outline."""
    fill, style = cell_style(state, one)
    scene.rect(name, box, fill, tip, **({"rx": 2} | style | edge))


def shared_cell(scene: Scene, name: str, box: Box, fills: Sequence[str], **edge: Any) -> None:
    """A slot of several requests: a band in each one's colour, along the diagonal."""
    for i, fill in enumerate(fills):
        points = _band(box, i / len(fills), (i + 1) / len(fills))
        scene.add(f"{name}.{i}", "polygon", points=points, fill=fill, **DEAF)
    scene.rect(name, box, "none", **({"rx": 2, "stroke": INK} | edge), **DEAF)


def _band(box: Box, begin: float, end: float) -> str:
    """The part of a box between two of its diagonals, as points; 0 and 1 are opposite corners."""
    x, y, w, h = box
    a, b = 2 * begin, 2 * end
    upper = [(min(a, 1), max(a - 1, 0)), *([(1, 0)] if a < 1 < b else [])]
    upper.append((min(b, 1), max(b - 1, 0)))
    points = upper + [(v, u) for u, v in reversed(upper)]
    return " ".join(f"{x + u * w:.1f},{y + v * h:.1f}" for u, v in points)


def inside(scene: Scene, name: str, box: Box, words: str, size: float, **style: Any) -> None:
    """Words in the middle of a box; hovering reaches the box."""
    x, y, w, h = box
    scene.text(name, x + w / 2, y + h / 2 + 0.36 * size, words, size, **CENTRE, **DEAF, **style)


def outline(scene: Scene, name: str, box: Box, more: float = 0, **style: Any) -> None:
    """A thick frame around what is new or chosen, `more` pixels outside the box."""
    x, y, w, h = box
    around = (x - more, y - more, w + 2 * more, h + 2 * more)
    scene.rect(name, around, "none", **(THICK | style), **DEAF)


def span(boxes: Sequence[Box]) -> Box:
    """The box around boxes of one line, from the first to the last."""
    x, y, _, h = boxes[0]
    return (x, y, boxes[-1][0] + boxes[-1][2] - x, h)


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

    def box(self, index: int) -> Box:
        """The place of that number."""
        row, column = divmod(index, self.columns)
        x, y = self.x + column * self.wide, self.y + row * self.tall
        return (x, y, self.wide - self.gap[0], self.tall - self.gap[1])

    def height(self, count: int) -> float:
        """Pixels that so many places take."""
        return -(-count // self.columns) * self.tall


# -- magnitudes -----------------------------------------------------------------------------------


@cache
def _shade(level: int) -> str:
    """A colour of the 256; asking matplotlib for one takes as long as drawing ten squares."""
    return to_hex(matplotlib.colormaps[MAGNITUDE](level))


def shade(part: float) -> str:
    """The colour of a magnitude: 0 is the least, 1 the most."""
    return _shade(min(max(int(256 * part), 0), 255))


def part_of(value: float, ends: tuple[float, float]) -> float:
    """Where a value lies between the ends: 0 .. 1; in the middle where the ends are one."""
    low, high = ends
    return (value - low) / (high - low) if high > low else 0.5


def colour_scale(scene: Scene, name: str, box: Box, parts: int) -> None:
    """The magnitudes' colours from the least to the most, side by side."""
    x, y, w, h = box
    for i in range(parts):
        colour = shade(i / (parts - 1))
        scene.rect(f"{name}{i}", (x + w * i / parts, y, w / parts, h), colour)


def bar(scene: Scene, name: str, box: Box, part: float, fill: str, tip: str = "") -> None:
    """A part of a whole, from the left, on its track `name`.track."""
    x, y, w, h = box
    scene.rect(f"{name}.track", box, "#e3e8ec", tip)
    scene.rect(name, (x, y, max(w * part, 0.5), h), fill, **DEAF)


# -- words around a picture -----------------------------------------------------------------------


def heading(scene: Scene, title: str, note: str = "", size: float = 15) -> None:
    """The title of a picture; the note stands at the right end of its line."""
    room = scene.width - 3 * MARGIN - text_width(note, 12)
    words = cut_to(title, room, size, bold=True, keep=True)
    scene.text("title", MARGIN, 22, words, size, **BOLD)
    if note:
        scene.text("note", scene.width - MARGIN, 22, note, 12, **RIGHT, **FAINT)


def panel(scene: Scene, name: str, x: float, y: float, title: str, note: str = "") -> None:
    """The title of a part of a picture, and what it says beside it."""
    scene.text(name, x, y, title, 12, **BOLD)
    if note:
        at = x + text_width(title, 12, bold=True) + 12
        scene.text(f"{name}.note", at, y, note, KEY, **FAINT)


def sample(scene: Scene, state: str, one: Look | None = None, **edge: Any) -> Mark:
    """A cell of that state for a legend."""
    return partial(_sample, scene, state, one, edge)


def _sample(scene: Scene, state: str, one: Look | None, edge: Style, name: str, box: Box) -> None:
    cell(scene, name, box, state, one, **edge)


def legend(
    scene: Scene,
    x: float,
    base: float,
    marks: Mapping[str, Mark],
    wide: float = 18,
    gap: float = 16,
) -> float:
    """What marks mean, side by side from x on, as words -> mark; -> where the next could begin."""
    for words, mark in marks.items():
        mark(f"key.{words}", (x, base - KEY, wide, 14.0))
        scene.text(f"key.{words}.words", x + wide + 6, base, words, KEY, **FAINT)
        x += legend_width([words], wide, gap)
    return x


def legend_width(entries: Sequence[str], wide: float = 18, gap: float = 16) -> float:
    """Pixels that a legend of these words takes, with the gap behind it."""
    return sum(wide + 6 + text_width(words, KEY) + gap for words in entries)


# -- lines ----------------------------------------------------------------------------------------


def arrow(
    scene: Scene, name: str, points: Sequence[tuple[float, float]], ink: str, width: float = 1.4
) -> None:
    """A line through points that ends, going right, in an arrow head; it stands out on anything."""
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    for part, colour, thick in (("halo", PAPER, width + 1.9), ("line", ink, width)):
        style = {"fill": "none", "stroke": colour, "stroke_width": thick}
        scene.add(f"{name}.{part}", "path", d=line, **style, **DEAF)
    x, y = points[-1]
    wide, half = 5 + 1.5 * width, 3.5 + 0.75 * width
    head = f"M{x:.1f} {y:.1f}l{-wide:.1f} {-half:.1f}v{2 * half:.1f}z"
    scene.add(f"{name}.head", "path", d=head, fill=ink, stroke=PAPER, **DEAF)
