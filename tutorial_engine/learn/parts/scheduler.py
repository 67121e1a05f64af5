"""The learner's plan and policy, running as the real Scheduler.

The parts of notebook 03, and `slots_for` of 05, under the signatures of the exercises, and a
Scheduler that asks them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.learn.parts.holder import CannotBe, Parts, whole_tokens
from tutorial_engine.model.batch import Allocation

Work = Sequence[tuple[str, int]]  # (name, tokens left to run)

# -- the package's own parts, under the names and signatures of the exercises ----------------------


def num_tokens_to_run(num_tokens: int, num_computed_tokens: int, budget_left: int) -> int:
    """How many of its tokens a request may run in this step."""
    return min(num_tokens - num_computed_tokens, budget_left)


def plan_step(running: Work, waiting: Work, budget: int, max_num_seqs: int) -> dict[str, int]:
    """Who runs how many tokens in this step: those who run already, then those who wait."""
    shares: dict[str, int] = {}
    for name, left in [*running, *waiting[: max(0, max_num_seqs - len(running))]]:
        if budget:
            shares[name] = num_tokens_to_run(left, 0, budget)
            budget -= shares[name]
    return shares


def waiting_first(running: Work, waiting: Work, budget: int, max_num_seqs: int) -> dict[str, int]:
    """As plan_step, but those who wait go before those who run: a usual mistake."""
    newcomers = waiting[: max(0, max_num_seqs - len(running))]
    return plan_step([], [*newcomers, *running], budget, len(newcomers) + len(running))


def ttft_and_tpot(arrival: float, token_times: Sequence[float]) -> tuple[float, float]:
    """Time to first token, and mean time per token after it, in seconds."""
    metrics = RequestMetrics(arrival, None, tuple(token_times))
    assert metrics.ttft is not None and metrics.tpot is not None, "there are two tokens at least"
    return metrics.ttft, metrics.tpot


def slots_for(
    request: Any, running: list[Any], allocate: Callable[[Any], Any], preempt: Callable[[Any], None]
) -> Any:
    """The slots for a request; the last of `running` gives way until there are some.

    None if it had to give way itself.
    """
    while (slots := allocate(request)) is None:
        victim = running[-1]
        preempt(victim)
        if victim is request:
            return None
    return slots


class ShortestFirst(Scheduler):
    """Of those who wait, the one with the shortest prompt is next."""

    def next_waiting(self) -> Request:
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)


class Fair(ShortestFirst):
    """The shortest prompt is next; but who has waited for `patience` seconds goes before them."""

    patience = 0.1

    def next_waiting(self) -> Request:
        """As Scheduler.next_waiting; of those who have waited long, the first to arrive."""
        late = [
            request for request in self.waiting if self.now() - request.arrival >= self.patience
        ]
        return min(late, key=lambda request: request.arrival) if late else super().next_waiting()


POLICIES: dict[str, type[Scheduler]] = {"ShortestFirst": ShortestFirst, "Fair": Fair}
PARTS_03: dict[str, Callable[..., Any]] = {
    "num_tokens_to_run": num_tokens_to_run,
    "plan_step": plan_step,
    "ttft_and_tpot": ttft_and_tpot,
    **POLICIES,
}

# -- the scheduler made of parts -------------------------------------------------------------------


class OwnScheduler(Scheduler):
    """A Scheduler that asks the part `plan_step`, or `num_tokens_to_run`; see `with_parts`.

    `plan_step` is asked once for a step, and again when all who ran have given way, or when tokens
    of an admitted request were found, so that there is budget left. It is given the waiting
    requests in the order of the policy.
    """

    parts: Parts
    policy_name: str  # of the class below this one
    is_checked = True  # must the learner's rules keep the limits?
    _shares: dict[str, int] | None = None  # request_id -> tokens that the plan gives it

    def schedule(self) -> list[ScheduledRequest]:
        """Without chunked prefill the package's rule decides."""
        is_package = self.parts.is_package("plan_step") or not self.can_chunk
        budget = self.config.max_num_batched_tokens
        self._shares = None if is_package else self._ask_plan(budget)
        scheduled = super().schedule()
        if self._shares and not scheduled and not self.is_checked:
            held = " and ".join(request.request_id for request in self.running)
            with self.parts.blamed("plan_step"):
                raise CannotBe(
                    f"gave {self._shares}, but all places are taken, by {held}, who get nothing"
                )
        return scheduled

    def schedule_running(self, plan: StepPlan) -> None:
        """With the part `slots_for` as the inner loop."""
        if self.parts.is_package("slots_for"):
            return super().schedule_running(plan)
        for request in list(self.running):
            if request in plan.preempted:
                break  # and all after it
            num_tokens = self.num_tokens_to_run(request, plan)
            if num_tokens == 0:
                continue
            allocation = self._slots_for(request, num_tokens, plan)
            if allocation is None:
                return None
            self._add_to_plan(plan, request, allocation)

    def _slots_for(self, served: Request, num_tokens: int, plan: StepPlan) -> Allocation | None:
        """The answer of the learner's `slots_for`. PartFailed for one that cannot be."""
        ask = served.request_id, served.token_ids, served.num_computed_tokens, num_tokens
        given, num_running = list[Allocation | None](), len(self.running)

        def allocate(request: object) -> Allocation | None:
            if request is not served or served in plan.preempted:
                raise CannotBe(f"asks for {_name(request)} while {_name(served)} is served")
            if len(given) > num_running:
                raise CannotBe("asks again and again, and nobody gives way")
            if not given or given[-1] is None:
                given.append(self.memory.allocate(*ask))
            return given[-1]

        def preempt(victim: Request) -> None:
            if not self.running or victim is not self.running[-1]:
                raise CannotBe(f"lets {_name(victim)} give way, who is not the last of running")
            self.preempt(victim)
            plan.preempted.append(victim)

        self.parts.calls["slots_for"] += 1
        with self.parts.blamed("slots_for"):
            answer = self.parts.own["slots_for"](served, self.running, allocate, preempt)
            want = None if served in plan.preempted or not given else given[-1]
            if answer is not want or (want is None and served not in plan.preempted):
                asked = f"expected {want!r}" if given else "and did not ask for its slots"
                raise CannotBe(f"gave {answer!r} for {_name(served)}, {asked}")
        return want

    def schedule_waiting(self, plan: StepPlan) -> None:
        if self._shares is not None and plan.preempted:  # the plan was made for another state
            self._shares = self._ask_plan(plan.budget)
        super().schedule_waiting(plan)

    def may_admit(self, plan: StepPlan) -> bool:
        if self._shares is None:
            return super().may_admit(plan)
        has_place = len(self.running) < self.config.max_num_seqs
        is_possible = super().may_admit(plan) if self.is_checked else has_place
        return is_possible and self._planned() is not None

    def admit(self, plan: StepPlan, request: Request) -> bool:
        before, share = plan.budget, (self._shares or {}).get(request.request_id, 0)
        admitted = super().admit(plan, request)
        if admitted and self._shares is not None and before - plan.budget < share:
            self._shares = self._ask_plan(plan.budget, of_waiting=True) if plan.budget else {}
        return admitted

    def next_waiting(self) -> Request:
        """The plan's next, or the policy's."""
        planned = None if self._shares is None else self._planned()
        return self._chosen() if planned is None else planned

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        if self._shares is not None:
            return self._shares.pop(request.request_id, 0)
        if self.parts.is_package("num_tokens_to_run") or not self.can_chunk:
            return super().num_tokens_to_run(request, plan)
        known, computed = request.num_tokens, request.num_computed_tokens
        with self.parts.blamed("num_tokens_to_run"):
            left = max(0, plan.budget)  # overdrawn by an unchecked rule
            answer = self.parts("num_tokens_to_run", known, computed, left)
            share = whole_tokens(answer)
            limit = min(known - computed, left) if self.is_checked else known - computed
            if share is None or not 0 <= share <= limit:
                raise CannotBe(
                    f"gave {answer!r} for request {request.request_id}: it has "
                    f"{known - computed} tokens left to run, and the budget has {left}"
                )
        return min(share, self.config.long_prefill_token_threshold or share)

    def _planned(self) -> Request | None:
        """The next of the waiting requests to which the plan gives tokens."""
        waiting = {request.request_id: request for request in self.waiting}
        return next((waiting[name] for name in self._shares or () if name in waiting), None)

    def _chosen(self) -> Request:
        """The policy's choice. PartFailed when that is none of the waiting requests."""
        name = self.policy_name
        if name in self.parts.package:
            self.parts.calls[name] += 1
        with self.parts.blamed(name):
            chosen = super().next_waiting()
            self.check_choice(chosen)
        return chosen

    def _in_order(self) -> list[Request]:
        """The waiting requests, as the policy would take them one after the other."""
        queue, order = self.waiting, list[Request]()
        self.waiting = deque(queue)
        try:
            while self.waiting:
                order.append(self._chosen())
                self.waiting.remove(order[-1])
        finally:
            self.waiting = queue
        return order

    def _ask_plan(self, budget: int, of_waiting: bool = False) -> dict[str, int]:
        """The answer of the learner's `plan_step`. PartFailed for one that no step can run."""
        cap = self.config.long_prefill_token_threshold

        def left(requests: Sequence[Request]) -> list[tuple[str, int]]:
            return [
                (request.request_id, min(request.num_new_tokens, cap or request.num_new_tokens))
                for request in requests
            ]

        running, waiting = left(self.running), left(self._in_order())
        places = self.config.max_num_seqs
        if of_waiting:  # those who run have their tokens
            running, places = [], places - len(running)
            if not waiting or not places:
                return {}
        with self.parts.blamed("plan_step"):
            answer = self.parts("plan_step", list(running), list(waiting), budget, places)
            return _possible(answer, running, waiting, budget, places, self.is_checked)


