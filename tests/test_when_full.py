"""Recompute against swap: what was lost is what the trace says, and the prices are as stated."""

from functools import cache
from itertools import pairwise

import pytest
from engines import one_thread

from tutorial_engine.cache import KVCacheSpec, PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.when_full import LLAMA_2_7B, TINY_VIRTUAL, Price, table, when_full
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder, Trace

PROMPTS = [list(range(10, 20)), list(range(30, 37)), [5, 6, 7]]


@cache
def run(num_blocks: int, prefix_caching: bool) -> tuple[Trace, int]:
    """A trace, and the tokens that its forwards ran."""
    model = load_model()
    memory = PagedKVCache.from_config(
        model.config,
        num_blocks=num_blocks,
        block_size=4,
        prefix_caching=prefix_caching,
        trace=Recorder(),
    )
    runner = ModelRunner(model, memory.storage)
    with one_thread():
        engine = LLMEngine(
            model,
            config=EngineConfig(max_model_len=40),
            memory=memory,
            clock=VirtualClock(),
            runner=runner,
        )
        for name, prompt in zip("ABC", PROMPTS, strict=True):
            engine.add_request(prompt, SamplingParams(max_tokens=16, ignore_eos=True), name)
        engine.run()
    assert engine.trace is not None
    return engine.trace.trace(), runner.num_tokens


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_is_recomputed_is_what_the_engine_ran_more(prefix_caching: bool) -> None:
    (trace, ran), (_, plenty) = run(12, prefix_caching), run(24, prefix_caching)
    lost = when_full(trace, TINY_VIRTUAL)
    again = sum(one.num_tokens - one.num_found for one in lost)
    assert len(lost) >= 2 and again == ran - plenty > 0
    assert any(one.num_found for one in lost) == prefix_caching
    seconds = sum(one.recompute for one in lost)
    assert seconds == pytest.approx(again * VirtualClock().per_token)
    assert when_full(run(24, prefix_caching)[0], TINY_VIRTUAL) == []
    assert f"{1e3 * seconds:.1f}" in table(lost).splitlines()[-1]
    assert len(table(lost).splitlines()) == len(lost) + 2


def test_a_swap_copies_whole_blocks_out_and_in() -> None:
    spec = KVCacheSpec.from_model(load_model().config)
    assert TINY_VIRTUAL.bytes_per_token == spec.bytes_per_token
    assert TINY_VIRTUAL.copies_per_block == 2 * spec.num_layers
    for one in when_full(run(12, False)[0], TINY_VIRTUAL):
        assert (one.num_blocks - 1) * 4 < one.num_tokens <= one.num_blocks * 4
        moved = 2 * one.num_blocks * 4 * spec.bytes_per_token
        calls = 2 * one.num_blocks * 2 * spec.num_layers
        assert one.swap == pytest.approx(moved / 10e6 + calls * 1e-4)


@pytest.mark.parametrize("price", [TINY_VIRTUAL, LLAMA_2_7B])
def test_small_blocks_are_dearer_to_swap_than_to_compute_large_ones_cheaper(price: Price) -> None:
    rows = price.rows((1, 4, 16, 64, 256))
    assert rows[0][2] > rows[0][1] and rows[-1][2] < rows[-1][1]
    assert all(a[2] > b[2] for a, b in pairwise(rows)) and len({row[1] for row in rows}) == 1


def test_only_blocks_are_swapped() -> None:
    with pytest.raises(ValueError, match=r"this run was on rows: .* record pages"):
        when_full(Trace({"num_rows": 2, "row_len": 8}, ()), TINY_VIRTUAL)
