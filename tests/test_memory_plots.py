"""Pools slot by slot, waste, the dial's curves, the shift: what is drawn is what was counted."""

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from traces import NASTY, check_plot, check_words, items, plot_words, renamed

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.lab.dial import DialPoint, sharing, sweep_block_sizes
from tutorial_engine.lab.shift import ShiftGap
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import CELLS, ROWS, PoolHistory, snapshots
from tutorial_engine.viz.memory_plots import (
    dial,
    layer_factor,
    shift_picture,
    shown,
    users_at_once,
    waste_over_time,
)
from tutorial_engine.viz.parts import Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.pool_view import draw_key, draw_names, draw_pool, looks_of
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.style import PAPER

GIB = 1 << 30
LLAMA = KVCacheSpec(  # 32 layers, 32 heads of 128, bf16
    num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
)
SMALL = KVCacheSpec(num_layers=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8)
EXACT = ShiftGap(1, 3e-7, (1e-7,), (0.0,), 2.0)
OFF = ShiftGap(3, 0.25, (0.0, 0.5, 0.1), (2e-6, 7.0, 1.25), 1.0)


@functools.cache
def points() -> tuple[DialPoint, ...]:
    """Eight requests on 128 slots, at five positions."""
    prefix = load_tokenizer().encode("Once upon a time Anna had a red kite.").ids
    arrivals = sharing(prefix, 512, 8, outputs=(4, 12))
    return tuple(sweep_block_sizes(load_model(), arrivals, (1, 4, 16), 128, 32))


@functools.cache
def bigger() -> DialPoint:
    """One request on twice as many slots."""
    return sweep_block_sizes(load_model(), sharing([1], 9, 1), (), 256, 32)[0]


def at(position: object) -> DialPoint:
    return next(p for p in points() if p.position == position)


def three() -> dict[str, Trace | PoolHistory]:
    return {"rows": at(ROWS), "pages": at(4).trace, "cells": at(CELLS)}


PICTURES: dict[str, Callable[[], Picture]] = {
    "waste": lambda: waste_over_time(three()),
    "waste of one": lambda: waste_over_time({"$x$ <s>": at(16)}),
    "layers": lambda: layer_factor(LLAMA, 10 * GIB),
    "two layers": lambda: layer_factor(SMALL, 100_000),
    "dial": lambda: dial(points()),
    "no pages": lambda: dial([at(CELLS), at(ROWS)]),
    "shift": lambda: shift_picture({"random": EXACT, "trained": OFF}, 10),
    "exact shift": lambda: shift_picture([EXACT]),
}


@functools.cache
def drawn(name: str) -> Picture:
    return check_plot(PICTURES[name], pixels=1000)


@functools.cache
def words(name: str) -> list[str]:
    return plot_words(drawn(name))


@pytest.mark.parametrize("name", PICTURES)
def test_plot_is_sound(name: str) -> None:
    drawn(name)


# -- waste over time ------------------------------------------------------------------------------


def test_caption_has_the_mean_and_the_peak_of_each_run() -> None:
    parts = []
    for name, position in (("rows", ROWS), ("pages", 4), ("cells", CELLS)):
        idle = [snapshot.usage.reserved for snapshot in snapshots(at(position).trace)]
        mean = sum(idle) / len(idle)
        most = max(snapshot.usage.used for snapshot in snapshots(at(position).trace))
        parts.append(
            f"{name} {mean:.1f} of 128 on average, {max(idle)} at most (tokens fill {most} at most)"
        )
        assert f"{name}: {mean:.1f} wasted on average" in words("waste")
    assert "pool: 128 slots" in words("waste")
    told = f"Slots reserved without a token in a step: {'; '.join(parts)}."
    assert drawn("waste").caption == told
    assert "$x$ <s>" in " ".join(words("waste of one"))


def test_reserved_is_hatched_and_no_colour_stands_alone() -> None:
    assert "url(#" in drawn("waste").svg and "<pattern" in drawn("waste").svg
    key = {"used: a token is there", "reserved, no token: waste", "free"}
    assert key <= set(words("waste"))


# -- slot by slot ---------------------------------------------------------------------------------


def pool_picture(point: PoolHistory, step: int, name: str = "it") -> Picture:
    now, looks = point.snapshots[step], looks_of([point])
    sheet = Sheet(1000, 420)
    draw_key(sheet, 22)
    draw_names(sheet, looks, 48, set(now.entries))
    draw_pool(sheet, name, now, looks, 66, 64)
    return sheet.picture("")


