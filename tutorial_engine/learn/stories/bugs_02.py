"""The bug zoo of the cache: real one-line bugs in where and when.

Each one runs without an error, and most leave the first new token right: see bugs.planted.
"""

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.learn.stories.bugs import Zoo, edited
from tutorial_engine.model import attention
from tutorial_engine.model.batch import Batch

BUGS_02: Zoo = {
    "decode starts one position late": edited(
        Batch,
        "from_allocations",
        (
            "[allocation.first_position for allocation in allocations]",
            "[a.first_position + (a.first_position > 0) for a in allocations]",
        ),
    ),
    "K and V written one slot early": edited(
        StaticKVCache,
        "allocate",
        (
            "range(start + num_computed, start + end)",
            "[start + p - (num_computed > 0) for p in range(num_computed, end)]",
        ),
    ),
    "one slot read too many": edited(
        StaticKVCache,
        "allocate",
        ("slice(start, start + end)", "slice(start, start + end + (num_computed > 0))"),
    ),
    "a chunk masked from the upper left": edited(
        attention,
        "blocked_attention",
        ("end = kv_len - q_len + start + rows", "end = start + rows"),
    ),
}
