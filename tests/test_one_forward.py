"""What lesson 02 measures: the work is counted right, and a forward is the one it says it is."""

import math

import pytest
import torch

from tools.bench import one_forward
from tutorial_engine.lab.one_forward import (
    Work,
    against_the_roof,
    best_seconds,
    count_operations,
    floor,
    ready,
    token_times,
)
from tutorial_engine.lab.roofline import Roofline, forward_bytes, forward_flops, weight_bytes
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


def test_sequences_share_the_weights_and_nothing_else(model: Qwen3ForCausalLM) -> None:
    config, one, eight = model.config, Work(1, 2, 5), Work(8, 2, 5)
    assert eight.flops(config) == 8 * one.flops(config) == 8 * forward_flops(config, 2, 5)
    assert one.num_bytes(config, 2) == forward_bytes(config, 2, 5, 2)
    shared = (8 * one.num_bytes(config) - eight.num_bytes(config)) / 7
    assert shared == weight_bytes(config)


def test_a_forward_with_its_cache_ready_gives_what_the_whole_text_gives(
    model: Qwen3ForCausalLM,
) -> None:
    with torch.inference_mode():
        whole = ready(model, Work(1, 9, 0), cached=False)()
        for work in (Work(1, 9, 0), Work(1, 1, 8), Work(3, 2, 7)):
            run = ready(model, work)
            hidden = run()
            assert hidden.shape[0] == work.num_seqs * work.new
            torch.testing.assert_close(hidden[-1], whole[-1], atol=1e-4, rtol=0)
            torch.testing.assert_close(run(), hidden, atol=1e-4, rtol=0)  # it can run again
    with pytest.raises(ValueError, match="old=8"):
        ready(model, Work(1, 1, 8), cached=False)


def test_operations_and_least_times_are_those_of_the_function() -> None:
    x = torch.ones(3)
    assert count_operations(lambda: (x + 1) * 2) == 2
    calls: list[str] = []
    best = best_seconds([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == [*"ababab"] and all(0 <= one < math.inf for one in best)


def test_token_times_leave_the_model_as_it_was(model: Qwen3ForCausalLM) -> None:
    usual = model.default_attention
    for use_cache in (True, False):
        assert all(one > 0 for one in token_times(model, [65] * 8, use_cache, repeat=1, steps=3))
    assert model.default_attention is usual


@pytest.mark.parametrize("found", [[1e30], [1.0, 1e30], [1.0, 2.0, 4.0, 3.0]])
def test_limits_that_a_forward_seems_to_beat_are_measured_again(
    found: list[float], model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward takes a millisecond; `found` are the bandwidths that are measured, in turn."""
    work, left = Work(1, 1, 4), [*found]
    monkeypatch.setattr(one_forward, "best_seconds", lambda ways, repeat: [1e-3])
    monkeypatch.setattr(one_forward, "measure_peak_flops", lambda dtype: 1e30)
    monkeypatch.setattr(one_forward, "measure_bandwidth", lambda: left.pop(0))
    roof, took = against_the_roof(model, {"a": work})
    assert not left and roof == Roofline(max(found), 1e30) and took == {"a": 1e-3}
    assert (took["a"] >= floor(model.config, work, roof)) == (1e30 in found)
