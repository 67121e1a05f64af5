"""The fair race: interleaved rounds, medians, checked answers.

Knows contenders only by what they are asked: prompt in, tokens and times out. Knows no engine.
"""

import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tutorial_engine.lab.roofline import Roofline

PEER = "transformers"  # the column that the others are divided by
PAUSE = 0.01  # seconds between two contenders, in which the threads of the one before go to sleep


class Generated(NamedTuple):
    """The tokens of one greedy run, and for each the seconds from the call until it was there."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def per_token(self) -> float:
        """Seconds per token after the first: decode alone, with the prefill left out."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


class Contender(Protocol):
    """One engine under one roof with the others. It runs its own way; all are asked the same."""

    def generate(self, ids: Sequence[int], new_tokens: int) -> Generated:
        """Exactly new_tokens greedy ones after the prompt, whatever they are, cache and all."""
        ...

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """The logits that the first token was chosen by, [1, V] fp32, computed on the same path."""
        ...


class Workload(NamedTuple):
    """What all are asked: continue this prompt by so many tokens."""

    prompt: tuple[int, ...]
    new_tokens: int

    @classmethod
    def of_length(cls, length: int, vocab_size: int, new_tokens: int) -> "Workload":
        """A prompt of `length` random ids, the same in every run. ValueError for under 2 tokens."""
        if new_tokens < 2:
            raise ValueError(f"--new-tokens must be at least 2 to time a decode, got {new_tokens}")
        return cls(tuple(random.Random(length).choices(range(vocab_size), k=length)), new_tokens)


class Row(NamedTuple):
    """One phase at one context. Medians; ratios of them, above 1 = faster than the peer.

    `seconds` is until the first token (prefill) or per token after it (decode).
    """

    phase: str  # "prefill" or "decode"
    context: int
    seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    ratio: dict[str, float]
    samples: dict[str, list[float]]


class Check(NamedTuple):
    """That nobody won by being wrong: each one's answer against the peer's.

    The largest |Δ| of the first token's logits; how many tokens agree before the first other one;
    why a contender is missing.
    """

    context: int
    new_tokens: int
    logit_difference: dict[str, float]
    tokens_equal: dict[str, int]
    failed: dict[str, str]


class Measurement(NamedTuple):
    """All that a workload gave; the roofline is that of the same rounds, their medians too."""

    prefill: Row
    decode: Row
    check: Check
    roofline: Roofline | None


class Probe(Protocol):
    """Measures the machine itself, once per call."""

    def __call__(self) -> Roofline:
        """What memory and cores give right now."""
        ...


@torch.inference_mode()
def measure(
    contenders: Mapping[str, Contender],
    workload: Workload,
    rounds: int,
    optional: Collection[str] = (),
    probe: Probe | None = None,
) -> Measurement:
    """Warm up and check once each, then `rounds` rounds in which each runs once, in turn first.

    What slows the machine for a while so slows all of them. An optional contender that cannot run
    is left out, with the reason. ValueError when one did not do the work that was asked for.
    """
    check = _check(contenders, workload, optional)
    names = [name for name in contenders if name not in check.failed]
    runs: dict[str, list[Generated]] = {name: [] for name in names}
    limits = []
    for number in range(rounds):
        for name in in_turn(names, number):
            time.sleep(PAUSE)
            runs[name].append(_run(name, contenders[name], workload))
        if probe is not None:
            time.sleep(PAUSE)
            limits.append(probe())
    length = len(workload.prompt)
    first_token = {name: [run.seconds[0] for run in done] for name, done in runs.items()}
    per_token = {name: [run.per_token for run in done] for name, done in runs.items()}
    return Measurement(
        _row("prefill", length, length, first_token),
        _row("decode", length, 1, per_token),
        check,
        Roofline(*map(statistics.median, zip(*limits, strict=True))) if limits else None,
    )


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """All of them in the order of a round: another one is first in each; −1 is the warm-up."""
    first = max(number, 0) % len(names)
    return [*names[first:], *names[:first]]


def _run(name: str, contender: Contender, workload: Workload) -> Generated:
    """One run; ValueError unless it gave as many tokens as asked for, with rising times."""
    done = contender.generate(workload.prompt, workload.new_tokens)
    if not len(done.tokens) == len(done.seconds) == workload.new_tokens:
        raise ValueError(
            f"{name} gave {len(done.tokens)} tokens at {len(done.seconds)} times where "
            f"{workload.new_tokens} were asked for: the comparison would not be fair"
        )
    if list(done.seconds) != sorted(done.seconds) or done.seconds[0] <= 0:
        raise ValueError(f"{name} reports times that do not rise from 0: {done.seconds}")
    return done


def _check(
    contenders: Mapping[str, Contender], workload: Workload, optional: Collection[str]
) -> Check:
    """Run each once, untimed, and compare what it says with the peer."""
    logits: dict[str, Tensor] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    failed: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            logits[name] = contender.last_logits(workload.prompt)
            tokens[name] = _run(name, contender, workload).tokens
        except Exception as error:  # whatever another engine raises, the others still race
            if name not in optional:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    logits = {name: value for name, value in logits.items() if name in tokens}
    shapes = {name: tuple(value.shape) for name, value in logits.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the contenders computed logits of different shapes: {shapes}")
    return Check(
        len(workload.prompt),
        workload.new_tokens,
        {name: float((value - logits[PEER]).abs().max()) for name, value in logits.items()},
        {name: equal_start(own, tokens[PEER]) for name, own in tokens.items()},
        failed,
    )


def equal_start(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens agree before the first that does not; after it they answer other prompts."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def _row(phase: str, context: int, tokens: int, samples: dict[str, list[float]]) -> Row:
    median = {name: statistics.median(values) for name, values in samples.items()}
    return Row(
        phase,
        context,
        median,
        {name: tokens / seconds for name, seconds in median.items()},
        {name: median[PEER] / seconds for name, seconds in median.items()},
        samples,
    )
