"""The shelves: a slot gives back what was put into it, in both layouts, and nothing else moves."""

import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.cache import storage as kv_storage
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import Contexts, KVStorage
from tutorial_engine.model.batch import Batch, Slots

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
SLOTS, KV_HEADS = 12, SPEC.num_kv_heads
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])


def poisoned(slots_first: bool = False, slots: int = SLOTS, spec: KVCacheSpec = SPEC) -> KVStorage:
    """A storage in which a slot that was never written cannot go unnoticed."""
    storage = KVStorage(spec, slots, slots_first=slots_first)
    for shelf in (storage.k, storage.v):
        shelf.fill_(float("nan"))
    return storage


def random_kv(tokens: int, seed: int = 0, spec: KVCacheSpec = SPEC) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randn(tokens, spec.num_kv_heads, dim, generator=generator).to(spec.dtype)
        for dim in (spec.k_head_dim, spec.v_head_dim)
    )
    return k, v


def memory(storage: KVStorage) -> bytes:
    """Every byte of the shelves: NaN equals itself here."""
    return b"".join(
        x.contiguous().view(torch.uint8).numpy().tobytes() for x in (storage.k, storage.v)
    )


def unwritten(storage: KVStorage, layer: int) -> list[int]:
    """Slots of a layer that still hold the poison in every number."""
    k, v = storage.read(layer, slice(0, storage.num_slots))
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
    storage.write(1, written, k, v)
    got_k, got_v = storage.read(1, written)
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert unwritten(storage, 1) == sorted(slots[cut:])
    assert unwritten(storage, 0) == unwritten(storage, 2) == list(range(SLOTS))


@LAYOUTS
def test_slice_and_numbers_read_the_same(slots_first: bool) -> None:
    storage = poisoned(slots_first)
    storage.write(0, torch.arange(SLOTS), *random_kv(SLOTS))
    for start, stop in [(0, SLOTS), (3, 7), (11, 12), (0, 1)]:
        by_slice = storage.read(0, slice(start, stop))
        by_number = storage.read(0, torch.arange(start, stop))
        for a, b in zip(by_slice, by_number, strict=True):
            assert torch.equal(a, b)


@LAYOUTS
def test_slice_is_a_view_and_numbers_are_a_copy(slots_first: bool) -> None:
    storage = poisoned(slots_first)
    storage.write(2, torch.arange(SLOTS), *random_kv(SLOTS))
    for x in storage.read(2, slice(4, 8)):
        x.zero_()
    assert all((x == 0).all() for x in storage.read(2, slice(4, 8)))
    for x in storage.read(2, torch.arange(0, 4)):
        x.fill_(7)
    assert not any((x == 7).any() for x in storage.read(2, slice(0, 4)))


def test_both_layouts_answer_alike() -> None:
    heads, slots = poisoned(False), poisoned(True)
    where = torch.tensor([7, 0, 3])
    for storage in (heads, slots):
        storage.write(1, where, *random_kv(3))
    for a, b in zip(heads.read(1, where), slots.read(1, where), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape


def test_layouts_lie_in_memory_as_they_say() -> None:
    heads, slots = poisoned(False), poisoned(True)
    assert heads.k.shape == (3, 2, SLOTS, 4) and heads.v.shape == (3, 2, SLOTS, 6)
    assert slots.k.shape == (3, SLOTS, 2, 4) and slots.v.shape == (3, SLOTS, 2, 6)
    assert heads.k.is_contiguous() and slots.v.is_contiguous()


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_are_allocated(slots_first: bool, dtype: torch.dtype) -> None:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6, dtype=dtype)
    storage = KVStorage(spec, SLOTS, slots_first=slots_first)
    assert storage.num_bytes == storage.k.nbytes + storage.v.nbytes
    assert storage.k.dtype == storage.v.dtype == dtype


