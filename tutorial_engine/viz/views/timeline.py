"""What each request did in each step: a trace in, Picture out.

Time runs right; the caption is computed from the same run that is drawn.
"""

from collections.abc import Mapping

from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.drawing.lanes import (
    TEXT,
    Axis,
    By,
    LaneStyle,
    draw_lanes,
    lane_height,
    lane_legend,
    name_width,
    ruler,
    time_marks,
)
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look, patch
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET
from tutorial_engine.viz.run.run import Life, Run
from tutorial_engine.viz.tokens import cut_label, written
from tutorial_engine.viz.words import counted, ms, tokens

TITLE = "What each request did in each step"
WIDE = 1000.0  # pixels, as wide as a notebook shows
END = 118.0  # right of the last step, for "finished · length"
COLUMN = 78.0  # the most that a step takes
TALL = 80.0  # of the budget bars
FEW = 4  # requests that a caption tells one by one


def timeline(trace: Trace) -> Picture:
    """A row per request, a box per step, and below them how full each step was.

    All steps are equally wide. Step s of request r (counted from 0) is the item `box.r.s`, its part
    of the budget `budget.r.s`. ValueError when no step of the trace ran to its end.
    """
    run = Run.of(trace)
    left = name_width([run])
    right = min(WIDE - END, left + COLUMN * max(len(run.steps), 7))
    scene = Sheet(right + END, 0)
    axis = Axis.of(run, left, right, "step", run.start, run.end - run.start)
    tall = lane_height(len(run.lives))
    style = LaneStyle.of([(run, axis)], tall)
    top = _head(scene, TITLE, [run], "step", limits(run), style) + 16
    bottom = top + tall * len(run.lives)
    base = bottom + 48 + TALL
    draw_lanes(scene, run, axis, top, tall, style)
    ruler(scene, run, axis, bottom)
    for i, words in enumerate(("tokens", "run")):
        scene.note(f"budget.title.{i}", 10, base - TALL / 2 + 4 + 14 * i, words, TEXT)
    _draw_budget(scene, run, axis, base)
    scene.height = base + 10
    scene.tip_at = (8, scene.height + 14)
    return scene.picture(_caption(run), zoom=1.1)


def timelines(
    traces: Mapping[str, Trace], title: str = "The same requests under each policy"
) -> Picture:
    """Runs one below the other on one time axis, each with its time and its tokens per second.

    ValueError for a trace without a finished step.
    """
    runs = {name: Run.of(trace) for name, trace in traces.items()}
    every = list(runs.values())
    left, right = name_width(every), WIDE - END
    longest = max(run.end - run.start for run in every)
    axes = [Axis.of(run, left, right, "time", run.start, longest) for run in every]
    talls = [min(24.0, lane_height(len(run.lives))) for run in every]
    style = LaneStyle.of(list(zip(every, axes, strict=True)), min(talls))
    scene = Sheet(WIDE, 0)
    top = y = _head(scene, title, every, "time", limits(every[0], policy=False), style) + 20
    scene.height = top + sum(54 + t * len(run.lives) for t, run in zip(talls, every, strict=True))
    time_marks(scene, axes[0], scene.height - 8, top + 2)
    for i, ((name, run), axis, tall) in enumerate(zip(runs.items(), axes, talls, strict=True)):
        shown = cut_to(name, 420, 13, True, keep=True)
        times = f"{ms(run.end - run.start)} · {_rate(run):.0f} tok/s · {len(run.steps)} steps"
        at = 24 + text_width(shown, 13, True)
        scene.rect(f"{i}.paper", (8, y - 2, at - 6 + text_width(times, 12), 20), PAPER)
        scene.text(f"{i}.title", 10, y + 13, shown, 13, **BOLD)
        scene.text(f"{i}.reached", at, y + 13, times, 12)
        x, first = axis.at(run.end), y + 20
        bottom = first + tall * len(run.lives)
        y = bottom + 34
        ends: Style = {"x1": x, "x2": x, "y1": first - 3, "y2": bottom + 3}
        scene.add(f"{i}.end", "line", stroke=QUIET, stroke_width=1.2, **ends)
        draw_lanes(scene, run, axis, first, tall, style, f"{i}.")
        ruler(scene, run, axis, bottom, f"{i}.")
    scene.height += 14
    return scene.picture(_comparison(runs), zoom=1.1)  # four panels would weigh too much


def _head(
    scene: Sheet, title: str, runs: list[Run], by: By, settings: str, style: LaneStyle
) -> float:
    """Title, settings and legend → where the last line is."""
    wide = scene.width - 20
    scene.text("title", 10, 22, cut_to(title, wide, 16, True, keep=True), 16, **BOLD)
    scene.note("settings", 10, 42, cut_to(settings, wide, 11.5, keep=True), 11.5)
    return lane_legend(scene, 10, 64, runs, by, style)


