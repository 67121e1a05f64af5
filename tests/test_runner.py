"""New tokens in, logits out: how many run, where they stand, and that a failure leaves no trace."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checkpoints import fp32_tolerance, largest_difference, random_sequences
from engines import VOCAB, BackendRunner, poison, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_storage import memory
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.runner import (
    CachedRunner,
    ModelOutput,
    ModelRunner,
    RecomputeRunner,
    Runner,
    decode,
    forward,
    make_runner,
    prefill,
)
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.attention import NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken

ROWS, MAX_LEN = 4, 24
PROMPTS = random_sequences([7, 1, 12, 5], VOCAB)
CACHES = ["static", "growing", "pages", "cells"]
EVERY_CACHE = pytest.mark.parametrize("name", CACHES)


@pytest.fixture(scope="module")
def engine() -> Qwen3ForCausalLM:
    """Look at it, never change it."""
    return random_model(eos=(5, 7))


def make(name: str, engine: Qwen3ForCausalLM, max_len: int = MAX_LEN) -> Any:
    if name == "growing":
        return GrowingKVCache()
    if name == "pages":
        return poison(PagedKVCache.from_config(engine.config, block_size=4, num_blocks=40))
    if name == "cells":
        return poison(CellKVCache.from_config(engine.config, 120))
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


def truth(engine: Qwen3ForCausalLM, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each sequence, run whole and alone: [S, V]."""
    alone = [engine(Batch.from_sequences([ids]))[-1:] for ids in sequences]
    return engine.compute_logits(torch.cat(alone))


def right(engine: Qwen3ForCausalLM, got: Tensor, requests: Sequence[Request]) -> bool:
    """Are these the logits after all tokens of each?"""
    want = truth(engine, [request.token_ids for request in requests])
    assert got.shape == want.shape and got.dtype == torch.float32
    return largest_difference(got, want) <= fp32_tolerance(want)


# -- prefill and decode ---------------------------------------------------------------------------


@EVERY_CACHE
def test_prefill_runs_the_prompt_and_decode_one_token_each(
    engine: Qwen3ForCausalLM, name: str
) -> None:
    cache, all_ = make(name, engine), requests_of(PROMPTS)
    with watched(engine) as batches:
        assert right(engine, prefill(engine, cache, all_), all_)
        for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
            assert right(engine, decode(engine, cache, say(all_, tokens)), all_)
        some = [all_[2], all_[0]]
        assert right(engine, decode(engine, cache, say(some, [9, 10])), some)
    ran = [batch for batch in batches if batch.seq_ids]  # and not those of the truth
    assert [batch.query_lens for batch in ran] == [(7, 1, 12, 5), *[(1,) * 4] * 2, (1, 1)]
    assert ran[3].positions.tolist() == [14, 9] and ran[3].seq_ids == ("c", "a")
    assert lens(all_) == [10, 3, 15, 7]


