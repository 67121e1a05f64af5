"""A run of the scheduler as a picture: the timeline, and one step.

Knows places; what there is to say comes from `run`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from tutorial_engine.viz.drawing.letters import cut_to, name_in, text_width
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    IDLE,
    KEY,
    MARGIN,
    RIGHT,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.drawing.request_look import Box, Look, look
from tutorial_engine.viz.drawing.style import INK, RULE
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.words import counted, tokens

LEFT, END = 44.0, 104.0  # where rows begin; right of the last step, for "finished · length"
TOP, ROW, BOX = 66.0, 32.0, 26.0  # where the timeline begins, a row of it, a box in a row
NARROWEST, WIDEST, WORDY = 19.0, 66.0, 49.0  # a step; from WORDY on, boxes have words
MAX_CELLS = 128  # of the budget
STEPS = 330.0  # pixels of steps that a narrow screen shows
MAX_ROWS, MAX_LEN = 64, 10_000  # of the cache: more would be drawn for minutes, and not be seen
BUDGET, CACHE = 536.0, 392.0  # widths of the budget and of the cache's rows
ROWS_X, ASKED = 78.0, 27.0  # where cache rows begin; the height of a request's line in the table
COLUMNS = {  # of the table: what -> the middle of its numbers
    "known": 192.0,
    "computed": 258.0,
    "to run": 322.0,
    "budget left": 392.0,
    "runs": 462.0,
}
OUTCOME = 500.0
LINE, SIZE = 24.0, 11.0  # a line of tokens, their letters
OVER = "#D55E00"  # what a wrong rule runs beyond the budget
ACTIVITIES = {  # kind -> in the key
    "arrives": "arrives",
    "waits": "waits",
    "prefill": "prefill",
    "decode": "decode",
    "stalls": "stalls: admitted, runs nothing",
}
TOKENS = {  # state of its cell -> in the key, in tips
    "cached": ("in the cache", "its K and V are in the cache"),
    "written": ("runs in this step", "runs in this step, which writes its K and V"),
    "known": ("not run yet", "not run yet"),
    "sampled": ("new from this step", "sampled by this step, not run yet"),
    "gone": ("finished, row freed", "its request is over"),
}


class Chip(NamedTuple):
    """Where a token is written: line, x, width, and the label as it fits."""

    line: int
    x: float
    width: float
    words: str


class SchedulerView:
    """Draws the steps of one run. What is the same at every step is laid out once.

    `details`: the rows of the cache and all tokens as well. ValueError, saying what fits, for more
    rows or longer ones than can be drawn.
    """

    def __init__(self, run: SchedulerRun, details: bool = True) -> None:
        if run.max_num_seqs > MAX_ROWS or run.max_len > MAX_LEN:
            raise ValueError(
                f"{run.max_num_seqs} rows of {run.max_len} slots: this picture has room for "
                f"{MAX_ROWS} rows of {MAX_LEN}"
            )
        self.run, self.details = run, details
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.names)}
        self.chips = {name: self._chips(name) for name in run.tokens}
        room, columns = WIDTH - LEFT - END, run.last + 1
        self.pitch = min(WIDEST, max(NARROWEST, room / columns))
        self.shown = min(columns, int(room / self.pitch + 1e-6))  # steps that are seen at once
        shares = [share for life in run.lives for share in life.shares.values()]
        widest = max(text_width(self.words(share.kind, share.num_tokens), 1) for share in shares)
        self.size = min(11.0, (self.pitch - 5) / widest)  # of the words in boxes, one for all
        self.middle = TOP + ROW * len(run.names) + 46
        fullest = max(step.num_tokens for step in run.steps)  # a wrong rule may overdraw the budget
        cells = self.cells = min(max(run.budget, fullest), MAX_CELLS)
        in_line = 32 if cells <= 64 else 64
        wide = min(30.0, BUDGET / min(cells, in_line))
        self.budget = Grid(MARGIN, self.middle + 10, wide, 26, in_line, (2, 4))
        self.table = self.budget.y + self.budget.height(cells) + 44
        self.cache = self.table + 26 + ASKED * len(run.names) + 22
        self.tokens = self.cache + 22 * run.max_num_seqs + 36
        self.floor = self.tokens + 24 + sum(map(self.height, self.chips.values()))
        if not details:
            self.floor = self.cache - 14

    def _chips(self, name: str) -> list[Chip]:
        """Places for all tokens that a request will ever have: stepping moves none."""
        line, x, chips = 0, LEFT, list[Chip]()
        for i in range(len(self.run.tokens[name])):
            words = cut_to(self.run.word(name, i), 90, SIZE, bold=True)
            width = max(16.0, text_width(words, SIZE, bold=True) + 8)
            if x + width > WIDTH - MARGIN:
                line, x = line + 1, LEFT
            chips.append(Chip(line, x, width, words))
            x += width + (9 if i == self.run.life(name).num_prompt_tokens - 1 else 3)
        return chips

    def height(self, chips: Sequence[Chip]) -> float:
        """Pixels that the tokens of one request take, with the gap below."""
        return LINE * (1 + max((chip.line for chip in chips), default=0)) + 4

    @cached_property
    def widest_outcome(self) -> float:
        """Pixels for the longest of the words that say what came of a request in a step."""
        run = self.run
        said = (run.outcome(name, step) for name in run.names for step in range(run.last + 1))
        return min(12 + max(text_width(words, 12) for words in said), WIDTH - OUTCOME)

    def words(self, kind: str, count: int) -> str:
        """What stands in a box: the number of tokens alone where boxes are narrow."""
        return f"{kind} {count or ''}".strip() if self.pitch >= WORDY else str(count or "")

    def scene(self, step: int) -> Sheet:
        """The timeline on top; budget and requests of the step; then, if asked for, the details."""
        sheet = _StepSheet(self, step)
        sheet.head()
        sheet.timeline()
        sheet.budget()
        sheet.table()
        if self.details:
            sheet.cache_rows()
            sheet.tokens()
        sheet.parts = sheet.parts_on_a_phone()
        return sheet


class _StepSheet(Sheet):
    """The picture of one step of a view."""

    def __init__(self, view: SchedulerView, step: int) -> None:
        super().__init__(WIDTH, view.floor + 14, (MARGIN, view.floor + 6))
        self.hint = "hover over a box to read its numbers"
        self.view, self.run, self.looks = view, view.run, view.looks
        self.step, self.now = step, view.run.steps[step]
        # the first step that is seen: those around this one, where not all are
        self.first = min(max(step - view.shown // 2, 0), self.run.last + 1 - view.shown)

    def parts_on_a_phone(self) -> list[list[Box]]:
        """The steps around this one, then what else there is, in parts that are not so wide."""
        view, top, tall = self.view, TOP - 8, ROW * len(self.run.names) + 26
        end = max(LEFT + view.shown * view.pitch + 60 - STEPS, LEFT)
        x = min(max(LEFT + (self.step - self.first + 0.5) * view.pitch - STEPS / 2, LEFT), end)
        names = (0.0, top, LEFT - 2, tall)
        cells = min(view.cells, view.budget.columns)
        asked = (view.table - 14, ASKED * len(self.run.names) + 26)
        budget = (0.0, view.middle - 14, max(MARGIN + cells * view.budget.wide, 360.0))
        said, rows = view.table + 8, asked[1] - 22
        found: list[list[Box]] = [
            [names, (x - 2, top, STEPS, tall)],
            [(*budget, asked[0] - view.middle)],
            [(0, asked[0], OUTCOME - 6, asked[1])],
            [(OUTCOME - 4, asked[0], WIDTH - OUTCOME, 20)],
            [(0, said, LEFT - 4, rows), (OUTCOME - 4, said, view.widest_outcome, rows)],
        ]
        if view.details:
            found.append([(0, view.cache - 14, BUDGET + 14, view.tokens - view.cache - 6)])
            low, half = view.floor - view.tokens - 2, (WIDTH - LEFT) / 2
            letters = (0.0, view.tokens + 2, LEFT - 4, low)
            for left in (LEFT - 2, LEFT + half - 2):
                found.append([letters, (left, view.tokens + 2, half + 4, low)])
        return found

    def head(self) -> None:
        """Which step it is, the engine's limits, and what the boxes mean."""
        run = self.run
        now = f"one forward runs {self.now.num_tokens} of at most {tokens(run.budget)}"
        limits = f"{run.policy} · budget {run.budget} · max_num_seqs {run.max_num_seqs}"
        self.heading(f"step {self.step} of {run.last} · {now}", limits)
        note, first = "numbers = tokens run in that step", next(iter(self.looks.values()))
        self.note("numbers", MARGIN, 48, note)
        self.keys.append((MARGIN - 2, 34, text_width(note, KEY) + 14, 22))
        marks: dict[str, Mark] = {}
        seen = {share.kind for life in run.lives for share in life.shares.values()}
        seen |= {"arrives"} if any(map(run.came, run.names)) else set()
        for kind, words in ACTIVITIES.items():
            if kind not in seen:
                continue
            marks[words] = self.sample(kind, first)
        marks["first token"] = lambda name, box: self._dot(name, box[0] + 9, 44)
        self.legend(34 + text_width(note, KEY), 49, marks, gap=18)

    def _dot(self, name: str, x: float, y: float) -> None:
        self.add(name, "circle", cx=x, cy=y, r=3.5, fill=INK)

    def timeline(self) -> None:
        """A row per request, a column per step, and the cursor; if need be, those around it."""
        run, view, pitch = self.run, self.view, self.view.pitch
        window = range(self.first, self.first + view.shown)
        bottom, right = TOP + ROW * len(run.names), LEFT + view.shown * pitch
        for row, name in enumerate(run.names):
            life = run.life(name)
            y, ink = TOP + row * ROW, self.looks[name].colour
            self.text(f"line.{name}", 14, y + 19, *name_in(LEFT - 16, name, 16), fill=ink, **BOLD)
            for i, step in enumerate(window):
                self._box(name, step, (LEFT + i * pitch + 1.5, y, pitch - 3, BOX))
            if life.end_step is not None and life.end_step <= window[-1]:
                words, x = life.ending.split(" · ")[0], right  # the table says why
                if text_width(words, SIZE) + 10 <= pitch:  # inside the cursor's frame
                    x = LEFT + (life.end_step + 1 - self.first) * pitch
                self.note(f"end.{name}", x + 6, y + 17, words, SIZE)
        for i, step in enumerate(window):
            style = BOLD if step == self.step else FAINT
            words = f"step {step}" if pitch >= WORDY else str(step)
            x = LEFT + (i + 0.5) * pitch
            self.text(f"step{step}", x, bottom + 11, words, KEY, **CENTRE, **style)
        if pitch < WORDY:
            self.note("step", LEFT - 8, bottom + 11, "step", KEY, **RIGHT)
        box = (LEFT + (self.step - self.first) * pitch - 0.5, TOP - 5, pitch + 1, bottom - TOP + 21)
        self.outline("cursor", box, rx=4, stroke_width=2.2)

    def _box(self, name: str, step: int, box: Box) -> None:
        """What a step did with a request; the words as they fit."""
        run, share, item = self.run, self.run.share(name, step), f"cell.{name}.{step}"
        if share is None:
            if step == run.came(name) - 1:
                tip = f"{name} arrives after step {step}"
                self.cell(item, box, "arrives", None, tip)
            return
        tip = f"step {step}: {name} {share.kind}"
        if share.num_tokens:
            slots = run.steps[step].scheduled[name].slots
            last = share.first_position + share.num_tokens - 1
            tip = (
                f"step {step}: {run.ran(name, step)}; positions {share.first_position} to {last}, "
                f"slots {slots[0]} to {slots[-1]}"
            )
        words, look = self.view.words(share.kind, share.num_tokens), self.looks[name]
        letters = FAINT if share.kind in IDLE else {}
        self.cell(item, box, share.kind, look, tip, words, self.view.size, letters)
        if run.first_token(name) == step:
            self._dot(f"{item}.first", box[0] + box[2] - 2, box[1] + 1)

    def budget(self) -> None:
        """One cell per token that the step may run, filled by those that it does run."""
        run, now, grid = self.run, self.now, self.view.budget
        self.text("budget", MARGIN, self.view.middle, f"budget in step {self.step}", 12, **BOLD)
        cells = self.view.cells
        owners = [name for name, event in now.scheduled.items() for _ in event.slots]
        for i in range(cells):
            name, box = f"budget{i}", grid.box(i)
            if i >= len(owners):
                if i < run.budget:
                    self.cell(name, box, "free", tip="free: nobody needs it")
                continue
            who = owners[i]
            share = run.share(who, self.step)
            state = "solid" if share is not None and share.kind == "decode" else "cached"
            over: Style = {"stroke": OVER, "stroke_width": 3} if i >= run.budget else {}
            self.cell(name, box, state, self.looks[who], run.ran(who, self.step), **over)
            if grid.wide >= 14 or i == owners.index(who):
                size = SIZE if grid.wide >= 14 else 9.0
                self.inside(f"{name}.word", box, *name_in(max(box[2], 14), who, size))
        parts = " + ".join(f"{name} {len(event.slots)}" for name, event in now.scheduled.items())
        said = f"{parts} = {now.num_tokens} of {run.budget} tokens"
        said += f" · {run.budget - cells} more are not drawn" * (cells < run.budget)
        said += f" · {now.num_tokens - run.budget} over the budget" * (now.num_tokens > run.budget)
        self.note("budget.sum", MARGIN, grid.y + grid.height(cells) + 14, said)

    def cache_rows(self) -> None:
        """The rows of the static cache: whose they are, what is filled, what this step writes."""
        run, top = self.run, self.view.cache
        holders = {r.table[0]: name for name, r in self.now.planned.requests.items() if r.table}
        words = f"cache: {counted(run.max_num_seqs, 'row')} of {run.max_len} slots"
        self.text("slots", MARGIN, top, words, 12, **BOLD)
        key = "thick = written now · hatched = reserved, empty"
        self.note("slots.key", MARGIN + BUDGET, top, key, SIZE, **RIGHT)
        wide = min(18.0, CACHE / run.max_len)
        for row in range(run.max_num_seqs):
            slots = Grid(ROWS_X, top + 10 + 22 * row, wide, 16)
            self.note(f"row{row}", MARGIN, slots.y + 12, f"row {row}", SIZE)
            said = "free"
            if row in holders:
                said = self._row(row, slots, holders[row])
            else:
                tip = f"row {row} is nobody's"
                self.cell(f"row{row}.free", slots.box(0, run.max_len), "free", tip=tip, rx=0)
            x = ROWS_X + 8 + wide * run.max_len
            self.note(f"row{row}.n", x, slots.y + 12, said, SIZE)

    def _row(self, row: int, grid: Grid, who: str) -> str:
        """A row that somebody has, slot by slot → how full it is."""
        run, colours, event = self.run, self.looks[who], self.now.scheduled.get(who)
        base, new = row * run.max_len, event.slots if event else ()
        slots = (*self.now.planned.requests[who].slots, *new)
        used, thin = len(slots), Style(stroke_width=0.8, rx=0)
        self.text(f"row{row}.who", 56, grid.y + 13, who, 13, fill=colours.ink, **BOLD)
        for i, slot in enumerate(slots):
            tip = f"slot {slot}: K and V of token {i} of {who}, “{run.word(who, i)}”"
            state = "solid" if slot in new else "cached"
            self.cell(f"slot{slot}", grid.box(slot - base), state, colours, tip, **thin)
        if used < run.max_len:
            tip = f"slots {base + used} to {base + run.max_len - 1}: reserved for {who}, empty"
            rest = grid.box(used, run.max_len - used)
            self.cell(f"row{row}.empty", rest, "reserved", tip=tip, **thin)
            lines = (grid.box(i)[0] for i in range(used + 1, run.max_len))
            ticks = "".join(f"M{x:.1f} {grid.y}v16" for x in lines)
            self.add(f"row{row}.ticks", "path", d=ticks, stroke=RULE, stroke_width=0.8, **DEAF)
        if new:
            self.outline(f"row{row}.new", grid.box(new[0] - base, len(new)))
        return f"{used} of {run.max_len}" + ", then free" * (who in run.ended(self.step))

    def table(self) -> None:
        """Each request in the step: what the rule goes by, what it runs, and what comes of it."""
        run, step, top = self.run, self.step, self.view.table
        self.text("table", MARGIN, top, f"requests in step {step}", 12, **BOLD)
        for what, x in COLUMNS.items():
            self.note(f"head.{what}", x, top, what, **CENTRE)
        rule = "to run = known − computed; budget left = what was left when its turn came"
        self.note("head.rule", OUTCOME, top, rule)
        for i, name in enumerate(run.names):
            base = top + 26 + ASKED * i
            state, colours = run.state(name, step), self.looks[name]
            box = (MARGIN, base - 14.5, 23, 20)
            fill = "solid" if "running" in state else "cached" if state == "waiting" else "free"
            edge: Style = {"letters": BOLD, "rx": 3, "stroke": colours.colour}
            shown = name_in(box[2] - 2, name, 11.5)
            self.cell(f"asked.{name}", box, fill, colours, "", *shown, **edge)
            self.text(f"asked.{name}.state", 44, base, state, 12)
            if run.share(name, step) is not None:
                request = self.now.planned.requests[name]
                event = self.now.scheduled.get(name)
                known, computed = len(request.token_ids), request.num_computed_tokens
                left, runs = run.budget_left(name, step), len(event.slots) if event else 0
                numbers = (known, computed, known - computed, left, runs or "–")
                for (what, x), number in zip(COLUMNS.items(), numbers, strict=True):
                    style = BOLD if what == "runs" else {}
                    self.text(f"asked.{name}.{what}", x, base, str(number), 12, **CENTRE, **style)
            said = cut_to(run.outcome(name, step), WIDTH - OUTCOME - MARGIN, 12, keep=True)
            self.text(f"asked.{name}.outcome", OUTCOME, base, said, 12)

    def tokens(self) -> None:
        """Prompt and output of every request, and how far they are computed."""
        y, first = self.view.tokens, next(iter(self.looks.values()))
        self.text("tokens", MARGIN, y, "tokens", 12, **BOLD)
        marks = {words: self.sample(kind, first, rx=3) for kind, (words, _) in TOKENS.items()}
        x, _ = self.legend(72, y, marks, gap=20)
        self.rect("key.end", (x + 4, y - 13, 2, 18), INK)
        self.note("key.end.words", x + 12, y, "end of the prompt")
        y += 14
        for who, chips in self.view.chips.items():
            ink = self.looks[who].colour
            self.text(f"tokens.{who}", 14, y + 16, *name_in(LEFT - 16, who, 15), fill=ink, **BOLD)
            if who in self.now.planned.requests:
                self._tokens(who, chips, y)
            else:
                said = f"comes before step {self.run.came(who)}"
                self.note(f"tokens.{who}.late", LEFT, y + 14, said)
            y += self.view.height(chips)

    def _tokens(self, who: str, chips: list[Chip], top: float) -> None:
        """The tokens of one request that are known by the end of the step."""
        num_prompt = self.now.planned.requests[who].num_prompt_tokens
        for i, kind in enumerate(self.run.token_kinds(who, self.step)):
            chip, name, (_, said) = chips[i], f"token.{who}.{i}", TOKENS[kind]
            where, token = "prompt" if i < num_prompt else "output", self.run.tokens[who][i]
            label = self.run.word(who, i)
            tip = f"{who}, position {i} ({where}): “{label}”, id {token}; {said}"
            box = (chip.x, top + LINE * chip.line, chip.width, 20.0)
            style = BOLD if kind in ("written", "sampled") else FAINT if kind == "gone" else {}
            self.cell(name, box, kind, self.looks[who], tip, chip.words, SIZE, style, rx=3)
            if i == num_prompt - 1:
                self.rect(f"{name}.end", (box[0] + box[2] + 3.5, box[1] - 1, 2, 22), INK, **DEAF)
