"""Introduced in notebook 01. Instruments around the engine: they measure, compare and prove.

`doctor` (notebook 01) looks at this machine; `ledger` and `hf` (02) compare every way through the
engine with every other and with transformers; `roofline`, `one_forward` and `sizing` count what a
forward and a model need, and measure what this machine gives; `workload` (03) lets requests come
over time, and `static_batch` says when they were answered once; `layouts`, `dial` and `block_size`
(04) compare orders of memory and block sizes, `hit_rate`, `when_full`, `pool_log` and `shift`
answer what users ask.
The engine knows none of them.
What the notebooks import is handed out here, each name when it is asked for: the doctor has to run,
and to say so, where torch is not installed. A function that is called like its module has another
name here, or whoever imports the module first would get that instead.
"""

from importlib import import_module
from typing import Any

HOMES = {
    "block_size": "block_size_trade, table as trade_table",
    "chrome": "to_chrome",
    "dial": "sharing, sweep_block_sizes",
    "hf": "OurCache, run_transformers",
    "hit_rate": "BEGINS, EVICTED, SALT, SAME_STEP, SHORT, cases",
    "layouts": "layouts as kv_layouts",
    "ledger": (
        "engine_paths, in_place_paths, layer_paths, ledger as equality_ledger, loop_path, "
        "memory_paths, our_paths, table as ledger_table"
    ),
    "many_blocks": "PagedAttention",
    "one_forward": "Work, against_the_roof, best_seconds, count_operations, ready, token_times",
    "pool_log": "pool_log as log_of_pool",
    "roofline": "forward_flops, weight_bytes",
    "shift": "next_probabilities, random_model, shift_gap, shifted_text",
    "static_batch": "static_as_it_was",
    "when_full": "LLAMA_2_7B, Price, when_full as when_memory_full",
    "workload": "Arrival, poisson_times, serve",
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
