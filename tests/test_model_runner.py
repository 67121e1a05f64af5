"""From a plan to logits: one forward, the rows that are due, and faults that stay with one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checkpoints import our_logits
from engines import VOCAB, one_thread, random_model, watched
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.memory import RowManager
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.model_runner import ModelRunner, Outcome
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import ScheduledRequest, Scheduler, SchedulerConfig
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import StopChecker

BAD = 13  # the token at which a faulty model stumbles


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small() -> Qwen3ForCausalLM:
    return random_model()


class Bench:
    """Scheduler, rows full of NaN, and the runner; next tokens are given by hand."""

    def __init__(self, model: Qwen3ForCausalLM, budget: int = 64, **how: Any) -> None:
        memory = RowManager.from_config(model.config, CacheConfig(max_seqs=4, max_len=32))
        memory.storage.k.fill_(float("nan"))
        memory.storage.v.fill_(float("nan"))
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(config, memory, VirtualClock().now)
        self.runner = ModelRunner(model, memory.storage, **how)
        self.model = model

    def add(self, name: str, prompt: Sequence[int]) -> Request:
        params = SamplingParams(max_tokens=20)
        request = Request(name, prompt, Sampler(params), StopChecker(params))
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[list[ScheduledRequest], Outcome]:
        """Plan and run; whoever is due a token gets 50 + its number of outputs."""
        scheduled = self.scheduler.schedule()
        outcome = self.runner.run(scheduled)
        result: dict[str, SampledToken | Exception] = {
            share.request.request_id: SampledToken(50 + len(share.request.tokens))
            for share in outcome.ready
        }
        self.known = {s.request.request_id: list(s.request.token_ids) for s in scheduled}
        list(self.scheduler.update(scheduled, result | outcome.faults))
        self.scheduler.check_integrity()
        return scheduled, outcome


def names(shares: Sequence[ScheduledRequest]) -> list[str]:
    return [share.request.request_id for share in shares]


def check(bench: Bench, outcome: Outcome) -> None:
    """Each row of logits is what the model says of that request alone, without a cache."""
    assert outcome.logits.shape == (len(outcome.ready), VOCAB)
    assert outcome.logits.dtype == torch.float32
    for share, row in zip(outcome.ready, outcome.logits, strict=True):
        want = our_logits(bench.model, [bench.known[share.request.request_id]])[-1]
        torch.testing.assert_close(row, want, atol=1e-4, rtol=1e-4)


PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8, 9, 10], "c": [11, 12]}


def bench_with_all(model: Qwen3ForCausalLM, **how: Any) -> Bench:
    bench = Bench(model, **how)
    for name, prompt in PROMPTS.items():
        bench.add(name, prompt)
    return bench


def test_decodes_and_chunks_run_in_one_forward(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small, budget=8)
    with watched(small) as batches:
        for _ in range(3):
            bench.step()
    assert [batch.query_lens for batch in batches] == [(3, 5), (1, 2, 2), (1, 1, 1)]
    assert bench.runner.num_forwards == 3 and bench.runner.num_tokens == 8 + 5 + 3


def test_only_those_who_reach_their_newest_token_have_logits_and_in_order(
    small: Qwen3ForCausalLM,
) -> None:
    bench = bench_with_all(small, budget=8)
    scheduled, outcome = bench.step()
    assert (names(scheduled), names(outcome.ready)) == (["a", "b"], ["a"])
    assert outcome.logits.shape == (1, VOCAB)
    scheduled, outcome = bench.step()
    assert names(scheduled) == names(outcome.ready) == ["a", "b", "c"]
    check(bench, outcome)


def test_one_in_the_middle_that_is_not_due_leaves_the_others_rows_right(
    small: Qwen3ForCausalLM,
) -> None:
    bench = bench_with_all(small)
    bench.scheduler.config = SchedulerConfig(long_prefill_token_threshold=4)
    scheduled, outcome = bench.step()
    assert (names(scheduled), names(outcome.ready)) == (["a", "b", "c"], ["a", "c"])
    check(bench, outcome)


def test_a_forward_from_which_nobody_is_due_has_no_logits(small: Qwen3ForCausalLM) -> None:
    bench = Bench(small, budget=4)
    bench.add("b", PROMPTS["b"])
    _, outcome = bench.step()
    assert outcome.ready == [] and outcome.logits.numel() == 0 and outcome.faults == {}
    assert bench.runner.num_forwards == 1
    _, outcome = bench.step()
    check(bench, outcome)


def test_the_head_computes_only_the_rows_that_are_due(
    small: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, original = [], small.compute_logits

    def counted(hidden: Tensor) -> Tensor:
        asked.append(hidden.shape[0])
        return original(hidden)

    monkeypatch.setattr(small, "compute_logits", counted)
    bench = bench_with_all(small, budget=8)
    for _ in range(3):
        bench.step()
    assert asked == [1, 3, 3]


def test_a_resumed_request_is_computed_again(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small)
    bench.step()
    bench.step()
    bench.scheduler.preempt(bench.scheduler.running[-1])
    scheduled, outcome = bench.step()
    assert [(s.request.request_id, s.num_tokens) for s in scheduled] == [
        ("a", 1),
        ("b", 1),
        ("c", 4),
    ]
    check(bench, outcome)


def test_a_batch_says_what_runs_where(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small, budget=8)
    bench.step()
    batch = bench.runner.batch(bench.scheduler.schedule())
    assert batch.input_ids.tolist() == [50, 9, 10, 11, 12]
    assert batch.positions.tolist() == [3, 5, 6, 0, 1]
    assert (batch.seq_starts, batch.seq_ids) == ((0, 1, 3, 5), (0, 1, 2))
    assert batch.slot_mapping is not None
    assert batch.slot_mapping.tolist() == [3, 32 + 5, 32 + 6, 64, 65]
    assert batch.context_slots == (slice(0, 4), slice(32, 39), slice(64, 66))
    assert bench.runner.num_forwards == 1, "making a batch runs nothing"


def test_an_attention_backend_can_be_handed_in(small: Qwen3ForCausalLM) -> None:
    bench = Bench(small)
    naive = NaiveAttention(cache=bench.scheduler.memory.storage)
    bench.runner = ModelRunner(small, bench.scheduler.memory.storage, naive)
    assert bench.runner.attention is naive
    bench.add("a", PROMPTS["a"])
    for _ in range(3):
        check(bench, bench.step()[1])


def test_nothing_is_kept_for_training() -> None:
    model = random_model().requires_grad_(True)
    with torch.enable_grad():
        _, outcome = bench_with_all(model).step()
    assert not outcome.logits.requires_grad


# -- faults ---------------------------------------------------------------------------------------


@contextmanager
def stumbling(model: Qwen3ForCausalLM, fault: BaseException | None = None) -> Iterator[None]:
    """Inside the block the model fails in its second layer when it meets BAD."""
    met = []

    def look(_: object, args: tuple[Batch]) -> None:
        met.append(bool((args[0].input_ids == BAD).any()))

    def fail(*_: object) -> None:
        if met[-1]:
            raise fault or ArithmeticError("thirteen")

    handles = [
        model.register_forward_pre_hook(look),
        model.model.layers[1].register_forward_pre_hook(fail),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_model_that_raises_fails_the_faulty_one_only(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small)
    bench.add("x", [20, BAD, 21])
    with stumbling(small):
        scheduled, outcome = bench.step()
        assert names(scheduled) == ["a", "b", "c", "x"]
        assert names(outcome.ready) == ["a", "b", "c"]
        assert {key: str(fault) for key, fault in outcome.faults.items()} == {"x": "thirteen"}
        assert bench.runner.num_forwards == 1 + 4
        check(bench, outcome)
        for _ in range(2):
            scheduled, outcome = bench.step()
            assert names(scheduled) == ["a", "b", "c"] and outcome.faults == {}
            check(bench, outcome)
        assert bench.runner.num_forwards == 5 + 2


def test_the_others_logits_are_those_of_a_run_without_it(small: Qwen3ForCausalLM) -> None:
    rows: list[list[Tensor]] = []
    for faulty in (False, True):
        bench = Bench(small)
        bench.add("a", PROMPTS["a"])
        if faulty:
            bench.add("x", [BAD])
        bench.add("c", PROMPTS["c"])
        with stumbling(small):
            rows.append([bench.step()[1].logits for _ in range(3)])
    for without, with_it in zip(*rows, strict=True):
        torch.testing.assert_close(with_it, without, atol=1e-4, rtol=1e-4)


def test_a_fault_in_decode_comes_after_a_good_prefill(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small)
    bench.step()
    bench.scheduler.running[1].token_ids[-1] = BAD
    with stumbling(small):
        _, outcome = bench.step()
    assert (names(outcome.ready), list(outcome.faults)) == (["a", "c"], ["b"])
    check(bench, outcome)


def test_several_may_fail_and_also_all(small: Qwen3ForCausalLM) -> None:
    bench = Bench(small)
    for name, prompt in {"a": [1], "x": [BAD], "y": [BAD, 2]}.items():
        bench.add(name, prompt)
    with stumbling(small):
        _, outcome = bench.step()
    assert (names(outcome.ready), sorted(outcome.faults)) == (["a"], ["x", "y"])
    check(bench, outcome)
    bench = Bench(small)
    bench.add("x", [BAD])
    bench.add("y", [BAD])
    with stumbling(small):
        _, outcome = bench.step()
    assert outcome.ready == [] and sorted(outcome.faults) == ["x", "y"]
    assert bench.runner.num_forwards == 3 and not bench.scheduler.has_unfinished


def test_one_that_is_alone_has_a_second_try_too(small: Qwen3ForCausalLM) -> None:
    bench = Bench(small)
    bench.add("x", [BAD])
    with stumbling(small):
        _, outcome = bench.step()
    assert list(outcome.faults) == ["x"] and bench.runner.num_forwards == 2


def test_a_fault_with_nobody_due_is_a_fault_too(small: Qwen3ForCausalLM) -> None:
    bench = Bench(small, budget=4)
    bench.add("x", [1, BAD])
    bench.add("b", PROMPTS["b"])
    with stumbling(small):
        scheduled, outcome = bench.step()
        assert names(scheduled) == ["x", "b"]
        assert outcome.ready == [] and list(outcome.faults) == ["x"]
        while not outcome.ready:
            _, outcome = bench.step()
    check(bench, outcome)


def test_ids_that_make_no_batch_fail_alone(small: Qwen3ForCausalLM) -> None:
    bench = bench_with_all(small)
    bench.scheduler.waiting[1].token_ids[0] = -4
    _, outcome = bench.step()
    assert names(outcome.ready) == ["a", "c"]
    assert "-4" in str(outcome.faults["b"])
    check(bench, outcome)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_no_fault_and_the_step_can_be_run_again(
    small: Qwen3ForCausalLM, stop: BaseException
) -> None:
    bench = bench_with_all(small)
    bench.add("x", [BAD])
    with stumbling(small, stop), pytest.raises(type(stop)):
        bench.step()
    assert bench.runner.num_forwards == 1
    _, outcome = bench.step()
    assert names(outcome.ready) == ["a", "b", "c", "x"]
    check(bench, outcome)
