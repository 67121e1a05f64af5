"""The engine on pages and cells: whatever comes, and however small the pool, each as if alone.

The check is in workloads.py. Here it runs on every block size, and on memories with planted bugs,
which must all be seen; test_as_if_alone.py has random workloads on every memory.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fuzz import failure, random_workload
from workloads import (
    LIMITS,
    POOL_SIZE,
    Visitor,
    Workload,
    check,
    most_samples,
    pool,
)

from tutorial_engine.cache import cells as cells_module
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable, SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.inputs import InputProcessor
from tutorial_engine.engine.request import Request, SampleGroup
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import CellsShared, Event, Forked, Recorder

pytestmark = pytest.mark.slow

MEMORIES = ("pages", "cells")


# -- the dial, by hand ----------------------------------------------------------------------------


def everyone(**options: Any) -> Workload:
    """All of the pool, six more in each step."""
    visitors = tuple(Visitor(i, i // 6) for i in range(POOL_SIZE))
    defaults = {"max_num_seqs": 7, "budget": 34, "limit": max(LIMITS), "capacity": 48}
    defaults["memory"] = "pages"
    return Workload(visitors, **{**defaults, **options})


def families(**options: Any) -> Workload:
    """Those of the pool who can have three samples, with three."""
    able = [i for i in range(POOL_SIZE) if most_samples(i) == 3][::2]
    visitors = tuple(Visitor(i, n // 2, n=3) for n, i in enumerate(able))
    return Workload(visitors, **{"memory": "pages", "max_num_seqs": 7, "budget": 40, **options})


def test_smaller_blocks_find_more() -> None:
    found = [
        check(everyone(block_size=size, capacity=400, budget=500))["hit tokens"]
        for size in (1, 4, 16)
    ]
    assert found[0] > found[1] > found[2] > 0, found


# -- planted bugs ---------------------------------------------------------------------------------

SLOTS, FORK_PAGES = PagedKVCache._slots_of, PagedKVCache.fork
ALLOCATE_CELLS, ALLOCATE_PAGES = CellKVCache.allocate, PagedKVCache.allocate
CONTEXT, CELLS_OF = PagedKVCache._context, CellTable.cells_of
FORK_CELLS, FREE_CELLS, DROP = CellKVCache.fork, CellKVCache.free, CellTable._drop
FORK, RECORD, PROCESS = Scheduler.fork, Recorder.record, InputProcessor.process


def slots_of_the_next_block(self: PagedKVCache, blocks: Any) -> Any:
    return SLOTS(self, [(block + 1) % self.blocks.num_blocks for block in blocks])


def context_begins_a_slot_late(self: PagedKVCache, seq_id: str, num_tokens: int) -> Any:
    right = CONTEXT(self, seq_id, num_tokens)
    if isinstance(right, slice):
        return slice(right.start + 1, right.stop + 1) if right.start == 0 else right
    return torch.cat((right[1:2], right[1:]))


def sees_a_longer_table_only(self: PagedKVCache, seq_id: str, num_tokens: int) -> Any:
    """A block that a copy has put in the place of another is not noticed."""
    table, (known, _) = self.blocks.tables[seq_id], self._read.get(seq_id, ([], None))
    table[: len(known)], right = known, table[: len(known)]
    slots = CONTEXT(self, seq_id, num_tokens)
    table[: len(right)] = right
    return slots


def child_is_not_pinned(self: BlockManager, parent: str, child: str, num_tokens: int) -> None:
    """The child's table has the parent's blocks, and nobody counts it."""
    self.tables[child] = self.tables[parent][: self.num_blocks_for(num_tokens)]
    self._chains[child] = self._chains[parent][: num_tokens // self.block_size]
    self._num_written[child] = len(self._chains[child])


def shares_one_too_many(fork: Any) -> Any:
    """The last prompt token, which gives the child its logits, is never run by it."""

    def wrong(self: Any, parent_id: str, child_id: str, num_tokens: int) -> int:
        return fork(self, parent_id, child_id, num_tokens and num_tokens + 1)

    return wrong


def forks_of_one_that_is_freed(
    self: PagedKVCache, parent_id: str, child_id: str, num_tokens: int
) -> int:
    """The parent's blocks are given back first: others may take what the child was promised."""
    known = self.blocks.tables, self.blocks._chains, self.blocks._num_written
    before = [part.get(parent_id) for part in known]
    self.blocks.free(parent_id)
    for part, value in zip(known, before, strict=True):
        if value is not None:
            part[parent_id] = value
    return FORK_PAGES(self, parent_id, child_id, num_tokens)


def queues_samples_last(self: Scheduler, parent: Request) -> None:
    """Behind all who wait, but the trace says in front."""
    before = len(self.waiting)
    FORK(self, parent)
    self.waiting.rotate(before - len(self.waiting))


def frees_what_others_own(self: CellTable, seq_id: SeqId, cells: Sequence[int]) -> list[int]:
    """A shared cell becomes empty when one of its owners leaves."""
    for cell in cells:
        for other in self[cell].owners - {seq_id}:
            self._set_cells(other, [c for c in self._cells[other] if c != cell])
        self._set(cell, self[cell]._replace(owners=frozenset((seq_id,))))
    return DROP(self, seq_id, cells)


def keeps_its_cells(self: CellKVCache, seq_id: str) -> None:
    """They stay taken."""
    for known in (self._shared, self._waiting):
        known.pop(seq_id, None)


