"""Why is my prefix hit rate 0 %? Five real runs, five causes and one that only seems to be one.

In each run A and C ask nearly the same; B comes before one of them and asks for something else.
What one can see of a run is its settings, its prompts and its log. Knows the engine from outside.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, Trace

SHORT = "the prompts are shorter than a block"
BEGINS = "what differs stands at the beginning"
SALT = "the salts differ"
EVICTED = "the blocks were taken for another request in between"
NOT_YET = "no block was full yet when the other one came"
RUNNING = "the other one was still running"  # is believed, and is never the cause
CAUSES = (SHORT, BEGINS, SALT, EVICTED, NOT_YET, RUNNING)

STORY = "Once upon a time Anna had a red kite. Ben had a blue ball."
OTHER = "The little dog was very happy."


class Recipe(NamedTuple):
    """What a run is made of. `together`: A and C come in one step, else C comes when A is over.

    `chunk`: a step runs so many tokens of a request, at most.
    """

    a: str = STORY + " Anna had a dog."
    b: str = OTHER
    c: str = STORY + " Anna had a cat."
    block_size: int = 4
    num_blocks: int = 24
    salts: tuple[str, str, str] = ("", "", "")
    together: bool = False
    chunk: int | None = None


CURES = {
    EVICTED: "a larger pool",
    SHORT: "smaller blocks (10 tokens are hardly worth it)",
    NOT_YET: "larger chunks",
    SALT: "one salt for all who may share",
    BEGINS: "what differs at the end of the prompt",
}
LONG = " ".join([OTHER] * 3)
DOG, CAT = "Once upon a time Anna had a dog.", "Once upon a time Anna had a cat."
MONDAY, FRIDAY = "Monday, 9:15.", "Friday, 10:40."
# cause -> the run that shows it, and the same run without it
RECIPES: dict[str, tuple[Recipe, Recipe]] = {
    EVICTED: (Recipe(b=LONG, num_blocks=11), Recipe(b=LONG, num_blocks=36)),
    SHORT: (Recipe(a=DOG, c=CAT, block_size=16, num_blocks=6), Recipe(a=DOG, c=CAT)),
    NOT_YET: (Recipe(together=True, chunk=3), Recipe(together=True)),
    SALT: (Recipe(salts=("user 1", "", "user 2")), Recipe(salts=("all", "", "all"))),
    BEGINS: (
        Recipe(a=f"{MONDAY} {STORY}", c=f"{FRIDAY} {STORY}"),
        Recipe(a=f"{STORY} {MONDAY}", c=f"{STORY} {FRIDAY}"),
    ),
}


@dataclass(frozen=True)
class Case:
    """A run that found nothing. `cause` is one of RECIPES; `mended_rate` is without the cause."""

    name: str
    trace: Trace = field(repr=False)
    cause: str = field(repr=False)
    mended_rate: float = field(repr=False)
    recipe: Recipe = field(repr=False)

    @property
    def rate(self) -> float:
        """Tokens found, of the prompt tokens of all requests."""
        return hit_rate(self.trace)

    def describe(self) -> str:
        """What one can see: the settings, the prompts with their salts, and the log."""
        recipe, lines = self.recipe, [f"{self.name}: prefix cache hit rate {self.rate:.0%}"]
        chunks = f", at most {recipe.chunk} tokens of a request in a step" if recipe.chunk else ""
        lines.append(f"  {recipe.num_blocks} blocks of {recipe.block_size} tokens{chunks}")
        prompts = zip("ABC", (recipe.a, recipe.b, recipe.c), recipe.salts, strict=True)
        for name, text, salt in prompts:
            lines.append(f"  {name}: {text!r}, salt {salt!r}")
        return "\n".join(lines + [f"  {line}" for line in _log(self.trace)])

    def why_not(self, cause: str) -> str:
        """A fact of this run that rules the cause out. ValueError for its own cause."""
        if cause == self.cause or cause not in CAUSES:
            raise ValueError(f"{cause!r} is not ruled out here; the causes are {CAUSES}")
        asked = {e.request_id: e for e in self.trace.events if isinstance(e, events.Added)}
        a, c = (asked[name].prompt_token_ids for name in "AC")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, c, strict=False)))
        if cause == SHORT:
            full, size = len(a) // self.recipe.block_size, self.recipe.block_size
            return f"the {len(a)} prompt tokens of A fill {full} whole blocks of {size}"
        if cause == BEGINS:
            return f"A and C begin with the same {same} tokens"
        if cause == SALT:
            return f"A and C both have the salt {self.recipe.salts[0]!r}"
        if cause == EVICTED:
            taken = {e.block for e in self.trace.events if isinstance(e, events.BlockTaken)}
            fresh = self.recipe.num_blocks - len(taken)
            return (
                f"{fresh} of {self.recipe.num_blocks} blocks were never used, and no block that "
                "had a hash was taken"
            )
        if cause == NOT_YET and self.cause == SHORT:
            return f"the {len(a)} prompt tokens of A never fill a block of {self.recipe.block_size}"
        if cause == RUNNING and self.recipe.together:
            return "a full block of a request that runs is found as well"
        ends = {e.request_id: e.step for e in self.trace.events if isinstance(e, events.Finished)}
        return f"A was over in step {ends['A']}, and C came in step {asked['C'].step}"


def cure_table(runs: Iterable[Case]) -> str:
    """Run, cause, cure and the hit rate that the same run has with the cure, as text."""
    lines = [("run", "cause", "cure", "hit rate then")]
    for one in runs:
        lines.append((one.name, one.cause, CURES[one.cause], f"{one.mended_rate:.0%}"))
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def hit_rate(trace: Trace) -> float:
    """Tokens that were found when requests were admitted, of all their prompt tokens."""
    asked = {e.request_id: e for e in trace.events if isinstance(e, events.Added)}
    admitted = [e for e in trace.events if isinstance(e, events.Admitted)]
    tokens = sum(len(asked[e.request_id].prompt_token_ids) for e in admitted)
    return sum(e.num_cached for e in admitted) / tokens


def cases(model: CausalLM, tokenizer: Tokenizer) -> list[Case]:
    """The five runs, in an order that tells nothing: "run 1" to "run 5"."""
    runs = []
    for number, (cause, (recipe, mended)) in enumerate(RECIPES.items(), 1):
        trace = _serve(model, tokenizer, recipe)
        rate = hit_rate(_serve(model, tokenizer, mended))
        runs.append(Case(f"run {number}", trace, cause, rate, recipe))
    return runs


def _serve(model: CausalLM, tokenizer: Tokenizer, recipe: Recipe) -> Trace:
    recorder = Recorder()
    memory = PagedKVCache.from_config(
        model.config,
        block_size=recipe.block_size,
        num_blocks=recipe.num_blocks,
        dtype=model.dtype,
        device=model.device,
        trace=recorder,
    )
    config = EngineConfig(long_prefill_token_threshold=recipe.chunk)
    engine = LLMEngine(model, tokenizer, config, memory=memory, clock=VirtualClock())
    prompts = dict(zip("ABC", (recipe.a, recipe.b, recipe.c), strict=True))
    salts = dict(zip("ABC", recipe.salts, strict=True))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for names in ("B", "AC") if recipe.together else "ABC":
        for name in names:
            memory.blocks.use_salt(salts[name])
            engine.add_request(name, prompts[name], params)
        engine.run()
    return recorder.trace()


def _log(trace: Trace) -> list[str]:
    """A line when a request comes (each is admitted at once) and when it is over."""
    lines: list[str] = []
    taken: dict[str, list[str]] = {}
    asked = {e.request_id: e for e in trace.events if isinstance(e, events.Added)}
    for event in trace.events:
        match event:
            case events.BlockTaken(request_id=name, block=block, evicted=evicted):
                taken.setdefault(name, []).append(f"{block}*" if evicted else str(block))
            case events.Admitted(step=step, request_id=name, num_cached=found):
                blocks, n = " ".join(taken.pop(name, [])), len(asked[name].prompt_token_ids)
                line = f"{name} comes with {n} prompt tokens, finds {found}, takes blocks {blocks}"
                lines.append(f"step {step}: {line}")
            case events.Finished(step=step, request_id=name):
                lines.append(f"step {step}: {name} is over")
    if any(isinstance(e, events.BlockTaken) and e.evicted for e in trace.events):
        lines.append("(* its tokens could still be found until now)")
    return lines
