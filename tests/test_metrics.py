"""What users feel, from the times of a request: the definitions, by hand and against each other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.engine.metrics import RequestMetrics, percentile


def worked() -> RequestMetrics:
    """The example of the books: first token after 262 ms, then 19 more, 64 ms each."""
    times = tuple(100.0 + 0.262 + 0.064 * i for i in range(20))
    return RequestMetrics(100.0, 100.05, times, times[-1])


def test_twenty_tokens_in_1478_milliseconds() -> None:
    metrics = worked()
    assert metrics.queue_time == pytest.approx(0.05)
    assert metrics.ttft == pytest.approx(0.262)
    assert metrics.tpot == pytest.approx(0.064)
    assert metrics.total == pytest.approx(0.262 + 19 * 0.064) == pytest.approx(1.478)
    assert metrics.throughput is not None
    assert round(metrics.throughput, 2) == 13.53
    assert len(metrics.itl) == 19 and metrics.itl == pytest.approx([0.064] * 19)


def test_what_has_not_happened_is_none() -> None:
    waits = RequestMetrics(3.0)
    assert (waits.queue_time, waits.ttft, waits.tpot) == (None, None, None)
    assert (waits.total, waits.throughput, waits.itl) == (None, None, ())


def test_each_number_appears_when_its_event_has_happened() -> None:
    scheduled = RequestMetrics(3.0, 4.0)
    assert (scheduled.queue_time, scheduled.ttft) == (1.0, None)
    first = scheduled._replace(token_times=(6.0,))
    assert (first.ttft, first.tpot, first.itl, first.total) == (3.0, None, (), None)
    second = first._replace(token_times=(6.0, 8.0))
    assert (second.ttft, second.tpot, second.itl, second.total) == (3.0, 2.0, (2.0,), None)
    over = second._replace(finished=8.0)
    assert (over.total, over.throughput) == (5.0, 0.4)


def test_one_token_has_no_time_per_further_token() -> None:
    metrics = RequestMetrics(0.0, 0.0, (2.0,), 2.0)
    assert (metrics.tpot, metrics.itl, metrics.throughput) == (None, (), 0.5)


def test_a_zero_is_a_time_and_not_nothing() -> None:
    metrics = RequestMetrics(0.0, 0.0, (0.0, 0.0), 0.0)
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.total) == (0.0, 0.0, 0.0, 0.0)
    assert metrics.throughput is None  # tokens in no time
    assert RequestMetrics(3.0, 3.0, (3.0,), 3.0).throughput is None


def test_an_end_without_a_token_has_a_total_and_no_first_token() -> None:
    metrics = RequestMetrics(1.0, None, (), 5.0)
    assert (metrics.total, metrics.throughput, metrics.ttft) == (4.0, 0.0, None)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30).map(sorted))
def test_tpot_is_the_mean_of_itl(times: list[float]) -> None:
    metrics = RequestMetrics(0.0, 0.0, tuple(times), times[-1])
    assert metrics.tpot == pytest.approx(math.fsum(metrics.itl) / len(metrics.itl), abs=1e-9)
    assert metrics.total == pytest.approx(metrics.ttft + math.fsum(metrics.itl), abs=1e-9)


def test_percentiles_by_nearest_rank() -> None:
    values = [15, 20, 35, 40, 50]  # the example of the usual definition
    ranks = {0: 15, 5: 15, 20: 15, 21: 20, 30: 20, 40: 20, 50: 35, 100: 50}
    assert {percent: percentile(values, percent) for percent in ranks} == ranks


def test_percentiles_do_not_need_sorted_values_and_leave_them_alone() -> None:
    values = [3.0, 1.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1.0, 2.0, 3.0, 3.0]
    assert values == [3.0, 1.0, 2.0]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=40), st.integers(0, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[int], percent: int
) -> None:
    enough = [v for v in values if 100 * sum(w <= v for w in values) >= percent * len(values)]
    assert percentile(values, percent) == min(enough)


@pytest.mark.parametrize("percent", [-1, 100.5, math.nan])
def test_a_percent_outside_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=f"got 2 and {percent}"):
        percentile([1.0, 2.0], percent)


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"need values .* got 0 and 50"):
        percentile([], 50)
