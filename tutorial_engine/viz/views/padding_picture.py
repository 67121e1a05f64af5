"""The slots that a step copies where contexts are padded.

Drawn from the lengths of recorded steps.
"""

from collections.abc import Sequence
from itertools import groupby

from tutorial_engine.engine.replay import Size
from tutorial_engine.viz.drawing.parts import BOLD, DEAF, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.scene import HATCHED
from tutorial_engine.viz.drawing.style import GREEN, INK, RULE


def padding_picture(*steps: Sequence[int]) -> Picture:
    """The slots that recorded steps copy, all on one scale: a row for each of some contexts.

    Contexts of one length that stand side by side are drawn as one.
    """
    sizes = [Size.of(len(lens), max(lens)) for lens in steps]
    scale, row = 760 / max(size.longest for size in sizes), 2.2
    scene = Sheet(1000, 60 + sum(size.num_seqs * row + 36 for size in sizes))
    scene.heading("What a recorded step copies", "sizes are exact; the padding may lie at the end")
    marks = {
        "needed": lambda name, box: scene.rect(name, box, GREEN, stroke=INK),
        "copied as well": lambda name, box: scene.rect(name, box, HATCHED, stroke=RULE),
    }
    scene.legend(10, 44, marks)
    y, facts = 82.0, []
    for number, (lens, size) in enumerate(zip(steps, sizes, strict=True)):
        words = f"longest context {max(lens)}: {size.num_seqs} rows of {size.longest:,} slots"
        scene.text(f"{number}.size", 10, y - 6, words, 12.5, **BOLD)
        box = (10, y, size.longest * scale, size.num_seqs * row)
        scene.rect(f"{number}.copied", box, HATCHED, stroke=INK)
        at = y
        for i, (length, same) in enumerate(groupby(lens)):
            high = len([*same]) * row
            scene.rect(f"{number}.needed.{i}", (10, at, length * scale, high), GREEN, **DEAF)
            at += high
        y += size.num_seqs * row + 36
        used = sum(lens) / size.num_slots
        facts.append(
            f"longest context {max(lens)}: {sum(lens):,} of {size.num_slots:,} copied slots are "
            f"needed, {used:.0%}"
        )
    return scene.picture("; ".join(facts).capitalize() + ".", zoom=1.0)
