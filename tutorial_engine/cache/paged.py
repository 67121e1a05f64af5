"""Introduced in notebook 04. Pages: slot = block · block_size + offset, by a table per sequence.

Knows blocks, slots and token ids; knows no request, no queue, no budget and no model. The scheduler
asks the same question as of rows, and gets the same kind of answer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import SequenceMemory, fork_to_give_up
from tutorial_engine.cache.storage import KVStorage, SlotNumbers
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Allocation
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.trace.events import Recorder, Setting


def num_blocks_in(memory_bytes: int, spec: KVCacheSpec, block_size: int) -> int:
    """Blocks for a byte budget. A block is block_size tokens in ALL layers: K and V, every head.

    ValueError when there is not even one.
    """
    at_least_one("block_size", block_size)
    needed = spec.bytes_per_token * block_size
    if memory_bytes < needed:
        raise ValueError(
            f"Not enough memory for KV cache: a block of {block_size} tokens in "
            f"{spec.num_layers} layers needs {needed:,} bytes, {memory_bytes:,} are given"
        )
    return memory_bytes // needed


class PagedKVCache:
    """A KVMemory: every sequence has a table of blocks, which grows as it is run.

    A sequence is admitted only if all of its tokens fit now, and then holds their blocks. A running
    one takes a block when a token that is to be RUN does not fit into its last one.
    """

    def __init__(
        self,
        storage: KVStorage,
        block_size: int,
        *,
        max_len: int | None = None,
        prefix_caching: bool = True,
        salt: str = "",
        trace: Recorder | None = None,
    ) -> None:
        at_least_one("block_size", block_size)
        num_blocks, rest = divmod(storage.num_slots, block_size)
        if rest or not num_blocks:
            raise ValueError(f"{storage.num_slots} slots do not make blocks of {block_size}")
        self.storage, self.block_size, self.trace = storage, block_size, trace
        self.user: object = None
        self.max_len = min(storage.num_slots, max_len or storage.num_slots)
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            salt=salt,
            copy=self._copy_block,
            trace=trace,
        )
        self._slots: dict[str, SlotNumbers] = {}  # seq_id -> slots of its blocks, once admitted
        # seq_id -> tokens that were here before it ran: found in the prefix cache, or its parent's.
        # A fork that waits for admission is in here, and not yet in _slots.
        self._num_cached: dict[str, int] = {}

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tp_size: int = 1,
        slots_first: bool = True,
        prefix_caching: bool = True,
        salt: str = "",
        trace: Recorder | None = None,
    ) -> "PagedKVCache":
        """A pool for a model: of num_blocks, or of as many as memory_bytes have room for.

        ValueError, with the numbers, for a budget below one block or beyond this machine's memory.
        """
        spec = KVCacheSpec.from_model(model, dtype, tp_size)
        if num_blocks is None and memory_bytes is not None:
            num_blocks = num_blocks_in(memory_bytes, spec, block_size)
        elif num_blocks is None or memory_bytes is not None:
            raise ValueError(f"give num_blocks or memory_bytes, got {num_blocks}, {memory_bytes}")
        at_least_one("num_blocks", num_blocks)
        at_least_one("block_size", block_size)
        storage = KVStorage(spec, num_blocks * block_size, device, slots_first)
        return cls(
            storage,
            block_size,
            max_len=model.max_position_embeddings,
            prefix_caching=prefix_caching,
            salt=salt,
            trace=trace,
        )

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of this pool."""
        size = {"num_blocks": self.blocks.num_blocks, "block_size": self.block_size}
        return {**size, "prefix_caching": self.blocks.prefix_caching}

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        """As KVMemory.seq_ids."""
        return tuple(self._num_cached)

    def pages(self) -> tuple[Tensor, Tensor]:
        """K and V in the classic five axes, as views: [layers, blocks, H_kv, block_size, D]."""
        return self.storage.by_rows(self.blocks.num_blocks)

    # ---- what a scheduler asks

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """As KVMemory.allocate. A fork that waits gives way to whoever runs.

        ValueError for a sequence with computed tokens that this memory does not hold.
        """
        while (changed := self.reserve(seq_id, token_ids, num_computed, num_new)) is None:
            waiting = [other for other in self._num_cached if other not in self._slots]
            given_up = fork_to_give_up(seq_id, waiting, self._num_cached)
            if given_up is None:
                return None
            self.free(given_up)
        slots, table = self._slots[seq_id], self.blocks.tables[seq_id]
        if changed < len(table):
            slots.replace(changed * self.block_size, self._slots_of(table[changed:]))
        first = max(num_computed, self._num_cached[seq_id])
        end = min(first + num_new, len(token_ids))
        return Allocation(first, slots.slots[first:end], slots.first(end))

    def reserve(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> int | None:
        """Blocks for the next tokens → from which table entry on it is new, or None.

        0 for a newcomer: all of its table is.
        """
        slots, found = self._slots.get(seq_id), self._num_cached.get(seq_id)
        known = (found or 0) if slots is None else len(slots.slots)
        if num_computed > known:
            raise ValueError(
                f"sequence {seq_id} says that {num_computed} of its tokens are computed, here are "
                f"{known} at most: set num_computed_tokens to 0, and they are run again"
            )
        if slots is not None:
            first = max(num_computed, self._num_cached[seq_id])
            return self.blocks.extend(seq_id, first, min(first + num_new, len(token_ids)))
        if found is None:
            found = self.blocks.admit(seq_id, self.tokens_to_admit(token_ids, num_new))
            if found is None:
                return None
            self._num_cached[seq_id] = found
        elif self.blocks.extend(seq_id, found, len(token_ids)) is None:  # a fork that waits
            return None
        self._slots[seq_id] = SlotNumbers([], self.storage.device)
        return 0

    def tokens_to_admit(self, token_ids: Sequence[int], num_new: int) -> Sequence[int]:
        """The tokens that must have room before a sequence is let in: all, or it might thrash.

        A memory of your own may ask for less, down to the num_new of the first step.
        """
        return token_ids

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """As KVMemory.commit; blocks that are full now can be found by others."""
        self.blocks.commit(seq_id, token_ids, num_computed)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """As KVMemory.fork, without a copy; who writes to a shared block first copies it.

        If memory runs out before the child is admitted, it loses what it shares and is computed
        like any other. ValueError for a parent without these tokens, or a child that has blocks.
        """
        if num_tokens:
            self.blocks.fork(parent_id, child_id, num_tokens)
            self._num_cached[child_id] = num_tokens
        return num_tokens

    def free(self, seq_id: str) -> None:
        """As KVMemory.free; what its full blocks hold stays there until they are taken."""
        self.blocks.free(seq_id)
        self._slots.pop(seq_id, None)
        self._num_cached.pop(seq_id, None)

    def describe(self, seq_id: str) -> SequenceMemory:
        """As KVMemory.describe: its blocks, and the slots of them once it is admitted."""
        slots = self._slots[seq_id].slots if seq_id in self._slots else ()
        return SequenceMemory(tuple(self.blocks.tables.get(seq_id, ())), tuple(slots))

    def check_integrity(self) -> None:
        """As KVMemory.check_integrity: the blocks', and that slots are tables'."""
        self.blocks.check_integrity()
        tables = self.blocks.tables
        assert self._num_cached.keys() == tables.keys(), (
            f"{set(self._num_cached)} hold, {set(tables)} have"
        )
        for seq_id, found in self._num_cached.items():
            assert found <= len(tables[seq_id]) * self.block_size, f"{found} tokens of {seq_id}"
        for seq_id, slots in self._slots.items():
            want = self._slots_of(tables[seq_id])
            assert slots.slots == want, f"the slots of {seq_id} are not those of {tables[seq_id]}"
            slots.check_integrity()

    # ---- inside

    def _slots_of(self, blocks: Sequence[int]) -> list[int]:
        size = self.block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def _copy_block(self, source: int, target: int, num_tokens: int) -> None:
        a, b = source * self.block_size, target * self.block_size
        self.storage.copy(slice(a, a + num_tokens), slice(b, b + num_tokens))
