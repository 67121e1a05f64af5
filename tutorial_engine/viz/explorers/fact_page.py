"""A page on which a fact is looked for in a KV cache: which numbers carry the answer?

Made of what `tools.publish.facts` asked a real model. All drawing and all sentences are here; the
page's script only puts them together. Knows those answers and scenes; knows no model.
"""

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

from tutorial_engine.viz.drawing.parts import CENTRE, MARGIN, RIGHT, Sheet
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.scene import Scene, Value
from tutorial_engine.viz.drawing.style import INK, QUIET, RED
from tutorial_engine.viz.explorers.player import choice, shell
from tutorial_engine.viz.tokens import escape

TITLE = "Sixty-four numbers: where is Paris?"
LEAD = (
    "SmolLM2 has read a text as far as the marked word. Its KV cache holds 11,520 numbers of each "
    "marked token: K and V of 30 layers with 3 heads, 64 numbers each. Replace some of them by "
    "those of another text; the model then reads the rest. How few numbers change the answer?"
)
LIKELIEST = 3  # tokens that are shown of each answer
Cell = tuple[str, int, int]  # "k" or "v", head, layer

# how a cell looks: as it is; tried before, so many times; and replaced now
FREE: dict[str, Value] = {"fill": "#ffffff", "stroke": "#b9c2c9", "stroke-width": 1}
TRIED = [FREE | {"fill": tint(RED, 0.1 + 0.09 * times)} for times in range(6)]
NOW: dict[str, Value] = {"fill": RED, "stroke": INK, "stroke-width": 2}

SENTENCES = {
    "all layers": "all layers",
    "layer": "layer {first}",
    "layers": "layers {first} to {last}",
    "all heads": "all heads",
    "head": "head {head}",
    "caption": "Replaced: {part} of {layers}, {heads}. These are {count} of {total} numbers. "
    "The answer is “{answer}” ({p}), {whose}.",
    "as before": "as before",
    "of the other": "that of the other text",
    "of neither": "that of neither text",
    "tries": "Tries: {tries}.",
    "halve": "One of these layers may be enough. Try one half of them.",
    "spread": "Neither half alone gives the other text's answer, but both together do. Here the "
    "answer comes from several layers.",
    "choose V": "K of these layers does not give the other text's answer. Choose V.",
    "more is less": "The numbers of all layers do not give the other text's answer. Numbers of "
    "some layers may: try one half.",
    "other head": "This head alone does not give the other text's answer. Choose another head, or "
    "all heads.",
    "other half": "These layers alone do not give the other text's answer. Go back, and try the "
    "other half.",
    "other layer": "This layer alone does not give the other text's answer. Go back, and try "
    "another layer.",
    "found": "Found in {found} tries: {part} of layer {first}. Which head is it? (Halving takes "
    "{best} at best: all layers, then {halvings} halves.)",
    "found head": "{count} of {total} numbers are enough: {part} of layer {first}, head {head}. "
    "Choose other texts: is their answer in the same place?",
}


def map_scene(
    layers: int,
    heads: int,
    *,
    narrow: bool = False,
    now: Collection[Cell] = (),
    tried: Mapping[Cell, int] | None = None,
) -> Sheet:
    """The cache of one token: a column for each layer, a row for each head of K and of V.

    `now` are replaced, and `tried` were before, so many times.
    """
    left, wide, tall, size = (46.0, 10.3, 22.0, 12.0) if narrow else (78.0, 27.0, 19.0, 13.0)
    right, top = left + wide * layers, 40.0
    sheet = Sheet(right + (3 if narrow else MARGIN), top + 2 * (tall * heads + 8) + 24)
    tried = tried or {}
    sheet.text("axis", left, 14, "layer", size, fill=QUIET)
    for layer in range(0, layers, 5 if narrow else 1):
        place = left + wide * (layer + 0.5)
        sheet.text(f"layer.{layer}", place, 33, str(layer), size, **CENTRE)
    for row, (kind, head) in enumerate(product("kv", range(heads))):
        y = top + tall * row + (8 if kind == "v" else 0)
        words = f"{kind.upper()} {head}" if narrow else f"{kind.upper()}, head {head}"
        sheet.text(f"{kind}.{head}", left - 6, y + tall / 2 + 4, words, size, **RIGHT)
        for layer in range(layers):
            cell = (kind, head, layer)
            times = min(tried.get(cell, 0), len(TRIED))
            look = NOW if cell in now else TRIED[times - 1] if times else FREE
            box = (left + wide * layer + 1, y + 1, wide - 2, tall - 2)
            sheet.rect(".".join(map(str, cell)), box, **look)  # type: ignore[arg-type]
    x, y = (4.0 if narrow else left), sheet.height - 6
    for name, words, look in (
        ("now", "replaced now", NOW),
        ("tried", "tried before (strong colour: often)", TRIED[2]),
    ):
        sheet.rect(f"key.{name}", (x + 1, y - 11, 12, 12), **look)  # type: ignore[arg-type]
        sheet.text(f"key.{name}.words", x + 19, y, words, size, fill=QUIET)
        x += 40 + len(words) * size * 0.56
    return sheet


