"""Who sees whom, the textbook attention, and its fast twin."""

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from engines import one_thread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.model.attention import (
    AttentionBackend,
    NaiveAttention,
    NoCache,
    SdpaAttention,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch

BACKENDS = [NaiveAttention(), SdpaAttention()]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


def drawn(mask: Tensor) -> list[str]:
    """A mask as text, x = may attend."""
    return ["".join("x" if see else "." for see in row) for row in mask.tolist()]


def random_qkv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    k, v = 2 * torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator)
    return q, k, v


def batch_of(lengths: list[int]) -> Batch:
    return Batch.from_sequences([[0] * n for n in lengths])


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "expected"),
    [
        (4, 4, None, ["x...", "xx..", "xxx.", "xxxx"]),
        (1, 5, None, ["xxxxx"]),
        (3, 7, None, ["xxxxx..", "xxxxxx.", "xxxxxxx"]),
        (4, 4, 2, ["x...", "xx..", ".xx.", "..xx"]),
        (1, 5, 3, ["..xxx"]),
        (3, 7, 4, [".xxxx..", "..xxxx.", "...xxxx"]),
        (4, 4, 1, ["x...", ".x..", "..x.", "...x"]),
        (3, 7, 99, ["xxxxx..", "xxxxxx.", "xxxxxxx"]),
    ],
)
def test_mask_is_the_rule_key_pos_at_most_query_pos(
    q_len: int, kv_len: int, window: int | None, expected: list[str]
) -> None:
    mask = causal_mask(q_len, kv_len, window)
    assert mask.dtype == torch.bool
    assert drawn(mask) == expected


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 15))
def test_chunk_mask_is_the_tail_of_the_prefill_mask(
    q_len: int, cached: int, window: int | None
) -> None:
    kv_len = q_len + cached
    whole = causal_mask(kv_len, kv_len, window)
    assert torch.equal(causal_mask(q_len, kv_len, window), whole[cached:])


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "named"),
    [
        (5, 4, None, "q_len=5, kv_len=4"),
        (0, 4, None, "q_len=0"),
        (2, 4, 0, "window .* got 0"),
    ],
)
def test_impossible_masks_are_refused(
    q_len: int, kv_len: int, window: int | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        causal_mask(q_len, kv_len, window)


def test_three_tokens_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]])
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[4.0, 4.0]]])
    out, weights = naive_attention(q, q, v, causal_mask(3, 3), scale=math.log(2))
    # scores of the last query: 1, 1, 2 → powers of two 2 : 2 : 4
    expected = torch.tensor([[1.0, 0, 0], [1 / 3, 2 / 3, 0], [0.25, 0.25, 0.5]])
    torch.testing.assert_close(weights[0], expected)
    torch.testing.assert_close(out[:, 0], expected @ v[:, 0])


def test_scale_is_one_over_root_head_dim_unless_given() -> None:
    q, k, v = random_qkv(5)
    told = naive_attention(q, k, v, scale=1 / math.sqrt(HEAD_DIM))
    assert torch.equal(naive_attention(q, k, v).weights, told.weights)
    assert not torch.allclose(naive_attention(q, k, v, scale=1.0).weights, told.weights)


def test_weights_are_probabilities_and_zero_where_masked() -> None:
    mask = causal_mask(3, 7, window=4)
    q, k, v = random_qkv(7)
    weights = naive_attention(q[4:], k, v, mask).weights
    assert weights.shape == (HEADS, 3, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 3))
    assert (weights[:, ~mask] == 0).all() and (weights[:, mask] > 0).all()


def test_query_head_reads_its_groups_kv_head() -> None:
    q, k, v = random_qkv(5)
    out = naive_attention(q, k, v).out
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        alone = naive_attention(q[:, [head]], k[:, [own]], v[:, [own]]).out
        torch.testing.assert_close(out[:, head], alone[:, 0])


def test_values_may_have_another_width() -> None:
    q, k, _ = random_qkv(4)
    assert naive_attention(q, k, torch.randn(4, KV_HEADS, 3)).out.shape == (4, HEADS, 3)


def test_weights_are_fp32_for_bf16_inputs() -> None:
    q, k, v = (x.bfloat16() for x in random_qkv(40))
    out, weights = naive_attention(q, k, v)
    assert out.dtype == torch.bfloat16 and weights.dtype == torch.float32
    # a softmax in bf16 would leave the sums of 40 weights off by about 2 ** -8
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 40), atol=1e-6, rtol=0)


