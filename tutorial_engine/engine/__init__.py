"""Introduced in notebooks 02 and 03. Requests, and the two ways to serve them.

Notebook 02 opens `generate`, a plain loop over `prefill` and `decode`; notebook 03 the scheduler
and the engine around it. Both drive the same `Request`s through the same forward. It knows memory
only as `KVMemory` (rows, pages and cells are one to it), and draws nothing.
"""

from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.chat import load_chat_template
from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate, serve, stream
from tutorial_engine.engine.inputs import TextPrompt, TokensPrompt
from tutorial_engine.engine.llm import LLM
from tutorial_engine.engine.metrics import percentile
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestOutput,
    RequestStatus,
    ScheduledRequest,
)
from tutorial_engine.engine.runner import (
    ModelRunner,
    decode,
    forward,
    prefill,
    run_with_cache,
    run_without_cache,
)
from tutorial_engine.engine.scheduler import Scheduler

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "ModelRunner",
    "OneByOne",
    "PrefillFirst",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "ScheduledRequest",
    "Scheduler",
    "StaticBatching",
    "TextPrompt",
    "TokensPrompt",
    "VirtualClock",
    "WallClock",
    "decode",
    "forward",
    "generate",
    "load_chat_template",
    "percentile",
    "prefill",
    "run_with_cache",
    "run_without_cache",
    "serve",
    "stream",
]
