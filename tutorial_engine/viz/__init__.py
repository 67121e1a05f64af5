"""Introduced in notebook 01. Everything that draws. The engine never imports it.

Pictures are pure functions of what the engine returned or recorded: nothing is drawn by hand. What
the notebooks import is handed out here, each name when it is asked for.

`run` reads what was recorded; `drawing` is what pictures are made of; `views` has a file for each
picture, `explorers` one for each explorer, and the players.
"""

from typing import TYPE_CHECKING

from tutorial_engine.doors import lazy_exports

if TYPE_CHECKING:
    from tutorial_engine.viz.explorers.attention_explorer import AttentionExplorer
    from tutorial_engine.viz.explorers.block_explorer import BlockExplorer
    from tutorial_engine.viz.explorers.cache_explorer import CacheExplorer
    from tutorial_engine.viz.explorers.cell_explorer import CellExplorer
    from tutorial_engine.viz.explorers.chat_box import ChatBox
    from tutorial_engine.viz.explorers.dial_explorer import DialExplorer
    from tutorial_engine.viz.explorers.fact_explorer import FactExplorer
    from tutorial_engine.viz.explorers.memory_calculator import MemoryCalculator
    from tutorial_engine.viz.explorers.race_explorer import RaceExplorer
    from tutorial_engine.viz.explorers.rope_explorer import RopeExplorer
    from tutorial_engine.viz.explorers.sampling_explorer import SamplingExplorer
    from tutorial_engine.viz.explorers.scheduler_explorer import SchedulerExplorer
    from tutorial_engine.viz.run.attention_weights import attention_weights
    from tutorial_engine.viz.run.record_softmax import record_softmax
    from tutorial_engine.viz.run.recorded import ALL_AT_ONCE
    from tutorial_engine.viz.run.shape_walk import meta_shape_walk, shape_walk, walk_table
    from tutorial_engine.viz.tokens import token_label, token_labels
    from tutorial_engine.viz.views.ablation_picture import ablation_picture
    from tutorial_engine.viz.views.block_picture import block_picture
    from tutorial_engine.viz.views.block_view import block_view
    from tutorial_engine.viz.views.bytes_picture import bytes_picture
    from tutorial_engine.viz.views.clocks_picture import clocks_picture
    from tutorial_engine.viz.views.dial import dial
    from tutorial_engine.viz.views.draws_picture import draws_picture
    from tutorial_engine.viz.views.end_to_end_picture import end_to_end_picture
    from tutorial_engine.viz.views.fact_picture import fact_picture
    from tutorial_engine.viz.views.first_slot_picture import first_slot_picture
    from tutorial_engine.viz.views.first_tokens_picture import first_tokens_picture
    from tutorial_engine.viz.views.flat_batch import flat_batch
    from tutorial_engine.viz.views.gpu_memory_picture import gpu_memory_picture
    from tutorial_engine.viz.views.gpu_timeline import gpu_timeline
    from tutorial_engine.viz.views.gqa_picture import gqa_picture
    from tutorial_engine.viz.views.heads_picture import heads_picture
    from tutorial_engine.viz.views.itl_over_time import itl_over_time
    from tutorial_engine.viz.views.latency_picture import latency_picture
    from tutorial_engine.viz.views.layouts_picture import layouts_picture
    from tutorial_engine.viz.views.leak_picture import leak_picture
    from tutorial_engine.viz.views.losses_picture import losses_picture
    from tutorial_engine.viz.views.margins_picture import Lead, margins_picture
    from tutorial_engine.viz.views.mask_picture import mask_picture
    from tutorial_engine.viz.views.matters_picture import matters_picture
    from tutorial_engine.viz.views.mlp_split import mlp_split
    from tutorial_engine.viz.views.one_request import one_request
    from tutorial_engine.viz.views.overlap_picture import overlap_picture
    from tutorial_engine.viz.views.padding_picture import padding_picture
    from tutorial_engine.viz.views.patching_picture import patching_picture
    from tutorial_engine.viz.views.places import places, read_places
    from tutorial_engine.viz.views.positions_picture import positions_picture
    from tutorial_engine.viz.views.qkv_picture import qkv_picture
    from tutorial_engine.viz.views.queue_picture import queue_picture
    from tutorial_engine.viz.views.radix_tree import radix_tree
    from tutorial_engine.viz.views.ranks_picture import ranks_picture
    from tutorial_engine.viz.views.reach_picture import reach_picture
    from tutorial_engine.viz.views.readers_picture import readers_picture
    from tutorial_engine.viz.views.roofline_picture import roofline_picture
    from tutorial_engine.viz.views.rope_maps_picture import rope_maps_picture
    from tutorial_engine.viz.views.rope_scaling_picture import rope_scaling_picture
    from tutorial_engine.viz.views.running_softmax_picture import running_softmax_picture
    from tutorial_engine.viz.views.scores_picture import scores_picture
    from tutorial_engine.viz.views.serving_picture import serving_picture
    from tutorial_engine.viz.views.shift_picture import shift_picture
    from tutorial_engine.viz.views.strips_picture import strips_picture
    from tutorial_engine.viz.views.sweep import sweep
    from tutorial_engine.viz.views.three_token_picture import three_token_picture
    from tutorial_engine.viz.views.throughput_latency import throughput_latency
    from tutorial_engine.viz.views.timeline import timeline, timelines
    from tutorial_engine.viz.views.training_picture import training_picture
    from tutorial_engine.viz.views.transplant_picture import transplant_picture
    from tutorial_engine.viz.views.two_steps_picture import two_steps_picture
    from tutorial_engine.viz.views.waste_over_time import waste_over_time
    from tutorial_engine.viz.views.work_picture import work_picture
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
