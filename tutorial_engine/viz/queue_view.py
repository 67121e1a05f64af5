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
        raise ValueError(
            f"steps {[*steps]} of 1 .. {run.last}, {run.num_blocks} blocks: this picture shows "
            f"steps that have one before them, and up to {MOST} blocks"
        )
    looks = {name: look(i) for i, name in enumerate(run.names)}
    body, told = [], []
    for number in steps:
        before, now = run.steps[number - 1], run.steps[number]
        tables = _given_back(now)
        owners = {block: looks[name] for name, table in tables.items() for block in table}
        lines = [_line("before", before, {}), _line("after", now, owners)]
        facts = [f"{name} gives back {_order(table)}" for name, table in tables.items()]
        body.append(
            panel(f"step {number}: {'; '.join(facts)}", table(lines, 4, 8, [FIRST]), gap=10)
        )
        found = sorted(now.hashes.keys() & {*now.free})
        told.append(
            f"Step {number}: the queue was {_order(before.free)}; {'; '.join(facts)}; "
            f"{blocks_said(found) if found else 'none'} can be found; "
            f"the queue is now {_order(now.free)}."
        )
    sheet = Sheet(WIDTH, 0)
    sheet.heading("The queue of free blocks", "the first one is taken next")
    key = f"{HASH}: the block has a hash. Coloured: the block was given back in this step."
    show(sheet, column(*body, words(key), gap=22), 44)
    return sheet.picture(" ".join(told), 1.0, " ")


def _given_back(now: BlockStep) -> dict[str, list[int]]:
    """Request -> its table, of those whose blocks are free after the step; in this order."""
    freed = dict.fromkeys(e.request_id for e in now.step.events if isinstance(e, BlockFreed))
    tables = ((name, now.step.planned.requests[name].table) for name in freed)
    return {name: [block for block in table if block in now.free] for name, table in tables}


def _line(said: str, step: BlockStep, owners: dict[int, Look]) -> list[Piece]:
    """The queue after a step."""
    return [
        words(said),
        *(
            cell(
                WIDE,
                TALL,
                "cached" if block in owners else "free",
                owners.get(block),
                f"{block} {HASH}" if block in step.hashes else str(block),
                size=13,
            )
            for block in step.free
        ),
    ]


def _order(blocks: Sequence[int]) -> str:
    return " ".join(map(str, blocks)) or "empty"
