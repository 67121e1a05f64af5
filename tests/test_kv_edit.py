"""An edited memory: V of one slot in the last layer carries the name."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tutorial_engine.lab.kv_edit import Exchange, continued, memory_of
from tutorial_engine.learn.parts.engine import OwnEngine
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.scene import Frame
from tutorial_engine.viz.explorers.player import player
from tutorial_engine.viz.views.transplant_picture import (
    transplant,
    transplant_caption,
    transplant_choices,
    transplant_scene,
)

NAMO, NEDO = "Namo had an old coat.", "Nedo had an old coat."
NEW = 24


class AsLists:
    """A right cache of a learner's in another form: a list of rows a layer."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Any]] = {}

    def update(self, layer: int, k: Any, v: Any, batch: Any) -> Any:
        self.rows.setdefault(layer, []).extend(zip(k, v, strict=True))
        return [tuple(torch.stack(part) for part in zip(*self.rows[layer], strict=True))]


def exchange(model: CausalLM, tokenizer: Tokenizer, which: str, layer: int = 3) -> Exchange:
    return Exchange(memory_of(model, tokenizer.encode(NEDO).ids[:-1]), [1], [layer], which)


def test_v_of_one_slot_in_the_last_layer_carries_the_name_and_nothing_else_does(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    ids, other = (tokenizer.encode(text).ids for text in (NAMO, NEDO))
    own, donors = (continued(model, one, dict, NEW) for one in (ids, other))
    assert "Namo" in tokenizer.decode(own) and "Nedo" in tokenizer.decode(donors)
    for layer in range(model.config.num_hidden_layers):
        for which in ("k", "v", "kv"):
            got = continued(model, ids, exchange(model, tokenizer, which, layer), NEW)
            assert got == (donors if layer == 3 and "v" in which else own), (layer, which)


def test_a_transplant_says_whose_story_it_is(model: CausalLM, tokenizer: Tokenizer) -> None:
    """What a reader of the player can choose is in test_browser_players.py."""
    edit = transplant(model, tokenizer, which="v")
    assert "The screen says Namo, and the story is that of Nedo" in transplant_caption(edit)
    runs = [[Frame(transplant_scene(edit), transplant_caption(edit))]] * 5
    with pytest.raises(ValueError, match="5 runs, and 6 ways to choose"):
        player(runs, "", choices=transplant_choices())
    with pytest.raises(ValueError, match="as many tokens"):
        transplant(model, tokenizer, (NAMO, f"{NEDO}."))


def test_a_learners_memory_of_any_form_is_read_and_cut(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    mine = OwnEngine(model, tokenizer, cached=True)
    mine.parts.own["MyCache"] = AsLists
    text = f"{NAMO} Tima was a friend of N"
    ids = tokenizer.encode(text).ids
    memory, wanted = mine.memory(text), mine.last_logits(ids)
    at = len(ids) - 1
    assert len(memory[0][0]) == at
    assert (mine.logits_after(memory, ids[-1], at) - wanted).abs().max() < 1e-4
    begun = {layer: (k[:9], v[:9]) for layer, (k, v) in memory.items()}
    assert mine.go_on(begun, f"{NAMO} Ben") == f"{NAMO} Ben" + mine.story(f"{NAMO} Ben")
