"""The checks, bug zoo and naive pages of notebook 04: right answers pass, mistakes are named."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learners import PROMPT_IDS as PROMPTS
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.lab.shift import context_shift
from tutorial_engine.learn.block_attention_check import MISTAKES
from tutorial_engine.learn.block_checks import (
    STALE_MISTAKES,
    Line,
    log_text,
    right_stale,
    stale_log,
    wrong_texts,
)
from tutorial_engine.learn.bugs_04 import (
    BUGS_04,
    Seen,
    StaleBlocks,
    pages,
    scenes,
    serve,
    stress,
    table,
)
from tutorial_engine.learn.checks_04 import (
    SHIFT_MISTAKES,
    check_block_attention,
    check_context_shift,
    check_find,
    check_free,
    check_num_blocks,
    check_slots,
    check_stale,
    check_take,
    check_visible,
)
from tutorial_engine.learn.find_check import MISTAKES as FIND_MISTAKES
from tutorial_engine.learn.own_memory import free, num_blocks, slots, take, visible
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

GIB = 2**30


# -- right answers ----------------------------------------------------------------------------


def num_blocks_of_the_package(
    budget: int, layers: int, heads: int, dim: int, itemsize: int, size: int
) -> int:
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim, dtype=dtype
    )
    return num_blocks_in(budget, spec, size)


def slots_as_tensor(block_table: list[int], block_size: int, num_tokens: int) -> torch.Tensor:
    p = torch.arange(num_tokens)
    return torch.tensor(block_table)[p // block_size] * block_size + p % block_size


def slots_block_by_block(block_table: list[int], block_size: int, num_tokens: int) -> list[int]:
    every = [b * block_size + i for b in block_table for i in range(block_size)]
    return every[:num_tokens]


Refs, Hashes, Cached = dict[int, int], dict[int, Any], dict[Any, int]


def free_by_emptying(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    while table:
        block = table.pop()
        ref_cnt[block] -= 1
        if not ref_cnt[block]:
            del ref_cnt[block]
            free_queue += [block]


def take_by_popping(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block, *free_queue[:] = free_queue
    cached.pop(hash_of.pop(block, None), None)
    return block


def find(token_ids: list[int], block_size: int, name_of: Any, cached: Cached) -> list[int]:
    found, name = [], None
    for start in range(0, len(token_ids) - block_size, block_size):
        name = name_of(name, token_ids[start : start + block_size])
        if name not in cached:
            return found
        found.append(cached[name])
    return found


def find_all_names_first(tokens: list[int], size: int, name_of: Any, cached: Cached) -> Any:
    """Open blocks have names here as well, which nobody has; and the answer is a tensor."""
    names: list[Any] = []
    for start in range(0, len(tokens), size):
        parent = names[-1] if names else None
        names.append(name_of(parent, torch.tensor(tokens[start : start + size])))
    count = next((i for i, name in enumerate(names) if name not in cached), len(names))
    return torch.tensor([cached[n] for n in names[: min(count, (len(tokens) - 1) // size)]])


def find_by_removing(tokens: list[int], size: int, name_of: Any, cached: Cached) -> Any:
    found, name = [], None
    while len(tokens) > size:
        own, tokens[:size] = tuple(tokens[:size]), []
        block = cached.get(name := name_of(name, own))
        if block is None:
            break
        found.append(np.int64(block))
    return tuple(found)


def find_recursively(tokens: list[int], size: int, name_of: Any, cached: Cached) -> list[int]:
    def after(name: Any, rest: list[int]) -> list[int]:
        if len(rest) <= size or (own := name_of(name, iter(rest[:size]))) not in cached:
            return []
        return [cached[own], *after(own, rest[size:])]

    return after(None, tokens)


def stale(log: list[Line]) -> list[Line]:
    return [
        line
        for i, line in enumerate(log)
        if line.what == "finds"
        and next(b for b in log[:i][::-1] if b.block == line.block and b.what != "finds").name
        != line.name
    ]


def stale_as_tuple(log: list[Line]) -> tuple[Line, ...]:
    present: dict[int, str] = {}
    found = []
    for line in log:
        if line.what == "finds" and present[line.block] != line.name:
            found.append(line)
        if line.what != "finds":
            present[line.block] = line.name
    return tuple(found)


Cells = list[tuple[int | None, set[int]]]


def visible_by_position(cells: Cells, seq_id: int, pos: int) -> tuple[int, ...]:
    found = {p: i for i, (p, own) in enumerate(cells) if seq_id in own}
    return tuple(found[p] for p in range(pos + 1) if p in found)


def shift_token_by_token(cache: CellKVCache, seq_id: Any, keep: int, discard: int) -> None:
    for _ in range(discard):
        cache.seq_rm(seq_id, keep, keep + 1)
        cache.seq_add(seq_id, keep, -1, -1)


def block_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: list[int], kv_len: int
) -> Tensor:
    largest, total, out = float("-inf"), 0.0, torch.zeros_like(q)
    size = k_pool.shape[1]
    for i, block in enumerate(block_table):
        n = min(size, kv_len - i * size)
        if n <= 0:
            break
        scores = k_pool[block, :n] @ q / q.shape[-1] ** 0.5
        new = max(largest, scores.max().item())
        weights, correction = (scores - new).exp(), math.exp(largest - new)
        total = total * correction + weights.sum().item()
        out = out * correction + weights @ v_pool[block, :n]
        largest = new
    return out / total


def token_by_token(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: list[int], kv_len: int
) -> Tensor:
    size, m = k_pool.shape[1], torch.tensor(-math.inf)
    total, out = torch.zeros(()), torch.zeros(v_pool.shape[-1])
    for p in range(kv_len):
        where = block_table[p // size], p % size
        score = k_pool[where].dot(q) / math.sqrt(len(q))
        new = torch.maximum(m, score)
        total = total * torch.exp(m - new) + torch.exp(score - new)
        out = out * torch.exp(m - new) + torch.exp(score - new) * v_pool[where]
        m = new
    return out / total


def two_rounds(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: list[int], kv_len: int
) -> Tensor:
    """The scores of all blocks first, then the values: no running softmax, and no gather."""
    q /= len(q) ** 0.5
    size = k_pool.shape[1]
    where = [(block_table[p // size], p % size) for p in range(kv_len)]
    weights = torch.stack([k_pool[w] @ q for w in where]).softmax(0)
    out = torch.zeros(v_pool.shape[-1])
    for weight, w in zip(weights, where, strict=True):
        out += weight * v_pool[w]
    return out


def two_passes(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    """The largest score first, then the sums: every key is read twice."""
    size, blocks = k.shape[1], list(zip(range(0, n, k.shape[1]), table, strict=False))
    scale = math.sqrt(len(q))
    m = max(float((k[b, : min(size, n - at)] @ q).max()) for at, b in blocks) / scale
    total, out = 0.0, torch.zeros(v.shape[-1])
    for at, b in blocks:
        p = torch.exp(k[b, : min(size, n - at)] @ q / scale - m)
        total, out = total + float(p.sum()), out + p @ v[b, : len(p)]
    return out / total


def in_double(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    q = q.double()
    size, m, total, out = k.shape[1], -math.inf, 0.0, q * 0
    for start, block in zip(range(0, n, size), table, strict=False):
        end = min(size, n - start)
        scores = k[block, :end].double() @ q / math.sqrt(len(q))
        new = max(m, float(scores.max()))
        p, factor = torch.exp(scores - new), math.exp(m - new)
        m, total, out = (
            new,
            total * factor + float(p.sum()),
            out * factor + p @ v[block][:end].double(),
        )
    return out / total


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


def free_in_a_new_list(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    free_queue = free_queue + table[::-1]


def free_counting_only(table: list[int], ref_cnt: Refs, free_queue: list[int]) -> None:
    for block in table:
        ref_cnt[block] -= 1
    free_queue = free_queue + table[::-1]


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


def take_and_forget_names(free_queue: list[int], hash_of: Hashes, cached: Cached) -> int:
    block = take(free_queue, hash_of, cached)
    hash_of.update(dict.fromkeys(hash_of))
    return block


def take_silently(free_queue: list[int], hash_of: Hashes, cached: Cached) -> None:
    take(free_queue, hash_of, cached)


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
    (check_free, (free,)),
    (check_free, (free_by_emptying,)),
    (check_take, (take,)),
    (check_take, (take_by_popping,)),
    (check_take, (lambda *views: np.int64(take(*views)),)),
    (check_find, (find,)),
    (check_find, (find_all_names_first,)),
    (check_find, (find_by_removing,)),
    (check_find, (find_recursively,)),
    (check_block_attention, (block_attention,)),
    (check_num_blocks, (lambda *case: np.int64(num_blocks(*case)),)),
    (check_slots, (lambda *case: np.array(slots(*case), dtype=int),)),
    (check_stale, (stale,)),
    (check_stale, (stale_as_tuple,)),
    (check_visible, (visible,)),
    (check_visible, (visible_by_position,)),
    (check_context_shift, (context_shift,)),
    (check_context_shift, (shift_token_by_token,)),
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

FREE_WRONG: list[tuple[Any, str]] = [
    (head_first, "finds nothing, though 1, 2 and 3 are still there"),
    (free_at_the_front, "7 and 8 have been free for longer"),
    (free_head_at_the_front, "at the end, the last block first"),
    (free_elsewhere, "change it in place"),
    (free_in_a_new_list, "neither ref_cnt nor free_queue has changed"),
    (free_counting_only, "makes a new list that nobody else sees"),
    (free_shared, "in another's table still"),
    (free_uncounted, "nobody holds these blocks"),
    (free_counted_once, "another holds 0 and 1"),
    (free_forgets_long_tables, "the queue is"),
]

TAKE_WRONG: list[tuple[Any, str]] = [
    (take_last, "the first one is next: 3"),
    (take_leaving, "3 is taken, expected [5]"),
    (take_keeping_hash, "the freed-block bug"),
    (take_forgetting_all, "or nothing is ever found"),
    (take_half, "block 3 is empty: None"),
    (take_hashed_only, "KeyError: None; block 5 has no name"),
    (take_and_forget_names, "names[1] has changed"),
    (lambda *_: "3", "got '3'"),
    (take_silently, "does it end with `return`?"),
]


def with_names(change: Callable[..., Any]) -> Callable[..., Any]:
    """`find` by other names: `change` has name_of, the parent's name, all tokens so far."""

    def changed(tokens: list[int], size: int, name_of: Any, cached: Cached) -> list[int]:
        seen: list[int] = []

        def ask(parent: Any, own: list[int]) -> Any:
            seen.extend(own)
            return change(name_of, parent, seen)

        return find(tokens, size, ask, cached)

    return changed


