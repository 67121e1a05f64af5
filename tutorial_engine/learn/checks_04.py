"""Introduced in notebook 04. The checks of notebook 04: each knows the usual mistakes by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tutorial_engine.learn.block_checks import check_eviction, check_mended
from tutorial_engine.learn.cause_check import check_causes
from tutorial_engine.learn.verdict import Verdict, guarded, not_done

__all__ = [
    "check_causes",
    "check_eviction",
    "check_mended",
    "check_num_blocks",
    "check_slots",
    "check_visible",
]

Formula = Callable[..., object]
Mistakes = Mapping[str, Formula]  # what to say -> the function that makes this mistake
GIB = 2**30


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(value: object) -> Any:
    """Ranges, tuples, arrays and tensors are lists, too."""
    if isinstance(value, list | tuple | range):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


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


def check_num_blocks(function: Callable[[int, int, int, int, int, int], int]) -> Verdict:
    """Check function(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size)."""

    def run() -> Verdict:
        answers = []
        for case in BUDGETS:
            answers.append(got := function(*case))
            bad = not_done("num_blocks", got)
            if bad is not None:
                return bad
            if isinstance(got, float):
                return Verdict(False, f"num_blocks: {got} is a float; blocks are whole: use //")
            if not _whole(got):
                return Verdict(False, f"num_blocks: got {got!r}, which is no whole number")
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

    return guarded("num_blocks", run)


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


def _slots(table: Sequence[int], size: int, n: int) -> list[int]:
    return [table[p // size] * size + p % size for p in range(n)]


def check_slots(function: Callable[[list[int], int, int], list[int]]) -> Verdict:
    """Check a learner's function(block_table, block_size, num_tokens) → slots by position."""

    def run() -> Verdict:
        answers = []
        for table, size, n in TABLES:
            answers.append(got := _listed(function(list(table), size, n)))
            bad = not_done("slots", got)
            if bad is not None:
                return bad
            if not isinstance(got, list) or not all(_whole(slot) for slot in got):
                return Verdict(False, f"slots must return a list of slot numbers, got {got!r}")
        why = _mistake(TABLES, answers, SLOT_MISTAKES)
        for (table, size, n), got in zip(TABLES, answers, strict=True):
            want = _slots(table, size, n)
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

    return guarded("slots", run)


# ---- 5. which cells a query sees

Cells = Sequence[tuple[int | None, set[int]]]
SEEN_BY = ((1, 3), (2, 2), (1, 1), (2, 0), (3, 5))  # (seq_id, pos)


def _cells() -> list[tuple[int | None, set[int]]]:
    """Sequences 1 and 2 share their first two tokens; cells 2 and 5 are empty."""
    first: Cells = [(3, {1}), (0, {1, 2}), (None, set()), (2, {2})]
    return [*first, (1, {1, 2}), (None, set()), (2, {1}), (3, {2})]


def _visible(cells: Cells, seq_id: int, pos: int) -> list[int]:
    seen = [(p, i) for i, (p, own) in enumerate(cells) if p is not None and seq_id in own]
    return [i for p, i in sorted(seen) if p <= pos]


VISIBLE_MISTAKES: Mistakes = {
    "a query sees its own position, too: <=": lambda cells, s, q: _visible(cells, s, q - 1),
    "other sequences' cells are hidden: look at the owners": lambda cells, s, q: [
        i for p, i in sorted((p, i) for i, (p, _) in enumerate(cells) if p is not None) if p <= q
    ],
    "by position, not by index: the first cell need not hold position 0": lambda cells, s, q: (
        sorted(_visible(cells, s, q))
    ),
    "compare the cell's position with pos, not its index": lambda cells, s, q: [
        i for i, (p, own) in enumerate(cells) if s in own and i <= q
    ],
    "what comes after pos is hidden": lambda cells, s, q: _visible(cells, s, 99),
    "the lowest position comes first": lambda cells, s, q: _visible(cells, s, q)[::-1],
    "return the cells' indices, not their positions": lambda cells, s, q: [
        cells[i][0] for i in _visible(cells, s, q)
    ],
}


def check_visible(function: Callable[[Cells, int, int], Sequence[int]]) -> Verdict:
    """Check a learner's function(cells, seq_id, pos) → the visible cells, by position."""
    cases = [(_cells(), *query) for query in SEEN_BY]

    def run() -> Verdict:
        answers = []
        for _, seq_id, pos in cases:
            try:
                got = _listed(function(_cells(), seq_id, pos))
            except TypeError as error:
                if "NoneType" not in str(error):
                    raise
                return Verdict(False, f"visible: an empty cell has position None ({error})")
            answers.append(got)
            bad = not_done("visible", got)
            if bad is not None:
                return bad
            if not isinstance(got, list):
                return Verdict(False, f"visible must return a list of cell numbers, got {got!r}")
        why = _mistake(cases, answers, VISIBLE_MISTAKES)
        for (cells, seq_id, pos), got in zip(cases, answers, strict=True):
            want = _visible(cells, seq_id, pos)
            if got == want:
                continue
            where = f"visible: sequence {seq_id} at position {pos}: got {got}"
            empty = [i for i in got if _whole(i) and 0 <= i < len(cells) and cells[i][0] is None]
            if empty and not why:
                why = "an empty cell holds nothing"
            return Verdict(False, f"{where}; {why or f'expected {want}'}")
        return Verdict(True, "visible: by owner and position, wherever the cells are")

    return guarded("visible", run)
