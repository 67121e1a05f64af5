"""The running softmax that is drawn is the one that the model's attention went through."""

import math
import re
from functools import cache

import pytest
import torch
from traces import check_words, items

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz.softmax_view import (
    RecordedSoftmax,
    SoftmaxStep,
    record_softmax,
    running_softmax_picture,
    softmax_frames,
)
from tutorial_engine.viz.tokens import escape, token_labels

PROMPTS = ("Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day")


@cache
def recorded(layer: int = 0, head: int = 0, block_size: int = 4) -> RecordedSoftmax:
    return record_softmax(
        load_model(), load_tokenizer(), PROMPTS, layer=layer, head=head, block_size=block_size
    )


where = pytest.mark.parametrize(
    ("layer", "head", "block_size"), [(0, 0, 4), (0, 4, 4), (2, 5, 3), (3, 1, 8), (1, 2, 2)]
)


@where
def test_each_step_has_the_sums_of_all_scores_so_far(
    layer: int, head: int, block_size: int
) -> None:
    run, scores = recorded(layer, head, block_size), list[float]()
    old = -math.inf
    for step in run.steps:
        scores += step.scores
        assert step.m == max(scores)
        total = sum(math.exp(score - step.m) for score in scores)
        assert step.total == pytest.approx(total, rel=1e-5)
        if step.correction is not None:
            assert step.correction == pytest.approx(math.exp(old - step.m))
        old = step.m
    assert len(scores) == len(run.labels) and run.steps[0].correction is None


@where
def test_the_last_answer_is_what_the_model_computed(layer: int, head: int, block_size: int) -> None:
    run = recorded(layer, head, block_size)
    for other in (run.whole, run.steps[-1].answer):
        torch.testing.assert_close(torch.tensor(run.returned), torch.tensor(other))
    assert run.distance(0) > 0.1 > 1e-4 > run.distance(-1)


def test_the_query_is_the_last_token_that_the_engine_ran() -> None:
    tokenizer, ids = load_tokenizer(), load_tokenizer().encode(PROMPTS[0]).ids
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (alone,) = generate(load_model(), PROMPTS[0], params, tokenizer=tokenizer)
    said = [*ids, *alone.outputs[0].token_ids]
    assert list(recorded().labels) == token_labels(tokenizer, said[:-1])
    blocks = [step.block for step in recorded().steps]
    assert blocks != list(range(blocks[0], blocks[0] + len(blocks))), "or nothing shows the table"


@where
def test_the_picture_writes_the_numbers_of_each_block(
    layer: int, head: int, block_size: int
) -> None:
    run = recorded(layer, head, block_size)
    picture = running_softmax_picture(run)
    check_words(picture)
    assert running_softmax_picture(run) == picture and len(picture.png) < 60_000
    seen = items(picture)
    for i, step in enumerate(run.steps):
        assert seen[f"block.{i}.pool"].text == f"in block {step.block}"
        assert seen[f"m.{i}"].text == f"{step.m:.2f}".replace("-", "−")
        assert seen[f"l.{i}"].text == f"{step.total:.2f}"
        for offset, score in enumerate(step.scores):
            at = i * block_size + offset
            assert seen[f"score.{at}"].text == f"{score:.2f}".replace("-", "−")
            part = float(seen[f"bar.{at}"].attrib["width"])
            whole = float(seen[f"bar.{at}.track"].attrib["width"])
            assert part == pytest.approx(max(whole * math.exp(score - step.m), 0.5), abs=0.01)
    risen = [s for s in run.steps if s.correction is not None and s.correction < 1]
    for step in risen:
        assert f"multiplied by {step.correction:.3g}" in picture.caption
    assert ("nothing is corrected" in picture.caption) == (not risen)
    assert seen["distance.0"].text == f"{run.distance(0):.2g}"
    assert seen[f"distance.{len(run.steps) - 1}"].text == "< 0.0001 ✔"


def test_an_answer_that_is_wrong_is_not_called_right() -> None:
    run = recorded()
    bad = run._replace(returned=tuple(number + 1 for number in run.returned))
    assert "differs by 1" in (items(running_softmax_picture(bad))["whole.below"].text or "")
    uncorrected = run.steps[-1]._replace(acc=tuple(2 * number for number in run.steps[-1].acc))
    bad = run._replace(steps=(*run.steps[:-1], uncorrected))
    assert "✔" not in running_softmax_picture(bad).caption


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers 0 .. 3 and heads 0 .. 5; got layer 4, head 0"):
        recorded(layer=4)
    step = SoftmaxStep(0, (0.0,), 0.0, 1.0, None, (0.0,))
    with pytest.raises(ValueError, match=r"9 blocks of 1 tokens: .* room for 8 blocks of 8"):
        running_softmax_picture(RecordedSoftmax(0, 0, 1, ("a",) * 9, (step,) * 9, (0.0,), (0.0,)))


@where
def test_the_player_reads_one_block_more_in_each_step(
    layer: int, head: int, block_size: int
) -> None:
    run = recorded(layer, head, block_size)
    frames = softmax_frames(run)
    assert len({frame.caption for frame in frames}) == len(frames) == len(run.steps) + 1
    for read, frame in enumerate(frames):
        sums = [name for name in frame.scene.items if re.fullmatch(r"l\.\d+", name)]
        assert sums == [f"l.{i}" for i in range(read)]
    assert "✔" in frames[-1].caption and "✔" not in frames[-2].caption
    last = running_softmax_picture(run).svg
    assert all(escape(item.text) in last for item in frames[-1].scene.items.values())
