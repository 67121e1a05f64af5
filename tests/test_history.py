"""From events back to queues, tokens and slots: by hand, and equal to the live scheduler."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Toy

from tutorial_engine.trace.events import (
    Added,
    Admitted,
    EngineState,
    Event,
    Finished,
    Planned,
    Preempted,
    Recorder,
    RowFreed,
    RowTaken,
    Scheduled,
    StepBegan,
    StepEnded,
    TokenSampled,
    Trace,
)
from tutorial_engine.trace.history import Replay, history, replay

# a: prompt 1 2 3 in row 0 (slots 0 ..), b: prompt 4 5 in row 1 (slots 10 ..)
A, B = Added(0, 0.0, "a", (1, 2, 3), 8, 0.0), Added(0, 0.0, "b", (4, 5), 8, 0.0)
BOTH_RUN: list[Event] = [
    A,
    B,
    StepBegan(0, 0.0),
    RowTaken(0, 0.0, "a", 0),
    Admitted(0, 0.0, "a", 0),
    Scheduled(0, 0.0, "a", 0, (0, 1, 2)),
    RowTaken(0, 0.0, "b", 1),
    Admitted(0, 0.0, "b", 0),
    Scheduled(0, 0.0, "b", 0, (10,)),
    Planned(0, 0.0),
    TokenSampled(0, 1.0, "a", 7),
    StepEnded(0, 1.0, 4),
]
A_AGAIN, B_AGAIN = Scheduled(1, 1.0, "a", 3, (3,)), Scheduled(1, 1.0, "b", 1, (11,))


def step(number: int, *planning: Event, results: Sequence[Event] = ()) -> list[Event]:
    begin: list[Event] = [StepBegan(number, float(number)), *planning]
    return [*begin, Planned(number, number + 0.5), *results, StepEnded(number, number + 1.0, 1)]


SECOND = step(1, A_AGAIN, results=[TokenSampled(1, 2.0, "a", 8)])
RESUMED = [
    *step(1, RowFreed(1, 1.0, "b", 1), Preempted(1, 1.0, "b"), A_AGAIN),
    *step(
        2,
        RowTaken(2, 2.0, "b", 2),
        Admitted(2, 2.0, "b", 0),
        Scheduled(2, 2.0, "b", 0, (20, 21)),
        results=[TokenSampled(2, 3.0, "b", 9)],
    ),
]
ABORTED = [RowFreed(1, 1.5, "b", 1), Finished(1, 1.5, "b", "abort", None)]


@pytest.mark.parametrize(
    "event",
    [
        Admitted(0, 0.0, "x", 0),
        Scheduled(0, 0.0, "x", 0, (1,)),
        TokenSampled(0, 0.0, "x", 1),
        Finished(0, 0.0, "x", "stop", None),
        RowTaken(0, 0.0, "x", 0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_request_that_was_never_added_is_refused(event: Event) -> None:
    run = Replay()
    run.apply(A)
    early = run.state
    with pytest.raises(ValueError, match=r"'x'.* never added"):
        run.apply(event)
    for one in BOTH_RUN[1:]:
        run.apply(one)
    assert early == replay([A]) != run.state, "a state does not change when the replay goes on"


# -- step by step ---------------------------------------------------------------------------------


def test_a_step_has_the_state_before_planning_at_the_forward_and_after_it() -> None:
    found = list(history(Trace({}, (*BOTH_RUN, *RESUMED, StepBegan(3, 3.0)))))
    assert [(one.number, one.began, one.ended) for one in found] == [
        (0, 0.0, 1.0),
        (1, 1.0, 2.0),
        (2, 2.0, 3.0),
    ]
    first, second, third = found
    assert first.before == replay(BOTH_RUN[:2]) and first.planned == replay(BOTH_RUN[:9])
    assert first.after == second.before == replay(BOTH_RUN)
    assert second.planned.waiting == second.after.waiting == third.before.waiting == ("b",)
    assert third.planned.requests["b"].num_computed_tokens == 0
    assert list(first.scheduled) == ["a", "b"] and list(second.scheduled) == ["a"]
    assert (first.num_tokens, third.num_tokens) == (4, 2)
    assert second.by_request(Preempted) == {"b": Preempted(1, 1.0, "b")}
    assert not first.by_request(Preempted) and list(first.by_request(Added)) == ["a", "b"]


def test_events_belong_to_the_step_that_they_led_to() -> None:
    broken = [StepBegan(1, 1.0), B_AGAIN, Planned(1, 1.0), *ABORTED]
    events = (*BOTH_RUN, *broken, *SECOND, Finished(2, 2.0, "a", "abort", None))
    first, second = history(Trace({}, events))
    assert first.results == (TokenSampled(0, 1.0, "a", 7), StepEnded(0, 1.0, 4))
    assert second.planning == (*broken, StepBegan(1, 1.0), A_AGAIN, Planned(1, 1.5))
    assert list(second.scheduled) == ["a"] and list(second.by_request(Finished)) == ["b"]
    assert second.before == replay([*BOTH_RUN, *broken])
    assert (*first.events, *second.events) == events[:-1]


def test_a_step_that_was_never_planned_is_refused() -> None:
    events = tuple(event for event in BOTH_RUN if not isinstance(event, Planned))
    with pytest.raises(ValueError, match="step 0 of the trace ended and was never planned"):
        list(history(Trace({}, events)))
    begun_again = (*BOTH_RUN[:-2], StepBegan(0, 0.5), StepEnded(0, 1.0, 4))
    with pytest.raises(ValueError, match="never planned"):
        list(history(Trace({}, begun_again)))


WORKLOADS = st.fixed_dictionaries(
    {
        "requests": st.lists(
            st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 6)),
            min_size=1,
            max_size=6,
        ),  # prompt, outputs, steps before it comes
        "slots": st.integers(16, 40),
        "whole": st.booleans(),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 24),
        "long_prefill_token_threshold": st.none() | st.integers(1, 5),
        "enable_chunked_prefill": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None)
@given(WORKLOADS)
def test_a_replay_equals_the_live_scheduler_at_every_step(work: dict[str, Any]) -> None:
    """With preemption and cache hits, which rows never have: the scheduler tests' memory does."""
    work, recorder = dict(work), Recorder()
    lens = [prompt_len for prompt_len, _, _ in work["requests"]]
    work["hits"] = {chr(ord("a") + i): min(n - 1, i) for i, n in enumerate(lens)}
    to_come = sorted(enumerate(work.pop("requests")), key=lambda pair: pair[1][2])
    if not work["enable_chunked_prefill"]:
        work["max_num_batched_tokens"] += 9
    toy = Toy(recorder=recorder, **work)
    live: list[tuple[EngineState, EngineState, EngineState]] = []
    while to_come or toy.scheduler.has_unfinished:
        while to_come and (to_come[0][1][2] <= len(live) or not toy.scheduler.has_unfinished):
            i, (prompt_len, max_tokens, _) = to_come.pop(0)
            toy.add(chr(ord("a") + i), prompt_len, max_tokens)
        if len(live) % 5 == 2:
            toy.schedule()  # a step that is broken off before its forward
        if len(live) % 7 == 3 and toy.scheduler.waiting:
            toy.scheduler.abort(toy.scheduler.waiting[-1])
            if not toy.scheduler.has_unfinished:
                break
        before = toy.scheduler.state()
        scheduled = toy.schedule()
        planned = toy.scheduler.state()
        sampled = toy.forward(scheduled)
        if len(live) % 6 == 4:
            toy.scheduler.abort(scheduled[0].request)  # while the step is under way
        toy.update(scheduled, sampled)
        live.append((before, planned, toy.scheduler.state()))
    trace = Trace.from_json(recorder.trace().to_json())
    found = [(one.before, one.planned, one.after) for one in history(trace)]
    assert [tuple(state.unfinished() for state in states) for states in found] == live
    last = replay(trace.events).requests
    assert {name: its.status for name, its in last.items()} == {
        name: request.status.value for name, request in toy.requests.items()
    }
    tail = trace.events[sum(len(one.events) for one in history(trace)) :]
    assert (*chain(*(one.events for one in history(trace))), *tail) == trace.events


@pytest.mark.parametrize(
    "event",
    [
        Preempted(0, 0.0, "a"),  # it never ran
        Scheduled(0, 0.0, "a", 10**15, (3,)),
        Admitted(0, 0.0, "a", 4),
        RowTaken(0, 0.0, "never added", 1),
    ],
)
def test_events_that_cannot_follow_each_other_are_named(event: Event) -> None:
    with pytest.raises(ValueError, match=rf"{type(event).__name__}\(.*cannot follow the events"):
        list(history(Trace({}, (A, B, event))))
