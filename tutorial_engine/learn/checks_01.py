"""The checks of notebook 01, and what they know of usual mistakes."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tutorial_engine.learn import own
from tutorial_engine.learn.judge import CODE, Slips, alike, judge, read_number, slips_of
from tutorial_engine.learn.own import Attend, LayerWeights, rms_norm
from tutorial_engine.learn.parts import number, whole_numbers
from tutorial_engine.learn.verdict import (
    SHAPES,
    CannotBe,
    Explain,
    Sign,
    Verdict,
    explained,
    wrong_shape,
)
from tutorial_engine.model.attention import NaiveAttention, causal_mask, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.rope import inverse_frequencies
from tutorial_engine.viz.words import counted, verb

INF = math.inf


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


TO_THE_LEFT = "The vectors stand to the left of the @, and {} to the right"


def _not_transposed(error: Exception, weights: Mapping[str, Tensor]) -> str:
    """Which [out, in] matrix lacks its .T or stands to the left, from the shapes in an error."""
    found = re.search(r"\((\d+x(\d+)) and (\d+x(\d+))\)", str(error))
    if found is None:
        return ""
    left, wide, right, inner = found.groups()
    at: dict[str, list[str]] = {}
    for name, w in weights.items():
        at.setdefault("x".join(map(str, w.shape)), []).append(f"{name}.T")
    if left in at:
        return TO_THE_LEFT.format(" or ".join(at[left]))
    if right in at and inner == wide:
        return f"The weights are [out, in]: multiply by {' or '.join(at[right])}"
    return ""


# -- attention ------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.T / k.shape[-1] ** 0.5
    shares = scores.masked_fill(~mask, -INF).softmax(dim=-1)
    return shares @ v


ATTENTION_SLIPS: Slips = slips_of(
    _attention,
    """
    @ v →
        the shares [q, kv] themselves, not yet multiplied by the values ▸ shares @ v
    / k.shape[-1] ** 0.5 →
        scores that are not divided by √D ▸ k.shape[-1] ** 0.5
    / k.shape[-1] ** 0.5 →
    shares @ v → shares / k.shape[-1] ** 0.5 @ v
        shares that are divided by √D, in place of the scores
    masked_fill(~mask, -INF).softmax(dim=-1) → softmax(dim=-1) * mask
        masked after the softmax, so that the shares of a query no longer add up to 1
    masked_fill(~mask, -INF).softmax → softmax
        no mask at all: each query sees every key
    ~mask → mask
        the mask turned round: a key counts where `mask` is False
    scores.masked_fill(~mask, -INF) → (scores * mask).masked_fill(scores * mask == 0, -INF)
        an allowed key whose score is 0 counts as forbidden ▸ scores.masked_fill(~mask, ...)
    q @ k.T → q @ v.T
    shares @ v → shares @ k
        keys and values swapped: scores from v, the output from k
    dim=-1 → dim=0
        a softmax over the queries, not over the keys
    """,
)


def _some_allowed(q_len: int, kv_len: int) -> Tensor:
    """A random mask: each query has a key before or after its own place, and never its own.

    So every row has a key, and no triangle is like it.
    """
    mask, own_place = _random(q_len, kv_len) > 0, torch.arange(q_len)
    mask[own_place, own_place - 1] = True
    mask[own_place, own_place] = False
    return mask


def _shares_in(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor | None:
    """The shares by which an output mixes the values; they follow from it, for few keys."""
    shares = (out.double() @ v.double().pinverse()).float()
    is_mix = len(v) <= v.shape[1] and alike(shares @ v, out, 1e-3)
    return shares if is_mix else None


# the third key is forbidden to the first query, and has the largest score
SMALL = (
    torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
    torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]]),
    torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    torch.tensor([[True, True, False], [True, True, True]]),
)
# a forbidden score of −1000, say, is not low enough here: the allowed one is −2000
LOW = (
    torch.ones(1, 4),
    torch.tensor([[-1000.0] * 4, [0.0] * 4]),
    torch.eye(2, 4),
    torch.tensor([[True, False]]),
)


def _may_be_nan(function: Callable[..., Tensor], q: Tensor, *case: Tensor) -> Any:
    """An answer; for LOW a softmax by exp, as section 4 writes it, divides 0 by 0: no mistake."""
    out = function(q, *case)
    by_zero = torch.equal(q, LOW[0]) and isinstance(out, Tensor) and bool(out.isnan().all())
    return torch.eye(2, 4)[:1] if by_zero else out


def check_attention(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(q [q, D], k [kv, D], v [kv, D], mask [q, kv]) → out [q, D]."""
    cases = [
        (_random(n, size), _random(kv, size), _random(kv, size) + 1, mask)
        for n, kv, size in ((2, 3, 4), (1, 3, 4), (3, 5, 8), (6, 6, 8))
        for mask in (causal_mask(n, kv), _some_allowed(n, kv))
    ]
    cases[2][1][0] = 0  # the key that the only query may see has the score 0
    return judge(
        *("attention", function, own.attention, [SMALL, *cases, LOW], ATTENTION_SLIPS),
        "attention: equal to the package's, 1 to 6 queries, D=8 and 4, causal and random masks",
        call=_may_be_nan,
        also={
            "shares in yours": _shares_in,
            "expected shares": lambda _, q, k, v, mask: naive_attention(
                q[:, None], k[:, None], v[:, None], mask
            ).weights[0],
        },
    )


# -- window_mask ----------------------------------------------------------------------------------


def _mask(q_len: int, kv_len: int, window: int) -> Tensor:
    query = torch.arange(kv_len - q_len, kv_len)[:, None]
    key = torch.arange(kv_len)
    back = query - key
    return (back >= 0) & (back < window)


