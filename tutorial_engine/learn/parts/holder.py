"""Which function runs for each part: the learner's, or the package's.

`OwnEngine` (notebooks 01 and 02) and `OwnServer` (03 to 05) hold parts. What a called part answers
is what the engine does; a `shadow` runs beside the package's, with which the engine goes on. One
that raises, or with which the answers are others, is told and taken out.
"""

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tutorial_engine.learn.exercises.facts import (
    WIDE,
    AsIs,
    alike,
    first_difference,
    number_text,
    plain,
    told,
)
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, is_open, names_in

Result = TypeVar("Result")


class PartFailed(Exception):
    """A part of the learner's raised an error, or gave an answer that cannot be right."""

    def __init__(self, name: str, error: Exception, where: str) -> None:
        message = f"raised {type(error).__name__} in the {where}: {error}"
        super().__init__(f"your {name} {error if isinstance(error, CannotBe) else message}")
        self.name = name


class ModelFailed(Exception):
    """The model raised between the parts: what one of them answered did not fit."""


@contextmanager
def between_parts() -> Iterator[None]:
    """Inside the block an error is no error of the part that called the model."""
    try:
        yield
    except (PartFailed, ModelFailed):
        raise
    except Exception as error:
        raise ModelFailed(f"{type(error).__name__}: {error}") from error


