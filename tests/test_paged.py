"""Pages: bytes to blocks, blocks to slots, what is written where; and the engine on them.

What pages have in common with cells is in test_memory.py.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import random_sequences
from engines import VOCAB, poison, random_model
from memories import CONFIG, request, room, run, slots_of, table_of

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache, num_blocks_in
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.request import Request
from tutorial_engine.sampling.params import SamplingParams

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=4, v_head_dim=6)
GIB = 2**30


def pages(num_blocks: int = 8, size: int = 4, **options: Any) -> PagedKVCache:
    return PagedKVCache.from_config(CONFIG, num_blocks=num_blocks, block_size=size, **options)


# -- bytes and blocks -----------------------------------------------------------------------------


def test_ten_gib_of_llama_7b_are_1280_blocks_of_16() -> None:
    spec = KVCacheSpec(
        num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
    )
    assert num_blocks_in(10 * GIB, spec, 16) == 1280
    one_layer = replace(spec, num_layers=1)  # the mistake in circulation: no layer factor
    assert num_blocks_in(10 * GIB, one_layer, 16) == 40_960
    assert 40_960 * 16 * spec.bytes_per_token == 320 * GIB


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


def test_a_storage_that_makes_no_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="12 slots do not make blocks of 5"):
        PagedKVCache(KVStorage(SPEC, 12), 5)


def test_a_request_is_limited_by_the_model_and_by_the_pool() -> None:
    assert pages(num_blocks=5).max_len == 20
    assert pages(num_blocks=500).max_len == CONFIG.max_position_embeddings == 64


# -- writing and reading --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_a_slot_is_block_times_size_plus_offset(size: int) -> None:
    memory = pages(num_blocks=96 // size, size=size, prefix_caching=False)
    ones = [request(name, range(7)) for name in "abc"]
    for one in ones:
        run(memory, one, 5)
    memory.free(ones.pop(1).request_id)  # a hole
    for one in (*ones * 12, *ones):
        run(memory, one, 2)
        if one.num_new_tokens == 0:
            one.token_ids.append(9)
    seen: set[int] = set()
    for one in ones:
        held = table_of(memory, one)
        want = [held[p // size] * size + p % size for p in range(one.num_computed_tokens)]
        got = room(memory, one)
        assert got is not None and got.context[:-1] == want == list(slots_of(memory, one))
        assert not seen & {*want}, "a slot is somebody else's, too"
        seen |= {*want}


def test_neighbouring_blocks_are_read_as_a_view_and_others_by_number() -> None:
    memory = pages(prefix_caching=False)
    tokens = list(range(9))
    first = memory.allocate("a", tokens[:8], 0, 8)
    assert first is not None and first.context_slots == slice(0, 8)
    run(memory, request("b", range(3)))
    second = memory.allocate("a", tokens, 8, 1)
    assert second is not None and isinstance(second.context_slots, torch.Tensor)
    assert second.context_slots.tolist() == [*range(8), 12] and list(second.new_slots) == [12]
    assert second.context_slots.dtype == torch.int64


# -- admission and forks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "prompt", "asked", "first", "num_new"),
    [(16, 48, 48, 32, 16), (4, 20, 6, 12, 6)],
    ids=["of 48 cached tokens 32 are found", "what is found is no work of this step"],
)
def test_what_is_found_is_not_run(
    size: int, prompt: int, asked: int, first: int, num_new: int
) -> None:
    memory = pages(num_blocks=8, size=size)
    a, b = request("a", range(min(prompt, 3 * size))), request("b", range(prompt))
    run(memory, a)
    for _ in "twice":
        got = room(memory, b, asked)
        assert got is not None and (got.first, len(got.new)) == (first, num_new)
    run(memory, b, asked)
    assert slots_of(memory, b)[:first] == slots_of(memory, a)[:first]


def test_what_contradicts_itself_is_seen() -> None:
    memory = pages(prefix_caching=False)
    for broken, says in [
        (lambda: memory._num_cached.update(a=9), "9 tokens of a, room for 8"),
        (lambda: memory._num_cached.update(b=0), "hold"),
        (lambda: memory._waiting.update(b=None), "wait"),
    ]:
        run(memory, request("a", range(8)))
        memory.check_integrity()
        broken()
        with pytest.raises(AssertionError, match=says):
            memory.check_integrity()
        memory.free("a")
        memory.free("b")


def filled(memory: PagedKVCache, one: Request) -> None:
    """Keys and values of a request's computed tokens: its position and token, in all layers."""
    for position, slot in enumerate(slots_of(memory, one)):
        value = 100.0 * position + one.token_ids[position]
        for layer in range(memory.storage.spec.num_layers):
            k, v = memory.storage.read_slots(layer, slice(slot, slot + 1))
            k.fill_(value)
            v.fill_(-value)


def test_whoever_writes_first_to_a_shared_block_copies_what_is_in_it() -> None:
    memory, parent, child = poison(pages()), request("p", range(10)), request("c", range(10))
    run(memory, parent)
    filled(memory, parent)
    memory.fork("p", "c", 9)
    assert table_of(memory, child) == table_of(memory, parent) == (0, 1, 2)
    parent.token_ids.append(3)
    assert run(memory, parent) == [14] and table_of(memory, parent) == (0, 1, 3)
    assert slots_of(memory, parent) == (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14)
    k, _ = memory.storage.read_slots(0, slice(12, 16))
    assert k[:, 0, 0].tolist()[:2] == [808.0, 909.0] and k[2:].isnan().all(), "two were copied"
    assert run(memory, child) == [9], "the old one is its own now"
    memory.free("p")
    memory.free("c")
    assert memory.blocks.num_free == 8


def test_a_table_that_a_copy_made_neighbours_is_followed_when_it_grows_apart_again() -> None:
    memory, parent = pages(prefix_caching=False), request("p", range(8))
    memory.blocks.free_queue = OrderedDict.fromkeys([4, 3, 2, 6, 0, 1, 5, 7])
    run(memory, parent, 1)
    assert table_of(memory, parent) == (4, 3) and memory.fork("p", "c", 1) == 1
    run(memory, parent)
    assert table_of(memory, parent) == (2, 3)
    parent.token_ids.append(8)
    run(memory, parent)
    assert table_of(memory, parent) == (2, 3, 6)
    assert slots_of(memory, parent) == (*range(8, 16), 24)


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
            engine.add_request(None, prompt, params)
        ended = {}
        while engine.has_unfinished_requests():
            with torch.inference_mode(turns[engine.num_steps % len(turns)]):
                ended |= {r.request_id: r for r in engine.step() if r.finished}
        said.append([ended[name].outputs[0].token_ids for name in sorted(ended)])
    assert said[0] == said[1] == said[2] and len(said[0]) == 3
