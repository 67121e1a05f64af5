"""config.json: what is read, and what is refused with which words."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from checkpoints import BASE
from conftest import MakeCheckpoint
from transformers import AutoConfig

from tutorial_engine.model.config import ModelConfig

QWEN3_06B = {  # the released checkpoint's file, written by transformers 4
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)
REQUIRED = ("model_type", *SIZES, "num_key_value_heads")


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in QWEN3_06B.items() if k != key}


def test_released_config_is_read_and_frozen() -> None:
    config = ModelConfig.from_dict(QWEN3_06B)
    assert config == checkpoints.QWEN3_06B and config.group_size == 2
    with pytest.raises(AttributeError):
        config.hidden_size = 7  # type: ignore[misc]


def same_as_transformers(folder: Path, *but: str) -> ModelConfig:
    ours, theirs = ModelConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    for name in {*BASE, "rms_norm_eps"} - {"rope_theta", *but}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ModelConfig.from_pretrained(str(folder / "config.json")) == ours
    return ours


def test_saved_config_is_read_as_transformers_reads_it(make_checkpoint: MakeCheckpoint) -> None:
    changes = {"rope_theta": 5e5, "head_dim": 20, "attention_bias": True, "rms_norm_eps": 1e-5}
    ours = same_as_transformers(make_checkpoint(eos_token_id=[3, 5], **changes))
    assert {name: getattr(ours, name) for name in changes} == changes
    assert ours.eos_token_ids == (3, 5)


def test_absent_optional_keys_take_transformers_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: QWEN3_06B[k] for k in REQUIRED}))
    assert same_as_transformers(tmp_path).eos_token_ids == ()


MORE_SIZES = ("head_dim", "max_position_embeddings")
FLAGS = ("tie_word_embeddings", "attention_bias", "use_sliding_window")
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "'qwen3_moe'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window.*: 1"),
        ({"rope_scaling": YARN}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 25}, "head_dim.*25"),
        ({"num_key_value_heads": 5}, r"\(16\).*num_key_value_heads \(5\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        ({"hidden_size": "1024"}, "hidden_size.*'1024'"),
        ({"vocab_size": 1.5}, "vocab_size.*1.5"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps.*0.0"),
        ({"rope_theta": -1.0}, "rope_theta.*-1.0"),
        *(({name: 10**30}, f"{name} {10**30} is more") for name in (*SIZES, *MORE_SIZES)),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, got 1000"),
        ({"rope_theta": float("inf")}, "rope_theta .*inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .*nan"),
        ({"rms_norm_eps": True}, "rms_norm_eps .*True"),
        *(({name: 5}, f"{name} .* table, got 5") for name in ("rope_scaling", "rope_parameters")),
        ({"rope_parameters": {"full_attention": YARN}}, r"their own for \['full_attention'\]"),
        ({"layer_types": 5}, "layer_types .* list, got 5"),
        *(({name: "false"}, f"{name} .* true or false, got 'false'") for name in FLAGS),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_dict({**QWEN3_06B, **changes})


@pytest.mark.parametrize("key", ["model_type", *SIZES])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"model_type None|no '{key}'"):
        ModelConfig.from_dict(without(key))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json at .*nowhere"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "JSON object, got list"),
        ("[" * 10**5 + "]" * 10**5, "not valid JSON"),
    ],
    ids=["no JSON", "a list", "nested"],
)
def test_file_that_is_no_config_is_named(tmp_path: Path, file: str, text: str, named: str) -> None:
    (write(tmp_path, 7) / file).write_text(text)
    with pytest.raises(ValueError, match=rf"{file}.*{named}"):
        ModelConfig.from_pretrained(tmp_path)


# -- where a text may end -----------------------------------------------------------------------


def write(folder: Path, eos: Any, for_generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN3_06B, "eos_token_id": eos}))
    if for_generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(for_generation))
    return folder


@pytest.mark.parametrize(
    ("eos", "for_generation", "ends"),
    [
        (151645, None, (151645,)),
        ([3, 5], None, (3, 5)),
        (0, None, (0,)),
        (None, None, ()),
        (7, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        (7, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {"temperature": 0.6}, (7,)),
        (7, {"eos_token_id": []}, (7,)),
    ],
)
def test_ends_are_those_of_the_generation_config_before_the_configs(
    tmp_path: Path, eos: Any, for_generation: Any, ends: tuple[int, ...]
) -> None:
    write(tmp_path, eos, for_generation)
    for path in (tmp_path, tmp_path / "config.json"):
        assert ModelConfig.from_pretrained(path).eos_token_ids == ends


def test_ends_are_transformers_ends(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(eos_token_id=[3, 5])
    for eos in ([9, 4], 6):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        theirs = checkpoints.load_reference(folder).generation_config.eos_token_id
        ours = ModelConfig.from_pretrained(folder).eos_token_ids
        assert list(ours) == (theirs if isinstance(theirs, list) else [theirs])


@pytest.mark.parametrize("eos", ["</s>", True, -1, 1.5, [3, "4"], [[3]], {"id": 3}, [None]])
def test_end_that_is_no_token_id_is_refused(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id must be"):
        ModelConfig.from_dict({**QWEN3_06B, "eos_token_id": eos})
    with pytest.raises(ValueError, match="eos_token_id must be"):
        ModelConfig.from_pretrained(write(tmp_path, 7, {"eos_token_id": eos}))
