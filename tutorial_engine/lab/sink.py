"""What a model loses when slots of its cache are thrown away, and how much looks at the first one.

Knows models and masks; draws nothing. Source: Xiao et al. 2023, "Efficient Streaming Language
Models with Attention Sinks".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.lab.kv_edit import memory_of
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM

Stay = Callable[[list[int]], Sequence[int]]  # the slots that are held → those that are kept


class _Masked(NamedTuple):
    """An attention backend of one sequence under a mask [T, T]."""

    mask: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return naive_attention(q, k, v, self.mask).out


@torch.inference_mode()
def loss_without(model: CausalLM, token_ids: Sequence[int], num_tokens: int, stay: Stay) -> float:
    """The mean loss (nats) of the last `num_tokens`, when each sees only the slots that stay.

    As if each of them ran alone, and the slots that `stay` does not name were thrown away before,
    for good. Positions stay as they are.
    """
    count = len(token_ids)
    begin = count - num_tokens - 1  # this token's logits foretell the first of the last
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    held = list(range(begin))
    for token in range(begin, count - 1):
        held = list(stay(held))
        mask[token, :token] = False
        mask[token, held] = True
        held.append(token)
    hidden = model(Batch.from_sequences([[*token_ids]], device=model.device), _Masked(mask))
    logits = model.compute_logits(hidden[begin:-1]).log_softmax(-1)
    return -float(logits[range(num_tokens), token_ids[begin + 1 :]].mean())


@torch.inference_mode()
def first_slot(model: CausalLM, token_ids: Sequence[int]) -> tuple[list[float], list[float]]:
    """By layer: the share of attention that goes to slot 0, and the length of V there.

    The share is the mean of all heads and of the later half of the tokens; the length is divided by
    the mean length of the others' V.
    """
    shares: list[float] = []
    half = len(token_ids) // 2
    look = NaiveAttention(
        lambda layer, s, weights: shares.append(float(weights[:, half:, 0].mean()))
    )
    model(Batch.from_sequences([[*token_ids]], device=model.device), look)
    lengths = [v.flatten(1).norm(dim=-1) for _, v in memory_of(model, token_ids).values()]
    return shares, [float(one[0] / one[1:].mean()) for one in lengths]
