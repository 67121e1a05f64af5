"""The checks of notebook 01, and what they know of usual mistakes."""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tutorial_engine.learn.exercises.facts import COLUMNS, AsIs, alike
from tutorial_engine.learn.exercises.judge import CODE, Slips, judge, read_number, slips_of
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, calls_open, names_in
from tutorial_engine.learn.parts import model as parts
from tutorial_engine.learn.parts.holder import number, whole
from tutorial_engine.learn.parts.model import Attend, LayerWeights, rms_norm
from tutorial_engine.model.attention import NaiveAttention, causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.rope import inverse_frequencies
from tutorial_engine.viz.words import counted

INF = math.inf


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _described(**given: Any) -> dict[str, object]:
    """Arguments as they are shown: small tensors are written out, larger ones told to be random."""
    return {
        name: value if not isinstance(value, Tensor) else _written_out(value)
        for name, value in given.items()
    }


def _written_out(tensor: Tensor) -> object:
    if tensor.dim() == 2 and len(tensor) < 5 and tensor.shape[1] < 5:
        return tensor
    if tensor.numel() <= 10:
        return tensor.tolist()
    return AsIs(f"a tensor {list(tensor.shape)} of numbers drawn at random")


def _row_there(x: Any, got: Tensor, want: Tensor) -> Tensor | None:
    """The row of x where two tensors of one shape differ first; of small ones all is shown."""
    if got.shape != want.shape or got.numel() <= COLUMNS:
        return None
    rows = zip(got.flatten(0, -2), want.flatten(0, -2), strict=True)
    return x.flatten(0, -2)[next(i for i, pair in enumerate(rows) if not alike(*pair))]


# -- attention ------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.T / k.shape[-1] ** 0.5
    shares = scores.masked_fill(~mask, -INF).softmax(dim=-1)
    return shares @ v


