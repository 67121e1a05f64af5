"""What is left of a probability when heads are silenced.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.charts import label_bars, panels, rows_of_bars
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, INK, PAPER, QUIET, finish, house_style
from tutorial_engine.viz.words import percent

Ablation = tuple[str, float]  # name, and the probability that is left


# -- what happens without a head ------------------------------------------------------------------


@house_style()
def ablation_picture(title: str, rows: Sequence[Ablation]) -> Picture:
    """A bar for each ablation: the probability that is left with these heads silenced.

    The first row is what the others are compared with. ValueError for no rows and for a value
    outside 0 .. 1.
    """
    if not rows:
        raise ValueError("no rows: the first one is what the others are compared with")
    for name, value in rows:
        if not 0 <= value <= 1:
            raise ValueError(f"{name!r}: a probability is from 0 to 1, got {value}")
    names, values = zip(*rows, strict=True)
    first = values[0]
    figure, (ax,) = panels(9.0, 0.34 * len(names) + 1.2)
    rows_of_bars(ax, names, 1.3)
    ax.set_title(title, fontsize=10.5, loc="left")
    ax.set_ylim(top=-1.1)  # room for what the dotted line is
    ax.text(first - 0.01, -0.62, f"dotted: {names[0]}", ha="right", color=QUIET, fontsize=9)
    bars = ax.barh(range(len(rows)), values, height=0.66, color=BLUE)
    results = [percent(value) for value in values]
    over = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # the dotted line
    label_bars(ax, bars, results, bbox=over, color=INK)
    ax.axvline(first, color=INK, linewidth=1, linestyle=":", zorder=0)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.spines[["left"]].set_visible(False)
    ax.spines["bottom"].set_bounds(0, 1)
    each = ", ".join(f"{result} ({name})" for name, result in zip(names, results, strict=True))
    return finish(figure, f"{title[0].upper()}{title[1:]}: {each}.")
