"""Cells as a picture: one table for all layers, K and V of each layer.

The table stands at the left, once; K and V of the same cell stand in the same line in every layer.
Knows snapshots of cells; knows no model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    FAINT,
    MARGIN,
    RIGHT,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
    part_of,
    shade,
)
from tutorial_engine.viz.drawing.request_look import Box, hatch_path, look, tint
from tutorial_engine.viz.drawing.scene import HATCHED
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.run.cell_steps import CellRow, CellsSnapshot, Changes
from tutorial_engine.viz.tokens import cut_label
from tutorial_engine.viz.words import counted, numbered, signed

MAX_CELLS, MAX_LAYERS, MAX_OWNERS, MAX_TEXTS = 16, 4, 4, 6  # more would not be readable
TOP = 92.0  # of the first cell's line
LEFT, TABLE_END, LAYERS = 62.0, 356.0, 382.0  # where the table begins and ends, and layer 0 begins
COLUMNS = {"cell": 84.0, "pos": 124.0, "owners": 152.0, "shift": 252.0, "token": 282.0}
GAP, MIDDLE = 20.0, 15.0  # between layers, and between K and V of one
STRIPS = 330.0  # pixels of layers that a narrow screen shows side by side
TEXT = 60.0  # the height of a sequence's text
SHARED, FADED = "#eef1f3", 0.3
FRAME: Style = {"stroke_width": 2.4, "rx": 3}
ENDS = torch.tensor([0.05, 0.95])
Scale = list[list[tuple[float, float]]]  # per layer, of K and of V: low and high


def cells_scene(
    now: CellsSnapshot,
    changes: Changes,
    title: str,
    scale: Scale,
    num_texts: int = 0,
    most_layers: int = MAX_LAYERS,
) -> Sheet:
    """Table, K and V, the sequences' texts below, and the key; hovering tells of each cell.

    Room is left for `num_texts` texts, so that the steps of a history are of one height.
    """
    if len(now.rows) > MAX_CELLS:
        raise ValueError(f"{len(now.rows)} cells are too many to be seen: draw at most {MAX_CELLS}")
    layers = shown_layers(now, min(most_layers, MAX_LAYERS))
    return _CellSheet(now, changes, title, scale, num_texts, layers)


def shown_layers(now: CellsSnapshot, count: int) -> list[int]:
    """All layers, or the first ones and the last: so many."""
    if now.num_layers <= count:
        return list(range(now.num_layers))
    return [*range(count - 1), now.num_layers - 1]


def heat_scale(moments: Sequence[CellsSnapshot]) -> Scale:
    """Low and high of each layer's K and V over all these moments: one scale for them all.

    A tenth of the numbers lies outside and has the colours of the ends: the others differ more.
    """
    heat = torch.stack([moment.heat for moment in moments])  # [moments, L, 2, cells, n]
    scale: Scale = []
    for layer in heat.unbind(1):
        known = [x[x.isfinite()] for x in layer.unbind(1)]
        ends = [x.quantile(ENDS).tolist() if x.numel() else [0.0, 0.0] for x in known]
        scale.append([(low, high) for low, high in ends])
    return scale


@dataclass(frozen=True)
class Places:
    """Where everything is, for so many cells, layers, and numbers of a key or value."""

    num_cells: int
    num_layers: int
    num_values: int

    @property
    def table(self) -> Grid:
        """The lines of the table."""
        pitch = 30.0 if self.num_cells <= 10 else 24.0
        return Grid(LEFT, TOP, TABLE_END - LEFT, pitch, 1, (0, 5))

    @property
    def half(self) -> float:
        """The width of K, or of V, in a layer."""
        room = (WIDTH - 8 - LAYERS - GAP * (self.num_layers - 1)) / self.num_layers
        return min(18.0 * self.num_values, (room - MIDDLE) / 2)

    def layer(self, cell: int, column: int) -> Box:
        """K and V of a cell in the column-th layer that is shown."""
        _, y, _, h = self.table.box(cell)
        wide = 2 * self.half + MIDDLE
        return (LAYERS + column * (wide + GAP), y, wide, h)

    def vector(self, cell: int, column: int, kind: int) -> Box:
        """K (0) or V (1) of a cell in the column-th layer that is shown."""
        x, y, _, h = self.layer(cell, column)
        return (x + kind * (self.half + MIDDLE), y, self.half, h)


class _CellSheet(Sheet):
    """The picture of one moment of the cells."""

    def __init__(
        self,
        now: CellsSnapshot,
        changes: Changes,
        title: str,
        scale: Scale,
        num_texts: int,
        layers: Sequence[int],
    ) -> None:
        self.now, self.changes, self.scale, self.layers = now, changes, scale, layers
        self.places = Places(len(now.rows), len(self.layers), now.heat.shape[-1])
        texts = TOP + self.places.table.height(len(now.rows)) + 22
        floor = texts + TEXT * min(MAX_TEXTS, max(len(now.seq_ids), num_texts))
        super().__init__(WIDTH, floor + 48, (MARGIN, floor + 42))
        self.hint = "hover over a cell to see it in all layers, and who may read it"
        self.heading(title, size=16)
        self._head()
        for cell, row in enumerate(now.rows):
            self._row(cell, row)
        for column, layer in enumerate(self.layers):
            self._layer(column, layer)
        self._changes()
        self._texts(texts)
        self._key(floor + 17)
        for cell in range(len(now.rows)):
            self._hot(cell)
        top, tall = TOP - 60, texts - TOP + 46
        self.parts = [[(0, top, TABLE_END + 4, tall)]]
        self.parts.append([(LAYERS - 4, TOP - 58, 354, 20)])
        top, tall = top + 22, tall - 22
        wide = 2 * self.places.half + MIDDLE + GAP
        at_once = max(1, int(STRIPS // wide))
        for first in range(0, len(self.layers), at_once):
            x, many = LAYERS + first * wide - 6, min(at_once, len(self.layers) - first)
            self.parts.append([(LEFT - 2, top, 44, tall), (x, top, many * wide - 4, tall)])
        longest = max((len(now.cells_of(seq_id)) for seq_id in now.seq_ids), default=1)
        reach = 160 + longest * min(62.0, (WIDTH - 150) / longest)
        self.parts.append([(6, texts - 6, max(reach, 400), floor - texts + 4)])

    def _head(self) -> None:
        """What the columns are."""
        now, y = self.now, TOP - 44
        used = f"{now.heat.shape[-1]} of the {now.head_dim} numbers of K/V head 0"
        if len(self.layers) < now.num_layers:
            used += f"; {now.num_layers} layers, {len(self.layers)} shown"
        self.note("where", LAYERS, y, used, 11.5)
        self.note("book", LEFT, y, "kept once, for all layers", 11.5)
        for words, x in COLUMNS.items():
            style = {} if words in ("owners", "token") else CENTRE
            self.note(f"head.{words}", x, TOP - 10, words, 11.5, **style)

    def _row(self, cell: int, row: CellRow) -> None:
        """A line of the table: white if free, in its owner's light colour, grey if shared."""
        _, y, _, h = box = self.places.table.box(cell)
        name, base = f"row.{cell}", y + h / 2 + 4.2
        fill, edge = PAPER, RULE
        if len(row.owners) == 1:
            edge = look(row.owners[0]).colour
            fill = tint(edge, 0.13)
        elif row.is_used:
            fill, edge = SHARED, QUIET
        self.rect(name, box, fill, stroke=edge, rx=4)
        if cell == self.now.head:
            self.text("head", LEFT - 6, base, "head ▸", 11, **RIGHT, **BOLD)
        plain = {} if row.is_used else FAINT
        numbers: dict[str, tuple[str, Style]] = {
            "cell": (str(cell), BOLD),
            "pos": ("–" if row.pos is None else str(row.pos), plain),
            "shift": (signed(row.shift) if row.is_used else "–", BOLD if row.shift else plain),
        }
        for what, (words, style) in numbers.items():
            self.text(f"{name}.{what}", COLUMNS[what], base, words, 12, **CENTRE, **style)
        self._owners(cell, row, y + h / 2)
        if row.token:
            words = cut_to(row.token, TABLE_END - COLUMNS["token"] - 6, 11.5, keep=True)
            gone = {} if row.is_used else {**FAINT, "text_decoration": "line-through"}
            self.text(f"{name}.token", COLUMNS["token"], base, words, 11.5, **gone)

    def _owners(self, cell: int, row: CellRow, middle: float) -> None:
        """A chip with its number for each sequence that owns the cell."""
        x = COLUMNS["owners"]
        if not row.owners:
            self.note(f"row.{cell}.owners", x, middle + 4.2, "nobody")
        fits = row.owners if len(row.owners) <= MAX_OWNERS else row.owners[: MAX_OWNERS - 1]
        for seq_id in fits:
            x += self._chip(f"owner.{cell}.{seq_id}", x, middle, seq_id) + 3
        if len(fits) < len(row.owners):
            self.note(f"row.{cell}.more", x, middle + 4.2, f"+{len(row.owners) - len(fits)}")

    def _chip(self, name: str, x: float, middle: float, seq_id: int) -> float:
        """A sequence's number on its colour → the width it takes."""
        wide = max(18.0, text_width(str(seq_id), 11, True) + 8)
        box = (x, middle - 8, wide, 16.0)
        style: Style = {"letters": BOLD, "stroke_width": 1.4, "rx": 4}
        self.cell(name, box, "cached", look(seq_id), "", str(seq_id), **style)
        return wide

    def _layer(self, column: int, layer: int) -> None:
        """K and V of every cell in a layer: a row of squares each, white if never written."""
        x = self.places.vector(0, column, 0)[0]
        self.text(f"layer.{layer}", x, TOP - 26, f"layer {layer}", 12, **BOLD)
        for kind, name in enumerate("KV"):
            middle = self.places.vector(0, column, kind)[0] + self.places.half / 2
            self.note(f"layer.{layer}.{name}", middle, TOP - 10, name, 11.5, **CENTRE)
            numbers, ends = self.now.heat[layer, kind].tolist(), self.scale[layer][kind]
            for cell, row in enumerate(self.now.rows):
                item, box = f"{name}.{layer}.{cell}", self.places.vector(cell, column, kind)
                if row.is_used or row.left_over:
                    self._squares(item, box, row.left_over, numbers[cell], ends)
                else:
                    self._never_written(item, box)

    def _never_written(self, name: str, box: Box) -> None:
        x, y, w, h = box
        pitch = w / self.places.num_values
        ticks = (f"M{x + i * pitch:.2f} {y:.2f}v{h:.2f}" for i in range(1, self.places.num_values))
        self.rect(name, box, PAPER, stroke=RULE)
        self.add(f"{name}.lines", "path", d="".join(ticks), stroke=RULE, stroke_width=0.7)

    def _squares(
        self,
        name: str,
        box: Box,
        is_left_over: bool,
        numbers: Sequence[float],
        ends: tuple[float, float],
    ) -> None:
        """Numbers as colours; what is left over pale and struck out."""
        squares = Grid(box[0], box[1], box[2] / len(numbers), box[3])
        pale: Style = {"stroke": PAPER, "stroke_width": 0.5}  # by night near its page, too
        for i, number in enumerate(numbers):
            share = part_of(number, ends)
            fill, look = HATCHED, pale  # a cell that is held for a token which has not run yet
            if math.isfinite(share):
                fill, look = shade(share), {"class_": "te-cell"}
                if is_left_over:
                    fill, look = tint(fill, FADED), pale
            self.rect(f"{name}.{i}", squares.box(i), fill, **look)
        if is_left_over:
            self._strike(f"{name}.gone", box)

    def _strike(self, name: str, box: Box) -> None:
        self.add(name, "path", d=hatch_path(box, "/"), stroke=QUIET, stroke_width=0.9)

    def _changes(self) -> None:
        """Frames around what this step changed: lines of the table, K and V, or K alone."""
        places, (written, turned, table) = self.places, self.changes
        for cell in sorted({*written, *table}):
            self.outline(f"new.{cell}.row", places.table.box(cell), **FRAME)
        for column, layer in enumerate(self.layers):
            for cell in written:
                self.outline(f"new.{cell}.{layer}", places.layer(cell, column), 2, **FRAME)
            for cell in turned:
                x, y, w, h = box = places.vector(cell, column, 0)
                self.outline(f"turned.{cell}.{layer}", box, 2, **FRAME)
                middle, base = x + w + MIDDLE / 2 + 0.5, y + h / 2 + 4
                self.text(f"turned.{cell}.{layer}.d", middle, base, "Δ", 11, **CENTRE, **BOLD)

    def _texts(self, top: float) -> None:
        """The first sequences' tokens in their order, with position above and cell below."""
        seq_ids = self.now.seq_ids[:MAX_TEXTS]
        longest = max((len(self.now.cells_of(seq_id)) for seq_id in seq_ids), default=1)
        wide = min(62.0, (WIDTH - 150) / longest)
        for i, seq_id in enumerate(seq_ids):
            y, name = top + TEXT * i, f"text.{seq_id}"
            self.text(name, MARGIN, y + 25, "sequence", 12, **BOLD)
            self._chip(f"{name}.chip", 82, y + 21, seq_id)
            self.note(f"{name}.pos", 142, y + 7, "pos", 10.5, **RIGHT)
            self.note(f"{name}.cell", 142, y + 44, "cell", 10.5, **RIGHT)
            for j, cell in enumerate(self.now.cells_of(seq_id)):
                self._token(seq_id, cell, (150 + j * wide, y + 11, wide, 21.0))

    def _token(self, seq_id: int, cell: int, box: Box) -> None:
        """One token of a text; its cell is bold where it is not its position."""
        row, name, (x, y, w, h) = self.now.rows[cell], f"text.{seq_id}.{cell}", box
        colour, middle = look(seq_id).colour, x + w / 2
        fill = SHARED if len(row.owners) > 1 else tint(colour, 0.2)
        is_new = cell in self.changes.written
        edge = {"stroke": INK, "stroke_width": 2.4} if is_new else {"stroke": colour}
        self.rect(name, (x + 1, y, w - 3, h), fill, rx=3, **edge)
        word = cut_to(row.token or "?", w - 8, 11, keep=True)
        self.inside(f"{name}.token", box, word, 11)
        self.note(f"{name}.pos", middle, y - 4, str(row.pos), 10.5, **CENTRE)
        style = FAINT if cell == row.pos else BOLD
        self.text(f"{name}.cell", middle, y + 33, str(cell), 10.5, **CENTRE, **style)

    def _key(self, base: float) -> None:
        """What the marks mean."""

        def gone(name: str, box: Box) -> None:
            self.rect(name, box, tint(shade(0.7), FADED))
            self._strike(f"{name}.gone", box)

        marks: dict[str, Mark] = {
            "free, never written": lambda name, box: self.rect(name, box, PAPER, stroke=RULE),
            "freed: there, never read": gone,
            "changed in this step": lambda name, box: self.outline(name, box, -1, **FRAME),
            "key turned": lambda name, box: self.text(name, box[0] + 4, base, "Δ", 12, **BOLD),
            "shared cell": lambda name, box: self.rect(name, box, SHARED, stroke=QUIET, rx=3),
        }
        self.colour_scale("key.heat", (MARGIN, base - 11, 63, 13), 9)
        words = "low to high in its layer"
        self.note("key.heat", 79, base, words)
        self.keys.append((MARGIN - 2, base - 15, 83 + text_width(words, 11), 22))
        self.legend(97 + text_width(words, 11), base, marks, 20, 18)

    def _hot(self, cell: int) -> None:
        """What hovering finds: the cell's line in the table and in all layers, as one shape."""
        columns = range(len(self.layers))
        vectors = [self.places.vector(cell, column, kind) for column in columns for kind in (0, 1)]
        outline = "".join(
            f"M{x:.2f} {y:.2f}h{w:.2f}v{h:.2f}h{-w:.2f}z"
            for x, y, w, h in (self.places.table.box(cell), *vectors)
        )
        tip = _tip(self.now, cell)
        self.add(f"hot.{cell}", "path", tip=tip, d=outline, fill=INK, fill_opacity=0)


def _tip(now: CellsSnapshot, cell: int) -> str:
    """A cell in one line."""
    row = now.rows[cell]
    layers = f"{'all ' * (now.num_layers > 1)}{counted(now.num_layers, 'layer')}"
    where = f"cell {cell} is slot {cell} in {layers}"
    token = f"“{cut_label(row.token, 16)}”" if row.token else "a token"
    if row.left_over:
        return f"{where}: free; K and V of {token} are still there, and nobody reads them"
    if row.pos is None:
        return f"{where}: free, never written"
    owners = numbered(row.owners, "sequence")
    turned = f"; its key is still that of position {row.pos - row.shift}" if row.shift else ""
    return (
        f"{where}: {token} at position {row.pos}, shift {signed(row.shift)}{turned}; visible to "
        f"{owners} from position {row.pos} on"
    )
