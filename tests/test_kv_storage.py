"""KV storage: a slot gives back what was put into it, in both layouts, and nothing else moves."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.batch import Allocation, Batch, Slots

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
SLOTS = 12
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])


def poisoned(slots_first: bool = False, slots: int = SLOTS, spec: KVCacheSpec = SPEC) -> KVStorage:
    """A storage in which a slot that was never written cannot go unnoticed."""
    storage = KVStorage(spec, slots, slots_first=slots_first)
    for tensor in (storage.k, storage.v):
        tensor.fill_(float("nan"))
    return storage


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


def update(
    storage: KVStorage, layer: int, k: Tensor, v: Tensor, *writes: tuple[list[int], Slots]
) -> list[tuple[Tensor, Tensor]]:
    """Slots to write, and slots to read, of each sequence → copies of what it is given."""
    asked = storage.update(layer, k, v, batch_of(*writes))
    return [(k.clone(), v.clone()) for k, v in asked]


def batch_of(*writes: tuple[list[int], Slots]) -> Batch:
    return Batch.from_allocations(
        [[0] * len(new) for new, _ in writes],
        [Allocation(0, new, context) for new, context in writes],
        [str(number) for number in range(len(writes))],
    )


@LAYOUTS
def test_update_gives_each_sequence_its_own_history_and_new(slots_first: bool) -> None:
    storage = poisoned(slots_first)
    k, v = random_kv(7)
    update(storage, 0, k[:4], v[:4], ([0, 1], slice(0, 2)), ([9, 4], torch.tensor([9, 4])))
    later = ([2], slice(0, 3)), ([11, 5], torch.tensor([9, 4, 11, 5]))
    first, second = update(storage, 0, k[4:], v[4:], *later)
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


def test_tensors_on_the_meta_device_take_no_memory() -> None:
    spec = KVCacheSpec(num_layers=48, num_kv_heads=64, k_head_dim=128, v_head_dim=128)
    storage = KVStorage(spec, 10**6, device="meta")
    assert storage.k.is_meta and storage.num_bytes == 48 * 64 * 256 * 4 * 10**6


# -- contexts, one at a time --------------------------------------------------------------------


def filled(slots_first: bool) -> KVStorage:
    """Every slot but the last written in layers 0 and 1; the rest is still poisoned."""
    storage = poisoned(slots_first)
    for layer in (0, 1):
        storage.write(layer, torch.arange(SLOTS - 1), *random_kv(SLOTS - 1, seed=layer))
    return storage


SCATTERED = torch.tensor([9, 4, 0]), torch.tensor([2, 7]), torch.tensor([9, 4])


def ask(storage: KVStorage, layer: int, *contexts: Slots) -> Iterator[tuple[Tensor, Tensor]]:
    """An update that writes one token per sequence over what is in its first slot already."""
    own = [slots.start if isinstance(slots, slice) else int(slots[0]) for slots in contexts]
    k, v = (x.clone() for x in storage.read(layer, torch.tensor(own)))
    writes = zip(own, contexts, strict=True)
    return iter(storage.update(layer, k, v, batch_of(*(([slot], one) for slot, one in writes))))


@LAYOUTS
def test_each_pair_is_right_when_it_is_asked_for_also_between_layers(slots_first: bool) -> None:
    storage = filled(slots_first)
    asked = [ask(storage, layer, *SCATTERED) for layer in (0, 1)]
    for slots in SCATTERED:
        for layer, contexts in enumerate(asked):
            for got, want in zip(next(contexts), random_kv(SLOTS - 1, seed=layer), strict=True):
                assert torch.equal(got, want[slots])
    assert all(next(contexts, None) is None for contexts in asked)


@LAYOUTS
def test_long_scattered_contexts_are_copied_into_one_memory_that_is_kept(
    slots_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutorial_engine.cache.storage.LONG", 1)
    storage, where = filled(slots_first), set()
    before = memory(storage)
    for layer in (0, 1, 0):
        for k, v in ask(storage, layer, *SCATTERED):
            where.add((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
            k.fill_(-1)
            v.fill_(-1)
    assert len(where) == 1 and memory(storage) == before, "and never over the storage"
    read = storage.read(0, SCATTERED[0])
    next(ask(storage, 1, SCATTERED[1]))
    assert torch.equal(read[0], random_kv(SLOTS - 1)[0][SCATTERED[0]]), "read gives a copy"


@LAYOUTS
def test_who_trains_gets_copies_that_stay(slots_first: bool) -> None:
    storage = filled(slots_first)
    with torch.enable_grad():
        pairs = list(ask(storage, 0, *SCATTERED))
    for pair, slots in zip(pairs, SCATTERED, strict=True):
        for got, want in zip(pair, random_kv(SLOTS - 1), strict=True):
            assert torch.equal(got, want[slots])


@LAYOUTS
def test_neighbours_are_read_without_a_copy(slots_first: bool) -> None:
    storage = filled(slots_first)
    neighbours, scattered = ask(storage, 0, slice(3, 8), torch.tensor([9, 4]))
    for tensor, view, copy in zip((storage.k, storage.v), neighbours, scattered, strict=True):
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@LAYOUTS
def test_inference_mode_leaves_nothing_behind_that_others_cannot_use(slots_first: bool) -> None:
    with torch.inference_mode():
        storage = filled(slots_first)
        inside = [k.clone() for k, _ in ask(storage, 0, *SCATTERED)]
    for (k, _), want in zip(ask(storage, 0, *SCATTERED), inside, strict=True):
        assert torch.equal(k, want)
        k.add_(1)  # it is an ordinary tensor
    storage.write(0, torch.tensor([SLOTS - 1]), *random_kv(1))
    assert unwritten(storage, 0) == []


def test_both_layouts_answer_alike() -> None:
    heads, slots = poisoned(False), poisoned(True)
    where = torch.tensor([7, 0, 3])
    for storage in (heads, slots):
        storage.write(1, where, *random_kv(3))
    for a, b in zip(heads.read(1, where), slots.read(1, where), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape


def test_layers_never_share_a_slot() -> None:
    storage = poisoned()
    filled = [random_kv(SLOTS, seed) for seed in range(3)]
    for layer, (k, v) in enumerate(filled):
        storage.write(layer, torch.arange(SLOTS), k, v)
    for layer, (k, v) in enumerate(filled):
        got_k, got_v = storage.read(layer, slice(0, SLOTS))
        assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert all(not torch.equal(a[0], b[0]) for a, b in pairwise(filled))


@LAYOUTS
def test_longer_contexts_need_nothing_but_their_slots(slots_first: bool) -> None:
    storage, k, v = poisoned(slots_first), *random_kv(SLOTS)
    order = [9, 4, 11, 5, 0, 7]
    for n in range(1, len(order) + 1):  # as in decode: each time one token more
        own = [order[n - 1]], torch.tensor(order[:n])
        (got,) = update(storage, 2, k[n - 1 : n], v[n - 1 : n], own)
        assert torch.equal(got[0], k[:n]) and torch.equal(got[1], v[:n])
