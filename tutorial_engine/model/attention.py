"""Who may look at whom, the textbook attention, and its fast twins.

Knows queries, keys, values and the batch that says whose they are; knows no weights, no model and
no slot. Shapes: T tokens, H query heads, H_kv key/value heads, D head_dim.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.model.batch import Batch

WeightsObserver = Callable[[int, int, Tensor], None]  # (layer, sequence, weights [H, q, kv])
QUERY_BLOCK = {torch.float32: 64, torch.bfloat16: 128}  # of blocked_attention; measured


class AttentionResult(NamedTuple):
    """What attention mixed, out [q, H, D], and how much of each key, weights [H, q, kv]."""

    out: Tensor
    weights: Tensor


def causal_mask(
    q_len: int, kv_len: int, window: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """The rule key_pos <= query_pos as a bool matrix [q_len, kv_len]; True = may attend.

    The queries are the LAST q_len of the kv_len positions (prefill: all; decode: one; chunk: some).
    With a window w a query also sees no key that is w or more positions back.
    """
    if q_len < 1 or kv_len < q_len:
        raise ValueError(
            f"need 1 <= q_len <= kv_len, got q_len={q_len}, kv_len={kv_len}: "
            "the queries are the last of the keys"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a token sees itself), got {window}")
    query_pos = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key_pos = torch.arange(kv_len, device=device)[None, :]
    allowed = key_pos <= query_pos
    if window is not None:
        allowed &= query_pos - key_pos < window
    return allowed


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> AttentionResult:
    """softmax(q kᵀ · scale) v by the book, scores and softmax in fp32: every backend's oracle.

    q [q, H, D], k [kv, H_kv, D], v [kv, H_kv, D_v], mask [q, kv] with True = may attend. Query head
    h reads K/V head h // (H / H_kv). scale is 1/√D unless given. ValueError on shapes that do not
    fit and on a query that may attend to nothing (its softmax would be NaN).
    """
    (q_len, heads, head_dim), (kv_len, kv_heads, k_dim) = q.shape, k.shape
    if k_dim != head_dim or v.shape[:2] != k.shape[:2] or heads % kv_heads:
        raise ValueError(
            f"shapes do not fit: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; the last "
            "axes of q and k must agree, and H must be a multiple of H_kv"
        )
    k = k.repeat_interleave(heads // kv_heads, dim=1)  # [kv, H, D]
    v = v.repeat_interleave(heads // kv_heads, dim=1)  # [kv, H, D_v]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if mask is not None:
        if mask.shape != (q_len, kv_len):
            raise ValueError(f"mask must be [{q_len}, {kv_len}], got {list(mask.shape)}")
        if not bool(mask.any(dim=-1).all()):
            row = int((~mask.any(dim=-1)).nonzero()[0])
            raise ValueError(f"query {row} may attend to no key at all; its softmax would be NaN")
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
    return AttentionResult(out, weights)


class AttentionBackend(Protocol):
    """One way to compute causal attention for a whole flat batch; swapped by handing in another."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q [T, H, D], k and v [T, H_kv, D] → [T, H, D]; no token sees another sequence's."""
        ...


class KVCache(Protocol):
    """What a backend asks in each layer: write the new keys and values, then read each sequence."""

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Keep a batch's new k [T, H_kv, D] and v [T, H_kv, D_v] of a layer."""
        ...

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        """All keys and values of the batch's sequence s, the new ones last: [kv, H_kv, ·].

        Good until the next read: long copies may lie in memory that is used again.
        """
        ...


class NoCache:
    """Remembers nothing: each sequence has only the keys and values of this very forward."""

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """They take the place of the layer's before."""
        self._pairs = list(zip(k.split(batch.query_lens), v.split(batch.query_lens), strict=True))

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        """The new ones."""
        return self._pairs[s]


