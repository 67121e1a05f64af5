"""The checks of the exercises on blocks: eviction, a bug to be found."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.bugs_04 import BLOCK_SIZE, StaleBlocks, pages, scenes, serve
from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.own_memory import OwnBlocks
from tutorial_engine.learn.own_memory import free as right_free
from tutorial_engine.learn.own_memory import take as right_take
from tutorial_engine.learn.parts import PartFailed, Parts, listed, shown, whole
from tutorial_engine.learn.verdict import CannotBe, Told, Verdict, has_gap
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.trace.events import Added, BlockCached, BlockShared, BlockTaken
from tutorial_engine.viz.leak_view import Leak, record_leak

# ---- eviction

Part = Callable[..., object]
FREE_CASES = (  # a table, ref_cnt, the free queue, hashes
    ([0, 1, 2, 3], {0: 1, 1: 1, 2: 1, 3: 1}, [7, 8], dict(enumerate("abcd"))),
    ([0, 1, 4], {0: 2, 1: 2, 4: 1}, [7], {0: "a", 1: "b", 4: "e"}),  # another holds 0 and 1
    (
        [5, 2, 9, 3],  # two equal blocks were computed, so one of them has no hash
        {5: 1, 2: 1, 9: 1, 3: 1},
        [7, 8],
        {5: "a", 2: "b", 9: None, 3: None},
    ),
)
FREE_SLIPS: Slips = slips_of(
    right_free,
    """
    reversed(table) → table
        head first: after 7 and 8, block 0 is taken next, and then whoever has this prefix finds
        nothing, though 1, 2 and 3 are still there; last block first
    without + free_queue + with_hash → free_queue + with_hash + without
        nobody can find the blocks without a hash, so they are taken first: put them in front
    without + free_queue + with_hash → free_queue + gone
        nobody can find the blocks without a hash, so they are taken first: put them in front of all
    without + free_queue + with_hash → without[::-1] + free_queue + with_hash
        in front, too, the last block of the table comes first
    without + free_queue + with_hash → gone + free_queue
        put those with a hash at the end: 7 and 8 have been free for longer
    free_queue[:] = → free_queue =
        four blocks are nobody's now: free_queue must get them, and `free_queue = free_queue + ...`
        makes a new list that nobody else sees: change it in place, free_queue[:] = ...
    for block in table: → for block in ():
    == 0] → < 0]
        neither ref_cnt nor free_queue has changed; change them in place: count down in ref_cnt, and
        put the blocks into free_queue
    if ref_cnt[block] == 0] → ]
        a block that is in another's table still (ref_cnt 2) is not free
    ref_cnt[block] -= 1 → pass
    == 0] → == 1]
        nobody holds a block that is free: count down in ref_cnt to 0
    free_queue[:] = without → [ref_cnt.pop(block) for block in gone]; free_queue[:] = without
        ref_cnt has lost the blocks that are free; nobody holds them, so their count is 0
    ref_cnt[block] -= 1 → ref_cnt[block] -= ref_cnt[block] == 1
        who gives a block back that another holds counts down, too
    """,
)


Hashes = dict[int, Any]  # block → its hash, or None


def _freed(
    free: Part, table: list[int], ref_cnt: dict[int, int], queue: list[int], hashes: Hashes
) -> list[Any]:
    """The queue, the counts and the hashes, after the table was given back."""
    held = list(table)
    free(table, ref_cnt, queue, hashes)
    return [queue, [ref_cnt.get(block) for block in held], hashes]


def check_free(free: Part) -> Verdict:
    """Check free(table, ref_cnt, free_queue, hashes): by hand, then beside our BlockManager."""

    def where(
        got: list[Any], table: list[int], ref_cnt: dict[int, int], queue: list[int], hashes: Hashes
    ) -> str:
        if got == [queue, list(ref_cnt.values()), hashes] and has_gap(free):
            raise Told(Verdict(None, "not done yet: there is still a `...` in free"))
        counts = dict(zip(table, got[1], strict=True))
        return (
            f"the table {table}, ref_cnt {ref_cnt}, the hashes {hashes} and the queue {queue} "
            f"became ref_cnt {counts} and the queue {got[0]}"
        )

    return judge(
        *("free", free, right_free, FREE_CASES, FREE_SLIPS),
        "free: queue and cache are always as the package has them",
        call=_freed,
        where=where,
        otherwise=lambda got, want, *_: (
            "free changes no hash: a free block can be found until somebody takes it"
            if got[2] != want[2]
            else f"expected the queue {want[0]} and the counts {want[1]}"
        ),
        then=lambda: _first_difference(free, right_take),
    )


TAKE_CASES = (([3, 5], {1: "one", 3: "three", 5: None}, {"one": 1, "three": 3}),)
TAKE_SLIPS: Slips = slips_of(
    right_take,
    """
    pop(0) → pop()
        the first one is next: 3
    free_queue.pop(0) → free_queue[0]
        3 is taken, expected the queue [5] (in place: free_queue.pop(0))
    del cached[hashes[block]] → pass
        block 3 is taken, and its old hash still leads to it: whoever looks for that prefix will
        read another request's tokens (the freed-block bug)
    del cached[hashes[block]] → cached[hashes[block]] = None
        `cached` still has the hash of block 3: take the key out, del cached[hashes[block]]
    del cached[hashes[block]] → cached.clear()
        only block 3 is taken, or nothing is ever found
    hashes[block] = None →
        hashes[3] still has the old hash; block 3 is empty: None
    del cached[hashes[block]] → pass
    hashes[block] = None →
        you did not forget the hash of block 3: take it out of `cached`, and set hashes[3] to None
    hashes[block] = None → del hashes[block]
        hashes has lost block 3; the block is still there, and it is empty: hashes[3] = None
    hashes[block] = None → hashes.update(dict.fromkeys(hashes))
        hashes[1] has changed; only block 3 is taken
    """,
)


def _taken(
    take: Part, queue: list[int], hashes: dict[int, Any], cached: dict[Any, int]
) -> list[Any] | None:
    """Which block it gave, the queue, the hashes and the cache, after it."""
    got = take(queue, hashes, cached)
    if got is None or got is ...:
        return None
    block = whole(got)
    return [repr(got) if block is None else block, queue, hashes, cached]


def check_take(take: Part) -> Verdict:
    """Check take(free_queue, hashes, cached) → block, in the same two ways."""

    def then() -> str:
        try:
            take([5], {5: None}, {})
        except KeyError as error:
            return f"KeyError: {error}; block 5 has no hash, nothing to forget"
        return _first_difference(right_free, take)

    return judge(
        *("take", take, right_take, TAKE_CASES, TAKE_SLIPS),
        "take: queue and cache are always as the package has them",
        call=_taken,
        where=lambda got, queue, *_: (
            f"of the queue {queue} got {got[0]}, then the queue is {got[1]} and cached {got[3]}"
        ),
        otherwise=lambda got, want, *_: (
            f"then hashes is {got[2]}; expected block {want[0]}, hashes {want[2]}, cached {want[3]}"
        ),
        then=then,
    )


def _first_difference(free: Part, take: Part) -> str:
    return next(filter(None, (_beside_ours(free, take, seed) for seed in range(10))), "")


def _beside_ours(free: Part, take: Part, seed: int) -> str:
    """40 random operations with the parts and with the package's → where they differ first."""
    draw, parts = random.Random(seed), Parts({})
    parts.own |= {"free": free, "take": take}
    ours = BlockManager(8, 2)
    theirs = type("OwnBlocks", (OwnBlocks,), {"parts": parts})(8, 2)
    for number in range(40):
        frees = bool(ours.tables) and draw.random() < 0.5
        name = draw.choice(sorted(ours.tables)) if frees else str(number)
        tokens = draw.choices((0, 1), k=draw.randint(1, 11))
        try:
            for blocks in (ours, theirs):
                if frees:
                    blocks.free(name)
                elif blocks.admit(name, tokens) is not None:
                    blocks.cache_full_blocks(name, tokens, len(tokens))
                    blocks.commit(name, len(tokens))
        except PartFailed as failed:
            return f"operation {number} (seed {seed}): {failed}"
        for what, mine, right in (
            ("the queue is", theirs.free_queue, ours.free_queue),
            ("the tables are", theirs.tables, ours.tables),
            ("what can be found is", theirs.cached, ours.cached),
            ("the blocks are", theirs.blocks, ours.blocks),
        ):
            if mine != right or list(mine) != list(right):
                return f"operation {number} (seed {seed}): {what} {mine}, ours {right}"
    return ""


