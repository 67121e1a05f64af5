"""Introduced in notebook 03. The scheduler explorer: many requests, one forward a step.

Runs the real engine with a recorder and shows what scheduler_steps reads from the trace.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, Trace
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.scheduler_panels import MAX_CELLS
from tutorial_engine.viz.scheduler_scene import SchedulerView
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.tokens import token_label
from tutorial_engine.viz.words import POLICIES

MAX_REQUESTS, MAX_SLOTS, MAX_STEPS = 6, 64, 200  # more would not be readable, or take too long
LONG_PROMPT = (
    "Once upon a time Anna had a red kite. Ben had a blue ball. One day Anna and Ben went to the "
    "park."
)
CLASSES: dict[str, type[Scheduler]] = {
    POLICIES[kind.__name__]: kind for kind in (Scheduler, PrefillFirst, StaticBatching, OneByOne)
}
ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG = (
    "all at once",
    "one every 3 steps",
    "a long prompt before step 4",
)


class Coming(NamedTuple):
    """A request and when it comes: after so many steps, or earlier if there is nothing to do."""

    name: str
    prompt: str
    step: int


def coming(prompts: Sequence[str], pattern: str, long_prompt: str) -> list[Coming]:
    """The requests A, B, ... of an arrival pattern, in order."""
    if pattern == LATE_LONG:
        prompts = [*prompts, long_prompt]
    every = 3 if pattern == ONE_BY_ONE else 0
    steps = [every * i for i in range(len(prompts))]
    if pattern == LATE_LONG:
        steps[-1] = 4
    names = (chr(ord("A") + i) for i in range(len(prompts)))
    return [Coming(*one) for one in zip(names, prompts, steps, strict=True)]


def record(engine: LLMEngine, requests: Sequence[Coming], params: SamplingParams) -> Trace:
    """Let the requests come and step until all are done → what the engine's recorder saw.

    ValueError for what can never run, and for more than MAX_STEPS steps.
    """
    assert engine.trace is not None, "the run is to be recorded"
    left = list(requests)
    while left or engine.has_unfinished_requests:
        while left and (left[0].step <= engine.num_steps or not engine.has_unfinished_requests):
            one = left.pop(0)
            try:
                engine.add_request(one.prompt, params, one.name)
            except ValueError as error:
                raise ValueError(f"The engine refuses: {error}.") from error
        if engine.num_steps == MAX_STEPS:
            raise ValueError(f"This takes more than {MAX_STEPS} steps: raise the budget.")
        engine.step()
    return engine.trace.trace()


class SchedulerExplorer(Explorer):
    """Watch requests share forwards: who runs how many tokens, who waits, and why.

    `prompts` become the requests A, B, ...; the knobs run them again through the real engine.
    """

    title = "Scheduler explorer"

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int = 6,
        budget: int = 8,
        max_num_seqs: int = 3,
        long_prompt: str = LONG_PROMPT,
    ) -> None:
        at_least_one("new_tokens", new_tokens)
        if not 1 <= len(prompts) < MAX_REQUESTS:
            raise ValueError(f"give 1 to {MAX_REQUESTS - 1} prompts, got {len(prompts)}")
        self.model, self.tokenizer = model, tokenizer
        self.prompts, self.long_prompt = list(prompts), long_prompt
        self.params = SamplingParams(max_tokens=new_tokens)

        def choice(name: str, options: Sequence[str], width: str) -> widgets.Dropdown:
            box = widgets.Dropdown(options=list(options), description=name)
            return _laid(box, width)

        def number(name: str, value: int, most: int) -> widgets.BoundedIntText:
            box = widgets.BoundedIntText(value, min=1, max=most, description=name)
            return _laid(box, "180px")

        super().__init__(
            {
                "policy": choice("policy", list(CLASSES), "210px"),
                "budget": number("token budget", budget, MAX_CELLS),
                "max_num_seqs": number("max_num_seqs", max_num_seqs, MAX_REQUESTS),
                "arrivals": choice("arrivals", [ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG], "280px"),
            }
        )

    def rerun(self) -> None:
        """Run all requests through a new engine; its trace is all that is kept."""
        requests = coming(self.prompts, self.value("arrivals"), self.long_prompt)
        lens = [len(self.tokenizer.encode(one.prompt).ids) for one in requests]
        longest = max(lens) + self.params.max_tokens
        room = min(MAX_SLOTS, self.model.config.max_position_embeddings)
        if longest > room:
            raise ValueError(
                f"A prompt of {max(lens)} tokens and {self.params.max_tokens} new ones need "
                f"{longest} slots, and the picture has rows of {room}: shorten it."
            )
        config = EngineConfig(
            max_num_seqs=self.value("max_num_seqs"),
            max_num_batched_tokens=self.value("budget"),
            max_model_len=min(-(-longest // 4) * 4, room),
        )
        engine = LLMEngine(
            self.model,
            self.tokenizer,
            config,
            scheduler=CLASSES[self.value("policy")],
            clock=VirtualClock(),
            trace=Recorder(),
        )
        trace = record(engine, requests, self.params)
        self.run = SchedulerRun(trace, self._labels(trace))
        self.drawing = SchedulerView(self.run)

    @property
    def num_steps(self) -> int:
        """One step a forward."""
        return len(self.run.steps)

    @property
    def start_step(self) -> int:
        """Where it stood, or the last step: so that policies are compared at the same step."""
        return self.step

    def scene(self, step: int) -> Scene:
        """All five views of the step."""
        return self.drawing.scene(step)

    def caption(self, step: int) -> str:
        """Who ran what, who waits and why, and time to first token."""
        return self.run.caption(step)

    def _labels(self, trace: Trace) -> dict[int, str]:
        labels = {}
        for token in {t for ids in SchedulerRun(trace, {}).tokens.values() for t in ids}:
            try:
                labels[token] = token_label(self.tokenizer, token)
            except ValueError:  # a checkpoint may have more rows than its tokenizer has tokens
                labels[token] = f"<id {token}>"
        return labels


def _laid(box: Any, width: str) -> Any:
    box.layout = widgets.Layout(width=width, margin="2px 12px 2px 0")
    box.style.description_width = "initial"
    return box
