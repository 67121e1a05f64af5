"""Whatever comes, and in whatever engine: every request is served as if it were alone.

The check is in workloads.py. Here it runs over one matrix of engines, on some hundreds of random
workloads (fuzz.py), and on engines with planted bugs, which it must all catch.
"""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from fuzz import failure, random_workload, run_random
from workloads import (
    BACKENDS,
    IN_PLACE,
    LIMITS,
    MEMORIES,
    POLICIES,
    POOL_SIZE,
    WAYS,
    Visitor,
    Workload,
    alone,
    check,
    check_transformers,
    most_samples,
    pool,
)

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:prompt 0 ended with an error"),
]
BATCHES, PER_BATCH = 3, 80  # long_run.py runs as long as you like


@pytest.fixture(autouse=True, scope="module")
def known() -> Iterator[None]:
    """What each says alone, before any bug is planted."""
    for index in range(POOL_SIZE):
        for limit in LIMITS:
            alone(index, limit)
    yield


# -- the matrix -----------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    f"{memory}, {how}": {"memory": memory, "attention": how}
    for memory in ("rows", "cells")
    for how in BACKENDS
    if how not in IN_PLACE
} | {
    f"pages, {how}, {'found again' if caching else 'never found'}": {
        "memory": "pages",
        "attention": how,
        "prefix_caching": caching,
    }
    for how in BACKENDS
    for caching in (True, False)
}
CHUNKS: tuple[dict[str, Any], ...] = (
    {"budget": 500},  # prompts run whole
    {"budget": 9, "threshold": 3},
    {"budget": 34, "chunked": False},  # all or none
)


