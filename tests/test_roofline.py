"""The counts against independent counting, the measurements against the plain clock."""

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from checkpoints import BASE, QWEN3_06B
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tutorial_engine.bench import roofline
from tutorial_engine.bench.roofline import (
    Roofline,
    bandwidth_probe,
    decode_floor,
    forward_bytes,
    forward_flops,
    measure_bandwidth,
    measure_peak_flops,
    weight_bytes,
)
from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import PackedLinear
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

UNTIED = ModelConfig(**BASE)
CONFIGS = {
    "untied": UNTIED,
    "tied": ModelConfig(**BASE | {"tie_word_embeddings": True}),
    "odd heads": ModelConfig(**BASE | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "bias": ModelConfig(**BASE | {"attention_bias": True, "head_dim": 20}),
}
config_of = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def batch_of(cache: GrowingKVCache, ids: Sequence[int], computed: int = 0) -> Batch:
    allocation = cache.allocate("it", ids, computed, len(ids) - computed)
    assert allocation is not None
    return Batch.from_allocations([ids[computed:]], [allocation], ["it"])


def counted_flops(config: ModelConfig, context: int, new: int, logits: int) -> int:
    """What PyTorch itself counts while the plain model runs with the textbook attention."""
    model, cache = Qwen3ForCausalLM(config).draw_weights(), GrowingKVCache()
    attention = NaiveAttention(cache=cache)
    with torch.inference_mode():
        if context:
            model(batch_of(cache, [1] * context), attention)
        batch = batch_of(cache, [1] * context + [2] * new, context)
        with FlopCounterMode(display=False) as counter:
            model.compute_logits(model(batch, attention)[-logits:])
    return counter.get_total_flops()


@config_of
@pytest.mark.parametrize(("context", "new", "logits"), [(0, 7, 1), (9, 1, 1), (5, 4, 4)])
def test_flops_are_those_that_pytorch_counts(
    config: ModelConfig, context: int, new: int, logits: int
) -> None:
    # the textbook computes all pairs and masks some; a fast kernel skips those, and so do we
    masked = new * (new - 1) // 2
    skipped = config.num_hidden_layers * 4 * config.num_attention_heads * config.head_dim * masked
    counted = counted_flops(config, context, new, logits)
    assert forward_flops(config, new, context, logits) == counted - skipped


def test_attention_pairs_by_hand() -> None:
    per_pair = 3 * 4 * 4 * 16  # layers · 4 · heads · head_dim
    one = forward_flops(UNTIED, 1, 0)
    assert forward_flops(UNTIED, 1, 10) - one == 10 * per_pair
    # three new tokens after two see 3 + 4 + 5 = 12 keys, one alone sees 1
    linears = one - per_pair - 2 * 97 * 48
    assert forward_flops(UNTIED, 3, 2) == 3 * linears + 12 * per_pair + 2 * 97 * 48


def test_a_prefill_in_two_parts_costs_what_it_costs_in_one() -> None:
    whole = forward_flops(UNTIED, 12, 0, num_logits=0)
    parts = forward_flops(UNTIED, 5, 0, num_logits=0) + forward_flops(UNTIED, 7, 5, num_logits=0)
    assert whole == parts


@config_of
def test_bytes_are_those_of_the_models_own_tensors(config: ModelConfig) -> None:
    model = Qwen3ForCausalLM(config).draw_weights().bfloat16()
    held = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        held -= model.model.embed_tokens.weight.nbytes  # a forward reads rows of it, not all
    assert weight_bytes(config, 2) == held
    cache = GrowingKVCache()
    with torch.inference_mode():
        for computed in (0, 6):
            batch = batch_of(cache, ([1] * 6 + [2] * 2)[: computed + 6], computed)
            model.float()(batch, NaiveAttention(cache=cache))
    kv = sum(t.nbytes for i in range(3) for t in cache.stacked(i))  # 6 read + 2 written, in fp32
    rows = 2 * config.hidden_size * 4
    assert forward_bytes(config, 2, 6, itemsize=4) == 2 * held + rows + kv


def test_released_model_has_its_known_numbers() -> None:
    assert weight_bytes(QWEN3_06B, 2) == 596_049_920 * 2
    assert forward_bytes(QWEN3_06B, 1, 0, 2) - weight_bytes(QWEN3_06B, 2) == 2048 + 114_688
    assert forward_flops(QWEN3_06B, 1) == pytest.approx(2 * 596_049_920, rel=1e-3)


def test_decode_is_limited_by_memory_and_prefill_by_arithmetic() -> None:
    machine = Roofline(bandwidth=50e9, peak_flops=200e9)
    assert machine.ridge == 4
    decode = forward_flops(QWEN3_06B, 1, 128) / forward_bytes(QWEN3_06B, 1, 128, 4)
    prefill = forward_flops(QWEN3_06B, 128) / forward_bytes(QWEN3_06B, 128, 0, 4)
    assert 0.4 < decode < 0.6 < machine.ridge < prefill  # FLOPs per byte


def test_floor_is_bytes_over_bandwidth() -> None:
    assert decode_floor(1_200, 400.0) == 3.0
    with pytest.raises(ValueError, match=r"above 0 bytes per second, got 0"):
        decode_floor(1, 0)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((0,), "num_tokens must be a whole number of at least 1, got 0"),
        ((1, -1), "context_len must be at least 0, got -1"),
        ((2, 0, 3), "num_logits must be from 0 to num_tokens=2, got 3"),
    ],
)
def test_impossible_forwards_are_refused(args: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        forward_flops(UNTIED, *args)


def test_bandwidth_is_bytes_over_seconds_of_the_fastest_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durations = iter([4.0, 2.0] * 10)
    monkeypatch.setattr(roofline, "_seconds", lambda way: (way(), next(durations))[1])
    packed = isinstance(roofline._linear(torch.ones(16, 16)), PackedLinear)
    assert bandwidth_probe(2**20)() == 2**20 / (2.0 if packed else 4.0)


def test_probe_reads_the_whole_buffer_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Tensor] = []
    monkeypatch.setattr(roofline, "_seconds", lambda way: (results.append(way()), 1.0)[1])
    bandwidth_probe(2**20)()
    assert results
    for result in results:  # ones: every way ends in their number, 2**18
        assert result.sum() == 2**18


