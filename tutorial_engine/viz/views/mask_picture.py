"""Masks side by side: which query may attend to which key.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from tutorial_engine.viz.drawing.charts import HATCH, MIDDLE, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, INK, QUIET, RULE, finish, house_style


@house_style()
def mask_picture(masks: Mapping[str, Tensor]) -> Picture:
    """Bool masks [q, kv] side by side, all with square cells of one size: row = query."""
    wide = sum(mask.shape[1] + 2.2 for mask in masks.values())
    tall = max(mask.shape[0] for mask in masks.values())
    figure, (ax,) = panels(0.38 * wide + 0.4, 0.38 * tall + 1.7)
    left, parts = 0.0, []
    for title, mask in masks.items():
        _cells(ax, mask, left)
        ax.text(left - 0.5, -1.5, title, fontweight="bold", fontsize=11)
        left += mask.shape[1] + 2.2
        parts.append(f"{title}: {int(mask.sum())} of {mask.numel()} pairs")
    ax.set(xlim=(-1.9, left - 2.2), ylim=(tall + 0.6, -2.2), aspect="equal")
    ax.axis("off")
    rule = "Blue with ✓: may attend, because key_pos ≤ query_pos. "
    return finish(figure, rule + "; ".join(parts) + ".")


def _cells(ax: Axes, mask: Tensor, left: float) -> None:
    """One mask from x = left on, with the positions of its queries and keys."""
    q_len, kv_len = mask.shape
    quiet: dict[str, Any] = {"color": QUIET, "fontsize": 9, **MIDDLE}
    for (row, column), allowed in np.ndenumerate(mask.numpy()):
        look = {"facecolor": "#bcd7ea", "edgecolor": BLUE} if allowed else HATCH | {"ec": RULE}
        ax.add_patch(Rectangle((left + column - 0.46, row - 0.46), 0.92, 0.92, linewidth=1, **look))
        if allowed:
            ax.text(left + column, row, "✓", color=INK, **MIDDLE)
    for column in range(kv_len):
        ax.text(left + column, -0.8, str(column), **quiet)
    for row in range(q_len):
        ax.text(left - 0.8, row, str(kv_len - q_len + row), **quiet)
    ax.text(left - 1.35, (q_len - 1) / 2, "query", rotation=90, **quiet)
    ax.text(left + (kv_len - 1) / 2, q_len - 0.1, "key", **quiet)
