"""The engine on pages: whatever comes, and however small the pool, each request is as if alone.

The workloads and most of the check are those of workloads.py; here memory is a PagedKVCache in
which a block is NaN when it is taken, and some requests are forks of others.

    python tests/test_paged_properties.py --workloads 20000
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import one_thread
from workloads import (
    LIMITS,
    POLICIES,
    POOL_SIZE,
    Party,
    Visitor,
    Workload,
    alone,
    pool,
    small_model,
    the_tokenizer,
)

from tutorial_engine.blocks import BlockManager
from tutorial_engine.clock import VirtualClock
from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.kv_cache import Allocation
from tutorial_engine.kv_storage import KVStorage
from tutorial_engine.paged import PagedKVCache
from tutorial_engine.replay import Replay
from tutorial_engine.request import Request
from tutorial_engine.trace import Admitted, BlockCopied, BlockTaken, Recorder, Scheduled, StepEnded

BATCHES, PER_BATCH = 6, 50  # some hundreds; `main` below runs as many as you like
WHOLE = 0  # a block size: the whole row


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        for index in range(POOL_SIZE):  # before any bug is planted
            for limit in LIMITS:
                alone(index, limit)
        yield


@dataclass(frozen=True)
class Paged(Workload):
    """A workload and its pool: `capacity` tokens, rounded up to blocks.

    With `forks`, one that comes with the prompt of another that is here is forked from it.
    """

    block_size: int = 4
    prefix_caching: bool = True
    forks: bool = False

    @property
    def size(self) -> int:
        return self.block_size or self.limit

    @property
    def num_blocks(self) -> int:
        return -(-(self.capacity or self.limit * self.max_num_seqs) // self.size)


@cache
def twins() -> list[list[int]]:
    """Requests of the pool that ask about the same prompt, and say different things about it."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, asked in enumerate(pool()):
        by_prompt.setdefault(asked.prompt, []).append(index)
    return [group for group in by_prompt.values() if len(group) > 1]


@cache
def talkers() -> list[int]:
    """Those who stay for a while."""
    longest = max(LIMITS)
    return [i for i in range(POOL_SIZE) if len(alone(i, longest).token_ids) >= 5]


def random_workload(draw: random.Random) -> Paged:
    """Few different prompts, so that they meet their own again; four of five are a crowd."""
    crowd = draw.random() < 0.8
    some = draw.choice(twins()) if draw.random() < 0.4 else draw.sample(talkers(), 3)
    if not crowd and draw.random() < 0.5:
        some = draw.sample(range(POOL_SIZE), 4)
    visitors = tuple(
        Visitor(
            draw.choice(some),
            draw.randint(0, 2 if crowd else 9),
            draw.choice([None] * 17 + [1, 4, 9]),
            draw.choice([None] * 19 + [0]),
        )
        for _ in range(draw.randint(4, 7) if crowd else draw.randint(1, 6))
    )
    limit = draw.choice(LIMITS)
    policy = draw.choice(["Scheduler"] * 3 + ["StaticBatching", "PrefillFirst"])
    chunked = draw.random() < 0.7
    whole = policy == "PrefillFirst" or not chunked  # or most would be refused
    room = [limit, limit + 2] if crowd else [limit, limit + 11, 2 * limit, None]
    return Paged(
        visitors,
        policy,
        draw.randint(4, 6) if crowd else draw.randint(1, 5),
        draw.choice([20, 34, 500] if whole else [3, 5, 8, 13, 34, 500]),
        limit,
        draw.choice([None, None, 1, 3, 7]),
        chunked,
        draw.choice(room),
        draw.random() < 0.5,
        draw.choice([1, 2, 2, 4, 4, 4] if crowd and draw.random() < 0.8 else [1, 2, 4, 16, WHOLE]),
        draw.random() < 0.6,
        draw.random() < 0.5,
    )


