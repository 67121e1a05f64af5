"""The numbers of a config.json that fix every shape of the model.

Dense models of the Llama family are one decoder: `FAMILY` says in what they differ. Knows the file
format and what this engine supports; knows no tensor and no weight file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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
MODELS = (
    "Llama 2 and 3 (and TinyLlama, SmolLM2), Qwen2 and 2.5, Qwen3, and Mistral without a sliding "
    "window, all dense"
)


class Kind(NamedTuple):
    """In what a model_type differs from the others. None: its config.json says it."""

    architecture: str
    qk_norm: bool = False  # an RMSNorm on each head of q and k
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    head_dim: int | None = None  # where the file has none; None: hidden_size / heads
    max_position_embeddings: int = 32768  # where the file has none

    def parts(self, attention_bias: bool) -> dict[str, Any]:
        """Which parts the decoder has, under their names in ModelConfig."""
        return {
            "qk_norm": self.qk_norm,
            "qkv_bias": attention_bias if self.qkv_bias is None else self.qkv_bias,
            "o_bias": attention_bias if self.o_bias is None else self.o_bias,
        }


FAMILY = {
    "llama": Kind("LlamaForCausalLM", max_position_embeddings=2048),
    "mistral": Kind("MistralForCausalLM", False, False, False, None, 131072),
    "qwen2": Kind("Qwen2ForCausalLM", qkv_bias=True, o_bias=False),
    "qwen3": Kind("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}


class RopeScaling(NamedTuple):
    """The four numbers of Llama 3's RoPE (rope_type "llama3"): see `rope.scaled_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a dense model, under Hugging Face's names. Frozen.

    `head_dim` stands on its own: it need not be hidden_size / num_attention_heads. What the last
    four say is in `FAMILY`. Raises ValueError, with the value, for a combination that no model can
    have.
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
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False

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
        """The same from the parsed file. Absent optional keys take transformers' defaults."""
        kind = _kind(raw)
        _refuse_unsupported(raw)
        heads = raw.get("num_attention_heads")
        sizes: dict[str, Any] = {"max_position_embeddings": kind.max_position_embeddings}
        if "num_key_value_heads" in raw or raw["model_type"] == "llama":  # null: one per head
            sizes["num_key_value_heads"] = heads
        if kind.head_dim:
            sizes["head_dim"] = kind.head_dim
        elif isinstance(heads, int) and heads > 0 and isinstance(raw.get("hidden_size"), int):
            sizes["head_dim"] = raw["hidden_size"] // heads
        sizes |= {name: raw[name] for name in SIZES if raw.get(name) is not None}
        if missing := [name for name in SIZES if sizes.get(name) is None]:
            raise ValueError(
                f"config.json has no {missing[0]!r}; every {raw['model_type']} checkpoint states it"
            )
        return cls(
            **sizes,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            eos_token_ids=_eos_ids(raw),
            **kind.parts(_flag(raw, "attention_bias")),
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


def _kind(raw: Mapping[str, Any]) -> Kind:
    """The row of FAMILY. ValueError, with the names of those that run, for any other model."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    kind = FAMILY.get(model_type) if isinstance(model_type, str) else None
    if kind is not None and architectures not in (None, [], [kind.architecture]):
        raise ValueError(
            f"model_type {model_type!r} is a {kind.architecture} here, but architectures says "
            f"{architectures!r}: this engine runs no other head, and both must agree"
        )
    if kind is None:
        raise ValueError(
            f"unsupported architecture: model_type {model_type!r}, architectures "
            f"{architectures!r}. This engine runs {MODELS}: "
            f"{', '.join(kind.architecture for kind in FAMILY.values())}"
        )
    return kind


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """One clear error for each feature that would otherwise change the result without a word."""
    name = raw["model_type"]
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"unsupported hidden_act {raw['hidden_act']!r}; {name} uses 'silu'")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantised checkpoints are not supported (config.json has quantization_config); "
            "use the fp32 or bf16 checkpoint"
        )
    if _flag(raw, "mlp_bias"):
        raise ValueError(f"mlp_bias is not implemented: this engine runs {MODELS}, without it")
    layers = raw.get("layer_types") or []
    is_full = isinstance(layers, list) and all(kind == "full_attention" for kind in layers)
    window = None  # Qwen's counts with use_sliding_window only
    if name in ("llama", "mistral"):
        window = raw.get("sliding_window", 4096 if name == "mistral" else None)
    if _flag(raw, "use_sliding_window") or not is_full or window is not None:
        said = {key: raw[key] for key in ("use_sliding_window", "layer_types") if key in raw}
        if window is not None:
            said["sliding_window"] = window
        if name == "mistral" and "sliding_window" not in raw:
            said["where it is absent"] = "4096, as in transformers; null is none"
        raise ValueError(
            f"sliding-window layers are not supported ({str(said)[:160]}). This engine runs "
            f"{MODELS}"
        )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of RoPE: transformers 5 writes rope_parameters, 4 rope_scaling."""
    tables = [raw.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    rope = {
        key: value for table in tables if isinstance(table, dict) for key, value in table.items()
    }
    per_layer = any(isinstance(value, dict) for value in rope.values())
    if per_layer or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"rope_scaling and rope_parameters must be one table for all layers, got {tables}"
        )
    return rope


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling | None:
    """Llama 3's four numbers, or None. ValueError for another scaling, and for a part of RoPE."""
    rope = _rope(raw)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial!r} is not implemented: all is turned")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"rope scaling {kind!r} is not implemented; 'default' and 'llama3' are. Remove the "
            "scaling from config.json to use the model within its original context length"
        )
    numbers = [rope.get(name) for name in RopeScaling._fields]
    for name, number in zip(RopeScaling._fields, numbers, strict=True):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < LARGEST:  # type: ignore[operator]
            raise ValueError(f"{name} of rope scaling 'llama3' must be positive, got {number!r}")
    scaling = RopeScaling(*numbers)  # type: ignore[arg-type]
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"low_freq_factor {scaling.low_freq_factor} of rope scaling 'llama3' must be below "
            f"high_freq_factor {scaling.high_freq_factor}"
        )
    return scaling


def _eos_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"eos_token_id must be one token id or a list of them, got {eos!r}")
    return ids
