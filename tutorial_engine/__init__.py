"""A small, real LLM inference engine, built up notebook by notebook.

Rooms in reading order: model, sampling, trace, cache, engine (what runs a request); tiny (the
trained model); lab, parallel (instruments); viz (pictures); learn (lessons). A room imports only
from rooms before it. docs/architecture.md leads through them.
"""
