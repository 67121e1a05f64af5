"""Pages: bytes to blocks, blocks to slots, what is written where, who is let in, who shares."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import random_sequences
from engines import VOCAB, one_thread, random_model
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVCacheManager
from tutorial_engine.cache.paged import PagedKVCache, num_blocks_in
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import make_runner
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace.events import BlockCopied, BlockFreed, Recorder
from tutorial_engine.trace.history import history

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
CONFIG = random_model(num_hidden_layers=1).config
GIB = 2**30
LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


def pages(num_blocks: int = 8, size: int = 4, **options: Any) -> PagedKVCache:
    return PagedKVCache.from_config(CONFIG, num_blocks=num_blocks, block_size=size, **options)


def poisoned(memory: PagedKVCache) -> PagedKVCache:
    for shelf in (memory.storage.k, memory.storage.v):
        shelf.fill_(float("nan"))
    return memory


def request(name: str, tokens: Sequence[int], params: SamplingParams | None = None) -> Request:
    params = params or SamplingParams()
    return Request(name, tokens, Sampler(params), StopChecker(params))


def run(memory: PagedKVCache, one: Request, num_tokens: int = 10**6) -> list[int] | None:
    """Room for its next tokens, and the forward done → where they went."""
    allocation = memory.allocate(one, num_tokens)
    if allocation is None:
        return None
    memory.commit(one, len(allocation.new_slots))
    one.num_computed_tokens = allocation.first_position + len(allocation.new_slots)
    return list(allocation.new_slots)


def context(memory: PagedKVCache, one: Request) -> list[int]:
    """The slots that it would read if it ran a token now."""
    allocation = memory.allocate(one, 1)
    assert allocation is not None
    slots = allocation.context_slots
    return list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots.tolist()


# -- bytes and blocks -----------------------------------------------------------------------------


def test_ten_gib_of_llama_7b_are_1280_blocks_of_16() -> None:
    spec = KVCacheSpec(
        num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
    )
    assert num_blocks_in(10 * GIB, spec, 16) == 1280
    one_layer = replace(spec, num_layers=1)  # the mistake in circulation: no layer factor
    assert num_blocks_in(10 * GIB, one_layer, 16) == 40_960
    assert 40_960 * 16 * spec.bytes_per_token == 320 * GIB


def test_k_and_v_may_be_of_different_width() -> None:
    # 3 layers · 2 heads · (4 + 6) · 4 bytes = 240 bytes a token
    assert num_blocks_in(240 * 4 * 7 + 959, SPEC, 4) == 7


def test_a_budget_below_one_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"Not enough memory for KV cache.* 960 bytes, 1 are given"
    ):
        num_blocks_in(1, SPEC, 4)
    with pytest.raises(ValueError, match="959 are given"):
        num_blocks_in(959, SPEC, 4)
    assert num_blocks_in(960, SPEC, 4) == 1


def test_the_pool_takes_no_more_than_the_budget() -> None:
    memory = PagedKVCache.from_config(CONFIG, memory_bytes=100_000, block_size=4)
    shelves = memory.storage.k.nbytes + memory.storage.v.nbytes
    block = shelves // memory.blocks.num_blocks
    assert shelves <= 100_000 < shelves + block
    assert memory.settings == {
        "num_blocks": memory.blocks.num_blocks,
        "block_size": 4,
        "prefix_caching": True,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "num_blocks or memory_bytes, got None, None"),
        ({"num_blocks": 2, "memory_bytes": 9999}, "got 2, 9999"),
        ({"num_blocks": 0}, "num_blocks must be .* got 0"),
        ({"num_blocks": 2, "block_size": 0}, "block_size must be .* got 0"),
        ({"memory_bytes": 10**6, "block_size": -1}, "block_size must be .* got -1"),
        ({"num_blocks": 10**12}, r"no memory for 16,000,000,000,000 slots"),
        ({"num_blocks": 2, "tp_size": 3}, "tp_size=3"),
    ],
)
def test_pools_that_cannot_be_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PagedKVCache.from_config(CONFIG, **options)  # type: ignore[arg-type]


def test_a_storage_that_makes_no_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="12 slots do not make blocks of 5"):
        PagedKVCache(KVStorage(SPEC, 12), 5)


def test_a_request_is_limited_by_the_model_and_by_the_pool() -> None:
    assert pages(num_blocks=5).max_len == 20
    assert pages(num_blocks=500).max_len == CONFIG.max_position_embeddings == 64


@LAYOUTS
def test_pages_are_the_same_memory_in_five_axes(slots_first: bool) -> None:
    memory = PagedKVCache(KVStorage(SPEC, 24, slots_first=slots_first), 4)
    k, v = memory.pages()  # [layers, blocks, H_kv, block_size, D]
    assert k.shape == (3, 6, 2, 4, 4) and v.shape == (3, 6, 2, 4, 6)
    new_k, new_v = torch.randn(1, 2, 4), torch.randn(1, 2, 6)
    memory.storage.write(1, torch.tensor([9]), new_k, new_v)  # block 2, offset 1
    assert torch.equal(k[1, 2, :, 1], new_k[0]) and torch.equal(v[1, 2, :, 1], new_v[0])


# -- writing and reading --------------------------------------------------------------------------


@LAYOUTS
def test_scattered_slots_get_their_rows_and_nothing_else_moves(slots_first: bool) -> None:
    storage = KVStorage(SPEC, 256, slots_first=slots_first)
    for shelf in (storage.k, storage.v):
        shelf.fill_(float("nan"))
    slots = [80, 81, 195, 196, 127]
    k, v = torch.randn(7, 2, 4), torch.randn(7, 2, 6)
    storage.scatter(1, torch.tensor([80, 81, -1, 195, 196, -1, 127]), k, v)  # −1 skips
    real = [0, 1, 3, 4, 6]
    got_k, got_v = storage.read(1, torch.tensor(slots))
    assert torch.equal(got_k, k[real]) and torch.equal(got_v, v[real])
    for layer in range(3):
        all_k, all_v = storage.read(layer, slice(0, 256))
        for shelf in (all_k, all_v):
            written = (~shelf.isnan()).any(dim=(1, 2)).nonzero().flatten().tolist()
            assert written == (sorted(slots) if layer == 1 else [])


@LAYOUTS
def test_copies_are_made_in_every_layer_and_nothing_else_moves(slots_first: bool) -> None:
    storage = KVStorage(SPEC, 16, slots_first=slots_first)
    storage.k.normal_()
    storage.v.normal_()
    k, v = storage.k.clone(), storage.v.clone()
    storage.copy(slice(8, 11), slice(4, 7))
    axis = 1 if slots_first else 2
    for old, new in ((k, storage.k), (v, storage.v)):
        assert torch.equal(new.narrow(axis, 4, 3), old.narrow(axis, 8, 3))
        for start, length in ((0, 4), (7, 9)):
            assert torch.equal(new.narrow(axis, start, length), old.narrow(axis, start, length))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_a_slot_is_block_times_size_plus_offset(size: int) -> None:
    memory = pages(num_blocks=96 // size, size=size, prefix_caching=False)
    ones = [request(name, range(7)) for name in "abc"]
    for one in ones:
        run(memory, one, 5)
    memory.free(ones.pop(1))  # a hole
    for one in (*ones * 12, *ones):
        run(memory, one, 2)
        if one.num_new_tokens == 0:
            one.token_ids.append(9)
    seen: set[int] = set()
    for one in ones:
        held = memory.table_of(one)
        want = [held[p // size] * size + p % size for p in range(one.num_computed_tokens)]
        assert list(memory.slots_of(one)) == want
        assert context(memory, one)[: len(want)] == want
        assert not seen & set(want)
        seen |= set(want)
        memory.check_integrity()


def test_neighbouring_blocks_are_read_as_a_view_and_others_by_number() -> None:
    memory = pages(prefix_caching=False)
    a, b = request("a", range(8)), request("b", range(3))
    first = memory.allocate(a, 8)
    assert first is not None and first.context_slots == slice(0, 8)
    memory.commit(a, 8)
    run(memory, b)
    a.token_ids.append(9)
    second = memory.allocate(a, 1)
    assert second is not None and isinstance(second.context_slots, Tensor)
    assert second.context_slots.tolist() == [*range(8), 12] and list(second.new_slots) == [12]
    assert second.context_slots.dtype == torch.int64


# -- what a scheduler may rely on -----------------------------------------------------------------


def test_pages_answer_the_question_that_rows_answer() -> None:
    memory: KVCacheManager = pages()
    assert memory.max_len == 32 and memory.storage.num_slots == 32


def test_asked_twice_before_a_commit_the_answer_is_the_same() -> None:
    memory = pages()
    a = request("a", range(10))
    for num_tokens in (6, 4):
        first, again = memory.allocate(a, num_tokens), memory.allocate(a, num_tokens)
        assert first is not None and again is not None
        assert first.first_position == again.first_position == a.num_computed_tokens
        assert list(first.new_slots) == list(again.new_slots)
        assert first.context_slots == again.context_slots
        run(memory, a, num_tokens)


def test_a_prompt_is_let_in_only_if_all_of_it_fits_and_holds_its_room() -> None:
    memory = pages(num_blocks=4)
    a, b, c = request("a", range(10)), request("b", range(50, 58)), request("c", [99])
    assert run(memory, a, 2) == [0, 1] and len(memory.table_of(a)) == 3
    assert memory.allocate(b, 1) is None and memory.table_of(b) == ()
    assert run(memory, c) == [12], "what is left is enough for it"
    memory.check_integrity()
    assert run(memory, a, 8) == [2, 3, 4, 5, 6, 7, 8, 9], "it was kept for it"


def test_one_that_was_thrown_out_needs_room_for_its_outputs_as_well() -> None:
    memory = pages(num_blocks=3, prefix_caching=False)
    a = request("a", range(8))
    run(memory, a)
    a.token_ids.append(5)
    run(memory, a)
    memory.free(a)
    run(memory, request("b", [1]))
    assert memory.allocate(a, 1) is None


def test_a_running_request_takes_a_block_when_the_token_to_be_run_needs_it() -> None:
    memory = pages()
    a = request("a", range(3))
    run(memory, a)
    for position, held in [(3, 1), (4, 2), (5, 2), (6, 2), (7, 2), (8, 3)]:
        a.token_ids.append(0)  # sampled
        assert len(memory.table_of(a)) == (held if position % 4 else held - 1)
        run(memory, a)
        assert len(memory.table_of(a)) == held


def test_none_leaves_everything_as_it_was() -> None:
    memory = pages(num_blocks=2)
    a, b = request("a", range(8)), request("b", [1, 2])
    run(memory, a)
    a.token_ids.append(7)
    before = memory.slots_of(a), memory.table_of(a), list(memory.blocks.free_queue)
    assert memory.allocate(a, 1) is None and memory.allocate(b, 2) is None
    assert (memory.slots_of(a), memory.table_of(a), list(memory.blocks.free_queue)) == before
    memory.check_integrity()


def test_forty_eight_prompt_tokens_all_cached_find_32_and_run_16() -> None:
    memory = pages(num_blocks=8, size=16)
    memory.max_len = 128
    a, b = request("a", range(48)), request("b", range(48))
    run(memory, a)
    allocation = memory.allocate(b, 48)
    assert allocation is not None and allocation.first_position == 32
    assert len(allocation.new_slots) == 16
    assert memory.slots_of(b) == memory.slots_of(a)[:32]
    memory.commit(b, 16)
    memory.check_integrity()


def test_what_is_found_is_no_work_of_this_step() -> None:
    """Asked for 6 tokens, of which none is among those that are there already."""
    memory = pages(size=4)
    run(memory, request("a", range(12)))
    allocation = memory.allocate(request("b", range(20)), 6)
    assert allocation is not None
    assert (allocation.first_position, len(allocation.new_slots)) == (12, 6)


def test_freeing_what_holds_nothing_does_nothing() -> None:
    memory = pages()
    memory.free(request("a", [1]))
    assert memory.blocks.num_free == 8 and memory.slots_of(request("a", [1])) == ()


def test_slots_that_are_not_the_tables_are_seen() -> None:
    memory = pages(prefix_caching=False)
    a = request("a", range(8))
    run(memory, a)
    memory._held["a"].num_tokens = 9
    with pytest.raises(AssertionError, match="9 tokens of a are in"):
        memory.check_integrity()
    memory._held["a"].num_tokens = 8
    memory.blocks.tables["a"].reverse()
    with pytest.raises(AssertionError, match="slots of a are not those of"):
        memory.check_integrity()
    memory.blocks.tables["a"].reverse()
    memory._held["b"] = memory._held["a"]
    with pytest.raises(AssertionError, match="hold"):
        memory.check_integrity()


# -- forks ----------------------------------------------------------------------------------------


def filled(memory: PagedKVCache, one: Request) -> None:
    """Keys and values of a request's computed tokens: its position and token, in all layers."""
    for position, slot in enumerate(memory.slots_of(one)):
        value = 100.0 * position + one.token_ids[position]
        for layer in range(memory.storage.spec.num_layers):
            k, v = memory.storage.read(layer, slice(slot, slot + 1))
            k.fill_(value)
            v.fill_(-value)


