"""The model from inside: a layer, q, k, v, GQA, attention, heads.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM, DecoderLayer
from tutorial_engine.viz.charts import label_bars, panels, rows_of_bars
from tutorial_engine.viz.layer_plot import LayerSheet
from tutorial_engine.viz.parts import (
    BOLD,
    CENTRE,
    FAINT,
    RIGHT,
    SHADE,
    Grid,
    Sheet,
    Style,
    part_of,
    shade,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.shapes import shape_walk
from tutorial_engine.viz.style import BLUE, INK, PAPER, QUIET, RED, RULE, finish, house_style
from tutorial_engine.viz.tokens import cut_label, token_names
from tutorial_engine.viz.words import counted, listed, numbered, percent

Ablation = tuple[str, float]  # name, and the probability that is left


# -- one layer ------------------------------------------------------------------------------------


def block_picture(model: CausalLM) -> Picture:
    """One decoder layer as a dataflow; every arrow has the shape that a run of the model had.

    The model may be on the meta device: only shapes are read.
    """
    config = model.config
    sheet = LayerSheet(config, recorded_shapes(model))
    return sheet.picture(
        f"The residual stream, {sheet.shapes['stream']}, runs straight through the layer; "
        f"attention ({config.num_attention_heads} query heads, {config.num_key_value_heads} K/V "
        f"heads, {config.head_dim} numbers each) and the MLP ({config.intermediate_size} numbers "
        f"wide) read it through a norm and add their result to it; after "
        f"{counted(config.num_hidden_layers, 'such layer')} come {config.vocab_size} logits."
    )


def recorded_shapes(model: CausalLM) -> dict[str, str]:
    """The shape of each tensor of the dataflow, recorded in one run; T is the number of tokens."""
    run = shape_walk(model, Batch.from_sequences([[0] * 3], device=model.device))
    steps = {step.name.strip().split(",")[0]: step for step in run}

    def went_in(name: str) -> str:
        return "[T" + steps[name].inputs.removeprefix("[3")

    def came_out(name: str) -> str:
        return "[T" + steps[name].output.removeprefix("[3")

    return {
        "ids": went_in("embed_tokens"),
        "stream": came_out("embed_tokens"),
        "attention.norm": came_out("input_layernorm"),
        "q": went_in("attention: q"),
        "k": went_in("attention: k and v"),
        "v": went_in("attention: k and v"),
        "q.turned": went_in("attention: q"),
        "k.turned": went_in("attention: k and v"),
        "mixed": came_out("attention: q"),
        "joined": went_in("o_proj"),
        "attention.out": came_out("o_proj"),
        "mlp.norm": came_out("post_attention_layernorm"),
        "mlp.half": came_out("act_fn"),
        "mlp.product": went_in("down_proj"),
        "mlp.out": came_out("down_proj"),
        "last": steps["lm_head"].inputs,
        "logits": steps["lm_head"].output,
    }


# -- q, k and v of one token ----------------------------------------------------------------------


class Projection(NamedTuple):
    """What one layer's projection did: x [hidden], W [out, hidden] and y [out] of q, k and v."""

    x: Tensor
    weights: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


@torch.inference_mode()
def recorded_projection(model: CausalLM, ids: Sequence[int], token: int, layer: int) -> Projection:
    """Run the ids and keep what went into the layer's projection, and what came out, at one token.

    The results are before their norms and RoPE. ValueError for a token or layer out of range.
    """
    layers = model.config.num_hidden_layers
    if not 0 <= token < len(ids):
        raise ValueError(f"token {token} is outside the {len(ids)} ids: choose 0 to {len(ids) - 1}")
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is outside the {layers} layers: choose 0 to {layers - 1}")
    kept: list[Tensor] = []

    def keep(_module: object, inputs: tuple[Tensor], output: Tensor) -> None:
        kept.extend((inputs[0][token].float().cpu(), output[token].float().cpu()))

    block = cast(DecoderLayer, model.model.layers[layer]).self_attn
    handle = block.qkv_proj.register_forward_hook(keep)
    try:
        model(Batch.from_sequences([list(ids)], device=model.device))
    finally:
        handle.remove()
    sizes = (block.q_size, block.kv_size, block.kv_size)
    weights = block.qkv_proj.weight.float().cpu().split(sizes)
    return Projection(kept[0], weights, kept[1].split(sizes))


