"""A part of the learner's runs beside the package's: on copies, and told when it differs."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tutorial_engine.learn.exercises.verdict import Verdict, names_in
from tutorial_engine.learn.parts.holder import PartFailed, Parts, PartsHolder


def take(queue: list[int], n: int, names: dict[int, Any]) -> list[int]:
    """The first n of a queue, which loses them; they lose their names."""
    taken, queue[:] = queue[:n], queue[n:]
    names.update(dict.fromkeys(taken))
    return taken


def mean(times: list[float]) -> tuple[float, float]:
    return min(times), sum(times) / len(times)


def shadowed(right: Callable[..., Any], part: Callable[..., Any], *args: Any, **more: Any) -> Any:
    parts = Parts({"part": right}, "engine")
    parts.own["part"] = part
    try:
        return parts.shadow("part", *args, **more)
    finally:
        assert parts.calls == {"part": 1}


def one_by_one(queue: list[int], n: int, names: dict[int, Any]) -> Any:
    taken = tuple(queue.pop(0) for _ in range(n))
    for number in taken:
        names[number] = None
    return taken


def then(change: Callable[[list[int]], Any]) -> Callable[..., Any]:
    return lambda *args: change(take(*args))


@pytest.mark.parametrize(
    "part",
    [
        *(one_by_one, then(np.array), then(torch.tensor)),
        then(lambda taken: range(taken[0], taken[-1] + 1)),
        then(lambda taken: [np.int64(taken[0]), torch.tensor(taken[1])]),
    ],
)
def test_an_unusual_right_part_passes_and_the_package_goes_on(part: Callable[..., Any]) -> None:
    queue, names = [4, 5, 6], {4: "a", 5: None, 6: "b"}
    answer = shadowed(take, part, queue, 2, names, changes=(0, 2))
    assert answer == [4, 5] and all(type(number) is int for number in answer)
    assert (queue, names) == ([6], {4: None, 5: None, 6: "b"})


def raises(*_: object) -> Any:
    raise KeyError("moth")


def leaves_the_queue(queue: list[int], n: int, names: dict[int, Any]) -> list[int]:
    return take(queue.copy(), n, names)


def names_others(queue: list[int], n: int, names: dict[int, Any]) -> list[int]:
    taken = take(queue, n, names)
    names[6] = "c"
    return taken


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (raises, "your part raised KeyError in the engine: 'moth'"),
        (then(lambda taken: taken[::-1]), "yours [5, 4]; expected [4, 5]"),
        (then(lambda taken: taken[:1]), "yours [4]; expected [4, 5]"),
        (then(lambda taken: None), "yours None; expected [4, 5]"),
        (then(lambda taken: 4), "yours 4; expected [4, 5]"),
        (then(lambda taken: {4: 5}), "yours {4: 5}; expected"),
        (then(lambda taken: [4.0, 5.0]), "yours [4, 5]; expected"),  # no whole numbers
        (then(lambda taken: [True, 5]), "yours [True, 5]; expected"),
        (then(lambda taken: iter(taken)), "yours a list_iterator: put list(...) around it;"),
        (then(lambda taken: (n for n in taken)), "a generator: put list(...) around it;"),
        (
            leaves_the_queue,
            "queue [4, 5, 6]; n 2; names {4: 'a', 5: None, 6: 'b'}; your queue [4, ",
        ),
        (leaves_the_queue, "; your queue [4, 5, 6]; expected queue [6]"),
        (names_others, "; your names {6: 'c'}; expected names {6: 'b'}"),
        (lambda queue, n, names: names.pop(6) and take(queue, n, names), "; your names {}; expec"),
    ],
)
def test_a_wrong_part_is_told_with_the_input_and_both_sides_and_spoils_nothing(
    part: Callable[..., Any], words: str
) -> None:
    queue, names = [4, 5, 6], {4: "a", 5: None, 6: "b"}
    with pytest.raises(PartFailed) as failed:
        shadowed(take, part, queue, 2, names, changes=(0, 2))
    head, *facts = str(failed.value).splitlines()
    assert part is raises or head == "your part gives another answer for this input:"
    assert words in "; ".join([head, *(re.sub("  +", " ", line.strip()) for line in facts)])
    assert (queue, names) == ([6], {4: None, 5: None, 6: "b"})


def test_what_a_part_does_to_an_argument_that_nobody_reads_again_does_not_count() -> None:
    queue = [4, 5, 6]
    part = lambda queue: sum(queue.pop() for _ in range(3))  # noqa: E731
    assert shadowed(sum, part, queue) == 15 and queue == [4, 5, 6]


def test_floats_may_differ_by_rounding_and_in_what_holds_them() -> None:
    times = [0.1, 0.2, 0.4]
    right = (0.1, 0.7 / 3)
    assert shadowed(mean, lambda _: torch.tensor(right), times) == pytest.approx(right)
    assert shadowed(lambda text: None, lambda text: None, "a") is None
    for wrong in ((0.1, 0.2334), (0.1,), (0.1, None), 0.1, (0.1, "a"), (0.1, float("nan"))):
        with pytest.raises(PartFailed, match=r"expected +.0.1, 0.2333."):
            shadowed(mean, lambda _: wrong, times)  # noqa: B023
    for got, want in ((0, None), ("stop", None), (None, "stop"), (np.arange(3), None)):
        with pytest.raises(PartFailed, match="gives another answer"):
            shadowed(lambda _: want, lambda _: got, "a")  # noqa: B023


def test_of_a_long_answer_the_first_place_that_differs_is_told() -> None:
    with pytest.raises(PartFailed, match=r"differs first +\[98\]: 7, expected 98"):
        shadowed(lambda n: [*range(n)], lambda n: [*range(n - 2), 7, 99], 100)


def test_an_answer_may_be_read_before_it_is_compared_and_an_error_of_ours_is_ours() -> None:
    assert shadowed(lambda n: [1, 2], lambda n: {2, 1}, 2, read=sorted) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        Parts({"part": lambda: 1 // 0}).shadow("part")


# -- what holds the parts -------------------------------------------------------------------------


def one() -> int:
    return 1


@pytest.mark.parametrize("ok", [True, False, None])
def test_a_part_runs_if_its_check_says_so_and_else_the_packages(ok: bool | None) -> None:
    holder = PartsHolder({"one": one}, "engine")
    holder.parts.own["one"] = one  # it was right, and is changed
    verdict = Verdict(ok, "so")
    whose = "Your" if ok else "The package's"
    assert (
        repr(holder.use(one, lambda _: verdict))
        == f"{verdict}\n{whose} one runs in the engine now."
    )
    assert holder.parts.own == ({"one": one} if ok else {})


def test_a_wrong_part_is_found_by_the_result_and_an_error_of_the_package_is_nobodys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    holder = PartsHolder({"one": one, "two": lambda: 2}, "engine")
    holder.parts.own |= {"one": one, "two": lambda: 3}

    def run() -> int:
        return holder.parts("one") + holder.parts("two")

    assert holder.settle(run, lambda total: "" if total == 3 else "it is no 3.") == 3
    said = "✘ With your two it is no 3.\n  The package's two runs in its place.\n"
    assert capsys.readouterr().out == said and holder.parts.own == {"one": one}
    with pytest.raises(ZeroDivisionError):
        holder.settle(lambda: run() // 0, lambda _: "")
    assert holder.parts.own == {"one": one}


def test_names_are_read_in_comprehensions_and_inner_functions_too() -> None:
    def layer() -> object:
        return [rope(x) for x in ()], lambda: project  # type: ignore[name-defined]  # noqa: F821

    assert {"rope", "project"} <= {*names_in(layer)} and names_in(len) == []
