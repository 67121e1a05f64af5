"""Where the cache holds what a text says: each cell replaced alone, and what is answered then.

A cell is K or V of one layer and K/V head, in the slots in which two texts differ. Knows
`lab.two_texts`, which replaces.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.viz.drawing.flow import words
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    CENTRE,
    DEAF,
    FAINT,
    GREY,
    MARGIN,
    RIGHT,
    SHADE,
    Grid,
    Sheet,
    shade,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Box, look
from tutorial_engine.viz.drawing.style import INK, PAPER
from tutorial_engine.viz.tokens import SPACE, token_labels, token_names
from tutorial_engine.viz.words import counted, listed

MAX_NAMED = 3  # tokens that differ
SHOWN = 3  # next tokens before a replacement and after it
WIDE, LEFT = 790.0, 114.0  # of the picture, and of the names in front of the grid
HIGH, LONGEST = 28.0, 120.0  # of a token's box
GAP = 42.0  # between K and V, where what is replaced is named
LONG = {"K": "keys", "V": "values"}
OWN, DONOR = look(0), look(1)  # of the first text, and of the second


class Cells(NamedTuple):
    """What is replaced: K, V or both ("k", "v", "kv") of these heads of a layer."""

    layer: int
    which: str
    heads: tuple[int, ...]


class Likely(NamedTuple):
    """Next tokens and their probabilities, the likeliest first."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]


def likely(probs: Tensor) -> Likely:
    """The likeliest of probabilities [V]."""
    top = probs.topk(min(SHOWN, len(probs)))
    return Likely(tuple(top.indices.tolist()), tuple(top.values.tolist()))


@dataclass(frozen=True)
class Fact:
    """Two texts, each cell replaced alone, and how all of it is called.

    `cells` [layers, heads, 2]: P of the second text's answer; `before`: nothing is replaced.
    """

    two: TwoTexts
    tokenizer: Tokenizer
    cells: Tensor
    before: Likely

    @property
    def slot_words(self) -> tuple[str, str]:
        """The tokens that differ, in each text: “France” and “Italy”."""
        slots = self.two.slots
        if len(slots) > MAX_NAMED:
            return f"these {len(slots)} tokens", "the other text"
        first, other = (listed(self.name(ids[i]) for i in slots) for ids in self.two.ids)
        return first, other

    def bare(self, token: int) -> str:
        """A token in a title."""
        return plain(token_names(self.tokenizer, [token])[token])

    def name(self, token: int) -> str:
        """A token in a sentence."""
        return f"“{self.bare(token)}”"

    @property
    def wanted(self) -> str:
        """The second text's answer."""
        return self.name(self.two.answers[1])

    def numbers(self, num_cells: int) -> int:
        """Numbers that so many cells hold."""
        return num_cells * self.two.model.config.head_dim * len(self.two.slots)

    def numbers_of(self, chosen: Cells) -> int:
        """Numbers that are replaced."""
        return self.numbers(len(chosen.which) * len(chosen.heads))

    def called(self, chosen: Cells) -> str:
        """V of layer 23, head 1."""
        heads = "all heads"
        if len(chosen.heads) < self.cells.shape[1] or len(chosen.heads) == 1:
            heads = f"head {chosen.heads[0]}"
        kinds = listed(name for name in "KV" if name.lower() in chosen.which)
        return f"{kinds} of layer {chosen.layer}, {heads}"

    @property
    def best(self) -> Cells:
        """The cell whose replacement alone makes the second text's answer likeliest."""
        layer, head, kind = torch.unravel_index(self.cells.argmax(), self.cells.shape)
        return Cells(int(layer), "kv"[int(kind)], (int(head),))

    def turned(self, after: Likely) -> bool:
        """Whether the second text's answer is given in place of the first one's."""
        answer, other = self.two.answers
        return answer != other == after.ids[0]

    def told(self, after: Likely) -> str:
        """“Paris” (0.96) becomes “Rome” (0.73)."""
        was, now = (
            f"{self.name(likely.ids[0])} ({likely.probs[0]:.2f})" for likely in (self.before, after)
        )
        if self.before.ids[0] == after.ids[0]:
            return f"the answer stays {self.name(after.ids[0])} ({after.probs[0]:.2f})"
        neither = "" if after.ids[0] in self.two.answers else ", which is neither text's answer"
        return f"{was} becomes {now}{neither}"


