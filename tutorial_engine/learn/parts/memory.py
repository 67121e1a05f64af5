"""The learner's slots, eviction and attention in the real memory.

The parts of notebooks 04 and 05 under the signatures of the exercises, and pages and cells beside
which they run. An exercise has plain lists and dicts: what the memory holds is turned into those.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable, SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import attend_in_blocks
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.learn.parts.holder import CannotBe, Parts, whole_numbers
from tutorial_engine.learn.parts.scheduler import slots_for
from tutorial_engine.model.batch import Allocation, Slots

Cells = Sequence[tuple[int | None, set[Any]]]  # (position or None, owners)
HashOf = Callable[[Any, Sequence[int]], Any]  # (hash of the block before or None, tokens) -> hash

# -- the package's own parts, under the names and signatures of the exercises ----------------------


def num_blocks(
    budget_bytes: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    block_size: int,
) -> int:
    """Blocks of block_size tokens that fit into a budget."""
    return budget_bytes // (2 * num_layers * num_kv_heads * head_dim * itemsize * block_size)


def slots(block_table: Sequence[int], block_size: int, num_tokens: int) -> list[int]:
    """The slot of each of the positions 0 .. num_tokens − 1."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(num_tokens)]


def allocate(
    block_table: list[int], free_blocks: list[int], block_size: int, pos: int
) -> int | None:
    """The slot of position pos. The table gets the first free block if pos has none; else None."""
    if pos // block_size == len(block_table):
        if not free_blocks:
            return None
        block_table.append(free_blocks.pop(0))
    return block_table[pos // block_size] * block_size + pos % block_size


def free(
    table: list[int], ref_cnt: dict[int, int], free_queue: list[int], hashes: dict[int, Any]
) -> None:
    """One request gives its table back: ref_cnt and free_queue change in place."""
    for block in table:
        ref_cnt[block] -= 1
    gone = [block for block in reversed(table) if ref_cnt[block] == 0]
    without = [block for block in gone if hashes[block] is None]
    with_hash = [block for block in gone if hashes[block] is not None]
    free_queue[:] = without + free_queue + with_hash


def take(free_queue: list[int], hashes: dict[int, Any], cached: dict[Any, int]) -> int:
    """The next block, which nobody finds by its old hash any more."""
    block = free_queue.pop(0)
    if hashes[block] is not None:
        del cached[hashes[block]]
        hashes[block] = None
    return block


def find(
    token_ids: Sequence[int], block_size: int, hash_of: HashOf, cached: dict[Any, int]
) -> list[int]:
    """The blocks of the longest beginning that is cached, up to the first miss.

    At least one token is left to run. `hash_of(hash of the block before or None, tokens)` → hash.
    """
    found: list[int] = []
    last = None
    for end in range(block_size, len(token_ids), block_size):
        last = hash_of(last, token_ids[end - block_size : end])
        if last not in cached:
            break
        found.append(cached[last])
    return found


def block_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Sequence[int], kv_len: int
) -> Tensor:
    """One query q [D] of one head over kv_len tokens in k_pool, v_pool [blocks, block_size, D].

    Block by block with a running softmax; no key or value is copied → [D].
    """
    block_size = k_pool.shape[1]
    largest, total, out = -math.inf, torch.zeros(()), torch.zeros_like(v_pool[0, 0])
    for start, block in zip(range(0, kv_len, block_size), block_table, strict=False):
        n = min(block_size, kv_len - start)
        scores = k_pool[block, :n] @ q / math.sqrt(len(q))
        new_largest = max(largest, float(scores.max()))
        weights, correction = (scores - new_largest).exp(), math.exp(largest - new_largest)
        total = total * correction + weights.sum()
        out = out * correction + weights @ v_pool[block, :n]
        largest = new_largest
    return out / total


def visible(cells: Cells, seq_id: SeqId, pos: int) -> list[int]:
    """Numbers of the cells that a query of a sequence may attend to."""
    return [i for i, (p, own) in enumerate(cells) if p is not None and seq_id in own and p <= pos]


def in_any_order(answer: object) -> object:
    """Numbers, in a set or a list, by size; anything else as it is."""
    numbers = whole_numbers(list(answer) if isinstance(answer, set | frozenset) else answer)
    return answer if numbers is None else sorted(numbers)


PARTS_04: dict[str, Callable[..., Any]] = {
    "num_blocks": num_blocks,
    "slots": slots,
    "allocate": allocate,
    "block_attention": block_attention,
    "visible": visible,
}
PARTS_05: dict[str, Callable[..., Any]] = {
    "find": find,
    "free": free,
    "take": take,
    "slots_for": slots_for,
}

# -- pages made of parts ---------------------------------------------------------------------------


