"""No operation sees two devices: what runs on a GPU is proved free of mixing on any machine.

The model and its memory are on PyTorch's meta device, which has shapes and no numbers. PyTorch
itself lets some operations mix it with the CPU without a word; `OneDevice` does not. A GPU would
refuse, or wait for a copy. What a CUDA graph records must not even copy, or look at a number: that
is proved here, too.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import config_of, random_sequences
from engines import VOCAB
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.replay import Compute, ReplayRunner
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import ModelRunner, decode, prefill
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend, BlockedAttention, SdpaAttention
from tutorial_engine.model.batched_attention import BatchedAttention, varlen_kernel
from tutorial_engine.model.checkpoint import without_weights
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.parallel.tensor_parallel import shard
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import (
    BlockCopied,
    BlockShared,
    CellsShared,
    Forked,
    Preempted,
    Recorder,
)

META = torch.device("meta")
# these are there to carry numbers from one device to another
TRANSFERS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class MixedDevices(Exception):
    """An operation was given tensors of two devices."""


class OneDevice(TorchDispatchMode):
    """Inside, an operation on two devices raises; scalars (0-d tensors) are free to go anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        devices = {str(x.device) for x in given}
        if len(devices) > 1 and func not in TRANSFERS:
            raise MixedDevices(f"{func} sees {sorted(devices)}")
        return func(*args, **(kwargs or {}))


class NotRecordable(RuntimeError):
    """An operation that no CUDA graph can record: it copies."""


class Recording(TorchDispatchMode):
    """Inside, all that operations get and give is on the meta device (which has no numbers)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(x.device != META for x in tensors):
            raise NotRecordable(str(func))
        return out


class GuessingRunner(ModelRunner):
    """Runs the forward on the meta device, and makes up the logits that it cannot give."""

    def run(self, scheduled: Any) -> Tensor:
        logits = super().run(scheduled)
        assert logits.device == META
        return torch.randn(len(logits), VOCAB)


class RecordingRunner(GuessingRunner, ReplayRunner):
    """Its decode steps are run as a CUDA graph would record them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._record = self.recordable

    def recordable(self, compute: Compute) -> Compute:
        def play() -> Tensor:
            with Recording(), patch.object(torch, "tensor", side_effect=NotRecordable):
                return compute()

        return play


def model_on_meta(**changes: Any) -> CausalLM:
    config = config_of(**{"max_position_embeddings": 64, "num_hidden_layers": 2, **changes})
    return without_weights(config).to(META).requires_grad_(False).eval()


MODEL = model_on_meta()
Make = Callable[[ModelConfig, Recorder], KVMemory]
MEMORIES: dict[str, Make] = {
    "rows": lambda config, trace: StaticKVCache.from_config(
        config, max_seqs=4, max_len=40, device=META, trace=trace
    ),
    "pages of 1": lambda config, trace: PagedKVCache.from_config(
        config, num_blocks=48, block_size=1, device=META, trace=trace
    ),
    "pages of 4": lambda config, trace: PagedKVCache.from_config(
        config, num_blocks=12, block_size=4, device=META, trace=trace
    ),
    "cells": lambda config, trace: CellKVCache.from_config(config, 48, device=META, trace=trace),
}

DOES: dict[str, set[type]] = {
    "rows": set(),
    "pages of 1": {BlockShared, Preempted},
    "pages of 4": {BlockCopied, Preempted},
    "cells": {CellsShared, Preempted},
}


def serve(
    model: CausalLM, make: Make, make_runner: Callable[..., ModelRunner] = GuessingRunner
) -> set[type]:
    """Prompts in chunks, decodes beside them, forks, and less memory than they need."""
    trace = Recorder()
    memory = make(model.config, trace)
    engine = LLMEngine(
        model,
        config=EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40),
        memory=memory,
        runner=make_runner(model, memory.storage),
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, n=2, temperature=1.0, seed=1)
    prompts = random_sequences([13, 6, 3, 9], VOCAB)
    with OneDevice():
        outputs = engine.generate([*prompts, prompts[0]], [params, drawn, params, drawn, params])
    engine.check_integrity()
    assert [len(one.token_ids) for output in outputs for one in output.outputs] == [12] * 7
    return {type(event) for event in trace.events}


