"""CPU and GPU of one decode step, and what many requests cost them.

Drawn from figures: totals that were measured, and averages of them. No single launch was recorded,
so none is drawn.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from tutorial_engine.engine.replay import Size
from tutorial_engine.lab.on_gpu import SERVED, GpuServing, GpuStep
from tutorial_engine.viz.parts import BOLD, CENTRE, DEAF, KEY, RIGHT, Sheet, Style
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look, text_width
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.style import BLUE, GREEN, INK, ORANGE, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.words import listed

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
    for part in range(parts):
        x = LEFT + each * part
        tip = f"{step.launches // parts} launches"
        scene.rect(f"{name}.cpu.{part}", (x, y, each, LANE), BLUE, tip, stroke=PAPER)
        scene.rect(f"{name}.gpu.{part}", (x + each - work, low, work, LANE), GREEN, "the GPU works")
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
    one, work = seconds / launches, busy / launches
    scale = (RIGHT_END - LEFT) / ((NEAR + 0.5) * one)
    words = f"from near: {NEAR} launches of average length"
    scene.text("near.title", LEFT, top, words, 12.5, **BOLD)
    y, low = top + 10, top + 10 + LANE + BETWEEN
    for lane, at in (("CPU", y), ("GPU", low)):
        scene.text(f"near.{lane}", LEFT - 12, at + 20, lane, 12.5, **RIGHT)
    scene.rect("near.idle", (LEFT, low, RIGHT_END - LEFT, LANE), HATCHED, stroke=RULE)
    for i in range(NEAR):
        x = LEFT + i * one * scale
        box = (x, y, one * scale, LANE)
        scene.rect(f"near.launch.{i}", box, BLUE, stroke=PAPER)
        scene.inside(f"near.launch.{i}.words", box, f"launch: {_us(one)}", 12, **WHITE)
        box = (x + one * scale, low, work * scale, LANE)
        scene.rect(f"near.kernel.{i}", box, GREEN, f"a kernel: {_us(work)}", stroke=INK)
    middle = LEFT + (one + one / 2 + work / 2) * scale
    _said(scene, "near.idle", middle, low, f"idle: {_us(one - work)}")
    words = f"kernel: {_us(work)}"
    scene.note("near.kernel.words", LEFT + one * scale - 6, low + 20, words, 12, fill=INK, **RIGHT)


def padding_picture(*steps: Sequence[int]) -> Picture:
    """The slots that recorded steps copy, all on one scale: a row for each of some contexts.

    Contexts of one length that stand side by side are drawn as one.
    """
    sizes = [Size.of(len(lens), max(lens)) for lens in steps]
    scale, row = 760 / max(size.longest for size in sizes), 2.2
    scene = Sheet(1000, 60 + sum(size.num_seqs * row + 36 for size in sizes))
    scene.heading("What a recorded step copies", "sizes are exact; the padding may lie at the end")
    marks = {
        "needed": lambda name, box: scene.rect(name, box, GREEN, stroke=INK),
        "copied as well": lambda name, box: scene.rect(name, box, HATCHED, stroke=RULE),
    }
    scene.legend(10, 44, marks)
    y, told = 82.0, []
    for number, (lens, size) in enumerate(zip(steps, sizes, strict=True)):
        words = f"longest context {max(lens)}: {size.num_seqs} rows of {size.longest:,} slots"
        scene.text(f"{number}.size", 10, y - 6, words, 12.5, **BOLD)
        box = (10, y, size.longest * scale, size.num_seqs * row)
        scene.rect(f"{number}.copied", box, HATCHED, stroke=INK)
        at = y
        for i, (length, same) in enumerate(groupby(lens)):
            high = len([*same]) * row
            scene.rect(f"{number}.needed.{i}", (10, at, length * scale, high), GREEN, **DEAF)
            at += high
        y += size.num_seqs * row + 36
        part = sum(lens) / size.num_slots
        told.append(
            f"longest context {max(lens)}: {sum(lens):,} of {size.num_slots:,} copied slots are "
            f"needed, {part:.0%}"
        )
    return scene.picture("; ".join(told).capitalize() + ".", zoom=1.0)


def serving_picture(launches: Mapping[str, int], speeds: Sequence[GpuServing]) -> Picture:
    """Launches of a step by the way that attention is called; tokens a second, two runs each."""
    rows = len(launches) + len(speeds)
    scene = Sheet(1000, 104 + 26 * rows + 30)
    scene.heading("Many requests at once")
    scene.note("served", 10, 42, SERVED, 12)
    start, longest, most = 330.0, 440.0, max(launches.values())
    scene.text("launches", 10, 72, "launches of one step (counted)", 12.5, **BOLD)
    scene.note("launches.better", start, 72, "← shorter is better", 12)
    y = 80.0
    for i, (what, count) in enumerate(launches.items()):
        scene.text(f"way.{i}", 26, y + 16, what, 12)
        wide = longest * count / most
        scene.rect(f"way.{i}.bar", (start, y + 3, max(wide, 1), 17), BLUE, stroke=INK)
        scene.text(f"way.{i}.count", start + wide + 6, y + 16, f"{count:,}", 12, **BOLD)
        y += 26
    y += 24
    scene.text("speeds", 10, y - 6, "wanted tokens a second (measured)", 12.5, **BOLD)
    scene.note("speeds.better", start, y - 6, "longer is better →", 12)
    fastest = max(one.second for one in speeds)
    for i, one in enumerate(speeds):
        scene.text(f"speed.{i}", 26, y + 16, one.what, 12)
        for run, value, fill in (("second", one.second, GREEN), ("first", one.first, ORANGE)):
            height = 17.0 if run == "second" else 7.0
            box = (start, y + 3 + (17 - height) / 2, longest * value / fastest, height)
            scene.rect(f"speed.{i}.{run}", box, fill, f"{run} run: {value:,.0f}", stroke=INK)
        words = f"{one.first:,.0f} / {one.second:,.0f}"
        if one.least is not None:
            words += f" (best of several; lowest {one.least[0]:,.0f} / {one.least[1]:,.0f})"
        end = start + longest * one.second / fastest
        scene.text(f"speed.{i}.words", end + 6, y + 16, words, 12)
        y += 26
    marks = {
        "first run": lambda name, box: scene.rect(
            name, (box[0], box[1] + 4, 18, 7), ORANGE, stroke=INK
        ),
        "second run": lambda name, box: scene.rect(name, box, GREEN, stroke=INK),
    }
    scene.legend(start, y + 18, marks)
    least, best = min(launches.values()), max(speeds, key=lambda one: one.second)
    times = f"{best.second / speeds[0].second:.1f}×"
    caption = (
        f"A step has {most:,} launches with a call for each request, {least:,} with one for all; "
        f"the best second run has {best.second:,.0f} wanted tokens a second ({best.what}), "
        f"{times} as many as that of “{speeds[0].what}”."
    )
    return scene.picture(caption, zoom=1.0)


def end_to_end_picture(
    tables: Sequence[Sequence[int]], lens: Sequence[int], block_size: int
) -> Picture:
    """A few sequences in blocks of a pool; below, their slots end to end, and `cu_seqlens`."""
    num_blocks = max(block for table in tables for block in table) + 1
    wide = min(34.0, 960 / (num_blocks * block_size), 960 / (sum(lens) + 1))
    scene = Sheet(1000, 216)
    scene.heading("From blocks to one list")
    scene.note("pool", 10, 52, f"the pool: blocks of {block_size}; a number is a position")
    slots = [
        (table[p // block_size] * block_size + p % block_size, s, p)
        for s, (table, length) in enumerate(zip(tables, lens, strict=True))
        for p in range(length)
    ]
    held = {slot: (s, p) for slot, s, p in slots}
    for slot in range(num_blocks * block_size):
        x = 10 + slot * wide + slot // block_size * 6
        box = (x, 76, wide - 2, 26)
        s, p = held.get(slot, (0, ""))
        scene.cell(f"pool.{slot}", box, "solid" if slot in held else "free", look(s))
        scene.inside(f"pool.{slot}.position", box, str(p), 12)
        if slot % block_size == 0:
            scene.note(f"block.{slot}", x, 71, f"block {slot // block_size}")
    scene.note("gathered", 10, 134, "end to end: a number is a slot")
    for i, (slot, s, _) in enumerate(slots):
        box = (10 + i * wide, 142, wide - 2, 26)
        scene.cell(f"list.{i}", box, "solid", look(s))
        scene.inside(f"list.{i}.slot", box, str(slot), 12)
    ends = [sum(lens[:n]) for n in range(len(lens) + 1)]
    for n, end in enumerate(ends):
        x = 9 + end * wide
        scene.add(f"end.{n}", "path", d=f"M{x:.1f} 138V182", stroke=INK, stroke_width=1.6, **DEAF)
        scene.text(f"end.{n}.words", x, 197, str(end), 12, **(BOLD | CENTRE))
    scene.text("ends", 24 + ends[-1] * wide, 197, "cu_seqlens", 12, **BOLD)
    caption = (
        f"{len(lens)} sequences of {listed(map(str, lens))} tokens lie end to end in one list of "
        f"{ends[-1]} slots, and cu_seqlens is {', '.join(map(str, ends))}."
    )
    return scene.picture(caption, zoom=1.0)


Held = tuple[Sequence[int], Mapping[str, tuple[int, int]]]  # numbers; whose: begin and how many


def gpu_memory_picture(times: Mapping[str, Held], reads: Mapping[str, tuple[int, int]]) -> Picture:
    """Numbers at the places of a GPU's memory at some times, whose they are, and what is read."""
    wide, tall = 44.0, 72.0
    scene = Sheet(1000, 50 + tall * len(times) + 16)
    scene.heading("The places that the recording reads", "every place holds a number")
    colours: dict[str, int] = {}
    for row, (when, (numbers, owners)) in enumerate(times.items()):
        y = 50 + tall * row
        scene.text(f"{row}.when", 10, y + 32, when, 12.5, **BOLD)
        for name, (begin, count) in owners.items():
            one = look(colours.setdefault(name, len(colours)))
            scene.note(f"{row}.{name}", 240 + begin * wide, y + 8, name, 12)
            for place in range(begin, begin + count):
                box = (240 + place * wide, y + 14, wide - 3, 28)
                scene.cell(f"{row}.{place}", box, "solid", one)
                scene.inside(f"{row}.{place}.number", box, str(numbers[place]), 12.5)
    y = 50 + tall * len(times) - 20
    scene.note("reads", 10, y + 22, "the recording reads here:", 12)
    for name, (begin, count) in reads.items():
        x, end = 240 + begin * wide, 237 + (begin + count) * wide
        scene.add(
            f"reads.{name}", "path", d=f"M{x} {y}v6H{end}v-6", fill="none", stroke=INK, **DEAF
        )
        scene.note(f"reads.{name}.words", (x + end) / 2, y + 22, name, 12, **CENTRE)
    where = (f"{name} at places {a} to {a + n - 1}" for name, (a, n) in reads.items())
    there = (f"{when}, {listed(owners)} lie there" for when, (_, owners) in times.items())
    caption = f"The recording reads {listed(where)}; {'; '.join(there)}."
    return scene.picture(caption, zoom=1.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.{2 if seconds < 1e-3 else 1}f} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def _caption(steps: Sequence[GpuStep], floor: float | None) -> str:
    first, *others = steps
    assert first.launches is not None and first.busy is not None, "it was looked at"
    one, work = first.seconds / first.launches, first.busy / first.launches
    idle = 1 - first.busy / first.seconds
    told = (
        f"From these figures: {first.launches} launches in {_ms(first.seconds)} are one in "
        f"{_us(one)}; a kernel runs for {_us(work)} on average, so the GPU is idle for {idle:.0%} "
        "of the step"
    )
    for step in others:
        told += f"; “{step.what}” takes {_ms(step.seconds)}"
        told += f", {first.seconds / step.seconds:.1f} times less"
    if floor is not None:
        told += f"; reading all weights takes {_ms(floor)}"
    return told + "."
