"""The check of `slots_for`: who gives way when memory is out.

First with requests that are letters; then in the real engine.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.exercises.facts import AsIs, told
from tutorial_engine.learn.exercises.judge import Slips, judge, slips_of
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict
from tutorial_engine.learn.parts.holder import PartFailed, Parts
from tutorial_engine.learn.parts.scheduler import PARTS_03, slots_for, with_parts
from tutorial_engine.learn.stories.eager_pages import crowd, tokens
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.trace.events import Preempted

# (request, running, allocate(request), preempt(victim)) → the slots, or None
SlotsFor = Callable[[Any, list[Any], Callable[[Any], Any], Callable[[Any], None]], Any]
CASES = (  # who asks, of so many that run, and how many of them must give way before there is room
    ("A", "AB", 0),
    ("A", "AB", 1),
    ("B", "AB", 1),  # who asks is the last itself
    ("A", "ABC", 0),
    ("A", "ABC", 1),
    ("A", "ABC", 2),  # one victim is not enough
    ("B", "ABC", 2),  # nor here, and then it is the turn of B itself
    ("A", "ABCD", 2),
    ("A", "ABCDE", 3),
    ("C", "ABC", 1),
    ("B", "ABCD", 3),
)
PROMPTS = ([65] * 10, [66] * 7, [67] * 3)
BLOCKS = (6, 64)  # so few that somebody has to give way, and room for all; of 4 slots each


class _Letter:
    """Stands for a request; equal to itself only, as a request is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class _Played(AsIs):
    """What came of a case, in words; and what was called."""

    calls = ""


GIVE_WAY_SLIPS: Slips = slips_of(
    slots_for,
    """
    running[-1] → running[0]
        lets the first of `running` give way; the last one is the victim
    (slots := allocate(request)) is → slots := allocate(request) is
        gives True or False; the slots are asked for ▸ (slots := allocate(request)) is None
    while (slots → if (slots
    return slots → return slots or allocate(request)
        lets at most one give way; one may not be enough, and then the next one is the victim
    preempt(victim) → victim is request or preempt(victim)
        never lets the asking request give way; it is the victim if it is the last of `running`
    running[-1] → [one for one in running if one is not request][-1]
        lets the last of the others give way; the last of `running` is the victim, also if it is the
        one that asks
    return slots → return None
        gives None, also where there is room; then the slots are asked for
    """,
) | {
    "never asks again, and all give way; what one victim gives back may be enough": (
        lambda request, running, allocate, preempt: slots_for(
            request, running, cache(allocate), preempt
        )
    ),
}


def check_slots_for(function: SlotsFor) -> Verdict:
    """Check a learner's slots_for(request, running, allocate, preempt) → slots or None."""
    model = load_model()

    def in_the_engine(function: SlotsFor) -> str:
        try:
            (few, _), (many, _) = (_served(function, model, blocks) for blocks in BLOCKS)
        except PartFailed as failed:
            return f"in the engine {failed}"
        return "" if few == many else "in the engine the requests get other tokens"

    gave_way = " and ".join(_served(slots_for, model, BLOCKS[0])[1])
    return judge(
        *("slots_for", function, slots_for, CASES, GIVE_WAY_SLIPS),
        f"slots_for: in an engine with {4 * BLOCKS[0]} slots {gave_way} gave way, and all tokens "
        "are right",
        call=_played,
        inputs=_inputs,
        also={"your calls": lambda got, *_: got.calls},
        then=in_the_engine,
    )


def _inputs(asks: str, run: str, needed: int) -> dict[str, object]:
    room = f"as soon as {needed} gave way" if needed else "at once"
    return {"request": AsIs(asks), "running": [*map(_Letter, run)], "there is room": AsIs(room)}


def _played(function: SlotsFor, asks: str, run: str, needed: int) -> _Played:
    """What came of a case. CannotBe for calls that cannot be, with the input and all calls."""
    running = [_Letter(name) for name in run]
    served = running[run.index(asks)]
    gave_way, answers, calls = list[_Letter](), list[str | None](), list[str]()

    def cannot_be(why: str) -> CannotBe:
        facts = _inputs(asks, run, needed) | {"your calls": AsIs(", ".join(calls) or "none")}
        return CannotBe(f"{why}:\n{told(facts)}")

    def allocate(request: object) -> str | None:
        calls.append(f"allocate({request!r})")
        if request is not served:
            raise cannot_be(f"allocate is called for {request!r}, and it is {asks} that asks")
        if served in gave_way:
            raise cannot_be(
                f"allocate({asks}) is called after {asks} gave way; then None is to be returned"
            )
        if any(answers):
            raise cannot_be(f"allocate({asks}) is called again after it gave slots")
        if len(answers) == 2 * len(run):
            raise cannot_be(f"allocate({asks}) gave None {len(answers)} times, and is called again")
        answers.append(f"slots of {asks}" if len(gave_way) >= needed else None)
        calls[-1] += f" → {'slots' if answers[-1] else None}"
        return answers[-1]

    def preempt(victim: Any) -> None:
        calls.append(f"preempt({victim!r})")
        if victim not in running:
            raise cannot_be(f"preempt({victim!r}) is called, and {victim!r} is not in running")
        gave_way.append(victim)
        running.remove(victim)

    answer = function(served, running, allocate, preempt)
    who = ", ".join(victim.name for victim in gave_way) or "nobody"
    played = _Played(f"returns {answer!r}; {who} gave way")
    played.calls = ", ".join(calls) or "none"
    return played


def _served(
    function: SlotsFor, model: CausalLM, num_blocks: int
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The tokens of three requests in a pool of so many blocks of 4, and who gave way."""
    parts = Parts({**PARTS_03, "slots_for": slots_for}, "engine")
    parts.own["slots_for"] = function
    scheduler = with_parts(Scheduler, parts)
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "max_tokens": 6, "budget": 16, "chunk": 16}
    trace = crowd(PagedKVCache, model, PROMPTS, **sizes, prefix_caching=True, scheduler=scheduler)
    return tokens(trace), [
        event.request_id for event in trace.events if isinstance(event, Preempted)
    ]
