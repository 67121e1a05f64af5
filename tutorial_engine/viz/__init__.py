"""Introduced in notebook 01. Everything that draws. The engine never imports it.

Pictures are pure functions of what the engine returned or recorded: nothing is drawn by hand. What
the notebooks import is handed out here, each name when it is asked for: a plot loads no explorer.
"""

from importlib import import_module
from typing import Any

HOMES = {
    "attention_explorer": "AttentionExplorer, attention_weights",
    "attention_plots": (
        "attention_picture, clocks_picture, cost_picture, distance_picture, "
        "heads_picture, mask_picture, training_picture, variance_picture"
    ),
    "batch_plots": "flat_batch",
    "block_explorer": "ALL_AT_ONCE, BlockExplorer",
    "block_plots": "block_view",
    "cache_explorer": "CacheExplorer",
    "cache_plots": (
        "bytes_picture, latency_picture, positions_picture, roofline_picture, work_picture"
    ),
    "calculator": "MemoryCalculator",
    "cell_explorer": "CellExplorer",
    "dial_explorer": "DialExplorer",
    "induction_view": "two_steps_picture",
    "layout_plots": "layouts_picture",
    "memory_plots": "dial, layer_factor, shift_picture, users_at_once, waste_over_time",
    "model_plots": "ablation_picture, block_picture, gqa_picture, qkv_picture, three_token_picture",
    "parallel_plots": "ranks_picture",
    "place_plots": "places, read_places",
    "request_plots": "one_request, state_machine",
    "rope_explorer": "RopeExplorer",
    "sampling_explorer": "SamplingExplorer",
    "sampling_plots": "draws_picture, margins_picture",
    "scheduler_explorer": "SchedulerExplorer",
    "serving_plots": "itl_over_time, latency_distributions, sweep, throughput_latency",
    "shapes": "meta_shape_walk, shape_walk, walk_table",
    "softmax_view": "record_softmax, running_softmax_picture",
    "timeline_plots": "timeline, timelines",
    "tokens": "token_label, token_labels",
    "words": "percent",
}

_WHERE = {  # public name -> its module, and its name there
    entry.split()[-1]: (module, entry.split()[0])
    for module, entries in HOMES.items()
    for entry in entries.split(", ")
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _WHERE[name]
    return getattr(import_module(f"{__name__}.{module}"), there)
