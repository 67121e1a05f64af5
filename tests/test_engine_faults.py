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
from engines import one_thread
from torch import Tensor
from workloads import (
    EOS,
    LIMITS,
    POOL_SIZE,
    Party,
    alone,
    pool,
    same_tokens,
    several,
    small_model,
    the_tokenizer,
)

from tutorial_engine.engine.delivery import Inbox
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import RequestOutput, StepOutput
from tutorial_engine.engine.runner import ModelOutput, ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.history import EngineState, replay

LIMIT = max(LIMITS)
MANY = 300  # steps: more than any of these needs


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


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
    options = {"max_num_seqs": 3, "budget": 12, **options}
    return Party(several(indices, **options))


def add(
    party: Party,
    indices: Sequence[int],
    callbacks: dict[int, Callable[[StepOutput], None]] | None = None,
    samplers: dict[int, Sampler] | None = None,
) -> list[str]:
    """Request number k of them is called g{k}."""
    for k, index in enumerate(indices):
        asked = pool()[index]
        party.engine.add_request(
            asked.prompt,
            asked.params,
            f"g{k}",
            on_token=(callbacks or {}).get(k),
            sampler=(samplers or {}).get(k),
        )
    return [f"g{k}" for k in range(len(indices))]


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
    (got,), want = output.outputs, alone(index, LIMIT)
    same_tokens(name, got.tokens, want.tokens)
    ended = (got.text, got.finish_reason, got.stop_reason)
    assert ended == (want.text, want.finish_reason, want.stop_reason)


def all_as_alone(
    outputs: dict[str, RequestOutput], indices: Sequence[int], but: Iterable[int] = ()
) -> None:
    for k, index in enumerate(indices):
        if k not in set(but):
            assert outputs[f"g{k}"].error is None
            as_alone(f"g{k}", outputs[f"g{k}"], index)


def broken(output: RequestOutput, index: int, error: str, num_tokens: int | None = None) -> None:
    """It ended with this error, and what it had got by then is right and there."""
    (got,), want = output.outputs, alone(index, LIMIT)
    assert got.finish_reason == "error" and output.error == error
    assert num_tokens is None or len(got.tokens) == num_tokens
    same_tokens(output.request_id, got.tokens, want.tokens[: len(got.tokens)])


def still_good(party: Party) -> None:
    """Nothing is left over, the trace agrees, and the engine serves the next ones."""
    engine, memory = party.engine, party.memory
    engine.check_integrity()
    assert not engine.requests and not engine.has_unfinished_requests
    assert not (engine._inbox._results or engine._abandoned or engine._in_step)
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
    indices = guests()
    party = party_for(indices)
    names, book = add(party, indices), Book(party.engine)
    seen: list[int] = []
    fails = fails_at([number])

    def do(batch: Batch) -> None:
        seen.append(batch.num_seqs)
        fails(batch)

    with before_forward(do):
        outputs = book.finish()
    assert outputs.keys() == set(names)
    assert len(seen) > number
    all_as_alone(outputs, indices)
    assert party.engine.runner.num_forwards == party.engine.num_steps + seen[number]
    still_good(party)


def test_a_model_call_that_always_raises_ends_all_and_the_engine_lives() -> None:
    indices = guests()
    party = party_for(indices)
    names, book = add(party, indices), Book(party.engine)
    book.step()
    book.step()
    with before_forward(fails_at(range(1000))):
        outputs = book.finish()
    assert outputs.keys() == set(names)
    for k, index in enumerate(indices):
        broken(outputs[f"g{k}"], index, "RuntimeError: the device is gone")
    assert any(book.tokens(name) for name in names), "two steps went well"
    still_good(party)


