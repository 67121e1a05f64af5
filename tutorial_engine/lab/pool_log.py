"""What vLLM logs when it has made its pool, said of our memories.

Two numbers: how many tokens fit if every request has the greatest length, and how many such
requests fit at once.
"""

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.trace.pool import Pool


def max_concurrency(memory: KVMemory, max_model_len: int) -> float:
    """How many requests of max_model_len tokens fit at once; not rounded, and below 1 if none does.

    A request takes whole rows or blocks: as in vLLM's `get_max_concurrency_for_kv_cache_config`.
    """
    pool = Pool.of(memory.settings)
    return pool.num_units / -(-max_model_len // pool.unit)


def pool_log(memory: KVMemory, max_model_len: int) -> str:
    """The two lines (vLLM 0.32 writes them as one), as in its `get_kv_cache_capacity`."""
    most = max_concurrency(memory, max_model_len)
    return (
        f"KV cache size: {int(most * max_model_len):,} tokens\n"
        f"Maximum concurrency for {max_model_len:,} tokens per request: "
        f"{most:.2f}x"
    )
