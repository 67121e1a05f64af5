"""Introduced in notebook 03. From a plan to logits: one batch, one forward for all of a step.

Knows scheduled requests, the model and the shelves; knows no queue, no budget and no sampling.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.scheduler import ScheduledRequest
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.blocked_attention import fast_attention
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


class Outcome(NamedTuple):
    """What a forward gave: logits [n, V] fp32 of the n requests that get a token, in order.

    `faults` has the exception of each request (by id) whose tokens could not be run.
    """

    ready: list[ScheduledRequest]
    logits: Tensor
    faults: dict[str, Exception]


class ModelRunner:
    """Runs a step's tokens in one forward: decodes of some and chunks of others, end to end.

    `num_forwards` counts the calls of the model, `num_tokens` what they ran.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        storage: KVStorage,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.model, self.storage = model, storage
        self.attention = fast_attention(model.device, storage) if attention is None else attention
        self.num_forwards = self.num_tokens = 0

    def batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        """The tokens of a step, flat, with their positions and slots."""
        device = self.storage.k.device
        batch = Batch.from_sequences(
            [share.token_ids for share in scheduled],
            [share.allocation.first_position for share in scheduled],
            device,
        )
        new_slots = [slot for share in scheduled for slot in share.allocation.new_slots]
        return batch.with_slots(
            range(len(scheduled)),
            torch.tensor(new_slots, device=device),
            [share.allocation.context_slots for share in scheduled],
        )

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest]) -> Outcome:
        """One forward over all. Should it fail, each runs again, alone: only the faulty ones fail.

        That is safe: a forward only writes K and V of its own new tokens, and writes them again.
        """
        try:
            return self._run(scheduled)
        except Exception as fault:
            told = f"{type(fault).__name__}: {fault}"
        # here, outside of the except, what the failed forward held in memory is free again
        if len(scheduled) > 1:
            warnings.warn(
                f"a forward of {len(scheduled)} requests failed ({told}): each runs alone now",
                stacklevel=2,
            )
        alone = [self._run_alone(share) for share in scheduled]
        logits = [outcome.logits for outcome in alone if outcome.ready]
        return Outcome(
            [share for outcome in alone for share in outcome.ready],
            torch.cat(logits) if logits else torch.empty(0, 0),
            {key: fault for outcome in alone for key, fault in outcome.faults.items()},
        )

    def _run_alone(self, share: ScheduledRequest) -> Outcome:
        try:
            return self._run([share])
        except Exception as fault:
            return Outcome([], torch.empty(0, 0), {share.request.request_id: fault})

    def _run(self, scheduled: Sequence[ScheduledRequest]) -> Outcome:
        batch = self.batch(scheduled)
        self.num_forwards += 1
        self.num_tokens += batch.num_tokens
        hidden = self.model(batch, self.attention)  # [T, hidden]
        pairs = zip(scheduled, batch.last_token_indices, strict=True)
        rows = {i: share for share, i in pairs if share.yields_token}
        if not rows:
            return Outcome([], torch.empty(0, 0), {})
        if len(rows) < batch.num_tokens:
            hidden = hidden[list(rows)]
        return Outcome(list(rows.values()), self.model.compute_logits(hidden), {})
