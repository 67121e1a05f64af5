"""Introduced in notebook 02. Attention for prefill on a CPU: blocks of queries, plain matmuls.

Each block attends to the keys up to its own last one, so the half that the causal mask forbids is
hardly computed. Knows queries, keys and values, and that large contexts are read some heads at a
time; knows no weights, no model and no slots.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.storage import Contexts
from tutorial_engine.model.attention import KVCache, SdpaAttention

BLOCK = {torch.float32: 64, torch.bfloat16: 128}  # queries; measured


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, block: int | None = None) -> Tensor:
    """Causal attention of the last queries q [q, H, D] to k [kv, H_kv, D], v [kv, H_kv, D_v].

    Returns [q, H, D_v]. The query heads of a group are rows of one matmul with their K/V head, so
    nothing is repeated. In bf16 the scores are rounded before the softmax, as in transformers'
    eager attention. The idea of tiles: FlashAttention (Dao et al. 2022), here of queries only.
    """
    (q_len, heads, head_dim), (kv_len, kv_heads, _) = q.shape, k.shape
    if kv_len < q_len:
        raise ValueError(f"{q_len} queries cannot be the last of {kv_len} keys")
    block = BLOCK.get(q.dtype, 64) if block is None else block
    group = heads // kv_heads
    q = (q * (1.0 / math.sqrt(head_dim))).view(q_len, kv_heads, group, head_dim)
    q, keys, values = q.permute(1, 2, 0, 3), k.permute(1, 2, 0), v.transpose(0, 1)
    out = v.new_empty(q_len, heads, v.shape[-1])
    later = q.new_full((block, block), -math.inf).triu(1)  # within a block: keys of later queries
    for start in range(0, q_len, block):
        rows = min(block, q_len - start)
        end = kv_len - q_len + start + rows  # keys that the last query of the block may see
        mine = q[:, :, start : start + rows].reshape(kv_heads, group * rows, head_dim)
        scores = torch.bmm(mine, keys[:, :, :end]).view(kv_heads, group, rows, end)
        scores[..., end - rows :] += later[:rows, :rows]
        weights = scores.softmax(-1).view(kv_heads, group * rows, end)
        mixed = torch.bmm(weights, values[:, :end]).view(kv_heads, group, rows, -1)
        out[start : start + rows] = mixed.permute(2, 0, 1, 3).reshape(rows, heads, -1)
    return out


class BlockedAttention(SdpaAttention):
    """SDPA for one query, blocks for more: faster than SDPA on CPUs. For inference only.

    A large context that must be gathered is, by some heads at a time: what the CPU's cache holds.
    """

    def one_of(self, contexts: Sequence[tuple[Tensor, Tensor]], s: int, q: Tensor) -> Tensor:
        """As SdpaAttention.one_of."""
        if not (isinstance(contexts, Contexts) and contexts.is_large(s)):
            return super().one_of(contexts, s, q)
        group = q.shape[1] // contexts.num_kv_heads
        mixed = [
            self.one_sequence(q[:, group * heads.start : group * heads.stop], k, v)
            for heads, k, v in contexts.by_heads(s)
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)

    def one_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As SdpaAttention.one_sequence."""
        return super().one_sequence(q, k, v) if q.shape[0] == 1 else blocked_attention(q, k, v)


def fast_attention(device: torch.device, cache: KVCache) -> SdpaAttention:
    """The fastest backend that we have for a device."""
    return BlockedAttention(cache) if device.type == "cpu" else SdpaAttention(cache)