# -- rows ---------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("rows", [1, 2, 3, 12])
def test_rows_are_the_same_memory_in_five_axes(slots_first: bool, rows: int) -> None:
    storage = poisoned(slots_first)
    k, v = storage.by_rows(rows)
    assert k.shape == (3, rows, 2, SLOTS // rows, 4)
    assert v.shape == (3, rows, 2, SLOTS // rows, 6)
    assert k.data_ptr() == storage.k.data_ptr() and v.data_ptr() == storage.v.data_ptr()


@LAYOUTS
def test_rows_show_what_is_written_and_write_what_is_shown(slots_first: bool) -> None:
    storage = poisoned(slots_first)
    k_rows, v_rows = storage.by_rows(3)  # of 4 slots
    new_k, new_v = random_kv(2)
    storage.write(1, torch.tensor([5, 8]), new_k, new_v)
    assert torch.equal(k_rows[1, 1, :, 1], new_k[0]) and torch.equal(v_rows[1, 1, :, 1], new_v[0])
    assert torch.equal(k_rows[1, 2, :, 0], new_k[1]) and torch.equal(v_rows[1, 2, :, 0], new_v[1])
    k_rows[2, 0, :, 3] = 9
    v_rows[2, 0, :, 3] = 8
    k, v = storage.read(2, slice(3, 4))
    assert (k == 9).all() and (v == 8).all()
    assert unwritten(storage, 2) == [s for s in range(SLOTS) if s != 3]


def test_unequal_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="12 slots do not make 5 equal rows"):
        poisoned().by_rows(5)


@pytest.mark.parametrize("rows", [0, -1])
def test_no_rows_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=str(rows)):
        poisoned().by_rows(rows)


# -- update -------------------------------------------------------------------------------------


def batch_at(slots: list[list[int]], contexts: list[Tensor | slice]) -> Batch:
    batch = Batch.from_sequences([[0] * len(own) for own in slots])
    flat = torch.tensor([slot for own in slots for slot in own])
    return batch.with_slots(range(len(slots)), flat, contexts)


@LAYOUTS
def test_update_gives_each_sequence_its_own_history_and_new(slots_first: bool) -> None:
    storage = poisoned(slots_first)
    k, v = random_kv(7)
    storage.update(0, k[:4], v[:4], batch_at([[0, 1], [9, 4]], [slice(0, 2), torch.tensor([9, 4])]))
    first, second = storage.update(
        0, k[4:], v[4:], batch_at([[2], [11, 5]], [slice(0, 3), torch.tensor([9, 4, 11, 5])])
    )
    for got, own in zip((*first, *second), ([0, 1, 4],) * 2 + ([2, 3, 5, 6],) * 2, strict=True):
        whole = k if got.shape[-1] == 4 else v
        assert torch.equal(got, whole[own])


def test_batch_without_slots_is_refused() -> None:
    storage = poisoned()
    before = memory(storage)
    with pytest.raises(ValueError, match="no slots"):
        storage.update(0, *random_kv(2), Batch.from_sequences([[1, 2]]))
    assert memory(storage) == before


# -- refusals -----------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("layer", [3, 99, -1])
def test_wrong_layer_is_refused_and_nothing_written(slots_first: bool, layer: int) -> None:
    storage = poisoned(slots_first)
    before = memory(storage)
    with pytest.raises(ValueError, match=rf"layer {layer} is outside 0 \.\. 2"):
        storage.write(layer, torch.tensor([0]), *random_kv(1))
    assert memory(storage) == before
    storage.write(2, torch.tensor([0]), *random_kv(1))


@LAYOUTS
@pytest.mark.parametrize(
    ("k_shape", "v_shape"),
    [
        ((2, 2, 4), (3, 2, 6)),
        ((3, 2, 4), (2, 2, 6)),
        ((3, 4, 4), (3, 4, 6)),
        ((3, 2, 6), (3, 2, 4)),
        ((3, 2, 4), (3, 2, 4)),
        ((3, 8), (3, 12)),
        ((1, 3, 2, 4), (1, 3, 2, 6)),
        ((1, 2, 4), (1, 2, 6)),
    ],
)
def test_wrong_shapes_are_refused_and_nothing_written(
    slots_first: bool, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    storage = poisoned(slots_first)
    before = memory(storage)
    with pytest.raises(ValueError) as refusal:
        storage.write(0, torch.arange(3), torch.zeros(k_shape), torch.zeros(v_shape))
    for shape in ((3, 2, 4), (3, 2, 6), k_shape, v_shape):
        assert str(list(shape)) in str(refusal.value)
    assert memory(storage) == before
    storage.write(0, torch.arange(3), *random_kv(3))


@LAYOUTS
@pytest.mark.parametrize("wrong", ["k", "v", "both"])
def test_wrong_dtype_is_refused_and_nothing_written(slots_first: bool, wrong: str) -> None:
    storage = poisoned(slots_first)
    before = memory(storage)
    k, v = random_kv(2)
    k = k.bfloat16() if wrong in ("k", "both") else k
    v = v.bfloat16() if wrong in ("v", "both") else v
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        storage.write(0, torch.arange(2), k, v)
    assert memory(storage) == before


@pytest.mark.parametrize("slots", [0, -4, True, 1.5])
def test_storage_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=rf"num_slots.*got {slots!r}"):
        KVStorage(SPEC, slots)


