"""The small layers: Linear, RMSNorm and the gated activation.

Each is its formula, and can be called by hand on flat tokens [T, ...]; none knows attention,
position or cache. Their faster twins are in `fast.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x Wᵀ + b for x [T, in], W [out, in].

    Fresh weights are whatever was in the memory: load them, or `CausalLM.draw_weights`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Shape, for `print(model)`."""
        return f"{self.in_features} → {self.out_features}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, computed in fp32, cast last.

    With a residual it first adds, and returns (normed, sum), so that a layer's running sum is
    made once. Source: Zhang and Sennrich 2019.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., size] → normed; with a residual of the same shape → (normed, x + residual)."""
        total = x if residual is None else x + residual
        x32 = total.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight
        normed = normed.to(total.dtype)
        return normed if residual is None else (normed, total)

    def extra_repr(self) -> str:
        """Size and eps, for `print(model)`."""
        return f"{self.weight.numel()}, eps={self.eps:g}"


class SiluAndMul(nn.Module):
    """silu(gate) · up for x = [gate, up] joined on the last axis, gate first: [..., 2I] → [..., I].

    Source: SwiGLU, Shazeer 2020.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 2I] → [..., I]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
