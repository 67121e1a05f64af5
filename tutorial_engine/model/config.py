"""Introduced in notebook 01. The numbers of a config.json that fix every shape of the model.

Knows the file format and what this engine supports; knows no tensor and no weight file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("qwen3",)
_NO_KEY = "config.json has no {!r}; every Qwen3 checkpoint states it"
_ABSENT = object()
_LARGEST_FLOAT = 3e38  # of fp32
_LARGEST = 2**31 - 1  # of any size: beyond it no file could hold the weights


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
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value > _LARGEST:
                raise ValueError(f"{name} {value} is more than any model has ({_LARGEST} at most)")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < _LARGEST_FLOAT:
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
            ends = _eos_ids(_json_object(for_generation))
            config = replace(config, eos_token_ids=ends or config.eos_token_ids)
        return config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """The same from the parsed file. Absent optional keys take transformers' Qwen3 defaults."""
        _refuse_unsupported(raw)
        heads = _required(raw, "num_attention_heads")
        kv_heads = raw.get("num_key_value_heads", _ABSENT)
        if kv_heads is _ABSENT:
            raise ValueError(_NO_KEY.format("num_key_value_heads"))
        return cls(
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=_required(raw, "hidden_size"),
            intermediate_size=_required(raw, "intermediate_size"),
            num_hidden_layers=_required(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,  # null: one per head
            head_dim=raw["head_dim"] if raw.get("head_dim") is not None else 128,
            max_position_embeddings=raw.get("max_position_embeddings", 32768),
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


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(_NO_KEY.format(key))
    return raw[key]


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    """true, or false where it is absent; "false" is a text, which Python would take for true."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} in config.json must be true or false, got {value!r}")
    return bool(value)


def _table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table of the file, or an empty one where it is absent."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} in config.json must be a table, got {value!r}")
    return value or {}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """One clear error for each feature that would otherwise change the result without a word."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"unsupported architecture: model_type {model_type!r}; this engine runs "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} (dense) checkpoints"
        )
    architectures = raw.get("architectures") or ["Qwen3ForCausalLM"]
    if architectures != ["Qwen3ForCausalLM"]:
        raise ValueError(
            f"unsupported architecture: {architectures!r}; this engine runs ['Qwen3ForCausalLM']"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"unsupported hidden_act {raw['hidden_act']!r}; Qwen3 uses 'silu'")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantised checkpoints are not supported (config.json has quantization_config); "
            "use the fp32 or bf16 checkpoint"
        )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types in config.json must be a list, got {kinds!r}")
    sliding = [kind for kind in kinds if kind != "full_attention"]
    if _flag(raw, "use_sliding_window") or sliding:
        raise ValueError(
            "sliding-window layers are not supported (use_sliding_window="
            f"{raw.get('use_sliding_window')!r}, layer_types other than full_attention: "
            f"{len(sliding)})"
        )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """RoPE's base. transformers 5 nests it in rope_parameters; 4 has rope_theta + rope_scaling."""
    rope = {**_table(raw, "rope_scaling"), **_table(raw, "rope_parameters")}
    if tables := sorted(str(key) for key, value in rope.items() if isinstance(value, Mapping)):
        raise ValueError(
            f"rope parameters of their own for {tables} are not implemented: state rope_type and "
            "rope_theta once, for all layers"
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
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id must be one token id or a list of them, got {eos!r}")
    return ids
