"""Measures induction: does a head look at what came next last time?

Knows attention weights; knows nothing of training. Source: Olsson et al. 2022.
"""

import random

import torch
from torch import Tensor

from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM


def repeated_random_ids(rng: random.Random, vocab_size: int, period: int, length: int) -> list[int]:
    """`period` random ids (0, the end of text, left out) said again until `length` are there."""
    once = [rng.randrange(1, vocab_size) for _ in range(period)]
    return (once * (length // period + 1))[:length]


def score_of_heads(weights: Tensor, period: int) -> Tensor:
    """Attention weights [..., q, k] over 2 · period ids, said twice → scores [...] in 0..1.

    The score is the mean attention, over the second round, to the token right after the previous
    occurrence of the current one.
    """
    queries = torch.arange(period, 2 * period)
    return weights[..., queries, queries - period + 1].mean(-1)


@torch.inference_mode()
def induction_scores(
    model: CausalLM, seed: int = 0, period: int = 32, sequences: int = 4
) -> Tensor:
    """Score of every head, [layers, heads] in 0..1: the mean over some random texts said twice."""
    rng = random.Random(seed)
    config = model.config
    scores = torch.zeros(config.num_hidden_layers, config.num_attention_heads)

    def add(layer: int, _sequence: int, weights: Tensor) -> None:
        scores[layer] += score_of_heads(weights, period).cpu() / sequences

    ids = [
        repeated_random_ids(rng, config.vocab_size, period, 2 * period) for _ in range(sequences)
    ]
    model(Batch.from_sequences(ids, device=model.device), NaiveAttention(observe=add))
    return scores
