"""The flat batch: its mask is the one that attention uses, its numbers are the batch's own."""

import functools
from itertools import pairwise

import pytest
import torch
from engines import VOCAB, random_model
from traces import NASTY, check_words, items

from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.learn.capstone import watched
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz.batch_plots import flat_batch
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look


@functools.cache
def recorded() -> list[Batch]:
    """The batches of an engine that serves three prompts with a budget of 12."""
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=32)
    model = random_model()
    with watched(model) as batches:
        engine = LLMEngine(model, config=config, clock=VirtualClock())
        for length in (9, 7, 3):
            engine.add_request(list(range(length)), SamplingParams(max_tokens=4, ignore_eos=True))
        engine.run()
    return list(batches)


@functools.cache
def drawn(step: int) -> Picture:
    return flat_batch(recorded()[step])


def allowed_cells(picture: Picture) -> set[tuple[int, int, int]]:
    """(sequence, row, column) of the cells that are not hatched."""
    found = set()
    for name, element in items(picture).items():
        if name.startswith("cell.") and not element.attrib["fill"].startswith("url("):
            s, row, column = (int(part) for part in name.split(".")[1:])
            found.add((s, row, column))
    return found


def test_the_mask_is_the_one_that_attention_used() -> None:
    """Without a cache all pairs with weight above 0 are drawn as allowed, and no other."""
    batch = Batch.from_sequences([[1, 2, 3, 4], [5], [6, 7]])
    seen = set()

    def observe(layer: int, s: int, weights: torch.Tensor) -> None:
        seen.update((s, r, c) for _, r, c in weights.nonzero().tolist())

    with torch.inference_mode():
        random_model()(batch, NaiveAttention(observe))
    assert allowed_cells(flat_batch(batch)) == seen and len(seen) == 10 + 1 + 3


def test_mixed_steps_show_history_chunk_and_prompt() -> None:
    mixed = recorded()[1]
    assert mixed.query_lens == (1, 4, 3)
    assert drawn(1).caption == (
        "8 tokens of 3 requests run in one forward and see 20 tokens: of 160 query-key pairs 38 "
        "are allowed, 9 are masked, and 113 (71 %) lie between different requests and are never "
        "computed."
    )
    cells = allowed_cells(drawn(1))
    assert {c for s, _, c in cells if s == 0} == set(range(10))  # the decode sees all of its own
    assert {(r, c) for s, r, c in cells if s == 1} == {
        (r, c) for r in range(4) for c in range(3 + r + 1)
    }


def test_keys_in_the_cache_and_new_ones_are_told_apart() -> None:
    found = items(drawn(1))
    one = look(1)
    assert found["cell.1.0.2"].attrib["fill"] == one.light
    assert found["cell.1.0.3"].attrib["fill"] == one.dark
    assert found["keys.0.cached"].text == "9 cached" and found["keys.2.new"].text == "3 new"
    assert "keys.2.cached" not in found
    assert "sees a token in the cache" not in [e.text for e in items(drawn(0)).values()]


def test_positions_and_slots_are_the_batches_own() -> None:
    batch, found = recorded()[1], items(drawn(1))
    assert batch.slot_mapping is not None
    rows = range(batch.num_tokens)
    assert [found[f"pos.{i}.word"].text for i in rows] == [str(p) for p in batch.positions.tolist()]
    slots = [str(slot) for slot in batch.slot_mapping.tolist()]
    assert [found[f"slot.{i}.word"].text for i in rows] == slots
    assert "head.slot" not in items(flat_batch(Batch.from_sequences([[1, 2]])))


def test_between_requests_nothing_is_drawn() -> None:
    found = items(drawn(1))
    blocks = [
        tuple(float(found[f"block.{s}"].attrib[k]) for k in ("x", "y", "width", "height"))
        for s in range(3)
    ]
    for s, (x, y, w, h) in enumerate(blocks):
        for name, element in found.items():
            if name.startswith("cell."):
                at = [float(element.attrib[k]) for k in ("x", "y")]
                inside = x <= at[0] + 1 < x + w and y <= at[1] + 1 < y + h
                assert inside == name.startswith(f"cell.{s}.")
    for (x, y, w, h), (x1, y1, _, _) in pairwise(blocks):
        assert x1 == pytest.approx(x + w, abs=0.02) and y1 == pytest.approx(y + h, abs=0.02)
    assert found["never"].text == "never computed"


def test_large_and_small_batches_are_readable_and_drawn_the_same_every_time() -> None:
    assert flat_batch(recorded()[1]) == drawn(1) != drawn(2)
    for step in range(3):
        check_words(drawn(step))
    check_words(flat_batch(Batch.from_sequences([[VOCAB - 1]])))
    large = Batch.from_sequences([list(range(36)), [1] * 27, [7]], [0, 10, 40])
    check_words(flat_batch(large, ["A", "B", "C"]))
    decodes = Batch.from_sequences([[i] for i in range(16)], [7] * 16)
    check_words(flat_batch(decodes))


def test_names_and_labels_are_those_given() -> None:
    batch = Batch.from_sequences([[1, 2], [3, 4]])
    picture = flat_batch(batch, NASTY[:2], [*NASTY[2:], "·a", "↵"])
    found = items(picture)
    assert (found["who.0.name"].text or "").startswith("<script>")
    assert found["token.3.word"].text == "↵"
    check_words(picture)


@pytest.mark.parametrize(
    ("batch", "more", "message"),
    [
        ([[1, 2]], {"names": ["A", "B"]}, "as many names"),
        ([[1, 2]], {"labels": ["a"]}, "as many names"),
        ([[1] * 65], {}, "65 tokens that see 65 are too many"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(
    batch: list[list[int]], more: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        flat_batch(Batch.from_sequences(batch), **more)  # type: ignore[arg-type]
