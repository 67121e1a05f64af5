"""How a check works: cases, the right function, a catalogue of slips.

A slip is a usual mistake: the words that name it, and the wrong function itself. A wrong answer is
compared with what each slip gives in all cases. The tests hand in the slips as answers.

Words may end with code, after `CODE`. It is shown from the second wrong answer on.
"""

import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from textwrap import dedent
from types import MappingProxyType
from typing import Any

import torch

from tutorial_engine.learn.exercises.facts import (
    WIDE,
    AsIs,
    alike,
    first_difference,
    in_a_line,
    told,
)
from tutorial_engine.learn.exercises.verdict import (
    CannotBe,
    Verdict,
    guarded,
    has_gap,
    must_answer,
    still_a_gap,
)
from tutorial_engine.learn.parts.holder import listed, number

Function = Callable[..., Any]
Slips = Mapping[str, Function]  # what to say → the function that makes this mistake
Change = tuple[str, str]  # a text of the right source, and what stands there instead
CODE = " ▸ "  # before it: what is wrong; after it: the code that mends it
FIRST = "differs first"
MOST_LINES = 6  # of an input that is shown with an error
ROUGH = 2e-2  # what is right to this, and not to 1e-5, was rounded on its way
SHORT = {torch.bfloat16: (2e-2, 3), torch.float16: (4e-3, 4)}  # dtype → its tolerance and digits


def rewritten(function: Any, *changes: Change) -> Any:
    """A function or class as its source makes it with each first text replaced by its second.

    ValueError for a text that is not there exactly once.
    """
    code = dedent(inspect.getsource(function))
    for old, new in changes:
        if code.count(old) != 1:
            raise ValueError(f"{old!r} is {code.count(old)} times in {function.__qualname__}")
        code = code.replace(old, new)
    file = f"<{function.__qualname__} with {changes[0][1]!r}>"
    made: dict[str, Any] = {}
    exec(compile(code, file, "exec"), vars(sys.modules[function.__module__]), made)
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    return made[function.__name__]


def slips_of(right: Any, text: str, *always: Change) -> dict[str, Function]:
    """A catalogue from the right source: changes, a line each, and below, indented, what to say.

    A change is `what is written → what a learner writes`; `always` are changes of every slip.
    """
    found: dict[str, Function] = {}
    changes: list[Change] = []
    words = ""
    for line in [*dedent(text).strip().splitlines(), ""]:
        if line.startswith(" "):
            words = f"{words} {line.strip()}".strip()
            continue
        if words:
            assert words not in found, f"two slips say the same: {words}"
            found[words] = rewritten(right, *always, *changes)
            words, changes = "", []
        old, _, new = line.partition("→")
        changes.append((old.strip(), new.strip()))
    return found


