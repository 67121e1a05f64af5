"""Introduced in notebook 04. The layout laboratory: the same K and V numbers in other orders.

By token (all layers of a token together), or by layer (as every engine keeps them). One shape, one
memory, other strides: PyTorch's own strides say where everything lies. Knows no cache and no model.
Shapes: L layers, n tokens, H_kv K/V heads, D head_dim.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.attention import SdpaAttention, causal_mask, naive_attention

AXES = ("layer", "kv", "token", "head", "dim")

# name -> the axes from the outermost in memory to the innermost
ORDERS: dict[str, tuple[str, ...]] = {
    "by token": ("token", "layer", "kv", "head", "dim"),
    "by layer": ("kv", "layer", "token", "head", "dim"),  # KVStorage with slots_first
    "by layer, heads first": ("kv", "layer", "head", "token", "dim"),  # KVStorage without
}


class Touched(NamedTuple):
    """What an access touches: bytes, in how many runs of neighbours."""

    num_bytes: int
    runs: int


class KVLayout:
    """K and V [L, 2, n, H_kv, D] (0 is K, 1 is V) in the memory order of a name in ORDERS.

    `kv` is a view: index it like any tensor. ValueError for an order that is not there.
    """

    def __init__(self, order: str, kv: Tensor) -> None:
        if order not in ORDERS:
            raise ValueError(f"no order {order!r}: choose one of {list(ORDERS)}")
        if kv.ndim != len(AXES) or kv.shape[1] != 2:
            raise ValueError(f"K and V come as [layers, 2, tokens, heads, dim], got {[*kv.shape]}")
        self.order = order
        outermost_first = [AXES.index(axis) for axis in ORDERS[order]]
        memory = kv.permute(outermost_first).contiguous().clone()
        self.kv = memory.permute([outermost_first.index(axis) for axis in range(len(AXES))])

    @property
    def strides(self) -> dict[str, int]:
        """Axis → bytes from one of it to the next."""
        return {
            axis: stride * self.kv.itemsize
            for axis, stride in zip(AXES, self.kv.stride(), strict=True)
        }

    def write(self, token: int, kv: Tensor) -> None:
        """Put a token's K and V of all layers, [L, 2, H_kv, D], in their places."""
        self.kv[:, :, token] = kv

    def attend(self, layer: int, q: Tensor, n: int, textbook: bool = False) -> Tensor:
        """The last queries q [q, H, D] of the first n tokens to all of these → [q, H, D]."""
        k, v = self.kv[layer, 0, :n], self.kv[layer, 1, :n]
        if textbook:
            return naive_attention(q, k, v, causal_mask(len(q), n, device=q.device)).out
        return SdpaAttention().one_sequence(q, k, v)

    def touched_by_write(self, token: int) -> Touched:
        """By writing one token: its K and V in all layers."""
        return touched(self.kv, self.kv[:, :, token])

    def touched_by_read(self, layer: int, n: int) -> Touched:
        """By attending in one layer: its K and V of the first n tokens."""
        return touched(self.kv, self.kv[layer, :, :n])


def layouts(kv: Tensor) -> dict[str, KVLayout]:
    """Name → the same K and V [L, 2, n, H_kv, D], copied into each order."""
    return {order: KVLayout(order, kv) for order in ORDERS}


def runs(memory: Tensor, part: Tensor) -> list[tuple[int, int]]:
    """The runs of neighbouring bytes that a view covers → (offset, bytes) of each, in order.

    `part` must be a view of `memory` in which no byte occurs twice.
    """
    if part.numel() == 0:
        return []
    size = part.itemsize
    length = 1  # in elements, of a run that the innermost axes make
    outer: list[tuple[int, int]] = []  # (stride, how often) of the axes that leave gaps
    axes = zip(part.stride(), part.shape, strict=True)
    for stride, often in sorted(axis for axis in axes if axis[1] > 1):
        if not outer and stride == length:
            length *= often
        else:
            outer.append((stride, often))
    first = part.data_ptr() - memory.data_ptr()
    steps = [range(0, stride * often, stride) for stride, often in outer]
    starts = sorted(first + size * sum(offsets) for offsets in product(*steps))
    found: list[tuple[int, int]] = []
    for start in starts:
        if found and sum(found[-1]) == start:  # neighbours after all
            found[-1] = (found[-1][0], found[-1][1] + length * size)
        else:
            found.append((start, length * size))
    return found


def touched(memory: Tensor, part: Tensor) -> Touched:
    """What reading or writing a view of a memory touches, from its strides."""
    found = runs(memory, part)
    return Touched(sum(length for _, length in found), len(found))


class LayoutTimes(NamedTuple):
    """Seconds, the best of several: writing one token, and one step's attention in all layers."""

    write: float
    attend: float


def time_layout(layout: KVLayout, num_heads: int, repeats: int = 5) -> LayoutTimes:
    """Measure a decode step on a layout that is full: write its last token, attend in each layer.

    The numbers are of this machine and of a memory that should be larger than its caches.
    """
    at_least_one("repeats", repeats)
    num_layers, _, n, _, head_dim = layout.kv.shape
    q = torch.randn(1, num_heads, head_dim, dtype=layout.kv.dtype, device=layout.kv.device)
    new = layout.kv[:, :, n - 1].clone()

    def attend() -> None:
        for layer in range(num_layers):
            layout.attend(layer, q, n)

    return LayoutTimes(
        _best(lambda: layout.write(n - 1, new), repeats, layout.kv.device),
        _best(attend, repeats, layout.kv.device),
    )


def _best(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    def seconds() -> float:
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    seconds()  # the first time pays for what is made once
    return min(seconds() for _ in range(repeats))
