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
    sheet = Sheet(960, bottom + 70)
    sheet.heading(f"One head: scores [T, T] orange, output [T, D = {head_dim}] blue")
    x = 60.0
    for length in lengths:
        side, strip = length * scale, max(head_dim * scale, 1.5)
        box = (x, bottom - side, side, side)
        sheet.rect(f"scores{length}", box, tint(RED, 0.25), stroke=RED)
        sheet.rect(f"out{length}", (x + side + 5, bottom - side, strip, side), BLUE)
        scores, out = (num_bytes(length * wide * itemsize) for wide in (length, head_dim))
        for i, word in enumerate((f"T = {length:,}", f"scores: {scores}", f"output: {out}")):
            style = BOLD if i == 1 else {}
            middle = x + side / 2
            sheet.text(f"of{length}.{i}", middle, bottom + 19 + 18 * i, word, 13, **CENTRE, **style)
        x += max(side, 84.0) + 70
    longest, shortest = max(lengths), min(lengths)
    smallest, largest = shortest**2 * itemsize, longest**2 * itemsize
    return sheet.picture(
        f"From T = {shortest:,} to {longest:,} tokens, {longest / shortest:g} times as many, the "
        f"scores of one head grow {largest / smallest:g} times, from {num_bytes(smallest)} to "
        f"{num_bytes(largest)}; its output grows {longest / shortest:g} times, to "
        f"{num_bytes(longest * head_dim * itemsize)} ({itemsize} bytes per number, drawn to scale)."
    )
