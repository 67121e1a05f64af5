"""Introduced in notebook 01. Everything that draws. The engine never imports it.

Pictures are pure functions of what the engine returned or recorded: nothing is drawn by hand. What
the notebooks import is handed out here, each name when it is asked for.
"""

from tutorial_engine.doors import hands_out

__getattr__, __all__ = hands_out(
    __name__,
    {
        "attention_explorer": "AttentionExplorer, attention_weights",
        "attention_plots": (
            "attention_picture, clocks_picture, cost_picture, distance_picture, "
            "heads_picture, mask_picture, rope_maps_picture, training_picture, variance_picture"
        ),
        "batch_plots": "flat_batch",
        "block_explorer": "ALL_AT_ONCE, BlockExplorer",
        "block_plots": "block_view",
        "cache_explorer": "CacheExplorer",
        "cache_plots": (
            "bytes_picture, latency_picture, positions_picture, roofline_picture, work_picture"
        ),
        "calculator": "MemoryCalculator",
        "chat_box": "ChatBox",
        "cell_explorer": "CellExplorer",
        "dial_explorer": "DialExplorer",
        "fact_view": "FactExplorer, fact_picture",
        "gpu_plots": (
            "end_to_end_picture, gpu_memory_picture, gpu_timeline, padding_picture, serving_picture"
        ),
        "induction_view": "two_steps_picture",
        "kv_edit_view": "matters_picture, readers_picture, strips_picture, transplant_picture",
        "layout_plots": "layouts_picture",
        "leak_view": "leak_picture",
        "memory_plots": "dial, shift_picture, waste_over_time",
        "model_plots": (
            "ablation_picture, block_picture, gqa_picture, qkv_picture, three_token_picture"
        ),
        "overlap_view": "overlap_picture",
        "parallel_plots": "mlp_split, ranks_picture",
        "place_plots": "places, read_places",
        "queue_view": "queue_picture",
        "race_view": "RaceExplorer",
        "radix_view": "radix_tree",
        "request_plots": "one_request",
        "real_plots": "first_slot_picture, first_tokens_picture, losses_picture",
        "rope_explorer": "RopeExplorer",
        "sampling_explorer": "SamplingExplorer",
        "sampling_plots": "draws_picture, margins_picture",
        "scheduler_explorer": "SchedulerExplorer",
        "serving_plots": "itl_over_time, sweep, throughput_latency",
        "shapes": "meta_shape_walk, shape_walk, walk_table",
        "softmax_view": "record_softmax, running_softmax_picture",
        "timeline_plots": "timeline, timelines",
        "tokens": "token_label, token_labels",
        "words": "percent",
    },
)
