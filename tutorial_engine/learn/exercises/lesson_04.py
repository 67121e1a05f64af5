"""The checks of notebook 04, and what they know of usual mistakes."""

from collections.abc import Callable
from typing import Any

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.shift import Shift, random_model, shift_gap
from tutorial_engine.lab.shift import context_shift as right_shift
from tutorial_engine.learn.exercises.facts import AsIs, shown
from tutorial_engine.learn.exercises.judge import Slips, judge, slips_of
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict
from tutorial_engine.learn.parts.holder import whole, whole_numbers
from tutorial_engine.learn.parts.memory import Cells, in_any_order
from tutorial_engine.learn.parts.memory import allocate as right_allocate
from tutorial_engine.learn.parts.memory import num_blocks as right_num_blocks
from tutorial_engine.learn.parts.memory import slots as right_slots
from tutorial_engine.learn.parts.memory import visible as right_visible
from tutorial_engine.model.rope import RotaryEmbedding

GIB = 2**30


def _numbers(answer: object) -> list[int]:
    if (numbers := whole_numbers(answer)) is None:
        raise CannotBe(f"it must return a list of numbers, got {shown(answer)}")
    return numbers


# ---- 1. how many blocks

SMALL_BLOCKS = (2, 3, 5, 2, 4)  # of 2 · 2 · 3 · 5 · 2 · 4 = 480 bytes
BUDGETS = (
    (960, *SMALL_BLOCKS),  # two blocks, and nothing is left
    (959, *SMALL_BLOCKS),  # a byte less
    (479, *SMALL_BLOCKS),  # not one block
    (10 * GIB, 32, 32, 128, 2, 16),  # Llama-2 7B
    (GIB, 28, 8, 128, 2, 16),  # Qwen3 0.6B
    (130_800, 4, 2, 32, 4, 4),  # the shipped model, and 63.87 tokens, which are 15.97 blocks
)
BUDGET_SLIPS: Slips = slips_of(
    right_num_blocks,
    """
    * num_layers →
        counts one layer alone; each layer has K and V of its own
    2 * →
        counts K alone, half the bytes of a block; V needs as many
    * block_size →
        gives the tokens that fit; the blocks are asked for, and a block has `block_size` tokens
    * itemsize →
        counts one byte for a number; a number takes `itemsize` bytes
    * itemsize → * 8 * itemsize
        counts 8 times `itemsize` bytes for a number; `itemsize` is in bytes already
    * num_kv_heads →
        counts one head of K and V; there are `num_kv_heads` heads
    * head_dim →
        counts one number for K of a head; K of a head has `head_dim` numbers
    * block_size) → ) * block_size
        gives the tokens that fit, times `block_size`; a block takes the bytes of `block_size`
        tokens ▸ budget_bytes // (the bytes of a block)
    (2 * num_layers → 2 * num_layers
    * block_size) → * block_size
        gives half the budget, times all the sizes; the more bytes a block takes, the fewer blocks
        fit ▸ budget_bytes // (the bytes of a block)
    budget_bytes // → -(-budget_bytes //
    * block_size) → * block_size))
        rounds up, and counts a part of a block as a block; a part of a block is no block
    budget_bytes // → round(budget_bytes /
    * block_size) → * block_size))
        rounds to the nearest, and counts half a block as a block; a part of a block is no block
    """,
)


def _block(layers: int, heads: int, dim: int, itemsize: int, size: int) -> int:
    """Bytes of a block: K and V, in all layers."""
    return 2 * layers * heads * dim * itemsize * size


def check_num_blocks(function: Callable[[int, int, int, int, int, int], object]) -> Verdict:
    """Check function(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size)."""

    def read(answer: object) -> int:
        if (got := whole(answer)) is None:
            raise CannotBe(f"it must return an int, the number of blocks; got {answer!r}")
        return got

    return judge(
        *("num_blocks", function, right_num_blocks, BUDGETS, BUDGET_SLIPS),
        "num_blocks: 10 GiB are 1,280 blocks of 16 for Llama-2 7B",
        read=read,
        also={
            "yours take up": lambda got, budget, *sizes: (
                f"{got * _block(*sizes):,} bytes of {budget:,}"
            )
        },
    )