@pytest.mark.parametrize("kind", KINDS)
def test_matrix(kind: str) -> None:
    """Memory, backend and prefix cache × policy × chunks, in a pool that is too small.

    With samples every other time, at other places for the next kind: each pair is met with each.
    """
    families = [i for i in range(POOL_SIZE) if most_samples(i) == 3]
    crowds = [
        tuple(Visitor(i, number // 3) for number, i in enumerate((*range(6), 0, 1))),
        tuple(Visitor(i, number // 2, n=3) for number, i in enumerate(families[:3])),
    ]
    seen: Counter[str] = Counter()
    for number, (policy, chunks) in enumerate(product(POLICIES, CHUNKS)):
        visitors = crowds[(number + [*KINDS].index(kind)) % 2]
        options = {"max_num_seqs": 5, "capacity": max(LIMITS), **chunks, **KINDS[kind]}
        if policy == "PrefillFirst":
            options["budget"] = max(34, options["budget"])
        counts = check(Workload(visitors, policy, **options))
        assert counts["samples"] == sum(visitor.n for visitor in visitors)
        seen += counts
    for what in ("Preempted", "resumed", "chunked prefills", "mixed steps", "Forked"):
        assert seen[what] >= 10, (what, seen)  # it was no quiet party
    finds, shares = "found again" in kind, not kind.startswith("rows")
    assert (seen["hits"] > 0) == finds
    assert (seen["forks that share"] + seen["hits"] > 0) == shares


# -- random workloads -----------------------------------------------------------------------------

NOT_QUIET = {  # a run, on average
    "Preempted": 0.5,
    "resumed": 0.5,
    "hits": 0.2,
    "evictions": 0.2,
    "BlockCopied": 0.05,
    "Forked": 0.5,
    "forks that keep it": 0.2,
    "BlockShared": 0.5,
    "CellsShared": 0.2,
    "aborts": 0.08,
    "faults": 0.03,
    "refused": 0.02,
    "interrupts": 0.02,
    "broken forwards": 0.02,
    "left": 0.05,
    "chunked prefills": 0.5,
    "mixed steps": 0.5,
    **{f"on {memory}": 0.2 for memory in MEMORIES},
    **{f"read {how}": 0.01 for how in BACKENDS},
    **{f"by {way}": 0.1 for way in WAYS},
}


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_workloads(batch: int) -> None:
    counts = run_random(0, batch * PER_BATCH, PER_BATCH)
    for what, least in NOT_QUIET.items():
        assert counts[what] >= least * PER_BATCH, (what, counts)


def test_pool_has_requests_of_every_kind_and_transformers_agrees() -> None:
    """The oracle has an oracle."""
    counts = check_transformers()
    assert counts["greedy tokens as transformers"] > 50 < counts["logprobs as transformers"]
    params = [asked.params for asked in pool()]
    longest = [alone(i, max(LIMITS)) for i in range(POOL_SIZE)]
    assert sum(p.temperature == 0 for p in params) >= 8
    for kind in ("top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "logprobs"):
        assert sum(bool(getattr(p, kind)) for p in params) >= 4, kind
    reasons = Counter((one.finish_reason, type(one.stop_reason).__name__) for one in longest)
    assert reasons["length", "NoneType"] >= 10
    for kind in ("NoneType", "int", "str"):  # EOS, a stop id, a stop string
        assert reasons["stop", kind] >= 2, reasons
    shorter = [alone(i, LIMITS[0]) for i in range(POOL_SIZE) if len(pool()[i].prompt) < LIMITS[0]]
    assert sum(len(one.token_ids) < 10 and one.finish_reason == "length" for one in shorter) >= 2


# -- planted bugs ---------------------------------------------------------------------------------

ONE_MORE = ("if num_tokens:", "if num_tokens:\n        num_tokens += 1")
GIVES_UP = "victim.num_computed_tokens = 0"
# on which memory: name: what is planted; test_ledger.py plants more that change the numbers
BUGS: dict[str, Zoo] = {
    "rows": {
        "logits of the neighbour": edited(
            ModelRunner,
            "run",
            ("hidden if len(rows) == len(scheduled) else hidden[rows]", "hidden[rows].roll(1, 0)"),
        ),
        "one generator for all": edited(
            Sampler, "__init__", ("torch.Generator()", "torch.default_generator")
        ),
        "a chunk that stops short yields a token": edited(
            ScheduledRequest, "yields_token", ("== len(self.request.token_ids)", "> 0")
        ),
        "outputs lost by giving way": edited(
            Scheduler,
            "preempt",
            (GIVES_UP, f"{GIVES_UP}; del victim.token_ids[victim.num_prompt_tokens :]"),
        ),
        "seeded again after giving way": edited(
            Scheduler,
            "preempt",
            (
                GIVES_UP,
                f"{GIVES_UP}; victim.sampler._generator.manual_seed(victim.params.seed or 0)",
            ),
        ),
        "takes up where it was, without its memory": edited(
            Scheduler, "preempt", (GIVES_UP, "pass")
        ),
        "memory kept after giving way": edited(
            Scheduler, "preempt", ("self.memory.free(victim.request_id)", "pass")
        ),
        "row kept after an abort": edited(
            Scheduler,
            "end",
            ("self.memory.free(", "status is RequestStatus.ABORTED or self.memory.free("),
        ),
        "budget exceeded": edited(Scheduler, "num_tokens_to_run", (", plan.budget,", ",")),
        "an event is not recorded": edited(
            Scheduler, "preempt", ("self._record(events.Preempted, victim)", "pass")
        ),
        "an end not returned": edited(
            LLMEngine,
            "_has_news",
            ("self._news[request_id", "if not group.is_over: self._news[request_id"),
        ),
        "what is another's is dropped": edited(
            LLMEngine, "generate", ("outputs = [", "self._news.clear(); outputs = [")
        ),
        "what a stream brought stays": edited(LLMEngine, "_leave", ("self._end(group)", "pass")),
        "the context's end is not seen": edited(
            StopChecker, "__init__", ("max_new_tokens or params", "params")
        ),
        "a prompt computed again for ever": edited(
            Scheduler,
            "update",
            (
                "token = sampled.get(request.request_id)",
                """if 0 < allocation.first_position and computed == request.num_prompt_tokens:
            self.memory.free(request.request_id)
            request.num_computed_tokens = 0
            continue
        token = sampled.get(request.request_id)""",
            ),
        ),
    },
    "pages": {
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
            PagedKVCache, "_context", ("held.blocks != table", "len(held.blocks) < len(table)")
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
            (
                "self._end(group)",
                "group.samples[0].is_over or self.scheduler.abort(group.samples[0])",
            ),
        ),
    },
    "cells": {
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
    },
}


@pytest.mark.parametrize(("memory", "name"), [(m, name) for m, zoo in BUGS.items() for name in zoo])
def test_planted_bug_is_caught(memory: str, name: str) -> None:
    """By the check, or by a refusal of the engine: not because something cannot run."""
    draw = random.Random(0)
    for number in range(600):
        workload = random_workload(draw, memory)
        for visitor in workload.visitors:
            if len(pool()[visitor.index].prompt) < workload.longest:
                visitor.alone(workload.longest)  # is known before there is a bug
        with planted(name, BUGS[memory]):
            error = failure(workload)
        if error is not None:
            print(number, type(error).__name__, str(error)[:150])
            is_stuck = "planned nothing" in str(error)  # a memory that leaks has no room
            assert isinstance(error, AssertionError | ValueError) or is_stuck
            assert failure(workload) is None, "without it, all is well"
            return
    pytest.fail("600 workloads did not show it")
