"""Introduced in notebook 03. What an engine did, event by event, and the states that lead from it.

A `Recorder` collects small frozen events; the `Trace` that it gives can be saved, loaded, and read
step by step with `trace.history`. Every picture of the engine is drawn from one. It knows numbers
and names only: no engine, no model and no picture.
"""

from tutorial_engine.trace.events import (
    Admitted,
    BlockCopied,
    BlockTaken,
    EngineState,
    Event,
    Finished,
    Preempted,
    Recorder,
    RequestEvent,
    RequestState,
    Scheduled,
    TokenSampled,
    Trace,
)
from tutorial_engine.trace.history import Step, history
from tutorial_engine.trace.pool import PoolHistory

__all__ = [
    "Admitted",
    "BlockCopied",
    "BlockTaken",
    "EngineState",
    "Event",
    "Finished",
    "PoolHistory",
    "Preempted",
    "Recorder",
    "RequestEvent",
    "RequestState",
    "Scheduled",
    "Step",
    "TokenSampled",
    "Trace",
    "history",
]
