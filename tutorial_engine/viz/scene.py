"""A picture as a list of named items, drawn to SVG and from it to PNG.

Knows shapes, places and escaping; knows no engine and no widget. Items have ids, so that two
scenes of one view can be compared item by item.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import matplotlib
import resvg_py

from tutorial_engine.viz.picture import Picture, small_png
from tutorial_engine.viz.style import FONT, INK, PAPER, QUIET
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
        """The whole scene as one SVG element. Hovering is CSS alone: no script."""
        w, h = plain(self.width), plain(self.height)
        x, y = self.tip_at
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="te-scene" viewBox="0 0 {w} {h}" '
            f'width="{w}" height="{h}" font-family="{FONT}, sans-serif">',
            f"<style>{CSS}</style>{DEFS}",
            f'<rect width="{w}" height="{h}" fill="{PAPER}"/>',
        ]
        place = f"translate({plain(x)},{plain(y)})"
        if self.hint:
            parts.append(f'<text class="te-hint" transform="{place}">{escape(self.hint)}</text>')
        for name, item in self.items.items():
            look = item.attributes.items()
            attributes = "".join([f' {k}="{_attribute(v)}"' for k, v in look])
            inside = f">{escape(item.text)}</{item.tag}>" if item.text else "/>"
            element = f'<{item.tag} id="{escape(name)}"{attributes}{inside}'
            if item.tip:
                words = f'<use href="#te-cover"/><text>{escape(item.tip)}</text>'
                tip = f'<g class="te-tip" transform="{place}">{words}</g>'
                element = f'<g class="te-hot">{element}{tip}</g>'
            parts.append(element)
        return "".join([*parts, "</svg>"])

    def png(self, zoom: float = 1.4) -> bytes:
        """The same scene as PNG bytes, with the font that ships with matplotlib."""
        png = resvg_py.svg_to_bytes(
            svg_string=self.svg(),
            zoom=zoom,
            font_files=_font_files(),
            skip_system_fonts=True,
            font_family=FONT,
            sans_serif_family=FONT,
        )
        return small_png(bytes(png))

    def picture(self, caption: str, zoom: float = 1.4, shown: str = "") -> Picture:
        """The scene as a Picture with its caption written below, and without the pointer's hint.

        Where the picture has the caption's numbers as words, `shown` is written in its place.
        """
        caption = written(caption)
        lines = textwrap.wrap(shown or caption, int(self.width / 7.3))
        still = Scene(self.width, self.height + 20 * len(lines) + 8, self.tip_at, "")
        still.items = dict(self.items)
        for i, line in enumerate(lines):
            still.text(f"caption.{i}", 8, self.height + 14 + 20 * i, line, 13)
        return Picture(still.svg(), still.png(zoom), caption)


# The same for every scene: a page has one style, whatever scenes are on it.
CSS = (
    ".te-scene{max-width:100%}.te-tip{display:none}.te-hot:hover>.te-tip{display:inline}"
    ".te-hot:hover>:first-child{stroke:#1b2733;stroke-width:2.5}"
    f".te-tip text,.te-hint{{font-size:13px;fill:{INK}}}.te-hint{{fill:{QUIET}}}"
    ".te-cell{stroke:#ffffff;stroke-width:.5}"
)
DEFS = (
    '<defs><pattern id="te-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
    '<rect width="1.6" height="6" fill="#d3d9de"/></pattern>'
    f'<rect id="te-cover" y="-15" width="2000" height="21" fill="{PAPER}"/></defs>'
)
HATCHED = "url(#te-hatch)"


def plain(value: Value) -> str:
    """An attribute's value, not escaped. Two digits behind the point are enough."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def _attribute(value: Value) -> str:
    return escape(value) if isinstance(value, str) else plain(value)


@cache
def _font_files() -> list[str]:
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [str(fonts / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")]
