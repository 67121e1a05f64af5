"""Introduced in notebook 03. The checks of notebook 03: each knows the usual mistakes by name."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig
from tutorial_engine.learn.dry_run import Job, dry_run, steps
from tutorial_engine.learn.own_scheduler import Fair, ShortestFirst, Work
from tutorial_engine.learn.own_scheduler import num_tokens_to_run as right_share
from tutorial_engine.learn.own_scheduler import plan_step as right_plan
from tutorial_engine.learn.own_scheduler import ttft_and_tpot as right_metrics
from tutorial_engine.learn.parts import listed, number, whole
from tutorial_engine.learn.verdict import Verdict, guarded, not_done
from tutorial_engine.trace.events import Admitted, Trace

# -- 1. how many tokens

SHARES = {
    "a prompt that fits": (10, 0, 16),
    "a prompt that does not": (40, 0, 24),
    "the rest of a prompt": (40, 24, 63),
    "decode": (11, 10, 5),
    "decode, budget used up": (11, 10, 0),
    "prompt and 5 outputs, all to be computed again": (15, 0, 64),
}


# what to say -> the formula that makes this mistake
SHARE_MISTAKES: dict[str, Callable[[int, int, int], int]] = {
    "take the smaller of the two limits, not the larger": lambda n, done, left: max(n - done, left),
    "that is more than the budget has left": lambda n, done, left: n - done,
    "that is more than the request has left to run": lambda n, done, left: left,
    "some of its tokens are computed already": lambda n, done, left: min(n, left),
    "those are computed; what is not computed yet is to run": lambda n, done, left: min(done, left),
    "a prompt may run in chunks: as many of its tokens as the budget has": lambda n, done, left: (
        n - done if n - done <= left else 0
    ),
    "no special case: a prompt that is half read has more than 1 token left": (
        lambda n, done, left: min(1 if done else n, left)
    ),
    "no special case for those that have begun, and never more than the budget has left": (
        lambda n, done, left: 1 if done else min(n, left)
    ),
}


def check_num_tokens(function: Callable[[int, int, int], object]) -> Verdict:
    """Check a learner's function(num_tokens, num_computed_tokens, budget_left) → tokens to run."""

    def run() -> Verdict:
        answers = []
        for case in SHARES.values():
            answer = function(*case)
            bad = not_done("num_tokens_to_run", answer, function)
            if bad is not None:
                return bad
            if (got := whole(answer)) is None:
                told = f"got {answer!r}, which is no whole number; a step runs whole tokens"
                return Verdict(False, f"num_tokens_to_run: {told}")
            answers.append(got)
        for (what, case), got in zip(SHARES.items(), answers, strict=True):
            want = right_share(*case)
            if got != want:
                same = (
                    words
                    for words, wrong in SHARE_MISTAKES.items()
                    if [wrong(*each) for each in SHARES.values()] == answers
                )
                why = next(same, f"expected {want}")
                return Verdict(False, f"num_tokens_to_run: {what}, {case}: got {got}; {why}")
        return Verdict(
            True, "num_tokens_to_run: a new prompt, the rest of one, and decode: one rule"
        )

    return guarded("num_tokens_to_run", run, function)


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


def check_plan(function: Callable[[Work, Work, int, int], Mapping[str, int]]) -> Verdict:
    """Check a learner's function(running, waiting, budget, max_num_seqs) → {name: tokens}."""

    def run() -> Verdict:
        for running, waiting, budget, most in PLANS:
            answer = function(list(running), list(waiting), budget, most)
            bad = not_done("plan_step", answer, function)
            if bad is not None:
                return bad
            if not isinstance(answer, Mapping):
                told = f"plan_step must return a dict, name -> tokens; got {answer!r}"
                return Verdict(False, told)
            got = {name: whole(share) for name, share in answer.items()}
            want = right_plan(running, waiting, budget, most)
            if got == want:
                continue
            asked = f"running {running}, waiting {waiting}, budget {budget}, at most {most}"
            why = _why_no_plan(got, want, running, waiting, budget, most)
            return Verdict(False, f"plan_step: {asked}: got {dict(answer)}; {why}")
        return Verdict(True, "plan_step: running first, then waiting, within both limits")

    return guarded("plan_step", run, function)


