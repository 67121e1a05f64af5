"""The check of attention that reads K and V in their blocks."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.learn.exercises.facts import AsIs, alike, first_difference
from tutorial_engine.learn.exercises.judge import Slips, judge, slip_in, slips_of
from tutorial_engine.learn.exercises.verdict import Verdict, close
from tutorial_engine.learn.parts.memory import block_attention as right
from tutorial_engine.learn.parts.memory import slots

Attention = Callable[[Tensor, Tensor, Tensor, list[int], int], Any]
TOLERANCE = 1e-4
POOLS = ((1, "k_pool"), (2, "v_pool"))


class Case(NamedTuple):
    """A query [D], the two pools [blocks, block_size, D], and which of their tokens count."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: list[int]
    kv_len: int

    @property
    def slots(self) -> list[int]:
        """Where its tokens lie in the pools."""
        return slots(self.table, self.k_pool.shape[1], self.kv_len)

    def poisoned(self) -> "Case":
        """NaN wherever no token of this sequence is."""
        used = torch.zeros(self.k_pool.shape[:2], dtype=torch.bool)
        used.view(-1)[self.slots] = True
        k, v = (pool.masked_fill(~used[..., None], math.nan) for pool in (self.k_pool, self.v_pool))
        return self._replace(k_pool=k, v_pool=v)


def _small() -> list[Case]:
    """One prompt of 5 tokens in blocks of 2, D = 6, and its beginnings, with scores of √6 · 0 to 3.

    Of the values of its tokens each is another unit vector: the output shows their weights. The
    values of all other slots are 9.
    """
    table = [2, 0, 3]
    k, v = torch.full((5, 2, 6), -1.0), torch.full((5, 2, 6), 9.0)
    by_slot = slots(table, 2, 5)
    k.view(10, 6)[by_slot] = torch.tensor([1.0, 0.0, 2.0, 3.0, 1.0])[:, None] * torch.eye(6)[0]
    v.view(10, 6)[by_slot] = torch.eye(5, 6)
    q = math.sqrt(6) * torch.eye(6)[0]
    held = {1: [2], 2: [2], 3: [2, 0], 4: [2, 0], 5: table}
    cases = [Case(q, k, v, held[kv_len], kv_len) for kv_len in held]
    return [*cases, Case(q, k, v, table, 3)]  # block 3 is not needed yet


BLOCKS, BLOCK_SIZE, D = 7, 4, 8


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
    size = k.shape[1]
    pairs = zip(range(0, kv_len, size), table, strict=False)
    alone = [right(q, k, v, [b], min(size, kv_len - start)) for start, b in pairs]
    return torch.stack(alone)


