"""The queue of free blocks before and after steps in which blocks were given back or taken."""

from collections.abc import Mapping, Sequence

from tutorial_engine.trace.events import BlockFreed, BlockTaken, Trace
from tutorial_engine.trace.history import Replay
from tutorial_engine.viz.drawing.flow import Piece, cell, column, panel, show, table, words
from tutorial_engine.viz.drawing.parts import WIDTH, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Look, look
from tutorial_engine.viz.run.block_run import BlockRun, BlockStep, blocks_said

WIDE, TALL, FIRST = 46.0, 26.0, 60.0  # of a block, in pixels; of what stands before the blocks
HASH = "#"  # behind the number of a block that can be found
MOST = 16  # blocks in a queue


def queue_picture(trace: Trace, steps: Sequence[int]) -> Picture:
    """For each of these steps: the free blocks before and after it, the next one first.

    A block has the colour of the request that gives it back in this step, or takes it, where nobody
    gives any back. ValueError for a step that is not there, and for more blocks than fit.
    """
    run = BlockRun.of(trace, {})
    if run.num_blocks > MOST or not all(0 <= step <= run.last for step in steps):
        room = (
            "steps {steps} of 0 .. {last}, {blocks} blocks: this picture shows steps that ran, and "
            "up to {most} blocks"
        )
        raise ValueError(
            room.format(steps=[*steps], last=run.last, blocks=run.num_blocks, most=MOST)
        )
    looks = {name: look(i) for i, name in enumerate(run.names)}
    body, sentences, taken = [], [], False
    for number in steps:
        now = run.blocks[number]
        fresh = (Replay().free_queue(run.num_blocks), dict[int, str]())
        was = (run.blocks[number - 1].free, run.blocks[number - 1].hashes) if number else fresh
        tables, fact = _given_back(now), "{who} gives back {blocks}"
        if not tables:
            tables, fact, taken = _taken(now), "{who} takes {blocks}", True
        owners = {block: looks[name] for name, table in tables.items() for block in table}
        lines = [_line("before", *was, owners if owners.keys().isdisjoint(now.free) else {})]
        lines.append(_line("after", now.free, now.hashes, owners))
        each = [fact.format(who=name, blocks=_order(blocks)) for name, blocks in tables.items()]
        facts = "; ".join(each) or "no block is given back or taken"
        title = f"step {number}: {facts}"
        body.append(panel(title, table(lines, 4, 8, [FIRST]), gap=10))
        found = "none can be found"
        if findable := sorted(now.hashes.keys() & {*now.free}):
            found = f"{blocks_said(findable)} can be found"
        before, queue = _order(was[0]), _order(now.free)
        sentences.append(
            f"Step {number}: the queue was {before}; {facts}; {found}; the queue is now {queue}."
        )
    sheet = Sheet(WIDTH, 0)
    sheet.heading("The queue of free blocks", "the first one is taken next")
    key = "{sign}: the block has a hash. Coloured: the block was given back in this step."
    if taken:
        key = "{sign}: the block has a hash. Coloured: it was given back, or taken, in this step."
    show(sheet, column(*body, words(key.format(sign=HASH)), gap=22), 44)
    return sheet.picture(" ".join(sentences), 1.0, " ")


def _given_back(now: BlockStep) -> dict[str, list[int]]:
    """Request -> its table, of those whose blocks are free after the step; in this order."""
    freed = dict.fromkeys(e.request_id for e in now.step.events if isinstance(e, BlockFreed))
    tables = ((name, now.step.planned.requests[name].table) for name in freed)
    return {name: [block for block in table if block in now.free] for name, table in tables}


def _taken(now: BlockStep) -> dict[str, list[int]]:
    """Request -> the blocks that it takes out of the queue, in this order."""
    found: dict[str, list[int]] = {}
    for event in now.step.events:
        if isinstance(event, BlockTaken):
            found.setdefault(event.request_id, []).append(event.block)
    return found


def _line(
    said: str, queue: Sequence[int], hashes: Mapping[int, str], owners: Mapping[int, Look]
) -> list[Piece]:
    """The queue at one time."""
    line = [words(said)]
    for block in queue:
        state = "cached" if block in owners else "free"
        number = f"{block} {HASH}" if block in hashes else str(block)
        line.append(cell(WIDE, TALL, state, owners.get(block), number, size=13))
    return line


def _order(blocks: Sequence[int]) -> str:
    return " ".join(map(str, blocks)) or "empty"
