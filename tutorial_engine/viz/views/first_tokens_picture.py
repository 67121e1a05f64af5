"""Time to the first token, turn by turn.

Knows numbers and labels; knows no model.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.charts import (
    label_bars,
    no_axis,
    panels,
    rows_of_bars,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, SKY, finish, house_style


@house_style()
def first_tokens_picture(found: Mapping[str, Sequence[tuple[int, int, float]]]) -> Picture:
    """Time to the first token: name → (prompt tokens, found, seconds) of each turn."""
    turns = max(len(each) for each in found.values())
    figure, (ax,) = panels(8.2, 0.9 + 0.36 * turns * len(found))
    rows = [(name, turn, *each[turn]) for turn in range(turns) for name, each in found.items()]
    longest = max(seconds for *_, seconds in rows)
    names = [
        f"turn {turn + 1}, {name}: {total - hits} of {total} tokens run"
        for name, turn, total, hits, _ in rows
    ]
    rows_of_bars(ax, names, 1.2 * longest)
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
