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


@given(SEQUENCES, st.data())
def test_sequences_come_back_and_positions_count_up_from_the_first(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    starts = st.lists(st.integers(0, 10**5), min_size=len(sequences), max_size=len(sequences))
    firsts = data.draw(st.none() | starts)
    batch = Batch.from_sequences(sequences, firsts)
    assert [ids.tolist() for ids in batch.input_ids.split(batch.query_lens)] == sequences
    assert batch.num_seqs == len(sequences)
    assert batch.num_tokens == sum(map(len, sequences)) == batch.input_ids.numel()
    assert [batch.input_ids[i] for i in batch.last_token_indices] == [s[-1] for s in sequences]
    positions = [p.tolist() for p in batch.positions.split(batch.query_lens)]
    wanted = zip(firsts or [0] * len(sequences), sequences, strict=True)
    assert positions == [list(range(first, first + len(s))) for first, s in wanted]


def test_batch_is_frozen_int64_and_has_no_slots_of_its_own() -> None:
    batch = Batch.from_sequences([[1, 2], [3]])
    assert batch.input_ids.dtype == batch.positions.dtype == torch.int64
    assert (batch.seq_ids, batch.slot_mapping, batch.context_slots) == ((), None, ())
    with pytest.raises(AttributeError):
        batch.seq_starts = (0, 2)  # type: ignore[misc]


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


# -- slots of a cache -----------------------------------------------------------------------------


def test_slots_come_on_top_and_nothing_else_changes() -> None:
    plain = Batch.from_sequences([[1, 2], [3]], [4, 0])
    slots = torch.tensor([14, 15, 30])
    batch = plain.with_slots([7, 2], slots, [slice(10, 16), torch.tensor([30])])
    assert batch.seq_ids == (7, 2) and batch.slot_mapping is slots
    assert batch.context_slots[0] == slice(10, 16)
    assert batch.input_ids is plain.input_ids and batch.positions is plain.positions
    assert batch.seq_starts == plain.seq_starts == (0, 2, 3)
    assert plain.slot_mapping is None


@pytest.mark.parametrize(
    ("ids", "slots", "contexts"),
    [(1, 3, 2), (2, 2, 2), (2, 4, 2), (2, 3, 1), (3, 3, 3), (0, 0, 0)],
)
def test_slots_that_do_not_fit_are_refused(ids: int, slots: int, contexts: int) -> None:
    batch = Batch.from_sequences([[1, 2], [3]])
    named = f"3 tokens of 2 sequences.*{slots} slots, {ids} ids, {contexts} contexts"
    with pytest.raises(ValueError, match=named):
        batch.with_slots(range(ids), torch.arange(slots), [slice(0, 1)] * contexts)