# ---- the freed-block bug in a log

PROMPTS = (tuple(range(40, 50)), tuple(range(60, 67)), (70, 71, 72))


class Line(NamedTuple):
    """What a request did to a block. `what`: "takes" it, "caches" it when full, "finds" it by hash.

    `hash` is "" for a block that is taken.
    """

    step: int
    who: str
    what: str
    block: int
    hash: str = ""


def stale_log(
    model: Qwen3ForCausalLM,
    blocks: type[BlockManager] = StaleBlocks,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Line]:
    """The log of four requests, one after the other, in a pool so small that blocks come again."""
    scene = scenes(prompts)["small_pool"]
    memory = pages(model, scene.num_blocks, blocks)
    serve(model, memory, *scene[:3])
    hashes: dict[str, list[str]] = {}  # of the full blocks of a prompt
    log = []
    assert memory.trace is not None
    for event in memory.trace.events:
        at = event.step, getattr(event, "request_id", "")
        if isinstance(event, Added):
            ids, parent = event.prompt_token_ids, None
            hashes[event.request_id] = []
            for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
                parent = memory.blocks.hash_of(parent, ids[end - BLOCK_SIZE : end])
                hashes[event.request_id].append(parent.hex()[:4])
        elif isinstance(event, BlockTaken):
            log.append(Line(*at, "takes", event.block))
        elif isinstance(event, BlockShared):
            log.append(Line(*at, "finds", event.block, hashes[event.request_id].pop(0)))
        elif isinstance(event, BlockCached):
            log.append(Line(*at, "caches", event.block, event.hash[:4]))
    return log


