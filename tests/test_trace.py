"""What a run leaves: events and their JSON, the state after each step, the pool.

In workloads.py a replay is compared with the live engine after every step of every random run.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
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
from tutorial_engine.trace.events import (
    EVENTS,
    Added,
    Admitted,
    EngineState,
    Event,
    Finished,
    Preempted,
    Recorder,
    RequestEvent,
    StepBegan,
    StepEnded,
    TokenSampled,
    Trace,
)
from tutorial_engine.trace.history import history, replay
from tutorial_engine.trace.pool import CELLS, PAGES, ROWS, Pool, PoolHistory, snapshots

# -- events and their file ------------------------------------------------------------------------

SOME = {"time": 0.5, "arrival": 0.25, "request_id": "ä", "parent_id": "ö", "reason": "stop"} | {
    "detail": "Ende", "evicted": True, "hash": "0123456789ab", "place": None,
    "prompt_token_ids": (1, 2, 3), "slots": (30, 31), "cells": (7, 3), "cached_slots": (4,),
    "blocks": (2, 0),
}  # fmt: skip
ONE_OF_EACH: list[Event] = [
    kind(**{field.name: SOME.get(field.name, 3) for field in dataclasses.fields(kind)})
    for kind in EVENTS.values()
]


def test_the_table_of_events_is_about_every_kind() -> None:
    named = {kind for kind in vars(events).values() if isinstance(kind, type)}
    kinds = {kind for kind in named if issubclass(kind, Event)} - {Event, RequestEvent}
    assert {kind.__name__: kind for kind in kinds} == EVENTS


def test_a_trace_comes_back_from_a_file_of_one_line_per_event(tmp_path: Path) -> None:
    whole = Trace({"policy": "Größe", "max_num_seqs": 2, "none": None}, tuple(ONE_OF_EACH))
    whole.save(tmp_path / "a.json")
    back = Trace.load(str(tmp_path / "a.json"))
    assert back == whole and repr(back) == repr(whole)  # 1 is not True
    assert [hash(event) for event in back.events] == [hash(event) for event in ONE_OF_EACH]
    lines = whole.to_json().splitlines()
    assert len(lines) == len(ONE_OF_EACH) + 3  # brackets, and the head
    at = 2 + list(EVENTS).index("BlockFreed")
    values = {"step": 3, "time": 0.5, "request_id": "ä", "block": 3}
    assert json.loads(lines[at].rstrip(",")) == ["BlockFreed", values]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "[7]", '[{"format": 3}]', '{"format": 3, "settings": {}}'),
        Trace({}, tuple(ONE_OF_EACH)).to_json()[:500],  # cut off
    ],
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no trace"):
        Trace.from_json(text)


def test_another_format_is_refused_with_both_numbers_and_what_to_do() -> None:
    says = "the trace has format 2, and this version reads format 3: record the run"
    with pytest.raises(ValueError, match=says):
        Trace.from_json(json.dumps([{"format": 2, "settings": {}}]))


GOOD = ["StepEnded", {"step": 0, "time": 0.5, "num_tokens": 3}]


@pytest.mark.parametrize(
    "entry",
    [
        7,
        [*GOOD, 1],
        ["NoSuch", {"step": 0, "time": 0.5}],
        ["StepEnded", [0, 0.5, 3]],
        ["StepEnded", {"step": 0, "time": 0.5}],
    ],
    ids=str,
)
def test_an_entry_that_is_no_event_is_named(entry: Any) -> None:
    text = json.dumps([{"format": 3, "settings": {}}, GOOD, GOOD, entry, GOOD])
    with pytest.raises(ValueError) as error:
        Trace.from_json(text)
    assert str(error.value).startswith(f"event 2 of the trace, {entry}, is none: ")


def test_a_recorder_notes_step_and_time_and_serves_one_engine() -> None:
    recorder, ticks = Recorder(), count(1)
    with pytest.raises(ValueError, match="no clock yet"):
        recorder.record(StepBegan)
    recorder.bind(lambda: float(next(ticks)), {"policy": "mine"})
    recorder.record(StepBegan)
    recorder.record(TokenSampled, "a", 7)
    recorder.step += 1
    with pytest.raises(ValueError, match="belongs to another engine"):
        recorder.bind(lambda: 0.0, {})
    recorder.record(Finished, "a", "length", None)
    told = StepBegan(0, 1.0), TokenSampled(0, 2.0, "a", 7), Finished(1, 3.0, "a", "length", None)
    assert recorder.trace() == Trace({"policy": "mine"}, told)


# -- the pool in each step: what the live memory says ---------------------------------------------

UNITS = {ROWS: 20, PAGES: 4, CELLS: 1}  # slots of a row, a block, a cell


class Seen(NamedTuple):
    """What the memory itself said while a forward ran."""

    tokens: dict[int, dict[str, int]]
    owners: dict[int, set[str]]
    new: set[int]
    entries: dict[str, int]
    state: EngineState


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
        runs = {one.request.request_id: one.allocation for one in scheduled}
        seen = Seen({}, {}, set(), {}, self.engine.state())
        for request in (*scheduler.running, *scheduler.waiting):
            name = request.request_id
            table = memory.describe(name).table
            everywhere = [u * self.unit + i for u in table for i in range(self.unit)]
            if table:
                seen.entries[name] = len(table)
            for slot in everywhere:
                seen.owners.setdefault(slot, set()).add(name)
            runs_already = name in seen.state.running
            many = request.num_computed_tokens if runs_already else shared_by(memory, name)
            if name in runs:
                new = runs[name].new_slots
                seen.new.update(new)
                many = runs[name].first_position + len(new)
            for position, slot in enumerate(everywhere[:many]):
                seen.tokens.setdefault(slot, {})[name] = position
        return seen


def shared_by(memory: KVMemory, name: str) -> int:
    """Tokens that a fork which waits has from its parent."""
    if isinstance(memory, PagedKVCache):
        return memory._held[name].num_cached if name in memory._held else 0
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
        if i == 5:
            engine._schedule()  # a plan that is broken off
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
    assert [step.planned.unfinished() for step in history(trace)] == [one.state for one in seen]
    for i, (snapshot, live) in enumerate(zip(found, seen, strict=True)):
        assert snapshot.step == i
        assert {s: dict(who) for s, who in snapshot.tokens.items()} == live.tokens
        assert {s: set(who) for s, who in snapshot.owners.items()} == live.owners
        assert (snapshot.waiting, snapshot.running) == live.state[:2]
        assert snapshot.new == live.new and dict(snapshot.entries) == live.entries
        usage = snapshot.usage
        assert (usage.used, usage.free) == (len(live.tokens), 40 - len(live.owners))
        assert usage.used + usage.reserved + usage.free == 40 and min(usage) >= 0


@pytest.mark.parametrize("kind", UNITS)
def test_steps_have_all_events_and_the_states_between_them(kind: str) -> None:
    """Those of a plan that was broken off are in the step that came of the next one."""
    (trace, _), done = watched_run(kind, 0), 0
    for step in history(trace):
        assert step.events == trace.events[done : done + len(step.events)]
        done += len(step.planning)
        began = max(i for i in range(done) if isinstance(trace.events[i], StepBegan))
        assert step.before == replay(trace.events[:began])
        assert step.planned == replay(trace.events[:done])
        done += len(step.results)
        assert step.after == replay(trace.events[:done])
        assert (step.began, step.ended) == (trace.events[began].time, trace.events[done - 1].time)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (StepEnded(0, 1.0, 4), "step 0 of the trace ended and was never planned"),
        (Preempted(0, 0.0, "a"), r"Preempted\(.*cannot follow the events"),  # it never ran
        (Admitted(0, 0.0, "a", 4), r"Admitted\(.*cannot follow the events"),
        (TokenSampled(0, 0.0, "never added", 1), r"TokenSampled\(.*cannot follow the events"),
    ],
)
def test_events_that_cannot_follow_each_other_are_named(after: Event, says: str) -> None:
    added = Added(0, 0.0, "a", (1, 2, 3), 8, 0.0)
    with pytest.raises(ValueError, match=says):
        list(history(Trace({}, (added, StepBegan(0, 0.0), after))))


def test_the_runs_that_were_watched_share_preempt_and_fork() -> None:
    """Or the comparison above would be about less than it says."""
    for kind in (PAGES, CELLS):
        runs = [watched_run(kind, seed) for seed in range(4)]
        happened = {type(event) for trace, _ in runs for event in trace.events}
        shared = events.BlockCopied if kind == PAGES else events.CellsShared
        assert happened >= {events.Preempted, events.Forked, shared}
        assert any(len(who) > 1 for _, seen in runs for one in seen for who in one.tokens.values())
        if kind == CELLS:
            seen = [one for _, all_ in runs for one in all_]
            waits = [one for one in seen if one.entries.keys() - {*one.state.running}]
            assert waits, "a fork that waits holds what it shares"


def test_what_is_counted_of_a_run_is_counted_of_its_snapshots() -> None:
    trace, seen = watched_run(PAGES, 0)
    whole = PoolHistory.of(trace)
    waste = [len(one.owners) - len(one.tokens) for one in seen]
    entries = [list(one.entries.values()) for one in seen]
    assert whole.num_steps == len(seen) and whole.peak_waste == max(waste)
    assert whole.mean_waste == pytest.approx(sum(waste) / len(seen))
    assert whole.total_entries == max(map(sum, entries))
    assert whole.most_running == max(len(one.state.running) for one in seen)
    assert whole.peak_used == max(len(one.tokens) for one in seen)
    queues = [(one.state.running, one.state.waiting, one.tokens) for one in seen]
    fullness = [tuple(map(len, one)) for one in queues]
    assert fullness[whole.fullest.step] == max(fullness)


def test_sizes_of_a_pool_come_from_the_settings() -> None:
    assert Pool.of({"num_cells": 7}) == Pool(CELLS, 1, 7)
    assert Pool.of({"num_blocks": 3, "block_size": 4}) == Pool(PAGES, 4, 3)
    pool = Pool.of({"num_rows": 2, "row_len": 10, "policy": "Scheduler"})
    assert pool == Pool(ROWS, 10, 2) and pool.num_slots == 20 and pool.slots(1) == range(10, 20)
    with pytest.raises(ValueError, match="no rows, blocks or cells"):
        Pool.of({"policy": "Scheduler"})
    with pytest.raises(ValueError, match="no step of this trace"):
        PoolHistory.of(Trace({"num_cells": 7}, ()))
