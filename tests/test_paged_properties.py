"""The check of workloads.py sees what can go wrong in pages, cells and forks: with planted bugs.

What it checks runs on every memory and block size in test_as_if_alone.py.
"""

import random

import pytest
from fuzz import failure, random_workload
from workloads import pool

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.bugs import Zoo, edited, planted
from tutorial_engine.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

ONE_MORE = ("if num_tokens:", "if num_tokens:\n        num_tokens += 1")
PAGES: Zoo = {
    "written a block too far": edited(
        PagedKVCache,
        "allocate",
        ("p % size for", "(p + size) % self.storage.num_slots for"),
    ),
    "read a slot too late": edited(
        PagedKVCache, "_context", ("slots[:num_tokens]", "slots.roll(-1)[:num_tokens]")
    ),
    "a copy that copies nothing": edited(
        KVStorage, "copy", ("k[target], v[target] = k[source], v[source]", "pass")
    ),
    "a block in the place of another is not noticed": edited(
        PagedKVCache, "_context", ("blocks != table", "len(blocks) < len(table)")
    ),
    "one token too many is shared": edited(PagedKVCache, "fork", ONE_MORE),
    "samples queue last, and the trace says in front": edited(
        Scheduler,
        "fork",
        (
            "for child in self._queue_samples(parent.group):",
            """children = self._queue_samples(parent.group)
    self.waiting.rotate(-len(children))
    for child in children:""",
        ),
    ),
    "an abort ends the first sample alone": edited(
        LLMEngine,
        "abort_request",
        ("self._end(group)", "group.samples[0].is_over or self.scheduler.abort(group.samples[0])"),
    ),
}
CELLS: Zoo = {
    "one seed for all samples": edited(
        SamplingParams, "sample", ("(self.seed + index)", "self.seed")
    ),
    "one cell too many is shared": edited(CellKVCache, "fork", ONE_MORE),
    "a fork's cells are kept when it gives them up": edited(
        CellKVCache,
        "free",
        ("self._waiting.pop(seq_id, None)", "waits = self._waiting.pop(seq_id, 0) is None"),
        ("if cells:", "if cells and not waits:"),
    ),
    "a fork lacks a cell": edited(
        CellKVCache, "fork", ("parent_id, child_id, 0,", "parent_id, child_id, 1,")
    ),
    "cells are taken for neighbours": edited(
        CellKVCache,
        "allocate",
        ("as_slots(cells[:num_cells])", "slice(cells[0], cells[0] + num_cells)"),
    ),
    "a position further": edited(
        CellKVCache, "allocate", ("Allocation(first,", "Allocation(first + (first > 0),")
    ),
    "forks are not recorded": edited(
        CellKVCache, "fork", ("self._record(CellsShared, child_id, tuple(cells))", "pass")
    ),
}


@pytest.mark.parametrize(
    ("memory", "bugs", "name"),
    [
        *(("pages", PAGES, name) for name in PAGES),
        *(("cells", CELLS, name) for name in CELLS),
    ],
)
def test_planted_bug_is_caught(memory: str, bugs: Zoo, name: str) -> None:
    draw = random.Random(0)
    for number in range(150):
        workload = random_workload(draw, memory)
        for visitor in workload.visitors:
            if len(pool()[visitor.index].prompt) < workload.longest:
                visitor.alone(workload.longest)  # is known before there is a bug
        with planted(name, bugs):
            error = failure(workload)
        if error is not None:
            print(number, type(error).__name__, str(error)[:150])
            assert failure(workload) is None, "without it, all is well"
            return
    pytest.fail("150 workloads did not show it")