MASK_SLIPS: Slips = slips_of(
    _mask,
    """
    return (back >= 0) & (back < window) → return ~((back >= 0) & (back < window))
        the mask is inverted; True means that a query MAY attend
    return (back >= 0) & (back < window) → return ((back >= 0) & (back < window)).T
        rows and columns are swapped; row = query
    query - key → key - query
        it looks forward, to later keys; take query position − key position
    kv_len - q_len, kv_len) → q_len)
        lined up at the upper left; the queries are the LAST of the positions
        ▸ the first one stands at kv_len - q_len
    kv_len - q_len, kv_len) → kv_len)
        it has a row for each key; the rows are the queries, the LAST q_len of the positions
    """,
)


def check_window_mask(function: Callable[[int, int, int], Tensor]) -> Verdict:
    """Check a learner's function(q_len, kv_len, window) → bool [q_len, kv_len]."""

    def otherwise(got: Tensor, want: Tensor, q_len: int, kv_len: int, window: int) -> str:
        if got.dtype != torch.bool:
            added = got.is_floating_point() and bool((got == -INF).any())
            means = "; this one is meant to be added to the scores" if added else ""
            return f"it must be bool, True = may attend; got {got.dtype}{means}"
        back = torch.arange(q_len)[:, None] - torch.arange(kv_len)
        for first in range(-window, kv_len + window) if q_len > 1 else ():
            if torch.equal(got, (first + back >= 0) & (first + back < window)) and got.any():
                return (
                    f"the first query stands at position {first}, as its keys show; it must stand "
                    f"at kv_len - q_len = {kv_len - q_len}"
                )
        if bool((got & ~causal_mask(q_len, kv_len)).any()):
            query, key = (got & ~causal_mask(q_len, kv_len)).nonzero()[0].tolist()
            return (
                f"a query sees a key after it: query {query} is at position "
                f"{kv_len - q_len + query}, and it sees key {key}"
            )
        itself = got[:, kv_len - q_len :].diagonal()
        for query, sees in enumerate(got):
            if not bool(sees.any()) and bool(itself.any() or not got.any()):
                position = kv_len - q_len + query
                start = " (a negative start of a slice counts from the end)" * (
                    position < window - 1 and bool(itself.any())
                )
                return f"query {query}, at position {position}, sees no key, not itself{start}"
        if not bool(itself.all()):
            return "a query does not see itself; key_pos <= query_pos"
        seen, most = int(got.sum(-1).max()), int(want.sum(-1).max())
        if seen == most:
            return "the right number of keys, but not the last ones"
        return f"a query sees up to {counted(seen, 'key')}; {most} expected, itself included"

    return judge(
        *("window_mask", function, own.window_mask),
        *(((4, 4, 2), (1, 5, 3), (3, 7, 4), (2, 2, 9)), MASK_SLIPS),
        "window_mask: right for all queries at once, for one, for some, and for a wide window",
        where=lambda _, q_len, kv_len, window: f"q={q_len}, k={kv_len}, window={window}",
        otherwise=otherwise,
        explain={
            "ambiguous": "Join two conditions with &, each in its own brackets: (...) & (...)",
            SHAPES: "It needs a column of queries and a row of keys",
        },
    )


# -- kv_head --------------------------------------------------------------------------------------

HEAD_SLIPS: Slips = slips_of(
    own.kv_head,
    """
    h // (num_heads // num_kv_heads) → h % num_kv_heads
        h % num_kv_heads fits every shape, but neighbours share a K/V head: divide by the group
    (num_heads // num_kv_heads) → num_kv_heads
        divide by the size of a group, not by the number of K/V heads
        ▸ num_heads // num_kv_heads
    h // (num_heads // num_kv_heads) → num_heads // num_kv_heads
        this is the size of a group; in which group is head h?
    h // (num_heads // num_kv_heads) → h
        this is the query head itself
    (num_heads // num_kv_heads) → (num_heads // num_kv_heads) + 1
        heads are counted from 0: the first one is head 0
    h // (num_heads // num_kv_heads) → round(h / (num_heads // num_kv_heads))
        round down with //; round() takes the nearest number
    (num_heads // num_kv_heads) → 3
        a group has 3 heads in this model only; compute its size
    h // (num_heads // num_kv_heads) → h % (num_heads // num_kv_heads)
        this is the place inside the group
    h // (num_heads // num_kv_heads) → h - h % (num_heads // num_kv_heads)
        this is the first query head of the group
    """,
)


def _every_head(function: Callable[..., Any], num_heads: int, num_kv_heads: int) -> Any:
    """The answers for all heads; None if one is."""
    got = [function(h, num_heads, num_kv_heads) for h in range(num_heads)]
    return None if None in got else got


def check_kv_head(function: Callable[[int, int, int], int]) -> Verdict:
    """Check a learner's function(h, num_heads, num_kv_heads) → the K/V head of query head h."""

    def read(answers: Sequence[Any]) -> list[int]:
        if (heads := whole_numbers(answers)) is None:
            why = "round down: divide with //"
            if all((one := number(answer)) is not None and one.is_integer() for answer in answers):
                why = f"is the size of a group a float?{CODE}num_heads // num_kv_heads"
            raise CannotBe(f"got {answers}; the number of a head is an int; {why}")
        return heads

    return judge(
        *("kv_head", function, own.kv_head, ((6, 2), (16, 8), (8, 1), (4, 4)), HEAD_SLIPS),
        "kv_head: 6/2, 16/8, 8/1 and 4/4 heads",
        call=_every_head,
        read=read,
        where=lambda got, heads, kv: f"{heads} query heads, {kv} K/V heads: got {got}",
        explain={
            ZeroDivisionError: (
                "h begins at 0, and there are fewer K/V heads than query heads: what divides what?"
            )
        },
    )


