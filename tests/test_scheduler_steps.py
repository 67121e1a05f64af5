"""What a trace says of a step: the facts of the live engine, and reasons that are the true ones."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from engines import random_model

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine, RequestOutput
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, EngineState, Preempted, Recorder, TokenSampled
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.words import listed

POLICIES = (Scheduler, PrefillFirst, StaticBatching, OneByOne)
PROMPTS = {"A": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "B": [20] * 7, "C": [31, 32, 33]}


class Live:
    """A real engine that is recorded, and what it was at every forward."""

    def __init__(self, policy: type[Scheduler] = Scheduler, memory: Any = None, **limits: int):
        model = random_model()
        config = EngineConfig(**{"max_model_len": 24, **limits})
        clock, recorder = VirtualClock(per_forward=1.0, per_token=0.0), Recorder()
        sizes = {"max_seqs": config.max_num_seqs, "max_len": 24, "trace": recorder}
        rows = (memory or StaticKVCache).from_config(model.config, **sizes)
        self.engine = LLMEngine(
            model, None, config, scheduler=policy, memory=rows, clock=clock, trace=recorder
        )
        self.planned: list[EngineState] = []  # at the forward
        self.after: list[EngineState] = []
        self.outputs: dict[str, RequestOutput] = {}
        self.on_forward: Callable[[], None] = lambda: None
        model.register_forward_pre_hook(self._watch)

    def _watch(self, *_: Any) -> None:
        self.planned.append(self.engine.state())
        self.on_forward()

    def add(self, *names: str, num_tokens: int = 4) -> "Live":
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for name in names:
            self.engine.add_request(PROMPTS[name], params, name)
        return self

    def step(self, times: int = 1) -> "Live":
        for _ in range(times):
            results, ran = self.engine.step(), len(self.planned) > len(self.after)
            self.after += [self.engine.state()] * ran
            for result in results:
                if result.output is not None:
                    self.outputs[result.request_id] = result.output
        return self

    def finish(self) -> "Live":
        while self.engine.has_unfinished_requests:
            self.step()
        return self

    @property
    def run(self) -> SchedulerRun:
        assert self.engine.trace is not None
        return SchedulerRun(self.engine.trace.trace(), {})


def three(policy: type[Scheduler] = Scheduler, **limits: int) -> Live:
    return Live(policy, **{"max_num_seqs": 3, "max_num_batched_tokens": 8, **limits}).add(*"ABC")


class Scarce(StaticKVCache):
    """Room for 16 tokens of all requests together: somebody has to give way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stored: dict[str, int] = {}

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        if sum(self.stored.values()) + num_new > 16:
            return None
        return super().allocate(seq_id, token_ids, num_computed, num_new)

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        self.stored[seq_id] = num_computed

    def free(self, seq_id: str) -> None:
        super().free(seq_id)
        self.stored.pop(seq_id, None)


# -- states ---------------------------------------------------------------------------------------

CASES = [
    (policy, budget, rows, arrive)
    for policy in POLICIES
    for budget, rows, arrive in [(8, 3, 0), (16, 2, 2), (10, 1, 3), (64, 3, 1)]
    if not (policy is PrefillFirst and budget < 10)
]


@cache
def live_of(policy: type[Scheduler], budget: int, rows: int, arrive: int) -> Live:
    live = Live(policy, max_num_seqs=rows, max_num_batched_tokens=budget)
    for name in "ABC":
        live.add(name).step(arrive)
    return live.finish()


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_live_engine_at_its_forward_and_after_it(case: Any) -> None:
    live = live_of(*case)
    found = live.run.steps
    assert [step.number for step in found] == list(range(len(live.planned)))
    assert [step.planned.unfinished() for step in found] == live.planned
    assert [step.after.unfinished() for step in found] == live.after


@pytest.mark.parametrize("case", CASES)
def test_arrival_and_first_token_are_the_engines_with_a_clock_of_one_second_a_step(
    case: Any,
) -> None:
    live = live_of(*case)
    run = live.run
    for name, output in live.outputs.items():
        first, metrics = run.first_token(name), output.metrics
        assert run.came(name) == metrics.arrival and metrics.ttft is not None
        assert first == metrics.arrival + metrics.ttft - 1
        assert run.came(name) == 0 or name in run.to_come(run.came(name) - 1)
        assert name not in run.to_come(run.came(name))


