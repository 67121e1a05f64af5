"""Introduced in notebook 02. Keys and values of the past, so that every token is run only once.

A cache is shelves (KVStorage) and an address book. Here are the simplest book, one row of slots per
sequence, and the naive twin that has neither and concatenates. Knows no model, and of attention
only what it asks a cache for. Shapes: T tokens, H_kv key/value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig, KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.attention import KVCache
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.model.config import ModelConfig


class TokenCache(KVCache, Protocol):
    """What `prefill` and `decode` need of a cache, whatever its layout."""

    @property
    def seq_lens(self) -> Sequence[int]:
        """Tokens cached for each sequence."""
        ...

    @property
    def max_len(self) -> int | None:
        """Tokens that a sequence can have at most; None = no limit of its own."""
        ...

    def batch(self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int] | None) -> Batch:
        """The next tokens of these sequences, addressed. Nothing is written."""
        ...

    def commit(self, batch: Batch) -> None:
        """The forward over this batch is done: its tokens count from now on."""
        ...

    def reset(self, seq_id: int | None = None) -> None:
        """Forget one sequence, or all."""
        ...


class StaticKVCache:
    """The simplest address book: row s owns the slots s · max_len .. (s + 1) · max_len − 1.

    It alone owns the lengths. A forward takes `batch(...)` before, `commit(batch)` after: between
    the two, all layers see the same length, and a forward that fails leaves no trace.
    """

    def __init__(self, storage: KVStorage, num_rows: int, max_len: int) -> None:
        at_least_one("num_rows", num_rows)
        if num_rows * max_len != storage.num_slots:
            raise ValueError(
                f"{num_rows} rows of {max_len} need {num_rows * max_len} slots, the storage has "
                f"{storage.num_slots}"
            )
        self.storage, self.num_rows, self.max_len = storage, num_rows, max_len
        self._lens = [0] * num_rows

    @classmethod
    def from_config(cls, model: ModelConfig, config: CacheConfig) -> "StaticKVCache":
        """A cache that fits the model, with the rows, length, dtype and device of the config."""
        spec = KVCacheSpec.from_model(model, config.dtype, config.tp_size)
        max_len = config.length_for(model)
        slots = config.max_seqs * max_len
        storage = KVStorage(spec, slots, config.device, config.slots_first)
        return cls(storage, config.max_seqs, max_len)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens cached in each row."""
        return tuple(self._lens)

    @property
    def num_bytes(self) -> int:
        """Bytes per token · rows · max_len, used or not."""
        return self.storage.num_bytes

    def allocate(self, seq_id: int, num_tokens: int) -> Allocation:
        """Address the next num_tokens of a row. Nothing is written, nothing is reserved.

        ValueError, with the numbers, for a row that is not there or does not have the room.
        """
        self._check_row(seq_id)
        start, end = self._lens[seq_id], self._lens[seq_id] + num_tokens
        if end > self.max_len:
            raise ValueError(
                f"row {seq_id} holds {start} of {self.max_len} tokens; {num_tokens} more do not "
                "fit: make the cache longer (max_len) or the prompt shorter"
            )
        base = seq_id * self.max_len
        return Allocation(start, range(base + start, base + end), slice(base, base + end))

    def batch(
        self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int] | None = None
    ) -> Batch:
        """The next tokens of these sequences (rows 0, 1, ... unless named), ready for a forward."""
        seq_ids = range(len(sequences)) if seq_ids is None else seq_ids
        _once_each(sequences, seq_ids)
        rooms = [self.allocate(s, len(ids)) for s, ids in zip(seq_ids, sequences, strict=True)]
        device = self.storage.k.device
        batch = Batch.from_sequences(sequences, [room.first_position for room in rooms], device)
        new_slots = [slot for room in rooms for slot in room.new_slots]
        return batch.with_slots(
            seq_ids,
            torch.tensor(new_slots, device=device),
            [room.context_slots for room in rooms],
        )

    def update(
        self, layer: int, k: Tensor, v: Tensor, batch: Batch
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """As KVStorage.update: the batch carries all addresses."""
        return self.storage.update(layer, k, v, batch)

    def commit(self, batch: Batch) -> None:
        """The forward is done: its tokens count from now on. Once per forward, not per layer.

        ValueError, and nothing counted, for a batch that does not begin where its rows end.
        """
        for seq_id, num_tokens, slots in zip(
            batch.seq_ids, batch.query_lens, batch.context_slots, strict=True
        ):
            assert isinstance(slots, slice), "rows are slices"
            start = slots.stop - slots.start - num_tokens
            if start != self._lens[seq_id]:
                raise ValueError(
                    f"this batch begins at position {start} of row {seq_id}, which holds "
                    f"{self._lens[seq_id]} tokens: was it committed already?"
                )
        for seq_id, num_tokens in zip(batch.seq_ids, batch.query_lens, strict=True):
            self.advance(seq_id, num_tokens)

    def advance(self, seq_id: int, num_tokens: int) -> None:
        """The next num_tokens of one row are written: they count from now on."""
        self._lens[seq_id] += num_tokens
        assert 0 <= self._lens[seq_id] <= self.max_len, f"row {seq_id} is fuller than full"

    def reset(self, seq_id: int | None = None) -> None:
        """Forget one row, or all. What the slots hold stays there, and is never read."""
        if seq_id is not None:
            self._check_row(seq_id)
        for row in range(self.num_rows) if seq_id is None else (seq_id,):
            self._lens[row] = 0

    def rows(self) -> tuple[Tensor, Tensor]:
        """K and V in the classic five axes, as views: [layers, rows, H_kv, max_len, D]."""
        return self.storage.by_rows(self.num_rows)

    def _check_row(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.num_rows:
            raise ValueError(f"no row {seq_id}: the cache has rows 0 .. {self.num_rows - 1}")

    def check_integrity(self) -> None:
        """AssertionError if a length is impossible."""
        for row, length in enumerate(self._lens):
            assert 0 <= length <= self.max_len, f"row {row} has {length} of {self.max_len} tokens"


class GrowingKVCache:
    """The naive twin: every step concatenates, so every step copies all that is there, O(n²) bytes.

    No slots, no limit, the same interface. K of a layer and sequence is [n, H_kv, D].
    """

    max_len: int | None = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device
        self._lens: dict[int, int] = {}
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (layer, seq_id) -> (k, v)
        self.bytes_copied = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens cached for sequences 0, 1, ..."""
        return tuple(self._lens.get(s, 0) for s in range(max(self._lens, default=-1) + 1))

    def batch(
        self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int] | None = None
    ) -> Batch:
        """As StaticKVCache.batch; without slots, for there are none."""
        ids = tuple(range(len(sequences)) if seq_ids is None else seq_ids)
        _once_each(sequences, ids)
        firsts = [self._lens.get(s, 0) for s in ids]
        return replace(Batch.from_sequences(sequences, firsts, self.device), seq_ids=ids)

    def update(
        self, layer: int, k: Tensor, v: Tensor, batch: Batch
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """As attention.KVCache.update, by `torch.cat`."""
        contexts = []
        lengths = batch.query_lens
        for seq_id, new_k, new_v in zip(
            batch.seq_ids, k.split(lengths), v.split(lengths), strict=True
        ):
            if (layer, seq_id) in self._kv:
                length = self._lens.get(seq_id, 0)  # a forward that failed may have left more
                old_k, old_v = (x[:length] for x in self._kv[layer, seq_id])
                new_k, new_v = torch.cat((old_k, new_k)), torch.cat((old_v, new_v))
            self._kv[layer, seq_id] = (new_k, new_v)
            self.bytes_copied += new_k.nbytes + new_v.nbytes
            contexts.append((new_k, new_v))
        return contexts

    def commit(self, batch: Batch) -> None:
        """As StaticKVCache.commit."""
        for seq_id, num_tokens in zip(batch.seq_ids, batch.query_lens, strict=True):
            self._lens[seq_id] = self._lens.get(seq_id, 0) + num_tokens

    def reset(self, seq_id: int | None = None) -> None:
        """As StaticKVCache.reset; here the memory is given back, too."""
        gone = {s for _, s in self._kv} | self._lens.keys() if seq_id is None else {seq_id}
        self._kv = {key: kv for key, kv in self._kv.items() if key[1] not in gone}
        self._lens = {s: length for s, length in self._lens.items() if s not in gone}

    def stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as [sequences, H_kv, n, D]; ValueError when lengths differ."""
        if len(set(self.seq_lens)) != 1:
            raise ValueError(f"sequences of {self.seq_lens} tokens cannot be stacked")
        pairs = [self._kv[layer, s] for s in range(len(self.seq_lens))]
        k, v = (torch.stack(parts).transpose(1, 2) for parts in zip(*pairs, strict=True))
        return k, v


def _once_each(sequences: Sequence[Sequence[int]], seq_ids: Sequence[int]) -> None:
    if any(isinstance(sequence, int) for sequence in sequences):
        raise ValueError("give a list of token id lists, one per sequence: [[1, 2, 3]]")
    if len(seq_ids) != len(sequences):
        raise ValueError(f"{len(sequences)} sequences but {len(seq_ids)} seq_ids")
    if len(set(seq_ids)) != len(seq_ids):
        raise ValueError(f"each sequence once per batch, got seq_ids {list(seq_ids)}")
