"""Introduced in notebook 01. What makes a notebook a lesson: predictions, checks, exercises.

`checks_NN` and `bugs_NN` belong to notebook NN. It may know everything below it; the engine never
imports it.
"""

from tutorial_engine.learn.own_engine import OwnEngine
from tutorial_engine.learn.own_server import OwnServer
from tutorial_engine.learn.predict import Predictions
from tutorial_engine.learn.source import show_source
from tutorial_engine.learn.verdict import check_close
from tutorial_engine.learn.yours import yours

__all__ = ["OwnEngine", "OwnServer", "Predictions", "check_close", "show_source", "yours"]