def test_a_fork_shares_and_whoever_writes_first_copies() -> None:
    memory = poisoned(pages())
    parent, child = request("p", range(10)), request("c", range(10))
    run(memory, parent)
    filled(memory, parent)
    assert memory.fork(parent, child) == 9
    assert memory.table_of(child) == memory.table_of(parent) == (0, 1, 2)
    assert memory.slots_of(child) == (), "it has not been let in"
    memory.check_integrity()
    parent.token_ids.append(3)
    assert run(memory, parent) == [14] and memory.table_of(parent) == (0, 1, 3)
    assert memory.slots_of(parent) == (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14)
    k, _ = memory.storage.read(0, slice(12, 16))
    assert k[:, 0, 0].tolist()[:2] == [808.0, 909.0] and k[2:].isnan().all(), "two were copied"
    allocation = memory.allocate(child, 10)
    assert allocation is not None and allocation.first_position == 9
    assert list(allocation.new_slots) == [9] and memory.slots_of(child) == tuple(range(9))
    memory.check_integrity()
    memory.free(parent)
    memory.free(child)
    assert memory.blocks.num_free == 8


def test_a_fork_of_whole_blocks_copies_the_last_one_to_run_its_last_token() -> None:
    memory = pages()
    parent, child = request("p", range(8)), request("c", range(8))
    run(memory, parent)
    assert memory.fork(parent, child) == 7
    assert run(memory, child) == [11] and memory.table_of(child) == (0, 2)
    assert memory.table_of(parent) == (0, 1)
    memory.check_integrity()