@EVERY_CACHE
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 12, 99])
def test_any_chunking_runs_each_token_once_and_gives_the_logits_of_the_whole(
    engine: Qwen3ForCausalLM, name: str, chunk_size: int | None
) -> None:
    cache, all_ = make(name, engine), requests_of(PROMPTS)
    with watched(engine) as batches:
        got = prefill(engine, cache, all_, chunk_size)
    assert all(max(batch.query_lens) <= (chunk_size or 12) for batch in batches)
    assert len(batches) == -(-12 // (chunk_size or 12))
    ran: dict[str, list[int]] = {}
    for batch in batches:
        parts = batch.input_ids.split(batch.query_lens)
        for seq_id, ids in zip(batch.seq_ids, parts, strict=True):
            ran[seq_id] = ran.get(seq_id, []) + ids.tolist()
    assert list(ran.values()) == PROMPTS and lens(all_) == [7, 1, 12, 5]
    assert right(engine, got, all_)
    assert right(engine, decode(engine, cache, say(all_, [1, 2, 3, 4])), all_)


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
def test_any_order_of_sequences_and_steps_gives_the_logits_of_the_whole(
    name: str, steps: list[dict[int, list[int]]], chunk_size: int | None
) -> None:
    engine = random_model(num_hidden_layers=2)
    cache, all_ = make(name, engine), requests_of([[]] * ROWS)
    for new in steps:
        some = [all_[index] for index in new]
        for request, ids in zip(some, new.values(), strict=True):
            request.token_ids += ids
        assert right(engine, prefill(engine, cache, some, chunk_size), some)


@EVERY_CACHE
def test_length_stands_still_between_the_layers(engine: Qwen3ForCausalLM, name: str) -> None:
    cache, some, seen = make(name, engine), requests_of(PROMPTS[:2]), []
    watcher = NaiveAttention(
        observe=lambda layer, s, w: seen.append((layer, s, *lens(some), w.shape[-1])),
        cache=cache.storage,
    )
    forward(engine, cache, some, attention=watcher)
    seen.clear()
    some[0].token_ids.append(3)
    some[1].token_ids += [4, 5]
    forward(engine, cache, some, attention=watcher)
    kv_lens = ((0, 8), (1, 3))
    assert seen == [(layer, s, 7, 1, kv_len) for layer in range(3) for s, kv_len in kv_lens]
    assert lens(some) == [8, 3]


# -- failures leave no trace ----------------------------------------------------------------------


class Boom(Exception):
    """Something went wrong inside a layer."""


class Breaking(SdpaAttention):
    """Raises in a layer, after that layer's keys were stored."""

    def __init__(self, cache: Any, layer: int) -> None:
        super().__init__(cache.storage)
        self.layer = layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == self.layer:
            raise Boom
        return out


@EVERY_CACHE
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_exception_inside_a_layer_changes_nothing(
    engine: Qwen3ForCausalLM, name: str, layer: int, is_first: bool
) -> None:
    logits = []
    for broken in (False, True):
        cache, all_ = make(name, engine), requests_of(PROMPTS)
        if not is_first:
            prefill(engine, cache, all_)
            say(all_, [1, 2, 3, 4])
        before = lens(all_)
        if broken:
            for some in (all_[:2], all_[1:]):
                with pytest.raises(Boom):
                    forward(engine, cache, some, attention=Breaking(cache, layer))
                assert lens(all_) == before
        logits.append(prefill(engine, cache, all_))
        assert right(engine, logits[-1], all_)
    assert torch.equal(*logits)


def add(call: Callable[..., object], sequences: Any, *args: Any, say: Any = ()) -> Any:
    """A call with requests of their own, beside those that are there."""
    made = [Request(f"n{i}", ids) for i, ids in enumerate(sequences)]
    return lambda model, cache, all_: call(model, cache, made, *args)


BAD_CALLS: dict[str, tuple[Callable[[Qwen3ForCausalLM, Any, list[Request]], object], str]] = {
    "id in the middle": (add(prefill, [[1, 2], [3, VOCAB, 4]]), f"n1 holds {VOCAB}"),
    "id in a later chunk": (add(prefill, [[1, 2, 3, 999, 4]], 2), "n0 holds 999"),
    "negative id": (add(prefill, [[1, -1, 2]]), "-1"),
    "negative id in a later chunk": (add(prefill, [[1, 2, -7]], 2), "-7"),
    "id that is no number": (add(prefill, [[1, "2"]]), "'2'"),
    "half an id": (add(prefill, [[1, 2.5]]), "2.5"),
    "no prompts": (add(prefill, []), "at least one"),
    "an empty prompt": (add(prefill, [[1], []]), "n1 has no token to run"),
    "chunks of nothing": (add(prefill, [[1]], 0), "chunk_size.*0"),
    "chunks of less": (add(prefill, [[1]], -3), "chunk_size.*-3"),
    "decode: id == vocabulary": (
        lambda m, c, all_: decode(m, c, say(all_, [1, 2, VOCAB, 4])),
        f"c holds {VOCAB}",
    ),
    "decode: negative id": (lambda m, c, all_: decode(m, c, say(all_, [1, -2, 3, 4])), "-2"),
    "decode: nobody": (lambda m, c, all_: decode(m, c, []), "at least one"),
    "decode: nothing new": (lambda m, c, all_: decode(m, c, all_), "request a has 0 that"),
    "decode: too much": (add(decode, [[1, 2]]), "request n0 has 2 that are not computed"),
    "one twice": (lambda m, c, all_: prefill(m, c, [*say(all_, [1] * 4), all_[0]]), "an id of its"),
    "two of one id": (
        lambda m, c, all_: prefill(m, c, [Request("x", [1]), Request("x", [2])]),
        r"an id of its own: got \['x', 'x'\]",
    ),
}
NO_ROOM: dict[str, tuple[Callable[[Qwen3ForCausalLM, Any, list[Request]], object], str]] = {
    "more prompts than rows": (add(prefill, [[1]]), "no room for 1 tokens of request n0: free"),
    "all chunks together": (
        lambda m, c, all_: prefill(m, c, [longer(all_[0], 18)], 3),
        "sequence a would have 25 tokens, a row has room for 24",
    ),
    "one row only": (
        lambda m, c, all_: prefill(m, c, [longer(all_[1], 1), longer(all_[2], 13)]),
        "sequence c would have 25 tokens",
    ),
}


def longer(request: Request, by: int) -> Request:
    request.token_ids += [1] * by
    return request


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, what) for name in CACHES for what in BAD_CALLS]
    + [(name, what) for name in ("static",) for what in NO_ROOM],
)
def test_bad_call_is_refused_and_nothing_is_run(
    engine: Qwen3ForCausalLM, name: str, what: str
) -> None:
    call, named = (BAD_CALLS | NO_ROOM)[what]
    cache, all_ = make(name, engine), requests_of(PROMPTS)
    prefill(engine, cache, all_)
    bytes_before = None if name == "growing" else memory(cache.storage)
    with pytest.raises(ValueError, match=named), watched(engine) as batches:
        call(engine, cache, all_)
    assert lens(all_) == [7, 1, 12, 5] and not batches
    assert bytes_before is None or memory(cache.storage) == bytes_before
    for request, prompt in zip(all_, PROMPTS, strict=True):
        request.token_ids = list(prompt)
    assert right(engine, decode(engine, cache, say(all_, [1, 2, 3, 4])), all_)


