"""Introduced in notebook 04. The checks of notebook 04: each knows the usual mistakes by name."""

from collections.abc import Callable, Mapping, Sequence

from tutorial_engine.cache.cell_table import Cell
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.lab.shift import Shift, random_model, shift_gap
from tutorial_engine.lab.shift import context_shift as right_shift
from tutorial_engine.learn.block_attention_check import check_block_attention
from tutorial_engine.learn.block_checks import check_free, check_stale, check_take
from tutorial_engine.learn.cause_check import check_causes
from tutorial_engine.learn.find_check import check_find
from tutorial_engine.learn.own_memory import Cells
from tutorial_engine.learn.own_memory import slots as right_slots
from tutorial_engine.learn.own_memory import visible as right_visible
from tutorial_engine.learn.parts import listed, whole
from tutorial_engine.learn.verdict import Verdict, guarded, has_gap, not_done
from tutorial_engine.model.rope import RotaryEmbedding

__all__ = [
    "check_block_attention",
    "check_causes",
    "check_context_shift",
    "check_find",
    "check_free",
    "check_num_blocks",
    "check_slots",
    "check_stale",
    "check_take",
    "check_visible",
]

Formula = Callable[..., object]
Mistakes = Mapping[str, Formula]  # what to say -> the function that makes this mistake
GIB = 2**30


def _numbers(answer: object) -> list[int] | None:
    """A list of whole numbers, whatever holds them. None for anything else."""
    found = listed(answer)
    numbers = None if found is None else [whole(one) for one in found]
    return (
        None if numbers is None or None in numbers else [one for one in numbers if one is not None]
    )


def _mistake(cases: Sequence[tuple], answers: Sequence[object], mistakes: Mistakes) -> str:
    """What to say about the mistake that gives all of these answers; "" if none does."""
    told = (
        words
        for words, formula in mistakes.items()
        if all(formula(*case) == got for case, got in zip(cases, answers, strict=True))
    )
    return next(told, "")


# ---- 1. how many blocks

