"""Paged attention in fewer calls: many blocks at a time, still in place.

Two facts make that possible. Neighbouring blocks are one view of the pool; and the sums over some
blocks (m, l, acc) can be merged with those over others in any order, so that all blocks of all
sequences can be worked on at once. Knows what `paged_attention` knows. Source of the second:
FlashDecoding, Dao et al. 2023.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import by_kv_head, by_token, tables_of
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.batched_attention import fast_attention

QUERY_TILE = 64  # queries that meet a run of blocks together
LONG_RUN = 8  # neighbouring blocks that are worth a matmul of their own
LOWEST = torch.finfo(torch.float32).min  # a score that counts for nothing; −∞ − (−∞) would be NaN

View = tuple[int, Tensor, Tensor]  # of some tokens: the first one's position, K and V [n, H_kv, ·]


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
    """Neighbouring blocks: the table has block, block + 1, ... from entry `first` on, `length`."""

    first: int
    block: int
    length: int


class Scattered(NamedTuple):
    """Blocks without neighbours, of all sequences that decode: read at once, where they are.

    `blocks` is the part of the pool that they are in; `reader` [n] says which query each block of
    this part gets (the first where nobody asks). `blocks_of` [S, n] are those of each sequence,
    counted from the start of the part; `missing` [S, n] is True where it has no more.
    """

    blocks: slice
    reader: Tensor
    blocks_of: Tensor
    missing: Tensor


class Plan(NamedTuple):
    """How the contexts of a batch are read, the same in every layer.

    `runs` of each sequence are read one by one. The other blocks, those of the sequences `asking`,
    are `scattered`, and read all together.
    """

    runs: list[list[Run]]
    asking: list[int]
    scattered: Scattered | None


class PagedAttention:
    """As NaivePagedAttention, many blocks at a time. All K and V that it reads are views, too.

    A context in one piece goes to `fast_attention`. Of another one, each run of neighbouring blocks
    is a view. Where blocks lie alone, the pool is a batch of matrices as it stands: the queries of
    all sequences that decode are sent to their blocks, and the sums come back. That is fastest with
    heads-first storage, which puts the slots of a head side by side.
    """

    def __init__(self, memory: PagedKVCache) -> None:
        self.memory, self.cache = memory, memory.storage
        self._pools = list(zip(*memory.pages(), strict=True))  # a layer's K and V, as views
        self._one_piece = fast_attention(memory.storage.device)
        self._planned: tuple[Batch, Plan] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As AttentionBackend.attend. ValueError for a batch of another memory."""
        if self._planned is None or self._planned[0] is not batch:  # one plan for all layers
            self._planned = batch, plan_reading(self.memory, batch)
        plan = self._planned[1]
        self.cache.write(layer, k, v, batch)
        outs, lens = list(q.split(batch.query_lens)), batch.context_lens
        views = [
            [self._view(layer, run, kv_len) for run in runs]
            for runs, kv_len in zip(plan.runs, lens, strict=True)
        ]
        if plan.scattered is not None:
            rows = torch.stack([by_kv_head(outs[s], k.shape[1]) for s in plan.asking])
            scattered = ask_scattered(rows, *self._pools[layer], plan.scattered)
            each = enumerate(plan.asking)
            alone = [sum_views(rows[i], views[s], lens[s], 1) for i, s in each]
            sums = scattered.merge(Sums(*map(torch.stack, zip(*alone, strict=True))))
            answers = (sums.acc / sums.l).flatten(1, 2).to(q.dtype)  # [S, H, D_v]
            for s, answer in zip(plan.asking, answers.split(1), strict=True):
                outs[s] = answer
        for s, q_s in enumerate(outs):
            if s not in plan.asking and len(views[s]) == 1:
                outs[s] = self._one_piece.one_sequence(q_s, *views[s][0][1:])
            elif s not in plan.asking:
                outs[s] = attend_to_views(q_s, views[s], lens[s])
        return torch.cat(outs)

    def _view(self, layer: int, run: Run, kv_len: int) -> View:
        """A run of a context of kv_len tokens, without a copy."""
        size = self.memory.block_size
        position, slot = run.first * size, run.block * size
        n = min(run.length * size, kv_len - position)  # the rest of the last block is never read
        return position, *self.memory.storage.read_slots(layer, slice(slot, slot + n))