# -- runners --------------------------------------------------------------------------------------

RUNNERS: dict[str, Callable[[Qwen3ForCausalLM], Runner]] = {
    "static cache": lambda m: make_runner(m, num_seqs=2, max_len=MAX_LEN),
    "torch.cat cache": lambda m: CachedRunner(m, GrowingKVCache()),
    "pages": lambda m: CachedRunner(m, make("pages", m)),
    "textbook attention": lambda m: BackendRunner(m, make("cells", m)),
    "no cache": lambda m: make_runner(m, use_cache=False),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_a_runner_runs_what_is_new_also_after_what_it_refused(
    engine: Qwen3ForCausalLM, name: str
) -> None:
    runner = RUNNERS[name](engine)
    assert runner.eos_token_ids == (5, 7) and runner.vocab_size == VOCAB
    for bad in ([[1, 2], [3, VOCAB]], [[1], []], [[-1], [1]]):
        with pytest.raises(ValueError):
            runner.run(requests_of(bad))
    two = requests_of(PROMPTS[:2])
    assert right(engine, runner.run(two), two)
    for bad in ([3, VOCAB], [VOCAB, 3], [3, -1]):
        with pytest.raises(ValueError, match=str(max(bad) if min(bad) > 0 else -1)):
            runner.run(say(two, bad))
        for request in two:
            request.token_ids.pop()
    assert right(engine, runner.run(say(two, [1, 2])), two)


@pytest.mark.parametrize("name", [name for name in RUNNERS if name != "no cache"])
def test_what_a_cache_held_under_the_id_of_a_new_request_is_forgotten(
    engine: Qwen3ForCausalLM, name: str
) -> None:
    runner = RUNNERS[name](engine)
    for prompts in (PROMPTS[:2], PROMPTS[2:], [PROMPTS[3]]):
        new = requests_of(prompts)
        assert right(engine, runner.run(new, 5), new)


@pytest.mark.parametrize(
    ("max_len", "length"), [(None, 64), (0, 64), (10, 10), (64, 64), (10**6, 64)]
)
def test_runner_is_as_long_as_cache_and_model_allow(
    engine: Qwen3ForCausalLM, max_len: int | None, length: int
) -> None:
    runner = make_runner(engine, num_seqs=3, max_len=max_len)
    assert isinstance(runner, CachedRunner) and isinstance(runner.cache, StaticKVCache)
    assert runner.max_len == runner.cache.max_len == length and runner.cache.num_rows == 3
    assert CachedRunner(engine, GrowingKVCache()).max_len == 64
    for num_seqs in (0, -1, True):
        with pytest.raises(ValueError, match=f"max_seqs.*{num_seqs}"):
            make_runner(engine, num_seqs=num_seqs)


def test_cache_takes_the_models_dtype() -> None:
    runner = make_runner(random_model().bfloat16(), max_len=8)
    assert isinstance(runner, CachedRunner) and isinstance(runner.cache, StaticKVCache)
    assert runner.cache.storage.k.dtype == torch.bfloat16
    new = requests_of([[1, 2]])
    assert runner.run(new).dtype == torch.float32
    assert runner.run(say(new, [3])).isfinite().all()


def test_recompute_runs_everything_again_and_refuses_chunks(engine: Qwen3ForCausalLM) -> None:
    runner, all_ = RecomputeRunner(engine), requests_of(PROMPTS)
    runner.run(all_)
    runner.run(say([all_[0], all_[2]], [1, 2]))
    assert runner.tokens_run == 25 + 8 + 13 and not any(lens(all_)) and not runner.can_chunk
    with pytest.raises(ValueError, match="needs a cache"):
        runner.run(all_, 4)


# -- the engine's runner: a step in one forward ---------------------------------------------------

BAD = 13  # the token at which a faulty model stumbles
THREE = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8, 9, 10], "c": [11, 12]}


