"""Introduced in notebook 04. Paged attention: K and V are read in their blocks, and never gathered.

Attention over a block needs only that block, if the softmax is kept as three sums that the next
block corrects: m, l and acc. The naive function is a loop over the block table; the fast backend
reads many blocks at a time. Knows queries, pools and block tables; knows no model, no request and
no queue. Sources: the running softmax, Milakov & Gimelshein 2018; block by block, FlashAttention,
Dao et al. 2022; through a block table, PagedAttention, Kwon et al. 2023.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.model.attention import fast_attention
from tutorial_engine.model.batch import Batch

# (q [q, H, D], k_pool, v_pool [blocks, H_kv, block_size, ·], block table, kv_len) → [q, H, D_v]
AttendInBlocks = Callable[[Tensor, Tensor, Tensor, Sequence[int], int], Tensor]

QUERY_TILE = 64  # queries that meet a run of blocks together
LONG_RUN = 8  # neighbouring blocks that are worth a matmul of their own
LOWEST = torch.finfo(torch.float32).min  # a score that counts for nothing; −∞ − (−∞) would be NaN


def attend_in_blocks(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Sequence[int], kv_len: int
) -> Tensor:
    """Causal attention of a sequence's last queries q [q, H, D] to its kv_len tokens → [q, H, D_v].

    k_pool [blocks, H_kv, block_size, D] and v_pool [blocks, H_kv, block_size, D_v] are one layer of
    the pool; block_table names the sequence's blocks, by position. Each query has a running softmax
    over the blocks so far: m, its largest score; l = Σ exp(score − m); acc = Σ exp(score − m) · v.
    """
    (q_len, heads, _), (_, kv_heads, block_size, _) = q.shape, k_pool.shape
    q = _by_kv_head(q, kv_heads)  # [H_kv, group · q, D], divided by √D
    q_pos = torch.arange(kv_len - q_len, kv_len, device=q.device).repeat(heads // kv_heads)
    m = torch.full((*q.shape[:2], 1), -math.inf, device=q.device)
    l = acc = torch.zeros_like(m)
    for i, start in enumerate(range(0, kv_len, block_size)):
        n = min(block_size, kv_len - start)  # what lies behind was never written
        k, v = k_pool[block_table[i], :, :n], v_pool[block_table[i], :, :n]  # views [H_kv, n, ·]
        scores = torch.bmm(q, k.transpose(1, 2)).float()  # [H_kv, group · q, n]
        k_pos = torch.arange(start, start + n, device=q.device)
        scores = scores.masked_fill(k_pos > q_pos[:, None], -math.inf)
        new_m = torch.maximum(m, scores.amax(-1, keepdim=True))
        p, correction = torch.exp(scores - new_m), torch.exp(m - new_m)
        l = l * correction + p.sum(-1, keepdim=True)
        acc = acc * correction + torch.bmm(p.to(v.dtype), v)
        m = new_m
    return _by_token(acc / l, q_len).to(v_pool.dtype)


class NaivePagedAttention:
    """An AttentionBackend over the pages of a memory: `attend` reads each sequence's blocks.

    `attend_in_blocks`, unless another function with these parameters is given. `memory` must be the
    one that the requests are in.
    """

    def __init__(self, memory: PagedKVCache, attend: AttendInBlocks = attend_in_blocks) -> None:
        self.memory, self.attend_one = memory, attend
        self._pools = list(zip(*memory.pages(), strict=True))  # a layer's K and V, as views

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As AttentionBackend.attend. ValueError for a batch of another memory."""
        tables = tables_of(self.memory, batch)
        write_new(self.memory, layer, k, v, batch)
        each = zip(q.split(batch.query_lens), tables, batch.context_lens, strict=True)
        return torch.cat([self.attend_one(q_s, *self._pools[layer], *own) for q_s, *own in each])


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


def write_new(memory: PagedKVCache, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
    """Put the new K and V of a batch into their blocks. ValueError for a batch without slots."""
    if batch.slot_mapping is None:
        raise ValueError("this batch has no slots: get it from Batch.from_allocations")
    memory.storage.write(layer, batch.slot_mapping, k, v)


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """q [q, H, D] / √D → [H_kv, group · q, D]: the heads of a group are rows of one matmul."""
    q = q / math.sqrt(q.shape[-1])
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(x: Tensor, q_len: int) -> Tensor:
    """[H_kv, group · q, D_v] → [q, H, D_v]."""
    return x.unflatten(1, (-1, q_len)).permute(2, 0, 1, 3).flatten(1, 2)


# -- many blocks at a time ------------------------------------------------------------------------


class Sums(NamedTuple):
    """A softmax over some of the keys, not divided yet: m and l [..., 1], acc [..., D_v], fp32."""

    m: Tensor
    l: Tensor
    acc: Tensor

    @classmethod
    def of(cls, scores: Tensor, v: Tensor) -> "Sums":
        """The sums over n keys: scores [B, rows, n] fp32, v [B, n, D_v]."""
        m = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - m)
        return cls(m, p.sum(-1, keepdim=True), torch.bmm(p.to(v.dtype), v).float())

    def merge(self, other: "Sums") -> "Sums":
        """The sums over the keys of both; which of them comes first makes no difference."""
        m = torch.maximum(self.m, other.m)
        a, b = torch.exp(self.m - m), torch.exp(other.m - m)
        return Sums(m, self.l * a + other.l * b, self.acc * a + other.acc * b)


