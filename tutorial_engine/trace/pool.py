"""The pool step by step, from a trace: used, reserved, free slots.

Knows rows, pages and cells by their events and sizes alone, so that the three can be compared;
needs no engine and no model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorial_engine.trace.events import Added, Forked, Setting, Trace
from tutorial_engine.trace.history import Step, history

ROWS, PAGES, CELLS = "rows", "pages", "cells"


class Pool(NamedTuple):
    """A pool's sizes: `num_units` rows, pages or cells (`kind`) of `unit` slots each."""

    kind: str
    unit: int
    num_units: int

    @property
    def num_slots(self) -> int:
        """Slots of all units."""
        return self.unit * self.num_units

    @classmethod
    def of(cls, settings: Mapping[str, Setting]) -> "Pool":
        """The pool that a trace's settings tell of. ValueError if they tell of none."""
        for kind, unit, number in (
            (CELLS, None, "num_cells"),
            (PAGES, "block_size", "num_blocks"),
            (ROWS, "row_len", "num_rows"),
        ):
            if number in settings:
                size = 1 if unit is None else settings[unit]
                return cls(kind, int(size or 0), int(settings[number] or 0))
        raise ValueError(f"these settings name no rows, blocks or cells: {sorted(settings)}")

    def slots(self, unit: int) -> range:
        """The slots of a row, block or cell."""
        return range(unit * self.unit, (unit + 1) * self.unit)


class Usage(NamedTuple):
    """Slots in a step: with a token, reserved without one (the waste), free. A block that is free
    and can still be found counts as free.
    """

    step: int
    used: int
    reserved: int
    free: int


class PoolSnapshot(NamedTuple):
    """The pool while a step's forward runs: its new tokens count as written.

    `tokens`: slot → request → the position that it has there. `owners`: slot → whose table it is
    in, with a token or without. `new`: slots written in this step. `entries`: request → length of
    its table. `running` and `waiting` are the queues.
    """

    step: int
    pool: Pool
    tokens: Mapping[int, Mapping[str, int]]
    owners: Mapping[int, tuple[str, ...]]
    new: frozenset[int]
    running: tuple[str, ...]
    entries: Mapping[str, int]
    waiting: tuple[str, ...]

    @property
    def usage(self) -> Usage:
        """The slots, counted."""
        used, reserved = len(self.tokens), len(self.owners) - len(self.tokens)
        return Usage(self.step, used, reserved, self.pool.num_slots - len(self.owners))


@dataclass(frozen=True)
class PoolHistory:
    """A pool in every step of a run, and what can be counted of it. `names` in order of coming."""

    pool: Pool
    names: tuple[str, ...]
    snapshots: tuple[PoolSnapshot, ...] = field(repr=False)

    @classmethod
    def of(cls, trace: Trace) -> "PoolHistory":
        """What a trace tells. ValueError for one without sizes, or without a step."""
        steps = tuple(snapshots(trace))
        if not steps:
            raise ValueError("no step of this trace ran to its end: there is nothing to count")
        names = [event.request_id for event in trace.events if isinstance(event, Added)]
        return PoolHistory(Pool.of(trace.settings), tuple(dict.fromkeys(names)), steps)

    @property
    def fullest(self) -> PoolSnapshot:
        """The step with the most requests running; of several, most waiting, then most tokens."""
        return max(
            self.snapshots, key=lambda s: (len(s.running), len(s.waiting), s.usage.used, s.step)
        )

    @property
    def num_steps(self) -> int:
        """Forwards until all were done."""
        return len(self.snapshots)

    @property
    def mean_waste(self) -> float:
        """Slots reserved without a token in a step, on average."""
        return sum(s.usage.reserved for s in self.snapshots) / self.num_steps

    @property
    def peak_waste(self) -> int:
        """The most slots that were reserved without a token."""
        return max(s.usage.reserved for s in self.snapshots)

    @property
    def peak_used(self) -> int:
        """The most slots that had a token."""
        return max(s.usage.used for s in self.snapshots)

    @property
    def total_entries(self) -> int:
        """Table entries: the most that all requests had at once."""
        return max(sum(s.entries.values()) for s in self.snapshots)

    @property
    def most_running(self) -> int:
        """The most requests that ran at once."""
        return max(len(s.running) for s in self.snapshots)


def snapshots(trace: Trace) -> Iterator[PoolSnapshot]:
    """The pool in each step that ran to its end. ValueError for a trace without its sizes."""
    pool, forked = Pool.of(trace.settings), dict[str, int]()
    for step in history(trace):
        yield _snapshot(pool, step, forked)
        forked |= {name: fork.num_tokens for name, fork in step.by_request(Forked).items()}


def _snapshot(pool: Pool, step: Step, forked: Mapping[str, int]) -> PoolSnapshot:
    """`forked`: the tokens that a sample shares; while it waits they are all that it has."""
    tokens: dict[int, dict[str, int]] = {}
    owners: dict[int, tuple[str, ...]] = {}
    for name, request in step.planned.requests.items():
        reserved = [slot for unit in request.table for slot in pool.slots(unit)]
        slots = request.slots
        if request.status == "waiting":
            slots = tuple(reserved[: forked.get(name, 0)])
        elif name in step.scheduled:
            slots = slots[: step.scheduled[name].first_position] + step.scheduled[name].slots
        for slot in reserved:
            owners[slot] = (*owners.get(slot, ()), name)
        for position, slot in enumerate(slots):
            tokens.setdefault(slot, {})[name] = position
    new = frozenset(slot for event in step.scheduled.values() for slot in event.slots)
    entries = {name: len(r.table) for name, r in step.planned.requests.items() if r.table}
    queues = step.planned
    return PoolSnapshot(
        step.number, pool, tokens, owners, new, queues.running, entries, queues.waiting
    )
