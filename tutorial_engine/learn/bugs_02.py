"""Introduced in notebook 02. The bug zoo of the cache: real one-line bugs in where and when.

Each one runs without an error, and most leave the first new token right: see bugs.planted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.learn.bugs import Zoo
from tutorial_engine.model import attention
from tutorial_engine.model.batch import Allocation, Batch

_right_allocate = StaticKVCache.allocate
_right_batch = Batch.from_allocations
_right_update = KVStorage.update


def _one_position_late(
    cls: type[Batch],
    sequences: Sequence[Sequence[int]],
    allocations: Sequence[Allocation],
    seq_ids: Sequence[str],
    device: torch.device | str = "cpu",
) -> Batch:
    batch = _right_batch(sequences, allocations, seq_ids, device)
    pairs = zip(batch.query_lens, allocations, strict=True)
    late = [int(one.first_position > 0) for n, one in pairs for _ in range(n)]
    return replace(batch, positions=batch.positions + torch.tensor(late, device=device))


def _one_slot_early(
    self: StaticKVCache, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
) -> Allocation | None:
    room = _right_allocate(self, seq_id, token_ids, num_computed, num_new)
    if room is None or room.first_position == 0:
        return room
    return room._replace(new_slots=[slot - 1 for slot in room.new_slots])


def _reads_the_next_slot(
    self: KVStorage, layer: int, k: Tensor, v: Tensor, batch: Batch
) -> Iterator[tuple[Tensor, Tensor]]:
    if batch.num_tokens > batch.num_seqs:  # a prefill, which is right
        return _right_update(self, layer, k, v, batch)
    longer = [
        slice(slots.start, min(slots.stop + 1, self.num_slots))
        for slots in batch.context_slots
        if isinstance(slots, slice)
    ]
    return _right_update(self, layer, k, v, replace(batch, context_slots=tuple(longer)))


def _is_causal(q: Tensor, k: Tensor, v: Tensor, block: int | None = None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
        0, 1
    )


BUGS_02: Zoo = {
    "decode starts one position late": (Batch, "from_allocations", classmethod(_one_position_late)),
    "K and V written one slot early": (StaticKVCache, "allocate", _one_slot_early),
    "one slot read too many": (KVStorage, "update", _reads_the_next_slot),
    "a chunk masked from the upper left": (attention, "blocked_attention", _is_causal),
}
