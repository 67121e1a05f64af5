"""Introduced in notebook 03. One step as the model sees it: a batch in, Picture out.

Flat tokens with their positions and slots, and who may look at whom. Row = query, column = key.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.viz.cache_steps import tokens
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Look, chip, cut_to, look, patch, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, QUIET, RULE

WIDE = 1000.0
MOST_ROWS, MOST_COLUMNS = 64, 128  # that can still be told apart
TOP = 118.0  # of the mask; above it are the names of its columns


class _Block(NamedTuple):
    """One sequence's part of the mask: its rows and columns in the whole, and who may see whom."""

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
    looks: Sequence[int] | None = None,
) -> Picture:
    """The flat tokens of a batch, and its block-diagonal causal mask.

    `names` of its sequences, `labels` of its tokens (else their ids); `looks[s]` is the place of
    sequence s among all requests, so that it keeps the colour it has elsewhere. ValueError where
    the counts do not fit, and for more than 64 tokens or 128 keys.
    """
    names = [chr(65 + s) for s in range(batch.num_seqs)] if names is None else list(names)
    labels = [str(i) for i in batch.input_ids.tolist()] if labels is None else list(labels)
    order = list(range(batch.num_seqs)) if looks is None else list(looks)
    counts = (len(names), len(order), len(labels))
    if counts != (batch.num_seqs, batch.num_seqs, batch.num_tokens):
        raise ValueError(
            f"{batch.num_seqs} sequences with {batch.num_tokens} tokens need as many names, looks "
            f"and labels, got {counts}"
        )
    blocks = _blocks(batch)
    keys = sum(block.mask.shape[1] for block in blocks)
    if batch.num_tokens > MOST_ROWS or keys > MOST_COLUMNS:
        raise ValueError(
            f"{batch.num_tokens} tokens that see {keys} are too many to be seen: draw a step with "
            f"at most {MOST_ROWS} tokens and {MOST_COLUMNS} keys"
        )
    seen = [look(i) for i in order]
    scene = Scene(WIDE, 0)
    scene.text("title", 10, 22, "One step as the model sees it", 16, font_weight="bold")
    scene.text("axes", 10, 42, "row = query, a token of the step; column = key", 11.5, fill=QUIET)
    high = max(14.0, min(24.0, 640 / batch.num_tokens))
    left = _table(scene, batch, names, labels, seen, high)
    wide = min(24.0, (WIDE - left - 16) / keys)
    _mask(scene, blocks, names, seen, left, (wide, high), batch.num_tokens, keys)
    scene.width = max(720.0, left + wide * keys + 16)
    low = TOP + high * batch.num_tokens
    _legend(scene, 10, low + 44, any(block.history for block in blocks))
    scene.height = low + 60
    return scene.picture(_caption(batch, blocks, keys))


def _blocks(batch: Batch) -> list[_Block]:
    """The mask of each sequence, and where it lies."""
    if batch.context_slots:  # what attention will read, whatever the positions say
        ends = [s.stop - s.start if isinstance(s, slice) else len(s) for s in batch.context_slots]
    else:
        ends = [int(batch.positions[i]) + 1 for i in batch.last_token_indices]
    columns = [0, *accumulate(ends)]
    pairs = zip(batch.query_lens, ends, strict=True)
    masks = [causal_mask(q_len, kv_len) for q_len, kv_len in pairs]
    places = zip(batch.seq_starts, columns, masks, strict=False)
    return [_Block(row, column, mask) for row, column, mask in places]


