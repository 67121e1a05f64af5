"""Draws with one seeded generator, and with one that is seeded again and again.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.charts import cell_height, panels, token_cell
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, RED, finish, house_style
from tutorial_engine.viz.words import counted

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


def _different(draws: Sequence[str]) -> str:
    return f"{len(set(draws))} different in {counted(len(draws), 'draw')}"
