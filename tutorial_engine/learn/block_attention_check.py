"""Introduced in notebook 04. The check of attention that reads K and V in their blocks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.learn.own_memory import block_attention as right
from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done, wrong_shape

Attention = Callable[[Tensor, Tensor, Tensor, list[int], int], Any]
BLOCKS, BLOCK_SIZE, D = 7, 4, 8
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A query [D], the two pools [BLOCKS, BLOCK_SIZE, D], and which of their tokens count."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: list[int]
    kv_len: int

    def copies(self) -> "Case":
        """The same in other memory."""
        table = list(self.table)
        return Case(self.q.clone(), self.k_pool.clone(), self.v_pool.clone(), table, self.kv_len)

    def poisoned(self) -> "Case":
        """NaN wherever no token of this sequence is."""
        pools = []
        for pool in (self.k_pool, self.v_pool):
            clean = torch.full_like(pool, math.nan)
            for p in range(self.kv_len):
                where = self.table[p // BLOCK_SIZE], p % BLOCK_SIZE
                clean[where] = pool[where]
            pools.append(clean)
        return Case(self.q, pools[0], pools[1], self.table, self.kv_len)


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


# -- mistakes, with the same parameters -----------------------------------------------------------


def _loop(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Sequence[int],
    kv_len: int,
    correct_total: bool = True,
    correct_out: bool = True,
    divide: bool = True,
    stop: bool = True,
) -> Tensor:
    """The running softmax with a line left out. Without `stop` every block of the table is read."""
    largest, total, out = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(v_pool.shape[-1])
    end = kv_len if stop else len(table) * BLOCK_SIZE
    for start, block in zip(range(0, end, BLOCK_SIZE), table, strict=False):
        n = min(BLOCK_SIZE, kv_len - start)  # below 0 where nothing is needed yet
        scores = k_pool[block, :n] @ q / math.sqrt(len(q))
        new = torch.maximum(largest, scores.max())
        weights, correction = (scores - new).exp(), (largest - new).exp()
        total = total * (correction if correct_total else 1) + weights.sum()
        out = out * (correction if correct_out else 1) + weights @ v_pool[block, :n]
        largest = new
    return out / total if divide else out


def _each_block(q: Tensor, k: Tensor, v: Tensor, table: Sequence[int], kv_len: int) -> Tensor:
    """The answer of each block alone, [blocks, D]."""
    pairs = zip(range(0, kv_len, BLOCK_SIZE), table, strict=False)
    alone = [right(q, k, v, [b], min(BLOCK_SIZE, kv_len - start)) for start, b in pairs]
    return torch.stack(alone)


MISTAKES: Mapping[str, Attention] = {
    "a score is divided by √D: math.sqrt(len(q))": lambda q, k, v, t, n: right(
        q * math.sqrt(D), k, v, t, n
    ),
    "when a larger score comes, what was summed up before must be corrected: both sums are "
    "multiplied by exp(old largest − new largest)": partial(
        _loop, correct_total=False, correct_out=False
    ),
    "the sum of the weights must be corrected too, by exp(old largest − new largest)": partial(
        _loop, correct_total=False
    ),
    "the sum of weight · value must be corrected too, by exp(old largest − new largest)": partial(
        _loop, correct_out=False
    ),
    "at the end divide by the sum of the weights": partial(_loop, divide=False),
    "the last block is open: only its first tokens, up to kv_len, count": lambda q, k, v, t, n: (
        right(q, k, v, t, -(-n // BLOCK_SIZE) * BLOCK_SIZE)
    ),
    "the table may have a block that is not needed yet: stop after kv_len tokens": (
        lambda q, k, v, t, n: right(q, k, v, t, len(t) * BLOCK_SIZE)
    ),
    "the table may have blocks for tokens that run later: there kv_len - i * block_size is "
    "below 0, and [:n] then reads slots from the front of the block; stop after "
    "math.ceil(kv_len / block_size) blocks": partial(_loop, stop=False),
    "block_table[i] says where logical block i is; these are blocks 0, 1, 2, ... of the pool": (
        lambda q, k, v, t, n: right(q, k, v, range(len(t)), n)
    ),
    "each block has a softmax of its own, and these are averaged; the weights of all blocks "
    "together must sum to 1": lambda *case: _each_block(*case).mean(0),
    "each block has a softmax of its own, and these are added; the weights of all blocks together "
    "must sum to 1": lambda *case: _each_block(*case).sum(0),
    "only the last block is left; add to what the blocks before gave": lambda *case: _each_block(
        *case
    )[-1],
    "only the first block is read": lambda q, k, v, t, n: right(q, k, v, t, min(n, BLOCK_SIZE)),
    "these are keys; the weights belong to the values, v_pool": lambda q, k, v, t, n: right(
        q, k, k, t, n
    ),
}


class _Watch(TorchDispatchMode):
    """Notes the largest tensor of floats that is made (no view) inside the block; reads of K."""

    def __init__(self, k_pool: Tensor) -> None:
        super().__init__()
        self.k_pool, self.largest, self.num_read = _memory(k_pool), list[int](), 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it, and look at what comes out."""
        result = function(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, Tensor)]
        if not isinstance(result, Tensor) or _memory(result) in map(_memory, given):
            return result
        if result.is_floating_point():
            self.largest = max(self.largest, list(result.shape), key=math.prod)
        picks = "index" in str(function)  # of a whole pool it reads what comes out
        for one in given:
            if _memory(one) == self.k_pool:
                self.num_read += (result if picks else one).numel()
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_block_attention(function: Attention) -> Verdict:
    """Check a learner's function(q, k_pool, v_pool, block_table, kv_len) → [D].

    The numbers, with large scores too; that nothing else is read or written, and nothing gathered.
    """
    cases = _cases()

    def run() -> Verdict:
        answers = []
        for case in cases:
            given = case.copies()
            answer = function(*given)
            bad = not_done("block_attention", answer, function)
            bad = bad or wrong_shape("block_attention", answer, case.q)
            if bad is not None:
                return bad
            for name, before, after in zip("kv", case[1:3], given[1:3], strict=True):
                if not torch.equal(before, after):
                    told = f"block_attention wrote to {name}_pool, which other requests read too"
                    return Verdict(False, told)
            answers.append(answer)
        wants = [right(*case) for case in cases]
        wrong = [not close(a, b, TOLERANCE) for a, b in zip(answers, wants, strict=True)]
        if any(wrong):
            same = (words for words, other in MISTAKES.items() if _all_close(other, cases, answers))
            case = cases[wrong.index(True)]
            most = float((answers[wrong.index(True)] - wants[wrong.index(True)]).abs().max())
            where = f"block_attention: block_table {case.table}, kv_len {case.kv_len}"
            told = f"{where}: differs by {most:.2g}"
            return Verdict(False, f"{told}; {next(same, 'compare with softmax over all tokens')}")
        return _in_place(function, cases)

    hint = "q is [D], k_pool and v_pool are [blocks, block_size, D]: one query of one head."
    return guarded("block_attention", run, function, hint)


