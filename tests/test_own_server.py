"""The learner's functions serve requests in the real engine; a wrong one is told and replaced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learners import (
    Spy,
    free_by_emptying,
    greedy,
    named,
    passes,
    raises_at,
    take_by_popping,
)
from tokenizers import Tokenizer

from tutorial_engine import learn
from tutorial_engine.engine.policies import OneByOne
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.ledger import ledger, our_paths
from tutorial_engine.learn import OwnServer
from tutorial_engine.learn.parts.earlier import CHECKS as EARLIER
from tutorial_engine.learn.parts.memory import PARTS_04, PARTS_05
from tutorial_engine.learn.parts.model import PARTS
from tutorial_engine.learn.parts.scheduler import PARTS_03
from tutorial_engine.learn.stories.dry_runs import steps
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import (
    Admitted,
    BlockCopied,
    BlockFreed,
    BlockTaken,
    Preempted,
    Trace,
)

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
TOKENS = 8
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SMALL: dict[str, dict[str, Any]] = {  # so small that a request gives way
    "rows": {},
    "pages": {"num_blocks": 8, "block_size": 4},
    "cells": {"num_cells": 28},
}
LIMITS = {"max_num_batched_tokens": 8, "max_num_seqs": 3}
DONE = "✔ 3 of 3 requests have the tokens that they have alone.\n"


CHECKS: dict[str, Any] = {
    **EARLIER["03"],
    **EARLIER["04"],
    "ShortestFirst": learn.check_shortest,
    "Fair": learn.check_fair,
    "slots_for": learn.check_slots_for,
    "free": learn.check_free,
    "take": learn.check_take,
    "find": learn.check_find,
    "visible": learn.check_visible,
}
RIGHT: dict[str, Any] = {**PARTS_03, **PARTS_04, **PARTS_05}
MEMORY = {
    **dict.fromkeys(PARTS_03, "rows"),
    **dict.fromkeys((*PARTS_04, *PARTS_05), "pages"),
    "visible": "cells",
}


class Serving:
    """A server, and what it printed when it served the three prompts."""

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, capsys: Any) -> None:
        self.model, self.tokenizer, self.capsys = model, tokenizer, capsys

    def of(self, memory: str) -> OwnServer:
        return OwnServer(self.model, self.tokenizer, memory, **SMALL[memory])

    def serve(self, server: OwnServer, params: Any = PARAMS, **limits: Any) -> tuple[Any, str]:
        self.capsys.readouterr()
        run = server.serve(PROMPTS, params, **{**LIMITS, **limits})
        return run, self.capsys.readouterr().out

    def spied(self, server: OwnServer, *names: str) -> dict[str, Spy]:
        """Right parts, handed in."""
        spies = {name: Spy(RIGHT[name]) for name in names}
        for spy in spies.values():
            server.use(spy, passes)
        return spies

    @property
    def ids(self) -> list[list[int]]:
        return [self.tokenizer.encode(prompt).ids for prompt in PROMPTS]

    def check_tokens(self, run: Any) -> None:
        """Those of transformers."""
        got = [list(output.outputs[0].token_ids) for output in run.outputs]
        assert got == [greedy(ids, TOKENS) for ids in self.ids]

    def check_taken_out(
        self, server: OwnServer, name: str, before: set[str], run: Any, said: str
    ) -> None:
        """This part alone, and the package's ran in its place."""
        self.check_tokens(run)
        assert f"  The package's {name} runs in its place.\n" in said and said.count("✘") == 1
        assert set(server.parts.own) == before - {name}
        assert said.endswith(DONE.replace("✔ ", "✔ with the package's part: "))


