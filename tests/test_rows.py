"""Rows of slots and the concatenating twin: who gets what, refusals, equal answers."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from checkpoints import LLAMA2_7B, QWEN3_06B
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_storage import memory, poisoned, random_kv
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVMemory, SequenceMemory, fork_to_give_up
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.trace.events import Recorder, RowFreed, RowTaken

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
ROWS, MAX_LEN = 3, 8
EVERY_CACHE = pytest.mark.parametrize("name", ["static", "growing"])

Pairs = list[list[tuple[Tensor, Tensor]]]  # of each layer, K and V of each sequence


def static(trace: Recorder | None = None) -> StaticKVCache:
    return StaticKVCache(poisoned(False, ROWS * MAX_LEN, SPEC), ROWS, MAX_LEN, trace)


def make(name: str) -> Any:
    return GrowingKVCache() if name == "growing" else static()


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

    def free(self, name: str) -> None:
        self.cache.free(name)
        self.lens.pop(name, None)


# -- shapes and bytes -----------------------------------------------------------------------------


def test_the_classic_shape_shows_each_sequence_in_its_row() -> None:
    drive = Drive(static(), a=3, b=5)
    k, v = drive.cache.by_rows()
    assert k.shape == (SPEC.num_layers, ROWS, SPEC.num_kv_heads, MAX_LEN, SPEC.k_head_dim)
    assert v.shape == (SPEC.num_layers, ROWS, SPEC.num_kv_heads, MAX_LEN, SPEC.v_head_dim)
    new_k, new_v = random_kv(8, 1)  # of layer 1
    assert torch.equal(k[1, 0, :, :3], new_k[:3].transpose(0, 1))
    assert torch.equal(v[1, 1, :, :5], new_v[3:].transpose(0, 1))
    assert k[1, 0, :, 3:].isnan().all() and k[1, 1, :, 5:].isnan().all() and k[1, 2].isnan().all()


FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("model", "config", "shape", "num_bytes"),
    [
        (LLAMA2_7B, {"max_seqs": 2, "dtype": FP16, "tp_size": 4}, (32, 2, 8, 4096, 128), 2**30),
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


# -- who gets what --------------------------------------------------------------------------------


def test_a_sequence_takes_a_row_and_writes_on_where_it_is() -> None:
    cache: KVMemory = static()
    room = cache.allocate("a", [1, 2, 3], 0, 3)
    assert room == Allocation(0, range(3), slice(0, 3))
    assert cache.allocate("b", [1, 2], 0, 2) == Allocation(0, range(8, 10), slice(8, 10))
    assert cache.allocate("a", [0] * 9, 2, 4) == Allocation(2, range(2, 6), slice(0, 6))
    assert cache.allocate("a", [1, 2, 3], 2, 99) == Allocation(2, range(2, 3), slice(0, 3))
    assert cache.describe("b") == SequenceMemory((1,), tuple(range(8, 16)))
    assert cache.describe("c") == ((), ()) and cache.settings == {"num_rows": 3, "row_len": 8}


def test_without_a_free_row_nothing_happens_and_rows_are_told_once() -> None:
    recorder = Recorder()
    recorder.bind(lambda: 2.0, {})
    drive = Drive(static(trace=recorder), a=3, b=1, c=1)
    cache, before = drive.cache, memory(drive.cache.storage)
    assert cache.allocate("d", [1], 0, 1) is None and cache.describe("d") == ((), ())
    assert memory(cache.storage) == before
    drive.step({"a": 1})  # who has a row goes on
    for name in "bbd":
        drive.free(name)
    assert cache.num_free_rows == 1 and cache.describe("b") == ((), ())
    assert drive.allocate("d", 2) == Allocation(0, range(8, 10), slice(8, 10))
    told = [RowTaken(0, 2.0, name, row) for row, name in enumerate("abc")]
    assert list(recorder.events) == [*told, RowFreed(0, 2.0, "b", 1), RowTaken(0, 2.0, "d", 1)]


@EVERY_CACHE
def test_a_forward_that_broke_off_leaves_no_trace(name: str) -> None:
    clean, dirty = Drive(make(name), a=3, b=2), Drive(make(name), a=3, b=2)
    dirty.step({"a": 4, "b": 2}, seed=9, layers=2)
    pairs = zip(clean.step({"a": 1, "b": 1}, 2), dirty.step({"a": 1, "b": 1}, 2), strict=True)
    for want, got in pairs:
        for (k, v), (their_k, their_v) in zip(want, got, strict=True):
            assert torch.equal(k, their_k) and torch.equal(v, their_v)


@EVERY_CACHE
def test_what_is_freed_is_forgotten_and_only_that(name: str) -> None:
    drive = Drive(make(name), a=3, b=2, c=7)
    drive.free("b")
    contexts = drive.step({"b": 2, "a": 1}, seed=5)
    new_k, new_v = random_kv(3, 50)
    assert torch.equal(contexts[0][0][0], new_k[:2]) and torch.equal(contexts[0][0][1], new_v[:2])
    assert [len(k) for k, _ in contexts[0]] == [2, 4]


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


@pytest.mark.parametrize("backend", [NaiveAttention, SdpaAttention])
@EVERY_CACHE
def test_values_may_be_wider_than_keys(name: str, backend: Callable[..., AttentionBackend]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(9, heads, dim, generator=generator) for heads, dim in ((4, 4), (2, 4), (2, 6))
    )
    whole = NaiveAttention().attend(0, q, k, v, Batch.from_sequences([[0] * 5, [0] * 4]))
    drive, outs = Drive(make(name)), []
    attention = backend(cache=drive.cache.storage)
    # tokens 0 .. 4 are of one sequence, 5 .. 8 of the other: 3 + 2, then 1 + 1, then 1 + 1
    for rows in ([0, 1, 2, 5, 6], [3, 7], [4, 8]):
        lengths = {"a": sum(r < 5 for r in rows), "b": sum(r >= 5 for r in rows)}
        outs.append(attention.attend(0, q[rows], k[rows], v[rows], drive.batch(lengths)))
        drive.lens = {name: drive.lens.get(name, 0) + n for name, n in lengths.items()}
    got = torch.cat(outs)[[0, 1, 2, 5, 7, 3, 4, 6, 8]]
    assert got.shape == (9, 4, 6)
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=0)


# -- refusals -------------------------------------------------------------------------------------


def test_what_no_row_has_room_for_is_refused_with_the_numbers() -> None:
    drive = Drive(static(), a=5, b=7)
    before = memory(drive.cache.storage)
    for name, n, end in (("a", 4, 9), ("b", 2, 9), ("c", 30, 30)):
        with pytest.raises(ValueError, match=f"{name} would have {end} tokens.* room for 8"):
            drive.step({name: n})
    assert memory(drive.cache.storage) == before and drive.cache.num_free_rows == 1
    drive.step({"b": 1, "a": 3})  # to the last slot


@pytest.mark.parametrize(
    ("rows", "length", "says"),
    [
        (5, 5, "5 rows of 5 need 25 .*has 24"),
        (24, 2, "24 rows of 2 need 48 .*has 24"),
        (-3, -8, "num_rows.*-3"),
        (0, 0, "num_rows.*0"),
        (True, 24, "num_rows.*True"),
    ],
)
def test_rows_that_do_not_fill_the_storage_are_refused(rows: int, length: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StaticKVCache(poisoned(slots=24), rows, length)


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (lambda cache: cache._free.pop(), r"rows \[0\] are taken and \[2\] free, of 3"),
        (lambda cache: cache._free.append(0), r"\[0\] are taken and \[0, 1, 2\] free, of 3"),
        (lambda cache: cache._rows.update(b=0), r"rows \[0, 0\] are taken"),
        (lambda cache: cache._free.__setitem__(-1, 7), r"\[2, 7\] free, of 3"),
    ],
)
def test_rows_that_do_not_add_up_are_noticed(corrupt: Callable[[Any], object], says: str) -> None:
    cache = Drive(static(), a=3).cache
    corrupt(cache)
    with pytest.raises(AssertionError, match=says):
        cache.check_integrity()


# -- the naive twin -------------------------------------------------------------------------------


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


# -- who gives way, of those who wait -------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "waiting", "holding", "given_up"),
    [
        ("A", ["A.1", "A.2"], ["A", "A.1", "A.2"], "A.2"),  # one that runs: the newest goes
        ("A", [], ["A", "B"], None),  # nobody waits
        ("C", ["A.1"], ["A", "A.1"], None),  # a newcomer waits for those who run
        ("A.1", ["A.1"], ["A", "A.1"], None),  # and so does a fork
        ("A.2", ["A.1", "A.2"], ["A.1", "A.2"], "A.1"),  # nobody runs: another before itself
        ("A.1", ["A.1"], ["A.1"], "A.1"),  # nobody else is left: it is computed anew
        ("C", ["A.1", "A.2"], ["A.1", "A.2"], "A.2"),
    ],
)
def test_a_fork_that_waits_gives_way_to_whoever_runs_or_all_would_wait(
    key: str, waiting: list[str], holding: list[str], given_up: str | None
) -> None:
    assert fork_to_give_up(key, waiting, holding) == given_up
