"""Introduced in notebook 04. Cells as answer to the scheduler's question: any token, any cell.

Which cells a request holds, and how many of them are written; knows requests, no queue, no model.
With a cell per token nothing is reserved beyond the tokens there are, and nothing must be in a row.
The table is in `cell_table`, what it does to tensors in `cell_cache`.
"""

from itertools import count

import torch

from tutorial_engine.cell_cache import CellSequences
from tutorial_engine.cell_table import Cell, CellTable
from tutorial_engine.config import ModelConfig
from tutorial_engine.kv_cache import Allocation
from tutorial_engine.kv_storage import KVStorage
from tutorial_engine.request import Request
from tutorial_engine.rope import RotaryEmbedding
from tutorial_engine.trace import CellsFreed, CellsTaken, Recorder, Setting

__all__ = ["Cell", "CellKVCache", "CellSequences", "CellTable"]


class CellKVCache:
    """The engine's memory as cells: a KVCacheManager. Each running request is a sequence.

    A request is let in only if all its tokens fit, and holds their cells from then on: so nobody
    who comes later can take what its next chunk needs. `sequences` is the same memory by hand.
    """

    def __init__(
        self, storage: KVStorage, rope: RotaryEmbedding, trace: Recorder | None = None
    ) -> None:
        self.trace = trace
        self.sequences = CellSequences(storage, rope)
        self._seq_ids: dict[str, int] = {}  # request_id -> its sequence
        self._stored: dict[str, int] = {}  # request_id -> tokens whose K and V are written

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
        trace: Recorder | None = None,
    ) -> "CellKVCache":
        """As CellSequences.from_config."""
        sequences = CellSequences.from_config(
            model, num_cells, dtype=dtype, device=device, tp_size=tp_size, slots_first=slots_first
        )
        return cls(sequences.storage, sequences.rope, trace)

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of these cells."""
        return {"num_cells": self.table.num_cells}

    @property
    def storage(self) -> KVStorage:
        """As KVCacheManager.storage."""
        return self.sequences.storage

    @property
    def table(self) -> CellTable:
        """Who holds which cell."""
        return self.sequences.table

    @property
    def max_len(self) -> int:
        """As KVCacheManager.max_len: all cells."""
        return self.table.num_cells

    def allocate(self, request: Request, max_new_tokens: int) -> Allocation | None:
        """As KVCacheManager.allocate: cells for what has none yet, wherever they are empty."""
        key, table = request.request_id, self.table
        seq_id = self._seq_ids.get(key)
        first = self._stored.get(key, 0)
        end = first + max_new_tokens
        held = 0 if seq_id is None else len(table.cells_of(seq_id))
        wanted = request.num_tokens if seq_id is None else end
        if wanted > held:
            new = table.find_slot(wanted - held)
            if new is None:
                return None
            if seq_id is None:
                seq_id = self._seq_ids[key] = next(s for s in count() if not table.cells_of(s))
                self._stored[key] = 0
            table.place(new, seq_id, range(held, wanted))
            if self.trace is not None:
                self.trace.record(CellsTaken, key, held, tuple(new))
        assert seq_id is not None, "a request without tokens"
        if table.has_shifts:
            self.sequences.apply_shifts()
        return Allocation(
            first, table.cells_of(seq_id)[first:end], self.sequences.slots(seq_id, end)
        )

    def commit(self, request: Request, num_tokens: int) -> None:
        """As KVCacheManager.commit."""
        self._stored[request.request_id] += num_tokens

    def free(self, request: Request) -> None:
        """As KVCacheManager.free."""
        seq_id = self._seq_ids.pop(request.request_id, None)
        if seq_id is not None:
            del self._stored[request.request_id]
            cells = tuple(self.table.cells_of(seq_id))
            self.sequences.reset(seq_id)
            if self.trace is not None:
                self.trace.record(CellsFreed, request.request_id, cells)

    def slots_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.slots_of."""
        return self.table_of(request)[: self._stored.get(request.request_id, 0)]

    def table_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.table_of: its cells by position, written or held for its prompt."""
        seq_id = self._seq_ids.get(request.request_id)
        return () if seq_id is None else tuple(self.table.cells_of(seq_id))

    def check_integrity(self) -> None:
        """As KVCacheManager.check_integrity: every cell is free, or holds a running request's."""
        self.sequences.check_integrity()
        seq_ids = tuple(sorted(self._seq_ids.values()))
        assert self.table.seq_ids == seq_ids, (
            f"sequences {self.table.seq_ids} have cells, {seq_ids} are requests'"
        )
        for key, seq_id in self._seq_ids.items():
            positions = [self.table[cell].pos for cell in self.table.cells_of(seq_id)]
            assert positions == list(range(len(positions))), f"{key} has positions {positions}"
            assert self._stored[key] <= len(positions), (
                f"{key} has {len(positions)} cells and {self._stored[key]} tokens stored"
            )
