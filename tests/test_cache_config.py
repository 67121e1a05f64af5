"""The sizes of a cache: what a token costs, which lengths count, which numbers are refused."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from checkpoints import LLAMA2_7B, QWEN3_06B
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.cache.config import CacheConfig, KVCacheSpec
from tutorial_engine.checks import at_least_one

GPT2 = KVCacheSpec(num_layers=12, num_kv_heads=12, k_head_dim=64, v_head_dim=64)
SIZES = {"num_layers": 3, "num_kv_heads": 2, "k_head_dim": 8, "v_head_dim": 6}


# -- what a token costs -------------------------------------------------------------------------


def test_token_of_qwen3_06b_costs_112_kib_in_bf16() -> None:
    spec = KVCacheSpec.from_model(QWEN3_06B, torch.bfloat16)
    assert spec.bytes_per_token == 2 * 28 * 8 * 128 * 2 == 114_688


def test_token_of_gpt2_costs_72_kib_in_fp32() -> None:
    assert GPT2.bytes_per_token == 2 * 12 * 12 * 64 * 4 == 73_728


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_ranks_share_the_heads_and_so_the_bytes(ranks: int) -> None:
    whole = KVCacheSpec.from_model(LLAMA2_7B, torch.float16)
    part = KVCacheSpec.from_model(LLAMA2_7B, torch.float16, tp_size=ranks)
    assert part == replace(whole, num_kv_heads=32 // ranks)
    assert part.bytes_per_token * ranks == whole.bytes_per_token == 524_288


def test_keys_and_values_of_unequal_width_are_counted_apart() -> None:
    assert KVCacheSpec(**SIZES).bytes_per_token == 3 * 2 * (8 + 6) * 4


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float8_e4m3fn, 1)]
)
def test_bytes_follow_the_dtype(dtype: torch.dtype, size: int) -> None:
    assert KVCacheSpec(**SIZES, dtype=dtype).bytes_per_token == 84 * size


def test_grouped_heads_count_not_query_heads() -> None:
    assert QWEN3_06B.num_attention_heads == 2 * KVCacheSpec.from_model(QWEN3_06B).num_kv_heads


@pytest.mark.parametrize("ranks", [3, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"8 K/V heads.*tp_size={ranks}"):
        KVCacheSpec.from_model(QWEN3_06B, tp_size=ranks)
    assert KVCacheSpec.from_model(QWEN3_06B, tp_size=8).num_kv_heads == 1


# -- how long a row is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_len", "length"), [(None, 40_960), (0, 40_960), (1, 1), (40_959, 40_959)]
)
def test_length_is_the_configs_or_the_models(max_len: int | None, length: int) -> None:
    assert CacheConfig(max_len=max_len).length_for(QWEN3_06B) == length


@given(st.none() | st.integers(0, 10**9))
def test_length_never_exceeds_the_model(max_len: int | None) -> None:
    length = CacheConfig(max_len=max_len).length_for(QWEN3_06B)
    assert 1 <= length <= QWEN3_06B.max_position_embeddings
    if max_len:
        assert length == min(max_len, 40_960)


# -- values -------------------------------------------------------------------------------------


def test_copy_changes_what_it_is_told_and_nothing_else() -> None:
    first = CacheConfig(max_seqs=3, max_len=7, slots_first=True)
    second = first.copy(max_len=9)
    assert second == CacheConfig(max_seqs=3, max_len=9, slots_first=True)
    assert first == CacheConfig(max_seqs=3, max_len=7, slots_first=True)
    assert first.copy() == first and first.copy() is not first


def test_copy_is_checked_like_the_original() -> None:
    with pytest.raises(ValueError, match=r"max_seqs.*got 0"):
        CacheConfig().copy(max_seqs=0)
    with pytest.raises(TypeError, match="rows"):
        CacheConfig().copy(rows=3)


@pytest.mark.parametrize(
    ("value", "field"), [(CacheConfig(), "max_len"), (GPT2, "num_layers")], ids=["config", "spec"]
)
def test_configs_are_frozen_values(value: Any, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, 5)
    assert hash(value) == hash(replace(value))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "3", None, True, False])
@pytest.mark.parametrize("field", SIZES)
def test_spec_sizes_below_one_are_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be a whole number.*got {wrong!r}"):
        KVCacheSpec(**{**SIZES, field: wrong})


@pytest.mark.parametrize("wrong", [-1, -4096, 2.0, "3", True, False])
@pytest.mark.parametrize("field", ["max_seqs", "max_len", "tp_size"])
def test_config_sizes_below_one_are_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be a whole number.*got {wrong!r}"):
        CacheConfig(**{field: wrong})


@pytest.mark.parametrize("field", ["max_seqs", "tp_size"])
def test_only_the_length_may_be_left_to_the_model(field: str) -> None:
    for wrong in (0, None):
        with pytest.raises(ValueError, match=f"{field}.*got {wrong}"):
            CacheConfig(**{field: wrong})


@pytest.mark.parametrize("good", [1, 2, 10**12])
def test_whole_numbers_from_one_up_are_sizes(good: int) -> None:
    at_least_one("size", good)
