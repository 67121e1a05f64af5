"""Introduced in notebook 04. Where memory goes: waste over time, pools slot by slot, a mistake.

Pools come from traces (pool.py); every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.checks import at_least_one
from tutorial_engine.trace.events import Trace
from tutorial_engine.trace.pool import PoolHistory
from tutorial_engine.viz.cache_plots import HATCH
from tutorial_engine.viz.parts import WIDTH, Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.pool_view import (
    LEFT,
    USED,
    draw_key,
    draw_names,
    draw_pool,
    looks_of,
    strip_height,
)
from tutorial_engine.viz.style import BLUE, INK, QUIET, RED, finish, house_style, new_figure

Run = Trace | PoolHistory
EMPTY: dict[str, Any] = {**HATCH, "edgecolor": "#8a959d", "linewidth": 0}
MOST = 4  # pools side by side


def waste_over_time(runs: Mapping[str, Run]) -> Picture:
    """A panel per run on the same axes: slots used, reserved but unused (hatched), free, by step.

    ValueError for no run, more than four, and a trace without its memory's sizes.
    """
    found = _histories(runs)
    steps = max(history.num_steps for history in found.values())
    slots = max(history.pool.num_slots for history in found.values())
    with house_style():
        figure = new_figure(10, 3.7)
        axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for ax, (name, history) in zip(axes, found.items(), strict=True):
            _filled(ax, history)
            ax.set(xlim=(-0.5, steps - 0.5), ylim=(0, 1.02 * slots), xlabel="step")
            ax.set_title(f"{name}: waste {history.mean_waste:.1f}, peak {history.peak_waste}")
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes[0].set_ylabel("slots")
        key = [
            Patch(facecolor=USED, label="used: a token is there"),
            Patch(**EMPTY, label="reserved, no token: waste"),
            Patch(facecolor="white", edgecolor=QUIET, label="free"),
        ]
        figure.legend(handles=key, loc="outside upper right", ncols=3, fontsize=9.5)
        told = [
            f"{name} {h.mean_waste:.1f} of {h.pool.num_slots} on average (peak {h.peak_waste}) in "
            f"{h.num_steps} steps"
            for name, h in found.items()
        ]
        return finish(figure, f"Slots reserved without a token: {'; '.join(told)}.")


def _histories(runs: Mapping[str, Run]) -> dict[str, PoolHistory]:
    if not 1 <= len(runs) <= MOST:
        raise ValueError(f"give 1 to {MOST} runs, name -> trace or history; got {list(runs)}")
    return {
        name: run if isinstance(run, PoolHistory) else PoolHistory.of(run)
        for name, run in runs.items()
    }


def _filled(ax: Axes, history: PoolHistory) -> None:
    """Three layers, a column per step."""
    usage = [moment.usage for moment in history.snapshots]
    edges = [step - 0.5 for step in range(len(usage) + 1)]

    def column(numbers: Sequence[int]) -> list[int]:
        return [*numbers, numbers[-1]]

    used = column([u.used for u in usage])
    held = column([u.used + u.reserved for u in usage])
    ax.fill_between(edges, 0, used, step="post", color=USED, linewidth=0)
    ax.fill_between(edges, used, held, step="post", **EMPTY)
    ax.step(edges, held, where="post", color=INK, linewidth=1.2)
    size = history.pool.num_slots
    box = (-0.5, 0.0), float(len(usage)), float(size)
    ax.add_patch(Rectangle(*box, fill=False, edgecolor=QUIET, linewidth=1))


def slots_at(runs: Mapping[str, Run], step: int) -> Picture:
    """Whole pools at one step, one below the other: each slot in the colour of its request.

    Hatched is reserved without a token, white free, thick what the step writes; a slot in two
    colours has a token that several requests share. ValueError for a step that a run has not.
    """
    found = _histories(runs)
    for name, history in found.items():
        if not 0 <= step < history.num_steps:
            raise ValueError(f"{name} has the steps 0 .. {history.num_steps - 1}, got {step}")
    looks = looks_of(list(found.values()))
    line = max(h.pool.unit for h in found.values()) if len(found) > 1 else 64
    top, heights = 66.0, [strip_height(h.pool, line) for h in found.values()]
    scene = Sheet(WIDTH, top + sum(heights) + 4, tip_at=(LEFT, top + sum(heights)))
    scene.text("title", 10, 22, f"the same requests, step {step}", 15, font_weight="bold")
    draw_key(scene, 22)
    draw_names(scene, looks, 48, {n for h in found.values() for n in h.snapshots[step].entries})
    told = []
    for (name, history), height in zip(found.items(), heights, strict=True):
        moment = history.snapshots[step]
        draw_pool(scene, name, moment, looks, top, line)
        top += height
        u, count = moment.usage, len(moment.running)
        told.append(
            f"{name} run {count} request{'s' * (count != 1)} in {u.used + u.reserved} of "
            f"{moment.pool.num_slots} slots, {u.reserved} of these without a token"
        )
    return scene.picture(f"Step {step}: {'; '.join(told)}.", zoom=1.0)


def layer_factor(spec: KVCacheSpec, budget: int, block_size: int = 16) -> Picture:
    """What happens when blocks are counted with the bytes of one layer: they are kept in all.

    `budget` in bytes. ValueError for one that has no room for a block.
    """
    at_least_one("block_size", block_size)
    right = num_blocks_in(budget, spec, block_size)
    wrong = num_blocks_in(budget, replace(spec, num_layers=1), block_size)
    block = spec.bytes_per_token * block_size
    rows = {"with the layer factor": right, "without it": wrong}
    with house_style():
        figure = new_figure(9.5, 2.9)
        ax = figure.subplots()
        most = wrong * block
        for y, (name, blocks) in enumerate(rows.items()):
            each = blocks * block / spec.num_layers  # one layer's shelf
            for layer in range(spec.num_layers):
                look = {"facecolor": BLUE, "alpha": 0.55 + 0.35 * (layer % 2)} if not y else HATCH
                edge = "none" if not y else RED
                ax.barh(y, each, 0.55, left=layer * each, edgecolor=edge, **look)
            words = f"{blocks:,} blocks in {spec.num_layers} layers: {_size(blocks * block)}"
            at = max(budget, blocks * block if blocks * block < most / 2 else 0)
            ax.text(at + most / 80, y - 0.38 * bool(y), words, va="center", fontsize=10)
            ax.text(-most / 80, y, name, va="center", ha="right", color=INK)
        ax.axvline(budget, color=INK, linewidth=1.6, linestyle="--")
        ax.text(
            budget + most / 160, -0.62, f"the budget, {_size(budget)}", fontsize=9.5, va="center"
        )
        layers = f"each piece is one of {spec.num_layers} layers"
        ax.text(most, 1.45, layers, ha="right", va="center", fontsize=9.5, color=QUIET)
        ax.set(ylim=(1.65, -0.85), xlim=(0, 1.01 * most), xticks=[], yticks=[])
        ax.spines[["bottom", "left"]].set_visible(False)
        kind = str(spec.dtype).removeprefix("torch.")
        return finish(
            figure,
            f"{_size(budget)}, blocks of {block_size} tokens, {spec.num_layers} layers of "
            f"{spec.num_kv_heads} K/V heads of {spec.k_head_dim} in {kind}: a block takes "
            f"{_size(block)} in all layers, so {right:,} fit. Divided by the "
            f"{_size(block // spec.num_layers)} of one layer there seem to be {wrong:,}, and they "
            f"take {_size(wrong * block)}, {wrong * block / budget:.3g} times the budget.",
        )


def _size(count: float) -> str:
    """Bytes as people say them: 10 GiB, 256 KiB, 320 GiB."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count:.0f} bytes"
