"""Prefill and decode: how many tokens run, where they stand, and that a failure leaves no trace."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checkpoints import fp32_tolerance, largest_difference, random_sequences
from engines import VOCAB, one_thread, poison, random_model, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_storage import memory
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache, TokenCache
from tutorial_engine.engine.runner import (
    CachedRunner,
    RecomputeRunner,
    Runner,
    decode,
    forward,
    make_runner,
    prefill,
)
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

ROWS, MAX_LEN = 4, 24
PROMPTS = random_sequences([7, 1, 12, 5], VOCAB)
CACHES = ["static", "slots first", "growing"]
EVERY_CACHE = pytest.mark.parametrize("name", CACHES)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def engine() -> Qwen3ForCausalLM:
    """Look at it, never change it."""
    return random_model(eos=(5, 7))


def make(name: str, engine: Qwen3ForCausalLM, max_len: int = MAX_LEN) -> Any:
    if name == "growing":
        return GrowingKVCache()
    config = CacheConfig(max_seqs=ROWS, max_len=max_len, slots_first=name == "slots first")
    return poison(StaticKVCache.from_config(engine.config, config))


def truth(engine: Qwen3ForCausalLM, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each sequence, run whole and alone: [S, V]."""
    alone = [engine(Batch.from_sequences([ids]))[-1:] for ids in sequences]
    return engine.compute_logits(torch.cat(alone))


def close(got: Tensor, want: Tensor) -> bool:
    return largest_difference(got, want) <= fp32_tolerance(want)


# -- what is run --------------------------------------------------------------------------------


@EVERY_CACHE
def test_prefill_runs_the_prompt_and_decode_one_token_each(
    engine: Qwen3ForCausalLM, name: str
) -> None:
    cache = make(name, engine)
    with watched(engine) as batches:
        prefill(engine, cache, PROMPTS)
        for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
            decode(engine, cache, tokens)
        decode(engine, cache, [9], [2])
    assert [batch.num_tokens for batch in batches] == [25, 4, 4, 1]
    assert [batch.query_lens for batch in batches[:2]] == [(7, 1, 12, 5), (1, 1, 1, 1)]
    assert cache.seq_lens == (9, 3, 15, 7)


@EVERY_CACHE
def test_decode_position_is_the_number_of_cached_tokens(
    engine: Qwen3ForCausalLM, name: str
) -> None:
    cache = make(name, engine)
    prefill(engine, cache, PROMPTS)
    for _ in range(3):
        cached = cache.seq_lens
        with watched(engine) as batches:
            decode(engine, cache, [3, 3, 3], [3, 0, 1])
        assert batches[0].positions.tolist() == [cached[3], cached[0], cached[1]]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 12, 99])
def test_chunks_run_each_token_once(engine: Qwen3ForCausalLM, chunk_size: int) -> None:
    cache = make("static", engine)
    with watched(engine) as batches:
        prefill(engine, cache, PROMPTS, chunk_size=chunk_size)
    assert sum(batch.num_tokens for batch in batches) == 25
    assert all(max(batch.query_lens) <= chunk_size for batch in batches)
    assert len(batches) == -(-12 // chunk_size)
    ran: list[list[int]] = [[] for _ in PROMPTS]
    for batch in batches:
        parts = batch.input_ids.split(batch.query_lens)
        for seq_id, ids in zip(batch.seq_ids, parts, strict=True):
            ran[seq_id] += ids.tolist()
    assert ran == PROMPTS


def test_recompute_runs_everything_again(engine: Qwen3ForCausalLM) -> None:
    runner = RecomputeRunner(engine)
    runner.prefill(PROMPTS, range(4))
    runner.decode([1, 2], [0, 2])
    assert runner.tokens_run == 25 + 8 + 13


# -- equal logits -------------------------------------------------------------------------------


@EVERY_CACHE
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 99])
def test_any_chunking_gives_the_logits_of_the_whole(
    engine: Qwen3ForCausalLM, name: str, chunk_size: int | None
) -> None:
    cache = make(name, engine)
    got = prefill(engine, cache, PROMPTS, chunk_size=chunk_size)
    assert got.shape == (4, VOCAB) and got.dtype == torch.float32
    assert close(got, truth(engine, PROMPTS))
    then = decode(engine, cache, [1, 2, 3, 4])
    longer = [[*p, t] for p, t in zip(PROMPTS, [1, 2, 3, 4], strict=True)]
    assert close(then, truth(engine, longer))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(CACHES),
    steps=st.lists(
        st.dictionaries(
            st.integers(0, ROWS - 1),
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
            min_size=1,
        ),
        min_size=1,
        max_size=6,
    ),
    chunk_size=st.none() | st.integers(1, 3),
)
def test_any_order_of_rows_and_steps_gives_the_logits_of_the_whole(
    name: str, steps: list[dict[int, list[int]]], chunk_size: int | None
) -> None:
    engine = random_model(num_hidden_layers=2)
    cache, history = make(name, engine), [[] for _ in range(ROWS)]
    for new in steps:
        got = prefill(engine, cache, list(new.values()), list(new), chunk_size)
        for row, ids in new.items():
            history[row] += ids
        assert close(got, truth(engine, [history[row] for row in new]))


