"""KV storage: a K and a V tensor per layer, addressed by slot.

Knows slots; knows no sequence, no position, no model. Every cache layout (rows, pages, cells) is
this storage and a map of its own from positions to slots. Shapes: T tokens, H_kv K/V heads, D
head_dim.
"""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Batch, Slots

LONG = 1024  # slots: a shorter copy costs less than to look up the memory that is kept


class KVStorage:
    """Per layer a K tensor and a V tensor, addressed by slot and by nothing else.

    `k[layer]` is [slots, H_kv, D], or [H_kv, slots, D] without slots_first; `v` likewise with its
    own D. Slots that were never written hold whatever was in the memory, and must never be read.
    ValueError, with the bytes, when there is no memory for them.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_slots: int,
        device: torch.device | str = "cpu",
        slots_first: bool = True,
    ) -> None:
        at_least_one("num_slots", num_slots)
        self.spec, self.num_slots, self.slots_first = spec, num_slots, slots_first
        self._slot_axis = 0 if slots_first else 1  # of one layer's tensor
        axes = (num_slots, spec.num_kv_heads) if slots_first else (spec.num_kv_heads, num_slots)
        try:
            with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
                self.k, self.v = (
                    torch.empty(spec.num_layers, *axes, dim, dtype=spec.dtype, device=device)
                    for dim in (spec.k_head_dim, spec.v_head_dim)
                )
        except (RuntimeError, TypeError, AssertionError) as error:  # sizes beyond 64 bits, no GPU
            raise ValueError(
                f"no memory for {num_slots:,} slots of {spec.bytes_per_token:,} bytes "
                f"({self.num_bytes:,} in all) on {device}: make the cache smaller, by fewer "
                "sequences (max_seqs, max_num_seqs), blocks or cells, or a shorter max_len "
                f"(PyTorch: {str(error).splitlines()[0]})"
            ) from error
        # Indexing a tensor makes a new view each time, and a step needs every layer's K and V: as
        # they are in memory, and as [slots, H_kv, ·], whichever axis comes first there.
        self._layers = list(zip(self.k, self.v, strict=True))
        self._by_slot = [
            (k, v) if slots_first else (k.transpose(0, 1), v.transpose(0, 1))
            for k, v in self._layers
        ]
        self._scratch = [self.k.new_empty(0), self.v.new_empty(0)]
        self.device = self.k.device
        self.bytes_gathered = 0  # of K and V that reading copied, since this was made

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers: bytes per token times slots."""
        return self.spec.bytes_per_token * self.num_slots

    # ---- what attention asks

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Put a batch's new k [T, H_kv, D] and v [T, H_kv, D_v] into its slots."""
        if batch.slot_mapping is None:
            raise ValueError("this batch has no slots: get it from Batch.from_allocations")
        self.write_slots(layer, batch.slot_mapping, k, v)

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        """All K and V of the batch's sequence s, as read_slots: good until the next read.

        Long copies lie in memory that is kept for the next one: to ask the system for so much each
        time costs more than the copy.
        """
        slots = batch.context_slots[s]
        is_long = not isinstance(slots, slice) and slots.numel() >= LONG
        return self.read_slots(layer, slots, keep=is_long and not torch.is_grad_enabled())

    # ---- by slot

    def write_slots(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [T, H_kv, D] and v [T, H_kv, D_v] into the slots [T] of a layer.

        ValueError, and nothing written, for another layer, shape or dtype.
        """
        spec, tokens = self.spec, slots.numel()
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
        all_k, all_v = self._by_slot[layer]
        all_k.index_copy_(0, slots, k)
        all_v.index_copy_(0, slots, v)

    def read_slots(self, layer: int, slots: Slots, keep: bool = False) -> tuple[Tensor, Tensor]:
        """K [n, H_kv, D] and V [n, H_kv, D_v] of those slots: views for a slice, else copies.

        With `keep` the copies are good until the next reading.
        """
        if isinstance(slots, slice):
            all_k, all_v = self._by_slot[layer]
            return all_k[slots], all_v[slots]
        k, v = self._layers[layer]
        if keep:
            k, v = self._gather(0, k, slots), self._gather(1, v, slots)
        else:
            axis = self._slot_axis
            k, v = k.index_select(axis, slots), v.index_select(axis, slots)
        self.bytes_gathered += k.nbytes + v.nbytes
        return (k, v) if self.slots_first else (k.transpose(0, 1), v.transpose(0, 1))

    def _gather(self, which: int, x: Tensor, slots: Tensor) -> Tensor:
        """A copy of these slots of a layer's K (0) or V (1), in memory that is kept."""
        shape = list(x.shape)
        shape[self._slot_axis] = slots.numel()
        needed = math.prod(shape)
        if self._scratch[which].numel() < needed:
            with torch.inference_mode(False):
                self._scratch[which] = x.new_empty(2 * needed)
        out = self._scratch[which][:needed].view(shape)
        return torch.index_select(x, self._slot_axis, slots, out=out)

    def copy(self, source: slice, target: slice) -> None:
        """What the slots of source hold, into those of target, in every layer."""
        for k, v in self._by_slot:
            k[target], v[target] = k[source], v[source]

    def by_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The same memory in the classic shape, [layers, rows, H_kv, slots per row, D], K and V."""
        at_least_one("num_rows", num_rows)
        if self.num_slots % num_rows:
            raise ValueError(f"{self.num_slots} slots do not make {num_rows} equal rows")
        axis = self._slot_axis + 1
        k, v = (x.unflatten(axis, (num_rows, -1)) for x in (self.k, self.v))
        # slots first: [L, rows, n, H_kv, D]; heads first: [L, H_kv, rows, n, D]
        first, second = (2, 3) if self.slots_first else (1, 2)
        return k.transpose(first, second), v.transpose(first, second)


def as_slots(numbers: Sequence[int]) -> Slots:
    """A slice where the numbers are neighbours, else a tensor [n].

    By way of an array: `torch.tensor(numbers)` takes seven times as long.
    """
    first, end = (numbers[0], numbers[0] + len(numbers)) if numbers else (0, 0)
    if not numbers or (numbers[-1] == end - 1 and numbers == list(range(first, end))):
        return slice(first, end)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
