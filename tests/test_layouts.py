"""The layout laboratory: the same numbers, other addresses, and counters that are exact."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.layouts import (
    ORDERS,
    KVLayout,
    Touched,
    layouts,
    runs,
    touched,
)

L, N, H, D = 3, 10, 2, 8
EVERY = pytest.mark.parametrize("order", ORDERS)


def random_kv(layers: int = L, tokens: int = N, heads: int = H, dim: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(layers * tokens)
    return torch.randn(layers, 2, tokens, heads, dim, generator=generator)


def bytes_of(memory: Tensor, part: Tensor) -> list[int]:
    """The offset of every byte of a view, one number after the other, by its own pointer."""
    flat = [
        part[tuple(index)].data_ptr() - memory.data_ptr()
        for index in torch.cartesian_prod(*map(torch.arange, part.shape)).reshape(-1, part.ndim)
    ]
    return sorted(offset + i for offset in flat for i in range(part.itemsize))


def slowly_touched(memory: Tensor, part: Tensor) -> Touched:
    found = bytes_of(memory, part)
    known = set(found)
    return Touched(len(found), sum(offset - 1 not in known for offset in found))


@pytest.mark.parametrize(
    ("order", "slots_first"), [("by layer", True), ("by layer, heads first", False)]
)
def test_by_layer_is_how_the_storage_keeps_them(order: str, slots_first: bool) -> None:
    spec = KVCacheSpec(num_layers=L, num_kv_heads=H, k_head_dim=D, v_head_dim=D)
    storage = KVStorage(spec, N, slots_first=slots_first)
    shelf = storage.k if slots_first else storage.k.transpose(1, 2)  # [L, n, H_kv, D]
    layout = KVLayout(order, random_kv())
    assert layout.kv[:, 0].stride() == shelf.stride() and layout.kv[:, 0].shape == shelf.shape


@EVERY
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_counters_are_those_of_the_pointers(order: str, seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, most) for most in (3, 6, 3, 8)]
    layout = KVLayout(order, random_kv(*shape).to(draw.choice([torch.float32, torch.bfloat16])))
    token, layer, n = draw.randrange(shape[1]), draw.randrange(shape[0]), draw.randint(1, shape[1])
    kv = layout.kv
    assert torch.equal(kv, random_kv(*shape).to(kv.dtype)), "the same numbers, in other places"
    assert layout.touched_by_write(token) == slowly_touched(kv, kv[:, :, token])
    assert layout.touched_by_read(layer, n) == slowly_touched(kv, kv[layer, :, :n])
    part = kv[:: draw.randint(1, 2), :, draw.randrange(shape[1]) :, :, : draw.randint(1, shape[3])]
    assert touched(kv, part) == slowly_touched(kv, part)
    found = runs(kv, part)
    covered = [at for start, length in found for at in range(start, start + length)]
    assert covered == bytes_of(kv, part)
    assert layout.touched_by_read(layer, 0) == Touched(0, 0)


def test_by_token_writes_in_one_run_and_by_layer_reads_in_two() -> None:
    """28 layers, 8 heads of 128 in bf16, 512 tokens: a token is 114,688 bytes."""
    kv = torch.zeros(28, 2, 512, 8, 128, dtype=torch.bfloat16)
    of = layouts(kv)
    writes = {name: layout.touched_by_write(300) for name, layout in of.items()}
    assert {w.num_bytes for w in writes.values()} == {114_688}
    assert [w.runs for w in writes.values()] == [1, 56, 448]
    reads = {name: layout.touched_by_read(11, 400) for name, layout in of.items()}
    assert {r.num_bytes for r in reads.values()} == {400 * 4096}
    assert [r.runs for r in reads.values()] == [400, 2, 16]
    assert KVLayout("by token", kv[:, :, :1, :1]).touched_by_read(0, 1).runs == 1
