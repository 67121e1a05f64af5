"""The address books: rows of slots and the concatenating twin. Lengths, refusals, equal answers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from checkpoints import QWEN3_06B
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_storage import memory, poisoned, random_kv
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig, KVCacheSpec
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
ROWS, MAX_LEN = 3, 8
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])
EVERY_CACHE = pytest.mark.parametrize("name", ["static", "static, slots first", "growing"])

Cache = StaticKVCache | GrowingKVCache


def static(slots_first: bool = False) -> StaticKVCache:
    return StaticKVCache(poisoned(slots_first, ROWS * MAX_LEN, SPEC), ROWS, MAX_LEN)


def make(name: str) -> Cache:
    return GrowingKVCache() if name == "growing" else static("slots" in name)


def step(
    cache: Cache, lengths: Sequence[int], seq_ids: Sequence[int] | None = None, seed: int = 0
) -> list[list[tuple[Tensor, Tensor]]]:
    """A forward without a model: random K and V through all layers → contexts of each layer."""
    batch = cache.batch([[0] * n for n in lengths], seq_ids)
    contexts = [
        list(cache.update(layer, *random_kv(batch.num_tokens, 10 * seed + layer), batch))
        for layer in range(SPEC.num_layers)
    ]
    cache.commit(batch)
    return contexts


# -- shapes and bytes ---------------------------------------------------------------------------


@LAYOUTS
def test_classic_shape_is_there_as_a_view(slots_first: bool) -> None:
    k, v = static(slots_first).rows()
    assert k.shape == (SPEC.num_layers, ROWS, SPEC.num_kv_heads, MAX_LEN, SPEC.k_head_dim)
    assert v.shape == (SPEC.num_layers, ROWS, SPEC.num_kv_heads, MAX_LEN, SPEC.v_head_dim)


@LAYOUTS
def test_rows_show_each_sequence_under_its_number(slots_first: bool) -> None:
    cache = static(slots_first)
    step(cache, [3, 5], seq_ids=[2, 0])
    k, v = cache.rows()
    new_k, new_v = random_kv(8, 1)  # of layer 1
    assert torch.equal(k[1, 2, :, :3], new_k[:3].transpose(0, 1))
    assert torch.equal(v[1, 0, :, :5], new_v[3:].transpose(0, 1))
    assert k[1, 2, :, 3:].isnan().all() and k[1, 0, :, 5:].isnan().all() and k[1, 1].isnan().all()


def shape_of(model: ModelConfig, **config: Any) -> StaticKVCache:
    return StaticKVCache.from_config(model, CacheConfig(device="meta", **config))


def test_llama2_7b_on_four_ranks() -> None:
    llama = ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
    )
    cache = shape_of(llama, max_seqs=2, dtype=torch.float16, tp_size=4)
    k, v = cache.rows()
    assert k.is_meta and k.shape == v.shape == (32, 2, 8, 4096, 128)
    assert cache.num_bytes == 2 * 32 * 2 * 8 * 4096 * 128 * 2 == k.nbytes + v.nbytes == 2**30


def test_gpt2() -> None:
    spec = KVCacheSpec(num_layers=12, num_kv_heads=12, k_head_dim=64, v_head_dim=64)
    cache = StaticKVCache(KVStorage(spec, 1024, device="meta"), 1, 1024)
    assert cache.rows()[0].shape == (12, 1, 12, 1024, 64)
    assert cache.num_bytes == 2 * 12 * 1 * 12 * 1024 * 64 * 4 == 72 * 2**20


def test_qwen3_06b_in_bf16() -> None:
    cache = shape_of(QWEN3_06B, max_len=1000, dtype=torch.bfloat16)
    assert cache.num_bytes == 114_688 * 1000
    assert cache.rows()[0].shape == (28, 1, 8, 1000, 128)
    assert cache.storage.k.dtype == torch.bfloat16


@pytest.mark.parametrize(("max_len", "length"), [(None, 40_960), (0, 40_960), (10**6, 40_960)])
def test_length_without_a_limit_is_the_models(max_len: int | None, length: int) -> None:
    cache = shape_of(QWEN3_06B, max_len=max_len, max_seqs=2)
    assert cache.max_len == length and cache.seq_lens == (0, 0)


# -- lengths ------------------------------------------------------------------------------------


@EVERY_CACHE
def test_lengths_move_once_per_forward_at_the_commit(name: str) -> None:
    cache = make(name)
    step(cache, [3, 1])
    before = cache.seq_lens
    batch = cache.batch([[0, 0], [0]])
    assert batch.positions.tolist() == [3, 4, 1]
    for layer in range(SPEC.num_layers):
        cache.update(layer, *random_kv(3), batch)
        assert cache.seq_lens == before
    cache.commit(batch)
    assert cache.seq_lens[:2] == (5, 2)


@EVERY_CACHE
def test_asking_for_a_batch_reserves_nothing(name: str) -> None:
    cache = make(name)
    first, second = (cache.batch([[1, 2, 3]]) for _ in range(2))
    assert cache.seq_lens in ((0, 0, 0), ())
    assert torch.equal(first.positions, second.positions)


@EVERY_CACHE
def test_forward_that_was_not_committed_leaves_no_trace(name: str) -> None:
    clean, dirty = make(name), make(name)
    for cache in (clean, dirty):
        step(cache, [3, 2], seed=1)
    lost = dirty.batch([[0] * 4, [0] * 2])
    for layer in range(2):  # a third layer never came
        dirty.update(layer, *random_kv(6, 99), lost)
    assert dirty.seq_lens == clean.seq_lens
    for want, got in zip(step(clean, [1, 1], seed=2), step(dirty, [1, 1], seed=2), strict=True):
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@LAYOUTS
def test_reset_forgets_one_row_or_all(slots_first: bool) -> None:
    cache = static(slots_first)
    step(cache, [3, 2, 8])
    cache.reset(1)
    assert cache.seq_lens == (3, 0, 8)
    contexts = step(cache, [2], seq_ids=[1], seed=5)
    new_k, new_v = random_kv(2, 50)
    assert torch.equal(contexts[0][0][0], new_k) and torch.equal(contexts[0][0][1], new_v)
    cache.reset()
    assert cache.seq_lens == (0, 0, 0)
    assert cache.batch([[1]]).positions.tolist() == [0]


def test_twin_forgets_one_sequence_or_all() -> None:
    cache = GrowingKVCache()
    step(cache, [3, 2, 8])
    cache.reset(1)
    assert cache.seq_lens == (3, 0, 8)
    contexts = step(cache, [2, 1], seq_ids=[1, 0], seed=5)
    assert [len(k) for k, _ in contexts[0]] == [2, 4]
    assert torch.equal(contexts[0][0][0], random_kv(3, 50)[0][:2])
    cache.reset()
    assert cache.seq_lens == () and cache.batch([[1]]).positions.tolist() == [0]
    assert len(step(cache, [1])[0][0][0]) == 1


def test_rows_of_other_sequences_stay_bit_equal() -> None:
    cache = static()
    step(cache, [3, 4, 5])
    k, v = (x.clone() for x in cache.rows())
    step(cache, [2], seq_ids=[1], seed=7)
    for before, after in zip((k, v), cache.rows(), strict=True):
        for row in (0, 2):
            assert torch.equal(before[:, row].nan_to_num(7), after[:, row].nan_to_num(7))
        assert torch.equal(before[:, 1, :, :4], after[:, 1, :, :4])
        assert not after[:, 1, :, 4:6].isnan().any() and after[:, 1, :, 6:].isnan().all()


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 3), min_size=1), max_size=8),
    st.booleans(),
)
def test_twins_agree_and_a_model_of_lists_does_too(
    steps: list[dict[int, int]], slots_first: bool
) -> None:
    book, twin = static(slots_first), GrowingKVCache()
    history: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # (layer, row) -> its tokens
    lens = [0] * ROWS
    for seed, lengths in enumerate(steps):
        rows = list(lengths)
        if any(lens[row] + n > MAX_LEN for row, n in lengths.items()):
            before = memory(book.storage)
            with pytest.raises(ValueError, match="do not fit"):
                step(book, list(lengths.values()), rows, seed)
            assert memory(book.storage) == before and book.seq_lens == tuple(lens)
            continue
        ours = step(book, list(lengths.values()), rows, seed)
        theirs = step(twin, list(lengths.values()), rows, seed)
        for layer in range(SPEC.num_layers):
            k, v = random_kv(sum(lengths.values()), 10 * seed + layer)
            parts = zip(
                k.split(list(lengths.values())), v.split(list(lengths.values())), strict=True
            )
            for s, (row, (k_s, v_s)) in enumerate(zip(rows, parts, strict=True)):
                own = history.setdefault((layer, row), [])
                own.extend(zip(k_s, v_s, strict=True))
                want = [torch.stack(x) for x in zip(*own, strict=True)]
                for got in (ours[layer][s], theirs[layer][s]):
                    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        for row, n in lengths.items():
            lens[row] += n
        book.check_integrity()
        assert book.seq_lens == tuple(lens) == (*twin.seq_lens, *[0] * ROWS)[:ROWS]


@LAYOUTS
def test_what_is_read_is_a_view_of_the_valid_part(slots_first: bool) -> None:
    cache = static(slots_first)
    step(cache, [3, 2])
    contexts = step(cache, [1, 4], seed=1)
    end = cache.storage.k.data_ptr() + cache.storage.k.nbytes
    for layer in contexts:
        for (k, v), length in zip(layer, (4, 6), strict=True):
            assert k.shape == (length, 2, 4) and v.shape == (length, 2, 6)
            assert k.isfinite().all() and v.isfinite().all()
            assert cache.storage.k.data_ptr() <= k.data_ptr() < end


# -- keys and values of unequal width -----------------------------------------------------------


@pytest.mark.parametrize("backend", [NaiveAttention, SdpaAttention])
@EVERY_CACHE
def test_values_may_be_wider_than_keys(name: str, backend: Callable[..., AttentionBackend]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(9, heads, dim, generator=generator) for heads, dim in ((4, 4), (2, 4), (2, 6))
    )
    whole = NaiveAttention().attend(0, q, k, v, Batch.from_sequences([[0] * 5, [0] * 4]))
    cache, outs = make(name), []
    attention = backend(cache=cache)
    # tokens 0 .. 4 are of one sequence, 5 .. 8 of the other: 3 + 2, then 1 + 1, then 1 + 1
    for rows in ([0, 1, 2, 5, 6], [3, 7], [4, 8]):
        batch = cache.batch([[0] * sum(r < 5 for r in rows), [0] * sum(r >= 5 for r in rows)])
        outs.append(attention.attend(0, q[rows], k[rows], v[rows], batch))
        cache.commit(batch)
    got = torch.cat(outs)[[0, 1, 2, 5, 7, 3, 4, 6, 8]]
    assert got.shape == (9, 4, 6)
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=0)


# -- refusals -----------------------------------------------------------------------------------


def refused(cache: StaticKVCache, action: Callable[[], object], *named: str) -> None:
    """A ValueError with these words; lengths and bytes as before; the next valid step works."""
    lens, before = cache.seq_lens, memory(cache.storage)
    with pytest.raises(ValueError) as refusal:
        action()
    for word in named:
        assert word in str(refusal.value)
    assert cache.seq_lens == lens and memory(cache.storage) == before
    row = lens.index(min(lens))
    assert step(cache, [1], [row])[0][0][0].isfinite().all()
    assert cache.seq_lens[row] == lens[row] + 1


@LAYOUTS
@pytest.mark.parametrize(
    ("lengths", "seq_ids", "named"),
    [
        ([9], [0], ["row 0 holds 5 of 8", "9 more"]),
        ([4], [0], ["row 0 holds 5 of 8", "4 more"]),
        ([1, 4], [1, 0], ["row 0 holds 5 of 8", "4 more"]),
        ([3, 1], [0, 2], ["row 2 holds 8 of 8", "1 more"]),
        ([1], [3], ["no row 3", "0 .. 2"]),
        ([1, 1], [0, -1], ["no row -1", "0 .. 2"]),
        ([1, 1], [1, 1], ["once", "[1, 1]"]),
        ([1, 1], [0], ["2 sequences", "1 seq_ids"]),
        ([1], [0, 1], ["1 sequences", "2 seq_ids"]),
        ([1, 1, 1], [0, 1, 3], ["no row 3"]),
        ([1, 1, 1, 1], None, ["row 2 holds 8 of 8"]),
        ([], [], ["at least one sequence"]),
        ([1, 0], [0, 1], ["sequence 1 is empty"]),
    ],
)
def test_what_has_no_room_is_refused_before_anything_is_written(
    slots_first: bool, lengths: list[int], seq_ids: list[int] | None, named: list[str]
) -> None:
    cache = static(slots_first)
    step(cache, [5, 2, 8])
    refused(cache, lambda: step(cache, lengths, seq_ids), *named)


def test_row_can_be_filled_to_the_last_slot() -> None:
    cache = static()
    step(cache, [7], [1])
    step(cache, [1], [1])
    assert cache.seq_lens == (0, MAX_LEN, 0)
    refused(cache, lambda: step(cache, [1], [1]), "row 1 holds 8 of 8")


@pytest.mark.parametrize("row", [3, -1, 99])
def test_reset_of_a_row_that_is_not_there_is_refused(row: int) -> None:
    cache = static()
    step(cache, [5, 2, 8])
    refused(cache, lambda: cache.reset(row), f"no row {row}", "0 .. 2")


@LAYOUTS
@pytest.mark.parametrize("layer", [3, -1])
def test_wrong_layer_is_refused(slots_first: bool, layer: int) -> None:
    cache = static(slots_first)
    batch = cache.batch([[1, 2]])
    refused(cache, lambda: cache.update(layer, *random_kv(2), batch), f"layer {layer}", "0 .. 2")


@LAYOUTS
def test_keys_of_another_batch_are_refused(slots_first: bool) -> None:
    cache = static(slots_first)
    batch = cache.batch([[1, 2]])
    refused(cache, lambda: cache.update(0, *random_kv(3), batch), "2 slots", "[3, 2, 4]")


@LAYOUTS
def test_keys_of_another_dtype_are_refused(slots_first: bool) -> None:
    cache = static(slots_first)
    batch = cache.batch([[1, 2]])
    k, v = (x.bfloat16() for x in random_kv(2))
    refused(cache, lambda: cache.update(0, k, v, batch), "float32", "bfloat16")


@EVERY_CACHE
def test_batch_that_no_cache_made_is_refused(name: str) -> None:
    cache = make(name)
    batch = Batch.from_sequences([[1, 2]])
    lens = cache.seq_lens
    with pytest.raises(ValueError):
        cache.update(0, *random_kv(2), batch)
    with pytest.raises(ValueError):
        cache.commit(batch)
    assert cache.seq_lens == lens


@pytest.mark.parametrize(("rows", "length"), [(5, 5), (3, 7), (24, 2)])
def test_rows_that_do_not_fill_the_storage_are_refused(rows: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows of {length} need {rows * length}.*has 24"):
        StaticKVCache(poisoned(slots=24), rows, length)


@pytest.mark.parametrize(("rows", "length"), [(-3, -8), (0, 0), (True, 24)])
def test_cache_without_rows_is_refused(rows: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"num_rows.*{rows}"):
        StaticKVCache(poisoned(slots=24), rows, length)


def test_impossible_length_is_an_invariant_broken() -> None:
    cache = static()
    batch = cache.batch([[0] * 5])
    cache.commit(batch)
    with pytest.raises(ValueError, match="row 0, which holds 5"):
        cache.commit(batch)  # twice the same forward
    cache.check_integrity()
    cache._lens[0] = 10  # what only a bug of ours could do
    with pytest.raises(AssertionError, match="row 0 has 10 of 8"):
        cache.check_integrity()


# -- the naive twin -----------------------------------------------------------------------------


def test_twin_copies_all_there_is_at_every_step() -> None:
    cache = GrowingKVCache()
    step(cache, [4], [0])
    for seed in range(1, 4):
        step(cache, [1], [0], seed)
    per_token = SPEC.bytes_per_token
    assert cache.bytes_copied == per_token * (4 + 5 + 6 + 7)


def test_twin_has_no_limit_and_takes_any_number() -> None:
    cache = GrowingKVCache()
    step(cache, [500], [4])
    assert cache.max_len is None and cache.seq_lens == (0, 0, 0, 0, 500)


def test_twin_stacks_to_the_classic_shape() -> None:
    cache = GrowingKVCache()
    for seed in range(5):
        step(cache, [1, 1], seed=seed)
    k, v = cache.stacked(2)
    assert k.shape == (2, 2, 5, 4) and v.shape == (2, 2, 5, 6)
    assert torch.equal(k[1, :, 3], random_kv(2, 32)[0][1])


def test_twin_refuses_to_stack_unequal_lengths() -> None:
    cache = GrowingKVCache()
    step(cache, [1, 2])
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        cache.stacked(0)


def test_twin_refuses_a_sequence_twice() -> None:
    with pytest.raises(ValueError, match=r"once.*\[1, 1\]"):
        GrowingKVCache().batch([[1], [2]], [1, 1])


def test_a_batch_is_committed_once() -> None:
    cache = StaticKVCache(KVStorage(SPEC, num_slots=32), num_rows=2, max_len=16)
    batch = cache.batch([[1, 2, 3], [4]])
    cache.commit(batch)
    with pytest.raises(ValueError, match=r"position 0 of row 0, which holds 3"):
        cache.commit(batch)
    assert cache.seq_lens == (3, 1)
    stale, fresh = cache.batch([[5]], [1]), cache.batch([[6], [7]])
    cache.commit(stale)
    with pytest.raises(ValueError, match="row 1"):
        cache.commit(fresh)  # row 0 alone would fit: all or nothing
    assert cache.seq_lens == (3, 2)
