"""Rows as answer to the scheduler's question: taken, freed, counted, and never shared."""

from collections.abc import Callable

import pytest
import torch
from engines import random_model

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.memory import KVCacheManager, RowManager, fork_to_give_up
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace.events import Recorder, RowFreed, RowTaken

CONFIG = random_model(num_hidden_layers=1).config


def rows(num: int = 2, length: int = 8, recorder: Recorder | None = None) -> RowManager:
    return RowManager.from_config(CONFIG, CacheConfig(max_seqs=num, max_len=length), recorder)


def request(name: str) -> Request:
    params = SamplingParams()
    return Request(name, [1, 2, 3], Sampler(params), StopChecker(params))


A, B, C = (request(name) for name in "abc")


def test_it_is_as_large_as_it_was_asked_to_be() -> None:
    manager: KVCacheManager = rows(3, 8)
    assert manager.max_len == 8 and manager.storage.num_slots == 24
    assert isinstance(manager, RowManager) and manager.num_free_rows == 3


def test_a_request_takes_a_row_and_writes_it_from_its_beginning() -> None:
    manager = rows()
    room = manager.allocate(A, 3)
    assert room is not None
    assert (room.first_position, list(room.new_slots)) == (0, [0, 1, 2])
    assert room.context_slots == slice(0, 3)
    assert manager.table_of(A) == (0,) and manager.num_free_rows == 1
    other = manager.allocate(B, 2)
    assert other is not None and list(other.new_slots) == [8, 9]
    assert manager.table_of(B) == (1,)


def test_only_what_was_committed_counts() -> None:
    manager = rows()
    manager.allocate(A, 3)
    assert manager.slots_of(A) == ()
    manager.commit(A, 2)
    assert manager.slots_of(A) == (0, 1)
    room = manager.allocate(A, 4)
    assert room is not None
    assert (room.first_position, list(room.new_slots)) == (2, [2, 3, 4, 5])
    assert room.context_slots == slice(0, 6)
    manager.check_integrity()


def test_asked_twice_before_a_commit_the_answer_is_the_same() -> None:
    manager = rows()
    manager.allocate(B, 1)
    first = manager.allocate(A, 3)
    assert manager.allocate(A, 3) == first
    assert manager.num_free_rows == 0
    manager.check_integrity()


def books(manager: RowManager) -> object:
    held = [(manager.table_of(one), manager.slots_of(one)) for one in (A, B, C)]
    return held, manager.num_free_rows, manager.cache.seq_lens


def test_without_a_free_row_nothing_happens() -> None:
    recorder = Recorder()
    recorder.bind(lambda: 0.0, {})
    manager = rows(2, recorder=recorder)
    for one in (A, B):
        manager.allocate(one, 3)
        manager.commit(one, 3)
    before, events = books(manager), len(recorder.events)
    assert manager.allocate(C, 1) is None
    assert books(manager) == before and len(recorder.events) == events
    assert manager.allocate(A, 1) is not None, "who has a row goes on"


def test_a_freed_row_is_empty_and_the_next_one_taken() -> None:
    manager = rows(2)
    for one in (A, B):
        manager.allocate(one, 3)
        manager.commit(one, 3)
    manager.free(A)
    assert (manager.table_of(A), manager.slots_of(A), manager.num_free_rows) == ((), (), 1)
    assert manager.slots_of(B) == (8, 9, 10)
    room = manager.allocate(C, 2)
    assert room is not None
    assert (room.first_position, list(room.new_slots)) == (0, [0, 1])
    manager.check_integrity()


def test_freeing_what_holds_nothing_changes_nothing() -> None:
    recorder = Recorder()
    recorder.bind(lambda: 0.0, {})
    manager = rows(recorder=recorder)
    manager.allocate(A, 3)
    manager.free(A)
    before = books(manager)
    manager.free(A)
    manager.free(C)
    assert books(manager) == before and manager.num_free_rows == 2
    assert len(recorder.events) == 2
    manager.check_integrity()


def test_a_strange_request_holds_nothing() -> None:
    manager = rows()
    assert (manager.slots_of(C), manager.table_of(C)) == ((), ())


