"""The equality ledger: every path gives the same logits and tokens, and every mistake is seen."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import FAMILY, largest_difference, load_reference, random_sequences, save_random
from engines import VOCAB, fill_with_nan, random_model
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.runner import ModelRunner, Run, prefill, run_with_cache
from tutorial_engine.lab.hf import OurCache, run_transformers
from tutorial_engine.lab.ledger import (
    REFERENCE,
    LedgerPath,
    LedgerRow,
    batched_paths,
    engine_paths,
    in_place_paths,
    layer_paths,
    ledger,
    loop_path,
    memory_paths,
    our_paths,
    table,
)
from tutorial_engine.learn.capstone import watched
from tutorial_engine.learn.stories.bugs import Bug, edited, planted
from tutorial_engine.model import decoder
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.decoder import CausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "two heads a group": {"num_hidden_layers": 2},
    "one K/V head for all": {"num_key_value_heads": 1, "num_attention_heads": 6},
    "as many K/V heads as heads": {"num_key_value_heads": 4, "head_dim": 24},
    "head_dim 20, two layers": {
        "head_dim": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "rope_theta": 1_000_000.0,
    },
    "tied, bias, three layers": {"tie_word_embeddings": True, "attention_bias": True},
    **{name: FAMILY[name] for name in ("llama, biases", "llama 3, tied", "qwen2", "mistral")},
}
LENGTHS, STEPS, MAX_LEN = [1, 9, 5, 13], 6, 32
NEIGHBOURS = random_sequences([7, 3, 11], VOCAB, seed=99)


@pytest.fixture(autouse=True)
def nan_pools() -> Iterator[None]:
    """NaN in every slot before a path runs; and one thread."""
    init = KVStorage.__init__

    def poisoned(self: KVStorage, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        fill_with_nan(self)

    with patch.object(KVStorage, "__init__", poisoned):
        yield


def static(model: CausalLM, kind: Any = run_with_cache, **options: Any) -> Any:
    """Makes what runs so many sequences over rows, for loop_path."""

    def make_run(rows: int) -> Run:
        cache = StaticKVCache.from_config(model.config, max_seqs=rows, max_len=MAX_LEN)
        return kind(model, cache, **options)

    return make_run


def by_the_textbook(model: CausalLM, cache: StaticKVCache) -> Run:
    attention = NaiveAttention(cache=cache.storage)
    return lambda requests: prefill(model, cache, requests, attention=attention)


def every_path(
    model: CausalLM, theirs: Any = None, max_len: int = MAX_LEN
) -> dict[str, LedgerPath]:
    """All that there is, ours and transformers', the reference first."""
    paths = our_paths(model, max_len) | engine_paths(model, NEIGHBOURS, max_len)
    paths |= layer_paths(model) | batched_paths(model)
    paths |= memory_paths(model, max_len) | in_place_paths(model, max_len)
    paths |= {f"chunked, {n}": loop_path(static(model, chunk_size=n)) for n in (1, 5)}
    paths |= {
        "naive attention": loop_path(static(model, by_the_textbook)),
        "naive attention, batched": loop_path(static(model, by_the_textbook), together=True),
    }
    if theirs is not None:

        def over_ours(chunk_size: int | None = None) -> Run:
            def make_cache() -> OurCache:
                return OurCache(StaticKVCache.from_config(model.config, max_len=max_len))

            return run_transformers(theirs, make_cache, chunk_size=chunk_size)

        paths |= {
            "theirs, no cache": loop_path(lambda _: run_transformers(theirs, use_cache=False)),
            "theirs, their cache": loop_path(lambda _: run_transformers(theirs, chunk_size=4)),
            "theirs, our cache": loop_path(lambda _: over_ours()),
            "theirs, our cache, chunked": loop_path(lambda _: over_ours(2)),
        }
    return paths


