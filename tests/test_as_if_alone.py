"""Whatever comes, and in whatever engine: every request is served as if it were alone.

The check is in workloads.py. Here it runs over one matrix of engines, on some hundreds of random
workloads (fuzz.py), and on engines with planted bugs, which it must all catch.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fuzz import failure, random_workload, run_random
from workloads import (
    BACKENDS,
    BLOCK_SIZES,
    EOS,
    IN_PLACE,
    LIMITS,
    MEMORIES,
    POLICIES,
    POOL_SIZE,
    WAYS,
    Differs,
    Party,
    Visitor,
    Workload,
    alone,
    check,
    check_transformers,
    most_samples,
    pool,
)

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import Request, SampleGroup, ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace import events

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


def test_what_can_go_wrong_in_a_workload_is_drawn() -> None:
    draw = random.Random(0)
    drawn = [random_workload(draw) for _ in range(600)]
    assert {workload.memory for workload in drawn} == set(MEMORIES)
    assert {one.block_size for one in drawn if one.memory == "pages"} == set(BLOCK_SIZES)
    assert {workload.policy for workload in drawn} == set(POLICIES)
    visitors = [visitor for workload in drawn for visitor in workload.visitors]
    for name in ("aborted_at", "fails", "stumbles", "leaves"):
        found = [visitor.n for visitor in visitors if getattr(visitor, name) is not None]
        assert len(found) >= 20 and {*found} == {1, 2, 3}, name


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

Bug = Callable[[], AbstractContextManager[Any]]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Bug:
    """`owner.name` becomes make(what it was)."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def positions_too_far(from_allocations: Callable[..., Batch]) -> Any:
    """decode start = prompt length + step, step from 1."""

    def wrong(
        sequences: Sequence[Sequence[int]], allocations: Sequence[Allocation], *rest: Any
    ) -> Batch:
        right = from_allocations(sequences, allocations, *rest)
        for ids, room, at in zip(sequences, allocations, right.query_start_loc, strict=False):
            if len(ids) == 1 and room.first_position:
                right.positions[at] += 1
        return right

    return staticmethod(wrong)


def one_generator_for_all(init: Callable[..., None]) -> Any:
    shared = torch.Generator().manual_seed(7)

    def wrong(self: Sampler, *args: Any) -> None:
        init(self, *args)
        self._generator = shared

    return wrong


def after_preempting(spoil: Callable[[Request, int], None]) -> Callable[[Any], Any]:
    """Whoever gave way is spoiled; `spoil` knows how many of its tokens had been computed."""

    def make(preempt: Callable[..., None]) -> Any:
        def wrong(self: Scheduler, victim: Request) -> None:
            computed = victim.num_computed_tokens
            preempt(self, victim)
            spoil(victim, computed)

        return wrong

    return make


def loses_its_outputs(victim: Request, computed: int) -> None:
    del victim.token_ids[victim.num_prompt_tokens :]


def takes_up_where_it_was(victim: Request, computed: int) -> None:
    victim.num_computed_tokens = computed


def draws_again(victim: Request, computed: int) -> None:
    """The sampler is made anew: it is seeded a second time."""
    fresh = Sampler(victim.params, EOS)
    fresh.num_sampled = victim.sampler.num_sampled
    victim.sampler = fresh


def forgets_the_memory(method: Callable[..., Any]) -> Any:
    """Whoever goes keeps its row."""

    def wrong(self: Scheduler, request: Request) -> Any:
        with patch.object(self.memory, "free", lambda seq_id: None):
            return method(self, request)

    return wrong


def silent_about(kind: type[events.Event]) -> Callable[[Any], Any]:
    """Events of this kind are not recorded."""

    def make(record: Callable[..., None]) -> Any:
        def wrong(self: events.Recorder, event: type[events.Event], *values: object) -> None:
            if event is not kind:
                record(self, event, *values)

        return wrong

    return make


def forgets_ends(put: Callable[..., None]) -> Any:
    """The output of a request that ended is not returned."""

    def wrong(self: LLMEngine, group: SampleGroup) -> None:
        if not group.is_over:
            put(self, group)

    return wrong


def drops_what_is_anothers(generate: Callable[..., Any]) -> Any:
    """generate takes all that its steps bring."""

    def wrong(self: LLMEngine, *args: Any, **options: Any) -> Any:
        outputs = generate(self, *args, **options)
        self._news.clear()
        return outputs

    return wrong