def _why_no_plan(
    got: Mapping[str, int | None],
    want: Mapping[str, int],
    running: Work,
    waiting: Work,
    budget: int,
    most: int,
) -> str:
    left, shares = dict([*running, *waiting]), {k: n for k, n in got.items() if n is not None}
    room = max(0, most - len(running))
    if len(shares) < len(got):
        return "a share is a whole number of tokens"
    if strangers := sorted(shares.keys() - left.keys()):
        return f"there is no request {strangers[0]!r}"
    if {name: n for name, n in shares.items() if n} == want:
        return "leave out who gets nothing"
    if beyond := [name for name, n in shares.items() if n > left[name]]:
        return f"{beyond[0]} has only {left[beyond[0]]} tokens left to run"
    if sum(shares.values()) > budget:
        return f"{sum(shares.values())} tokens are over the budget of {budget}"
    if len(shares.keys() | dict(running).keys()) > most:
        return "more would run than may; those who run already count"
    if any(shares.get(name) == 1 < want.get(name, 0) for name, _ in running):
        return "a request that runs already may have more than 1 token left: run them"
    if shares == right_plan([], [*waiting[:room], *running], budget, most + len(running)):
        return "those who run already come first"
    if sum(shares.values()) < sum(want.values()):
        return "there was budget left, and somebody who may run still has tokens to run"
    return f"expected {dict(want)}"


# -- 3. TTFT and TPOT

TIMES = (
    (0.0, tuple(0.262 + 0.064 * i for i in range(20))),
    (2.0, (2.5, 2.75, 3.5)),
    (1.0, (1.25, 1.5)),
    (0.5, (0.75, 0.8, 0.85, 0.9, 1.5)),  # one long pause: mean and median differ
)


# what to say -> TPOT with this mistake, from the arrival and the times
TPOT_MISTAKES: dict[str, Callable[[float, Sequence[float]], float]] = {
    "TPOT: n tokens have n − 1 gaps": lambda arrival, times: (times[-1] - times[0]) / len(times),
    "TPOT leaves out the first token, which is TTFT's": lambda arrival, times: (
        (times[-1] - arrival) / len(times)
    ),
    "TPOT begins with the first token, not with the arrival": lambda arrival, times: (
        (times[-1] - arrival) / (len(times) - 1)
    ),
    "TPOT is the mean of the gaps, not the median: a long pause counts in full": (
        lambda arrival, times: median(_gaps(times))
    ),
    "TPOT is the mean of the gaps, not the largest": lambda arrival, times: max(_gaps(times)),
    "TPOT is the mean of the gaps, not the smallest": lambda arrival, times: min(_gaps(times)),
    "TPOT is the time for one token, this is the time for all": lambda arrival, times: (
        times[-1] - times[0]
    ),
    "this is tokens per second; TPOT is seconds per token": lambda arrival, times: (
        (len(times) - 1) / (times[-1] - times[0])
    ),
}


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def check_metrics(function: Callable[[float, Sequence[float]], object]) -> Verdict:
    """Check a learner's function(arrival, token_times) → (TTFT, TPOT)."""

    def run() -> Verdict:
        answers = []
        for arrival, times in TIMES:
            answer = function(arrival, list(times))
            bad = not_done("ttft_and_tpot", answer, function)
            if bad is not None:
                return bad
            pair = [found for one in listed(answer) or () if (found := number(one)) is not None]
            if len(pair) != 2:
                return Verdict(False, f"ttft_and_tpot must return two numbers, got {answer!r}")
            answers.append((pair[0], pair[1]))
        for (arrival, times), got in zip(TIMES, answers, strict=True):
            if not _near(got, right_metrics(arrival, times)):
                told = f"{len(times)} tokens, arrival {arrival}"
                return Verdict(False, f"ttft_and_tpot: {told}: {_why_not(answers, arrival, times)}")
        return Verdict(True, "ttft_and_tpot: .262 s, then .064 s a token")

    return guarded("ttft_and_tpot", run, function)


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) < 1e-6 for x, y in zip(a, b, strict=True))  # a float32 is as good


def _why_not(answers: Sequence[tuple[float, float]], arrival: float, times: Sequence[float]) -> str:
    """What is wrong with the answers to TIMES; arrival and times are the first wrong one's."""
    wants = [right_metrics(*case) for case in TIMES]
    ttft, tpot = right_metrics(arrival, times)
    got_ttft, got_tpot = zip(*answers, strict=True)
    want_ttft, want_tpot = zip(*wants, strict=True)
    if _near(got_ttft, want_tpot) and _near(got_tpot, want_ttft):
        return "these are TPOT and TTFT; TTFT comes first"
    if _near(got_ttft, [1000 * x for x in want_ttft]):
        return "the times are in seconds, and so are TTFT and TPOT: do not turn them into ms"
    if not _near(got_ttft, want_ttft):
        if _near(got_ttft, [case[1][0] for case in TIMES]):
            return "TTFT counts from the arrival"
        return f"TTFT is the time from the arrival to the first token: {ttft:.3f} s"
    same = (
        words
        for words, wrong in TPOT_MISTAKES.items()
        if _near(got_tpot, [wrong(*case) for case in TIMES])
    )
    return next(same, f"TPOT is the mean time from one token to the next: {tpot:.4f} s")