def test_a_table_that_a_copy_made_neighbours_is_followed_when_it_grows_apart_again() -> None:
    memory = pages(prefix_caching=False)
    memory.blocks.free_queue = OrderedDict.fromkeys([4, 3, 2, 6, 0, 1, 5, 7])
    parent, child = request("p", range(9)), request("c", [0, 9])
    parent.token_ids = list(range(8))
    run(memory, parent, 1)
    assert memory.table_of(parent) == (4, 3) and memory.fork(parent, child) == 1
    run(memory, parent)
    assert memory.table_of(parent) == (2, 3)
    parent.token_ids.append(8)
    run(memory, parent)
    assert memory.table_of(parent) == (2, 3, 6)
    assert context(memory, parent) == [*range(8, 16), 24]
    memory.check_integrity()


def test_a_fork_from_other_tokens_is_refused() -> None:
    memory = pages()
    parent = request("p", range(8))
    run(memory, parent)
    with pytest.raises(ValueError, match="c does not begin like p"):
        memory.fork(parent, request("c", [0, 1, 7, 3, 4]))
    assert memory.fork(request("new", [1]), request("c", [1, 2])) == 0, "nothing to share"
    assert memory.fork(parent, request("one", [0])) == 0, "a token has to be run"
    with pytest.raises(ValueError, match="p has blocks already"):
        memory.fork(parent, parent)
    memory.check_integrity()


