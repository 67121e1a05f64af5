"""Who runs in the next step: the one rule, chunk by chunk, when memory is short, and at the end.

The older policies beside it give the same tokens, in the order that each of them promises.

No model runs here: Toy has a memory of few slots, and a next token that depends on all it reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def alone(name: str, prompt_len: int, num_tokens: int) -> tuple[int, ...]:
    """The outputs of a request that has everything for itself."""
    tokens = prompt_of(name, prompt_len)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[prompt_len:])


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

    def make(self, name: str, prompt_len: int, max_tokens: int = 4, **params: Any) -> Request:
        asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        room = max(1, self.scheduler.max_len - prompt_len)
        checker = StopChecker(asked, max_new_tokens=room)
        prompt = prompt_of(name, prompt_len)
        return Request(name, prompt, asked, checker=checker, arrival=self.clock.now())

    def add(self, name: str, prompt_len: int, max_tokens: int = 4, **params: Any) -> Request:
        self.requests[name] = self.make(name, prompt_len, max_tokens, **params)
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


def test_a_chunk_that_stops_short_yields_no_token() -> None:
    toy = Toy(max_num_batched_tokens=4)
    a = toy.add("a", 10)
    for computed in (4, 8):
        toy.step()
        assert (a.num_computed_tokens, a.output_token_ids) == (computed, ())
        assert a.metrics.ttft is None
    toy.step()
    assert toy.steps == [{"a": 4}, {"a": 4}, {"a": 2}]
    assert a.output_token_ids == alone("a", 10, 1)
    assert (a.num_computed_tokens, a.num_tokens, a.num_new_tokens) == (10, 11, 1)


def test_a_policy_may_choose_another_than_the_first() -> None:
    class Shortest(Scheduler):
        def next_waiting(self) -> Request:
            return min(self.waiting, key=lambda request: request.num_new_tokens)

    toy = Toy(Shortest, max_num_seqs=1)
    for name, length in zip("abc", (5, 2, 3), strict=True):
        toy.add(name, length, max_tokens=1)
    assert toy.run() == [{"b": 2}, {"c": 3}, {"a": 5}]


# -- what can never run, and the narrowest limits -------------------------------------------------


@pytest.mark.parametrize(
    "name",
    "max_num_seqs max_num_batched_tokens max_model_len long_prefill_token_threshold".split(),
)
@pytest.mark.parametrize("value", [0, -3, "8", True])
def test_a_limit_below_one_is_refused_by_name_and_value(name: str, value: Any) -> None:
    assert getattr(EngineConfig(**{name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        EngineConfig(**{name: value})


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


def short_of_memory(**limits: Any) -> Toy:
    """a and b have run twice and all 8 slots are taken; c waits."""
    toy = Toy(slots=8, **limits)
    toy.add("a", 3, max_tokens=4)
    toy.add("b", 3, max_tokens=4)
    toy.step()
    toy.step()
    toy.add("c", 1, max_tokens=1)
    assert (toy.running, toy.waiting, toy.memory.free_slots) == (["a", "b"], ["c"], [])
    return toy


def test_the_last_to_run_gives_way_and_runs_prompt_and_outputs_again() -> None:
    toy = short_of_memory(long_prefill_token_threshold=5)
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


def test_random_draws_are_the_same_after_a_preemption() -> None:
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 4}
    texts = []
    for slots in (100, 8):
        toy = Toy(slots=slots)
        toy.add("a", 3, max_tokens=4)
        b = toy.add("b", 3, **asked)
        steps = toy.run()
        assert (steps[-1] == {"b": 1}) == (slots == 8), "only one of them was preempted"
        texts.append(b.output_token_ids)
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    assert texts[0] != alone("b", 3, 4), "the draws were not random"


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


def test_without_chunks_a_resumed_request_longer_than_a_step_is_cut() -> None:
    toy = Toy(slots=14, max_num_batched_tokens=6, enable_chunked_prefill=False)
    toy.add("a", 4, max_tokens=9)
    toy.add("b", 4, max_tokens=8)
    toy.run()
    b = toy.requests["b"]
    sizes = [step["b"] for step in toy.steps if "b" in step]
    assert sizes[:2] == [4, 1] and 6 in sizes, "more than a step came back, in pieces"
    assert b.output_token_ids == alone("b", 4, 8)
    assert max(sum(step.values()) for step in toy.steps) <= 6


# -- ends -----------------------------------------------------------------------------------------


def end_of(toy: Toy, name: str, status: RequestStatus) -> None:
    """It holds nothing, nothing more may happen to it, and the others end as if alone."""
    request, before = toy.requests[name], toy.requests[name].output_token_ids
    assert request.status is status and request.is_over and request.finished is not None
    assert name not in toy.memory.slots and name not in toy.waiting + toy.running
    with pytest.raises(AssertionError, match=f"request {name} is {status.value}: it cannot"):
        toy.scheduler.abort(request)
    toy.scheduler.check_integrity()
    toy.run()
    assert request.output_token_ids == before
    assert len(toy.memory.free_slots) == toy.memory.max_len
    for other, request in toy.requests.items():
        if other != name:
            assert request.status is RequestStatus.FINISHED
            want = alone(other, request.num_prompt_tokens, request.params.max_tokens)
            assert request.output_token_ids == want


def waiting() -> Toy:
    toy = Toy(max_num_seqs=1)
    for name, length in zip("abc", (3, 9, 2), strict=True):
        toy.add(name, length, max_tokens=6)
    toy.step()
    return toy


def in_its_prompt() -> Toy:
    toy = Toy(max_num_batched_tokens=5)
    for name, length in zip("abc", (3, 9, 2), strict=True):
        toy.add(name, length, max_tokens=6)
    toy.step()
    toy.step()
    assert toy.requests["b"].num_computed_tokens == 6
    return toy


def in_decode() -> Toy:
    toy = in_its_prompt()
    for _ in range(3):
        toy.step()
    assert len(toy.requests["b"].output_token_ids) == 3
    return toy


def preempted() -> Toy:
    toy = short_of_memory()
    toy.step()
    return toy


# how b gets there, and the statuses that it has on its way
STATES: dict[RequestStatus, tuple[Callable[[], Toy], ...]] = {
    RequestStatus.WAITING: (waiting,),
    RequestStatus.RUNNING: (in_its_prompt, in_decode),
    RequestStatus.PREEMPTED: (preempted,),
}
EVERY_STATE = [(status, make) for status, makers in STATES.items() for make in makers]


@pytest.mark.parametrize(("status", "make"), EVERY_STATE)
def test_abort_and_failure_end_it_in_any_state(
    status: RequestStatus, make: Callable[[], Toy]
) -> None:
    toy = make()
    assert toy.requests["b"].status is status
    toy.scheduler.abort(toy.requests["b"])
    assert toy.requests["b"].finish == Finish("abort")
    end_of(toy, "b", RequestStatus.ABORTED)
    toy = make()
    toy.scheduler.fail(toy.requests["b"], ArithmeticError("too warm"))
    b = toy.requests["b"]
    assert b.finish == Finish("error") and b.error == "ArithmeticError: too warm"
    assert b.group.output().error == b.error
    end_of(toy, "b", RequestStatus.ERROR)


@pytest.mark.parametrize(("status", "make"), EVERY_STATE)
def test_no_other_way_leads_from_a_status(status: RequestStatus, make: Callable[[], Toy]) -> None:
    """Only who runs may give way, and only who is over is over."""
    toy = make()
    b = toy.requests["b"]
    if status is not RequestStatus.RUNNING:
        with pytest.raises(AssertionError, match="it cannot become preempted"):
            toy.scheduler.preempt(b)
        toy.run()
    else:
        toy.scheduler.preempt(b)
        assert (b.status, toy.waiting[0]) == (RequestStatus.PREEMPTED, "b")
        toy.run()
    end_of(toy, "b", RequestStatus.FINISHED)
    with pytest.raises(AssertionError, match="it cannot become preempted"):
        toy.scheduler.preempt(b)


def test_no_token_of_a_step_under_way_reaches_an_aborted_request() -> None:
    toy = Toy()
    a, b = toy.add("a", 3), toy.add("b", 3)
    toy.step()
    scheduled = toy.schedule()
    sampled = toy.forward(scheduled)
    toy.scheduler.abort(a)
    toy.update(scheduled, sampled)
    assert (a.output_token_ids, b.output_token_ids) == (alone("a", 3, 1), alone("b", 3, 2))
    end_of(toy, "a", RequestStatus.ABORTED)


def test_a_stop_check_that_raises_ends_its_request_only() -> None:
    toy = Toy()
    a, c = toy.add("a", 3), toy.add("c", 3)
    toy.step()

    def broken(token_id: int) -> Finish | None:
        raise KeyError("no")

    c.checker.update = broken  # type: ignore[method-assign]
    toy.step()
    assert c.error == "KeyError: 'no'" and c.output_token_ids == alone("c", 3, 1)
    assert len(a.output_token_ids) == 2 and len(c.token_times) == 1
    end_of(toy, "c", RequestStatus.ERROR)


# -- what must add up -----------------------------------------------------------------------------


def settled() -> Toy:
    toy = Toy(max_num_seqs=2)
    for name in "abc":
        toy.add(name, 3)
    toy.step()
    toy.scheduler.check_integrity()
    return toy


def queue_twice(toy: Toy) -> None:
    toy.scheduler.waiting.append(toy.scheduler.running[0])


def one_place_less(toy: Toy) -> None:
    toy.scheduler.config = EngineConfig(max_num_seqs=1)


def wait_without_being_told(toy: Toy) -> None:
    toy.scheduler.waiting.append(toy.scheduler.running.pop())


def run_without_being_told(toy: Toy) -> None:
    toy.scheduler.running[1] = toy.scheduler.waiting.popleft()


def end_in_the_queue(toy: Toy) -> None:
    toy.requests["c"].status = RequestStatus.ABORTED


def compute_what_has_no_room(toy: Toy) -> None:
    toy.requests["a"].num_computed_tokens += 1


def lose_the_newest_token(toy: Toy) -> None:
    toy.requests["a"].token_ids.pop()


def lose_a_slot(toy: Toy) -> None:
    toy.memory.free_slots.pop()


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (queue_twice, "queued twice"),
        (one_place_less, "more run than may"),
        (wait_without_being_told, "request b is running"),
        (run_without_being_told, "request c is waiting"),
        (end_in_the_queue, "request c is aborted"),
        (compute_what_has_no_room, "a: 4 computed, room for 3"),
        (lose_the_newest_token, "a has nothing left to run"),
        (lose_a_slot, "slots leaked"),
    ],
)
def test_what_does_not_add_up_is_noticed(corrupt: Callable[[Toy], None], says: str) -> None:
    toy = settled()
    corrupt(toy)
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
        assert len(steps) < 1000, "this never ends"
        steps.append(toy.step())
    for i, (prompt_len, max_tokens, _) in enumerate(requests):
        name = chr(ord("a") + i)
        assert toy.requests[name].output_token_ids == alone(name, prompt_len, max_tokens)
    assert len(toy.memory.free_slots) == toy.memory.max_len
    return steps


def ids(step: list[ScheduledRequest]) -> set[str]:
    return {one.request.request_id for one in step}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=80, deadline=None)
@given(
    requests=REQUESTS,
    slots=st.integers(16, 40),
    whole=st.booleans(),
    limits=st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(1, 24),
            "long_prefill_token_threshold": st.none() | st.integers(1, 5),
            "enable_chunked_prefill": st.booleans(),
        }
    ),
)
def test_any_workload_ends_within_its_limits_and_each_is_as_if_alone(
    policy: type[Scheduler],
    requests: list[tuple[int, int, int]],
    slots: int,
    whole: bool,
    limits: dict[str, Any],
) -> None:
    if policy is PrefillFirst or not limits["enable_chunked_prefill"]:
        limits = {**limits, "max_num_batched_tokens": limits["max_num_batched_tokens"] + 9}
    steps = serve(Toy(policy, slots=slots, whole=whole, **limits), requests)
    for step in steps:
        assert len(ids(step)) == len(step) <= limits["max_num_seqs"]
        assert sum(item.num_tokens for item in step) <= limits["max_num_batched_tokens"]


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
