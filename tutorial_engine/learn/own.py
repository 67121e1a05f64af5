"""Introduced in notebook 01. The learner's functions, running in the real model.

`OwnEngine` is the model that ships, taken apart where the exercises are. Each part is the package's
until the learner's is right. A wrong one is told, and the package's runs in its place.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.generate import generate, serve
from tutorial_engine.engine.request import Request, RequestStatus
from tutorial_engine.learn.own_cache import CACHES, bytes_copied, make_cache
from tutorial_engine.learn.parts import Parts, PartsHolder, Plugged, between_parts, cast_to
from tutorial_engine.learn.verdict import Verdict, open_verdict
from tutorial_engine.model.attention import (
    AttentionBackend,
    KVCache,
    NoCache,
    causal_mask,
    naive_attention,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from tutorial_engine.model.rope import apply_rope
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import FILTERS, Sampler, top_p
from tutorial_engine.sampling.stopping import Finish, StopChecker

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, H, D], k, v [T, H_kv, D] -> [T, H, D]


class LayerWeights(NamedTuple):
    """The matrices of one decoder layer under the names of the textbook, all of them [out, in].

    `input_norm`, `mlp_norm` [hidden] and `q_norm`, `k_norm` [D] are the weights of the RMSNorms.
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
    def of(cls, layer: Qwen3DecoderLayer) -> "LayerWeights":
        """Those of a layer of the model; its joined matrices come apart again."""
        attn, mlp = layer.self_attn, layer.mlp
        sizes = (attn.q_size, attn.kv_size, attn.kv_size)
        q, k, v = attn.qkv_proj.plain_weight().split(sizes)
        gate, up = mlp.gate_up_proj.plain_weight().chunk(2)
        q_norm, k_norm = attn.qk_norm.plain_weight().chunk(2)
        return cls(
            input_norm=layer.input_layernorm.weight,
            q=q,
            k=k,
            v=v,
            q_norm=q_norm,
            k_norm=k_norm,
            o=attn.o_proj.plain_weight(),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate=gate,
            up=up,
            down=mlp.down_proj.plain_weight(),
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
) -> Tensor:
    q, k, v = project(rms_norm(x, w.input_norm), w.q, w.k, w.v, len(w.q_norm))
    q, k = rope(rms_norm(q, w.q_norm), angles), rope(rms_norm(k, w.k_norm), angles)
    x = x + attend(q, k, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (F.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


def run_new(
    model: Qwen3ForCausalLM, attention: AttentionBackend, token_ids: list[int], num_computed: int
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
    **{one.__name__: one for one in (project, attention, window_mask, kv_head, rope, layer)},
    **CACHES,
    **{one.__name__: one for one in (run_new, keep_top_p, why_finished)},
}


# -- the model made of parts ----------------------------------------------------------------------


class OwnAttention:
    """An attention backend of the parts `attention`, `kv_head` and `window_mask`, head by head.

    With a window a query sees no farther back than that. `cache_part` is the part that `cache` is.
    """

    def __init__(
        self, parts: Parts, cache: KVCache, window: int | None = None, cache_part: str = "MyCache"
    ) -> None:
        self.parts, self.cache, self.window = parts, cache, window
        self.cache_part = cache_part

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As AttentionBackend.attend."""
        contexts: Iterable[tuple[Tensor, Tensor]]
        if isinstance(self.cache, NoCache | KVStorage):
            contexts = self.cache.update(layer, k, v, batch)  # a pair at a time: see KVStorage
        else:
            self.parts.calls[self.cache_part] += 1
            with self.parts.blamed(self.cache_part):
                contexts = cast_to(list(self.cache.update(layer, k, v, batch)), k.dtype)
        pairs = zip(q.split(batch.query_lens), contexts, strict=True)
        return torch.cat([self.one_sequence(q_s, *kv) for q_s, kv in pairs])

    def one_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [q, H, D] of one sequence, all its k and v [kv, H_kv, D] → [q, H, D]."""
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        mask = self.parts("window_mask", len(q), len(k), self.window or len(k))
        heads = []
        for h in range(num_heads):
            at = self.parts("kv_head", h, num_heads, num_kv_heads)
            heads.append(self.parts("attention", q[:, h], k[:, at], v[:, at], mask))
        return torch.stack(heads, dim=1)  # [q, H, D]


class OwnModel(Qwen3ForCausalLM):
    """The model over the same weights, with the residual stream in sight and its steps as parts."""

    def __init__(self, model: Qwen3ForCausalLM, parts: Parts) -> None:
        super().__init__(model.config)
        self.model, self.lm_head, self.parts = model.model, model.lm_head, parts
        self.default_attention = OwnAttention(parts, NoCache())
        layers = cast("list[Qwen3DecoderLayer]", list(model.model.layers))
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

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                q, k, v = cast_to((q, k, v), dtype)
                with between_parts():
                    return attention.attend(number, q, k, v, batch)

            x = self._layer(x, weights, angles, attend)
        return self.model.norm(x)

    def _layer(self, x: Tensor, weights: LayerWeights, angles: Tensor, attend: Attend) -> Tensor:
        if "layer" in self.parts.own:
            return self.parts("layer", x, weights, angles, attend)
        self.parts.calls["layer"] += 1
        steps = (partial(self.parts, "project"), partial(self.parts, "rope"))
        return _layer(x, weights, angles, attend, *steps)


class OwnRunner:
    """OwnModel as a Runner (see runner.py): each sequence alone, with a cache of its own or none.

    What the loop of notebook 02 and the ledger drive.
    """

    can_chunk = False

    def __init__(
        self,
        model: OwnModel,
        cached: bool,
        window: int | None = None,
        cache_part: str = "MyCache",
    ) -> None:
        self.model, self.cached, self.window = model, cached, window
        self.cache_part = cache_part
        self.vocab_size = model.config.vocab_size
        self.max_len = model.config.max_position_embeddings
        self.eos_token_ids = model.config.eos_token_ids
        self._attention: dict[str, OwnAttention] = {}  # request_id -> its backend, with its cache

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], chunk_size: int | None = None) -> Tensor:
        """As Runner.run."""
        return torch.stack([self._run_alone(request) for request in requests])

    def _run_alone(self, request: Request) -> Tensor:
        parts, name = self.model.parts, request.request_id
        if not self.cached:
            attention = OwnAttention(parts, NoCache(), self.window)
            return parts("run_new", self.model, attention, request.token_ids, 0)
        if request.num_computed_tokens == 0:
            longest = request.num_tokens + request.params.max_tokens
            cache = make_cache(parts, self.cache_part, self.model.config, longest)
            self._attention[name] = OwnAttention(parts, cache, self.window, self.cache_part)
        logits = parts(
            "run_new",
            self.model,
            self._attention[name],
            request.token_ids,
            request.num_computed_tokens,
        )
        request.num_computed_tokens = request.num_tokens
        return logits


