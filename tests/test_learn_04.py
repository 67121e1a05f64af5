"""The checks, bug zoo and naive pages of notebook 04: right answers pass, mistakes are named."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from engines import one_thread

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.learn.bugs_04 import BUGS_04, Seen, StaleBlocks, scenes, stress, table
from tutorial_engine.learn.checks_04 import (
    check_eviction,
    check_mended,
    check_num_blocks,
    check_slots,
    check_visible,
)
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

GIB = 2**30
# the three prompts of the notebooks
PROMPTS = [
    [389, 390, 259, 387, 475, 296, 259, 333, 423, 14],
    [34, 274, 296, 259, 339, 396, 14],
    [47, 285, 313],
]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


# -- right answers ----------------------------------------------------------------------------


def num_blocks(budget: int, layers: int, heads: int, dim: int, itemsize: int, size: int) -> int:
    return budget // (2 * layers * heads * dim * itemsize * size)


def num_blocks_of_the_package(
    budget: int, layers: int, heads: int, dim: int, itemsize: int, size: int
) -> int:
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim, dtype=dtype
    )
    return num_blocks_in(budget, spec, size)


def slots(block_table: list[int], block_size: int, num_tokens: int) -> list[int]:
    return [block_table[p // block_size] * block_size + p % block_size for p in range(num_tokens)]


def slots_as_tensor(block_table: list[int], block_size: int, num_tokens: int) -> torch.Tensor:
    p = torch.arange(num_tokens)
    return torch.tensor(block_table)[p // block_size] * block_size + p % block_size


def slots_block_by_block(block_table: list[int], block_size: int, num_tokens: int) -> list[int]:
    every = [b * block_size + i for b in block_table for i in range(block_size)]
    return every[:num_tokens]


Refs, Hashes, Cached = dict[int, int], dict[int, Any], dict[Any, int]


def free(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    for block in reversed(table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            free_queue.append(block)


def free_by_emptying(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    while table:
        block = table.pop()
        ref_cnt[block] -= 1
        if not ref_cnt[block]:
            del ref_cnt[block]
            free_queue += [block]


def take(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = free_queue.pop(0)
    if hash_of[block] is not None:
        del cached[hash_of[block]]
        hash_of[block] = None
    return block


def take_by_popping(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block, *free_queue[:] = free_queue
    cached.pop(hash_of.pop(block, None), None)
    return block


class Mended(StaleBlocks):
    def forget(self, block: int) -> bool:
        return BlockManager.forget(self, block)


class MendedBefore(StaleBlocks):
    def _claim(self) -> tuple[int, bool]:
        self.cached.pop(self.blocks[next(iter(self.free_queue))].hash or b"", None)
        return super()._claim()


Cells = list[tuple[int | None, set[int]]]


def visible(cells: Cells, seq_id: int, pos: int) -> list[int]:
    seen = [i for i, (p, own) in enumerate(cells) if p is not None and seq_id in own and p <= pos]
    return sorted(seen, key=lambda i: cells[i][0] or 0)


def visible_by_position(cells: Cells, seq_id: int, pos: int) -> tuple[int, ...]:
    found = {p: i for i, (p, own) in enumerate(cells) if seq_id in own}
    return tuple(found[p] for p in range(pos + 1) if p in found)


# -- mistakes ---------------------------------------------------------------------------------


def head_first(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    free(table[::-1], ref_cnt, free_queue)


def free_at_the_front(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    for block in table:
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            free_queue.insert(0, block)


def free_head_at_the_front(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    rest = list(free_queue)
    free_queue.clear()
    head_first(table, ref_cnt, free_queue)
    free_queue += rest


def free_shared(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    for block in reversed(table):
        ref_cnt[block] -= 1
        free_queue.append(block)


def free_uncounted(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    free_queue += [block for block in reversed(table) if ref_cnt[block] == 1]


def free_counted_once(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    for block in reversed(table):
        if ref_cnt[block] == 1:
            ref_cnt[block] = 0
            free_queue.append(block)


def free_elsewhere(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> list[int]:
    for block in table:
        ref_cnt[block] -= 1
    return [*free_queue, *reversed(table)]


def free_forgets_long_tables(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    free(table[:4], ref_cnt, free_queue)


def take_last(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    free_queue.reverse()
    block = take(free_queue, hash_of, cached)
    free_queue.reverse()
    return block


def take_leaving(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    return take(free_queue[:], hash_of, cached)


def take_keeping_hash(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = free_queue.pop(0)
    hash_of[block] = None
    return block


def take_forgetting_all(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = take(free_queue, hash_of, cached)
    cached.clear()
    return block


def take_half(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = free_queue.pop(0)
    cached.pop(hash_of[block], None)
    return block


def take_hashed_only(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = free_queue.pop(0)
    del cached[hash_of[block]]
    hash_of[block] = None
    return block


class KeepsBoth(StaleBlocks):
    def _claim(self) -> tuple[int, bool]:
        block, _ = self.free_queue.popitem(last=False)
        self.blocks[block].ref_cnt = 1
        return block, False


class ForgetsAll(StaleBlocks):
    def _claim(self) -> tuple[int, bool]:
        self.cached.clear()
        for block in self.blocks:
            block.hash = None
        return super()._claim()


class FindsNothing(StaleBlocks):
    def forget(self, block: int) -> bool:
        self.prefix_caching = False
        return BlockManager.forget(self, block)


class CountsNobody(Mended):
    def _claim(self) -> tuple[int, bool]:
        block, evicted = BlockManager._claim(self)
        self.blocks[block].ref_cnt = 0
        return block, evicted


class ClearsFoundOnly(StaleBlocks):
    def _claim(self) -> tuple[int, bool]:
        self.cached.clear()
        return super()._claim()


class NumberOnly(StaleBlocks):
    def forget(self, block: int) -> Any:
        super().forget(block)
        return block


class ForgetsSilently(StaleBlocks):
    def forget(self, block: int) -> Any:
        BlockManager.forget(self, block)


class Open(StaleBlocks):
    def forget(self, block: int) -> Any: ...


class Broken(StaleBlocks):
    def forget(self, block: int) -> bool:
        raise KeyError("boom")


def wrong_blocks(formula: Callable[..., Any]) -> Callable[..., Any]:
    """As num_blocks, from its result and its arguments."""
    return lambda *case: formula(num_blocks(*case), *case)


Check = Callable[..., Verdict]
Answer = tuple[Any, ...]

RIGHT: list[tuple[Check, Answer]] = [
    (check_num_blocks, (num_blocks,)),
    (check_num_blocks, (num_blocks_of_the_package,)),
    (check_slots, (slots,)),
    (check_slots, (slots_as_tensor,)),
    (check_slots, (slots_block_by_block,)),
    (check_eviction, (free, take)),
    (check_eviction, (free_by_emptying, take_by_popping)),
    (check_mended, (Mended,)),
    (check_mended, (MendedBefore,)),
    (check_visible, (visible,)),
    (check_visible, (visible_by_position,)),
]

BUDGET_WRONG: list[tuple[Any, str]] = [
    (
        lambda b, n, h, d, i, s: b // (2 * h * d * i * s),
        "40,960, that is 320 GiB in a budget of 10",
    ),
    (lambda b, n, h, d, i, s: b // (2 * h * d * i * s), "every layer has K and V of its own"),
    (lambda b, n, h, d, i, s: b // (n * h * d * i * s), "2,560, that is 20 GiB"),
    (lambda b, n, h, d, i, s: b // (n * h * d * i * s), "V needs as much room as K"),
    (lambda b, n, h, d, i, s: b // (2 * n * h * d * i), "room for block_size tokens"),
    (lambda b, n, h, d, i, s: b // (2 * n * h * d * s), "itemsize bytes"),
    (lambda b, n, h, d, i, s: b // (2 * n * d * i * s), "each of the heads"),
    (lambda b, n, h, d, i, s: b // (2 * n * h * i * s), "head_dim numbers"),
    (
        lambda *case: -(-case[0] // (2 * case[1] * case[2] * case[3] * case[4] * case[5])),
        "no block",
    ),
    (lambda b, *m: round(b / num_bytes(*m)), "not to the nearest"),
    (lambda b, *m: b / num_bytes(*m), "1280.0 is a float"),
    (lambda *case: float(num_blocks(*case)), "use //"),
    (lambda *case: 1280, "expected 585"),
    (lambda *case: 1, "expected 1,280"),
    (lambda *case: "many", "no whole number"),
    (lambda *case: True, "no whole number"),
]


def num_bytes(layers: int, heads: int, dim: int, itemsize: int, size: int) -> int:
    return 2 * layers * heads * dim * itemsize * size


SLOTS_WRONG: list[tuple[Any, str]] = [
    (lambda t, s, n: list(range(n)), "which physical one"),
    (lambda t, s, n: [p // s * s + p % s for p in range(n)], "which physical one"),
    (lambda t, s, n: [t[p // s] * s for p in range(n)], "add position % block_size"),
    (lambda t, s, n: [t[p // s] + p % s for p in range(n)], "begins at slot b × block_size"),
    (lambda t, s, n: slots(t, s, s * len(t)), "only the first num_tokens"),
    (lambda t, s, n: slots(t, s, -(-n // s) * s), "stop after num_tokens"),
    (
        lambda t, s, n: [t[max(p - 1, 0) // s] * s + p % s for p in range(n)],
        "position 4 is number 0",
    ),
    (lambda t, s, n: slots(t, s, n - 1), "9 slots for 10 tokens"),
    (lambda t, s, n: [slot + 1 for slot in slots(t, s, n)], "position 0"),
    (lambda t, s, n: [t[p // s] for p in range(n)], "slot 12, not 3"),
    (lambda t, s, n: [t[(p + 1) // s] for p in range(n + 1)], "IndexError"),
    (lambda t, s, n: 7, "must return a list"),
    (lambda t, s, n: [float(slot) for slot in slots(t, s, n)], "must return a list"),
]

EVICTION_WRONG: list[tuple[Answer, str]] = [
    ((head_first, take), "finds nothing, though 1, 2 and 3 are still there"),
    ((free_at_the_front, take), "7 and 8 have been free for longer"),
    ((free_head_at_the_front, take), "at the end, the last block first"),
    ((free_elsewhere, take), "change it in place"),
    ((free_shared, take), "in another's table still"),
    ((free_uncounted, take), "nobody holds these blocks"),
    ((free_counted_once, take), "another holds 0 and 1"),
    ((free_forgets_long_tables, take), "the queue is"),
    ((free, take_last), "the first one is next: 3"),
    ((free, take_leaving), "3 is taken, expected [5]"),
    ((free, take_keeping_hash), "the freed-block bug"),
    ((free, take_forgetting_all), "or nothing is ever found"),
    ((free, take_half), "block 3 is empty: None"),
    ((free, take_hashed_only), "KeyError: None; block 5 has no hash"),
    ((free, lambda *_: "3"), "got '3'"),
]

MENDED_WRONG: list[tuple[Any, str]] = [
    (StaleBlocks, "is found under another hash"),
    (StaleBlocks, "begins like B) says"),
    (KeepsBoth, "would write to block"),
    (ForgetsAll, "0 are found in the cache where 8 can be"),
    (FindsNothing, "0 are found in the cache where 8 can be"),
    (CountsNobody, "holders"),
    (ClearsFoundOnly, "cannot be found"),
    (NumberOnly, "return True or False: could it be found"),
    (ForgetsSilently, "it forgets, but does not return"),
    (int, "hand over the class"),
    (BlockManager(4, 4), "hand over the class"),
]

VISIBLE_WRONG: list[tuple[Any, str]] = [
    (lambda c, s, q: visible(c, s, q - 1), "sees its own position"),
    (lambda c, s, q: sorted(visible(c, s, q)), "by position, not by index"),
    (lambda c, s, q: visible(c, s, 10**6), "what comes after pos is hidden"),
    (lambda c, s, q: [i for i, (p, own) in enumerate(c) if s in own and i <= q], "not its index"),
    (
        lambda c, s, q: [i for i, (p, own) in enumerate(c) if p <= q],
        "an empty cell has position None",
    ),
    (lambda c, s, q: visible([(p, {s}) for p, _ in c], s, q), "look at the owners"),
    (lambda c, s, q: [c[i][0] for i in visible(c, s, q)], "not their positions"),
    (lambda c, s, q: visible([(p or 0, {s}) for p, _ in c], s, q), "an empty cell holds nothing"),
    (lambda c, s, q: visible(c, s, q)[::-1], "lowest position comes first"),
    (lambda c, s, q: visible(c, s, q)[1:], "expected [1, 4, 6, 0]"),
    (lambda c, s, q: 3, "must return a list"),
    (lambda c, s, q: c + 1, "TypeError"),
]

WRONG: list[tuple[Check, Answer, str]] = [
    *((check_num_blocks, (answer,), words) for answer, words in BUDGET_WRONG),
    *((check_slots, (answer,), words) for answer, words in SLOTS_WRONG),
    *((check_eviction, answer, words) for answer, words in EVICTION_WRONG),
    *((check_mended, (answer,), words) for answer, words in MENDED_WRONG),
    *((check_visible, (answer,), words) for answer, words in VISIBLE_WRONG),
]


def nothing(*_: object) -> None:
    """What an exercise is before anybody has touched it."""


OPEN: list[tuple[Check, Answer]] = [
    (check_num_blocks, (nothing,)),
    (check_slots, (nothing,)),
    (check_eviction, (nothing, nothing)),
    (check_eviction, (free, nothing)),
    (check_eviction, (nothing, take)),
    (check_eviction, (free, lambda *_: ...)),
    (check_mended, (Open,)),
    (check_visible, (nothing,)),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_is_accepted(check: Check, answer: Answer) -> None:
    verdict = check(*answer)
    assert verdict.ok is True, verdict


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_mistake_is_named(check: Check, answer: Answer, words: str) -> None:
    verdict = check(*answer)
    assert verdict.ok is False
    assert words in verdict.message, verdict


@pytest.mark.parametrize(("check", "answer"), OPEN)
def test_untouched_exercise_is_open(check: Check, answer: Answer) -> None:
    verdict = check(*answer)
    assert verdict.ok is None and "not done yet" in verdict.message, verdict


@pytest.mark.parametrize("error", [KeyError("boom"), NotImplementedError("boom")])
@pytest.mark.parametrize("check", sorted({check for check, _ in RIGHT}, key=lambda c: c.__name__))
def test_exception_becomes_a_verdict(check: Check, error: Exception) -> None:
    def fails(*_: object) -> Any:
        raise error

    failing = type("Failing", (StaleBlocks,), {"forget": fails})
    answer = {check_eviction: (fails, fails), check_mended: (failing,)}.get(check, (fails,))
    verdict = check(*answer)
    assert verdict.ok is False
    assert f"{type(error).__name__}: " in verdict.message and "boom" in verdict.message


def test_exercise_gets_fresh_arguments_each_time() -> None:
    """Whoever changes what it was given spoils nothing for the next one."""

    def emptying(block_table: list[int], block_size: int, num_tokens: int) -> list[int]:
        answer = slots(block_table, block_size, num_tokens)
        block_table.clear()
        return answer

    def emptying_cells(cells: Cells, seq_id: int, pos: int) -> list[int]:
        answer = visible(cells, seq_id, pos)
        for _, owners in cells:
            owners.clear()
        cells.clear()
        return answer

    for _ in range(2):
        assert check_slots(emptying).ok and check_visible(emptying_cells).ok


def test_visible_is_the_rule_of_the_cell_table() -> None:
    draw = random.Random(0)
    for _ in range(50):
        table_ = CellTable(12)
        for seq_id in (1, 2):
            cells = draw.sample([i for i in range(12) if table_[i].pos is None], 4)
            table_.place(cells, seq_id, range(4))
        table_.seq_rm(1, 2)
        table_.seq_cp(1, 3)
        plain: Cells = [(table_[i].pos, set(table_[i].owners)) for i in range(12)]
        for seq_id in (1, 2, 3, 4):
            for pos in range(5):
                assert visible(plain, seq_id, pos) == table_.visible(seq_id, pos)


# -- the freed-block bug ----------------------------------------------------------------------


def test_mended_blocks_are_checked_on_any_model_and_prompts(model: Qwen3ForCausalLM) -> None:
    assert check_mended(Mended, model, PROMPTS).ok is True
    verdict = check_mended(StaleBlocks, model, PROMPTS)
    assert verdict.ok is False and "F (begins like B) says" in verdict.message, verdict


def test_a_mended_class_that_runs_in_circles_gets_its_verdict() -> None:
    class Leaks(StaleBlocks):
        def _claim(self) -> tuple[int, bool]:
            self.free_queue.popitem()
            return super()._claim()

    verdict = check_mended(Leaks)
    assert verdict.ok is False, verdict


# -- the bug zoo ------------------------------------------------------------------------------

# bug -> the tests that see it; every bug is seen by another one
SEEN: dict[str, set[str]] = {
    "no bug": set(),
    "a taken block keeps its hash": {"small_pool", "found", "integrity"},
    "hashes without the parent's": {"together"},
    "found before it is written": {"together"},
    "a shared block is written": {"samples", "integrity"},
    "blocks are freed head first": {"found"},
}


@pytest.fixture(scope="module")
def rows(model: Qwen3ForCausalLM) -> list[Seen]:
    return stress(model, PROMPTS)


def test_table_has_a_row_for_each_bug(rows: Sequence[Seen]) -> None:
    assert [row.bug for row in rows] == ["no bug", *BUGS_04] == list(SEEN)
    assert rows[0] == Seen("no bug", "3 of 3", "5 of 5", "3 of 3", "4 of 4", 8, "fine")


@pytest.mark.parametrize("name", SEEN)
def test_a_bug_of_blocks_is_seen_by_some_tests_and_never_alone(
    rows: Sequence[Seen], name: str
) -> None:
    right = rows[0]._asdict()
    got = next(row for row in rows if row.bug == name)._asdict()
    assert {test for test in got if got[test] != right[test]} - {"bug"} == SEEN[name], got
    assert got["alone"] == "3 of 3"


def test_freeing_head_first_costs_hits_and_no_token(rows: Sequence[Seen]) -> None:
    *_, head = rows
    assert (head.small_pool, head.found, rows[0].found) == ("4 of 4", 0, 8)


def test_bugs_are_gone_again_and_the_table_is_the_same_each_time(
    model: Qwen3ForCausalLM, rows: Sequence[Seen]
) -> None:
    assert stress(model, PROMPTS, ["a taken block keeps its hash", ""]) == [rows[1], rows[0]]


def test_table_is_one_line_for_each_row(rows: Sequence[Seen]) -> None:
    lines = table(rows).splitlines()
    assert len(lines) == 1 + len(rows) and max(map(len, lines)) <= 120
    assert lines[0].split()[:3] == ["bug", "alone", "together"]
    for line, row in zip(lines[1:], rows, strict=True):
        assert line.startswith(row.bug) and line.endswith(row.integrity)


@pytest.mark.parametrize("prompts", [PROMPTS[:2], [PROMPTS[2]] * 3, [*PROMPTS[:2], []]])
def test_prompts_that_cannot_show_the_bugs_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least 8, 4 and 1 tokens"):
        scenes(prompts)