# -- rope -----------------------------------------------------------------------------------------


def _rope(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.cat((a, b), dim=-1)


ROPE_SLIPS: Slips = slips_of(
    _rope,
    """
    angles.cos()[:, None], angles.sin()[:, None] → angles[:, None], angles[:, None]
        the angles stand where their cosines and sines belong ▸ angles.cos() and angles.sin()
    angles.sin() → -angles.sin()
        turned the wrong way round; look at the sign of sin
    x.chunk(2, dim=-1) → (x[..., 0::2], x[..., 1::2])
    cat((a, b), dim=-1) → stack((a, b), dim=-1).flatten(-2)
        neighbours are paired (0 1)(2 3); these checkpoints pair i with i + D/2
    cat((a, b), dim=-1) → stack((a, b), dim=-1).flatten(-2)
        the halves are joined in turns, a b a b; all a come before all b
        ▸ torch.cat((a, b), dim=-1)
    x.chunk(2, dim=-1) → (x[..., 0::2], x[..., 1::2])
        0::2 and 1::2 pair neighbours; these checkpoints pair i with i + D/2
        ▸ x.chunk(2, dim=-1)
    a * cos - b * sin, b * cos + a * sin → a * sin - b * cos, b * sin + a * cos
        cos and sin are swapped: it is a cos φ − b sin φ
    return torch.cat((a, b), dim=-1) → return x
        nothing was turned
    return torch.cat((a, b), dim=-1) → return a, b
        it returned the two halves; join them to one tensor ▸ torch.cat((a, b), dim=-1)
    (a, b), dim=-1 → (a, b)
        the halves are joined along the tokens; join the last axis ▸ torch.cat((a, b), dim=-1)
    cat((a, b), dim=-1) → stack((a, b), dim=-1)
        stack makes a new axis; join the halves along the last one ▸ torch.cat((a, b), dim=-1)
    b * cos + a * sin → b
        the second half is not turned: it is b cos φ + a sin φ
    b * cos + a * sin → a * cos + b * sin
        a and b are exchanged in the second half: it is b cos φ + a sin φ
    b * cos + a * sin → a * sin - b * cos
        the sign of b cos φ in the second half: it is b cos φ PLUS a sin φ
    a, b = x → angles = angles.deg2rad(); a, b = x
        the angles are radians already
    a, b = a * cos - b * sin, b → a = a * cos - b * sin; b = b
        a was overwritten before b was turned; keep the old a ▸ a.clone()
    (a, b) → (b, a)
        the two halves are joined in the other order
    - b * sin → + b * sin
        the sign in the first half: it is a cos φ MINUS b sin φ
    + a * sin → - a * sin
        the sign in the second half: it is b cos φ PLUS a sin φ
    """,
)


ROPE_ERRORS: Explain = {
    "Python scalars": (
        f"math.cos and math.sin take one number; a tensor has its own{CODE}angles.cos()"
    ),
    "name 'cos'": "A tensor has .cos() and .sin()",
    "name 'sin'": "A tensor has .cos() and .sin()",
    "unpack": f"split takes the size of a piece, chunk their number{CODE}x.chunk(2, dim=-1)",
    "dimension 2": (  # the numbers of a head do not fit the angles
        "Cut the last axis in two halves, [T, heads, D / 2]; the angles need an axis for the heads"
        f"{CODE}x.chunk(2, dim=-1) and angles[:, None, :]"
    ),
    SHAPES: f"The angles [T, D / 2] have no axis for the heads{CODE}angles[:, None, :]",
}


def check_rope(function: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, heads, D], angles [T, D / 2]) → x turned (half-split)."""
    cases = [
        (_random(tokens, heads, size), positions[:, None] * inverse_frequencies(size, 10000.0))
        for positions, heads, size in (
            (torch.arange(6), 2, 8),
            (torch.arange(2), 3, 4),
            (torch.tensor([7]), 1, 8),
        )
        for tokens in [len(positions)]
    ]

    def otherwise(got: Tensor, want: Tensor, x: Tensor, angles: Tensor) -> str:
        (first, second), rights = got.chunk(2, -1), want.chunk(2, -1)
        if alike(second, rights[1]):
            return "the second half is right, the first is not: it is a cos φ MINUS b sin φ"
        if alike(first, rights[0]):
            return "the first half is right, the second is not: it is b cos φ PLUS a sin φ"
        if len(x) == 1:
            return "right for several tokens, wrong for one token at position 7"
        if alike(got[0], x[0]):
            return "position 0 is right, others not; look at cos, sin and signs"
        return "position 0 changed; all its angles are 0, so cos is 1, sin is 0, and x stays"

    return judge(
        *("rope", function, own.rope, cases, ROPE_SLIPS),
        "rope: equal to the package's, half-split pairs, 6, 2 and 1 tokens",
        otherwise=otherwise,
        explain=ROPE_ERRORS,
    )


# -- project --------------------------------------------------------------------------------------

# what to say of q, k or v → what it is instead, from its right value [T, heads, D] and q's
PROJECT_SLIPS: Slips = {
    "is not split into heads: [T, heads · D] must become [T, heads, D]": lambda x, q: x.flatten(1),
    "has the heads first; the tokens are the first axis: [T, heads, D]": lambda x, q: x.transpose(
        0, 1
    ),
    "has head_dim before the heads; it is the last axis: [T, heads, D]": lambda x, q: x.mT,
    "is cut into head_dim heads; a head has head_dim numbers, the last axis": lambda x, q: (
        x.flatten(1).unflatten(-1, (x.shape[-1], -1))
    ),
    "has the heads first, and its numbers are those of several tokens; cut the last axis only": (
        lambda x, q: x.reshape(x.shape[1], -1, x.shape[-1])
    ),
    "takes every n-th number for a head; a head is head_dim numbers that lie side by side": (
        lambda x, q: x.flatten(1).unflatten(-1, (x.shape[-1], -1)).mT
    ),
    f"has the right shape, and its numbers at wrong places; cut the last axis only{CODE}"
    ".unflatten(-1, (-1, head_dim))": lambda x, q: x.reshape(x.shape[1], -1, x.shape[-1]).transpose(
        0, 1
    ),
    "is repeated for every query head; give the K/V heads only, attention shares them": (
        lambda x, q: x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
    ),
}


APART = f"q has more heads than k and v, so the three stay apart{CODE}return q, k, v"
SIZES_GIVEN = (
    f"Take the number of heads from the matrix, and head_dim from the argument{CODE}"
    "len(w_q) // head_dim"
)
PROJECT_ERRORS: Explain = {
    "expects each tensor to be equal size": APART,
    "except in dim": APART,
    "of dim 1 (5)": TO_THE_LEFT.format("a matrix such as w_q.T"),  # there are 5 tokens
    "invalid for input of size": SIZES_GIVEN,
    "multiply up to": SIZES_GIVEN,
}


def check_project(function: Callable[..., Sequence[Tensor]]) -> Verdict:
    """Check a learner's function(x, w_q, w_k, w_v, head_dim) → q [T, H, D], k, v [T, H_kv, D]."""
    cases = []
    for heads, kv_heads, size, hidden in ((4, 2, 8, 24), (3, 1, 4, 12)):
        w_q, w_k, w_v = (_random(n * size, hidden) + n for n in (heads, kv_heads, kv_heads))
        cases.append((_random(5, hidden), w_q, w_k, w_v.flip(0), size))

    def read(got: Any) -> Sequence[Any]:
        got = tuple(got) if isinstance(got, Iterator) else got
        if isinstance(got, tuple | list) and len(got) == 3:
            return got
        is_one = isinstance(got, Tensor)
        kind = f"one tensor {list(got.shape)}" if is_one else f"a {type(got).__name__}"
        raise CannotBe(f"it must return three tensors (q, k, v), got {kind}")

    def otherwise(got: Sequence[Any], want: Sequence[Tensor], *_: object) -> str:
        for swapped, order in (("k and v", (0, 2, 1)), ("q and k", (1, 0, 2))):
            if alike([got[i] for i in order], want):
                return f"{swapped} are swapped"
        name, mine, right = next(
            three for three in zip("qkv", got, want, strict=True) if not alike(*three[1:])
        )
        for why, slip in PROJECT_SLIPS.items():
            if alike(mine, slip(right, want[0])):
                return f"{name} {why}"
        if isinstance(mine, tuple | list) and all(isinstance(one, Tensor) for one in mine):
            return (
                f"{name} is cut into {counted(len(mine), 'tensor')}; cut the last axis, and it "
                f"stays one tensor{CODE}.unflatten(-1, (-1, head_dim))"
            )
        if not isinstance(mine, Tensor):
            return str(getattr(wrong_shape(name, mine, right), "message", ""))
        if mine.shape != right.shape:
            return (
                f"{name} has shape {list(mine.shape)}, expected {list(right.shape)}; the number of "
                f"heads follows from the matrix{CODE}len(w_q) // head_dim"
            )
        others = [f"w_{n}" for n, one in zip("qkv", want, strict=True) if alike(mine, one)]
        return f"{name} was made with {others[0]}" if others else f"{name} is not x @ w_{name}.T"

    def explain(error: Exception) -> str:
        weights = dict(zip(("w_q", "w_k", "w_v"), cases[0][1:4], strict=True))
        return explained(error, PROJECT_ERRORS) or _not_transposed(error, weights)

    return judge(
        *("project", function, own.project, cases, {}),
        "project: 4 query and 2 K/V heads of 8 numbers, then 3 and 1 of 4",
        read=read,
        where=lambda got, x, w_q, w_k, w_v, d: f"{len(w_q) // d} and {len(w_k) // d} heads of {d}",
        otherwise=otherwise,
        explain=explain,
    )


