"""Who looks at slot 0: its share of attention, and how long its V is.

Knows numbers and labels; knows no model.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.charts import lines_across, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, SKY, finish, house_style
from tutorial_engine.viz.words import counted


@house_style()
def first_slot_picture(shares: Sequence[float], lengths: Sequence[float]) -> Picture:
    """By layer: the share of attention that slot 0 gets, and how long its V is beside others'."""
    figure, axes = panels(8.2, 3.6, 2, sharex=True)
    layers = range(len(shares))
    for ax, values, title in (
        (axes[0], shares, "share of all attention that slot 0 gets"),
        (axes[1], lengths, "length of V in slot 0, divided by the length of the others' V"),
    ):
        ax.bar(layers, values, color=SKY)
        ax.set(ylim=(0, 1.05 * max(1.0, *values)), xlim=(-0.8, len(shares) - 0.2))
        ax.set_title(title, loc="left")
        lines_across(ax)
    axes[1].axhline(1, color=INK, linestyle=":", linewidth=1.2)
    axes[1].set_xlabel("layer")
    many = [layer for layer in layers if shares[layer] > 1 / 3]
    longest = max((lengths[layer] for layer in many), default=0.0)
    return finish(
        figure,
        f"In {counted(len(many), 'layer')} of {len(shares)}, slot 0 gets more than a third of all "
        f"attention. In these its V has at most {longest:.2f} of the length of the others'.",
    )
