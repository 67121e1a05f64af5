"""Introduced in notebook 03. What the scheduler explorer shows: a trace and a step, as facts.

Knows events, queues and why somebody waits, and says it in a sentence; draws nothing. Steps are
counted from 0, as in the trace.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.history import EngineState, Replay, replay
from tutorial_engine.viz.trace_rows import Life, Rows, Share, rows

POLICIES = {  # name of the scheduler class -> how it is called
    "Scheduler": "one rule",
    "PrefillFirst": "prefill first",
    "StaticBatching": "static batching",
    "OneByOne": "one by one",
}


class Step(NamedTuple):
    """One forward. `state` is the engine's while it runs: planned, nothing counted yet.

    `scheduled` in the planned order; `sampled` request -> its new token; `ended` request -> why.
    """

    number: int
    state: EngineState
    scheduled: Mapping[str, events.Scheduled] = {}
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    sampled: Mapping[str, int] = {}
    ended: Mapping[str, str] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward runs."""
        return sum(len(event.slots) for event in self.scheduled.values())

    def to_run(self, name: str) -> int:
        """Tokens of a request that are known and not computed when the forward begins."""
        request = self.state.requests[name]
        return len(request.token_ids) - request.num_computed_tokens


def steps(trace: Trace) -> list[Step]:
    """All steps that ran to their end."""
    run, found = Replay(), list[Step]()
    planned: EngineState | None = None  # the state in which the forward under way runs
    notes: dict[type[events.Event], dict[str, Any]] = {}
    for event in trace.events:
        if isinstance(event, events.StepBegan):
            planned = None
            notes.pop(events.Scheduled, None)  # of a step that was broken off; the rest holds
        elif planned is None and events.Scheduled in notes and isinstance(event, _RESULTS):
            planned = run.state
        if isinstance(event, events.RequestEvent):
            notes.setdefault(type(event), {})[event.request_id] = event
        run.apply(event)
        if isinstance(event, events.StepEnded):
            assert planned is not None, "a step that ended has run something"
            found.append(_step(len(found), planned, notes))
            notes = {}
    return found


# no plan goes on after these; what is added within a step are the samples of a prompt that is done
_RESULTS = (events.Added, events.TokenSampled, events.Finished, events.StepEnded)


def _step(number: int, state: EngineState, notes: Mapping[Any, Mapping[str, Any]]) -> Step:
    return Step(
        number,
        state,
        scheduled=notes[events.Scheduled],
        admitted=tuple(notes.get(events.Admitted, ())),
        preempted=tuple(notes.get(events.Preempted, ())),
        sampled={name: e.token_id for name, e in notes.get(events.TokenSampled, {}).items()},
        ended={name: e.reason for name, e in notes.get(events.Finished, {}).items()},
    )


