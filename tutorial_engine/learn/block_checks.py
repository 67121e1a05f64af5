"""The checks of the exercises on blocks: eviction; and what a stale block does to an answer."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.bugs_04 import StaleBlocks, pages
from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.own_memory import OwnBlocks
from tutorial_engine.learn.own_memory import free as right_free
from tutorial_engine.learn.own_memory import take as right_take
from tutorial_engine.learn.parts import PartFailed, Parts, whole
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.leak_view import Leak, record_leak

# ---- eviction

Part = Callable[..., object]
FREE_CASES = (  # a table, ref_cnt, the free queue, hashes
    ([0, 1, 2, 3], {0: 1, 1: 1, 2: 1, 3: 1}, [7, 8], {**dict(enumerate("abcd")), 7: "h", 8: "i"}),
    ([0, 1, 4], {0: 2, 1: 2, 4: 1}, [7], {0: "a", 1: "b", 4: "e", 7: "h"}),  # another holds 0, 1
    (
        [5, 2, 9, 3],  # 9 and 3 as after a step that failed: their hashes were taken back
        {5: 1, 2: 1, 9: 1, 3: 1},
        [7, 8],
        {5: "a", 2: "b", 9: None, 3: None, 7: None, 8: "h"},
    ),
    (
        [0, 1, 2, 3, 4],  # the example in the text
        {0: 2, 1: 1, 2: 1, 3: 1, 4: 1},
        [7, 8],
        {0: "a", 1: "b", 2: "c", 3: None, 4: None, 7: "h", 8: "i"},
    ),
    ([0, 6], {0: 2, 6: 2}, [7], {0: "a", 6: None, 7: None}),  # a fork: both hold the open block 6
)
FREE_SLIPS: Slips = slips_of(
    right_free,
    """
    reversed(table) → sorted(table)[::-1]
        the order is that of the table, from its end, and not that of the block numbers
    reversed(table) → table
        head first: after 7 and 8, block 0 is taken next, and then whoever has this prefix finds
        nothing, though 1, 2 and 3 are still there; last block first
    without + free_queue + with_hash → without + free_queue + with_hash[::-1]
        those with a hash stand head first in the queue: the last block of the table comes first
    reversed(table) → table
    without + free_queue + with_hash → free_queue + gone
        blocks 0 to 3 stand head first in the queue: the last block of the table comes first
    without + free_queue + with_hash → free_queue + with_hash + without
        nobody can find the blocks without a hash, so they are taken first: put them in front
    without + free_queue + with_hash → free_queue + gone
        nobody can find the blocks without a hash, so they are taken first: put them in front of all
    without + free_queue + with_hash → without[::-1] + free_queue + with_hash
        in front, too, the last block of the table comes first
    without + free_queue + with_hash → sorted(without) + free_queue + with_hash
        in front, too, the order is that of the table, from its end, and not that of the numbers
    without + free_queue + with_hash → with_hash + free_queue + without
        the two groups are exchanged: blocks without a hash go to the front, the others to the end
    without + free_queue + with_hash → gone + free_queue
        put those with a hash at the end: 7 and 8 have been free for longer
    free_queue[:] = → free_queue =
        four blocks are nobody's now, and free_queue lacks them. Did you ask for `ref_cnt == 0`
        before you counted down? Or did `free_queue = ...` make a new list that nobody else sees?
    for block in table: → for block in ():
    == 0] → < 0]
        neither ref_cnt nor free_queue has changed; change them in place: count down in ref_cnt, and
        put the blocks into free_queue
    ref_cnt[block] -= 1 → pass
    == 0] → == 1]
        nobody holds a block that is free: count down in ref_cnt to 0
    ref_cnt[block] -= 1 → ref_cnt[block] = 0
        another request still holds the blocks 0 and 1: count down by one
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


def _why_freed(
    got: list[Any], want: list[Any], table: list[int], ref_cnt: dict[int, int], free: list[int]
) -> str:
    """What is wrong with hashes, counts or the queue; "" if only the order in the queue is."""
    queue, counts, hashes = got
    if hashes != want[2]:
        return "free changes no hash: a free block can be found until somebody takes it"
    lost = [block for block, n in zip(table, counts, strict=True) if n is None]
    if lost:
        return f"ref_cnt has lost {lost}: nobody holds them, so their count is 0"
    left = [block for block, n in zip(table, counts, strict=True) if n == ref_cnt[block]]
    if left:
        return (
            f"count down for {left}, too: a request gives its whole table back, also a block that "
            "another holds, and the blocks after it"
        )
    held = [block for block, n in zip(table, counts, strict=True) if n and block in queue]
    if held:
        return f"another request still holds {held}: only a block whose count is 0 is free"
    below = [block for block, n, right in zip(table, counts, want[1], strict=True) if n < right]
    if below:
        return f"another request still holds {below}: count down by one"
    lacking = [block for block in want[0] if block not in queue]
    if forgotten := [block for block in lacking if block in free]:
        return (
            f"{forgotten} were in the queue before, and it lacks them now: they stay, between "
            "the blocks without a hash and those with one"
        )
    if lacking and counts == want[1]:
        told = f"nobody holds {lacking} now, and the queue lacks them"
        if not any(hashes[block] for block in lacking):
            told = f"the queue lacks {lacking}, which have no hash: they go to the front"
        return f"{told}. (If you wrote `free_queue = ...`: that makes a new list.)"
    return ""


