"""The block-size dial by hand: turn it, and see the whole pool.

At each position the real engine runs all requests over the same slots; what was run is kept.
"""

from collections.abc import Sequence

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.lab.dial import Dial, DialPoint, Position
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, MARGIN, RIGHT, WIDTH, Sheet, Style
from tutorial_engine.viz.drawing.pool import (
    MAX_SLOTS,
    USED,
    draw_key,
    draw_names,
    draw_pool,
    looks_of,
    strip_height,
)
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import QUIET
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.words import counted

MAX_PROMPTS, MAX_ROW, BUDGET = 12, 128, 32
GAP = 0.02  # virtual seconds from one request to the next: about two steps
SIDE, CHART, TALL = 560.0, 500.0, 118.0  # where the table begins; width and height of the chart
NAMES, LINE = 124.0, 17.0  # of the table: width of the facts' names, height of a line
FACTS = {  # line of the table -> what it says of a point
    "ms until all done": lambda p: f"{p.milliseconds:.0f}",
    "tokens run": lambda p: str(p.tokens_run),
    "tokens found": lambda p: str(p.tokens_found),
    "waste, mean": lambda p: f"{p.mean_waste:.1f}",
    "waste, peak": lambda p: str(p.peak_waste),
    "table entries": lambda p: str(p.total_entries),
    "KiB gathered": lambda p: f"{p.bytes_gathered / 1024:.0f}",
    "at once, most": lambda p: str(p.most_running),
    "preemptions": lambda p: str(p.preemptions),
    "tokens as alone": lambda p: "✔" if p.tokens_equal else "✘",
}


