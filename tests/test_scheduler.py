"""Who runs in the next step, by hand: the one rule, when memory is short, and the older policies.

That each request says what it says alone, whatever comes, is in test_as_if_alone.py. No model runs
here: in a Toy's memory each token is a block, and every token is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from engines import random_model
from memories import check_empty
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import Request, RequestStatus, ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.sampling.params import SamplingParams

MODEL = random_model(num_hidden_layers=1)


class Toy:
    """An engine whose runner it is: `steps` has what each step ran, request id -> tokens.

    `hits`: so many tokens of a request are found in the cache, by its id.
    """

    def __init__(
        self,
        policy: type[Scheduler] = Scheduler,
        slots: int = 500,
        hits: Mapping[str, int] | None = None,
        **limits: Any,
    ) -> None:
        self.memory = PagedKVCache.from_config(
            MODEL.config, block_size=1, num_blocks=slots, prefix_caching=bool(hits)
        )
        self.engine = LLMEngine(
            MODEL,
            config=EngineConfig(**limits),
            scheduler=policy,
            memory=self.memory,
            clock=VirtualClock(),
            runner=self,  # type: ignore[arg-type]
        )
        self.scheduler = self.engine.scheduler
        self.requests: dict[str, Request] = {}
        self.steps: list[dict[str, int]] = []
        for name, num_tokens in (hits or {}).items():
            self.add(name, num_tokens, 1)
        self.finish()
        self.steps.clear()

    def add(self, name: str, prompt_len: int, max_tokens: int = 4) -> None:
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(name, [ord(name[0]) % 32] * prompt_len, asked)
        self.requests[name] = self.engine.requests[name]

    def run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """What the engine asks of its runner."""
        self.steps.append({item.request.request_id: item.num_tokens for item in scheduled})
        return torch.zeros(sum(item.yields_token for item in scheduled), 97)

    def step(self) -> None:
        self.engine.step()
        self.engine.check_integrity()

    def finish(self) -> list[dict[str, int]]:
        while self.engine.has_unfinished_requests():
            assert len(self.steps) < 500, "this never ends"
            self.step()
        return self.steps

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


def shares(step: Mapping[str, int]) -> list[tuple[str, int]]:
    """With the order, which dicts ignore when they are compared."""
    return list(step.items())


# -- one rule -----------------------------------------------------------------------------------


PLANS: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]], list[dict[str, int]]]] = {
    "a budget of 64 and three prompts of 40": (
        {"max_num_batched_tokens": 64},
        [("a", 40, 4), ("b", 40, 4), ("c", 40, 4)],
        [{"a": 40, "b": 24}, {"a": 1, "b": 16, "c": 40}, {"a": 1, "b": 1, "c": 1}],
    ),
    "a chunk is capped and a decode is not slowed": (
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 8},
        [("a", 20, 4), ("b", 40, 4), ("c", 3, 4)],
        [{"a": 8, "b": 8, "c": 3}, {"a": 8, "b": 8, "c": 1}, {"a": 4, "b": 8, "c": 1}],
    ),
    "no more run than may": (
        {"max_num_seqs": 2},
        [("a", 4, 3), ("b", 4, 2), ("c", 4, 2)],
        [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"a": 1, "c": 4}, {"c": 1}],
    ),
    "nobody overtakes the first that does not fit the memory": (
        {"slots": 10},
        [("a", 5, 3), ("b", 8, 1), ("c", 1, 1)],
        [{"a": 5}, {"a": 1}, {"a": 1}, {"b": 8, "c": 1}],
    ),
    "nobody overtakes the first that does not fit the budget": (
        {"max_num_batched_tokens": 10, "enable_chunked_prefill": False},
        [("a", 6, 2), ("b", 8, 1), ("c", 2, 1)],
        [{"a": 6}, {"a": 1, "b": 8}, {"c": 2}],
    ),
    "without chunks a prompt runs whole or not yet": (
        {
            "max_num_batched_tokens": 8,
            "enable_chunked_prefill": False,
            "long_prefill_token_threshold": 3,
        },
        [("a", 5, 3), ("b", 5, 1)],
        [{"a": 5}, {"a": 1, "b": 5}, {"a": 1}],
    ),
    "a budget of one token makes progress": (
        {"max_num_batched_tokens": 1},
        [("a", 3, 2), ("b", 3, 2)],
        [{name: 1} for name in "ab" for _ in range(4)],
    ),
    "tokens found in the cache are not run, and what is left of the budget is nobody's": (
        {"max_num_batched_tokens": 16, "hits": {"a": 12, "b": 3}},
        [("a", 20, 2), ("b", 9, 2), ("c", 5, 1)],
        [{"a": 8, "b": 6, "c": 2}, {"a": 1, "b": 1, "c": 3}],
    ),
    "a chunk after a hit goes on where the hit ends": (
        {"max_num_batched_tokens": 4, "hits": {"a": 6}},
        [("a", 13, 2)],
        [{"a": 4}, {"a": 3}, {"a": 1}],
    ),
    "the last to run gives way to nobody but itself": (
        {"slots": 8},
        [("a", 3, 2), ("b", 4, 4), ("c", 1, 1), ("d", 1, 1)],
        [{"a": 3, "b": 4, "c": 1}, {"a": 1}, {"b": 5, "d": 1}, {"b": 1}, {"b": 1}],
    ),
    "as many give way as it takes and keep their order": (
        {"slots": 8, "long_prefill_token_threshold": 4},
        [("a", 7, 1), ("b", 1, 4), ("c", 1, 4), ("d", 1, 4)],
        [{"a": 4, "b": 1, "c": 1, "d": 1}, {"a": 3}, {"b": 2, "c": 2, "d": 2}],
    ),
    "those before the victim still run": (
        {"slots": 8, "long_prefill_token_threshold": 3},
        [("a", 7, 1), ("b", 1, 4), ("c", 1, 4), ("d", 1, 4)],
        [{"a": 3, "b": 1, "c": 1, "d": 1}, {"a": 3, "b": 1}],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_who_runs_how_many_tokens(name: str) -> None:
    """Those who run come first, in the order of admission; then those who wait, in theirs."""
    options, requests, want = PLANS[name]
    toy = Toy(**options)
    for request in requests:
        toy.add(*request)
    assert [shares(step) for step in toy.finish()[: len(want)]] == [shares(step) for step in want]
    for name, _, max_tokens in requests:
        assert toy.requests[name].output_token_ids == [0] * max_tokens
    check_empty(toy.memory)


def test_a_policy_may_choose_another_than_the_first() -> None:
    class Shortest(Scheduler):
        def next_waiting(self) -> Request:
            return min(self.waiting, key=lambda request: request.num_new_tokens)

    toy = Toy(Shortest, max_num_seqs=1)
    for name, length in zip("abc", (5, 2, 3), strict=True):
        toy.add(name, length, max_tokens=1)
    assert toy.finish() == [{"b": 2}, {"c": 3}, {"a": 5}]


# -- who gives way, and who goes ------------------------------------------------------------------


def test_who_gives_way_waits_at_the_front_and_runs_prompt_and_outputs_again() -> None:
    toy = Toy(slots=8, long_prefill_token_threshold=5)
    toy.add("a", 3), toy.add("b", 3)
    toy.step(), toy.step()
    toy.add("c", 1, max_tokens=1)  # it would fit when b has gone, but nobody comes in at once
    toy.step()
    assert (toy.running, toy.waiting) == (["a"], ["b", "c"])
    assert toy.requests["b"].status is RequestStatus.PREEMPTED and "b" not in toy.memory.seq_ids
    assert toy.finish()[2:] == [{"a": 1}, {"a": 1}, {"b": 5, "c": 1}, {"b": 1}]


def test_no_token_of_a_step_under_way_reaches_an_aborted_request() -> None:
    toy = Toy()
    toy.add("a", 3), toy.add("b", 3)
    toy.step()
    scheduled = toy.scheduler.schedule()
    toy.engine.abort_request("a")
    toy.engine._update(scheduled, toy.run(scheduled))
    assert [len(toy.requests[name].output_token_ids) for name in "ab"] == [1, 2]
    assert toy.running == ["b"] == [*toy.memory.seq_ids]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda toy: toy.scheduler.waiting.append(toy.scheduler.running[0]),
        lambda toy: toy.scheduler.waiting.append(toy.scheduler.running.pop()),
        lambda toy: setattr(toy.requests["a"], "num_computed_tokens", 4),
        lambda toy: toy.memory.blocks.free_queue.popitem(),
    ],
)
def test_what_does_not_add_up_is_noticed(spoil: Callable[[Toy], object]) -> None:
    toy = Toy()
    toy.add("a", 3), toy.add("b", 3)
    toy.step()
    spoil(toy)
    with pytest.raises(AssertionError):
        toy.scheduler.check_integrity()


# -- every policy, whatever comes -----------------------------------------------------------------

RAGGED = {
    Scheduler: "a4b4 a1b1 b1c4 b1c1 b1c1 d4",  # every place is filled at once
    StaticBatching: "a4b4 a1b1 b1 b1 b1 c4d4 c1 c1",  # the slowest is waited for
    OneByOne: "a4 a1 b4 b1 b1 b1 b1 c4 c1 c1 d4",
    PrefillFirst: "a4b4 a1b1 c4 b1c1 b1c1 d4 b1",  # those who decode wait
}


@pytest.mark.parametrize("policy", RAGGED)
def test_four_ragged_requests_by_hand(policy: type[Scheduler]) -> None:
    """Prompts of 4 that want 2, 5, 3 and 1 tokens, two at a time."""
    toy = Toy(policy, max_num_seqs=2)
    for name, max_tokens in zip("abcd", (2, 5, 3, 1), strict=True):
        toy.add(name, 4, max_tokens)
    steps = ["".join(f"{name}{n}" for name, n in shares(step)) for step in toy.finish()]
    assert " ".join(steps) == RAGGED[policy]


def test_a_static_batch_that_is_over_does_not_come_back_with_an_id_that_is_used_again() -> None:
    toy = Toy(StaticBatching, max_num_seqs=1)
    for names in ("a", "ba"):
        for name in names:
            toy.add(name, 4, 1)
        steps = toy.finish()
    assert steps == [{"a": 4}, {"b": 4}, {"a": 4}]
