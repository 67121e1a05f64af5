"""A recorded run: what each request did in each step, when, and with which tokens.

Knows events and counts; draws nothing and writes no sentences. All pictures of a run start here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Setting, Trace
from tutorial_engine.trace.history import ENDED, Step, history, replay
from tutorial_engine.viz.words import POLICIES


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


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run: who, when, which tokens. Views, players and captions ask it.

    `steps` has one for each forward; `lives` are the requests in the order in which they were
    added.
    """

    trace: Trace
    labels: Mapping[int, str]  # token id -> how it is written; those that are missing by number
    steps: tuple[Step, ...]
    lives: tuple[Life, ...]

    @classmethod
    def of(cls, trace: Trace, labels: Mapping[int, str] | None = None) -> Self:
        """Read a trace. ValueError when no step of it ran to its end: there is nothing to draw."""
        steps = tuple(history(trace))
        if not steps:
            raise ValueError(
                "the trace has no finished step: run the engine before you draw what it did"
            )
        return cls(trace, labels or {}, steps, _lives(trace, steps))

    # -- the engine's limits: 0 or empty where the trace does not say them ------------------------

    @property
    def settings(self) -> Mapping[str, Setting]:
        """What the engine was set to."""
        return self.trace.settings

    @property
    def budget(self) -> int:
        """max_num_batched_tokens."""
        return int(self.settings.get("max_num_batched_tokens") or 0)

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once: rows of the cache."""
        return int(self.settings.get("max_num_seqs") or 0)

    @property
    def max_len(self) -> int:
        """Slots of a row."""
        return int(self.settings.get("max_model_len") or 0)

    @property
    def policy(self) -> str:
        """What the policy is called."""
        name = str(self.settings.get("policy", ""))
        return POLICIES.get(name, name)

    # -- the whole run ----------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The number of the last step."""
        return len(self.steps) - 1

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

    # -- requests ---------------------------------------------------------------------------------

    @cached_property
    def _by_name(self) -> dict[str, Life]:
        return {life.request_id: life for life in self.lives}

    @property
    def names(self) -> tuple[str, ...]:
        """All requests, in the order in which they came."""
        return tuple(self._by_name)

    def life(self, name: str) -> Life:
        """The last request of that id. ValueError, naming those that there are, for none."""
        if name not in self._by_name:
            known = ", ".join(life.request_id for life in self.lives)
            raise ValueError(f"the trace has no request {name!r}, only: {known}")
        return self._by_name[name]

    @cached_property
    def forks(self) -> dict[str, str]:
        """Request -> the one that it was forked from."""
        forked = (event for event in self.trace.events if isinstance(event, events.Forked))
        return {event.request_id: event.parent_id for event in forked}

    def origin(self, name: str) -> str:
        """The request that it was forked from, or the request itself."""
        return self.forks.get(name, name)

    def came(self, name: str) -> int:
        """The first step that found it there."""
        return min(self.life(name).shares, default=self.last + 1)

    def first_token(self, name: str) -> int | None:
        """The step that gave it its first token."""
        return next(iter(self.life(name).token_steps), None)

    # -- tokens -----------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Request -> prompt and output as they were at the end."""
        requests = replay(self.trace.events).requests
        return {name: request.token_ids for name, request in requests.items()}

    def label(self, token_id: int) -> str:
        """How a token is written."""
        return self.labels.get(token_id, str(token_id))

    def word(self, name: str, position: int) -> str:
        """How the token is written that a request has there."""
        return self.label(self.tokens[name][position])

    # -- a step -----------------------------------------------------------------------------------

    def share(self, name: str, step: int) -> Share | None:
        """What a step did with a request; None when it was not there."""
        return self.life(name).shares.get(step)

    def doing(self, kind: str, step: int) -> list[str]:
        """The requests that do this in the step, in the order in which they came."""
        shares = ((name, self.share(name, step)) for name in self.names)
        return [name for name, share in shares if share is not None and share.kind == kind]

    def to_run(self, name: str, step: int) -> int:
        """Tokens of a request that are known and not computed when the forward begins."""
        request = self.steps[step].planned.requests[name]
        return len(request.token_ids) - request.num_computed_tokens

    def to_come(self, step: int) -> tuple[str, ...]:
        """Requests that are not there yet while the step runs."""
        return tuple(name for name in self.names if name not in self.steps[step].planned.requests)

    def ended(self, step: int) -> dict[str, str]:
        """Requests that ended with the step, or right before it -> why."""
        ended = self.steps[step].by_request(events.Finished)
        return {name: event.reason for name, event in ended.items()}

    def over(self, step: int) -> dict[str, str]:
        """Requests that are over when the step has ended -> why. One may come again."""
        return self._over[step]

    @cached_property
    def _over(self) -> list[dict[str, str]]:
        found, over = list[dict[str, str]](), dict[str, str]()
        for number, step in enumerate(self.steps):
            here, ended = step.after.unfinished().requests, over | self.ended(number)
            over = {name: why for name, why in ended.items() if name not in here}
            found.append(over)
        return found


def _lives(trace: Trace, steps: Iterable[Step]) -> tuple[Life, ...]:
    """Each request that was added, with what each step did with it."""
    lives, now, num_read = list[Life](), dict[str, Life](), 0
    for step in steps:
        _note(step.planning, lives, now)
        preempted = step.by_request(events.Preempted)
        for name in (*step.before.waiting, *step.before.running):
            now[name].shares[step.number] = _share(step, now[name], name in preempted)
        _note(step.results, lives, now)
        num_read += len(step.events)
    _note(trace.events[num_read:], lives, now)
    return tuple(lives)


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
