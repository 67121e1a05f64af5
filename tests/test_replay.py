"""From events back to queues, tokens and slots: by hand, and equal to the live scheduler."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from test_scheduler import WORKLOADS, Toy

from tutorial_engine.trace.events import (
    Added,
    Admitted,
    Event,
    Finished,
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
from tutorial_engine.trace.history import EngineState, Replay, RequestState, replay, states

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
    TokenSampled(0, 1.0, "a", 7),
    StepEnded(0, 1.0, 4),
]
A_RAN = RequestState("running", 3, (1, 2, 3, 7), 3, (0, 1, 2), (0,))
B_RAN = RequestState("running", 2, (4, 5), 1, (10,), (1,))


def after(*events: Event, base: Sequence[Event] = BOTH_RUN) -> EngineState:
    return replay([*base, *events])


def test_no_events_are_an_empty_engine() -> None:
    assert replay([]) == EngineState((), (), {})


def test_the_queue_is_in_order_of_coming() -> None:
    state = replay([B, A])
    assert (state.waiting, state.running) == (("b", "a"), ())
    assert state.requests["a"] == RequestState("waiting", 3, (1, 2, 3), 0, ())


def test_what_is_scheduled_counts_when_the_step_ends() -> None:
    before_end = replay(BOTH_RUN[:-2])
    assert before_end.requests["a"] == RequestState("running", 3, (1, 2, 3), 0, (), (0,))
    assert before_end.requests["b"] == RequestState("running", 2, (4, 5), 0, (), (1,))
    assert replay(BOTH_RUN) == EngineState((), ("a", "b"), {"a": A_RAN, "b": B_RAN})


def test_a_token_says_that_the_forward_is_done_for_its_request() -> None:
    state = replay(BOTH_RUN[:-1])
    assert state.requests["a"] == A_RAN
    assert state.requests["b"].num_computed_tokens == 0, "b is not told of yet"


def test_a_second_step_goes_on_where_the_first_ended() -> None:
    state = after(
        StepBegan(1, 1.0),
        Scheduled(1, 1.0, "a", 3, (3,)),
        Scheduled(1, 1.0, "b", 1, (11,)),
        TokenSampled(1, 2.0, "a", 8),
        TokenSampled(1, 2.0, "b", 9),
        StepEnded(1, 2.0, 2),
    )
    assert state.requests == {
        "a": RequestState("running", 3, (1, 2, 3, 7, 8), 4, (0, 1, 2, 3), (0,)),
        "b": RequestState("running", 2, (4, 5, 9), 2, (10, 11), (1,)),
    }


def test_a_preempted_request_waits_at_the_front_with_its_tokens_and_no_slots() -> None:
    c = Added(1, 1.0, "c", (6,), 8, 0.0)
    state = after(c, StepBegan(1, 1.0), RowFreed(1, 1.0, "a", 0), Preempted(1, 1.0, "a"))
    assert (state.waiting, state.running) == (("a", "c"), ("b",))
    assert state.requests["a"] == RequestState("preempted", 3, (1, 2, 3, 7), 0, ())


def test_a_resumed_request_fills_its_new_slots_from_the_first() -> None:
    state = after(
        StepBegan(1, 1.0),
        RowFreed(1, 1.0, "b", 1),
        Preempted(1, 1.0, "b"),
        Scheduled(1, 1.0, "a", 3, (3,)),
        TokenSampled(1, 2.0, "a", 8),
        StepEnded(1, 2.0, 1),
        StepBegan(2, 2.0),
        Scheduled(2, 2.0, "a", 4, (4,)),
        RowTaken(2, 2.0, "b", 2),
        Admitted(2, 2.0, "b", 0),
        Scheduled(2, 2.0, "b", 0, (20, 21)),
        TokenSampled(2, 3.0, "a", 8),
        TokenSampled(2, 3.0, "b", 9),
        StepEnded(2, 3.0, 3),
    )
    assert (state.waiting, state.running) == ((), ("a", "b"))
    assert state.requests["b"] == RequestState("running", 2, (4, 5, 9), 2, (20, 21), (2,))


def test_a_step_that_was_broken_off_is_begun_again() -> None:
    """Ctrl-C in the forward: the next plan is another one, and only that one counts."""
    state = after(
        StepBegan(1, 1.0),
        Scheduled(1, 1.0, "a", 3, (3,)),
        Scheduled(1, 1.0, "b", 1, (11,)),
        StepBegan(1, 1.5),
        Scheduled(1, 1.5, "a", 3, (3,)),
        TokenSampled(1, 2.0, "a", 8),
        StepEnded(1, 2.0, 1),
    )
    assert state.requests["a"].num_computed_tokens == 4
    assert state.requests["b"] == B_RAN, "what the broken step had planned for b was never run"


def test_an_abort_in_the_middle_of_a_step_takes_all_and_counts_nothing() -> None:
    state = after(
        StepBegan(1, 1.0),
        Scheduled(1, 1.0, "a", 3, (3,)),
        Scheduled(1, 1.0, "b", 1, (11,)),
        RowFreed(1, 1.5, "b", 1),
        Finished(1, 1.5, "b", "abort", None),
        TokenSampled(1, 2.0, "a", 8),
        StepEnded(1, 2.0, 2),
    )
    assert (state.waiting, state.running) == ((), ("a",))
    assert state.requests["b"] == RequestState("aborted", 2, (4, 5), 1, ())
    assert state.requests["a"].num_computed_tokens == 4
    assert state.unfinished() == EngineState((), ("a",), {"a": state.requests["a"]})


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "finished"), ("length", "finished"), ("abort", "aborted"), ("error", "error")],
)
def test_what_is_over_is_in_no_queue_and_holds_nothing(reason: str, status: str) -> None:
    state = after(RowFreed(1, 1.0, "a", 0), Finished(1, 1.0, "a", reason, None))
    assert state.running == ("b",) and state.requests["a"].status == status
    assert state.requests["a"].slots == state.requests["a"].table == ()
    assert state.requests["a"].token_ids == (1, 2, 3, 7)
    assert state.unfinished() == EngineState((), ("b",), {"b": B_RAN})


def test_a_request_can_end_before_it_ever_ran() -> None:
    state = replay([A, B, Finished(0, 0.0, "a", "abort", None)])
    assert (state.waiting, state.requests["a"].status) == (("b",), "aborted")


def test_an_id_may_be_used_again_when_its_request_is_over() -> None:
    again = Added(1, 1.0, "a", (9,), 8, 1.0)
    state = after(RowFreed(1, 1.0, "a", 0), Finished(1, 1.0, "a", "length", None), again)
    assert state.waiting == ("a",)
    assert state.requests["a"] == RequestState("waiting", 1, (9,), 0, ())


@pytest.mark.parametrize(
    "event",
    [
        Admitted(0, 0.0, "x", 0),
        Scheduled(0, 0.0, "x", 0, (1,)),
        Preempted(0, 0.0, "x"),
        TokenSampled(0, 0.0, "x", 1),
        Finished(0, 0.0, "x", "stop", None),
        RowTaken(0, 0.0, "x", 0),
        RowFreed(0, 0.0, "x", 0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_request_that_was_never_added_is_refused(event: Event) -> None:
    run = Replay()
    run.apply(A)
    before = run.state
    with pytest.raises(ValueError, match=r"'x'.* never added"):
        run.apply(event)
    assert run.state == before


def test_a_state_does_not_change_when_the_replay_goes_on() -> None:
    run = Replay()
    run.apply(A)
    early = run.state
    for event in BOTH_RUN[1:]:
        run.apply(event)
    assert early == replay([A]) and run.step == 0
    run.apply(StepBegan(3, 9.0))
    assert run.step == 3


def test_there_is_a_state_per_step_that_ended() -> None:
    second = (StepBegan(1, 1.0), Scheduled(1, 1.0, "a", 3, (3,)), StepEnded(1, 2.0, 1))
    broken = (StepBegan(2, 2.0),)
    got = list(states(Trace({}, (*BOTH_RUN, *second, *broken))))
    assert got == [replay(BOTH_RUN), after(*second)]


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
    live, run, seen = [], Replay(), 0
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
        scheduled = toy.schedule()
        sampled = toy.forward(scheduled)
        if len(live) % 6 == 4:
            toy.scheduler.abort(scheduled[0].request)  # while the step is under way
        toy.update(scheduled, sampled)
        live.append(toy.scheduler.state())
        for event in recorder.events[seen:]:
            run.apply(event)
        seen = len(recorder.events)
        assert run.state.unfinished() == live[-1]
    trace = Trace.from_json(recorder.trace().to_json())
    assert [state.unfinished() for state in states(trace)] == live
    assert {name: its.status for name, its in replay(trace.events).requests.items()} == {
        name: request.status.value for name, request in toy.requests.items()
    }


def test_tokens_found_in_the_cache_have_their_slots_from_the_admission_on() -> None:
    run = [
        Added(0, 0.0, "A", (1, 2, 3, 4), 2, 0.0),
        StepBegan(0, 0.0),
        Admitted(0, 0.0, "A", 2, (40, 41)),
        Scheduled(0, 0.0, "A", 2, (8, 9)),
        StepEnded(0, 0.1, 2),
    ]
    assert replay(run[:3]).requests["A"].slots == (40, 41)
    assert replay(run).requests["A"].slots == (40, 41, 8, 9)
    assert replay(run).requests["A"].num_computed_tokens == 4
