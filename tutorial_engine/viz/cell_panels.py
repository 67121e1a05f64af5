"""Introduced in notebook 04. The parts of the cells picture: table, shelves, texts and key.

Each draws one part of a snapshot into a scene; knows places and colours, and no tensor but heat.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from tutorial_engine.viz.cell_steps import CellRow, CellsSnapshot, Changes, signed
from tutorial_engine.viz.request_look import Box, cut_to, hatch_path, look, text_width, tint
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, MAGNITUDE, PAPER, QUIET, RULE

WIDTH = 1000.0
TOP = 92.0  # of the first cell's line
LEFT = 62.0  # of the table; the mark of `head` stands before it
COLUMNS = {"cell": 84.0, "pos": 124.0, "owners": 152.0, "shift": 252.0, "token": 282.0}
TABLE_END, SHELF = 356.0, 382.0  # where the table ends, and layer 0's shelf begins
GAP, MIDDLE = 20.0, 15.0  # between layers, and between K and V of one
TEXT = 60.0  # the height of a sequence's text
MAX_OWNERS, MAX_TEXTS = 4, 6
COLORS = matplotlib.colormaps[MAGNITUDE]
SHARED, FADED = "#eef1f3", 0.3
BOLD: dict[str, Any] = {"font_weight": "bold"}
FAINT: dict[str, Any] = {"fill": QUIET}
CENTRE: dict[str, Any] = {"text_anchor": "middle"}
FRAME: dict[str, Any] = {"fill": "none", "stroke": INK, "stroke_width": 2.4, "rx": 3}


class Places:
    """Where everything is, for so many cells and layers."""

    def __init__(self, num_cells: int, num_layers: int, num_values: int) -> None:
        self.pitch = 30.0 if num_cells <= 10 else 24.0
        self.high = self.pitch - 5
        room = (WIDTH - 8 - SHELF - GAP * (num_layers - 1)) / num_layers
        self.square = min(18.0, (room - MIDDLE) / (2 * num_values))
        self.half = self.square * num_values  # of K, or of V
        self.layer = 2 * self.half + MIDDLE + GAP  # from one layer to the next
        self.end = TOP + self.pitch * num_cells

    def row(self, cell: int) -> Box:
        """The table's line of a cell."""
        return (LEFT, TOP + self.pitch * cell, TABLE_END - LEFT, self.high)

    def shelf(self, cell: int, column: int, kind: int) -> Box:
        """K (0) or V (1) of a cell in the column-th layer that is shown."""
        x = SHELF + column * self.layer + kind * (self.half + MIDDLE)
        return (x, TOP + self.pitch * cell, self.half, self.high)


def draw_table(scene: Scene, now: CellsSnapshot, changes: Changes, places: Places) -> None:
    """The address book: one line per cell, kept once for all layers."""
    for words, x in COLUMNS.items():
        style = {} if words in ("owners", "token") else CENTRE
        scene.text(f"head.{words}", x, TOP - 10, words, 11.5, **FAINT, **style)
    for cell, row in enumerate(now.rows):
        _, y, _, h = box = places.row(cell)
        base = y + h / 2 + 4.2
        fill, edge = _row_fill(row)
        scene.rect(f"row.{cell}", box, fill, stroke=edge, rx=4)
        if cell == now.head:
            scene.text("head", LEFT - 6, base, "head ▸", 11, text_anchor="end", **BOLD)
        scene.text(f"row.{cell}.cell", COLUMNS["cell"], base, str(cell), 12, **CENTRE, **BOLD)
        pos = "–" if row.pos is None else str(row.pos)
        shift = signed(row.shift) if row.is_used else "–"
        for name, words in {"pos": pos, "shift": shift}.items():
            style = {**CENTRE, **(BOLD if row.shift and name == "shift" else {})}
            style |= {} if row.is_used else FAINT
            scene.text(f"row.{cell}.{name}", COLUMNS[name], base, words, 12, **style)
        _owners(scene, cell, row, y + h / 2)
        if row.token:
            words = cut_to(row.token, TABLE_END - COLUMNS["token"] - 6, 11.5, keep=True)
            style = {} if row.is_used else {**FAINT, "text_decoration": "line-through"}
            scene.text(f"row.{cell}.token", COLUMNS["token"], base, words, 11.5, **style)
    for cell in sorted({*changes.written, *changes.table}):
        scene.add(f"new.{cell}.row", "rect", **_frame(places.row(cell), 0))