@pytest.mark.parametrize("backend", [NaiveAttention, SdpaAttention])
def test_backend_can_be_handed_in(
    engine: Qwen3ForCausalLM, backend: Callable[..., AttentionBackend]
) -> None:
    cache = make("static", engine)
    forward(engine, cache, PROMPTS, attention=backend(cache=cache))
    got = decode(engine, cache, [1, 2, 3, 4], attention=backend(cache=cache))
    assert close(got, truth(engine, [[*p, i] for i, p in enumerate(PROMPTS, 1)]))


# -- the length has one owner -------------------------------------------------------------------


@EVERY_CACHE
def test_length_stands_still_between_the_layers(engine: Qwen3ForCausalLM, name: str) -> None:
    cache, seen = make(name, engine), []
    watcher = NaiveAttention(
        observe=lambda layer, s, w: seen.append((layer, s, cache.seq_lens, w.shape[-1])),
        cache=cache,
    )
    forward(engine, cache, PROMPTS[:2], attention=watcher)
    before = cache.seq_lens
    assert before[:2] == (7, 1)
    seen.clear()
    forward(engine, cache, [[3], [4, 5]], attention=watcher)
    assert seen == [
        (layer, s, before, kv_len) for layer in range(3) for s, kv_len in ((0, 8), (1, 3))
    ]
    assert cache.seq_lens[:2] == (8, 3)


# -- failures leave no trace --------------------------------------------------------------------


class Boom(Exception):
    """Something went wrong inside a layer."""


class Breaking:
    """A backend that raises in a layer, after that layer's keys were stored."""

    def __init__(self, cache: TokenCache, layer: int) -> None:
        self.inner, self.layer = SdpaAttention(cache), layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = self.inner.attend(layer, q, k, v, batch)
        if layer == self.layer:
            raise Boom
        return out


@EVERY_CACHE
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_exception_inside_a_layer_changes_nothing(
    engine: Qwen3ForCausalLM, name: str, layer: int
) -> None:
    clean, dirty = make(name, engine), make(name, engine)
    for cache in (clean, dirty):
        prefill(engine, cache, PROMPTS)
    for sequences in ([[9, 9, 9], [8]], [[1], [2]]):
        with pytest.raises(Boom):
            forward(engine, dirty, sequences, attention=Breaking(dirty, layer))
        assert dirty.seq_lens == clean.seq_lens
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        assert torch.equal(decode(engine, dirty, tokens), decode(engine, clean, tokens))


@EVERY_CACHE
@pytest.mark.parametrize("layer", [0, 2])
def test_exception_in_the_very_first_forward_changes_nothing(
    engine: Qwen3ForCausalLM, name: str, layer: int
) -> None:
    clean, dirty = make(name, engine), make(name, engine)
    with pytest.raises(Boom):
        forward(engine, dirty, PROMPTS, attention=Breaking(dirty, layer))
    assert not any(dirty.seq_lens)
    assert torch.equal(prefill(engine, dirty, PROMPTS), prefill(engine, clean, PROMPTS))