def check_free(free: Part) -> Verdict:
    """Check free(table, ref_cnt, free_queue, hashes): by hand, then beside our BlockManager."""

    def counts_of(table: list[int], after: list[Any]) -> dict[int, int]:
        return dict(zip(table, after[1], strict=True))

    def where(
        got: list[Any], table: list[int], ref_cnt: dict[int, int], queue: list[int], hashes: Hashes
    ) -> str:
        return (
            f"the table {table}, ref_cnt {ref_cnt}, the hashes {hashes} and the queue {queue} "
            f"became ref_cnt {counts_of(table, got)} and the queue {got[0]}"
        )

    return judge(
        *("free", free, right_free, FREE_CASES, FREE_SLIPS),
        "free: queue and cache are always as the package has them",
        call=_freed,
        where=where,
        otherwise=lambda got, want, table, ref_cnt, queue, _: (
            _why_freed(got, want, table, ref_cnt, queue)
            or f"expected ref_cnt {counts_of(table, want)} and the queue {want[0]}"
        ),
        then=lambda free: _beside_ours(free, right_take),
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
        read another request's tokens
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


def _why_take_raised(error: Exception) -> str:
    if not isinstance(error, KeyError):
        return ""
    if error.args == (None,):
        return (
            "a block without a hash was looked up in `cached`. The first of the queue, 3, has one: "
            "do you take another block? Or do you set hashes[block] to None before you look it up?"
        )
    return "the keys of `cached` are hashes, not blocks"


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

    def then(take: Part) -> str:
        try:
            if take([5], {5: None}, {}) is None:
                return "block 5 has no hash, and it returns None: return the block here, too"
        except KeyError as error:
            return f"KeyError: {error}; block 5 has no hash, nothing to forget"
        return _beside_ours(right_free, take)

    return judge(
        *("take", take, right_take, TAKE_CASES, TAKE_SLIPS),
        "take: queue and cache are always as the package has them",
        call=_taken,
        where=lambda got, queue, *_: (
            f"of the queue {queue} got {got[0]}, then the queue is {got[1]} and cached {got[3]}"
        ),
        otherwise=lambda got, want, *_: (
            f"then hashes is {got[2]}; expected block {want[0]}, the queue {want[1]}, hashes "
            f"{want[2]}, cached {want[3]}"
        ),
        explain=_why_take_raised,
        then=then,
    )


def _beside_ours(free: Part, take: Part) -> str:
    """400 random operations with the parts and with the package's → where they differ first."""
    draw, parts = random.Random(0), Parts({})
    parts.own |= {"free": free, "take": take}
    ours, theirs = BlockManager(8, 2), type("OwnBlocks", (OwnBlocks,), {"parts": parts})(8, 2)
    for number in range(400):
        frees = bool(ours.tables) and draw.random() < 0.5
        name = draw.choice(sorted(ours.tables)) if frees else str(number)
        tokens = draw.choices((0, 1), k=draw.randint(1, 11))
        came, table = f"a request of {len(tokens)} tokens came", list(ours.tables.get(name, ()))
        if frees:
            without = [block for block in table if ours.blocks[block].hash is None]
            came = f"the table {table} was given back ({without or 'none'} without a hash)"
        try:
            for blocks in (ours, theirs):
                if frees:
                    blocks.free(name)
                elif blocks.admit(name, tokens) is not None:
                    blocks.cache_full_blocks(name, tokens, len(tokens))
                    blocks.commit(name, len(tokens))
        except PartFailed as failed:
            return f"operation {number}: {failed}"
        queue, right = list(theirs.free_queue), list(ours.free_queue)
        if queue != right:
            return f"beside the package: {came}, and the queue is {queue}, the package's {right}"
        if theirs.cached != ours.cached:
            found, ours_found = (
                {key.hex()[:6]: block for key, block in blocks.cached.items()}
                for blocks in (theirs, ours)
            )
            return (
                f"beside the package: {came}, and what can be found is {found}, the package's "
                f"{ours_found}"
            )
    return ""


# ---- the freed-block bug in a text


def leak(
    model: CausalLM,
    tokenizer: Tokenizer,
    asked: Mapping[str, str],
    blocks: type[BlockManager] = StaleBlocks,
    num_blocks: int = 9,
) -> Leak:
    """Name → prompt, served one after the other under a block manager: what each of them reads."""
    return record_leak(model, tokenizer, pages(model, num_blocks, blocks), asked, max_tokens=28)
