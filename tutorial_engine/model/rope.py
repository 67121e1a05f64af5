"""Rotary position embedding: position turns each pair of a head.

Knows angles; knows no attention and no model. Source: RoFormer (Su et al. 2021), half-split pairs
as in Llama and Qwen3; the longer context of Llama 3.1 (Grattafiori et al. 2024).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutorial_engine.model.config import ModelConfig, RopeScaling


class RopeAngles(NamedTuple):
    """Cosine and sine of every token's angles, both [T, 1, head_dim / 2] in fp32."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians that pair i turns per position, theta ** (−2i / head_dim). [head_dim / 2] fp32.

    Always on the CPU and always fp32: in half precision the angle at position 4001 is off by
    whole radians.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's RoPE for texts longer than the model was trained on first, same shape.

    A pair that turns at least `high_freq_factor` times within the original context stays as it is;
    one that turns at most `low_freq_factor` times turns `factor` times slower; those between are a
    mix of both.
    """
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it is, 0: slower
    return frequencies * (kept + (1 - kept) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Turns positions into angles, once per forward and for all layers.

    `RotaryEmbedding.of(config)` is a model's. `model.to(torch.bfloat16)` moves it but leaves the
    frequencies in fp32.
    """

    inv_freq: Tensor  # [head_dim / 2] fp32

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    @classmethod
    def of(cls, config: ModelConfig) -> "RotaryEmbedding":
        """As the model of this config turns its queries and keys."""
        return cls(config.head_dim, config.rope_theta, config.rope_scaling)

    def _frequencies(self) -> Tensor:
        plain = inverse_frequencies(self.head_dim, self.theta)
        return plain if self.scaling is None else scaled_frequencies(plain, self.scaling)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # moves to the device, and may have cast
        self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> RopeAngles:
        """positions [T] → cos and sin [T, 1, head_dim / 2]."""
        angles = positions.view(-1, 1, 1) * self.inv_freq  # fp32, the same for all heads
        return RopeAngles(angles.cos(), angles.sin())


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of x [T, heads, head_dim] by its token's angles; same shape and dtype.

    Pair i is (x[i], x[i + head_dim / 2]), the half-split convention of the checkpoints.
    Computed in fp32, because the angles are, and cast last.
    """
    first, second = x.chunk(2, dim=-1)  # [T, heads, head_dim / 2] each
    turned = (
        torch.addcmul(first * cos, second, sin, value=-1),  # first · cos − second · sin
        torch.addcmul(second * cos, first, sin),
    )
    both = torch.cat(turned, dim=-1)
    return both if both.dtype == x.dtype else both.to(x.dtype)