@pytest.mark.parametrize("step", [0, 6, 11])
@pytest.mark.parametrize("position", [CELLS, 1, 4, 16, ROWS])
def test_each_slot_looks_like_what_is_in_it_and_thick_frames_are_around_the_new(
    position: object, step: int
) -> None:
    point = at(position)
    now, picture = point.snapshots[step], pool_picture(point, step)
    found = items(picture)
    check_words(picture)

    def box(name: str) -> list[float]:
        return [float(found[name].attrib[k]) for k in ("x", "y", "width", "height")]

    frames = [box(name) for name in found if name.startswith("it.new")]
    for slot in range(128):
        who = list(now.tokens.get(slot, ()))
        looks = [look(point.names.index(name)) for name in who]
        want = PAPER if slot not in now.owners else looks[0].dark if who else HATCHED
        assert found[f"it.slot{slot}"].attrib["fill"] == want
        shared = [e.attrib["fill"] for n, e in found.items() if n.startswith(f"it.slot{slot}.sh")]
        assert set(shared) - {"none"} == {one.dark for one in looks[:2] if len(who) > 1}
        x, y, wide, high = box(f"it.slot{slot}")
        middle = (x + wide / 2, y + high / 2)
        framed = any(a < middle[0] < a + c and b < middle[1] < b + d for a, b, c, d in frames)
        assert framed == (slot in now.new)
    named = {e.text for name, e in found.items() if name.startswith("it.who")}
    above = {e.text for name, e in found.items() if re.fullmatch(r"name\.\w", name)}
    assert (
        above == set(now.entries) <= {one for words in named if words for one in words.split("+")}
    )


def test_a_title_counts_its_pool_and_hovering_tells_the_slot_its_block_and_its_tokens() -> None:
    now, picture = at(4).snapshots[6], pool_picture(at(4), 6)
    usage, shared = now.usage, sum(len(who) > 1 for who in now.tokens.values())
    assert shared, "or the words would not be there"
    assert items(picture)["it.title"].text == (
        f"it: 32 blocks of 4 slots · {usage.used} used ({shared} shared) · {usage.reserved} "
        f"reserved without a token · {usage.free} free"
    )
    slot, who = next((s, w) for s, w in now.tokens.items() if len(w) > 1)
    parts = " = ".join(f"token {position} of {name}" for name, position in who.items())
    assert f"slot {slot} = block {slot // 4}, place {slot % 4}: K and V of {parts}" in picture.svg
    idle = next(s for s in sorted(now.owners) if s not in now.tokens)
    assert f"slot {idle} = block {idle // 4}, place {idle % 4}: reserved for" in picture.svg
    free = next(s for s in range(128) if s not in at(4).snapshots[1].owners)
    early = pool_picture(at(4), 1).svg
    assert f"slot {free} = block {free // 4}, place {free % 4}: free" in early


def test_ids_of_any_kind_are_written_literally() -> None:
    history = PoolHistory.of(renamed(at(4).trace, dict(zip("ABCD", NASTY, strict=True))))
    picture = pool_picture(history, 4, NASTY[0])
    assert "script" not in {e.tag.split("}")[1] for e in ET.fromstring(picture.svg).iter()}
    assert "script" not in re.sub(r"&lt;/?script", "", picture.svg)


# -- users at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [4, CELLS])
def test_users_at_once_draws_both_pools_at_their_fullest_step_and_who_runs_until_when(
    position: object,
) -> None:
    runs = {"rows": at(ROWS).trace, "others": at(position).trace}
    picture = users_at_once(runs)
    check_words(picture)
    assert users_at_once(runs) == picture and len(picture.png) < 60_000
    found, told = items(picture), []
    for name, point in (("rows", at(ROWS)), ("others", at(position))):
        most = max(len(s.running) for s in point.snapshots)
        now = next(s for s in point.snapshots if s is point.fullest)
        assert len(now.running) == most
        for slot in range(128):
            who = list(now.tokens.get(slot, ()))
            fill = PAPER if slot not in now.owners else HATCHED
            fill = look(point.names.index(who[0])).dark if who else fill
            assert found[f"{name}.slot{slot}"].attrib["fill"] == fill
        names = f"{len(now.waiting)} wait: {' '.join(now.waiting)}"
        queue = names if now.waiting else "nobody waits"
        assert found[f"{name}.queue"].text == f"step {now.step}: {most} run, {queue}"
        told.append(f"in {name} {most} requests with {now.usage.used} tokens run in step")
        assert f"all are answered after {point.milliseconds:.0f} ms" in picture.caption
        line = [
            tuple(map(float, pair.split()))
            for pair in found[f"run.{name}"].attrib["d"][1:].split("L")
        ]
        steps = line[1:-1:2]  # where each step's level begins
        assert len(steps) == point.num_steps and len({y for _, y in steps}) == len(
            {len(s.running) for s in point.snapshots}
        )
    assert all(part in picture.caption for part in told)
    prices = "10 ms for each forward and 1 ms for each token"
    assert found["chart.ms"].text == f"ms on a virtual clock: {prices}"
    assert found["title"].text == (
        f"The same 128 slots: rows serve {at(ROWS).most_running} and others serve "
        f"{at(position).most_running} of 8 users at once"
    )


