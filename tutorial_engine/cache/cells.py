"""Cells: a sequence's tokens lie in any slots, one cell per slot.

What the table says, what that does to K and V, and the scheduler's question answered. Knows the
model's rotary angles; knows no request and no queue. With a cell per token nothing is reserved
beyond the tokens there are, and nothing must be in a row. Source: llama.cpp (llama_kv_cache).
"""

from collections.abc import Sequence

import torch

from tutorial_engine.cache.cell_table import CellTable, SeqId
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import SequenceMemory, fork_to_give_up
from tutorial_engine.cache.storage import KVStorage, as_slots
from tutorial_engine.model.batch import Allocation
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope
from tutorial_engine.trace.events import (
    CellsFreed,
    CellsShared,
    CellsTaken,
    Event,
    Recorder,
    Setting,
)


class CellKVCache:
    """A KVMemory whose sequences can also be changed by hand: cut, copied, moved.

    A sequence is admitted only if all its tokens fit, and holds their cells from then on: nobody
    who comes later can take what its next chunk needs. A token's position is its index in the
    sequence's token_ids. Whoever changes cells by hand (`seq_rm`, `seq_add`) changes its token_ids
    and num_computed_tokens to match. `rope` must turn keys as the model does.
    """

    def __init__(
        self, storage: KVStorage, rope: RotaryEmbedding, trace: Recorder | None = None
    ) -> None:
        if rope.head_dim != storage.spec.k_head_dim:
            raise ValueError(
                f"rope turns heads of {rope.head_dim}, the storage has {storage.spec.k_head_dim}"
            )
        self.storage, self.rope, self.trace = storage, rope, trace
        self.user: object = None
        self.table = CellTable(storage.num_slots)
        self.max_len = storage.num_slots
        self._shared: dict[str, int] = {}  # a fork, till its first commit -> tokens it shares
        self._waiting: dict[str, None] = {}  # forks that are not admitted yet, oldest first

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        num_cells: int,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        trace: Recorder | None = None,
    ) -> "CellKVCache":
        """Cells that fit the model. ValueError, with the bytes, when there is no memory."""
        spec = KVCacheSpec.from_model(model, dtype)
        storage = KVStorage(spec, num_cells, device)
        return cls(storage, RotaryEmbedding.of(model).to(device), trace)

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of these cells."""
        return {"num_cells": self.table.num_cells}

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return self.table.seq_ids

    # ---- what a scheduler asks

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """Cells for what has none yet, wherever they are empty.

        A fork that waits gives way to whoever runs. Keys that wait to be turned are turned now.
        ValueError when the sequence says otherwise than the table what is computed.
        """
        while (first := self.reserve(seq_id, token_ids, num_computed, num_new)) is None:
            given_up = fork_to_give_up(seq_id, self._waiting, self.table.seq_ids)
            if given_up is None:
                return None
            self.free(given_up)
        self._waiting.pop(seq_id, None)
        if self.table.has_shifts:
            self.apply_shifts()
        end, cells = min(first + num_new, len(token_ids)), self.table.cells_of(seq_id)
        num_cells = len(cells) - (self.table.next_pos(seq_id) - end)  # the others are for later
        new_cells = cells[num_cells - (end - first) : num_cells]
        return Allocation(first, new_cells, as_slots(cells[:num_cells]))

    def reserve(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> int | None:
        """Cells for the next tokens → the position of the first of them, or None."""
        first, start = max(num_computed, self._shared.get(seq_id, 0)), self.table.next_pos(seq_id)
        if first != start:
            self._check_computed(seq_id, first, start)
        is_new = start == 0 or seq_id in self._waiting
        end = len(token_ids) if is_new else min(first + num_new, len(token_ids))
        if start < end:
            new = self.table.find_slot(end - start)
            if new is None:
                return None
            self.table.place(new, seq_id, range(start, end))
            self._record(CellsTaken, seq_id, start, tuple(new))
        return first

    def _check_computed(self, seq_id: str, num_computed: int, end: int) -> None:
        """Cells from num_computed to `end` are one for each token to run: its own, not moved."""
        cells = self.table.cells_of(seq_id)
        ahead = [self.table[cell] for cell in cells[max(len(cells) - (end - num_computed), 0) :]]
        positions = [pos for pos, owners, shift in ahead if len(owners) == 1 and not shift]
        if num_computed > end or positions != list(range(num_computed, end)):
            raise ValueError(
                f"sequence {seq_id} says that {num_computed} tokens are computed; here it has "
                f"{len(cells)} cells, and its next position is {end}: do to its token_ids and "
                "num_computed_tokens what seq_rm, seq_add or seq_cp did to its cells"
            )

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """A fork is a sequence like any other from now on."""
        self._shared.pop(seq_id, None)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """The child owns the parent's cells, too, and copies nothing, ever.

        ValueError for a parent that does not hold one cell for each of these positions, or a child
        that has cells.
        """
        num_held = len(self.table.visible(parent_id, num_tokens - 1))
        if num_held != num_tokens or self.table.cells_of(child_id):
            raise ValueError(
                f"sequence {parent_id} holds {num_held} of the first {num_tokens} positions, "
                f"{child_id} has {len(self.table.cells_of(child_id))} cells: only what is there "
                "can be shared, and only from the start"
            )
        if num_tokens:
            cells = self.seq_cp(parent_id, child_id, 0, num_tokens)
            self._shared[child_id], self._waiting[child_id] = num_tokens, None
            self._record(CellsShared, child_id, tuple(cells))
        return num_tokens

    def free(self, seq_id: str) -> None:
        """A cell that others own stays theirs."""
        cells = tuple(self.table.cells_of(seq_id))
        self._shared.pop(seq_id, None)
        self._waiting.pop(seq_id, None)
        if cells:
            self.seq_rm(seq_id)
            self._record(CellsFreed, seq_id, cells)

    def describe(self, seq_id: str) -> SequenceMemory:
        """Its cells by position, which are its slots."""
        cells = tuple(self.table.cells_of(seq_id))
        return SequenceMemory(cells, () if seq_id in self._waiting else cells)

    def check_integrity(self) -> None:
        """The table's, and that forks hold the cells that they share."""
        self.table.check_integrity()
        for fork, num_tokens in self._shared.items():
            num_cells = len(self.table.cells_of(fork))
            assert num_cells >= num_tokens, (
                f"{fork} shares {num_tokens} tokens, has {num_cells} cells"
            )
        assert self._waiting.keys() <= self._shared.keys(), f"{list(self._waiting)} wait"

    # ---- what else the table can do, and what that does to K and V

    def seq_rm(self, seq_id: SeqId, p0: int = 0, p1: int = -1) -> list[int]:
        """As CellTable.seq_rm; K and V stay where they are, and are never read."""
        return self.table.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: SeqId, dst: SeqId, p0: int = 0, p1: int = -1) -> list[int]:
        """As CellTable.seq_cp; no K or V is copied."""
        return self.table.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: SeqId) -> list[int]:
        return self.table.seq_keep(seq_id)

    def seq_add(self, seq_id: SeqId, p0: int, p1: int, delta: int) -> list[int]:
        """As CellTable.seq_add; the keys are turned before the next forward, in every layer."""
        return self.table.seq_add(seq_id, p0, p1, delta)

    def seq_unshare(self, seq_id: SeqId, p0: int = 0, p1: int = -1) -> list[tuple[int, int]]:
        """As CellTable.seq_unshare, and K and V copied to the new cells, in every layer."""
        pairs = self.table.seq_unshare(seq_id, p0, p1)
        if pairs:
            old, new = torch.tensor(pairs, device=self.storage.device).unbind(1)
            for layer in range(self.storage.spec.num_layers):
                self.storage.write_slots(layer, new, *self.storage.read_slots(layer, old))
        return pairs

    @torch.no_grad()
    def apply_shifts(self) -> int:
        """K-shift: turn every key that lags by its shift, in every layer → how many cells.

        R(p + d) = R(d) R(p), so the key of position p becomes that of p + d. V has no position.
        """
        shifts = self.table.take_shifts()
        if not shifts:
            return 0
        device = self.storage.device
        cells = torch.tensor(list(shifts), device=device)
        angles = self.rope(torch.tensor(list(shifts.values()), device=device))
        for k in self.storage.k:
            keys = k if self.storage.slots_first else k.transpose(0, 1)
            keys[cells] = apply_rope(keys[cells], *angles)  # [n, H_kv, D]
        return len(shifts)

    # ---- inside

    def _record(self, kind: type[Event], *values: object) -> None:
        if self.trace is not None:
            self.trace.record(kind, *values)