def test_an_engine_that_never_ran_has_nothing_to_show() -> None:
    for live in (Live(), three()):
        with pytest.raises(ValueError, match="no finished step"):
            live.run.steps  # noqa: B018


def test_a_step_that_was_broken_off_is_no_step() -> None:
    live = three().step()

    def interrupt() -> None:
        raise KeyboardInterrupt

    live.on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        live.step()
    live.on_forward = lambda: None
    live.engine.abort("C")
    del live.planned[-1]
    run = live.finish().run
    assert [step.planned.unfinished() for step in run.steps] == live.planned
    assert run.ended(1) == {"C": "abort"} and "C" not in run.steps[1].scheduled
    assert list(run.steps[1].by_request(Admitted)) == ["B"]  # in the plan that was broken off


def test_an_abort_between_steps_belongs_to_the_next_one() -> None:
    live = three().step(3)
    live.engine.abort("A")
    run = live.finish().run
    assert run.ended(3) == {"A": "abort"}
    assert "A" not in run.steps[3].planned.running and run.share("A", 3) is None
    assert "A ends with this step (abort)" in run.caption(3)
    assert run.over(4)["A"] == "abort"


# -- what is counted from it ----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 8, 11, 64])
def test_tokens_are_cached_then_run_then_known_then_sampled_and_nobody_stalls(budget: int) -> None:
    run = three(max_num_batched_tokens=budget).finish().run
    order = ["cached", "run", "known", "sampled"]
    seen: dict[str, int] = dict.fromkeys("ABC", 0)
    for step in run.steps:
        assert not run.doing("stalls", step.number), "the one rule does not do that"
        for name in step.planned.requests:
            kinds = run.token_kinds(name, step.number)
            if name in run.over(step.number):
                assert kinds == ["gone"] * len(run.tokens[name])
                continue
            assert kinds == sorted(kinds, key=order.index)
            assert kinds.count("cached") == seen[name]
            seen[name] += kinds.count("run")
            assert kinds.count("sampled") == (name in step.by_request(TokenSampled))
            yields = "run" in kinds and "known" not in kinds
            assert (name in step.by_request(TokenSampled)) == yields
    assert seen == {name: len(ids) - 1 for name, ids in run.tokens.items()}  # the last never runs


# -- why somebody waits ---------------------------------------------------------------------------


class Overdrawn(Scheduler):
    """Gives each request the whole budget."""

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(request.num_new_tokens, self.config.max_num_batched_tokens + 1)


class Longest(Scheduler):
    """Asks the one with the longest prompt first: not the first of the queue."""

    def next_waiting(self) -> Request:
        return max(self.waiting, key=lambda request: request.num_prompt_tokens)


class Polite(Scheduler):
    """Lets nobody join while somebody runs, and is not called OneByOne."""

    def may_admit(self, plan: StepPlan) -> bool:
        return super().may_admit(plan) and not self.running


WIDE, MIDDLE = {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("policy", "limits", "step", "why"),
    [
        (Scheduler, {}, 0, "no budget is left"),
        (Scheduler, {}, 2, ""),  # nobody waits
        (Scheduler, {"max_num_seqs": 2}, 2, "all 2 places are taken (max_num_seqs)"),
        (Scheduler, {"max_num_seqs": 1}, 1, "the place is taken (max_num_seqs)"),
        (OneByOne, {}, 1, "one runs at a time, and A is not done"),
        (StaticBatching, {"max_num_seqs": 2}, 1, "nobody joins before A and B are done"),
        (StaticBatching, {"max_num_seqs": 2}, 0, "no budget is left"),
        # B is of the batch: it does join before A is done
        (StaticBatching, {"max_num_seqs": 2, "max_num_batched_tokens": 4}, 1, "no budget is left"),
        (StaticBatching, {"max_num_seqs": 1}, 1, "nobody joins before A is done"),
        (
            PrefillFirst,
            MIDDLE,
            0,
            "B must run its 7 tokens in one step, and 6 of the budget are left",
        ),
        (Overdrawn, {}, 0, "no budget is left"),  # it is overdrawn
        (Longest, {}, 0, "no budget is left"),
        (Longest, {"max_num_seqs": 2, **WIDE}, 1, "all 2 places are taken (max_num_seqs)"),
        (Polite, WIDE, 1, "Polite admits nobody else, or no memory is free"),
    ],
)
def test_the_reason_is_the_one_that_the_policy_had(
    policy: type[Scheduler], limits: dict[str, int], step: int, why: str
) -> None:
    run = three(policy, **limits).finish().run
    assert run.why_waiting(step) == why
    if why:
        waiting = run.steps[step].planned.waiting
        assert f"{listed(waiting)} wait{'s' * (len(waiting) == 1)}: {why}" in run.caption(step)


