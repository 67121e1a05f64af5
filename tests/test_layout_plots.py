"""The layout laboratory's pictures: every number where the strides put it, every byte framed."""

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from traces import check_words, items

from tutorial_engine.lab.layouts import ORDERS, KVLayout, layouts
from tutorial_engine.viz.layout_plots import LAYERS, layouts_picture
from tutorial_engine.viz.picture import Picture

L, N, H, D = 3, 4, 2, 2


def numbered(layers: int = L, tokens: int = N, heads: int = H, dim: int = D) -> Tensor:
    """K and V in which every number is another one."""
    shape = (layers, 2, tokens, heads, dim)
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


PICTURES: dict[str, Callable[[], Picture]] = {
    "all": lambda: layouts_picture(layouts(numbered()), layer=1, token=2),
    "end": lambda: layouts_picture(layouts(numbered()), layer=0, token=3),
    "one": lambda: layouts_picture({"by layer": KVLayout("by layer", numbered(6, 5, 1, 3))}, 5, 0),
    "bf16": lambda: layouts_picture(layouts(numbered(2, 2, 4, 8).bfloat16()), 1, 1),
    "room": lambda: layouts_picture(layouts(numbered()), layer=1, token=1, num_tokens=3),
}
every_scene = pytest.mark.parametrize("name", PICTURES)


@functools.cache
def drawn(name: str) -> Picture:
    return PICTURES[name]()


@every_scene
def test_words_can_be_read_and_the_picture_is_the_same_every_time(name: str) -> None:
    check_words(drawn(name))
    assert PICTURES[name]() == drawn(name) and len(drawn(name).png) <= 60_000


def box(element: ET.Element) -> tuple[float, ...]:
    return tuple(float(element.attrib[key]) for key in ("x", "y", "width", "height"))


@pytest.mark.parametrize("order", ORDERS)
def test_every_number_stands_where_the_memory_has_it(order: str) -> None:
    """The memory itself, byte after byte, against colour, label and tip of each box."""
    kv = numbered()
    layout, found = KVLayout(order, kv), items(drawn("all"))
    memory = torch.frombuffer(bytearray(layout.kv.untyped_storage().tolist()), dtype=torch.float32)
    for i, value in enumerate(memory.tolist()):
        layer, which, token, head, dim = (int(x) for x in (kv == value).nonzero()[0])
        fill = LAYERS[layer].light if which else LAYERS[layer].dark
        assert found[f"{order}.{i}"].attrib["fill"] == fill
        tip = f"byte {4 * i}: layer {layer}, {'KV'[which]} of token {token}, head {head}, number"
        assert f"{tip} {dim}" in drawn("all").svg
    boxes = [box(found[f"{order}.{i}"]) for i in range(len(memory))]
    assert boxes == sorted(boxes, key=lambda b: (b[1], b[0])) and len(set(boxes)) == len(boxes)


@pytest.mark.parametrize("name", ["all", "end", "room"])
@pytest.mark.parametrize("order", ORDERS)
def test_frames_and_bars_are_over_the_bytes_that_are_touched(order: str, name: str) -> None:
    layer, token, n = {"all": (1, 2, N), "end": (0, 3, N), "room": (1, 1, 3)}[name]
    layout, found = KVLayout(order, numbered()), items(drawn(name))

    def over(kind: str) -> set[int]:
        """The elements that frames or bars of this kind cover, from left to right."""
        marks = [box(e) for key, e in found.items() if re.fullmatch(rf"{order}\.{kind}\d+", key)]
        covered = set()
        for i in range(layout.kv.numel()):
            x, y, wide, _ = box(found[f"{order}.{i}"])
            middle = x + wide / 2
            covered |= {i for a, b, c, _ in marks if a < middle < a + c and abs(b - y) <= 6.1}
        return covered

    def places(part: Tensor) -> set[int]:
        start = layout.kv.data_ptr()
        return {
            (part[tuple(index)].data_ptr() - start) // 4
            for index in torch.cartesian_prod(*map(torch.arange, part.shape))
        }

    assert over("write") == places(layout.kv[:, :, token])
    assert over("read") == places(layout.kv[layer, :, :n])


@every_scene
def test_counters_are_those_of_the_layouts(name: str) -> None:
    kv, layer, token, n = {
        "all": (numbered(), 1, 2, N),
        "end": (numbered(), 0, 3, N),
        "one": (numbered(6, 5, 1, 3), 5, 0, 5),
        "bf16": (numbered(2, 2, 4, 8).bfloat16(), 1, 1, 2),
        "room": (numbered(), 1, 1, 3),
    }[name]
    found = items(drawn(name))
    for order in ["by layer"] if name == "one" else ORDERS:
        layout = KVLayout(order, kv)
        write, read = layout.touched_by_write(token), layout.touched_by_read(layer, n)
        said = [f"{t.runs} piece{'s' * (t.runs != 1)}" for t in (write, read)]
        assert found[f"{order}.counts"].text == f"writing touches {said[0]}, reading {said[1]}"
        assert f"{order}, writing touches {said[0]} and reading {said[1]}" in drawn(name).caption
        assert f"layers ({write.num_bytes} bytes), and layer {layer} is read" in drawn(name).caption
        assert f"is read ({read.num_bytes} bytes): " in drawn(name).caption


def test_free_places_are_empty_and_make_heads_first_read_a_piece_for_each_head() -> None:
    """A full storage hides it: there, the heads of a layer are neighbours."""
    texts = [e.text for e in items(drawn("room")).values()]
    assert "free" in texts and f"K{N - 1}" not in texts and "K2" in texts
    assert "room for 4 tokens, and 3 are there" in drawn("room").caption
    reads = [drawn(name).caption.count("and reading 2 pieces") for name in ("all", "room")]
    assert reads == [2, 1]  # by layer, heads first: 2 · H when there is room
    assert f"and reading {2 * H} pieces" in drawn("room").caption


def test_tokens_and_layers_are_named_besides_their_colour() -> None:
    texts = [e.text for e in items(drawn("all")).values()]
    for token in range(N):
        assert f"K{token}" in texts and f"V{token}" in texts
    assert all(texts.count(f"layer {layer}") > 2 for layer in range(L))
    heads = [text for text in texts if text and text.endswith(": head 0 | head 1")]
    assert len(heads) == 2 * L  # of K and V, in the order that puts heads first
    assert "written: token 2" in texts and "read: layer 1" in texts


def picture(**changes: Any) -> Picture:
    options: dict[str, Any] = {"layouts": layouts(numbered()), "layer": 0, "token": 0} | changes
    return layouts_picture(**options)


REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "nothing": (lambda: picture(layouts={}), "at least one layout"),
    "no layer": (lambda: picture(layer=3), r"layers 0 \.\. 2 .* got layer 3"),
    "no token": (lambda: picture(token=-1), "got layer 0, token -1"),
    "no such place": (lambda: picture(num_tokens=5), "token 0 of 5 in room for 4"),
    "a free token": (lambda: picture(token=3, num_tokens=3), "token 3 of 3 in room for 4"),
    "too large": (lambda: picture(layouts=layouts(numbered(6, 8))), "at most 256, 6 layers"),
    "two shapes": (
        lambda: picture(layouts=layouts(numbered()) | {"b": KVLayout("by layer", numbered(2))}),
        "the same K and V",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()
