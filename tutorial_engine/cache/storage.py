"""Introduced in notebook 02. KV storage: a K and a V tensor per layer, addressed by slot.

Knows slots; knows no sequence, no position, no model. Every cache layout (rows, pages, cells) is
this storage and a map of its own from positions to slots. Shapes: T tokens, H_kv K/V heads, D
head_dim.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Batch, Slots

LONG = 1024  # slots: a shorter copy costs less than to look up the memory that is kept


class KVStorage:
    """Per layer a K tensor and a V tensor, addressed by slot and by nothing else.

    `k[layer]` is [H_kv, slots, D], or [slots, H_kv, D] with slots_first; `v` likewise with its own
    D. Slots that were never written hold whatever was in the memory, and must never be read.
    ValueError, with the bytes, when there is no memory for them.
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
        self._slot_axis = 0 if slots_first else 1  # of one layer's tensor
        axes = (num_slots, spec.num_kv_heads) if slots_first else (spec.num_kv_heads, num_slots)
        try:
            with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
                self.k, self.v = (
                    torch.empty(spec.num_layers, *axes, dim, dtype=spec.dtype, device=device)
                    for dim in (spec.k_head_dim, spec.v_head_dim)
                )
        except (RuntimeError, TypeError) as error:  # PyTorch's allocator; sizes beyond 64 bits
            raise ValueError(
                f"no memory for {num_slots:,} slots of {spec.bytes_per_token:,} bytes "
                f"({self.num_bytes:,} in all): make the cache smaller, by fewer sequences "
                "(max_seqs, max_num_seqs), blocks or cells, or a shorter max_len"
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
        self.bytes_gathered = 0  # of K and V that `read` copied, since this was made

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers: bytes per token times slots."""
        return self.spec.bytes_per_token * self.num_slots

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k [T, H_kv, D] and v [T, H_kv, D_v] into the slots slot_mapping [T] of a layer.

        ValueError, and nothing written, for another layer, shape or dtype.
        """
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
        all_k, all_v = self._by_slot[layer]
        all_k.index_copy_(0, slot_mapping, k)
        all_v.index_copy_(0, slot_mapping, v)

    def scatter(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """As write, for padded batches: a token whose slot is −1 is left out."""
        if not len(k) == len(v) == len(slot_mapping):
            raise ValueError(f"{len(slot_mapping)} slots for {len(k)} keys and {len(v)} values")
        real = slot_mapping >= 0
        self.write(layer, slot_mapping[real], k[real], v[real])

    def copy(self, source: slice, target: slice) -> None:
        """What the slots of source hold, into those of target, in every layer."""
        axis, length = self._slot_axis + 1, source.stop - source.start
        for tensor in (self.k, self.v):
            old = tensor.narrow(axis, source.start, length)
            tensor.narrow(axis, target.start, length).copy_(old)

    def read(self, layer: int, slots: Slots, keep: bool = False) -> tuple[Tensor, Tensor]:
        """K [n, H_kv, D] and V [n, H_kv, D_v] of those slots: views for a slice, else copies.

        With `keep` long copies are in memory that is kept for the next reading: good until then.
        """
        if isinstance(slots, slice):
            all_k, all_v = self._by_slot[layer]
            return all_k[slots], all_v[slots]
        k, v = self._layers[layer]
        if keep and slots.numel() >= LONG:
            k, v = self._gather(0, k, slots), self._gather(1, v, slots)
        else:
            k, v = (x.index_select(self._slot_axis, slots) for x in (k, v))
        self.bytes_gathered += k.nbytes + v.nbytes
        return (k, v) if self.slots_first else (k.transpose(0, 1), v.transpose(0, 1))

    def update(
        self, layer: int, k: Tensor, v: Tensor, batch: Batch
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Write the batch's K and V where it says; then each sequence's own, as `read` gives them.

        Scattered slots are copied together when their sequence's turn comes, long ones always into
        the same memory: to ask the system for so much each time costs more than the copy. So a pair
        is good until the next one is asked for.
        """
        if batch.slot_mapping is None:
            raise ValueError("this batch has no slots: get it from Batch.from_allocations")
        self.write(layer, batch.slot_mapping, k, v)
        keep = not torch.is_grad_enabled()
        return (self.read(layer, slots, keep) for slots in batch.context_slots)

    def _gather(self, which: int, tensor: Tensor, slots: Tensor) -> Tensor:
        """One layer's K (0) or V (1) of these slots, in memory that is kept."""
        shape = list(tensor.shape)
        shape[self._slot_axis] = slots.numel()
        needed = math.prod(shape)
        if self._scratch[which].numel() < needed:
            with torch.inference_mode(False):
                self._scratch[which] = tensor.new_empty(2 * needed)
        out = self._scratch[which][:needed].view(shape)
        return torch.index_select(tensor, self._slot_axis, slots, out=out)

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


class SlotNumbers:
    """The slots of a sequence by position, in `slots`: a list that its owner makes longer.

    The same numbers stand in a tensor that grows by doubling, so that a token more costs one number
    and no copy. Any other change is a `replace`.
    """

    def __init__(self, slots: list[int], device: torch.device) -> None:
        self.slots, self._device = slots, device
        self._run = 0  # leading slots that are neighbours
        self._known = 0  # leading slots that stand in the tensor
        self._tensor = torch.empty(0, dtype=torch.int64)
        self._array = self._tensor.numpy()

    def first(self, n: int) -> Slots:
        """The first n slots: a slice if they are neighbours, else a view [n] that is only read."""
        slots = self.slots
        while self._run < len(slots) and slots[self._run] == slots[0] + self._run:
            self._run += 1
        if n <= self._run:
            return slice(slots[0], slots[0] + n) if n else slice(0, 0)
        if self._known < len(slots):
            if len(slots) > len(self._array):
                self._grow(2 * len(slots))  # so that each is copied about once in all
            self._array[self._known : len(slots)] = slots[self._known :]
            self._known = len(slots)
        return self._tensor[:n].to(self._device)

    def replace(self, start: int, slots: list[int]) -> None:
        """In place of those from position `start` on come these."""
        self.slots[start:] = slots
        self._run, self._known = min(self._run, start), min(self._known, start)

    def check_integrity(self) -> None:
        """AssertionError if slice or tensor are not what the list says."""
        got = self.first(len(self.slots))
        told = list(range(got.start, got.stop)) if isinstance(got, slice) else got.tolist()
        assert told == self.slots, f"the slots are {self.slots}, the tensor says {told}"

    def _grow(self, length: int) -> None:
        with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
            tensor = torch.empty(max(64, length), dtype=torch.int64)
        tensor[: self._known] = self._tensor[: self._known]
        # the same memory as an array, into which one number is written fifty times faster
        self._tensor, self._array = tensor, tensor.numpy()