class PagedParty(Party):
    """A Party whose memory is pages."""

    workload: Paged
    memory: PagedKVCache  # type: ignore[assignment]

    def __init__(self, workload: Paged) -> None:
        self.workload, self.recorder, model = workload, Recorder(), small_model()
        self.memory = PagedKVCache.from_config(
            model.config,
            block_size=workload.size,
            num_blocks=workload.num_blocks,
            slots_first=workload.slots_first,
            prefix_caching=workload.prefix_caching,
            trace=self.recorder,
        )
        poison(self.memory)
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
        )
        self.engine = LLMEngine(
            model,
            the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            trace=self.recorder,
        )
        self.diaries, self.aborted, self.refused, self.live = {}, set(), 0, []
        self.replay, self.seen, self.forked = Replay(), 0, 0

    def enter(self, number: int, visitor: Visitor) -> None:
        self.look()
        prompt = list(pool()[visitor.index].prompt)
        like = [
            request
            for request in self.engine.requests.values()
            if request.token_ids[: request.num_prompt_tokens] == prompt
        ]
        super().enter(number, visitor)
        child = self.engine.requests.get(f"v{number}")
        if self.workload.forks and like and child is not None:
            self.forked += self.memory.fork(like[-1], child) > 0
            self.engine.check_integrity()

    def look(self) -> None:
        """The pool as a replay has it is the one that is there, wherever one looks."""
        for event in self.recorder.events[self.seen :]:
            self.replay.apply(event)
        self.seen = len(self.recorder.events)
        there, told = self.memory.blocks, self.replay
        assert {n for n, count in told.ref_cnts.items() if count} == {
            n for n, block in enumerate(there.blocks) if block.ref_cnt
        }
        for number, count in told.ref_cnts.items():
            assert there.blocks[number].ref_cnt == count
        hashes = {n: b.hash.hex()[:12] for n, b in enumerate(there.blocks) if b.hash is not None}
        assert told.hashes == hashes
        fresh = [n for n in range(there.num_blocks) if n not in told.ref_cnts]
        assert list(there.free_queue) == fresh + list(told.free_queue)

    def check(self) -> None:
        self.look()
        engine, blocks = self.engine, self.memory.blocks
        assert not engine.requests and not blocks.tables, "something is left over"
        assert blocks.num_free == blocks.num_blocks == self.workload.num_blocks, "blocks leaked"
        assert engine.step() == [], "an empty engine has nothing to deliver"
        assert engine.model_runner.num_forwards == engine.num_steps, "one forward per step"
        for number, visitor in enumerate(self.workload.visitors):
            if (name := f"v{number}") in self.diaries:
                want = alone(visitor.index, self.workload.limit)
                self.check_request(name, self.diaries[name], want)
        self.check_trace()
        blocks.reset()
        blocks.check_integrity()

    def count(self) -> Counter[str]:
        counts, events = super().count(), self.recorder.events
        admitted = [event for event in events if isinstance(event, Admitted)]
        counts["hits"] = sum(event.num_cached > 0 for event in admitted)
        counts["hit tokens"] = sum(event.num_cached for event in admitted)
        counts["copies"] = sum(isinstance(event, BlockCopied) for event in events)
        counts["evictions"] = sum(isinstance(e, BlockTaken) and e.evicted for e in events)
        counts["forks"] = self.forked
        counts["runs that preempt"] = counts["preemptions"] > 0
        return counts


def poison(memory: PagedKVCache) -> None:
    """NaN in every slot; and again in a block's whenever it is taken."""
    shelves = memory.pages()
    for shelf in shelves:
        shelf.fill_(float("nan"))
    claim = memory.blocks._claim

    def poisoned() -> tuple[int, bool]:
        block, evicted = claim()
        for shelf in shelves:
            shelf[:, block] = float("nan")
        return block, evicted

    memory.blocks._claim = poisoned  # type: ignore[method-assign]


def check(workload: Paged) -> Counter[str]:
    """Run one workload; AssertionError, or whatever the engine raises, if anything is wrong."""
    party = PagedParty(workload)
    party.run()
    party.check()
    return party.count()


def run_random(number: int, many: int) -> Counter[str]:
    """`many` random workloads, other ones for each number, always the same; what happened."""
    counts: Counter[str] = Counter()
    draw = random.Random(number)
    for _ in range(many):
        workload = random_workload(draw)
        try:
            counts.update(check(workload))
        except Exception as error:
            raise AssertionError(f"{smallest(workload)} shows: {error}") from error
    return counts