# -- 4. the budget

GAPS = (26.0, 40.0, 60.7)  # ms


def check_budget(
    function: Callable[[float], object], longest_gap: Callable[[int], float]
) -> Verdict:
    """Check a learner's function(max_gap_ms) → token budget in an engine.

    `longest_gap(budget)` runs it and gives the longest gap in ms.
    """

    def run() -> Verdict:
        tried = []
        for most in GAPS:
            answer = function(most)
            bad = not_done("largest_budget", answer, function)
            if bad is not None:
                return bad
            told, budget = f"largest_budget({most:g}): got {answer!r}", whole(answer)
            if isinstance(answer, float) and answer.is_integer():  # 26.0 // 1
                budget = int(answer)
            if budget is None or budget < 1:
                why = "a budget is a whole number of tokens, at least 1"
                return Verdict(False, f"{told}; {why}")
            if (gap := longest_gap(budget)) > most + 1e-6:
                return Verdict(False, f"{told}; with it the longest gap is {gap:.0f} ms")
            if (gap := longest_gap(budget + 1)) <= most + 1e-6:
                why = f"with {budget + 1} the longest gap is {gap:.0f} ms: that is short enough too"
                return Verdict(False, f"{told}; {why}")
            tried.append(f"{budget} for {most:g} ms")
        return Verdict(True, f"largest_budget: {', '.join(tried)}; the engine keeps each")

    return guarded("largest_budget", run, function)


# -- 5. and 6. policies

JOBS = (Job("A", 10, 6), Job("B", 7, 3), Job("C", 3, 5), Job("D", 40, 4, 2), Job("E", 5, 8, 3))
ONE_PLACE = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
SHORT_ONES = tuple(Job(f"s{i}", 3, 6, 4 * i) for i in range(12))
PATIENCES = (0.1505, 0.3505)  # never exactly how long somebody has waited
LATER = (Job("o", 3, 6, 100), Job("M", 30, 4, 101), Job("n", 3, 6, 102))  # nobody waits for long
# K comes a little later than L, and is shorter; both wait while short ones come
CROWD = (Job("s", 3, 6), Job("L", 40, 4, 1), Job("K", 20, 4, 2), *SHORT_ONES[1:], *LATER)


class _Told(Exception):
    """The verdict is clear in the middle of a run."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def _watched(policy: type[Scheduler], **attributes: object) -> type[Scheduler]:
    """The policy with an eye on what its `next_waiting` returns, and what it does to the queue."""

    def next_waiting(self: Scheduler) -> Request:
        before = list(self.waiting)
        chosen: object = policy.next_waiting(self)
        bad = not_done("next_waiting", chosen, policy.next_waiting)
        if bad is not None:
            raise _Told(bad)
        if not isinstance(self.waiting, deque):
            told = f"self.waiting is a {type(self.waiting).__name__} now; it must stay a deque"
        elif not any(chosen is request for request in before):
            told = f"return one of the requests in self.waiting, a Request; got {chosen!r}"
        elif len(self.waiting) < len(before):
            told = "it takes the request out of self.waiting; the scheduler does that: return it"
        else:
            assert isinstance(chosen, Request), "it is one of those that wait"
            return chosen
        raise _Told(Verdict(False, f"next_waiting: {told}"))

    return type(policy.__name__, (policy,), {"next_waiting": next_waiting, **attributes})


def _admitted(policy: type[Scheduler], jobs: Sequence[Job]) -> list[str]:
    """In which order a policy admits the jobs, one at a time."""
    trace: Trace = dry_run(policy, jobs, ONE_PLACE)
    return [event.request_id for event in trace.events if isinstance(event, Admitted)]


def _check_policy(
    name: str, policy: object, judge: Callable[[type[Scheduler]], Verdict]
) -> Verdict:
    if not (isinstance(policy, type) and issubclass(policy, Scheduler)):
        return Verdict(False, f"{name}: hand over the class, a Scheduler; got {policy!r}")

    def run() -> Verdict:
        try:
            return judge(policy)
        except _Told as told:
            return told.verdict
        except AttributeError as error:
            if "sort" not in str(error):
                raise
            hint = f"{error}; min(self.waiting, key=...) finds the smallest without sorting"
            return Verdict(False, f"{name}: {hint}")

    verdict = guarded("next_waiting", run, policy.next_waiting)
    if verdict.ok:
        alone = [dry_run(kind, JOBS[:1], ONE_PLACE) for kind in (policy, Scheduler)]
        if steps(alone[0]) != steps(alone[1]):
            return Verdict(False, f"{name}: one request alone runs unlike ours")
    return verdict


def check_shortest(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: of those who wait, the shortest prompt is admitted first."""
    sizes = {job.name: job.prompt_len for job in JOBS}

    def judge(policy: type[Scheduler]) -> Verdict:
        order, want = _admitted(_watched(policy), JOBS), _admitted(ShortestFirst, JOBS)
        if order == want:
            return Verdict(True, f"shortest first: admitted {', '.join(order)}")
        by_prompt = sorted(sizes, key=sizes.__getitem__)
        if order == sorted(order):
            why = "that is first come, first served"
        elif order[0] in by_prompt[-2:]:
            why = "that begins with the longest"
        else:
            why = f"expected {want}; num_prompt_tokens says how long a prompt is"
        told = ", ".join(f"{name} ({sizes[name]})" for name in order)
        return Verdict(False, f"shortest first: admitted {told}; {why}")

    return _check_policy("shortest first", policy, judge)


