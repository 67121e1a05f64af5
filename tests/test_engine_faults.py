"""What goes wrong for one goes wrong for one: the others finish as if alone, and nothing leaks.

Real signals (signal.raise_signal) stand for Ctrl-C. After every fault the engine is looked through
and used again.
"""

import gc
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from tutorial_engine.engine.delivery import Inbox
from workloads import (
    EOS,
    LIMITS,
    POOL_SIZE,
    Party,
    alone,
    pool,
    same_as_alone,
    same_tokens,
    several,
    small_model,
    the_tokenizer,
)

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import Request, RequestOutput, StepOutput
from tutorial_engine.engine.runner import ModelOutput, ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.history import EngineState, replay

pytestmark = pytest.mark.filterwarnings("ignore:a forward of")  # it is run again, each alone
LIMIT = max(LIMITS)
MANY = 300  # steps: more than any of these needs


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own handler for Ctrl-C, whatever the test runner has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- tools ----------------------------------------------------------------------------------------


def guests(many: int = 4, **wanted: Any) -> list[int]:
    """Requests of the pool that get at least six tokens; `greedy=True` asks for plain ones."""
    found = [i for i in range(POOL_SIZE) if len(alone(i, LIMIT).token_ids) >= 6]
    if wanted.get("greedy"):
        params = [pool()[i].params for i in range(POOL_SIZE)]
        plain = [i for i in found if params[i].temperature == 0 and params[i].logprobs is None]
        found = [i for i in plain if params[i].min_tokens == 0]
    else:
        found = found[::2]
    assert len(found) >= many, found
    return found[:many]


def party_for(indices: Sequence[int], **options: Any) -> Party:
    return Party(several(indices, **{"max_num_seqs": 3, "budget": 12, **options}))


