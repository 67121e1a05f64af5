"""The checks of notebook 04, and what they know of usual mistakes."""

from collections.abc import Callable, Sequence
from typing import Any

from tutorial_engine.cache.cell_table import Cell
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.shift import Shift, random_model, shift_gap
from tutorial_engine.lab.shift import context_shift as right_shift
from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.own_memory import Cells, in_any_order
from tutorial_engine.learn.own_memory import allocate as right_allocate
from tutorial_engine.learn.own_memory import num_blocks as right_num_blocks
from tutorial_engine.learn.own_memory import slots as right_slots
from tutorial_engine.learn.own_memory import visible as right_visible
from tutorial_engine.learn.parts import shown, whole, whole_numbers
from tutorial_engine.learn.verdict import CannotBe, Verdict
from tutorial_engine.model.rope import RotaryEmbedding

GIB = 2**30


def _numbers(answer: object) -> list[int]:
    if (numbers := whole_numbers(answer)) is None:
        raise CannotBe(f"it must return a list of numbers, got {shown(answer)}")
    return numbers


# ---- 1. how many blocks

BUDGETS = (
    (10 * GIB, 32, 32, 128, 2, 16),  # Llama-2 7B
    (GIB, 28, 8, 128, 2, 16),  # Qwen3 0.6B
    (130_800, 4, 2, 32, 4, 4),  # the shipped model, and 63.87 tokens, which are 15.97 blocks
)
BUDGET_SLIPS: Slips = slips_of(
    right_num_blocks,
    """
    * num_layers →
        every layer has K and V of its own
    2 * →
        V needs as much room as K
    * block_size →
        a block has room for block_size tokens
    * itemsize →
        a number takes itemsize bytes
    * itemsize → * 8 * itemsize
        itemsize is in bytes already: no factor 8
    * num_kv_heads →
        each of the heads has K and V
    * head_dim →
        a head's K is head_dim numbers
    * block_size) → ) * block_size
        without parentheses Python divides by the bytes of a token, and then multiplies by
        block_size: divide by their product
    budget_bytes // → -(-budget_bytes //
    * block_size) → * block_size))
        a part of a block is no block: round down
    budget_bytes // → round(budget_bytes /
    * block_size) → * block_size))
        a part of a block is no block, and a part of a token is no token: round down
    """,
)


def _block(layers: int, heads: int, dim: int, itemsize: int, size: int) -> int:
    """Bytes of a block: K and V, in all layers."""
    return 2 * layers * heads * dim * itemsize * size


def check_num_blocks(function: Callable[[int, int, int, int, int, int], object]) -> Verdict:
    """Check function(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size)."""

    def read(answer: object) -> int:
        if (got := whole(answer)) is None:
            why = "; blocks are whole: use //, and only whole factors" * isinstance(answer, float)
            raise CannotBe(f"got {answer!r}, which is no whole number{why}")
        return got

    def where(got: int, budget: int, *sizes: int) -> str:
        told, needed = f"{(budget, *sizes)}: got {got:,}", got * _block(*sizes)
        if needed <= budget:
            return told
        if budget < GIB:
            return f"{told}, that is {needed:,} bytes in a budget of {budget:,} bytes"
        return f"{told}, that is {needed / GIB:,.4g} GiB in a budget of {budget // GIB:,} GiB"

    return judge(
        *("num_blocks", function, right_num_blocks, BUDGETS, BUDGET_SLIPS),
        "num_blocks: 10 GiB are 1,280 blocks of 16 for Llama-2 7B",
        read=read,
        where=where,
        otherwise=lambda got, want, budget, *sizes: (
            "those are more blocks than bytes; without parentheses Python goes from left to right: "
            "write budget_bytes // (the bytes of a block)"
            if got > budget
            else f"a block has {_block(*sizes):,} bytes here, so {want:,} fit"
        ),
    )


# ---- 2. block table → slots

TABLES = (
    ([3, 0, 5], 4, 10),
    ([7, 2], 4, 8),
    ([2, 9], 3, 5),
    ([6], 4, 3),
    ([4, 1, 8, 0], 2, 7),
    ([5, 3], 4, 4),  # it has a block more than it needs yet
    ([1], 16, 0),
)
SLOTS_SLIPS: Slips = slips_of(
    right_slots,
    """
    block_table[p // block_size] * block_size + p % block_size → p
        position // block_size is the logical block; the table says which physical one that is
    return [ → block_size = 4; return [
        a block need not have 4 slots: use block_size
    + p % block_size →
        all tokens of a block got its first slot; add position % block_size
    * block_size + p → + p
        block b begins at slot b × block_size
    range(num_tokens) → range(len(block_table) * block_size)
        the last block may be open: only the first num_tokens positions have a token
    range(num_tokens) → range(-(-num_tokens // block_size) * block_size)
        the last block may be open: stop after num_tokens
    """,
)


