"""Introduced in notebook 04. Cells with shelves: sequences whose tokens lie in any cell, by hand.

What a change of the table means for the tensors: a shared cell costs nothing, a moved one has its
key turned in every layer (K-shift), a copied one is copied in every layer. Knows the model's rotary
angles; knows no request. Source: llama.cpp (llama_kv_cache). Shapes: H_kv K/V heads, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.batch import Batch, Slots
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope


class CellNumbers:
    """A sequence's cells as a tensor that grows with the table's list, token by token.

    Made for one list of the table (see CellTable.cells_of) and good for as long as it is that list.
    """

    def __init__(self, cells: Sequence[int], device: torch.device) -> None:
        self.cells, self._device = cells, device
        self._numbers: Tensor
        self._known = self._run = 0  # cells in the tensor; leading ones that are neighbours
        self._resize(0)

    def first(self, n: int) -> Slots:
        """The first n cells: a slice if they are neighbours, else their numbers [n], to be read."""
        cells = self.cells
        while self._run < len(cells) and cells[self._run] == cells[0] + self._run:
            self._run += 1
        if n <= self._run:
            return slice(cells[0], cells[0] + n) if n else slice(0, 0)
        if self._known < len(cells):
            if len(cells) > len(self._array):  # twice as long: each is copied about once in all
                self._resize(max(64, 2 * len(cells)))
            self._array[self._known : len(cells)] = cells[self._known :]
            self._known = len(cells)
        return self._numbers[:n].to(self._device)

    def _resize(self, length: int) -> None:
        with torch.inference_mode(False):  # wherever it is made, it can grow anywhere
            numbers = torch.empty(length, dtype=torch.int64)
        if self._known:
            numbers[: self._known] = self._numbers[: self._known]
        # the same memory as an array, into which one number is written fifty times faster
        self._numbers, self._array = numbers, numbers.numpy()


class CellSequences:
    """A CellTable over a KVStorage, one cell per slot: a TokenCache for `prefill` and `decode`.

    Sequences are numbers; the operations on them are the table's, here with their effect on K
    and V. `rope` must turn keys as the model does. A new token follows its sequence's last one.
    """

    def __init__(self, storage: KVStorage, rope: RotaryEmbedding) -> None:
        if rope.head_dim != storage.spec.k_head_dim:
            raise ValueError(
                f"rope turns heads of {rope.head_dim}, the storage has {storage.spec.k_head_dim}"
            )
        self.storage, self.rope = storage, rope
        self.table = CellTable(storage.num_slots)
        self._numbers: dict[int, CellNumbers] = {}  # seq_id -> its cells as a tensor

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        num_cells: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tp_size: int = 1,
        slots_first: bool = True,
    ) -> "CellSequences":
        """Cells that fit the model. ValueError, with the bytes, when there is no memory."""
        spec = KVCacheSpec.from_model(model, dtype, tp_size)
        try:
            storage = KVStorage(spec, num_cells, device, slots_first)
        except RuntimeError as error:  # PyTorch's allocator
            needed = spec.bytes_per_token * num_cells
            raise ValueError(f"no memory for {num_cells} cells ({needed:,} bytes)") from error
        return cls(storage, RotaryEmbedding(model.head_dim, model.rope_theta).to(device))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of sequences 0, 1, ..."""
        last = max(self.table.seq_ids, default=-1)
        return tuple(len(self.table.cells_of(s)) for s in range(last + 1))

    @property
    def max_len(self) -> int:
        """Tokens that a sequence can have if it is alone."""
        return self.table.num_cells

    def slots(self, seq_id: int, n: int | None = None) -> Slots:
        """Where a sequence's first n tokens (all, unless told) lie, by position."""
        cells = self.table.cells_of(seq_id)
        known = self._numbers.get(seq_id)
        if known is None or known.cells is not cells:
            if not cells:
                self._numbers.pop(seq_id, None)
                return slice(0, 0)
            known = self._numbers[seq_id] = CellNumbers(cells, self.storage.k.device)
        return known.first(len(cells) if n is None else n)

    # ---- a forward: batch, update in each layer, commit

    def batch(
        self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int] | None = None
    ) -> Batch:
        """The next tokens of these sequences (0, 1, ... unless named), each with an empty cell.

        Nothing is taken before `commit`. ValueError, with the numbers, when cells run out.
        """
        ids = tuple(range(len(sequences)) if seq_ids is None else seq_ids)
        if any(isinstance(sequence, int) for sequence in sequences):
            raise ValueError("give a list of token id lists, one per sequence: [[1, 2, 3]]")
        if len(ids) != len(sequences) or len(set(ids)) != len(ids):
            raise ValueError(f"{len(sequences)} sequences, each once, got seq_ids {list(ids)}")
        firsts = [self.table.next_pos(s) for s in ids]
        batch = Batch.from_sequences(sequences, firsts, self.storage.k.device)
        new = self.table.find_slot(batch.num_tokens)
        if new is None:
            raise ValueError(
                f"{batch.num_tokens} tokens need a cell each, {self.table.num_free} of "
                f"{self.table.num_cells} are empty: remove a sequence, or make more cells"
            )
        slot_mapping = torch.tensor(new, device=self.storage.k.device)
        parts = slot_mapping.split(batch.query_lens)
        contexts = [_joined(self.slots(s), part) for s, part in zip(ids, parts, strict=True)]
        return batch.with_slots(ids, slot_mapping, contexts)

    def update(
        self, layer: int, k: Tensor, v: Tensor, batch: Batch
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """As KVStorage.update. The first layer of a forward finds all pending shifts applied."""
        if self.table.has_shifts:
            self.apply_shifts()
        return self.storage.update(layer, k, v, batch)

    def commit(self, batch: Batch) -> None:
        """The forward is done: its tokens have their cells from now on.

        ValueError, and nothing taken, for a batch that does not follow on what the table says now.
        """
        if batch.slot_mapping is None or len(batch.seq_ids) != batch.num_seqs:
            raise ValueError("this batch has no cells: get it from cache.batch(sequences)")
        cells = batch.slot_mapping.split(batch.query_lens)
        positions = batch.positions.split(batch.query_lens)
        shares = [
            (seq_id, own.tolist(), at.tolist())
            for seq_id, own, at in zip(batch.seq_ids, cells, positions, strict=True)
        ]
        for (seq_id, own, at), context in zip(shares, batch.context_slots, strict=True):
            held = len(self.table.cells_of(seq_id))
            if at[0] != self.table.next_pos(seq_id) or _length(context) != held + len(own):
                raise ValueError(
                    f"this batch begins at position {at[0]} of sequence {seq_id}, which holds "
                    f"{held} tokens and goes on at {self.table.next_pos(seq_id)}: was it "
                    "committed already, or the sequence changed?"
                )
            for cell in own:
                if self.table[cell].owners:
                    raise ValueError(f"cell {cell} was taken since: ask for a new batch")
        for seq_id, own, at in shares:
            self.table.place(own, seq_id, at)

    def reset(self, seq_id: int | None = None) -> None:
        """Forget one sequence, or all. What the cells held stays there, and is never read."""
        if seq_id is None:
            self.table.clear()
            self._numbers.clear()
        else:
            self.table.seq_rm(seq_id)

    # ---- what else the table can do, and what that does to K and V

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> list[int]:
        """As CellTable.seq_rm; K and V stay and are never read."""
        return self.table.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> list[int]:
        """As CellTable.seq_cp; no K or V is copied."""
        return self.table.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> list[int]:
        """As CellTable.seq_keep."""
        return self.table.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> list[int]:
        """As CellTable.seq_add; the keys are turned at the next forward, in every layer."""
        return self.table.seq_add(seq_id, p0, p1, delta)

    def seq_unshare(self, seq_id: int, p0: int = 0, p1: int = -1) -> list[tuple[int, int]]:
        """As CellTable.seq_unshare, and K and V copied to the new cells, in every layer."""
        pairs = self.table.seq_unshare(seq_id, p0, p1)
        if pairs:
            old, new = torch.tensor(pairs, device=self.storage.k.device).unbind(1)
            for layer in range(self.storage.spec.num_layers):
                self.storage.write(layer, new, *self.storage.read(layer, old))
        return pairs

    @torch.no_grad()
    def apply_shifts(self) -> int:
        """K-shift: turn every key that lags by its shift, in every layer → how many cells.

        R(p + d) = R(d) R(p), so the key of position p becomes that of p + d. V has no position.
        """
        if not self.table.has_shifts:
            return 0
        shifts = self.table.take_shifts()
        device = self.storage.k.device
        cells = torch.tensor(list(shifts), device=device)
        angles = self.rope(torch.tensor(list(shifts.values()), device=device))
        for shelf in self.storage.k:
            keys = shelf if self.storage.slots_first else shelf.transpose(0, 1)
            keys[cells] = apply_rope(keys[cells], *angles)  # [n, H_kv, D]
        return len(shifts)

    def check_integrity(self) -> None:
        """AssertionError if the table does not add up, or a kept tensor differs from it."""
        self.table.check_integrity()
        for seq_id in self.table.seq_ids:
            slots, cells = self.slots(seq_id), list(self.table.cells_of(seq_id))
            told = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
            assert list(told) == cells, f"sequence {seq_id} has {cells}, its tensor says {told}"


def _length(slots: Slots) -> int:
    return slots.stop - slots.start if isinstance(slots, slice) else slots.numel()


def _joined(known: Slots, new: Tensor) -> Slots:
    """Known slots and new ones after them: a slice if they are neighbours, all of them."""
    first, n = int(new[0]), new.numel()
    if isinstance(known, slice):
        start = known.start if _length(known) else first
        if start + _length(known) == first and bool((new.diff() == 1).all()):
            return slice(start, first + n)
        known = torch.arange(known.start, known.stop, device=new.device)
    return torch.cat((known, new))