@dataclass(frozen=True)
class SchedulerRun:
    """A recorded run, and how its tokens are written. Facts for any step of it."""

    trace: Trace
    labels: Mapping[int, str]  # token id -> how it is written

    @cached_property
    def steps(self) -> list[Step]:
        """One for each forward."""
        return steps(self.trace)

    @cached_property
    def rows(self) -> Rows:
        """What each request did in each step."""
        return rows(self.trace)

    @cached_property
    def lives(self) -> dict[str, Life]:
        """Request id -> its life, in the order in which they came."""
        return {life.request_id: life for life in self.rows.lives}

    @cached_property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Request id -> prompt and output as they were at the end."""
        requests = replay(self.trace.events).requests
        return {name: request.token_ids for name, request in requests.items()}

    @property
    def last(self) -> int:
        """The number of the last step."""
        return len(self.steps) - 1

    @property
    def budget(self) -> int:
        """max_num_batched_tokens."""
        return int(self.trace.settings["max_num_batched_tokens"] or 0)

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once: rows of the cache."""
        return int(self.trace.settings["max_num_seqs"] or 0)

    @property
    def max_len(self) -> int:
        """Slots of a row."""
        return int(self.trace.settings["max_model_len"] or 0)

    @property
    def policy(self) -> str:
        """What the policy is called."""
        name = str(self.trace.settings["policy"])
        return POLICIES.get(name, name)

    def share(self, name: str, step: int) -> Share | None:
        """What a step did with a request; None when it was not there."""
        return self.lives[name].shares.get(step)

    def came(self, name: str) -> int:
        """The first step that found it there."""
        return min(self.lives[name].shares, default=self.last + 1)

    def first_token(self, name: str) -> int | None:
        """The step that gave it its first token."""
        got = self.lives[name].token_steps
        return got[0] if got else None

    def ttft(self, name: str, step: int) -> int | None:
        """Forwards from its arrival to its first token; None when it has none after the step."""
        first = self.first_token(name)
        return None if first is None or first > step else first - self.came(name) + 1

    def to_come(self, step: int) -> tuple[str, ...]:
        """Requests that are not there yet while the step runs."""
        return tuple(name for name in self.lives if name not in self.steps[step].state.requests)

    def over(self, step: int) -> dict[str, str]:
        """Requests that were over before the step -> why."""
        return {name: why for s in self.steps[:step] for name, why in s.ended.items()}

    def doing(self, kind: str, step: int) -> list[str]:
        """The requests that do this in the step, in the order in which they came."""
        shares = ((name, self.share(name, step)) for name in self.lives)
        return [name for name, share in shares if share is not None and share.kind == kind]

    def why_waiting(self, step: int) -> str:
        """Why nobody else of the queue was admitted; empty when nobody waits."""
        now, policy = self.steps[step], self.trace.settings["policy"]
        if not now.state.waiting:
            return ""
        running = now.state.running
        earlier = [name for name in running if name not in now.admitted]
        if now.preempted:
            return "a step that preempts admits nobody"
        if policy == "OneByOne":
            return f"one at a time, first {listed(running)}"
        if policy == "StaticBatching" and earlier:
            are = "is" if len(running) == 1 else "are"
            return f"nobody joins before {listed(running)} {are} done"
        if len(running) >= self.max_num_seqs:
            rows = f"all {self.max_num_seqs} rows are" if self.max_num_seqs > 1 else "the row is"
            return f"{rows} taken (max_num_seqs)"
        left = self.budget - now.num_tokens
        if not left:
            return "no budget is left"
        first = now.state.waiting[0]
        if now.to_run(first) > left:
            return f"{first} must run its {now.to_run(first)} at once, {left} of the budget is left"
        return "no memory is free"

    def why_stalled(self) -> str:
        """Why a running request gets nothing. The one rule never does that."""
        first = self.trace.settings["policy"] == "PrefillFirst"
        return "this step only prefills" if first else "the policy gave nothing"

    def facts(self, step: int) -> list[str]:
        """Who waits and who stalls, and why, and who is done: a sentence each."""
        now, found = self.steps[step], []
        waiting, stalled = now.state.waiting, self.doing("stalls", step)
        if waiting:
            found.append(f"{listed(waiting)} wait{_s(waiting)}: {self.why_waiting(step)}")
        if stalled:
            found.append(f"{listed(stalled)} stall{_s(stalled)}: {self.why_stalled()}")
        ended = list(now.ended)
        if ended:
            why = listed(dict.fromkeys(now.ended.values()))
            found.append(f"{listed(ended)} end{_s(ended)} with this step ({why})")
        return found

    def ran(self, name: str, step: int) -> str:
        """What a step ran of a request: "B prefill 6 (1 left, no token yet)"."""
        share, now = self.share(name, step), self.steps[step]
        assert share is not None and name in now.scheduled, f"step {step} ran nothing of {name}"
        left = now.to_run(name) - share.num_tokens
        rest = f" ({left} left, no token yet)" if left else ""
        return f"{name} {share.kind} {share.num_tokens}{rest}"

    def label(self, name: str, position: int) -> str:
        """How a token of a request is written."""
        return self.labels[self.tokens[name][position]]

    def token_kinds(self, name: str, step: int) -> list[str]:
        """For each token of a request that is known by the end of a step, what has become of it.

        "cached" before the step, "run" in it, "known" and not run, "sampled" by it, or "gone".
        """
        now = self.steps[step]
        request, event = now.state.requests[name], now.scheduled.get(name)
        known = len(request.token_ids)
        if name in self.over(step):
            return ["gone"] * known
        done, count = request.num_computed_tokens, len(event.slots) if event else 0
        kinds = ["cached"] * done + ["run"] * count + ["known"] * (known - done - count)
        return kinds + ["sampled"] * (name in now.sampled)

    def caption(self, step: int) -> str:
        """One sentence: who ran what, who waits and why, who is done, and time to first token."""
        now, start = self.steps[step], f"Step {step} of 0–{self.last}"
        ran = ", ".join(self.ran(name, step) for name in now.scheduled)
        parts = [
            f"{start}, {self.policy}: one forward runs {now.num_tokens} of {self.budget} budget "
            f"tokens for {requests(len(now.scheduled))}: {ran}"
        ]
        parts += self.facts(step)
        if self.to_come(step):
            late = [f"{name} (before step {self.came(name)})" for name in self.to_come(step)]
            parts.append(f"still to come: {listed(late)}")
        times = ((name, self.ttft(name, step)) for name in now.state.requests)
        said = [f"{name} {'not yet' if n is None else n}" for name, n in times]
        return "; ".join([*parts, f"TTFT in steps: {', '.join(said)}"]) + "."


def listed(names: Iterable[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last


def requests(n: int) -> str:
    """`1 request`, `2 requests`."""
    return f"{n} request{'s' * (n != 1)}"


def _s(names: Sequence[str]) -> str:
    """The s of the verb: `A waits`, `A and B wait`."""
    return "s" if len(names) == 1 else ""
