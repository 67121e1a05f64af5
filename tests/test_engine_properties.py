"""Whatever comes, and in whatever engine: every request is served as if it were alone.

The check is in workloads.py. Here it runs on some hundreds of random workloads (fuzz.py), and on
engines with planted bugs, which it must all catch. test_paged_properties.py has pages and cells.
"""

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fuzz import failure, random_workload, run_random
from tutorial_engine.engine.delivery import Inbox, Update
from workloads import (
    BACKENDS,
    BLOCK_SIZES,
    EOS,
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
    pool,
    several,
)

from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.runner import ModelOutput, ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace import events

pytestmark = pytest.mark.slow
BATCHES, PER_BATCH = 10, 90  # about a minute; long_run.py runs as long as you like


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    for index in range(POOL_SIZE):  # before any bug is planted
        for limit in LIMITS:
            alone(index, limit)
    yield


# -- the property ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_request_comes_out_as_if_it_were_alone(batch: int) -> None:
    counts = run_random(0, batch * PER_BATCH, PER_BATCH)
    print(dict(counts))
    for what, least in NOT_QUIET.items():  # and it was no quiet party
        assert counts[what] >= least * PER_BATCH, (what, counts)


NOT_QUIET = {  # a run, on average
    "preemptions": 0.5,
    "resumed": 0.5,
    "hits": 0.2,
    "evictions": 0.2,
    "copies": 0.1,
    "forks": 0.5,
    "forks that keep it": 0.2,
    "blocks shared": 0.5,
    "cells shared": 0.2,
    "aborts": 0.1,
    "faults": 0.03,
    "refused": 0.02,
    "mistakes": 0.2,
    "interrupts": 0.02,
    "broken forwards": 0.02,
    "left": 0.05,
    "chunked prefills": 0.5,
    "mixed steps": 0.5,
    "bytes gathered": 1,
    **{f"on {memory}": 0.2 for memory in MEMORIES},
    **{f"read {how}": 0.03 for how in BACKENDS},
    **{f"by {way}": 0.1 for way in WAYS},
}


def test_what_can_go_wrong_in_a_workload_is_drawn() -> None:
    draw = random.Random(0)
    drawn = [random_workload(draw) for _ in range(600)]
    assert {one.memory for one in drawn} == set(MEMORIES)
    assert {one.block_size for one in drawn if one.memory == "pages"} == set(BLOCK_SIZES)
    assert {one.policy for one in drawn} == set(POLICIES)
    for name in ("prefix_caching", "chunked"):
        assert {getattr(one, name) for one in drawn} == {True, False}, name
    visitors = [visitor for one in drawn for visitor in one.visitors]
    assert {visitor.n for visitor in visitors} == {1, 2, 3}
    for name in ("aborted_at", "kills", "fails", "raises", "leaves"):
        found = [visitor.n for visitor in visitors if getattr(visitor, name) is not None]
        assert len(found) >= 20 and {*found} == {1, 2, 3}, name


