"""A mistake of a user meets a sentence with the value and the fix, and the engine works on.

Never an assertion, a raw TypeError, an endless loop or a wrong answer. What a single function
refuses is tested beside it; here is what goes wrong between several parts.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import BASE, HfQwen3, randomise
from engines import random_model
from transformers import Qwen3Config

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate, stream
from tutorial_engine.engine.request import Request, StepOutput
from tutorial_engine.engine.runner import make_runner, prefill
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.lab.hf import TransformersRunner
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler, filter_logits
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace.events import Recorder

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9, 8, 2]]
MODEL = random_model()

MEMORIES: dict[str, Callable[[], KVMemory]] = {
    "rows": lambda: StaticKVCache.from_config(MODEL.config, max_seqs=4, max_len=20),
    "pages": lambda: PagedKVCache.from_config(MODEL.config, block_size=4, num_blocks=12),
    "cells": lambda: CellKVCache.from_config(MODEL.config, 48),
    "by cat": GrowingKVCache,
}


def right(prompts: list[list[int]], model: Qwen3ForCausalLM = MODEL) -> list[tuple[int, ...]]:
    """What each prompt gives alone."""
    return [generate(model, [ids], FIVE)[0].outputs[0].token_ids for ids in prompts]


def said(engine: LLMEngine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, FIVE)]


# -- one memory, two engines ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_memory_serves_one_engine_at_a_time(kind: str) -> None:
    memory = MEMORIES[kind]()
    first, second = LLMEngine(MODEL, memory=memory), LLMEngine(MODEL, memory=memory)
    first.add_request(PROMPTS[0], FIVE)
    for step in range(2):  # waiting, and then running
        with pytest.raises(ValueError, match=r"another engine.*\['r0'\].*abort"):
            second.generate(PROMPTS[1:], FIVE)
        with pytest.raises(ValueError, match="another engine"):
            second.add_request(PROMPTS[1], FIVE)
        with pytest.raises(ValueError, match="another engine"):
            LLMEngine(MODEL, memory=memory)
        assert not second.requests and not second.has_unfinished_requests
        if step == 0:
            first.step()
    (output,) = first.run()
    assert [output.outputs[0].token_ids] == right(PROMPTS[:1])
    for engine in (second, first, second):  # one after the other is no mistake
        assert said(engine, PROMPTS) == right(PROMPTS)
        engine.check_integrity()
    assert memory.seq_ids == ()


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_a_dropped_engine_left_in_a_memory_is_named(kind: str) -> None:
    memory = MEMORIES[kind]()
    dropped = LLMEngine(MODEL, memory=memory)
    dropped.add_request(PROMPTS[0], FIVE)
    dropped.step()
    del dropped
    with pytest.raises(ValueError, match=r"\['r0'\] are not over.*make a new memory"):
        LLMEngine(MODEL, memory=memory)
    memory.user.abort("r0")  # type: ignore[attr-defined]
    assert said(LLMEngine(MODEL, memory=memory), PROMPTS) == right(PROMPTS)


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_was_put_into_a_memory_by_hand_is_not_written_over(kind: str) -> None:
    memory = MEMORIES[kind]()
    prefill(MODEL, memory, [Request("r0", PROMPTS[0])])
    assert memory.seq_ids == ("r0",)
    with pytest.raises(ValueError, match=r"holds the sequences \['r0'\].*memory.free"):
        LLMEngine(MODEL, memory=memory)
    memory.free("r0")
    assert said(LLMEngine(MODEL, memory=memory), PROMPTS) == right(PROMPTS)


# -- one runner, two streams ----------------------------------------------------------------------


def runners() -> list[Any]:
    config = {**BASE, "max_position_embeddings": 64}
    theirs = HfQwen3(Qwen3Config(**config)).eval()
    randomise(theirs, 3)
    return [make_runner(MODEL, num_seqs=3), TransformersRunner(theirs)]


@pytest.mark.parametrize("runner", runners(), ids=["ours", "theirs"])
def test_a_stream_does_not_go_on_where_another_one_has_begun(runner: Any) -> None:
    alone = [generate(runner, [ids], FIVE)[0].outputs[0].token_ids for ids in PROMPTS]
    first, second = (stream(runner, [ids], FIVE) for ids in PROMPTS[:2])
    assert next(first).token.token_id == alone[0][0]  # type: ignore[union-attr]
    begun = [next(second)]
    with pytest.raises(ValueError, match=r"another generate or stream has begun on it: finish one"):
        next(first)
    begun += second
    assert tuple(one.token.token_id for one in begun if one.token) == alone[1]
    assert generate(runner, PROMPTS[:1], FIVE)[0].outputs[0].token_ids == alone[0]


def test_without_a_cache_streams_of_a_runner_do_not_meet() -> None:
    runner = make_runner(MODEL, use_cache=False)
    streams = [stream(runner, [ids], FIVE) for ids in PROMPTS]
    turns = [[next(one).token for one in streams] for _ in range(5)]
    said = [tuple(token.token_id for token in own if token) for own in zip(*turns, strict=True)]
    assert said == right(PROMPTS)


# -- a part of the learner's that forgets its `return`, or gives something else -------------------

GIVEN: list[tuple[object, str]] = [
    (None, "gave None.*a `return` missing"),
    (7, "gave 7.*SampledToken is wanted"),
    (1.5, "gave 1.5"),
    (torch.tensor(7), r"gave tensor\(7\)"),
    (SampledToken(None), "token_id must be an int"),  # type: ignore[arg-type]
    (SampledToken(torch.tensor(7)), "token_id must be an int"),  # type: ignore[arg-type]
    (SampledToken(97), "from 0 to 96"),
    (SampledToken(-1), "from 0 to 96"),
]


class Own(Sampler):
    """Gives something, in place of a token, from its second token on."""

    given: object = None

    def sample(self, logits: torch.Tensor) -> Any:
        token = super().sample(logits)
        return token if self.num_sampled < 2 else self.given


@pytest.mark.parametrize(("given", "says"), GIVEN, ids=[repr(given) for given, _ in GIVEN])
def test_a_sampler_that_gives_no_token_ends_its_request_alone(given: object, says: str) -> None:
    sampler = Own(FIVE)
    sampler.given = given
    engine = LLMEngine(MODEL)
    for i, ids in enumerate(PROMPTS):
        engine.add_request(ids, FIVE, str(i), sampler=sampler if i == 1 else None)
    outputs = {output.request_id: output for output in engine.run(max_steps=20)}
    assert sorted(outputs) == ["0", "1", "2"] and not engine.has_unfinished_requests
    want = right(PROMPTS)
    for i in (0, 2):
        assert outputs[str(i)].outputs[0].token_ids == want[i]
    assert outputs["1"].outputs[0].finish_reason == "error"
    assert re.search(f"Own.sample .*{says}", str(outputs["1"].error)), outputs["1"].error
    assert said(engine, PROMPTS) == want


@pytest.mark.parametrize("gives", [lambda logits, p: None, lambda logits, p: logits[:3]])
def test_a_filter_that_gives_no_logits_is_named(gives: Any) -> None:
    gives.__name__ = "top_p"
    with pytest.raises(ValueError, match=r"filter top_p gave .*logits \[97\] are wanted"):
        filter_logits(torch.zeros(97), SamplingParams(temperature=1.0), [gives])


class NoReturn(Scheduler):
    """`num_tokens_to_run` says nothing."""

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> Any:
        super().num_tokens_to_run(request, plan)


class Half(Scheduler):
    """It says half a token."""

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> Any:
        return 0.5


class NoPlan(Scheduler):
    """It plans, and forgets to say what."""

    def schedule(self) -> Any:
        super().schedule()


class NoNext(Scheduler):
    """Nobody's turn."""

    def next_waiting(self) -> Any:
        return None


