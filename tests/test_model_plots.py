"""The model from inside: shapes, numbers and arrows are those of the model, not of the drawing."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checkpoints import QWEN3_06B
from tokenizers import Tokenizer
from traces import check_plot, check_words, items, plot_words
from transformers import AutoModelForCausalLM

from tutorial_engine.model.attention import naive_attention
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.model_plots import (
    CONTROL,
    ablation_picture,
    block_picture,
    gqa_picture,
    qkv_picture,
    recorded_projection,
    three_token_picture,
)
from tutorial_engine.viz.parts import part_of, shade
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.tokens import token_labels

PROMPT = "Once upon a time <Anna> had a red $kite$."
Q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
K = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
V = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0]])


def text(picture: Picture, name: str) -> str:
    return items(picture)[name].text or ""


# -- one layer ------------------------------------------------------------------------------------


def on_meta(_: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    with torch.device("meta"):
        return Qwen3ForCausalLM(QWEN3_06B).to("meta")


# hidden, query heads, K/V heads, head_dim, all heads together, MLP, vocabulary, layers
SIZES: dict[str, tuple[Callable[[Qwen3ForCausalLM], Qwen3ForCausalLM], tuple[int, ...]]] = {
    "tiny": (lambda model: model, (192, 6, 2, 32, 192, 512, 512, 4)),
    "0.6B": (on_meta, (1024, 16, 8, 128, 2048, 3072, 151_936, 28)),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_arrow_of_the_layer_has_the_shape_of_what_runs_along_it(
    model: Qwen3ForCausalLM, name: str
) -> None:
    make, (hidden, heads, kv_heads, dim, joined, mlp, vocab, layers) = SIZES[name]
    picture = block_picture(make(model))
    check_words(picture)
    stream = f"[T, {hidden}]"
    expected = {
        "stream": stream,
        "attention.in": stream,
        **{f"attention.to.W_{one}": stream for one in "qkv"},
        "q.raw": f"q [T, {heads}, {dim}]",
        "k.raw": f"k [T, {kv_heads}, {dim}]",
        "v.raw": f"v [T, {kv_heads}, {dim}]",
        "q.turned": f"[T, {heads}, {dim}]",
        "k.turned": f"[T, {kv_heads}, {dim}]",
        "attention.back": f"[T, {heads}, {dim}], heads joined: [T, {joined}]",
        "attention.out": stream,
        "attention.plus": stream,
        "mlp.in": stream,
        "mlp.to.W_gate": stream,
        "mlp.to.W_up": stream,
        "gate.raw": f"gate [T, {mlp}]",
        "up.raw": f"up [T, {mlp}]",
        "mlp.back": f"[T, {mlp}]",
        "mlp.out": stream,
        "mlp.plus": stream,
        "norm.out": f"last token [1, {hidden}]",
        "logits": f"logits [1, {vocab}]",
    }
    shapes = [one for one in items(picture) if one.endswith(".shape")]
    assert {one.removesuffix(".shape"): text(picture, one) for one in shapes} == expected
    arrows = {one.removesuffix(".line") for one in items(picture) if one.endswith(".line")}
    assert arrows - {"embed"} == {one for one in expected if not one.endswith("plus")}
    assert text(picture, "ids") == "token ids [T]"
    assert f"the next {layers - 1} layers" in text(picture, "more")
    assert f"{heads} query heads, {kv_heads} K/V heads, {dim} numbers each" in picture.caption
    assert f"after {layers} such layers come {vocab} logits" in picture.caption


def test_residual_stream_is_one_straight_line(model: Qwen3ForCausalLM) -> None:
    line = items(block_picture(model))["stream.line"].attrib["d"]
    places = [float(n) for n in re.findall(r"[\d.]+", line)]
    assert len(places) == 4 and places[0] == places[2] and places[3] - places[1] > 400


# -- q, k and v -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "token"), [(0, 4), (2, -1)])
def test_recorded_q_k_and_v_are_those_of_transformers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, layer: int, token: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    token %= len(ids)
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).model
    block = theirs.layers[layer]
    hidden = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0, token]
    x = block.input_layernorm(hidden)
    found = recorded_projection(model, ids, token, layer)
    torch.testing.assert_close(found.x, x, atol=1e-4, rtol=1e-4)
    linears = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
    for linear, w, y in zip(linears, found.weights, found.results, strict=True):
        torch.testing.assert_close(w, linear.weight)
        torch.testing.assert_close(y, linear(x), atol=1e-4, rtol=1e-4)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("layer", [0, 3])
def test_numbers_of_the_picture_of_q_k_and_v_are_those_of_the_run(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, layer: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    place = token_labels(tokenizer, ids).index("$")
    picture = qkv_picture(model, tokenizer, ids, place, layer=layer)
    check_words(picture)
    run = recorded_projection(model, ids, place, layer)

    def cells(name: str) -> list[float]:
        shown = (text(picture, f"{name}{i}.value") for i in (0, 1, 7, 9))
        return [float(word.replace("−", "-")) for word in shown]

    for x, w, product, i in zip(*map(cells, ("x", "w", "products")), (0, 1, 7, -1), strict=True):
        assert [x, w] == pytest.approx([run.x[i].item(), run.weights[0][36, i].item()], abs=0.006)
        assert product == pytest.approx(float(run.x[i] * run.weights[0][36, i]), abs=0.006)
    number = f"{float(run.results[0][36]):.2f}".replace("-", "−")
    assert text(picture, "sum.value") == number
    assert f"give {number}, number 4 of head 1 of q" in picture.caption
    assert "192 (6 × 32) for q, 64 (2 × 32) for k and 64 (2 × 32) for v" in picture.caption
    found, far = items(picture), float(torch.cat(run.results).abs().max())
    for name, values in zip("qkv", run.results, strict=True):
        fills = [found[f"{name}{i}"].attrib["fill"] for i in range(len(values))]
        assert fills == [shade(part_of(value, (-far, far))) for value in values.tolist()]
    frame, cell = (found[one].attrib for one in ("framed", "q36"))
    assert [float(frame[a]) for a in "xy"] == pytest.approx([float(cell[a]) - 1 for a in "xy"])
    assert f"token {place} “$”" in text(picture, "title")


# -- which query head reads which K/V head --------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 8), (4, 4), (8, 1), (32, 8), (64, 8)])
def test_query_heads_lead_to_the_head_that_attention_gives_them(heads: int, kv_heads: int) -> None:
    config = replace(QWEN3_06B, num_attention_heads=heads, num_key_value_heads=kv_heads)
    picture = gqa_picture(config)
    check_words(picture)
    # one value for each K/V head: what a query head returns says which one it read
    k, v = torch.zeros(1, kv_heads, 2), torch.arange(kv_heads).float().view(1, kv_heads, 1)
    read = naive_attention(torch.zeros(1, heads, 2), k, v).out.flatten().int().tolist()
    found = items(picture)
    for h, g in enumerate(read):
        box, line = found[f"kv{g}"].attrib, found[f"line{h}"].attrib
        assert float(line["x2"]) == pytest.approx(
            float(box["x"]) + float(box["width"]) / 2, abs=0.02
        )
    wrong = [h for h in range(heads) if h % kv_heads != read[h]]
    named = [h for h in range(heads) if f"q{h}.name" in found]
    assert len(named) == (heads if heads < 40 else heads / 2)
    assert all(text(picture, f"q{h}.name") == str(h) for h in named)
    shown = [h for h in range(heads) if f"modulo{h}" in found]
    assert shown == (named if wrong else [])
    assert [h for h in shown if "✗" in text(picture, f"modulo{h}")] == [
        h for h in shown if h in wrong
    ]
    assert (f"{len(wrong)} of {heads} query heads would read" in picture.caption) == bool(wrong)
    assert f"so there are {kv_heads} head" in picture.caption


# -- attention of three tokens --------------------------------------------------------------------


@pytest.mark.parametrize("values", [V, torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.25]])])
def test_numbers_of_the_three_tokens_are_those_of_attention(values: torch.Tensor) -> None:
    picture = three_token_picture(Q, K, values)
    check_words(picture)
    found = naive_attention(Q[:, None], K[:, None], values[:, None])
    for i in range(3):
        for j in range(3):
            assert float(text(picture, f"score{i}{j}.value")) == float(Q[i] @ K[j])
        share = float(found.weights[0, -1, i])
        assert text(picture, f"percent{i}") == f"{100 * share:.0f} %"
        assert text(picture, f"mix{i}").startswith(f"{share:.3f} · (")
    x, y = found.out[-1, 0].tolist()
    assert text(picture, "out") == f"output = ({x:.2f}, {y:.2f})"
    assert picture.caption.endswith(f"give the output ({x:.2f}, {y:.2f}).")


# -- ablations ------------------------------------------------------------------------------------

HITS = [
    ("nothing silenced", 310, 320),
    ("L3 <b>H3</b>", 2, 320),
    ("$L1$", 318, 320),
    (f"{CONTROL}L3 H0–2", 309, 320),
    (f"{CONTROL}L0 H3–5", 1, 320),
]


def test_controls_stand_apart_below_the_others_and_one_that_fails_is_marked() -> None:
    stories = [
        (name, value, 1)
        for (name, *_), value in zip(HITS, (0.99, 0.1, 0.9, 0.8, 0.99), strict=True)
    ]
    picture = check_plot(lambda: ablation_picture({"$hits$": HITS, "stories": stories}))
    names = ["nothing silenced", "L3 <b>H3</b>", "$L1$", "controls", "L3 H0–2", "L0 H3–5"]
    said = plot_words(picture)
    places = [said.index(name) for name in names]
    assert places == sorted(places) and all(said.count(name) == 1 for name in names)
    assert picture.caption == (
        "$hits$: 310 of 320 (nothing silenced), least of the heads under test 2 of 320 "
        "(L3 <b>H3</b>); controls that are not harmless (✗): L0 H3–5. Stories: 99 % (nothing "
        "silenced), least of the heads under test 10 % (L3 <b>H3</b>); controls that are not "
        "harmless (✗): L3 H0–2."
    )
    assert [word for word in said if word.startswith("✗")] == ["✗ 1 of 320", "✗ 80 %"]
    assert "<pattern" in picture.svg  # hatched


def test_probabilities_are_per_cents_and_need_no_controls() -> None:
    rows = [("nothing silenced", 0.99, 1), ("one", 0.24, 1)]
    picture = check_plot(lambda: ablation_picture({"probability": rows}))
    assert picture.caption == "Probability: 99 % (nothing silenced), 24 % (one)."
    assert "probability" in plot_words(picture) and "controls" not in plot_words(picture)
    assert "<pattern" not in picture.svg


# -- what cannot be drawn -------------------------------------------------------------------------


def test_what_cannot_be_drawn_is_refused_in_words(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    refused: list[tuple[str, Callable[[], Picture]]] = [
        (r"token 3 is outside the 3 ids", lambda: qkv_picture(model, tokenizer, [1, 2, 3], 3)),
        (r"layer 4 is outside the 4", lambda: qkv_picture(model, tokenizer, [1, 2], 0, layer=4)),
        (r"v must be \[3, 2\].*got \[2, 2\]", lambda: three_token_picture(Q, K, V[:2])),
        (
            r"'x': the value must be from 0 to 4, got 5",
            lambda: ablation_picture({"a": [("x", 5, 4)]}),
        ),
        (r"the first row", lambda: ablation_picture({"a": HITS[3:]})),
        (r"the first row", lambda: ablation_picture({})),
    ]
    for message, draw in refused:
        with pytest.raises(ValueError, match=message):
            draw()
