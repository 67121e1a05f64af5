"""Introduced in notebook 04. The rows of the equality ledger that run on pages.

Knows the engine and its memory from outside; knows no block and no scheduler rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine_paths import EnginePath
from tutorial_engine.model import Qwen3ForCausalLM
from tutorial_engine.paged import PagedKVCache
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.trace import Admitted, Preempted, Recorder

BLOCK_SIZES = (1, 4, 16, 256)


@dataclass(frozen=True)
class PagedPath:
    """A path through an engine on pages. ValueError if it did not do what its name says.

    `warm`: all prompts were served before, and are found. `must_preempt`: the pool is so small that
    some give way and are computed again.
    """

    make_memory: Callable[[Sequence[Sequence[int]], int, Recorder], PagedKVCache]
    make_engine: Callable[[PagedKVCache, Recorder], LLMEngine]
    warm: bool | None = None
    must_preempt: bool = False

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """As ledger.AnyPath.run."""
        recorder = Recorder()
        engine = self.make_engine(self.make_memory(prompts, num_tokens, recorder), recorder)
        if self.warm:
            engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        before = len(recorder.events)
        logits = EnginePath(lambda: engine).run(prompts, num_tokens, tokens)
        events = recorder.events[before:]
        hits = sum(event.num_cached for event in events if isinstance(event, Admitted))
        preemptions = sum(isinstance(event, Preempted) for event in events)
        if self.warm is not None and self.warm != (hits > 0):
            raise ValueError(f"{hits} tokens were found: the prompts are too short, or alike")
        if self.must_preempt and not preemptions:
            raise ValueError("nobody gave way: give more prompts, or ask for more tokens")
        return logits


def paged_paths(
    model: Qwen3ForCausalLM, max_len: int = 128, budget: int = 64
) -> dict[str, PagedPath]:
    """Rows for the ledger, name -> path: each block size, prefixes found, memory that runs out.

    The row that gives way needs two prompts at least, the warm one a prompt of over 4 tokens.
    """

    def engine(memory: PagedKVCache, recorder: Recorder) -> LLMEngine:
        config = EngineConfig(max_model_len=max_len, max_num_batched_tokens=budget)
        return LLMEngine(model, config=config, memory=memory, trace=recorder)

    def pages(block_size: int, caching: bool, scarce: bool = False) -> PagedPath:
        def memory(
            prompts: Sequence[Sequence[int]], num_tokens: int, recorder: Recorder
        ) -> PagedKVCache:
            longest = max(len(prompt) for prompt in prompts) + num_tokens
            room = longest if scarce else max_len * (len(prompts) + 1)
            return PagedKVCache.from_config(
                model.config,
                block_size=block_size,
                num_blocks=-(-room // block_size),
                dtype=model.dtype,
                device=model.device,
                prefix_caching=caching,
                trace=recorder,
            )

        return PagedPath(memory, engine, must_preempt=scarce)

    cold, warm = pages(4, True), pages(4, True)
    return {
        **{f"pages, blocks of {size}": pages(size, False) for size in BLOCK_SIZES},
        "pages, prefix cache, cold": PagedPath(cold.make_memory, engine, warm=False),
        "pages, prefix cache, warm": PagedPath(warm.make_memory, engine, warm=True),
        "pages, preempted and resumed": pages(2, False, scarce=True),
    }
