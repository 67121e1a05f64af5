"""Introduced in notebook 03. From a trace back to the engine's state, at any event or step.

Knows events only; needs no engine and no model. Tested equal to the live engine at every step.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tutorial_engine.trace import events as trace
from tutorial_engine.trace.events import Event, RequestEvent, Trace


class RequestState(NamedTuple):
    """One request as a step left it. `slots` by position; `table`: its row, or its blocks."""

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
        known = {*self.waiting, *self.running}
        return self._replace(requests={k: r for k, r in self.requests.items() if k in known})


class Replay:
    """Applies events one by one to an empty engine. `step` is that of the last one.

    With pages it also has each used block's ref_cnt and hash, by number, and those that are free
    again, in `free_queue`: they are taken in this order, after those that were never used.
    """

    def __init__(self) -> None:
        self.step = 0
        self.ref_cnts: dict[int, int] = {}
        self.hashes: dict[int, str] = {}
        self.free_queue: dict[int, None] = {}
        self._waiting: list[str] = []
        self._running: list[str] = []
        self._requests: dict[str, RequestState] = {}
        self._scheduled: dict[str, trace.Scheduled] = {}  # of the step that is under way

    @property
    def state(self) -> EngineState:
        """What the events so far have led to."""
        return EngineState(tuple(self._waiting), tuple(self._running), dict(self._requests))

    def apply(self, event: Event) -> None:
        """One event more. ValueError for a request that was never added."""
        self.step = event.step
        match event:
            case trace.StepBegan():
                self._scheduled.clear()
            case trace.StepEnded():
                for request_id in list(self._scheduled):
                    self._commit(request_id)
            case trace.Added():
                prompt = event.prompt_token_ids
                self._requests[event.request_id] = RequestState(
                    "waiting", len(prompt), prompt, 0, ()
                )
                place = len(self._waiting) if event.place is None else event.place
                self._waiting.insert(place, event.request_id)
            case RequestEvent():
                if event.request_id not in self._requests:
                    raise ValueError(f"{event} is about a request that was never added")
                self._apply(event)

    def _apply(self, event: RequestEvent) -> None:
        request_id = event.request_id
        request = self._requests[request_id]
        match event:
            case trace.Admitted(num_cached=found, cached_slots=slots):
                self._waiting.remove(request_id)
                self._running.append(request_id)
                request = request._replace(status="running", num_computed_tokens=found, slots=slots)
            case trace.Scheduled():
                self._scheduled[request_id] = event
            case trace.Preempted():
                self._running.remove(request_id)
                self._waiting.insert(0, request_id)
                request = request._replace(status="preempted", num_computed_tokens=0, slots=())
            case trace.TokenSampled(token_id=token_id):
                self._commit(request_id)
                request = self._requests[request_id]
                request = request._replace(token_ids=(*request.token_ids, token_id))
            case trace.Finished(reason=reason):
                for queue in (self._waiting, self._running):
                    if request_id in queue:
                        queue.remove(request_id)
                self._scheduled.pop(request_id, None)
                request = request._replace(status=ENDED.get(reason, "finished"), slots=())
            case trace.RowTaken(row=row):
                request = request._replace(table=(row,))
            case trace.RowFreed():
                request = request._replace(table=())
            case trace.CellsTaken(first_position=first, cells=cells):
                request = request._replace(table=request.table[:first] + cells)
            case trace.CellsShared(cells=cells):
                request = request._replace(table=cells)
            case trace.CellsFreed():
                request = request._replace(table=())
            case trace.BlockTaken() | trace.BlockShared() | trace.BlockFreed():
                request = request._replace(table=self._table(event, request.table))
            case trace.BlockCopied():
                request = self._copied(event, request)
            case trace.BlockCached(block=block, hash=hash_):
                self.hashes[block] = hash_
        self._requests[request_id] = request

    def _table(
        self,
        event: trace.BlockTaken | trace.BlockShared | trace.BlockFreed,
        table: tuple[int, ...],
    ) -> tuple[int, ...]:
        """The table after a block came to it, or went."""
        if not isinstance(event, trace.BlockFreed):
            self._hold(event.block, isinstance(event, trace.BlockTaken))
            return (*table, event.block)
        self._let_go(event.block)
        return tuple(block for block in table if block != event.block)

    def _copied(self, event: trace.BlockCopied, request: RequestState) -> RequestState:
        self._hold(event.block, True)
        self._let_go(event.source)
        table = tuple(event.block if b == event.source else b for b in request.table)
        kept = len(request.slots) - len(event.slots)  # below 0 for a fork: none counts yet
        slots = request.slots[:kept] + event.slots if kept >= 0 else request.slots
        return request._replace(table=table, slots=slots)

    def _hold(self, block: int, is_new: bool) -> None:
        self.ref_cnts[block] = self.ref_cnts.get(block, 0) + 1
        self.free_queue.pop(block, None)
        if is_new:
            self.hashes.pop(block, None)

    def _let_go(self, block: int) -> None:
        self.ref_cnts[block] -= 1
        if self.ref_cnts[block] == 0:
            self.free_queue[block] = None

    def _commit(self, request_id: str) -> None:
        """The forward has run what was scheduled for the request."""
        event = self._scheduled.pop(request_id, None)
        if event is not None:
            request = self._requests[request_id]
            self._requests[request_id] = request._replace(
                num_computed_tokens=event.first_position + len(event.slots),
                slots=request.slots[: event.first_position] + event.slots,
            )


ENDED = {"abort": "aborted", "error": "error"}  # reason -> status; the others are "finished"


def replay(events: Iterable[Event]) -> EngineState:
    """The state after all of these events."""
    run = Replay()
    for event in events:
        run.apply(event)
    return run.state


def states(trace_: Trace) -> Iterator[EngineState]:
    """The state at the end of each step, one after the other."""
    run = Replay()
    for event in trace_.events:
        run.apply(event)
        if isinstance(event, trace.StepEnded):
            yield run.state
