"""The exercises of 04, 05 and the appendices: answers that are right, and wrong ones."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from exercises import RIGHT, Exercise, Function, but
from learners import (
    free_by_emptying,
    take_by_popping,
)
from torch import Tensor
from torch.nn.functional import silu

from tutorial_engine import learn
from tutorial_engine.lab.shift import context_shift
from tutorial_engine.learn.exercises import lesson_04 as c4
from tutorial_engine.learn.exercises.judge import rewritten, slips_of
from tutorial_engine.learn.exercises.lesson_04_block_attention import BLOCK_SLIPS
from tutorial_engine.learn.exercises.lesson_05_blocks import FREE_SLIPS, TAKE_SLIPS
from tutorial_engine.learn.exercises.lesson_05_find import FIND_SLIPS
from tutorial_engine.learn.exercises.lesson_a1 import RANK_SLIPS, _part, check_rank_mlp
from tutorial_engine.learn.exercises.lesson_a2 import (
    END_TO_END_SLIPS,
    SIZE_SLIPS,
    GpuMemory,
    check_end_to_end,
    check_size,
    check_step,
    right_end_to_end,
    right_step,
)
from tutorial_engine.learn.exercises.lesson_a3 import (
    HITS_SLIPS,
    LOG_SLIPS,
    check_hits,
    check_log,
    right_hits,
)

# -- notebooks 04, 05 and appendix A1 -------------------------------------------------------------

Refs, Cached = dict[int, int], dict[Any, int]


ALLOCATE = slips_of(
    RIGHT["allocate"],
    """
    block_table.append(free_blocks.pop(0)) → block_table = [*block_table, free_blocks[0]]
        slot 20; then block_table [3], free_blocks [5]
    pos // block_size == len(block_table) → (pos + 1) // block_size == len(block_table)
        then block_table [3, 0], free_blocks [5]
    block_table.append(free_blocks.pop(0)) → block_table += free_blocks; free_blocks.clear()
        then block_table [3, 0, 5], free_blocks []
    == len(block_table) → == len(block_table) or pos == 5 and free_blocks
        then block_table [3, 0, 5], free_blocks [6]
    if not free_blocks: → if False:
        IndexError: pop from empty list
    """,
)
FREE = slips_of(
    RIGHT["free"],
    """
    free_queue[:] = without → free_queue = without
    + with_hash → if without else free_queue; free_queue += with_hash
        ref_cnt {3: 0, 4: 0}, free_queue [7]
    without + free_queue → free_queue
        ref_cnt {3: 0, 4: 0}, free_queue [4, 3, 7]
    free_queue + with_hash → free_queue
        ref_cnt {5: 0, 2: 0}, free_queue [7]
    for block in table: → for block in [block for block in table if ref_cnt[block] == 1]:
    = without + → = without[::-1] +
        ref_cnt {0: 2, 4: 0}, free_queue [7, 4]
    without + free_queue + with_hash → without + with_hash
        ref_cnt {5: 0, 2: 0}, free_queue [2, 5]
    == 0] → == 0 or hashes[block] is None]
        ref_cnt {4: 0, 6: 1}, free_queue [6, 7, 4]
    ref_cnt[block] -= 1 → ref_cnt[block] = 0 if hashes[block] is None else ref_cnt[block] - 1
        ref_cnt {4: 0, 6: 0}, free_queue [6, 7, 4]
    free_queue[:] = → [ref_cnt.pop(block) for block in gone]; free_queue[:] =
        ref_cnt {}, free_queue [7, 2, 5]
    if ref_cnt[block] == 0] → ]
        ref_cnt {0: 1, 4: 0}, free_queue [7, 4, 0]
    free_queue[:] = → hashes.update(dict.fromkeys(hashes)); free_queue[:] =
        hashes: block 5 had 'a', block 2 had 'b', block 7 had 'h'; `free` only reads them
    + with_hash → + with_hash; len(table) == 1 and free_queue.sort()
        in random operations your free gives another answer
    """,
)
TAKE = slips_of(
    RIGHT["take"],
    """
    del cached → hashes[block] = None; del cached
        in the line: hashes[block] = None; del
    pop(0) → pop()
    hashes[block] is not None → True
        take raised KeyError: None
    del cached[hashes[block]] → del cached[block]
        take raised KeyError: 3
    hashes[block] is not None → True
        KeyError: None
    hashes[block] is not None → hashes[block] is not None and len(free_queue) < 5
        in random operations your take gives another answer
    """,
)
FIND = slips_of(
    RIGHT["find"],
    """
    token_ids[end - block_size : end] → token_ids[end : end + block_size]
        looked up  9; not looked up: 1
    token_ids[end - block_size : end] → token_ids[:end]
        hash_of got 2 tokens in blocks of 1; the input was
    hash_of(last, token_ids[end - block_size : end]) → hash_of(token_ids[:end], last)
        hash_of got [1] as the parent
    break → return None
        it returns None at a miss
    hash_of(last, token_ids[end - block_size : end]) → hash(tuple(token_ids[:end]))
    if last not in cached: → if False:
        in the line: found.append(cached[last])
    cached[last]) → last := cached[last])
        hash_of got 5 as the parent
    return found → cached.clear(); return found
        `cached` has changed
    range(block_size, len(token_ids), → range(block_size, len(token_ids) + block_size - 1,
    break → continue
        left to run  no token
    range(block_size, len(token_ids), block_size) → iter(lambda: block_size, 0)
    hash_of(last, → hash_of(None,
        called again and again
    token_ids[end - block_size : end] → [token_ids[end - block_size]]
        hash_of got 1 token for the first block, in blocks of 2
    """,
)


def find_all_hashes_first(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> Any:
    """Open blocks have hashes here as well, which nobody has; and the answer is a tensor."""
    keys: list[Any] = []
    for start in range(0, len(tokens), size):
        parent = keys[-1] if keys else None
        keys.append(hash_of(parent, torch.tensor(tokens[start : start + size])))
    count = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
    return torch.tensor([cached[key] for key in keys[: min(count, (len(tokens) - 1) // size)]])


def find_then_pop(tokens: list[int], size: int, hash_of: Function, cached: Cached) -> list[int]:
    """Right for every prompt that has a token."""
    found = RIGHT["find"]([*tokens, 0], size, hash_of, cached)
    if len(found) * size == len(tokens):
        found.pop()
    return found  # type: ignore[no-any-return]


def takes_only_its_own(queue: list[int], hashes: dict[int, Any], cached: Cached) -> int:
    """Another block with the same hash, if there were one, would still be found."""
    block = queue.pop(0)
    if hashes[block] is not None and cached[hashes[block]] == block:
        del cached[hashes[block]]
    hashes[block] = None
    return block


def find_with_a_gap(tokens: list[int], size: int, *_: object) -> list[int]:
    for _ in range(size, len(tokens), size):
        ...
    return []


def visible_and_clear(cells: Any, seq_id: int, pos: int) -> tuple[int, ...]:
    found = {p: i for i, (p, own) in enumerate(cells) if seq_id in own}
    cells.clear()  # it is a copy
    return tuple(found[p] for p in range(pos + 1) if p in found)


def shift_token_by_token(cells: Any, seq_id: Any, keep: int, discard: int) -> None:
    for _ in range(discard):
        cells.seq_rm(seq_id, keep, keep + 1)
        cells.seq_add(seq_id, keep, -1, -1)


def drops_one_too_late(cells: Any, seq_id: Any, keep: int, discard: int) -> None:
    cells.seq_rm(seq_id, keep + 1, keep + discard + 1)
    cells.seq_add(seq_id, keep + discard + 1, -1, -discard)


def shifts_and_applies(cache: Any, seq_id: Any, keep: int, discard: int) -> None:
    """The keys are turned at once, and not when they are read next."""
    context_shift(cache, seq_id, keep, discard)
    cache.apply_shifts()


Table = list[int]


def attention_with_a_gap(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Any:
    """It raises, because of what is still open."""
    total, out = 0, 0
    for _ in table:
        ...
    return out / total


def with_a_gap_in_a_line(q: Tensor, *_: Any) -> Any:
    shares: Any = q
    shares = ...
    return shares / 2


def in_numpy(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """A running softmax, of which PyTorch sees nothing."""
    size, m, total, out = k.shape[1], -np.inf, 0.0, np.zeros(v.shape[-1], np.float32)
    for start, block in zip(range(0, n, size), table, strict=False):
        keys, values = (pool.numpy()[block, : n - start] for pool in (k, v))
        scores = keys @ q.numpy() / len(q) ** 0.5
        new = max(m, scores.max())
        p, factor = np.exp(scores - new), np.exp(m - new)
        m, total, out = new, total * factor + p.sum(), out * factor + p @ values
    return torch.from_numpy(out / total)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, table: Table, kv_len: int) -> Tensor:
    size, m = k.shape[1], torch.tensor(-math.inf)
    total, out = torch.zeros(()), torch.zeros(v.shape[-1])
    for p in range(kv_len):
        where = table[p // size], p % size
        scored = k[where].dot(q) / math.sqrt(len(q))
        new = torch.maximum(m, scored)
        total = total * torch.exp(m - new) + torch.exp(scored - new)
        out = out * torch.exp(m - new) + torch.exp(scored - new) * v[where]
        m = new
    return out / total


def two_passes(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """The largest score first, then the sums: every key is read twice."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scale = math.sqrt(len(q))
    m = max(float((k[b, : min(size, n - at)] @ q).max()) for at, b in blocks) / scale
    total, out = 0.0, torch.zeros(v.shape[-1])
    for at, b in blocks:
        p = torch.exp(k[b, : min(size, n - at)] @ q / scale - m)
        total, out = total + float(p.sum()), out + p @ v[b, : len(p)]
    return out / total


def gathered(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    keys, values = k[table].flatten(0, 1)[:n], v[table].flatten(0, 1)[:n]
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def list_of_scores(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """The scores of all blocks in a list first, then the sums: every key is read once."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scores = [k[b, : min(size, n - at)] @ q / math.sqrt(len(q)) for at, b in blocks]
    m = max(float(own.max()) for own in scores)
    p = [torch.exp(own - m) for own in scores]
    sums = [own @ v[b, : len(own)] for own, (_, b) in zip(p, blocks, strict=True)]
    return torch.stack(sums).sum(0) / sum(own.sum() for own in p)


def copied_blocks(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    """A copy of each block in a list, then one softmax."""
    pairs = list(zip(range(0, n, k.shape[1]), table, strict=False))
    keys, values = ([x[block, : n - start].clone() for start, block in pairs] for x in (k, v))
    weights = torch.cat([key @ q for key in keys]).div(math.sqrt(len(q))).softmax(0)
    parts = weights.split([len(key) for key in keys])
    return sum((p @ value for p, value in zip(parts, values, strict=True)), torch.zeros(()))


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, table: Table, n: int) -> Tensor:
    k /= math.sqrt(len(q))
    return RIGHT["block_attention"](q * math.sqrt(len(q)), k, v, table, n)


def log_by_tokens(size: int, one: int, block: int, longest: int) -> tuple[int, float]:
    """As vLLM reckons it, with ceil of a float."""
    requests = (size // one // block) / math.ceil(longest / block)
    return int(longest * requests), requests


def end_to_end_by_blocks(tables: list[list[int]], lens: list[int], size: int) -> Any:
    slots = [
        [block * size + offset for block in table for offset in range(size)][:n]
        for table, n in zip(tables, lens, strict=True)
    ]
    return torch.tensor([0, *lens]).cumsum(0), torch.tensor([one for own in slots for one in own])


def size_by_doubling(lens: list[int]) -> Any:
    rows, longest = 1, 64
    while rows < len(lens):
        rows *= 2
    while longest < max(lens):
        longest *= 2
    needed = sum(lens)
    lens.clear()  # it is a copy
    return [rows, longest, torch.tensor((rows * longest - needed) / (rows * longest))]


def but_rounded(lens: list[int]) -> Any:
    rows, longest, unused = size_by_doubling(lens)
    return rows, longest, round(float(unused), 4)


def step_that(keep: Callable[[Any, Tensor], object]) -> Function:
    """A make_step whose step keeps the positions in its own way; right if they stay."""

    def make_step(gpu: GpuMemory) -> Any:
        lens, positions = gpu.tensor([1, 1]), gpu.tensor(range(8))
        replay = gpu.record(lambda lens, at: at < lens[:, None], lens, positions)

        def step(new_lens: list[int]) -> Tensor:
            lens.copy_(torch.tensor(new_lens))
            return replay()

        keep(step, positions)
        return step

    return make_step


step_that_keeps = step_that(lambda step, positions: setattr(step, "keeps", positions))
step_that_keeps_a_view = step_that(lambda step, positions: setattr(step, "keeps", positions[:]))
step_that_keeps_the_last = step_that(lambda _, positions: setattr(step_that, "last", positions))


def step_that_warms_up(gpu: GpuMemory) -> Any:
    step = step_that_keeps(gpu)
    step([1, 1])
    return step


def hits_by_names(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """As the package finds them: by the beginnings of earlier prompts, block by block."""
    known: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        ends = range(block_size, len(prompt), block_size)
        found.append(max((end for end in ends if tuple(prompt[:end]) in known), default=0))
        known |= {tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)}
    return found


def hits_of_the_first_prompt(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Wrong twice: looks only at the first prompt, and leaves no token to run."""
    found = []
    for number, prompt in enumerate(prompts):
        ends = range(block_size, len(prompt) + 1, block_size)
        same = (end for end in ends if number and prompt[:end] == prompts[0][:end])
        found.append(max(same, default=0))
    return found


def rank_mlp_by_slices(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, n: int, *, act: Any = silu
) -> Tensor:
    """With a default that is given by name: it can be sent."""
    own = slice(len(gate) // n * rank, len(gate) // n * (rank + 1))
    return (act(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T


def ranks_with(old: str, new: str) -> Function:
    """The right part of the MLP with another text in its place."""
    return rewritten(_part, (old, new))


def attention_with(*changes: tuple[str, str]) -> Function:
    return rewritten(RIGHT["block_attention"], *changes)  # type: ignore[no-any-return]


MASKED = (  # right numbers, but the rest of the last block is computed with: 0 · NaN = NaN
    "k_pool[block, :n] @ q / math.sqrt(len(q))",
    "torch.where(torch.arange(block_size) < n, k_pool[block] @ q / math.sqrt(len(q)), -math.inf)",
)
LAST_OPEN = "block_size if start + block_size < kv_len else kv_len % block_size"  # 0 if it is whole
SCORES_OF_WHOLE_BLOCKS = ("k_pool[block, :n] @ q", "(k_pool[block] @ q)[:n]")  # they are cut


RIGHT_ATTENTION = [
    *(RIGHT["block_attention"], attention_with(SCORES_OF_WHOLE_BLOCKS)),
    *(one_by_one, two_passes, list_of_scores, in_numpy),
]
EXERCISES: dict[str, Exercise] = {
    "num_blocks": Exercise(
        c4.check_num_blocks,
        [RIGHT["num_blocks"], but("num_blocks", np.int64)],
        c4.BUDGET_SLIPS,
        [
            (lambda *case: 1, "480 bytes of 960"),
            (lambda b, *m: b // (1.0 * math.prod(m) * 2), "an int, the number of blocks; got 2.0"),
            (lambda b, n, h, d, i, s: b // n * h * d * i * s, ""),
        ],
    ),
    "slots": Exercise(
        c4.check_slots,
        [
            *(
                RIGHT["slots"],
                but("slots", torch.tensor),
                but("slots", partial(np.array, dtype=int)),
            ),
        ],
        c4.SLOTS_SLIPS,
        [
            (lambda t, s, n: RIGHT["slots"](t, s, n - 1), "gives [] for"),
            (
                lambda t, s, n: [t[p // s] * s + (p & s - 1) for p in range(n)],
                "position 1: offset 1 in logical",
            ),
            (lambda t, s, n: [t[p / s] * s for p in range(n)], "list indices must be integers"),
            (lambda t, s, n: [t[p % s] * s + p // s for p in range(n)], ""),
            (lambda *case: iter(RIGHT["slots"](*case)), "put list(...) around it"),
            (
                lambda t, *sizes: (RIGHT["slots"](t, *sizes), t.append(0))[0],
                "it changed block_table",
            ),
        ],
    ),
    "allocate": Exercise(
        c4.check_allocate,
        [
            RIGHT["allocate"],
            but("allocate", lambda slot: slot and np.int64(slot)),
        ],
        {**c4.ALLOCATE_SLIPS, **ALLOCATE},
        [
            (lambda t, free, s, p: t[p // s] * s + p % s, "IndexError: list index"),
            (lambda t, free, s, p: t[p // s] * s + p % s, "logical block 0, not in the table yet"),
            (
                lambda t, free, s, p: (
                    RIGHT["allocate"](t, free, s, p) and t[p // s] * s + p // s  # upside down
                ),
                "your slot is  offset 0 in block 3; expected offset 2 in block 3",
            ),
            (
                lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) if p % s or free else None,
                "None; then block_table [6, 2, 1], free_blocks []",
            ),
            (
                lambda t, free, s, p: (
                    None if p // s == len(t) and len(free) < 2 else RIGHT["allocate"](t, free, s, p)
                ),
                "returns None",
            ),
            (lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) or -1, "-1; then block_table"),
        ],
    ),
    "free": Exercise(
        learn.check_free,
        [RIGHT["free"], free_by_emptying, lambda *given: RIGHT["free"](*given) or given[2]],
        {**FREE_SLIPS, **FREE},
        [
            (
                lambda table, *rest: RIGHT["free"](table[:5], *rest),
                "in random operations your free gives another",
            ),
            (
                lambda t, c, queue, h: (
                    RIGHT["free"](t, c, queue, h),
                    None in h.values() and queue.sort(),
                ),
                "ref_cnt {3: 0, 4: 0}, free_queue [3, 4, 7]",
            ),
        ],
    ),
    "take": Exercise(
        learn.check_take,
        [RIGHT["take"], take_by_popping, but("take", np.int64), takes_only_its_own],
        {**TAKE_SLIPS, **TAKE},
        [
            (
                lambda queue, hashes, cached: (
                    None if hashes[queue[0]] is None else RIGHT["take"](queue, hashes, cached)
                ),
                "None; then free_queue [5, 3], hashes {3: 'c', 5: None}",
            ),
        ],
    ),
    "find": Exercise(
        learn.check_find,
        [RIGHT["find"], find_all_hashes_first, find_then_pop],
        {**FIND_SLIPS, **FIND},
        [
            (lambda t, n, hash_of, _: [hash_of(None, t[0])], "got 1 as the tokens"),
            (lambda *_: [2], "gives [2] for"),
            (lambda t, *rest: RIGHT["find"]([*t, 0], *rest)[:-1], ""),
            (but("find", set), "is of type set, expected of type list"),
        ],
    ),
    "block_attention": Exercise(
        learn.check_block_attention,
        RIGHT_ATTENTION,
        BLOCK_SLIPS,
        [
            (gathered, "that is a gather"),
            (
                attention_with(("min(block_size, kv_len - start)", LAST_OPEN)),
                "scores is a tensor [0]",
            ),
            (attention_with(("range(0, kv_len, block_size)", "()")), "yours          [nan, nan,"),
            (
                attention_with(MASKED, ("weights @ v_pool[block, :n]", "weights @ v_pool[block]")),
                "it reads slots that nobody wrote",
            ),
            (
                attention_with(("max(largest, float(scores.max()))", "0.0")),
                "right for small scores, but it takes m off no score",
            ),
            (
                attention_with(
                    ("max(largest, float(scores.max()))", "float(scores.max())"),
                    (
                        "math.exp(largest - new_largest)",
                        "torch.tensor(largest - new_largest).exp()",
                    ),
                ),
                "but it lets m fall when a later block has smaller scores",
            ),
            (attention_with(("-math.inf", "-100.0")), "but for scores from -2,589 to -356"),
            (copied_blocks, "copies of all blocks"),
            (
                attention_with(("largest - new_largest)", "new_largest - largest)")),
                "",
            ),
            (
                attention_with(("kv_len - start", "max(0, kv_len - block * block_size)")),
                "scores is a tensor [0]",
            ),
            (attention_with(("float(scores.max())", "scores")), "Boolean value of Tensor"),
            (
                attention_with(("max(largest, float(", "torch.maximum(largest, (")),
                "must be Tensor, not float",
            ),
            (
                attention_with(("(scores - new_largest).exp()", "math.exp(scores)")),
                "weights = 2.718",
            ),
            (
                attention_with(("math.sqrt(len(q))", "torch.sqrt(len(q))")),
                "must be Tensor, not int",
            ),
            (
                attention_with(("-math.inf", "0.0")),
                "right for small scores, but it begins with m = 0; m begins at −∞",
            ),
            (scaled_in_place, "wrote to k_pool"),
        ],
    ),
    "visible": Exercise(
        c4.check_visible,
        [RIGHT["visible"], visible_and_clear, but("visible", set)],
        c4.VISIBLE_SLIPS,
        [
            (
                lambda c, s, q: [i for i, (p, own) in enumerate(c) if p <= q],
                "too many  cell 0 (position 0, owners {1})",
            ),
            (but("visible", lambda cells: cells[1:]), ""),
            (lambda c, s, q: [s in own for _, own in c], "got True or False for each"),
        ],
    ),
    "context_shift": Exercise(
        c4.check_context_shift,
        [context_shift, shift_token_by_token, shifts_and_applies],
        c4.SHIFT_SLIPS,
        [
            (lambda c, s, k, d: c.seq_keep(s), "B: tokens [] at positions []"),
            (
                lambda c, s, k, d: (c.seq_rm(s, k, k + d), c.seq_add(s, k + d, 10, -d)),
                "[0, 9, 10, 11, 12, 13] at positions [0, 1, 10, 11, 12, 13]",
            ),
            (drops_one_too_late, "A: tokens [0, 1, 3] at positions [0, 1, 2]"),
            (lambda c, s, k, d: c.seq_ids, "changes nothing in the cache"),
            (lambda c, s, k, d: c.seq_add(k + d, -1, -d), "missing 1 required positional"),
        ],
    ),
    "rank_mlp": Exercise(
        check_rank_mlp,
        [rank_mlp_by_slices],
        RANK_SLIPS,
        [
            (ranks_with("down[:, own].T", "down.T"), "and 4x3)\n  in the line: return"),
            (ranks_with("down[:, own]", "down[own]"), ""),
            (ranks_with("down[:, own].T", "down[:, own]"), ""),
            (ranks_with("x @ gate[own].T", "x @ gate[own]"), ""),
            (ranks_with("x @ up[own].T", "x @ up.T"), ""),
            (ranks_with("gate[own].T", "gate[:, own].T"), ""),
            (lambda x, g, u, d, r, n: (x @ g.T * (x @ u.T)) @ d.chunk(n, 1)[r].T, ""),
            (lambda x, *_: torch.distributed.all_reduce(x), "process group has not been"),
            (ranks_with("F.silu", "F.relu"), ""),
            (
                ranks_with("slice(rank * size, (rank + 1) * size)", "slice(rank, size)"),
                "features in yours  1\n  expected features  2, 3",
            ),
            (ranks_with("len(gate)", "x.shape[1] // 2"), ""),
            (ranks_with("len(gate) // num_ranks", "len(down)"), ""),
            (ranks_with("len(gate) // num_ranks", "len(gate) / num_ranks"), "must be integers"),
            (ranks_with("    return", "    gate.zero_()\n    return"), "it changes gate"),
            (torch.no_grad()(_part), "the numbers are right, but it cannot be sent to another"),
        ],
    ),
    "end_to_end": Exercise(
        check_end_to_end,
        [end_to_end_by_blocks],
        END_TO_END_SLIPS,
        [
            (lambda tables, lens, size: ([0], []), "gives [[0], []] for"),
            (lambda tables, *rest: right_end_to_end([[0]] * 3, *rest), ""),
            (lambda tables, lens, size: ([0, 7], tables), "it returned ([0, 7], [["),
            (lambda *case: right_end_to_end(*case)[1], "two lists of whole numbers"),
        ],
    ),
    "size": Exercise(
        check_size,
        [size_by_doubling],
        SIZE_SLIPS,
        [
            (lambda lens: (1, 128, 21.9), ""),
            (lambda lens: 64, "yours is of type int, expected of type list"),
            (but_rounded, "differs first  [2]: 0.4922, expected 0.4921875"),
        ],
    ),
    "make_step": Exercise(
        check_step,
        [step_that_keeps, step_that_keeps_a_view, step_that_warms_up],
        slips_of(
            right_step,
            """
            , kept: object = positions →
                the place of [0, 1, 2, 3, 4, 5, 6, 7], which the recording reads: nothing
            lens.copy_(torch.tensor(new_lens)) → lens = gpu.tensor(new_lens)
                the place of [1, 1], which the recording reads: nothing referred to that
            return replay() → return torch.arange(8) < lens[:, None]
                make_step recorded 1 times, three calls of its step 0 times, with 0 replays
            return replay() → return gpu.record(lambda a, b: b < a[:, None], lens, positions)()
                make_step recorded 1 times, three calls of its step 3 times, with 3 replays
            """,
        ),
        [
            (lambda gpu: lambda lens: lens, "asked  step([3, 5])"),
            (lambda gpu: lambda lens: None, "step returns None: does every way"),
            (lambda gpu: (step_that_keeps(gpu), 0), "must return the function step(new_lens)"),
            (
                lambda gpu: (step_that_keeps(gpu), step_that_keeps(gpu))[1],
                "not 3 replays of 1 recording: make_step recorded 2 times",
            ),
            (step_that_keeps_the_last, "make_step(gpu) was called a second time"),
            (lambda gpu: gpu.record(torch.neg, [1, 1]), "got [1, 1]: make it with gpu.tensor"),  # type: ignore[arg-type]
        ],
    ),
    "hits": Exercise(
        check_hits,
        [
            right_hits,
            hits_by_names,
            lambda *case: iter(right_hits(*case)),
        ],
        HITS_SLIPS,
        [
            (lambda prompts, size: [0 for _ in prompts[1:]], "gives [0] for"),
            (lambda prompts, size: 64, "yours is of type int, expected of type list"),
            (lambda *_: [32, 64, 32, 64], ""),
            (hits_of_the_first_prompt, "gives [0, 2] for"),
        ],
    ),
    "log": Exercise(
        check_log,
        [log_by_tokens],
        LOG_SLIPS,
        [
            (lambda size, one, block, longest: (one, longest), "expected       [8, 4]"),
            (lambda *_: ("491,520", "1638.40x"), "must return two numbers"),
        ],
    ),
}
