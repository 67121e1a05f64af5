"""The exercises of notebook 01: answers that are right, and wrong ones."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from checkpoints import QWEN3_06B
from exercises import INF, RIGHT, Exercise, Function, but
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.functional import silu

from tutorial_engine.learn import checks_01 as c1
from tutorial_engine.learn.judge import CODE, slips_of
from tutorial_engine.learn.own import LayerWeights, rms_norm
from tutorial_engine.model.attention import causal_mask, naive_attention
from tutorial_engine.model.config import ModelConfig

# -- notebook 01 ---------------------------------------------------------------------------------


def attention_by_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = []
    for query, allowed in zip(q, mask, strict=True):
        shares = [math.exp(float(query @ key) / math.sqrt(len(key))) for key in k]
        shares = [s if bool(ok) else 0.0 for s, ok in zip(shares, allowed, strict=True)]
        rows.append(sum(s / sum(shares) * value for s, value in zip(shares, v, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


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


def window(q_len: int, kv_len: int, size: int, late: int = 0) -> Tensor:
    """The first query stands `late` positions after its own."""
    first = kv_len - q_len + late
    return torch.tensor([[0 <= first + q - k < size for k in range(kv_len)] for q in range(q_len)])


def joined_by_and(q_len: int, kv_len: int, size: int) -> Tensor:
    back = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    return back >= 0 and back < size  # type: ignore[return-value]


def window_by_slices(q_len: int, kv_len: int, size: int) -> Tensor:
    mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for query, position in enumerate(range(kv_len - q_len, kv_len)):
        mask[query, position - size + 1 : position + 1] = True
    return mask


def rope_complex(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


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


def whole_layer(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """All heads at once; a group is an axis of its own, and nothing is repeated."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("qghd,kgd->ghqk", q, k) / q.shape[-1] ** 0.5
        scores += torch.full_like(scores, -INF).triu(1)
        return torch.einsum("ghqk,kgd->qghd", scores.softmax(-1), v).flatten(1, 2)

    return RIGHT["layer"](x, w, angles, mixed)


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


def queries_before_heads(x: Tensor, w: LayerWeights, angles: Tensor) -> Tensor:
    """The scores are qhk, and meet a mask [T, T]."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        return scores.masked_fill(~causal_mask(len(q), len(q)), -INF)

    return RIGHT["layer"](x, w, angles, mixed)


LAYER = """
def layer(x, w, angles, attend):
    q, k, v = project(rms_norm(x, w.input_norm, eps), w.q, w.k, w.v, head_dim or len(w.q_norm))
    q = rope(rms_norm(q, w.q_norm, eps), angles)
    k = rope(rms_norm(k, w.k_norm, eps), angles)
    x = x + attend(q, k, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm, eps)
    return x + (silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T
"""


def layer_of(**names: Any) -> Function:
    """A layer as a notebook has it: what it reads are names of its cells."""
    scope = {"rms_norm": rms_norm, "silu": silu, "head_dim": 0}
    scope |= {"eps": 1e-6, "project": RIGHT["project"], "rope": RIGHT["rope"], **names}
    exec(LAYER, scope)
    return scope["layer"]


def score(shares: Tensor, period: int) -> Tensor:
    return shares.diagonal(offset=1 - period)[1:].mean()


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
        before the softmax (in Python it is float("-inf"))
    -INF → -15.0
        with the scores −2000 (allowed) and 0 (forbidden) the forbidden key gets the share 1,
    -INF → -1000.0
        the forbidden key gets the share 1, because only exp(−∞) is 0; make forbidden scores −∞
    .softmax(dim=-1) → .exp()
        instead of 1; divide each exp(score) by the sum over the keys of its query: softmax
    dim=-1 → dim=0
        the softmax runs over the queries; take the last axis
    / k.shape[-1] ** 0.5 →
        divided by 1, and √D is 2.83 here; D is the size of the last axis ▸ k.shape[-1] ** 0.5
    ** 0.5 →
        divided by 8, and √D is 2.83 here
    k.shape[-1] → 8
        divided by 2.83, and √D is 2 here
    """,
)

