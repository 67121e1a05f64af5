"""Pieces of a picture that know their size: words, rows, columns, tables, parts for a phone.

A view says what stands beside or below what; nobody types a place. Items are named by their path
("facts.1.2": line 1, column 2 of the table "facts"), or by a name of their own.

Looked at, and not taken: svgwrite and drawsvg write elements; they measure and place nothing. Yoga
and Taffy (poga, stretchable) are flexbox in compiled code: one wheel more for what are sums and
maxima here, they ask us how wide words are, and where a phone may cut a table they do not say.
matplotlib's layouts place axes, not words, and a figure takes longer than a slider may.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, NamedTuple

from tutorial_engine.viz.drawing.letters import cut_to, text_width, wrapped
from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, Sheet
from tutorial_engine.viz.drawing.request_look import Look, chip
from tutorial_engine.viz.drawing.style import RULE

PHONE = 430.0  # pixels of a picture across a screen of 390: letters of 11 are 9 high there
Draw = Callable[[Sheet, str, float, float], object]  # sheet, name, x and y of the upper left corner


class Piece(NamedTuple):
    """Something of a known size that can be drawn anywhere.

    `stops`: where a phone may cut it, from its left edge; what lies before the first is repeated.
    """

    wide: float
    tall: float
    draw: Draw
    stops: tuple[float, ...] = ()

    def named(self, name: str) -> "Piece":
        """The same, with a name of its own."""
        return self._replace(draw=lambda sheet, _, x, y: self.draw(sheet, name, x, y))


# -- what stands somewhere ------------------------------------------------------------------------


def words(
    said: str, size: float = 12, room: float = math.inf, max_lines: int = 1, **style: Any
) -> Piece:
    """Text in up to `max_lines` lines of so many pixels, then cut."""
    bold = style.get("font_weight") == "bold"
    lines = (max_lines > 1 and wrapped(said, room, size, bold)) or [said]
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [" ".join(lines[max_lines - 1 :])]
    lines = [cut_to(line, room, size, bold, keep=True) for line in lines]
    pitch = round(1.4 * size)

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        for i, line in enumerate(lines):
            item = f"{name}.{i}" if max_lines > 1 else name
            if line:
                sheet.text(item, x, y + pitch * i + 1.06 * size, line, size, **style)

    return Piece(max(text_width(each, size, bold) for each in lines), pitch * len(lines), draw)


def who(name: str, look: Look) -> Piece:
    """A request: its swatch and its name."""
    wide = 20 + text_width(name, 13, bold=True)
    return Piece(wide, 18, lambda sheet, item, x, y: chip(sheet, item, x, y + 9, name, look))


def cell(
    wide: float,
    tall: float,
    state: str,
    look: Look | None = None,
    said: str = "",
    tip: str = "",
    size: float = 11,
    **edge: Any,
) -> Piece:
    """A slot, a token or what a step did, in a state of `parts.cell_style`; words cut to its width.

    `look` is that of its request: `request_look.look(i)` of the i-th, counted from 0.
    """

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        sheet.cell(name, (x, y, wide, tall), state, look, tip, said, size, **edge)

    return Piece(wide, tall, draw)


def bar(share: float, wide: float, fill: str, tip: str = "", tall: float = 13) -> Piece:
    """A part of a whole on its track."""
    return Piece(
        wide, tall, lambda sheet, name, x, y: sheet.bar(name, (x, y, wide, tall), share, fill, tip)
    )


# -- where it stands ------------------------------------------------------------------------------


def row(*pieces: Piece, gap: float = 8, align: float = 0.5) -> Piece:
    """Side by side; `align` 0 is at the top of the line, 1 at its bottom."""
    return table([pieces], gap, align=align)._replace(stops=())


def column(*pieces: Piece, gap: float = 6, across: float = 0) -> Piece:
    """One below the other; `across` 0.5 is in the middle, 1 at the right."""
    return table([[piece] for piece in pieces], between=gap, across=[across])


def over(*pieces: Piece, across: float = 0.5) -> Piece:
    """Each on top of the one before it, in the middle of the height; `across` as in a column."""
    wide, tall = max(each.wide for each in pieces), max(each.tall for each in pieces)

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        for i, each in enumerate(pieces):
            left, top = x + (wide - each.wide) * across, y + (tall - each.tall) / 2
            each.draw(sheet, f"{name}.{i}", left, top)

    return Piece(wide, tall, draw)


def table(
    lines: Sequence[Sequence[Piece | str]],
    gap: float = 18,
    between: float = 4,
    least: Sequence[float] = (),
    tall: float = 0,
    align: float = 0.5,
    across: Sequence[float] = (),
    rules: bool = False,
) -> Piece:
    """Lines of entries, each at least so `tall`, with `rules` between; plain text is of size 12.5.

    A column is as wide as its widest entry and as `least` says (`gap` comes on top): where that is
    enough for all steps, nothing moves from one to the next. `across` says for each column where in
    it an entry stands: 0 at the left, 1 at the right.
    """
    grid = [
        [words(entry, 12.5) if isinstance(entry, str) else entry for entry in line]
        for line in lines
    ]
    columns = zip(zip_longest(*grid, fillvalue=words("")), chain(least, repeat(0.0)), strict=False)
    wide = [max(floor, *(piece.wide for piece in column)) for column, floor in columns]
    heights = [max(tall, *(piece.tall for piece in line)) for line in grid]
    sides = [*across, *[0.0] * len(wide)]
    lefts = [sum(wide[:i]) + gap * i for i in range(len(wide) + 1)]

    whole = lefts[-1] - gap, sum(heights) + between * (len(heights) - 1)

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        for i, (line, height) in enumerate(zip(grid, heights, strict=True)):
            if rules and i:
                d = f"M{x:.1f} {y - between / 2:.1f}h{whole[0]:.1f}"
                sheet.add(f"{name}.rule.{i}", "path", d=d, stroke=RULE)
            for j, piece in enumerate(line):
                item = ".".join(filter(None, (name, str(i), str(j))))
                at = x + lefts[j] + (wide[j] - piece.wide) * sides[j]
                piece.draw(sheet, item, at, y + (height - piece.tall) * align)
            y += height + between

    return Piece(*whole, draw, tuple(left - gap / 2 for left in lefts[1:-1]))


def framed(piece: Piece, wide: float = 0, pad: float = 12, **look: Any) -> Piece:
    """In a frame, which is at least so wide."""
    wide, tall = max(wide, piece.wide + 2 * pad), piece.tall + pad

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        sheet.rect(f"{name}.frame", (x, y, wide, tall), **look)
        piece.draw(sheet, name, x + pad, y + pad / 2)

    return Piece(wide, tall, draw, tuple(pad + stop for stop in piece.stops))


def panel(title: str, *below: Piece, gap: float = 6) -> Piece:
    """A part of the picture, with a title or "", which a phone shows alone, and in several if wide.

    A phone shows an explorer's or player's panels and nothing else of the body; a Picture whole.
    """
    head = [words(title, 12, **BOLD)] if title else []
    whole, under = column(*head, *below, gap=gap), column(*below, gap=gap)
    stops = next((piece.stops for piece in below if piece.wide > PHONE), ())

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        whole.draw(sheet, name, x, y)
        x, top, bottom = x - 3, y - 3, y + whole.tall + 3
        if stops and head:
            sheet.parts.append([(x, top, head[0].wide + 6, y + whole.tall - under.tall - top)])
            top = y + whole.tall - under.tall
        for begin, end in _cuts(stops, whole.wide):
            lead = [(x, top, stops[0] + 3, bottom - top)] if begin else []
            sheet.parts.append(
                [*lead, (x + 3 * bool(begin) + begin, top, end - begin, bottom - top)]
            )

    return whole._replace(draw=draw)


def _cuts(stops: Sequence[float], wide: float) -> list[tuple[float, float]]:
    """From where to where a phone sees, behind the first column: as many columns as fit."""
    if not stops:
        return [(0, wide + 6)]
    found, begin, ends = list[tuple[float, float]](), stops[0], [*stops[1:], wide + 3]
    for end, after in zip(ends, [*ends[1:], math.inf], strict=True):
        if stops[0] + 3 + after - begin > PHONE:
            found.append((begin, end))
            begin = end
    return found


def show(sheet: Sheet, body: Piece, top: float, hint: str = "") -> Sheet:
    """Draw the body from `top` on (44 is below a heading), and leave a line for tips below it.

    A view makes a `Sheet` of its body's width and two margins, writes `heading` and `legend` (which
    returns where its last line stands), and calls this.
    """
    body.draw(sheet, "", MARGIN, top)
    sheet.height = top + body.tall + (38 if hint else 10)
    sheet.tip_at, sheet.hint = (MARGIN, sheet.height - 10), hint
    return sheet
