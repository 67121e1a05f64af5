"""Instruments of notebook 04: the dial, block sizes, vLLM's log lines, full pools, hit rates.

The dial gives the same tokens wherever it stands, and every count is what happened.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tutorial_engine.cache import CellKVCache, PagedKVCache, StaticKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.lab import hit_rate
from tutorial_engine.lab.block_size import block_size_trade, decode_table, decode_times, table
from tutorial_engine.lab.dial import Dial, DialPoint, sharing, sweep_block_sizes
from tutorial_engine.lab.hit_rate import CAUSES, RECIPES, Case, cases
from tutorial_engine.lab.pool_log import max_concurrency, pool_log
from tutorial_engine.lab.when_full import when_full
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.learn.exercises.lesson_05_causes import check_causes
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import Recorder, Trace, events
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import CELLS, ROWS

STORY = "Once upon a time Anna had a red kite. Ben had a blue ball."
SIZES = (1, 2, 4, 8, 16, 32)


# -- the dial -------------------------------------------------------------------------------------


def arrivals(num_requests: int = 8) -> list[Arrival]:
    prefix = load_tokenizer().encode(STORY).ids
    return sharing(prefix, 512, num_requests, outputs=(4, 14))


@cache
def points(num_slots: int = 128) -> tuple[DialPoint, ...]:
    return tuple(sweep_block_sizes(load_model(), arrivals(), SIZES, num_slots))


def at(position: Any) -> DialPoint:
    return next(p for p in points() if p.position == position)


def test_tokens_and_slots_are_the_same_wherever_the_dial_stands() -> None:
    assert [p.position for p in points()] == [CELLS, *SIZES, ROWS]
    assert all(p.tokens_equal for p in points())
    assert {p.pool.num_slots for p in points()} == {128}
    assert [p.pool.unit for p in points()] == [1, *SIZES, 64]
    assert [p.name for p in points()][::7] == ["cells", "rows"] and at(16).name == "pages of 16"
    again = sweep_block_sizes(load_model(), arrivals(), (4,), num_slots=128)
    assert again == [at(CELLS), at(4), at(ROWS)], "a second sweep counts the same"


def test_the_dial_sees_a_map_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedKVCache._slots_of

    def wrong(self: PagedKVCache, blocks: Sequence[int]) -> Any:
        first = right(self, blocks[:1])
        return torch.full((len(blocks) * self.block_size,), first.start)

    dial = Dial(load_model(), arrivals(3), 128, 64)
    assert dial.at(4).tokens_equal
    monkeypatch.setattr(PagedKVCache, "_slots_of", wrong)
    assert not dial.at(4).tokens_equal


def test_nobody_reads_what_the_map_before_has_left() -> None:
    dial = Dial(load_model(), arrivals(3), 128, 64)
    dial.at(ROWS)
    slots = set(range(128)) - {s for snapshot in dial.at(4).snapshots for s in snapshot.tokens}
    assert slots and torch.isnan(dial.storage.k[:, sorted(slots)]).all()


def test_only_pages_find_tokens_and_only_whole_blocks() -> None:
    """With room for all; who is preempted finds its own blocks again, besides."""
    roomy = {point.position: point for point in points(256)}
    assert all(roomy[size].preemptions == 0 for size in SIZES)
    assert roomy[CELLS].tokens_found == roomy[ROWS].tokens_found == 0
    for size in SIZES:
        shared = sum(isinstance(e, events.BlockShared) for e in roomy[size].trace.events)
        assert roomy[size].tokens_found == size * shared
        assert roomy[size].tokens_run + roomy[size].tokens_found == roomy[ROWS].tokens_run
    num_with_prefix = sum((i + 1) % 3 > 0 for i in range(8))
    assert len(load_tokenizer().encode(STORY).ids) == 16
    assert roomy[16].tokens_found == 16 * (num_with_prefix - 1)
    assert roomy[1].tokens_found >= roomy[4].tokens_found >= 16 * (num_with_prefix - 1)
    assert roomy[32].tokens_found == 0  # no whole block is the same


def test_bytes_gathered_are_those_that_the_storage_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = [0]
    gather = KVStorage._gather

    def counting(self: KVStorage, *args: Any) -> Tensor:
        out = gather(self, *args)
        copied[0] += out.nbytes
        return out

    dial = Dial(load_model(), arrivals(), 128, 64)
    assert dial.expected  # before anything is counted
    monkeypatch.setattr(KVStorage, "_gather", counting)
    monkeypatch.setattr("tutorial_engine.cache.storage.LONG", 1)  # all copies go that way
    gathered = {}
    for position in (CELLS, 1, 4, 16, ROWS):
        copied[0] = 0
        point = dial.at(position)
        assert point.bytes_gathered == copied[0]
        gathered[position] = point.bytes_gathered
        assert sum(point.copied) * dial.storage.spec.bytes_per_token == copied[0]
        assert len(point.copied) == sum(len(s.scheduled) for s in history(point.trace))
    assert gathered[ROWS] == 0 < gathered[16] < gathered[4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_slots": 100}, "100 slots must make whole rows of max_len=64"),
        ({"block_sizes": (3,)}, "128 slots do not make blocks of 3"),
    ],
)
def test_what_the_dial_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sweep_block_sizes(load_model(), **{"arrivals": arrivals(2), "num_slots": 128} | options)


# -- block sizes ----------------------------------------------------------------------------------


def test_large_blocks_waste_and_small_ones_cost() -> None:
    blocks, tokens = block_size_trade([16, 1], 5, (20, 20), (5, 5), repeats=1)
    assert blocks.entries == 2 and blocks.waste == pytest.approx(100 * 7 / 32)
    assert (tokens.entries, tokens.waste) == (25, 0)
    trades = block_size_trade(num_requests=12, repeats=2)
    assert all(a.waste < b.waste and a.entries > b.entries for a, b in pairwise(trades))
    of = {trade.block_size: trade for trade in trades}
    assert of[1].bookkeeping > 2 * of[16].bookkeeping, "each block is named and found anew"
    assert of[16].waste < 5 < of[256].waste
    assert [int(line.split()[0]) for line in table(trades).splitlines()[1:]] == [*of]


def test_the_loop_over_blocks_is_slow_where_there_are_many() -> None:
    ways = {"gather": None, "loop": NaivePagedAttention}
    times = decode_times(load_model(), ways, (1, 16), num_tokens=128, steps=3)
    assert times["loop"][1] > 2 * times["loop"][16] > 0 < times["gather"][16]
    head, *lines = decode_table(times).splitlines()
    assert head.split()[-2:] == ["1", "16"] and [line.split()[0] for line in lines] == [*ways]


# -- vLLM's two log lines -------------------------------------------------------------------------

MEMORIES: dict[str, Callable[[CausalLM], KVMemory]] = {
    "pages of 4": lambda m: PagedKVCache.from_config(m.config, block_size=4, num_blocks=12),
    "pages of 16": lambda m: PagedKVCache.from_config(m.config, block_size=16, num_blocks=9),
    "cells": lambda m: CellKVCache.from_config(m.config, 50),
    "rows": lambda m: StaticKVCache.from_config(m.config, max_seqs=3, max_len=40),
}


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("length", [1, 13, 16, 40])
def test_so_many_requests_of_this_length_fit_and_no_more(
    name: str, length: int, model: CausalLM
) -> None:
    memory, fit = MEMORIES[name](model), 0
    log = pool_log(memory, length)
    while memory.allocate(f"r{fit}", range(100 * fit, 100 * fit + length), 0, length):
        fit += 1
    most = max_concurrency(memory, length)
    assert fit == int(most) > 0
    assert log.splitlines() == [
        f"KV cache size: {int(most * length)} tokens",
        f"Maximum concurrency for {length} tokens per request: {most:.2f}x",
    ]


# -- a pool that is full --------------------------------------------------------------------------


@cache
def preempting(num_blocks: int, prefix_caching: bool) -> tuple[Trace, int]:
    """A trace, and the tokens that its forwards ran."""
    model, recorder = load_model(), Recorder()
    memory = PagedKVCache.from_config(
        model.config,
        num_blocks=num_blocks,
        block_size=4,
        prefix_caching=prefix_caching,
        trace=recorder,
    )
    config = EngineConfig(max_model_len=40)
    engine = LLMEngine(model, config=config, memory=memory, clock=VirtualClock())
    prompts = {"A": list(range(10, 20)), "B": list(range(30, 37)), "C": [5, 6, 7]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    engine.run()
    ran = (e.num_tokens for e in recorder.events if isinstance(e, events.StepEnded))
    return recorder.trace(), sum(ran)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_is_recomputed_is_what_the_engine_ran_more(prefix_caching: bool) -> None:
    (trace, ran), (_, plenty) = preempting(12, prefix_caching), preempting(24, prefix_caching)
    lost = when_full(trace)
    assert len(lost) >= 2
    assert sum(loss.num_tokens - loss.num_found for loss in lost) == ran - plenty > 0
    assert any(loss.num_found for loss in lost) == prefix_caching
    assert when_full(preempting(24, prefix_caching)[0]) == []
    with pytest.raises(ValueError, match=r"this run was on rows: .* record pages"):
        when_full(Trace({"num_rows": 2, "row_len": 8}, ()))


# -- five runs that find nothing ------------------------------------------------------------------


@cache
def runs() -> tuple[Case, ...]:
    return tuple(cases(load_model(), load_tokenizer()))


@cache
def answers() -> dict[str, str]:
    return {run.name: run.cause for run in runs()}


def test_every_cause_has_one_run_which_finds_nothing_and_does_without_it() -> None:
    assert sorted(answers().values()) == sorted(RECIPES)
    assert list(answers().values()) != list(CAUSES), "the order tells nothing"
    for run in runs():
        assert run.cause not in run.describe() and run.recipe.a in run.describe()
        assert run.rate == 0 < 0.1 < run.mended_rate
        admitted = [event for event in run.trace.events if isinstance(event, events.Admitted)]
        assert len(admitted) == 3 and not any(event.num_cached for event in admitted)
        came = {e.request_id: e.step for e in run.trace.events if isinstance(e, events.Added)}
        assert came == {e.request_id: e.step for e in admitted}, "nobody waits: one line for both"
        evicts = any(isinstance(e, events.BlockTaken) and e.evicted for e in run.trace.events)
        assert evicts == ("in between" in run.cause)
    assert tuple(cases(load_model(), load_tokenizer())) == runs(), "the same a second time"


def test_every_wrong_cause_is_ruled_out_by_a_fact() -> None:
    for run in runs():
        for cause in (cause for cause in CAUSES if cause != run.cause):
            verdict = check_causes(answers() | {run.name: cause}, runs())
            assert verdict.ok is False and run.why_not(cause) in verdict.message
            assert "4 of 5 are right" in verdict.message and run.cause not in verdict.message
    half = check_causes(dict(list(answers().items())[:2]), runs())
    assert half.ok is None and "run 3, run 4, run 5" in half.message
    assert check_causes({"run 1": "bad luck"}, runs()).ok is False
    names = {v: k for k, v in vars(hit_rate).items() if isinstance(v, str) and v in CAUSES}
    assert check_causes({run: names[cause] for run, cause in answers().items()}, runs()).ok is True
    verdict = check_causes({name: f" {cause.upper()}" for name, cause in answers().items()}, runs())
    assert verdict.ok is True
    for run, line in zip(runs(), verdict.message.splitlines()[2:], strict=True):
        assert line.startswith(run.name) and run.cause in line
        assert line.endswith(f"{run.mended_rate:.0%}")
