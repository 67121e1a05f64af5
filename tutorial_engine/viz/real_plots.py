"""What notebook 06 measures on a real model: losses without slots, who looks at slot 0, waiting.

Knows numbers and labels; knows no model.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.charts import (
    label_bars,
    lines_across,
    no_axis,
    panels,
    rows_of_bars,
)
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import BLUE, INK, PAPER, RED, SKY, finish, house_style
from tutorial_engine.viz.words import counted


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


@house_style()
def first_tokens_picture(found: Mapping[str, Sequence[tuple[int, int, float]]]) -> Picture:
    """Time to the first token: name → (prompt tokens, found, seconds) of each turn."""
    turns = max(len(each) for each in found.values())
    figure, (ax,) = panels(8.2, 0.9 + 0.36 * turns * len(found))
    rows = [(name, turn, *each[turn]) for turn in range(turns) for name, each in found.items()]
    most = max(seconds for *_, seconds in rows)
    names = [
        f"turn {turn + 1}, {name}: {total - hits} of {total} tokens run"
        for name, turn, total, hits, _ in rows
    ]
    rows_of_bars(ax, names, 1.2 * most)
    colours = {name: colour for name, colour in zip(found, (BLUE, SKY), strict=False)}
    looks = [colours[name] for name, *_ in rows]
    bars = ax.barh(range(len(rows)), [row[-1] for row in rows], color=looks, height=0.62)
    label_bars(ax, bars, [f"{row[-1]:.2f} s" for row in rows])
    no_axis(ax, "bottom")
    ax.set_title("time to the first token, measured here")
    first, *others = found
    gained = found[others[0]][-1][2] / found[first][-1][2] if others else 1.0
    return finish(
        figure,
        f"In turn {turns} the first token comes {gained:.1f} times faster {first} than "
        f"{' and '.join(others)}.",
    )
