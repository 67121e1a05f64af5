"""n continuations of one prompt: the prompt is computed once, and each is as if it were alone."""

from collections.abc import Sequence
from typing import Any

import pytest
from checkpoints import random_sequences
from engines import VOCAB, poison, random_model
from memories import check_empty
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import RequestOutput, StepOutput
from tutorial_engine.engine.runner import make_runner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.events import (
    Admitted,
    BlockCopied,
    CellsShared,
    Forked,
    Recorder,
    Trace,
)
from tutorial_engine.trace.history import Replay
from tutorial_engine.trace.pool import snapshots

PROMPT = random_sequences([11], VOCAB, seed=3)[0]
OTHERS = random_sequences([7, 9], VOCAB, seed=4)
WARM = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
MAPS = ("rows", "pages of 1", "pages of 4", "pages of 16", "cells")


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return random_model(3)


def memory_of(kind: str, model: Qwen3ForCausalLM, num_slots: int = 128) -> KVMemory:
    """A poisoned memory of this kind, with a recorder."""
    config, trace = model.config, Recorder()
    if kind == "rows":
        return poison(StaticKVCache.from_config(config, max_seqs=8, max_len=64, trace=trace))
    if kind == "cells":
        return poison(CellKVCache.from_config(config, num_slots, trace=trace))
    size = int(kind.split()[-1])
    blocks = {"block_size": size, "num_blocks": num_slots // size}
    return poison(PagedKVCache.from_config(config, **blocks, trace=trace))


def engine_on(
    kind: str,
    model: Qwen3ForCausalLM,
    num_slots: int = 128,
    policy: type[Scheduler] = Scheduler,
    **limits: Any,
) -> LLMEngine:
    return LLMEngine(
        model,
        config=EngineConfig(**{"max_model_len": 64} | limits),
        scheduler=policy,
        memory=memory_of(kind, model, num_slots),
        clock=VirtualClock(),
    )


def alone(model: Qwen3ForCausalLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list:
    """Token ids of each sample, from the loop without a scheduler."""
    runner = make_runner(model, max_len=64)
    each = [params.sample(i) for i in range(params.n)]
    return [tokens(generate(runner, [prompt], own)[0])[0] for own in each]


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [one.token_ids for one in output.outputs]


def run_and_check(engine: LLMEngine, max_steps: int = 300) -> dict[str, RequestOutput]:
    """Step to the end; integrity, and the replay against the live engine, after every step."""
    outputs, told, seen = {}, Replay(), 0
    while engine.has_unfinished_requests:
        assert engine.num_steps < max_steps, "this goes on for ever"
        for result in engine.step():
            if result.output is not None:
                outputs[result.request_id] = result.output
        engine.check_integrity()
        trace = trace_of(engine)
        for event in trace.events[seen:]:
            told.apply(event)
        seen = len(trace.events)
        assert told.state.unfinished() == engine.state(), "the replay differs"
    assert Trace.from_json(trace.to_json()) == trace
    assert not engine.requests
    check_empty(engine.memory)
    return outputs


def trace_of(engine: LLMEngine) -> Trace:
    assert engine.trace is not None
    return engine.trace.trace()


def count(engine: LLMEngine, kind: type) -> int:
    return sum(isinstance(event, kind) for event in trace_of(engine).events)


@pytest.mark.parametrize("kind", MAPS)
def test_each_sample_is_as_if_alone(kind: str, model: Qwen3ForCausalLM) -> None:
    want = alone(model, WARM)
    assert len({ids[:4] for ids in want}) == 3, "they differ early"
    engine = engine_on(kind, model)
    engine.add_request(PROMPT, WARM, "A")
    output = run_and_check(engine)["A"]
    assert tokens(output) == want
    assert [one.index for one in output.outputs] == [0, 1, 2]
    ran, once = engine.runner.num_tokens, 11 + 11 + 2 * (1 + 11)
    assert ran == (once if kind != "rows" else 3 * (11 + 11)), "the prompt runs once, if shared"
    shared = [e.num_tokens for e in trace_of(engine).events if isinstance(e, Forked)]
    assert shared == ([0, 0] if kind == "rows" else [10, 10])


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("most", [1, 2])
def test_the_parent_may_end_with_its_first_token(
    kind: str, most: int, model: Qwen3ForCausalLM
) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=most, ignore_eos=True)
    engine = engine_on(kind, model)
    engine.add_request(PROMPT, params, "A")
    assert tokens(run_and_check(engine)["A"]) == alone(model, params)


def test_samples_stand_before_all_who_wait(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 4", model, max_num_seqs=1)
    engine.add_request(PROMPT, WARM, "A")
    engine.add_request(OTHERS[0], SamplingParams(max_tokens=2), "B")
    engine.step()
    assert engine.state().waiting == ("A.1", "A.2", "B")
    ended = [out.request_id for out in engine.run()]
    assert ended == ["A", "B"]


def test_pages_copy_the_open_block_once_for_each_sample_but_one(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 16", model)
    engine.add_request(PROMPT, WARM, "A")
    run_and_check(engine)
    assert count(engine, BlockCopied) == 2


def test_cells_are_shared_without_moving_data(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("cells", model)
    assert isinstance(engine.memory, CellKVCache)
    engine.add_request(PROMPT, WARM, "A")
    engine.step()
    engine.step()
    owners = [len(engine.memory.table[cell].owners) for cell in range(11)]
    assert owners == [3] * 10 + [1], "the last prompt token is each one's own"
    assert count(engine, CellsShared) == 2
    run_with_others = 11 + 1 + 2 * 1
    assert engine.memory.table.num_used == run_with_others
    engine.run()
    check_empty(engine.memory)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_abort_ends_all_samples(kind: str, after: int, model: Qwen3ForCausalLM) -> None:
    engine = engine_on(kind, model, max_num_batched_tokens=8)
    engine.add_request(PROMPT, WARM, "A")
    engine.add_request(OTHERS[0], SamplingParams(max_tokens=4, ignore_eos=True), "B")
    for _ in range(after):
        engine.step()
    engine.abort("A")
    engine.check_integrity()
    outputs = {out.request_id: out for out in engine.run()}
    assert [one.finish_reason for one in outputs["A"].outputs] == ["abort"] * 3
    got = tokens(outputs["A"])
    assert [own == all_[: len(own)] for own, all_ in zip(got, alone(model, WARM), strict=True)]
    assert outputs["B"].outputs[0].finish_reason == "length"
    check_empty(engine.memory)


def test_abort_works_when_the_first_sample_is_over(model: Qwen3ForCausalLM) -> None:
    """The stop token is one that only sample 0 meets early."""
    want = alone(model, WARM)
    first, others = want[0], {token for ids in want[1:] for token in ids[:6]}
    stop = next(i for i, token in enumerate(first[:6]) if token not in others)
    params = SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, stop_token_ids=[first[stop]]
    )
    engine = engine_on("pages of 4", model)
    engine.add_request(PROMPT, params, "A")
    seen = []
    while not any(result.finish for result in seen):
        seen += engine.step()
    assert [(r.sample, r.output) for r in seen if r.finish] == [(0, None)]
    with pytest.raises(ValueError, match="here already"):
        engine.add_request(PROMPT, request_id="A")
    engine.abort("A")
    (output,) = engine.run()
    assert [one.finish_reason for one in output.outputs] == ["stop", "abort", "abort"]
    assert output.metrics.finished == engine.clock.now()
    check_empty(engine.memory)
    engine.add_request(PROMPT, SamplingParams(max_tokens=1), "A")


class _Fails(Sampler):
    def sample(self, logits: Tensor) -> SampledToken:
        raise RuntimeError("no")


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_sample_that_fails_ends_alone(kind: str, which: int, model: Qwen3ForCausalLM) -> None:
    engine = engine_on(kind, model)
    samplers = [_Fails(WARM.sample(i)) if i == which else Sampler(WARM.sample(i)) for i in range(3)]
    engine.add_request(PROMPT, WARM, "A", sampler=samplers)
    output = run_and_check(engine)["A"]
    reasons = [one.finish_reason for one in output.outputs]
    assert reasons == ["error" if i == which else "length" for i in range(3)]
    assert output.error == "RuntimeError: no"
    want = alone(model, WARM)
    assert all(own in ((), full) for own, full in zip(tokens(output), want, strict=True))


def test_a_first_sample_that_never_ran_leaves_the_others_a_whole_prompt(
    model: Qwen3ForCausalLM,
) -> None:
    """The model refuses the whole request in its first chunk: the others run it themselves."""
    engine = engine_on("pages of 4", model, max_num_batched_tokens=4)
    engine.add_request(PROMPT, WARM, "A")
    engine.step()
    engine._inbox.deliver([engine._fail(engine.requests["A"], RuntimeError("gone"))])
    assert engine.state().waiting == ("A.1", "A.2")
    engine.check_integrity()
    outputs = {out.request_id: out for out in engine.run()}
    assert tokens(outputs["A"]) == [(), *alone(model, WARM)[1:]]
    check_empty(engine.memory)


def test_leaving_a_stream_ends_all_samples(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 4", model)
    for number, _ in enumerate(engine.stream([PROMPT], WARM)):
        if number == 3:
            break
    assert not engine.requests
    check_empty(engine.memory)


def test_a_prefix_found_in_the_cache_is_forked_as_well(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 4", model)
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    (output,) = engine.generate([PROMPT], WARM)
    assert tokens(output) == alone(model, WARM)
    found = [e.num_cached for e in trace_of(engine).events if isinstance(e, Admitted)]
    assert found == [0, 8, 10, 10]


def test_what_cannot_be_is_refused(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 4", model)
    with pytest.raises(ValueError, match="n must be from 1"):
        SamplingParams(n=0)
    with pytest.raises(ValueError, match="temperature 0 is 2 times the same"):
        SamplingParams(n=2)
    with pytest.raises(ValueError, match="one continuation a prompt; n 3"):
        generate(model, [PROMPT], WARM)
    with pytest.raises(ValueError, match="3 continuations, but 1 samplers"):
        engine.add_request(PROMPT, WARM, sampler=Sampler(WARM))
    engine.add_request(PROMPT, SamplingParams(max_tokens=1), "A.1")
    with pytest.raises(ValueError, match=r"'A\.1' is here already"):
        engine.add_request(PROMPT, WARM, "A")
    assert engine.requests.keys() == {"A.1"}
    engine.run()


def test_a_callback_that_raises_at_a_samples_end_is_told_by_the_output_of_all(
    model: Qwen3ForCausalLM,
) -> None:
    def raises(result: StepOutput) -> None:
        if result.finish is not None and result.output is None:
            raise RuntimeError("gone")

    engine = engine_on("pages of 4", model)
    engine.add_request(PROMPT, WARM, "A", on_token=raises)
    (output,) = engine.run()
    assert output.error == "RuntimeError: gone"
    assert tokens(output) == alone(model, WARM)
    check_empty(engine.memory)


@pytest.mark.parametrize("kind", MAPS)
def test_a_pool_is_told_as_it_was_before_a_failed_request_gave_back(
    kind: str, model: Qwen3ForCausalLM
) -> None:
    """Its slots were written in this step, though nobody holds them when the step ends."""
    engine = engine_on(kind, model)
    engine.add_request(PROMPT, SamplingParams(), "A", sampler=_Fails(SamplingParams()))
    engine.add_request(OTHERS[0], SamplingParams(max_tokens=2, ignore_eos=True), "B")
    run_and_check(engine)
    usage = [snapshot.usage for snapshot in snapshots(trace_of(engine))]
    assert usage[0].used == len(PROMPT) + len(OTHERS[0]) and usage[1].used == len(OTHERS[0]) + 1
    assert all(one.reserved >= 0 and one.free >= 0 for one in usage)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_abort_that_a_callback_breaks_off_is_done_all_the_same(
    after: int, model: Qwen3ForCausalLM
) -> None:
    def breaks(result: StepOutput) -> None:
        if result.token is None:
            raise KeyboardInterrupt

    engine = engine_on("pages of 4", model)
    engine.add_request(PROMPT, WARM, "A", on_token=breaks)
    for _ in range(after):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.abort("A")
    assert (not engine.requests and not engine.has_unfinished_requests) or engine.run()
    engine.check_integrity()
    assert not engine.requests
    check_empty(engine.memory)
    engine.add_request(PROMPT, WARM, "A")


def test_a_callback_that_aborts_its_request_is_not_told_of_it(model: Qwen3ForCausalLM) -> None:
    heard: list[int] = []

    def aborts(result: StepOutput) -> None:
        heard.append(result.sample)
        engine.abort(result.request_id)

    engine = engine_on("cells", model)
    engine.add_request(PROMPT, WARM, "A", on_token=aborts)
    (output,) = engine.run()
    assert heard == [0] and output.error is None
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 3
    check_empty(engine.memory)


def test_samples_do_not_overtake_the_preempted_nor_older_samples(
    model: Qwen3ForCausalLM,
) -> None:
    engine = engine_on("rows", model, max_num_seqs=2)
    engine.add_request(PROMPT, WARM, "A")
    engine.add_request(OTHERS[0], WARM, "B")
    engine.add_request(OTHERS[1], SamplingParams(max_tokens=2), "C")
    engine.step()
    assert engine.state().waiting == ("A.1", "A.2", "B.1", "B.2", "C")
    engine.run()
    engine.add_request(OTHERS[0], SamplingParams(max_tokens=4), "P")
    engine.step()
    engine.add_request(PROMPT, WARM, "A")
    engine.add_request(OTHERS[1], SamplingParams(max_tokens=2), "C")
    engine.scheduler.preempt(engine.requests["P"])
    engine.scheduler.fork(engine.requests["A"])
    assert engine.state().waiting == ("P", "A.1", "A.2", "A", "C")
    engine.run()
    check_empty(engine.memory)


def test_a_prompt_that_fills_its_last_block_costs_a_copy_for_each_child(
    model: Qwen3ForCausalLM,
) -> None:
    engine = engine_on("pages of 4", model)
    engine.add_request(PROMPT[:8], WARM, "A")
    assert tokens(run_and_check(engine)["A"]) == alone(model, WARM, PROMPT[:8])
    copies = [event for event in trace_of(engine).events if isinstance(event, BlockCopied)]
    assert [(e.request_id, len(e.slots)) for e in copies] == [("A.1", 3), ("A.2", 3)]


def test_a_number_as_id_is_one_that_leaves_room_for_its_samples(model: Qwen3ForCausalLM) -> None:
    engine = engine_on("pages of 4", model)
    engine.add_request(PROMPT, SamplingParams(max_tokens=1), "r0.1")
    assert engine.add_request(PROMPT, WARM) == "r1"
    engine.run()
    with pytest.raises(ValueError, match="n must be from 1 to 1024"):
        SamplingParams(n=10**9, temperature=1.0)
