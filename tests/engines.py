"""Small random models, made in memory, and what watches them run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from checkpoints import BASE, randomise

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.runner import Run, prefill
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

VOCAB = BASE["vocab_size"]
Cache = TypeVar("Cache", bound=KVMemory)


def random_model(seed: int = 0, eos: tuple[int, ...] = (), **changes: Any) -> Qwen3ForCausalLM:
    """A random model of shape BASE with `changes`, without a file."""
    config = ModelConfig(**{**BASE, "max_position_embeddings": 64, **changes}, eos_token_ids=eos)
    model = Qwen3ForCausalLM(config).draw_weights()
    randomise(model, seed)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def poison(cache: Cache) -> Cache:
    """NaN in every slot: one that is read before it is written cannot go unnoticed."""
    if isinstance(cache.storage, KVStorage):
        for tensor in (cache.storage.k, cache.storage.v):
            tensor.fill_(float("nan"))
    return cache


def run_with_backend(
    model: Qwen3ForCausalLM,
    cache: KVMemory,
    attention: AttentionBackend | None = None,
    chunk_size: int | None = None,
) -> Run:
    """As run_with_cache, with a backend of one's own: the textbook one, unless told."""
    backend = attention or NaiveAttention(cache=cache.storage)  # type: ignore[arg-type]
    return lambda requests: prefill(model, cache, requests, chunk_size, backend)


@contextmanager
def watched(model: Qwen3ForCausalLM) -> Iterator[list[Batch]]:
    """The batches that the model runs inside."""
    batches: list[Batch] = []
    handle = model.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    try:
        yield batches
    finally:
        handle.remove()
