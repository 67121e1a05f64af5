"""Ctrl-C before each line of the package that a short story of the engine runs.

What holds afterwards: requests, queues and memory agree; a request is in the engine or it is not,
never half; all who are in end as if alone; each token is delivered once, unless the signal fell
between the end of a step and its caller, when the results are on their way to whoever is being
interrupted. Knows rooms, files and the trace's events; knows no function of the engine by name.
"""

import linecache
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from test_engine_faults import LIMIT, Book, as_alone, guests, party_for, still_good
from workloads import Party, pool

import tutorial_engine
from tutorial_engine.trace.events import StepEnded

PACKAGE = Path(tutorial_engine.__file__).parent
# Where state is kept. test_ctrl_c_in_a_step has the forward, and what it calls in the storage.
WATCHED = tuple(str(PACKAGE / room) for room in ("engine", "cache", "sampling", "trace"))
UNWATCHED = str(PACKAGE / "cache" / "storage.py")


class Line(NamedTuple):
    """A line of the package, and the function that it belongs to."""

    file: str
    number: int
    function: str


@cache
def line_of(file: str, number: int, function: str) -> Line | None:
    """None for a line before which CPython handles no signal.

    It handles them where a function begins, a call ends and a loop goes round. What stands before
    `try:` is an assignment; a call that ends a `try` block ends within it, not in the `finally`.
    """
    here, before = (linecache.getline(file, n).strip() for n in (number, number - 1))
    if here == "try:" or before == "finally:":
        return None
    return Line(Path(file).name, number, function)


class AtLine:
    """Notes the lines of the package that run; before line `number` of them comes a SIGINT."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.lines = number, list[Line]()

    @property
    def where(self) -> Line:
        return self.lines[-1]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(WATCHED) or code.co_filename == UNWATCHED:
            return None
        if self.number is not None and len(self.lines) > self.number:
            return None  # it came
        if event == "line":
            line = line_of(code.co_filename, frame.f_lineno, code.co_name)
            if line is not None:
                self.lines.append(line)
                if len(self.lines) - 1 == self.number:
                    signal.raise_signal(signal.SIGINT)
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


class Story(NamedTuple):
    """What became of it: `came` when the signal did, `step_ended` if no step was under way then."""

    party: Party
    indices: list[int]
    book: Book
    came: bool
    step_ended: bool


def short_story(at: AtLine) -> Story:
    """Four come, one is aborted, a stream is left, a generate runs; memory is tight. One SIGINT."""
    indices = guests(4)
    party = party_for(indices, capacity=LIMIT, budget=9)
    engine, book = party.engine, Book(party.engine)
    came = step_ended = False

    def enter(k: int) -> None:
        asked = pool()[indices[k]]
        engine.add_request(asked.prompt, asked.params, f"g{k}", on_token=lambda result: None)

    def leave() -> None:
        if "g1" in engine.requests:
            engine.abort("g1")

    def look_in() -> None:
        with closing(engine.stream([pool()[i].prompt for i in indices[:2]])) as stream:
            next(stream)

    def ask() -> None:
        outputs = engine.generate([pool()[i].prompt for i in indices[:2]], pool()[0].params)
        assert len(outputs) == 2

    enters = [partial(enter, k) for k in range(4)]
    for do in (*enters[:3], book.step, book.step, leave, look_in, enters[3], book.step, ask):
        try:
            with at.watching():
                do()
        except KeyboardInterrupt:
            assert not came
            came = True
            step_ended = any(isinstance(event, StepEnded) for event in party.recorder.events[-1:])
    return Story(party, indices, book, came, step_ended)


def all_lines() -> list[Line]:
    """Every line that the story runs, in that order; the story is one worth interrupting."""
    counter = AtLine()
    story = short_story(counter)
    kinds = {type(event).__name__ for event in story.party.recorder.events}
    assert {"Added", "Admitted", "Preempted", "Finished"} <= kinds, kinds
    assert not story.came and len(counter.lines) > 1000
    return counter.lines


def moments(lines: Sequence[Line], one_in: int = 1, seed: int = 0) -> list[int]:
    """The first and the last time that each line runs; or one in so many of these, by a seed."""
    first = {line: number for number, line in reversed(list(enumerate(lines)))}
    last = {line: number for number, line in enumerate(lines)}
    every = sorted({*first.values(), *last.values()})
    return sorted(random.Random(seed).sample(every, len(every) // one_in))


def interrupt(lines: Sequence[Line], number: int) -> bool:
    """SIGINT before line `number` of the story; were tokens lost on their way to its caller?"""
    at = AtLine(number)
    story = short_story(at)
    assert story.came and at.where == lines[number]
    book, lost = story.book, False
    try:
        outputs = book.finish()
        for name, output in outputs.items():
            if output.outputs[0].finish_reason != "abort":
                as_alone(name, output, story.indices[int(name[1:])])
            lost = lost or book.tokens(name) != output.outputs[0].tokens
        missing = {"g0", "g1", "g2", "g3"} - outputs.keys()
        assert len(missing) <= 1, missing  # an add that was interrupted before it began
        assert story.step_ended or not lost, "a token was lost in the middle of a step"
        still_good(story.party)
    except Exception as error:
        raise AssertionError(f"SIGINT before {at.where}") from error
    return lost


def run(one_in: int, seed: int = 0, tell: Callable[[str], object] = print) -> Counter[str]:
    """Interrupt the story at one moment in so many → how many there were, how many lost a token."""
    lines = all_lines()
    lost = set()
    chosen = moments(lines, one_in, seed)
    for done, number in enumerate(chosen, 1):
        if interrupt(lines, number):
            lost.add(lines[number])
        if done % 100 == 0:
            tell(f"interrupts: {done:,} of {len(chosen):,}")
    assert len(lost) <= 6, lost  # the last lines of a step, and of what hands out its results
    return Counter(interrupts=len(chosen), lost=len(lost))
