"""Pages: slot = block · block_size + offset, by a table per sequence.

Knows blocks, slots and token ids; knows no request, no queue, no budget and no model. The scheduler
asks the same question as of rows, and gets the same kind of answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import SequenceMemory, fork_to_give_up
from tutorial_engine.cache.storage import KVStorage, as_slots
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Allocation, Slots
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.trace.events import Recorder, Setting


def num_blocks_in(memory_bytes: int, spec: KVCacheSpec, block_size: int) -> int:
    """Blocks for a byte budget. A block is block_size tokens in ALL layers: K and V, every head.

    ValueError when there is not even one.
    """
    at_least_one("block_size", block_size)
    if not isinstance(memory_bytes, int):
        raise ValueError(f"memory_bytes must be a whole number of bytes, got {memory_bytes!r}")
    needed = spec.bytes_per_token * block_size
    if memory_bytes < needed:
        raise ValueError(
            f"Not enough memory for KV cache: a block of {block_size} tokens in "
            f"{spec.num_layers} layers needs {needed:,} bytes, {memory_bytes:,} are given"
        )
    return memory_bytes // needed


@dataclass(slots=True)
class Held:
    """What is kept of a sequence beside its table of blocks.

    `num_cached` tokens were here before it ran: found in the prefix cache, or its parent's. A fork
    waits until it is admitted. `slots` are those of `blocks`, which its table had when it was read.
    """

    num_cached: int
    waits: bool = False
    blocks: list[int] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: slice(0, 0))


class PagedKVCache:
    """A KVMemory: every sequence has a table of blocks, which grows as it is run.

    A sequence is admitted only if all of its tokens fit now. It takes a block when a token that is
    to be RUN does not fit into its last one.
    """

    block_manager: type[BlockManager] = BlockManager  # a subclass may have another one

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
        self.blocks = self.block_manager(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            salt=salt,
            copy=self._copy_block,
            trace=trace,
        )
        self._held: dict[str, Held] = {}  # seq_id -> what is kept of it, oldest first

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
        salt: str = "",
        trace: Recorder | None = None,
    ) -> "PagedKVCache":
        """A pool for a model: of num_blocks, or of as many as memory_bytes have room for.

        ValueError, with the numbers, for a budget below one block or beyond this machine's memory.
        """
        spec = KVCacheSpec.from_model(model, dtype)
        if num_blocks is None and memory_bytes is not None:
            num_blocks = num_blocks_in(memory_bytes, spec, block_size)
        elif num_blocks is None or memory_bytes is not None:
            raise ValueError(f"give num_blocks or memory_bytes, got {num_blocks}, {memory_bytes}")
        at_least_one("num_blocks", num_blocks)
        at_least_one("block_size", block_size)
        storage = KVStorage(spec, num_blocks * block_size, device)
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
        return tuple(self._held)

    def pages(self) -> tuple[Tensor, Tensor]:
        """K and V in the classic five axes, as views: [layers, blocks, H_kv, block_size, D]."""
        return self.storage.by_rows(self.blocks.num_blocks)

    # ---- what a scheduler asks

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """A fork that waits gives way to whoever runs.

        ValueError for a sequence with computed tokens that this memory does not hold.
        """
        while not self.reserve(seq_id, token_ids, num_computed, num_new):
            waiting = [name for name, held in self._held.items() if held.waits]
            given_up = fork_to_give_up(seq_id, waiting, self._held)
            if given_up is None:
                return None
            self.free(given_up)
        first = max(num_computed, self._held[seq_id].num_cached)
        end = min(first + num_new, len(token_ids))
        self.blocks.cache_full_blocks(seq_id, token_ids, end)
        table, size = self.blocks.tables[seq_id], self.block_size
        new_slots = [table[p // size] * size + p % size for p in range(first, end)]
        return Allocation(first, new_slots, self._context(seq_id, end))

    def reserve(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> bool:
        """Blocks for the next tokens, if there are enough."""
        held = self._held.get(seq_id)
        if held is None:
            room = 0
        elif held.waits:
            room = held.num_cached
        else:
            room = len(self.blocks.tables[seq_id]) * self.block_size
        if num_computed > room:
            raise ValueError(
                f"sequence {seq_id} says that {num_computed} of its tokens are computed, here are "
                f"{room} at most: set num_computed_tokens to 0, and they are run again"
            )
        if held is None:
            to_admit = self.tokens_to_admit(token_ids, num_new)
            admitted = self.blocks.admit(seq_id, to_admit, num_new)
            if admitted is not None:
                self._held[seq_id] = Held(admitted)
            return admitted is not None
        first = max(num_computed, held.num_cached)
        end = len(token_ids) if held.waits else min(first + num_new, len(token_ids))
        if not self.blocks.extend(seq_id, first, end):
            return False
        held.waits = False
        return True

    def tokens_to_admit(self, token_ids: Sequence[int], num_new: int) -> Sequence[int]:
        """The tokens that must have room before a sequence is let in: all, or it might thrash.

        A memory of your own may ask for less, down to the num_new of the first step.
        """
        return token_ids

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """What was planned beyond these tokens was not written: nobody finds it."""
        self.blocks.commit(seq_id, num_computed)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Without a copy; who writes to a shared block first copies it.

        If memory runs out before the child is admitted, it loses what it shares and is computed
        like any other. ValueError for a parent without these tokens, or a child that has blocks.
        """
        if num_tokens:
            self.blocks.fork(parent_id, child_id, num_tokens)
            self._held[child_id] = Held(num_tokens, waits=True)
        return num_tokens

    def free(self, seq_id: str) -> None:
        """What its full blocks hold stays there until they are taken."""
        self.blocks.free(seq_id)
        self._held.pop(seq_id, None)

    def describe(self, seq_id: str) -> SequenceMemory:
        """Its blocks, and the slots of them once it is admitted."""
        table, held = self.blocks.tables.get(seq_id, []), self._held.get(seq_id)
        admitted = [] if held is not None and held.waits else table
        size = self.block_size
        slots = (slot for block in admitted for slot in range(block * size, (block + 1) * size))
        return SequenceMemory(tuple(table), tuple(slots))

    def check_integrity(self) -> None:
        """The blocks', and that those who hold some are known."""
        self.blocks.check_integrity()
        tables = self.blocks.tables
        assert self._held.keys() == tables.keys(), f"{set(self._held)} hold, {set(tables)} have"
        for seq_id, held in self._held.items():
            room = len(tables[seq_id]) * self.block_size
            assert held.num_cached <= room, f"{held.num_cached} tokens of {seq_id}, room for {room}"

    # ---- inside

    def _context(self, seq_id: str, num_tokens: int) -> Slots:
        """Where a sequence's first tokens lie. Computed when its blocks are others than before."""
        table, held = self.blocks.tables[seq_id], self._held[seq_id]
        if held.blocks != table:
            held.blocks, held.slots = table.copy(), self._slots_of(table)
        if isinstance(held.slots, slice):
            return slice(held.slots.start, held.slots.start + num_tokens)
        return held.slots[:num_tokens]

    def _slots_of(self, blocks: Sequence[int]) -> Slots:
        """The slots of these blocks: slot = block · block_size + offset."""
        numbers, size = as_slots(blocks), self.block_size
        if isinstance(numbers, slice):  # neighbours: one piece
            return slice(numbers.start * size, numbers.stop * size)
        if size == 1:
            return numbers
        return (numbers[:, None] * size + torch.arange(size)).flatten()

    def _copy_block(self, source: int, target: int, num_tokens: int) -> None:
        a, b = source * self.block_size, target * self.block_size
        self.storage.copy(slice(a, a + num_tokens), slice(b, b + num_tokens))
