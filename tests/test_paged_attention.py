"""Attention in blocks: the textbook's answer, from blocks that are read where they are.

One layer by hand: sequences that grow in chunks, fork, give way and come back, on pools of NaN. In
the ledger and in the property runs the same backends serve whole engines.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import poison
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import (
    NaivePagedAttention,
    attend_in_blocks,
)
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab import many_blocks
from tutorial_engine.lab.many_blocks import PagedAttention, Sums
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.attention import (
    AttentionBackend,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.batched_attention import fast_attention

HEADS, KV_HEADS, DIM, V_DIM = 6, 2, 8, 5
BLOCK_SIZES = (1, 4, 16, 256)
IN_PLACE: dict[str, Callable[[PagedKVCache], AttentionBackend]] = {
    "in a loop": NaivePagedAttention,
    "many at a time": PagedAttention,
}
BACKENDS: dict[str, Callable[[PagedKVCache], AttentionBackend]] = {
    "gathered": lambda memory: fast_attention(torch.device("cpu"), memory.storage),
    **IN_PLACE,
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pages(
    block_size: int,
    num_blocks: int,
    slots_first: bool = True,
    kv_heads: int = KV_HEADS,
    dtype: torch.dtype = torch.float32,
    prefix_caching: bool = False,
) -> PagedKVCache:
    """One layer of NaN, for keys and values of different sizes."""
    sizes = {"num_layers": 1, "num_kv_heads": kv_heads, "k_head_dim": DIM, "v_head_dim": V_DIM}
    spec = KVCacheSpec(**sizes, dtype=dtype)
    storage = KVStorage(spec, num_blocks * block_size, slots_first=slots_first)
    return poison(PagedKVCache(storage, block_size, prefix_caching=prefix_caching))


# -- the loop over blocks -------------------------------------------------------------------------


@LAYOUTS
@settings(deadline=None, max_examples=40)
@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    sizes=st.tuples(*[st.integers(low, high) for low, high in ((1, 9), (0, 40), (1, 3), (1, 3))]),
    seed=st.integers(0, 10**6),
)
def test_loop_gives_what_the_textbook_gives(
    slots_first: bool, block_size: int, sizes: tuple[int, int, int, int], seed: int
) -> None:
    (q_len, cached, group, kv_heads), draw = sizes, torch.Generator().manual_seed(seed)
    kv_len = q_len + cached
    q = 2 * torch.randn(q_len, kv_heads * group, DIM, generator=draw)
    k = 2 * torch.randn(kv_len, kv_heads, DIM, generator=draw)
    v = torch.randn(kv_len, kv_heads, V_DIM, generator=draw)
    num_blocks = -(-kv_len // block_size)
    memory = pages(block_size, num_blocks + 3, slots_first, kv_heads)
    table = torch.randperm(num_blocks + 3, generator=draw)[:num_blocks].tolist()
    slots = [table[p // block_size] * block_size + p % block_size for p in range(kv_len)]
    memory.storage.write_slots(0, torch.tensor(slots), k, v)
    k_pool, v_pool = (pool[0] for pool in memory.pages())
    got = attend_in_blocks(q, k_pool, v_pool, table, kv_len)
    want = naive_attention(q, k, v, causal_mask(q_len, kv_len)).out
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# -- sequences that live --------------------------------------------------------------------------


class Story:
    """Sequences in one memory, beside a plain record of all their K and V."""

    def __init__(self, memory: PagedKVCache, backend: str, seed: int = 0) -> None:
        self.memory, self.attention = memory, BACKENDS[backend](memory)
        self.spec, self.generator = memory.storage.spec, torch.Generator().manual_seed(seed)
        self.kv: dict[str, tuple[Tensor, Tensor]] = {}  # seq_id -> all its K and V
        self.tokens: dict[str, list[int]] = {}
        self.waiting: set[str] = set()  # forks: until they run, they may lose what they share
        self.largest = 0.0  # difference to the textbook

    def step(self, **new: int) -> bool:
        """So many new tokens of each sequence in one batch; False if there is no room."""
        allocations = []
        for name, count in new.items():
            ids = self.tokens.get(name, [])
            done = 0 if name in self.waiting else len(ids)
            allocation = self.memory.allocate(name, ids + [7] * count, done, count)
            if allocation is None:
                return False
            allocations.append(allocation)
            if name in self.waiting:
                done = allocation.first_position
                self.kv[name] = tuple(x[:done] for x in self.kv[name])  # type: ignore[assignment]
        self.waiting -= new.keys()
        batch = Batch.from_allocations([[7] * n for n in new.values()], allocations, list(new))
        shapes = (HEADS, DIM), (self.spec.num_kv_heads, DIM), (self.spec.num_kv_heads, V_DIM)
        drawn = (torch.randn(batch.num_tokens, *s, generator=self.generator) for s in shapes)
        q, k, v = (x.to(self.spec.dtype) for x in drawn)
        out = self.attention.attend(0, 3 * q, k, v, batch)
        assert out.shape == (batch.num_tokens, HEADS, V_DIM) and out.dtype == self.spec.dtype
        parts = (x.split(batch.query_lens) for x in (3 * q, k, v, out))
        for name, q_s, k_s, v_s, out_s in zip(new, *parts, strict=True):
            old = self.kv.get(name, (k_s[:0], v_s[:0]))
            self.kv[name] = torch.cat((old[0], k_s)), torch.cat((old[1], v_s))
            self.tokens[name] = [7] * len(self.kv[name][0])
            self.memory.commit(name, self.tokens[name], len(self.tokens[name]))
            mask = causal_mask(len(q_s), len(self.tokens[name]))
            exact = [x.float() for x in (q_s, *self.kv[name])]
            want = naive_attention(*exact, mask).out
            difference = (out_s.float() - want).abs().max().item()
            assert difference == difference, "NaN was read"
            self.largest = max(self.largest, difference)
        self.memory.check_integrity()
        return True

    def fork(self, parent: str, child: str, num_tokens: int) -> None:
        self.memory.fork(parent, child, num_tokens)
        self.tokens[child] = [7] * num_tokens
        self.waiting.add(child)
        self.kv[child] = tuple(x[:num_tokens] for x in self.kv[parent])  # type: ignore[assignment]

    def free(self, name: str) -> None:
        self.memory.free(name)
        self.kv.pop(name, None)
        self.tokens.pop(name, None)
        self.waiting.discard(name)


@every_backend
@LAYOUTS
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_sequences_grow_fork_and_give_way(block_size: int, slots_first: bool, backend: str) -> None:
    """Chunks beside decodes, blocks that are shared and then copied, and blocks taken over."""
    story = Story(pages(block_size, max(8, 400 // block_size), slots_first), backend)
    assert story.step(a=5, b=1) and story.step(a=3, b=9, c=70)
    for _ in range(20):  # side by side: no block of a table has its neighbour there
        assert story.step(a=1, b=1, c=1)
    story.fork("a", "d", len(story.tokens["a"]))
    story.fork("c", "e", 71)
    for _ in range(3):
        assert story.step(a=1, d=1, e=2, c=1)
    story.free("b")
    assert story.step(f=33, d=1) and story.step(f=1, a=1, d=7, c=1, e=1)
    story.free("a")
    story.free("d")
    assert story.step(a=30, c=1)
    assert story.largest < 1e-5, "not what the textbook gives"
    scattered = block_size < 256  # blocks of 256 hold each sequence here
    assert (story.memory.storage.bytes_gathered > 0) == (backend == "gathered" and scattered)


@every_backend
def test_bf16_is_as_near_as_the_gathering_backend_is(backend: str) -> None:
    """Numbers of 8 bits, up to about 3: what is rounded is 2 ** -8 of them, a few times."""
    story = Story(pages(4, 60, dtype=torch.bfloat16), backend)
    for new in ({"a": 50, "b": 2}, *[{"a": 1, "b": 1}] * 30, {"a": 40, "b": 1}):
        assert story.step(**new)
    assert 1e-4 < story.largest < 0.05


# -- nothing is copied ----------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Bytes of new tensors made of a pool's K and V, other than their products."""

    ALLOWED = ("bmm", "scaled_dot_product_attention", "index_copy_", "new_empty")

    def __init__(self, storage: KVStorage) -> None:
        super().__init__()
        self.pools = {x.untyped_storage().data_ptr() for x in (storage.k, storage.v)}
        self.copied, self.used = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        if any(self.is_pool(x) for x in given) and isinstance(out, Tensor):
            self.used.add(func.__name__)
            if not self.is_pool(out) and not any(name in str(func) for name in self.ALLOWED):
                self.copied += out.nbytes
        return out

    def is_pool(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.pools


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_counters_agree_on_what_is_copied(slots_first: bool, dtype: torch.dtype) -> None:
    """What PyTorch is asked to do with the pool, and what the storage counts."""
    found = {}
    for backend in BACKENDS:
        story = Story(pages(4, 90, slots_first, dtype=dtype), backend)
        with Watch(story.memory.storage) as watch:
            for new in ({"a": 30, "b": 2}, *[{"a": 1, "b": 1, "c": 1}] * 20, {"a": 9, "b": 1}):
                assert story.step(**new)
        assert watch.used, "the pool was not looked at"
        found[backend] = watch.copied, story.memory.storage.bytes_gathered
    copied = found.pop("gathered")
    assert copied[0] == copied[1] > 0
    assert set(found.values()) == {(0, 0)}


# -- mistakes -------------------------------------------------------------------------------------

ALL_WAYS = (4, True, "many at a time")  # of reading: each bug shows that its own is taken
BUGS: Zoo = {
    "sums are not corrected": edited(
        Sums, "merge", ("self.l * a + other.l * b", "self.l + other.l")
    ),
    "the rest of the last block is read": edited(
        PagedAttention, "_view", ("min(run.length * size, kv_len - position)", "run.length * size")
    ),
    "the table is not followed": edited(
        many_blocks,
        "runs_of",
        ("(first + length, start + length)", "(first + length, block)"),
    ),
    "every block gets the first query": edited(
        many_blocks, "_scattered", ("reader.get(i, 0)", "0")
    ),
    "missing blocks count": edited(
        many_blocks, "_scattered", ("[True] * (width", "[False] * (width")
    ),
    "a query sees the later ones of its tile": edited(
        many_blocks, "sum_views", ("k_pos > q_pos[:, None]", "k_pos > end")
    ),
    "one piece is read as if nothing was asked": edited(
        PagedAttention, "attend", ("one_sequence(q_s,", "one_sequence(0 * q_s,")
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug: str) -> None:
    test_sequences_grow_fork_and_give_way(*ALL_WAYS)
    with planted(bug, BUGS), pytest.raises((AssertionError, RuntimeError)):
        test_sequences_grow_fork_and_give_way(*ALL_WAYS)


@pytest.mark.parametrize("backend", IN_PLACE)
def test_what_is_not_in_this_memory_is_refused(backend: str) -> None:
    here, elsewhere = Story(pages(4, 9), backend), Story(pages(4, 9), backend)
    assert here.step(a=3) and elsewhere.step(b=3)
    here.attention = elsewhere.attention
    with pytest.raises(ValueError, match=r"sequence a has no blocks .* only \['b'\] have"):
        here.step(a=1)
