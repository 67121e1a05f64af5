"""A small, real LLM inference engine, built up notebook by notebook.

Rooms in reading order: model, sampling, trace, cache, engine (what runs a request); tiny (the
trained model); lab, parallel (instruments); viz (pictures); learn (lessons). A room imports only
from rooms before it. docs/architecture.md leads through them.

What users need is here, under vLLM's names, and is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from tutorial_engine.doors import lazy_exports

if TYPE_CHECKING:
    from tutorial_engine.cache import CellKVCache, PagedKVCache, StaticKVCache
    from tutorial_engine.engine import (
        LLM,
        CompletionOutput,
        EngineArgs,
        EngineConfig,
        LLMEngine,
        RequestOutput,
        TextPrompt,
        TokensPrompt,
        load_chat_template,
    )
    from tutorial_engine.model import load_model, load_tokenizer
    from tutorial_engine.sampling import SamplingParams
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CellKVCache",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "PagedKVCache",
    "RequestOutput",
    "SamplingParams",
    "StaticKVCache",
    "TextPrompt",
    "TokensPrompt",
    "load_chat_template",
    "load_model",
    "load_tokenizer",
]
