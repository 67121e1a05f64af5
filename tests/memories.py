"""Pages and cells by hand: requests that nobody schedules, and forwards that nobody runs."""

from collections.abc import Iterable
from typing import NamedTuple

from engines import poison, random_model

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVCacheManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.request import Request

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


def room(memory: KVCacheManager, one: Request, num_tokens: int = 10**6) -> Room | None:
    """Ask for its next tokens."""
    computed = one.num_computed_tokens
    allocation = memory.allocate(one.request_id, one.token_ids, computed, num_tokens)
    if allocation is None:
        return None
    first, new, slots = allocation
    context = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
    assert len(context) == first + len(new) and list(context)[first:] == list(new)
    return Room(first, list(new), list(context))


def run(memory: KVCacheManager, one: Request, num_tokens: int = 10**6) -> list[int] | None:
    """Room for its next tokens, and the forward done → where they went."""
    got = room(memory, one, num_tokens)
    if got is None:
        return None
    one.num_computed_tokens = got.first + len(got.new)
    memory.commit(one.request_id, one.token_ids, one.num_computed_tokens)
    memory.check_integrity()
    return got.new


def slots_of(memory: KVCacheManager, one: Request) -> tuple[int, ...]:
    """Where its computed tokens lie."""
    return memory.describe(one.request_id).slots[: one.num_computed_tokens]


def table_of(memory: KVCacheManager, one: Request) -> tuple[int, ...]:
    """Its blocks, or cells."""
    return memory.describe(one.request_id).table


def snapshot(memory: PagedKVCache | CellKVCache) -> object:
    """All that decides what is given out next."""
    if isinstance(memory, CellKVCache):
        return repr(memory.table)
    blocks = memory.blocks
    tables = {name: tuple(table) for name, table in blocks.tables.items()}
    return tables, list(blocks.free_queue), [(b.ref_cnt, b.hash) for b in blocks.blocks]
