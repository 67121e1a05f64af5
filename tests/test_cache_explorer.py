"""The cache explorer: what is shown is what the engine wrote, read and chose, step by step."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import one_thread
from explorers import Text, check_places, items, svg_of, tips, turn, words
from tokenizers import Tokenizer

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.layers import RMSNorm
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz import cache_steps, tokens
from tutorial_engine.viz.cache_explorer import MAX_SLOTS, CacheExplorer
from tutorial_engine.viz.cache_steps import record_steps
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.words import percent

PROMPT = "Once upon a time Anna had a red kite."


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def shared(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> CacheExplorer:
    return CacheExplorer(model, tokenizer, PROMPT, new_tokens=5)


@pytest.fixture
def explorer(shared: CacheExplorer) -> CacheExplorer:
    """An explorer as it is when new, without running the engine for every test."""
    return turn(shared, step=0, prompt=PROMPT, layer=0, head=0, chunk=0)


# -- what was recorded --------------------------------------------------------------------------


def test_one_step_each_forward_and_one_for_the_empty_cache(explorer: CacheExplorer) -> None:
    ids = explorer.tokenizer.encode(PROMPT).ids
    assert explorer.num_steps == 1 + 1 + 4  # empty, prefill, four decodes for tokens 2 to 5
    steps = explorer.run.steps
    assert [step.kind for step in steps] == ["prefill"] + ["decode"] * 4
    assert [len(step.ids) for step in steps] == [len(ids), 1, 1, 1, 1]
    assert steps[0].ids == tuple(ids)
    for i, step in enumerate(steps[1:]):
        assert step.positions == step.slots == (len(ids) + i,)


@pytest.mark.parametrize("chunk", [0, 3])
def test_tokens_are_those_of_generate(explorer: CacheExplorer, chunk: int) -> None:
    turn(explorer, chunk=chunk)
    want = generate(
        explorer.model, PROMPT, SamplingParams(max_tokens=5), tokenizer=explorer.tokenizer
    )[0]
    chosen = [step.best[0][0] for step in explorer.run.steps if step.best]
    assert tuple(chosen) == want.outputs[0].token_ids
    ran = [token for step in explorer.run.steps if step.kind == "decode" for token in step.ids]
    assert tuple(ran) == want.outputs[0].token_ids[:-1]  # the last is never run


def keys_without_a_cache(model: Qwen3ForCausalLM, ids: list[int]) -> list[torch.Tensor]:
    """K of each layer before RoPE, [n, H_kv, D]: a turn changes no length."""
    seen: list[torch.Tensor] = []
    norms = [layer.self_attn.k_norm for layer in model.model.layers]
    assert all(isinstance(norm, RMSNorm) for norm in norms)
    hooks = [n.register_forward_hook(lambda _m, _i, out: seen.append(out.clone())) for n in norms]
    try:
        model(Batch.from_sequences([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@pytest.mark.parametrize("chunk", [0, 4])
def test_lengths_are_those_of_a_run_without_a_cache(explorer: CacheExplorer, chunk: int) -> None:
    turn(explorer, chunk=chunk)
    ran = [token for step in explorer.run.steps for token in step.ids]
    keys = keys_without_a_cache(explorer.model, ran)
    want = torch.stack([k.reshape(len(ran), 2, -1).norm(dim=-1).T for k in keys])
    for step in explorer.run.steps:
        assert step.keys.shape == step.values.shape == (4, 2, step.used)
        assert (step.keys - want[..., : step.used]).abs().max() < 1e-4
        assert (step.values - explorer.run.steps[-1].values[..., : step.used]).abs().max() == 0


def test_probabilities_are_those_of_the_whole_sequence(explorer: CacheExplorer) -> None:
    model, sequence = explorer.model, []
    for step in explorer.run.steps:
        sequence += step.ids
        hidden = model(Batch.from_sequences([sequence]))
        p = model.compute_logits(hidden[-1:])[0].softmax(-1)
        assert [p[token].item() for token, _ in step.best] == pytest.approx(
            [probability for _, probability in step.best], abs=1e-5
        )
        assert len(step.best) == 6
        assert p.topk(6).values.tolist() == pytest.approx([q for _, q in step.best], abs=1e-5)


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(0, [10]), (1, [1] * 10), (4, [4, 4, 2]), (9, [9, 1]), (32, [10])]
)
def test_chunk_cuts_the_prefill(explorer: CacheExplorer, chunk: int, sizes: list[int]) -> None:
    turn(explorer, chunk=chunk)
    prefills = [step for step in explorer.run.steps if step.kind == "prefill"]
    assert [len(step.ids) for step in prefills] == sizes
    assert explorer.num_steps == 1 + len(sizes) + 4
    assert [bool(step.best) for step in prefills] == [False] * (len(sizes) - 1) + [True]


def test_parts_of_a_prompt_ask_for_no_token(explorer: CacheExplorer) -> None:
    turn(explorer, chunk=4, step=2)
    assert "no token is chosen, for the prompt goes on" in explorer.shown_caption
    assert not items(explorer, r"best\d")
    turn(explorer, step=3)
    assert "next comes" in explorer.shown_caption and len(items(explorer, r"best\d")) == 6


def test_text_ends_where_the_model_ends_it(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = record_steps(model, [5, 6, 7], 4, 0, 8)
    second_token = first[1].best[0][0]
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(second_token,)))
    short = record_steps(model, [5, 6, 7], 4, 0, 8)
    assert len(first) == 4 and len(short) == 2 and short[-1].best[0][0] == second_token


# -- what is drawn --------------------------------------------------------------------------------


def test_tips_hold_the_recorded_lengths(explorer: CacheExplorer) -> None:
    labels = token_labels(explorer.tokenizer, explorer.tokenizer.encode(PROMPT).ids)
    turn(explorer, layer=2, head=1, step=3)
    step = explorer.run.steps[2]
    said = [tip for tip in tips(explorer) if " norm of K" in tip]
    assert len(said) == 2 * step.used  # one on K, one on V
    for slot in range(step.used):
        k, v = step.keys[2, 1, slot], step.values[2, 1, slot]
        wrote = "step 1 (prefill)" if slot < 10 else f"step {slot - 8} (decode)"
        for tip in said[2 * slot : 2 * slot + 2]:
            assert tip.startswith(f"slot {slot}: “") and f"at position {slot}," in tip
            assert f"norm of K {k:.2f}, of V {v:.2f}, written in {wrote}" in tip
            assert slot >= len(labels) or f"“{labels[slot]}”" in tip


def test_cells_are_as_dark_as_the_vectors_are_short(explorer: CacheExplorer) -> None:
    turn(explorer, step=1)
    for name, lengths in zip("KV", explorer.norms(1), strict=True):
        fills = [items(explorer, f"{name}{slot}")[f"{name}{slot}"] for slot in range(10)]
        red = [int(str(item.attributes["fill"])[1:3], 16) for item in fills]
        order = lengths.argsort().tolist()
        assert red == sorted(red) or [red[i] for i in order] == sorted(red)
        written = [words(explorer, f"{name}{slot}.n")[0] for slot in range(10)]
        assert written == [f"{length:.1f}" for length in lengths.tolist()]


@pytest.mark.parametrize("step", range(6))
def test_used_and_free_slots_are_those_of_the_cache(explorer: CacheExplorer, step: int) -> None:
    turn(explorer, step=step)
    used = 0 if step == 0 else 9 + step
    assert explorer.run.num_slots == 16
    assert len(items(explorer, r"K\d+")) == len(items(explorer, r"V\d+")) == used
    free = items(explorer, r"free\d+")
    assert list(free) == [f"free{slot}" for slot in range(used, 16)]
    assert {item.attributes["fill"] for item in free.values()} <= {HATCHED}
    assert all("2,048 bytes in all layers" in item.tip for item in free.values())
    assert f"{used} of 16 slots are used" in explorer.shown_caption or step == 0
    assert ("new" in explorer.shown.items) is (step > 0)


def test_frame_lies_around_what_was_just_written(explorer: CacheExplorer) -> None:
    turn(explorer, chunk=4, step=2)
    frame = explorer.shown.items["new"].attributes
    left, right = float(frame["x"]), float(frame["x"]) + float(frame["width"])
    cells = items(explorer, r"K\d+")
    inside = [n for n, item in cells.items() if left <= float(item.attributes["x"]) < right]
    assert inside == ["K4", "K5", "K6", "K7"]


def test_mask_is_the_causal_rule_over_the_whole_cache(explorer: CacheExplorer) -> None:
    turn(explorer, chunk=4, step=2)  # queries 4 to 7 over slots 0 to 7
    marks = {name: item.text for name, item in items(explorer, r"m\d+\.\d+").items()}
    assert len(marks) == 4 * 8
    for name, mark in marks.items():
        query, slot = (int(n) for n in name[1:].split("."))
        assert mark == ("✓" if slot <= 4 + query else "×")
    assert [words(explorer, f"run{i}.at")[0] for i in range(4)] == ["4", "5", "6", "7"]
    turn(explorer, step=4)  # decode: one query, all slots
    assert [item.text for item in items(explorer, r"m\d+\.\d+").values()] == ["✓"] * 11


def test_bars_are_the_distribution(explorer: CacheExplorer) -> None:
    turn(explorer, step=3)
    best = explorer.run.steps[2].best
    for rank, (token, p) in enumerate(best):
        label = explorer.run.labels[token]
        assert words(explorer, f"best{rank}")[0] == label
        assert words(explorer, f"best{rank}.p")[0] == percent(p) + " ◀ chosen" * (rank == 0)
        assert float(explorer.shown.items[f"bar{rank}"].attributes["width"]) == max(200 * p, 0.5)
        assert f"next “{label}” (id {token}): probability {p:.4f}" in tips(explorer)


def test_account_counts_tokens_and_bytes(explorer: CacheExplorer) -> None:
    again = 0
    for step in range(explorer.num_steps):
        turn(explorer, step=step)
        used = 0 if step == 0 else 9 + step
        again += used  # without a cache every step runs all of it
        said = [words(explorer, f"sum{i}.n")[0] for i in range(4)]
        assert said == [f"{used}", f"{again}", f"{2 * used} KiB", "32 KiB"]
    turn(explorer, chunk=4, step=2)  # without a cache there are no chunks: the prompt runs once
    assert [words(explorer, f"sum{i}.n")[0] for i in range(2)] == ["8", "8"]
    turn(explorer, step=4)
    assert [words(explorer, f"sum{i}.n")[0] for i in range(2)] == ["11", "21"]


def test_caption_says_what_ran_where_and_what_comes(explorer: CacheExplorer) -> None:
    captions = [explorer.caption(step) for step in range(explorer.num_steps)]
    assert captions[0] == (
        "Step 0 of 5: the row has 16 slots in each of 4 layers, 32 KiB, all reserved and none "
        "used; a prompt of 10 tokens waits."
    )
    assert captions[1].startswith(
        "Step 1 of 5, prefill: 10 tokens run together at positions 0 to 9, are written to slots 0 "
        "to 9 in every layer, and the last of them reads 10 slots; 10 of 16 slots are used; next"
    )
    for i, caption in enumerate(captions[2:], 1):
        step, before = explorer.run.steps[i], explorer.run.steps[i - 1]
        label = explorer.run.labels[before.best[0][0]]
        assert caption.startswith(
            f"Step {i + 1} of 5, decode: “{label}” runs alone at position {9 + i}, is written to "
            f"slot {9 + i} in every layer, and reads {10 + i} slots; {10 + i} of 16 slots are used"
        )
        token, p = step.best[0]
        assert f"next comes “{explorer.run.labels[token]}” ({percent(p)})" in caption
    assert captions[-1].endswith("the last, which never runs.")
    assert sum("never runs" in caption for caption in captions) == 1


@pytest.mark.parametrize(
    ("p", "said"),
    [(0.0, "< 1 %"), (0.0049, "< 1 %"), (0.43, "43 %"), (0.994, "99 %"), (1.0, "> 99 %")],
)
def test_per_cents_never_claim_what_is_not_so(p: float, said: str) -> None:
    assert percent(p) == said


@pytest.mark.parametrize("prompt", ["A", "Once upon a time " * 4 + "#@"])
def test_short_and_long_prompts_are_readable(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str
) -> None:
    explorer = CacheExplorer(model, tokenizer, prompt, new_tokens=3)
    for step in range(explorer.num_steps):
        check_places(turn(explorer, step).shown)


@pytest.mark.parametrize("label", ["W" * 30, "WWWW", "i" * 15])
def test_no_label_is_too_long(
    explorer: CacheExplorer, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(tokens, "token_label", lambda *_: label)
    turn(explorer, prompt="Mia saw a dog.")
    for step in range(explorer.num_steps):
        check_places(turn(explorer, step).shown)
    assert f"“{label}”" in explorer.shown_caption  # there it is whole
    assert any(f"“{label}”" in tip for tip in tips(explorer))


# -- knobs and prompts ------------------------------------------------------------------------


def test_a_layer_or_head_is_looked_up_and_a_prompt_is_run(
    explorer: CacheExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    def counted(*args: Any) -> Any:
        runs.append(args)
        return record_steps(*args)

    monkeypatch.setattr(cache_steps, "record_steps", counted)
    turn(explorer, step=2)
    shown = {svg_of(explorer)}
    for knobs in ({"layer": 1}, {"head": 1}, {"layer": 3, "head": 0}):
        turn(explorer, **knobs)
        assert f"layer {explorer.value('layer')}, K/V head" in words(explorer, "where")[0]
        shown.add(svg_of(explorer))
    assert not runs and len(shown) == 4
    turn(explorer, chunk=5)
    turn(explorer, prompt="Mia saw a dog.")
    assert len(runs) == 2


def test_query_heads_of_a_kv_head_are_named(explorer: CacheExplorer) -> None:
    assert words(explorer, "where")[0] == "layer 0, K/V head 0, read by query heads 0 to 2"
    turn(explorer, head=1)
    assert words(explorer, "where")[0] == "layer 0, K/V head 1, read by query heads 3 to 5"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "The prompt is empty"),
        ("Anna " * 40, rf"\d+ tokens; with 5 new that is \d+, and the picture holds {MAX_SLOTS}"),
    ],
)
def test_impossible_prompt_is_explained_and_the_old_picture_kept(
    explorer: CacheExplorer, prompt: str, message: str
) -> None:
    turn(explorer, 2)
    before = svg_of(explorer), explorer.shown_caption, explorer.num_steps
    explorer.parameters["prompt"].value = prompt
    assert re.search(message, Text(explorer._message_html.value).words)
    assert (svg_of(explorer), explorer.shown_caption, explorer.num_steps) == before
    explorer.slider.value = 1
    assert explorer.shown_caption == explorer.caption(1)
    with pytest.raises(ValueError, match=message):
        explorer.set(prompt=prompt)
    explorer.set(prompt="Ben had a hat.")
    assert explorer._message_html.value == "" and svg_of(explorer) != before[0]


def test_impossible_first_arguments_are_refused(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match="The prompt is empty"):
        CacheExplorer(model, tokenizer, "")
    with pytest.raises(ValueError, match=r"new_tokens must be .* got 0"):
        CacheExplorer(model, tokenizer, PROMPT, new_tokens=0)


@pytest.mark.parametrize(("length", "slots"), [(1, 4), (3, 4), (4, 8), (31, 32)])
def test_row_is_rounded_up_to_four_slots(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, length: int, slots: int
) -> None:
    prompt = tokenizer.decode(tokenizer.encode("Anna had a red kite. " * 9).ids[:length])
    explorer = CacheExplorer(model, tokenizer, prompt, new_tokens=1)
    assert explorer.run.num_slots == slots and explorer.num_steps == 2
    turn(explorer, step=1)
    assert explorer.shown_caption.endswith("which never runs.")


def test_tokens_beyond_the_tokenizer_have_a_name(
    explorer: CacheExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Tokenizer, token: int) -> str:
        raise ValueError(f"token id {token} is not in the vocabulary")

    monkeypatch.setattr(tokens, "token_label", refuse)
    turn(explorer, prompt="Mia saw a dog.", step=2)
    assert re.search(r"decode: “<id \d+>” runs alone", explorer.shown_caption)
