"""The checks of notebook 03, and what they know of usual mistakes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.dry_runs import Job, dry_run, steps
from tutorial_engine.learn.judge import (
    Slips,
    alike,
    judge,
    read_number,
    read_numbers,
    slips_of,
)
from tutorial_engine.learn.own_scheduler import Fair, ShortestFirst, Work
from tutorial_engine.learn.own_scheduler import num_tokens_to_run as right_share
from tutorial_engine.learn.own_scheduler import plan_step as right_plan
from tutorial_engine.learn.own_scheduler import ttft_and_tpot as right_metrics
from tutorial_engine.learn.parts import whole_tokens
from tutorial_engine.learn.verdict import (
    CannotBe,
    Explain,
    Verdict,
    guarded,
    must_answer,
    open_verdict,
)
from tutorial_engine.trace.events import Admitted, Trace

# -- 1. how many tokens

SHARES = (
    ("a prompt that fits", 10, 0, 16),
    ("a prompt that does not", 40, 0, 24),
    ("the rest of a prompt", 40, 24, 63),
    ("decode", 11, 10, 5),
    ("decode, budget used up", 11, 10, 0),
    ("prompt and 5 outputs, all to be computed again", 15, 0, 64),
)
SHARE_SLIPS: Slips = slips_of(
    right_share,
    """
    min( → max(
        take the smaller of the two limits, not the larger
    min(num_tokens - num_computed_tokens, budget_left) → num_tokens - num_computed_tokens
        that is more than the budget has left
    min(num_tokens - num_computed_tokens, budget_left) → budget_left
        that is more than the request has left to run
    num_tokens - num_computed_tokens → num_tokens
        some of its tokens are computed already
    num_tokens - num_computed_tokens, budget_left) → num_tokens, budget_left) - num_computed_tokens
        subtract first, and then compare with what the budget has left
    num_tokens - num_computed_tokens, budget_left) → num_tokens, budget_left - num_computed_tokens)
        what is computed is subtracted from the known tokens, not from the budget
    num_tokens - num_computed_tokens → num_computed_tokens
        those are computed; what is not computed yet is to run
    return min( → return (
    , budget_left) → - budget_left)
        the smaller of the two limits, not their difference
    return min( → return max(0, budget_left - (
    , budget_left) → ))
        that is what it leaves of the budget
    num_tokens - num_computed_tokens → num_computed_tokens - num_tokens
        to run = known − computed, not computed − known
    min(num_tokens - num_computed_tokens → 1 if num_computed_tokens else min(num_tokens
        no special case for those that have begun, and never more than the budget has left
    min(num_tokens - num_computed_tokens, budget_left) → 1 if num_computed_tokens else num_tokens
        never more than the budget has left; and a prompt that is cut into chunks has more than 1
        token left
    num_tokens - num_computed_tokens → 1 if num_computed_tokens else num_tokens
        no special case: a prompt that is half read has more than 1 token left
    """,
) | {
    "a budget that is used up has no token left, not even one": lambda *case: max(
        1, right_share(*case)
    ),
    "a prompt may run in chunks: as many of its tokens as the budget has": lambda n, done, left: (
        n - done if n - done <= left else 0
    ),
}


def check_num_tokens(function: Callable[[int, int, int], object]) -> Verdict:
    """Check a learner's function(num_tokens, num_computed_tokens, budget_left) → tokens to run."""

    return judge(
        *("num_tokens_to_run", function, right_share, SHARES, SHARE_SLIPS),
        "num_tokens_to_run: a new prompt, the rest of one, and decode: one rule",
        call=lambda function, what, *case: function(*case),
        read=read_number("a step runs a whole number of tokens", whole_tokens),
        where=lambda got, what, *case: f"{what}, {case}: got {got}",
    )


# -- 2. a step

PLANS: tuple[tuple[Work, Work, int, int], ...] = (
    ([], [("A", 10), ("B", 7), ("C", 3)], 8, 4),
    ([], [("A", 3), ("B", 2), ("C", 9)], 8, 4),
    ([("A", 2)], [("B", 7), ("C", 3)], 8, 4),
    ([("A", 1), ("B", 1)], [("C", 3)], 8, 4),
    ([("A", 1), ("B", 1)], [("C", 3), ("D", 2)], 64, 3),
    ([("A", 1), ("B", 30), ("C", 1)], [("D", 2)], 16, 4),
    ([("A", 1), ("B", 1)], [("C", 3)], 2, 4),
    ([("A", 1), ("B", 1)], [("C", 3)], 64, 2),
)


PLAN_SLIPS: Slips = slips_of(
    right_plan,
    """
    in [*running → in [*((name, 1) for name, _ in running)
        a request that runs already may have more than 1 token left: run them
    in [*running → in sorted([*running
    len(running))]]: → len(running))]], key=lambda one: one[1]):
        keep the order of the lists: who has fewer tokens does not go first
    """,
)


def check_plan(function: Callable[[Work, Work, int, int], Mapping[str, int]]) -> Verdict:
    """Check a learner's function(running, waiting, budget, max_num_seqs) → {name: tokens}."""

    def read(answer: object) -> dict[str, int | None]:
        if not isinstance(answer, Mapping):
            raise CannotBe(f"it must return a dict, name -> tokens; got {answer!r}")
        return {name: whole_tokens(share) for name, share in answer.items()}

    def place(running: Work, waiting: Work, budget: int, most: int) -> str:
        return f"running {running}, waiting {waiting}, budget {budget}, at most {most}"

    def call(function: Callable[..., object], *case: Any) -> object:
        told = place(*case)  # before the function may change the lists
        places_left = case[3] - len(case[0]) - len(case[1])
        try:
            return function(*case)
        except IndexError as error:
            why = "; there may be more free places than waiting requests" * (places_left > 0)
            raise CannotBe(f"{told}: raised IndexError: {error}{why}") from error

    return judge(
        *("plan_step", function, right_plan, PLANS, PLAN_SLIPS),
        "plan_step: running first, then waiting, within both limits",
        call=call,
        read=read,
        where=lambda got, *case: f"{place(*case)}: got {got}",
        otherwise=_why_no_plan,
    )


def _why_no_plan(
    got: Mapping[str, int | None],
    want: Mapping[str, int],
    running: Work,
    waiting: Work,
    budget: int,
    most: int,
) -> str:
    left, shares = dict([*running, *waiting]), {k: n for k, n in got.items() if n is not None}
    if len(shares) < len(got):
        return "a share is a whole number of tokens"
    if {name: n for name, n in shares.items() if n} == dict(want):
        return "leave out who gets nothing"
    if strangers := sorted(shares.keys() - left.keys()):
        return f"there is no request {strangers[0]!r}"
    if any(n < 0 for n in shares.values()):
        return (
            "a share is never negative: take from the budget what the request runs, not what it "
            "has left"
        )
    if beyond := [name for name, n in shares.items() if n > left[name]]:
        return f"{beyond[0]} has only {left[beyond[0]]} tokens left to run"
    if sum(shares.values()) > budget:
        return f"{sum(shares.values())} tokens are over the budget of {budget}"
    if len(shares.keys() | dict(running).keys()) > most:
        return "more would run than may; those who run already count"
    starved = any(shares.get(name, 0) < n for name, n in running)
    if starved and any(shares.get(name) for name, _ in waiting):
        return "those who run already come first, and keep their places"
    if sum(shares.values()) < sum(want.values()):
        return "there was budget left, and somebody who may run still has tokens to run"
    return f"expected {dict(want)}"


# -- 3. TTFT and TPOT

TIMES = (
    (0.0, tuple(0.262 + 0.064 * i for i in range(20))),
    (2.0, (2.5, 3.0, 3.25, 5.25, 6.0, 7.0)),  # gaps: first, last, mean and median all differ
    (1.0, (1.25, 1.5)),
)


def _metrics(arrival: float, times: Sequence[float]) -> tuple[float, float]:
    gaps = [b - a for a, b in pairwise(times)]
    ttft = times[0] - arrival
    tpot = sum(gaps) / len(gaps)
    return ttft, tpot


METRIC_SLIPS: Slips = slips_of(
    _metrics,
    """
    return ttft, tpot → return tpot, ttft
        these are TPOT and TTFT; TTFT comes first
    return ttft, tpot → return 1000 * ttft, 1000 * tpot
        the times are in seconds, and so are TTFT and TPOT: do not turn them into ms
    times[0] - arrival → times[0]
        TTFT counts from the arrival
    / len(gaps) → / len(times)
        TPOT: n tokens have n − 1 gaps
    sum(gaps) / len(gaps) → (times[-1] - arrival) / len(times)
        TPOT leaves out the first token, which is TTFT's
    sum(gaps) / len(gaps) → (times[-1] - arrival) / len(gaps)
        TPOT begins with the first token, not with the arrival
    sum(gaps) / len(gaps) → sorted(gaps)[len(gaps) // 2]
        TPOT is the mean of the gaps, not the median: a long pause counts in full
    sum(gaps) / len(gaps) → max(gaps)
        TPOT is the mean of the gaps, not the largest
    sum(gaps) / len(gaps) → min(gaps)
        TPOT is the mean of the gaps, not the smallest
    sum(gaps) / len(gaps) → gaps[0]
        TPOT is the mean of the gaps, not the first
    sum(gaps) / len(gaps) → gaps[-1]
        TPOT is the mean of the gaps, not the last
    / len(gaps) →
        TPOT is the time for one token, this is the time for all
    sum(gaps) / len(gaps) → len(gaps) / sum(gaps)
        this is tokens per second; TPOT is seconds per token
    """,
)


def check_metrics(function: Callable[[float, Sequence[float]], object]) -> Verdict:
    """Check a learner's function(arrival, token_times) → (TTFT, TPOT)."""

    def otherwise(got: Sequence[float], want: Sequence[float], *_: object) -> str:
        if not alike(got[0], want[0], 1e-6):
            return f"TTFT is the time from the arrival to the first token: {want[0]:.3f} s"
        return f"TPOT is the mean time from one token to the next: {want[1]:.4f} s, not rounded"

    return judge(
        *("ttft_and_tpot", function, right_metrics, TIMES, METRIC_SLIPS),
        "ttft_and_tpot: .262 s, then .064 s a token",
        tolerance=1e-6,  # a float32 is as good
        read=read_numbers(2, "it must return two numbers"),
        where=lambda got, arrival, times: f"{len(times)} tokens, arrival {arrival}: got {got}",
        otherwise=otherwise,
        explain={
            IndexError: (
                "n tokens have the indices 0 to n − 1, and n − 1 gaps; there may be only two tokens"
            )
        },
    )


# -- 4. the budget

GAPS = (26.0, 30.0, 60.7)  # ms


def check_budget(
    function: Callable[[float], object], longest_gap: Callable[[int], float]
) -> Verdict:
    """Check a learner's function(max_gap_ms) → token budget in an engine.

    `longest_gap(budget)` runs it and gives the longest gap in ms.
    """

    def budget_for(most: float) -> str:
        answer = function(most)
        must_answer("largest_budget", answer, function)
        got, budget = f"for {most:g} ms got {answer!r}", whole_tokens(answer)  # 26.0 // 1
        if budget is None or budget < 1:
            raise CannotBe(f"{got}; a budget is a whole number of tokens, at least 1")
        if (gap := longest_gap(budget)) > most + 1e-6:
            raise CannotBe(f"{got}; with it the longest gap is {gap:.0f} ms")
        # without a tolerance: who searches by measuring has seen 26.00000000000002 with 16
        if (gap := longest_gap(budget + 1)) <= most:
            more = f"with {budget + 1} the longest gap is {gap:.0f} ms"
            raise CannotBe(f"{got}; {more}: that is short enough too")
        more = f" ({budget + 1} fits as well: only a rounding error puts it above {most:g} ms)"
        return f"{budget} for {most:g} ms{more if gap <= most + 1e-6 else ''}"

    def run() -> Verdict:
        tried = ", ".join(budget_for(most) for most in GAPS)
        return Verdict(True, f"largest_budget: {tried}; the engine keeps each")

    return guarded("largest_budget", run, function)


# -- 5. and 6. policies

JOBS = (
    Job("A", 10, 6),
    Job("B", 7, 3),
    Job("C", 3, 5),
    Job("D", 40, 4, 2),
    Job("E", 5, 8, 3),
    Job("F", 5, 2, 4),
)
ONE_PLACE = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64)
SHORT_ONES = tuple(Job(f"s{i}", 3, 6, 4 * i) for i in range(12))
PATIENCES = (0.1505, 0.3505)  # never exactly how long somebody has waited
LATER = (Job("o", 3, 6, 100), Job("M", 30, 4, 101), Job("n", 3, 6, 102))  # nobody waits for long
# K comes a little later than L, and is shorter; both wait while short ones come
# when n comes s is served, and L has waited for exactly 0.014 s: one step of 4 tokens
EXACTLY = (Job("s", 4, 1), Job("L", 40, 4), Job("n", 2, 6, 1)), 0.014
CROWD = (Job("s", 3, 6), Job("L", 40, 4, 1), Job("K", 20, 4, 2), *SHORT_ONES[1:], *LATER)
TURNED = (Job("s", 3, 6), Job("K", 20, 4, 1), Job("L", 40, 4, 2), *SHORT_ONES[1:])  # K is first


NEEDS_A_KEY = "min needs a key: a function that says what to compare of a request"
POLICY_ERRORS: Explain = {
    " empty": "nobody has waited for so long, and the list is empty: the shortest is next then",
    "'method'": "a method is called with (): self.now() is the time",
    "name 'patience'": "in a method it is self.patience",
    "no len()": "a request has no length: its num_prompt_tokens is the length of its prompt",
    "'<' not": NEEDS_A_KEY,
    "callable": NEEDS_A_KEY,
    "'sort'": "min(self.waiting, key=...) finds the smallest without sorting",
}


def _watched(policy: type[Scheduler], **attributes: object) -> type[Scheduler]:
    """The policy with an eye on what its `next_waiting` returns, and what it does to the queue."""

    def next_waiting(self: Scheduler) -> Request:
        before = list(self.waiting)
        chosen: object = policy.next_waiting(self)
        must_answer("next_waiting", chosen, policy.next_waiting)
        if not isinstance(self.waiting, deque):
            kind = type(self.waiting).__name__
            raise CannotBe(f"self.waiting is a {kind} now; it must stay a deque")
        if not isinstance(chosen, Request) or not any(chosen is request for request in before):
            got = "a list" if isinstance(chosen, list) else repr(chosen)
            raise CannotBe(f"return one of the requests in self.waiting, a Request; got {got}")
        if len(self.waiting) < len(before):
            raise CannotBe(
                "it takes the request out of self.waiting; the scheduler does that: return it"
            )
        return chosen

    return type(policy.__name__, (policy,), {"next_waiting": next_waiting, **attributes})


def _admitted(policy: Any, jobs: Sequence[Job], patience: float) -> list[str]:
    """In which order a policy admits the jobs, one at a time."""
    trace: Trace = dry_run(_watched(policy, patience=patience), jobs, ONE_PLACE)
    return [event.request_id for event in trace.events if isinstance(event, Admitted)]


def _check_policy(
    name: str,
    policy: Any,
    right: type[Scheduler],
    cases: Sequence[tuple[Sequence[Job], float]],
    slips: Mapping[str, Any],
    done: str,
    otherwise: Callable[..., str] | None = None,
) -> Verdict:
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        return Verdict(False, f"{name}: hand over the class, a Scheduler; got {policy!r}")

    if (bad := open_verdict("next_waiting", policy.next_waiting)) is not None:
        return bad

    def alone(policy: type[Scheduler]) -> str:
        mine, ours = (dry_run(kind, JOBS[:1], ONE_PLACE) for kind in (policy, Scheduler))
        return "" if steps(mine) == steps(ours) else "one request alone runs unlike ours"

    def where(order: Sequence[str], jobs: Sequence[Job], patience: float) -> str:
        sizes = {job.name: job.prompt_len for job in jobs}
        told = ", ".join(f"{one} ({sizes[one]})" for one in order)
        return f"admitted {told}" + (
            f" with a patience of {patience} s" if jobs is not JOBS else ""
        )

    return judge(
        *(name, policy, right, cases, slips, done),
        call=_admitted,
        where=where,
        otherwise=otherwise,
        explain=POLICY_ERRORS,
        then=alone,
        body=policy.next_waiting,
    )


SHORTEST_SLIPS: Mapping[str, Any] = {
    "that is first come, first served": Scheduler,
    **slips_of(
        ShortestFirst,
        """
    min( → max(
        that begins with the longest
    request.num_prompt_tokens) → -request.arrival)
        that begins with the one that came last; num_prompt_tokens says how long a prompt is
    request.num_prompt_tokens) → (request.num_prompt_tokens, -request.arrival))
        of equally short ones, the first to arrive is next, not the last
    """,
    ),
}


def check_shortest(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: of those who wait, the shortest prompt is admitted first."""
    order = ", ".join(_admitted(ShortestFirst, JOBS, 0.0))
    return _check_policy(
        *("shortest first", policy, ShortestFirst, [(JOBS, 0.0)], SHORTEST_SLIPS),
        f"shortest first: admitted {order}",
        lambda got, want, *_: f"expected {want}; num_prompt_tokens says how long a prompt is",
    )


FAIR_SLIPS: Mapping[str, Any] = {
    "L still starves: whoever has waited for self.patience seconds goes first": ShortestFirst,
    "that is first come, first served: while nobody has waited for self.patience seconds, the "
    "shortest prompt is next": Scheduler,
    **slips_of(
        Fair,
        """
    request.arrival) → request.num_prompt_tokens)
        of those who have waited for so long, the one that came first is next: by arrival, not by
        length
    min(late, key=lambda request: request.arrival) → max(late, key=lambda r: r.num_prompt_tokens)
        of those who have waited for so long, the one that came first is next, not the longest
    min(late, → max(late,
        of those who have waited for so long, the one that came first is next, not the last one
    super().next_waiting() → min(self.waiting, key=lambda r: (r.num_prompt_tokens, -r.arrival))
        of equally short ones, the first to arrive is next, not the last
    self.now() - request.arrival >= → self.now() >=
        how long a request has waited is self.now() - request.arrival, not self.now()
    self.now() - request.arrival >= → request.arrival >=
        how long a request has waited is self.now() - request.arrival, not request.arrival
    >= self.patience → >= Fair.patience
        did you write the number instead of self.patience?
    >= self.patience → <= self.patience
        that puts those first who have waited for at most self.patience seconds: at least is >=
    >= self.patience → < self.patience
        that puts those first who have waited for less than self.patience
    >= self.patience → > self.patience
        who has waited for exactly self.patience seconds goes first, too: at least is >=
    """,
    ),
}


def check_fair(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: shortest prompt first, but nobody waits for ever.

    Whoever has waited for `patience` seconds goes first, and of these the one that came first.
    """

    def otherwise(got: Sequence[str], want: Sequence[str], jobs: Any, patience: float) -> str:
        orders = [_admitted(policy, CROWD, seconds) for seconds in PATIENCES]
        if orders[0] == orders[1]:
            return (
                "self.patience changes nothing in your order: did you swap the two rules, or write "
                "a number instead of self.patience?"
            )
        return f"expected {', '.join(want)}"

    told = " or ".join(f"{patience:.2f}" for patience in PATIENCES)
    cases = [*((CROWD, patience) for patience in PATIENCES), EXACTLY]
    cases.append((TURNED, PATIENCES[0]))
    return _check_policy(
        *("fair", policy, Fair, cases, FAIR_SLIPS),
        f"fair: with a patience of {told} s the right one is always next",
        otherwise,
    )
