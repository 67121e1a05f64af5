"""Which query heads read which K/V head.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

import math

from tutorial_engine.model.config import ModelConfig
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.style import (
    QUIET,
    RED,
)
from tutorial_engine.viz.words import counted, listed, numbered

# -- which query head reads which K/V head --------------------------------------------------------


def gqa_picture(config: ModelConfig) -> Picture:
    """Which query heads read which K/V head, and for which of them h % H_kv would be wrong."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = config.group_size
    wrong = [h for h in range(heads) if h % kv_heads != h // group]
    sheet = Sheet(960, 260 if wrong else 184)
    sheet.heading(f"{counted(heads, 'query head')}, {counted(kv_heads, 'K/V head')}")
    top, low, left = 56.0, 136.0, 200.0
    pitch = min(92.0, (sheet.width - left - 10) / heads)
    stride = math.ceil(20 / pitch)  # of very many heads not each has its number
    for name, y, words in (("q", top, "query head h"), ("kv", low, "the K/V head that it reads")):
        sheet.text(f"{name}.row", 10, y + 21, words, 12.5, **BOLD)
    for g in range(kv_heads):
        colours, its_heads = look(g), range(g * group, (g + 1) * group)
        begin, room = left + its_heads[0] * pitch, group * pitch - 6
        box = (begin + max(0.0, room - 130) / 2, low, min(room, 130.0), 32.0)
        for h in its_heads:
            place = (left + h * pitch, top, pitch - 6, 32.0)
            ends: Style = {"x1": place[0] + place[2] / 2, "x2": box[0] + box[2] / 2}
            line: Style = {"stroke": colours.colour, "stroke_width": 2}
            sheet.add(f"line{h}", "line", y1=top + 32, y2=low, **ends, **line)
            sheet.rect(f"q{h}", place, colours.light, rx=4, stroke=colours.colour)
            if h % stride == 0:
                spot = place if pitch >= 20 else (place[0], top - 20, place[2], 16.0)
                sheet.inside(f"q{h}.name", spot, str(h), 12.5 if pitch >= 20 else 10)
        sheet.rect(f"kv{g}", box, colours.dark, rx=4, stroke=colours.colour)
        sheet.inside(f"kv{g}.name", box, str(g), 13, **BOLD)
    if wrong:
        _formulas(sheet, config, left - 3, pitch)
    reads = [
        f"K/V head {g} is read by {numbered(range(g * group, (g + 1) * group), 'query head')}"
        for g in sorted({0, kv_heads - 1})  # the first and the last
    ]
    caption = (
        f"Query head h reads K/V head h // {group}: {listed(reads)}; so there are "
        f"{counted(kv_heads, 'head')} of keys and values instead of {heads}"
    )
    if wrong:
        caption += (
            f"; h % {kv_heads} fits every shape too, but {len(wrong)} of {heads} query heads would "
            "read the wrong K/V head"
        )
    return sheet.picture(caption + ".")


def _formulas(sheet: Sheet, config: ModelConfig, left: float, pitch: float) -> None:
    """Two formulas and what each gives for every query head; what is wrong is crossed."""
    group, kv_heads = config.group_size, config.num_key_value_heads
    y = 208.0
    sheet.text("right", 10, y, f"h // {group}   (right)", 12.5)
    sheet.text("modulo", 10, y + 32, f"h % {kv_heads}   (wrong where ✗)", 12.5)
    roomy = pitch >= 34
    size = 12.5 if roomy else 10
    for h in range(0, config.num_attention_heads, math.ceil(20 / pitch)):
        x, ours, theirs = left + (h + 0.5) * pitch, h // group, h % kv_heads
        sheet.text(f"right{h}", x, y, str(ours), size, **CENTRE)
        ink: Style = {"fill": QUIET} if ours == theirs else {"fill": RED, **BOLD}
        cross = f"{theirs} ✗" if roomy else "✗"
        words = str(theirs) if ours == theirs else cross
        sheet.text(f"modulo{h}", x, y + 32, words, size, **CENTRE, **ink)
