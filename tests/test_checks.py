"""Every exercise: right answers pass, however they are written, and each mistake is shown."""

import re
from collections.abc import Iterator
from typing import Any

import answers_01
import answers_02
import answers_03
import answers_04
import pytest
from answers_01 import kv_bytes
from answers_03 import budget_by_measuring, measured_gap, policy
from answers_04 import (
    RIGHT_ATTENTION,
    attention_with_a_gap,
    find_with_a_gap,
    list_of_scores,
    two_passes,
    with_a_gap_in_a_line,
)
from checkpoints import QWEN3_06B
from exercises import Function
from learners import (
    always_none,
    forgotten,
    untouched,
    with_a_gap,
)

from tutorial_engine import learn
from tutorial_engine.learn.exercises import lesson_01 as c1
from tutorial_engine.learn.exercises import lesson_03 as c3
from tutorial_engine.learn.exercises.judge import CODE, wrong_answers
from tutorial_engine.learn.exercises.verdict import Verdict

EXERCISES = (
    answers_01.EXERCISES | answers_02.EXERCISES | answers_03.EXERCISES | answers_04.EXERCISES
)

# -- all of them ---------------------------------------------------------------------------------

POLICIES, CACHES = ("ShortestFirst", "Fair"), ("MyCache", "MyStaticCache")
RETURNS_NOTHING = ("free", "context_shift", "slots_for")
every_exercise = pytest.mark.parametrize("name", EXERCISES)


def pairs(kind: str) -> Iterator[Any]:
    """A parameter for each answer of a kind: the exercise, the answer, what to say of it."""
    for name, exercise in EXERCISES.items():
        found = {
            "right": [(answer, "") for answer in exercise.right],
            "wrong": [*((slip, words) for words, slip in exercise.slips.items()), *exercise.wrong],
        }[kind]
        for i, (answer, words) in enumerate(found):
            yield pytest.param(name, answer, words, id=f"{name}: {words or i}"[:60])


@pytest.mark.parametrize(("name", "answer", "words"), pairs("right"))
def test_right_answer_is_accepted_however_it_is_written(name: str, answer: Any, words: str) -> None:
    verdict = EXERCISES[name].check(answer)
    assert verdict.ok is True and repr(verdict).startswith("✔ "), verdict


# of an answer that no slip is: the input and both answers, an error, or what an instrument saw
FACTS = re.compile(
    r"another answer for this input:\n.*expected|gives .*expected |raised |must |shape |returns? ",
    re.S,
)


@pytest.mark.parametrize(("name", "answer", "words"), pairs("wrong"))
def test_mistake_is_named(name: str, answer: Any, words: str) -> None:
    what, _, code = words.partition(CODE)
    for named in (name, "update"):  # so the code is told, too
        wrong_answers(named).append("another answer")
    verdict = EXERCISES[name].check(answer)
    assert verdict.ok is False and repr(verdict).startswith("✘ ")
    assert what in verdict.message and verdict.message.endswith(code), verdict
    assert words or FACTS.search(verdict.message), verdict
    assert CODE not in verdict.message


def with_code() -> Iterator[Any]:
    """Of each exercise the first mistake with code that mends it."""
    for name, exercise in EXERCISES.items():
        for words, slip in exercise.slips.items():
            if CODE in words:
                yield pytest.param(exercise.check, slip, *words.split(CODE), id=name)
                break


@pytest.mark.parametrize(("check", "slip", "what", "code"), with_code())
def test_the_code_is_told_after_another_wrong_answer(
    check: Function, slip: Any, what: str, code: str
) -> None:
    first = check(slip)
    assert what in first.message and code not in first.message and check(slip) == first
    assert check(lambda *_: "another answer").ok is False
    later = check(slip).message
    assert what in later and later.endswith(code) and CODE not in later


@pytest.fixture(autouse=True)
def _first_try() -> None:
    wrong_answers.cache_clear()


def answer_of(name: str, function: Function) -> Any:
    """The function as an answer to this exercise: a policy's method, a cache's update."""
    if name in POLICIES:
        return policy(function)
    if name in CACHES:
        return type("Cache", (), {"__init__": lambda *sizes: None, "update": function})
    return function


def empty(*_: object) -> None:
    pass