class Run(NamedTuple):
    """Neighbouring blocks: table entries index .. index + length − 1 are block, block + 1, ..."""

    index: int
    block: int
    length: int


class Scattered(NamedTuple):
    """Blocks without neighbours, of all sequences that decode: read at once, where they are.

    `blocks` is the part of the pool that they are in; `reader` [n] says which query each block of
    this part gets (the first where nobody asks). `own` [S, most] are the blocks of each sequence,
    counted from the start of the part; `missing` [S, most] is True where it has no more.
    """

    blocks: slice
    reader: Tensor
    own: Tensor
    missing: Tensor


class Plan(NamedTuple):
    """How the contexts of a batch are read, the same in every layer.

    `runs` of each sequence are read one by one; `scattered` blocks, those of the sequences `asking`
    and not in their runs, all together.
    """

    runs: list[list[Run]]
    asking: dict[int, int]  # sequence -> its row in scattered.own
    scattered: Scattered | None


class PagedAttention:
    """The same, many blocks at a time. No K or V is copied here either: all that is read are views.

    Neighbouring blocks are one view. Where blocks lie alone, the pool is a batch of matrices as it
    stands: the queries of all sequences that decode are sent to their blocks, and the sums come
    back. A context in one piece needs none of this and goes to `fast_attention`.
    """

    def __init__(self, memory: PagedKVCache) -> None:
        self.memory, self._pools = memory, list(zip(*memory.pages(), strict=True))
        self._one_piece = fast_attention(memory.storage.device)
        self._planned: tuple[Batch, Plan] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As AttentionBackend.attend. ValueError for a batch of another memory."""
        if self._planned is None or self._planned[0] is not batch:  # one plan for all layers
            self._planned = batch, plan_reading(self.memory, batch)
        plan = self._planned[1]
        write_new(self.memory, layer, k, v, batch)
        queries, outs = q.split(batch.query_lens), []
        if plan.scattered is not None:
            asking = torch.stack([_by_kv_head(queries[s], k.shape[1]) for s in plan.asking])
            answers = ask_scattered(asking, *self._pools[layer], plan.scattered)
        for s, (q_s, kv_len) in enumerate(zip(queries, batch.context_lens, strict=True)):
            views = [self._read(layer, run, kv_len) for run in plan.runs[s]]
            if s in plan.asking:
                begun = Sums(*(x[plan.asking[s]] for x in answers))
                outs.append(attend_to_views(q_s, views, kv_len, begun))
            elif len(views) == 1:
                outs.append(self._one_piece.one_sequence(q_s, *views[0][1:]))
            else:
                outs.append(attend_to_views(q_s, views, kv_len))
        return torch.cat(outs)

    def _read(self, layer: int, run: Run, kv_len: int) -> tuple[int, Tensor, Tensor]:
        """The position of a run's first token, and views of its K and V: [n, H_kv, ·]."""
        size = self.memory.block_size
        position, slot = run.index * size, run.block * size
        n = min(run.length * size, kv_len - position)  # what lies behind was never written
        return position, *self.memory.storage.read(layer, slice(slot, slot + n))


def plan_reading(memory: PagedKVCache, batch: Batch) -> Plan:
    """Which blocks of a batch are read in runs, and which all at once. ValueError as `tables_of`.

    At once: blocks of sequences that decode, in runs of fewer than LONG_RUN, read by nobody else in
    this batch; not a sequence's last block, which may be half empty. And only if they fill half of
    the part of the pool that they are in: the other half is computed for nobody.
    """
    num_blocks = map(memory.blocks.num_blocks_for, batch.context_lens)
    tables = [table[:n] for table, n in zip(tables_of(memory, batch), num_blocks, strict=True)]
    readers = Counter(block for table in tables for block in table)
    own: dict[int, list[int]] = {}  # sequence -> its scattered blocks
    for s, table in enumerate(tables):
        if batch.query_lens[s] == 1:
            short = [run for run in runs_of(table[:-1]) if run.length < LONG_RUN]
            blocks = [block for run in short for block in range(run.block, run.block + run.length)]
            own |= {s: mine} if (mine := [b for b in blocks if readers[b] == 1]) else {}
    scattered = [block for blocks in own.values() for block in blocks]
    if not own or 2 * len(scattered) < max(scattered) + 1 - min(scattered):
        return Plan([runs_of(table) for table in tables], {}, None)
    runs = [runs_of(table, leave_out=own.get(s, ())) for s, table in enumerate(tables)]
    rows = {s: row for row, s in enumerate(own)}
    return Plan(runs, rows, _scattered(list(own.values()), batch.input_ids.device))