def plain(label: str) -> str:
    """A token's label without the sign of the blank in front of it."""
    return label.removeprefix(SPACE) or label


# -- the picture ----------------------------------------------------------------------------------


def fact_picture(two: TwoTexts, tokenizer: Tokenizer) -> Picture:
    """What the cache holds of the slots that differ: each cell replaced alone, and the best."""
    before = likely(two.after([dict])[0])
    fact = Fact(two, tokenizer, two.every_cell(), before)
    best = fact.best
    after = likely(two.after([two.replace([best.layer], best.which, best.heads)])[0])
    count, answer = f"{fact.numbers_of(best):,}", fact.bare(before.ids[0])
    if two.answers[0] == two.answers[1]:
        title = f"Both texts have one answer: “{answer}”"
    elif fact.turned(after):
        title = f"{count} numbers decide: {answer} or {fact.bare(two.answers[1])}"
    else:
        stays = before.ids[0] == after.ids[0]
        title = (
            f"{count} numbers are replaced: {'still ' if stays else ''}{fact.name(after.ids[0])}"
        )
    sheet = Sheet(WIDE, 0)
    y = 22 + draw_top(sheet, fact, best, title, 26)
    _answers(sheet, fact, y, {"as it is:": before, f"{count} numbers replaced:": after})
    sheet.height = y + 84
    return sheet.picture(_picture_caption(fact, after))


def _picture_caption(fact: Fact, after: Likely) -> str:
    word, other = fact.slot_words
    best, all_cells = fact.best, fact.cells.numel()
    count, total = fact.numbers_of(best), fact.numbers(all_cells)
    rest = fact.cells.flatten().topk(2).values[1].item()
    return (
        f"Of {total:,} numbers that the cache holds for {word}, {count} ({fact.called(best)}) are "
        f"replaced by those of {other}: {fact.told(after)}; each of the other {all_cells - 1} "
        f"cells alone gives {fact.wanted} at most {math.ceil(1000 * rest) / 1000:.3f}."
    )


def _answers(sheet: Sheet, fact: Fact, y: float, lines: dict[str, Likely]) -> None:
    """What was done -> the likeliest next token, with its probability."""
    labels = [
        cut_to(fact.bare(likely.ids[0]), 180, 20, bold=True, keep=True) for likely in lines.values()
    ]
    says = MARGIN + max(text_width(said, 17) for said in lines)
    left = says + 26 + max(text_width(label, 20, bold=True) for label in labels)
    wide = WIDE - 64 - left
    for i, ((said, likely), label) in enumerate(zip(lines.items(), labels, strict=True)):
        base, p = y + 36 * i + 20, likely.probs[0]
        sheet.text(f"answer.{i}.said", says, base - 1, said, 17, **RIGHT)
        sheet.text(f"answer.{i}", says + 10, base, label, 20, **BOLD)
        sheet.bar(f"answer.{i}.bar", (left, base - 18, wide, 22), p, ink_of(fact, likely.ids[0]))
        sheet.text(f"answer.{i}.p", left + wide + 8, base, f"{p:.2f}", 20, **BOLD)


def ink_of(fact: Fact, token: int) -> str:
    """A token's colour: that of the text whose answer it is."""
    answer, other = fact.two.answers
    return OWN.colour if token == answer else DONOR.colour if token == other else GREY.dark


# -- what both draw -------------------------------------------------------------------------------


