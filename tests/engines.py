"""Small random models, made in memory, and what fills their memory."""

import math
from collections.abc import Sequence
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
        fill_with_nan(cache.storage)
    return cache


def fill_with_nan(
    storage: KVStorage, num_units: int = 1, units: Sequence[int] | None = None
) -> KVStorage:
    """NaN in these of so many equal units (rows, blocks or cells), else in every slot."""
    if units is None:
        for tensor in (storage.k, storage.v):
            tensor.fill_(math.nan)
    else:
        for tensor in storage.by_rows(num_units):  # [layers, units, H_kv, slots of one, D]
            tensor[:, list(units)] = math.nan
    return storage
