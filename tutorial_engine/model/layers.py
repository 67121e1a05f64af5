"""Introduced in notebook 01. The small layers: Linear, RMSNorm and the gated activation.

Each can be called by hand on flat tokens [T, ...]; none knows attention, position or cache.
"""

import functools
import math
import time
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has the oneDNN linear and it accepts this device and dtype."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype))
        x = torch.zeros(1, 16, dtype=dtype)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class Module(nn.Module):
    """An nn.Module that costs less to call: a forward of a small model makes fifty calls.

    A part is found where Python looks first; PyTorch keeps it in a table where it looks last.
    Without gradients, a call asks for hooks of `forward` only, and not for the other kinds.
    """

    _parameters: dict[str, Any]  # read here, `weight` is found sooner than by `self.weight`

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._modules:
            self.__dict__[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module: `forward`, with the hooks around it."""
        if self._forward_hooks or self._forward_pre_hooks or torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)


class Linear(Module):
    """y = x Wᵀ + b for x [T, in], W [out, in]. The one linear layer of the engine.

    `prepack()` reorders W once into the layout that oneDNN reads at full memory speed; until then,
    and wherever that is not available, it is plain `F.linear`, faster for small W after
    `by_columns()`. Fresh weights are whatever was in the memory: load them, or
    `Qwen3ForCausalLM.draw_weights`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Tensor | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._packed: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the weights are in oneDNN's layout."""
        return self._packed is not None

    @property
    def num_weights(self) -> int:
        """Weights and biases, the same packed and plain."""
        return self.in_features * self.out_features + (
            0 if self.bias is None else self.out_features
        )

    def prepack(self) -> bool:
        """Replace W by its reordered copy (inference only). Returns whether it is packed now."""
        if self._packed is None and self.weight is not None:
            weight = self.weight.detach()
            if can_prepack(weight.device, weight.dtype):
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
                self.weight = None  # do not hold both; a tied embedding keeps its own reference
        return self.is_packed

    def by_columns(self) -> None:
        """Lay W out column after column (inference only), its values and shape unchanged.

        A small one is multiplied faster so, by one row and by several. A tied W comes apart.
        """
        if self.weight is not None:
            columns = self.weight.detach().t().contiguous().t()
            self.weight = nn.Parameter(columns, requires_grad=False)

    def plain_weight(self) -> Tensor:
        """W [out, in] in the ordinary layout, a fresh tensor if it has another one."""
        if self._packed is not None:
            return self._packed.to_dense()
        assert self.weight is not None, "a Linear holds its weight plain or packed"
        return self.weight.contiguous()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        if self.is_packed:
            raise ValueError(
                "prepacked weights cannot be moved or cast; call load_model with the device and "
                "dtype you want, or with prepack=False"
            )
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # whoever saves the model gets its weights, not a file without them or in another layout
        if self.weight is None or not self.weight.is_contiguous():
            destination[f"{prefix}weight"] = self.plain_weight().detach()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.deepcopy. ValueError when packed: oneDNN's layout has no copy."""
        if self.is_packed:
            raise ValueError(
                "a prepacked model can be neither pickled nor copied: load it again, or use "
                "load_model(..., prepack=False)"
            )
        return self.__dict__

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        weight = self._parameters["weight"]
        assert weight is not None, "a Linear holds its weight plain or packed"
        return F.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        """Shape and layout, for `print(model)`."""
        packed = ", prepacked" if self.is_packed else ""
        return f"{self.in_features} → {self.out_features}, bias={self.bias is not None}{packed}"


# Weights up to this many are in the processor's caches when they are wanted: how much a call itself
# costs decides there, and that differs between processors. Larger ones always gain by packing.
IN_CACHE = 2**20


@functools.cache
def packed_is_faster(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Is a prepacked Linear of this shape faster here than one by columns, at 1 and at 8 rows?

    Measured once, in some milliseconds, where the answer differs between machines.
    """
    if out_features * in_features > IN_CACHE:
        return True
    plain, packed = (Linear(in_features, out_features).to(dtype) for _ in range(2))
    plain.by_columns()
    packed.prepack()
    rows = [torch.zeros(n, in_features, dtype=dtype) for n in (1, 8)]
    took: dict[Linear, float] = {}
    with torch.inference_mode():
        for _ in range(9):
            for linear in (plain, packed):  # in turn, so that both meet the same machine
                began = time.perf_counter()
                for x in rows * 8:
                    linear(x)
                took[linear] = min(took.get(linear, math.inf), time.perf_counter() - began)
    return took[packed] < took[plain]


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, computed in fp32, cast last.

    With a residual it first adds, and returns (normed, sum), so that a layer's running sum is
    made once. Source: Zhang and Sennrich 2019.
    """

    def __init__(self, size: int, eps: float = 1e-6, where: Tensor | None = None) -> None:
        super().__init__()
        self.eps = torch.tensor(eps, dtype=torch.float32, device="cpu")  # []
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("where", where, persistent=False)  # see QKNorm

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., size] → normed; with a residual of the same shape → (normed, x + residual)."""
        total = x if residual is None else x + residual
        weight, where = self._parameters["weight"], self._buffers["where"]
        if where is not None:
            weight = weight.take(where)  # [H + H_kv, D]
        if total.is_cpu and total.dtype == weight.dtype == torch.float32:
            # F.rms_norm is seven small operations here, and these five give the same sooner
            length = torch.linalg.vector_norm(total, dim=-1, keepdim=True)  # sqrt(sum(x²))
            mean = torch.addcmul(self.eps, length, length, value=1 / total.shape[-1])  # of x²
            normed = total * mean.rsqrt() * weight
        elif weight.ndim == 1:
            normed = F.rms_norm(total, weight.shape, weight, float(self.eps))
        else:
            normed = F.rms_norm(total.float(), weight.shape[-1:], None, float(self.eps))
            normed = (normed * weight).to(total.dtype)
        return normed if residual is None else (normed, total)

    def extra_repr(self) -> str:
        """Size and eps, for `print(model)`."""
        return f"{self.weight.numel()}, eps={float(self.eps):g}"


class QKNorm(RMSNorm):
    """One RMSNorm for the heads of q and another for those of k, in one call: q's heads first.

    x is [T, H + H_kv, D]. `weight` [2 D] has q's weights, then k's, and `where` says for each head
    at which places of it its own are.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        q, k = torch.arange(2 * head_dim, device="cpu").chunk(2)
        where = torch.cat((q.expand(num_heads, -1), k.expand(num_kv_heads, -1)))
        super().__init__(2 * head_dim, eps, where)


class SiluAndMul(Module):
    """silu(gate) · up for x = [gate, up] joined on the last axis, gate first: [..., 2I] → [..., I].

    Source: SwiGLU, Shazeer 2020.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 2I] → [..., I]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
