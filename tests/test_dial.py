"""The dial gives the same tokens wherever it stands, and its counts are what happened."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.dial import Dial, DialPoint, Measured, sharing, sweep_block_sizes
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
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
    return tuple(sweep_block_sizes(load_model(), arrivals(), SIZES, num_slots, repeats=0))


def at(position: Any) -> DialPoint:
    return next(p for p in points() if p.position == position)


def test_the_reference_does_not_hang_on_rounding() -> None:
    """The best token is more than 1e-3 ahead of the next one, at each step of each request."""
    for one in arrivals():
        params = SamplingParams(max_tokens=one.params.max_tokens, ignore_eos=True, logprobs=2)
        (output,) = generate(load_model(), [one.prompt], params, max_len=64)
        for token in output.outputs[0].tokens:
            (_, best), (_, second) = token.top_logprobs
            assert best - second > 1e-3


@pytest.mark.parametrize("position", [CELLS, *SIZES, ROWS])
def test_tokens_are_those_of_each_request_alone_wherever_the_dial_stands(position: Any) -> None:
    assert at(position).tokens_equal


def test_the_dial_sees_a_map_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedKVCache._slots_of

    def wrong(self: PagedKVCache, blocks: Sequence[int]) -> Tensor:
        return torch.full((len(blocks) * self.block_size,), right(self, blocks[:1]).start)

    dial = Dial(load_model(), arrivals(3), 128, 64)
    assert dial.at(4).tokens_equal
    monkeypatch.setattr(PagedKVCache, "_slots_of", wrong)
    assert not dial.at(4).tokens_equal


def test_all_positions_have_the_same_slots_and_one_storage() -> None:
    assert [p.position for p in points()] == [CELLS, *SIZES, ROWS]
    assert {p.pool.num_slots for p in points()} == {128}
    assert [p.pool.unit for p in points()] == [1, *SIZES, 64]
    dial = Dial(load_model(), arrivals(2), 128, 64)
    maps = [dial.memory_at(position) for position in (CELLS, 4, ROWS)]
    assert {id(memory.storage) for memory in maps} == {id(dial.storage)}
    assert [p.name for p in points()][::7] == ["cells", "rows"] and at(16).name == "pages of 16"


def test_larger_blocks_waste_more_and_need_shorter_tables() -> None:
    waste = [at(position).mean_waste for position in (1, 2, 4, 8, ROWS)]
    assert all(a < b for a, b in pairwise(waste))
    entries = [at(size).total_entries for size in SIZES]
    assert all(a > b for a, b in pairwise(entries)) and at(ROWS).total_entries == 2
    assert at(1).peak_waste <= at(2).peak_waste < at(ROWS).peak_waste
    assert at(ROWS).most_running == 2 < at(4).most_running


def test_a_request_wastes_less_than_a_block_once_its_prompt_is_run() -> None:
    for point in points():
        running: dict[str, int] = {}
        for e in point.trace.events:
            if isinstance(e, events.Scheduled):
                running[e.request_id] = e.first_position
        last = point.snapshots[-1]  # all that is there decodes
        assert all(running[name] for name in last.running)
        assert last.usage.reserved < len(last.entries) * point.pool.unit


def test_only_pages_find_tokens_and_only_whole_blocks() -> None:
    """With room for all; who is preempted finds its own blocks again, besides."""
    roomy = {point.position: point for point in points(256)}
    assert all(roomy[size].preemptions == 0 for size in SIZES)
    assert roomy[CELLS].tokens_found == roomy[ROWS].tokens_found == 0
    for size in SIZES:
        shared = sum(isinstance(e, events.BlockShared) for e in roomy[size].trace.events)
        assert roomy[size].tokens_found == size * shared
        assert roomy[size].tokens_run + roomy[size].tokens_found == roomy[ROWS].tokens_run
    story = len(load_tokenizer().encode(STORY).ids)
    begin_so = sum((i + 1) % 3 > 0 for i in range(8))
    assert story == 16 and roomy[16].tokens_found == 16 * (begin_so - 1)
    assert roomy[1].tokens_found >= roomy[4].tokens_found >= 16 * (begin_so - 1)
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
    found = {}
    for position in (CELLS, 1, 4, 16, ROWS):
        copied[0] = 0
        point = dial.at(position)
        assert point.bytes_gathered == copied[0]
        found[position] = point.bytes_gathered
        assert sum(point.copied) * dial.storage.spec.bytes_per_token == copied[0]
        assert len(point.copied) == sum(len(s.scheduled) for s in history(point.trace))
    assert found[ROWS] == 0 < found[16] < found[4]


def test_counts_are_those_of_the_trace() -> None:
    for point in points():
        kinds = [type(event) for event in point.trace.events]
        assert point.num_steps == point.trace.num_steps == kinds.count(events.StepEnded)
        assert point.preemptions == kinds.count(events.Preempted)
        ended = (e for e in point.trace.events if isinstance(e, events.StepEnded))
        assert point.tokens_run == sum(e.num_tokens for e in ended)
        usage = [snapshot.usage for snapshot in point.snapshots]
        assert point.mean_waste == sum(u.reserved for u in usage) / len(usage)
        assert point.peak_waste == max(u.reserved for u in usage)
        assert point.names == tuple(one.request_id for one in arrivals())
        ended = max(e.time for e in point.trace.events if isinstance(e, events.Finished))
        assert point.milliseconds == 1000 * ended > 0
    assert any(point.preemptions for point in points())


def test_time_counts_what_steps_do_not() -> None:
    """Requests come over time: who has fewer steps need not be done sooner."""
    clock = VirtualClock()
    for point in points():
        work = point.num_steps * clock.per_forward + point.tokens_run * clock.per_token
        assert point.milliseconds >= 1000 * work - 1e-6, "and waits for arrivals, besides"
    order = [sorted(points(), key=key) for key in (lambda p: p.num_steps, lambda p: p.milliseconds)]
    assert order[0] != order[1] and at(ROWS).milliseconds == max(p.milliseconds for p in points())


def test_a_second_sweep_counts_the_same() -> None:
    again = sweep_block_sizes(load_model(), arrivals(), (4,), num_slots=128, repeats=0)
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
    found = sweep_block_sizes(load_model(), arrivals(3), (4,), num_slots=128, repeats=2)
    assert len(rounds) == 6
    for i, point in enumerate(found):
        one, other = rounds[i], rounds[i + 3]
        assert point.measured == Measured(max(one[0], other[0]), min(one[1], other[1]))
        assert point.measured.tokens_per_second > 1 and 0 < point.measured.bookkeeping < 1


def test_nobody_reads_what_the_map_before_has_left() -> None:
    dial = Dial(load_model(), arrivals(3), 128, 64)
    dial.at(ROWS)
    slots = set(range(128)) - {s for m in dial.at(4).snapshots for s in m.tokens}
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
        sweep_block_sizes(
            load_model(), **{"arrivals": arrivals(2), "num_slots": 128, "repeats": 0} | options
        )


@pytest.mark.parametrize("number", [0, 27])
def test_a_crowd_has_a_letter_for_each(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_requests must be 1 .. 26, .* got {number}"):
        sharing([1], 50, number)
