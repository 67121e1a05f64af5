"""The context shift, measured and drawn: exact in one layer, and in one layer only."""

import functools
import re
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch
from engines import one_thread
from traces import plot_words
from tutorial_engine.cache.cell_cache import CellSequences
from tutorial_engine.viz.cell_plots import TOLERANCE, shift_picture, shown

from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.engine.runner import forward, prefill
from tutorial_engine.lab.shift import (
    ShiftGap,
    random_model,
    shift_gap,
)
from tutorial_engine.model.batch import Batch

TOKENS = [(7 * i + i * i) % 97 for i in range(24)]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


@functools.cache
def gap(num_layers: int, discard: int = 10) -> ShiftGap:
    return shift_gap(random_model(num_layers), TOKENS, discard)


# -- measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("discard", [1, 10, 22])
def test_one_layer_agrees_with_a_fresh_run(discard: int) -> None:
    one = gap(1, discard)
    assert one.num_layers == 1 and one.largest_logit > 1
    assert max(one.logits, *one.keys, *one.values) <= TOLERANCE


@pytest.mark.parametrize("num_layers", [2, 3, 4])
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
        forward(model, CellSequences.from_config(model.config, 24), [TOKENS])
    )
    off = float((logits_of_all - logits).abs().max())
    assert off > 0.05, "forgetting makes a difference here, so agreement means something"


def never_turned(self: CellSequences) -> int:
    return len(self.table.take_shifts())


def other_sign(self: CellTable) -> dict[int, int]:
    shifts, self._shifts = self._shifts, {}
    return {cell: -shift for cell, shift in shifts.items()}


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(CellSequences, "apply_shifts", never_turned), (CellTable, "take_shifts", other_sign)],
)
def test_planted_bug_in_the_shift_is_seen(owner: type, name: str, wrong: object) -> None:
    with patch.object(owner, name, wrong):
        one = shift_gap(random_model(1), TOKENS, 10)
    assert one.logits > 0.05 and one.keys[0] > 0.05


@pytest.mark.parametrize("discard", [0, -1, 23, 99])
def test_nothing_to_forget_or_to_keep_is_refused(discard: int) -> None:
    with pytest.raises(ValueError, match=f"of 24 tokens {discard} cannot be forgotten"):
        shift_gap(random_model(1), TOKENS, discard)


def test_random_models_are_the_same_every_time_and_differ_by_seed() -> None:
    def logits(seed: int) -> torch.Tensor:
        model = random_model(2, seed)
        return prefill(model, CellSequences.from_config(model.config, 8), [TOKENS[:5]])

    assert torch.equal(logits(0), logits(0)) and not torch.allclose(logits(0), logits(1))


# -- drawn ----------------------------------------------------------------------------------------


def pictured(gaps: Sequence[ShiftGap]) -> list[str]:
    """The words of the picture above its caption."""
    picture = shift_picture(gaps)
    return [word for word in plot_words(picture) if not word.startswith(picture.caption[:20])]


def test_caption_has_the_verdict_of_each_model_and_no_rounding_noise() -> None:
    picture = shift_picture([gap(1), gap(3)], 10)
    assert picture.caption == (
        "A context shift after forgetting 10 tokens against a fresh run: in 1 layer the logits "
        f"agree, in 3 layers the logits are off by up to {gap(3).logits:.2g}; with 3 layers, K "
        "and V differ from layer 1 on (tolerance 1e-05)."
    )
    assert shift_picture([gap(1)]).caption.endswith(
        "in 1 layer the logits agree; with 1 layer, K and V agree everywhere (tolerance 1e-05)."
    )


def test_numbers_are_those_that_were_measured() -> None:
    said = pictured([gap(1), gap(3)])
    numbers = [gap(1).logits, gap(3).logits, *gap(3).keys, *gap(3).values]
    for number in numbers:
        assert shown(number) in said
    assert said.count("K") == said.count("V") == 3
    assert {"1 layer", "3 layers", "layer 0", "layer 2"} <= set(said)
    made_up = ShiftGap(2, 0.25, (0.0, 0.5), (0.0, 7.0), 1.0)
    assert {"0.25", "0.5", "7", "0"} <= set(pictured([made_up]))


def test_what_is_off_looks_different_without_colour() -> None:
    agree, off = (shift_picture([one]).svg for one in (gap(1), gap(3)))
    hatches = [len(re.findall(r"<pattern", svg)) for svg in (agree, off)]
    assert hatches[0] == 0 < hatches[1]


def test_tolerance_decides() -> None:
    assert "the logits agree" in shift_picture([gap(3)], tolerance=100.0).caption
    assert "are off by" in shift_picture([gap(1)], tolerance=1e-9).caption


def test_picture_is_the_same_every_time_and_light() -> None:
    first, second = (shift_picture([gap(1), gap(3)], 10) for _ in range(2))
    assert first == second and len(first.png) < 60_000
    with pytest.raises(ValueError, match="at least one"):
        shift_picture([])
