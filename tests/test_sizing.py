"""What a model needs: counted from any config.json, against transformers and by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tutorial_engine.lab.roofline import Roofline
from tutorial_engine.lab.sizing import Plan, Sizes

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
        ({"num_key_value_heads": None}, 6, 8),
        ({}, 2, 8),
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
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": ..., "dtype": "float32"}, torch.float32),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": ...}, None),
    ],
)
def test_dtype_has_two_names_and_may_be_missing(names: dict[str, Any], dtype: Any) -> None:
    assert Sizes.from_json(changed(**names)).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing: add it, .*number of layers"),
        ({"vocab_size": None}, "vocab_size is missing: add it"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2': .*llama, mistral, qwen2, qwen3"),
        ({"model_type": ...}, "model_type is None: .*write that name"),
        ({"num_local_experts": 8}, "num_local_experts is 8: .*dense"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512: .*compressed"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*remove the field"),
        ({"text_config": {}}, "text_config .*paste it alone"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096: .*Remove"),
        ({"layer_types": ["sliding_attention"]}, "Remove sliding_window"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "num_key_value_heads is .*it is 6"),
        ({"hidden_size": 50}, "head_dim is missing, .*50 / .*6 is no whole number: add head_dim"),
        ({"hidden_size": "many"}, "'many'.*add head_dim"),
        (
            {"num_attention_heads": 5, "head_dim": 8},
            r"num_attention_heads \(5\) must be a multiple",
        ),
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
        ('{"a": 1,', "not valid JSON"),
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
    assert made.kv_bytes == left and made.num_tokens == 16 * pages
    assert made.concurrency == pages / 2  # 20 tokens need two pages of 16
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_len": 0}, "context_len"),
        ({"context_len": 65}, "65 tokens is longer than max_position_embeddings, 64"),
        ({"fraction": 1.5}, "fraction must be"),
        ({"roofline": Roofline(0.0, 1.0)}, "bandwidth must be above 0"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(Sizes.from_json(changed()), **changes)
