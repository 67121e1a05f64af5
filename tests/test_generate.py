"""The loop: the greedy tokens of transformers, each token run once, every row ends by itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, random_sequences, save_random
from engines import VOCAB, poison, random_model
from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate, stream
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.runner import CachedRunner, RecomputeRunner, Runner, make_runner
from tutorial_engine.lab.hf import TransformersRunner
from tutorial_engine.lab.ledger import REFERENCE, SAFE_MARGIN, our_paths
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.sampler import SamplingParams

NEW = 10
PROMPTS = random_sequences([7, 1, 12, 5], VOCAB)
TEXTS = ["Once upon a time", "Anna had a red kite. One day", "Tom and", "The"]
FREELY = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Qwen3ForCausalLM:
    """A random model with 64 positions and no end. Look at it, never change it."""
    return random_model(seed=2)


def said(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What was said, without the times."""
    return [(out.prompt_token_ids, *out.outputs) for out in outputs]


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def smallest_margin(model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """top1 − top2 along the greedy path of the oracle."""
    best = our_paths(model)[REFERENCE](prompts, steps).topk(2).values
    return (best[..., 0] - best[..., 1]).min().item()


def static(model: Qwen3ForCausalLM, rows: int = len(PROMPTS)) -> CachedRunner:
    return CachedRunner(model, poison(make_runner(model, num_seqs=rows).cache))


def paged(model: Qwen3ForCausalLM) -> CachedRunner:
    pages = PagedKVCache.from_config(model.config, block_size=4, num_blocks=64)
    return CachedRunner(model, poison(pages))


def cells(model: Qwen3ForCausalLM) -> CachedRunner:
    return CachedRunner(model, poison(CellKVCache.from_config(model.config, 4 * 64)))


def engine_generate(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[RequestOutput]:
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=7, max_model_len=None)
    return LLMEngine(model, config=config).generate(prompts, params)


RUNNERS: dict[str, Callable[[Qwen3ForCausalLM], Runner]] = {
    "static cache": static,
    "torch.cat cache": lambda m: CachedRunner(m, GrowingKVCache()),
    "no cache": RecomputeRunner,
    "pages": paged,
    "cells": cells,
}
WAYS: dict[str, Callable[..., list[RequestOutput]]] = {
    "use_cache": generate,
    "no cache": lambda m, *rest: generate(m, *rest, use_cache=False),
    "chunked, 1": lambda m, *rest: generate(m, *rest, chunk_size=1),
    "chunked, 3": lambda m, *rest: generate(m, *rest, chunk_size=3),
    "max_len": lambda m, *rest: generate(m, *rest, max_len=30),
    "static cache": lambda m, *rest: generate(static(m), *rest),
    "torch.cat cache": lambda m, *rest: generate(CachedRunner(m, GrowingKVCache()), *rest),
    "pages, chunked": lambda m, *rest: generate(paged(m), *rest, chunk_size=3),
    "cells, chunked": lambda m, *rest: generate(cells(m), *rest, chunk_size=3),
    "stream": lambda m, *rest: [r.output for r in stream(m, *rest) if r.output is not None],
    "engine": engine_generate,
}


# -- the same tokens ----------------------------------------------------------------------------


def transformers_tokens(
    folder: Path, prompts: Sequence[Sequence[int]], new: int = NEW
) -> list[list[int]]:
    """transformers' own generate(), each prompt alone."""
    theirs = load_reference(folder)
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            pad_token_id=0,
        )
        made.append(out[0, len(prompt) :].tolist())
    return made


