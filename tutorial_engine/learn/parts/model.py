"""The learner's functions, running in the real model.

`OwnModel` is the model that ships, taken apart where the exercises are. Each part is the package's
until the learner's is right.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.learn.parts.cache import CACHES
from tutorial_engine.learn.parts.holder import Parts, between_parts, cast_to
from tutorial_engine.model.attention import (
    AttentionBackend,
    NoCache,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM, DecoderLayer
from tutorial_engine.model.rope import apply_rope
from tutorial_engine.sampling.sampler import top_p

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, H, D], k, v [T, H_kv, D] -> [T, H, D]


class LayerWeights(NamedTuple):
    """The matrices of one decoder layer under the names of the textbook, all of them [out, in].

    `input_norm`, `mlp_norm` [hidden] and `q_norm`, `k_norm` [D] are the weights of the RMSNorms;
    the last two are ones where the architecture has no such norm.
    """

    input_norm: Tensor
    q: Tensor  # [H·D, hidden]
    k: Tensor  # [H_kv·D, hidden]
    v: Tensor  # [H_kv·D, hidden]
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor  # [hidden, H·D]
    mlp_norm: Tensor
    gate: Tensor  # [I, hidden]
    up: Tensor  # [I, hidden]
    down: Tensor  # [hidden, I]

    @classmethod
    def of(cls, layer: DecoderLayer) -> "LayerWeights":
        """Those of a layer of the model; its joined matrices come apart again."""
        attn, mlp = layer.self_attn, layer.mlp
        sizes = (attn.q_size, attn.kv_size, attn.kv_size)
        no_norm = torch.ones(attn.head_dim, device=attn.qkv_proj.weight.device)
        q, k, v = attn.qkv_proj.weight.split(sizes)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        return cls(
            input_norm=layer.input_layernorm.weight,
            q=q,
            k=k,
            v=v,
            q_norm=getattr(attn.q_norm, "weight", no_norm),
            k_norm=getattr(attn.k_norm, "weight", no_norm),
            o=attn.o_proj.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate=gate,
            up=up,
            down=mlp.down_proj.weight,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis of x."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


# -- the package's own parts, under the names and signatures of the exercises ----------------------


def window_mask(q_len: int, kv_len: int, window: int) -> Tensor:
    """bool [q_len, kv_len]: a token sees itself and the window − 1 tokens before it."""
    return causal_mask(q_len, kv_len, window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One head: q [q, D], k and v [kv, D], mask [q, kv] → [q, D]."""
    return naive_attention(q[:, None], k[:, None], v[:, None], mask).out[:, 0]


def kv_head(h: int, num_heads: int, num_kv_heads: int) -> int:
    """The K/V head that query head h reads: neighbouring query heads share one (GQA)."""
    return h // (num_heads // num_kv_heads)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, heads, D] turned by angles [T, D / 2] in radians."""
    return apply_rope(x, angles.cos()[:, None], angles.sin()[:, None])


