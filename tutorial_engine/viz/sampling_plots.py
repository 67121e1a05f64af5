"""Introduced in notebook 02. From probabilities to a draw: filters, temperature, seeds, as bars.

Every caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tutorial_engine.viz.charts import (
    HATCH,
    ROUND,
    cell_height,
    label_bars,
    log_marks,
    no_axis,
    panels,
    rows_of_bars,
    token_cell,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import (
    BLUE,
    DASHES,
    INK,
    PAPER,
    PLAIN,
    QUIET,
    RED,
    finish,
    house_style,
)
from tutorial_engine.viz.words import counted, listed, share, tokens

SHOWN = 12  # tokens with a bar
ACROSS = 32  # draws side by side


@house_style()
def filters_picture(
    labels: Sequence[str], probabilities: Sequence[float], kept: Mapping[str, Sequence[bool]]
) -> Picture:
    """What each filter keeps of one distribution: a row of bars each, of the likeliest 12 tokens.

    Solid: kept, with its new probability; hatched: dropped, with its old one. ValueError unless
    the labels, probabilities and flags are of one vocabulary and the probabilities add up to 1.
    """
    _one_vocabulary(labels, {"probabilities": probabilities, **kept})
    if not kept or abs(sum(probabilities) - 1) > 1e-3:
        raise ValueError(
            f"the {len(labels)} probabilities add up to {sum(probabilities):.3f}: give the whole "
            "vocabulary, and at least one filter; the picture takes the likeliest itself"
        )
    none = [name for name, flags in kept.items() if not any(flags)]
    if none:
        raise ValueError(f"{none[0]!r} keeps no token: every filter keeps the best one")
    order = _likeliest(probabilities)
    figure, axes = panels(8.5, 1.15 * len(kept) + 1.3, rows=len(kept), sharex=True)
    parts, highest = [], 0.0
    for ax, (name, flags) in zip(axes, kept.items(), strict=True):
        total = sum(p for p, flag in zip(probabilities, flags, strict=True) if flag)
        for x, i in enumerate(order):
            height, words = probabilities[i], "dropped"
            look = HATCH | {"edgecolor": "#aeb8bf"}
            if flags[i]:
                height, look = height / total, {"color": BLUE}
                words = share(height)
            bar = ax.bar(x, height, 0.75, **look)
            label_bars(ax, bar, [words], padding=2, fontsize=8, color=INK if flags[i] else QUIET)
            highest = max(highest, height)
        ax.set_title(f"{name}: {sum(flags)} of {tokens(len(labels))} kept", fontsize=9.5)
        parts.append(f"{name} keeps {tokens(sum(flags))} ({100 * total:.0f} %)")
    for ax in axes:
        ax.set(ylim=(0, 1.32 * highest), yticks=[])
        ax.tick_params(bottom=False)
        no_axis(ax, "left")
    names = [labels[i] for i in order]
    lean: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, names)) > 7 else {}
    axes[-1].set_xticks(range(len(names)), names, color=INK, fontsize=9, **lean)
    return finish(
        figure,
        f"Of {tokens(len(labels))} {', '.join(parts)}. In brackets what they held together; "
        "the bars are divided by that, so that they add up to 1 again.",
    )


@house_style()
def temperature_picture(
    labels: Sequence[str], probabilities: Mapping[float, Sequence[float]]
) -> Picture:
    """One distribution at several temperatures, side by side, of the likeliest 12 tokens.

    The order is that of the first temperature. ValueError when the vocabularies differ.
    """
    _one_vocabulary(labels, {f"T = {t:g}": p for t, p in probabilities.items()})
    if not probabilities:
        raise ValueError("give at least one temperature: {1.0: probabilities}")
    order = _likeliest(next(iter(probabilities.values())))
    columns, best = len(probabilities), order[0]
    size = (max(2.3 * columns + 1, 5), 0.25 * len(order) + 1.5)
    figure, axes = panels(*size, columns=columns, sharey=True)
    highest = max(p[i] for p in probabilities.values() for i in order)
    for ax, (temperature, p) in zip(axes, probabilities.items(), strict=True):
        shown = [p[i] for i in order]
        bars = ax.barh(range(len(order)), shown, 0.75, color=BLUE)
        label_bars(ax, bars, [share(value) for value in shown], fontsize=8)
        rows_of_bars(ax, [labels[i] for i in order], 1.3 * highest)
        ax.set_title(f"T = {temperature:g}", fontsize=10.5)
        no_axis(ax, "bottom")
    axes[0].tick_params(axis="y", labelsize=9)
    parts = ", ".join(f"{share(p[best])} at T = {t:g}" for t, p in probabilities.items())
    return finish(figure, f"The likeliest token, “{labels[best]}”, has {parts}.")


@house_style()
def draws_picture(good: Sequence[str], bad: Sequence[str]) -> Picture:
    """Tokens drawn with one seeded generator, and with one that is seeded again for every draw.

    Hatched: the same token as the draw before. ValueError for no draws, or more than fit.
    """
    if not good or not bad or max(len(good), len(bad)) > ACROSS:
        raise ValueError(f"give 1 to {ACROSS} draws in each, got {len(good)} and {len(bad)}")
    wide, tall = max(len(good), len(bad)), cell_height([*good, *bad])
    figure, (ax,) = panels(max(0.5 * wide + 0.5, 6.5), 0.5 * (2 * tall + 3.1) + 0.5)
    for y, name, draws in (
        (0.0, "seeded once: every draw moves the generator on", good),
        (tall + 1.2, "seeded again before each draw: the bug", bad),
    ):
        ax.text(0, y - 0.3, name, fontweight="bold", fontsize=10)
        for x, label in enumerate(draws):
            look = {"facecolor": "#e5f0f8", "edgecolor": BLUE}
            if x and draws[x - 1] == label:
                look = {"facecolor": "#fbe6d8", "edgecolor": RED, "hatch": "//"}
            token_cell(ax, x, y, tall, label, **look)
    ax.set(xlim=(-0.1, max(wide, 12.5)), ylim=(2 * tall + 1.4, -0.9), aspect="equal")
    ax.axis("off")
    return finish(
        figure,
        f"Seeded once: {_different(good)}; seeded again before each draw: {_different(bad)}, "
        f"beginning with “{bad[0]}”. Hatched: the same as the draw before.",
    )


@house_style()
def margins_picture(margins: Sequence[float], steps: Mapping[str, float]) -> Picture:
    """How often the best token leads by how much: a histogram of margins, top1 − top2 of logits.

    `steps` has the distance of neighbouring numbers of each format (name -> distance): below it a
    rounding can swap the two. ValueError for no margin, or one that is not above 0.
    """
    if not margins or not steps or min(*margins, *steps.values()) <= 0:
        raise ValueError("give at least one margin and one format, and only numbers above 0")
    low = math.floor(math.log10(min(*margins, *steps.values()))) - 0.5
    high = math.ceil(math.log10(max(*margins, *steps.values())))
    edges = [10 ** (low + i / 4) for i in range(round(4 * (high - low)) + 1)]
    figure, (ax,) = panels(8.5, 3.4)
    counts, *_ = ax.hist(margins, edges, color=BLUE, edgecolor=PAPER)
    ax.set(xscale="log", xlim=(edges[0], edges[-1]))
    log_marks(ax, 0.6, 8 * float(counts.max()), ROUND)  # a bar of one token has a height
    ax.set(xlabel="margin, top1 − top2 of the logits, logarithmic", ylabel="tokens, logarithmic")
    ax.xaxis.set_major_formatter(PLAIN)
    ax.minorticks_off()
    parts = []
    for (name, step), dashes in zip(steps.items(), DASHES[1:], strict=False):
        ax.axvline(step, color=RED, linestyle=dashes, linewidth=2)
        words = f"one step\nof {name}"
        ax.annotate(
            words, (step, 0.99), (5, 0), ("data", "axes fraction"), "offset points", va="top",
            color=RED, fontsize=9.5,
        )  # fmt: skip
        count = sum(margin < step for margin in margins)
        parts.append(f"{count or 'none'} {'is' if count == 1 else 'are'} below one step of {name}")
    return finish(
        figure,
        f"Of {len(margins):,} margins {listed(parts)}. A step is the distance of two neighbouring "
        "numbers of the format, at the size of the largest logit.",
    )


def _one_vocabulary(labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    for name, values in series.items():
        if len(values) != len(labels) or not labels:
            raise ValueError(f"{len(labels)} labels, but {len(values)} values in {name!r}")


def _likeliest(probabilities: Sequence[float]) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:SHOWN]


def _different(draws: Sequence[str]) -> str:
    return f"{len(set(draws))} different in {counted(len(draws), 'draw')}"