def test_pool_has_requests_of_every_kind() -> None:
    params = [asked.params for asked in pool()]
    longest = [alone(i, max(LIMITS)) for i in range(POOL_SIZE)]
    assert sum(p.temperature == 0 for p in params) >= 8
    for kind in ("top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "logprobs"):
        assert sum(bool(getattr(p, kind)) for p in params) >= 4, kind
    assert sum(p.top_p < 1 for p in params) >= 8
    reasons = Counter(
        (output.finish_reason, type(output.stop_reason).__name__) for output in longest
    )
    assert reasons["length", "NoneType"] >= 10
    for kind in ("NoneType", "int", "str"):  # EOS, a stop id, a stop string
        assert reasons["stop", kind] >= 2, reasons
    assert sum(len(o.token_ids) >= 6 and len({*o.token_ids}) >= 4 for o in longest) >= 16
    assert len({token for output in longest for token in output.token_ids}) >= 50
    assert len({asked.prompt for asked in pool()}) < POOL_SIZE, "two ask about the same prompt"
    at_the_limit = [
        i
        for i in range(POOL_SIZE)
        if len(pool()[i].prompt) < LIMITS[0]
        and len(alone(i, LIMITS[0]).token_ids) < len(longest[i].token_ids)
    ]
    assert len(at_the_limit) >= 2, "some end because the model's context does"


def test_alone_is_what_transformers_says() -> None:
    """The oracle has an oracle."""
    counts = check_transformers()
    assert counts["greedy tokens as transformers"] > 50 < counts["logprobs as transformers"]


# -- examples that need not be drawn --------------------------------------------------------------

BUSY = several(range(6), max_num_seqs=6, budget=34)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunked", [True, False])
def test_each_policy_serves_all(policy: str, chunked: bool) -> None:
    everyone = several(range(POOL_SIZE), policy=policy, max_num_seqs=7, budget=40, chunked=chunked)
    counts = check(everyone)
    assert counts["requests"] == POOL_SIZE and not counts["refused"]


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_smallest_budgets_make_progress(budget: int) -> None:
    counts = check(several(range(12), max_num_seqs=5, budget=budget))
    assert counts["requests"] == 12 and counts["steps"] >= counts["tokens"] / budget


@pytest.mark.parametrize("policy", ["Scheduler", "PrefillFirst", "StaticBatching"])
def test_those_who_give_way_come_back_and_end_the_same(policy: str) -> None:
    counts = check(
        several(range(POOL_SIZE), policy=policy, max_num_seqs=6, budget=34, capacity=max(LIMITS))
    )
    assert counts["preemptions"] >= 3 and counts["resumed"] == counts["preemptions"]


def test_first_tokens_time_is_kept_when_a_request_gives_way() -> None:
    party = Party(several(range(POOL_SIZE), max_num_seqs=6, budget=34, capacity=max(LIMITS)))
    party.run()
    party.check()
    kept = 0
    sampled: dict[str, list[float]] = {}
    began: dict[str, float] = {}
    for event in party.recorder.events:
        if isinstance(event, events.TokenSampled):
            sampled.setdefault(event.request_id, []).append(event.time)
        elif isinstance(event, events.Scheduled):
            began.setdefault(event.request_id, event.time)
        elif isinstance(event, events.Preempted):
            kept += event.request_id in sampled
    assert kept >= 2, "nobody was thrown out with tokens"
    for name, diary in party.diaries.items():
        assert diary.output is not None
        metrics = diary.output.metrics
        assert metrics.token_times == tuple(sampled[name])
        assert metrics.first_scheduled == began[name]


# -- no workload loops for ever -------------------------------------------------------------------


def test_what_is_too_long_is_refused_and_the_others_do_not_notice() -> None:
    long = next(i for i, asked in enumerate(pool()) if len(asked.prompt) == 20)
    others = [i for i, asked in enumerate(pool()) if len(asked.prompt) < 9][:4]
    party = Party(several([others[0], long, *others[1:]], limit=20, budget=3))
    party.run()
    assert party.refused == 1 and "v1" not in party.diaries
    for name, index in zip(("v0", "v2", "v3", "v4"), others, strict=True):
        party.check_request(name, party.diaries[name], alone(index, 20))


def test_empty_engine_does_nothing_and_says_so() -> None:
    engine = Party(BUSY).engine
    assert engine.step() == [] and engine.run() == [] and engine.run(max_steps=3) == []
    assert (engine.num_steps, engine.runner.num_forwards) == (0, 0)
    assert not engine.has_unfinished_requests and engine.trace is not None
    assert len(engine.trace.events) == 0


@pytest.mark.parametrize("when", [0, 1, 4])
def test_all_aborted_is_the_end(when: int) -> None:
    visitors = tuple(Visitor(i, aborted_at=when) for i in range(POOL_SIZE - 6, POOL_SIZE))
    counts = check(Workload(visitors, budget=5, max_num_seqs=3))
    assert counts["aborts"] and counts["steps"] <= (100 if when == 4 else when)


def test_max_steps_is_kept_to_and_the_rest_can_follow() -> None:
    party = Party(BUSY)
    engine = party.engine
    for i in range(6):
        engine.add_request(pool()[i].prompt, pool()[i].params, f"v{i}")
    ended = []
    for _ in range(200):
        before = engine.num_steps
        ended += engine.run(max_steps=2)
        assert engine.num_steps - before <= 2
        engine.check_integrity()
        if not engine.has_unfinished_requests:
            break
    assert engine.run(max_steps=0) == []
    got = {output.request_id: output.outputs[0].token_ids for output in ended}
    assert got == {f"v{i}": alone(i, max(LIMITS)).token_ids for i in range(6)}


# -- planted bugs ---------------------------------------------------------------------------------

Bug = Callable[[], AbstractContextManager[Any]]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Bug:
    """`owner.name` becomes make(what it was)."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def batches_with(spoil: Callable[[Batch, list[int]], None]) -> Callable[[Any], Any]:
    """Every batch is spoiled, and told which of its tokens (indices) are alone: they decode."""

    def make(from_allocations: Callable[..., Batch]) -> Any:
        def wrong(
            sequences: Sequence[Sequence[int]], allocations: Sequence[Allocation], *rest: Any
        ) -> Batch:
            right = from_allocations(sequences, allocations, *rest)
            ones = zip(sequences, allocations, right.query_start_loc, strict=False)
            spoil(right, [at for ids, one, at in ones if len(ids) == 1 and one.first_position])
            return right

        return staticmethod(wrong)

    return make


def position_too_far(batch: Batch, decodes: list[int]) -> None:
    """decode start = prompt length + step, step from 1."""
    batch.positions[decodes] += 1


def slots_of_the_neighbour(batch: Batch, decodes: list[int]) -> None:
    """Two requests that decode write each other's slot."""
    if len(decodes) >= 2:
        assert batch.slot_mapping is not None
        batch.slot_mapping[decodes[:2]] = batch.slot_mapping[decodes[1::-1]]


def one_key_too_many(run_once: Callable[..., ModelOutput]) -> Any:
    """A query sees one slot more than is there; the last one of the storage has no neighbour."""

    def wrong(self: ModelRunner, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        def longer(one: ScheduledRequest) -> ScheduledRequest:
            slots, most = one.allocation.context_slots, self.storage.num_slots  # type: ignore[attr-defined]
            assert isinstance(slots, slice)
            more = slice(slots.start, min(slots.stop + 1, most))
            return one._replace(allocation=one.allocation._replace(context_slots=more))

        output = run_once(self, [longer(one) for one in scheduled])
        right = {one.request.request_id: one for one in scheduled}
        return output._replace(ready=[right[one.request.request_id] for one in output.ready])

    return wrong


def logits_of_the_neighbour(run: Callable[..., ModelOutput]) -> Any:
    """Each request that is ready gets the logits of the next one."""

    def wrong(self: ModelRunner, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        right = run(self, scheduled)
        return right._replace(logits=right.logits.roll(1, 0))

    return wrong


def first_row(_: Any) -> property:
    """The logits of a chunk's first token, not of its last."""
    return property(lambda batch: batch.query_start_loc[:-1])


def one_generator_for_all(init: Callable[..., None]) -> Any:
    shared = torch.Generator().manual_seed(7)

    def wrong(self: Sampler, *args: Any) -> None:
        init(self, *args)
        self._generator = shared

    return wrong


def loses_its_outputs(preempt: Callable[..., None]) -> Any:
    def wrong(self: Scheduler, victim: Request) -> None:
        preempt(self, victim)
        del victim.token_ids[victim.num_prompt_tokens :]

    return wrong


def draws_again(preempt: Callable[..., None]) -> Any:
    """The sampler is made anew for whoever gave way: it is seeded a second time."""

    def wrong(self: Scheduler, victim: Request) -> None:
        preempt(self, victim)
        fresh = Sampler(victim.params, EOS)
        fresh.num_sampled = victim.sampler.num_sampled
        victim.sampler = fresh

    return wrong


def forgets_the_memory(method: Callable[..., Any]) -> Any:
    """Whoever goes keeps its row."""

    def wrong(self: Scheduler, request: Request) -> Any:
        with patch.object(self.memory, "free", lambda seq_id: None):
            return method(self, request)

    return wrong


def forgets_to_begin_anew(preempt: Callable[..., None]) -> Any:
    """Whoever gave way takes its tokens for computed when it comes back."""

    def wrong(self: Scheduler, victim: Request) -> None:
        computed = victim.num_computed_tokens
        preempt(self, victim)
        victim.num_computed_tokens = computed

    return wrong


def more_than_the_budget(_: Callable[..., int]) -> Any:
    return lambda self, request, plan: request.num_new_tokens


def silent_about(kind: type[events.Event]) -> Callable[[Any], Any]:
    """Events of this kind are not recorded."""

    def make(record: Callable[..., None]) -> Any:
        def wrong(self: events.Recorder, event: type[events.Event], *values: object) -> None:
            if event is not kind:
                record(self, event, *values)

        return wrong

    return make


def delivers_twice(deliver: Callable[..., None]) -> Any:
    def wrong(self: Inbox, updates: Sequence[Update]) -> None:
        deliver(self, [u for u in updates for _ in range(1 if u.request.is_over else 2)])

    return wrong


def forgets_the_last(deliver: Callable[..., None]) -> Any:
    """The end of a request that had no token is lost."""

    def wrong(self: Inbox, updates: Sequence[Update]) -> None:
        deliver(self, [u for u in updates if u.token is not None or u.request.tokens])

    return wrong


def tells_at_once(deliver: Callable[..., None]) -> Any:
    """What a callback brings about is told before what came earlier."""

    def wrong(self: Inbox, updates: Sequence[Update]) -> None:
        telling, self._telling = self._telling, None
        waiting, self._to_tell = self._to_tell, deque()
        deliver(self, updates)
        self._telling, self._to_tell = telling, waiting

    return wrong


def never_too_long(init: Callable[..., None]) -> Any:
    def wrong(self: StopChecker, *args: Any, max_new_tokens: int | None = None) -> None:
        init(self, *args, max_new_tokens=None)

    return wrong


def computes_again_for_ever(update: Callable[..., Any]) -> Any:
    """A request that has run its prompt in several chunks begins at 0 once more."""

    def wrong(self: Scheduler, scheduled: Sequence[ScheduledRequest], *rest: Any) -> Any:
        for share in scheduled:
            first, n = share.allocation.first_position, share.num_tokens
            if first > 0 and first + n == share.request.num_prompt_tokens:
                self.memory.free(share.request.request_id)
                share.request.num_computed_tokens = 0
        late = [s for s in scheduled if s.request.num_computed_tokens or not s.allocation[0]]
        return update(self, late, *rest)

    return wrong


BUGS: dict[str, tuple[Bug, type[Exception], str]] = {
    "position too far": (
        replaced(Batch, "from_allocations", batches_with(position_too_far)),
        Differs,
        "tokens|logprobs|ended",
    ),
    "slots of the neighbour": (
        replaced(Batch, "from_allocations", batches_with(slots_of_the_neighbour)),
        Differs,
        "tokens|logprobs",
    ),
    "one key too many": (
        replaced(ModelRunner, "run_once", one_key_too_many),
        Exception,
        "",
    ),
    "logits of the neighbour": (
        replaced(ModelRunner, "run", logits_of_the_neighbour),
        Differs,
        "tokens|logprobs",
    ),
    "logits of a chunk's first token": (
        replaced(Batch, "last_token_indices", first_row),
        Differs,
        "tokens|logprobs",
    ),
    "one generator for all": (
        replaced(Sampler, "__init__", one_generator_for_all),
        Differs,
        "tokens",
    ),
    "a chunk that stops short yields a token": (
        replaced(ScheduledRequest, "yields_token", lambda _: property(lambda one: True)),
        AssertionError,
        "",
    ),
    "outputs lost by giving way": (
        replaced(Scheduler, "preempt", loses_its_outputs),
        AssertionError,
        "",
    ),
    "seeded again after giving way": (
        replaced(Scheduler, "preempt", draws_again),
        Differs,
        "tokens|logprobs",
    ),
    "memory kept after giving way": (
        replaced(Scheduler, "preempt", forgets_the_memory),
        (AssertionError, RuntimeError),  # type: ignore[dict-item]
        "computed|rows|planned nothing|replay|still running",
    ),
    "row kept after an abort": (
        replaced(Scheduler, "abort", forgets_the_memory),
        (AssertionError, RuntimeError),  # type: ignore[dict-item]
        "rows|planned nothing|still running",
    ),
    "takes up where it was, without its memory": (
        replaced(Scheduler, "preempt", forgets_to_begin_anew),
        AssertionError,
        "",
    ),
    "budget exceeded": (
        replaced(Scheduler, "num_tokens_to_run", more_than_the_budget),
        AssertionError,
        r"\] of \d+",
    ),
    "an event is not recorded": (
        replaced(events.Recorder, "record", silent_about(events.Preempted)),
        (AssertionError, ValueError),  # type: ignore[dict-item]
        "",
    ),
    "a token delivered twice": (
        replaced(Inbox, "deliver", delivers_twice),
        AssertionError,
        "delivered once",
    ),
    "an end not delivered": (
        replaced(Inbox, "deliver", forgets_the_last),
        AssertionError,
        "never ended",
    ),
    "callbacks are told in another order": (
        replaced(Inbox, "deliver", tells_at_once),
        AssertionError,
        "told",
    ),
    "the context's end is not seen": (
        replaced(StopChecker, "__init__", never_too_long),
        Exception,
        "",
    ),
    "a prompt computed again for ever": (
        replaced(Scheduler, "update", computes_again_for_ever),
        AssertionError,
        "still running|computed|replay",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    plant, kind, said = BUGS[name]
    draw, error = random.Random(0), None
    with plant():
        for _ in range(400):
            error = failure(random_workload(draw, "rows"))
            if error is not None:
                break
        else:
            pytest.fail(f"400 workloads did not show it: {name}")
    print(type(error).__name__, str(error)[:150])
    assert isinstance(error, kind) and re.search(said, str(error)), error
    check(BUSY)  # and without it, all is well again


def test_step_budget_ends_what_would_run_for_ever() -> None:
    """Whoever does not look at the books sees it as well, by the number of steps."""
    long = next(i for i, asked in enumerate(pool()) if len(asked.prompt) == 20)
    plant, *_ = BUGS["a prompt computed again for ever"]
    blind = patch.object(Party, "look", lambda self: None)
    with plant(), blind, pytest.raises(AssertionError, match="still running after"):
        check(several([long], budget=3))
    check(several([long], budget=3))
