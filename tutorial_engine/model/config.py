"""The numbers of a config.json that fix every shape of the model.

Knows the file format and what this engine supports; knows no tensor and no weight file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutorial_engine.checks import at_least_one

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LARGEST = 2**31 - 1  # of any size: beyond it no file could hold the weights


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a dense Qwen3 model, under Hugging Face's names. Frozen.

    `head_dim` stands on its own: it need not be hidden_size / num_attention_heads.
    Raises ValueError, with the value, for a combination that no model can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            at_least_one(name, getattr(self, name))
            if getattr(self, name) > LARGEST:
                raise ValueError(f"{name} {getattr(self, name)} is more than any model has")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < 3e38:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}): each K/V head serves a whole "
                "group of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE turns pairs), got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads that read the same K/V head (1 = plain multi-head attention)."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` from a checkpoint folder (or the file itself).

        Raises ValueError when the file is missing, is not JSON, or asks for something that this
        engine would silently compute wrongly.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ValueError(
                f"no config.json at {str(path)!r}: give the folder of a Hugging Face checkpoint"
            )
        config = cls.from_dict(_json_object(file))
        for_generation = file.with_name("generation_config.json")
        if for_generation.is_file():  # a chat model has more than one end: it is written there
            ends = _eos_ids(_json_object(for_generation))  # none is none, for transformers as well
            config = replace(config, eos_token_ids=ends)
        return config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """The same from the parsed file. Absent optional keys take transformers' Qwen3 defaults."""
        _refuse_unsupported(raw)
        sizes: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 32768}
        sizes |= {name: raw[name] for name in SIZES if raw.get(name) is not None}
        if "num_key_value_heads" in raw:  # null: one per head
            sizes.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
        if missing := [name for name in SIZES if name not in sizes]:
            raise ValueError(f"config.json has no {missing[0]!r}; every Qwen3 checkpoint states it")
        return cls(
            **sizes,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=_flag(raw, "attention_bias"),
            eos_token_ids=_eos_ids(raw),
        )


def _json_object(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    """true, or false where it is absent; "false" is a text, which Python would take for true."""
    value = raw.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key} in config.json must be true or false, got {value!r}")
    return bool(value)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """One clear error for each feature that would otherwise change the result without a word."""
    kinds = raw.get("model_type"), raw.get("architectures") or ["Qwen3ForCausalLM"]
    if kinds != ("qwen3", ["Qwen3ForCausalLM"]):
        raise ValueError(
            f"unsupported architecture: model_type {kinds[0]!r}, architectures {kinds[1]!r}; this "
            "engine runs dense 'qwen3' checkpoints, ['Qwen3ForCausalLM']"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"unsupported hidden_act {raw['hidden_act']!r}; Qwen3 uses 'silu'")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantised checkpoints are not supported (config.json has quantization_config); "
            "use the fp32 or bf16 checkpoint"
        )
    layers = raw.get("layer_types") or []
    is_full = isinstance(layers, list) and all(kind == "full_attention" for kind in layers)
    if _flag(raw, "use_sliding_window") or not is_full:
        raise ValueError(
            "sliding-window layers are not supported (use_sliding_window="
            f"{raw.get('use_sliding_window')!r}, layer_types {str(layers)[:80]})"
        )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """RoPE's base. transformers 5 nests it in rope_parameters; 4 has rope_theta + rope_scaling."""
    tables = [raw.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    rope = {
        key: value for table in tables if isinstance(table, dict) for key, value in table.items()
    }
    per_layer = any(isinstance(value, dict) for value in rope.values())
    if per_layer or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"rope_scaling and rope_parameters must be one table for all layers, got {tables}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope scaling {kind!r} is not implemented; only 'default' is. Remove the scaling from "
            "config.json to use the model within its original context length"
        )
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial!r} is not implemented; Qwen3 turns all")
    return rope.get("rope_theta", raw.get("rope_theta", 10000.0))


def _eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id must be one token id or a list of them, got {eos!r}")
    return ids