def _table(
    scene: Scene,
    batch: Batch,
    names: Sequence[str],
    labels: Sequence[str],
    seen: Sequence[Look],
    high: float,
) -> float:
    """The flat tokens, one below the other → where the mask may begin."""
    size = min(12.0, high - 3)
    shown = [cut_to(name, 110, 13, True) for name in names]
    x = 44 + max(text_width(name, 13, True) for name in shown)
    cells = [cut_to(label, 90, size) for label in labels]
    wide = max(44.0, 14 + max(text_width(cell, size) for cell in cells))
    slots = None if batch.slot_mapping is None else batch.slot_mapping.tolist()
    positions = batch.positions.tolist()
    heads = [("token", x + wide / 2), ("pos", x + wide + 24)]
    if slots is not None:
        heads.append(("slot", x + wide + 62))
    for words, at in heads:
        scene.text(f"head.{words}", at, TOP - 8, words, 11.5, fill=QUIET, text_anchor="middle")
    for s, name in enumerate(shown):
        middle = TOP + high * (batch.seq_starts[s] + batch.seq_starts[s + 1]) / 2
        chip(scene, f"who.{s}", 10, middle, name, seen[s])
    for s in range(batch.num_seqs):
        for i in range(batch.seq_starts[s], batch.seq_starts[s + 1]):
            y = TOP + high * i
            box = (x, y + 0.5, wide, high - 1)
            slot = "" if slots is None else f", slot {slots[i]}"
            tip = f"token {i} of the batch: {names[s]}, position {positions[i]}{slot}"
            scene.rect(f"token.{i}", box, seen[s].light, tip, stroke=seen[s].colour, rx=2)
            numbers = [(cells[i], INK), (str(positions[i]), INK)]
            numbers += [] if slots is None else [(str(slots[i]), QUIET)]
            for (words, fill), (head, at) in zip(numbers, heads, strict=True):
                scene.text(
                    f"{head}.{i}.word", at, y + high / 2 + 0.36 * size, words, size,
                    fill=fill, text_anchor="middle", pointer_events="none",
                )  # fmt: skip
    return heads[-1][1] + 42


def _mask(
    scene: Scene,
    blocks: Sequence[_Block],
    names: Sequence[str],
    seen: Sequence[Look],
    left: float,
    cell: tuple[float, float],
    num_rows: int,
    num_columns: int,
) -> None:
    """The whole mask: a block for each sequence, and nothing but paper between them."""
    wide, high = cell
    frame = (left, TOP, wide * num_columns, high * num_rows)
    scene.rect("mask", frame, "#ffffff", stroke=QUIET)
    low = TOP + high * num_rows + 14
    scene.text("key", left - 8, low, "key’s pos", 11, fill=QUIET, text_anchor="end")
    for s, block in enumerate(blocks):
        x, y = left + wide * block.column, TOP + high * block.row
        q_len, kv_len = block.mask.shape
        _column_names(scene, s, names[s], seen[s], block, (x, wide))
        for (row, column), allowed in _cells(block.mask):
            box = (x + wide * column, y + high * row, wide, high)
            fill = HATCHED
            if allowed:
                fill = seen[s].light if column < block.history else seen[s].dark
            edge: dict[str, Any] = {
                "stroke": seen[s].colour if allowed else RULE,
                "stroke_width": 0.6,
            }
            where = f"position {block.history + row} of {names[s]}"
            tip = f"{where} {'sees' if allowed else 'may not see'} position {column}"
            scene.rect(f"cell.{s}.{row}.{column}", box, fill, tip, **edge)
        for column in range(kv_len):
            at = (x + wide * (column + 0.5), TOP + high * num_rows + 14)
            roomy = text_width("00", 10) + 2 <= wide
            if roomy or (column % 5 == 0 and wide >= 5 and wide * (kv_len - column) >= 10):
                words = str(column)
                scene.text(f"key.{s}.{column}", *at, words, 10, fill=QUIET, text_anchor="middle")
        box = (x, y, wide * kv_len, high * q_len)
        scene.rect(f"block.{s}", box, "none", stroke=INK, stroke_width=1.6, pointer_events="none")
    if len(blocks) > 1:
        _between(scene, blocks, left, cell, num_columns)


