"""Who sees whom, the textbook attention, and its fast twins: fused, and in blocks of queries."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutorial_engine.model.attention import (
    AttentionBackend,
    BlockedAttention,
    NaiveAttention,
    SdpaAttention,
    blocked_attention,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Allocation, Batch

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
Backend = Callable[..., AttentionBackend]
every_backend = pytest.mark.parametrize(
    "backend", [NaiveAttention, SdpaAttention, BlockedAttention]
)
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def random_qkv(
    tokens: int,
    seed: int = 0,
    queries: int | None = None,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    v_dim: int = HEAD_DIM,
) -> tuple[Tensor, Tensor, Tensor]:
    """q of the last `queries` tokens (all, unless told), and k and v of all."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    queries = tokens if queries is None else queries
    return (
        2 * draw(queries, heads[0], HEAD_DIM),
        2 * draw(tokens, heads[1], HEAD_DIM),
        2 * draw(tokens, heads[1], v_dim),
    )


def batch_of(lengths: Sequence[int]) -> Batch:
    return Batch.from_sequences([[0] * n for n in lengths])


def by_the_book(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return naive_attention(q, k, v, causal_mask(len(q), len(k))).out


# -- who sees whom ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "expected"),
    [
        (4, 4, None, "x... xx.. xxx. xxxx"),
        (1, 5, None, "xxxxx"),
        (3, 7, None, "xxxxx.. xxxxxx. xxxxxxx"),
        (4, 4, 2, "x... xx.. .xx. ..xx"),
        (1, 5, 3, "..xxx"),
        (3, 7, 4, ".xxxx.. ..xxxx. ...xxxx"),
        (4, 4, 1, "x... .x.. ..x. ...x"),
        (3, 7, 99, "xxxxx.. xxxxxx. xxxxxxx"),
    ],
)
def test_mask_is_the_rule_key_pos_at_most_query_pos(
    q_len: int, kv_len: int, window: int | None, expected: str
) -> None:
    mask = causal_mask(q_len, kv_len, window)
    drawn = ["".join("x" if see else "." for see in row) for row in mask.tolist()]
    assert mask.dtype == torch.bool and " ".join(drawn) == expected


# -- the textbook -------------------------------------------------------------------------------


def test_three_tokens_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]])
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[4.0, 4.0]]])
    out, weights = naive_attention(q, q, v, causal_mask(3, 3), scale=math.log(2))
    # scores of the last query: 1, 1, 2 → powers of two 2 : 2 : 4
    expected = torch.tensor([[1.0, 0, 0], [1 / 3, 2 / 3, 0], [0.25, 0.25, 0.5]])
    torch.testing.assert_close(weights[0], expected)
    torch.testing.assert_close(out[:, 0], expected @ v[:, 0])


def test_weights_are_fp32_for_bf16_inputs_and_scores_may_overflow_exp() -> None:
    q, k, v = random_qkv(40)
    out, weights = naive_attention(*(x.bfloat16() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16 and weights.dtype == torch.float32
    # a softmax in bf16 would leave the sums of 40 weights off by about 2 ** -8
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 40), atol=1e-6, rtol=0)
    assert all(x.isfinite().all() for x in naive_attention(1000 * q, k, v))


def test_masks_and_shapes_that_do_not_fit_are_refused() -> None:
    blind = causal_mask(4, 4)
    blind[2] = False
    for mask, named in (
        (blind, "query 2 may attend to no key"),
        (causal_mask(3, 4), r"mask must be \[4, 4\], got \[3, 4\]"),
    ):
        with pytest.raises(ValueError, match=named):
            naive_attention(*random_qkv(4), mask)
    for k, v in (((4, 2, 10), (4, 2, 8)), ((4, 4, 8), (4, 4, 8)), ((4, 2, 8), (5, 2, 8))):
        with pytest.raises(ValueError, match=r"shapes do not fit: q \[4, 6, 8\]"):
            naive_attention(torch.zeros(4, 6, 8), torch.zeros(k), torch.zeros(v))
    for sizes, named in (((5, 4, None), "the last of the keys"), ((2, 4, 0), "at least 1")):
        with pytest.raises(ValueError, match=named):
            causal_mask(*sizes)


