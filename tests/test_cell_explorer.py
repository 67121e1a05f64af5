"""The cells explorer: every operation is done to real cells, shown as it was, and never lost."""

import random
from typing import Any

import pytest
import torch
from explorers import message_of, turn
from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.cell_explorer import (
    AGAIN,
    APPEND,
    OPERATIONS,
    RESET,
    SHIFT,
    CellExplorer,
    Operation,
    append_tokens,
)
from tutorial_engine.viz.tokens import token_labels


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> CellExplorer:
    return CellExplorer(model, tokenizer)


@pytest.fixture
def explorer(shared: CellExplorer) -> CellExplorer:
    """An explorer as it is when new."""
    shared.buttons[AGAIN].click()
    return turn(shared, shared.num_steps - 1)


def press(explorer: CellExplorer, name: str, **knobs: Any) -> str:
    """As a learner does it; the message that is shown then."""
    turn(explorer, **knobs).buttons[name].click()
    return message_of(explorer)


def rows(explorer: CellExplorer) -> list[tuple[str, set[int], str]]:
    """pos, owners and shift of each cell, as they are drawn."""
    drawn = explorer.shown.items
    return [
        (
            drawn[f"row.{cell}.pos"].text,
            {int(item.text) for name, item in drawn.items() if is_chip(name, cell)},
            drawn[f"row.{cell}.shift"].text,
        )
        for cell in range(explorer.num_cells)
    ]


def is_chip(name: str, cell: int) -> bool:
    return name.startswith(f"owner.{cell}.") and name.endswith(".n")


def table_rows(cache: CellKVCache) -> list[tuple[str, set[int], str]]:
    """The same of the live table."""
    found = []
    for cell in range(cache.table.num_cells):
        pos, owners, shift = cache.table[cell]
        words = f"{shift:+}".replace("-", "−").replace("+0", "0")
        found.append(("–", set[int](), "–") if pos is None else (str(pos), set(owners), words))
    return found


# -- the recorded beginning -----------------------------------------------------------------------


def test_it_opens_on_a_hole_that_is_filled_by_a_token_of_another_position(
    explorer: CellExplorer,
) -> None:
    ids = explorer.tokenizer.encode("How are you").ids
    assert len(ids) == 5 and explorer.num_steps == 7 and explorer.step == 6
    assert explorer.shown_caption == (
        "Step 6 of 6, append “·and” to sequence 1: 6 of 8 cells are used by 2 sequences; cells 0 "
        "to 3 belong to both and are stored once; token “·and” of sequence 1, position 5, went to "
        "cell 4 in every layer."
    )
    assert list(explorer.cache.table.cells_of(1)) == [0, 1, 2, 3, 6, 4]
    labels = token_labels(explorer.tokenizer, ids)
    assert [explorer.labels[cell] for cell in range(4)] == labels[:4]


def test_each_step_of_the_story_tells_what_it_did(explorer: CellExplorer) -> None:
    told = [explorer.caption(step) for step in range(7)]
    assert told[0] == "Step 0 of 6, the beginning: all 8 cells are empty."
    for step, words in {
        1: "5 tokens of sequence 0, positions 0 to 4, went to cells 0 to 4 in every layer",
        2: "token “·Ben” of sequence 0, position 5, went to cell 5",
        3: "seq_cp(0, 1, 0, 4): 6 of 8 cells are used by 2 sequences",
        4: "token “·Anna” of sequence 1, position 4, went to cell 6",
        5: "cells 4 and 5 were freed: K and V are still there and are never read",
    }.items():
        assert words in told[step], told[step]
    assert "sequence 1 got cells 0 to 3, and no K or V was copied" in told[3]


