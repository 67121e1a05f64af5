"""The exercises of 04, 05 and the appendices: answers that are right, and wrong ones."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
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
from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.lab.shift import context_shift
from tutorial_engine.learn import checks_04 as c4
from tutorial_engine.learn.block_attention_check import BLOCK_SLIPS
from tutorial_engine.learn.block_checks import FREE_SLIPS, TAKE_SLIPS
from tutorial_engine.learn.checks_a1 import RANK_SLIPS, _part, check_rank_mlp
from tutorial_engine.learn.checks_a2 import (
    END_TO_END_SLIPS,
    SIZE_SLIPS,
    STEP_SLIPS,
    GpuMemory,
    check_end_to_end,
    check_size,
    check_step,
    right_end_to_end,
)
from tutorial_engine.learn.checks_a3 import (
    FREE_ORDER_SLIPS,
    HITS_SLIPS,
    LOG_SLIPS,
    check_free_order,
    check_hits,
    check_log,
    right_hits,
)
from tutorial_engine.learn.find_check import FIND_SLIPS
from tutorial_engine.learn.judge import rewritten, slips_of

# -- notebooks 04, 05 and appendix A1 -------------------------------------------------------------

Refs, Cached = dict[int, int], dict[Any, int]


ALLOCATE = slips_of(
    RIGHT["allocate"],
    """
    block_table.append(free_blocks.pop(0)) → block_table = [*block_table, free_blocks[0]]
        change both lists in place
    pos // block_size == len(block_table) → pos + 1 >= len(block_table) * block_size
        position 3 is the last one in its block; the next
    block_table.append(free_blocks.pop(0)) → block_table += free_blocks; free_blocks.clear()
        the table got 3 blocks: take one
    == len(block_table) → == len(block_table) or pos == 5 and free_blocks
        position 5 is in a block of the table: then take no block
    if not free_blocks: → if False:
        No block is free: return None
    """,
)
FREE = slips_of(
    RIGHT["free"],
    """
    free_queue[:] = without → free_queue = without
    + with_hash → if without else free_queue; free_queue += with_hash
        [3, 9, 2, 5] now, and the queue lacks them. (If you wrote
    without + free_queue → free_queue
        lacks [3, 9], which have no hash: they go to
    free_queue + with_hash → free_queue
        nobody holds [3, 2, 1, 0] now, and the queue lacks
    for block in table: → for block in [block for block in table if ref_cnt[block] == 1]:
    = without + → = without[::-1] +
        count down for [0, 1], too: a request gives its whole
    without + free_queue + with_hash → without + with_hash
        [7, 8] were in the queue before, and it lacks them now
    == 0] → == 0 or hashes[block] is None]
        another request still holds [6]: only a block whose
    ref_cnt[block] -= 1 → ref_cnt[block] = 0 if hashes[block] is None else ref_cnt[block] - 1
        another request still holds [6]: count down by one
    free_queue[:] = → [ref_cnt.pop(block) for block in gone]; free_queue[:] =
        ref_cnt has lost [0, 1, 2, 3]: nobody holds
    if ref_cnt[block] == 0] → ]
        another request still holds [0, 1]: only a block
    free_queue[:] = → hashes.update(dict.fromkeys(hashes)); free_queue[:] =
        free changes no hash
    + with_hash → + with_hash; len(table) == 1 and free_queue.sort()
        the table [3] was given back (none without a hash), and the
    """,
)
TAKE = slips_of(
    RIGHT["take"],
    """
    del cached → hashes[block] = None; del cached
        do you set hashes[block] to None before you look it up?
    pop(0) → pop()
    hashes[block] is not None → True
        The first of the queue, 3, has one: do you take another block?
    del cached[hashes[block]] → del cached[block]
        the keys of `cached` are hashes, not blocks
    hashes[block] is not None → True
        KeyError: None; block 5 has no hash
    hashes[block] is not None → hashes[block] is not None and len(free_queue) < 5
        tokens came, and what can be found is {
    """,
)
FIND = slips_of(
    RIGHT["find"],
    """
    token_ids[end - block_size : end] → token_ids[:end]
        got 8 tokens in blocks
    hash_of(last, token_ids[end - block_size : end]) → hash_of(token_ids[:end], last)
        hash_of(parent, tokens) is given the tokens first
    break → return None
        returns None at a miss: return what was found so far
    hash_of(last, token_ids[end - block_size : end]) → hash(tuple(token_ids[:end]))
    if last not in cached: → if False:
        the keys of `cached` come from `hash_of`
    cached[last]) → last := cached[last])
        hash_of got 5 as the parent
    return found → cached.clear(); return found
        find only looks
    range(block_size, len(token_ids), → range(block_size, len(token_ids) + block_size - 1,
        no token is left to run
    range(block_size, len(token_ids), block_size) → iter(lambda: block_size, 0)
    hash_of(last, → hash_of(None,
        called again and again
    token_ids[end - block_size : end] → [token_ids[end - block_size]]
        first tokens in blocks of 4: a hash belongs
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


def free_order_of_the_pool(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> list[int]:
    """As the package has it."""
    pool = BlockManager(1 + max([*queue, *(block for table in tables for block in table)]), 1)
    for number, block in enumerate(pool.blocks):
        block.hash = bytes([number]) if number in with_hash else None
    pool.free_queue = OrderedDict.fromkeys(queue)
    for block in chain(*tables):
        pool.blocks[block].ref_cnt += 1
    for table in tables:
        pool._give_back(table)
    return list(pool.free_queue)


def free_order_of_all_tables(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> list[int]:
    """Wrong: sorted by hash, and in the order in which they were given."""
    return sorted([*queue, *chain(*tables)], key=lambda block: block in with_hash)


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
            (lambda *case: 1, "so 1,280 fit"),
            (lambda b, *m: b // (1.0 * math.prod(m) * 2), "use //, and only whole factors"),
            (lambda b, n, h, d, i, s: b // n * h * d * i * s, "from left to right"),
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
            (lambda t, s, n: RIGHT["slots"](t, s, n - 1), "9 slots for 10 tokens"),
            (lambda t, s, n: [t[p // s] * s + (p & s - 1) for p in range(n)], "slot 7, not 6"),
            (lambda t, s, n: [t[p / s] * s for p in range(n)], "its index is p // block_size"),
            (lambda t, s, n: [t[p % s] * s + p // s for p in range(n)], "index is p // block_size"),
            (lambda *case: iter(RIGHT["slots"](*case)), "put list(...) around it"),
            (lambda t, *sizes: (RIGHT["slots"](t, *sizes), t.append(0))[0], "only read the req"),
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
            (lambda t, free, s, p: t[p // s] * s + p % s, "is that one in the table?"),
            (
                lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) if p % s or free else None,
                "position 4 lies in a block of the table: it needs no free block",
            ),
            (
                lambda t, free, s, p: (
                    None if p // s == len(t) and len(free) < 2 else RIGHT["allocate"](t, free, s, p)
                ),
                "returns None",
            ),
            (lambda t, free, s, p: RIGHT["allocate"](t, free, s, p) or -1, "expected slot 0"),
        ],
    ),
    "free": Exercise(
        learn.check_free,
        [RIGHT["free"], free_by_emptying],
        {**FREE_SLIPS, **FREE},
        [
            (lambda table, *rest: RIGHT["free"](table[:5], *rest), "left ref_cnt"),
            (
                lambda t, c, queue, h: (
                    RIGHT["free"](t, c, queue, h),
                    None in h.values() and queue.sort(),
                ),
                "expected ref_cnt {5: 0, 2: 0, 9: 0, 3: 0} and the queue [3, 9, 7, 8, 2, 5]",
            ),
        ],
    ),
    "take": Exercise(
        learn.check_take,
        [RIGHT["take"], take_by_popping, but("take", np.int64)],
        {**TAKE_SLIPS, **TAKE},
        [
            (
                lambda queue, hashes, cached: (
                    None if hashes[queue[0]] is None else RIGHT["take"](queue, hashes, cached)
                ),
                "it returns None: return the block here, too",
            ),
        ],
    ),
    "find": Exercise(
        learn.check_find,
        [RIGHT["find"], find_all_hashes_first, find_then_pop],
        {**FIND_SLIPS, **FIND},
        [
            (lambda t, n, hash_of, _: [hash_of(None, t[0])], "got 11 as the tokens; in hash_of("),
            (lambda *_: [2], "expected [5, 0, 3]"),
            (lambda t, *rest: RIGHT["find"]([*t, 0], *rest)[:-1], "the last block counts, too"),
            (but("find", set), "must return a list of blocks"),
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
                "kv_len % block_size is 0 where the last block is whole",
            ),
            (attention_with(("range(0, kv_len, block_size)", "()")), "no block was read"),
            (
                attention_with(MASKED, ("weights @ v_pool[block, :n]", "weights @ v_pool[block]")),
                "slots that nobody wrote",
            ),
            (attention_with(("max(largest, float(scores.max()))", "0.0")), "exp() overflows"),
            (copied_blocks, "copies of all blocks"),
            (
                attention_with(("largest - new_largest)", "new_largest - largest)")),
                "exp(new m − old m) and",
            ),
            (
                attention_with(("kv_len - start", "max(0, kv_len - block * block_size)")),
                "index i, which enumerate gives",
            ),
            (attention_with(("float(scores.max())", "scores")), "one number each: scores.max()"),
            (
                attention_with(("max(largest, float(", "torch.maximum(largest, (")),
                "m begins as torch.tensor(-torch.inf)",
            ),
            (attention_with(("(scores - new_largest).exp()", "math.exp(scores)")), "use torch.exp"),
            (attention_with(("math.sqrt(len(q))", "torch.sqrt(len(q))")), "write len(q) ** 0.5"),
            (attention_with(("-math.inf", "0.0")), "m begins at −∞"),
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
                "An empty cell has position None: ask that first",
            ),
            (but("visible", lambda cells: cells[1:]), "expected [0, 1, 4, 6]"),
            (lambda c, s, q: [s in own for _, own in c], "not True or False"),
        ],
    ),
    "context_shift": Exercise(
        c4.check_context_shift,
        [context_shift, shift_token_by_token, shifts_and_applies],
        c4.SHIFT_SLIPS,
        [
            (lambda c, s, k, d: c.seq_keep(s), "sequence B (another one)"),
            (
                lambda c, s, k, d: (c.seq_rm(s, k, k + d), c.seq_add(s, k + d, 10, -d)),
                "right in short texts, but in one of 20 tokens the logits are off by",
            ),
            (drops_one_too_late, "that is right, but it kept the tokens [0, 5, 6, 7, 8, 9]"),
            (lambda c, s, k, d: c.seq_ids, "call its seq_rm and its seq_add"),
            (lambda c, s, k, d: c.seq_add(k + d, -1, -d), "It takes seq_id, p0, p1, delta"),
        ],
    ),
    "rank_mlp": Exercise(
        check_rank_mlp,
        [rank_mlp_by_slices],
        RANK_SLIPS,
        [
            (ranks_with("down[:, own].T", "down.T"), "down is whole; take the columns"),
            (ranks_with("down[:, own]", "down[own]"), "a column of down, not a row"),
            (ranks_with("down[:, own].T", "down[:, own]"), "the part of down is not transposed"),
            (ranks_with("x @ gate[own].T", "x @ gate[own]"), "gate or up is not transposed"),
            (ranks_with("x @ up[own].T", "x @ up.T"), "up is whole, and gate is cut"),
            (ranks_with("gate[own].T", "gate[:, own].T"), "a feature is a row of gate and of up"),
            (lambda x, g, u, d, r, n: (x @ g.T * (x @ u.T)) @ d.chunk(n, 1)[r].T, "up are whole"),
            (lambda x, *_: torch.distributed.all_reduce(x), "return the partial sum alone"),
            (
                ranks_with("F.silu", "F.relu"),
                "rank=2, num_ranks=6; these are not the sums of its features' products; this rank "
                "has features 12 to 17 (of 0 to 35)",
            ),
            (ranks_with("len(gate) // num_ranks", "len(gate) / num_ranks"), "divide with `//`"),
            (ranks_with("    return", "    gate.zero_()\n    return"), "it changes gate"),
            (torch.no_grad()(_part), "the numbers are right, but it cannot be sent to another"),
        ],
    ),
    "end_to_end": Exercise(
        check_end_to_end,
        [end_to_end_by_blocks],
        END_TO_END_SLIPS,
        [
            (lambda tables, lens, size: ([0], []), "cu_seqlens has 4 numbers here, got 1: [0]"),
            (lambda *case: right_end_to_end(*case)[::-1], "first cu_seqlens, then the slots"),
            (lambda tables, *rest: right_end_to_end([[0]] * 3, *rest), "p counts from 0 in each"),
            (lambda tables, lens, size: ([0, 7, 11, 20], tables), "slots is one list of whole"),
        ],
    ),
    "size": Exercise(
        check_size,
        [size_by_doubling],
        SIZE_SLIPS,
        [
            (
                lambda lens: (1, 128, 21.9),
                "the unused part (0 .. 1, not rounded) should be 0.21875",
            ),
            (lambda lens: 64, "contexts of [100], got 64; return three numbers"),
        ],
    ),
    "make_step": Exercise(
        check_step,
        [step_that_keeps, step_that_keeps_a_view, step_that_warms_up],
        STEP_SLIPS,
        [
            (lambda gpu: lambda lens: lens, "step([3, 5]) must give [[1, 1, 1, 0"),
            (lambda gpu: (step_that_keeps(gpu), 0), "return the function step(new_lens)"),
            (
                lambda gpu: (step_that_keeps(gpu), step_that_keeps(gpu))[1],
                "make_step recorded 2 times, and 3 calls of its step 0 times",
            ),
            (step_that_keeps_the_last, "in one variable for all"),
            (lambda gpu: gpu.record(torch.neg, [1, 1]), "got [1, 1]: make it with gpu.tensor"),  # type: ignore[arg-type]
        ],
    ),
    "free_order": Exercise(
        check_free_order,
        [
            free_order_of_the_pool,
            lambda *case: deque(free_order_of_the_pool(*case)),
            lambda *case: (block for block in free_order_of_the_pool(*case)),
        ],
        FREE_ORDER_SLIPS,
        [
            (lambda *case: str(free_order_of_the_pool(*case)), "got '[3, 4, 2, 0, 1]'"),
            (lambda queue, tables, _: [*queue, *chain(*tables)], "block 4 has no hash"),
            (lambda queue, tables, _: [*chain(*tables), *queue], "block 0 has a hash"),
            (free_order_of_all_tables, "which block of a table is taken first"),
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
            (lambda prompts, size: [0 for _ in prompts[1:]], "a list of 4 numbers is wanted"),
            (lambda prompts, size: [0, 68, 44, 68], "each number is a multiple of 32"),
            (lambda ps, size: [n // size for n in right_hits(ps, size)], "numbers of blocks"),
            (lambda *_: [32, 64, 32, 64], "prompt 0 (counted from 0) shares its first 32 tokens"),
            (
                lambda *_: [0, 32, 32, 64],
                "prompt 1 (counted from 0) shares its first 64 tokens with an",
            ),
            (hits_of_the_first_prompt, "prompt 1 (counted from 0) has 8 tokens, and one at least"),
        ],
    ),
    "log": Exercise(
        check_log,
        [log_by_tokens],
        LOG_SLIPS,
        [
            (lambda size, one, block, longest: (one, longest), "expected 491,520 and 1638.40"),
            (lambda *_: ("491,520", "1638.40x"), "two numbers are wanted"),
        ],
    ),
}
