"""The check of its exercise, which knows the usual mistakes by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.judge import Slips, judge
from tutorial_engine.learn.verdict import Verdict

# (x [T, hidden], gate, up [I, hidden], down [hidden, I], rank, num_ranks) → [T, hidden]
RankMlp = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
CASES = ((2, 6), (1, 4), (0, 2), (2, 3), (0, 1))  # (rank, num_ranks): told apart by the first


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _part(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int) -> Tensor:
    size = len(gate) // num_ranks
    return _features(x, gate, up, down, slice(rank * size, (rank + 1) * size))


def _features(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, own: slice) -> Tensor:
    return _mlp(x, gate[own], up[own], down[:, own])


def _before(gate: Tensor, rank: int, num_ranks: int) -> slice:
    size = len(gate) // num_ranks
    return slice((rank - 1) * size, rank * size)


RANK_SLIPS: Slips = {
    "this is the whole MLP; the sum over the ranks would be num_ranks times too large": (
        lambda x, g, u, d, rank, n: _mlp(x, g, u, d)
    ),
    "it is divided by num_ranks; the parts are added up, so no part is a mean": (
        lambda x, g, u, d, rank, n: _mlp(x, g, u, d) / n
    ),
    "every rank takes the features of rank 0; begin at rank * size": (
        lambda x, g, u, d, rank, n: _part(x, g, u, d, 0, n)
    ),
    "rank 0 has the first features; the order is the other way round": (
        lambda x, g, u, d, rank, n: _part(x, g, u, d, n - 1 - rank, n)
    ),
    "each rank takes every num_ranks-th feature; it has neighbours": (
        lambda x, g, u, d, rank, n: _mlp(x, g[rank::n], u[rank::n], d[:, rank::n])
    ),
    "that begins one rank too early: rank 0 has the first features, from rank * size on": (
        lambda x, g, u, d, rank, n: _features(x, g, u, d, _before(g, rank, n))
    ),
    "the slice begins at rank; each rank has `size` features, so begin at rank * size": (
        lambda x, g, u, d, rank, n: _features(x, g, u, d, slice(rank, rank + len(g) // n))
    ),
    "this part is divided by num_ranks; the parts are added up, so no part is a mean": (
        lambda *case: _part(*case) / case[-1]
    ),
    "silu is missing": lambda x, g, u, d, rank, n: (
        (x @ g.chunk(n)[rank].T) * (x @ u.chunk(n)[rank].T) @ d.chunk(n, 1)[rank].T
    ),
    "silu belongs to the gate's product alone": lambda x, g, u, d, rank, n: (
        F.silu((x @ g.chunk(n)[rank].T) * (x @ u.chunk(n)[rank].T)) @ d.chunk(n, 1)[rank].T
    ),
    "gate and up have changed places": lambda x, g, u, d, rank, n: _part(x, u, g, d, rank, n),
}


def check_rank_mlp(function: RankMlp) -> Verdict:
    """Check a learner's function(x, gate, up, down, rank, num_ranks) → this rank's summand."""
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, 6, generator=draw) for n in (3, 12, 12))
    down = torch.randn(6, 12, generator=draw)

    return judge(
        *("rank_mlp", function, _part, [(x, gate, up, down, *case) for case in CASES], RANK_SLIPS),
        "rank_mlp: the parts of 2, 3, 4 and 6 ranks add up to the whole MLP",
        where=lambda got, x, gate, up, down, rank, n: f"rank {rank} of {n}",
        otherwise=lambda *_: "these are not the sums of its features' products",
        explain="gate and up give rows to a rank, down gives columns: down[:, own].",
    )
