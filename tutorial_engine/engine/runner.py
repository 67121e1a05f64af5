"""Introduced in notebook 02. New tokens in, logits out: prefill, decode, and a step of the engine.

All of them are one forward over some tokens of some requests. Knows the model, and a cache as
KVMemory; knows no queue, no budget, no sampling and no text.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.intake import check_token_ids
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.model.attention import AttentionBackend, KVCache, fast_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


def run_scheduled(
    model: Qwen3ForCausalLM, attention: AttentionBackend, scheduled: Sequence[ScheduledRequest]
) -> Tensor:
    """One forward over all of these → hidden state of the last token of each, [S, hidden]."""
    batch = Batch.from_allocations(
        [one.token_ids for one in scheduled],
        [one.allocation for one in scheduled],
        [one.request.request_id for one in scheduled],
        model.device,
    )
    hidden = model(batch, attention)  # [T, hidden]
    if len(hidden) == len(scheduled):  # decode: every token is a last one
        return hidden
    return hidden[list(batch.last_token_indices)]


# -- by hand: one forward over the next tokens of each request ------------------------------------


@torch.inference_mode()
def forward(
    model: Qwen3ForCausalLM,
    cache: KVMemory,
    requests: Sequence[Request],
    num_tokens: int | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run what is not computed yet of each request (up to num_tokens) → hidden states [S, hidden].

    Allocate, one forward, commit; the requests' num_computed_tokens move on. Prefill and decode are
    both this. A backend of your own must be made with cache.storage. ValueError, before anything
    runs, for a request that has nothing to run or no room, or that is there twice.
    """
    _check(model, requests)
    scheduled = [_allocate(cache, request, num_tokens) for request in requests]
    attention = attention or fast_attention(model.device, cache.storage)
    hidden = run_scheduled(model, attention, scheduled)
    for request, num_run, allocation in scheduled:
        request.num_computed_tokens = allocation.first_position + num_run
        cache.commit(request.request_id, request.token_ids, request.num_computed_tokens)
    return hidden


def _check(model: Qwen3ForCausalLM, requests: Sequence[Request]) -> None:
    """ValueError, before any of them gets memory, for requests that cannot run."""
    names = [request.request_id for request in requests]
    if not names or len({*names}) < len(names):
        raise ValueError(f"at least one request, each with an id of its own: got {names}")
    for request in requests:
        name, new = request.request_id, request.token_ids[request.num_computed_tokens :]
        if not new:
            raise ValueError(f"request {name} has no token to run: append the one that was sampled")
        # on a GPU the embedding itself would kill the process
        check_token_ids(f"request {name}", new, model.config.vocab_size)


def _allocate(cache: KVMemory, request: Request, num_tokens: int | None) -> ScheduledRequest:
    name, computed = request.request_id, request.num_computed_tokens
    num_new = min(request.num_new_tokens, num_tokens or request.num_new_tokens)
    allocation = cache.allocate(name, request.token_ids, computed, num_new)
    if allocation is None:
        raise ValueError(
            f"no room for {num_new} tokens of request {name}: free another one, or make the cache "
            "larger"
        )
    return ScheduledRequest(request, len(allocation.new_slots), allocation)


