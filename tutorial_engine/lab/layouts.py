"""The layout laboratory: the same K and V numbers in other orders.

By token (all layers of a token together), or by layer (as every engine keeps them). One shape, one
memory, other strides: PyTorch's own strides say where everything lies. Knows no cache and no model.
Shapes: L layers, n tokens, H_kv K/V heads, D head_dim.
"""

from itertools import product
from typing import NamedTuple

from torch import Tensor

AXES = ("layer", "kv", "token", "head", "dim")

# name -> the axes from the outermost in memory to the innermost
ORDERS: dict[str, tuple[str, ...]] = {
    "by token": ("token", "layer", "kv", "head", "dim"),
    "by layer": ("kv", "layer", "token", "head", "dim"),  # KVStorage of pages and cells
    "by layer, heads first": ("kv", "layer", "head", "token", "dim"),  # KVStorage of rows
}


class Touched(NamedTuple):
    """What an access touches: bytes, in how many runs of neighbours."""

    num_bytes: int
    runs: int


class KVLayout:
    """K and V [L, 2, n, H_kv, D] (0 is K, 1 is V) in the memory order of a name in ORDERS.

    `kv` is a view: index it like any tensor.
    """

    def __init__(self, order: str, kv: Tensor) -> None:
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
    covered: list[tuple[int, int]] = []
    for start in starts:
        if covered and sum(covered[-1]) == start:  # neighbours after all
            covered[-1] = (covered[-1][0], covered[-1][1] + length * size)
        else:
            covered.append((start, length * size))
    return covered


def touched(memory: Tensor, part: Tensor) -> Touched:
    """What reading or writing a view of a memory touches, from its strides."""
    lengths = [length for _, length in runs(memory, part)]
    return Touched(sum(lengths), len(lengths))
