"""Introduced in notebook 04. Left in the picture of pages: logical blocks, and the block tables.

A function of a run and a step; draws at places that were laid out for all steps.
"""

from dataclasses import dataclass
from typing import Any

from tutorial_engine.viz.block_facts import BlockRun
from tutorial_engine.viz.request_look import Box, Look, cut_to, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE

WIDTH, LEFT, TABLE, POOL = 1000.0, 56.0, 372.0, 500.0  # the canvas; where the three parts begin
LOGICAL, ENTRY = 304.0, 32.0  # widths: logical blocks, a table entry
BOLD: dict[str, Any] = {"font_weight": "bold"}
FAINT: dict[str, Any] = {"fill": QUIET}
CENTRE: dict[str, Any] = {"text_anchor": "middle"}
RIGHT: dict[str, Any] = {"text_anchor": "end"}
DEAF: dict[str, Any] = {"pointer_events": "none"}  # hovering reaches what lies below
THICK: dict[str, Any] = {"stroke": INK, "stroke_width": 2.6}  # what this step wrote


def said(tip: str) -> str:
    """What hovering says, on the one line that there is for it."""
    return cut_to(tip, WIDTH - 20, 13, keep=True)


@dataclass(frozen=True)
class Grid:
    """How logical blocks are laid out: `chips` tokens in a line of that height, in pixels."""

    size: int
    chips: int
    line: float

    @property
    def in_line(self) -> int:
        """Blocks side by side."""
        return max(self.chips // self.size, 1)

    @property
    def lines(self) -> int:
        """Lines that one block takes."""
        return -(-self.size // self.chips)

    def height(self, num_blocks: int) -> float:
        """Pixels that so many blocks of one request take."""
        return -(-num_blocks // self.in_line) * self.lines * self.line

    def corner(self, index: int) -> tuple[float, float]:
        """Where a block begins, from the request's own corner."""
        row, column = divmod(index, self.in_line)
        return column * LOGICAL / self.in_line, row * self.lines * self.line

    def chip(self, offset: int) -> Box:
        """The box of a token, from the corner of its block."""
        row, column = divmod(offset, min(self.size, self.chips))
        wide = (LOGICAL / self.in_line - 5) / min(self.size, self.chips)
        return column * wide, row * self.line, wide - 2.5, self.line - 5


def draw_request(
    scene: Scene, run: BlockRun, one: Look, step: int, name: str, top: float, grid: Grid
) -> None:
    """A request's letter, its logical blocks, and its table beside them."""
    now = run.steps[step]
    size = 17.0 if text_width(name, 17, bold=True) <= LEFT - 18 else 11.0
    words = cut_to(name, LEFT - 18, size, bold=True)
    scene.text(f"request.{name}", 12, top + 16, words, size, fill=one.colour, **BOLD)
    table = now.tables.get(name, ())
    for index, block in enumerate(table):
        x, y = grid.corner(index)
        corner = (LEFT + x, top + y)
        if grid.in_line > 1 or grid.lines > 1:
            box = (corner[0] - 2.5, corner[1] - 2, LOGICAL / grid.in_line - 2.5, 0.0)
            frame = (*box[:3], grid.lines * grid.line - 1)
            scene.rect(f"frame.{index}.{name}", frame, "none", rx=4, stroke=RULE)
        for offset in range(run.block_size):
            _chip(scene, run, one, step, name, index * run.block_size + offset, corner, grid)
        _entry(scene, run, one, (step, name, index, block), top, grid)
    if not table:
        scene.text(f"note.{name}", LEFT, top + 15, _note(run, step, name), 11, **FAINT)
    elif name in now.state.waiting:
        y = top + grid.height(len(table)) + 10
        scene.text(f"note.{name}", LEFT, y, f"waits {run.waits(step, name)}", 11, **FAINT)


def _note(run: BlockRun, step: int, name: str) -> str:
    """What is said of a request without blocks."""
    now = run.steps[step]
    if name in now.ended:
        return f"is over ({now.ended[name]}) and has no blocks"
    if name in now.state.requests:
        return f"waits {run.waits(step, name)}"
    return "is not here yet"


def _chip(
    scene: Scene,
    run: BlockRun,
    one: Look,
    step: int,
    name: str,
    position: int,
    corner: tuple[float, float],
    grid: Grid,
) -> None:
    """One token, or the place of one, in its logical block."""
    x, y, w, h = grid.chip(position % run.block_size)
    box = (corner[0] + x, corner[1] + y, w, h)
    kind = run.token_kind(step, name, position)
    tip = said(run.about_token(step, name, position))
    draw_slot(scene, f"token.{position}.{name}", box, kind, one, tip)
    if kind != "empty":
        token = run.steps[step].state.requests[name].token_ids[position]
        words = cut_to(run.label(token), w - 3, 10.5)
        style = {**CENTRE, **DEAF, **(FAINT if kind == "known" else {})}
        base = box[1] + h / 2 + 3.8
        scene.text(f"word.{position}.{name}", box[0] + w / 2, base, words, 10.5, **style)


def draw_slot(scene: Scene, name: str, box: Box, kind: str, one: Look, tip: str = "") -> None:
    """A slot that somebody has. Filled = K and V are there; thick = now; hatched = reserved."""
    if kind in ("known", "empty"):
        scene.rect(name, box, HATCHED, tip, rx=2, stroke=RULE)
    else:
        edge = THICK if kind == "run" else {"stroke": one.colour}
        scene.rect(name, box, one.dark if kind == "run" else one.light, tip, rx=2, **edge)


def _entry(
    scene: Scene,
    run: BlockRun,
    one: Look,
    which: tuple[int, str, int, int],
    top: float,
    grid: Grid,
) -> None:
    """An entry of a table: the block's number, and how full it is where there is room."""
    step, name, index, block = which
    row, column = divmod(index, grid.in_line)
    pitch = (POOL - TABLE - 12) / grid.in_line
    x, y = TABLE + column * pitch, top + row * grid.lines * grid.line
    box = (x, y, min(ENTRY, pitch - 3), grid.line - 5)
    held = min(max(run.steps[step].held[name] - index * run.block_size, 0), run.block_size)
    first = index * run.block_size
    tip = said(
        f"{name}, entry {index} of its table: positions {first}–{first + run.block_size - 1} are "
        f"in block {block}, slots {block * run.block_size}–{(block + 1) * run.block_size - 1}; "
        f"{held} of {run.block_size} filled"
    )
    scene.rect(f"entry.{index}.{name}", box, PAPER, tip, rx=3, stroke=one.colour, stroke_width=1.6)
    middle, base = box[0] + box[2] / 2, box[1] + box[3] / 2 + 4
    size = 11.0 if box[2] >= 24 else 10.0
    scene.text(f"block.{index}.{name}", middle, base, str(block), size, **CENTRE, **DEAF, **BOLD)
    words = f"{held}/{run.block_size}"
    if box[2] + 6 + text_width(words, 10.5) <= pitch:
        scene.text(f"fill.{index}.{name}", box[0] + box[2] + 5, base, words, 10.5, **FAINT)
