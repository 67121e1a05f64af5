"""The layout laboratory in a picture: memory strips.

Places and counters come from the layouts' own strides.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

from torch import Tensor

from tutorial_engine.lab.layouts import AXES, ORDERS, KVLayout, runs
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    KEY,
    RIGHT,
    WIDTH,
    Grid,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import COLOURS, Box, Look, tint
from tutorial_engine.viz.drawing.style import PAPER, QUIET, RED
from tutorial_engine.viz.words import counted

LEFT, LINE, TALL = 46.0, 44.0, 20.0  # where strips begin, from line to line, the height of a box
MAX_ELEMENTS, MAX_LAYERS, MAX_TOKENS = 256, 6, 10
IN_LINE = 64  # elements side by side at most
LAYERS = [  # red is what is read; a value is paler than its key
    Look(colour, tint(colour, 0.26), tint(colour, 0.55), "plain")
    for colour in (*COLOURS[:5], QUIET)
]
STATES = ("solid", "cached")  # how a key and a value are drawn
KIND = "KV"


class _Element(NamedTuple):
    """Which number of K and V lies there."""

    layer: int
    kv: int
    token: int
    head: int
    dim: int


def layouts_picture(
    layouts: Mapping[str, KVLayout], layer: int, token: int, num_tokens: int
) -> Picture:
    """The same small K and V as memory, a strip per order: each element by layer and token.

    Framed: the bytes that writing `token` touches; with a bar above: those that attention in
    `layer` reads, of the first `num_tokens`. Behind these, places are drawn free.
    ValueError for what is not there or too large.
    """
    shape = _shape(layouts, layer, token, num_tokens)
    total = next(iter(layouts.values())).kv.numel()
    piece = shape[3] * shape[4]  # of a token, in one layer, K or V
    line = max(piece, min(total, IN_LINE) // piece * piece)
    tall = 38 + LINE * -(-total // line)
    low = 62 + tall * len(layouts)
    scene = Sheet(WIDTH, low + 16, tip_at=(10, low + 6))
    defined = "a piece is memory without a gap"
    if shape[3] > 1 == shape[4]:
        defined += "; a white line parts two heads"
    scene.heading(f"The same {total} numbers in {counted(len(layouts), 'order')}", defined)
    marks = {f"layer {i}": scene.sample("solid", LAYERS[i], rx=0) for i in range(shape[0])}
    if num_tokens < shape[2]:
        marks["free"] = scene.sample("free", LAYERS[0], rx=0)
    x, _ = scene.legend(10, 46, marks, 14, 8)
    words = "K1 = key of token 1, V1 = its value (paler)"
    scene.note("key.kv", x + 8, 46, words, KEY)
    marks = {
        f"written: token {token}": scene.outline,
        f"read: layer {layer}": partial(_read_mark, scene, up=-4),
    }
    scene.legend(x + 24 + text_width(words, KEY), 46, marks, 16)
    facts = []
    for i, (order, layout) in enumerate(layouts.items()):
        write, read = layout.touched_by_write(token), layout.touched_by_read(layer, num_tokens)
        pieces = [counted(cost.runs, "piece") for cost in (write, read)]
        facts.append(f"{order}, writing touches {pieces[0]} and reading {pieces[1]}")
        strip = _Strip(scene, order, layout, 62 + tall * i, line, num_tokens)
        y = 74 + tall * i
        scene.text(f"{order}.title", 10, y, order, 12, **BOLD)
        x = 22 + text_width(order, 12, bold=True)
        words = f"writing touches {pieces[0]}, reading {pieces[1]}"
        scene.note(f"{order}.counts", x, y, words, 12)
        strip.draw_numbers()
        strip.draw_touched(layer, token)
    room = f"There is room for {counted(shape[2], 'token')}, and {num_tokens} are there. "
    return scene.picture(
        f"{room * (num_tokens < shape[2])}Token {token} is written in each of {shape[0]} layers "
        f"({write.num_bytes} bytes), and layer {layer} is read ({read.num_bytes} bytes): "
        f"{'; '.join(facts)}.",
        zoom=1.0,
    )


def _shape(
    layouts: Mapping[str, KVLayout], layer: int, token: int, num_tokens: int
) -> tuple[int, ...]:
    """The shape that all share. ValueError for what is not there or too large."""
    (shape,) = {tuple(layout.kv.shape) for layout in layouts.values()}
    elements = next(iter(layouts.values())).kv.numel()
    if elements > MAX_ELEMENTS or shape[0] > MAX_LAYERS or shape[2] > MAX_TOKENS:
        raise ValueError(
            f"each number is drawn: at most {MAX_ELEMENTS}, {MAX_LAYERS} layers and {MAX_TOKENS} "
            f"tokens; got {elements} in shape {list(shape)}"
        )
    if not (0 <= layer < shape[0] and 0 <= token < num_tokens <= shape[2]):
        raise ValueError(
            f"there are layers 0 .. {shape[0] - 1} and tokens 0 .. {shape[2] - 1}; got layer "
            f"{layer}, token {token} of {num_tokens}"
        )
    return shape


def _read_mark(scene: Sheet, name: str, box: Box, up: float = 6) -> None:
    """The bar above what is read."""
    x, y, wide, _ = box
    scene.rect(name, (x, y - up, wide, 4), RED, **DEAF)


class _Strip:
    """The memory of one order, from its first byte to its last, as lines of boxes."""

    def __init__(
        self, scene: Sheet, order: str, layout: KVLayout, top: float, line: int, num_tokens: int
    ) -> None:
        self.scene, self.order, self.layout, self.line = scene, order, layout, line
        self.num_tokens = num_tokens  # behind them, places are free
        axes = ORDERS[order]
        self.heads_first = axes.index("head") < axes.index("token")
        wide = (WIDTH - LEFT - 12) / line
        self.grid = Grid(LEFT, top + 32, wide, LINE, line, (0, LINE - TALL))
        indices = product(*map(range, layout.kv.shape))
        steps = [layout.strides[axis] for axis in AXES]
        self.elements = [_Element(*index) for index in indices]
        self.elements.sort(key=lambda e: sum(i * s for i, s in zip(e, steps, strict=True)))

    def parts(self, key: Callable[[int], object]) -> list[tuple[int, Box]]:
        """Elements side by side, in one line, that are alike: the first, and the box of all."""
        alike = groupby(range(len(self.elements)), lambda i: (i // self.line, key(i)))
        groups = [list(group) for _, group in alike]
        return [(group[0], self.grid.box(group[0], len(group))) for group in groups]

    def draw_numbers(self) -> None:
        """Every element, by layer and token."""
        scene, elements, size = self.scene, self.elements, self.layout.kv.itemsize
        for i, e in enumerate(elements):
            where = f"byte {i * size}: layer {e.layer}, {KIND[e.kv]} of token {e.token}"
            there = e.token < self.num_tokens
            tip = f"{where}, head {e.head}, number {e.dim}{', free' * (not there)}"
            thin: Style = {"stroke": PAPER, "stroke_width": 0.7, "rx": 0}
            name, box = f"{self.order}.{i}", self.grid.box(i)
            scene.cell(name, box, STATES[e.kv] if there else "free", LAYERS[e.layer], tip, **thin)
        for i, box in self.parts(lambda i: elements[i][:3]):
            e = elements[i]
            edge: Style = {"stroke": LAYERS[e.layer].colour, "stroke_width": 1}
            scene.outline(f"{self.order}.whole{i}", box, **edge)
            if e.token < self.num_tokens:
                self.say(f"token{i}", box, f"{KIND[e.kv]}{e.token}", 14.5, 10.5)
        for i, box in self.parts(lambda i: elements[i].layer):
            words = f"layer {elements[i].layer}"
            heads = " | ".join(f"head {head}" for head in range(self.layout.kv.shape[3]))
            if self.heads_first and text_width(f"{words}: {heads}", 10) <= box[2]:
                words = f"{words}: {heads}"
            self.say(f"layer{i}", box, words, TALL + 12, 10, **FAINT)
        for i in range(0, len(elements), self.line) if len(elements) > self.line else ():
            y = self.grid.box(i)[1] + 14
            scene.note(f"{self.order}.at{i}", LEFT - 6, y, str(i * size), 10, **RIGHT)

    def say(self, name: str, box: Box, words: str, down: float, size: float, **look: Any) -> None:
        """Words in the middle of a box, or below it, if they fit."""
        x, y, wide, _ = box
        if text_width(words, size) <= wide:
            style = CENTRE | DEAF | look
            self.scene.text(f"{self.order}.{name}", x + wide / 2, y + down, words, size, **style)

    def draw_touched(self, layer: int, token: int) -> None:
        """A bar above what attention in a layer reads, a frame around a token's write."""
        kv = self.layout.kv
        read, written = self.places(kv[layer, :, : self.num_tokens]), self.places(kv[:, :, token])
        for i, box in self.parts(lambda i: i in read):
            if i in read:
                _read_mark(self.scene, f"{self.order}.read{i}", box)
        for i, box in self.parts(lambda i: i in written):
            if i in written:
                self.scene.outline(f"{self.order}.write{i}", box)

    def places(self, numbers: Tensor) -> set[int]:
        """The elements that a view covers, as places in memory."""
        size, found = self.layout.kv.itemsize, runs(self.layout.kv, numbers)
        return {i for start, count in found for i in range(start // size, (start + count) // size)}
