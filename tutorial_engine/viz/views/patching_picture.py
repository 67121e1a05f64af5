"""Heads that give what they gave in another text, and the word that comes then."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from tutorial_engine.lab.patching import Patch
from tutorial_engine.viz.drawing.letters import cut_to, text_width
from tutorial_engine.viz.drawing.parts import BOLD, FAINT, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import tint
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, PAPER, QUIET, RULE
from tutorial_engine.viz.tokens import token_labels
from tutorial_engine.viz.words import listed, percent

TOP, PITCH, TALL = 92.0, 36.0, 26.0  # of the rows
NAMES, FIRST, LAST = 14.0, 232.0, 596.0  # where the columns begin
WIDE = 120.0  # of a bar


def patching_picture(
    tokenizer: Tokenizer, text: str, runs: Mapping[str, Sequence[Patch]]
) -> Picture:
    """A row for each other text: what the text goes on with. `runs`: which heads → the patches.

    Of one run its story is shown, two stand side by side. ValueError for other numbers of them.
    """
    if len(runs) not in (1, 2):
        raise ValueError(f"there is room for 1 or 2 runs, got {len(runs)}")
    first, *more = runs.values()
    sheet = Sheet(960, TOP + PITCH * len(first) + 6)
    sheet.heading(f"The model always reads: {text}")
    sheet.text("from", NAMES, 62, "what these heads give", 12.5, **BOLD)
    sheet.text("from.2", NAMES, 78, "comes from the story of", 12.5, **BOLD)
    for x, who in zip((FIRST, LAST), runs, strict=False):
        sheet.text(f"who{x}", x, 62, who, 12.5, **BOLD)
        sheet.text(f"who{x}.2", x, 78, "the most probable next token", 12.5, **FAINT)
    if not more:
        sheet.text("rest", LAST, 78, "the model writes the rest by itself:", 12.5, **FAINT)
    for row, patch in enumerate(first):
        y = TOP + row * PITCH
        _name(sheet, y, tokenizer, patch)
        for x, patches in zip((FIRST, LAST), runs.values(), strict=False):
            _piece(sheet, x, y, patches[row])
        if not more:
            begin, base, x = f"… {text.split()[-1]}", y + TALL / 2 + 4.5, LAST
            for i, (words, bold) in enumerate(((begin, False), (patch.piece, True))):
                sheet.text(f"word{y}.{i}", x, base, words, 13.5, **(BOLD if bold else {}))
                x += text_width(words, 13.5, bold=bold) + 0.2
            rest = patch.rest.lstrip()
            x += text_width(" ", 13.5) * (rest != patch.rest)
            room = sheet.width - x - 10
            sheet.text(f"rest{y}", x, base, cut_to(rest, room, 13.5, keep=True), 13.5)
    names = listed(patch.name for patch in first)
    said = "; ".join(
        f"the output of {who} brings {_pieces(patches)}" for who, patches in runs.items()
    )
    alone = "" if more else "; the model writes the rest"
    return sheet.picture(f"Stories of {names}: {said}{alone}.")


def _pieces(patches: Sequence[Patch]) -> str:
    pieces = [f"“{patch.piece}”" for patch in patches]
    return f"{pieces[0]} each time" if len({*pieces}) == 1 else listed(pieces)


def _name(sheet: Sheet, y: float, tokenizer: Tokenizer, patch: Patch) -> None:
    """The other text's name in tokens; the one that comes then is green."""
    x = NAMES
    for i, label in enumerate(token_labels(tokenizer, tokenizer.encode(f" {patch.name}").ids)):
        wide, is_it = text_width(label, 13) + 16, label == patch.piece
        box = (x, y, wide, TALL)
        fill, edge = (tint(GREEN, 0.3), GREEN) if is_it else (PAPER, RULE)
        sheet.rect(f"name{y}.{i}", box, fill, rx=3, stroke=edge, stroke_width=1 + 0.8 * is_it)
        sheet.inside(f"name{y}.{i}.label", box, label, 13)
        x += wide + 3
    sheet.arrow(f"to{y}", [(x + 8, y + TALL / 2), (FIRST - 10, y + TALL / 2)], QUIET)


def _piece(sheet: Sheet, x: float, y: float, patch: Patch) -> None:
    """The token that comes, and how probable it is."""
    box = (x, y, 48.0, TALL)
    sheet.rect(f"piece{x}.{y}", box, PAPER, rx=3, stroke=INK)
    sheet.inside(f"piece{x}.{y}.label", box, patch.piece, 13.5, **BOLD)
    sheet.bar(f"bar{x}.{y}", (x + 60, y + 4, WIDE, TALL - 8), patch.probability, BLUE)
    words = percent(patch.probability)
    sheet.text(f"p{x}.{y}", x + 68 + WIDE, y + TALL / 2 + 4.5, words, 13)