BLOCK_SLIPS: Slips = {
    **slips_of(
        right,
        """
    / math.sqrt(len(q)) →
        does not divide the scores by √D; a score is q · k / √D
    / math.sqrt(len(q)) → * math.sqrt(len(q))
        multiplies the scores by √D; a score is q · k / √D
    / math.sqrt(len(q)) → / len(q) ** 1 / 2
        divides the scores by 2 · D, as `/ len(q) ** 1 / 2` does; a score is q · k / √D
        ▸ len(q) ** 0.5
    / math.sqrt(len(q)) → / (len(q) ** 1 / 2)
        divides the scores by D / 2, as `/ (len(q) ** 1 / 2)` does; a score is q · k / √D
        ▸ len(q) ** 0.5
    n = min(block_size, kv_len - start) → n = kv_len % block_size or block_size
        counts of every block as many slots as of the last one; the blocks before the last are full
    n = min(block_size, kv_len - start) → n = min(block_size, kv_len)
        counts all slots of an open last block behind another block; slots after `kv_len` may hold
        anything
    k_pool.shape[1] → k_pool.shape[0]
        counts as many slots in a block as `k_pool` has blocks; the pools are [blocks, block_size,
        D]
    total * correction + → total +
    out * correction + → out +
        leaves l and acc as they are when a larger score comes; both are multiplied by exp(old m −
        new m)
    max(largest, float(scores.max())) → float(scores.max())
    total * correction + → total +
    out * correction + → out +
        makes each block's weights with its own largest score; all weights must be made with the
        same m
    (scores - new_largest).exp() → scores.exp()
        makes the weights as exp(scores); they are exp(scores − m), so that exp never overflows
    (scores - new_largest).exp() → (new_largest - scores).exp()
        makes the weights as exp(m − scores), so that the smallest score counts most; they are
        exp(scores − m)
    (scores - new_largest).exp() → (scores - scores.max()).exp()
        makes a block's weights with its own largest score, and corrects by m; the weights need the
        new m
    @ v_pool[block → @ v_pool[start // block_size
        reads the values of blocks 0, 1, 2, ... and the right keys; `block_table` says where both
        lie
    k_pool[block, :n] → k_pool[start // block_size, :n]
        reads the keys of blocks 0, 1, 2, ... and the right values; `block_table` says where both
        lie
    out * correction + weights → out * correction + weights / total
        divides what a block adds to acc by l, and acc again at the end; acc is divided once, at the
        end
    out * correction + weights → out * correction + weights / weights.sum()
        divides what a block adds to acc by its own sum of weights; acc is divided once, at the end,
        by l
    total * correction + → total +
        does not correct l when a larger score comes; l and acc are multiplied by exp(old m − new m)
    out * correction + → out +
        does not correct acc when a larger score comes; l and acc are multiplied by exp(old m − new
        m)
    total * correction + → total + correction *
    out * correction + → out + correction *
        multiplies what a block adds to l and acc by the factor; it corrects what was there before
    total * correction + → total + correction *
        multiplies what a block adds to l by the factor; it corrects the l that was there before
    out * correction + → out + correction *
        multiplies what a block adds to acc by the factor; it corrects the acc that was there before
    total * correction + weights.sum() → (total + weights.sum()) * correction
    out * correction + weights → (out + weights
    v_pool[block, :n] → v_pool[block, :n]) * correction
        corrects l and acc with what this block adds; its weights are made with the new m already
    total * correction + weights.sum() → (total + weights.sum()) * correction
        corrects l with what this block adds, and acc is right; its weights are made with the new m
        already
    out * correction + weights → (out + weights
    v_pool[block, :n] → v_pool[block, :n]) * correction
        corrects acc with what this block adds, and l is right; its weights are made with the new m
        already
    largest = new_largest → largest, out = new_largest, out / total
    return out / total → return out
        divides acc by l after each block, and not at the end; acc is divided once, after the last
        block
    largest = new_largest → largest, out = new_largest, out / total
        divides acc by l after each block, and again at the end; acc is divided once, after the last
        block
    return out / total → return out
        never divides acc by l; the weights of all tokens must add up to 1
    range(0, kv_len, block_size) → range(0, len(block_table) * block_size, block_size)
        counts the first slots of a block that is not needed yet; only `kv_len` tokens count
    block_table, strict → range(len(block_table)), strict
        reads keys and values of blocks 0, 1, 2, ...; `block_table` says where they lie
    @ v_pool[block → @ k_pool[block
        gives a mix of keys; the weights belong to the values
    (scores - new_largest).exp() → scores.softmax(0)
        makes the weights as a softmax in each block, corrected by m; one softmax runs over all
        blocks
    math.exp(largest - new_largest) → math.exp(new_largest - largest) if start else 0.0
        takes exp(new m − old m) as the factor; it is exp(old m − new m), which is never above 1
    range(0, kv_len, block_size) → [0]
        counts only the first block; all `kv_len` tokens count
    total * correction + weights.sum() → weights.sum()
    out * correction + weights → weights
        counts only the last block: what the blocks before gave is lost (l and acc are overwritten,
        or m stays −∞, so that the factor is 0); all `kv_len` tokens count
    """,
    ),
    "counts all slots of the last block; slots after `kv_len` may hold anything": (
        lambda q, k, v, t, n: right(q, k, v, t, -(-n // k.shape[1]) * k.shape[1])
    ),
    "leaves out an open last block; its tokens up to `kv_len` count": lambda q, k, v, t, n: right(
        q, k, v, t, n // k.shape[1] * k.shape[1]
    ),
    "divides the scores by D; a score is q · k / √D": lambda q, *case: right(
        q / math.sqrt(len(q)), *case
    ),
    "counts all slots of all blocks; slots after `kv_len` may hold anything": (
        lambda q, k, v, t, n: right(q, k, v, t, len(t) * k.shape[1])
    ),
    "gives the mean of a softmax in each block; one softmax runs over all blocks": (
        lambda *case: _each_block(*case).mean(0)
    ),
    "gives the sum of a softmax in each block; one softmax runs over all blocks": (
        lambda *case: _each_block(*case).sum(0)
    ),
}


# As right as the right one, until the scores are large.
FAR_SLIPS: Slips = slips_of(
    right,
    """
    max(largest, float(scores.max())) → float(scores.max())
    math.exp(largest - new_largest) → torch.tensor(largest - new_largest).exp()
        lets m fall when a later block has smaller scores; the new m is the larger of the old m and
        the block's largest score
    (scores - new_largest).exp() → scores.exp()
    math.exp(largest - new_largest) → 1.0
        takes m off no score; the weights are exp(scores − m), so that exp never overflows
    largest, total, out = -math.inf → largest, total, out = 0.0
        begins with m = 0; m begins at −∞, so that it is the largest score also where all are
        negative
    """,
)


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
        alive = [kept for made in self.made if (kept := made()) is not None]
        self.most_held = max(self.most_held, sum(kept.numel() for kept in alive))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _inputs(*given: Any) -> dict[str, object]:
    """The tokens as block_table has them: their scores and values."""
    case = Case(*given)
    k, v = (pool.flatten(0, 1)[case.slots] for pool in case[1:3])
    shows_weights = torch.equal(v, torch.eye(*v.shape))
    return {
        "pools": AsIs("{} blocks of {} slots, D = {}".format(*case.k_pool.shape)),
        "block_table": case.table,
        "kv_len": case.kv_len,
        "q · k / √D": (k @ case.q / math.sqrt(len(case.q))).tolist(),
        "values": AsIs("unit vectors, so out is the weights") if shows_weights else v,
    }


def _from_block(function: Attention, *given: Any) -> str | None:
    """From which block on the output differs; None if there is one block, or none is found."""
    case = Case(*given)
    size = case.k_pool.shape[1]
    num_blocks = -(-case.kv_len // size)
    for number in range(1, num_blocks + 1):
        begin = case._replace(kv_len=min(number * size, case.kv_len))
        if num_blocks > 1 and not close(function(*deepcopy(begin)), right(*begin), TOLERANCE):
            before = f"right after {number - 1}, " * (number > 1)
            return f"{before}wrong after {number} of {num_blocks}"
    return None


def check_block_attention(function: Attention) -> Verdict:
    """Check a learner's function(q, k_pool, v_pool, block_table, kv_len) → [D].

    The numbers, with large scores too; that nothing else is read or written, and nothing gathered.
    """
    cases = _cases()
    tokens = sum(case.kv_len for case in cases)
    verdict = judge(
        *("block_attention", function, right, [*_small(), *cases], BLOCK_SLIPS),
        f"block_attention: {tokens} tokens read in their blocks, none gathered",
        inputs=_inputs,
        also={"block by block": lambda _, *case: _from_block(function, *case)},
        then=lambda function: _not_in_place(function, cases),
        keeps={i: f"it wrote to {name}, which other requests read too" for i, name in POOLS},
    )
    if verdict.ok:
        return Verdict(True, verdict.message + _not_running(function, cases[3]))
    return verdict


def _not_in_place(function: Attention, cases: Sequence[Case]) -> str:
    """Right numbers: in a real pool, for large scores, and without a gather?"""
    for case in cases:
        if not close(function(*deepcopy(case.poisoned())), right(*case), TOLERANCE):
            return (
                f"block_table {case.table}, kv_len {case.kv_len}: it reads slots that nobody "
                "wrote; with NaN in those, as a real pool may have, the output is another (the "
                "weight 0 does not help: 0 · NaN is NaN)"
            )
    # 60: beyond exp() of float32; 400: of float64
    factors = 60, 400, -60, -400
    far = [case._replace(q=factor * case.q) for case in cases for factor in factors]
    answers = [function(*deepcopy(case)) for case in far]
    for case, got in zip(far, answers, strict=True):
        if not alike(got, want := right(*case), 10 * TOLERANCE):
            scores = case.k_pool.flatten(0, 1)[case.slots] @ case.q / math.sqrt(len(case.q))
            theirs = {why: lambda case, slip=slip: slip(*case) for why, slip in FAR_SLIPS.items()}
            slip = slip_in(answers, far, theirs, 10 * TOLERANCE)
            return (
                f"right for small scores, but {f'it {slip}. For' if slip else 'for'} scores from "
                f"{scores.min():,.0f} to {scores.max():,.0f} it differs first at "
                + first_difference(got, want, 10 * TOLERANCE)
            )
    seen = _watched(function, cases[3])
    if math.prod(seen.largest) > BLOCK_SIZE * D:
        return (
            f"right numbers, but it makes a tensor of shape {seen.largest}, which is more than one "
            "block: that is a gather"
        )
    if seen.most_held > 4 * BLOCK_SIZE * D:  # of K and of V: a new one comes before the old goes
        return "right numbers, but it keeps copies of all blocks: that is a gather in pieces"
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
