"""Shows the installed code itself: a lesson cannot drift from it."""

import inspect
from collections.abc import Callable
from typing import Any


def show_source(
    thing: Callable[..., Any], docstring: bool = False, first: str = "", last: str = ""
) -> None:
    """Print the source of a function or class, without its docstring unless asked for.

    Of a long one a part: from the line that begins with `first` to the next that begins with `last`
    (blanks before them do not count; "" is the first or last of all). ValueError where none does.
    """
    lines = inspect.getsource(thing).rstrip().splitlines()
    if not docstring and thing.__doc__:
        quotes = [i for i, line in enumerate(lines) if '"""' in line]
        begin = quotes[0]
        end = begin if lines[begin].count('"""') == 2 else quotes[1]
        del lines[begin : end + 1]
    begin = _find(lines, first, 0)
    end = _find(lines, last, begin) if last else len(lines) - 1
    print("\n".join(lines[begin : end + 1]))


def _find(lines: list[str], words: str, start: int) -> int:
    found = [i for i, line in enumerate(lines) if i >= start and line.lstrip().startswith(words)]
    if not found:
        raise ValueError(f"no line begins with {words!r} in\n" + "\n".join(lines[start:]))
    return found[0]
