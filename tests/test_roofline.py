"""What a forward and a model need, counted: against PyTorch's own counts, transformers, by hand."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import FAMILY, QWEN3_06B, config_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.lab import one_forward, roofline
from tutorial_engine.lab.one_forward import (
    Work,
    against_the_roof,
    best_seconds,
    floor,
    ready,
)
from tutorial_engine.lab.roofline import (
    Roofline,
    bandwidth_probe,
    forward_bytes,
    forward_flops,
    weight_bytes,
)
from tutorial_engine.lab.sizing import Plan, Sizes
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.fast import PackedLinear

UNTIED = config_of()
CONFIGS = {
    "untied": UNTIED,
    "tied": config_of(tie_word_embeddings=True),
    "odd heads": config_of(num_attention_heads=6, num_key_value_heads=3),
    "bias": config_of(attention_bias=True, head_dim=20),
    "llama": config_of(**FAMILY["llama"]),
    "qwen2": config_of(**FAMILY["qwen2"]),
}
config_of = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def batch_of(cache: GrowingKVCache, ids: Sequence[int], computed: int = 0) -> Batch:
    allocation = cache.allocate("it", ids, computed, len(ids) - computed)
    assert allocation is not None
    return Batch.from_allocations([ids[computed:]], [allocation], ["it"])


def counted_flops(config: ModelConfig, context: int, new: int, logits: int) -> int:
    """What PyTorch itself counts while the plain model runs with the textbook attention."""
    model, cache = CausalLM(config).draw_weights(), GrowingKVCache()
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


@config_of
def test_bytes_are_those_of_the_models_own_tensors(config: ModelConfig) -> None:
    model = CausalLM(config).draw_weights().bfloat16()
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


def test_bandwidth_is_bytes_over_seconds_of_the_fastest_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    durations = iter([4.0, 2.0] * 10)
    monkeypatch.setattr(roofline, "_seconds", lambda way: (way(), next(durations))[1])
    packed = isinstance(roofline._linear(torch.ones(16, 16)), PackedLinear)
    assert bandwidth_probe(2**20)() == 2**20 / (2.0 if packed else 4.0)


def test_measuring_takes_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds: Iterator[float] = iter([1.0, 9.0, 5.0, 3.0])
    monkeypatch.setattr(roofline, "bandwidth_probe", lambda *_: lambda: next(speeds))
    monkeypatch.setattr(roofline, "flops_probe", lambda *_: lambda: 2.0)
    assert roofline.roofline_probe(passes=3)() == Roofline(9.0, 2.0)
    assert list(speeds) == [], "one that warms up, and three"


def test_flops_probe_counts_its_own_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MATMUL", (8, 32, 16))
    monkeypatch.setattr(roofline, "_seconds", lambda run: (run(), 0.5)[1])
    assert roofline.flops_probe(torch.bfloat16)() == 2 * 8 * 32 * 16 / 0.5


# -- one forward, as lesson 02 measures it ---------------------------------------------------------


def test_sequences_share_the_weights_and_nothing_else(model: CausalLM) -> None:
    config, one, eight = model.config, Work(1, 2, 5), Work(8, 2, 5)
    assert eight.flops(config) == 8 * one.flops(config) == 8 * forward_flops(config, 2, 5)
    assert one.num_bytes(config, 2) == forward_bytes(config, 2, 5, 2)
    shared = (8 * one.num_bytes(config) - eight.num_bytes(config)) / 7
    assert shared == weight_bytes(config)


def test_a_forward_with_its_cache_ready_gives_what_the_whole_text_gives(
    model: CausalLM,
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


def test_the_functions_are_called_in_turn_and_timed() -> None:
    calls: list[str] = []
    best = best_seconds([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == [*"ababab"] and all(0 <= one < math.inf for one in best)


@pytest.mark.parametrize("found", [[1e30], [1.0, 1e30], [1.0, 2.0, 4.0, 3.0]])
def test_limits_that_a_forward_seems_to_beat_are_measured_again(
    found: list[float], model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward takes a millisecond; `found` are the bandwidths that are measured, in turn."""
    work, left = Work(1, 1, 4), [*found]
    monkeypatch.setattr(one_forward, "best_seconds", lambda ways, repeat: [1e-3])
    measured = lambda *_, **__: lambda: Roofline(left.pop(0), 1e30)  # noqa: E731
    monkeypatch.setattr(one_forward, "roofline_probe", measured)
    roof, took = against_the_roof(model, {"a": work})
    assert not left and roof == Roofline(max(found), 1e30) and took == {"a": 1e-3}
    assert (took["a"] >= floor(model.config, work, roof)) == (1e30 in found)