class OwnBlocks(BlockManager):
    """A BlockManager beside which the parts `find`, `free` and `take` run."""

    parts: Parts

    def find(self, token_ids: Sequence[int]) -> list[bytes]:
        """BlockManager's has hashes where the learner's has blocks."""
        found = super().find(token_ids)
        if self.prefix_caching and not self.parts.is_package("find"):

            def hash_of(parent: bytes | None, tokens: Sequence[int]) -> bytes:
                return self.hash_of(parent, tokens)

            self.parts.shadow("find", list(token_ids), self.block_size, hash_of, self.cached)
        return found

    def _give_back(self, table: Sequence[int]) -> None:
        """Of a sequence that is over; or of a copy-on-write, which loses one block."""
        if not self.parts.is_package("free"):
            counts = {number: block.ref_cnt for number, block in enumerate(self.blocks)}
            given = list(table), counts, list(self.free_queue), self._hashes()
            # it changes lists in place: nobody asks what it returns
            self.parts.shadow("free", *given, changes=(1, 2, 3), read=lambda _: None)
        super()._give_back(table)

    def _claim(self) -> tuple[int, bool]:
        if not self.parts.is_package("take"):
            queue, hashes, cached = list(self.free_queue), self._hashes(), dict(self.cached)
            if (key := hashes[queue[0]]) is not None:
                cached[key] = queue[0]  # of equal blocks the part knows the one that is next
            self.parts.shadow("take", queue, hashes, cached, changes=(0, 1, 2))
        return super()._claim()

    def _hashes(self) -> dict[int, bytes | None]:
        return {number: block.hash for number, block in enumerate(self.blocks)}


class OwnPages(PagedKVCache):
    """A PagedKVCache beside which the parts of its names run. NaN where nobody wrote."""

    def __init__(self, parts: Parts, storage: KVStorage, *given: Any, **options: Any) -> None:
        self.parts = parts
        self.block_manager = type("OwnBlocks", (OwnBlocks,), {"parts": parts})
        super().__init__(storage, *given, **options)
        poison(storage)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """The part `allocate` is asked for each new token."""
        before = len(self.blocks.tables.get(seq_id, []))
        allocation = super().allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is None or self.parts.is_package("allocate"):
            return allocation
        size, first, now = self.block_size, allocation.first_position, self.blocks.tables[seq_id]
        table = now[: max(before, self.blocks.num_blocks_for(first))]  # what it had, and hits
        free_blocks = [*now[len(table) :], *self.blocks.free_queue]
        for pos, slot in enumerate(allocation.new_slots, first):
            want = self.parts.shadow("allocate", table, free_blocks, size, pos, changes=(0, 1))
            assert want == slot, f"position {pos} of {seq_id} has slot {slot}, not {want}"
        return allocation

    def _slots_of(self, blocks: Sequence[int]) -> Slots:
        if not self.parts.is_package("slots"):
            size = self.block_size
            self.parts.shadow("slots", list(blocks), size, len(blocks) * size)
        return super()._slots_of(blocks)


def poison(storage: KVStorage) -> None:
    """NaN in every slot: one that is read before it is written cannot go unnoticed."""
    for tensor in (storage.k, storage.v):
        tensor.fill_(math.nan)


class InBlocks:
    """What NaivePagedAttention asks for a sequence, by the part `block_attention`.

    Query after query and head after head. The pools are the real ones: it may not write to them.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Sequence[int],
        kv_len: int,
    ) -> Tensor:
        parts = self.parts
        if parts.is_package("block_attention"):
            return attend_in_blocks(q, k_pool, v_pool, block_table, kv_len)
        (q_len, heads, _), kv_heads = q.shape, k_pool.shape[1]
        out = q.new_empty(q_len, heads, v_pool.shape[-1])
        before = k_pool._version, v_pool._version
        with parts.blamed("block_attention"):
            for i in range(q_len):
                for head in range(heads):
                    pools = (pool[:, head // (heads // kv_heads)] for pool in (k_pool, v_pool))
                    parts.calls["block_attention"] += 1
                    answer = parts.own["block_attention"](
                        q[i, head].clone(), *pools, list(block_table), kv_len - q_len + i + 1
                    )
                    if not isinstance(answer, Tensor) or answer.shape != out[i, head].shape:
                        shape = list(answer.shape) if isinstance(answer, Tensor) else repr(answer)
                        raise CannotBe(f"gave {shape}, expected [{out.shape[-1]}]")
                    out[i, head] = answer
            if (k_pool._version, v_pool._version) != before:
                raise CannotBe("wrote to the pool: other requests read it too")
        return out


# -- cells made of parts ---------------------------------------------------------------------------


class OwnTable(CellTable):
    """A CellTable beside which the part `visible` says what a query may attend to."""

    parts: Parts

    def visible(self, seq_id: SeqId, pos: int, window: int | None = None) -> list[int]:
        if window is None and not self.parts.is_package("visible"):
            held = map(self.__getitem__, range(self.num_cells))
            cells = [(cell.pos, set(cell.owners)) for cell in held]
            self.parts.shadow("visible", cells, seq_id, pos, read=in_any_order)
        return super().visible(seq_id, pos, window)


class OwnCells(CellKVCache):
    """A CellKVCache that asks its table what new tokens may read. NaN where nobody wrote."""

    def __init__(self, parts: Parts, storage: KVStorage, *given: Any) -> None:
        super().__init__(storage, *given)
        self.table = OwnTable(storage.num_slots)
        self.table.parts = parts
        poison(storage)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        allocation = super().allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is not None:
            last = allocation.first_position + len(allocation.new_slots) - 1
            self.table.visible(seq_id, last)
        return allocation
