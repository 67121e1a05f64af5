"""From a trace back to the engine's state, and the steps that it ran.

`history(trace)` is how a trace is read: a Step for each forward, with the state before planning,
while the forward ran, and after it. `Replay` goes event by event; it is tested equal to the live
engine at every step. Knows events only; needs no engine and no model.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tutorial_engine.trace import events
from tutorial_engine.trace.events import EngineState, Event, RequestEvent, RequestState, Trace

ENDED = {"abort": "aborted", "error": "error"}  # reason -> status; the others are "finished"
Kind = TypeVar("Kind", bound=RequestEvent)


class Replay:
    """Applies events one by one to an empty engine. `step` is that of the last one.

    `scheduled` is what the step under way runs. With pages it also has each used block's ref_cnt
    and hash, by number.
    """

    def __init__(self) -> None:
        self.step = 0
        self.scheduled: dict[str, events.Scheduled] = {}
        self.ref_cnts: dict[int, int] = {}
        self.hashes: dict[int, str] = {}
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._said: tuple[int, ...] | None = None  # the free queue, if the trace has it
        self._waiting: list[str] = []
        self._running: list[str] = []
        self._requests: dict[str, RequestState] = {}

    @property
    def state(self) -> EngineState:
        """What the events so far have led to."""
        return EngineState(tuple(self._waiting), tuple(self._running), dict(self._requests))

    def free_queue(self, num_blocks: int) -> tuple[int, ...]:
        """The free ones of so many blocks, as they are taken: those that can be found come last.

        Where the trace has the pool's own queue, it is that one, whatever its rule is.
        """
        if self._said is not None:
            return self._said
        fresh = [block for block in range(num_blocks) if block not in self.ref_cnts]
        nameless = [block for block in self._freed if block not in self.hashes]
        return (*nameless, *fresh, *(block for block in self._freed if block in self.hashes))

    def apply(self, event: Event) -> None:
        """One event more. ValueError for one that cannot follow what was before it."""
        self.step = event.step
        try:
            self._any(event)
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"{event} cannot follow the events before it: {error}") from error

    def _any(self, event: Event) -> None:
        match event:
            case events.StepBegan():
                self.scheduled.clear()  # of a step that was broken off
            case events.StepEnded():
                for request_id in list(self.scheduled):
                    self._commit(request_id)
            case events.Added(request_id=request_id, prompt_token_ids=prompt):
                self._requests[request_id] = RequestState("waiting", len(prompt), prompt, 0, ())
                place = len(self._waiting) if event.place is None else event.place
                self._waiting.insert(place, request_id)
            case events.FreeQueue(blocks=blocks):
                self._said = blocks
            case RequestEvent():
                if event.request_id not in self._requests:
                    raise ValueError("this request was never added")
                self._apply(event)

    def _apply(self, event: RequestEvent) -> None:
        request_id = event.request_id
        request = self._requests[request_id]
        match event:
            case events.Admitted(num_cached=num_cached, cached_slots=slots):
                self._check_known(request, num_cached)
                self._waiting.remove(request_id)
                self._running.append(request_id)
                request = request._replace(
                    status="running", num_computed_tokens=num_cached, slots=slots
                )
            case events.Scheduled():
                self._check_known(request, event.first_position + len(event.slots))
                self.scheduled[request_id] = event
            case events.Preempted():
                self._running.remove(request_id)
                self._waiting.insert(0, request_id)
                self.scheduled.pop(request_id, None)
                request = request._replace(status="preempted", num_computed_tokens=0, slots=())
            case events.TokenSampled(token_id=token_id):
                self._commit(request_id)
                request = self._requests[request_id]
                request = request._replace(token_ids=(*request.token_ids, token_id))
            case events.Finished(reason=reason):
                for queue in (self._waiting, self._running):
                    if request_id in queue:
                        queue.remove(request_id)
                self.scheduled.pop(request_id, None)
                request = request._replace(status=ENDED.get(reason, "finished"), slots=())
            case events.RowTaken(row=row):
                request = request._replace(table=(row,))
            case events.CellsTaken(first_position=first, cells=cells):
                request = request._replace(table=request.table[:first] + cells)
            case events.CellsShared(cells=cells):
                request = request._replace(table=cells)
            case events.RowFreed() | events.CellsFreed():
                request = request._replace(table=())
            case events.BlockTaken(block=block) | events.BlockShared(block=block):
                self._hold(block, isinstance(event, events.BlockTaken))
                request = request._replace(table=(*request.table, block))
            case events.BlockFreed(block=block):
                self._let_go(block)
                request = request._replace(table=tuple(b for b in request.table if b != block))
            case events.BlockCopied():
                request = self._copied(event, request)
            case events.BlockCached(block=block, hash=hash_):
                self.hashes[block] = hash_
            case events.BlockForgotten(block=block):
                del self.hashes[block]
        self._requests[request_id] = request

    def _check_known(self, request: RequestState, num_tokens: int) -> None:
        if num_tokens > len(request.token_ids):
            raise ValueError(f"{num_tokens} tokens of a request that has {len(request.token_ids)}")

    def _copied(self, event: events.BlockCopied, request: RequestState) -> RequestState:
        self._hold(event.block, True)
        self._let_go(event.source)
        table = tuple(event.block if b == event.source else b for b in request.table)
        kept = len(request.slots) - len(event.slots)  # below 0 for a fork: none counts yet
        slots = request.slots[:kept] + event.slots if kept >= 0 else request.slots
        return request._replace(table=table, slots=slots)

    def _hold(self, block: int, is_new: bool) -> None:
        self._said = None
        self.ref_cnts[block] = self.ref_cnts.get(block, 0) + 1
        self._freed.pop(block, None)
        if is_new:
            self.hashes.pop(block, None)

    def _let_go(self, block: int) -> None:
        self._said = None
        self.ref_cnts[block] -= 1
        if self.ref_cnts[block] == 0:
            self._freed[block] = None
            if block not in self.hashes:
                self._freed.move_to_end(block, last=False)

    def _commit(self, request_id: str) -> None:
        """The forward has run what was scheduled for the request."""
        event = self.scheduled.pop(request_id, None)
        if event is not None:
            request = self._requests[request_id]
            self._requests[request_id] = request._replace(
                num_computed_tokens=event.first_position + len(event.slots),
                slots=request.slots[: event.first_position] + event.slots,
            )


def replay(trace_events: Iterable[Event]) -> EngineState:
    """The state after all of these events."""
    run = Replay()
    for event in trace_events:
        run.apply(event)
    return run.state


@dataclass(frozen=True, slots=True)
class Step:
    """One step that ran: its forward ran what is `scheduled`, between `planned` and `after`.

    `before`: when its planning began; `planned`: while the forward runs, so nothing of it counts
    yet. `planning` has all events since the step before it ended, those of a plan that was broken
    off included; `results` has those from the forward on. Times are seconds on the engine's clock.
    A request ran `len(scheduled[name].slots)` tokens; it is over where it is in `planned.requests`
    and neither in `planned.waiting` nor in `planned.running`.
    """

    number: int
    began: float
    ended: float
    before: EngineState
    planned: EngineState
    after: EngineState
    scheduled: Mapping[str, events.Scheduled]
    planning: tuple[Event, ...]
    results: tuple[Event, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """All that led to it and came of it. Those of all steps are the trace, but for its tail."""
        return self.planning + self.results

    @property
    def num_tokens(self) -> int:
        """Tokens that its forward ran."""
        return sum(len(event.slots) for event in self.scheduled.values())

    def by_request(self, kind: type[Kind]) -> dict[str, Kind]:
        """Request -> its last event of this kind, in the order in which they came."""
        return {event.request_id: event for event in self.events if isinstance(event, kind)}


def history(trace: Trace) -> Iterator[Step]:
    """Each step that ran to its end. ValueError for one that ended and was never planned."""
    if not isinstance(trace, Trace):
        raise ValueError(
            "what an engine did is in its trace: run = Recorder() of tutorial_engine.trace, "
            f"LLM(..., trace=run), generate, and then give run.trace(); got {type(trace).__name__}"
        )
    run, first = Replay(), 0  # the first event that led to this step
    began, before = 0.0, run.state
    closed: tuple[int, EngineState, dict[str, events.Scheduled]] | None = None
    for end, event in enumerate(trace.events, 1):
        if isinstance(event, events.StepBegan):
            began, before, closed = event.time, run.state, None
        run.apply(event)
        if isinstance(event, events.Planned):
            closed = end, run.state, dict(run.scheduled)
        elif isinstance(event, events.StepEnded):
            if closed is None:
                raise ValueError(f"step {event.step} of the trace ended and was never planned")
            middle, planned, scheduled = closed
            planning, results = trace.events[first:middle], trace.events[middle:end]
            times = event.step, began, event.time
            yield Step(*times, before, planned, run.state, scheduled, planning, results)
            first, closed = end, None
