"""A decode step on a GPU: what was measured on one, what can be counted without, and how to look.

The figures are those of one H100, and of an earlier version of this engine; what was replayed there
was a prototype of `engine/replay.py`. A count needs no GPU: PyTorch's meta device runs a model that
has shapes and no numbers.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.model.batched_attention import BatchedAttention
from tutorial_engine.model.checkpoint import without_weights
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import use_fast_layers

# -- what was measured ----------------------------------------------------------------------------


class GpuStep(NamedTuple):
    """One decode step of one request: how long it took, and how long the GPU worked in it.

    `launches` are counted by PyTorch's profiler. None: nobody measured it.
    """

    what: str
    seconds: float
    launches: int | None = None
    busy: float | None = None


class GpuServing(NamedTuple):
    """Wanted tokens a second of many requests at once: in the first run, and in the second.

    `least`: the lowest of several trials, where they differed; the others are the highest then.
    """

    what: str
    first: float
    second: float
    least: tuple[float, float] | None = None


CARD, BANDWIDTH = "H100", 2.95e12  # bytes a second, measured by copying
MEASURED_WITH = "Qwen3-0.6B shape, random weights, bf16, torch 2.11, transformers 5.23, one process"
CONTEXTS = (128, 512, 2048)
TRANSFORMERS = GpuStep("transformers, dynamic cache", 25.0e-3, 1635)
ONE_BY_ONE = GpuStep("earlier engine, one launch after the other", 14.0e-3, 741, 2.3e-3)
REPLAYED = GpuStep("prototype, replayed", 2.5e-3)
COMPILED = GpuStep("prototype, replayed, small operations compiled", 1.7e-3)
# milliseconds a token of one request, at each of the contexts; one number: which one was not noted
DECODE_MS: dict[str, tuple[float, ...]] = {
    TRANSFORMERS.what: (25.0, 24.5, 24.1),
    "transformers, static cache, compiled (87 s)": (3.2,),
    ONE_BY_ONE.what: (14.0, 13.2, 13.5),
    REPLAYED.what: (2.5, 2.6, 2.7),
}
WHOLE_ENGINE_MS = (2.4, 3.6)  # a token of one request, the prototype with all around its steps
NUM_SERVED = 64
SERVED = "64 requests: prompts of 32–512 tokens, 16–128 new ones; Qwen3-0.6B shape, bf16, one H100"
SERVING = (
    GpuServing("transformers, padded", 237, 648),
    GpuServing("transformers, continuous batching", 434, 473),
    GpuServing("earlier engine, a call for each request, rows", 72, 333),
    GpuServing("earlier engine, a call for each request, pages", 67, 310),
    GpuServing("prototype, one call for all, pages", 1404, 2027, least=(554, 1329)),
    GpuServing("prototype, one call for all, replayed, pages", 2244, 2508),
    GpuServing("prototype, rows read in place, replayed", 3388, 3798),
)


# -- what can be counted --------------------------------------------------------------------------

META = "meta"  # PyTorch's device that has shapes and no numbers
NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.detach")


class Operations(TorchDispatchMode):
    """Inside, the operations of PyTorch that compute are counted by name, in `kernels`.

    A view of a tensor and memory that nobody fills need no kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_view = _memory_of(made) <= _memory_of((args, kwargs)) and not func._schema.is_mutable
        if not is_view and not str(func).startswith(NO_KERNEL):
            self.kernels[func._schema.name.rpartition("::")[2].strip("_")] += 1
        return made


def _memory_of(values: object) -> set[int]:
    """Which memories the tensors among these values lie in."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor))
    return {one.untyped_storage()._cdata for one in tensors}


def count_launches(
    num_seqs: int, one_call: bool, shape: dict[str, Any] = QWEN3_06B, context: int = 128
) -> int:
    """Launches of a decode step of so many sequences on pages: at least one for each operation.

    Attention is called for each sequence, or, with `one_call`, once a layer for all of them. Two
    layers are enough to know all: they are alike.
    """
    one = _launches(num_seqs, one_call, shape, context, layers=1).total()
    a_layer = launches_of_layer(num_seqs, one_call, shape, context).total()
    return one + (shape["num_hidden_layers"] - 1) * a_layer


def launches_of_layer(
    num_seqs: int, one_call: bool, shape: dict[str, Any] = QWEN3_06B, context: int = 128
) -> Counter[str]:
    """The launches that one layer adds to such a step: name in PyTorch → how many."""
    one, two = (_launches(num_seqs, one_call, shape, context, layers) for layers in (1, 2))
    return two - one


@torch.inference_mode()
def _launches(
    num_seqs: int, one_call: bool, shape: dict[str, Any], context: int, layers: int
) -> Counter[str]:
    changes = {"model_type": "qwen3", "num_hidden_layers": layers}
    config = ModelConfig.from_dict(shape | changes)
    model = without_weights(config).to(META, torch.bfloat16).requires_grad_(False)
    use_fast_layers(model)
    spec = KVCacheSpec.from_model(config, torch.bfloat16)
    storage = KVStorage(spec, 2 * context * num_seqs, META)
    apart = torch.arange(0, 2 * context, 2)  # no two of a sequence's slots are neighbours
    rooms = [
        Allocation(context - 1, [int(slots[-1])], slots)
        for slots in (apart + 2 * context * s for s in range(num_seqs))
    ]
    attention = SdpaAttention(storage)
    if one_call:  # the kernel counts as one operation, whatever it does
        attention = BatchedAttention(storage, lambda q, *_: q.clone())
    names = [str(s) for s in range(num_seqs)]
    with Operations() as seen:
        batch = Batch.from_allocations([[0]] * num_seqs, rooms, names, META)
        model.compute_logits(model(batch, attention))
    return seen.kernels


# -- how to look ----------------------------------------------------------------------------------

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


def profile_step(run: Callable[[], object], repeat: int = 5) -> GpuStep:
    """What a function does on this GPU: seconds (the least of some), launches, and time it works.

    The profiler slows the CPU, so the seconds are measured without it. ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: the figures of an H100 are in tutorial_engine.lab")
    run()
    seconds = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        run()
        torch.cuda.synchronize()
    return GpuStep("here", min(seconds), *launches_and_work(seen.events() or []))


def launches_and_work(events: Iterable[FunctionEvent]) -> tuple[int, float]:
    """Launches among a profiler's events, and the seconds in which at least one kernel runs."""
    launches, runs = 0, []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            runs.append((event.time_range.start, event.time_range.end))
        launches += event.name.startswith(LAUNCHES)
    busy = end = 0.0
    for began, ended in sorted(runs):
        busy += max(ended - max(began, end), 0)
        end = max(end, ended)
    return launches, busy * 1e-6
