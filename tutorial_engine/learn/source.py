"""Shows the installed code itself: a lesson cannot drift from it."""

import inspect
from collections.abc import Callable
from typing import Any


def show_source(thing: Callable[..., Any]) -> None:
    """Print the source of a function or class, without its docstring."""
    lines = inspect.getsource(thing).rstrip().splitlines()
    if thing.__doc__:
        quotes = [i for i, line in enumerate(lines) if '"""' in line]
        begin = quotes[0]
        end = begin if lines[begin].count('"""') == 2 else quotes[1]
        del lines[begin : end + 1]
    print("\n".join(lines))


def num_lines(thing: Callable[..., Any]) -> int:
    """How many lines the file has in which a function or class stands."""
    return len(inspect.findsource(thing)[0])
