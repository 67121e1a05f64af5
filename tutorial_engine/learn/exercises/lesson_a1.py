"""The check of its exercise, which knows the usual mistakes by name."""

from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.exercises.facts import alike
from tutorial_engine.learn.exercises.judge import Slips, judge, slips_of
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.parallel.sent import send

# (x [T, hidden], gate, up [I, hidden], down [hidden, I], rank, num_ranks) → [T, hidden]
RankMlp = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def _part(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int) -> Tensor:
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    return (F.silu(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T


# of other features than those of the rank is told which ones they are: see _features_in
RANK_SLIPS: Slips = slips_of(
    _part,
    """
    slice(rank * size, (rank + 1) * size) → slice(None)
        the whole MLP; its sum over the ranks would be num_ranks times too large
    slice(rank * size, (rank + 1) * size) → slice(None)
    down[:, own].T → down.T / num_ranks
        the whole MLP, divided by num_ranks: the same of every rank
    slice(rank * size, (rank + 1) * size) → slice(size)
        the features of rank 0, whatever the rank is ▸ the first one is rank * size
    rank * size, (rank + 1) * size → (num_ranks - 1 - rank) * size, (num_ranks - rank) * size
        the order turned round: rank 0 has the last features
    slice(rank * size, (rank + 1) * size) → slice(rank, None, num_ranks)
        every num_ranks-th feature, and not neighbours
    rank * size, (rank + 1) * size → (rank - 1) * size, rank * size
        the features of the rank before, and none for rank 0
    slice(rank * size, (rank + 1) * size) → slice(rank, rank + size)
        as many features as a rank has, but from feature `rank` on ▸ the first one is rank * size
    slice(rank * size, (rank + 1) * size) → slice(0, size) if rank == 0 else slice(size, None)
        rank 0 has its features, and every other rank all the rest: right for two ranks only
    (rank + 1) * size) → (rank + 1) * size - 1)
        the last feature of each rank is missing
    len(gate) // num_ranks → len(gate) // 2
        half of all features for each rank, however many ranks there are
    len(gate) // num_ranks → 256
        rank 0 has all features, the other ranks have none
    len(gate) // num_ranks → len(down) // num_ranks
        hidden // num_ranks features for each rank, and not I // num_ranks
    len(gate) // num_ranks → len(x) // num_ranks
    (x @ gate[own].T) → (x[own] @ gate.T)
    (x @ up[own].T) → (x[own] @ up.T)
    down[:, own] → down
        all features, for a part of the tokens
    len(gate) // num_ranks → x.shape[1] // num_ranks
    (x @ gate[own].T) → (x[:, own] @ gate[:, own].T)
    (x @ up[own].T) → (x[:, own] @ up[:, own].T)
    down[:, own] → down
        all features, from a part of x's numbers
    return (F.silu → return x + (F.silu
        the partial sum, and x itself added to it: the layer adds x, once, after the all-reduce
    down[:, own].T → down[:, own].T / num_ranks
        the partial sum, divided by num_ranks
    @ down[:, own].T →
        the features themselves, not yet multiplied by down
    F.silu(x @ gate[own].T) → (x @ gate[own].T)
        the formula without silu
    F.silu( → torch.sigmoid(
        the sigmoid in place of silu; silu(x) is x * sigmoid(x)
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu((x @ gate[own].T) * (x @ up[own].T))
        silu of the product of both, and not of gate's part alone
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu(x @ up[own].T) * (x @ gate[own].T)
        gate and up swapped: silu of up's part
    """,
)
# the MLP of the lesson's picture
SMALL = (
    torch.tensor([[1.0, 2.0, 1.0]]),
    torch.tensor([[1.0, 0, 0], [0, 1, 0], [-1, 1, 0], [1, 1, -1]]),
    torch.tensor([[1.0, 1, 0], [2, 0, 1], [0, 1, 0], [-1, 1, 0]]),
    torch.tensor([[1.0, -1, 1, 2], [2, 0, -1, 1], [0, 1, 1, 0]]),
)
FEW_RANKS = (
    (1, 2),
    (0, 2),
    (2, 4),  # neither the first nor the last; and a share is not a half
    (0, 1),  # one rank has all
)
# small enough to be shown whole; no two of their sizes are alike, nor half of one another
TOKENS, HIDDEN, INNER = 5, 4, 6
MORE_RANKS = ((2, 6), (2, 3))


def _features_in(
    got: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *_: int
) -> str | None:
    """Which features an answer is the sum of, if it is the sum of some, in one way only."""
    if got.shape != x.shape:
        return None
    each = [_part(x, gate, up, down, i, len(gate)) for i in range(len(gate))]
    some = chain.from_iterable(combinations(range(len(each)), n) for n in range(len(each) + 1))
    fits = [own for own in some if alike(got, sum((each[i] for i in own), torch.zeros_like(got)))]
    return _named(fits[0]) if len(fits) == 1 else None


def _expected_features(got: Tensor, x: Tensor, gate: Tensor, *case: Any) -> str | None:
    if _features_in(got, x, gate, *case) is None:
        return None
    rank, num_ranks = case[-2:]
    size = len(gate) // num_ranks
    return _named(range(rank * size, (rank + 1) * size))


def _named(features: Sequence[int]) -> str:
    return ", ".join(map(str, features)) or "none"


def check_rank_mlp(function: RankMlp) -> Verdict:
    """Check a learner's function(x, gate, up, down, rank, num_ranks) → partial sum.

    It must also leave its inputs as they are, and be one that can be sent to the ranks.
    """
    draw = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, HIDDEN, generator=draw) for n in (TOKENS, INNER, INNER))
    down = torch.randn(HIDDEN, INNER, generator=draw)
    cases = [(*SMALL, *ranks) for ranks in FEW_RANKS]
    cases += [(x, gate, up, down, *ranks) for ranks in MORE_RANKS]

    def cannot_travel(function: RankMlp) -> str:
        try:
            send(function)
        except ValueError:
            return (
                "the numbers are right, but it cannot be sent to another process: write a plain "
                "`def rank_mlp`: no decorator, no class, no function of your own as a default"
            )
        return ""

    return judge(
        *("rank_mlp", function, _part, cases, RANK_SLIPS),
        "rank_mlp: the partial sums of 2, 3, 4 and 6 ranks add up to the whole MLP",
        also={"features in yours": _features_in, "expected features": _expected_features},
        then=cannot_travel,
        keeps={
            i: f"it changes {name}; the other layers or requests may need it"
            for i, name in enumerate(("x", "gate", "up", "down"))
        },
    )
