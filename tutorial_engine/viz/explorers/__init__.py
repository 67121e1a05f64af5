"""Introduced in notebook 01. Explorers that run the engine, and players that need no Python.

An explorer asks `run` for facts, and `views` or `drawing` for its pictures.
"""