def plan_reading(memory: PagedKVCache, batch: Batch) -> Plan:
    """Which blocks of a batch are read in runs, and which all at once. ValueError as `tables_of`.

    At once: blocks of sequences that decode, in runs of fewer than LONG_RUN, read by nobody else in
    this batch; not a sequence's last block, which may be half empty. And only if they fill half of
    the part of the pool that they are in: the other half is computed for nobody.
    """
    num_blocks = map(memory.blocks.num_blocks_for, batch.context_lens)
    tables = [table[:n] for table, n in zip(tables_of(memory, batch), num_blocks, strict=True)]
    readers = Counter(block for table in tables for block in table)
    blocks_of: dict[int, list[int]] = {}  # sequence -> its scattered blocks
    for s, table in enumerate(tables):
        if batch.query_lens[s] == 1:
            short = [run for run in runs_of(table[:-1]) if run.length < LONG_RUN]
            blocks = [block for run in short for block in range(run.block, run.block + run.length)]
            if alone := [block for block in blocks if readers[block] == 1]:
                blocks_of[s] = alone
    scattered = [block for blocks in blocks_of.values() for block in blocks]
    if not blocks_of or 2 * len(scattered) < max(scattered) + 1 - min(scattered):
        return Plan([runs_of(table) for table in tables], [], None)
    runs = [runs_of(table, leave_out=blocks_of.get(s, ())) for s, table in enumerate(tables)]
    device = batch.input_ids.device
    return Plan(runs, list(blocks_of), _scattered(list(blocks_of.values()), device))


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


def _scattered(blocks_of: Sequence[Sequence[int]], device: torch.device) -> Scattered:
    """The blocks of each row as tensors."""
    every = [block for blocks in blocks_of for block in blocks]
    low, high, width = min(every), max(every) + 1, max(map(len, blocks_of))
    reader = {block - low: row for row, blocks in enumerate(blocks_of) for block in blocks}
    filler = blocks_of[0][0] - low  # a block that holds numbers, where there is none to name
    table = [[*(block - low for block in row), *[filler] * (width - len(row))] for row in blocks_of]
    missing = [[False] * len(row) + [True] * (width - len(row)) for row in blocks_of]
    tensors = [[reader.get(i, 0) for i in range(high - low)], table, missing]
    return Scattered(slice(low, high), *(torch.tensor(x, device=device) for x in tensors))


def ask_scattered(q: Tensor, k_pool: Tensor, v_pool: Tensor, scattered: Scattered) -> Sums:
    """Queries q [S, H_kv, group, D] sent to their scattered blocks → sums [S, H_kv, group, ·].

    One matmul for all blocks of a K/V head: that is how they lie in the pool. Every sequence then
    merges the sums of its own; those of blocks that nobody asked about are left where they are.
    """
    k, v = k_pool[scattered.blocks], v_pool[scattered.blocks]  # views [n, H_kv, block_size, ·]
    missing, heads = scattered.missing[..., None, None], []
    for h in range(k.shape[1]):
        asked = q[scattered.reader, h]  # [n, group, D]: queries are copied, K and V are not
        part = Sums.of(torch.bmm(asked, k[:, h].transpose(1, 2)).float(), v[:, h])  # [n, group, ·]
        m, l, acc = (x[scattered.blocks_of] for x in part)  # [S, n, group, ·]
        m = m.masked_fill(missing, LOWEST)
        best = m.amax(1, keepdim=True)
        weight = torch.exp(m - best)
        heads.append(Sums(best[:, 0], (l * weight).sum(1), (acc * weight).sum(1)))
    return Sums(*(torch.stack(parts, 1) for parts in zip(*heads, strict=True)))


def attend_to_views(q: Tensor, views: Sequence[View], kv_len: int) -> Tensor:
    """Causal attention of the last queries q [q, H, D] to kv_len tokens in views → [q, H, D_v]."""
    tiles, end = [], kv_len - len(q)
    for tile in q.split(QUERY_TILE):
        end += len(tile)  # keys that the last query of the tile may see
        sums = sum_views(by_kv_head(tile, views[0][1].shape[1]), views, end, len(tile))
        tiles.append(by_token(sums.acc / sums.l, len(tile)).to(q.dtype))
    return torch.cat(tiles)


def sum_views(rows: Tensor, views: Sequence[View], end: int, q_len: int) -> Sums:
    """The sums of the last q_len queries before position `end`, rows [H_kv, group · q, D]."""
    sums: Sums | None = None
    for position, k, v in views:
        n = min(len(k), end - position)
        if n <= 0:
            break
        scores = torch.bmm(rows, k[:n].permute(1, 2, 0)).float()  # [H_kv, group · q, n]
        if position + n > end - q_len + 1:  # the first query must not see all of these
            k_pos = torch.arange(position, position + n, device=k.device)
            q_pos = torch.arange(end - q_len, end, device=k.device)
            scores.unflatten(1, (-1, q_len)).masked_fill_(k_pos > q_pos[:, None], LOWEST)
        part = Sums.of(scores, v[:n].transpose(0, 1))
        sums = part if sums is None else sums.merge(part)
    assert sums is not None, "a token sees itself at least"
    return sums