def test_another_script_can_be_told(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    script = [
        Operation(APPEND, 2, text="Anna had a red"),
        Operation("seq_rm", 2, p0=0, p1=2),
        Operation("seq_add", 2, p0=2, delta=-2),
        Operation(SHIFT),
    ]
    explorer = CellExplorer(model, tokenizer, num_cells=6, script=script)
    assert explorer.num_steps == 5
    assert explorer.shown_caption == (
        "Step 4 of 4, apply K-shift: 3 of 6 cells are used by 1 sequence; the keys of cells 2 to "
        "4 were turned in 4 of 4 layers, and no V changed."
    )
    assert CellExplorer(model, tokenizer, script=[]).num_steps == 1


# -- by hand --------------------------------------------------------------------------------------


def test_a_new_operation_comes_last_and_the_steps_before_stay(explorer: CellExplorer) -> None:
    before = [explorer.scene(step).svg() for step in (1, 5)]
    scale = explorer._scale
    explorer.slider.value = 2
    press(explorer, "seq_rm", seq=1, p0=4, p1=-1)
    assert explorer.num_steps == 8 and explorer.step == 7 == explorer.play.max
    assert explorer.shown_caption.startswith("Step 7 of 7, seq_rm(1, 4, −1): 4 of 8 cells")
    explorer._scale = scale  # a history that grows may stretch the colours, and nothing else
    now = [explorer.scene(step).svg().replace("of 7", "of 6") for step in (1, 5)]
    assert now == before


def test_start_over_brings_the_story_back(explorer: CellExplorer) -> None:
    opened = explorer.shown.svg(), explorer.num_steps
    press(explorer, RESET)
    assert explorer.cache.table.num_used == 0 and explorer.num_steps == 8
    assert explorer.shown_caption.endswith(
        "reset: all 8 cells are empty; cells 0, 1, 2, 3, 4 and 6 were freed: K and V are still "
        "there and are never read."
    )
    press(explorer, AGAIN)
    assert (explorer.shown.svg(), explorer.num_steps) == opened


def test_shift_is_seen_pending_then_in_every_layers_keys(explorer: CellExplorer) -> None:
    press(explorer, "seq_keep", seq=1)
    press(explorer, "seq_rm", seq=1, p0=0, p1=2)
    press(explorer, "seq_add", seq=1, p0=2, p1=-1, delta=-2)
    assert rows(explorer)[2] == ("0", {1}, "−2")
    assert not any(name.startswith("turned.") for name in explorer.shown.items)
    used = torch.tensor([2, 3, 4, 6])
    v = explorer.cache.storage.read_slots(3, used)[1]
    press(explorer, SHIFT)
    turned = {name for name in explorer.shown.items if name.endswith(".d")}
    assert turned == {f"turned.{c}.{layer}.d" for c in (2, 3, 4, 6) for layer in range(4)}
    assert torch.equal(v, explorer.cache.storage.read_slots(3, used)[1])
    assert rows(explorer)[2] == ("0", {1}, "0")


def test_a_forward_turns_the_keys_that_wait(explorer: CellExplorer) -> None:
    press(explorer, "seq_keep", seq=1)
    press(explorer, "seq_add", seq=1, p0=4, p1=-1, delta=3)
    press(explorer, APPEND, seq=1, text=" Ella")
    assert "token “·Ella” of sequence 1, position 9, went to cell 5" in explorer.shown_caption
    assert "the keys of cells 4 and 6 were turned in 4 of 4 layers" in explorer.shown_caption


def test_what_the_cells_hold_is_what_the_model_writes(explorer: CellExplorer) -> None:
    """Sequence 1 lies scattered; its K and V are those of its text run alone."""
    ids = [*explorer.tokenizer.encode("How are you").ids[:4]]
    ids += explorer.tokenizer.encode(" Anna").ids + explorer.tokenizer.encode(" and").ids
    alone = CellKVCache.from_config(explorer.model.config, 8)
    append_tokens(explorer.model, alone, 0, ids)
    scattered = torch.tensor(explorer.cache.table.cells_of(1))
    for layer in range(4):
        ours = explorer.cache.storage.read_slots(layer, scattered)
        for x, y in zip(ours, alone.storage.read_slots(layer, slice(0, 6)), strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


@pytest.mark.parametrize("number", range(3))
def test_picture_is_the_table_after_any_operations(explorer: CellExplorer, number: int) -> None:
    draw, refused = random.Random(number), 0
    for _ in range(24):
        knobs: dict[str, Any] = {
            "seq": draw.randint(0, 3),
            "dst": draw.randint(0, 3),
            "p0": draw.randint(-1, 5),
            "p1": draw.choice([-1, -1, draw.randint(0, 9)]),
            "delta": draw.randint(-3, 3),
            "text": draw.choice([" Ella", " red kite", " a"]),
        }
        name = draw.choice([n for n in OPERATIONS if n != RESET] + [APPEND, APPEND])
        knobs = {knob: knobs[knob] for knob in OPERATIONS[name][0]}
        steps, live = explorer.num_steps, repr(explorer.cache.table)
        if press(explorer, name, **knobs):
            refused += 1
            assert (explorer.num_steps, repr(explorer.cache.table)) == (steps, live)
        else:
            assert explorer.num_steps == steps + 1 == explorer.slider.max + 1
        explorer.cache.check_integrity()
        assert rows(explorer) == table_rows(explorer.cache)
        for seq in explorer.cache.table.seq_ids:
            said = [
                explorer.shown.items[f"text.{seq}.{cell}.token"].text
                for cell in explorer.cache.table.cells_of(seq)
            ]
            assert said == [explorer.labels[c] for c in explorer.cache.table.cells_of(seq)]
    assert refused < 16


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knobs", "says"),
    [
        ("seq_add", {"seq": 1, "p0": 2, "delta": -1}, "(1, 2, −1, −1): sequences [0, 1] share"),
        (APPEND, {"seq": 0, "text": "One day Anna and Ben"}, "cell each, 2 of 8 are empty"),
        (APPEND, {"seq": 0, "text": ""}, "there is no text"),
        ("seq_unshare", {"seq": 1}, "sequence 1 shares 4 cells, 2 are empty"),
        ("seq_add", {"seq": 1, "p0": 4, "delta": 999}, "positions end at 999"),
    ],
)
def test_refused_is_said_and_nothing_is_lost(
    explorer: CellExplorer, name: str, knobs: dict[str, Any], says: str
) -> None:
    before = explorer.shown.svg(), explorer.num_steps, repr(explorer.cache.table)
    message = press(explorer, name, **{"p1": -1, "p0": 0} | knobs)
    assert says in message and message.endswith("The picture below is the one before.")
    assert (explorer.shown.svg(), explorer.num_steps, repr(explorer.cache.table)) == before
    with pytest.raises(ValueError):
        explorer.do(name, **knobs)
    assert (explorer.num_steps, repr(explorer.cache.table)) == before[1:]
    explorer.slider.value = 3
    assert explorer.shown_caption == explorer.caption(3)
    assert press(explorer, "seq_rm", seq=1, p0=5, p1=-1) == "" and explorer.num_steps == 8


def test_from_code_each_operation_has_the_same_effect_as_its_button(
    explorer: CellExplorer,
) -> None:
    picture = explorer.do("seq_rm", seq=1, p0=4)
    assert picture == explorer.picture() and explorer.value("p1") == -1
    assert rows(explorer) == table_rows(explorer.cache)
    with pytest.raises(ValueError, match="no operation 'seq_div'; there are"):
        explorer.do("seq_div")
    with pytest.raises(ValueError, match=r"seq_keep has no \['p0'\]; it reads \['seq'\]"):
        explorer.do("seq_keep", p0=1)
    with pytest.raises(ValueError, match="seq cannot be 9"):
        explorer.do("seq_keep", seq=9)
    assert explorer.do(AGAIN).caption == explorer.caption(6)