def test_scores_that_overflow_exp_are_fine() -> None:
    q, k, v = random_qkv(6)
    out, weights = naive_attention(1000 * q, k, v, causal_mask(6, 6))
    assert out.isfinite().all() and weights.isfinite().all()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 10**6))
def test_naive_equals_sdpa_under_any_mask(q_len: int, cached: int, seed: int) -> None:
    q, k, v = random_qkv(q_len + cached, seed)
    mask = causal_mask(q_len, q_len + cached)
    ours = naive_attention(q[cached:], k, v, mask).out
    heads_first = [x.transpose(0, 1)[None] for x in (q[cached:], k, v)]
    theirs = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 10**6))
def test_backends_agree(lengths: list[int], seed: int) -> None:
    qkv = random_qkv(sum(lengths), seed)
    naive, sdpa = (backend.attend(0, *qkv, batch_of(lengths)) for backend in BACKENDS)
    assert naive.shape == (sum(lengths), HEADS, HEAD_DIM)
    torch.testing.assert_close(naive, sdpa, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[3, 5, 4], [4, 4, 4]])
def test_no_token_sees_another_sequence(backend: AttentionBackend, lengths: list[int]) -> None:
    q, k, v = random_qkv(12)
    before = backend.attend(0, q, k, v, batch_of(lengths))
    middle = slice(lengths[0], lengths[0] + lengths[1])
    for x in (q, k, v):
        x[middle] += 7
    after = backend.attend(0, q, k, v, batch_of(lengths))
    assert torch.equal(after[: middle.start], before[: middle.start])
    assert torch.equal(after[middle.stop :], before[middle.stop :])
    assert (after[middle] != before[middle]).any(dim=(1, 2)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_sees_a_later_one(backend: AttentionBackend) -> None:
    q, k, v = random_qkv(9)
    before = backend.attend(0, q, k, v, batch_of([9]))
    k[6:] += 5
    v[6:] -= 5
    after = backend.attend(0, q, k, v, batch_of([9]))
    torch.testing.assert_close(after[:6], before[:6], atol=1e-6, rtol=1e-6)
    assert (after[6:] != before[6:]).any(dim=(1, 2)).all()


def test_observer_is_shown_every_sequences_weights() -> None:
    seen: list[tuple[int, int, Tensor]] = []
    qkv = random_qkv(7)
    NaiveAttention(observe=lambda *shown: seen.append(shown)).attend(3, *qkv, batch_of([2, 5]))
    assert [(layer, s, list(w.shape)) for layer, s, w in seen] == [
        (3, 0, [HEADS, 2, 2]),
        (3, 1, [HEADS, 5, 5]),
    ]
    second = naive_attention(*(x[2:] for x in qkv), causal_mask(5, 5))
    assert torch.equal(seen[1][2], second.weights)


def test_query_that_sees_nothing_is_refused() -> None:
    q, k, v = random_qkv(4)
    mask = causal_mask(4, 4)
    mask[2] = False
    with pytest.raises(ValueError, match="query 2 may attend to no key"):
        naive_attention(q, k, v, mask)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape"),
    [
        ((4, 6, 8), (4, 2, 10), (4, 2, 8)),
        ((4, 6, 8), (4, 4, 8), (4, 4, 8)),
        ((4, 6, 8), (4, 2, 8), (5, 2, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"shapes do not fit: q \[4, 6, 8\]"):
        naive_attention(torch.zeros(q_shape), torch.zeros(k_shape), torch.zeros(v_shape))


def test_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask must be \[4, 4\], got \[3, 4\]"):
        naive_attention(*random_qkv(4), causal_mask(3, 4))


# -- with a cache -------------------------------------------------------------------------------

CACHED = pytest.mark.parametrize("backend", [NaiveAttention, SdpaAttention])


class Remembers:
    """The least that a cache can be: per layer and sequence a list of what came."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def update(
        self, layer: int, k: Tensor, v: Tensor, batch: Batch
    ) -> Sequence[tuple[Tensor, Tensor]]:
        news = zip(k.split(batch.query_lens), v.split(batch.query_lens), strict=True)
        for s, new in enumerate(news):
            old = self.kv.get((layer, s), (k[:0], v[:0]))
            self.kv[layer, s] = torch.cat((old[0], new[0])), torch.cat((old[1], new[1]))
        return [self.kv[layer, s] for s in range(batch.num_seqs)]


@CACHED
@settings(deadline=None, max_examples=15)
@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_steps_with_a_cache_equal_the_whole_at_once(
    backend: Callable[..., AttentionBackend], steps: list[tuple[int, int]], seed: int
) -> None:
    lengths = [sum(own) for own in zip(*steps, strict=True)]
    q, k, v = random_qkv(sum(lengths), seed)
    first, second = NaiveAttention().attend(0, q, k, v, batch_of(lengths)).split(lengths)
    attention, at = backend(cache=Remembers()), (0, lengths[0])
    for new in steps:
        rows = [i for start, n in zip(at, new, strict=True) for i in range(start, start + n)]
        out = attention.attend(0, q[rows], k[rows], v[rows], batch_of(list(new)))
        want = torch.cat((first, second))[rows]
        torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
        at = (at[0] + new[0], at[1] + new[1])


@CACHED
def test_layers_ask_the_cache_apart(backend: Callable[..., AttentionBackend]) -> None:
    attention = backend(cache=Remembers())
    once = {layer: random_qkv(5, layer) for layer in (0, 1)}
    for rows in (slice(0, 3), slice(3, 4), slice(4, 5)):
        for layer, qkv in once.items():
            q, k, v = (x[rows] for x in qkv)
            out = attention.attend(layer, q, k, v, batch_of([len(q)]))
            want = naive_attention(*qkv, causal_mask(5, 5)).out[rows]
            torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


@CACHED
@pytest.mark.parametrize("v_dim", [3, 8, 11])
@pytest.mark.parametrize("lengths", [[5], [5, 5], [2, 7]])
def test_values_of_another_width_with_and_without_a_cache(
    backend: Callable[..., AttentionBackend], v_dim: int, lengths: list[int]
) -> None:
    q, k, _ = random_qkv(sum(lengths))
    v = torch.randn(sum(lengths), KV_HEADS, v_dim)
    want = torch.cat(
        [
            naive_attention(*parts, causal_mask(n, n)).out
            for n, *parts in zip(lengths, *(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
    )
    for attention in (backend(), backend(cache=Remembers())):
        out = attention.attend(0, q, k, v, batch_of(lengths))
        assert out.shape == (sum(lengths), HEADS, v_dim)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


def test_observer_sees_the_history_too() -> None:
    q, k, v = random_qkv(6)
    shapes: list[list[int]] = []
    watching = NaiveAttention(lambda _, __, weights: shapes.append([*weights.shape]), Remembers())
    for rows in (slice(0, 4), slice(4, 5), slice(5, 6)):
        watching.attend(0, q[rows], k[rows], v[rows], batch_of([len(q[rows])]))
    assert shapes == [[HEADS, 4, 4], [HEADS, 1, 5], [HEADS, 1, 6]]


def test_no_cache_gives_back_what_is_new() -> None:
    _, k, v = random_qkv(7)
    for _ in range(2):
        (k1, v1), (k2, v2) = NoCache().update(0, k, v, batch_of([3, 4]))
        assert torch.equal(torch.cat((k1, k2)), k) and torch.equal(torch.cat((v1, v2)), v)
        assert (len(k1), len(v2)) == (3, 4)


@CACHED
def test_empty_cache_is_still_a_cache(backend: Callable[..., AttentionBackend]) -> None:
    class Countable(Remembers):
        def __len__(self) -> int:
            return len(self.kv)

    cache = Countable()
    assert not cache
    backend(cache=cache).attend(0, *random_qkv(3), batch_of([3]))
    assert cache, "it was asked"


@CACHED
@pytest.mark.parametrize("lengths", [[5, 7], [3, 4, 5]])
def test_cache_that_forgets_a_sequence_is_noticed(
    backend: Callable[..., AttentionBackend], lengths: list[int]
) -> None:
    class Forgetful(Remembers):
        def update(
            self, layer: int, k: Tensor, v: Tensor, batch: Batch
        ) -> Sequence[tuple[Tensor, Tensor]]:
            return super().update(layer, k, v, batch)[:-1]

    with pytest.raises(ValueError):
        backend(cache=Forgetful()).attend(0, *random_qkv(12), batch_of(lengths))