# -- the layer factor -----------------------------------------------------------------------------


def test_blocks_without_the_layer_factor_take_as_many_times_the_budget_as_there_are_layers() -> (
    None
):
    assert drawn("layers").caption == (
        "10 GiB, blocks of 16 tokens, 32 layers of 32 K/V heads of 128 in bfloat16: a block takes "
        "8 MiB in all layers, so 1,280 fit. Divided by the 256 KiB of one layer there seem to be "
        "40,960, and they take 320 GiB, 32 times the budget."
    )
    said = " ".join(words("layers"))
    assert "1,280 blocks in 32 layers: 10 GiB" in said and "the budget, 10 GiB" in said
    assert "40,960 blocks in 32 layers: 320 GiB" in said


def test_the_layer_factor_is_computed_for_any_model() -> None:
    """4 layers of 2 heads of 8, K and V in fp32: 512 bytes a token, 8 KiB a block."""
    caption = drawn("two layers").caption
    assert "97.66 KiB, blocks of 16 tokens, 4 layers of 2 K/V heads of 8 in float32" in caption
    assert "a block takes 8 KiB in all layers, so 12 fit" in caption
    assert "2 KiB of one layer there seem to be 48, and they take 384 KiB, 3.93" in caption


# -- the dial -------------------------------------------------------------------------------------


def test_the_dial_tells_its_ends_and_its_middle_and_names_every_position() -> None:
    parts = [
        f"{p.name}: {p.milliseconds:.0f} ms, {p.tokens_run} tokens run, waste {p.mean_waste:.1f}"
        for p in (at(CELLS), at(4), at(ROWS))
    ]
    assert drawn("dial").caption == (
        f"128 slots, milliseconds on the engine's clock. {'; '.join(parts)}. At all 5 positions "
        "the tokens are those of each request alone."
    )
    wrong = [replace(at(CELLS), tokens_equal=False), at(ROWS)]
    assert "At only 1 of 2 positions the tokens are those" in dial(wrong).caption
    assert {"cells", "1", "4", "16", "rows"} <= set(words("dial"))


# -- the context shift ----------------------------------------------------------------------------


def test_caption_has_the_verdict_of_each_model_and_no_rounding_noise() -> None:
    assert drawn("shift").caption == (
        "Forgetting 10 tokens: logits with a context shift against a fresh run: "
        "random: equal; trained: off by up to 0.25 where the largest is 1. K and V (trained) "
        "differ from layer 1 on (tolerance 1e-05)."
    )
    assert drawn("exact shift").caption.endswith(
        "1 layer: equal. K and V (1 layer) agree everywhere (tolerance 1e-05)."
    )


def test_numbers_are_those_that_were_measured_and_what_is_off_is_hatched() -> None:
    said = words("shift")
    for number in (EXACT.logits, OFF.logits, *OFF.keys, *OFF.values):
        assert shown(number) in said
    assert said.count("K") == said.count("V") == 3
    assert {"random", "trained", "layer 0", "layer 2"} <= set(said)
    assert "<pattern" in drawn("shift").svg and "<pattern" not in drawn("exact shift").svg


# -- what cannot be drawn -------------------------------------------------------------------------


def runs(names: Sequence[str]) -> dict[str, Trace | PoolHistory]:
    return dict.fromkeys(names, at(4))


REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "no run": (lambda: waste_over_time({}), "give 1 to 4 runs"),
    "five runs": (lambda: waste_over_time(runs("abcde")), "give 1 to 4 runs"),
    "no sizes": (lambda: waste_over_time({"a": Trace({}, ())}), "no rows, blocks or cells"),
    "one run": (lambda: users_at_once({"a": at(4).trace}), "give 2 to 4 runs"),
    "two pools": (
        lambda: users_at_once({"a": at(4).trace, "b": bigger().trace}),
        "pools of the same size",
    ),
    "no budget": (lambda: layer_factor(LLAMA, 1), "Not enough memory for KV cache"),
    "no points": (lambda: dial([]), "at least two points"),
    "twice": (lambda: dial([at(4), at(4)]), "each position once"),
    "no gap": (lambda: shift_picture([]), "at least one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()
