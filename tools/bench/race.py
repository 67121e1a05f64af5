"""The fair race: interleaved rounds, medians, checked answers.

Knows contenders only by what they are asked: requests in, tokens out. Knows no engine.
"""

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from tutorial_engine.lab.roofline import Roofline
from tutorial_engine.lab.workload import ragged

OURS, LLAMA = "ours", "llama.cpp"
PEER = "transformers"  # what the others are divided by
PAUSE = 0.01  # seconds between two contenders, in which the threads of the one before go to sleep
WARM_UP_TOKENS = 4  # at most so many per request, in the run that is not timed
Tokens = tuple[int, ...]


class Asked(NamedTuple):
    """One request: continue this prompt by exactly so many greedy tokens, whatever they are."""

    prompt: Tokens
    new_tokens: int


class Answer(NamedTuple):
    """The tokens of one request; where the contender streams, the seconds at which each came."""

    tokens: Tokens
    seconds: tuple[float, ...] = ()

    @property
    def per_token(self) -> float:
        """Seconds per token after the first: decode alone, with the prefill left out."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


class Contender(Protocol):
    """One engine, which is handed all requests at once and serves them its own way."""

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        """The wanted tokens of each request, in the order of the requests."""
        ...


class Agreement(NamedTuple):
    """How far somebody says what the reference says: requests that are equal to the end, and
    tokens before each request's first other one (after it they answer another prompt)."""

    requests: int
    tokens: int


class Race(NamedTuple):
    """What a race gave: answers and seconds of each timed round, and why somebody is missing.

    `warm_up` are the seconds of the short run before: where something is compiled, it is there.
    """

    requests: Sequence[Asked]
    answers: dict[str, list[Sequence[Answer]]]
    samples: dict[str, list[float]]
    failed: dict[str, str]
    roofline: Roofline | None
    warm_up: dict[str, float]

    def agreement(self, reference: str) -> dict[str, Agreement]:
        """Of each contender's first answers with those of the reference."""
        right = self.answers[reference][0]
        return {name: agreement(rounds[0], right) for name, rounds in self.answers.items()}


def one_prompt(length: int, vocab_size: int, new_tokens: int) -> list[Asked]:
    """A prompt of `length` random ids, the same in every run."""
    return [Asked(tuple(random.Random(length).choices(range(vocab_size), k=length)), new_tokens)]


def ragged_requests(num_requests: int, vocab_size: int, max_len: int) -> list[Asked]:
    """`workload.ragged`: prompts of 16 to 256 tokens, 8 to 128 wanted ones, the same in every run.

    ValueError for a model whose context is too short for them.
    """
    arrivals = ragged(num_requests, vocab_size)
    asked = [
        Asked(tuple(map(int, arrival.prompt)), arrival.params.max_tokens) for arrival in arrivals
    ]
    longest = longest_request(asked)
    if longest > max_len:
        raise ValueError(
            f"the ragged requests have up to {longest} tokens, the model at most {max_len}: "
            "leave them out with --requests 0"
        )
    return asked


def longest_request(requests: Sequence[Asked]) -> int:
    """Prompt and output of the longest request, in tokens."""
    return max(len(request.prompt) + request.new_tokens for request in requests)


@torch.inference_mode()
def race(
    contenders: Mapping[str, Contender],
    requests: Sequence[Asked],
    rounds: int,
    optional: Collection[str] = (),
    probe: Callable[[], Roofline] | None = None,
    warm_up: bool = True,
) -> Race:
    """Warm up, then `rounds` rounds in which each serves all requests once, in turn first.

    What slows the machine for a while so slows all of them; `probe` measures its limits in each
    round. The timed runs themselves are checked: each request's wanted tokens, no fewer. An
    optional contender that cannot run is left out, with the reason; others raise.
    """
    names = list(contenders)
    answers: dict[str, list[Sequence[Answer]]] = {name: [] for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    first: dict[str, float] = {}
    limits = []
    short = [
        request._replace(new_tokens=min(request.new_tokens, WARM_UP_TOKENS)) for request in requests
    ]
    for number in range(-1 if warm_up else 0, rounds):
        for name in in_turn(names, number):
            if name in failed:
                continue
            time.sleep(PAUSE)
            began = time.perf_counter()
            try:
                done = contenders[name].serve(short if number < 0 else requests)
                took = time.perf_counter() - began
                _check(name, done, short if number < 0 else requests)
            except Exception as error:  # whatever another engine raises, the others still race
                if name not in optional:
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
                del answers[name], samples[name]
                continue
            if number < 0:
                first[name] = took
            else:
                answers[name].append(done)
                samples[name].append(took)
        if probe is not None and number >= 0:
            time.sleep(PAUSE)
            limits.append(probe())
    roofline = Roofline(*map(statistics.median, zip(*limits, strict=True))) if limits else None
    return Race(requests, answers, samples, failed, roofline, first)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """All of them in the order of a round: another one is first in each; −1 is the warm-up."""
    first = max(number, 0) % len(names)
    return [*names[first:], *names[:first]]


def _check(name: str, done: Sequence[Answer], requests: Sequence[Asked]) -> None:
    """ValueError unless every request got what it wanted, at times that rise."""
    wanted = [request.new_tokens for request in requests]
    if [len(answer.tokens) for answer in done] != wanted:
        raise ValueError(
            f"{name} gave {[len(answer.tokens) for answer in done]} tokens where {wanted} were "
            "asked for: the comparison would not be fair"
        )
    for tokens, seconds in done:
        if seconds and (len(seconds) != len(tokens) or [0.0, *seconds] != sorted([0.0, *seconds])):
            raise ValueError(f"{name} reports times that do not rise from 0: {seconds}")


def agreement(answers: Sequence[Answer], reference: Sequence[Answer]) -> Agreement:
    """Compare two contenders' answers, request by request."""
    pairs = [(a.tokens, b.tokens) for a, b in zip(answers, reference, strict=True)]
    return Agreement(sum(a == b for a, b in pairs), sum(equal_start(a, b) for a, b in pairs))


def equal_start(ours: Tokens, theirs: Tokens) -> int:
    """How many tokens agree before the first that does not."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))
