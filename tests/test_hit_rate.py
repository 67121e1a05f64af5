"""Five runs that find nothing: each for one reason only, which can be seen, and can be mended."""

from functools import cache

import pytest

from tutorial_engine.lab.hit_rate import CAUSES, RECIPES, Case, cases, hit_rate
from tutorial_engine.learn import check_causes
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.trace.events import Admitted, BlockTaken


@cache
def runs() -> tuple[Case, ...]:
    return tuple(cases(load_model(), load_tokenizer()))


@cache
def answers() -> dict[str, str]:
    return {run.name: run.cause for run in runs()}


def test_every_cause_has_one_run_which_finds_nothing_and_does_without_it() -> None:
    assert sorted(answers().values()) == sorted(CAUSES) == sorted(RECIPES)
    assert list(answers().values()) != list(CAUSES), "the order tells nothing"
    for run in runs():
        assert run.rate == 0 < 0.1 < run.mended_rate
        found = [event for event in run.trace.events if isinstance(event, Admitted)]
        assert len(found) == 3 and not any(event.num_cached for event in found)
        evicts = any(isinstance(e, BlockTaken) and e.evicted for e in run.trace.events)
        assert evicts == ("in between" in run.cause)


@pytest.mark.parametrize("number", range(5))
def test_what_can_be_seen_has_prompts_salts_and_steps_and_not_the_cause(number: int) -> None:
    run = runs()[number]
    told = run.describe()
    assert told.startswith(f"run {number + 1}: prefix cache hit rate 0%")
    for text in (run.recipe.a, run.recipe.b, run.recipe.c, *map(repr, run.recipe.salts)):
        assert text in told
    assert told.count("finds 0 tokens") == 3 and told.count("is over") == 3
    assert run.cause not in told and not any(cause in repr(run) for cause in CAUSES)


def test_a_second_time_all_is_the_same() -> None:
    assert tuple(cases(load_model(), load_tokenizer())) == runs()
    assert hit_rate(runs()[0].trace) == 0


def test_every_wrong_cause_is_ruled_out_by_a_fact() -> None:
    for run in runs():
        for cause in CAUSES:
            if cause == run.cause:
                with pytest.raises(ValueError, match="is not ruled out here"):
                    run.why_not(cause)
                continue
            verdict = check_causes(answers() | {run.name: cause}, runs())
            assert verdict.ok is False and run.why_not(cause) in verdict.message
            assert "4 of 5 are right" in verdict.message and run.cause not in verdict.message


def test_right_answers_pass_in_any_order_and_case() -> None:
    assert check_causes(dict(reversed(answers().items()))).ok is True
    verdict = check_causes({name: f" {cause.upper()}" for name, cause in answers().items()}, runs())
    assert verdict.ok is True and f"{runs()[0].mended_rate:.0%}" in verdict.message


@pytest.mark.parametrize(
    ("given", "ok", "said"),
    [
        ({}, None, "not done yet"),
        ({"run 1": ..., "run 2": None}, None, "not done yet"),
        ({"run 9": CAUSES[0], "run 1": CAUSES[0]}, False, "there is no 'run 9'"),
        ({1: CAUSES[0], 2: CAUSES[1]}, False, "the keys are 'run 1' to 'run 5'; got 1, 2"),
        ({"run 1": "bad luck"}, False, "'bad luck' is not one of CAUSES"),
        ({"run 1": ["a list"]}, False, "is not one of CAUSES"),
        ([CAUSES[0]], False, "the answers are a dict"),
    ],
)
def test_other_answers_are_told_what_is_asked(given: object, ok: bool | None, said: str) -> None:
    verdict = check_causes(given, runs())  # type: ignore[arg-type]
    assert verdict.ok is ok and said in verdict.message


def test_half_of_the_answers_are_half_done() -> None:
    half = dict(list(answers().items())[:2])
    assert check_causes(half, runs()).ok is None
    assert "run 3, run 4, run 5" in check_causes(half, runs()).message
