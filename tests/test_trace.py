"""A trace is frozen, and comes back from JSON as it was; what is no trace is named."""

import dataclasses
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.trace import events as trace
from tutorial_engine.trace.events import EVENTS, Event, Recorder, RequestEvent, Trace

IDS = st.text(max_size=8) | st.sampled_from(["r0", "Änne", "请求", "a\nb", '"', "\\", "\x00", "🪁"])
TIMES = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(-(2**70), 2**70)
ROWS = st.integers(0, 10_000)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "step": st.integers(0, 10**9),
    "time": TIMES,
    "request_id": IDS,
    "prompt_token_ids": st.lists(ROWS, max_size=6).map(tuple),
    "max_tokens": WHOLE,
    "arrival": TIMES,
    "num_cached": ROWS,
    "cells": st.lists(ROWS, max_size=4).map(tuple),
    "cached_slots": st.lists(ROWS, max_size=4).map(tuple),
    "first_position": ROWS,
    "slots": st.lists(ROWS, max_size=6).map(tuple),
    "token_id": ROWS,
    "reason": st.sampled_from(["stop", "length", "abort", "error"]),
    "detail": st.none() | WHOLE | st.text(max_size=8),
    "row": ROWS,
    "num_tokens": ROWS,
    "block": ROWS,
    "source": ROWS,
    "evicted": st.booleans(),
    "place": st.none() | ROWS,
    "parent_id": IDS,
    "hash": st.text("0123456789abcdef", min_size=12, max_size=12),
}
SETTINGS = st.dictionaries(
    st.text(max_size=6), st.none() | st.booleans() | WHOLE | TIMES | st.text(max_size=6), max_size=4
)


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{field.name: FIELDS[field.name] for field in dataclasses.fields(kind)})


ANY_EVENT = st.one_of([any_of(kind) for kind in EVENTS.values()])
ONE_OF_EACH: list[Event] = [
    trace.Added(0, 0.5, "ä", (1, 2, 3), 8, 0.25),
    trace.StepBegan(0, 0.5),
    trace.RowTaken(0, 0.5, "ä", 3),
    trace.Admitted(0, 0.5, "ä", 0),
    trace.Scheduled(0, 0.5, "ä", 0, (30, 31, 32)),
    trace.TokenSampled(0, 0.75, "ä", 7),
    trace.StepEnded(0, 0.75, 3),
    trace.Preempted(1, 0.75, "ä"),
    trace.Finished(1, 0.75, "ä", "stop", "Ende"),
    trace.RowFreed(1, 0.75, "ä", 3),
    trace.CellsTaken(1, 0.75, "ä", 2, (7, 3)),
    trace.CellsFreed(1, 0.75, "ä", (7, 3)),
    trace.Added(1, 0.75, "ä.1", (1, 2, 3), 8, 0.25, 0),
    trace.Forked(1, 0.75, "ä.1", "ä", 2),
    trace.CellsShared(1, 0.75, "ä.1", (7, 3)),
    trace.BlockTaken(1, 0.75, "ä", 7, True),
    trace.BlockShared(1, 0.75, "ä", 2),
    trace.BlockCopied(1, 0.75, "ä", 2, 8, (128, 129), False),
    trace.BlockCached(1, 0.75, "ä", 7, "0123456789ab"),
    trace.BlockFreed(1, 0.75, "ä", 8),
]


def test_the_table_of_events_is_about_every_kind() -> None:
    named = {kind for kind in vars(trace).values() if isinstance(kind, type)}
    kinds = {kind for kind in named if issubclass(kind, Event)} - {Event, RequestEvent}
    assert set(EVENTS.values()) == kinds == {type(event) for event in ONE_OF_EACH}
    assert all(name == kind.__name__ for name, kind in EVENTS.items())


@pytest.mark.parametrize("kind", EVENTS.values(), ids=EVENTS.keys())
@given(data=st.data())
def test_every_kind_of_event_comes_back_from_json(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(any_of(kind))
    (back,) = Trace.from_json(Trace({}, (event,)).to_json()).events
    assert back == event and type(back) is kind
    assert repr(back) == repr(event)  # 1 and 1.0 and True are equal, and not the same
    assert hash(back) == hash(event)  # its lists are tuples again


@given(SETTINGS, st.lists(ANY_EVENT, max_size=8))
def test_a_trace_comes_back_from_json(
    engine_settings: dict[str, trace.Setting], events: list[Event]
) -> None:
    whole = Trace(engine_settings, tuple(events))
    back = Trace.from_json(whole.to_json())
    assert back == whole and repr(back) == repr(whole)
    assert back.to_json() == whole.to_json()


def test_a_trace_comes_back_from_a_file(tmp_path: Path) -> None:
    whole = Trace({"policy": "Größe", "max_num_seqs": 2}, tuple(ONE_OF_EACH))
    for path in (tmp_path / "a.json", str(tmp_path / "b.json")):
        whole.save(path)
        assert Trace.load(path) == whole


def test_json_has_one_line_per_event_and_is_plain_json() -> None:
    text = Trace({"a": 1}, tuple(ONE_OF_EACH)).to_json()
    lines = text.splitlines()
    assert len(lines) == len(ONE_OF_EACH) + 3  # brackets, and the head
    assert lines[1] == '{"format": 2, "settings": {"a": 1}},'
    assert json.loads(lines[2].rstrip(",")) == [
        "Added",
        {
            "step": 0,
            "time": 0.5,
            "request_id": "ä",
            "prompt_token_ids": [1, 2, 3],
            "max_tokens": 8,
            "arrival": 0.25,
            "place": None,
        },
    ]
    assert len(json.loads(text)) == len(ONE_OF_EACH) + 1


def test_steps_are_counted_when_they_end() -> None:
    assert Trace({}, tuple(ONE_OF_EACH)).num_steps == 1
    assert Trace({}, ()).num_steps == 0
    assert Trace({}, (trace.StepBegan(0, 0.0), trace.StepBegan(0, 1.0))).num_steps == 0


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_events_are_frozen(event: Event) -> None:
    for field in dataclasses.fields(event):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, None)
    with pytest.raises((AttributeError, TypeError)):
        event.more = 1  # type: ignore[attr-defined]


