"""Introduced in notebook 03. What a scheduler asks of memory, whatever its layout.

The sequence owns its length; memory is told. Knows sequences by id, token ids and numbers; knows no
request, no queue, no budget and no model. Rows, pages and cells answer.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.batch import Allocation
from tutorial_engine.trace.events import Recorder, Setting


class SequenceMemory(NamedTuple):
    """What a sequence holds: its units (row, blocks or cells), and the slot of each position.

    There are as many slots as it has room for: those that count are the first num_computed.
    """

    table: tuple[int, ...]
    slots: tuple[int, ...]


class KVCacheManager(Protocol):
    """Whose tokens lie in which slots. All that scheduler and engine know of a cache layout."""

    @property
    def storage(self) -> KVStorage:
        """The tensors that the slots are in."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens that one sequence can have here, if it is alone."""
        ...

    @property
    def trace(self) -> Recorder | None:
        """Who is told what is taken and freed; given to the constructor."""
        ...

    @property
    def settings(self) -> Mapping[str, Setting]:
        """What a trace should know of this memory: its sizes."""
        ...

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """Room for up to num_new tokens after the first num_computed, or None; all or nothing.

        Admission, cache hits and slots in one call. The first position lies beyond num_computed
        only for a newcomer whose beginning was found in the cache, or that was forked. None leaves
        everything as it was; asked twice before a commit, the answer is the same.
        """
        ...

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """The forward has written K and V of the first num_computed tokens."""
        ...

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Let the child begin with the parent's first num_tokens → how many it has without running.

        The child waits: `allocate` admits it. A layout that cannot share says 0. At least one of
        the child's tokens must be left to run.
        """
        ...

    def free(self, seq_id: str) -> None:
        """Take back all that the sequence holds; nothing happens when that is nothing."""
        ...

    def describe(self, seq_id: str) -> SequenceMemory:
        """What it holds, for traces and tests; a fork that waits has no slots of its own yet."""
        ...

    def check_integrity(self) -> None:
        """AssertionError if the tables do not agree with each other."""
        ...


def fork_to_give_up(
    seq_id: str, waiting: Collection[str], holding: Collection[int | str]
) -> str | None:
    """Which fork loses what it shares when there is no memory for `seq_id`; None: none may.

    waiting: the forks that are not admitted, oldest first; holding: all that hold memory, waiting
    or not. The newest goes, for one that runs; for one that waits only if nobody runs, or all would
    wait for ever.
    """
    runs = seq_id in holding and seq_id not in waiting
    if not waiting or (len(waiting) < len(holding) and not runs):
        return None
    others = [name for name in waiting if name != seq_id]
    return (others or list(waiting))[-1]
