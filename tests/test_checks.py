"""Every exercise: right answers pass, however they are written, and each mistake is named.

The slips are those of the checks themselves; beside them stand wrong answers that no slip is.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    "K" in which → which == "K"
    "V" in which → which == "V"
        copied: nothing; of "KV" each letter counts
    k[slots] = donor_k[slots] → k[:] = donor_k
    v[slots] = donor_v[slots] → v[:] = donor_v
        copied: K of slots 0 to 5 in layer 2
    k[slots] = donor_k[slots] → k[slots[0]] = donor_k[slots[0]]
    v[slots] = donor_v[slots] → v[slots[0]] = donor_v[slots[0]]
        asked: V of slots 2 and 5 in layer 0; copied: V of slot 5 in layer 0
    """,
)
FLOOR_SLIPS = slips_of(  # told by an amount that is counted alone
    c2.least_seconds,
    """
    2 * num → 4 * num
        it counts 28,000,000,000 FLOPs in place of 14,000,000,000; two for each weight and token
    4 * num → 2 * num
        it counts 2,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes
    (4 * num_weights + kv_bytes) → ((4 * num_weights + kv_bytes) * num_tokens)
        it counts 28,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes, and
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


def static_cache(*changes: tuple[str, str]) -> Any:
    return rewritten(MyStaticCache, *changes)


def static_with(written: str) -> Any:
    """A static cache in which this stands where k and v are written."""
    return static_cache(("self.k[layer, start:end], self.v[layer, start:end] = k, v", written))


def in_memory(dtype: str, *changes: tuple[str, str]) -> Any:
    return static_cache(("heads, dim)", f"heads, dim, dtype={dtype})"), *changes)


PUT = ("self.k[layer, start:end]", "self.k[layer, batch.positions]")  # wants one dtype
IN_NUMPY = "torch.from_numpy(self.k.numpy().copy())"


class IntoACopy(static_with("self.k[layer][batch.positions].copy_(k)")):  # type: ignore[misc]
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = torch.empty_like(self.k), torch.empty(self.v.shape)


class Shared(MyCache):
    kv: dict[int, tuple[Tensor, Tensor]] = {}  # noqa: RUF012  the mistake

    def __init__(self) -> None:
        type(self).kv = {} if len(Shared.kv.get(0, [[]])[0]) != 8 else Shared.kv


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


class CopiesInPlace(MyStaticCache):
    """The old ones come back from a second memory, each step."""

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> Any:
        start = int(batch.positions[0])
        old = torch.empty(2, start, *k.shape[1:])
        old[0], old[1] = self.k[layer, :start], self.v[layer, :start]
        self.k[layer, :start], self.v[layer, :start] = old
        return super().update(layer, k, v, batch)


def transplant_anew(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    """Right: a new dict of lists, in float64, slot by slot; the memory stays as it was."""
    new = {one: [x.double() for x in pair] for one, pair in memory.items()}
    for i, slot in ((i, slot) for i in range(2) if "KV"[i] in which for slot in slots):
        new[layer][i][slot] = donor[layer][i][slot]
    return new


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
            (cache_with(("[(k, v)]", "[k, v]")), "without the list"),
            (cache_with(("[(k, v)]", "torch.cat(k, v)")), "one tuple"),
            (Shared, "make the dict in __init__"),
            (cache_with(("torch.cat(pair)", "pair[0] + pair[1]")), "`+` adds numbers"),
            (cache_with(("torch.cat(pair)", "torch.cat((pair, pair))")), "join k to its first"),
            (cache_with(("(k, v), strict", "(k, k), strict")), "v gets the new k; it must get"),
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
        ],
    ),
    "transplant": Exercise(
        c2.check_transplant,
        [transplant, transplant_anew],
        {**c2.TRANSPLANT_SLIPS, **TRANSPLANT_SLIPS},
        [
            (lambda memory, donor, layer, *_: {layer: memory[layer]}, "a dict with layers [2]"),
            (lambda memory, donor, layer, *_: {**memory, layer: donor[layer][0]}, "no pair"),
            (
                lambda memory, donor, layer, slots, _: memory[layer][0].__setitem__(
                    slots, donor[layer][0]
                ),
                "take the same slots of both",
            ),
            (lambda memory, donor, layer, slots, _: memory[layer][slots], "is a pair (k, v)"),
        ],
    ),
    "MyStaticCache": Exercise(
        c2.check_static_cache,
        [MyStaticCache, HeadsFirstView, in_memory("torch.float64")],
        c2.STATIC_SLIPS,
        [
            (Grows, "the right k, but in new memory"),
            (static_cache(("config.num_hidden_layers", "4")), "config has the number of layers"),
            (static_cache((", max_len, heads", ", 4096, heads")), "is a size typed in?"),
            (in_memory("torch.bfloat16"), "in torch.bfloat16, and rounds it"),
            (in_memory("torch.float64", PUT), "Keep the dtype of k and v"),
            (CopiesInPlace, "it writes old k and v again"),
            (static_cache(("torch.zeros_like(self.k)", IN_NUMPY)), "make it with torch.zeros"),
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
            (
                static_cache(("self.k = torch", "k = torch"), ("(self.k)", "(k)")),
                "has no attribute 'k'. Make the memory in __init__",
            ),
            (
                static_cache(("num_key_value_heads", "num_attention_heads")),
                "A buffer of a layer is [max_len, K/V heads, head_dim]",
            ),
        ],
    ),
    "run_new": Exercise(
        c2.check_run_new,
        [RIGHT["run_new"], token_by_token],
        c2.RUN_SLIPS,
        [
            (lambda m, a, ids, n: RIGHT["run_new"](m, a, ids, max(0, n - 1)), "runs 2 tokens"),
            (lambda m, a, ids, n: m(Batch.from_sequences(ids[n:], [n]), a), "a list of sequences"),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([ids[n:]], [[*range(n, 9)]]), a),
                "wants one position for each sequence, that of its first token",
            ),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([torch.tensor(ids[n:])], [n]), a),
                "wants lists of ids",
            ),
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
            (lambda run: run([9, 8, 7, 6], []), "0 of 4"),
            (lambda run: run([65] * 4, [], 2), "2 of 4 bugs are caught. Not caught: decode starts"),
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
            lambda *case: tuple(np.float64(slot) for slot in slots_to_write(*case)),
        ],
        c2.SLOT_SLIPS,
        [
            (slots_in_rows, "no list for each row"),
            (
                lambda c, new, m: [r * m + c[r] + i for r in c for i in range(new[r])],
                "Count the rows: `for r in cached` gives numbers of tokens",
            ),
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


def overdraws(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    shares = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if budget:
            shares[name] = min(left, budget)
            budget -= left
    return shares


GIVE_WAY = slips_of(
    RIGHT["slots_for"],
    """
    return None → pass
        goes on after C itself gave way
    victim = running[-1] → continue
        nobody gives way
    victim = running[-1] → victim = running.pop()
        preempt takes it out
    return slots → return slots and allocate(request)
        keep what allocate gave
    """,
)


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


def typed_patience(self: Any) -> Request:
    same = object.__new__(type(self))
    same.__dict__ |= self.__dict__ | {"patience": 0.15}
    return first_that_is_late(same)


class Sluggish(ShortestFirst):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(super().num_tokens_to_run(request, plan), 4)


def metrics(change: Function) -> Function:
    return but("ttft_and_tpot", change)


EXERCISES |= {
    "num_tokens_to_run": Exercise(
        c3.check_num_tokens,
        [
            RIGHT["num_tokens_to_run"],
            but("num_tokens_to_run", torch.tensor),
        ],
        c3.SHARE_SLIPS,
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
            (waiting_first, "those who run already come first"),
        ],
    ),
    "slots_for": Exercise(
        check_slots_for,
        [RIGHT["slots_for"]],
        {**GIVE_WAY_SLIPS, **GIVE_WAY},
        [
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
            (lambda gap: gap - 10, "for 60.7 ms got 50.7; a budget is a whole number of tokens"),
        ],
    ),
    "ShortestFirst": Exercise(
        c3.check_shortest,
        [
            *(ShortestFirst, policy(by_loop)),
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
        ],
        c3.FAIR_SLIPS,
        [
            (policy(typed_patience), "instead of self.patience?"),
            (policy(lambda self: min(late(self), key=lambda one: one.arrival)), "list is empty"),
            (policy(lambda self: self.now > 0.1), "self.now() is the time"),
            (policy(eval("lambda self: self.now() > patience")), "in a method it is self.patience"),
        ],
    ),
}

# -- notebooks 04, 05 and appendix A1 -------------------------------------------------------------

Refs, Cached = dict[int, int], dict[Any, int]


ALLOCATE = slips_of(
    RIGHT["allocate"],
    """
    block_table.append(free_blocks.pop(0)) → block_table = [*block_table, free_blocks[0]]
        change both lists in place
    pos // block_size == len(block_table) → pos + 1 >= len(block_table) * block_size
        position 3 is the last one in its block; the next
    block_table.append(free_blocks.pop(0)) → block_table += free_blocks; free_blocks.clear()
        the table got 3 blocks: take one
    == len(block_table) → == len(block_table) or pos == 5 and free_blocks
        position 5 is in a block of the table: then take no block
    if not free_blocks: → if False:
        No block is free: return None
    """,
)
FREE = slips_of(
    RIGHT["free"],
    """
    free_queue[:] = without → free_queue = without
    + with_hash → if without else free_queue; free_queue += with_hash
        [3, 9, 2, 5] now, and the queue lacks them. (If you wrote
    without + free_queue → free_queue
        lacks [3, 9], which have no hash: they go to
    free_queue + with_hash → free_queue
        nobody holds [3, 2, 1, 0] now, and the queue lacks
    for block in table: → for block in [block for block in table if ref_cnt[block] == 1]:
    = without + → = without[::-1] +
        count down for [0, 1], too: a request gives its whole
    without + free_queue + with_hash → without + with_hash
        [7, 8] were in the queue before, and it lacks them now
    == 0] → == 0 or hashes[block] is None]
        another request still holds [6]: only a block whose
    ref_cnt[block] -= 1 → ref_cnt[block] = 0 if hashes[block] is None else ref_cnt[block] - 1
        another request still holds [6]: count down by one
    free_queue[:] = → [ref_cnt.pop(block) for block in gone]; free_queue[:] =
        ref_cnt has lost [0, 1, 2, 3]: nobody holds
    if ref_cnt[block] == 0] → ]
        another request still holds [0, 1]: only a block
    free_queue[:] = → hashes.update(dict.fromkeys(hashes)); free_queue[:] =
        free changes no hash
    + with_hash → + with_hash; len(table) == 1 and free_queue.sort()
        the table [3] was given back (none without a hash), and the
    """,
)
TAKE = slips_of(
    RIGHT["take"],
    """
    del cached → hashes[block] = None; del cached
        do you set hashes[block] to None before you look it up?
    pop(0) → pop()
    hashes[block] is not None → True
        The first of the queue, 3, has one: do you take another block?
    del cached[hashes[block]] → del cached[block]
        the keys of `cached` are hashes, not blocks
    hashes[block] is not None → True
        KeyError: None; block 5 has no hash
    hashes[block] is not None → hashes[block] is not None and len(free_queue) < 5
        tokens came, and what can be found is {
    """,
)
FIND = slips_of(
    RIGHT["find"],
    """
    token_ids[end - block_size : end] → token_ids[:end]
        got 8 tokens in blocks
    hash_of(last, token_ids[end - block_size : end]) → hash_of(token_ids[:end], last)
        hash_of(parent, tokens) is given the tokens first
    break → return None
        returns None at a miss: return what was found so far
    hash_of(last, token_ids[end - block_size : end]) → hash(tuple(token_ids[:end]))
    if last not in cached: → if False:
        the keys of `cached` come from `hash_of`
    cached[last]) → last := cached[last])
        hash_of got 5 as the parent
    return found → cached.clear(); return found
        find only looks
    range(block_size, len(token_ids), → range(block_size, len(token_ids) + block_size - 1,
        no token is left to run
    range(block_size, len(token_ids), block_size) → iter(lambda: block_size, 0)
    hash_of(last, → hash_of(None,
        called again and again
    token_ids[end - block_size : end] → [token_ids[end - block_size]]
        first tokens in blocks of 4: a hash belongs
    """,
)


def find_all_hashes_first(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> Any:
    """Open blocks have hashes here as well, which nobody has; and the answer is a tensor."""
    keys: list[Any] = []
    for start in range(0, len(tokens), size):
        parent = keys[-1] if keys else None
        keys.append(hash_of(parent, torch.tensor(tokens[start : start + size])))
    count = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
    return torch.tensor([cached[key] for key in keys[: min(count, (len(tokens) - 1) // size)]])


def find_then_pop(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    """Right for every prompt that has a token."""
    found = RIGHT["find"]([*tokens, 0], size, hash_of, cached)
    if len(found) * size == len(tokens):
        found.pop()
    return found  # type: ignore[no-any-return]


def find_with_a_gap(tokens: list[int], size: int, *_: object) -> list[int]:
    for _ in range(size, len(tokens), size):
        ...
    return []


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


def gathered(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    keys, values = k[table].flatten(0, 1)[:n], v[table].flatten(0, 1)[:n]
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def list_of_scores(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """The scores of all blocks in a list first, then the sums: every key is read once."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scores = [k[b, : min(size, n - at)] @ q / math.sqrt(len(q)) for at, b in blocks]
    m = max(float(own.max()) for own in scores)
    p = [torch.exp(own - m) for own in scores]
    sums = [own @ v[b, : len(own)] for own, (_, b) in zip(p, blocks, strict=True)]
    return torch.stack(sums).sum(0) / sum(own.sum() for own in p)


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


def step_that(keep: Callable[[Any, Tensor], object]) -> Function:
    """A make_step whose step keeps the positions in its own way; right if they stay."""

    def make_step(gpu: GpuMemory) -> Any:
        lens, positions = gpu.tensor([1, 1]), gpu.tensor(range(8))
        replay = gpu.record(lambda lens, at: at < lens[:, None], lens, positions)

        def step(new_lens: list[int]) -> Tensor:
            lens.copy_(torch.tensor(new_lens))
            return replay()

        keep(step, positions)
        return step

    return make_step


step_that_keeps = step_that(lambda step, positions: setattr(step, "keeps", positions))
step_that_keeps_a_view = step_that(lambda step, positions: setattr(step, "keeps", positions[:]))
step_that_keeps_the_last = step_that(lambda _, positions: setattr(step_that, "last", positions))


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


def step_that_warms_up(gpu: GpuMemory) -> Any:
    step = step_that_keeps(gpu)
    step([1, 1])
    return step


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


def rank_mlp_by_slices(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, n: int, *, act: Any = silu
) -> Tensor:
    """With a default that is given by name: it can be sent."""
    own = slice(len(gate) // n * rank, len(gate) // n * (rank + 1))
    return (act(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T


def ranks_with(old: str, new: str) -> Function:
    """The right part of the MLP with another text in its place."""
    return rewritten(_part, (old, new))


def attention_with(*changes: tuple[str, str]) -> Function:
    return rewritten(RIGHT["block_attention"], *changes)  # type: ignore[no-any-return]


MASKED = (  # right numbers, but the rest of the last block is computed with: 0 · NaN = NaN
    "k_pool[block, :n] @ q / math.sqrt(len(q))",
    "torch.where(torch.arange(block_size) < n, k_pool[block] @ q / math.sqrt(len(q)), -math.inf)",
)
LAST_OPEN = "block_size if start + block_size < kv_len else kv_len % block_size"  # 0 if it is whole
SCORES_OF_WHOLE_BLOCKS = ("k_pool[block, :n] @ q", "(k_pool[block] @ q)[:n]")  # they are cut


RIGHT_ATTENTION = [
    *(RIGHT["block_attention"], attention_with(SCORES_OF_WHOLE_BLOCKS)),
    *(one_by_one, two_passes, list_of_scores, in_numpy),
]
EXERCISES |= {
    "num_blocks": Exercise(
        c4.check_num_blocks,
        [RIGHT["num_blocks"], but("num_blocks", np.int64)],
        c4.BUDGET_SLIPS,
        [
            (lambda *case: 1, "so 1,280 fit"),
            (lambda b, *m: b // (1.0 * math.prod(m) * 2), "use //, and only whole factors"),
            (lambda b, n, h, d, i, s: b // n * h * d * i * s, "from left to right"),
        ],
    ),
    "slots": Exercise(
        c4.check_slots,
        [
            *(
                RIGHT["slots"],
                but("slots", torch.tensor),
                but("slots", partial(np.array, dtype=int)),
            ),
        ],
        c4.SLOTS_SLIPS,
        [
            (lambda t, s, n: RIGHT["slots"](t, s, n - 1), "9 slots for 10 tokens"),
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
            but("allocate", lambda slot: slot and np.int64(slot)),
        ],
        {**c4.ALLOCATE_SLIPS, **ALLOCATE},
        [
            (lambda t, free, s, p: t[p // s] * s + p % s, "is that one in the table?"),
            (
                lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) if p % s or free else None,
                "position 4 lies in a block of the table: it needs no free block",
            ),
            (
                lambda t, free, s, p: (
                    None if p // s == len(t) and len(free) < 2 else RIGHT["allocate"](t, free, s, p)
                ),
                "returns None",
            ),
            (lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) or -1, "expected slot 0"),
        ],
    ),
    "free": Exercise(
        learn.check_free,
        [RIGHT["free"], free_by_emptying],
        {**FREE_SLIPS, **FREE},
        [
            (lambda table, *rest: RIGHT["free"](table[:5], *rest), "left ref_cnt"),
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
        {**TAKE_SLIPS, **TAKE},
        [
            (
                lambda queue, hashes, cached: (
                    None if hashes[queue[0]] is None else RIGHT["take"](queue, hashes, cached)
                ),
                "it returns None: return the block here, too",
            ),
        ],
    ),
    "find": Exercise(
        learn.check_find,
        [RIGHT["find"], find_all_hashes_first, find_then_pop],
        {**FIND_SLIPS, **FIND},
        [
            (lambda t, n, hash_of, _: [hash_of(None, t[0])], "got 11 as the tokens; in hash_of("),
            (lambda *_: [2], "expected [5, 0, 3]"),
            (lambda t, *rest: RIGHT["find"]([*t, 0], *rest)[:-1], "the last block counts, too"),
            (but("find", set), "must return a list of blocks"),
        ],
    ),
    "block_attention": Exercise(
        learn.check_block_attention,
        RIGHT_ATTENTION,
        BLOCK_SLIPS,
        [
            (gathered, "that is a gather"),
            (
                attention_with(("min(block_size, kv_len - start)", LAST_OPEN)),
                "kv_len % block_size is 0 where the last block is whole",
            ),
            (attention_with(("range(0, kv_len, block_size)", "()")), "no block was read"),
            (
                attention_with(MASKED, ("weights @ v_pool[block, :n]", "weights @ v_pool[block]")),
                "slots that nobody wrote",
            ),
            (attention_with(("max(largest, float(scores.max()))", "0.0")), "exp() overflows"),
            (copied_blocks, "copies of all blocks"),
            (
                attention_with(("largest - new_largest)", "new_largest - largest)")),
                "exp(new m − old m) and",
            ),
            (
                attention_with(("kv_len - start", "max(0, kv_len - block * block_size)")),
                "index i, which enumerate gives",
            ),
            (attention_with(("float(scores.max())", "scores")), "one number each: scores.max()"),
            (
                attention_with(("max(largest, float(", "torch.maximum(largest, (")),
                "m begins as torch.tensor(-torch.inf)",
            ),
            (attention_with(("(scores - new_largest).exp()", "math.exp(scores)")), "use torch.exp"),
            (attention_with(("math.sqrt(len(q))", "torch.sqrt(len(q))")), "write len(q) ** 0.5"),
            (attention_with(("-math.inf", "0.0")), "m begins at −∞"),
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
            (
                lambda c, s, k, d: (c.seq_rm(s, k, k + d), c.seq_add(s, k + d, 10, -d)),
                "right in short texts, but in one of 20 tokens the logits are off by",
            ),
            (drops_one_too_late, "that is right, but it kept the tokens [0, 5, 6, 7, 8, 9]"),
            (lambda c, s, k, d: c.seq_ids, "call its seq_rm and its seq_add"),
            (lambda c, s, k, d: c.seq_add(k + d, -1, -d), "It takes seq_id, p0, p1, delta"),
        ],
    ),
    "rank_mlp": Exercise(
        check_rank_mlp,
        [rank_mlp_by_slices],
        RANK_SLIPS,
        [
            (ranks_with("down[:, own].T", "down.T"), "down is whole; take the columns"),
            (ranks_with("down[:, own]", "down[own]"), "a column of down, not a row"),
            (ranks_with("down[:, own].T", "down[:, own]"), "the part of down is not transposed"),
            (ranks_with("x @ gate[own].T", "x @ gate[own]"), "gate or up is not transposed"),
            (ranks_with("x @ up[own].T", "x @ up.T"), "up is whole, and gate is cut"),
            (ranks_with("gate[own].T", "gate[:, own].T"), "a feature is a row of gate and of up"),
            (lambda x, g, u, d, r, n: (x @ g.T * (x @ u.T)) @ d.chunk(n, 1)[r].T, "up are whole"),
            (lambda x, *_: torch.distributed.all_reduce(x), "return the partial sum alone"),
            (
                ranks_with("F.silu", "F.relu"),
                "rank=2, num_ranks=6; these are not the sums of its features' products; this rank "
                "has features 12 to 17 (of 0 to 35)",
            ),
            (ranks_with("len(gate) // num_ranks", "len(gate) / num_ranks"), "divide with `//`"),
            (ranks_with("    return", "    gate.zero_()\n    return"), "it changes gate"),
            (torch.no_grad()(_part), "the numbers are right, but it cannot be sent to another"),
        ],
    ),
    "end_to_end": Exercise(
        check_end_to_end,
        [end_to_end_by_blocks],
        END_TO_END_SLIPS,
        [
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
            (
                lambda lens: (1, 128, 21.9),
                "the unused part (0 .. 1, not rounded) should be 0.21875",
            ),
            (lambda lens: 64, "contexts of [100], got 64; return three numbers"),
        ],
    ),
    "make_step": Exercise(
        check_step,
        [step_that_keeps, step_that_keeps_a_view, step_that_warms_up],
        STEP_SLIPS,
        [
            (lambda gpu: lambda lens: lens, "step([3, 5]) must give [[1, 1, 1, 0"),
            (lambda gpu: (step_that_keeps(gpu), 0), "return the function step(new_lens)"),
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
            lambda *case: deque(free_order_of_the_pool(*case)),
            lambda *case: (block for block in free_order_of_the_pool(*case)),
        ],
        FREE_ORDER_SLIPS,
        [
            (lambda *case: str(free_order_of_the_pool(*case)), "got '[3, 4, 2, 0, 1]'"),
            (lambda queue, tables, _: [*queue, *chain(*tables)], "block 4 has no hash"),
            (lambda queue, tables, _: [*chain(*tables), *queue], "block 0 has a hash"),
            (free_order_of_all_tables, "which block of a table is taken first"),
        ],
    ),
    "hits": Exercise(
        check_hits,
        [
            right_hits,
            hits_by_names,
            lambda *case: iter(right_hits(*case)),
        ],
        HITS_SLIPS,
        [
            (lambda prompts, size: [0 for _ in prompts[1:]], "a list of 4 numbers is wanted"),
            (lambda prompts, size: [0, 68, 44, 68], "each number is a multiple of 32"),
            (lambda ps, size: [n // size for n in right_hits(ps, size)], "numbers of blocks"),
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
        [log_by_tokens],
        LOG_SLIPS,
        [
            (lambda size, one, block, longest: (one, longest), "expected 491,520 and 1638.40"),
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
    assert c1.check_kv_bytes(kv_bytes, QWEN3_06B).ok is True
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
    words = {list_of_scores: keeps, two_passes: ". But it reads keys more"}
    assert said.startswith(words.get(function, "")) and bool(said) == (function in words)