# -- layer ----------------------------------------------------------------------------------------

TEXT_IDS = (312, 265, 65, 401, 97, 300, 77, 258, 11, 500)  # any tokens do; ten of them


def _layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    h = rms_norm(x, w.input_norm)
    q, k, v = own.project(h, w.q, w.k, w.v, len(w.q_norm))
    q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)
    q, k = own.rope(q, angles), own.rope(k, angles)
    mixed = attend(q, k, v).flatten(1) @ w.o.T
    y = x + mixed
    h = rms_norm(y, w.mlp_norm)
    gate, up = h @ w.gate.T, h @ w.up.T
    out = (F.silu(gate) * up) @ w.down.T
    return y + out


LAYER_SLIPS: Slips = slips_of(
    _layer,
    """
    y = x + mixed → y = mixed
        the result of attention is not added to x (the first residual)
    return y + out → return out
        the result of the MLP is not added to the stream (the second residual)
    y = x + mixed → y = mixed
    return y + out → return out
        nothing is added to the stream: both residuals are missing
    return y + out → return x + y + out
        x is added twice; x + attention has it already
    y + out → x + out
        the second residual adds to x; it must add to x + attention
    (y, → (x,
        the MLP reads the norm of x; it must read the norm of x + attention
    h = rms_norm(x, w.input_norm) → x = h = rms_norm(x, w.input_norm)
        attention is added to the normed x; add it to x itself
    h = rms_norm(y, w.mlp_norm) → y = h = rms_norm(y, w.mlp_norm)
        the MLP is added to the normed sum; add it to the sum itself
    h = rms_norm(x, w.input_norm) → x = h = rms_norm(x, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → y = h = rms_norm(y, w.mlp_norm)
        both residuals add to normed vectors; add to the stream itself
    h = rms_norm(x, w.input_norm) → h = x
    x + mixed → x + rms_norm(mixed, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
    y + out → y + rms_norm(out, w.mlp_norm)
        the norms come after attention and MLP; they come before (pre-norm)
    h = rms_norm(x, w.input_norm) → h = x
    x + mixed → rms_norm(x + mixed, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
    y + out → rms_norm(y + out, w.mlp_norm)
        the norms come after each sum (as in 2017); Qwen3 norms before
    h = rms_norm(x, w.input_norm) → h = x
        attention reads x itself; it must read the normed x ▸ rms_norm(x, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
        the MLP reads the stream itself; it must read its norm, w.mlp_norm
    h = rms_norm(y, w.mlp_norm) →
        the MLP reads the first norm again; it must read the norm of x + attention
    h = rms_norm(y, w.mlp_norm) → h = x
        the MLP reads x; it must read the norm of x + attention
    x, w.input_norm → x, w.mlp_norm
    y, w.mlp_norm → y, w.input_norm
        input_norm and mlp_norm are swapped
    w.mlp_norm → w.input_norm
        w.input_norm is used twice; the MLP has its own norm, w.mlp_norm
    q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm) →
        q_norm and k_norm are missing; they norm each head of q and of k
    rms_norm(q, w.q_norm) → q
        q_norm is missing
    rms_norm(k, w.k_norm) → k
        k_norm is missing
    k, w.k_n → k, w.q_n
        k is normed with w.q_norm; it has a norm of its own, w.k_norm
    q, w.q_n → q, w.k_n
    k, w.k_n → k, w.q_n
        q_norm and k_norm are swapped
    q, k = own.rope(q, angles), own.rope(k, angles) →
        q and k are not turned by their positions (rope)
    own.rope(q, angles) → q
        q is not turned by its positions (rope)
    own.rope(k, angles) → k
        k is not turned by its positions (rope)
    attend(q, k, v) → attend(q, k, own.rope(v, angles))
        v is turned as well; rope turns q and k only
    own.rope(q, angles), own.rope(k, angles) → q, k
    rms_norm(q, → rms_norm(own.rope(q, angles),
    rms_norm(k, → rms_norm(own.rope(k, angles),
        rope comes before q_norm and k_norm; it must come after them
    attend(q, k, v) → attend(q, k, rms_norm(v, w.k_norm))
        v is normed as well; q_norm and k_norm norm q and k only
    attend(q, k, v) → attend(q, v, k)
        k and v are swapped in attention; it takes q, k, v
    w.k, w.v → w.v, w.k
        w.k and w.v are swapped
    @ w.o.T →
        the output of the heads is added without w.o
    w.o.T → w.o
        attention is multiplied by w.o, as if it were [in, out]; it is [out, in] ▸ w.o.T
    attend(q, k, v) → (attend(q, k, v) / len(w.q_norm) ** 0.5)
        the result of attend is divided by √D; attend divides the scores by it already
    .flatten(1) → .mT.flatten(1)
        the heads are joined number by number; put head after head ▸ .flatten(1)
    .flatten(1) → .transpose(0, 1).reshape(len(x), -1)
        tokens are mixed when the heads are joined; join the last two axes ▸ .flatten(1)
    x + mixed → x
        attention is missing: only the MLP is there
    y + out → y
        the MLP is missing: only attention is there
    gate, up = → up, gate =
        gate and up are swapped: silu goes around the gate ▸ silu(h @ w.gate.T)
    F.silu(gate) * up → F.silu(gate * up)
        silu goes around the gate alone, before it is multiplied by up ▸ silu(h @ w.gate.T)
    F.silu(gate) → (F.silu(h) @ w.gate.T)
        silu comes before the matrix; it goes around the product ▸ silu(h @ w.gate.T)
    F.silu(gate) * up → F.silu(gate) + up
        silu(gate) and up are added; multiply them number by number
    F.silu → F.gelu
        gelu stands where silu belongs
    F.silu(gate) → gate
        silu is missing around the gate ▸ silu(h @ w.gate.T)
    F.silu → F.sigmoid
        sigmoid(g) stands where silu(g) = g · sigmoid(g) belongs
    """,
)


