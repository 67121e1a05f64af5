"""What a scheduler may rely on, whatever the layout: all or nothing, again and again, forks.

And what is the layouts' own: how many blocks there are, who gives way, books that do not add up.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import LLAMA2_7B
from memories import CONFIG, KINDS, memory_of, request, room, run, slots_of, snapshot, table_of

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import fork_to_give_up
from tutorial_engine.cache.paged import PagedKVCache, num_blocks_in
from tutorial_engine.cache.storage import KVStorage


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_asked_twice_before_a_commit_the_answer_is_the_same(kind: str) -> None:
    memory, a, b = memory_of(kind), request("a", range(10)), request("b", range(50, 54))
    for num_tokens in (6, 4, 1):
        first, before = room(memory, a, num_tokens), snapshot(memory)
        assert first is not None and first.first == a.num_computed_tokens
        assert room(memory, a, num_tokens) == first and snapshot(memory) == before
        run(memory, a, num_tokens)
        run(memory, b)
        a.token_ids.append(1)
        b.token_ids.append(1)


def test_a_prompt_is_let_in_only_if_all_of_it_fits(kind: str) -> None:
    """Then it has cells for all of it, and blocks for what it runs now."""
    memory = memory_of(kind, 16)
    a, b, c = request("a", range(10)), request("b", range(15)), request("c", [99])
    assert run(memory, a, 2) == [0, 1] and slots_of(memory, a) == (0, 1)
    num_slots = {"pages of 1": 2, "pages of 4": 4, "cells": 10}[kind]
    assert len(memory.describe("a").slots) == num_slots
    assert room(memory, b, 1) is None and table_of(memory, b) == ()
    assert run(memory, c) == [num_slots], "what is left is enough for it"
    assert len(run(memory, a, 8) or ()) == 8


def test_one_that_was_thrown_out_needs_room_for_its_outputs_as_well(kind: str) -> None:
    memory, a = memory_of(kind, 12), request("a", range(8))
    run(memory, a)
    a.token_ids.append(5)
    run(memory, a)
    memory.free("a")
    a.num_computed_tokens = 0
    run(memory, request("b", range(4)))
    assert room(memory, a, 1) is None


def test_none_leaves_everything_as_it_was(kind: str) -> None:
    memory, a, b = memory_of(kind, 8), request("a", range(8)), request("b", [1, 2])
    run(memory, a)
    a.token_ids.append(7)
    before = snapshot(memory)
    assert room(memory, a, 1) is None and room(memory, b, 2) is None
    assert snapshot(memory) == before and memory.describe("b") == ((), ())
    memory.check_integrity()


def test_what_is_said_to_be_computed_must_be_here(kind: str) -> None:
    """A request of another cache, or one that was freed: what it says is nowhere."""
    memory, known, new = memory_of(kind), request("known", range(4)), request("new", range(20))
    run(memory, known)
    known.token_ids, before = list(range(20)), snapshot(memory)
    for one, computed in ((new, 1), (known, 5), (known, 13)):
        one.num_computed_tokens = computed
        with pytest.raises(ValueError, match=f"{one.request_id} says that {computed} "):
            room(memory, one)
        assert snapshot(memory) == before


# -- forks ----------------------------------------------------------------------------------------


def test_forks_that_cannot_be(kind: str) -> None:
    memory, parent = memory_of(kind), request("p", range(8))
    run(memory, parent)
    before = snapshot(memory)
    assert memory.fork("nobody", "c", 0) == 0, "nothing to share"
    for wrong in (("nobody", "c", 1), ("p", "p", 4), ("p", "c", 9)):
        with pytest.raises((ValueError, AssertionError), match=r"shared|has a table"):
            memory.fork(*wrong)
    assert snapshot(memory) == before
    memory.check_integrity()


def test_a_fork_that_waits_gives_way_to_whoever_runs(kind: str) -> None:
    memory = memory_of(kind, 12)
    parent, child = request("p", range(10)), request("c", range(10))
    run(memory, parent)
    memory.fork("p", "c", 9)
    for _ in range(2):
        parent.token_ids.append(1)
        run(memory, parent)
    if kind != "pages of 4":
        assert table_of(memory, child), "there was room for both"
    parent.token_ids.append(1)
    assert run(memory, parent) is None, "it is undone, and this is not enough"
    assert table_of(memory, child) == () and room(memory, child) is None
    memory.free("p")
    assert len(run(memory, child) or ()) == 10, "it is computed like any other"


def test_a_fork_that_cannot_be_admitted_gives_up_what_it_shares_when_nobody_runs(kind: str) -> None:
    """It shares 4 of its 16 tokens, in a memory where 3 slots are another waiting fork's."""
    memory, parent = memory_of(kind, 16), request("p", range(8))
    child = request("c", [*range(4), *range(50, 62)])
    run(memory, parent)
    memory.fork("p", "c", 4)
    memory.fork("p", "d", 7)
    memory.free("p")
    assert len(run(memory, child) or ()) == 12 and memory.describe("d").table == ()


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
def test_which_fork_gives_way(
    key: str, waiting: list[str], holding: list[str], given_up: str | None
) -> None:
    assert fork_to_give_up(key, waiting, holding) == given_up


# -- of pages and cells alone ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "corrupt"),
    [
        ("pages of 4", lambda memory: setattr(memory._held["a"], "num_cached", 9)),
        ("pages of 4", lambda memory: memory._held.pop("a")),
        ("pages of 4", lambda memory: setattr(memory.blocks.blocks[0], "ref_cnt", 2)),
        ("pages of 4", lambda memory: setattr(memory.blocks.blocks[0], "hash", b"x")),
        ("pages of 4", lambda memory: memory.blocks.free_queue.popitem()),
        ("cells", lambda memory: memory._shared.update(a=9)),
        ("cells", lambda memory: memory._waiting.update(a=None)),
        ("cells", lambda memory: memory.table._used.__setitem__(9, 1)),
        ("cells", lambda memory: memory.table._lagging.add(0)),
        ("cells", lambda memory: memory.table._cells["a"].reverse()),
    ],
)
def test_books_that_do_not_add_up_are_noticed(kind: str, corrupt: Callable[[Any], object]) -> None:
    memory = memory_of(kind)
    run(memory, request("a", range(8)))
    corrupt(memory)
    with pytest.raises(AssertionError):
        memory.check_integrity()


def test_ten_gib_of_llama_7b_are_1280_blocks_of_16() -> None:
    spec = KVCacheSpec.from_model(LLAMA2_7B, torch.bfloat16)
    assert num_blocks_in(10 * 2**30, spec, 16) == 1280


def test_a_pool_takes_no_more_than_its_budget_and_limits_a_request() -> None:
    memory = PagedKVCache.from_config(CONFIG, memory_bytes=100_000, block_size=4)
    shelves = memory.storage.k.nbytes + memory.storage.v.nbytes
    assert shelves <= 100_000 < shelves + shelves // memory.blocks.num_blocks
    for num_blocks, max_len in ((5, 20), (500, CONFIG.max_position_embeddings)):
        made = PagedKVCache.from_config(CONFIG, num_blocks=num_blocks, block_size=4)
        assert made.max_len == max_len
    with pytest.raises(ValueError, match="12 slots do not make blocks of 5"):
        PagedKVCache(KVStorage(memory.storage.spec, 12), 5)
