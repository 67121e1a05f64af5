"""Static batching as it was: each answer comes with the slowest of its batch."""

import pytest
from engines import random_model
from traces import served

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import StaticBatching
from tutorial_engine.lab.static_batch import batches, static_as_it_was
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, Finished, Preempted, Recorder


@pytest.mark.parametrize(("number", "rate", "places"), [(7, 0.0, 3), (9, 40.0, 2), (5, 500.0, 4)])
def test_an_answer_comes_with_the_last_of_its_batch(number: int, rate: float, places: int) -> None:
    trace, _ = served("static batching", number, rate, seqs=places, budget=8)
    ends = {e.request_id: e.time for e in trace.events if isinstance(e, Finished)}
    starts = {e.request_id: e.time for e in trace.events if isinstance(e, Admitted)}
    found, given = batches(trace), static_as_it_was(trace)
    assert sorted(name for batch in found for name in batch) == sorted(ends) == sorted(given)
    for batch, after in zip(found, [*found[1:], ()], strict=True):
        assert 1 <= len(batch) <= places
        assert {given[name] for name in batch} == {max(ends[name] for name in batch)}
        assert all(starts[name] >= given[batch[0]] for name in after), "nobody joins before"
    later = [given[name] - ends[name] for name in ends]
    assert min(later) == 0 < max(later), "the slowest loses nothing, somebody loses something"


def test_samples_and_preempted_requests_belong_to_their_batch() -> None:
    model, recorder = random_model(), Recorder()
    memory = PagedKVCache.from_config(model.config, num_blocks=7, block_size=4, trace=recorder)
    config = EngineConfig(max_num_seqs=4)
    engine = LLMEngine(
        model, config=config, memory=memory, scheduler=StaticBatching, clock=VirtualClock()
    )
    for name, n in (("A", 2), ("B", 1), ("C", 1), ("D", 1), ("E", 1)):
        params = SamplingParams(n=n, temperature=1.0, max_tokens=9, ignore_eos=True, seed=1)
        engine.add_request(list(range(1, 6)), params, name)
    engine.run(max_steps=12)
    half = recorder.trace()
    engine.run()
    trace = recorder.trace()
    assert any(isinstance(e, Preempted) for e in trace.events)
    ends = {e.request_id: e.time for e in trace.events if isinstance(e, Finished)}
    assert batches(trace) == [("A", "B", "C", "D"), ("E",)] and "A.1" in ends
    given = static_as_it_was(trace)
    first = max(time for name, time in ends.items() if name != "E")
    assert given == dict.fromkeys("ABCD", first) | {"E": ends["E"]}
    assert static_as_it_was(half) == {}, "not all of the batch are over"


def test_another_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"this trace is of Scheduler: .* scheduler=StaticBatching"
    ):
        static_as_it_was(served("one rule")[0])
