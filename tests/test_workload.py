"""Requests that come over time: when they come, when they enter, and what their times count."""

import math
from statistics import fmean

import pytest
from engines import VOCAB, random_model

from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.lab.workload import Arrival, poisson_times, ragged, serve
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Added, Recorder


@pytest.fixture(scope="module")
def small() -> Qwen3ForCausalLM:
    return random_model(num_hidden_layers=1)


def make(model: Qwen3ForCausalLM, seqs: int = 4, recorder: Recorder | None = None) -> LLMEngine:
    """A forward costs a second and 1/16 for each token: sums are exact."""
    config = EngineConfig(max_num_seqs=seqs, max_model_len=32)
    clock = VirtualClock(per_forward=1.0, per_token=0.0625)
    return LLMEngine(model, config=config, clock=clock, trace=recorder)


def arrival(time: float, prompt_len: int = 4, max_tokens: int = 2, name: str = "a") -> Arrival:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Arrival(time, [ord(name) % VOCAB] * prompt_len, params, name)


# -- when they come -------------------------------------------------------------------------------


def test_poisson_times_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert poisson_times(2.0, 50, seed=1) == poisson_times(2.0, 50, seed=1)
    assert poisson_times(2.0, 50, seed=1) != poisson_times(2.0, 50, seed=2)
    assert poisson_times(2.0, 20, seed=1) == poisson_times(2.0, 50, seed=1)[:20]


def test_poisson_times_rise_from_zero() -> None:
    times = poisson_times(5.0, 200, seed=0)
    assert len(times) == 200 and times == sorted(times) and times[0] > 0
    assert poisson_times(5.0, 0, seed=0) == []


@pytest.mark.parametrize("rate", [0.25, 8.0])
def test_poisson_gaps_are_exponential_with_mean_one_over_rate(rate: float) -> None:
    times = poisson_times(rate, 20_000, seed=3)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert fmean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 / rate**2, rel=0.08)
    assert fmean(gap > 1 / rate for gap in gaps) == pytest.approx(math.exp(-1), abs=0.02)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 requests per second, got {rate}"):
        poisson_times(rate, 3, seed=0)


def test_ragged_requests_stay_in_their_ranges_and_reach_the_ends() -> None:
    arrivals = ragged(400, 50, seed=1, prompt_lens=(3, 9), output_lens=(2, 5))
    assert len(arrivals) == 400 and {one.time for one in arrivals} == {0.0}
    assert {len(one.prompt) for one in arrivals} == set(range(3, 10))
    assert {one.params.max_tokens for one in arrivals} == set(range(2, 6))
    assert {token for one in arrivals for token in one.prompt} == set(range(50))
    assert all(one.params.ignore_eos and one.request_id is None for one in arrivals)


def test_ragged_requests_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert ragged(16, 97, seed=4) == ragged(16, 97, seed=4) != ragged(16, 97, seed=5)
    lens = [len(one.prompt) for one in ragged(16, 97)]
    assert 16 <= min(lens) < max(lens) <= 256


# -- serving them ---------------------------------------------------------------------------------


def test_they_enter_in_the_order_of_arrival_and_come_back_in_the_order_given(
    small: Qwen3ForCausalLM,
) -> None:
    recorder = Recorder()
    engine = make(small, recorder=recorder)
    arrivals = [arrival(t, name=n) for n, t in zip("abcd", (9.0, 0.0, 4.0, 2.5), strict=True)]
    outputs = serve(engine, arrivals)
    entered = [event.request_id for event in recorder.events if isinstance(event, Added)]
    assert entered == ["b", "d", "c", "a"]
    assert [output.request_id for output in outputs] == ["a", "b", "c", "d"]
    assert [output.metrics.arrival for output in outputs] == [9.0, 0.0, 4.0, 2.5]


def test_those_who_come_at_the_same_time_enter_in_the_order_given(
    small: Qwen3ForCausalLM,
) -> None:
    recorder = Recorder()
    serve(make(small, recorder=recorder), [arrival(1.0, name=name) for name in "cabd"])
    entered = [event.request_id for event in recorder.events if isinstance(event, Added)]
    assert entered == ["c", "a", "b", "d"]


