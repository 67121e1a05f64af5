"""Two texts that exchange parts of their cached memories, and how each goes on.

Knows `lab.kv_edit`, which edits; draws scenes.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.lab.kv_edit import Exchange, continued, memory_of
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.flow import Piece, words
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    FAINT,
    MARGIN,
    Sheet,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.scene import Frame
from tutorial_engine.viz.drawing.style import INK
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.words import listed, numbered

TEXTS = ("Namo had an old coat.", "Nedo had an old coat.")
PARTS = {"V": "v", "K": "k", "K and V": "kv"}  # as a reader chooses them
WIDE, CELL, ROW = 610.0, 58.0, 17.0
LEFT = 66.0  # of the labels in front of the rows of a memory


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
        kinds = listed(name for name in ("K", "V") if name.lower() in self.which)
        return f"{kinds} of {numbered(self.slots, 'slot')}, {numbered(self.layers, 'layer')}"


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
    stories = [_story(story) for story in (edit.own, edit.story)]
    tall = max(_story(story).tall for story in (edit.own, edit.donors, edit.story))
    sheet = Sheet(WIDE, 2 * low + below + 84 + 2 * tall)
    sheet.note("screen", MARGIN, 16, "the text on the screen, and its memory", 14)
    _memory(sheet, "a", edit, 0, 24)
    _memory(sheet, "b", edit, 1, low + below - 8)
    sheet.note("other", MARGIN, 2 * low + below + 3, "another text, and its memory", 14)
    halves = [i for i, kind in enumerate("KV") if kind.lower() in edit.which]
    for slot in edit.slots:  # to what was copied: K, V, or between both
        x = LEFT + slot * CELL + (CELL - 4) * (sum(halves) / len(halves) + 0.5) / 2
        sheet.arrow(f"moved.{slot}", [(x, low + below - 12), (x, low + 14)], INK, 2.2)
    right = LEFT + (edit.slots[-1] + 1) * CELL
    sheet.text("parts", right + 4, low + 38, edit.parts, 15, **BOLD)
    titles = {"before": "without the copy the story goes on", "after": "with the copy"}
    y = 2 * low + below + 32
    for (name, title), story in zip(titles.items(), stories, strict=True):
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
        for layer, (i, kind) in itertools.product(range(edit.num_layers), enumerate("KV")):
            is_new = slot in edit.slots and layer in edit.layers and kind.lower() in edit.which
            colours = look(1 if is_new else text)
            half = (CELL - 4) / 2
            box = (x + i * half, y + 22 + ROW * layer, half, ROW - 3.0)
            cell = f"{name}.{slot}.{layer}.{kind}"
            state, letters = ("written", BOLD) if is_new else ("cached", {})
            sheet.cell(cell, box, state, colours, "", kind, letters=letters)
    for layer in range(edit.num_layers):
        sheet.note(f"{name}.layer.{layer}", MARGIN, y + 34 + ROW * layer, f"layer {layer}", 12)


def _story(story: str) -> Piece:
    return words(story, 16, WIDE - 2 * MARGIN, 2, **BOLD)


def transplant_caption(edit: Transplant) -> str:
    """Which of the two stories it tells now."""
    first, other = (text.split()[0] for text in edit.texts)
    if edit.story == edit.donors:
        said = f"The screen says {first}, and the story is that of {other}, word for word."
    elif edit.story == edit.own:
        said = "The story is the one that it told before, word for word."
    else:
        said = "The story is neither of the two texts' own."
    return f"Copied: {edit.parts}, from the memory of “{edit.texts[1].rstrip('.')}”. {said}"


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
