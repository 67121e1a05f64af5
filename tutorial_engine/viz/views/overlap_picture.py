"""Planning and forwards over time: one after the other, and overlapping."""

from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, QUIET, RIGHT, WIDTH, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look

LEFT, TALL, PITCH = 60.0, 26.0, 38.0  # where time begins; height of a line, and to the next


def begins(plan: int, forward: int, steps: int, ahead: int) -> list[tuple[int, int]]:
    """When each plan and forward begins; a plan waits for the tokens of `ahead` + 1 steps ago."""
    found: list[tuple[int, int]] = []
    for i in range(steps):
        at, gpu = (found[-1][0] + plan, found[-1][1] + forward) if found else (0, 0)
        at = max(at, found[i - 1 - ahead][1] + forward) if i > ahead else at
        found.append((at, max(at + plan, gpu)))
    return found


def overlap_picture(plan: int, forward: int, steps: int) -> Picture:
    """So many steps without and with asynchronous scheduling, if each takes so many ms."""
    runs = [begins(plan, forward, steps, ahead) for ahead in range(2)]
    ends = [run[-1][1] + forward for run in runs]
    sheet, wide = Sheet(WIDTH, 266), (WIDTH - LEFT - MARGIN) / max(ends)
    each = f"{plan} ms for a plan, {forward} ms for a forward"
    sheet.heading("When is a step planned?", each)
    for ahead, (run, end) in enumerate(zip(runs, ends, strict=True)):
        top, case = 58.0 + 104 * ahead, ("one after the other", "asynchronous")[ahead]
        sheet.text(case, MARGIN, top - 10, f"{case}: {end} ms", 12, **BOLD)
        idle = (LEFT + plan * wide, top + PITCH, (end - plan) * wide, TALL)
        sheet.cell(f"idle.{ahead}", idle, "reserved")
        for line, (who, what, long) in enumerate((("CPU", "plan", plan), ("GPU", "step", forward))):
            y = top + PITCH * line
            sheet.note(f"{case}.{who}", LEFT - 8, y + 17, who, 12, **RIGHT)
            for i, both in enumerate(run):
                box = (LEFT + both[line] * wide, y, long * wide, TALL)
                sheet.cell(f"{what}.{ahead}.{i}", box, "cached", look(line), "", f"{what} {i}")
        for (_, gpu), (at, _) in zip(run, run[1 + ahead :], strict=False):
            to = (LEFT + (gpu + forward) * wide, top + PITCH), (LEFT + at * wide, top + TALL)
            sheet.arrow(f"tokens.{ahead}.{at}", to, QUIET)
    sheet.legend(MARGIN, 258, {"the GPU waits": sheet.sample("reserved")})
    return sheet.picture(
        (
            f"One after the other {steps} steps take {ends[0]} ms, with "
            f"asynchronous scheduling {ends[1]} ms. Arrows: the tokens "
            "of a step reach the CPU."
        ),
        1.0,
    )
