"""Paged attention of one query, block by block, as the model ran it.

The picture of what `record_softmax` saw: m, l and the answer so far after each block.
"""

import math
from collections.abc import Sequence

from tutorial_engine.viz.drawing.flow import Piece, column, panel, row, show, table, words
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    FAINT,
    MARGIN,
    SHADE,
    WIDTH,
    Sheet,
    part_of,
    shade,
)
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import look
from tutorial_engine.viz.drawing.scene import Frame
from tutorial_engine.viz.run.record_softmax import RecordedSoftmax, SoftmaxStep, largest_difference
from tutorial_engine.viz.words import counted

MAX_BLOCKS, MAX_SIZE = 8, 8  # rows of the picture, tokens in one
ROUNDING = 1e-4  # fp32: what two orders of the same sums may differ by
TOKENS, ACC = 302.0, 246.0  # widths


def running_softmax_picture(run: RecordedSoftmax) -> Picture:
    """A line per block: scores, m, the correction, l, and the answer so far against the whole one.

    ValueError for more blocks, or larger ones, than can be read.
    """
    return _sheet(run, len(run.steps)).picture(_caption(run), zoom=1.0)


def softmax_frames(run: RecordedSoftmax) -> list[Frame]:
    """The same picture block by block, for a player: first no block is read, at last all are.

    ValueError as above.
    """
    return [Frame(_sheet(run, read), _told(run, read)) for read in range(len(run.steps) + 1)]


def _sheet(run: RecordedSoftmax, read: int) -> Sheet:
    """The picture after so many blocks; of the others it shows the tokens."""
    if len(run.steps) > MAX_BLOCKS or run.block_size > MAX_SIZE:
        room = (
            "{blocks} blocks of {size} tokens: this picture has room for {most} blocks of {large}"
        )
        sizes = {"blocks": len(run.steps), "size": run.block_size}
        raise ValueError(room.format(**sizes, most=MAX_BLOCKS, large=MAX_SIZE))
    sheet = Sheet(WIDTH, 0)
    where = f"layer {run.layer}, head {run.head}"
    sheet.heading("One query reads its blocks one after the other", where)
    query = "query: “{label}”, position {position} · block table: {table}"
    in_table = ", ".join(str(step.block) for step in run.steps)
    query = query.format(label=run.labels[-1], position=len(run.labels) - 1, table=in_table)
    sheet.note("query", MARGIN, 44, query, 12.5)
    numbers = [number for step in run.steps for number in step.answer]
    ends = min(*numbers, *run.whole), max(*numbers, *run.whole)
    shades = "{count} numbers: dark {low}, bright {high}"
    shades = shades.format(count=len(run.whole), low=_short(ends[0]), high=_short(ends[1]))
    heads = {
        "block": "",
        "tokens: score q·k / √D": "bar: exp(score − m)",
        "m": "max score",
        "correction": "exp(old m − m)",
        "l": "Σ exp",
        "acc / l: the answer so far": shades,
        "still off by": "at most",
    }
    *titles, answer, off = (_two(words(a, **BOLD), words(b, 11, **FAINT)) for a, b in heads.items())
    lines = [[*titles, _beside(answer, off)]]
    lines += [_line(run, i, step, ends, i < read) for i, step in enumerate(run.steps)]
    differs = _rounded(largest_difference(run.returned, run.whole))
    ran = f"the attention that the model ran differs by {differs}"
    whole = words("softmax over all tokens at once", 12.5, **BOLD)
    below = _two(whole, words(ran, 11, **FAINT).named("whole.below"))
    strip = _strip(run.whole, ends).named("whole")
    lines.append([*[words("")] * 5, column(strip, below, gap=2)])
    return show(sheet, panel("", table(lines, 11, 14, (84, TOKENS, 0, 0, 42), rules=True)), 56)


def _beside(answer: Piece, off: Piece) -> Piece:
    """The answer so far and its distance to the end: one column, which a phone does not cut."""
    return table([[answer, off]], 8, least=(ACC,))


def _two(above: Piece, below: Piece) -> Piece:
    return column(above, below, gap=0)


