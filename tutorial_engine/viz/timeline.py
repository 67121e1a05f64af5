"""Introduced in notebook 03. What each request did in each step: a trace in, Picture out.

Time runs right; the caption is computed from the same rows that are drawn.
"""

from collections.abc import Mapping

from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import cut_to, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import INK, QUIET
from tutorial_engine.viz.timeline_parts import (
    TALL,
    Axis,
    By,
    draw_budget,
    draw_rows,
    legend,
    make_axis,
    name_width,
    row_height,
    ruler,
    time_marks,
)
from tutorial_engine.viz.timeline_words import ms, rate, run_caption, runs_caption, settings_line
from tutorial_engine.viz.trace_rows import Rows, rows

WIDE = 1000.0  # pixels, as wide as a notebook shows
END = 118.0  # right of the last step, for "finished · length"
COLUMN = 78.0  # the most that a step takes


def timeline(
    trace: Trace, title: str = "What each request did in each step", by: By = "step"
) -> Picture:
    """A row per request, a box per step, and below them how full each step was.

    by="time": a step is as wide as it took on the engine's clock. ValueError when no step of the
    trace ran to its end.
    """
    run = rows(trace)
    return timeline_scene(run, title, by).picture(run_caption(run), zoom=1.1)


def timeline_scene(run: Rows, title: str, by: By = "step", cursor: int | None = None) -> Scene:
    """The same as a Scene of named items, for explorers; `cursor` is the step to frame.

    What step s did with request r (counted from 0) is `box.r.s`, its part of the budget
    `budget.r.s`.
    """
    if by not in ("step", "time"):
        raise ValueError(f'by is "step" or "time", got {by!r}')
    left = name_width([run])
    right = WIDE - END
    if by == "step":
        right = min(right, left + COLUMN * max(len(run.steps), 7))
    axis = make_axis(run, left, right, by, run.start, run.end - run.start)
    scene = Scene(right + END, 0)
    _head(scene, title, settings_line(run))
    top = 16 + legend(scene, 10, 64, [run], by)
    tall = row_height(len(run.lives))
    bottom = top + tall * len(run.lives)
    base = bottom + 48 + TALL
    if by == "time":
        time_marks(scene, axis, run.start, run.end - run.start, base + 6, top)
    draw_rows(scene, run, axis, top, tall)
    ruler(scene, run, axis, bottom)
    scene.text("budget.title", 10, base - TALL / 2 + 4, "tokens", 11, fill=QUIET)
    scene.text("budget.more", 10, base - TALL / 2 + 18, "run", 11, fill=QUIET)
    draw_budget(scene, run, axis, base)
    scene.height = base + (26 if by == "time" else 10)
    if cursor is not None:
        _cursor(scene, axis, cursor, top, base)
    scene.tip_at = (8, scene.height + 14)
    return scene


def timelines(
    traces: Mapping[str, Trace], title: str = "The same requests under each policy"
) -> Picture:
    """Runs one below the other on one time axis, each with its time and its tokens per second.

    ValueError for no trace, or one without a finished step.
    """
    if not traces:
        raise ValueError("give at least one trace: {name: trace, ...}")
    runs = {name: rows(trace) for name, trace in traces.items()}
    every = list(runs.values())
    left, right = name_width(every), WIDE - END
    longest = max(run.end - run.start for run in every)
    scene = Scene(WIDE, 0)
    _head(scene, title, settings_line(every[0], policy=False))
    top = y = 20 + legend(scene, 10, 64, every, "time")
    places = []
    for run in every:
        tall = min(24.0, row_height(len(run.lives)))
        places.append((y, y + 20, tall))
        y += 20 + tall * len(run.lives) + 16
    first = every[0]
    axis = make_axis(first, left, right, "time", first.start, longest)
    time_marks(scene, axis, first.start, longest, y - 8, top + 2)
    for i, (name, run) in enumerate(runs.items()):
        title_y, first_row, tall = places[i]
        axis = make_axis(run, left, right, "time", run.start, longest)
        _panel(scene, f"{i}.", name, run, title_y)
        x, low = axis.at(run.end), first_row + tall * len(run.lives) + 3
        high = first_row - 3
        scene.add(f"{i}.end", "line", x1=x, x2=x, y1=high, y2=low, stroke=INK, stroke_width=2)
        draw_rows(scene, run, axis, first_row, tall, f"{i}.")
    scene.height = y + 14
    return scene.picture(runs_caption(runs), zoom=1.1)  # four panels would weigh too much


def _panel(scene: Scene, prefix: str, name: str, run: Rows, y: float) -> None:
    """The title of one run, with what it reached."""
    shown = cut_to(name, 420, 13, True, keep=True)
    reached = f"{ms(run.end - run.start)} · {rate(run):.0f} tok/s · {len(run.steps)} steps"
    wide = text_width(shown, 13, True) + 14 + text_width(reached, 12)
    scene.rect(f"{prefix}paper", (8, y - 2, wide + 8, 20), "#ffffff")
    scene.text(f"{prefix}title", 10, y + 13, shown, 13, font_weight="bold")
    scene.text(f"{prefix}reached", 24 + text_width(shown, 13, True), y + 13, reached, 12)


def _head(scene: Scene, title: str, settings: str) -> None:
    wide = scene.width - 20
    scene.text("title", 10, 22, cut_to(title, wide, 16, True, keep=True), 16, font_weight="bold")
    scene.text("settings", 10, 42, cut_to(settings, wide, 11.5, keep=True), 11.5, fill=QUIET)


def _cursor(scene: Scene, axis: Axis, step: int, top: float, base: float) -> None:
    x0, x1 = axis.span(step)
    box = (x0 - 1, top - 3, x1 - x0 + 2, base - top + 6)
    scene.rect("cursor", box, "none", stroke=INK, stroke_width=2.2, rx=4, pointer_events="none")
