"""What the length of a text costs and changes: scores, windows, RoPE beyond the training.

Every caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutorial_engine.model.config import RopeScaling
from tutorial_engine.viz.charts import panels
from tutorial_engine.viz.parts import BOLD, CENTRE, Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import cut_to, tint
from tutorial_engine.viz.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    RULE,
    finish,
    house_style,
)
from tutorial_engine.viz.words import listed, num_bytes, numbered

SIDE = 250.0  # pixels of the largest square of scores


def scores_picture(lengths: Sequence[int], head_dim: int, itemsize: int) -> Picture:
    """The scores [T, T] of one head as squares, its output [T, D] as strips, all to one scale."""
    scale = SIDE / max(lengths)
    bottom = SIDE + 56
    sheet = Sheet(960, bottom + 70)
    sheet.heading(f"One head: scores [T, T] orange, output [T, D = {head_dim}] blue")
    x = 60.0
    for length in lengths:
        side, strip = length * scale, max(head_dim * scale, 1.5)
        box = (x, bottom - side, side, side)
        sheet.rect(f"scores{length}", box, tint(RED, 0.25), stroke=RED)
        sheet.rect(f"out{length}", (x + side + 5, bottom - side, strip, side), BLUE)
        scores, out = (num_bytes(length * wide * itemsize) for wide in (length, head_dim))
        for i, word in enumerate((f"T = {length:,}", f"scores: {scores}", f"output: {out}")):
            style = BOLD if i == 1 else {}
            middle = x + side / 2
            sheet.text(f"of{length}.{i}", middle, bottom + 19 + 18 * i, word, 13, **CENTRE, **style)
        x += max(side, 84.0) + 70
    longest, shortest = max(lengths), min(lengths)
    one, most = shortest**2 * itemsize, longest**2 * itemsize
    return sheet.picture(
        f"From T = {shortest:,} to {longest:,} tokens, {longest / shortest:g} times as many, the "
        f"scores of one head grow {most / one:g} times, from {num_bytes(one)} to "
        f"{num_bytes(most)}; its output grows {longest / shortest:g} times, to "
        f"{num_bytes(longest * head_dim * itemsize)} ({itemsize} bytes per number, drawn to scale)."
    )


def reach_picture(labels: Sequence[str], looks: Sequence[tuple[int, int]], window: int) -> Picture:
    """Which window a token needs to see an earlier one. `looks`: (query, key) places in the text.

    ValueError when a query does not stand after its key.
    """
    for query, key in looks:
        if not 0 <= key < query < len(labels):
            raise ValueError(f"query {query} must stand after key {key}, within {len(labels)}")
    pitch = 936 / len(labels)
    sheet = Sheet(960, 84 + 66 * len(looks))
    sheet.heading(f"A window of {window}, and the window that a name needs")
    for i, label in enumerate(labels):
        ink = next((c for c, look in zip((BLUE, GREEN), looks, strict=False) if i in look), None)
        box = (12 + i * pitch + 1, 40.0, pitch - 2, 26.0)
        sheet.rect(f"token{i}", box, tint(ink, 0.3) if ink else PAPER, rx=3, stroke=ink or RULE)
        sheet.inside(f"token{i}.label", box, cut_to(label, pitch - 3, 11), 11)
    said = []
    for row, ((query, key), ink) in enumerate(zip(looks, (BLUE, GREEN), strict=False)):
        need, y, end = query - key + 1, 78.0 + 66 * row, 12 + (query + 1) * pitch
        for i, (size, fill) in enumerate(((need, tint(ink, 0.3)), (window, tint(ORANGE, 0.5)))):
            box = (end - size * pitch, y + 27 * i, size * pitch, 24.0)
            sheet.rect(f"reach{row}.{i}", box, fill, stroke=QUIET)
            who = f"“{labels[query]}” sees “{labels[key]}”: window {size}"
            words = f"window {size}" if i else who
            sheet.inside(f"reach{row}.{i}.words", box, words, 12)
        said.append(f"“{labels[query]}” sees “{labels[key]}” from a window of {need} on")
    return sheet.picture(f"A window of {window} is too small: {listed(said)}.")


@house_style()
def rope_scaling_picture(plain: Tensor, scaled: Tensor, scaling: RopeScaling) -> Picture:
    """How often each pair turns within the original context, without and with Llama 3.1's scaling.

    `plain` and `scaled` [D / 2] are in radians per position.
    """
    context = scaling.original_max_position_embeddings
    turns, slower = (each * context / (2 * math.pi) for each in (plain, scaled))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    groups = {
        "stay as they are": turns >= high,
        "lie between": (turns < high) & (turns > low),
        f"turn {scaling.factor:g} times slower": turns <= low,
    }
    figure, (ax,) = panels(9, 4.3)
    pairs = range(len(plain))
    for (words, chosen), colour in zip(groups.items(), (GREEN, ORANGE, RED), strict=True):
        if not bool(chosen.any()):
            continue
        places = torch.nonzero(chosen).flatten().tolist()
        ax.axvspan(places[0] - 0.5, places[-1] + 0.5, color=tint(colour, 0.16), linewidth=0)
        lines = words.replace(" as ", "\nas ").replace(" between", "\nbetween")
        middle = (places[0] + places[-1]) / 2
        ax.text(middle, float(turns.max()) * 1.6, lines, ha="center", va="top", fontsize=9.5)
    ax.plot(pairs, turns, "--", color=QUIET, linewidth=2, label="without scaling")
    ax.plot(pairs, slower, color=BLUE, linewidth=2.4, label="with scaling")
    for value, words in ((high, "high_freq_factor"), (low, "low_freq_factor")):
        ax.axhline(value, color=INK, linewidth=0.8, linestyle=":")
        ax.text(0, value * 1.1, f"{words} = {value:g}", fontsize=9, va="bottom")
    ax.set(yscale="log", xlim=(-0.5, len(plain) - 0.5), xlabel="pair i")
    ax.set_ylabel(f"turns in {context:,} positions (logarithmic)")
    ax.set_ylim(top=float(turns.max()) * 2)
    ax.yaxis.set_major_formatter(PLAIN)
    ax.minorticks_off()
    ax.legend(loc="lower left")
    said = [
        f"{numbered(torch.nonzero(chosen).flatten().tolist(), 'pair')} {words}"
        for words, chosen in groups.items()
        if bool(chosen.any())
    ]
    return finish(
        figure,
        f"Llama 3.1's scaling, factor {scaling.factor:g}, original context {context:,}: "
        f"{listed(said)}.",
    )
