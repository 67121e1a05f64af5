"""The size of a head's scores beside its output, as a text grows.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.style import BLUE, RED
from tutorial_engine.viz.words import num_bytes

SIDE = 250.0  # pixels of the largest square of scores


def scores_picture(lengths: Sequence[int], head_dim: int, itemsize: int) -> Picture:
    """The scores [T, T] of one head as squares, its output [T, D] as strips, all to one scale."""
    scale = SIDE / max(lengths)
    bottom = SIDE + 56
    sheet = Sheet(960, bottom + 52)
    sheet.heading("One head, texts of T tokens: its scores [T, T] and its output [T, D]")
    x = 60.0
    for length in lengths:
        side, strip = length * scale, max(head_dim * scale, 1.5)
        box = (x, bottom - side, side, side)
        sheet.rect(f"scores{length}", box, tint(RED, 0.25), stroke=RED)
        sheet.rect(f"out{length}", (x + side + 5, bottom - side, strip, side), BLUE)
        below = (f"T = {length:,}", num_bytes(length**2 * itemsize))
        for i, word in enumerate(below):
            style = BOLD if i else {}
            middle = x + side / 2
            sheet.text(f"of{length}.{i}", middle, bottom + 19 + 18 * i, word, 13, **CENTRE, **style)
        x += max(side, 84.0) + 70
    longest, shortest = max(lengths), min(lengths)
    one, most = shortest**2 * itemsize, longest**2 * itemsize
    sheet.text("key.scores", 60, 60, "red: scores [T, T], with their bytes below", 12.5)
    words = f"blue: output [T, D = {head_dim}]"
    sheet.text("key.out", 60, 80, words, 12.5)
    return sheet.picture(
        f"From {shortest:,} to {longest:,} tokens, {longest / shortest:g} times as many, the "
        f"scores of one head grow {most / one:g} times, from {num_bytes(one)} to "
        f"{num_bytes(most)}; its output grows {longest / shortest:g} times, to "
        f"{num_bytes(longest * head_dim * itemsize)} ({itemsize} bytes per number, drawn to scale)."
    )
