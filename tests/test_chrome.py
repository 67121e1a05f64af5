"""The export for Perfetto: the documented fields of each phase, and the run that the trace has."""

import json
from pathlib import Path
from typing import Any

import pytest
from engines import random_model
from traces import POLICIES, served, story

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.lab.chrome import save_chrome, to_chrome
from tutorial_engine.learn.eager_pages import crowd
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.history import history
from tutorial_engine.trace.pool import snapshots


def preempting() -> Trace:
    """Three requests in a pool of blocks that is too small for all."""
    prompts = [list(range(10, 20)), list(range(30, 37)), [5, 6, 7]]
    return crowd(PagedKVCache, random_model(), prompts, num_blocks=5, max_tokens=8)


# Trace Event Format: what each phase must have besides name, pid and tid
FIELDS = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts", "args"}, "M": {"args"}}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
EVERY = [story(), story(("D", "abort")), *(served(policy)[0] for policy in POLICIES)]
EVERY += [served("one rule", 12, 40.0)[0], preempting(), Trace({}, ())]


def check_format(told: dict[str, Any]) -> None:
    """AssertionError for what a viewer of the format could not read."""
    assert told["displayTimeUnit"] in ("ms", "ns") and isinstance(told["otherData"], dict)
    ends: dict[int, float] = {}
    series: dict[str, set[str]] = {}
    for entry in told["traceEvents"]:
        assert isinstance(entry["name"], str) and entry["name"]
        assert isinstance(entry["pid"], int) and isinstance(entry["tid"], int)
        phase = entry["ph"]
        assert (
            FIELDS[phase]
            <= entry.keys()
            <= FIELDS[phase] | {*("ph", "name", "pid", "tid", "cat", "args")}
        )
        if phase == "M":
            (key,) = entry["args"]
            assert METADATA[entry["name"]] == key
            continue
        assert entry["ts"] >= 0
        if phase == "i":
            assert entry["s"] in ("g", "p", "t")
        elif phase == "C":
            assert all(isinstance(value, int | float) for value in entry["args"].values())
            assert series.setdefault(entry["name"], set(entry["args"])) == set(entry["args"])
        else:  # pieces of one track come one after the other: nothing hides another
            assert entry["dur"] > 0
            assert entry["ts"] >= ends.get(entry["tid"], 0.0) - 1e-3
            ends[entry["tid"]] = entry["ts"] + entry["dur"]


@pytest.mark.parametrize("trace", EVERY)
def test_every_event_has_the_fields_of_its_phase(trace: Trace, tmp_path: Path) -> None:
    save_chrome(trace, tmp_path / "run.json")
    told = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert told == to_chrome(trace)
    check_format(told)


@pytest.mark.parametrize("trace", EVERY[:-1])
def test_tracks_pieces_and_counters_are_those_of_the_run(trace: Trace) -> None:
    told = to_chrome(trace)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in told if e["name"] == "thread_name"}
    added = [e.request_id for e in trace.events if isinstance(e, events.Added)]
    assert list(names.values()) == ["steps", *(f"request {name}" for name in dict.fromkeys(added))]
    steps = list(history(trace))
    drawn = [e for e in told if e.get("cat") == "step"]
    assert [e["args"]["tokens"] for e in drawn] == [step.num_tokens for step in steps]
    assert [round(e["dur"]) for e in drawn] == [round(1e6 * (s.ended - s.began)) for s in steps]
    run = {name: 0 for name in names.values()}
    for entry in told:
        if entry.get("cat") == "request" and entry["ph"] == "X" and "args" in entry:
            run[names[entry["tid"]]] += entry["args"]["tokens"]
    for name in added:
        want = sum(len(s.scheduled[name].slots) for s in steps if name in s.scheduled)
        assert run[f"request {name}"] == want
    marks = [e["name"].split(":")[0] for e in told if e["ph"] == "i"]
    kinds = [e for e in trace.events if isinstance(e, events.Preempted | events.Finished)]
    assert sorted(marks) == sorted(type(e).__name__.lower() for e in kinds)
    used = [e["args"]["used"] for e in told if e["name"].startswith("slots of")]
    if "num_rows" in trace.settings or "num_blocks" in trace.settings:
        assert used == [shot.usage.used for shot in snapshots(trace)]


def test_waiting_counts_from_the_arrival() -> None:
    trace, outputs = served("one by one", 6, 40.0)
    told = to_chrome(trace)["traceEvents"]
    waited = {e["tid"]: e["dur"] for e in told if e["name"] == "waiting"}
    queues = [output.metrics.queue_time for output in outputs]
    for track, seconds in enumerate(queues, 1):
        assert waited.get(track, 0.0) == pytest.approx(1e6 * (seconds or 0.0), abs=1)
    assert any(waited.values())