def qkv_picture(
    model: CausalLM, tokenizer: Tokenizer, ids: Sequence[int], token: int, layer: int = 0
) -> Picture:
    """How one number of q comes about: x times a row of W_q; below all of q, k and v, by heads.

    `token` is a place in `ids`. ValueError for a token or layer that is not there.
    """
    x, weights, results = recorded_projection(model, ids, token, layer)
    dim = model.config.head_dim
    heads = [len(y) // dim for y in results]
    label = cut_label(token_names(tokenizer, ids)[ids[token]], 14)
    row = dim * (heads[0] > 1) + dim // 8  # the one that is shown
    result = _signed(results[0][row])
    sheet = Sheet(960, 186 + 22 * sum(heads) + 34 * len(heads))
    sheet.heading(f"One number of q, for token {token} “{label}” in layer {layer}")
    rows = {
        "x": (f"x, {len(x)} numbers", x),
        "w": (f"× row {row} of W_q", weights[0][row]),
        "products": ("= products", x * weights[0][row]),
    }
    for i, (name, (words, numbers)) in enumerate(rows.items()):
        _numbers(sheet, name, 44.0 + 34 * i, words, numbers)
    total = (824.0, 112.0, 126.0, 30.0)
    sheet.text("sum.words", total[0], 102, f"sum of all {len(x)}:", 12.5)
    sheet.rect("sum", total, PAPER, rx=3, stroke=RED, stroke_width=2)
    sheet.inside("sum.value", total, result, 14, **BOLD)
    _results(sheet, results, dim, row)
    sizes = listed(
        f"{len(y)} ({count} × {dim}) for {name}"
        for name, y, count in zip("qkv", results, heads, strict=True)
    )
    return sheet.picture(
        f"Token {token} “{label}”: the {len(x)} numbers of x, times row {row} of W_q number by "
        f"number and added up, give {result}, number {row % dim} of head {row // dim} of q "
        f"(framed); all rows of the three matrices give {sizes}."
    )


def far_value(results: Sequence[Tensor]) -> float:
    """The size that one value in ten is beyond: a few large ones would leave the others grey."""
    return float(torch.cat(list(results)).abs().quantile(0.9))


def _results(sheet: Sheet, results: Sequence[Tensor], dim: int, framed: int) -> None:
    """All numbers of q, k and v, a line for each head; one of q has a frame."""
    far = far_value(results)
    y, wide = 180.0, 660 / dim
    for name, values in zip("qkv", results, strict=True):
        count = len(values) // dim
        made = f"{name} = x @ W_{name}.T: {counted(count, 'head')} of {dim} numbers"
        words = f"{made}; W_{name} has {len(values)} rows"
        sheet.text(f"{name}.title", 150, y, words, 12.5, **BOLD)
        for i, value in enumerate(values.tolist()):
            head, column = divmod(i, dim)
            box = (150 + column * wide, y + 8 + 22 * head, wide, 20.0)
            sheet.rect(f"{name}{i}", box, shade(part_of(value, (-far, far))), **SHADE)
            if column == 0:
                sheet.text(f"{name}.head{head}", 142, box[1] + 15, f"head {head}", 12, **RIGHT)
            if (name, i) == ("q", framed):
                frame = box
        y += 34 + 22 * count
    sheet.outline("framed", frame, 1, stroke=RED)
    sheet.note("scale", 824, 206, "value", 12)
    sheet.colour_scale("scale", (824, 214, 126, 14))
    ends = (f"≤ {_signed(-far, 1)}", "0", f"≥ {_signed(far, 1)}")
    for x_at, end, side in zip((824, 887, 950), ends, ({}, CENTRE, RIGHT), strict=True):
        sheet.note(f"scale{x_at}", x_at, 244, end, 12, **side)


def _numbers(sheet: Sheet, name: str, y: float, words: str, numbers: Tensor) -> None:
    """The first numbers of a vector and its last, in cells."""
    sheet.text(f"{name}.words", 142, y + 19, words, 12.5, **RIGHT)
    first, grid = min(8, len(numbers) - 1), Grid(150, y, 66, 30, 10, (4, 0))
    for place, number in enumerate([*numbers[:first].tolist(), None, float(numbers[-1])]):
        if number is None:
            sheet.inside(f"{name}.more", grid.box(place), "…", 14)
            continue
        sheet.rect(f"{name}{place}", grid.box(place), "#f4f6f8", rx=3, stroke=RULE)
        sheet.inside(f"{name}{place}.value", grid.box(place), _signed(number), 12.5)


def _signed(number: Tensor | float, digits: int = 2) -> str:
    return f"{float(number):.{digits}f}".replace("-", "−")


# -- which query head reads which K/V head --------------------------------------------------------


def gqa_picture(config: ModelConfig) -> Picture:
    """Which query heads read which K/V head, and for which of them h % H_kv would be wrong."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = config.group_size
    wrong = [h for h in range(heads) if h % kv_heads != h // group]
    sheet = Sheet(960, 260 if wrong else 184)
    sheet.heading(f"{counted(heads, 'query head')}, {counted(kv_heads, 'K/V head')}")
    top, low, left = 56.0, 136.0, 200.0
    pitch = min(92.0, (sheet.width - left - 10) / heads)
    stride = math.ceil(20 / pitch)  # of very many heads not each has its number
    for name, y, words in (("q", top, "query head h"), ("kv", low, "the K/V head that it reads")):
        sheet.text(f"{name}.row", 10, y + 21, words, 12.5, **BOLD)
    for g in range(kv_heads):
        one, own = look(g), range(g * group, (g + 1) * group)
        begin, room = left + own[0] * pitch, group * pitch - 6
        box = (begin + max(0.0, room - 130) / 2, low, min(room, 130.0), 32.0)
        for h in own:
            place = (left + h * pitch, top, pitch - 6, 32.0)
            ends: Style = {"x1": place[0] + place[2] / 2, "x2": box[0] + box[2] / 2}
            line: Style = {"stroke": one.colour, "stroke_width": 2}
            sheet.add(f"line{h}", "line", y1=top + 32, y2=low, **ends, **line)
            sheet.rect(f"q{h}", place, one.light, rx=4, stroke=one.colour)
            if h % stride == 0:
                spot = place if pitch >= 20 else (place[0], top - 20, place[2], 16.0)
                sheet.inside(f"q{h}.name", spot, str(h), 12.5 if pitch >= 20 else 10)
        sheet.rect(f"kv{g}", box, one.dark, rx=4, stroke=one.colour)
        sheet.inside(f"kv{g}.name", box, str(g), 13, **BOLD)
    if wrong:
        _formulas(sheet, config, left - 3, pitch)
    reads = [
        f"K/V head {g} is read by {numbered(range(g * group, (g + 1) * group), 'query head')}"
        for g in sorted({0, kv_heads - 1})  # the first and the last
    ]
    caption = (
        f"Query head h reads K/V head h // {group}: {listed(reads)}; so there are "
        f"{counted(kv_heads, 'head')} of keys and values instead of {heads}"
    )
    if wrong:
        caption += (
            f"; h % {kv_heads} fits every shape too, but {len(wrong)} of {heads} query heads would "
            "read the wrong K/V head"
        )
    return sheet.picture(caption + ".")


def _formulas(sheet: Sheet, config: ModelConfig, left: float, pitch: float) -> None:
    """Two formulas and what each gives for every query head; what is wrong is crossed."""
    group, kv_heads = config.group_size, config.num_key_value_heads
    y = 208.0
    sheet.text("right", 10, y, f"h // {group}   (right)", 12.5)
    sheet.text("modulo", 10, y + 32, f"h % {kv_heads}   (wrong where ✗)", 12.5)
    roomy = pitch >= 34
    size = 12.5 if roomy else 10
    for h in range(0, config.num_attention_heads, math.ceil(20 / pitch)):
        x, ours, theirs = left + (h + 0.5) * pitch, h // group, h % kv_heads
        sheet.text(f"right{h}", x, y, str(ours), size, **CENTRE)
        ink: Style = {"fill": QUIET} if ours == theirs else {"fill": RED, **BOLD}
        cross = f"{theirs} ✗" if roomy else "✗"
        words = str(theirs) if ours == theirs else cross
        sheet.text(f"modulo{h}", x, y + 32, words, size, **CENTRE, **ink)


# -- attention of three tokens --------------------------------------------------------------------


def three_token_picture(q: Tensor, k: Tensor, v: Tensor) -> Picture:
    """Attention of the last of three tokens by hand: scores, division by √2, softmax, mixing.

    q, k and v are [3, 2]; ValueError for anything else.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape != (3, 2):
            raise ValueError(
                f"{name} must be [3, 2], three tokens of two numbers, got {list(tensor.shape)}"
            )
    scores = (q @ k.T).tolist()  # row = query, column = key
    scaled = [score / math.sqrt(2) for score in scores[-1]]
    shares = torch.tensor(scaled).softmax(0).tolist()
    parts = [
        [share * value for value in row] for share, row in zip(shares, v.tolist(), strict=True)
    ]
    out = [sum(column) for column in zip(*parts, strict=True)]
    sheet = Sheet(960, 242)
    top, tall, x1, x2, x3, x4 = 70.0, 40.0, 104.0, 372.0, 524.0, 694.0
    titles = ((10, "1 · score = q · k"), (x2, "2 · divide by √2"), (x3, "3 · softmax"))
    for i, (x, words) in enumerate((*titles, (x4, "4 · share times v, then the sum"))):
        sheet.text(f"title{i}", x, 26, words, 13.5, **BOLD)
    _scores(sheet, q, k, scores, Grid(x1, top, 80, tall, 3))
    sheet.arrow("on", [(x1 + 242, top + 2.5 * tall), (x2 - 6, top + 2.5 * tall)], INK)
    for j, share in enumerate(shares):
        base = top + (j + 0.5) * tall + 4.5
        divided = f"key {j}: {scores[-1][j]:.4g} / √2 = {scaled[j]:.2f}"
        sheet.text(f"scaled{j}", x2, base, divided, 12.5)
        sheet.bar(f"share{j}", (x3, base - 14, 90, 18), share, BLUE)
        sheet.text(f"percent{j}", x3 + 98, base, f"{100 * share:.0f} %", 13, **BOLD)
        mix = f"{share:.3f} · {_vector(v[j].tolist())} = {_vector(parts[j], '.1f')}"
        sheet.text(f"mix{j}", x4, base, mix, 13)
    y = top + 3 * tall + 8
    sheet.add("sum.line", "line", x1=x3, y1=y, x2=sheet.width - 10, y2=y, stroke=QUIET)
    sheet.text("sum", x3 + 98, y + 24, f"{100 * sum(shares):.0f} %", 13, **BOLD)
    sheet.text("out", x4, y + 24, f"output = {_vector(out, '.1f')}", 13.5, **BOLD)
    percents = listed(f"{100 * share:.0f} %" for share in shares)
    return sheet.picture(
        f"The last query scores {listed(f'{score:.4g}' for score in scores[-1])}; divided by √2 "
        f"and put through the softmax these become shares of {percents}, and the values v, mixed "
        f"in these shares, give the output {_vector(out, '.1f')}."
    )


def _scores(sheet: Sheet, q: Tensor, k: Tensor, scores: list[list[float]], grid: Grid) -> None:
    """The table of all scores, a row for each query; the last row is framed."""
    for i in range(3):
        x, y, w, h = grid.box(i)
        sheet.note(f"k{i}", x + w / 2, y - 10, f"k{i} = {_vector(k[i].tolist())}", 12, **CENTRE)
        _, y, _, _ = grid.box(3 * i)
        look: Style = BOLD if i == 2 else FAINT
        words = f"q{i} = {_vector(q[i].tolist())}"
        sheet.text(f"q{i}", grid.x - 8, y + h / 2 + 4, words, 12, **RIGHT, **look)
        for j in range(3):
            box = grid.box(3 * i + j)
            sheet.rect(f"score{i}{j}", box, "#f4f6f8" if i < 2 else PAPER, stroke=RULE)
            sheet.inside(f"score{i}{j}.value", box, f"{scores[i][j]:.4g}", 14, **look)
    sheet.outline("last", grid.box(6, 3))


def _vector(numbers: Sequence[float], digits: str = ".4g") -> str:
    return "(" + ", ".join(f"{number:{digits}}" for number in numbers) + ")"


# -- what happens without a head ------------------------------------------------------------------


@house_style()
def ablation_picture(title: str, rows: Sequence[Ablation]) -> Picture:
    """A bar for each ablation: the probability that is left with these heads silenced.

    The first row is what the others are compared with. ValueError for no rows and for a value
    outside 0 .. 1.
    """
    if not rows:
        raise ValueError("no rows: the first one is what the others are compared with")
    for name, value in rows:
        if not 0 <= value <= 1:
            raise ValueError(f"{name!r}: a probability is from 0 to 1, got {value}")
    names, values = zip(*rows, strict=True)
    first = values[0]
    figure, (ax,) = panels(9.0, 0.34 * len(names) + 1.2)
    rows_of_bars(ax, names, 1.3)
    ax.set_title(title, fontsize=10.5, loc="left")
    ax.set_ylim(top=-1.1)  # room for what the dotted line is
    ax.text(first - 0.01, -0.62, f"dotted: {names[0]}", ha="right", color=QUIET, fontsize=9)
    bars = ax.barh(range(len(rows)), values, height=0.66, color=BLUE)
    results = [percent(value) for value in values]
    over = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # the dotted line
    label_bars(ax, bars, results, bbox=over, color=INK)
    ax.axvline(first, color=INK, linewidth=1, linestyle=":", zorder=0)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.spines[["left"]].set_visible(False)
    ax.spines["bottom"].set_bounds(0, 1)
    each = ", ".join(f"{result} ({name})" for name, result in zip(names, results, strict=True))
    return finish(figure, f"{title[0].upper()}{title[1:]}: {each}.")
