"""The engine's rows of the equality ledger: the same logits as without a cache, or it is seen."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import random_sequences
from engines import VOCAB, one_thread, poison, random_model
from test_engine_properties import (
    first_row,
    logits_of_the_neighbour,
    position_too_far,
    replaced,
    slots_of_the_neighbour,
)
from tokenizers import Tokenizer

from tutorial_engine.cache.memory import RowManager
from tutorial_engine.cache.rows import Allocation
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.model_runner import ModelRunner
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.lab import engine_paths
from tutorial_engine.lab.ledger import REFERENCE, SAFE_MARGIN, AnyPath, ledger, our_paths, table
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

SEEDS = range(6)
SHAPES: dict[str, dict[str, Any]] = {
    "two heads a group": {"num_hidden_layers": 2},
    "one K/V head for all": {"num_key_value_heads": 1, "num_attention_heads": 6},
    "as many K/V heads as heads": {"num_key_value_heads": 4, "head_dim": 24},
    "tied, bias, three layers": {"tie_word_embeddings": True, "attention_bias": True},
}
LENGTHS, STEPS, MAX_LEN = [1, 9, 5, 13], 6, 32
NEIGHBOURS = random_sequences([7, 3, 11], VOCAB, seed=99)
ROWS = 5


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread; and NaN in every slot before an engine runs."""
    from_config = RowManager.from_config

    def poisoned(*args: Any) -> RowManager:
        manager = from_config(*args)
        poison(manager.cache)
        return manager

    with one_thread(), patch.object(RowManager, "from_config", poisoned):
        yield


def all_paths(model: Qwen3ForCausalLM, max_len: int = MAX_LEN) -> dict[str, AnyPath]:
    """The old rows and the engine's, the reference first."""
    return {**our_paths(model, max_len), **engine_paths(model, NEIGHBOURS, max_len)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_engine_gives_the_logits_of_every_other_path(shape: str, seed: int) -> None:
    model, prompts = random_model(seed, **SHAPES[shape]), random_sequences(LENGTHS, VOCAB, seed)
    paths = all_paths(model)
    rows = {row.path: row for row in ledger(paths, prompts, STEPS)}
    assert len(rows) == len(our_paths(model)) + ROWS
    far = {row.path: row.difference for row in rows.values() if not row.within}
    assert not far
    if rows[REFERENCE].margin > SAFE_MARGIN:  # or rounding may swap two tokens
        assert all(row.ok for row in rows.values())
    if not model.config.tie_word_embeddings:  # those repeat themselves: look at their logits only
        assert paths[REFERENCE].run(prompts, STEPS).argmax(-1).unique().numel() >= 4


def test_most_of_these_models_leave_no_doubt_about_a_token() -> None:
    sure = 0
    for shape in SHAPES.values():
        for seed in SEEDS:
            path = our_paths(random_model(seed, **shape), MAX_LEN)[REFERENCE]
            best = path.run(random_sequences(LENGTHS, VOCAB, seed), STEPS).topk(2).values
            sure += bool((best[..., 0] - best[..., 1]).min() > SAFE_MARGIN)
    assert sure >= 20, "of 24"


def test_engine_left_to_itself_says_the_same_tokens() -> None:
    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB)
    paths = all_paths(model)
    want = paths[REFERENCE].run(prompts, STEPS)
    for name, path in engine_paths(model, NEIGHBOURS, MAX_LEN).items():
        got = path.run(prompts, STEPS)
        assert got.shape == want.shape, name
        assert torch.equal(got.argmax(-1), want.argmax(-1)), name


