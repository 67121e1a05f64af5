"""Where the memory of one layer lies while a text grows.

Knows numbers and labels; draws scenes.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.flow import Piece, cell, column, row, show, table, words
from tutorial_engine.viz.drawing.parts import BOLD, FAINT, MARGIN, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.words import listed

WIDE, TALL, GAP = 25.0, 24.0, 2.0  # a slot, in pixels; between two


def strips_picture(held: Mapping[str, Sequence[tuple[int, int]]], room: int) -> Picture:
    """Memory of one layer while a text grows: name -> (tokens copied, tokens written) a step.

    Each step of a name is a strip of slots, and says which were copied. Where nothing is copied,
    the strip has `room` slots from the beginning.
    """
    memories = []
    for name, steps in held.items():
        reserved = 0 if any(copied for copied, _ in steps) else room
        lines, old = [], 0
        for number, (copied, written) in enumerate(steps, 1):
            strip = [_slot(slot, copied, old) for slot in range(old + written)]
            free = [cell(WIDE, TALL, "free")] * (reserved - len(strip))
            step = words(f"step {number}", 12, **FAINT)
            lines.append([step, row(*strip, *free, gap=GAP)])
            old += written
        strips = table(lines, 18, 8, [44, room * (WIDE + GAP)])
        memories.append(column(words(name, 14, **BOLD), strips, gap=7))
    body = row(*memories, gap=34, align=0)
    sheet = show(Sheet(body.wide + 2 * MARGIN, 0), body, 5)
    facts = [
        f"{name} copies {sum(copied for copied, _ in steps)} old tokens"
        for name, steps in held.items()
    ]
    count = max(map(len, held.values()))
    return sheet.picture(f"In {count} steps {listed(facts)}; both write each new token once.")


def _slot(slot: int, copied: int, old: int) -> Piece:
    state = "cached" if slot < old else "written"
    return cell(WIDE, TALL, state, look(0), "copy" if slot < copied else "", size=9.5)
