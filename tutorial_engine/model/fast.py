"""Faster twins of small layers, put into a loaded model in their place.

Knows the layers and what a device is good at; no model, no file. A twin computes what its layer
computes, in another layout or with other operations, and is a module like any other: what is
registered on it is called, and what is put in its place runs. Nothing is measured here: which
layers are swapped depends on processor, dtype and size alone.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutorial_engine.model.layers import Linear, RMSNorm


def use_fast_layers(model: nn.Module, pack_from: int | None = None) -> None:
    """Swap the layers of a model for the twins that are faster where it lies. Inference only.

    A Linear of `pack_from` weights or more (None: as `packs_from` says) is packed: such a model
    cannot be moved, cast or copied afterwards. A smaller one is laid out by columns.
    """
    for name, layer in list(model.named_children()):
        use_fast_layers(layer, pack_from)
        setattr(model, name, fast_twin(layer, pack_from))


def fast_twin(layer: nn.Module, pack_from: int | None = None) -> nn.Module:
    """The fastest that we have for a layer, by its device and dtype; else the layer itself."""
    if type(layer) is Linear:
        weight = layer.weight
        if weight.numel() < (packs_from(weight.dtype) if pack_from is None else pack_from):
            return ColumnLinear(layer) if weight.is_cpu else layer
        return PackedLinear(layer) if can_prepack(weight.device, weight.dtype) else layer
    elif type(layer) is RMSNorm and not layer.weight.is_cpu:
        return FusedRMSNorm(layer)
    elif type(layer) is RMSNorm and layer.weight.dtype in (torch.float32, torch.bfloat16):
        return CpuRMSNorm(layer)
    return layer


def packs_from(dtype: torch.dtype) -> int:
    """Weights of a matrix from which oneDNN's layout is the fastest one (decision 002).

    PyTorch multiplies one row by fp32 weights with a library of Intel's, which is at memory speed
    on Intel's processors and not on others.
    """
    return 2**21 if dtype == torch.float32 and made_by_intel() else 2**18


@cache
def made_by_intel() -> bool:
    """Whether this processor is one of Intel's."""
    info = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    return "GenuineIntel" in (info.read_text() if info.exists() else platform.processor())


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


class ColumnLinear(Linear):
    """A Linear whose W [out, in] lies in memory column by column.

    One row of x then takes the weights in the order in which they lie, and the processor can fetch
    them ahead: a step of a small model finds little of them in its caches.
    """

    def __init__(self, linear: Linear) -> None:
        self.__dict__.update(linear.__dict__)  # sizes and hooks
        weight = nn.Parameter(linear.weight.detach().t().contiguous().t(), requires_grad=False)
        self._parameters = {"weight": weight, "bias": linear.bias}


class PackedLinear(Linear):
    """A Linear whose W is reordered once into the layout that oneDNN reads at full memory speed.

    Only the reordered copy is kept. `weight` is W in the ordinary layout: a fresh tensor each time.
    """

    def __init__(self, linear: Linear) -> None:
        self.__dict__.update(linear.__dict__)  # sizes and hooks; no memory for another W
        self._parameters = {"bias": linear.bias}
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W [out, in], unpacked."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """As Linear."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        destination[f"{prefix}weight"] = self.weight  # a saved model has its weights, in plain
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        raise ValueError(
            "prepacked weights cannot be moved or cast; call load_model with the device and "
            "dtype you want, or with fast=False"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.deepcopy. ValueError: oneDNN's layout has no copy."""
        raise ValueError(
            "a prepacked model can be neither pickled nor copied: load it again, or use "
            "load_model(..., fast=False)"
        )

    def extra_repr(self) -> str:
        """Shape and layout, for `print(model)`."""
        return f"{super().extra_repr()}, prepacked"


class FusedRMSNorm(RMSNorm):
    """RMSNorm in one operation, which a GPU runs as one kernel: the textbook's formula takes eight.

    In half precision it multiplies by the weight before it rounds, as the formula does.
    """

    def __init__(self, norm: RMSNorm) -> None:
        self.__dict__.update(norm.__dict__)  # the same weight, and the same hooks

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As RMSNorm."""
        total = x if residual is None else x + residual
        normed = F.rms_norm(total, self.weight.shape, self.weight, self.eps)
        return normed if residual is None else (normed, total)


class CpuRMSNorm(RMSNorm):
    """RMSNorm in the fewest operations that a CPU has for it: mean(x²) from one norm, in fp32."""

    def __init__(self, norm: RMSNorm) -> None:
        self.__dict__.update(norm.__dict__)  # the same weight, and the same hooks
        self.eps32 = torch.tensor(norm.eps, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As RMSNorm."""
        if not x.is_cpu:  # the model was moved since
            return super().forward(x, residual)
        total = x if residual is None else x + residual
        x32 = total if total.dtype == torch.float32 else total.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)  # sqrt(sum(x²))
        mean = torch.addcmul(self.eps32, length, length, value=1 / total.shape[-1])
        normed = (x32 * mean.rsqrt_()).mul_(self.weight)
        normed = normed if x32 is total else normed.to(total.dtype)
        return normed if residual is None else (normed, total)
