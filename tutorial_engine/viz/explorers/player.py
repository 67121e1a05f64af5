"""A player: recorded steps as one HTML file that needs nothing else.

Takes the scenes of an explorer and writes, for each item, when which of its attributes changes.
The page's script only sets attributes. Knows scenes and captions; knows no engine, no view.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from tutorial_engine.viz.drawing.letters import FONT
from tutorial_engine.viz.drawing.scene import CSS, PATTERN, Frame, Item, Scene, plain
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET
from tutorial_engine.viz.tokens import escape

LARGEST = 1.25  # how much larger than drawn: on a screen of 800 pixels the controls stay in view
Track = list[tuple[int, str | None]]  # (from this step on, value); None: there is none


class Card(NamedTuple):
    """What a small player shows: a part of the scene (x, y, width, height), at so many steps/s.

    `phone`: the part that can be read where there is less room; None: the same. `rows`: there it
    shows the first so many rows of the scene's parts instead, which are as large as `phone`.
    """

    box: tuple[float, float, float, float]
    speed: float = 1.0
    phone: tuple[float, float, float, float] | None = None
    rows: int = 0


def player(
    runs: Sequence[Sequence[Frame]],
    title: str,
    *,
    lead: str = "",
    choices: Mapping[str, Sequence[str]] | None = None,
    step_name: str = "step",
    start: int = 0,
    card: Card | None = None,
    links: Mapping[str, str] | None = None,
) -> str:
    """The HTML of a page that shows one of these runs, step by step; `lead` says what is seen.

    `choices`, control -> its options, are buttons above the picture that choose the run: there is
    one for each way to choose, the last control turning fastest. A step that the chosen run does
    not have becomes its last. ValueError for another number of runs, an empty one, or a start
    outside.

    The address may end in `#t=17`, and in `#t=17&v=1` for run 1; ← → Home End and the space bar
    work; nothing is requested from anywhere. With a `card` it is a small moving picture of what
    that says, to be put into another page: it runs while it is seen, unless the reader wants less
    motion. `links`: words -> address, of pages that lie beside it.
    """
    said = f"{title} {lead}"
    choices = choices or {}
    ways = math.prod(map(len, choices.values()))
    if len(runs) != ways:
        raise ValueError(f"{len(runs)} runs, and {ways} ways to choose from {choices}")
    if not all(0 <= start < len(run) for run in runs):
        raise ValueError(f"runs of {[*map(len, runs)]} steps cannot start at step {start}")
    every = [Frame(_untitled(frame.scene, said), frame.caption) for run in runs for frame in run]
    film = film_of(every) | {"step_name": step_name, "start": start, "sizes": [*map(len, runs)]}
    film["parts"] = [_parts([frame.scene for frame in run]) for run in runs]
    if card:
        boxes = [" ".join(map(plain, box)) for box in (card.box, card.phone or card.box)]
        film["card"] = {"boxes": boxes, "speed": card.speed, "rows": card.rows}
    body = _BODY.format(
        pattern=PATTERN,
        font=f"{FONT}, sans-serif",
        box=escape(film["boxes"][0][1]),
        wide=plain(LARGEST * every[0].scene.width),
        choices="".join(choice(name, options) for name, options in choices.items()),
        caption=escape(every[start].caption),
    )
    return shell(title, body, film, "player.js", lead=lead, links=links)


def shell(
    title: str,
    body: str,
    film: Mapping[str, Any],
    script: str,
    *,
    lead: str = "",
    links: Mapping[str, str] | None = None,
    style: str = "",
) -> str:
    """A page that asks nothing of anybody: its words, its body, and a script of this folder.

    The script finds `film` as JSON in the element of this id; `style` comes after a player's own.
    """
    return _PAGE.format(
        title=escape(title),
        lead=f'<p class="lead">{escape(lead)}</p>\n' if lead else "",
        style=CSS + _STYLE + style,
        body=body,
        links=_links(links or {}),
        film=_safe_json(film),
        script=(files("tutorial_engine.viz.explorers") / script).read_text(encoding="utf-8"),
    )


def _untitled(scene: Scene, said: str) -> Scene:
    """The scene without its title where the page's own words say it."""
    title = scene.items.get("title")
    if title is None or title.text.partition(":")[0] not in said:
        return scene
    shown = copy(scene)
    shown.items = {name: item for name, item in scene.items.items() if name != "title"}
    return shown


