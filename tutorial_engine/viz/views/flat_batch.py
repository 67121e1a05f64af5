"""One step as the model sees it: a batch in, Picture out.

Flat tokens with their positions and slots, and who may look at whom. Row = query, column = key.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, KEY, RIGHT, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Look, chip, look, patch
from tutorial_engine.viz.drawing.scene import HATCHED
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.words import counted, tokens

WIDE = 1000.0
MOST_ROWS, MOST_COLUMNS = 64, 128  # that can still be told apart
TOP = 118.0  # of the mask; above it are the names of its columns


class _Block(NamedTuple):
    """One sequence's part of the mask: its first row and column in the whole, and who sees whom."""

    name: str
    look: Look
    row: int
    column: int
    mask: Tensor  # bool [queries, keys]

    @property
    def history(self) -> int:
        """Keys that were in the cache before."""
        return self.mask.shape[1] - self.mask.shape[0]


def flat_batch(
    batch: Batch,
    names: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> Picture:
    """The flat tokens of a batch, and its block-diagonal causal mask.

    `names` of its sequences, `labels` of its tokens (else their ids). ValueError where the counts
    do not fit, and for more than 64 tokens or 128 keys.
    """
    names = [chr(65 + s) for s in range(batch.num_seqs)] if names is None else list(names)
    labels = [str(i) for i in batch.input_ids.tolist()] if labels is None else list(labels)
    counts = (len(names), len(labels))
    if counts != (batch.num_seqs, batch.num_tokens):
        raise ValueError(
            f"{batch.num_seqs} sequences with {batch.num_tokens} tokens need as many names and "
            f"labels, got {counts}"
        )
    blocks = _blocks(batch, names, [look(s) for s in range(batch.num_seqs)])
    keys = sum(block.mask.shape[1] for block in blocks)
    if batch.num_tokens > MOST_ROWS or keys > MOST_COLUMNS:
        raise ValueError(
            f"{batch.num_tokens} tokens that see {keys} are too many to be seen: draw a step with "
            f"at most {MOST_ROWS} tokens and {MOST_COLUMNS} keys"
        )
    scene = Sheet(WIDE, 0)
    scene.heading("One step as the model sees it", size=16)
    scene.note("axes", 10, 42, "row = query, a token of the step; column = key", 11.5)
    high = max(14.0, min(24.0, 640 / batch.num_tokens))
    left = _table(scene, batch, blocks, labels, high)
    wide = min(24.0, (WIDE - left - 16) / keys)
    low = TOP + high * batch.num_tokens
    scene.rect("mask", (left, TOP, wide * keys, low - TOP), PAPER, stroke=QUIET)
    scene.note("key", left - 8, low + 14, "key’s pos", KEY, **RIGHT)
    for s, block in enumerate(blocks):
        _mask(
            scene, s, block, (left + wide * block.column, TOP + high * block.row), wide, high, low
        )
    _between(scene, blocks, (left, TOP, wide * keys, low - TOP), wide, high)
    _legend(scene, 10, low + 44, any(block.history for block in blocks))
    scene.width, scene.height = max(720.0, left + wide * keys + 16), low + 60
    return scene.picture(_caption(batch, blocks, keys))


def _blocks(batch: Batch, names: Sequence[str], looks: Sequence[Look]) -> list[_Block]:
    """The mask of each sequence, and where it lies."""
    if batch.context_slots:  # what attention will read, whatever the positions say
        ends = [s.stop - s.start if isinstance(s, slice) else len(s) for s in batch.context_slots]
    else:
        ends = [int(batch.positions[i]) + 1 for i in batch.last_token_indices]
    columns = [0, *accumulate(ends)]
    masks = [causal_mask(*pair) for pair in zip(batch.query_lens, ends, strict=True)]
    parts = zip(names, looks, batch.query_start_loc, columns, masks, strict=False)
    return [_Block(*fields) for fields in parts]


def _table(
    scene: Sheet, batch: Batch, blocks: Sequence[_Block], labels: Sequence[str], high: float
) -> float:
    """The flat tokens, one below the other → where the mask may begin."""
    size = min(12.0, high - 3)
    shown = [cut_to(block.name, 110, 13, True) for block in blocks]
    x = 44 + max(text_width(name, 13, True) for name in shown)
    cells = [cut_to(label, 90, size) for label in labels]
    wide = max(44.0, 14 + max(text_width(cell, size) for cell in cells))
    columns = {"token": (x + wide / 2, cells), "pos": (x + wide + 24, batch.positions.tolist())}
    if batch.slot_mapping is not None:
        columns["slot"] = (x + wide + 62, batch.slot_mapping.tolist())
    for head, (at, _) in columns.items():
        scene.note(f"head.{head}", at, TOP - 8, head, 11.5, **CENTRE)
    for s, block in enumerate(blocks):
        count = block.mask.shape[0]
        chip(scene, f"who.{s}", 10, TOP + high * (block.row + count / 2), shown[s], block.look)
        for i in range(block.row, block.row + count):
            y = TOP + high * i
            slot = f", slot {columns['slot'][1][i]}" if "slot" in columns else ""
            tip = f"token {i} of the batch: {block.name}, position {columns['pos'][1][i]}{slot}"
            edge: Style = {"stroke": block.look.colour, "rx": 2}
            scene.rect(f"token.{i}", (x, y + 0.5, wide, high - 1), block.look.light, tip, **edge)
            for head, (at, values) in columns.items():
                ink = QUIET if head == "slot" else INK
                box = (at, y, 0.0, high)
                scene.inside(f"{head}.{i}.word", box, str(values[i]), size, fill=ink)
    return max(at for at, _ in columns.values()) + 42


def _mask(
    scene: Sheet,
    s: int,
    block: _Block,
    at: tuple[float, float],
    wide: float,
    high: float,
    low: float,
) -> None:
    """One sequence's block of the mask, its keys named above and numbered below, at `low`."""
    (x, y), (q_len, kv_len), colours = at, block.mask.shape, block.look
    patch(scene, f"keys.{s}", (x + 1, TOP - 46, wide * kv_len - 2, 7), colours)
    shown = cut_to(block.name, wide * kv_len + 4, 12, True) if wide * kv_len > 12 else ""
    scene.text(f"keys.{s}.name", x + wide * kv_len / 2, TOP - 52, shown, 12, **BOLD, **CENTRE)
    for what, first, count in (("cached", 0, block.history), ("new", block.history, q_len)):
        start, end, name = x + wide * first, x + wide * (first + count), f"keys.{s}.{what}"
        if count:
            line: Style = {"x1": start + 2, "x2": end - 2, "y1": TOP - 7, "y2": TOP - 7}
            scene.add(f"{name}.line", "line", **line, stroke=QUIET, stroke_width=1.2)
        words = [w for w in (f"{count} {what}", str(count)) if text_width(w, KEY) < end - start]
        if count and words:
            scene.note(name, (start + end) / 2, TOP - 14, words[0], KEY, **CENTRE)
    for row, line_of in enumerate(block.mask.tolist()):
        for column, allowed in enumerate(line_of):
            box = (x + wide * column, y + high * row, wide, high)
            fill, edge = HATCHED, RULE
            if allowed:
                fill = colours.light if column < block.history else colours.dark
                edge = colours.colour
            sees = "sees" if allowed else "may not see"
            tip = f"position {block.history + row} of {block.name} {sees} position {column}"
            scene.rect(f"cell.{s}.{row}.{column}", box, fill, tip, stroke=edge, stroke_width=0.6)
    roomy = text_width("00", 10) + 2 <= wide
    for column in range(kv_len):
        if roomy or (column % 5 == 0 and wide >= 5 and wide * (kv_len - column) >= 10):
            place = (x + wide * (column + 0.5), low + 14)
            scene.note(f"key.{s}.{column}", *place, str(column), 10, **CENTRE)
    whole = (x, y, wide * kv_len, high * q_len)
    scene.outline(f"block.{s}", whole, stroke_width=1.6)


def _between(
    scene: Sheet,
    blocks: Sequence[_Block],
    frame: tuple[float, float, float, float],
    wide: float,
    high: float,
) -> None:
    """Say in the largest empty corner that nothing is computed there."""
    x, y, w, h = frame
    corners = []
    for block in blocks[1:]:
        across, down = wide * block.column, high * block.row
        corners += [(x + across, y, w - across, down), (x, y + down, across, h - down)]
    words = "never computed"
    fits = [box for box in corners if box[2] >= text_width(words, 12) + 8 and box[3] >= 16]
    if fits:
        left, top, across, down = max(fits, key=lambda box: min(box[2] / 3, box[3]))
        scene.note("never", left + across / 2, top + down / 2 + 4, words, 12, **CENTRE)


def _legend(scene: Sheet, x: float, y: float, has_history: bool) -> None:
    fills = {"sees a token of this step": "#8f9aa3"}
    if has_history:
        fills["sees a token in the cache"] = "#dfe3e7"
    fills |= {"masked: the future": HATCHED, "other requests: never computed": PAPER}
    edge: Style = {"stroke": QUIET, "stroke_width": 0.8}
    marks = {
        words: lambda name, box, fill=fill: scene.rect(name, box, fill, **edge)
        for words, fill in fills.items()
    }
    scene.legend(x, y, marks, 14, 14)


def _caption(batch: Batch, blocks: Sequence[_Block], keys: int) -> str:
    whole = batch.num_tokens * keys
    allowed = sum(int(block.mask.sum()) for block in blocks)
    between = whole - sum(block.mask.numel() for block in blocks)
    who = counted(batch.num_seqs, "request")
    return (
        f"{tokens(batch.num_tokens)} of {who} run in one forward and see {tokens(keys)}: of "
        f"{whole} query-key pairs {allowed} are allowed, {whole - between - allowed} are masked, "
        f"and {between} ({100 * between / whole:.0f} %) lie between different requests and are "
        "never computed."
    )