@torch.inference_mode()
def prefill(
    model: Qwen3ForCausalLM,
    cache: KVMemory,
    requests: Sequence[Request],
    chunk_size: int | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run whole prompts, filling the cache → logits of each one's last token, [S, V] fp32.

    With a chunk_size at most so many tokens of each prompt go into one forward; the logits agree up
    to rounding. They are inference tensors: clone() before you write to them. ValueError, before
    anything runs, for a prompt that is empty or longer than the cache.
    """
    if chunk_size is None:
        hidden = forward(model, cache, requests, attention=attention)
        return model.compute_logits(hidden)
    _check(model, requests)
    at_least_one("chunk_size", chunk_size)
    # all of it must be possible before a part of it runs; asked again, memory answers the same
    for request in requests:
        _allocate(cache, request, None)
    last: dict[str, Tensor] = {}  # request_id -> hidden state of its last token so far
    left = list(requests)
    while left:
        hidden = forward(model, cache, left, chunk_size, attention)
        last |= zip((request.request_id for request in left), hidden, strict=True)
        left = [request for request in left if request.num_new_tokens]
    return model.compute_logits(torch.stack([last[r.request_id] for r in requests]))


@torch.inference_mode()
def decode(
    model: Qwen3ForCausalLM,
    cache: KVMemory,
    requests: Sequence[Request],
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run the ONE new token of each request against the cache → logits [S, V] fp32."""
    for request in requests:
        if request.num_new_tokens != 1:
            raise ValueError(
                f"decode runs one token of each request, request {request.request_id} has "
                f"{request.num_new_tokens} that are not computed: prefill them first"
            )
    return model.compute_logits(forward(model, cache, requests, attention=attention))


# -- what the loop of notebook 02 drives ----------------------------------------------------------


class Runner(Protocol):
    """Something that runs requests: our model, or anybody's (lab.hf.TransformersRunner).

    With a cache it is for one loop at a time: two give their requests the same names.
    """

    vocab_size: int
    max_len: int  # tokens that a sequence can have, prompt and output
    eos_token_ids: tuple[int, ...]
    can_chunk: bool  # whether run takes a chunk_size

    def run(self, requests: Sequence[Request], chunk_size: int | None = None) -> Tensor:
        """All that is not computed yet of each → logits of each one's last token, [S, V] fp32."""
        ...


def check_known(known: Mapping[str, Request], requests: Sequence[Request]) -> None:
    """ValueError for a request that goes on where another one of its name has begun since.

    `known`: by name, the requests whose computed tokens a runner holds.
    """
    for request in requests:
        if request.num_computed_tokens and known.get(request.request_id) is not request:
            raise ValueError(
                f"request {request.request_id} is no longer in the cache of this runner, because "
                "another generate or stream has begun on it: finish one before you begin the next, "
                "or make a runner for each"
            )


class CachedRunner:
    """Our model with a cache: each token is run once. For one generate or stream at a time."""

    def __init__(self, model: Qwen3ForCausalLM, cache: KVMemory) -> None:
        self.model, self.cache = model, cache
        self.attention = fast_attention(model.device, cache.storage)
        self.vocab_size, self.can_chunk = model.config.vocab_size, True
        self.max_len = min(model.config.max_position_embeddings, cache.max_len)
        self.eos_token_ids = model.config.eos_token_ids
        self._known: dict[str, Request] = {}  # request_id -> whose K and V the cache has

    def run(self, requests: Sequence[Request], chunk_size: int | None = None) -> Tensor:
        """As Runner.run; what the cache held under the id of a new request is forgotten.

        ValueError for a request whose id another one has taken since.
        """
        check_known(self._known, requests)
        for request in requests:
            if request.num_computed_tokens == 0:
                self.cache.free(request.request_id)
                self._known[request.request_id] = request
        return prefill(self.model, self.cache, requests, chunk_size, self.attention)


class RecomputeRunner:
    """Our model without a cache: nothing stays computed, all of it runs each time. The oracle."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self.vocab_size, self.can_chunk = model.config.vocab_size, False
        self.max_len = model.config.max_position_embeddings
        self.eos_token_ids = model.config.eos_token_ids
        self.tokens_run = 0

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], chunk_size: int | None = None) -> Tensor:
        """As Runner.run; chunks would save nothing here, so chunk_size is refused."""
        if chunk_size is not None:
            raise ValueError("chunked prefill needs a cache (use_cache=True)")
        sequences = [request.token_ids for request in requests]
        batch = Batch.from_sequences(sequences, device=self.model.device)
        hidden = self.model(batch)
        self.tokens_run += batch.num_tokens
        return self.model.compute_logits(hidden[list(batch.last_token_indices)])


def make_runner(
    model: Qwen3ForCausalLM, use_cache: bool = True, num_seqs: int = 1, max_len: int | None = None
) -> CachedRunner | RecomputeRunner:
    """A runner for our model, with a static cache of num_seqs rows of max_len, or with none."""
    if not use_cache:
        return RecomputeRunner(model)
    cache = StaticKVCache.from_config(
        model.config, max_seqs=num_seqs, max_len=max_len, dtype=model.dtype, device=model.device
    )
    return CachedRunner(model, cache)


# -- what the engine of notebook 03 drives --------------------------------------------------------


class ModelOutput(NamedTuple):
    """What a forward gave: logits [n, V] fp32 of the n requests that get a token, in order.

    `faults` has the exception of each request (by id) whose tokens could not be run.
    """

    ready: list[ScheduledRequest]
    logits: Tensor
    faults: dict[str, Exception]


def runner_for(
    model: Qwen3ForCausalLM, storage: KVCache, runner: "ModelRunner | None"
) -> "ModelRunner":
    """The runner of an engine: the given one, or a new one. ValueError if it reads other memory."""
    if runner is None:
        return ModelRunner(model, storage)
    if getattr(runner, "storage", storage) is not storage:
        raise ValueError(
            "this runner reads another memory than the engine's, so the answers would be wrong: "
            "give LLMEngine memory=memory, and the runner memory.storage of the same memory"
        )
    return runner


class ModelRunner:
    """Runs a step's tokens in one forward: decodes of some and chunks of others, end to end.

    `num_forwards` counts the calls of the model, `num_tokens` what they ran.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        storage: KVCache,
        attention: AttentionBackend | None = None,
    ) -> None:
        if isinstance(attention, type):
            raise ValueError(f"make a {attention.__name__} first, with memory.storage")
        if getattr(attention, "cache", storage) is not storage and attention is not None:
            raise ValueError(
                f"{type(attention).__name__} does not read this memory, so every token would see "
                "itself alone: make it with memory.storage"
            )
        self.model, self.storage = model, storage
        self.attention = fast_attention(model.device, storage) if attention is None else attention
        self.num_forwards = self.num_tokens = 0

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        """One forward over all. Should it fail, each runs again, alone: only the faulty ones fail.

        That is safe: a forward only writes K and V of its own new tokens, and writes them again.
        """
        try:
            return self.run_once(scheduled)
        except Exception as fault:
            told = f"{type(fault).__name__}: {fault}"
        # here, outside of the except, what the failed forward held in memory is free again
        if len(scheduled) > 1:
            warnings.warn(
                f"a forward of {len(scheduled)} requests failed ({told}): each runs alone now",
                stacklevel=2,
            )
        alone = [self._run_alone(one) for one in scheduled]
        logits = [output.logits for output in alone if output.ready]
        return ModelOutput(
            [one for output in alone for one in output.ready],
            torch.cat(logits) if logits else torch.empty(0, 0),
            {key: fault for output in alone for key, fault in output.faults.items()},
        )

    def _run_alone(self, one: ScheduledRequest) -> ModelOutput:
        try:
            return self.run_once([one])
        except Exception as fault:
            return ModelOutput([], torch.empty(0, 0), {one.request.request_id: fault})

    def run_once(self, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        """One forward; any exception of it is raised."""
        self.num_forwards += 1
        self.num_tokens += sum(one.num_tokens for one in scheduled)
        hidden = run_scheduled(self.model, self.attention, scheduled)  # [S, hidden]
        rows = [s for s, one in enumerate(scheduled) if one.yields_token]
        if not rows:
            return ModelOutput([], torch.empty(0, 0), {})
        if len(rows) < len(scheduled):
            hidden = hidden[rows]
        return ModelOutput([scheduled[s] for s in rows], self.model.compute_logits(hidden), {})