@pytest.mark.parametrize(
    ("policy", "budget", "rows", "admitted"),
    [
        *((Scheduler, 8, 3, "A"), (Scheduler, 9, 3, "A"), (Scheduler, 11, 3, "AB")),
        *((Scheduler, 64, 2, "AB"), (Scheduler, 64, 3, "ABC")),
        *((PrefillFirst, 16, 3, "A"), (PrefillFirst, 17, 3, "AB")),
    ],
)
def test_each_reason_goes_away_with_what_it_blames(
    policy: type[Scheduler], budget: int, rows: int, admitted: str
) -> None:
    run = three(policy, max_num_batched_tokens=budget, max_num_seqs=rows).finish().run
    assert "".join(run.steps[0].by_request(Admitted)) == admitted


class LastOnly(Scheduler):
    """Serves only the newest of those who run."""

    def schedule_running(self, plan: StepPlan) -> None:
        everybody = self.running
        self.running = everybody[-1:]
        super().schedule_running(plan)
        self.running = everybody


def test_a_stall_is_explained_where_it_is_the_policys() -> None:
    run = three(PrefillFirst, max_num_batched_tokens=16).finish().run
    assert run.doing("stalls", 1) == ["A"]
    assert "A stalls: this step only prefills" in run.caption(1)
    assert run.outcome("A", 1) == "runs nothing: this step only prefills"
    run = three(LastOnly, max_num_batched_tokens=64).finish().run
    assert run.doing("stalls", 1) == ["A", "B"]
    assert "A and B stall: the policy gave nothing" in run.caption(1)
    assert run.policy == "LastOnly"


def test_who_gives_way_is_said_and_explains_the_queue() -> None:
    live = Live(memory=Scarce, max_num_seqs=3, max_num_batched_tokens=16)
    run = live.add(*"ACB", num_tokens=6).finish().run
    gave_way = [(step, [*step.by_request(Preempted)]) for step in run.steps]
    assert any(who for _, who in gave_way)
    for step, who in gave_way:
        if who:
            assert run.why_waiting(step.number) == "a step that preempts admits nobody"
            assert step.planned.waiting[0] == who[-1]
            assert run.outcome(who[-1], step.number) == "gives way: no memory is free"
    assert "no memory is free" in {run.why_waiting(step) for step in range(run.last)}


# -- the sentence ---------------------------------------------------------------------------------


def test_captions_of_a_whole_run() -> None:
    run = three().finish().run
    said = [run.caption(step) for step in range(run.last + 1)]
    assert said[0] == (
        "Step 0 of 0–5, one rule: one forward runs 8 of 8 budget tokens for 1 request: A prefill 8 "
        "(2 left, no token yet); B and C wait: no budget is left."
    )
    assert said[2] == (
        "Step 2 of 0–5, one rule: one forward runs 5 of 8 budget tokens for 3 requests: A decode "
        "1, B prefill 1, C prefill 3."
    )
    assert said[5] == (
        "Step 5 of 0–5, one rule: one forward runs 2 of 8 budget tokens for 2 requests: B decode "
        "1, C decode 1; B and C end with this step (length)."
    )
    assert len(set(said)) == len(said)


def test_who_is_still_to_come_is_said() -> None:
    run = Live(max_num_seqs=2).add("A").step(2).add("B").step().add("C").finish().run
    assert "; still to come: B (before step 2) and C (before step 3)." in run.caption(0)
    assert "; still to come: C (before step 3)." in run.caption(2)
    assert "still to come" not in run.caption(3)
