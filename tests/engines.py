"""Small random models, made in memory, and what fills their memory."""

from dataclasses import replace
from typing import Any, TypeVar

from checkpoints import BASE, config_of, randomise

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.model.decoder import CausalLM

VOCAB = BASE["vocab_size"]
Cache = TypeVar("Cache", bound=KVMemory)


def random_model(seed: int = 0, eos: tuple[int, ...] = (), **changes: Any) -> CausalLM:
    """A random model of shape BASE with `changes`, without a file."""
    config = replace(config_of(**{"max_position_embeddings": 64, **changes}), eos_token_ids=eos)
    model = CausalLM(config).draw_weights()
    randomise(model, seed)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def poison(cache: Cache) -> Cache:
    """NaN in every slot: one that is read before it is written cannot go unnoticed."""
    if isinstance(cache.storage, KVStorage):
        for tensor in (cache.storage.k, cache.storage.v):
            tensor.fill_(float("nan"))
    return cache
