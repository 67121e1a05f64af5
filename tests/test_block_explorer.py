"""The block explorer: tables and pool are those of the engine's trace, at every knob."""

import re
from collections import Counter
from typing import Any

import pytest
from explorers import check_places, svg_of, turn, words
from tokenizers import Tokenizer

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz.block_explorer import OFF, ON, BlockExplorer
from tutorial_engine.viz.recorded import ALL_AT_ONCE, ONE_BY_ONE

PROMPTS = [
    "Once upon a time Anna had a red kite.",
    "Once upon a time Anna had a red ball.",
    "One day Ben went to the park.",
]
FRESH: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 16,
    "prefix_caching": ON,
    "n": 1,
    "budget": 64,
    "arrivals": ONE_BY_ONE,
}


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> BlockExplorer:
    return BlockExplorer(model, tokenizer, PROMPTS)


@pytest.fixture
def explorer(shared: BlockExplorer) -> BlockExplorer:
    """An explorer as it is when new."""
    return turn(shared, step=0, **FRESH)


def captions(explorer: BlockExplorer) -> list[str]:
    return [explorer.caption(step) for step in range(explorer.num_steps)]


# -- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [ON, OFF])
@pytest.mark.parametrize(("size", "blocks"), [(1, 60), (4, 16), (4, 5), (3, 8), (16, 3)])
def test_every_pool_gives_the_tokens_of_generate_alone(
    explorer: BlockExplorer, size: int, blocks: int, caching: str
) -> None:
    turn(explorer, num_blocks=64, arrivals=ALL_AT_ONCE)
    turn(explorer, block_size=size, prefix_caching=caching)
    turn(explorer, num_blocks=blocks)
    assert not explorer.error and explorer.run.num_blocks == blocks
    last = explorer.run.steps[-1].state.requests
    for name, prompt in zip("ABC", PROMPTS, strict=True):
        params = SamplingParams(max_tokens=6)
        alone = generate(explorer.model, prompt, params, tokenizer=explorer.tokenizer)[0]
        ids = tuple(explorer.tokenizer.encode(prompt).ids)
        assert last[name].token_ids == ids + alone.outputs[0].token_ids


def test_knobs_are_the_engines_settings(explorer: BlockExplorer) -> None:
    turn(explorer, block_size=2, num_blocks=30, prefix_caching=OFF, budget=9)
    settings = explorer.run.trace.settings
    assert (settings["block_size"], settings["num_blocks"]) == (2, 30)
    assert settings["prefix_caching"] is False and settings["max_num_batched_tokens"] == 9
    assert max(e.num_tokens for e in explorer.run.trace.events if hasattr(e, "num_tokens")) == 9


def test_prefixes_are_shared_only_with_prefix_caching(explorer: BlockExplorer) -> None:
    assert any("B finds 8 tokens in blocks 0 and 1" in said for said in captions(explorer))
    assert any("stored once for A and B" in said for said in captions(explorer))
    turn(explorer, prefix_caching=OFF)
    assert not any(re.search("finds|once|findable", said) for said in captions(explorer))
    assert "prefix caching off" in words(explorer, "title.note")[0]
    assert not words(explorer, "chain")


