"""Memory is full: a preempted request is computed again, or swapped.

Our engine recomputes. Other engines can copy its blocks to the computer's own memory and back. What
was lost is read from a trace; what both ways cost is computed from the numbers of a machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tutorial_engine.trace.events import Admitted, Preempted, Trace
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import PAGES, Pool


@dataclass(frozen=True)
class Price:
    """What a machine asks: seconds to run a token, bytes a second over the link, seconds a copy.

    `bytes_per_token`: K and V of a token in all layers. A block is `copies_per_block` pieces of
    memory (K and V of each layer), each of which is copied by a call of its own.
    """

    name: str
    per_token: float
    bytes_per_token: int
    bytes_per_second: float
    per_copy: float
    copies_per_block: int

    def swap(self, num_blocks: int, block_size: int) -> float:
        """Seconds to copy so many blocks out, and later in again."""
        one_way = num_blocks * self.copies_per_block * self.per_copy
        one_way += num_blocks * block_size * self.bytes_per_token / self.bytes_per_second
        return 2 * one_way

    def rows(self, block_sizes: Sequence[int]) -> list[tuple[int, float, float]]:
        """(block size, recompute, swap): seconds per token of a full block, for each size."""
        return [(n, self.per_token, self.swap(1, n) / n) for n in block_sizes]

    def __str__(self) -> str:
        """The assumptions, in a sentence."""
        return (
            f"{self.name}: {1e6 * self.per_token:.0f} µs to compute a token, "
            f"{self.bytes_per_token // 1024} KiB of K and V a token,\na link of "
            f"{self.bytes_per_second / 1e9:.0f} GB a second, {1e6 * self.per_copy:.0f} µs to start "
            f"each of the {self.copies_per_block} copies of a block, out and in again"
        )


# 2 · 6.7e9 operations a token at half of 312e12 a second; 16 bits; PCIe 4; 10 µs to start a copy.
LLAMA_2_7B = Price("Llama-2 7B on an A100", 2 * 6.7e9 / 156e12, 512 * 1024, 25e9, 1e-5, 2 * 32)


class Lost(NamedTuple):
    """One preemption: what the request had computed, and what it found again when it came back.

    It runs again what it did not find.
    """

    request_id: str
    step: int
    num_tokens: int
    num_found: int


def when_full(trace: Trace) -> list[Lost]:
    """Each preemption of a run on pages. ValueError for rows and cells."""
    pool = Pool.of(trace.settings)
    if pool.kind != PAGES:
        raise ValueError(f"this run was on {pool.kind}: only blocks are found again, record pages")
    lost: list[Lost] = []
    absent: dict[str, int] = {}  # request -> its entry in `lost`, until it comes back
    for step in history(trace):
        for event in step.events:
            if isinstance(event, Preempted):
                computed = step.before.requests[event.request_id].num_computed_tokens
                absent[event.request_id] = len(lost)
                lost.append(Lost(event.request_id, event.step, computed, 0))
            elif isinstance(event, Admitted) and event.request_id in absent:
                i = absent.pop(event.request_id)
                lost[i] = lost[i]._replace(num_found=min(event.num_cached, lost[i].num_tokens))
    return lost
