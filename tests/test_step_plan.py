"""The limits of a step, and what a share of it says about its request."""

import dataclasses
from typing import Any

import pytest

from tutorial_engine.cache.rows import Allocation
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.step_plan import ScheduledRequest, SchedulerConfig, StepPlan
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import StopChecker


def share(first: int, num_tokens: int, prompt: int = 6, outputs: int = 0) -> ScheduledRequest:
    params = SamplingParams()
    request = Request("a", range(10, 10 + prompt), Sampler(params), StopChecker(params))
    for i in range(outputs):
        request.append(SampledToken(50 + i), 0.0)
    slots = range(first, first + num_tokens)
    return ScheduledRequest(
        request, num_tokens, Allocation(first, slots, slice(0, first + num_tokens))
    )


@pytest.mark.parametrize(
    ("one", "token_ids", "yields"),
    [
        (share(0, 6), [10, 11, 12, 13, 14, 15], True),  # a whole prompt
        (share(0, 4), [10, 11, 12, 13], False),  # its beginning
        (share(2, 3), [12, 13, 14], False),  # its middle
        (share(5, 1), [15], True),  # its end
        (share(7, 1, outputs=2), [51], True),  # a decode
        (share(0, 8, outputs=2), [10, 11, 12, 13, 14, 15, 50, 51], True),  # resumed, all again
        (share(0, 6, outputs=2), [10, 11, 12, 13, 14, 15], False),  # resumed, its prompt only
    ],
)
def test_a_share_has_its_tokens_and_yields_one_when_it_reaches_the_newest(
    one: ScheduledRequest, token_ids: list[int], yields: bool
) -> None:
    assert one.token_ids == token_ids
    assert one.yields_token is yields


@pytest.mark.parametrize(
    "name",
    "max_num_seqs max_num_batched_tokens max_model_len long_prefill_token_threshold".split(),
)
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", True])
def test_a_limit_below_one_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        SchedulerConfig(**{name: value})
    assert getattr(SchedulerConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ["max_model_len", "long_prefill_token_threshold"])
def test_these_limits_can_be_left_out(name: str) -> None:
    assert getattr(SchedulerConfig(**{name: None}), name) is None


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_these_limits_cannot_be_left_out(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got None"):
        SchedulerConfig(**{name: None})


@pytest.mark.parametrize("value", [1, 0, None, "no"])
def test_chunked_prefill_is_a_yes_or_no(value: Any) -> None:
    with pytest.raises(ValueError, match=f"enable_chunked_prefill is True or False, got {value!r}"):
        SchedulerConfig(enable_chunked_prefill=value)


def test_limits_are_frozen_and_can_be_copied() -> None:
    config = SchedulerConfig(max_num_seqs=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 3  # type: ignore[misc]
    assert dataclasses.replace(config, max_num_batched_tokens=7).max_num_seqs == 2
    with pytest.raises(ValueError, match="max_num_seqs"):
        dataclasses.replace(config, max_num_seqs=0)


def test_plans_do_not_share_their_lists() -> None:
    one, other = StepPlan(5), StepPlan(5)
    one.scheduled.append(share(0, 1))
    one.preempted.append(share(0, 1).request)
    assert (other.scheduled, other.preempted) == ([], [])
