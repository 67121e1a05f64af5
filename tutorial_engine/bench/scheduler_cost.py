"""Introduced in notebook 03. What a step costs beside the model, per running request.

A real engine in full decode, whose forward alone is left out: scheduling, the batch's tensors,
greedy choice among 8 logits, update and delivery all happen. Knows the engine; runs no model.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tutorial_engine.cache_config import CacheConfig
from tutorial_engine.cells import CellKVCache
from tutorial_engine.config import ModelConfig
from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.kv_manager import KVCacheManager, RowManager
from tutorial_engine.model import Qwen3ForCausalLM
from tutorial_engine.model_runner import ModelRunner, Outcome
from tutorial_engine.paged import PagedKVCache
from tutorial_engine.request import Request
from tutorial_engine.sampling import SampledToken, Sampler
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.scheduler import ScheduledRequest
from tutorial_engine.stopping import StopChecker

RUNNING = (16, 256, 4096)  # requests
ALLOCATING = 64  # requests
BLOCK_SIZES = (1, 16)  # tokens
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

    def run(self, scheduled: Sequence[ScheduledRequest]) -> Outcome:
        """As ModelRunner.run, without the forward."""
        self.batch(scheduled)
        ready = [share for share in scheduled if share.yields_token]
        return Outcome(ready, torch.eye(1, VOCAB).expand(len(ready), -1), {})


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
    model = Qwen3ForCausalLM(ModelConfig(**SHAPE)).requires_grad_(False)
    config = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=running * len(PROMPT),
        max_model_len=len(PROMPT) + wanted,
    )
    engine = LLMEngine(model, config=config)
    engine.model_runner = _IdleRunner(model, engine.memory.storage)
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
    engine.model_runner.batch(scheduled)
    built = time.perf_counter()
    sampled = {share.request.request_id: SampledToken(0) for share in scheduled}
    ready = time.perf_counter()
    updates = list(engine.scheduler.update(scheduled, sampled))
    done = time.perf_counter()
    assert len(updates) == len(scheduled), "a request got nothing"
    return planned - began, built - planned, done - ready


# ---- the memory's part of it


class AllocationCost(NamedTuple):
    """Microseconds per running request of a decode step that a memory's books cost; medians.

    `free` is the giving back of everything in the end, divided among the steps; `together` is all
    three. `samples` are those of allocate and commit.
    """

    memory: str
    running: int
    allocate: float
    commit: float
    free: float
    together: float
    samples: list[float]


def measure_allocation(
    running: int = ALLOCATING, steps: int = 64, prompt_len: int = 128
) -> list[AllocationCost]:
    """Let requests decode side by side on rows, pages and cells: only the books are kept.

    Their prompts are unequally long, so that in each step as many as usual need a new block. None
    of them begin alike; the prefix cache is on. Lengths are about the ragged requests' means.
    """
    config = ModelConfig(**SHAPE)
    most = prompt_len + 16 + steps + 1  # tokens of one request
    pages = {
        f"pages, blocks of {size}": PagedKVCache.from_config(
            config, block_size=size, num_blocks=running * -(-most // size)
        )
        for size in BLOCK_SIZES
    }
    memories: dict[str, KVCacheManager] = {
        "rows": RowManager.from_config(config, CacheConfig(max_seqs=running, max_len=most)),
        **pages,
        "cells": CellKVCache.from_config(config, running * most),
    }
    return [
        _allocation_cost(name, memory, running, steps, prompt_len)
        for name, memory in memories.items()
    ]


def _allocation_cost(
    name: str, memory: KVCacheManager, running: int, steps: int, prompt_len: int
) -> AllocationCost:
    requests = _requests(running, prompt_len)
    parts = []  # seconds of this thread: the books use no other
    for step in range(steps + 1):
        began = time.thread_time()
        for request in requests:
            assert memory.allocate(request, request.num_new_tokens), "there is memory for all"
        planned = time.thread_time()
        for request in requests:
            memory.commit(request, request.num_new_tokens)
        if step:  # the first is the admission of the prompts
            parts.append((planned - began, time.thread_time() - planned))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(step % VOCAB)
    began = time.thread_time()
    for request in requests:
        memory.free(request)
    free = 1e6 * (time.thread_time() - began) / running / steps
    memory.check_integrity()
    per_request = [[1e6 * seconds / running for seconds in part] for part in parts]
    allocate, commit = (statistics.median(part) for part in zip(*per_request, strict=True))
    sums = [sum(part) for part in per_request]
    together = statistics.median(sums) + free
    return AllocationCost(name, running, allocate, commit, free, together, sums)


def _requests(running: int, prompt_len: int) -> list[Request]:
    """Requests that are not queued anywhere."""
    params = SamplingParams(max_tokens=SHAPE["max_position_embeddings"])
    draw = random.Random(0)
    prompts = [draw.choices(range(VOCAB), k=prompt_len + i % 16) for i in range(running)]
    return [
        Request(f"r{i}", prompt, Sampler(params), StopChecker(params))
        for i, prompt in enumerate(prompts)
    ]