BUDGETS = (
    (10 * GIB, 32, 32, 128, 2, 16),  # Llama-2 7B
    (GIB, 28, 8, 128, 2, 16),  # Qwen3 0.6B
    (130_000, 4, 2, 32, 4, 4),  # the shipped model, and 15.87 blocks
)
BUDGET_MISTAKES: Mistakes = {
    "every layer has K and V of its own": lambda b, n, h, d, i, s: b // (2 * h * d * i * s),
    "V needs as much room as K": lambda b, n, h, d, i, s: b // (n * h * d * i * s),
    "a block has room for block_size tokens": lambda b, n, h, d, i, s: b // (2 * n * h * d * i),
    "a number takes itemsize bytes": lambda b, n, h, d, i, s: b // (2 * n * h * d * s),
    "each of the heads has K and V": lambda b, n, h, d, i, s: b // (2 * n * d * i * s),
    "a head's K is head_dim numbers": lambda b, n, h, d, i, s: b // (2 * n * h * i * s),
    "a part of a block is no block: round down": lambda b, *m: -(-b // _block(*m)),
    "a part of a block is no block: round down, not to the nearest": lambda b, *m: round(
        b / _block(*m)
    ),
}


def _block(layers: int, heads: int, dim: int, itemsize: int, size: int) -> int:
    """Bytes of a block: K and V, in all layers."""
    return 2 * layers * heads * dim * itemsize * size


def check_num_blocks(function: Callable[[int, int, int, int, int, int], object]) -> Verdict:
    """Check function(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size)."""

    def run() -> Verdict:
        answers: list[int] = []
        for case in BUDGETS:
            answer: object = function(*case)
            bad = not_done("num_blocks", answer, function)
            if bad is not None:
                return bad
            if isinstance(answer, float):
                return Verdict(False, f"num_blocks: {answer} is a float; blocks are whole: use //")
            if (got := whole(answer)) is None:
                return Verdict(False, f"num_blocks: got {answer!r}, which is no whole number")
            answers.append(got)
        wants = [budget // _block(*sizes) for budget, *sizes in BUDGETS]
        if answers == wants:
            return Verdict(True, "num_blocks: 10 GiB are 1,280 blocks of 16 for Llama-2 7B")
        why = _mistake(BUDGETS, answers, BUDGET_MISTAKES)
        i = next(i for i, want in enumerate(wants) if answers[i] != want)
        (budget, *sizes), got = BUDGETS[i], answers[i]
        told = f"num_blocks{BUDGETS[i]}: got {got:,}"
        if got > wants[i]:
            unit, name = (GIB, "GiB") if budget >= GIB else (1, "bytes")
            needed = (
                f"{got * _block(*sizes) / unit:,.4g}" if unit > 1 else f"{got * _block(*sizes):,}"
            )
            told += f", that is {needed} {name} in a budget of {budget // unit:,} {name}"
        return Verdict(False, f"{told}; {why or f'expected {wants[i]:,}'}")

    return guarded("num_blocks", run, function)


# ---- 2. block table → slots

TABLES = (
    ([3, 0, 5], 4, 10),
    ([7, 2], 4, 8),
    ([2, 9], 4, 5),
    ([6], 4, 3),
    ([4, 1, 8, 0], 2, 7),
    ([5, 3], 4, 4),  # it has a block more than it needs yet
    ([1], 16, 0),
)
SLOT_MISTAKES: Mistakes = {
    "position // block_size is the logical block; the table says which physical one that is": (
        lambda table, size, n: list(range(n))
    ),
    "all tokens of a block got its first slot; add position % block_size": (
        lambda table, size, n: [table[p // size] * size for p in range(n)]
    ),
    "block b begins at slot b × block_size": (
        lambda table, size, n: [table[p // size] + p % size for p in range(n)]
    ),
    "the last block may be open: only the first num_tokens positions have a token": (
        lambda table, size, n: [block * size + i for block in table for i in range(size)]
    ),
    "the last block may be open: stop after num_tokens": (
        lambda table, size, n: [b * size + i for b in table[: -(-n // size)] for i in range(size)]
    ),
}


def check_slots(function: Callable[[list[int], int, int], object]) -> Verdict:
    """Check a learner's function(block_table, block_size, num_tokens) → slots by position."""

    def run() -> Verdict:
        answers = []
        for table, size, n in TABLES:
            answer = function(list(table), size, n)
            bad = not_done("slots", answer, function)
            if bad is not None:
                return bad
            if (numbers := _numbers(answer)) is None:
                return Verdict(False, f"slots must return a list of slot numbers, got {answer!r}")
            answers.append(numbers)
        why = _mistake(TABLES, answers, SLOT_MISTAKES)
        for (table, size, n), got in zip(TABLES, answers, strict=True):
            want = right_slots(table, size, n)
            if got == want:
                continue
            where = f"slots({table}, {size}, {n}): got {got}"
            if not why and len(got) != n:
                why = f"{len(got)} slots for {n} tokens"
            if not why:
                p = next(p for p in range(n) if got[p] != want[p])
                why = (
                    f"position {p} is number {p % size} of logical block {p // size}, which is "
                    f"block {table[p // size]}: slot {want[p]}, not {got[p]}"
                )
            return Verdict(False, f"{where}; {why}")
        return Verdict(True, "slots: block × block_size + offset, borders and open blocks too")

    return guarded("slots", run, function)


# ---- 5. which cells a query sees

SEEN_BY = ((1, 3), (2, 2), (1, 1), (2, 0), (3, 5))  # (seq_id, pos)


def _cells() -> list[tuple[int | None, set[int]]]:
    """Sequences 1 and 2 share their first two tokens; cells 2 and 5 are empty."""
    first: Cells = [(3, {1}), (0, {1, 2}), (None, set()), (2, {2})]
    return [*first, (1, {1, 2}), (None, set()), (2, {1}), (3, {2})]


VISIBLE_MISTAKES: Mistakes = {
    "a query sees its own position, too: <=": lambda cells, s, q: right_visible(cells, s, q - 1),
    "other sequences' cells are hidden: look at the owners": lambda cells, s, q: [
        i for i, (p, _) in enumerate(cells) if p is not None and p <= q
    ],
    "compare the cell's position with pos, not its index": lambda cells, s, q: [
        i for i, (p, own) in enumerate(cells) if s in own and i <= q
    ],
    "what comes after pos is hidden": lambda cells, s, q: right_visible(cells, s, 99),
    "return the cells' indices, not their positions": lambda cells, s, q: sorted(
        cells[i][0] or 0 for i in right_visible(cells, s, q)
    ),
}


def check_visible(function: Callable[[Cells, int, int], object]) -> Verdict:
    """Check a learner's function(cells, seq_id, pos) → the visible cells, in any order."""
    cases = [(_cells(), *query) for query in SEEN_BY]

    def run() -> Verdict:
        answers = []
        for _, seq_id, pos in cases:
            try:
                answer = function(_cells(), seq_id, pos)
            except TypeError as error:
                if "NoneType" not in str(error):
                    raise
                return Verdict(False, f"visible: an empty cell has position None ({error})")
            bad = not_done("visible", answer, function)
            if bad is not None:
                return bad
            if (got := _numbers(answer)) is None:
                told = f"visible must return a list of cell numbers, got {answer!r}"
                return Verdict(False, told)
            answers.append(sorted(got))
        why = _mistake(cases, answers, VISIBLE_MISTAKES)
        for (cells, seq_id, pos), got in zip(cases, answers, strict=True):
            want = right_visible(cells, seq_id, pos)
            if got == want:
                continue
            where = f"visible: sequence {seq_id} at position {pos}: got {got}"
            empty = [i for i in _numbers(got) or () if i < len(cells) and cells[i][0] is None]
            if empty and not why:
                why = "an empty cell holds nothing"
            return Verdict(False, f"{where}; {why or f'expected {want}'}")
        return Verdict(True, "visible: by owner and position, wherever the cells are")

    return guarded("visible", run, function)


# ---- 6. a context shift by hand

SHIFTS = ((10, 0, 4), (10, 2, 3), (9, 3, 5), (8, 4, 1))  # (tokens, keep, discard)


def _by_steps(*steps: Callable[[CellKVCache, int, int], object]) -> Shift:
    """A shift of sequence A by these steps: (cache, keep, discard)."""
    return lambda cache, _, keep, discard: [step(cache, keep, discard) for step in steps]


SHIFT_MISTAKES: dict[str, Shift] = {
    "the others still have their old positions: move them down with seq_add": _by_steps(
        lambda cache, keep, discard: cache.seq_rm("A", keep, keep + discard)
    ),
    "p1 is where the range ends, not how many positions it has: keep + discard": _by_steps(
        lambda cache, keep, discard: cache.seq_rm("A", keep, discard),
        lambda cache, keep, discard: cache.seq_add("A", keep + discard, -1, -discard),
    ),
    "delta is below 0: the others move down": _by_steps(
        lambda cache, keep, discard: cache.seq_rm("A", keep, keep + discard),
        lambda cache, keep, discard: cache.seq_add("A", keep + discard, -1, discard),
    ),
    "the first `keep` positions stay: drop what is behind them": _by_steps(
        lambda cache, keep, discard: cache.seq_rm("A", 0, discard),
        lambda cache, keep, discard: cache.seq_add("A", discard, -1, -discard),
    ),
    "the first `keep` positions do not move: seq_add begins behind what was dropped": _by_steps(
        lambda cache, keep, discard: cache.seq_rm("A", keep, keep + discard),
        lambda cache, keep, discard: cache.seq_add("A", 0, -1, -discard),
    ),
    "drop first, then move: after seq_add the others stand where the dropped ones are": _by_steps(
        lambda cache, keep, discard: cache.seq_add("A", keep + discard, -1, -discard),
        lambda cache, keep, discard: cache.seq_rm("A", keep, keep + discard),
    ),
}


def _after(shift: Shift, num_tokens: int, keep: int, discard: int) -> list[Cell]:
    """All cells of a small real cache in which sequence A was shifted; B has cells there, too."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, k_head_dim=2, v_head_dim=2)
    storage = KVStorage(spec, num_tokens + 3)
    cache = CellKVCache(storage, RotaryEmbedding(2, 10_000.0))
    for seq_id, count in (("B", 3), ("A", num_tokens)):
        cache.table.place(cache.table.find_slot(count) or (), seq_id, range(count))
    shift(cache, "A", keep, discard)
    return [cache.table[number] for number in range(storage.num_slots)]


def check_context_shift(function: Shift) -> Verdict:
    """Check a learner's function(cache, seq_id, keep, discard) on real caches, and in a model."""

    def positions(cells: Sequence[Cell], seq_id: str) -> list[int]:
        return sorted(c.pos for c in cells if c.pos is not None and seq_id in c.owners)

    def run() -> Verdict:
        got = [_after(function, *case) for case in SHIFTS]
        want = [_after(right_shift, *case) for case in SHIFTS]
        if got == want:
            ids = [7 * i % 97 for i in range(20)]
            gap = shift_gap(random_model(1), ids, 6, function).logits
            assert gap < 1e-4, f"a fresh run has other logits, by {gap}"
            told = "the right cells in 4 caches; a model of one layer then has a fresh run's logits"
            return Verdict(True, f"context_shift: {told}")
        if got == [_after(_by_steps(), *case) for case in SHIFTS]:
            if has_gap(function):
                return Verdict(None, "not done yet: there is still a `...` in context_shift")
            told = "the cache has not changed: call its seq_rm and its seq_add"
            return Verdict(False, f"context_shift: {told}")
        i = next(i for i, cells in enumerate(want) if got[i] != cells)
        (num_tokens, keep, discard), name = SHIFTS[i], "A"
        if positions(got[i], "B") != positions(want[i], "B"):
            name = "B (another one)"
        pair = [positions(cells[i], name[0]) for cells in (got, want)]
        mistakes = SHIFT_MISTAKES.items()
        known = (w for w, wrong in mistakes if [_after(wrong, *case) for case in SHIFTS] == got)
        return Verdict(
            False,
            f"context_shift: {num_tokens} tokens, keep {keep}, discard {discard}: sequence {name} "
            f"has the positions {pair[0]}; {next(known, f'expected {pair[1]}')}",
        )

    return guarded("context_shift", run, function)
