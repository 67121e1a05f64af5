"""The race of servers: many requests of unequal lengths, all at once.

Knows servers only by what they are asked: requests in, each one's wanted tokens out. Interleaved
rounds, medians and checked answers as in `measure`; knows no engine.
"""

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from tools.bench.measure import PAUSE, PEER, equal_start, in_turn
from tutorial_engine.lab.workload import Arrival, ragged

WARM_UP_TOKENS = 4  # at most so many per request, in the run that is not timed
Tokens = tuple[int, ...]


class Asked(NamedTuple):
    """One request: continue this prompt by exactly so many greedy tokens, whatever they are."""

    prompt: Tokens
    new_tokens: int


class Server(Protocol):
    """One engine that is handed all requests at once and batches them its own way."""

    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """The wanted tokens of each request, in the order of the requests; nothing more counts."""
        ...


class Agreement(NamedTuple):
    """How far a server says what the reference says: requests that are equal to the end, and
    tokens before each request's first other one (after it they answer another prompt)."""

    requests: int
    tokens: int


class Serving(NamedTuple):
    """All that one ragged workload gave. Medians of seconds; ratios above 1 = faster than the peer.

    `agreement` is with `reference`'s answers in the first timed round; `failed` says why a server
    is missing.
    """

    num_requests: int
    prompt_tokens: int
    wanted_tokens: int
    seconds: dict[str, float]
    wanted_per_second: dict[str, float]
    ratio: dict[str, float]
    samples: dict[str, list[float]]
    reference: str
    agreement: dict[str, Agreement]
    failed: dict[str, str]


def ragged_requests(num_requests: int, vocab_size: int, max_len: int) -> list[Asked]:
    """`workload.ragged`: prompts of 16 to 256 tokens, 8 to 128 wanted ones, the same in every run.

    ValueError for a model whose context is too short for them.
    """
    asked = [_asked(arrival) for arrival in ragged(num_requests, vocab_size)]
    longest = longest_request(asked)
    if longest > max_len:
        raise ValueError(
            f"the ragged requests have up to {longest} tokens, the model at most {max_len}: "
            "leave them out with --requests 0"
        )
    return asked


def longest_request(requests: Sequence[Asked]) -> int:
    """Prompt and output of the longest request, in tokens."""
    return max(len(one.prompt) + one.new_tokens for one in requests)


@torch.inference_mode()
def measure_serving(
    servers: Mapping[str, Server],
    requests: Sequence[Asked],
    rounds: int,
    reference: str,
    optional: Collection[str] = (),
    peer: str = PEER,
) -> Serving:
    """Warm up, then `rounds` rounds in which each serves all requests once, in turn first.

    The timed runs themselves are checked: each request's wanted tokens, no fewer, in every round.
    An optional server that cannot run is left out, with the reason; others raise.
    """
    answers: dict[str, list[Sequence[Tokens]]] = {name: [] for name in servers}
    samples: dict[str, list[float]] = {name: [] for name in servers}
    failed: dict[str, str] = {}
    short = [one._replace(new_tokens=min(one.new_tokens, WARM_UP_TOKENS)) for one in requests]
    names = list(servers)
    for number in range(-1, rounds):
        for name in in_turn(names, number):
            if name in failed:
                continue
            try:
                done, took = _run(name, servers[name], short if number < 0 else requests)
            except Exception as error:  # whatever another engine raises, the others still race
                if name not in optional:
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            if number >= 0:
                answers[name].append(done)
                samples[name].append(took)
    return _serving(requests, answers, samples, reference, peer, failed)


def _run(name: str, server: Server, requests: Sequence[Asked]) -> tuple[Sequence[Tokens], float]:
    """One run and its seconds; ValueError unless every request got what it wanted."""
    time.sleep(PAUSE)
    began = time.perf_counter()
    done = server.serve(requests)
    took = time.perf_counter() - began
    wanted = [one.new_tokens for one in requests]
    if [len(tokens) for tokens in done] != wanted:
        raise ValueError(
            f"{name} gave {[len(tokens) for tokens in done]} tokens where {wanted} were asked for: "
            "the comparison would not be fair"
        )
    return done, took


def _serving(
    requests: Sequence[Asked],
    answers: Mapping[str, list[Sequence[Tokens]]],
    samples: Mapping[str, list[float]],
    reference: str,
    peer: str,
    failed: dict[str, str],
) -> Serving:
    names = [name for name in samples if name not in failed]
    median = {name: statistics.median(samples[name]) for name in names}
    wanted = sum(one.new_tokens for one in requests)
    return Serving(
        len(requests),
        sum(len(one.prompt) for one in requests),
        wanted,
        median,
        {name: wanted / seconds for name, seconds in median.items()},
        {name: median[peer] / seconds for name, seconds in median.items()},
        {name: samples[name] for name in names},
        reference,
        {name: agreement(answers[name][0], answers[reference][0]) for name in names},
        failed,
    )


def agreement(own: Sequence[Tokens], reference: Sequence[Tokens]) -> Agreement:
    """Compare two servers' answers, request by request."""
    equal = [equal_start(a, b) for a, b in zip(own, reference, strict=True)]
    whole = sum(n == len(b) for n, b in zip(equal, reference, strict=True))
    return Agreement(whole, sum(equal))


def _asked(arrival: Arrival) -> Asked:
    assert not isinstance(arrival.prompt, str), "ragged prompts are ids"
    return Asked(tuple(arrival.prompt), arrival.params.max_tokens)
