"""Introduced in notebook 04. Cells as a picture: one address book, a shelf per layer.

The table stands at the left, once; K and V of the same cell stand in the same line in every layer.
Knows snapshots of cells; knows no model.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from tutorial_engine.cache.cell_cache import CellSequences
from tutorial_engine.viz.cell_panels import (
    FAINT,
    LEFT,
    MAX_TEXTS,
    SHELF,
    TEXT,
    TOP,
    WIDTH,
    Places,
    draw_key,
    draw_shelves,
    draw_table,
    draw_texts,
)
from tutorial_engine.viz.cell_steps import (
    CellsSnapshot,
    Changes,
    describe,
    find_changes,
    numbered,
    signed,
    take_snapshot,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import INK
from tutorial_engine.viz.tokens import cut_label

TITLE = "Cells: one address book, a shelf per layer"
MAX_CELLS, MAX_LAYERS = 16, 4  # more would not be readable
ENDS = torch.tensor([0.05, 0.95])
Scale = list[list[tuple[float, float]]]  # per layer, of K and of V: low and high


def cells_view(
    cells: CellSequences | CellsSnapshot,
    labels: Mapping[int, str] | None = None,
    title: str = TITLE,
    before: CellsSnapshot | None = None,
    changed: Iterable[int] | None = None,
) -> Picture:
    """The table and the shelves now; what is new since `before` is outlined and told.

    `labels`: the text of each cell's token. `changed`: cells to outline and tell of, instead.
    A model of more than 4 layers shows its first three and its last. ValueError above 16 cells,
    and for `changed` ones that are free.
    """
    if isinstance(cells, CellSequences):
        cells = take_snapshot(cells, labels, before)
    changes = find_changes(before, cells) if before is not None else Changes((), (), ())
    if changed is not None:
        changes, before = Changes(tuple(changed), (), ()), None
        if empty := [c for c in changes.written if c not in cells.used]:
            raise ValueError(f"nothing is in {numbered(empty, 'cell')}: outline used ones")
    caption = describe(cells, before, changes.written)
    return cells_scene(cells, changes, title).picture(caption[0].upper() + caption[1:], zoom=1.0)


def cells_scene(
    now: CellsSnapshot,
    changes: Changes,
    title: str = TITLE,
    scale: Scale | None = None,
    num_texts: int = 0,
) -> Scene:
    """Table, shelves, the sequences' texts below, and the key; hovering tells of each cell.

    Room is left for `num_texts` texts, so that the steps of a history are of one height.
    """
    num_cells, layers = len(now.rows), shown_layers(now)
    if num_cells > MAX_CELLS:
        raise ValueError(f"{num_cells} cells are too many to be seen: draw at most {MAX_CELLS}")
    places = Places(num_cells, len(layers), now.heat.shape[-1])
    texts = places.end + 22
    floor = texts + TEXT * min(MAX_TEXTS, max(len(now.seq_ids), num_texts))
    scene = Scene(WIDTH, floor + 48, tip_at=(10, floor + 42))
    scene.hint = "hover over a cell to see it in all layers, and who may read it"
    scene.text("title", 10, 22, title, 16, font_weight="bold")
    used = f"{now.heat.shape[-1]} of the {now.head_dim} numbers of K/V head {now.kv_head}"
    of = "" if len(layers) == now.num_layers else f"; {now.num_layers} layers, {len(layers)} shown"
    scene.text("where", SHELF, TOP - 44, f"{used}{of}", 11.5, **FAINT)
    scene.text("book", LEFT, TOP - 44, "kept once, for all layers", 11.5, **FAINT)
    draw_table(scene, now, changes, places)
    draw_shelves(scene, now, changes, places, layers, scale or heat_scale([now]))
    draw_texts(scene, now, changes, texts)
    draw_key(scene, floor + 6)
    for cell in range(num_cells):
        _hot(scene, now, cell, places, len(layers))
    return scene


def shown_layers(now: CellsSnapshot) -> list[int]:
    """All layers, or the first three and the last."""
    if now.num_layers <= MAX_LAYERS:
        return list(range(now.num_layers))
    return [*range(MAX_LAYERS - 1), now.num_layers - 1]


def heat_scale(moments: Sequence[CellsSnapshot]) -> Scale:
    """Low and high of each layer's K and V over all these moments: one scale for them all.

    A tenth of the numbers lies outside and has the colours of the ends: the others differ more.
    """
    heat = torch.stack([moment.heat for moment in moments])  # [moments, L, 2, cells, n]
    scale: Scale = []
    for layer in range(heat.shape[1]):
        shelves = [heat[:, layer, kind] for kind in (0, 1)]
        known = [shelf[shelf.isfinite()] for shelf in shelves]
        ends = [x.quantile(ENDS).tolist() if x.numel() else [0.0, 0.0] for x in known]
        scale.append([(low, high) for low, high in ends])
    return scale


def _hot(scene: Scene, now: CellsSnapshot, cell: int, places: Places, num_columns: int) -> None:
    """What hovering finds: the cell's line in the table and in all shelves, as one shape."""
    boxes = [places.row(cell)]
    boxes += [places.shelf(cell, column, kind) for column in range(num_columns) for kind in (0, 1)]
    outline = "".join(f"M{x:.2f} {y:.2f}h{w:.2f}v{h:.2f}h{-w:.2f}z" for x, y, w, h in boxes)
    scene.add(f"hot.{cell}", "path", tip=_tip(now, cell), d=outline, fill=INK, fill_opacity=0)


def _tip(now: CellsSnapshot, cell: int) -> str:
    """A cell in one line."""
    row, layers = now.rows[cell], now.num_layers
    where = f"cell {cell} is slot {cell} in {'all ' if layers > 1 else ''}{layers} layer"
    where += "s" * (layers > 1)
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