def _line(
    run: RecordedSoftmax, i: int, step: SoftmaxStep, ends: tuple[float, float], is_read: bool
) -> list[Piece]:
    """One block: its tokens with their scores, the sums after it, and how far it is to the end."""
    pool = words(f"in block {step.block}", **BOLD).named(f"block.{i}.pool")
    tokens = (_token(run, i, offset, is_read) for offset in range(run.block_size))
    found = [_two(words(f"logical {i}"), pool), row(*tokens, gap=4)]
    if not is_read:
        return found
    correction = words("first block", 11, **FAINT)
    if step.correction is not None:
        changed = BOLD if step.correction < 1 else {}
        correction = words(f"× {step.correction:.3g}", 13, **changed)
    risen = BOLD if i == 0 or step.m > run.steps[i - 1].m else {}
    return [
        *found,
        words(_short(step.m), 13, **risen).named(f"m.{i}"),
        correction,
        words(f"{step.total:.2f}", 13).named(f"l.{i}"),
        _beside(
            _strip(step.answer, ends).named(f"acc.{i}"),
            words(_rounded(run.distance(i)), 12.5).named(f"distance.{i}"),
        ),
    ]


def _token(run: RecordedSoftmax, i: int, offset: int, is_read: bool) -> Piece:
    """A slot of a block: its token, and once it is read its score and the share of it."""
    step, at, colours = run.steps[i], i * run.block_size + offset, look(0)
    wide = TOKENS / run.block_size - 4

    def draw(sheet: Sheet, _: str, x: float, y: float) -> None:
        box = (x, y, wide, 44.0)
        if offset >= len(step.scores):
            return sheet.cell(f"token.{at}", box, "reserved")
        score = step.scores[offset]
        tip = "position {at}: score {score:.3f}" if is_read else "position {at}: not read yet"
        tip = tip.format(at=at, score=score)
        sheet.cell(f"token.{at}", box, "cached" if is_read else "known", colours, tip)
        label = cut_to(run.labels[at], wide - 4, 11.5)
        sheet.inside(f"label.{at}", (x, y, wide, 16), label, 11.5)
        if is_read:
            sheet.inside(f"score.{at}", (x, y + 15, wide, 16), _short(score), 11)
            share = math.exp(score - step.m)
            sheet.bar(f"bar.{at}", (x + 3, y + 34, wide - 6, 7), share, colours.colour)

    return Piece(wide, 44, draw)


def _strip(numbers: Sequence[float], ends: tuple[float, float]) -> Piece:
    """Numbers side by side, each in the colour of its magnitude."""

    def draw(sheet: Sheet, name: str, x: float, y: float) -> None:
        wide = ACC / len(numbers)
        for i, number in enumerate(numbers):
            box, fill = (x + wide * i, y, wide, 28.0), shade(part_of(number, ends))
            tip = f"number {i}: {number:.3f}"
            sheet.rect(f"{name}.{i}", box, fill, tip, **SHADE)
        sheet.outline(f"{name}.frame", (x, y, ACC, 28), stroke_width=0.8)

    return Piece(ACC, 28, draw)


def _caption(run: RecordedSoftmax) -> str:
    """How the largest score moved, what that corrected, and how near the end is."""
    risen = [step for step in run.steps if step.correction is not None and step.correction < 1]
    none = "no later block has a larger score than the first one, so nothing is corrected"
    did = [
        (
            f"block {s.block} has a larger score ({_short(s.m)}), so the sums before "
            f"it are multiplied by {s.correction:.3g}"
        )
        for s in risen
    ]
    return (
        "{who} reads {tokens} in {blocks}: {did}. After one block the answer is up to {first:.2g} "
        "off, after the last one {last}."
    ).format(
        who=_who(run),
        tokens=counted(len(run.labels), "token"),
        blocks=counted(len(run.steps), "block"),
        did="; ".join(did or [none]),
        first=run.distance(0),
        last=_rounded(run.distance(-1)),
    )


def _who(run: RecordedSoftmax) -> str:
    return f"The query “{run.labels[-1]}” of layer {run.layer}, head {run.head}"


def _told(run: RecordedSoftmax, read: int) -> str:
    """What the newest block did to the sums."""
    if not read:
        many, blocks = counted(len(run.labels), "token"), counted(len(run.steps), "block")
        return (
            f"{_who(run)} is to read {many} in {blocks}. It has read none: the "
            "sums l and acc are 0."
        )
    step = run.steps[read - 1]
    did = "no score in it is larger than {m}, so nothing is corrected"
    if step.correction is None:
        did = "its largest score is {m}, and the sums begin with it"
    elif step.correction < 1:
        did = "it has a larger score ({m}), so the sums before it are multiplied by {by:.3g}"
    did, off = did.format(m=_short(step.m), by=step.correction), _rounded(run.distance(read - 1))
    return (
        f"{_who(run)} reads block {step.block}: {did}. The answer so far differs "
        f"from softmax over all tokens at once by {off}."
    )


def _short(number: float) -> str:
    return f"{number:.2f}".replace("-", "−")


def _rounded(number: float) -> str:
    """A difference; one that is rounding reads the same on every machine."""
    return f"{number:.2g}" if number >= ROUNDING else f"< {ROUNDING:g} ✔"
