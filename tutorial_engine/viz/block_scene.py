"""Introduced in notebook 04. The picture of pages: logical blocks, block tables, and the pool.

Knows what is laid out where; what there is to say comes from block_facts.
"""

import textwrap
from collections.abc import Mapping, Sequence

from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.block_facts import BlockRun
from tutorial_engine.viz.block_panels import (
    BOLD,
    FAINT,
    LEFT,
    POOL,
    TABLE,
    WIDTH,
    Grid,
    draw_request,
    draw_slot,
)
from tutorial_engine.viz.block_pool import TOUCHED, Shelf, draw_pool, draw_shared
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Look, cut_to, look, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import PAPER, RULE

TITLE = "Pages: who owns which block"
MAX_REQUESTS, MAX_BLOCKS, MAX_SIZE = 6, 64, 16  # what can still be read
TALLEST = 640.0  # of the logical blocks, in pixels
LAYOUTS = ((4, 27.0), (4, 23.0), (8, 23.0), (8, 20.0))  # tokens in a line, its height: best first
GAP = 14.0  # between two requests
ZOOM = 1.0  # of a PNG
KEYS = {
    "cached": "K and V are there",
    "run": "written in this step",
    "known": "reserved (grey word: known, not run)",
}


class BlockView:
    """Draws steps of one run at the same places: those that are given, or all of it.

    ValueError, saying what fits, for more than a picture has room for.
    """

    def __init__(self, run: BlockRun, steps: Sequence[int] | None = None, title: str = TITLE):
        self.run, self.title = run, title
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.names)}
        shown = range(run.last + 1) if steps is None else steps
        here = {
            name: max(len(run.steps[step].tables.get(name, ())) for step in shown)
            for name in self._families()
            if any(self._is_shown(name, step) for step in shown)
        }
        self._check(len(here))
        self.facts = {step: textwrap.wrap("; ".join(run.steps[step].facts), 142) for step in shown}
        self.top = 56.0 + 16 * max(1, *(len(lines) for lines in self.facts.values()))
        self.grid, heights = self._grid(here, [run.steps[step].state.waiting for step in shown])
        self.tops: dict[str, float] = {}
        y = self.top + 20
        for name, height in zip(here, heights, strict=True):
            self.tops[name] = y
            y += height + GAP
        self.shelf = Shelf(run.num_blocks, run.block_size, self.top + 18)
        self.floor = max(y, self.shelf.bottom + 10 + 15 * len(_queue(range(run.num_blocks)))) + 14

    def _families(self) -> list[str]:
        """Requests as they came, each followed by those that were forked from it."""
        children: dict[str, list[str]] = {}
        for child, parent in self.run.forks.items():
            children.setdefault(parent, []).append(child)
        found: list[str] = []
        for name in self.run.names:
            if name not in self.run.forks:
                found += [name, *children.get(name, [])]
        return found

    def _is_shown(self, name: str, step: int) -> bool:
        """Is it there after the step, or did it end in it?"""
        now = self.run.steps[step]
        before = self.run.steps[step - 1].ended if step else {}
        there = name in now.state.waiting or name in now.state.running
        return there or (name in now.ended and name not in before)

    def _check(self, requests: int) -> None:
        size, blocks = self.run.block_size, self.run.num_blocks
        if requests > MAX_REQUESTS or size > MAX_SIZE or blocks > MAX_BLOCKS:
            raise ValueError(
                f"{requests} requests, {blocks} blocks of {size} tokens: this picture has room for "
                f"{MAX_REQUESTS} requests, {MAX_BLOCKS} blocks and blocks of {MAX_SIZE} tokens"
            )

    def _grid(
        self, here: Mapping[str, int], waiting: Sequence[Sequence[str]]
    ) -> tuple[Grid, list[float]]:
        """The widest layout in which all tables are seen, and the height of each request."""
        noted = {name for names in waiting for name in names}
        for chips, line in LAYOUTS:
            grid = Grid(self.run.block_size, chips, line)
            heights = [
                max(grid.height(many), 22) + 14 * (name in noted and many > 0)
                for name, many in here.items()
            ]
            if sum(heights) + GAP * len(heights) <= TALLEST:
                return grid, heights
        fit = int((TALLEST / len(here) - GAP) // grid.line) // grid.lines * grid.in_line
        raise ValueError(
            f"the longest block table has {max(here.values())} entries: with {len(here)} requests "
            f"this picture has room for up to {fit} each, of {self.run.block_size} tokens"
        )

    def scene(self, step: int) -> Scene:
        """What the step left: tables on the left, the pool on the right."""
        run, now = self.run, self.run.steps[step]
        scene = Scene(WIDTH, self.floor + 38, tip_at=(10, self.floor + 30))
        scene.hint = "hover over a token, a table entry or a block to read its numbers"
        scene.text("title", 10, 22, cut_to(self.title, 620, 15, bold=True, keep=True), 15, **BOLD)
        caching = "on" if run.prefix_caching else "off"
        said = f"step {step} of 0–{run.last} · prefix caching {caching}"
        scene.text("step", WIDTH - 10, 22, said, 12, text_anchor="end", **FAINT)
        for i, line in enumerate(self.facts[step] or ["no block changes hands"]):
            scene.text(f"fact.{i}", 10, 42 + 16 * i, line, 12, **FAINT)
        scene.text("logical", LEFT, self.top, "logical blocks", 11, **FAINT)
        scene.text("tables", TABLE, self.top, "block tables", 11, **FAINT)
        pool = f"pool: {run.num_blocks} physical blocks of {run.block_size}"
        scene.text("pool", POOL, self.top, pool, 11, **FAINT)
        chain = "71b9 ← 98ac: hash ← hash of the block before"
        chain = chain if self.shelf.columns < 8 else "71b9: hash of all tokens so far"
        if run.prefix_caching:
            scene.text("chain", WIDTH - 10, self.top, chain, 11, text_anchor="end", **FAINT)
        for name, top in self.tops.items():
            draw_request(scene, run, self.looks[name], step, name, top, self.grid)
        draw_pool(scene, run, self.looks, step, self.shelf)
        for i, line in enumerate(_queue(now.free)):
            scene.text(f"free.{i}", POOL, self.shelf.bottom + 10 + 15 * i, line, 11)
        self._key(scene)
        return scene

    def _key(self, scene: Scene) -> None:
        """What fills and outlines mean."""
        x, y, looks = 10.0, self.floor + 6, list(self.looks.values())
        for kind, words in KEYS.items():
            draw_slot(scene, f"key.{kind}", (x, y - 11, 18, 14), kind, looks[0])
            scene.text(f"key.{kind}1", x + 24, y, words, 11, **FAINT)
            x += 40 + text_width(words, 11)
        if len(looks) > 1:
            draw_shared(scene, "key.shared", (x, y - 11, 18, 14), [one.dark for one in looks[:2]])
            scene.text("key.shared1", x + 24, y, "shared", 11, **FAINT)
            x += 40 + text_width("shared", 11)
        for kind, fill, words in (
            ("free", PAPER, "free"),
            ("touched", TOUCHED, "block touched in this step"),
        ):
            scene.rect(f"key.{kind}", (x, y - 11, 18, 14), fill, rx=2, stroke=RULE)
            scene.text(f"key.{kind}1", x + 24, y, words, 11, **FAINT)
            x += 40 + text_width(words, 11)


def _queue(free: Sequence[int]) -> list[str]:
    """The order in which free blocks are taken, in lines that fit below the pool."""
    queue = ", ".join(map(str, free)) or "none: who needs one must wait, or somebody gives way"
    return textwrap.wrap(f"free blocks, in the order in which they go: {queue}", 76)


def block_view(
    trace: Trace, step: int, labels: Mapping[int, str] | None = None, title: str = TITLE
) -> Picture:
    """Who owns which block after a step (from 0) of a recorded run on pages.

    `labels`: token id -> its text; a number is written where there is none. ValueError for another
    memory, a step that there is not, and more than a picture has room for.
    """
    run = BlockRun(trace, labels or {})
    if not 0 <= step <= run.last:
        raise ValueError(f"step {step} is outside 0 .. {run.last}")
    return BlockView(run, [step], title).scene(step).picture(run.caption(step), ZOOM)