def test_an_idle_engine_waits_for_the_next_and_runs_no_step(small: Qwen3ForCausalLM) -> None:
    engine = make(small)
    first, second = serve(engine, [arrival(3.0), arrival(20.0, name="b")])
    assert first.metrics == (3.0, 3.0, (4.25, 5.3125), 5.3125)
    assert second.metrics == (20.0, 20.0, (21.25, 22.3125), 22.3125)
    assert engine.num_steps == engine.runner.num_forwards == 4
    assert engine.clock.now() == 22.3125


def test_waiting_counts_from_the_arrival_and_not_from_the_entry(small: Qwen3ForCausalLM) -> None:
    recorder = Recorder()
    _, late = serve(make(small, recorder=recorder), [arrival(0.0), arrival(0.5, name="b")])
    entry = next(e for e in recorder.events if isinstance(e, Added) and e.request_id == "b")
    assert (entry.time, entry.arrival) == (1.25, 0.5), "it came during the first step"
    assert late.metrics.queue_time == 0.75
    assert late.metrics.ttft == 0.75 + 1.0 + 5 * 0.0625


def test_a_request_that_comes_just_at_the_end_of_a_step_makes_the_next(
    small: Qwen3ForCausalLM,
) -> None:
    _, late = serve(make(small), [arrival(0.0), arrival(1.25, name="b")])
    assert late.metrics.queue_time == 0.0


def test_times_count_from_the_start_of_serving(small: Qwen3ForCausalLM) -> None:
    engine = make(small)
    engine.clock.wait_until(100.0)
    (output,) = serve(engine, [arrival(2.0)])
    assert output.metrics.arrival == output.metrics.first_scheduled == 102.0


def test_the_same_arrivals_take_the_same_times(small: Qwen3ForCausalLM) -> None:
    times = poisson_times(1.0, 6, seed=2)
    arrivals = [arrival(t, 3, 3, name) for t, name in zip(times, "abcdef", strict=True)]
    assert serve(make(small), arrivals) == serve(make(small), arrivals)


def test_requests_without_names_are_told_apart(small: Qwen3ForCausalLM) -> None:
    arrivals = ragged(5, VOCAB, prompt_lens=(1, 6), output_lens=(1, 4))
    outputs = serve(make(small, seqs=2), arrivals)
    assert [output.prompt_token_ids for output in outputs] == [one.prompt for one in arrivals]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        one.params.max_tokens for one in arrivals
    ]


def test_an_engine_that_has_other_requests_is_refused_and_keeps_them(
    small: Qwen3ForCausalLM,
) -> None:
    engine = make(small)
    engine.add_request([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), "here before")
    with pytest.raises(ValueError, match="other requests, whose results would be lost"):
        serve(engine, [arrival(0.0)])
    assert [output.request_id for output in engine.run()] == ["here before"]
    assert [output.request_id for output in serve(engine, [arrival(0.0)])] == ["a"]


def test_nobody_to_serve_is_no_work(small: Qwen3ForCausalLM) -> None:
    engine = make(small)
    assert serve(engine, []) == [] and engine.num_steps == 0


def test_too_few_steps_are_an_error_with_both_numbers(small: Qwen3ForCausalLM) -> None:
    arrivals = [arrival(0.0, max_tokens=5), arrival(30.0, name="b")]
    with pytest.raises(RuntimeError, match="3 steps did not suffice for 2 requests"):
        serve(make(small), arrivals, max_steps=3)
    with pytest.raises(RuntimeError, match="6 steps did not suffice"):
        serve(make(small), arrivals, max_steps=6)
    assert len(serve(make(small), arrivals, max_steps=7)) == 2


class Impatient(VirtualClock):
    """Raises instead of waiting for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait_until(self, when: float) -> None:
        self.waits += 1
        if self.waits > 20:
            raise TimeoutError("this never ends")
        super().wait_until(when)


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_a_time_that_never_comes_is_refused(small: Qwen3ForCausalLM, time: float) -> None:
    engine = LLMEngine(small, config=EngineConfig(max_model_len=32), clock=Impatient())
    with pytest.raises(ValueError, match=str(time)):
        serve(engine, [arrival(0.0), arrival(time, name="b")])
