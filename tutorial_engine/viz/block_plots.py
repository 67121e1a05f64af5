"""The picture of pages: logical blocks, block tables, and the pool.

Knows what is laid out where; what there is to say comes from block_facts.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tutorial_engine.trace.events import BlockCopied, Trace
from tutorial_engine.viz.block_facts import DIGITS, BlockRun, Owner, without_hashes
from tutorial_engine.viz.parts import (
    BOLD,
    DEAF,
    FAINT,
    MARGIN,
    RIGHT,
    THICK,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Box, Look, cut_to, look, text_width
from tutorial_engine.viz.simple_blocks import STATES, SimpleBlockView, StepSheet
from tutorial_engine.viz.style import PAPER, QUIET, RULE

TITLE = "Pages: who owns which block"
MAX_REQUESTS, MAX_BLOCKS, MAX_SIZE = 6, 64, 32  # what can still be read
LEFT, TABLE, POOL = 56.0, 372.0, 500.0  # where logical blocks, tables and the pool begin
LOGICAL, ENTRY = 304.0, 32.0  # widths: logical blocks, a table entry
LINES = ((4, 27.0), (4, 23.0), (8, 23.0), (8, 20.0))  # tokens in a line, its height: best first
STRIPS = (16, 13.0)  # for blocks of more tokens than that: no words, where with words is no room
TALLEST, HANDY, GAP = 640.0, 330.0, 14.0  # of all logical blocks, and as it should be; between two
GUTTER, SLOT, TEXT = 16.0, 20.0, 12.5  # between blocks; heights of a line of slots, of words
SMALL, TINY = 10.5, 10.0  # letters of tokens and counts, and of the words below a block
TOUCHED, DASHES = "#fdf1cf", {"stroke_dasharray": "3 3"}
ZOOM = 1.0  # of a PNG
# what can happen to a block, by how much it matters
EVENTS = ("evicted", "copy", "copied", "left", "found", "shared", "taken", "cached")


@dataclass(frozen=True)
class Lines:
    """How logical blocks are laid out: `chips` tokens in a line of that height, in pixels."""

    size: int  # tokens of a block
    chips: int
    tall: float

    @property
    def in_line(self) -> int:
        """Blocks side by side."""
        return max(self.chips // self.size, 1)

    def places(self, left: float, top: float, width: float) -> Grid:
        """Places for the blocks of a request, or for the entries of its table."""
        lines = -(-self.size // self.chips)
        return Grid(left, top, width / self.in_line, lines * self.tall, self.in_line)

    def tokens(self, block: Box) -> Grid:
        """Places for the tokens of a block."""
        x, y, w, _ = block
        columns = min(self.size, self.chips)
        return Grid(x, y, (w - 5) / columns, self.tall, columns, (2.5, 5))

    def height(self, num_blocks: int) -> float:
        """Pixels that so many blocks of one request take."""
        return self.places(0, 0, 0).height(num_blocks)


class BlockView:
    """Draws steps of one run at the same places: those that are given, or all of it.

    ValueError, saying what fits, for more than a picture has room for.
    """

    title = TITLE

    def __init__(
        self, run: BlockRun, steps: Sequence[int] | None = None, num_drawn: int | None = None
    ) -> None:
        self.run, self.num_drawn = run, num_drawn or run.num_blocks
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.names)}
        shown = range(run.last + 1) if steps is None else steps
        here = {
            name: max(len(run.steps[step].tables.get(name, ())) for step in shown)
            for name in run.families
            if any(run.is_shown(name, step) for step in shown)
        }
        self._check(len(here))
        self.facts = {step: textwrap.wrap("; ".join(run.steps[step].facts), 142) for step in shown}
        self.top = 56.0 + 16 * max(1, *(len(lines) for lines in self.facts.values()))
        noted = {name for step in shown for name in run.steps[step].state.waiting}
        self.lines, heights = self._choose_lines(here, noted)
        self.tops: dict[str, float] = {}
        y = self.top + 20
        for name, height in zip(here, heights, strict=True):
            self.tops[name] = y
            y += height + GAP
        self.pool, self.in_line = self._pool(self.top + 18)
        self.queue = self.pool.y + self.pool.height(self.num_drawn) + 10
        queued = 15 * len(free_lines(range(run.num_blocks)))
        self.floor = max(y, self.queue + queued) + 14

    def _check(self, requests: int) -> None:
        size, blocks = self.run.block_size, self.run.num_blocks
        if requests > MAX_REQUESTS or size > MAX_SIZE or blocks > MAX_BLOCKS:
            raise ValueError(
                f"{requests} requests, {blocks} blocks of {size} tokens: this picture has room for "
                f"{MAX_REQUESTS} requests, {MAX_BLOCKS} blocks and blocks of {MAX_SIZE} tokens"
            )

    def _choose_lines(self, here: Mapping[str, int], noted: set[str]) -> tuple[Lines, list[float]]:
        """The widest layout in which all tables are seen, and the height of each request."""
        choices = LINES if self.run.block_size <= STRIPS[0] else (LINES[-1], STRIPS)
        for most, (chips, tall) in product((HANDY, TALLEST), choices):
            lines = Lines(self.run.block_size, chips, tall)
            heights = [
                max(lines.height(many), 22) + 14 * (name in noted and many > 0)
                for name, many in here.items()
            ]
            if sum(heights) + GAP * len(heights) <= most:
                return lines, heights
        fit = int((TALLEST / len(here) - GAP) // lines.height(1)) * lines.in_line
        raise ValueError(
            f"the longest block table has {max(here.values())} entries: with {len(here)} requests "
            f"this picture has room for up to {fit} each, of {self.run.block_size} tokens"
        )

    def _pool(self, top: float) -> tuple[Grid, int]:
        """Places of the physical blocks, with their words; slots side by side in each."""
        blocks, size = self.num_drawn, self.run.block_size
        columns = 5 if blocks <= 20 else 6 if blocks <= 40 else 8
        columns = 4 if blocks <= 16 and blocks % 5 else columns
        in_line = size if size <= 6 else -(-size // 2)
        tall = 18 + SLOT * -(-size // in_line) + 3 * TEXT + 3
        gap = (GUTTER, GUTTER - 6)
        return Grid(POOL, top, (WIDTH - POOL) / columns, tall + gap[1], columns, gap), in_line

    def slots(self, block: int) -> Grid:
        """Places of the slots of a physical block."""
        x, y, w, _ = self.pool.box(block)
        return Grid(x, y + 18, min(w / self.in_line, 30.0), SLOT, self.in_line, (1.5, 2))

    def scene(self, step: int) -> Sheet:
        """What the step left: tables on the left, the pool on the right."""
        return _Step(self, step, 30).drawn()


class _Step(StepSheet):
    """The picture of one step with hashes, holders and the queue of free blocks."""

    view: BlockView

    @property
    def aside(self) -> str:
        """Beside the number of the step."""
        return f" · prefix caching {'on' if self.run.prefix_caching else 'off'}"

    def columns(self) -> Sequence[tuple[float, str]]:
        """Where each column begins, and what it is."""
        drawn, blocks = self.view.num_drawn, self.run.num_blocks
        few = f"{drawn} of " * (drawn < blocks)
        pool = f"pool: {few}{blocks} physical blocks of {self.run.block_size}"
        return (LEFT, "logical blocks"), (TABLE, "block tables"), (POOL, pool)

    def rest(self) -> None:
        """What a hash looks like, arrows of copies, and the queue of free blocks."""
        if self.run.prefix_caching:
            chain = "71b9 ← 98ac: hash ← hash of the block before"
            chain = chain if self.view.pool.columns < 8 else "71b9: hash of all tokens so far"
            self.note("chain", WIDTH - MARGIN, self.view.top, chain, **RIGHT)
        for i, event in enumerate(self.now.copies):
            self.copy(i, event)
        for i, line in enumerate(free_lines(self.now.free)):
            self.text(f"free.{i}", POOL, self.view.queue + 15 * i, line, 11)

    def _said(self, tip: str) -> str:
        """What hovering says, on the one line that there is for it."""
        return cut_to(tip, WIDTH - 2 * MARGIN, 13, keep=True)

    def parts_on_a_phone(self) -> list[list[Box]]:
        """Tables, the pool three blocks at a time, and the queue of free blocks."""
        view, top = self.view, self.view.top - 16
        found: list[list[Box]] = [[(0, top, POOL - 8, view.floor - top - 12)]]
        found.append([(POOL - 4, top, WIDTH - POOL, 22)])
        columns, blocks = view.pool.columns, view.num_drawn
        for first in range(0, blocks, columns):
            for begin in range(first, min(first + columns, blocks), 3):
                many = min(3, first + columns - begin, blocks - begin)
                x, y, _, h = view.pool.box(begin)
                found.append([(x - 7, y - 3, many * view.pool.wide, h + 4)])
        return [*found, [(POOL - 2, view.queue - 12, WIDTH - POOL, 36)]]

    # -- left: a request

    def request(self, name: str, top: float) -> None:
        """A request's letter, its logical blocks, and its table beside them."""
        one, room = self.looks[name], LEFT - 18
        size = 17.0 if text_width(name, 17, bold=True) <= room else 11.0
        words = cut_to(name, room, size, bold=True)
        self.text(f"request.{name}", 12, top + 16, words, size, fill=one.ink, **BOLD)
        lines, table = self.view.lines, self.now.tables.get(name, ())
        blocks = lines.places(LEFT, top, LOGICAL)
        entries = lines.places(TABLE, top, POOL - TABLE - 12)
        for index, block in enumerate(table):
            x, y, w, h = box = blocks.box(index)
            if lines.chips != lines.size:
                frame = (x - 2.5, y - 2, w - 2.5, h - 1)
                self.rect(f"frame.{index}.{name}", frame, "none", rx=4, stroke=RULE)
            tokens = lines.tokens(box)
            for offset in range(lines.size):
                self._token(name, one, index * lines.size + offset, tokens.box(offset))
            self._entry(name, one, index, block, entries.box(index))
        if not table:
            said = textwrap.wrap(self.run.why_idle(self.step, name), 70)
            for i, line in enumerate(said):
                self.note(f"note.{name}" + f".{i}" * bool(i), LEFT, top + 15 + 14 * i, line)
        elif name in self.now.state.waiting:
            y = top + lines.height(len(table)) + 10
            self.note(f"note.{name}", LEFT, y, self.run.why_idle(self.step, name))

    def _token(self, name: str, one: Look, position: int, box: Box) -> None:
        """One token, or the place of one, in its logical block."""
        kind = self.run.token_kind(self.step, name, position)
        tip = self._said(self.run.about_token(self.step, name, position))
        self.cell(f"token.{position}.{name}", box, STATES[kind], one, tip)
        if kind != "empty" and self.view.lines.chips != STRIPS[0]:
            token = self.now.state.requests[name].token_ids[position]
            words = cut_to(self.run.label(token), box[2] - 3, SMALL)
            style = FAINT if kind == "known" else {}
            self.inside(f"word.{position}.{name}", box, words, SMALL, **style)

    def _entry(self, name: str, one: Look, index: int, block: int, place: Box) -> None:
        """An entry of a table: the block's number, and how full it is where there is room."""
        x, y, room, _ = place
        size, first = self.run.block_size, index * self.run.block_size
        lines = self.view.lines
        box = (x, y, min(ENTRY, room - 3), max(lines.tall, 20.0) - 5)
        filled = min(max(self.now.held[name] - first, 0), size)
        tip = self._said(
            f"{name}, entry {index} of its table: positions {first}–{first + size - 1} are "
            f"in block {block}, slots {block * size}–{(block + 1) * size - 1}; "
            f"{filled} of {size} filled"
        )
        edge: Style = {"stroke": one.colour, "stroke_width": 1.6, "rx": 3}
        self.cell(f"entry.{index}.{name}", box, "free", tip=tip, **edge)
        number = f"block.{index}.{name}"
        self.inside(number, box, str(block), 11.0 if box[2] >= 24 else TINY, **BOLD)
        words = f"{filled}/{size}"
        if box[2] + 6 + text_width(words, SMALL) <= room:
            base = y + box[3] / 2 + 4
            self.note(f"fill.{index}.{name}", x + box[2] + 5, base, words, SMALL)

    # -- right: a block of the pool

    def block(self, block: int) -> None:
        """A physical block: number, holders, slots, hash, and what the step did to it."""
        own, touched = self.owners.get(block, []), self.now.touched.get(block, ())
        x, y, w, h = self.view.pool.box(block)
        card, fill = (x - 5, y - 1, w + 10, h), TOUCHED if touched else PAPER
        tip = self._said(self.run.about_block(self.step, block))
        edge: Style = {"stroke": QUIET, **DASHES} if touched else {}
        self.rect(f"block.{block}", card, fill, tip, rx=4, **edge)
        self.text(f"number.{block}", x, y + 13, str(block), 12, **BOLD, **DEAF)
        many = f"ref {len(own)}" if own else "next" if self.now.free[0] == block else ""
        if many:
            style = BOLD if len(own) > 1 else FAINT
            self.text(f"ref.{block}", x + w, y + 13, many, SMALL, **RIGHT, **DEAF, **style)
        slots = self.view.slots(block)
        for offset in range(self.run.block_size):
            self._slot(block, offset, own, slots.box(offset))
        self._owners(block, own, (x, y + h - 2 * TEXT - 5, w + 4))
        for i, (words, style) in enumerate(self._words(block, own, touched, w + 4)):
            if words:
                base = y + h - 2 * TEXT - 5 + TEXT * i
                self.text(f"words.{block}.{i}", x, base, words, TINY, **style, **DEAF)

    def _slot(self, block: int, offset: int, own: Sequence[Owner], box: Box) -> None:
        """One slot: free, reserved, one holder's, or a diagonal band for each holder."""
        run, name = self.run, f"slot.{block * self.run.block_size + offset}"
        kinds = {
            owner.name: run.token_kind(self.step, owner.name, owner.entry * run.block_size + offset)
            for owner in own
        }
        there = [self.looks[who] for who, kind in kinds.items() if kind in ("cached", "run")]
        if len(there) > 1:
            edge = THICK if "run" in kinds.values() else {}
            self.shared_cell(name, box, [one.dark for one in there], **edge)
        elif there:
            state = "written" if "run" in kinds.values() else "cached"
            self.cell(name, box, state, there[0], **DEAF)
        else:
            self.cell(name, box, "reserved" if own else "free", **DEAF)

    def _owners(self, block: int, own: Sequence[Owner], place: tuple[float, float, float]) -> None:
        """The holders' names in their colours, as many as there is room for."""
        x, base, room = place
        at = x
        for i, owner in enumerate(own):
            words = owner.name + "," * (i < len(own) - 1)
            wide, style = text_width(words, 11, bold=True), BOLD | DEAF
            if at + wide > x + room:
                self.text(f"who.{block}.{i}", at, base, "…", 11, **style)
                break
            ink = self.looks[owner.name].ink
            self.text(f"who.{block}.{i}", at, base, words, 11, fill=ink, **style)
            at += wide + 4

    def _words(
        self, block: int, own: Sequence[Owner], touched: Sequence[str], room: float
    ) -> list[tuple[str, Style]]:
        """Three lines below a block; the first is empty where its holders stand there."""
        run, hash_ = self.run, self.now.hashes.get(block)
        first, second = "" if own else "free", ""
        if hash_ is not None:
            first = first and fitting(["free, still findable", "findable"], room)
            before = (run.hashed[hash_].parent or "root")[:DIGITS]
            second = fitting([f"{hash_[:DIGITS]} ← {before}", hash_[:DIGITS]], room)
        elif own:
            filled = max(owner.filled for owner in own)
            full = "not findable" if run.prefix_caching else "full"
            second = f"open, {filled}/{run.block_size}" if filled < run.block_size else full
        third = fitting(shortened(touched), room, bold=True)
        return [(first, FAINT), (second, FAINT), (third, BOLD)]

    def copy(self, i: int, event: BlockCopied) -> None:
        """An arrow from a block to its copy, in the colour of the request that needed it.

        It goes through the gaps between the blocks, beside the arrows of other copies.
        """
        lane = 3.0 * (i - (len(self.now.copies) - 1) / 2)
        source, target = self.view.slots(event.source).box(0), self.view.slots(event.block).box(0)
        x, y = self.view.pool.box(event.source)[0] + self.view.pool.box(0)[2] + 1, source[1]
        begin = (x, y + source[3] / 2 + lane)
        end = (target[0] - 1, target[1] + target[3] / 2 + lane)
        points = [begin, end]
        if event.block != event.source + 1 or y != target[1]:
            gap, side = x + 7 + lane, end[0] - 10 + lane
            above = self.view.pool.box(event.block)[1] - 5 + lane
            points[1:1] = [(gap, begin[1]), (gap, above), (side, above), (side, end[1])]
        self.arrow(f"copy.{i}", points, self.looks[event.request_id].colour, 2.6)

    def key(self) -> None:
        """What fills and outlines mean: all of it where steps follow, else what occurs in this."""
        looks = list(self.looks.values())
        marks: dict[str, Mark] = {
            "K and V are there": self.sample("cached", looks[0]),
            "written in this step": self.sample("written", looks[0]),
            "reserved (grey word: known, not run)": self.sample("reserved"),
        }
        if len(looks) > 1:
            dark = [one.dark for one in looks[:2]]
            marks["shared"] = lambda name, box: self.shared_cell(name, box, dark)
        touched: Style = {"fill": TOUCHED, "rx": 2, "stroke": QUIET, **DASHES}
        marks["free"] = self.sample("free")
        marks["block touched in this step"] = lambda name, box: self.rect(name, box, **touched)
        seen = self._seen() if len(self.view.facts) == 1 else marks
        marks = {words: mark for words, mark in marks.items() if words in seen}
        self.legend(MARGIN, self.view.floor + 6, marks)

    def _seen(self) -> set[str]:
        """What of the key is in this picture."""
        size, now = self.run.block_size, self.now
        found = {
            "shared": any(sum(one.filled > 0 for one in own) > 1 for own in self.owners.values()),
            "free": bool(now.free),
            "block touched in this step": bool(now.touched),
        }
        kinds = {
            self.run.token_kind(self.step, name, position)
            for name, table in now.tables.items()
            for position in range(len(table) * size)
        }
        found["K and V are there"] = "cached" in kinds
        found["written in this step"] = "run" in kinds
        found["reserved (grey word: known, not run)"] = bool(kinds & {"known", "empty"})
        return {words for words, is_there in found.items() if is_there}


