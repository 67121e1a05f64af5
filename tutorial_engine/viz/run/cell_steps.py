"""Cells at one moment, written down: what there is to see and to say.

Reads a CellKVCache and keeps a small frozen copy, so that a moment can be shown again later.
Knows the table and the shelves; draws nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.viz.tokens import visible
from tutorial_engine.viz.words import numbered, signed, tokens

MAX_VALUES = 8  # of the head_dim numbers of a key or value: more would not be readable


class CellRow(NamedTuple):
    """A line of the table, and the token's text ("" if unknown).

    `left_over`: the cell is free, and what was written there before is still on the shelves.
    """

    pos: int | None
    owners: tuple[int, ...]
    shift: int
    token: str
    left_over: bool

    @property
    def is_used(self) -> bool:
        """Does it hold a token that somebody may read?"""
        return self.pos is not None


@dataclass(frozen=True, eq=False)
class CellsSnapshot:
    """The table, and a few numbers of each cell's K and V in every layer.

    `heat` [layers, 2 (K, V), cells, n] has n evenly spaced ones of the first head's `head_dim`
    numbers; NaN in cells that were never written.
    """

    rows: tuple[CellRow, ...]
    head: int
    heat: Tensor
    head_dim: int

    @property
    def num_layers(self) -> int:
        """Pairs of shelves."""
        return self.heat.shape[0]

    @property
    def used(self) -> list[int]:
        """Cells that hold a token."""
        return [cell for cell, row in enumerate(self.rows) if row.is_used]

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """The sequences that have cells."""
        return tuple(sorted({owner for row in self.rows for owner in row.owners}))

    def cells_of(self, seq_id: int) -> list[int]:
        """A sequence's cells by position, as CellTable.cells_of."""
        cells = [c for c, row in enumerate(self.rows) if seq_id in row.owners]
        return sorted(cells, key=lambda c: (self.rows[c].pos or 0, c))


def take_snapshot(
    cache: CellKVCache,
    labels: Mapping[int, str] | None = None,
    before: CellsSnapshot | None = None,
) -> CellsSnapshot:
    """What the cells hold now. `labels` has the text of each cell's token.

    With the snapshot `before` it, cells that were freed since are known to be left over.
    ValueError for a snapshot of other cells.
    """
    storage, table, labels = cache.storage, cache.table, labels or {}
    if before is not None and len(before.rows) != table.num_cells:
        raise ValueError(f"{len(before.rows)} cells before, {table.num_cells} now: not the same")
    rows = []
    for cell in range(table.num_cells):
        pos, owners, shift = table[cell]
        old = before.rows[cell] if before is not None else None
        left_over = pos is None and old is not None and (old.is_used or old.left_over)
        token = labels.get(cell, old.token if old is not None else "")
        known = visible(token) if pos is not None or left_over else ""
        rows.append(CellRow(pos, tuple(sorted(map(int, owners))), shift, known, left_over))
    heat = _heat(cache)
    for cell, row in enumerate(rows):
        if not row.is_used and not row.left_over:
            heat[:, :, cell] = torch.nan
    return CellsSnapshot(tuple(rows), table.head, heat, storage.spec.k_head_dim)


