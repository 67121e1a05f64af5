"""The learner's slots, eviction and attention in the real memory.

The parts of notebooks 04 and 05 under the signatures of the exercises, and pages and cells that ask
them.
An exercise has plain lists and dicts: what the memory holds is turned into those, and back.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable, SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import attend_in_blocks
from tutorial_engine.cache.storage import KVStorage, as_slots
from tutorial_engine.learn.own_scheduler import slots_for
from tutorial_engine.learn.parts import CannotBe, Parts, whole, whole_numbers
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
    """A set of numbers as a list; anything else as it is."""
    return list(answer) if isinstance(answer, set | frozenset) else answer


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
    """A BlockManager that finds, hands out and takes back blocks by the parts of these names."""

    parts: Parts

    def find(self, token_ids: Sequence[int]) -> list[bytes]:
        """BlockManager's has hashes where the learner's has blocks."""
        if not self.prefix_caching:
            return []
        hashes = super().find(token_ids)
        if self.parts.is_package("find"):
            return hashes
        want = [self.cached[key] for key in hashes]
        tokens, cached = list(token_ids), dict(self.cached)

        def hash_of(parent: bytes | None, tokens: Sequence[int]) -> bytes:
            return self.hash_of(parent, tokens)

        with self.parts.blamed("find"):
            answer = self.parts("find", tokens, self.block_size, hash_of, cached)
            if whole_numbers(answer) != want:
                raise CannotBe(
                    f"gave {answer!r} for {len(token_ids)} tokens in blocks of {self.block_size}: "
                    f"the cache has their beginning in the blocks {want}"
                )
        return hashes

    def _give_back(self, table: Sequence[int]) -> None:
        """Of a sequence that is over; or of a copy-on-write, which loses one block."""
        if self.parts.is_package("free"):
            return super()._give_back(table)
        hashes = {number: block.hash for number, block in enumerate(self.blocks)}
        held = {number: block.ref_cnt for number, block in enumerate(self.blocks)}
        want = {number: count - (number in table) for number, count in held.items()}
        queue = list(self.free_queue)
        with self.parts.blamed("free"):
            self.parts("free", list(table), held, queue, hashes)
            counts = {number: whole(held.get(number, 0)) for number in want}
            free_ones = sorted(number for number, count in want.items() if count == 0)
            if counts != want or sorted(queue) != free_ones:
                raise CannotBe(
                    f"gave {table} back, and left ref_cnt {held} and the free queue {queue}; "
                    f"expected {want}, and in the queue {free_ones} in some order"
                )
        self.free_queue = OrderedDict.fromkeys(map(int, queue))
        for block, count in zip(self.blocks, want.values(), strict=True):
            block.ref_cnt = count

    def _claim(self) -> tuple[int, bool]:
        if self.parts.is_package("take"):
            return super()._claim()
        queue, cached = list(self.free_queue), dict(self.cached)
        hashes = {number: block.hash for number, block in enumerate(self.blocks)}
        with self.parts.blamed("take"):
            answer = self.parts("take", queue, hashes, cached)
            taken, left = whole(answer), list(self.free_queue)
            if taken not in left or queue != [block for block in left if block != taken]:
                raise CannotBe(f"gave {answer!r}, and left the free queue {queue}; it was {left}")
            assert taken is not None, "it was in the queue"
        del self.free_queue[taken]
        key = self.blocks[taken].hash
        if key in self._twins:  # the part knows one block of a hash; the others are the package's
            self.forget(taken)
        else:
            self.cached = cached
            for number, block in enumerate(self.blocks):
                block.hash = hashes.get(number)
        self.blocks[taken].ref_cnt = 1
        return taken, key is not None


class OwnPages(PagedKVCache):
    """A PagedKVCache of the parts. NaN where nobody wrote."""

    def __init__(self, parts: Parts, storage: KVStorage, *given: Any, **options: Any) -> None:
        self.parts = parts
        self.block_manager = type("OwnBlocks", (OwnBlocks,), {"parts": parts})
        super().__init__(storage, *given, **options)
        poison(storage)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """The part `allocate` is asked for each new token, and must give what the manager gave."""
        before = len(self.blocks.tables.get(seq_id, []))
        allocation = super().allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is None or self.parts.is_package("allocate"):
            return allocation
        size, first, now = self.block_size, allocation.first_position, self.blocks.tables[seq_id]
        table = now[: max(before, self.blocks.num_blocks_for(first))]  # what it had, and hits
        free_blocks = [*now[len(table) :], *self.blocks.free_queue]
        for pos, slot in enumerate(allocation.new_slots, first):
            held, free = table.copy(), free_blocks.copy()
            want = allocate(held, free, size, pos)
            assert want == slot, f"position {pos} of {seq_id} has slot {slot}, not {want}"
            with self.parts.blamed("allocate"):
                answer = self.parts("allocate", table, free_blocks, size, pos)
                if whole(answer) != slot or (table, free_blocks) != (held, free):
                    raise CannotBe(
                        f"gave {answer!r} for position {pos}, and left the table {table}: "
                        f"expected slot {slot} and the table {held}"
                    )
        return allocation

    def _slots_of(self, blocks: Sequence[int]) -> Slots:
        if self.parts.is_package("slots"):
            return super()._slots_of(blocks)
        size, table = self.block_size, list(blocks)
        num_tokens, end = len(table) * size, self.storage.num_slots
        with self.parts.blamed("slots"):
            answer = self.parts("slots", table, size, num_tokens)
            slots = whole_numbers(answer) or []
            if len(slots) != num_tokens or not all(0 <= slot < end for slot in slots):
                raise CannotBe(
                    f"gave {answer!r} for the table {list(blocks)} in blocks of {size}: expected "
                    f"{num_tokens} slots of 0 .. {end - 1}"
                )
        return as_slots(slots)


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
    """A CellTable in which the part `visible` says what a query may attend to."""

    parts: Parts

    def visible(self, seq_id: SeqId, pos: int, window: int | None = None) -> list[int]:
        if self.parts.is_package("visible") or window is not None:
            return super().visible(seq_id, pos, window)
        numbers = range(self.num_cells)
        cells = [(cell.pos, set(cell.owners)) for cell in map(self.__getitem__, numbers)]
        with self.parts.blamed("visible"):
            answer = self.parts("visible", cells, seq_id, pos)
            seen = whole_numbers(in_any_order(answer))
            if seen is None or not {*seen} <= {*numbers}:
                raise CannotBe(f"gave {answer!r}: the cells are 0 .. {self.num_cells - 1}")
        return sorted(seen, key=lambda cell: cells[cell][0] or 0)  # as the package reads them


class OwnCells(CellKVCache):
    """A CellKVCache of the parts: what new tokens may read is asked of its table's `visible`.

    NaN where nobody wrote.
    """

    def __init__(self, parts: Parts, storage: KVStorage, *given: Any) -> None:
        super().__init__(storage, *given)
        self.parts, self.table = parts, OwnTable(storage.num_slots)
        self.table.parts = parts
        poison(storage)

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        allocation = super().allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is None:
            return None
        last = allocation.first_position + len(allocation.new_slots) - 1
        seen, there = self.table.visible(seq_id, last), allocation.context_slots
        count = there.stop - there.start if isinstance(there, slice) else len(there)
        if len(seen) != count:
            with self.parts.blamed("visible"):
                raise CannotBe(
                    f"gave {len(seen)} cells for sequence {seq_id} at position {last}, of which "
                    f"{count} tokens are there"
                )
        slots = as_slots(seen)
        on_device = slots if isinstance(slots, slice) else slots.to(self.storage.device)
        return allocation._replace(context_slots=on_device)
