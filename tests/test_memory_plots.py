"""Pools slot by slot, waste over time, the dial's curves: what is drawn is what was counted."""

import functools
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engines import one_thread
from PIL import Image
from traces import NASTY, SVG, check_words, items, plot_words, renamed
from tutorial_engine.lab.pool import CELLS, ROWS, PoolHistory, memory_over_time, moments
from tutorial_engine.viz.dial_plots import dial

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.lab.dial import DialPoint, Measured, sharing, turn
<<<<<<< HEAD
from tutorial_engine.trace.pool import CELLS, ROWS, PoolHistory, snapshots
=======
>>>>>>> main
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.memory_plots import layer_factor, slots_at, waste_over_time
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.pool_view import MAX_SLOTS
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.style import PAPER

GIB = 1 << 30
LLAMA = KVCacheSpec(  # 32 layers, 32 heads of 128, bf16
    num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
)
SMALL = KVCacheSpec(num_layers=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8)


@functools.cache
def points() -> tuple[DialPoint, ...]:
    """Eight requests on 128 slots, at five positions; the measured numbers are made up."""
    with one_thread():
        prefix = load_tokenizer().encode("Once upon a time Anna had a red kite.").ids
        arrivals = sharing(prefix, 512, 8, outputs=(4, 12))
        found = turn(load_model(), arrivals, (1, 4, 16), 128, 32, repeats=0)
    return tuple(
        replace(p, measured=Measured(100.0 + 50 * i, 1e-6 * (5 - i))) for i, p in enumerate(found)
    )


def at(position: object) -> DialPoint:
    return next(p for p in points() if p.position == position)


def three() -> dict[str, Trace | PoolHistory]:
    return {"rows": at(ROWS), "pages": at(4).trace, "cells": at(CELLS)}


PICTURES: dict[str, Callable[[], Picture]] = {
    "waste": lambda: waste_over_time(three()),
    "waste of one": lambda: waste_over_time({"$x$ <s>": at(16)}),
    "slots": lambda: slots_at(three(), 6),
    "slots of one": lambda: slots_at({"pages": at(4)}, 9),
    "layers": lambda: layer_factor(LLAMA, 10 * GIB),
    "two layers": lambda: layer_factor(SMALL, 100_000, 4),
    "dial": lambda: dial(points()),
    "no pages": lambda: dial([at(CELLS), at(ROWS)]),
}
SCENES = ("slots", "slots of one")
PLOTS = [name for name in PICTURES if name not in SCENES]
every = pytest.mark.parametrize("name", PICTURES)


@functools.cache
def drawn(name: str) -> Picture:
    return PICTURES[name]()


@every
def test_picture_is_the_same_every_time(name: str) -> None:
    assert PICTURES[name]() == drawn(name)


@every
def test_picture_is_svg_and_a_small_png(name: str) -> None:
    picture = drawn(name)
    assert ET.fromstring(picture.svg).tag == f"{SVG}svg" and len(picture.png) <= 60_000
    with Image.open(io.BytesIO(picture.png)) as image:
        assert image.format == "PNG" and image.width <= 1000


@pytest.mark.parametrize("name", PLOTS)
def test_caption_is_in_the_plot_and_no_text_is_tiny(name: str) -> None:
    picture = drawn(name)
    assert " ".join(picture.caption.split()) in " ".join(" ".join(plot_words(picture)).split())
    scales = [float(s) for s in re.findall(r"scale\(([\d.]+) -", picture.svg)]
    # matplotlib draws outlines of 100 units a letter height, in points: 100 dots are 72 points
    assert scales and min(scales) * 100 * 100 / 72 >= 9


@pytest.mark.parametrize("name", SCENES)
def test_words_in_a_scene_can_be_read(name: str) -> None:
    check_words(drawn(name))


@pytest.mark.parametrize("step", range(0, 18, 3))
def test_words_can_be_read_at_other_steps(step: int) -> None:
    check_words(slots_at(three(), step))
    check_words(slots_at({"p": at(1)}, step))


# -- waste over time ------------------------------------------------------------------------------


def test_caption_has_the_mean_and_the_peak_of_each_run() -> None:
    parts = []
    for name, run in three().items():
        trace = run if isinstance(run, Trace) else next(p.trace for p in points() if p is run)
        idle = [one.usage.reserved for one in snapshots(trace)]
        mean = sum(idle) / len(idle)
        parts.append(f"{name} {mean:.1f} of 128 on average (peak {max(idle)}) in {len(idle)} steps")
        assert f"{name}: waste {mean:.1f}, peak {max(idle)}" in plot_words(drawn("waste"))
    assert drawn("waste").caption == f"Slots reserved without a token: {'; '.join(parts)}."


