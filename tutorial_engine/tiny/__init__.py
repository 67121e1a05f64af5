"""Introduced in notebook 01. The trained tiny model: its corpus, its training, its checkpoint.

The checkpoint folder is `checkpoint.TINY`; `python -m tutorial_engine.tiny.train` makes it again.
"""
