"""Blocks: who holds which, which may be shared, which goes next.

Knows block numbers, sequence ids and token ids; knows no tensor, no slot and no model. One block
number is valid in all layers. The rules are vLLM's (v1).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from tutorial_engine.checks import at_least_one
from tutorial_engine.trace.events import (
    BlockCached,
    BlockCopied,
    BlockForgotten,
    BlockFreed,
    BlockShared,
    BlockTaken,
    Event,
    Recorder,
)

# (source block, target block, n): put what the first n tokens of the source left into the target
CopyBlock = Callable[[int, int, int], None]


@dataclass(slots=True)
class Block:
    """Room for block_size tokens: how many tables hold it, and its name in the prefix cache."""

    ref_cnt: int = 0
    hash: bytes | None = None


@dataclass(slots=True)
class Chain:
    """The hashes of a sequence's full blocks. The first `num_written` of these are computed."""

    hashes: list[bytes]
    num_written: int


class BlockManager:
    """Hands out blocks: a table per sequence, reference counts, a queue of free ones, hashes.

    `tables[seq_id][i]` holds the positions i · block_size .. (i + 1) · block_size − 1. A free
    block keeps its hash until it is taken: it may still be found. ValueError for sizes below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        salt: str = "",
        copy: CopyBlock | None = None,
        trace: Recorder | None = None,
    ) -> None:
        at_least_one("num_blocks", num_blocks)
        at_least_one("block_size", block_size)
        if not isinstance(prefix_caching, bool):
            raise ValueError(f"prefix_caching is True or False, got {prefix_caching!r}")
        self.block_size, self.prefix_caching, self.trace = block_size, prefix_caching, trace
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_queue = OrderedDict.fromkeys(range(num_blocks))  # the first one is taken next
        self.tables: dict[str, list[int]] = {}  # seq_id -> block ids, by position
        self.cached: dict[bytes, int] = {}  # hash -> the block that is found
        self._twins: dict[bytes, list[int]] = {}  # hash -> others that hold the same; found later
        self._chains: dict[str, Chain] = {}  # seq_id -> hashes of its full blocks
        self.use_salt(salt)
        self._copy = copy or (lambda source, target, num_tokens: None)

    @property
    def num_blocks(self) -> int:
        """Blocks, free or not."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self.free_queue)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need: none for none, and the last may be open."""
        return -(-num_tokens // self.block_size)

    # ---- what is known already

    def use_salt(self, salt: str) -> None:
        """Every chain of hashes that begins from now on has it: others' blocks are not found.

        For users who must not find out what others asked. A chain begins when its request is
        admitted, not when it is added: change the salt while no request waits or runs.
        """
        if not isinstance(salt, str):
            raise ValueError(f"salt is a text, got {salt!r}")
        self._root = sha256(salt.encode()).digest()

    def hash_of(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """The name of a full block: it stands for these tokens and for all that is before them."""
        return sha256((parent or self._root) + array("q", token_ids).tobytes()).digest()

    def find(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hashes of the longest beginning that is cached, in whole blocks, up to the first miss.

        At least one token is left to run: without one there are no logits.
        """
        chain: list[bytes] = []
        if not self.prefix_caching:
            return chain
        size = self.block_size
        for end in range(size, len(token_ids), size):
            key = self.hash_of(chain[-1] if chain else None, token_ids[end - size : end])
            if key not in self.cached:
                break
            chain.append(key)
        return chain

    # ---- taking and giving back

    def admit(
        self, seq_id: str, token_ids: Sequence[int], num_new: int | None = None
    ) -> int | None:
        """A table, if all of these tokens would fit → how many of them were found, or None.

        It has the blocks of those and of the next num_new tokens; None: of all. Found blocks are
        pinned before new ones are taken: they may be free, and would be first in the queue.
        """
        assert seq_id not in self.tables, f"sequence {seq_id} has a table: extend it, or free it"
        found = self.find(token_ids)
        hits = [self.cached[key] for key in found]
        num_found = len(hits) * self.block_size
        needed = self.num_blocks_for(len(token_ids)) - len(hits)
        if needed + sum(self.blocks[hit].ref_cnt == 0 for hit in hits) > self.num_free:
            return None
        self.tables[seq_id], self._chains[seq_id] = [], Chain(found, len(hits))
        for hit in hits:
            self._share(seq_id, hit)
        end = len(token_ids) if num_new is None else min(num_found + num_new, len(token_ids))
        for _ in range(self.num_blocks_for(end) - len(hits)):
            self._take(seq_id)
        return num_found

    def extend(self, seq_id: str, start: int, end: int) -> bool:
        """Room to write the positions start .. end − 1, in blocks that are the sequence's own.

        False, and nothing changed, when there are too few blocks.
        """
        assert seq_id in self.tables, f"sequence {seq_id} has no table: admit it first"
        self._take_back(seq_id)  # of a plan that was never run
        table = self.tables[seq_id]
        first, num_new = start // self.block_size, self.num_blocks_for(end) - len(table)
        copies = first < len(table) and not self._is_own(table[first])
        if max(num_new, 0) + copies > len(self.free_queue):
            return False
        if copies:
            self._copy_on_write(seq_id, first, start - first * self.block_size)
        for _ in range(num_new):
            self._take(seq_id)
        for block in table[first : self.num_blocks_for(end)]:
            assert self._is_own(block), f"sequence {seq_id} would write to block {block}"
        return True

    def cache_full_blocks(self, seq_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """The step that is being planned computes the first num_tokens: who comes may find them.

        A request of the same step reads them as well: each layer writes before anyone reads. Where
        an equal block is cached already, that one stays the one to be found, until it is taken.
        """
        size, chain = self.block_size, self._chains[seq_id].hashes
        if not self.prefix_caching or num_tokens // size == len(chain):
            return
        for index in range(len(chain), num_tokens // size):
            in_block = token_ids[index * size : (index + 1) * size]
            chain.append(self.hash_of(chain[-1] if chain else None, in_block))
            block = self.tables[seq_id][index]
            if self.cached.setdefault(chain[-1], block) != block:
                self._twins.setdefault(chain[-1], []).append(block)
            self.blocks[block].hash = chain[-1]
            self._record(BlockCached, seq_id, block, chain[-1].hex()[:12])

    def commit(self, seq_id: str, num_tokens: int) -> None:
        """The first num_tokens are computed. If more was promised, nobody finds it any more."""
        assert seq_id in self.tables, f"sequence {seq_id} has no table: admit it first"
        self._chains[seq_id].num_written = num_tokens // self.block_size
        self._take_back(seq_id)

    def _take_back(self, seq_id: str) -> None:
        """Nobody finds those of its blocks that were planned and are not written."""
        chain, table = self._chains[seq_id], self.tables[seq_id]
        while len(chain.hashes) > chain.num_written:
            key = chain.hashes.pop()
            block = table[len(chain.hashes)]
            if self.blocks[block].hash == key:
                self.forget(block)
                self._record(BlockForgotten, seq_id, block)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """The child shares the parent's blocks of the first num_tokens, the open last one as well.

        Whoever of the two writes to that one first gets a copy (`extend`). ValueError for a parent
        without these tokens.
        """
        table = self.tables.get(parent_id, [])
        if self.num_blocks_for(num_tokens) > len(table):
            raise ValueError(
                f"sequence {parent_id} has room for {len(table) * self.block_size} tokens: "
                f"{num_tokens} cannot be shared"
            )
        assert child_id not in self.tables, f"sequence {child_id} has a table: fork into a new one"
        parent = self._chains[parent_id]
        written = min(num_tokens // self.block_size, parent.num_written)
        self.tables[child_id], self._chains[child_id] = [], Chain(parent.hashes[:written], written)
        for block in table[: self.num_blocks_for(num_tokens)]:
            self._share(child_id, block)

    def free(self, seq_id: str) -> None:
        """Give all blocks of a sequence back."""
        if seq_id not in self.tables:
            return
        self._take_back(seq_id)
        table = self.tables.pop(seq_id)
        del self._chains[seq_id]
        self._give_back(table)
        if self.trace is not None:  # one by one, each to its end of the queue
            nameless = [block for block in table if self.blocks[block].hash is None]
            for block in (*nameless, *(block for block in table[::-1] if block not in nameless)):
                self._record(BlockFreed, seq_id, block)

    def reset(self) -> None:
        """Forget what is cached (new weights, say). ValueError while a block is in use."""
        if self.num_free < self.num_blocks:
            raise ValueError(
                f"{self.num_blocks - self.num_free} of {self.num_blocks} blocks are in use, by "
                f"{sorted(self.tables)}: the cache is reset when all requests are over"
            )
        self.cached.clear()
        self._twins.clear()
        self.free_queue = OrderedDict.fromkeys(range(self.num_blocks))
        for block in self.blocks:
            block.hash = None

    # ---- one block

    def forget(self, block: int) -> bool:
        """Nobody finds this block from now on → whether it could be found until now."""
        key, self.blocks[block].hash = self.blocks[block].hash, None
        if key is None:
            return False
        twins = self._twins.pop(key, [])
        if self.cached[key] != block:
            twins.remove(block)
        elif twins:
            self.cached[key] = twins.pop(0)
        else:
            del self.cached[key]
        if twins:
            self._twins[key] = twins
        return True

    def _is_own(self, block: int) -> bool:
        """May its one holder write to it? Not if others read it, or might find it."""
        return self.blocks[block].ref_cnt == 1 and self.blocks[block].hash is None

    def _claim(self) -> tuple[int, bool]:
        """The next free block, for one holder, and whether it was in the prefix cache till now."""
        block, _ = self.free_queue.popitem(last=False)
        self.blocks[block].ref_cnt = 1
        return block, self.forget(block)

    def _take(self, seq_id: str) -> None:
        block, evicted = self._claim()
        self.tables[seq_id].append(block)
        self._record(BlockTaken, seq_id, block, evicted)

    def _share(self, seq_id: str, block: int) -> None:
        self.free_queue.pop(block, None)
        self.blocks[block].ref_cnt += 1
        self.tables[seq_id].append(block)
        self._record(BlockShared, seq_id, block)

    def _copy_on_write(self, seq_id: str, index: int, num_tokens: int) -> None:
        table = self.tables[seq_id]
        source = table[index]
        table[index], evicted = self._claim()
        self._copy(source, table[index], num_tokens)
        self._give_back([source])
        where = range(table[index] * self.block_size, table[index] * self.block_size + num_tokens)
        self._record(BlockCopied, seq_id, source, table[index], tuple(where), evicted)

    def _give_back(self, table: Sequence[int]) -> None:
        """These blocks lose a holder. Who has none is free: first the nameless are taken again.

        In both parts the tail goes before its head, which more of those who come can use.
        """
        for block in table:
            self.blocks[block].ref_cnt -= 1
        gone = [block for block in reversed(table) if self.blocks[block].ref_cnt == 0]
        nameless = [block for block in gone if self.blocks[block].hash is None]
        named = [block for block in gone if self.blocks[block].hash is not None]
        self.free_queue.update(dict.fromkeys(nameless + named))
        for block in reversed(nameless):
            self.free_queue.move_to_end(block, last=False)

    def _record(self, kind: type[Event], *values: object) -> None:
        if self.trace is not None:
            self.trace.record(kind, *values)

    def check_integrity(self) -> None:
        """AssertionError if tables, reference counts, free queue and hashes do not agree."""
        held = Counter(block for table in self.tables.values() for block in table)
        assert self.tables.keys() == self._chains.keys(), "a table has no chain, or has two"
        for number, block in enumerate(self.blocks):
            assert block.ref_cnt == held[number], (
                f"block {number} counts {block.ref_cnt} holders, {held[number]} tables have it"
            )
            free = number in self.free_queue
            assert free == (block.ref_cnt == 0), f"block {number}: free {free}, {block.ref_cnt}"
            if block.hash is not None:
                equal = [self.cached.get(block.hash), *self._twins.get(block.hash, [])]
                assert equal.count(number) == 1, f"block {number} cannot be found"
        both = self.free_queue.keys() | held.keys()
        assert both == set(range(self.num_blocks)), f"free and held blocks are {sorted(both)}"
        for key, number in self.cached.items():
            for same in (number, *self._twins.get(key, [])):
                assert self.blocks[same].hash == key, f"block {same} is found under another hash"
        assert self._twins.keys() <= self.cached.keys(), "a block has twins, and cannot be found"
        for name, table in self.tables.items():
            assert len(set(table)) == len(table), f"sequence {name} has a block twice: {table}"
            num_named = len(self._chains[name].hashes)
            assert num_named <= len(table), f"sequence {name}: chain beyond table"
