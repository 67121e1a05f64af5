"""Introduced in notebook 03. The limits of a step, and a step as it is planned.

Knows requests and where their tokens go; knows no queue, no policy and no model.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import Allocation
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.request import Request
from tutorial_engine.sampling.sampler import SampledToken


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits: requests that run at once, tokens per forward, tokens of one request, of a chunk.

    `max_model_len` is prompt + output (None: what model and memory allow). A prompt's share of a
    step is capped by `long_prefill_token_threshold` (None: only by the budget); with chunked
    prefill off it runs whole or not yet. ValueError for sizes below 1.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = 2048
    long_prefill_token_threshold: int | None = None
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        at_least_one("max_num_seqs", self.max_num_seqs)
        at_least_one("max_num_batched_tokens", self.max_num_batched_tokens)
        for name in ("max_model_len", "long_prefill_token_threshold"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))
        if not isinstance(self.enable_chunked_prefill, bool):
            raise ValueError(
                f"enable_chunked_prefill is True or False, got {self.enable_chunked_prefill!r}"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """A SchedulerConfig, and how rows are laid out (`slots_first` as in CacheConfig)."""

    slots_first: bool = False

    def rows(self, dtype: torch.dtype, device: torch.device) -> CacheConfig:
        """A row for each request that may run at once."""
        return CacheConfig(
            max_seqs=self.max_num_seqs,
            max_len=self.max_model_len,
            dtype=dtype,
            device=device,
            slots_first=self.slots_first,
        )


class ScheduledRequest(NamedTuple):
    """A request's share of a step: its tokens at first_position, ... and where they lie."""

    request: Request
    num_tokens: int
    allocation: Allocation

    @property
    def token_ids(self) -> list[int]:
        """The tokens to run."""
        first = self.allocation.first_position
        return self.request.token_ids[first : first + self.num_tokens]

    @property
    def yields_token(self) -> bool:
        """Does it reach its newest token? Only then do its logits say what comes next."""
        return self.allocation.first_position + self.num_tokens == self.request.num_tokens


@dataclass
class StepPlan:
    """A step while it is being planned: the budget that is left, and who got what."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Update(NamedTuple):
    """What a step's result did to one request: a new token, or the end, or both."""

    request: Request
    token: SampledToken | None
