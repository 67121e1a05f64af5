"""Every exercise: right answers pass, however they are written, and each mistake is named.

The slips are those of the checks themselves; beside them stand wrong answers that no slip is.
"""

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import QWEN3_06B
from learners import (
    always_none,
    forgotten,
    free_by_emptying,
    take_by_popping,
    untouched,
    with_a_gap,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.functional import silu

from tutorial_engine import learn
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.lab.shift import context_shift
from tutorial_engine.learn import checks_01 as c1
from tutorial_engine.learn import checks_02 as c2
from tutorial_engine.learn import checks_03 as c3
from tutorial_engine.learn import checks_04 as c4
from tutorial_engine.learn.block_attention_check import BLOCK_SLIPS
from tutorial_engine.learn.block_checks import FREE_SLIPS, TAKE_SLIPS
from tutorial_engine.learn.cache_test_check import check_cache_test
from tutorial_engine.learn.checks_a1 import RANK_SLIPS, _part, check_rank_mlp
from tutorial_engine.learn.checks_a2 import (
    END_TO_END_SLIPS,
    SIZE_SLIPS,
    STEP_SLIPS,
    GpuMemory,
    check_end_to_end,
    check_size,
    check_step,
    right_end_to_end,
)
from tutorial_engine.learn.checks_a3 import (
    FREE_ORDER_SLIPS,
    HITS_SLIPS,
    LOG_SLIPS,
    check_free_order,
    check_hits,
    check_log,
    right_hits,
)
from tutorial_engine.learn.find_check import FIND_SLIPS
from tutorial_engine.learn.give_way_check import GIVE_WAY_SLIPS, check_slots_for
from tutorial_engine.learn.judge import CODE, rewritten, slips_of, wrong_answers
from tutorial_engine.learn.own import PARTS, LayerWeights, rms_norm
from tutorial_engine.learn.own_cache import MyCache, MyStaticCache, transplant
from tutorial_engine.learn.own_memory import PARTS_04, PARTS_05
from tutorial_engine.learn.own_scheduler import PARTS_03, ShortestFirst, waiting_first
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model import load_model
from tutorial_engine.model.attention import causal_mask, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig

INF = math.inf
Function = Callable[..., Any]
RIGHT: dict[str, Function] = {**PARTS, **PARTS_03, **PARTS_04, **PARTS_05}


class Exercise(NamedTuple):
    """Its check, answers that are right, the catalogue, and other wrong answers with the words."""

    check: Callable[[Any], Verdict]
    right: Sequence[Any]
    slips: Mapping[str, Function] = {}
    wrong: Sequence[tuple[Any, str]] = ()


def but(name: str, change: Function) -> Function:
    """The right answer, changed."""
    return lambda *args: change(RIGHT[name](*args))


# -- notebook 01 ---------------------------------------------------------------------------------


def attention_by_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = []
    for query, allowed in zip(q, mask, strict=True):
        shares = [math.exp(float(query @ key) / math.sqrt(len(key))) for key in k]
        shares = [s if bool(ok) else 0.0 for s, ok in zip(shares, allowed, strict=True)]
        rows.append(sum(s / sum(shares) * value for s, value in zip(shares, v, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def attention_by_exp(q, k, v, mask):
    e = (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~mask, -INF).exp()
    return e / e.sum(-1, keepdim=True) @ v


def attention_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q /= math.sqrt(k.shape[1])
    scores = q @ k.T
    scores[~mask] = -1e9
    scores -= scores.max(dim=1, keepdim=True).values
    scores.exp_()
    scores /= scores.sum(dim=1, keepdim=True)
    return torch.mm(scores, v)


def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shares = (q @ k.T / k.shape[-1] ** 0.5).softmax(-1).masked_fill(~mask, -INF)
    return (shares / shares.sum(-1, keepdim=True)) @ v


def inverted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.T / k.shape[-1] ** 0.5).masked_fill(mask, -1e9).softmax(-1) @ v


def nanogpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    own = torch.ones(len(q), len(k)).bool().tril(len(k) - len(q))
    return (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~own, -INF).softmax(-1) @ v


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q[None], k[None], v[None], is_causal=True)[0]


def window(q_len: int, kv_len: int, size: int, late: int = 0) -> Tensor:
    """The first query stands `late` positions after its own."""
    first = kv_len - q_len + late
    return torch.tensor([[0 <= first + q - k < size for k in range(kv_len)] for q in range(q_len)])


def window_by_triangles(q_len: int, kv_len: int, size: int) -> Tensor:
    ones, first = torch.ones(q_len, kv_len, dtype=torch.bool), kv_len - q_len
    return ones.tril(first) & ones.triu(first - size + 1)


def joined_by_and(q_len: int, kv_len: int, size: int) -> Tensor:
    back = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    return back >= 0 and back < size  # type: ignore[return-value]


def window_by_slices(q_len: int, kv_len: int, size: int) -> Tensor:
    mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for query, position in enumerate(range(kv_len - q_len, kv_len)):
        mask[query, position - size + 1 : position + 1] = True
    return mask


def window_moved(q_len: int, kv_len: int, size: int) -> Tensor:
    right = window(q_len, kv_len, size)
    return right if q_len == kv_len else right.roll(-1, dims=-1)


def rope_by_loop(x: Tensor, angles: Tensor) -> Tensor:
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b, turn = float(x[t, h, i]), float(x[t, h, i + half]), float(angles[t, i])
                out[t, h, i] = a * math.cos(turn) - b * math.sin(turn)
                out[t, h, i + half] = b * math.cos(turn) + a * math.sin(turn)
    return out


def rope_complex(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    twice = torch.cat((angles, angles), -1)[:, None]
    a, b = x.chunk(2, -1)
    return x * twice.cos() + torch.cat((-b, a), -1) * twice.sin()


def rope_in_place(x: Tensor, angles: Tensor) -> Tensor:
    a, b = (half.clone() for half in x.chunk(2, -1))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x[..., : x.shape[-1] // 2] = a * cos - b * sin
    x[..., x.shape[-1] // 2 :] = b * cos + a * sin
    return x


def cut_in_twos(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.split(2, dim=-1)
    return torch.cat((a, b), dim=-1)


def own_positions(x: Tensor) -> Tensor:
    """The angles are made up, not taken."""
    size = x.shape[-1]
    omega = 10000.0 ** (-2 * torch.arange(size // 2) / size)
    return rope_complex(x, torch.arange(len(x))[:, None] * omega)


def a_overwritten(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # views: writing to x changes them
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x[..., : x.shape[-1] // 2] = a * cos - b * sin
    x[..., x.shape[-1] // 2 :] = b * cos + a * sin
    return x


def head_by_head(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, size: int) -> tuple[Tensor, ...]:
    def heads(w: Tensor) -> Tensor:
        return torch.stack([x @ rows.T for rows in w.split(size)], dim=1)

    return heads(w_q), heads(w_k), heads(w_v)


def layer_in_double(x: Tensor, w: LayerWeights, angles: Tensor, attend: Function) -> Tensor:
    w = LayerWeights(*(one.double() for one in w))
    h = rms_norm(x.double(), w.input_norm)
    q, k, v = head_by_head(h, w.q, w.k, w.v, len(w.q_norm))
    q, k = (rope_by_loop(one, angles) for one in (rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)))
    out = torch.cat(list(attend(q, k, v).double().transpose(0, 1)), dim=-1)
    x = x + out @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (torch.nn.functional.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


def whole_layer(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """All heads at once; a group is an axis of its own, and nothing is repeated."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qghd,kgd->ghqk", q, k) / q.shape[-1] ** 0.5
        scores += torch.full_like(scores, -INF).triu(1)
        return torch.einsum("ghqk,kgd->qghd", scores.softmax(-1), v).flatten(1, 2)

    return RIGHT["layer"](x, w, angles, mixed)


def whole_layer_by_sdpa(x: Tensor, w: LayerWeights, angles: Tensor, size: int = 0) -> Tensor:
    q, k, v = RIGHT["project"](rms_norm(x, w.input_norm), w.q, w.k, w.v, size or len(w.q_norm))
    q, k = (RIGHT["rope"](rms_norm(*one), angles) for one in ((q, w.q_norm), (k, w.k_norm)))
    heads_first = [one.transpose(0, 1) for one in (q, k, v)]
    out = sdpa(*heads_first, is_causal=True, enable_gqa=True).transpose(0, 1)
    x = x + out.flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (torch.nn.functional.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


def by_package(x: Tensor, w: LayerWeights, angles: Tensor, out: Function | None = None) -> Tensor:
    """The package's attention is called; `out` takes the result out of what it gives."""

    def heads(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (out or (lambda pair: pair.out))(
            naive_attention(q, k, v, causal_mask(*[len(q)] * 2))
        )

    return RIGHT["layer"](x, w, angles, heads)


def by_heads(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """Right, with a loop over the heads."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, mask = q.shape[1] // k.shape[1], causal_mask(len(q), len(q))
        one = RIGHT["attention"]
        each = [one(q[:, h], k[:, h // group], v[:, h // group], mask) for h in range(q.shape[1])]
        return torch.stack(each, dim=1)

    return RIGHT["layer"](x, w, angles, mixed)


def by_places(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """Right, with a loop over the places in a group."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, mask = q.shape[1] // k.shape[1], causal_mask(len(q), len(q))
        each = [naive_attention(q[:, i::group], k, v, mask).out for i in range(group)]
        return torch.stack(each, dim=2).flatten(1, 2)

    return RIGHT["layer"](x, w, angles, mixed)


def two_kv_heads(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """The size of a group is right for 2 K/V heads only."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (one.repeat_interleave(q.shape[1] // 2, 1) for one in (k, v))
        return naive_attention(q, k, v, causal_mask(len(q), len(q))).out

    return RIGHT["layer"](x, w, angles, mixed)


def queries_before_heads(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """The scores are qhk, and meet a mask [T, T]."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        return scores.masked_fill(~causal_mask(len(q), len(q)), -INF)

    return RIGHT["layer"](x, w, angles, mixed)


def by_size(size: Callable[[LayerWeights, Tensor], int]) -> Function:
    """A layer that takes the head dimension from somewhere."""
    return lambda x, w, angles, attend: layer_of(head_dim=size(w, angles))(x, w, angles, attend)


LAYER = """
def layer(x, w, angles, attend):
    q, k, v = project(rms_norm(x, w.input_norm, eps), w.q, w.k, w.v, head_dim or len(w.q_norm))
    q = rope(rms_norm(q, w.q_norm, eps), angles)
    k = rope(rms_norm(k, w.k_norm, eps), angles)
    x = x + attend(q, k, v).reshape(len(x), joined or -1) @ w.o.T
    h = rms_norm(x, w.mlp_norm, eps)
    return x + (silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T
"""


def layer_of(**names: Any) -> Function:
    """A layer as a notebook has it: what it reads are names of its cells."""
    scope = {"rms_norm": rms_norm, "silu": torch.nn.functional.silu, "head_dim": 0, "joined": 0}
    scope |= {"eps": 1e-6, "project": RIGHT["project"], "rope": RIGHT["rope"], **names}
    exec(LAYER, scope)
    return scope["layer"]


def score(shares: Tensor, period: int) -> Tensor:
    return shares.diagonal(offset=1 - period)[1:].mean()


def score_by_loop(shares: Tensor, period: int) -> float:
    return sum(float(shares[i, i - period + 1]) for i in range(period, 2 * period)) / period


SIX_TWO = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)


def kv_bytes(c: ModelConfig, size: int) -> int:
    return sum(2 * c.num_key_value_heads * c.head_dim * size for _ in range(c.num_hidden_layers))


def bytes_exercise(config: ModelConfig) -> Exercise:
    def typed(name: str) -> Function:
        return lambda c, size: kv_bytes(replace(c, **{name: getattr(config, name)}), size)

    return Exercise(
        lambda answer: c1.check_kv_bytes(answer, config),
        [
            kv_bytes,
            lambda *case: torch.tensor(kv_bytes(*case)),
            lambda *case: np.int64(kv_bytes(*case)),
            lambda *case: float(kv_bytes(*case)),
        ],
        c1.BYTES_SLIPS,
        [
            (lambda c, size: kv_bytes(c, 4), "use the argument"),
            (lambda c, size: 17 * size, "34; count K and V, layers, K/V heads"),
            (
                lambda c, size: kv_bytes(QWEN3_06B, size) // 7,
                "it reads QWEN3_06B, use",
            ),
            (lambda c, size: [17], "got [17]; return one number"),
            (lambda c, size: c["head_dim"], "are its attributes: write config.head_dim"),
            (lambda c, size: c.num_layers, "Its numbers are num_hidden_layers, num_key_value_he"),
            *(
                (typed(name), f"is its number typed in?{CODE}config.{name}")
                for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
            ),
        ],
    )


ATTENTION_SLIPS = slips_of(  # what is found in the shares of an answer
    c1._attention,
    """
    ~mask → mask
        the mask is inverted; True means that a query MAY attend to the key
    ~mask → ~causal_mask(len(q), len(k))
        your mask is your own, the causal one; use the argument `mask`
    ~mask → ~(mask & causal_mask(len(q), len(k)))
        a causal mask is applied besides `mask`; use the argument alone
    ~mask → ~torch.ones(len(q), len(k)).bool().tril()
        your mask is your own (a triangle at the upper left, as `is_causal=True` has it); use the
    .masked_fill(~mask, -INF) →
        the mask has no effect; queries see the future
    -INF → 0.0
        a forbidden key gets the share 0.18, because only exp(−∞) is 0; make forbidden scores −∞
    -INF → -1.0
        −∞ before the softmax (in Python it is float("-inf"))
    -INF → -15.0
        with the scores −2000 (allowed) and 0 (forbidden) the forbidden key gets the share 1,
    -INF → -1000.0
        the forbidden key gets the share 1, because only exp(−∞) is 0; make forbidden scores −∞
    scores.masked_fill(~mask, -INF) → (scores - 100.0 * ~mask)
        (forbidden) the forbidden key gets the share 1, because only exp(−∞) is 0
    .softmax(dim=-1) → .exp()
        instead of 1; divide each exp(score) by the sum over the keys of its query: softmax
    dim=-1 → dim=0
        the softmax runs over the queries; take the last axis
    / k.shape[-1] ** 0.5 →
        divided by 1, and √D is 2.83 here; D is the size of the last axis ▸ k.shape[-1] ** 0.5
    ** 0.5 →
        divided by 8, and √D is 2.83 here
    T / k → T * k
        divided by 0.354, and √D is 2.83 here
    k.shape[-1] → len(k)
        divided by 2.24, and √D is 2.83 here
    k.shape[-1] → len(q)
        divided by 1.73, and √D is 2.83 here
    k.shape[-1] → 8
        divided by 2.83, and √D is 2 here
    k.shape[-1] → 32
        divided by 5.66, and √D is 2.83 here
    """,
)

EXERCISES: dict[str, Exercise] = {
    "attention": Exercise(
        c1.check_attention,
        [
            RIGHT["attention"],
            attention_by_loop,
            attention_in_place,
            attention_by_exp,
            lambda q, k, v, m: RIGHT["attention"](q.double(), k.double(), v.double(), m),
            lambda q, k, v, m: sdpa(q[None], k[None], v[None], attn_mask=m[None])[0],
        ],
        {**c1.ATTENTION_SLIPS, **ATTENTION_SLIPS},
        [
            (inverted, "the mask is inverted"),
            (masked_after, "−inf BEFORE the softmax"),
            (lambda q, k, v, m: q @ k.T / head_dim**0.5 @ v, "D is the size of the last axis"),  # type: ignore[name-defined]  # noqa: F821
            (lambda q, k, v, m: (q @ k.T + ~m * -INF).softmax(-1) @ v, "0 times −inf is NaN"),
            (lambda q, k, v, m: attention_by_loop(0.9 * q, k, v, m), "are divided by 3.14"),
            (lambda q, k, v, m: q, "other numbers, and no mix of the values"),
            (lambda q, k, v, m: q.masked_fill(not m, 0), "~mask turns each True into False"),
            (lambda q, k, v, m: (q @ k.T).masked_fill(~m, "-inf"), 'a number: float("-inf")'),
            (
                lambda q, k, v, m: (q @ k.T).masked_fill(~m, -inf),  # type: ignore[name-defined]  # noqa: F821
                'not defined. In Python −∞ is float("-inf")',
            ),
            (
                lambda q, k, v, m: (q @ k.T).masked_fill(~m, -moth.inf),  # type: ignore[name-defined]  # noqa: F821
                'not defined. In Python −∞ is float("-inf")',
            ),
            (lambda q, k, v, m: v @ (q @ k.T), "The shares stand to the left of the values"),
            (lambda q, k, v, m: (q @ k.T) / (q @ k.T).sum(-1), "keepdim=True keeps the axis"),
            (nanogpt, "your mask is your own, the causal one; use the argument `mask`"),
            (sdpa_causal, "a triangle at the upper left, as `is_causal=True` has it"),
            (but("attention", lambda out: (out, 0)), "got tuple; return only the output"),
            (but("attention", lambda out: out.bfloat16()), "right, but in torch.bfloat16, which"),
            (
                but("attention", lambda out: out.half()),
                "right, but in torch.float16, which keeps 4",
            ),
            (
                lambda q, k, v, m: naive_attention(q[:, None], k[:, None], v[:, None], m),
                "got AttentionResult; the model goes on with tensors, and its .out is one",
            ),
            (but("attention", lambda out: out.numpy()), "got ndarray; the model goes on with tens"),
            (but("attention", lambda out: out.tolist()), "tensors, and torch.tensor makes one"),
            (lambda q, k, v, m: [*q[:, :2]], "tensors, and torch.stack makes one"),
            (lambda q, k, v, m: (q @ k.T) * v, f"of its shares times the values{CODE}shares @ v"),
            (lambda q, k, v, m: (q @ k.T) @ v.T, f"shares times the values{CODE}shares @ v"),
            (lambda q, k, v, m: q @ k.T / torch.sqrt(q.shape[1]), f"no tensor{CODE}D ** 0.5"),
            (lambda q, k, v, m: q @ k, f"a column for each key{CODE}q @ k.T"),
        ],
    ),
    "window_mask": Exercise(
        c1.check_window_mask,
        [RIGHT["window_mask"], window, window_by_triangles],
        c1.MASK_SLIPS,
        [
            (
                lambda q, k, w: torch.ones(q, k, dtype=torch.bool),
                "query 0 is at position 0, and it sees key 1",
            ),
            (lambda q, k, w: window(q, k, w, late=w), "position 2, as its keys show; it must"),
            (lambda q, k, w: window(q, k, w, late=1), "position 1, as its keys show; it must"),
            (lambda q, k, w: window(q, k, w, late=-1), "position -1, as its keys show; it must"),
            (lambda q, k, w: window(q, k, k), "sees up to 4 keys; 2 expected"),
            (window_moved, "does not see itself"),
            (
                window_by_slices,
                "query 0, at position 0, sees no key, not itself (a negative start of a slice",
            ),
            (
                lambda q, k, w: window(q, k, w) & ~window(q, k, 1),  # (back > 0) & (back < w)
                "window=2; a query does not see itself; key_pos <= query_pos",
            ),
            (lambda q, k, w: torch.zeros(q, k).bool(), "at position 0, sees no key, not itself"),
            (
                lambda q, k, w: window(q, k, w) & (torch.arange(q) > q - 2)[:, None],
                "query 0, at position 0, sees no key",
            ),
            (
                lambda q, k, w: window(q, k, w) & (torch.arange(k) != k - 2),
                "a query does not see itself",
            ),
            (lambda q, k, w: window(q, k, w + 1), "sees up to 3 keys; 2 expected, itself included"),
            (lambda q, k, w: window(q, k, 8), "sees up to 4 keys; 2 expected"),
            (
                lambda q, k, w: window(q, k, w).int(),
                "it must be bool, True = may attend; got torch",
            ),
            (lambda q, k, w: window(q, k, w).tolist(), "tensors, and torch.tensor makes one"),
            (lambda q, k, w: window(q, k, w).numpy(), "tensors, and torch.from_numpy makes one"),
            (
                lambda q, k, w: (~window(q, k, w)).float() * -1e9,
                "it must be bool, True = may attend",
            ),
            (joined_by_and, "Join two conditions with &, each in its own brackets"),
            (lambda q, k, w: torch.ones(q) + torch.ones(k + 1), "of queries and a row of keys"),
        ],
    ),
    "kv_head": Exercise(
        c1.check_kv_head,
        [
            RIGHT["kv_head"],
            lambda h, heads, kv: [at for at in range(kv) for _ in range(heads // kv)][h],
            lambda h, heads, kv: torch.tensor(h) * kv // heads,
            lambda h, heads, kv: np.repeat(np.arange(kv), heads // kv)[h],
            lambda h, heads, kv: int(h / (heads / kv)),
        ],
        c1.HEAD_SLIPS,
        [
            (lambda h, heads, kv_heads: h / (heads // kv_heads), "divide with //"),
            (lambda h, heads, kv_heads: 0, "expected [0, 0, 0, 1, 1, 1]"),
            (lambda h, heads, kv_heads: heads // h, "h begins at 0, and there are fewer K/V heads"),
            (lambda h, heads, kv_heads: h // (kv_heads // heads), "what divides what?"),
            (
                lambda h, heads, kv_heads: h // (heads / kv_heads),
                f"is the size of a group a float?{CODE}num_heads // num_kv_heads",
            ),
        ],
    ),
    "rope": Exercise(
        c1.check_rope,
        [RIGHT["rope"], rope_by_loop, rope_complex, rotate_half, rope_in_place],
        c1.ROPE_SLIPS,
        [
            (a_overwritten, "a was overwritten"),
            (lambda x, angles: rope_by_loop(x, 2 * angles), "position 0 is right, others not"),
            (lambda x, a: x[..., :4] * a.cos(), f"no axis for the heads{CODE}angles[:, None, :]"),
            (lambda x, angles: x * angles.cos()[:, None], "in two halves"),
            (lambda x, angles: math.cos(angles), f"a tensor has its own{CODE}angles.cos()"),
            (
                lambda x, angles: cos(angles),  # type: ignore[name-defined]  # noqa: F821
                "not defined. A tensor has .cos() and .sin()",
            ),
            (lambda x, angles: x + 1, "position 0 changed; all its angles are 0, so cos is 1"),
            (cut_in_twos, f"a piece, chunk their number{CODE}x.chunk(2, dim=-1)"),
            (lambda x, angles: own_positions(x), "wrong for one token at position 7"),
            (but("rope", lambda x: x.bfloat16()), "right, but in torch.bfloat16"),
            (but("rope", lambda x: x.numpy()), "tensors, and torch.from_numpy makes one"),
        ],
    ),
    "project": Exercise(
        c1.check_project,
        [
            *(RIGHT["project"], head_by_head),
            but("project", lambda qkv: [one.double() for one in qkv]),
            but("project", lambda qkv: (one for one in qkv)),
            lambda x, *w: [(x @ one.T).view(len(x), -1, w[3]) for one in w[:3]],
            lambda x, *w: [
                torch.einsum("ti,ndi->tnd", x, m.unflatten(0, (-1, w[3]))) for m in w[:3]
            ],
        ],
        {
            f"{name} {words}": but(
                "project",
                lambda qkv, at=at, slip=slip: [
                    slip(one, qkv[0]) if i == at else one for i, one in enumerate(qkv)
                ],
            )
            for words, slip in c1.PROJECT_SLIPS.items()
            for at, name in enumerate("qkv")
            if at or "repeated" not in words
        },
        [
            (but("project", lambda qkv: (qkv[0], qkv[2], qkv[1])), "k and v are swapped"),
            (but("project", lambda qkv: (qkv[1], qkv[0], qkv[2])), "q and k are swapped"),
            (but("project", torch.stack), f"so the three stay apart{CODE}return q, k, v"),
            (but("project", torch.cat), f"so the three stay apart{CODE}return q, k, v"),
            (
                but("project", lambda qkv: [one.chunk(2, dim=1) for one in qkv]),
                f"q is cut into 2 tensors; cut the last axis, and it stays one tensor{CODE}"
                ".unflatten(-1, (-1, head_dim))",
            ),
            (but("project", lambda qkv: torch.cat(qkv, 1)), "got one tensor [5, 8, 8]"),
            (but("project", lambda qkv: (*qkv[:2], qkv[1])), "v was made with w_k"),
            (lambda x, w_q, *_: x @ w_q, "[out, in]: multiply by w_q.T"),
            (lambda x, w_q, *_: w_q @ x, "left of the @, and w_q.T to the right"),
            (
                lambda x, *w: [(one @ x.T).unflatten(-1, (-1, w[3])) for one in w[:3]],
                "left of the @, and a matrix such as w_q.T to the right",
            ),
            (
                lambda x, q, k, v, d: (x @ q.T).view(5, 6, 32),
                f"Take the number of heads from the matrix, and head_dim from the argument{CODE}"
                "len(w_q) // head_dim",
            ),
            (lambda *case: RIGHT["project"](*case[:4], 32), "and head_dim from the argument"),
            (
                but("project", lambda qkv: [one.bfloat16() for one in qkv]),
                "right, but in torch.bfl",
            ),
            (
                but("project", lambda qkv: [one.numpy() for one in qkv]),
                "torch.from_numpy makes one",
            ),
            (
                but("project", lambda qkv: dict(zip("qkv", qkv, strict=True))),
                "tensors (q, k, v), got a dict",
            ),
        ],
    ),
    "layer": Exercise(
        c1.check_layer,
        [RIGHT["layer"], layer_in_double, layer_of()],
        c1.LAYER_SLIPS,
        [
            (lambda x, w, angles, attend: 2 * x, "layer 0; other numbers; compare with steps"),
            (
                layer_of(head_dim=32),
                f"K/V heads of 18 numbers, hidden size 40); is a size typed in?{CODE}"
                "The head dimension is len(w.q_norm); .flatten(1) joins any number of heads",
            ),
            (layer_of(joined=192), "hidden size 40); is a size typed in?"),
            (layer_of(eps=0.3), "q, k and v are wrong when attend is called: look at steps 1"),
            (lambda *given: 2 * RIGHT["layer"](*given), "q, k and v are right when attend is"),
            (
                layer_of(rope=lambda x, angles: RIGHT["rope"](x, -angles)),
                "it calls your rope, which is not ✔ yet (rope: turned the wrong way round",
            ),
            (
                layer_of(rope=lambda x, angles: x @ x),
                "it calls your rope, which is not ✔ yet (rope raised RuntimeError",
            ),
            (
                layer_of(project=lambda x, q, k, v, d: (x @ q.T, x @ k.T, x @ v.T)),
                "it calls your project, which is not ✔ yet (project: 4 and 2 heads of 8; q is not "
                "split into heads",
            ),
            (lambda x, w, angles, attend: x @ w.gate, "multiply by w.gate.T or w.up.T"),
            (lambda x, w, *_: w.up @ x, "left of the @, and w.gate.T or w.up.T to the right"),
            (lambda x, w, *_: w.down @ (x @ w.up.T), "left of the @, and w.down.T to the right"),
            (
                lambda x, w, *_: w.up @ x.T @ w.down.T,
                "left of the @, and a matrix such as w.gate.T to the right",
            ),
            (
                lambda x, w, *_: x + w.down @ (w.up @ x.T),
                "left of the @, and a matrix such as w.gate.T to the right",
            ),
            (
                lambda x, w, a, attend: RIGHT["layer"](
                    *(x, w, a, lambda *qkv: w.o @ attend(*qkv).flatten(1))
                ),
                "left of the @, and w.q.T or w.o.T to the right",
            ),
            *(
                (
                    by_size(size),
                    "The head dimension is len(w.q_norm)",
                )
                for size in (lambda w, angles: angles.shape[-1], lambda w, angles: len(w.k))
            ),
            (by_size(lambda w, angles: len(w.k) // 2), "layer of other sizes (8 query and 4 K/V"),
            (
                lambda x, w, angles, attend: x + x.unflatten(1, (-1, 32)),
                f"Join the heads before you multiply by w.o{CODE}.flatten(1)",
            ),
            (lambda x, w, *_: rms_norm(x, w.q_norm), "norm each head by itself"),
            (
                lambda x, w, *_: rms_norm(x.unflatten(1, (-1, 32)), w.input_norm),
                "which have a weight for each of D",
            ),
            (lambda x, w, *_: x @ w.gate.T * x @ w.up.T, "brackets around each product with @"),
            (
                lambda x, w, *_: RIGHT["project"](x, w.q, w.k, w.v, len(w.q)),
                "is the number of weights in w.q_norm",
            ),
            (lambda x, w, angles, attend: attend(x, x, x, None), "without a mask"),
            (
                layer_of(project=lambda *case: [RIGHT["project"](*case)[i] for i in (1, 0, 2)]),
                "it calls your project, which is not ✔ yet (project: 4 and 2 heads of 8; q and",
            ),
            (
                lambda x, w, a, attend: RIGHT["layer"](x, w, a, lambda q, k, v: attend(k, q, v)),
                "attend got q with 2 heads, k with 6: are they swapped?",
            ),
        ],
    ),
    "whole_layer": Exercise(
        c1.check_whole_layer,
        [whole_layer, whole_layer_by_sdpa, by_package],
        c1.WHOLE_SLIPS,
        [
            (lambda *case: by_package(*case, out=lambda pair: pair), ".out is the result"),
            (lambda *case: by_package(*case, out=lambda pair: pair.out.double()), "are float64"),
            (
                lambda *case: by_package(*case, out=lambda pair: pair.out.transpose(0, 1)),
                f"must stay the first axis when the heads are joined{CODE}.flatten(1)",
            ),
            (
                lambda x, w, a: RIGHT["layer"](
                    *(x, w, a, lambda q, k, v: torch.einsum("qhd,khd->qhk", q, k))
                ),
                "fewer K/V heads than query heads",
            ),
            (lambda x, w, angles: whole_layer_by_sdpa(x, w, angles, 32), "size typed in?"),
            (two_kv_heads, "wrong for a layer of other sizes (8 query and 4 K/V heads"),
            (lambda x, w, angles: x @ w.k, "multiply by w.k.T or w.v.T"),
            (by_heads, "right, but with a loop over heads"),
            (by_places, "a loop over heads, here or in what it calls"),
            (queries_before_heads, "a mask [T, T] have the heads first: hqk"),
            (lambda x, w, angles: x, "layer 0; other numbers"),
        ],
    ),
    "induction_score": Exercise(
        c1.check_induction_score,
        [
            *(score, score_by_loop),
            lambda shares, p: shares[p:, 1 : p + 1].diagonal().mean(),
            lambda shares, p: np.mean([shares[i, i - p + 1] for i in range(p, 2 * p)]),
        ],
        c1.SCORE_SLIPS,
        [
            (lambda shares, p: shares[p:, 1 : p + 1].diagonal(), "one number, got shape [5]"),
            (
                lambda shares, p: score(shares, p) + 1,
                "only the queries of the second round count, each with one right place: the token "
                f"after the earlier one of its kind{CODE}that is period − 1 places before the "
                "query",
            ),
            (lambda shares, p: shares[p:, 1 : p + 1].diagonal().tolist(), "one number, got ["),
            (
                lambda shares, p: shares[range(16, 32), range(1, 17)].mean(),
                "period is 5 here, so the positions are 0 to 9",
            ),
        ],
    ),
    "kv_bytes, 6/2 heads": bytes_exercise(SIX_TWO),
    "kv_bytes, Qwen3-0.6B": bytes_exercise(QWEN3_06B),
}

# -- notebook 02 ---------------------------------------------------------------------------------


TRANSPLANT_SLIPS = slips_of(  # told by what of the memory is the donor's
    transplant,
    """
    k, v = memory → v, k = memory
    donor_k, donor_v = → donor_v, donor_k =
        asked: K of slot 4 in layer 2; copied: V of slot 4 in layer 2
    if "K" in which → if True
    if "V" in which → if True
        copied: K of slot 4 in layer 2 and V of slot 4 in layer 2
    if "V" → elif "V"
        asked: K of slots 0 and 3 in layer 4 and V of slots 0 and 3 in layer 4; copied: K of slots
    "K" in which → which == "K"
    "V" in which → which == "V"
        copied: nothing; of "KV" each letter counts
    k[slots] = donor_k[slots] → k[:] = donor_k
    v[slots] = donor_v[slots] → v[:] = donor_v
        copied: K of slots 0 to 5 in layer 2
    k[slots] = donor_k[slots] → k[slots[0]] = donor_k[slots[0]]
    v[slots] = donor_v[slots] → v[slots[0]] = donor_v[slots[0]]
        asked: V of slots 2 and 5 in layer 0; copied: V of slot 5 in layer 0
    k[slots] = donor_k[slots] → k[1] = donor_k[1]
    v[slots] = donor_v[slots] → v[1] = donor_v[1]
        copied: K of slot 1 in layer 2
    memory[layer] → memory[3]
    donor[layer] → donor[3]
        copied: K of slot 4 in layer 3
    """,
)
FLOOR_SLIPS = slips_of(  # told by an amount that is counted alone
    c2.least_seconds,
    """
    2 * num → 4 * num
        it counts 28,000,000,000 FLOPs in place of 14,000,000,000; two for each weight and token
    2 * num → num
        it counts 7,000,000,000 FLOPs in place of 14,000,000,000
    * num_tokens →
        it counts 2,000,000,000 FLOPs in place of 14,000,000,000
    max(2 * num_weights * num_tokens / peak, ( → ((
        it counts 0 FLOPs in place of 14,000,000,000
    4 * num_weights + kv_bytes) / bandwidth) → 0))
        of 1,000,000,000 weights and 7 tokens it counts 0 bytes in place of 4,000,000,000
    4 * num → 2 * num
        it counts 2,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes
    4 * num → num
        it counts 1,000,000,000 bytes in place of 4,000,000,000
    (4 * num_weights + kv_bytes) → ((4 * num_weights + kv_bytes) * num_tokens)
        it counts 28,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes, and
    + kv_bytes → + 2 * kv_bytes
        of 100,000,000 kv_bytes it counts 200,000,000 bytes in place of 100,000,000
    + kv_bytes → + 4 * kv_bytes
        it counts 400,000,000 bytes in place of 100,000,000
    + kv_bytes → + kv_bytes * num_tokens
        it counts 700,000,000 bytes in place of 100,000,000
    + kv_bytes →
        of 100,000,000 kv_bytes it counts 0 bytes
    """,
)


class WritesInPlace:
    """A right cache by other means: one tensor of room, and a tuple of lists."""

    def __init__(self) -> None:
        self.room: dict[int, Tensor] = {}
        self.used: dict[int, int] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        room = self.room.setdefault(layer, torch.zeros(2, 16, *k.shape[1:]))
        start = self.used.get(layer, 0)
        end = self.used[layer] = start + len(k)
        room[0, start:end], room[1, start:end] = k, v
        k.zero_()  # it is a copy
        return ([room[0, :end], room[1, :end]],)


def cache_with(*changes: tuple[str, str]) -> Any:
    return rewritten(MyCache, *changes)


def static_with(written: str) -> Any:
    """A static cache in which this stands where k and v are written."""
    right = "self.k[layer, start:end], self.v[layer, start:end] = k, v"
    return rewritten(MyStaticCache, (right, written))


class IntoACopy(static_with("self.k[layer][batch.positions].copy_(k)")):  # type: ignore[misc]
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = torch.empty_like(self.k), torch.empty(self.v.shape)


class Shared(MyCache):
    kv: dict[int, tuple[Tensor, Tensor]] = {}  # noqa: RUF012  the mistake

    def __init__(self) -> None:
        type(self).kv = {} if len(Shared.kv.get(0, [[]])[0]) != 8 else Shared.kv


class Other(MyCache):
    """The right cache, and another answer."""

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> Any:
        return self.answer(super().update(layer, k, v, batch))

    def answer(self, pairs: Any) -> Any:
        return pairs


class HeadsFirstView(MyStaticCache):
    """Right: its memory has the heads before the tokens, and update gives a turned view."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        sizes = (config.num_key_value_heads, max_len, config.head_dim)
        self.kv = [torch.full((2, *sizes), torch.nan) for _ in range(config.num_hidden_layers)]

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        for i, position in enumerate(batch.positions.tolist()):
            self.kv[layer][:, :, position] = torch.stack((k[i], v[i]))
        both = self.kv[layer][:, :, : position + 1].transpose(1, 2)
        return ((both[0], both[1]),)


class Grows(MyCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()


class FourLayers(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        self.k = torch.zeros(4, max_len, config.num_key_value_heads, config.head_dim)
        self.v = torch.zeros_like(self.k)


class ManyLayers(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        self.k = torch.zeros(28, max_len, config.num_key_value_heads, config.head_dim)
        self.v = torch.zeros_like(self.k)


class AnyLength(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, 4096)


class InBf16(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = self.k.bfloat16(), self.v.bfloat16()


class InFloat64(MyStaticCache):
    """Right: in more bits, nothing is lost."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = self.k.double(), self.v.double()


class PutsInFloat64(InFloat64):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> Any:
        self.k[layer, batch.positions] = k


class CopiesInPlace(MyStaticCache):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> Any:
        start, end = int(batch.positions[0]), int(batch.positions[-1]) + 1
        for room, new in ((self.k[layer], k), (self.v[layer], v)):
            room[:end] = torch.cat((room[:start], new))
        return [(self.k[layer, :end], self.v[layer, :end])]


class InNumpy(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = (torch.from_numpy(x.numpy().copy()) for x in (self.k, self.v))


class NoMemory(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None: ...


class QueryHeads(MyStaticCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        layers = config.num_hidden_layers
        self.k = torch.zeros(layers, max_len, config.num_attention_heads, config.head_dim)
        self.v = torch.zeros_like(self.k)


def transplant_by_numpy(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    for letter, mine, theirs in zip("KV", memory[layer], donor[layer], strict=True):
        if letter in which:
            mine.numpy()[slots] = theirs.numpy()[slots]
    return memory


def transplant_into_a_pair(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    memory[layer][0] = donor[layer][0]
    return memory


def transplant_anew(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    """Right: a new dict of lists, in float64, slot by slot; the memory stays as it was."""
    new = {one: [x.double() for x in pair] for one, pair in memory.items()}
    for i, slot in ((i, slot) for i in range(2) if "KV"[i] in which for slot in slots):
        new[layer][i][slot] = donor[layer][i][slot]
    return new


def transplant_by_torch(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    at = torch.zeros(len(memory[layer][0]), 1, 1, dtype=torch.bool)
    at[slots] = True
    pairs = zip("KV", memory[layer], donor[layer], strict=True)
    memory[layer] = tuple(torch.where(at & (x in which), b, a) for x, a, b in pairs)
    return memory


def token_by_token(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    for i in range(num_computed, len(token_ids)):
        hidden = model(Batch.from_sequences([[token_ids[i]]], [i]), attention)
    return model.compute_logits(hidden).squeeze(0)


def slots_in_rows(cached: list[int], new: list[int], m: int) -> list[list[int]]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [[r * m + old + i for i in range(n)] for r, (old, n) in pairs]


def slots_to_write(*case: Any) -> list[int]:
    return [slot for row in slots_in_rows(*case) for slot in row]


def nucleus_by_loop(probs: Tensor, p: float) -> Tensor:
    kept, mass = [False] * len(probs), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i].item()):
        if mass < p - 1e-9:
            kept[i] = True
        mass += probs[i].item()
    probs.zero_()  # it is a copy
    return torch.tensor(kept)


def why_numpy(new_ids: list[int], text: str, eos: Any, stop: Any, limit: int) -> Any:
    while (new_ids and new_ids[-1] in eos) or any(map(text.__contains__, stop)):
        return np.str_("stop")
    return None if np.int64(len(new_ids)) < limit else np.str_("length")


WHY_SLIPS = slips_of(  # each hint of an ending, and a function that it helps
    RIGHT["why_finished"],
    """
    >= max_tokens → > max_tokens
        the last one counts
    >= max_tokens → >= max_tokens - 1
        one token is still allowed
    new_ids[-1] in eos_ids → any(i in eos_ids for i in new_ids[:-1])
        it alone ends the request
    new_ids[-1] in eos_ids → new_ids[-1] == eos_ids[0]
        eos_ids may hold several
    new_ids[-1] in eos_ids → any(i in eos_ids for i in new_ids)
        look at new_ids[-1] alone
    any(one in text for one in stop) → text.endswith(tuple(stop))
        search the whole text
    one in text for → text.find(one) > 0 for
        text.find gives 0 there
    any(one in text for one in stop) → __import__("re").search("|".join(stop) or "^$", text)
        a dot stands for itself
    any(one in text for one in stop) → stop in text
        stop is a tuple of strings
    any(one in text for one in stop) → stop and stop[0] in text
        look for each of them
    any(one in text for one in stop) → False
        look for it in text
    new_ids[-1] in eos_ids → new_ids[-1] <= max(eos_ids)
        only the ids in eos_ids end the text
    new_ids[-1] in eos_ids → new_ids[-1] in (0, 3)
        3 ends no text of this model; are ids typed in?
    new_ids[-1] in eos_ids → new_ids[-1] in {*eos_ids} & {0, 3}
        6 ends a text of this model; are ids typed in?
    one in text for → one.lower() in text.lower() for
        large and small letters differ
    if new_ids → if len(new_ids) < max_tokens and new_ids
        stop wins over length
    else None → else "length"
        it goes on: return None
    """,
)

EXERCISES |= {
    "MyCache": Exercise(
        c2.check_cache,
        [MyCache, WritesInPlace],
        c2.CACHE_SLIPS,
        [
            (type("NoList", (Other,), {"answer": lambda _, pairs: pairs[0]}), "without the list"),
            (type("Two", (Other,), {"answer": lambda _, pairs: [*pairs[0]]}), "without the list"),
            (type("Cat", (Other,), {"answer": lambda _, pairs: torch.cat(*pairs[0])}), "one tuple"),
            (Shared, "make the dict in __init__"),
            (cache_with(("torch.cat(pair)", "pair[0] + pair[1]")), "`+` adds numbers"),
            (cache_with(("torch.cat(pair)", "torch.cat((pair, pair))")), "join k to its first"),
            (cache_with(("(k, v), strict", "(k, k), strict")), "v gets the new k; it must get"),
            (cache_with(("(k, v), strict", "(v, v), strict")), "k gets the new v; it must get"),
            (
                cache_with(("(k, v), strict", "(k, torch.cat((k, v))), strict")),
                "layer 0: v has k in it; only v belongs there",
            ),
            (
                cache_with(("if layer in", "if len(k) < 3 and (layer := 0) in")),
                "layer 1: k has 6 tokens, expected 5; does each layer keep its own?",
            ),
            (
                cache_with(("(torch.cat(pair) for", "(torch.cat(pair).flip(0) for")),
                "layer 0: k is mixed up; first the old, then the new",
            ),
            (
                cache_with(("(k, v), strict", "self.kv[layer], strict")),
                "layer 0: k has 8 tokens, expected 5",
            ),
        ],
    ),
    "transplant": Exercise(
        c2.check_transplant,
        [transplant, transplant_by_numpy, transplant_anew, transplant_by_torch],
        {**c2.TRANSPLANT_SLIPS, **TRANSPLANT_SLIPS},
        [
            (lambda memory, donor, layer, *_: memory[layer], "return the whole memory"),
            (lambda memory, donor, layer, *_: {layer: memory[layer]}, "a dict with layers [2]"),
            (lambda memory, donor, layer, *_: {**memory, layer: donor[layer][0]}, "no pair"),
            (
                lambda memory, donor, layer, slots, _: memory[layer][0].__setitem__(
                    slots, donor[layer][0]
                ),
                "take the same slots of both",
            ),
            (
                lambda memory, *_: {i: (k + 1, v) for i, (k, v) in memory.items()},
                "asked: K of slot 4 in layer 2; copied: nothing",
            ),
            (transplant_into_a_pair, "memory[layer] is a pair (k, v): write into its tensors"),
            (lambda memory, donor, layer, slots, _: memory[layer][slots], "is a pair (k, v)"),
        ],
    ),
    "MyStaticCache": Exercise(
        c2.check_static_cache,
        [MyStaticCache, HeadsFirstView, InFloat64],
        c2.STATIC_SLIPS,
        [
            (Grows, "the right k, but in new memory"),
            (FourLayers, "config has the number of layers"),
            (ManyLayers, "is a size typed in?"),
            (AnyLength, "is a size typed in?"),
            (InBf16, "in torch.bfloat16, and rounds it"),
            (PutsInFloat64, "Keep the dtype of k and v"),
            (CopiesInPlace, "it writes old k and v again"),
            (InNumpy, "make it with torch.zeros"),
            (static_with("pass"), "layer 0: the new k is not written into the memory"),
            (static_with("self.k[layer, start:end] = k"), "the new v is not written into the"),
            (IntoACopy, "layer 0: the new k is not written into the memory"),
            (
                static_with("self.k[layer, start:end] = self.v[layer, start:end] = k"),
                "layer 0: v gets the new k; it must get the new v",
            ),
            (
                static_with("self.k[layer, end - 1], self.v[layer, end - 1] = k[-1], v[-1]"),
                "layer 0: k of tokens 0 to 2 is wrong",
            ),
            (
                static_with("p = batch.positions; self.k[layer, p] += k; self.v[layer, p] += v"),
                "write with `=`, and not with `+=`",
            ),
            (static_with("self.k[layer, batch.position] = k"), "Did you mean 'positions'?"),
            (
                static_with("return self.k[layer, : batch.positions]"),
                "where the text ends",
            ),
            (NoMemory, "has no attribute 'k'. Make the memory in __init__"),
            (QueryHeads, "A buffer of a layer is [max_len, K/V heads, head_dim]"),
        ],
    ),
    "run_new": Exercise(
        c2.check_run_new,
        [RIGHT["run_new"], token_by_token],
        c2.RUN_SLIPS,
        [
            (lambda m, a, ids, n: RIGHT["run_new"](m, a, ids, max(0, n - 1)), "runs 2 tokens"),
            (lambda m, a, ids, n: m(Batch.from_sequences(ids[n:], [n]), a), "a list of sequences"),
            *[
                (lambda m, a, ids, n, f=f: m(Batch.from_sequences([ids[n:]], [f(n, 9)]), a), said)
                for f in (range, lambda *ends: [*range(*ends)])
                for said in ("wants one position for each sequence, that of its first token",)
            ],
            *[
                (lambda m, a, ids, n, f=f: m(Batch.from_sequences(f(ids[n:]), [n]), a), said)
                for f in (lambda ids: torch.tensor([ids]), lambda ids: [torch.tensor(ids)])
                for said in ("wants lists of ids",)
            ],
            (lambda m, a, ids, n: m(ids[n:], a), "The model takes a Batch"),
            (lambda m, a, ids, n: m(Batch([ids[n:]], [n]), a), "Batch.from_sequences makes one"),
            (but("run_new", lambda logits: logits + 1), "other logits"),
            (
                lambda m, a, ids, n: (RIGHT["run_new"](m, a, ids, n), ids.append(1))[0],
                "the caller's",
            ),
        ],
    ),
    "cache_test": Exercise(
        check_cache_test,
        [
            lambda run: run([9, 8, 7, 6], [], chunk_size=2),
            lambda run: run(range(3, 15), [5, 6], 4)[-1],
            lambda run: torch.cat((run([9, 8, 7], [5]), run(range(40), (), 8))),
        ],
        wrong=[
            (lambda run: run(range(3, 15), [5, 6]), "3 of 4 bugs are caught. Not caught: a chunk"),
            (lambda run: run([9, 8, 7, 6, 5], [4, 3], 4), "3 of 4"),  # the last chunk: one token
            (lambda run: run([9, 8, 7, 6], [5, 6], 1), "3 of 4"),
            (lambda run: run([9, 8, 7, 6], []), "0 of 4"),
            (lambda run: run([65] * 4, [], 2), "2 of 4 bugs are caught. Not caught: decode starts"),
            (lambda run: run([7] * 5, [7], 2), "All its tokens are alike"),
            (lambda run: run([9, 8, 7, 6], [], 2) * 0, "0 of 4"),
            (lambda run: run([9, 8, 7, 6], [], 2).argmax(-1), "the logits, and not tokens"),
            (lambda run: run([9], []) + torch.rand(1), "without a bug give different"),
            (lambda run: run([9, 8, 7, 6], [], 2).tolist(), "a tensor; got list"),
            (lambda run: run([9] * 300, []), "at most 256 tokens"),
            (lambda run: run([], [9]), "at least one token of a prompt"),
        ],
    ),
    "slots_to_write": Exercise(
        c2.check_slots_to_write,
        [
            slots_to_write,
            lambda *case: torch.tensor(slots_to_write(*case)),
            lambda *case: tuple(np.float64(slot) for slot in slots_to_write(*case)),
        ],
        c2.SLOT_SLIPS,
        [
            (slots_in_rows, "no list for each row"),
            (
                lambda c, new, m: [r * m + c[r] + i for r in c for i in range(new[r])],
                "Count the rows: `for r in cached` gives numbers of tokens",
            ),
            (
                lambda c, new, m: [
                    i for r in range(len(c)) for i in range(r * m + c[r], c[r] + new[r])
                ],
                "or does a range end too early?",
            ),
            (lambda c, new, m: [7] * sum(new), "got [7, 7, 7, 7]; expected [0, 1, 2, 3]"),
        ],
    ),
    "keep_top_p": Exercise(
        c2.check_top_p,
        [
            *(RIGHT["keep_top_p"], nucleus_by_loop),
        ],
        c2.TOP_P_SLIPS,
        [
            (lambda probs, p: probs >= max(p, 0.4), "expected 2; the token that crosses p stays"),
            (but("keep_top_p", lambda keep: keep.int()), "True = kept; got torch.int32"),
            (lambda probs, p: probs.index_put_((probs > 0,), probs > 1), "a tensor of bools"),
            (lambda probs, p: probs.sort(descending=True).cumsum(-1) < p, "sort gives two things"),
        ],
    ),
    "why_finished": Exercise(
        c2.check_why_finished,
        [RIGHT["why_finished"], why_numpy],
        {**c2.REASON_SLIPS, **WHY_SLIPS},
        [
            (lambda *case: "stop" if case[0][-1] == case[2] else None, "it returns None, always"),
            (lambda ids, text, eos, stop, limit: stop[0] in text, "stop may be empty"),
        ],
    ),
    "least_seconds": Exercise(
        c2.check_floor,
        [
            c2.least_seconds,
            lambda *case: torch.tensor(c2.least_seconds(*case)),
            lambda *case: np.float32(c2.least_seconds(*case)),
        ],
        {**c2.FLOOR_SLIPS, **FLOOR_SLIPS},
        [
            (lambda *case: (c2.least_seconds(*case), "memory"), "return one number"),
            (lambda *case: c2.least_seconds(*case) + 1, ": here the memory decides"),
        ],
    ),
}

# -- notebook 03 ---------------------------------------------------------------------------------

Work = list[tuple[str, int]]


def plan(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    return RIGHT["plan_step"](running, waiting, budget, most)


def plan_by_index(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    work = [*running, *(waiting[i] for i in range(most - len(running)))]
    return plan([], work, budget, most)


def plan_of_running(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    return plan([running[0]], waiting, budget, most)


def overdraws(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    shares = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if budget:
            shares[name] = min(left, budget)
            budget -= left
    return shares


def slots_by_recursion(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    if (slots := allocate(request)) is not None:
        return slots
    victim = running[-1]
    preempt(victim)
    if victim == request:
        return None
    return slots_by_recursion(request, running, allocate, preempt)


def slots_by_keywords(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    """With the names that the text gives."""
    return RIGHT["slots_for"](
        *(request, running),
        lambda asking: allocate(request=asking),
        lambda last: preempt(victim=last),
    )


def goes_on(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    while (slots := allocate(request)) is None:
        preempt(running[-1])
    return slots


def preempts_nobody(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    while (slots := allocate(request)) is None:
        pass
    return slots


def asks_twice(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    slots = RIGHT["slots_for"](request, running, allocate, preempt)
    return slots and allocate(request)


def takes_the_victim(request: Any, running: Any, allocate: Function, preempt: Function) -> Any:
    while (slots := allocate(request)) is None:
        preempt(running.pop())
    return slots


def policy(next_waiting: Function) -> Any:
    return type("Yours", (Scheduler,), {"next_waiting": next_waiting, "patience": 0.1})


def by_prompt(request: Request) -> int:
    return request.num_prompt_tokens


def late(self: Any) -> list[Request]:
    return [one for one in self.waiting if self.now() - one.arrival >= self.patience]


def measured_gap(budget: int) -> float:
    """As the engine's floats have it: 26 ms and a little more with a budget of 16, 30.0 with 20."""
    return 10.0 + 2e-14 * 1000 * (budget == 16) + min(budget, 107)


def budget_by_measuring(most: float) -> int:
    return max(budget for budget in range(1, 100) if measured_gap(budget) <= most)


def by_loop(self: Any) -> Request:
    best = self.waiting[0]
    for request in self.waiting:
        if request.num_prompt_tokens < best.num_prompt_tokens:
            best = request
    return best


def first_that_is_late(self: Any) -> Request:
    """The queue is in the order of arrival: the first of it that is late is the oldest."""
    for one in self.waiting:
        if one.arrival + self.patience <= self.now():
            return one
    return by_loop(self)


def takes_it_out(self: Any) -> Request:
    chosen = by_loop(self)
    self.waiting.remove(chosen)
    return chosen


def leaves_a_list(self: Any) -> Request:
    self.waiting = sorted(self.waiting, key=by_prompt)
    return self.waiting[0]


def sorts_the_queue(self: Any) -> Request:
    self.waiting.sort(key=by_prompt)
    return self.waiting[0]


def by_one_key(self: Any) -> Request:
    """Of two that came at once the shorter is first."""

    def key(one: Request) -> tuple[float, int]:
        is_late = self.now() - one.arrival >= self.patience
        return one.arrival if is_late else INF, one.num_prompt_tokens

    return min(self.waiting, key=key)


def late_by_arrival_and_prompt(self: Any) -> Request:
    waited = late(self)
    return min(waited, key=lambda one: (one.arrival, by_prompt(one))) if waited else by_loop(self)


def typed_patience(self: Any) -> Request:
    same = object.__new__(type(self))
    same.__dict__ |= self.__dict__ | {"patience": 0.15}
    return first_that_is_late(same)


class Sluggish(ShortestFirst):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(super().num_tokens_to_run(request, plan), 4)


def metrics(change: Function) -> Function:
    return but("ttft_and_tpot", change)


tiny = cache(load_model)
EXERCISES |= {
    "num_tokens_to_run": Exercise(
        c3.check_num_tokens,
        [
            RIGHT["num_tokens_to_run"],
            but("num_tokens_to_run", torch.tensor),
            but("num_tokens_to_run", float),
            lambda known, computed, budget: sorted((known - computed, budget))[0],
        ],
        c3.SHARE_SLIPS,
        [
            (lambda known, computed, budget: 1, "expected 10"),
        ],
    ),
    "plan_step": Exercise(
        c3.check_plan,
        [
            *(plan, but("plan_step", Counter)),
            but("plan_step", lambda shares: {name: np.int64(n) for name, n in shares.items()}),
        ],
        c3.PLAN_SLIPS,
        [
            (lambda r, w, budget, most: plan(r, w, 99, most), "over the budget of 8"),
            (lambda r, w, budget, most: plan(r, w, budget, 9), "more would run than may"),
            (lambda *case: {"Z": 8}, "no request 'Z'"),
            (lambda *case: {"C": 8}, "C has only 3 tokens"),
            (lambda *case: {"A": 1.5}, "a whole number"),
            (overdraws, "take from the budget what the request runs, not what it has left"),
            (plan_by_index, "at most 4: raised IndexError: list index out of range; there may be"),
            (plan_of_running, "at most 4: raised IndexError"),
            (waiting_first, "those who run already come first"),
            (lambda r, w, budget, most: plan([], [*w, *r], budget, most), "keep their places"),
        ],
    ),
    "slots_for": Exercise(
        check_slots_for,
        [RIGHT["slots_for"], slots_by_recursion, slots_by_keywords],
        GIVE_WAY_SLIPS,
        [
            (goes_on, "goes on after C itself gave way"),
            (preempts_nobody, "nobody gives way"),
            (takes_the_victim, "preempt takes it out"),
            (asks_twice, "keep what allocate gave"),
            (
                lambda request, *case: (
                    None if isinstance(request, Request) else RIGHT["slots_for"](request, *case)
                ),
                "in the engine your slots_for gave None for request A, and did not ask",
            ),
        ],
    ),
    "ttft_and_tpot": Exercise(
        c3.check_metrics,
        [
            *(RIGHT["ttft_and_tpot"], metrics(list), metrics(torch.tensor)),
            metrics(lambda pair: tuple(torch.tensor(x) for x in pair)),
            lambda arrival, times: (np.array(times)[0] - arrival, np.diff(times).mean()),
        ],
        c3.METRIC_SLIPS,
        [
            (lambda arrival, times: (times[-1] - arrival, 1.0), "first token: 0.262 s"),
            (metrics(lambda pair: (pair[0], 1.0)), "next: 0.0640 s"),
            (lambda arrival, times: (times[0] - arrival, times[20]), "0 to n − 1, and n − 1 gaps"),
        ],
    ),
    "largest_budget": Exercise(  # a long prompt beside somebody who decodes, on a step's price
        lambda answer: c3.check_budget(answer, measured_gap),
        [
            *(lambda gap: int(gap - 10), lambda gap: (gap - 10) // 1),
            *(lambda gap: np.int64(gap - 10), budget_by_measuring),
        ],
        {},
        [
            (lambda gap: int(gap), "with it the longest gap is 36 ms"),
            (lambda gap: math.ceil(gap) - 11, "with 20 the longest gap is 30 ms: that is short"),
            (lambda gap: int(gap - 12), "with 15 the longest gap is 25 ms: that is short enough"),
            (lambda gap: gap - 10, "for 60.7 ms got 50.7; a budget is a whole number of tokens"),
            (lambda gap: int(gap - 26), "at least 1"),
        ],
    ),
    "ShortestFirst": Exercise(
        c3.check_shortest,
        [
            *(ShortestFirst, policy(by_loop)),
            policy(lambda self: sorted(self.waiting, key=lambda one: len(one.token_ids))[0]),
        ],
        c3.SHORTEST_SLIPS,
        [
            (policy(lambda self: self.waiting[-1]), "num_prompt_tokens says"),
            (policy(takes_it_out), "takes the request out of self.waiting"),
            (policy(leaves_a_list), "self.waiting is a list now"),
            (policy(sorts_the_queue), "finds the smallest without sorting"),
            (policy(lambda self: min(self.waiting)), "min needs a key"),
            (policy(lambda self: min(self.waiting, key=len)), "num_prompt_tokens is the length"),
            (policy(lambda self: sorted(self.waiting, key=id)), "a Request; got a list"),
            (Sluggish, "unlike ours"),
            (ShortestFirst.next_waiting, "hand over the class"),
        ],
    ),
    "Fair": Exercise(
        c3.check_fair,
        [
            *(RIGHT["Fair"], policy(first_that_is_late)),
            *(policy(by_one_key), policy(late_by_arrival_and_prompt)),
        ],
        c3.FAIR_SLIPS,
        [
            (policy(typed_patience), "instead of self.patience?"),
            (policy(lambda self: late(self)[0]), "IndexError"),
            (policy(lambda self: min(late(self), key=lambda one: one.arrival)), "list is empty"),
            (policy(lambda self: (late(self) or [by_loop(self)])[-1]), "not the last one"),
            (policy(lambda self: self.now > 0.1), "self.now() is the time"),
            (policy(eval("lambda self: self.now() > patience")), "in a method it is self.patience"),
        ],
    ),
}

# -- notebooks 04, 05 and appendix A1 -------------------------------------------------------------

Refs, Cached = dict[int, int], dict[Any, int]


def blocks_of_the_package(*case: int) -> int:
    budget, layers, heads, dim, itemsize, size = case
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim, dtype=dtype
    )
    return num_blocks_in(budget, spec, size)


def slots_as_tensor(table: list[int], size: int, num_tokens: int) -> Tensor:
    p, blocks = torch.arange(num_tokens), torch.tensor(table)
    return blocks[p // size] * size + p % size


def free_in_a_new_list(
    table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> list[int]:
    for block in table:
        ref_cnt[block] -= 1
    free_queue = free_queue + table[::-1]
    return free_queue


def free_one_to_the_front(table: list[int], *rest: Any) -> None:
    RIGHT["free"](table, *rest)
    if len(table) == 1:
        rest[1].sort()


def free_what_others_hold(
    table: list[int], ref_cnt: dict[int, int], free_queue: list[int], hashes: dict[int, Any]
) -> None:
    for block in reversed(table):
        ref_cnt[block] -= 1
        free_queue.insert(0 if hashes[block] is None else len(free_queue), block)


def free_and_lose(table: list[int], ref_cnt: dict[int, int], queue: list[int], *_: Any) -> None:
    for block in table:
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            del ref_cnt[block]
            queue.insert(0, block)


def free_and_forget(table: list[int], *rest: Any) -> None:
    RIGHT["free"](table, *rest)
    rest[-1].update(dict.fromkeys(rest[-1]))


def free_in_new_lists(
    table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> None:
    for block in reversed(table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0 and hashes[block] is None:
            free_queue = [block] + free_queue  # noqa: RUF005
        elif ref_cnt[block] == 0:
            free_queue.append(block)


def free_asked_before(
    table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> None:
    gone = [block for block in reversed(table) if ref_cnt[block] == 0]
    for block in table:
        ref_cnt[block] -= 1
    free_queue[:] = free_queue + gone


def free_one_group(
    has_hash: bool, table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> None:
    """The other group is forgotten."""
    for block in reversed(table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0 and (hashes[block] is not None) == has_hash:
            free_queue.append(block)


def free_up_to_a_shared_block(
    table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> None:
    for block in reversed(table):
        if ref_cnt[block] > 1:
            break
        RIGHT["free"]([block], ref_cnt, free_queue, hashes)


def free_what_it_holds_alone(
    table: list[int], ref_cnt: Refs, free_queue: list[int], hashes: dict[int, Any]
) -> None:
    for block in reversed(table):
        if ref_cnt[block] == 1:
            RIGHT["free"]([block], ref_cnt, free_queue, hashes)


def take_without_hash_first(free_queue: list[int], hashes: dict[int, Any], cached: Cached) -> int:
    block = free_queue.pop(0)
    if hashes[block] is not None:
        hashes[block] = None
        del cached[hashes[block]]
    return block


def take_by_block(free_queue: list[int], hashes: dict[int, Any], cached: Cached) -> int:
    block = free_queue.pop(0)
    del cached[block]
    return block


def take_and_keep_hashes_of_many(
    free_queue: list[int], hashes: dict[int, Any], cached: Cached
) -> int:
    return free_queue.pop(0) if len(free_queue) > 5 else RIGHT["take"](free_queue, hashes, cached)


def take_cached_only(free_queue: list[int], hashes: dict[int, Any], cached: Cached) -> int:
    block = free_queue.pop(0)
    del cached[hashes[block]]
    hashes[block] = None
    return block


def find_all_hashes_first(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> Any:
    """Open blocks have hashes here as well, which nobody has; and the answer is a tensor."""
    keys: list[Any] = []
    for start in range(0, len(tokens), size):
        parent = keys[-1] if keys else None
        keys.append(hash_of(parent, torch.tensor(tokens[start : start + size])))
    count = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
    return torch.tensor([cached[key] for key in keys[: min(count, (len(tokens) - 1) // size)]])


def find_recursively(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    def after(name: Any, rest: list[int]) -> list[int]:
        if len(rest) <= size or (own := hash_of(name, iter(rest[:size]))) not in cached:
            return []
        return [cached[own], *after(own, rest[size:])]

    return after(None, tokens)


def find_by_keywords(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    """With the names that the text gives."""
    return RIGHT["find"](tokens, size, lambda h, own: hash_of(parent=h, tokens=own), cached)


def find_token_by_token(
    tokens: list[int], size: int, hash_of: Function, cached: Cached
) -> list[int]:
    found, last = [], None
    for token in tokens:
        last = hash_of(last, [token])
        if last not in cached:
            break
        found.append(cached[last])
    return found


def find_with_hashes(change: Function) -> Function:
    """`find` by other hashes: `change` has hash_of, the parent's hash, all tokens so far."""

    def changed(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
        seen: list[int] = []

        def ask(parent: Any, own: list[int]) -> Any:
            seen.extend(own)
            return change(hash_of, parent, seen)

        return RIGHT["find"](tokens, size, ask, cached)

    return changed


def find_by_begins(
    to_the_end: bool, tokens: list[int], size: int, hash_of: Function, cached: Cached
) -> list[int]:
    """A loop over where blocks begin; one that ends too late, or not at all."""
    found, last, begin = [], None, 0
    while begin < len(tokens) - 1:
        last = hash_of(last if to_the_end else None, tokens[begin : begin + size])
        if last not in cached:
            break
        found.append(cached[last])
        begin += size if to_the_end else 0
    return found


def find_then_pop(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    """Right for every prompt that has a token."""
    found = RIGHT["find"]([*tokens, 0], size, hash_of, cached)
    if len(found) * size == len(tokens):
        found.pop()
    return found  # type: ignore[no-any-return]


def find_in_one_turn(
    tokens: list[int], size: int, hash_of: Function, cached: Cached
) -> list[int] | None:
    for end in range(size, len(tokens), size):
        if (first := hash_of(None, tokens[end - size : end])) not in cached:
            break
        return [cached[first]]
    return None


def find_with_a_gap(tokens: list[int], size: int, *_: object) -> list[int]:
    for _ in range(size, len(tokens), size):
        ...
    return []


def find_without_hash_of(tokens: list[int], size: int, _: Function, cached: Cached) -> list[int]:
    return [cached[hash(tuple(tokens[:end]))] for end in range(size, len(tokens), size)]  # type: ignore[index]


def find_by_number(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    first = cached[hash_of(None, tokens[:size])]
    return [cached[hash_of(first, tokens[size : 2 * size])]]


def find_or(at_a_miss: Any, tokens: list[int], size: int, hash_of: Function, cached: Cached) -> Any:
    found, last = [], None
    for end in range(size, len(tokens), size):
        last = hash_of(last, tokens[end - size : end])
        if last not in cached:
            return at_a_miss
        found.append(cached[last])
    return found


def find_and_remove(*case: Any) -> list[int]:
    found = RIGHT["find"](*case)
    case[3].clear()
    return found


def visible_and_clear(cells: Any, seq_id: int, pos: int) -> tuple[int, ...]:
    found = {p: i for i, (p, own) in enumerate(cells) if seq_id in own}
    cells.clear()  # it is a copy
    return tuple(found[p] for p in range(pos + 1) if p in found)


def shift_token_by_token(cells: Any, seq_id: Any, keep: int, discard: int) -> None:
    for _ in range(discard):
        cells.seq_rm(seq_id, keep, keep + 1)
        cells.seq_add(seq_id, keep, -1, -1)


def drops_one_too_late(cells: Any, seq_id: Any, keep: int, discard: int) -> None:
    cells.seq_rm(seq_id, keep + 1, keep + discard + 1)
    cells.seq_add(seq_id, keep + discard + 1, -1, -discard)


def shifts_and_applies(cache: Any, seq_id: Any, keep: int, discard: int) -> None:
    """The keys are turned at once, and not when they are read next."""
    context_shift(cache, seq_id, keep, discard)
    cache.apply_shifts()


Table = list[int]


def attention_with_a_gap(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Any:
    """It raises, because of what is still open."""
    total, out = 0, 0
    for _ in table:
        ...
    return out / total


def with_a_gap_in_a_line(q: Tensor, *_: Any) -> Any:
    shares: Any = q
    shares = ...
    return shares / 2


def in_numpy(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """A running softmax, of which PyTorch sees nothing."""
    size, m, total, out = k.shape[1], -np.inf, 0.0, np.zeros(v.shape[-1], np.float32)
    for start, block in zip(range(0, n, size), table, strict=False):
        keys, values = (pool.numpy()[block, : n - start] for pool in (k, v))
        scores = keys @ q.numpy() / len(q) ** 0.5
        new = max(m, scores.max())
        p, factor = np.exp(scores - new), np.exp(m - new)
        m, total, out = new, total * factor + p.sum(), out * factor + p @ values
    return torch.from_numpy(out / total)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, table: Table, kv_len: int) -> Tensor:
    size, m = k.shape[1], torch.tensor(-math.inf)
    total, out = torch.zeros(()), torch.zeros(v.shape[-1])
    for p in range(kv_len):
        where = table[p // size], p % size
        scored = k[where].dot(q) / math.sqrt(len(q))
        new = torch.maximum(m, scored)
        total = total * torch.exp(m - new) + torch.exp(scored - new)
        out = out * torch.exp(m - new) + torch.exp(scored - new) * v[where]
        m = new
    return out / total


def allocate_in_a_loop(table: list[int], free: list[int], size: int, pos: int) -> int | None:
    while len(table) * size <= pos:
        if not free:
            return None
        table += [free[0]]
        del free[0]
    return table[pos // size] * size + pos % size


def allocate_in_new_lists(table: list[int], free: list[int], size: int, pos: int) -> int:
    if pos // size == len(table) and free:
        table, free = [*table, free[0]], free[1:]
    return table[pos // size] * size + pos % size


def allocate_one_early(table: list[int], free: list[int], size: int, pos: int) -> int | None:
    if pos + 1 >= len(table) * size:
        if not free:
            return None
        table.append(free.pop(0))
    return table[pos // size] * size + pos % size


def allocate_two(table: list[int], free: list[int], size: int, pos: int) -> int | None:
    slot = RIGHT["allocate"](table, free, size, pos)
    if pos == 5 and slot is not None:
        table.append(free.pop(0))
    return slot


def allocate_all(table: list[int], free: list[int], size: int, pos: int) -> int | None:
    if pos // size == len(table):
        table += free
        free.clear()
    return table[pos // size] * size + pos % size if pos < len(table) * size else None


def allocate_without_asking(table: list[int], free: list[int], size: int, pos: int) -> int:
    if pos // size == len(table):
        table.append(free.pop(0))
    return table[pos // size] * size + pos % size


def two_rounds(q: Tensor, k: Tensor, v: Tensor, table: Table, kv_len: int) -> Tensor:
    """The scores of all blocks first, then the values: no running softmax, and no gather."""
    q /= len(q) ** 0.5
    where = [(table[p // k.shape[1]], p % k.shape[1]) for p in range(kv_len)]
    weights = torch.stack([k[w] @ q for w in where]).softmax(0)
    out = torch.zeros(v.shape[-1])
    for weight, w in zip(weights, where, strict=True):
        out += weight * v[w]
    return out


def two_passes(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """The largest score first, then the sums: every key is read twice."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scale = math.sqrt(len(q))
    m = max(float((k[b, : min(size, n - at)] @ q).max()) for at, b in blocks) / scale
    total, out = 0.0, torch.zeros(v.shape[-1])
    for at, b in blocks:
        p = torch.exp(k[b, : min(size, n - at)] @ q / scale - m)
        total, out = total + float(p.sum()), out + p @ v[b, : len(p)]
    return out / total


def gathered(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int, cat: bool = False) -> Tensor:
    if cat:
        keys, values = (torch.cat([pool[b] for b in table])[:n] for pool in (k, v))
    else:
        keys, values = k[table].flatten(0, 1)[:n], v[table].flatten(0, 1)[:n]
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def masked_rest(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """Right numbers, but the rest of the last block is computed with: 0 · NaN = NaN."""
    size, m, total, out = k.shape[1], -math.inf, 0.0, torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        scores = k[block] @ q / math.sqrt(len(q))
        scores[max(n - start, 0) :] = -math.inf
        new = max(m, float(scores.max()))
        p, factor = torch.exp(scores - new), math.exp(m - new)
        m, total, out = new, total * factor + float(p.sum()), out * factor + p @ v[block]
    return out / total


def factor_upside_down(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """exp(new m − old m), which is infinite before the first block."""
    size, m, total, out = k.shape[1], torch.tensor(-math.inf), torch.zeros(()), torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        scores = k[block, : n - start] @ q / math.sqrt(len(q))
        new = torch.maximum(m, scores.max())
        p, factor = torch.exp(scores - new), torch.exp(new - m)
        m, total, out = new, total * factor + p.sum(), out * factor + p @ v[block, : n - start]
    return out / total


def list_of_scores(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """The scores of all blocks in a list first, then the sums: every key is read once."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scores = [k[b, : min(size, n - at)] @ q / math.sqrt(len(q)) for at, b in blocks]
    m = max(float(own.max()) for own in scores)
    p = [torch.exp(own - m) for own in scores]
    sums = [own @ v[b, : len(own)] for own, (_, b) in zip(p, blocks, strict=True)]
    return torch.stack(sums).sum(0) / sum(own.sum() for own in p)


def scores_of_whole_blocks(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """A running softmax in which the scores, not the keys, of the open block are cut."""
    size, m, total, out = k.shape[1], -math.inf, 0.0, torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        scores = (k[block] @ q)[: n - start] / math.sqrt(len(q))
        new = max(m, float(scores.max()))
        p, factor = torch.exp(scores - new), math.exp(m - new)
        m, total, out = new, total * factor + float(p.sum()), out * factor + p @ v[block, : len(p)]
    return out / total


def m_begins_at_0(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    size, m, total, out = k.shape[1], torch.zeros(()), torch.zeros(()), torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        scores = k[block, : n - start] @ q / math.sqrt(len(q))
        new = torch.maximum(m, scores.max())
        p, factor = torch.exp(scores - new), torch.exp(m - new)
        m, total, out = new, total * factor + p.sum(), out * factor + p @ v[block, : n - start]
    return out / total


def without_max(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    size, total, out = k.shape[1], torch.zeros(()), torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        p = torch.exp(k[block, : n - start] @ q / math.sqrt(len(q)))
        total, out = total + p.sum(), out + p @ v[block, : n - start]
    return out / total


def without_max_in_doubles(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    return without_max(q.double(), k.double(), v.double(), table, n).float()


def copied_blocks(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """A copy of each block in a list, then one softmax."""
    pairs = list(zip(range(0, n, k.shape[1]), table, strict=False))
    keys, values = ([x[block, : n - start].clone() for start, block in pairs] for x in (k, v))
    weights = torch.cat([key @ q for key in keys]).div(math.sqrt(len(q))).softmax(0)
    parts = weights.split([len(key) for key in keys])
    return sum((p @ value for p, value in zip(parts, values, strict=True)), torch.zeros(()))


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    k /= math.sqrt(len(q))
    return RIGHT["block_attention"](q * math.sqrt(len(q)), k, v, table, n)


def log_by_tokens(size: int, one: int, block: int, longest: int) -> tuple[int, float]:
    """As vLLM reckons it, with ceil of a float."""
    requests = (size // one // block) / math.ceil(longest / block)
    return int(longest * requests), requests


def log_in_fractions(size: int, one: int, block: int, longest: int) -> tuple[int, Fraction]:
    """Exact: a fraction is a number, too."""
    requests = Fraction(size // (one * block), -(-longest // block))
    return int(requests * longest), requests


def end_to_end_by_blocks(tables: list[list[int]], lens: list[int], size: int) -> Any:
    slots = [
        [block * size + offset for block in table for offset in range(size)][:n]
        for table, n in zip(tables, lens, strict=True)
    ]
    return torch.tensor([0, *lens]).cumsum(0), torch.tensor([one for own in slots for one in own])


def size_by_doubling(lens: list[int]) -> Any:
    rows, longest = 1, 64
    while rows < len(lens):
        rows *= 2
    while longest < max(lens):
        longest *= 2
    needed = sum(lens)
    lens.clear()  # it is a copy
    return [rows, longest, torch.tensor((rows * longest - needed) / (rows * longest))]


def step_that_keeps(gpu: GpuMemory) -> Any:
    tensors = gpu.tensor([1, 1]), gpu.tensor(range(8))
    replay = gpu.record(lambda lens, at: at < lens[:, None], *tensors)

    def step(lens: list[int]) -> Tensor:
        tensors[0].copy_(torch.tensor(lens))
        return replay()

    return step


def step_that_keeps_a_view(gpu: GpuMemory) -> Any:
    lens, positions = gpu.tensor([1, 1]), gpu.tensor(range(8))
    replay = gpu.record(lambda lens, at: at < lens[:, None], lens, positions)

    def step(new_lens: list[int]) -> Tensor:
        lens.copy_(torch.tensor(new_lens))
        return replay()

    step.keeps = positions[:]  # type: ignore[attr-defined]
    return step


def step_that_keeps_the_last(gpu: GpuMemory) -> Any:
    lens, positions = gpu.tensor([1, 1]), gpu.tensor(range(8))
    replay = gpu.record(lambda lens, at: at < lens[:, None], lens, positions)

    def step(new_lens: list[int]) -> Tensor:
        lens.copy_(torch.tensor(new_lens))
        return replay()

    step_that_keeps_the_last.positions = positions  # type: ignore[attr-defined]
    return step


def free_order_of_the_pool(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> list[int]:
    """As the package has it."""
    pool = BlockManager(1 + max([*queue, *(block for table in tables for block in table)]), 1)
    for number, block in enumerate(pool.blocks):
        block.hash = bytes([number]) if number in with_hash else None
    pool.free_queue = OrderedDict.fromkeys(queue)
    for block in chain(*tables):
        pool.blocks[block].ref_cnt += 1
    for table in tables:
        pool._give_back(table)
    return list(pool.free_queue)


def free_order_of_all_tables(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> list[int]:
    """Wrong: sorted by hash, and in the order in which they were given."""
    return sorted([*queue, *chain(*tables)], key=lambda block: block in with_hash)


def free_order_block_by_block(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> deque[int]:
    order, held = deque(queue), Counter(chain(*tables))
    for table in tables:
        held.subtract(table)
        gone = [block for block in table if not held[block]]
        for block in gone:
            if block not in with_hash:
                order.appendleft(block)
        order.extend(block for block in gone[::-1] if block in with_hash)
    return order


def hits_by_blocks(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Wrong: each block is looked up in one list for its place in the prompt."""
    known, found = set[tuple[int, ...]](), []
    for prompt in prompts:
        ends = range(block_size, len(prompt) + 1, block_size)
        blocks = [(end, *prompt[end - block_size : end]) for end in ends]
        many = next((i for i, b in enumerate(blocks) if b not in known), len(blocks))
        found.append(min(many, (len(prompt) - 1) // block_size))
        known |= {*blocks}
    return [number * block_size for number in found]


def step_that_warms_up(gpu: GpuMemory) -> Any:
    step = step_that_keeps(gpu)
    step([1, 1])
    return step


def step_that_keeps_another(keep: Callable[[GpuMemory, Tensor], object]) -> Any:
    """Wrong: what is kept is not the tensor that the recording reads."""

    def make_step(gpu: GpuMemory) -> Any:
        def recorded(lens: Tensor, positions: Tensor) -> Any:
            replay = gpu.record(lambda lens, at: at < lens[:, None], lens, positions)

            def step(new_lens: list[int]) -> Tensor:
                lens.copy_(torch.tensor(new_lens))
                return replay()

            return step, keep(gpu, positions) if keep is clone_of else None

        step, kept = recorded(gpu.tensor([1, 1]), gpu.tensor(range(8)))
        step.keeps = kept if keep is clone_of else keep(gpu, torch.empty(0))
        return step

    return make_step


def clone_of(gpu: GpuMemory, positions: Tensor) -> Tensor:
    return positions.clone()


def hits_by_names(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """As the package finds them: by the beginnings of earlier prompts, block by block."""
    known: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        ends = range(block_size, len(prompt), block_size)
        found.append(max((end for end in ends if tuple(prompt[:end]) in known), default=0))
        known |= {tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)}
    return found


def hits_of_the_first_prompt(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Wrong twice: looks only at the first prompt, and leaves no token to run."""
    found = []
    for number, prompt in enumerate(prompts):
        ends = range(block_size, len(prompt) + 1, block_size)
        same = (end for end in ends if number and prompt[:end] == prompts[0][:end])
        found.append(max(same, default=0))
    return found


def hits_of_what_is_left(prompts: list[list[int]], block_size: int) -> list[int]:
    """Empties what it was given: checks hand in copies."""
    found = []
    while prompts:
        found.insert(0, right_hits(prompts, block_size)[-1])
        prompts.pop().clear()
    return found


def rank_mlp_by_slices(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, n: int, *, act: Any = silu
) -> Tensor:
    """With a default that is given by name: it can be sent."""
    own = slice(len(gate) // n * rank, len(gate) // n * (rank + 1))
    return (act(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T


def ranks_with(old: str, new: str) -> Function:
    """The right part of the MLP with another text in its place."""
    return rewritten(_part, (old, new))


def rank_by_chunks(x: Tensor, *weights_and_rank: Any) -> Tensor:
    gate, up, down, rank, n = weights_and_rank
    g, u, d = gate.chunk(n)[rank], up.chunk(n)[rank], down.chunk(n, 1)[rank]
    return (torch.nn.functional.silu(x @ g.T).mul_(x @ u.T)) @ d.T


def attention_with(old: str, new: str) -> Function:
    """Attention in place with another text in its place."""
    return rewritten(RIGHT["block_attention"], (old, new))


RIGHT_ATTENTION = [
    *(RIGHT["block_attention"], one_by_one, two_rounds, two_passes),
    *(list_of_scores, scores_of_whole_blocks, in_numpy),
]
EXERCISES |= {
    "num_blocks": Exercise(
        c4.check_num_blocks,
        [RIGHT["num_blocks"], blocks_of_the_package, but("num_blocks", np.int64)],
        c4.BUDGET_SLIPS,
        [
            (lambda b, n, h, d, i, s: b // (2 * h * d * i * s), "320 GiB in a budget of 10 GiB"),
            (lambda b, n, h, d, i, s: b // (n * h * d * i * s), "2,560, that is 20 GiB"),
            (lambda *case: 1, "so 1,280 fit"),
            (lambda b, *m: b // (1.0 * math.prod(m) * 2), "use //, and only whole factors"),
            (lambda b, *m: math.ceil(b / (2 * math.prod(m[:4]))) // m[4], "no token: round down"),
            (lambda b, *m: round(b / (2 * math.prod(m[:4]))) // m[4], "no token: round down"),
            (lambda b, n, h, d, i, s: b // n * h * d * i * s, "from left to right"),
        ],
    ),
    "slots": Exercise(
        c4.check_slots,
        [
            *(RIGHT["slots"], slots_as_tensor, but("slots", partial(np.array, dtype=int))),
            lambda table, s, n: [b * s + i for b in table for i in range(s)][:n],
        ],
        c4.SLOTS_SLIPS,
        [
            (lambda t, s, n: RIGHT["slots"](t, s, n - 1), "9 slots for 10 tokens"),
            (lambda t, s, n: [t[p // s] for p in range(n)], "slot 12, not 3"),
            (lambda t, s, n: [t[p // s] * s + (p & s - 1) for p in range(n)], "slot 7, not 6"),
            (lambda t, s, n: [t[p / s] * s for p in range(n)], "its index is p // block_size"),
            (lambda t, s, n: [t[p % s] * s + p // s for p in range(n)], "index is p // block_size"),
            (lambda *case: iter(RIGHT["slots"](*case)), "put list(...) around it"),
            (lambda t, *sizes: (RIGHT["slots"](t, *sizes), t.append(0))[0], "only read the req"),
        ],
    ),
    "allocate": Exercise(
        c4.check_allocate,
        [
            RIGHT["allocate"],
            allocate_in_a_loop,
            but("allocate", lambda slot: slot and np.int64(slot)),
        ],
        c4.ALLOCATE_SLIPS,
        [
            (lambda t, free, s, p: t[p // s] * s + p % s, "is that one in the table?"),
            (allocate_in_new_lists, "change both lists in place"),
            (allocate_one_early, "position 3 is the last one in its block; the next"),
            (allocate_all, "the table got 3 blocks: take one"),
            (allocate_two, "position 5 is in a block of the table: then take no block"),
            (allocate_without_asking, "No block is free: return None"),
            (lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) or -1, "expected slot 0"),
            (lambda t, free, s, p: (RIGHT["allocate"](t, free, s, p), p)[1], "expected slot 12"),
        ],
    ),
    "free": Exercise(
        learn.check_free,
        [RIGHT["free"], free_by_emptying],
        FREE_SLIPS,
        [
            (free_in_a_new_list, "make a new list that nobody else sees"),
            (lambda table, *rest: RIGHT["free"](table[:5], *rest), "left ref_cnt"),
            (free_in_new_lists, "[3, 9, 2, 5] now, and the queue lacks them. (If you wrote"),
            (free_asked_before, "free_queue lacks them. Did you ask for `ref_cnt == 0` before"),
            (partial(free_one_group, True), "lacks [3, 9], which have no hash: they go to"),
            (partial(free_one_group, False), "nobody holds [3, 2, 1, 0] now, and the queue lacks"),
            (free_up_to_a_shared_block, "count down for [0, 1], too: a request gives its whole"),
            (free_what_it_holds_alone, "count down for [0, 1], too: a request gives its whole"),
            (free_and_lose, "ref_cnt has lost [0, 1, 2, 3]: nobody holds"),
            (free_what_others_hold, "another request still holds [0, 1]: only a block"),
            (free_and_forget, "free changes no hash"),
            (free_one_to_the_front, "the table [3] was given back (none without a hash), and the"),
            (free_one_to_the_front, "the queue is [3, 5, 6, 7], the package's [5, 6, 7, 3]"),
            (
                lambda t, c, queue, h: (
                    RIGHT["free"](t, c, queue, h),
                    None in h.values() and queue.sort(),
                ),
                "expected ref_cnt {5: 0, 2: 0, 9: 0, 3: 0} and the queue [3, 9, 7, 8, 2, 5]",
            ),
        ],
    ),
    "take": Exercise(
        learn.check_take,
        [RIGHT["take"], take_by_popping, but("take", np.int64)],
        TAKE_SLIPS,
        [
            (take_without_hash_first, "take the hash out of `cached` first"),
            (take_by_block, "the keys of `cached` are hashes, not blocks"),
            (take_cached_only, "KeyError: None; block 5 has no hash"),
            (
                lambda queue, hashes, cached: (
                    None if hashes[queue[0]] is None else RIGHT["take"](queue, hashes, cached)
                ),
                "it returns None: return the block here, too",
            ),
            (
                take_and_keep_hashes_of_many,
                "tokens came, and what can be found is {",
            ),
        ],
    ),
    "find": Exercise(
        learn.check_find,
        [RIGHT["find"], find_all_hashes_first, find_recursively, find_by_keywords, find_then_pop],
        FIND_SLIPS,
        [
            (find_with_hashes(lambda hash_of, *rest: hash_of(*rest)), "got 8 tokens in blocks"),
            (
                find_with_hashes(lambda hash_of, parent, seen: hash_of(seen, parent)),
                "hash_of(parent, tokens) is given the tokens first",
            ),
            (partial(find_or, None), "returns None at a miss: return what was found so far"),
            (find_in_one_turn, "is `return` inside the loop?"),
            (find_without_hash_of, "the keys of `cached` come from `hash_of`"),
            (lambda t, n, hash_of, _: [hash_of(t[:n])], "is given the tokens first"),
            (lambda t, n, hash_of, _: [hash_of(None, t[0])], "got 11 as the tokens; in hash_of("),
            (lambda *_: [2], "expected [5, 0, 3]"),
            (find_by_number, "hash_of got 5 as the parent"),
            (find_and_remove, "find only looks"),
            (partial(find_by_begins, True), "no token is left to run"),
            (lambda t, *rest: RIGHT["find"]([*t, 0], *rest), "no token is left to run"),
            (lambda t, *rest: RIGHT["find"]([*t, 0], *rest)[:-1], "the last block counts, too"),
            (partial(find_by_begins, False), "called again and again"),
            (but("find", set), "must return a list of blocks"),
            (
                find_token_by_token,
                "first tokens in blocks of 4: a hash belongs",
            ),
        ],
    ),
    "block_attention": Exercise(
        learn.check_block_attention,
        RIGHT_ATTENTION,
        BLOCK_SLIPS,
        [
            (gathered, "that is a gather"),
            (partial(gathered, cat=True), "that is a gather"),
            (masked_rest, "slots that nobody wrote"),
            (without_max, "exp() overflows"),
            (without_max_in_doubles, "exp() overflows"),
            (copied_blocks, "copies of all blocks"),
            (factor_upside_down, "exp(new m − old m) and"),
            (
                attention_with("n = min(block_size, kv_len - start)", "n = kv_len % block_size"),
                "whole",
            ),
            (
                attention_with("kv_len - start", "max(0, kv_len - block * block_size)"),
                "index i, which enumerate gives",
            ),
            (attention_with("float(scores.max())", "scores"), "one number each: scores.max()"),
            (attention_with("weights.sum()", "weights"), "one number each: scores.max(), p.sum()"),
            (
                attention_with("max(largest, float(", "torch.maximum(largest, ("),
                "m begins as torch.tensor(-torch.inf)",
            ),
            (attention_with("(scores - new_largest).exp()", "math.exp(scores)"), "use torch.exp"),
            (attention_with("math.sqrt(len(q))", "torch.sqrt(len(q))"), "write len(q) ** 0.5"),
            (attention_with("weights @", "weights *"), "acc is one vector: p @ v"),
            (attention_with("exp(largest -", "exp(new_largest -"), "before m gets its new value"),
            (attention_with("max(largest, float(", "(float("), "those of earlier blocks too"),
            (m_begins_at_0, "m begins at −∞"),
            (scaled_in_place, "wrote to k_pool"),
        ],
    ),
    "visible": Exercise(
        c4.check_visible,
        [RIGHT["visible"], visible_and_clear, but("visible", set)],
        c4.VISIBLE_SLIPS,
        [
            (
                lambda c, s, q: [i for i, (p, own) in enumerate(c) if p <= q],
                "An empty cell has position None: ask that first",
            ),
            (but("visible", lambda cells: cells[1:]), "expected [0, 1, 4, 6]"),
            (lambda c, s, q: [s in own for _, own in c], "not True or False"),
        ],
    ),
    "context_shift": Exercise(
        c4.check_context_shift,
        [context_shift, shift_token_by_token, shifts_and_applies],
        c4.SHIFT_SLIPS,
        [
            (lambda c, s, k, d: c.seq_keep(s), "sequence B (another one)"),
            (drops_one_too_late, "that is right, but it kept the tokens [0, 5, 6, 7, 8, 9]"),
            (lambda c, s, k, d: c.seq_ids, "call its seq_rm and its seq_add"),
            (lambda c, s, k, d: c.seq_rm(s, 0, k), "is a range empty?"),
            (lambda c, s, k, d: c.seq_add(k + d, -1, -d), "It takes seq_id, p0, p1, delta"),
        ],
    ),
    "rank_mlp": Exercise(
        check_rank_mlp,
        [rank_by_chunks, rank_mlp_by_slices],
        RANK_SLIPS,
        [
            (ranks_with("down[:, own].T", "down.T"), "down is whole; take the columns"),
            (ranks_with("down[:, own].T", "down"), "down is whole; take the columns"),
            (ranks_with("down[:, own]", "down[own]"), "a column of down, not a row"),
            (ranks_with("down[:, own].T", "down[:, own]"), "the part of down is not transposed"),
            (ranks_with("x @ gate[own].T", "x @ gate[own]"), "gate or up is not transposed"),
            (ranks_with("x @ up[own].T", "x @ up.T"), "up is whole, and gate is cut"),
            (ranks_with("x @ gate[own].T", "F.linear(x, gate[own].T)"), "is twice (F.linear"),
            (ranks_with("x @ up[own].T", "x @ up"), "gate or up is not transposed"),
            (ranks_with("gate[own].T", "gate[:, own].T"), "a feature is a row of gate and of up"),
            (lambda x, g, u, d, r, n: (x @ g.T * (x @ u.T)) @ d.chunk(n, 1)[r].T, "up are whole"),
            (lambda x, *_: torch.distributed.all_reduce(x), "return the partial sum alone"),
            (ranks_with("F.silu", "F.relu"), "these are not the sums of its features' products"),
            (ranks_with("F.silu", "F.relu"), "rank=2, num_ranks=6; "),
            (
                ranks_with("F.silu", "F.relu"),
                "products; this rank has features 12 to 17 (of 0 to 35)",
            ),
            (ranks_with("len(gate) // num_ranks", "len(gate) / num_ranks"), "divide with `//`"),
            (ranks_with("    return", "    gate.zero_()\n    return"), "it changes gate"),
            (ranks_with("x @ up[own].T", "x.mul_(2) @ up[own].T"), "it changes x"),
            (torch.no_grad()(_part), "the numbers are right, but it cannot be sent to another"),
        ],
    ),
    "end_to_end": Exercise(
        check_end_to_end,
        [end_to_end_by_blocks],
        END_TO_END_SLIPS,
        [
            (lambda tables, lens, size: [0, *lens], "return two lists"),
            (lambda tables, lens, size: ([0], []), "cu_seqlens has 4 numbers here, got 1: [0]"),
            (lambda *case: right_end_to_end(*case)[::-1], "first cu_seqlens, then the slots"),
            (lambda tables, *rest: right_end_to_end([[0]] * 3, *rest), "p counts from 0 in each"),
            (lambda tables, lens, size: ([0, 7, 11, 20], tables), "slots is one list of whole"),
        ],
    ),
    "size": Exercise(
        check_size,
        [size_by_doubling],
        SIZE_SLIPS,
        [
            (lambda lens: (1, 64, 0.0), "the longest context should be 128"),
            (
                lambda lens: (1, 128, 21.9),
                "the unused part (0 .. 1, not rounded) should be 0.21875",
            ),
            (lambda lens: 64, "contexts of [100], got 64; return three numbers"),
            (lambda lens: (1, 128, 1 / (len(lens) - 1)), "division by zero. no size is 0"),
        ],
    ),
    "make_step": Exercise(
        check_step,
        [step_that_keeps, step_that_keeps_a_view, step_that_warms_up],
        STEP_SLIPS,
        [
            (lambda gpu: lambda lens: lens, "step([3, 5]) must give [[1, 1, 1, 0"),
            (lambda gpu: lambda lens: step_that_keeps(gpu)(lens), "record once, in make_step"),
            (lambda gpu: (step_that_keeps(gpu), 0), "return the function step(new_lens)"),
            (step_that_keeps_another(clone_of), "the place of `positions` was given away"),
            (step_that_keeps_another(lambda gpu, _: gpu), "the place of `positions` was given"),
            (
                step_that_keeps_another(lambda gpu, _: gpu.tensor(range(8))),
                "the place of `positions` was given away",
            ),
            (
                lambda gpu: lambda lens: torch.arange(8) < torch.tensor(lens)[:, None],
                "make_step recorded 0 times, and 3 calls of its step 0 times",
            ),
            (
                lambda gpu: (step_that_keeps(gpu), step_that_keeps(gpu))[1],
                "make_step recorded 2 times, and 3 calls of its step 0 times",
            ),
            (step_that_keeps_the_last, "in one variable for all"),
            (lambda gpu: gpu.record(torch.neg, [1, 1]), "got [1, 1]: make it with gpu.tensor"),  # type: ignore[arg-type]
        ],
    ),
    "free_order": Exercise(
        check_free_order,
        [
            free_order_of_the_pool,
            free_order_block_by_block,
            lambda *case: (block for block in free_order_of_the_pool(*case)),
            lambda *case: OrderedDict.fromkeys(free_order_of_the_pool(*case)),
        ],
        FREE_ORDER_SLIPS,
        [
            (lambda queue, *_: queue, "expected [3, 4, 2, 0, 1]"),
            (lambda queue, tables, _: tables[2], "range (in the line: (lambda queue, tables, _:"),
            (lambda *case: str(free_order_of_the_pool(*case)), "got '[3, 4, 2, 0, 1]'"),
            (lambda queue, tables, with_hash: [*queue, *tables], "queue [2], tables [[0, 4]"),
            (lambda queue, tables, _: [*queue, *chain(*tables)], "block 4 has no hash"),
            (lambda queue, tables, _: [*chain(*tables), *queue], "block 0 has a hash"),
            (lambda queue, tables, _: sorted([*queue, *chain(*tables)]), "block 0 has a hash"),
            (free_order_of_all_tables, "which block of a table is taken first"),
        ],
    ),
    "hits": Exercise(
        check_hits,
        [
            right_hits,
            hits_by_names,
            hits_of_what_is_left,
            lambda *case: torch.tensor(right_hits(*case)),
            lambda *case: iter(right_hits(*case)),
        ],
        HITS_SLIPS,
        [
            (lambda prompts, size: [0 for _ in prompts[1:]], "a list of 4 numbers is wanted"),
            (lambda prompts, size: [0, 68, 44, 68], "each number is a multiple of 32"),
            (lambda ps, size: [n // size for n in right_hits(ps, size)], "numbers of blocks"),
            (lambda prompts, size: [0, 96, 64, 96], "expected [0, 64, 32, 64]"),
            (hits_by_blocks, "blocks of 4, got [0, 0, 8]"),
            (lambda *_: [32, 64, 32, 64], "prompt 0 (counted from 0) shares its first 32 tokens"),
            (
                lambda *_: [0, 32, 32, 64],
                "prompt 1 (counted from 0) shares its first 64 tokens with an",
            ),
            (hits_of_the_first_prompt, "prompt 1 (counted from 0) has 8 tokens, and one at least"),
        ],
    ),
    "log": Exercise(
        check_log,
        [log_by_tokens, log_in_fractions],
        LOG_SLIPS,
        [
            (lambda size, one, block, longest: (one, longest), "expected 491,520 and 1638.40"),
            (
                lambda size, one, block, longest: (size // one, size // one / longest),
                "divide the bytes into blocks first",
            ),
            (lambda *_: ("491,520", "1638.40x"), "two numbers are wanted"),
        ],
    ),
}

# -- all of them ---------------------------------------------------------------------------------

POLICIES, CACHES = ("ShortestFirst", "Fair"), ("MyCache", "MyStaticCache")
RETURNS_NOTHING = ("free", "context_shift", "slots_for")
every_exercise = pytest.mark.parametrize("name", EXERCISES)


def pairs(kind: str) -> Iterator[Any]:
    """A parameter for each answer of a kind: the exercise, the answer, what to say of it."""
    for name, exercise in EXERCISES.items():
        found = {
            "right": [(answer, "") for answer in exercise.right],
            "wrong": [*((slip, words) for words, slip in exercise.slips.items()), *exercise.wrong],
        }[kind]
        for i, (answer, words) in enumerate(found):
            yield pytest.param(name, answer, words, id=f"{name}: {words or i}"[:60])


@pytest.mark.parametrize(("name", "answer", "words"), pairs("right"))
def test_right_answer_is_accepted_however_it_is_written(name: str, answer: Any, words: str) -> None:
    verdict = EXERCISES[name].check(answer)
    assert verdict.ok is True and repr(verdict).startswith("✔ "), verdict


@pytest.mark.parametrize(("name", "answer", "words"), pairs("wrong"))
def test_mistake_is_named(name: str, answer: Any, words: str) -> None:
    what, _, code = words.partition(CODE)
    verdict = EXERCISES[name].check(answer)
    assert verdict.ok is False and repr(verdict).startswith("✘ ")
    assert what in verdict.message, verdict
    if code:
        assert code not in verdict.message and EXERCISES[name].check(answer) == verdict
        assert EXERCISES[name].check(lambda *_: "another answer").ok is False
        verdict = EXERCISES[name].check(answer)
        assert what in verdict.message and verdict.message.endswith(code)
    assert CODE not in verdict.message


@pytest.fixture(autouse=True)
def _first_try() -> None:
    wrong_answers.cache_clear()


def answer_of(name: str, function: Function) -> Any:
    """The function as an answer to this exercise: a policy's method, a cache's update."""
    if name in POLICIES:
        return policy(function)
    if name in CACHES:
        return type("Cache", (), {"__init__": lambda *sizes: None, "update": function})
    return function


def empty(*_: object) -> None:
    pass


@every_exercise
def test_untouched_exercise_is_open_and_a_forgotten_return_is_wrong(name: str) -> None:
    def verdict(function: Function) -> Verdict:
        return EXERCISES[name].check(answer_of(name, function))

    for function in (untouched, lambda *_: None, lambda *_: ...):
        told = verdict(function)
        assert told.ok is None and repr(told).startswith("☐ not done yet: the body of ")
    told = verdict(empty)
    assert told.ok is None and told.message.endswith(" is still empty")
    told = verdict(with_a_gap)
    assert told.ok is None and "not done yet: there is still a `...` in " in told.message
    if name not in RETURNS_NOTHING:
        told = verdict(forgotten)
        assert told.ok is False
        assert "returns None" in told.message and told.message.endswith("`return`?")
    told = verdict(always_none)
    assert told.ok is False and told.message.endswith("returns None whatever it is asked")


@every_exercise
def test_function_that_raises_gets_a_verdict(name: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    verdict = EXERCISES[name].check(answer_of(name, broken))
    assert verdict.ok is False and "RuntimeError: boom" in verdict.message
    verdict = EXERCISES[name].check(answer_of(name, lambda: 1))
    assert verdict.ok is False and "TypeError" in verdict.message


def test_a_budget_that_only_a_rounding_error_rules_out_is_said_to_fit() -> None:
    found = c3.check_budget(budget_by_measuring, measured_gap)
    assert found.ok and found.message.count("as well") == 1, found
    assert "15 for 26 ms (16 fits as well: only a rounding error" in found.message
    found = c3.check_budget(lambda gap: int(gap - 10), measured_gap)
    assert found.ok and "16 for 26 ms, 20 for 30 ms, 50 for 60.7 ms;" in found.message


def test_a_function_that_calls_one_that_is_open_is_told_so() -> None:
    namespace: dict[str, Any] = {}
    code = "def project(*_): ...\ndef layer(x, w, angles, attend):\n    q, k, v = project(x)"
    exec(code, namespace)
    verdict = c1.check_layer(namespace["layer"])
    assert verdict.ok is False
    assert verdict.message.endswith("it calls project, which is not done yet")
    code = (
        "def layer(*_): ...\ndef whole_layer(x, w, angles):\n    return layer(x, w, angles, None)"
    )
    exec(code, namespace)
    verdict = c1.check_whole_layer(namespace["whole_layer"])
    assert verdict == Verdict(False, "whole_layer: it calls layer, which is not done yet")


def test_an_error_does_not_hide_what_is_still_open() -> None:
    for function, raised in ((attention_with_a_gap, "Zero"), (with_a_gap_in_a_line, "TypeError")):
        told = learn.check_block_attention(function)
        assert told.ok is None and f"`...` in block_attention (it raised {raised}" in told.message
    told = learn.check_find(find_with_a_gap)
    assert told == Verdict(None, "not done yet: there is still a `...` in find")


def test_a_right_number_for_a_wrong_reason_is_refused() -> None:
    for function in (
        lambda c, size: 2 * c.num_hidden_layers * c.hidden_size * size,
        lambda c, size: c.num_hidden_layers * c.num_attention_heads * c.head_dim * size,
        lambda c, size: 57_344 * size,
    ):
        assert function(QWEN3_06B, 2) == 114_688
        assert c1.check_kv_bytes(function, QWEN3_06B).ok is False


@pytest.mark.parametrize("function", RIGHT_ATTENTION)
def test_right_attention_that_is_no_running_softmax_is_told_so(function: Function) -> None:
    said = learn.check_block_attention(function).message.partition("none gathered")[2]
    keeps = ". But it keeps the scores of all"
    words = {two_rounds: keeps, list_of_scores: keeps, two_passes: ". But it reads keys more"}
    assert said.startswith(words.get(function, "")) and bool(said) == (function in words)


def test_visible_is_the_rule_of_the_cell_table() -> None:
    draw = random.Random(0)
    for _ in range(50):
        table = CellTable(12)
        for seq_id in (1, 2):
            cells = draw.sample([i for i in range(12) if table[i].pos is None], 4)
            table.place(cells, seq_id, range(4))
        table.seq_rm(1, 2)
        table.seq_cp(1, 3)
        plain = [(table[i].pos, set(table[i].owners)) for i in range(12)]
        for seq_id in (1, 2, 3, 4):
            for pos in range(5):
                assert RIGHT["visible"](plain, seq_id, pos) == sorted(table.visible(seq_id, pos))
