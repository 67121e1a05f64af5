"""The explorer of pages: block tables and the pool, step by step.

Runs the real engine on a PagedKVCache with a recorder and shows what `run` reads from it.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.explorers.explorer import Explorer, choice, number
from tutorial_engine.viz.run.block_run import BlockRun
from tutorial_engine.viz.run.recorded import ALL_AT_ONCE, ONE_BY_ONE, coming, labels, record
from tutorial_engine.viz.views.block_view import MAX_REQUESTS, ZOOM, BlockView, SimpleBlockView
from tutorial_engine.viz.words import counted

ON, OFF = "on", "off"
MAX_BUDGET, MAX_SAMPLES = 512, 4


class BlockExplorer(Explorer):
    """Watch blocks change hands: who has which, what is shared, found, copied, evicted, and free.

    `prompts` become the requests A, B, ...; with n samples per prompt (drawn with seeds 0, 1, ...
    at temperature 1) A is joined by A.1. The knobs run them again through the real engine.
    `simple`: tokens in the pool and lines to it, without prefix cache and samples.
    """

    title = "Block explorer"
    zoom = ZOOM
    stands = "same"  # so that two settings are compared at the same step

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int = 6,
        block_size: int = 4,
        num_blocks: int = 16,
        n: int = 1,
        arrivals: str = ONE_BY_ONE,
        simple: bool = False,
    ) -> None:
        at_least_one("new_tokens", new_tokens)
        if not 1 <= len(prompts) <= MAX_REQUESTS:
            raise ValueError(f"give 1 to {MAX_REQUESTS} prompts, got {len(prompts)}")
        self.model, self.tokenizer = model, tokenizer
        self.prompts, self.new_tokens = list(prompts), new_tokens
        self.simple = simple
        self.title = "Pages explorer" if simple else self.title
        _, most_blocks, most_size = (SimpleBlockView if simple else BlockView).limits
        knobs: dict[str, Any] = {
            "block_size": number("block size", block_size, 1, most_size),
            "num_blocks": number("blocks", num_blocks, 1, most_blocks),
            "budget": number("token budget", 64, 1, MAX_BUDGET),
            "arrivals": choice("arrivals", [ALL_AT_ONCE, ONE_BY_ONE], arrivals),
        }
        if not simple:
            knobs["prefix_caching"] = choice("prefix caching", [ON, OFF], ON)
            knobs["n"] = number("n", n, 1, min(MAX_SAMPLES, MAX_REQUESTS // len(prompts)))
        super().__init__(knobs)

    def rerun(self) -> int:
        """Run all requests through a new engine on a new pool; the trace is all that is kept."""
        n = 1 if self.simple else self.value("n")
        longest = max(len(self.tokenizer.encode(prompt).ids) for prompt in self.prompts)
        asked, least = self.value("num_blocks"), ceil((longest + 1) / self.value("block_size"))
        if asked < least:
            self.note = (
                f"The longest prompt has {longest} tokens and needs room for one more, so this run "
                f"has {counted(least, 'block')} and not {asked}."
            )
        memory = PagedKVCache.from_config(
            self.model.config,
            block_size=self.value("block_size"),
            num_blocks=max(asked, least),
            dtype=self.model.dtype,
            device=self.model.device,
            prefix_caching=not self.simple and self.value("prefix_caching") == ON,
            trace=Recorder(),
        )
        engine = LLMEngine(
            self.model,
            self.tokenizer,
            EngineConfig(max_num_batched_tokens=self.value("budget")),
            memory=memory,
            clock=VirtualClock(),
        )
        drawn: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 0} if n > 1 else {}
        params = SamplingParams(max_tokens=self.new_tokens, **drawn)
        trace = record(engine, coming(self.prompts, self.value("arrivals")), params)
        run = BlockRun.of(trace, labels(trace, self.tokenizer))
        # refuses what it has no room for
        self.drawing = SimpleBlockView(run) if self.simple else BlockView(run)
        self.run = run
        return len(run.steps)

    def scene(self, step: int) -> Scene:
        """Logical blocks, block tables and the pool, after the step."""
        return self.drawing.scene(step)

    def caption(self, step: int) -> str:
        """Who has how many blocks, what is wasted, what is free, and what the step changed."""
        return self.run.caption(step)
