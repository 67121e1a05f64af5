"""What a check answers: done, not done, or what is wrong.

A check never raises for a learner's mistake, so that Run All always reaches the end.
"""

import ast
import builtins
import dis
import inspect
import math
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.learn.exercises.facts import first_difference, where_raised


@dataclass(frozen=True)
class Verdict:
    """ok is True (✔), False (✘) or None (☐, an exercise that nobody has touched yet)."""

    ok: bool | None
    message: str

    def __repr__(self) -> str:
        return {True: "✔", False: "✘", None: "☐"}[self.ok] + " " + self.message


class CannotBe(Exception):
    """An answer that cannot be right; the message says why."""


class Told(Exception):
    """Ends a check with this verdict."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def is_open(function: object) -> bool:
    """Is this an exercise that nobody has touched: a body that is only `...` or a docstring?

    `return None` is an answer, where the source can be read.
    """
    if not _says_nothing(function):
        return False
    return not any(isinstance(node, ast.Return) for node in _nodes(function))


def _says_nothing(function: object) -> bool:
    """Does it give None whatever it is asked?"""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP")]
    return all("RETURN" in s.opname or s.opname == "LOAD_CONST" for s in steps) and all(
        step.argval is None or step.argval is ... for step in steps
    )


def _nodes(function: object) -> list[ast.AST]:
    """The nodes of its source; none where that cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
        return list(ast.walk(ast.parse(source)))
    except (OSError, TypeError, SyntaxError):
        return []


def has_gap(function: object) -> bool:
    """Is there still a `...` among its lines? False where its source cannot be read."""
    return any(
        isinstance(node, ast.Expr | ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is ...
        for node in _nodes(function)
    )


def still_a_gap(name: str, why: str = "") -> Verdict:
    """A verdict on what is wrong because a part of it was not written yet."""
    return Verdict(None, f"not done yet: there is still a `...` in {name}{why}")


def open_verdict(name: str, function: object) -> Verdict | None:
    """A verdict on an exercise that nobody has touched; None for any other function."""
    if not is_open(function):
        return None
    passes = any(isinstance(node, ast.Pass) for node in _nodes(function))
    what = "empty" if passes else "`...`"
    return Verdict(None, f"not done yet: the body of {name} is still {what}")


def guarded(
    name: str,
    run: Callable[[], Verdict],
    function: object = None,
) -> Verdict:
    """Run a check on the learner's function; an exception in it becomes a verdict that names it.

    A function that nobody has touched is not run. To an error are added the learner's own line and
    what its names held.
    """
    untouched = open_verdict(name, function)
    if untouched is not None:
        return untouched
    if _says_nothing(function):
        return Verdict(False, f"{name} returns None whatever it is asked")
    try:
        return run()
    except Told as end:
        return end.verdict
    except CannotBe as error:
        return Verdict(False, f"{name}: {error}")
    except Exception as error:  # the learner's code may raise anything at all
        message = f"{name} raised {type(error).__name__}: {error}"
        open_ones = _open_ones_called_by(function)
        if open_ones:
            message += f"; {calls_open(open_ones)}"
        elif has_gap(function):
            return still_a_gap(name, f" (it raised {type(error).__name__}: {error})")
        elif why := _meant(error):
            message = f"{message.rstrip('.')}. {why}"
        lines = [message, where_raised(error, function), *getattr(error, "__notes__", ())]
        return Verdict(False, "\n".join(filter(None, lines)))


def _meant(error: Exception) -> str:
    """The attribute that a mistyped one is near to: Python says it only of an error not caught."""
    if not isinstance(error, AttributeError | NameError) or not error.name:
        return ""
    known = dir(error.obj) if isinstance(error, AttributeError) else _names_around(error)
    near = get_close_matches(error.name, known, 1, cutoff=0.75)
    return f"Did you mean {near[0]!r}?" if near else ""


def _names_around(error: Exception) -> list[str]:
    """The names that were known where an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [*frames[-1].f_locals, *frames[-1].f_globals, *dir(builtins)] if frames else []


def names_in(function: object) -> list[str]:
    """The globals that a function reads, and that functions and comprehensions inside it read."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return []
    steps = dis.get_instructions(code)
    found = [step.argval for step in steps if step.opname == "LOAD_GLOBAL"]
    return found + [name for inner in code.co_consts for name in names_in(inner)]


def calls_open(names: Sequence[str]) -> str:
    """That a function calls exercises that are not done, and how to go on all the same."""
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    listed = " and ".join(names)
    return f"it calls {listed}, which {verb} not done yet; notebooks/solutions has {them}"


def _open_ones_called_by(function: object) -> list[str]:
    known: dict[str, Any] = getattr(function, "__globals__", {})
    return [name for name in names_in(function) if is_open(known.get(name))]


def must_answer(name: str, value: object, function: object, given: Callable[[], str] = str) -> None:
    """Ends the check of a function that returned nothing: not done, or forgotten.

    `given()` is the input in words, asked for only then; "" where it takes more than a line.
    """
    if value is None or value is Ellipsis:
        why = "does every way through it end with a `return`?"
        asked = f" for {what}" if (what := given()) else ""
        forgotten = Verdict(False, f"{name} returns None{asked}: {why}")
        raise Told(still_a_gap(name) if has_gap(function) else forgotten)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether no element differs by more than the tolerance (NaN never is close)."""
    return bool(((a.double() - b.double()).abs() <= tolerance).all())


def distance(a: Tensor, b: Tensor) -> str:
    """max |Δ| of two tensors of one shape: "= 0", or the power of ten that it stays below.

    More digits would differ from one processor to the next.
    """
    largest = float((a.double() - b.double()).abs().max())
    if largest == 0 or not math.isfinite(largest):
        return f"= {largest:g}"
    return f"< 1e{math.floor(math.log10(largest)) + 1:+03d}"


def check_close(a: Tensor, b: Tensor, tolerance: float, what: str) -> Verdict:
    """✔ and how close, when a and b [same shape] agree; else where they differ most."""
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return Verdict(False, f"{what}: {first_difference(a, b)}")
    if close(a, b, tolerance):
        how = f"{distance(a, b)} over {a.numel():,} numbers, tolerance {tolerance:g}"
        return Verdict(True, f"{what}: max |Δ| {how}")
    difference = (a.double() - b.double()).abs()
    difference = difference.masked_fill(difference.isnan(), float("inf"))
    place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    return Verdict(
        False, f"{what}: differs most at {place}, by {float(difference.max()):.3g} > {tolerance:g}"
    )