def choice(name: str, options: Sequence[str]) -> str:
    """A control: its name, and a button for each option."""
    buttons = (f'<button aria-pressed="false">{escape(option)}</button>' for option in options)
    name = escape(name)
    inside = f"{name} {''.join(buttons)}"
    return f'<div class="bar choice" role="group" aria-label="{name}">{inside}</div>\n'


def _links(links: Mapping[str, str]) -> str:
    parts = (f'<a href="{escape(goal)}">{escape(words)}</a>' for words, goal in links.items())
    return f'<nav class="keys">{" · ".join(parts)}</nav>\n' if links else ""


def save_player(
    runs: Sequence[Sequence[Frame]],
    path: str | Path,
    title: str,
    **more: Any,
) -> Path:
    """Write the page → where it is. ValueError for a folder that is not there."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it first")
    path.write_text(player(runs, title, **more), encoding="utf-8")
    return path


def film_of(frames: Sequence[Frame]) -> dict[str, Any]:
    """All steps as items with tracks, plain enough for JSON. `still` is its inverse."""
    steps = [{(name, item.tag): item for name, item in f.scene.items.items()} for f in frames]
    order, keys = _in_order([list(items) for items in steps])
    shown: dict[Any, list[Item | None]] = {key: [None] * len(frames) for key in order}
    for step, items in enumerate(steps):
        for key, item in zip(keys[step], items.values(), strict=True):
            shown[key][step] = item
    return {
        "captions": [frame.caption for frame in frames],
        "boxes": _track([f"0 0 {plain(f.scene.width)} {plain(f.scene.height)}" for f in frames]),
        "tip_at": [
            f"translate({plain(f.scene.tip_at[0])},{plain(f.scene.tip_at[1])})" for f in frames
        ],
        "items": [_element(key, item) for key, item in shown.items()],
    }


def _parts(scenes: Sequence[Scene]) -> list[list[Track]]:
    """Rows of the parts that a narrow screen shows, the legends last; [] where a scene has none."""
    found = [[*scene.parts, scene.keys] for scene in scenes if scene.parts]
    if len(found) < len(scenes) or len({tuple(map(len, rows)) for rows in found}) > 1:
        return []
    return [
        [_track([" ".join(map(plain, box)) for box in boxes]) for boxes in zip(*row, strict=True)]
        for row in zip(*found, strict=True)
    ]


def still(film: dict[str, Any], step: int) -> list[Item]:
    """The items that a player shows at a step, from below to the top: what its script does."""
    found = []
    for item in film["items"]:
        look = look_at(item, step)
        if look is None:
            continue
        words = look.pop("words", "")
        tip = _at(item["tip"]["words"], step) if "tip" in item else None
        found.append(Item(item["tag"], look, words, tip or ""))
    return found


def look_at(item: dict[str, Any], step: int) -> dict[str, str] | None:
    """The attributes of a film's item at a step, its text as "words"; None where it is not seen."""
    look = {name: _at(track, step) for name, track in item["tracks"].items()}
    if look.pop("display", None) == "none":
        return None
    return {name: value for name, value in look.items() if value is not None}


def _element(key: Any, shown: Sequence[Item | None]) -> dict[str, Any]:
    """One element of the page: a track for each attribute that it ever has."""
    looks = [_look(item) for item in shown]
    names = dict.fromkeys(name for look in looks for name in look)
    tips = [item.tip if item is not None and item.tip else None for item in shown]
    tracks = {name: _track([e.get(name) for e in looks]) for name in names}
    element: dict[str, Any] = {"tag": key[1], "tracks": tracks}
    return element | ({"tip": {"words": _track(tips)}} if any(tips) else {})