def runs_of(table: Sequence[int], leave_out: Collection[int] = ()) -> list[Run]:
    """A block table as runs of neighbouring blocks, in order; some blocks are left out."""
    runs: list[Run] = []
    left_out = set(leave_out)
    for index, block in enumerate(table):
        if block in left_out:
            continue
        if runs:
            first, start, length = runs[-1]
            if (index, block) == (first + length, start + length):
                runs[-1] = Run(first, start, length + 1)
                continue
        runs.append(Run(index, block, 1))
    return runs


def _scattered(own: Sequence[Sequence[int]], device: torch.device) -> Scattered:
    """The blocks of each row as tensors."""
    every = [block for blocks in own for block in blocks]
    low, high, most = min(every), max(every) + 1, max(map(len, own))
    reader = torch.zeros(high - low, dtype=torch.int64)
    table = torch.full((len(own), most), every[0] - low)  # a block that somebody reads
    missing = torch.ones(len(own), most, dtype=torch.bool)
    for row, blocks in enumerate(own):
        table[row, : len(blocks)] = torch.tensor(blocks) - low
        missing[row, : len(blocks)] = False
        reader[table[row, : len(blocks)]] = row
    return Scattered(slice(low, high), *(x.to(device) for x in (reader, table, missing)))


def ask_scattered(q: Tensor, k_pool: Tensor, v_pool: Tensor, scattered: Scattered) -> Sums:
    """Queries q [S, H_kv, group, D] sent to their scattered blocks → sums [S, H_kv, group, ·].

    One matmul for all blocks of a K/V head: that is how they lie in the pool. Every sequence then
    merges the sums of its own; those of blocks that nobody asked about are left where they are.
    """
    k, v = k_pool[scattered.blocks], v_pool[scattered.blocks]  # views [n, H_kv, block_size, ·]
    asked = q[scattered.reader]  # [n, H_kv, group, D]: queries are copied, K and V are not
    heads = [
        Sums.of(torch.bmm(asked[:, h], k[:, h].transpose(1, 2)).float(), v[:, h])
        for h in range(k.shape[1])
    ]
    m, l, acc = (torch.stack(parts, 1)[scattered.own] for parts in zip(*heads, strict=True))
    m = m.masked_fill(scattered.missing[..., None, None, None], LOWEST)  # [S, most, H_kv, group, 1]
    best = m.amax(1, keepdim=True)
    weight = torch.exp(m - best)
    return Sums(best[:, 0], (l * weight).sum(1), (acc * weight).sum(1))


def attend_to_views(
    q: Tensor, views: Sequence[tuple[int, Tensor, Tensor]], kv_len: int, begun: Sums | None = None
) -> Tensor:
    """Causal attention of the last queries q [q, H, D] to kv_len tokens in pieces → [q, H, D_v].

    A piece is the position of its first token, K [n, H_kv, D] and V [n, H_kv, D_v]. `begun` are the
    sums over tokens that are in no piece, which every query may see.
    """
    tiles, end = [], kv_len - len(q)
    for tile in q.split(QUERY_TILE):
        end += len(tile)  # keys that the last query of the tile may see
        tiles.append(_attend_tile(tile, views, end, begun))
    return torch.cat(tiles)


def _attend_tile(
    q: Tensor, views: Sequence[tuple[int, Tensor, Tensor]], end: int, sums: Sums | None
) -> Tensor:
    """As attend_to_views, for the queries at the positions before `end`."""
    rows = _by_kv_head(q, views[0][1].shape[1])  # [H_kv, group · q, D]
    q_pos = torch.arange(end - len(q), end, device=q.device)
    for position, k, v in views:
        n = min(len(k), end - position)
        if n <= 0:
            break
        k, v = k[:n].permute(1, 2, 0), v[:n].transpose(0, 1)  # views [H_kv, D, n], [H_kv, n, D_v]
        scores = torch.bmm(rows, k).float()
        if position + n > end - len(q) + 1:  # the first query must not see all of it
            later = torch.arange(position, position + n, device=q.device) > q_pos[:, None]
            scores.unflatten(1, (-1, len(q))).masked_fill_(later, LOWEST)
        part = Sums.of(scores, v)
        sums = part if sums is None else sums.merge(part)
    assert sums is not None, "a token sees itself at least"
    return _by_token(sums.acc / sums.l, len(q)).to(q.dtype)
