"""What surrounds the choice of a token: draws with seeds, margins.

Every caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tutorial_engine.viz.charts import ROUND, cell_height, log_marks, panels, token_cell
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import BLUE, DASHES, PAPER, PLAIN, RED, finish, house_style
from tutorial_engine.viz.words import counted, listed

ACROSS = 32  # draws side by side


@house_style()
def draws_picture(good: Sequence[str], bad: Sequence[str]) -> Picture:
    """Tokens drawn with one seeded generator, and with one that is seeded again for every draw.

    Hatched, in the second row: the same token as the draw before. With one generator a repetition
    is chance, and is not marked. ValueError for no draws, or more than fit.
    """
    if not good or not bad or max(len(good), len(bad)) > ACROSS:
        raise ValueError(f"give 1 to {ACROSS} draws in each, got {len(good)} and {len(bad)}")
    wide, tall = max(len(good), len(bad)), cell_height([*good, *bad], letters=7)
    inches = 0.66  # of a cell
    figure, (ax,) = panels(inches * max(wide + 0.3, 9.5), inches * (2 * tall + 2.3) + 0.6)
    for y, name, draws in (
        (0.0, "seeded once: every draw moves the generator on", good),
        (tall + 1.2, "seeded again before each draw: the bug", bad),
    ):
        is_bug = draws is bad
        ax.text(0, y - 0.3, name, fontweight="bold", fontsize=10)
        for x, label in enumerate(draws):
            look = {"facecolor": "#e5f0f8", "edgecolor": BLUE}
            if is_bug and x and draws[x - 1] == label:
                look = {"facecolor": "#fbe6d8", "edgecolor": RED, "hatch": "//"}
            token_cell(ax, x, y, tall, label, **look)
    ax.set(xlim=(-0.1, max(wide + 0.2, 9.4)), ylim=(2 * tall + 1.4, -0.9), aspect="equal")
    ax.axis("off")
    return finish(
        figure,
        f"Seeded once: {_different(good)}; seeded again before each draw: {_different(bad)}, "
        f"beginning with “{bad[0]}”. Hatched, with the bug: the same as the draw before.",
    )


@house_style()
def margins_picture(margins: Sequence[float], gaps: Mapping[str, float]) -> Picture:
    """How often the best token leads by how much: a histogram of margins, top1 − top2 of logits.

    Margins and `gaps` (format -> distance of neighbouring numbers at the size of the best logit)
    are in gaps of the last format: below one gap a rounding can swap the two.
    """
    low = math.floor(math.log10(min(*margins, *gaps.values()))) - 0.5
    high = math.ceil(math.log10(max(*margins, *gaps.values())))
    edges = [10 ** (low + i / 4) for i in range(round(4 * (high - low)) + 1)]
    figure, (ax,) = panels(8.5, 3.4)
    ax.hist(margins, edges, color=BLUE, edgecolor=PAPER)
    ax.set(xscale="log", xlim=(edges[0], edges[-1]))
    log_marks(ax, 0.6, 8.0 * np.histogram(margins, edges)[0].max(), ROUND)  # 1 token is a bar
    unit = f"in gaps of {[*gaps][-1]} at its best logit"
    ax.set(xlabel=f"margin of a token, {unit}, logarithmic", ylabel="tokens, logarithmic")
    ax.xaxis.set_major_formatter(PLAIN)
    ax.minorticks_off()
    parts = []
    for (name, gap), dashes in zip(gaps.items(), DASHES[1:], strict=False):
        ax.axvline(gap, color=RED, linestyle=dashes, linewidth=2)
        words = f"one gap\nof {name}"
        ax.annotate(
            words, (gap, 0.99), (5, 0), ("data", "axes fraction"), "offset points", va="top",
            color=RED, fontsize=9.5,
        )  # fmt: skip
        count = sum(margin < gap for margin in margins)
        parts.append(f"{count or 'none'} {'is' if count == 1 else 'are'} below one gap of {name}")
    return finish(
        figure,
        f"Of {len(margins):,} margins {listed(parts)}. A gap is the distance of two neighbouring "
        "numbers of the format, at the size of the token's best logit.",
    )


def _different(draws: Sequence[str]) -> str:
    return f"{len(set(draws))} different in {counted(len(draws), 'draw')}"
