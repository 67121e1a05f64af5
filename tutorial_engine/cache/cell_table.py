"""A table with one entry per token: which cell holds whose.

Knows cells, positions and sequence ids; knows no tensor, no layer and no model: one table serves
all layers. Ranges of positions are [p0, p1), where p0 < 0 means 0 and p1 < 0 means no end. Source:
llama.cpp (llama_kv_cells), whose names these are.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from tutorial_engine.checks import at_least_one

SeqId = int | str  # a number by hand; the engine's sequences have the names of their requests


class Cell(NamedTuple):
    """One cell: the position of its token (None: empty), whose it is, and how far its key lags.

    `shift` is what was added to `pos` since its key was last turned.
    """

    pos: int | None
    owners: frozenset[SeqId]
    shift: int


EMPTY = Cell(None, frozenset(), 0)


class CellTable:
    """`num_cells` cells, each empty or with a token of one or several sequences.

    Any cell may hold any position: where a token lies says nothing about where it stands. `head` is
    where the search for empty cells begins: behind the last one placed, or at one freed before it.
    """

    def __init__(self, num_cells: int) -> None:
        at_least_one("num_cells", num_cells)
        self.num_cells, self.head = num_cells, 0
        self._table = [EMPTY] * num_cells
        self._used = bytearray(num_cells)  # 1 = used; bytes, because they can be searched fast
        self._lagging: set[int] = set()  # cells with a shift
        self._cells: dict[SeqId, list[int]] = {}  # seq_id -> its cells by position, never empty

    # ---- looking

    def __getitem__(self, cell: int) -> Cell:
        """What is in a cell."""
        if not 0 <= cell < self.num_cells:
            raise IndexError(f"no cell {cell}: there are cells 0 .. {self.num_cells - 1}")
        return self._table[cell]

    @property
    def num_used(self) -> int:
        """Cells that hold a token."""
        return self._used.count(1)

    @property
    def num_free(self) -> int:
        """Cells that are empty."""
        return self.num_cells - self.num_used

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        """The sequences that have cells."""
        return tuple(_in_order(self._cells))

    @property
    def has_shifts(self) -> bool:
        """Do keys wait to be turned?"""
        return bool(self._lagging)

    def cells_of(self, seq_id: SeqId) -> list[int]:
        """A sequence's cells by position; cells of equal position by number. Read it only."""
        return self._cells.get(seq_id, [])

    def next_pos(self, seq_id: SeqId) -> int:
        """The position after a sequence's last one; 0 when it has none."""
        cells = self._cells.get(seq_id)
        return self._at(cells[-1]) + 1 if cells else 0

    def visible(self, seq_id: SeqId, pos: int, window: int | None = None) -> list[int]:
        """The cells that a query at `pos` of this sequence may attend to, by position.

        With a window, only those less than `window` positions back. Never a matter of cell numbers.
        """
        if window is not None:
            at_least_one("window", window)
        first = 0 if window is None else pos - window + 1
        return [cell for cell in self.cells_of(seq_id) if first <= self._at(cell) <= pos]

    def find_slot(self, n: int, contiguous: bool = False) -> list[int] | None:
        """n empty cells, searched from head on and then from the start; None if there are not.

        Scattered: the first n. Contiguous: neighbours, which never run over the table's end into
        its start. Nothing is taken yet.
        """
        at_least_one("n", n)
        if contiguous:
            start = self._used.find(bytes(n), self.head)
            start = self._used.find(bytes(n)) if start < 0 else start
            return None if start < 0 else list(range(start, start + n))
        empty: list[int] = []
        for cell, end in ((self.head, self.num_cells), (0, self.head)):
            while len(empty) < n and (cell := self._used.find(0, cell, end)) >= 0:
                empty.append(cell)
                cell += 1
        return empty if len(empty) == n else None

    # ---- changing

    def place(self, cells: Sequence[int], seq_id: SeqId, positions: Sequence[int]) -> None:
        """Put a sequence's tokens at these positions into empty cells, one each.

        ValueError, and nothing changed, for a cell that is taken or named twice.
        """
        _check_seq(seq_id)
        if len(cells) != len(positions) or len(set(cells)) < len(cells):
            raise ValueError(f"one position per cell, each cell once: {cells} at {positions}")
        for cell, pos in zip(cells, positions, strict=True):
            if self[cell] is not EMPTY:
                raise ValueError(f"cell {cell} is taken: {self[cell]}; find_slot has empty ones")
            if pos < 0:
                raise ValueError(f"position {pos} for cell {cell}: positions are at least 0")
        if not cells:
            return
        owners = frozenset((seq_id,))
        for cell, pos in zip(cells, positions, strict=True):
            self._set(cell, Cell(pos, owners, 0))
        self.head = (cells[-1] + 1) % self.num_cells
        before = self._cells.setdefault(seq_id, [])
        last = self._at(before[-1]) if before else -1
        if all(a < b for a, b in pairwise((last, *positions))):
            before.extend(cells)
        else:
            self._set_cells(seq_id, [*before, *cells])

    def seq_rm(self, seq_id: SeqId, p0: int = 0, p1: int = -1) -> list[int]:
        """The sequence leaves its cells in the range → those that are empty now."""
        return self._drop(seq_id, self._in_range(seq_id, p0, p1))

    def seq_cp(self, src: SeqId, dst: SeqId, p0: int = 0, p1: int = -1) -> list[int]:
        """dst shares src's cells in the range → those that are new to it. No K or V is copied."""
        _check_seq(dst)
        shared = [c for c in self._in_range(src, p0, p1) if dst not in self._table[c].owners]
        for cell in shared:
            pos, owners, shift = self._table[cell]
            self._set(cell, Cell(pos, owners | {dst}, shift))
        if shared:
            self._set_cells(dst, [*self.cells_of(dst), *shared])
        return shared

    def seq_keep(self, seq_id: SeqId) -> list[int]:
        """All other sequences leave → the cells that are empty now."""
        return [c for other in self.seq_ids if other != seq_id for c in self.seq_rm(other)]

    def seq_add(self, seq_id: SeqId, p0: int, p1: int, delta: int) -> list[int]:
        """Move the sequence's positions in the range by delta → the cells that are empty now.

        Below 0 a cell is emptied; the other keys must be turned (`take_shifts`). ValueError, and
        nothing changed, where a cell is shared: its one position would move for all owners.
        """
        moved = self._in_range(seq_id, p0, p1)
        for pos, owners, _ in map(self._table.__getitem__, moved):
            if len(owners) > 1:
                raise ValueError(
                    f"sequences {_in_order(owners)} share a cell, which has one position, {pos}: "
                    f"adding {delta} would move it for all. Copy first: seq_unshare({seq_id!r}, "
                    f"{p0}, {p1})"
                )
        if not moved or delta == 0:
            return []
        freed = self._drop(seq_id, [cell for cell in moved if self._at(cell) + delta < 0])
        for cell in moved[len(freed) :]:  # by position: those that fell below 0 were the first
            _, owners, shift = self._table[cell]
            self._set(cell, Cell(self._at(cell) + delta, owners, shift + delta))
        self._set_cells(seq_id, self.cells_of(seq_id))
        return freed

    def seq_unshare(self, seq_id: SeqId, p0: int = 0, p1: int = -1) -> list[tuple[int, int]]:
        """Cells of its own for all that the sequence shares in the range → (old, new) pairs.

        K and V of each old cell must now be copied to the new one, in every layer. ValueError, and
        nothing changed, when too few cells are empty.
        """
        old = [c for c in self._in_range(seq_id, p0, p1) if len(self._table[c].owners) > 1]
        if not old:
            return []
        if (new := self.find_slot(len(old))) is None:
            raise ValueError(
                f"sequence {seq_id} shares {len(old)} cells, {self.num_free} are empty: remove "
                "a sequence, or make more cells"
            )
        self._drop(seq_id, old)  # they stay: others own them
        self.place(new, seq_id, [self._at(cell) for cell in old])
        for source, target in zip(old, new, strict=True):  # the copy's key lags as the original's
            self._set(target, self._table[target]._replace(shift=self._table[source].shift))
        return list(zip(old, new, strict=True))

    def take_shifts(self) -> dict[int, int]:
        """Cell → how far its key must be turned, for those that lag; from now on none does."""
        shifts = {cell: self._table[cell].shift for cell in sorted(self._lagging)}
        for cell in shifts:
            self._set(cell, self._table[cell]._replace(shift=0))
        return shifts

    # ---- checking and printing

    def check_integrity(self) -> None:
        """AssertionError if cells and sequences do not agree."""
        assert 0 <= self.head < self.num_cells, f"head is {self.head} of {self.num_cells}"
        cells_of: dict[SeqId, set[int]] = {}  # as the cells tell it
        for number, cell in enumerate(self._table):
            used, lags = bool(self._used[number]), number in self._lagging
            assert used == (cell.pos is not None) == bool(cell.owners), (
                f"cell {number} is {'used' if used else 'free'} and holds {cell}"
            )
            assert cell.pos is None or cell.pos >= 0, f"cell {number} has position {cell.pos}"
            assert lags == bool(cell.shift) and used >= lags, f"cell {number}: {cell}, lags: {lags}"
            for seq_id in cell.owners:
                cells_of.setdefault(seq_id, set()).add(number)
        assert cells_of == {seq_id: set(cells) for seq_id, cells in self._cells.items()}, (
            f"the cells say {cells_of}, the sequences {self._cells}"
        )
        for seq_id, cells in self._cells.items():
            assert cells == self._ordered(cells) and len(set(cells)) == len(cells), (
                f"sequence {seq_id} has cells {cells}, which are not by position, once each"
            )

    def __repr__(self) -> str:
        """One line per used cell, one per run of empty ones; head is marked by `<`."""
        lines = ["      cell   pos  shift  owners"]
        for start, group in groupby(range(self.num_cells), lambda c: c if self._used[c] else -1):
            *_, last = cells = list(group)
            name = str(last) if len(cells) == 1 else f"{cells[0]}..{last}"
            pos, owners, shift = self[last]
            whose = ", ".join(map(str, _in_order(owners)))
            what = "free" if start < 0 else f"{pos:>4}{shift:>+7}  {whose}"
            lines.append(f"{name:>10}  {what}{'  < head' if self.head in cells else ''}")
        return "\n".join(lines)

    # ---- within

    def _at(self, cell: int) -> int:
        pos = self._table[cell].pos
        assert pos is not None, f"cell {cell} is empty"
        return pos

    def _in_range(self, seq_id: SeqId, p0: int, p1: int) -> list[int]:
        _check_seq(seq_id)
        end = math.inf if p1 < 0 else p1
        return [cell for cell in self.cells_of(seq_id) if p0 <= self._at(cell) < end]

    def _drop(self, seq_id: SeqId, cells: Sequence[int]) -> list[int]:
        """The sequence leaves these cells of its own → those that are empty now."""
        freed = []
        for cell in cells:
            pos, owners, shift = self._table[cell]
            if len(owners) > 1:
                self._set(cell, Cell(pos, owners - {seq_id}, shift))
            else:
                self._set(cell, EMPTY)
                freed.append(cell)
        self.head = min([self.head, *freed])
        if cells:
            gone = set(cells)
            self._set_cells(seq_id, [cell for cell in self._cells[seq_id] if cell not in gone])
        return freed

    def _set(self, cell: int, content: Cell) -> None:
        self._table[cell] = content
        self._used[cell] = content is not EMPTY
        if content.shift:
            self._lagging.add(cell)
        else:
            self._lagging.discard(cell)

    def _ordered(self, cells: Iterable[int]) -> list[int]:
        return sorted(cells, key=lambda cell: (self._at(cell), cell))

    def _set_cells(self, seq_id: SeqId, cells: Iterable[int]) -> None:
        self._cells.pop(seq_id, None)
        if ordered := self._ordered(cells):
            self._cells[seq_id] = ordered


def _check_seq(seq_id: SeqId) -> None:
    is_number = isinstance(seq_id, int) and not isinstance(seq_id, bool) and seq_id >= 0
    if not is_number and not isinstance(seq_id, str):
        raise ValueError(f"a seq_id is a name, or a whole number of at least 0, got {seq_id!r}")


def _in_order(seq_ids: Iterable[SeqId]) -> list[SeqId]:
    """Numbers by size, then names."""
    return sorted(seq_ids, key=lambda seq_id: (isinstance(seq_id, str), seq_id))
