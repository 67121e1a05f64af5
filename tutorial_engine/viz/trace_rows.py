"""Introduced in notebook 03. A trace as rows: what each request did in each step, and when.

Knows events and counts; draws nothing. All pictures of a run start here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Setting, Trace

ENDS = {"abort": "aborted", "error": "error"}  # reason -> word; the others "finished · reason"


class Step(NamedTuple):
    """A step that ran to its end: its number, its times in seconds, the tokens of its forward."""

    number: int
    began: float
    ended: float
    num_tokens: int


class Share(NamedTuple):
    """What one step did with one request.

    `kind`: "prefill", "decode", "recompute" (was computed before and lost), "waits" (in the queue),
    "stalls" (it runs, but got nothing), "preempted". `num_tokens` is 0 for the last three;
    `num_again` of them were run before.
    """

    kind: str
    num_tokens: int = 0
    first_position: int = 0
    num_again: int = 0


@dataclass
class Life:
    """One request from its arrival to its end. `shares` by step; `end_step` is the step it ended
    in, or before which it ended when nothing of it ran there.
    """

    request_id: str
    num_prompt_tokens: int
    arrival: float
    added: float
    shares: dict[int, Share] = field(default_factory=dict)
    token_times: list[float] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    first_scheduled: float | None = None
    finished: float | None = None
    end_step: int | None = None
    reason: str | None = None
    detail: int | str | None = None
    is_running: bool = False
    num_computed: int = 0  # the most that ever were

    @property
    def metrics(self) -> RequestMetrics:
        """Its times, the same that the engine counted."""
        return RequestMetrics(
            self.arrival, self.first_scheduled, tuple(self.token_times), self.finished
        )

    @property
    def ran(self) -> dict[int, Share]:
        """The steps that ran tokens of it."""
        return {step: share for step, share in self.shares.items() if share.num_tokens}

    @property
    def end_step_ran(self) -> bool:
        """Did its end come in end_step, and not between that step and the one before?"""
        return self.end_step in self.shares

    @property
    def ending(self) -> str:
        """How it ended, in words; empty while it has not."""
        return "" if self.reason is None else ENDS.get(self.reason, f"finished · {self.reason}")


class Rows(NamedTuple):
    """A whole run: steps, and requests in the order in which they were added."""

    settings: Mapping[str, Setting]
    steps: tuple[Step, ...]
    lives: tuple[Life, ...]

    @property
    def start(self) -> float:
        """When the run begins: its first arrival or step, seconds on the engine's clock."""
        return min([life.arrival for life in self.lives] + [step.began for step in self.steps])

    @property
    def end(self) -> float:
        """When its last step ended."""
        return max(step.ended for step in self.steps)

    @property
    def num_tokens(self) -> int:
        """Tokens that were run."""
        return sum(step.num_tokens for step in self.steps)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(len(life.token_times) for life in self.lives)

    def life(self, request_id: str) -> Life:
        """The last request of that id. ValueError, naming those that there are, for none."""
        found = [life for life in self.lives if life.request_id == request_id]
        if not found:
            known = ", ".join(life.request_id for life in self.lives)
            raise ValueError(f"the trace has no request {request_id!r}, only: {known}")
        return found[-1]


def rows(trace: Trace) -> Rows:
    """Read a trace. ValueError when no step of it ran to its end: there is nothing to draw."""
    reader = _Reader()
    for event in trace.events:
        reader.read(event)
    if not reader.steps:
        raise ValueError(
            "the trace has no finished step: run the engine before you draw what it did"
        )
    return Rows(trace.settings, tuple(reader.steps), tuple(reader.lives))


class _Reader:
    """Takes the events one by one. An id may come again when its request is over."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lives: list[Life] = []
        self._now: dict[str, Life] = {}  # id -> the one that has it now
        self._began = 0.0
        self._present: list[Life] = []  # when the step began
        self._planned: dict[str, events.Scheduled] = {}
        self._preempted: set[str] = set()

    def read(self, event: events.Event) -> None:
        """One event more."""
        match event:
            case events.StepBegan(time=time):
                self._began, self._planned = time, {}
                self._present = [life for life in self.lives if life.reason is None]
            case events.StepEnded():
                self._step(event)
            case events.Added():
                prompt = len(event.prompt_token_ids)
                life = Life(event.request_id, prompt, event.arrival, event.time)
                self._now[event.request_id] = life
                self.lives.append(life)
            case events.RequestEvent():
                self._one(event, self._now[event.request_id])

    def _one(self, event: events.RequestEvent, life: Life) -> None:
        match event:
            case events.Admitted():
                life.is_running = True
            case events.Scheduled():
                self._planned[event.request_id] = event
                if life.first_scheduled is None:
                    life.first_scheduled = event.time
            case events.Preempted():
                life.is_running = False
                self._preempted.add(event.request_id)
            case events.TokenSampled():
                life.token_times.append(event.time)
                life.token_steps.append(event.step)
            case events.Finished():
                life.finished, life.end_step = event.time, event.step
                life.reason, life.detail = event.reason, event.detail

    def _step(self, event: events.StepEnded) -> None:
        """The step counts now: give each request that was there its share."""
        self.steps.append(Step(event.step, self._began, event.time, event.num_tokens))
        for life in self._present:
            planned = self._planned.get(life.request_id)
            if planned is not None:
                life.shares[event.step] = _share(life, planned)
                end = planned.first_position + len(planned.slots)
                life.num_computed = max(life.num_computed, end)
            elif life.request_id in self._preempted:
                life.shares[event.step] = Share("preempted")
            else:
                life.shares[event.step] = Share("stalls" if life.is_running else "waits")
        self._preempted.clear()


def _share(life: Life, planned: events.Scheduled) -> Share:
    first, num_tokens = planned.first_position, len(planned.slots)
    kind = "decode" if first >= life.num_prompt_tokens else "prefill"
    again = max(0, min(life.num_computed - first, num_tokens))
    return Share("recompute" if again else kind, num_tokens, first, again)


def metrics_of(trace: Trace) -> dict[str, RequestMetrics]:
    """The times of every request of a trace, by id; equal to what the engine itself reports."""
    return {life.request_id: life.metrics for life in rows(trace).lives}
