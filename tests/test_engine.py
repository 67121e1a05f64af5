"""The engine from outside: who comes, who goes, what is delivered, and what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import poison, random_model
from tokenizers import Tokenizer
from workloads import (
    LIMITS,
    POOL_SIZE,
    alone,
    pool,
    same_as_alone,
    small_model,
    the_tokenizer,
)

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import RequestOutput, StepOutput
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.events import Recorder, StepEnded

LIMIT = max(LIMITS)
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9, 9, 9, 8, 2, 6, 1, 8, 0]]


def make(**options: Any) -> LLMEngine:
    """A small engine on the small model; keywords of LLMEngine by name, the rest is its config."""
    names = ("scheduler", "memory", "clock", "trace", "runner")
    own = {name: options.pop(name) for name in names if name in options}
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": LIMIT, **options}
    own.setdefault("clock", VirtualClock())
    return LLMEngine(small_model(), the_tokenizer(), EngineConfig(**options), **own)


def free_rows(engine: LLMEngine) -> int:
    return engine.memory.num_free_rows  # type: ignore[attr-defined]


def as_alone(output: RequestOutput, index: int) -> None:
    (got,) = output.outputs
    same_as_alone(output.request_id, got, index)


def asked(indices: Sequence[int]) -> tuple[list[Any], list[SamplingParams]]:
    return [pool()[i].prompt for i in indices], [pool()[i].params for i in indices]


# -- add_request and step -------------------------------------------------------------------------


def by_id(output: RequestOutput) -> str:
    return output.request_id


def test_an_id_that_is_here_is_refused_and_free_again_afterwards() -> None:
    engine = make()
    engine.add_request(PROMPTS[0], FIVE, "a")
    engine.step()
    for prompt in PROMPTS[:2]:
        with pytest.raises(ValueError, match="'a' is here already"):
            engine.add_request(prompt, FIVE, "a")
        engine.check_integrity()
    assert list(engine.requests) == ["a"]
    (first,) = engine.run()
    assert engine.add_request(PROMPTS[0], FIVE, "a") == "a"
    (second,) = engine.run()
    assert first.outputs == second.outputs


def test_text_and_token_ids_are_the_same_prompt() -> None:
    engine = make()
    ids = the_tokenizer().encode("+X?").ids
    assert max(ids) < 112
    text, tokens = engine.generate(["+X?", ids], FIVE)
    assert text.prompt_token_ids == tokens.prompt_token_ids == tuple(ids)
    assert text.outputs == tokens.outputs
    assert engine.generate("+X?", FIVE)[0].outputs == text.outputs


def test_one_forward_serves_all() -> None:
    engine = make(max_num_batched_tokens=64)
    for prompt in PROMPTS:
        engine.add_request(prompt, FIVE)
    with watched(small_model()) as batches:
        engine.run()
    assert [batch.num_seqs for batch in batches] == [3] * 5
    assert [batch.num_tokens for batch in batches] == [16, 3, 3, 3, 3]
    assert engine.num_steps == engine.runner.num_forwards == 5
    assert engine.runner.num_tokens == 16 + 4 * 3


def test_step_returns_a_token_for_each_that_got_one() -> None:
    engine = make(max_num_batched_tokens=6)
    engine.add_request(PROMPTS[0], FIVE, "a")
    engine.add_request(PROMPTS[2], FIVE, "b")
    got = [[result.request_id for result in engine.step()] for _ in range(4)]
    # budget 6: {a 5, b 1}, {a 1, b 5}, {a 1, b 3: the last of 9}, {a 1, b 1}
    assert got == [["a"], ["a"], ["a", "b"], ["a", "b"]]
    ends = [(r.request_id, r.finish) for r in engine.step() if r.finish]
    assert [name for name, _ in ends] == ["a"]


# -- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("budget", [1, 7, 500])
def test_generate_answers_in_the_order_of_the_prompts(rows: int, budget: int) -> None:
    engine = make(max_num_seqs=rows, max_num_batched_tokens=budget)
    order = list(range(0, POOL_SIZE, 3))
    outputs = engine.generate(*asked(order))
    assert len(outputs) == len(order)
    for index, output in zip(order, outputs, strict=True):
        as_alone(output, index)
    assert not engine.has_unfinished_requests and free_rows(engine) == rows


def test_progress_shows_a_bar_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    want = make().generate(PROMPTS, FIVE)
    assert capsys.readouterr().err == ""
    assert make().generate(PROMPTS, FIVE, progress=True) == want
    shown = capsys.readouterr().err
    assert "3/3" in shown and "request" in shown


def test_who_was_there_before_generate_runs_along_and_is_delivered_by_the_next_step() -> None:
    engine = make()
    prompts, params = asked([0, 1, 2, 3])
    for k in range(2):
        engine.add_request(prompts[k], params[k], f"before{k}")
    outputs = engine.generate(prompts[2:], params[2:])
    for index, output in zip((2, 3), outputs, strict=True):
        as_alone(output, index)
    assert {r.split("e")[0] for r in engine.requests} <= {"b"}
    results: list[StepOutput] = []
    while engine.has_unfinished_requests:
        results += engine.step()
    assert {r.request_id for r in results} == {"before0", "before1"}
    for k in range(2):
        own = [r for r in results if r.request_id == f"before{k}"]
        (output,) = [r.output for r in own if r.output is not None]
        as_alone(output, k)
        assert tuple(r.token for r in own if r.token) == output.outputs[0].tokens, "once each"
        assert "".join(r.text for r in own) == output.outputs[0].text
    assert engine.step() == []


# -- stream ---------------------------------------------------------------------------------------


def test_stream_brings_each_token_and_the_text_in_pieces() -> None:
    engine, order = make(), list(range(POOL_SIZE))
    results = list(engine.stream(*asked(order)))
    names = list(dict.fromkeys(sorted((r.request_id for r in results), key=lambda r: int(r[1:]))))
    assert len(names) == POOL_SIZE
    for index, name in zip(order, names, strict=True):
        own = [r for r in results if r.request_id == name]
        assert [r.output is None for r in own] == [True] * (len(own) - 1) + [False]
        assert own[-1].output is not None
        as_alone(own[-1].output, index)
        assert (
            tuple(r.token for r in own if r.token is not None) == own[-1].output.outputs[0].tokens
        )
        assert "".join(r.text for r in own) == alone(index, LIMIT).text
    assert sum(bool(r.text) for r in results) > POOL_SIZE, "in pieces, not at the end"


def test_stream_runs_only_as_far_as_it_is_read() -> None:
    engine = make()
    stream = engine.stream(PROMPTS[:1], FIVE)
    assert engine.num_steps == 0 and not engine.requests
    for steps in range(1, 4):
        next(stream)
        assert engine.num_steps == steps


@pytest.mark.parametrize("turns", [(1, 1), (1, 3), (4, 1)])
def test_two_streams_share_the_engine(turns: tuple[int, int]) -> None:
    engine, sets = make(), ([4, 5, 6], [7, 8])
    streams = [engine.stream(*asked(indices)) for indices in sets]
    got: list[list[StepOutput]] = [[], []]
    open_ = {0, 1}
    while open_:
        for side in sorted(open_):
            for _ in range(turns[side]):
                result = next(streams[side], None)
                if result is None:
                    open_.discard(side)
                    break
                got[side].append(result)
                engine.check_integrity()
    for indices, results in zip(sets, got, strict=True):
        outputs = [r.output for r in results if r.output is not None]
        outputs.sort(key=lambda output: int(output.request_id[1:]))
        for index, output in zip(indices, outputs, strict=True):
            as_alone(output, index)
        tokens = sum(r.token is not None for r in results)
        assert tokens == sum(len(output.outputs[0].tokens) for output in outputs)
    assert engine.num_steps < sum(len(alone(i, LIMIT).token_ids) for i in (4, 5, 6, 7, 8))
    assert not engine.requests and not engine.has_unfinished_requests


def test_generate_inside_the_loop_over_a_stream() -> None:
    engine = make()
    inner = None
    outputs = []
    for result in engine.stream(*asked([4, 5])):
        if inner is None:
            inner = engine.generate(*asked([6]))
        if result.output is not None:
            outputs.append(result.output)
    assert inner is not None
    as_alone(inner[0], 6)
    for index, output in zip((4, 5), sorted(outputs, key=by_id), strict=True):
        as_alone(output, index)


# -- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_ends_a_request_in_any_state_at_once(steps: int) -> None:
    """Waiting (0), in the middle of its prompt (1), in decode (4)."""
    engine = make(max_num_seqs=2, max_num_batched_tokens=4)
    engine.add_request(PROMPTS[2], FIVE, "a")
    engine.add_request(PROMPTS[1], FIVE, "b")
    results: list[StepOutput] = []
    for _ in range(steps):
        results += engine.step()
    engine.abort("a")
    engine.check_integrity()
    assert "a" not in engine.requests and free_rows(engine) == 2 - (len(engine.state().running))
    before = [r for r in results if r.request_id == "a"]
    results = []
    while engine.has_unfinished_requests:
        results += engine.step()
    (end,) = [r for r in results if r.request_id == "a"]
    assert end.token is None and end.finish is not None and end.output is not None
    assert end.finish.reason == end.output.outputs[0].finish_reason == "abort"
    assert len(end.output.outputs[0].tokens) == len(before)
    assert end.output.error is None and end.output.metrics.finished is not None
    (b,) = [r.output for r in results if r.request_id == "b" and r.output]
    assert b.outputs == make().generate([PROMPTS[1]], FIVE)[0].outputs
    assert free_rows(engine) == 2


def test_abort_of_nobody_is_refused() -> None:
    engine = make()
    engine.add_request(PROMPTS[0], FIVE, "a")
    for name in ("b", "", "A"):
        with pytest.raises(ValueError, match=f"no request {name!r} is here"):
            engine.abort(name)
    engine.run()
    with pytest.raises(ValueError, match="no request 'a' is here"):
        engine.abort("a")
    assert engine.generate(PROMPTS, FIVE) and not engine.requests


def test_one_of_a_streams_requests_can_be_aborted() -> None:
    engine = make()
    stream = engine.stream(*asked([4, 5, 6]))
    first = next(stream)
    engine.abort(first.request_id)
    rest = list(stream)
    ends = {r.request_id: r.output for r in rest if r.output is not None}
    assert len(ends) == 3
    reasons = [ends[name].outputs[0].finish_reason for name in ends]
    assert reasons.count("abort") == 1 and not engine.requests


# -- metrics --------------------------------------------------------------------------------------


def test_times_of_a_small_case_by_hand() -> None:
    """1 s per forward and 0.25 s per token; budget 4; a has 3 tokens, b has 6, c comes late.

    step 0: a 3, b 1 = 2.0 s → now 2.0, a's first token
    step 1: a 1, b 3 = 2.0 s → now 4.0, a's second and last
    step 2: b 2      = 1.5 s → now 5.5, b's first; c is added now, it says at 5.0
    step 3: b 1, c 2 = 1.75 s → now 7.25, b's second and last, c's first
    step 4: c 1      = 1.25 s → now 8.5, c's second and last
    """
    clock = VirtualClock(per_forward=1.0, per_token=0.25)
    engine = make(clock=clock, max_num_batched_tokens=4)
    two = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add_request([1, 2, 3], two, "a")
    engine.add_request([1, 2, 3, 4, 5, 6], two, "b")
    outputs = {}
    for _ in range(3):
        outputs |= {r.request_id: r.output for r in engine.step() if r.output}
    assert clock.now() == 5.5
    engine.add_request([7, 8], two, "c", arrival=5.0)
    outputs |= {output.request_id: output for output in engine.run()}
    a, b, c = (outputs[name].metrics for name in "abc")
    assert a == (0.0, 0.0, (2.0, 4.0), 4.0)
    assert b == (0.0, 0.0, (5.5, 7.25), 7.25)
    assert c == (5.0, 5.5, (7.25, 8.5), 8.5)
    assert (a.ttft, a.tpot, a.itl, a.total, a.queue_time) == (2.0, 2.0, (2.0,), 4.0, 0.0)
    assert (b.ttft, b.tpot, c.ttft, c.queue_time) == (5.5, 1.75, 2.25, 0.5)
    assert c.throughput == 2 / 3.5


# -- bad input ------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "empty"),
    "empty text": ("", {}, "empty"),
    "a number": (7, {}, "number 7"),
    "an id beyond the vocabulary": ([1, 112], {}, "112.*0 to 111"),
    "a negative id": ([1, -3], {}, "-3"),
    "half an id": ([1, 2.5], {}, "2.5"),
    "as long as max_model_len": ([1] * LIMIT, {}, f"{LIMIT} tokens.*raise max_model_len"),
    "longer than that": ([1] * 99, {}, f"99 tokens.*limited to {LIMIT}"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_prompts_are_refused_and_nothing_is_lost(what: str) -> None:
    prompt, options, said = BAD[what]
    engine = make()
    engine.add_request(PROMPTS[0], FIVE, "good")
    engine.step()
    before = engine.state()
    with pytest.raises(ValueError, match=said):
        engine.add_request(prompt, FIVE, **options)
    for call in (engine.generate, engine.stream):  # at the call, not at the first token
        with pytest.raises(ValueError, match=said):
            call([PROMPTS[1], prompt], FIVE)
    assert engine.state() == before and list(engine.requests) == ["good"]
    engine.check_integrity()
    (good,) = engine.run()
    assert good.outputs == make().generate([PROMPTS[0]], FIVE)[0].outputs
    assert engine.generate(PROMPTS, FIVE)[0].outputs == good.outputs


def test_prompt_over_the_budget_is_refused_where_chunks_are_not_allowed() -> None:
    engine = make(max_num_batched_tokens=8, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match=r"9 tokens .*at most 8.*max_num_batched_tokens"):
        engine.generate(PROMPTS, FIVE)
    assert not engine.requests and len(engine.generate(PROMPTS[:2], FIVE)) == 2


def test_other_bad_calls_name_what_is_wrong() -> None:
    engine = make()
    for prompts in ([], None):
        with pytest.raises(ValueError, match="no prompt"):
            engine.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 prompts but 2"):
        engine.generate(PROMPTS, [FIVE, FIVE])
    with pytest.raises(ValueError, match="3 prompts but 4"):
        engine.stream(PROMPTS, [FIVE] * 4)
    with pytest.raises(ValueError, match=r"\[\[1, 2, 3\]\]"):
        engine.generate([1, 2, 3])
    plain = LLMEngine(small_model(), config=EngineConfig(max_num_seqs=1, max_model_len=8))
    with pytest.raises(ValueError, match="tokenizer"):
        plain.generate("text")
    with pytest.raises(ValueError, match="tokenizer"):
        plain.generate([[1]], SamplingParams(stop="x"))
    assert len(engine.generate(PROMPTS, FIVE)) == 3 and len(plain.generate([[1]], FIVE)) == 1


def test_rows_that_fit_in_no_memory_are_refused_with_the_bytes() -> None:
    with pytest.raises(ValueError, match=r"bytes .* in all.*max_num_seqs"):
        make(max_num_seqs=10**12)


# -- around it ------------------------------------------------------------------------------------


def test_max_model_len_is_never_beyond_the_model() -> None:
    for asked_for in (None, 10_000):
        engine = make(max_model_len=asked_for)
        assert engine.config.max_model_len == LIMIT == engine.scheduler.max_len
    (output,) = make().generate([[1] * (LIMIT - 2)], SamplingParams(max_tokens=99, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "length"


def test_settings_say_what_the_engine_is() -> None:
    engine = make(max_num_batched_tokens=7, clock=VirtualClock(0.5, 0.25))
    assert engine.settings == {
        "policy": "Scheduler",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "max_model_len": LIMIT,
        "long_prefill_token_threshold": None,
        "enable_chunked_prefill": True,
        "seconds_per_forward": 0.5,
        "seconds_per_token": 0.25,
        "num_rows": 4,
        "row_len": LIMIT,
    }
    assert "seconds_per_token" not in make(clock=WallClock()).settings


def test_nothing_is_recorded_unless_asked_for() -> None:
    plain, recorder = make(), Recorder()
    recorded = make(trace=recorder)
    want = plain.generate(PROMPTS, FIVE)
    assert recorded.generate(PROMPTS, FIVE) == want
    assert plain.trace is None and plain.scheduler.trace is None
    assert plain.memory.trace is None  # type: ignore[attr-defined]
    trace = recorder.trace()
    assert trace.settings == recorded.settings
    assert sum(isinstance(e, StepEnded) for e in trace.events) == recorded.num_steps
    with pytest.raises(ValueError, match="another engine"):
        make(trace=recorder)


def test_a_memory_comes_with_its_recorder_and_a_runner_can_be_handed_in() -> None:
    recorder = Recorder()
    rows = {"max_seqs": 2, "max_len": LIMIT, "trace": recorder}
    memory = poison(StaticKVCache.from_config(small_model().config, **rows))
    with pytest.raises(ValueError, match="this memory was made without that recorder"):
        make(memory=memory, trace=Recorder())
    runner = ModelRunner(small_model(), memory.storage, NaiveAttention(cache=memory.storage))
    engine = make(memory=memory, runner=runner)
    assert engine.runner is runner and engine.trace is recorder is engine.scheduler.trace
    for index, output in enumerate(engine.generate(*asked(range(6)))):
        as_alone(output, index)
    assert sum(isinstance(e, StepEnded) for e in recorder.events) == engine.num_steps
    with pytest.raises(ValueError, match="reads another memory than the engine's"):
        make(runner=runner)


def test_model_without_positions_to_spare_is_no_trouble() -> None:
    model = random_model(max_position_embeddings=2)
    engine = LLMEngine(model, config=EngineConfig(max_num_seqs=1))
    (output,) = engine.generate([[5]], FIVE)
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(ValueError, match="limited to 2"):
        engine.generate([[5, 6]])


def test_from_pretrained_serves_the_shipped_model(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    texts = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
    params = SamplingParams(max_tokens=12)
    for engine in (
        LLMEngine.from_pretrained(config=EngineConfig(max_num_seqs=2, max_num_batched_tokens=8)),
        LLMEngine.from_pretrained(TINY, EngineConfig(max_num_seqs=3)),
    ):
        outputs = engine.generate(texts, params)
        for text, output in zip(texts, outputs, strict=True):
            (want,) = generate(model, text, params, tokenizer=tokenizer)
            assert output.outputs == want.outputs and output.outputs[0].text
    with pytest.raises((ValueError, OSError)):
        LLMEngine.from_pretrained("/no/such/folder")


class Sevens(Sampler):
    """A sampler of one's own: always token 7."""

    def sample(self, logits: torch.Tensor) -> SampledToken:
        return SampledToken(7)


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_a_sampler_of_ones_own_is_asked_whoever_is_in_the_batch(temperature: float | None) -> None:
    engine = make()
    engine.add_request(PROMPTS[0], FIVE, "own", sampler=Sevens(FIVE))
    if temperature is not None:
        params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=temperature, seed=1)
        engine.add_request(PROMPTS[1], params, "other")
    outputs = {output.request_id: output.outputs[0].token_ids for output in engine.run()}
    assert outputs["own"] == (7,) * 5
    if temperature is not None:
        (alone_,) = make().generate([PROMPTS[1]], params)
        assert outputs["other"] == alone_.outputs[0].token_ids


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda engine: engine.add_request([1], "an id"), "params must be SamplingParams"),
        (lambda engine: engine.add_request([1], {}), "params must be SamplingParams"),
        (lambda engine: engine.generate([[1]], "hot"), "params must be SamplingParams, or a list"),
        (lambda engine: engine.add_request(["One", "day"]), "one prompt: call it once for each"),
        (lambda engine: engine.generate(5), r"prompts are a text, .* got 5"),
        (lambda engine: engine.generate([[1], [1] * 99]), "prompt 1 has 99 tokens"),
        (lambda engine: engine.add_request([1], arrival=float("nan")), "arrival must be a time"),
        (lambda engine: LLMEngine(engine.model, config={}), "config must be an EngineConfig"),
    ],
)
def test_what_a_hurried_caller_hands_in_is_refused_with_the_way_out(call: Any, told: str) -> None:
    engine = make()
    with pytest.raises(ValueError, match=told):
        call(engine)
    assert not engine.requests
    as_alone(engine.generate(*asked([0]))[0], 0)