def smallest(workload: Paged) -> Paged:
    """The same failure, or another, with as few visitors as it takes."""
    for index in range(len(workload.visitors)):
        left = workload.visitors[:index] + workload.visitors[index + 1 :]
        less = replace(workload, visitors=left)
        if left and fails(less) is not None:
            return smallest(less)
    return workload


def fails(workload: Paged) -> Exception | None:
    try:
        check(workload)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("number", range(BATCHES))
def test_every_request_on_pages_comes_out_as_if_it_were_alone(number: int) -> None:
    counts = run_random(number, PER_BATCH)
    print(dict(counts))
    assert counts["workloads"] >= PER_BATCH
    assert counts["runs that preempt"] >= 0.4 * PER_BATCH, counts
    for what in ("hits", "evictions", "forks", "resumed", "aborts", "chunked prefills"):
        assert counts[what] >= PER_BATCH // 5, (what, counts)
    assert counts["copies"] >= PER_BATCH // 8, counts


# -- the dial, by hand ----------------------------------------------------------------------------


def everyone(**options: Any) -> Paged:
    visitors = tuple(Visitor(i, i // 6) for i in range(POOL_SIZE))
    return Paged(visitors, **{"max_num_seqs": 7, "budget": 34, "limit": max(LIMITS), **options})


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, WHOLE])
def test_each_block_size_serves_all(block_size: int, prefix_caching: bool) -> None:
    workload = everyone(
        block_size=block_size, prefix_caching=prefix_caching, capacity=48, forks=prefix_caching
    )
    counts = check(workload)
    assert counts["requests"] == POOL_SIZE
    if block_size in (1, 2, 3, 4):
        assert counts["preemptions"] >= 3 and counts["resumed"] == counts["preemptions"]
        assert (counts["hits"] > 0) == prefix_caching
    if block_size == WHOLE:  # a row is enough for anybody
        assert not counts["preemptions"]


def forking(block_size: int) -> Paged:
    """All twins, each pair at once, the second one forked from the first while that runs."""
    pairs = [(a, b) for a, b, *_ in twins()]
    visitors = [Visitor(i, 12 * n + k) for n, pair in enumerate(pairs) for k, i in enumerate(pair)]
    return Paged(tuple(visitors), budget=40, block_size=block_size, forks=True)


@pytest.mark.parametrize("block_size", [2, 4, 16, WHOLE])
def test_forks_say_their_own_and_what_their_parents_say_stays(block_size: int) -> None:
    counts = check(forking(block_size))
    assert counts["forks"] >= 8 and counts["copies"] >= 3, counts


def test_smaller_blocks_find_more() -> None:
    found = [
        check(everyone(block_size=size, capacity=400, budget=500))["hit tokens"]
        for size in (1, 4, 16)
    ]
    assert found[0] > found[1] > found[2] > 0, found


# -- planted bugs ---------------------------------------------------------------------------------

ALLOCATE, ADMIT, EXTEND = PagedKVCache.allocate, BlockManager.admit, BlockManager.extend
Bug = AbstractContextManager[Any]


def commits_what_is_planned(
    self: PagedKVCache, request: Request, max_new_tokens: int
) -> Allocation | None:
    """Others may find what no forward has written."""
    allocation = ALLOCATE(self, request, max_new_tokens)
    if allocation is not None:
        self.blocks.commit(request.request_id, request.token_ids, request.num_tokens - 1)
    return allocation


def slots_of_the_next_block(self: PagedKVCache, table: Any, start: int, end: int) -> Any:
    right = SLOTS(self, table, start, end)
    return [(slot + self.block_size) % self.storage.num_slots for slot in right]


def context_begins_a_block_late(self: PagedKVCache, held: Any, table: Any, end: int) -> Any:
    right = CONTEXT(self, held, table, end)
    if isinstance(right, slice):
        shift = self.block_size if right.stop + self.block_size <= self.storage.num_slots else 0
        return slice(right.start + shift, right.stop + shift)
    return (right + self.block_size) % self.storage.num_slots


