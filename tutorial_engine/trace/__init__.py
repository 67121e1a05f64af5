"""Introduced in notebook 03. What an engine did, event by event, and the states that lead from it.

A `Recorder` collects small frozen events; the `Trace` that it gives can be saved, loaded, and read
step by step with `trace.history`. Every picture of the engine is drawn from one. It knows numbers
and names only: no engine, no model and no picture.
"""

from tutorial_engine.trace.events import (
    EngineState,
    Event,
    Recorder,
    RequestEvent,
    RequestState,
    Trace,
)
from tutorial_engine.trace.history import Step

__all__ = ["EngineState", "Event", "Recorder", "RequestEvent", "RequestState", "Step", "Trace"]
