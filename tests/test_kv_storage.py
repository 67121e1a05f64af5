"""KV storage: a slot gives back what was put into it, in both layouts, and nothing else moves.

Rows of slots and their concatenating twin; what tokens cost, and what a user types wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import LLAMA2_7B, QWEN3_06B
from engines import fill_with_nan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.cache import CellKVCache, PagedKVCache, StaticKVCache
from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.batch import Allocation, Batch, Slots
from tutorial_engine.model.config import ModelConfig

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
SLOTS = 12
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])


def poisoned(slots_first: bool = False, slots: int = SLOTS, spec: KVCacheSpec = SPEC) -> KVStorage:
    """A storage in which a slot that was never written cannot go unnoticed."""
    return fill_with_nan(KVStorage(spec, slots, slots_first=slots_first))


def random_kv(tokens: int, seed: int = 0, spec: KVCacheSpec = SPEC) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randn(tokens, spec.num_kv_heads, dim, generator=generator).to(spec.dtype)
        for dim in (spec.k_head_dim, spec.v_head_dim)
    )
    return k, v


def memory(storage: KVStorage) -> bytes:
    """Every byte of the tensors: NaN equals itself here."""
    return b"".join(
        x.contiguous().view(torch.uint8).numpy().tobytes() for x in (storage.k, storage.v)
    )


def unwritten(storage: KVStorage, layer: int) -> list[int]:
    """Slots of a layer that still hold the poison in every number."""
    k, v = storage.read_slots(layer, slice(0, storage.num_slots))
    empty = k.isnan().all(dim=(1, 2)) & v.isnan().all(dim=(1, 2))
    partly = k.isnan().any(dim=(1, 2)) | v.isnan().any(dim=(1, 2))
    assert torch.equal(empty, partly), "a slot is written whole or not at all"
    return empty.nonzero().flatten().tolist()


# -- slots --------------------------------------------------------------------------------------


@LAYOUTS
@given(slots=st.permutations(range(SLOTS)), cut=st.integers(1, SLOTS), seed=st.integers(0, 99))
def test_slots_read_what_was_written_and_others_stay(
    slots_first: bool, slots: list[int], cut: int, seed: int
) -> None:
    storage = poisoned(slots_first)
    written = torch.tensor(slots[:cut])
    k, v = random_kv(cut, seed)
    storage.write_slots(1, written, k, v)
    got_k, got_v = storage.read_slots(1, written)
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert unwritten(storage, 1) == sorted(slots[cut:])
    assert unwritten(storage, 0) == unwritten(storage, 2) == list(range(SLOTS))


@LAYOUTS
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_rows_are_the_same_memory_in_five_axes(slots_first: bool, rows: int) -> None:
    storage = poisoned(slots_first)
    shape = (3, SLOTS, 2) if slots_first else (3, 2, SLOTS)
    assert storage.k.shape == (*shape, 4) and storage.v.shape == (*shape, 6)
    assert storage.num_bytes == storage.k.nbytes + storage.v.nbytes
    k, v = storage.by_rows(rows)
    n = SLOTS // rows
    assert k.shape == (3, rows, 2, n, 4) and v.shape == (3, rows, 2, n, 6)
    new_k, new_v = random_kv(2)
    storage.write_slots(1, torch.tensor([5, 8]), new_k, new_v)
    for slot, its_k, its_v in zip((5, 8), new_k, new_v, strict=True):
        assert torch.equal(k[1, slot // n, :, slot % n], its_k)
        assert torch.equal(v[1, slot // n, :, slot % n], its_v)
    k[2, 0, :, 0], v[2, 0, :, 0] = 9, 8
    assert unwritten(storage, 2) == list(range(1, SLOTS))


# -- what attention asks: write, then read ------------------------------------------------------


def batch_of(*writes: tuple[list[int], Slots]) -> Batch:
    """Slots to write, and slots to read, of each sequence."""
    return Batch.from_allocations(
        [[0] * len(new) for new, _ in writes],
        [Allocation(0, new, context) for new, context in writes],
        [str(number) for number in range(len(writes))],
    )


def filled(slots_first: bool) -> KVStorage:
    """Every slot but the last written in layers 0 and 1; the rest is still poisoned."""
    storage = poisoned(slots_first)
    for layer in (0, 1):
        storage.write_slots(layer, torch.arange(SLOTS - 1), *random_kv(SLOTS - 1, layer))
    return storage


SCATTERED = torch.tensor([9, 4, 0]), torch.tensor([2, 7]), torch.tensor([9, 4])


@LAYOUTS
def test_long_scattered_contexts_are_copied_into_one_memory_that_is_kept(
    slots_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutorial_engine.cache.storage.LONG", 1)
    storage, batch = filled(slots_first), batch_of(*(([11], slots) for slots in SCATTERED))
    before, where = memory(storage), set()
    with torch.no_grad():
        for layer in (0, 1, 0):
            for s, slots in enumerate(SCATTERED):
                k, v = storage.read(layer, batch, s)
                want = random_kv(SLOTS - 1, layer)
                assert torch.equal(k, want[0][slots]) and torch.equal(v, want[1][slots])
                where.add((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
                k.fill_(-1)
        assert len(where) == 1 and memory(storage) == before, "and never over the storage"
        stays, _ = storage.read_slots(0, SCATTERED[0])
        storage.read(1, batch, 1)
        assert torch.equal(stays, random_kv(SLOTS - 1)[0][SCATTERED[0]])
    with torch.enable_grad():  # who trains gets copies that stay
        pairs = [storage.read(0, batch, s) for s in range(3)]
    for (k, _), slots in zip(pairs, SCATTERED, strict=True):
        assert torch.equal(k, random_kv(SLOTS - 1)[0][slots])


def test_inference_mode_leaves_nothing_behind_that_others_cannot_use() -> None:
    with torch.inference_mode():
        storage = filled(True)
    k, _ = storage.read_slots(0, SCATTERED[0])
    k.add_(1)  # it is an ordinary tensor
    storage.write_slots(0, torch.tensor([SLOTS - 1]), *random_kv(1))
    assert unwritten(storage, 0) == []


def test_what_does_not_fit_is_refused_and_nothing_written() -> None:
    storage, (k, v) = poisoned(), random_kv(3)
    batch, before = batch_of(([0, 1, 2], slice(0, 3))), memory(storage)
    for layer, wrong_k, wrong_v, says in (
        (3, k, v, "layer 3 is outside"),
        (-1, k, v, "layer -1 is outside"),
        (0, k, v[:2], "for 3 slots this storage takes"),
        (0, v, k, "for 3 slots this storage takes"),
        (0, k.bfloat16(), v, "the storage holds torch.float32"),
        (0, k, v.double(), "the storage holds torch.float32"),
    ):
        with pytest.raises(ValueError, match=says):
            storage.write(layer, wrong_k, wrong_v, batch)
    with pytest.raises(ValueError, match="no slots"):
        storage.write(0, *random_kv(2), Batch.from_sequences([[1, 2]]))
    assert memory(storage) == before


# -- what a token costs, and how long a sequence may be -----------------------------------------


@given(st.none() | st.integers(0, 10**6))
def test_a_length_is_the_configs_or_the_models_and_never_more(max_len: int | None) -> None:
    assert length_for(QWEN3_06B, max_len) == min(max_len or 10**9, 40_960)


# -- what a user types wrong, at each door ------------------------------------------------------

DOORS: dict[str, Any] = {
    "rows": StaticKVCache.from_config,
    "pages": lambda config, **options: PagedKVCache.from_config(
        config, **{"num_blocks": 2} | options
    ),
    "cells": lambda config, **options: CellKVCache.from_config(config, 8, **options),
}
SMALL = replace(QWEN3_06B, num_hidden_layers=1)


EVERY_DOOR = [
    ({"dtype": "float33"}, "dtype must be one of floats.* got 'float33'"),
    ({"dtype": "nn"}, "got <module"),
    ({"dtype": torch.int8}, "dtype must be one of floats.* got torch.int8"),
]


@pytest.mark.parametrize(
    ("door", "option", "says"),
    [
        *((door, option, says) for door in DOORS for option, says in EVERY_DOOR),
        *(("rows", {"max_seqs": n}, f"max_seqs.*got {n!r}") for n in (0, None, 2.0, True)),
        *(("rows", {"max_len": n}, f"max_len.*got {n!r}") for n in (-1, 2.5, "8", True)),
        ("rows", {"max_seqs": 10**12, "max_len": 8}, "in all.*max_num_seqs"),
        ("pages", {"memory_bytes": "1GB", "num_blocks": None}, "whole number of bytes, got '1GB'"),
        ("pages", {"memory_bytes": 1, "num_blocks": None}, "Not enough memory for KV cache.* 1 "),
        ("pages", {"num_blocks": None}, "num_blocks or memory_bytes, got None, None"),
        ("pages", {"memory_bytes": 9999}, "got 2, 9999"),
        ("pages", {"num_blocks": 0}, "num_blocks must be .* got 0"),
        ("pages", {"num_blocks": 10**12}, "no memory for 16,000,000,000,000 slots"),
        ("pages", {"block_size": 0}, "block_size must be .* got 0"),
        ("pages", {"salt": 5}, "salt is a text, got 5"),
        ("pages", {"prefix_caching": "no"}, "prefix_caching is True or False, got 'no'"),
    ],
)
def test_what_no_memory_is_made_of_is_refused(door: str, option: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DOORS[door](SMALL, **option)


# -- rows, and the concatenating twin -------------------------------------------------------------

ROWS, MAX_LEN = 3, 8
Pairs = list[list[tuple[Tensor, Tensor]]]  # of each layer, K and V of each sequence


def static() -> StaticKVCache:
    return StaticKVCache(poisoned(False, ROWS * MAX_LEN), ROWS, MAX_LEN)


class Drive:
    """Sequences in a cache, and their lengths: forwards without a model, of random K and V."""

    def __init__(self, cache: Any, **lens: int) -> None:
        self.cache, self.lens = cache, dict[str, int]()
        if lens:
            self.step(lens)

    def batch(self, lengths: Mapping[str, int]) -> Batch:
        """So many new tokens of each."""
        allocations = [self.allocate(name, n) for name, n in lengths.items()]
        return Batch.from_allocations([[0] * n for n in lengths.values()], allocations, [*lengths])

    def allocate(self, name: str, n: int) -> Allocation:
        computed = self.lens.get(name, 0)
        allocation = self.cache.allocate(name, [0] * (computed + n), computed, n)
        assert allocation is not None
        return allocation

    def step(self, lengths: Mapping[str, int], seed: int = 0, layers: int = 3) -> Pairs:
        """A forward; it breaks off after so many layers."""
        batch, num = self.batch(lengths), sum(lengths.values())
        storage, pairs = self.cache.storage, []
        for layer in range(layers):
            storage.write(layer, *random_kv(num, 10 * seed + layer), batch)
            pairs.append([storage.read(layer, batch, s) for s in range(len(lengths))])
        if layers == 3:
            for name, n in lengths.items():
                self.lens[name] = self.lens.get(name, 0) + n
                self.cache.commit(name, [0] * self.lens[name], self.lens[name])
            self.cache.check_integrity()
        return pairs


FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("model", "config", "shape", "num_bytes"),
    [
        (LLAMA2_7B, {"max_seqs": 2, "dtype": FP16}, (32, 2, 32, 4096, 128), 2**32),
        (QWEN3_06B, {"max_len": 1000, "dtype": BF16}, (28, 1, 8, 1000, 128), 114_688_000),
        (QWEN3_06B, {}, (28, 1, 8, 40_960, 128), 2 * 114_688 * 40_960),
        (QWEN3_06B, {"max_len": 10**6}, (28, 1, 8, 40_960, 128), 2 * 114_688 * 40_960),
    ],
)
def test_bytes_of_models_that_everybody_knows(
    model: ModelConfig, config: dict[str, Any], shape: tuple[int, ...], num_bytes: int
) -> None:
    cache = StaticKVCache.from_config(model, device="meta", **config)
    k, v = cache.by_rows()
    assert k.is_meta and k.shape == v.shape == shape and cache.max_len == shape[3]
    assert cache.num_bytes == k.nbytes + v.nbytes == num_bytes


@pytest.mark.parametrize("make", [static, GrowingKVCache])
def test_a_forward_that_broke_off_leaves_no_trace(make: Callable[[], Any]) -> None:
    clean, dirty = Drive(make(), a=3, b=2), Drive(make(), a=3, b=2)
    dirty.step({"a": 4, "b": 2}, seed=9, layers=2)
    pairs = zip(clean.step({"a": 1, "b": 1}, 2), dirty.step({"a": 1, "b": 1}, 2), strict=True)
    for want, got in pairs:
        for (k, v), (their_k, their_v) in zip(want, got, strict=True):
            assert torch.equal(k, their_k) and torch.equal(v, their_v)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1), max_size=8))
def test_twins_agree_and_a_model_of_lists_does_too(steps: list[dict[str, int]]) -> None:
    rows, twin = Drive(static()), Drive(GrowingKVCache())
    history: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}  # (layer, name) -> its tokens
    for seed, lengths in enumerate(steps):
        if any(rows.lens.get(name, 0) + n > MAX_LEN for name, n in lengths.items()):
            before = memory(rows.cache.storage)
            with pytest.raises(ValueError, match="a row has room for 8"):
                rows.step(lengths, seed)
            assert memory(rows.cache.storage) == before
            continue
        ours, theirs = rows.step(lengths, seed), twin.step(lengths, seed)
        for layer in range(SPEC.num_layers):
            k, v = random_kv(sum(lengths.values()), 10 * seed + layer)
            sizes = list(lengths.values())
            parts = zip(k.split(sizes), v.split(sizes), strict=True)
            for s, (name, (k_s, v_s)) in enumerate(zip(lengths, parts, strict=True)):
                own = history.setdefault((layer, name), [])
                own.extend(zip(k_s, v_s, strict=True))
                want = [torch.stack(x) for x in zip(*own, strict=True)]
                for got in (ours[layer][s], theirs[layer][s]):
                    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_twin_copies_all_there_is_at_every_step_and_has_no_limit() -> None:
    drive = Drive(GrowingKVCache(), a=4)
    for seed in range(1, 4):
        drive.step({"a": 1}, seed)
    assert drive.cache.bytes_copied == SPEC.bytes_per_token * (4 + 5 + 6 + 7)
    drive.step({"b": 500})
    assert drive.cache.max_len > 10**12 and drive.cache.storage is drive.cache


def test_twin_stacks_equal_lengths_to_the_classic_shape() -> None:
    drive = Drive(GrowingKVCache())
    for seed in range(5):
        drive.step({"a": 1, "b": 1}, seed)
    k, v = drive.cache.stacked(2)
    assert k.shape == (2, 2, 5, 4) and v.shape == (2, 2, 5, 6)
    assert torch.equal(k[1, :, 3], random_kv(2, 32)[0][1])
    drive.step({"a": 1})
    with pytest.raises(ValueError, match=r"sequences of \[6, 5\] tokens"):
        drive.cache.stacked(0)