class _OldestFirst(Scheduler):
    """Whoever came first, however long it has waited."""


class _ShortestOfTheLate(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() - one.arrival >= self.patience]
        return min(late or self.waiting, key=lambda one: one.num_prompt_tokens)


class _NewestOfTheLate(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() - one.arrival >= self.patience]
        return late[-1] if late else super().next_waiting()


class _AbsoluteTime(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() >= self.patience]
        return late[0] if late else super().next_waiting()


class _ByArrivalTime(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if one.arrival >= self.patience]
        return min(late, key=lambda one: one.arrival) if late else super().next_waiting()


class _TurnedRound(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() - one.arrival < self.patience]
        return min(late, key=lambda one: one.arrival) if late else super().next_waiting()


class _OwnNumber(Fair):
    def next_waiting(self) -> Request:
        late = [one for one in self.waiting if self.now() - one.arrival >= Fair.patience]
        return min(late, key=lambda one: one.arrival) if late else ShortestFirst.next_waiting(self)


UNFAIR: dict[type[Scheduler], str] = {
    ShortestFirst: "L still starves: whoever has waited for self.patience seconds goes first",
    _OldestFirst: "that is first come, first served: while nobody has waited for self.patience "
    "seconds, the shortest prompt is next",
    _ShortestOfTheLate: "of those who have waited for so long, the one that came first is next: "
    "by arrival, not by length",
    _NewestOfTheLate: "of those who have waited for so long, the one that came first is next, not "
    "the last one",
    _AbsoluteTime: "how long a request has waited is self.now() - request.arrival, not self.now()",
    _ByArrivalTime: "how long a request has waited is self.now() - request.arrival, not "
    "request.arrival",
    _OwnNumber: "did you write the number instead of self.patience?",
    _TurnedRound: "that puts those first who have waited for less than self.patience",
}


def check_fair(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: shortest prompt first, but nobody waits for ever.

    Whoever has waited for `patience` seconds goes first, and of these the one that came first.
    """

    def judge(policy: type[Scheduler]) -> Verdict:
        orders = []
        for patience in PATIENCES:
            order = _admitted(_watched(policy, patience=patience), CROWD)
            want = _admitted(_watched(Fair, patience=patience), CROWD)
            orders.append(want)
            if order == want:
                continue
            told = f"fair: patience {patience} s, admitted {', '.join(order)}"
            same = (
                words
                for wrong, words in UNFAIR.items()
                if _admitted(_watched(wrong, patience=patience), CROWD) == order
            )
            expected = f"expected {', '.join(want)}"
            if orders[0] == order and len(orders) > 1:
                expected = "did you write the number instead of self.patience?"
            return Verdict(False, f"{told}; {next(same, expected)}")
        told = " or ".join(f"{patience:.2f}" for patience in PATIENCES)
        return Verdict(True, f"fair: with a patience of {told} s the right one is always next")

    return _check_policy("fair", policy, judge)
