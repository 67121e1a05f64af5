"""Introduced in notebook 02. The bug zoo of the cache: real one-line bugs around an address book.

Each one runs without an error, and most leave the first new token right: see bugs.planted.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.cache import rows as kv_cache
from tutorial_engine.learn.bugs import Zoo
from tutorial_engine.model import blocked_attention
from tutorial_engine.model.batch import Batch

_right_allocate = kv_cache.StaticKVCache.allocate


def _one_position_late(
    self: kv_cache.StaticKVCache, seq_id: int, num_tokens: int
) -> kv_cache.Allocation:
    room = _right_allocate(self, seq_id, num_tokens)
    start = room.first_position
    return room._replace(first_position=start + 1 if start else 0)


def _one_slot_early(
    self: kv_cache.StaticKVCache, seq_id: int, num_tokens: int
) -> kv_cache.Allocation:
    room = _right_allocate(self, seq_id, num_tokens)
    back = 1 if room.first_position else 0
    return room._replace(new_slots=[slot - back for slot in room.new_slots])


def _reads_the_next_slot(
    self: kv_cache.StaticKVCache, layer: int, k: Tensor, v: Tensor, batch: Batch
) -> Sequence[tuple[Tensor, Tensor]]:
    if batch.num_tokens > batch.num_seqs:  # a prefill, which is right
        return self.storage.update(layer, k, v, batch)
    longer = [
        slice(slots.start, min(slots.stop + 1, self.storage.num_slots))
        for slots in batch.context_slots
        if isinstance(slots, slice)
    ]
    return self.storage.update(layer, k, v, replace(batch, context_slots=tuple(longer)))


def _is_causal(q: Tensor, k: Tensor, v: Tensor, block: int | None = None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
        0, 1
    )


BUGS_02: Zoo = {
    "decode starts one position late": (kv_cache.StaticKVCache, "allocate", _one_position_late),
    "K and V written one slot early": (kv_cache.StaticKVCache, "allocate", _one_slot_early),
    "one slot read too many": (kv_cache.StaticKVCache, "update", _reads_the_next_slot),
    "a chunk masked from the upper left": (blocked_attention, "blocked_attention", _is_causal),
}
