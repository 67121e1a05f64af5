"""What ways to call attention cost: launches, and tokens a second.

Drawn from figures that were measured on a GPU.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.lab.on_gpu import SERVED, GpuServing
from tutorial_engine.viz.drawing.parts import BOLD, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, ORANGE


def serving_picture(launches: Mapping[str, int], speeds: Sequence[GpuServing]) -> Picture:
    """Launches of a step by the way that attention is called; tokens a second, two runs each."""
    rows = len(launches) + len(speeds)
    scene = Sheet(1000, 104 + 26 * rows + 30)
    scene.heading("Many requests at once")
    scene.note("served", 10, 42, SERVED, 12)
    start, longest, largest = 330.0, 440.0, max(launches.values())
    scene.text("launches", 10, 72, "launches of one step (counted)", 12.5, **BOLD)
    scene.note("launches.better", start, 72, "← shorter is better", 12)
    y = 80.0
    for i, (what, count) in enumerate(launches.items()):
        scene.text(f"way.{i}", 26, y + 16, what, 12)
        wide = longest * count / largest
        scene.rect(f"way.{i}.bar", (start, y + 3, max(wide, 1), 17), BLUE, stroke=INK)
        scene.text(f"way.{i}.count", start + wide + 6, y + 16, f"{count:,}", 12, **BOLD)
        y += 26
    y += 24
    scene.text("speeds", 10, y - 6, "wanted tokens a second (measured)", 12.5, **BOLD)
    scene.note("speeds.better", start, y - 6, "longer is better →", 12)
    fastest = max(speed.second for speed in speeds)
    for i, speed in enumerate(speeds):
        scene.text(f"speed.{i}", 26, y + 16, speed.what, 12)
        for run, value, fill in (("second", speed.second, GREEN), ("first", speed.first, ORANGE)):
            height = 17.0 if run == "second" else 7.0
            box = (start, y + 3 + (17 - height) / 2, longest * value / fastest, height)
            scene.rect(f"speed.{i}.{run}", box, fill, f"{run} run: {value:,.0f}", stroke=INK)
        words = f"{speed.first:,.0f} / {speed.second:,.0f}"
        if speed.least is not None:
            words += f" (best of several; lowest {speed.least[0]:,.0f} / {speed.least[1]:,.0f})"
        end = start + longest * speed.second / fastest
        scene.text(f"speed.{i}.words", end + 6, y + 16, words, 12)
        y += 26
    marks = {
        "first run": lambda name, box: scene.rect(
            name, (box[0], box[1] + 4, 18, 7), ORANGE, stroke=INK
        ),
        "second run": lambda name, box: scene.rect(name, box, GREEN, stroke=INK),
    }
    scene.legend(start, y + 18, marks)
    least, best = min(launches.values()), max(speeds, key=lambda speed: speed.second)
    times = f"{best.second / speeds[0].second:.1f}×"
    caption = (
        f"A step has {largest:,} launches with a call for each request, {least:,} with one for "
        f"all; the best second run has {best.second:,.0f} wanted tokens a second ({best.what}), "
        f"{times} as many as that of “{speeds[0].what}”."
    )
    return scene.picture(caption, zoom=1.0)