BY_BLOCK = (
    "block_table has one entry for each block: its index is p // block_size, and the offset in the "
    "block is p % block_size"
)


def check_slots(function: Callable[[list[int], int, int], object]) -> Verdict:
    """Check a learner's function(block_table, block_size, num_tokens) → slots by position."""

    def otherwise(got: list[int], want: list[int], table: list[int], size: int, n: int) -> str:
        if len(got) != n:
            return f"{len(got)} slots for {n} tokens"
        p = next(p for p in range(n) if got[p] != want[p])
        return (
            f"position {p} is number {p % size} of logical block {p // size}, which is block "
            f"{table[p // size]}: slot {want[p]}, not {got[p]}"
        )

    return judge(
        *("slots", function, right_slots, TABLES, SLOTS_SLIPS),
        "slots: block × block_size + offset, borders and open blocks too",
        keeps={0: "it changed block_table: only read the request's table"},
        read=_numbers,
        where=lambda got, *case: f"{case}: got {got}",
        otherwise=otherwise,
        explain={IndexError: BY_BLOCK, "not float": BY_BLOCK},
    )


# ---- 3. the slot of the next token

ALLOCATIONS: tuple[
    tuple[list[int], list[int], int, int], ...
] = (  # block_table, free_blocks, block_size, pos
    ([], [3, 0, 5], 4, 0),
    ([3], [0, 5], 4, 3),
    ([3], [0, 5], 4, 4),
    ([3, 0], [5, 6], 4, 5),
    ([7, 2, 5, 8], [1, 4], 4, 8),  # the table has its block already
    ([4, 9], [2, 6], 1, 2),
    ([6], [], 4, 2),
    ([6], [], 4, 4),
    ([6, 2], [], 4, 4),
    ([3], [5], 4, 4),
)
ALLOCATE_SLIPS: Slips = {
    **slips_of(
        right_allocate,
        """
    pos // block_size == len(block_table) → pos % block_size == 0
        the table has a block for position 8 already: a new one is needed only if logical block
        pos // block_size is not in the table
    pos // block_size == len(block_table) → pos // block_size not in block_table
        block_table has physical numbers, and pos // block_size is a logical one, an index: compare
        it with len(block_table)
    pos // block_size == len(block_table) → (pos + 1) // block_size == len(block_table)
        position 3 is the last one in its block; the next block is needed one position later
    pos // block_size == len(block_table) → True
        position 3 has room in the last block of the table: then take no block
    free_blocks.pop(0) → free_blocks.pop()
        the first of free_blocks is taken, not the last
    free_blocks.pop(0) → free_blocks.pop(free_blocks.index(min(free_blocks)))
        the first of free_blocks is taken, not the smallest
    free_blocks.pop(0) → free_blocks[0]
        block 3 is in the table now, and still in free_blocks, so another request would get it, too:
        take it out with free_blocks.pop(0)
    block_table.append(free_blocks.pop(0)) → block_table.insert(0, free_blocks.pop(0))
        a table is in reading order: append the new block
    block_table.append(free_blocks.pop(0)) → block_table = [*block_table, free_blocks.pop(0)]
        block_table itself has not changed, and the block is in no table: append it in place
    * block_size + pos % block_size →
        that is the block; its first slot is block · block_size, and then comes the offset
    + pos % block_size →
        that is the first slot of the block; add the offset pos % block_size
    * block_size + pos % block_size → + pos % block_size
        block b begins at slot b · block_size
    pos // block_size == len(block_table) → pos % block_size == 0
    block_table[pos // block_size] → block_table[-1]
        two slips: a block may begin here and be in the table already, and position 8 need not lie
        in the last block; the logical block is pos // block_size
    block_table[pos // block_size] → block_table[-1]
        position 8 lies in logical block pos // block_size; that need not be the last one
    """,
    ),
    "position 2 has room in the last block of the table: it needs no free block": (
        lambda table, free, *where: right_allocate(table, free, *where) if free else None
    ),
}


def _allocated(part: Callable[..., object], table: list[int], free: list[int], *where: int) -> Any:
    """What it gave, the table and the free blocks, after it; None if it forgot to give a slot."""
    is_full = not free
    got = part(table, free, *where)
    if got is None and not is_full:
        return None
    slot = whole(got)
    return [repr(got) if slot is None and got is not None else slot, table, free]


