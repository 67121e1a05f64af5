"""Two logits between the numbers of bf16: a margin, and a tie.

The caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes

from tutorial_engine.viz.drawing.charts import panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, PLAIN, QUIET, RED, finish, house_style


class Lead(NamedTuple):
    """The two best tokens of a place, and their logits: the best one leads by the margin."""

    labels: Sequence[str]
    logits: Sequence[float]

    @property
    def margin(self) -> float:
        """top1 − top2."""
        return self.logits[0] - self.logits[1]

    @property
    def rounded(self) -> list[float]:
        """Both logits as bf16 stores them."""
        return torch.tensor(self.logits).bfloat16().tolist()

    def gap(self, eps: float) -> float:
        """The distance of neighbouring numbers at the best logit, in a format with this eps."""
        return eps * 2.0 ** math.floor(math.log2(abs(self.logits[0])))


@house_style()
def margins_picture(leads: Sequence[Lead]) -> Picture:
    """Two logits between the numbers of bf16: one pair that rounding leaves apart, and one tie.

    ValueError where the leads have no tie, or none that stays apart and is near enough to draw.
    """
    eps = torch.finfo(torch.bfloat16).eps
    ties = [lead for lead in leads if len({*lead.rounded}) == 1 and lead.margin > 0]
    near = [lead for lead in leads if 2 <= lead.margin / lead.gap(eps) <= 5]
    if not ties or not near:
        raise ValueError(f"of {len(leads)} places {len(ties)} are ties, {len(near)} nearly")
    figure, axes = panels(8.5, 3.6, rows=2)
    for ax, title, lead in zip(axes, ("apart", "a tie"), (near[0], ties[0]), strict=True):
        _on_the_numbers(ax, lead, lead.gap(eps))
        ax.set_title(f"{title}: {' and '.join(lead.labels)}, margin {lead.margin:.3f}", fontsize=10)
    count = sum(len({*lead.rounded}) == 1 for lead in leads)
    return finish(
        figure,
        "Lines: all numbers that bf16 has there. Dot and square: the two best logits. Arrows: "
        f"where it stores them. At {count} of {len(leads):,} tokens both come to the same line.",
    )


def _on_the_numbers(ax: Axes, lead: Lead, gap: float) -> None:
    """The numbers of bf16 as lines, two logits as dots above them, arrows to where they go."""
    low = math.floor(min(lead.rounded) / gap) - 2
    for i in range(low, low + 8):
        ax.axvline(i * gap, 0, 0.45, color=QUIET, linewidth=1)
    ax.set_xticks([i * gap for i in range(low, low + 8)])
    ax.xaxis.set_major_formatter(PLAIN)
    for label, logit, goal, colour in zip(
        lead.labels, lead.logits, lead.rounded, (BLUE, RED), strict=True
    ):
        best = logit == lead.logits[0]
        ax.annotate(
            "", (goal, 0.42), (logit, 0.72),
            arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6},
        )  # fmt: skip
        ax.plot(logit, 0.72, "o" if best else "s", color=colour, markersize=7)
        ax.annotate(
            label, (logit, 0.72), (7 if best else -7, 2), textcoords="offset points",
            color=colour, ha="left" if best else "right",
        )  # fmt: skip
    ax.set(xlim=((low - 0.5) * gap, (low + 7.5) * gap), ylim=(0, 1), yticks=[])
    ax.spines["left"].set_visible(False)
