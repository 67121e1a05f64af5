"""Parts of notebook 01 with one usual slip each: their story is heard before the right one.

Every function has the shapes of the right one and raises no error.
"""

import math

import torch
from torch import Tensor

from tutorial_engine.learn.parts import model as own
from tutorial_engine.learn.parts.model import Attend, LayerWeights
from tutorial_engine.model.attention import causal_mask


def heads_crosswise(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A projection that deals the numbers out to the heads one by one, as cards."""
    q, k, v = ((x @ w.T).unflatten(-1, (head_dim, -1)).mT for w in (w_q, w_k, w_v))
    return q, k, v


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention whose weights add up to one for each key, where they must for each query."""
    scores = q @ k.T / math.sqrt(k.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(0) @ v


def blind_to_itself(q_len: int, kv_len: int, window: int) -> Tensor:
    """A mask that begins one token too early: `<` for `<=`. The first token sees itself."""
    mask = causal_mask(q_len, kv_len).tril(kv_len - q_len - 1)
    mask[0, 0] |= q_len == kv_len
    return mask


def turn_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE of interleaved pairs, in a model that was trained with half-split ones."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def without_residual(x: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    """A layer that forgets to add what came in."""
    return own.layer(x, w, angles, attend) - x
