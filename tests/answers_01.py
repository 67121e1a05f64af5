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

from tutorial_engine.learn.exercises import lesson_01 as c1
from tutorial_engine.learn.exercises.judge import slips_of
from tutorial_engine.learn.parts.model import LayerWeights, rms_norm
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


def attention_row_by_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The output has the shape of q, as the exercise says."""
    out = torch.zeros_like(q)
    for row, (query, allowed) in enumerate(zip(q, mask, strict=True)):
        scores = (k[allowed] @ query) / len(query) ** 0.5
        out[row] = scores.softmax(0) @ v[allowed]
    return out


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


OTHER_ATTENTION: list[Function] = [  # no slips of the catalogue
    lambda q, k, v, m: RIGHT["attention"](q, k, v, causal_mask(len(q), len(k))),
    lambda q, k, v, m: RIGHT["attention"](q, k, v, m & causal_mask(len(q), len(k))),
    lambda q, k, v, m: RIGHT["attention"](q, k, v, torch.ones(len(q), len(k)).bool().tril()),
    *slips_of(
        c1._attention,
        """
        -INF → -15.0
            a forbidden score of −15
        -INF → -1000.0
            of −1000
        .softmax(dim=-1) → .exp()
            no sum
        ** 0.5 →
            divided by D
        k.shape[-1] → 8
            a size that is typed in
        """,
    ).values(),
]

EXERCISES: dict[str, Exercise] = {
    "attention": Exercise(
        c1.check_attention,
        [
            RIGHT["attention"],
            attention_by_loop,
            attention_in_place,
            attention_row_by_row,
            lambda q, k, v, m: sdpa(q[None], k[None], v[None], attn_mask=m[None])[0],
        ],
        c1.ATTENTION_SLIPS,
        [
            *((answer, "") for answer in OTHER_ATTENTION),
            (masked_after, "another answer for this input"),
            (lambda q, k, v, m: q @ k.T / head_dim**0.5 @ v, "name 'head_dim' is not defined"),  # type: ignore[name-defined]  # noqa: F821
            (lambda q, k, v, m: (q @ k.T + ~m * -INF).softmax(-1) @ v, "nan, expected"),
            (lambda q, k, v, m: q, "[0, 0]: 1, expected 0.6225"),
            (lambda q, k, v, m: q.masked_fill(not m, 0), "there: q is a tensor [2, 4]; m is"),
            (lambda q, k, v, m: v @ (q @ k.T), "raised RuntimeError"),
            (lambda q, k, v, m: (q @ k.T) / (q @ k.T).sum(-1), "raised RuntimeError"),
            (but("attention", lambda out: (out, 0)), "yours is of type tuple, expected a tensor"),
            (but("attention", lambda out: out.half()), "in torch.float16, which keeps 4"),
            (
                lambda q, k, v, m: naive_attention(q[:, None], k[:, None], v[:, None], m),
                "yours is of type AttentionResult, expected a tensor",
            ),
            (but("attention", lambda out: out.tolist()), "yours is of type list, expected"),
        ],
    ),
    "window_mask": Exercise(
        c1.check_window_mask,
        [RIGHT["window_mask"], window],
        c1.MASK_SLIPS,
        [
            (lambda q, k, w: torch.ones(q, k, dtype=torch.bool), "[0, 2]: True, expected False"),
            (lambda q, k, w: window(q, k, w, late=-1), "queries stand at  [1, 2]"),
            (window_by_slices, "[0, 0]: False, expected True"),
            (lambda q, k, w: torch.zeros(q, k).bool(), "[0, 0]: False, expected True"),
            (
                lambda q, k, w: torch.zeros(q, k).masked_fill(~window(q, k, w), -INF),
                "dtype torch.float32, expected torch.bool",
            ),
            (joined_by_and, "in the line: return back >= 0 and back < size"),
            (lambda q, k, w: torch.ones(q) + torch.ones(k + 1), "raised RuntimeError"),
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
            (
                lambda h, heads, kv_heads: h / (heads // kv_heads),
                "kv_head(0, 6, 2) must be an int, got 0.0, of type float",
            ),
            (lambda h, heads, kv_heads: heads // h, "there: heads = 6; h = 0"),
        ],
    ),
    "rope": Exercise(
        c1.check_rope,
        [RIGHT["rope"], rope_complex, rope_in_place],
        c1.ROPE_SLIPS,
        [
            (lambda x, angles: RIGHT["rope"](x, 2 * angles), "expected       [[[0.5403, -0.8323"),
            (lambda x, a: x[..., :4] * a.cos(), "raised RuntimeError"),
            (lambda x, angles: x * angles.cos()[:, None], "raised RuntimeError"),
            (lambda x, angles: math.cos(angles), "in the line: (lambda x, angles: math.cos"),
            (lambda x, angles: x + 1, "expected       [[[1, 2, 0, 0]]]"),
            (cut_in_twos, "yours          [[[1, 2, 0, 0]]]"),
            (lambda x, angles: own_positions(x), ""),
        ],
    ),
    "project": Exercise(
        c1.check_project,
        [
            RIGHT["project"],
            but("project", lambda qkv: (one for one in qkv)),
        ],
        c1.PROJECT_SLIPS,
        [
            (but("project", torch.stack), "raised RuntimeError"),
            (but("project", torch.cat), "raised RuntimeError"),
            (
                but("project", lambda qkv: [one.chunk(2, dim=1) for one in qkv]),
                "q must be a tensor",
            ),
            (but("project", lambda qkv: torch.cat(qkv, 1)), "got one tensor [1, 4, 2]"),
            (lambda x, w_q, *_: x @ w_q, "raised RuntimeError"),
            (
                lambda x, q, k, v, d: (x @ q.T).view(5, 6, 32),
                "there: x is a tensor [1, 3]; q is a tensor [4, 3]",
            ),
            (lambda *case: RIGHT["project"](*case[:4], 32), "raised RuntimeError"),
            (but("project", lambda qkv: [one.bfloat16() for one in qkv]), "in torch.bfloat16"),
            (
                but("project", lambda qkv: [one.numpy() for one in qkv]),
                "q must be a tensor [T, heads, D], got a ndarray",
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
            (lambda x, w, angles, attend: 2 * x, "w.o = w.down = 0, so that nothing is added"),
            (layer_of(head_dim=32), "raised RuntimeError: unflatten"),
            (layer_of(eps=0.3), "q with other numbers; k with other numbers; v with other"),
            (lambda *given: 2 * RIGHT["layer"](*given), "q as expected; k as expected; v as"),
            (
                layer_of(rope=lambda x, angles: RIGHT["rope"](x, -angles)),
                "it calls your rope, which is not ✔ yet:\nyour rope: turns each pair the wrong",
            ),
            (
                layer_of(rope=lambda x, angles: x @ x),
                "it calls your rope, which is not ✔ yet:\nrope raised RuntimeError",
            ),
            (lambda x, w, angles, attend: x @ w.gate, "raised RuntimeError"),
            (
                lambda x, w, a, attend: RIGHT["layer"](
                    *(x, w, a, lambda *qkv: w.o @ attend(*qkv).flatten(1))
                ),
                "in the line: *(x, w, a, lambda *qkv: w.o @ attend(*qkv).flatten(1))",
            ),
            (
                lambda x, w, a, attend: RIGHT["layer"](
                    *(x, w, a, lambda q, k, v: attend(q, k, v) + attend(q, k, v))
                ),
                "attend is given  2 calls in place of one",
            ),
            (
                lambda x, w, angles, attend: layer_of(head_dim=len(w.k))(x, w, angles, attend),
                "raised RuntimeError",
            ),
            (lambda x, w, *_: rms_norm(x, w.q_norm), "raised RuntimeError"),
            (lambda x, w, *_: x @ w.gate.T * x @ w.up.T, "raised RuntimeError"),
            (lambda x, w, angles, attend: attend(x, x, x, None), "has the mask already; it got 4"),
            (
                layer_of(project=lambda *case: [RIGHT["project"](*case)[i] for i in (1, 0, 2)]),
                "it calls your project, which is not ✔ yet:\nyour project: gives q and k swapped",
            ),
            (
                lambda x, w, a, attend: RIGHT["layer"](x, w, a, lambda q, k, v: attend(k, q, v)),
                "attend must get q, k and v; its q has 2 heads, and its k 4",
            ),
        ],
    ),
    "whole_layer": Exercise(
        c1.check_whole_layer,
        [whole_layer, by_package],
        c1.WHOLE_SLIPS,
        [
            (lambda *case: by_package(*case, out=lambda pair: pair), "raised AttributeError"),
            (lambda *case: by_package(*case, out=lambda pair: pair.out.double()), "same dtype"),
            (
                lambda *case: by_package(*case, out=lambda pair: pair.out.transpose(0, 1)),
                "raised RuntimeError",
            ),
            (by_heads, "right, but the more heads, the more calls of PyTorch"),
            (queries_before_heads, "in the line: return scores.masked_fill(~causal"),
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
            (lambda shares, p: shares[p:, 1 : p + 1].diagonal(), "one number, got shape [2]"),
            (lambda shares, p: score(shares, p) + 1, "expected is the mean of  [0.7, 0.3]"),
            (lambda shares, p: shares[p:, 1 : p + 1].diagonal().tolist(), "one number, got ["),
            (
                lambda shares, p: shares[range(16, 32), range(1, 17)].mean(),
                "raised IndexError",
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
            (lambda c, size: kv_bytes(c, 4), "counts 4 bytes per number"),
            (lambda c, size: 17 * size, "config.head_dim             8"),
            (lambda c, size: kv_bytes(QWEN3_06B, size) // 7, "QWEN3_06B, not its argument"),
            (lambda c, size: c["head_dim"], "raised TypeError"),
            (lambda c, size: c.num_layers, "Did you mean 'num_hidden_layers'?"),
            (lambda c, size: kv_bytes(replace(c, head_dim=32), size), "expected"),
        ],
    ),
}
