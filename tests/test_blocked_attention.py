"""Attention in blocks of queries equals the textbook's, whatever the block."""

import pytest
import torch
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.model.attention import (
    NaiveAttention,
    SdpaAttention,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.blocked_attention import (
    BlockedAttention,
    blocked_attention,
    fast_attention,
)
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


def qkv(
    q_len: int, kv_len: int, heads: tuple[int, int], dims: tuple[int, int] = (16, 16)
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(q_len, heads[0], dims[0])
    return q, torch.randn(kv_len, heads[1], dims[0]), torch.randn(kv_len, heads[1], dims[1])


@pytest.mark.parametrize("block", [1, 3, 4, 64, None])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 7), (4, 4), (9, 9), (3, 8), (65, 130)])
def test_equal_to_the_textbook(
    q_len: int, kv_len: int, heads: tuple[int, int], block: int | None
) -> None:
    q, k, v = qkv(q_len, kv_len, heads)
    want = naive_attention(q, k, v, causal_mask(q_len, kv_len)).out
    assert torch.allclose(blocked_attention(q, k, v, block), want, atol=1e-5)


def test_keys_and_values_may_differ_in_size() -> None:
    q, k, v = qkv(5, 9, (4, 2), (16, 24))
    want = naive_attention(q, k, v, causal_mask(5, 9)).out
    got = blocked_attention(q, k, v, block=2)
    assert got.shape == (5, 4, 24)
    assert torch.allclose(got, want, atol=1e-5)


def test_inputs_are_left_as_they_were() -> None:
    tensors = qkv(9, 9, (4, 2))
    before = [x.clone() for x in tensors]
    blocked_attention(*tensors, block=4)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_no_query_sees_a_later_key() -> None:
    q, k, v = qkv(10, 10, (4, 2))
    before = blocked_attention(q, k, v, block=4)
    k[6:], v[6:] = 99.0, 99.0
    after = blocked_attention(q, k, v, block=4)
    assert torch.equal(before[:6], after[:6])
    assert not torch.allclose(before[6:], after[6:])


def test_bf16_is_near_fp32() -> None:
    q, k, v = qkv(70, 200, (4, 2), (32, 32))
    want = blocked_attention(q, k, v)
    got = blocked_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.03  # 8 bits of a value up to 4


def test_a_cpu_gets_blocks_and_other_devices_sdpa(model: Qwen3ForCausalLM) -> None:
    cache = StaticKVCache.from_config(model.config, CacheConfig(max_len=8))
    assert isinstance(fast_attention(torch.device("cpu"), cache), BlockedAttention)
    other = fast_attention(torch.device("cuda"), cache)
    assert isinstance(other, SdpaAttention)
    assert not isinstance(other, BlockedAttention)


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (3, 1, 8)])
def test_as_a_backend_it_gives_the_naive_hidden_states(
    model: Qwen3ForCausalLM, lengths: tuple[int, ...]
) -> None:
    batch = Batch.from_sequences([list(range(20, 20 + n)) for n in lengths])
    want = model(batch, NaiveAttention())
    assert torch.allclose(model(batch, BlockedAttention()), want, atol=1e-3)
