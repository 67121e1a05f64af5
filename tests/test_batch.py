"""The flat batch: what lies where, and which lists of ids make none."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.model.batch import Batch

SEQUENCES = st.lists(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=9), min_size=1, max_size=6
)


@given(SEQUENCES)
def test_sequences_come_back_from_the_flat_batch(sequences: list[list[int]]) -> None:
    batch = Batch.from_sequences(sequences)
    assert [ids.tolist() for ids in batch.input_ids.split(batch.query_lens)] == sequences
    assert batch.num_seqs == len(sequences)
    assert batch.num_tokens == sum(map(len, sequences)) == batch.input_ids.numel()


@given(SEQUENCES, st.data())
def test_positions_count_up_from_the_first_one(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    starts = st.lists(st.integers(0, 10**5), min_size=len(sequences), max_size=len(sequences))
    firsts = data.draw(starts)
    batch = Batch.from_sequences(sequences, firsts)
    for first, positions in zip(firsts, batch.positions.split(batch.query_lens), strict=True):
        assert positions.tolist() == list(range(first, first + positions.numel()))


def test_positions_start_at_zero_unless_told() -> None:
    assert Batch.from_sequences([[5, 6, 7], [8]]).positions.tolist() == [0, 1, 2, 0]


def test_last_token_of_each_sequence_is_found() -> None:
    batch = Batch.from_sequences([[5, 6, 7], [8], [9, 10]])
    assert batch.last_token_indices == (2, 3, 5)
    assert batch.input_ids[list(batch.last_token_indices)].tolist() == [7, 8, 10]


def test_ids_and_positions_are_int64() -> None:
    batch = Batch.from_sequences([[1, 2]])
    assert batch.input_ids.dtype == batch.positions.dtype == torch.int64


def test_batch_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Batch.from_sequences([[1]]).seq_starts = (0, 2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sequences", "firsts", "named"),
    [
        ([], None, "at least one sequence"),
        ([[1], []], None, "sequence 1 is empty"),
        ([[1, -2]], None, "sequence 0 holds -2"),
        ([[1, 2.5]], None, "holds 2.5"),
        ([["a"]], None, "holds 'a'"),
        ([[True]], None, "holds True"),
        ([[1], [2]], [0, -3], "sequence 1 starts at position -3"),
        ([[1], [2]], [0], "2 sequences but 1 first positions"),
    ],
)
def test_what_is_no_batch_is_refused(sequences: Any, firsts: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Batch.from_sequences(sequences, firsts)


@pytest.mark.parametrize(
    ("shape", "positions", "starts", "named"),
    [
        ((2, 2), (2, 2), (0, 4), "flat"),
        ((4,), (3,), (0, 4), r"\[4\] and \[3\]"),
        ((4,), (4,), (0, 3), r"from 0 to 4, got \(0, 3\)"),
        ((4,), (4,), (1, 4), r"from 0 to 4, got \(1, 4\)"),
        ((4,), (4,), (0,), "from 0 to 4"),
        ((4,), (4,), (0, 2, 2, 4), "at least one token"),
        ((4,), (4,), (0, 3, 2, 4), "at least one token"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    shape: tuple[int, ...], positions: tuple[int, ...], starts: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Batch(
            torch.zeros(shape, dtype=torch.long), torch.zeros(positions, dtype=torch.long), starts
        )


# -- addresses in a cache -----------------------------------------------------------------------


def test_batch_has_no_addresses_of_its_own() -> None:
    batch = Batch.from_sequences([[1, 2], [3]])
    assert (batch.seq_ids, batch.slot_mapping, batch.context_slots) == ((), None, ())


def test_addresses_come_on_top_and_nothing_else_changes() -> None:
    plain = Batch.from_sequences([[1, 2], [3]], [4, 0])
    slots = torch.tensor([14, 15, 30])
    batch = plain.with_slots([7, 2], slots, [slice(10, 16), torch.tensor([30])])
    assert batch.seq_ids == (7, 2) and batch.slot_mapping is slots
    assert batch.context_slots[0] == slice(10, 16)
    assert batch.input_ids is plain.input_ids and batch.positions is plain.positions
    assert batch.seq_starts == plain.seq_starts == (0, 2, 3)
    assert plain.slot_mapping is None


@pytest.mark.parametrize(
    ("ids", "slots", "contexts", "named"),
    [
        (1, 3, 2, "3 slots, 1 ids, 2 contexts"),
        (2, 2, 2, "2 slots, 2 ids, 2 contexts"),
        (2, 4, 2, "4 slots, 2 ids, 2 contexts"),
        (2, 3, 1, "3 slots, 2 ids, 1 contexts"),
        (3, 3, 3, "3 slots, 3 ids, 3 contexts"),
        (0, 0, 0, "0 slots, 0 ids, 0 contexts"),
    ],
)
def test_addresses_that_do_not_fit_are_refused(
    ids: int, slots: int, contexts: int, named: str
) -> None:
    batch = Batch.from_sequences([[1, 2], [3]])
    with pytest.raises(ValueError, match=f"3 tokens of 2 sequences.*{named}"):
        batch.with_slots(range(ids), torch.arange(slots), [slice(0, 1)] * contexts)
