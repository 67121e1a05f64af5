"""Requests that come over time: when they come, when they enter, what users feel, two clocks."""

import math
from statistics import fmean
from typing import Any

import pytest
from engines import VOCAB, random_model
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.metrics import RequestMetrics, percentile
from tutorial_engine.lab.workload import Arrival, poisson_times, ragged, serve
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Added, Recorder


@pytest.fixture(scope="module")
def small() -> CausalLM:
    return random_model(num_hidden_layers=1)


def make(model: CausalLM, seqs: int = 4, recorder: Recorder | None = None) -> LLMEngine:
    """A forward costs a second and 1/16 for each token: sums are exact."""
    config = EngineConfig(max_num_seqs=seqs, max_model_len=32)
    clock = VirtualClock(per_forward=1.0, per_token=0.0625)
    return LLMEngine(model, config=config, clock=clock, trace=recorder)


def arrival(time: float, prompt_len: int = 4, max_tokens: int = 2, name: str = "a") -> Arrival:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Arrival(time, [ord(name) % VOCAB] * prompt_len, params, name)


# -- when they come -------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.25, 8.0])
def test_poisson_gaps_are_exponential_with_mean_one_over_rate(rate: float) -> None:
    times = poisson_times(rate, 20_000, seed=3)
    assert times == sorted(times) and times[0] > 0
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert fmean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 / rate**2, rel=0.08)
    assert fmean(gap > 1 / rate for gap in gaps) == pytest.approx(math.exp(-1), abs=0.02)
    assert poisson_times(rate, 20, seed=3) == times[:20] != poisson_times(rate, 20, seed=2)
    with pytest.raises(ValueError, match=f"above 0 requests per second, got {-rate}"):
        poisson_times(-rate, 3, seed=0)


def test_ragged_requests_stay_in_their_ranges_and_reach_the_ends() -> None:
    arrivals = ragged(400, 50, seed=1, prompt_lens=(3, 9), output_lens=(2, 5))
    assert len(arrivals) == 400 and {a.time for a in arrivals} == {0.0}
    assert {len(a.prompt) for a in arrivals} == set(range(3, 10))
    assert {a.params.max_tokens for a in arrivals} == set(range(2, 6))
    assert {token for a in arrivals for token in a.prompt} == set(range(50))
    assert all(a.params.ignore_eos and a.request_id is None for a in arrivals)
    assert ragged(16, 97, seed=4) == ragged(16, 97, seed=4) != ragged(16, 97, seed=5)


# -- serving them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "entered"), [((9.0, 0.0, 4.0, 2.5), "bdca"), ((1.0, 1.0, 1.0, 1.0), "abcd")]
)
def test_they_enter_in_the_order_of_arrival_and_come_back_in_the_order_given(
    small: CausalLM, times: tuple[float, ...], entered: str
) -> None:
    recorder = Recorder()
    arrivals = [arrival(t, name=n) for n, t in zip("abcd", times, strict=True)]
    outputs = serve(make(small, recorder=recorder), arrivals)
    order = [event.request_id for event in recorder.events if isinstance(event, Added)]
    assert order == list(entered)
    assert [output.request_id for output in outputs] == ["a", "b", "c", "d"]
    assert tuple(output.metrics.arrival for output in outputs) == times
    assert serve(make(small), arrivals) == outputs, "the same arrivals take the same times"


def test_an_idle_engine_waits_for_the_next_and_runs_no_step(small: CausalLM) -> None:
    engine = make(small)
    first, second = serve(engine, [arrival(3.0), arrival(20.0, name="b")])
    assert first.metrics == (3.0, 3.0, (4.25, 5.3125), 5.3125)
    assert second.metrics == (20.0, 20.0, (21.25, 22.3125), 22.3125)
    assert engine.num_steps == 4 and engine.clock.now() == 22.3125
    (output,) = serve(engine, [arrival(2.0)])
    assert output.metrics.arrival == 24.3125, "times count from the start of serving"
    assert serve(engine, []) == [] and engine.num_steps == 6


