"""The two steps of an induction head, as the model took them.

Step 1, in an early layer: a token takes in which token stood before it. Step 2, in a later layer:
the last token finds the token that came after its own earlier place.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import BOLD, RIGHT, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Box, tint
from tutorial_engine.viz.drawing.style import BLUE, GREEN, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.run.attention_weights import look_inside
from tutorial_engine.viz.tokens import cut_label, token_names
from tutorial_engine.viz.words import numbered

LEFT, RIGHT_END = 84.0, 950.0  # of the row of tokens
TOKENS, STEP_1, STEP_2, TABLE = 40.0, 124.0, 208.0, 276.0  # where the rows of the picture begin
TALL = 28.0


class TwoSteps(NamedTuple):
    """One run of both steps, and one in which the heads of step 1 add nothing at `found`.

    `found` is the place that the head of step 2 looks at from the last token, `before` the place
    that the heads of step 1 look at from there. Shares and the probability of the token `found`.
    """

    before: int
    found: int
    first: float  # the mean of the heads of step 1
    second: float
    chance: float
    second_without: float
    chance_without: float


class _SilencedAt(NaiveAttention):
    """Attention in which some heads of a layer add nothing at one token."""

    def __init__(self, layer: int, heads: Sequence[int], token: int, **more: Any) -> None:
        super().__init__(**more)
        self.layer, self.heads, self.token = layer, list(heads), token

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == self.layer:
            out[self.token, self.heads] = 0
        return out


def recorded_two_steps(
    model: CausalLM,
    ids: Sequence[int],
    first: tuple[int, Sequence[int]],
    second: tuple[int, int],
) -> TwoSteps:
    """Run the ids with and without step 1. `first`: layer and heads, `second`: layer and head.

    ValueError when these heads do not take the two steps at the last of these ids.
    """
    look = look_inside(model, ids)
    found = int(look.weights[second][-1].argmax())
    row = look.weights[first[0], list(first[1]), found].mean(0)
    before = int(row.argmax())
    if before != found - 1 or ids[before] != ids[-1]:
        raise ValueError(
            f"step 2 looks from token {len(ids) - 1} at {found}, step 1 from there at {before}: "
            "these heads do not take the two steps here"
        )
    without = look_inside(model, ids, partial(_SilencedAt, *first, found))
    numbers = [
        float(number)
        for answer in (look, without)
        for number in (answer.weights[second][-1, found], answer.probs[-1, ids[found]])
    ]
    return TwoSteps(before, found, float(row.max()), *numbers)


def two_steps_picture(
    model: CausalLM,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    first: tuple[int, Sequence[int]],
    second: tuple[int, int],
) -> Picture:
    """Which way the last token's information takes; below, the same without step 1.

    `first`: layer and heads of step 1, `second`: layer and head of step 2.
    """
    run = recorded_two_steps(model, ids, first, second)
    names = token_names(tokenizer, ids)
    before, found, last = (f"“{cut_label(names[ids[i]])}”" for i in (run.before, run.found, -1))
    who = (
        f"layer {first[0]}, {numbered(first[1], 'head')}",
        f"layer {second[0]}, head {second[1]}",
    )
    sheet = Sheet(960, TABLE + 70)
    note = "arrow: from the token that is read to the one that reads; dashed: residual stream"
    sheet.heading("The two steps", note)
    rows = {"tokens": TOKENS, f"layer {first[0]}": STEP_1, f"layer {second[0]}": STEP_2}
    for name, y in rows.items():
        sheet.text(f"row.{y}", LEFT - 12, y + 18.5, name, 12.5, **RIGHT)
    middle = _tokens(sheet, run, [names[token] for token in ids])
    _ways(sheet, run, middle, f"{found} after {before}", f"what came after {last}?")
    left = middle[run.found] - middle[0]  # of what is said about step 1
    said = (
        (LEFT + left + 163, STEP_1 + 11, f"{found} takes in the {before} before it", run.first),
        (LEFT + left + 53, STEP_2 - 8, f"the last {last} finds it", run.second),
    )
    for step, (x, y, words, share) in enumerate(said, 1):
        sheet.text(f"step{step}.who", x, y, f"{step} · {who[step - 1]}:", 12.5, **BOLD)
        sheet.text(f"step{step}.words", x, y + 16, f"{words}, share {share:.2f}", 12.5)
    _with_and_without(sheet, run, found)
    return sheet.picture(
        f"Step 1: in {who[0]}, {found} gives {run.first:.2f} of its attention to the {before} "
        f"before it. Step 2: in {who[1]}, the last {last} gives {run.second:.2f} to that {found}, "
        f"and the model predicts {found} with probability {run.chance:.2f}; with the heads of step "
        f"1 silenced at this one token these are {run.second_without:.2f} and "
        f"{run.chance_without:.2f}."
    )


def _tokens(sheet: Sheet, run: TwoSteps, names: Sequence[str]) -> list[float]:
    """The row of tokens, those of the two steps in colour → the middle of each."""
    pitch, last = (RIGHT_END - LEFT) / len(names), len(names) - 1
    for i, name in enumerate(names):
        ink = {run.before: BLUE, run.found: GREEN, last: BLUE}.get(i)
        box = (LEFT + i * pitch + 1, TOKENS, pitch - 2, TALL)
        fill = tint(ink, 0.25) if ink else PAPER
        sheet.rect(f"token{i}", box, fill, rx=3, stroke=ink or RULE, stroke_width=1.8 if ink else 1)
        sheet.inside(f"token{i}.name", box, cut_to(name, pitch - 6, 12), 12)
    return [LEFT + (i + 0.5) * pitch for i in range(len(names))]


def _ways(sheet: Sheet, run: TwoSteps, middle: Sequence[float], held: str, asked: str) -> None:
    """The arrows of both steps, and the residual streams that they begin and end in."""
    taken = (LEFT + middle[run.found] - middle[0] + 1, STEP_1, 150.0, TALL)
    asking = (RIGHT_END - 150.0, STEP_2, 150.0, TALL)
    stream: Style = {"stroke": QUIET, "stroke_width": 1.4, "stroke_dasharray": "3 3"}
    low = TOKENS + TALL
    for i, end in ((run.found, STEP_1), (len(middle) - 1, STEP_2)):
        sheet.add(f"stream{i}", "line", x1=middle[i], y1=low, x2=middle[i], y2=end, **stream)
    _box(sheet, "taken", taken, GREEN, held)
    _box(sheet, "asking", asking, BLUE, asked)
    ways = ((middle[run.before], low, taken), (taken[0] + 40, STEP_1 + TALL, asking))
    for step, (x, y, box) in enumerate(ways, 1):
        across = box[1] + TALL / 2
        sheet.arrow(f"step{step}", [(x, y), (x, across), (box[0] - 2, across)], RED, 2.2)


def _with_and_without(sheet: Sheet, run: TwoSteps, found: str) -> None:
    """Bars: what step 2 finds and what the model predicts, with step 1 and without it."""
    runs = {
        "with step 1": (run.second, run.chance),
        f"without step 1 at this {found}": (run.second_without, run.chance_without),
    }
    columns = {"share of step 2": 300.0, f"probability of {found} as the next token": 600.0}
    for title, x in columns.items():
        sheet.note(title, x, TABLE, title, 12)
    for row, (name, values) in enumerate(runs.items()):
        y = TABLE + 8 + 26 * row
        sheet.text(f"run{row}", 286, y + 15, name, 12.5, **RIGHT)
        for x, value, ink in zip(columns.values(), values, (BLUE, GREEN), strict=True):
            sheet.bar(f"bar{row}.{x:g}", (x, y, 200, 20), value, ink)
            sheet.text(f"value{row}.{x:g}", x + 208, y + 15, f"{value:.2f}", 13, **BOLD)


def _box(sheet: Sheet, name: str, box: Box, ink: str, words: str) -> None:
    """What a token's vector holds, or asks for, on its way through the layers."""
    sheet.rect(name, box, tint(ink, 0.25), rx=3, stroke=ink, stroke_width=1.8)
    sheet.inside(f"{name}.words", box, cut_to(words, box[2] - 8, 12.5, keep=True), 12.5)
