"""Pages and cells by hand: requests that nobody schedules, and forwards that nobody runs.

And memories for the random workloads: a row, block or cell holds NaN until it is written, and again
as soon as nobody may read what it held.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engines import fill_with_nan, poison, random_model

from tutorial_engine.cache.cell_table import SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.model.batch import Allocation

CONFIG = random_model(num_hidden_layers=1).config
KINDS = ("pages of 1", "pages of 4", "cells")


def memory_of(kind: str, num_slots: int = 32) -> PagedKVCache | CellKVCache:
    """A poisoned memory of this kind; pages without a prefix cache."""
    if kind == "cells":
        return poison(CellKVCache.from_config(CONFIG, num_slots))
    size = int(kind.split()[-1])
    return poison(
        PagedKVCache.from_config(
            CONFIG, block_size=size, num_blocks=num_slots // size, prefix_caching=False
        )
    )


def request(name: str, tokens: Iterable[int]) -> Request:
    return Request(name, list(tokens))


class Room(NamedTuple):
    """An allocation in plain numbers."""

    first: int
    new: list[int]
    context: list[int]


def room(memory: KVMemory, one: Request, num_tokens: int = 10**6) -> Room | None:
    """Ask for its next tokens."""
    computed = one.num_computed_tokens
    allocation = memory.allocate(one.request_id, one.token_ids, computed, num_tokens)
    if allocation is None:
        return None
    first, new, slots = allocation
    context = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
    assert len(context) == first + len(new) and list(context)[first:] == list(new)
    return Room(first, list(new), list(context))


def run(memory: KVMemory, one: Request, num_tokens: int = 10**6) -> list[int] | None:
    """Room for its next tokens, and the forward done → where they went."""
    got = room(memory, one, num_tokens)
    if got is None:
        return None
    one.num_computed_tokens = got.first + len(got.new)
    memory.commit(one.request_id, one.token_ids, one.num_computed_tokens)
    memory.check_integrity()
    return got.new


def slots_of(memory: KVMemory, one: Request) -> tuple[int, ...]:
    """Where its computed tokens lie."""
    return memory.describe(one.request_id).slots[: one.num_computed_tokens]


def table_of(memory: KVMemory, one: Request) -> tuple[int, ...]:
    """Its blocks, or cells."""
    return memory.describe(one.request_id).table


def snapshot(memory: PagedKVCache | CellKVCache) -> object:
    """All that decides what is given out next."""
    if isinstance(memory, CellKVCache):
        return repr(memory.table)
    blocks = memory.blocks
    tables = {name: tuple(table) for name, table in blocks.tables.items()}
    return tables, list(blocks.free_queue), [(b.ref_cnt, b.hash) for b in blocks.blocks]


# -- whose unwritten slots show, and whose freed ones ---------------------------------------------


class SharedRows:
    """Rows that together hold `capacity` tokens at most: what runs may have to give way.

    A request is let in only if all its tokens fit now (semantics of pages, without the pages). What
    a freed row held becomes NaN: nobody reads it unnoticed.
    """

    def __init__(self, rows: StaticKVCache, capacity: int | None = None) -> None:
        self.rows, self.capacity = poison(rows), capacity
        self.room: dict[str, int] = {}  # seq_id -> tokens that it has room for
        self.storage, self.trace, self.settings = rows.storage, rows.trace, rows.settings
        self.commit, self.fork, self.describe = rows.commit, rows.fork, rows.describe
        self.max_len = min(rows.max_len, capacity or rows.max_len)
        self.user: object = None

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        return self.rows.seq_ids

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        own = self.room.get(seq_id)
        end = num_computed + num_new
        wanted = len(token_ids) if own is None else max(own, end)
        others = sum(self.room.values()) - (own or 0)
        if self.capacity is not None and others + wanted > self.capacity:
            return None
        allocation = self.rows.allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is not None:
            self.room[seq_id] = max(own or 0, end)
        return allocation

    def free(self, seq_id: str) -> None:
        self.room.pop(seq_id, None)
        fill_with_nan(self.storage, self.rows.num_rows, self.rows.describe(seq_id).table)
        self.rows.free(seq_id)

    def check_integrity(self) -> None:
        self.rows.check_integrity()
        used = self.rows.num_rows - self.rows.num_free_rows
        assert used == len(self.room), f"{used} rows are taken by {sorted(self.room)}"
        total = sum(self.room.values())
        assert self.capacity is None or total <= self.capacity, f"{total} of {self.capacity}"

    def check_empty(self) -> None:
        """Nothing is anybody's."""
        self.check_integrity()
        assert not self.room and self.rows.num_free_rows == self.rows.num_rows, "rows leaked"


def nan_where(memory: PagedKVCache | CellKVCache, units: Sequence[int]) -> None:
    """NaN in these blocks, or cells."""
    num_units = memory.storage.num_slots // getattr(memory, "block_size", 1)
    fill_with_nan(memory.storage, num_units, units)


def poison_pages(memory: PagedKVCache) -> PagedKVCache:
    """NaN everywhere; and again in a block that is taken, or that is free and cannot be found."""
    poison(memory)
    blocks = memory.blocks
    claim, give_back = blocks._claim, blocks._give_back

    def claimed() -> tuple[int, bool]:
        block, evicted = claim()
        nan_where(memory, [block])
        return block, evicted

    def given_back(table: Sequence[int]) -> None:
        give_back(table)
        gone = [blocks.blocks[block] for block in table]
        lost = [one.ref_cnt == 0 and one.hash is None for one in gone]
        nan_where(memory, [block for block, is_lost in zip(table, lost, strict=True) if is_lost])

    blocks._claim, blocks._give_back = claimed, given_back  # type: ignore[method-assign]
    return memory


def poison_cells(memory: CellKVCache) -> CellKVCache:
    """NaN everywhere; and again in a cell that is taken, or that is empty again."""
    poison(memory)
    table = memory.table
    drop, place = table._drop, table.place

    def dropped(seq_id: SeqId, cells: Sequence[int]) -> list[int]:
        freed = drop(seq_id, cells)
        nan_where(memory, freed)
        return freed

    def placed(cells: Sequence[int], seq_id: SeqId, positions: Sequence[int]) -> None:
        place(cells, seq_id, positions)
        nan_where(memory, cells)

    table._drop, table.place = dropped, placed  # type: ignore[method-assign]
    return memory


def check_empty(memory: KVMemory | SharedRows) -> None:
    """Nothing is anybody's."""
    memory.check_integrity()
    if isinstance(memory, PagedKVCache):
        assert not memory.blocks.tables and not memory._held, "something is left over"
        assert memory.blocks.num_free == memory.blocks.num_blocks, "blocks leaked"
    elif isinstance(memory, CellKVCache):
        assert memory.table.num_used == 0, "cells leaked"
        assert not memory._shared and not memory._waiting, "something is left over"
    elif isinstance(memory, SharedRows):
        memory.check_empty()
    else:
        assert isinstance(memory, StaticKVCache) and memory.num_free_rows == memory.num_rows
