"""Introduced in notebook 04. Pages: slot = block · block_size + offset, by a table per request.

Knows blocks, slots and requests; knows no queue, no budget and no model. The scheduler asks the
same question as of rows, and gets the same kind of answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import fork_to_give_up
from tutorial_engine.cache.rows import Allocation
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.request import Request
from tutorial_engine.model.batch import Slots
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


@dataclass(slots=True)
class _Held:
    """What a request has here: its computed tokens, and its table as slots.

    `slots`, on the CPU, has at least as many as its blocks, by position; none while the blocks are
    neighbours. A fork that waits is not admitted yet.
    """

    num_tokens: int
    is_admitted: bool = False
    is_run: bool = True
    slots: Tensor | None = None


class PagedKVCache:
    """A KVCacheManager: every request has a table of blocks, which grows as it is run.

    A request is admitted only if all of its tokens fit now, and then holds their blocks. A running
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
        self.storage, self.block_size = storage, block_size
        self.max_len = min(storage.num_slots, max_len or storage.num_slots)
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            salt=salt,
            copy=self._copy_block,
            trace=trace,
        )
        self._held: dict[str, _Held] = {}  # request_id -> what it has, in order of coming
        self._device = storage.k.device

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
        if (num_blocks is None) == (memory_bytes is None):
            raise ValueError(f"give num_blocks or memory_bytes, got {num_blocks}, {memory_bytes}")
        spec = KVCacheSpec.from_model(model, dtype, tp_size)
        if memory_bytes is not None:
            num_blocks = num_blocks_in(memory_bytes, spec, block_size)
        at_least_one("num_blocks", num_blocks)
        at_least_one("block_size", block_size)
        assert num_blocks is not None
        try:
            storage = KVStorage(spec, num_blocks * block_size, device, slots_first)
        except RuntimeError as error:  # PyTorch's allocator
            needed = spec.bytes_per_token * num_blocks * block_size
            raise ValueError(
                f"no memory for {num_blocks} blocks of {block_size} tokens ({needed:,} bytes)"
            ) from error
        limit = model.max_position_embeddings
        options = {"max_len": limit, "prefix_caching": prefix_caching, "salt": salt}
        return cls(storage, block_size, trace=trace, **options)  # type: ignore[arg-type]

    @property
    def trace(self) -> Recorder | None:
        """Who is told what happens to blocks; an engine sets its own."""
        return self.blocks.trace

    @trace.setter
    def trace(self, trace: Recorder | None) -> None:
        """The blocks record there, too."""
        self.blocks.trace = trace

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of this pool."""
        size = {"num_blocks": self.blocks.num_blocks, "block_size": self.block_size}
        return {**size, "prefix_caching": self.blocks.prefix_caching}

    def pages(self) -> tuple[Tensor, Tensor]:
        """K and V in the classic five axes, as views: [layers, blocks, H_kv, block_size, D]."""
        return self.storage.by_rows(self.blocks.num_blocks)

    # ---- what a scheduler asks

    def allocate(self, request: Request, max_new_tokens: int) -> Allocation | None:
        """As KVCacheManager.allocate. A fork that waits gives way to whoever runs."""
        name = request.request_id
        while (changed := self._room(request, max_new_tokens)) is None:
            waiting = [other for other, held in self._held.items() if not held.is_admitted]
            given_up = fork_to_give_up(name, waiting, self._held)
            if given_up is None:
                return None
            self._free(given_up)
        held, table = self._held[name], self.blocks.tables[name]
        held.is_admitted = True
        if changed < len(table):
            self._follow(held, table, changed)
        start = held.num_tokens
        end = min(start + max_new_tokens, request.num_tokens)
        return Allocation(start, self._slots(table, start, end), self._context(held, table, end))

    def commit(self, request: Request, num_tokens: int) -> None:
        """As KVCacheManager.commit; blocks that are full now can be found by others."""
        held = self._held[request.request_id]
        held.num_tokens += num_tokens
        self.blocks.commit(request.request_id, request.token_ids, held.num_tokens)

    def free(self, request: Request) -> None:
        """As KVCacheManager.free; what its full blocks hold stays there until they are taken."""
        self._free(request.request_id)

    def fork(self, parent: Request, child: Request) -> int:
        """The child gets the parent's computed tokens, without a copy → how many it shares.

        One of the child's tokens is left to be run, at least. The child waits: `allocate` admits
        it; if memory runs out before, it loses this and is computed like any other. With a trace,
        add it to the scheduler first. ValueError if it begins otherwise, or has blocks.
        """
        held = self._held.get(parent.request_id)
        shared = min(held.num_tokens if held else 0, child.num_tokens - 1)
        if child.token_ids[:shared] != parent.token_ids[:shared]:
            raise ValueError(
                f"request {child.request_id} does not begin like {parent.request_id}: only the "
                "same tokens can be shared"
            )
        if shared:
            self.blocks.fork(parent.request_id, child.request_id, shared)
            self._held[child.request_id] = _Held(shared)
        return shared

    def slots_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.slots_of; a fork that waits has nothing of its own yet."""
        held = self._held.get(request.request_id)
        if held is None or not held.is_admitted:
            return ()
        return tuple(self._slots(self.blocks.tables[request.request_id], 0, held.num_tokens))

    def table_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.table_of: its blocks, by position."""
        return tuple(self.blocks.tables.get(request.request_id, ()))

    def check_integrity(self) -> None:
        """As KVCacheManager.check_integrity: the blocks', and tables as long as their tokens."""
        self.blocks.check_integrity()
        tables = self.blocks.tables
        assert self._held.keys() == tables.keys(), f"{set(self._held)} hold, {set(tables)} have"
        for name, held in self._held.items():
            table, needed = tables[name], self.blocks.num_blocks_for(held.num_tokens)
            assert needed <= len(table), f"{held.num_tokens} tokens of {name} are in {table}"
            if held.is_admitted:
                want = self._slots(table, 0, len(table) * self.block_size)
                got = self._context(held, table, len(want))
                there = range(got.start, got.stop) if isinstance(got, slice) else got.tolist()
                assert list(there) == list(want), f"the slots of {name} are not those of {table}"

    def must_fit(self, request: Request, max_new_tokens: int) -> Sequence[int]:
        """The tokens that must have room before a request is let in: all, or it might thrash."""
        return request.token_ids

    # ---- inside

    def _room(self, request: Request, max_new_tokens: int) -> int | None:
        """Blocks for the next tokens → the first table entry that is new, or None."""
        name = request.request_id
        held = self._held.get(name)
        if held is None:
            found = self.blocks.admit(name, self.must_fit(request, max_new_tokens))
            if found is None:
                return None
            self._held[name] = _Held(found)
            return 0
        if held.is_admitted:
            end = min(held.num_tokens + max_new_tokens, request.num_tokens)
            return self.blocks.extend(name, held.num_tokens, end)
        done = self.blocks.extend(name, held.num_tokens, request.num_tokens)
        return None if done is None else 0  # its table has never been looked at

    def _free(self, name: str) -> None:
        self.blocks.free(name)
        self._held.pop(name, None)

    def _follow(self, held: _Held, table: Sequence[int], changed: int) -> None:
        """The table is another from entry `changed` on: so are the slots."""
        old = table[max(changed - 1, 0) :]
        held.is_run = (held.is_run or not changed) and all(b == a + 1 for a, b in pairwise(old))
        if held.is_run:
            held.slots = None
            return
        begin, end = changed * self.block_size, len(table) * self.block_size
        if held.slots is None or held.slots.numel() < end:
            with torch.inference_mode(False):  # wherever it is made, it can be written anywhere
                grown = torch.empty(2 * end, dtype=torch.int64)  # twice the room: it moves rarely
            if held.slots is None:
                begin = 0
            else:
                grown[:begin] = held.slots[:begin]
            held.slots = grown
        # through an array of the same memory, a few numbers are written ten times faster
        held.slots.numpy()[begin:end] = self._slots(table, begin, end)

    def _context(self, held: _Held, table: Sequence[int], end: int) -> Slots:
        """Where positions 0 .. end − 1 lie: a slice if all blocks are neighbours."""
        if held.is_run:
            start = table[0] * self.block_size
            return slice(start, start + end)
        assert held.slots is not None
        return held.slots[:end].to(self._device)

    def _slots(self, table: Sequence[int], start: int, end: int) -> Sequence[int]:
        """The slots of positions start .. end − 1, block by block."""
        size = self.block_size
        first, last = start // size, (end - 1) // size
        if first == last:
            shift = (table[first] - first) * size  # slot − position, in one block
            return range(start + shift, end + shift)
        slots: list[int] = []
        for index in range(first, last + 1):
            shift = (table[index] - index) * size
            slots.extend(
                range(max(start, index * size) + shift, min(end, (index + 1) * size) + shift)
            )
        return slots

    def _copy_block(self, source: int, target: int, num_tokens: int) -> None:
        a, b = source * self.block_size, target * self.block_size
        self.storage.copy(slice(a, a + num_tokens), slice(b, b + num_tokens))
