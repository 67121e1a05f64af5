"""Introduced in notebook 01. What a check answers: done, not done, or what is wrong.

A check never raises for a learner's mistake, so that Run All always reaches the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """ok is True (✔), False (✘) or None (☐, an exercise that nobody has touched yet)."""

    ok: bool | None
    message: str

    def __repr__(self) -> str:
        return {True: "✔", False: "✘", None: "☐"}[self.ok] + " " + self.message


Cases = Callable[[], Verdict]


def guarded(name: str, run: Cases) -> Verdict:
    """Run a check on the learner's code; an exception in it becomes a verdict that names it."""
    try:
        return run()
    except Exception as error:  # the learner's code may raise anything at all
        return Verdict(False, f"{name} raised {type(error).__name__}: {error}")


def not_done(name: str, value: object) -> Verdict | None:
    """The open-exercise verdict while the learner's function still returns None."""
    if value is None or value is Ellipsis:
        return Verdict(None, f"not done yet: {name} returns None")
    return None


def wrong_shape(name: str, value: object, expected: Tensor) -> Verdict | None:
    """A verdict when the value is no tensor of the expected shape."""
    if not isinstance(value, Tensor):
        return Verdict(False, f"{name} must return a tensor, got {type(value).__name__}")
    if value.shape != expected.shape:
        return Verdict(
            False, f"{name} returned shape {list(value.shape)}, expected {list(expected.shape)}"
        )
    return None


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether no element differs by more than the tolerance (NaN never is close)."""
    return bool(((a.double() - b.double()).abs() <= tolerance).all())


def check_close(a: Tensor, b: Tensor, tolerance: float, what: str) -> Verdict:
    """✔ when a and b [same shape] agree to the tolerance; else where they differ most."""
    bad = wrong_shape(what, a, b)
    if bad is not None:
        return bad
    if close(a, b, tolerance):
        return Verdict(True, f"{what}: max |Δ| ≤ {tolerance:g} over {a.numel():,} numbers")
    difference = (a.double() - b.double()).abs()
    difference = difference.masked_fill(difference.isnan(), float("inf"))
    place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    return Verdict(
        False, f"{what}: differs most at {place}, by {float(difference.max()):.3g} > {tolerance:g}"
    )
