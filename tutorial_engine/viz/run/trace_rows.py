"""A trace as rows: what each request did in each step, and when.

Knows events and counts; draws nothing. All pictures of a run start here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Setting, Trace
from tutorial_engine.trace.history import ENDED, Step, history


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
    shares: dict[int, Share] = field(default_factory=dict)
    token_times: list[float] = field(default_factory=list)
    token_steps: list[int] = field(default_factory=list)
    first_scheduled: float | None = None
    finished: float | None = None
    end_step: int | None = None
    reason: str | None = None
    num_computed: int = 0  # the most tokens that ever were

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
        return "" if self.reason is None else ENDED.get(self.reason, f"finished · {self.reason}")


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
    steps, lives, now = tuple(history(trace)), list[Life](), dict[str, Life]()
    if not steps:
        raise ValueError(
            "the trace has no finished step: run the engine before you draw what it did"
        )
    for step in steps:
        _note(step.planning, lives, now)
        preempted = step.by_request(events.Preempted)
        for name in (*step.before.waiting, *step.before.running):
            now[name].shares[step.number] = _share(step, now[name], name in preempted)
        _note(step.results, lives, now)
    _note(trace.events[sum(len(step.events) for step in steps) :], lives, now)
    return Rows(trace.settings, steps, tuple(lives))


def _note(found: Iterable[events.Event], lives: list[Life], now: dict[str, Life]) -> None:
    """Who came, got tokens and ended. An id may come again: `now` has the life that it means."""
    for event in found:
        match event:
            case events.Added(request_id=name, prompt_token_ids=prompt):
                now[name] = Life(name, len(prompt), event.arrival)
                lives.append(now[name])
            case events.Scheduled(request_id=name):
                if now[name].first_scheduled is None:
                    now[name].first_scheduled = event.time
            case events.TokenSampled(request_id=name):
                now[name].token_times.append(event.time)
                now[name].token_steps.append(event.step)
            case events.Finished(request_id=name):
                life = now[name]
                life.finished, life.end_step, life.reason = event.time, event.step, event.reason


def _share(step: Step, life: Life, was_preempted: bool) -> Share:
    """What the step did with a request that was there when it began."""
    event = step.scheduled.get(life.request_id)
    if event is None:
        stalls = life.request_id in step.planned.running
        return Share("preempted" if was_preempted else "stalls" if stalls else "waits")
    first, num_tokens = event.first_position, len(event.slots)
    again = max(0, min(life.num_computed - first, num_tokens))
    life.num_computed = max(life.num_computed, first + num_tokens)
    kind = "decode" if first >= life.num_prompt_tokens else "prefill"
    return Share("recompute" if again else kind, num_tokens, first, again)
