"""Introduced in notebook 01. The trained tiny model: its corpus, its training, its checkpoint.

The checkpoint folder is `model.checkpoint.TINY`; `python -m tutorial_engine.tiny.train` makes it
again. Notebook 01 opens its last layer. Nothing is handed out here: the model is loaded like any
other.
"""

from tutorial_engine.tiny.corpus import stories
from tutorial_engine.tiny.induction import induction_scores, repeated_random_ids, score_of_heads

__all__ = ["induction_scores", "repeated_random_ids", "score_of_heads", "stories"]
