"""Pages at first sight: tokens in the pool, a line from entry to block.

The simple twin of the picture in block_view: no hash, no reference count, no order of the free
blocks. Knows what is laid out where; what there is to say comes from block_facts.
"""

import textwrap
from collections.abc import Sequence
from typing import Protocol

from tutorial_engine.viz.block_facts import BlockRun, Owner
from tutorial_engine.viz.parts import (
    BOLD,
    DEAF,
    FAINT,
    MARGIN,
    THICK,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.request_look import Box, Look, cut_to, look, text_width

TITLE = "Pages: logical blocks, block tables, and the pool"
MAX_BLOCKS, MAX_SIZE = 32, 16  # what can still be read
TALLEST, MOST = 660.0, 840.0  # pixels of the tables, and where the smallest lines take more
IN_LINE = 8  # tokens side by side at most
NOTE = 60  # letters of a line beside a request's name
LEFT, TOKENS, ENTRY = 52.0, 248.0, 34.0  # where logical blocks begin; widths: blocks, table entries
TABLE = LEFT + TOKENS + 14
ONE_COLUMN = 16  # blocks of a pool that stand below each other
LINES = (24.0, 20.0, 17.0)  # heights of a line of tokens: the best that fits
APART, GAP, LETTERS = 4.0, 12.0, 11.5  # between two blocks, and two requests; of a token
STATES = {"cached": "cached", "run": "written", "known": "reserved", "empty": "reserved"}


class SimpleBlockView:
    """Draws steps of one run at the same places: those that are given, or all of it.

    ValueError, saying what fits, for more than a picture has room for.
    """

    title = TITLE

    def __init__(self, run: BlockRun, steps: Sequence[int] | None = None) -> None:
        self.run, self.num_drawn = run, run.num_blocks
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.names)}
        size, blocks = run.block_size, run.num_blocks
        shown = range(run.last + 1) if steps is None else steps
        here = {
            name: max(1, *(len(run.steps[step].tables.get(name, ())) for step in shown))
            for name in run.families
            if any(run.is_shown(name, step) for step in shown)
        }
        entries, lines = sum(here.values()), -(-size // IN_LINE)
        gaps = GAP * len(here)
        tall = {line: entries * (lines * line + APART) + gaps for line in LINES}
        fits = [line for line in LINES if tall[line] <= (MOST if line == LINES[-1] else TALLEST)]
        if blocks > MAX_BLOCKS or size > MAX_SIZE or not fits:
            raise ValueError(
                f"{blocks} blocks of {size} tokens, and block tables with {entries} entries in "
                f"all: the simple picture has room for {MAX_BLOCKS} blocks of up to {MAX_SIZE} "
                f"tokens, and for {int((MOST - gaps) // (lines * LINES[-1] + APART))} such entries"
            )
        self.line = fits[0]  # pixels
        self.tall = lines * self.line  # of a block
        self.facts = {step: textwrap.wrap("; ".join(run.steps[step].facts), 142) for step in shown}
        self.top = 60.0 + 16 * max(1, *(len(lines) for lines in self.facts.values()))
        self.tops: dict[str, float] = {}
        y = self.top + 14
        for name, many in here.items():
            self.tops[name] = y
            y += many * (self.tall + APART) + GAP
        self.columns = 1 if blocks <= ONE_COLUMN else 2
        left = 560.0 if self.columns == 1 else 470.0
        wide = (WIDTH - left) / self.columns
        self.pool = Grid(left, self.top + 14, wide, self.tall + APART + 4, self.columns)
        self.floor = max(y, self.pool.y + self.pool.height(blocks)) + 16

    def place(self, block: int) -> Box:
        """The place of a physical block: of its number, its slots, and who has it.

        Numbers run down the first column, then down the second.
        """
        column, line = divmod(block, -(-self.run.num_blocks // self.columns))
        return self.pool.box(line * self.columns + column)

    def slots(self, box: Box, wide: float) -> Grid:
        """Places of a block's tokens, so many pixels wide in all, from the corner of the box on."""
        columns = min(self.run.block_size, IN_LINE)
        return Grid(box[0], box[1], wide / columns, self.line, columns, (2.5, 3))

    def scene(self, step: int) -> Sheet:
        """What the step left: tables on the left, the pool on the right, lines between them."""
        return _Step(self, step, 28).drawn()


class View(Protocol):
    """A view of a run on pages: its words, and the places that all its steps share."""

    run: BlockRun
    num_drawn: int  # blocks of the pool, from 0 on
    title: str
    looks: dict[str, Look]
    facts: dict[int, list[str]]
    tops: dict[str, float]  # of each request
    top: float
    floor: float


class StepSheet(Sheet):
    """One step of a view; `low` pixels below its floor there is room for a tip.

    A subclass draws requests, blocks, what else there is, and a key.
    """

    view: View

    @property
    def aside(self) -> str:
        """Beside the number of the step: nothing."""
        return ""

    def __init__(self, view: View, step: int, low: float) -> None:
        super().__init__(WIDTH, view.floor + low + 8, (MARGIN, view.floor + low))
        self.hint = "hover over a token, a table entry or a block to read its numbers"
        self.view, self.run, self.looks = view, view.run, view.looks
        self.step, self.now = step, view.run.steps[step]
        self.owners = view.run.owners(step)

    def drawn(self) -> Sheet:
        """The whole picture: which step it is and what came to pass, then all its parts."""
        view = self.view
        self.heading(view.title, f"step {self.step} of 0–{self.run.last}{self.aside}")
        for i, line in enumerate(view.facts[self.step] or ["no block changes hands"]):
            self.note(f"fact.{i}", MARGIN, 42 + 16 * i, line, 12)
        for x, words in self.columns():
            self.note(f"column.{x:.0f}", x, view.top, words, 12)
        for name, top in view.tops.items():
            self.request(name, top)
        for block in range(self.view.num_drawn):
            self.block(block)
        self.rest()
        self.key()
        self.parts = self.parts_on_a_phone()
        return self

    def parts_on_a_phone(self) -> list[list[Box]]:
        """What a narrow screen shows, one below the other."""
        raise NotImplementedError

    def columns(self) -> Sequence[tuple[float, str]]:
        """Where each column begins, and what it is."""
        raise NotImplementedError

    def request(self, name: str, top: float) -> None:
        """A request, from that height on."""
        raise NotImplementedError

    def block(self, block: int) -> None:
        """A physical block."""
        raise NotImplementedError

    def rest(self) -> None:
        """What is drawn over requests and blocks: nothing."""

    def key(self) -> None:
        """What fills and outlines mean."""
        raise NotImplementedError


class _Step(StepSheet):
    """The simple picture of one step."""

    view: SimpleBlockView

    def parts_on_a_phone(self) -> list[list[Box]]:
        """Tables, and below them the pool, column by column."""
        view, top = self.view, self.view.top - 16
        tall, pool = view.floor - top - 12, view.pool
        wide, ends = min(pool.wide, TOKENS + 90), pool.x + pool.wide * view.columns
        lefts = [pool.x + i * pool.wide - 4 for i in range(view.columns)]
        return [
            [(0, top, TABLE + 82, tall)],
            *([(x, top, min(wide, ends - x), tall)] for x in lefts),
        ]

    def columns(self) -> Sequence[tuple[float, str]]:
        """Where each column begins, and what it is."""
        pool = f"the pool: {self.run.num_blocks} physical blocks of {self.run.block_size} slots"
        return (
            (LEFT, "logical blocks, in reading order"),
            (TABLE, "block table"),
            (self.view.pool.x + 26, pool),
        )

    # -- left: a request

    def request(self, name: str, top: float) -> None:
        """A request's letter, its tokens block by block, and its table with a line from each."""
        one, table = self.looks[name], self.now.tables.get(name, ())
        words = cut_to(name, LEFT - 18, 15, bold=True)
        self.text(f"request.{name}", 12, top + 16, words, 15, fill=one.ink, **BOLD)
        if not table:
            for i, line in enumerate(textwrap.wrap(self.run.why_idle(self.step, name), NOTE)):
                self.note(f"note.{name}" + f".{i}" * bool(i), LEFT, top + 15 * (i + 1), line)
        for index, block in enumerate(table):
            y = top + index * (self.view.tall + APART)
            places = self.view.slots((LEFT, y, 0, 0), TOKENS)
            for offset in range(self.run.block_size):
                position = index * self.run.block_size + offset
                self._token(f"{position}.{name}", name, position, places.box(offset))
            self._entry(name, one, index, block, (TABLE, y, ENTRY, self.view.line - 3))

    def _token(self, item: str, name: str, position: int, box: Box, pool: bool = False) -> None:
        """One token, or the place of one: `item` names the drawing."""
        kind, what = self.run.token_kind(self.step, name, position), "slot" if pool else "token"
        tip = cut_to(self.run.about_token(self.step, name, position), WIDTH - 20, 13, keep=True)
        self.cell(f"{what}.{item}", box, STATES[kind], self.looks[name], tip)
        if kind in ("cached", "run") or (kind == "known" and not pool):
            token = self.now.state.requests[name].token_ids[position]
            words = cut_to(self.run.label(token), box[2] - 3, LETTERS)
            style = FAINT if kind == "known" else {}
            self.inside(f"{what}.{item}.word", box, words, LETTERS, **style)

    def _entry(self, name: str, one: Look, index: int, block: int, box: Box) -> None:
        """An entry of a table, and the line to the block that it names."""
        size = self.run.block_size
        positions = f"{index * size}–{(index + 1) * size - 1}"
        tip = f"entry {index} of {name}'s table: positions {positions} are in block {block}"
        self.cell(f"entry.{index}.{name}", box, "free", tip=tip, stroke=one.colour, rx=3)
        self.inside(f"block.{index}.{name}", box, str(block), 12, **BOLD)
        x, y = box[0] + box[2] + 2, box[1] + box[3] / 2
        to = self.view.place(block)
        at, end = self.view.pool.x - 6, (to[0] - 2, to[1] + self.view.line / 2 - 1.5)
        middle = (x + at) / 2
        if to[0] == self.view.pool.x:
            line = f"M{x} {y}C{middle} {y} {middle} {end[1]} {end[0]} {end[1]}"
        else:  # through the gap above the blocks of its line
            gap = to[1] - 5.5
            line = f"M{x} {y}C{middle} {y} {middle} {gap} {at} {gap}L{to[0] - 14} {gap}"
            line += f"Q{to[0] - 8} {gap} {end[0]} {end[1]}"
        style: Style = {"fill": "none", "stroke": one.colour, "stroke_width": 1.7}
        self.add(f"line.{index}.{name}", "path", d=line, **style, **DEAF)
        self.add(f"dot.{index}.{name}", "circle", cx=end[0], cy=end[1], r=3.2, fill=one.colour)

    # -- right: a block of the pool

    def block(self, block: int) -> None:
        """A physical block: its number, its slots with their tokens, and whose it is."""
        own, box = self.owners.get(block, []), self.view.place(block)
        x, y, wide, _ = box
        base = self.view.line / 2 + 2.7
        self.text(f"number.{block}", x + 4, y + base, str(block), 12, **BOLD, **DEAF)
        room = TOKENS if self.view.columns == 1 else wide - 74
        slots = self.view.slots((x + 26, y, 0, 0), room)
        for offset in range(self.run.block_size):
            self._slot(block, offset, own, slots.box(offset))
        at = x + 26 + room + 6
        for i, owner in enumerate(own):
            words = cut_to(owner.name, x + wide - at - 4, LETTERS, bold=True)
            ink = self.looks[owner.name].ink
            self.text(f"who.{block}.{i}", at, y + base, words, LETTERS, fill=ink, **BOLD, **DEAF)
            at += text_width(words, LETTERS, bold=True) + 6
        if not own:
            self.note(f"who.{block}", at, y + base, "free", LETTERS)

    def _slot(self, block: int, offset: int, own: Sequence[Owner], box: Box) -> None:
        """One slot: free, reserved, or with its token; a band for each holder if it is shared."""
        number = block * self.run.block_size + offset
        if not own:
            self.cell(f"slot.{number}", box, "free", tip=f"block {block}, slot {number}: free")
            return
        there = [one for one in own if offset < one.filled] or own[:1]
        first = there[0]
        self._token(f"{number}", first.name, first.entry * self.run.block_size + offset, box, True)
        if len(there) > 1:
            item, word = f"slot.{number}.shared", self.items.pop(f"slot.{number}.word")
            self.shared_cell(item, box, [self.looks[one.name].light for one in there])
            self.items[f"slot.{number}.word"] = word  # on top of the bands

    def key(self) -> None:
        """What fills and outlines mean."""
        one = next(iter(self.looks.values()))
        marks: dict[str, Mark] = {
            "K and V are there": self.sample("cached", one),
            "written in this step": self.sample("written", one, **THICK),
            "reserved, not written yet (grey word: known, not run)": self.sample("reserved"),
            "free": self.sample("free"),
        }
        self.legend(MARGIN, self.view.floor + 4, marks)
