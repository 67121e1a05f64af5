"""The checks, dry run and bug zoo of notebook 03: right answers pass, mistakes are named."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_03 import BUGS_03
from tutorial_engine.learn.checks_03 import (
    check_budget,
    check_fair,
    check_metrics,
    check_num_tokens,
    check_plan,
    check_shortest,
)
from tutorial_engine.learn.dry_run import Job, dry_run, steps
from tutorial_engine.learn.give_way_check import check_slots_for, slots_for
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model import load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import StepEnded


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


def none_of_three(known: int, computed: int, budget: int) -> Any:
    return None


class Shortest(Scheduler):
    def next_waiting(self) -> Request:
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)


class ShortestBySorting(Scheduler):
    def next_waiting(self) -> Request:
        return sorted(self.waiting, key=lambda request: len(request.token_ids))[0]


class ShortestByLoop(Scheduler):
    def next_waiting(self) -> Request:
        best = self.waiting[0]
        for request in self.waiting:
            if request.num_prompt_tokens < best.num_prompt_tokens:
                best = request
        return best


class Fair(Scheduler):
    patience = 0.1

    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() - one.arrival >= self.patience]
        if late:
            return min(late, key=lambda one: one.arrival)
        return min(self.waiting, key=lambda one: one.num_prompt_tokens)


class FairByKey(Shortest):
    """The queue is in the order of arrival: the first of it that is late is the oldest."""

    patience = 0.1

    def next_waiting(self) -> Request:
        for one in self.waiting:
            if one.arrival + self.patience < self.now():
                return one
        return super().next_waiting()


def policy(next_waiting: Callable[[Any], Any], base: type[Scheduler] = Scheduler) -> Any:
    return type("Yours", (base,), {"next_waiting": next_waiting, "patience": 0.1})


def by_prompt(request: Request) -> int:
    return request.num_prompt_tokens


def late(self: Any) -> list[Request]:
    return [one for one in self.waiting if self.now() - one.arrival >= self.patience]


def takes_it_out(self: Any) -> Request:
    chosen = min(self.waiting, key=by_prompt)
    self.waiting.remove(chosen)
    return chosen


def leaves_a_list(self: Any) -> Request:
    self.waiting = sorted(self.waiting, key=by_prompt)
    return self.waiting[0]


def sorts_the_queue(self: Any) -> Request:
    self.waiting.sort(key=by_prompt)
    return self.waiting[0]


def forgets_return(self: Any) -> None:
    min(self.waiting, key=by_prompt)


def open_method(self: Any) -> Any: ...


def none_method(self: Any) -> Any:
    return None


class Sluggish(Shortest):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(super().num_tokens_to_run(request, plan), 4)


def largest(answer: Any) -> Verdict:
    """The check, with a long prompt beside somebody who decodes, on a step's price."""
    return check_budget(answer, lambda budget: 10.0 + min(budget, 107))


tiny = cache(load_model)


def gives_way(answer: Any) -> Verdict:
    return check_slots_for(answer, tiny())