def _draw_budget(scene: Sheet, run: Run, axis: Axis, base: float) -> None:
    """Tokens of each step, stacked by request in the order of the rows; the line is the budget."""
    fullest, limit = max(step.num_tokens for step in run.steps), run.budget or None
    near = limit is not None and limit <= 5 * fullest
    top = float(max(limit, fullest)) if limit is not None and near else 1.15 * fullest
    line = base - TALL * limit / top if limit is not None and near else base - TALL
    ends: Style = {"x1": axis.left, "x2": axis.right, "stroke_width": 1.2}
    scene.add("budget.zero", "line", y1=base, y2=base, stroke=QUIET, **ends)
    if near:
        dashed = {"stroke": INK, "stroke_dasharray": "5 3"}
        scene.add("budget.limit", "line", y1=line, y2=line, **dashed, **ends)
    for step in run.steps:
        x0, x1 = axis.span(step.number)
        gap, y = min(1.5, (x1 - x0) / 8), base
        for r, life in enumerate(run.lives):
            if step.number not in life.ran:
                continue
            count = life.ran[step.number].num_tokens
            high = TALL * count / top
            y -= high
            tip = f"step {step.number}: {life.request_id} runs {count} of {step.num_tokens}"
            box = (x0 + gap, y, max(x1 - x0 - 2 * gap, 0.5), high)
            patch(scene, f"budget.{r}.{step.number}", box, look(r), tip)
        words, middle = str(step.num_tokens), (x0 + x1) / 2
        if text_width(words, TEXT) + 4 <= x1 - x0:  # may lie on the line of the budget
            halo: Style = {"stroke": PAPER, "stroke_width": 3, "paint_order": "stroke"}
            scene.text(f"total.{step.number}", middle, y - 4, words, TEXT, **CENTRE, **halo)
    if limit is not None:
        for i, words in enumerate(
            [f"budget {limit}"] if near else [f"budget {limit},", "not reached"]
        ):
            scene.text(f"budget.words.{i}", axis.right + 6, line + 4 + 13 * i, words, TEXT)


# -- in words -------------------------------------------------------------------------------------


def limits(run: Run, policy: bool = True, clock: bool = True) -> str:
    """The engine's limits, and what its clock asks, as far as the trace knows them."""
    get, parts = run.settings.get, []
    if policy and run.policy:
        parts.append(run.policy)
    if run.budget:
        parts.append(f"budget {tokens(run.budget)} a step")
    if run.max_num_seqs:
        parts.append(f"at most {run.max_num_seqs} run at once")
    if get("enable_chunked_prefill") is False:
        parts.append("no chunked prefill")
    if get("long_prefill_token_threshold"):
        parts.append(f"chunks of at most {get('long_prefill_token_threshold')}")
    fixed, each = get("seconds_per_forward"), get("seconds_per_token")
    if clock and isinstance(fixed, float | int) and isinstance(each, float | int):
        parts.append(f"virtual clock: {ms(fixed)} a forward + {ms(each)} a token")
    return " · ".join(parts)


def _rate(run: Run) -> float:
    """Output tokens per second, from the first arrival to the last step's end."""
    return run.num_output_tokens / (run.end - run.start) if run.end > run.start else 0.0


def _caption(run: Run) -> str:
    """How much ran in how many steps, how full they were, and who ended when."""
    lives, limit = run.lives, run.budget
    of = f" of {limit}" if limit else ""
    said = (
        f"{counted(len(run.steps), 'step')} ran {tokens(run.num_tokens)} of "
        f"{counted(len(lives), 'request')} in {ms(run.end - run.start)}, "
        f"{run.num_tokens / len(run.steps):.1f}{of} a step on average"
    )
    over = [life for life in lives if life.end_step is not None]
    if len(lives) <= FEW:
        said += "".join(f"; {_told(life)}" for life in lives)
    elif over:
        first, last = (
            pick(over, key=lambda life: (life.finished, life.end_step)) for pick in (min, max)
        )
        said += f"; the first to end is {_told(first)}; the last is {_told(last)}"
    shares = [share for life in lives for share in life.shares.values()]
    lost = sum(share.kind == "preempted" for share in shares)
    if lost:
        again = sum(share.num_again for share in shares)
        said += f"; {lost} preempted, {counted(again, 'lost token')} computed again"
    return said + "."


def plain(request_id: str) -> str:
    """An id inside a sentence: at most 24 letters, line breaks and the like made visible."""
    return cut_label(written(request_id), 24)


def _told(life: Life) -> str:
    """One request: its first token and its end, by step."""
    name = plain(life.request_id)
    name = f"“{name}”" if len(name) > 2 else name
    first = f"first token in step {life.token_steps[0]}" if life.token_steps else "no token"
    if life.end_step is None:
        return f"{name}: {first}, not over"
    end = f"finished ({life.reason})" if life.ending.startswith("finished") else life.ending
    return f"{name}: {first}, {end} {'in' if life.end_step_ran else 'before'} step {life.end_step}"


def _comparison(runs: Mapping[str, Run]) -> str:
    """Which of several runs ends first, and by what factor the others are slower."""
    best, *others = sorted((run.end - run.start, name) for name, run in runs.items())
    parts = [f"“{best[1]}” ends first, after {ms(best[0])} ({_rate(runs[best[1]]):.0f} tok/s)"]
    for span, name in others:
        times = "as long" if span == best[0] else f"{span / best[0]:.2f} times as long"
        parts.append(f"“{name}” takes {ms(span)}, {times}")
    return "; ".join(parts) + "."
