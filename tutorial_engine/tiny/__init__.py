"""Introduced in notebook 01. The trained tiny model: its corpus, its training, its checkpoint.

The checkpoint folder is `model.checkpoint.TINY`; `python -m tutorial_engine.tiny.train` makes it
again. Notebook 01 opens its last layer. Nothing is handed out here: the model is loaded like any
other.
"""
