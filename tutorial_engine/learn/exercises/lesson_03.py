"""The checks of notebook 03, and what they know of usual mistakes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.exercises.facts import AsIs, shown, where_raised
from tutorial_engine.learn.exercises.judge import Slips, judge, read_numbers, slips_of
from tutorial_engine.learn.exercises.verdict import (
    CannotBe,
    Told,
    Verdict,
    guarded,
    has_gap,
    is_open,
    must_answer,
    names_in,
    open_verdict,
)
from tutorial_engine.learn.parts.holder import whole_tokens
from tutorial_engine.learn.parts.scheduler import Fair, ShortestFirst, Work, waiting_first
from tutorial_engine.learn.parts.scheduler import num_tokens_to_run as right_share
from tutorial_engine.learn.parts.scheduler import plan_step as right_plan
from tutorial_engine.learn.parts.scheduler import ttft_and_tpot as right_metrics
from tutorial_engine.learn.stories.dry_runs import Job, dry_run, steps
from tutorial_engine.trace.events import Admitted, Trace


def _asked(function: Callable[..., object], *case: Any) -> object:
    """Its answer. None is told, with what it was asked."""
    given = ", ".join(map(repr, case))  # before the function may change it
    answer = function(*case)
    if answer is None and not has_gap(function):
        name = getattr(function, "__name__", "it")
        why = f"{name}({given}) returns None: does every way through it end with a `return`?"
        raise Told(Verdict(False, why))
    return answer


def _tokens(answer: object) -> int | AsIs:
    """A whole number of tokens; of anything else a text, which is like no number, even of True."""
    found = whole_tokens(answer)
    return AsIs(" ".join(repr(answer).split())) if found is None else found


# -- 1. how many tokens

SHARES = (
    (3, 0, 5),  # a prompt that fits
    (5, 0, 3),  # a prompt that does not
    (9, 4, 8),  # the rest of a prompt
    (9, 4, 3),  # the rest, and it does not fit
    (10, 2, 8),  # both limits are equal
    (8, 7, 5),  # decode
    (8, 7, 1),  # decode, with the last token of the budget
    (8, 7, 0),  # decode, budget used up
    (40, 0, 24),
    (40, 24, 63),
    (15, 0, 64),  # prompt and 5 outputs, all to be computed again
)
SHARE_SLIPS: Slips = slips_of(
    right_share,
    """
    min( → max(
        gives the larger of the two limits; both limits hold, so the smaller one counts
    min(num_tokens - num_computed_tokens, budget_left) → num_tokens - num_computed_tokens
        gives all that the request has left to run; it cannot run more than the budget has left
    min(num_tokens - num_computed_tokens, budget_left) → budget_left
        gives all that the budget has left; a request cannot run more than it has left
    num_tokens - num_computed_tokens → num_tokens
        acts as if none of its tokens were computed yet; computed tokens do not run again
    num_tokens - num_computed_tokens, budget_left) → num_tokens, budget_left) - num_computed_tokens
        subtracts what is computed from what fits into the budget; the budget limits what is left to
        run
    num_tokens - num_computed_tokens, budget_left) → num_tokens, budget_left - num_computed_tokens)
        subtracts what is computed from the budget; computed tokens take nothing from this step's
        budget
    num_tokens - num_computed_tokens → num_computed_tokens
        takes the computed tokens for those that are left; the tokens that are not computed are left
    return min( → return (
    , budget_left) → - budget_left)
        gives the difference of the two limits; the smaller limit counts
    return min( → return max(0, budget_left - (
    , budget_left) → ))
        gives what the request leaves of the budget; what it runs is asked for
    num_tokens - num_computed_tokens → num_computed_tokens - num_tokens
        subtracts the known tokens from the computed ones; known − computed are left to run
    min(num_tokens - num_computed_tokens → 1 if num_computed_tokens else min(num_tokens
        runs 1 token as soon as some are computed, also with a budget of 0; both limits always hold
    min(num_tokens - num_computed_tokens, budget_left) → 1 if num_computed_tokens else num_tokens
        runs 1 token as soon as some are computed, and all of them before; both limits always hold
    num_tokens - num_computed_tokens → 1 if num_computed_tokens else num_tokens
        runs 1 token as soon as some are computed; a prompt that is half read has more left to run
    """,
) | {
    "runs 1 token also with a budget of 0; a budget that is used up has no token left": (
        lambda *case: max(1, right_share(*case))
    ),
    "runs nothing where the budget is too small for all that is left; a prompt may run in chunks": (
        lambda n, done, left: n - done if n - done <= left else 0
    ),
}


def check_num_tokens(function: Callable[[int, int, int], object]) -> Verdict:
    """Check a learner's function(num_tokens, num_computed_tokens, budget_left) → tokens to run."""
    return judge(
        *("num_tokens_to_run", function, right_share, SHARES, SHARE_SLIPS),
        "num_tokens_to_run: a new prompt, the rest of one, and decode: one rule",
        call=_asked,
        read=_tokens,
    )


# -- 2. a step

PLANS: tuple[tuple[Work, Work, int, int], ...] = (
    ([], [("A", 2)], 3, 1),
    ([], [("A", 3)], 2, 1),  # one chunk of a prompt
    ([("A", 3)], [], 9, 1),  # the rest of a prompt
    ([("A", 1)], [("B", 1)], 1, 4),  # nothing is left for B
    ([("A", 1)], [("B", 1)], 2, 4),  # exactly one token is left for B
    ([("A", 1)], [("B", 1)], 9, 1),  # no place is left for B
    ([], [("A", 2), ("B", 1)], 9, 1),  # one place
    ([], [("A", 3), ("B", 2)], 4, 4),
    ([("A", 1)], [("B", 1), ("C", 2)], 9, 2),
    ([], [("A", 10), ("B", 7), ("C", 3)], 8, 4),
    ([], [("A", 3), ("B", 2), ("C", 9)], 8, 4),
    ([("A", 2)], [("B", 7), ("C", 3)], 8, 4),
    ([("A", 1), ("B", 1)], [("C", 3), ("D", 2)], 64, 3),
    ([("A", 1), ("B", 30), ("C", 1)], [("D", 2)], 16, 4),
    ([("A", 1), ("B", 1)], [("C", 3)], 2, 4),
    ([("A", 1), ("B", 1)], [("C", 3)], 64, 2),
)


PLAN_SLIPS: Slips = slips_of(
    right_plan,
    """
    in [*running → in [*((name, 1) for name, _ in running)
        gives those who run 1 token each; a prompt that is half read goes on with as many as fit
    in [*running → in sorted([*running
    len(running))]]: → len(running))]], key=lambda one: one[1]):
        lets those with fewer tokens left go first; the order is that of the lists
    budget -= shares[name] →
        gives each as many tokens as if the budget were for it alone; all requests share the budget
    budget -= shares[name] → budget -= left
        takes from the budget what a request has left; only what it runs is gone
    if budget: → if left <= budget:
        gives nothing to those who do not fit as a whole; a part of a prompt may run, too
    if budget: → if True:
        puts those who run nothing into the plan, with 0 tokens; the plan has only those who run
    [: max(0, max_num_seqs - len(running))] →
        lets all who wait run; no more than `max_num_seqs` requests have a place
    max(0, max_num_seqs - len(running)) → max_num_seqs
        lets `max_num_seqs` of those who wait run; those who run have places, too
    """,
) | {"lets those who wait go first; those who run come first, and keep their places": waiting_first}


def check_plan(function: Callable[[Work, Work, int, int], Mapping[str, int]]) -> Verdict:
    """Check a learner's function(running, waiting, budget, max_num_seqs) → {name: tokens}."""

    def call(function: Callable[..., object], *case: Any) -> object:
        again = deepcopy(case)
        try:
            return _asked(function, *case)
        except Told:
            raise
        except Exception as error:
            if (said := _none_inside(function, *again)) is None:
                raise
            raised = f"plan_step raised {type(error).__name__}: {error}; {said}"
            why = f"{raised}\n{where_raised(error, function)}".rstrip()
            raise Told(Verdict(False, why)) from error

    def read(answer: object) -> object:
        if not isinstance(answer, Mapping):
            raise CannotBe(f"it must return a dict, {{name: tokens}}, got {shown(answer)}")
        return {name: _tokens(share) for name, share in answer.items()}

    return judge(
        *("plan_step", function, right_plan, PLANS, PLAN_SLIPS),
        "plan_step: running first, then waiting, within both limits",
        call=call,
        read=read,
        also={
            "in yours": _no_plan,
            "inside": lambda _, *case: _none_inside(function, *case),
        },
    )


def _no_plan(
    got: Mapping[str, int], running: Work, waiting: Work, budget: int, most: int
) -> str | None:
    """What a plan has that none may have, or lacks; None if only the order is another."""
    if (tokens := sum(got.values())) > budget:
        return f"{tokens} tokens, and the budget is {budget}"
    if (places := len(got.keys() | dict(running).keys())) > most:
        return f"{places} requests have a place, and max_num_seqs is {most}"
    if idle := [name for name, share in got.items() if share == 0]:
        return f"{idle[0]} with 0 tokens; who runs nothing must not be in the plan"
    for name, left in [*running, *waiting[: max(0, most - len(running))]]:
        if tokens < budget and got.get(name, 0) < left:
            runs = f"runs {got[name]} of {left} tokens" if name in got else "does not run"
            return f"{name} {runs}, and the budget has {budget - tokens} left"
    return None


def _none_inside(function: Any, *case: Any) -> str | None:
    """Which function of the learner's gave None when this one called it for a case."""
    if not isinstance(function, FunctionType):
        return None
    code, known = function.__code__, function.__globals__
    gave_none: list[str] = []

    def watched(name: str, inner: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            if (answer := inner(*args, **named)) is None:
                given = [*map(repr, args), *(f"{key}={value!r}" for key, value in named.items())]
                why = ": it is not done yet" if is_open(inner) else ""
                gave_none.append(f"it calls {name}({', '.join(given)}), which gave None{why}")
            return answer

        return call

    called = {
        name: watched(name, known[name])
        for name in names_in(function)
        if isinstance(known.get(name), FunctionType)
    }
    copy = FunctionType(
        code, known | called, argdefs=function.__defaults__, closure=function.__closure__
    )
    with suppress(Exception):
        copy(*case)
    return gave_none[0] if gave_none else None


# -- 3. TTFT and TPOT

TIMES = (
    (1.0, (1.5, 1.75)),  # two tokens
    (0.5, (1.5, 1.75, 2.0, 2.5)),  # a mean gap of 1/3, which no rounding leaves as it is
    (2.0, (2.5, 3.0, 3.25, 5.25, 6.0, 7.0)),  # gaps: first, last, mean and median all differ
    (0.0, tuple(0.262 + 0.064 * i for i in range(20))),
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
        gives TPOT first, and TTFT second; TTFT comes first
    return ttft, tpot → return 1000 * ttft, 1000 * tpot
        gives milliseconds; seconds are asked for
    times[0] - arrival → times[0]
        counts TTFT from the time 0 on; it begins with the arrival
    / len(gaps) → / len(times)
        divides by the n tokens for TPOT; n tokens have n − 1 gaps between them
    sum(gaps) / len(gaps) → (times[-1] - arrival) / len(times)
        counts TPOT from the arrival on, and divides by n; TPOT is the mean of the n − 1 gaps
        between tokens
    sum(gaps) / len(gaps) → (times[-1] - arrival) / len(gaps)
        counts TPOT from the arrival on; the time up to the first token belongs to TTFT
    sum(gaps) / len(gaps) → sorted(gaps)[len(gaps) // 2]
        gives the median of the gaps as TPOT; TPOT is their mean, so a long gap counts in full
    sum(gaps) / len(gaps) → max(gaps)
        gives the largest gap as TPOT; TPOT is the mean of all gaps
    sum(gaps) / len(gaps) → min(gaps)
        gives the smallest gap as TPOT; TPOT is the mean of all gaps
    sum(gaps) / len(gaps) → gaps[0]
        gives the first gap as TPOT; TPOT is the mean of all gaps
    sum(gaps) / len(gaps) → gaps[-1]
        gives the last gap as TPOT; TPOT is the mean of all gaps
    / len(gaps) →
        gives the time of all gaps together as TPOT; TPOT is the mean time of one gap
    sum(gaps) / len(gaps) → len(gaps) / sum(gaps)
        gives tokens per second as TPOT; TPOT is seconds per token
    """,
)


def check_metrics(function: Callable[[float, Sequence[float]], object]) -> Verdict:
    """Check a learner's function(arrival, token_times) → (TTFT, TPOT)."""
    return judge(
        *("ttft_and_tpot", function, right_metrics, TIMES, METRIC_SLIPS),
        "ttft_and_tpot: TTFT 0.262 s, TPOT 0.064 s",
        call=_asked,
        tolerance=1e-6,  # a float32 is as good
        read=read_numbers(2, "it must return two numbers"),
    )


# -- 4. the budget

GAPS = (26.0, 30.0, 60.7)  # ms


def check_budget(
    function: Callable[[float], object], longest_gap: Callable[[int], float]
) -> Verdict:
    """Check a learner's function(max_gap_ms) → token budget in an engine.

    `longest_gap(budget)` runs it and gives the longest gap in ms.
    """

    def budget_for(max_gap: float) -> str:
        answer = function(max_gap)
        must_answer("largest_budget", answer, function)
        got, budget = f"for {max_gap:g} ms got {answer!r}", whole_tokens(answer)  # 26.0 // 1
        if budget is None or budget < 1:
            raise CannotBe(f"{got}; a budget is a whole number of tokens, at least 1")
        if (gap := longest_gap(budget)) > max_gap + 1e-6:
            raise CannotBe(f"{got}; with it the longest gap is {gap:.0f} ms")
        # without a tolerance: who searches by measuring has seen 26.00000000000002 with 16
        if (gap := longest_gap(budget + 1)) <= max_gap:
            more = f"with {budget + 1} the longest gap is {gap:.0f} ms"
            raise CannotBe(f"{got}; {more}: that is short enough too")
        more = f" ({budget + 1} fits as well: only a rounding error puts it above {max_gap:g} ms)"
        return f"{budget} for {max_gap:g} ms{more if gap <= max_gap + 1e-6 else ''}"

    def run() -> Verdict:
        tried = ", ".join(map(budget_for, GAPS))
        return Verdict(True, f"largest_budget: {tried}; the engine keeps each")

    return guarded("largest_budget", run, function)


# -- 5. and 6. policies


class Waits(NamedTuple):
    """A request that waits when a policy is asked."""

    name: str
    num_tokens: int  # of its prompt
    seconds: float

    def __repr__(self) -> str:
        return f"{self.name} ({self.num_tokens}) for {self.seconds:.4g} s"


Turns = list[list[Waits]]  # who waits, each time that a policy is asked
ONE_PLACE = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64)
JOBS = (
    Job("A", 10, 6),
    Job("B", 7, 3),
    Job("C", 3, 5),
    Job("D", 40, 4, 2),
    Job("E", 5, 8, 3),
    Job("F", 5, 2, 4),
)
SHORT_CASES = (
    ((Job("A", 3, 1), Job("B", 2, 5)), 0.0),
    ((Job("A", 2, 4), Job("B", 5, 1, 1), Job("C", 5, 1, 2)), 0.0),  # B and C are equally short
    ((Job("A", 2, 4), Job("B", 5, 1, 1), Job("C", 9, 1, 2)), 0.0),
    ((Job("A", 2, 4), Job("B", 9, 1, 1), Job("C", 5, 1, 2)), 0.0),
    (JOBS, 0.0),
)
SHORT_ONES = tuple(Job(f"s{i}", 3, 6, 4 * i) for i in range(12))
PATIENCES = (0.1505, 0.3505)  # never exactly how long somebody has waited
LATER = (Job("o", 3, 6, 100), Job("M", 30, 4, 101), Job("n", 3, 6, 102))  # nobody waits for long
CROWD = (Job("s", 3, 6), Job("L", 40, 4, 1), Job("K", 20, 4, 2), *SHORT_ONES[1:], *LATER)
TURNED = (Job("s", 3, 6), Job("K", 20, 4, 1), Job("L", 40, 4, 2), *SHORT_ONES[1:])  # K is first
S = Job("s", 3, 6)  # is served until 0.068 s; step 1 begins at 0.013 s, and then one each 0.011 s
FAIR_CASES = (
    # when n comes s is served, and L has waited for exactly 0.014 s: one step of 4 tokens
    ((Job("s", 4, 1), Job("L", 40, 4), Job("n", 2, 6, 1)), 0.014),
    ((Job("s", 4, 1), Job("L", 40, 4), Job("n", 2, 6, 1)), 0.5),  # nobody has waited for so long
    ((S, Job("A", 5, 1, 1), Job("B", 5, 1, 2)), 0.5),  # nobody, and they are equally short
    ((S, Job("L", 9, 1, 1), Job("K", 5, 1, 2)), 0.02),  # both have
    ((S, Job("K", 5, 1, 1), Job("L", 9, 1, 2)), 0.02),  # both, and the shorter one came first
    ((S, Job("L", 9, 1, 1), Job("K", 5, 1, 4)), 0.04),  # L alone has
    ((S, Job("L", 9, 1, 3), Job("K", 5, 1, 4)), 0.06),  # nobody, but it is later than 0.06 s
    ((Job("s", 4, 1), Job("L", 9, 1, 3), Job("K", 5, 1, 3)), 0.5),  # no time at all
    # L has waited for long, and came at a time, in seconds, that is more than n has tokens
    ((Job("s", 3, 200), Job("L", 9, 1, 100), Job("n", 1, 1, 190)), 0.5),
    *((CROWD, patience) for patience in PATIENCES),
    (TURNED, PATIENCES[0]),
)


def _watched(policy: type[Scheduler], turns: Turns, **attributes: object) -> type[Scheduler]:
    """The policy; who waits when its `next_waiting` is asked is noted in `turns`."""

    def next_waiting(self: Scheduler) -> Request:
        now = self.now()
        turns.append(
            [
                Waits(request.request_id, request.num_prompt_tokens, now - request.arrival)
                for request in self.waiting
            ]
        )
        return policy.next_waiting(self)

    def check_choice(self: Scheduler, request: object) -> None:
        try:
            policy.check_choice(self, request)
        except ValueError as error:
            raise ValueError(f"{error}; these waited: {_listed(turns[-1])}") from None
        if not isinstance(self.waiting, deque):
            kind = type(self.waiting).__name__
            raise CannotBe(f"self.waiting is a {kind} now; it must stay a deque")

    methods = {"next_waiting": next_waiting, "check_choice": check_choice}
    return type(policy.__name__, (policy,), {**methods, **attributes})


def _listed(waits: Sequence[Waits]) -> str:
    """Who waits, in words; the first one with all of them."""
    return ", ".join(map(repr, waits)).replace(")", " tokens)", 1)


def _admitted(policy: Any, jobs: Sequence[Job], patience: float) -> list[str]:
    """In which order a policy admits the jobs, one at a time."""
    return _admitted_from(policy, jobs, patience)[0]


def _admitted_from(policy: Any, jobs: Sequence[Job], patience: float) -> tuple[list[str], Turns]:
    """In which order a policy admits the jobs, and who waited at each turn."""
    turns: Turns = []
    trace: Trace = dry_run(_watched(policy, turns, patience=patience), jobs, ONE_PLACE)
    return [event.request_id for event in trace.events if isinstance(event, Admitted)], turns


def _check_policy(
    name: str,
    policy: Any,
    right: type[Scheduler],
    cases: Sequence[tuple[Sequence[Job], float]],
    slips: Mapping[str, Any],
    done: str,
) -> Verdict:
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        return Verdict(False, f"{name}: hand over the class, a Scheduler; got {policy!r}")

    if (bad := open_verdict("next_waiting", policy.next_waiting)) is not None:
        return bad

    def alone(policy: type[Scheduler]) -> str:
        mine, ours = (dry_run(kind, JOBS[:1], ONE_PLACE) for kind in (policy, Scheduler))
        return "" if steps(mine) == steps(ours) else "one request alone runs unlike ours"

    def inputs(jobs: Sequence[Job], patience: float) -> dict[str, object]:
        sizes = [f"{job.name} ({job.prompt_len})" for job in jobs]
        sizes[0] = f"{jobs[0].name} ({jobs[0].prompt_len} tokens)"
        come = AsIs(
            ", ".join(
                f"{who} in step {job.from_step}" for who, job in zip(sizes, jobs, strict=True)
            )
        )
        return {"arrive": come} | ({"patience": patience} if right is Fair else {})

    def waited(got: Sequence[str], jobs: Sequence[Job], patience: float) -> str:
        """Who waited at the first turn that differs: until then all is the same."""
        want, turns = _admitted_from(right, jobs, patience)
        at = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        return _listed(turns[at])

    return judge(
        *(name, policy, right, cases, slips, done),
        call=_admitted,
        inputs=inputs,
        also={"then waited": waited},
        then=alone,
        body=policy.next_waiting,
    )


SHORTEST_SLIPS: Mapping[str, Any] = {
    "goes by arrival; of those who wait, the shortest prompt is next": Scheduler,
    **slips_of(
        ShortestFirst,
        """
    min( → max(
        admits the longest prompt first; the shortest prompt is next
    request.num_prompt_tokens) → -request.arrival)
        admits who came last, however long the prompts are; the shortest prompt is next
    request.num_prompt_tokens) → (request.num_prompt_tokens, -request.arrival))
        admits who came last of equally short ones; the first to arrive is next
    """,
    ),
}


def check_shortest(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: of those who wait, the shortest prompt is admitted first."""
    order = ", ".join(_admitted(ShortestFirst, JOBS, 0.0))
    return _check_policy(
        *("shortest first", policy, ShortestFirst, SHORT_CASES, SHORTEST_SLIPS),
        f"shortest first: admitted {order}",
    )


FAIR_SLIPS: Mapping[str, Any] = {
    "always admits the shortest prompt; who waited for `self.patience` goes before all others": (
        ShortestFirst
    ),
    "always goes by arrival; until somebody has waited for `self.patience`, the shortest is next": (
        Scheduler
    ),
    **slips_of(
        Fair,
        """
    request.arrival) → request.num_prompt_tokens)
        admits the shortest of those who have waited for so long; the first of them to arrive is
        next
    min(late, key=lambda request: request.arrival) → max(late, key=lambda r: r.num_prompt_tokens)
        admits the longest of those who have waited for so long; the first of them to arrive is next
    min(late, → max(late,
        admits the last of those who have waited for so long; the first of them to arrive is next
    super().next_waiting() → min(self.waiting, key=lambda r: (r.num_prompt_tokens, -r.arrival))
        admits who came last of equally short ones; the first to arrive is next
    min(late, → min(self.waiting,
    request: request.arrival) → one: one.arrival if one in late else one.num_prompt_tokens)
        compares the time at which one request came with the prompt length of another; who has
        waited for so long goes first, whatever the two numbers are
    self.now() - request.arrival >= → 1000 * (self.now() - request.arrival) >=
        counts the wait in milliseconds; `self.patience` is in seconds
    self.now() - request.arrival >= → self.now() >=
        goes by arrival as soon as self.now() is `self.patience`; what counts is how long a request
        has waited
    self.now() - request.arrival >= → request.arrival >=
        puts those first who ARRIVED at `self.patience` or later; what counts is how long one has
        waited
    >= self.patience → >= Fair.patience
        acts as with a patience of 0.1; the limit is `self.patience`, whatever its value is
    >= self.patience → <= self.patience
        puts those first who have waited for `self.patience` or LESS; those who have waited for at
        least so long go first
    >= self.patience → < self.patience
        puts those first who have waited for LESS than `self.patience`; who has waited for at least
        so long goes first
    >= self.patience → > self.patience
        does not put those first who have waited for exactly `self.patience`; this is long enough
    """,
    ),
}


def check_fair(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: shortest prompt first, but nobody waits for ever.

    Whoever has waited for `patience` seconds goes first, and of these the one that came first.
    """
    seconds = " or ".join(f"{patience:.2f}" for patience in PATIENCES)
    return _check_policy(
        *("fair", policy, Fair, FAIR_CASES, FAIR_SLIPS),
        f"fair: with a patience of {seconds} s the right one is always next",
    )