@pytest.fixture
def serving(model: CausalLM, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> Serving:
    return Serving(model, tokenizer, capsys)


def count(trace: Trace, kind: type) -> int:
    return sum(isinstance(event, kind) for event in trace.events)


# -- the learner's are called --------------------------------------------------------------------


@pytest.mark.parametrize("memory", SMALL)
def test_learners_plan_decides_each_step(serving: Serving, memory: str) -> None:
    server = serving.of(memory)
    spy = serving.spied(server, "plan_step", "num_tokens_to_run")["plan_step"]
    run, said = serving.serve(server)
    serving.check_tokens(run)
    assert f"num_tokens_to_run (inside plan_step), plan_step ({len(spy.calls)} calls)" in said
    asked = {call[2:] for call in spy.calls}
    assert asked - {(8, 3)} == ({(7, 2)} if memory == "pages" else set()), "after a hit again"
    if memory == "rows":  # nobody gives way: what was planned was run
        assert steps(run.trace) == spy.answers
    server.use(named("plan_step", one_token_each), passes)
    slow, said = serving.serve(server)
    assert said.endswith(DONE) and slow.trace.num_steps > run.trace.num_steps, "it decides"
    assert all(set(shares.values()) == {1} for shares in steps(slow.trace))


def one_token_each(running: Any, waiting: Any, budget: int, most: int) -> dict[str, int]:
    return {name: 1 for name, _ in [*running, *waiting][:most]}


def test_learners_num_tokens_to_run_decides_without_a_plan(serving: Serving) -> None:
    server = serving.of("rows")
    spy = serving.spied(server, "num_tokens_to_run")["num_tokens_to_run"]
    run, said = serving.serve(server, long_prefill_token_threshold=3)
    serving.check_tokens(run)
    assert f"num_tokens_to_run ({len(spy.calls)} calls)" in said
    ran = [n for shares in steps(run.trace) for n in shares.values()]
    assert ran == [min(n, 3) for n in spy.answers if n]
    spy.calls.clear()
    run, said = serving.serve(server, enable_chunked_prefill=False, max_num_batched_tokens=16)
    assert not spy.calls and said.endswith(DONE), "whole prompts are another rule, the package's"


def test_learners_metrics_are_asked_of_each_request_with_two_tokens(serving: Serving) -> None:
    server = serving.of("rows")
    spy = serving.spied(server, "ttft_and_tpot")["ttft_and_tpot"]
    run, said = serving.serve(server)
    asked = [(output.metrics.arrival, list(output.metrics.token_times)) for output in run.outputs]
    assert sorted(spy.calls) == sorted(asked)
    _, said = serving.serve(server, replace(PARAMS, max_tokens=1))
    assert "TPOT      -" in said and said.endswith(DONE), "one token has no gap"


def admitted(trace: Trace) -> str:
    return "".join(event.request_id for event in trace.events if isinstance(event, Admitted))


@pytest.mark.parametrize("with_plan", [False, True])
def test_learners_policy_admits_and_the_last_one_used_counts(
    serving: Serving, with_plan: bool
) -> None:
    server, longer = serving.of("rows"), replace(PARAMS, max_tokens=12)
    if with_plan:
        serving.spied(server, "plan_step")
    orders = []
    for name in ("ShortestFirst", "Fair"):
        spy = Spy(RIGHT[name].next_waiting)
        theirs = type(name, (RIGHT[name],), {"next_waiting": lambda self, spy=spy: spy(self)})
        plugged = server.use(theirs, CHECKS[name])
        assert repr(plugged).endswith(f"\nYour {name} runs in the engine now.")
        spy.calls.clear()
        run, said = serving.serve(server, longer, max_num_seqs=1)
        assert said.endswith(DONE) and f"{name} ({len(spy.calls)} calls)" in said
        assert run.trace.settings["policy"] == name
        orders.append(admitted(run.trace))
    assert orders == ["CBA", "CAB"], "A came first, and waited too long"
    server.use(type("Fair", (Scheduler,), {}), CHECKS["Fair"])
    run, said = serving.serve(server, longer, max_num_seqs=1)
    assert admitted(run.trace) == "CAB" and "the package's: " in said, "the package's policy"
    assert type(server.engine(policy=OneByOne).scheduler) is OneByOne


def test_parts_may_call_what_they_are_given_by_the_names_in_the_text(serving: Serving) -> None:
    def find(tokens: list[int], size: int, hash_of: Any, cached: Any) -> Any:
        return RIGHT["find"](tokens, size, lambda h, own: hash_of(parent=h, tokens=own), cached)

    def slots_for(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
        ask, take = lambda one: allocate(request=one), lambda one: preempt(victim=one)
        return RIGHT["slots_for"](request, running, ask, take)

    server = serving.of("pages")
    for part in (find, slots_for):
        assert server.use(part, CHECKS[part.__name__]).verdict.ok
    run, said = serving.serve(server)
    serving.check_tokens(run)
    assert count(run.trace, Preempted) > 0 and "✘" not in said and "find (" in said


def test_learners_blocks_and_attention_serve_from_a_pool_that_preempts(serving: Serving) -> None:
    server = serving.of("pages")
    spies = serving.spied(server, *server.names[1:])
    run, said = serving.serve(server)
    serving.check_tokens(run)
    assert len(spies) == 7 and None in spies["slots_for"].answers, "somebody gave way itself"
    assert count(run.trace, Preempted) > 0 and run.bytes_gathered == 0
    assert "attention copied 0 bytes of K and V\n" in said
    for name, spy in spies.items():
        assert f"{name} ({len(spy.calls):,} calls)" in said
    taken = [event.block for event in run.trace.events if isinstance(event, BlockTaken)]
    freed = [event.block for event in run.trace.events if isinstance(event, BlockFreed)]
    assert spies["take"].answers == taken
    assert [block for call in spies["free"].calls for block in call[0][::-1]] == freed
    kv_lens = {call[4] for call in spies["block_attention"].calls}
    longest = max(len(ids) for ids in serving.ids) + TOKENS - 1
    assert kv_lens == set(range(1, longest + 1))
    assert all(call[0].shape == (32,) for call in spies["block_attention"].calls)
    assert "the package's" not in said


def test_learners_find_is_asked_of_each_prompt_and_not_without_a_prefix_cache(
    serving: Serving,
) -> None:
    server = serving.of("pages")
    spy = serving.spied(server, "find")["find"]
    text = PROMPTS[0] + " " + PROMPTS[1]
    run = server.serve([text, text, PROMPTS[1]], PARAMS, times=[0.0, 9.0, 18.0], num_blocks=32)
    hits = [event.num_cached for event in run.trace.events if isinstance(event, Admitted)]
    assert [4 * len(answer) for answer in spy.answers] == hits and hits[1] > 0
    spy.calls.clear()
    run, said = serving.serve(server, prefix_caching=False)
    assert not spy.calls and said.endswith(DONE)


def test_learners_top_p_is_asked_for_each_token_that_is_drawn(serving: Serving) -> None:
    server, spy = serving.of("rows"), Spy(PARTS["keep_top_p"])
    server.use(spy, passes)
    _, said = serving.serve(server, replace(PARAMS, temperature=1.0, top_p=0.9, seed=1))
    assert said.endswith(DONE) and len(spy.calls) == 3 * TOKENS


@pytest.mark.parametrize("memory", SMALL)
def test_samples_that_share_are_served_by_the_learners_parts(serving: Serving, memory: str) -> None:
    server = serving.of(memory)
    serving.spied(server, "plan_step", "slots", "free", "take", "visible")
    two = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=3, ignore_eos=True)
    run, said = serving.serve(server, two, num_blocks=16, num_cells=64)
    assert said.endswith(DONE) and "✘" not in said
    assert (count(run.trace, BlockCopied) > 0) == (memory == "pages"), "a copy-on-write"


def test_a_row_of_the_ledger_is_the_learners(serving: Serving) -> None:
    server = serving.of("cells")
    paths = {"no cache": our_paths(serving.model)["no cache"], "yours": server.path()}
    assert all(row.ok and row.steps == 18 for row in ledger(paths, serving.ids, num_tokens=6))
    server.use(named("rope", lambda x, angles: PARTS["rope"](x, 1.1 * angles)), passes)
    assert not ledger(paths, serving.ids, num_tokens=6)[1].ok


# -- unusual right parts -------------------------------------------------------------------------


def numpy_plan(*case: Any) -> dict[str, Any]:
    return {name: np.int64(share) for name, share in PARTS_03["plan_step"](*case).items()}


def visible_as_a_set(*case: Any) -> set[Any]:
    return {np.int64(cell) for cell in RIGHT["visible"](*case)}


def attention_in_place(q: Any, k: Any, v: Any, table: Any, n: int) -> Any:
    q *= 1.0
    return PARTS_04["block_attention"](q.double(), k.double(), v.double(), table, n)


UNUSUAL: list[tuple[str, Any]] = [  # those that drive, and what is special in others
    ("plan_step", numpy_plan),
    ("num_tokens_to_run", lambda *case: torch.tensor(PARTS_03["num_tokens_to_run"](*case))),
    ("free", lambda *case: free_by_emptying(*case)),
    ("take", lambda *case: torch.tensor(take_by_popping(*case))),
    ("block_attention", attention_in_place),
    ("visible", visible_as_a_set),
]


@pytest.mark.parametrize(("name", "part"), UNUSUAL, ids=[name for name, _ in UNUSUAL])
def test_unusual_right_part_serves_too(serving: Serving, name: str, part: Any) -> None:
    server = serving.of(MEMORY[name])
    server.use(named(name, part), passes)
    run, said = serving.serve(server)
    serving.check_tokens(run)
    assert "✘" not in said and f"yours: {name} (" in said and said.endswith(DONE)


# -- what is wrong is told and replaced ----------------------------------------------------------


def test_wrong_part_that_calls_a_wrong_one_says_so(serving: Serving) -> None:
    server, names = serving.of("rows"), dict[str, Any]()
    code = "def plan_step(running, *_): return {'A': num_tokens_to_run(9, 0, 8)}\n"
    exec(f"{code}def num_tokens_to_run(a, b, left): return a - b", names)
    told = "it calls your num_tokens_to_run, whose check says ✘"
    plan, check = names["plan_step"], CHECKS["plan_step"]
    assert told not in repr(server.use(plan, check))
    server.use(names["num_tokens_to_run"], CHECKS["num_tokens_to_run"])
    assert f"; {told}\n" in repr(server.use(plan, check))
    names["num_tokens_to_run"] = RIGHT["num_tokens_to_run"]  # mended, and not checked again yet
    assert told not in repr(server.use(plan, check))


class RaisingPolicy(Scheduler):
    def next_waiting(self) -> Request:
        raise KeyError("moth")


@pytest.mark.parametrize("name", CHECKS)
def test_part_that_raises_is_told_and_taken_out(serving: Serving, name: str) -> None:
    server, policies = serving.of(MEMORY[name]), ("ShortestFirst", "Fair")
    alike = {*policies, name, "plan_step"} if name == "num_tokens_to_run" else {*policies, name}
    for other in (one for one in RIGHT if MEMORY[one] == MEMORY[name] and one not in alike):
        server.use(RIGHT[other], passes)
    broken: Any = type(name, (RaisingPolicy,), {}) if name in policies else None
    server.use(broken or raises_at(0, RIGHT[name]), passes)
    before = set(server.parts.own)
    run, said = serving.serve(server, **({"memory_bytes": 60_000} if name == "num_blocks" else {}))
    assert said.startswith(f"✘ your {name} raised KeyError in the engine: 'moth'\n")
    serving.check_taken_out(server, name, before, run, said)


def plan_with(change: Callable[[dict[str, int]], Any]) -> Callable[..., Any]:
    return lambda *case: change(PARTS_03["plan_step"](*case))


class Stranger(Scheduler):
    def next_waiting(self) -> Any:
        return "A"


def stale_take(queue: list[int], hash_of: dict[int, Any], cached: dict[Any, int]) -> int:
    block = queue.pop(0)
    hash_of[block] = None
    return block


def leaves_hashes(queue: list[int], hash_of: dict[int, Any], cached: dict[Any, int]) -> int:
    return RIGHT["take"](queue, dict(hash_of), cached)


def the_first_gives_way(request: Any, running: Any, allocate: Any, preempt: Any) -> Any:
    while (slots := allocate(request)) is None:
        preempt(running[0])
    return slots


WRONG: list[tuple[str, Any, str]] = [  # those that drive; and each argument that a part changes
    ("plan_step", plan_with(lambda shares: None), "gave None, which no step can run"),
    ("plan_step", plan_with(lambda shares: shares | {"Z": 1}), "'Z': 1}, which no step can run"),
    ("plan_step", plan_with(lambda shares: {"A": 10, "B": 7}), "'B': 7}, which no step can run"),
    ("plan_step", lambda r, w, budget, most: {name: 1 for name, _ in [*w, *r]}, "and 2 may run, "),
    ("num_tokens_to_run", lambda n, done, left: n, "gave 10 for request A"),
    ("Fair", Stranger, "next_waiting gave 'A' (str): it must return one of the requests"),
    ("slots_for", lambda request, running, allocate, preempt: None, "did not ask for its slots"),
    ("slots_for", the_first_gives_way, "who is not the last of running"),
    ("block_attention", lambda q, k, v, t, n: k.mul_(2)[0, 0], "wrote to the pool"),
    ("block_attention", lambda q, k, v, t, n: v[t[0], 0], "A and B and C have other tokens"),
    ("block_attention", lambda q, k, v, t, n: v[t].mean((0, 1)), "have other tokens"),  # NaN
    ("num_blocks", lambda *case: 4, "gives another answer for this input:"),
    ("allocate", lambda t, *rest: RIGHT["allocate"](t.copy(), *rest), "your block_table "),
    ("allocate", lambda t, free, *rest: RIGHT["allocate"](t, free.copy(), *rest), "your free_bl"),
    ("free", lambda t, counts, *rest: RIGHT["free"](t, dict(counts), *rest), "your ref_cnt "),
    ("free", lambda t, c, queue, h: RIGHT["free"](t, c, queue.copy(), h), "your free_queue "),
    ("free", lambda t, c, q, h: (RIGHT["free"](t, c, q, h), h.clear()), "your hashes "),
    ("take", lambda queue, hash_of, cached: queue[0], "your free_queue "),
    ("take", leaves_hashes, "your hashes "),
    ("take", stale_take, "your cached "),
]


@pytest.mark.parametrize(("name", "part", "words"), WRONG)
def test_part_that_a_check_let_through_is_found(
    serving: Serving, name: str, part: Any, words: str
) -> None:
    server, kept = serving.of(MEMORY[name]), {"plan_step", "slots", "visible"} - {name}
    serving.spied(server, *(kept - {"plan_step"} if name == "num_tokens_to_run" else kept))
    server.use(type(name, (part,), {}) if isinstance(part, type) else named(name, part), passes)
    before = set(server.parts.own)
    limits = {"max_num_seqs": 2} if "and 2 may run, " in words else {}
    if name == "num_blocks":
        limits = {"memory_bytes": 60_000}
    run, said = serving.serve(server, **limits)
    assert said.startswith("✘ ") and words in said
    serving.check_taken_out(server, name, before, run, said)


def test_an_error_of_the_package_is_not_blamed_on_the_learner(serving: Serving) -> None:
    server = serving.of("pages")
    serving.spied(server, "plan_step", "free")
    for words, prompts, limits in (
        ("max_num_seqs", PROMPTS, {"max_num_seqs": 0}),
        ("tokens", PROMPTS[0] * 200, {}),
        ("3 prompts need as many times, got 1", PROMPTS, {"times": [0.0]}),
    ):
        with pytest.raises(ValueError, match=words):
            server.serve(prompts, PARAMS, **limits)
    assert set(server.parts.own) == {"plan_step", "free"}
    with pytest.raises(ValueError, match="memory must be one of"):
        OwnServer(serving.model, serving.tokenizer, memory="disk")


@pytest.mark.parametrize(
    ("memory", "sizes", "max_tokens", "early"),
    [
        ("pages", {"num_blocks": 12}, 40, "A ended early: it needs 50 slots, the pool has 48.\n"),
        ("pages", {"memory_bytes": 30_000}, 8, "the pool has 12.\nB ended early: it needs 15"),
        ("cells", {"num_cells": 40}, 40, "B ended early: it needs 47 slots, the pool has 40.\n"),
    ],
)
def test_a_pool_too_small_for_one_request_is_no_fault_of_the_parts(
    serving: Serving, memory: str, sizes: dict[str, int], max_tokens: int, early: str
) -> None:
    server = serving.of(memory)
    spies = serving.spied(server, *server.names)
    run, said = serving.serve(server, replace(PARAMS, max_tokens=max_tokens), **sizes)
    assert early in said and said.endswith(DONE.replace(".", ", as far as they came."))
    assert set(server.parts.own) == {*spies} and "✘" not in said
    for ids, output in zip(serving.ids, run.outputs, strict=True):
        room = run.max_len - len(ids)
        assert output.outputs[0].token_ids == greedy(ids, max_tokens)[:room]


def test_requests_may_come_over_time(serving: Serving) -> None:
    server = serving.of("pages")
    spy = serving.spied(server, "plan_step")["plan_step"]
    run = server.serve(PROMPTS, PARAMS, times=[0.5, 0.0, 9.0], **LIMITS)
    assert [output.metrics.arrival for output in run.outputs] == [0.5, 0.0, 9.0]
    assert {len(call[0]) + len(call[1]) for call in spy.calls} == {1}, "each finds an empty engine"
