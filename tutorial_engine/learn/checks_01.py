"""Introduced in notebook 01. The checks of notebook 01: each knows the usual mistakes by name.

Every check hands out copies, so that an answer that works in place is as good as another.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.own import Attend, LayerWeights, rms_norm
from tutorial_engine.learn.own import project as right_project
from tutorial_engine.learn.own import rope as right_rope
from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done, wrong_shape
from tutorial_engine.model.attention import NaiveAttention, causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.model.rope import inverse_frequencies

Named = Iterator[tuple[Tensor, str]]  # a wrong answer, and what is wrong with it


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _copies(*values: Any) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def _first_that_fits(got: Tensor, named: Named, tolerance: float = 1e-5) -> str | None:
    return next((why for wrong, why in named if _same(got, wrong, tolerance)), None)


def _same(got: Tensor, wrong: Tensor, tolerance: float) -> bool:
    return got.shape == wrong.shape and close(got, wrong, tolerance)


@contextmanager
def _explained(explain: Callable[[str], str]) -> Iterator[None]:
    """Add to the error of shapes that the learner's function raises what it means, if we know."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        why = explain(str(error))
        raise type(error)(f"{str(error).rstrip('.')}. {why}") if why else error from error


def _not_transposed(said: str, weights: Mapping[str, Tensor]) -> str:
    """Which [out, in] matrix lacks its .T, read from the shapes in PyTorch's words; "" if none."""
    found = re.search(r"\(\d+x(\d+) and (\d+)x(\d+)\)", said)
    if found is None:
        return ""
    wide, *shape = map(int, found.groups())
    names = [name for name, w in weights.items() if list(w.shape) == shape and shape[1] == wide]
    turned = " or ".join(f"{name}.T" for name in names)
    return f"The weights are [out, in]: multiply by {turned}" if names else ""


# -- attention ------------------------------------------------------------------------------------


