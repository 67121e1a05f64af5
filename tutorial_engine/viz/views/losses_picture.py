"""The loss of a text when slots are missing.

Knows numbers and labels; knows no model.
"""

from collections.abc import Mapping

from tutorial_engine.viz.drawing.charts import label_bars, no_axis, panels, rows_of_bars
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, PAPER, RED, finish, house_style


@house_style()
def losses_picture(losses: Mapping[str, float], num_tokens: int) -> Picture:
    """The loss of a text's last tokens for each choice of slots; the first one has all slots."""
    figure, (ax,) = panels(8.2, 0.6 + 0.42 * len(losses))
    names, values = list(losses), list(losses.values())
    rows_of_bars(ax, names, 1.15 * max(values))
    looks = [BLUE if value <= values[0] + 0.2 else RED for value in values]
    bars = ax.barh(range(len(names)), values, color=looks, height=0.62)
    inside = {"padding": -34, "color": PAPER, "fontweight": "bold"}
    label_bars(ax, bars, [f"{value:.2f}" for value in values], **inside)
    ax.axvline(values[0] + 0.2, color=RED, linestyle=":", linewidth=1.4)
    no_axis(ax, "bottom")
    ax.set_title(f"mean loss of the last {num_tokens} tokens (dotted: 0.2 above all slots)")
    worst = max(losses, key=lambda name: losses[name])
    return finish(
        figure,
        f"With {names[0]} the mean loss is {values[0]:.2f}. The largest of the others is "
        f"{losses[worst]:.2f}: {worst}.",
    )
