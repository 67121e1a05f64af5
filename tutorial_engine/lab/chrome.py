"""A trace for Perfetto and chrome://tracing, which draw it in a browser.

The Trace Event Format is a JSON object with a list of events; times are microseconds. Here: a track
for the steps, one for each request, and counters. Knows events and states only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutorial_engine.trace import events
from tutorial_engine.trace.events import RequestEvent, Trace
from tutorial_engine.trace.history import Step, history
from tutorial_engine.trace.pool import Pool, snapshots

PROCESS = 1  # all tracks belong to one
STEPS = 0  # the track of the steps; those of the requests follow

Entry = dict[str, Any]


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON object of the Trace Event Format.

    Time 0 is the first thing that happened. Counters: tokens of the step, requests running and
    waiting, and slots used and reserved where the settings tell of a pool.
    """
    times = [event.time for event in trace.events]
    times += [event.arrival for event in trace.events if isinstance(event, events.Added)]
    start = min(times, default=0.0)
    entries = list(_entries(trace))
    for entry in entries:
        entry["ts"] = _microseconds(entry["ts"] - start)
        if "dur" in entry:
            entry["dur"] = _microseconds(entry["dur"])
    entries.sort(key=lambda entry: entry["ts"])
    return {
        "traceEvents": [*_names(trace), *entries],
        "displayTimeUnit": "ms",
        "otherData": {key: str(value) for key, value in trace.settings.items()},
    }


def save_chrome(trace: Trace, path: str | Path) -> None:
    """Write it as JSON. Open the file at ui.perfetto.dev or chrome://tracing."""
    text = json.dumps(to_chrome(trace), allow_nan=False, separators=(",", ":"))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _tracks(trace: Trace) -> dict[str, int]:
    """Request → its track, in the order in which they came."""
    added = (event.request_id for event in trace.events if isinstance(event, events.Added))
    return {name: track for track, name in enumerate(dict.fromkeys(added), STEPS + 1)}


def _names(trace: Trace) -> Iterator[Entry]:
    """Metadata: what a viewer writes beside the tracks, and their order."""
    titles = {STEPS: "steps"} | {t: f"request {name}" for name, t in _tracks(trace).items()}
    yield _entry("M", "process_name", STEPS, args={"name": "tutorial_engine"})
    for track, title in titles.items():
        yield _entry("M", "thread_name", track, args={"name": title})
        yield _entry("M", "thread_sort_index", track, args={"sort_index": track})


def _entry(phase: str, name: str, track: int, **more: Any) -> Entry:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": track, **more}


def _entries(trace: Trace) -> Iterator[Entry]:
    tracks = _tracks(trace)
    for event in trace.events:
        if isinstance(event, events.Preempted | events.Finished):
            name = "preempted"
            if isinstance(event, events.Finished):
                name = f"finished: {event.reason}"
            yield _entry("i", name, tracks[event.request_id], ts=event.time, s="t", cat="request")
    yield from _waits(trace, tracks)
    for step in history(trace):
        yield from _step(step, tracks)
    if any(size in trace.settings for size in ("num_rows", "num_blocks", "num_cells")):
        begins = {step.number: step.began for step in history(trace)}
        title = f"slots of {Pool.of(trace.settings).num_slots}"
        for shot in snapshots(trace):
            used = {"used": shot.usage.used, "reserved": shot.usage.reserved}
            yield _entry("C", title, STEPS, ts=begins[shot.step], args=used)


def _waits(trace: Trace, tracks: dict[str, int]) -> Iterator[Entry]:
    """A piece for each time that a request waits: from its arrival, and after a preemption."""
    since: dict[str, float] = {}
    for event in trace.events:
        if not isinstance(event, RequestEvent):
            continue
        name = event.request_id
        if isinstance(event, events.Added):
            since[name] = event.arrival
        elif isinstance(event, events.Preempted):
            since[name] = event.time
        elif isinstance(event, events.Admitted | events.Finished) and name in since:
            began = since.pop(name)
            if event.time > began:
                args = {"ts": began, "dur": event.time - began, "cat": "request"}
                yield _entry("X", "waiting", tracks[name], **args)


def _step(step: Step, tracks: dict[str, int]) -> Iterator[Entry]:
    """The step's forward: on its own track, and on those of the requests whose tokens it ran."""
    when = {"ts": step.began, "dur": step.ended - step.began}
    tokens, running, waiting = step.num_tokens, step.planned.running, step.planned.waiting
    args = {"tokens": tokens, "running": list(running), "waiting": list(waiting)}
    yield _entry("X", f"step {step.number}", STEPS, **when, cat="step", args=args)
    counts = {"running": len(running), "waiting": len(waiting)}
    yield _entry("C", "tokens in the step", STEPS, ts=step.began, args={"tokens": tokens})
    yield _entry("C", "requests", STEPS, ts=step.began, args=counts)
    for name, event in step.scheduled.items():
        request, count = step.planned.requests[name], len(event.slots)
        end = event.first_position + count
        left = len(request.token_ids) - end
        kind = f"prefill {count}" if event.first_position < request.num_prompt_tokens else "decode"
        if kind == "decode" and count > 1:
            kind = f"recompute {count}"
        args = {
            "step": step.number,
            "first position": event.first_position,
            "tokens": count,
            "left after it": left,
            "slots": list(event.slots),
        }
        yield _entry("X", kind, tracks[name], **when, cat="request", args=args)