def _heat(cache: CellKVCache) -> Tensor:
    """[layers, 2, cells, n]: n numbers of each K and V; pairs that RoPE turns stay together."""
    spec, everything = cache.storage.spec, slice(0, cache.storage.num_slots)
    n = min(MAX_VALUES, spec.k_head_dim, spec.v_head_dim)
    layers = []
    for layer in range(spec.num_layers):
        shelves = cache.storage.read_slots(layer, everything)  # K and V [cells, H_kv, D]
        few = [x[:, 0, [i * x.shape[-1] // n for i in range(n)]].float().cpu() for x in shelves]
        layers.append(torch.stack(few))
    return torch.stack(layers)


class Changes(NamedTuple):
    """What one moment has that the one before had not, as cells.

    `written`: K and V are new. `turned`: K alone is. `table`: only the line of the table is.
    """

    written: tuple[int, ...]
    turned: tuple[int, ...]
    table: tuple[int, ...]


def find_changes(before: CellsSnapshot, now: CellsSnapshot) -> Changes:
    """Compare table and shelves of two moments; nothing is taken on trust."""
    written, turned, table = [], [], []
    for cell, (old, row) in enumerate(zip(before.rows, now.rows, strict=True)):
        k, v = (not torch.equal(before.heat[:, i, cell], now.heat[:, i, cell]) for i in (0, 1))
        if row.is_used and (not old.is_used or v):
            written.append(cell)
            continue
        if row.is_used and k:
            turned.append(cell)
        if old[:3] != row[:3]:
            table.append(cell)
    return Changes(tuple(written), tuple(turned), tuple(table))


def describe(now: CellsSnapshot, before: CellsSnapshot | None = None) -> str:
    """One sentence: what the cells hold, and what has changed since `before`."""
    news = [] if before is None else _events(before, now)
    return "; ".join([*_state(now), *news]) + "."


def _state(now: CellsSnapshot) -> list[str]:
    """How many are used, which are shared, which keys lag."""
    used = now.used
    if not used:
        return [f"all {len(now.rows)} cells are empty"]
    seqs = f"{len(now.seq_ids)} sequence{'s' * (len(now.seq_ids) > 1)}"
    said = [f"{len(used)} of {len(now.rows)} cells are used by {seqs}"]
    shared: dict[tuple[int, ...], list[int]] = {}
    for cell in used:
        if len(owners := now.rows[cell].owners) > 1:
            shared.setdefault(owners, []).append(cell)
    if len(shared) > 2:
        said.append(f"{sum(map(len, shared.values()))} of them are shared and stored once")
        shared = {}
    for owners, cells in shared.items():
        verb, are = ("belongs", "is") if len(cells) == 1 else ("belong", "are")
        whose = (
            "both" if now.seq_ids == owners and len(owners) == 2 else numbered(owners, "sequence")
        )
        said.append(f"{numbered(cells, 'cell')} {verb} to {whose} and {are} stored once")
    if lagging := [c for c in used if now.rows[c].shift]:
        keys, waits = ("key", "waits") if len(lagging) == 1 else ("keys", "wait")
        said.append(f"the {keys} of {numbered(lagging, 'cell')} {waits} to be turned")
    return said


def _events(before: CellsSnapshot, now: CellsSnapshot) -> list[str]:
    """What happened between the two, told by what differs."""
    written, turned, table = find_changes(before, now)
    said = [*_told_written(now, written)]
    if turned:
        differs = (before.heat[:, 0, list(turned)] != now.heat[:, 0, list(turned)]).any(-1).all(-1)
        keys, were = ("the key", "was") if len(turned) == 1 else ("the keys", "were")
        said.append(
            f"{keys} of {numbered(turned, 'cell')} {were} turned in {int(differs.sum())} of "
            f"{now.num_layers} layers, and no V changed"
        )
    pairs = {cell: (before.rows[cell], now.rows[cell]) for cell in table}
    freed = [c for c, (old, row) in pairs.items() if old.is_used and not row.is_used]
    if freed:
        were = "was" if len(freed) == 1 else "were"
        said.append(
            f"{numbered(freed, 'cell')} {were} freed: K and V are still there and are never read"
        )
    both = {c: pair for c, pair in pairs.items() if pair[1].is_used}
    for seq_id in sorted({*before.seq_ids, *now.seq_ids}):
        got = [c for c, (old, row) in both.items() if seq_id in {*row.owners} - {*old.owners}]
        gone = [c for c, (old, row) in both.items() if seq_id in {*old.owners} - {*row.owners}]
        if got:
            said.append(f"sequence {seq_id} got {numbered(got, 'cell')}, and no K or V was copied")
        if gone:
            said.append(f"sequence {seq_id} left {numbered(gone, 'cell')}")
    for delta in sorted({row.pos - old.pos for old, row in both.values()} - {0}):  # type: ignore[operator]
        moved = [c for c, (old, row) in both.items() if row.pos - old.pos == delta]  # type: ignore[operator]
        where = "position of" if len(moved) == 1 else "positions of"
        said.append(f"the {where} {numbered(moved, 'cell')} moved by {signed(delta)}")
    return said or ["nothing changed"]


def _told_written(now: CellsSnapshot, written: Sequence[int]) -> list[str]:
    """Each sequence's new tokens and where they went."""
    said = []
    everywhere = "in every layer" if now.num_layers > 1 else "in the only layer"
    for owners in sorted({now.rows[c].owners for c in written}):
        cells = [c for c in written if now.rows[c].owners == owners]
        where, whose = numbered(cells, "cell"), numbered(owners, "sequence")
        places = [pos for c in cells if (pos := now.rows[c].pos) is not None]
        token = f"token “{now.rows[cells[0]].token}”" if now.rows[cells[0]].token else "the token"
        what = token if len(cells) == 1 else tokens(len(cells))
        said.append(
            f"{what} of {whose}, {numbered(places, 'position')}, went to {where} {everywhere}"
        )
    return said
