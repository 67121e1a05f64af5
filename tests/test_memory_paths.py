"""The ledger's rows on pages and on cells: the same logits as every other path, from NaN pools."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from checkpoints import random_sequences
from engines import VOCAB, one_thread, random_model

from tutorial_engine.cache import storage as kv_storage
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab import memory_paths
from tutorial_engine.lab.ledger import REFERENCE, SAFE_MARGIN, AnyPath, ledger, our_paths, table
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


LENGTHS, STEPS, MAX_LEN = [1, 9, 5, 13], 6, 32


def all_paths(model: Qwen3ForCausalLM, max_len: int = MAX_LEN) -> dict[str, AnyPath]:
    return {**our_paths(model, max_len), **memory_paths(model, max_len)}


@pytest.fixture
def nan_pools() -> Iterator[None]:
    """NaN in every slot before a path runs."""
    init = KVStorage.__init__

    def wrapped(self: KVStorage, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        for shelf in (self.k, self.v):
            shelf.fill_(float("nan"))

    with patch.object(KVStorage, "__init__", wrapped):
        yield


@pytest.mark.usefixtures("nan_pools")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 1, "num_attention_heads": 6}])
@pytest.mark.parametrize("by_heads", [False, True], ids=["at once", "head by head"])
def test_pages_and_cells_give_the_logits_of_every_other_path(
    shape: dict[str, int], seed: int, by_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_heads:
        monkeypatch.setattr(kv_storage, "SMALL", 0)
        monkeypatch.setattr(kv_storage, "PART", 1)
    model, prompts = random_model(seed, **shape), random_sequences(LENGTHS, VOCAB, seed)
    rows = {row.path: row for row in ledger(all_paths(model), prompts, STEPS)}
    assert len(rows) == len(our_paths(model)) + 11
    assert {row.path: row.difference for row in rows.values() if not row.within} == {}
    if rows[REFERENCE].margin > SAFE_MARGIN:
        assert all(row.ok for row in rows.values())


@pytest.mark.usefixtures("nan_pools")
def test_shipped_model_has_a_whole_ledger_on_pages_and_cells(
    model: Qwen3ForCausalLM, tokenizer: Any
) -> None:
    texts = ["Once upon a time", "Anna had a red kite. One day", "Tom"]
    rows = ledger(all_paths(model, 128), [tokenizer.encode(text).ids for text in texts], 8)
    assert [row.path for row in rows if not row.ok] == [] and "✘" not in table(rows)
    assert sum("pages" in row.path or "cells" in row.path for row in rows) == 11


def test_a_row_that_does_not_do_what_it_says_is_refused() -> None:
    paths = memory_paths(random_model(), MAX_LEN)
    with pytest.raises(ValueError, match="nobody gave way"):
        paths["pages, preempted and resumed"].run([[1, 2, 3]], 2)
    with pytest.raises(ValueError, match="0 tokens were found"):
        paths["pages, prefix cache, warm"].run([[1, 2, 3]], 2)
    for kind in ("pages", "cells"):
        with pytest.raises(ValueError, match="nothing was shared"):
            paths[f"{kind}, forked"].run([[1]], 2)


@pytest.mark.usefixtures("nan_pools")
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_forgotten_offset_is_seen_by_the_ledger_unless_blocks_have_none(size: int) -> None:
    """Written to the first slot of the block, wherever in it: what is read then is NaN."""
    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB, 1)
    right = PagedKVCache._slots

    def wrong(self: PagedKVCache, table: Any, start: int, end: int) -> Sequence[int]:
        return [slot - slot % self.block_size for slot in right(self, table, start, end)]

    path = memory_paths(model, MAX_LEN)[f"pages, blocks of {size}"]
    with (
        patch.object(PagedKVCache, "_slots", wrong),
        patch.object(PagedKVCache, "check_integrity", lambda self: None),
    ):
        if size > 1:
            with pytest.raises(ValueError, match="ended before"):
                path.run(prompts, STEPS)
        else:
            (_, row) = ledger({REFERENCE: our_paths(model)[REFERENCE], "1": path}, prompts, STEPS)
            assert row.ok
