"""For the tests of explorers: turning their knobs, and reading what a learner sees."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any, TypeVar

import ipywidgets as widgets

from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.request_look import text_width
from tutorial_engine.viz.scene import Item, Scene

SVG = "{http://www.w3.org/2000/svg}"
AnyExplorer = TypeVar("AnyExplorer", bound=Explorer)
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Text(HTMLParser):
    """The words of a piece of HTML, and every tag that is in it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words, self.tags = "", list[str]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def turn(explorer: AnyExplorer, step: int | None = None, **knobs: Any) -> AnyExplorer:
    """As `set`, without making the PNG, and as a learner does it: nothing is taken back."""
    for name, value in knobs.items():
        explorer.parameters[name].value = value
    if step is not None:
        explorer.slider.value = step
    return explorer


def svg_of(explorer: Explorer) -> str:
    return explorer._scene_html.value


def caption_of(explorer: Explorer) -> str:
    """The caption as the learner reads it below the live picture."""
    return Text(explorer._caption_html.value).words


def message_of(explorer: Explorer) -> str:
    return Text(explorer._message_html.value).words


def seen(explorer: Explorer) -> tuple[str, str, int, int, dict[str, Any]]:
    """All that is seen: picture, caption, steps, and where the knobs stand."""
    knobs = {name: knob.value for name, knob in explorer.parameters.items()}
    return svg_of(explorer), caption_of(explorer), explorer.num_steps, explorer.step, knobs


def tags(explorer: Explorer) -> set[str]:
    """The kinds of elements in the picture."""
    return {element.tag for element in ET.fromstring(svg_of(explorer)).iter()}


def tips(explorer: Explorer) -> list[str]:
    """What hovering says, in the order of drawing."""
    groups = [g for g in ET.fromstring(svg_of(explorer)).iter(f"{SVG}g")]
    return [g.findtext(f"{SVG}text") or "" for g in groups if g.get("class") == "te-tip"]


def items(explorer: Explorer, pattern: str) -> dict[str, Item]:
    """The items of the picture with such names."""
    found = explorer.shown.items.items()
    return {name: item for name, item in found if re.fullmatch(pattern, name)}


def words(explorer: Explorer, pattern: str) -> list[str]:
    """What the items with such names say."""
    return [item.text for item in items(explorer, pattern).values()]


def place(explorer: Explorer, name: str) -> tuple[float, float, float, float]:
    """x, y, width and height of a box."""
    found = explorer.shown.items[name].attributes
    x, y, width, height = (float(found[key]) for key in ("x", "y", "width", "height"))
    return x, y, width, height


def text_boxes(scene: Scene) -> dict[str, Box]:
    """Every text of a scene, by the font's own measures."""
    found = {}
    for name, item in scene.items.items():
        if item.tag != "text" or not item.text:
            continue
        look = item.attributes
        x, y, size = (float(look[key]) for key in ("x", "y", "font-size"))
        wide, tall = text_width(item.text, size, "font-weight" in look), 0.72 * size
        if "transform" in look:  # turned by 90 degrees: upwards from (x, y)
            found[name] = (x - tall, y - wide, x, y)
            continue
        left = x - {"middle": wide / 2, "end": wide}.get(str(look.get("text-anchor")), 0.0)
        found[name] = (left, y - tall, left + wide, y)
    return found


def check_places(scene: Scene, least: float = 9) -> None:
    """AssertionError for words that are too small, cut off, or written over others."""
    boxes = text_boxes(scene)
    for name, (left, top, right, bottom) in boxes.items():
        assert float(scene.items[name].attributes["font-size"]) >= least, name
        assert left >= 0 and right <= scene.width + 0.5, (name, scene.items[name].text)
        assert top >= 0 and bottom <= scene.height, (name, scene.items[name].text)
    placed = list(boxes.items())
    for i, (name, (left, top, right, bottom)) in enumerate(placed):
        for other, box in placed[:i]:
            beside = right <= box[0] or box[2] <= left or bottom <= box[1] or box[3] <= top
            assert beside, (name, scene.items[name].text, other, scene.items[other].text)


def inside(widget: widgets.Widget) -> list[widgets.Widget]:
    """A widget and all that it contains."""
    return [widget, *(w for child in getattr(widget, "children", ()) for w in inside(child))]
