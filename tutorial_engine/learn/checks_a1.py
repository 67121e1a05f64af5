"""The check of its exercise, which knows the usual mistakes by name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.verdict import Explain, Verdict
from tutorial_engine.parallel.sent import send

# (x [T, hidden], gate, up [I, hidden], down [hidden, I], rank, num_ranks) → [T, hidden]
RankMlp = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
CASES = ((2, 6), (1, 4), (0, 2), (2, 3), (0, 1))  # (rank, num_ranks): told apart by the first
# each can be cut: then the numbers are wrong, not the shapes; and none is half of INNER
TOKENS, HIDDEN, INNER = 48, 24, 36


def _part(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int) -> Tensor:
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    return (F.silu(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T


RANK_SLIPS: Slips = slips_of(
    _part,
    """
    slice(rank * size, (rank + 1) * size) → slice(None)
        this is the whole MLP; the sum over the ranks would be num_ranks times too large
    slice(rank * size, (rank + 1) * size) → slice(None)
    down[:, own].T → down.T / num_ranks
        it is divided by num_ranks; partial sums are added up, so none of them is a mean
    slice(rank * size, (rank + 1) * size) → slice(size)
        every rank takes the features of rank 0; begin at rank * size
    rank * size, (rank + 1) * size → (num_ranks - 1 - rank) * size, (num_ranks - rank) * size
        rank 0 has the first features; the order is the other way round
    slice(rank * size, (rank + 1) * size) → slice(rank, None, num_ranks)
        each rank takes every num_ranks-th feature; it has neighbours
    rank * size, (rank + 1) * size → (rank - 1) * size, rank * size
        that begins one rank too early: rank 0 has the first features, from rank * size on
    slice(rank * size, (rank + 1) * size) → slice(rank, rank + size)
        the slice begins at rank; each rank has `size` features, so begin at rank * size
    slice(rank * size, (rank + 1) * size) → slice(rank, size)
        the slice begins at rank and ends at size; write rank * size and (rank + 1) * size
    slice(rank * size, (rank + 1) * size) → slice(0, size) if rank == 0 else slice(size, None)
        that is right for two ranks only; there can be more, so end at (rank + 1) * size
    (rank + 1) * size) → size)
        the slice ends at `size`; its second number is where it ends, (rank + 1) * size
    (rank + 1) * size) → (rank + 1) * size - 1)
        the last feature of the rank is missing; a slice ends before its second number
    len(gate) // num_ranks → len(gate) // 2
        the size is that of two ranks; divide by num_ranks
    len(gate) // num_ranks → len(down)
        len(down) is the number of x's numbers, not of features; write len(gate) // num_ranks
    len(gate) // num_ranks → len(down) // num_ranks
        the size comes from the numbers of x; a rank has a share of the features, len(gate) of them
    len(gate) // num_ranks → x.shape[1] // 2 // num_ranks
        the size comes from the numbers of x; divide len(gate), for an MLP of any shape
    len(gate) // num_ranks → 256
        rank 0 does all the work, or the size is a fixed number; write len(gate) // num_ranks
    len(gate) // num_ranks → len(x) // num_ranks
        the size is a number of tokens; a rank has a share of the features, len(gate) of them
    len(gate) // num_ranks → len(x) // num_ranks
    (x @ gate[own].T) → (x[own] @ gate.T)
    (x @ up[own].T) → (x[own] @ up.T)
    down[:, own] → down
        the tokens are cut; every rank has all tokens, and some of the features
    len(gate) // num_ranks → x.shape[1] // num_ranks
    (x @ gate[own].T) → (x[:, own] @ gate[:, own].T)
    (x @ up[own].T) → (x[:, own] @ up[:, own].T)
    down[:, own] → down
        x is cut; every rank has all numbers of x, and some of the inner features
    return (F.silu → return x + (F.silu
        x itself is added; the layer does this once, after the sum over the ranks
    down[:, own].T → down[:, own].T / num_ranks
        this is divided by num_ranks; partial sums are added up, so none of them is a mean
    @ down[:, own].T →
        the product with down is missing; it makes the numbers of x again from the features
    F.silu(x @ gate[own].T) → (x @ gate[own].T)
        silu is missing
    F.silu( → torch.sigmoid(
        that is the sigmoid; silu(x) is x * sigmoid(x)
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu((x @ gate[own].T) * (x @ up[own].T))
        silu belongs to the gate's product alone
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu(x @ up[own].T) * (x @ gate[own].T)
        gate and up have changed places
    """,
)
SIZE = INNER // CASES[0][1]
WHOLE = "down is whole; take the columns of own features"
RANK_ERRORS: Explain = {  # shapes: of the first case
    "process group": "The all-reduce is done after your function; return the partial sum alone",
    "must be integers": "`/` makes 3.0 of 6 / 2, and an index is a whole number; divide with `//`",
    f"tensor a ({SIZE}) must match the size of tensor b ({INNER})": (
        "up is whole, and gate is cut: take the rows of own features of both"
    ),
    f"({TOKENS}x{SIZE} and {INNER}x{HIDDEN})": WHOLE,
    f"({TOKENS}x{SIZE} and {HIDDEN}x{INNER})": WHOLE,
    f"({TOKENS}x{INNER} and": "gate and up are whole; take the rows of own features",
    f"({TOKENS}x{SIZE} and {INNER}x{SIZE})": "a feature is a column of down, not a row",
    f"and {SIZE}x{INNER})": "a feature is a row of gate and of up, not a column",
    f"({TOKENS}x{SIZE} and {HIDDEN}x{SIZE})": (
        "the part of down is not transposed, or it is twice (F.linear transposes by itself); or x "
        "is cut, and every rank has all of x"
    ),
    f"({TOKENS}x{HIDDEN} and": (
        "gate or up is not transposed, or it is twice (F.linear transposes by itself)"
    ),
}


def check_rank_mlp(function: RankMlp) -> Verdict:
    """Check a learner's function(x, gate, up, down, rank, num_ranks) → partial sum.

    It must also leave its inputs as they are, and be one that can be sent to the ranks.
    """
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, HIDDEN, generator=draw) for n in (TOKENS, INNER, INNER))
    down = torch.randn(HIDDEN, INNER, generator=draw)

    def cannot_travel(function: RankMlp) -> str:
        try:
            send(function)
        except ValueError:
            return (
                "the numbers are right, but it cannot be sent to another process: write a plain "
                "`def rank_mlp`: no decorator, no class, no function of your own as a default"
            )
        return ""

    def otherwise(got: Tensor, want: Tensor, *case: Any) -> str:
        size = INNER // case[-1]
        own = f"{case[-2] * size} to {(case[-2] + 1) * size - 1} (of 0 to {INNER - 1})"
        return (
            f"these are not the sums of its features' products; this rank has features {own} (is "
            "the formula another one?)"
        )

    return judge(
        *("rank_mlp", function, _part, [(x, gate, up, down, *case) for case in CASES], RANK_SLIPS),
        "rank_mlp: the partial sums of 2, 3, 4 and 6 ranks add up to the whole MLP",
        where=lambda got, x, gate, up, down, rank, n: f"rank={rank}, num_ranks={n}",
        otherwise=otherwise,
        explain=RANK_ERRORS,
        then=cannot_travel,
        keeps={
            i: f"it changes {name}; the other layers or requests may need it"
            for i, name in enumerate(("x", "gate", "up", "down"))
        },
    )
