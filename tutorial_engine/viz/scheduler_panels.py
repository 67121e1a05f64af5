"""Introduced in notebook 03. Four views of one step: budget, cache rows, queues, tokens.

Each is a function of a run and a step, and draws at a given height; knows no widget.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tutorial_engine.viz.request_look import Box, Look, cut_to, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE

WIDTH, LEFT = 1000.0, 44.0  # the canvas, and where rows begin
ROWS_X, QUEUES_X, QUEUE = 78.0, 600.0, 27.0  # cache rows, queues, the height of a queue's line
MAX_CELLS = 128  # of the budget bar
LINE, SIZE = 24.0, 10.5  # a line of tokens, their font
BOLD: dict[str, Any] = {"font_weight": "bold"}
FAINT: dict[str, Any] = {"fill": QUIET}
CENTRE: dict[str, Any] = {"text_anchor": "middle"}
RIGHT: dict[str, Any] = {"text_anchor": "end"}
DEAF: dict[str, Any] = {"pointer_events": "none"}  # hovering reaches what lies below
THICK: dict[str, Any] = {"stroke": INK, "stroke_width": 2.6}  # what this step runs and writes
Looks = Mapping[str, Look]


# -- the budget -----------------------------------------------------------------------------------


def budget_lines(run: SchedulerRun) -> tuple[int, int]:
    """Lines of the budget bar, and cells in a line."""
    cells = min(run.budget, MAX_CELLS)
    in_line = 32 if cells <= 64 else 64
    return -(-cells // in_line), in_line


def draw_budget(scene: Scene, run: SchedulerRun, looks: Looks, step: int, top: float) -> None:
    """One cell per token that the step may run, filled by those that it does run."""
    now, (lines, in_line) = run.steps[step], budget_lines(run)
    scene.text("budget", 10, top, f"budget in step {step}", 12, **BOLD)
    cells = min(run.budget, MAX_CELLS)
    width = min(30.0, 536 / min(cells, in_line))
    owners = [name for name, event in now.scheduled.items() for _ in event.slots]
    for i in range(cells):
        box = (10 + i % in_line * width, top + 10 + 26 * (i // in_line), width - 2, 22.0)
        if i >= len(owners):
            scene.rect(f"budget{i}", box, PAPER, "free: nobody needs it", rx=2, stroke=RULE)
            continue
        one, share, who = looks[owners[i]], run.share(owners[i], step), owners[i]
        fill = one.dark if share is not None and share.kind == "decode" else one.light
        scene.rect(f"budget{i}", box, fill, run.ran(who, step), rx=2, stroke=one.colour)
        if width >= 14 or i == owners.index(who):
            middle, base = box[0] + box[2] / 2, box[1] + 15
            size = SIZE if width >= 14 else 9.0
            scene.text(f"budget{i}.who", middle, base, who, size, **CENTRE, **DEAF)
    parts = " + ".join(f"{name} {len(event.slots)}" for name, event in now.scheduled.items())
    said = f"{parts} = {now.num_tokens} of {run.budget} tokens"
    said += f" · {run.budget - cells} more are not drawn" * (cells < run.budget)
    scene.text("budget.sum", 10, top + 24 + 26 * lines, said, 11, **FAINT)


# -- the cache ------------------------------------------------------------------------------------


def draw_cache(scene: Scene, run: SchedulerRun, looks: Looks, step: int, top: float) -> None:
    """The rows of the static cache: whose they are, what is filled, what this step writes."""
    now = run.steps[step]
    holders = {r.table[0]: name for name, r in now.planned.requests.items() if r.table}
    words = f"cache: {run.max_num_seqs} row{'s' * (run.max_num_seqs > 1)} of {run.max_len} slots"
    scene.text("slots", 10, top, words, 12, **BOLD)
    key = "thick = written now · hatched = reserved, empty"
    scene.text("slots.key", 546, top, key, SIZE, **RIGHT, **FAINT)
    width = min(18.0, 392 / run.max_len)
    for row in range(run.max_num_seqs):
        y = top + 10 + 22 * row
        scene.text(f"row{row}", 10, y + 12, f"row {row}", SIZE, **FAINT)
        said = "free"
        if row in holders:
            said = _row(scene, run, looks[holders[row]], step, holders[row], (row, y, width))
        else:
            box = (ROWS_X, y, width * run.max_len, 16.0)
            scene.rect(f"row{row}.free", box, PAPER, f"row {row} is nobody's", stroke=RULE)
        scene.text(f"row{row}.n", ROWS_X + 8 + width * run.max_len, y + 12, said, SIZE, **FAINT)


def _row(
    scene: Scene, run: SchedulerRun, one: Look, step: int, who: str, at: tuple[int, float, float]
) -> str:
    """A row that somebody has, slot by slot → how full it is."""
    (row, y, width), now = at, run.steps[step]
    event, base = now.scheduled.get(who), row * run.max_len
    new = event.slots if event else ()
    slots = (*now.planned.requests[who].slots, *new)
    scene.text(f"row{row}.who", 56, y + 13, who, 13, fill=one.colour, **BOLD)
    used = len(slots)
    old = used - len(new)
    for i, slot in enumerate(slots):
        box = (ROWS_X + (slot - base) * width, y, width, 16.0)
        tip = f"slot {slot}: K and V of token {i} of {who}, “{run.label(who, i)}”"
        fill = one.light if i < old else one.dark
        scene.rect(f"slot{slot}", box, fill, tip, stroke=one.colour, stroke_width=0.8)
    if used < run.max_len:
        x, tip = ROWS_X + used * width, f"slots {base + used} to {base + run.max_len - 1}: "
        box = (x, y, (run.max_len - used) * width, 16.0)
        tip += f"reserved for {who}, empty"
        scene.rect(f"row{row}.empty", box, HATCHED, tip, stroke=RULE, stroke_width=0.8)
        ticks = "".join(f"M{ROWS_X + i * width:.1f} {y}v16" for i in range(used + 1, run.max_len))
        scene.add(f"row{row}.ticks", "path", d=ticks, stroke=RULE, stroke_width=0.8, **DEAF)
    if new:
        box = (ROWS_X + (new[0] - base) * width, y, len(new) * width, 16.0)
        scene.rect(f"row{row}.new", box, "none", **THICK, **DEAF)
    return f"{used} of {run.max_len}" + ", then free" * (who in run.ended(step))


# -- the queues -----------------------------------------------------------------------------------


def fact_lines(run: SchedulerRun, step: int) -> list[str]:
    """Why requests wait or stall, and who is done, in lines that fit beside the cache."""
    return [line for fact in run.facts(step) for line in textwrap.wrap(fact, 60)]


def draw_queues(scene: Scene, run: SchedulerRun, looks: Looks, step: int, top: float) -> None:
    """Who runs, waits, is over or still to come, and why; time to first token."""
    now, x = run.steps[step], QUEUES_X
    scene.text("queues", x, top, f"queues in step {step}", 12, **BOLD)
    queues: tuple[tuple[str, str, Sequence[tuple[str, str]]], ...] = (
        ("running", "", [(name, "") for name in now.planned.running]),
        ("waiting", "to run", [(n, str(run.to_run(n, step))) for n in now.planned.waiting]),
        ("finished", "", [(name, "") for name in run.over(step)]),
        ("to come", "", [(name, f"before {run.came(name)}") for name in run.to_come(step)]),
    )
    for i, (queue, note, entries) in enumerate(queues):
        base, at = top + 26 + QUEUE * i, x + 64
        scene.text(f"queue.{queue}", x, base, queue, 11, **FAINT)
        for who, number in entries:
            one, name = looks[who], f"queue.{queue}.{who}"
            fill = {"running": one.dark, "waiting": one.light}.get(queue, PAPER)
            scene.rect(name, (at, base - 14.5, 23, 20), fill, rx=3, stroke=one.colour)
            scene.text(f"{name}.who", at + 11.5, base, who, 11.5, **CENTRE, **DEAF, **BOLD)
            if number:
                scene.text(f"{name}.n", at + 27, base, number, SIZE)
            at += 32 + (text_width(number, SIZE) + 4 if number else 0)
        if note and entries:
            scene.text(f"queue.{queue}.note", at + 2, base, note, 10, **FAINT)
        if not entries:
            scene.text(f"queue.{queue}.none", at, base, "–", 11, **FAINT)
    base = top + 26 + QUEUE * 4
    scene.text("ttft", x, base, "TTFT in steps", 11, **BOLD)
    times = ((name, run.ttft(name, step)) for name in now.planned.requests)
    said = " · ".join(f"{name} {'–' if n is None else n}" for name, n in times)
    scene.text("ttft.n", x + 98, base, said, 11)
    for i, line in enumerate(fact_lines(run, step)):
        scene.text(f"fact{i}", x, base + 22 + 16 * i, line, 11.5)


# -- the tokens -----------------------------------------------------------------------------------


class Chip(NamedTuple):
    """Where a token is written: line, x, width, and the label as it fits."""

    line: int
    x: float
    width: float
    words: str


def lay_tokens(run: SchedulerRun) -> dict[str, list[Chip]]:
    """Places for all tokens that the requests will ever have: stepping moves none."""
    found = {}
    for name, ids in run.tokens.items():
        line, x, chips = 0, LEFT, list[Chip]()
        for i in range(len(ids)):
            words = cut_to(run.label(name, i), 90, SIZE, bold=True)
            width = max(16.0, text_width(words, SIZE, bold=True) + 8)
            if x + width > WIDTH - 10:
                line, x = line + 1, LEFT
            chips.append(Chip(line, x, width, words))
            x += width + (9 if i == run.lives[name].num_prompt_tokens - 1 else 3)
        found[name] = chips
    return found


TOKEN_KINDS = {  # kind -> in the key, in tips
    "cached": ("in the cache", "its K and V are in the cache"),
    "run": ("runs in this step", "runs in this step, which writes its K and V"),
    "known": ("not run yet", "not run yet"),
    "sampled": ("new from this step", "sampled by this step, not run yet"),
    "gone": ("finished, row freed", "its request is over"),
}


def draw_tokens(
    scene: Scene,
    run: SchedulerRun,
    looks: Looks,
    step: int,
    top: float,
    chips: Mapping[str, list[Chip]],
) -> None:
    """Prompt and output of every request, and how far they are computed."""
    scene.text("tokens", 10, top, "tokens", 12, **BOLD)
    x, first = 72.0, next(iter(looks.values()))
    for kind, (words, _) in TOKEN_KINDS.items():
        _token(scene, f"key.{kind}", (x, top - 11, 18, 14), kind, first, "")
        scene.text(f"key.{kind}1", x + 24, top, words, 11, **FAINT)
        x += 24 + text_width(words, 11) + 20
    scene.rect("key.end", (x + 4, top - 13, 2, 18), INK)
    scene.text("key.end1", x + 12, top, "end of the prompt", 11, **FAINT)
    y = top + 14
    for who, line in chips.items():
        scene.text(f"tokens.{who}", 14, y + 16, who, 15, fill=looks[who].colour, **BOLD)
        if who in run.steps[step].planned.requests:
            _tokens(scene, run, looks[who], step, who, line, y)
        else:
            said = f"comes before step {run.came(who)}"
            scene.text(f"tokens.{who}.late", LEFT, y + 14, said, 11, **FAINT)
        y += tokens_height(line)


def tokens_height(chips: Sequence[Chip]) -> float:
    """Pixels that the tokens of one request take, with the gap below."""
    return LINE * (1 + max((chip.line for chip in chips), default=0)) + 4


def _tokens(
    scene: Scene, run: SchedulerRun, one: Look, step: int, who: str, chips: list[Chip], top: float
) -> None:
    request = run.steps[step].planned.requests[who]
    for i, kind in enumerate(run.token_kinds(who, step)):
        chip, name = chips[i], f"token.{who}.{i}"
        y = top + LINE * chip.line
        part = "prompt" if i < request.num_prompt_tokens else "output"
        token = run.tokens[who][i]
        tip = f"{who}, position {i} ({part}): “{run.label(who, i)}”, id {token}; "
        box = (chip.x, y, chip.width, 20.0)
        _token(scene, name, box, kind, one, tip + TOKEN_KINDS[kind][1])
        weight = BOLD if kind in ("run", "sampled") else {}
        look = {**CENTRE, **DEAF, **weight, **(FAINT if kind == "gone" else {})}
        scene.text(f"{name}.n", chip.x + chip.width / 2, y + 14, chip.words, SIZE, **look)
        if i == request.num_prompt_tokens - 1:
            bar = (chip.x + chip.width + 3.5, y - 1, 2, 22)
            scene.rect(f"{name}.end", bar, INK, **DEAF)


def _token(scene: Scene, name: str, box: Box, kind: str, one: Look, tip: str) -> None:
    """The box of a token. Filled = its K and V exist; thick = this step; dashed = not run."""
    edges: dict[str, dict[str, Any]] = {
        "cached": {"stroke": one.colour},
        "run": THICK,
        "known": {"stroke": one.colour, "stroke_dasharray": "3 3"},
        "sampled": THICK | {"stroke_width": 1.8, "stroke_dasharray": "4 2"},
        "gone": {"stroke": RULE},
    }
    fill = {"cached": one.light, "run": one.dark}.get(kind, PAPER)
    scene.rect(name, box, fill, tip, rx=3, **edges[kind])
