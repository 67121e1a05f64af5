"""The check of attention that reads K and V in their blocks."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.own_memory import block_attention as right
from tutorial_engine.learn.own_memory import slots
from tutorial_engine.learn.verdict import SHAPES, Explain, Verdict, close

Attention = Callable[[Tensor, Tensor, Tensor, list[int], int], Any]
BLOCKS, BLOCK_SIZE, D = 7, 4, 8
TOLERANCE = 1e-4
POOLS = ((1, "k_pool"), (2, "v_pool"))


class Case(NamedTuple):
    """A query [D], the two pools [BLOCKS, BLOCK_SIZE, D], and which of their tokens count."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: list[int]
    kv_len: int

    def poisoned(self) -> "Case":
        """NaN wherever no token of this sequence is."""
        used = torch.zeros(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        used[slots(self.table, BLOCK_SIZE, self.kv_len)] = True
        empty = ~used.view(BLOCKS, BLOCK_SIZE, 1)
        k, v = (pool.masked_fill(empty, math.nan) for pool in (self.k_pool, self.v_pool))
        return self._replace(k_pool=k, v_pool=v)


def _cases() -> list[Case]:
    """Whole and open last blocks, one token, and a table with a block that is not needed yet."""
    draw = torch.Generator().manual_seed(4)
    tables = (([5, 0, 3], 10), ([2, 6], 8), ([4], 1), ([1, 5, 2, 0], 13), ([3, 1, 6], 5))
    cases = []
    for table, kv_len in tables:
        q, k, v = (
            torch.randn(*shape, D, generator=draw) for shape in ((), *[(BLOCKS, BLOCK_SIZE)] * 2)
        )
        order = torch.linspace(0.5, 2, BLOCKS)  # later blocks have larger scores
        for place, block in enumerate(table):
            k[block] += order[place] * q
        cases.append(Case(q, k, v, table, kv_len))
    return cases


# -- slips ----------------------------------------------------------------------------------------


def _each_block(q: Tensor, k: Tensor, v: Tensor, table: Sequence[int], kv_len: int) -> Tensor:
    """The answer of each block alone, [blocks, D]."""
    pairs = zip(range(0, kv_len, BLOCK_SIZE), table, strict=False)
    alone = [right(q, k, v, [b], min(BLOCK_SIZE, kv_len - start)) for start, b in pairs]
    return torch.stack(alone)


BLOCK_SLIPS: Slips = {
    **slips_of(
        right,
        """
    / math.sqrt(len(q)) →
        a score is divided by √D: len(q) ** 0.5
    / math.sqrt(len(q)) → * math.sqrt(len(q))
        the scores are multiplied by √D: divide them by it
    / math.sqrt(len(q)) → / len(q) ** 1 / 2
        `** 1/2` is `** 1`, and then / 2, so the score is divided by 2 · D: write ** 0.5
    / math.sqrt(len(q)) → / (len(q) ** 1 / 2)
        `** 1/2` is `** 1`, and then / 2, so the score is divided by D / 2: write ** 0.5
    n = min(block_size, kv_len - start) → n = kv_len % block_size or block_size
        kv_len % block_size slots count in the last block only; the blocks before it are whole
    n = min(block_size, kv_len - start) → n = min(block_size, kv_len)
        kv_len counts the tokens of all blocks: of block i the first kv_len - i * block_size count
    k_pool.shape[1] → k_pool.shape[0]
        k_pool is [blocks, block_size, D]: the block size is shape[1], not shape[0]
    total * correction + → total +
    out * correction + → out +
        when a larger score comes, both sums must be multiplied by exp(old m − new m);
        compute this factor before m gets its new value: after that it is exp(0) = 1
    max(largest, float(scores.max())) → float(scores.max())
    total * correction + → total +
    out * correction + → out +
        the weights of each block are made with its own largest score: m is the largest so far, and
        when it grows, both sums are multiplied by exp(old m − new m)
    (scores - new_largest).exp() → scores.exp()
        the weights are exp(scores − new m), not exp(scores)
    (scores - new_largest).exp() → (new_largest - scores).exp()
        the weights are exp(scores − new m), not exp(new m − scores)
    (scores - new_largest).exp() → (scores - scores.max()).exp()
        the weights of a block are made with the new m, not with the block's own largest score
    @ v_pool[block → @ v_pool[start // block_size
        values lie in block block_table[i] of v_pool, not in block i
    k_pool[block, :n] → k_pool[start // block_size, :n]
        keys lie in block block_table[i] of k_pool, not in block i
    out * correction + weights → out * correction + weights / total
        the weights are divided by l in each turn of the loop: divide once, at the end
    out * correction + weights → out * correction + weights / weights.sum()
        the weights of a block are divided by their own sum: divide once, at the end, by l
    total * correction + → total +
        the sum of the weights must be corrected too, by exp(old m − new m)
    out * correction + → out +
        the sum of weight · value must be corrected too, by exp(old m − new m)
    total * correction + → total + correction *
    out * correction + → out + correction *
        both factors are in the wrong place: they correct the old l and the old acc
    total * correction + → total + correction *
        the factor is in the wrong place: it corrects the old l, not what this block adds
    out * correction + → out + correction *
        the factor is in the wrong place: it corrects the old acc, not what this block adds
    total * correction + weights.sum() → (total + weights.sum()) * correction
    out * correction + weights → (out + weights
    v_pool[block, :n] → v_pool[block, :n]) * correction
        this block has the new m already: correct the old sums first, then add
    total * correction + weights.sum() → (total + weights.sum()) * correction
        the new weights are made with the new m: correct the old sum of weights first, then add
    out * correction + weights → (out + weights
    v_pool[block, :n] → v_pool[block, :n]) * correction
        the new weights are made with the new m: correct the old acc first, then add
    largest = new_largest → largest, out = new_largest, out / total
    return out / total → return out
        acc is divided by l in each turn of the loop; divide once, after the last block
    largest = new_largest → largest, out = new_largest, out / total
        acc is divided by l in each turn of the loop, and once more at the end: that is too often
    return out / total → return out
        at the end divide by the sum of the weights
    range(0, kv_len, block_size) → range(0, len(block_table) * block_size, block_size)
        the table may have blocks for tokens that run later: there kv_len - i * block_size is below
        0, and [:n] then reads slots from the front of the block; stop after
        -(-kv_len // block_size) blocks
    block_table, strict → range(len(block_table)), strict
        block_table[i] says where logical block i is; these are blocks 0, 1, 2, ... of the pool
    @ v_pool[block → @ k_pool[block
        these are keys; the weights belong to the values, v_pool
    (scores - new_largest).exp() → scores.softmax(0)
        the weights are exp(scores − new m), not a softmax of the block: divide once, at the end
    math.exp(largest - new_largest) → math.exp(new_largest - largest) if start else 0.0
        the factor is exp(old m − new m), which is below 1: not exp(new m − old m)
    range(0, kv_len, block_size) → [0]
        only the first block is read
    total * correction + weights.sum() → weights.sum()
    out * correction + weights → weights
        only the last block is left: add to what the blocks before gave, and keep the new m as m
    """,
    ),
    "the last block is open: only its first tokens, up to kv_len, count": lambda q, k, v, t, n: (
        right(q, k, v, t, -(-n // BLOCK_SIZE) * BLOCK_SIZE)
    ),
    "the open last block is left out: the number of blocks is rounded up": lambda q, k, v, t, n: (
        right(q, k, v, t, n // BLOCK_SIZE * BLOCK_SIZE)
    ),
    "a score is divided by √D, not by D": lambda q, *case: right(q / math.sqrt(len(q)), *case),
    "stop after kv_len tokens: the last block may be open, or not needed yet": (
        lambda q, k, v, t, n: right(q, k, v, t, len(t) * BLOCK_SIZE)
    ),
    "each block has a softmax of its own, and these are averaged; the weights of all blocks "
    "together must sum to 1": lambda *case: _each_block(*case).mean(0),
    "each block has a softmax of its own, and these are added; the weights of all blocks together "
    "must sum to 1": lambda *case: _each_block(*case).sum(0),
}


class _Watch(TorchDispatchMode):
    """Notes the largest tensor of floats that is made (no view) inside the block; reads of K.

    `largest` is its shape, `num_read` counts numbers of K, `order` has "k" or "v" for each read.
    `most_held`: the most numbers that were made from the pools and kept at once.
    """

    def __init__(self, k_pool: Tensor, v_pool: Tensor) -> None:
        super().__init__()
        self.pools = {_memory(k_pool): "k", _memory(v_pool): "v"}
        self.largest, self.num_read, self.order = list[int](), 0, ""
        self.made, self.most_held = list[ref[Tensor]](), 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it, and look at what comes out."""
        result = function(*args, **(kwargs or {}))
        given = [tensor for tensor in args if isinstance(tensor, Tensor)]
        if not isinstance(result, Tensor) or _memory(result) in map(_memory, given):
            return result
        if result.is_floating_point():
            self.largest = max(self.largest, list(result.shape), key=math.prod)
        picks = "index" in str(function)  # of a whole pool it reads what comes out
        for tensor in given:
            pool = self.pools.get(_memory(tensor), "")
            self.order += pool
            if pool:
                self.made.append(ref(result))
            if pool == "k":
                self.num_read += (result if picks else tensor).numel()
        alive = [one for made in self.made if (one := made()) is not None]
        self.most_held = max(self.most_held, sum(one.numel() for one in alive))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


UNREAD = "no block was read: is the range empty? -(-kv_len // block_size) needs both minus signs"
BLOCK_ERRORS: Explain = {
    "numel() == 0": (
        "No slot of a block counts: n is 0. kv_len % block_size is 0 where the last block is "
        "whole; of block i min(block_size, kv_len - i * block_size) slots count. Or too many "
        "blocks are read: only the first -(-kv_len // block_size) have a token. Or i is the "
        "physical block: take its index i, which enumerate gives"
    ),
    ZeroDivisionError: f"l is 0, as if {UNREAD}",
    "list index": (
        "If kv_len is a whole number of blocks, one block too many is read: "
        "-(-kv_len // block_size) rounds up"
    ),
    "sqrt()": "len(q) is a plain number: write len(q) ** 0.5",
    "must be Tensor": (
        "torch.maximum and torch.exp take tensors: m begins as torch.tensor(-torch.inf), and "
        "scores.max() without dim is one"
    ),
    "Python scalars": "math.exp and float take one number: use torch.exp for the scores",
    SHAPES: (
        "q is [D], k_pool and v_pool are [blocks, block_size, D]: one query of one head. m and l "
        "are one number each: scores.max(), p.sum(). acc is one vector: p @ v"
    ),
}


def _differs(got: Tensor, want: Tensor, *_: object) -> str:
    if got.isnan().any():
        return (
            f"the answer is NaN. Perhaps {UNREAD}; or something is divided by l while l is still "
            "0. Before the first block the old m is −inf: the factor "
            "exp(old m − new m) is then 0, but exp(new m − old m) and exp(scores − old m) are "
            "infinite; and the new m is the larger of the two"
        )
    differs = float((got - want).abs().max())
    return f"differs by {differs:.2g}; compare with softmax over all tokens"


def check_block_attention(function: Attention) -> Verdict:
    """Check a learner's function(q, k_pool, v_pool, block_table, kv_len) → [D].

    The numbers, with large scores too; that nothing else is read or written, and nothing gathered.
    """
    cases = _cases()
    tokens = sum(case.kv_len for case in cases)
    verdict = judge(
        *("block_attention", function, right, cases, BLOCK_SLIPS),
        f"block_attention: {tokens} tokens read in their blocks, none gathered",
        where=lambda got, *case: f"block_table {case[3]}, kv_len {case[4]}",
        otherwise=_differs,
        explain=BLOCK_ERRORS,
        then=lambda function: _not_in_place(function, cases),
        keeps={i: f"it wrote to {name}, which other requests read too" for i, name in POOLS},
    )
    if verdict.ok:
        return Verdict(True, verdict.message + _not_running(function, cases[3]))
    return verdict


def _not_in_place(function: Attention, cases: Sequence[Case]) -> str:
    """Right numbers: with other sizes, in a real pool, for large scores, and without a gather?"""
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(*shape, 6, generator=draw) for shape in ((), (3, 2), (3, 2)))
    small = Case(q, k, v, [2, 0], 3)
    if not close(function(*deepcopy(small)), right(*small), TOLERANCE):
        return "with blocks of 2 and D = 6 it is wrong: take both sizes from k_pool.shape"
    for case in cases:
        if not close(function(*deepcopy(case.poisoned())), right(*case), TOLERANCE):
            return (
                f"block_table {case.table}, kv_len {case.kv_len}: it reads slots that nobody "
                "wrote, where a real pool has anything, NaN too; slice the block to its first "
                "tokens before you compute with it"
            )
    for case in cases:
        above = (
            "large scores exp() overflows; before exp() subtract the largest of all scores so far, "
            "those of earlier blocks too"
        )
        below = (
            "scores far below 0 it is not right; m begins at −∞, and the new m is the largest "
            "of all scores so far, those of earlier blocks too"
        )
        # 60: beyond exp() of float32; 400: of float64
        for factor, why in ((60, above), (400, above), (-60, below), (-400, below)):
            far = case._replace(q=factor * case.q)
            if not close(function(*deepcopy(far)), right(*far), 10 * TOLERANCE):
                return f"with {why}"
    seen = _watched(function, cases[3])
    if math.prod(seen.largest) > BLOCK_SIZE * D:
        return (
            f"right numbers, but it makes a tensor of shape {seen.largest}, which is more than one "
            "block: that is a gather. Read one block after the other"
        )
    if seen.most_held > 4 * BLOCK_SIZE * D:  # of K and of V: a new one comes before the old goes
        return (
            "right numbers, but it keeps copies of all blocks: that is a gather in pieces. Read "
            "one block after the other, where it lies"
        )
    return ""


def _watched(function: Attention, case: Case) -> _Watch:
    given = deepcopy(case)
    with _Watch(given.k_pool, given.v_pool) as seen:
        function(*given)
    return seen


def _not_running(function: Attention, case: Case) -> str:
    """What to add where attention is right but no running softmax; "" where it is one.

    "" also where K or V was not read with PyTorch: then nothing was seen.
    """
    narrow = case._replace(q=case.q[:2], k_pool=case.k_pool[..., :2], v_pool=case.v_pool[..., :2])
    seen, whole_blocks = _watched(function, case), -(-case.kv_len // BLOCK_SIZE) * BLOCK_SIZE
    if not {"k", "v"} <= set(seen.order):
        return ""
    keys_first = "k" not in seen.order[max(seen.order.find("v"), 0) :]
    if keys_first or math.prod(_watched(function, narrow).largest) > 2 * BLOCK_SIZE:
        return ". But it keeps the scores of all tokens; a running softmax keeps m, l and acc"
    if seen.num_read > whole_blocks * D:
        return ". But it reads keys more than once; a running softmax corrects l and acc instead"
    return ""