class Parts:
    """Which function runs for each part, and how often: `parts("rope", x, angles)` calls one.

    `own` are the learner's; a name that is not in it stands for the `package`'s. One of the
    learner's may work in place (it is given copies of tensors) and in any float dtype (its answer
    is cast). `where` is said with an error: the model, or the engine.
    """

    def __init__(self, package: Mapping[str, Callable[..., Any]], where: str = "model") -> None:
        self.package, self.where = package, where
        self.own: dict[str, Callable[..., Any]] = {}
        self.calls: Counter[str] = Counter()
        self.failure: PartFailed | None = None  # the last one, for whoever swallowed it

    def __call__(self, name: str, *args: Any) -> Any:
        """Call a part. PartFailed when it is the learner's and raises."""
        self.calls[name] += 1
        if name not in self.own:
            return self.package[name](*args)
        with self.blamed(name):
            copies = [x.clone() if isinstance(x, Tensor) else x for x in args]
            given = (x.dtype for x in copies if isinstance(x, Tensor))
            return cast_to(self.own[name](*copies), next(given, torch.float32))

    def shadow(
        self,
        name: str,
        *args: Any,
        changes: Sequence[int] = (),
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """What the package's part answers; the learner's runs beside it, on copies.

        `changes`: numbers of the arguments that a part changes in place, which are compared as
        well; the package's changes `args` themselves. `read` turns an answer into what is compared.
        PartFailed when the learner's raises or differs, with the input, its side and the right one.
        """
        right = self.package[name]
        if self.is_package(name):
            return right(*args)
        self.calls[name] += 1
        before, copies = deepcopy(args), deepcopy(args)
        want = right(*args)
        with self.blamed(name):
            sides = {"": (read(self.own[name](*copies)), read(want))}
            names = [*inspect.signature(right).parameters]
            sides |= {f" {names[i]}": (copies[i], args[i]) for i in changes}
            differ = {of: pair for of, pair in sides.items() if not same(*pair)}
            if differ:
                facts = dict(zip(names, before, strict=True))
                facts = {name: value for name, value in facts.items() if not callable(value)}
                for of, pair in differ.items():
                    facts |= _both(of, *map(plain, pair))
                raise CannotBe(f"gives another answer for this input:\n{told(facts)}")
        return want

    def is_package(self, name: str) -> bool:
        """Does the package's part run? It does so past `__call__`, and is counted here."""
        self.calls[name] += name not in self.own
        return name not in self.own

    @contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Inside the block an error is this part's: PartFailed, if it is the learner's."""
        try:
            yield
        except (PartFailed, ModelFailed):
            raise  # of what this part called
        except Exception as error:  # the learner's code may raise anything at all
            if name not in self.own:
                raise
            self.failure = PartFailed(name, error, self.where)
            raise self.failure from error


def cast_to(answer: Any, dtype: torch.dtype) -> Any:
    """Tensors of another float dtype in the one of the weights; anything else as it is."""
    if isinstance(answer, Tensor):
        return answer.to(dtype) if answer.is_floating_point() else answer
    if isinstance(answer, tuple | list):
        return [cast_to(item, dtype) for item in answer]
    return answer


def whole(value: object) -> int | None:
    """The whole number that a value is: an int, or numpy's or torch's. None for all others."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def whole_tokens(value: object) -> int | None:
    """As `whole`, and a float that is a whole number, as `//` and `min` of floats give."""
    return int(value) if isinstance(value, float) and value.is_integer() else whole(value)


def number(value: object) -> float | None:
    """The number that a value is, numpy's and torch's scalars too. None for all others."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def listed(value: object) -> list[Any] | None:
    """The list that a value is: tuples, ranges, arrays and tensors are lists too. None if none."""
    if isinstance(value, list | tuple | range):
        return list(value)
    items = value.tolist() if hasattr(value, "tolist") else None
    return items if isinstance(items, list) else None


def same(got: Any, want: Any) -> bool:
    """Is an answer the wanted one, whatever holds its numbers? Floats may differ by 1e-6."""
    return alike(plain(got), plain(want), 1e-6, of_one_kind=True)


def _both(of: str, got: Any, want: Any) -> dict[str, object]:
    """The two sides of an answer, or of an argument; of dicts only what differs."""
    if isinstance(got, dict) and isinstance(want, dict):
        differ = [key for key in want | got if not same(got.get(key, ...), want.get(key, ...))]
        got, want = ({key: side[key] for key in differ if key in side} for side in (got, want))
    facts = {f"your{of}" if of else "yours": got, f"expected{of}": want}
    if len(repr(want)) > WIDE and (first := first_difference(got, want, 1e-6)):
        facts[f"differs first{of and ' in'}{of}"] = AsIs(first)
    return facts


def whole_numbers(value: object) -> list[int] | None:
    """The list of whole numbers that a value is. None for all others."""
    items = listed(value)
    numbers = [n for item in items or () if (n := whole(item)) is not None]
    return None if items is None or len(numbers) < len(items) else numbers


class Plugged(NamedTuple):
    """What became of a part that was handed in; shown below the exercise."""

    verdict: Verdict
    name: str
    where: str = "model"

    def __repr__(self) -> str:
        whose = "Your" if self.verdict.ok else "The package's"
        return f"{self.verdict!r}\n{whose} {self.name} runs in the {self.where} now."


class PartsHolder:
    """What runs with a learner's parts: `use` puts one in, `settle` takes out what is wrong."""

    def __init__(self, package: Mapping[str, Callable[..., Any]], where: str = "model") -> None:
        self.parts = Parts(package, where)
        self.checks: dict[str, Callable[..., Verdict]] = {}  # of the parts that were handed in

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that are named when the package's run for them."""
        return tuple(self.parts.package)

    def use(self, function: Callable[..., Any], check: Callable[..., Verdict]) -> Plugged:
        """Check the learner's function; if it is right, it is the part of its name from now on.

        ValueError for a name that is no part.
        """
        name = function.__name__
        if name not in self.parts.package:
            asked = getattr(check, "__name__", "").removeprefix("check_")
            how = f"the parts are {', '.join(self.names)}"
            if asked in self.parts.package:
                how = f"name it `{asked}`"
            raise ValueError(f"{name!r} is no part of the engine: {how}")
        verdict = check(function)
        self.checks[name] = check
        self.parts.own.pop(name, None)
        if verdict.ok:
            self.parts.own[name] = function
        return Plugged(verdict, name, self.parts.where)

    def settle(self, run: Callable[[], Result], wrong: Callable[[Result], str]) -> Result:
        """What `run` gives once no part is wrong; those that were are told and taken out.

        `wrong` says what is wrong with a result, "" if nothing is. An error that the package's
        parts raise as well is nobody's fault here: it is raised.
        """
        while True:
            self.parts.calls.clear()
            try:
                result = run()
            except PartFailed as failed:
                print(f"✘ {failed}")
                self._take_out(failed.name)
                continue
            except Exception as error:  # what a part answered did not fit
                if not self._is_right(run, wrong, {}):
                    raise
                guilty = self._guilty(run, wrong)
                kind = "" if isinstance(error, ModelFailed) else f"{type(error).__name__}: "
                message = f"the {self.parts.where} raised {kind}{error}"
            else:
                message = wrong(result)
                if not message or not self.parts.own:
                    return result
                guilty = self._guilty(run, wrong)
            print(f"✘ With your {' and '.join(guilty)} {message}")
            self._take_out(*guilty)

    def _take_out(self, *names: str) -> None:
        for name in names:
            function = self.parts.own.pop(name)
            if name in self.checks:  # right then, but not now: what it calls may have changed
                verdict = self.checks[name](function)
                print(f"  {verdict!r}\n" * (verdict.ok is False), end="")
            print(f"  The package's {name} runs in its place.")

    def _guilty(self, run: Callable[[], Result], wrong: Callable[[Result], str]) -> Sequence[str]:
        """The learner's parts that spoil a run of the others; all of them, if none does."""
        good: dict[str, Any] = {}
        for name, part in self.parts.own.items():
            if self._is_right(run, wrong, {**good, name: part}):
                good[name] = part
        return [name for name in self.parts.own if name not in good] or list(self.parts.own)

    def _is_right(
        self, run: Callable[[], Result], wrong: Callable[[Result], str], only: dict[str, Any]
    ) -> bool:
        """Would a run with only these parts of the learner's be right?"""
        mine, self.parts.own = self.parts.own, only
        try:
            with suppress(Exception):
                return not wrong(run())
            return False
        finally:
            self.parts.own = mine

    def who_ran(self, inside: Mapping[str, str]) -> str:
        """A line: the learner's parts that ran, in the order of the exercises, and the package's.

        `inside`: part → the part of the learner's that calls it itself, past the counter.
        """
        ran, own = self.parts.calls, self.parts.own
        counted = []
        for name in (name for name in self.parts.package if name in own):
            outer = inside.get(name, "")
            if ran[name]:
                counted.append(f"{name} ({ran[name]:,} call{'s' * (ran[name] != 1)})")
            elif outer in own:
                part = own[outer]  # a class may call it anywhere
                is_called = not hasattr(part, "__code__") or name in names_in(part)
                counted.append(f"{name} ({'inside' if is_called else 'replaced by'} {outer})")
        package = [name for name in self.names if ran[name] and name not in own]
        line = f"yours: {', '.join(counted) or 'none yet'}"
        return line + (f"; the package's: {', '.join(package)}" if package else "")


# -- a learner's number, used where the engine needs one ------------------------------------------


def yours(function: Callable[..., Any], package: Any, *args: Any) -> Any:
    """What the learner's function answers, if `package` (the right answer) is the same; else that.

    Prints it, and whose it is. Numbers may differ by rounding; lists must not.
    """
    name = function.__name__
    if is_open(function):
        print(f"the package's {name}: {number_text(package, 2)}")
        return package
    try:
        answer = function(*args)
        answer = plain(list(answer) if isinstance(answer, Iterator) else answer)
        is_list = isinstance(package, list)
        right = answer == package if is_list else math.isclose(answer, package, rel_tol=1e-5)
    except Exception as error:  # the learner's code may raise anything at all
        answer, right = f"{type(error).__name__}: {error}", False
    if right:
        if is_list:
            answer = package  # the same numbers, and whole ones where 3.0 was answered
        print(f"✔ your {name}: {number_text(answer, 2)}")
        return answer
    print(f"✘ your {name} gives {number_text(answer, 6)}; the package's: {number_text(package, 2)}")
    return package
