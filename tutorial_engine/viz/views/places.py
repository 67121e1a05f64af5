"""The places of an engine over its steps: who has each, and which idle.

An engine has max_num_seqs places, and a request that runs holds one: with a cache of rows, its row.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from tutorial_engine.trace.events import Admitted, Finished, Preempted, Trace
from tutorial_engine.viz.drawing.lanes import TEXT, Axis, ruler
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, DEAF, GREY, RIGHT, Mark, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Box, Look, hatch_path, look, tint
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.run.run import Run
from tutorial_engine.viz.views.timeline import limits
from tutorial_engine.viz.words import counted, listed, share

WIDE, LEFT, RIGHT_EDGE = 1000.0, 62.0, 988.0
CROSSED = "#e4e7ea"  # below the crosses of what is wasted
TALL, WIDEST = 28.0, 60.0  # a place; the most that a step takes
MOST = 64  # places of all runs together
IDLE, WASTED = "idle", "wasted"  # nobody waits; somebody does
YELLOW, INDIGO = "#F0E442", "#332288"
LOOKS = (  # eight requests side by side; two more colours that survive colour blindness
    *map(look, range(6)),
    Look("#8f8600", tint(YELLOW, 0.3), tint(YELLOW, 0.85), "plain"),
    Look(INDIGO, tint(INDIGO, 0.2), tint(INDIGO, 0.5), "plain"),
)
WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "recompute": "after preemption",
    "END": "the request ends",
    WASTED: "wasted: nobody has it, although somebody waits",
    "stalls": "wasted: its request runs nothing",
    IDLE: "idle: nobody waits",
}


class Held(NamedTuple):
    """What a place is used for in one step: by which request, in the order of arrival; how."""

    request: int
    request_id: str
    kind: str  # as Share.kind
    is_last: bool  # the request ends with this step


class Places(NamedTuple):
    """A run by places: `grid[place][step]` is who holds it there, IDLE or WASTED."""

    run: Run
    grid: Sequence[Sequence[Held | str]]

    @property
    def total(self) -> int:
        """Places times steps."""
        return len(self.grid) * len(self.run.steps)

    def count(self, kind: str) -> int:
        """How often a place is in such a state: IDLE, WASTED, or the kind of a Share."""
        every = (
            place if isinstance(place, str) else place.kind for line in self.grid for place in line
        )
        return sum(place == kind for place in every)

    @property
    def wasted(self) -> int:
        """How often a place runs nothing, although somebody waits or holds it."""
        return self.count(WASTED) + self.count("stalls")


def read_places(trace: Trace) -> Places:
    """Who holds which place in each step. A place that was freed last is taken first, as rows are.

    ValueError for a trace that does not say max_num_seqs, or has no finished step.
    """
    run = Run.of(trace)
    count = run.max_num_seqs
    if not count:
        raise ValueError("the trace does not say max_num_seqs, the number of places")
    free, held = list(reversed(range(count))), dict[str, int]()
    lives = {  # an id may come again
        (life.request_id, step): i for i, life in enumerate(run.lives) for step in life.shares
    }
    grid: list[list[Held | str]] = [[] for _ in range(count)]
    for step in run.steps:
        for event in step.planning:
            match event:
                case Admitted(request_id=name):
                    held[name] = free.pop()
                case Preempted(request_id=name) | Finished(request_id=name) if name in held:
                    free.append(held.pop(name))
        over = [event.request_id for event in step.results if isinstance(event, Finished)]
        line: list[Held | str] = [WASTED if step.planned.waiting else IDLE] * count
        for name, place in held.items():
            life = lives[name, step.number]
            kind = run.lives[life].shares[step.number].kind
            line[place] = Held(life, name, kind, name in over)
        for column, what in zip(grid, line, strict=True):
            column.append(what)
        free += [held.pop(name) for name in over if name in held]
    return Places(run, grid)


def places(
    runs: Mapping[str, Trace],
    title: str = "Who has each place in each step, and which are idle",
) -> Picture:
    """A panel per run: steps from left to right, a line per place; a bar where a request ends.

    Step s of place p of run i (all counted from 0) is the item `box.i.p.s`, a stretch of idle steps
    `idle.i.p.s`. ValueError for more places than can be seen, and as `read_places`.
    """
    found = {name: read_places(trace) for name, trace in runs.items()}
    num_places = sum(len(each.grid) for each in found.values())
    if num_places > MOST:
        raise ValueError(f"{num_places} places are too many to be seen: show at most {MOST}")
    pitch = min(WIDEST, (RIGHT_EDGE - LEFT) / max(len(each.run.steps) for each in found.values()))
    scene = Sheet(WIDE, 0)
    scene.heading(title, size=16)
    note = limits(next(iter(found.values())).run, policy=False, clock=False)
    scene.note("settings", 10, 42, f"a line is a place, a box is a step · {note}", 11.5)
    top = scene.legend(10, 66, _marks(scene, list(found.values())), 34)[1] + 16
    for i, (name, each) in enumerate(found.items()):
        _head(scene, i, name, each, top)
        _panel(scene, i, each, top + 22, pitch)
        top += 22 + TALL * len(each.grid) + 34
    scene.height = top - 6
    shares = [share(held.wasted / held.total) if held.wasted else "0 %" for held in found.values()]
    shown = f"Wasted, from the top: {listed(shares)}." if len({*shares}) > 1 else " "
    return scene.picture(_caption(found), zoom=1.1, shown=shown)


def _marks(scene: Sheet, found: Sequence[Places]) -> dict[str, Mark]:
    """What boxes mean, of those that occur."""
    return {
        words: partial(_mark, scene, kind, LOOKS[0] if kind == "stalls" else GREY)
        for kind, words in WORDS.items()
        if kind == "END" or any(each.count(kind) for each in found)
    }


def _mark(scene: Sheet, kind: str, look: Look, name: str, box: Box, tip: str = "") -> None:
    """A box of that kind. Whatever is wasted is crossed."""
    edge: Style = {"stroke": look.colour, "stroke_width": 0.8, "rx": min(2.0, box[2] / 5)}
    if kind in (IDLE, WASTED):
        edge = {"stroke": RULE}
    elif kind in ("stalls", "recompute"):
        edge["stroke_dasharray"] = "3 2"
    fills = {IDLE: PAPER, WASTED: CROSSED, "decode": look.dark, "END": look.dark}
    scene.rect(name, box, fills.get(kind, look.light), tip, **edge)
    if kind in (WASTED, "stalls"):
        colour = QUIET if kind == WASTED else look.ink
        style: Style = {"stroke": colour, "stroke_width": 1.0, "fill": "none"}
        scene.add(f"{name}.hatch", "path", d=hatch_path(box, "x"), **style, **DEAF)
    if kind == "END":
        _end(scene, name, box)


def _end(scene: Sheet, name: str, box: Box) -> None:
    """The thick right edge of a request's last step."""
    x, y, w, h = box
    thick = min(5.0, w / 2)
    scene.rect(f"{name}.end", (x + w - thick, y, thick, h), INK, **DEAF)


