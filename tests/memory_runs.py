"""The workloads of workloads.py on pages and cells: small pools, shared prefixes, samples.

`check` runs one and asserts all that the engine promises, `random_workload` draws one. A block or
cell holds NaN until it is written, and again as soon as nobody may read what it held.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from engines import poison
from workloads import (
    LIMITS,
    POOL_SIZE,
    Party,
    Visitor,
    Workload,
    alone,
    most_samples,
    pool,
    small_model,
)

from tutorial_engine.cache.cell_table import SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.many_blocks import PagedAttention
from tutorial_engine.cache.memory import KVCacheManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.trace.events import (
    Admitted,
    BlockCopied,
    BlockShared,
    BlockTaken,
    CellsShared,
    Forked,
)

WHOLE = 0  # a block size: the whole row
BACKENDS = {  # how attention reads blocks
    "gathered": None,
    "in a loop": NaivePagedAttention,
    "many at a time": PagedAttention,
}
BLOCK_SIZES = (1, 2, 3, 4, 16, WHOLE)
MEMORIES = ("pages", "cells")


@dataclass(frozen=True)
class MemoryWorkload(Workload):
    """A workload and its pool: `capacity` tokens, rounded up to blocks, or so many cells."""

    memory: str = "pages"
    block_size: int = 4  # of pages
    prefix_caching: bool = True  # of pages
    attention: str = "gathered"  # on pages, any of BACKENDS

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return 1 if self.memory == "cells" else self.block_size or self.limit

    @property
    def num_blocks(self) -> int:
        """Blocks, or cells."""
        return -(-(self.capacity or self.limit * self.max_num_seqs) // self.size)

    @property
    def longest(self) -> int:
        """As Workload.longest: the pool may be smaller than the limit."""
        return min(self.limit, self.num_blocks * self.size)


# -- drawing one ----------------------------------------------------------------------------------


@cache
def twins() -> list[list[int]]:
    """Requests of the pool that ask about the same prompt, and say different things about it."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, asked in enumerate(pool()):
        by_prompt.setdefault(asked.prompt, []).append(index)
    return [group for group in by_prompt.values() if len(group) > 1]


@cache
def talkers(forks: bool) -> list[int]:
    """Those who stay for a while; with `forks`, those who can have several samples."""
    stay = [i for i in range(POOL_SIZE) if len(alone(i, max(LIMITS)).token_ids) >= 7]
    return [i for i in stay if not forks or most_samples(i) > 1]


def random_visitor(draw: random.Random, some: Sequence[int], latest: int, forks: bool) -> Visitor:
    """Every sixth or so is aborted, has another one aborted, or meets an error."""
    index, fate = draw.choice(some), draw.random()
    n = draw.randint(1, most_samples(index)) if forks else 1
    return Visitor(
        index,
        draw.randint(0, latest),
        aborted_at=draw.randint(0, 9) if fate < 0.12 else None,
        kills=0 if 0.12 <= fate < 0.15 else None,
        n=n,
        fails=(draw.randrange(n), draw.randint(0, 6)) if 0.15 <= fate < 0.18 else None,
        raises=draw.randint(0, 9) if 0.18 <= fate < 0.22 else None,
    )


def random_workload(draw: random.Random, memory: str | None = None) -> MemoryWorkload:
    """Few different prompts, so that they meet their own again; nine of ten are a crowd."""
    crowd, forks = draw.random() < 0.9, draw.random() < 0.6
    some = draw.choice(twins()) if draw.random() < 0.3 else draw.sample(talkers(forks), 3)
    if not crowd and draw.random() < 0.5:
        some = draw.sample(range(POOL_SIZE), 4)
    few, many = ((2, 3) if forks else (3, 5)) if crowd else (1, 3)
    latest = 2 if crowd else 9
    limit = draw.choice(LIMITS)
    policy = draw.choice(["Scheduler"] * 4 + ["StaticBatching", "PrefillFirst"])
    policy = policy if crowd or draw.random() < 0.9 else "OneByOne"
    chunked = draw.random() < 0.7
    whole = policy == "PrefillFirst" or not chunked  # or most would be refused
    small = [16, limit, limit, limit, limit + 2, limit + 4]
    sizes = (1, 2, 3, 4, 4, 4) if crowd and draw.random() < 0.85 else BLOCK_SIZES
    return MemoryWorkload(
        tuple(random_visitor(draw, some, latest, forks) for _ in range(draw.randint(few, many))),
        policy,
        draw.randint(4, 6) if crowd else draw.randint(1, 5),
        draw.choice([20, 34, 500] if whole else [4, 8, 13, 34, 500, 500]),
        limit,
        draw.choice([None, None, None, None, 1, 3, 7]),
        chunked,
        draw.choice(small if crowd else [limit, limit + 11, 2 * limit, None]),
        slots_first=draw.random() < 0.5,
        memory=memory or draw.choice(["pages", "pages", "cells"]),
        block_size=draw.choice(sizes),
        prefix_caching=draw.random() < 0.6,
    )


