"""A run of the scheduler as a picture: the timeline, and one step.

What there is to say comes from scheduler_steps.
"""

from functools import partial
from itertools import zip_longest
from typing import Any

from tutorial_engine.viz.flow import Piece, cell, column, over, panel, row, show, table, words
from tutorial_engine.viz.parts import (
    BOLD,
    DEAF,
    FAINT,
    KEY,
    MARGIN,
    WIDTH,
    Grid,
    Mark,
    Sheet,
    Style,
)
from tutorial_engine.viz.request_look import Box, Look, cut_to, look, text_width
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.style import INK, PAPER, RULE
from tutorial_engine.viz.words import counted, tokens

LETTER, END = 34.0, 104.0  # a request's name; right of the last step, for how it ended
NARROWEST, WIDEST, WORDY = 19.0, 66.0, 49.0  # a step; from WORDY on, boxes have words
MAX_CELLS = 128  # of the budget
MAX_ROWS, MAX_LEN = 64, 10_000  # of the cache: more would be drawn for minutes, and not be seen
BUDGET, CACHE = 420.0, 356.0  # widths of the budget and of the cache's rows
COLUMNS = ("known", "computed", "to run", "budget left", "runs")  # of the table
OUTCOME, THIRD = 375.0, 312.0  # widths of what comes of a request, and of a third of a line
PILL, OVER = "#e9edf0", "#D55E00"  # OVER: what a wrong rule runs beyond the budget
ACTIVITIES = {  # kind -> in the key
    "arrives": "arrives",
    "waits": "waits",
    "prefill": "prefill",
    "decode": "decode",
    "stalls": "stalls: admitted, runs nothing",
}
TOKENS = {  # kind -> state of its cell, in the key, in tips
    "cached": ("cached", "in the cache", "its K and V are in the cache"),
    "run": ("written", "runs in this step", "runs in this step, which writes its K and V"),
    "known": ("known", "not run yet", "not run yet"),
    "sampled": ("sampled", "new from this step", "sampled by this step, not run yet"),
    "gone": ("gone", "finished, row freed", "its request is over"),
}

BLANK = words("")
PROMPT_END = Piece(2, 22, lambda sheet, name, x, y: sheet.rect(name, (x, y, 2, 22), INK, **DEAF))