@cache
def tiny_model() -> CausalLM:
    """The model that ships, loaded once for the checks."""
    return load_model()


class LayerCase(NamedTuple):
    """What a layer is given, but for `attend`."""

    name: str
    x: Tensor
    weights: LayerWeights
    angles: Tensor


@cache
def _layers() -> list[LayerCase]:
    """Of each layer of the model that ships, for ten tokens; and of a random one of other sizes."""
    model, batch, found = tiny_model(), Batch.from_sequences([TEXT_IDS]), []
    x = model.model.embed_tokens(batch.input_ids)
    angles = batch.positions[:, None] * model.model.rotary_emb.inv_freq
    for i, layer in enumerate(model.model.layers):
        found.append(LayerCase(f"layer {i}", x, LayerWeights.of(layer), angles))  # type: ignore[arg-type]
        x = _with_attend(own.layer, *found[-1])
    return [*found, _other_sizes()]


def _other_sizes(heads: int = 8, kv_heads: int = 4) -> LayerCase:
    """Seven tokens from position 3 on, in a layer where nothing has the size that the model has."""
    hidden, size, wide, tokens = 40, 18, 56, 7
    shapes = {"input_norm": [hidden], "mlp_norm": [hidden], "q_norm": [size], "k_norm": [size]}
    shapes |= {"q": [heads * size, hidden], "o": [hidden, heads * size]}
    shapes |= {"k": [kv_heads * size, hidden], "v": [kv_heads * size, hidden]}
    shapes |= {"gate": [wide, hidden], "up": [wide, hidden], "down": [hidden, wide]}
    draw = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(shape, generator=draw) / shape[-1] ** 0.5
        if shape[1:]
        else torch.rand(shape, generator=draw) + 0.5
        for name, shape in shapes.items()
    }
    x = torch.randn(tokens, hidden, generator=draw)
    angles = torch.arange(3, 3 + tokens)[:, None] * inverse_frequencies(size, 10000.0)
    sizes = f"a layer of other sizes ({heads} query and {kv_heads} K/V heads of {size} numbers, "
    return LayerCase(f"{sizes}hidden size {hidden})", x, LayerWeights(**made), angles)