def prompts_of(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    return random_sequences(lengths, VOCAB, seed)


# -- all paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "shape"), enumerate(SHAPES))
def test_every_path_gives_the_same(tmp_path: Path, shape: str, seed: int) -> None:
    """Logits to 1e-4 of the largest; tokens wherever the best is more than twice that ahead."""
    save_random(tmp_path, seed=seed, max_position_embeddings=64, **SHAPES[shape])
    model = load_model(tmp_path, fast=seed % 2 == 0)  # fast layers or the textbook's, in turn
    paths = every_path(model, load_reference(tmp_path))
    prompts = prompts_of(seed=seed)
    want = paths[REFERENCE](prompts, STEPS)  # [S, steps, V]
    tokens, best = want.argmax(-1), want.topk(2).values
    tolerance = 1e-4 * max(1.0, want.abs().max().item())
    safe = best[..., 0] - best[..., 1] > 2 * tolerance
    if not model.config.tie_word_embeddings:  # those repeat themselves: look at their logits only
        assert tokens.unique().numel() >= 6, "a model that repeats itself proves nothing"
    assert safe.sum() >= 21, "of 24"
    wrong = {}
    for name, path in paths.items():
        got = path(prompts, STEPS, tokens)
        difference = largest_difference(got, want)
        equal = torch.equal(got.argmax(-1)[safe], tokens[safe])
        if not difference <= tolerance or not equal:  # NaN is in no order
            wrong[name] = (difference, tolerance, equal)
    assert not wrong


def test_shipped_model_has_a_whole_ledger(model: CausalLM, tokenizer: Tokenizer) -> None:
    texts = ["Once upon a time", "Anna had a red kite. One day", "Tom"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    paths = every_path(model, load_reference(TINY), 128)
    rows = ledger(paths, prompts, 4)
    assert [row.path for row in rows] == list(paths) and rows[0].margin > 1e-3
    assert [row.path for row in rows if not row.ok] == []
    assert {row.steps for row in rows} == {12} and "✘" not in table(rows)


def test_paths_left_to_themselves_say_the_same_tokens() -> None:
    model, prompts = random_model(1), prompts_of([5, 26, 26])  # to the last slot of a row
    paths = every_path(model)
    want = paths[REFERENCE](prompts, STEPS).argmax(-1)
    for name, path in paths.items():
        assert torch.equal(path(prompts, STEPS).argmax(-1), want), name


# -- planted mistakes ---------------------------------------------------------------------------


ROWS = {"static cache", "chunked, 3 tokens", "batched, unequal prompts", "batched and chunked"}
ENGINE = {
    "engine, batched",
    "engine, chunked prefill, budget 4",
    "engine, random arrival order",
    "engine, neighbours",
    "engine, a neighbour aborted",
}
PAGES = {f"pages, blocks of {size}" for size in (4, 16, 256)}
ALONE = {"pages, blocks of 256"}  # there is one block: they run one by one
MEMORIES = {*PAGES, "pages, blocks of 1", "cells"}

DECODES = "all(firsts) and all(len(s) == 1 for s in sequences)"
# what is planted, and the paths that must see it; those of our_paths, engine_paths and MEMORIES
BUGS: dict[str, tuple[Bug, set[str]]] = {
    "RoPE turns neighbours": (
        edited(decoder, "apply_rope", ("x.chunk(2, dim=-1)", "x[..., 0::2], x[..., 1::2]")),
        {REFERENCE, "torch.cat cache", *ROWS, *ENGINE, *MEMORIES},
    ),
    "position too far": (
        edited(
            Batch,
            "from_allocations",
            ("sequences, firsts)", f"sequences, [p + ({DECODES}) for p in firsts])"),
        ),
        {"torch.cat cache", *ROWS, *ENGINE, *MEMORIES},
    ),
    "slots of the neighbour": (
        edited(
            Batch,
            "from_allocations",
            (
                "return cls(",
                f"contexts = contexts[1:] + contexts[:1] if {DECODES} else contexts; return cls(",
            ),
        ),
        {"batched, unequal prompts", "batched and chunked", *ENGINE, *MEMORIES}
        - {"engine, chunked prefill, budget 4", *ALONE},  # no step of it is all decode
    ),
    "logits of the neighbour": (
        edited(
            ModelRunner,
            "run",
            ("hidden if len(rows) == len(scheduled) else hidden[rows]", "hidden[rows].roll(1, 0)"),
        ),
        {*ENGINE, *MEMORIES} - ALONE,
    ),
    "a slot too many, and it holds NaN": (
        edited(
            StaticKVCache,
            "allocate",
            ("slice(start, start + end)", "slice(start, start + end + 1)"),
        ),
        {*ROWS, *ENGINE},
    ),
    "offset in the block forgotten": (
        edited(
            PagedKVCache,
            "_slots_of",
            (
                "return slice(numbers.start * size, numbers.stop * size)",
                "numbers = torch.tensor(blocks)",
            ),
            (
                "(numbers[:, None] * size + torch.arange(size)).flatten()",
                "numbers.repeat_interleave(size) * size",
            ),
        ),
        PAGES,
    ),
    "logits of a chunk's first token": (
        edited(
            Batch,
            "last_token_indices",
            ("tuple(end - 1 for end in self.query_start_loc[1:])", "self.query_start_loc[:-1]"),
        ),
        {REFERENCE, "torch.cat cache", *ROWS, *ENGINE, *MEMORIES}
        - {"batched and chunked"},  # chunks of 2 of odd lengths: the last one has one token
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught_and_only_where_it_is(name: str) -> None:
    bug, caught = BUGS[name]
    model, prompts = random_model(1), prompts_of()
    paths = our_paths(model, MAX_LEN) | engine_paths(model, [[*p] for p in prompts], MAX_LEN)
    paths |= {path: run for path, run in memory_paths(model, MAX_LEN).items() if path in MEMORIES}
    want = paths[REFERENCE](prompts, STEPS)
    off = {}
    with planted(name, {name: bug}), patch.object(PagedKVCache, "check_integrity", lambda _: None):
        for path, run in paths.items():
            try:
                off[path] = largest_difference(run(prompts, STEPS, want.argmax(-1)), want)
            except ValueError as error:  # the engine ends requests whose logits are no numbers
                assert "ended before" in str(error)
                off[path] = math.nan
    tolerance = 1e-4 * max(1.0, want.abs().max().item())
    assert {path for path, by in off.items() if not by <= tolerance} == caught
    assert all(not off[path] <= 100 * tolerance for path in caught)


# -- verdicts -----------------------------------------------------------------------------------


def verdict(want: Tensor, got: Tensor) -> tuple[LedgerRow, LedgerRow]:
    """The ledger's rows for the reference and for one other path."""
    paths: dict[str, LedgerPath] = {
        REFERENCE: lambda prompts, num_tokens, tokens=None: want,
        "other": lambda prompts, num_tokens, tokens=None: got,
    }
    first, second = ledger(paths, [[1], [2]], want.shape[1])
    return first, second


# what another path has at [1, 2] (its logits of tokens 2 and 3), where 2 is the best: is it ok?
VERDICTS: list[tuple[float, float, float, bool]] = [
    *((largest, largest, 0.98e-4 * max(1, largest), True) for largest in (0.5, 1.0, 20.0)),
    *((largest, largest, 1.02e-4 * max(1, largest), False) for largest in (0.5, 1.0, 20.0)),
    *((1.0, value, 0.0, False) for value in (math.nan, math.inf, -math.inf)),
]


@pytest.mark.parametrize(("largest", "best", "other", "ok"), VERDICTS)
def test_verdict_by_hand(largest: float, best: float, other: float, ok: bool) -> None:
    want = torch.zeros(2, 3, 5)  # two sequences, three steps, five tokens
    want[..., 2] = largest
    got = want.clone()
    got[1, 2, 2:4] = torch.tensor([best, other])
    first, row = verdict(want, got)
    assert first.ok and row.ok == ok and row.steps == 6
    assert row.tolerance == pytest.approx(1e-4 * max(1.0, largest))
    assert table([first, row]).splitlines()[2].endswith("✔" if ok else "✘")
    if not math.isfinite(best):
        assert not verdict(got, want)[1].ok and not verdict(got, got)[0].ok, "the reference itself"


def test_near_logits_with_another_token_are_not_equal() -> None:
    want = torch.zeros(2, 3, 5)
    want[..., 2], want[1, 2, 3] = 1.0, 1 - 4e-5
    got = want.clone()
    got[1, 2, 2:4] = torch.tensor([1 - 3e-5, 1 - 2e-5])
    first, row = verdict(want, got)
    assert row.difference <= row.tolerance and row.equal == 5 and not row.ok
    assert table([first, row]).endswith("above 3e-05, BELOW twice the tolerance")


def test_any_path_can_be_the_reference_and_no_unknown_one() -> None:
    paths = our_paths(random_model(), MAX_LEN)
    rows = ledger(paths, prompts_of(), 3, reference="static cache")
    lines = {line[:40].strip(): line for line in table(rows).splitlines()}
    assert all(row.ok for row in rows)
    assert "reference" in lines["static cache"] and "reference" not in lines[REFERENCE]
    with pytest.raises(ValueError, match=r"no path 'oracle'.*'no cache'"):
        ledger(paths, [[1]], 2, reference="oracle")


# -- each path runs what its name says ----------------------------------------------------------


BATCHED = [(5, 1, 9), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
RUNS: dict[str, list[tuple[int, ...]]] = {  # tokens of each sequence in each forward
    "no cache": [(n + step,) for n in (5, 1, 9) for step in range(4)],
    "static cache": [(n,) for length in (5, 1, 9) for n in (length, 1, 1, 1)],
    "chunked, 3 tokens": [(n,) for part in ([3, 2], [1], [3, 3, 3]) for n in (*part, 1, 1, 1)],
    "batched, unequal prompts": BATCHED,
    "engine, batched": BATCHED,
    "engine, chunked prefill, budget 4": [(4,), (1, 1, 2), (1, 1, 2)],  # and so on
    "engine, neighbours": [(7, 3, 5, 1), (1, 1, 1, 1, 9), (1,) * 5, (1,) * 5, (1,) * 3],
    "engine, a neighbour aborted": [(7, 3, 5, 1), (1, 1, 1, 1, 9), (1,) * 5, (1, 1, 1), (1,)],
}


@pytest.mark.parametrize("name", RUNS)
def test_paths_run_what_their_names_say(name: str) -> None:
    model = random_model()
    paths = our_paths(model, MAX_LEN) | engine_paths(model, NEIGHBOURS[:2], MAX_LEN)
    with watched(model) as batches:
        paths[name](prompts_of([5, 1, 9]), 4)
    ran = [batch.query_lens for batch in batches]
    assert (ran[:3] if "budget" in name else ran) == RUNS[name]


def test_a_path_that_cannot_do_what_it_says_is_refused() -> None:
    paths = memory_paths(random_model(), MAX_LEN)
    with pytest.raises(ValueError, match="nobody gave way"):
        paths["pages, preempted and resumed"]([[1, 2, 3]], 2)
    with pytest.raises(ValueError, match="0 tokens were found"):
        paths["pages, prefix cache, warm"]([[1, 2, 3]], 2)
    with pytest.raises(ValueError, match="nothing was shared"):
        paths["pages, forked"]([[1]], 2)
    with (
        patch.object(KVStorage, "copy", lambda *_: None),
        pytest.raises(ValueError, match="or are its logits NaN"),
    ):
        paths["pages, forked"]([[1, 2, 3, 4, 5, 6]], 2)