def test_measuring_takes_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds: Iterator[float] = iter([9.0, 1.0, 5.0, 3.0])
    monkeypatch.setattr(roofline, "bandwidth_probe", lambda size: lambda: next(speeds))
    assert measure_bandwidth(passes=3) == 9.0
    with pytest.raises(StopIteration):
        measure_bandwidth(passes=1)


def test_impatience_ends_a_slow_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(roofline, "PATIENCE", 0.0)
    monkeypatch.setattr(roofline, "flops_probe", lambda dtype: lambda: calls.append(1) or 7.0)
    assert measure_peak_flops(passes=50) == 7.0
    assert len(calls) == 2


def test_this_machine_is_measured_within_seconds() -> None:
    began = time.perf_counter()
    limits = Roofline(measure_bandwidth(2**26, passes=2), measure_peak_flops(passes=2))
    assert time.perf_counter() - began < 20  # about 0.2 on a quiet machine
    assert 1e8 < limits.bandwidth < 1e13 and 1e8 < limits.peak_flops < 1e16


def test_probe_gives_the_best_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, sums = iter([1.0, 5.0, 2.0, 3.0]), iter([10.0, 20.0, 70.0, 30.0])
    monkeypatch.setattr(roofline, "bandwidth_probe", lambda size: lambda: next(reads))
    monkeypatch.setattr(roofline, "flops_probe", lambda dtype: lambda: next(sums))
    assert roofline.roofline_probe(passes=3)() == Roofline(bandwidth=5.0, peak_flops=70.0)


def test_dtypes_that_a_processor_cannot_multiply_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch\.float16"):
        measure_peak_flops(torch.float16)


def test_flops_probe_counts_its_own_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MATMUL", (8, 32, 16))
    monkeypatch.setattr(roofline, "_seconds", lambda run: (run(), 0.5)[1])
    assert roofline.flops_probe(torch.bfloat16)() == 2 * 8 * 32 * 16 / 0.5