@pytest.mark.parametrize("kind", MEMORIES)
def test_the_engine_mixes_no_devices(kind: str) -> None:
    happened = serve(model_on_meta(attention_bias=True), MEMORIES[kind])
    assert {Forked, *DOES[kind]} <= happened


@pytest.mark.parametrize("kind", ["rows", "pages of 4", "cells"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_replayed_can_be_recorded(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's own flash kernel in bf16, which has shapes on this device, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel, _ = varlen_kernel(torch.device("cuda"), dtype)
    assert (kernel is None) == (dtype == torch.float32)
    made: list[RecordingRunner] = []

    def make_runner(model: CausalLM, storage: Any) -> ModelRunner:
        made.append(RecordingRunner(model, storage, BatchedAttention(storage, kernel)))
        return made[0]

    serve(MODEL, MEMORIES[kind], make_runner)
    made[0].warm_up(4, 40)
    assert made[0].num_replays >= 5 and len(made[0].recorded) == 3


@pytest.mark.parametrize(
    "cannot",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x * torch.ones(()),
    ],
)
def test_what_cannot_be_recorded_is_caught(cannot: Callable[[Tensor], object]) -> None:
    x = torch.empty(2, device=META)
    with Recording(), pytest.raises(RuntimeError):  # PyTorch's own where a number is looked at
        cannot(x)


@pytest.mark.parametrize("rank", [0, 1])
def test_neither_share_of_two_ranks_mixes_devices(rank: int) -> None:
    """On one memory: a rank's is like the whole model's, with fewer heads."""
    serve(shard(MODEL, rank, 2, lambda x: x + x), MEMORIES["pages of 4"])


@pytest.mark.parametrize("kind", [*MEMORIES, "by cat"])
def test_a_loop_by_hand_mixes_no_devices(kind: str) -> None:
    recorder = Recorder()
    recorder.bind(lambda: 0.0, {})
    memory = GrowingKVCache() if kind == "by cat" else MEMORIES[kind](MODEL.config, recorder)
    backends: list[Any] = [SdpaAttention(memory.storage), BlockedAttention(memory.storage)]
    if isinstance(memory, PagedKVCache):
        backends += [NaivePagedAttention(memory), PagedAttention(memory)]
    for number, attention in enumerate(backends):
        loop_by_hand(memory, attention, str(number))


def loop_by_hand(memory: KVMemory, attention: AttentionBackend, name: str) -> None:
    requests = [
        Request(name + "ab"[i], ids) for i, ids in enumerate(random_sequences([7, 3], VOCAB))
    ]
    with OneDevice():
        assert prefill(MODEL, memory, requests, 4, attention).device == META
        for request in requests:
            request.token_ids.append(5)
        assert decode(MODEL, memory, requests, attention).device == META


def test_a_context_shift_mixes_no_devices() -> None:
    memory = CellKVCache.from_config(MODEL.config, 24, device=META)
    request = Request("a", random_sequences([9], VOCAB)[0])
    with OneDevice():
        prefill(MODEL, memory, [request])
        memory.seq_rm("a", 2, 4)
        memory.seq_add("a", 4, -1, -2)
        memory.seq_cp("a", "b", 0, 3)
        assert memory.seq_unshare("b", 0, 2)
        assert memory.apply_shifts() == 5


def test_what_mixes_devices_is_caught_by_name_and_transfers_are_free() -> None:
    x = torch.empty(2, 3, device=META)
    with OneDevice():
        for mixed in (lambda: x[torch.tensor([0])], lambda: x + torch.ones(3)):
            with pytest.raises(MixedDevices, match=r"aten\..* sees \['cpu', 'meta'\]"):
                mixed()
        assert (x * torch.tensor(2.0)).device == torch.ones(2, 3).to(META).device
