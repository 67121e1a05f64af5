"""The queue of free blocks before and after steps in which blocks were given back."""

from collections.abc import Sequence

from tutorial_engine.trace.events import BlockFreed, Trace
from tutorial_engine.viz.block_facts import BlockRun, BlockStep, blocks_said
from tutorial_engine.viz.flow import Piece, cell, column, panel, show, table, words
from tutorial_engine.viz.parts import WIDTH, Sheet
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Look, look

WIDE, TALL, FIRST = 46.0, 26.0, 60.0  # of a block, in pixels; of what stands before the blocks
HASH = "#"  # behind the number of a block that can be found
MOST = 16  # blocks in a queue


def queue_picture(trace: Trace, steps: Sequence[int]) -> Picture:
    """For each of these steps: the free blocks before and after it, the next one first.

    A block has the colour of the request that gives it back in this step. ValueError for the first
    step, which has none before it, and for a pool with more blocks than fit.
    """
    run = BlockRun(trace, {})
    if run.num_blocks > MOST or not all(0 < step <= run.last for step in steps):
        room = (
            "steps {steps} of 1 .. {last}, {blocks} blocks: this picture shows steps that have one "
            "before them, and up to {most} blocks"
        )
        raise ValueError(
            room.format(steps=[*steps], last=run.last, blocks=run.num_blocks, most=MOST)
        )
    looks = {name: look(i) for i, name in enumerate(run.names)}
    body, told = [], []
    for number in steps:
        before, now = run.steps[number - 1], run.steps[number]
        tables = _given_back(now)
        owners = {block: looks[name] for name, table in tables.items() for block in table}
        lines = [_line("before", before, {}), _line("after", now, owners)]
        facts = "; ".join(f"{name} gives back {_order(table)}" for name, table in tables.items())
        title = f"step {number}: {facts}"
        body.append(panel(title, table(lines, 4, 8, [FIRST]), gap=10))
        found = "none can be found"
        if findable := sorted(now.hashes.keys() & {*now.free}):
            found = f"{blocks_said(findable)} can be found"
        caption = "Step {step}: the queue was {was}; {facts}; {found}; the queue is now {queue}."
        was, queue = _order(before.free), _order(now.free)
        told.append(caption.format(step=number, was=was, facts=facts, found=found, queue=queue))
    sheet = Sheet(WIDTH, 0)
    sheet.heading("The queue of free blocks", "the first one is taken next")
    key = "{sign}: the block has a hash. Coloured: the block was given back in this step."
    key = key.format(sign=HASH)
    show(sheet, column(*body, words(key), gap=22), 44)
    return sheet.picture(" ".join(told), 1.0, " ")


def _given_back(now: BlockStep) -> dict[str, list[int]]:
    """Request -> its table, of those whose blocks are free after the step; in this order."""
    freed = dict.fromkeys(e.request_id for e in now.step.events if isinstance(e, BlockFreed))
    tables = ((name, now.step.planned.requests[name].table) for name in freed)
    return {name: [block for block in table if block in now.free] for name, table in tables}


def _line(said: str, step: BlockStep, owners: dict[int, Look]) -> list[Piece]:
    """The queue after a step."""
    line = [words(said)]
    for block in step.free:
        state = "cached" if block in owners else "free"
        number = f"{block} {HASH}" if block in step.hashes else str(block)
        line.append(cell(WIDE, TALL, state, owners.get(block), number, size=13))
    return line


def _order(blocks: Sequence[int]) -> str:
    return " ".join(map(str, blocks)) or "empty"
