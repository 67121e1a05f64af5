"""Introduced in notebook 02. The sizes of a KV cache, as plain numbers: what a token costs.

Knows the model's config and bytes; knows no tensor, no slot and no sequence.
"""

from dataclasses import dataclass, replace

import torch

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one token leaves behind in a model: the numbers that every cache layout shares.

    `num_kv_heads` are those of one rank. v_head_dim may differ from k_head_dim. ValueError for
    sizes below 1.
    """

    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "k_head_dim", "v_head_dim"):
            at_least_one(name, getattr(self, name))

    @classmethod
    def from_model(
        cls, config: ModelConfig, dtype: torch.dtype = torch.float32, tp_size: int = 1
    ) -> "KVCacheSpec":
        """The spec of a model, or of one of `tp_size` ranks that share its K/V heads."""
        at_least_one("tp_size", tp_size)
        if config.num_key_value_heads % tp_size:
            raise ValueError(
                f"{config.num_key_value_heads} K/V heads cannot be shared among tp_size={tp_size} "
                "ranks: it must divide them"
            )
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads // tp_size,
            k_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, in bytes."""
        numbers = self.num_layers * self.num_kv_heads * (self.k_head_dim + self.v_head_dim)
        return numbers * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What the engine decides about its cache: rows, their length, where and how it is stored.

    `max_len` None or 0 means the model's maximum, and never gets beyond it. `slots_first` swaps the
    two middle axes of a layer's K and V (vLLM's NHD instead of HND). ValueError for sizes below 1.
    """

    max_seqs: int = 1
    max_len: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    tp_size: int = 1
    slots_first: bool = False

    def __post_init__(self) -> None:
        at_least_one("max_seqs", self.max_seqs)
        at_least_one("tp_size", self.tp_size)
        is_zero = isinstance(self.max_len, int) and self.max_len == 0
        if self.max_len is not None and (not is_zero or isinstance(self.max_len, bool)):
            at_least_one("max_len", self.max_len)

    def copy(self, **changes: object) -> "CacheConfig":
        """The same with some fields changed; the original stays as it is."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def length_for(self, config: ModelConfig) -> int:
        """Tokens per row: max_len, but no more than the model has positions."""
        limit = config.max_position_embeddings
        return min(self.max_len, limit) if self.max_len else limit

    def num_bytes(self, config: ModelConfig) -> int:
        """Bytes of all rows, used or not."""
        spec = KVCacheSpec.from_model(config, self.dtype, self.tp_size)
        return spec.bytes_per_token * self.max_seqs * self.length_for(config)