def judge(
    name: str,
    function: Function,
    right: Function,
    cases: Sequence[tuple[Any, ...]],
    slips: Slips,
    done: str,
    *,
    call: Function = lambda function, *case: function(*case),
    read: Callable[[Any], Any] = lambda answer: answer,
    tolerance: float = 1e-5,
    names: Sequence[str] = (),
    inputs: Callable[..., Mapping[str, object]] | None = None,
    also: Mapping[str, Callable[..., object]] = MappingProxyType({}),
    then: Callable[[Any], str] | None = None,
    keeps: Mapping[int, str] = MappingProxyType({}),
    body: object = None,
) -> Verdict:
    """✔ `done`, if the function's answers are the right ones in all cases; else what differs.

    `call(function, *case)` asks it (it gets copies), `read` turns an answer into what is compared.
    Of the cases that are wrong the shortest is shown: its arguments, under `names` (those of the
    right function, unless given) or as `inputs(*case)` has them; both answers; the first place that
    differs; and what `also` reads from the answer: name → f(answer, *case), None for nothing.
    The slip that gives the same answers in all cases is told if it is the only one.
    `then(function)` says what else is wrong, or "". `keeps`: number of an argument → what to say if
    it was changed. `body` is what a learner fills in, if that is not the function itself.
    """
    body = body or function

    def answer_of(asked: Function, case: tuple[Any, ...]) -> Any:
        given = deepcopy(case)
        answer = call(asked, *given)
        if asked is function:
            must_answer(name, answer, body, lambda: _given(arguments_of(case)))
        for place, why in keeps.items():
            if not alike(given[place], case[place]):
                raise CannotBe(why)
        return read(answer)

    def arguments_of(case: tuple[Any, ...]) -> Mapping[str, object]:
        if inputs:
            return inputs(*case)
        called = names or [*inspect.signature(right).parameters]
        return dict(zip(called, case, strict=False))

    def run() -> Verdict:
        wants = [answer_of(right, case) for case in cases]
        answers, error = _until_one_raises(partial(answer_of, function), cases)
        pairs = enumerate(zip(answers, wants, strict=False))
        wrong = [i for i, pair in pairs if not alike(*pair, tolerance)]
        if wrong and has_gap(body):
            return still_a_gap(name)
        if wrong:
            theirs = {why: partial(answer_of, slip) for why, slip in slips.items()}
            slip = "" if error else slip_in(answers, cases, theirs, tolerance)
            return Verdict(False, what_is_wrong(answers, wants, wrong, slip))
        if error is not None:
            raise _with_input(error, told(arguments_of(cases[len(answers)])))
        if then and (why := then(function)):
            raise CannotBe(why)
        return Verdict(True, done)

    def what_is_wrong(
        answers: Sequence[Any], wants: Sequence[Any], wrong: Sequence[int], slip: str
    ) -> str:
        """By the shortest of the wrong cases."""
        lengths = [len(told(arguments_of(case))) for case in cases]
        at = min(wrong, key=lambda i: (lengths[i], i))
        facts = _differing(answers[at], wants[at], tolerance)
        if "but" not in facts and tolerance < ROUGH and alike(answers, wants, ROUGH):
            facts["but"] = AsIs(f"all {len(cases)} answers are right to about two digits")
        facts |= _read_back(answers[at], cases[at], also)
        return _message(name, dict(arguments_of(cases[at])), facts, slip, len(cases))

    return _at_this_try(name, body, guarded(name, run, body))


def _until_one_raises(
    answer_to: Function, cases: Sequence[Any]
) -> tuple[list[Any], Exception | None]:
    """The answers to the cases before an error, and the error; None if there is none."""
    answers: list[Any] = []
    try:
        for case in cases:
            answers.append(answer_to(case))
    except Exception as error:  # where an answer before it is wrong, that is told
        return answers, error
    return answers, None


def _with_input(error: Exception, shown: str) -> Exception:
    """The error with a note of the input, which `guarded` shows; without a long one."""
    if not isinstance(error, CannotBe) and shown.count("\n") < MOST_LINES:
        error.add_note(f"  for this input:\n{shown}")
    return error


def slip_in(answers: Sequence[Any], cases: Sequence[Any], slips: Slips, tolerance: float) -> str:
    """The words of the one slip that gives these answers; "" if none does, or more than one."""
    found = []
    for words, slip in slips.items():
        with suppress(Exception):
            pairs = zip(answers, cases, strict=True)  # to the first case that tells them apart
            if all(alike(answer, slip(case), tolerance) for answer, case in pairs):
                found.append(words)
    return found[0] if len(found) == 1 else ""


def _given(inputs: Mapping[str, object]) -> str:
    """The input, if a line is enough for it, else ""."""
    written = {title: in_a_line(value) for title, value in inputs.items()}
    line = ", ".join(f"{title} {value}" for title, value in written.items())
    return "" if None in written.values() or len(line) > WIDE else line


