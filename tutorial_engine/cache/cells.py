"""Introduced in notebook 04. Cells as answer to the scheduler's question: any token, any cell.

Which cells a request holds, and how many of them are written; knows requests, no queue, no model.
With a cell per token nothing is reserved beyond the tokens there are, and nothing must be in a row.
The table is in `cell_table`, what it does to tensors in `cell_cache`.
"""

from itertools import count

import torch

from tutorial_engine.cache.cell_cache import CellSequences
from tutorial_engine.cache.cell_table import Cell, CellTable
from tutorial_engine.cache.memory import fork_to_give_up
from tutorial_engine.cache.rows import Allocation
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.request import Request
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.rope import RotaryEmbedding
from tutorial_engine.trace.events import (
    CellsFreed,
    CellsShared,
    CellsTaken,
    Event,
    Recorder,
    Setting,
)

__all__ = ["Cell", "CellKVCache", "CellSequences", "CellTable"]


class CellKVCache:
    """The engine's memory as cells: a KVCacheManager. Each running request is a sequence.

    A request is let in only if all its tokens fit, and holds their cells from then on: so nobody
    who comes later can take what its next chunk needs. A fork owns its parent's cells as well, and
    copies nothing, ever. `sequences` is the same memory by hand.
    """

    def __init__(
        self, storage: KVStorage, rope: RotaryEmbedding, trace: Recorder | None = None
    ) -> None:
        self.trace = trace
        self.sequences = CellSequences(storage, rope)
        self._seq_ids: dict[str, int] = {}  # request_id -> its sequence
        self._stored: dict[str, int] = {}  # request_id -> tokens whose K and V are written
        self._forks: dict[str, None] = {}  # those that wait: not admitted yet, in order of coming

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
        """As KVCacheManager.allocate: cells for what has none yet, wherever they are empty.

        A fork that waits gives way to whoever runs.
        """
        key, table = request.request_id, self.table
        first = self._stored.get(key, 0)
        is_new = key in self._forks or key not in self._seq_ids
        end = min(first + max_new_tokens, request.num_tokens)
        wanted = request.num_tokens if is_new else end
        while (held := len(self.table_of(request))) < wanted:
            new = table.find_slot(wanted - held)
            if new is not None:
                table.place(new, self._seq_id(key), range(held, wanted))
                self._record(CellsTaken, key, held, tuple(new))
                continue
            given_up = fork_to_give_up(key, self._forks, self._seq_ids)
            if given_up is None:
                return None
            self._free(given_up)
            if given_up == key:  # nobody runs
                first, end = 0, min(max_new_tokens, request.num_tokens)
        seq_id = self._seq_ids[key]
        self._forks.pop(key, None)
        if table.has_shifts:
            self.sequences.apply_shifts()
        return Allocation(
            first, table.cells_of(seq_id)[first:end], self.sequences.slots(seq_id, end)
        )

    def commit(self, request: Request, num_tokens: int) -> None:
        """As KVCacheManager.commit."""
        self._stored[request.request_id] += num_tokens

    def fork(self, parent: Request, child: Request) -> int:
        """As KVCacheManager.fork: the child owns the parent's cells, too (seq_cp)."""
        key, shared = (
            child.request_id,
            min(self._stored.get(parent.request_id, 0), child.num_tokens - 1),
        )
        if child.token_ids[:shared] != parent.token_ids[:shared] or key in self._seq_ids:
            raise ValueError(
                f"request {key} does not begin like {parent.request_id}, or has cells: only the "
                "same tokens can be shared, and only from the start"
            )
        if shared:
            cells = self.sequences.seq_cp(
                self._seq_ids[parent.request_id], self._seq_id(key), 0, shared
            )
            self._stored[key], self._forks[key] = shared, None
            self._record(CellsShared, key, tuple(cells))
        return shared

    def free(self, request: Request) -> None:
        """As KVCacheManager.free; a cell that others own stays theirs."""
        self._free(request.request_id)

    def slots_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.slots_of; a fork that waits has nothing of its own yet."""
        if request.request_id in self._forks:
            return ()
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

    # ---- inside

    def _seq_id(self, key: str) -> int:
        """A request's sequence; the first unused number becomes a new one's."""
        if key not in self._seq_ids:
            taken = set(self._seq_ids.values())
            self._seq_ids[key] = next(s for s in count() if s not in taken)
            self._stored[key] = 0
        return self._seq_ids[key]

    def _free(self, key: str) -> None:
        seq_id = self._seq_ids.pop(key, None)
        if seq_id is not None:
            del self._stored[key]
            self._forks.pop(key, None)
            cells = tuple(self.table.cells_of(seq_id))
            self.sequences.reset(seq_id)
            self._record(CellsFreed, key, cells)

    def _record(self, kind: type[Event], *values: object) -> None:
        if self.trace is not None:
            self.trace.record(kind, *values)
