"""Introduced in notebook 02. KV caches: one storage addressed by slot, and three maps to slots.

Rows (`StaticKVCache`) and their naive twin are of notebook 02, pages (`PagedKVCache`) and cells
(`CellKVCache`) of notebook 04; all answer one protocol, `KVMemory`. It knows sequences by an
id and their tokens; no request, no queue and no budget.
"""

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention, attend_in_blocks
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.cache.storage import KVStorage

__all__ = [
    "BlockManager",
    "CellKVCache",
    "CellTable",
    "GrowingKVCache",
    "KVCacheSpec",
    "KVMemory",
    "KVStorage",
    "NaivePagedAttention",
    "PagedKVCache",
    "StaticKVCache",
    "attend_in_blocks",
]
