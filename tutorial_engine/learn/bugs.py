"""Introduced in notebook 01. The bug zoo: real one-line bugs, to plant and to take out again.

Each one runs without an error, fits every shape, and changes the result.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.model import attention, layers
from tutorial_engine.model import qwen3 as model
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.rope import RopeAngles, apply_rope


def _interleaved_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = x.shape[-1]
    order = torch.arange(size).view(-1, 2).T.flatten()  # neighbours, brought half a head apart
    return apply_rope(x[..., order], cos, sin)[..., order.argsort()]


def _norm_after_rope(
    self: model.Qwen3Attention,
    hidden: Tensor,
    angles: RopeAngles,
    batch: Batch,
    backend: attention.AttentionBackend,
) -> Tensor:
    q, k, v = self.qkv_proj(hidden).split((self.q_size, self.kv_size, self.kv_size), dim=-1)
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
    q, k = self.q_norm(apply_rope(q, *angles)), self.k_norm(apply_rope(k, *angles))
    return self.o_proj(backend.attend(self.layer, q, k, v, batch).flatten(1))


_right_attention = attention.naive_attention


def _modulo_heads(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> attention.AttentionResult:
    group = q.shape[1] // k.shape[1]
    return _right_attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), *rest)


def _up_gated_by_gate(self: layers.SiluAndMul, x: Tensor) -> Tensor:
    up, gate = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


Zoo = Mapping[str, tuple[object, str, Callable | property | classmethod]]

# name -> (where the right code stands, its name there, the wrong code)
BUGS_01: Zoo = {
    "RoPE turns neighbours": (model, "apply_rope", _interleaved_rope),
    "q_norm and k_norm after RoPE": (model.Qwen3Attention, "forward", _norm_after_rope),
    "query head h reads K/V head h % n": (attention, "naive_attention", _modulo_heads),
    "gate and up swapped": (layers.SiluAndMul, "forward", _up_gated_by_gate),
}


@contextmanager
def planted(name: str, zoo: Zoo = BUGS_01) -> Iterator[None]:
    """Inside the block the engine has the bug. ValueError for one that is not in the zoo."""
    if name not in zoo:
        raise ValueError(f"no bug {name!r}; there are {sorted(zoo)}")
    owner, attribute, wrong = zoo[name]
    right = getattr_static(owner, attribute)  # the thing itself: a classmethod stays one
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
