"""The lesson's machinery: checks that name the mistake, predictions that are kept, bugs that go."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import QWEN3_06B
from torch import Tensor

from tutorial_engine.learn.bugs import BUGS_01, Zoo, diff, edited, planted, zoo
from tutorial_engine.learn.bugs_02 import BUGS_02
from tutorial_engine.learn.checks_01 import (
    LAYER_SLIPS,
    _slipped,
    check_attention,
    check_induction_score,
    check_kv_bytes,
    check_kv_head,
    check_layer,
    check_project,
    check_rope,
    check_window_mask,
)
from tutorial_engine.learn.own import LayerWeights, rms_norm
from tutorial_engine.learn.predict import UNDECIDED, Predictions
from tutorial_engine.learn.source import show_source
from tutorial_engine.learn.verdict import (
    Verdict,
    check_close,
    distance,
    guarded,
    has_gap,
    is_open,
    not_done,
    wrong_shape,
)
from tutorial_engine.model import attention as attention_module
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

VIEW = "application/vnd.jupyter.widget-view+json"


def config(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
    )


SIX_TWO = config(layers=4, heads=6, kv_heads=2, head_dim=32)


# -- right solutions, by other means than the package's ----------------------------------------


def right_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = []
    for query, allowed in zip(q, mask, strict=True):
        shares = [math.exp(float(query @ key) / math.sqrt(len(key))) for key in k]
        shares = [s if bool(ok) else 0.0 for s, ok in zip(shares, allowed, strict=True)]
        rows.append(sum(s / sum(shares) * value for s, value in zip(shares, v, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def right_window(q_len: int, kv_len: int, window: int) -> Tensor:
    first = kv_len - q_len
    return torch.tensor(
        [[0 <= first + q - k < window for k in range(kv_len)] for q in range(q_len)]
    )


def right_head(h: int, num_heads: int, num_kv_heads: int) -> int:
    return [at for at in range(num_kv_heads) for _ in range(num_heads // num_kv_heads)][h]


def right_rope(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), dim=-1))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def right_score(weights: Tensor, period: int) -> Tensor:
    return weights.diagonal(offset=1 - period)[1:].mean()


def looped_score(weights: Tensor, period: int) -> float:
    shares = [float(weights[i, i - period + 1]) for i in range(period, 2 * period)]
    return sum(shares) / len(shares)


def right_bytes(c: ModelConfig, itemsize: int) -> int:
    return sum(
        2 * c.num_key_value_heads * c.head_dim * itemsize for _ in range(c.num_hidden_layers)
    )


def right_project(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int) -> list[Tensor]:
    return [(x @ w.T).reshape(len(x), -1, head_dim) for w in (w_q, w_k, w_v)]


def right_layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Any) -> Tensor:
    h = rms_norm(x, w.input_norm)
    q, k, v = right_project(h, w.q, w.k, w.v, len(w.q_norm))
    q, k = right_rope(rms_norm(q, w.q_norm), angles), right_rope(rms_norm(k, w.k_norm), angles)
    x += attend(q, k, v).flatten(1) @ w.o.T  # in place: the check hands out copies
    gate, up = (rms_norm(x, w.mlp_norm) @ matrix.T for matrix in (w.gate, w.up))
    x += (gate * gate.sigmoid() * up) @ w.down.T
    return x


CHECKS: dict[str, tuple[Callable[[Any], Verdict], Callable[..., Any]]] = {
    "attention": (check_attention, right_attention),
    "window_mask": (check_window_mask, right_window),
    "kv_head": (check_kv_head, right_head),
    "rope": (check_rope, right_rope),
    "project": (check_project, right_project),
    "layer": (check_layer, right_layer),
    "induction_score": (check_induction_score, right_score),
    "kv_bytes, 6/2 heads": (lambda f: check_kv_bytes(f, SIX_TWO), right_bytes),
    "kv_bytes, Qwen3-0.6B": (lambda f: check_kv_bytes(f, QWEN3_06B), right_bytes),
}
every_check = pytest.mark.parametrize("name", CHECKS)


@every_check
def test_right_solution_is_accepted(name: str) -> None:
    check, right = CHECKS[name]
    verdict = check(right)
    assert verdict.ok is True and repr(verdict).startswith("✔ "), verdict


def in_place_rope(x: Tensor, angles: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin, a = angles.cos()[:, None], angles.sin()[:, None], x[..., :half].clone()
    x[..., :half] *= cos
    x[..., :half] -= x[..., half:] * sin
    x[..., half:] *= cos
    x[..., half:] += a * sin
    return x


def looped_rope(x: Tensor, angles: Tensor) -> Tensor:
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                a, b, turn = float(x[t, h, i]), float(x[t, h, i + half]), float(angles[t, i])
                out[t, h, i] = a * math.cos(turn) - b * math.sin(turn)
                out[t, h, i + half] = b * math.cos(turn) + a * math.sin(turn)
    return out


def in_place_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q /= math.sqrt(k.shape[1])
    scores = q @ k.T
    scores[~mask] = -1e9
    scores -= scores.max(dim=1, keepdim=True).values
    scores.exp_()
    scores /= scores.sum(dim=1, keepdim=True)
    return torch.mm(scores, v)


def looped_window(q_len: int, kv_len: int, window: int) -> Tensor:
    mask = torch.zeros(q_len, kv_len).bool()
    for q in range(q_len):
        last = kv_len - q_len + q
        mask[q, max(0, last - window + 1) : last + 1] = True
    return mask


def head_by_head(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int
) -> tuple[Tensor, ...]:
    def heads(w: Tensor) -> Tensor:
        return torch.stack([x @ rows.T for rows in w.split(head_dim)], dim=1)

    return heads(w_q), heads(w_k), heads(w_v)


def double_layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Any) -> Tensor:
    w = LayerWeights(*(one.double() for one in w))
    h = rms_norm(x.double(), w.input_norm)
    q, k, v = head_by_head(h, w.q, w.k, w.v, len(w.q_norm))
    q, k = looped_rope(rms_norm(q, w.q_norm), angles), looped_rope(rms_norm(k, w.k_norm), angles)
    out = torch.cat(list(attend(q, k, v).double().transpose(0, 1)), dim=-1)
    x = x + out @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (torch.nn.functional.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


UNUSUAL: list[tuple[str, Callable[..., Any]]] = [
    ("attention", in_place_attention),
    ("attention", lambda q, k, v, mask: right_attention(*(x.double() for x in (q, k, v)), mask)),
    ("window_mask", looped_window),
    ("kv_head", lambda h, heads, kv_heads: int(h / (heads / kv_heads))),
    ("kv_head", lambda h, heads, kv_heads: np.int64(right_head(h, heads, kv_heads))),
    ("kv_head", lambda h, heads, kv_heads: torch.tensor(h) * kv_heads // heads),
    ("rope", in_place_rope),
    ("rope", looped_rope),
    ("rope", lambda x, angles: right_rope(x.double(), angles.double())),
    ("project", head_by_head),
    ("project", lambda x, *w: (one for one in right_project(x, *w))),
    ("project", lambda x, *w: [one.double() for one in right_project(x, *w)]),
    ("layer", double_layer),
    ("induction_score", looped_score),
    ("kv_bytes, 6/2 heads", lambda c, size: np.int64(right_bytes(c, size))),
    ("kv_bytes, 6/2 heads", lambda c, size: float(right_bytes(c, size))),
    ("kv_bytes, Qwen3-0.6B", lambda c, size: torch.tensor(right_bytes(c, size))),
]


@pytest.mark.parametrize(("name", "function"), UNUSUAL)
def test_unusual_right_solution_is_accepted(name: str, function: Callable[..., Any]) -> None:
    verdict = CHECKS[name][0](function)
    assert verdict.ok is True, verdict


def test_every_check_has_an_unusual_right_solution() -> None:
    assert {name.split(",")[0] for name, _ in UNUSUAL} == {name.split(",")[0] for name in CHECKS}


def untouched(*_: object) -> Any:
    """A docstring, as exercises have one."""
    ...


def with_a_gap(*args: object) -> Any:
    first = args[0]
    assert first is not None
    ...


def forgotten(*args: object) -> None:
    answer = args[0]
    assert answer is not None


@every_check
def test_untouched_exercise_is_open_and_a_forgotten_return_is_wrong(name: str) -> None:
    check = CHECKS[name][0]
    for function in (untouched, lambda *_: None, lambda *_: ...):
        verdict = check(function)
        assert verdict.ok is None and repr(verdict).startswith("☐ not done yet: the body of ")
    verdict = check(with_a_gap)
    assert verdict.ok is None and "not done yet: there is still a `...` in " in verdict.message
    verdict = check(forgotten)
    assert verdict.ok is False
    assert verdict.message.endswith("returns None: does it end with `return`?")


def test_what_is_open_is_told_by_the_code_and_not_by_running_it() -> None:
    class Open:
        def update(self, k: object) -> Any:
            """Nothing yet."""

    assert is_open(untouched) and is_open(Open.update) and is_open(Open().update)
    assert not any(map(is_open, (with_a_gap, forgotten, right_rope, len, Open, None, 3)))
    assert not is_open(lambda x: x) and not is_open(lambda: 0) and not is_open(lambda: "")
    assert has_gap(with_a_gap) and has_gap(untouched) and has_gap(Open) is False
    namespace: dict[str, Any] = {}
    exec("def typed(x):\n    y = x\n    ...", namespace)
    assert not has_gap(namespace["typed"]), "its source cannot be read: then it has none"


def test_a_function_that_calls_one_that_is_open_is_told_so() -> None:
    namespace: dict[str, Any] = {}
    code = "def project(*_): ...\ndef layer(x, w, angles, attend):\n    q, k, v = project(x)"
    exec(code, namespace)
    verdict = check_layer(namespace["layer"])
    assert verdict.ok is False
    assert verdict.message.endswith("it calls project, which is not done yet")


@every_check
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("q"), ZeroDivisionError()])
def test_function_that_raises_gets_a_verdict(name: str, error: Exception) -> None:
    def broken(*_: object) -> None:
        raise error

    verdict = CHECKS[name][0](broken)
    assert verdict.ok is False
    assert type(error).__name__ in verdict.message and str(error) in verdict.message


@every_check
def test_function_of_other_arguments_gets_a_verdict(name: str) -> None:
    verdict = CHECKS[name][0](lambda: 1)
    assert verdict.ok is False and "TypeError" in verdict.message


@pytest.mark.parametrize("name", ["attention", "window_mask", "rope", "layer"])
def test_other_shapes_and_types_are_named(name: str) -> None:
    check = CHECKS[name][0]
    for value, words in (
        (torch.zeros(2, 9, 1), "returned shape [2, 9, 1], expected ["),
        ([1.0, 2.0], "must return a tensor, got list"),
        (3, "must return a tensor, got int"),
    ):
        verdict = check(lambda *_, value=value: value)
        assert verdict.ok is False and words in verdict.message


# -- each usual mistake, and the words that name it ---------------------------------------------


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return naive_attention(q[:, None], k[:, None], v[:, None], mask, scale).out[:, 0]


def masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shares = (q @ k.T / k.shape[-1] ** 0.5).softmax(-1).masked_fill(~mask, float("-inf"))
    return (shares / shares.sum(-1, keepdim=True)) @ v


def zeroed_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.T / q.shape[-1] ** 0.5).softmax(dim=-1) * mask) @ v


def added_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.T / k.shape[-1] ** 0.5 + (~mask) * float("-inf")).softmax(-1) @ v


def unnormed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).exp() @ v


def rooted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return q @ k.T / torch.sqrt(k.shape[-1]) @ v  # type: ignore[call-overload,no-any-return]


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=0) @ v


def halves(x: Tensor, angles: Tensor, sign: int = 1) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], sign * angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def neighbours(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def neighbours_joined(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def joined_by_and(q_len: int, kv_len: int, window: int) -> Tensor:
    back = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    return back >= 0 and back < window  # type: ignore[return-value]


def upper_left(q_len: int, kv_len: int, window: int) -> Tensor:
    back = torch.arange(q_len)[:, None] - torch.arange(kv_len)[None, :]
    return (back >= 0) & (back < window)


def window_off(by: int) -> Callable[[int, int, int], Tensor]:
    return lambda q_len, kv_len, window: right_window(q_len, kv_len, window + by)


def overwritten(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # views: writing to x changes them
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    x[..., : x.shape[-1] // 2] = a * cos - b * sin
    x[..., x.shape[-1] // 2 :] = b * cos + a * sin
    return x


def half_signs(x: Tensor, angles: Tensor, first: int, second: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos + first * b * sin, b * cos + second * a * sin), dim=-1)


def book_shares(q: Tensor, k: Tensor, mask: Tensor, forbidden: float) -> Tensor:
    return (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~mask, forbidden).softmax(-1)


def project_but(change: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    """right_project with its three results changed."""
    return lambda *args: change(*right_project(*args))


def typed_heads(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int) -> list[Tensor]:
    t = len(x)
    return [(x @ w_q.T).view(t, 4, 8), (x @ w_k.T).view(t, 2, 8), (x @ w_v.T).view(t, 2, 8)]


def typed_root(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.T / 8**0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def typed_half(x: Tensor, angles: Tensor) -> Tensor:
    return right_rope(x, angles) if x.shape[-1] == 8 else x + 1


MISTAKES: list[tuple[str, Callable[..., Any], str]] = [
    ("attention", lambda q, k, v, mask: naive(q, k, v, None, None), "the mask has no effect"),
    ("attention", lambda q, k, v, mask: naive(q, k, v, mask, 1.0), "not divided by √D"),
    ("attention", masked_after, "−inf BEFORE the softmax"),
    ("attention", added_mask, "0 times −inf is NaN"),
    ("attention", unnormed, "the shares do not add up to 1"),
    ("attention", rooted, "write D ** 0.5"),
    ("attention", over_queries, "the softmax runs over the queries; take the last axis"),
    ("attention", lambda q, k, v, mask: naive(q, k, v, mask, 1 / q.shape[1]), "divided by D"),
    ("attention", lambda q, k, v, mask: naive(q, k, v, mask, q.shape[1] ** 0.5), "multiplied by"),
    ("attention", lambda q, k, v, m: naive(q, k, v, m, len(k) ** -0.5), "of the number of keys"),
    ("attention", lambda q, k, v, m: naive(q, k, v, m, len(q) ** -0.5), "of the number of queries"),
    ("attention", zeroed_after, "masked after the softmax"),
    ("attention", lambda q, k, v, m: book_shares(q, k, ~m, -math.inf) @ v, "mask is inverted"),
    ("attention", lambda q, k, v, m: book_shares(q, k, m, 0.0) @ v, "exp(0) = 1 is still a share"),
    ("attention", lambda q, k, v, m: naive(q, v, k, m, None), "keys and values are swapped"),
    ("attention", lambda q, k, v, m: book_shares(q, k, m, -math.inf), "returned the shares"),
    ("attention", lambda q, k, v, m: k @ q.T @ v, "Scores are q @ k.T"),
    ("attention", typed_root, "right for D = 8, wrong for D = 4"),
    ("attention", lambda q, k, v, m: naive(q, k, v, m, 0.9), "other numbers"),
    ("window_mask", lambda q, k, w: torch.ones(q, k, dtype=torch.bool), "sees a key after it"),
    ("window_mask", lambda q, k, w: right_window(q, k, k), "sees up to 4 keys; 2 expected"),
    ("window_mask", window_off(+1), "sees up to 3 keys; 2 expected"),
    ("window_mask", window_off(-1), "sees up to 1 keys; 2 expected"),
    ("window_mask", joined_by_and, "Join two conditions with &, each in its own brackets"),
    (
        "window_mask",
        lambda q, k, w: torch.arange(q) - torch.arange(k)[:, None] + torch.arange(k + 2),
        "a column of queries and a row of keys",
    ),
    ("window_mask", upper_left, "(q=1, k=5, window=3): lined up at the upper left"),
    ("window_mask", lambda q, k, w: ~right_window(q, k, w), "the mask is inverted"),
    (
        "window_mask",
        lambda q, k, w: torch.zeros(q, k).masked_fill(~right_window(q, k, w), -math.inf),
        "meant to be added to the scores",
    ),
    ("window_mask", lambda q, k, w: right_window(q, k, w).T, "rows and columns are swapped"),
    ("window_mask", lambda q, k, w: right_window(q, k, w).int(), "got torch.int32"),
    (
        "window_mask",
        lambda q, k, w: right_window(q, k, w) & ~right_window(q, k, 1),
        "a query does not see itself",
    ),
    ("kv_head", lambda h, heads, kv_heads: h % kv_heads, "fits every shape"),
    ("kv_head", lambda h, heads, kv_heads: h // kv_heads, "not by the number of K/V heads"),
    ("kv_head", lambda h, heads, kv_heads: heads // kv_heads, "the size of a group"),
    ("kv_head", lambda h, heads, kv_heads: h, "the query head itself"),
    ("kv_head", lambda h, heads, kv_heads: h // 3, "in this model only"),
    ("kv_head", lambda h, heads, kv_heads: h % (heads // kv_heads), "the place inside"),
    ("kv_head", lambda h, heads, kv_heads: h - h % (heads // kv_heads), "the first query head"),
    ("kv_head", lambda h, heads, kv_heads: h / (heads // kv_heads), "divide with //"),
    ("kv_head", lambda h, heads, kv_heads: 0, "expected [0, 0, 0, 1, 1, 1]"),
    ("rope", lambda x, angles: halves(x, angles, -1), "turned the wrong way round"),
    ("rope", neighbours, "neighbours are paired"),
    ("rope", lambda x, angles: x, "nothing was turned"),
    ("rope", lambda x, angles: halves(x, angles + 1), "position 0 changed"),
    ("rope", lambda x, angles: halves(x, 2 * angles), "position 0 is right, others not"),
    ("rope", lambda x, angles: halves(x, angles.deg2rad()), "radians already"),
    ("rope", overwritten, "a was overwritten"),
    ("rope", lambda x, angles: half_signs(x, angles, 1, 1), "first half: it is a cos φ MINUS"),
    ("rope", lambda x, angles: half_signs(x, angles, -1, -1), "second half: it is b cos φ PLUS"),
    ("rope", lambda x, angles: halves(x, angles).roll(x.shape[-1] // 2, -1), "in the other order"),
    ("rope", lambda x, angles: x[..., :4] * angles.cos(), "angles[:, None, :]"),
    ("rope", lambda x, angles: x.chunk(2)[0] * angles.cos()[:, None], "x.chunk(2, dim=-1)"),
    ("rope", neighbours_joined, "0::2 and 1::2 pair neighbours"),
    ("rope", lambda x, angles: halves(x, math.pi / 2 - angles), "cos and sin are swapped"),
    ("project", project_but(lambda q, k, v: (q, v, k)), "k and v are swapped"),
    ("project", project_but(lambda q, k, v: (q, k)), "three tensors (q, k, v), got 2 things"),
    ("project", project_but(lambda q, k, v: torch.cat((q, k, v), 1)), "got one tensor [5, 8, 8]"),
    ("project", project_but(lambda q, k, v: (q.flatten(1), k, v)), "q is not split into heads"),
    ("project", project_but(lambda q, k, v: (q.mT, k, v)), "q has head_dim before the heads"),
    (
        "project",
        project_but(lambda q, k, v: (q.transpose(0, 1), k, v)),
        "q has the heads first",
    ),
    (
        "project",
        project_but(lambda q, k, v: (q, k.reshape(5, 8, 2).mT, v) if q.shape[1] == 4 else 0),
        "k takes every n-th number",
    ),
    (
        "project",
        project_but(lambda q, k, v: (q, k, v.reshape(-1, 5, v.shape[-1]).transpose(0, 1))),
        "v has the right shape, and its numbers at wrong places",
    ),
    (
        "project",
        project_but(lambda q, k, v: (q, k.repeat_interleave(2, 1), v)),
        "k is repeated for every query head",
    ),
    ("project", project_but(lambda q, k, v: (q, k, k)), "v was made with w_k"),
    ("project", project_but(lambda q, k, v: (q, 2 * k, v)), "k is not x @ w_k.T"),
    ("project", lambda x, w_q, *_: x @ w_q, "[out, in]: multiply by w_q.T"),
    ("project", lambda x, q, k, v, d: (x @ q.T).view(5, 6, 32), "Take the number of heads from"),
    ("project", typed_heads, "take the number of heads from the matrix"),
    ("induction_score", lambda w, p: w[p:, 1 : p + 1].diagonal().sum(), "take their mean"),
    ("induction_score", lambda w, p: w[p:, 1 : p + 1].diagonal(), "one number, got shape [5]"),
    ("induction_score", lambda w, p: w[p:, :p].diagonal().mean(), "the earlier place of the same"),
    ("induction_score", lambda w, p: w.diagonal()[p:].mean(), "gives to itself"),
    ("induction_score", lambda w, p: w.diagonal(-1)[p - 1 :].mean(), "to the one before it"),
    ("induction_score", lambda w, p: right_score(w.T, p), "row and column are swapped"),
    ("induction_score", lambda w, p: right_score(w, p) + 1, "only the queries of the second"),
    ("layer", lambda x, w, angles, attend: x * math.nan, "NaN"),
    ("layer", lambda x, w, angles, attend: 2 * x, "other numbers; are project and rope ✔"),
    ("layer", lambda x, w, angles, attend: x @ w.gate, "multiply by w.gate.T or w.up.T"),
    ("layer", lambda x, w, angles, attend: x @ w.k, "multiply by w.k.T or w.v.T"),
    ("layer", lambda x, w, a, attend: x + x.unflatten(1, (-1, 32)), "Join the heads first"),
    *(
        ("layer", lambda x, w, a, attend, slip=slip: _slipped(slip, x, w, a, attend), why)
        for slip, why in LAYER_SLIPS.items()
    ),
]
for kv in ("kv_bytes, 6/2 heads", "kv_bytes, Qwen3-0.6B"):
    MISTAKES += [
        (kv, lambda c, size: right_bytes(c, size) // 2, "K and V are two tensors"),
        (kv, lambda c, size: right_bytes(c, size) // c.num_hidden_layers, "times the layers"),
        (kv, lambda c, size: right_bytes(c, size) * c.group_size, "not query heads"),
        (kv, lambda c, size: right_bytes(c, 4), "use the argument"),
        (kv, lambda c, size: 17 * size, "34; count K and V, layers, K/V heads"),
        (
            kv,
            lambda c, size: right_bytes(QWEN3_06B, size) // 7,
            "it reads QWEN3_06B, use the argument config",
        ),
        (kv, lambda c, size: [17], "[17] for 2 and for 4 bytes per number"),
        (kv, lambda c, size: 8 * right_bytes(c, size), "bytes, not bits"),
        (kv, lambda c, size: right_bytes(c, size) / 1024, "bytes, not KiB"),
    ]


@pytest.mark.parametrize(
    ("name", "wrong", "words"), MISTAKES, ids=[f"{m[0]}: {m[2]}" for m in MISTAKES]
)
def test_mistake_is_named(name: str, wrong: Callable[..., Any], words: str) -> None:
    verdict = CHECKS[name][0](wrong)
    assert verdict.ok is False and repr(verdict).startswith("✘ ")
    assert words in verdict.message


@every_check
def test_each_mistake_has_a_message_of_its_own(name: str) -> None:
    told = [CHECKS[name][0](wrong).message for n, wrong, _ in MISTAKES if n == name]
    assert len(set(told)) == len(told) >= 4


def test_what_the_layer_is_compared_with_is_right_but_for_its_slip() -> None:
    assert check_layer(lambda *args: _slipped("none", *args)).ok is True


def learners_layer(old: str, new: str) -> Callable[..., Tensor]:
    """A layer as a learner writes it, with one place changed."""
    code = """def layer(x, w, angles, attend):
        h = rms_norm(x, w.input_norm)
        q, k, v = right_project(h, w.q, w.k, w.v, len(w.q_norm))
        q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)
        q, k = right_rope(q, angles), right_rope(k, angles)
        mixed = attend(q, k, v).flatten(1) @ w.o.T
        y = x + mixed
        h = rms_norm(y, w.mlp_norm)
        return y + (torch.nn.functional.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T"""
    assert old in code
    namespace: dict[str, Any] = dict(globals())
    exec(code.replace(old, new), namespace)
    return namespace["layer"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("x + mixed", "mixed", "first residual"),
        ("return y +", "return", "second residual"),
        ("return y +", "return x +", "must add to x + attention"),
        ("rms_norm(y, ", "rms_norm(x, ", "the MLP reads the norm of x"),
        ("rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)", "q, k", "q_norm and k_norm are missing"),
        ("right_rope(q, angles), right_rope(k, angles)", "q, k", "not turned by their positions"),
        (" @ w.o.T", "", "without w.o"),
        ("silu(h @ w.gate.T) * (h @ w.up.T)", "silu(h @ w.up.T) * (h @ w.gate.T)", "swapped"),
        (
            "h = rms_norm(x, w.input_norm)",
            "h = x = rms_norm(x, w.input_norm)",
            "attention is added to the normed x",
        ),
        ("rms_norm(y, w.mlp_norm)", "rms_norm(y, w.input_norm)", "is used twice"),
        (
            "x + mixed\n        h = rms_norm(y, w.mlp_norm)",
            "h = rms_norm(x + mixed, w.mlp_norm)",
            "the MLP is added to the normed sum",
        ),
        ("attend(q, k, v).flatten(1)", "attend(q, k, v)", "Join the heads first with .flatten(1)"),
        ("attend(q, k, v)", "attend(q, k, v, None)", "call attend(q, k, v) without a mask"),
        ("w.o.T", "w.o", "the weights are [out, in]: multiply by w.o.T"),
        ("(h @ w.up.T)) @ w.down.T", "(h @ w.up.T)) @ w.down", "multiply by w.down.T"),
        ("        h = rms_norm(y, w.mlp_norm)\n", "", "the MLP reads the first norm again"),
        ("rms_norm(y, w.mlp_norm)", "x", "the MLP reads x; it must"),
        (".flatten(1)", ".mT.flatten(1)", "joined number by number"),
        (".flatten(1)", ".transpose(0, 1).reshape(len(x), -1)", "tokens are mixed"),
        ("w.q, w.k, w.v, ", "w.q, w.v, w.k, ", "w.k and w.v are swapped"),
    ],
)
def test_a_layer_as_a_learner_writes_it_is_told_what_is_wrong(
    old: str, new: str, words: str
) -> None:
    assert check_layer(learners_layer(old, old)).ok is True
    verdict = check_layer(learners_layer(old, new))
    assert verdict.ok is False and words in verdict.message, verdict


def test_bytes_that_fit_one_config_by_chance_are_refused() -> None:
    assert check_kv_bytes(lambda c, _: right_bytes(c, 2), SIX_TWO).ok is False, "fits bf16 only"
    for function, words in (
        (
            lambda c, size: 2 * c.num_hidden_layers * c.hidden_size * size,
            "changes with hidden_size",
        ),
        (lambda c, size: 57_344 * size, "count K and V, layers"),
    ):
        assert function(QWEN3_06B, 2) == 114_688  # the right number, for the wrong reason
        verdict = check_kv_bytes(function, QWEN3_06B)
        assert verdict.ok is False and words in verdict.message


def test_window_that_sees_the_right_number_of_wrong_keys_is_told_so() -> None:
    def shifted(q_len: int, kv_len: int, window: int) -> Tensor:
        right = right_window(q_len, kv_len, window)
        return right if q_len == kv_len else right.roll(-1, dims=-1)

    verdict = check_window_mask(shifted)
    assert verdict.ok is False
    assert "sees 3 keys, at most 3 expected" not in verdict.message  # would explain nothing


# -- verdicts -----------------------------------------------------------------------------------


def test_verdicts_are_shown_by_their_mark_and_zero_and_false_are_answers() -> None:
    assert [repr(Verdict(ok, "so")) for ok in (True, False, None)] == ["✔ so", "✘ so", "☐ so"]
    assert all(not_done("f", answer) is None for answer in (0, False, torch.zeros(2)))
    open_one = not_done("f", None)
    assert open_one is not None and open_one.ok is None, "without the function nobody can tell"


def test_interrupting_a_check_is_not_swallowed() -> None:
    def interrupted() -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("f", interrupted)


def test_close_numbers_pass_and_a_difference_is_told_with_place_and_size() -> None:
    verdict = check_close(torch.ones(2, 3), torch.ones(2, 3) + 3e-6, 2e-5, "twins")
    said = "twins: max |Δ| < 1e-05 over 6 numbers, tolerance 2e-05"
    assert verdict == Verdict(True, said)
    a = torch.zeros(2, 3, 4)
    b = a.clone()
    b[1, 2, 3], b[0, 1, 0] = -0.25, 0.125
    verdict = check_close(a, b, 1e-5, "twins")
    assert verdict == Verdict(False, "twins: differs most at [1, 2, 3], by 0.25 > 1e-05")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_never_close(bad: float) -> None:
    a = torch.zeros(2, 2)
    b = a.clone()
    b[1, 0] = bad
    for first, second in ((a, b), (b, a)):
        verdict = check_close(first, second, 1e9, "twins")
        assert verdict.ok is False and "[1, 0], by inf" in verdict.message
    nan = torch.tensor([float("nan")])
    assert check_close(nan, nan, 1, "x").ok is False


def test_what_is_no_tensor_or_only_broadcasts_is_a_verdict_too() -> None:
    verdict = wrong_shape("f", torch.zeros(1, 3), torch.zeros(2, 3))
    assert verdict is not None and "[1, 3], expected [2, 3]" in verdict.message
    assert check_close(torch.zeros(1, 3), torch.zeros(2, 3), 1.0, "f").ok is False
    for value in (None, 3.0, [1.0]):
        assert check_close(value, torch.ones(1), 1e-5, "x").ok is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (0, "= 0"),
        (6.4e-6, "< 1e-05"),
        (-1e-3, "< 1e-02"),
        (0.5, "< 1e+00"),
        (70, "< 1e+02"),
        (math.nan, "= nan"),
    ],
)
def test_how_close_is_told_to_a_power_of_ten(off: float, said: str) -> None:
    a = torch.zeros(2, 3, dtype=torch.float64)
    b = a.clone()
    b[1, 1] = off
    assert distance(a, b) == distance(b, a) == said


# -- predictions --------------------------------------------------------------------------------


@pytest.fixture
def predictions() -> Predictions:
    return Predictions()


def test_right_and_wrong_predictions_are_told_and_scored(
    predictions: Predictions, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, choice in (("a", "1"), ("b", "2"), ("c", None)):
        question = predictions.ask(name, "How many?", ["1", "2"])
        assert question.choice is None and question.buttons.value == UNDECIDED
        if choice is not None:
            question.buttons.value = choice
        assert predictions.reveal(name, "1") is (choice is not None)
    assert capsys.readouterr().out.splitlines() == [
        "Answer: 1. ✔ As you predicted.",
        "Answer: 1. ✘ You predicted: 2. Read on to see why.",
        "Choose an answer above, then run this cell again.",
    ]
    assert predictions.score() == "1 of 2 predictions were right; 1 not made."


@pytest.mark.parametrize("choice", ["1", "2", None])
def test_running_a_question_and_its_answer_again_says_the_same(
    predictions: Predictions, capsys: pytest.CaptureFixture[str], choice: str | None
) -> None:
    predictions.ask("a", "?", ["1", "2"]).buttons.value = choice or UNDECIDED
    told = []
    for ask_again in (False, False, True, True):
        if ask_again:
            predictions.ask("a", "?", ["1", "2"])
        told.append((predictions.reveal("a", 1), capsys.readouterr().out, predictions.score()))
    assert len(set(told)) == 1
    assert predictions.questions["a"].buttons.disabled is (choice is not None)


def test_choice_is_kept_when_asked_again_and_scored_when_revealed(
    predictions: Predictions,
) -> None:
    predictions.ask("a", "?", ["1", "2"]).buttons.value = "2"
    assert predictions.score() == "0 of 0 predictions were right; 0 not made."
    again = predictions.ask("a", "?", ["1", "2"])
    assert again.choice == "2" and not again.buttons.disabled
    assert predictions.ask("a", "?", ["1", "3"]).choice is None  # its option is gone
    assert len(predictions.questions) == 1


def test_revealed_question_cannot_be_changed_any_more(predictions: Predictions) -> None:
    with pytest.raises(ValueError, match="no question 'a' was asked; run its cell first"):
        predictions.reveal("a", "1")
    question = predictions.ask("a", "?", ["1", "2"])
    assert predictions.reveal("a", "2") is False
    assert not question.buttons.disabled  # nothing was chosen: it waits
    question.buttons.value = "1"
    predictions.reveal("a", "2")
    assert question.buttons.disabled and question.truth == "2"
    assert predictions.ask("a", "?", ["1", "2"]).buttons.disabled, "nor by asking again"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *[("22", "22"), (22, "22"), (np.int64(22), "22"), (torch.tensor(22), "22")],
        *[(1, "1"), (0, "22"), (2, "half"), (3, "True"), (True, "True"), ("half", "half")],
    ],
)
def test_truth_is_an_option_its_index_or_its_value(
    predictions: Predictions, truth: object, answer: str
) -> None:
    predictions.ask("a", "?", ["22", "1", "half", "True"]).buttons.value = "1"
    assert predictions.reveal("a", truth) is True
    assert predictions.questions["a"].truth == answer


@pytest.mark.parametrize("truth", [4, -1, "none", False, 1.5, None, torch.tensor(9)])
def test_truth_that_is_no_option_is_refused(predictions: Predictions, truth: object) -> None:
    question = predictions.ask("a", "?", ["22", "1", "half", "True"])
    with pytest.raises(ValueError, match=r"is none of the options .* nor the index of one"):
        predictions.reveal("a", truth)
    assert question.truth is None


def test_where_nobody_can_choose_the_answer_shows_as_if_it_had_been_chosen(
    predictions: Predictions,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TE_REVEAL", "1")
    for _ in range(2):
        question = predictions.ask("a", "?", ["1", "2"])
        assert predictions.reveal("a", "2") is True and question.buttons.disabled
        assert capsys.readouterr().out == "Answer: 2.\n"
        assert predictions.score() == "1 of 1 predictions were right; 0 not made."
    monkeypatch.setenv("TE_REVEAL", "0")
    predictions.ask("b", "?", ["1", "2"])
    assert predictions.reveal("b", "2") is False


def test_question_is_shown_live_and_as_text(predictions: Predictions) -> None:
    question = predictions.ask("a", "Is 1 < 2 & so on?", ["yes", "<script>"])
    data = question._repr_mimebundle_()
    assert data[VIEW]["model_id"] == question.view.model_id
    assert data["text/plain"] == "Predict: Is 1 < 2 & so on?\n  ( ) yes\n  ( ) <script>"
    title = question.view.children[0].value
    assert title == "<b>Predict:</b> Is 1 &lt; 2 &amp; so on?"
    assert question.buttons in question.view.children


# -- sources ------------------------------------------------------------------------------------


def shown(thing: Callable[..., Any], capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    show_source(thing, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "thing",
    [naive_attention, Qwen3DecoderLayer.forward, Qwen3DecoderLayer, Verdict, Predictions.reveal],
)
def test_source_is_the_installed_code_without_its_docstring(
    thing: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert thing.__doc__
    said = shown(thing, capsys).rstrip("\n").splitlines()
    real = inspect.getsource(thing).rstrip().splitlines()
    left_out = [line for line in real if line not in said]
    quotes = [i for i, line in enumerate(real) if '"""' in line]
    size = 1 if real[quotes[0]].count('"""') == 2 else quotes[1] - quotes[0] + 1
    assert said == real[: quotes[0]] + real[quotes[0] + size :]
    assert '"""' in left_out[0] and thing.__doc__.split("\n")[0].strip() in left_out[0]


def test_source_shows_the_docstring_when_asked_and_all_of_what_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = shown(naive_attention, capsys, docstring=True)
    assert said.rstrip() == inspect.getsource(naive_attention).rstrip()
    assert "by the book" in said
    assert shown(upper_left, capsys).rstrip() == inspect.getsource(upper_left).rstrip()


def test_part_of_a_long_source_is_named_by_how_its_lines_begin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = shown(naive_attention, capsys).splitlines()
    show_source(naive_attention, first="scores = ", last="weights =")
    part = capsys.readouterr().out.splitlines()
    start = whole.index(part[0])
    assert part == whole[start : start + len(part)] and 2 < len(part) < len(whole)
    assert part[0].startswith("    scores = ") and part[-1].startswith("    weights = scores")
    show_source(naive_attention, last="k =")
    assert capsys.readouterr().out.splitlines() == whole[: whole.index(part[0]) - 2]
    show_source(naive_attention, first="weights =")
    assert capsys.readouterr().out.splitlines() == whole[-3:]
    for words in ({"first": "nothing ="}, {"first": "weights =", "last": "scores ="}):
        with pytest.raises(ValueError, match=r"no line begins with '(nothing|scores) ='"):
            show_source(naive_attention, **words)


# -- bugs ---------------------------------------------------------------------------------------

IDS = [[40, 7, 99, 250, 7, 13, 300, 41], [5, 6, 7]]


def naive_logits(model: Qwen3ForCausalLM) -> Tensor:
    return model.compute_logits(model(Batch.from_sequences(IDS), NaiveAttention()))


def test_each_bug_changes_the_logits_in_its_own_way_and_goes_again(
    model: Qwen3ForCausalLM,
) -> None:
    right = naive_logits(model)
    results = [right]
    for name, (owner, attribute, wrong) in BUGS_01.items():
        before = getattr(owner, attribute)
        with pytest.raises(RuntimeError, match="interrupted"), planted(name):
            assert getattr(owner, attribute) is wrong
            results.append(naive_logits(model))
            raise RuntimeError("interrupted")
        assert getattr(owner, attribute) is before
        assert torch.equal(naive_logits(model), right)
    assert len(results) == 5 and all(bool(logits.isfinite().all()) for logits in results)
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-4 for other in results[i + 1 :])


