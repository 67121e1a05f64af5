"""Pictures of a cached memory that is edited: a transplant, what matters in it, where it lies.

Knows `lab.kv_edit`, which edits; draws scenes.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.lab.kv_edit import Exchange, continued, memory_of
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.flow import Piece, words
from tutorial_engine.viz.parts import BOLD, CENTRE, FAINT, MARGIN, SHADE, Sheet, part_of, shade
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.player import Frame
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.style import INK
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.words import listed, numbered

TEXTS = ("Namo had an old coat.", "Nedo had an old coat.")
PARTS = {"V": "v", "K": "k", "K and V": "kv"}  # as a reader chooses them
WIDE, CELL, ROW = 610.0, 58.0, 17.0
LEFT, SIDE = 66.0, 88.0  # of the labels in front of the rows of a memory, and of a map


class Transplant(NamedTuple):
    """A text whose memory got parts of another one's, and what follows it: four stories.

    `own` and `donors` follow the two texts as they are, `story` the first one after the edit.
    """

    labels: tuple[list[str], list[str]]  # of the two texts' tokens
    slots: tuple[int, ...]
    layers: tuple[int, ...]
    which: str
    num_layers: int
    texts: tuple[str, str]
    own: str
    donors: str
    story: str

    @property
    def parts(self) -> str:
        """What was copied, in words."""
        part = listed(name for name in ("K", "V") if name.lower() in self.which)
        return f"{part} of {numbered(self.slots, 'slot')}, {numbered(self.layers, 'layer')}"


def transplant(
    model: CausalLM,
    tokenizer: Tokenizer,
    texts: tuple[str, str] = TEXTS,
    layers: Sequence[int] = (3,),
    which: str = "kv",
    num_tokens: int = 18,
) -> Transplant:
    """Run both texts, exchange what differs, and go on. ValueError for texts that are not alike.

    The slots are those whose tokens are not the same; both texts need as many tokens.
    """
    ids = [tokenizer.encode(text).ids for text in texts]
    slots = tuple(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    if len(ids[0]) != len(ids[1]) or not slots:
        raise ValueError(f"{texts} must have as many tokens, and not all the same ones")
    exchange = Exchange(memory_of(model, ids[1][:-1]), slots, tuple(layers), which)

    def told(of: int, edit: object = dict) -> str:
        new = continued(model, ids[of], edit, num_tokens)  # type: ignore[arg-type]
        return tokenizer.decode(new).strip()

    labels = token_labels(tokenizer, ids[0]), token_labels(tokenizer, ids[1])
    stories = told(0), told(1), told(0, exchange)
    count = model.config.num_hidden_layers
    return Transplant(labels, slots, tuple(layers), which, count, texts, *stories)


def transplant_scene(edit: Transplant) -> Sheet:
    """Two texts and their memories, K and V of each layer; what was copied; and both stories."""
    low, below = 31 + ROW * edit.num_layers, 52  # of a memory, and of the other from it
    told = [_story(story) for story in (edit.own, edit.story)]
    tall = max(_story(story).tall for story in (edit.own, edit.donors, edit.story))
    sheet = Sheet(WIDE, 2 * low + below + 84 + 2 * tall)
    sheet.note("screen", MARGIN, 16, "the text on the screen, and its memory", 14)
    _memory(sheet, "a", edit, 0, 24)
    _memory(sheet, "b", edit, 1, low + below - 8)
    sheet.note("other", MARGIN, 2 * low + below + 3, "another text, and its memory", 14)
    halves = [i for i, part in enumerate("KV") if part.lower() in edit.which]
    for slot in edit.slots:  # to what was copied: K, V, or between both
        x = LEFT + slot * CELL + (CELL - 4) * (sum(halves) / len(halves) + 0.5) / 2
        sheet.arrow(f"moved.{slot}", [(x, low + below - 12), (x, low + 14)], INK, 2.2)
    right = LEFT + (edit.slots[-1] + 1) * CELL
    sheet.text("parts", right + 4, low + 38, edit.parts, 15, **BOLD)
    titles = {"before": "without the copy the story goes on", "after": "with the copy"}
    y = 2 * low + below + 32
    for (name, title), story in zip(titles.items(), told, strict=True):
        sheet.note(f"{name}.title", MARGIN, y, title, 14)
        story.draw(sheet, name, MARGIN, y + 5)
        y += tall + 30
    sheet.parts = [[(0, 0, WIDE, sheet.height)]]
    return sheet


def _memory(sheet: Sheet, name: str, edit: Transplant, text: int, y: float) -> None:
    """The tokens of a text, and below each its K and V in every layer, in their text's colour.

    The last token has none: the screen's runs after the copy, the other never.
    """
    last = len(edit.labels[text]) - 1
    for slot, label in enumerate(edit.labels[text]):
        x = LEFT + slot * CELL
        sheet.inside(f"{name}.{slot}.label", (x, y, CELL - 4, 20), label, 14)
        if slot == last:
            for line, word in enumerate(("runs", "next") if text == 0 else ()):
                box = (x, y + 22 + ROW * (line + edit.num_layers / 2 - 1), CELL - 4, ROW - 3.0)
                sheet.inside(f"{name}.{word}", box, word, 12, **FAINT)
            break
        for layer, (i, part) in itertools.product(range(edit.num_layers), enumerate("KV")):
            is_new = slot in edit.slots and layer in edit.layers and part.lower() in edit.which
            one = look(1 if is_new else text)
            half = (CELL - 4) / 2
            box = (x + i * half, y + 22 + ROW * layer, half, ROW - 3.0)
            cell = f"{name}.{slot}.{layer}.{part}"
            sheet.cell(cell, box, "written" if is_new else "cached", one)
            sheet.inside(f"{cell}.name", box, part, 11, **(BOLD if is_new else {}))
    for layer in range(edit.num_layers):
        sheet.note(f"{name}.layer.{layer}", MARGIN, y + 34 + ROW * layer, f"layer {layer}", 12)


def _story(told: str) -> Piece:
    return words(told, 16, WIDE - 2 * MARGIN, 2, **BOLD)


def transplant_caption(edit: Transplant) -> str:
    """Which of the two stories it tells now."""
    first, other = (text.split()[0] for text in edit.texts)
    if edit.story == edit.donors:
        told = f"The screen says {first}, and the story is that of {other}, word for word."
    elif edit.story == edit.own:
        told = "The story is the one that it told before, word for word."
    else:
        told = "The story is neither of the two texts' own."
    return f"Copied: {edit.parts}, from the memory of “{edit.texts[1].rstrip('.')}”. {told}"


def transplant_picture(model: CausalLM, tokenizer: Tokenizer) -> Picture:
    """K and V of the one slot that differs, in the last layer."""
    edit = transplant(model, tokenizer, layers=(model.config.num_hidden_layers - 1,))
    return transplant_scene(edit).picture(transplant_caption(edit))


def transplant_choices() -> dict[str, list[str]]:
    """What a reader of the player chooses beside the layer: control -> options."""
    names = [text.split()[0] for text in TEXTS]
    texts = [f"{a} gets {b}'s" for a, b in (names, names[::-1])]
    return {"memory": texts, "copy": [*PARTS]}


def transplant_runs(model: CausalLM, tokenizer: Tokenizer) -> list[list[Frame]]:
    """A run for each way to choose, the last control turning fastest: layer by layer, then all."""
    layers = range(model.config.num_hidden_layers)

    def frame(texts: tuple[str, str], of: Sequence[int], which: str) -> Frame:
        edit = transplant(model, tokenizer, texts, of, which)
        return Frame(transplant_scene(edit), transplant_caption(edit))

    return [
        [frame(texts, of, which) for of in (*((n,) for n in layers), layers)]
        for texts, which in itertools.product((TEXTS, TEXTS[::-1]), PARTS.values())
    ]


# -- what matters ---------------------------------------------------------------------------------


def matters_picture(falls: Tensor, labels: Sequence[str], goal: str) -> Picture:
    """How far P(goal) falls when V of a slot in a layer is taken away: falls [layers, slots]."""
    layers, slots = falls.shape
    wide = min(46.0, 860.0 / slots)
    sheet = Sheet(max(SIDE + wide * slots + MARGIN, 460.0), 74.0 + 34 * layers)
    ends = (0.0, max(1.0, float(falls.max())))
    sheet.note("title", MARGIN, 20, f"how far P({goal}) falls without V of a slot in a layer", 13)
    right = sheet.width - MARGIN
    sheet.note("least", right - 114, 20, "0", 12)
    sheet.colour_scale("scale", (right - 103, 9, 77, 12))
    sheet.note("most", right - 20, 20, f"−{ends[1]:g}", 12)
    for layer, slot in itertools.product(range(layers), range(slots)):
        fall = max(0.0, float(falls[layer, slot]))
        box = (SIDE + wide * slot, 32.0 + 34 * layer, wide - 2, 32.0)
        sheet.rect(f"{layer}.{slot}", box, shade(part_of(fall, ends)), f"−{fall:.2f}", **SHADE)
        if fall >= 0.05:
            ink = INK if fall > 0.5 else "#ffffff"
            sheet.inside(f"{layer}.{slot}.fall", box, f"−{fall:.2f}", 12.5, fill=ink)
    for layer in range(layers):
        sheet.note(f"layer.{layer}", MARGIN, 53.0 + 34 * layer, f"layer {layer}", 13)
    for slot, label in enumerate(labels):
        x = SIDE + wide * (slot + 0.5) - 1
        sheet.text(f"token.{slot}", x, 50.0 + 34 * layers, label, 11.5, **CENTRE)
    best = int(falls.argmax())
    layer, slot = divmod(best, slots)
    others = falls.flatten()[[i for i in range(layers * slots) if i != best]].max()
    rest = f"{float(others):.2f}" if others >= 0.01 else "0.01"
    return sheet.picture(
        f"{layers * slots} forwards: without V of slot {slot} ({labels[slot]}) in layer {layer} "
        f"P({goal}) falls by {float(falls.max()):.2f}; without any other V by "
        f"{'at most' if others >= 0.01 else 'less than'} {rest}."
    )


# -- why old keys stay ----------------------------------------------------------------------------


def readers_picture(labels: Sequence[str], layers: int) -> Picture:
    """What K and V of the last old token are made of, layer by layer; the last label is new."""
    wide, tall, high, count = 150.0, 74.0, 28.0, len(labels)
    sheet = Sheet(SIDE + wide * count, 10.0 + tall * layers)
    top, new = count - 2, count - 1  # the token that is asked about, and the one that is appended
    sheet.heading(
        f"What K and V of “{labels[top]}” are made of", "✕: the causal mask forbids it", 14
    )
    low = 46 + tall * (layers - 1)  # of layer 0

    def place(layer: int, token: int) -> tuple[float, float, float, float]:
        return (SIDE + wide * token, low - tall * layer, wide - 40, high)

    made_of = [(layer, token) for layer in range(layers) for token in range(top + 1)]
    made_of = [box for box in made_of if box[0] < layers - 1 or box[1] == top]
    ways = [
        (layer, old, token)
        for layer, token in made_of
        for old in range(token + 1)  # the causal mask
        if layer
    ]
    for layer, old, token in ways:
        (x0, y0, w, _), (x, y, _, h) = place(layer - 1, old), place(layer, token)
        slide = 14.0 * (old - token)  # arrows that come from far end further to the left
        ends = [(x0 + w / 2, y0), (x + w / 2 + slide, y + h)]
        sheet.arrow(f"{layer}.{old}.{token}", ends, look(0).colour, 1.4)
    for layer in range(1, layers):  # from the new token to the left
        (x0, y0, w, _), (x, y, _, h) = place(layer - 1, new), place(layer, top)
        ends = [(x0 + w / 2, y0), (x + w / 2 + 24, y + h)]
        sheet.arrow(f"forbidden.{layer}", ends, look(1).colour, 1.4, stroke_dasharray="5 4")
        x, y = (sum(both) / 2 for both in zip(*ends, strict=True))
        sheet.text(f"forbidden.{layer}.mark", x, y + 6, "✕", 18, **CENTRE, **BOLD)
    for layer in range(layers):
        sheet.note(f"layer.{layer}", MARGIN, low - tall * layer + 19, f"layer {layer}", 13)
        for token, label in enumerate(labels):
            box, name = place(layer, token), f"box.{layer}.{token}"
            state = "cached" if (layer, token) in made_of else "written" if token == new else "free"
            sheet.cell(name, box, state, look(int(token == new)))
            sheet.inside(f"{name}.words", box, f"K, V of {label}", 12)
    return sheet.picture(
        f"In layer {layers - 1}, K and V of {labels[top]} are made of {len(made_of) - 1} others "
        f"below, along {len(ways)} arrows. None of them comes from the new token, {labels[new]}. "
        "An upright arrow also stands for the token's own hidden state."
    )


# -- two ways to grow -----------------------------------------------------------------------------


def strips_picture(held: Mapping[str, Sequence[tuple[int, int]]], room: int) -> Picture:
    """Memory of one layer while a text grows: name -> (tokens copied, tokens written) a step.

    Each step of a name is a strip of `room` slots in which what was copied is hatched.
    """
    names, cell, left = list(held), 26.0, 62.0
    block = left + room * cell + 34
    steps = max(len(steps) for steps in held.values())
    sheet = Sheet(block * len(names) + MARGIN, 62.0 + 32 * steps)
    one = look(0)
    for n, (name, rows) in enumerate(held.items()):
        x0 = MARGIN + n * block
        sheet.text(f"{name}.title", x0, 20, name, 14, **BOLD)
        for step, (copied, written) in enumerate(rows):
            y, old = 32.0 + 32 * step, sum(new for _, new in rows[:step])
            sheet.note(f"{name}.{step}", x0, y + 17, f"step {step + 1}", 12)
            for slot in range(max(room if not any(c for c, _ in rows) else 0, old + written)):
                state = "cached" if slot < old else "written" if slot < old + written else "free"
                box = (x0 + left + slot * cell, y, cell - 2, 24.0)
                sheet.cell(f"{name}.{step}.{slot}", box, state, one)
                if slot < copied:
                    sheet.inside(f"{name}.{step}.{slot}.copied", box, "copy", 9.5)
    told = [
        f"{name} copies {sum(copied for copied, _ in rows)} old tokens"
        for name, rows in held.items()
    ]
    return sheet.picture(f"In {steps} steps {listed(told)}; both write each new token once.")
