"""When things happened to a request, and what users feel of it.

Knows times in seconds; knows no request, clock or queue. Terms as in vLLM and in load tests:
TTFT time to first token, TPOT time per output token after it, ITL inter-token latency.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class RequestMetrics(NamedTuple):
    """The times of one request, all from the same clock; None for what has not happened.

    `token_times` has one entry per output token. A preempted request keeps its first times: TTFT
    is not counted again.
    """

    arrival: float
    first_scheduled: float | None = None
    token_times: tuple[float, ...] = ()
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the first step that ran some of it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itl(self) -> tuple[float, ...]:
        """Seconds between neighbouring tokens, one less than there are tokens."""
        return tuple(b - a for a, b in pairwise(self.token_times))

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def total(self) -> float | None:
        """Seconds from arrival to the end (end-to-end latency)."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def throughput(self) -> float | None:
        """Output tokens per second of `total`; None when that is nothing."""
        return len(self.token_times) / self.total if self.total else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank).

    Always one of the values, so a picture can point at it. ValueError for none of them, or a
    percent outside 0 .. 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"need values and 0 <= percent <= 100, got {len(values)} and {percent}")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]
