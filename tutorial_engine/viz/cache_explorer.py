"""Introduced in notebook 02. The cache explorer: one row of slots filling, one forward a step.

Draws what cache_steps recorded of the engine; knows no batch of several requests.
"""

from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.cache_steps import CacheRun, CacheStep, record_run
from tutorial_engine.viz.explorer import Explorer, number, text
from tutorial_engine.viz.parts import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    MARGIN,
    RIGHT,
    Grid,
    Sheet,
    part_of,
    shade,
)
from tutorial_engine.viz.request_look import cut_to, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, INK, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.words import percent, tokens

MAX_SLOTS = 32  # more would not be readable
WIDTH, LEFT, BAND = 900.0, 132.0, 27.0  # the canvas, where slot 0 begins, the height of K and of V
READS = 112.0  # from the top of the K band to the first query's row
LABEL = 70.0  # the most that the label of a token takes
SMALL = 9.5  # letters of numbers in and below slots
MAY_READ, RUNS, LESS_LIKELY = "#bcd7ea", "#e5f0f8", "#8fb8d6"


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
        config = model.config
        super().__init__(
            {
                "prompt": text("prompt", prompt),
                "layer": number("layer", layer, 0, config.num_hidden_layers - 1),
                "head": number("K/V head", head, 0, config.num_key_value_heads - 1),
                "chunk": number("prefill chunk", 0, 0, MAX_SLOTS),
            }
        )

    def rerun(self) -> int:
        """Run the engine when the prompt or the chunk changed. Step 0 is the empty cache."""
        wanted = self.value("prompt"), self.value("chunk")
        if wanted != self.ran:
            self.run: CacheRun = record_run(
                self.model, self.tokenizer, wanted[0], self.new_tokens, wanted[1], MAX_SLOTS
            )
            self.ran = wanted
            self._lay_out()
        last = len(self.run.steps)
        self.ends = [(float(x.min()), float(x.max())) for x in self.norms(last)]  # of all steps
        return last + 1

    def _lay_out(self) -> None:
        """Places that are the same at every step."""
        labels = [cut_to(label, LABEL, 10.5, bold=True, keep=True) for label, *_ in self.run.tokens]
        widest = max(text_width(label, 10.5, bold=True) for label in labels)
        pitch = min(40.0, (WIDTH - LEFT - MARGIN) / self.run.num_slots)
        self.labels, self.is_lying = labels, widest < pitch - 1
        top = 92.0 if self.is_lying else 84 + widest
        self.slots = Grid(LEFT, top, pitch, 2 * BAND)
        self.longest = max(len(forward.ids) for forward in self.run.steps)
        line = min(20.0, max(11.5, 150 / self.longest))  # the longest forward: about 150 pixels
        self.queries = Grid(MARGIN, top + READS, LEFT - 34, line, 1, (MARGIN, 1.5))
        self.floor = top + READS + max(line * self.longest, 34) + 30

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

    def scene(self, step: int) -> Scene:
        """Slots on top, the rows that read them below, then the next token and the account."""
        forward = self.run.steps[step - 1] if step else None
        scene = Sheet(WIDTH, self.floor + 140, tip_at=(MARGIN, self.floor + 132))
        scene.hint = "hover over a slot, a row or a bar to read its numbers"
        now = f"{forward.kind}: {tokens(len(forward.ids))} in this forward" if forward else ""
        title = f"step {step} of {len(self.run.steps)} · {now or 'nothing has run yet'}"
        scene.heading(title, size=14)
        self._key(scene)
        self._slots(scene, step)
        self._reads(scene, forward)
        if forward is None or (forward.kind == "decode" and self.queries.height(self.longest) > 60):
            self._not_run(scene, forward)
        self._next(scene, forward)
        self._account(scene, step)
        return scene

    def _key(self, scene: Sheet) -> None:
        """Whose K and V these are, and what colours and outlines mean."""
        layer, head, group = self.value("layer"), self.value("head"), self.model.config.group_size
        first = head * group
        readers = f"heads {first} to {first + group - 1}" if group > 1 else f"head {first}"
        where = f"layer {layer}, K/V head {head}, read by query {readers}"
        scene.note("where", MARGIN, 40, where, 12)
        for i, (name, (low, high)) in enumerate(zip("KV", self.ends, strict=True)):
            x, y = 708.0, 22.0 + 20 * i
            scene.note(f"{name}.low", x, y, f"norm of {name}: {low:.1f}", **RIGHT)
            scene.colour_scale(f"{name}.scale", (x + 8, y - 10, 121, 12), 11)
            scene.note(f"{name}.high", x + 137, y, f"{high:.1f}")
        scene.text("row", MARGIN, 66, "in the cache", 12, **BOLD)
        scene.outline("key.new", (545, 56, 14, 11))
        scene.note("key.new.words", 567, 66, "written in this step")
        scene.cell("key.free", (716, 56, 16, 12), "reserved", rx=0)
        scene.note("key.free.words", 739, 66, "reserved, not used")

    def _slots(self, scene: Sheet, step: int) -> None:
        """The row of slots: K above V, the tokens above them, positions and slots below."""
        run, top = self.run, self.slots.y
        new = run.steps[step - 1].slots if step else ()
        used = run.steps[step - 1].used if step else 0
        for name, y in {"K": 18.0, "V": BAND + 18, "position": 67.0, "slot": 82.0}.items():
            look = BOLD if name in "KV" else FAINT
            scene.text(f"line.{name}", LEFT - 10, top + y, name, 11, **RIGHT, **look)
        for slot in range(run.num_slots):
            x, y, w, h = self.slots.box(slot)
            middle, look = x + w / 2, BOLD if slot in new else FAINT
            scene.note(f"slot{slot}", middle, top + 82, str(slot), SMALL, **CENTRE)
            if slot >= used:
                each = f"{run.spec.bytes_per_token:,} bytes in all layers"
                tip = f"slot {slot}: reserved, not written yet; {each}"
                box = (x + 1.5, y + 1.5, w - 3, h - 3)
                scene.cell(f"free{slot}", box, "reserved", tip=tip, rx=0)
                continue
            position = str(run.tokens[slot][1])
            scene.note(f"at{slot}", middle, top + 67, position, SMALL, **CENTRE)
            self._key_and_value(scene, step, slot)
            place: dict = {"x": middle, "y": top - 8, **CENTRE}
            if not self.is_lying:
                turn = f"rotate(-90 {middle + 4:.1f} {top - 6:.1f})"
                place = {"x": middle + 4, "y": top - 6, "transform": turn}
            scene.text(f"token{slot}", words=self.labels[slot], size=10.5, **place, **look)
        if new:
            scene.outline("new", self.slots.box(new[0], len(new)), stroke_width=3.5)

    def _key_and_value(self, scene: Sheet, step: int, slot: int) -> None:
        """K and V of one slot: colour and number are the lengths of the vectors."""
        (x, y, w, _), (label, position, wrote) = self.slots.box(slot), self.run.tokens[slot]
        k, v = (float(norms[slot]) for norms in self.norms(step))
        tip = (
            f"slot {slot}: “{label}” at position {position}, norm of K {k:.2f}, of V {v:.2f}, "
            f"written in step {wrote} ({self.run.steps[wrote - 1].kind})"
        )
        for i, (name, value) in enumerate((("K", k), ("V", v))):
            part = part_of(value, self.ends[i])
            box = (x + 1.5, y + i * BAND + 1.5, w - 3, BAND - 3)
            scene.rect(f"{name}{slot}", box, shade(part), tip, class_="te-cell")
            if w >= 28:
                ink = PAPER if part < 0.5 else INK
                scene.inside(f"{name}{slot}.n", box, f"{value:.1f}", SMALL, fill=ink)

    def _reads(self, scene: Sheet, forward: CacheStep | None) -> None:
        """The mask of this forward: the tokens that run on the left, the slots they read."""
        lines, pitch = self.queries, self.slots.wide
        scene.text("reads", MARGIN, lines.y - 10, "run in this step", 12, **BOLD)
        if forward is None:
            return
        rule = (
            "row = query, at its position; ✓ it reads the slot above, × it may not: that is later"
        )
        scene.note("rule", LEFT, lines.y - 10, rule)
        mask = causal_mask(len(forward.ids), forward.used).tolist()
        size = min(11.0, lines.tall * 0.85)
        for i, (token, position) in enumerate(zip(forward.ids, forward.positions, strict=True)):
            x, y, w, h = lines.box(i)
            base, reads, label = (
                y + lines.tall / 2 + size * 0.36,
                sum(mask[i]),
                self.run.labels[token],
            )
            scene.rect(f"run{i}", (x, y + 0.75, w, h), RUNS, stroke=BLUE, rx=3)
            words = cut_to(label, w - 14, size, bold=True, keep=True)
            scene.text(f"run{i}.token", x + 6, base, words, size)
            scene.note(f"run{i}.at", LEFT - 8, base, str(position), size, **RIGHT)
            tip = f"query “{label}” at position {position} reads slots 0 to {reads - 1}"
            box = (LEFT, y, reads * pitch, lines.tall)
            scene.rect(f"reads{i}", box, MAY_READ, tip, stroke=RULE)
            for slot in range(forward.used):
                mark, ink = ("✓", INK) if mask[i][slot] else ("×", "#8a959d")
                style = {"fill": ink, **CENTRE, **DEAF}
                at = LEFT + (slot + 0.5) * pitch
                scene.text(f"m{i}.{slot}", at, base, mark, max(9.0, size), **style)

    def _not_run(self, scene: Sheet, forward: CacheStep | None) -> None:
        """Where rows are missing: the prompt still waits, or the cache spares the context."""
        if forward is None:
            top, words = self.queries.y, "of the prompt wait"
            count = sum(len(step.ids) for step in self.run.steps if step.kind == "prefill")
        else:
            top, words = self.queries.box(1)[1] + 10, "do not run again: their K and V are above"
            count = forward.used - 1
        box = (MARGIN, top, LEFT - MARGIN + max(count * self.slots.wide, 300), 32.0)
        scene.rect("not run", box, "none", stroke=QUIET, stroke_dasharray="4 4", rx=4)
        scene.note("not run.n", 2 * MARGIN, top + 20.5, f"{tokens(count)} {words}")

    def _next(self, scene: Sheet, forward: CacheStep | None) -> None:
        """The best of the next-token distribution, the chosen one marked."""
        why = "nothing has run"
        if forward:
            why = "from the logits of the last row"
            why = why if forward.best else "not asked for: more of the prompt follows"
        scene.text("next", MARGIN, self.floor, "next token", 12, **BOLD)
        scene.note("next.why", LEFT, self.floor, why)
        for rank, (token, p) in enumerate(forward.best if forward else ()):
            y, label = self.floor + 20 + 17 * rank, self.run.labels[token]
            look, ink, chosen = (FAINT, LESS_LIKELY, "") if rank else (BOLD, BLUE, " ◀ chosen")
            words = cut_to(label, LEFT - 18, 11, bold=True, keep=True)
            scene.text(f"best{rank}", LEFT - 8, y, words, 11, **RIGHT, **look)
            tip = f"next “{label}” (id {token}): probability {p:.4f}"
            scene.bar(f"bar{rank}", (LEFT, y - 10, 200, 12), p, ink, tip)
            scene.text(f"best{rank}.p", LEFT + 208, y, percent(p) + chosen, 11, **look)

    def _account(self, scene: Sheet, step: int) -> None:
        """Work and memory so far, as bars: tokens run with and without a cache, bytes in use."""
        run, left, width = self.run, 640.0, 180.0
        (used, again), (_, most) = run.tokens_run(step), run.tokens_run(len(run.steps))
        kib = run.spec.bytes_per_token / 1024
        scene.text("account", 490, self.floor, "so far", 12, **BOLD)
        rows = (
            ("tokens run", used / most, BLUE, f"{used}"),
            ("without a cache", again / most, RED, f"{again}"),
            ("cache in use", used / run.num_slots, BLUE, f"{used * kib:.0f} KiB"),
            ("cache reserved", 1.0, "", f"{run.num_slots * kib:.0f} KiB"),
        )
        for i, (name, part, ink, said) in enumerate(rows):
            y = self.floor + 22 + 22 * i + 8 * (i > 1)
            scene.note(f"sum{i}", left - 8, y, name, **RIGHT)
            box = (left, y - 11, max(width * part, 0.5), 14)
            if ink:
                scene.rect(f"sum{i}.bar", box, ink)
            else:
                scene.cell(f"sum{i}.bar", box, "reserved", rx=0)
            scene.text(f"sum{i}.n", left + width * part + 8, y, said, 11)
