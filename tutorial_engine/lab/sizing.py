"""A config.json -> the memory and the least time that a model needs.

Reads the sizes of dense decoders and refuses what it would count wrongly. Knows no weights and runs
nothing; the counts are those of roofline and of KVCacheSpec.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.checks import at_least_one
from tutorial_engine.lab.roofline import Roofline, forward_bytes, forward_flops, weight_bytes
from tutorial_engine.model.config import FAMILY, ModelConfig

QWEN3_06B: dict[str, Any] = {  # the shape of a released model, as its config.json states it
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
PAGE = 16  # tokens; vLLM hands out KV memory in pages of so many
DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")
}


MIXTURE = "a mixture of experts reads only some of its weights for a token, which is not counted"
REFUSED = {  # a field that is set -> why its model cannot be counted, and what to do
    "num_local_experts": f"{MIXTURE}; paste a dense model",
    "num_experts": f"{MIXTURE}; paste a dense model",
    "n_routed_experts": f"{MIXTURE}; paste a dense model",
    "kv_lora_rank": "this model caches a compressed vector instead of K and V; paste another model",
    "quantization_config": "how many bytes a quantised weight has is not known here; remove the "
    "field, and choose a dtype of that size",
    "mlp_bias": "biases in the MLP are not counted; remove the field, they are a tiny part",
}
REQUIRED = {  # field -> what it says
    "vocab_size": "the number of tokens in the vocabulary",
    "hidden_size": "the dimension of the residual stream",
    "intermediate_size": "the dimension inside the MLP",
    "num_hidden_layers": "the number of layers",
    "num_attention_heads": "the number of query heads",
    "max_position_embeddings": "the longest context",
}


@dataclass(frozen=True)
class Sizes:
    """What a config.json says of a model. `dtype` is None where the file does not say it."""

    config: ModelConfig
    model_type: str
    dtype: torch.dtype | None

    @classmethod
    def from_json(cls, text: str) -> "Sizes":
        """Read the text of a Hugging Face config.json.

        ValueError, with the field and what to do, for what would be counted wrongly.
        """
        raw = _object(text)
        kind = FAMILY[_model_type(raw)]
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        config = ModelConfig(
            **{name: raw[name] for name in REQUIRED},
            num_key_value_heads=_num_kv_heads(raw, heads),
            head_dim=_head_dim(raw, hidden, heads),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            **kind.parts(bool(raw.get("attention_bias", False))),
        )
        return cls(config, raw["model_type"], _dtype(raw))

    @property
    def num_parameters(self) -> int:
        """All weights; a head that is the embedding again counts once."""
        c = self.config
        embedding = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
        return weight_bytes(c, 1) + embedding


class Seconds(NamedTuple):
    """The least time of a forward: to read the weights, to move K and V, to do the arithmetic."""

    weights: float
    kv: float
    arithmetic: float

    @property
    def memory(self) -> float:
        """Seconds for all bytes."""
        return self.weights + self.kv

    @property
    def least(self) -> float:
        """Memory and arithmetic go on at once, so the slower one decides."""
        return max(self.memory, self.arithmetic)

    @property
    def bound(self) -> str:
        """Which of both decides: "memory" or "arithmetic"."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


