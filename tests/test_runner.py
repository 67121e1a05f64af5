"""New tokens in, logits out, and the loop over it: how many run, where they stand, how rows end.

A failure leaves no trace, each token runs once, and the greedy tokens are those of transformers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import (
    fp32_tolerance,
    largest_difference,
    load_reference,
    random_sequences,
    save_random,
)
from engines import VOCAB, poison, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate, stream
from tutorial_engine.engine.request import Request, RequestOutput
from tutorial_engine.engine.runner import decode, forward, prefill
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler

ROWS, MAX_LEN, NEW = 4, 24, 10
PROMPTS = random_sequences([7, 1, 12, 5], VOCAB)
FREELY = SamplingParams(max_tokens=NEW, ignore_eos=True)
CACHES = ["static", "growing", "pages", "cells"]
EVERY_CACHE = pytest.mark.parametrize("name", CACHES)


@pytest.fixture(scope="module")
def engine() -> CausalLM:
    """A random model with 64 positions and no end. Look at it, never change it."""
    return random_model(seed=2)


def make(name: str, engine: CausalLM, max_len: int = MAX_LEN) -> Any:
    if name == "growing":
        return GrowingKVCache()
    if name == "pages":
        return poison(PagedKVCache.from_config(engine.config, block_size=4, num_blocks=64))
    if name == "cells":
        return poison(CellKVCache.from_config(engine.config, 256))
    return poison(StaticKVCache.from_config(engine.config, max_seqs=ROWS, max_len=max_len))


def requests_of(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request("abcdefgh"[i], prompt) for i, prompt in enumerate(prompts)]


def say(requests: Sequence[Request], tokens: Sequence[int]) -> Sequence[Request]:
    """One token more for each, as if it were sampled."""
    for request, token in zip(requests, tokens, strict=True):
        request.token_ids.append(token)
    return requests


def lens(requests: Sequence[Request]) -> list[int]:
    return [request.num_computed_tokens for request in requests]


def truth(engine: CausalLM, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each sequence, run whole and alone: [S, V]."""
    alone = [engine(Batch.from_sequences([ids]))[-1:] for ids in sequences]
    return engine.compute_logits(torch.cat(alone))


def right(engine: CausalLM, got: Tensor, requests: Sequence[Request]) -> bool:
    """Are these the logits after all tokens of each?"""
    want = truth(engine, [request.token_ids for request in requests])
    assert got.shape == want.shape and got.dtype == torch.float32
    return largest_difference(got, want) <= fp32_tolerance(want)


# -- prefill and decode ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(CACHES),
    steps=st.lists(
        st.dictionaries(
            st.integers(0, ROWS - 1),
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
            min_size=1,
        ),
        min_size=1,
        max_size=6,
    ),
    chunk_size=st.none() | st.integers(1, 3),
)
def test_any_order_of_sequences_steps_and_chunks_gives_the_logits_of_the_whole(
    name: str, steps: list[dict[int, list[int]]], chunk_size: int | None
) -> None:
    engine = random_model(num_hidden_layers=2)
    cache, all_ = make(name, engine), requests_of([[]] * ROWS)
    for new in steps:
        some = [all_[index] for index in new]
        for request, ids in zip(some, new.values(), strict=True):
            request.token_ids += ids
        with watched(engine) as batches:
            logits = prefill(engine, cache, some, chunk_size)
        assert right(engine, logits, some)
        ran: dict[str, list[int]] = {}
        for batch in batches:
            assert max(batch.query_lens) <= (chunk_size or 4)
            parts = batch.input_ids.split(batch.query_lens)
            for seq_id, part in zip(batch.seq_ids, parts, strict=True):
                ran[seq_id] = ran.get(seq_id, []) + part.tolist()
        assert ran == {"abcd"[index]: ids for index, ids in new.items()}, "each token once"


# -- failures leave no trace ----------------------------------------------------------------------


@EVERY_CACHE
@pytest.mark.parametrize("is_first", [False, True])
def test_a_forward_that_breaks_in_a_layer_changes_nothing(
    engine: CausalLM, name: str, is_first: bool
) -> None:
    """What a broken step of the engine promised is in test_interrupts.py."""

    def breaks(*_: object) -> None:
        raise KeyboardInterrupt

    cache, all_ = make(name, engine), requests_of(PROMPTS)
    if not is_first:
        prefill(engine, cache, all_)
        say(all_, [1, 2, 3, 4])
    before = lens(all_)
    handle = engine.model.layers[1].mlp.register_forward_pre_hook(breaks)  # K and V are written
    for some in (all_[:2], all_[1:]):
        with pytest.raises(KeyboardInterrupt):
            forward(engine, cache, some)
        assert lens(all_) == before
    handle.remove()
    if is_first and name == "pages":
        assert not cache.blocks.cached, "nobody may find what was not written"
    assert right(engine, prefill(engine, cache, all_), all_)


