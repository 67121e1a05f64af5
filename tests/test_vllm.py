"""Runs of vLLM that ship, as our pictures and our engine see them. No vLLM is needed here.

`python -m tools.vllm.record_runs --check` asks vLLM itself.
"""

from typing import Any

import pytest
from traces import check_words

from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.llm import LLM
from tutorial_engine.lab.vllm import RUNS, record, recorded_run, serve_again
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.trace.events import (
    Event,
    Finished,
    FreeQueue,
    TokenSampled,
    Trace,
)
from tutorial_engine.trace.history import Replay
from tutorial_engine.viz import block_view, places, timeline
from tutorial_engine.viz.run.recorded import labels
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.views.scheduler_view import SchedulerView

NAMES = sorted(file.stem for file in RUNS.glob("*.json"))


@pytest.fixture(params=NAMES)
def run(request: Any) -> Trace:
    return recorded_run(request.param)


def of(trace: Trace, kind: type[Event]) -> list[Any]:
    return [event for event in trace.events if isinstance(event, kind)]


def tokens(trace: Trace) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in of(trace, TokenSampled):
        found.setdefault(event.request_id, []).append(event.token_id)
    return found


def test_the_queue_of_free_blocks_is_vllms_own(run: Trace) -> None:
    """It was read in vLLM after each step; ours, which follows from the other events, equals it."""
    queues, num_blocks = of(run, FreeQueue), int(run.settings["num_blocks"] or 0)
    assert [queue.step for queue in queues] == list(range(run.num_steps))
    ours = Replay()
    for event in run.events:
        if isinstance(event, FreeQueue):
            assert ours.free_queue(num_blocks) == event.blocks
        else:
            ours.apply(event)


def test_our_engine_says_the_same(run: Trace) -> None:
    ours = serve_again(run, load_model(), VirtualClock())
    assert tokens(ours) == tokens(run)
    ends = [{e.request_id: e.reason for e in of(trace, Finished)} for trace in (ours, run)]
    assert ends[0] == ends[1]


def test_pictures_draw_it(run: Trace) -> None:
    assert "vLLM 0.32.0" in timeline(run).svg
    check_words(timeline(run))
    check_words(places({"vLLM": run}))
    drawn = SchedulerRun.of(run, labels(run, load_tokenizer()))
    view = SchedulerView(drawn, details=False)
    for step in (0, run.num_steps // 2):
        check_words(block_view(run, step))
        check_words(view.scene(step))
        assert "vLLM 0.32.0" in drawn.caption(step)


def test_what_cannot_be_recorded_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING"), record(object()):
        pass
    with pytest.raises(ValueError, match="records itself: run = Recorder"), record(LLM()):
        pass
    with pytest.raises(ValueError, match="only: burst, came_back, long_prompt"):
        recorded_run("brust")
