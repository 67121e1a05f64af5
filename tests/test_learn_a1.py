"""The check of appendix A1: it takes what is right, and names each usual mistake."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from tutorial_engine.learn.checks_a1 import MISTAKES, check_rank_mlp


def chunked(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, rank: int, num_ranks: int) -> Tensor:
    g, u, d = gate.chunk(num_ranks)[rank], up.chunk(num_ranks)[rank], down.chunk(num_ranks, 1)[rank]
    return F.linear(F.silu(F.linear(x, g)).mul_(F.linear(x, u)), d)


def open_one(x, gate, up, down, rank, num_ranks): ...


def test_what_is_right_is_taken_and_what_is_open_is_not_done() -> None:
    assert check_rank_mlp(chunked).ok is True
    assert check_rank_mlp(open_one).ok is None


@pytest.mark.parametrize("words", MISTAKES)
def test_each_mistake_is_named(words: str) -> None:
    verdict = check_rank_mlp(MISTAKES[words])
    assert verdict.ok is False and words in verdict.message


def test_rows_of_down_are_an_error_with_a_hint() -> None:
    def rows(x, gate, up, down, rank, num_ranks):
        return (x @ gate[:6].T) @ down[:6].T

    verdict = check_rank_mlp(rows)
    assert verdict.ok is False and "down[:, own]" in verdict.message