# -- its twins ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 10**6))
def test_naive_equals_pytorchs_under_any_mask(q_len: int, cached: int, seed: int) -> None:
    q, k, v = random_qkv(q_len + cached, seed, q_len)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mask = causal_mask(q_len, q_len + cached)
    theirs = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    close(by_the_book(q, k, v), theirs[0].transpose(0, 1))


@pytest.mark.parametrize("block", [1, 3, 4, 64, None])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 7), (4, 4), (3, 8), (65, 130)])
def test_any_block_gives_what_the_textbook_gives(
    q_len: int, kv_len: int, heads: tuple[int, int], block: int | None
) -> None:
    qkv = random_qkv(kv_len, 1, q_len, heads, v_dim=11)
    want = by_the_book(*qkv)
    close(blocked_attention(*qkv, block), want)


# -- with a cache -------------------------------------------------------------------------------


class Remembers:
    """The least that a cache can be: per layer and sequence a list of what came."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.kv)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        news = zip(k.split(batch.query_lens), v.split(batch.query_lens), strict=True)
        for s, new in enumerate(news):
            old = self.kv.get((layer, s), (k[:0], v[:0]))
            self.kv[layer, s] = torch.cat((old[0], new[0])), torch.cat((old[1], new[1]))

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        return self.kv[layer, s]


@every_backend
@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5),
    v_dim=st.sampled_from([3, 8, 11]),
    seed=st.integers(0, 10**6),
)
def test_any_steps_give_each_sequence_what_the_textbook_gives_it_alone(
    backend: Backend, steps: list[tuple[int, int]], v_dim: int, seed: int
) -> None:
    lengths = [sum(own) for own in zip(*steps, strict=True)]
    layers = [random_qkv(sum(lengths), seed + layer, v_dim=v_dim) for layer in (0, 1)]
    wanted = []
    for qkv in layers:
        each = zip(*(x.split(lengths) for x in qkv), strict=True)
        wanted.append(torch.cat([by_the_book(*parts) for parts in each]))
    close(backend().attend(0, *layers[0], batch_of(lengths)), wanted[0])
    attention, at = backend(cache=Remembers()), (0, lengths[0])  # empty, but still a cache
    for new in steps:
        rows = [i for start, n in zip(at, new, strict=True) for i in range(start, start + n)]
        for layer, (q, k, v) in enumerate(layers):
            out = attention.attend(layer, q[rows], k[rows], v[rows], batch_of(new))
            close(out, wanted[layer][rows])
        at = (at[0] + new[0], at[1] + new[1])


# -- the batch ------------------------------------------------------------------------------------

SEQUENCES = st.lists(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=9), min_size=1, max_size=6
)


@given(SEQUENCES, st.data())
def test_sequences_come_back_and_positions_count_up_from_the_first(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    starts = st.lists(st.integers(0, 10**5), min_size=len(sequences), max_size=len(sequences))
    firsts = data.draw(st.none() | starts)
    batch = Batch.from_sequences(sequences, firsts)
    assert [ids.tolist() for ids in batch.input_ids.split(batch.query_lens)] == sequences
    assert batch.num_seqs == len(sequences)
    assert batch.num_tokens == sum(map(len, sequences)) == batch.input_ids.numel()
    assert [batch.input_ids[i] for i in batch.last_token_indices] == [s[-1] for s in sequences]
    positions = [p.tolist() for p in batch.positions.split(batch.query_lens)]
    wanted = zip(firsts or [0] * len(sequences), sequences, strict=True)
    assert positions == [list(range(first, first + len(s))) for first, s in wanted]


def test_what_is_no_batch_is_refused() -> None:
    wrong: list[tuple[Any, Any]] = [
        ([], None),
        ([[1], []], None),
        ([[1, -2]], None),
        ([[1, 2.5]], None),
        ([["a"]], None),
        ([[1], [2]], [0, -3]),
        ([[1], [2]], [0]),
    ]
    for sequences, firsts in wrong:
        with pytest.raises(ValueError):
            Batch.from_sequences(sequences, firsts)
    with pytest.raises(ValueError, match=r"2 tokens .* got 1 slots"):
        Batch.from_allocations([[1, 2]], [Allocation(0, [0], slice(0, 1))], ["a"])
