"""Introduced in notebook 02. From probabilities to a draw: filters, temperature, seeds, as bars.

Every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tutorial_engine.viz.cache_steps import percent, tokens
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import BLUE, INK, QUIET, RED, finish, house_style, new_figure
from tutorial_engine.viz.tokens import cut_label

SHOWN = 12  # tokens with a bar
ACROSS = 32  # draws side by side
GREY: dict[str, Any] = {"facecolor": "white", "edgecolor": "#aeb8bf", "hatch": "////"}


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
    with house_style():
        figure = new_figure(8.5, 1.15 * len(kept) + 1.3)
        axes = figure.subplots(len(kept), 1, squeeze=False, sharex=True)[:, 0]
        parts, highest = [], 0.0
        for ax, (name, flags) in zip(axes, kept.items(), strict=True):
            held = sum(p for p, flag in zip(probabilities, flags, strict=True) if flag)
            for x, i in enumerate(order):
                height = probabilities[i] / held if flags[i] else probabilities[i]
                ax.bar([x], [height], 0.75, **({"color": BLUE} if flags[i] else GREY))
                words = _percent(height) if flags[i] else "dropped"
                color = INK if flags[i] else QUIET
                ax.annotate(
                    words, (x, height), (0, 2), textcoords="offset points", ha="center",
                    fontsize=8, color=color,
                )  # fmt: skip
                highest = max(highest, height)
            ax.set_title(f"{name}: {sum(flags)} of {tokens(len(labels))} kept", fontsize=9.5)
            parts.append(f"{name} keeps {tokens(sum(flags))} ({100 * held:.0f} %)")
        for ax in axes:
            ax.set(ylim=(0, 1.32 * highest), yticks=[])
            ax.tick_params(bottom=False)
            ax.spines["left"].set_visible(False)
        _tokens_below(axes[-1], [labels[i] for i in order])
        return finish(
            figure,
            f"Of {tokens(len(labels))} {', '.join(parts)}. In brackets what they held together; "
            "the bars are divided by that, so that they add up to 1 again.",
        )


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
    best = order[0]
    with house_style():
        figure = new_figure(max(2.3 * len(probabilities) + 1, 5), 0.25 * len(order) + 1.5)
        axes = figure.subplots(1, len(probabilities), squeeze=False, sharey=True)[0]
        highest = max(p[i] for p in probabilities.values() for i in order)
        for ax, (temperature, p) in zip(axes, probabilities.items(), strict=True):
            shown = [p[i] for i in order]
            ax.barh(range(len(order)), shown, 0.75, color=BLUE)
            for y, value in enumerate(shown):
                ax.text(value + highest / 50, y, _percent(value), va="center", fontsize=8)
            ax.set(xlim=(0, 1.3 * highest), xticks=[], ylim=(len(order) - 0.4, -0.6))
            ax.set_title(f"T = {temperature:g}", fontsize=10.5)
            ax.spines["bottom"].set_visible(False)
            ax.tick_params(left=False)
        axes[0].set_yticks(range(len(order)), [labels[i] for i in order], color=INK, fontsize=9)
        parts = ", ".join(f"{_percent(p[best])} at T = {t:g}" for t, p in probabilities.items())
        return finish(figure, f"The likeliest token, “{labels[best]}”, has {parts}.")


def draws_picture(good: Sequence[str], bad: Sequence[str]) -> Picture:
    """Tokens drawn with one seeded generator, and with one that is seeded again for every draw.

    Hatched: the same token as the draw before. ValueError for no draws, or more than fit.
    """
    if not good or not bad or max(len(good), len(bad)) > ACROSS:
        raise ValueError(f"give 1 to {ACROSS} draws in each, got {len(good)} and {len(bad)}")
    wide, longest = max(len(good), len(bad)), max(len(cut_label(x)) for x in (*good, *bad))
    turn, tall = (0, 0.6) if longest <= 5 else (90, 0.22 * longest)
    with house_style():
        figure = new_figure(max(0.5 * wide + 0.5, 6.5), 0.5 * (2 * tall + 3.1) + 0.5)
        ax = figure.subplots()
        for y, name, draws in (
            (0.0, "seeded once: every draw moves the generator on", good),
            (tall + 1.2, "seeded again before each draw: the bug", bad),
        ):
            ax.text(0, y - 0.3, name, fontweight="bold", fontsize=10)
            for x, label in enumerate(draws):
                same = x > 0 and draws[x - 1] == label
                look: dict[str, Any] = {"facecolor": "#fbe6d8", "edgecolor": RED, "hatch": "//"}
                if not same:
                    look = {"facecolor": "#e5f0f8", "edgecolor": BLUE}
                ax.add_patch(Rectangle((x + 0.05, y), 0.9, tall, **look))
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if same else None
                ax.text(
                    x + 0.5, y + tall / 2, cut_label(label), ha="center", va="center", fontsize=9,
                    rotation=turn, bbox=paper,
                )  # fmt: skip
        ax.set(xlim=(-0.1, max(wide, 12.5)), ylim=(2 * tall + 1.4, -0.9), aspect="equal")
        ax.axis("off")
        return finish(
            figure,
            f"Seeded once: {_different(good)}; seeded again before each draw: {_different(bad)}, "
            f"beginning with “{bad[0]}”. Hatched: the same as the draw before.",
        )


def _percent(p: float) -> str:
    return "100 %" if p >= 1 else percent(p)


def _one_vocabulary(labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    for name, values in series.items():
        if len(values) != len(labels) or not labels:
            raise ValueError(f"{len(labels)} labels, but {len(values)} values in {name!r}")


def _likeliest(probabilities: Sequence[float]) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:SHOWN]


def _tokens_below(ax: Axes, labels: Sequence[str]) -> None:
    turn = 0 if max(map(len, labels)) <= 7 else 30
    side = "center" if not turn else "right"
    ax.set_xticks(range(len(labels)), labels, color=INK, fontsize=9, rotation=turn, ha=side)


def _different(draws: Sequence[str]) -> str:
    n = len(set(draws))
    return f"{n} different in {len(draws)} draw{'s' * (len(draws) != 1)}"