def _name(request: object) -> str:
    return f"request {getattr(request, 'request_id', repr(request))}"


def _possible(
    answer: object, running: Work, waiting: Work, budget: int, max_num_seqs: int, keeps_limits: bool
) -> dict[str, int]:
    """The plan as whole numbers. CannotBe for one that no step can run, or that may not."""
    left = dict([*running, *waiting])
    given = answer if isinstance(answer, Mapping) else {}
    shares = {name: share for name, n in given.items() if (share := whole_tokens(n)) != 0}
    if (
        not shares
        or any(n is None or not 0 < n <= left.get(name, 0) for name, n in shares.items())
        or (keeps_limits and sum(n or 0 for n in shares.values()) > budget)
        or (keeps_limits and len(shares.keys() | dict(running).keys()) > max_num_seqs)
    ):
        raise CannotBe(
            f"gave {answer!r}, which no step can run: the tokens left to run are {left}, the "
            f"budget is {budget}, and {max_num_seqs} may run, {len(running)} of which do"
        )
    return {name: n for name, n in shares.items() if n is not None}


def with_parts(
    policy: type[Scheduler], parts: Parts, name: str = "", is_checked: bool = True
) -> type[Scheduler]:
    """The policy as a class of the same name, or of `name`, with the parts in it.

    Unchecked, they may break the budget: the engine then runs what they say, as far as it can.
    """
    fields = {"parts": parts, "is_checked": is_checked, "policy_name": policy.__name__}
    return type(name or policy.__name__, (OwnScheduler, policy), fields)