def test_shipped_model_has_a_whole_ledger(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    texts = ["Once upon a time", "Anna had a red kite. One day", "Tom"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    rows = ledger(all_paths(model, 128), prompts, 8)
    assert [row.path for row in rows if not row.ok] == []
    assert "✘" not in table(rows) and sum("engine" in row.path for row in rows) == ROWS


@pytest.mark.parametrize("policy", [StaticBatching, OneByOne, PrefillFirst])
def test_policies_change_no_logits(policy: Any) -> None:
    model, prompts = random_model(2), random_sequences(LENGTHS, VOCAB, 2)
    with patch.object(LLMEngine, "__init__", with_policy(LLMEngine.__init__, policy)):
        paths = engine_paths(model, [], MAX_LEN)
        kept = {name: path for name, path in paths.items() if "chunked" not in name}
        rows = ledger({**our_paths(model, MAX_LEN), **kept}, prompts, STEPS)
    assert [row.path for row in rows if not row.ok] == []


def with_policy(init: Callable[..., None], policy: Any) -> Any:
    def wrapped(self: LLMEngine, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "scheduler": policy})

    return wrapped


# -- what each row is about -----------------------------------------------------------------------


def test_rows_run_what_their_names_say() -> None:
    model, prompts = random_model(), random_sequences(LENGTHS, VOCAB)
    most: dict[str, int] = {}
    sizes: dict[str, list[list[int]]] = {}
    for name, path in engine_paths(model, NEIGHBOURS, MAX_LEN).items():
        sizes[name] = []
        run = ModelRunner.run

        def noting(self: Any, scheduled: Any, name: str = name, run: Any = run) -> Any:
            sizes[name].append([share.num_tokens for share in scheduled])
            return run(self, scheduled)

        with patch.object(ModelRunner, "run", noting):
            path.run(prompts, STEPS)
        most[name] = max(len(shares) for shares in sizes[name])
    assert sizes["engine, batched"][0] == LENGTHS and len(sizes["engine, batched"]) == STEPS
    chunked = sizes["engine, chunked prefill, budget 4"]
    assert all(sum(shares) <= 4 for shares in chunked)
    assert any(shares[0] == 1 and len(shares) > 1 and shares[-1] > 1 for shares in chunked)
    apart = sizes["engine, random arrival order"]
    assert len(apart[0]) == 1 and max(map(len, apart)) > 1
    assert most["engine, neighbours"] == len(LENGTHS) + len(NEIGHBOURS)
    left = sizes["engine, a neighbour aborted"]
    assert len(left) <= len(sizes["engine, neighbours"]) and len(left[-1]) <= len(LENGTHS)


# -- planted bugs ---------------------------------------------------------------------------------


def another_row(allocate: Callable[..., Allocation | None]) -> Any:
    """A request reads the row below its own (the first one reads its own)."""

    def wrong(self: RowManager, request: Any, max_new_tokens: int) -> Allocation | None:
        right = allocate(self, request, max_new_tokens)
        if right is None or not isinstance(right.context_slots, slice):
            return right
        shift = self.max_len if right.context_slots.start >= self.max_len else 0
        slots = slice(right.context_slots.start - shift, right.context_slots.stop - shift)
        return right._replace(context_slots=slots)

    return wrong


BUGS = {
    "position too far": replaced(ModelRunner, "batch", position_too_far),
    "slots of the neighbour": replaced(ModelRunner, "batch", slots_of_the_neighbour),
    "logits of the neighbour": replaced(ModelRunner, "run", logits_of_the_neighbour),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_fails_the_engines_rows(name: str) -> None:
    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB, 1)
    with BUGS[name]():
        rows = ledger(all_paths(model), prompts, STEPS)
    assert [row.path for row in rows if not row.ok and "engine" not in row.path] == []
    wrong = [row for row in rows if "engine" in row.path and not row.ok]
    assert len(wrong) >= 4, table(rows)
    assert all(not row.difference <= 100 * row.tolerance for row in wrong)
    assert table(rows).count("✘") == len(wrong)


def test_reading_another_row_ends_in_numbers_that_are_none() -> None:
    """What was never written is NaN here: its request fails, and the path says so."""
    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB, 1)
    path = engine_paths(model, NEIGHBOURS, MAX_LEN)["engine, batched"]
    with (
        replaced(RowManager, "allocate", another_row)(),
        pytest.raises(ValueError, match="ended before"),
    ):
        path.run(prompts, STEPS)


def test_logits_of_a_chunks_first_token_fail_the_engines_rows() -> None:
    """That one is in Batch, which the old paths share: the oracle's are taken before."""
    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB, 1)
    want = our_paths(model, MAX_LEN)[REFERENCE].run(prompts, STEPS)
    with replaced(Batch, "last_token_indices", first_row)():
        for name, path in engine_paths(model, NEIGHBOURS, MAX_LEN).items():
            got = path.run(prompts, STEPS, want.argmax(-1))
            assert not (got - want).abs().max() <= 0.01, name


def test_stale_rows_fail_the_row_with_an_aborted_neighbour() -> None:
    """A row that is not emptied: whoever gets it next begins where the last one ended."""

    def keeps(self: RowManager, request: Any) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._free.append(row)

    model, prompts = random_model(1), random_sequences(LENGTHS, VOCAB, 1)
    with (
        patch.object(RowManager, "free", keeps),
        pytest.raises(AssertionError, match="is free and holds tokens"),
    ):
        ledger(all_paths(model), prompts, STEPS)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return random_sequences(lengths, VOCAB, 5)


@pytest.mark.parametrize("lengths", [[1], [25], [1] * 9, [26, 1, 26]])
def test_any_lengths_fit(lengths: list[int]) -> None:
    """One prompt, many, and those that fill their row to the last slot."""
    model = random_model(3)
    rows = ledger(all_paths(model), prompts_of(lengths), STEPS)
    assert [row.path for row in rows if not row.within] == []