def test_shelves_on_the_meta_device_take_no_memory() -> None:
    spec = KVCacheSpec(num_layers=48, num_kv_heads=64, k_head_dim=128, v_head_dim=128)
    storage = KVStorage(spec, 10**6, device="meta")
    assert storage.k.is_meta and storage.num_bytes == 48 * 64 * 256 * 4 * 10**6


def test_layers_never_share_a_slot() -> None:
    storage = poisoned()
    filled = [random_kv(SLOTS, seed) for seed in range(3)]
    for layer, (k, v) in enumerate(filled):
        storage.write(layer, torch.arange(SLOTS), k, v)
    for layer, (k, v) in enumerate(filled):
        got_k, got_v = storage.read(layer, slice(0, SLOTS))
        assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert all(not torch.equal(a[0], b[0]) for a, b in pairwise(filled))


# -- contexts, one at a time --------------------------------------------------------------------


def filled(slots_first: bool) -> KVStorage:
    """Every slot of layers 0 and 1 written, layer 2 and slot 11 of all still poisoned."""
    storage = poisoned(slots_first)
    for layer in (0, 1):
        storage.write(layer, torch.arange(SLOTS - 1), *random_kv(SLOTS - 1, seed=layer))
    return storage


SCATTERED = torch.tensor([9, 4, 0]), torch.tensor([2, 7]), torch.tensor([9, 4])


def ask(storage: KVStorage, layer: int, *contexts: Tensor | slice) -> Contexts:
    """An update that writes one token per sequence over what is in its first slot already."""
    own = [slots.start if isinstance(slots, slice) else int(slots[0]) for slots in contexts]
    k, v = (x.clone() for x in storage.read(layer, torch.tensor(own)))
    return storage.update(layer, k, v, batch_at([[slot] for slot in own], list(contexts)))


@LAYOUTS
def test_no_sequences_copy_is_another_ones_memory(slots_first: bool) -> None:
    storage = filled(slots_first)
    before = memory(storage)
    first, second, third = ask(storage, 0, *SCATTERED)
    wanted = [[x.clone() for x in pair] for pair in (first, second, third)]
    for x in second:
        x.fill_(-1)
    assert memory(storage) == before, "nor the shelves'"
    for pair, want in ((first, wanted[0]), (third, wanted[2])):
        assert all(torch.equal(x, y) for x, y in zip(pair, want, strict=True))


@LAYOUTS
def test_contexts_of_two_layers_stay_those_of_their_layer(slots_first: bool) -> None:
    storage = filled(slots_first)
    zero, one = ask(storage, 0, *SCATTERED), ask(storage, 1, *SCATTERED)
    for _ in range(2):  # asked in turn, and again
        for layer, contexts in ((0, zero), (1, one)):
            k, v = random_kv(SLOTS - 1, seed=layer)
            for (got_k, got_v), slots in zip(contexts, SCATTERED, strict=True):
                assert torch.equal(got_k, k[slots]) and torch.equal(got_v, v[slots])


@LAYOUTS
@pytest.mark.parametrize("part", [1, 30, 10**6])
def test_heads_one_after_the_other_are_the_whole_context(
    slots_first: bool, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_storage, "PART", part)
    contexts = ask(filled(slots_first), 1, *SCATTERED, slice(2, 6))
    for index, (k, v) in enumerate(contexts):
        parts = [(some, k.clone(), v.clone()) for some, k, v in contexts.by_heads(index)]
        assert [h for some, _, _ in parts for h in range(KV_HEADS)[some]] == list(range(KV_HEADS))
        assert len(parts) == (1 if index == 3 or part == 10**6 else KV_HEADS)
        assert torch.equal(torch.cat([k for _, k, _ in parts], dim=1), k)
        assert torch.equal(torch.cat([v for _, _, v in parts], dim=1), v)


