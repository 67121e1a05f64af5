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

from tutorial_engine.doors import hands_out

__getattr__, __all__ = hands_out(
    __name__,
    {
        "beside_vllm": "recorded_decisions, vllm_path",
        "block_size": "block_size_trade, decode_table, decode_times, table as trade_table",
        "chrome": "to_chrome",
        "conversation": "Conversation",
        "dial": "sharing, sweep_block_sizes, table as dial_table",
        "hf": "OurCache, run_transformers, run_transformers_from",
        "hit_rate": "BEGINS, EVICTED, NOT_YET, RUNNING, SALT, SHORT, cases",
        "kv_edit": "Exchange, continued, edited_paths, memory_of",
        "layouts": "layouts as kv_layouts",
        "ledger": (
            "batched_paths, engine_paths, in_place_paths, layer_paths, ledger as equality_ledger, "
            "loop_path, memory_paths, our_paths, table as ledger_table"
        ),
        "many_blocks": "PagedAttention",
        "on_gpu": (
            "BANDWIDTH, CARD, COMPILED, CONTEXTS, DECODE_MS, ONE_BY_ONE, REPLAYED, SERVING, "
            "TRANSFORMERS, WHOLE_ENGINE_MS, count_launches, launches_of_layer, profile_step"
        ),
        "one_forward": "Work, against_the_roof, best_seconds, count_operations, ready, token_times",
        "pool_log": "pool_log as log_of_pool",
        "real": "real_model, vllm_said",
        "roofline": "forward_flops, weight_bytes",
        "shift": "context_shift, random_model, shift_gap, shifted_text",
        "sink": "first_slot, loss_without",
        "two_texts": "TwoTexts",
        "vllm": "at_one_pace, record, recorded_run, serve_again",
        "when_full": "when_full as when_memory_full",
        "workload": "Arrival, poisson_times, serve",
    },
)
