"""One attention call a layer for many sequences: all of a batch on a GPU, alike ones on a CPU.

A call for each sequence keeps a GPU waiting for Python, and costs a CPU more than a small copy.
Here contexts are gathered at once, and one kernel goes through them. Shapes: T tokens, S sequences,
N keys of all of them, L of the longest, H query heads, H_kv key/value heads, D head_dim.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

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
FEW = 4  # sequences: up to so many, one call for each is as fast (decision 014)
MOST_PADDING = 2**18  # bytes of K and V that cost about as much to read as a call
MOST_COPIED = 2**20  # bytes of K and V: many copies of more leave the processor's cache


class SlotCache(KVCache, Protocol):
    """A KVCache whose slots can be read in any order."""

    def read_slots(self, layer: int, slots: Slots, keep: bool = False) -> tuple[Tensor, Tensor]:
        """K [n, H_kv, D] and V [n, H_kv, D_v] of these slots; `keep`: until the next reading."""
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
        if self.varlen is not None:
            self.cache.write(layer, k, v, batch)
            kv = batch.end_to_end
            k, v = self.cache.read_slots(layer, kv.slots)
            return self.varlen(q, k, v, kv.query_starts, kv.starts, kv.longest_query, kv.longest)
        if len(q) > batch.num_seqs:  # not a decode step
            return super().attend(layer, q, k, v, batch)
        self.cache.write(layer, k, v, batch)
        slots, mask = batch.padded  # [S, L] each
        return padded_attention(q, *self.cache.read_slots(layer, slots.flatten()), mask)


class Alike(NamedTuple):
    """Sequences that attend in one call: their rows in the batch, what they read, what counts."""

    rows: Slots  # all of it, or S numbers
    slots: Slots  # S · L of them
    mask: Tensor  # [S, L]


class AlikeTogether(BlockedAttention):
    """A decode step of more than a few: sequences of about one length in one call, padded.

    For CPUs. Contexts that are views already (rows) gain nothing by a copy, long ones lose by it:
    each has its own call, and so it is in all other steps.
    """

    cache: SlotCache

    def __init__(
        self,
        cache: SlotCache,
        few: int = FEW,
        most_padding: int = MOST_PADDING,
        most_copied: int = MOST_COPIED,
    ) -> None:
        super().__init__(cache)
        self.few, self.most_padding, self.most_copied = few, most_padding, most_copied
        self._batch: Batch | None = None  # of the last call, and who is in one call together
        self._groups: list[Alike] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if batch is not self._batch:  # the first layer of a step decides for all
            gains = self.few < len(q) == batch.num_seqs and not all(
                isinstance(slots, slice) for slots in batch.context_slots
            )
            slot = k[0].nbytes + v[0].nbytes
            most = self.most_padding // slot, self.most_copied // slot
            self._batch, self._groups = batch, alike(batch, *most) if gains else []
        if not self._groups:
            return super().attend(layer, q, k, v, batch)
        self.cache.write(layer, k, v, batch)
        out, keep = v.new_empty(*q.shape[:2], v.shape[-1]), not torch.is_grad_enabled()
        for rows, slots, mask in self._groups:
            keys, values = self.cache.read_slots(layer, slots, keep=keep)
            out[rows] = padded_attention(q[rows], keys, values, mask)
        return out


def alike(batch: Batch, most_padding: int, most_copied: int) -> list[Alike]:
    """The sequences of a decode step by length; none is padded with more slots than that.

    A longer one than `most_copied` slots is alone; [] where all are.
    """
    lens = torch.tensor(batch.context_lens)
    shortest, longest = int(lens.min()), int(lens.max())
    if shortest > most_copied:
        return []
    if longest <= min(most_copied, shortest + most_padding):
        slots, mask = batch.padded
        return [Alike(slice(0, batch.num_seqs), slots.flatten(), mask)]
    left, found = lens.argsort(descending=True), list[Alike]()
    while len(left):
        longest = int(lens[left[0]])
        is_alike = lens[left] >= longest - most_padding
        num = 1 if longest > most_copied else int(is_alike.sum())
        rows, left = left[:num], left[num:]
        slots, mask = batch.pad(rows.tolist())
        found.append(Alike(rows, slots.flatten(), mask))
    return found


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query of each sequence, q [S, H, D], to padded k, v [S · L, H_kv, ·] → [S, H, D_v].

    mask [S, L]: which keys count. The query heads of a group are the rows of their K/V head.
    """
    k, v = (x.unflatten(0, mask.shape).transpose(1, 2) for x in (k, v))  # [S, H_kv, L, ·]
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
    can_read = cache is not None and hasattr(cache, "read_slots")
    if device.type == "cpu":
        return AlikeTogether(cast("SlotCache", cache)) if can_read else BlockedAttention(cache)
    if not can_read:
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