def test_every_row_taken_and_freed_is_told_once() -> None:
    recorder = Recorder()
    recorder.bind(lambda: 2.0, {})
    manager = rows(recorder=recorder)
    manager.allocate(A, 3)
    manager.commit(A, 3)
    manager.allocate(A, 1)
    manager.allocate(B, 1)
    manager.free(A)
    assert list(recorder.events) == [
        RowTaken(0, 2.0, "a", 0),
        RowTaken(0, 2.0, "b", 1),
        RowFreed(0, 2.0, "a", 0),
    ]


def test_without_a_recorder_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("recorded without a recorder")

    monkeypatch.setattr(Recorder, "record", never)
    manager = rows()
    manager.allocate(A, 3)
    manager.commit(A, 3)
    manager.free(A)
    assert manager.num_free_rows == 2


def lose_a_row(manager: RowManager) -> None:
    manager._free.pop()


def free_a_taken_row(manager: RowManager) -> None:
    manager._free.append(0)


def give_a_row_twice(manager: RowManager) -> None:
    manager._rows["b"] = 0


def a_row_that_is_not_there(manager: RowManager) -> None:
    manager._free[-1] = 7


def tokens_in_a_free_row(manager: RowManager) -> None:
    manager.cache.advance(manager._free[-1], 1)


def longer_than_a_row(manager: RowManager) -> None:
    manager.cache._lens[0] = 9


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (lose_a_row, r"rows \[0\] are taken and \[2\] free, of 3"),
        (free_a_taken_row, r"rows \[0\] are taken and \[0, 1, 2\] free, of 3"),
        (give_a_row_twice, r"rows \[0, 0\] are taken"),
        (a_row_that_is_not_there, r"\[2, 7\] free, of 3"),
        (tokens_in_a_free_row, "row 1 is free and holds tokens"),
        (longer_than_a_row, "row 0 has 9 of 8 tokens"),
    ],
)
def test_books_that_do_not_add_up_are_noticed(
    corrupt: Callable[[RowManager], None], says: str
) -> None:
    manager = rows(3)
    manager.allocate(A, 3)
    manager.commit(A, 3)
    manager.check_integrity()
    corrupt(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_integrity()


# -- no memory ------------------------------------------------------------------------------------

LAYOUT = CacheConfig(max_seqs=3, max_len=8)
NUM_BYTES = LAYOUT.num_bytes(CONFIG)


def test_the_bytes_are_those_of_all_rows() -> None:
    """K and V, one layer, 2 heads of 16 in fp32, 3 rows of 8."""
    assert NUM_BYTES == 2 * 1 * 2 * 16 * 4 * 3 * 8 == rows(3).storage.num_bytes


def test_no_memory_is_an_error_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    says = f"3 rows of 8 tokens .{NUM_BYTES:,} bytes.: lower max_num_seqs or max_model_len"
    with pytest.raises(ValueError, match=says) as error:
        RowManager.from_config(CONFIG, LAYOUT)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_more_than_any_machine_has_is_an_error_with_the_bytes() -> None:
    layout = CacheConfig(max_seqs=10**12, max_len=8)  # 2 · 10^15 bytes: no address space for it
    with pytest.raises(ValueError, match=f"{layout.num_bytes(CONFIG):,} bytes"):
        RowManager.from_config(CONFIG, layout)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> StaticKVCache:
        raise KeyError("no")

    monkeypatch.setattr(StaticKVCache, "from_config", broken)
    with pytest.raises(KeyError):
        RowManager.from_config(CONFIG, LAYOUT)


@pytest.mark.parametrize(
    ("key", "waiting", "holding", "given_up"),
    [
        ("A", ["A.1", "A.2"], ["A", "A.1", "A.2"], "A.2"),  # one that runs: the newest goes
        ("A", [], ["A", "B"], None),  # nobody waits
        ("C", ["A.1"], ["A", "A.1"], None),  # a newcomer waits for those who run
        ("A.1", ["A.1"], ["A", "A.1"], None),  # and so does a fork
        ("A.2", ["A.1", "A.2"], ["A.1", "A.2"], "A.1"),  # nobody runs: another before itself
        ("A.1", ["A.1"], ["A.1"], "A.1"),  # nobody else is left: it is computed anew
        ("C", ["A.1", "A.2"], ["A.1", "A.2"], "A.2"),
    ],
)
def test_a_fork_that_waits_gives_way_to_whoever_runs_or_all_would_wait(
    key: str, waiting: list[str], holding: list[str], given_up: str | None
) -> None:
    assert fork_to_give_up(key, waiting, holding) == given_up
