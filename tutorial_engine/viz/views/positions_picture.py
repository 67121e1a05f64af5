"""A text decoded from the right start position and from a wrong one.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from tutorial_engine.viz.drawing.charts import HATCH, MIDDLE, cell_height, panels, token_cell
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import QUIET, RED, finish, house_style

WIDEST = 40  # tokens side by side


@house_style()
def positions_picture(
    right: Sequence[int],
    wrong: Sequence[int],
    labels_right: Sequence[str],
    labels_wrong: Sequence[str],
) -> Picture:
    """The same text decoded from the right and from a wrong start position, token by token.

    Each sequence has a position and a label a token. The first position that is not the same begins
    the decoded tokens. Marked in both rows: pairs of tokens that are not the same.
    """
    lengths = [len(x) for x in (right, wrong, labels_right, labels_wrong)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"give positions and labels of as many tokens in both, got {lengths}")
    if lengths[0] > WIDEST:
        raise ValueError(f"{lengths[0]} tokens are too many to read: give the last {WIDEST}")
    differ = [a != b for a, b in zip(labels_right, labels_wrong, strict=True)]
    off = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
    wide = 1 + max(_places(positions)[-1] for positions in (right, wrong))
    tall = cell_height([*labels_right, *labels_wrong])
    figure, (ax,) = panels(max(0.5 * wide + 1.2, 6.5), 0.5 * (2 * tall + 3.55) + 0.5)
    _strip(ax, 0, tall, "right", right, labels_right, differ)
    _strip(ax, tall + 1.5, tall, "wrong", wrong, labels_wrong, differ)
    start = "Both start to decode at the same position"
    if off:
        place = _places(right)[off[0]]
        ax.text(place + 0.1, -0.75, "decoded, from here on →", va="center", fontsize=9)
        a, b = right[off[0]], wrong[off[0]]
        start = (
            f"From position {a} on the wrong positions are off by {b - a:+d} ({b} instead of {a})"
        )
    ax.set(xlim=(-1.9, max(wide, 11)), ylim=(2 * tall + 2.5, -1.05), aspect="equal")
    ax.axis("off")
    begin, decoded = (off[0], "decoded ") if off else (0, "")
    others = [i for i in range(begin, len(differ)) if differ[i]]
    said = f"{len(others)} of {len(differ) - begin} {decoded}tokens differ"
    if others:
        i = others[0]
        said += f" (marked ≠), the first is “{labels_wrong[i]}” instead of “{labels_right[i]}”"
    return finish(figure, f"{start}; {said}.")


def _places(positions: Sequence[int]) -> list[int]:
    """Where to draw each token: side by side, with one empty place where positions are skipped."""
    places = [0]
    for before, here in pairwise(positions):
        places.append(places[-1] + (2 if here > before + 1 else 1))
    return places


def _strip(
    ax: Axes,
    y: float,
    tall: float,
    name: str,
    positions: Sequence[int],
    labels: Sequence[str],
    differ: Sequence[bool],
) -> None:
    """One row of token cells with their positions below; ≠ marks those that differ."""
    ax.text(-0.3, y + tall / 2, name, ha="right", va="center", fontweight="bold")
    expected = positions[0]
    for i, (x, position) in enumerate(zip(_places(positions), positions, strict=True)):
        look: dict[str, Any] = {"facecolor": "#e5f0f8", "edgecolor": QUIET}
        if differ[i]:
            look = {"facecolor": "#fbe6d8", "edgecolor": RED, "linewidth": 2.4}
            ax.text(x + 0.5, y - 0.25, "≠", color=RED, fontweight="bold", fontsize=10, **MIDDLE)
        token_cell(ax, x, y, tall, labels[i], **look)
        jumped = position != expected
        below: dict[str, Any] = {"color": RED if jumped else QUIET, "fontsize": 9, **MIDDLE}
        ax.text(x + 0.5, y + tall + 0.3, str(position), **below)
        if position > expected:
            token_cell(ax, x - 1, y, tall, "", edgecolor=RED, linestyle="--", **HATCH)
            last = f" to {position - 1}" if position - 1 > expected else ""
            ax.text(x - 0.5, y + tall + 0.75, f"{expected}{last} skipped", **below)
        elif jumped:
            ax.text(x + 0.5, y + tall + 0.75, "again", **below)
        expected = position + 1