def fact_poster(said: Mapping[str, Any]) -> Scene:
    """The map in the middle of a search, so that it does not show what is found."""
    heads, last = range(said["heads"]), said["layers"] - 1
    tried = {
        ("v", head, layer): 1 + (layer > last // 2) for head in heads for layer in range(last + 1)
    }
    now = {("v", head, layer) for head in heads for layer in range(last - 7, last + 1)}
    return map_scene(last + 1, len(heads), now=now, tried=tried)


def fact_page(said: Mapping[str, Any], links: Mapping[str, str] | None = None) -> str:
    """The HTML of the page, from what the model said; `links`: words -> address."""
    layers, heads = said["layers"], said["heads"]
    film = {
        **said,
        "likeliest": LIKELIEST,
        "sentences": SENTENCES,
        "looks": {"free": _plain(FREE), "tried": [*map(_plain, TRIED)], "now": _plain(NOW)},
        "halvings": (layers - 1).bit_length(),
    }
    maps = {"wide": map_scene(layers, heads), "small": map_scene(layers, heads, narrow=True)}
    body = _BODY.format(
        pairs="".join(f"<option>{escape(_name(pair))}</option>" for pair in said["pairs"]),
        part=choice("replace", ["K", "V"]),
        head=choice("head", ["all", *map(str, range(heads))]),
        last=layers - 1,
        before=_answer("before", "before"),
        other=_answer("other", "the other text"),
        after=_answer("after", "after"),
        maps="".join(f'<div class="{name}">{scene.svg()}</div>' for name, scene in maps.items()),
    )
    return shell(TITLE, body, film, "fact.js", lead=LEAD, links=links, style=_STYLE)


def _plain(look: Mapping[str, Value]) -> dict[str, str]:
    return {name: str(value) for name, value in look.items()}


def _name(pair: Mapping[str, Any]) -> str:
    """What differs in two texts."""
    first, other = (parts[1].strip() for parts in pair["parts"])
    return f"{first} gets numbers of {other}"


def _answer(name: str, title: str) -> str:
    """A text, and the bars of the likeliest tokens that may follow it."""
    rows = (
        '<li><span></span><svg viewBox="0 0 100 10" aria-hidden="true" preserveAspectRatio="none">'
        '<rect height="10" width="0"/></svg><span></span></li>'
    ) * LIKELIEST
    return (
        f'<section class="answer" id="{name}"><h2>{title}</h2>'
        "<p><span></span><mark></mark><span></span> <strong></strong></p>"
        f'<ol aria-label="likeliest next tokens, {title}">{rows}</ol></section>\n'
    )


_STYLE = f"""
h2{{font-size:.95rem;margin:0;color:{QUIET};font-weight:600}}
#caption,.told{{margin:.2rem 0;max-width:none;min-height:1.45em}}#tries{{color:{QUIET}}}
.bar{{position:static;padding:.2rem 0}}.choice{{margin-right:.8rem}}
.bar label{{display:inline-flex;align-items:center;gap:.4rem;min-width:0}}
.bar select{{min-width:0;flex:1}}.row{{display:flex;flex-wrap:wrap;align-items:center;gap:0 .8rem}}
.bar input{{width:8.5rem;min-height:2rem;accent-color:#00598c}}
.bar output{{min-width:1.4em;font-weight:600;white-space:nowrap}}
.bar [aria-disabled=true]{{opacity:.45}}
#answers{{display:grid;grid-template-columns:repeat(3,1fr);gap:.6rem;margin:.4rem 0}}
.answer{{border:1px solid #b9c2c9;border-radius:8px;padding:.4rem .7rem}}
.answer p{{margin:.1rem 0 .3rem;min-height:2.9em}}
.answer strong{{font-size:1.15rem}}#after{{border:2px solid {INK}}}
.answer ol{{list-style:none;margin:0;padding:0;font-size:.95rem;line-height:1.4}}
.answer li{{display:grid;grid-template-columns:6em 1fr 3em;align-items:center;gap:0 .3rem}}
.answer li>:last-child{{text-align:right;font-variant-numeric:tabular-nums}}
.answer svg{{display:block;width:100%;height:.7rem}}.answer rect{{transition:width .25s}}
mark{{background:none;color:inherit;border-bottom:3px solid #0072B2;font-weight:600}}
#other mark{{border-color:{RED};border-bottom-style:double}}
.own{{color:#00598c}}.others{{color:#a84300}}.answer rect{{fill:{QUIET}}}
.answer rect.own{{fill:#0072B2}}.answer rect.others{{fill:{RED}}}
#view{{margin-top:.4rem}}#view svg{{display:block;width:100%;height:auto}}
.wide{{max-width:900px}}.small{{display:none}}
@media (max-width:720px){{main{{display:block}}h1{{font-size:1.1rem}}
.lead{{font-size:.92rem;line-height:1.35}}.wide{{display:none}}.small{{display:block}}
#view{{overflow:visible}}#caption,.told{{min-height:4.2em;line-height:1.4}}
.bar label{{font-size:1rem;order:0}}.bar:not(.choice) button{{order:0;padding:.25rem .38rem}}
.texts,.texts label,.ends,.ends label{{width:100%}}.ends{{gap:0}}.ends span{{width:2.4em}}
.bar input{{flex:1;width:4rem}}
#answers{{grid-template-columns:1fr 1fr;gap:.4rem}}#other{{display:none}}
.answer{{padding:.3rem .5rem}}.answer p{{min-height:4.35em}}
.answer li{{grid-template-columns:1fr auto;margin-bottom:.25rem}}
.answer svg{{grid-row:2;grid-column:1/3;height:.5rem}}}}
@media (prefers-reduced-motion:reduce){{.answer rect{{transition:none}}}}
@media (prefers-color-scheme:dark){{h2,#tries{{color:#a8b2ba}}.answer{{border-color:#59636b}}
#after{{border-color:#e4e7ea}}.own{{color:#6cb8ea}}.others{{color:#ffa366}}
.answer rect{{fill:#a8b2ba}}.answer rect.own{{fill:#56B4E9}}.answer rect.others{{fill:#ff8a3d}}
mark{{border-color:#56B4E9}}#other mark{{border-color:#ff8a3d}}
.bar input{{accent-color:#6cb8ea}}}}
"""
_BODY = """<div class="row"><div class="bar texts"><label>texts <select id="texts">{pairs}</select>
</label></div>
{part}{head}</div>
<div id="answers">
{before}{other}{after}</div>
<p id="caption" aria-live="polite"></p>
<p class="told" aria-live="polite"><span id="tries"></span> <b id="task"></b></p>
<div class="row"><div class="bar" role="group" aria-label="layers">
<button id="first">first half</button>
<button id="second">second half</button>
<button id="every">all layers</button>
<button id="back">◀ back</button></div>
<div class="bar ends" role="group" aria-label="range of layers">
<label><span>from</span>
<input id="from" type="range" min="0" max="{last}" value="0" aria-label="from layer">
<output for="from">0</output></label>
<label><span>to</span>
<input id="to" type="range" min="0" max="{last}" value="{last}" aria-label="to layer">
<output for="to">{last}</output></label></div></div>
<div id="view" role="img" aria-labelledby="caption">{maps}</div>
<p class="keys">Keys: Tab goes from control to control, ← → move the ends of the range of layers.
A token may be only the beginning of a word. Each try was a run of the model; all are recorded, so
that this page needs no model.</p>
"""
