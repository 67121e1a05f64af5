"""The pictures of pages: logical blocks, block tables, and the pool.

Two of them: all that there is to know of a block, and a simple one for the first sight. Knows what
is laid out where; what there is to say comes from `run`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tutorial_engine.trace.events import BlockCopied, Trace
from tutorial_engine.viz.drawing.letters import cut_to, name_in, text_width, wrapped
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    DEAF,
    FAINT,
    GREY,
    KEY,
    MARGIN,
    RIGHT,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Box, Look, look
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.run.block_run import DIGITS, BlockRun, Owner, without_hashes
from tutorial_engine.viz.tokens import visible
from tutorial_engine.viz.words import counted

MAX_REQUESTS, MAX_BLOCKS, MAX_SIZE = 6, 64, 32  # what can still be read
LEFT, ENTRY = 56.0, 32.0  # where logical blocks begin; the width of a table entry
LINES = ((4, 27.0), (4, 23.0), (8, 23.0), (8, 20.0))  # tokens in a line, its height: best first
STRIPS = (16, 13.0)  # for blocks of more tokens than that: no words, where with words is no room
SIMPLE = ((8, 27.0), (8, 23.0), (8, 20.0))  # the same where each block has its own line
SIMPLE_BLOCKS, ONE_COLUMN = 32, 16  # of a simple pool; of one that stands in a column
TALLEST, HANDY, GAP = 640.0, 330.0, 14.0  # of all logical blocks, and as it should be; between two
GUTTER, SLOT, TEXT = 16.0, 20.0, 12.5  # between blocks; heights of a line of slots, of words
SMALL, TINY = 10.5, 10.0  # letters of tokens and counts, and of the words below a block
WORDY = 22.0  # pixels of a slot that has room for a word
KEPT, TOUCH = "free, still findable", "block touched in this step"  # in the key
TOUCHED, DASHES = "#eceff1", {"stroke_dasharray": "3 3"}
ZOOM = 1.0  # of a PNG
LONG = 142  # characters of what happened: the caption does not say so much again
WITH_KV = ("cached", "written")  # kinds of a slot; all others are reserved
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

    title = "Pages: who owns which block"
    limits = (MAX_REQUESTS, MAX_BLOCKS, MAX_SIZE)
    layouts: Sequence[tuple[int, float]] = LINES
    logical, table, left = 304.0, 372.0, 500.0  # width of logical blocks; table and pool begin
    handy, tallest = HANDY, TALLEST  # pixels of all logical blocks
    apart = False  # is each block of a request in a line of its own?
    letters = SMALL  # of tokens

    def __init__(
        self, run: BlockRun, steps: Sequence[int] | None = None, num_drawn: int | None = None
    ) -> None:
        self.run, self.num_drawn = run, num_drawn or run.num_blocks
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.names)}
        shown = range(run.last + 1) if steps is None else steps
        here = {
            name: max(len(run.blocks[step].tables.get(name, ())) for step in shown)
            for name in run.families
            if any(run.is_shown(name, step) for step in shown)
        }
        self._check(len(here))
        facts = {step: "; ".join(run.blocks[step].facts) for step in shown}
        self.facts = {step: wrapped(said, WIDTH - 2 * MARGIN, 12) for step, said in facts.items()}
        self.top = 56.0 + 16 * max(1, *(len(lines) for lines in self.facts.values()))
        noted = {name for step in shown for name in run.blocks[step].state.waiting}
        self.lines, heights = self._choose_lines(here, noted)
        self.tops: dict[str, float] = {}
        y = self.top + 20
        for name, height in zip(here, heights, strict=True):
            self.tops[name] = y
            y += height + GAP
        self.pool = self._pool(self.top + 18)
        self.queue = self.pool.y + self.pool.height(self.num_drawn) + 10
        self.floor = max(y, self.queue + self._queued()) + 14

    def _check(self, requests: int) -> None:
        size, blocks = self.run.block_size, self.run.num_blocks
        most_requests, most_blocks, most_size = self.limits
        if requests > most_requests or blocks > most_blocks or size > most_size:
            raise ValueError(
                f"{requests} requests, {blocks} blocks of {size} tokens: this picture has room for "
                f"{most_requests} requests, {most_blocks} blocks and blocks of {most_size} tokens"
            )

    def _choose_lines(self, here: Mapping[str, int], noted: set[str]) -> tuple[Lines, list[float]]:
        """The widest layout in which all tables are seen, and the height of each request."""
        large = (LINES[-1], STRIPS) if self.run.labels else (STRIPS,)  # numbers say nothing
        choices = self.layouts if self.run.block_size <= STRIPS[0] else large
        size = self.run.block_size
        for room, (chips, tall) in product((self.handy, self.tallest), choices):
            lines = Lines(size, min(chips, size) if self.apart else chips, tall)
            heights = [
                max(lines.height(many), 22) + 14 * (name in noted and many > 0)
                for name, many in here.items()
            ]
            if sum(heights) + GAP * len(heights) <= room:
                return lines, heights
        fit = int((self.tallest / len(here) - GAP) // lines.height(1)) * lines.in_line
        raise ValueError(
            f"the longest block table has {max(here.values())} entries: with {len(here)} requests "
            f"this picture has room for up to {fit} each, of {self.run.block_size} tokens"
        )

    @property
    def in_line(self) -> int:
        """Slots of a physical block side by side."""
        size = self.run.block_size
        return size if size <= 6 else -(-size // 2)

    def _pool(self, top: float) -> Grid:
        """Places of the physical blocks, with their words."""
        blocks, lines = self.num_drawn, -(-self.run.block_size // self.in_line)
        columns = 5 if blocks <= 20 else 6 if blocks <= 40 else 8
        columns = 4 if blocks <= 16 and blocks % 5 else columns
        tall, gap = 18 + SLOT * lines + 3 * TEXT + 3, (GUTTER, GUTTER - 6)
        wide = (WIDTH - self.left) / columns
        return Grid(self.left, top, wide, tall + gap[1], columns, gap)

    def _queued(self) -> float:
        """Pixels that the queue of free blocks takes."""
        return 15.0 * len(free_lines(range(self.run.num_blocks), WIDTH - self.left - MARGIN))

    def slots(self, block: int) -> Grid:
        """Places of the slots of a physical block."""
        x, y, w, _ = self.pool.box(block)
        return Grid(x, y + 18, min(w / self.in_line, 30.0), SLOT, self.in_line, (1.5, 2))

    def scene(self, step: int) -> Sheet:
        """What the step left: tables on the left, the pool on the right."""
        return _Step(self, step).drawn()


class _Step(Sheet):
    """The picture of one step with hashes, holders and the queue of free blocks."""

    def __init__(self, view: BlockView, step: int) -> None:
        super().__init__(WIDTH, view.floor + 38, (MARGIN, view.floor + 30))
        self.hint = "hover over a token, a table entry or a block to read its numbers"
        self.view, self.run, self.looks = view, view.run, view.looks
        self.step, self.now = step, view.run.blocks[step]
        self.owners = view.run.owners(step)

    def drawn(self) -> Sheet:
        """The whole picture: which step it is and what came to pass, then all its parts."""
        view = self.view
        self.heading(view.title, f"step {self.step} of {self.run.last}{self.aside}")
        for i, line in enumerate(view.facts[self.step] or ["no block changes hands"]):
            self.note(f"fact.{i}", MARGIN, 42 + 16 * i, line, 12)
        for x, words in self.columns():
            self.note(f"column.{x:.0f}", x, view.top, words, 12)
        for name, top in view.tops.items():
            self.request(name, top)
        for block in range(view.num_drawn):
            self.block(block)
        self.rest()
        self.key()
        self.parts = self.parts_on_a_phone()
        return self

    @property
    def aside(self) -> str:
        """Beside the number of the step."""
        return f" · prefix caching {'on' if self.run.prefix_caching else 'off'}"

    def columns(self) -> Sequence[tuple[float, str]]:
        """Where each column begins, and what it is."""
        view = self.view
        few = f"{view.num_drawn} of " * (view.num_drawn < self.run.num_blocks)
        pool = f"pool: {few}{self.run.num_blocks} physical blocks of {self.run.block_size}"
        return (LEFT, "logical blocks"), (view.table, "block tables"), (view.left, pool)

    def rest(self) -> None:
        """What a hash looks like, arrows of copies, and the queue of free blocks."""
        if self.run.prefix_caching:
            chain = "71b9 ← 98ac: hash ← hash of the block before"
            chain = chain if self.view.pool.columns < 8 else "71b9: hash of all tokens so far"
            self.note("chain", WIDTH - MARGIN, self.view.top, chain, **RIGHT)
        for i, event in enumerate(self.now.copies):
            self.copy(i, event)
        for i, line in enumerate(free_lines(self.now.free, WIDTH - self.view.left - MARGIN)):
            self.text(f"free.{i}", self.view.left, self.view.queue + 15 * i, line, 11)

    def _said(self, tip: str) -> str:
        """What hovering says, on the one line that there is for it."""
        return cut_to(tip, WIDTH - 2 * MARGIN, 13, keep=True)

    def parts_on_a_phone(self) -> list[list[Box]]:
        """Tables, the pool three blocks at a time, and the queue of free blocks."""
        view, top, left = self.view, self.view.top - 16, self.view.left
        found: list[list[Box]] = [[(0, top, left - 8, view.floor - top - 12)]]
        found.append([(left - 4, top, WIDTH - left, 22)])
        columns, blocks = view.pool.columns, view.num_drawn
        for first in range(0, blocks, columns):
            for begin in range(first, min(first + columns, blocks), 3):
                many = min(3, first + columns - begin, blocks - begin)
                x, y, _, h = view.pool.box(begin)
                found.append([(x - 7, y - 3, many * view.pool.wide, h + 4)])
        return [*found, [(left - 2, view.queue - 12, WIDTH - left, 36)]]

    # -- left: a request

    def request(self, name: str, top: float) -> None:
        """A request's letter, its logical blocks, and its table beside them."""
        colours, room, view = self.looks[name], LEFT - 18, self.view
        self.text(
            f"request.{name}", 12, top + 16, *name_in(room, name, 17), fill=colours.ink, **BOLD
        )
        lines, table = view.lines, self.now.tables.get(name, ())
        blocks = lines.places(LEFT, top, view.logical)
        entries = lines.places(view.table, top, view.left - view.table - 12)
        for index, block in enumerate(table):
            x, y, w, h = box = blocks.box(index)
            if lines.chips != lines.size:
                frame = (x - 2.5, y - 2, w - 2.5, h - 1)
                self.rect(f"frame.{index}.{name}", frame, "none", rx=4, stroke=RULE)
            tokens = lines.tokens(box)
            for offset in range(lines.size):
                position = index * lines.size + offset
                self.token(f"token.{position}.{name}", name, position, tokens.box(offset))
            self.entry(name, colours, index, block, entries.box(index))
        if not table:
            room = self.view.table + 70 - LEFT  # inside the part that a phone shows
            said = wrapped(self.run.why_idle(self.step, name), room, KEY)
            for i, line in enumerate(said):
                self.note(f"note.{name}" + f".{i}" * bool(i), LEFT, top + 15 + 14 * i, line)
        elif name in self.now.state.waiting:
            y = top + lines.height(len(table)) + 10
            self.note(f"note.{name}", LEFT, y, self.run.why_idle(self.step, name))

    def token(
        self,
        item: str,
        name: str,
        position: int,
        box: Box,
        known: bool = True,
        shared: Sequence[Look] = (),
    ) -> None:
        """One token, or the place of one; `known`: those that have not run have words, too."""
        kind, letters = self.run.token_kind(self.step, name, position), self.view.letters
        tip = self._said(self.run.about_token(self.step, name, position))
        word = ""
        if kind != "empty" and (kind != "known" or known) and self.view.lines.chips != STRIPS[0]:
            word = visible(self.run.label(self.now.state.requests[name].token_ids[position]))
        state = kind if kind in WITH_KV else "reserved"
        style = FAINT if kind == "known" else {}
        edge: Style = {"stroke": INK} if len(shared) > 1 else {}
        self.cell(item, box, state, self.looks[name], tip, word, letters, style, shared, **edge)

    def entry(self, name: str, look: Look, index: int, block: int, place: Box) -> Box:
        """An entry of a table: the block's number and, with room, how full it is → its box."""
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
        edge: Style = {"stroke": look.colour, "stroke_width": 1.6, "rx": 3}
        self.cell(f"entry.{index}.{name}", box, "free", tip=tip, **edge)
        number = f"block.{index}.{name}"
        self.inside(number, box, str(block), 11.0 if box[2] >= 24 else TINY, **BOLD)
        words = f"{filled}/{size}"
        if box[2] + 6 + text_width(words, SMALL) <= room:
            base = y + box[3] / 2 + 4
            self.note(f"fill.{index}.{name}", x + box[2] + 5, base, words, SMALL)
        return box

    # -- right: a block of the pool

    def block(self, block: int) -> None:
        """A physical block: number, holders, slots, hash, and what the step did to it."""
        holders, touched = self.owners.get(block, []), self.now.touched.get(block, ())
        x, y, w, h = self.view.pool.box(block)
        card, fill = (x - 5, y - 1, w + 10, h), TOUCHED if touched else PAPER
        tip = self._said(self.run.about_block(self.step, block))
        edge: Style = {"stroke": QUIET, **DASHES} if touched else {}
        self.rect(f"block.{block}", card, fill, tip, rx=4, **edge)
        self.text(f"number.{block}", x, y + 13, str(block), 12, **BOLD, **DEAF)
        many = f"ref {len(holders)}" if holders else "next" if self.now.free[0] == block else ""
        if many:
            style = BOLD if len(holders) > 1 else FAINT
            self.text(f"ref.{block}", x + w, y + 13, many, SMALL, **RIGHT, **DEAF, **style)
        slots = self.view.slots(block)
        for offset in range(self.run.block_size):
            self._slot(block, offset, holders, slots.box(offset))
        self._owners(block, holders, (x, y + h - 2 * TEXT - 5, w + 1))
        for i, (words, style) in enumerate(self._words(block, holders, touched, w + 1)):
            if words:
                base = y + h - 2 * TEXT - 5 + TEXT * i
                self.text(f"words.{block}.{i}", x, base, words, TINY, **style, **DEAF)

    def _slot(self, block: int, offset: int, holders: Sequence[Owner], box: Box) -> None:
        """One slot: free, kept, reserved, one holder's, or a diagonal band for each holder."""
        run, name = self.run, f"slot.{block * self.run.block_size + offset}"
        kinds = {
            owner.name: run.token_kind(self.step, owner.name, owner.entry * run.block_size + offset)
            for owner in holders
        }
        there = [self.looks[who] for who, kind in kinds.items() if kind in WITH_KV]
        if there:
            state = "solid" if len(there) > 1 else "cached"
            state = "written" if "written" in kinds.values() else state
            edge: Style = {"stroke": INK} if len(there) > 1 else {}
            self.cell(name, box, state, there[0], shared=there, **edge, **DEAF)
        elif not holders and (hash_ := self.now.hashes.get(block)):
            token = run.hashed[hash_].token_ids[offset]
            word = visible(run.label(token)) if box[2] >= WORDY else ""
            last = self.looks[self.now.cached_by[block]]
            self.cell(name, box, "kept", last, "", word, TINY, FAINT, **DEAF)
        else:
            self.cell(name, box, "reserved" if holders else "free", **DEAF)

    def _owners(
        self, block: int, holders: Sequence[Owner], place: tuple[float, float, float]
    ) -> None:
        """The holders' names in their colours, as many as there is room for."""
        x, base, room = place
        at = x
        for i, owner in enumerate(holders):
            words = owner.name + "," * (i < len(holders) - 1)
            wide, style = text_width(words, 11, bold=True), BOLD | DEAF
            if at + wide > x + room:
                self.text(f"who.{block}.{i}", at, base, "…", 11, **style)
                break
            ink = self.looks[owner.name].ink
            self.text(f"who.{block}.{i}", at, base, words, 11, fill=ink, **style)
            at += wide + 4

    def _words(
        self, block: int, holders: Sequence[Owner], touched: Sequence[str], room: float
    ) -> list[tuple[str, Style]]:
        """Three lines below a block; the first is empty where its holders stand there."""
        run, hash_ = self.run, self.now.hashes.get(block)
        first, second = "" if holders else "free", ""
        if hash_ is not None:
            first = first and fitting([KEPT, "still findable", "findable"], room)
            before = (run.hashed[hash_].parent or "root")[:DIGITS]
            second = fitting([f"{hash_[:DIGITS]} ← {before}", hash_[:DIGITS]], room)
        elif holders:
            filled = max(owner.filled for owner in holders)
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
        has_steps = len(self.view.facts) > 1
        kinds = {
            self.run.token_kind(self.step, name, position)
            for name, table in self.now.tables.items()
            for position in range(len(table) * self.run.block_size)
        }
        marks = {
            words: mark
            for words, (mark, is_there) in self._marks(kinds, has_steps).items()
            if is_there or has_steps
        }
        self.legend(MARGIN, self.view.floor + 6, marks)

    def _marks(self, kinds: set[str], has_steps: bool) -> dict[str, tuple[Mark, bool]]:
        """Words -> what they explain, and whether it is there, with slots of these `kinds`."""
        now, two = self.now, [*self.looks.values()][:2]
        several = any(
            sum(owner.filled > 0 for owner in holders) > 1 for holders in self.owners.values()
        )
        known = self.view.lines.chips != STRIPS[0] and (has_steps or "known" in kinds)
        reserved = "reserved" + " (grey word: known, not run)" * known
        touched: Style = {"fill": TOUCHED, "rx": 2, "stroke": QUIET, **DASHES}
        findable = [block in now.hashes for block in now.free]
        marks: dict[str, tuple[Mark, bool]] = {
            "K and V are there": (self.sample("cached", GREY), "cached" in kinds),
            "written in this step": (self.sample("written", GREY), "written" in kinds),
            reserved: (self.sample("reserved"), bool(kinds & {"known", "empty"})),
            "shared": (self.sample("solid", two[0], shared=two, stroke=INK), several),
            KEPT: (self.sample("kept", GREY), any(findable)),
            "free": (self.sample("free"), not all(findable)),
            TOUCH: (lambda name, box: self.rect(name, box, **touched), bool(now.touched)),
        }
        caches = self.run.prefix_caching
        never = {"" if caches else KEPT}
        if len(two) < 2 or not (caches or self.run.forks):
            never |= {"shared"}
        return {words: mark for words, mark in marks.items() if words not in never}