@pytest.fixture(scope="module", params=[2, 5, 7, 8])
def ending(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint whose EOS ends some of the rows early, and transformers' tokens for it."""
    seed = request.param
    shape: dict[str, Any] = {"seed": seed, "max_position_embeddings": 64}
    if seed % 2:
        shape |= {"num_key_value_heads": 1, "head_dim": 24}
    free = save_random(tmp_path_factory.mktemp("free"), **shape)
    endless = transformers_tokens(free, PROMPTS)
    eos = [endless[0][2], endless[2][5]]
    folder = save_random(tmp_path_factory.mktemp("ending"), **shape, eos_token_id=eos)
    return load_model(folder), transformers_tokens(folder, PROMPTS), eos


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_transformers(ending: Any, way: str) -> None:
    model, want, eos = ending
    assert smallest_margin(model, PROMPTS, NEW) > SAFE_MARGIN, "or rounding may swap two tokens"
    outputs = WAYS[way](model, PROMPTS, SamplingParams(max_tokens=NEW))
    outputs.sort(key=lambda output: PROMPTS.index(list(output.prompt_token_ids)))
    assert ids_of(outputs) == want
    assert len({token for row in want for token in row}) >= 8
    assert len({len(row) for row in want}) >= 2, "rows stop one by one"
    reasons = ["stop" if row[-1] in eos else "length" for row in want]
    assert [output.outputs[0].finish_reason for output in outputs] == reasons


@pytest.mark.parametrize("way", WAYS)
def test_shipped_model_equals_transformers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, way: str
) -> None:
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    assert smallest_margin(model, prompts, NEW) > SAFE_MARGIN, "or rounding may swap two tokens"
    outputs = WAYS[way](model, prompts, SamplingParams(max_tokens=NEW))
    outputs.sort(key=lambda output: prompts.index(list(output.prompt_token_ids)))
    got = ids_of(outputs)
    assert got == transformers_tokens(TINY, prompts)
    assert len({token for row in got for token in row}) >= 12


def test_transformers_under_our_loop_gives_the_same(tmp_path: Path) -> None:
    folder = save_random(tmp_path, seed=5, max_position_embeddings=64)
    runner, ours = TransformersRunner(load_reference(folder)), load_model(folder)
    params = SamplingParams(max_tokens=NEW)
    want = said(generate(ours, PROMPTS, params))
    assert said(generate(runner, PROMPTS, params)) == want
    assert said(generate(runner, PROMPTS, params, chunk_size=2)) == want


@pytest.mark.parametrize("name", RUNNERS)
def test_batch_of_unequal_prompts_equals_each_alone(engine: Qwen3ForCausalLM, name: str) -> None:
    alone = [generate(engine, [prompt], FREELY, use_cache=False)[0] for prompt in PROMPTS]
    runner = RUNNERS[name](engine)
    assert said(generate(runner, PROMPTS, FREELY)) == said(alone)
    assert said(generate(runner, PROMPTS, FREELY)) == said(alone), "and again"
    assert said(generate(runner, PROMPTS[2:], FREELY)) == said(alone[2:])


# -- what is run --------------------------------------------------------------------------------


def lengths_that_differ() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 1, 7, 2)]


def test_stopped_row_is_run_no_more(engine: Qwen3ForCausalLM) -> None:
    with watched(engine) as batches:
        outputs = generate(engine, PROMPTS, lengths_that_differ())
    assert [len(ids) for ids in ids_of(outputs)] == [4, 1, 7, 2]
    # prompts first; then of each row all tokens but its last
    assert [batch.query_lens for batch in batches] == [(7, 1, 12, 5), (1,) * 3] + [(1,) * 2] * 2 + [
        (1,)
    ] * 3
    assert [batch.seq_ids for batch in batches[1:]] == [
        tuple(x) for x in ("023", "02", "02", "2", "2", "2")
    ]
    ran = sum(batch.num_tokens for batch in batches)
    assert ran == sum(len(p) + n - 1 for p, n in zip(PROMPTS, (4, 1, 7, 2), strict=True))
    fed = [token for batch in batches[1:] for token in batch.input_ids[-1:].tolist()]
    assert len(fed) == 6


def test_without_a_cache_everything_runs_again(engine: Qwen3ForCausalLM) -> None:
    with watched(engine) as batches:
        generate(engine, PROMPTS[:1], SamplingParams(max_tokens=4), use_cache=False)
    assert [batch.num_tokens for batch in batches] == [7, 8, 9, 10]