ATTENTION_SLIPS: Slips = slips_of(
    _attention,
    """
    @ v →
        gives the shares [q, kv] themselves; the output is the shares times the values ▸ shares @ v
    / k.shape[-1] ** 0.5 →
        does not divide the scores by √D; a score is q · k / √D ▸ k.shape[-1] ** 0.5
    / k.shape[-1] ** 0.5 →
    shares @ v → shares / k.shape[-1] ** 0.5 @ v
        divides the shares by √D, and not the scores; the shares of a query must add up to 1
    masked_fill(~mask, -INF).softmax(dim=-1) → softmax(dim=-1) * mask
        sets the shares of forbidden keys to 0 after the softmax; the others must still add up to 1
    masked_fill(~mask, -INF).softmax → softmax
        lets each query see every key, as if there were no mask; a key counts only where `mask` is
        True
    ~mask → mask
        lets a key count where `mask` is False; True means that the query may attend to the key
    scores.masked_fill(~mask, -INF) → (scores * mask).masked_fill(scores * mask == 0, -INF)
        takes an allowed key whose score is 0 for a forbidden one; `mask` alone says which keys are
        forbidden ▸ scores.masked_fill(~mask, ...)
    q @ k.T → q @ v.T
    shares @ v → shares @ k
        makes the scores from v and the output from k; scores come from k, and the output comes from
        v
    dim=-1 → dim=0
        takes the softmax over the queries; it runs over the keys, so that each row adds up to 1
    -INF → 0.0
        gives a forbidden key the score 0, and not −∞; exp(0) is 1, so it still gets a share
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


def _sums(out: Tensor, *case: Tensor) -> str | None:
    """What the shares of the first query whose sum is not 1 add up to."""
    shares = _shares_in(out, *case)
    wrong = [] if shares is None else [x for x in shares.sum(dim=1).tolist() if abs(x - 1) > 5e-3]
    return f"{wrong[0]:.4g}, not 1" if wrong else None


def _forbidden(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> str | None:
    """The largest share of a key that the mask forbids."""
    shares = _shares_in(out, q, k, v, mask)
    largest = 0.0 if shares is None else float((shares * ~mask).max())
    return f"{largest:.4g}" if largest > 1e-3 else None


def _divided_by(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> str | None:
    """What the scores were divided by before a softmax, where all shares tell the same."""
    shares = _shares_in(out, q, k, v, mask)
    if shares is None or bool((shares[mask] <= 0).any()):
        return None
    found = []
    for scores, row, seen in zip(q @ k.T, shares, mask, strict=True):
        apart = scores[seen] - scores[seen][0]
        logs = (row[seen] / row[seen][0]).log()
        found += (apart / logs)[apart != 0].tolist()
    root = k.shape[-1] ** 0.5
    same = bool(found) and max(found) - min(found) < 1e-3 * max(found)
    if not same or abs(found[0] - root) < 1e-3 * root:
        return None
    return f"{found[0]:.4g}; √D is {root:.4g}"


def _with_unit_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> dict[str, object]:
    """A case as it is shown: of unit vectors in v it says so."""
    if not alike(v, torch.eye(*v.shape)):
        return {"q": q, "k": k, "v": v, "mask": mask}
    what = AsIs("unit vectors: the output is the shares (attention weights)")
    return {"q": q, "k": k, "mask": mask, "v": what}


# the third key is forbidden to the first query, and has the largest score; the values are unit
# vectors, so that an output is its shares
SMALL = (
    torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 1.0]]),
    torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0]]),
    torch.eye(3, 4),
    torch.tensor([[True, True, False], [True, True, True]]),
)
# a forbidden score of −1000, say, is not low enough here: the allowed one is −2000
LOW = (
    torch.ones(1, 4),
    torch.tensor([[-1000.0] * 4, [0.0] * 4, [0.0] * 4]),
    torch.eye(3, 4),
    torch.tensor([[True, False, False]]),
)


BY_EXP = (
    "  Where all allowed scores of a query are far lower than 0, or than a forbidden one, yours\n"
    "  divides 0 by 0. (And the `exp` of a number above 88 is inf.) `softmax` first takes the\n"
    "  largest allowed score off: no share changes."
)


def _by_zero(function: Callable[..., Tensor], *case: Tensor) -> bool:
    """Does a softmax by exp, as section 4 writes it, divide 0 by 0 here?"""
    try:
        out = function(*case)
    except ZeroDivisionError:
        return True
    return isinstance(out, Tensor) and bool(out.isnan().all())


def _may_be_nan(function: Callable[..., Tensor], q: Tensor, *case: Tensor) -> Any:
    """An answer; for LOW a softmax by exp may divide 0 by 0: no mistake."""
    if torch.equal(q, LOW[0]) and _by_zero(function, *deepcopy((q, *case))):
        return LOW[2][:1]
    return function(q, *case)


def check_attention(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(q [q, D], k [kv, D], v [kv, D], mask [q, kv]) → out [q, D]."""
    cases = [
        (_random(n, size), _random(kv, size), _random(kv, size) + 1, mask)
        for n, kv, size in ((2, 3, 4), (1, 3, 4), (3, 5, 8), (6, 6, 8))
        for mask in (causal_mask(n, kv), _some_allowed(n, kv))
    ]
    cases[2][1][0] = 0  # the key that the only query may see has the score 0
    verdict = judge(
        *("attention", function, parts.attention, [SMALL, *cases, LOW], ATTENTION_SLIPS),
        "attention: equal to the package's, 1 to 6 queries, D=8 and 4, causal and random masks",
        call=_may_be_nan,
        inputs=_with_unit_values,
        also={
            "a query's shares add up to": _sums,
            "a forbidden key has the share": _forbidden,
            "the scores are divided by": _divided_by,
        },
    )
    if verdict.ok and _by_zero(function, *deepcopy(LOW)):
        return Verdict(True, f"{verdict.message}\n{BY_EXP}")
    return verdict


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
        gives True where a query may NOT attend; True means that it may
    return (back >= 0) & (back < window) → return ((back >= 0) & (back < window)).T
        has a row for each key and a column for each query; a row is a query, and a column is a key
    query - key → key - query
        lets a query see itself and keys after it; a token sees itself and tokens before it
    kv_len - q_len, kv_len) → q_len)
        puts the queries at the FIRST positions; they stand at the last `q_len` of the `kv_len`
        positions ▸ the first one stands at kv_len - q_len
    kv_len - q_len, kv_len) → kv_len)
        has a row for each of the `kv_len` positions; only the last `q_len` of them have a query
    (back >= 0) & →
        lets a query see all keys after it as well; a token sees only itself and tokens before it
    & (back < window) →
        lets a query see all keys before it; a token sees only itself and the `window - 1` tokens
        before it
    back >= 0 → back > 0
        lets no query see itself; a token sees itself and the `window - 1` tokens before it
    back < window → back <= window
        lets a query see itself and `window` keys before it, one too many; the token itself counts,
        too
    back < window → back < window - 1
        lets a query see one key too few; a token sees itself and the `window - 1` tokens before it
    """,
)


def check_window_mask(function: Callable[[int, int, int], Tensor]) -> Verdict:
    """Check a learner's function(q_len, kv_len, window) → bool [q_len, kv_len]."""
    cases = (
        (2, 3, 2),
        (2, 3, 1),  # each token sees itself alone
        (3, 3, 2),  # the first query stands at position 0: fewer keys than the window
        (1, 5, 3),  # one query: the last token, as in decoding
        (3, 7, 4),
        (2, 2, 9),  # a window wider than all keys
    )
    return judge(
        *("window_mask", function, parts.window_mask, cases, MASK_SLIPS),
        "window_mask: right for all queries at once, for one, for some, and for a wide window",
        also={"queries stand at": lambda _, q_len, kv_len, __: list(range(kv_len - q_len, kv_len))},
    )


# -- kv_head --------------------------------------------------------------------------------------

HEAD_SLIPS: Slips = slips_of(
    parts.kv_head,
    """
    h // (num_heads // num_kv_heads) → h % num_kv_heads
        gives h % num_kv_heads, so that neighbours read different heads; the query heads of a group
        are neighbours
    (num_heads // num_kv_heads) → num_kv_heads
        gives h // num_kv_heads; what counts is how many query heads are in a group
        ▸ num_heads // num_kv_heads
    h // (num_heads // num_kv_heads) → num_heads // num_kv_heads
        gives the size of a group, whatever `h` is; the K/V head that `h` reads is asked for
    h // (num_heads // num_kv_heads) → h
        gives the query head itself; all query heads of a group read the same K/V head
    (num_heads // num_kv_heads) → (num_heads // num_kv_heads) + 1
        gives what would be right if a group had one head more; all groups together have `num_heads`
        query heads
    h // (num_heads // num_kv_heads) → round(h / (num_heads // num_kv_heads))
        rounds h / group to the nearest number; all heads of a group get the same number, so it is
        rounded down
    (num_heads // num_kv_heads) → 3
        takes groups of 3 heads, whatever the numbers of heads are; both numbers are arguments
    h // (num_heads // num_kv_heads) → h % (num_heads // num_kv_heads)
        gives the place of `h` inside its group; the number of the group is asked for
    h // (num_heads // num_kv_heads) → h - h % (num_heads // num_kv_heads)
        gives the first query head of the group of `h`; the K/V head of the group is asked for
    """,
)