def project(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden] → q [T, H, D], k and v [T, H_kv, D]."""
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, head_dim)) for w in (w_q, w_k, w_v))
    return q, k, v


def layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
    """One decoder layer on the residual stream: x [T, hidden] → [T, hidden]."""
    return _layer(x, w, angles, attend, project, rope)


def _layer(
    x: Tensor,
    w: LayerWeights,
    angles: Tensor,
    attend: Attend,
    project: Callable,
    rope: Callable,
    eps: float = 1e-6,
) -> Tensor:
    q, k, v = project(rms_norm(x, w.input_norm, eps), w.q, w.k, w.v, len(w.q_norm))
    q, k = rope(rms_norm(q, w.q_norm, eps), angles), rope(rms_norm(k, w.k_norm, eps), angles)
    x = x + attend(q, k, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm, eps)
    return x + (F.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


def run_new(
    model: CausalLM, attention: AttentionBackend, token_ids: list[int], num_computed: int
) -> Tensor:
    """Run the tokens that are not computed yet → logits [V] of the last one."""
    batch = Batch.from_sequences([token_ids[num_computed:]], [num_computed])
    return model.compute_logits(model(batch, attention)[-1:])[0]


def keep_top_p(probs: Tensor, p: float) -> Tensor:
    """probs [V] → bool [V], True = in the nucleus."""
    return top_p(probs.log(), p).isfinite()


def why_finished(
    new_ids: Sequence[int],
    text: str,
    eos_ids: Sequence[int],
    stop: Sequence[str],
    max_tokens: int,
) -> str | None:
    """ "stop" at an end-of-text token or a stop string, "length" at max_tokens, None to go on."""
    if new_ids[-1] in eos_ids or any(one in text for one in stop):
        return "stop"
    return "length" if len(new_ids) >= max_tokens else None


PARTS: dict[str, Callable[..., Any]] = {  # in the order of the exercises
    **{part.__name__: part for part in (project, attention, window_mask, kv_head, rope, layer)},
    **CACHES,
    **{part.__name__: part for part in (run_new, keep_top_p, why_finished)},
}


# -- the model made of parts ----------------------------------------------------------------------


class OwnAttention:
    """An attention backend of the parts `attention`, `kv_head` and `window_mask`, head by head.

    With a window a query sees no farther back than that. `cache_part` is the part that `cache` is.
    """

    def __init__(
        self, parts: Parts, cache: Any, window: int | None = None, cache_part: str = "MyCache"
    ) -> None:
        self.parts, self.cache, self.window = parts, cache, window
        self.cache_part = cache_part

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        queries = q.split(batch.query_lens)
        if isinstance(self.cache, NoCache | KVStorage):
            self.cache.write(layer, k, v, batch)
            pairs = enumerate(queries)
            outs = [self.one_sequence(q_s, *self.cache.read(layer, batch, s)) for s, q_s in pairs]
            return torch.cat(outs)
        self.parts.calls[self.cache_part] += 1
        with self.parts.blamed(self.cache_part):  # a learner's: write and read in one
            contexts = cast_to(list(self.cache.update(layer, k, v, batch)), k.dtype)
        each = zip(queries, contexts, strict=True)
        return torch.cat([self.one_sequence(q_s, *kv) for q_s, kv in each])

    def one_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [q, H, D] of one sequence, all its k and v [kv, H_kv, D] → [q, H, D]."""
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        mask = self.parts("window_mask", len(q), len(k), self.window or len(k))
        heads = []
        for h in range(num_heads):
            at = self.parts("kv_head", h, num_heads, num_kv_heads)
            heads.append(self.parts("attention", q[:, h], k[:, at], v[:, at], mask))
        return torch.stack(heads, dim=1)  # [q, H, D]


class OwnModel(CausalLM):
    """The model over the same weights, with the residual stream in sight and its steps as parts.

    ValueError for an architecture whose layers add biases: that of the exercise has none.
    """

    def __init__(self, model: CausalLM, parts: Parts) -> None:
        if model.config.qkv_bias or model.config.o_bias:
            raise ValueError(
                "the layer of notebook 01 adds no bias, and this model has some: take a Llama, "
                "Mistral, SmolLM2 or Qwen3"
            )
        super().__init__(model.config)
        self.model, self.lm_head, self.parts = model.model, model.lm_head, parts
        self.default_attention = OwnAttention(parts, NoCache())
        layers = cast("list[DecoderLayer]", list(model.model.layers))
        self.layer_weights = [LayerWeights.of(layer) for layer in layers]

    def forward(self, batch: Batch, attention: AttentionBackend | None = None) -> Tensor:
        """Hidden state of every token, [T, hidden]. PartFailed or ModelFailed for any error."""
        with between_parts():
            return self._forward(batch, attention or self.default_attention)

    def _forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        x = self.model.embed_tokens(batch.input_ids)  # [T, hidden]: the residual stream begins
        dtype = x.dtype  # a layer of the learner's may hand over another
        angles = batch.positions[:, None] * self.model.rotary_emb.inv_freq  # [T, D / 2]
        for number, weights in enumerate(self.layer_weights):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, number: int = number, x: Tensor = x
            ) -> Tensor:
                q, k, v = cast_to((q, k, v), dtype)
                with between_parts():
                    q, k = self._lengths_of(number, x, q, k)
                    return attention.attend(number, q, k, v, batch)

            x = self._layer(x, weights, angles, attend)
        return self.model.norm(x)

    def _lengths_of(self, layer: int, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as the architecture has them: with their own lengths, if it has no norm there.

        The layer of the exercise made the q and k of each head one long; turns leave lengths alone.
        """
        if self.config.qk_norm:
            return q, k
        w, eps = self.layer_weights[layer], self.config.rms_norm_eps
        normed = rms_norm(x, w.input_norm, eps)
        raw = (F.linear(normed, w.q).view_as(q), F.linear(normed, w.k).view_as(k))
        lengths = [(x.square().mean(-1, keepdim=True) + eps).sqrt() for x in raw]
        return q * lengths[0], k * lengths[1]

    def _layer(self, x: Tensor, weights: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
        if not self.parts.is_package("layer"):
            return self.parts("layer", x, weights, angles, attend)
        steps = (partial(self.parts, "project"), partial(self.parts, "rope"))
        return _layer(x, weights, angles, attend, *steps, eps=self.config.rms_norm_eps)
