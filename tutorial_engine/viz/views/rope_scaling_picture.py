"""RoPE beyond the training: how often pairs turn, with and without scaling.

The caption is computed from the same numbers that are drawn.
"""

import math

import torch
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from tutorial_engine.model.config import RopeScaling
from tutorial_engine.viz.drawing.charts import panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    QUIET,
    RED,
    finish,
    house_style,
)
from tutorial_engine.viz.words import listed, numbered


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
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
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
