"""What K and V of a token are made of, layer by layer.

Knows numbers and labels; draws scenes.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    MARGIN,
    Sheet,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.views.matters_picture import SIDE

# -- why old keys stay ----------------------------------------------------------------------------


def readers_picture(labels: Sequence[str], layers: int) -> Picture:
    """What K and V of the last old token are made of, layer by layer; the last label is new."""
    wide, tall, high, count = 150.0, 74.0, 28.0, len(labels)
    sheet = Sheet(SIDE + wide * count, 10.0 + tall * layers)
    top, new = count - 2, count - 1  # the token that is asked about, and the one that is appended
    sheet.heading(
        f"What K and V of “{labels[top]}” are made of", "✕: the causal mask forbids it", 14
    )
    low = 46 + tall * (layers - 1)  # of layer 0

    def place(layer: int, token: int) -> tuple[float, float, float, float]:
        return (SIDE + wide * token, low - tall * layer, wide - 40, high)

    made_of = [(layer, token) for layer in range(layers) for token in range(top + 1)]
    made_of = [box for box in made_of if box[0] < layers - 1 or box[1] == top]
    ways = [
        (layer, old, token)
        for layer, token in made_of
        for old in range(token + 1)  # the causal mask
        if layer
    ]
    for layer, old, token in ways:
        (x0, y0, w, _), (x, y, _, h) = place(layer - 1, old), place(layer, token)
        slide = 14.0 * (old - token)  # arrows that come from far end further to the left
        ends = [(x0 + w / 2, y0), (x + w / 2 + slide, y + h)]
        sheet.arrow(f"{layer}.{old}.{token}", ends, look(0).colour, 1.4)
    for layer in range(1, layers):  # from the new token to the left
        (x0, y0, w, _), (x, y, _, h) = place(layer - 1, new), place(layer, top)
        ends = [(x0 + w / 2, y0), (x + w / 2 + 24, y + h)]
        sheet.arrow(f"forbidden.{layer}", ends, look(1).colour, 1.4, stroke_dasharray="5 4")
        x, y = (sum(both) / 2 for both in zip(*ends, strict=True))
        sheet.text(f"forbidden.{layer}.mark", x, y + 6, "✕", 18, **CENTRE, **BOLD)
    for layer in range(layers):
        sheet.note(f"layer.{layer}", MARGIN, low - tall * layer + 19, f"layer {layer}", 13)
        for token, label in enumerate(labels):
            box, name = place(layer, token), f"box.{layer}.{token}"
            state = "cached" if (layer, token) in made_of else "written" if token == new else "free"
            sheet.cell(name, box, state, look(int(token == new)), "", f"K, V of {label}", 12)
    return sheet.picture(
        f"In layer {layers - 1}, K and V of {labels[top]} are made of {len(made_of) - 1} others "
        f"below, along {len(ways)} arrows. None of them comes from the new token, {labels[new]}. "
        "An upright arrow also stands for the vector that the layers pass on for the token itself."
    )
