"""Introduced in notebook 01. Shows the installed code itself: a lesson cannot drift from it."""

import inspect
from collections.abc import Callable
from typing import Any


def show_source(thing: Callable[..., Any], docstring: bool = False) -> None:
    """Print the source of a function or class, without its docstring unless asked for."""
    lines = inspect.getsource(thing).rstrip().splitlines()
    if not docstring and thing.__doc__:
        quotes = [i for i, line in enumerate(lines) if '"""' in line]
        first = quotes[0]
        last = first if lines[first].count('"""') == 2 else quotes[1]
        del lines[first : last + 1]
    print("\n".join(lines))