# -- memory whose unwritten slots show ------------------------------------------------------------


def nan_where(memory: PagedKVCache | CellKVCache, units: Sequence[int]) -> None:
    """NaN in these blocks, or cells."""
    num_units = memory.storage.num_slots // getattr(memory, "block_size", 1)
    for tensor in memory.storage.by_rows(num_units):  # [layers, units, H_kv, slots of one, D]
        tensor[:, list(units)] = float("nan")


def poison_pages(memory: PagedKVCache) -> PagedKVCache:
    """NaN everywhere; and again in a block that is taken, or that is free and cannot be found."""
    poison(memory)
    blocks = memory.blocks
    claim, release = blocks._claim, blocks._release

    def claimed() -> tuple[int, bool]:
        block, evicted = claim()
        nan_where(memory, [block])
        return block, evicted

    def released(block: int) -> None:
        release(block)
        if blocks.blocks[block].ref_cnt == 0 and blocks.blocks[block].hash is None:
            nan_where(memory, [block])

    blocks._claim, blocks._release = claimed, released  # type: ignore[method-assign]
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


def check_empty(memory: KVCacheManager) -> None:
    """Nothing is anybody's."""
    memory.check_integrity()
    if isinstance(memory, PagedKVCache):
        assert not memory.blocks.tables and not memory._found, "something is left over"
        assert memory.blocks.num_free == memory.blocks.num_blocks, "blocks leaked"
    elif isinstance(memory, CellKVCache):
        assert memory.table.num_used == 0, "cells leaked"
        assert not memory._shared and not memory._numbers, "something is left over"
    else:
        assert isinstance(memory, StaticKVCache) and memory.num_free_rows == memory.num_rows


