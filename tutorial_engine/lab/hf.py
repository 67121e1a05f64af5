"""Introduced in notebook 02. Transformers' models under our loop, our cache under their models.

Knows transformers' cache interface and ours. The only module, beside the benchmark, that imports
transformers. Shapes: B rows, H_kv key/value heads, n new tokens, D head_dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.batch import Batch

MakeCache = Callable[[], Any]  # a fresh `past_key_values`


class TransformersRunner:
    """A transformers causal LM as a Runner (see runner.py), through its own `past_key_values`.

    Each sequence has a past of its own and is run alone, so nothing is padded. `make_cache` makes
    the pasts (its DynamicCache unless given); use_cache=False runs the whole sequence every time.
    """

    def __init__(
        self, model: Any, make_cache: MakeCache | None = None, use_cache: bool = True
    ) -> None:
        self.model, self.make_cache, self.use_cache = model, make_cache, use_cache
        self.can_chunk = use_cache
        self.max_len = int(model.config.max_position_embeddings)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        eos = model.generation_config.eos_token_id
        self.eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        self._pasts: dict[int, Any] = {}
        self._sequences: dict[int, list[int]] = {}

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        """As Runner.prefill."""
        if chunk_size is not None:
            at_least_one("chunk_size", chunk_size)
        self._check_ids(prompts)
        logits = []
        for seq_id, prompt in zip(seq_ids, prompts, strict=True):
            fresh = self.make_cache if self.use_cache else None
            self._pasts[seq_id] = fresh() if fresh else None
            self._sequences[seq_id] = []
            step = chunk_size or len(prompt)
            for start in range(0, len(prompt), step):
                last = self._run(seq_id, prompt[start : start + step])
            logits.append(last)
        return torch.stack(logits)

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        """As Runner.decode."""
        self._check_ids([tokens])
        pairs = zip(seq_ids, tokens, strict=True)
        return torch.stack([self._run(seq_id, [token]) for seq_id, token in pairs])

    def _check_ids(self, sequences: Sequence[Sequence[int]]) -> None:
        """All of them, before anything runs: then no sequence is ahead of another."""
        for ids in sequences:
            bad = [i for i in ids if not 0 <= i < self.vocab_size]
            if bad or not ids:
                what = f"token id {bad[0]}" if bad else "no token"
                raise ValueError(f"{what} to run; ids run from 0 to {self.vocab_size - 1}")

    @torch.inference_mode()
    def _run(self, seq_id: int, new: Sequence[int]) -> Tensor:
        """The next tokens of one sequence → logits of the last, [V] fp32."""
        history = self._sequences[seq_id]
        history.extend(new)
        out = self.model(
            torch.tensor([new if self.use_cache else history], device=self.model.device),
            past_key_values=self._pasts[seq_id],
            use_cache=self.use_cache,
            logits_to_keep=1,
        )
        self._pasts[seq_id] = out.past_key_values
        return out.logits[0, -1].float()


class _OurLayer(CacheLayerMixin):
    """One layer of a StaticKVCache, as transformers asks for it."""

    is_sliding = False

    def __init__(self, owner: "OurCache", layer: int) -> None:
        super().__init__()
        self.owner, self.layer = owner, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New [B, H_kv, n, D] → history + new [B, H_kv, kv, D], as views of our storage."""
        return self.owner.write(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next forward will see, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens cached, the same in every layer."""
        return self.owner.cache.seq_lens[0]

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.owner.cache.max_len


class OurCache(Cache):
    """A StaticKVCache that transformers takes as `past_key_values`. Row b is row b of its batch.

    All rows advance together, as transformers' padded batches do. No beam search, no cropping.
    """

    def __init__(self, cache: StaticKVCache) -> None:
        self.cache = cache
        self.num_layers = cache.storage.spec.num_layers
        self._batch: Batch | None = None
        super().__init__(layers=[_OurLayer(self, layer) for layer in range(self.num_layers)])

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V; after the last layer the tokens count.

        ValueError for another number of rows than the cache has, and when they do not fit.
        """
        rows, _, new, _ = k.shape
        if rows != self.cache.num_rows:
            raise ValueError(f"the cache has {self.cache.num_rows} rows, the batch has {rows}")
        if len(set(self.cache.seq_lens)) > 1:
            raise ValueError(f"rows advance together here, these hold {self.cache.seq_lens} tokens")
        if layer == 0:
            self._batch = self.cache.batch([[0] * new] * rows)  # addresses need no real ids
        assert self._batch is not None, "layer 0 comes first"
        flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # [B * n, H_kv, D]
        self.cache.update(layer, flat_k, flat_v, self._batch)
        end = self.cache.seq_lens[0] + new
        if layer == self.num_layers - 1:
            self.cache.commit(self._batch)
        all_k, all_v = self.cache.rows()
        return all_k[layer, :, :, :end], all_v[layer, :, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: ValueError."""
        raise ValueError("OurCache cannot be cropped; use transformers' DynamicCache for that")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: ValueError."""
        raise ValueError("OurCache cannot be reordered (beams); use transformers' DynamicCache")

    def reset(self) -> None:
        """Forget all rows."""
        self.cache.reset()
