"""CPU and GPU of one decode step.

Drawn from figures: totals that were measured, and averages of them. No single launch was recorded,
so none is drawn.
"""

from collections.abc import Sequence

from tutorial_engine.lab.on_gpu import GpuStep
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, DEAF, KEY, RIGHT, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.scene import HATCHED
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, PAPER, QUIET, RED, RULE

LEFT, RIGHT_END = 70.0, 984.0  # of the time axis
LANE, BETWEEN = 30.0, 8.0  # height of a lane, and what lies between two
PANEL = 2 * LANE + BETWEEN + 62  # from one step to the next
MOST_PARTS = 50
NEAR = 5  # launches that are drawn one by one
WHITE: Style = {"fill": PAPER}


def gpu_timeline(*steps: GpuStep, floor: float | None = None) -> Picture:
    """Each step on the same scale: the CPU launches above, the GPU works and waits below.

    One step alone is also drawn from near: so many average launches. `floor` is a time in seconds
    below which no step can get.
    """
    first = steps[0]
    assert first.launches is not None and first.busy is not None, "only a replayed one has neither"
    near = len(steps) == 1
    low = 44 + PANEL * len(steps)
    scene = Sheet(1000, low + (150 if near else 66))
    scene.heading(
        "One decode step of one request: who works when", "drawn from totals and averages"
    )
    scale = (RIGHT_END - LEFT) / max(step.seconds for step in steps)
    for number, step in enumerate(steps):
        _step(scene, step, 44 + PANEL * number, scale, first.busy)
    _axis(scene, low, max(step.seconds for step in steps), scale, floor)
    if near:
        _near(scene, first.launches, first.seconds, first.busy, low + 52)
    return scene.picture(_caption(steps, floor), zoom=1.0)


def _step(scene: Sheet, step: GpuStep, top: float, scale: float, busy: float) -> None:
    name, wide, y = step.what, step.seconds * scale, top + 24
    scene.text(f"{name}.title", LEFT, top + 14, f"{name}: {_ms(step.seconds)}", 12.5, **BOLD)
    low = y + LANE + BETWEEN
    for lane, at in (("CPU", y), ("GPU", low)):
        scene.text(f"{name}.{lane}", LEFT - 12, at + 20, lane, 12.5, **RIGHT)
    if step.launches is None or step.busy is None:  # one launch, and the GPU runs all of it
        scene.rect(f"{name}.launch", (LEFT, y, 6, LANE), BLUE, "one launch", stroke=INK)
        scene.note(f"{name}.free", LEFT + 14, y + 20, "one launch; then the CPU is free", 12)
        scene.rect(f"{name}.work", (LEFT, low, wide, LANE), GREEN, "the recorded step", stroke=INK)
        words = f"{_ms(step.seconds)}, no wait for Python; dashed: the {_ms(busy)} of work above"
        mark = LEFT + busy * scale
        style: Style = {"stroke": INK, "stroke_width": 1.6, "stroke_dasharray": "3 2"}
        scene.add(f"{name}.busy", "path", d=f"M{mark:.1f} {low}v{LANE}", **style, **DEAF)
        if LEFT + wide + 8 + text_width(words, 12) < RIGHT_END:
            scene.note(f"{name}.words", LEFT + wide + 8, low + 20, words, 12)
        else:  # on a GPU where a replayed step is nearly as long
            _said(scene, f"{name}.words", LEFT + wide / 2, low, words)
        return
    parts = max(n for n in range(1, MOST_PARTS + 1) if step.launches % n == 0)
    each, work = wide / parts, wide / parts * step.busy / step.seconds
    scene.rect(f"{name}.idle", (LEFT, low, wide, LANE), HATCHED, "the GPU is idle", stroke=RULE)
    for stretch in range(parts):
        x = LEFT + each * stretch
        tip = f"{step.launches // parts} launches"
        scene.rect(f"{name}.cpu.{stretch}", (x, y, each, LANE), BLUE, tip, stroke=PAPER)
        scene.rect(
            f"{name}.gpu.{stretch}", (x + each - work, low, work, LANE), GREEN, "the GPU works"
        )
    words = f"Python launches {step.launches} kernels: {_ms(step.seconds)}"
    _said(scene, f"{name}.launches", LEFT + wide / 2, y, words)
    words = f"the GPU works {_ms(step.busy)} and is idle {_ms(step.seconds - step.busy)}"
    _said(scene, f"{name}.work", LEFT + wide / 2, low, words)
    words = f"a stripe stands for {step.launches // parts} launches and the work of their kernels"
    scene.note(f"{name}.parts", LEFT + wide, top + 14, words, KEY, **RIGHT)


