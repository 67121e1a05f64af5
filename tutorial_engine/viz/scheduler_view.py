"""A run of the scheduler as a picture: the timeline, and one step.

Knows places; what there is to say comes from scheduler_steps.
"""

from functools import partial
from typing import Any

from tutorial_engine.viz.flow import Piece, cell, column, panel, row, show, table, words
from tutorial_engine.viz.parts import BOLD, FAINT, KEY, MARGIN, WIDTH, Mark, Sheet, Style
from tutorial_engine.viz.request_look import Box, Look, cut_to, look, text_width
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.style import INK, PAPER, RULE
from tutorial_engine.viz.words import counted, tokens

LETTER, END = 34.0, 104.0  # a request's name; right of the last step, for how it ended
NARROWEST, WIDEST, WORDY = 19.0, 66.0, 49.0  # a step; from WORDY on, boxes have words
MAX_CELLS = 128  # of the budget
MAX_ROWS, MAX_LEN = 64, 10_000  # of the cache: more would be drawn for minutes, and not be seen
BUDGET, CACHE = 420.0, 340.0  # widths of the budget and of the cache's rows
COLUMNS = ("known", "computed", "to run", "budget left", "runs")  # of the table
OUTCOME, TOKENS = 375.0, 380.0  # widths of what comes of a request, and of its tokens
PILL, OVER = "#e9edf0", "#D55E00"  # OVER: what a wrong rule runs beyond the budget
ACTIVITIES = {  # kind -> in the key
    "arrives": "arrives",
    "waits": "waits",
    "prefill": "prefill",
    "decode": "decode",
    "stalls": "stalls: admitted, runs nothing",
}
STATES = {  # of a token: kind -> state of its cell, in the key, in tips
    "cached": ("cached", "in the cache", "its K and V are in the cache"),
    "run": ("written", "runs in this step", "runs in this step, which writes its K and V"),
    "known": ("known", "not run yet", "not run yet"),
    "sampled": ("sampled", "new from this step", "sampled by this step, not run yet"),
    "gone": ("gone", "finished, row freed", "its request is over"),
}