def _every_head(function: Callable[..., Any], num_heads: int, num_kv_heads: int) -> Any:
    """The answers for all heads; None if one is."""
    found = []
    for h in range(num_heads):
        answer = function(h, num_heads, num_kv_heads)
        if answer is None or answer is ...:
            return None
        if (head := whole(answer)) is None:
            asked = f"kv_head({h}, {num_heads}, {num_kv_heads})"
            kind = type(answer).__name__
            raise CannotBe(f"{asked} must be an int, got {answer!r:.40}, of type {kind}")
        found.append(head)
    return found


def check_kv_head(function: Callable[[int, int, int], int]) -> Verdict:
    """Check a learner's function(h, num_heads, num_kv_heads) → the K/V head of query head h."""
    cases = (
        (6, 2),
        (4, 4),  # each query head has a K/V head of its own
        (8, 1),  # all share one
        (16, 8),
    )
    return judge(
        *("kv_head", function, parts.kv_head, cases, HEAD_SLIPS),
        "kv_head: 6/2, 16/8, 8/1 and 4/4 heads",
        call=_every_head,
        inputs=lambda heads, kv_heads: {
            "h": AsIs(f"each of 0 to {heads - 1}"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
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
        uses the angles themselves; a pair is turned by their cosines and sines
        ▸ angles.cos() and angles.sin()
    angles.sin() → -angles.sin()
        turns each pair the wrong way round, by −φ; a turned pair is (a cos φ − b sin φ, b cos φ + a
        sin φ)
    x.chunk(2, dim=-1) → (x[..., 0::2], x[..., 1::2])
    cat((a, b), dim=-1) → stack((a, b), dim=-1).flatten(-2)
        pairs neighbours, (0 1)(2 3); half-split pairs are i with i + D/2
    cat((a, b), dim=-1) → stack((a, b), dim=-1).flatten(-2)
        turns the right pairs, but joins the halves in turns, a b a b; all a come before all b
        ▸ torch.cat((a, b), dim=-1)
    x.chunk(2, dim=-1) → (x[..., 0::2], x[..., 1::2])
        turns neighbours as pairs, (0 1)(2 3), and gives them as halves; half-split pairs are i with
        i + D/2 ▸ x.chunk(2, dim=-1)
    angles.cos() → angles.repeat_interleave(2, -1).cos()
    angles.sin() → angles.repeat_interleave(2, -1).sin()
    a * cos - b * sin, b * cos + a * sin → (x * cos + torch.cat((-b, a), -1) * sin).chunk(2, -1)
        turns the numbers i and i + D/2 by two different angles; both are turned by angle i
        ▸ torch.cat((angles, angles), dim=-1)
    a * cos - b * sin, b * cos + a * sin → a * sin - b * cos, b * sin + a * cos
        gives a sin φ − b cos φ, with cos and sin swapped; a turned pair begins with a cos φ − b sin
        φ
    return torch.cat((a, b), dim=-1) → return x
        gives x itself; each pair is turned by its angle φ
    return torch.cat((a, b), dim=-1) → return a, b
        gives the two halves; one tensor of the shape of `x` is asked for
        ▸ torch.cat((a, b), dim=-1)
    (a, b), dim=-1 → (a, b)
        joins the halves along the tokens; both halves belong to the last axis
        ▸ torch.cat((a, b), dim=-1)
    cat((a, b), dim=-1) → stack((a, b), dim=-1)
        stacks the halves along a new last axis; the result has the shape of `x`
        ▸ torch.cat((a, b), dim=-1)
    b * cos + a * sin → b
        leaves the second half as it is, and the first half is right; the second is b cos φ + a sin
        φ
    b * cos + a * sin → a * cos + b * sin
        gives a cos φ + b sin φ in the second half, and the first half is right; the second is b cos
        φ + a sin φ
    b * cos + a * sin → a * sin - b * cos
        gives a sin φ − b cos φ in the second half, and the first half is right; the second is b cos
        φ + a sin φ
    a, b = x → angles = angles.deg2rad(); a, b = x
        turns by φ · π/180, as if the angles were degrees; `angles` are radians
    a, b = a * cos - b * sin, b → a = a * cos - b * sin; b = b
        makes the second half with the NEW first half; both halves are made from the old a and b
        ▸ new_a = a * cos - b * sin
    (a, b) → (b, a)
        gives the two halves in the other order; the turned a are the first half
    - b * sin → + b * sin
        gives a cos φ + b sin φ in the first half, and the second half is right; the first is a cos
        φ − b sin φ
    + a * sin → - a * sin
        gives b cos φ − a sin φ in the second half, and the first half is right; the second is b cos
        φ + a sin φ
    """,
)


# one head of one token: the first half alone, and the second
FIRST_HALF, SECOND_HALF = (torch.tensor([[x]]) for x in ([1.0, 2, 0, 0], [0.0, 0, 1, 2]))


def check_rope(function: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, heads, D], angles [T, D / 2]) → x turned (half-split)."""
    cases = [
        (FIRST_HALF, torch.zeros(1, 2)),  # position 0: nothing turns
        (FIRST_HALF, torch.tensor([[1.0, 2.0]])),
        (SECOND_HALF, torch.tensor([[1.0, 2.0]])),
    ]
    for positions, heads, size in (
        (torch.arange(2), 3, 4),
        (torch.arange(6), 2, 8),
        (torch.tensor([7]), 1, 8),  # one token that does not stand at position 0
    ):
        angles = positions[:, None] * inverse_frequencies(size, 10000.0)
        cases.append((_random(len(positions), heads, size), angles))
    return judge(
        *("rope", function, parts.rope, cases, ROPE_SLIPS),
        "rope: equal to the package's, half-split pairs, 6, 2 and 1 tokens",
        inputs=lambda x, angles: _described(x=x, angles=angles),
        also={
            "there, in yours": lambda got, *case: _row_there(got, got, parts.rope(*case)),
            "there, expected": lambda got, *case: _row_there(
                right := parts.rope(*case), got, right
            ),
        },
    )


# -- project --------------------------------------------------------------------------------------

# what q, k or v is → how it is made of the right one [T, heads, D], and of the right q
PROJECT_CHANGES: Slips = {
    "without heads, [T, heads · D]; the last axis is cut into heads: [T, heads, D]": (
        lambda x, q: x.flatten(1)
    ),
    "with the heads first, [heads, T, D]; the tokens are the first axis": (
        lambda x, q: x.transpose(0, 1)
    ),
    "with the last two axes swapped, [T, D, heads]; the numbers of a head are the last axis": (
        lambda x, q: x.mT
    ),
    "cut into `head_dim` heads, [T, D, heads]; a head has `head_dim` numbers": (
        lambda x, q: x.flatten(1).unflatten(-1, (x.shape[-1], -1))
    ),
    "as [heads, T, D], with numbers of several tokens in a head; only the last axis is cut": (
        lambda x, q: x.reshape(x.shape[1], -1, x.shape[-1])
    ),
    "with every n-th number in a head; a head is `head_dim` numbers that lie side by side": (
        lambda x, q: x.flatten(1).unflatten(-1, (x.shape[-1], -1)).mT
    ),
    "in the right shape, but with numbers of several tokens in one; only the last axis is cut"
    f"{CODE}.unflatten(-1, (-1, head_dim))": lambda x, q: x.reshape(
        x.shape[1], -1, x.shape[-1]
    ).transpose(0, 1),
    "once for each query head; the answer has the K/V heads alone, and attention shares them": (
        lambda x, q: x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
    ),
}


def _changed(which: str, change: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """The right projections, some of them changed."""

    def project(*case: Any) -> list[Tensor]:
        qkv = parts.project(*case)
        return [
            change(x, qkv[0]) if name in which else x for name, x in zip("qkv", qkv, strict=True)
        ]

    return project


def _in_order(*order: int) -> Callable[..., list[Tensor]]:
    return lambda *case: [parts.project(*case)[i] for i in order]


PROJECT_SLIPS: Slips = {
    **{
        f"gives {which} {words}": _changed(which, change)
        for words, change in PROJECT_CHANGES.items()
        for which in ("q", "k", "v", "k and v", "q, k and v")
        if "q" not in which or "once for each" not in words
    },
    "gives k and v swapped; k is made with `w_k`, v with `w_v`, and the order is q, k, v": (
        _in_order(0, 2, 1)
    ),
    "gives q and k swapped; q is made with `w_q`, k with `w_k`, and the order is q, k, v": (
        _in_order(1, 0, 2)
    ),
    "gives k in the place of v, too; v is made with `w_v`": _in_order(0, 1, 1),
    "gives v in the place of k, too; k is made with `w_k`": _in_order(0, 2, 2),
}

# one token, two query heads and one K/V head of two numbers
TWO_HEADS = (
    torch.tensor([[1.0, 0.0, 2.0]]),
    torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 1.0], [2.0, 4.0, 1.0], [1.0, 5.0, 2.0]]),
    torch.tensor([[0.0, 6.0, 3.0], [3.0, 7.0, 2.0]]),
    torch.tensor([[0.0, 8.0, 4.0], [1.0, 9.0, 4.0]]),
    2,
)


def check_project(function: Callable[..., Sequence[Tensor]]) -> Verdict:
    """Check a learner's function(x, w_q, w_k, w_v, head_dim) → q [T, H, D], k, v [T, H_kv, D]."""
    cases: list[tuple[Any, ...]] = [TWO_HEADS]
    for heads, kv_heads, size, hidden in ((4, 2, 8, 24), (3, 1, 4, 12)):
        w_q, w_k, w_v = (_random(n * size, hidden) + n for n in (heads, kv_heads, kv_heads))
        cases.append((_random(5, hidden), w_q, w_k, w_v.flip(0), size))

    def read(got: Any) -> Sequence[Any]:
        got = tuple(got) if isinstance(got, Iterator | list) else got
        if isinstance(got, tuple) and len(got) == 3:
            for name, x in zip("qkv", got, strict=True):
                if not isinstance(x, Tensor):
                    kind = type(x).__name__
                    raise CannotBe(f"{name} must be a tensor [T, heads, D], got a {kind}")
            return got
        is_one = isinstance(got, Tensor)
        kind = f"one tensor {list(got.shape)}" if is_one else f"a {type(got).__name__}"
        raise CannotBe(f"it must return three tensors (q, k, v), got {kind}")

    def wrong_ones(got: Sequence[Any], *case: Any) -> AsIs:
        three = zip("qkv", got, parts.project(*case), strict=True)
        return AsIs(", ".join(name for name, mine, right in three if not alike(mine, right)))

    return judge(
        *("project", function, parts.project, cases, PROJECT_SLIPS),
        "project: 4 query and 2 K/V heads of 8 numbers, then 3 and 1 of 4",
        read=read,
        inputs=lambda x, w_q, w_k, w_v, size: _described(
            x=x, w_q=w_q, w_k=w_k, w_v=w_v, head_dim=size
        ),
        also={"other than expected": wrong_ones},
    )


# -- layer ----------------------------------------------------------------------------------------

TEXT_IDS = (312, 265, 65, 401, 97, 300, 77, 258, 11, 500)  # any tokens do; ten of them


def _layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    h = rms_norm(x, w.input_norm)
    q, k, v = parts.project(h, w.q, w.k, w.v, len(w.q_norm))
    q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)
    q, k = parts.rope(q, angles), parts.rope(k, angles)
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
        goes on with attention's result alone; this result is added to `x` (the first residual)
    return y + out → return out
        gives the MLP's result alone; this result is added to x + attention (the second residual)
    y = x + mixed → y = mixed
    return y + out → return out
        leaves out both residuals; attention's result and the MLP's result are added to the stream
    return y + out → return x + y + out
        adds `x` twice; x + attention has it already
    y + out → x + out
        gives x + MLP, without attention; the MLP's result is added to x + attention
    (y, → (x,
        gives the MLP the norm of `x`; the MLP must read the norm of x + attention
    h = rms_norm(x, w.input_norm) → x = h = rms_norm(x, w.input_norm)
        adds attention to the normed `x`; attention reads the norm, and is added to `x` itself
    h = rms_norm(y, w.mlp_norm) → y = h = rms_norm(y, w.mlp_norm)
        adds the MLP's result to the normed sum; the MLP reads the norm, and is added to the sum
        itself
    h = rms_norm(x, w.input_norm) → x = h = rms_norm(x, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → y = h = rms_norm(y, w.mlp_norm)
        adds both results to normed vectors; attention and MLP read a norm, and are added to the
        stream itself
    h = rms_norm(x, w.input_norm) → h = x
    x + mixed → x + rms_norm(mixed, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
    y + out → y + rms_norm(out, w.mlp_norm)
        norms after attention and after the MLP; the norms come before them (pre-norm)
    h = rms_norm(x, w.input_norm) → h = x
    x + mixed → rms_norm(x + mixed, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
    y + out → rms_norm(y + out, w.mlp_norm)
        norms after each sum, as in 2017; the norms come before attention and before the MLP
        (pre-norm)
    h = rms_norm(x, w.input_norm) → h = x
        gives attention `x` itself; q, k and v are made of the normed `x`
        ▸ rms_norm(x, w.input_norm)
    h = rms_norm(y, w.mlp_norm) → h = y
        gives the MLP the stream itself; the MLP reads its norm, with `w.mlp_norm`
    h = rms_norm(y, w.mlp_norm) →
        gives the MLP the first norm, of `x` with `w.input_norm`; the MLP reads the norm of x +
        attention
    h = rms_norm(y, w.mlp_norm) → h = x
        gives the MLP `x` itself; the MLP reads the norm of x + attention
    x, w.input_norm → x, w.mlp_norm
    y, w.mlp_norm → y, w.input_norm
        swaps `w.input_norm` and `w.mlp_norm`; the first belongs to attention, and the second to the
        MLP
    w.mlp_norm → w.input_norm
        uses `w.input_norm` in both norms; the MLP has a norm of its own, `w.mlp_norm`
    q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm) →
        leaves out `w.q_norm` and `w.k_norm`; each head of q and of k is normed before it is turned
    rms_norm(q, w.q_norm) → q
        leaves out `w.q_norm`; each head of q is normed before it is turned
    rms_norm(k, w.k_norm) → k
        leaves out `w.k_norm`; each head of k is normed before it is turned
    k, w.k_n → k, w.q_n
        norms k with `w.q_norm`; k has a norm of its own, `w.k_norm`
    q, w.q_n → q, w.k_n
    k, w.k_n → k, w.q_n
        swaps `w.q_norm` and `w.k_norm`; `w.q_norm` belongs to q, and `w.k_norm` to k
    q, k = parts.rope(q, angles), parts.rope(k, angles) →
        turns neither q nor k; without rope attention does not see how far apart tokens stand
    parts.rope(q, angles) → q
        does not turn q; q and k are both turned, so that a score depends on how far apart they
        stand
    parts.rope(k, angles) → k
        does not turn k; q and k are both turned, so that a score depends on how far apart they
        stand
    attend(q, k, v) → attend(q, k, parts.rope(v, angles))
        turns v as well; only q and k are turned, because the scores alone need the positions
    parts.rope(q, angles), parts.rope(k, angles) → q, k
    rms_norm(q, → rms_norm(parts.rope(q, angles),
    rms_norm(k, → rms_norm(parts.rope(k, angles),
        turns q and k before their norms; they are normed first, and then turned
    attend(q, k, v) → attend(q, k, rms_norm(v, w.k_norm))
        norms v as well, with `w.k_norm`; only q and k have a norm
    attend(q, k, v) → attend(q, v, k)
        gives attention k and v swapped; scores come from k, and the output comes from v
    w.k, w.v → w.v, w.k
        swaps `w.k` and `w.v`; k is made with `w.k`, and v with `w.v`
    attend(q, k, v) → (attend(q, k, v) / len(w.q_norm) ** 0.5)
        divides attention's result by √D; only the scores are divided by √D
    .flatten(1) → .mT.flatten(1)
        joins the heads number by number; the numbers of a head stay side by side ▸ .flatten(1)
    .flatten(1) → .transpose(0, 1).reshape(len(x), -1)
        mixes tokens where the heads are joined; a token's heads are joined to one row ▸ .flatten(1)
    x + mixed → x
        leaves out attention, and only the MLP is there; attention's result is added to `x`
    y + out → y
        leaves out the MLP, and only attention is there; the MLP's result is added to x + attention
    gate, up = → up, gate =
        takes silu of up, and not of gate; SwiGLU is silu(gate) · up ▸ silu(h @ w.gate.T)
    F.silu(gate) * up → F.silu(gate * up)
        takes silu of gate · up; SwiGLU is silu(gate) · up ▸ silu(h @ w.gate.T)
    F.silu(gate) → (F.silu(h) @ w.gate.T)
        takes silu before `w.gate`; SwiGLU takes it of what `w.gate` gives ▸ silu(h @ w.gate.T)
    F.silu(gate) * up → F.silu(gate) + up
        adds silu(gate) and up; SwiGLU multiplies them
    F.silu → F.gelu
        has gelu in the place of silu; SwiGLU takes silu(g) = g · sigmoid(g)
    F.silu(gate) → gate
        leaves out silu; SwiGLU is silu(gate) · up ▸ silu(h @ w.gate.T)
    F.silu → F.sigmoid
        has sigmoid(g) in the place of silu(g); silu(g) is g · sigmoid(g)
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
    """Small layers of which parts add nothing; two of the model that ships; one of other sizes."""
    model, batch, found = tiny_model(), Batch.from_sequences([TEXT_IDS]), []
    x = model.model.embed_tokens(batch.input_ids)
    angles = batch.positions[:, None] * model.model.rotary_emb.inv_freq
    for i, layer in enumerate(model.model.layers):
        found.append(LayerCase(f"layer {i}", x, LayerWeights.of(layer), angles))  # type: ignore[arg-type]
        x = _with_attend(parts.layer, *found[-1])
    return [*_small_layers(), found[0], found[-1], _other_sizes()]


SMALL_X = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])


def _small_layers() -> list[LayerCase]:
    """Two tokens of three numbers: x alone, with attention alone, with the MLP alone."""
    weights = _random_weights(heads=4, kv_heads=2, hidden=3, size=2, wide=5)
    no_o, no_down = torch.zeros_like(weights.o), torch.zeros_like(weights.down)
    each = {
        "w.o = w.down = 0, so that nothing is added to x": {"o": no_o, "down": no_down},
        "w.down = 0, so that the MLP adds nothing; the others drawn at random": {"down": no_down},
        "w.o = 0, so that attention adds nothing; the others drawn at random": {"o": no_o},
    }
    angles = torch.tensor([[0.0], [1.0]])
    return [
        LayerCase(words, SMALL_X, weights._replace(**zero), angles) for words, zero in each.items()
    ]


def _random_weights(heads: int, kv_heads: int, hidden: int, size: int, wide: int) -> LayerWeights:
    shapes = {"input_norm": [hidden], "mlp_norm": [hidden], "q_norm": [size], "k_norm": [size]}
    shapes |= {"q": [heads * size, hidden], "o": [hidden, heads * size]}
    shapes |= {"k": [kv_heads * size, hidden], "v": [kv_heads * size, hidden]}
    shapes |= {"gate": [wide, hidden], "up": [wide, hidden], "down": [hidden, wide]}
    draw = torch.Generator().manual_seed(1)
    return LayerWeights(
        **{
            name: torch.randn(shape, generator=draw) / shape[-1] ** 0.5
            if shape[1:]
            else torch.rand(shape, generator=draw) + 0.5
            for name, shape in shapes.items()
        }
    )


def _other_sizes(heads: int = 8, kv_heads: int = 4) -> LayerCase:
    """Seven tokens from position 3 on, in a layer where nothing has the size that the model has."""
    hidden, size, tokens = 40, 18, 7
    angles = torch.arange(3, 3 + tokens)[:, None] * inverse_frequencies(size, 10000.0)
    weights = _random_weights(heads, kv_heads, hidden, size, wide=56)
    heads_are = f"{heads} query and {kv_heads} K/V heads of {size} numbers"
    return LayerCase(f"random numbers: {heads_are}", _random(tokens, hidden), weights, angles)


def _with_attend(
    function: Callable[..., Any], name: str, x: Tensor, w: LayerWeights, angles: Tensor
) -> Any:
    batch, backend = Batch.from_sequences([range(len(x))]), NaiveAttention()

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: object, **named: object) -> Tensor:
        if more or named:
            count = 3 + len(more) + len(named)
            raise TypeError(f"attend takes q, k and v, and has the mask already; it got {count}")
        if q.dim() == k.dim() == 3 and q.shape[1] < k.shape[1]:
            few, many = q.shape[1], k.shape[1]
            raise CannotBe(f"attend must get q, k and v; its q has {few} heads, and its k {many}")
        return backend.attend(0, q, k, v, batch)

    return function(x, w, angles, attend)


def _given_to_attend(function: Callable[..., Any], *case: Any) -> AsIs:
    """Which of the q, k and v that a layer gives to attend are the right ones."""
    heard: list[tuple[Tensor, ...]] = []

    def attend(*q_k_v: Tensor) -> Tensor:
        heard.append(q_k_v)
        return q_k_v[0]

    layers: tuple[Callable[..., Any], ...] = (parts.layer, function)
    for layer in layers:
        layer(*case, attend)
    if len(heard) != 2:
        return AsIs(f"{counted(len(heard) - 1, 'call')} in place of one")
    three = [*zip("qkv", *heard, strict=True)]
    return AsIs(
        "; ".join(
            f"{name} as expected"
            if alike(got, want)
            else f"{name} with other numbers"
            if got.shape == want.shape
            else f"{name} {list(got.shape)}, expected {list(want.shape)}"
            for name, want, got in three
        )
    )


def _wrong_below(function: object) -> str:
    """The exercise that a layer calls and that is not right, with what is wrong; "" if none."""
    names, known = names_in(function), getattr(function, "__globals__", {})
    for name, check in (("project", check_project), ("rope", check_rope), ("layer", check_layer)):
        if name in names and callable(known.get(name)):
            verdict = check(known[name])
            if verdict.ok is None:
                return calls_open([name])
            if verdict.ok is False:
                return f"it calls your {name}, which is not ✔ yet:\n{verdict.message}"
    return ""


def check_layer(function: Callable[[Tensor, LayerWeights, Tensor, Attend], Tensor]) -> Verdict:
    """Check a learner's function(x [T, hidden], w, angles [T, D / 2], attend) → [T, hidden].

    With small random weights, with those of two layers of the model that ships, against these
    layers themselves, and with random weights of other sizes.
    """
    return _judge_layer("layer", function, parts.layer, LAYER_SLIPS, _with_attend)


@torch.no_grad()
def _judge_layer(
    name: str,
    function: Callable[..., Any],
    right: Callable[..., Any],
    slips: Slips,
    call: Callable[..., Any],
    then: Callable[[Any], str] | None = None,
) -> Verdict:
    """`call(function, name of the case, x, weights, angles)` asks a layer."""
    cases = _layers()
    last = cases[-2].name[-1]

    def inputs(case: str, x: Tensor, _: LayerWeights, angles: Tensor) -> dict[str, object]:
        if case.startswith("w."):
            return {"x": x, "angles": angles, "w": AsIs(case)}
        what = case if case.startswith("random") else f"the weights of {case} of the model"
        x_is = f"a tensor {list(x.shape)}: {len(x)} tokens that stand before this layer"
        return {"x": AsIs(x_is), "angles": AsIs(f"a tensor {list(angles.shape)}"), "w": AsIs(what)}

    gives = {"attend is given": lambda _, __, *case: _given_to_attend(function, *case)}
    verdict = judge(
        *(name, function, right, cases, slips),
        f"{name}: equal to the model's layers 0 and {last}, and right for other sizes",
        call=call,
        inputs=inputs,
        also=gives if call is _with_attend else {},
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
        lets queries see later tokens, as if there were no causal mask; a query sees itself and
        earlier tokens
    ~causal → causal
        lets queries see later tokens alone; a query sees itself and earlier tokens
    -INF → 0.0
        counts a forbidden key as one with the score 0; exp(0) is 1, and a forbidden key has the
        share 0
    k.repeat_interleave(group, 1) → k.repeat(1, group, 1)
    v.repeat_interleave(group, 1) → v.repeat(1, group, 1)
        lets query head h read K/V head h % n; the query heads of a group are neighbours
        ▸ repeat_interleave
    k.repeat_interleave(group, 1) → k.repeat(1, group, 1)
        lets query head h read the K of K/V head h % n, and the right V; the heads of a group are
        neighbours ▸ repeat_interleave
    v.repeat_interleave(group, 1) → v.repeat(1, group, 1)
        lets query head h read the V of K/V head h % n, and the right K; the heads of a group are
        neighbours ▸ repeat_interleave
    / q.shape[-1] ** 0.5 →
        does not divide the scores by √D; a score is q · k / √D
    ** 0.5 →
        divides the scores by D; a score is q · k / √D
    q.shape[-1] → len(q)
        divides the scores by √T; a score is q · k / √D, and D is the size of a head
    dim=-1 → dim=-2
        takes the softmax over the queries; the shares of one query add up to 1 over the keys
    dim=-1 → dim=0
        takes the softmax over the heads; the shares of one query add up to 1 over the keys
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
        f"right, but the more heads, the more calls of PyTorch: {few} with 8 query heads, {many} "
        "with 16; it must compute all heads in one call, as naive_attention in section 4 does"
    )


def _with_heads(
    function: Callable[..., Any], heads: Callable[..., Tensor]
) -> Callable[[Tensor, LayerWeights, Tensor], Tensor]:
    """A layer that brings its own attention, of one that is given it."""
    return lambda x, w, angles: function(x, w, angles, heads)


WHOLE_SLIPS: Slips = {
    **{words: _with_heads(parts.layer, slip) for words, slip in ALL_HEADS_SLIPS.items()},
    **{words: _with_heads(slip, _all_heads) for words, slip in LAYER_SLIPS.items()},
}


def check_whole_layer(function: Callable[[Tensor, LayerWeights, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, hidden], w, angles [T, D / 2]) → [T, hidden], no `attend`.

    On the layers that `check_layer` takes, with its slips and those of attention.
    """
    return _judge_layer(
        *("whole_layer", function, _with_heads(parts.layer, _all_heads), WHOLE_SLIPS),
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
        gives the sum of the shares; their mean is asked for
    .mean() → .mean() / 2
        gives half the score; the mean is over the `period` queries of the second round
    shares[queries, keys] → shares[queries][:, keys]
        gives the mean over all pairs of these queries and keys; each query has one right key
        ▸ shares[queries, keys] picks one share for each
    period + 1 → period
        gives the mean share for the earlier place of the same token; the right place is the token
        after it
    period + 1 → period - 1
        gives the mean share for the token BEFORE the earlier place; the right place is the token
        after it
    queries - period + 1 → queries
        gives the mean share of each token for itself; the right place is the token after its
        earlier place
    queries - period + 1 → queries - 1
        gives the mean share for the token just before; the right place is the one after the earlier
        place
    shares[queries, keys] → shares[keys, queries]
        reads a row as a key and a column as a query; a row is a query, and a column is a key
    arange(period, → arange(period - 1,
        counts one query too many, the last of the first round; the second round begins at position
        `period`
    arange(period, → arange(period + 1,
        leaves out the first query, position `period`; the second round has `period` queries
    2 * period) → 2 * period - 1)
        leaves out the last query, position 2·period − 1; the second round has `period` queries
    shares[queries, keys] → shares[queries].amax(-1)
        gives the mean of the largest share in each row; the right place is known, wherever the head
        looks
    """,
)


# two tokens said twice: the right keys of the queries 2 and 3 are 1 and 2
TWICE_TWO = torch.tensor(
    [[1.0, 0.0, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0], [0.1, 0.7, 0.2, 0.0], [0.0, 0.2, 0.3, 0.5]]
)


def check_induction_score(function: Callable[[Tensor, int], Tensor | float]) -> Verdict:
    """Check a learner's function(shares [2·period, 2·period], period) → mean share, 0..1."""
    scores = [_random(n, n).masked_fill(~causal_mask(n, n), -INF) for n in (6, 10)]

    def read(got: Any) -> float:
        if (value := number(got)) is None:
            kind = f"shape {list(got.shape)}" if isinstance(got, Tensor) else f"{got!r:.40}"
            raise CannotBe(f"it must return one number, got {kind}")
        return value

    return judge(
        *("induction_score", function, _score),
        *([(TWICE_TWO, 2), *((x.softmax(-1), len(x) // 2) for x in scores)], SCORE_SLIPS),
        "induction_score: right for 5 and for 3 tokens that are said twice",
        read=read,
        inputs=lambda shares, period: {
            "shares": shares
            if len(shares) < 10
            else AsIs(
                "a tensor [10, 10]: five tokens said twice; a row for each query, a column a key"
            ),
            "period": period,
        },
        also={
            "expected is the mean of": lambda _, shares, period: shares.diagonal(1 - period)[1:],
        },
    )


# -- bytes ----------------------------------------------------------------------------------------


def _kv_bytes(c: ModelConfig, itemsize: int) -> int:
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * itemsize


BYTES_SLIPS: Slips = {
    words: lambda c, size, times=times: _kv_bytes(c, size) * times(c, size)
    for words, times in {
        "counts K or V alone; the cache keeps both": (lambda c, size: 1 / 2),
        "counts one layer; each layer keeps keys and values of its own": (
            lambda c, size: 1 / c.num_hidden_layers
        ),
        "counts as many K/V heads as query heads; there are `num_key_value_heads` of them": (
            lambda c, size: c.group_size
        ),
        "counts K or V alone, of as many heads as query heads; K and V have `num_key_value_heads` "
        "heads each": (lambda c, size: c.group_size / 2),
        "counts as many K/V heads as a group has query heads; "
        "there are `num_key_value_heads` of them": (
            lambda c, size: c.group_size / c.num_key_value_heads
        ),
        "gives bits; bytes are asked for": (lambda c, size: 8),
        "gives KiB; bytes are asked for": (lambda c, size: 2**-10),
        "counts one K/V head; there are `num_key_value_heads` of them": (
            lambda c, size: 1 / c.num_key_value_heads
        ),
        "counts one number for K of a head; it has `head_dim` numbers": (
            lambda c, size: 1 / c.head_dim
        ),
        "counts `hidden_size` numbers for K of a layer; it has `num_key_value_heads · head_dim`": (
            lambda c, size: c.hidden_size / (c.num_key_value_heads * c.head_dim)
        ),
        "takes `hidden_size` / query heads for the size of a head; a head has `head_dim` numbers": (
            lambda c, size: c.hidden_size // c.num_attention_heads / c.head_dim
        ),
        "counts 2 bytes per number, whatever `itemsize` is; a number takes `itemsize` bytes": (
            lambda c, size: 2 / size
        ),
        "counts 4 bytes per number, whatever `itemsize` is; a number takes `itemsize` bytes": (
            lambda c, size: 4 / size
        ),
        "gives how many numbers there are; each takes `itemsize` bytes": (lambda c, size: 1 / size),
    }.items()
}


def check_kv_bytes(function: Callable[[ModelConfig, int], int], config: ModelConfig) -> Verdict:
    """Check a learner's function(config, itemsize) → bytes of K and V that one token leaves.

    With small numbers, with the config, with each number in it changed alone, and with all of them.
    """
    changes: dict[str, Any] = {
        "num_hidden_layers": config.num_hidden_layers + 5,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim + 16,
        "hidden_size": 3 * config.hidden_size,
        "num_attention_heads": 4 * config.num_key_value_heads,
    }
    # small numbers, no two of them the same
    small: dict[str, Any] = dict(zip(changes, (5, 2, 8, 42, 6), strict=True))
    changed = [replace(config, **{name: value}) for name, value in changes.items()]
    cases = [(config, 2), (config, 4), *((c, 2) for c in changed), (replace(config, **changes), 2)]
    others = _configs_read_by(function)

    return judge(
        *("kv_bytes", function, _kv_bytes, [(replace(config, **small), 1), *cases], BYTES_SLIPS),
        f"kv_bytes: {_kv_bytes(config, 2):,} bytes per token; right for {len(cases) - 2} other "
        "configs as well",
        read=read_number("it must return one number"),
        inputs=lambda c, size: {
            **{f"config.{name}": getattr(c, name) for name in changes},
            "itemsize": size,
        },
        also={"it reads": lambda *_: AsIs(f"{others[0]}, not its argument") if others else None},
    )


def _configs_read_by(function: Callable) -> list[str]:
    """The names of configs outside the function that its body reads."""
    known = getattr(function, "__globals__", {})
    return [name for name in names_in(function) if isinstance(known.get(name), ModelConfig)]
