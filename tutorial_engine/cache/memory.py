"""Introduced in notebook 03. The question that a scheduler asks about memory, and rows as answer.

Knows requests by their id and number of tokens, and which row is whose; knows no queue, no budget,
no model. Later layouts answer the same question (notebook 04).
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import Allocation, StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.request import Request
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.trace.events import Recorder, RowFreed, RowTaken, Setting


class KVCacheManager(Protocol):
    """Whose tokens lie in which slots. All that scheduler and engine know of a cache layout."""

    trace: Recorder | None  # the engine sets its own

    @property
    def storage(self) -> KVStorage:
        """The shelves that the slots are on."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens that one request can have here, if it is alone."""
        ...

    def allocate(self, request: Request, max_new_tokens: int) -> Allocation | None:
        """Room for up to max_new_tokens of a request's next tokens, or None; all or nothing.

        Admission, cache hits and slots in one call. The first position may lie beyond
        request.num_computed_tokens when a new request's beginning was found in the cache. None
        leaves everything as it was; asked twice before a commit, the answer is the same. At least
        one token runs; tokens that were found count in slots_of from now on.
        """
        ...

    def commit(self, request: Request, num_tokens: int) -> None:
        """The forward has written the next num_tokens of the allocation: they count from now on."""
        ...

    def fork(self, parent: Request, child: Request) -> int:
        """Let the child begin with the parent's computed tokens → how many it has without running.

        At least one of its own is left to run. The child waits; a layout that cannot share says 0.
        """
        ...

    def free(self, request: Request) -> None:
        """Take back all that the request holds; nothing happens when that is nothing."""
        ...

    def slots_of(self, request: Request) -> tuple[int, ...]:
        """Where its committed tokens lie, by position."""
        ...

    def table_of(self, request: Request) -> tuple[int, ...]:
        """The units that it holds, as numbers: its row here; its blocks, in order, with pages."""
        ...

    @property
    def settings(self) -> Mapping[str, Setting]:
        """What a trace should know of this memory: its sizes."""
        ...

    def check_integrity(self) -> None:
        """AssertionError if the books do not add up."""
        ...


def fork_to_give_up(key: str, waiting: Collection[str], holding: Collection[str]) -> str | None:
    """Which fork loses what it shares when there is no memory for request `key`; None: none may.

    waiting: the forks that are not admitted, oldest first; holding: all that hold memory, waiting
    or not. The newest goes, for one that runs; for one that waits only if nobody runs, or all would
    wait for ever.
    """
    runs = key in holding and key not in waiting
    if not waiting or (len(waiting) < len(holding) and not runs):
        return None
    others = [name for name in waiting if name != key]
    return (others or list(waiting))[-1]


class RowManager:
    """A row of a static cache for each running request, as long as there are free rows.

    A row is max_len slots, used or not: nothing ever runs out in the middle of a request.
    """

    def __init__(self, cache: StaticKVCache, trace: Recorder | None = None) -> None:
        self.cache, self.trace = cache, trace
        self._free = list(reversed(range(cache.num_rows)))  # the last one is taken first
        self._rows: dict[str, int] = {}  # request_id -> row

    @classmethod
    def from_config(
        cls, model: ModelConfig, config: CacheConfig, trace: Recorder | None = None
    ) -> "RowManager":
        """config.max_seqs rows. ValueError, with the bytes, when there is no memory for them."""
        try:
            return cls(StaticKVCache.from_config(model, config), trace)
        except RuntimeError as error:  # PyTorch's allocator
            raise ValueError(
                f"no memory for {config.max_seqs} rows of {config.length_for(model)} tokens "
                f"({config.num_bytes(model):,} bytes): lower max_num_seqs or max_model_len"
            ) from error

    @property
    def storage(self) -> KVStorage:
        """As KVCacheManager.storage."""
        return self.cache.storage

    @property
    def max_len(self) -> int:
        """As KVCacheManager.max_len: the length of a row."""
        return self.cache.max_len

    @property
    def num_free_rows(self) -> int:
        """Rows that are nobody's."""
        return len(self._free)

    def allocate(self, request: Request, max_new_tokens: int) -> Allocation | None:
        """As KVCacheManager.allocate: a request without a row takes one that is free."""
        row = self._rows.get(request.request_id)
        if row is None:
            if not self._free:
                return None
            row = self._free.pop()
            self._rows[request.request_id] = row
            if self.trace is not None:
                self.trace.record(RowTaken, request.request_id, row)
        return self.cache.allocate(row, max_new_tokens)

    def commit(self, request: Request, num_tokens: int) -> None:
        """As KVCacheManager.commit."""
        self.cache.advance(self._rows[request.request_id], num_tokens)

    def fork(self, parent: Request, child: Request) -> int:
        """As KVCacheManager.fork: rows share nothing."""
        return 0

    def free(self, request: Request) -> None:
        """As KVCacheManager.free."""
        row = self._rows.pop(request.request_id, None)
        if row is None:
            return
        self.cache.reset(row)
        self._free.append(row)
        if self.trace is not None:
            self.trace.record(RowFreed, request.request_id, row)

    def slots_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.slots_of."""
        row = self._rows.get(request.request_id)
        if row is None:
            return ()
        start = row * self.cache.max_len
        return tuple(range(start, start + self.cache.seq_lens[row]))

    def table_of(self, request: Request) -> tuple[int, ...]:
        """As KVCacheManager.table_of: its row, once it has one."""
        row = self._rows.get(request.request_id)
        return () if row is None else (row,)

    @property
    def settings(self) -> Mapping[str, Setting]:
        """As KVCacheManager.settings."""
        return {"num_rows": self.cache.num_rows, "row_len": self.cache.max_len}

    def check_integrity(self) -> None:
        """As KVCacheManager.check_integrity: every row is free and empty, or exactly one's."""
        taken = sorted(self._rows.values())
        assert sorted([*taken, *self._free]) == list(range(self.cache.num_rows)), (
            f"rows {taken} are taken and {sorted(self._free)} free, of {self.cache.num_rows}"
        )
        for row in self._free:
            assert self.cache.seq_lens[row] == 0, f"row {row} is free and holds tokens"
        self.cache.check_integrity()
