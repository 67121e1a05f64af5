"""Introduced in notebook 04. A pool as lines of slots: whose token is where, and what lies idle.

The same drawing for rows, pages and cells. Knows a moment of a pool; knows no engine.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from tutorial_engine.trace.pool import Pool, PoolHistory, PoolSnapshot
from tutorial_engine.viz.request_look import Box, Look, cut_to, look, text_width, tint
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE

WIDTH, LEFT = 1000.0, 46.0  # the canvas, and where lines begin
LINE, TALL = 21.0, 17.0  # from line to line, the height of a slot
WIDEST = 30.0  # a slot
MAX_SLOTS, MAX_LINE = 512, 128  # of a pool; side by side
SIZE = 10.5
USED = tint(INK, 0.55)  # slots of whatever request
BOLD: dict[str, Any] = {"font_weight": "bold"}
DEAF: dict[str, Any] = {"pointer_events": "none"}
KINDS = {
    "new": "written now",
    "shared": "shared: kept once",
    "empty": "reserved, no token",
    "free": "free",
}
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


def draw_key(scene: Scene, base: float) -> None:
    """What the looks of a slot mean, at the right end of a line."""
    x = WIDTH - 4
    for kind, words in reversed(KINDS.items()):
        x -= text_width(words, 11) + 38
        box = (x, base - 12, 14.0, 14.0)
        scene.rect(f"key.{kind}", box, HATCHED if kind == "empty" else PAPER, stroke=RULE)
        if kind == "new":
            scene.rect("key.new.thick", box, "none", stroke=INK, stroke_width=2.2)
        if kind == "shared":
            one, other = look(0), look(2)
            _halves(scene, "key.shared.halves", box, one, other)
        scene.text(f"key.{kind}.words", x + 19, base, words, 11, fill=QUIET)


def draw_names(scene: Scene, looks: Looks, base: float, present: Collection[str]) -> None:
    """Who is who, of those present, as far as a line holds them."""
    x, left = 10.0, [name for name in looks if name in present]
    for i, name in enumerate(left):
        words = cut_to(name, 120, 13, bold=True)
        if x + 20 + text_width(words, 13, bold=True) > WIDTH - 80 and i + 1 < len(left):
            scene.text("names.more", x, base, f"and {len(left) - i} more", 11, fill=QUIET)
            break
        one = looks[name]
        scene.rect(f"name.{name}.swatch", (x, base - 12, 14, 14), one.dark, stroke=one.colour)
        scene.text(f"name.{name}", x + 19, base, words, 13, fill=INK, **BOLD)
        x += 19 + text_width(words, 13, bold=True) + 14


def draw_pool(
    scene: Scene, name: str, moment: PoolSnapshot, looks: Looks, top: float, wish: int
) -> None:
    """One pool, its title above it; items are named `name`.slot0, ..."""
    pool, line = moment.pool, per_line(moment.pool, wish)
    width = min(WIDEST, (WIDTH - LEFT - 14) / line)
    words = _title(cut_to(name, 260, 12.5, bold=True, keep=True), moment)
    scene.text(f"{name}.title", 10, top + 12, words, 12.5, **BOLD)

    def box(slot: int, slots: int = 1) -> Box:
        x, y = LEFT + slot % line * width, top + 24 + LINE * (slot // line)
        return x, y, slots * width, TALL

    for first in range(0, pool.num_slots, line):
        x, y, *_ = box(first)
        style: dict[str, Any] = {"text_anchor": "end", "fill": QUIET}
        scene.text(f"{name}.line{first}", x - 6, y + 13, str(first), 10, **style)
        slots = range(first, min(first + line, pool.num_slots))
        for slot in slots:
            _slot(scene, f"{name}.slot{slot}", moment, looks, slot, box(slot))
        for _, run in groupby(slots, lambda slot: _who(moment, slot)):
            _label(scene, name, moment, list(run), box)
        for _, run in groupby(slots, lambda slot: (slot in moment.new, slot // pool.unit)):
            _outline(scene, name, moment, list(run), box)
    for unit in range(pool.num_units if pool.unit > 1 else 0):
        for first, group in groupby(pool.slots(unit), lambda slot: slot // line):
            part = list(group)
            border = box(part[0], len(part))
            scene.rect(f"{name}.unit{unit}.{first}", border, "none", stroke=QUIET, **DEAF)


def _title(name: str, moment: PoolSnapshot) -> str:
    pool, usage = moment.pool, moment.usage
    unit = {"rows": "row", "pages": "block"}.get(pool.kind, "cell")
    size = f" of {pool.unit} slot{'s' * (pool.unit > 1)}" if pool.unit > 1 else ""
    shared = sum(len(who) > 1 for who in moment.tokens.values())
    also = f" ({shared} shared)" if shared else ""
    return (
        f"{name}: {pool.num_units} {unit}s{size} · {usage.used} used{also} · {usage.reserved} "
        f"reserved without a token · {usage.free} free"
    )


def _who(moment: PoolSnapshot, slot: int) -> tuple[bool, tuple[str, ...], int]:
    """Whose slot it is, with a token or without, and in which block."""
    used = slot in moment.tokens
    who = tuple(moment.tokens[slot]) if used else moment.owners.get(slot, ())
    return used, who, slot // moment.pool.unit if not used else -1


def _slot(scene: Scene, name: str, moment: PoolSnapshot, looks: Looks, slot: int, box: Box) -> None:
    used, who, _ = _who(moment, slot)
    place = f"slot {slot}"
    if moment.pool.unit > 1:
        unit = "row" if moment.pool.kind == "rows" else "block"
        place += f" = {unit} {slot // moment.pool.unit}, place {slot % moment.pool.unit}"
    if not who:
        scene.rect(name, box, PAPER, f"{place}: free", stroke=RULE, stroke_width=0.8)
        return
    if not used:
        tip = f"{place}: reserved for {' and '.join(who)}, no token"
        scene.rect(name, box, HATCHED, tip, stroke=looks[who[0]].light, stroke_width=0.8)
        return
    parts = [f"token {position} of {own}" for own, position in moment.tokens[slot].items()]
    tip = f"{place}: K and V of {' = '.join(parts)}" + ", written now" * (slot in moment.new)
    first = looks[who[0]]
    scene.rect(name, box, first.dark, tip, stroke=first.colour, stroke_width=0.8)
    if len(who) > 1:
        _halves(scene, f"{name}.shared", box, first, looks[who[1]])


def _halves(scene: Scene, name: str, box: Box, one: Look, other: Look) -> None:
    """A slot of two colours: its token belongs to more than one."""
    x, y, w, h = box
    scene.rect(f"{name}.one", box, one.dark, stroke=one.colour, stroke_width=0.8, **DEAF)
    corner = f"M{x + w:.1f} {y:.1f}V{y + h:.1f}H{x:.1f}Z"
    scene.add(name, "path", d=corner, fill=other.dark, **DEAF)


def _label(scene: Scene, name: str, moment: PoolSnapshot, run: list[int], box: Any) -> None:
    """The owners' names, once for slots side by side, where they fit."""
    used, who, _ = _who(moment, run[0])
    x, y, width, _ = box(run[0], len(run))
    words = "+".join(who)
    if len(who) > 1 and text_width(words, SIZE, bold=True) > width - 2:
        words = f"{len(who)}×"
    if who and text_width(words, SIZE, bold=used) <= width - 2:
        style = BOLD if used else {"fill": QUIET}
        place: dict[str, Any] = {"text_anchor": "middle", **style, **DEAF}
        first = min(width / 2, max(box(run[0])[2], text_width(words, SIZE, bold=used) + 4) / 2)
        scene.text(f"{name}.who{run[0]}", x + first, y + 12.5, words, SIZE, **place)


def _outline(scene: Scene, name: str, moment: PoolSnapshot, run: list[int], box: Any) -> None:
    if run[0] in moment.new:
        border = box(run[0], len(run))
        scene.rect(f"{name}.new{run[0]}", border, "none", stroke=INK, stroke_width=2.6, **DEAF)
