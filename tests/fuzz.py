"""Random workloads: what is drawn, run number by number, and made small when it fails.

A run is a workload (workloads.py), now and then the same again with Ctrl-C before one of the lines
that it runs (at_line.py), or operations on a BlockManager or CellTable beside a slow, obvious model
(test_blocks.py, test_cells.py). The tests have a few fixed ones; long_run.py as many as you like.
"""

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import test_blocks
import test_cells
import workloads
from at_line import AtLine
from workloads import (
    BACKENDS,
    BLOCK_SIZES,
    IN_PLACE,
    LIMITS,
    MEMORIES,
    POOL_SIZE,
    Visitor,
    Workload,
    alone,
    check,
    check_transformers,
    most_samples,
    pool,
)

RUNS_OF_A_POOL = 2_000  # then come another model and other requests


# -- drawing one ----------------------------------------------------------------------------------


@cache
def twins() -> list[list[int]]:
    """Requests of the pool that ask about the same prompt, and say different things about it."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, asked in enumerate(pool()):
        by_prompt.setdefault(asked.prompt, []).append(index)
    return [group for group in by_prompt.values() if len(group) > 1]


@cache
def talkers(forks: bool) -> list[int]:
    """Those who stay for a while; with `forks`, those who can have several samples."""
    stay = [i for i in range(POOL_SIZE) if len(alone(i, max(LIMITS)).token_ids) >= 7]
    return [i for i in stay if not forks or most_samples(i) > 1]


def random_visitor(draw: random.Random, some: Sequence[int], latest: int, forks: bool) -> Visitor:
    """Every fourth or so is aborted, or meets an error of its own."""
    index, fate = draw.choice(some), draw.random()
    n = draw.randint(1, most_samples(index)) if forks else 1
    visitor = Visitor(index, draw.randint(0, latest), n=n)
    way = draw.choice(["add"] * 7 + ["stream"] * 2 + ["generate"])
    aborted = draw.randint(0, 9) if fate < 0.14 else None
    if way != "add":
        leaves = draw.randint(0, 6) if way == "stream" and draw.random() < 0.3 else None
        return replace(visitor, way=way, leaves=leaves, aborted_at=aborted)
    fault = (draw.randrange(n), draw.randint(0, 6))
    return replace(
        visitor,
        aborted_at=aborted,
        fails=fault if 0.14 <= fate < 0.2 else None,
        stumbles=fault if 0.2 <= fate < 0.26 else None,
    )


def random_workload(draw: random.Random, memory: str | None = None) -> Workload:
    """Few different prompts, so that they meet their own again; nine of ten are a crowd."""
    crowd, forks = draw.random() < 0.9, draw.random() < 0.6
    some = draw.choice(twins()) if draw.random() < 0.3 else draw.sample(talkers(forks), 3)
    if not crowd and draw.random() < 0.5:
        some = draw.sample(range(POOL_SIZE), 4)
    visitors = draw.randint(*(((2, 3) if forks else (3, 5)) if crowd else (1, 3)))
    latest = 2 if crowd else 9
    limit = draw.choice(LIMITS)
    policy = draw.choice(["Scheduler"] * 4 + ["StaticBatching", "PrefillFirst"])
    policy = policy if crowd or draw.random() < 0.9 else "OneByOne"
    chunked = draw.random() < 0.7
    whole = policy == "PrefillFirst" or not chunked  # or most would be refused
    small = [16, limit, limit, limit, limit + 2, limit + 4]
    memory = memory or draw.choice(MEMORIES)
    backends = [how for how in BACKENDS if memory == "pages" or how not in IN_PLACE]
    sizes = (1, 2, 3, 4, 4, 4) if crowd and draw.random() < 0.85 else BLOCK_SIZES
    return Workload(
        tuple(random_visitor(draw, some, latest, forks) for _ in range(visitors)),
        policy,
        draw.randint(4, 6) if crowd else draw.randint(1, 5),
        draw.choice([20, 34, 500] if whole else [1, 2, 4, 8, 13, 34, 500, 500]),
        limit,
        draw.choice([None, None, None, None, 1, 3, 7]),
        chunked,
        draw.choice(small if crowd else [limit, limit + 11, 2 * limit, None]),
        memory=memory,
        block_size=draw.choice(sizes),
        prefix_caching=draw.random() < 0.6,
        attention=draw.choice(backends),
        breaks=draw.randint(0, 12) if draw.random() < 0.1 else None,
    )


def interrupted(workload: Workload, draw: random.Random) -> Workload:
    """The same, with Ctrl-C before one of the lines that it runs: the first or the last time."""
    at = AtLine()
    check(workload, at)
    return replace(workload, interrupt=draw.choice(at.moments()))


# -- many of them ---------------------------------------------------------------------------------


def failure(workload: Workload) -> Exception | None:
    """What `check` raises, if it does."""
    try:
        check(workload)
    except Exception as error:
        return error
    return None


def smallest(workload: Workload) -> Workload:
    """The same failure, or another, with as few visitors, samples and mishaps as it takes."""
    for less in smaller(workload):
        if failure(less) is not None:
            return smallest(less)
    return workload


def smaller(workload: Workload) -> list[Workload]:
    """All that are a little simpler."""
    simple = Visitor(0)
    found: list[Any] = []
    for index, visitor in enumerate(workload.visitors):
        before, after = workload.visitors[:index], workload.visitors[index + 1 :]
        found.append((*before, *after))
        for name in ("aborted_at", "fails", "stumbles", "way", "leaves", "n"):
            if getattr(visitor, name) != getattr(simple, name):
                plain = replace(visitor, **{name: getattr(simple, name)})
                found.append((*before, plain, *after))
    less = [replace(workload, visitors=visitors) for visitors in found if visitors]
    for name in ("breaks", "interrupt"):
        if getattr(workload, name) is not None:
            less.append(replace(workload, **{name: None}))
    return less


def use_pool(seed: int) -> Counter[str]:
    """Another model and other requests, if these are not there yet; transformers agrees."""
    if workloads.Drawn.seed == seed and pool.cache_info().currsize:
        return Counter()
    workloads.draw_anew(seed)
    twins.cache_clear()
    talkers.cache_clear()
    return check_transformers() + Counter(pools=1)


def run_one(seed: int, number: int, interrupts: float = 0.1) -> Counter[str]:
    """Run `number` of a seed, always the same; what happened.

    `interrupts` is the share that runs again with one. AssertionError with the smallest workload
    that fails like it.
    """
    draw = random.Random(f"{seed} {number}")
    counts = use_pool(1000 * seed + number // RUNS_OF_A_POOL + 2)
    kind = draw.randrange(50)
    if kind == 0:
        return counts + test_blocks.drive(draw, 250)
    if kind == 1:
        return counts + test_cells.run_random(250, draw.randrange(10**6))
    workload = random_workload(draw)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "prompt 0 ended with an error")
            counts += check(workload)
            if draw.random() < interrupts:
                workload = interrupted(workload, draw)
                counts += check(workload)
    except Exception as error:
        again = f".venv/bin/python tests/long_run.py --seed {seed} --only {number}"
        raise AssertionError(f"{again}\n{smallest(workload)} shows: {error}") from error
    return counts


def run_random(seed: int, first: int, many: int) -> Counter[str]:
    """Runs `first` and so on of a seed."""
    counts: Counter[str] = Counter()
    for number in range(first, first + many):
        counts += run_one(seed, number)
    return counts