def test_reserved_is_hatched_and_no_colour_stands_alone() -> None:
    assert "url(#" in drawn("waste").svg and "<pattern" in drawn("waste").svg
    words = plot_words(drawn("waste"))
    assert {"used: a token is there", "reserved, no token: waste", "free"} <= set(words)


# -- slot by slot ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, 6, 11])
@pytest.mark.parametrize("position", [CELLS, 1, 4, 16, ROWS])
def test_each_slot_looks_like_what_is_in_it(position: object, step: int) -> None:
    point = at(position)
    moment = point.snapshots[step]
    found = items(slots_at({"it": point}, step))
    for slot in range(128):
        own, who = found[f"it.slot{slot}"], list(moment.tokens.get(slot, ()))
        looks = [look(point.names.index(name)) for name in who]
        want = PAPER if slot not in moment.owners else looks[0].dark if who else HATCHED
        assert own.attrib["fill"] == want
        shared = found.get(f"it.slot{slot}.shared")
        assert (shared is not None) == (len(who) > 1)
        if shared is not None:
            assert shared.attrib["fill"] == looks[1].dark


@pytest.mark.parametrize("position", [CELLS, 4, ROWS])
def test_thick_frames_are_around_what_the_step_writes(position: object) -> None:
    moment = at(position).snapshots[6]
    found = items(slots_at({"it": at(position)}, 6))

    def inside(outer: ET.Element, inner: ET.Element) -> bool:
        (x, y, w, h), (a, b, c, d) = (
            [float(e.attrib[k]) for k in ("x", "y", "width", "height")] for e in (outer, inner)
        )
        return x - 0.1 <= a and a + c <= x + w + 0.1 and y - 0.1 <= b and b + d <= y + h + 0.1

    frames = [e for name, e in found.items() if name.startswith("it.new")]
    framed = {s for s in range(128) if any(inside(f, found[f"it.slot{s}"]) for f in frames)}
    assert framed == moment.new and framed


def test_every_request_that_holds_slots_is_named_in_the_pool_and_above_it() -> None:
    for position in (CELLS, 4, 16, ROWS):
        point = at(position)
        moment, found = point.snapshots[6], items(slots_at({"it": point}, 6))
        named = {e.text for name, e in found.items() if name.startswith("it.who")}
        above = {e.text for name, e in found.items() if re.fullmatch(r"name\.\w", name)}
        letters = {name for words in named if words for name in words.split("+")}
        assert above == set(moment.entries) <= letters


def test_a_title_counts_its_pool() -> None:
    usage = at(4).snapshots[9].usage
    shared = sum(len(who) > 1 for who in at(4).snapshots[9].tokens.values())
    assert shared, "or the words would not be there"
    assert items(drawn("slots of one"))["pages.title"].text == (
        f"pages: 32 blocks of 4 slots · {usage.used} used ({shared} shared) · {usage.reserved} "
        f"reserved without a token · {usage.free} free"
    )


def test_caption_has_each_pool_in_it() -> None:
    told = []
    for name, point in (("rows", at(ROWS)), ("pages", at(4)), ("cells", at(CELLS))):
        moment = point.snapshots[6]
        u, n = moment.usage, len(moment.running)
        told.append(
            f"{name} run {n} request{'s' * (n != 1)} in {u.used + u.reserved} of 128 slots, "
            f"{u.reserved} of these without a token"
        )
    assert drawn("slots").caption == f"Step 6: {'; '.join(told)}."


def test_hovering_tells_the_slot_its_block_and_its_tokens() -> None:
    moment = at(4).snapshots[6]
    svg = slots_at({"it": at(4)}, 6).svg
    slot, who = next((s, w) for s, w in moment.tokens.items() if len(w) > 1)
    parts = " = ".join(f"token {position} of {name}" for name, position in who.items())
    where = f"slot {slot} = block {slot // 4}, place {slot % 4}"
    assert f"{where}: K and V of {parts}" in svg
    idle = next(s for s in sorted(moment.owners) if s not in moment.tokens)
    assert f"slot {idle} = block {idle // 4}, place {idle % 4}: reserved for" in svg
    free = next(s for s in range(128) if s not in at(4).snapshots[1].owners)
    early = slots_at({"it": at(4)}, 1).svg
    assert f"slot {free} = block {free // 4}, place {free % 4}: free" in early


