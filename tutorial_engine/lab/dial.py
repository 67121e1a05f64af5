"""Introduced in notebook 04. The block-size dial: one storage, three maps, the same requests.

From one cell per token over pages to a whole row per request: what is wasted, kept, found, copied
and measured. Knows the engine from outside and its traces; draws nothing.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.workload import Arrival, serve
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.model.rope import RotaryEmbedding
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, Trace
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import CELLS, ROWS, PoolHistory

Position = int | str  # where the dial stands: a block size, or ROWS or CELLS, its two ends


# -- one setting ----------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What this machine took: output tokens per second, and seconds in allocate, commit and free
    per token that was run.
    """

    tokens_per_second: float
    bookkeeping: float


@dataclass(frozen=True)
class DialPoint(PoolHistory):
    """The same requests with the dial at one position: counts of one run, the same everywhere.

    `tokens_found` were in the cache when a request was admitted; `bytes_gathered` were copied by
    attention, because a request's slots were not neighbours.
    """

    position: Position
    trace: Trace = field(repr=False)
    tokens_found: int
    preemptions: int
    tokens_run: int
    bytes_gathered: int
    tokens_equal: bool  # to each request alone, without a scheduler
    measured: Measured | None = None

    @property
    def name(self) -> str:
        """ "rows", "pages of 16" or "cells"."""
        return str(self.position) if isinstance(self.position, str) else f"pages of {self.position}"

    @property
    def milliseconds(self) -> float:
        """When the last request was done, on the virtual clock: it charges forwards and tokens."""
        return 1000 * self.trace.events[-1].time

    @cached_property
    def copied(self) -> list[int]:
        """For each context that attention read (a request in a step), the tokens that it copied.

        0 where its slots are neighbours: then they are read where they are.
        """
        found = []
        for step in history(self.trace):
            for name, ran in step.scheduled.items():
                slots = step.planned.requests[name].slots[: ran.first_position] + ran.slots
                neighbours = slots[-1] - slots[0] == len(slots) - 1 and list(slots) == sorted(slots)
                found.append(0 if neighbours else len(slots))
        return found