# ---- 2. block table → slots

TABLES = (
    ([2], 3, 1),  # one token
    ([1, 0], 2, 3),  # an open last block
    ([5, 3], 4, 4),  # it has a block more than it needs yet
    ([1], 16, 0),  # no token
    ([3, 0, 5], 4, 10),
    ([7, 2], 4, 8),  # all blocks are full
    ([2, 9], 3, 5),  # block_size is no power of 2
    ([6], 4, 3),
    ([4, 1, 8, 0], 2, 7),
)
SLOTS_SLIPS: Slips = slips_of(
    right_slots,
    """
    block_table[p // block_size] * block_size + p % block_size → p
        gives the positions themselves, as if logical block i were block i; `block_table` says which
        block it is
    return [ → block_size = 4; return [
        counts 4 slots in every block; a block has `block_size` slots
    + p % block_size →
        gives all tokens of a block its first slot; each token has its own offset in the block
    * block_size + p → + p
        lets block b begin at slot b; the b blocks before it have `block_size` slots each
    range(num_tokens) → range(len(block_table) * block_size)
        gives slots for the whole table; only the positions 0 to `num_tokens - 1` have a token
    range(num_tokens) → range(-(-num_tokens // block_size) * block_size)
        gives all slots of the last block; only the positions 0 to `num_tokens - 1` have a token
    """,
)


def _first_wrong(got: list[int], table: list[int], size: int, num_tokens: int) -> str | None:
    """Where the first position that differs lies; None if only the number of slots is wrong."""
    pairs = enumerate(zip(got, right_slots(table, size, num_tokens), strict=False))
    p = next((p for p, (mine, right) in pairs if mine != right), None)
    if p is None:
        return None
    return f"position {p}: offset {p % size} in logical block {p // size}"


def check_slots(function: Callable[[list[int], int, int], object]) -> Verdict:
    """Check a learner's function(block_table, block_size, num_tokens) → slots by position."""
    return judge(
        *("slots", function, right_slots, TABLES, SLOTS_SLIPS),
        "slots: block × block_size + offset, borders and open blocks too",
        keeps={0: "it changed block_table, which belongs to the request"},
        read=_numbers,
        also={"that is": _first_wrong},
    )


# ---- 3. the slot of the next token