def _all_close(other: Attention, cases: Sequence[Case], answers: Sequence[Tensor]) -> bool:
    pairs = zip(cases, answers, strict=True)
    return all(close(other(*case), answer, TOLERANCE) for case, answer in pairs)


def _in_place(function: Attention, cases: Sequence[Case]) -> Verdict:
    """Right numbers: are they right in a real pool, and for large scores, without a gather?"""
    for case in cases:
        if not close(function(*case.poisoned().copies()), right(*case), TOLERANCE):
            return Verdict(
                False,
                f"block_attention: block_table {case.table}, kv_len {case.kv_len}: it reads slots "
                "that nobody wrote, where a real pool has anything, NaN too; slice the block to "
                "its first tokens before you compute with it",
            )
    for case in cases:
        large = case._replace(q=60 * case.q)
        if not close(function(*large.copies()), right(*large), 10 * TOLERANCE):
            return Verdict(
                False,
                "block_attention: with large scores exp() overflows; subtract the largest score "
                "so far before exp()",
            )
    given = cases[3].copies()
    with _Watch(given.k_pool) as seen:
        function(*given)
    if math.prod(seen.largest) > BLOCK_SIZE * D:
        return Verdict(
            False,
            f"block_attention: right numbers, but it makes a tensor of shape {seen.largest}, which "
            "is more than one block: that is a gather. Read one block after the other",
        )
    tokens = sum(case.kv_len for case in cases)
    told = f"block_attention: {tokens} tokens read in their blocks, none gathered"
    return Verdict(True, told + _not_running(function, seen.num_read, given.kv_len))


def _not_running(function: Attention, num_read: int, kv_len: int) -> str:
    """What to add where attention is right but no running softmax; "" where it is one."""
    q, k_pool, v_pool, table, n = _cases()[3].copies()  # heads so narrow that all scores show
    with _Watch(k_pool) as seen:
        function(q[:2], k_pool[..., :2], v_pool[..., :2], table, n)
    if math.prod(seen.largest) > 2 * BLOCK_SIZE:
        return ". But it keeps the scores of all tokens; a running softmax keeps m, l and acc"
    if num_read > kv_len * D:
        return ". But it reads keys more than once; a running softmax corrects l and acc instead"
    return ""