@every_exercise
def test_untouched_exercise_is_open_and_a_forgotten_return_is_wrong(name: str) -> None:
    def verdict(function: Function) -> Verdict:
        return EXERCISES[name].check(answer_of(name, function))

    for function in (untouched, lambda *_: None, lambda *_: ...):
        told = verdict(function)
        assert told.ok is None and repr(told).startswith("☐ not done yet: the body of ")
    told = verdict(empty)
    assert told.ok is None and told.message.endswith(" is still empty")
    told = verdict(with_a_gap)
    assert told.ok is None and "not done yet: there is still a `...` in " in told.message
    if name not in RETURNS_NOTHING:
        told = verdict(forgotten)
        assert told.ok is False
        assert re.search(r"(returns|gave) None\b.*`return`( missing)?\?", told.message)
    told = verdict(always_none)
    assert told.ok is False and told.message.endswith("returns None whatever it is asked")


@every_exercise
def test_function_that_raises_gets_a_verdict(name: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    verdict = EXERCISES[name].check(answer_of(name, broken))
    assert verdict.ok is False and "RuntimeError: boom" in verdict.message
    verdict = EXERCISES[name].check(answer_of(name, lambda: 1))
    assert verdict.ok is False and "TypeError" in verdict.message


def test_a_budget_that_only_a_rounding_error_rules_out_is_said_to_fit() -> None:
    found = c3.check_budget(budget_by_measuring, measured_gap)
    assert found.ok and found.message.count("as well") == 1, found
    assert "15 for 26 ms (16 fits as well: only a rounding error" in found.message
    found = c3.check_budget(lambda gap: int(gap - 10), measured_gap)
    assert found.ok and "16 for 26 ms, 20 for 30 ms, 50 for 60.7 ms;" in found.message


def test_a_function_that_calls_one_that_is_open_is_told_so() -> None:
    namespace: dict[str, Any] = {}
    code = "def project(*_): ...\ndef layer(x, w, angles, attend):\n    q, k, v = project(x)"
    exec(code, namespace)
    verdict = c1.check_layer(namespace["layer"])
    assert verdict.ok is False
    told = "which is not done yet; notebooks/solutions has it"
    assert verdict.message.endswith(f"it calls project, {told}")
    code = (
        "def layer(*_): ...\ndef whole_layer(x, w, angles):\n    return layer(x, w, angles, None)"
    )
    exec(code, namespace)
    verdict = c1.check_whole_layer(namespace["whole_layer"])
    assert verdict == Verdict(False, f"whole_layer: it calls layer, {told}")


def test_an_error_does_not_hide_what_is_still_open() -> None:
    for function, raised in ((attention_with_a_gap, "Zero"), (with_a_gap_in_a_line, "TypeError")):
        told = learn.check_block_attention(function)
        assert told.ok is None and f"`...` in block_attention (it raised {raised}" in told.message
    told = learn.check_find(find_with_a_gap)
    assert told == Verdict(None, "not done yet: there is still a `...` in find")


def test_a_right_number_for_a_wrong_reason_is_refused() -> None:
    assert c1.check_kv_bytes(kv_bytes, QWEN3_06B).ok is True
    for function in (
        lambda c, size: 2 * c.num_hidden_layers * c.hidden_size * size,
        lambda c, size: c.num_hidden_layers * c.num_attention_heads * c.head_dim * size,
        lambda c, size: 57_344 * size,
    ):
        assert function(QWEN3_06B, 2) == 114_688
        assert c1.check_kv_bytes(function, QWEN3_06B).ok is False


@pytest.mark.parametrize("function", RIGHT_ATTENTION)
def test_right_attention_that_is_no_running_softmax_is_told_so(function: Function) -> None:
    said = learn.check_block_attention(function).message.partition("none gathered")[2]
    keeps = ". But it keeps the scores of all"
    words = {list_of_scores: keeps, two_passes: ". But it reads keys more"}
    assert said.startswith(words.get(function, "")) and bool(said) == (function in words)


def test_a_test_of_the_cache_that_is_longer_than_needed_is_told_so() -> None:
    for tokens, end in ((4, "runs 4 tokens"), (10, "runs 10 tokens; fewer are enough")):
        verdict = learn.check_cache_test(lambda run, n=tokens: run(range(n), [], 2))
        assert verdict.ok and verdict.message.endswith(end)