BAD_CALLS: dict[str, tuple[Callable[[Qwen3ForCausalLM, Any], object], str]] = {
    "id in the middle": (lambda m, c: prefill(m, c, [[1, 2], [3, VOCAB, 4]]), f"id {VOCAB}"),
    "id in a later chunk": (
        lambda m, c: prefill(m, c, [[1, 2, 3, 999, 4]], chunk_size=2),
        "id 999",
    ),
    "negative id": (lambda m, c: prefill(m, c, [[1, -1, 2]]), "-1"),
    "negative id in a later chunk": (lambda m, c: prefill(m, c, [[1, 2, -7]], None, 2), "-7"),
    "id that is no number": (lambda m, c: prefill(m, c, [[1, "2"]]), "'2'"),
    "half an id": (lambda m, c: prefill(m, c, [[1, 2.5]]), "2.5"),
    "decode: id == vocabulary": (lambda m, c: decode(m, c, [1, 2, VOCAB, 4]), f"{VOCAB}"),
    "decode: negative id": (lambda m, c: decode(m, c, [1, -2, 3, 4]), "-2"),
    "decode: nothing": (lambda m, c: decode(m, c, []), "at least one"),
    "no prompts": (lambda m, c: prefill(m, c, []), "at least one"),
    "an empty prompt": (lambda m, c: prefill(m, c, [[1], []]), "sequence 1 is empty"),
    "chunks of nothing": (lambda m, c: prefill(m, c, [[1]], chunk_size=0), "chunk_size.*0"),
    "chunks of less": (lambda m, c: prefill(m, c, [[1]], chunk_size=-3), "chunk_size.*-3"),
    "a row twice": (lambda m, c: prefill(m, c, [[1], [2]], [1, 1]), r"once.*\[1, 1\]"),
    "too few rows": (lambda m, c: prefill(m, c, [[1], [2]], [1]), "2 sequences but 1"),
    "decode: a row twice": (lambda m, c: decode(m, c, [1, 2], [1, 1]), r"once.*\[1, 1\]"),
    "decode: too few rows": (lambda m, c: decode(m, c, [1, 2], [1]), "2 sequences but 1"),
    "a flat list of ids": (lambda m, c: prefill(m, c, [1, 2, 3]), "list"),
}
NO_ROOM: dict[str, tuple[Callable[[Qwen3ForCausalLM, Any], object], str]] = {
    "unknown row": (lambda m, c: prefill(m, c, [[1], [2]], [0, 9]), "no row 9"),
    "more prompts than rows": (lambda m, c: prefill(m, c, [[1]] * 5), "no row 4"),
    "prompt": (lambda m, c: prefill(m, c, [[1] * 13], [2]), "row 2 holds 12 of 24.* 13 more"),
    "one row only": (
        lambda m, c: prefill(m, c, [[1], [1] * 20, [1]], [1, 0, 3]),
        "row 0 holds 7 of 24 tokens; 20 more",
    ),
    "all chunks together": (
        lambda m, c: prefill(m, c, [[1] * 18], [0], chunk_size=3),
        "row 0 holds 7 of 24 tokens; 18 more",
    ),
    "all chunks of one row": (
        lambda m, c: prefill(m, c, [[1], [1] * 13], [1, 2], chunk_size=1),
        "row 2 holds 12 of 24 tokens; 13 more",
    ),
}


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, what) for name in CACHES for what in BAD_CALLS]
    + [(name, what) for name in ("static", "slots first") for what in NO_ROOM],
)
def test_bad_call_is_refused_and_nothing_is_written(
    engine: Qwen3ForCausalLM, name: str, what: str
) -> None:
    call, named = (BAD_CALLS | NO_ROOM)[what]
    clean, dirty = make(name, engine), make(name, engine)
    for cache in (clean, dirty):
        prefill(engine, cache, PROMPTS)
    bytes_before = None if name == "growing" else memory(dirty.storage)
    with pytest.raises(ValueError, match=named):
        call(engine, dirty)
    assert dirty.seq_lens == clean.seq_lens
    if bytes_before is not None:
        assert memory(dirty.storage) == bytes_before
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        assert torch.equal(decode(engine, dirty, tokens), decode(engine, clean, tokens))