def free_lines(free: Sequence[int]) -> list[str]:
    """The order in which free blocks are taken, in lines that fit below the pool."""
    queue = ", ".join(map(str, free)) or "none: who needs one must wait, or somebody gives way"
    return textwrap.wrap(f"free blocks, in the order in which they go: {queue}", 76)


def shortened(touched: Sequence[str]) -> list[str]:
    """What happened to a block, in fewer and fewer words; what matters most stays longest."""
    if not touched:
        return [""]
    told = sorted(
        touched, key=lambda words: min(EVENTS.index(w) for w in words.split() if w in EVENTS)
    )
    some = [", ".join(told[:many]) for many in range(len(told), 0, -1)]
    first = told[0].split()
    return [*some, "evicted" if "evicted" in first else first[0]]


def fitting(choices: Sequence[str], width: float, bold: bool = False) -> str:
    """The first of these that fits; the last of them, cut, where none does."""
    for words in choices:
        if text_width(words, TINY, bold) <= width:
            return words
    return cut_to(choices[-1], width, TINY, bold, keep=True)


def block_view(
    trace: Trace,
    step: int,
    labels: Mapping[int, str] | None = None,
    simple: bool = False,
    num_drawn: int | None = None,
) -> Picture:
    """Who owns which block after a step (from 0) of a recorded run on pages.

    `labels`: token id -> its text; a number is written where there is none. `simple`: tokens in the
    pool, lines to it, and nothing of hashes. `num_drawn`: so many blocks are drawn, behind
    which all are free (not with `simple`). ValueError for another memory, a step that there is not,
    and more than a picture has room for.
    """
    run = BlockRun(without_hashes(trace) if simple else trace, labels or {})
    if not 0 <= step <= run.last:
        raise ValueError(f"step {step} is outside 0 .. {run.last}")
    used = max(run.owners(step), default=0)
    if num_drawn is not None and (simple or not used < num_drawn <= run.num_blocks):
        raise ValueError(f"block {used} of {run.num_blocks} is in use, got num_drawn={num_drawn}")
    view = SimpleBlockView(run, [step]) if simple else BlockView(run, [step], num_drawn)
    shown = run.caption(step, is_told=len(view.facts[step]) > 1)  # above the picture, in lines
    return view.scene(step).picture(run.caption(step), ZOOM, shown)
