"""Introduced in notebook 03. The bug zoo of the scheduler: a lone, whole prompt shows none of them.

Each one runs without an error: see bugs.planted.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.learn.bugs import Zoo
from tutorial_engine.model.batch import Allocation, Batch
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler

_right_batch = Batch.from_allocations
_right_sampler = Sampler.__init__


def _neighbours_row(
    cls: type[Batch],
    sequences: Sequence[Sequence[int]],
    allocations: Sequence[Allocation],
    seq_ids: Sequence[str],
    device: torch.device | str = "cpu",
) -> Batch:
    batch = _right_batch(sequences, allocations, seq_ids, device)
    contexts = list(batch.context_slots)
    decodes = [i for i, n in enumerate(batch.query_lens) if n == 1]
    for i, j in zip(decodes[::2], decodes[1::2], strict=False):
        contexts[i], contexts[j] = contexts[j], contexts[i]
    return replace(batch, context_slots=tuple(contexts))


def _answers_early(self: ScheduledRequest) -> bool:
    return True


def _one_generator(
    self: Sampler, params: SamplingParams, eos_token_ids: Sequence[int] = ()
) -> None:
    _right_sampler(self, params, eos_token_ids)
    self._generator = torch.default_generator
    torch.default_generator.manual_seed(params.seed or 0)


def _budget_for_each(self: Scheduler, request: Request, plan: StepPlan) -> int:
    return min(request.num_new_tokens, self.config.max_num_batched_tokens)


BUGS_03: Zoo = {
    "a half-read prompt answers": (ScheduledRequest, "yields_token", property(_answers_early)),
    "a neighbour's row is read": (Batch, "from_allocations", classmethod(_neighbours_row)),
    "one generator for all requests": (Sampler, "__init__", _one_generator),
    "each request has the whole budget": (Scheduler, "num_tokens_to_run", _budget_for_each),
}
