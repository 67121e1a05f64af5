"""Rows: every sequence has max_len slots of its own, used or not.

The simplest map from positions to slots, and the naive twin that has no slots and concatenates.
Knows no model, and of attention only what it asks a cache for. Shapes: T tokens, H_kv key/value
heads, D head_dim.
"""

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.memory import SequenceMemory
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.trace.events import Recorder, RowFreed, RowTaken, Setting


class StaticKVCache:
    """A KVMemory: slot = row · max_len + position. A row for each sequence, while there are.

    Nothing ever runs out in the middle of a sequence, and nothing is shared.
    """

    def __init__(
        self, storage: KVStorage, num_rows: int, max_len: int, trace: Recorder | None = None
    ) -> None:
        at_least_one("num_rows", num_rows)
        if num_rows * max_len != storage.num_slots:
            raise ValueError(
                f"{num_rows} rows of {max_len} need {num_rows * max_len} slots, the storage has "
                f"{storage.num_slots}"
            )
        self.storage, self.num_rows, self.max_len, self.trace = storage, num_rows, max_len, trace
        self.user: object = None
        self._free = list(reversed(range(num_rows)))  # the last one is taken first
        self._rows: dict[str, int] = {}  # seq_id -> row

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        *,
        max_seqs: int = 1,
        max_len: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        trace: Recorder | None = None,
    ) -> "StaticKVCache":
        """Rows that fit the model: max_seqs of max_len, never longer than it has positions.

        max_len None or 0 is as long as it has. ValueError, with the bytes, when there is no memory.
        """
        at_least_one("max_seqs", max_seqs)
        spec, row_len = KVCacheSpec.from_model(model, dtype), length_for(model, max_len)
        # heads first: a row is a view, and attention over one in bf16 is up to a third faster
        storage = KVStorage(spec, max_seqs * row_len, device, slots_first=False)
        return cls(storage, max_seqs, row_len, trace)

    @property
    def num_bytes(self) -> int:
        """Bytes per token · rows · max_len, used or not."""
        return self.storage.num_bytes

    @property
    def num_free_rows(self) -> int:
        """Rows that are nobody's."""
        return len(self._free)

    @property
    def settings(self) -> Mapping[str, Setting]:
        return {"num_rows": self.num_rows, "row_len": self.max_len}

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        return tuple(self._rows)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """A sequence without a row takes one that is free.

        ValueError, with the numbers, for tokens that no row has room for.
        """
        end = min(num_computed + num_new, len(token_ids))
        if end > self.max_len:
            raise ValueError(
                f"sequence {seq_id} would have {end} tokens, a row has room for {self.max_len}: "
                "make the cache longer (max_len) or the prompt shorter"
            )
        row = self._rows.get(seq_id)
        if row is None:
            if num_computed:
                raise _not_here(seq_id, num_computed)
            if not self._free:
                return None
            row = self._rows[seq_id] = self._free.pop()
            if self.trace is not None:
                self.trace.record(RowTaken, seq_id, row)
        start = row * self.max_len
        return Allocation(
            num_computed, range(start + num_computed, start + end), slice(start, start + end)
        )

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """A row has nothing to note."""

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Rows share nothing."""
        return 0

    def free(self, seq_id: str) -> None:
        """What the slots hold stays there, and is never read."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
            if self.trace is not None:
                self.trace.record(RowFreed, seq_id, row)

    def describe(self, seq_id: str) -> SequenceMemory:
        """Its row, once it has one."""
        row = self._rows.get(seq_id)
        if row is None:
            return SequenceMemory()
        return SequenceMemory((row,), tuple(range(row * self.max_len, (row + 1) * self.max_len)))

    def by_rows(self) -> tuple[Tensor, Tensor]:
        """K and V in the classic five axes, as views: [layers, rows, H_kv, max_len, D]."""
        return self.storage.by_rows(self.num_rows)

    def check_integrity(self) -> None:
        """Every row is free, or exactly one sequence's."""
        taken = sorted(self._rows.values())
        assert sorted([*taken, *self._free]) == list(range(self.num_rows)), (
            f"rows {taken} are taken and {sorted(self._free)} free, of {self.num_rows}"
        )


class GrowingKVCache:
    """The naive twin: every step concatenates, so every step copies all that is there, O(n²) bytes.

    The same protocol without slots or a limit; it holds its tensors itself. K of a layer and
    sequence is [n, H_kv, D].
    """

    max_len = sys.maxsize
    trace: Recorder | None = None
    settings: Mapping[str, Setting] = {}

    def __init__(self) -> None:
        self._kv: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # (layer, seq_id) -> (k, v)
        self.user: object = None
        self.bytes_copied = 0

    @property
    def storage(self) -> "GrowingKVCache":
        """What attention asks for keys and values: itself."""
        return self

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        return tuple(dict.fromkeys(seq_id for _, seq_id in self._kv))

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation:
        """The slots are mere positions."""
        if num_computed and (0, seq_id) not in self._kv:
            raise _not_here(seq_id, num_computed)
        end = min(num_computed + num_new, len(token_ids))
        return Allocation(num_computed, range(num_computed, end), slice(0, end))

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Old and new joined by `torch.cat`, for each sequence."""
        new = zip(k.split(batch.query_lens), v.split(batch.query_lens), strict=True)
        for seq_id, length, (new_k, new_v) in zip(
            batch.seq_ids, batch.context_lens, new, strict=True
        ):
            if num_old := length - len(new_k):
                old_k, old_v = self._kv[layer, seq_id]  # a forward that failed may have left more
                new_k = torch.cat((old_k[:num_old], new_k))
                new_v = torch.cat((old_v[:num_old], new_v))
            self._kv[layer, seq_id] = (new_k, new_v)
            self.bytes_copied += new_k.nbytes + new_v.nbytes

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        """What write has joined."""
        return self._kv[layer, batch.seq_ids[s]]

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Nothing to note."""

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Nothing is shared."""
        return 0

    def free(self, seq_id: str) -> None:
        """Here the memory is given back, too."""
        self._kv = {key: kv for key, kv in self._kv.items() if key[1] != seq_id}

    def describe(self, seq_id: str) -> SequenceMemory:
        """No table, and mere positions."""
        kv = self._kv.get((0, seq_id))
        return SequenceMemory(slots=tuple(range(0 if kv is None else len(kv[0]))))

    def check_integrity(self) -> None:
        """K and V of a sequence are equally long."""
        for (layer, seq_id), (k, v) in self._kv.items():
            assert len(k) == len(v), f"layer {layer} of {seq_id}: {len(k)} keys, {len(v)} values"

    def stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as [sequences, H_kv, n, D]; ValueError when lengths differ."""
        pairs = [kv for (of, _), kv in self._kv.items() if of == layer]
        if len({len(k) for k, _ in pairs}) != 1:
            raise ValueError(f"sequences of {[len(k) for k, _ in pairs]} tokens cannot be stacked")
        k, v = (torch.stack(parts).transpose(1, 2) for parts in zip(*pairs, strict=True))
        return k, v


def _not_here(seq_id: str, num_computed: int) -> ValueError:
    return ValueError(
        f"sequence {seq_id} says that {num_computed} of its tokens are computed, and holds nothing "
        "here: set num_computed_tokens to 0, and they are run again"
    )
