"""The time that passes, and the time that is made."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial_engine.engine.clock import VirtualClock, WallClock


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


@given(st.lists(st.integers(1, 500), max_size=20))
def test_virtual_times_are_the_same_each_time(tokens: list[int]) -> None:
    times = []
    for _ in range(2):
        clock = VirtualClock()
        for n in tokens:
            clock.forward_done(n)
        times.append(clock.now())
    assert times[0] == times[1] == pytest.approx(0.010 * len(tokens) + 0.001 * sum(tokens))


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