# a call with new sequences, or one more for a .. d; what it says
BAD_CALLS: dict[str, tuple[Callable[..., Any], list[tuple[str, list[Any]]], str]] = {
    "an id in the middle": (prefill, [("x", [1, 2]), ("y", [3, VOCAB, 4])], f"y holds {VOCAB}"),
    "a negative id in a later chunk": (prefill, [("x", [1, 2, -7])], "-7"),
    "no prompts": (prefill, [], "at least one"),
    "an empty prompt": (prefill, [("x", [1]), ("y", [])], "y has no token to run"),
    "two of one id": (prefill, [("x", [1]), ("x", [2])], r"an id of its own: got \['x', 'x'\]"),
    "decode: too much": (decode, [("x", [1, 2])], "request x has 2 that are not computed"),
    "more prompts than rows": (prefill, [("x", [1])], "no room for 1 tokens of request x: free"),
    "longer than a row": (prefill, [("x", [1] * 25)], "x would have 25 tokens, a row has room for"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_call_is_refused_and_nothing_is_run(engine: CausalLM, what: str) -> None:
    call, sequences, named = BAD_CALLS[what]
    cache, all_ = make("static", engine), requests_of(PROMPTS)
    prefill(engine, cache, all_)
    options = {"chunk_size": 2} if call is prefill else {}
    with pytest.raises(ValueError, match=named), watched(engine) as batches:
        call(engine, cache, [Request(name, ids) for name, ids in sequences], **options)
    with pytest.raises(ValueError, match="request a has 0 that"):
        decode(engine, cache, all_)
    assert lens(all_) == [7, 1, 12, 5] and not batches
    assert right(engine, decode(engine, cache, say(all_, [1, 2, 3, 4])), all_)


# -- what a step costs -----------------------------------------------------------------------------


def test_only_who_is_due_a_token_has_logits(engine: CausalLM) -> None:
    config = EngineConfig(max_num_batched_tokens=8, max_model_len=32)
    serving, heads = LLMEngine(engine, config=config), list[int]()
    for name, length in (("a", 3), ("b", 7), ("c", 2)):
        serving.add_request(name, range(1, 1 + length), FREELY)
    handle = engine.lm_head.register_forward_pre_hook(lambda _, args: heads.append(len(args[0])))
    got = [[output.request_id for output in serving.step()] for _ in range(3)]
    handle.remove()
    assert got == [["a"], ["a", "b", "c"], ["a", "b", "c"]] and heads == [1, 3, 3]


def test_a_decode_step_of_the_tiny_model_makes_few_calls(model: CausalLM) -> None:
    """Calls from Python into PyTorch: what a small model's step costs besides its arithmetic."""
    cache = StaticKVCache.from_config(model.config, max_len=32)
    request = Request("a", [5, 6, 7])
    prefill(model, cache, [request])
    request.token_ids.append(8)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        decode(model, cache, [request])
    kernels = ("aten::", "mkldnn::")
    events = [event for event in seen.events() or () if event.name.startswith(kernels)]
    outer = [
        event
        for event in events
        if event.cpu_parent is None or not event.cpu_parent.name.startswith(kernels)
    ]
    layers = model.config.num_hidden_layers
    assert 40 * layers < len(outer) <= 240, Counter(event.name for event in outer)


# -- the loop: the same tokens --------------------------------------------------------------------


def said(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """What was said, without the times."""
    return [(output.prompt_token_ids, *output.outputs) for output in outputs]


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_engine(model: CausalLM, *asked: Any) -> list[RequestOutput]:
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=7, max_model_len=None)
    return LLMEngine(model, config=config).generate(*asked)


def by_stream(*asked: Any) -> list[RequestOutput]:
    outputs = [output for output in stream(*asked) if output.finished]
    return sorted(outputs, key=lambda output: output.request_id)


WAYS: dict[str, Callable[..., list[RequestOutput]]] = {
    "use_cache": generate,
    "no cache": partial(generate, use_cache=False),
    "chunked": partial(generate, chunk_size=3),
    "max_len": partial(generate, max_len=30),
    "with a bar": partial(generate, progress=True),
    "stream": by_stream,
    "engine": in_engine,
}


def transformers_tokens(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' own generate(), each prompt alone."""
    theirs, made = load_reference(folder), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
        )
        made.append(out[0, len(prompt) :].tolist())
    return made


@pytest.mark.parametrize("source", ["random", "tiny"])
def test_every_way_gives_the_greedy_tokens_of_transformers(source: str, tmp_path: Path) -> None:
    """Other paths, and their logits, are in the ledger (test_ledger.py)."""
    folder = TINY if source == "tiny" else save_random(tmp_path, 2, max_position_embeddings=64)
    model, prompts = load_model(folder), PROMPTS
    want = transformers_tokens(folder, prompts)
    alone = [said(generate(model, [prompt], FREELY))[0] for prompt in prompts]
    for name, way in WAYS.items():
        outputs = way(model, prompts, FREELY)
        assert ids_of(outputs) == want, name
        assert said(outputs) == alone, name


# -- what is run, and its end ---------------------------------------------------------------------

RAGGED = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 1, 7, 2)]


