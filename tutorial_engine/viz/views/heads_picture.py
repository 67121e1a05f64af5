"""The induction score of each head, and the map of the best one.

The caption is computed from the same numbers that are drawn.
"""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor

from tutorial_engine.viz.drawing.charts import HATCH, MIDDLE, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, MAGNITUDE, PAPER, RED, RULE, finish, house_style

INDUCTION = 0.4  # from this score on a head counts as an induction head
WEIGHT = "attention weight (hatched = forbidden)"


@house_style()
def heads_picture(weights: Tensor, scores: Tensor) -> Picture:
    """The induction score of each head [layers, heads], and the map of the best one.

    `weights` [layers, heads, n, n] are the attention weights of all heads.
    """
    (layers, heads), n = scores.shape, weights.shape[-1]
    figure, (table, ax) = panels(9.6, 4.6, 1, 2, width_ratios=(1, 1.2))
    table.imshow(scores.numpy(), cmap=MAGNITUDE, vmin=0, vmax=1, aspect="auto")
    for (layer, head), score in np.ndenumerate(scores.numpy()):
        ink = INK if score > 0.5 else PAPER
        name = f"te-shade.{layer}.{head}"  # on a dark page, too, it stands on this colour
        table.text(head, layer, f"{score:.2f}", color=ink, fontsize=12, gid=name, **MIDDLE)
        if score > INDUCTION:
            box = ((head - 0.47, layer - 0.47), 0.94, 0.94)
            table.add_patch(Rectangle(*box, fill=False, ec=RED, linewidth=3))
    table.set_xticks(range(heads), [f"H{head}" for head in range(heads)], fontsize=11)
    table.set_yticks(range(layers), [f"L{layer}" for layer in range(layers)], fontsize=11)
    table.set_title(f"induction score (framed: above {INDUCTION:.1f})")
    layer, head = divmod(int(scores.argmax()), heads)
    image = show_shares(ax, weights[layer, head])
    ax.set(xlabel="key", ylabel="query", title=f"the best: layer {layer}, head {head}")
    figure.colorbar(image, ax=ax, label=WEIGHT, shrink=0.7)
    return finish(
        figure,
        f"In {int((scores > INDUCTION).sum())} of {layers * heads} heads the induction score is "
        f"above {INDUCTION:.2f}; the best is layer {layer}, head {head} with {scores.max():.2f}, "
        f"and its map over {n} tokens is on the right.",
    )


def show_shares(ax: Axes, weights: Tensor) -> AxesImage:
    """Weights [n, n] as colours; the forbidden future is hatched: zero is something else."""
    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    ax.patch.set(hatch=HATCH["hatch"], edgecolor=RULE)
    seen = weights.masked_fill(future, float("nan")).numpy()
    return ax.imshow(seen, cmap=MAGNITUDE, vmin=0, vmax=1)