# -- any config.json -------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama, tied, bias": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True),
    "llama, one K/V head for each": LlamaConfig(**SMALL | {"num_key_value_heads": None}),
    "mistral": MistralConfig(**SMALL, head_dim=20, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=20, tie_word_embeddings=True),
    "qwen3, its own head_dim": Qwen3Config(**SMALL),
}
LLAMA = {"model_type": "llama", "torch_dtype": "float16"} | SMALL


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_parameters_and_cache_are_those_of_transformers(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = Sizes.from_json(config.to_json_string(use_diff=False))
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    keys = model.model.layers[0].self_attn.k_proj.weight
    per_token = 2 * len(model.model.layers) * len(keys) * 2
    assert plan(sizes).kv_bytes_per_token == per_token


@pytest.mark.parametrize(
    ("changes", "kv_heads", "head_dim"),
    [
        ({"num_key_value_heads": ...}, 6, 8),  # the first Llamas do not state it
        ({"head_dim": 32}, 2, 32),
        ({"head_dim": None}, 2, 8),
        ({"model_type": "qwen3"}, 2, 128),
    ],
)
def test_what_a_file_leaves_out(changes: dict[str, Any], kv_heads: int, head_dim: int) -> None:
    sizes = Sizes.from_json(changed(**changes))
    config = sizes.config
    assert (config.num_key_value_heads, config.head_dim) == (kv_heads, head_dim)
    assert sizes.dtype == torch.float16


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": ..., "dtype": "float32"}, torch.float32),
        ({"torch_dtype": ...}, None),
    ],
)
def test_dtype_has_two_names_and_may_be_missing(names: dict[str, Any], dtype: Any) -> None:
    assert Sizes.from_json(changed(**names)).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing: add it, .*number of layers"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2': .*llama, mistral, qwen2, qwen3"),
        ({"num_local_experts": 8}, "num_local_experts is 8: .*dense"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512: .*compressed"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*remove the field"),
        ({"text_config": {}}, "text_config .*paste it alone"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096: .*Remove"),
        ({"layer_types": ["sliding_attention"]}, "Remove sliding_window"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "num_key_value_heads is .*it is 6"),
        ({"hidden_size": 50}, "head_dim is missing, .*50 / .*6 is no whole number: add head_dim"),
        ({"hidden_size": "many"}, "'many'.*add head_dim"),
        ({"torch_dtype": "int4"}, "dtype is 'int4': it must be one of bfloat16"),
    ],
)
def test_what_would_be_counted_wrongly_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sizes.from_json(changed(**changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON.*Paste the whole file"),
        ("[1]", "but a list"),
    ],
)
def test_what_is_no_config_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sizes.from_json(text)


def changed(**changes: Any) -> str:
    """The small Llama's config.json with some fields changed; ... takes one away."""
    return json.dumps({k: v for k, v in (LLAMA | changes).items() if v is not ...})


def plan(sizes: Sizes, **changes: Any) -> Plan:
    """On a machine of 1 MB, 1 kB/s and 1 MFLOP/s, so that numbers can be counted by hand."""
    made = Plan(sizes, torch.float16, 20, 1_000_000, 0.9, Roofline(1e3, 1e6))
    return replace(made, **changes)


def test_what_fits_is_counted_in_whole_pages() -> None:
    made = plan(Sizes.from_json(changed()))
    each = 2 * 3 * 2 * 8 * 2  # K and V, layers, K/V heads, head_dim, bytes
    assert made.kv_bytes_per_token == each == 192
    assert made.kv_bytes_per_request == 20 * each
    left = 900_000 - 2 * made.sizes.num_parameters
    pages = left // (16 * each)
    assert made.kv_bytes == left and made.num_pages == pages
    assert made.concurrency == pages / 2  # 20 tokens need two pages of 16
    assert made.num_tokens == 20 * pages // 2
    assert made.num_requests == pages // 2
    wider = plan(Sizes.from_json(changed()), dtype=torch.float32)
    assert wider.kv_bytes_per_token == 2 * each and wider.weight_bytes == 2 * made.weight_bytes


def test_weights_that_do_not_fit_leave_no_room() -> None:
    made = plan(Sizes.from_json(changed()), memory_bytes=100_000)
    assert made.weight_bytes > 100_000
    assert made.kv_bytes == made.num_pages == made.num_tokens == made.num_requests == 0


def test_batch_shares_the_weights_and_nothing_else() -> None:
    made = plan(Sizes.from_json(changed()))
    one, eight = made.decode(1), made.decode(8)
    assert eight.weights == one.weights and eight.least > one.least
    assert eight.kv == pytest.approx(8 * one.kv)
    assert eight.arithmetic == pytest.approx(8 * one.arithmetic)
    read = 20 * 192 + 48 * 2  # K and V of the whole context, and a row of the embedding
    assert one.kv == pytest.approx(read / 1e3)
    assert one.memory == one.weights + one.kv


def test_the_slower_limit_decides() -> None:
    sizes = Sizes.from_json(changed())
    slow_memory, slow_cores = plan(sizes), plan(sizes, roofline=Roofline(1e9, 1e3))
    for time in (slow_memory.decode(4), slow_memory.prefill()):
        assert time.bound == "memory" and time.least == time.memory > time.arithmetic
    for time in (slow_cores.decode(4), slow_cores.prefill()):
        assert time.bound == "arithmetic" and time.least == time.arithmetic > time.memory
    assert slow_cores.prefill().arithmetic > 15 * slow_cores.decode(1).arithmetic


def test_a_context_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens is longer than max_position_embeddings, 64"):
        plan(Sizes.from_json(changed()), context_len=65)
