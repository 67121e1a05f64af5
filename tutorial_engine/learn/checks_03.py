"""Introduced in notebook 03. The checks of notebook 03: each knows the usual mistakes by name."""

from collections.abc import Callable, Mapping, Sequence

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig
from tutorial_engine.learn.dry_run import Job, dry_run, steps
from tutorial_engine.learn.verdict import Verdict, guarded, not_done
from tutorial_engine.trace.events import Admitted, Trace

Work = Sequence[tuple[str, int]]  # (name, tokens left to run)


def check_num_tokens(function: Callable[[int, int, int], int]) -> Verdict:
    """Check a learner's function(num_tokens, num_computed_tokens, budget_left) → tokens to run."""
    cases = {
        "a prompt that fits": (10, 0, 16),
        "a prompt that does not": (40, 0, 24),
        "the rest of a prompt": (40, 24, 63),
        "decode": (11, 10, 5),
        "decode, budget used up": (11, 10, 0),
        "prompt and 5 outputs, all to be computed again": (15, 0, 64),
    }

    def run() -> Verdict:
        for what, (known, computed, budget) in cases.items():
            got, want = function(known, computed, budget), min(known - computed, budget)
            bad = not_done("num_tokens_to_run", got)
            if bad is not None:
                return bad
            if got == want and isinstance(got, int) and not isinstance(got, bool):
                continue
            if not isinstance(got, int) or isinstance(got, bool):
                return Verdict(False, f"num_tokens_to_run: got {got!r}, which is no whole number")
            mistakes = {
                known - computed: "that is more than the budget has left",
                budget: "that is more than the request has left to run",
                min(known, budget): "some of its tokens are computed already",
            }
            why = mistakes.get(got, f"expected {want}")
            case = f"{what}, {known, computed, budget}"
            return Verdict(False, f"num_tokens_to_run: {case}: got {got}; {why}")
        return Verdict(True, "num_tokens_to_run: prefill, chunk, decode and recompute, one rule")

    return guarded("num_tokens_to_run", run)


def check_plan(function: Callable[[Work, Work, int, int], Mapping[str, int]]) -> Verdict:
    """Check a learner's function(running, waiting, budget, max_num_seqs) → {name: tokens}."""
    cases: tuple[tuple[Work, Work, int, int], ...] = (
        ([], [("A", 10), ("B", 7), ("C", 3)], 8, 4),
        ([], [("A", 3), ("B", 2), ("C", 9)], 8, 4),
        ([("A", 2)], [("B", 7), ("C", 3)], 8, 4),
        ([("A", 1), ("B", 1)], [("C", 3)], 8, 4),
        ([("A", 1), ("B", 1)], [("C", 3), ("D", 2)], 64, 3),
        ([("A", 1), ("B", 30), ("C", 1)], [("D", 2)], 16, 4),
        ([("A", 1), ("B", 1)], [("C", 3)], 2, 4),
    )

    def want_of(running: Work, waiting: Work, budget: int, most: int, first: bool) -> dict:
        """The rule; with `first` the mistake of letting the waiting go first."""
        room = max(0, most - len(running))
        order = [*waiting[:room], *running] if first else [*running, *waiting[:room]]
        planned = {}
        for name, left in order:
            planned[name] = min(left, budget)
            budget -= planned[name]
        return {name: n for name, n in planned.items() if n}

    def run() -> Verdict:
        for running, waiting, budget, most in cases:
            got = function(list(running), list(waiting), budget, most)
            bad = not_done("plan", got)
            if bad is not None:
                return bad
            if not isinstance(got, Mapping):
                return Verdict(False, f"plan must return a dict, name -> tokens; got {got!r}")
            want = want_of(running, waiting, budget, most, first=False)
            if dict(got) == want:
                continue
            where = f"plan: running {running}, waiting {waiting}, budget {budget}, at most {most}"
            if {name: n for name, n in got.items() if n} == want:
                why = "leave out who gets nothing"
            elif sum(got.values()) > budget:
                why = f"{sum(got.values())} tokens are over the budget of {budget}"
            elif len({*got, *(name for name, _ in running)}) > most:
                why = "more would run than may; those who run already count"
            elif dict(got) == want_of(running, waiting, budget, most, first=True):
                why = "those who run already come first"
            elif sum(got.values()) < sum(want.values()):
                why = "there was budget left, and somebody who may run still has tokens to run"
            else:
                why = f"expected {want}"
            return Verdict(False, f"{where}: got {dict(got)}; {why}")
        return Verdict(True, "plan: running first, then waiting, within both limits")

    return guarded("plan", run)


