"""Introduced in notebook 04. The pool step by step, from a trace: used, reserved, free slots.

Knows rows, pages and cells by their events and sizes alone, so that the three can be compared;
needs no engine and no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorial_engine.trace import events
from tutorial_engine.trace.events import Setting, Trace
from tutorial_engine.trace.history import EngineState, Replay

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


class Moment(NamedTuple):
    """The pool while a step's forward runs: its new tokens count as written.

    `tokens`: slot → request → the position that it has there. `held`: slot → who holds it, with a
    token or without. `new`: slots written in this step. `entries`: request → length of its table.
    """

    step: int
    pool: Pool
    tokens: Mapping[int, Mapping[str, int]]
    held: Mapping[int, tuple[str, ...]]
    new: frozenset[int]
    running: tuple[str, ...]
    entries: Mapping[str, int]

    @property
    def usage(self) -> "Usage":
        """The slots, counted."""
        used, held = len(self.tokens), len(self.held)
        return Usage(self.step, used, held - used, self.pool.num_slots - held)


class Usage(NamedTuple):
    """Slots in a step: with a token, reserved without one (the waste), free. A block that is free
    and can still be found counts as free.
    """

    step: int
    used: int
    reserved: int
    free: int


@dataclass(frozen=True)
class PoolHistory:
    """A pool in every step of a run, and what can be counted of it. `names` in order of coming."""

    pool: Pool
    names: tuple[str, ...]
    moments: tuple[Moment, ...] = field(repr=False)

    @classmethod
    def of(cls, trace: Trace) -> "PoolHistory":
        """What a trace tells. ValueError for one without sizes, or without a step."""
        found = tuple(moments(trace))
        if not found:
            raise ValueError("no step of this trace ran to its end: there is nothing to count")
        names = [event.request_id for event in trace.events if isinstance(event, events.Added)]
        return PoolHistory(Pool.of(trace.settings), tuple(dict.fromkeys(names)), found)

    @property
    def num_steps(self) -> int:
        """Forwards until all were done."""
        return len(self.moments)

    @property
    def mean_used(self) -> float:
        """Slots with a token in a step, on average."""
        return sum(m.usage.used for m in self.moments) / self.num_steps

    @property
    def mean_waste(self) -> float:
        """Slots reserved without a token in a step, on average."""
        return sum(m.usage.reserved for m in self.moments) / self.num_steps

    @property
    def peak_waste(self) -> int:
        """The most slots that were reserved without a token."""
        return max(m.usage.reserved for m in self.moments)

    @property
    def most_entries(self) -> int:
        """Table entries: the most that one request had."""
        return max(n for m in self.moments for n in m.entries.values())

    @property
    def total_entries(self) -> int:
        """Table entries: the most that all requests had at once."""
        return max(sum(m.entries.values()) for m in self.moments)

    @property
    def most_shared(self) -> int:
        """The most slots whose token was several requests' at once: kept once, read by all."""
        return max(sum(len(who) > 1 for who in m.tokens.values()) for m in self.moments)

    @property
    def most_running(self) -> int:
        """The most requests that ran at once."""
        return max(len(m.running) for m in self.moments)


def memory_over_time(trace: Trace) -> list[Usage]:
    """Each step's slots: used, reserved but unused, free; on rows, pages or cells."""
    return [moment.usage for moment in moments(trace)]


def moments(trace: Trace) -> list[Moment]:
    """The pool in each step that ran to its end. ValueError for a trace without its sizes."""
    pool, run, found = Pool.of(trace.settings), Replay(), list[Moment]()
    scheduled: dict[str, events.Scheduled] = {}
    forked: dict[str, int] = {}  # those that wait: tokens that they share
    now: Moment | None = None
    for event in trace.events:
        gives_back = isinstance(event, _FREED) and event.request_id in scheduled  # it failed
        if scheduled and now is None and (gives_back or isinstance(event, _RESULTS)):
            now = _moment(pool, len(found), run.state, scheduled, forked)
        match event:
            case events.StepBegan():
                scheduled, now = {}, None
            case events.Scheduled():
                scheduled[event.request_id] = event
            case events.Preempted():
                scheduled.pop(event.request_id, None)
            case events.Forked():
                forked[event.request_id] = event.num_tokens
            case events.Admitted():
                forked.pop(event.request_id, None)
        run.apply(event)
        if isinstance(event, events.StepEnded):
            assert now is not None, "a step that ended has run something"
            found.append(now)
            scheduled, now = {}, None
    return found


# the forward is done; forks are added then, before their parent has its token
_RESULTS = (events.Added, events.TokenSampled, events.Finished, events.StepEnded)
_FREED = (events.RowFreed, events.BlockFreed, events.CellsFreed)


def _moment(
    pool: Pool,
    step: int,
    state: EngineState,
    scheduled: Mapping[str, events.Scheduled],
    forked: Mapping[str, int],
) -> Moment:
    tokens: dict[int, dict[str, int]] = {}
    held: dict[int, tuple[str, ...]] = {}
    for name, request in state.requests.items():
        everywhere = [slot for unit in request.table for slot in pool.slots(unit)]
        slots = request.slots or tuple(everywhere[: forked.get(name, 0)])
        if name in scheduled:
            slots = slots[: scheduled[name].first_position] + scheduled[name].slots
        for slot in everywhere:
            held[slot] = (*held.get(slot, ()), name)
        for position, slot in enumerate(slots):
            tokens.setdefault(slot, {})[name] = position
    new = frozenset(slot for event in scheduled.values() for slot in event.slots)
    entries = {name: len(r.table) for name, r in state.requests.items() if r.table}
    return Moment(step, pool, tokens, held, new, state.running, entries)