def test_at_first_sight_nothing_is_said_of_hashes_and_the_engine_finds_none(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    explorer = BlockExplorer(model, tokenizer, PROMPTS, num_blocks=9, simple=True)
    assert explorer.title != BlockExplorer.title and "prefix_caching" not in explorer.parameters
    assert explorer.run.trace.settings["prefix_caching"] is False
    for knobs in (
        {"block_size": 2, "num_blocks": 17},
        {"block_size": 8},
        {"arrivals": ALL_AT_ONCE},
    ):
        turn(explorer, **knobs)
        assert not explorer.error and explorer.run.num_blocks == explorer.value("num_blocks")
        for step in range(explorer.num_steps):
            turn(explorer, step=step)
            check_places(explorer.shown, 11)
            assert not re.search("hash|find|ref |root|cached", svg_of(explorer).split("</defs>")[1])
    turn(explorer, block_size=1, num_blocks=32)
    assert "the simple picture has room for 32 blocks" in explorer.error


def test_samples_share_a_prompt_and_are_copied_on_the_first_write(explorer: BlockExplorer) -> None:
    turn(explorer, n=2, num_blocks=32, arrivals=ALL_AT_ONCE, step=1)
    assert explorer.run.names == ("A", "B", "C", "A.1", "B.1", "C.1")
    assert explorer.run.forks == {"A.1": "A", "B.1": "B", "C.1": "C"}
    drawn = [name.split(".", 1)[1] for name in explorer.shown.items if name.startswith("request.")]
    assert drawn == ["A", "A.1", "B", "B.1", "C", "C.1"]
    copies = [name for name in explorer.shown.items if re.fullmatch(r"copy\.\d+\.line", name)]
    assert len(copies) == len(explorer.run.steps[1].copies) > 0
    ends = explorer.run.steps[-1].state.requests
    assert ends["A"].token_ids != ends["A.1"].token_ids  # they were drawn


def test_a_pool_that_is_too_small_shows_who_gives_way_and_comes_back(
    explorer: BlockExplorer,
) -> None:
    turn(explorer, num_blocks=5, arrivals=ALL_AT_ONCE)
    said = captions(explorer)
    (when,) = [i for i, one in enumerate(said) if "is preempted and loses" in one]
    turn(explorer, step=when)
    assert re.search(r"B is preempted and loses blocks .* \(\d+ tokens\)", explorer.shown_caption)
    assert " ".join(words(explorer, r"note\.B(\.1)?")) == f"waits {explorer.run.waits(when, 'B')}"
    assert any("B" in step.tables for step in explorer.run.steps[when + 1 :])
    assert explorer.run.steps[-1].ended.keys() == {"A", "B", "C"}


# -- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"n": 2, "num_blocks": 40},
        {"block_size": 1, "num_blocks": 64},
        {"block_size": 16, "num_blocks": 6},
        {"num_blocks": 5, "arrivals": ALL_AT_ONCE, "budget": 5},
    ],
)
def test_tables_and_pool_are_those_of_the_trace_and_no_word_covers_another(
    explorer: BlockExplorer, knobs: dict[str, Any]
) -> None:
    turn(explorer, num_blocks=64)
    turn(explorer, **knobs)
    assert not explorer.error
    for step in range(0, explorer.num_steps, 2):
        turn(explorer, step=step)
        now = explorer.run.steps[step]
        for name, table in now.tables.items():
            assert words(explorer, rf"block\.\d+\.{re.escape(name)}") == list(map(str, table))
        refs = [word for word in words(explorer, r"ref\.\d+") if word != "next"]
        owners = Counter(block for table in now.tables.values() for block in table)
        assert refs == [f"ref {owners[block]}" for block in sorted(owners)]
        check_places(explorer.shown, 10)


def test_hovering_says_where_a_token_lies_and_all_of_a_block(explorer: BlockExplorer) -> None:
    turn(explorer, step=3)
    run, shown = explorer.run, explorer.shown.items
    for name, table in run.steps[3].tables.items():
        for position in range(len(table) * 4):
            tip = shown[f"token.{position}.{name}"].tip
            slot = table[position // 4] * 4 + position % 4
            assert tip == run.about_token(3, name, position) and f" = {slot}; " in tip
    tip = shown["block.0"].tip
    assert tip.startswith("block 0 · ref 2: A and B · positions 0–3 · Once|·upon|·a|·time · hash ")
    assert all(shown[f"block.{block}"].tip.startswith(f"block {block} · ") for block in range(16))
    assert "te-hot" in svg_of(explorer)


def test_tables_that_are_too_long_are_told(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    explorer = BlockExplorer(model, tokenizer, [f"{p} {p} {p}" for p in PROMPTS], num_blocks=64)
    turn(explorer, block_size=2, arrivals=ALL_AT_ONCE)
    assert not explorer.error
    turn(explorer, n=2)
    assert re.search(r"longest block table has \d+ entries: with 6 requests", explorer.error)
