"""What matters in a cached memory: each slot of each layer taken away alone.

Knows numbers and labels; draws scenes.
"""

import itertools
from collections.abc import Sequence

from torch import Tensor

from tutorial_engine.viz.drawing.parts import (
    CENTRE,
    MARGIN,
    SHADE,
    Sheet,
    part_of,
    shade,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK

SIDE = 88.0  # of the labels in front of the rows of a map


# -- what matters ---------------------------------------------------------------------------------


def matters_picture(falls: Tensor, labels: Sequence[str], goal: str) -> Picture:
    """How far P(goal) falls when V of a slot in a layer is taken away: falls [layers, slots]."""
    layers, slots = falls.shape
    wide = min(46.0, 860.0 / slots)
    sheet = Sheet(max(SIDE + wide * slots + MARGIN, 500.0), 74.0 + 34 * layers)
    ends = (0.0, max(1.0, float(falls.max())))
    sheet.note("title", MARGIN, 20, f"change of P({goal}) without V of a slot in a layer", 13)
    right = sheet.width - MARGIN
    sheet.note("least", right - 114, 20, "0", 12)
    sheet.colour_scale("scale", (right - 103, 9, 77, 12))
    sheet.note("most", right - 20, 20, f"−{ends[1]:g}", 12)
    for layer, slot in itertools.product(range(layers), range(slots)):
        fall = max(0.0, float(falls[layer, slot]))
        box = (SIDE + wide * slot, 32.0 + 34 * layer, wide - 2, 32.0)
        sheet.rect(f"{layer}.{slot}", box, shade(part_of(fall, ends)), f"−{fall:.2f}", **SHADE)
        if fall >= 0.05:
            ink = INK if fall > 0.5 else "#ffffff"
            sheet.inside(f"{layer}.{slot}.fall", box, f"−{fall:.2f}", 12.5, fill=ink, **SHADE)
    for layer in range(layers):
        sheet.note(f"layer.{layer}", MARGIN, 53.0 + 34 * layer, f"layer {layer}", 13)
    for slot, label in enumerate(labels):
        x = SIDE + wide * (slot + 0.5) - 1
        sheet.text(f"token.{slot}", x, 50.0 + 34 * layers, label, 11.5, **CENTRE)
    best = int(falls.argmax())
    layer, slot = divmod(best, slots)
    others = falls.flatten()[[i for i in range(layers * slots) if i != best]].max()
    rest = f"{float(others):.2f}" if others >= 0.01 else "0.01"
    return sheet.picture(
        f"{layers * slots} forwards: without V of slot {slot} ({labels[slot]}) in layer {layer} "
        f"P({goal}) falls by {float(falls.max()):.2f}; without any other V by "
        f"{'at most' if others >= 0.01 else 'less than'} {rest}."
    )