EXERCISES: dict[str, Exercise] = {
    "attention": Exercise(
        c1.check_attention,
        [
            RIGHT["attention"],
            attention_by_loop,
            attention_in_place,
            lambda q, k, v, m: sdpa(q[None], k[None], v[None], attn_mask=m[None])[0],
        ],
        {**c1.ATTENTION_SLIPS, **ATTENTION_SLIPS},
        [
            (masked_after, "−inf BEFORE the softmax"),
            (lambda q, k, v, m: q @ k.T / head_dim**0.5 @ v, "D is the size of the last axis"),  # type: ignore[name-defined]  # noqa: F821
            (lambda q, k, v, m: (q @ k.T + ~m * -INF).softmax(-1) @ v, "0 times −inf is NaN"),
            (lambda q, k, v, m: q, "other numbers, and no mix of the values"),
            (lambda q, k, v, m: q.masked_fill(not m, 0), "~mask turns each True into False"),
            (lambda q, k, v, m: (q @ k.T).masked_fill(~m, "-inf"), 'a number: float("-inf")'),
            (
                lambda q, k, v, m: (q @ k.T).masked_fill(~m, -inf),  # type: ignore[name-defined]  # noqa: F821
                'not defined. In Python −∞ is float("-inf")',
            ),
            (lambda q, k, v, m: v @ (q @ k.T), "The shares stand to the left of the values"),
            (lambda q, k, v, m: (q @ k.T) / (q @ k.T).sum(-1), "keepdim=True keeps the axis"),
            (but("attention", lambda out: (out, 0)), "got tuple; return only the output"),
            (but("attention", lambda out: out.half()), "in torch.float16, which keeps 4"),
            (
                lambda q, k, v, m: naive_attention(q[:, None], k[:, None], v[:, None], m),
                "got AttentionResult; the model goes on with tensors, and its .out is one",
            ),
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
        [RIGHT["window_mask"], window],
        c1.MASK_SLIPS,
        [
            (
                lambda q, k, w: torch.ones(q, k, dtype=torch.bool),
                "query 0 is at position 0, and it sees key 1",
            ),
            (lambda q, k, w: window(q, k, w, late=-1), "position -1, as its keys show; it must"),
            (
                window_by_slices,
                "query 0, at position 0, sees no key, not itself (a negative start of a slice",
            ),
            (
                lambda q, k, w: window(q, k, w) & ~window(q, k, 1),  # (back > 0) & (back < w)
                "window=2; a query does not see itself; key_pos <= query_pos",
            ),
            (lambda q, k, w: torch.zeros(q, k).bool(), "at position 0, sees no key, not itself"),
            (lambda q, k, w: window(q, k, w + 1), "sees up to 3 keys; 2 expected, itself included"),
            (
                lambda q, k, w: torch.zeros(q, k).masked_fill(~window(q, k, w), -INF),
                "must be bool, True = may attend; got torch.float32; this one is meant to be added",
            ),
            (joined_by_and, "Join two conditions with &, each in its own brackets"),
            (lambda q, k, w: torch.ones(q) + torch.ones(k + 1), "of queries and a row of keys"),
        ],
    ),
    "kv_head": Exercise(
        c1.check_kv_head,
        [
            RIGHT["kv_head"],
            lambda h, heads, kv: torch.tensor(h) * kv // heads,
            lambda h, heads, kv: np.repeat(np.arange(kv), heads // kv)[h],
            lambda h, heads, kv: int(h / (heads / kv)),
        ],
        c1.HEAD_SLIPS,
        [
            (lambda h, heads, kv_heads: h / (heads // kv_heads), "divide with //"),
            (lambda h, heads, kv_heads: heads // h, "h begins at 0, and there are fewer K/V heads"),
            (
                lambda h, heads, kv_heads: h // (heads / kv_heads),
                f"is the size of a group a float?{CODE}num_heads // num_kv_heads",
            ),
        ],
    ),
    "rope": Exercise(
        c1.check_rope,
        [RIGHT["rope"], rope_complex, rope_in_place],
        c1.ROPE_SLIPS,
        [
            (lambda x, angles: RIGHT["rope"](x, 2 * angles), "position 0 is right, others not"),
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
        ],
    ),
    "project": Exercise(
        c1.check_project,
        [
            RIGHT["project"],
            but("project", lambda qkv: (one for one in qkv)),
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
        [RIGHT["layer"], layer_of()],
        c1.LAYER_SLIPS,
        [
            (lambda x, w, angles, attend: 2 * x, "layer 0; other numbers; compare with steps"),
            (
                layer_of(head_dim=32),
                f"K/V heads of 18 numbers, hidden size 40); is a size typed in?{CODE}"
                "The head dimension is len(w.q_norm); .flatten(1) joins any number of heads",
            ),
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
            (lambda x, w, angles, attend: x @ w.gate, "multiply by w.gate.T or w.up.T"),
            (
                lambda x, w, *_: w.up @ x.T @ w.down.T,
                "left of the @, and a matrix such as w.gate.T to the right",
            ),
            (
                lambda x, w, a, attend: RIGHT["layer"](
                    *(x, w, a, lambda *qkv: w.o @ attend(*qkv).flatten(1))
                ),
                "left of the @, and w.q.T or w.o.T to the right",
            ),
            (
                lambda x, w, angles, attend: layer_of(head_dim=len(w.k))(x, w, angles, attend),
                "The head dimension is len(w.q_norm)",
            ),
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
        [whole_layer, by_package],
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
            (by_heads, "right, but with a loop over heads"),
            (queries_before_heads, "a mask [T, T] have the heads first: hqk"),
        ],
    ),
    "induction_score": Exercise(
        c1.check_induction_score,
        [
            score,
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
    "kv_bytes": Exercise(
        lambda answer: c1.check_kv_bytes(answer, SIX_TWO),
        [
            kv_bytes,
            lambda *case: torch.tensor(kv_bytes(*case)),
        ],
        c1.BYTES_SLIPS,
        [
            (lambda c, size: kv_bytes(c, 4), "use the argument"),
            (lambda c, size: 17 * size, "34; count K and V, layers, K/V heads"),
            (lambda c, size: kv_bytes(QWEN3_06B, size) // 7, "it reads QWEN3_06B, use"),
            (lambda c, size: c["head_dim"], "are its attributes: write config.head_dim"),
            (lambda c, size: c.num_layers, "Its numbers are num_hidden_layers, num_key_value_he"),
            (
                lambda c, size: kv_bytes(replace(c, head_dim=32), size),
                f"is its number typed in?{CODE}config.head_dim",
            ),
        ],
    ),
}