def keeps_a_forks_cells(self: CellKVCache, seq_id: str) -> None:
    """Those of one that gives up what it shares while it waits."""
    (keeps_its_cells if seq_id in self._waiting else FREE_CELLS)(self, seq_id)


def a_fork_lacks_a_cell(self: CellKVCache, parent_id: str, child_id: str, num_tokens: int) -> int:
    """The child is told of the tokens, and gets no cell for the first."""
    shared = FORK_CELLS(self, parent_id, child_id, num_tokens)
    if shared:
        self.seq_rm(child_id, 0, 1)
    return shared


def one_position_further(self: CellKVCache, *what: Any) -> Allocation | None:
    room = ALLOCATE_CELLS(self, *what)
    return room and room._replace(first_position=room.first_position + (room.first_position > 0))


def written_a_block_too_far(self: PagedKVCache, *what: Any) -> Allocation | None:
    room, num_slots = ALLOCATE_PAGES(self, *what), self.storage.num_slots
    wrong = [(slot + self.block_size) % num_slots for slot in room.new_slots] if room else []
    return room and room._replace(new_slots=wrong)


def ordered_by_number(self: CellTable, seq_id: SeqId) -> list[int]:
    return sorted(CELLS_OF(self, seq_id))


def neighbours_assumed(cells: list[int]) -> Any:
    start = min(cells[0], max(cells) + 1 - len(cells))
    return slice(start, start + len(cells))


def one_generator_for_all_samples(self: InputProcessor, *what: Any, **options: Any) -> SampleGroup:
    group = PROCESS(self, *what, **options)
    for sample in group.samples:
        sample.sampler._generator = group.samples[0].sampler._generator
    return group


def one_seed_for_all_samples(self: SamplingParams, index: int) -> SamplingParams:
    return replace(self, n=1)


def silent_about_forks(self: Recorder, kind: type[Event], *values: object) -> None:
    if kind not in (Forked, CellsShared):
        RECORD(self, kind, *values)


def aborts_the_first_alone(self: LLMEngine, request_id: str) -> None:
    request = self.requests[request_id]
    if not request.is_over:
        self.scheduler.abort(request)


# name: (memory, owner, method, what it does instead)
BUGS: dict[str, tuple[str, Any, str, Any]] = {
    "written a block too far": ("pages", PagedKVCache, "allocate", written_a_block_too_far),
    "read a block too far": ("pages", PagedKVCache, "_slots_of", slots_of_the_next_block),
    "read a slot too late": ("pages", PagedKVCache, "_context", context_begins_a_slot_late),
    "a copy that copies nothing": ("pages", KVStorage, "copy", lambda self, *slots: None),
    "blocks kept by who gives way": ("pages", BlockManager, "free", lambda self, name: None),
    "tables not followed": ("pages", PagedKVCache, "_context", sees_a_longer_table_only),
    "a child that is not pinned": ("pages", BlockManager, "fork", child_is_not_pinned),
    "one token too many is shared": (
        "pages",
        PagedKVCache,
        "fork",
        shares_one_too_many(FORK_PAGES),
    ),
    "forked from one that is freed": ("pages", PagedKVCache, "fork", forks_of_one_that_is_freed),
    "samples queue last": ("pages", Scheduler, "fork", queues_samples_last),
    "abort ends the first sample": ("pages", LLMEngine, "abort_request", aborts_the_first_alone),
    "one generator for all samples": (
        "pages",
        InputProcessor,
        "process",
        one_generator_for_all_samples,
    ),
    "one seed for all samples": ("cells", SamplingParams, "sample", one_seed_for_all_samples),
    "cells freed while others own them": ("cells", CellTable, "_drop", frees_what_others_own),
    "one cell too many is shared": ("cells", CellKVCache, "fork", shares_one_too_many(FORK_CELLS)),
    "a fork's cells are kept": ("cells", CellKVCache, "free", keeps_a_forks_cells),
    "cells are kept": ("cells", CellKVCache, "free", keeps_its_cells),
    "a fork lacks a cell": ("cells", CellKVCache, "fork", a_fork_lacks_a_cell),
    "cells read by number": ("cells", CellTable, "cells_of", ordered_by_number),
    "cells taken for neighbours": ("cells", cells_module, "as_slots", neighbours_assumed),
    "a position further": ("cells", CellKVCache, "allocate", one_position_further),
    "forks are not recorded": ("cells", Recorder, "record", silent_about_forks),
}


def some_workloads(memory: str) -> Iterator[Workload]:
    """Twenty at random; by hand, what is rare among them; and eighty more."""
    draw = random.Random(0)
    yield from (random_workload(draw, memory) for _ in range(20))
    many = families(memory=memory, capacity=36)
    yield replace(many, visitors=tuple(replace(v, aborted_at=4) for v in many.visitors))
    yield everyone(memory=memory, block_size=1)
    yield from (random_workload(draw, memory) for _ in range(80))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    memory, owner, method, wrong = BUGS[name]
    for number, workload in enumerate(some_workloads(memory), 1):
        for visitor in workload.visitors:
            if len(pool()[visitor.index].prompt) < workload.longest:
                visitor.alone(workload.longest)  # is known before there is a bug
        with patch.object(owner, method, wrong):
            error = failure(workload)
        if error is not None:
            print(number, type(error).__name__, str(error)[:150])
            assert failure(workload) is None, "without it, all is well"
            return
    pytest.fail("102 workloads did not show it")
