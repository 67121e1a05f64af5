"""Which window a token needs to see an earlier one.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.style import BLUE, GREEN, ORANGE, PAPER, QUIET, RULE
from tutorial_engine.viz.words import listed


def reach_picture(labels: Sequence[str], looks: Sequence[tuple[int, int]], window: int) -> Picture:
    """Which window a token needs to see an earlier one. `looks`: (query, key) places in the text.

    ValueError when a query does not stand after its key.
    """
    for query, key in looks:
        if not 0 <= key < query < len(labels):
            raise ValueError(f"query {query} must stand after key {key}, within {len(labels)}")
    pitch = 936 / len(labels)
    sheet = Sheet(960, 84 + 66 * len(looks))
    sheet.heading(f"A window of {window}, and the window that a name needs")
    for i, label in enumerate(labels):
        ink = next((c for c, look in zip((BLUE, GREEN), looks, strict=False) if i in look), None)
        box = (12 + i * pitch + 1, 40.0, pitch - 2, 26.0)
        sheet.rect(f"token{i}", box, tint(ink, 0.3) if ink else PAPER, rx=3, stroke=ink or RULE)
        sheet.inside(f"token{i}.label", box, cut_to(label, pitch - 3, 11), 11)
    said = []
    for row, ((query, key), ink) in enumerate(zip(looks, (BLUE, GREEN), strict=False)):
        need, y, end = query - key + 1, 78.0 + 66 * row, 12 + (query + 1) * pitch
        for i, (size, fill) in enumerate(((need, tint(ink, 0.3)), (window, tint(ORANGE, 0.5)))):
            box = (end - size * pitch, y + 27 * i, size * pitch, 24.0)
            sheet.rect(f"reach{row}.{i}", box, fill, stroke=QUIET)
            who = f"“{labels[query]}” sees “{labels[key]}”: window {size}"
            words = f"window {size}" if i else who
            sheet.inside(f"reach{row}.{i}.words", box, words, 12)
        said.append(f"“{labels[query]}” sees “{labels[key]}” from a window of {need} on")
    return sheet.picture(f"A window of {window} is too small: {listed(said)}.")