class NaiveAttention:
    """`naive_attention` once per sequence. Shows its weights to an observer, if it has one."""

    def __init__(
        self, observe: WeightsObserver | None = None, cache: KVCache | None = None
    ) -> None:
        self.observe, self.cache = observe, cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        cache = NoCache() if self.cache is None else self.cache
        cache.write(layer, k, v, batch)
        outs = []
        for s, q_s in enumerate(q.split(batch.query_lens)):
            k_s, v_s = cache.read(layer, batch, s)
            mask = causal_mask(len(q_s), len(k_s), device=q.device)
            out, weights = naive_attention(q_s, k_s, v_s, mask)
            if self.observe is not None:
                self.observe(layer, s, weights)
            outs.append(out)
        return torch.cat(outs)


class SdpaAttention:
    """PyTorch's fused scaled_dot_product_attention (flash kernels where the device has them).

    One call per sequence, so that nothing is padded.
    """

    def __init__(self, cache: KVCache | None = None) -> None:
        self.cache = cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        cache, lengths = NoCache() if self.cache is None else self.cache, batch.query_lens
        cache.write(layer, k, v, batch)
        if len(lengths) == 1:
            return self.one_sequence(q, *cache.read(layer, batch, 0))
        outs = []
        for s, q_s in enumerate(q.split(lengths)):
            outs.append(self.one_sequence(q_s, *cache.read(layer, batch, s)))
        return torch.cat(outs)

    def one_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sequence's last queries q [q, H, D] to its k, v [kv, H_kv, ·] → [q, H, D_v]."""
        if q.shape[0] > 1:
            return self._several(q, k, v)
        # The query heads of a group are the rows of its K/V head: it is read once for all of them.
        # The newest token sees every key, so there is no mask.
        grouped = q.view(1, k.shape[1], -1, q.shape[2])  # [1, H_kv, group, D]
        out = F.scaled_dot_product_attention(
            grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        )  # [1, H_kv, group, D_v]
        return out.reshape(1, q.shape[1], -1)  # some GPU kernels lay it out in another order

    def _several(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [n, heads, D] -> [1, heads, n, D], views only
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        q_len, kv_len = q.shape[2], k.shape[2]
        # is_causal lines the triangle up at the upper left, so it is right only for q_len == kv_len
        mask = causal_mask(q_len, kv_len, device=q.device) if q_len != kv_len else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class BlockedAttention(SdpaAttention):
    """SDPA for one query, `blocked_attention` for more: faster on CPUs. For inference only."""

    def _several(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocked_attention(q, k, v)


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, block: int | None = None) -> Tensor:
    """Causal attention of the last queries q [q, H, D] to k [kv, H_kv, D], v [kv, H_kv, D_v].

    Blocks of queries, each with the keys up to its own last one: the half that the causal mask
    forbids is hardly computed. The query heads of a group are rows of one matmul with their K/V
    head. In bf16 the scores are rounded before the softmax, as in transformers' eager attention.
    The idea of tiles: FlashAttention (Dao et al. 2022), here of queries only.
    """
    (q_len, heads, head_dim), (kv_len, kv_heads, _) = q.shape, k.shape
    if kv_len < q_len:
        raise ValueError(f"{q_len} queries cannot be the last of {kv_len} keys")
    block = QUERY_BLOCK.get(q.dtype, 64) if block is None else block
    group = heads // kv_heads
    q = (q * (1.0 / math.sqrt(head_dim))).view(q_len, kv_heads, group, head_dim)
    q, keys, values = q.permute(1, 2, 0, 3), k.permute(1, 2, 0), v.transpose(0, 1)
    out = v.new_empty(q_len, heads, v.shape[-1])
    later = q.new_full((block, block), -math.inf).triu(1)  # within a block: keys of later queries
    for start in range(0, q_len, block):
        rows = min(block, q_len - start)
        end = kv_len - q_len + start + rows  # keys that the last query of the block may see
        q_block = q[:, :, start : start + rows].reshape(kv_heads, group * rows, head_dim)
        scores = torch.bmm(q_block, keys[:, :, :end]).view(kv_heads, group, rows, end)
        scores[..., end - rows :] += later[:rows, :rows]
        weights = scores.softmax(-1).view(kv_heads, group * rows, end)
        mixed = torch.bmm(weights, values[:, :end]).view(kv_heads, group, rows, -1)
        out[start : start + rows] = mixed.permute(2, 0, 1, 3).reshape(rows, heads, -1)
    return out