class OwnSampler(Sampler):
    """The package's sampler with the part `keep_top_p` as its top-p filter."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], parts: Parts) -> None:
        super().__init__(params, eos_token_ids)

        def top_p(logits: Tensor, p: float) -> Tensor:
            if p >= 1:
                return logits
            return logits.masked_fill(~parts("keep_top_p", logits.softmax(-1), p), -math.inf)

        self.filters = tuple(top_p if one.__name__ == "top_p" else one for one in FILTERS)


class OwnChecker(StopChecker):
    """A StopChecker in which the part `why_finished` decides. All text comes at the end."""

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        parts: Parts,
    ) -> None:
        super().__init__(params, eos_token_ids, tokenizer)
        enders = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        self._parts, self._eos_ids, self._ids = parts, enders, list[int]()
        self._decode = tokenizer.decode

    def update(self, token_id: int) -> Finish | None:
        """As StopChecker.update. PartFailed for an answer that is none, or beyond max_tokens."""
        self._ids.append(token_id)
        stop, text = self.params.stop, self._decode(self._ids)
        reason = self._parts(
            "why_finished", list(self._ids), text, self._eos_ids, stop, self.params.max_tokens
        )
        if reason is None and len(self._ids) < self.params.max_tokens:
            return None
        with self._parts.blamed("why_finished"):
            if reason is None:
                raise ValueError(f"it goes on after {len(self._ids)} tokens, max_tokens")
            if reason not in ("stop", "length"):
                raise ValueError(f'it returned {reason!r}, neither "stop" nor "length" nor None')
        cuts = [at for at in (text.find(one) for one in stop) if at >= 0]
        self.end(Finish(reason))
        self._safe.append(text[: min(cuts, default=len(text))])
        return self.finish


# -- what the notebooks use -----------------------------------------------------------------------

IN_01 = ("project", "attention", "window_mask", "kv_head", "rope", "layer")


class OwnEngine(PartsHolder):
    """The engine with the learner's parts in it: `use` puts one in, `tell` tells a story with all.

    `cached=False` recomputes everything for each token, as notebook 01 does; with True the part
    `run_new` decides what runs, over one of the two caches: the one that was handed in last.
    """

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: Tokenizer, cached: bool = False) -> None:
        super().__init__(PARTS)
        self.package, self.tokenizer, self.cached = model, tokenizer, cached
        self.model, self.cache_part = OwnModel(model, self.parts), "MyCache"

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that this notebook is about; of the two caches, the one that runs."""
        unused = {*CACHES} - {self.cache_part}
        return tuple(name for name in PARTS if name not in unused) if self.cached else IN_01

    @property
    def label(self) -> str:
        """The name of a row of the ledger over these parts: how many of them are the learner's."""
        own = sum(name in self.parts.own for name in self.names)
        return f"your engine ({own} of {len(self.names)} parts yours)"

    def use(self, function: Callable[..., Any], check: Callable[..., Verdict]) -> Plugged:
        """As PartsHolder.use. A cache takes the place of the other one."""
        plugged = super().use(function, check)
        if plugged.name in CACHES:
            self.cache_part = plugged.name
            for other in {*CACHES} - {plugged.name}:
                self.parts.own.pop(other, None)
        return plugged

    def bytes_copied(self, num_tokens: int) -> int:
        """Bytes of old K and V that the cache that runs here copies for a text of so many tokens.

        PartFailed when the learner's raises.
        """
        config = self.model.config
        cache = make_cache(self.parts, self.cache_part, config, num_tokens)
        with self.parts.blamed(self.cache_part):
            return bytes_copied(cache, config, num_tokens)

    def runner(self, window: int | None = None) -> OwnRunner:
        """A fresh Runner over the parts as they are: for `generate`, or for a row of the ledger."""
        return OwnRunner(self.model, self.cached, window, self.cache_part)

    def moved_to(self, model: Qwen3ForCausalLM) -> "OwnEngine":
        """The learner's parts over another model's weights; it must have the same vocabulary."""
        moved = OwnEngine(model, self.tokenizer, cached=True)
        moved.parts.own |= self.parts.own
        moved.cache_part = self.cache_part
        return moved

    def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        window: int | None = None,
        on_token: Callable[[Request], None] = lambda request: None,
    ) -> Request:
        """Continue a prompt through the loop of the package, with the parts → its request.

        `on_token` is called after each token. PartFailed when a part raises.
        """
        params = SamplingParams(max_tokens=24) if params is None else params
        runner = self.runner(window)
        eos = runner.eos_token_ids
        sampler = OwnSampler(params, eos, self.parts)
        checker = OwnChecker(params, eos, self.tokenizer, self.parts)
        ids = self.tokenizer.encode(prompt).ids
        request = Request("yours", ids, params, sampler=sampler, checker=checker)
        request.status = RequestStatus.RUNNING
        for _ in serve(runner, [request]):
            on_token(request)
        return request

    def story(self, prompt: str, window: int | None = None) -> str:
        """The text that the parts put after a prompt, 24 tokens of it. PartFailed as `generate`."""
        return self.generate(prompt, window=window).checker.text

    @torch.inference_mode()
    def last_logits(self, token_ids: Sequence[int], window: int | None = None) -> Tensor:
        """Logits [V] after the last of the ids, without a cache. PartFailed when a part raises."""
        attention = OwnAttention(self.parts, NoCache(), window)
        hidden = self.model(Batch.from_sequences([list(token_ids)]), attention)
        return self.model.compute_logits(hidden[-1:])[0]

    def tell(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        window: int | None = None,
        live: bool = False,
    ) -> None:
        """Print the story that follows a prompt, which parts ran, and whether the package agrees.

        A part that raises, or without which the tokens would be the package's, is taken out, and
        the story is told without it. With a window the package is not asked: it has none. `live`
        prints each token when it comes, in a second run.
        """
        params = SamplingParams(max_tokens=24) if params is None else params
        wanted = generate(self.package, prompt, params, tokenizer=self.tokenizer)[0].outputs[0]

        def wrong(told: Request) -> str:
            right = window is not None or told.output_token_ids == wanted.token_ids
            return "" if right else "the tokens are not the package's."

        told = self.settle(lambda: self.generate(prompt, params, window), wrong)
        if live:
            self._tell_live(prompt, params, window, told.checker.text)
        else:
            print(prompt + told.checker.text)
        print(self.who_ran({"project": "layer", "rope": "layer"}))
        if window is None:
            many, mark = len(wanted.token_ids), "✔ " * bool(self.parts.own)
            print(f"{mark}{many} of {many} tokens are those of the package's engine.")

    def _tell_live(
        self, prompt: str, params: SamplingParams, window: int | None, text: str
    ) -> None:
        """Print a prompt and then its text, which is known, as far as the tokens have come."""
        shown = 0

        def show(request: Request) -> None:
            nonlocal shown
            so_far = len(self.tokenizer.decode([*request.output_token_ids]))
            print(text[shown:so_far], end="", flush=True)
            shown = max(shown, so_far)

        self.parts.calls.clear()
        print(prompt, end="", flush=True)
        self.generate(prompt, params, window, show)
        print(text[shown:])

    def hear(self, prompt: str, **parts: Callable[..., Any]) -> None:
        """Print the story that these functions tell, past every check; none stays in the model.

        They are named as the parts are: `hear(PROMPT, rope=rope)`. ValueError for another name. Of
        one that nobody has touched it says so.
        """
        unknown = sorted({*parts} - {*PARTS})
        if unknown:
            raise ValueError(f"{unknown} are no parts of the engine; the parts are {sorted(PARTS)}")
        untouched = [verdict for one in parts.items() if (verdict := open_verdict(*one))]
        if untouched:
            print(*untouched, sep="\n")
            return
        mine, own = self.parts.own, {**self.parts.own, **parts}
        if {"project", "rope"} & {*parts} and "layer" not in parts:
            own.pop("layer", None)  # the learner's calls its own ones, past these
        self.parts.own = own
        try:
            print(prompt + self.story(prompt))
        except Exception as error:  # nobody has checked what runs here
            print(f"✘ {error}")
        finally:
            self.parts.own = mine
