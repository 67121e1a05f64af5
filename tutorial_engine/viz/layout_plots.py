"""Introduced in notebook 04. The layout laboratory in pictures: memory strips, and the race.

Places and counters come from the layouts' own strides; the race is what was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from tutorial_engine.lab.layouts import AXES, KVLayout, LayoutTimes, Touched, runs
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import COLOURS, Box, text_width, tint
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import (
    INK,
    PAPER,
    QUIET,
    RED,
    RULE,
    SERIES,
    finish,
    house_style,
    new_figure,
)

WIDTH, LEFT = 1000.0, 46.0
MAX_ELEMENTS, MAX_LAYERS = 256, 6
IN_LINE, LINE, TALL = 64, 44.0, 20.0  # elements side by side at most; a line, the height of a box
LAYERS = (*COLOURS[:5], QUIET)  # red is what is read
BOLD: dict[str, Any] = {"font_weight": "bold"}
DEAF: dict[str, Any] = {"pointer_events": "none"}
THICK: dict[str, Any] = {"stroke": INK, "stroke_width": 2.8}


class _Element(NamedTuple):
    """Which number of K and V lies there."""

    layer: int
    kv: int
    token: int
    head: int
    dim: int

    @property
    def label(self) -> str:
        return f"{'KV'[self.kv]}{self.token}"


def layouts_picture(
    layouts: Mapping[str, KVLayout], layer: int, token: int, num_tokens: int | None = None
) -> Picture:
    """The same small K and V as memory, a strip per order: each element by layer and token.

    Framed: the bytes that writing `token` touches; with a bar above: those that attention in
    `layer` reads, of the first num_tokens (all). ValueError for what is not there or too large.
    """
    shape = _check(layouts, layer, token)
    n = shape[2] if num_tokens is None else num_tokens
    if not 1 <= n <= shape[2]:
        raise ValueError(f"num_tokens must be 1 .. {shape[2]}, got {num_tokens}")
    total = next(iter(layouts.values())).kv.numel()
    piece = shape[3] * shape[4]  # of a token, in one layer, K or V
    line = max(piece, min(total, IN_LINE) // piece * piece)
    lines = -(-total // line)
    height = 62 + len(layouts) * (26 + LINE * lines + 12)
    scene = Scene(WIDTH, height + 16, tip_at=(10, height + 6))
    scene.text("title", 10, 22, f"{total} numbers, {len(layouts)} orders", 15, **BOLD)
    _key(scene, shape[0], layer, token)
    told, top = [], 62.0
    for order, layout in layouts.items():
        write, read = layout.touched_by_write(token), layout.touched_by_read(layer, n)
        said = f"{order}: writing {_words(write)}, reading {_words(read)}"
        scene.text(f"{order}.title", 10, top + 12, order, 12.5, **BOLD)
        start = 22 + text_width(order, 12.5, bold=True)
        counts = f"write {_counts(write)} · read {_counts(read)}"
        scene.text(f"{order}.counts", start, top + 12, counts, 11, fill=QUIET)
        strip = _Strip(scene, order, layout, top + 26, line)
        strip.draw_numbers()
        strip.draw_touched(layer, token, n)
        told.append(said)
        top += 26 + LINE * lines + 12
    return scene.picture(
        f"Token {token} in all {shape[0]} layers is written, layer {layer} is read: "
        f"{'; '.join(told)}.",
        zoom=1.0,
    )


def _check(layouts: Mapping[str, KVLayout], layer: int, token: int) -> tuple[int, ...]:
    if not layouts:
        raise ValueError("give at least one layout, order -> KVLayout: layouts(kv) has all")
    shapes = {tuple(layout.kv.shape) for layout in layouts.values()}
    if len(shapes) > 1:
        raise ValueError(f"the layouts must hold the same K and V, got shapes {sorted(shapes)}")
    (shape,) = shapes
    elements = next(iter(layouts.values())).kv.numel()
    if elements > MAX_ELEMENTS or shape[0] > MAX_LAYERS or shape[2] > 10:
        raise ValueError(
            f"each number is drawn: at most {MAX_ELEMENTS}, {MAX_LAYERS} layers and 10 tokens; got "
            f"{elements} in shape {list(shape)}"
        )
    if not (0 <= layer < shape[0] and 0 <= token < shape[2]):
        raise ValueError(
            f"there are layers 0 .. {shape[0] - 1} and tokens 0 .. {shape[2] - 1}; got layer "
            f"{layer}, token {token}"
        )
    return shape


def _words(count: Touched) -> str:
    pieces = f"{count.runs} piece{'s' * (count.runs != 1)}"
    lines = f"{count.lines} cache line{'s' * (count.lines != 1)}"
    return f"{count.num_bytes} bytes in {pieces} on {lines}"


def _counts(count: Touched) -> str:
    return f"{count.num_bytes} bytes, runs {count.runs}, lines {count.lines}, pages {count.pages}"


def _key(scene: Scene, layers: int, layer: int, token: int) -> None:
    x = 10.0
    for i in range(layers):
        box = (x, 34.0, 14.0, 14.0)
        scene.rect(f"key.layer{i}", box, _fill(i, 0), stroke=LAYERS[i])
        scene.text(f"key.layer{i}.name", x + 19, 46, f"layer {i}", 11)
        x += 27 + text_width(f"layer {i}", 11)
    scene.text("key.kv", x + 8, 46, "K1 = key of token 1, V1 = its value (paler)", 11, fill=QUIET)
    x += 24 + text_width("K1 = key of token 1, V1 = its value (paler)", 11)
    scene.rect("key.write", (x, 34, 14, 14), PAPER, **THICK)
    words = f"written: token {token}"
    scene.text("key.write.name", x + 20, 46, words, 11)
    x += 34 + text_width(words, 11)
    scene.rect("key.read", (x, 37, 20, 4), RED)
    scene.text("key.read.name", x + 26, 46, f"read: layer {layer}", 11)


def _fill(layer: int, kv: int) -> str:
    return tint(LAYERS[layer], 0.26 if kv else 0.55)


def _elements(layout: KVLayout) -> list[_Element]:
    """What lies at each place of the memory, from its strides."""
    size = layout.kv.itemsize
    steps = [layout.strides[axis] // size for axis in AXES]
    found: dict[int, _Element] = {}
    for index in product(*map(range, layout.kv.shape)):
        found[sum(i * step for i, step in zip(index, steps, strict=True))] = _Element(*index)
    return [found[place] for place in sorted(found)]


class _Strip:
    """The memory of one order, from its first byte to its last, as lines of boxes."""

    def __init__(self, scene: Scene, order: str, layout: KVLayout, top: float, line: int) -> None:
        self.scene, self.order, self.layout = scene, order, layout
        self.top, self.line = top, line
        self.elements = _elements(layout)

    def box(self, first: int, count: int = 1) -> Box:
        """Where `count` elements from `first` on are drawn."""
        width = (WIDTH - LEFT - 12) / self.line
        x, y = LEFT + first % self.line * width, self.top + LINE * (first // self.line)
        return x, y + 6, count * width, TALL

    def parts(self, key: Callable[[int], object]) -> list[tuple[int, Box]]:
        """Elements side by side, in one line, that are alike: the first, and the box of all."""
        alike = groupby(range(len(self.elements)), lambda i: (i // self.line, key(i)))
        found = [list(group) for _, group in alike]
        return [(group[0], self.box(group[0], len(group))) for group in found]

    def draw_numbers(self) -> None:
        """Every element, by layer and token."""
        scene, elements, size = self.scene, self.elements, self.layout.kv.itemsize
        for i, e in enumerate(elements):
            where = f"byte {i * size}: layer {e.layer}, {'KV'[e.kv]} of token {e.token}"
            tip = f"{where}, head {e.head}, number {e.dim}"
            edge: dict[str, Any] = {"stroke": PAPER, "stroke_width": 0.7}
            scene.rect(f"{self.order}.{i}", self.box(i), _fill(e.layer, e.kv), tip, **edge)
        for i, box in self.parts(lambda i: elements[i][:3]):
            edge = {"stroke": LAYERS[elements[i].layer]}
            scene.rect(f"{self.order}.whole{i}", box, "none", **edge, **DEAF)
            _centred(scene, f"{self.order}.token{i}", box, elements[i].label, 14.5, 10.5, INK)
        for i, box in self.parts(lambda i: elements[i].layer):
            words = f"layer {elements[i].layer}"
            _centred(scene, f"{self.order}.layer{i}", box, words, TALL + 12, 10, QUIET)
        for i in range(0, len(elements), self.line):
            place: dict[str, Any] = {"text_anchor": "end", "fill": QUIET}
            y = self.box(i)[1] + 14
            scene.text(f"{self.order}.at{i}", LEFT - 6, y, str(i * size), 10, **place)

    def draw_touched(self, layer: int, token: int, n: int) -> None:
        """A bar above what attention in a layer reads, a frame around a token's write."""
        read = _places(self.layout, self.layout.kv[layer, :, :n])
        for i, (x, y, wide, _) in self.parts(lambda i: i in read):
            if i in read:
                self.scene.rect(f"{self.order}.read{i}", (x, y - 6, wide, 4), RED, **DEAF)
        written = _places(self.layout, self.layout.kv[:, :, token])
        for i, box in self.parts(lambda i: i in written):
            if i in written:
                self.scene.rect(f"{self.order}.write{i}", box, "none", **THICK, **DEAF)


