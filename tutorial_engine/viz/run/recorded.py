"""Requests that come at chosen steps, run by the engine and recorded.

Knows the engine and arrival patterns; knows no picture.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.history import replay
from tutorial_engine.viz.tokens import token_names

MAX_STEPS = 200  # more take too long
ALL_AT_ONCE, ONE_BY_ONE, LATE_LONG = (
    "all at once",
    "one every 3 steps",
    "a long prompt before step 4",
)


class Coming(NamedTuple):
    """A request and when it comes: after so many steps, or earlier if there is nothing to do.

    `max_tokens` of its own, or None for what all have.
    """

    name: str
    prompt: str
    step: int
    max_tokens: int | None = None


def coming(prompts: Sequence[str], pattern: str, long_prompt: str = "") -> list[Coming]:
    """The requests A, B, ... of an arrival pattern, in order."""
    every = 3 if pattern == ONE_BY_ONE else 0
    due = [(prompt, every * i) for i, prompt in enumerate(prompts)]
    if pattern == LATE_LONG:
        due.append((long_prompt, 4))
    return [Coming(chr(ord("A") + i), prompt, step) for i, (prompt, step) in enumerate(due)]


def record(engine: LLMEngine, requests: Sequence[Coming], params: SamplingParams) -> Trace:
    """Let the requests come and step until all are done → what the engine's recorder saw.

    ValueError for what can never run, and for more than MAX_STEPS steps.
    """
    assert engine.trace is not None, "the run is to be recorded"
    left = list(requests)
    while left or engine.has_unfinished_requests():
        while left and (left[0].step <= engine.num_steps or not engine.has_unfinished_requests()):
            request = left.pop(0)
            try:
                limit = request.max_tokens
                asked = params if limit is None else replace(params, max_tokens=limit)
                engine.add_request(request.name, request.prompt, asked)
            except ValueError as error:
                raise ValueError(f"The engine refuses: {error}.") from error
        if engine.num_steps == MAX_STEPS:
            raise ValueError(f"This takes more than {MAX_STEPS} steps: raise the budget.")
        engine.step()
    return engine.trace.trace()


def labels(trace: Trace, tokenizer: Tokenizer) -> dict[int, str]:
    """Token id -> its text, for all tokens of a trace."""
    requests = replay(trace.events).requests.values()
    return token_names(tokenizer, (token for request in requests for token in request.token_ids))
