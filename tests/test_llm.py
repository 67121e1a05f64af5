"""The public face, as a user of vLLM's offline API finds it; and the engine behind it.

What steps return, how n continuations, faults and metrics look from outside. That each request
says what it says alone, aborted, failing or streamed, is in test_as_if_alone.py.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from engines import random_model
from memories import check_empty
from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine import args
from tutorial_engine.engine.clock import VirtualClock, WallClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.inputs import TokensPrompt
from tutorial_engine.engine.llm import LLM
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, StepEnded
from tutorial_engine.viz.views.timeline import timeline

TEXTS = ["Once upon a time", "Anna had a red kite. One day", "Tom and"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [9, 9, 9, 8, 2, 6, 1, 8, 0]]


@pytest.fixture(scope="module")
def llm(model: CausalLM, tokenizer: Tokenizer) -> LLM:
    """The tiny model on pages."""
    return LLM(model, tokenizer=tokenizer)


def ask(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def token_ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for output in outputs for one in output.outputs]


# -- LLM ------------------------------------------------------------------------------------------


def test_outputs_have_the_fields_of_vllm(llm: LLM) -> None:
    text, by_ids = ask(llm, [TEXTS[0], [1, 2, 3]])
    assert text.prompt == TEXTS[0] and by_ids.prompt is None
    assert list(text.prompt_token_ids) == llm.get_tokenizer().encode(TEXTS[0]).ids  # type: ignore[union-attr]
    assert text.finished and text.prompt_logprobs is text.error is None
    (got,) = text.outputs
    assert got.index == 0 and got.finished() and got.logprobs is got.cumulative_logprob is None
    assert got.text == llm.get_tokenizer().decode(list(got.token_ids))  # type: ignore[union-attr]


def test_a_prompt_has_four_forms_and_one_answer(llm: LLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[0]).ids
    one = token_ids(ask(llm, TEXTS[0]))
    forms = [TEXTS[0], ids, {"prompt": TEXTS[0]}, {"prompt_token_ids": ids}]
    assert token_ids(ask(llm, forms)) == one * 4
    assert all(token_ids(ask(llm, form)) == one for form in forms[2:])
    assert token_ids(ask(llm, forms, [GREEDY] * 4)) == one * 4
    assert ask(llm, []) == [] and llm.llm_engine.generate([]) == []
    assert ask(llm, [forms[2]])[0].prompt == TEXTS[0] and ask(llm, [forms[3]])[0].prompt is None


def test_logprobs_are_tables_by_token_id(llm: LLM, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2)
    ((got,),) = [output.outputs for output in ask(llm, TEXTS[0], params)]
    assert got.logprobs is not None and len(got.logprobs) == len(got.token_ids)
    for token_id, known in zip(got.token_ids, got.logprobs, strict=True):
        assert next(iter(known)) == token_id
        assert {entry.rank for entry in known.values()} == {1, 2, known[token_id].rank}
        for known_id, entry in known.items():
            assert entry.decoded_token == tokenizer.decode([known_id])
    assert any(len(known) == 3 for known in got.logprobs), "one was not among the best"
    sampled = [known[i].logprob for known, i in zip(got.logprobs, got.token_ids, strict=True)]
    assert got.cumulative_logprob == pytest.approx(sum(sampled))


def test_it_warns_once_that_it_is_greedy(model: CausalLM) -> None:
    llm = LLM(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(llm, [[1]], GREEDY)
    with pytest.warns(UserWarning, match=r"no temperature was given.*greedy.*vLLM takes 1\.0"):
        ask(llm, [[1]], None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(llm, [[1]], SamplingParams(max_tokens=2))


def test_a_second_identical_prompt_is_found_until_the_cache_is_reset(
    model: CausalLM,
) -> None:
    unsaid = dict.fromkeys(("block_size", "max_num_seqs", "max_num_batched_tokens"))
    prompt, llm = list(range(40)), LLM(model, **unsaid, long_prefill_token_threshold=0)  # as there
    cached = [ask(llm, [prompt])[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 32]
    assert llm.reset_prefix_cache() is True
    assert ask(llm, [prompt])[0].num_cached_tokens == 0
    llm.llm_engine.add_request("a", prompt, FIVE)
    llm.llm_engine.step()
    assert llm.reset_prefix_cache() is False, "blocks are in use"
    assert llm.llm_engine.run()[0].num_cached_tokens == 32
    off = LLM(model, enable_prefix_caching=False)
    assert [ask(off, [prompt])[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_a_recorder_has_what_it_decides_and_it_is_drawn(model: CausalLM, tmp_path: Path) -> None:
    run = Recorder()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    ask(LLM(model, trace=run), PROMPTS, params)
    assert run.trace().num_steps == 5
    picture = timeline(run.trace())
    picture.save(tmp_path / "pictures", "run")
    assert (tmp_path / "pictures" / "run.svg").read_text(encoding="utf-8") == picture.svg
    with pytest.raises(ValueError, match="give a folder and a name"):
        picture.save("run.svg")
    with pytest.raises(ValueError, match=r"LLM\(\.\.\., trace=run\).*run\.trace\(\); got LLM"):
        timeline(LLM(model))  # type: ignore[arg-type]


def test_a_stream_runs_as_far_as_it_is_read(llm: LLM) -> None:
    engine = llm.llm_engine
    steps, stream = engine.num_steps, engine.stream(TEXTS, GREEDY)
    assert engine.num_steps == steps and not engine.requests
    next(stream)
    assert engine.num_steps == steps + 1 and len(engine.requests) == 3
    stream.close()  # type: ignore[attr-defined]
    assert not engine.requests and engine.memory.seq_ids == ()


# -- who comes, who goes, what a step returns -----------------------------------------------------

MODEL = random_model()
LIMIT = 32


def small_engine(**options: Any) -> LLMEngine:
    """Keywords of LLMEngine by name, the rest is its config."""
    parts = {n: options.pop(n) for n in ("memory", "clock", "trace", "runner") if n in options}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": LIMIT} | options
    return LLMEngine(MODEL, config=EngineConfig(**limits), **{"clock": VirtualClock()} | parts)


def test_a_seed_makes_all_of_it_reproducible() -> None:
    warm = SamplingParams(temperature=1.2, max_tokens=10, n=2)

    def three(seed: int | None) -> list[tuple[int, ...]]:
        return token_ids(ask(LLM(MODEL, seed=seed), [[1, 2, 3]] * 3, warm))

    assert three(7) == three(7) != three(8)
    assert len({*three(7)}) == 6, "each request has its own"
    assert three(None) != three(None)
    own = SamplingParams(temperature=1.2, max_tokens=10, seed=5)
    first, second = token_ids(ask(LLM(MODEL, seed=7), [[1, 2, 3]] * 2, own))
    assert first == second, "a seed of its own counts"


def test_an_id_is_free_again_afterwards_and_made_up_where_none_is_given() -> None:
    engine = small_engine()
    for name in ("r0", "r2"):
        engine.add_request(name, [1], FIVE)
    assert [engine.add_request(None, [3], FIVE) for _ in range(2)] == ["r1", "r3"]
    warm = SamplingParams(n=2, temperature=1.0, max_tokens=1)
    engine.add_request("r4.1", [1], FIVE)
    assert engine.add_request(None, [1], warm) == "r5", "r4 would be two, and r4.1 is here"
    assert engine.get_num_unfinished_requests() == 6, "two samples are one"
    engine.run()
    assert engine.add_request("r0", [1], FIVE) == "r0"


def test_a_recorder_and_a_bar_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    plain, recorded = small_engine(), small_engine(trace=recorder)
    want = plain.generate(PROMPTS, FIVE)
    assert capsys.readouterr().err == ""
    assert recorded.generate(PROMPTS, FIVE, progress=True) == want
    assert "3/3" in capsys.readouterr().err
    trace = recorder.trace()
    assert trace.settings == recorded.settings and trace.settings["policy"] == "Scheduler"
    assert trace.settings["seconds_per_token"] == 0.001
    assert "seconds_per_token" not in small_engine(clock=WallClock()).settings
    assert sum(isinstance(event, StepEnded) for event in trace.events) == recorded.num_steps


MEMORIES: list[tuple[Any, dict[str, int]]] = [
    (StaticKVCache, {"max_seqs": 8}),
    (CellKVCache, {"num_cells": 128}),
    (PagedKVCache, {"num_blocks": 8}),
]


@pytest.mark.parametrize(("kind", "sizes"), MEMORIES)
def test_the_prompt_of_several_samples_runs_once_where_the_memory_can_share_it(
    kind: Any, sizes: dict[str, int]
) -> None:
    engine, prompt = small_engine(memory=kind.from_config(MODEL.config, **sizes)), range(1, 12)
    warm = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    engine.add_request("A", prompt, warm)
    engine.add_request("B", [1, 2], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.state().waiting[:2] == ("A.1", "A.2"), "they came before B"
    engine.run()
    whole = kind is StaticKVCache
    assert engine.runner.num_tokens == 2 + 1 + (3 * (11 + 11) if whole else 11 + 11 + 2 * (1 + 11))


# -- what goes wrong for one goes wrong for one ---------------------------------------------------


@pytest.mark.parametrize(("temperature", "bad"), [(0.0, float("nan")), (1.0, float("inf"))])
def test_logits_that_are_no_numbers_end_their_request_alone(temperature: float, bad: float) -> None:
    engine = small_engine()
    params = SamplingParams(max_tokens=5, temperature=temperature, seed=1)
    forward = engine.runner.run

    def spoiled(scheduled: Any) -> Any:
        logits = forward(scheduled).clone()
        ready = [item.request for item in scheduled if item.yields_token]
        for row, request in enumerate(ready):
            if request.request_id == "1" and len(request.output_token_ids) == 2:
                logits[row, 3] = bad
        return logits

    engine.runner.run = spoiled  # type: ignore[method-assign]
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    outputs = {output.request_id: output for output in engine.run()}
    for i, want in enumerate(token_ids(generate(MODEL, PROMPTS, params))):
        assert token_ids([outputs[str(i)]]) == [want[:2] if i == 1 else want]
    assert f"these logits are not numbers, the largest is {bad}" in str(outputs["1"].error)
    check_empty(engine.memory)


def test_generate_says_what_went_wrong_with_one() -> None:
    decode = Mock(side_effect=["the prompt", UnicodeError("what is this?")])
    tokenizer = Mock(encode=len, decode=decode)
    engine = LLMEngine(MODEL, tokenizer)
    with pytest.warns(UserWarning, match="prompt 0 ended with an error: .*what is this"):
        (output,) = engine.generate([PROMPTS[0]], FIVE)
    assert output.outputs[0].finish_reason == "error" and not engine.requests


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    llm = LLM(skip_tokenizer_init=True)
    (output,) = ask(llm, [[1, 2, 3]])
    assert llm.get_tokenizer() is None and len(output.outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="tokenizer"):
        ask(llm, ["One day"])


def test_half_a_character_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 holds '.ud800' at character 4, which is half"):
        ask(llm, "One \ud800day")


def test_what_scripts_for_vllm_write_is_taken_and_what_is_not_here_is_refused(llm: LLM) -> None:
    plain = SamplingParams(
        temperature=0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        stop=None,
        seed=-1,
        bad_words=[],
    )
    assert plain == SamplingParams(temperature=0)
    for name, value in (("presence_penalty", 0.5), ("logit_bias", {3: 1.0}), ("bad_words", ["a"])):
        with pytest.raises(ValueError, match=f"{name}=.*: vLLM has this, and the engine of this"):
            SamplingParams(**{name: value})
    with pytest.raises(ValueError, match=r"takes no 'temprature', .*: is temperature meant"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)  # type: ignore[arg-type]
    small = LLM(llm.llm_engine.model, tokenizer=llm.get_tokenizer(), max_model_len=40)
    (output,) = ask(small, TokensPrompt(prompt_token_ids=[1, 2, 3]), long)
    assert len(output.outputs[0].token_ids) == 37 and output.prompt_token_ids == [1, 2, 3]
    with pytest.raises(ValueError, match="cache_salt of prompt 0='me': vLLM has this"):
        ask(small, {"prompt_token_ids": [1], "cache_salt": "me"}, long)
    at_default = {"revision": None, "hf_overrides": {}, "tensor_parallel_size": 1}
    LLM(small.llm_engine.model, trust_remote_code=True, disable_log_stats=True, **at_default)


def test_blocks_are_counted_as_in_vllm_with_its_null_block(model: CausalLM) -> None:
    """vLLM 0.32 gives 10 blocks of 11 to requests, and refuses 10 where one request needs 10."""
    sizes = {"max_model_len": 320, "block_size": 32}
    memory = LLM(model, num_gpu_blocks_override=11, **sizes).llm_engine.memory
    assert memory.blocks.num_blocks == 10
    for number, words in ((10, "leaves 9 blocks .* needs 10: raise it to 11"), (0, "at least 1")):
        with pytest.raises(ValueError, match=words):
            LLM(model, num_gpu_blocks_override=number, **sizes)


def test_a_request_may_be_as_long_as_the_model_where_nothing_is_stated() -> None:
    """As in vLLM, where 2,500 tokens are no long prompt for a model of 8,192 positions."""
    long_model = random_model(max_position_embeddings=8192)
    llm = LLM(long_model, max_num_batched_tokens=4096)
    assert llm.llm_engine.config.max_model_len == 8192
    (output,) = ask(llm, [[1] * 2500], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    for stated in (-1, 9000):
        assert LLM(long_model, max_model_len=stated).llm_engine.config.max_model_len == 8192


def test_a_length_that_is_not_stated_is_what_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of it always fits; a stated length has its blocks whatever they take."""
    bytes_per_token = KVCacheSpec.from_model(MODEL.config).bytes_per_token
    monkeypatch.setattr(args, "CACHE_BYTES", 35 * bytes_per_token)  # two blocks of 16, and a bit
    engine = LLM(MODEL).llm_engine
    assert (engine.config.max_model_len, engine.memory.blocks.num_blocks) == (32, 2)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"has 32 tokens, .* limited to 32"):
        engine.add_request("a", [1] * 32, FIVE)
    stated = LLM(MODEL, max_model_len=50).llm_engine
    assert (stated.config.max_model_len, stated.memory.blocks.num_blocks) == (50, 4)  # type: ignore[attr-defined]
    fitted = LLM(MODEL, max_model_len=-1, num_gpu_blocks_override=4).llm_engine
    assert (fitted.config.max_model_len, fitted.memory.blocks.num_blocks) == (48, 3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"leaves 3 blocks .* max_model_len=64 tokens needs 4"):
        LLM(MODEL, num_gpu_blocks_override=4)


def test_a_template_can_be_handed_in(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}"
    (said,) = llm.chat(
        [{"role": "user", "content": "One day"}],
        GREEDY,
        use_tqdm=False,
        chat_template=template,
        chat_template_kwargs={"end": " Ben"},
    )
    assert said.prompt == "One day Ben" and token_ids([said]) == token_ids(ask(llm, "One day Ben"))
