"""Introduced in notebook 02. Work, bytes, waste and positions of a cache: numbers in, Picture out.

Every caption is computed from the same numbers that are drawn.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.speed_plots import log_marks, si
from tutorial_engine.viz.style import (
    BLUE,
    INK,
    QUIET,
    RED,
    SERIES,
    finish,
    house_style,
    new_figure,
)
from tutorial_engine.viz.tokens import cut_label

HATCH: dict[str, Any] = {"facecolor": "white", "hatch": "////"}
MIDDLE: dict[str, Any] = {"ha": "center", "va": "center"}
CELLS = 64  # a row of more slots is drawn as one bar
WIDEST = 40  # tokens side by side
LYING = 5  # letters of a label that fit across a cell


def work_picture(
    without: Sequence[int],
    with_cache: Sequence[int],
    flops_without: Sequence[float],
    flops_with: Sequence[float],
) -> Picture:
    """Tokens run and FLOPs of each step, the prefill first, without a cache and with it.

    ValueError when the four are not equally long.
    """
    lengths = [len(x) for x in (without, with_cache, flops_without, flops_with)]
    if len(set(lengths)) != 1 or not lengths[0] or min(*with_cache, *flops_with) <= 0:
        raise ValueError(
            f"give one number above 0 a step in all four, as many in each; got {lengths}"
        )
    steps = range(1, lengths[0] + 1)
    with house_style():
        figure = new_figure(9, 3.6)
        left, right = figure.subplots(1, 2)
        left.bar([s - 0.2 for s in steps], without, 0.4, edgecolor=RED, label="no cache", **HATCH)
        left.bar([s + 0.2 for s in steps], with_cache, 0.4, color=BLUE, label="with cache")
        left.set(title="tokens run", ylim=(0, 1.25 * max(*without, *with_cache)))
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        right.plot(steps, flops_without, "x--", color=RED, label="no cache", markersize=7)
        right.plot(steps, flops_with, "o-", color=BLUE, label="with cache", markersize=5)
        right.set_title("FLOPs")
        numbers = [*flops_without, *flops_with]
        log_marks(right, min(numbers) / 1.5, 4 * max(numbers), FuncFormatter(lambda v, _: si(v)))
        for ax in (left, right):
            ax.set(xlabel="step (1 = prefill)", xlim=(0.4, lengths[0] + 0.6))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.legend(loc="upper center", ncols=2)
        again, once = sum(without), sum(with_cache)
        much, little = sum(flops_without), sum(flops_with)
        return finish(
            figure,
            f"{lengths[0]} new tokens: without a cache {again} tokens run, with it {once}, a "
            f"factor of {again / once:.1f}; that is {si(much)}FLOP against {si(little)}FLOP, "
            f"a factor of {much / little:.1f}.",
        )


def bytes_picture(rows: Sequence[tuple[str, float, float | None]]) -> Picture:
    """Bytes that a token leaves in the cache, per model: (name, bytes, bytes with one K/V head for
    each query head, as in MHA, or None).
    """
    if not rows:
        raise ValueError("give at least one row: (name, bytes per token, bytes if MHA or None)")
    with house_style():
        figure = new_figure(8.5, 0.75 * len(rows) + 1.5)
        ax = figure.subplots()
        most = max(max(own, mha or 0) for _, own, mha in rows)
        parts = []
        for y, (name, own, mha) in enumerate(rows):
            up = 0.0 if mha is None else 0.18
            ax.barh(y - up, own, 0.34, color=BLUE)
            ax.text(own + most / 80, y - up, kib(own), va="center", fontsize=9.5)
            parts.append(f"{name}: {kib(own)}")
            if mha is None:
                continue
            ax.barh(y + 0.18, mha, 0.34, edgecolor=RED, **HATCH)
            words = f"{kib(mha)}, {mha / own:.3g} times as much"
            ax.text(mha + most / 80, y + 0.18, words, va="center", fontsize=9.5, color=QUIET)
            parts[-1] += f" instead of {kib(mha)}"
        ax.set_yticks(range(len(rows)), [name for name, _, _ in rows], color=INK)
        ax.set(xlim=(0, 1.42 * most), ylim=(len(rows) - 0.4, -0.6), xticks=[])
        ax.spines[["bottom", "left"]].set_visible(False)
        ax.tick_params(left=False)
        ax.set_title("cache per token (solid: as it is, hatched: with MHA)", fontsize=10.5)
        return finish(figure, f"Each token leaves in the cache: {'; '.join(parts)}.")


def kib(count: float) -> str:
    """Bytes in KiB, as short as it can be said exactly enough: 2 KiB, 0.5 KiB."""
    return f"{count / 1024:.4g} KiB"


def fill_picture(rows: Sequence[tuple[str, int, int]]) -> Picture:
    """Rows of a static cache, (title, slots used, slots in the row): hatched = reserved, empty.

    ValueError for a row that holds more than it has.
    """
    bad = [row for row in rows if not 0 <= row[1] <= row[2] or not row[2]]
    if bad or not rows:
        raise ValueError(f"each row needs 0 ≤ used ≤ its slots, at least one; got {bad or rows}")
    with house_style():
        figure = new_figure(8.5, 0.42 * len(rows) + 1.1)
        ax = figure.subplots()
        most = max(slots for _, _, slots in rows)
        for y, (_, used, slots) in enumerate(rows):
            each = 1 if most <= CELLS else slots  # cells, where they can be seen
            ax.barh(y, slots, 0.72, edgecolor="#aeb8bf", **HATCH)
            ax.barh(y, used, 0.72, color=SERIES[y % len(SERIES)])
            for slot in range(0, slots, each):
                ax.add_patch(
                    Rectangle((slot, y - 0.36), each, 0.72, fill=False, edgecolor="#8a959d")
                )
            ax.text(slots + most / 80, y, f"{used} of {slots}", va="center", fontsize=9.5)
        ax.set_yticks(range(len(rows)), [title for title, _, _ in rows], color=INK)
        ax.set(xlim=(0, 1.16 * most), ylim=(len(rows) - 0.4, -0.6), xlabel="slots of the row")
        marks = MaxNLocator(integer=True).tick_values(0, most)
        ax.set_xticks([int(mark) for mark in marks if 0 <= mark <= most])
        ax.spines["left"].set_visible(False)
        ax.tick_params(left=False)
        used, slots = sum(row[1] for row in rows), sum(row[2] for row in rows)
        return finish(
            figure,
            f"{len(rows)} rows have {slots} slots; {used} are used and {slots - used} "
            f"({100 * (slots - used) / slots:.0f} %) are reserved and empty (hatched).",
        )


def positions_picture(
    right: Sequence[int],
    wrong: Sequence[int],
    labels_right: Sequence[str],
    labels_wrong: Sequence[str],
) -> Picture:
    """The same text decoded from the right and from a wrong start position, token by token.

    Each sequence has a position and a label a token. Framed: tokens that are not the same.
    """
    lengths = [len(x) for x in (right, wrong, labels_right, labels_wrong)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"give positions and labels of as many tokens in both, got {lengths}")
    if lengths[0] > WIDEST:
        raise ValueError(f"{lengths[0]} tokens are too many to read: give the last {WIDEST}")
    differ = [a != b for a, b in zip(labels_right, labels_wrong, strict=True)]
    off = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
    wide = 1 + max(_places(positions)[-1] for positions in (right, wrong))
    longest = max(len(cut_label(label)) for label in (*labels_right, *labels_wrong))
    tall = 0.55 if longest <= LYING else 0.22 * longest
    with house_style():
        figure = new_figure(max(0.5 * wide + 1.2, 6.5), 0.5 * (2 * tall + 3.05) + 0.5)
        ax = figure.subplots()
        for y, name, positions, labels in (
            (0, "right", right, labels_right),
            (tall + 1.5, "wrong", wrong, labels_wrong),
        ):
            ax.text(-0.3, y + tall / 2, name, ha="right", va="center", fontweight="bold")
            _strip(ax, y, tall, positions, labels, differ if name == "wrong" else [])
        if off:
            place = _places(right)[off[0]]
            ax.text(place + 0.1, -0.25, "decoded, from here on →", va="center", fontsize=9)
        ax.set(xlim=(-1.9, max(wide, 11)), ylim=(2 * tall + 2.5, -0.55), aspect="equal")
        ax.axis("off")
        start = "Both start to decode at the same position"
        if off:
            start = (
                f"From token {off[0]} on the wrong positions are off by "
                f"{wrong[off[0]] - right[off[0]]:+d} ({wrong[off[0]]} instead of {right[off[0]]})"
            )
        said = f"{sum(differ)} of {len(differ)} tokens differ"
        if any(differ):
            i = differ.index(True)
            said += f", the first is “{labels_wrong[i]}” instead of “{labels_right[i]}”"
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
    positions: Sequence[int],
    labels: Sequence[str],
    differ: Sequence[bool],
) -> None:
    """One row of token cells with their positions below; ≠ marks those that differ."""
    before = positions[0] - 1
    for i, (x, position) in enumerate(zip(_places(positions), positions, strict=True)):
        fill, edge, wide = "#e5f0f8", QUIET, 1.0
        if differ and differ[i]:
            fill, edge, wide = "#fbe6d8", RED, 2.4
            ax.text(x + 0.5, y - 0.25, "≠", color=RED, fontweight="bold", fontsize=10, **MIDDLE)
        ax.add_patch(
            Rectangle((x + 0.05, y), 0.9, tall, facecolor=fill, edgecolor=edge, linewidth=wide)
        )
        turn = 0 if tall < 0.6 else 90
        ax.text(x + 0.5, y + tall / 2, cut_label(labels[i]), rotation=turn, fontsize=9, **MIDDLE)
        jump = position - before - 1
        look: dict[str, Any] = {"color": RED if jump else QUIET, "fontsize": 9, **MIDDLE}
        ax.text(x + 0.5, y + tall + 0.3, str(position), **look)
        if jump > 0:
            ax.add_patch(
                Rectangle((x - 0.95, y), 0.9, tall, edgecolor=RED, linestyle="--", **HATCH)
            )
            words = str(before + 1) if jump == 1 else f"{before + 1} to {position - 1}"
            ax.text(x - 0.5, y + tall + 0.75, f"{words} skipped", **look)
        elif jump < 0:
            ax.text(x + 0.5, y + tall + 0.75, "again", **look)
        before = position
