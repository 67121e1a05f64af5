"""The scheduler explorer: many requests, one forward a step.

Runs the real engine with a recorder and shows what `run` reads from the trace.
"""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, Trace
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.explorers.explorer import Explorer, choice, number
from tutorial_engine.viz.run.recorded import (
    ALL_AT_ONCE,
    LATE_LONG,
    ONE_BY_ONE,
    coming,
    labels,
    record,
)
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.views.scheduler_view import MAX_CELLS, SchedulerView
from tutorial_engine.viz.words import POLICIES

MAX_REQUESTS, MAX_SLOTS = 6, 64  # more would not be readable
LONG_PROMPT = (
    "Once upon a time Anna had a red kite. Ben had a blue ball. One day Anna and Ben went to the "
    "park."
)
CLASSES: dict[str, type[Scheduler]] = {
    POLICIES[kind.__name__]: kind for kind in (Scheduler, PrefillFirst, StaticBatching, OneByOne)
}


MINE = "mine"
STEPS, DETAILS = "the steps", "the steps, the cache and all tokens"
Mine = Callable[[], tuple[type[Scheduler], str]]  # a scheduler, and a sentence about it


class SchedulerExplorer(Explorer):
    """Watch requests share forwards: who runs how many tokens, who waits, and why.

    `prompts` become the requests A, B, ...; the knobs run them again through the real engine.
    `new_tokens`: for each, or for all. `trace` is the run that is shown. `details`: begin with the
    cache and all tokens in view. `mine` gives the policy "mine", asked anew for each run; where it
    fails the run is shown up to there.
    """

    title = "Scheduler explorer"
    stands = "same"  # so that policies are compared at the same step
    zoom = 1.3

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int | Sequence[int] = 6,
        budget: int = 8,
        max_num_seqs: int = 3,
        details: bool = False,
        mine: Mine | None = None,
    ) -> None:
        if not 1 <= len(prompts) < MAX_REQUESTS:
            raise ValueError(f"give 1 to {MAX_REQUESTS - 1} prompts, got {len(prompts)}")
        wanted = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
        if len(wanted) != len(prompts):
            raise ValueError(f"new_tokens: give one number, or {len(prompts)}, got {wanted}")
        for count in wanted:
            at_least_one("new_tokens", count)
        self.wanted = wanted
        self.model, self.tokenizer = model, tokenizer
        self.prompts = list(prompts)
        self.params = SamplingParams(max_tokens=max(wanted), ignore_eos=True)
        self.mine = mine
        arrivals = [ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG]
        policies = [*CLASSES, *([MINE] if mine else [])]
        super().__init__(
            {
                "budget": number("token budget", budget, 1, MAX_CELLS, "180px"),
                "max_num_seqs": number("max_num_seqs", max_num_seqs, 1, MAX_REQUESTS, "180px"),
                "policy": choice("policy", policies, policies[0], "210px"),
                "arrivals": choice("arrivals", arrivals, ALL_AT_ONCE, "280px"),
                "show": choice("show", [STEPS, DETAILS], DETAILS if details else STEPS, "320px"),
            }
        )

    @property
    def trace(self) -> Trace:
        """The run that is shown, as its engine recorded it."""
        return self.run.trace

    def rerun(self) -> int:
        """Run all requests through a new engine; its trace is all that is kept."""
        requests = coming(self.prompts, self.value("arrivals"), LONG_PROMPT)
        for i, count in enumerate(self.wanted):  # the long one wants as many as any
            requests[i] = requests[i]._replace(max_tokens=count)
        longest_prompt = max(len(self.tokenizer.encode(request.prompt).ids) for request in requests)
        longest = longest_prompt + self.params.max_tokens
        room = min(MAX_SLOTS, self.model.config.max_position_embeddings)
        if longest > room:
            raise ValueError(
                f"A prompt of {longest_prompt} tokens and {self.params.max_tokens} new ones need "
                f"{longest} slots, and the picture has rows of {room}: shorten it."
            )
        scheduler, self.note = self._policy()
        budget = self.value("budget")
        if not scheduler.can_chunk and budget < longest_prompt:
            self.note = (
                f"“{self.value('policy')}” runs a prompt in one step. The longest has "
                f"{longest_prompt} tokens, so this run has a budget of {longest_prompt} and not of "
                f"{budget}."
            )
            budget = longest_prompt
        config = EngineConfig(
            max_num_seqs=self.value("max_num_seqs"),
            max_num_batched_tokens=budget,
            max_model_len=min(-(-longest // 4) * 4, room),
        )
        engine = LLMEngine(
            self.model,
            self.tokenizer,
            config,
            scheduler=scheduler,
            clock=VirtualClock(),
            trace=Recorder(),
        )
        try:
            trace = record(engine, requests, self.params)
        except Exception as error:  # the learner's rule may do anything at all
            if self.value("policy") != MINE:
                raise
            self.note += f" It stops before step {engine.num_steps}: {error}"
            if not engine.num_steps:
                raise ValueError(self.note) from error
            trace = engine.trace.trace()  # type: ignore[union-attr]  # it is recorded
        self.run = SchedulerRun.of(trace, labels(trace, self.tokenizer))
        self.drawing = SchedulerView(self.run, self.value("show") == DETAILS)
        return len(self.run.steps)

    def _policy(self) -> tuple[type[Scheduler], str]:
        """The scheduler of the knob's position, and what there is to say about it."""
        if self.value("policy") == MINE and self.mine is not None:
            return self.mine()
        return CLASSES[self.value("policy")], ""

    def scene(self, step: int) -> Scene:
        """The timeline, the budget, the requests; and what `show` asks for."""
        return self.drawing.scene(step)

    def caption(self, step: int) -> str:
        """Who ran what, who waits and why, who is done."""
        return self.run.caption(step)
