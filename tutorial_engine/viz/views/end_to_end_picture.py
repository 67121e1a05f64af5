"""Sequences in blocks of a pool, and their slots end to end.

Drawn from block tables and lengths.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, DEAF, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.style import INK
from tutorial_engine.viz.words import listed


def end_to_end_picture(
    tables: Sequence[Sequence[int]], lens: Sequence[int], block_size: int
) -> Picture:
    """A few sequences in blocks of a pool; below, their slots end to end, and `cu_seqlens`."""
    num_blocks = max(block for table in tables for block in table) + 1
    wide = min(34.0, 960 / (num_blocks * block_size), 960 / (sum(lens) + 1))
    scene = Sheet(1000, 216)
    scene.heading("From blocks to one list")
    scene.note("pool", 10, 52, f"the pool: blocks of {block_size}; a number is a position")
    slots = [
        (table[p // block_size] * block_size + p % block_size, s, p)
        for s, (table, length) in enumerate(zip(tables, lens, strict=True))
        for p in range(length)
    ]
    held = {slot: (s, p) for slot, s, p in slots}
    for slot in range(num_blocks * block_size):
        x = 10 + slot * wide + slot // block_size * 6
        box = (x, 76, wide - 2, 26)
        s, p = held.get(slot, (0, ""))
        state = "solid" if slot in held else "free"
        scene.cell(f"pool.{slot}", box, state, look(s), "", str(p), 12)
        if slot % block_size == 0:
            scene.note(f"block.{slot}", x, 71, f"block {slot // block_size}")
    scene.note("gathered", 10, 134, "end to end: a number is a slot")
    for i, (slot, s, _) in enumerate(slots):
        box = (10 + i * wide, 142, wide - 2, 26)
        scene.cell(f"list.{i}", box, "solid", look(s), "", str(slot), 12)
    ends = [sum(lens[:n]) for n in range(len(lens) + 1)]
    for n, end in enumerate(ends):
        x = 9 + end * wide
        scene.add(f"end.{n}", "path", d=f"M{x:.1f} 138V182", stroke=INK, stroke_width=1.6, **DEAF)
        scene.text(f"end.{n}.words", x, 197, str(end), 12, **(BOLD | CENTRE))
    scene.text("ends", 24 + ends[-1] * wide, 197, "cu_seqlens", 12, **BOLD)
    caption = (
        f"{len(lens)} sequences of {listed(map(str, lens))} tokens lie end to end in one list of "
        f"{ends[-1]} slots, and cu_seqlens is {', '.join(map(str, ends))}."
    )
    return scene.picture(caption, zoom=1.0)