def test_ids_of_any_kind_are_written_literally() -> None:
    trace = renamed(at(4).trace, dict(zip("ABCD", NASTY, strict=True)))
    picture = slots_at({NASTY[0]: trace, "$b$": at(ROWS)}, 4)
    assert {e.tag for e in ET.fromstring(picture.svg).iter()} <= {
        e.tag for e in ET.fromstring(drawn("slots").svg).iter()
    }
    assert "script" not in re.sub(r"&lt;/?script", "", picture.svg)
    assert "$x$ <s>" in " ".join(plot_words(drawn("waste of one")))


def test_every_view_of_a_request_has_its_colour() -> None:
    """By the order of coming, also where somebody came who has nothing here yet."""
    names = at(ROWS).names
    late = [name for name in at(ROWS).snapshots[6].entries if names.index(name) != 0]
    found = items(drawn("slots"))
    for name in late:
        assert found[f"name.{name}.swatch"].attrib["fill"] == look(names.index(name)).dark


# -- the layer factor -----------------------------------------------------------------------------


def test_blocks_without_the_layer_factor_take_as_many_times_the_budget_as_there_are_layers() -> (
    None
):
    assert drawn("layers").caption == (
        "10 GiB, blocks of 16 tokens, 32 layers of 32 K/V heads of 128 in bfloat16: a block takes "
        "8 MiB in all layers, so 1,280 fit. Divided by the 256 KiB of one layer there seem to be "
        "40,960, and they take 320 GiB, 32 times the budget."
    )
    words = " ".join(plot_words(drawn("layers")))
    assert "1,280 blocks in 32 layers: 10 GiB" in words and "the budget, 10 GiB" in words
    assert "40,960 blocks in 32 layers: 320 GiB" in words


def test_the_layer_factor_is_computed_for_any_model() -> None:
    """4 layers of 2 heads of 8, K and V in fp32: 512 bytes a token, 2 KiB a block of 4."""
    caption = drawn("two layers").caption
    assert "97.66 KiB, blocks of 4 tokens, 4 layers of 2 K/V heads of 8 in float32" in caption
    assert "a block takes 2 KiB in all layers, so 48 fit" in caption
    assert "512 bytes of one layer there seem to be 195, and they take 390 KiB, 3.99" in caption


# -- the dial -------------------------------------------------------------------------------------


def test_the_dial_tells_its_ends_and_its_middle() -> None:
    parts = [
        f"{p.name}: waste {p.mean_waste:.1f}, {p.total_entries} table entries, {p.tokens_found} "
        f"tokens found, {p.bytes_gathered_per_step / 1024:.0f} KiB a step, {p.most_running} at once"
        for p in (at(CELLS), at(4), at(ROWS))
    ]
    assert drawn("dial").caption == (
        f"128 slots. {'; '.join(parts)}. At all 5 positions the tokens are those of each request "
        "alone."
    )
    wrong = [replace(at(CELLS), tokens_equal=False), at(ROWS)]
    assert "At only 1 of 2 positions the tokens are those" in dial(wrong).caption


def test_the_dial_names_every_position() -> None:
    assert {"cells", "1", "4", "16", "rows"} <= set(plot_words(drawn("dial")))


# -- what cannot be drawn -------------------------------------------------------------------------


def large() -> Trace:
    return at(CELLS).trace._replace(settings={"num_cells": MAX_SLOTS + 1})


REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "no run": (lambda: waste_over_time({}), "give 1 to 4 runs"),
    "five runs": (lambda: waste_over_time(dict.fromkeys("abcde", at(4))), "give 1 to 4 runs"),
    "no sizes": (lambda: waste_over_time({"a": Trace({}, ())}), "no rows, blocks or cells"),
    "no pool": (lambda: slots_at({}, 0), "give 1 to 4 runs"),
    "no such step": (lambda: slots_at({"a": at(4)}, 999), r"a has the steps 0 \.\. \d+, got 999"),
    "before it": (lambda: slots_at({"a": at(4)}, -1), "got -1"),
    "too large": (lambda: slots_at({"a": large()}, 0), "513 slots are too many to draw each"),
    "no budget": (lambda: layer_factor(LLAMA, 1), "Not enough memory for KV cache"),
    "no block": (lambda: layer_factor(LLAMA, GIB, 0), "block_size"),
    "no points": (lambda: dial([]), "at least two points"),
    "twice": (lambda: dial([at(4), at(4)]), "each position once"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_pool_is_drawn_from_the_trace_alone() -> None:
    """A trace that was saved and loaded gives the same picture as the point it came from."""
    again = Trace.from_json(at(4).trace.to_json())
    assert slots_at({"p": again}, 6) == slots_at({"p": at(4)}, 6)
    assert tuple(snapshots(again)) == at(4).snapshots