def find_by_number(tokens: list[int], size: int, name_of: Any, cached: Cached) -> list[int]:
    found: list[int] = []
    for end in range(size, len(tokens), size):
        name = name_of(found[-1] if found else None, tokens[end - size : end])
        if name not in cached:
            break
        found.append(cached[name])
    return found


def find_without_looking(t: list[int], size: int, name_of: Any, cached: Cached) -> list[int]:
    return [cached[name_of(None, t[end - size : end])] for end in range(size, len(t), size)]


def find_and_remove(tokens: list[int], size: int, name_of: Any, cached: Cached) -> list[int]:
    found = find(tokens, size, name_of, cached)
    cached.clear()
    return found


FIND_WRONG: list[tuple[Any, str]] = [
    *((wrong, words) for words, wrong in FIND_MISTAKES.items()),
    (with_names(lambda name_of, parent, seen: name_of(None, seen)), "of one block alone"),
    (with_names(lambda name_of, parent, seen: name_of(parent, seen)), "got 8 tokens in blocks"),
    (find_by_number, "name_of got 5 as the parent"),
    (find_without_looking, "which is the first miss"),
    (find_and_remove, "find only looks"),
    (lambda t, s, n, c: [99], "got [99]; expected [5, 0, 3]"),
    (lambda t, s, n, c: set(find(t, s, n, c)), "must return a list of blocks"),
    (lambda t, s, n, c: find(t, s, n, c) or None, "find returns None: does it end with"),
    (lambda t, s, n, c: c["root"], "KeyError"),
]

