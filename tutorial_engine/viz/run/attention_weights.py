"""Who attends to whom in one run of a model, and what it predicts.

Knows the model and its attention; draws nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.model.attention import AttentionBackend, NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM


class Look(NamedTuple):
    """One run: attention [layers, heads, n, n] and the next token's probabilities [n, V]."""

    weights: Tensor
    probs: Tensor


@torch.inference_mode()
def look_inside(
    model: CausalLM,
    ids: Sequence[int],
    backend: Callable[..., AttentionBackend] = NaiveAttention,
    positions: Sequence[int] | None = None,
) -> Look:
    """Run one sequence of n ids; keep every head's attention and every token's prediction.

    The backend is called with `observe=`, as NaiveAttention is. RoPE turns by `positions` [n]
    (0 .. n − 1); the mask is causal in any case.
    """
    config, n = model.config, len(ids)
    kept = torch.zeros(config.num_hidden_layers, config.num_attention_heads, n, n)

    def keep(layer: int, _sequence: int, weights: Tensor) -> None:
        kept[layer] = weights

    batch = Batch.from_sequences([ids], device=model.device)
    if positions is not None:
        batch = replace(batch, positions=torch.tensor(positions, device=model.device))
    logits = model.compute_logits(model(batch, backend(observe=keep)))
    return Look(kept, logits.softmax(-1).cpu())


def attention_weights(
    model: CausalLM, ids: Sequence[int], positions: Sequence[int] | None = None
) -> Tensor:
    """Attention of every layer and head over one sequence of n ids, [layers, heads, n, n]."""
    return look_inside(model, ids, positions=positions).weights
