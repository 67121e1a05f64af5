"""The names of other engines: ours exist, nothing is told twice."""

import pytest

from tutorial_engine.learn.elsewhere import PIECES, find, table


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.ours)
def test_each_of_our_names_is_there(piece: tuple[str, ...]) -> None:
    assert find(piece[0]) is not None
    assert any(piece[1:]), "somebody else has it, too"


def test_a_name_that_moved_is_noticed() -> None:
    with pytest.raises(AttributeError):
        find("cache.paged.Pager")
    with pytest.raises(ModuleNotFoundError):
        find("cache.pages.PagedKVCache")


def test_the_table_has_a_line_for_each_and_columns() -> None:
    head, *lines = table().splitlines()
    assert len(lines) == len(PIECES) == len({piece.ours for piece in PIECES})
    for name in ("vLLM", "SGLang", "llama.cpp"):
        column = head.index(name)
        assert all(len(line) <= column or line[column - 1] == " " for line in lines)