def _with_attend(
    function: Callable[..., Any], name: str, x: Tensor, w: LayerWeights, angles: Tensor
) -> Any:
    batch, backend = Batch.from_sequences([range(len(x))]), NaiveAttention()

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: object, **named: object) -> Tensor:
        if more or named:
            raise TypeError("call attend(q, k, v) without a mask; it has the mask already")
        if q.dim() == k.dim() == 3 and q.shape[1] < k.shape[1]:
            few, many = q.shape[1], k.shape[1]
            raise CannotBe(f"attend got q with {few} heads, k with {many}: are they swapped?")
        return backend.attend(0, q, k, v, batch)

    return function(x, w, angles, attend)


def _where_wrong(function: Callable[..., Any], x: Tensor, w: LayerWeights, angles: Tensor) -> str:
    """Where to look for a mistake, from what a layer gives to attend."""
    heard: list[tuple[Tensor, ...]] = []

    def attend(*q_k_v: Tensor) -> Tensor:
        heard.append(q_k_v)
        return q_k_v[0]

    for one in (own.layer, function):
        one(x, w, angles, attend)
    if len(heard) != 2:
        return ""
    wrong = [
        name
        for name, want, got in zip("qkv", *heard, strict=True)
        if got.shape != want.shape or not torch.allclose(got, want, atol=1e-4)
    ]
    if wrong:
        return f"{verb(wrong, 'is', 'are')} wrong when attend is called: look at steps 1 and 2"
    return "q, k and v are right when attend is called: look at steps 3 and 4"


