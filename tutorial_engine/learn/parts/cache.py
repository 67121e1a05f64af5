"""The two caches of the exercises and the edit of a memory, as the package has them.

`MyCache` joins old and new with `torch.cat`; `MyStaticCache` allocates once and writes in place.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.learn.parts.holder import Parts
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig

Pairs = list[tuple[Tensor, Tensor]]
Memory = Mapping[int, tuple[Tensor, Tensor]]  # layer -> K, V [n, H_kv, D]


class MyCache:
    """Keys and values of one sequence, by layer."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Pairs:
        """New k, v [T, H_kv, D] → [(all k, all v)]."""
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = k, v
        return [(k, v)]


class MyStaticCache:
    """Keys and values of one sequence of up to max_len tokens, in memory allocated once."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        heads, dim = config.num_key_value_heads, config.head_dim
        self.k = torch.zeros(config.num_hidden_layers, max_len, heads, dim)
        self.v = torch.zeros_like(self.k)

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Pairs:
        """New k, v [T, H_kv, D] → [(all k, all v)], views of what is written so far."""
        start = int(batch.positions[0])
        end = start + len(k)
        self.k[layer, start:end], self.v[layer, start:end] = k, v
        return [(self.k[layer, :end], self.v[layer, :end])]


def transplant(
    memory: Memory, donor: Memory, layer: int, slots: Sequence[int], which: str
) -> Memory:
    """The memory with K, V or both ("K", "V", "KV") of these slots of one layer from the donor."""
    k, v = memory[layer]
    donor_k, donor_v = donor[layer]
    if "K" in which:
        k[slots] = donor_k[slots]
    if "V" in which:
        v[slots] = donor_v[slots]
    return memory


def replace_head(
    memory: Memory, donor: Memory, layer: int, slots: Sequence[int], head: int
) -> Memory:
    """The memory with V of one K/V head in these slots of one layer from the donor."""
    memory[layer][1][slots, head] = donor[layer][1][slots, head]
    return memory


def find_layer(flips: Callable[[list[int]], bool], num_layers: int) -> int:
    """The one layer for which flips([layer]) is True, by halves: ⌈log2 num_layers⌉ calls."""
    low, high = 0, num_layers  # it is one of these
    while high - low > 1:
        middle = (low + high) // 2
        if flips(list(range(low, middle))):
            high = middle
        else:
            low = middle
    return low


def keep(slots: Sequence[int], first: int, last: int) -> list[int]:
    """Which of these slots stay: the first few and the last few, each once."""
    count = len(slots)
    return [slot for i, slot in enumerate(slots) if i < first or i >= count - last]


EDITS: dict[str, Callable[..., Any]] = {  # of a memory: cells use them, no model runs them
    edit.__name__: edit for edit in (transplant, replace_head, find_layer, keep)
}


class WriteAndRead:
    """A cache of the exercises, whose `update` writes and reads, for attention's two calls."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.pairs = cache, list[Any]()

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.pairs = self.cache.update(layer, k, v, batch)

    def read(self, layer: int, batch: Batch, s: int) -> tuple[Tensor, Tensor]:
        return self.pairs[s]


class Noting:
    """A cache of the exercises that also keeps what it gave back last: layer → (k, v)."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        """As the cache does."""
        pairs = self.cache.update(layer, k, v, batch)
        self.kv[layer] = pairs[0]
        return pairs


CACHES: dict[str, Callable[..., Any]] = {
    cache.__name__: cache for cache in (MyCache, MyStaticCache)
}


def make_cache(parts: Parts, name: str, config: ModelConfig, max_len: int) -> Any:
    """A fresh cache of a part, the learner's or the package's. PartFailed when it raises."""
    sizes = () if name == MyCache.__name__ else (config, max_len)
    with parts.blamed(name):
        return parts.own.get(name, CACHES[name])(*sizes)


def bytes_copied(cache: Any, config: ModelConfig, num_tokens: int) -> int:
    """Bytes of old keys and values that a cache moves while a text grows to so many tokens.

    Token by token. What `update` gives back in other memory than before has been copied there.
    """
    copied, held = 0, dict[tuple[int, int], Tensor]()
    new = torch.zeros(1, config.num_key_value_heads, config.head_dim)
    for position in range(num_tokens):
        batch = Batch.from_sequences([[0]], [position])
        for layer in range(config.num_hidden_layers):
            for which, now in enumerate(cache.update(layer, new.clone(), new.clone(), batch)[0]):
                old = held.get((layer, which))
                copied += 0 if old is None or same_memory(now, old) else old.nbytes
                held[layer, which] = now  # kept, so that its memory is not given out again
    return copied


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Do two tensors lie in the same allocation?"""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
