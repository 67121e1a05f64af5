"""What users feel, from the times of a request; the time that passes, and the time that is made."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.metrics import RequestMetrics, percentile


def test_twenty_tokens_in_1478_milliseconds() -> None:
    """First token after 262 ms, then 19 more, 64 ms each."""
    times = tuple(100.0 + 0.262 + 0.064 * i for i in range(20))
    metrics = RequestMetrics(100.0, 100.05, times, times[-1])
    assert metrics.queue_time == pytest.approx(0.05)
    assert metrics.ttft == pytest.approx(0.262)
    assert metrics.tpot == pytest.approx(0.064)
    assert metrics.total == pytest.approx(0.262 + 19 * 0.064) == pytest.approx(1.478)
    assert metrics.throughput == pytest.approx(13.53, abs=0.005)
    assert len(metrics.itl) == 19 and metrics.itl == pytest.approx([0.064] * 19)


@pytest.mark.parametrize(
    ("args", "queue_time", "ttft", "tpot", "itl", "total", "throughput"),
    [
        ((3.0,), None, None, None, (), None, None),
        ((3.0, 4.0), 1.0, None, None, (), None, None),
        ((3.0, 4.0, (6.0,)), 1.0, 3.0, None, (), None, None),
        ((3.0, 4.0, (6.0, 8.0)), 1.0, 3.0, 2.0, (2.0,), None, None),
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


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30).map(sorted))
def test_tpot_is_the_mean_of_itl(times: list[float]) -> None:
    metrics = RequestMetrics(0.0, 0.0, tuple(times), times[-1])
    assert metrics.tpot == pytest.approx(math.fsum(metrics.itl) / len(metrics.itl), abs=1e-9)
    assert metrics.total == pytest.approx(metrics.ttft + math.fsum(metrics.itl), abs=1e-9)


def test_percentiles_by_nearest_rank() -> None:
    values = [50, 20, 35, 40, 15]  # the example of the usual definition, out of order
    ranks = {0: 15, 5: 15, 20: 15, 21: 20, 30: 20, 40: 20, 50: 35, 100: 50}
    assert {percent: percentile(values, percent) for percent in ranks} == ranks
    assert values == [50, 20, 35, 40, 15]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40), st.integers(0, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[int], percent: int
) -> None:
    enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)


@pytest.mark.parametrize(
    ("values", "percent"), [([1.0, 2.0], -1), ([1.0, 2.0], 100.5), ([1.0, 2.0], math.nan), ([], 50)]
)
def test_no_values_and_percents_outside_are_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=f"need values .* got {len(values)} and {percent}"):
        percentile(values, percent)


# -- clocks ---------------------------------------------------------------------------------------


def test_a_virtual_forward_costs_its_price_and_its_tokens() -> None:
    clock = VirtualClock(per_forward=0.5, per_token=0.25)
    assert clock.prices == {"seconds_per_forward": 0.5, "seconds_per_token": 0.25}
    times = [clock.now()]
    for tokens in (3, 1):
        clock.forward_done(tokens)
        time.sleep(0.002)  # it stands still between forwards
        times.append(clock.now())
    assert times == [0.0, 1.25, 2.0]
    for prices in ((0.0, 0.5), (0.5, 0.0)):
        cheap = VirtualClock(*prices)
        cheap.forward_done(1)
        assert cheap.now() == 0.5


def test_waiting_moves_virtual_time_forwards_only() -> None:
    clock = VirtualClock()
    for then in (7.0, 3.0):
        clock.wait_until(then)
        assert clock.now() == 7.0


@pytest.mark.parametrize(("forward", "token"), [(-0.1, 1), (1, -0.1), (0, 0), (math.nan, 1)])
def test_prices_that_are_none_are_refused(forward: float, token: float) -> None:
    with pytest.raises(ValueError, match=f"per_forward={forward}, per_token={token}"):
        VirtualClock(forward, token)


def test_wall_time_passes_by_itself_and_forwards_cost_nothing_more() -> None:
    clock = WallClock()
    start, outside = clock.now(), time.perf_counter()
    clock.forward_done(10**9)
    time.sleep(0.01)
    passed = clock.now() - start
    assert 0.01 <= passed <= time.perf_counter() - outside + 0.001


def test_a_wall_clock_waits_until_then_and_not_for_what_is_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = WallClock()
    start = clock.now()
    clock.wait_until(start + 0.02)
    assert clock.now() - start >= 0.0199
    asleep: list[float] = []
    monkeypatch.setattr(time, "sleep", asleep.append)
    clock.wait_until(start)
    assert asleep in ([], [0.0])
