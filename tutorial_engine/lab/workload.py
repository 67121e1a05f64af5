"""Requests that come over time, and an engine that serves them.

Knows arrival times, prompts and parameters; knows the engine only from outside.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.inputs import Prompt
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.sampling.params import SamplingParams


class Arrival(NamedTuple):
    """A request and when it comes, in seconds after the start."""

    time: float
    prompt: Prompt
    params: SamplingParams
    request_id: str | None = None


def poisson_times(rate: float, num_requests: int, seed: int) -> list[float]:
    """Arrival times of users who do not know of each other, `rate` per second on average."""
    if not rate > 0:
        raise ValueError(f"the rate must be above 0 requests per second, got {rate}")
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num_requests):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def ragged(
    num_requests: int,
    vocab_size: int,
    seed: int = 0,
    prompt_lens: tuple[int, int] = (16, 256),
    output_lens: tuple[int, int] = (8, 128),
) -> list[Arrival]:
    """Requests of very unequal lengths, all at time 0: random ids, exactly so many outputs."""
    draw = random.Random(seed)
    arrivals = []
    for _ in range(num_requests):
        prompt = draw.choices(range(vocab_size), k=draw.randint(*prompt_lens))
        params = SamplingParams(max_tokens=draw.randint(*output_lens), ignore_eos=True)
        arrivals.append(Arrival(0.0, tuple(prompt), params))
    return arrivals


def serve(
    engine: LLMEngine, arrivals: Sequence[Arrival], max_steps: int | None = None
) -> list[RequestOutput]:
    """Let requests arrive at their times on the engine's clock and step until all are done.

    Outputs in the order of `arrivals`. A request that comes during a step enters after it, but its
    waiting counts from its arrival. RuntimeError when max_steps do not suffice, ValueError for a
    time that never comes.
    """
    if not all(math.isfinite(arrival.time) for arrival in arrivals):
        raise ValueError(f"arrival times are seconds, got {[a.time for a in arrivals]}")
    if engine.has_unfinished_requests():
        raise ValueError("the engine has other requests, whose results would be lost: run() first")
    start = engine.clock.now()
    to_come = sorted(enumerate(arrivals), key=lambda pair: (pair[1].time, pair[0]), reverse=True)
    index = dict[str, int]()  # request_id -> place among the arrivals
    outputs = dict[int, RequestOutput]()
    steps = 0
    while to_come or engine.has_unfinished_requests():
        while to_come and start + to_come[-1][1].time <= engine.clock.now():
            i, (seconds, prompt, params, name) = to_come.pop()
            index[engine.add_request(name, prompt, params, arrival_time=start + seconds)] = i
        if not engine.has_unfinished_requests():
            engine.clock.wait_until(start + to_come[-1][1].time)
            continue
        if steps == max_steps:
            raise RuntimeError(f"{max_steps} steps did not suffice for {len(arrivals)} requests")
        steps += 1
        for output in engine.step():
            if output.finished and output.request_id in index:
                outputs[index[output.request_id]] = output
    return [outputs[i] for i in range(len(arrivals))]