def check_metrics(function: Callable[[float, Sequence[float]], tuple[float, float]]) -> Verdict:
    """Check a learner's function(arrival, token_times) → (TTFT, TPOT)."""
    even = tuple(0.262 + 0.064 * i for i in range(20))

    def run() -> Verdict:
        for arrival, times in ((0.0, even), (2.0, (2.5, 2.75, 3.5)), (1.0, (1.25, 1.5))):
            got = function(arrival, list(times))
            bad = not_done("ttft_and_tpot", got)
            if bad is not None:
                return bad
            pair = isinstance(got, tuple | list) and len(got) == 2
            if not pair or not all(isinstance(number, float | int) for number in got):
                return Verdict(False, f"ttft_and_tpot must return two numbers, got {got!r}")
            right = RequestMetrics(arrival, None, times)
            assert right.ttft is not None and right.tpot is not None
            if abs(got[0] - right.ttft) < 1e-9 and abs(got[1] - right.tpot) < 1e-9:
                continue
            n = len(times)
            if abs(got[0] - right.tpot) + abs(got[1] - right.ttft) < 1e-9:
                why = "these are TPOT and TTFT; TTFT comes first"
            elif abs(got[0] - right.ttft) > 1e-9:
                near = abs(got[0] - times[0]) < 1e-9
                why = "TTFT counts from the arrival" if near else f"TTFT is {right.ttft:.3f} s"
            elif abs(got[1] - (times[-1] - times[0]) / n) < 1e-9:
                why = f"TPOT: {n} tokens have {n - 1} gaps"
            elif abs(got[1] - (times[-1] - arrival) / n) < 1e-9:
                why = "TPOT leaves out the first token, which is TTFT's"
            else:
                why = f"TPOT is {right.tpot:.4f} s"
            return Verdict(False, f"ttft_and_tpot: {n} tokens, arrival {arrival}: {why}")
        return Verdict(True, "ttft_and_tpot: .262 s, then .064 s a token")

    return guarded("ttft_and_tpot", run)


class OurShortestFirst(Scheduler):
    """What exercise 4 asks for."""

    def next_waiting(self) -> Request:
        """As Scheduler.next_waiting: the one with the shortest prompt."""
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)


JOBS = (Job("A", 10, 6), Job("B", 7, 3), Job("C", 3, 5), Job("D", 40, 4, 2), Job("E", 5, 8, 3))
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)


class _NotDone(Exception):
    """The learner's method still returns None."""


def _watched(policy: type[Scheduler], method: str) -> type[Scheduler]:
    """The policy, with an eye on one method."""

    def watch(self: Scheduler, *args: object) -> object:
        got = getattr(policy, method)(self, *args)
        if got is None or got is Ellipsis:
            raise _NotDone
        if method == "next_waiting" and not isinstance(got, Request):
            raise ValueError(f"return one of self.waiting, a request, not {got!r}")
        if method == "num_tokens_to_run" and args and got > args[0].num_new_tokens:  # type: ignore[attr-defined]
            raise ValueError("that is more than the request has left to run (num_new_tokens)")
        return got

    return type(policy.__name__, (policy,), {method: watch})


def check_budget(policy: type[Scheduler]) -> Verdict:
    """Check a learner's mended scheduler: no step above the budget, and no other plan than ours."""

    def run() -> Verdict:
        budget = LIMITS.max_num_batched_tokens
        try:
            theirs = steps(dry_run(_watched(policy, "num_tokens_to_run"), JOBS, LIMITS))
        except _NotDone:
            return Verdict(None, "not done yet: num_tokens_to_run returns None")
        for number, ran in enumerate(theirs):
            total = sum(ran.values())
            if total > budget:
                told = ", ".join(f"{name} {n}" for name, n in ran.items())
                return Verdict(False, f"budget: step {number} runs {told} = {total} > {budget}")
        ours = steps(dry_run(Scheduler, JOBS, LIMITS))
        if theirs != ours:
            i = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            return Verdict(False, f"budget: step {i} runs {theirs[i]}, it could run {ours[i]}")
        return Verdict(True, f"budget: {len(ours)} steps, none above {budget} tokens")

    return guarded("budget", run)


def check_shortest(policy: type[Scheduler]) -> Verdict:
    """Check a learner's policy: of those who wait, the shortest prompt is admitted first."""
    one_place = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8)
    sizes = {job.name: job.prompt_len for job in JOBS}

    def admitted(trace: Trace) -> list[str]:
        return [event.request_id for event in trace.events if isinstance(event, Admitted)]

    def run() -> Verdict:
        try:
            order = admitted(dry_run(_watched(policy, "next_waiting"), JOBS, one_place))
        except _NotDone:
            return Verdict(None, "not done yet: next_waiting returns None")
        want = ["C", "E", "B", "A", "D"]
        if order != want:
            told = ", ".join(f"{name} ({sizes[name]})" for name in order)
            why = "that is first come, first served" if order == sorted(order) else ""
            if order[::-1] == want or order[0] == "A":
                why = why or "that begins with the longest"
            return Verdict(False, f"shortest first: admitted {told}; {why or f'expected {want}'}")
        if steps(dry_run(policy, JOBS[:1], one_place)) != steps(
            dry_run(Scheduler, JOBS[:1], one_place)
        ):
            return Verdict(False, "shortest first: one request alone runs unlike ours")
        return Verdict(True, f"shortest first: admitted {', '.join(order)}")

    return guarded("shortest first", run)
