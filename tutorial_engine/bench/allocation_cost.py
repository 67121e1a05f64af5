"""Introduced in notebook 04. What a memory costs a running request: allocate, commit, free.

Rows, pages and cells, with requests that nobody schedules; no forward, no engine.
"""

import random
import statistics
import time
from typing import NamedTuple

from tutorial_engine.bench.scheduler_cost import SHAPE, VOCAB
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.sampling.params import SamplingParams

ALLOCATING = 64  # requests
BLOCK_SIZES = (1, 16)  # tokens


class AllocationCost(NamedTuple):
    """Microseconds per running request of a decode step that a memory costs; medians.

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
    """Let requests decode side by side on rows, pages and cells: no forward runs.

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
    memories: dict[str, KVMemory] = {
        "rows": StaticKVCache.from_config(config, max_seqs=running, max_len=most),
        **pages,
        "cells": CellKVCache.from_config(config, running * most),
    }
    return [
        _allocation_cost(name, memory, running, steps, prompt_len)
        for name, memory in memories.items()
    ]


def _allocation_cost(
    name: str, memory: KVMemory, running: int, steps: int, prompt_len: int
) -> AllocationCost:
    requests = _requests(running, prompt_len)
    parts = []  # seconds of this thread: memories use no other
    for step in range(steps + 1):
        began = time.thread_time()
        for request in requests:
            computed, new = request.num_computed_tokens, request.num_new_tokens
            allocation = memory.allocate(request.request_id, request.token_ids, computed, new)
            assert allocation, "there is memory for all"
        planned = time.thread_time()
        for request in requests:
            memory.commit(request.request_id, request.token_ids, request.num_tokens)
        if step:  # the first is the admission of the prompts
            parts.append((planned - began, time.thread_time() - planned))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(step % VOCAB)
    began = time.thread_time()
    for request in requests:
        memory.free(request.request_id)
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
    return [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
