"""How q, k and v of a token come about.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM, DecoderLayer
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    RIGHT,
    SHADE,
    Grid,
    Sheet,
    part_of,
    shade,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import PAPER, RED, RULE
from tutorial_engine.viz.tokens import cut_label, token_names
from tutorial_engine.viz.words import counted, listed

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