def _wrong_below(function: object) -> str:
    """The exercise that a layer calls and that is not right, with what is wrong; "" if none."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    for name, check in (("project", check_project), ("rope", check_rope), ("layer", check_layer)):
        if name in names and callable(known.get(name)):
            verdict = check(known[name])
            if verdict.ok is None:
                return f"it calls {name}, which is not done yet"
            if verdict.ok is False:
                return f"it calls your {name}, which is not ✔ yet ({verdict.message})"
    return ""


def check_layer(function: Callable[[Tensor, LayerWeights, Tensor, Attend], Tensor]) -> Verdict:
    """Check a learner's function(x [T, hidden], w, angles [T, D / 2], attend) → [T, hidden].

    With the weights of two layers of the model that ships, against these layers themselves, and
    with random weights of other sizes.
    """
    return _judge_layer("layer", function, own.layer, LAYER_SLIPS, _with_attend)


def _layer_errors(case: LayerCase) -> dict[Sign, str]:
    """What PyTorch says of the shapes of a case, and what is meant."""
    heads, size, wide = (len(w) for w in (case.weights.q, case.weights.q_norm, case.weights.gate))
    tokens, hidden = case.x.shape
    heads //= size
    other_side = TO_THE_LEFT.format("a matrix such as w.gate.T")
    join = f"Join the heads before you multiply by w.o{CODE}.flatten(1)"
    return {
        "same dtype": "Numbers of numpy are float64; .float() makes a tensor float32",
        "AttentionResult": "naive_attention gives the result and the shares; .out is the result",
        f"tensor a ({tokens}) must match the size of tensor b ({heads})": (
            "Scores that meet a mask [T, T] have the heads first: hqk. Angles need an axis for the "
            "heads"
        ),
        f"tensor a ({hidden}) must match the size of tensor b ({tokens})": other_side,
        f"({wide}x{tokens} and": other_side,
        "broadcast": (
            "There are fewer K/V heads than query heads; give each query head one"
            f"{CODE}k.repeat_interleave(group, dim=1)"
        ),
        "multiply up to": "The head dimension is the number of weights in w.q_norm",
        f"tensor b ({size}) at non-singleton dimension 1": (
            "w.q_norm and w.k_norm norm each head by itself: q and k are [T, heads, D] then. "
            "x is normed with w.input_norm and w.mlp_norm"
        ),
        f"tensor a ({size})": (
            "q and k are normed with w.q_norm and w.k_norm, which have a weight for each of D"
        ),
        f"tensor a ({wide})": (
            "Python takes @ and * from left to right: put brackets around each product with @"
        ),
        f"tensor a ({hidden}) must match the size of tensor b ({size})": join,
        f"tensor b ({size})": "The head dimension is len(w.q_norm)",
        f"x{size} and": join,
    }


@torch.no_grad()
def _judge_layer(
    name: str,
    function: Callable[..., Any],
    right: Callable[..., Any],
    slips: Slips,
    call: Callable[..., Any],
    then: Callable[[Any], str] | None = None,
) -> Verdict:
    first, *_, last, other = _layers()
    weights = {f"w.{name}": w for name, w in first.weights._asdict().items()}
    tokens = len(first.x)
    typed = (
        f"Right for the model's layers, wrong for {other.name}; is a size typed in?{CODE}The head "
        "dimension is len(w.q_norm); .flatten(1) joins any number of heads"
    )

    def asks(function: Callable[..., Any], case: str, *args: Any) -> Any:
        try:
            return call(function, case, *args)
        except Exception as error:
            raise (CannotBe(typed) if case == other.name else error) from error

    def otherwise(got: Tensor, _: Tensor, case: str, *given: Any) -> str:
        if case == other.name:
            return typed
        if bool(got.isnan().any()):
            return f"{case}; NaN; is something divided by zero, or sees a query no key, not itself?"
        where = _where_wrong(function, *given) if call is _with_attend else ""
        return f"{case}; other numbers; {where or 'compare with steps 1 to 4 of exercise 6'}"

    def explain(error: Exception) -> str:
        if why := explained(error, _layer_errors(first)) or _not_transposed(error, weights):
            return why
        if "multiplied" in str(error) and f"({tokens}x" not in str(error):
            return f"The tokens must stay the first axis when the heads are joined{CODE}.flatten(1)"
        return ""

    verdict = judge(
        *(name, function, right, (first, last, other), slips),
        f"{name}: equal to the model's layers 0 and {last.name[-1]}, and right for other sizes",
        call=asks,
        otherwise=otherwise,
        explain=explain,
        then=then,
    )
    if verdict.ok is False and (why := _wrong_below(function)):
        return Verdict(False, f"{name}: {why}")
    return verdict


# -- the bonus: a layer that is all there ---------------------------------------------------------


def _all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~causal_mask(len(q), len(k)), -INF)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


ALL_HEADS_SLIPS: Slips = slips_of(
    _all_heads,
    """
    .masked_fill(~causal_mask(len(q), len(k)), -INF) →
        queries see later tokens: nobody brings the causal mask here, you have to make it
    ~causal → causal
        the mask is inverted; True means that a query MAY attend to the key
    -INF → 0.0
        forbidden scores are 0, and exp(0) is 1; make them −∞ before the softmax
    k.repeat_interleave(group, 1) → k.repeat(1, group, 1)
    v.repeat_interleave(group, 1) → v.repeat(1, group, 1)
        each query head reads K/V head h % n; neighbours share one ▸ repeat_interleave
    k.repeat_interleave(group, 1) → k.repeat(1, group, 1)
        each query head reads the K of K/V head h % n; V is right ▸ repeat_interleave
    v.repeat_interleave(group, 1) → v.repeat(1, group, 1)
        each query head reads the V of K/V head h % n; K is right ▸ repeat_interleave
    / q.shape[-1] ** 0.5 →
        the scores are not divided by √D
    ** 0.5 →
        the scores are divided by D; divide by √D
    q.shape[-1] → len(q)
        the scores are divided by √T; divide by √D, the size of the last axis of q
    dim=-1 → dim=-2
        the softmax runs over the queries; it must run over the keys
    dim=-1 → dim=0
        the softmax runs over the heads; it must run over the keys
    """,
)


class _Counted(TorchFunctionMode):
    """Counts the calls of PyTorch inside the block."""

    count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _num_calls(function: Callable[..., Any], heads: int, kv_heads: int) -> int:
    _, *given = _other_sizes(heads, kv_heads)
    with _Counted() as calls:
        function(*given)
    return calls.count


def _loop_over_heads(function: Callable[..., Any]) -> str:
    """Does a layer call PyTorch more often where it has more heads? What to say then, else ""."""
    few = _num_calls(function, 8, 4)
    many = max(_num_calls(function, 16, kv_heads) for kv_heads in (8, 4))  # or larger groups
    if few == many:
        return ""
    return (
        f"right, but with a loop over heads, here or in what it calls: {few} calls of PyTorch with "
        f"8 query heads, {many} with 16; compute all heads in one call, as naive_attention in "
        "section 4 does"
    )


def _with_heads(
    function: Callable[..., Any], heads: Callable[..., Tensor]
) -> Callable[[Tensor, LayerWeights, Tensor], Tensor]:
    """A layer that brings its own attention, of one that is given it."""
    return lambda x, w, angles: function(x, w, angles, heads)


WHOLE_SLIPS: Slips = {
    **{words: _with_heads(own.layer, slip) for words, slip in ALL_HEADS_SLIPS.items()},
    **{words: _with_heads(slip, _all_heads) for words, slip in LAYER_SLIPS.items()},
}


def check_whole_layer(function: Callable[[Tensor, LayerWeights, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, hidden], w, angles [T, D / 2]) → [T, hidden], no `attend`.

    On the layers that `check_layer` takes, with its slips and those of attention.
    """
    return _judge_layer(
        *("whole_layer", function, _with_heads(own.layer, _all_heads), WHOLE_SLIPS),
        *(lambda function, _, *case: function(*case), _loop_over_heads),
    )


# -- induction ------------------------------------------------------------------------------------


def _score(shares: Tensor, period: int) -> Tensor:
    """The mean share that the queries of the second round give to their right keys."""
    queries = torch.arange(period, 2 * period)
    keys = queries - period + 1
    return shares[queries, keys].mean()


