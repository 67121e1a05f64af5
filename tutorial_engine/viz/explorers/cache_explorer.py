"""The cache explorer: rows of slots filling, one forward a step.

Draws what cache_steps recorded of the engine.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.flow import (
    Piece,
    bar,
    cell,
    column,
    panel,
    row,
    show,
    table,
    who,
    words,
)
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, FAINT, GREY, MARGIN, WIDTH, Sheet
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import BLUE, RED
from tutorial_engine.viz.explorers.explorer import Explorer, number, text
from tutorial_engine.viz.run.cache_steps import NAMES, CacheRun, record_run
from tutorial_engine.viz.words import percent, tokens

MAX_ROWS, MAX_SLOTS = 3, 24  # rows, and slots in each; more would not be readable


class CacheExplorer(Explorer):
    """Watch the rows of a static cache fill: slot = row · row length + position.

    `prompts` are the requests A, B and C (one to three). ValueError for what cannot be shown.
    """

    title = "Cache explorer"

    def __init__(
        self,
        model: CausalLM,
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
        now = "nothing has run yet"
        if forward:
            kind, ran = forward.kind, tokens(forward.num_tokens)
            now = f"{kind}: {ran} in this forward"
        sheet = Sheet(WIDTH, 0)
        sheet.heading(f"step {step} of {len(run.steps)} · {now}")
        what = "a cell is a slot: K and V of one token in all layers, {each:,} bytes"
        what = what.format(each=run.spec.bytes_per_token)
        sheet.note("what", MARGIN, 44, what, 12)
        sheet.keys.append((MARGIN - 2, 30, text_width(what, 12) + 10, 20))
        marks = {
            "written in this step": sheet.sample("written", GREY),
            "in the cache": sheet.sample("cached", GREY),
            "reserved, not used": sheet.sample("reserved"),
        }
        sheet.legend(560, 44, marks)
        slot = f"slot = row · {run.row_len} + position"
        heads = ["", "runs tokens", "at position", slot]
        heads += ["each reads slots", "likeliest next token"]
        asked: list[list[Piece | str]] = [[words(head, **BOLD) for head in heads]]
        asked += [[who(NAMES[i], look(i)), *self._asked(step, i)] for i in range(run.num_rows)]
        rows = table([self._row(step, i) for i in range(run.num_rows)], 3, 14)
        body = column(
            panel("", rows),
            panel("", table(asked, 10, 0, (32, 126, 118, 220, 150, 273), 30)),
            self._account(step),
            gap=26,
        )
        return show(sheet, body, 66, "hover over a slot or a bar to read what it holds")

    def _row(self, step: int, of: int) -> list[Piece]:
        """A row: tokens in their slots, positions above them, the slots' numbers below."""
        run, name, colours = self.run, NAMES[of], look(of)
        lead = column(
            words("position", 11, **FAINT),
            row(who(name, colours), words(f"row {of}", 11, **FAINT)),
            words("slot", 11, **BOLD),
            gap=8,
            across=1,
        )
        lead = lead._replace(wide=lead.wide + 6)
        wide, pieces = (WIDTH - 2 * MARGIN - lead.wide) / run.row_len - 3, [lead]
        for position in range(run.row_len):
            slot = of * run.row_len + position
            stored = run.stored.get(slot)
            if stored is None or stored.step > step:
                state, label = "reserved", ""
                tip = f"slot {slot}: reserved for {name}, not written yet"
            else:
                state = "written" if stored.step == step else "cached"
                label = run.labels[stored.token]
                tip = (
                    f"slot {slot}: K and V of “{label}” of {name}, at position "
                    f"{stored.position}, written in step {stored.step} "
                    f"({run.steps[stored.step - 1].kind})"
                )
            box = cell(wide, 28, state, colours, label, tip).named(f"slot{slot}")
            above, below = (
                words(str(number), 11, **(BOLD if state == "written" else FAINT))
                for number in (position, slot)
            )
            pieces.append(column(above, box, below, gap=3, across=0.5))
        return pieces

    def _asked(self, step: int, of: int) -> list[Piece | str]:
        """What runs of a request: tokens, positions, the sum that gives the slot, reads."""
        run, forward = self.run, self.run.steps[step - 1] if step else None
        part = forward.parts.get(of) if forward else None
        if forward is None or part is None:
            return [words(self._idle(step, of), 12, 260, 2, **FAINT)._replace(wide=0)]
        (first, count), at = part.reads, part.positions
        label = cut_to(run.labels[part.ids[-1]], 70, 12.5, keep=True)
        said = run.sum_of(of, at[-1])
        reads = f"{first} to {first + count - 1}"
        runs, where = f"1, “{label}”", f"{at[0]}"
        if len(at) > 1:
            runs = f"{len(at)}, last “{label}”"
            where = f"{at[0]} to {at[-1]}"
            said, reads = f"last: {said}", f"{first} to its own"
        reads = reads if count > 1 else f"{first}"
        shown: list[Piece | str] = [runs, where, words(said, 12.5, **BOLD), reads]
        best = forward.best.get(of)
        if not best:
            return [*shown, words("not asked for: more of the prompt follows", 11, **FAINT)]
        token, p = best[0]
        likely = " · ".join(f"{run.labels[t]} {percent(q)}" for t, q in best)
        tip = f"next: {likely}"
        next_token = f"{percent(p)} “{cut_to(run.labels[token], 90, 12, keep=True)}”"
        return [*shown, row(bar(p, 110, BLUE, tip), words(next_token))]

    def _idle(self, step: int, of: int) -> str:
        """Why a request does not run in this step."""
        if step == 0:
            count = len(self.tokenizer.encode(self.value(NAMES[of])).ids)
            wait = "{tokens} of the prompt waits" if count == 1 else "{tokens} of the prompt wait"
            return wait.format(tokens=tokens(count))
        if self.run.steps[step - 1].kind == "decode":
            return "has ended: the model chose its end-of-text token"
        return "waits: its prompt is in the cache, and others still run theirs"

    def _account(self, step: int) -> Piece:
        """Work and memory so far, as bars: tokens run with and without a cache, bytes in use."""
        run, kib = self.run, self.run.spec.bytes_per_token / 1024
        (used, again), (_, total) = run.tokens_run(step), run.tokens_run(len(run.steps))
        facts = (
            ("tokens run", used / total, BLUE, f"{used}"),
            ("without a cache", again / total, RED, f"{again}"),
            ("cache in use", used / run.num_slots, BLUE, f"{used * kib:.0f} KiB"),
            ("cache reserved", 1.0, "", f"{run.num_slots * kib:.0f} KiB"),
        )
        lines = []
        for i, (name, share, ink, said) in enumerate(facts):
            shown = bar(1, 210 * share, ink) if ink else cell(210 * share, 13, "reserved", rx=0)
            label = words(said, 11.5).named(f"sum{i}.n")
            lines.append([words(name, 11, **FAINT), row(shown, label)])
        left, right = (table(lines[i : i + 2], 8, 4, (92, 290), across=[1]) for i in (0, 2))
        return row(panel("so far", left), panel("", right), gap=100, align=1)
