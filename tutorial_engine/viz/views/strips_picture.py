"""Where the memory of one layer lies while a text grows.

Knows numbers and labels; draws scenes.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.parts import (
    BOLD,
    MARGIN,
    Sheet,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.words import listed

# -- two ways to grow -----------------------------------------------------------------------------


def strips_picture(held: Mapping[str, Sequence[tuple[int, int]]], room: int) -> Picture:
    """Memory of one layer while a text grows: name -> (tokens copied, tokens written) a step.

    Each step of a name is a strip of `room` slots in which what was copied is hatched.
    """
    names, cell, left = list(held), 27.0, 62.0
    block = left + room * cell + 34
    steps = max(len(steps) for steps in held.values())
    sheet = Sheet(block * len(names) + MARGIN, 62.0 + 32 * steps)
    colours = look(0)
    for n, (name, rows) in enumerate(held.items()):
        x0 = MARGIN + n * block
        sheet.text(f"{name}.title", x0, 20, name, 14, **BOLD)
        for step, (copied, written) in enumerate(rows):
            y, old = 32.0 + 32 * step, sum(new for _, new in rows[:step])
            sheet.note(f"{name}.{step}", x0, y + 17, f"step {step + 1}", 12)
            for slot in range(max(room if not any(c for c, _ in rows) else 0, old + written)):
                state = "cached" if slot < old else "written" if slot < old + written else "free"
                box = (x0 + left + slot * cell, y, cell - 2, 24.0)
                word = "copy" if slot < copied else ""
                sheet.cell(f"{name}.{step}.{slot}", box, state, colours, "", word, 9.5)
    facts = [
        f"{name} copies {sum(copied for copied, _ in rows)} old tokens"
        for name, rows in held.items()
    ]
    return sheet.picture(f"In {steps} steps {listed(facts)}; both write each new token once.")