# -- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["engine", *RUNNERS])
@pytest.mark.parametrize("max_len", [13, 20, 64, None, 0, 1000])
def test_context_ends_the_row_with_length(
    engine: Qwen3ForCausalLM, way: str, max_len: int | None
) -> None:
    runner = RUNNERS[way](engine) if way in RUNNERS else engine
    (one,) = generate(runner, [PROMPTS[0]], SamplingParams(max_tokens=5), max_len=8)
    assert len(one.outputs[0].token_ids) == 1, "one short of the limit"
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    limit = min(max_len or 64, 64)
    for output in generate(runner, PROMPTS, params, max_len=max_len):
        (got,) = output.outputs
        assert got.finish_reason == "length" and got.stop_reason is None
        assert len(output.prompt_token_ids) + len(got.token_ids) == limit


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_stop_id_ends_its_row_only(engine: Qwen3ForCausalLM, at: int, use_cache: bool) -> None:
    free = ids_of(generate(engine, PROMPTS, FREELY))
    stop = free[2][at]
    params = SamplingParams(max_tokens=NEW, stop_token_ids=[stop])
    outputs = generate(engine, PROMPTS, params, use_cache=use_cache)
    for whole, output in zip(free, outputs, strict=True):
        end = whole.index(stop) + 1 if stop in whole else NEW
        (got,) = output.outputs
        assert list(got.token_ids) == whole[:end]
        assert got.finish_reason == ("stop" if stop in whole else "length")
        assert got.stop_reason == (stop if stop in whole else None)
    assert outputs[2].outputs[0].finish_reason == "stop"


def test_stop_wins_over_length(engine: Qwen3ForCausalLM) -> None:
    (free,) = ids_of(generate(engine, PROMPTS[:1], FREELY))
    last = next(i for i, token in enumerate(free) if token not in free[:i] and i >= 2)
    params = SamplingParams(max_tokens=last + 1, stop_token_ids=[free[last]])
    ((_, got),) = said(generate(engine, PROMPTS[:1], params))
    assert list(got.token_ids) == free[: last + 1] and got.finish_reason == "stop"


def test_eos_of_the_model_ends_unless_ignored() -> None:
    (free,) = ids_of(generate(random_model(seed=2), PROMPTS[:1], FREELY))
    ended = random_model(seed=2, eos=(96, free[3]))
    ((_, got),) = said(generate(ended, PROMPTS[:1], SamplingParams(max_tokens=NEW)))
    assert list(got.token_ids) == free[: free.index(free[3]) + 1]
    assert (got.finish_reason, got.stop_reason) == ("stop", None)
    assert ids_of(generate(ended, PROMPTS[:1], FREELY)) == [free]


def test_stop_string_is_cut_from_text(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=30)
    ((_, free),) = said(generate(model, TEXTS[0], params, tokenizer=tokenizer))
    stop = free.text[9:14]
    params = SamplingParams(max_tokens=30, stop=stop)
    ((_, cut),) = said(generate(model, TEXTS[0], params, tokenizer=tokenizer))
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


# -- outputs, token by token ----------------------------------------------------------------------


def test_outputs_carry_what_was_asked(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    prompts = [TEXTS[0], tokenizer.encode(TEXTS[1]).ids, tuple(tokenizer.encode(TEXTS[2]).ids)]
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=3, logprobs=2), FREELY]
    outputs = generate(model, prompts, params, tokenizer=tokenizer)
    for number, (text, output) in enumerate(zip(TEXTS, outputs, strict=False)):
        (got,) = output.outputs
        assert output.request_id == str(number) and output.error is None
        assert list(output.prompt_token_ids) == tokenizer.encode(text).ids
        assert got.text == tokenizer.decode(list(got.token_ids))
        assert got.token_ids == tuple(token.token_id for token in got.tokens)
        times = [output.metrics.arrival, *output.metrics.token_times, output.metrics.finished]
        assert times == sorted(times) and output.metrics.ttft and output.metrics.ttft > 0
    first, second, third = (output.outputs[0] for output in outputs)
    assert [len(one.token_ids) for one in (first, second, third)] == [5, 3, NEW]
    assert all(len(t.top_logprobs) == 2 and t.rank == 1 for t in second.tokens)
    assert second.cumulative_logprob == pytest.approx(sum(t.logprob for t in second.tokens))
    assert all(token.logprob is None for token in first.tokens)


def test_text_and_its_ids_are_one_prompt(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[0]).ids
    alone = said(generate(model, TEXTS[0], FREELY, tokenizer=tokenizer))
    assert alone == said(generate(model, [TEXTS[0]], FREELY, tokenizer=tokenizer))
    assert alone == said(generate(model, [ids], FREELY, tokenizer=tokenizer))


def test_default_is_greedy_and_without_a_tokenizer_the_text_is_empty(
    engine: Qwen3ForCausalLM,
) -> None:
    outputs = generate(engine, PROMPTS)
    assert said(outputs) == said(generate(engine, PROMPTS, SamplingParams()))
    assert [output.outputs[0].text for output in outputs] == [""] * 4


