"""Introduced in notebook 04. The checks of notebook 04: each knows the usual mistakes by name."""

from collections.abc import Callable, Mapping, Sequence

from tutorial_engine.learn.block_attention_check import check_block_attention
from tutorial_engine.learn.block_checks import check_free, check_stale, check_take
from tutorial_engine.learn.cause_check import check_causes
from tutorial_engine.learn.find_check import check_find
from tutorial_engine.learn.own_memory import Cells
from tutorial_engine.learn.own_memory import slots as right_slots
from tutorial_engine.learn.own_memory import visible as right_visible
from tutorial_engine.learn.parts import listed, whole
from tutorial_engine.learn.verdict import Verdict, guarded, not_done

__all__ = [
    "check_block_attention",
    "check_causes",
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
        i for p, i in sorted((p, i) for i, (p, _) in enumerate(cells) if p is not None) if p <= q
    ],
    "by position, not by index: the first cell need not hold position 0": lambda cells, s, q: (
        sorted(right_visible(cells, s, q))
    ),
    "compare the cell's position with pos, not its index": lambda cells, s, q: [
        i for i, (p, own) in enumerate(cells) if s in own and i <= q
    ],
    "what comes after pos is hidden": lambda cells, s, q: right_visible(cells, s, 99),
    "the lowest position comes first": lambda cells, s, q: right_visible(cells, s, q)[::-1],
    "return the cells' indices, not their positions": lambda cells, s, q: [
        cells[i][0] for i in right_visible(cells, s, q)
    ],
}


def check_visible(function: Callable[[Cells, int, int], object]) -> Verdict:
    """Check a learner's function(cells, seq_id, pos) → the visible cells, by position."""
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
            if (got := listed(answer)) is None:
                told = f"visible must return a list of cell numbers, got {answer!r}"
                return Verdict(False, told)
            answers.append(got)
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