def test_stopped_row_is_run_no_more(engine: CausalLM) -> None:
    with watched(engine) as batches:
        outputs = generate(engine, PROMPTS, RAGGED)
        generate(engine, PROMPTS[:1], SamplingParams(max_tokens=4), use_cache=False)
    assert [len(ids) for ids in ids_of(outputs)] == [4, 1, 7, 2]
    # prompts first; then of each row all tokens but its last; without a cache everything again
    ran = [(7, 1, 12, 5), (1,) * 3, *[(1,) * 2] * 2, *[(1,)] * 3, (7,), (8,), (9,), (10,)]
    assert [batch.query_lens for batch in batches] == ran
    assert ["".join(batch.seq_ids) for batch in batches[1:7]] == "023 02 02 2 2 2".split()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("max_len", [13, 64, None, 1000])
def test_context_ends_the_row_with_length(
    engine: CausalLM, use_cache: bool, max_len: int | None
) -> None:
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    for output in generate(engine, PROMPTS, params, max_len=max_len, use_cache=use_cache):
        (got,) = output.outputs
        assert got.finish_reason == "length" and got.stop_reason is None
        assert len(output.prompt_token_ids) + len(got.token_ids) == min(max_len or 64, 64)


def test_a_stream_grows_to_the_outputs_and_runs_no_further_than_it_is_read(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    texts = ["Once upon a time", "Anna had a red kite. One day", "Tom and", "The"]
    outputs = generate(model, texts, RAGGED, tokenizer=tokenizer)
    results = list(stream(model, texts, RAGGED, tokenizer=tokenizer))
    assert "".join(result.request_id for result in results) == "01230230202222"
    for output in outputs:
        mine = [result for result in results if result.request_id == output.request_id]
        said = [result.outputs[0].text for result in mine]
        assert all(after.startswith(before) for before, after in pairwise(said))
        assert [len(one.outputs[0].token_ids) for one in mine] == [*range(1, len(mine) + 1)]
        assert [one.finished for one in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].outputs == output.outputs and output.outputs[0].text
    with watched(model) as batches:
        reader = stream(model, texts[:2], FREELY, tokenizer=tokenizer)
        assert not batches
        for num_batches in (1, 1, 2):
            next(reader)
            assert len(batches) == num_batches
        reader.close()  # type: ignore[attr-defined]


# -- a memory or a sampler of one's own that breaks -----------------------------------------------


@pytest.mark.parametrize("broken_at", [0, 2, 7])
def test_a_memory_that_breaks_in_commit_leaves_the_step_uncounted(
    broken_at: int, engine: CausalLM
) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=3, temperature=1.0, seed=5, ignore_eos=True)
    want = generate(engine, PROMPTS, params)
    serving = LLMEngine(engine, memory=make("pages", engine))
    for i, prompt in enumerate(PROMPTS):
        serving.add_request(str(i), prompt, params)
    commit, calls = serving.memory.commit, count()

    def breaks(*what: Any) -> None:
        if next(calls) == broken_at:
            raise OSError("mine")
        commit(*what)

    with patch.object(serving.memory, "commit", breaks), pytest.raises(OSError, match="mine"):
        serving.run()
    got = sorted(serving.run(), key=lambda output: output.request_id)
    serving.check_integrity()
    assert ids_of(got) == ids_of(want)


def test_blocks_that_gave_no_token_are_found_by_nobody(engine: CausalLM) -> None:
    class Broken(Sampler):
        def sample(self, logits: Tensor) -> SampledToken:
            raise ValueError("mine")

    serving = LLMEngine(engine, memory=make("pages", engine))
    serving.add_request("a", range(1, 14), sampler=Broken(SamplingParams()))
    (output,) = serving.run()
    assert output.outputs[0].finish_reason == "error" and not serving.memory.blocks.cached
