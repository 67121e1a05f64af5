"""A learner's answer is used where a number is needed; the package's if it is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tutorial_engine.learn import yours


def untouched(x: float) -> Any:
    """An open exercise."""
    ...


def fails(x: float) -> Any:
    raise KeyError("moth")


@pytest.mark.parametrize(
    ("function", "package", "used", "said"),
    [
        (lambda x: [0, 1, 16], [0, 1, 16], [0, 1, 16], "✔ your <lambda>: "),
        (lambda x: torch.tensor([0, 1, 16]), [0, 1, 16], [0, 1, 16], "✔ your <lambda>: "),
        (lambda x: tuple(torch.tensor(i) for i in (0, 1)), [0, 1], [0, 1], "✔ your <lambda>: "),
        (lambda x: range(2), [0, 1], [0, 1], "✔ your <lambda>: "),
        (lambda x: (float(i) for i in range(2)), [0, 1], [0, 1], "✔ your <lambda>: [0, 1]"),
        (lambda x: np.int64(x), 3, 3, "✔ your <lambda>: "),
        (lambda x: x * (1 + 1e-7), 3, 3 * (1 + 1e-7), "✔ your <lambda>: "),
        (lambda x: [0, 1], [0, 1, 16], [0, 1, 16], "✘ your <lambda> gives "),
        (lambda x: 4, 3, 3, "✘ your <lambda> gives "),
        (lambda x: "3", 3, 3, "✘ your <lambda> gives "),
        (lambda x: None, 3, 3, "the package's <lambda>: 3"),
        (untouched, [5], [5], "the package's untouched: [5]"),
        (fails, [5], [5], "✘ your fails gives KeyError: 'moth'; the package's: [5]"),
    ],
)
def test_right_answer_is_used_and_any_other_is_told_and_replaced(
    function: Callable[..., Any],
    package: Any,
    used: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert yours(function, package, 3) == used
    assert said in capsys.readouterr().out
