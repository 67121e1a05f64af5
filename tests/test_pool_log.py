"""vLLM's two log lines: the numbers are those that the memory keeps when it is filled."""

from collections.abc import Callable

import pytest

from tutorial_engine.cache import CellKVCache, PagedKVCache, StaticKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.lab.pool_log import max_concurrency, pool_log
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

MEMORIES: dict[str, Callable[[Qwen3ForCausalLM], KVMemory]] = {
    "pages of 4": lambda m: PagedKVCache.from_config(m.config, block_size=4, num_blocks=12),
    "pages of 16": lambda m: PagedKVCache.from_config(m.config, block_size=16, num_blocks=9),
    "cells": lambda m: CellKVCache.from_config(m.config, 50),
    "rows": lambda m: StaticKVCache.from_config(m.config, max_seqs=3, max_len=40),
}


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("length", [1, 13, 16, 40])
def test_so_many_requests_of_this_length_fit_and_no_more(
    name: str, length: int, model: Qwen3ForCausalLM
) -> None:
    memory, fit = MEMORIES[name](model), 0
    while memory.allocate(f"r{fit}", range(100 * fit, 100 * fit + length), 0, length):
        fit += 1
    assert fit == int(max_concurrency(memory, length)) > 0


def test_the_lines_are_vllms(model: Qwen3ForCausalLM) -> None:
    assert pool_log(MEMORIES["pages of 16"](model), 100).splitlines() == [
        "KV cache size: 144 tokens",
        "Maximum concurrency for 100 tokens per request: 1.29x",
    ]
    assert "1,000 tokens per request: 0.05x" in pool_log(MEMORIES["cells"](model), 1000)
    with pytest.raises(ValueError, match="max_model_len"):
        pool_log(MEMORIES["cells"](model), 0)
