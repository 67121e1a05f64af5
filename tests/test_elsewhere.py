"""The names of other engines: ours exist, nothing is told twice."""

import re
import xml.etree.ElementTree as ET

import pytest

from tutorial_engine.learn.elsewhere import (
    BOXES,
    LLAMA_CPP,
    PIECES,
    SGLANG,
    VLLM,
    VLLM_SCHEDULER,
    box,
    find,
    in_vllm,
    table,
)


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


def test_each_part_of_our_scheduler_has_a_line_with_the_name_in_vllm() -> None:
    head, *lines = in_vllm().splitlines()
    assert VLLM in head and len(lines) == len(VLLM_SCHEDULER)
    for line, (ours, theirs) in zip(lines, VLLM_SCHEDULER.items(), strict=True):
        assert line.split() == [ours.split(".")[-1], *theirs.split()]


FILE = re.compile(r"\b(?:[\w-]+/)+[\w-]+\.(?:py|cpp|h)\b")


@pytest.mark.parametrize("topic", BOXES)
def test_a_box_names_versions_files_and_no_line_numbers(topic: str) -> None:
    told = str(box(topic))
    assert max(map(len, told.splitlines())) <= 92 and BOXES[topic].title in told
    who = (f"here ({BOXES[topic].piece})", VLLM, SGLANG, LLAMA_CPP)
    assert all(f"  {name}: " in told for name in who)
    assert find(BOXES[topic].piece) is not None
    assert FILE.search(BOXES[topic].vllm) and FILE.search(BOXES[topic].llama_cpp)
    assert FILE.search(BOXES[topic].sglang) or "no shift" in BOXES[topic].sglang
    assert not re.search(r"\.(py|cpp|h)(:|#L)\d|\bline \d", told)


@pytest.mark.parametrize("topic", BOXES)
def test_a_box_is_folded_below_one_sentence(topic: str) -> None:
    shown = ET.fromstring(box(topic)._repr_html_())
    assert shown.tag == "details"
    head, engines = shown
    assert "".join(head.itertext()).endswith(BOXES[topic].gist) and len(BOXES[topic].gist) < 130
    assert ["".join(one.itertext()) for one in engines] == [
        f"{who}: {how}" for who, how in box(topic).engines.items()
    ]


def test_an_unknown_topic_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="there is no box 'beam'; there are fork, admission, "):
        box("beam")
