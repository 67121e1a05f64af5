"""What a learner hands in, watched; and what transformers says of a prompt."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.model import TINY

PROMPT_IDS = [  # the three prompts of the notebooks
    [389, 390, 259, 387, 475, 296, 259, 333, 423, 14],
    [34, 274, 296, 259, 339, 396, 14],
    [47, 285, 313],
]


class Spy:
    """A function under its own name that keeps what it was called with, and what it said."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, function.__name__
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        self.answers.append(self.function(*args))
        return self.answers[-1]


def passes(_: object) -> Verdict:
    """A check that lets everything pass, to see what the engine itself does with a wrong part."""
    return Verdict(True, "let through")


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def raises_at(turn: int, function: Callable[..., Any]) -> Callable[..., Any]:
    spy = Spy(function)

    def part(*args: Any) -> Any:
        if len(spy.calls) == turn:
            raise KeyError("moth")
        return spy(*args)

    return named(function.__name__, part)


@cache
def _theirs() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def greedy(ids: list[int], count: int) -> list[int]:
    """The greedy tokens of transformers for a prompt."""
    return _greedy(tuple(ids), count)


@cache
def _greedy(ids: tuple[int, ...], count: int) -> list[int]:
    told = _theirs().generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return told[0, len(ids) :].tolist()


# -- answers -------------------------------------------------------------------------------------


def free_by_emptying(
    table: list[int], ref_cnt: dict[int, int], free_queue: list[int], names: dict[int, Any]
) -> None:
    place = 0
    while table:
        block = table.pop()
        ref_cnt[block] -= 1
        if not ref_cnt[block]:
            free_queue.insert(len(free_queue) if names[block] else place, block)
            place += names[block] is None


def take_by_popping(free_queue: list[int], names: dict[int, Any], cached: dict[Any, int]) -> int:
    block, *free_queue[:] = free_queue
    cached.pop(names[block], None)
    names[block] = None
    return block


def untouched(*_: object) -> Any:
    """A docstring, as exercises have one."""
    ...


def with_a_gap(*args: object) -> Any:
    first = args[0]
    assert first is not None
    ...


def forgotten(*args: object) -> None:
    answer = args[0]
    assert answer is not None


def always_none(*args: object) -> None:
    return None