def _row_fill(row: CellRow) -> tuple[str, str]:
    """White if free, the owner's light colour if it has one owner, grey if it is shared."""
    if not row.is_used:
        return PAPER, RULE
    if len(row.owners) > 1:
        return SHARED, QUIET
    one = look(row.owners[0])
    return tint(one.colour, 0.13), one.colour


def _owners(scene: Scene, cell: int, row: CellRow, middle: float) -> None:
    """A chip with its number for each sequence that owns the cell."""
    x = COLUMNS["owners"]
    if not row.owners:
        scene.text(f"row.{cell}.owners", x, middle + 4.2, "nobody", 11, **FAINT)
    fits = row.owners if len(row.owners) <= MAX_OWNERS else row.owners[: MAX_OWNERS - 1]
    for seq_id in fits:
        x += seq_chip(scene, f"owner.{cell}.{seq_id}", x, middle, seq_id) + 3
    if len(fits) < len(row.owners):
        rest = f"+{len(row.owners) - len(fits)}"
        scene.text(f"row.{cell}.more", x, middle + 4.2, rest, 11, **FAINT)


def seq_chip(scene: Scene, name: str, x: float, middle: float, seq_id: int) -> float:
    """A sequence's number on its colour → the width it takes."""
    one, words = look(seq_id), str(seq_id)
    wide = max(18.0, text_width(words, 11, True) + 8)
    box = (x, middle - 8, wide, 16)
    scene.rect(name, box, one.light, stroke=one.colour, stroke_width=1.4, rx=4)
    scene.text(f"{name}.n", x + wide / 2, middle + 4, words, 11, **CENTRE, **BOLD)
    return wide


def draw_shelves(
    scene: Scene,
    now: CellsSnapshot,
    changes: Changes,
    places: Places,
    layers: Sequence[int],
    scale: Sequence[Sequence[tuple[float, float]]],
) -> None:
    """K and V of every cell in every layer shown: a row of squares each, white if never written."""
    for column, layer in enumerate(layers):
        x = places.shelf(0, column, 0)[0]
        scene.text(f"layer.{layer}", x, TOP - 26, f"layer {layer}", 12, **BOLD)
        for kind, name in enumerate("KV"):
            middle = places.shelf(0, column, kind)[0] + places.half / 2
            scene.text(f"layer.{layer}.{name}", middle, TOP - 10, name, 11.5, **FAINT, **CENTRE)
            for cell, row in enumerate(now.rows):
                numbers = now.heat[layer, kind, cell].tolist()
                box, item = places.shelf(cell, column, kind), f"{name}.{layer}.{cell}"
                _squares(scene, item, box, row, numbers, scale[layer][kind])
        for cell in changes.written:
            scene.add(f"new.{cell}.{layer}", "rect", **_frame(_both(places, cell, column), 2))
        for cell in changes.turned:
            x, y, w, h = box = places.shelf(cell, column, 0)
            scene.add(f"turned.{cell}.{layer}", "rect", **_frame(box, 2))
            at = x + w + MIDDLE / 2 + 0.5
            scene.text(f"turned.{cell}.{layer}.d", at, y + h / 2 + 4, "Δ", 11, **CENTRE, **BOLD)


def _squares(
    scene: Scene,
    name: str,
    box: Box,
    row: CellRow,
    numbers: Sequence[float],
    scale: tuple[float, float],
) -> None:
    """Numbers as colours; left-over ones pale and struck out; an empty box if there are none."""
    x, y, w, h = box
    if not row.is_used and not row.left_over:
        lines = "".join(
            f"M{x + i * w / len(numbers):.2f} {y:.2f}v{h:.2f}" for i in range(1, len(numbers))
        )
        scene.rect(name, box, PAPER, stroke=RULE)
        scene.add(f"{name}.lines", "path", d=lines, stroke=RULE, stroke_width=0.7)
        return
    low, high = scale
    for i, number in enumerate(numbers):
        part = (number - low) / (high - low) if high > low else 0.5
        fill = HATCHED  # a cell that is held for a token which has not run yet
        if math.isfinite(part):
            fill = _shade(min(max(int(256 * part), 0), 255), row.left_over)
        square = (x + i * w / len(numbers), y, w / len(numbers), h)
        scene.rect(f"{name}.{i}", square, fill, class_="te-cell")
    if row.left_over:
        scene.add(f"{name}.gone", "path", d=hatch_path(box, "/"), stroke=QUIET, stroke_width=0.9)


