"""What a head attends to when its tokens stand at other positions.

The caption is computed from the same numbers that are drawn.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from tutorial_engine.viz.drawing.charts import panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import finish, house_style
from tutorial_engine.viz.views.heads_picture import WEIGHT, show_shares


@house_style()
def rope_maps_picture(maps: Mapping[str, Tensor], labels: Sequence[str], who: str) -> Picture:
    """One head's weights [n, n] under several positions of the tokens, side by side.

    The caption says what each map gives to the token before, and how far it is from the first map.
    """
    n, wide = len(labels), len(maps)
    figure, axes = panels(3.3 * wide + 1.3, 4.9, 1, wide)
    for i, (ax, (title, weights)) in enumerate(zip(axes, maps.items(), strict=True)):
        image = show_shares(ax, weights)
        ax.set_xticks(range(n), labels, rotation=90, fontsize=9.5)
        ax.set_yticks(range(n), labels if i == 0 else [""] * n, fontsize=9.5)
        ax.set(title=title, xlabel="key", ylabel="query" if i == 0 else "")
    figure.colorbar(image, ax=axes, label=WEIGHT, shrink=0.7)
    first, said = next(iter(maps.values())), []
    for title, weights in maps.items():
        is_same = float((weights - first).abs().max()) < 1e-4
        differs = "" if weights is first else f", {'the same' if is_same else 'another'} map"
        said.append(f"{float(weights.diagonal(-1).mean()):.2f} ({title}{differs})")
    return finish(
        figure, f"{who} gives the token before a mean attention weight of {', '.join(said)}."
    )
