"""A radix tree of a few texts, and what blocks would find of it.

Knows token ids and their labels; knows no engine.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, WIDTH, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Look, look
from tutorial_engine.viz.drawing.style import INK, QUIET
from tutorial_engine.viz.words import counted, listed

TALL, APART = 26.0, 40.0  # of a token; from branch to branch
LEFT, FORK = 36.0, 44.0  # where the tree begins; where it parts
MAX_TOKENS, MAX_TEXTS = 24, 3  # side by side; of a picture
NAMES, SHARED = "ABC", 3  # of texts; the look of what several have


def num_common(texts: Sequence[Sequence[int]]) -> int:
    """With how many equal tokens all of them begin."""
    columns = zip(*texts, strict=False)
    return next((i for i, column in enumerate(columns) if len({*column}) > 1), min(map(len, texts)))


def radix_tree(
    texts: Sequence[Sequence[int]], labels: Mapping[int, str], block_size: int
) -> Picture:
    """The common beginning of the texts as one branch, and what follows as others, each once.

    Below the beginning: the full blocks in it. Texts that go on alike must stand side by side.
    ValueError for texts that share nothing, and for more than can be drawn.
    """
    common = num_common(texts)
    longest = max(map(len, texts))
    if not common or longest > MAX_TOKENS or not 2 <= len(texts) <= MAX_TEXTS:
        room = (
            "{texts} texts with {common} common tokens, {longest} in the longest: this picture has "
            "room for 2 to {most} texts of 1 to {long} tokens"
        )
        limits = {"most": MAX_TEXTS, "long": MAX_TOKENS}
        raise ValueError(room.format(texts=len(texts), common=common, longest=longest, **limits))
    sheet = Sheet(WIDTH, 70 + APART * len(texts))
    below = f"full blocks of {block_size} below"
    sheet.heading("A radix tree: what is common is there once", below)
    wide = (WIDTH - MARGIN - LEFT - FORK * _num_forks(texts)) / MAX_TOKENS
    y = _middle(range(len(texts)))
    sheet.text("root", MARGIN, y + 18, "●", 13)
    _branch(sheet, "common", LEFT, y, wide, texts[0][:common], labels, look(SHARED))
    in_blocks = common // block_size * block_size
    for i in range(0, in_blocks, block_size):
        box = (LEFT + i * wide, y + TALL + 6, block_size * wide - 5, 16.0)
        sheet.rect(f"block.{i}", box, "none", stroke=QUIET)
        label = f"block {i // block_size}"
        sheet.inside(f"block.{i}.label", box, label, 10.5, fill=QUIET)
    if common > in_blocks:
        sheet.note("rest", LEFT + in_blocks * wide, y + TALL + 18, "in no full block")
    _forks(sheet, texts, range(len(texts)), common, LEFT + common * wide, wide, labels)
    closest = max(_groups(texts, range(len(texts)), common), key=len)
    both = counted(len(texts), "text"), counted(common, "common token")
    caption = f"{both[0]} have {both[1]}"
    if len(closest) > 1:
        common = num_common([texts[i] for i in closest])
        names = listed(NAMES[i] for i in closest)
        caption = f"{caption}, and {names} have {common}"
        in_blocks = common // block_size * block_size
    caption = (
        f"{caption}: the tree finds all {common}, and full blocks of {block_size} find {in_blocks}."
    )
    return sheet.picture(caption, zoom=1.0)


def _groups(texts: Sequence[Sequence[int]], rows: Sequence[int], begin: int) -> list[list[int]]:
    """The rows that go on with the same token after so many; a text that ends is alone."""
    ended = [[row] for row in rows if len(texts[row]) == begin]
    alike: dict[int, list[int]] = {}
    for row in rows:
        if len(texts[row]) > begin:
            alike.setdefault(texts[row][begin], []).append(row)
    return sorted([*alike.values(), *ended])


def _num_forks(texts: Sequence[Sequence[int]]) -> int:
    """The most forks from the root to the end of a text."""
    groups = _groups(texts, range(len(texts)), num_common(texts))
    inner = [_num_forks([texts[i] for i in group]) for group in groups if len(group) > 1]
    return 1 + max(inner, default=0)


def _middle(rows: Sequence[int]) -> float:
    return 46 + APART * (rows[0] + rows[-1]) / 2


def _forks(
    sheet: Sheet,
    texts: Sequence[Sequence[int]],
    rows: Sequence[int],
    begin: int,
    end: float,
    wide: float,
    labels: Mapping[int, str],
) -> None:
    """What follows in these rows, whose first `begin` tokens are equal and end at x."""
    y = _middle(rows)
    for group in _groups(texts, rows, begin):
        top, i = _middle(group), group[0]
        line = f"{end - 2:.0f},{y + 13:.0f} {end + 8:.0f},{y + 13:.0f} {end + 8:.0f},{top + 13:.0f}"
        points = f"{line} {end + 16:.0f},{top + 13:.0f}"
        name = f"{i}" + f".{begin}" * (len(group) > 1)
        sheet.add(f"fork.{name}", "polyline", points=points, fill="none", stroke=INK)
        start, colours = end + FORK - 8, look(i)
        if len(group) == 1:
            sheet.text(f"text.{i}.name", end + 20, top + 18, NAMES[i], 13, **BOLD)
            _branch(sheet, f"text.{i}", start, top, wide, texts[i][begin:], labels, colours)
            continue
        start -= 20  # it has no name
        both = num_common([texts[row] for row in group])
        _branch(sheet, f"text.{name}", start, top, wide, texts[i][begin:both], labels, look(SHARED))
        _forks(sheet, texts, group, both, start + (both - begin) * wide, wide, labels)


def _branch(
    sheet: Sheet,
    name: str,
    x: float,
    y: float,
    wide: float,
    ids: Sequence[int],
    labels: Mapping[int, str],
    look: Look,
) -> None:
    """Tokens side by side, in a look."""
    for i, token in enumerate(ids):
        box = (x + i * wide, y, wide - 3, TALL)
        sheet.cell(f"{name}.{i}", box, "cached", look, "", labels[token], 10.5)