def check_allocate(function: Callable[[list[int], list[int], int, int], object]) -> Verdict:
    """Check a learner's function(block_table, free_blocks, block_size, pos) → slot, or None."""

    def where(got: list[Any], table: list[int], free: list[int], size: int, pos: int) -> str:
        told = f"table {table}, free {free}, blocks of {size}, position {pos}: got {got[0]}"
        return told + f", then table {got[1]}, free {got[2]}"

    def otherwise(
        got: list[Any], want: list[Any], table: list[int], free: list[int], size: int, pos: int
    ) -> str:
        if want[0] is None:
            return "no block is free: return None, and change nothing"
        if got[0] is None:
            return f"position {pos} lies in a block of the table: it needs no free block"
        if (taken := len(got[1]) - len(table)) > 1:
            return f"the table got {taken} blocks: take one, the first of free_blocks"
        if got[0] == want[0] and got[1:] != want[1:]:
            if got[1][:-1] == want[1]:
                last = "the last one in its block; the next block is needed one position later"
                room = "in a block of the table: then take no block"
                return f"position {pos} is {last if (pos + 1) % size == 0 else room}"
            return (
                f"the slot is right, but expected table {want[1]}, free {want[2]}: change both "
                "lists in place, with append and pop; `=` makes new ones"
            )
        return f"expected slot {want[0]}, then table {want[1]}, free {want[2]}"

    return judge(
        *("allocate", function, right_allocate, ALLOCATIONS, ALLOCATE_SLIPS),
        "allocate: a new block at the border, and not before",
        call=_allocated,
        where=where,
        otherwise=otherwise,
        explain={
            "pop": "No block is free: return None",
            IndexError: (
                "pos is in logical block pos // block_size: is that one in the table? If it is "
                "not, and no block is free, return None"
            ),
        },
    )


# ---- 5. which cells a query sees

# sequences 1 and 2 share their first two tokens; cells 2 and 5 are empty
CELLS: Cells = [(3, {1}), (0, {1, 2}), (None, set()), (2, {2})]
CELLS = [*CELLS, (1, {1, 2}), (None, set()), (2, {1}), (3, {2})]
SEEN_BY = [(CELLS, *query) for query in ((1, 3), (2, 2), (1, 1), (2, 0), (3, 5))]  # seq_id, pos
VISIBLE_SLIPS: Slips = slips_of(
    right_visible,
    """
    p <= pos → p < pos
        a query sees its own position, too: <=
    seq_id in own and →
        other sequences' cells are hidden: look at the owners
    p <= pos → i <= pos
        compare the cell's position with pos, not its index
    and p <= pos →
        what comes after pos is hidden
    p is not None → p
        position 0 is a position: ask `is not None`
    seq_id in own and p <= pos → (seq_id in own or p <= pos)
        both must hold, the owner and the position: `and`, not `or`
    seq_id in own → own == {seq_id}
        a cell may have several owners: ask `in`
    seq_id in own → own == seq_id
        some are seen: is the list made anew in the loop, or a set compared by `==`?
    p <= pos] → p <= pos][:1]
        only the first is there: is `return` inside the loop?
    enumerate(cells) → enumerate(cells[: [p for p, _ in cells].index(None)])
        an empty cell does not end the loop: later cells may be seen
    p <= pos → p >= pos
        the positions up to pos are seen, not those from pos on
    [i for → [p for
        return the cells' indices, not their positions
    """,
)


def check_visible(function: Callable[[Cells, int, int], object]) -> Verdict:
    """Check a learner's function(cells, seq_id, pos) → the visible cells, in any order."""

    def read(answer: object) -> list[int]:
        if isinstance(answer, list) and answer and all(isinstance(one, bool) for one in answer):
            raise CannotBe("return the numbers of the visible cells, not True or False for each")
        return sorted(_numbers(in_any_order(answer)))

    def otherwise(got: list[int], want: list[int], cells: Cells, *_: object) -> str:
        empty = [i for i in got if i < len(cells) and cells[i][0] is None]
        return "an empty cell holds nothing" if empty else f"expected {want}"

    return judge(
        *("visible", function, right_visible, SEEN_BY, VISIBLE_SLIPS),
        "visible: by owner and position, wherever the cells are",
        read=read,
        where=lambda got, cells, seq_id, pos: f"sequence {seq_id} at position {pos}: got {got}",
        otherwise=otherwise,
        explain={"NoneType": "An empty cell has position None: ask that first, then `and`"},
    )


# ---- 6. a context shift by hand

# (tokens, keep, discard, seq_id)
SHIFTS = ((10, 0, 4, "A"), (10, 2, 3, "A"), (9, 3, 5, "A"), (8, 4, 1, "C"))