@LAYOUTS
def test_heads_are_copied_into_one_memory_and_never_over_the_shelves(slots_first: bool) -> None:
    storage = filled(slots_first)
    contexts = ask(storage, 0, *SCATTERED)
    before, where = memory(storage), set()
    for _ in range(3):
        for index in range(3):
            for _, k, v in contexts.by_heads(index):
                where.add((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
                k.fill_(-1)
                v.fill_(-1)
    assert len(where) == 1 and memory(storage) == before


def test_only_a_large_copy_is_read_by_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = ask(filled(True), 0, SCATTERED[0], SCATTERED[1], slice(0, 8))
    assert not any(contexts.is_large(index) for index in range(3))
    monkeypatch.setattr(kv_storage, "SMALL", 2 * filled(True).k_bytes)
    assert [contexts.is_large(index) for index in range(3)] == [True, False, False]


@LAYOUTS
def test_neighbours_are_read_without_a_copy(slots_first: bool) -> None:
    storage = filled(slots_first)
    contexts = ask(storage, 0, slice(3, 8), torch.tensor([9, 4]))
    for shelf, x in zip((storage.k, storage.v), contexts[0], strict=True):
        assert x.untyped_storage().data_ptr() == shelf.untyped_storage().data_ptr()
    for shelf, x in zip((storage.k, storage.v), contexts[1], strict=True):
        assert x.untyped_storage().data_ptr() != shelf.untyped_storage().data_ptr()


@LAYOUTS
def test_a_context_is_read_when_it_is_asked_for_and_then_let_go(
    slots_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(slots_first)
    alive: list[weakref.ref[Tensor]] = []
    read = storage.read

    def watched(layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        pair = read(layer, slots)
        alive.extend(map(weakref.ref, pair))
        return pair

    contexts = ask(storage, 0, *SCATTERED)
    monkeypatch.setattr(storage, "read", watched)
    assert len(contexts) == 3 and not alive, "nothing was copied yet"
    for s in range(3):
        assert len(contexts[s][0]) == len(SCATTERED[s])
        assert len(alive) == 2 * s + 2 and not any(copy() is not None for copy in alive)
    one_by_one = iter(contexts)
    for _ in SCATTERED:
        next(one_by_one)
        assert not any(copy() is not None for copy in alive), "the iterator keeps none"


def test_contexts_are_counted_and_cut_like_a_list() -> None:
    storage = filled(True)
    contexts = ask(storage, 0, *SCATTERED)
    for got, want in ((contexts[-1], contexts[2]), (contexts[1:][0], contexts[1])):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert [len(k) for k, _ in contexts] == [3, 2, 2] and len(contexts[:-1]) == 2
    for index in (3, -4):
        with pytest.raises(IndexError):
            contexts[index]


@LAYOUTS
def test_longer_contexts_need_nothing_but_their_slots(slots_first: bool) -> None:
    storage, k, v = poisoned(slots_first), *random_kv(SLOTS)
    order = [9, 4, 11, 5, 0, 7]
    for n in range(1, len(order) + 1):  # as in decode: each time one token more
        own = batch_at([[order[n - 1]]], [torch.tensor(order[:n])])
        (got,) = storage.update(2, k[n - 1 : n], v[n - 1 : n], own)
        assert torch.equal(got[0], k[:n]) and torch.equal(got[1], v[:n])


@LAYOUTS
def test_inference_mode_leaves_nothing_behind_that_others_cannot_use(slots_first: bool) -> None:
    with torch.inference_mode():
        storage = filled(slots_first)
        contexts = ask(storage, 0, *SCATTERED)
        inside = [[x.clone() for x in pair] for pair in contexts]
    for pair, want in zip(contexts, inside, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(pair, want, strict=True))
        pair[0].add_(1)  # a copy made outside is an ordinary tensor
    storage.write(0, torch.tensor([SLOTS - 1]), *random_kv(1))
    assert unwritten(storage, 0) == []
