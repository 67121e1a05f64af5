"""One forward of a model on this machine: its time, its operations.

The times are the least of several, because whatever else the machine does only adds to them.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.generate import stream
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
from tutorial_engine.sampling.params import SamplingParams

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


NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.detach")


class Operations(TorchDispatchMode):
    """Inside, operations of PyTorch are counted, and by name in `kernels` those that compute.

    A view of a tensor and memory that nobody fills need no kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        made = func(*args, **(kwargs or {}))
        is_view = _memory_of(made) <= _memory_of((args, kwargs)) and not func._schema.is_mutable
        if not is_view and not str(func).startswith(NO_KERNEL):
            self.kernels[func._schema.name.rpartition("::")[2].strip("_")] += 1
        return made


def _memory_of(values: object) -> set[int]:
    """Which memories the tensors among these values lie in."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor))
    return {one.untyped_storage()._cdata for one in tensors}


def count_operations(run: Callable[[], object]) -> int:
    """How many operations PyTorch starts while the function runs."""
    with Operations() as counter:
        run()
    return counter.count


def token_times(
    model: CausalLM, prompt: Sequence[int], repeat: int = 7, steps: int = 4
) -> list[tuple[float, float]]:
    """TTFT and TPOT in milliseconds, with a cache and without one: the least, over `steps` tokens.

    Both ways are run in turn, and take the same attention kernel.
    """
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    best = [(float("inf"), float("inf"))] * 2
    usual, model.default_attention = model.default_attention, fast_attention(model.device)
    try:
        for _ in range(repeat):
            for i, use_cache in enumerate((True, False)):
                began = time.perf_counter()
                stamps = [
                    1000 * (time.perf_counter() - began)
                    for _ in stream(model, [prompt], params, use_cache=use_cache)
                ]
                ttft, tpot = best[i]
                each = (stamps[-1] - stamps[0]) / (steps - 1)
                best[i] = min(ttft, stamps[0]), min(tpot, each)
    finally:
        model.default_attention = usual
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
