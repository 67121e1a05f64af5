"""The jukebox: stories of a model in which one part is broken, and which part that was.

Knows stories, names of parts and differences of logits; knows no engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tutorial_engine.viz.drawing.flow import words
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, FAINT, RIGHT, Sheet
from tutorial_engine.viz.drawing.scene import Frame
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, ORANGE, PAPER, RULE

LEFT, RIGHT_HALF, WIDE = 10.0, 480.0, 960.0
TALL, ROW, TOP = 330.0, 40.0, 64.0
ROOM = 418.0  # of a line of the page
LETTERS = "ABCDEFGHIJ"
BAR = (RIGHT_HALF + 262, 128.0)  # where the bars begin, and how wide the longest is


class Take(NamedTuple):
    """A story told with one part broken, and how far logits of the prompt are then off, at most."""

    part: str
    story: str
    anywhere: float
    last: float  # at the last token of the prompt


def jukebox_frames(prompt: str, right: str, takes: Sequence[Take]) -> list[Frame]:
    """The right story; then each take twice: its story alone, and with the part that is broken."""
    frames = [_frame(prompt, right, takes, 0)]
    return frames + [_frame(prompt, right, takes, 1 + i) for i in range(2 * len(takes))]


def _frame(prompt: str, right: str, takes: Sequence[Take], step: int) -> Frame:
    """Odd steps ask, even ones tell. Of the takes told so far, the table has the numbers."""
    now, answered = (step + 1) // 2 - 1, step // 2
    sheet = Sheet(WIDE, TALL)
    title = f"{len(takes)} stories of one prompt"
    sheet.text("title", LEFT, 22, title, 15, **BOLD)
    for i, letter in enumerate(LETTERS[: len(takes)]):
        box, playing = (LEFT + 46 * i, 36.0, 40.0, 30.0), i == now
        fill = ORANGE if playing else (PAPER if i >= answered else "#e3f1ec")
        look = {"stroke": INK, "stroke_width": 2.4} if playing else {"stroke": RULE}
        sheet.rect(f"button.{letter}", box, fill, rx=6, **look)
        sheet.inside(f"letter.{letter}", box, letter, 14, **BOLD)
    head = "the right story" if now < 0 else f"story {LETTERS[now]}"
    sheet.rect("page", (LEFT, 80, 446, TALL - 94), "#f7f9fa", rx=8, stroke=RULE)
    sheet.text("head", LEFT + 14, 104, head, 13, **BOLD)
    y, asked = 114.0, words(prompt, 15, ROOM, 9, **FAINT)
    asked.draw(sheet, "prompt", LEFT + 14, y)
    story = right if now < 0 else takes[now].story
    words(story, 15, ROOM, 9, **BOLD).draw(sheet, "story", LEFT + 14, y + asked.tall)
    if now >= 0:
        sheet.note("right", LEFT + 14, 228, "with all parts right:", 13)
        words(right, 15, ROOM, 9, **FAINT).draw(sheet, "right", LEFT + 14, 236)
    _table(sheet, takes, step, answered)
    sheet.parts = [[(0, 0, 464, TALL)], [(RIGHT_HALF - 10, 0, WIDE - RIGHT_HALF + 10, TALL)]]
    return Frame(sheet, _caption(takes, step, now))


def _table(sheet: Sheet, takes: Sequence[Take], step: int, answered: int) -> None:
    """A row for each part, in the order of the alphabet: it does not give the stories away."""
    x, longest = RIGHT_HALF, max(take.anywhere for take in takes)
    sheet.text("parts", x, 40, "six parts, one broken", 12.5, **BOLD)
    sheet.text("off", BAR[0], 22, "logits off by at most", 12.5, **BOLD)
    sheet.note("off.any", BAR[0], 40, "any token", 12)
    sheet.note("off.last", WIDE - 8, 40, "last token", 12, **RIGHT)
    for row, take in enumerate(sorted(takes)):
        i, y = takes.index(take), TOP + ROW * row
        known, newest = i < answered, step > 0 and step % 2 == 0 and i == answered - 1
        edge = {"stroke": GREEN, "stroke_width": 2.4} if newest else {"stroke": RULE}
        sheet.rect(f"row.{row}", (x - 4, y - 8, 240, 34), "#ffffff", rx=6, **edge)
        sheet.text(f"part.{row}", x + 34, y + 14, take.part, 13, **(BOLD if known else {}))
        mark = LETTERS[i] if known else "?"
        sheet.text(f"mark.{row}", x + 14, y + 14, mark, 14, **CENTRE, **BOLD)
        if known:
            wide = BAR[1] * take.anywhere / longest
            sheet.rect(f"bar.{row}", (BAR[0], y, wide, 18), BLUE)
            sheet.text(f"off.{row}", BAR[0] + wide + 6, y + 14, f"{take.anywhere:.1f}", 12.5)
            sheet.text(f"last.{row}", WIDE - 8, y + 14, f"{take.last:.1f}", 12.5, **RIGHT)


def _caption(takes: Sequence[Take], step: int, now: int) -> str:
    if now < 0:
        return (
            f"This is the story of the model as it is. In each of the next {len(takes)} "
            "stories one part is broken by one line of code. Guess which, then step on."
        )
    take, letter = takes[now], LETTERS[now]
    if step % 2:
        return f"Story {letter}: which part is broken? Choose one, then step on."
    return (
        f"Story {letter}: {take.part}. Some logit of the prompt is off by "
        f"{take.anywhere:.1f}, at its last token by {take.last:.1f} at most."
    )
