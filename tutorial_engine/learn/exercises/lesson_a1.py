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
        gives the whole MLP; the sum over the ranks would be `num_ranks` times too large
    slice(rank * size, (rank + 1) * size) → slice(None)
    down[:, own].T → down.T / num_ranks
        gives the whole MLP, divided by `num_ranks`, for every rank; a rank computes its own
        features alone
    slice(rank * size, (rank + 1) * size) → slice(size)
        takes the features of rank 0 for every rank; each rank has features of its own
        ▸ the first one is rank * size
    rank * size, (rank + 1) * size → (num_ranks - 1 - rank) * size, (num_ranks - rank) * size
        turns the order round, with the last features for rank 0; rank 0 has the first ones
    slice(rank * size, (rank + 1) * size) → slice(rank, None, num_ranks)
        takes every `num_ranks`-th feature; the features of a rank are neighbours
    rank * size, (rank + 1) * size → (rank - 1) * size, rank * size
        takes the features of the rank before, and none for rank 0; rank 0 has the first ones
    slice(rank * size, (rank + 1) * size) → slice(rank, rank + size)
        takes as many features as a rank has, but from feature `rank` on; no feature belongs to two
        ranks ▸ the first one is rank * size
    slice(rank * size, (rank + 1) * size) → slice(0, size) if rank == 0 else slice(size, None)
        gives rank 0 its features, and every other rank all the rest; there may be more than two
        ranks
    (rank + 1) * size) → (rank + 1) * size - 1)
        leaves out the last feature of each rank; each feature belongs to one rank
    len(gate) // num_ranks → len(gate) // 2
        takes half of all features for each rank; the features are divided among `num_ranks` ranks
    len(gate) // num_ranks → 256
        takes all features for rank 0, and none for the others; each rank has I / num_ranks features
    len(gate) // num_ranks → len(down) // num_ranks
        takes hidden / num_ranks features for each rank; the I inner features are divided among the
        ranks
    len(gate) // num_ranks → len(x) // num_ranks
    (x @ gate[own].T) → (x[own] @ gate.T)
    (x @ up[own].T) → (x[own] @ up.T)
    down[:, own] → down
        takes all features for a part of the tokens; each rank has all tokens, and a part of the
        features
    len(gate) // num_ranks → x.shape[1] // num_ranks
    (x @ gate[own].T) → (x[:, own] @ gate[:, own].T)
    (x @ up[own].T) → (x[:, own] @ up[:, own].T)
    down[:, own] → down
        takes all features from a part of x's numbers; each rank has all of `x`, and a part of the
        features
    return (F.silu → return x + (F.silu
        adds `x` itself to the partial sum; the layer adds it, once, after the all-reduce
    down[:, own].T → down[:, own].T / num_ranks
        divides the partial sum by `num_ranks`; partial sums are added up, and none of them is a
        mean
    @ down[:, own].T →
        gives the features themselves; the partial sum is their product with `down`
    F.silu(x @ gate[own].T) → (x @ gate[own].T)
        leaves out silu; the formula has silu of gate's part
    F.silu( → torch.sigmoid(
        has the sigmoid in the place of silu; silu(x) is x * sigmoid(x)
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu((x @ gate[own].T) * (x @ up[own].T))
        takes silu of the product of both; the formula has silu of gate's part alone
    F.silu(x @ gate[own].T) * (x @ up[own].T) → F.silu(x @ up[own].T) * (x @ gate[own].T)
        swaps gate and up, with silu of up's part; the formula has silu of gate's part
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

    def is_sum_of(features: Sequence[int]) -> bool:
        return alike(got, sum((each[i] for i in features), torch.zeros_like(got)))

    fits = [features for features in some if is_sum_of(features)]
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
