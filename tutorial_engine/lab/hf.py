"""Transformers' models under our loop, our cache under their models.

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
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import Run

MakeCache = Callable[[], Any]  # a fresh `past_key_values`


@torch.inference_mode()
def _forward(
    model: Any, token_ids: Sequence[int], past: Any, use_cache: bool
) -> tuple[Tensor, Any]:
    """These tokens after what a past holds → logits [V] fp32 of the last one, and the new past."""
    out = model(
        torch.tensor([token_ids], device=model.device),
        past_key_values=past,
        use_cache=use_cache,
        logits_to_keep=1,
    )
    return out.logits[0, -1].float(), out.past_key_values


def run_transformers(
    model: Any,
    make_cache: MakeCache | None = None,
    use_cache: bool = True,
    chunk_size: int | None = None,
) -> Run:
    """A transformers causal LM for the loop of `generate.serve`, through its own `past_key_values`.

    Each sequence has a past of its own and is run alone, so nothing is padded. `make_cache` makes
    the pasts (its DynamicCache unless given); use_cache=False runs the whole sequence every time.
    """
    pasts: dict[str, Any] = {}  # request_id -> its `past_key_values`

    def run_alone(request: Request) -> Tensor:
        if not use_cache:
            return _forward(model, request.token_ids, None, use_cache)[0]
        name = request.request_id
        if request.num_computed_tokens == 0:
            pasts[name] = make_cache() if make_cache else None
        while request.num_new_tokens:
            start = request.num_computed_tokens
            chunk = request.token_ids[start : start + (chunk_size or request.num_new_tokens)]
            logits, pasts[name] = _forward(model, chunk, pasts[name], use_cache)
            request.num_computed_tokens += len(chunk)
        return logits

    return lambda requests: torch.stack([run_alone(request) for request in requests])


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
        return self.owner.num_tokens

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.owner.cache.max_len


class OurCache(Cache):
    """An unused StaticKVCache that transformers takes as `past_key_values`, row b for its row b.

    All rows advance together, as transformers' padded batches do: each has `num_tokens`. No beam
    search, no cropping.
    """

    def __init__(self, cache: StaticKVCache) -> None:
        self.cache, self.num_tokens = cache, 0
        self.num_layers = cache.storage.spec.num_layers
        self._slots = torch.empty(0)  # of the new tokens, [B * n]
        super().__init__(layers=[_OurLayer(self, layer) for layer in range(self.num_layers)])

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V; after the last layer the tokens count.

        ValueError for another number of rows than the cache has, and when they do not fit.
        """
        rows, _, new, _ = k.shape
        if rows != self.cache.num_rows:
            raise ValueError(f"the cache has {self.cache.num_rows} rows, the batch has {rows}")
        end = self.num_tokens + new
        if layer == 0:
            self._slots = self._allocate(new)
        flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # [B * n, H_kv, D]
        self.cache.storage.write_slots(layer, self._slots, flat_k, flat_v)
        if layer == self.num_layers - 1:
            self.num_tokens = end
        all_k, all_v = self.cache.by_rows()
        return all_k[layer, :, :, :end], all_v[layer, :, :, :end]

    def _allocate(self, new: int) -> Tensor:
        """The slots of so many more tokens of every row."""
        ids = [0] * (self.num_tokens + new)  # slots do not depend on what the tokens are
        slots: list[int] = []
        for row in range(self.cache.num_rows):
            allocation = self.cache.allocate(f"row {row}", ids, self.num_tokens, new)
            if allocation is None or self.cache.describe(f"row {row}").table != (row,):
                raise ValueError("other sequences are in this cache: give OurCache one of its own")
            slots += allocation.new_slots
        return torch.tensor(slots, device=self.cache.storage.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: ValueError."""
        raise ValueError("OurCache cannot be cropped; use transformers' DynamicCache for that")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: ValueError."""
        raise ValueError("OurCache cannot be reordered (beams); use transformers' DynamicCache")

    def reset(self) -> None:
        """Forget all rows."""
        self.num_tokens = 0