@pytest.mark.parametrize("stop", [(), (" the",)])
def test_results_joined_are_the_outputs(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, stop: Sequence[str]
) -> None:
    params = [SamplingParams(max_tokens=n, stop=stop) for n in (25, 3, 12, 1)]
    outputs = generate(model, TEXTS, params, tokenizer=tokenizer)
    results = list(stream(model, TEXTS, params, tokenizer=tokenizer))
    for output in outputs:
        own = [result for result in results if result.request_id == output.request_id]
        (got,) = output.outputs
        assert got.text and "".join(result.text for result in own) == got.text
        assert tuple(result.token for result in own) == got.tokens
        *live, last = own
        assert all(result.finish is None and result.output is None for result in live)
        assert last.finish == (got.finish_reason, got.stop_reason)
        assert last.output is not None and last.output.outputs == output.outputs


def test_results_come_step_by_step_in_the_order_of_prompts(engine: Qwen3ForCausalLM) -> None:
    names = [result.request_id for result in stream(engine, PROMPTS, lengths_that_differ())]
    assert "".join(names) == "01230230202222"


def test_stream_runs_no_further_than_it_is_read(engine: Qwen3ForCausalLM) -> None:
    with watched(engine) as batches:
        results = stream(engine, PROMPTS[:2], FREELY)
        assert not batches
        next(results), next(results)
        assert len(batches) == 1
        next(results)
        assert len(batches) == 2
        results.close()  # type: ignore[attr-defined]
    assert ids_of(generate(engine, PROMPTS[:2], FREELY)) == ids_of(
        generate(engine, PROMPTS[:2], FREELY, use_cache=False)
    )


def test_two_streams_at_once_do_not_mix(engine: Qwen3ForCausalLM) -> None:
    alone = [ids_of(generate(engine, [prompt], FREELY))[0] for prompt in PROMPTS[:2]]
    streams = [stream(engine, [prompt], FREELY) for prompt in PROMPTS[:2]]
    together = [[a.token.token_id, b.token.token_id] for a, b in zip(*streams, strict=True)]
    assert together == [list(pair) for pair in zip(*alone, strict=True)]


