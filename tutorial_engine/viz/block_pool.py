"""Introduced in notebook 04. Right in the picture of pages: the physical blocks.

A function of a run and a step; a block stays in its place from step to step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutorial_engine.trace.events import BlockCopied
from tutorial_engine.viz.block_facts import DIGITS, BlockRun, Owner
from tutorial_engine.viz.block_panels import BOLD, DEAF, FAINT, POOL, RIGHT, THICK, WIDTH, said
from tutorial_engine.viz.request_look import Box, Look, cut_to, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, PAPER, RULE

GUTTER, SLOT, TEXT = 16.0, 20.0, 12.5  # between blocks; heights of a line of slots, of words
TOUCHED = "#fdf1cf"
Looks = Mapping[str, Look]


@dataclass(frozen=True)
class Shelf:
    """How the physical blocks are laid out: how many, of how many slots, from what height."""

    num_blocks: int
    size: int
    top: float

    @property
    def columns(self) -> int:
        """Blocks in a line."""
        if self.num_blocks <= 16 and self.num_blocks % 5:
            return 4
        return 5 if self.num_blocks <= 20 else 6 if self.num_blocks <= 40 else 8

    @property
    def wide(self) -> float:
        """Pixels of a block."""
        return (WIDTH - POOL) / self.columns - GUTTER

    @property
    def in_line(self) -> int:
        """Slots side by side."""
        return self.size if self.size <= 6 else -(-self.size // 2)

    @property
    def tall(self) -> float:
        """Pixels of a block with its words."""
        return 18 + SLOT * -(-self.size // self.in_line) + 3 * TEXT + 3

    @property
    def bottom(self) -> float:
        """Where the pool ends."""
        return self.top + -(-self.num_blocks // self.columns) * (self.tall + GUTTER - 6)

    def corner(self, block: int) -> tuple[float, float]:
        """Where a block is drawn."""
        row, column = divmod(block, self.columns)
        return POOL + column * (self.wide + GUTTER), self.top + row * (self.tall + GUTTER - 6)

    def slot(self, block: int, offset: int) -> Box:
        """Where a slot is drawn."""
        (x, y), (row, column) = self.corner(block), divmod(offset, self.in_line)
        wide = min(self.wide / self.in_line, 30.0)
        return x + column * wide, y + 18 + SLOT * row, wide - 1.5, SLOT - 2


def draw_pool(scene: Scene, run: BlockRun, looks: Looks, step: int, shelf: Shelf) -> None:
    """Every physical block: number, holders, slots, hash, and what the step did to it."""
    owners = run.owners(step)
    for block in range(run.num_blocks):
        _block(scene, run, looks, step, block, owners.get(block, []), shelf)
    _draw_copies(scene, run.steps[step].copies, looks, shelf)


def _block(
    scene: Scene,
    run: BlockRun,
    looks: Looks,
    step: int,
    block: int,
    own: Sequence[Owner],
    shelf: Shelf,
) -> None:
    now, (x, y), wide = run.steps[step], shelf.corner(block), shelf.wide
    touched, hash_ = now.touched.get(block, ()), now.hashes.get(block)
    card, tip = (x - 5, y - 1, wide + 10, shelf.tall), said(run.about_block(step, block))
    scene.rect(f"block.{block}", card, TOUCHED if touched else PAPER, tip, rx=4)
    scene.text(f"number.{block}", x, y + 13, str(block), 12, **BOLD, **DEAF)
    many = f"ref {len(own)}" if own else "next" if now.free[0] == block else ""
    if many:
        style = {**(BOLD if len(own) > 1 else FAINT), **RIGHT, **DEAF}
        scene.text(f"ref.{block}", x + wide, y + 13, many, 10.5, **style)
    for offset in range(run.block_size):
        _slot(scene, run, looks, step, block, offset, own, shelf)
    base = y + shelf.tall - 2 * TEXT - 5
    at = x
    for i, owner in enumerate(own):
        words = owner.name + "," * (i < len(own) - 1)
        if at + text_width(words, 11, bold=True) > x + wide + 4:
            scene.text(f"who.{block}.{i}", at, base, "…", 11, **BOLD, **DEAF)
            break
        style = {"fill": looks[owner.name].colour, **BOLD, **DEAF}
        scene.text(f"who.{block}.{i}", at, base, words, 11, **style)
        at += text_width(words, 11, bold=True) + 4
    for i, (words, style) in enumerate(_words(run, own, hash_, touched, wide + 4)):
        if words:
            scene.text(f"words.{block}.{i}", x, base + TEXT * i, words, 10, **style, **DEAF)


def _words(
    run: BlockRun, own: Sequence[Owner], hash_: str | None, touched: Sequence[str], width: float
) -> list[tuple[str, dict[str, Any]]]:
    """Three lines below a block; the first is empty where its holders stand there."""
    first = "" if own else "free"
    if hash_ is None:
        filled = max((owner.filled for owner in own), default=0)
        full = "not findable" if run.prefix_caching else "full"
        second = f"open, {filled}/{run.block_size}" if filled < run.block_size else full
        second = second if own else ""
    else:
        first = first and _fitting(["free, still findable", "findable"], width)
        chain = f"{hash_[:DIGITS]} ← {(run.hashed[hash_].parent or 'root')[:DIGITS]}"
        second = _fitting([chain, hash_[:DIGITS]], width)
    third = _fitting(_shortened(touched), width, True)
    return [(first, FAINT), (second, FAINT), (third, BOLD)]


def _shortened(touched: Sequence[str]) -> list[str]:
    """What happened to a block, in fewer and fewer words; what matters most stays longest."""
    ranks = ("evicted", "copy", "copied", "left", "found", "shared", "taken", "cached")
    told = sorted(
        touched, key=lambda words: min(ranks.index(w) for w in words.split() if w in ranks)
    )
    some = [", ".join(told[:many]) for many in range(len(told), 0, -1)]
    first = told[0].split() if told else [""]
    return [*some, "evicted" if "evicted" in first else first[0]]


def _fitting(choices: Sequence[str], width: float, bold: bool = False) -> str:
    """The first of these that fits; the last of them, cut, where none does."""
    for words in choices:
        if text_width(words, 10, bold) <= width:
            return words
    return cut_to(choices[-1], width, 10, bold, keep=True)


def _slot(
    scene: Scene,
    run: BlockRun,
    looks: Looks,
    step: int,
    block: int,
    offset: int,
    own: Sequence[Owner],
    shelf: Shelf,
) -> None:
    """One slot: white, hatched, one holder's colour, or a diagonal band for each holder."""
    box, name = shelf.slot(block, offset), f"slot.{block * run.block_size + offset}"
    if not own:
        scene.rect(name, box, PAPER, rx=2, stroke=RULE, **DEAF)
        return
    kinds = {
        owner.name: run.token_kind(step, owner.name, owner.entry * run.block_size + offset)
        for owner in own
    }
    there = [who for who, kind in kinds.items() if kind in ("cached", "run")]
    if not there:
        scene.rect(name, box, HATCHED, rx=2, stroke=RULE, **DEAF)
        return
    is_new = "run" in kinds.values()
    plain = {"stroke": looks[there[0]].colour} if len(there) == 1 else {}
    edge = THICK if is_new else plain
    fills = [looks[who].dark if is_new or len(there) > 1 else looks[who].light for who in there]
    if len(there) > 1:
        draw_shared(scene, name, box, fills, **edge)
    else:
        scene.rect(name, box, fills[0], rx=2, **edge, **DEAF)


