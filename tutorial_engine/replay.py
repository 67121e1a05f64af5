"""Introduced in notebook 03. From a trace back to the engine's state, at any event or step.

Knows events only; needs no engine and no model. Tested equal to the live engine at every step.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tutorial_engine import trace
from tutorial_engine.trace import Event, RequestEvent, Trace


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
    """Applies events one by one to an empty engine. `step` is that of the last one."""

    def __init__(self) -> None:
        self.step = 0
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
                self._waiting.append(event.request_id)
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
        self._requests[request_id] = request

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