class MemoryParty(Party):
    """A Party whose memory is pages or cells."""

    workload: MemoryWorkload

    def make_memory(self) -> PagedKVCache | CellKVCache:
        """As Party.make_memory."""
        workload, config = self.workload, small_model().config
        if workload.memory == "cells":
            return poison_cells(
                CellKVCache.from_config(
                    config,
                    workload.num_blocks,
                    slots_first=workload.slots_first,
                    trace=self.recorder,
                )
            )
        return poison_pages(
            PagedKVCache.from_config(
                config,
                block_size=workload.size,
                num_blocks=workload.num_blocks,
                slots_first=workload.slots_first,
                prefix_caching=workload.prefix_caching,
                trace=self.recorder,
            )
        )

    @property
    def in_place(self) -> bool:
        """Are blocks read where they are?"""
        return self.workload.memory == "pages" and self.workload.attention != "gathered"

    def make_attention(self) -> AttentionBackend | None:
        """As Party.make_attention."""
        backend = BACKENDS[self.workload.attention]
        return backend(self.memory) if self.in_place and backend is not None else None

    def look(self) -> None:
        """As Party.look; and who holds what is as a replay has it, wherever one looks."""
        super().look()
        if self.workload.memory == "cells":  # the tables are compared: there is nothing else
            tables = [request.table for request in self.replay.state.requests.values()]
            assert self.memory.table.num_used == len({cell for table in tables for cell in table})
            return
        there, told = self.memory.blocks, self.replay
        for number, block in enumerate(there.blocks):
            assert block.ref_cnt == told.ref_cnts.get(number, 0), f"block {number}: {block}"
            key = None if block.hash is None else block.hash.hex()[:12]
            assert told.hashes.get(number) == key, f"block {number}: {block}"
        fresh = [n for n in range(there.num_blocks) if n not in told.ref_cnts]
        assert list(there.free_queue) == fresh + list(told.free_queue), "the free queue"

    def check_memory(self) -> None:
        """As Party.check_memory: every block, every cell is free."""
        check_empty(self.memory)
        if self.in_place:
            assert self.memory.storage.bytes_gathered == 0, "K and V were copied"

    def count(self) -> Counter[str]:
        """As Party.count, and what pages and cells were for."""
        counts, events = super().count(), self.recorder.events
        forked = {event.request_id for event in events if isinstance(event, Forked)}
        admitted = [event for event in events if isinstance(event, Admitted)]
        found = [event for event in admitted if event.num_cached]
        shared = [event for event in events if isinstance(event, Forked) and event.num_tokens]
        counts[f"on {self.workload.memory}"] = 1
        if self.workload.memory == "pages":
            counts[f"read {self.workload.attention}"] = 1
            counts["bytes gathered"] = self.memory.storage.bytes_gathered
        counts["hits"] = sum(event.request_id not in forked for event in found)
        counts["hit tokens"] = sum(e.num_cached for e in found if e.request_id not in forked)
        counts["forks that share"] = len(shared)
        counts["forks that keep it"] = len({e.request_id for e in found} & forked)
        counts["blocks shared"] = sum(isinstance(event, BlockShared) for event in events)
        counts["cells shared"] = sum(
            len(event.cells) for event in events if isinstance(event, CellsShared)
        )
        counts["copies"] = sum(isinstance(event, BlockCopied) for event in events)
        counts["evictions"] = sum(isinstance(e, BlockTaken) and e.evicted for e in events)
        families = {f"v{i}" for i, one in enumerate(self.workload.visitors) if one.n > 1}
        parents = {event.parent_id for event in events if isinstance(event, Forked)}
        counts["families aborted after the fork"] = len(self.aborted & families & parents)
        counts["families aborted before it"] = len((self.aborted & families) - parents)
        return counts


def check(workload: MemoryWorkload) -> Counter[str]:
    """Run one workload; AssertionError, or whatever the engine raises, if anything is wrong."""
    party = MemoryParty(workload)
    party.run()
    party.check()
    return party.count()


# -- many of them ---------------------------------------------------------------------------------


def failure(workload: MemoryWorkload) -> Exception | None:
    """What `check` raises, if it does."""
    try:
        check(workload)
    except Exception as error:
        return error
    return None


def smallest(workload: MemoryWorkload) -> MemoryWorkload:
    """The same failure, or another, with as few visitors, samples and mishaps as it takes."""
    for less in smaller(workload):
        if failure(less) is not None:
            return smallest(less)
    return workload


def smaller(workload: MemoryWorkload) -> list[MemoryWorkload]:
    """All that are a little simpler."""
    found: list[Any] = []
    for index, one in enumerate(workload.visitors):
        before, after = workload.visitors[:index], workload.visitors[index + 1 :]
        found.append((*before, *after))
        for name, plain in (("aborted_at", None), ("kills", None), ("fails", None)):
            if getattr(one, name) is not None:
                found.append((*before, replace(one, **{name: plain}), *after))
        if one.raises is not None:
            found.append((*before, replace(one, raises=None), *after))
        if one.n > 1 and one.fails is None:
            found.append((*before, replace(one, n=one.n - 1), *after))
    return [replace(workload, visitors=visitors) for visitors in found if visitors]


def run_random(seed: int, many: int, memory: str | None = None) -> Counter[str]:
    """`many` random workloads, others for each seed, always the same; what happened.

    AssertionError with the smallest one that fails like one of them.
    """
    counts: Counter[str] = Counter()
    draw = random.Random(seed)
    for number in range(many):
        attention = list(BACKENDS)[number % len(BACKENDS)]
        workload = replace(random_workload(draw, memory), attention=attention)
        try:
            counts.update(check(workload))
        except Exception as error:
            raise AssertionError(f"{smallest(workload)} shows: {error}") from error
    return counts