@pytest.mark.parametrize("of_prompt", [True, False])
@pytest.mark.parametrize("k", range(4))
def test_a_model_that_dislikes_one_request_fails_only_that_one(k: int, of_prompt: bool) -> None:
    indices = guests()
    party = party_for(indices, max_num_seqs=4)
    engine, prompt_len = party.engine, len(pool()[indices[k]].prompt)

    def dislikes(batch: Batch) -> None:
        request = engine.requests.get(f"g{k}")
        if request is not None and batch.slot_mapping is not None:
            rows = batch.slot_mapping // LIMIT
            mine = torch.tensor(
                [row in party.memory.describe(f"g{k}").table for row in rows.tolist()]
            )
            if (mine & (of_prompt | (batch.positions >= prompt_len))).any():
                raise RuntimeError("no kernel for that")

    add(party, indices)
    with before_forward(dislikes):
        outputs = Book(party.engine).finish()
    all_as_alone(outputs, indices, but=[k])
    broken(outputs[f"g{k}"], indices[k], "RuntimeError: no kernel for that", not of_prompt)
    still_good(party)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("token", [0, 1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_their_request_alone(
    token: int, bad: float, greedy: bool
) -> None:
    indices = guests(3, greedy=greedy)
    run = ModelRunner.run

    def spoiled(self: ModelRunner, scheduled: Any) -> ModelOutput:
        output = run(self, scheduled)
        for row, one in enumerate(output.ready):
            if one.request.request_id == "g1" and len(one.request.tokens) == token:
                with torch.inference_mode():
                    output.logits[row, 3] = bad
        return output

    party = party_for(indices)
    add(party, indices)
    with patch.object(ModelRunner, "run", spoiled):
        outputs = Book(party.engine).finish()
    all_as_alone(outputs, indices, but=[1])
    error = outputs["g1"].error
    assert error is not None and "not numbers" in error and str(bad) in error
    broken(outputs["g1"], indices[1], error, token)
    still_good(party)


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
    indices = guests(3)
    party = party_for(indices)
    sampler = Raising(pool()[indices[k]].params, at, out_of_luck)
    add(party, indices, samplers={k: sampler})
    outputs = Book(party.engine).finish()
    all_as_alone(outputs, indices, but=[k])
    broken(outputs[f"g{k}"], indices[k], "ZeroDivisionError: out of luck", at)
    still_good(party)


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
    party = Party(several(indices, max_num_seqs=3, budget=12), illiterate)
    add(party, indices)
    outputs = Book(party.engine).finish()
    all_as_alone(outputs, indices, but=[1])
    number = alone(indices[1], LIMIT).token_ids.index(token)
    broken(outputs["g1"], indices[1], f"UnicodeError: what is {token}?", number)
    with pytest.raises(UnicodeError, match="what is hello"):
        party.engine.add_request("hello")
    with pytest.raises(UnicodeError, match="what is hello"):
        party.engine.generate([[1, 2], "hello"])
    illiterate.token = -1
    still_good(party)


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
    indices = guests(3)
    party = party_for(indices)
    add(party, indices, {k: at_call(call, out_of_luck)})
    book = Book(party.engine)
    outputs = book.finish()
    all_as_alone(outputs, indices, but=[k])
    broken(outputs[f"g{k}"], indices[k], "ZeroDivisionError: out of luck", call + 1)
    assert book.tokens(f"g{k}") == outputs[f"g{k}"].outputs[0].tokens, "each token once"
    still_good(party)


def test_a_callback_that_raises_at_the_last_token_changes_no_token() -> None:
    indices = guests(3)
    party = party_for(indices)
    last = len(alone(indices[1], LIMIT).token_ids) - 1
    add(party, indices, {1: at_call(last, out_of_luck)})
    outputs = Book(party.engine).finish()
    all_as_alone(outputs, indices, but=[1])
    as_alone("g1", outputs["g1"], indices[1])
    assert outputs["g1"].error == "ZeroDivisionError: out of luck"
    still_good(party)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", [0, 2, 5])
@pytest.mark.parametrize("k", range(3))
def test_ctrl_c_in_a_callback_ends_nobody(k: int, call: int, kind: type[BaseException]) -> None:
    def stop() -> None:
        if kind is KeyboardInterrupt:
            ctrl_c()
        else:
            raise kind

    indices = guests(3)
    party = party_for(indices)
    add(party, indices, {k: at_call(call, stop)})
    book = Book(party.engine)
    with pytest.raises(kind):
        book.finish()
    assert not party.engine._in_step
    outputs = book.finish()
    all_as_alone(outputs, indices)
    for j in range(3):
        assert book.tokens(f"g{j}") == outputs[f"g{j}"].outputs[0].tokens, "each token once"
    still_good(party)


def test_interrupt_that_a_callback_raises_itself_ends_nobody() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    indices = guests(3)
    party = party_for(indices)
    add(party, indices, {k: at_call(1, stop) for k in range(3)})
    book = Book(party.engine)
    seen = 0
    for _ in range(MANY):
        try:
            outputs = book.finish()
            break
        except KeyboardInterrupt:
            seen += 1
    assert 1 <= seen <= 3
    all_as_alone(outputs, indices)
    still_good(party)


@pytest.mark.parametrize("call", [0, 2])
def test_a_callback_may_abort_its_own_request(call: int) -> None:
    indices = guests(3)
    party = party_for(indices)
    engine = party.engine
    add(party, indices, {1: at_call(call, lambda: engine.abort("g1"))})
    book = Book(engine)
    outputs = book.finish()
    all_as_alone(outputs, indices, but=[1])
    (got,) = outputs["g1"].outputs
    assert got.finish_reason == "abort" and len(got.tokens) == call + 1
    assert outputs["g1"].error is None and book.tokens("g1") == got.tokens
    still_good(party)


@pytest.mark.parametrize(("killer", "victim"), [(0, 2), (2, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("call", [0, 2])
def test_a_callback_may_abort_a_neighbour_who_gets_nothing_more(
    killer: int, victim: int, call: int
) -> None:
    """It keeps its token of this very step, whichever comes first in the batch."""
    indices = guests(3)
    party = party_for(indices, budget=500)  # so all run from the first step on
    engine, book = party.engine, Book(party.engine)
    had: list[int] = []

    def kill() -> None:
        had.append(len(engine.requests[f"g{victim}"].tokens))
        engine.abort(f"g{victim}")

    add(party, indices, {killer: at_call(call, kill)})
    outputs = book.finish()
    all_as_alone(outputs, indices, but=[victim])
    (got,) = outputs[f"g{victim}"].outputs
    assert got.finish_reason == "abort" and outputs[f"g{victim}"].error is None
    assert [len(got.tokens)] == had == [call + 1] and book.tokens(f"g{victim}") == got.tokens
    assert book.results.index(next(r for r in book.results if r.output)) < len(book.results)
    still_good(party)


def test_a_callback_may_add_a_request() -> None:
    indices = guests(4)
    party = party_for(indices)
    engine, asked = party.engine, pool()[indices[3]]
    late = at_call(1, lambda: engine.add_request(asked.prompt, asked.params, "g3"))
    add(party, indices[:3], {0: late})
    outputs = Book(engine).finish()
    all_as_alone(outputs, indices)
    still_good(party)


def test_an_id_is_free_again_in_the_callback_that_brings_the_end() -> None:
    (index,) = guests(1)
    party = party_for([index])
    engine, asked = party.engine, pool()[index]
    last = len(alone(index, LIMIT).token_ids) - 1
    add(
        party,
        [index],
        {0: at_call(last, lambda: engine.add_request(asked.prompt, asked.params, "g0"))},
    )
    first, second = engine.run()
    assert first.request_id == second.request_id == "g0"
    as_alone("g0", first, index)
    as_alone("g0", second, index)
    still_good(party)


@pytest.mark.parametrize("how", ["step", "run", "generate", "stream"])
def test_a_callback_cannot_run_another_step(how: str) -> None:
    indices = guests(3)
    party = party_for(indices)
    engine = party.engine
    calls: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "run": engine.run,
        "generate": lambda: engine.generate([[1, 2]]),
        "stream": lambda: list(engine.stream([[1, 2]])),
    }
    add(party, indices, {1: at_call(1, calls[how])})
    outputs = Book(engine).finish()
    all_as_alone(outputs, indices, but=[1])
    error = outputs["g1"].error
    assert error is not None and error.startswith("RuntimeError: a step is under way")
    broken(outputs["g1"], indices[1], error, 2)
    still_good(party)


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
        "update": (Scheduler, "_append"),
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


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_generate_takes_away_only_what_it_brought(place: str, number: int) -> None:
    indices = guests(4)
    party = party_for(indices)
    engine = party.engine
    handler = signal.getsignal(signal.SIGINT)
    add(party, indices[:2])
    asked = [pool()[i] for i in indices[2:]]
    prompts, params = [a.prompt for a in asked], [a.params for a in asked]
    with ctrl_c_in(place, number), pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params)
    assert signal.getsignal(signal.SIGINT) is handler
    engine.check_integrity()
    assert engine.requests.keys() == {"g0", "g1"}
    book = Book(engine)
    outputs = book.finish()
    assert outputs.keys() == {"g0", "g1"}
    all_as_alone(outputs, indices[:2])
    for name in ("g0", "g1"):
        assert book.tokens(name) == outputs[name].outputs[0].tokens, "each token once"
    still_good(party)


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_generate_brings_its_requests_in(number: int) -> None:
    indices = guests(3)
    party = party_for(indices)
    with ctrl_c_in("add", number), pytest.raises(KeyboardInterrupt):
        party.engine.generate([pool()[i].prompt for i in indices])
    still_good(party)


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_a_step_loses_nothing(place: str, number: int) -> None:
    """The interrupt comes out of step(); whoever goes on stepping gets every token once."""
    indices = guests(4)
    party = party_for(indices, capacity=LIMIT)
    names, book = add(party, indices), Book(party.engine)
    with ctrl_c_in(place, number), pytest.raises(KeyboardInterrupt):
        book.finish()
    outputs = book.finish()
    all_as_alone(outputs, indices)
    for name in names:
        assert book.tokens(name) == outputs[name].outputs[0].tokens, "each token once"
    still_good(party)


def test_a_second_ctrl_c_while_cleaning_up_leaks_nothing() -> None:
    indices = guests(3)
    party = party_for(indices)
    with (
        ctrl_c_in("forward", 2),
        patch.object(Scheduler, "abort", interrupted_once(Scheduler.abort)),
        pytest.raises(KeyboardInterrupt),
    ):
        party.engine.generate([pool()[i].prompt for i in indices])
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


def stream_of(party: Party, indices: Sequence[int]) -> Iterator[StepOutput]:
    asked = [pool()[i] for i in indices]
    return party.engine.stream([a.prompt for a in asked], [a.params for a in asked])


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_a_stream_that_is_left_early_takes_its_requests_along(how: str, taken: int) -> None:
    indices = guests(4)
    party = party_for(indices)
    add(party, indices[:2])
    stream = stream_of(party, indices[2:])
    for _ in range(taken):
        next(stream)
    assert len(party.engine.requests) == (4 if taken else 2)
    if how == "closed":
        stream.close()  # type: ignore[attr-defined]
    elif how == "raised" and taken:
        with pytest.raises(LookupError):
            stream.throw(LookupError("in the reader"))  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert party.engine.requests.keys() <= {"g0", "g1"}
    book = Book(party.engine)
    all_as_alone(book.finish(), indices[:2])
    still_good(party)


def test_an_exception_in_the_readers_loop_ends_the_stream() -> None:
    indices = guests(3)
    party = party_for(indices)

    def reader() -> None:
        for result in stream_of(party, indices):
            if result.token is not None:
                raise LookupError("in the reader")

    with pytest.raises(LookupError):
        reader()
    gc.collect()
    still_good(party)


def test_a_stream_that_nobody_reads_brings_nothing_in() -> None:
    indices = guests(3)
    party = party_for(indices)
    stream = stream_of(party, indices)
    assert not party.engine.has_unfinished_requests
    del stream
    still_good(party)


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
        stream.close()  # type: ignore[attr-defined]
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
    party = party_for(indices)
    token = own_token(indices, 1)

    def dislikes(batch: Batch) -> None:
        if token in batch.input_ids.tolist():
            raise RuntimeError("no")

    with before_forward(dislikes):
        ends = {r.request_id: r for r in stream_of(party, indices) if r.output is not None}
    reasons = sorted(str(r.finish.reason) for r in ends.values() if r.finish)
    wanted = [alone(indices[k], LIMIT).finish_reason for k in (0, 2)]
    assert reasons == sorted([*wanted, "error"])
    still_good(party)


def test_a_stream_that_the_garbage_collector_drops_while_a_step_is_planned() -> None:
    """Its requests are aborted in the middle of schedule(): nobody else may notice."""
    indices = guests(4)
    party = party_for(indices, max_num_seqs=4, budget=500)
    stream = stream_of(party, indices[:2])
    next(stream)
    add(party, indices[2:])
    party.engine.step()
    circle: list[Any] = [stream]
    circle.append(circle)
    del stream, circle
    allocate, calls = party.memory.allocate, iter(range(10**6))

    def collecting(*args: Any) -> Any:
        if next(calls) == 0:
            gc.collect()
        return allocate(*args)

    gc.disable()
    try:
        with patch.object(party.memory, "allocate", collecting):
            book = Book(party.engine)
            outputs = book.finish()
    finally:
        gc.enable()
    for k, index in enumerate(indices[2:]):
        as_alone(f"g{k}", outputs[f"g{k}"], index)
    still_good(party)