def _look(item: Item | None) -> dict[str, str]:
    if item is None:
        return {"display": "none"}
    look = {name: plain(value) for name, value in item.attributes.items()}
    return look | ({"words": item.text} if item.text else {})


def _track(values: Sequence[str | None]) -> Track:
    """The steps at which a value is another than before."""
    track: Track = []
    for step, value in enumerate(values):
        if not track or value != track[-1][1]:
            track.append((step, value))
    return track


def _at(track: Track, step: int) -> str | None:
    return next((value for since, value in reversed(track) if since <= step), None)


def _in_order(steps: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """One order of elements in which every step finds its own, from below to the top.

    → that order, and each step's elements. A name that changes its place among the others becomes
    another element at that step: an SVG element cannot move to the front.
    """
    order: list[Any] = []
    keys: list[list[Any]] = []
    for step, names in enumerate(steps):
        place = {name: i for i, name in enumerate(order)}
        stays = set(_rising([place[name] for name in names if name in place]))
        mine = [
            name if place.get(name, -1) in stays or name not in place else (*name, step)
            for name in names
        ]
        at, merged = 0, list[Any]()
        for name in mine:
            if name in place:
                merged += order[at : place[name] + 1]
                at = place[name] + 1
            else:
                merged.append(name)
        order = merged + order[at:]
        keys.append(mine)
    return order, keys


def _rising(numbers: Sequence[int]) -> list[int]:
    """The longest rising part of different numbers (patience sorting, with a link to before)."""
    ends: list[int] = []
    before: dict[int, int | None] = {}
    for number in numbers:
        at = bisect_left(ends, number)
        before[number] = ends[at - 1] if at else None
        ends[at : at + 1] = [number]
    chain, last = list[int](), ends[-1] if ends else None
    while last is not None:
        chain.append(last)
        last = before[last]
    return chain


def _safe_json(film: Mapping[str, Any]) -> str:
    """JSON that no text in it can end: `</script>` and `<!--` are written without their `<`."""
    return json.dumps(film, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


_STYLE = f"""
body{{margin:1rem auto;max-width:1040px;padding:0 1rem;background:{PAPER};color:{INK};
font:16px/1.45 system-ui,sans-serif}}
h1{{font-size:1.25rem;margin:.2rem 0 .6rem}}
#stage{{width:100%;height:auto;display:block}}
.hint{{display:none}}
.parts{{display:none;gap:.4rem 0}}.parts+.parts{{margin-top:.6rem}}
.parts svg{{min-width:0;height:auto}}
@media (max-width:720px){{#view{{overflow-x:auto}}#stage{{min-width:680px}}.hint{{display:block}}
.stacked .parts{{display:flex}}
.stacked .parts:last-child{{flex-wrap:wrap}}.stacked+.hint{{display:none}}
.stacked #stage{{position:absolute;width:0;height:0;min-width:0}}}}
@media (pointer:coarse){{p.keys:not(.hint){{display:none}}}}
.card,.card main{{margin:0;padding:0;height:100vh;display:flex;flex-direction:column;flex:1}}
.card #view{{flex:1;min-height:0}}.card #stage{{min-width:0;height:100%}}
.card .parts:last-child{{flex-wrap:nowrap}}
.card :is(.lead,.choice,.keys,#caption){{display:none}}
.card h1{{position:absolute;clip-path:inset(50%);margin:0}}
.card .bar>:not(#play){{display:none}}
.bar{{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;padding:.4rem 0;
position:sticky;bottom:0;background:{PAPER}}}
.bar button,.bar select{{font:inherit;padding:.25rem .6rem;min-height:2.2rem}}
#caption,.lead{{margin:.2rem 0 .6rem;max-width:60em}}#caption{{min-height:3em}}
#slider{{flex:1 1 12rem;min-height:2.2rem}}
@media (max-width:720px){{main{{display:flex;flex-direction:column}}.lead{{order:1}}
#caption{{min-height:9em}}#slider{{flex-basis:4rem}}.bar{{gap:.3rem}}
.bar label{{font-size:0;order:-1}}.bar:not(.choice) button{{order:-1}}
.bar button,.bar select{{font-size:1rem;padding:.25rem .45rem}}}}
/* a low screen has the whole picture with its controls; what it is about stands below */
@media (max-height:800px) and (min-width:721px){{body:not(.card){{margin-top:.3rem}}
body:not(.card) main{{display:flex;flex-direction:column}}.lead{{order:1}}
body:not(.card) #stage{{max-height:calc(100vh - 12.5rem)}}
body:not(.card) .choice~#view #stage{{max-height:calc(100vh - 14rem)}}
body:not(.card) .choice~.choice~#view #stage{{max-height:calc(100vh - 17rem)}}}}
#told,.lead,.keys{{color:{QUIET}}}.keys{{font-size:.85rem}}nav.keys{{margin:.9rem 0}}
:focus-visible{{outline:3px solid #0072B2;outline-offset:2px}}
#play{{font-weight:600}}
.choice{{position:static;display:inline-flex;margin-right:1.5rem}}
.bar button,.bar select{{border:1px solid {QUIET};border-radius:6px;color:inherit}}
.bar button,.bar select{{background:#f3f5f7}}
.bar button:hover{{background:#e4e9ed}}
.choice [aria-pressed=true]{{background:#00598c!important;color:#fff}}
/* by night light becomes dark and a colour keeps its hue: the picture was drawn for white; what
shows a magnitude keeps its colour, too */
@media (prefers-color-scheme:dark){{html{{color-scheme:dark}}
body,.bar{{background:#121212;color:#e4e7ea}}#told,.lead,.keys{{color:#a8b2ba}}a{{color:#6cb8ea}}
#view:not(:has(.te-cell,.te-shade)){{background:{PAPER}}}
#view:not(:has(.te-cell,.te-shade)),
:has(.te-cell,.te-shade)>:is(#all,.te-hot)>:not(.te-hot,.te-cell,.te-shade){{
filter:invert(.93) hue-rotate(180deg)}}.te-cell{{stroke:#121212}}
.bar button,.bar select{{background:#2a2d30;border-color:#7d868d}}
.bar button:hover{{background:#3a3f44}}
:focus-visible{{outline-color:#6cb8ea}}}}
"""
_BODY = """{choices}<p id="caption" aria-live="polite">{caption}</p>
<div id="view" tabindex="0" role="region" aria-label="picture">
<svg id="stage" xmlns="http://www.w3.org/2000/svg" class="te-scene" viewBox="{box}" role="img"
 aria-labelledby="caption" style="max-width:{wide}px">
{pattern}<g id="all" font-family="{font}"></g></svg>
</div>
<p class="keys hint">The picture is wider than this screen: swipe it,
or turn the phone sideways.</p>
<div class="bar">
<button id="first" aria-label="first step">|◀</button>
<button id="back" aria-label="one step back">◀</button>
<button id="play" aria-pressed="false">▶ Play</button>
<button id="on" aria-label="one step on">▶</button>
<button id="end" aria-label="last step">▶|</button>
<input id="slider" type="range" min="0" value="0" aria-label="step">
<output id="told" for="slider"></output>
<label>speed <select id="speed"><option value="0.7">slow</option>
<option value="1.5" selected>normal</option><option value="4">fast</option></select></label>
</div>
<p class="keys">Keys: ← → one step, Home and End, space plays and pauses.</p>
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{lead}{body}{links}</main>
<script type="application/json" id="film">{film}</script>
<script>
{script}</script>
</body>
</html>
"""
