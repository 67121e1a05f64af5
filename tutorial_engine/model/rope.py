"""Rotary position embedding: position turns each pair of a head.

Knows angles; knows no attention and no model. Source: RoFormer (Su et al. 2021), half-split pairs
as in Llama and Qwen3.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class RopeAngles(NamedTuple):
    """Cosine and sine of every token's angles, both [T, 1, head_dim / 2] in fp32."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians that pair i turns per position, theta ** (−2i / head_dim). [head_dim / 2] fp32.

    Always on the CPU and always fp32: in half precision the angle at position 4001 is off by
    whole radians (notebook 01 measures it).
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


class RotaryEmbedding(nn.Module):
    """Turns positions into angles, once per forward and for all layers.

    `model.to(torch.bfloat16)` moves it but leaves the frequencies in fp32.
    """

    inv_freq: Tensor  # [head_dim / 2] fp32

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", inverse_frequencies(head_dim, theta), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # moves to the device, and may have cast
        self.inv_freq = inverse_frequencies(self.head_dim, self.theta).to(self.inv_freq.device)
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