def never_too_long(init: Callable[..., None]) -> Any:
    def wrong(self: StopChecker, *args: Any) -> None:
        init(self, *args[:3])

    return wrong


def computes_again_for_ever(update: Callable[..., Any]) -> Any:
    """A request that has run its prompt in several chunks begins at 0 once more."""

    def wrong(self: Scheduler, scheduled: Sequence[ScheduledRequest], *rest: Any) -> Any:
        for request, num_tokens, allocation in scheduled:
            first = allocation.first_position
            if first > 0 and first + num_tokens == request.num_prompt_tokens:
                self.memory.free(request.request_id)
                request.num_computed_tokens = 0
        late = [s for s in scheduled if s.request.num_computed_tokens or not s.allocation[0]]
        return update(self, late, *rest)

    return wrong


# name: (what to plant, what the check says); test_ledger.py plants more that change the numbers
BUGS: dict[str, tuple[Bug, str]] = {
    "position too far": (
        replaced(Batch, "from_allocations", positions_too_far),
        "tokens|logprobs|ended",
    ),
    "logits of the neighbour": (
        replaced(ModelRunner, "run", lambda run: lambda *args: run(*args).roll(1, 0)),
        "tokens|logprobs",
    ),
    "one generator for all": (replaced(Sampler, "__init__", one_generator_for_all), "tokens"),
    "a chunk that stops short yields a token": (
        replaced(ScheduledRequest, "yields_token", lambda _: property(lambda item: True)),
        "",
    ),
    "outputs lost by giving way": (
        replaced(Scheduler, "preempt", after_preempting(loses_its_outputs)),
        "",
    ),
    "seeded again after giving way": (
        replaced(Scheduler, "preempt", after_preempting(draws_again)),
        "tokens|logprobs",
    ),
    "takes up where it was, without its memory": (
        replaced(Scheduler, "preempt", after_preempting(takes_up_where_it_was)),
        "",
    ),
    "memory kept after giving way": (
        replaced(Scheduler, "preempt", forgets_the_memory),
        "computed|rows|planned nothing|replay|still running",
    ),
    "row kept after an abort": (
        replaced(Scheduler, "abort", forgets_the_memory),
        "rows|planned nothing|still running",
    ),
    "budget exceeded": (
        replaced(
            Scheduler, "num_tokens_to_run", lambda _: lambda self, one, plan: one.num_new_tokens
        ),
        r"run of \d+",
    ),
    "an event is not recorded": (
        replaced(events.Recorder, "record", silent_about(events.Preempted)),
        "",
    ),
    "an end not returned": (replaced(LLMEngine, "_has_news", forgets_ends), "never ended"),
    "what is another's is dropped": (
        replaced(LLMEngine, "generate", drops_what_is_anothers),
        "never ended",
    ),
    "what a stream brought stays": (
        replaced(LLMEngine, "_leave", lambda _: lambda self, groups: None),
        "still there|lost tokens|ended with|left over",
    ),
    "the context's end is not seen": (replaced(StopChecker, "__init__", never_too_long), ""),
    "a prompt computed again for ever": (
        replaced(Scheduler, "update", computes_again_for_ever),
        "still running|computed|replay",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    plant, says = BUGS[name]
    draw = random.Random(0)
    with plant():
        found = (failure(random_workload(draw, "rows")) for _ in range(600))
        error = next((error for error in found if error is not None), None)
    print(type(error).__name__, str(error)[:150])
    assert error is not None, f"600 workloads did not show it: {name}"
    assert isinstance(error, Differs) or says != "tokens|logprobs"
    assert re.search(says, str(error)), error
    check(Workload((Visitor(0), Visitor(1))))  # and without it, all is well again


def test_step_limit_ends_what_would_run_for_ever() -> None:
    """Whoever does not look at the books sees it as well, by the number of steps."""
    long = next(i for i, asked in enumerate(pool()) if len(asked.prompt) == 20)
    plant, _ = BUGS["a prompt computed again for ever"]
    blind = patch.object(Party, "look", lambda self: None)
    with plant(), blind, pytest.raises(AssertionError, match="still running after"):
        check(Workload((Visitor(long),), budget=3))