class NoAdmission(Scheduler):
    """Nobody is let in."""

    def may_admit(self, plan: StepPlan) -> Any:
        super().may_admit(plan)


POLICIES = [
    (NoReturn, "NoReturn.num_tokens_to_run gave None .*a `return` missing"),
    (Half, "Half.num_tokens_to_run gave 0.5"),
    (NoPlan, r"NoPlan.schedule planned nothing, and \['r0'\].*`return`"),
    (NoNext, "NoNext.next_waiting gave None"),
    (NoAdmission, r"NoAdmission.schedule planned nothing, and \['r0'\]"),
]


@pytest.mark.parametrize(("policy", "says"), POLICIES)
def test_a_policy_that_says_nothing_is_named(policy: type[Scheduler], says: str) -> None:
    engine = LLMEngine(MODEL, scheduler=policy)
    with pytest.raises((ValueError, RuntimeError), match=says):
        engine.generate(PROMPTS[:1], FIVE)
    assert not engine.has_unfinished_requests and engine.memory.seq_ids == ()
    engine.check_integrity()


class Full(PagedKVCache):
    """Has never room."""

    def allocate(self, *args: Any) -> Any:
        return None


def test_a_memory_without_room_is_told_of() -> None:
    memory = Full.from_config(MODEL.config, num_blocks=8)
    engine = LLMEngine(MODEL, memory=memory)
    engine.add_request(PROMPTS[0], FIVE)
    with pytest.raises(RuntimeError, match=r"planned nothing.*memory has no room"):
        engine.step()
    engine.abort("r0")
    assert [out.outputs[0].finish_reason for out in engine.run()] == ["abort"]