def test_a_fork_that_waits_gives_way_to_whoever_runs() -> None:
    memory = pages(num_blocks=3, prefix_caching=False)
    parent, child = request("p", range(10)), request("c", range(10))
    run(memory, parent)
    memory.fork(parent, child)
    parent.token_ids.append(1)
    assert run(memory, parent) == [10], "no block is left for a copy: the fork is undone"
    assert memory.table_of(child) == () and memory.allocate(child, 10) is None
    memory.free(parent)
    assert len(run(memory, child) or ()) == 10, "it is computed like any other"


def test_a_fork_that_waits_does_not_give_way_to_one_that_waits() -> None:
    memory = pages(num_blocks=4, prefix_caching=False)
    parent, child, other = request("p", range(10)), request("c", range(10)), request("o", range(8))
    run(memory, parent)
    memory.fork(parent, child)
    assert memory.allocate(other, 8) is None and memory.table_of(child) == (0, 1, 2)
    memory.free(parent)
    assert run(memory, other) is not None, "nobody runs: or all would wait for ever"
    assert memory.table_of(child) == ()
    memory.check_integrity()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_samples_forked_from_one_prompt_are_those_of_three_requests(
    block_size: int, when: int
) -> None:
    """As n = 3 would do it: the children come when the parent's prompt is computed, or later."""
    model, prompt = random_model(3), random_sequences([11], VOCAB, seed=3)[0]
    asked = [
        SamplingParams(temperature=1.0, seed=s, max_tokens=12, ignore_eos=True) for s in (1, 2, 3)
    ]
    want = [generate(make_runner(model, max_len=64), [prompt], p)[0].token_ids for p in asked]
    assert len({ids[:3] for ids in want}) == 3
    recorder = Recorder()
    memory = poisoned(
        PagedKVCache.from_config(
            model.config, block_size=block_size, num_blocks=128 // block_size, trace=recorder
        )
    )
    engine = LLMEngine(model, memory=memory, clock=VirtualClock(), trace=recorder)
    engine.add_request(prompt, asked[0], "0")
    got, live = {}, []
    for step in range(60):
        if step == when:
            for name in "12":
                engine.add_request(prompt, asked[int(name)], name)
                memory.fork(engine.requests["0"], engine.requests[name])
        for result in engine.step():
            if result.output is not None:
                got[result.request_id] = result.output.outputs[0].token_ids
        engine.check_integrity()
        live.append(engine.state())
        if step >= when and not engine.has_unfinished_requests:
            break
    assert [got[name] for name in "012"] == want
    ran = engine.model_runner.num_tokens
    assert ran == 11 + 11 + 2 * (1 + 11), "the prompt was run once, and its last token by each"
    trace = recorder.trace()
    assert [step.after.unfinished() for step in history(trace)] == live[: trace.num_steps]
    copies = sum(isinstance(event, BlockCopied) for event in trace.events)
    assert copies >= 2 if block_size in (16, 64) else copies <= 3
    assert memory.blocks.num_free == memory.blocks.num_blocks


