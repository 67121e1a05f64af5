"""Introduced in notebook 04. The block-size dial by hand: turn it, and see the whole pool.

At each position the real engine runs all requests over the same slots; what was run is kept.
"""

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.checks import at_least_one
from tutorial_engine.lab.dial import Dial, DialPoint, Position
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.pool_scene import (
    MAX_SLOTS,
    USED,
    WIDTH,
    draw_key,
    draw_names,
    draw_pool,
    looks_of,
    strip_height,
)
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE

MAX_PROMPTS, MAX_NEW, MAX_ROW = 12, 64, 128
GAP = 0.02  # virtual seconds from one request to the next: about two steps
SIDE, CHART, TALL = 560.0, 500.0, 118.0  # where the table begins; width and height of the chart
BOLD: dict[str, Any] = {"font_weight": "bold"}
FACTS = {  # line of the table -> what it says of a point
    "slots of a unit": lambda p: str(p.pool.unit),
    "waste, mean": lambda p: f"{p.mean_waste:.1f}",
    "waste, peak": lambda p: str(p.peak_waste),
    "table entries": lambda p: str(p.total_entries),
    "tokens found": lambda p: str(p.tokens_found),
    "KiB copied / step": lambda p: f"{p.bytes_gathered_per_step / 1024:.0f}",
    "at once, most": lambda p: str(p.most_running),
    "preemptions": lambda p: str(p.preemptions),
    "steps": lambda p: str(p.num_steps),
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

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int | Sequence[int] = 12,
        num_slots: int = 128,
        max_len: int = 32,
        budget: int = 32,
        block_size: Position = ROWS,
    ) -> None:
        if not 1 <= len(prompts) <= MAX_PROMPTS or max_len > MAX_ROW or num_slots > MAX_SLOTS:
            raise ValueError(
                f"give 1 to {MAX_PROMPTS} prompts, max_len up to {MAX_ROW} and num_slots up to "
                f"{MAX_SLOTS}; got {len(prompts)}, {max_len}, {num_slots}"
            )
        self.dial = Dial(
            model,
            _arrivals(prompts, new_tokens),
            num_slots,
            max_len,
            budget=budget,
            tokenizer=tokenizer,
        )
        self.points: dict[Position, DialPoint] = {}  # those visited
        sizes = [2**i for i in range(max_len.bit_length()) if not max_len % 2**i]
        positions: list[Position] = [CELLS, *(s for s in sizes if s < max_len), ROWS]
        if block_size not in positions:
            raise ValueError(f"block_size must be one of {positions}, got {block_size!r}")
        slider = widgets.SelectionSlider(
            options=[(str(position), position) for position in positions],
            value=block_size,
            description="block size",
            continuous_update=False,  # each position is a run of the engine
            layout=widgets.Layout(width="420px"),
        )
        super().__init__({"block_size": slider})

    def rerun(self) -> None:
        """Run the engine at this position, unless it was here before."""
        position = self.value("block_size")
        if position not in self.points:
            self.points[position] = self.dial.at(position)
        self.point = self.points[position]
        self.looks = looks_of([self.point])

    @property
    def num_steps(self) -> int:
        """One step a forward."""
        return self.point.num_steps

    @property
    def start_step(self) -> int:
        """Where it stood, or the last step: so that positions are compared at the same step."""
        return self.step

    def scene(self, step: int) -> Scene:
        """The pool on top; slots over time and the table of counts below it."""
        point, moment = self.point, self.point.snapshots[step]
        strip = strip_height(point.pool, 64)
        below = 64 + strip
        height = below + max(TALL + 58, 30 + 17 * len(FACTS))
        scene = Scene(WIDTH, height + 22, tip_at=(10, height + 12))
        scene.hint = "hover over a slot to read whose it is"
        head = f"step {step} of 0–{self.num_steps - 1} · {point.name}"
        scene.text("title", 10, 22, head, 15, **BOLD)
        draw_key(scene, 22)
        draw_names(scene, self.looks, 48, set(moment.entries))
        draw_pool(scene, point.name, moment, self.looks, 64, 64)
        self._chart(scene, step, below)
        self._table(scene, below)
        return scene

    def caption(self, step: int) -> str:
        """Whose slots, now and over the whole run, and whether the tokens are right."""
        point, moment = self.point, self.point.snapshots[step]
        usage, count = moment.usage, len(moment.running)
        shared = sum(len(who) > 1 for who in moment.tokens.values())
        same = "those" if point.tokens_equal else "NOT those"
        return (
            f"Step {step} of 0–{self.num_steps - 1}, {point.name}: {count} "
            f"request{'s' * (count != 1)} run, {usage.used} of {point.pool.num_slots} slots have a "
            f"token ({shared} for several requests), {usage.reserved} are reserved without one, "
            f"{usage.free} free. In all steps: waste {point.mean_waste:.1f} (peak "
            f"{point.peak_waste}), at most {point.total_entries} table entries and "
            f"{point.most_running} requests at once, {point.tokens_found} tokens found, "
            f"{point.preemptions} preemptions; the tokens are {same} of each request alone."
        )

    def _chart(self, scene: Scene, now: int, top: float) -> None:
        """Slots by step: used, reserved without a token, free; the cursor at this step."""
        slots, n = self.point.pool.num_slots, self.num_steps
        wide, left, floor = min(CHART / n, 24.0), 46.0, top + 22 + TALL
        scene.text("chart", 10, top + 12, "slots in each step (grey: with a token)", 12.5, **BOLD)
        for number in (0, slots):
            y = floor - TALL * number / slots
            style: dict[str, Any] = {"text_anchor": "end", "fill": QUIET}
            scene.text(f"chart.{number}", left - 6, y + 4, str(number), 10, **style)
        scene.rect("chart.pool", (left, floor - TALL, wide * n, TALL), PAPER, stroke=RULE)
        for step, moment in enumerate(self.point.snapshots):
            usage, x = moment.usage, left + wide * step
            used, held = (TALL * k / slots for k in (usage.used, usage.used + usage.reserved))
            tip = f"step {step}: {usage.used} used, {usage.reserved} reserved, {usage.free} free"
            scene.rect(f"chart.{step}.used", (x, floor - used, wide - 1, used), USED, tip)
            if usage.reserved:
                box = (x, floor - held, wide - 1, held - used)
                scene.rect(f"chart.{step}.reserved", box, HATCHED, tip, stroke=QUIET)
        box = (left + wide * now - 1.5, floor - TALL - 3, wide + 2, TALL + 6)
        scene.rect("cursor", box, "none", rx=2, stroke=INK, stroke_width=2.2, pointer_events="none")
        x = min(max(left + wide * (now + 0.5), 68.0), left + wide * n)
        scene.text("chart.now", x, floor + 17, f"step {now}", 11, text_anchor="middle", **BOLD)

    def _table(self, scene: Scene, top: float) -> None:
        """The counts of all positions that were visited, in the order of the dial."""
        scene.text("table", SIDE, top + 12, "whole run, positions visited", 12.5, **BOLD)
        options = [value for _, value in self.parameters["block_size"].options]
        visited = [self.points[value] for value in options if value in self.points]
        for line, name in enumerate(FACTS):
            scene.text(f"fact{line}", SIDE, top + 49 + 17 * line, name, 11, fill=QUIET)
        pitch = min(52.0, (WIDTH - SIDE - 124) / len(visited))
        for i, point in enumerate(visited):
            x, here = SIDE + 124 + pitch * (i + 1) - 4, point is self.point
            style: dict[str, Any] = {"text_anchor": "end", **(BOLD if here else {})}
            if here:
                box = (x - pitch + 6, top + 20, pitch - 1, 36 + 17.0 * (len(FACTS) - 1))
                scene.rect("table.here", box, "none", rx=3, stroke=INK, stroke_width=1.6)
            scene.text(f"head.{i}", x, top + 33, str(point.position), 10.5, **style)
            for line, fact in enumerate(FACTS.values()):
                scene.text(f"fact{line}.{i}", x, top + 49 + 17 * line, fact(point), 10.5, **style)


def _arrivals(prompts: Sequence[str], new_tokens: int | Sequence[int]) -> list[Arrival]:
    """Requests A, B, ... with so many new tokens each."""
    each = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many new_tokens, got {len(each)}")
    for number in each:
        at_least_one("new_tokens", number)
    if max(each) > MAX_NEW:
        raise ValueError(f"new_tokens may be {MAX_NEW} at most, got {max(each)}")
    return [
        Arrival(GAP * i, prompt, SamplingParams(max_tokens=number), chr(ord("A") + i))
        for i, (prompt, number) in enumerate(zip(prompts, each, strict=True))
    ]