def draw_top(sheet: Sheet, fact: Fact, chosen: Cells, title: str, size: float) -> float:
    """Title, texts and grid; returns where they end."""
    title = cut_to(title, WIDE - 2 * MARGIN, size, bold=True, keep=True)
    sheet.text("title", MARGIN, 8 + size, title, size, **BOLD)
    word, other = fact.slot_words
    count, total = fact.numbers_of(chosen), fact.numbers(fact.cells.numel())
    it = "it" if len(fact.two.slots) == 1 else "them"
    said = (
        f"A language model has read {word}. Of the {total:,} numbers that its cache holds for "
        f"{it}, {count:,} are replaced by those of {other}."
    )
    about = words(said, 15, WIDE - 2 * MARGIN, 2, **FAINT)
    about.draw(sheet, "about", MARGIN, 17 + size)
    y = 32 + size + about.tall
    spans = _texts(sheet, fact, y)
    y += 2 * HIGH + 38
    below = y + 34
    layers = fact.cells.shape[0]
    right = LEFT + _pitch(layers) * layers
    for i, (x0, x1) in enumerate(spans):  # from the token to all that is held for it
        points = f"{x0:.1f},{y:.1f} {x1:.1f},{y:.1f} {right:.1f},{below:.1f} {LEFT:.1f},{below:.1f}"
        sheet.add(f"zoom.{i}", "polygon", points=points, fill=OWN.light, opacity=0.45, **DEAF)
    return _grid(sheet, fact, chosen, below)


def _texts(sheet: Sheet, fact: Fact, y: float) -> list[tuple[float, float]]:
    """The first text, token by token, and above what differs the other's; where that is, in x.

    A text that is too long is shown around what differs and at its end.
    """
    two = fact.two
    labels, others = (token_labels(fact.tokenizer, list(ids)) for ids in two.ids)
    if all(label.startswith(SPACE) for label in labels[1:] + others[1:]):  # whole words
        labels, others = ([plain(label) for label in each] for each in (labels, others))

    def wide(i: int) -> float:
        both = (labels[i], others[i])
        return min(max(text_width(label, 15, bold=True) for label in both) + 14, LONGEST)

    shown, room = set[int](), WIDE - 2 * MARGIN - HIGH - 60
    anchors = [*two.slots, len(labels) - 1]
    for i in sorted(range(len(labels)), key=lambda i: min(abs(i - a) for a in anchors)):
        if (room := room - wide(i) - 4) < 0:
            break
        shown.add(i)
    gaps = sum(i - 1 not in shown for i in shown if i)
    total = sum(wide(i) + 4 for i in shown) + 22 * gaps + HIGH
    x, low, spans = (WIDE - total) / 2, y + HIGH + 36, list[tuple[float, float]]()
    for i in sorted(shown):
        if i and i - 1 not in shown:
            sheet.note(f"token.{i}.cut", x + 3, low + 19, "…", 15)
            x += 22
        box: Box = (x, low, wide(i), HIGH)
        differs = i in two.slots
        if differs:
            sheet.cell(f"token.{i}", box, "written", OWN, "", labels[i], 15, BOLD)
        else:
            sheet.cell(f"token.{i}", box, "cached", GREY, "", labels[i], 15)
        if differs:
            above, middle = (x, y, wide(i), HIGH), x + wide(i) / 2
            sheet.cell(f"other.{i}", above, "written", DONOR, "", others[i], 15, BOLD)
            sheet.arrow(f"other.{i}.to", [(middle, y + HIGH + 4), (middle, low - 3)], INK, 2.6)
            spans.append((x, x + wide(i)))
        x += wide(i) + 4
    sheet.cell("next", (x, low, HIGH, HIGH), "known", OWN, "", "?", 16, BOLD)
    first, last = (sum(spans[i]) / 2 for i in (0, -1))
    need, base = text_width("replaced", 14) + 24, y + HIGH + 23
    if last + need < WIDE:
        sheet.text("replaced", last + 14, base, "replaced", 14)
    elif first > need:
        sheet.text("replaced", first - 14, base, "replaced", 14, **RIGHT)
    return spans


def _pitch(layers: int) -> float:
    return min(110.0, (WIDE - LEFT - MARGIN) / layers)