def check_attention(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(q [q, D], k [kv, D], v [kv, D], mask [q, kv]) → out [q, D]."""

    def run() -> Verdict:
        for sizes in ((3, 5, 8), (2, 2, 4), (1, 3, 8)):
            bad = _wrong_attention(function, *sizes)
            if bad is not None:
                return bad
        return Verdict(True, "attention: equal to the package's, 3, 2 and 1 queries, D=8 and 4")

    return guarded("attention", run, function, "Scores are q @ k.T, one row for each query.")


def _wrong_attention(
    function: Callable[..., Tensor], q_len: int, kv_len: int, size: int
) -> Verdict | None:
    q, k, v = _random(q_len, size), _random(kv_len, size), _random(kv_len, size) + 1
    mask = causal_mask(q_len, kv_len)
    want = _shares(q, k, mask) @ v
    try:
        got = function(*_copies(q, k, v, mask))
    except TypeError as error:
        if "sqrt" not in str(error):
            raise
        return Verdict(False, f"attention: {error}. D is a plain number: write D ** 0.5")
    bad = not_done("attention", got, function)
    if bad is not None:
        return bad
    if isinstance(got, Tensor) and _same(got, _shares(q, k, mask), 1e-5):
        return Verdict(
            False, "attention returned the shares [q, kv]; multiply them by the values: shares @ v"
        )
    bad = wrong_shape("attention", got, want)
    if bad is not None or close(got, want, 1e-5):
        return bad
    partly = mask.all(dim=-1)  # queries that see all keys: with an inverted mask they see none
    inverted = _shares(q, k, ~mask, forbidden=-1e9) @ v
    if not bool(partly.all()) and close(got[~partly], inverted[~partly], 1e-5):
        return Verdict(
            False, "attention: the mask is inverted; True means that a query MAY attend to the key"
        )
    why = _first_that_fits(got, _attention_slips(q, k, v, mask))
    if why is not None:
        return Verdict(False, f"attention: {why}")
    if bool(got.isnan().all()):
        return Verdict(
            False,
            "attention: NaN everywhere; 0 times −inf is NaN, so set the forbidden scores with "
            "masked_fill(~mask, ...)",
        )
    if bool(got.isnan().any()):
        return Verdict(False, "attention: NaN; are forbidden scores −inf BEFORE the softmax?")
    if size != 8:
        return Verdict(
            False, "attention: right for D = 8, wrong for D = 4; take D from the shape of k"
        )
    return Verdict(
        False,
        "attention: other numbers; check the scale (1/√D), that forbidden scores become −inf "
        "before the softmax, and that the softmax runs over the keys (last axis)",
    )


def _shares(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    forbidden: float = -math.inf,
    axis: int = -1,
) -> Tensor:
    scores = q @ k.T * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, forbidden)
    return scores.softmax(axis)


def _attention_slips(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Named:
    size = q.shape[-1]
    yield _shares(q, k, None) @ v, "the mask has no effect; queries see the future"
    yield (
        (q @ k.T / size**0.5).exp() * mask @ v,
        "the shares do not add up to 1; divide exp(score) by the sum over the keys: softmax",
    )
    yield _shares(q, k, mask, 1.0) @ v, "the scores are not divided by √D"
    yield _shares(q, k, mask, 1 / size) @ v, "the scores are divided by D; divide by √D"
    yield _shares(q, k, mask, size**0.5) @ v, "the scores are multiplied by √D; divide by it"
    for numbers, what in ((k, "keys"), (q, "queries")):
        yield (
            _shares(q, k, mask, len(numbers) ** -0.5) @ v,
            f"the scores are divided by the root of the number of {what}; D is k.shape[-1]",
        )
    yield (
        _shares(q, k, None) * mask @ v,
        "masked after the softmax; shares no longer add up to 1",
    )
    yield (
        _shares(q, k, mask, forbidden=0.0) @ v,
        "forbidden scores become 0, and exp(0) = 1 is still a share; make them −inf",
    )
    yield _shares(q, k, mask, axis=0) @ v, "the softmax runs over the queries; take the last axis"
    yield (
        _shares(q, v, mask) @ k,
        "keys and values are swapped: scores come from k, the output from v",
    )


# -- window_mask ----------------------------------------------------------------------------------


def check_window_mask(function: Callable[[int, int, int], Tensor]) -> Verdict:
    """Check a learner's function(q_len, kv_len, window) → bool [q_len, kv_len]."""

    def run() -> Verdict:
        for sizes in ((4, 4, 2), (1, 5, 3), (3, 7, 4), (2, 2, 9)):
            bad = _wrong_mask(function, *sizes)
            if bad is not None:
                return bad
        return Verdict(
            True,
            "window_mask: right for all queries at once, for one, for some, and for a wide window",
        )

    return guarded("window_mask", run, function)


def _why_no_mask(said: str) -> str:
    if "ambiguous" in said:
        return "Join two conditions with &, each in its own brackets: (...) & (...)"
    return "It needs a column of queries and a row of keys"


def _wrong_mask(
    function: Callable[..., Tensor], q_len: int, kv_len: int, window: int
) -> Verdict | None:
    where = f"q={q_len}, k={kv_len}, window={window}"
    with _explained(_why_no_mask):
        got = function(q_len, kv_len, window)
    want = causal_mask(q_len, kv_len, window)
    bad = not_done("window_mask", got, function) or wrong_shape("window_mask", got, want)
    if bad is not None:
        return bad
    if got.dtype != torch.bool:
        added = got.is_floating_point() and bool((got == -math.inf).any())
        means = "; this one is meant to be added to the scores" if added else ""
        return Verdict(
            False, f"window_mask must be bool, True = may attend; got {got.dtype}{means}"
        )
    if torch.equal(got, want):
        return None
    said = f"window_mask ({where}): "
    if torch.equal(got, ~want):
        return Verdict(False, said + "the mask is inverted; True means that a query MAY attend")
    if torch.equal(got.T, want):
        return Verdict(False, said + "rows and columns are swapped; row = query")
    if bool((got & ~causal_mask(q_len, kv_len)).any()):
        return Verdict(False, said + "a query sees a key after it")
    if q_len < kv_len and torch.equal(got, causal_mask(kv_len, kv_len, window)[:q_len]):
        return Verdict(
            False,
            said + "lined up at the upper left; the queries are the LAST of the keys, the first "
            "stands at kv_len - q_len",
        )
    if not bool(got[:, kv_len - q_len :].diagonal().any()):
        return Verdict(False, said + "a query does not see itself; key_pos <= query_pos")
    seen, most = int(got.sum(-1).max()), int(want.sum(-1).max())
    if seen == most:
        return Verdict(False, said + "the right number of keys, but not the last ones")
    return Verdict(
        False, said + f"a query sees up to {seen} keys; {most} expected, itself included"
    )


# -- kv_head --------------------------------------------------------------------------------------


def check_kv_head(function: Callable[[int, int, int], int]) -> Verdict:
    """Check a learner's function(h, num_heads, num_kv_heads) → the K/V head of query head h."""

    def run() -> Verdict:
        for num_heads, num_kv_heads in ((6, 2), (16, 8), (8, 1), (4, 4)):
            heads, group = range(num_heads), num_heads // num_kv_heads
            got = [function(h, num_heads, num_kv_heads) for h in heads]
            bad = not_done("kv_head", next((x for x in got if x is None), got[0]), function)
            if bad is not None:
                return bad
            got = [x.item() if hasattr(x, "item") else x for x in got]
            want = [h // group for h in heads]
            if got == want and all(isinstance(x, int) for x in got):
                continue
            where = f"kv_head ({num_heads} query heads, {num_kv_heads} K/V heads): got {got}"
            named = {
                "h % num_kv_heads fits every shape, but neighbours share a K/V head: divide by the "
                "group": [h % num_kv_heads for h in heads],
                "divide by the size of a group, num_heads // num_kv_heads, not by the number of "
                "K/V heads": [h // num_kv_heads for h in heads],
                "this is the size of a group; in which group is head h?": [group] * num_heads,
                "this is the query head itself": [*heads],
                "a group has 3 heads in this model only; compute its size": [h // 3 for h in heads],
                "this is the place inside the group": [h % group for h in heads],
                "this is the first query head of the group": [h // group * group for h in heads],
            }
            whole = all(isinstance(x, int) for x in got)
            why = next((why for why, wrong in named.items() if got == wrong), f"expected {want}")
            if not whole:
                why = "a head has a whole number: divide with //"
            return Verdict(False, f"{where}; {why}")
        return Verdict(True, "kv_head: 6/2, 16/8, 8/1 and 4/4 heads")

    return guarded("kv_head", run, function)


# -- rope -----------------------------------------------------------------------------------------


def check_rope(function: Callable[[Tensor, Tensor], Tensor]) -> Verdict:
    """Check a learner's function(x [T, heads, D], angles [T, D / 2]) → x turned (half-split)."""

    def run() -> Verdict:
        for first, tokens, heads, size in ((0, 6, 2, 8), (0, 2, 3, 4), (7, 1, 1, 8)):
            x = _random(tokens, heads, size)
            positions = torch.arange(first, first + tokens)
            angles = positions[:, None] * inverse_frequencies(size, 10000.0)
            with _explained(_why_no_rope):
                got = function(*_copies(x, angles))
            want = right_rope(x, angles)
            bad = not_done("rope", got, function) or wrong_shape("rope", got, want)
            if bad is not None:
                return bad
            if close(got, want, 1e-5):
                continue
            why = _first_that_fits(got, _rope_slips(x, angles))
            if why is None and first > 0:
                why = f"right for several tokens, wrong for one token at position {first}"
            if why is None and close(got[0], x[0], 1e-5):
                why = "position 0 is right, others not; look at cos, sin and signs"
            if why is None:
                why = "position 0 changed; are the halves joined in the same order?"
            return Verdict(False, f"rope: {why}")
        return Verdict(True, "rope: equal to the package's, half-split pairs, 6, 2 and 1 tokens")

    return guarded("rope", run, function)


def _why_no_rope(said: str) -> str:
    why = "The angles [T, D / 2] need an axis for the heads: angles[:, None, :]"
    if "dimension 2" in said:  # the numbers of a head do not fit the angles
        why += ". Cut the last axis in halves, [T, heads, D / 2]: x.chunk(2, dim=-1)"
    return why


def _rope_slips(x: Tensor, angles: Tensor) -> Named:
    want, (a, b) = right_rope(x, angles), x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    yield right_rope(x, -angles), "turned the wrong way round; look at the sign of sin"
    order = torch.arange(x.shape[-1]).view(-1, 2).T.flatten()  # neighbours, half a head apart
    yield (
        right_rope(x[..., order], angles)[..., order.argsort()],
        "neighbours are paired (0 1)(2 3); these checkpoints pair i with i + D/2",
    )
    yield (
        right_rope(x[..., order], angles),
        "0::2 and 1::2 pair neighbours; these checkpoints pair i with i + D/2: x.chunk(2, dim=-1)",
    )
    yield (
        torch.cat((a * sin - b * cos, b * sin + a * cos), dim=-1),
        "cos and sin are swapped: it is a cos φ − b sin φ",
    )
    yield x, "nothing was turned"
    yield right_rope(x, angles.deg2rad()), "the angles are radians already"
    new_a = a * cos - b * sin
    yield (
        torch.cat((new_a, b * cos + new_a * sin), dim=-1),
        "a was overwritten before b was turned; keep the old a (a.clone())",
    )
    yield want.roll(x.shape[-1] // 2, -1), "the two halves are joined in the other order"
    yield (
        torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1),
        "the sign in the first half: it is a cos φ MINUS b sin φ",
    )
    yield (
        torch.cat((a * cos - b * sin, b * cos - a * sin), dim=-1),
        "the sign in the second half: it is b cos φ PLUS a sin φ",
    )


# -- project --------------------------------------------------------------------------------------


def check_project(function: Callable[..., Sequence[Tensor]]) -> Verdict:
    """Check a learner's function(x, w_q, w_k, w_v, head_dim) → q [T, H, D], k, v [T, H_kv, D]."""

    def run() -> Verdict:
        bad = _wrong_projection(function, heads=4, kv_heads=2, head_dim=8, hidden=24)
        if bad is not None:
            return bad
        other = "right for 4 and 2 heads of 8, but for 3 and 1 heads of 4"
        try:
            bad = _wrong_projection(function, heads=3, kv_heads=1, head_dim=4, hidden=12)
        except Exception as error:  # what it raises for these sizes alone
            bad = Verdict(False, f"it raised {type(error).__name__}: {error}")
        if bad is not None:
            return Verdict(
                False,
                f"project: {other}: {bad.message}; take the number of heads from the matrix: "
                "len(w_q) // head_dim",
            )
        return Verdict(True, "project: 4 query and 2 K/V heads of 8 numbers, then 3 and 1 of 4")

    return guarded("project", run, function)


def _wrong_projection(
    function: Callable[..., Sequence[Tensor]], heads: int, kv_heads: int, head_dim: int, hidden: int
) -> Verdict | None:
    x = _random(5, hidden)
    w_q, w_k, w_v = (_random(n * head_dim, hidden) + n for n in (heads, kv_heads, kv_heads))
    w_v = w_v.flip(0)
    wanted = right_project(x, w_q, w_k, w_v, head_dim)

    def explain(said: str) -> str:
        if "invalid for input of size" in said or "multiply up to" in said:
            return (
                "Take the number of heads from the matrix, len(w_q) // head_dim, and head_dim from "
                "the argument"
            )
        return _not_transposed(said, {"w_q": w_q, "w_k": w_k, "w_v": w_v})

    with _explained(explain):
        got = function(*_copies(x, w_q, w_k, w_v), head_dim)
        got = tuple(got) if isinstance(got, Iterator) else got
    bad = not_done("project", got, function)
    if bad is not None:
        return bad
    if not isinstance(got, tuple | list) or len(got) != 3:
        return Verdict(False, f"project must return three tensors (q, k, v), got {_kind(got)}")
    if _alike(got[1], wanted[2]) and _alike(got[2], wanted[1]):
        return Verdict(False, "project: k and v are swapped")
    for name, mine, want in zip("qkv", got, wanted, strict=True):
        if isinstance(mine, Tensor):
            why = _first_that_fits(mine, _project_slips(want, head_dim, heads), 1e-3)
            if why is not None:
                return Verdict(False, f"project: {name} {why}")
        bad = wrong_shape(f"project's {name}", mine, want)
        if bad is not None:
            return bad
        if not close(mine, want, 1e-3):
            others = [f"w_{n}" for n, o in zip("qkv", wanted, strict=True) if _alike(mine, o)]
            why = f"was made with {others[0]}" if others else f"is not x @ w_{name}.T"
            return Verdict(False, f"project: {name} {why}")
    return None


def _alike(got: object, want: Tensor) -> bool:
    return isinstance(got, Tensor) and _same(got, want, 1e-3)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one tensor {list(value.shape)}"
    return f"{len(value)} things" if isinstance(value, tuple | list) else type(value).__name__


def _project_slips(want: Tensor, head_dim: int, heads: int) -> Named:
    flat = want.flatten(1)
    yield flat, "is not split into heads: [T, heads · D] must become [T, heads, D]"
    if want.shape[1] == 1:
        return  # one head: the axes cannot be told apart by numbers
    yield (
        want.transpose(0, 1),
        "has the heads first; the tokens are the first axis: [T, heads, D]",
    )
    yield want.transpose(1, 2), "has head_dim before the heads; it is the last axis: [T, heads, D]"
    yield (
        flat.unflatten(-1, (head_dim, -1)).transpose(1, 2),
        "takes every n-th number for a head; a head is head_dim numbers that lie side by side",
    )
    yield (
        flat.reshape(want.shape[1], -1, head_dim).transpose(0, 1),
        "has the right shape, and its numbers at wrong places; cut the last axis only: "
        ".unflatten(-1, (-1, head_dim))",
    )
    group = heads // want.shape[1]
    if group > 1:
        yield (
            want.repeat_interleave(group, dim=1),
            "is repeated for every query head; give the K/V heads only, attention shares them",
        )


# -- layer ----------------------------------------------------------------------------------------

TEXT_IDS = (312, 265, 65, 401, 97, 300, 77, 258, 11, 500)  # any tokens do; ten of them
LAYER_SLIPS = {
    "no attention residual": "the result of attention is not added to x (the first residual)",
    "no MLP residual": "the result of the MLP is not added to the stream (the second residual)",
    "no residual": "nothing is added to the stream: both residuals are missing",
    "MLP added to x": "the second residual adds to x; it must add to x + attention",
    "MLP reads x": "the MLP reads the norm of x; it must read the norm of x + attention",
    "norm replaces x": "attention is added to the normed x; add it to x itself",
    "norm replaces the sum": "the MLP is added to the normed sum; add it to the sum itself",
    "norms replace the stream": "both residuals add to normed vectors; add to the stream itself",
    "norm after": "the norms come after attention and MLP; they come before (pre-norm)",
    "norm after the sum": "the norms come after each sum (as in 2017); Qwen3 norms before",
    "no input norm": "attention reads x itself; it must read rms_norm(x, w.input_norm)",
    "no MLP norm": "the MLP reads the stream itself; it must read its norm, w.mlp_norm",
    "old norm": "the MLP reads the first norm again; it must read the norm of x + attention",
    "MLP reads x itself": "the MLP reads x; it must read the norm of x + attention",
    "norms swapped": "input_norm and mlp_norm are swapped",
    "one norm for both": "w.input_norm is used twice; the MLP has its own norm, w.mlp_norm",
    "no q_norm and k_norm": "q_norm and k_norm are missing; they norm each head of q and of k",
    "no q_norm": "q_norm is missing",
    "no k_norm": "k_norm is missing",
    "q_norm and k_norm swapped": "q_norm and k_norm are swapped",
    "no rope": "q and k are not turned by their positions (rope)",
    "no rope on q": "q is not turned by its positions (rope)",
    "no rope on k": "k is not turned by its positions (rope)",
    "rope on v": "v is turned as well; rope turns q and k only",
    "rope before norm": "rope comes before q_norm and k_norm; it comes after them",
    "k and v swapped": "k and v are swapped in attend(q, k, v)",
    "w.k and w.v swapped": "w.k and w.v are swapped",
    "no o": "the output of the heads is added without w.o",
    "o without .T": "attention is multiplied by w.o; the weights are [out, in]: multiply by w.o.T",
    "D before heads": "the heads are joined number by number; .flatten(1) puts head after head",
    "heads before tokens": "tokens are mixed when the heads are joined; use .flatten(1)",
    "no attention": "attention is missing: only the MLP is there",
    "no MLP": "the MLP is missing: only attention is there",
    "gate and up swapped": "gate and up are swapped: silu goes around x @ w.gate.T",
    "silu of the product": "silu goes around x @ w.gate.T alone, before it is multiplied by up",
    "no silu": "silu is missing around x @ w.gate.T",
    "sigmoid": "sigmoid(g) stands where silu(g) = g · sigmoid(g) belongs",
}


@cache
def tiny_model() -> Qwen3ForCausalLM:
    """The model that ships, loaded once for the checks."""
    return load_model()


def check_layer(function: Callable[[Tensor, LayerWeights, Tensor, Attend], Tensor]) -> Verdict:
    """Check a learner's function(x [T, hidden], w, angles [T, D / 2], attend) → [T, hidden].

    With the weights of two layers of the model that ships, against these layers themselves.
    """

    @torch.no_grad()
    def run() -> Verdict:
        model = tiny_model()
        layers = (0, model.config.num_hidden_layers - 1)
        for number in layers:
            bad = _wrong_layer(function, number)
            if bad is not None:
                return bad
        return Verdict(
            True,
            f"layer: equal to the model's layers {layers[0]} and {layers[1]}, "
            f"{len(TEXT_IDS)} tokens of {model.config.hidden_size} numbers",
        )

    return guarded("layer", run, function)


def _wrong_layer(function: Callable[..., Tensor], number: int) -> Verdict | None:
    model = tiny_model()
    batch, backend = Batch.from_sequences([TEXT_IDS]), NaiveAttention()
    x, want = _stream(model, batch, number)
    weights = LayerWeights.of(model.model.layers[number])  # type: ignore[arg-type]
    angles = batch.positions[:, None] * model.model.rotary_emb.inv_freq

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: object, **named: object) -> Tensor:
        if more or named:
            raise TypeError("call attend(q, k, v) without a mask; it has the mask already")
        return backend.attend(number, q, k, v, batch)

    def explain(said: str) -> str:
        sizes = re.findall(r"\d+x(\d+) and|tensor b \((\d+)\)", said)
        if str(len(weights.q_norm)) in (one for pair in sizes for one in pair):
            return "Join the heads first with .flatten(1)"
        matrices = {f"w.{name}": w for name, w in weights._asdict().items()}
        return _not_transposed(said, matrices)

    with _explained(explain):
        got = function(x.clone(), LayerWeights(*_copies(*weights)), angles.clone(), attend)
    bad = not_done("layer", got, function) or wrong_shape("layer", got, want)
    tolerance = 1e-5 * float(want.abs().max())
    if bad is not None or close(got, want, tolerance):
        return bad
    named = ((_slipped(slip, x, weights, angles, attend), why) for slip, why in LAYER_SLIPS.items())
    why = _first_that_fits(got, named, tolerance)
    if why is None and bool(got.isnan().any()):
        why = "NaN; is something divided by zero?"
    if why is None:
        why = "other numbers; are project and rope ✔? If so, compare with steps 1 to 4"
    return Verdict(False, f"layer {number}: {why}")


def _stream(model: Qwen3ForCausalLM, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """The residual stream before and after a layer of the model, both [T, hidden]."""
    add, total = model.model.embed_tokens(batch.input_ids), None
    angles, before = model.model.rotary_emb(batch.positions), add
    for layer in list(model.model.layers)[: number + 1]:
        before = add if total is None else add + total
        add, total = layer(add, total, angles, batch, NaiveAttention())
    return before, add + total


def _slipped(slip: str, x: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    """The layer with one mistake in it, named as in LAYER_SLIPS; right with any other name."""
    if slip == "norms swapped":
        w = w._replace(input_norm=w.mlp_norm, mlp_norm=w.input_norm)
    if slip == "one norm for both":
        w = w._replace(mlp_norm=w.input_norm)
    if slip == "q_norm and k_norm swapped":
        w = w._replace(q_norm=w.k_norm, k_norm=w.q_norm)
    if slip == "w.k and w.v swapped":
        w = w._replace(k=w.v, v=w.k)
    late = slip in ("norm after", "norm after the sum")
    h = x if late or slip == "no input norm" else rms_norm(x, w.input_norm)
    mixed = _slipped_heads(slip, h, w, angles, attend)
    if slip != "no o":
        mixed = mixed @ (w.o if slip == "o without .T" else w.o.T)
    if slip == "norm after":
        mixed = rms_norm(mixed, w.input_norm)
    if slip == "no attention":
        mixed = torch.zeros_like(x)
    base = h if slip in ("norm replaces x", "norms replace the stream") else x
    total = mixed if slip in ("no attention residual", "no residual") else base + mixed
    if slip == "norm after the sum":
        total = rms_norm(total, w.input_norm)
    if slip == "no MLP":
        return total
    h = x if slip == "MLP reads x" else total
    h = x if slip == "MLP reads x itself" else h
    plain = late or slip in ("no MLP norm", "MLP reads x itself")
    h = h if plain else rms_norm(h, w.mlp_norm)
    h = rms_norm(x, w.input_norm) if slip == "old norm" else h
    gate, up = h @ w.gate.T, h @ w.up.T
    if slip == "gate and up swapped":
        gate, up = up, gate
    acted = {"no silu": gate, "sigmoid": gate.sigmoid()}.get(slip, F.silu(gate))
    both = F.silu(gate * up) if slip == "silu of the product" else acted * up
    out = both @ w.down.T
    if slip == "norm after":
        out = rms_norm(out, w.mlp_norm)
    if slip in ("no MLP residual", "no residual"):
        return out
    base = x if slip == "MLP added to x" else total
    base = h if slip in ("norm replaces the sum", "norms replace the stream") else base
    return rms_norm(base + out, w.mlp_norm) if slip == "norm after the sum" else base + out


def _slipped_heads(slip: str, h: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    q, k, v = right_project(h, w.q, w.k, w.v, len(w.q_norm))
    if slip == "rope before norm":
        q, k = right_rope(q, angles), right_rope(k, angles)
    if slip not in ("no q_norm", "no q_norm and k_norm"):
        q = rms_norm(q, w.q_norm)
    if slip not in ("no k_norm", "no q_norm and k_norm"):
        k = rms_norm(k, w.k_norm)
    if slip not in ("no rope", "no rope on q", "rope before norm"):
        q = right_rope(q, angles)
    if slip not in ("no rope", "no rope on k", "rope before norm"):
        k = right_rope(k, angles)
    if slip == "rope on v":
        v = right_rope(v, angles)
    k, v = (v, k) if slip == "k and v swapped" else (k, v)
    mixed = attend(q, k, v)
    if slip == "heads before tokens":
        return mixed.transpose(0, 1).reshape(len(h), -1)
    return (mixed.mT if slip == "D before heads" else mixed).flatten(1)


# -- induction ------------------------------------------------------------------------------------


def check_induction_score(function: Callable[[Tensor, int], Tensor | float]) -> Verdict:
    """Check a learner's function(shares [2·period, 2·period], period) → mean share, 0..1."""

    def run() -> Verdict:
        for period in (5, 3):
            n = 2 * period
            scores = _random(n, n).masked_fill(~causal_mask(n, n), -math.inf)
            bad = _wrong_score(function, scores.softmax(-1), period)
            if bad is not None:
                return bad
        return Verdict(True, "induction_score: right for 5 and for 3 tokens that are said twice")

    return guarded("induction_score", run, function)


def _wrong_score(
    function: Callable[[Tensor, int], Tensor | float], shares: Tensor, period: int
) -> Verdict | None:
    got = function(shares.clone(), period)
    bad = not_done("induction_score", got, function)
    if bad is not None:
        return bad
    if isinstance(got, Tensor) and got.numel() != 1:
        return Verdict(
            False,
            f"induction_score must return one number, got shape {list(got.shape)}; pick one share "
            "for each query, shares[queries, keys], and take their mean",
        )
    second = torch.arange(period, 2 * period)
    right = shares[second, second - period + 1]
    if close(torch.tensor(float(got)), right.mean(), 1e-5):
        return None
    named = (
        (right.sum(), "the sum of the shares; take their mean"),
        (
            shares[second, second - period].mean(),
            "the earlier place of the same token; the right place is the token after it",
        ),
        (shares[second, second - period - 1].mean(), "the token before it; take the token after"),
        (shares[second, second].mean(), "what each token gives to itself"),
        (shares[second, second - 1].mean(), "what each token gives to the one before it"),
        (shares[second - period + 1, second].mean(), "row and column are swapped; row = query"),
    )
    for wrong, why in named:
        if close(torch.tensor(float(got)), wrong, 1e-5):
            return Verdict(False, f"induction_score: {why}")
    return Verdict(
        False,
        f"induction_score: {float(got):.3f} instead of {float(right.mean()):.3f}; only the queries "
        "of the second round count, and their keys are period − 1 places earlier",
    )


# -- bytes ----------------------------------------------------------------------------------------


def check_kv_bytes(function: Callable[[ModelConfig, int], int], config: ModelConfig) -> Verdict:
    """Check a learner's function(config, itemsize) → bytes of K and V that one token leaves."""
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def run() -> Verdict:
        got = function(config, 2)
        bad = not_done("kv_bytes", got, function)
        if bad is not None:
            return bad
        right = elements * 2
        if function(config, 4) == got:
            return Verdict(
                False, f"kv_bytes: {got!r} for 2 and for 4 bytes per number; use the argument"
            )
        wider = replace(config, hidden_size=2 * config.hidden_size)
        if function(wider, 2) != got:
            return Verdict(
                False,
                "kv_bytes: changes with hidden_size; a K/V head has config.head_dim numbers, which "
                "need not be hidden_size / heads",
            )
        deeper = replace(config, num_hidden_layers=2 * config.num_hidden_layers)
        if got == right and function(deeper, 2) == 2 * right:
            return Verdict(True, f"kv_bytes: {right:,} bytes per token")
        others = _configs_read_by(function)
        if others:
            return Verdict(
                False, f"kv_bytes: {got!r}; it reads {others[0]}, use the argument config instead"
            )
        usual = [
            (right // 2, "K and V are two tensors: twice as much"),
            (
                right // config.num_hidden_layers,
                "every layer has its own K and V: times the layers",
            ),
            (right * config.group_size, "count K/V heads, not query heads"),
            (right * 8, "bytes, not bits"),
            (right / 2**10, "bytes, not KiB"),
        ]
        hints = [hint for wrong, hint in usual if wrong == got]
        hint = hints[0] if hints else "count K and V, layers, K/V heads"
        return Verdict(False, f"kv_bytes: {got!r}; {hint}")

    return guarded("kv_bytes", run, function)


def _configs_read_by(function: Callable) -> list[str]:
    """The names of configs outside the function that its body reads."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    return [name for name in names if isinstance(known.get(name), ModelConfig)]