def leak(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    asked: Mapping[str, str],
    blocks: type[BlockManager] = StaleBlocks,
    num_blocks: int = 9,
    max_tokens: int = 28,
) -> Leak:
    """Name → prompt, served one after the other under a block manager: what each of them reads."""
    return record_leak(model, tokenizer, pages(model, num_blocks, blocks), asked, max_tokens)


def log_text(log: Sequence[Line]) -> str:
    """A line for what each request did in a step."""
    lines = []
    for (step, who), lines_of in groupby(log, key=lambda line: line[:2]):
        did = []
        for what, same in groupby(lines_of, key=lambda line: line.what):
            blocks = ", ".join(
                f"{line.block} {line.hash and f'as {line.hash}'}".strip() for line in same
            )
            did.append(f"{what} {blocks}")
        lines.append(f"step {step:2}  {who} {'; '.join(did)}")
    return "\n".join(lines)


def right_stale(log: Sequence[Line]) -> list[Line]:
    """The lines that find a block by a hash which is not that of its tokens now."""
    hash_of: dict[int, str] = {}
    found = []
    for line in log:
        if line.what == "finds" and hash_of.get(line.block) != line.hash:
            found.append(line)
        elif line.what != "finds":
            hash_of[line.block] = line.hash
    return found


STALE_SLIPS: Slips = slips_of(
    right_stale,
    """
    elif line.what != "finds" → elif line.what == "caches"
        a block that is taken has no hash until it is full again: look at the lines that take
    hash_of.get(line.block) != line.hash → hash_of[line.block] > 1
    elif line.what != "finds" → elif line.what == "takes"
    = line.hash → = hash_of.get(line.block, 0) + 1
        a block that was taken again may be found by its new hash
    elif line.what != "finds" → elif line.what == "caches"
    hash_of[line.block] = line.hash → hash_of.setdefault(line.block, line.hash)
        a block has its newest hash, not its first
    return found → return found[:1]
        the log has more than one of them: return all
    hash_of.get(line.block) != line.hash → hash_of.get(line.block) == line.hash
        these are the lines that are right; return the others
    and hash_of.get(line.block) != line.hash →
        these are all the lines that find a block; a find is right, whoever finds it, if its hash
        is the present hash of the block
    hash_of.get(line.block) != line.hash → not hash_of.get(line.block)
        a block that was taken may be full again, with other tokens: compare the two hashes
    return found → return []
        it finds nothing in any log, and three of the four logs here have a stale read
    """,
)


def _logs() -> list[list[Line]]:
    """Logs by hand: nothing stale; found before and after a block is full again; two at once."""
    begin = [Line(0, "A", "takes", 0), Line(0, "A", "takes", 1), Line(0, "A", "caches", 0, "aa")]
    again = [Line(2, "B", "takes", 0), Line(3, "B", "caches", 0, "bb")]
    return [
        [*begin, Line(1, "B", "finds", 0, "aa")],
        [*begin, again[0], Line(2, "C", "finds", 0, "aa")],
        [*begin, *again, Line(4, "C", "finds", 0, "bb"), Line(4, "D", "finds", 0, "aa")],
        [*begin, *again, Line(5, "C", "finds", 0, "aa"), Line(6, "D", "finds", 0, "aa")],
    ]


def check_stale(stale: Callable[..., object], log: Sequence[Line] = ()) -> Verdict:
    """Check stale(log) → the lines that find a block which does not hold what the hash says.

    If it is right, the verdict tells what is stale in the log that is given.
    """
    cases = [(known,) for known in _logs()]
    reads = sum(len(right_stale(known)) for known in _logs())
    found = f"; in your log: {log_text(right_stale(log))}" if log else ""

    def read(answer: object) -> list[Line]:
        lines = listed(answer)
        if lines is None or not all(any(line in known for known in _logs()) for line in lines):
            raise CannotBe(f"it must return a list of lines of the log, got {shown(answer)}")
        return lines

    return judge(
        *("stale", stale, right_stale, cases, STALE_SLIPS),
        f"stale: {reads} stale reads in {len(cases)} logs{found}",
        read=read,
        where=lambda got, log: (
            f"in this log\n{log_text(log)}\nyour function found {log_text(got) or 'nothing'}"
        ),
        otherwise=lambda got, want, log: f"expected {log_text(want) or 'nothing'}",
    )