class Book:
    """Collects what steps return."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.results: list[StepOutput] = []

    def step(self) -> None:
        try:
            self.results += self.engine.step()
        finally:
            self.engine.check_integrity()

    def finish(self) -> dict[str, RequestOutput]:
        for _ in range(MANY):
            if not self.engine.has_unfinished_requests:
                return self.outputs
            self.step()
        raise AssertionError("it never ends")

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        ended = [result for result in self.results if result.output is not None]
        outputs = {r.request_id: r.output for r in ended if r.output is not None}
        assert len(outputs) == len(ended), "an end was delivered twice"
        return outputs

    def tokens(self, name: str) -> tuple[SampledToken, ...]:
        return tuple(r.token for r in self.results if r.request_id == name and r.token is not None)


def as_alone(name: str, output: RequestOutput, index: int) -> None:
    (got,) = output.outputs
    same_as_alone(name, got, index)


def still_good(party: Party) -> None:
    """Nothing is left over, the trace agrees, and the engine serves the next ones."""
    engine, memory = party.engine, party.memory
    engine.check_integrity()
    assert not engine.requests and not engine.has_unfinished_requests
    assert not (engine._inbox._results or engine._to_sweep or engine._in_step)
    memory.check_empty()
    assert replay(party.recorder.events).unfinished() == EngineState((), (), {})
    indices = guests(2)
    outputs = engine.generate(
        [pool()[i].prompt for i in indices], [pool()[i].params for i in indices]
    )
    for index, output in zip(indices, outputs, strict=True):
        as_alone(output.request_id, output, index)
    engine.check_integrity()
    assert not engine.requests
    memory.check_empty()


class Case:
    """Some guests in an engine, g0, g1 ...: with callbacks or samplers of their own."""

    def __init__(
        self,
        many: int = 3,
        callbacks: dict[int, Callable[[StepOutput], None]] | None = None,
        samplers: dict[int, Sampler] | None = None,
        greedy: bool = False,
        **options: Any,
    ) -> None:
        self.indices = guests(many, greedy=greedy)
        self.party = party_for(self.indices, **options)
        self.engine, self.book = self.party.engine, Book(self.party.engine)
        for k in range(many):
            self.add(k, on_token=(callbacks or {}).get(k), sampler=(samplers or {}).get(k))

    def add(self, k: int, **options: Any) -> None:
        asked = pool()[self.indices[k]]
        self.engine.add_request(asked.prompt, asked.params, f"g{k}", **options)

    def finish(self, but: Iterable[int] = ()) -> dict[str, RequestOutput]:
        """To the end: all but these came out as if alone, each token once, and all is well."""
        outputs = self.book.finish()
        for k, index in enumerate(self.indices):
            name = f"g{k}"
            assert self.book.tokens(name) == outputs[name].outputs[0].tokens, "each token once"
            if k not in set(but):
                assert outputs[name].error is None
                as_alone(name, outputs[name], index)
        still_good(self.party)
        return outputs

    def only(self, k: int, error: str, num_tokens: int | None = None) -> None:
        """It alone ended with this error, and what it had got by then is right and there."""
        output, want = self.finish(but=[k])[f"g{k}"], alone(self.indices[k], LIMIT)
        (got,) = output.outputs
        assert got.finish_reason == "error" and (output.error or "").startswith(error)
        assert num_tokens is None or len(got.tokens) == num_tokens
        same_tokens(output.request_id, got.tokens, want.tokens[: len(got.tokens)])


@contextmanager
def before_forward(do: Callable[[Batch], None]) -> Iterator[None]:
    """Inside, every forward of the model begins with this."""
    handle = small_model().register_forward_pre_hook(lambda _, args: do(args[0]))
    try:
        yield
    finally:
        handle.remove()


def fails_at(numbers: Iterable[int]) -> Callable[[Batch], None]:
    """RuntimeError in forwards of these numbers, counted from 0."""
    calls, bad = iter(range(10**6)), set(numbers)

    def do(batch: Batch) -> None:
        if next(calls) in bad:
            raise RuntimeError("the device is gone")

    return do


def own_token(indices: Sequence[int], k: int) -> int:
    """A token that only request k ever gets, and not as its last one."""
    others: set[int] = set()
    for j, index in enumerate(indices):
        if j != k:
            others |= {*pool()[index].prompt, *alone(index, LIMIT).token_ids}
    others |= {*pool()[indices[k]].prompt}
    own = [token for token in alone(indices[k], LIMIT).token_ids[:-1] if token not in others]
    assert own, "choose other guests"
    return own[-1]


# -- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(8))
def test_a_model_call_that_raises_once_costs_nobody_a_token(number: int) -> None:
    """Each runs again, alone."""
    case, seen, fails = Case(4), list[int](), fails_at([number])

    def do(batch: Batch) -> None:
        seen.append(batch.num_seqs)
        fails(batch)

    with before_forward(do):
        case.book.finish()
    assert case.engine.runner.num_forwards == case.engine.num_steps + seen[number]
    case.finish()


def test_a_model_call_that_always_raises_ends_all_and_the_engine_lives() -> None:
    case = Case(4)
    case.book.step()
    case.book.step()
    with before_forward(fails_at(range(1000))):
        case.book.finish()
    outputs = case.finish(but=range(4))
    for k, index in enumerate(case.indices):
        output, (got,) = outputs[f"g{k}"], outputs[f"g{k}"].outputs
        assert output.error == "RuntimeError: the device is gone"
        same_tokens(output.request_id, got.tokens, alone(index, LIMIT).tokens[: len(got.tokens)])
    assert any(case.book.tokens(f"g{k}") for k in range(4)), "two steps went well"


@pytest.mark.parametrize("of_prompt", [True, False])
@pytest.mark.parametrize("k", range(4))
def test_a_model_that_dislikes_one_request_fails_only_that_one(k: int, of_prompt: bool) -> None:
    case, name = Case(4, max_num_seqs=4), f"g{k}"
    prompt_len = len(pool()[case.indices[k]].prompt)

    def dislikes(batch: Batch) -> None:
        if name in batch.seq_ids:
            s = batch.seq_ids.index(name)
            last = int(batch.positions[batch.last_token_indices[s]])
            if of_prompt or last >= prompt_len:
                raise RuntimeError("no kernel for that")

    with before_forward(dislikes):
        case.book.finish()
    case.only(k, "RuntimeError: no kernel for that", not of_prompt)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("token", [0, 1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_request_alone(
    token: int, bad: float, greedy: bool
) -> None:
    run = ModelRunner.run

    def spoiled(self: ModelRunner, scheduled: Any) -> ModelOutput:
        output = run(self, scheduled)
        for row, one in enumerate(output.ready):
            if one.request.request_id == "g1" and len(one.request.tokens) == token:
                with torch.inference_mode():
                    output.logits[row, 3] = bad
        return output

    case = Case(greedy=greedy)
    with patch.object(ModelRunner, "run", spoiled):
        case.book.finish()
    case.only(1, f"ValueError: these logits are not numbers, the largest is {bad}", token)


# -- samplers, tokenizers -------------------------------------------------------------------------


class Raising(Sampler):
    """Raises in place of its token number `at`."""

    def __init__(self, params: SamplingParams, at: int, fault: Callable[[], None]) -> None:
        super().__init__(params, EOS)
        self.at, self.fault = at, fault

    def sample(self, logits: Tensor) -> SampledToken:
        if self.num_sampled == self.at:
            self.at = -1
            self.fault()
        return super().sample(logits)


def out_of_luck() -> None:
    raise ZeroDivisionError("out of luck")


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_sampler_that_raises_ends_its_request_alone(k: int, at: int) -> None:
    sampler = Raising(pool()[guests(3)[k]].params, at, out_of_luck)
    Case(samplers={k: sampler}).only(k, "ZeroDivisionError: out of luck", at)


class Illiterate:
    """A tokenizer that cannot read one token."""

    def __init__(self, token: int) -> None:
        self.token, self.inner = token, the_tokenizer()

    def decode(self, ids: Sequence[int]) -> str:
        if self.token in ids:
            raise UnicodeError(f"what is {self.token}?")
        return self.inner.decode(list(ids))

    def encode(self, text: str) -> Any:
        raise UnicodeError(f"what is {text}?")


def test_a_detokenizer_that_raises_ends_its_request_alone() -> None:
    indices = guests(3)
    token = own_token(indices, 1)
    illiterate: Any = Illiterate(token)
    with patch("workloads.the_tokenizer", lambda: illiterate):
        case = Case()
    case.book.finish()
    with pytest.raises(UnicodeError, match="what is hello"):
        case.engine.add_request("hello")
    with pytest.raises(UnicodeError, match="what is hello"):
        case.engine.generate([[1, 2], "hello"])
    illiterate.token = -1
    number = alone(indices[1], LIMIT).token_ids.index(token)
    case.only(1, f"UnicodeError: what is {token}?", number)


# -- callbacks ------------------------------------------------------------------------------------


def at_call(number: int, do: Callable[[], object]) -> Callable[[StepOutput], None]:
    """A callback that does this in its call `number`, counted from 0."""
    calls = iter(range(10**6))

    def callback(result: StepOutput) -> None:
        if next(calls) == number:
            do()

    return callback


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("call", [0, 3])
def test_a_callback_that_raises_ends_its_request_alone(k: int, call: int) -> None:
    case = Case(callbacks={k: at_call(call, out_of_luck)})
    case.only(k, "ZeroDivisionError: out of luck", call + 1)


def test_a_callback_that_raises_at_the_last_token_changes_no_token() -> None:
    last = len(alone(guests(3)[1], LIMIT).token_ids) - 1
    case = Case(callbacks={1: at_call(last, out_of_luck)})
    output = case.finish(but=[1])["g1"]
    as_alone("g1", output, case.indices[1])
    assert output.error == "ZeroDivisionError: out of luck"


def exit_now() -> None:
    raise SystemExit


@pytest.mark.parametrize("stop", [ctrl_c, exit_now])
@pytest.mark.parametrize("call", [0, 2, 5])
@pytest.mark.parametrize("k", range(3))
def test_an_interrupt_in_a_callback_ends_nobody(
    k: int, call: int, stop: Callable[[], None]
) -> None:
    case = Case(callbacks={k: at_call(call, stop)})
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        case.book.finish()
    assert not case.engine._in_step
    case.finish()


def test_interrupts_in_several_callbacks_of_a_step_end_nobody() -> None:
    case = Case(callbacks={k: at_call(1, exit_now) for k in range(3)})
    seen = 0
    while case.engine.has_unfinished_requests:
        try:
            case.book.step()
        except SystemExit:
            seen += 1
    assert 1 <= seen <= 3
    case.finish()


@pytest.mark.parametrize(("killer", "victim"), [(1, 1), (0, 2), (2, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("call", [0, 2])
def test_a_callback_may_abort_itself_or_a_neighbour_who_gets_nothing_more(
    killer: int, victim: int, call: int
) -> None:
    """It keeps its token of this very step, whichever comes first in the batch."""
    heard: list[StepOutput] = []
    kill = at_call(call, lambda: case.engine.abort(f"g{victim}"))
    case = Case(callbacks={victim: heard.append, killer: kill}, budget=500)  # all run at once
    output = case.finish(but=[victim])[f"g{victim}"]
    (got,) = output.outputs
    assert got.finish_reason == "abort" and output.error is None and len(got.tokens) == call + 1
    if killer != victim:
        assert heard == [
            result for result in case.book.results if result.request_id == f"g{victim}"
        ]


def test_a_callback_may_add_a_request() -> None:
    asked = pool()[guests(4)[3]]
    late = at_call(1, lambda: case.engine.add_request(asked.prompt, asked.params, "g3"))
    case = Case(3, callbacks={0: late})
    case.indices = guests(4)
    case.finish()


def test_an_id_is_free_again_in_the_callback_that_brings_the_end() -> None:
    (index,) = guests(1)
    last = len(alone(index, LIMIT).token_ids) - 1
    case = Case(1, callbacks={0: at_call(last, lambda: case.add(0))})
    first, second = case.engine.run()
    for output in (first, second):
        as_alone("g0", output, index)
    still_good(case.party)


@pytest.mark.parametrize("how", ["step", "run", "generate", "stream"])
def test_a_callback_cannot_run_another_step(how: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: case.engine.step(),
        "run": lambda: case.engine.run(),
        "generate": lambda: case.engine.generate([[1, 2]]),
        "stream": lambda: list(case.engine.stream([[1, 2]])),
    }
    case = Case(callbacks={1: at_call(1, calls[how])})
    case.only(1, "RuntimeError: a step is under way", 2)


# -- Ctrl-C ---------------------------------------------------------------------------------------


@contextmanager
def ctrl_c_in(place: str, number: int) -> Iterator[None]:
    """A real SIGINT in call `number` of this place, in the middle of it."""
    calls = iter(range(10**6))

    def maybe() -> None:
        if next(calls) == number:
            ctrl_c()

    if place == "forward":
        with before_forward(lambda _: maybe()):
            yield
        return
    owner, name = {
        "schedule": (Scheduler, "num_tokens_to_run"),
        "sample": (Sampler, "_choose"),
        "update": (Request, "append"),
        "allocate": (type(Party(several([0])).memory), "allocate"),
        "deliver": (Inbox, "deliver"),
        "add": (Scheduler, "add"),
    }[place]
    real = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        maybe()
        return real(*args, **options)

    with patch.object(owner, name, wrapped):
        yield


PLACES = ["forward", "schedule", "sample", "update", "allocate", "deliver"]


def asked_by(indices: Sequence[int]) -> tuple[list[Any], list[Any]]:
    return [pool()[i].prompt for i in indices], [pool()[i].params for i in indices]


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_generate_takes_away_only_what_it_brought(place: str, number: int) -> None:
    case, handler = Case(2), signal.getsignal(signal.SIGINT)
    with ctrl_c_in(place, number), pytest.raises(KeyboardInterrupt):
        case.engine.generate(*asked_by(guests(4)[2:]))
    assert signal.getsignal(signal.SIGINT) is handler
    case.engine.check_integrity()
    assert case.engine.requests.keys() == {"g0", "g1"}
    assert case.finish().keys() == {"g0", "g1"}


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_generate_brings_its_requests_in(number: int) -> None:
    party = party_for(guests(3))
    with ctrl_c_in("add", number), pytest.raises(KeyboardInterrupt):
        party.engine.generate(*asked_by(guests(3)))
    still_good(party)


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_a_step_loses_nothing(place: str, number: int) -> None:
    """The interrupt comes out of step(); whoever goes on stepping gets every token once."""
    case = Case(4, capacity=LIMIT)
    with ctrl_c_in(place, number), pytest.raises(KeyboardInterrupt):
        case.book.finish()
    case.finish()


def test_a_second_ctrl_c_while_cleaning_up_leaks_nothing() -> None:
    party = party_for(guests(3))
    with (
        ctrl_c_in("forward", 2),
        patch.object(Scheduler, "abort", interrupted_once(Scheduler.abort)),
        pytest.raises(KeyboardInterrupt),
    ):
        party.engine.generate(*asked_by(guests(3)))
    still_good(party)


def interrupted_once(real: Callable[..., Any]) -> Any:
    left = [1]

    def wrapped(*args: Any) -> Any:
        if left:
            left.pop()
            ctrl_c()
        return real(*args)

    return wrapped


# -- streams --------------------------------------------------------------------------------------


def stream_of(party: Party, indices: Sequence[int]) -> Any:
    return party.engine.stream(*asked_by(indices))


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_a_stream_that_is_left_early_takes_its_requests_along(how: str, taken: int) -> None:
    case = Case(2)
    stream = stream_of(case.party, guests(4)[2:])
    for _ in range(taken):
        next(stream)
    assert len(case.engine.requests) == (4 if taken else 2), "it enters with its first token"
    if how == "closed":
        stream.close()
    elif how == "raised" and taken:
        with pytest.raises(LookupError):
            stream.throw(LookupError("in the reader"))
    del stream
    gc.collect()
    assert case.engine.requests.keys() <= {"g0", "g1"}
    case.finish()


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_aborts_nobody_elses_request_of_the_same_id(begun: bool) -> None:
    """Its id was free when it was made, or is free again: somebody else may have taken it."""
    indices = guests(2)
    party = party_for(indices)
    engine, other = party.engine, pool()[indices[1]]
    stream = stream_of(party, indices[:1])
    if begun:
        name = next(stream).request_id
        engine.abort(name)
        engine.add_request(other.prompt, other.params, name)
        stream.close()
    else:
        name = "r0"
        engine.add_request(other.prompt, other.params, name)
        with pytest.raises(ValueError, match="'r0' is here already"):
            next(stream)
    assert list(engine.requests) == [name], "it is not the stream's"
    (output,) = engine.run()
    as_alone(name, output, indices[1])
    still_good(party)


def test_a_request_of_a_stream_that_fails_ends_in_the_stream() -> None:
    indices = guests(3)
    party, token = party_for(indices), own_token(indices, 1)

    def dislikes(batch: Batch) -> None:
        if token in batch.input_ids.tolist():
            raise RuntimeError("no")

    with before_forward(dislikes):
        ends = [r.finish.reason for r in stream_of(party, indices) if r.output is not None]
    wanted = [alone(indices[k], LIMIT).finish_reason for k in (0, 2)]
    assert sorted(ends) == sorted([*wanted, "error"])
    still_good(party)


def test_a_stream_that_the_garbage_collector_drops_while_a_step_is_planned() -> None:
    """Its requests are aborted when the step is over: nobody else may notice."""
    case = Case(2, max_num_seqs=4, budget=500)
    stream = stream_of(case.party, guests(4)[2:])
    next(stream)
    circle: list[Any] = [stream]
    circle.append(circle)
    del stream, circle
    allocate, calls = case.party.memory.allocate, iter(range(10**6))

    def collecting(*args: Any) -> Any:
        if next(calls) == 0:
            gc.collect()
        return allocate(*args)

    gc.disable()
    try:
        with patch.object(case.party.memory, "allocate", collecting):
            case.book.finish()
    finally:
        gc.enable()
    case.finish()
