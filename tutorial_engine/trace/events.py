"""What an engine did, as frozen events, and its state between them.

A trace is the source of every picture. Knows names, numbers and times; knows no request object, no
tensor and no picture.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 3  # of the JSON; raised when an old file could be misread

Setting = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at `time` in step `step`, counted from 0, or before it was run."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """Something happened to a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Added(RequestEvent):
    """It came and waits at the end of the queue, or at `place`. `arrival` may lie before `time`."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival: float
    place: int | None = None


@dataclass(frozen=True, slots=True)
class Forked(RequestEvent):
    """One more sample of a request's prompt: it shares num_tokens that the parent has computed."""

    parent_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admitted(RequestEvent):
    """It left the queue and runs; num_cached of its tokens were in the cache already, there."""

    num_cached: int
    cached_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scheduled(RequestEvent):
    """This step runs its tokens at first_position, ...; their K and V go to these slots."""

    first_position: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempted(RequestEvent):
    """Its memory was taken away; it waits at the front and will be computed again."""


@dataclass(frozen=True, slots=True)
class TokenSampled(RequestEvent):
    """It got this token, which has not been run yet."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Finished(RequestEvent):
    """It is over: "stop", "length", "abort" or "error"; what stopped it, or what went wrong."""

    reason: str
    detail: int | str | None


@dataclass(frozen=True, slots=True)
class RowTaken(RequestEvent):
    """It got a row of the static cache."""

    row: int


@dataclass(frozen=True, slots=True)
class RowFreed(RequestEvent):
    """Its row is free again."""

    row: int


@dataclass(frozen=True, slots=True)
class BlockTaken(RequestEvent):
    """A free block is its own now, last in its table. `evicted`: what it held was still cached."""

    block: int
    evicted: bool


@dataclass(frozen=True, slots=True)
class BlockShared(RequestEvent):
    """A block that holds its tokens already is last in its table now, too: found, or forked."""

    block: int


@dataclass(frozen=True, slots=True)
class BlockCopied(RequestEvent):
    """It was to write to a block that others may read, `source`: in its table, `block` is instead.

    Its last tokens so far, which were in the source, lie in these slots now.
    """

    source: int
    block: int
    slots: tuple[int, ...]
    evicted: bool


@dataclass(frozen=True, slots=True)
class BlockCached(RequestEvent):
    """The step computes the last token of this block: who begins alike can find it by the hash."""

    block: int
    hash: str


@dataclass(frozen=True, slots=True)
class BlockForgotten(RequestEvent):
    """The step that was to compute this block was broken off: nobody can find it any more."""

    block: int


@dataclass(frozen=True, slots=True)
class BlockFreed(RequestEvent):
    """It no longer holds this block."""

    block: int


@dataclass(frozen=True, slots=True)
class FreeQueue(Event):
    """All free blocks, the next one first, as the pool has them; by our rule this follows."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellsTaken(RequestEvent):
    """Empty cells are its own now: those of its tokens at first_position, ..., run or not yet."""

    first_position: int
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellsShared(RequestEvent):
    """It owns these cells of another's first tokens as well: they are its first ones."""

    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CellsFreed(RequestEvent):
    """It leaves all its cells, by position; those that are nobody else's are empty again."""

    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """The scheduler starts to plan a step. One that an interrupt broke off is begun again."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """Planning is closed: the one forward of the step runs all that was scheduled since it began.

    What follows, up to StepEnded, is the result of this forward.
    """


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The step's one forward is done, its K and V count, its tokens are sampled."""

    num_tokens: int


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *(Added, Forked, Admitted, Scheduled, Preempted, TokenSampled, Finished),
        *(RowTaken, RowFreed, StepBegan, Planned, StepEnded),
        *(CellsTaken, CellsShared, CellsFreed),
        *(BlockTaken, BlockShared, BlockCopied, BlockCached, BlockForgotten, BlockFreed),
        FreeQueue,
    )
}


class RequestState(NamedTuple):
    """One request as a step left it. `slots` by position; `table`: its row, blocks or cells."""

    status: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    slots: tuple[int, ...]
    table: tuple[int, ...] = ()


class EngineState(NamedTuple):
    """Queues and requests. A replay also has those that are over, with no slots left."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    requests: dict[str, RequestState]

    def unfinished(self) -> "EngineState":
        """Without the requests that are over: what a live engine knows."""
        queued = {*self.waiting, *self.running}
        return self._replace(requests={k: r for k, r in self.requests.items() if k in queued})


class Trace(NamedTuple):
    """A recorded run: the engine's settings, and all events in order."""

    settings: Mapping[str, Setting]
    events: tuple[Event, ...]

    @property
    def num_steps(self) -> int:
        """Steps that ran to their end."""
        return sum(isinstance(event, StepEnded) for event in self.events)

    def to_json(self) -> str:
        """One line per event, so that two runs can be compared with diff."""
        head = json.dumps({"format": FORMAT, "settings": dict(self.settings)})
        lines = [json.dumps([type(event).__name__, _values(event)]) for event in self.events]
        return "[\n" + ",\n".join([head, *lines]) + "\n]\n"

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The trace that to_json wrote; ValueError for another format, or naming the entry.

        For files of your own: a number beyond all bounds would make a picture draw for ever.
        """
        try:
            head, *entries = json.loads(text)
            file_format, settings = head["format"], dict(head["settings"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"this is no trace: {type(error).__name__}: {error}") from error
        if file_format != FORMAT:
            raise ValueError(
                f"the trace has format {file_format!r}, and this version reads format {FORMAT}: "
                "record the run again with this version"
            )
        return cls(settings, tuple(_event(i, entry) for i, entry in enumerate(entries)))

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what save wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _values(event: Event) -> dict[str, Any]:
    return {field.name: getattr(event, field.name) for field in fields(event)}


def _event(index: int, entry: Any) -> Event:
    try:
        name, values = entry
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return EVENTS[name](**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"event {index} of the trace, {str(entry)[:500]}, is none: {error}"
        ) from error


class Recorder:
    """Collects events. An engine without one records nothing and spends nothing on it.

    The engine binds its clock and settings and counts `step`; a recorder serves one engine.
    """

    def __init__(self) -> None:
        self.step = 0
        self._events: list[Event] = []
        self._settings: Mapping[str, Setting] = {}
        self._now: Callable[[], float] | None = None

    def bind(self, now: Callable[[], float], settings: Mapping[str, Setting]) -> None:
        """Called once, by the engine that is recorded. ValueError the second time."""
        if self._now is not None:
            raise ValueError("this recorder belongs to another engine: give each its own")
        self._now, self._settings = now, dict(settings)

    def record(self, kind: type[Event], *values: object) -> None:
        """Append an event of now; `values` are its fields after step and time."""
        if self._now is None:
            raise ValueError(
                "this recorder has no clock yet: make the engine first (it binds its recorder), or "
                "call bind(time.perf_counter, {}) where a memory is used by hand"
            )
        self._events.append(kind(self.step, self._now(), *values))

    @property
    def events(self) -> Sequence[Event]:
        """What happened so far."""
        return self._events

    def trace(self) -> Trace:
        """All so far, frozen."""
        return Trace(self._settings, tuple(self._events))
