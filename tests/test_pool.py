"""The pool in each step of a trace is what the live memory says, on rows, pages and cells."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from engines import VOCAB, random_model
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, Trace
from tutorial_engine.trace.pool import CELLS, PAGES, ROWS, Pool, PoolHistory, snapshots

UNITS = {ROWS: 20, PAGES: 4, CELLS: 1}  # slots of a row, a block, a cell


class Seen(NamedTuple):
    """What the memory itself said while a forward ran."""

    tokens: dict[int, dict[str, int]]
    owners: dict[int, set[str]]
    new: set[int]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    entries: dict[str, int]


class Watching(ModelRunner):
    """Looks into the memory at every forward."""

    engine: LLMEngine

    def __init__(self, unit: int, *args: Any) -> None:
        super().__init__(*args)
        self.unit, self.seen = unit, list[Seen]()

    def run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        self.seen.append(self.look(scheduled))
        return super().run(scheduled)

    def look(self, scheduled: Sequence[ScheduledRequest]) -> Seen:
        scheduler, memory = self.engine.scheduler, self.engine.memory
        running = tuple(r.request_id for r in scheduler.running)
        runs = {one.request.request_id: one.allocation for one in scheduled}
        waiting = tuple(r.request_id for r in scheduler.waiting)
        seen = Seen({}, {}, set(), running, waiting, {})
        for request in (*scheduler.running, *scheduler.waiting):
            name = request.request_id
            table, slots = memory.describe(name)
            everywhere = [u * self.unit + i for u in table for i in range(self.unit)]
            assert list(slots) in (everywhere, []), "those of a fork that waits are not told"
            if table:
                seen.entries[name] = len(table)
            for slot in everywhere:
                seen.owners.setdefault(slot, set()).add(name)
            many = request.num_computed_tokens if name in running else shared_by(memory, name)
            if name in runs:
                new = runs[name].new_slots
                seen.new.update(new)
                many = runs[name].first_position + len(new)
                assert list(slots[runs[name].first_position : many]) == list(new)
            for position, slot in enumerate(everywhere[:many]):
                seen.tokens.setdefault(slot, {})[name] = position
        return seen


def shared_by(memory: KVMemory, name: str) -> int:
    """Tokens that a fork which waits has from its parent."""
    if isinstance(memory, PagedKVCache):
        return memory._num_cached.get(name, 0)
    return memory._shared.get(name, 0) if isinstance(memory, CellKVCache) else 0


def memory_of(kind: str, recorder: Recorder) -> KVMemory:
    config, slots = random_model().config, 40
    if kind == CELLS:
        return CellKVCache.from_config(config, slots, trace=recorder)
    if kind == PAGES:
        return PagedKVCache.from_config(config, block_size=4, num_blocks=slots // 4, trace=recorder)
    return StaticKVCache.from_config(config, max_seqs=2, max_len=20, trace=recorder)


@cache
def watched_run(kind: str, seed: int) -> tuple[Trace, list[Seen]]:
    """Eight ragged requests in 40 slots, two of them with two samples, one aborted."""
    draw, model, recorder = random.Random(seed), random_model(), Recorder()
    memory = memory_of(kind, recorder)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=9, max_model_len=20)
    runner = Watching(UNITS[kind], model, memory.storage)
    engine = LLMEngine(model, config=config, memory=memory, clock=VirtualClock(), runner=runner)
    runner.engine = engine
    start = [draw.randrange(VOCAB) for _ in range(5)]
    for i in range(8):
        prompt = start * (i % 3 > 0) + draw.choices(range(VOCAB), k=draw.randint(1, 8))
        params = SamplingParams(
            max_tokens=draw.randint(2, 7), ignore_eos=True, n=2 if i % 4 == 1 else 1,
            temperature=1.0, seed=seed,
        )  # fmt: skip
        engine.add_request(chr(65 + i), prompt, params)
        engine.step()
    engine.abort_request(next(reversed(engine.requests)).split(".")[0])
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
    return recorder.trace(), runner.seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", UNITS)
def test_every_snapshot_of_a_trace_is_what_the_live_memory_said(kind: str, seed: int) -> None:
    trace, seen = watched_run(kind, seed)
    found = list(snapshots(trace))
    assert len(found) == len(seen) == trace.num_steps > 8
    for i, (snapshot, live) in enumerate(zip(found, seen, strict=True)):
        assert snapshot.step == i
        assert {s: dict(who) for s, who in snapshot.tokens.items()} == live.tokens
        assert {s: set(who) for s, who in snapshot.owners.items()} == live.owners
        assert snapshot.new == live.new and snapshot.running == live.running
        assert dict(snapshot.entries) == live.entries and snapshot.waiting == live.waiting
        usage = snapshot.usage
        assert (usage.used, usage.free) == (len(live.tokens), 40 - len(live.owners))
        assert usage.used + usage.reserved + usage.free == 40 and min(usage) >= 0


def test_the_runs_that_were_watched_share_preempt_and_fork() -> None:
    """Or the comparison above would be about less than it says."""
    for kind in (PAGES, CELLS):
        runs = [watched_run(kind, seed) for seed in range(4)]
        happened = {type(event) for trace, _ in runs for event in trace.events}
        shared = events.BlockCopied if kind == PAGES else events.CellsShared
        assert happened >= {events.Preempted, events.Forked, shared}
        assert any(len(who) > 1 for _, seen in runs for one in seen for who in one.tokens.values())
        if kind == CELLS:
            waits = [one for _, seen in runs for one in seen if one.entries.keys() - {*one.running}]
            assert waits, "a fork that waits holds what it shares"


def test_what_is_counted_of_a_run_is_counted_of_its_snapshots() -> None:
    trace, seen = watched_run(PAGES, 0)
    whole = PoolHistory.of(trace)
    waste = [len(one.owners) - len(one.tokens) for one in seen]
    entries = [list(one.entries.values()) for one in seen]
    assert whole.names[0] == "A" and {"B", "B.1", "H"} <= {*whole.names}
    assert whole.num_steps == len(seen) and whole.peak_waste == max(waste)
    assert whole.mean_waste == pytest.approx(sum(waste) / len(seen))
    assert whole.total_entries == max(map(sum, entries))
    assert whole.most_running == max(len(one.running) for one in seen)
    assert whole.peak_used == max(len(one.tokens) for one in seen)
    fullness = [(len(one.running), len(one.waiting), len(one.tokens)) for one in seen]
    assert fullness[whole.fullest.step] == max(fullness)
    assert PoolHistory.of(Trace.from_json(trace.to_json())) == whole


def test_sizes_of_a_pool_come_from_the_settings() -> None:
    assert Pool.of({"num_cells": 7}) == Pool(CELLS, 1, 7)
    assert Pool.of({"num_blocks": 3, "block_size": 4}) == Pool(PAGES, 4, 3)
    pool = Pool.of({"num_rows": 2, "row_len": 10, "policy": "Scheduler"})
    assert pool == Pool(ROWS, 10, 2) and pool.num_slots == 20 and pool.slots(1) == range(10, 20)
    with pytest.raises(ValueError, match="no rows, blocks or cells"):
        Pool.of({"policy": "Scheduler"})
    with pytest.raises(ValueError, match="no step of this trace"):
        PoolHistory.of(Trace({"num_cells": 7}, ()))
