"""A small, real LLM inference engine, built up notebook by notebook.

Rooms in reading order: model, sampling, trace, cache, engine (what runs a request); tiny (the
trained model); lab, parallel (instruments); viz (pictures); learn (lessons). A room imports only
from rooms before it. docs/architecture.md leads through them.

What users need is here, under vLLM's names, and is imported when it is first asked for.
"""

from tutorial_engine.doors import hands_out

__getattr__, __all__ = hands_out(
    __name__,
    {
        "engine": (
            "LLM, EngineArgs, EngineConfig, LLMEngine, RequestOutput, CompletionOutput, "
            "TextPrompt, TokensPrompt, load_chat_template"
        ),
        "sampling": "SamplingParams",
        "model": "load_model, load_tokenizer",
        "cache": "StaticKVCache, PagedKVCache, CellKVCache",
    },
)