# -- the engine -----------------------------------------------------------------------------------


def test_steps_may_be_run_inside_and_outside_of_inference_mode() -> None:
    model = random_model()
    prompts = random_sequences([7, 5, 6], VOCAB)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    said = []
    for turns in ([False], [True, False], [False, True, True]):
        with torch.inference_mode(turns[0]):
            memory = PagedKVCache.from_config(model.config, block_size=2, num_blocks=60)
            engine = LLMEngine(model, memory=memory)
        for prompt in prompts:
            engine.add_request(prompt, params)
        ended = {}
        while engine.has_unfinished_requests:
            with torch.inference_mode(turns[engine.num_steps % len(turns)]):
                ended |= {r.request_id: r.output for r in engine.step() if r.output is not None}
        said.append([ended[name].outputs[0].token_ids for name in sorted(ended)])
    assert said[0] == said[1] == said[2] and len(said[0]) == 3


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    model = random_model()
    memory = PagedKVCache.from_config(model.config, block_size=4, num_blocks=3)
    engine = LLMEngine(model, memory=memory)
    with pytest.raises(ValueError, match=r"has 12 tokens.* limited to 12"):
        engine.add_request(list(range(12)))
    (output,) = engine.generate([list(range(11))], SamplingParams(max_tokens=9, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 1


def test_tails_are_evicted_first_and_heads_are_still_found() -> None:
    model, recorder = random_model(), Recorder()
    memory = PagedKVCache.from_config(model.config, block_size=2, num_blocks=8, trace=recorder)
    engine = LLMEngine(model, memory=memory, clock=VirtualClock(), trace=recorder)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.generate([list(range(8))], one)
    assert [e.block for e in recorder.events if isinstance(e, BlockFreed)] == [3, 2, 1, 0]
    engine.generate([list(range(50, 60))], one)  # 4 fresh blocks, and the tail of the first
    ran = engine.model_runner.num_tokens
    engine.generate([list(range(8))], one)
    assert engine.model_runner.num_tokens - ran == 2, "6 of 8 were found"


def test_same_prefix_is_run_once() -> None:
    model = random_model(1)
    prefix = random_sequences([24], VOCAB, seed=5)[0]
    prompts = [[*prefix, *tail] for tail in random_sequences([3, 5, 2, 6], VOCAB, seed=6)]
    work = {}
    for caching in (True, False):
        memory = PagedKVCache.from_config(
            model.config, block_size=4, num_blocks=60, prefix_caching=caching
        )
        engine = LLMEngine(model, memory=memory)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        said = [engine.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        work[caching] = engine.model_runner.num_tokens, said
    assert work[True][1] == work[False][1]
    assert work[False][0] - work[True][0] == 3 * 24


def test_pages_take_what_the_engine_takes() -> None:
    """bf16, slots first or heads first: the memory's dtype is the model's."""
    model = random_model(2)
    prompts = random_sequences([9, 4], VOCAB, seed=2)
    said = []
    for slots_first in (True, False):
        memory = poisoned(
            PagedKVCache.from_config(
                model.config, block_size=2, num_blocks=30, slots_first=slots_first
            )
        )
        engine = LLMEngine(model, config=EngineConfig(max_num_batched_tokens=5), memory=memory)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        said.append([output.outputs[0].token_ids for output in outputs])
    want = [
        generate(model, prompt, SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
        for prompt in ([p] for p in prompts)
    ]
    assert said[0] == said[1] == want
