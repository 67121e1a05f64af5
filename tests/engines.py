"""Small random engines, made in memory or loaded beside transformers; and what watches them run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from checkpoints import BASE, randomise
from torch import Tensor

from tutorial_engine.cache.rows import StaticKVCache, TokenCache
from tutorial_engine.engine.runner import CachedRunner, forward
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

VOCAB = BASE["vocab_size"]


@contextmanager
def one_thread() -> Iterator[None]:
    """With matrices this small, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_model(seed: int = 0, eos: tuple[int, ...] = (), **changes: Any) -> Qwen3ForCausalLM:
    """A random model of shape BASE with `changes`, without a file."""
    config = ModelConfig(**{**BASE, "max_position_embeddings": 64, **changes}, eos_token_ids=eos)
    model = Qwen3ForCausalLM(config).draw_weights()
    randomise(model, seed)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def poison(cache: TokenCache) -> TokenCache:
    """NaN in every slot: one that is read before it is written cannot go unnoticed."""
    if isinstance(cache, StaticKVCache):
        cache.storage.k.fill_(float("nan"))
        cache.storage.v.fill_(float("nan"))
    return cache


@contextmanager
def watched(model: Qwen3ForCausalLM) -> Iterator[list[Batch]]:
    """Inside the block, every batch that the model runs is put into the list."""
    batches: list[Batch] = []
    handle = model.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    try:
        yield batches
    finally:
        handle.remove()


class BackendRunner(CachedRunner):
    """Our model with a cache and a backend of one's own: the textbook one, unless told."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: TokenCache,
        attention: AttentionBackend | None = None,
    ) -> None:
        super().__init__(model, cache)
        self.backend = attention or NaiveAttention(cache=cache)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        """As Runner.prefill, in one forward."""
        assert chunk_size is None
        return self._run(prompts, seq_ids)

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        """As Runner.decode."""
        return self._run([[token] for token in tokens], seq_ids)

    @torch.inference_mode()
    def _run(self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int]) -> Tensor:
        hidden = forward(self.model, self.cache, sequences, seq_ids, self.backend)
        return self.model.compute_logits(hidden)