# -- callbacks ------------------------------------------------------------------------------------


async def coroutine(told: StepOutput) -> None:
    raise AssertionError("nobody awaits it")


@pytest.mark.parametrize("bad", [5, "print", [], coroutine])
def test_a_callback_that_cannot_be_called_is_refused_at_once(bad: Any) -> None:
    engine = LLMEngine(MODEL)
    with pytest.raises(ValueError, match="on_token is a plain function"):
        engine.add_request(PROMPTS[0], FIVE, on_token=bad)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    "ends", [SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt]
)
def test_a_callback_that_ends_the_program_is_heard_and_is_called_again(
    ends: type[BaseException],
) -> None:
    told: list[StepOutput] = []

    def callback(output: StepOutput) -> None:
        told.append(output)
        if len(told) == 2:
            raise ends

    engine = LLMEngine(MODEL)
    engine.add_request(PROMPTS[0], FIVE, on_token=callback)
    with pytest.raises(ends):
        engine.run()
    (output,) = engine.run()
    assert tuple(one.token.token_id for one in told if one.token) == right(PROMPTS[:1])[0]
    assert told[-1].output == output and len(told) == 5


# -- memory by hand -------------------------------------------------------------------------------


def test_a_memory_used_by_hand_answers_with_sentences() -> None:
    blocks = BlockManager(4, 2)
    blocks.admit("a", [1, 2])
    with pytest.raises(AssertionError, match="sequence a has a table: extend it"):
        blocks.admit("a", [1, 2])
    with pytest.raises(AssertionError, match="sequence b has no table: admit it first"):
        blocks.extend("b", 0, 2)
    with pytest.raises(AssertionError, match="sequence b has no table: admit it first"):
        blocks.commit("b", [1, 2], 2)
    blocks.check_integrity()
    with pytest.raises(ValueError, match="says that 3 of its tokens are computed"):
        GrowingKVCache().allocate("a", [1, 2, 3, 4], 3, 1)


def test_a_recorder_without_an_engine_says_what_is_missing() -> None:
    memory = PagedKVCache.from_config(MODEL.config, num_blocks=8, trace=Recorder())
    with pytest.raises(ValueError, match="no clock yet: make the engine first"):
        prefill(MODEL, memory, [Request("a", PROMPTS[0])])


@pytest.mark.parametrize("made", [Sampler, StopChecker, lambda params: Request("a", [1], params)])
@pytest.mark.parametrize("params", [5, {"max_tokens": 5}, "warm"])
def test_params_of_another_kind_are_named(made: Any, params: Any) -> None:
    with pytest.raises(ValueError, match=r"params must be SamplingParams\(.* got"):
        made(params)


# -- threads, copies, interrupts ------------------------------------------------------------------


def test_another_thread_is_told_that_it_is_another_thread() -> None:
    """Not that it is a callback; and a callback is told that it is one."""
    engine, said = LLMEngine(MODEL), list[str]()
    run = engine.runner.run

    def generate_now() -> None:
        with pytest.raises(RuntimeError) as error:
            engine.generate(PROMPTS[1:2], FIVE)
        said.append(str(error.value))

    def run_beside_another(scheduled: Any) -> Any:
        engine.runner.run = run  # type: ignore[method-assign]
        thread = threading.Thread(target=generate_now)
        thread.start()
        thread.join()
        generate_now()  # as a callback would
        return run(scheduled)

    engine.runner.run = run_beside_another  # type: ignore[method-assign]
    assert [one.outputs[0].token_ids for one in engine.generate(PROMPTS[:1], FIVE)] == right(
        PROMPTS[:1]
    )
    assert "another thread runs a step" in said[0] and "a callback cannot" in said[1]