# -- what is no trace -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "{}", "[]", "null", "7", '"text"', '["head"]', "[7]", "[null]", "[[]]", "[{}]"),
        *('[{"format": 2}]', '[{"settings": {}}]', '{"format": 2, "settings": {}}'),
    ],
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no trace"):
        Trace.from_json(text)


@pytest.mark.parametrize("settings", [5, None, "text", [1]])
def test_settings_that_are_no_table_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match="this is no trace"):
        Trace.from_json(json.dumps([{"format": 2, "settings": settings}]))


@pytest.mark.parametrize("found", [0, 1, "1", None])
def test_another_format_is_refused_with_both_numbers(found: Any) -> None:
    with pytest.raises(ValueError, match=f"has format {found!r}, this version reads 2"):
        Trace.from_json(json.dumps([{"format": found, "settings": {}}]))


GOOD = ["StepEnded", {"step": 0, "time": 0.5, "num_tokens": 3}]
BAD_ENTRIES: list[Any] = [
    7,
    None,
    "x",
    [],
    ["StepEnded"],
    [*GOOD, 1],
    ["NoSuch", {"step": 0, "time": 0.5}],
    ["Event", {"step": 0, "time": 0.5}],
    [["StepEnded"], {}],
    ["StepEnded", 7],
    ["StepEnded", [0, 0.5, 3]],
    ["StepEnded", {"step": 0, "time": 0.5}],
    ["StepEnded", {"step": 0, "time": 0.5, "num_tokens": 3, "more": 1}],
    ["StepEnded", {"step": 0, "time": 0.5, "num_token": 3}],
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=str)
def test_an_entry_that_is_no_event_is_named(entry: Any) -> None:
    text = json.dumps([{"format": 2, "settings": {}}, GOOD, GOOD, entry, GOOD])
    with pytest.raises(ValueError) as error:
        Trace.from_json(text)
    assert str(error.value).startswith(f"event 2 of the trace, {entry!r}, is none: ")


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    text = Trace({}, tuple(ONE_OF_EACH)).to_json()
    path = tmp_path / "cut.json"
    for length in (len(text) // 3, len(text) - 3):
        path.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ValueError, match="this is no trace"):
            Trace.load(path)


# -- the recorder ---------------------------------------------------------------------------------


def test_a_recorder_notes_step_and_time() -> None:
    recorder, ticks = Recorder(), count(1)
    recorder.bind(lambda: float(next(ticks)), {"policy": "mine"})
    recorder.record(trace.StepBegan)
    recorder.record(trace.TokenSampled, "a", 7)
    recorder.step += 1
    recorder.record(trace.Finished, "a", "length", None)
    assert recorder.trace() == Trace(
        {"policy": "mine"},
        (
            trace.StepBegan(0, 1.0),
            trace.TokenSampled(0, 2.0, "a", 7),
            trace.Finished(1, 3.0, "a", "length", None),
        ),
    )


def test_a_recorder_serves_one_engine() -> None:
    recorder = Recorder()
    recorder.bind(lambda: 1.0, {"a": 1})
    with pytest.raises(ValueError, match="belongs to another engine"):
        recorder.bind(lambda: 2.0, {"a": 2})
    recorder.record(trace.StepBegan)
    assert recorder.trace() == Trace({"a": 1}, (trace.StepBegan(0, 1.0),))


def test_nothing_is_recorded_before_there_is_a_clock() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError, match="bound by its engine"):
        recorder.record(trace.StepBegan)
    assert list(recorder.events) == []


def test_a_trace_does_not_grow_with_its_recorder() -> None:
    recorder, mine = Recorder(), {"a": 1}
    recorder.bind(lambda: 0.0, mine)
    recorder.record(trace.StepBegan)
    early = recorder.trace()
    recorder.record(trace.StepEnded, 1)
    mine["a"] = 2
    assert early == Trace({"a": 1}, (trace.StepBegan(0, 0.0),))
    assert len(recorder.events) == len(recorder.trace().events) == 2


def test_two_recorders_share_nothing() -> None:
    one, other = Recorder(), Recorder()
    for recorder in (one, other):
        recorder.bind(lambda: 0.0, {})
    one.record(trace.StepBegan)
    one.step += 1
    assert other.trace() == Trace({}, ()) and other.step == 0


def test_every_event_about_a_request_says_which() -> None:
    about_none = {trace.StepBegan, trace.StepEnded}
    for kind in EVENTS.values():
        assert issubclass(kind, RequestEvent) != (kind in about_none)
