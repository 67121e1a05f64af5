"""Attention of the last of three tokens by hand.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    FAINT,
    RIGHT,
    Grid,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    BLUE,
    INK,
    PAPER,
    QUIET,
    RULE,
)
from tutorial_engine.viz.words import listed

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
