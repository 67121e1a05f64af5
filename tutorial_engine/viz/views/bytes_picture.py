"""Bytes that a token leaves in the cache of some models.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence

from tutorial_engine.viz.drawing.charts import HATCH, label_bars, no_axis, panels, rows_of_bars
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, QUIET, RED, finish, house_style
from tutorial_engine.viz.words import num_bytes


@house_style()
def bytes_picture(rows: Sequence[tuple[str, float, float | None]]) -> Picture:
    """Bytes that a token leaves in the cache, per model: (name, bytes, bytes with one K/V head for
    each query head, as in MHA, or None).
    """
    figure, (ax,) = panels(8.5, 0.75 * len(rows) + 1.5)
    parts = []
    for y, (name, kept, mha) in enumerate(rows):
        up = 0.0 if mha is None else 0.18
        label_bars(ax, ax.barh(y - up, kept, 0.34, color=BLUE), [num_bytes(kept)])
        parts.append(f"{name}: {num_bytes(kept)}")
        if mha is not None:
            words = f"{num_bytes(mha)}, {mha / kept:.3g} times as much"
            bar = ax.barh(y + up, mha, 0.34, edgecolor=RED, **HATCH)
            label_bars(ax, bar, [words], color=QUIET)
            parts[-1] += f" instead of {num_bytes(mha)}"
    longest = max(max(kept, mha or 0) for _, kept, mha in rows)
    rows_of_bars(ax, [row[0] for row in rows], 1.42 * longest)
    no_axis(ax, "bottom", "left")
    ax.set_title("cache per token (solid: as it is, hatched: with MHA)", fontsize=10.5)
    return finish(figure, f"Each token leaves in the cache: {'; '.join(parts)}.")