@pytest.mark.parametrize("bugs", [BUGS_01, BUGS_02])
def test_diff_of_a_bug_is_what_was_changed_in_the_installed_source(bugs: Zoo) -> None:
    for name, bug in bugs.items():
        owner, attribute, wrong = bug
        right = inspect.getsource(getattr(owner, attribute))
        mended = inspect.getsource(getattr(wrong, "__func__", wrong))
        lines = diff(bug).splitlines()
        removed = [line[2:] for line in lines if line.startswith("- ")]
        added = [line[2:] for line in lines if line.startswith("+ ")]
        assert removed and added and len(lines) == len(removed) + len(added) <= 5, name
        assert all(line in right and line not in mended for line in removed)
        assert all(line in mended and line not in right for line in added)


def test_a_bug_made_from_another_source_than_the_installed_is_refused() -> None:
    for text in ("this is not there", "heads"):
        count = inspect.getsource(naive_attention).count(text)
        with pytest.raises(ValueError, match=f"'{text}' is {count} times in naive_attention"):
            edited(attention_module, "naive_attention", (text, "x"))


def test_zoo_shows_each_bug_with_its_line_its_distance_and_its_verdict(
    model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    right = naive_logits(model)
    assert zoo(BUGS_01, lambda: naive_logits(model), right + 3e-6) == 4
    said = capsys.readouterr().out
    assert said.startswith("without a bug: max |Δ| < 1e-05, tolerance 0.0001\n")
    for name, bug in BUGS_01.items():
        with planted(name):
            off = (naive_logits(model) - right).abs()
        told = said[said.index(f"\n{name}\n") :].split("  ✔ caught: ")
        assert all(f"    {line}\n" in told[0] for line in diff(bug).splitlines())
        rows = (off.amax(-1) > 1e-4).nonzero().flatten().tolist()
        wrong = f"wrong in {len(rows)} of {len(off)} rows, first in row {rows[0]}"
        assert told[1].startswith(f"max |Δ| = {float(off.max()):.2g} > 0.0001; {wrong}")
    assert torch.equal(naive_logits(model), right)


def test_zoo_says_what_a_test_does_not_catch(
    model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    right = naive_logits(model)
    bugs = {name: BUGS_01[name] for name in ("RoPE turns neighbours", "gate and up swapped")}
    assert zoo(bugs, lambda: right) == 0
    said = capsys.readouterr().out
    assert said.count("  not caught: max |Δ| = 0\n") == 2 and "✔" not in said
    assert zoo(bugs, lambda: naive_logits(model), tolerance=1e9) == 0
    assert capsys.readouterr().out.count("not caught: max |Δ| < 1e+0") == 2
    assert zoo(bugs, lambda: naive_logits(model) * math.nan, right) == 2, "NaN is caught"


def test_unknown_bug_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ValueError, match="no bug 'moth'") as error, planted("moth"):
        pass
    assert all(name in str(error.value) for name in BUGS_01)
