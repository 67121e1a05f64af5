"""The figures of docs/site/cheat_sheet.md, each from the package's own function."""

import math

import torch

from tutorial_engine.cache import KVCacheSpec
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.lab.roofline import Roofline, forward_bytes, forward_flops
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.rope import inverse_frequencies

MACHINE = Roofline(bandwidth=40e9, peak_flops=400e9)  # round figures, as of a laptop
CONTEXT = 2048
TIMES = (0.25, 0.31, 0.37, 0.43)  # of a request's tokens
KNOWN, COMPUTED, BUDGET = 21, 8, 12
TABLE, BLOCK, POSITION = (5, 1, 0), 4, 6
SCORES = (2.0, 1.0, 3.0)  # of a first block of one token, and of a second one
PROMPT, EQUAL = 84, 66  # tokens of a turn, and those of the turn before it
PROBABILITIES = (0.9, 0.5, 0.1)  # of the tokens that came
SECTIONS = {  # blank of the page → the lesson and the section that explain the formula
    "attention": ("01", "Attention by hand, three tokens"),
    "rope": ("01", "RoPE: position as rotation"),
    "gqa": ("01", "Many heads, fewer keys: GQA"),
    "bytes": ("02", "What it costs in bytes"),
    "roofline": ("02", "What bounds a forward: the roofline"),
    "rule": ("03", "The one rule"),
    "metrics": ("03", "What a user feels"),
    "budget_lesson": ("04", "Blocks for a budget"),
    "slots": ("04", "The block table"),
    "softmax": ("04", "Attention that reads the pages in place"),
    "conversation": ("06", "A conversation is a prefix cache"),
    "sink": ("06", "The slot that nobody may throw away"),
}


def figures() -> dict[str, str]:
    """Name of a blank → what stands there."""
    config = ModelConfig.from_dict({"model_type": "qwen3"} | QWEN3_06B)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    spec = KVCacheSpec.from_model(config, torch.bfloat16)
    turns = inverse_frequencies(config.head_dim, config.rope_theta)
    metrics = RequestMetrics(0.0, None, TIMES)
    old, new = SCORES[0], max(SCORES)
    assert metrics.ttft is not None and metrics.tpot is not None
    return {
        "model": "Qwen3-0.6B",
        "itemsize": str(spec.dtype.itemsize),
        "head_dim": str(config.head_dim),
        "root": f"{math.sqrt(config.head_dim):.2f}",
        "theta": f"{config.rope_theta:,.0f}",
        "fast": f"{turns[0]:g}",
        "slow": f"{turns[-1]:.1e}",
        "heads": str(heads),
        "kv_heads": str(kv_heads),
        "reads": str(5 // (heads // kv_heads)),
        "layers": str(config.num_hidden_layers),
        "token_bytes": f"{spec.bytes_per_token:,} bytes",
        "context": f"{CONTEXT:,}",
        "context_bytes": f"{CONTEXT * spec.bytes_per_token / 2**20:,.0f} MiB",
        "bandwidth": f"{MACHINE.bandwidth / 1e9:g}",
        "peak": f"{MACHINE.peak_flops / 1e9:g}",
        **_least("decode", config, 1, CONTEXT - 1),
        **_least("prefill", config, CONTEXT, 0),
        "known": str(KNOWN),
        "computed": str(COMPUTED),
        "budget": str(BUDGET),
        "run": str(min(KNOWN - COMPUTED, BUDGET)),
        "times": ", ".join(f"{time:g}" for time in TIMES) + " s",
        "ttft": f"{metrics.ttft:g}",
        "tpot": f"{metrics.tpot:.2g}",
        "blocks": f"{num_blocks_in(2**30, spec, 16):,}",
        "slot": str(TABLE[POSITION // BLOCK] * BLOCK + POSITION % BLOCK),
        "correct": f"exp({old:g} − {new:g}) = {math.exp(old - new):.3f}",
        "prompt": str(PROMPT),
        "equal": str(EQUAL),
        "found": str(found(PROMPT, EQUAL, 16)),
        "probabilities": ", ".join(f"{p:g}" for p in PROBABILITIES),
        "loss": f"{-sum(map(math.log, PROBABILITIES)) / len(PROBABILITIES):.2f}",
    }


def found(prompt: int, equal: int, block_size: int) -> int:
    """How many tokens of a prompt are found, when a request has run the first `equal` of them."""
    blocks = BlockManager(num_blocks=-(-equal // block_size), block_size=block_size)
    tokens = [*range(prompt)]
    blocks.admit("before", tokens[:equal])
    blocks.cache_full_blocks("before", tokens[:equal], equal)
    blocks.commit("before", equal)
    return block_size * len(blocks.find(tokens))


def _least(name: str, config: ModelConfig, num_tokens: int, context_len: int) -> dict[str, str]:
    """The roofline's milliseconds for a forward, and which limit decides."""
    arithmetic = forward_flops(config, num_tokens, context_len) / MACHINE.peak_flops
    memory = forward_bytes(config, num_tokens, context_len, itemsize=2) / MACHINE.bandwidth
    return {
        f"{name}_ms": f"{1000 * max(arithmetic, memory):,.0f}",
        f"{name}_limit": "arithmetic" if arithmetic > memory else "memory",
    }
