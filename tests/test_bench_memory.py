"""The account of memory layouts: the same work on each, checked answers, figures as they were."""

from typing import Any

import pytest
import torch
from engines import random_model
from test_bench_serving import SMALL, alone
from torch import Tensor

from tools.bench import allocation_cost, long_context, memory_cost, report
from tools.bench.allocation_cost import measure_allocation
from tools.bench.long_context import measure_long_context, slice_of
from tools.bench.memory_cost import (
    ColdServer,
    MemoryCost,
    race_layouts,
    race_prefix_cache,
    shared_prefix_requests,
)
from tools.bench.servers import serving_config
from tools.bench.serving import Agreement
from tools.bench.shapes import SHAPES
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.trace.events import Admitted, Recorder


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PREFIX": 32, "OWN": 8, "NEW": 3}.items():
        monkeypatch.setattr(memory_cost, name, value)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model(TINY)


def gather_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of scattered slots come in another order."""
    gather = KVStorage._gather

    def mistaken(self: KVStorage, which: int, *args: Any) -> Tensor:
        out = gather(self, which, *args)
        return out.flip(0) if which else out

    monkeypatch.setattr(KVStorage, "_gather", mistaken)
    monkeypatch.setattr("tutorial_engine.cache.storage.LONG", 1)  # all copies go that way


# -- the two races --------------------------------------------------------------------------------


def test_rows_and_pages_give_each_request_what_it_gets_alone(tiny: Any) -> None:
    result = race_layouts(tiny, SMALL, 2)
    assert result.agreement == dict.fromkeys(("rows", "pages"), Agreement(3, 16))
    config = serving_config(SMALL)
    server = ColdServer(tiny, config, memory_cost._pages(tiny, config, prefix_caching=True))
    for _ in range(2):
        assert server.serve(SMALL) == alone(tiny, SMALL)
    took = result.seconds
    assert result.ratio == {"rows": 1.0, "pages": took["rows"] / took["pages"]}
    assert all(len(samples) == 2 for samples in result.samples.values())


def test_pages_have_as_many_slots_as_rows(tiny: Any) -> None:
    config = serving_config(SMALL)
    pages = memory_cost._pages(tiny, config, prefix_caching=False)
    assert pages.storage.num_slots == config.max_num_seqs * config.max_model_len
    assert not pages.blocks.prefix_caching


def test_four_fifths_of_each_prompt_are_shared_and_the_rest_is_its_own() -> None:
    requests = shared_prefix_requests(5, 512)
    assert requests == shared_prefix_requests(5, 512)
    assert len({one.prompt[:32] for one in requests}) == 1
    assert len({one.prompt[32:] for one in requests}) == 5
    assert all(len(one.prompt) == 40 and one.new_tokens == 3 for one in requests)


def test_a_cold_server_finds_only_what_the_same_run_has_computed(tiny: Any) -> None:
    requests = shared_prefix_requests(4, tiny.config.vocab_size)
    one_at_a_time, recorder = serving_config(requests[:1]), Recorder()
    memory = PagedKVCache.from_config(tiny.config, num_blocks=12, trace=recorder)
    server = ColdServer(tiny, one_at_a_time, memory)
    for _ in range(2):
        server.serve(requests)
    found = [e.num_cached for e in recorder.events if isinstance(e, Admitted)]
    assert found == [0, 32, 32, 32] * 2


def test_prefix_race_says_the_same_and_runs_fewer_tokens(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for name in ("OurServer", "ColdServer"):
        kind = getattr(memory_cost, name)

        def make(*args: Any, kind: Any = kind) -> Any:
            made.append(kind(*args))
            return made[-1]

        monkeypatch.setattr(memory_cost, name, make)
    requests = shared_prefix_requests(30, tiny.config.vocab_size)
    result = race_prefix_cache(tiny, requests, 1)
    assert result.agreement == dict.fromkeys(("no prefix cache", "prefix cache"), (30, 90))
    plain, cached = (server.engine.runner.num_tokens for server in made)
    assert plain == 2 * 30 * 42, "two runs of 30 prompts of 40 tokens, and 2 more to run for each"
    assert cached < 0.75 * plain, "512 tokens of the first step are run before anything is found"


def test_wrong_answers_are_no_way_to_win(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = race_layouts(tiny, SMALL, 1)
    wrong = result._replace(agreement={"rows": Agreement(3, 16), "pages": Agreement(2, 15)})
    with pytest.raises(ValueError, match="pages: only 2 of 3 requests and 15 of 16 tokens"):
        memory_cost._checked(wrong, torch.float32)
    assert memory_cost._checked(wrong, torch.bfloat16) is wrong, "no two paths agree there"
    gather_wrongly(monkeypatch)
    long = [one._replace(new_tokens=40) for one in SMALL]  # until their blocks lie scattered
    with pytest.raises(ValueError, match="one is wrong"):
        race_layouts(tiny, long, 1)


# -- long contexts --------------------------------------------------------------------------------


def test_long_contexts_are_scattered_on_pages_and_answer_alike() -> None:
    result = measure_long_context(random_model(), 3, 50, rounds=2, block_size=4)
    assert (result.batch, result.context, result.layers, result.block_size) == (3, 50, 3, 4)
    assert result.scattered == 1.0 and result.difference < 1e-4
    ways = {"rows", "pages", "in place, loop", "in place, many blocks"}
    assert result.seconds.keys() == result.samples.keys() == ways
    assert result.ratio["rows"] == 1.0
    assert result.ratio["pages"] == result.seconds["pages"] / result.seconds["rows"]
    assert result.gathered == dict.fromkeys(ways, 0) | {
        "pages": 3 * 50 * KVCacheSpec.from_model(random_model().config).bytes_per_token
    }
    assert all(len(samples) == 2 for samples in result.samples.values())


def test_a_long_context_read_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_wrongly(monkeypatch)
    with pytest.raises(ValueError, match="rows and pages disagree by"):
        measure_long_context(random_model(), 3, 50, rounds=1, block_size=4)


def test_every_slot_of_a_long_context_is_written_once() -> None:
    model = random_model()
    for memory in long_context._memories(model, 3, 30, 4):
        for tensor in (memory.storage.k, memory.storage.v):
            tensor.fill_(float("nan"))
        step = long_context._Step(model, memory, 3, 30)
        assert bool(step.run(ModelRunner(model, memory.storage)).isfinite().all())
        memory.check_integrity()
        held = [memory.describe(request.request_id).slots[:29] for request in step.requests]
        slots = [slot for own in held for slot in own]
        assert len(slots) == len(set(slots)) == 3 * 29, "the newest token is the one that is run"


def test_part_of_a_model_has_its_layers_and_its_share_of_the_head() -> None:
    whole = SHAPES["qwen3-0.6b"]
    config = slice_of(whole, 7)
    assert config.num_hidden_layers == 7 and config.vocab_size == whole["vocab_size"] // 4
    assert config.hidden_size == 1024 and config.num_key_value_heads == 8
    assert config.rope_theta == 1_000_000.0


# -- the books ------------------------------------------------------------------------------------


def test_allocation_cost_is_of_all_three_calls_on_each_memory() -> None:
    costs = measure_allocation(running=5, steps=20, prompt_len=9)
    assert [cost.memory for cost in costs] == [
        "rows",
        "pages, blocks of 1",
        "pages, blocks of 16",
        "cells",
    ]
    for cost in costs:
        assert cost.running == 5 and len(cost.samples) == 20
        assert min(cost.allocate, cost.commit, cost.free) > 0
        inside = cost.together - cost.free
        assert min(cost.samples) <= inside <= max(cost.samples)


def test_allocation_is_measured_in_decode_on_books_that_end_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[PagedKVCache] = []
    asked: list[int] = []

    class Watched(PagedKVCache):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

        def allocate(self, seq_id: str, token_ids: Any, num_computed: int, num_new: int) -> Any:
            asked.append(num_new)
            return super().allocate(seq_id, token_ids, num_computed, num_new)

    monkeypatch.setattr(allocation_cost, "PagedKVCache", Watched)
    measure_allocation(running=3, steps=4, prompt_len=6)
    assert asked == ([6, 7, 8] + [1] * 12) * 2, "prompts of unequal length, then decode"
    assert len(made) == 2 and all(m.blocks.num_free == m.blocks.num_blocks for m in made)


# -- the report -----------------------------------------------------------------------------------


def account(tiny: Any) -> MemoryCost:
    return MemoryCost(
        race_layouts(tiny, SMALL, 1),
        race_prefix_cache(tiny, shared_prefix_requests(2, tiny.config.vocab_size), 1),
        0.8,
        measure_long_context(random_model(), 3, 20, rounds=1),
        "3 layers of something",
        measure_allocation(running=2, steps=2, prompt_len=3),
    )


def test_table_and_figures_say_what_was_measured(tiny: Any) -> None:
    cost = account(tiny)
    table, figures = report.memory_table(cost), report.memory_figures(cost)["memory"]
    lines = table.splitlines()
    assert f"{1 / cost.ragged.ratio['pages']:.2f}×" in lines[2] and "3 of 3 requests" in lines[2]
    assert f"{cost.prefix.ratio['prefix cache']:.2f}×" in lines[6]
    assert "2 with 80% shared" in lines[4] and "3 layers of something" in lines[8]
    for number, (name, ratio) in enumerate(cost.long_context.ratio.items(), 9):
        assert lines[number].startswith(name) and f" {ratio:.2f}×" in lines[number]
    copied = [float(line.split("×")[-1].split()[0]) for line in lines[9:13]]
    assert copied[0] == copied[2] == copied[3] == 0 < copied[1]
    for own, line in zip(cost.allocation, lines[-4:], strict=True):
        assert line.startswith(own.memory) and line.endswith(f"{own.together:.1f}")
    assert max(map(len, lines)) <= 130
    assert figures["ragged"]["seconds"] == cost.ragged.seconds
    assert figures["prefix"]["agreement"]["prefix cache"] == {"requests": 2, "tokens": 6}
    assert figures["long_context"]["ratio"] == cost.long_context.ratio
    assert figures["allocation"] == [own._asdict() for own in cost.allocation]
