"""A picture as a list of named items, drawn to SVG and from it to PNG.

Knows shapes, places and escaping; knows no engine and no widget. Items have names, so that two
scenes of one view can be compared item by item.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutorial_engine.viz.drawing.letters import FONT, wrapped
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.png import png_of
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.tokens import escape, written

Value = str | float | int


@dataclass(frozen=True)
class Item:
    """One SVG element: tag, attributes, the text inside it, and what hovering over it says."""

    tag: str
    attributes: Mapping[str, Value]
    text: str = ""
    tip: str = ""


@dataclass
class Scene:
    """Items on a canvas of width x height pixels. Tips appear on one line at `tip_at`.

    `parts`: rows of boxes (x, y, width, height) that a narrow screen shows one below the other in
    place of the whole; `keys`: the entries of legends, which stand below them and wrap like words.
    """

    width: float
    height: float
    tip_at: tuple[float, float] = (8, 0)
    hint: str = ""  # stands on the tip line until the pointer is over something
    items: dict[str, Item] = field(default_factory=dict)
    parts: list[list[tuple[float, float, float, float]]] = field(default_factory=list)
    keys: list[tuple[float, float, float, float]] = field(default_factory=list)

    def add(self, name: str, tag: str, text: str = "", tip: str = "", **attributes: Value) -> None:
        """Put an item on top. ValueError when the name is taken (names tie steps together)."""
        if name in self.items:
            raise ValueError(f"the scene already has an item {name!r}")
        clean = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        self.items[name] = Item(tag, clean, written(text), written(tip))

    def text(
        self, name: str, x: float, y: float, words: str, size: float = 12, **more: Value
    ) -> None:
        """Plain text with its baseline at y; always escaped."""
        more.setdefault("fill", INK)
        self.add(name, "text", words, "", x=x, y=y, font_size=size, **more)

    def rect(
        self,
        name: str,
        box: tuple[float, float, float, float],
        fill: str,
        tip: str = "",
        **more: Value,
    ) -> None:
        """A rectangle; box is (x, y, width, height)."""
        x, y, width, height = box
        self.add(name, "rect", "", tip, x=x, y=y, width=width, height=height, fill=fill, **more)

    def svg(self) -> str:
        """The whole scene as one SVG element. Hovering is CSS alone: no script.

        Nothing in it has an id. A page may show two pictures, or one of them twice, and browsers
        resolve an id to the first of them, also where that one is hidden and so not drawn.
        """
        w, h = plain(self.width), plain(self.height)
        x, y = self.tip_at
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="te-scene" viewBox="0 0 {w} {h}" '
            f'width="{w}" height="{h}" font-family="{FONT}, sans-serif">',
            f"<style>{CSS}</style>",
            f'<rect width="{w}" height="{h}" fill="{PAPER}"/>',
        ]
        place = f"translate({plain(x)},{plain(y)})"
        if self.hint:
            parts.append(f'<text class="te-hint" transform="{place}">{escape(self.hint)}</text>')
        for name, item in self.items.items():
            look = dict(item.attributes)
            stripes = ""
            if look.get("fill") == HATCHED:
                look["fill"], stripes = PAPER, _stripes(look)
            attributes = "".join([f' {k}="{_attribute(v)}"' for k, v in look.items()])
            inside = f">{escape(item.text)}</{item.tag}>" if item.text else "/>"
            element = f'<{item.tag} data-name="{escape(name)}"{attributes}{inside}{stripes}'
            if item.tip:
                words = f"{COVER}<text>{escape(item.tip)}</text>"
                tip = f'<g class="te-tip" transform="{place}">{words}</g>'
                element = f'<g class="te-hot">{element}{tip}</g>'
            parts.append(element)
        return "".join([*parts, "</svg>"])

    def png(self, zoom: float = 1.4) -> bytes:
        """The same scene as PNG bytes, with the font that ships with matplotlib."""
        return png_of(self.svg(), zoom)

    def picture(self, caption: str, zoom: float = 1.4, shown: str = "") -> Picture:
        """The scene as a Picture with its caption written below, and without the pointer's hint.

        Where the picture has the caption's numbers as words, `shown` is written in its place.
        """
        caption = written(caption)
        lines = wrapped(shown or caption, self.width - 16, 13)
        still = Scene(self.width, self.height + 20 * len(lines) + 8, self.tip_at, "")
        still.items = dict(self.items)
        for i, line in enumerate(lines):
            still.text(f"caption.{i}", 8, self.height + 14 + 20 * i, line, 13)
        return Picture(still.svg(), still.png(zoom), caption)


class Frame(NamedTuple):
    """What is seen at one step."""

    scene: Scene
    caption: str


# The fill of a rectangle with stripes: `svg` draws them one by one. A file that is one picture and
# no more (a player, a moving picture) has the pattern of this id.
HATCHED = "url(#te-hatch)"
GAP, STRIPE = 6.0, 1.6  # pixels from stripe to stripe, and the width of one
PATTERN = (
    f'<defs><pattern id="te-hatch" width="{GAP:g}" height="{GAP:g}" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="{GAP:g}" height="{GAP:g}" fill="{PAPER}"/>'
    f'<rect width="{STRIPE:g}" height="{GAP:g}" fill="{RULE}"/></pattern></defs>'
)

# The same for every scene: a page has one style, whatever scenes are on it.
CSS = (
    ".te-scene{max-width:100%}.te-tip{display:none}.te-hot:hover>.te-tip{display:inline}"
    ".te-hot:hover>:first-child{stroke:#1b2733;stroke-width:2.5}"
    f".te-tip text,.te-hint{{font-size:13px;fill:{INK}}}.te-hint{{fill:{QUIET}}}"
    ".te-cell{stroke:#ffffff;stroke-width:.5}"
    f".te-stripes{{stroke:{RULE};stroke-width:{STRIPE};pointer-events:none}}"
)
# White below a tip, so that it can be read on what is there.
COVER = f'<rect y="-15" width="2000" height="21" fill="{PAPER}"/>'


def _stripes(look: Mapping[str, Value]) -> str:
    """A path of "/" stripes inside a rectangle with these attributes; in line with its neighbours'.

    They end short of its edge by half of the edge, and by what their own ends stand out.
    """
    x, y, w, h = (float(look.get(name, 0)) for name in ("x", "y", "width", "height"))
    edge = 0.0 if look.get("stroke", "none") == "none" else float(look.get("stroke-width", 1))
    inset = edge / 2 + STRIPE / 8**0.5
    left, right, top, low = x + inset, x + w - inset, y + inset, y + h - inset
    if left >= right or top >= low:
        return ""
    apart = GAP * 2**0.5  # along x, and a stripe is where x + y = apart * (k + a part)
    inside = STRIPE / GAP / 2
    lines = []
    for k in range(
        math.ceil((left + top) / apart - inside), math.ceil((right + low) / apart - inside)
    ):
        total = apart * (k + inside)
        start = max(left, total - low)
        length = min(right, total - top) - start
        lines.append(f"M{start:.1f} {total - start:.1f}l{length:.1f} {-length:.1f}")
    pale = f' opacity="{plain(look["opacity"])}"' if "opacity" in look else ""
    return f'<path class="te-stripes" d="{"".join(lines)}"{pale}/>'


def plain(value: Value) -> str:
    """An attribute's value, not escaped. Two digits behind the point are enough."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def _attribute(value: Value) -> str:
    return escape(value) if isinstance(value, str) else plain(value)
