"""Attention and RoPE explorers: what is shown is what the engine returned, at every knob."""

import re

import pytest
import torch
from explorers import caption_of, inside, items, place, svg_of, tips, turn, words
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz import attention_explorer
from tutorial_engine.viz.attention_explorer import (
    LEVELS,
    MAX_BARS,
    MAX_TOKENS,
    AttentionExplorer,
    Look,
    attention_weights,
    look_inside,
)
from tutorial_engine.viz.rope_explorer import RopeExplorer
from tutorial_engine.viz.tokens import token_labels

PROMPT = "Anna had a red kite. Ben had a hat. Anna"


@pytest.fixture
def attention(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> AttentionExplorer:
    return AttentionExplorer(model, tokenizer, PROMPT)


# -- attention --------------------------------------------------------------------------------


def test_weights_are_those_of_transformers(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    reference = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
    ours = attention_weights(model, ids)
    assert ours.shape == (4, 6, len(ids), len(ids))
    assert (ours - torch.cat(theirs)).abs().max() < 1e-4


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (3, 5), (2, 1)])
def test_tips_hold_the_weights_that_the_engine_returned(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    attention: AttentionExplorer,
    layer: int,
    head: int,
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    labels, weights = token_labels(tokenizer, ids), attention_weights(model, ids)[layer, head]
    turn(attention, 4, layer=layer, head=head)
    said = tips(attention)
    cells = [m for t in said if (m := re.match(r"query (\d+) “(.*)” → key (\d+) “(.*)”: s", t))]
    assert len(cells) == len(ids) * (len(ids) + 1) // 2
    for tip, cell in zip([t for t in said if "→" in t], cells, strict=True):
        query, key = int(cell[1]), int(cell[3])
        assert (cell[2], cell[4]) == (labels[query], labels[key])
        assert tip.endswith(f"share {float(weights[query, key]):.3f}")
    bars = [t for t in said if t.startswith("key ")]
    assert len(bars) == len(ids)
    for key, tip in enumerate(bars):
        weight = f"share {float(weights[4, key]):.3f}" if key <= 4 else "later, hidden"
        assert tip == f"key {key} “{labels[key]}”: {weight}"


def test_caption_says_where_the_most_attention_goes(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, attention: AttentionExplorer
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    weights, labels = attention_weights(model, ids), token_labels(tokenizer, ids)
    turn(attention, layer=1, head=2)
    for step in range(len(ids)):
        caption = caption_of(turn(attention, step))
        best = int(weights[1, 2, step].argmax())
        assert f"query {step} “{labels[step]}” may look at {step + 1} of {len(ids)}" in caption
        assert f"{float(weights[1, 2, step, best]):.2f} of its attention" in caption
        assert f"to key {best} “{labels[best]}”" in caption


@pytest.mark.parametrize(
    ("prompt", "layer", "head"),
    [
        ("Once upon a time Rado had an old coat. One day R", 3, 3),
        ("Once upon a time Anna had a red kite. Ben had a blue ball. One day Anna", 3, 3),
    ],
)
def test_what_the_model_predicts_stands_beside_what_the_head_looks_at(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, layer: int, head: int
) -> None:
    ids = tokenizer.encode(prompt).ids
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    top = reference(torch.tensor([ids])).logits[0].softmax(-1).topk(3)
    explorer = AttentionExplorer(model, tokenizer, prompt, layer, head)
    weights = attention_weights(model, ids)[layer, head]
    verdicts = set()
    for step in range(len(ids)):
        turn(explorer, step)
        predicted = top.indices[step].tolist()
        labels, probs = token_labels(tokenizer, predicted), top.values[step].tolist()
        said = [t for t in tips(explorer) if t.startswith("next token")]
        for tip, label, p in zip(said, labels, probs, strict=True):
            assert tip.startswith(f"next token “{label}”: probability ")
            assert float(tip.rsplit(" ", 1)[1]) == pytest.approx(p, abs=1e-3)
        same = predicted[0] == ids[int(weights[step].argmax())]
        words_ = "the token that this head looks at" if same else "not the token that this head"
        assert f", {words_}" in caption_of(explorer)
        assert words(explorer, "same") == ["= the token that" if same else "≠ the token that"]
        assert f"predicts “{labels[0]}” with probability" in caption_of(explorer)
        line = items(explorer, r"leads\.line")["leads.line"].attributes["d"]
        begins = float(str(line)[1:].split("L")[0].split()[1])
        names = list(items(explorer, r"key\d+"))
        best = explorer.shown.items[names[int(weights[step].argmax())]].attributes["y"]
        assert abs(begins - float(best)) < 8  # the arrow leaves from the key that is looked at most
        verdicts.add(same)
    assert verdicts == {True, False}


def test_any_head_is_one_click_away_and_says_its_largest_weight(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, attention: AttentionExplorer
) -> None:
    weights = attention_weights(model, tokenizer.encode(PROMPT).ids)
    shown = inside(attention.view)
    assert len(attention.heads) == 24 and all(b in shown for b in attention.heads.values())
    draws: list[int] = []
    scene = attention.scene
    attention.scene = lambda step: (draws.append(step), scene(step))[1]  # type: ignore[method-assign]
    for layer, head in ((3, 3), (1, 5), (1, 2)):
        attention.heads[layer, head].click()
        assert (attention.value("layer"), attention.value("head")) == (layer, head)
        assert caption_of(attention).startswith(f"Layer {layer}, head {head}:")
    assert len(draws) == 3
    turn(attention, 5)
    for (layer, head), button in attention.heads.items():
        chosen = "▸" * ((layer, head) == (1, 2))
        assert button.description == f"{chosen}{float(weights[layer, head, 5].max()):.2f}"
        assert button.tooltip == f"show layer {layer}, head {head}"
    turn(attention, layer=0)  # the number boxes and the grid agree
    assert attention.heads[0, 2].description.startswith("▸")


def test_long_prompt_has_bars_for_its_largest_weights_and_one_for_the_others(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("Anna had a red kite. " * 20).ids[:MAX_TOKENS]
    explorer = AttentionExplorer(model, tokenizer, tokenizer.decode(ids), 0, 1)
    weights = attention_weights(model, ids)[0, 1]
    drawn = {
        tuple(int(n) for n in spot): int(name.removeprefix("level"))
        for name, item in items(explorer, r"level\d+").items()
        for spot in re.findall(r"M(\d+) (\d+)", str(item.attributes["d"]))
    }
    x, y, _, pitch = place(explorer, f"w{MAX_TOKENS - 1}")
    top = y - (MAX_TOKENS - 1) * pitch
    assert len(drawn) == MAX_TOKENS * (MAX_TOKENS + 1) // 2
    for (left, above), level in drawn.items():
        weight = float(weights[int((above - top) / pitch), int((left - x) / pitch)])
        assert abs(level - LEVELS * weight) < 0.51
    for step in (3, MAX_BARS - 2, MAX_BARS - 1, MAX_TOKENS - 1):
        turn(explorer, step)
        bars = [t for t in tips(explorer) if t.startswith("key ")]
        shown = [int(t.split()[1]) for t in bars]
        assert shown == sorted(shown) and len(shown) == min(step + 1, MAX_BARS - 1)
        largest = weights[step].topk(len(shown)).values
        assert weights[step, shown].sum() == pytest.approx(float(largest.sum()), abs=1e-5)
        others = [t for t in tips(explorer) if "other keys together" in t]
        left = step + 1 - len(shown)
        assert len(others) == (left > 0)
        for tip in others:
            rest = 1 - float(weights[step, shown].sum())
            assert tip.startswith(f"{left} other")
            assert float(tip.rsplit(" ", 1)[1]) == pytest.approx(rest, abs=1.1e-3)


def test_future_is_marked_and_explained(attention: AttentionExplorer) -> None:
    said = tips(attention)
    n = attention.num_steps
    assert sum("they come later" in tip for tip in said) == n - 1
    first = next(tip for tip in said if "they come later" in tip)
    assert first.startswith("query 0 ") and f"keys 1 to {n - 1}" in first


def test_prompt_runs_the_model_and_a_head_does_not(
    attention: AttentionExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[int]] = []

    def counted(model: Qwen3ForCausalLM, ids: list[int]) -> Look:
        runs.append(ids)
        return look_inside(model, ids)

    monkeypatch.setattr(attention_explorer, "look_inside", counted)
    shown = {svg_of(attention)}
    for knobs in ({"layer": 1}, {"head": 3}, {"layer": 2, "head": 0}):
        turn(attention, **knobs)
        shown.add(svg_of(attention))
    assert not runs and len(shown) == 4
    turn(attention, prompt="Mia saw a dog.")
    assert len(runs) == 1
    assert attention.num_steps == len(runs[0]) and attention.step == len(runs[0]) - 1
    assert "·Mia" not in caption_of(attention) and svg_of(attention) not in shown


# -- RoPE -------------------------------------------------------------------------------------


def score_of(explorer: RopeExplorer) -> float:
    found = re.search(r"a score of (-?\d+\.\d\d)", caption_of(explorer))
    assert found is not None
    return float(found[1])


def test_shifting_both_keeps_the_score() -> None:
    explorer = RopeExplorer(m=12, n=3)
    turn(explorer, 0)
    start, scores = score_of(explorer), []
    for step in range(1, explorer.num_steps, 7):
        explorer.slider.value = step
        scores.append(score_of(explorer))
        assert f"query at m = {12 + step}, key at n = {3 + step}, distance m − n = 9" in svg_of(
            explorer
        )
        assert f"moving both on by {step} turns all hands" in caption_of(explorer)
        assert "the angles between the hands and the score stay the same" in caption_of(explorer)
        assert words(explorer, r"verdict\d") == 2 * ["≠ changes"] + 2 * ["= stays the same"]
    assert len(scores) > 5 and max(abs(score - start) for score in scores) <= 0.011


def test_moving_one_of_them_changes_the_score() -> None:
    explorer = RopeExplorer(m=9, n=4)
    scores = {}
    for n in range(10):
        explorer.parameters["n"].value = n
        scores[n] = score_of(explorer)
    assert len(set(scores.values())) == 10
    assert max(scores, key=lambda n: scores[n]) == 9  # nearest: all hands agree


def test_score_is_the_sum_of_the_pairs_cosines() -> None:
    explorer = RopeExplorer(head_dim=8, theta=100.0, m=7, n=2)
    speeds = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    assert score_of(explorer) == pytest.approx(float((5 * speeds).cos().sum()), abs=0.006)


def test_score_on_the_curve_and_in_the_caption_agree() -> None:
    explorer = RopeExplorer(m=20, n=25)
    tip = next(t for t in tips(explorer) if t.startswith("distance "))
    assert tip == f"distance -5: score {explorer.curve[64 - 5]:.3f}"
    assert score_of(explorer) == pytest.approx(explorer.curve[64 - 5], abs=0.006)


def test_tips_of_the_clocks_hold_the_engines_angles() -> None:
    explorer = RopeExplorer(head_dim=8, theta=100.0, m=7, n=2)
    turn(explorer, 3)
    said = [t for t in tips(explorer) if t.startswith("pair ")]
    assert len(said) == 1 + 4  # the big clock and one for each pair
    for pair, tip in enumerate(said[1:]):
        speed = 100.0 ** -(pair / 4)
        for part in (10 * speed, 5 * speed):
            assert f"{part:.3f} rad" in tip


def test_chosen_pair_is_the_big_clock() -> None:
    explorer = RopeExplorer()
    for pair in (0, 7, 15):
        turn(explorer, pair=pair)
        assert (
            f"pair {pair}: {float(explorer.rotary.inv_freq[pair]):.4g} rad per position"
            in svg_of(explorer)
        )


@pytest.mark.parametrize("head_dim", [2, 6, 128])
def test_heads_of_other_sizes_can_be_explored(head_dim: int) -> None:
    explorer = RopeExplorer(head_dim, 1_000_000.0, m=64, n=0)
    turn(explorer, 64, pair=head_dim // 2 - 1)
    assert "Query at 128, key at 64" in caption_of(explorer)
    assert len([t for t in tips(explorer) if t.startswith("pair ")]) == 1 + head_dim // 2
