"""The table of cells against a slow, obvious one, operation by operation, and
with planted bugs, which must all be seen. long_run.py runs as many operations as you like.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tutorial_engine.cache.cell_table import Cell, CellTable, SeqId
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted

# -- the slow twin --------------------------------------------------------------------------------


class SlowTable:
    """Cells are a list of dicts, and every question looks at all of them."""

    def __init__(self, num_cells: int) -> None:
        self.cells: list[dict[str, Any]] = [
            {"pos": None, "owners": set(), "shift": 0} for _ in range(num_cells)
        ]
        self.head = 0

    def cells_of(self, seq_id: SeqId) -> list[int]:
        mine = [i for i, cell in enumerate(self.cells) if seq_id in cell["owners"]]
        return sorted(mine, key=lambda i: (self.cells[i]["pos"], i))

    def visible(self, seq_id: SeqId, pos: int, window: int | None) -> list[int]:
        return [
            i
            for i in self.cells_of(seq_id)
            if self.cells[i]["pos"] <= pos
            and (window is None or pos - self.cells[i]["pos"] < window)
        ]

    def find_slot(self, n: int, contiguous: bool) -> list[int] | None:
        num = len(self.cells)
        order = [*range(self.head, num), *range(self.head)]
        if contiguous:
            for start in [*range(self.head, num), *range(num)]:
                run = list(range(start, start + n))
                if run[-1] < num and not any(self.cells[i]["owners"] for i in run):
                    return run
            return None
        free = [i for i in order if not self.cells[i]["owners"]]
        return free[:n] if len(free) >= n else None

    def place(self, cells: Sequence[int], seq_id: SeqId, positions: Sequence[int]) -> None:
        for i, pos in zip(cells, positions, strict=True):
            self.cells[i] = {"pos": pos, "owners": {seq_id}, "shift": 0}
            self.head = (i + 1) % len(self.cells)

    def in_range(self, seq_id: SeqId, p0: int, p1: int) -> list[int]:
        first, last = max(p0, 0), 10**9 if p1 < 0 else p1
        return [i for i in self.cells_of(seq_id) if first <= self.cells[i]["pos"] < last]

    def leave(self, i: int, seq_id: SeqId) -> bool:
        self.cells[i]["owners"].remove(seq_id)
        if self.cells[i]["owners"]:
            return False
        self.cells[i] = {"pos": None, "owners": set(), "shift": 0}
        self.head = min(self.head, i)
        return True

    def seq_rm(self, seq_id: SeqId, p0: int, p1: int) -> list[int]:
        return [i for i in self.in_range(seq_id, p0, p1) if self.leave(i, seq_id)]

    def seq_cp(self, src: SeqId, dst: SeqId, p0: int, p1: int) -> list[int]:
        new = [i for i in self.in_range(src, p0, p1) if dst not in self.cells[i]["owners"]]
        for i in new:
            self.cells[i]["owners"].add(dst)
        return new

    def seq_keep(self, seq_id: SeqId) -> list[int]:
        freed = []
        for i, cell in enumerate(self.cells):
            others = cell["owners"] - {seq_id}
            freed += [i for other in others if self.leave(i, other)]
        return freed

    def seq_add(self, seq_id: SeqId, p0: int, p1: int, delta: int) -> list[int] | None:
        moved = self.in_range(seq_id, p0, p1)
        if any(len(self.cells[i]["owners"]) > 1 for i in moved):
            return None
        freed = []
        for i in moved:
            self.cells[i]["pos"] += delta
            self.cells[i]["shift"] += delta
            if self.cells[i]["pos"] < 0:
                self.leave(i, seq_id)
                freed.append(i)
        return freed

    def seq_unshare(self, seq_id: SeqId, p0: int, p1: int) -> list[tuple[int, int]] | None:
        old = [i for i in self.in_range(seq_id, p0, p1) if len(self.cells[i]["owners"]) > 1]
        if not old:
            return []
        new = self.find_slot(len(old), False)
        if new is None:
            return None
        for i, j in zip(old, new, strict=True):
            pos, shift = self.cells[i]["pos"], self.cells[i]["shift"]
            self.leave(i, seq_id)
            self.place([j], seq_id, [pos])
            self.cells[j]["shift"] = shift
        return list(zip(old, new, strict=True))

    def take_shifts(self) -> dict[int, int]:
        shifts = {i: cell["shift"] for i, cell in enumerate(self.cells) if cell["shift"]}
        for cell in self.cells:
            cell["shift"] = 0
        return shifts


SEQS: tuple[SeqId, ...] = (0, 1, "a", "b")


class Twins:
    """Both tables under the same operations; a difference is an AssertionError."""

    def __init__(self, num_cells: int) -> None:
        self.fast, self.slow = CellTable(num_cells), SlowTable(num_cells)
        self.done: Counter[str] = Counter()

    def put(self, n: int, seq_id: SeqId, start: int | None, contiguous: bool) -> None:
        """n tokens of a sequence: after its last one, or from a position of their own."""
        cells = self.fast.find_slot(n, contiguous)
        assert cells == self.slow.find_slot(n, contiguous), f"{cells} for {n}"
        if cells is None:
            self.done["no room"] += 1
            return
        first = self.fast.next_pos(seq_id) if start is None else start
        positions = range(first, first + n)
        self.fast.place(cells, seq_id, positions)
        self.slow.place(cells, seq_id, positions)
        self.done["placed"] += 1

    def same(self, name: str, *values: Any) -> None:
        """One operation on both: the same answer, or both refuse."""
        before = self.picture()
        want = getattr(self.slow, name)(*values)
        try:
            got = getattr(self.fast, name)(*values)
        except ValueError:
            assert want is None, f"{name}{values} was refused, the other said {want}"
            assert self.picture() == before, f"{name}{values} was refused and changed something"
            self.done[f"{name} refused"] += 1
            return
        if name == "seq_keep":
            got, want = sorted(got), sorted(want)
        assert got == want and want is not None, (name, values, got, want)
        self.done[name] += 1

    def picture(self) -> list[Cell]:
        return [self.fast[i] for i in range(self.fast.num_cells)]

    def compare(self) -> None:
        self.fast.check_integrity()
        slow = [
            Cell(cell["pos"], frozenset(cell["owners"]), cell["shift"]) for cell in self.slow.cells
        ]
        assert self.picture() == slow and self.fast.head == self.slow.head
        used = sum(cell.pos is not None for cell in slow)
        assert (self.fast.num_used, self.fast.num_free) == (used, len(slow) - used)
        assert self.fast.has_shifts == any(cell.shift for cell in slow)
        for seq_id in SEQS:
            assert list(self.fast.cells_of(seq_id)) == self.slow.cells_of(seq_id), seq_id
            assert (seq_id in self.fast.seq_ids) == bool(self.slow.cells_of(seq_id))

    def look(self, seq_id: SeqId, pos: int, window: int | None) -> None:
        want = self.slow.visible(seq_id, pos, window)
        assert self.fast.visible(seq_id, pos, window) == want


def drive(draw: random.Random, num_cells: int, operations: int) -> Counter[str]:
    """Random operations on both tables; what happened."""
    twins = Twins(num_cells)
    for _ in range(operations):
        one_operation(twins, draw)
        twins.compare()
    return twins.done


def run_random(operations: int, seed: int) -> Counter[str]:
    """Seeded operations on tables of many sizes; what happened."""
    draw, total = random.Random(seed), Counter[str]()
    for done in range(0, operations, 500):
        total += drive(draw, draw.choice([1, 2, 5, 12, 12, 24, 48]), min(500, operations - done))
    return total


def one_operation(twins: Twins, draw: random.Random) -> None:
    seq, dst = draw.choice(SEQS), draw.choice(SEQS)
    p0, p1 = draw.randint(-1, 12), draw.randint(-1, 24)
    name = draw.choice(
        ["put"] * 6 + ["seq_rm"] * 2 + ["seq_cp"] * 5 + ["seq_add"] * 6
        + ["seq_unshare"] * 2 + ["take_shifts", "look"]
    )  # fmt: skip
    if draw.random() < 0.01:
        name = "seq_keep"
    match name:
        case "put":
            start = draw.choice([None, None, None, draw.randint(0, 10)])
            twins.put(draw.randint(1, 6), seq, start, draw.random() < 0.3)
        case "seq_rm" | "seq_unshare":
            twins.same(name, seq, p0, p1)
        case "seq_cp":
            twins.same(name, seq, dst, p0, p1)
        case "seq_add":
            twins.same(name, seq, p0, p1, draw.randint(-6, 6))
        case "seq_keep":
            twins.same(name, seq)
        case "look":
            twins.look(seq, draw.randint(0, 20), draw.choice([None, 1, 4]))
        case _:
            twins.same(name)


def test_random_operations_give_what_the_slow_table_gives() -> None:
    done = run_random(8_000, seed=0)
    for name in ("placed", "no room", "seq_rm", "seq_cp", "seq_add"):
        assert done[name] > 200, done
    for name in (
        "seq_add refused",
        "seq_unshare",
        "seq_unshare refused",
        "seq_keep",
        "take_shifts",
    ):
        assert done[name] > 20, done


# -- planted bugs ---------------------------------------------------------------------------------

BUGS: Zoo = {
    "a cell is freed though others have it": edited(
        CellTable, "_drop", ("if len(owners) > 1", "if False")
    ),
    "by number": edited(CellTable, "_ordered", ("(self._at(cell), cell)", "cell")),
    "the other sign": edited(CellTable, "seq_add", ("shift + delta", "shift - delta")),
    "a copy forgets its shift": edited(
        CellTable, "seq_unshare", ("shift=self._table[source].shift", "shift=0")
    ),
    "a closed range": edited(CellTable, "_in_range", ("< end", "<= end")),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    with planted(name, BUGS), pytest.raises(AssertionError):
        run_random(6_000, seed=1)


# -- what makes no sense --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action",
    [
        lambda t: t.place([1], 1, [0]),  # it is taken
        lambda t: t.place([5, 5], 1, [0, 1]),
        lambda t: t.place([5, 6], 1, [0, -1]),
        lambda t: t.place([5, 8], 1, [0, 1]),  # there is none
        lambda t: t.seq_cp(0, -2),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    action: Callable[[CellTable], object],
) -> None:
    cells = CellTable(8)
    cells.place(range(5), 0, range(5))
    before = repr(cells)
    with pytest.raises((ValueError, IndexError)):
        action(cells)
    assert repr(cells) == before
    cells.check_integrity()