def test_decode_fills_the_last_slot_and_no_more(engine: Qwen3ForCausalLM) -> None:
    cache = make("static", engine, max_len=12)
    prefill(engine, cache, PROMPTS)
    before = memory(cache.storage)
    with pytest.raises(ValueError, match="row 2 holds 12 of 12 tokens; 1 more"):
        decode(engine, cache, [1, 2, 3, 4])
    assert cache.seq_lens == (7, 1, 12, 5) and memory(cache.storage) == before
    got = decode(engine, cache, [1, 2, 4], [0, 1, 3])
    longer = [[*PROMPTS[s], t] for s, t in ((0, 1), (1, 2), (3, 4))]
    assert close(got, truth(engine, longer))


RUNNERS: dict[str, Callable[[Qwen3ForCausalLM], Runner]] = {
    "static cache": lambda m: make_runner(m, num_seqs=2, max_len=MAX_LEN),
    "torch.cat cache": lambda m: CachedRunner(m, GrowingKVCache()),
    "no cache": lambda m: make_runner(m, use_cache=False),
}


@pytest.mark.parametrize("bad", [[3, VOCAB], [VOCAB, 3], [3, -1]])
@pytest.mark.parametrize("name", RUNNERS)
def test_runner_works_after_a_refused_token(
    engine: Qwen3ForCausalLM, name: str, bad: list[int]
) -> None:
    runner = RUNNERS[name](engine)
    runner.prefill(PROMPTS[:2], [0, 1])
    with pytest.raises(ValueError, match=str(max(bad) if min(bad) > 0 else -1)):
        runner.decode(bad, [0, 1])
    got = runner.decode([1, 2], [0, 1])
    assert close(got, truth(engine, [[*PROMPTS[0], 1], [*PROMPTS[1], 2]]))


@pytest.mark.parametrize("name", RUNNERS)
def test_runner_works_after_a_refused_prompt(engine: Qwen3ForCausalLM, name: str) -> None:
    runner = RUNNERS[name](engine)
    for bad in ([[1, 2], [3, VOCAB]], [[1], []], [[-1], [1]]):
        with pytest.raises(ValueError):
            runner.prefill(bad, [0, 1])
    got = runner.prefill(PROMPTS[:2], [0, 1])
    assert close(got, truth(engine, PROMPTS[:2]))


# -- runners ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_len", "length"), [(None, 64), (0, 64), (10, 10), (64, 64), (10**6, 64)]
)
def test_runner_is_as_long_as_cache_and_model_allow(
    engine: Qwen3ForCausalLM, max_len: int | None, length: int
) -> None:
    runner = make_runner(engine, num_seqs=3, max_len=max_len)
    assert isinstance(runner, CachedRunner) and isinstance(runner.cache, StaticKVCache)
    assert runner.max_len == runner.cache.max_len == length
    assert runner.cache.num_rows == 3
    assert CachedRunner(engine, GrowingKVCache()).max_len == 64


@pytest.mark.parametrize("name", RUNNERS)
def test_runner_knows_the_models_ends(engine: Qwen3ForCausalLM, name: str) -> None:
    assert RUNNERS[name](engine).eos_token_ids == (5, 7)


def test_cache_takes_the_models_dtype() -> None:
    runner = make_runner(random_model().bfloat16(), max_len=8)
    assert isinstance(runner, CachedRunner) and isinstance(runner.cache, StaticKVCache)
    assert runner.cache.storage.k.dtype == torch.bfloat16
    assert runner.prefill([[1, 2]], [0]).dtype == torch.float32
    assert runner.decode([3], [0]).isfinite().all()


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_without_a_cache_are_refused(engine: Qwen3ForCausalLM, chunk_size: int) -> None:
    runner = make_runner(engine, use_cache=False)
    with pytest.raises(ValueError, match="needs a cache"):
        runner.prefill([[1, 2]], [0], chunk_size)
    assert close(runner.prefill([[1, 2]], [0]), truth(engine, [[1, 2]]))


@pytest.mark.parametrize("num_seqs", [0, -1, True])
def test_runner_for_nobody_is_refused(engine: Qwen3ForCausalLM, num_seqs: int) -> None:
    with pytest.raises(ValueError, match=f"max_seqs.*{num_seqs}"):
        make_runner(engine, num_seqs=num_seqs)