def by_recursion(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
    if (slots := allocate(request)) is not None:
        return slots
    victim = running[-1]
    preempt(victim)
    return None if victim == request else by_recursion(request, running, allocate, preempt)


def gives_up(
    place: int, *, repeat: bool = True, keep_itself: bool = False, stop: bool = True
) -> Callable[..., Any]:
    """slots_for with mistakes: another victim, one victim only, one that is spared or asks on."""

    def loop(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
        while (slots := allocate(request)) is None:
            victim = running[place]
            if keep_itself and victim is request:
                return None
            preempt(victim)
            if stop and victim is request:
                return None
            if not repeat:
                return allocate(request)
        return slots

    return loop


def never_preempts(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
    while (slots := allocate(request)) is None:
        pass
    return slots


def takes_the_victim_itself(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
    while (slots := allocate(request)) is None:
        preempt(running.pop())
    return slots


def returns_nothing(*case: Any) -> Any:
    slots_for(*case)


def wrong_in_the_engine(request: Any, *case: Any) -> Any:
    return slots_for(request, *case) if not isinstance(request, Request) else None


Check = Callable[..., Verdict]

RIGHT: list[tuple[Check, Any]] = [
    (check_num_tokens, share),
    (check_num_tokens, lambda *case: np.int64(share(*case))),
    (check_num_tokens, lambda *case: torch.tensor(share(*case))),
    (check_num_tokens, lambda known, computed, budget: sorted((known - computed, budget))[0]),
    (check_plan, plan),
    (check_plan, lambda *case: {name: np.int64(n) for name, n in plan(*case).items()}),
    (check_plan, lambda *case: Counter(plan(*case))),
    (gives_way, slots_for),
    (gives_way, by_recursion),
    (check_metrics, metrics),
    (check_metrics, lambda a, t: [float(x) for x in metrics(a, t)]),
    (check_metrics, lambda a, t: tuple(torch.tensor(x) for x in metrics(a, t))),
    (check_metrics, lambda a, t: (np.array(t)[0] - a, np.diff(t).mean())),
    (check_metrics, lambda a, t: torch.tensor(metrics(a, t))),
    (largest, lambda gap: int(gap - 10)),
    (largest, lambda gap: (gap - 10) // 1),
    (largest, lambda gap: np.int64(gap - 10)),
    (check_shortest, Shortest),
    (check_shortest, ShortestBySorting),
    (check_shortest, ShortestByLoop),
    (check_fair, Fair),
    (check_fair, FairByKey),
]
WRONG: list[tuple[Check, Any, str]] = [
    (check_num_tokens, lambda known, computed, budget: known - computed, "than the budget has"),
    (check_num_tokens, lambda known, computed, budget: budget, "than the request has left"),
    (check_num_tokens, lambda known, computed, budget: max(known - computed, budget), "larger"),
    (check_num_tokens, lambda known, computed, budget: min(known, budget), "computed already"),
    (
        check_num_tokens,
        lambda known, computed, budget: known - computed if known - computed <= budget else 0,
        "may run in chunks",
    ),
    (
        check_num_tokens,
        lambda known, computed, budget: 1 if computed else min(known, budget),
        "no special case",
    ),
    (
        check_num_tokens,
        lambda known, computed, budget: min(1 if computed else known, budget),
        "half read",
    ),
    (check_num_tokens, lambda known, computed, budget: 1, "expected 10"),
    (check_num_tokens, lambda known, computed, budget: 1.5, "no whole number"),
    (check_num_tokens, lambda known, computed, budget: True, "no whole number"),
    (check_num_tokens, none_of_three, "returns None whatever it is asked"),
    (check_plan, waiting_first, "those who run already come first"),
    (check_plan, with_zeros, "leave out who gets nothing"),
    (
        check_plan,
        lambda r, w, budget, most: plan([(name, 1) for name, _ in r], w, budget, most),
        "more than 1 token left",
    ),
    (check_plan, lambda r, w, budget, most: plan(r, w, 99, most), "over the budget of 8"),
    (check_plan, lambda r, w, budget, most: plan(r, w, budget, 9), "more would run than may"),
    (check_plan, lambda r, w, budget, most: plan(r, w[:1], budget, most), "budget left"),
    (check_plan, lambda r, w, budget, most: {"Z": 8}, "no request 'Z'"),
    (check_plan, lambda r, w, budget, most: {"C": 8}, "C has only 3 tokens"),
    (check_plan, lambda r, w, budget, most: {"A": 1.5}, "a whole number"),
    (check_plan, lambda r, w, budget, most: [3], "must return a dict"),
    (gives_way, gives_up(0), "A gave way; the last of running does, here C"),
    (gives_way, gives_up(-1, repeat=False), "repeat until there is room"),
    (gives_way, gives_up(-1, keep_itself=True), "C is the last itself"),
    (gives_way, gives_up(-1, stop=False), "goes on after C itself gave way"),
    (gives_way, never_preempts, "nobody gives way"),
    (gives_way, takes_the_victim_itself, "preempt takes it out"),
    (gives_way, lambda *case: (case[3](case[1][-1]), slots_for(*case))[1], "ask before each"),
    (gives_way, lambda request, *case: case[1]("A"), "asks for slots for 'A'"),
    (gives_way, returns_nothing, "return the slots"),
    (gives_way, lambda *case: 3, "it returns 3; expected 'slots of A'"),
    (gives_way, wrong_in_the_engine, "planned nothing"),
    (check_metrics, lambda a, t: (t[0], metrics(a, t)[1]), "counts from the arrival"),
    (check_metrics, lambda a, t: (t[-1] - a, metrics(a, t)[1]), "first token: 0.262 s"),
    (check_metrics, lambda a, t: (t[0] - a, (t[-1] - t[0]) / len(t)), "n tokens have n − 1 gaps"),
    (check_metrics, lambda a, t: (t[0] - a, (t[-1] - a) / len(t)), "leaves out the first token"),
    (check_metrics, lambda a, t: (t[0] - a, (t[-1] - a) / (len(t) - 1)), "not with the arrival"),
    (check_metrics, lambda a, t: (t[0] - a, median(np.diff(t))), "the mean of the gaps, not the"),
    (check_metrics, lambda a, t: (t[0] - a, max(np.diff(t))), "not the largest"),
    (check_metrics, lambda a, t: (t[0] - a, t[-1] - t[0]), "the time for all"),
    (check_metrics, lambda a, t: (t[0] - a, 1 / metrics(a, t)[1]), "tokens per second"),
    (check_metrics, lambda a, t: [1000 * x for x in metrics(a, t)], "do not turn them into ms"),
    (check_metrics, lambda a, t: (t[0] - a, 1.0), "next: 0.0640 s"),
    (check_metrics, lambda a, t: 3, "two numbers"),
    (check_metrics, lambda a, t: metrics(a, t)[::-1], "TTFT comes first"),
    (largest, lambda gap: int(gap), "with it the longest gap is 36 ms"),
    (largest, lambda gap: int(gap - 11), "with 16 the longest gap is 26 ms: that is short enough"),
    (largest, lambda gap: gap - 10, "(60.7): got 50.7; a budget is a whole number of tokens"),
    (largest, lambda gap: int(gap - 26), "at least 1"),
    (largest, none_method, "returns None whatever"),
    (check_shortest, Scheduler, "first come, first served"),
    (check_shortest, type("Passed", (Scheduler,), {}), "first come, first served"),
    (check_shortest, policy(lambda self: max(self.waiting, key=by_prompt)), "the longest"),
    (check_shortest, policy(lambda self: self.waiting[-1]), "num_prompt_tokens says"),
    (check_shortest, policy(lambda self: min(map(by_prompt, self.waiting))), "a Request; got 3"),
    (check_shortest, policy(takes_it_out), "takes the request out of self.waiting"),
    (check_shortest, policy(leaves_a_list), "self.waiting is a list now"),
    (check_shortest, policy(sorts_the_queue), "finds the smallest without sorting"),
    (check_shortest, policy(forgets_return), "does it end with `return`?"),
    (check_shortest, policy(none_method), "returns None whatever it is asked"),
    (check_shortest, Sluggish, "unlike ours"),
    (check_shortest, Shortest.next_waiting, "hand over the class"),
    (check_fair, type("Passed", (Scheduler,), {}), "first come, first served: while nobody"),
    (check_fair, type("Passed", (Shortest,), {}), "L still starves"),
    (check_fair, policy(lambda self: min(late(self) or self.waiting, key=by_prompt)), "by arrival"),
    (
        check_fair,
        policy(lambda self: (late(self) or [min(self.waiting, key=by_prompt)])[-1]),
        "not the last one",
    ),
    (
        check_fair,
        policy(
            lambda self: (
                self.waiting[0] if self.now() > self.patience else min(self.waiting, key=by_prompt)
            )
        ),
        "not self.now()",
    ),
    (check_fair, policy(lambda self: Fair.next_waiting(fixed(self))), "instead of self.patience?"),
    (check_fair, policy(lambda self: late(self)[0]), "IndexError"),
    (check_fair, policy(forgets_return), "does it end with `return`?"),
]


def fixed(scheduler: Any) -> Any:
    """As a scheduler with the number of seconds written into it."""
    same = object.__new__(type(scheduler))
    same.__dict__ |= scheduler.__dict__ | {"patience": 0.15}
    return same


POLICIES = (check_shortest, check_fair)
CHECKS = (check_num_tokens, check_plan, gives_way, check_metrics, largest, *POLICIES)


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_is_accepted(check: Check, answer: Any) -> None:
    assert check(answer).ok is True


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_mistake_is_named(check: Check, answer: Any, words: str) -> None:
    verdict = check(answer)
    assert verdict.ok is False
    assert words in verdict.message, verdict


@pytest.mark.parametrize("check", CHECKS)
def test_untouched_exercise_is_open(check: Check) -> None:
    untouched = policy(open_method) if check in POLICIES else lambda *_: ...
    assert check(untouched).ok is None


@pytest.mark.parametrize("check", CHECKS)
def test_exception_becomes_a_verdict(check: Check) -> None:
    def fails(*_: object) -> None:
        raise KeyError("boom")

    verdict = check(policy(fails) if check in POLICIES else fails)
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