class Bench:
    """Scheduler, rows full of NaN, and the runner; next tokens are given by hand."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        prompts: dict[str, list[int]] = THREE,
        naive: bool = False,
        **limits: Any,
    ) -> None:
        rows = make("static", model, max_len=32)
        self.scheduler = Scheduler(SchedulerConfig(**limits), rows, VirtualClock().now)
        attention = NaiveAttention(cache=rows.storage) if naive else None
        self.runner, self.model = ModelRunner(model, rows.storage, attention), model
        for name, prompt in prompts.items():
            self.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=20)))

    def step(self) -> tuple[list[str], ModelOutput]:
        """Plan and run; whoever is due a token gets 50 + its number of outputs → who ran.

        Each row of logits must be what the model says of that request alone, without a cache.
        """
        scheduled = self.scheduler.schedule()
        output = self.runner.run(scheduled)
        if output.ready:
            assert right(self.model, output.logits, [one.request for one in output.ready])
        result: dict[str, SampledToken | Exception] = {
            one.request.request_id: SampledToken(50 + len(one.request.tokens))
            for one in output.ready
        }
        self.scheduler.update(scheduled, result | output.faults)
        self.scheduler.check_integrity()
        return names(scheduled), output


def names(scheduled: Sequence[ScheduledRequest]) -> list[str]:
    return [one.request.request_id for one in scheduled]


@pytest.mark.parametrize("naive", [False, True])
def test_decodes_and_chunks_run_in_one_forward_and_only_who_is_due_has_logits(
    engine: Qwen3ForCausalLM, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, heads = Bench(engine, naive=naive, max_num_batched_tokens=8), list[int]()
    real = engine.compute_logits
    with watched(engine) as batches:
        for want in (["a"], ["a", "b", "c"], ["a", "b", "c"]):
            with monkeypatch.context() as patch:
                patch.setattr(
                    bench.runner.model,
                    "compute_logits",
                    lambda hidden: heads.append(len(hidden)) or real(hidden),
                )
                _, output = bench.step()
            assert names(output.ready) == want and output.faults == {}
    ran_batches = [batch for batch in batches if batch.seq_ids]
    assert [batch.query_lens for batch in ran_batches] == [(3, 5), (1, 2, 2), (1, 1, 1)]
    assert bench.runner.num_forwards == 3 and bench.runner.num_tokens == 8 + 5 + 3
    assert heads[::2] == [1, 3, 3], "the head computes no other rows (then comes the truth's)"
    batch = ran_batches[1]
    assert batch.input_ids.tolist() == [50, 9, 10, 11, 12]
    assert batch.positions.tolist() == [3, 5, 6, 0, 1] and batch.seq_ids == ("a", "b", "c")
    assert batch.slot_mapping is not None
    assert batch.slot_mapping.tolist() == [3, 32 + 5, 32 + 6, 64, 65]
    assert batch.context_slots == (slice(0, 4), slice(32, 39), slice(64, 66))


def test_one_in_the_middle_or_all_may_not_be_due(engine: Qwen3ForCausalLM) -> None:
    ran, output = Bench(engine, long_prefill_token_threshold=4).step()
    assert (ran, names(output.ready)) == (["a", "b", "c"], ["a", "c"])
    bench = Bench(engine, {"b": THREE["b"]}, max_num_batched_tokens=4)
    _, output = bench.step()
    assert output.ready == [] and output.logits.numel() == 0 and output.faults == {}
    assert bench.runner.num_forwards == 1
    assert names(bench.step()[1].ready) == ["b"]


def test_a_resumed_request_is_computed_again(engine: Qwen3ForCausalLM) -> None:
    bench = Bench(engine)
    bench.step()
    bench.step()
    bench.scheduler.preempt(bench.scheduler.running[-1])
    with watched(engine) as batches:
        assert names(bench.step()[1].ready) == ["a", "b", "c"]
    assert batches[0].query_lens == (1, 1, 4)


def test_nothing_is_kept_for_training() -> None:
    model = random_model().requires_grad_(True)
    with torch.enable_grad():
        _, output = Bench(model).step()
    assert not output.logits.requires_grad


@contextmanager
def stumbling(model: Qwen3ForCausalLM, fault: BaseException | None = None) -> Iterator[None]:
    """Inside the block the model fails in its second layer when it meets BAD in a cache."""
    met = []

    def look(_: object, args: tuple[Batch]) -> None:
        met.append(bool(args[0].seq_ids) and bool((args[0].input_ids == BAD).any()))

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


@pytest.mark.filterwarnings("ignore:a forward of")
def test_a_model_that_raises_fails_the_faulty_one_only(engine: Qwen3ForCausalLM) -> None:
    bench = Bench(engine, THREE | {"x": [20, BAD, 21]})
    with stumbling(engine):
        ran, output = bench.step()
        assert (ran, names(output.ready)) == ([*"abcx"], [*"abc"])
        assert {key: str(fault) for key, fault in output.faults.items()} == {"x": "thirteen"}
        assert bench.runner.num_forwards == 1 + 4
        for _ in range(2):
            ran, output = bench.step()
            assert ran == [*"abc"] and output.faults == {}
        assert bench.runner.num_forwards == 5 + 2
        bench.scheduler.running[1].token_ids[-1] = BAD  # in decode, after a good prefill
        _, output = bench.step()
    assert (names(output.ready), list(output.faults)) == (["a", "c"], ["b"])


@pytest.mark.filterwarnings("ignore:a forward of")
@pytest.mark.parametrize(
    ("prompts", "good", "forwards"),
    [
        ({"a": [1], "x": [BAD], "y": [BAD, 2]}, ["a"], 4),
        ({"x": [BAD], "y": [BAD]}, [], 3),
        ({"x": [BAD]}, [], 2),  # who is alone has a second try, too
        ({"a": [1], "y": [2, -4], "c": [11]}, ["a", "c"], 3),  # no batch can be made: 1 less
    ],
)
def test_several_may_fail_and_also_all(
    prompts: dict[str, list[int]], good: list[str], forwards: int, engine: Qwen3ForCausalLM
) -> None:
    bench = Bench(engine, prompts)
    with stumbling(engine):
        _, output = bench.step()
    assert (names(output.ready), sorted(output.faults)) == (good, sorted({*prompts} - {*good}))
    assert bench.scheduler.has_unfinished == bool(good)


@pytest.mark.filterwarnings("ignore:a forward of")
def test_a_fault_with_nobody_due_is_a_fault_too(engine: Qwen3ForCausalLM) -> None:
    bench = Bench(engine, {"x": [1, BAD], "b": THREE["b"]}, max_num_batched_tokens=4)
    with stumbling(engine):
        ran, output = bench.step()
        assert (ran, output.ready, list(output.faults)) == (["x", "b"], [], ["x"])
        while not output.ready:
            _, output = bench.step()


def test_what_is_run_again_is_told(engine: Qwen3ForCausalLM) -> None:
    with stumbling(engine), pytest.warns(UserWarning, match="2 requests failed .*thirteen"):
        Bench(engine, {"a": [1], "x": [BAD]}).step()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_no_fault_and_the_step_can_be_run_again(
    engine: Qwen3ForCausalLM, stop: BaseException
) -> None:
    bench = Bench(engine, THREE | {"x": [BAD]})
    with stumbling(engine, stop), pytest.raises(type(stop)):
        bench.step()
    assert bench.runner.num_forwards == 1
    assert names(bench.step()[1].ready) == [*"abcx"]


def test_a_decode_step_of_the_tiny_model_makes_few_calls(model: Qwen3ForCausalLM) -> None:
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
    assert 40 * layers < len(outer) <= 200, Counter(event.name for event in outer)


def test_a_backend_without_this_memory_is_refused(model: Qwen3ForCausalLM) -> None:
    cache, other = (StaticKVCache.from_config(model.config, max_len=8) for _ in "ab")
    for backend in (SdpaAttention(), SdpaAttention(other.storage), NaiveAttention()):
        with pytest.raises(ValueError, match=r"does not read this memory.*memory\.storage"):
            ModelRunner(model, cache.storage, backend)
    with pytest.raises(ValueError, match=r"make a SdpaAttention first, with memory\.storage"):
        ModelRunner(model, cache.storage, SdpaAttention)  # type: ignore[arg-type]
    ModelRunner(model, cache.storage, NaiveAttention(cache=cache.storage))
