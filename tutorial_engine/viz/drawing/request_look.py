"""One request = one colour, one hatch and its name, in every picture.

Knows colours and hatches; knows no engine.
"""

from typing import Any, NamedTuple

from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY

COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
HATCHES = ("plain", "/", "\\", "-", "|", "x")
GAP = 5.0  # pixels between two lines of a hatch
Box = tuple[float, float, float, float]  # x, y, width, height


class Look(NamedTuple):
    """How a request is drawn: its colour, two tints of it, and the hatch of its solid areas."""

    colour: str
    light: str  # prefill
    dark: str  # decode
    hatch: str

    @property
    def ink(self) -> str:
        """Its colour for letters: dark enough to be read on white."""
        numbers = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(0.6 * n):02x}" for n in numbers)


def look(index: int) -> Look:
    """The look of the index-th request of a run; no two of the first 36 are the same."""
    colour = COLOURS[index % len(COLOURS)]
    hatch = HATCHES[(index + index // len(COLOURS)) % len(HATCHES)]
    return Look(colour, tint(colour, 0.24), tint(colour, 0.62), hatch)


def tint(colour: str, share: float) -> str:
    """The colour mixed with white: part 1 is the colour, 0 is white."""
    numbers = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + share * (n - 255)):02x}" for n in numbers)


def patch(scene: Scene, name: str, box: Box, look: Look, tip: str = "") -> None:
    """A solid area in a request's colour and hatch, `name` and `name.hatch`."""
    scene.rect(name, box, look.dark, tip, stroke=look.colour, stroke_width=0.8)
    if lines := hatch_path(box, look.hatch):
        pen: dict[str, Any] = {"stroke": look.colour, "stroke_width": 1.3, "fill": "none"}
        scene.add(f"{name}.hatch", "path", d=lines, **pen, pointer_events="none")


def hatch_path(box: Box, hatch: str) -> str:
    """The lines of a hatch inside a box as an SVG path; empty for a plain one."""
    x, y, w, h = box
    parts: list[tuple[float, float, float, float]] = []
    if hatch == "-":
        parts += [(x, y + at, x + w, y + at) for at in _marks(h)]
    if hatch == "|":
        parts += [(x + at, y, x + at, y + h) for at in _marks(w)]
    if hatch in "/x":
        parts += [
            (x + max(0.0, at - h), y + min(at, h), x + min(at, w), y + max(0.0, at - w))
            for at in _marks(w + h)
        ]
    if hatch in "\\x":
        parts += [
            (x + max(0.0, at - h), y + h - min(at, h), x + min(at, w), y + h - max(0.0, at - w))
            for at in _marks(w + h)
        ]
    return "".join(f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for a, b, c, d in parts)


def _marks(length: float) -> list[float]:
    return [GAP * (i + 0.5) for i in range(int(length / GAP + 0.5)) if GAP * (i + 0.5) < length]


def chip(scene: Scene, name: str, x: float, middle: float, words: str, look: Look) -> None:
    """The legend of a request, left of its row: a swatch in its look, and its name."""
    patch(scene, f"{name}.swatch", (x, middle - 7, 14, 14), look)
    scene.text(f"{name}.name", x + 20, middle + 4.5, words, 13, font_weight="bold", fill=INK)


def nice_step(largest: float, parts: int) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that divides 0 .. most in ≤ parts."""
    unit = 10.0**-9
    while True:
        for factor in (1, 2, 5):
            if largest / (factor * unit) <= parts:
                return factor * unit
        unit *= 10
