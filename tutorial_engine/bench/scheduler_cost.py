"""Introduced in notebook 03. What a step costs beside the model, per running request.

A real engine in full decode, whose forward alone is left out: scheduling, the batch's tensors,
greedy choice among 8 logits, update and delivery all happen. Knows the engine; runs no model.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.runner import ModelOutput, ModelRunner
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken

RUNNING = (16, 256, 4096)  # requests
STEPS = 24  # timed, of each kind
PROMPT = (1, 2, 3, 4)
VOCAB = 8
SHAPE: dict[str, Any] = {  # a real model, as small as can be: it is never run
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 4096,
}


class StepCost(NamedTuple):
    """Microseconds per running request of a decode step without its forward; medians.

    `schedule` is the plan, `batch` its tensors, `update` counting and appending; `bookkeeping` all
    three. `step` is the whole of `engine.step()`: those, sampling and delivery.
    """

    running: int
    schedule: float
    batch: float
    update: float
    bookkeeping: float
    step: float
    samples: list[float]  # of bookkeeping


class _IdleRunner(ModelRunner):
    """Builds each batch and runs nothing: the logits are always the same."""

    def run(self, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        """As ModelRunner.run, without the forward."""
        build_batch(scheduled)
        ready = [one for one in scheduled if one.yields_token]
        return ModelOutput(ready, torch.eye(1, VOCAB).expand(len(ready), -1), {})


def build_batch(scheduled: Sequence[ScheduledRequest]) -> Batch:
    """The tensors of a step, as its forward would get them."""
    return Batch.from_allocations(
        [one.token_ids for one in scheduled],
        [one.allocation for one in scheduled],
        [one.request.request_id for one in scheduled],
    )


def measure_step_cost(running: int, steps: int = STEPS) -> StepCost:
    """Let `running` requests decode in step, `steps` times by hand and `steps` times by the engine.

    The two take turns, so that what slows the machine for a while slows both.
    """
    engine = engine_in_decode(running, 2 * steps)
    parts: list[tuple[float, float, float]] = []
    whole: list[float] = []
    for _ in range(steps):
        parts.append(_step_by_hand(engine))
        began = time.perf_counter()
        results = engine.step()
        whole.append(time.perf_counter() - began)
        assert len(results) == running, f"{len(results)} of {running} requests got a token"
    per_request = [[1e6 * seconds / running for seconds in part] for part in parts]
    schedule, batch, update = (statistics.median(part) for part in zip(*per_request, strict=True))
    sums = [sum(part) for part in per_request]
    step = statistics.median(whole) / running * 1e6
    return StepCost(running, schedule, batch, update, statistics.median(sums), step, sums)


def engine_in_decode(running: int, steps: int) -> LLMEngine:
    """An engine whose requests have all run their prompts and want more than `steps` tokens."""
    wanted = steps + 3
    model = Qwen3ForCausalLM(ModelConfig(**SHAPE)).draw_weights().requires_grad_(False)
    config = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=running * len(PROMPT),
        max_model_len=len(PROMPT) + wanted,
    )
    memory = StaticKVCache.from_config(model.config, **config.rows(model.dtype, model.device))
    runner = _IdleRunner(model, memory.storage)
    engine = LLMEngine(model, config=config, memory=memory, runner=runner)
    params = SamplingParams(max_tokens=wanted, ignore_eos=True)
    for _ in range(running):
        engine.add_request(PROMPT, params)
    for _ in range(2):  # the prompts, and a decode that warms up
        engine.step()
    return engine


def _step_by_hand(engine: LLMEngine) -> tuple[float, float, float]:
    """The engine's step without forward, sampling and delivery → seconds of its three parts."""
    began = time.perf_counter()
    scheduled = engine.scheduler.schedule()
    planned = time.perf_counter()
    build_batch(scheduled)
    built = time.perf_counter()
    sampled = {one.request.request_id: SampledToken(0) for one in scheduled}
    ready = time.perf_counter()
    updates = engine.scheduler.update(scheduled, sampled)
    done = time.perf_counter()
    assert len(updates) == len(scheduled), "a request got nothing"
    return planned - began, built - planned, done - ready
