"""Introduced in notebook 04. The explorer of pages: block tables and the pool, step by step.

Runs the real engine on a PagedKVCache with a recorder and shows what block_facts reads from it.
"""

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Added, Recorder, TokenSampled, Trace
from tutorial_engine.viz.block_facts import BlockRun
from tutorial_engine.viz.block_scene import MAX_BLOCKS, MAX_REQUESTS, MAX_SIZE, ZOOM, BlockView
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.scheduler_explorer import ALL_AT_ONCE, ONE_BY_ONE, coming, record
from tutorial_engine.viz.tokens import token_label

ON, OFF = "on", "off"
MAX_BUDGET, MAX_SAMPLES = 512, 4


class BlockExplorer(Explorer):
    """Watch blocks change hands: who has which, what is shared, found, copied, evicted, and free.

    `prompts` become the requests A, B, ...; with n samples per prompt (drawn with seeds 0, 1, ...
    at temperature 1) A is joined by A.1. The knobs run them again through the real engine.
    """

    title = "Block explorer"
    zoom = ZOOM

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int = 6,
        block_size: int = 4,
        num_blocks: int = 16,
        budget: int = 64,
        n: int = 1,
        prefix_caching: bool = True,
        arrivals: str = ONE_BY_ONE,
    ) -> None:
        at_least_one("new_tokens", new_tokens)
        if not 1 <= len(prompts) <= MAX_REQUESTS:
            raise ValueError(f"give 1 to {MAX_REQUESTS} prompts, got {len(prompts)}")
        self.model, self.tokenizer = model, tokenizer
        self.prompts, self.new_tokens = list(prompts), new_tokens
        sizes = {"block size": block_size, "blocks": num_blocks, "token budget": budget, "n": n}
        most = (MAX_SIZE, MAX_BLOCKS, MAX_BUDGET, MAX_SAMPLES)
        numbers = [
            _number(name, value, limit)
            for (name, value), limit in zip(sizes.items(), most, strict=True)
        ]
        super().__init__(
            {
                "block_size": numbers[0],
                "num_blocks": numbers[1],
                "prefix_caching": _choice("prefix caching", [ON, OFF], [OFF, ON][prefix_caching]),
                "n": numbers[3],
                "budget": numbers[2],
                "arrivals": _choice("arrivals", [ALL_AT_ONCE, ONE_BY_ONE], arrivals),
            }
        )

    def rerun(self) -> None:
        """Run all requests through a new engine on a new pool; the trace is all that is kept."""
        n = self.value("n")
        if n * len(self.prompts) > MAX_REQUESTS:
            raise ValueError(
                f"{len(self.prompts)} prompts with {n} samples each are {n * len(self.prompts)} "
                f"requests, and the picture has room for {MAX_REQUESTS}."
            )
        memory = PagedKVCache.from_config(
            self.model.config,
            block_size=self.value("block_size"),
            num_blocks=self.value("num_blocks"),
            dtype=self.model.dtype,
            device=self.model.device,
            prefix_caching=self.value("prefix_caching") == ON,
        )
        engine = LLMEngine(
            self.model,
            self.tokenizer,
            EngineConfig(max_num_batched_tokens=self.value("budget")),
            memory=memory,
            clock=VirtualClock(),
            trace=Recorder(),
        )
        drawn = {"n": n, "temperature": 1.0, "seed": 0} if n > 1 else {}
        params = SamplingParams(max_tokens=self.new_tokens, **drawn)
        trace = record(engine, coming(self.prompts, self.value("arrivals"), ""), params)
        run = BlockRun(trace, labels(trace, self.tokenizer))
        drawing = BlockView(run)  # refuses what it has no room for
        self.run, self.drawing = run, drawing

    @property
    def num_steps(self) -> int:
        """One step a forward."""
        return len(self.run.steps)

    @property
    def start_step(self) -> int:
        """Where it stood, or the last step: so that two settings are compared at the same step."""
        return self.step

    def scene(self, step: int) -> Scene:
        """Logical blocks, block tables and the pool, after the step."""
        return self.drawing.scene(step)

    def caption(self, step: int) -> str:
        """Who has how many blocks, what is wasted, what is free, and what the step changed."""
        return self.run.caption(step)


def labels(trace: Trace, tokenizer: Tokenizer) -> dict[int, str]:
    """Token id -> its text, for all tokens of a trace; `<id 7>` for one that has none."""
    ids: set[int] = set()
    for event in trace.events:
        if isinstance(event, Added):
            ids.update(event.prompt_token_ids)
        elif isinstance(event, TokenSampled):
            ids.add(event.token_id)
    found = {}
    for token in sorted(ids):
        try:
            found[token] = token_label(tokenizer, token)
        except ValueError:  # a checkpoint may have more rows than its tokenizer has tokens
            found[token] = f"<id {token}>"
    return found


def _number(name: str, value: int, most: int) -> Any:
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be from 1 to {most}, got {value}")
    return _laid(widgets.BoundedIntText(value, min=1, max=most, description=name), "150px")


def _choice(name: str, options: Sequence[str], value: str) -> Any:
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
    return _laid(widgets.Dropdown(options=list(options), value=value, description=name), "240px")


def _laid(box: Any, width: str) -> Any:
    box.layout = widgets.Layout(width=width, margin="2px 12px 2px 0")
    box.style.description_width = "initial"
    return box
