"""Numbers in a GPU's memory: whose they are, and what is read.

Drawn from what was recorded at some times.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, DEAF, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.style import INK
from tutorial_engine.viz.words import listed

Held = tuple[Sequence[int], Mapping[str, tuple[int, int]]]  # numbers; whose: begin and how many


def gpu_memory_picture(times: Mapping[str, Held], reads: Mapping[str, tuple[int, int]]) -> Picture:
    """Numbers at the places of a GPU's memory at some times, whose they are, and what is read."""
    wide, tall = 44.0, 72.0
    scene = Sheet(1000, 50 + tall * len(times) + 16)
    scene.heading("The places that the recording reads", "every place holds a number")
    colours: dict[str, int] = {}
    for row, (when, (numbers, owners)) in enumerate(times.items()):
        y = 50 + tall * row
        scene.text(f"{row}.when", 10, y + 32, when, 12.5, **BOLD)
        for name, (begin, count) in owners.items():
            owner = look(colours.setdefault(name, len(colours)))
            scene.note(f"{row}.{name}", 240 + begin * wide, y + 8, name, 12)
            for place in range(begin, begin + count):
                box = (240 + place * wide, y + 14, wide - 3, 28)
                scene.cell(f"{row}.{place}", box, "solid", owner, "", str(numbers[place]), 12.5)
    y = 50 + tall * len(times) - 20
    scene.note("reads", 10, y + 22, "the recording reads here:", 12)
    for name, (begin, count) in reads.items():
        x, end = 240 + begin * wide, 237 + (begin + count) * wide
        scene.add(
            f"reads.{name}", "path", d=f"M{x} {y}v6H{end}v-6", fill="none", stroke=INK, **DEAF
        )
        scene.note(f"reads.{name}.words", (x + end) / 2, y + 22, name, 12, **CENTRE)
    where = (f"{name} at places {a} to {a + n - 1}" for name, (a, n) in reads.items())
    there = (f"{when}, {listed(owners)} lie there" for when, (_, owners) in times.items())
    caption = f"The recording reads {listed(where)}; {'; '.join(there)}."
    return scene.picture(caption, zoom=1.0)
