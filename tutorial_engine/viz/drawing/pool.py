"""A pool as lines of slots: whose token is where, and what lies idle.

The same drawing for rows, pages and cells. Knows snapshots of a pool; knows no engine.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from tutorial_engine.trace.pool import Pool, PoolHistory, PoolSnapshot
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    MARGIN,
    RIGHT,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
    legend_width,
)
from tutorial_engine.viz.drawing.request_look import Look, hatch_path, look, patch, tint
from tutorial_engine.viz.drawing.style import INK, QUIET
from tutorial_engine.viz.words import counted

LEFT = 46.0  # where lines begin
LINE, TALL = 21.0, 17.0  # from line to line, the height of a slot
WIDEST = 30.0  # a slot
MAX_SLOTS, MAX_LINE = 512, 128  # of a pool; side by side
SIZE = 10.5
USED = tint(INK, 0.55)  # slots of whatever request
THIN: Style = {"stroke_width": 0.8, "rx": 0}
UNITS = {"rows": "row", "pages": "block", "cells": "cell"}
Looks = Mapping[str, Look]


def looks_of(histories: Sequence[PoolHistory]) -> dict[str, Look]:
    """A look for each request, by its place in the order of coming: the same in every view."""
    names = dict.fromkeys(name for history in histories for name in history.names)
    return {name: look(i) for i, name in enumerate(names)}


def per_line(pool: Pool, wish: int) -> int:
    """Slots side by side: as wished, in whole blocks if these fit. ValueError for large pools."""
    if pool.num_slots > MAX_SLOTS:
        raise ValueError(
            f"{pool.num_slots} slots are too many to draw each: at most {MAX_SLOTS}; "
            "waste_over_time draws any number"
        )
    wish = min(wish, MAX_LINE, pool.num_slots)
    return max(wish // pool.unit * pool.unit, pool.unit) if pool.unit <= MAX_LINE else wish


def strip_height(pool: Pool, wish: int) -> float:
    """Pixels that a pool takes with its title."""
    return 30 + LINE * -(-pool.num_slots // per_line(pool, wish)) + 8


def draw_key(sheet: Sheet, base: float, shared: bool = True) -> None:
    """What the looks of a slot mean, at the right end of a line; `shared`: if such are there."""

    def new(name: str, box: Any) -> None:
        sheet.cell(name, box, "free", rx=0)
        sheet.outline(f"{name}.thick", box, stroke_width=2.2)

    marks: dict[str, Mark] = {"written now": new}
    if shared:
        two = [look(0), look(2)]
        marks["shared: kept once"] = sheet.sample("solid", two[0], shared=two, rx=0, stroke=INK)
    marks["reserved, no token"] = sheet.sample("reserved", rx=0)
    marks["free"] = sheet.sample("free", rx=0)
    sheet.legend(WIDTH + 15 - legend_width(list(marks), 14, 18), base, marks, 14, 18)


def draw_names(sheet: Sheet, looks: Looks, base: float, present: Collection[str]) -> None:
    """Who is who, of those present, as far as a line holds them."""
    x, left = MARGIN, [name for name in looks if name in present]
    for i, name in enumerate(left):
        words = cut_to(name, 120, 13, bold=True)
        wide = 19 + text_width(words, 13, bold=True)
        if x + wide > WIDTH - 80 and i + 1 < len(left):
            sheet.note("names.more", x, base, f"and {len(left) - i} more")
            break
        patch(sheet, f"name.{name}.swatch", (x, base - 12, 14, 14), looks[name])
        sheet.text(f"name.{name}", x + 19, base, words, 13, **BOLD)
        x += wide + 14


def draw_pool(
    sheet: Sheet, name: str, now: PoolSnapshot, looks: Looks, top: float, wish: int
) -> None:
    """One pool, its title above it; items are named `name`.slot0, ..."""
    pool, line = now.pool, per_line(now.pool, wish)
    width = min(WIDEST, (WIDTH - LEFT - 14) / line)
    slots = Grid(LEFT, top + 24, width, LINE, line, (0, LINE - TALL))
    title = _title(cut_to(name, 260, 12.5, bold=True, keep=True), now)
    sheet.text(f"{name}.title", MARGIN, top + 12, title, 12.5, **BOLD)
    for first in range(0, pool.num_slots, line):
        base = slots.box(first)[1] + 13
        sheet.note(f"{name}.line{first}", LEFT - 6, base, str(first), 10, **RIGHT)
        of_line = range(first, min(first + line, pool.num_slots))
        for slot in of_line:
            _slot(sheet, name, now, looks, slot, slots)
        for _, run in groupby(of_line, lambda slot: _whose(now, slot)):
            found = list(run)
            _hatch(sheet, name, now, looks, found, slots)
            _label(sheet, name, now, found, slots)
        for is_new, run in groupby(of_line, lambda slot: (slot in now.new, slot // pool.unit)):
            if is_new[0]:
                found = list(run)
                sheet.outline(f"{name}.new{found[0]}", slots.box(found[0], len(found)))
    for unit in range(pool.num_units if pool.unit > 1 else 0):
        for first, run in groupby(pool.slots(unit), lambda slot: slot // line):
            found = list(run)
            border = slots.box(found[0], len(found))
            sheet.rect(f"{name}.unit{unit}.{first}", border, "none", stroke=QUIET, **DEAF)


def _title(name: str, now: PoolSnapshot) -> str:
    pool, usage = now.pool, now.usage
    size = f" of {counted(pool.unit, 'slot')}" if pool.unit > 1 else ""
    shared = sum(len(who) > 1 for who in now.tokens.values())
    also = f" ({shared} shared)" if shared else ""
    return (
        f"{name}: {pool.num_units} {UNITS[pool.kind]}s{size} · {usage.used} used{also} · "
        f"{usage.reserved} reserved without a token · {usage.free} free"
    )


def _whose(now: PoolSnapshot, slot: int) -> tuple[bool, tuple[str, ...], int]:
    """Is there a token, whose slot it is, and in which block if there is none."""
    if slot in now.tokens:
        return True, tuple(now.tokens[slot]), -1
    return False, now.owners.get(slot, ()), slot // now.pool.unit


def _slot(
    sheet: Sheet, pool_name: str, now: PoolSnapshot, looks: Looks, slot: int, slots: Grid
) -> None:
    used, who, _ = _whose(now, slot)
    name, box, pool, place = f"{pool_name}.slot{slot}", slots.box(slot), now.pool, f"slot {slot}"
    if pool.unit > 1:
        place += f" = {UNITS[pool.kind]} {slot // pool.unit}, place {slot % pool.unit}"
    if not who:
        sheet.cell(name, box, "free", None, f"{place}: free", **THIN)
    elif not used:
        tip = f"{place}: reserved for {' and '.join(who)}, no token"
        sheet.cell(name, box, "reserved", None, tip, **THIN, stroke=looks[who[0]].light)
    else:
        parts = [f"token {position} of {holder}" for holder, position in now.tokens[slot].items()]
        tip = f"{place}: K and V of {' = '.join(parts)}" + ", written now" * (slot in now.new)
        owners = [looks[each] for each in who[:2]]
        sheet.cell(name, box, "solid", owners[0], tip, shared=owners, **THIN)


def _hatch(
    sheet: Sheet, name: str, now: PoolSnapshot, looks: Looks, run: list[int], slots: Grid
) -> None:
    """The hatch of one owner over its slots side by side, without the first: its name is there."""
    used, who, _ = _whose(now, run[0])
    if not used or len(who) > 1 or len(run) < 2:
        return
    owner = looks[who[0]]
    if lines := hatch_path(slots.box(run[1], len(run) - 1), owner.hatch):
        pen: Style = {"stroke": owner.colour, "stroke_width": 1.3, "fill": "none"}
        sheet.add(f"{name}.hatch{run[0]}", "path", d=lines, **pen, **DEAF)


def _label(sheet: Sheet, name: str, now: PoolSnapshot, run: list[int], slots: Grid) -> None:
    """The owners' names, once for slots side by side, where they fit."""
    used, who, _ = _whose(now, run[0])
    x, y, room, _ = slots.box(run[0], len(run))
    words = "+".join(who)
    if len(who) > 1 and text_width(words, SIZE, bold=True) > room - 2:
        words = f"{len(who)}×"
    wide = text_width(words, SIZE, bold=used)
    if who and wide <= room - 2:
        middle = x + min(room, max(slots.wide, wide + 4)) / 2
        style = BOLD if used else FAINT
        sheet.text(f"{name}.who{run[0]}", middle, y + 12.5, words, SIZE, **CENTRE, **style, **DEAF)