def _centred(
    scene: Scene, name: str, box: Box, words: str, down: float, size: float, fill: str
) -> None:
    """Words in the middle of a box, if they fit."""
    x, y, wide, _ = box
    if text_width(words, size) <= wide:
        style: dict[str, Any] = {"text_anchor": "middle", "fill": fill, **DEAF}
        scene.text(name, x + wide / 2, y + down, words, size, **style)


def _places(layout: KVLayout, part: Any) -> set[int]:
    """The elements that a view covers, as places in memory."""
    size = layout.kv.itemsize
    found = runs(layout.kv, part)
    return {i for start, count in found for i in range(start // size, (start + count) // size)}


def layout_race(times: Mapping[str, LayoutTimes]) -> Picture:
    """Measured seconds of each order: writing one token, and one step's attention in all layers.

    ValueError for no order, and for a time that is not above 0.
    """
    if not times or min(map(min, times.values())) <= 0:
        raise ValueError(f"give order -> LayoutTimes with times above 0, got {dict(times)}")
    panels: dict[str, list[float]] = {
        "writing one token": [1e6 * t.write for t in times.values()],
        "attention, all layers": [1e6 * t.attend for t in times.values()],
    }
    with house_style():
        figure = new_figure(9, 0.4 * len(times) + 1.3)
        axes = figure.subplots(1, 2, sharey=True)
        for ax, (title, values) in zip(axes, panels.items(), strict=True):
            _bars(ax, values)
            ax.set_title(f"{title}, measured here", fontsize=10.5)
        axes[0].set_yticks(range(len(times)), list(times), color=INK)
        told = []
        for title, values in panels.items():
            parts = [f"{name} {_us(value)}" for name, value in zip(times, values, strict=True)]
            told.append(f"{title}: {', '.join(parts)}")
        return finish(figure, f"Measured on this machine, {'; '.join(told)}.")


def _bars(ax: Axes, values: Sequence[float]) -> None:
    best, most = min(values), max(values)
    for y, value in enumerate(values):
        ax.barh(y, value, 0.5, facecolor=tint(SERIES[y % 6], 0.6), edgecolor=SERIES[y % 6])
        words = f"{_us(value)}" + ("" if value == best else f", {value / best:.3g} times")
        ax.text(value + most / 60, y, words, va="center", fontsize=9.5)
    ax.set(xlim=(0, 1.45 * most), ylim=(len(values) - 0.45, -0.55), xticks=[])
    ax.tick_params(left=False)
    ax.spines["bottom"].set_visible(False)
    ax.axvline(best, color=RULE, linewidth=1, zorder=0)


def _us(value: float) -> str:
    """Microseconds as people say them, three digits: 8.42 µs, 1.28 ms."""
    return f"{value / 1000:.3g} ms" if value >= 999.5 else f"{value:.3g} µs"
