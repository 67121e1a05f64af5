"""Introduced in notebook 03. What an engine did, event by event, and the states that lead from it.

A `Recorder` collects small frozen events; the `Trace` that it gives can be saved, loaded, and read
step by step by `trace.history`. Every picture of the engine is drawn from one. It knows numbers and
names only: no engine, no model and no picture.
"""

from tutorial_engine.trace.events import EngineState, Recorder, RequestState, Trace
from tutorial_engine.trace.history import Step, history

__all__ = ["EngineState", "Recorder", "RequestState", "Step", "Trace", "history"]
