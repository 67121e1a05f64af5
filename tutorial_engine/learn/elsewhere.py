"""Introduced in notebook 04. What our pieces are called in vLLM, SGLang and llama.cpp.

A list of names to search for, each of ours checked to be there. Theirs were looked up in vLLM v1,
SGLang's `srt` and llama.cpp's `src`; they may move.
"""

from importlib import import_module
from typing import NamedTuple


class Piece(NamedTuple):
    """One idea under four names; "" where an engine has no such thing of its own."""

    ours: str  # room.module.name, below tutorial_engine
    vllm: str
    sglang: str
    llama_cpp: str


PIECES = (
    Piece("cache.storage.KVStorage", "kv_caches", "MHATokenToKVPool", "llama_kv_cache"),
    Piece("cache.blocks.BlockManager", "BlockPool", "RadixCache", ""),
    Piece("cache.paged.PagedKVCache", "KVCacheManager", "ReqToTokenPool", ""),
    Piece("model.batch.Batch.slot_mapping", "slot_mapping", "out_cache_loc", "slot_info"),
    Piece("cache.cell_table.CellTable", "", "", "llama_kv_cells"),
    Piece("cache.cell_table.CellTable.find_slot", "", "", "find_slot"),
    Piece("cache.cells.CellKVCache.apply_shifts", "", "", "build_rope_shift"),
    Piece("engine.scheduler.Scheduler", "Scheduler", "Scheduler", "server_context"),
    Piece("engine.request.Request", "Request", "Req", "server_slot"),
    Piece("model.batch.Batch", "InputBatch", "ForwardBatch", "llama_ubatch"),
    Piece("engine.engine.LLMEngine", "LLMEngine", "Engine", "llama_context"),
    Piece(
        "parallel.tensor_parallel.RowParallelLinear", "RowParallelLinear", "RowParallelLinear", ""
    ),
)


def find(name: str) -> object:
    """Our piece itself. AttributeError or ModuleNotFoundError if it is called otherwise now."""
    room, module, *path = name.split(".")
    thing: object = import_module(f"tutorial_engine.{room}.{module}")
    for part in path:
        fields = getattr(thing, "__dataclass_fields__", {})
        thing = fields[part] if part in fields else getattr(thing, part)
    return thing


def table() -> str:
    """All pieces, a line each."""
    head = Piece("here", "vLLM", "SGLang", "llama.cpp")
    lines = [head, *PIECES]
    for piece in PIECES:
        find(piece.ours)
    wide = [max(len(line[i]) for line in lines) + 2 for i in range(len(head))]
    rows = ("".join(f"{cell or '–':<{wide[i]}}" for i, cell in enumerate(line)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)
