"""One attention call a layer for all sequences of a batch: what a GPU wants.

A call for each sequence keeps a GPU waiting for Python. Here all contexts are gathered at once, and
one kernel goes through them. Shapes: T tokens, S sequences, N keys of all of them, H query heads,
H_kv key/value heads, D head_dim.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.model.attention import (
    BlockedAttention,
    KVCache,
    SdpaAttention,
    blocked_attention,
)
from tutorial_engine.model.batch import Batch, Slots

# (q [T, H, D], k and v [N, H_kv, ·], where each sequence begins in q and in k, int32 [S + 1] each,
# the longest in q and in k) → [T, H, D_v], causal; the queries are the last of their keys
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
HALF = (torch.float16, torch.bfloat16)


class SlotCache(KVCache, Protocol):
    """A KVCache whose slots can be read in any order."""

    def read_slots(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """K [n, H_kv, D] and V [n, H_kv, D_v] of these slots."""
        ...


class BatchedAttention(SdpaAttention):
    """All sequences of a batch in one call a layer.

    With `varlen` they lie end to end, whatever runs. Without it a decode step is padded to its
    longest context, and other steps go sequence by sequence, as SdpaAttention does.
    """

    cache: SlotCache

    def __init__(self, cache: SlotCache, varlen: Varlen | None = None) -> None:
        super().__init__(cache)
        self.varlen = varlen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if self.varlen is None and len(q) > batch.num_seqs:
            return super().attend(layer, q, k, v, batch)
        self.cache.write(layer, k, v, batch)
        if self.varlen is None:
            return self._padded(layer, q, batch)
        kv = batch.end_to_end
        k, v = self.cache.read_slots(layer, kv.slots)
        return self.varlen(q, k, v, kv.query_starts, kv.starts, kv.longest_query, kv.longest)

    def _padded(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """One query a sequence, q [S, H, D]. The query heads of a group are rows, as there."""
        slots, mask = batch.padded  # [S, L] each
        k, v = self.cache.read_slots(layer, slots.flatten())
        k, v = (x.unflatten(0, slots.shape).transpose(1, 2) for x in (k, v))  # [S, H_kv, L, ·]
        grouped = q.unflatten(1, (k.shape[1], -1))  # [S, H_kv, group, D]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None])
        return out.flatten(1, 2)


def varlen_by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    longest_query: int,
    longest: int,
) -> Tensor:
    """What such a kernel computes, one sequence after the other: runs everywhere, and slowly."""
    ends = zip(query_starts.tolist(), starts.tolist(), strict=True)
    pieces = [
        blocked_attention(q[a:b], k[c:d], v[c:d]) for (a, c), (b, d) in pairwise(ends) if a < b
    ]
    return torch.cat(pieces)


def fast_attention(
    device: torch.device, cache: KVCache | None = None, dtype: torch.dtype = torch.float32
) -> SdpaAttention:
    """The fastest backend that we have for a device, and for weights of a dtype."""
    if device.type == "cpu":
        return BlockedAttention(cache)
    if cache is None or not hasattr(cache, "read_slots"):
        return SdpaAttention(cache)
    return BatchedAttention(cast("SlotCache", cache), varlen_kernel(device, dtype)[0])


def varlen_kernel(device: torch.device, dtype: torch.dtype) -> tuple[Varlen | None, str]:
    """PyTorch's FlashAttention over sequences laid end to end, or None; and why, or why not."""
    if device.type != "cuda":
        return None, "a CPU needs no such kernel"
    if dtype not in HALF:
        return None, f"the flash kernel is for fp16 and bf16, the weights are {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None, "the flash kernel needs a card of compute capability 8.0 (Ampere) or later"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"PyTorch {torch.__version__} has no torch.nn.attention.varlen"
    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 needs not be told
        options["enable_gqa"] = True
    kernel: Varlen = partial(cast("Varlen", varlen_attn), **options)
    return kernel, "the flash kernel takes all sequences at once"
