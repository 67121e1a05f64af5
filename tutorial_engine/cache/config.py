"""The sizes of a KV cache, as plain numbers: what a token costs.

Knows the model's config and bytes; knows no tensor, no slot and no sequence.
"""

from dataclasses import dataclass

import torch

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one token leaves behind in a model: the numbers that every cache layout shares.

    v_head_dim may differ from k_head_dim. Frozen: use `dataclasses.replace` for a changed copy.
    ValueError for sizes below 1 and a dtype of integers.
    """

    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "k_head_dim", "v_head_dim"):
            at_least_one(name, getattr(self, name))
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(
                f'dtype must be one of floats, as torch.float32 or "bfloat16", got {self.dtype!r}'
            )

    @classmethod
    def from_model(
        cls, config: ModelConfig, dtype: torch.dtype | str = torch.float32
    ) -> "KVCacheSpec":
        """The spec of a model. Of one rank of several: of the rank's own config."""
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            k_head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            dtype=vars(torch).get(dtype, dtype) if isinstance(dtype, str) else dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in all layers, in bytes."""
        numbers = self.num_layers * self.num_kv_heads * (self.k_head_dim + self.v_head_dim)
        return numbers * self.dtype.itemsize


def length_for(config: ModelConfig, max_len: int | None) -> int:
    """Tokens of one sequence: max_len, but no more than the model has positions.

    None or 0 means as many as it has. ValueError for anything else below 1.
    """
    if max_len is None or max_len == 0:
        return config.max_position_embeddings
    at_least_one("max_len", max_len)
    return min(max_len, config.max_position_embeddings)