def _head(scene: Sheet, i: int, name: str, each: Places, top: float) -> None:
    """What the run is called, and what of its places was used for nothing."""
    shown = cut_to(name, 300, 13, True, keep=True)
    scene.text(f"{i}.title", 10, top + 14, shown, 13, **BOLD)
    line = f"{counted(len(each.run.steps), 'step')} · "
    lives = each.run.lives
    tokens = counted(sum(len(life.token_times) for life in lives), "new token")
    ended = sum(life.finished is not None for life in lives)
    line += f"{ended} of {len(lives)} requests finished, {tokens} · wasted: {_wasted(each)}"
    scene.text(f"{i}.told", 24 + text_width(shown, 13, True), top + 14, line, 12)


def _wasted(each: Places) -> str:
    wasted = f" ({share(each.wasted / each.total)})" if each.wasted else ""
    return f"{each.wasted} of {each.total}{wasted}"


def _panel(scene: Sheet, i: int, each: Places, top: float, pitch: float) -> None:
    """The lines of one run, its steps numbered below."""
    gap = min(1.5, pitch / 10)
    for p, line in enumerate(each.grid):
        y = top + TALL * p
        scene.note(f"{i}.place.{p}", LEFT - 8, y + TALL / 2 + 4, f"place {p}", TEXT, **RIGHT)
        for _, group in groupby(enumerate(line), key=lambda pair: _same(pair[1])):
            members = list(group)
            (first, request), (last, _) = members[0], members[-1]
            x, wide = LEFT + pitch * first, pitch * (last + 1 - first)
            box = (x + gap / 2, y + 1.5, wide - gap, TALL - 3)
            if isinstance(request, str):
                tip = f"place {p}, steps {first} to {last}: {WORDS[request]}"
                _mark(scene, request, GREY, f"idle.{i}.{p}.{first}", box, tip)
                _word(scene, f"what.{i}.{p}.{first}", request, box)
                continue
            ends = False
            for s, held in members:
                if isinstance(held, str):
                    continue
                tip = f"step {s}, place {p}: {held.request_id}, {held.kind}"
                tip += ", ends" * held.is_last
                cell = (LEFT + pitch * s + gap / 2, y + 1.5, pitch - gap, TALL - 3)
                looks = LOOKS[held.request % len(LOOKS)]
                _mark(scene, held.kind, looks, f"box.{i}.{p}.{s}", cell, tip)
                if ends := held.is_last:
                    _end(scene, f"box.{i}.{p}.{s}", cell)
            room = (x, y + 1.5, wide - min(5.0, pitch / 2) * ends, TALL - 3)
            _word(scene, f"who.{i}.{p}.{first}", request.request_id, room)
    right = LEFT + pitch * len(each.run.steps)
    axis = Axis.of(each.run, LEFT, right, "step", 0, 0)
    ruler(scene, each.run, axis, top + TALL * len(each.grid) - 1, f"{i}.")


def _same(what: Held | str) -> str | int:
    return what if isinstance(what, str) else what.request


def _word(scene: Sheet, name: str, words: str, box: Box) -> None:
    """Whose a stretch of steps is, or what it is, once in its middle where there is room."""
    shown = cut_to(words, box[2] - 2, 12, True)
    if shown == words or (shown != "…" and name.startswith("who")):
        halo: Style = {"stroke": PAPER, "stroke_width": 5, "paint_order": "stroke"}
        scene.inside(name, box, shown, 12, **BOLD, **halo, fill=QUIET if words == IDLE else INK)


def _caption(found: Mapping[str, Places]) -> str:
    """How often places are wasted in each run, and how often they idle because nobody waits."""
    wasted = [f"“{name}” {_wasted(each)}" for name, each in found.items()]
    idle = [str(each.count(IDLE)) for each in found.values()]
    return (
        "Places that run nothing although somebody waits or holds them, counted over all steps: "
        f"{', '.join(wasted)}; idle because nobody waits: {listed(idle)}."
    )
