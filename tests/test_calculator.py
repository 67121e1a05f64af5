"""The memory calculator shows what bench.sizing counts, for any config.json."""

import json
from collections.abc import Callable

import pytest
from checkpoints import QWEN3_06B
from explorers import caption_of, check_places, message_of, place, tips, turn, words

from tutorial_engine.lab.sizing import Sizes
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.viz.calculator import AS_FILE, PRESETS, MemoryCalculator, preset

# from the model cards and from vLLM's documentation of the KV cache
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
}
PER_TOKEN = {"Qwen3-0.6B": 112, "Llama-2-7B": 512, "Llama-3.1-8B": 128}  # KiB, 16 bits


@pytest.fixture
def calculator() -> MemoryCalculator:
    return MemoryCalculator(preset("Qwen3-0.6B"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_released_models(calculator: MemoryCalculator, name: str) -> None:
    calculator.buttons[name].click()
    assert calculator.value("config_json") == preset(name)
    said = " ".join(words(calculator, r"sum\d"))
    assert f"{PARAMETERS[name]:,} parameters × 2 bytes" in said
    assert f"= {PER_TOKEN[name] * 1024:,} bytes = {PER_TOKEN[name]} KiB" in said


def test_the_preset_of_qwen_is_the_config_of_the_released_file() -> None:
    config = Sizes.from_json(preset("Qwen3-0.6B")).config
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads"):
        assert getattr(config, name) == getattr(QWEN3_06B, name)


def test_a_config_from_a_checkpoint_can_be_pasted() -> None:
    made = MemoryCalculator((TINY / "config.json").read_text(), context=1024)
    factors = "2 × 4 layers × 2 K/V heads × head_dim 32 × 2 bytes = 1,024 bytes = 1 KiB"
    assert factors in words(made, "sum1")[0]


def test_factors_multiply_to_the_bytes(calculator: MemoryCalculator) -> None:
    said = words(calculator, "sum1")[0]
    assert said.startswith("2 × 28 layers × 8 K/V heads × head_dim 128 × 2 bytes = 114,688 bytes")
    assert said.endswith("(224 KiB with 16 K/V heads)")  # 16 query heads
    turn(calculator, dtype="float32")
    assert "× 4 bytes = 229,376 bytes" in words(calculator, "sum1")[0]


def test_lines_are_as_vllm_logs_them(calculator: MemoryCalculator) -> None:
    left = int(0.9 * 24 * 2**30) - 2 * 596_049_920
    pages = left // (16 * 114_688)
    assert words(calculator, "sum5")[0].startswith(f"GPU KV cache size: {16 * pages:,} tokens")
    times = pages / (4096 / 16)
    said = f"Maximum concurrency for 4,096 tokens per request: {times:.2f}x"
    assert words(calculator, "sum6") == [said]
    assert calculator.num_steps == int(times) + 1  # a step of the slider for each that fits


def test_room_is_told_as_an_upper_bound(calculator: MemoryCalculator) -> None:
    assert "vLLM also subtracts the activations" in words(calculator, "sum4")[0]
    assert any("not given to the engine" in tip for tip in tips(calculator))


def test_bar_is_the_memory_in_proportion(calculator: MemoryCalculator) -> None:
    turn(calculator, 20)
    plan = calculator.plan
    per_byte = place(calculator, "memory.all")[2] / (24 * 2**30)
    wide = {name: place(calculator, name)[2] / per_byte for name in ("weights", "free", "others")}
    assert wide["weights"] == pytest.approx(plan.weight_bytes)
    assert wide["free"] == pytest.approx(plan.kv_bytes - 20 * plan.kv_bytes_per_request)
    assert wide["others"] == pytest.approx(24 * 2**30 - plan.usable_bytes)
    each = [place(calculator, f"kv{i}")[2] / per_byte for i in range(20)]
    assert each == pytest.approx([plan.kv_bytes_per_request] * 20)
    turn(calculator, context=64)  # too thin to be told apart: one box for all of them
    assert "K and V of 20 requests" in " ".join(tips(calculator))
    total = place(calculator, "kv0")[2] / per_byte
    assert total == pytest.approx(20 * calculator.plan.kv_bytes_per_request)


def test_times_are_those_of_the_plan_and_the_longer_one_decides(
    calculator: MemoryCalculator,
) -> None:
    turn(calculator, 8)
    decode, prefill = calculator.plan.decode(8), calculator.plan.prefill()
    assert (decode.bound, prefill.bound) == ("memory", "arithmetic")
    said = f"at least {1000 * decode.least:.3g} ms, limited by memory"
    assert words(calculator, "case0.least") == [said]
    assert f"{8 / decode.least:,.0f} tokens a second" in caption_of(calculator)
    boxes = [place(calculator, f"case0.{name}")[2] for name in ("weights", "K and V", "flops")]
    assert boxes[0] / boxes[1] == pytest.approx(decode.weights / decode.kv)
    assert boxes[2] / sum(boxes[:2]) == pytest.approx(decode.arithmetic / decode.memory)
    computes = place(calculator, "case1.flops")[2]
    assert computes / sum(boxes[:2]) == pytest.approx(prefill.arithmetic / decode.memory)
    turn(calculator, bandwidth=100_000.0)
    assert calculator.plan.decode(8).bound == "arithmetic"
    assert words(calculator, "case0.least")[0].endswith("limited by arithmetic")


NOT_FIT: dict[str, tuple[Callable[[MemoryCalculator], object], str]] = {
    "weights": (lambda c: turn(c, memory=1.0), "do not fit. Choose a smaller dtype"),
    "one request": (lambda c: turn(c, memory=1.5, context=40_000), "not even one fits"),
}


@pytest.mark.parametrize("what", NOT_FIT)
def test_what_does_not_fit_is_said(calculator: MemoryCalculator, what: str) -> None:
    change, said = NOT_FIT[what]
    change(calculator)
    assert calculator.num_steps == 1 and said in caption_of(calculator)
    check_places(calculator.shown)


@pytest.mark.parametrize("changes", [{"context": 1}, {"context": 40_960}, {"memory": 100_000.0}])
def test_extreme_knobs_are_readable(calculator: MemoryCalculator, changes: dict) -> None:
    turn(calculator, **changes)
    for step in {0, 1, calculator.num_steps - 1}:
        check_places(turn(calculator, step).shown)
        assert calculator.num_steps <= 257


def test_a_file_without_a_dtype_needs_one_to_be_chosen(
    calculator: MemoryCalculator,
) -> None:
    silent = {k: v for k, v in PRESETS["Llama-2-7B"].items() if k != "torch_dtype"}
    turn(calculator, config_json=json.dumps(silent))
    assert "does not say its dtype: choose one" in message_of(calculator)
    turn(calculator, dtype="float16")
    assert not message_of(calculator) and calculator.value("dtype") != AS_FILE


def test_unknown_presets_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no preset 'GPT-9'; there are Qwen3-0.6B"):
        preset("GPT-9")