def _grid(sheet: Sheet, fact: Fact, chosen: Cells, y: float) -> float:
    """All cells, layers to the right, heads of K and below them of V; what is replaced framed."""
    layers, heads, _ = fact.cells.shape
    word, _ = fact.slot_words
    wide, tall = _pitch(layers), min(24.0, max(6.0, 192 / heads))
    right = LEFT + wide * layers
    title = f"What the cache holds for {word}: {fact.cells.numel()} cells"
    title += f" of {counted(fact.numbers(1), 'number')}"
    title = cut_to(title, WIDE - 2 * MARGIN, 16, bold=True, keep=True)
    sheet.text("held", MARGIN, y + 20, title, 16, **BOLD)
    says = f"colour: how likely {fact.wanted} is when this cell alone is replaced"
    says = cut_to(says, WIDE - 2 * MARGIN - 160, 14, keep=True)
    sheet.note("scale.says", MARGIN, y + 42, says, 14)
    x = MARGIN + text_width(says, 14) + 18
    sheet.note("scale.least", x, y + 42, "0", 14)
    sheet.colour_scale("scale", (x + 14, y + 31, 88, 13))
    brightest = max(0.5, math.ceil(20 * float(fact.cells.max())) / 20)  # the best cell
    sheet.note("scale.most", x + 108, y + 42, f"{brightest:g}", 14)
    y += 56
    tops = (y, y + tall * heads + GAP)  # of K, and of V
    values = fact.cells.tolist()
    for kind, layer, head in product(range(2), range(layers), range(heads)):
        p = values[layer][head][kind]
        box = Grid(LEFT, tops[kind], wide, tall, layers, (2, 2)).box(head * layers + layer)
        cell = fact.called(Cells(layer, "kv"[kind], (head,)))
        tip = f"{cell} replaced alone: {fact.wanted} {p:.3f}"
        sheet.rect(f"cell.{layer}.{head}.{kind}", box, shade(p / brightest), tip, **SHADE)
    for top, name in zip(tops, "KV", strict=True):
        base = top + tall * heads / 2 + 2
        sheet.text(f"part.{name}", MARGIN, base, name, 22, **BOLD)
        sheet.note(f"part.{name}.long", MARGIN, base + 15, LONG[name], 12)
        for head in _marks(heads, tall, 15):
            base = top + tall * (head + 0.5) + 3.5
            sheet.note(f"head.{name}.{head}", LEFT - 8, base, f"head {head}", 13, **RIGHT)
    low = tops[1] + tall * heads
    sheet.note("layer", LEFT - 8, low + 17, "layer", 13, **RIGHT)
    for layer in {chosen.layer, *_marks(layers, wide, 30)}:
        now, apart = layer == chosen.layer, abs(layer - chosen.layer) * wide
        if now or apart > 20:
            x = LEFT + wide * (layer + 0.5) - 1
            style = BOLD | {"fill": INK} if now else {}
            sheet.note(f"layer.{layer}", x, low + 17, str(layer), 13, **(CENTRE | style))
    _framed(sheet, fact, chosen, tops, (wide, tall), right)
    return low + 24


def _framed(
    sheet: Sheet,
    fact: Fact,
    chosen: Cells,
    tops: tuple[float, float],
    cell: tuple[float, float],
    right: float,
) -> None:
    """What is replaced in a thick frame, and between K and V what it is called."""
    wide, tall = cell
    middle = LEFT + wide * (chosen.layer + 0.5) - 1
    said, base = (
        f"{fact.called(chosen)}: {fact.numbers_of(chosen):,} numbers",
        tops[1] - GAP / 2 - 1,
    )
    half = text_width(said, 15, bold=True) / 2
    for i, kind in enumerate("kv"):
        if kind not in chosen.which:
            continue
        high = tops[i] + tall * chosen.heads[0]
        box = (LEFT + wide * chosen.layer, high, wide - 2, tall * len(chosen.heads) - 2)
        sheet.outline(f"framed.{kind}.halo", box, 3, stroke=PAPER, stroke_width=6.5)
        sheet.outline(f"framed.{kind}", box, 3, stroke_width=3.4)
        start, end = (base - 12, high + box[3] + 6) if kind == "k" else (base + 9, high - 6)
        if abs(end - start) > 10:
            sheet.arrow(f"framed.{kind}.to", [(middle, start), (middle, end)], INK, 2.2)
    x = min(max(middle, LEFT + half), max(right, LEFT + 2 * half) - half)
    sheet.text("framed.says", x, base + 4, said, 15, **CENTRE, **BOLD)


def _marks(count: int, pitch: float, least: float) -> range:
    """Which of so many lines are numbered: every one, every 5th, ... at least so far apart."""
    return range(0, count, next(step for step in (1, 5, 10, 20, 50, 100) if step * pitch >= least))
