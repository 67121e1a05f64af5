"""Introduced in notebook 04. A decode step over long contexts, on rows and on scattered pages.

The pages are read in three ways: gathered, in place by the loop, in place many blocks at a time.
The weights are random, a few layers in the shape of a released model; so are K and V, which no
prompt has to be run for. Knows memories and a model runner; knows no queue and no sampling.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutorial_engine.bench.measure import PAUSE, in_turn
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

ROWS, PAGES = "rows", "pages"
LOOP_ROUNDS = 3  # at most: it makes thousands of calls, and takes longer than all others
LOOP, MANY_BLOCKS = "in place, loop", "in place, many blocks"
Memory = StaticKVCache | PagedKVCache
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of logits, which are about 1 here


class LongContext(NamedTuple):
    """Medians of seconds of a decode step; `ratio` is each one's time over that of rows.

    `difference` is the largest |Δ| of anybody's logits to those of rows, `scattered` the share of
    contexts on pages that are no slice. `gathered` are the bytes of K and V that a step copies.
    """

    batch: int
    context: int
    layers: int
    block_size: int
    seconds: dict[str, float]
    ratio: dict[str, float]
    samples: dict[str, list[float]]
    difference: float
    scattered: float
    gathered: dict[str, int]


def slice_of(shape: dict[str, Any], layers: int) -> ModelConfig:
    """A model of that shape with fewer layers, and a vocabulary that is smaller by as much.

    So a step's time divides among layers, head and attention as it does in the whole model.
    """
    vocab = shape["vocab_size"] * layers // shape["num_hidden_layers"]
    changes = {"model_type": "qwen3", "num_hidden_layers": layers, "vocab_size": vocab}
    return ModelConfig.from_dict({**shape, **changes})


def random_model(config: ModelConfig, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Random weights, prepacked where that is possible, as a loaded model's are."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).draw_weights().to(dtype).requires_grad_(False).eval()
    model.prepack()
    return model


@torch.inference_mode()
def measure_long_context(
    model: Qwen3ForCausalLM, batch: int, context: int, rounds: int, block_size: int = 16
) -> LongContext:
    """The same decode step on rows, and on pages in each way of reading, `rounds` times in turn.

    The last token of each context is the one that is run. ValueError unless all give the same
    logits, and the same tokens in fp32.
    """
    memories = _memories(model, batch, context, block_size)
    rows, pages, in_place = (_Step(model, memory, batch, context) for memory in memories)
    contenders: dict[str, tuple[_Step, AttentionBackend | None]] = {
        ROWS: (rows, None),
        PAGES: (pages, None),
        LOOP: (in_place, NaivePagedAttention(memories[2])),
        MANY_BLOCKS: (in_place, PagedAttention(memories[2])),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    logits: dict[str, Tensor] = {}
    gathered: dict[str, int] = {}
    names = list(contenders)
    for number in range(-1, rounds):
        for name in in_turn(names, number):
            if name == LOOP and number >= LOOP_ROUNDS:
                continue
            step, attention = contenders[name]
            storage = step.memory.storage
            runner, before = ModelRunner(model, storage, attention), storage.bytes_gathered
            time.sleep(PAUSE)
            began = time.perf_counter()
            logits[name] = step.run(runner)
            if number >= 0:
                samples[name].append(time.perf_counter() - began)
            gathered[name] = storage.bytes_gathered - before
    difference = _compare(logits, model.dtype)
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    return LongContext(
        batch,
        context,
        model.config.num_hidden_layers,
        block_size,
        seconds,
        {name: value / seconds[ROWS] for name, value in seconds.items()},
        samples,
        difference,
        pages.num_scattered / batch,
        gathered,
    )


def _memories(
    model: Qwen3ForCausalLM, batch: int, context: int, block_size: int
) -> tuple[StaticKVCache, PagedKVCache, PagedKVCache]:
    """Rows and pages that hold exactly these contexts, each in the layout that is best for it.

    Whoever gathers copies one slot at a time, and wants a slot's heads side by side. Whoever reads
    in place multiplies with one head's block, and wants a head's slots side by side.
    """
    spec = KVCacheSpec.from_model(model.config, model.dtype)
    num_slots = batch * -(-context // block_size) * block_size
    gathered, in_place = (
        PagedKVCache(
            KVStorage(spec, num_slots, model.device, slots_first), block_size, prefix_caching=False
        )
        for slots_first in (True, False)
    )
    rows = StaticKVCache.from_config(
        model.config, max_seqs=batch, max_len=context, dtype=model.dtype, device=model.device
    )
    return rows, gathered, in_place


class _Step:
    """A memory that is full of contexts, and the step in which the last token of each is run.

    The contexts grew together, some tokens at a time, as those of requests that decode side by
    side: so no two blocks of one table are neighbours.
    """

    def __init__(self, model: Qwen3ForCausalLM, memory: Memory, batch: int, context: int) -> None:
        self.memory = memory
        draw = random.Random(0)
        ids = [draw.choices(range(model.config.vocab_size), k=context) for _ in range(batch)]
        self.requests = [Request(f"r{i}", own[:1]) for i, own in enumerate(ids)]
        for end in range(1, context):
            for own, (request, _, _) in zip(ids, self.plan(), strict=True):
                memory.commit(request.request_id, request.token_ids, end)
                request.num_computed_tokens = end
                request.token_ids.append(own[end])
        held = (memory.describe(request.request_id).slots for request in self.requests)
        _fill(memory.storage, [slots[: context - 1] for slots in held])

    @property
    def num_scattered(self) -> int:
        """Requests whose slots are no slice."""
        return sum(not isinstance(one.allocation.context_slots, slice) for one in self.plan())

    def plan(self) -> list[ScheduledRequest]:
        """The newest token of each; the same every time, until it is committed."""
        scheduled = []
        for request in self.requests:
            computed = request.num_computed_tokens
            room = self.memory.allocate(request.request_id, request.token_ids, computed, 1)
            assert room is not None, "there is memory for all"
            scheduled.append(ScheduledRequest(request, 1, room))
        return scheduled

    def run(self, runner: ModelRunner) -> Tensor:
        """Allocation, batch and forward → logits [batch, V]."""
        output = runner.run(self.plan())
        if output.faults:
            raise ValueError(f"the step could not be run: {output.faults}")
        return output.logits


def _fill(storage: KVStorage, slots: Sequence[Sequence[int]]) -> None:
    """Random K and V for all of these tokens; each layout gets the same, position by position."""
    spec = storage.spec
    device = storage.k.device
    generator = torch.Generator().manual_seed(0)
    for layer in range(spec.num_layers):
        k, v = (
            torch.randn(len(slots[0]), spec.num_kv_heads, dim, generator=generator)
            for dim in (spec.k_head_dim, spec.v_head_dim)
        )
        for s, own in enumerate(slots):  # every sequence has them at other positions
            where = torch.tensor(own, device=device)
            rolled = (x.roll(s, 0).to(device=device, dtype=spec.dtype) for x in (k, v))
            storage.write_slots(layer, where, *rolled)


def _compare(logits: dict[str, Tensor], dtype: torch.dtype) -> float:
    """The largest |Δ| to the logits of rows; ValueError where it is no rounding."""
    reference = logits[ROWS]
    difference = max(float((own - reference).abs().max()) for own in logits.values())
    same = all(torch.equal(own.argmax(-1), reference.argmax(-1)) for own in logits.values())
    if difference > TOLERANCE[dtype] or not (same or dtype != torch.float32):
        raise ValueError(
            f"rows and pages disagree by {difference:.1e} in their logits (same tokens: {same}): "
            "the comparison would not be fair"
        )
    return difference
