"""The exercises of notebook 03: answers that are right, and wrong ones."""

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from exercises import RIGHT, Exercise, Function, but

from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.learn import checks_03 as c3
from tutorial_engine.learn.give_way_check import GIVE_WAY_SLIPS, check_slots_for
from tutorial_engine.learn.judge import slips_of
from tutorial_engine.learn.own_scheduler import ShortestFirst, waiting_first

# -- notebook 03 ---------------------------------------------------------------------------------

Work = list[tuple[str, int]]


def plan(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    return RIGHT["plan_step"](running, waiting, budget, most)


def plan_by_index(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    work = [*running, *(waiting[i] for i in range(most - len(running)))]
    return plan([], work, budget, most)


def overdraws(running: Work, waiting: Work, budget: int, most: int) -> dict[str, int]:
    shares = {}
    for name, left in [*running, *waiting[: most - len(running)]]:
        if budget:
            shares[name] = min(left, budget)
            budget -= left
    return shares


GIVE_WAY = slips_of(
    RIGHT["slots_for"],
    """
    return None → pass
        goes on after C itself gave way
    victim = running[-1] → continue
        nobody gives way
    victim = running[-1] → victim = running.pop()
        preempt takes it out
    return slots → return slots and allocate(request)
        keep what allocate gave
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
    ),
    "plan_step": Exercise(
        c3.check_plan,
        [
            *(plan, but("plan_step", Counter)),
            but("plan_step", lambda shares: {name: np.int64(n) for name, n in shares.items()}),
        ],
        c3.PLAN_SLIPS,
        [
            (lambda r, w, budget, most: plan(r, w, 99, most), "over the budget of 8"),
            (lambda r, w, budget, most: plan(r, w, budget, 9), "more would run than may"),
            (lambda *case: {"Z": 8}, "no request 'Z'"),
            (lambda *case: {"C": 8}, "C has only 3 tokens"),
            (lambda *case: {"A": 1.5}, "a whole number"),
            (overdraws, "take from the budget what the request runs, not what it has left"),
            (plan_by_index, "at most 4: raised IndexError: list index out of range; there may be"),
            (waiting_first, "those who run already come first"),
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
            (lambda *case: case[3](case[1][-1]) or RIGHT["slots_for"](*case), "C gave way"),
        ],
    ),
    "ttft_and_tpot": Exercise(
        c3.check_metrics,
        [
            *(RIGHT["ttft_and_tpot"], metrics(list), metrics(torch.tensor)),
        ],
        c3.METRIC_SLIPS,
        [
            (lambda arrival, times: (times[-1] - arrival, 1.0), "first token: 0.262 s"),
            (metrics(lambda pair: (pair[0], 1.0)), "next: 0.0640 s"),
            (lambda arrival, times: (times[0] - arrival, times[20]), "0 to n − 1, and n − 1 gaps"),
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
            (policy(lambda self: self.waiting[-1]), "num_prompt_tokens says"),
            (policy(takes_it_out), "takes the request out of self.waiting"),
            (policy(leaves_a_list), "self.waiting is a list now"),
            (policy(sorts_the_queue), "finds the smallest without sorting"),
            (policy(lambda self: min(self.waiting)), "min needs a key"),
            (policy(lambda self: min(self.waiting, key=len)), "num_prompt_tokens is the length"),
            (policy(lambda self: sorted(self.waiting, key=id)), "a Request; got a list"),
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
            (policy(typed_patience), "instead of self.patience?"),
            (policy(lambda self: min(late(self), key=lambda one: one.arrival)), "list is empty"),
            (policy(lambda self: self.now > 0.1), "self.now() is the time"),
            (policy(eval("lambda self: self.now() > patience")), "in a method it is self.patience"),
        ],
    ),
}
