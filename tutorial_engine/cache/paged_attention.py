"""Paged attention: K and V are read in their blocks, and never gathered.

Attention over a block needs only that block, if the softmax is kept as three sums that the next
block corrects: m, l and acc. Here it is a loop over the block table, one block at a time; the same
in fewer calls is in `many_blocks`. Knows queries, pools and block tables; knows no model, no
request and no queue. Sources: the running softmax, Milakov & Gimelshein 2018; block by block,
FlashAttention, Dao et al. 2022; through a block table, PagedAttention, Kwon et al. 2023.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.model.batch import Batch

# (q [q, H, D], k_pool, v_pool [blocks, H_kv, block_size, ·], block table, kv_len) → [q, H, D_v]
AttendInBlocks = Callable[[Tensor, Tensor, Tensor, Sequence[int], int], Tensor]


def attend_in_blocks(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Sequence[int], kv_len: int
) -> Tensor:
    """Causal attention of a sequence's last queries q [q, H, D] to its kv_len tokens → [q, H, D_v].

    k_pool [blocks, H_kv, block_size, D] and v_pool [blocks, H_kv, block_size, D_v] are one layer of
    the pool; block_table names the sequence's blocks, by position. Each query has a running softmax
    over the blocks so far: m, its largest score; l = Σ exp(score − m); acc = Σ exp(score − m) · v.
    """
    (q_len, heads, _), (_, kv_heads, block_size, _) = q.shape, k_pool.shape
    q = by_kv_head(q, kv_heads)  # [H_kv, group · q, D], divided by √D
    q_pos = torch.arange(kv_len - q_len, kv_len, device=q.device).repeat(heads // kv_heads)
    m = torch.full((*q.shape[:2], 1), -math.inf, device=q.device)
    l = acc = torch.zeros_like(m)
    for start, block in zip(range(0, kv_len, block_size), block_table, strict=False):
        n = min(block_size, kv_len - start)  # the rest of the last block is never read
        k, v = k_pool[block, :, :n], v_pool[block, :, :n]  # views [H_kv, n, ·]
        scores = torch.bmm(q, k.transpose(1, 2)).float()  # [H_kv, group · q, n]
        k_pos = torch.arange(start, start + n, device=q.device)
        scores = scores.masked_fill(k_pos > q_pos[:, None], -math.inf)
        new_m = torch.maximum(m, scores.amax(-1, keepdim=True))
        p, correction = torch.exp(scores - new_m), torch.exp(m - new_m)
        l = l * correction + p.sum(-1, keepdim=True)
        acc = acc * correction + torch.bmm(p.to(v.dtype), v)
        m = new_m
    return by_token(acc / l, q_len).to(v_pool.dtype)


class NaivePagedAttention:
    """An AttentionBackend over the pages of a memory: `attend` reads each sequence's blocks.

    `attend_in_blocks`, unless another function with these parameters is given. `memory` must be the
    one that the requests are in.
    """

    def __init__(self, memory: PagedKVCache, attend: AttendInBlocks = attend_in_blocks) -> None:
        self.memory, self.cache, self.attend_one = memory, memory.storage, attend
        self._pools = list(zip(*memory.pages(), strict=True))  # a layer's K and V, as views

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """ValueError for a batch of another memory."""
        tables = tables_of(self.memory, batch)
        self.cache.write(layer, k, v, batch)
        each = zip(q.split(batch.query_lens), tables, batch.context_lens, strict=True)
        pools = self._pools[layer]
        return torch.cat([self.attend_one(q_s, *pools, table, n) for q_s, table, n in each])


def tables_of(memory: PagedKVCache, batch: Batch) -> list[list[int]]:
    """The block table of each sequence of a batch. ValueError for one that has none here."""
    tables = memory.blocks.tables
    for seq_id in batch.seq_ids:
        if seq_id not in tables:
            raise ValueError(
                f"sequence {seq_id} has no blocks in this memory, only {sorted(tables)} have: make "
                "the attention with the memory that the engine has"
            )
    return [tables[seq_id] for seq_id in batch.seq_ids]


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """q [q, H, D] / √D → [H_kv, group · q, D]: the heads of a group are rows of one matmul."""
    q = q / math.sqrt(q.shape[-1])
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def by_token(x: Tensor, q_len: int) -> Tensor:
    """[H_kv, group · q, D_v] → [q, H, D_v]."""
    return x.unflatten(1, (-1, q_len)).permute(2, 0, 1, 3).flatten(1, 2)
