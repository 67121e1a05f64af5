"""Introduced in notebook 01. What makes a notebook a lesson: predictions, checks, parts.

It may know everything below it; the engine never imports it. What it hands out is imported when it
is first asked for.
"""

from typing import TYPE_CHECKING

from tutorial_engine.doors import lazy_exports

if TYPE_CHECKING:
    from tutorial_engine.learn.capstone import Adapted, check_engine
    from tutorial_engine.learn.exercises.lesson_01 import (
        check_attention,
        check_induction_score,
        check_kv_bytes,
        check_kv_head,
        check_layer,
        check_project,
        check_rope,
        check_whole_layer,
        check_window_mask,
    )
    from tutorial_engine.learn.exercises.lesson_02 import (
        check_cache,
        check_floor,
        check_run_new,
        check_slots_to_write,
        check_static_cache,
        check_top_p,
        check_transplant,
        check_why_finished,
        least_seconds,
    )
    from tutorial_engine.learn.exercises.lesson_02_cache_test import check_cache_test
    from tutorial_engine.learn.exercises.lesson_03 import (
        check_budget,
        check_fair,
        check_metrics,
        check_num_tokens,
        check_plan,
        check_shortest,
    )
    from tutorial_engine.learn.exercises.lesson_04 import (
        check_allocate,
        check_context_shift,
        check_num_blocks,
        check_slots,
        check_visible,
    )
    from tutorial_engine.learn.exercises.lesson_04_block_attention import check_block_attention
    from tutorial_engine.learn.exercises.lesson_05_blocks import check_free, check_take, leak
    from tutorial_engine.learn.exercises.lesson_05_causes import check_causes
    from tutorial_engine.learn.exercises.lesson_05_find import check_find
    from tutorial_engine.learn.exercises.lesson_05_give_way import check_slots_for
    from tutorial_engine.learn.exercises.lesson_06 import (
        check_find_layer,
        check_keep,
        check_replace_head,
    )
    from tutorial_engine.learn.exercises.lesson_a1 import check_rank_mlp
    from tutorial_engine.learn.exercises.lesson_a2 import (
        GpuMemory,
        check_end_to_end,
        check_size,
        check_step,
    )
    from tutorial_engine.learn.exercises.lesson_a3 import check_hits, check_log
    from tutorial_engine.learn.exercises.verdict import check_close
    from tutorial_engine.learn.parts.earlier import bring
    from tutorial_engine.learn.parts.engine import OwnEngine
    from tutorial_engine.learn.parts.holder import yours
    from tutorial_engine.learn.parts.model import LayerWeights, OwnAttention
    from tutorial_engine.learn.parts.server import OwnServer
    from tutorial_engine.learn.predict import Predictions
    from tutorial_engine.learn.source import num_lines, show_source
    from tutorial_engine.learn.stories.bugs import diff, planted, zoo
    from tutorial_engine.learn.stories.bugs_02 import BUGS_02
    from tutorial_engine.learn.stories.bugs_03 import BUGS_03
    from tutorial_engine.learn.stories.bugs_04 import BUGS_04, StaleBlocks, stress, stress_table
    from tutorial_engine.learn.stories.dry_runs import steps
    from tutorial_engine.learn.stories.eager_pages import cost, drama, tokens
    from tutorial_engine.learn.stories.elsewhere import box, names_elsewhere
    from tutorial_engine.learn.stories.jukebox import jukebox_table, play
    from tutorial_engine.learn.stories.other_rules import others_beside_vllm
    from tutorial_engine.learn.stories.slips import (
        blind_to_itself,
        heads_crosswise,
        softmax_over_queries,
        turn_neighbours,
        without_residual,
    )
    from tutorial_engine.learn.stories.vllm_places import Places, in_vllm
    from tutorial_engine.learn.without_model import the_real_model
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "BUGS_02",
    "BUGS_03",
    "BUGS_04",
    "Adapted",
    "GpuMemory",
    "LayerWeights",
    "OwnAttention",
    "OwnEngine",
    "OwnServer",
    "Places",
    "Predictions",
    "StaleBlocks",
    "blind_to_itself",
    "box",
    "bring",
    "check_allocate",
    "check_attention",
    "check_block_attention",
    "check_budget",
    "check_cache",
    "check_cache_test",
    "check_causes",
    "check_close",
    "check_context_shift",
    "check_end_to_end",
    "check_engine",
    "check_fair",
    "check_find",
    "check_find_layer",
    "check_floor",
    "check_free",
    "check_hits",
    "check_induction_score",
    "check_keep",
    "check_kv_bytes",
    "check_kv_head",
    "check_layer",
    "check_log",
    "check_metrics",
    "check_num_blocks",
    "check_num_tokens",
    "check_plan",
    "check_project",
    "check_rank_mlp",
    "check_replace_head",
    "check_rope",
    "check_run_new",
    "check_shortest",
    "check_size",
    "check_slots",
    "check_slots_for",
    "check_slots_to_write",
    "check_static_cache",
    "check_step",
    "check_take",
    "check_top_p",
    "check_transplant",
    "check_visible",
    "check_whole_layer",
    "check_why_finished",
    "check_window_mask",
    "cost",
    "diff",
    "drama",
    "heads_crosswise",
    "in_vllm",
    "jukebox_table",
    "leak",
    "least_seconds",
    "names_elsewhere",
    "num_lines",
    "others_beside_vllm",
    "planted",
    "play",
    "show_source",
    "softmax_over_queries",
    "steps",
    "stress",
    "stress_table",
    "the_real_model",
    "tokens",
    "turn_neighbours",
    "without_residual",
    "yours",
    "zoo",
]