def test_waiting_counts_from_the_arrival_and_not_from_the_entry(small: CausalLM) -> None:
    recorder = Recorder()
    _, late = serve(make(small, recorder=recorder), [arrival(0.0), arrival(0.5, name="b")])
    entry = next(e for e in recorder.events if isinstance(e, Added) and e.request_id == "b")
    assert (entry.time, entry.arrival) == (1.25, 0.5), "it came during the first step"
    assert (late.metrics.queue_time, late.metrics.ttft) == (0.75, 0.75 + 1.0 + 5 * 0.0625)


def test_an_engine_that_has_other_requests_is_refused_and_keeps_them(
    small: CausalLM,
) -> None:
    engine = make(small)
    engine.add_request("here before", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(ValueError, match="other requests, whose results would be lost"):
        serve(engine, [arrival(0.0)])
    assert [output.request_id for output in engine.run()] == ["here before"]


def test_what_never_ends_is_refused(small: CausalLM) -> None:
    arrivals = [arrival(0.0, max_tokens=5), arrival(30.0, name="b")]
    with pytest.raises(RuntimeError, match="6 steps did not suffice for 2 requests"):
        serve(make(small), arrivals, max_steps=6)
    assert len(serve(make(small), arrivals, max_steps=7)) == 2
    with pytest.raises(ValueError, match="nan"):
        serve(make(small), [arrival(0.0), arrival(math.nan, name="b")])


# -- what users feel ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "queue_time", "ttft", "tpot", "itl", "total", "throughput"),
    [
        ((3.0,), None, None, None, (), None, None),
        ((3.0, 4.0, (6.0,)), 1.0, 3.0, None, (), None, None),
        ((3.0, 4.0, (6.0, 8.0), 8.0), 1.0, 3.0, 2.0, (2.0,), 5.0, 0.4),
        ((0.0, 0.0, (2.0,), 2.0), 0.0, 2.0, None, (), 2.0, 0.5),  # no further token
        ((0.0, 0.0, (0.0, 0.0), 0.0), 0.0, 0.0, 0.0, (0.0,), 0.0, None),  # 0 is a time
        ((1.0, None, (), 5.0), None, None, None, (), 4.0, 0.0),  # over without a token
    ],
)
def test_each_number_appears_when_its_event_has_happened(
    args: Any, queue_time: Any, ttft: Any, tpot: Any, itl: Any, total: Any, throughput: Any
) -> None:
    m = RequestMetrics(*args)
    assert (m.queue_time, m.ttft, m.tpot) == (queue_time, ttft, tpot)
    assert (m.itl, m.total, m.throughput) == (itl, total, throughput)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40), st.integers(0, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[int], percent: int
) -> None:
    enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)
    with pytest.raises(ValueError, match=f"need values .* got {len(values)} and -1"):
        percentile(values, -1)


# -- clocks ---------------------------------------------------------------------------------------


def test_a_virtual_clock_counts_forwards_and_tokens_and_waits_forwards_only() -> None:
    clock = VirtualClock(per_forward=0.5, per_token=0.25)
    assert clock.prices == {"seconds_per_forward": 0.5, "seconds_per_token": 0.25}
    times = [clock.now()]
    for tokens in (3, 1):
        clock.forward_done(tokens)
        times.append(clock.now())
    for then in (7.0, 3.0):
        clock.wait_until(then)
        times.append(clock.now())
    assert times == [0.0, 1.25, 2.0, 7.0, 7.0]
    VirtualClock(0.0, 0.5), VirtualClock(0.5, 0.0)  # one of both may cost nothing


@pytest.mark.parametrize(("forward", "token"), [(-0.1, 1), (1, -0.1), (0, 0), (math.nan, 1)])
def test_prices_that_are_none_are_refused(forward: float, token: float) -> None:
    with pytest.raises(ValueError, match=f"per_forward={forward}, per_token={token}"):
        VirtualClock(forward, token)


def test_a_wall_clock_waits_until_then_and_not_for_what_is_past() -> None:
    clock = WallClock()
    start = clock.now()
    clock.wait_until(start + 0.02)
    assert clock.now() - start >= 0.0199
    clock.wait_until(start)
