"""Introduced in notebook 04. The rows of the equality ledger that run on pages and on cells.

Knows the engine and its memory from outside; knows no block and no scheduler rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVCacheManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.lab.engine_paths import EnginePath
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, Forked, Preempted, Recorder

BLOCK_SIZES = (1, 4, 16, 256)


@dataclass(frozen=True)
class MemoryPath:
    """A path through an engine on a memory. ValueError if it did not do what its name says.

    `make_memory` is told how many tokens it should hold. `warm`: all prompts were served before,
    and are found. `scarce`: the memory holds one request, so that others give way and are computed
    again. With `samples`, the logits are those of a prompt's last continuation.
    """

    model: Qwen3ForCausalLM
    make_memory: Callable[[int], KVCacheManager]
    max_len: int
    budget: int
    warm: bool | None = None
    scarce: bool = False
    samples: int = 1

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """As ledger.AnyPath.run."""
        longest = max(len(prompt) for prompt in prompts) + num_tokens
        room = longest if self.scarce else self.max_len * (self.samples * len(prompts) + 1)
        config = EngineConfig(max_model_len=self.max_len, max_num_batched_tokens=self.budget)
        recorder = Recorder()
        memory = self.make_memory(room)
        engine = LLMEngine(self.model, config=config, memory=memory, trace=recorder)
        if self.warm:
            engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        before = len(recorder.events)
        logits = EnginePath(lambda: engine, samples=self.samples).run(prompts, num_tokens, tokens)
        self._check(recorder, before)
        return logits

    def _check(self, recorder: Recorder, before: int) -> None:
        events = recorder.events[before:]
        hits = sum(event.num_cached for event in events if isinstance(event, Admitted))
        if self.warm is not None and self.warm != (hits > 0):
            raise ValueError(f"{hits} tokens were found: the prompts are too short, or alike")
        if self.scarce and not any(isinstance(event, Preempted) for event in events):
            raise ValueError("nobody gave way: give more prompts, or ask for more tokens")
        shared = [event.num_tokens for event in events if isinstance(event, Forked)]
        if self.samples > 1 and not any(shared):
            raise ValueError("nothing was shared: the prompts are too short")


def memory_paths(
    model: Qwen3ForCausalLM, max_len: int = 128, budget: int = 64
) -> dict[str, MemoryPath]:
    """Rows for the ledger, name -> path: blocks of each size, prefixes found, forks, cells.

    And memory that runs out: that takes two prompts at least; the warm row a prompt of over 4
    tokens.
    """

    def pages(
        size: int, caching: bool = False, warm: bool | None = None, scarce: bool = False, n: int = 1
    ) -> MemoryPath:
        def memory(num_tokens: int) -> PagedKVCache:
            return PagedKVCache.from_config(
                model.config,
                block_size=size,
                num_blocks=-(-num_tokens // size),
                dtype=model.dtype,
                device=model.device,
                prefix_caching=caching,
            )

        return MemoryPath(model, memory, max_len, budget, warm, scarce, n)

    def cells(scarce: bool = False, n: int = 1) -> MemoryPath:
        def memory(num_tokens: int) -> CellKVCache:
            return CellKVCache.from_config(
                model.config, num_tokens, dtype=model.dtype, device=model.device
            )

        return MemoryPath(model, memory, max_len, budget, None, scarce, n)

    return {
        **{f"pages, blocks of {size}": pages(size) for size in BLOCK_SIZES},
        "pages, prefix cache, cold": pages(4, caching=True, warm=False),
        "pages, prefix cache, warm": pages(4, caching=True, warm=True),
        "pages, preempted and resumed": pages(2, scarce=True),
        "pages, forked": pages(4, n=2),
        "cells": cells(),
        "cells, preempted and resumed": cells(scarce=True),
        "cells, forked": cells(n=2),
    }