def name_in(room: float, name: str, size: float, **style: Any) -> Piece:
    """A request's name in so many pixels: with smaller letters, then cut."""
    size = size if text_width(name, size, bold=True) <= room else min(size, 9.0)
    piece = words(cut_to(name, room, size, bold=True, keep=True), size, **BOLD, **style)
    return piece._replace(wide=room)


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
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.lives)}
        room, columns = WIDTH - MARGIN - LETTER - END, run.last + 1
        self.pitch = min(WIDEST, max(NARROWEST, room / columns))
        self.shown = min(columns, int(room / self.pitch + 1e-6))  # steps that are seen at once
        shares = [share for life in run.lives.values() for share in life.shares.values()]
        widest = max(text_width(self.words(share.kind, share.num_tokens), 1) for share in shares)
        self.size = min(11.0, (self.pitch - 5) / widest)  # of the words in boxes, one for all
        fullest = max(step.num_tokens for step in run.steps)  # a wrong rule may overdraw the budget
        self.cells = min(max(run.budget, fullest), MAX_CELLS)
        said = [self.outcome(name, step) for name in run.lives for step in range(columns)]
        self.line = max(27.0, *(piece.tall for piece in said))  # of the table

    def words(self, kind: str, count: int) -> str:
        """What stands in a box: the number of tokens alone where boxes are narrow."""
        return f"{kind} {count or ''}".strip() if self.pitch >= WORDY else str(count or "")

    def outcome(self, name: str, step: int) -> Piece:
        """What comes of a request in a step."""
        return words(self.run.outcome(name, step), 12, OUTCOME, 2).named(f"asked.{name}.outcome")

    def scene(self, step: int) -> Sheet:
        """The timeline on top; budget and requests of the step; then, if asked for, the details."""
        run, now, sheet = self.run, self.run.steps[step], Sheet(WIDTH, 0)
        ran = f"one forward runs {now.num_tokens} of at most {tokens(run.budget)}"
        limits = f"{run.policy} · budget {run.budget} · max_num_seqs {run.max_num_seqs}"
        sheet.heading(f"step {step} of 0–{run.last} · {ran}", limits)
        note, one = "numbers = tokens run in that step", next(iter(self.looks.values()))
        sheet.note("numbers", MARGIN, 48, note)
        sheet.keys.append((MARGIN - 2, 34, text_width(note, KEY) + 14, 22))
        seen = {share.kind for life in run.lives.values() for share in life.shares.values()}
        seen |= {"arrives"} if any(map(run.came, run.lives)) else set()
        marks: dict[str, Mark] = {
            said: partial(_activity, sheet, kind=kind, one=one)
            for kind, said in ACTIVITIES.items()
            if kind in seen
        }
        marks["first token"] = lambda name, box: _dot(sheet, name, box[0] + 9, 44)
        sheet.legend(34 + text_width(note, KEY), 49, marks, gap=18)
        parts = [self._timeline(step), self._budget(step), self._table(step)]
        if self.details:
            parts += [self._cache(step), self._tokens(sheet, step)]
        return show(sheet, column(*parts, gap=16), 66, "hover over a box to read its numbers")

    # -- the timeline -------------------------------------------------------------------------

    def _timeline(self, step: int) -> Piece:
        """A row per request, a column per step, and the cursor; if need be, those around it."""
        run, pitch = self.run, self.pitch
        first = min(max(step - self.shown // 2, 0), run.last + 1 - self.shown)
        lines = []
        for name, life in run.lives.items():
            letters = name_in(LETTER - 6, name, 16, fill=self.looks[name].colour)
            boxes = [self._box(name, at) for at in range(first, first + self.shown)]
            if life.end_step is not None and life.end_step < first + self.shown:
                said = words(life.ending.split(" · ")[0], 11, **FAINT)  # the table says why
                at = life.end_step + 1 - first if said.wide + 10 <= pitch else self.shown
                end = row(words(""), said.named(f"end.{name}"), gap=4)
                boxes[max(at, 0) :] = [end._replace(wide=pitch - 3)]
            lines.append([letters, *boxes])
        numbers = []
        for at in range(first, first + self.shown):
            style = BOLD if at == step else FAINT
            said = words(f"step {at}" if pitch >= WORDY else str(at), KEY, **style)
            numbers.append(said.named(f"step{at}"))
        lines.append([words("" if pitch >= WORDY else "step", KEY, **FAINT), *numbers])
        least = (LETTER - 6, *[pitch - 3] * self.shown, END - 10)
        whole = table(lines, 3, 5, least, across=(0, *[0.5] * self.shown))

        def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
            whole.draw(sheet, name, x, y)
            box = (x + whole.stops[step - first] + 1, y - 2, pitch - 2, whole.tall + 4)
            sheet.outline("cursor", box, rx=4, stroke_width=2.2)

        return panel("", whole._replace(draw=draw), around=step - first)

    def _box(self, name: str, step: int) -> Piece:
        """What a step did with a request; the words as they fit."""
        run, share, one = self.run, self.run.share(name, step), self.looks[name]
        kind, said, tip = "", "", f"{name} arrives after step {step}"
        if share is None and step == run.came(name) - 1:
            kind = "arrives"
        elif share is not None:
            kind, said = share.kind, self.words(share.kind, share.num_tokens)
            tip = f"step {step}: {name} {share.kind}"
            if share.num_tokens:
                slots = run.steps[step].scheduled[name].slots
                last = share.first_position + share.num_tokens - 1
                tip = (
                    f"step {step}: {run.ran(name, step)}; positions {share.first_position} to "
                    f"{last}, slots {slots[0]} to {slots[-1]}"
                )
        wide, tall = self.pitch - 3, 26.0

        def draw(sheet: Sheet, own: str, x: float, y: float) -> None:
            box = (x, y, wide, tall)
            if kind:
                _activity(sheet, own, box, kind, one, tip)
            if said:
                sheet.inside(f"{own}.n", box, said, self.size, **(FAINT if kind == "waits" else {}))
            if run.first_token(name) == step:
                _dot(sheet, f"{own}.first", x + wide - 2, y + 1)

        return Piece(wide, tall, draw).named(f"cell.{name}.{step}")

    # -- one step -----------------------------------------------------------------------------

    def _budget(self, step: int) -> Piece:
        """One cell per token that the step may run, filled by those that it does run."""
        run, now, cells = self.run, self.run.steps[step], []
        in_line = 32 if self.cells <= 64 else 64
        wide = min(30.0, BUDGET / min(self.cells, in_line)) - 2
        owners = [name for name, event in now.scheduled.items() for _ in event.slots]
        for i in range(self.cells):
            one = cell(wide, 22, "free", tip="free: nobody needs it")
            if i < len(owners):
                who = owners[i]
                share, said = (
                    run.share(who, step),
                    who if wide > 12 or i == owners.index(who) else "",
                )
                state = "solid" if share is not None and share.kind == "decode" else "cached"
                over: Style = {"stroke": OVER, "stroke_width": 3} if i >= run.budget else {}
                one = cell(wide, 22, state, self.looks[who], said, run.ran(who, step), **over)
            cells.append(one.named(f"budget{i}"))
        parts = " + ".join(f"{name} {len(event.slots)}" for name, event in now.scheduled.items())
        said = f"{parts} = {now.num_tokens} of {run.budget} tokens"
        said += f" · {run.budget - self.cells} more are not drawn" * (self.cells < run.budget)
        said += f" · {now.num_tokens - run.budget} over the budget" * (now.num_tokens > run.budget)
        grid = table([cells[i : i + in_line] for i in range(0, len(cells), in_line)], 2, 4)
        total = words(said, KEY, **FAINT).named("budget.sum")
        return panel(f"budget in step {step}", grid._replace(stops=()), total)

    def _table(self, step: int) -> Piece:
        """Each request in the step: what the rule goes by, what it runs, and what comes of it."""
        run, now = self.run, self.run.steps[step]
        rule = "to run = known − computed; the budget left shrinks from one request to the next"
        heads = [words(what, KEY, **FAINT) for what in COLUMNS]
        title = words(f"requests in step {step}", 12, **BOLD)._replace(wide=0).named("table")
        lines = [[words(""), title, *heads, words(rule, KEY, OUTCOME, 2, **FAINT)]]
        for name in run.lives:
            state, one = run.state(name, step), self.looks[name]
            fill = "solid" if "running" in state else "cached" if state == "waiting" else "free"
            chip = cell(23, 20, fill, one, name, "", BOLD, rx=3, stroke=one.colour)
            line = [chip.named(f"asked.{name}"), words(state).named(f"asked.{name}.state")]
            if run.share(name, step) is not None:
                request, event = now.planned.requests[name], now.scheduled.get(name)
                known, computed = len(request.token_ids), request.num_computed_tokens
                left, runs = run.budget_left(name, step), len(event.slots) if event else 0
                numbers = (known, computed, known - computed, left, runs or "–")
                for what, number in zip(COLUMNS, numbers, strict=True):
                    said = words(str(number), 12, **(BOLD if what == "runs" else {}))
                    line.append(said.named(f"asked.{name}.{what}"))
            else:
                line += [words("")] * len(COLUMNS)
            lines.append([*line, self.outcome(name, step)])
        least = (23, 128, 38, 57, 36, 67, 30, OUTCOME)
        across = (0, 0, *[0.5] * len(COLUMNS))
        whole = table(lines, 18, 0, least, self.line, across=across)
        return panel("", whole)

    def _cache(self, step: int) -> Piece:
        """The rows of the static cache: whose they are, what is filled, what this step writes."""
        run, now, lines = self.run, self.run.steps[step], list[list[Piece]]()
        holders = {r.table[0]: name for name, r in now.planned.requests.items() if r.table}
        for at in range(run.max_num_seqs):
            who = holders.get(at, "")
            letters = words(who, 13, fill=self.looks[who].ink, **BOLD) if who else words("", 13)
            slots, said = self._slots(step, at, who)
            lead = [
                words(f"row {at}", 11, **FAINT).named(f"row{at}"),
                letters.named(f"row{at}.who"),
            ]
            lines.append([row(*lead), slots, words(said, 11, **FAINT).named(f"row{at}.n")])
        title = words(
            f"cache: {counted(run.max_num_seqs, 'row')} of {run.max_len} slots", 12, **BOLD
        )
        note = words("thick = written now · hatched = reserved, empty", 11, **FAINT)
        return panel(column(title.named("slots"), note, gap=0), table(lines, 8, 4, (58, 0, 112)))

    def _slots(self, step: int, at: int, who: str) -> tuple[Piece, str]:
        """A row of the cache, slot by slot, and how full it is."""
        run, now, size = self.run, self.run.steps[step], self.run.max_len
        wide, base, name = min(18.0, CACHE / size), at * size, f"row{at}"
        if not who:
            free = cell(wide * size, 16, "free", tip=f"row {at} is nobody's", rx=0)
            return free.named(f"{name}.free"), "free"
        event = now.scheduled.get(who)
        new = event.slots if event else ()
        slots = (*now.planned.requests[who].slots, *new)
        used, thin = len(slots), Style(stroke_width=0.8, rx=0)

        def draw(sheet: Sheet, _: str, x: float, y: float) -> None:
            for i, slot in enumerate(slots):
                tip = f"slot {slot}: K and V of token {i} of {who}, “{run.label(who, i)}”"
                box = (x + wide * (slot - base), y, wide, 16.0)
                state = "solid" if slot in new else "cached"
                sheet.cell(f"slot{slot}", box, state, self.looks[who], tip, **thin)
            if used < size:
                tip = f"slots {base + used} to {base + size - 1}: reserved for {who}, empty"
                rest = (x + wide * used, y, wide * (size - used), 16.0)
                sheet.cell(f"{name}.empty", rest, "reserved", tip=tip, **thin)
                ticks = "".join(f"M{x + wide * i:.1f} {y}v16" for i in range(used + 1, size))
                sheet.add(f"{name}.ticks", "path", d=ticks, stroke=RULE, stroke_width=0.8)
            if new:
                sheet.outline(f"{name}.new", (x + wide * (new[0] - base), y, wide * len(new), 16))

        freed = ", then free" * (who in run.ended(step))
        return Piece(wide * size, 16, draw), f"{used} of {size}{freed}"

    # -- tokens -------------------------------------------------------------------------------

    def _tokens(self, sheet: Sheet, step: int) -> Piece:
        """Prompt and output of every request, and how far they are computed."""
        first = next(iter(self.looks.values()))
        marks = {said: sheet.sample(state, first, rx=3) for state, said, _ in STATES.values()}
        marks["end of the prompt"] = lambda name, box: sheet.rect(
            name, (box[0] + 8, box[1] - 2, 2, 18), INK
        )
        key = Piece(900, 16, lambda sheet, _, x, y: sheet.legend(x + 62, y - 10, marks, gap=20))
        each = [panel("", self._text(who, step)) for who in self.run.lives]
        pairs = table([each[i : i + 2] for i in range(0, len(each), 2)], 40, 8, align=0)
        title = panel("", words("tokens", 12, **BOLD).named("tokens"))
        return column(title, key._replace(tall=0), pairs)

    def _text(self, who: str, step: int) -> Piece:
        """The tokens of one request that are known by the end of the step, in lines."""
        run, life = self.run, self.run.lives[who]
        kinds = run.token_kinds(who, step) if who in run.steps[step].planned.requests else []
        lines, room = [list[Piece]()], TOKENS
        for i in range(len(run.tokens[who])):  # all that it will ever have: stepping moves none
            label = cut_to(run.label(who, i), 90, 11, bold=True)
            wide = max(16.0, text_width(label, 11, bold=True) + 8)
            if room < wide:
                lines, room = [*lines, []], TOKENS
            room -= wide + 3 + 6 * (i == life.num_prompt_tokens - 1)
            lines[-1].append(self._token(who, i, kinds[i] if i < len(kinds) else "", label, wide))
        letters = name_in(LETTER - 6, who, 15, fill=self.looks[who].colour)
        text = column(*(row(*line, gap=3) for line in lines), gap=4)._replace(wide=TOKENS)
        if not kinds:
            late = words(f"comes before step {run.came(who)}", 11, **FAINT)
            text = late._replace(wide=text.wide, tall=text.tall)
        return row(letters, text, gap=6, align=0)

    def _token(self, who: str, i: int, kind: str, label: str, wide: float) -> Piece:
        """A token in the state that a step leaves it in; nothing where it is not there yet."""
        is_last = i == self.run.lives[who].num_prompt_tokens - 1
        if not kind:
            return Piece(wide + 6 * is_last, 22, lambda *_: None)
        name, (state, _, said) = f"token.{who}.{i}", STATES[kind]
        part = "prompt" if i < self.run.lives[who].num_prompt_tokens else "output"
        about = f"“{self.run.label(who, i)}”, id {self.run.tokens[who][i]}; {said}"
        letters = BOLD if kind in ("run", "sampled") else FAINT if kind == "gone" else {}
        tip, one = f"{who}, position {i} ({part}): {about}", self.looks[who]
        token = cell(wide, 20, state, one, label, tip, letters, rx=3).named(name)
        end = Piece(2, 22, lambda sheet, _, x, y: sheet.rect(f"{name}.end", (x, y, 2, 22), INK))
        return row(token, end, gap=4) if is_last else token


def _dot(sheet: Sheet, name: str, x: float, y: float) -> None:
    sheet.add(name, "circle", cx=x, cy=y, r=3.5, fill=INK)


def _activity(sheet: Sheet, name: str, box: Box, kind: str, one: Look, tip: str = "") -> None:
    """The box of one kind of activity: readable without its colour."""
    x, y, w, h = box
    if kind in ("waits", "arrives"):
        fill = PILL if kind == "waits" else PAPER
        sheet.rect(name, (x, y + h / 2 - 6, w, 13), fill, tip, rx=5, stroke=RULE)
    elif kind == "stalls":
        sheet.cell(name, box, "known", one, tip, rx=3, stroke_dasharray="4 3")
    elif kind == "preempted":
        sheet.cell(name, box, "reserved", one, tip, rx=3, stroke=one.colour)
    else:
        sheet.cell(name, box, "solid" if kind == "decode" else "cached", one, tip, rx=3)
