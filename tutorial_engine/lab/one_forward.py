"""One forward of a model on this machine, and its time.

The times are the least of several, because whatever else the machine does only adds to them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import forward
from tutorial_engine.lab.roofline import (
    Roofline,
    forward_bytes,
    forward_flops,
    roofline_probe,
    weight_bytes,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.batched_attention import fast_attention
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM

AGAIN = 3  # measurements of a machine that seems to be faster than its own limits


class Work(NamedTuple):
    """A forward over `new` tokens of each of so many sequences, after `old` cached ones each."""

    num_seqs: int
    new: int
    old: int

    def flops(self, config: ModelConfig) -> int:
        """Multiplications and additions."""
        return self.num_seqs * forward_flops(config, self.new, self.old)

    def num_bytes(self, config: ModelConfig, itemsize: int = 4) -> int:
        """Bytes moved at the least: the weights once, K and V of each sequence."""
        weights = weight_bytes(config, itemsize)
        own = forward_bytes(config, self.new, self.old, itemsize) - weights
        return weights + self.num_seqs * own


def ready(model: CausalLM, work: Work, cached: bool = True) -> Callable[[], Tensor]:
    """A function that runs this forward; its cache is filled already. Without one, `old` must be 0.

    Both ways take the same attention kernel. ValueError for cached tokens without a cache.
    """
    ids = [[65] * (work.old + work.new) for _ in range(work.num_seqs)]
    if not cached:
        if work.old:
            raise ValueError(f"without a cache no token is cached, got old={work.old}")
        attention, batch = fast_attention(model.device), Batch.from_sequences(ids)
        return lambda: model(batch, attention)
    row_len = work.old + work.new
    cache = StaticKVCache.from_config(model.config, max_seqs=work.num_seqs, max_len=row_len)
    requests = [Request(str(i), sequence) for i, sequence in enumerate(ids)]
    if work.old:
        forward(model, cache, requests, num_tokens=work.old)
    asked = (cache.allocate(r.request_id, r.token_ids, work.old, work.new) for r in requests)
    rooms = [room for room in asked if room is not None]  # the cache was made for these
    new = [sequence[work.old :] for sequence in ids]
    batch = Batch.from_allocations(new, rooms, [r.request_id for r in requests])
    attention = fast_attention(model.device, cache.storage)
    return lambda: model(batch, attention)


@torch.inference_mode()
def best_seconds(ways: Sequence[Callable[[], object]], repeat: int = 9) -> list[float]:
    """The least time of each function; they are called in turn."""
    best = [float("inf")] * len(ways)
    for _ in range(repeat):
        for i, way in enumerate(ways):
            began = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def against_the_roof(
    model: CausalLM, works: Mapping[str, Work], repeat: int = 5
) -> tuple[Roofline, dict[str, float]]:
    """The limits of this machine, and the least seconds of each forward.

    A forward cannot be faster than the limits. If one seems to be, something else slowed the
    machine while they were measured: they are measured again, and the better ones count.
    """
    ways = [ready(model, work) for work in works.values()]
    took = dict(zip(works, best_seconds(ways, repeat), strict=True))
    roof = roofline_probe(model.dtype, passes=5)()
    for _ in range(AGAIN):
        if all(took[name] >= floor(model.config, works[name], roof) for name in works):
            break
        again = roofline_probe(model.dtype, passes=5)()
        roof = Roofline(*map(max, zip(roof, again, strict=True)))
    return roof, took


def floor(config: ModelConfig, work: Work, roof: Roofline) -> float:
    """Seconds below which no forward in fp32 can get: arithmetic and reading go on together."""
    return max(work.flops(config) / roof.peak_flops, work.num_bytes(config) / roof.bandwidth)
