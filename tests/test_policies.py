"""Older policies beside the one rule: the same tokens, in the order that each of them promises."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Toy, alone, shares

from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler

POLICIES = [Scheduler, StaticBatching, OneByOne, PrefillFirst]


def ragged(policy: type[Scheduler], **limits: Any) -> Toy:
    """Four prompts of 4 that want 2, 5, 3 and 1 tokens, two at a time unless told."""
    toy = Toy(policy, **{"max_num_seqs": 2, **limits})
    for name, max_tokens in zip("abcd", (2, 5, 3, 1), strict=True):
        toy.add(name, 4, max_tokens)
    return toy


RAGGED = {
    Scheduler: "a4b4 a1b1 b1c4 b1c1 b1c1 d4",  # every place is filled at once
    StaticBatching: "a4b4 a1b1 b1 b1 b1 c4d4 c1 c1",  # the slowest is waited for
    OneByOne: "a4 a1 b4 b1 b1 b1 b1 c4 c1 c1 d4",
    PrefillFirst: "a4b4 a1b1 c4 b1c1 b1c1 d4 b1",  # those who decode wait
}


@pytest.mark.parametrize("policy", POLICIES)
def test_four_ragged_requests_by_hand(policy: type[Scheduler]) -> None:
    steps = ["".join(f"{name}{n}" for name, n in shares(step)) for step in ragged(policy).run()]
    assert " ".join(steps) == RAGGED[policy]


def test_prefill_first_takes_whole_prompts_while_the_budget_lasts() -> None:
    toy = ragged(PrefillFirst, max_num_seqs=4, max_num_batched_tokens=10)
    assert [shares(step) for step in toy.run()[:3]] == [
        [("a", 4), ("b", 4)],
        [("c", 4), ("d", 4)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]


def test_prefill_first_refuses_a_prompt_over_the_budget() -> None:
    toy = Toy(PrefillFirst, max_num_batched_tokens=8, enable_chunked_prefill=True)
    with pytest.raises(ValueError, match=r"request a has 9 tokens .* one step of at most 8:"):
        toy.add("a", 9)
    toy.add("b", 8, max_tokens=1)
    assert toy.run() == [{"b": 8}]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=6
)  # prompt, outputs, steps before it comes


def serve(toy: Toy, requests: list[tuple[int, int, int]]) -> list[list[ScheduledRequest]]:
    """Let them come, run all to the end, and see that each said what it says alone."""
    to_come = sorted(enumerate(requests), key=lambda pair: pair[1][2])
    steps = []
    while to_come or toy.scheduler.has_unfinished:
        while to_come and (to_come[0][1][2] <= len(steps) or not toy.scheduler.has_unfinished):
            i, (prompt_len, max_tokens, _) = to_come.pop(0)
            toy.add(chr(ord("a") + i), prompt_len, max_tokens)
        scheduled = toy.schedule()
        assert scheduled and len(steps) < 1000, "this never ends"
        steps.append(scheduled)
        toy.update(scheduled, toy.forward(scheduled))
    for i, (prompt_len, max_tokens, _) in enumerate(requests):
        name = chr(ord("a") + i)
        assert toy.requests[name].output_token_ids == alone(name, prompt_len, max_tokens)
    assert len(toy.memory.free_slots) == toy.memory.max_len
    return steps


def ids(step: list[ScheduledRequest]) -> set[str]:
    return {one.request.request_id for one in step}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(16, 40), st.booleans(), st.integers(1, 4), st.integers(9, 24))
def test_all_policies_give_the_same_tokens_also_when_memory_is_short(
    policy: type[Scheduler],
    requests: list[tuple[int, int, int]],
    slots: int,
    whole: bool,
    max_num_seqs: int,
    budget: int,
) -> None:
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    steps = serve(Toy(policy, slots=slots, whole=whole, **limits), requests)
    assert all(sum(one.num_tokens for one in step) <= budget for step in steps)


class Noted(StaticBatching):
    """Notes the batch of each step."""

    def schedule(self) -> list[ScheduledRequest]:
        scheduled = super().schedule()
        names = frozenset(group.request_id for group in self.batch)
        self.batches = [*getattr(self, "batches", []), names]
        return scheduled


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 4))
def test_nobody_joins_a_static_batch(requests: list[tuple[int, int, int]], seqs: int) -> None:
    toy = Toy(Noted, max_num_seqs=seqs, max_num_batched_tokens=9)
    steps = serve(toy, requests)
    batches = toy.scheduler.batches  # type: ignore[attr-defined]
    seen: set[str] = set()
    left = {name: request.params.max_tokens for name, request in toy.requests.items()}
    for step, batch, before in zip(steps, batches, [frozenset(), *batches], strict=False):
        assert ids(step) <= batch and len(batch) <= seqs, "somebody else joined"
        if batch != before:
            assert all(left[name] == 0 for name in before), "the slowest was not waited for"
            assert batch.isdisjoint(seen), "a batch was taken up again"
            seen |= batch
        for one in step:
            request = one.request
            end = one.allocation.first_position + one.num_tokens
            left[request.request_id] -= end >= request.num_prompt_tokens


def test_a_static_batch_is_filled_also_when_its_prompts_need_several_steps() -> None:
    toy = Toy(StaticBatching, max_num_seqs=3, max_num_batched_tokens=8)
    steps = serve(toy, [(10, 4, 0), (7, 4, 0), (3, 4, 0), (2, 4, 0)])
    assert [sorted(ids(step)) for step in steps[:3]] == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert next(i for i, step in enumerate(steps) if "d" in ids(step)) > 5


def test_a_static_batch_that_is_over_does_not_come_back_with_an_id_that_is_used_again() -> None:
    toy = Toy(StaticBatching, max_num_seqs=1)
    for names in ("a", "ba"):
        for name in names:
            toy.add(name, 4, 1)
        steps = toy.run()
    assert steps == [{"a": 4}, {"b": 4}, {"a": 4}]


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_one_by_one_runs_one(requests: list[tuple[int, int, int]]) -> None:
    steps = serve(Toy(OneByOne, max_num_seqs=4, max_num_batched_tokens=5), requests)
    names = [name for step in steps for name in ids(step)]
    assert len(names) == len(steps)
    changes = sum(a != b for a, b in pairwise(names))
    assert changes == len(requests) - 1, "one was taken up again after another"


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(1, 4), st.integers(9, 24))
def test_prefill_first_never_mixes(
    requests: list[tuple[int, int, int]], max_num_seqs: int, budget: int
) -> None:
    toy = Toy(PrefillFirst, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    for step in serve(toy, requests):
        kinds = {one.allocation.first_position == 0 for one in step}
        assert len(kinds) == 1, "prefill and decode in one step"
        for one in step:
            prefill = one.allocation.first_position == 0
            assert one.num_tokens == (one.request.num_prompt_tokens if prefill else 1)
