"""Introduced in notebook 03. The scheduler explorer's picture: a run, and one step of it.

Knows places and colours; what there is to say comes from scheduler_steps.
"""

from tutorial_engine.viz.request_look import Box, Look, look, text_width
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.scheduler_panels import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    LEFT,
    QUEUE,
    RIGHT,
    WIDTH,
    budget_lines,
    draw_budget,
    draw_cache,
    draw_queues,
    draw_tokens,
    fact_lines,
    lay_tokens,
    tokens_height,
)
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.style import INK, PAPER, RULE

END = 104.0  # right of the last step, for "finished · length"
TOP, ROW, BOX = 66.0, 32.0, 26.0  # where the timeline begins, a row of it, a box in a row
NARROWEST, WIDEST, WORDY = 19.0, 66.0, 49.0  # a step; from WORDY on, boxes have words
PILL = "#e9edf0"
KEYS = {
    "arrives": "arrives",
    "waits": "waits",
    "prefill": "prefill",
    "decode": "decode",
    "stalls": "stalls: admitted, runs nothing",
}


class SchedulerView:
    """Draws the steps of one run. What is the same at every step is laid out once."""

    def __init__(self, run: SchedulerRun) -> None:
        self.run = run
        self.looks: dict[str, Look] = {name: look(i) for i, name in enumerate(run.lives)}
        self.chips = lay_tokens(run)
        columns = run.last + 1
        room = WIDTH - LEFT - END
        self.pitch = min(WIDEST, max(NARROWEST, room / columns))
        self.shown = min(columns, int(room / self.pitch + 1e-6))  # steps that are seen at once
        shares = [share for life in run.lives.values() for share in life.shares.values()]
        words = {self._words(share.kind, share.num_tokens) for share in shares}
        widest = max(text_width(each, 1) for each in words)
        self.size = min(11.0, (self.pitch - 5) / widest)  # of the words in boxes, one for all
        self.middle = TOP + ROW * len(run.lives) + 46
        self.cache = self.middle + 26 * budget_lines(run)[0] + 50
        facts = max(len(fact_lines(run, step)) for step in range(columns))
        queues = self.middle + 26 + QUEUE * 4 + 22 + 16 * facts
        self.tokens = max(self.cache + 22 * run.max_num_seqs + 36, queues + 12)
        self.floor = self.tokens + 24 + sum(map(tokens_height, self.chips.values()))

    def scene(self, step: int) -> Scene:
        """The timeline on top; budget, cache and queues below it; then all tokens."""
        scene = Scene(WIDTH, self.floor + 14, tip_at=(10, self.floor + 6))
        scene.hint = "hover over a box, a slot or a token to read its numbers"
        self._head(scene, step)
        self._timeline(scene, step)
        draw_budget(scene, self.run, self.looks, step, self.middle)
        draw_cache(scene, self.run, self.looks, step, self.cache)
        draw_queues(scene, self.run, self.looks, step, self.middle)
        draw_tokens(scene, self.run, self.looks, step, self.tokens, self.chips)
        return scene

    def _head(self, scene: Scene, step: int) -> None:
        run = self.run
        now = f"{run.steps[step].num_tokens} of {run.budget} budget tokens in one forward"
        scene.text("title", 10, 22, f"step {step} of 0–{run.last} · {now}", 15, **BOLD)
        limits = f"{run.policy} · budget {run.budget} · max_num_seqs {run.max_num_seqs}"
        scene.text("policy", WIDTH - 10, 22, limits, 12, **RIGHT, **FAINT)
        note = "numbers = tokens run in that step"
        scene.text("key", 10, 48, note, 11, **FAINT)
        x, one = 34 + text_width(note, 11), next(iter(self.looks.values()))
        for kind, words in KEYS.items():
            _box(scene, f"key.{kind}", kind, (x, 38, 18, 12), one, "")
            scene.text(f"key.{kind}1", x + 24, 48, words, 11, **FAINT)
            x += 42 + text_width(words, 11)
        scene.add("key.first", "circle", cx=x + 9, cy=44, r=3.5, fill=INK)
        scene.text("key.first1", x + 20, 48, "first token", 11, **FAINT)

    def _window(self, step: int) -> range:
        """The steps that are seen: all, or those around the cursor."""
        first = min(max(step - self.shown // 2, 0), self.run.last + 1 - self.shown)
        return range(first, first + self.shown)

    def _timeline(self, scene: Scene, step: int) -> None:
        """A row per request, a column per step, and the cursor."""
        run, window, pitch = self.run, self._window(step), self.pitch
        bottom, right = TOP + ROW * len(run.lives), LEFT + self.shown * pitch
        for row, (name, life) in enumerate(run.lives.items()):
            y = TOP + row * ROW
            scene.text(f"line.{name}", 14, y + 19, name, 16, fill=self.looks[name].colour, **BOLD)
            for i, column in enumerate(window):
                self._cell(scene, name, column, (LEFT + i * pitch + 1.5, y, pitch - 3, BOX))
            if life.end_step is not None and life.end_step <= window[-1]:
                scene.text(f"end.{name}", right + 6, y + 17, life.ending, 10.5, **FAINT)
        for i, column in enumerate(window):
            style = {**CENTRE, **(BOLD if column == step else FAINT)}
            words = f"step {column}" if pitch >= WORDY else str(column)
            scene.text(f"step{column}", LEFT + (i + 0.5) * pitch, bottom + 11, words, 10, **style)
        if pitch < WORDY:
            scene.text("step", LEFT - 8, bottom + 11, "step", 10, **RIGHT, **FAINT)
        box = (LEFT + (step - window[0]) * pitch - 0.5, TOP - 5, pitch + 1, bottom - TOP + 21)
        scene.rect("cursor", box, "none", rx=4, stroke=INK, stroke_width=2.2, **DEAF)

    def _words(self, kind: str, count: int) -> str:
        """What stands in a box: the number of tokens alone where boxes are narrow."""
        return f"{kind} {count or ''}".strip() if self.pitch >= WORDY else str(count or "")

    def _cell(self, scene: Scene, name: str, step: int, box: Box) -> None:
        """What a step did with a request, as a box; the words as they fit."""
        run, share, (x, y, w, _) = self.run, self.run.share(name, step), box
        kind, cell = share.kind if share is not None else "arrives", f"cell.{name}.{step}"
        if share is None and step != run.came(name) - 1:
            return
        count = share.num_tokens if share is not None else 0
        tip = f"{name} {kind} after step {step}" if share is None else f"step {step}: {name} {kind}"
        if share is not None and count:
            slots, last = run.steps[step].scheduled[name].slots, share.first_position + count - 1
            tip = (
                f"step {step}: {run.ran(name, step)}; positions {share.first_position} to {last}, "
                f"slots {slots[0]} to {slots[-1]}"
            )
        _box(scene, cell, kind, box, self.looks[name], tip)
        style = {**CENTRE, **DEAF, **(FAINT if kind in ("waits", "arrives") else {})}
        if words := self._words(kind, count):
            scene.text(f"{cell}.n", x + w / 2, y + 17, words, self.size, **style)
        if run.first_token(name) == step:
            scene.add(f"{cell}.first", "circle", cx=x + w - 2, cy=y + 1, r=3.5, fill=INK)


def _box(scene: Scene, name: str, kind: str, box: Box, one: Look, tip: str) -> None:
    """The box of one kind of activity: readable without its colour."""
    x, y, w, h = box
    if kind in ("waits", "arrives"):
        fill = PILL if kind == "waits" else PAPER
        scene.rect(name, (x, y + h / 2 - 6, w, 13), fill, tip, rx=5, stroke=RULE)
    elif kind == "stalls":
        scene.rect(name, box, PAPER, tip, rx=3, stroke=one.colour, stroke_dasharray="4 3")
    elif kind == "preempted":
        scene.rect(name, box, HATCHED, tip, rx=3, stroke=one.colour)
    else:
        fill = one.dark if kind == "decode" else one.light
        scene.rect(name, box, fill, tip, rx=3, stroke=one.colour)
