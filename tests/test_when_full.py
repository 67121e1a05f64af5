"""Recompute against swap: what was lost is what the trace says; a swap moves whole blocks."""

from functools import cache
from itertools import pairwise

import pytest

from tutorial_engine.cache import PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.when_full import LLAMA_2_7B, Price, when_full
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
    lost = when_full(trace)
    assert (
        len(lost) >= 2 and sum(one.num_tokens - one.num_found for one in lost) == ran - plenty > 0
    )
    assert any(one.num_found for one in lost) == prefix_caching
    assert when_full(run(24, prefix_caching)[0]) == []


def test_a_swap_copies_whole_blocks_out_and_in() -> None:
    price = Price("a machine", 1e-3, 2048, 10e6, 1e-4, 8)
    assert price.swap(3, 4) == pytest.approx(2 * (3 * 4 * 2048 / 10e6 + 3 * 8 * 1e-4))
    assert "1000 µs" in str(price) and "2 KiB" in str(price) and "8 copies" in str(price)


def test_small_blocks_are_dearer_to_swap_than_to_compute_large_ones_cheaper() -> None:
    rows = LLAMA_2_7B.rows((1, 4, 16, 64, 256))
    assert rows[0][2] > rows[0][1] and rows[-1][2] < rows[-1][1]
    assert all(a[2] > b[2] for a, b in pairwise(rows)) and len({row[1] for row in rows}) == 1


def test_only_blocks_are_found_again() -> None:
    with pytest.raises(ValueError, match=r"this run was on rows: .* record pages"):
        when_full(Trace({"num_rows": 2, "row_len": 8}, ()))
