"""What a user types wrong meets a sentence with the value and the fix, and the engine serves on.

One table for the engine's door: calls of an engine that is at work, then engines and options that
cannot be made, policies and samplers that are wrong. SamplingParams are in test_sampling.py.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import random_model

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate, stream
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import ModelRunner, prefill
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.attention import NaiveAttention, SdpaAttention
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.events import Recorder

MODEL = random_model(eos=(5,))
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
WARM_TWO = SamplingParams(n=2, temperature=1.0)
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9, 8, 2]]
LIMIT = 20


def small_engine(**parts: Any) -> LLMEngine:
    limits = EngineConfig(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=LIMIT)
    return LLMEngine(MODEL, **{"config": limits} | parts)


RIGHT = [generate(MODEL, [ids], FIVE)[0].outputs[0].token_ids for ids in PROMPTS]


def serves_on(engine: LLMEngine) -> None:
    engine.check_integrity()
    outputs = engine.generate(PROMPTS, FIVE)
    assert [output.outputs[0].token_ids for output in outputs] == RIGHT
    assert not engine.requests and engine.memory.seq_ids == ()


# -- calls of an engine that is at work -----------------------------------------------------------

Call = Callable[[LLMEngine], object]
CALLS: dict[str, tuple[Call, str]] = {
    "a text for ids": (lambda e: e.add_request("x", "One day"), r"x is text: pass tokenizer="),
    "a number as prompt": (lambda e: e.add_request("x", 7), "text or a list of token ids, got 7"),  # type: ignore[arg-type]
    "steps back": (lambda e: e.run(max_steps=-1), "max_steps is a number of steps .* got -1"),
    "a number as prompts": (lambda e: e.generate(7), "prompts are a text, or a list .* got 7"),  # type: ignore[arg-type]
    "one prompt's ids as prompts": (
        lambda e: e.generate([7, 8]),
        r"7 is a number.*\[\[1, 2, 3\]\]",
    ),  # type: ignore[list-item]
    "a tensor": (lambda e: e.generate([torch.tensor([1])]), r"prompt 0 must be .*use .tolist\(\)"),  # type: ignore[list-item]
    "an empty prompt": (lambda e: e.add_request("x", []), "request x is empty"),
    "an id beyond the vocabulary": (lambda e: e.add_request("x", [1, 97]), "97; .* from 0 to 96"),
    "a stop id beyond the vocabulary": (
        lambda e: e.generate([[1]], SamplingParams(stop_token_ids=[5, 97])),
        "stop_token_ids of prompt 0 holds 97; token ids are whole numbers from 0 to 96",
    ),
    "half an id": (lambda e: e.generate([[1, 2.5]]), "holds 2.5; .* whole numbers"),  # type: ignore[list-item]
    "as long as the limit": (
        lambda e: e.add_request("x", [1] * LIMIT),
        f"x has {LIMIT} tokens, .* limited to {LIMIT}: shorten it, or raise max_model_len",
    ),
    "params of another kind": (lambda e: e.add_request("x", [1], 5), r"SamplingParams\(.* got 5"),  # type: ignore[arg-type]
    "too few params": (lambda e: e.generate(PROMPTS, [FIVE]), "3 prompts but 1 SamplingParams"),
    "a stop string without text": (
        lambda e: e.generate([[1]], SamplingParams(stop="x")),
        r"stop strings \('x',\) need a tokenizer; or use stop_token_ids",
    ),
    "an id that is here": (lambda e: e.add_request("c.1", [1]), r"'c\.1' is here already"),
    "an id whose samples are here": (
        lambda e: e.add_request("c", [1], WARM_TWO),
        r"'c\.1' is here already",
    ),
    "an id that is no text": (lambda e: e.add_request(5, [1]), "request_id is a text .* got 5"),  # type: ignore[arg-type]
    "an arrival that is no time": (
        lambda e: e.add_request("x", [1], arrival_time="soon"),  # type: ignore[arg-type]
        "arrival_time must be a time in seconds, got 'soon'",
    ),
    "a sampler that is none": (lambda e: e.add_request("x", [1], sampler=5), "as many Samplers"),  # type: ignore[arg-type]
    "one sampler for two": (
        lambda e: e.add_request("x", [1], WARM_TWO, sampler=Sampler(WARM_TWO)),
        "2 continuations need as many Samplers",
    ),
    "an abort of nobody": (lambda e: e.abort_request("b"), "no request 'b' is here"),
    "a second engine on its memory": (
        lambda e: LLMEngine(MODEL, memory=e.memory),
        r"another engine.*\['c.1'\] are not over: make a new memory, or finish or abort them",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_call_is_refused_and_the_request_at_work_goes_on(what: str) -> None:
    call, says = CALLS[what]
    engine = small_engine()
    engine.add_request("c.1", PROMPTS[0], FIVE)
    engine.step()
    before = engine.state()
    with pytest.raises(ValueError, match=says):
        call(engine)
    assert engine.state() == before and list(engine.requests) == ["c.1"]
    assert engine.run()[0].outputs[0].token_ids == RIGHT[0]
    serves_on(engine)


def test_without_chunks_a_prompt_over_the_budget_is_refused() -> None:
    limits = EngineConfig(max_num_batched_tokens=4, enable_chunked_prefill=False)
    engine = small_engine(config=limits)
    with pytest.raises(ValueError, match=r"5 tokens .*at most 4: raise max_num_batched_tokens"):
        engine.generate(PROMPTS, FIVE)
    assert not engine.requests and len(engine.generate(PROMPTS[1:], FIVE)) == 2


# -- engines, and the loop without one ------------------------------------------------------------

LOOP: dict[str, tuple[Any, dict[str, Any], str]] = {  # prompts, options, words
    "chunks of nothing": ([[1, 2]], {"chunk_size": 0}, "chunk_size.*0"),
    "chunks without a cache": ([[1]], {"chunk_size": 2, "use_cache": False}, "needs a cache"),
    "longer than max_len": ([[1], [2] * 8], {"max_len": 8}, "prompt 1 has 8.*limited to 8"),
    "several samples": ([[1]], {"params": WARM_TWO}, "one continuation a prompt; n 2: use LLMEng"),
    "params for one": ([[1], [2]], {"params": [FIVE]}, "2 prompts but 1 SamplingParams"),
}


@pytest.mark.parametrize("what", LOOP)
def test_the_loop_refuses_before_anything_runs(what: str) -> None:
    prompts, options, says = LOOP[what]
    for call in (generate, stream):  # at the call, not at the first token
        with pytest.raises(ValueError, match=says):
            call(MODEL, prompts, **options)
        with pytest.raises(ValueError, match=r"model must be a loaded model \(load_model\(\)\)"):
            call(None, prompts)  # type: ignore[arg-type]


CONFIG = MODEL.config


def storage() -> KVStorage:
    return CellKVCache.from_config(CONFIG, 40).storage


PARTS: dict[str, tuple[Callable[[], object], str]] = {
    "no model": (lambda: LLMEngine(None), r"a loaded model \(load_model\(\)\), got None"),  # type: ignore[arg-type]
    "a tokenizer's name": (lambda: LLMEngine(MODEL, "x"), "tokenizer must .* encode, decode"),  # type: ignore[arg-type]
    "a scheduler's name": (
        lambda: small_engine(scheduler="fcfs"),
        "Scheduler or a subclass: 'fcfs'",
    ),
    "a trace's name": (lambda: small_engine(trace="x"), "trace must .* got 'x'"),
    "a memory of another kind": (lambda: small_engine(memory=5), "must be a KVMemory .* got 5"),
    "a memory of another dtype": (
        lambda: small_engine(
            memory=PagedKVCache.from_config(CONFIG, num_blocks=4, dtype=torch.bfloat16)
        ),
        "memory is for another model: it stores .*bfloat16.*, needed is .*float32",
    ),
    "a memory without the recorder": (
        lambda: small_engine(memory=CellKVCache.from_config(CONFIG, 40), trace=Recorder()),
        "made without that recorder.*give trace= to the memory",
    ),
    "a runner over another memory": (
        lambda: small_engine(runner=ModelRunner(MODEL, storage())),
        r"runner reads another memory.*memory\.storage of the same",
    ),
    "an attention over another memory": (
        lambda: ModelRunner(MODEL, storage(), SdpaAttention(cache=None)),
        r"SdpaAttention does not read this memory.*memory\.storage",
    ),
    "an attention's class": (
        lambda: ModelRunner(MODEL, storage(), SdpaAttention),  # type: ignore[arg-type]
        r"make one first: SdpaAttention\(memory.storage\)",
    ),
    "rows that fit nowhere": (
        lambda: LLMEngine(MODEL, config=EngineConfig(max_num_seqs=10**12)),
        r"bytes .* in all.*max_num_seqs",
    ),
    "no place to run": (lambda: EngineConfig(max_num_seqs=0), "max_num_seqs .* got 0"),
    "chunks perhaps": (lambda: EngineConfig(enable_chunked_prefill="no"), "True or False, .*'no'"),  # type: ignore[arg-type]
    "two processes": (lambda: EngineArgs(tensor_parallel_size=2), "size=2: vLLM has this, and the"),
    "quantised weights": (lambda: EngineArgs(quantization="awq"), "quantization='awq': vLLM has"),
    "an option nobody knows": (
        lambda: EngineArgs(max_batch=3),
        r"EngineArgs takes no 'max_batch', here or in vLLM 0.32.0: see help",
    ),
    "a dtype of another kind": (lambda: EngineArgs(dtype="int8"), "dtype 'int8' is not supported"),
    "no switch": (lambda: EngineArgs(enable_prefix_caching="no"), "prefix_caching .* got 'no'"),  # type: ignore[arg-type]
    "args that are none": (lambda: LLMEngine.from_engine_args(5), r"EngineArgs\(model=.* got 5"),  # type: ignore[arg-type]
    "half a seed": (lambda: EngineArgs(seed=0.5), "seed must be a whole number .* got 0.5"),  # type: ignore[arg-type]
    "args without a model": (lambda: EngineArgs(None), "a checkpoint is a folder or a hub id"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", PARTS)
def test_what_does_not_fit_together_is_refused_when_it_is_made(what: str) -> None:
    make, says = PARTS[what]
    with pytest.raises(ValueError, match=says):
        make()


def test_a_memory_serves_one_engine_after_the_other() -> None:
    memory = PagedKVCache.from_config(CONFIG, block_size=4, num_blocks=15)
    prefill(MODEL, memory, [Request("x", PROMPTS[0])])
    with pytest.raises(ValueError, match=r"holds the sequences \['x'\].*memory.free"):
        small_engine(memory=memory)
    memory.free("x")
    first, second = small_engine(memory=memory), small_engine(memory=memory)
    first.add_request("a", PROMPTS[0], FIVE)
    for _ in range(2):  # waiting, and then running
        for call in (lambda: second.generate(PROMPTS), lambda: second.add_request("b", [1])):
            with pytest.raises(ValueError, match=r"another engine .*\['a'\] are not over"):
                call()
        first.step()
    assert not second.requests and first.run()[0].outputs[0].token_ids == RIGHT[0]
    for engine in (second, first, second):  # one after the other is no mistake
        serves_on(engine)


# -- policies, samplers and filters of one's own --------------------------------------------------


def policy(**methods: Callable[..., Any]) -> type[Scheduler]:
    return type("Mine", (Scheduler,), methods)


POLICIES: dict[str, tuple[type[Scheduler], str]] = {
    "no number": (policy(num_tokens_to_run=lambda *_: None), "run gave None .*`return` missing"),
    "never any": (policy(num_tokens_to_run=lambda *_: 0), r"planned nothing, and \['r0', 'r1'"),
    "no plan": (policy(schedule=lambda self: None), "schedule gave None: it must return the list"),
    "a request twice": (
        policy(schedule=lambda self: Scheduler.schedule(self) * 2),
        r"planned a request twice in one step: \['r0', 'r1'",
    ),
    "nobody is next": (policy(next_waiting=lambda self: None), "gave None .*return.*waiting"),
    "a stranger is next": (policy(next_waiting=lambda self: Request("x", [1])), "must return one"),
    "too many may": (
        policy(may_admit=lambda self, plan: True),
        r"may_admit lets in more than max_num_seqs \(2\): call super",
    ),
}


@pytest.mark.parametrize("what", POLICIES)
def test_a_policy_that_is_wrong_is_named(what: str) -> None:
    scheduler, says = POLICIES[what]
    limits = EngineConfig(max_num_seqs=2, max_model_len=LIMIT)
    engine = small_engine(scheduler=scheduler, config=limits)
    with pytest.raises((ValueError, RuntimeError), match=f"Mine.*{says}"):
        engine.generate(PROMPTS, FIVE)
    assert not engine.requests and engine.memory.seq_ids == ()
    engine.check_integrity()


def test_a_policy_may_say_more_than_there_is_or_always_yes() -> None:
    """One that lets in nobody too many, or names too many tokens, just works."""
    for scheduler in (
        policy(may_admit=lambda self, plan: True),
        policy(num_tokens_to_run=lambda self, request, plan: 1000),
    ):
        serves_on(small_engine(scheduler=scheduler))


def test_a_memory_without_room_is_told_of() -> None:
    memory = CellKVCache.from_config(CONFIG, 40)
    memory.allocate = lambda *_: None  # type: ignore[method-assign]
    engine = small_engine(memory=memory)
    engine.add_request("a", PROMPTS[0], FIVE)
    with pytest.raises(RuntimeError, match=r"planned nothing.*memory has no room"):
        engine.step()
    engine.abort_request("a")
    assert [output.outputs[0].finish_reason for output in engine.run()] == ["abort"]
    del memory.allocate
    serves_on(engine)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "; a SampledToken is wanted: is a `return` missing?"),
        (SampledToken(torch.tensor(7)), "with an int as its token_id"),  # type: ignore[arg-type]
        (SampledToken(-1), "token ids run from 0 to 96"),
    ],
)
def test_a_sampler_that_gives_no_token_ends_its_request_alone(given: object, says: str) -> None:
    class OwnSampler(Sampler):
        def sample(self, logits: torch.Tensor) -> Any:
            token = super().sample(logits)
            return token if self.num_sampled < 2 else given

    engine = small_engine()
    for i, ids in enumerate(PROMPTS):
        engine.add_request(str(i), ids, FIVE, sampler=OwnSampler(FIVE) if i == 1 else None)
    outputs = {output.request_id: output for output in engine.run(max_steps=20)}
    assert [outputs[name].outputs[0].token_ids for name in "02"] == [RIGHT[0], RIGHT[2]]
    assert outputs["1"].outputs[0].finish_reason == "error"
    assert outputs["1"].outputs[0].token_ids == RIGHT[1][:1]
    assert re.search(f"OwnSampler.sample gave .*{re.escape(says)}", str(outputs["1"].error))
    serves_on(engine)


@pytest.mark.parametrize(
    "bend", [lambda out: None, lambda out: (out, out), lambda out: out[:1], lambda out: out.mT]
)
def test_a_backend_that_gives_another_shape_is_named(bend: Callable[..., Any]) -> None:
    """Most of these would broadcast, and give wrong tokens."""

    class Bent(NaiveAttention):
        def attend(self, *parts: Any) -> Any:
            return bend(super().attend(*parts))

    engine = small_engine()
    engine.runner.attention = Bent(cache=engine.memory.storage)
    with pytest.raises(AssertionError, match=r"Bent.attend gave .* is wanted"):
        engine.generate(PROMPTS, FIVE)
    engine.runner.attention = NaiveAttention(cache=engine.memory.storage)
    serves_on(engine)