SCORE_SLIPS: Slips = slips_of(
    _score,
    """
    .mean() → .sum()
        the sum of the shares; take their mean
    .mean() → .mean() / 2
        half the score: only the queries of the second round count
    shares[queries, keys] → shares[queries][:, keys]
        the mean over all pairs of these queries and keys; one key belongs to each query
        ▸ shares[queries, keys] picks one share for each
    period + 1 → period
        the earlier place of the same token; the right place is the token after it
    period + 1 → period - 1
        the token before it; take the token after
    queries - period + 1 → queries
        what each token gives to itself
    queries - period + 1 → queries - 1
        what each token gives to the one before it
    shares[queries, keys] → shares[keys, queries]
        row and column are swapped; row = query
    arange(period, → arange(period - 1,
        it counts one query too many, the last of the first round; the second round begins at
        position `period`
    2 * period) → 2 * period - 1)
        one query is missing, the last; the second round is the positions period to 2·period − 1,
        and `arange` leaves out its end
    shares[queries, keys] → shares[queries].amax(-1)
        the largest share of each row; the right place is known, wherever the head looks
    """,
)


def check_induction_score(function: Callable[[Tensor, int], Tensor | float]) -> Verdict:
    """Check a learner's function(shares [2·period, 2·period], period) → mean share, 0..1."""
    scores = [_random(n, n).masked_fill(~causal_mask(n, n), -INF) for n in (10, 6)]

    def read(got: Any) -> float:
        if (value := number(got)) is None:
            kind = f"shape {list(got.shape)}" if isinstance(got, Tensor) else f"{got!r:.40}"
            raise CannotBe(
                f"it must return one number, got {kind}; pick one share for each query, and take "
                f"their mean{CODE}shares[queries, keys].mean()"
            )
        return value

    return judge(
        *("induction_score", function, _score),
        *([(one.softmax(-1), len(one) // 2) for one in scores], SCORE_SLIPS),
        "induction_score: right for 5 and for 3 tokens that are said twice",
        read=read,
        otherwise=lambda got, want, *_: (
            f"{got:.3f} instead of {want:.3f}; only the queries of the second round count, each "
            f"with one right place: the token after the earlier one of its kind{CODE}that is "
            "period − 1 places before the query"
        ),
        explain={
            IndexError: "period is 5 here, so the positions are 0 to 9; the second round is 5 to 9"
        },
    )


# -- bytes ----------------------------------------------------------------------------------------


def _kv_bytes(c: ModelConfig, itemsize: int) -> int:
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * itemsize


HIDDEN = "a K/V head has config.head_dim numbers, which need not be hidden_size / heads"
NO_QUERIES = "queries are not kept, so their number does not matter"

BYTES_SLIPS: Slips = {
    words: lambda c, size, times=times: _kv_bytes(c, size) * times(c)
    for words, times in {
        "K and V are two tensors: twice as much": lambda c: 1 / 2,
        "every layer has its own K and V: times the layers": lambda c: 1 / c.num_hidden_layers,
        "count K/V heads, not query heads": lambda c: c.group_size,
        "it counts query heads, not K/V heads, and K and V are two tensors; where two query heads "
        "share a K/V head, the two mistakes cancel": lambda c: c.group_size / 2,
        "the size of a group is the number of query heads that share a K/V head; count the K/V "
        "heads": lambda c: c.group_size / c.num_key_value_heads,
        "bytes, not bits": lambda c: 8,
        "bytes, not KiB": lambda c: 2**-10,
        "every K/V head has its own K and V: times the K/V heads": lambda c: (
            1 / c.num_key_value_heads
        ),
        "a K/V head has head_dim numbers: times head_dim": lambda c: 1 / c.head_dim,
        "right here by chance: in Qwen3-0.6B the hidden size, 1024, is K/V heads · head_dim, "
        "8 · 128; in other models it is not": lambda c: (
            c.hidden_size / (c.num_key_value_heads * c.head_dim)
        ),
        HIDDEN: lambda c: c.hidden_size // c.num_attention_heads / c.head_dim,
    }.items()
}


def check_kv_bytes(function: Callable[[ModelConfig, int], int], config: ModelConfig) -> Verdict:
    """Check a learner's function(config, itemsize) → bytes of K and V that one token leaves.

    With the config, with each number in it changed alone, and with all of them.
    """
    changes: dict[str, Any] = {
        "num_hidden_layers": config.num_hidden_layers + 5,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim + 16,
        "hidden_size": 3 * config.hidden_size,
        "num_attention_heads": 4 * config.num_key_value_heads,
    }
    changed = {replace(config, **{name: value}): name for name, value in changes.items()}
    cases = [(config, 2), (config, 4), *((c, 2) for c in changed), (replace(config, **changes), 2)]

    def otherwise(got: float, want: float, c: ModelConfig, _: int) -> str:
        if function(config, 2) == function(config, 4):
            return "the same for 2 and for 4 bytes per number; use the argument"
        if others := _configs_read_by(function):
            return f"it reads {others[0]}, use the argument config instead"
        name = changed.get(c)
        if name in ("hidden_size", "num_attention_heads"):
            return f"changes with {name}; {HIDDEN if name == 'hidden_size' else NO_QUERIES}"
        if name:
            return (
                f"right for this model; with {name}={changes[name]} it must be {want:,.0f}; is "
                f"its number typed in?{CODE}config.{name}"
            )
        return "count K and V, layers, K/V heads, and the numbers of a head"

    return judge(
        *("kv_bytes", function, _kv_bytes, cases, BYTES_SLIPS),
        f"kv_bytes: {_kv_bytes(config, 2):,} bytes per token; right for {len(cases) - 2} other "
        "configs as well",
        read=read_number("return one number"),
        where=lambda got, *_: f"{got:,.16g}",
        otherwise=otherwise,
        explain={
            "not subscriptable": "The numbers are its attributes: write config.head_dim",
            AttributeError: f"Its numbers are {', '.join(changes)}",
        },
    )


def _configs_read_by(function: Callable) -> list[str]:
    """The names of configs outside the function that its body reads."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    return [name for name in names if isinstance(known.get(name), ModelConfig)]
