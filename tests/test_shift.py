"""The context shift against a fresh run: exact in one layer, and in one layer only."""

import functools
from typing import Any

import engines
import pytest
import torch
from checkpoints import FAMILY
from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import forward
from tutorial_engine.lab.shift import (
    ShiftGap,
    random_model,
    shift_gap,
    shifted_text,
)
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.views.shift_picture import TOLERANCE

TOKENS = [(7 * i + i * i) % 97 for i in range(24)]


@functools.cache
def gap(num_layers: int, discard: int = 10) -> ShiftGap:
    return shift_gap(random_model(num_layers), TOKENS, discard)


@pytest.mark.parametrize("discard", [1, 10, 22])
def test_one_layer_agrees_with_a_fresh_run(discard: int) -> None:
    one = gap(1, discard)
    assert one.num_layers == 1 and one.largest_logit > 1
    assert max(one.logits, *one.keys, *one.values) <= TOLERANCE


@pytest.mark.parametrize("kind", FAMILY.values(), ids=FAMILY)
def test_keys_are_turned_as_the_model_of_each_kind_turns_them(kind: dict[str, Any]) -> None:
    one = shift_gap(engines.random_model(**{**kind, "num_hidden_layers": 1}), TOKENS, 10)
    assert one.largest_logit > 1 and max(one.logits, *one.keys, *one.values) <= TOLERANCE


@pytest.mark.parametrize("num_layers", [2, 4])
def test_deeper_models_do_not_and_the_first_layer_is_not_to_blame(num_layers: int) -> None:
    deep = gap(num_layers)
    assert deep.logits > 0.05 and max(deep.keys[0], deep.values[0]) <= TOLERANCE
    assert all(min(pair) > 0.05 for pair in zip(deep.keys[1:], deep.values[1:], strict=True))
    assert len(deep.keys) == len(deep.values) == deep.num_layers == num_layers


def test_the_fresh_run_is_that_of_the_model_without_a_cache() -> None:
    model = random_model(3)
    with torch.inference_mode():
        logits = model.compute_logits(model(Batch.from_sequences([TOKENS[10:]]))[-1:])
    assert float(logits.abs().max()) == pytest.approx(gap(3).largest_logit, abs=1e-5)
    logits_of_all = model.compute_logits(
        forward(model, CellKVCache.from_config(model.config, 24), [Request("A", TOKENS)])
    )
    off = float((logits_of_all - logits).abs().max())
    assert off > 0.05, "forgetting makes a difference here, so agreement means something"


@pytest.mark.parametrize("discard", [0, 23])
def test_nothing_to_forget_or_to_keep_is_refused(discard: int) -> None:
    with pytest.raises(ValueError, match=f"of 24 tokens {discard} cannot be forgotten"):
        shift_gap(random_model(1), TOKENS, discard)


# -- the text that follows ------------------------------------------------------------------------

STORY = "Once upon a time Anna had a red kite. Ben had a blue ball."


def test_the_trained_model_goes_on_otherwise_and_one_layer_does_not(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    told = shifted_text(model, tokenizer, STORY + " Anna had a d", 6)
    assert told.gap.logits > 0.5 and told.num_same < told.num_tokens == 16
    assert told.shifted != told.fresh and told.shifted[:4] == told.fresh[:4]
    assert told.forgotten + told.kept == STORY + " Anna had a d"
    one = shifted_text(random_model(1), tokenizer, [t % 97 for t in TOKENS], 6)
    assert one.num_same == 16 and one.shifted == one.fresh and one.gap.logits <= TOLERANCE
