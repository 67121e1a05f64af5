"""A radix tree of a few texts, and what blocks would find of it.

Knows token ids and their labels; knows no engine.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.parts import BOLD, MARGIN, WIDTH, Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Look, cut_to, look
from tutorial_engine.viz.style import INK, QUIET
from tutorial_engine.viz.words import counted

TALL, APART = 26.0, 40.0  # of a token; from branch to branch
LEFT, FORK = 36.0, 44.0  # where the tree begins; where it parts
MAX_TOKENS, MAX_TEXTS = 24, 4  # side by side; of a picture


def num_common(texts: Sequence[Sequence[int]]) -> int:
    """With how many equal tokens all of them begin."""
    columns = zip(*texts, strict=False)
    return next((i for i, column in enumerate(columns) if len({*column}) > 1), min(map(len, texts)))


def radix_tree(
    texts: Sequence[Sequence[int]], labels: Mapping[int, str], block_size: int
) -> Picture:
    """The common beginning of the texts as one branch, and the rest of each as another.

    Below the beginning: the full blocks in it. ValueError for texts that share nothing, and for
    more than can be drawn.
    """
    common = num_common(texts)
    longest = max(map(len, texts))
    if not common or longest > MAX_TOKENS or not 2 <= len(texts) <= MAX_TEXTS:
        raise ValueError(
            f"{len(texts)} texts with {common} common tokens, {longest} in the longest: this "
            f"picture has room for 2 to {MAX_TEXTS} texts of 1 to {MAX_TOKENS} tokens"
        )
    sheet = Sheet(WIDTH, 70 + APART * len(texts))
    sheet.heading(
        "A radix tree: what is common is there once", f"full blocks of {block_size} below"
    )
    wide = (WIDTH - MARGIN - LEFT - FORK) / MAX_TOKENS
    y = 46 + APART * (len(texts) - 1) / 2
    sheet.text("root", MARGIN, y + 18, "●", 13)
    _branch(sheet, "common", LEFT, y, wide, texts[0][:common], labels, look(2))
    in_blocks = common // block_size * block_size
    for i in range(0, in_blocks, block_size):
        box = (LEFT + i * wide, y + TALL + 6, block_size * wide - 5, 16.0)
        sheet.rect(f"block.{i}", box, "none", stroke=QUIET)
        sheet.inside(f"block.{i}.label", box, f"block {i // block_size}", 10.5, fill=QUIET)
    if common > in_blocks:
        sheet.note("rest", LEFT + in_blocks * wide, y + TALL + 18, "in no full block")
    end = LEFT + common * wide
    for i, text in enumerate(texts):
        top = 46 + APART * i
        line = f"{end - 2:.0f},{y + 13:.0f} {end + 8:.0f},{y + 13:.0f} {end + 8:.0f},{top + 13:.0f}"
        points = f"{line} {end + 16:.0f},{top + 13:.0f}"
        sheet.add(f"fork.{i}", "polyline", points=points, fill="none", stroke=INK)
        sheet.text(f"text.{i}.name", end + 20, top + 18, "ABCD"[i], 13, **BOLD)
        _branch(sheet, f"text.{i}", end + FORK - 8, top, wide, text[common:], labels, look(i))
    return sheet.picture(
        f"{counted(len(texts), 'text')} have {counted(common, 'common token')}: the tree finds "
        f"{common} of them, and full blocks of {block_size} find {in_blocks}.",
        zoom=1.0,
    )


def _branch(
    sheet: Sheet,
    name: str,
    x: float,
    y: float,
    wide: float,
    ids: Sequence[int],
    labels: Mapping[int, str],
    one: Look,
) -> None:
    """Tokens side by side, in a look."""
    for i, token in enumerate(ids):
        box = (x + i * wide, y, wide - 3, TALL)
        sheet.cell(f"{name}.{i}", box, "cached", one)
        sheet.inside(f"{name}.{i}.label", box, cut_to(labels[token], wide - 5, 10.5), 10.5)
