"""The tiny model: small, exact, with induction heads, readable, and made again by one command."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.tiny import corpus, train
from tutorial_engine.tiny.induction import induction_scores, repeated_random_ids

TEXTS = [
    "Once upon a time Anna had a red kite. Ben had a blue ball.",
    "<script>alert('<s>')</script> & naïve 😀 日本\n\tx",
    "The",
]


# -- the files ----------------------------------------------------------------------------------


def test_checkpoint_is_of_the_shape_that_training_makes(
    model: CausalLM, tokenizer: Tokenizer
) -> None:
    assert model.config == train.tiny_config()
    assert tokenizer.encode(train.END_OF_TEXT).ids == list(model.config.eos_token_ids) == [0]
    assert tokenizer.get_vocab_size() == model.config.vocab_size == train.VOCAB_SIZE


def test_ids_and_text_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(TINY)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == tokenizer.decode(ids) == text


# -- what it learned ----------------------------------------------------------------------------


@pytest.mark.parametrize("period", [12, 32, 60])
def test_a_head_does_induction(model: CausalLM, period: int) -> None:
    assert 0.6 <= induction_scores(model, period=period).max() <= 1
    untrained = CausalLM(train.tiny_config()).draw_weights()
    assert induction_scores(untrained, period=period).max() < 0.15


def test_the_second_round_of_random_tokens_is_predicted(model: CausalLM) -> None:
    noise = repeated_random_ids(random.Random(5), model.config.vocab_size, 24, 48)
    guesses = model.compute_logits(model(Batch.from_sequences([noise]))).argmax(-1)
    right = guesses[:-1] == torch.tensor(noise[1:])
    assert right[24:].float().mean() > 0.8 > 0.2 > right[:23].float().mean()


# -- stories: two people, who are kept apart ----------------------------------------------------

CASTS = [
    ("Anna", "Ben", "red kite", "blue ball"),
    ("Hugo", "Zoe", "old boat", "small cake"),
    ("Lily", "Tom", "green apple", "new hat"),
    ("Max", "Nora", "big drum", "yellow lamp"),
    ("Clara", "Otto", "blue egg", "old cup"),
    ("Ruby", "Sam", "small box", "red coat"),
]


def opening(a: str, b: str, thing_a: str, thing_b: str) -> str:
    had_a, had_b = corpus.with_article(thing_a), corpus.with_article(thing_b)
    return f"Once upon a time {a} had {had_a}. {b} had {had_b}."


def log_probability(model: CausalLM, tokenizer: Tokenizer, prompt: str, then: str) -> float:
    """Natural log of the chance that the model goes on with exactly these words."""
    start, ids = len(tokenizer.encode(prompt).ids), tokenizer.encode(prompt + then).ids
    chances = model.compute_logits(model(Batch.from_sequences([ids]))).log_softmax(-1)
    return sum(float(chances[i - 1, ids[i]]) for i in range(start, len(ids)))


@pytest.mark.parametrize("cast", CASTS, ids=[f"{a} and {b}" for a, b, *_ in CASTS])
def test_what_is_whose_and_who_is_speaking_is_kept_apart(
    model: CausalLM, tokenizer: Tokenizer, cast: tuple[str, str, str, str]
) -> None:
    a, b, thing_a, thing_b = cast
    begin = opening(*cast)
    lost = f"{begin} One day {a} lost the"
    went = f"{begin} One day {a} and {b} went to the park. But {a} lost the"
    took = f"{begin} {a} took the {thing_a} to the park. {b} took the"
    gave = f"{went} {thing_a} on the way. {b}"
    for prompt, mine, other in (
        (lost, thing_a, thing_b),
        (went, thing_a, thing_b),
        (took, thing_b, thing_a),
        (f'{gave} said to {a}, "You can have the', thing_b, thing_a),
        (f'{went} {thing_a} on the way. "I can help you, {a}," said', b, a),
        (f"{gave} gave the {thing_b} to", a, b),
    ):
        right = log_probability(model, tokenizer, prompt, f" {mine}")
        wrong = log_probability(model, tokenizer, prompt, f" {other}")
        assert right - wrong > 2.3, f"{prompt!r}: {mine} is not ten times as likely as {other}"


# -- training -----------------------------------------------------------------------------------


def test_random_rows_ask_only_for_what_was_said_before() -> None:
    rng, periods = random.Random(0), set[int]()
    for _ in range(200):
        ids, targets = train.random_row(rng)
        period = targets.count(train.IGNORE) + 1
        periods.add(period)
        assert targets == [train.IGNORE] * (period - 1) + ids[period:] + [ids[-period]]
        assert len(ids) == train.SEQ_LEN and ids[period:] == ids[:-period]
    assert min(periods) >= 8 and max(periods) <= train.SEQ_LEN // 2 and len(periods) > 20


def test_training_runs_all_rows_in_one_call_as_a_call_for_each_would(model: CausalLM) -> None:
    rng = random.Random(0)
    batch = train.as_batch(torch.tensor([train.random_row(rng)[0] for _ in range(3)]))
    with torch.inference_mode():
        together, alone = model(batch, train.RowsOfOneLength()), model(batch)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_same_seed_trains_the_same_checkpoint_and_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name / "checkpoint" for name in ("first", "second", "other")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.parent.mkdir()
        command = f"train --out {folder} --steps 3 --rows 4 --every 2 --quiet --no-bf16"
        monkeypatch.setattr(sys, "argv", [*command.split(), "--seed", str(seed)])
        with torch.enable_grad():
            train.main()
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    curves = [(folder.parent / "curve.json").read_text() for folder in folders]
    assert weights[0] == weights[1] != weights[2] and curves[0] == curves[1] != curves[2]
    model, ids = load_model(folders[0]), load_tokenizer(folders[0]).encode(TEXTS[0]).ids
    ours = model.compute_logits(model(Batch.from_sequences([ids])))
    theirs = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    assert (ours - theirs(torch.tensor([ids])).logits[0]).abs().max() <= 1e-4
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert (folders[0] / name).read_text() == (TINY / name).read_text()


def test_tokenizer_that_ships_is_the_one_that_training_makes() -> None:
    assert json.loads(train.train_tokenizer(0).to_str()) == json.loads(
        (TINY / "tokenizer.json").read_text()
    )


def test_curve_that_ships_shows_the_jump_and_is_the_checkpoints(model: CausalLM) -> None:
    curve = json.loads((TINY.parent / "curve.json").read_text())
    scores = [point["induction"] for point in curve]
    first_high = next(i for i, score in enumerate(scores) if score > 0.6)
    assert 0 < first_high < len(scores) // 2
    assert max(scores[: max(1, first_high // 2)]) < 0.2  # nothing for a while, then at once
    assert curve[-1]["text_loss"] < 1 < 6 < curve[0]["text_loss"]
    assert induction_scores(model).max() == pytest.approx(curve[-1]["induction"], abs=0.05)