class Dial:
    """The same requests on the same slots under the same engine; `at(position)` runs them there.

    Rows: num_slots // max_len of them; pages: num_slots // block size. Requests come at their times
    on a virtual clock: what is not measured is the same everywhere. ValueError for slots that do
    not make whole rows, or pages.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        arrivals: Sequence[Arrival],
        num_slots: int,
        max_len: int,
        *,
        budget: int = 64,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        at_least_one("num_slots", num_slots)
        at_least_one("max_len", max_len)
        if num_slots % max_len or not arrivals:
            raise ValueError(
                f"{num_slots} slots must make whole rows of max_len={max_len}, for one request at "
                f"least; got {len(arrivals)}"
            )
        if any(one.params.n > 1 for one in arrivals):
            raise ValueError("the dial compares one continuation a prompt: give params with n=1")
        self.model, self.arrivals, self.tokenizer = model, list(arrivals), tokenizer
        self.max_len = max_len
        self.config = EngineConfig(
            max_num_seqs=len(arrivals), max_num_batched_tokens=budget, max_model_len=max_len
        )
        spec = KVCacheSpec.from_model(model.config, model.dtype)
        self.storage = KVStorage(spec, num_slots, model.device)

    @cached_property
    def expected(self) -> list[tuple[int, ...]]:
        """The tokens of each request alone, by the loop that has no scheduler."""
        return [
            generate(
                self.model, [one.prompt], one.params, tokenizer=self.tokenizer, max_len=self.max_len
            )[0]
            .outputs[0]
            .token_ids
            for one in self.arrivals
        ]

    def memory_at(self, position: Position, trace: Recorder | None = None) -> KVMemory:
        """A new map from positions to slots, over the one storage."""
        if position == ROWS:
            rows = self.storage.num_slots // self.max_len
            return StaticKVCache(self.storage, rows, self.max_len, trace)
        if position == CELLS:
            config = self.model.config
            rope = RotaryEmbedding(config.head_dim, config.rope_theta).to(self.model.device)
            return CellKVCache(self.storage, rope, trace)
        if isinstance(position, str):
            raise ValueError(f"the dial has block sizes, {ROWS!r} and {CELLS!r}; got {position!r}")
        return PagedKVCache(self.storage, position, max_len=self.max_len, trace=trace)

    def at(self, position: Position) -> DialPoint:
        """Run all requests there, once, and count."""
        recorder = Recorder()
        runner = ModelRunner(self.model, self.storage)
        gathered = self.storage.bytes_gathered
        outputs, _ = self._serve(self.memory_at(position, recorder), runner)
        trace = recorder.trace()
        pool = PoolHistory.of(trace)
        found = [e.num_cached for e in trace.events if isinstance(e, events.Admitted)]
        return DialPoint(
            pool.pool,
            pool.names,
            pool.snapshots,
            position,
            trace,
            tokens_found=sum(found),
            preemptions=sum(isinstance(e, events.Preempted) for e in trace.events),
            tokens_run=runner.num_tokens,
            bytes_gathered=self.storage.bytes_gathered - gathered,
            tokens_equal=[o.outputs[0].token_ids for o in outputs] == self.expected,
        )

    def measure(self, position: Position) -> Measured:
        """The same run once more, without a recorder, by the wall clock."""
        memory = _Timed(self.memory_at(position))
        runner = ModelRunner(self.model, self.storage)
        outputs, seconds = self._serve(cast(KVMemory, memory), runner)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return Measured(tokens / seconds, memory.seconds / runner.num_tokens)

    def _serve(self, memory: KVMemory, runner: ModelRunner) -> tuple[list[RequestOutput], float]:
        """All requests through an engine on this memory → outputs, seconds on the wall clock."""
        for tensor in (self.storage.k, self.storage.v):
            tensor.fill_(float("nan"))  # nobody may read what the map before has left
        engine = LLMEngine(
            self.model,
            self.tokenizer,
            self.config,
            memory=memory,
            clock=VirtualClock(),
            runner=runner,
        )
        most = sum(one.params.max_tokens + self.max_len for one in self.arrivals)
        began = time.perf_counter()
        outputs = serve(engine, self.arrivals, most * len(self.arrivals))
        return outputs, time.perf_counter() - began


def sweep_block_sizes(
    model: Qwen3ForCausalLM,
    arrivals: Sequence[Arrival],
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    num_slots: int = 256,
    max_len: int = 64,
    *,
    repeats: int = 2,
) -> list[DialPoint]:
    """The dial from end to end: cells, pages of each block size, rows.

    Each is run once for the counts, then all again, `repeats` times, for the clock (0: they are not
    measured). ValueError as Dial, and for a request that can never fit.
    """
    dial = Dial(model, arrivals, num_slots, max_len)
    positions: list[Position] = [CELLS, *block_sizes, ROWS]
    points = [dial.at(position) for position in positions]
    rounds = [[dial.measure(position) for position in positions] for _ in range(repeats)]
    if not rounds:
        return points
    runs = zip(*rounds, strict=True)  # of each position
    return [replace(p, measured=_best(own)) for p, own in zip(points, runs, strict=True)]


def sharing(
    prefix: Sequence[int],
    vocab_size: int,
    num_requests: int = 12,
    *,
    every: int = 3,
    gap: float = 0.02,
    tails: tuple[int, int] = (2, 20),
    outputs: tuple[int, int] = (4, 24),
) -> list[Arrival]:
    """Requests A, B, ... of unequal lengths, one each `gap` seconds, most with the same prefix.

    Each `every`-th begins otherwise. `tails` and `outputs` bound the tokens behind the prefix and
    the new ones. ValueError for fewer than one request or more than 26.
    """
    at_least_one("every", every)
    if not 1 <= num_requests <= 26:
        raise ValueError(f"num_requests must be 1 .. 26, a letter each; got {num_requests}")
    draw, arrivals = random.Random(0), []
    for i in range(num_requests):
        tail = draw.choices(range(1, vocab_size), k=draw.randint(*tails))
        start = tuple(prefix) if (i + 1) % every else ()
        params = SamplingParams(max_tokens=draw.randint(*outputs), ignore_eos=True)
        arrivals.append(Arrival(gap * i, (*start, *tail), params, chr(ord("A") + i)))
    return arrivals


# -- what watches ---------------------------------------------------------------------------------


def _best(runs: Sequence[Measured]) -> Measured:
    """The fastest of each: what is slower was disturbed."""
    speeds, costs = zip(*runs, strict=True)
    return Measured(max(speeds), min(costs))


class _Timed:
    """A memory that adds up the seconds which its allocate, commit and free take."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory, self.seconds = memory, 0.0
        self.allocate = self._around(memory.allocate)
        self.commit = self._around(memory.commit)
        self.free = self._around(memory.free)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)  # all else is the memory's own

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed
