"""The pool step by step is what the live memory says, and the dial's counts are what happened."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from engines import VOCAB, one_thread, random_model
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVCacheManager, RowManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.model_runner import ModelRunner, Outcome
from tutorial_engine.engine.scheduler import ScheduledRequest
from tutorial_engine.lab.dial import Dial, DialPoint, Measured, sharing, turn
from tutorial_engine.lab.pool import (
    CELLS,
    ROWS,
    Moment,
    Pool,
    PoolHistory,
    memory_over_time,
    moments,
)
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.model.batch import Slots
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, Trace

STORY = "Once upon a time Anna had a red kite. Ben had a blue ball."
SIZES = (1, 2, 4, 8, 16, 32)


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


# -- the pool, against the live memory ------------------------------------------------------------


class Seen(NamedTuple):
    """What the memory itself said while a forward ran."""

    tokens: dict[int, dict[str, int]]
    held: dict[int, set[str]]
    new: set[int]
    running: tuple[str, ...]
    entries: dict[str, int]


class Watching(ModelRunner):
    """Looks into the memory at every forward."""

    seen: list[Seen]
    engine: LLMEngine

    def run(self, scheduled: Sequence[ScheduledRequest]) -> Outcome:
        self.seen.append(self.look(scheduled))
        return super().run(scheduled)

    def look(self, scheduled: Sequence[ScheduledRequest]) -> Seen:
        memory, shares = self.engine.memory, {s.request.request_id: s for s in scheduled}
        seen = Seen({}, {}, set(), tuple(r.request_id for r in self.engine.scheduler.running), {})
        for name, request in self.engine.requests.items():
            unit = unit_of(memory)
            table = memory.table_of(request)
            slots = list(memory.slots_of(request))
            if not slots and table and request in self.engine.scheduler.waiting:
                slots = [s for u in table for s in range(u * unit, u * unit + unit)]
                slots = slots[: shared_by(memory, name)]  # a fork that waits
            if name in shares:
                new = list(shares[name].allocation.new_slots)
                slots = slots[: shares[name].allocation.first_position] + new
                seen.new.update(new)
            for position, slot in enumerate(slots):
                seen.tokens.setdefault(slot, {})[name] = position
            for u in table:
                for slot in range(u * unit, u * unit + unit):
                    seen.held.setdefault(slot, set()).add(name)
            if table:
                seen.entries[name] = len(table)
        return seen


def unit_of(memory: KVCacheManager) -> int:
    if isinstance(memory, PagedKVCache):
        return memory.block_size
    return memory.cache.max_len if isinstance(memory, RowManager) else 1


def shared_by(memory: KVCacheManager, name: str) -> int:
    if isinstance(memory, PagedKVCache):
        return memory._held[name].num_tokens
    assert isinstance(memory, CellKVCache)
    return memory._stored[name]


def memory_of(kind: str, model: Qwen3ForCausalLM, slots: int) -> KVCacheManager:
    if kind == CELLS:
        return CellKVCache.from_config(model.config, slots)
    paged = PagedKVCache.from_config(model.config, block_size=4, num_blocks=slots // 4)
    if kind == "pages":
        return paged
    return RowManager(StaticKVCache(paged.storage, slots // 20, 20))


@cache
def watched_run(kind: str, seed: int) -> tuple[Trace, list[Seen]]:
    """Eight ragged requests in 40 slots, two of them with two samples, one aborted."""
    draw, model = random.Random(seed), random_model()
    memory, recorder = memory_of(kind, model, 40), Recorder()
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=9, max_model_len=20)
    with one_thread():
        engine = LLMEngine(
            model, config=config, memory=memory, clock=VirtualClock(), trace=recorder
        )
        runner = Watching(model, memory.storage)
        runner.seen, runner.engine = [], engine
        engine.model_runner = runner
        start = [draw.randrange(VOCAB) for _ in range(5)]
        for i in range(8):
            prompt = start * (i % 3 > 0) + draw.choices(range(VOCAB), k=draw.randint(1, 8))
            params = SamplingParams(
                max_tokens=draw.randint(2, 7), ignore_eos=True, n=2 if i % 4 == 1 else 1,
                temperature=1.0, seed=seed,
            )  # fmt: skip
            engine.add_request(prompt, params, chr(65 + i))
            engine.step()
        engine.abort(next(reversed(engine.requests)).split(".")[0])
        while engine.has_unfinished_requests:
            engine.step()
            engine.check_integrity()
    return recorder.trace(), runner.seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [ROWS, "pages", CELLS])
def test_every_moment_of_a_trace_is_what_the_live_memory_said(kind: str, seed: int) -> None:
    trace, seen = watched_run(kind, seed)
    found = moments(trace)
    assert len(found) == len(seen) == trace.num_steps > 8
    for i, (moment, live) in enumerate(zip(found, seen, strict=True)):
        assert moment.step == i
        assert {s: dict(who) for s, who in moment.tokens.items()} == live.tokens
        assert {s: set(who) for s, who in moment.held.items()} == live.held
        assert moment.new == live.new and moment.running == live.running
        assert dict(moment.entries) == live.entries


@pytest.mark.parametrize("kind", [ROWS, "pages", CELLS])
def test_used_reserved_and_free_slots_are_all_slots(kind: str) -> None:
    trace, seen = watched_run(kind, 0)
    for usage, live in zip(memory_over_time(trace), seen, strict=True):
        assert usage.used + usage.reserved + usage.free == 40
        assert (usage.used, usage.free) == (len(live.tokens), 40 - len(live.held))
        assert min(usage) >= 0


def test_the_runs_that_were_watched_share_preempt_and_fork() -> None:
    """Or the comparison above would be about less than it says."""
    kinds = {(k, type(e)) for k in ("pages", CELLS) for s in range(4)
             for e in watched_run(k, s)[0].events}  # fmt: skip
    for kind in ("pages", CELLS):
        assert (kind, events.Preempted) in kinds and (kind, events.Forked) in kinds
    assert ("pages", events.BlockCopied) in kinds and (CELLS, events.CellsShared) in kinds
    several = [len(who) for k in ("pages", CELLS) for _, seen in [watched_run(k, 0)]
               for one in seen for who in one.tokens.values()]  # fmt: skip
    assert max(several) > 1
    waits = [m for k in ("pages", CELLS) for s in range(4) for m in moments(watched_run(k, s)[0])
             if any(name not in m.running for name in m.entries)]  # fmt: skip
    assert waits, "a fork that waits holds what it shares"


def test_sizes_of_a_pool_come_from_the_settings() -> None:
    assert Pool.of({"num_cells": 7}) == Pool(CELLS, 1, 7)
    assert Pool.of({"num_blocks": 3, "block_size": 4}) == Pool("pages", 4, 3)
    pool = Pool.of({"num_rows": 2, "row_len": 10, "policy": "Scheduler"})
    assert pool == Pool(ROWS, 10, 2) and pool.num_slots == 20 and pool.slots(1) == range(10, 20)
    with pytest.raises(ValueError, match="no rows, blocks or cells"):
        Pool.of({"policy": "Scheduler"})


def test_a_trace_without_a_step_has_no_history() -> None:
    with pytest.raises(ValueError, match="no step of this trace"):
        PoolHistory.of(Trace({"num_cells": 7}, ()))


# -- the dial -------------------------------------------------------------------------------------


def arrivals(num_requests: int = 8) -> list[Arrival]:
    prefix = load_tokenizer().encode(STORY).ids
    return sharing(prefix, 512, num_requests, outputs=(4, 14))


@cache
def points(num_slots: int = 128) -> tuple[DialPoint, ...]:
    with one_thread():
        return tuple(turn(load_model(), arrivals(), SIZES, num_slots, repeats=0))


def at(position: Any) -> DialPoint:
    return next(p for p in points() if p.position == position)


def test_the_reference_does_not_hang_on_rounding() -> None:
    """The best token is more than 1e-3 ahead of the next one, at each step of each request."""
    for one in arrivals():
        params = SamplingParams(max_tokens=one.params.max_tokens, ignore_eos=True, logprobs=2)
        (output,) = generate(load_model(), [one.prompt], params, max_len=64)
        for token in output.tokens:
            (_, best), (_, second) = token.top_logprobs
            assert best - second > 1e-3


@pytest.mark.parametrize("position", [CELLS, *SIZES, ROWS])
def test_tokens_are_those_of_each_request_alone_wherever_the_dial_stands(position: Any) -> None:
    assert at(position).tokens_equal


def test_the_dial_sees_a_map_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedKVCache._slots

    def mirrored(self: PagedKVCache, table: Sequence[int], start: int, end: int) -> Sequence[int]:
        return list(reversed(right(self, table, start, end)))

    dial = Dial(load_model(), arrivals(3), 128, 64)
    assert dial.at(4).tokens_equal
    monkeypatch.setattr(PagedKVCache, "_slots", mirrored)
    assert not dial.at(4).tokens_equal


def test_all_positions_have_the_same_slots_and_one_storage() -> None:
    assert [p.position for p in points()] == [CELLS, *SIZES, ROWS]
    assert {p.pool.num_slots for p in points()} == {128}
    assert [p.pool.unit for p in points()] == [1, *SIZES, 64]
    dial = Dial(load_model(), arrivals(2), 128, 64)
    maps = [dial.map_at(position) for position in (CELLS, 4, ROWS)]
    assert {id(memory.storage) for memory in maps} == {id(dial.storage)}
    assert [p.name for p in points()][::7] == ["cells", "rows"] and at(16).name == "pages of 16"


def test_larger_blocks_waste_more_and_need_shorter_tables() -> None:
    waste = [at(position).mean_waste for position in (1, 2, 4, 8, ROWS)]
    assert all(a < b for a, b in pairwise(waste))
    entries = [at(size).total_entries for size in SIZES]
    assert all(a > b for a, b in pairwise(entries)) and at(ROWS).most_entries == 1
    assert at(1).peak_waste <= at(2).peak_waste < at(ROWS).peak_waste
    assert at(ROWS).total_entries == at(ROWS).most_running == 2 < at(4).most_running


def test_a_request_wastes_less_than_a_block_once_its_prompt_is_run() -> None:
    for point in points():
        running: dict[str, int] = {}
        for e in point.trace.events:
            if isinstance(e, events.Scheduled):
                running[e.request_id] = e.first_position
        last = point.moments[-1]  # all that is there decodes
        assert all(running[name] for name in last.running)
        assert last.usage.reserved < len(last.entries) * point.pool.unit


def test_only_pages_find_tokens_and_only_whole_blocks() -> None:
    """With room for all; who is preempted finds its own blocks again, besides."""
    roomy = {point.position: point for point in points(256)}
    assert all(roomy[size].preemptions == 0 for size in SIZES)
    assert roomy[CELLS].tokens_found == roomy[ROWS].tokens_found == roomy[ROWS].most_shared == 0
    for size in SIZES:
        assert roomy[size].tokens_found == roomy[size].blocks_found * size
        assert roomy[size].tokens_run + roomy[size].tokens_found == roomy[ROWS].tokens_run
    story = len(load_tokenizer().encode(STORY).ids)
    begin_so = sum((i + 1) % 3 > 0 for i in range(8))
    assert story == 16 and roomy[16].tokens_found == 16 * (begin_so - 1)
    assert roomy[1].tokens_found >= roomy[4].tokens_found >= 16 * (begin_so - 1)
    assert roomy[32].tokens_found == 0  # no whole block is the same
    assert roomy[16].most_shared == 16  # kept once for all of them


def test_bytes_gathered_are_those_that_the_storage_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = [0]
    read = KVStorage.read

    def counting(self: KVStorage, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        k, v = read(self, layer, slots)
        mine = {shelf.untyped_storage().data_ptr() for shelf in (self.k, self.v)}
        copied[0] += sum(x.nbytes for x in (k, v) if x.untyped_storage().data_ptr() not in mine)
        return k, v

    dial = Dial(load_model(), arrivals(), 128, 64)
    assert dial.expected  # before anything is counted
    monkeypatch.setattr(KVStorage, "read", counting)
    found = {}
    for position in (CELLS, 1, 4, 16, ROWS):
        copied[0] = 0
        point = dial.at(position)
        assert point.bytes_gathered == copied[0]
        assert point.bytes_gathered_per_step == copied[0] / point.num_steps
        found[position] = point.bytes_gathered
    assert found[ROWS] == 0 < found[16] < found[4]


def test_counts_are_those_of_the_trace() -> None:
    for point in points():
        kinds = [type(event) for event in point.trace.events]
        assert point.num_steps == point.trace.num_steps == kinds.count(events.StepEnded)
        assert point.preemptions == kinds.count(events.Preempted)
        ended = (e for e in point.trace.events if isinstance(e, events.StepEnded))
        assert point.tokens_run == sum(e.num_tokens for e in ended)
        usage = memory_over_time(point.trace)
        assert point.mean_waste == sum(u.reserved for u in usage) / len(usage)
        assert point.mean_used == sum(u.used for u in usage) / len(usage)
        assert point.peak_waste == max(u.reserved for u in usage)
        assert point.names == tuple(one.request_id for one in arrivals())
    assert any(point.preemptions for point in points())


def test_a_second_turn_counts_the_same() -> None:
    again = turn(load_model(), arrivals(), (4,), num_slots=128, repeats=0)
    assert again == [at(CELLS), at(4), at(ROWS)]


def test_what_is_measured_is_only_there_on_request_and_the_best_of_all_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(point.measured is None for point in points())
    rounds: list[Measured] = []
    measure = Dial.measure

    def noted(self: Dial, position: Any) -> Measured:
        rounds.append(measure(self, position))
        return rounds[-1]

    monkeypatch.setattr(Dial, "measure", noted)
    found = turn(load_model(), arrivals(3), (4,), num_slots=128, repeats=2)
    assert len(rounds) == 6
    for i, point in enumerate(found):
        one, other = rounds[i], rounds[i + 3]
        assert point.measured == Measured(max(one[0], other[0]), min(one[1], other[1]))
        assert point.measured.tokens_per_second > 1 and 0 < point.measured.bookkeeping < 1


def test_nobody_reads_what_the_map_before_has_left() -> None:
    dial = Dial(load_model(), arrivals(3), 128, 64)
    dial.at(ROWS)
    slots = set(range(128)) - {s for m in dial.at(4).moments for s in m.tokens}
    assert slots and torch.isnan(dial.storage.k[:, sorted(slots)]).all()


def test_requests_share_a_prefix_and_are_ragged() -> None:
    made = sharing([1, 2, 3], 50, 9, every=4, gap=0.5, tails=(2, 6), outputs=(1, 5))
    assert [one.request_id for one in made] == list("ABCDEFGHI")
    assert [one.time for one in made] == [0.5 * i for i in range(9)]
    starts = [tuple(one.prompt)[:3] == (1, 2, 3) for one in made]
    assert starts == [(i + 1) % 4 > 0 for i in range(9)]
    lens = [len(one.prompt) - 3 * start for one, start in zip(made, starts, strict=True)]
    assert min(lens) >= 2 and max(lens) <= 6 and len(set(lens)) > 2
    outputs = {one.params.max_tokens for one in made}
    assert min(outputs) >= 1 and max(outputs) <= 5 and len(outputs) > 2
    assert made == sharing([1, 2, 3], 50, 9, every=4, gap=0.5, tails=(2, 6), outputs=(1, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 100}, "100 slots must make whole rows of max_len=64"),
        ({"arrivals": []}, "for one request at least; got 0"),
        ({"block_sizes": (3,)}, "128 slots do not make blocks of 3"),
        ({"block_sizes": (0,)}, "block_size must be"),
        ({"block_sizes": ("pages",)}, "has block sizes, 'rows' and 'cells'; got 'pages'"),
        ({"num_slots": 0}, "num_slots"),
        ({"max_len": 0}, "max_len"),
        ({"max_len": 16, "num_slots": 64}, "prompt"),
    ],
)
def test_what_the_dial_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn(load_model(), **{"arrivals": arrivals(2), "num_slots": 128, "repeats": 0} | options)


@pytest.mark.parametrize("number", [0, 27])
def test_a_crowd_has_a_letter_for_each(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_requests must be 1 .. 26, .* got {number}"):
        sharing([1], 50, number)


def test_moments_are_values() -> None:
    assert isinstance(at(4).moments[0], Moment) and at(4).moments == tuple(moments(at(4).trace))
