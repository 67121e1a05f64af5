"""Why 16: waste and entries are those of the tables, and what is measured is plausible."""

from itertools import pairwise

import pytest

from tutorial_engine.lab.block_size import Trade, block_size_trade, table


@pytest.fixture(scope="module")
def trades() -> list[Trade]:
    return block_size_trade(num_requests=12, repeats=2)


def test_waste_and_entries_are_those_of_full_requests() -> None:
    (one,) = block_size_trade([16], 5, prompt_lens=(20, 20), output_lens=(5, 5), repeats=1)
    assert one.entries == 2 and one.waste == pytest.approx(100 * 7 / 32)
    (none,) = block_size_trade([1], 5, prompt_lens=(20, 20), output_lens=(5, 5), repeats=1)
    assert (none.entries, none.waste) == (25, 0)


def test_large_blocks_waste_and_small_ones_cost(trades: list[Trade]) -> None:
    assert all(a.waste < b.waste and a.entries > b.entries for a, b in pairwise(trades))
    of = {one.block_size: one for one in trades}
    assert of[1].bookkeeping > 2 * of[16].bookkeeping, "each block is named and found anew"
    saved = of[1].bookkeeping - of[16].bookkeeping
    assert saved > 2 * (of[16].bookkeeping - of[256].bookkeeping), "little is left to save"
    assert of[16].waste < 5 < of[256].waste and all(one.reading > 0 for one in trades)


def test_table_is_one_line_for_each(trades: list[Trade]) -> None:
    lines = table(trades).splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == [one.block_size for one in trades]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("wrong", ["num_requests", "repeats"])
def test_nothing_to_measure_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        block_size_trade(**{wrong: 0})
