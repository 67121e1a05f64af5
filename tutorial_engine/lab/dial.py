"""The block-size dial: one storage, three maps, the same requests.

From one cell per token over pages to a whole row per request: what is wasted, kept, found and
copied. Knows the engine from outside and its traces; draws nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.workload import Arrival, serve
from tutorial_engine.model.attention import BlockedAttention
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.rope import RotaryEmbedding
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, Trace
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import CELLS, ROWS, PoolHistory

Position = int | str  # where the dial stands: a block size, or ROWS or CELLS, its two ends


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
        counts = []
        for step in history(self.trace):
            for name, ran in step.scheduled.items():
                slots = step.planned.requests[name].slots[: ran.first_position] + ran.slots
                neighbours = slots[-1] - slots[0] == len(slots) - 1 and list(slots) == sorted(slots)
                counts.append(0 if neighbours else len(slots))
        return counts


class Dial:
    """The same requests on the same slots under the same engine; `at(position)` runs them there.

    Rows: num_slots // max_len of them; pages: num_slots // block size. Requests come at their times
    on a virtual clock. ValueError for slots that do not make whole rows, or pages.
    """

    def __init__(
        self,
        model: CausalLM,
        arrivals: Sequence[Arrival],
        num_slots: int,
        max_len: int,
        *,
        budget: int = 64,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if num_slots % max_len:
            raise ValueError(f"{num_slots} slots must make whole rows of max_len={max_len}")
        self.model, self.arrivals, self.tokenizer = model, list(arrivals), tokenizer
        self.max_len = max_len
        self.config = EngineConfig(
            max_num_seqs=len(arrivals), max_num_batched_tokens=budget, max_model_len=max_len
        )
        spec = KVCacheSpec.from_model(model.config, model.dtype)
        self.storage = KVStorage(spec, num_slots, model.device)

    @cached_property
    def expected(self) -> list[list[int]]:
        """The tokens of each request alone, by the loop that has no scheduler."""
        tokens = []
        for _, prompt, params, _ in self.arrivals:
            (output,) = generate(
                self.model, [prompt], params, tokenizer=self.tokenizer, max_len=self.max_len
            )
            tokens.append(output.outputs[0].token_ids)
        return tokens

    def memory_at(self, position: Position, trace: Recorder | None = None) -> KVMemory:
        """A new map from positions to slots, over the one storage."""
        if position == ROWS:
            rows = self.storage.num_slots // self.max_len
            return StaticKVCache(self.storage, rows, self.max_len, trace)
        if position == CELLS:
            config = self.model.config
            rope = RotaryEmbedding.of(config).to(self.model.device)
            return CellKVCache(self.storage, rope, trace)
        assert isinstance(position, int), f"a block size, {ROWS!r} or {CELLS!r}"
        return PagedKVCache(self.storage, position, max_len=self.max_len, trace=trace)

    def at(self, position: Position) -> DialPoint:
        """Run all requests there, once, and count."""
        recorder, gathered = Recorder(), self.storage.bytes_gathered
        memory = self.memory_at(position, recorder)
        for tensor in (self.storage.k, self.storage.v):
            tensor.fill_(float("nan"))  # nobody may read what the map before has left
        # context by context, whatever is fastest here: what is copied is to be seen for each
        runner = ModelRunner(self.model, self.storage, BlockedAttention(self.storage))
        engine = LLMEngine(
            *(self.model, self.tokenizer, self.config),
            memory=memory,
            runner=runner,
            clock=VirtualClock(),
        )
        outputs = serve(engine, self.arrivals)
        trace = recorder.trace()
        pool = PoolHistory.of(trace)
        return DialPoint(
            pool.pool,
            pool.names,
            pool.snapshots,
            position,
            trace,
            tokens_found=sum(e.num_cached for e in trace.events if isinstance(e, events.Admitted)),
            preemptions=sum(isinstance(e, events.Preempted) for e in trace.events),
            tokens_run=sum(e.num_tokens for e in trace.events if isinstance(e, events.StepEnded)),
            bytes_gathered=self.storage.bytes_gathered - gathered,
            tokens_equal=[o.outputs[0].token_ids for o in outputs] == self.expected,
        )


def sweep_block_sizes(
    model: CausalLM,
    arrivals: Sequence[Arrival],
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    num_slots: int = 256,
    max_len: int = 64,
) -> list[DialPoint]:
    """The dial from end to end: cells, pages of each block size, rows.

    ValueError as Dial, and for a request that can never fit.
    """
    dial = Dial(model, arrivals, num_slots, max_len)
    positions: list[Position] = [CELLS, *block_sizes, ROWS]
    return [dial.at(position) for position in positions]


def table(points: Sequence[DialPoint]) -> str:
    """A line for each position of the dial: the counts that are not in its picture."""
    lines = ["             found  at once  preempted  table entries  KiB gathered"]
    for p in points:
        row = f"{p.name:12}{p.tokens_found:6}{p.most_running:9}{p.preemptions:11}"
        lines.append(f"{row}{p.total_entries:15}{p.bytes_gathered / 1024:14,.0f}")
    return "\n".join(lines)


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
    the new ones.
    """
    assert num_requests <= 26, "a letter for each"
    draw, arrivals = random.Random(0), []
    for i in range(num_requests):
        tail = draw.choices(range(1, vocab_size), k=draw.randint(*tails))
        start = tuple(prefix) if (i + 1) % every else ()
        params = SamplingParams(max_tokens=draw.randint(*outputs), ignore_eos=True)
        arrivals.append(Arrival(gap * i, (*start, *tail), params, chr(ord("A") + i)))
    return arrivals
