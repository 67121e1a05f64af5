"""The exercises of notebook 03: answers that are right, and wrong ones."""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from exercises import RIGHT, Exercise, Function, but

from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.learn.exercises import lesson_03 as c3
from tutorial_engine.learn.exercises.judge import slips_of
from tutorial_engine.learn.exercises.lesson_05_give_way import GIVE_WAY_SLIPS, check_slots_for
from tutorial_engine.learn.parts.scheduler import ShortestFirst

# -- notebook 03 ---------------------------------------------------------------------------------

Work = list[tuple[str, int]]


def plan(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    return RIGHT["plan_step"](running, waiting, budget, most)


def plan_by_index(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    work = [*running, *(waiting[i] for i in range(most - len(running)))]
    return plan([], work, budget, most)


def share_with_a_hole(num_tokens: int, num_computed_tokens: int, budget_left: int) -> int | None:
    """None where both limits are equal."""
    left = num_tokens - num_computed_tokens
    if left < budget_left:
        return left
    elif left > budget_left:
        return budget_left
    return None


def plan_with_a_hole(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    planned: dict[str, int] = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if budget:
            planned[name] = share_with_a_hole(left, 0, budget)  # type: ignore[assignment]
            budget -= planned[name]
    return planned


def plan_until_the_hole(running: Work, waiting: Work, budget: int, most: int) -> Any:
    planned: dict[str, Any] = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if budget > 0:
            planned[name] = share_with_a_hole(left, 0, budget)
            budget -= left
    return planned


def share_to_be_written(num_tokens: int, num_computed_tokens: int, budget_left: int) -> int: ...  # type: ignore[empty-body]


def plan_before_the_share(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    share = share_to_be_written(waiting[0][1], 0, budget)
    return {waiting[0][0]: min(share, budget)}


def plan_with_break_too_late(running: Work, waiting: Work, budget: int, most: int) -> Any:
    """Whoever runs may use up the budget, and the first one who waits is asked all the same."""
    planned: dict[str, int] = {}
    for group in (running, waiting[: most - len(running)]):
        for name, left in group:
            planned[name] = min(left, budget)
            budget -= planned[name]
            if budget == 0:
                break
    return planned


def plan_with_break_too_soon(running: Work, waiting: Work, budget: int, most: int) -> Any:
    """Ends at the first who does not fit as a whole."""
    planned: dict[str, int] = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if left > budget:
            break
        planned[name] = left
        budget -= left
    return planned


def one_token_is_too_few(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    """Nobody who waits is given the very last token."""
    shares = plan(running, waiting, budget, most)
    names = dict(waiting)
    is_last = sum(shares.values()) == budget
    return {k: n for k, n in shares.items() if not (k in names and n == 1 and is_last)}


GIVE_WAY = slips_of(
    RIGHT["slots_for"],
    """
    return None → pass
        allocate(B) is called after B gave way
    victim = running[-1] → continue
        allocate(A) gave None 4 times, and is called again
    victim = running[-1] → victim = running.pop()
        preempt(B) is called, and B is not in running
    return slots → return slots and allocate(request)
        allocate(A) is called again after it gave slots
    """,
)


def policy(next_waiting: Function) -> Any:
    return type("Yours", (Scheduler,), {"next_waiting": next_waiting, "patience": 0.1})


def by_prompt(request: Request) -> int:
    return request.num_prompt_tokens


def late(self: Any) -> list[Request]:
    return [one for one in self.waiting if self.now() - one.arrival >= self.patience]


def measured_gap(budget: int) -> float:
    """As the engine's floats have it: 26 ms and a little more with a budget of 16, 30.0 with 20."""
    return 10.0 + 2e-14 * 1000 * (budget == 16) + min(budget, 107)


def budget_by_measuring(most: float) -> int:
    return max(budget for budget in range(1, 100) if measured_gap(budget) <= most)


def by_loop(self: Any) -> Request:
    best = self.waiting[0]
    for request in self.waiting:
        if request.num_prompt_tokens < best.num_prompt_tokens:
            best = request
    return best


def first_that_is_late(self: Any) -> Request:
    """The queue is in the order of arrival: the first of it that is late is the oldest."""
    for one in self.waiting:
        if one.arrival + self.patience <= self.now():
            return one
    return by_loop(self)


def takes_it_out(self: Any) -> Request:
    chosen = by_loop(self)
    self.waiting.remove(chosen)
    return chosen


def leaves_a_list(self: Any) -> Request:
    self.waiting = sorted(self.waiting, key=by_prompt)
    return self.waiting[0]


def sorts_the_queue(self: Any) -> Request:
    self.waiting.sort(key=by_prompt)
    return self.waiting[0]


def typed_patience(self: Any) -> Request:
    same = object.__new__(type(self))
    same.__dict__ |= self.__dict__ | {"patience": 0.15}
    return first_that_is_late(same)


def gives_none_if_nobody_is_late(self: Any) -> Any:
    if late(self):
        return min(late(self), key=lambda one: one.arrival)


class Sluggish(ShortestFirst):
    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(super().num_tokens_to_run(request, plan), 4)


def metrics(change: Function) -> Function:
    return but("ttft_and_tpot", change)


EXERCISES: dict[str, Exercise] = {
    "num_tokens_to_run": Exercise(
        c3.check_num_tokens,
        [
            RIGHT["num_tokens_to_run"],
            but("num_tokens_to_run", torch.tensor),
        ],
        c3.SHARE_SLIPS,
        [
            (share_with_a_hole, "share_with_a_hole(10, 2, 8) returns None"),
            (but("num_tokens_to_run", str), "gives '3' for"),
            (but("num_tokens_to_run", lambda n: True if n == 1 else n), "True"),
        ],
    ),
    "plan_step": Exercise(
        c3.check_plan,
        [
            *(plan, but("plan_step", Counter)),
            but("plan_step", lambda shares: {name: np.int64(n) for name, n in shares.items()}),
        ],
        c3.PLAN_SLIPS,
        [
            (lambda r, w, budget, most: plan(r, w, 99, most), "3 tokens, and the budget is 2"),
            (lambda *case: {"Z": 8}, "yours     {'Z': 8}"),
            (lambda *case: {"A": 1.5}, "yours     {'A': 1.5}"),
            (
                but("plan_step", lambda shares: [*shares.items()]),
                "it must return a dict, {name: tokens}, got [('A', 2)]",
            ),
            (lambda *case: 0, "it must return a dict, {name: tokens}, got 0"),
            (plan_with_break_too_late, "B with 0 tokens; who runs nothing must not be in the plan"),
            (plan_with_break_too_soon, "A does not run, and the budget has 2 left"),
            (one_token_is_too_few, "B does not run, and the budget has 1 left"),
            (plan_by_index, "raised IndexError: list index out of range\n"),
            (plan_with_a_hole, "; it calls share_with_a_hole(1, 0, 1), which gave None\n"),
            (
                plan_before_the_share,
                "share_to_be_written(2, 0, 3), which gave None: it is not done",
            ),
            (plan_until_the_hole, "it calls share_with_a_hole(1, 0, 1), which gave None"),
        ],
    ),
    "slots_for": Exercise(
        check_slots_for,
        [RIGHT["slots_for"]],
        {**GIVE_WAY_SLIPS, **GIVE_WAY},
        [
            (
                lambda request, *case: (
                    None if isinstance(request, Request) else RIGHT["slots_for"](request, *case)
                ),
                "in the engine your slots_for gave None for request A, and did not ask",
            ),
            (lambda *case: case[3](case[1][-1]) or RIGHT["slots_for"](*case), "B gave way"),
        ],
    ),
    "ttft_and_tpot": Exercise(
        c3.check_metrics,
        [
            *(RIGHT["ttft_and_tpot"], metrics(list), metrics(torch.tensor)),
        ],
        c3.METRIC_SLIPS,
        [
            (lambda arrival, times: (times[-1] - arrival, 1.0), ""),
            (metrics(lambda pair: (pair[0], 1.0)), ""),
            (lambda arrival, times: (times[0] - arrival, times[20]), "raised IndexError"),
            (metrics(lambda pair: [round(x, 3) for x in pair]), "gives [1, 0.333] for"),
            (metrics(lambda pair: [round(x, 4) for x in pair]), "[1]: 0.3333, expected 0.33333"),
            (metrics(sum), "must return two numbers"),
        ],
    ),
    "largest_budget": Exercise(  # a long prompt beside somebody who decodes, on a step's price
        lambda answer: c3.check_budget(answer, measured_gap),
        [
            *(lambda gap: int(gap - 10), lambda gap: (gap - 10) // 1),
            *(lambda gap: np.int64(gap - 10), budget_by_measuring),
        ],
        {},
        [
            (lambda gap: int(gap), "with it the longest gap is 36 ms"),
            (lambda gap: math.ceil(gap) - 11, "with 20 the longest gap is 30 ms: that is short"),
            (lambda gap: gap - 10, "for 60.7 ms got 50.7; a budget is a whole number of tokens"),
        ],
    ),
    "ShortestFirst": Exercise(
        c3.check_shortest,
        [
            *(ShortestFirst, policy(by_loop)),
        ],
        c3.SHORTEST_SLIPS,
        [
            (policy(lambda self: self.waiting[-1]), ""),
            (policy(leaves_a_list), "self.waiting is a list now"),
            (policy(takes_it_out), "gave 'B' (Request): it must return one of the requests"),
            (policy(sorts_the_queue), "raised AttributeError"),
            (policy(lambda self: min(self.waiting)), "raised TypeError"),
            (
                policy(lambda self: sorted(self.waiting, key=id)),
                "next_waiting gave [<tutorial_engine.",
            ),
            (Sluggish, "unlike ours"),
            (ShortestFirst.next_waiting, "hand over the class"),
        ],
    ),
    "Fair": Exercise(
        c3.check_fair,
        [
            *(RIGHT["Fair"], policy(first_that_is_late)),
        ],
        c3.FAIR_SLIPS,
        [
            (policy(typed_patience), "then waited"),
            (
                policy(
                    lambda self: min(
                        self.waiting,
                        key=lambda one: one.arrival if one in late(self) else one.num_prompt_tokens,
                    )
                ),
                "compares the time at which one request came with the prompt length",
            ),
            (
                policy(lambda self: min(late(self), key=lambda one: one.arrival)),
                "raised ValueError",
            ),
            (
                policy(gives_none_if_nobody_is_late),
                "gave None (is a `return` missing?): it",
            ),
            (policy(lambda self: self.now > 0.1), "raised TypeError"),
            (policy(eval("lambda self: self.now() > patience")), "name 'patience' is not defined"),
        ],
    ),
}