STALE_WRONG: list[tuple[Any, str]] = [
    (lambda log: [line.block for line in stale(log)], "must return a list of lines"),
    (lambda log: log[-1], "must return a list of lines"),
    (lambda log: stale(log)[::-1], "expected step"),
]

VISIBLE_WRONG: list[tuple[Any, str]] = [
    (lambda c, s, q: visible(c, s, q - 1), "sees its own position"),
    (lambda c, s, q: visible(c, s, 10**6), "what comes after pos is hidden"),
    (lambda c, s, q: [i for i, (p, own) in enumerate(c) if s in own and i <= q], "not its index"),
    (
        lambda c, s, q: [i for i, (p, own) in enumerate(c) if p <= q],
        "an empty cell has position None",
    ),
    (lambda c, s, q: visible([(p, {s}) for p, _ in c], s, q), "look at the owners"),
    (lambda c, s, q: [c[i][0] for i in visible(c, s, q)], "not their positions"),
    (lambda c, s, q: visible([(p or 0, {s}) for p, _ in c], s, q), "an empty cell holds nothing"),
    (lambda c, s, q: visible(c, s, q)[1:], "expected [0, 1, 4, 6]"),
    (lambda c, s, q: visible(c, s, q) * 2, "expected [0, 1, 4, 6]"),
    (lambda c, s, q: 3, "must return a list"),
    (lambda c, s, q: c + 1, "TypeError"),
]


