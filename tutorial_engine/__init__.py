"""A small, real LLM inference engine, built up notebook by notebook.

Rooms in reading order: model, sampling, trace, cache, engine (what runs a request); tiny (the
trained model); lab, parallel (instruments); viz (pictures); learn (lessons). A room imports only
from rooms before it. docs/architecture.md leads through them.

What users need is here, under vLLM's names, and is imported when it is first asked for.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "engine": (
        *("LLM", "EngineArgs", "EngineConfig", "LLMEngine", "RequestOutput", "CompletionOutput"),
        "load_chat_template",
    ),
    "sampling": ("SamplingParams",),
    "model": ("load_model", "load_tokenizer"),
    "cache": ("StaticKVCache", "PagedKVCache", "CellKVCache"),
}
_HOME = {name: room for room, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found