ALLOCATIONS: tuple[
    tuple[list[int], list[int], int, int], ...
] = (  # block_table, free_blocks, block_size, pos
    ([], [3, 0, 5], 4, 0),
    ([3], [0, 5], 4, 3),  # the last position of a block
    ([3], [0, 5], 4, 4),  # and the next one
    ([3, 0], [5, 6], 4, 5),
    ([7, 2, 5, 8], [1, 4], 4, 8),  # the table has its block already
    ([4, 9], [2, 6], 2, 4),
    ([3], [5], 4, 2),
    ([6, 1], [], 4, 6),  # no block is free, and none is needed
    ([6], [], 4, 4),  # none is free, and one is needed
    ([6, 2], [5], 4, 4),  # a block begins here, and the table has it
    ([6, 2, 1], [], 4, 4),
    ([3], [5], 4, 4),  # the last free one
)
ALLOCATE_SLIPS: Slips = {
    **slips_of(
        right_allocate,
        """
    pos // block_size == len(block_table) → pos % block_size == 0
        takes a block whenever the offset is 0; the table may have this logical block already
    pos // block_size == len(block_table) → pos // block_size not in block_table
        takes a block unless pos // block_size stands in `block_table`; the entries are physical
        blocks
    pos // block_size == len(block_table) → (pos + 1) // block_size >= len(block_table)
        takes a block at the last position of a block; the next block is needed one position later
    pos // block_size == len(block_table) → True
        takes a block for every position; a position may lie in a block that the table has
    free_blocks.pop(0) → free_blocks.pop()
        takes the last of `free_blocks`; the first one is next
    free_blocks.pop(0) → free_blocks.pop(free_blocks.index(min(free_blocks)))
        takes the smallest of `free_blocks`; the first one is next, whatever its number is
    free_blocks.pop(0) → free_blocks[0]
        leaves the block that it took in `free_blocks`; another request would get it, too
        ▸ free_blocks.pop(0)
    block_table.append(free_blocks.pop(0)) → block_table.insert(0, free_blocks.pop(0))
        puts the new block first in the table; the blocks stand in the order of the text
    block_table.append(free_blocks.pop(0)) → block_table = [*block_table, free_blocks.pop(0)]
        gives the right slot, but does not change `block_table` itself; the block is in no table
        then
    * block_size + pos % block_size →
        gives the number of the block; a slot in this block is asked for
    + pos % block_size →
        gives the first slot of the block; position `pos` has an offset in the block
    * block_size + pos % block_size → + pos % block_size
        lets block b begin at slot b; the b blocks before it have `block_size` slots each
    pos // block_size == len(block_table) → pos % block_size == 0
    block_table[pos // block_size] → block_table[-1]
        takes a block whenever the offset is 0, and gives a slot of the last; a table may have more
        than it needs
    block_table[pos // block_size] → block_table[-1]
        gives a slot in the last block of the table; `pos` may lie in an earlier block
    """,
    ),
    "gives None wherever no block is free; a position in a block of the table needs none": (
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
    what = f"slot {slot}" if slot is not None else repr(got)
    return AsIs(f"{what}; then block_table {table}, free_blocks {free}")


def _asked_for(table: list[int], free: list[int], size: int, pos: int) -> dict[str, object]:
    logical = pos // size
    has = f"here block {table[logical]}" if logical < len(table) else "not in the table yet"
    where = AsIs(f"{pos}: {_place(pos, size, 'logical block')}, {has}")
    return {"block_table": table, "free_blocks": free, "block_size": size, "pos": where}


def _place(position: int, size: int, kind: str) -> str:
    return f"offset {position % size} in {kind} {position // size}"


def _of_its_slot(got: str, table: list[int], free: list[int], size: int, pos: int) -> str | None:
    """Where the slot that it gave lies; None if it gave the right one, or none."""
    want = right_allocate([*table], [*free], size, pos)
    word, _, number = got.partition(";")[0].partition(" ")
    if word != "slot" or want is None or int(number) == want:
        return None
    return f"{_place(int(number), size, 'block')}; expected {_place(want, size, 'block')}"


def check_allocate(function: Callable[[list[int], list[int], int, int], object]) -> Verdict:
    """Check a learner's function(block_table, free_blocks, block_size, pos) → slot, or None."""
    return judge(
        *("allocate", function, right_allocate, ALLOCATIONS, ALLOCATE_SLIPS),
        "allocate: a new block at the border, and not before",
        call=_allocated,
        inputs=_asked_for,
        also={"your slot is": _of_its_slot},
    )


# ---- 5. which cells a query sees

# sequences 1 and 2 share their first two tokens; cells 2 and 5 are empty
CELLS: Cells = [(3, {1}), (0, {1, 2}), (None, set()), (2, {2})]
CELLS = [*CELLS, (1, {1, 2}), (None, set()), (2, {1}), (3, {2})]
SEEN_BY: list[tuple[Cells, int, int]] = [  # cells, seq_id, pos
    ([(0, {1}), (1, {1})], 1, 0),  # its own position 0, and one that comes later
    ([(0, {1}), (0, {2})], 2, 0),  # another's cell
    ([(1, {1}), (0, {1})], 1, 0),  # the later position lies in front
    ([(0, {1, 2}), (1, {1})], 1, 1),  # a cell of two owners
    ([(None, set()), (0, {1})], 1, 1),  # an empty cell in front
    *((CELLS, *query) for query in ((1, 3), (2, 2), (1, 1), (2, 0), (3, 5))),
]
VISIBLE_SLIPS: Slips = slips_of(
    right_visible,
    """
    p <= pos → p < pos
        hides the query's own position; a query sees the positions up to `pos`, `pos` included
    seq_id in own and →
        shows cells of other sequences, too; `seq_id` must be one of a cell's owners
    p <= pos → i <= pos
        shows the cells up to number `pos`; the position in a cell counts, and cells lie in any
        order
    and p <= pos →
        shows what comes after `pos`, too; a query sees the positions up to `pos`
    p is not None → p
        never shows position 0; position 0 is a position like all others, and an empty cell has None
        ▸ p is not None
    seq_id in own and p <= pos → (seq_id in own or p <= pos)
        shows a cell if its owner or its position is right; both must be right
    seq_id in own → own == {seq_id}
        hides a cell of several owners from all of them; it is enough that `seq_id` is one of them
    seq_id in own → own == seq_id
        never shows a cell; a query sees the cells of its sequence up to position `pos`
    p <= pos] → p <= pos][:1]
        shows only the first of the cells; all cells that the query may see are asked for
    enumerate(cells) → enumerate(cells[: ([p for p, _ in cells] + [None]).index(None)])
        shows nothing behind an empty cell; cells lie in any order, and later ones may be seen
    p <= pos → p >= pos
        shows the positions from `pos` on; a query sees those up to `pos`
    [i for → [p for
        gives the positions in the right cells; the numbers of these cells are asked for
    """,
)


def check_visible(function: Callable[[Cells, int, int], object]) -> Verdict:
    """Check a learner's function(cells, seq_id, pos) → the visible cells, in any order."""

    def read(answer: object) -> list[int]:
        if isinstance(answer, list) and answer and all(isinstance(item, bool) for item in answer):
            raise CannotBe("it must return numbers of cells, got True or False for each cell")
        return _numbers(in_any_order(answer))

    def of_these(cells: Cells, numbers: set[int]) -> str | None:
        found = [
            f"cell {i} (position {cells[i][0]}, owners {cells[i][1] or 'none'})"
            for i in sorted(numbers)[:2]
        ]
        return ", ".join(found) + ", ..." * (len(numbers) > 2) if found else None

    return judge(
        *("visible", function, right_visible, SEEN_BY, VISIBLE_SLIPS),
        "visible: by owner and position, wherever the cells are",
        read=read,
        also={
            "too many": lambda got, cells, *query: of_these(
                cells, {*got} - {*right_visible(cells, *query)}
            ),
            "lacking": lambda got, cells, *query: of_these(
                cells, {*right_visible(cells, *query)} - {*got}
            ),
        },
    )


# ---- 6. a context shift by hand

SHIFTS = (  # tokens, keep, discard, seq_id
    (4, 1, 1, "A"),
    (3, 0, 1, "A"),  # nothing is kept in front
    (5, 3, 1, "C"),  # another name, and keep is larger than discard
    (6, 1, 3, "A"),
    (10, 0, 4, "A"),
    (10, 2, 3, "A"),
    (9, 3, 5, "A"),
    (8, 4, 1, "C"),
    (14, 1, 8, "A"),  # a text that is longer than the others
)
SHIFT_SLIPS: Slips = slips_of(
    right_shift,
    """
    cache.seq_rm(seq_id, keep, keep + discard) → pass
    cache.seq_add(seq_id, keep + discard, -1, -discard) → cache.seq_ids
        changes nothing in the cache; `discard` tokens go, and the others move down
    cache.seq_rm(seq_id, keep, keep + discard) → pass
        leaves the dropped tokens, and moves the others to their positions; each position has one
        token
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, -1)
        drops everything behind the first `keep` positions; only `discard` tokens go
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, discard)
    seq_id, keep + discard, -1, -discard → seq_id, discard, -1, -discard
        drops and moves as if the range ended at `discard`; it has `discard` positions from `keep`
        on
    cache.seq_add(seq_id, keep + discard, -1, -discard) →
        drops the right tokens, but leaves the others where they were; the positions must have no
        gap
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, discard)
        drops the positions up to `discard`; the range has `discard` positions from `keep` on
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, keep, keep + discard - 1)
        leaves the last of the tokens that go; `seq_rm` means the positions up to p1 − 1
    -discard → discard
        moves the others up; they fill the gap, so they move down
    -discard → -keep
        moves the others down by `keep`; the gap has `discard` positions
    -1, -discard → keep + 2 * discard, -discard
        moves only `discard` positions behind the dropped ones; all positions behind the gap move
    cache.seq_rm(seq_id, keep, keep + discard) → cache.seq_rm(seq_id, 0, discard)
    seq_id, keep + discard, -1, -discard → seq_id, discard, -1, -discard
        drops the first `discard` tokens; the first `keep` positions stay
    seq_id, keep + discard, -1, -discard → seq_id, keep + discard + 1, -1, -discard
        does not move the first token behind the dropped ones; all positions behind the gap move
    -discard → -(keep + discard)
        moves the others down by keep + discard; the gap has `discard` positions
    seq_id, keep + discard, -1, -discard → seq_id, 0, -1, -discard
        moves the first `keep` tokens, too; only what is behind the gap moves
    cache.seq_rm(seq_id, keep, keep + discard) → pass
    -1, -discard) → -1, -discard); cache.seq_rm(seq_id, keep, keep + discard)
        loses tokens that had moved into the dropped range; the tokens to drop are those that stood
        there before
    cache.seq_rm(seq_id → cache.seq_rm("A"
    cache.seq_add(seq_id → cache.seq_add("A"
        always shifts sequence "A"; the sequence to be shifted is `seq_id`
    cache.seq_rm(seq_id → cache.seq_rm("A"
        drops tokens of "A", whatever `seq_id` is; the sequence to be shifted is `seq_id`
    cache.seq_add(seq_id → cache.seq_add("A"
        moves tokens of "A", whatever `seq_id` is; the sequence to be shifted is `seq_id`
    """,
)


def _after(shift: Shift, num_tokens: int, keep: int, discard: int, seq_id: str) -> AsIs:
    """What is in a small real cache in which a sequence was shifted; B has cells there, too.

    Without the shift of their keys, which the cache may have applied or not.
    """
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, k_head_dim=2, v_head_dim=2)
    storage = KVStorage(spec, num_tokens + 3)
    cache = CellKVCache(storage, RotaryEmbedding(2, 10_000.0))
    for name, count in (("B", 3), (seq_id, num_tokens)):
        cache.table.place(cache.table.find_slot(count) or (), name, range(count))
    shift(cache, seq_id, keep, discard)
    cells = [cache.table[number] for number in range(storage.num_slots)]
    places = []
    for owner in sorted({seq_id, "B"}.union(*(cell.owners for cell in cells)), key="B".__eq__):
        # token p of the sequence lies in cell 3 + p, of B in cell p
        held = [(number, cell.pos) for number, cell in enumerate(cells) if owner in cell.owners]
        tokens = [number - 3 * (owner == seq_id) for number, _ in held]
        if owner != "B" or held != [(0, 0), (1, 1), (2, 2)]:
            places.append(f"{owner}: tokens {tokens} at positions {[pos for _, pos in held]}")
    return AsIs("; ".join(places))


def check_context_shift(function: Shift) -> Verdict:
    """Check a learner's function(cache, seq_id, keep, discard) on real caches, and in a model."""

    def in_a_model(function: Shift) -> str:
        gap = shift_gap(random_model(1), [7 * i % 97 for i in range(20)], 6, function).logits
        off = f"the right cells, but after 20 tokens the logits of a model are off by {gap:.2g}"
        return off * (gap > 1e-4)

    return judge(
        *("context_shift", function, right_shift, SHIFTS, SHIFT_SLIPS),
        f"context_shift: the right cells in {len(SHIFTS)} caches, and keys turned to their new "
        "positions",
        call=_after,
        inputs=lambda num_tokens, keep, discard, seq_id: {
            "seq_id": seq_id,
            "keep": keep,
            "discard": discard,
            "in the cache": AsIs(f"{seq_id}: {num_tokens} tokens, from position 0 on; B: 3 tokens"),
        },
        then=in_a_model,
    )