def draw_shared(scene: Scene, name: str, box: Box, fills: Sequence[str], **edge: Any) -> None:
    """A slot of several requests: a band in each one's colour, along the diagonal."""
    for i, fill in enumerate(fills):
        points = _band(box, i / len(fills), (i + 1) / len(fills))
        scene.add(f"{name}.{i}", "polygon", points=points, fill=fill, **DEAF)
    scene.rect(name, box, "none", rx=2, **({"stroke": INK} | edge), **DEAF)


def _band(box: Box, begin: float, end: float) -> str:
    """The part of a box between two of its diagonals, as points; 0 and 1 are opposite corners."""
    x, y, w, h = box
    a, b = 2 * begin, 2 * end
    upper = [(min(a, 1), max(a - 1, 0)), *([(1, 0)] if a < 1 < b else [])]
    upper.append((min(b, 1), max(b - 1, 0)))
    points = upper + [(v, u) for u, v in reversed(upper)]
    return " ".join(f"{x + u * w:.1f},{y + v * h:.1f}" for u, v in points)


def _draw_copies(scene: Scene, copies: Sequence[BlockCopied], looks: Looks, shelf: Shelf) -> None:
    """An arrow from each block to its copy, in the colour of the request that needed it."""
    ends = []
    for i, event in enumerate(copies):
        points = _route(event, shelf, 3.0 * (i - (len(copies) - 1) / 2))
        ends.append(points[-1])
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        colour = looks[event.request_id].colour
        for part, ink, width in (("halo", PAPER, 4.5), ("line", colour, 2.6)):
            style = {"fill": "none", "stroke": ink, "stroke_width": width, **DEAF}
            scene.add(f"copy.{i}.{part}", "path", d=line, **style)
    for i, (event, (x, y)) in enumerate(zip(copies, ends, strict=True)):
        fill, head = looks[event.request_id].colour, f"M{x:.1f} {y:.1f}l-9 -5.5v11z"
        scene.add(f"copy.{i}.head", "path", d=head, fill=fill, stroke=PAPER, **DEAF)


def _route(event: BlockCopied, shelf: Shelf, lane: float) -> list[tuple[float, float]]:
    """From a block to another through the gaps between the blocks; lanes are side by side."""
    (x, y, _, h), (to_x, to_y, _, _) = shelf.slot(event.source, 0), shelf.slot(event.block, 0)
    begin, end = (x + shelf.wide + 1, y + h / 2 + lane), (to_x - 1, to_y + h / 2 + lane)
    if event.block == event.source + 1 and y == to_y:
        return [begin, end]
    gap, side = begin[0] + 7 + lane, to_x - 10 + lane
    above = shelf.corner(event.block)[1] - 5 + lane
    return [begin, (gap, begin[1]), (gap, above), (side, above), (side, end[1]), end]