def _said(scene: Sheet, name: str, middle: float, top: float, words: str) -> None:
    """Words on paper, in the middle of a lane that begins there."""
    wide = text_width(words, 12) + 24
    box = (middle - wide / 2, top + 5, wide, LANE - 10)
    scene.rect(f"{name}.paper", box, PAPER, rx=4, **DEAF)
    scene.inside(f"{name}.words", box, words, 12)


def _axis(scene: Sheet, y: float, longest: float, scale: float, floor: float | None) -> None:
    line: Style = {"stroke": QUIET, "stroke_width": 1.2}
    scene.add("axis", "path", d=f"M{LEFT} {y}H{RIGHT_END}", **line)
    every = 2 if longest > 6e-3 else 0.5
    for i in range(int(longest * 1000 / every) + 1):
        x = LEFT + every * i / 1000 * scale
        scene.add(f"tick.{i}", "path", d=f"M{x:.1f} {y}v5", **line)
        words = f"{every * i:g}" + (" ms" if i == 0 else "")
        scene.note(f"tick.{i}.words", x, y + 18, words, KEY, **CENTRE)
    if floor is not None:
        x = LEFT + floor * scale
        style: Style = {"stroke": RED, "stroke_width": 2, "stroke_dasharray": "5 3"}
        scene.add("floor", "path", d=f"M{x:.1f} {y - 24 - LANE}V{y + 26}", **style, **DEAF)
        words = f"{_ms(floor)}: all weights read once"
        scene.text("floor.words", x + 4, y + 40, words, 12, fill=RED)


def _near(scene: Sheet, launches: int, seconds: float, busy: float, top: float) -> None:
    """Some launches of average length, one by one."""
    each, work = seconds / launches, busy / launches
    scale = (RIGHT_END - LEFT) / ((NEAR + 0.5) * each)
    words = f"from near: {NEAR} launches of average length"
    scene.text("near.title", LEFT, top, words, 12.5, **BOLD)
    y, low = top + 10, top + 10 + LANE + BETWEEN
    for lane, at in (("CPU", y), ("GPU", low)):
        scene.text(f"near.{lane}", LEFT - 12, at + 20, lane, 12.5, **RIGHT)
    scene.rect("near.idle", (LEFT, low, RIGHT_END - LEFT, LANE), HATCHED, stroke=RULE)
    for i in range(NEAR):
        x = LEFT + i * each * scale
        box = (x, y, each * scale, LANE)
        scene.rect(f"near.launch.{i}", box, BLUE, stroke=PAPER)
        scene.inside(f"near.launch.{i}.words", box, f"launch: {_us(each)}", 12, **WHITE)
        box = (x + each * scale, low, work * scale, LANE)
        scene.rect(f"near.kernel.{i}", box, GREEN, f"a kernel: {_us(work)}", stroke=INK)
    middle = LEFT + (each + each / 2 + work / 2) * scale
    _said(scene, "near.idle", middle, low, f"idle: {_us(each - work)}")
    words = f"kernel: {_us(work)}"
    scene.note("near.kernel.words", LEFT + each * scale - 6, low + 20, words, 12, fill=INK, **RIGHT)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.{2 if seconds < 1e-3 else 1}f} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def _caption(steps: Sequence[GpuStep], floor: float | None) -> str:
    first, *others = steps
    assert first.launches is not None and first.busy is not None, "it was looked at"
    each, work = first.seconds / first.launches, first.busy / first.launches
    idle = 1 - first.busy / first.seconds
    caption = (
        f"From these figures: {first.launches} launches in {_ms(first.seconds)} are one in "
        f"{_us(each)}; a kernel runs for {_us(work)} on average, so the GPU is idle for {idle:.0%} "
        "of the step"
    )
    for step in others:
        caption += f"; “{step.what}” takes {_ms(step.seconds)}"
        caption += f", {first.seconds / step.seconds:.1f} times less"
    if floor is not None:
        caption += f"; reading all weights takes {_ms(floor)}"
    return caption + "."