def name_in(room: float, name: str, size: float, **style: Any) -> Piece:
    """A request's name in so many pixels: with smaller letters, then cut."""
    size = size if text_width(name, size, bold=True) <= room else min(size, 9.0)
    return words(cut_to(name, room, size, bold=True, keep=True), size, **style)


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
        self.seen = {share.kind for share in shares}
        self.seen |= {"arrives"} if any(map(run.came, run.lives)) else set()
        widest = max(text_width(self.words(share.kind, share.num_tokens), 1) for share in shares)
        self.size = min(11.0, (self.pitch - 5) / widest)  # of the words in boxes, one for all
        fullest = max(step.num_tokens for step in run.steps)  # a wrong rule may overdraw the budget
        self.cells = min(max(run.budget, fullest), MAX_CELLS)
        self.outcomes = {
            (name, step): words(run.outcome(name, step), 12, OUTCOME, 2)
            for name in run.lives
            for step in range(columns)
        }
        self.boxes = {name: [self._box(name, at) for at in range(columns)] for name in run.lives}
        self.thirds = {who: self._thirds(who) for who in run.tokens}

    def _thirds(self, who: str) -> list[list[tuple[int, str, float]]]:
        """All tokens that a request will ever have, in thirds of lines: number, label, width."""
        thirds, room = [list[tuple[int, str, float]]()], THIRD
        for i in range(len(self.run.tokens[who])):
            label = cut_to(self.run.label(who, i), 90, KEY, bold=True)
            wide = max(16.0, text_width(label, KEY, bold=True) + 8)
            if room < wide:
                thirds, room = [*thirds, []], THIRD
            thirds[-1].append((i, label, wide))
            room -= wide + (9 if i == self.run.lives[who].num_prompt_tokens - 1 else 3)
        return thirds

    def words(self, kind: str, count: int) -> str:
        """What stands in a box: the number of tokens alone where boxes are narrow."""
        return f"{kind} {count or ''}".strip() if self.pitch >= WORDY else str(count or "")

    def scene(self, step: int) -> Sheet:
        """The timeline on top; budget and requests of the step; then, if asked for, the details."""
        run, now, sheet = self.run, self.run.steps[step], Sheet(WIDTH, 0)
        ran = f"one forward runs {now.num_tokens} of at most {tokens(run.budget)}"
        limits = f"{run.policy} · budget {run.budget} · max_num_seqs {run.max_num_seqs}"
        sheet.heading(f"step {step} of {run.last} · {ran}", limits)
        note, one = "numbers = tokens run in that step", next(iter(self.looks.values()))
        sheet.note("numbers", MARGIN, 48, note)
        sheet.keys.append((MARGIN - 2, 34, text_width(note, KEY) + 14, 22))
        marks: dict[str, Mark] = {
            said: partial(_activity, sheet, kind=kind, one=one)
            for kind, said in ACTIVITIES.items()
            if kind in self.seen
        }
        marks["first token"] = lambda name, box: _dot(sheet, name, box[0] + 9, box[1] + 6)
        sheet.legend(34 + text_width(note, KEY), 49, marks, gap=18)
        parts = [self._timeline(step), self._budget(step), self._table(step)]
        if self.details:
            parts += [self._cache(step), self._tokens(sheet, step)]
        return show(sheet, column(*parts, gap=15), 61, "hover over a box to read its numbers")

    def _timeline(self, step: int) -> Piece:
        """A row per request, a column per step, and the cursor; if need be, those around it."""
        run, pitch = self.run, self.pitch
        first = min(max(step - self.shown // 2, 0), run.last + 1 - self.shown)
        window, lines = range(first, first + self.shown), list[list[Piece]]()
        for name, life in run.lives.items():
            letters = name_in(LETTER - 6, name, 16, fill=self.looks[name].colour, **BOLD)
            line = [letters.named(f"line.{name}"), *self.boxes[name][first : window[-1] + 1]]
            if life.end_step is not None and life.end_step <= window[-1]:
                end = words(life.ending.split(" · ")[0], KEY, **FAINT)  # the table says why
                at = life.end_step + 1 - first if end.wide + 10 <= pitch else self.shown
                line[at + 1 :] = [row(BLANK, end.named(f"end.{name}"), gap=5)]
            lines.append(line)
        numbers = []
        for at in window:
            said = f"step {at}" if pitch >= WORDY else str(at)
            style = BOLD if at == step else FAINT
            numbers.append(words(said, KEY, **style).named(f"step{at}"))
        lines.append([words("" if pitch >= WORDY else "step", KEY, **FAINT), *numbers])
        least = (LETTER - 3, *[pitch - 3] * self.shown, END - 10)
        whole = table(lines, 3, 6, least, across=(0, *[0.5] * self.shown))
        left = whole.stops[step - first]

        def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
            whole.draw(sheet, name, x, y + 5)
            box = (x + left - 0.5, y, pitch + 1, whole.tall + 8)
            sheet.outline("cursor", box, rx=4, stroke_width=2.2)

        return panel("", whole._replace(tall=whole.tall + 8, draw=draw), around=left + pitch / 2)

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

        def draw(sheet: Sheet, own: str, x: float, y: float) -> None:
            box = (x, y, self.pitch - 3, 26.0)
            if kind:
                _activity(sheet, own, box, kind, one, tip)
            if said:
                sheet.inside(f"{own}.n", box, said, self.size, **(FAINT if kind == "waits" else {}))
            if run.first_token(name) == step:
                _dot(sheet, f"{own}.first", x + self.pitch - 5, y + 1)

        return Piece(self.pitch - 3, 26, draw).named(f"cell.{name}.{step}")

    def _budget(self, step: int) -> Piece:
        """One cell per token that the step may run, filled by those that it does run."""
        run, now, cells = self.run, self.run.steps[step], list[Piece]()
        in_line = next(count for count in (16, 24, 32) if self.cells <= count * count / 8)
        wide = min(30.0, BUDGET / min(self.cells, in_line)) - 2
        owners = [name for name, event in now.scheduled.items() for _ in event.slots]
        free = cell(wide, 22, "free", tip="free: nobody needs it")
        for i, who in zip_longest(range(self.cells), owners):
            one = free if who or i < run.budget else free._replace(draw=lambda *_: None)
            if who:
                share = run.share(who, step)
                more: Style = {"stroke": OVER, "stroke_width": 3} if i >= run.budget else {}
                state = "solid" if share is not None and share.kind == "decode" else "cached"
                one = cell(wide, 22, state, self.looks[who], "", run.ran(who, step), **more)
                if wide >= 12 or i == owners.index(who):
                    one = over(one, name_in(wide, who, KEY, **DEAF))
            cells.append(one.named(f"budget{i}"))
        parts = " + ".join(f"{name} {len(event.slots)}" for name, event in now.scheduled.items())
        said = f"{parts} = {now.num_tokens} of {run.budget} tokens"
        said += f" · {run.budget - self.cells} more are not drawn" * (self.cells < run.budget)
        said += f" · {now.num_tokens - run.budget} over the budget" * (now.num_tokens > run.budget)
        grid = table([cells[i : i + in_line] for i in range(0, self.cells, in_line)], 2, 4)
        return _titled("budget", f"budget in step {step}", said, grid)

    def _table(self, step: int) -> Piece:
        """Each request in the step: what the rule goes by, what it runs, and what comes of it."""
        run, now = self.run, self.run.steps[step]
        rule = "to run = known − computed; budget left = what was left when its turn came"
        lines: list[list[Piece]] = [[BLANK] * 2 + [words(what, KEY, **FAINT) for what in COLUMNS]]
        for name in run.lives:
            state, one = run.state(name, step), self.looks[name]
            fill = "solid" if "running" in state else "cached" if state == "waiting" else "free"
            chip = cell(23, 20, fill, one, rx=3, stroke=one.colour)
            line = [over(chip, name_in(23, name, 11.5, **BOLD, **DEAF)).named(f"asked.{name}")]
            line.append(words(state).named(f"asked.{name}.state"))
            numbers = [BLANK] * len(COLUMNS)
            if run.share(name, step) is not None:
                request, event = now.planned.requests[name], now.scheduled.get(name)
                known, computed = len(request.token_ids), request.num_computed_tokens
                left, runs = run.budget_left(name, step), len(event.slots) if event else 0
                shown = known, computed, known - computed, left
                numbers = [words(str(number)) for number in shown]
                numbers.append(words(str(runs or "–"), **BOLD))
            told = zip(COLUMNS, numbers, strict=True)
            line += (number.named(f"asked.{name}.{what}") for what, number in told)
            lines.append([*line, self.outcomes[name, step].named(f"asked.{name}.outcome")])
        wide = max(said.wide for said in self.outcomes.values())
        tall = max(said.tall for said in self.outcomes.values())
        least = (23, 108, 36, 56, 33, 61, 28, wide)
        whole = table(lines, 12, 0, least, max(27, tall), across=(0, 0, *[0.5] * len(COLUMNS)))
        return _titled("table", f"requests in step {step}", rule, whole)

    def _cache(self, step: int) -> Piece:
        """The rows of the static cache: whose they are, what is filled, what this step writes."""
        run, lines = self.run, list[list[Piece]]()
        holders = {r.table[0]: w for w, r in run.steps[step].planned.requests.items() if r.table}
        for i in range(run.max_num_seqs):
            who = holders.get(i, "")
            said, slots = self._slots(step, i, who)
            ink = self.looks[who].ink if who else INK
            lead = row(words(f"row {i}", KEY, **FAINT), words(who, 13, fill=ink, **BOLD), gap=12)
            lines.append([lead, slots, words(said, KEY, **FAINT).named(f"row{i}.n")])
        title = f"cache: {counted(run.max_num_seqs, 'row')} of {run.max_len} slots"
        note = "thick = written now · hatched = reserved, empty"
        return _titled("slots", title, note, table(lines, 8, 6, (58, 0, 112)))

    def _slots(self, step: int, at: int, who: str) -> tuple[str, Piece]:
        """A row slot by slot, and how full it is."""
        run, now, size = self.run, self.run.steps[step], self.run.max_len
        wide, base = min(18.0, CACHE / size), at * size
        if not who:
            return "free", cell(wide * size, 16, "free", tip=f"row {at} is nobody's", rx=0)
        event = now.scheduled.get(who)
        new = event.slots if event else ()
        slots = (*now.planned.requests[who].slots, *new)
        used, thin, one = len(slots), Style(stroke_width=0.8, rx=0), self.looks[who]

        def draw(sheet: Sheet, _: str, x: float, y: float) -> None:
            grid = Grid(x, y, wide, 16)
            for i, slot in enumerate(slots):
                tip = f"slot {slot}: K and V of token {i} of {who}, “{run.label(who, i)}”"
                state = "solid" if slot in new else "cached"
                sheet.cell(f"slot{slot}", grid.box(slot - base), state, one, tip, **thin)
            if used < size:
                tip = f"slots {base + used} to {base + size - 1}: reserved for {who}, empty"
                rest = grid.box(used, size - used)
                sheet.cell(f"row{at}.empty", rest, "reserved", tip=tip, **thin)
                ticks = "".join(f"M{grid.box(i)[0]:.1f} {y}v16" for i in range(used + 1, size))
                sheet.add(f"row{at}.ticks", "path", d=ticks, stroke=RULE, stroke_width=0.8, **DEAF)
            if new:
                sheet.outline(f"row{at}.new", grid.box(new[0] - base, len(new)))

        freed = ", then free" * (who in run.ended(step))
        return f"{used} of {size}{freed}", Piece(wide * size, 16, draw)

    def _tokens(self, sheet: Sheet, step: int) -> Piece:
        """Prompt and output of every request, and how far they are computed."""
        run, first = self.run, next(iter(self.looks.values()))
        marks = {said: sheet.sample(state, first, rx=3) for state, said, _ in TOKENS.values()}
        marks["end of the prompt"] = lambda name, box: sheet.rect(
            name, (box[0] + 8, box[1] - 2, 2, 18), INK
        )
        key = Piece(0, 16, lambda sheet, _, x, y: sheet.legend(x, y + 12, marks, gap=20))
        lines = []
        for who, thirds in self.thirds.items():
            name = name_in(LETTER - 6, who, 15, fill=self.looks[who].colour, **BOLD)
            is_known = who in run.steps[step].planned.requests
            kinds = run.token_kinds(who, step) if is_known else []
            rows = ([self._token(who, *each, kinds) for each in third] for third in thirds)
            parts = [row(*each, gap=3) for each in rows]
            if not is_known:
                late = words(f"comes before step {run.came(who)}", KEY, **FAINT)
                parts[0] = over(parts[0], late, across=0)
            for i in range(0, len(parts), 3):
                lead = (BLANK if i else name)._replace(wide=LETTER - 6)
                parts[i] = row(lead, parts[i], gap=6)
                lines.append(row(*(panel("", part) for part in parts[i : i + 3]), gap=5))
        title = row(panel("", words("tokens", 12, **BOLD)), key, gap=14)
        return column(title, *lines)

    def _token(self, who: str, i: int, label: str, wide: float, kinds: list[str]) -> Piece:
        """A token in the state that the step leaves it in; its place where it is not known yet."""
        num_prompt = self.run.lives[who].num_prompt_tokens
        if i >= len(kinds):
            return Piece(wide, 22, lambda *_: None)
        (state, _, said), token = TOKENS[kinds[i]], self.run.tokens[who][i]
        part = "prompt" if i < num_prompt else "output"
        tip = f"{who}, position {i} ({part}): “{self.run.label(who, i)}”, id {token}; {said}"
        style = {"run": BOLD, "sampled": BOLD, "gone": FAINT}.get(kinds[i], {})
        box = cell(wide, 20, state, self.looks[who], "", tip, rx=3)
        one = over(box, words(label, KEY, **style, **DEAF))
        return row(one, PROMPT_END, gap=4) if i == num_prompt - 1 else one


def _titled(name: str, title: str, note: str, body: Piece) -> Piece:
    """A part with a title, and what is to be known of it in the same line, on a phone below it."""
    told = words(title, 12, **BOLD).named(name), words(note, KEY, **FAINT).named(f"{name}.note")
    return column(row(*(panel("", each) for each in told), gap=20, align=1), panel("", body))


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