def test_progress_shows_a_bar_and_changes_nothing(
    engine: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    want = said(generate(engine, PROMPTS, lengths_that_differ()))
    assert capsys.readouterr().err == ""
    got = said(generate(engine, PROMPTS, lengths_that_differ(), progress=True))
    shown = capsys.readouterr().err
    assert got == want and "14/14" in shown and "token" in shown


# -- seeds --------------------------------------------------------------------------------------


def warm(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=8, ignore_eos=True, **changes)


@pytest.mark.parametrize("use_cache", [True, False])
def test_draws_do_not_depend_on_the_neighbours(engine: Qwen3ForCausalLM, use_cache: bool) -> None:
    params = [warm(seed) for seed in (11, 12, 13, 14)]
    together = ids_of(generate(engine, PROMPTS, params, use_cache=use_cache))
    for i, own in enumerate(params):
        assert ids_of(generate(engine, [PROMPTS[i]], own, use_cache=use_cache)) == [together[i]]
    # a neighbour that stops early or is greedy draws nothing of the others'
    mixed = [params[0], SamplingParams(max_tokens=2), warm(99, top_k=3), params[3]]
    others = ids_of(generate(engine, PROMPTS, mixed, use_cache=use_cache))
    assert (others[0], others[3]) == (together[0], together[3])


def test_seed_is_reproducible_and_another_one_differs(engine: Qwen3ForCausalLM) -> None:
    one, again, other = (ids_of(generate(engine, PROMPTS[:1], warm(seed))) for seed in (3, 3, 4))
    assert one == again != other
    assert len(set(one[0])) > 3, "not the same draw for ever"


# -- bad input ----------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no prompts": ([], {}, "no prompt"),
    "None": (None, {}, "no prompt"),
    "an empty prompt": ([[1], []], {}, "prompt 1 is empty"),
    "empty text": ([""], {"tokenizer": True}, "prompt 0 is empty"),
    "one empty text": ("", {"tokenizer": True}, "empty|no prompt"),
    "text without a tokenizer": (["Hello"], {}, "prompt 0 is text.*tokenizer"),
    "one text without a tokenizer": ("Hello", {}, "prompt 0 is text.*tokenizer"),
    "a flat list": ([1, 2, 3], {}, r"number 1.*\[\[1, 2, 3\]\]"),
    "id == vocabulary": ([[1], [2, VOCAB, 3]], {}, f"{VOCAB}.*0 to {VOCAB - 1}"),
    "a large id": ([[1, 10**6]], {}, "1000000"),
    "negative id": ([[1, -1]], {}, "-1"),
    "half an id": ([[1, 2.5]], {}, "2.5"),
    "id in a later chunk": ([[1, 2, 3, VOCAB]], {"chunk_size": 2}, f"{VOCAB}"),
    "negative id in a later chunk": ([[1, 2, 3, -9]], {"chunk_size": 2}, "-9"),
    "prompt as long as max_len": ([[1], [2] * 8], {"max_len": 8}, "prompt 1 has 8.*limited to 8"),
    "prompt longer than max_len": ([[2] * 9], {"max_len": 8}, "prompt 0 has 9.*limited to 8"),
    "prompt as long as the model": ([[2] * 64], {}, "prompt 0 has 64.*limited to 64"),
    "prompt longer than the model": ([[2] * 99], {"max_len": 200}, "99.*limited to 64"),
    "max_len below zero": ([[1]], {"max_len": -3}, "-3"),
    "max_len True": ([[1]], {"max_len": True}, "max_len.*True"),
    "chunks of nothing": ([[1, 2]], {"chunk_size": 0}, "chunk_size.*0"),
    "chunks of less": ([[1, 2]], {"chunk_size": -2}, "chunk_size.*-2"),
    "chunks without a cache": ([[1, 2]], {"chunk_size": 2, "use_cache": False}, "cache"),
    "too few params": ([[1], [2]], {"params": [FREELY]}, "2 prompts but 1"),
    "too many params": ([[1]], {"params": [FREELY] * 2}, "1 prompts but 2"),
    "no params for anybody": ([[1]], {"params": []}, "1 prompts but 0"),
    "stop string without text": ([[1]], {"params": SamplingParams(stop="x")}, "tokenizer"),
}


@pytest.mark.parametrize(
    ("what", "use_cache"),
    [(what, True) for what in BAD]
    + [(what, False) for what, (_, options, _) in BAD.items() if "chunk_size" not in options],
)
def test_bad_input_is_refused_and_the_next_call_works(
    engine: Qwen3ForCausalLM, tokenizer: Tokenizer, what: str, use_cache: bool
) -> None:
    prompts, options, named = BAD[what]
    if options.get("tokenizer"):
        options = {**options, "tokenizer": tokenizer}
    with (
        watched(engine) as batches,
        pytest.raises(ValueError, match=named),
    ):
        generate(engine, prompts, **{"use_cache": use_cache, **options})
    with pytest.raises(ValueError, match=named):
        stream(engine, prompts, **options)  # at the call: nobody has asked for a token yet
    assert not any(batch.num_tokens < 2 for batch in batches[1:]), "no token was decoded"
    want = ids_of(generate(engine, PROMPTS[:1], FREELY, use_cache=False))
    assert ids_of(generate(engine, PROMPTS[:1], FREELY)) == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_that_are_no_numbers_are_refused(temperature: float, use_cache: bool) -> None:
    broken = random_model(seed=2)
    weight = broken.lm_head.weight[5].clone()
    broken.lm_head.weight[5] = float("nan")
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=1)
    with pytest.raises(ValueError, match="not numbers"):
        generate(broken, PROMPTS, params, use_cache=use_cache)
    broken.lm_head.weight[5] = weight
    want = said(generate(random_model(seed=2), PROMPTS, params))
    assert said(generate(broken, PROMPTS, params, use_cache=use_cache)) == want


def test_more_prompts_than_the_runner_has_rows_are_refused(engine: Qwen3ForCausalLM) -> None:
    runner = static(engine, rows=2)
    with pytest.raises(ValueError, match="no room for 12 tokens of request 2"):
        generate(runner, PROMPTS, FREELY)
    want = said(generate(engine, PROMPTS[:2], FREELY))
    assert said(generate(runner, PROMPTS[:2], FREELY)) == want
