"""The checks, dry run and bug zoo of notebook 03: right answers pass, mistakes are named."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import one_thread

from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import PrefillFirst
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_03 import BUGS_03
from tutorial_engine.learn.checks_03 import (
    check_budget,
    check_metrics,
    check_num_tokens,
    check_plan,
    check_shortest,
)
from tutorial_engine.learn.dry_run import Job, dry_run, steps
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import StepEnded


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


def share(known: int, computed: int, budget: int) -> int:
    return min(known - computed, budget)


Work = list[tuple[str, int]]


def plan(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    shares = {}
    for name, left in [*running, *waiting[: max(0, most - len(running))]]:
        if budget:
            shares[name] = share(left, 0, budget)
            budget -= shares[name]
    return shares


def waiting_first(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    room = max(0, most - len(running))
    return plan([], [*waiting[:room], *running], budget, most)


def with_zeros(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    zeros = {name: 0 for name, _ in [*running, *waiting]}
    return zeros | plan(running, waiting, budget, most)


def metrics(arrival: float, times: list[float]) -> tuple[float, float]:
    return times[0] - arrival, (times[-1] - times[0]) / (len(times) - 1)


class Shortest(Scheduler):
    def next_waiting(self) -> Request:
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)


class Longest(Scheduler):
    def next_waiting(self) -> Request:
        return max(self.waiting, key=lambda request: request.num_prompt_tokens)


class Latest(Scheduler):
    def next_waiting(self) -> Request:
        return self.waiting[-1]


class Sluggish(Shortest):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(super().num_tokens_to_run(request, plan), 4)


class OpenTurn(Scheduler):
    def next_waiting(self) -> Any: ...


class OpenBudget(Scheduler):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> Any: ...


class Overdrawn(Scheduler):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(request.num_new_tokens, self.config.max_num_batched_tokens)


class Greedy(Scheduler):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return plan.budget


class Number(Scheduler):
    def next_waiting(self) -> Any:
        return min(request.num_prompt_tokens for request in self.waiting)


class Stuck(Scheduler):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return 0


class Broken(Scheduler):
    def next_waiting(self) -> Request:
        raise KeyError("boom")

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        raise KeyError("boom")


Check = Callable[..., Verdict]

RIGHT: list[tuple[Check, Any]] = [
    (check_num_tokens, share),
    (check_plan, plan),
    (check_metrics, metrics),
    (check_shortest, Shortest),
    (check_budget, Scheduler),
]
WRONG: list[tuple[Check, Any, str]] = [
    (
        check_num_tokens,
        lambda known, computed, budget: known - computed,
        "than the budget has left",
    ),
    (check_num_tokens, lambda known, computed, budget: budget, "than the request has left"),
    (check_num_tokens, lambda known, computed, budget: min(known, budget), "computed already"),
    (check_num_tokens, lambda known, computed, budget: 1, "expected 10"),
    (check_plan, waiting_first, "those who run already come first"),
    (check_plan, with_zeros, "leave out who gets nothing"),
    (check_plan, lambda r, w, budget, most: plan(r, w, 99, most), "over the budget of 8"),
    (check_plan, lambda r, w, budget, most: plan(r, w, budget, 9), "more would run than may"),
    (check_plan, lambda r, w, budget, most: plan(r, w[:1], budget, most), "budget left"),
    (check_plan, lambda r, w, budget, most: {"Z": 8}, "expected"),
    (check_plan, lambda r, w, budget, most: [3], "must return a dict"),
    (check_metrics, lambda a, t: (t[0], metrics(a, t)[1]), "counts from the arrival"),
    (check_metrics, lambda a, t: (t[-1] - a, metrics(a, t)[1]), "TTFT is 0.262 s"),
    (check_metrics, lambda a, t: (t[0] - a, (t[-1] - t[0]) / len(t)), "20 tokens have 19 gaps"),
    (check_metrics, lambda a, t: (t[0] - a, (t[-1] - a) / len(t)), "leaves out the first token"),
    (check_metrics, lambda a, t: (t[0] - a, 1.0), "TPOT is 0.0640 s"),
    (check_metrics, lambda a, t: 3, "two numbers"),
    (check_metrics, lambda a, t: metrics(a, t)[::-1], "TTFT comes first"),
    (check_num_tokens, lambda known, computed, budget: 1.5, "no whole number"),
    (check_budget, Greedy, "more than the request has left"),
    (check_shortest, Number, "a request, not"),
    (check_shortest, Scheduler, "first come, first served"),
    (check_shortest, Longest, "begins with the longest"),
    (check_shortest, Latest, "expected"),
    (check_shortest, Sluggish, "unlike ours"),
    (check_budget, Overdrawn, "= 9 > 8"),
    (check_budget, PrefillFirst, "10"),
    (check_budget, Stuck, "runs no token"),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_is_accepted(check: Check, answer: Any) -> None:
    assert check(answer).ok is True


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_mistake_is_named(check: Check, answer: Any, words: str) -> None:
    verdict = check(answer)
    assert verdict.ok is False
    assert words in verdict.message, verdict


@pytest.mark.parametrize("check", [check for check, _ in RIGHT])
def test_untouched_exercise_is_open(check: Check) -> None:
    policies = {check_shortest: OpenTurn, check_budget: OpenBudget}
    assert check(policies.get(check, lambda *_: None)).ok is None


@pytest.mark.parametrize("check", [check for check, _ in RIGHT])
def test_exception_becomes_a_verdict(check: Check) -> None:
    def fails(*_: object) -> None:
        raise KeyError("boom")

    verdict = check(Broken if check in (check_shortest, check_budget) else fails)
    assert verdict.ok is False
    assert "boom" in verdict.message


def test_dry_run_is_the_real_scheduler_without_the_model(model: Qwen3ForCausalLM) -> None:
    jobs = [Job("A", 10, 6), Job("B", 7, 3), Job("C", 3, 5)]
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    dry = dry_run(Scheduler, jobs, SchedulerConfig(**limits))
    engine = LLMEngine(model, config=EngineConfig(**limits, max_model_len=64))
    shares: list[dict[str, int]] = []
    schedule = engine.scheduler.schedule

    def noted() -> Any:
        scheduled = schedule()
        shares.append({s.request.request_id: s.num_tokens for s in scheduled})
        return scheduled

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    for job in jobs:
        params = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True)
        engine.add_request([65] * job.prompt_len, params, job.name)
    engine.run()
    assert steps(dry) == shares
    assert dry.num_steps == len(shares)


def test_dry_run_waits_for_those_who_come_later() -> None:
    trace = dry_run(Scheduler, [Job("A", 2, 1), Job("B", 2, 1, from_step=5)], SchedulerConfig())
    assert steps(trace) == [{"A": 2}, {"B": 2}]
    assert [event.step for event in trace.events if isinstance(event, StepEnded)] == [0, 5]


def test_dry_run_ends_a_run_that_does_not_end() -> None:
    with pytest.raises(RuntimeError, match="3 steps did not suffice"):
        dry_run(Scheduler, [Job("A", 2, 50)], SchedulerConfig(), max_steps=3)


PROMPTS = [list(range(40, 50)), list(range(60, 67)), [70, 71, 72]]


def texts(
    model: Qwen3ForCausalLM, chosen: list[int], budget: int, temperature: float
) -> dict[str, tuple[int, ...]]:
    engine = LLMEngine(model, config=EngineConfig(max_model_len=32, max_num_batched_tokens=budget))
    for i in chosen:
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=i, ignore_eos=True)
        engine.add_request(PROMPTS[i], params, str(i))
    return {out.request_id: out.outputs[0].token_ids for out in engine.run()}


@pytest.mark.parametrize("name", BUGS_03)
def test_bug_of_the_scheduler_shows_in_company_only_and_goes_again(
    model: Qwen3ForCausalLM, name: str
) -> None:
    def alone() -> dict[str, tuple[int, ...]]:
        return {str(i): texts(model, [i], 64, 1.0)[str(i)] for i in range(3)}  # whole prompts

    right = alone()
    with planted(name, BUGS_03):
        assert alone() == right
        together = texts(model, [0, 1, 2], 8, 1.0)
    harmless = name == "each request has the whole budget"
    assert (together == right) == harmless
    assert texts(model, [0, 1, 2], 8, 1.0) == right
