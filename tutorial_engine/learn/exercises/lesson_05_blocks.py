"""The checks of the exercises on blocks: eviction; and what a stale block does to an answer."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.exercises.facts import AsIs
from tutorial_engine.learn.exercises.judge import Slips, judge, slips_of
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.parts.holder import PartFailed, Parts, whole
from tutorial_engine.learn.parts.memory import OwnBlocks
from tutorial_engine.learn.parts.memory import free as right_free
from tutorial_engine.learn.parts.memory import take as right_take
from tutorial_engine.learn.stories.bugs_04 import StaleBlocks, pages
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.views.leak_picture import Leak, record_leak

# ---- eviction

Part = Callable[..., object]
FREE_CASES = (  # a table, ref_cnt, the free queue, hashes
    ([5, 2], {5: 1, 2: 1}, [7], {5: "a", 2: "b", 7: "h"}),  # the table is not sorted
    ([3, 4], {3: 1, 4: 1}, [7], {3: None, 4: None, 7: "h"}),  # no block has a hash
    ([0, 4], {0: 2, 4: 1}, [7], {0: "a", 4: "b", 7: "h"}),  # another holds 0, before 4
    ([4, 6], {4: 1, 6: 2}, [7], {4: "a", 6: None, 7: None}),  # a fork: both hold the open block 6
    ([0, 1, 3], {0: 1, 1: 1, 3: 1}, [7], {0: "a", 1: "b", 3: None, 7: "h"}),  # 3 is open
    ([0, 1, 2, 3], {0: 1, 1: 1, 2: 1, 3: 1}, [7, 8], {**dict(enumerate("abcd")), 7: "h", 8: "i"}),
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
)
FREE_SLIPS: Slips = slips_of(
    right_free,
    """
    reversed(table) → sorted(table)[::-1]
        puts blocks into the queue by their numbers, the largest first; the order is that of the
        table, from its end
    reversed(table) → table
        puts blocks into the queue from the first of the table on; without the first no later one is
        found, so it goes last
    without + free_queue + with_hash → without + free_queue + with_hash[::-1]
        puts those with a hash into the queue from the first of the table to the last; the last
        comes first in both groups
    reversed(table) → table
    without + free_queue + with_hash → free_queue + gone
        puts all blocks at the end, from the first of the table; those without a hash go to the
        front, and the last comes first
    without + free_queue + with_hash → free_queue + with_hash + without
        puts all blocks at the end, those with a hash first; nobody can find the others, so they go
        to the front
    without + free_queue + with_hash → free_queue + gone
        puts all blocks at the end, whatever their hashes; nobody can find those without one, so
        they go to the front
    without + free_queue + with_hash → without[::-1] + free_queue + with_hash
        puts those without a hash to the front from the first of the table to the last; the last
        comes first in both groups
    without + free_queue + with_hash → sorted(without) + free_queue + with_hash
        puts those without a hash to the front by their numbers; the last block of the table comes
        first in both groups
    without + free_queue + with_hash → with_hash + free_queue + without
        exchanges front and end; blocks with a hash may still be found, so they go to the end
    without + free_queue + with_hash → gone + free_queue
        puts all blocks to the front, whatever their hashes; those with one may still be found, so
        they go to the end
    free_queue[:] = → free_queue =
        changes `ref_cnt`, and the caller's `free_queue` stays as it was: no block went into that
        list; count down first, then see which have 0, and write `free_queue[:] = ...`
    + with_hash → + with_hash; hashes.update(dict.fromkeys(gone))
        gives the right queue, but takes the hash of each free block away in `hashes`; a free block
        can be found until it is taken, and this is the task of `take` in exercise 3
    for block in table: → for block in ():
    == 0] → < 0]
        changes neither `ref_cnt` nor `free_queue`; a request that ends gives its blocks back
    ref_cnt[block] -= 1 → pass
    == 0] → == 1]
        puts the right blocks into the queue, but does not change `ref_cnt`; nobody holds a free
        block, so its count is 0
    ref_cnt[block] -= 1 → ref_cnt[block] = 0
        frees the blocks that another request holds, too; they stay out of the queue, and lose one
        holder
    ref_cnt[block] -= 1 → ref_cnt[block] -= ref_cnt[block] == 1
        leaves the count of a block that another request holds; each block of the table loses one
        holder
    """,
)


Hashes = dict[int, Any]  # block → its hash, or None


@dataclass(frozen=True)
class Freed:
    """The counts and the queue after a table was given back; the hashes if they changed."""

    ref_cnt: dict[int, int]
    free_queue: list[int]
    hashes: Hashes | None

    def __repr__(self) -> str:
        changed = "" if self.hashes is None else f", hashes {self.hashes}"
        return f"ref_cnt {self.ref_cnt}, free_queue {self.free_queue}{changed}"


def _freed(
    free: Part, table: list[int], ref_cnt: dict[int, int], queue: list[int], hashes: Hashes
) -> Freed:
    held, before = list(table), dict(hashes)
    free(table, ref_cnt, queue, hashes)
    counts = {block: ref_cnt[block] for block in held if block in ref_cnt}
    return Freed(counts, queue, hashes if hashes != before else None)


def _held_in_queue(got: Freed, table: list[int], ref_cnt: dict[int, int], *_: Any) -> str | None:
    """Blocks that were put into the queue although another request holds them."""
    held = [block for block in table if ref_cnt[block] > 1 and block in got.free_queue]
    return f"another request holds {held}, and {held} is in free_queue" if held else None


def _hashes_changed(got: Freed, *case: Any) -> str | None:
    """The blocks that lost their hash or got another one."""
    if got.hashes is None:
        return None
    had = ", ".join(
        f"block {block} had {old!r}"
        for block, old in case[-1].items()
        if old != got.hashes.get(block)
    )
    return f"hashes: {had}; `free` only reads them" if had else None


def check_free(free: Part) -> Verdict:
    """Check free(table, ref_cnt, free_queue, hashes): by hand, then beside our BlockManager."""
    return judge(
        *("free", free, right_free, FREE_CASES, FREE_SLIPS),
        "free: queue and cache are always as the package has them",
        call=_freed,
        also={"who holds them": _held_in_queue, "changed": _hashes_changed},
        then=lambda free: _in_random_operations("free", free),
    )


TAKE_CASES = (  # the free queue, hashes, cached
    ([3], {3: "c"}, {"c": 3}),
    ([3, 5], {3: "c", 5: None}, {"c": 3}),  # not the last of the queue
    ([5, 3], {3: "c", 5: None}, {"c": 3}),  # 5 has no hash
    ([3], {1: "a", 3: "c"}, {"a": 1, "c": 3}),  # others can be found, too
)
TAKE_SLIPS: Slips = slips_of(
    right_take,
    """
    pop(0) → pop()
        takes the last of the queue; the first one is next
    free_queue.pop(0) → free_queue[0]
        gives the right block, but leaves it in `free_queue`; it would be handed out twice
        ▸ free_queue.pop(0)
    del cached[hashes[block]] → pass
        leaves the old hash in `cached`; who looks it up would read another request's tokens
    del cached[hashes[block]] → cached[hashes[block]] = None
        leaves the old hash as a key of `cached`; a hash that is a key there can be found
        ▸ del cached[hashes[block]]
    del cached[hashes[block]] → cached.clear()
        takes everything out of `cached`; only the block that is taken must not be found any more
    hashes[block] = None →
        leaves the old hash of the block in `hashes`; the block gets new content, so this hash is
        not its own
    del cached[hashes[block]] → pass
    hashes[block] = None →
        leaves the old hash in `hashes` and in `cached`; the block gets new content, and must not be
        found under it
    hashes[block] = None → del hashes[block]
        takes the block out of `hashes`; it stays there, with None as its hash
    hashes[block] = None → hashes.update(dict.fromkeys(hashes))
        takes the hashes of all blocks away; only the block that is taken loses its hash
    pop(0) → pop([*map(hashes.get, free_queue), None].index(None) % len(free_queue))
        takes a block without a hash first; the front of the queue is next, with a hash or without
    """,
)


def _taken(
    take: Part, queue: list[int], hashes: dict[int, Any], cached: dict[Any, int]
) -> AsIs | None:
    """Which block it gave, the queue, the hashes and the cache, after it."""
    had_hash = hashes[queue[0]] is not None
    got = take(queue, hashes, cached)
    if got is ... or (got is None and had_hash):
        return None
    block = whole(got)
    what = f"block {block}" if block is not None else repr(got)
    in_order = (dict(sorted(table.items(), key=repr)) for table in (hashes, cached))
    return AsIs("{}; then free_queue {}, hashes {}, cached {}".format(what, queue, *in_order))


def check_take(take: Part) -> Verdict:
    """Check take(free_queue, hashes, cached) → block, in the same two ways."""
    return judge(
        *("take", take, right_take, TAKE_CASES, TAKE_SLIPS),
        "take: queue and cache are always as the package has them",
        call=_taken,
        then=lambda take: _in_random_operations("take", take),
    )


def _in_random_operations(name: str, part: Part) -> str:
    """400 operations of a BlockManager beside a part → what is wrong with it first, or ""."""
    draw, parts = random.Random(0), Parts({"free": right_free, "take": right_take}, "check")
    parts.own[name] = part
    blocks = type("OwnBlocks", (OwnBlocks,), {"parts": parts})(8, 2)
    for number in range(400):
        frees = bool(blocks.tables) and draw.random() < 0.5
        seq_id = draw.choice(sorted(blocks.tables)) if frees else str(number)
        tokens = draw.choices((0, 1), k=draw.randint(1, 11))
        try:
            if frees:
                blocks.free(seq_id)
            elif blocks.admit(seq_id, tokens) is not None:
                blocks.cache_full_blocks(seq_id, tokens, len(tokens))
                blocks.commit(seq_id, len(tokens))
        except PartFailed as failed:
            return f"in random operations {failed}"
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