SLOTS, CONTEXT, FOLLOW = PagedKVCache._slots, PagedKVCache._context, PagedKVCache._follow


def admits_a_chunk(self: PagedKVCache, request: Request, max_new_tokens: int) -> Any:
    """Only what is run now has to fit: those who are let in throw each other out."""
    if request.request_id in self._held:
        return ROOM(self, request, max_new_tokens)
    found = self.blocks.admit(request.request_id, request.token_ids[:max_new_tokens])
    if found is None:
        return None
    self._held[request.request_id] = type_of_held(self)(found)
    return 0


def type_of_held(memory: PagedKVCache) -> Any:
    from tutorial_engine import paged

    return paged._Held


ROOM = PagedKVCache._room
BUGS: dict[str, Bug] = {
    name: patch.object(owner, method, wrong)
    for name, owner, method, wrong in [
        ("committed before the forward", PagedKVCache, "allocate", commits_what_is_planned),
        ("written a block too far", PagedKVCache, "_slots", slots_of_the_next_block),
        ("read a block too late", PagedKVCache, "_context", context_begins_a_block_late),
        ("a shared block is written", BlockManager, "_is_own", lambda self, block: True),
        ("a copy that copies nothing", KVStorage, "copy", lambda self, source, target: None),
        ("blocks kept by who gives way", BlockManager, "free", lambda self, request_id: None),
        ("tables not followed", PagedKVCache, "_follow", lambda self, held, table, changed: None),
        ("hashes without a parent", BlockManager, "hash_of", lambda self, p, ids: bytes(ids) * 9),
    ]
}


def find_failure() -> Exception | None:
    draw = random.Random(0)
    more = (random_workload(draw) for _ in range(100))
    for workload in (forking(4), forking(16), everyone(capacity=48), *more):
        if (error := fails(workload)) is not None:
            return error
    return None


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    with BUGS[name]:
        error = find_failure()
    assert error is not None, "103 workloads did not show it"
    print(type(error).__name__, str(error)[:150])
    check(everyone(capacity=48))  # and without it, all is well again


def first_tokens_run(party: PagedParty) -> int:
    """How many tokens of all were run twice."""
    ran = sum(e.num_tokens for e in party.recorder.events if isinstance(e, StepEnded))
    needed: dict[str, int] = {}
    for event in party.recorder.events:
        if isinstance(event, Scheduled):
            end = event.first_position + len(event.slots)
            needed[event.request_id] = max(needed.get(event.request_id, 0), end)
    return ran - sum(needed.values())


def thrash(wrong: Callable[..., Any] | None) -> tuple[int, int]:
    """Three long prompts in small chunks, in a pool for one and a half: preemptions, extra work."""
    long = [i for i, asked in enumerate(pool()) if len(asked.prompt) == 20][:3]
    workload = Paged(
        tuple(Visitor(i) for i in long),
        max_num_seqs=3,
        budget=6,
        threshold=3,
        capacity=48,
        block_size=1,
        prefix_caching=False,
    )
    with patch.object(PagedKVCache, "_room", wrong or ROOM):
        party = PagedParty(workload)
        party.run()
        party.check()
    return party.count()["preemptions"], first_tokens_run(party)


def test_whole_prompts_have_to_fit_or_admission_thrashes() -> None:
    """No bug in the tokens: only in the work."""
    right, wrong = thrash(None), thrash(admits_a_chunk)
    print(right, wrong)
    assert right[0] < wrong[0] and right[1] < wrong[1], (right, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1_000, help="the tests use 0 to 5")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    counts: Counter[str] = Counter()
    began, number = time.perf_counter(), asked.seed
    while (left := asked.workloads - counts["workloads"]) > 0:
        counts += run_random(number, min(500, left))
        number += 1
        print(f"{counts['workloads']:,} in {time.perf_counter() - began:.0f} s", flush=True)
    print(*(f"{what:<20}{n:>12,}" for what, n in counts.items()), sep="\n")
    print("every request came out as if it were alone")


if __name__ == "__main__":
    main()