class DialExplorer(Explorer):
    """Turn the block size from one cell per token to a whole row, over the same slots.

    `prompts` become the requests A, B, ..., one every two steps or so. The pool at a step, slots
    over all steps, and the counts of every position that was visited. ValueError for what does not
    fit.
    """

    title = "Block-size dial"
    zoom = 1.0
    stands = "same"  # so that positions are compared at the same step

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int = 12,
        num_slots: int = 128,
        max_len: int = 32,
    ) -> None:
        if not 1 <= len(prompts) <= MAX_PROMPTS or max_len > MAX_ROW or num_slots > MAX_SLOTS:
            raise ValueError(
                f"give 1 to {MAX_PROMPTS} prompts, max_len up to {MAX_ROW} and num_slots up to "
                f"{MAX_SLOTS}; got {len(prompts)}, {max_len}, {num_slots}"
            )
        params = SamplingParams(max_tokens=new_tokens)
        arrivals = [
            Arrival(GAP * i, prompt, params, chr(ord("A") + i)) for i, prompt in enumerate(prompts)
        ]
        self.dial = Dial(model, arrivals, num_slots, max_len, budget=BUDGET, tokenizer=tokenizer)
        self.points: dict[Position, DialPoint] = {}  # those visited
        sizes = [2**i for i in range(max_len.bit_length()) if not max_len % 2**i]
        positions: list[Position] = [CELLS, *(s for s in sizes if s < max_len), ROWS]
        slider = widgets.SelectionSlider(
            options=[(str(position), position) for position in positions],
            value=ROWS,
            description="block size",
            continuous_update=False,  # each position is a run of the engine
            layout=widgets.Layout(width="420px"),
        )
        super().__init__({"block_size": slider})

    def rerun(self) -> int:
        """Run the engine at this position, unless it was here before."""
        position = self.value("block_size")
        if position not in self.points:
            self.points[position] = self.dial.at(position)
        self.point = self.points[position]
        self.looks = looks_of([self.point])
        return self.point.num_steps

    def scene(self, step: int) -> Scene:
        """The pool on top; slots over time and the table of counts below it."""
        point, now = self.point, self.point.snapshots[step]
        below = 64 + strip_height(point.pool, 64)
        height = below + max(TALL + 58, 30 + LINE * len(FACTS))
        sheet = Sheet(WIDTH, height + 22, (MARGIN, height + 12))
        sheet.hint = "hover over a slot to read whose it is"
        title = f"step {step} of {self.num_steps - 1} · {point.name}"
        sheet.text("title", MARGIN, 22, title, 15, **BOLD)
        draw_key(sheet, 22)
        draw_names(sheet, self.looks, 48, set(now.entries))
        draw_pool(sheet, point.name, now, self.looks, 64, 64)
        self._chart(sheet, step, below)
        self._table(sheet, below)
        return sheet

    def caption(self, step: int) -> str:
        """Whose slots, now and over the whole run, and whether the tokens are right."""
        point, now = self.point, self.point.snapshots[step]
        usage, running = now.usage, counted(len(now.running), "request")
        shared = sum(len(who) > 1 for who in now.tokens.values())
        same = "those" if point.tokens_equal else "NOT those"
        return (
            f"Step {step} of {self.num_steps - 1}, {point.name}: {running} "
            f"run, {usage.used} of {point.pool.num_slots} slots have a "
            f"token ({shared} for several requests), {usage.reserved} are reserved without one, "
            f"{usage.free} free. The whole run: {point.milliseconds:.0f} ms on the engine's clock, "
            f"{point.tokens_run} tokens run, {point.tokens_found} found, waste "
            f"{point.mean_waste:.1f} (peak {point.peak_waste}), at most {point.total_entries} "
            f"table entries and {point.most_running} requests at once, "
            f"{point.bytes_gathered / 1024:.0f} KiB gathered, {point.preemptions} preemptions; the "
            f"tokens are {same} of each request alone."
        )

    def _chart(self, sheet: Sheet, now: int, top: float) -> None:
        """Slots by step: used, reserved without a token, free; the cursor at this step."""
        slots, n = self.point.pool.num_slots, self.num_steps
        wide, left, floor = min(CHART / n, 24.0), 46.0, top + 22 + TALL
        title = "slots in each step (grey: with a token)"
        sheet.text("chart", MARGIN, top + 12, title, 12.5, **BOLD)
        for count in (0, slots):
            y = floor - TALL * count / slots + 4
            sheet.note(f"chart.{count}", left - 6, y, str(count), 10, **RIGHT)
        sheet.cell("chart.pool", (left, floor - TALL, wide * n, TALL), "free", rx=0)
        for step, snapshot in enumerate(self.point.snapshots):
            usage, x = snapshot.usage, left + wide * step
            used, reserved = (TALL * count / slots for count in (usage.used, usage.reserved))
            tip = f"step {step}: {usage.used} used, {usage.reserved} reserved, {usage.free} free"
            sheet.rect(f"chart.{step}.used", (x, floor - used, wide - 1, used), USED, tip)
            if usage.reserved:
                box = (x, floor - used - reserved, wide - 1, reserved)
                edge: Style = {"stroke": QUIET, "rx": 0}
                sheet.cell(f"chart.{step}.reserved", box, "reserved", None, tip, **edge)
        box = (left + wide * now - 1.5, floor - TALL - 3, wide + 2, TALL + 6)
        sheet.outline("cursor", box, rx=2, stroke_width=2.2)
        x = min(max(left + wide * (now + 0.5), 68.0), left + wide * n)
        sheet.text("chart.now", x, floor + 17, f"step {now}", 11, **CENTRE, **BOLD)

    def _table(self, sheet: Sheet, top: float) -> None:
        """The counts of all positions that were visited, in the order of the dial."""
        sheet.text("table", SIDE, top + 12, "whole run, positions visited", 12.5, **BOLD)
        options = [value for _, value in self.parameters["block_size"].options]
        visited = [self.points[value] for value in options if value in self.points]
        head, first = top + 33, top + 49  # baselines of the positions, and of the first fact
        for line, name in enumerate(FACTS):
            sheet.note(f"fact{line}", SIDE, first + LINE * line, name)
        pitch = min(52.0, (WIDTH - SIDE - NAMES) / len(visited))
        for i, point in enumerate(visited):
            x, style = SIDE + NAMES + pitch * (i + 1) - 4, dict(RIGHT)
            if point is self.point:
                box = (x - pitch + 6, top + 20, pitch - 1, 36 + LINE * (len(FACTS) - 1))
                sheet.outline("table.here", box, rx=3, stroke_width=1.6)
                style |= BOLD
            sheet.text(f"head.{i}", x, head, str(point.position), 10.5, **style)
            for line, fact in enumerate(FACTS.values()):
                y = first + LINE * line
                sheet.text(f"fact{line}.{i}", x, y, fact(point), 10.5, **style)