@cache
def _shade(level: int, is_faded: bool) -> str:
    """A colour of the 256; asking matplotlib for one takes as long as drawing ten squares."""
    colour = to_hex(COLORS(level))
    return tint(colour, FADED) if is_faded else colour


def _both(places: Places, cell: int, column: int) -> Box:
    x, y, _, h = places.shelf(cell, column, 0)
    return (x, y, 2 * places.half + MIDDLE, h)


def _frame(box: Box, more: float) -> dict[str, Any]:
    """The thick outline around a box."""
    x, y, w, h = box
    return {
        "x": x - more,
        "y": y - more,
        "width": w + 2 * more,
        "height": h + 2 * more,
        **FRAME,
    }


def draw_texts(scene: Scene, now: CellsSnapshot, changes: Changes, top: float) -> None:
    """The first sequences' tokens in their order, with position above and cell below."""
    seq_ids = now.seq_ids[:MAX_TEXTS]
    longest = max((len(now.cells_of(seq_id)) for seq_id in seq_ids), default=1)
    wide = min(62.0, (WIDTH - 150) / longest)
    for i, seq_id in enumerate(seq_ids):
        y = top + TEXT * i
        scene.text(f"text.{seq_id}", 10, y + 25, "sequence", 12, **BOLD)
        seq_chip(scene, f"text.{seq_id}.chip", 82, y + 21, seq_id)
        for word, at in {"pos": y + 7, "cell": y + 44}.items():
            scene.text(f"text.{seq_id}.{word}", 142, at, word, 10.5, text_anchor="end", **FAINT)
        for j, cell in enumerate(now.cells_of(seq_id)):
            is_new = cell in changes.written
            _token(scene, seq_id, cell, now.rows[cell], is_new, (150 + j * wide, y), wide)


def _token(
    scene: Scene,
    seq_id: int,
    cell: int,
    row: CellRow,
    is_new: bool,
    corner: tuple[float, float],
    wide: float,
) -> None:
    """One token of a text; its cell is bold where it is not its position."""
    (x, y), colour, name = corner, look(seq_id).colour, f"text.{seq_id}.{cell}"
    edge = {"stroke": INK, "stroke_width": 2.4} if is_new else {"stroke": colour}
    fill = SHARED if len(row.owners) > 1 else tint(colour, 0.2)
    scene.rect(name, (x + 1, y + 11, wide - 3, 21), fill, rx=3, **edge)
    numbers = {"pos": (7.0, str(row.pos), FAINT), "cell": (44.0, str(cell), FAINT)}
    if cell != row.pos:
        numbers["cell"] = (44.0, str(cell), BOLD)
    word = cut_to(row.token or "?", wide - 8, 11, keep=True)
    scene.text(f"{name}.token", x + wide / 2, y + 25.5, word, 11, **CENTRE)
    for what, (down, number, style) in numbers.items():
        scene.text(f"{name}.{what}", x + wide / 2, y + down, number, 10.5, **CENTRE, **style)


def draw_key(scene: Scene, top: float) -> None:
    """What the marks mean."""
    for i in range(9):
        scene.rect(f"key.heat{i}", (10 + 7 * i, top, 7, 13), to_hex(COLORS(i / 8)))
    x = _word(scene, "low to high in its shelf", 79, top)
    scene.rect("key.free", (x, top, 20, 13), PAPER, stroke=RULE)
    x = _word(scene, "free, never written", x + 26, top)
    scene.rect("key.gone", (x, top, 20, 13), tint(to_hex(COLORS(0.7)), FADED))
    scene.add(
        "key.gone1", "path", d=hatch_path((x, top, 20, 13), "/"), stroke=QUIET, stroke_width=0.9
    )
    x = _word(scene, "freed: there, never read", x + 26, top)
    scene.add("key.new", "rect", **_frame((x, top, 20, 13), -1))
    x = _word(scene, "changed in this step", x + 26, top)
    scene.text("key.turned", x + 4, top + 11, "Δ", 12, **BOLD)
    x = _word(scene, "key turned", x + 18, top)
    scene.rect("key.shared", (x, top, 20, 13), SHARED, stroke=QUIET, rx=3)
    _word(scene, "shared cell", x + 26, top)


def _word(scene: Scene, words: str, x: float, top: float) -> float:
    scene.text(f"key.{words}", x, top + 11, words, 11, **FAINT)
    return x + text_width(words, 11) + 18
