"""What the tests of pictures draw, beside traces: figures by hand, and what small runs recorded."""

import functools
from typing import Any

import torch
from checkpoints import QWEN3_06B
from engines import random_model
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.lab.dial import DialPoint, sharing, sweep_block_sizes
from tutorial_engine.lab.shift import ShiftGap
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import Traffic
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.pool import PoolHistory
from tutorial_engine.viz.drawing.parts import Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.pool import draw_key, draw_names, draw_pool, looks_of
from tutorial_engine.viz.run.record_softmax import RecordedSoftmax, record_softmax

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
K = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
V = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0]])
LLAMA = KVCacheSpec(  # 32 layers, 32 heads of 128, bf16
    num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
)
SMALL = KVCacheSpec(num_layers=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8)
EXACT = ShiftGap(1, 3e-7, (1e-7,), (0.0,), 2.0)
APART = ShiftGap(3, 0.25, (0.0, 0.5, 0.1), (2e-6, 7.0, 1.25), 1.0)


def draw(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


def causal(*shape: int) -> Tensor:
    """Weights as attention makes them: no future, rows that add up to one."""
    scores = draw(*shape).masked_fill(~causal_mask(shape[-1], shape[-1]), float("-inf"))
    return (4 * scores).softmax(-1)


def curve(jump_at: int, last_loss: float) -> list[dict[str, float]]:
    """Training that learns to repeat in one jump."""
    score = [0.03 if i < jump_at else 0.9 for i in range(8)]
    return [
        {"step": 25 * i, "text_loss": 6.0 - i, "repeat_loss": last_loss + 7 - i, "induction": s}
        for i, s in enumerate(score)
    ]


def on_meta() -> CausalLM:
    with torch.device("meta"):
        return CausalLM(QWEN3_06B).to("meta")


def kv_numbers(layers: int = 3, tokens: int = 4, heads: int = 2, dim: int = 2) -> Tensor:
    """K and V in which every number is another one."""
    shape = (layers, 2, tokens, heads, dim)
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@functools.cache
def recorded_batches() -> list[Batch]:
    """The batches of an engine that serves three prompts with a budget of 12."""
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=32)
    model = random_model()
    with watched(model) as batches:
        engine = LLMEngine(model, config=config, clock=VirtualClock())
        for length in (9, 7, 3):
            engine.add_request(
                None, list(range(length)), SamplingParams(max_tokens=4, ignore_eos=True)
            )
        engine.run()
    return list(batches)


@functools.cache
def recorded_softmax(layer: int = 0, head: int = 0, block_size: int = 4) -> RecordedSoftmax:
    where = {"layer": layer, "head": head, "block_size": block_size}
    return record_softmax(load_model(), load_tokenizer(), PROMPTS, **where)


# -- pools ----------------------------------------------------------------------------------------


@functools.cache
def dial_points() -> tuple[DialPoint, ...]:
    """Eight requests on 128 slots, at five positions."""
    prefix = load_tokenizer().encode(PROMPTS[0]).ids
    arrivals = sharing(prefix, 512, 8, outputs=(4, 12))
    return tuple(sweep_block_sizes(load_model(), arrivals, (1, 4, 16), 128, 32))


def dial_point(position: object) -> DialPoint:
    return next(p for p in dial_points() if p.position == position)


def pool_picture(point: PoolHistory, step: int, name: str = "it") -> Picture:
    now, looks = point.snapshots[step], looks_of([point])
    sheet = Sheet(1000, 420)
    draw_key(sheet, 22)
    draw_names(sheet, looks, 48, set(now.entries))
    draw_pool(sheet, name, now, looks, 66, 64)
    return sheet.picture("")


# -- figures by hand ------------------------------------------------------------------------------

SECONDS = {  # (phase, context) -> seconds
    ("prefill", 128): {"transformers": 0.8, "llama.cpp": 0.4, "ours": 0.32},
    ("decode", 128): {"transformers": 0.14, "llama.cpp": 0.06, "ours": 0.04},
    ("prefill", 512): {"transformers": 3.2, "llama.cpp": 2.0, "ours": 1.6},
    ("decode", 512): {"transformers": 0.15, "llama.cpp": 0.05, "ours": 0.05},
}
FLOOR = {"prefill": 0.25, "decode": 0.032}


def bench_figures(floors: bool = True, serving: bool = False) -> dict[str, Any]:
    """What a benchmark writes down."""
    rows, limits = [], []
    for (phase, context), seconds in SECONDS.items():
        rows.append({"phase": phase, "context": context, "seconds": dict(seconds)})
        least = FLOOR[phase] * (context / 128 if phase == "prefill" else 1)
        limits.append({"phase": phase, "context": context, "seconds": least})
    made = {
        "machine": {"dtype": "float32", "threads": 2, "processor": "Some Processor"},
        "settings": {"shape": "tiny", "rounds": 9, "ours": "ours", "peer": "transformers"},
        "rows": rows,
        "floors": limits if floors else [],
    }
    if serving:
        speeds = {"transformers": 15.0, "transformers continuous": 9.0, "llama.cpp": 20.0}
        speeds |= {"ours, slots first": 63.0, "ours": 60.0}
        made["settings"] |= {"serving_rounds": 3}  # type: ignore[operator]
        took = {name: 600 / speed for name, speed in speeds.items()}
        made["serving"] = {"num_requests": 16, "wanted_tokens": 600, "seconds": took}
    return made


def parallel_report(size: int = 2, **sizes: int) -> ParallelReport:
    """The tiny model on some ranks: 10 forwards of 20 tokens together."""
    tiny = {"num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512}
    tiny |= {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 512}
    tiny["tie_word_embeddings"] = True
    return ParallelReport(
        tp_size=size,
        backend="gloo",
        dtype="float32",
        sizes={**tiny, **sizes},
        prompt_token_ids=(),
        token_ids=(),
        texts=(),
        weight_bytes=(3_546_880,) * size,
        weight_bytes_alone=6_692_608,
        replicated_bytes=401_152,
        kv_bytes=(65_536,) * size,
        kv_bytes_alone=131_072,
        num_forwards=10,
        num_tokens=20,
        traffic=Traffic(2 * 4 * 10, 20 * 2 * 4 * 192 * 4),
        digests=("a", "a"),
        seconds=1.0,
    )
