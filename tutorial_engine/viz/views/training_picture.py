"""How the tiny model learned: loss and induction score.

The caption is computed from the same numbers that are drawn.
"""

import math
from collections.abc import Mapping, Sequence

from tutorial_engine.viz.drawing.charts import panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import (
    BLUE,
    GREEN,
    ORANGE,
    QUIET,
    finish,
    house_style,
)


@house_style()
def training_picture(curve: Sequence[Mapping[str, float]], vocab_size: int = 512) -> Picture:
    """Loss and induction score of the tiny model's training, from its curve.json.

    A thin line shows the loss of pure guessing among `vocab_size` tokens.
    """
    series = {key: [point[key] for point in curve] for key in curve[0]}
    steps, induction = series["step"], series["induction"]
    random = "loss on repeated random tokens (left axis)"
    figure, (ax,) = panels(8, 4.2)
    guessing = math.log(vocab_size)
    lines = ax.plot(steps, series["text_loss"], color=BLUE, label="loss on stories (left axis)")
    lines += ax.plot(steps, series["repeat_loss"], "--", color=ORANGE, label=random)
    words = f"pure guessing: ln {vocab_size} = {guessing:.2f} (left axis)"
    lines += [ax.axhline(guessing, color=QUIET, linewidth=1, linestyle=":", label=words)]
    ax.set(xlabel="training step", ylabel="loss", ylim=(0, 7))
    right = ax.twinx()
    best = "best induction score (right axis)"
    lines += right.plot(steps, induction, "-.", color=GREEN, linewidth=2.2, label=best)
    right.set(ylim=(0, 1.05), ylabel="induction score")
    right.spines["right"].set_visible(True)
    ax.legend(handles=lines, loc="center right")
    span = min(2, len(curve) - 1)  # the steepest stretch of two intervals
    rises = [induction[i + span] - induction[i] for i in range(len(curve) - span)]
    before = rises.index(max(rises))
    after = before + span
    repeat = series["repeat_loss"]
    return finish(
        figure,
        f"Between step {steps[before]} and step {steps[after]} the best head's induction score "
        f"goes from {induction[before]:.2f} to {induction[after]:.2f}, and the loss on repeated "
        f"random tokens from {repeat[before]:.2f} to {repeat[after]:.2f}.",
    )
