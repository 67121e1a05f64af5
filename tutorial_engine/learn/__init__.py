"""Introduced in notebook 01. What makes a notebook a lesson: predictions, checks, parts.

It may know everything below it; the engine never imports it. What it hands out is imported when it
is first asked for.
"""

from tutorial_engine.doors import hands_out

__getattr__, __all__ = hands_out(
    __name__,
    {
        "block_attention_check": "check_block_attention",
        "block_checks": "check_free, check_take, leak",
        "bugs": "diff, planted, zoo",
        "bugs_02": "BUGS_02",
        "bugs_03": "BUGS_03",
        "bugs_04": "BUGS_04, StaleBlocks, stress, stress_table",
        "cache_test_check": "check_cache_test",
        "capstone": "Adapted, check_engine",
        "cause_check": "check_causes",
        "checks_01": (
            "check_attention, check_induction_score, check_kv_bytes, check_kv_head, "
            "check_layer, check_project, check_rope, check_whole_layer, check_window_mask"
        ),
        "checks_02": (
            "check_cache, check_floor, check_run_new, check_slots_to_write, "
            "check_static_cache, check_top_p, check_transplant, check_why_finished, least_seconds"
        ),
        "checks_03": (
            "check_budget, check_fair, check_metrics, check_num_tokens, check_plan, check_shortest"
        ),
        "checks_04": (
            "check_allocate, check_context_shift, check_num_blocks, check_slots, check_visible"
        ),
        "checks_06": "check_replace_head, check_find_layer, check_keep",
        "checks_a1": "check_rank_mlp",
        "checks_a2": "GpuMemory, check_end_to_end, check_size, check_step",
        "checks_a3": "check_free_order, check_hits, check_log",
        "dry_runs": "steps",
        "eager_pages": "cost, drama, tokens",
        "earlier": "bring",
        "elsewhere": "box, names_elsewhere",
        "find_check": "check_find",
        "give_way_check": "check_slots_for",
        "jukebox": "jukebox_table, play",
        "own": "LayerWeights, OwnAttention",
        "own_engine": "OwnEngine",
        "other_rules": "others_beside_vllm",
        "own_server": "OwnServer",
        "parts": "yours",
        "predict": "Predictions",
        "slips": (
            "blind_to_itself, heads_crosswise, softmax_over_queries, turn_neighbours, "
            "without_residual"
        ),
        "source": "show_source",
        "verdict": "check_close",
        "vllm_places": "Places, in_vllm",
        "without_model": "the_real_model",
    },
)
