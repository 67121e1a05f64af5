"""The one question about memory: where do a sequence's next tokens go?

Every cache layout answers it. Knows sequences by an id and their tokens; knows no request, no
queue, no budget and no model. The sequence itself owns its length: memory is told.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tutorial_engine.model.attention import KVCache
from tutorial_engine.model.batch import Allocation
from tutorial_engine.trace.events import Recorder, Setting


class SequenceMemory(NamedTuple):
    """What a sequence holds: `table`, its units (a row; blocks; cells), and the slots of these.

    `slots` by position, as many as there is room for: its computed tokens are in the first ones.
    """

    table: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


@runtime_checkable
class KVMemory(Protocol):
    """Whose tokens lie in which slots: all that an engine knows of a layout. (vLLM has one layout,
    pages, and calls its class KVCacheManager.)

    `user` is the engine that its requests belong to. Two engines give their requests the same
    names, so a memory serves one at a time.
    """

    user: object

    @property
    def storage(self) -> KVCache:
        """Who is asked for keys and values: the tensors that the slots are in."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens that one sequence can have here, if it is alone."""
        ...

    @property
    def trace(self) -> Recorder | None:
        """Who is told what happens here; given when the memory is made."""
        ...

    @property
    def settings(self) -> Mapping[str, Setting]:
        """What a trace should know of this memory: its sizes."""
        ...

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        """The sequences that hold something here, or are promised something (forks)."""
        ...

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        """Room for up to num_new tokens after the first num_computed, or None; all or nothing.

        Admission, cache hits and slots in one call. For a sequence that holds nothing yet, the
        first position may lie beyond num_computed: so many tokens were found. At least one runs.
        None leaves every admitted sequence as it was (a fork that waits may have lost what it was
        given); asked twice before a commit, the answer is the same. Others may find the tokens from
        now on: those that are admitted to the same forward read what it writes.
        """
        ...

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """K and V of the first num_computed tokens are written; what was promised beyond is not.

        So with the old number after a forward that failed; who was admitted to it is freed.
        """
        ...

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> int:
        """Let a new sequence begin with num_tokens that the parent has computed → how many it got.

        It waits: `allocate` admits it. A layout that cannot share says 0.
        """
        ...

    def free(self, seq_id: str) -> None:
        """Take back all that the sequence holds; nothing happens when that is nothing."""
        ...

    def describe(self, seq_id: str) -> SequenceMemory:
        """What a sequence holds: for traces, pictures and tests."""
        ...

    def check_integrity(self) -> None:
        """AssertionError if the memory contradicts itself."""
        ...


def fork_to_give_up(
    seq_id: str, waiting: Collection[str], holding: Collection[int | str]
) -> str | None:
    """Which fork loses what it was given when there is no memory for seq_id; None: none may.

    waiting: the forks that are not admitted, oldest first; holding: all that hold memory, waiting
    or not. A sequence that runs takes it from the newest fork. One that waits takes nothing while
    somebody runs, who will give memory back; if nobody does, it may, or all would wait for ever.
    """
    somebody_runs = len(waiting) < len(holding)
    runs_itself = seq_id in holding and seq_id not in waiting
    if not waiting or (somebody_runs and not runs_itself):
        return None
    others = [name for name in waiting if name != seq_id]
    return (others or list(waiting))[-1]