SHIFT_WRONG: list[tuple[Any, str]] = [
    *((wrong, words) for words, wrong in SHIFT_MISTAKES.items()),
    (lambda c, s, k, d: c.seq_keep(s), "sequence B (another one)"),
    (lambda c, s, k, d: c.seq_rm(s), "expected [0, 1, 2, 3, 4, 5]"),
    (lambda c, s, k, d: c.seq_ids, "call its seq_rm and its seq_add"),
    (lambda c, s, k, d: c.seq_add(s, k), "TypeError"),
]


def gathered(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    keys, values = k[table].flatten(0, 1)[:n], v[table].flatten(0, 1)[:n]
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def gathered_by_cat(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    keys, values = (torch.cat([pool[b] for b in table])[:n] for pool in (k, v))
    return (keys @ q / math.sqrt(len(q))).softmax(0) @ values


def masked_rest(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    """Right numbers, but the rest of the last block is computed with: 0 · NaN = NaN."""
    size, m, total, out = k.shape[1], -math.inf, 0.0, torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        scores = k[block] @ q / math.sqrt(len(q))
        scores[max(n - start, 0) :] = -math.inf
        new = max(m, float(scores.max()))
        p, factor = torch.exp(scores - new), math.exp(m - new)
        m, total, out = new, total * factor + float(p.sum()), out * factor + p @ v[block]
    return out / total


def without_max(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    size, total, out = k.shape[1], torch.zeros(()), torch.zeros_like(q)
    for start, block in zip(range(0, n, size), table, strict=False):
        p = torch.exp(k[block, : n - start] @ q / math.sqrt(len(q)))
        total, out = total + p.sum(), out + p @ v[block, : n - start]
    return out / total


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    k /= math.sqrt(len(q))
    return block_attention(q * math.sqrt(len(q)), k, v, table, n)


def of_heads(q: Tensor, k: Tensor, v: Tensor, table: list[int], n: int) -> Tensor:
    return block_attention(q, k, v, table, n)[None]


def with_other(change: Callable[[Tensor, list[int], int], Any]) -> Callable[..., Tensor]:
    """block_attention with another q, table or length."""
    return lambda q, k, v, table, n: block_attention(
        *(lambda a, b, c: (a, k, v, b, c))(*change(q, table, n))
    )


ATTENTION_WRONG: list[tuple[Any, str]] = [
    (with_other(lambda q, t, n: (q * math.sqrt(len(q)), t, n)), "divided by √D"),
    (with_other(lambda q, t, n: (q, t, -(-n // 4) * 4)), "the last block is open"),
    (with_other(lambda q, t, n: (q, t, 4 * len(t))), "not needed yet"),
    (with_other(lambda q, t, n: (q, list(range(len(t))), n)), "where logical block i is"),
    (with_other(lambda q, t, n: (q, t, min(n, 4))), "only the first block"),
    (with_other(lambda q, t, n: (q, t, n + 1 - (n > 1))), "compare with softmax"),
    (lambda q, k, v, t, n: block_attention(q, k, k, t, n), "these are keys"),
    (gathered, "that is a gather"),
    (gathered_by_cat, "that is a gather"),
    (masked_rest, "slots that nobody wrote"),
    (without_max, "exp() overflows"),
    (scaled_in_place, "wrote to k_pool"),
    (of_heads, "returned shape [1, 8], expected [8]"),
    (lambda *case: 3.0, "must return a tensor"),
]

WRONG: list[tuple[Check, Answer, str]] = [
    *((check_block_attention, (answer,), words) for answer, words in ATTENTION_WRONG),
    *((check_block_attention, (wrong,), words) for words, wrong in MISTAKES.items()),
    *((check_num_blocks, (answer,), words) for answer, words in BUDGET_WRONG),
    *((check_slots, (answer,), words) for answer, words in SLOTS_WRONG),
    *((check_free, (answer,), words) for answer, words in FREE_WRONG),
    *((check_take, (answer,), words) for answer, words in TAKE_WRONG),
    *((check_find, (answer,), words) for answer, words in FIND_WRONG),
    *((check_stale, (wrong,), words) for words, wrong in STALE_MISTAKES.items()),
    *((check_stale, (answer,), words) for answer, words in STALE_WRONG),
    *((check_visible, (answer,), words) for answer, words in VISIBLE_WRONG),
    *((check_context_shift, (answer,), words) for answer, words in SHIFT_WRONG),
]


def nothing(*_: object) -> None:
    """What an exercise is before anybody has touched it."""


OPEN: list[tuple[Check, Answer]] = [
    (check_num_blocks, (nothing,)),
    (check_slots, (nothing,)),
    (check_free, (nothing,)),
    (check_take, (lambda *_: ...,)),
    (check_find, (nothing,)),
    (check_block_attention, (nothing,)),
    (check_stale, (nothing,)),
    (check_visible, (nothing,)),
    (check_context_shift, (nothing,)),
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

    verdict = check(fails)
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


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (block_attention, "none gathered"),
        (token_by_token, "none gathered"),
        (in_double, "none gathered"),
        (two_rounds, "But it keeps the scores of all tokens"),
        (two_passes, "But it reads keys more than once"),
    ],
)
def test_right_attention_that_is_no_running_softmax_is_told_so(
    attention: Callable[..., Any], words: str
) -> None:
    verdict = check_block_attention(attention)
    assert verdict.ok is True and words in verdict.message
    assert ("But" in verdict.message) == ("But" in words)


def test_find_is_told_by_names_that_can_be_read() -> None:
    message = check_find(FIND_MISTAKES[next(w for w in FIND_MISTAKES if "are names" in w)]).message
    assert len(message) < 250 and "b'" not in message


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
                assert visible(plain, seq_id, pos) == sorted(table_.visible(seq_id, pos))


# -- the freed-block bug in a log -------------------------------------------------------------


def test_a_log_of_stale_blocks_has_a_stale_read_where_the_tokens_are_wrong(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    """D is the only request that gets other tokens than alone, and the only one in the lines."""
    scene = scenes(PROMPTS)["small_pool"]
    got = serve(model, pages(model, scene.num_blocks, StaleBlocks), *scene[:3]).tokens
    want = serve(model, None, *scene[:3]).tokens
    log = stale_log(model, StaleBlocks, PROMPTS)
    assert {line.who for line in stale(log)} == {name for name in want if got[name] != want[name]}
    assert stale(log) == right_stale(log) != []
    ours = stale_log(model, BlockManager, PROMPTS)
    assert stale(ours) == [] and any(line.what == "finds" for line in ours)
    assert len(log_text(log).splitlines()) == len({line[:2] for line in log})
    told = wrong_texts(model, tokenizer, StaleBlocks, PROMPTS)
    assert {name for name, *_ in told} == {line.who for line in stale(log)}
    assert all(wrong != alone for *_, wrong, alone in told)
    assert wrong_texts(model, tokenizer, BlockManager, PROMPTS) == []


# -- the bug zoo ------------------------------------------------------------------------------

# bug -> the tests that see it; every bug is seen by another one
SEEN: dict[str, set[str]] = {
    "no bug": set(),
    "a taken block keeps its name": {"small_pool", "found", "integrity"},
    "names without the parent's": {"together"},
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
    assert stress(model, PROMPTS, ["a taken block keeps its name", ""]) == [rows[1], rows[0]]


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