@dataclass(frozen=True)
class Plan:
    """A model on a machine that gives the engine `fraction` of memory_bytes.

    As vLLM's gpu_memory_utilization. What the weights leave of it is counted as room for K and V:
    an upper bound, because vLLM also subtracts the activations that it measures at start. Every
    request may have context_len tokens. ValueError for a context that the model has not.
    """

    sizes: Sizes
    dtype: torch.dtype
    context_len: int
    memory_bytes: int
    fraction: float
    roofline: Roofline

    def __post_init__(self) -> None:
        at_least_one("context_len", self.context_len)
        most = self.sizes.config.max_position_embeddings
        if self.context_len > most:
            raise ValueError(
                f"a context of {self.context_len:,} tokens is longer than max_position_embeddings, "
                f"{most:,}: choose a shorter one"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.sizes.num_parameters * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return KVCacheSpec.from_model(self.sizes.config, self.dtype).bytes_per_token

    @property
    def kv_bytes_per_request(self) -> int:
        """Bytes of K and V of a whole context."""
        return self.kv_bytes_per_token * self.context_len

    @property
    def usable_bytes(self) -> int:
        """What the engine may have: weights, K and V, and activations."""
        return int(self.fraction * self.memory_bytes)

    @property
    def kv_bytes(self) -> int:
        """What the weights leave: the most that K and V may have; 0 where not even they fit."""
        return max(self.usable_bytes - self.weight_bytes, 0)

    @property
    def num_pages(self) -> int:
        """Whole pages of PAGE tokens that fit into that."""
        return self.kv_bytes // (self.kv_bytes_per_token * PAGE)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit in such contexts: vLLM's "GPU KV cache size"."""
        return int(self.concurrency * self.context_len)

    @property
    def concurrency(self) -> float:
        """Contexts that fit at once: vLLM's "Maximum concurrency"."""
        return self.num_pages / -(-self.context_len // PAGE)

    @property
    def num_requests(self) -> int:
        """Whole contexts that fit at once."""
        return int(self.concurrency)

    def decode(self, batch: int) -> Seconds:
        """One new token for each of `batch` requests, every context being full with it."""
        return self._seconds(batch, 1, self.context_len - 1)

    def prefill(self) -> Seconds:
        """The whole context of one request in one forward."""
        return self._seconds(1, self.context_len, 0)

    def _seconds(self, batch: int, new: int, old: int) -> Seconds:
        """One forward: the weights are read once, whatever the batch."""
        if not batch:
            return Seconds(0.0, 0.0, 0.0)
        config, item = self.sizes.config, self.dtype.itemsize
        weights = weight_bytes(config, item)
        own = batch * (forward_bytes(config, new, old, item) - weights)
        flops = batch * forward_flops(config, new, old)
        bandwidth, peak = self.roofline
        return Seconds(weights / bandwidth, own / bandwidth, flops / peak)


def _object(text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"This is not valid JSON: {error}. Paste the whole file, from its first {{ to its "
            "last }."
        ) from None
    if not isinstance(raw, dict):
        raise ValueError(f"This is JSON, but a {type(raw).__name__}: a config.json is an object.")
    return raw


def _model_type(raw: Mapping[str, Any]) -> str:
    """The model type, when everything that the file says can be counted."""
    if isinstance(raw.get("text_config"), dict):
        raise ValueError("text_config holds the sizes of the language model: paste it alone.")
    for name, why in REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{name} is {_short(raw[name])}: {why}.")
    kind = raw.get("model_type")
    if kind not in FAMILY:
        raise ValueError(
            f"model_type is {_short(kind)}: the weights of {', '.join(FAMILY)} can be counted. "
            "If the model has the same parts as one of these, write that name."
        )
    for name, what in REQUIRED.items():
        if raw.get(name) is None:
            raise ValueError(f"{name} is missing: add it, it is {what}.")
    window = raw.get("sliding_window")
    slides = raw.get("use_sliding_window") or (kind == "mistral" and window)
    if slides or any(each != "full_attention" for each in raw.get("layer_types") or []):
        raise ValueError(
            f"sliding_window is {_short(window)}: such layers keep only their last tokens, which "
            "is not counted. Remove sliding_window, use_sliding_window and layer_types to see "
            "what full attention would need."
        )
    return kind


def _num_kv_heads(raw: Mapping[str, Any], heads: int) -> int:
    found = raw.get("num_key_value_heads")
    if found is not None:
        return found
    if "num_key_value_heads" not in raw and raw["model_type"] != "llama":
        raise ValueError(
            f"num_key_value_heads is missing, and a {raw['model_type']} model may have any "
            f"number: add it. With one per query head it is {heads}."
        )
    return heads  # the first Llamas: every query head has its own


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int) -> int:
    found = raw.get("head_dim")
    if found is not None:
        return found
    if raw["model_type"] == "qwen3":
        return 128  # transformers' default, whatever the hidden size
    if not all(isinstance(n, int) and n > 0 for n in (hidden, heads)) or hidden % heads:
        raise ValueError(
            f"head_dim is missing, and hidden_size {_short(hidden)} / num_attention_heads "
            f"{_short(heads)} is no whole number: add head_dim."
        )
    return hidden // heads


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise ValueError(f"dtype is {_short(name)}: it must be one of {', '.join(DTYPES)}.")
    return DTYPES[short]


def _short(value: object) -> str:
    """A value as a message shows it."""
    said = repr(value)
    return said if len(said) <= 40 else said[:39] + "…"
