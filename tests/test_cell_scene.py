"""The cells picture: it says what the table and the shelves of these very cells say."""

import functools
import random
import xml.etree.ElementTree as ET
from typing import Any
from unittest.mock import patch

import matplotlib
import pytest
import torch
from engines import random_model
from matplotlib.colors import to_hex
from traces import check_words, items, words

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz import cell_steps
from tutorial_engine.viz.cell_explorer import append_tokens
from tutorial_engine.viz.cell_steps import (
    CellsSnapshot,
    Changes,
    describe,
    find_changes,
    take_snapshot,
)
from tutorial_engine.viz.cell_view import MAX_CELLS, cells_scene, heat_scale
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look, tint
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.words import numbered, signed

LABELS = {0: "How", 1: "·are", 2: "·you"}


@functools.cache
def model_of(num_layers: int = 3) -> Qwen3ForCausalLM:
    return random_model(num_hidden_layers=num_layers)


def new_cells(num_cells: int = 6, num_layers: int = 3) -> CellKVCache:
    made = CellKVCache.from_config(model_of(num_layers).config, num_cells)
    made.storage.k.fill_(float("nan"))
    made.storage.v.fill_(float("nan"))
    return made


def run(cells: CellKVCache, tokens: list[int], seq_id: int = 0) -> None:
    append_tokens(model_of(cells.storage.spec.num_layers), cells, seq_id, tokens)


def shared_text() -> tuple[CellKVCache, CellsSnapshot]:
    """The storyboard: three tokens, two of them shared, cell 3 freed; and the moment before."""
    cells = new_cells()
    run(cells, [5, 6, 7, 8])
    cells.seq_cp(0, 1, 0, 2)
    full = take_snapshot(cells, {**LABELS, 3: "·?"})
    cells.seq_rm(0, 3)
    return cells, take_snapshot(cells, LABELS, full)


def view(now: CellsSnapshot, before: CellsSnapshot | None = None) -> Picture:
    """A moment as the explorer shows it, without its slider."""
    changes = find_changes(before, now) if before is not None else Changes((), (), ())
    return cells_scene(now, changes, "cells", heat_scale([now])).picture(describe(now, before))


def check_picture(picture: Picture, cells: CellKVCache, left_over: set[int]) -> None:
    """Every number and colour of the picture against the live table and shelves."""
    found, table = items(picture), cells.table
    assert float(found["head"].attrib["y"]) == float(found[f"row.{table.head}.cell"].attrib["y"])
    for cell in range(table.num_cells):
        pos, owners, shift = table[cell]
        assert found[f"row.{cell}.pos"].text == ("–" if pos is None else str(pos))
        assert found[f"row.{cell}.shift"].text == ("–" if pos is None else signed(shift))
        chips = {
            int(name.split(".")[2])
            for name in found
            if name.startswith(f"owner.{cell}.") and not name.endswith(".n")
        }
        assert chips == owners and (f"row.{cell}.owners" in found) == (not owners)
        assert (f"K.0.{cell}.lines" in found) == (pos is None and cell not in left_over)
        assert (f"V.1.{cell}.gone" in found) == (cell in left_over)
    for seq_id in table.seq_ids:
        order = [
            name.split(".")[2] for name in found
            if name.startswith(f"text.{seq_id}.") and name.endswith(".token")
        ]  # fmt: skip
        assert order == [str(cell) for cell in table.cells_of(seq_id)]


