"""Memory is full: a preempted request is computed again. What was lost is read from a trace."""

from typing import NamedTuple

from tutorial_engine.trace.events import Admitted, Preempted, Trace
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import PAGES, Pool


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
