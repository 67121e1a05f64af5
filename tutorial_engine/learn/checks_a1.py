"""Introduced in notebook A1. The check of its exercise, which knows the usual mistakes by name."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done, wrong_shape

# (x [T, hidden], gate, up [I, hidden], down [hidden, I], rank, num_ranks) → [T, hidden]
RankMlp = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
CASES = ((1, 4), (0, 2), (2, 3), (0, 1))  # (rank, num_ranks): told apart by the first


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _part(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int) -> Tensor:
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    return _mlp(x, gate[own], up[own], down[:, own])


MISTAKES: Mapping[str, RankMlp] = {
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
    "silu is missing": lambda x, g, u, d, rank, n: (
        (x @ g.chunk(n)[rank].T) * (x @ u.chunk(n)[rank].T) @ d.chunk(n, 1)[rank].T
    ),
    "gate and up have changed places": lambda x, g, u, d, rank, n: _part(x, u, g, d, rank, n),
}


def check_rank_mlp(function: RankMlp) -> Verdict:
    """Check a learner's function(x, gate, up, down, rank, num_ranks) → this rank's summand."""
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, 6, generator=draw) for n in (3, 12, 12))
    down = torch.randn(6, 12, generator=draw)

    def run() -> Verdict:
        for case in CASES:
            got = function(x.clone(), gate.clone(), up.clone(), down.clone(), *case)
            want = _part(x, gate, up, down, *case)
            bad = not_done("rank_mlp", got, function) or wrong_shape("rank_mlp", got, want)
            if bad is not None:
                return bad
            if not close(got, want, 1e-4):
                told = f"rank_mlp: rank {case[0]} of {case[1]}"
                for words, mistake in MISTAKES.items():
                    if close(got, mistake(x, gate, up, down, *case), 1e-4):
                        return Verdict(False, f"{told}: {words}")
                return Verdict(False, f"{told}: these are not the products of its features")
        return Verdict(True, "rank_mlp: the parts of 2, 3 and 4 ranks add up to the whole MLP")

    hint = "gate and up give rows to a rank, down gives columns: down[:, own]."
    return guarded("rank_mlp", run, function, hint)
