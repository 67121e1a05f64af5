"""Introduced in notebook 01. Everything that draws. The engine never imports it.

Pictures are pure functions of what the engine returned or recorded: nothing is drawn by hand. What
the notebooks import is handed out here, each name when it is asked for.
"""

from typing import TYPE_CHECKING

from tutorial_engine.doors import lazy_exports

if TYPE_CHECKING:
    from tutorial_engine.viz.attention_explorer import AttentionExplorer, attention_weights
    from tutorial_engine.viz.attention_plots import (
        clocks_picture,
        heads_picture,
        mask_picture,
        rope_maps_picture,
        training_picture,
    )
    from tutorial_engine.viz.batch_plots import flat_batch
    from tutorial_engine.viz.block_explorer import ALL_AT_ONCE, BlockExplorer
    from tutorial_engine.viz.block_plots import block_view
    from tutorial_engine.viz.cache_explorer import CacheExplorer
    from tutorial_engine.viz.cache_plots import (
        bytes_picture,
        latency_picture,
        positions_picture,
        roofline_picture,
        work_picture,
    )
    from tutorial_engine.viz.calculator import MemoryCalculator
    from tutorial_engine.viz.cell_explorer import CellExplorer
    from tutorial_engine.viz.chat_box import ChatBox
    from tutorial_engine.viz.context_plots import (
        reach_picture,
        rope_scaling_picture,
        scores_picture,
    )
    from tutorial_engine.viz.dial_explorer import DialExplorer
    from tutorial_engine.viz.fact_view import FactExplorer, fact_picture
    from tutorial_engine.viz.gpu_plots import (
        end_to_end_picture,
        gpu_memory_picture,
        gpu_timeline,
        padding_picture,
        serving_picture,
    )
    from tutorial_engine.viz.induction_view import two_steps_picture
    from tutorial_engine.viz.kv_edit_view import (
        matters_picture,
        readers_picture,
        strips_picture,
        transplant_picture,
    )
    from tutorial_engine.viz.layout_plots import layouts_picture
    from tutorial_engine.viz.leak_view import leak_picture
    from tutorial_engine.viz.memory_plots import dial, shift_picture, waste_over_time
    from tutorial_engine.viz.model_plots import (
        ablation_picture,
        block_picture,
        gqa_picture,
        qkv_picture,
        three_token_picture,
    )
    from tutorial_engine.viz.overlap_view import overlap_picture
    from tutorial_engine.viz.parallel_plots import mlp_split, ranks_picture
    from tutorial_engine.viz.patching_view import patching_picture
    from tutorial_engine.viz.place_plots import places, read_places
    from tutorial_engine.viz.queue_view import queue_picture
    from tutorial_engine.viz.race_view import RaceExplorer
    from tutorial_engine.viz.radix_view import radix_tree
    from tutorial_engine.viz.real_plots import (
        first_slot_picture,
        first_tokens_picture,
        losses_picture,
    )
    from tutorial_engine.viz.request_plots import one_request
    from tutorial_engine.viz.rope_explorer import RopeExplorer
    from tutorial_engine.viz.sampling_explorer import SamplingExplorer
    from tutorial_engine.viz.sampling_plots import Lead, draws_picture, margins_picture
    from tutorial_engine.viz.scheduler_explorer import SchedulerExplorer
    from tutorial_engine.viz.serving_plots import itl_over_time, sweep, throughput_latency
    from tutorial_engine.viz.shapes import meta_shape_walk, shape_walk, walk_table
    from tutorial_engine.viz.softmax_view import record_softmax, running_softmax_picture
    from tutorial_engine.viz.timeline_plots import timeline, timelines
    from tutorial_engine.viz.tokens import token_label, token_labels
    from tutorial_engine.viz.words import percent
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ALL_AT_ONCE",
    "AttentionExplorer",
    "BlockExplorer",
    "CacheExplorer",
    "CellExplorer",
    "ChatBox",
    "DialExplorer",
    "FactExplorer",
    "Lead",
    "MemoryCalculator",
    "RaceExplorer",
    "RopeExplorer",
    "SamplingExplorer",
    "SchedulerExplorer",
    "ablation_picture",
    "attention_weights",
    "block_picture",
    "block_view",
    "bytes_picture",
    "clocks_picture",
    "dial",
    "draws_picture",
    "end_to_end_picture",
    "fact_picture",
    "first_slot_picture",
    "first_tokens_picture",
    "flat_batch",
    "gpu_memory_picture",
    "gpu_timeline",
    "gqa_picture",
    "heads_picture",
    "itl_over_time",
    "latency_picture",
    "layouts_picture",
    "leak_picture",
    "losses_picture",
    "margins_picture",
    "mask_picture",
    "matters_picture",
    "meta_shape_walk",
    "mlp_split",
    "one_request",
    "overlap_picture",
    "padding_picture",
    "patching_picture",
    "percent",
    "places",
    "positions_picture",
    "qkv_picture",
    "queue_picture",
    "radix_tree",
    "ranks_picture",
    "reach_picture",
    "read_places",
    "readers_picture",
    "record_softmax",
    "roofline_picture",
    "rope_maps_picture",
    "rope_scaling_picture",
    "running_softmax_picture",
    "scores_picture",
    "serving_picture",
    "shape_walk",
    "shift_picture",
    "strips_picture",
    "sweep",
    "three_token_picture",
    "throughput_latency",
    "timeline",
    "timelines",
    "token_label",
    "token_labels",
    "training_picture",
    "transplant_picture",
    "two_steps_picture",
    "walk_table",
    "waste_over_time",
    "work_picture",
]
