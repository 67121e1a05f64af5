"""Introduced in notebook 01. Instruments around the engine: they measure, compare and prove.

`doctor` (notebook 01) looks at this machine; `ledger` and `hf` (02) compare every way through the
engine with every other and with transformers, and `kv_edit` changes what a cache remembers;
`real` brings a real model, on which everything here runs as well (06); `two_texts` asks where its
cache passes on what two texts differ in, `sink` what it loses without some slots, and
`conversation` talks to it.
`roofline`, `one_forward` and `sizing` count what a forward and a model need, and measure what this
machine gives; `workload` (03) lets requests come
over time; `layouts`, `dial` and `block_size`
(04) compare orders of memory and block sizes, `pool_log` and `shift` (04), `hit_rate` and
`when_full` (05) answer what users ask. `vllm` (A3) records a vLLM that runs in this process, and
has runs of it; `beside_vllm` (03) compares with what vLLM decided and computed. `on_gpu` (A2) has
what was measured on a GPU, counts launches without one, and looks at a step where there is one.
The engine knows none of them.
What the notebooks import is handed out here, each name when it is asked for.
"""

from typing import TYPE_CHECKING

from tutorial_engine.doors import lazy_exports

if TYPE_CHECKING:
    from tutorial_engine.lab.beside_vllm import recorded_decisions, vllm_path
    from tutorial_engine.lab.block_size import block_size_trade, decode_table, decode_times
    from tutorial_engine.lab.block_size import table as trade_table
    from tutorial_engine.lab.conversation import Conversation
    from tutorial_engine.lab.dial import sharing, sweep_block_sizes
    from tutorial_engine.lab.dial import table as dial_table
    from tutorial_engine.lab.hf import OurCache, run_transformers
    from tutorial_engine.lab.hit_rate import BEGINS, EVICTED, NOT_YET, RUNNING, SALT, SHORT, cases
    from tutorial_engine.lab.kv_edit import Exchange, continued, memory_of
    from tutorial_engine.lab.layouts import layouts as kv_layouts
    from tutorial_engine.lab.ledger import (
        batched_paths,
        engine_paths,
        in_place_paths,
        layer_paths,
        loop_path,
        memory_paths,
        our_paths,
    )
    from tutorial_engine.lab.ledger import ledger as equality_ledger
    from tutorial_engine.lab.ledger import table as ledger_table
    from tutorial_engine.lab.many_blocks import PagedAttention
    from tutorial_engine.lab.on_gpu import (
        BANDWIDTH,
        CARD,
        COMPILED,
        CONTEXTS,
        DECODE_MS,
        ONE_BY_ONE,
        REPLAYED,
        SERVING,
        TRANSFORMERS,
        WHOLE_ENGINE_MS,
        count_launches,
        launches_of_layer,
        profile_step,
    )
    from tutorial_engine.lab.one_forward import (
        Work,
        against_the_roof,
        best_seconds,
        ready,
    )
    from tutorial_engine.lab.patching import Patched, patch_heads, residual_stream
    from tutorial_engine.lab.pool_log import pool_log as log_of_pool
    from tutorial_engine.lab.real import real_model, vllm_said
    from tutorial_engine.lab.roofline import forward_flops, weight_bytes
    from tutorial_engine.lab.shift import context_shift, random_model, shift_gap, shifted_text
    from tutorial_engine.lab.sink import first_slot, loss_without
    from tutorial_engine.lab.two_texts import TwoTexts
    from tutorial_engine.lab.vllm import record, recorded_run, serve_again
    from tutorial_engine.lab.when_full import when_full as when_memory_full
    from tutorial_engine.lab.workload import Arrival, poisson_times, serve
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BANDWIDTH",
    "BEGINS",
    "CARD",
    "COMPILED",
    "CONTEXTS",
    "DECODE_MS",
    "EVICTED",
    "NOT_YET",
    "ONE_BY_ONE",
    "REPLAYED",
    "RUNNING",
    "SALT",
    "SERVING",
    "SHORT",
    "TRANSFORMERS",
    "WHOLE_ENGINE_MS",
    "Arrival",
    "Conversation",
    "Exchange",
    "OurCache",
    "PagedAttention",
    "Patched",
    "TwoTexts",
    "Work",
    "against_the_roof",
    "batched_paths",
    "best_seconds",
    "block_size_trade",
    "cases",
    "context_shift",
    "continued",
    "count_launches",
    "decode_table",
    "decode_times",
    "dial_table",
    "engine_paths",
    "equality_ledger",
    "first_slot",
    "forward_flops",
    "in_place_paths",
    "kv_layouts",
    "launches_of_layer",
    "layer_paths",
    "ledger_table",
    "log_of_pool",
    "loop_path",
    "loss_without",
    "memory_of",
    "memory_paths",
    "our_paths",
    "patch_heads",
    "poisson_times",
    "profile_step",
    "random_model",
    "ready",
    "real_model",
    "record",
    "recorded_decisions",
    "recorded_run",
    "residual_stream",
    "run_transformers",
    "serve",
    "serve_again",
    "sharing",
    "shift_gap",
    "shifted_text",
    "sweep_block_sizes",
    "trade_table",
    "vllm_path",
    "vllm_said",
    "weight_bytes",
    "when_memory_full",
]
