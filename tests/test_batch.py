"""The flat batch: what lies where, and which lists of ids make none."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.model.batch import Allocation, Batch

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
        batch.query_start_loc = (0, 2)  # type: ignore[misc]


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
    context = torch.tensor([30])
    given = [Allocation(4, range(14, 16), slice(10, 16)), Allocation(0, [30], context)]
    batch = Batch.from_allocations([[1, 2], [3]], given, ["a", "b"])
    assert batch.seq_ids == ("a", "b")
    assert batch.slot_mapping is not None and batch.slot_mapping.tolist() == [14, 15, 30]
    assert batch.context_slots[0] == slice(10, 16) and batch.context_slots[1] is context
    assert batch.context_lens == (6, len(context))
    plain = Batch.from_sequences([[1, 2], [3]], [4, 0])
    assert (
        torch.equal(batch.input_ids, plain.input_ids)
        and batch.query_start_loc == plain.query_start_loc
    )
    assert torch.equal(batch.positions, plain.positions)


@pytest.mark.parametrize(
    ("slots", "ids", "named"),
    [
        ([[0, 1], [2]], 1, "3 slots, 1 ids"),
        ([[0, 1], [2]], 3, "3 slots, 3 ids"),
        ([[0], [2]], 2, "2 slots, 2 ids"),
        ([[0, 1], [2, 3]], 2, "4 slots, 2 ids"),
        ([[0, 1, 2]], 2, "2 sequences but 1 first positions"),
        ([], 0, "2 sequences but 0 first positions"),
    ],
)
def test_slots_that_do_not_fit_are_refused(slots: list[list[int]], ids: int, named: str) -> None:
    allocations = [Allocation(0, own, slice(0, 1)) for own in slots]
    with pytest.raises(ValueError, match=named):
        Batch.from_allocations([[1, 2], [3]], allocations, [str(i) for i in range(ids)])