def check_colours(picture: Picture, cells: CellKVCache, scale: Any, left_over: set[int]) -> None:
    """Squares of the first and the last layer are the storage's numbers, evenly spaced."""
    found, colours = items(picture), matplotlib.colormaps["cividis"]
    for layer in (0, cells.storage.spec.num_layers - 1):
        both = cells.storage.read_slots(layer, slice(0, cells.table.num_cells))
        for kind, (name, x) in enumerate(zip("KV", both, strict=True)):
            low, high = scale[layer][kind]
            for cell in range(cells.table.num_cells):
                if cells.table[cell].pos is None and cell not in left_over:
                    continue
                for i in range(8):
                    number = float(x[cell, 0, i * x.shape[-1] // 8])
                    part = min(max((number - low) / (high - low), 0.0), 1.0)
                    want = to_hex(colours(part))
                    want = tint(want, 0.3) if cell in left_over else want
                    assert found[f"{name}.{layer}.{cell}.{i}"].attrib["fill"] == want


# -- the storyboard -------------------------------------------------------------------------------


def test_picture_says_who_has_which_cell_and_where_the_new_token_went() -> None:
    cells, before = shared_text()
    run(cells, [9], 1)
    picture = view(take_snapshot(cells, {3: "·we"}, before), before)
    assert picture.caption == (
        "4 of 6 cells are used by 2 sequences; cells 0 and 1 belong to both and are stored once; "
        "token “·we” of sequence 1, position 2, went to cell 3 in every layer."
    )
    check_words(picture)
    found = items(picture)
    assert {f"new.3.{where}" for where in ("row", 0, 1, 2)} <= found.keys()
    assert not any(name.startswith(("new.0", "new.2", "turned.")) for name in found)
    assert found["owner.3.1"].attrib["stroke"] == look(1).colour
    assert found["text.1.3.cell"].attrib["font-weight"] == "bold", "cell 3 holds position 2"


def test_freed_cells_are_pale_and_never_written_ones_empty() -> None:
    cells, before = shared_text()
    picture = view(before)
    found = items(picture)
    assert before.rows[3].left_over and before.rows[3].token == "·?"
    assert "K.2.3.gone" in found and "K.2.4.lines" in found and "K.2.4.0" not in found
    assert found["row.3.token"].attrib["text-decoration"] == "line-through"
    tip = {c: tip_of(picture, c) for c in (2, 3, 4)}
    assert "“·you” at position 2" in tip[2] and "visible to sequence 0 from position 2" in tip[2]
    assert tip[3].endswith("free; K and V of “·?” are still there, and nobody reads them")
    assert tip[4] == "cell 4 is slot 4 in all 3 layers: free, never written"
    check_picture(picture, cells, {3})
    check_colours(picture, cells, heat_scale([before]), {3})


def tip_of(picture: Picture, cell: int) -> str:
    """What hovering over a cell says."""
    text = picture.svg.split(f'id="hot.{cell}"')[1].split("</g>")[0]
    return ET.fromstring("<text>" + text.split("<text>")[1]).text or ""


def test_hovering_finds_a_cell_in_the_table_and_in_every_layer() -> None:
    cells, before = shared_text()
    shape = items(view(before))["hot.2"].attrib["d"]
    assert shape.count("M") == 1 + 2 * 3 and cells.table.num_cells == 6


# -- what changed ---------------------------------------------------------------------------------


def test_a_shift_turns_keys_and_no_values_and_the_picture_shows_it() -> None:
    cells = new_cells()
    run(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.seq_rm(0, 0, 1)
    cells.seq_add(0, 1, -1, -1)
    moved = take_snapshot(cells, before=start)
    assert find_changes(start, moved) == Changes((), (), (0, 1, 2))
    told = describe(moved, start)
    assert "cell 0 was freed" in told and "the positions of cells 1 and 2 moved by −1" in told
    assert "the keys of cells 1 and 2 wait to be turned" in told
    assert "its key is still that of position 2" in tip_of(view(moved), 2)
    cells.apply_shifts()
    turned = take_snapshot(cells, before=moved)
    assert find_changes(moved, turned) == Changes((), (1, 2), (1, 2))
    picture = view(turned, moved)
    assert picture.caption.endswith("cells 1 and 2 were turned in 3 of 3 layers, and no V changed.")
    found = items(picture)
    assert {"turned.1.0", "turned.2.2", "turned.2.2.d"} <= found.keys()
    assert "new.1.0" not in found and "new.1.row" in found
    check_words(picture)


def test_a_shift_that_forgets_a_layer_is_seen() -> None:
    cells = new_cells()
    run(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.seq_add(0, 0, -1, 3)
    rest = cells.storage.k[1:].clone()
    cells.apply_shifts()
    cells.storage.k[1:] = rest
    assert "in 1 of 3 layers" in describe(take_snapshot(cells, before=start), start)


def test_a_value_that_changes_makes_a_cell_a_written_one() -> None:
    cells = new_cells()
    run(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.storage.v[1, 1] += 1
    assert find_changes(start, take_snapshot(cells)).written == (1,)


def test_sharing_and_leaving_change_the_table_alone() -> None:
    cells = new_cells()
    run(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.seq_cp(0, 4, 1)
    shared = take_snapshot(cells, before=start)
    assert find_changes(start, shared) == Changes((), (), (1, 2))
    assert "sequence 4 got cells 1 and 2, and no K or V was copied" in describe(shared, start)
    cells.seq_rm(0, 2)
    assert "sequence 0 left cell 2" in describe(take_snapshot(cells, before=shared), shared)
    assert describe(start, start).endswith("nothing changed.")


def test_a_copy_is_written_in_every_layer() -> None:
    cells = new_cells()
    run(cells, [5, 6, 7])
    cells.seq_cp(0, 1)
    start = take_snapshot(cells)
    cells.seq_unshare(1, 2)
    now = take_snapshot(cells, {3: "copy"}, start)
    assert find_changes(start, now) == Changes((3,), (), (2,))
    assert torch.equal(now.heat[:, :, 2], now.heat[:, :, 3])


# -- any cells ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_picture_agrees_with_the_table_after_any_operations(number: int) -> None:
    draw, cells = random.Random(number), new_cells(10)
    before, left_over = take_snapshot(cells), set[int]()
    for step in range(60):
        used = {c for c in range(10) if cells.table[c].owners}
        seq, other = draw.sample(range(4), 2)
        p0, p1 = draw.randint(0, 6), draw.choice([-1, draw.randint(1, 12)])
        try:
            match draw.choice(["run", "run", "run", "rm", "cp", "add", "unshare", "shift", "keep"]):
                case "run":
                    run(cells, [draw.randrange(97) for _ in range(draw.choice([1, 2]))], seq)
                case "rm":
                    cells.seq_rm(seq, p0, p1)
                case "cp":
                    cells.seq_cp(seq, other, p0, p1)
                case "add":
                    cells.seq_add(seq, p0, p1, draw.randint(-5, 5))
                case "unshare":
                    cells.seq_unshare(seq, p0, p1)
                case "shift":
                    cells.apply_shifts()
                case "keep" if draw.random() < 0.2:
                    cells.seq_keep(seq)
        except ValueError:
            pass  # refused: the picture shows that nothing changed
        now_used = {c for c in range(10) if cells.table[c].owners}
        left_over = (left_over | used) - now_used
        now = take_snapshot(cells, before=before)
        assert {c for c, row in enumerate(now.rows) if row.left_over} == left_over
        assert now.heat.isfinite().all((0, 1, 3)).tolist() == [
            c in now_used | left_over for c in range(10)
        ]
        if step % 6 == 0:
            scene = cells_scene(now, find_changes(before, now), "cells", heat_scale([now]))
            picture = Picture(scene.svg(), b"", describe(now, before))  # no PNG: it takes longest
            check_picture(picture, cells, left_over)
            check_colours(picture, cells, heat_scale([now]), left_over)
            used_words = f"{len(now_used)} of 10 cells are used"
            assert used_words in picture.caption or (not now_used and "empty" in picture.caption)
        before = now


def test_planted_bug_shelves_read_one_cell_further_are_caught() -> None:
    def shifted(cache: CellKVCache) -> torch.Tensor:
        return right_heat(cache).roll(1, 2)

    right_heat = cell_steps._heat
    with patch.object(cell_steps, "_heat", shifted), pytest.raises(AssertionError):
        test_picture_agrees_with_the_table_after_any_operations(0)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_cells", [4, 16])
def test_any_size_is_readable(num_layers: int, num_cells: int) -> None:
    cells = new_cells(num_cells, num_layers)
    run(cells, [1, 2, 3])
    cells.seq_cp(0, 1)
    picture = view(take_snapshot(cells, LABELS))
    check_words(picture)
    shown = [w.text for w in words(picture) if w.text.startswith("layer ")]
    layers = range(num_layers) if num_layers <= 4 else [0, 1, 2, num_layers - 1]
    assert shown == [f"layer {layer}" for layer in layers]


def test_crowded_cells_are_readable() -> None:
    cells = new_cells(16)
    run(cells, list(range(12)))
    for seq in range(1, 9):
        cells.seq_cp(0, seq, 0, 13 - seq)
    for seq in (3, 5, 7):
        run(cells, [seq], seq)
    cells.seq_add(3, 10, -1, 600)
    picture = view(take_snapshot(cells, dict.fromkeys(range(16), "W" * 20)))
    check_words(picture)
    assert "12 of them are shared and stored once" in picture.caption
    assert sum(w.text == "sequence" for w in words(picture)) == 6, "no more texts than fit"


def test_cells_held_for_tokens_that_have_not_run_are_hatched() -> None:
    cells = new_cells()
    run(cells, [5, 6])
    cells.table.place([2], 0, [2])
    found = items(view(take_snapshot(cells)))
    assert found["K.0.2.0"].attrib["fill"] == HATCHED != found["K.0.1.0"].attrib["fill"]


def test_empty_cells_have_a_picture() -> None:
    picture = view(take_snapshot(new_cells(4)))
    assert picture.caption == "all 4 cells are empty."
    check_words(picture)


def test_what_cannot_be_drawn_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=f"17 cells are too many.*{MAX_CELLS}"):
        view(take_snapshot(new_cells(17)))
    with pytest.raises(ValueError, match="4 cells before, 6 now"):
        take_snapshot(new_cells(6), before=take_snapshot(new_cells(4)))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([4], "cell 4"),
        ([1, 0], "cells 0 and 1"),
        ([0, 1, 2], "cells 0 to 2"),
        ([5, 1, 3], "cells 1, 3 and 5"),
    ],
)
def test_numbers_are_told_as_people_do(numbers: list[int], said: str) -> None:
    assert numbered(numbers, "cell") == said
