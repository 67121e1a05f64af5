"""The bug zoo: real bugs of one idea, to plant and to take out again.

Each one runs without an error, fits every shape, and changes the result. It is the installed code
with a line or two changed, so it cannot drift from it.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from textwrap import dedent, indent
from typing import Any

from torch import Tensor

from tutorial_engine.learn.exercises.judge import rewritten
from tutorial_engine.learn.exercises.verdict import distance

# where the right code stands, its name there, the wrong code
Bug = tuple[object, str, Callable | property | classmethod]
Zoo = Mapping[str, Bug]


def edited(owner: object, attribute: str, *changes: tuple[str, str]) -> Bug:
    """A bug made from the installed source: in it, each first text is replaced by its second.

    ValueError for a text that is not there exactly once.
    """
    return owner, attribute, rewritten(_plain(getattr_static(owner, attribute)), *changes)


def _plain(thing: Any) -> Callable[..., Any]:
    return getattr(thing, "__func__", getattr(thing, "fget", thing))


def diff(bug: Bug) -> str:
    """The lines in which the wrong code differs from the installed one: - right, + wrong."""
    owner, attribute, wrong = bug
    sources = (getattr_static(owner, attribute), wrong)
    right_lines, wrong_lines = (dedent(inspect.getsource(_plain(s))).splitlines() for s in sources)
    lines = list(difflib.unified_diff(right_lines, wrong_lines, lineterm="", n=0))[2:]
    changed = [line for line in lines if not line.startswith("@@")]
    bare = dedent("\n".join(line[1:] for line in changed)).splitlines()
    return "\n".join(f"{line[0]} {text}" for line, text in zip(changed, bare, strict=True))


@contextmanager
def planted(name: str, zoo: Zoo) -> Iterator[None]:
    """Inside the block the engine has the bug. ValueError for one that is not in the zoo."""
    if name not in zoo:
        raise ValueError(f"no bug {name!r}; there are {sorted(zoo)}")
    owner, attribute, wrong = zoo[name]
    right = getattr_static(owner, attribute)  # the thing itself: a classmethod stays one
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)


def zoo(
    bugs: Zoo,
    run: Callable[[], Tensor],
    tolerance: float = 1e-4,
) -> int:
    """Run without a bug and with each; print the changed lines and how far the result is off.

    `run` returns logits [rows, V]. They are compared with those without a bug. Returns how many
    bugs the tolerance catches.
    """
    right, caught = run(), 0
    for name, bug in bugs.items():
        with planted(name, bugs):
            off = (run().double() - right.double()).abs().flatten(1).amax(-1)  # of each row
        print(f"{name}\n{indent(diff(bug), '    ')}")
        if bool((off <= tolerance).all()):
            print(f"  not caught: max |Δ| {distance(off, 0 * off)}")
            continue
        caught += 1
        first = int((~(off <= tolerance)).nonzero()[0])
        where = f"{int((~(off <= tolerance)).sum())} of {len(off)} rows, first in row {first}"
        print(f"  ✔ caught: max |Δ| = {float(off.max()):.2g} > {tolerance:g}; wrong in {where}")
    return caught
