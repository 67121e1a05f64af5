"""How an exercise is tested: its check, right answers, the catalogue, and other wrong answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.parts.memory import PARTS_04, PARTS_05
from tutorial_engine.learn.parts.model import PARTS
from tutorial_engine.learn.parts.scheduler import PARTS_03

INF = math.inf
Function = Callable[..., Any]
RIGHT: dict[str, Function] = {**PARTS, **PARTS_03, **PARTS_04, **PARTS_05}


class Exercise(NamedTuple):
    """Its check, answers that are right, the catalogue, and other wrong answers with the words."""

    check: Callable[[Any], Verdict]
    right: Sequence[Any]
    slips: Mapping[str, Function] = {}
    wrong: Sequence[tuple[Any, str]] = ()


def but(name: str, change: Function) -> Function:
    """The right answer, changed."""
    return lambda *args: change(RIGHT[name](*args))
