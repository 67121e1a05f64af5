"""Introduced in notebook 02. The shelves of a KV cache: tensors per layer, addressed by slot.

Knows slots; knows no sequence, no position, no model. Every cache layout uses these same shelves
and an address book of its own (kv_cache: rows). Shapes: T tokens, H_kv K/V heads, D head_dim.
"""

import math
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Batch, Slots

SMALL = 2**17  # bytes of K: a copy as small gets memory that the process has already
PART = 2**21  # bytes of K copied at a time: still in the CPU's cache when it is read; measured


class KVStorage:
    """The shelves: per layer a K tensor and a V tensor, addressed by slot and by nothing else.

    `k[layer]` is [H_kv, slots, D], or [slots, H_kv, D] with slots_first; `v` likewise with its own
    D. Slots that were never written hold whatever was in the memory, and must never be read.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_slots: int,
        device: torch.device | str = "cpu",
        slots_first: bool = False,
    ) -> None:
        at_least_one("num_slots", num_slots)
        self.spec, self.num_slots, self.slots_first = spec, num_slots, slots_first
        self._slot_axis = 0 if slots_first else 1  # of one layer's shelf
        axes = (num_slots, spec.num_kv_heads) if slots_first else (spec.num_kv_heads, num_slots)
        with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
            self.k, self.v = (
                torch.empty(spec.num_layers, *axes, dim, dtype=spec.dtype, device=device)
                for dim in (spec.k_head_dim, spec.v_head_dim)
            )
        # indexing a tensor makes a new view each time; a step needs every layer's
        self._k_of, self._v_of = list(self.k), list(self.v)
        self.k_bytes = (
            spec.num_kv_heads * spec.k_head_dim * self.k.itemsize
        )  # of a token in a layer
        self._scratch = [torch.empty(0, dtype=spec.dtype, device=device) for _ in "kv"]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shelves: bytes per token times slots."""
        return self.spec.bytes_per_token * self.num_slots

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [T, H_kv, D] and v [T, H_kv, D_v] into the slots slot_mapping [T] of a layer."""
        self._check(layer, slot_mapping, k, v)
        if not self.slots_first:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        self._k_of[layer].index_copy_(self._slot_axis, slot_mapping, k)
        self._v_of[layer].index_copy_(self._slot_axis, slot_mapping, v)

    def scatter(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """As write, for padded batches: a token whose slot is −1 is left out."""
        self._check(layer, slot_mapping, k, v)
        real = slot_mapping >= 0
        self.write(layer, slot_mapping[real], k[real], v[real])

    def copy(self, source: slice, target: slice) -> None:
        """What the slots of source hold, into those of target, in every layer."""
        axis, length = self._slot_axis + 1, source.stop - source.start
        for shelf in (self.k, self.v):
            old = shelf.narrow(axis, source.start, length)
            shelf.narrow(axis, target.start, length).copy_(old)

    def read(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """K [n, H_kv, D] and V [n, H_kv, D_v] of those slots: views for a slice, else copies."""
        k, v = self._k_of[layer], self._v_of[layer]
        if isinstance(slots, slice):
            start, length = slots.start, slots.stop - slots.start
            k = k.narrow(self._slot_axis, start, length)
            v = v.narrow(self._slot_axis, start, length)
        else:
            k, v = (x.index_select(self._slot_axis, slots) for x in (k, v))
        return (k, v) if self.slots_first else (k.transpose(0, 1), v.transpose(0, 1))

    def read_by_heads(self, layer: int, slots: Slots) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """As read, some K/V heads after the others → (which heads, K [n, heads, D], V).

        Scattered slots are copied into one piece of memory again and again: each part is gone when
        the next is asked for. Asking the system for that much each time costs more than the copy.
        """
        heads = self.spec.num_kv_heads
        if isinstance(slots, slice) or torch.is_grad_enabled():
            yield slice(0, heads), *self.read(layer, slots)
            return
        parts = -(-slots.numel() * self.k_bytes // PART)
        size = -(-heads // min(parts, heads))
        for start in range(0, heads, size):
            some = slice(start, min(start + size, heads))
            yield some, self._gather(0, layer, slots, some), self._gather(1, layer, slots, some)

    def _gather(self, which: int, layer: int, slots: Tensor, heads: slice) -> Tensor:
        """K (0) or V (1) of these heads in the scratch memory, which grows by doubling."""
        shelf = (self._k_of, self._v_of)[which][layer]
        some = shelf.narrow(1 - self._slot_axis, heads.start, heads.stop - heads.start)
        shape = list(some.shape)
        shape[self._slot_axis] = slots.numel()
        needed = math.prod(shape)
        if self._scratch[which].numel() < needed:
            with torch.inference_mode(False):
                self._scratch[which] = shelf.new_empty(2 ** (needed - 1).bit_length())
        out = self._scratch[which][:needed].view(shape)
        torch.index_select(some, self._slot_axis, slots, out=out)
        return out if self.slots_first else out.transpose(0, 1)

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> "Contexts":
        """Write the batch's K and V where it says, then give each sequence all of its own.

        What a sequence has is read when it is asked for: of scattered slots there is never more
        than one sequence's copy (`contexts[s]`), or some heads' of it (`contexts.by_heads(s)`).
        """
        if batch.slot_mapping is None:
            raise ValueError("this batch has no slots: get it from cache.batch(sequences)")
        self.write(layer, batch.slot_mapping, k, v)
        return Contexts(self, layer, batch.context_slots)

    def by_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The same memory in the classic shape, [layers, rows, H_kv, slots per row, D], K and V."""
        at_least_one("num_rows", num_rows)
        if self.num_slots % num_rows:
            raise ValueError(f"{self.num_slots} slots do not make {num_rows} equal rows")
        axis = self._slot_axis + 1
        k, v = (x.unflatten(axis, (num_rows, -1)) for x in (self.k, self.v))
        # slots first: [L, rows, n, H_kv, D]; heads first: [L, H_kv, rows, n, D]
        return (
            (k.transpose(2, 3), v.transpose(2, 3))
            if self.slots_first
            else (
                k.transpose(1, 2),
                v.transpose(1, 2),
            )
        )

    def _check(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        spec, tokens = self.spec, slot_mapping.numel()
        if not 0 <= layer < spec.num_layers:
            raise ValueError(f"layer {layer} is outside 0 .. {spec.num_layers - 1}")
        want_k = (tokens, spec.num_kv_heads, spec.k_head_dim)
        want_v = (tokens, spec.num_kv_heads, spec.v_head_dim)
        if k.shape != want_k or v.shape != want_v:
            raise ValueError(
                f"for {tokens} slots this storage takes k {list(want_k)} and v {list(want_v)}; got "
                f"k {list(k.shape)} and v {list(v.shape)}"
            )
        if k.dtype != spec.dtype or v.dtype != spec.dtype:
            raise ValueError(f"the storage holds {spec.dtype}, got k {k.dtype} and v {v.dtype}")


class Contexts(Sequence[tuple[Tensor, Tensor]]):
    """K and V of each sequence of a batch in one layer, as KVStorage.read gives them, one by one.

    Each is read when it is asked for, and nothing is kept here: all copies at once would be as much
    as the whole cache, in memory that the system has to find and clear in every layer.
    """

    def __init__(self, storage: KVStorage, layer: int, slots: Sequence[Slots]) -> None:
        self._storage, self._layer, self._slots = storage, layer, slots

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> "Contexts": ...

    def __getitem__(self, index: int | slice) -> "tuple[Tensor, Tensor] | Contexts":
        """One sequence's K and V [kv, H_kv, ·], read now; for a slice those of some sequences."""
        if isinstance(index, slice):
            return Contexts(self._storage, self._layer, self._slots[index])
        return self._storage.read(self._layer, self._slots[index])

    @property
    def num_kv_heads(self) -> int:
        """H_kv of all sequences."""
        return self._storage.spec.num_kv_heads

    def is_large(self, index: int) -> bool:
        """Is one sequence's context a copy, and of so much that `by_heads` is the faster way?"""
        slots = self._slots[index]
        return not isinstance(slots, slice) and slots.numel() * self._storage.k_bytes > SMALL

    def by_heads(self, index: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """One sequence's K and V, some heads at a time, as KVStorage.read_by_heads gives them."""
        return self._storage.read_by_heads(self._layer, self._slots[index])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.__getitem__, range(len(self)))  # which, unlike a generator, holds none
