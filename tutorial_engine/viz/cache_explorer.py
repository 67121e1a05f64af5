"""The cache explorer: rows of slots filling, one forward a step.

Draws what cache_steps recorded of the engine.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.cache_steps import NAMES, CacheRun, Part, record_run
from tutorial_engine.viz.explorer import Explorer, number, text
from tutorial_engine.viz.lanes import GREY
from tutorial_engine.viz.parts import BOLD, CENTRE, DEAF, FAINT, MARGIN, RIGHT, WIDTH, Grid, Sheet
from tutorial_engine.viz.request_look import chip, cut_to, look, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, INK, RED
from tutorial_engine.viz.words import percent, tokens

MAX_ROWS, MAX_SLOTS = 3, 24  # rows, and slots in each; more would not be readable
LEFT, TOP, ROW, CELL = 122.0, 92.0, 78.0, 28.0  # slot 0; the first row; its height, a cell's
LINE = 30.0  # of the table of what runs
RUNS, AT, SLOT, READS, NEXT = 52.0, 190.0, 330.0, 560.0, 720.0  # its columns


class CacheExplorer(Explorer):
    """Watch the rows of a static cache fill: slot = row · row length + position.

    `prompts` are the requests A, B and C (one to three). ValueError for what cannot be shown.
    """

    title = "Cache explorer"

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        new_tokens: int = 8,
    ) -> None:
        at_least_one("new_tokens", new_tokens)
        if isinstance(prompts, str) or not 1 <= len(prompts) <= MAX_ROWS:
            raise ValueError(f"give a list of 1 to {MAX_ROWS} prompts, got {prompts!r}")
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens
        self.num_rows = len(prompts)
        self.ran: tuple[list[str], int] | None = None
        knobs = {
            name: text(f"prompt {name}", prompt, "310px")
            for name, prompt in zip(NAMES, prompts, strict=False)
        }
        super().__init__(knobs | {"chunk": number("prefill chunk", 0, 0, MAX_SLOTS)})

    def rerun(self) -> int:
        """Run the engine when a prompt or the chunk changed. Step 0 is the empty cache."""
        wanted = [self.value(name) for name in NAMES[: self.num_rows]], self.value("chunk")
        if wanted != self.ran:
            self.run: CacheRun = record_run(
                self.model, self.tokenizer, wanted[0], self.new_tokens, wanted[1], MAX_SLOTS
            )
            self.ran = wanted
        return len(self.run.steps) + 1

    def caption(self, step: int) -> str:
        """What ran, where the newest tokens were written, and what is in use."""
        return self.run.caption(step)

    def scene(self, step: int) -> Scene:
        """The rows of slots on top, then what runs, then the account."""
        run, forward = self.run, self.run.steps[step - 1] if step else None
        table = TOP + ROW * run.num_rows + 16
        floor = table + LINE * run.num_rows + 42
        sheet = Sheet(WIDTH, floor + 88, tip_at=(MARGIN, floor + 80))
        sheet.hint = "hover over a slot or a bar to read what it holds"
        now = "nothing has run yet"
        if forward:
            now = f"{forward.kind}: {tokens(forward.num_tokens)} in this forward"
        sheet.heading(f"step {step} of {len(run.steps)} · {now}")
        self._key(sheet)
        for row in range(run.num_rows):
            self._row(sheet, step, row)
        self._table(sheet, step, table)
        self._account(sheet, step, floor)
        pitch, half = (WIDTH - LEFT - MARGIN) / run.row_len, -(-run.row_len // 2)
        rows, asked = (TOP - 20, ROW * run.num_rows - 6), (table - 14, LINE * run.num_rows + 26)
        for first, many in ((0, half), (half, run.row_len - half)):
            slots = (LEFT + first * pitch - 2, rows[0], many * pitch + 3, rows[1])
            sheet.parts.append([(8, rows[0], LEFT - 10, rows[1]), slots])
        sheet.parts += [
            [(8, asked[0], SLOT - 12, asked[1])],
            [(8, asked[0], 42, asked[1]), (SLOT - 2, asked[0], NEXT - SLOT - 10, asked[1])],
            [(8, asked[0], 42, asked[1]), (NEXT - 2, asked[0], WIDTH - NEXT, asked[1])],
            [(8, floor - 18, 442, 66)],
            [(SLOT + 220, floor - 18, 390, 66)],
        ]
        return sheet

    def _key(self, sheet: Sheet) -> None:
        """What a cell is, and what outlines mean."""
        each = f"{self.run.spec.bytes_per_token:,} bytes"
        words = f"a cell is a slot: K and V of one token in all layers, {each}"
        sheet.note("what", MARGIN, 44, words, 12)
        sheet.keys.append((MARGIN - 2, 30, text_width(words, 12) + 10, 20))
        marks = {
            "written in this step": sheet.sample("written", GREY),
            "in the cache": sheet.sample("cached", GREY),
            "reserved, not used": sheet.sample("reserved"),
        }
        sheet.legend(560, 44, marks)

    def _row(self, sheet: Sheet, step: int, row: int) -> None:
        """A row: tokens in their slots, positions above them, the slots' numbers below."""
        run, one, top = self.run, look(row), TOP + ROW * row
        pitch = (WIDTH - LEFT - MARGIN) / run.row_len
        grid = Grid(LEFT, top, pitch, CELL, gap=(3, 0))
        chip(sheet, f"who{row}", MARGIN, top + CELL / 2, NAMES[row], one)
        sheet.note(f"row{row}", MARGIN + 36, top + CELL / 2 + 4, f"row {row}")
        sheet.note(f"row{row}.position", LEFT - 8, top - 7, "position", **RIGHT)
        sheet.text(f"row{row}.slot", LEFT - 8, top + CELL + 14, "slot", 11, **RIGHT, **BOLD)
        for position in range(run.row_len):
            slot = row * run.row_len + position
            box = grid.box(position)
            middle = box[0] + box[2] / 2
            stored = run.stored.get(slot)
            is_used = stored is not None and stored.step <= step
            is_new = stored is not None and stored.step == step and step > 0
            style = BOLD if is_new else FAINT
            sheet.text(f"slot{slot}.n", middle, top + CELL + 14, str(slot), 11, **CENTRE, **style)
            sheet.text(f"slot{slot}.at", middle, top - 7, str(position), 11, **CENTRE, **style)
            if stored is None or not is_used:
                tip = f"slot {slot}: reserved for {NAMES[row]}, not written yet"
                sheet.cell(f"slot{slot}", box, "reserved", tip=tip, rx=0)
                continue
            label = run.labels[stored.token]
            tip = (
                f"slot {slot}: K and V of “{label}” of {NAMES[row]}, at position "
                f"{stored.position}, written in step {stored.step} "
                f"({run.steps[stored.step - 1].kind})"
            )
            sheet.cell(f"slot{slot}", box, "written" if is_new else "cached", one, tip)
            words = cut_to(label, box[2] - 3, 11, keep=True)
            sheet.inside(f"slot{slot}.token", box, words, 11)

    def _table(self, sheet: Sheet, step: int, top: float) -> None:
        """What runs of each request: tokens, positions, the sum that gives the slot, reads."""
        run = self.run
        forward = run.steps[step - 1] if step else None
        heads = {
            RUNS: "runs tokens",
            AT: "at position",
            SLOT: f"slot = row · {run.row_len} + position",
            READS: "each reads slots",
            NEXT: "likeliest next token",
        }
        for x, words in heads.items():
            sheet.text(f"head{x}", x, top, words, 12, **BOLD)
        for row in range(run.num_rows):
            y, name = top + LINE * (row + 0.75), f"run{row}"
            chip(sheet, name, MARGIN, y - 4, NAMES[row], look(row))
            part = forward.parts.get(row) if forward else None
            if part is None:
                self._idle(sheet, step, row, y)
            else:
                self._part(sheet, row, y, part)
            best = forward.best.get(row) if forward else None
            if best:
                token, p = best[0]
                label = run.labels[token]
                likely = " · ".join(f"{run.labels[t]} {percent(q)}" for t, q in best)
                sheet.bar(f"{name}.bar", (NEXT, y - 10, 110, 13), p, BLUE, f"next: {likely}")
                words = f"{percent(p)} “{cut_to(label, 90, 12, keep=True)}”"
                sheet.text(f"{name}.next", NEXT + 118, y, words, 12)
            elif part is not None:
                sheet.note(f"{name}.next", NEXT, y, "not asked for: more of the prompt follows")

    def _part(self, sheet: Sheet, row: int, y: float, part: Part) -> None:
        """A request that runs."""
        name, at = f"run{row}", part.positions
        first, count = part.reads
        label = cut_to(self.run.labels[part.ids[-1]], 70, 12.5, keep=True)
        if len(at) == 1:
            said = (f"1, “{label}”", f"{at[0]}", self.run.sum_of(row, at[0]))
        else:
            said = (
                f"{len(at)}, last “{label}”",
                f"{at[0]} to {at[-1]}",
                f"last: {self.run.sum_of(row, at[-1])}",
            )
        reads = f"{first} to {first + count - 1}" if count > 1 else f"{first}"
        if len(at) > 1:
            reads = f"{first} to its own"
        for x, words, what in zip(
            (RUNS, AT, SLOT, READS), (*said, reads), ("runs", "at", "slot", "reads"), strict=True
        ):
            style = BOLD if what == "slot" else {}
            sheet.text(f"{name}.{what}", x, y, words, 12.5, **style)

    def _idle(self, sheet: Sheet, step: int, row: int, y: float) -> None:
        """Why a request does not run in this step."""
        words = "waits: its prompt is in the cache, and others still run theirs"
        if step == 0:
            count = len(self.tokenizer.encode(self.value(NAMES[row])).ids)
            words = f"{tokens(count)} of the prompt wait{'s' * (count == 1)}"
        elif self.run.steps[step - 1].kind == "decode":
            words = "has ended: the model chose its end-of-text token"
        sheet.note(f"run{row}.runs", RUNS, y, words, 12.5)

    def _account(self, sheet: Sheet, step: int, top: float) -> None:
        """Work and memory so far, as bars: tokens run with and without a cache, bytes in use."""
        run, wide = self.run, 210.0
        (used, again), (_, most) = run.tokens_run(step), run.tokens_run(len(run.steps))
        kib = run.spec.bytes_per_token / 1024
        columns = (
            (
                150.0,
                (
                    ("tokens run", used / most, BLUE, f"{used}"),
                    ("without a cache", again / most, RED, f"{again}"),
                ),
            ),
            (
                SLOT + 320,
                (
                    ("cache in use", used / run.num_slots, BLUE, f"{used * kib:.0f} KiB"),
                    ("cache reserved", 1.0, "", f"{run.num_slots * kib:.0f} KiB"),
                ),
            ),
        )
        sheet.text("account", MARGIN, top - 4, "so far", 12, **BOLD)
        for c, (left, rows) in enumerate(columns):
            for i, (name, part, ink, said) in enumerate(rows):
                y, key = top + 18 + 22 * i, f"sum{2 * c + i}"
                sheet.note(key, left - 8, y, name, **RIGHT)
                box = (left, y - 11, max(wide * part, 0.5), 14)
                if ink:
                    sheet.rect(f"{key}.bar", box, ink, **DEAF)
                else:
                    sheet.cell(f"{key}.bar", box, "reserved", rx=0)
                sheet.text(f"{key}.n", left + wide * part + 8, y, said, 11.5, fill=INK)