def _message(
    name: str, inputs: dict[str, object], facts: dict[str, object], slip: str, count: int
) -> str:
    """What is wrong, in the first line if a line is enough for it; then the input and the facts."""
    slip, mark, code = slip.partition(CODE)
    lines = []
    if slip:  # it says what the other facts would let guess
        lines.append(f"your {name}: {slip}")
        facts = {title: facts[title] for title in ("yours", "expected")}
    written = {title: in_a_line(value) for title, value in (inputs | facts).items()}
    given = ", ".join(f"{title} {written[title]}" for title in inputs)
    short = f"gives {written['yours']} for {given}; expected {written['expected']}"
    is_short = None not in (written[title] for title in (*inputs, "yours", "expected"))
    if is_short and len(short) <= WIDE:
        lines.append(f"{'  it' if slip else name} {short}")
        said = {"yours", "expected"}  # and the place, but for a kind, or digits that are not shown
        if written["yours"] != written["expected"] and str(facts.get(FIRST)).startswith("["):
            said.add(FIRST)
        facts = {title: fact for title, fact in facts.items() if title not in said}
    else:
        head = "  for instance for" if slip else f"{name} gives another answer for"
        lines += [f"{head} this input:", told(inputs)]
    lines.append(told(facts))
    if slip:
        lines.append(
            f"  (a function with only this mistake gives the same {count} answers as yours)"
        )
    return "\n".join(filter(None, lines)) + mark + code


def _differing(got: Any, want: Any, tolerance: float) -> dict[str, object]:
    """Both answers, and where they differ first."""
    facts: dict[str, object] = {"yours": got, "expected": want}
    if first := first_difference(got, want, tolerance):
        facts[FIRST] = AsIs(first)
    if short := _too_short(got, want):
        facts["but"] = AsIs(short)
    return facts


def _read_back(got: Any, case: Any, also: Mapping[str, Function]) -> dict[str, object]:
    """What can be read from an answer: words → a value."""
    facts: dict[str, object] = {}
    for words, read_back in also.items():
        with suppress(Exception):  # there may be nothing to be read from a wrong answer
            if (found := read_back(got, *deepcopy(case))) is not None:
                facts[words] = AsIs(found) if isinstance(found, str) else found
    return facts


def read_number(why: str, kind: Callable[[Any], Any] = number) -> Callable[[Any], Any]:
    """Reads an answer that must be one number, of numpy or torch as well; or another kind of it."""

    def read(answer: Any) -> Any:
        if (found := kind(answer)) is None:
            raise CannotBe(f"got {answer!r:.40}; {why}")
        return found

    return read


def read_numbers(count: int, why: str = "") -> Callable[[Any], Any]:
    """Reads an answer that must be so many numbers, in whatever they stand.

    Without `why` any other answer is given back as it is.
    """

    def read(answer: Any) -> Any:
        found = [n for item in listed(answer) or () if (n := number(item)) is not None]
        if len(found) == count:
            return found
        if why:
            raise CannotBe(f"{why}, got {answer!r}")
        return answer

    return read


@cache
def wrong_answers(name: str) -> list[Any]:
    """The code of the wrong answers to an exercise so far, each once."""
    return []


def _at_this_try(name: str, function: Any, verdict: Verdict) -> Verdict:
    """The verdict, without the code that mends it as long as only one answer was wrong."""
    if verdict.ok is not False:
        return verdict
    answer, known = getattr(function, "__code__", function), wrong_answers(name)
    if answer not in known:
        known.append(answer)
    what, _, code = verdict.message.partition(CODE)
    if not code or len(known) == 1:
        return Verdict(False, what)
    between = "\n  code: " if "\n" in what else ": "
    return Verdict(False, f"{what}{between}{code}")


def _too_short(got: Any, want: Any) -> str:
    """What to say of tensors that are right, but in a dtype of 16 bits; "" of all others."""
    dtypes = [getattr(x, "dtype", None) for x in (got if isinstance(got, list | tuple) else [got])]
    short = next((dtype for dtype in dtypes if dtype in SHORT), None)
    if short is None or not alike(got, want, SHORT[short][0]):
        return ""
    return f"right, but in {short}, which keeps {SHORT[short][1]} digits; compute in float32"
