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
TIMES = st.floats(-1e12, 1e12)
WHOLE = st.integers(0, 2**53)
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
    st.text(max_size=6),
    st.none() | st.booleans() | WHOLE | WHOLE.map(lambda n: -n) | TIMES | st.text(max_size=6),
    max_size=4,
)


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{field.name: FIELDS[field.name] for field in dataclasses.fields(kind)})


ANY_EVENT = st.one_of([any_of(kind) for kind in EVENTS.values()])
SOME = {"time": 0.5, "arrival": 0.25, "request_id": "ä", "parent_id": "ö", "reason": "stop"} | {
    "detail": "Ende", "evicted": True, "hash": "0123456789ab", "place": None,
    "prompt_token_ids": (1, 2, 3), "slots": (30, 31), "cells": (7, 3), "cached_slots": (4,),
}  # fmt: skip
ONE_OF_EACH: list[Event] = [
    kind(**{field.name: SOME.get(field.name, 3) for field in dataclasses.fields(kind)})
    for kind in EVENTS.values()
]


def test_the_table_of_events_is_about_every_kind() -> None:
    named = {kind for kind in vars(trace).values() if isinstance(kind, type)}
    kinds = {kind for kind in named if issubclass(kind, Event)} - {Event, RequestEvent}
    assert set(EVENTS.values()) == kinds
    assert all(name == kind.__name__ for name, kind in EVENTS.items())
    about_none = {trace.StepBegan, trace.Planned, trace.StepEnded}
    assert {kind for kind in kinds if not issubclass(kind, RequestEvent)} == about_none


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
    assert lines[1] == '{"format": 3, "settings": {"a": 1}},'
    at = 2 + list(EVENTS).index("BlockFreed")
    values = {"step": 3, "time": 0.5, "request_id": "ä", "block": 3}
    assert json.loads(lines[at].rstrip(",")) == ["BlockFreed", values]
    assert len(json.loads(text)) == len(ONE_OF_EACH) + 1


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
        *('[{"format": 3}]', '[{"format": 3, "settings": 5}]', '{"format": 3, "settings": {}}'),
        Trace({}, tuple(ONE_OF_EACH)).to_json()[:500],  # cut off
        "[" * 10**5,
    ],
)
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="this is no trace"):
        Trace.load(path)


@pytest.mark.parametrize("found", [0, 1, 2, 4, "3", None])
def test_another_format_is_refused_with_both_numbers_and_what_to_do(found: Any) -> None:
    with pytest.raises(ValueError) as error:
        Trace.from_json(json.dumps([{"format": found, "settings": {}}]))
    assert str(error.value) == (
        f"the trace has format {found!r}, and this version reads format 3: record the run again "
        "with this version"
    )


GOOD = ["StepEnded", {"step": 0, "time": 0.5, "num_tokens": 3}]
BAD_ENTRIES: list[Any] = [
    7,
    None,
    "x",
    [],
    ["StepEnded"],
    [*GOOD, 1],
    ["NoSuch", {"step": 0, "time": 0.5}],
    [["StepEnded"], {}],
    ["StepEnded", 7],
    ["StepEnded", [0, 0.5, 3]],
    ["StepEnded", {"step": 0, "time": 0.5}],
    ["StepEnded", {"step": 0, "time": 0.5, "num_tokens": 3, "more": 1}],
    ["StepEnded", {"step": 0, "time": 0.5, "num_token": 3}],
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=str)
def test_an_entry_that_is_no_event_is_named(entry: Any) -> None:
    text = json.dumps([{"format": 3, "settings": {}}, GOOD, GOOD, entry, GOOD])
    with pytest.raises(ValueError) as error:
        Trace.from_json(text)
    assert str(error.value).startswith(f"event 2 of the trace, {entry}, is none: ")


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
    with pytest.raises(ValueError, match="no clock yet"):
        recorder.record(trace.StepBegan)
    assert list(recorder.events) == []