class SimpleBlockView(BlockView):
    """Pages at first sight: tokens in the pool, a line from each entry to its block.

    No hash, no reference count, no order of the free blocks.
    """

    title = "Pages: logical blocks, block tables, and the pool"
    limits = (16, SIMPLE_BLOCKS, 16)
    layouts, handy, tallest, apart = SIMPLE, TALLEST, 840.0, True
    logical, table = 252.0, 318.0
    letters = 11.5

    def _pool(self, top: float) -> Grid:
        """Blocks below each other, in one column or two."""
        columns = 1 if self.run.num_blocks <= ONE_COLUMN else 2
        self.left = 560.0 if columns == 1 else 470.0
        wide, tall = (WIDTH - self.left) / columns, self.lines.height(1) + 5
        return Grid(self.left, top, wide, tall, columns)

    def _queued(self) -> float:
        return 0.0

    def place(self, block: int) -> Box:
        """The place of a physical block. Numbers run down the first column, then the second."""
        column, line = divmod(block, -(-self.run.num_blocks // self.pool.columns))
        return self.pool.box(line * self.pool.columns + column)

    def scene(self, step: int) -> Sheet:
        """What the step left: tables on the left, the pool on the right, lines between them."""
        return _SimpleStep(self, step).drawn()


class _SimpleStep(_Step):
    """The simple picture of one step."""

    view: SimpleBlockView
    aside = ""

    def columns(self) -> Sequence[tuple[float, str]]:
        """Where each column begins, and what it is."""
        slots = counted(self.run.block_size, "slot")
        pool = f"the pool: {self.run.num_blocks} physical blocks of {slots}"
        logical = "logical blocks, in reading order"
        return (LEFT, logical), (self.view.table, "block table"), (self.view.left + 26, pool)

    def rest(self) -> None:
        """Nothing."""

    def parts_on_a_phone(self) -> list[list[Box]]:
        """Tables, and below them the pool, column by column."""
        view, top = self.view, self.view.top - 16
        tall, pool = view.floor - top - 12, view.pool
        lefts = [pool.x + i * pool.wide for i in range(pool.columns)]
        wide = min(pool.wide, view.logical + 86)
        return [[(0, top, view.table + 82, tall)], *([(x - 4, top, wide, tall)] for x in lefts)]

    def entry(self, name: str, look: Look, index: int, block: int, place: Box) -> Box:
        """An entry of a table, and the line to the block that it names."""
        box = super().entry(name, look, index, block, (*place[:2], ENTRY + 3, place[3]))
        x, y = box[0] + box[2] + 2, box[1] + box[3] / 2
        to = self.view.place(block)
        at, end = self.view.left - 6, (to[0] - 2, to[1] + box[3] / 2)
        middle = (x + at) / 2
        if to[0] == self.view.left:
            line = f"M{x} {y}C{middle} {y} {middle} {end[1]} {end[0]} {end[1]}"
        else:  # through the gap above the blocks of its line
            gap = to[1] - 5.5
            line = f"M{x} {y}C{middle} {y} {middle} {gap} {at} {gap}L{to[0] - 14} {gap}"
            line += f"Q{to[0] - 8} {gap} {end[0]} {end[1]}"
        style: Style = {"fill": "none", "stroke": look.colour, "stroke_width": 1.7}
        self.add(f"line.{index}.{name}", "path", d=line, **style, **DEAF)
        self.add(f"dot.{index}.{name}", "circle", cx=end[0], cy=end[1], r=3.2, fill=look.colour)
        return box

    def block(self, block: int) -> None:
        """A physical block: its number, its slots with their tokens, and whose it is."""
        holders, (x, y, wide, tall) = self.owners.get(block, []), self.view.place(block)
        base = self.view.lines.tall / 2 + 1.7
        self.text(f"number.{block}", x + 4, y + base, str(block), 12, **BOLD, **DEAF)
        room = min(self.view.logical, wide - 74)
        slots = self.view.lines.tokens((x + 26, y, room, tall))
        for offset in range(self.run.block_size):
            self._slot(block, offset, holders, slots.box(offset))
        at = x + 30 + room
        self._owners(block, holders, (at, y + base, x + wide - at - 4))
        if not holders:
            self.note(f"who.{block}", at, y + base, "free", self.view.letters)

    def _slot(self, block: int, offset: int, holders: Sequence[Owner], box: Box) -> None:
        """One slot: free, reserved, or with its token; a band for each holder if it is shared."""
        item = f"slot.{block * self.run.block_size + offset}"
        if not holders:
            self.cell(item, box, "free", tip=f"block {block}, {item.replace('.', ' ')}: free")
            return
        there = [owner for owner in holders if offset < owner.filled] or holders[:1]
        first = there[0]
        position = first.entry * self.run.block_size + offset
        shared = [self.looks[owner.name] for owner in there]
        self.token(item, first.name, position, box, known=False, shared=shared)

    def _marks(self, kinds: set[str], has_steps: bool) -> dict[str, tuple[Mark, bool]]:
        """Of the key: nothing marks a block that is touched."""
        marks = super()._marks(kinds, has_steps)
        del marks[TOUCH]
        return marks


def free_lines(free: Sequence[int], room: float) -> list[str]:
    """The order in which free blocks are taken, in lines that fit below the pool."""
    queue = ", ".join(map(str, free)) or "none: who needs one must wait, or somebody gives way"
    return wrapped(f"free blocks, in the order in which they go: {queue}", room, 11)


def shortened(touched: Sequence[str]) -> list[str]:
    """What happened to a block, in fewer and fewer words; what matters most stays longest."""
    if not touched:
        return [""]
    by_weight = sorted(
        touched, key=lambda words: min(EVENTS.index(w) for w in words.split() if w in EVENTS)
    )
    some = [
        ", ".join(words for words in touched if words in by_weight[:many])  # in the order of time
        for many in range(len(by_weight), 0, -1)
    ]
    first = by_weight[0].split()
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
    run = BlockRun.of(without_hashes(trace) if simple else trace, labels or {})
    if not 0 <= step <= run.last:
        raise ValueError(f"step {step} is outside 0 .. {run.last}")
    used = max(run.owners(step), default=0)
    if num_drawn is not None and (simple or not used < num_drawn <= run.num_blocks):
        raise ValueError(f"block {used} of {run.num_blocks} is in use, got num_drawn={num_drawn}")
    view = SimpleBlockView(run, [step]) if simple else BlockView(run, [step], num_drawn)
    is_told = sum(map(len, view.facts[step])) > LONG  # above the picture
    shown = run.caption(step, is_told)
    return view.scene(step).picture(run.caption(step), ZOOM, shown)