SHIFT_SLIPS: Slips = slips_of(
    right_shift,
    """
    cache.seq_rm(seq_id, keep, keep + discard) → pass
        the dropped tokens are still there: take them out with seq_rm first
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, -1)
        that drops everything behind the first `keep` positions; p1 is keep + discard
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, discard)
    seq_id, keep + discard, -1, -discard → seq_id, discard, -1, -discard
        the dropped range ends at keep + discard, and there the others begin, too
    cache.seq_add(seq_id, keep + discard, -1, -discard) →
        the others still have their old positions: move them down with seq_add, which begins at
        keep + discard; its p1 is -1, to the end
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, discard)
        p1 is where the range ends, not how many positions it has: keep + discard
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, keep + discard - 1)
        p1 is the first position behind the range, which stays: keep + discard
    -discard → discard
        delta is below 0: the others move down
    -discard → -keep
        the others move down by as many positions as were dropped: delta is -discard
    -1, -discard → keep + 2 * discard, -discard
        all positions behind the dropped ones move: p1 is -1, which means to the end
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, 0, discard)
    seq_id, keep + discard, -1, -discard → seq_id, discard, -1, -discard
        the first `keep` positions stay: drop what is behind them
    seq_id, keep + discard, -1, -discard → seq_id, keep + discard + 1, -1, -discard
        the first position behind the dropped ones must move, too: seq_add begins at keep + discard
    -discard → -(keep + discard)
        the others move down by as many positions as were dropped: delta is -discard, without `keep`
    seq_id, keep + discard, -1, -discard → seq_id, 0, -1, -discard
        the first `keep` positions do not move: seq_add begins behind what was dropped
    cache.seq_rm(seq_id, keep, keep + discard) → pass
    -1, -discard) → -1, -discard); cache.seq_rm(seq_id, keep, keep + discard)
        drop first, then move: after seq_add the others stand where the dropped ones are
    cache.seq_rm(seq_id → cache.seq_rm("A"
    cache.seq_add(seq_id → cache.seq_add("A"
        the sequence need not be "A": its name is seq_id
    cache.seq_rm(seq_id → cache.seq_rm("A"
        seq_rm is called for "A", but the name of the sequence is seq_id
    cache.seq_add(seq_id → cache.seq_add("A"
        seq_add is called for "A", but the name of the sequence is seq_id
    """,
)


def _after(shift: Shift, num_tokens: int, keep: int, discard: int, seq_id: str) -> list[Cell]:
    """All cells of a small real cache in which a sequence was shifted; B has cells there, too.

    Without the shift of their keys, which the cache may have applied or not.
    """
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, k_head_dim=2, v_head_dim=2)
    storage = KVStorage(spec, num_tokens + 3)
    cache = CellKVCache(storage, RotaryEmbedding(2, 10_000.0))
    for name, count in (("B", 3), (seq_id, num_tokens)):
        cache.table.place(cache.table.find_slot(count) or (), name, range(count))
    shift(cache, seq_id, keep, discard)
    return [cache.table[number]._replace(shift=0) for number in range(storage.num_slots)]


def check_context_shift(function: Shift) -> Verdict:
    """Check a learner's function(cache, seq_id, keep, discard) on real caches, and in a model."""

    def positions(cells: Sequence[Cell], seq_id: str) -> list[int]:
        return sorted(c.pos for c in cells if c.pos is not None and seq_id in c.owners)

    def kept_of(cells: Sequence[Cell], seq_id: str) -> list[int]:
        """The tokens of a sequence that are left, by their positions before the shift."""
        return [number - 3 for number, cell in enumerate(cells) if seq_id in cell.owners]

    def otherwise(got: Sequence[Cell], want: Sequence[Cell], *case: Any) -> str:
        seq_id = case[-1]
        if got == _after(lambda *_: None, *case):
            return "the cache has not changed: call its seq_rm and its seq_add; is a range empty?"
        if positions(got, "B") != positions(want, "B"):
            return f"sequence B (another one) has the positions {positions(got, 'B')}"
        if positions(got, seq_id) != positions(want, seq_id):
            return f"expected {positions(want, seq_id)}"
        kept = " and expected ".join(str(kept_of(cells, seq_id)) for cells in (got, want))
        gone = "those from `keep` to keep + discard - 1 go"
        return f"that is right, but it kept the tokens {kept}: {gone}"

    def in_a_model(function: Shift) -> str:
        gap = shift_gap(random_model(1), [7 * i % 97 for i in range(20)], 6, function).logits
        longer = (
            "right in short texts, but in one of 20 tokens the logits are off by {:.2g}: does your "
            "seq_add go to the end, with p1 = -1?"
        )
        return longer.format(gap) * (gap > 1e-4)

    return judge(
        *("context_shift", function, right_shift, SHIFTS, SHIFT_SLIPS),
        "context_shift: the right cells in 4 caches, and keys turned to their new positions",
        call=_after,
        where=lambda got, num_tokens, keep, discard, seq_id: (
            f"{num_tokens} tokens, keep {keep}, discard {discard}: sequence {seq_id} has the "
            f"positions {positions(got, seq_id)}"
        ),
        otherwise=otherwise,
        explain={"'delta'": "It takes seq_id, p0, p1, delta"},
        then=in_a_model,
    )
