"""Introduced in notebook 02. The cache explorer: one row of slots filling, one forward a step.

Draws what cache_steps recorded of the engine; knows no batch of several requests.
"""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import matplotlib
from matplotlib.colors import to_hex
from PIL import ImageFont
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.cache_steps import CacheRun, percent, record_run, tokens
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import BLUE, INK, MAGNITUDE, QUIET, RED, RULE

MAX_SLOTS = 32  # more would not be readable
WIDTH, LEFT, BAND = 900.0, 132.0, 27.0  # the canvas, where slot 0 begins, the height of K and of V
READS = 112.0  # from the top of the K band to the first query's row
MAY_READ = "#bcd7ea"
COLORS = matplotlib.colormaps[MAGNITUDE]
BOLD: dict[str, Any] = {"font_weight": "bold"}
FAINT: dict[str, Any] = {"fill": QUIET}
RIGHT: dict[str, Any] = {"text_anchor": "end"}
MIDDLE: dict[str, Any] = {"text_anchor": "middle"}
DEAF: dict[str, Any] = {"pointer_events": "none"}  # hovering reaches what lies below


class CacheExplorer(Explorer):
    """Watch a row of the cache fill: what runs, what is written, what is read, what comes next."""

    title = "Cache explorer"

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompt: str,
        new_tokens: int = 8,
        layer: int = 0,
        head: int = 0,
    ) -> None:
        at_least_one("new_tokens", new_tokens)
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens
        self.ran: tuple[str, int] | None = None
        wide = widgets.Layout(width="640px")
        text = widgets.Text(prompt, description="prompt", continuous_update=False, layout=wide)

        def knob(name: str, value: int, last: int) -> widgets.BoundedIntText:
            knob = widgets.BoundedIntText(value, min=0, max=last, description=name)
            knob.layout = widgets.Layout(width="170px", margin="2px 12px")
            knob.style.description_width = "initial"
            return knob

        config = model.config
        super().__init__(
            {
                "prompt": text,
                "layer": knob("layer", layer, config.num_hidden_layers - 1),
                "head": knob("K/V head", head, config.num_key_value_heads - 1),
                "chunk": knob("prefill chunk", 0, MAX_SLOTS),
            }
        )

    def rerun(self) -> None:
        """Run the engine when the prompt or the chunk changed; a layer or head is looked up."""
        wanted = self.value("prompt"), self.value("chunk")
        if wanted != self.ran:
            self.run: CacheRun = record_run(
                self.model, self.tokenizer, wanted[0], self.new_tokens, wanted[1], MAX_SLOTS
            )
            self.ran = wanted

    @property
    def num_steps(self) -> int:
        """The empty cache, and one step a forward."""
        return len(self.run.steps) + 1

    def caption(self, step: int) -> str:
        """What ran, where it was written, what it read, and what comes next."""
        return self.run.caption(step)

    def norms(self, step: int) -> tuple[Tensor, Tensor]:
        """Lengths of K and of V in each slot of the chosen layer and head after a step, [n] each.

        Step 0 has none.
        """
        layer, head, forward = self.value("layer"), self.value("head"), self.run.steps[step - 1]
        used = forward.used if step else 0
        return forward.keys[layer, head, :used], forward.values[layer, head, :used]

    @property
    def _ranges(self) -> list[tuple[float, float]]:
        """Least and most of K, and of V: one scale for all steps."""
        return [(float(x.min()), float(x.max())) for x in self.norms(len(self.run.steps))]

    def scene(self, step: int) -> Scene:
        """Slots on top, the rows that read them below, then the next token and the account."""
        run, longest = self.run, max(len(forward.ids) for forward in self.run.steps)
        pitch = min(40.0, (WIDTH - LEFT - 10) / run.num_slots)
        row = min(20.0, max(11.5, 150 / longest))  # the longest forward gets about 150 pixels
        longest_label = max(_width(_fit(label, 10.5, 70), 10.5) for label, _, _ in run.tokens)
        lying = longest_label < pitch - 1
        top = 92.0 if lying else 84 + longest_label
        floor = top + READS + max(row * longest, 34) + 30
        scene = Scene(WIDTH, floor + 140, tip_at=(10, floor + 132))
        scene.hint = "hover over a slot, a row or a bar to read its numbers"
        self._head(scene, step)
        self._slots(scene, step, top, pitch, lying)
        self._reads(scene, step, top + READS, pitch, row)
        if not step or (run.steps[step - 1].kind == "decode" and row * longest > 60):
            self._not_run(scene, step, top + READS + (row + 10 if step else 0), pitch)
        self._next(scene, step, floor)
        self._account(scene, step, floor)
        return scene

    def _head(self, scene: Scene, step: int) -> None:
        run, now = self.run, "nothing has run yet"
        if step:
            forward = run.steps[step - 1]
            now = f"{forward.kind}: {tokens(len(forward.ids))} in this forward"
        scene.text("title", 10, 20, f"step {step} of {len(run.steps)} · {now}", 14, **BOLD)
        layer, head, group = self.value("layer"), self.value("head"), self.model.config.group_size
        first = head * group
        readers = f"heads {first} to {first + group - 1}" if group > 1 else f"head {first}"
        where = f"layer {layer}, K/V head {head}, read by query {readers}"
        scene.text("where", 10, 40, where, 12, **FAINT)
        for i, (name, (low, high)) in enumerate(zip("KV", self._ranges, strict=True)):
            x, y = 708.0, 20.0 + 20 * i
            words = f"norm of {name}: {low:.1f}"
            scene.text(f"{name}.low", x, y, words, 11, **FAINT, **RIGHT)
            for j in range(11):
                scene.rect(f"{name}.{j}", (x + 8 + 11 * j, y - 10, 11, 12), to_hex(COLORS(j / 10)))
            scene.text(f"{name}.high", x + 137, y, f"{high:.1f}", 11, **FAINT)
        scene.text("row", 10, 66, "in the cache", 12, **BOLD)
        scene.rect("key.new", (545, 56, 14, 11), "#ffffff", stroke=INK, stroke_width=3)
        scene.text("key.new1", 567, 66, "written in this step", 11, **FAINT)
        scene.rect("key.free", (716, 56, 16, 12), HATCHED, stroke=RULE)
        scene.text("key.free1", 739, 66, "reserved, not used", 11, **FAINT)

    def _slots(self, scene: Scene, step: int, top: float, pitch: float, lying: bool) -> None:
        """The row of slots: K above V, the tokens above them, positions and slots below."""
        run = self.run
        new = run.steps[step - 1].slots if step else ()
        used = run.steps[step - 1].used if step else 0
        for name, y in {"K": 18.0, "V": BAND + 18, "position": 67.0, "slot": 82.0}.items():
            look = BOLD if name in "KV" else FAINT
            scene.text(f"line.{name}", LEFT - 10, top + y, name, 11, **RIGHT, **look)
        for slot in range(run.num_slots):
            x = LEFT + (slot + 0.5) * pitch
            scene.text(f"slot{slot}", x, top + 82, str(slot), 9.5, **MIDDLE, **FAINT)
            if slot >= used:
                each = f"{run.spec.bytes_per_token:,} bytes in all layers"
                box = (x - pitch / 2 + 1.5, top + 1.5, pitch - 3, 2 * BAND - 3)
                tip = f"slot {slot}: reserved, not written yet; {each}"
                scene.rect(f"free{slot}", box, HATCHED, tip, stroke=RULE)
                continue
            label, position, _ = run.tokens[slot]
            scene.text(f"at{slot}", x, top + 67, str(position), 9.5, **MIDDLE, **FAINT)
            self._cells(scene, step, slot, (x - pitch / 2, top), pitch)
            look = BOLD if slot in new else FAINT
            if lying:
                scene.text(f"token{slot}", x, top - 8, label, 10.5, **MIDDLE, **look)
            else:
                turn = f"rotate(-90 {x + 4:.1f} {top - 6:.1f})"
                words = _fit(label, 10.5, 70)
                scene.text(f"token{slot}", x + 4, top - 6, words, 10.5, transform=turn, **look)
        if new:
            box = (LEFT + new[0] * pitch, top, len(new) * pitch, 2 * BAND)
            scene.rect("new", box, "none", stroke=INK, stroke_width=3.5, **DEAF)

    def _cells(
        self, scene: Scene, step: int, slot: int, corner: tuple[float, float], pitch: float
    ) -> None:
        """K and V of one slot: colour and number are the lengths of the vectors."""
        (x, y), (label, position, wrote) = corner, self.run.tokens[slot]
        k, v = (float(norms[slot]) for norms in self.norms(step))
        tip = (
            f"slot {slot}: “{label}” at position {position}, norm of K {k:.2f}, of V {v:.2f}, "
            f"written in step {wrote} ({self.run.steps[wrote - 1].kind})"
        )
        for band, (value, (low, high)) in enumerate(zip((k, v), self._ranges, strict=True)):
            part = (value - low) / (high - low) if high > low else 0.5
            box = (x + 1.5, y + band * BAND + 1.5, pitch - 3, BAND - 3)
            name = f"{'KV'[band]}{slot}"
            scene.rect(name, box, to_hex(COLORS(part)), tip, class_="te-cell")
            if pitch >= 28:
                ink = "#ffffff" if part < 0.5 else INK
                middle, base = x + pitch / 2, y + (band + 0.5) * BAND + 3.5
                look = {"fill": ink, **MIDDLE, **DEAF}
                scene.text(f"{name}.n", middle, base, f"{value:.1f}", 9.5, **look)

    def _reads(self, scene: Scene, step: int, top: float, pitch: float, row: float) -> None:
        """The mask of this forward: the tokens that run on the left, the slots they read."""
        scene.text("reads", 10, top - 10, "run in this step", 12, **BOLD)
        if not step:
            return
        rule = (
            "row = query, at its position; ✓ it reads the slot above, × it may not: that is later"
        )
        scene.text("rule", LEFT, top - 10, rule, 11, **FAINT)
        forward = self.run.steps[step - 1]
        mask = causal_mask(len(forward.ids), forward.used)
        size = min(11.0, row * 0.85)
        for i, (token, position) in enumerate(zip(forward.ids, forward.positions, strict=True)):
            y, base = top + i * row, top + i * row + row / 2 + size * 0.36
            reads, label = int(mask[i].sum()), self.run.labels[token]
            chip = (10, y + 0.75, LEFT - 44, row - 1.5)
            scene.rect(f"run{i}", chip, "#e5f0f8", stroke=BLUE, rx=3)
            scene.text(f"run{i}.token", 16, base, _fit(label, size, LEFT - 58), size)
            scene.text(f"run{i}.at", LEFT - 8, base, str(position), size, **RIGHT, **FAINT)
            tip = f"query “{label}” at position {position} reads slots 0 to {reads - 1}"
            scene.rect(f"reads{i}", (LEFT, y, reads * pitch, row), MAY_READ, tip, stroke=RULE)
            for slot in range(forward.used):
                x, may = LEFT + (slot + 0.5) * pitch, bool(mask[i, slot])
                mark, ink = ("✓", INK) if may else ("×", "#8a959d")
                scene.text(
                    f"m{i}.{slot}", x, base, mark, max(9.0, size), fill=ink, **MIDDLE, **DEAF
                )

    def _not_run(self, scene: Scene, step: int, top: float, pitch: float) -> None:
        """Where rows are missing: the prompt still waits, or the cache spares the context."""
        waits = sum(len(forward.ids) for forward in self.run.steps if forward.kind == "prefill")
        spared = self.run.steps[step - 1].used - 1 if step else waits
        box = (10.0, top, LEFT - 10 + max(spared * pitch, 300), 32.0)
        scene.rect("not run", box, "none", stroke=QUIET, stroke_dasharray="4 4", rx=4)
        words = "do not run again: their K and V are above" if step else "of the prompt wait"
        scene.text("not run.n", 20, top + 20.5, f"{tokens(spared)} {words}", 11, **FAINT)

    def _next(self, scene: Scene, step: int, top: float) -> None:
        """The best of the next-token distribution, the chosen one marked."""
        best = self.run.steps[step - 1].best if step else ()
        scene.text("next", 10, top, "next token", 12, **BOLD)
        why = "from the logits of the last row" if best else "nothing has run"
        if step and not best:
            why = "not asked for: more of the prompt follows"
        scene.text("next.why", LEFT, top, why, 11, **FAINT)
        for rank, (token, p) in enumerate(best):
            y, label, look = top + 8 + 17 * rank, self.run.labels[token], FAINT if rank else BOLD
            tip = f"next “{label}” (id {token}): probability {p:.4f}"
            scene.text(
                f"best{rank}", LEFT - 8, y + 12, _fit(label, 11, LEFT - 18), 11, **RIGHT, **look
            )
            scene.rect(f"track{rank}", (LEFT, y + 2, 200, 12), "#e3e8ec", tip)
            ink = "#8fb8d6" if rank else BLUE
            scene.rect(f"bar{rank}", (LEFT, y + 2, max(200 * p, 0.5), 12), ink, **DEAF)
            said = percent(p) + ("" if rank else " ◀ chosen")
            scene.text(f"best{rank}.p", LEFT + 208, y + 12, said, 11, **look)

    def _account(self, scene: Scene, step: int, top: float) -> None:
        """Work and memory so far, as bars: tokens run with and without a cache, bytes in use."""
        run, left, width = self.run, 640.0, 180.0
        (used, again), (_, most) = run.tokens_run(step), run.tokens_run(len(run.steps))
        kib = run.spec.bytes_per_token / 1024
        scene.text("account", 490, top, "so far", 12, **BOLD)
        rows = (
            ("tokens run", used / most, BLUE, f"{used}"),
            ("without a cache", again / most, RED, f"{again}"),
            ("cache in use", used / run.num_slots, BLUE, f"{used * kib:.0f} KiB"),
            ("cache reserved", 1.0, HATCHED, f"{run.num_slots * kib:.0f} KiB"),
        )
        for i, (name, part, ink, said) in enumerate(rows):
            y, edge = top + 10 + 22 * i + 8 * (i > 1), RULE if ink == HATCHED else "none"
            scene.text(f"sum{i}", left - 8, y + 12, name, 11, **RIGHT, **FAINT)
            scene.rect(f"sum{i}.bar", (left, y + 1, max(width * part, 0.5), 14), ink, stroke=edge)
            scene.text(f"sum{i}.n", left + width * part + 8, y + 12, said, 11)


@cache
def _font() -> ImageFont.FreeTypeFont:
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / "DejaVuSans-Bold.ttf"), 100)


@lru_cache(10_000)
def _width(label: str, size: float) -> float:
    """Pixels that a label takes at most: it may be bold."""
    return _font().getlength(label) * size / 100


def _fit(label: str, size: float, most: float) -> str:
    """The label, or as much of its beginning as fits into that many pixels."""
    cut = label
    while _width(cut, size) > most:
        cut = cut.removesuffix("…")[:-1] + "…"
    return cut