def _cells(mask: Tensor) -> list[tuple[tuple[int, int], bool]]:
    values = mask.tolist()
    return [((r, c), allowed) for r, line in enumerate(values) for c, allowed in enumerate(line)]


def _column_names(
    scene: Scene, s: int, name: str, one: Look, block: _Block, place: tuple[float, float]
) -> None:
    """Above a block: whose keys these are, and which were in the cache already."""
    x, wide = place
    q_len, kv_len = block.mask.shape
    whole = wide * kv_len
    patch(scene, f"keys.{s}", (x + 1, TOP - 46, whole - 2, 7), one)
    shown = cut_to(name, whole + 4, 12, True) if whole > 12 else ""
    scene.text(
        f"keys.{s}.name", x + whole / 2, TOP - 52, shown, 12,
        font_weight="bold", text_anchor="middle",
    )  # fmt: skip
    parts = [("cached", 0, block.history), ("new", block.history, q_len)]
    for words, first, count in parts:
        at, span = x + wide * (first + count / 2), wide * count
        if not count:
            continue
        scene.add(
            f"keys.{s}.{words}.line", "line", x1=at - span / 2 + 2, x2=at + span / 2 - 2,
            y1=TOP - 7, y2=TOP - 7, stroke=QUIET, stroke_width=1.2,
        )  # fmt: skip
        fits = [w for w in (f"{count} {words}", str(count)) if text_width(w, 11) <= span - 1]
        if fits:
            scene.text(
                f"keys.{s}.{words}", at, TOP - 14, fits[0], 11, fill=QUIET, text_anchor="middle"
            )


def _between(
    scene: Scene,
    blocks: Sequence[_Block],
    left: float,
    cell: tuple[float, float],
    num_columns: int,
) -> None:
    """Say in the largest empty corner that nothing is computed there."""
    wide, high = cell
    words = "never computed"
    best = (0.0, 0.0, 0.0)  # area, x, y
    rows = blocks[-1].row + blocks[-1].mask.shape[0]
    for b in blocks[1:]:
        w, h = wide * (num_columns - b.column), high * b.row
        best = max(best, (min(w / 3, h), left + wide * b.column + w / 2, TOP + h / 2))
        w, h = wide * b.column, high * (rows - b.row)
        best = max(best, (min(w / 3, h), left + w / 2, TOP + high * b.row + h / 2))
    room, x, y = best
    if 3 * room >= text_width(words, 12) + 8 and room >= 16:
        scene.text("never", x, y + 4, words, 12, fill=QUIET, text_anchor="middle")


def _legend(scene: Scene, x: float, y: float, has_history: bool) -> None:
    grey = look(0)._replace(light="#dfe3e7", dark="#8f9aa3")
    entries = [(grey.dark, "sees a token of this step")]
    if has_history:
        entries.append((grey.light, "sees a token in the cache"))
    entries += [(HATCHED, "masked: the future"), ("#ffffff", "other requests: never computed")]
    for i, (fill, words) in enumerate(entries):
        scene.rect(f"legend.{i}", (x, y - 11, 14, 14), fill, stroke=QUIET, stroke_width=0.8)
        scene.text(f"legend.{i}.says", x + 19, y, words, 11)
        x += 19 + text_width(words, 11) + 14


def _caption(batch: Batch, blocks: Sequence[_Block], keys: int) -> str:
    whole = batch.num_tokens * keys
    allowed = sum(int(block.mask.sum()) for block in blocks)
    inside = sum(block.mask.numel() for block in blocks)
    who = f"{batch.num_seqs} request{'s' * (batch.num_seqs != 1)}"
    return (
        f"{tokens(batch.num_tokens)} of {who} run in one forward and see {tokens(keys)}: of "
        f"{whole} query-key pairs {allowed} are allowed, {inside - allowed} are masked, and "
        f"{whole - inside} ({100 * (whole - inside) / whole:.0f} %) lie between different requests "
        "and are never computed."
    )
