"""Masks, RoPE, heads, training and cost: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor

from tutorial_engine.viz.charts import HATCH, MIDDLE, panels
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    BLUE,
    GREEN,
    INK,
    MAGNITUDE,
    ORANGE,
    PAPER,
    QUIET,
    RED,
    RULE,
    SERIES,
    finish,
    house_style,
)

INDUCTION = 0.4  # from this score on a head counts as an induction head
WEIGHT = "attention weight (hatched = forbidden)"


@house_style()
def mask_picture(masks: Mapping[str, Tensor]) -> Picture:
    """Bool masks [q, kv] side by side, all with square cells of one size: row = query."""
    wide = sum(mask.shape[1] + 2.2 for mask in masks.values())
    tall = max(mask.shape[0] for mask in masks.values())
    figure, (ax,) = panels(0.38 * wide + 0.4, 0.38 * tall + 1.7)
    left, parts = 0.0, []
    for title, mask in masks.items():
        _cells(ax, mask, left)
        ax.text(left - 0.5, -1.5, title, fontweight="bold", fontsize=11)
        left += mask.shape[1] + 2.2
        parts.append(f"{title}: {int(mask.sum())} of {mask.numel()} pairs")
    ax.set(xlim=(-1.9, left - 2.2), ylim=(tall + 0.6, -2.2), aspect="equal")
    ax.axis("off")
    rule = "Blue with ✓: may attend, because key_pos ≤ query_pos. "
    return finish(figure, rule + "; ".join(parts) + ".")


def _cells(ax: Axes, mask: Tensor, left: float) -> None:
    """One mask from x = left on, with the positions of its queries and keys."""
    q_len, kv_len = mask.shape
    quiet: dict[str, Any] = {"color": QUIET, "fontsize": 9, **MIDDLE}
    for (row, column), allowed in np.ndenumerate(mask.numpy()):
        look = {"facecolor": "#bcd7ea", "edgecolor": BLUE} if allowed else HATCH | {"ec": RULE}
        ax.add_patch(Rectangle((left + column - 0.46, row - 0.46), 0.92, 0.92, linewidth=1, **look))
        if allowed:
            ax.text(left + column, row, "✓", color=INK, **MIDDLE)
    for column in range(kv_len):
        ax.text(left + column, -0.8, str(column), **quiet)
    for row in range(q_len):
        ax.text(left - 0.8, row, str(kv_len - q_len + row), **quiet)
    ax.text(left - 1.35, (q_len - 1) / 2, "query", rotation=90, **quiet)
    ax.text(left + (kv_len - 1) / 2, q_len - 0.1, "key", **quiet)


@house_style()
def heads_picture(weights: Tensor, scores: Tensor) -> Picture:
    """The induction score of each head [layers, heads], and the map of the best one.

    `weights` [layers, heads, n, n] are the attention weights of all heads.
    """
    (layers, heads), n = scores.shape, weights.shape[-1]
    figure, (table, ax) = panels(9.6, 4.6, 1, 2, width_ratios=(1, 1.2))
    table.imshow(scores.numpy(), cmap=MAGNITUDE, vmin=0, vmax=1, aspect="auto")
    for (layer, head), score in np.ndenumerate(scores.numpy()):
        ink = INK if score > 0.5 else PAPER
        table.text(head, layer, f"{score:.2f}", color=ink, fontsize=12, **MIDDLE)
        if score > INDUCTION:
            box = ((head - 0.47, layer - 0.47), 0.94, 0.94)
            table.add_patch(Rectangle(*box, fill=False, ec=RED, linewidth=3))
    table.set_xticks(range(heads), [f"H{head}" for head in range(heads)], fontsize=11)
    table.set_yticks(range(layers), [f"L{layer}" for layer in range(layers)], fontsize=11)
    table.set_title(f"induction score (framed: above {INDUCTION:.1f})")
    layer, head = divmod(int(scores.argmax()), heads)
    image = _shares(ax, weights[layer, head])
    ax.set(xlabel="key", ylabel="query", title=f"the best: layer {layer}, head {head}")
    figure.colorbar(image, ax=ax, label=WEIGHT, shrink=0.7)
    return finish(
        figure,
        f"In {int((scores > INDUCTION).sum())} of {layers * heads} heads the induction score is "
        f"above {INDUCTION:.2f}; the best is layer {layer}, head {head} with {scores.max():.2f}, "
        f"and its map over {n} tokens is on the right.",
    )


def _shares(ax: Axes, weights: Tensor) -> AxesImage:
    """Weights [n, n] as colours; the forbidden future is hatched: zero is something else."""
    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    ax.patch.set(hatch=HATCH["hatch"], edgecolor=RULE)
    seen = weights.masked_fill(future, float("nan")).numpy()
    return ax.imshow(seen, cmap=MAGNITUDE, vmin=0, vmax=1)


@house_style()
def rope_maps_picture(maps: Mapping[str, Tensor], labels: Sequence[str], who: str) -> Picture:
    """One head's weights [n, n] under several positions of the tokens, side by side.

    The caption says what each map gives to the token before, and how far it is from the first map.
    """
    n, wide = len(labels), len(maps)
    figure, axes = panels(3.3 * wide + 1.3, 4.9, 1, wide)
    for i, (ax, (title, weights)) in enumerate(zip(axes, maps.items(), strict=True)):
        image = _shares(ax, weights)
        ax.set_xticks(range(n), labels, rotation=90, fontsize=9.5)
        ax.set_yticks(range(n), labels if i == 0 else [""] * n, fontsize=9.5)
        ax.set(title=title, xlabel="key", ylabel="query" if i == 0 else "")
    figure.colorbar(image, ax=axes, label=WEIGHT, shrink=0.7)
    first, said = next(iter(maps.values())), []
    for title, weights in maps.items():
        is_same = float((weights - first).abs().max()) < 1e-4
        differs = "" if weights is first else f", {'the same' if is_same else 'another'} map"
        said.append(f"{float(weights.diagonal(-1).mean()):.2f} ({title}{differs})")
    return finish(
        figure, f"{who} gives the token before a mean attention weight of {', '.join(said)}."
    )


@house_style()
def training_picture(curve: Sequence[Mapping[str, float]], vocab_size: int = 512) -> Picture:
    """Loss and induction score of the tiny model's training, from its curve.json.

    A thin line shows the loss of pure guessing among `vocab_size` tokens.
    """
    series = {key: [point[key] for point in curve] for key in curve[0]}
    steps, induction = series["step"], series["induction"]
    random = "loss on repeated random tokens (left axis)"
    figure, (ax,) = panels(8, 4.2)
    guessing = math.log(vocab_size)
    lines = ax.plot(steps, series["text_loss"], color=BLUE, label="loss on stories (left axis)")
    lines += ax.plot(steps, series["repeat_loss"], "--", color=ORANGE, label=random)
    words = f"pure guessing: ln {vocab_size} = {guessing:.2f} (left axis)"
    lines += [ax.axhline(guessing, color=QUIET, linewidth=1, linestyle=":", label=words)]
    ax.set(xlabel="training step", ylabel="loss", ylim=(0, 7))
    right = ax.twinx()
    best = "best induction score (right axis)"
    lines += right.plot(steps, induction, "-.", color=GREEN, linewidth=2.2, label=best)
    right.set(ylim=(0, 1.05), ylabel="induction score")
    right.spines["right"].set_visible(True)
    ax.legend(handles=lines, loc="center right")
    span = min(2, len(curve) - 1)  # the steepest stretch of two intervals
    rises = [induction[i + span] - induction[i] for i in range(len(curve) - span)]
    before = rises.index(max(rises))
    after = before + span
    repeat = series["repeat_loss"]
    return finish(
        figure,
        f"Between step {steps[before]} and step {steps[after]} the best head's induction score "
        f"goes from {induction[before]:.2f} to {induction[after]:.2f}, and the loss on repeated "
        f"random tokens from {repeat[before]:.2f} to {repeat[after]:.2f}.",
    )


@house_style()
def clocks_picture(inv_freq: Tensor, positions: Sequence[int]) -> Picture:
    """The hands of a few pairs (rows: fast to slow) at some positions (columns)."""
    pairs = [len(inv_freq) * i // 4 for i in range(4)]  # the slowest hardly turn in a context
    columns = len(positions)
    size = (0.92 * columns + 1.4, 1.05 * len(pairs) + 0.9)
    figure, grid = panels(*size, len(pairs), columns)
    for i, ax in enumerate(grid):
        row, column = divmod(i, columns)
        frequency = float(inv_freq[pairs[row]])
        _clock(ax, frequency * positions[column], SERIES[row])
        if row == 0:
            ax.set_title(f"pos. {positions[column]}", fontsize=9, loc="center")
        if column == 0:
            words = f"pair {pairs[row]}\n{frequency:.4g} rad\nper position"
            ax.set_ylabel(words, fontsize=9, rotation=0, ha="right", va="center")
    fast, slow = float(inv_freq[0]), float(inv_freq[pairs[-1]])
    one, other = min(combinations(positions, 2), key=lambda two: _between(fast, *two))
    return finish(
        figure,
        "Each hand starts at the right and turns anticlockwise. Pair 0 looks nearly the same at "
        f"positions {one} and {other} ({_between(fast, one, other):.2f} rad apart); pair "
        f"{pairs[-1]} does not ({_between(slow, one, other):.2g} rad apart).",
    )


def _between(speed: float, one: int, other: int) -> float:
    """The angle between the hands of two positions, 0 .. π."""
    return abs(math.remainder((one - other) * speed, 2 * math.pi))


def _clock(ax: Axes, angle: float, color: str) -> None:
    turn = np.linspace(0, 2 * np.pi, 90)
    ax.plot(np.cos(turn), np.sin(turn), color=RULE)
    ax.plot([0, 1], [0, 0], color=RULE, linewidth=1, linestyle=":")
    ax.plot([0, np.cos(angle)], [0, np.sin(angle)], color=color, linewidth=2.2)
    ax.plot([np.cos(angle)], [np.sin(angle)], "o", color=color, markersize=4)
    ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
