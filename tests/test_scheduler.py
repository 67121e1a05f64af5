"""Who runs in the next step, by hand: the one rule, when memory is short, and the older policies.

That each request says what it says alone, whatever comes, is in test_as_if_alone.py.

No model runs here: Toy has a memory of few slots, and a next token that depends on all it reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tutorial_engine.cache.memory import SequenceMemory
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import Request, RequestStatus, ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken
from tutorial_engine.sampling.stopping import Finish, StopChecker
from tutorial_engine.trace.events import Planned, Recorder, Setting, StepBegan, StepEnded

VOCAB = 50


def next_token(context: Sequence[int]) -> int:
    """What the toy model says after these tokens: it depends on each and on its place."""
    return (7 * sum((i + 1) * token for i, token in enumerate(context)) + 3) % VOCAB


def prompt_of(name: str, length: int) -> list[int]:
    return [(3 * i + ord(name[-1])) % VOCAB for i in range(length)]


def alone(name: str, prompt_len: int, num_tokens: int) -> list[int]:
    """The outputs of a request that has everything for itself."""
    tokens = prompt_of(name, prompt_len)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[prompt_len:]


class TokenPool:
    """A KVMemory of single slots, so few that running requests run out of them.

    With `whole` a request is let in only when all its tokens fit. `hits`: so many tokens of a new
    request are found in the cache, by its id.
    """

    trace: Recorder | None = None
    settings: Mapping[str, Setting] = {}
    user: object = None

    def __init__(
        self, num_slots: int, whole: bool = False, hits: Mapping[str, int] | None = None
    ) -> None:
        self.max_len, self.whole, self.hits = num_slots, whole, hits or {}
        self.free_slots = list(reversed(range(num_slots)))
        self.slots: dict[str, list[int]] = {}  # seq_id -> slots by position
        self.contents: dict[int, int] = {}  # slot -> the token that a forward put there

    @property
    def storage(self) -> KVStorage:
        raise AssertionError("a scheduler does not look at the storage")

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        return tuple(self.slots)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        is_new = seq_id not in self.slots
        slots = self.slots.get(seq_id, [])
        first = self.hits.get(seq_id, 0) if is_new else num_computed
        end = min(first + num_new, len(token_ids))
        missing = max(0, end - len(slots))
        if max(missing, len(token_ids) if self.whole and is_new else 0) > len(self.free_slots):
            return None
        slots = slots + [self.free_slots.pop() for _ in range(missing)]
        if is_new:
            self.contents.update(zip(slots[:first], token_ids, strict=False))
        self.slots[seq_id] = slots
        return Allocation(first, slots[first:end], torch.tensor(slots[:end]))

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        assert num_computed <= len(self.slots[seq_id])

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        return 0

    def free(self, seq_id: str) -> None:
        self.free_slots += reversed(self.slots.pop(seq_id, []))

    def describe(self, seq_id: str) -> SequenceMemory:
        return SequenceMemory((), tuple(self.slots.get(seq_id, ())))

    def check_integrity(self) -> None:
        taken = [slot for slots in self.slots.values() for slot in slots]
        assert sorted([*taken, *self.free_slots]) == list(range(self.max_len)), "slots leaked"


class Toy:
    """A scheduler, its memory, a clock, and what an engine does around them; no model.

    `steps` has what each step ran: request id -> number of tokens.
    """

    def __init__(
        self,
        policy: type[Scheduler] = Scheduler,
        slots: int = 1000,
        whole: bool = False,
        hits: Mapping[str, int] | None = None,
        recorder: Recorder | None = None,
        **limits: Any,
    ) -> None:
        self.clock, self.memory, self.recorder = VirtualClock(), TokenPool(slots, whole, hits), None
        if recorder is not None:
            recorder.bind(self.clock.now, {})
            self.recorder = recorder
        config = EngineConfig(**limits)
        self.scheduler = policy(config, self.memory, self.clock.now, recorder)
        self.requests: dict[str, Request] = {}
        self.steps: list[dict[str, int]] = []

    def add(self, name: str, prompt_len: int, max_tokens: int = 4) -> Request:
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        checker = StopChecker(asked, max_new_tokens=max(1, self.scheduler.max_len - prompt_len))
        prompt, now = prompt_of(name, prompt_len), self.clock.now()
        self.requests[name] = Request(name, prompt, asked, checker=checker, arrival=now)
        self.scheduler.add(self.requests[name])
        return self.requests[name]

    def schedule(self) -> list[ScheduledRequest]:
        if self.recorder is not None:
            self.recorder.record(StepBegan)
        scheduled = self.scheduler.schedule()
        if self.recorder is not None:
            self.recorder.record(Planned)
        return scheduled

    def forward(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, SampledToken]:
        """Write the tokens where they go, read all of each request, let its sampler choose."""
        self.clock.forward_done(sum(one.num_tokens for one in scheduled))
        sampled = {}
        for one in scheduled:
            request, room = one.request, one.allocation
            assert len(one.token_ids) == one.num_tokens == len(room.new_slots)
            self.memory.contents.update(zip(room.new_slots, one.token_ids, strict=True))
            assert isinstance(room.context_slots, torch.Tensor)
            context = [self.memory.contents[slot] for slot in room.context_slots.tolist()]
            end = room.first_position + one.num_tokens
            assert context == request.token_ids[:end], f"{request.request_id} reads wrong tokens"
            if one.yields_token:
                logits = torch.zeros(VOCAB)
                logits[next_token(context)] = 3.0
                sampled[request.request_id] = request.sampler.sample(logits)
        return sampled

    def update(
        self, scheduled: Sequence[ScheduledRequest], sampled: Mapping[str, SampledToken]
    ) -> None:
        self.scheduler.commit(scheduled)
        self.scheduler.update(scheduled, sampled)
        if self.recorder is not None:
            self.recorder.record(StepEnded, sum(item.num_tokens for item in scheduled))
            self.recorder.step += 1
        self.scheduler.check_integrity()

    def step(self) -> list[ScheduledRequest]:
        scheduled = self.schedule()
        assert scheduled, "a step without tokens"
        self.steps.append({item.request.request_id: item.num_tokens for item in scheduled})
        self.update(scheduled, self.forward(scheduled))
        return scheduled

    def run(self, max_steps: int = 500) -> list[dict[str, int]]:
        while self.scheduler.has_unfinished:
            assert len(self.steps) < max_steps, "this never ends"
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
    "with chunks a prompt over the budget is welcome": (
        {"max_num_batched_tokens": 8},
        [("a", 9, 1)],
        [{"a": 8}, {"a": 1}],
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
    assert [shares(step) for step in toy.run()[: len(want)]] == [shares(step) for step in want]
    for request in requests:
        assert toy.requests[request[0]].output_token_ids == alone(*request)
    assert len(toy.memory.free_slots) == toy.memory.max_len


def test_a_policy_may_choose_another_than_the_first() -> None:
    class Shortest(Scheduler):
        def next_waiting(self) -> Request:
            return min(self.waiting, key=lambda request: request.num_new_tokens)

    toy = Toy(Shortest, max_num_seqs=1)
    for name, length in zip("abc", (5, 2, 3), strict=True):
        toy.add(name, length, max_tokens=1)
    assert toy.run() == [{"b": 2}, {"c": 3}, {"a": 5}]


# -- what can never run, and the narrowest limits -------------------------------------------------


@pytest.mark.parametrize(("limits", "most"), [({"slots": 12}, 12), ({"max_model_len": 9}, 9)])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(
    limits: dict[str, int], most: int
) -> None:
    toy = Toy(**limits)
    with pytest.raises(ValueError, match=rf"request a has {most} tokens.* limited to {most}:"):
        toy.add("a", most)
    with pytest.raises(ValueError, match=rf"request b has {most + 30} tokens.* limited to {most}:"):
        toy.add("b", most + 30)
    assert toy.waiting == [] and not toy.scheduler.has_unfinished
    c = toy.add("c", most - 1, max_tokens=5)
    toy.run()
    assert c.finish == Finish("length") and c.num_tokens == most


# -- out of memory --------------------------------------------------------------------------------


def test_the_last_to_run_gives_way_and_runs_prompt_and_outputs_again() -> None:
    toy = Toy(slots=8, long_prefill_token_threshold=5)
    for name, length, max_tokens in (("a", 3, 4), ("b", 3, 4), ("c", 1, 1)):
        if name == "c":  # a and b have run twice and all 8 slots are taken
            toy.step(), toy.step()
        toy.add(name, length, max_tokens)
    b = toy.requests["b"]
    sampler, outputs, before = b.sampler, b.output_token_ids, b.metrics
    toy.step()
    assert (toy.running, toy.waiting) == (["a"], ["b", "c"]), "it waits at the front"
    assert b.status is RequestStatus.PREEMPTED and "b" not in toy.memory.slots
    assert b.sampler is sampler and (sampler.num_sampled, b.checker.num_tokens) == (2, 2)
    assert b.output_token_ids == outputs == alone("b", 3, 2)
    assert (b.num_computed_tokens, b.num_new_tokens) == (0, 5)
    assert toy.memory.allocate("c", [0], 0, 1) is not None, "c fitted, but nobody comes in"
    toy.memory.free("c")
    toy.run()
    assert toy.steps[2:] == [{"a": 1}, {"a": 1}, {"b": 5, "c": 1}, {"b": 1}]
    assert [toy.requests[name].output_token_ids for name in "ab"] == [
        alone(name, 3, 4) for name in "ab"
    ]
    after = b.metrics  # the first time counts
    assert before.ttft == after.ttft == toy.clock.per_forward + 6 * toy.clock.per_token
    assert after.queue_time == before.queue_time == 0.0
    assert after.token_times[:2] == before.token_times and len(after.token_times) == 4
    assert after.itl[1] == max(after.itl), "the wait is seen between its tokens"
    assert len(toy.memory.free_slots) == 8


def preemptions(whole: bool) -> int:
    recorder = Recorder()
    toy = Toy(slots=16, whole=whole, recorder=recorder, max_num_batched_tokens=5)
    toy.add("a", 3, max_tokens=11)
    b = toy.add("b", 14, max_tokens=2)
    toy.run()
    assert b.output_token_ids == alone("b", 14, 2)
    return sum(type(event).__name__ == "Preempted" for event in recorder.events)


def test_letting_in_only_what_fits_whole_ends_the_thrash() -> None:
    assert preemptions(whole=False) >= 2
    assert preemptions(whole=True) == 0


def test_no_token_of_a_step_under_way_reaches_an_aborted_request() -> None:
    toy = Toy()
    a, b = toy.add("a", 3), toy.add("b", 3)
    toy.step()
    scheduled = toy.schedule()
    sampled = toy.forward(scheduled)
    toy.scheduler.abort(a)
    toy.update(scheduled, sampled)
    assert (a.output_token_ids, b.output_token_ids) == (alone("a", 3, 1), alone("b", 3, 2))
    assert a.status is RequestStatus.ABORTED and toy.running == ["b"] == [*toy.memory.slots]


# what spoils a and b, who run, and c, who waits: (how, what the check says)
SPOILED: dict[str, tuple[Callable[[Toy], object], str]] = {
    "queued twice": (
        lambda toy: toy.scheduler.waiting.append(toy.scheduler.running[0]),
        "queued twice",
    ),
    "one place less": (
        lambda toy: setattr(toy.scheduler, "config", EngineConfig(max_num_seqs=1)),
        "more run than may",
    ),
    "in the wrong queue": (
        lambda toy: toy.scheduler.waiting.append(toy.scheduler.running.pop()),
        "request b is running",
    ),
    "over, in the queue": (
        lambda toy: setattr(toy.requests["c"], "is_over", True),
        "request c is waiting",
    ),
    "computed without room": (
        lambda toy: setattr(toy.requests["a"], "num_computed_tokens", 4),
        "a: 4 computed, room for 3",
    ),
    "nothing to run": (
        lambda toy: toy.requests["a"].token_ids.pop(),
        "a has nothing left to run",
    ),
    "a slot lost": (lambda toy: toy.memory.free_slots.pop(), "slots leaked"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_does_not_add_up_is_noticed(what: str) -> None:
    toy = Toy(max_num_seqs=2)
    for name in "abc":
        toy.add(name, 3)
    toy.step()
    spoil, says = SPOILED[what]
    spoil(toy)
    with pytest.raises(AssertionError, match=says):
        toy.scheduler.check_integrity()


# -- every policy, whatever comes -----------------------------------------------------------------

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


def test_a_static_batch_that_is_over_does_not_come_back_with_an_id_that_is_used_again() -> None:
    toy = Toy(StaticBatching, max_num_seqs=1)
    for names in ("a", "ba"):
        for name in names:
            toy.add(name, 4, 1)
        steps = toy.run()
    assert steps == [{"a": 4}, {"b": 4}, {"a": 4}]
