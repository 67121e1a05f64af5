"""Introduced in notebook 01. A learner's answer, put to use where the engine needs a number.

For the exercises that are no part of the model: what they answer is used if it is right.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from tutorial_engine.learn.verdict import is_open


def yours(function: Callable[..., Any], package: Any, *args: Any) -> Any:
    """What the learner's function answers, if `package` (the right answer) is the same; else that.

    Prints it, and whose it is. Numbers may differ by rounding; lists must not.
    """
    name = function.__name__
    if is_open(function):
        print(f"the package's {name}: {_shown(package)}")
        return package
    try:
        answer = _plain(function(*args))
        right = _same(answer, package)
    except Exception as error:  # the learner's code may raise anything at all
        answer, right = f"{type(error).__name__}: {error}", False
    if right:
        if isinstance(package, list):
            answer = package  # the same numbers, and whole ones where 3.0 was answered
        print(f"✔ your {name}: {_shown(answer)}")
        return answer
    print(f"✘ your {name} gives {answer}; the package's: {_shown(package)}")
    return package


def _shown(answer: Any) -> str:
    return f"{answer:.2g}" if isinstance(answer, float) else str(answer)


def _plain(answer: Any) -> Any:
    """Without tensors and arrays: numbers and lists."""
    if isinstance(answer, Tensor) or hasattr(answer, "tolist"):
        return answer.tolist()
    many = isinstance(answer, list | tuple | range | Iterator)
    return [_plain(one) for one in answer] if many else answer


def _same(answer: Any, package: Any) -> bool:
    if isinstance(package, list):
        return bool(answer == package)
    return math.isclose(answer, package, rel_tol=1e-5)
