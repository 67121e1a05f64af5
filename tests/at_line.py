"""Ctrl-C before a line of the package, and which lines there are.

Knows rooms and files; knows no function of the engine by name.
"""

import linecache
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tutorial_engine

PACKAGE = Path(tutorial_engine.__file__).parent
# Where state is kept. The forward, and what it calls in the storage, change nothing that counts.
WATCHED = tuple(str(PACKAGE / room) for room in ("engine", "cache", "sampling", "trace"))
UNWATCHED = str(PACKAGE / "cache" / "storage.py")


class Line(NamedTuple):
    """A line of the package, and the function that it belongs to."""

    file: str
    number: int
    function: str


class Moment(NamedTuple):
    """Before a line runs for this time, counted from 1."""

    line: Line
    time: int


@cache
def line_of(file: str, number: int, function: str) -> Line | None:
    """None for a line before which CPython handles no signal.

    It handles them where a function begins, a call ends and a loop goes round: not before a line
    that neither calls nor loops, nor between a `try` block and its `finally`.
    """
    here, before = (linecache.getline(file, n).strip() for n in (number, number - 1))
    may = "(" in here or " for " in here or here.startswith(("for ", "while ", "with ", "class "))
    if not may or before == "finally:":
        return None
    return Line(Path(file).name, number, function)


class AtLine:
    """Counts how often each line of the package runs; at its moment SIGINT comes, if it has one."""

    def __init__(self, moment: Moment | None = None) -> None:
        self.moment, self.times, self.came = moment, Counter[Line](), False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if self.came or not code.co_filename.startswith(WATCHED) or code.co_filename == UNWATCHED:
            return None
        if event == "line":
            line = line_of(code.co_filename, frame.f_lineno, code.co_name)
            if line is not None:
                self.times[line] += 1
                if self.moment == (line, self.times[line]):
                    self.came = True
                    signal.raise_signal(signal.SIGINT)
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, lines are counted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)

    def moments(self) -> list[Moment]:
        """The first and the last time that each line ran."""
        return sorted({Moment(line, t) for line, n in self.times.items() for t in (1, n)})
