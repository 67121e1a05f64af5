"""Introduced in notebook 04. Memory is full: a preempted request is computed again, or swapped.

Our engine recomputes. Other engines can copy its blocks to the computer's own memory and back. Both
prices are computed from a trace; nothing is swapped here. Knows a trace and prices.
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

    def recompute(self, num_tokens: int) -> float:
        """Seconds to run so many tokens again, beside what the steps run anyway."""
        return num_tokens * self.per_token

    def swap(self, num_blocks: int, block_size: int) -> float:
        """Seconds to copy so many blocks out, and later in again."""
        one_way = num_blocks * self.copies_per_block * self.per_copy
        one_way += num_blocks * block_size * self.bytes_per_token / self.bytes_per_second
        return 2 * one_way

    def rows(self, block_sizes: Sequence[int]) -> list[tuple[int, float, float]]:
        """(block size, recompute, swap): seconds per token of a full block, for each size."""
        return [(n, self.per_token, self.swap(1, n) / n) for n in block_sizes]


# The virtual clock's price of a token, and a link made up in proportion to it.
TINY_VIRTUAL = Price("the tiny model, virtual clock", 1e-3, 2048, 10e6, 1e-4, 2 * 4)
# 2 · 6.7e9 operations a token at half of 312e12 a second; 16 bits; PCIe 4; 10 µs to start a copy.
LLAMA_2_7B = Price("Llama-2 7B on an A100", 2 * 6.7e9 / 156e12, 512 * 1024, 25e9, 1e-5, 2 * 32)


class Lost(NamedTuple):
    """One preemption: what the request had computed, and what it found again when it came back.

    `recompute` and `swap` are seconds. It runs again what it did not find.
    """

    request_id: str
    step: int
    num_tokens: int
    num_blocks: int
    num_found: int
    recompute: float
    swap: float


def when_full(trace: Trace, price: Price) -> list[Lost]:
    """Each preemption of a run on pages, with both prices. ValueError for rows and cells."""
    pool = Pool.of(trace.settings)
    if pool.kind != PAGES:
        raise ValueError(f"this run was on {pool.kind}: only blocks are swapped here, record pages")
    out: list[Lost] = []
    away: dict[str, int] = {}  # request -> its entry in `out`, until it comes back
    for step in history(trace):
        for event in step.events:
            if isinstance(event, Preempted):
                had = step.before.requests[event.request_id].num_computed_tokens
                away[event.request_id] = len(out)
                blocks = -(-had // pool.unit)
                again, swapped = price.recompute(had), price.swap(blocks, pool.unit)
                out.append(Lost(event.request_id, event.step, had, blocks, 0, again, swapped))
            elif isinstance(event, Admitted) and event.request_id in away:
                i = away.pop(event.request_id)
                found = min(event.num_cached, out[i].num_tokens)
                again = price.recompute(out[i].num_tokens - found)
                out[i] = out[i]._replace(num_found=found, recompute=again)
    return out


def table(lost: Sequence[Lost]) -> str:
    """A line for each preemption, and the sums."""
    lines = ["request  step  computed  found again  recompute ms   swap ms"]
    for one in lost:
        lines.append(
            f"{one.request_id:7}{one.step:6}{one.num_tokens:10}{one.num_found:13}"
            f"{1e3 * one.recompute:14.1f}{1e3 * one.swap:10.1f}"
        )
    sums = [sum(one.num_tokens for one in lost), sum(one.num_found for one in lost)]
    times = [sum(one.recompute for one in lost), sum(one.swap for one in lost)]
    lines.append(f"{'all':13}{sums[0]:10}{sums[1]:13}{1e3 * times[0]:14.1f}{1e3 * times[1]:10.1f}")
    return "\n".join(lines)
