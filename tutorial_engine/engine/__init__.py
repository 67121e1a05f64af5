"""Introduced in notebooks 02 and 03. Requests, and the two ways to serve them.

Notebook 02 opens `generate`, a plain loop over `prefill` and `decode`; notebook 03 the scheduler
and the engine around it. Both drive the same `Request`s through the same forward. It knows memory
only as `KVMemory` (rows, pages and cells are one to it), and draws nothing.
"""

from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.engine.scheduler import Scheduler

__all__ = [
    "EngineConfig",
    "LLMEngine",
    "Request",
    "Scheduler",
    "VirtualClock",
    "WallClock",
    "decode",
    "prefill",
]
