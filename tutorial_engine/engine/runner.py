"""New tokens in, logits out: prefill, decode, and a step of the engine.

All of them are one forward over some tokens of some requests. Knows the model, and a cache as
KVMemory; knows no queue, no budget, no sampling and no text.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.inputs import check_token_ids
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.model.attention import AttentionBackend, KVCache
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.batched_attention import fast_attention
from tutorial_engine.model.decoder import CausalLM


class ModelRunner:
    """Runs a step's tokens in one forward: decodes of some and chunks of others, end to end.

    `num_forwards` counts the calls of the model by `run`, `num_tokens` what they ran.
    """

    def __init__(
        self,
        model: CausalLM,
        storage: KVCache,
        attention: AttentionBackend | None = None,
    ) -> None:
        if isinstance(attention, type):
            raise ValueError(f"make one first: {attention.__name__}(memory.storage)")
        if attention is not None and not hasattr(attention, "attend"):
            raise ValueError(f"an attention backend has a method attend, {attention!r} has none")
        if getattr(attention, "cache", storage) is not storage and attention is not None:
            raise ValueError(
                f"{type(attention).__name__} does not read this memory, so every token would see "
                "itself alone: make it with memory.storage"
            )
        self.model, self.storage = model, storage
        if attention is None:
            attention = fast_attention(model.device, storage, model.dtype)
        self.attention = attention
        self.num_forwards = self.num_tokens = 0

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """One forward over all → logits [n, V] fp32 of the n that get a token, in their order.

        Whatever it raises, nothing else has changed: it only writes K and V of its own new tokens,
        and the next step plans and writes them again.
        """
        self.num_forwards += 1
        self.num_tokens += sum(item.num_tokens for item in scheduled)
        hidden = self.hidden_states(scheduled)  # [S, hidden]
        rows = [s for s, item in enumerate(scheduled) if item.yields_token]
        return self.model.compute_logits(hidden if len(rows) == len(scheduled) else hidden[rows])

    def hidden_states(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """One forward over all → the hidden state of the last token of each, [S, hidden]."""
        batch = Batch.from_allocations(
            [item.token_ids for item in scheduled],
            [item.allocation for item in scheduled],
            [item.request.request_id for item in scheduled],
            self.model.device,
        )
        hidden = self.model(batch, self.attention)  # [T, hidden]
        if len(hidden) == len(scheduled):  # decode: every token is a last one
            return hidden
        return hidden[list(batch.last_token_indices)]


# -- by hand: one forward over the next tokens of each request ------------------------------------


@torch.inference_mode()
def forward(
    model: CausalLM,
    cache: KVMemory,
    requests: Sequence[Request],
    num_tokens: int | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run what is not computed yet of each request (up to num_tokens) → hidden states [S, hidden].

    Allocate, one forward, commit; the requests' num_computed_tokens move on. Prefill and decode are
    both this. ValueError, before anything runs, for a request that has nothing to run or no room,
    or that is there twice, and for a backend of your own that was not made with cache.storage.
    """
    _check(model, requests)
    runner = ModelRunner(model, cache.storage, attention)
    try:
        scheduled = [_allocate(cache, request, num_tokens) for request in requests]
        hidden = runner.hidden_states(scheduled)
    except BaseException:  # nothing was written that counts, and nobody may find it
        for request in requests:
            if request.num_computed_tokens:
                cache.commit(request.request_id, request.token_ids, request.num_computed_tokens)
            else:
                cache.free(request.request_id)
        raise
    for request, num_run, allocation in scheduled:
        request.num_computed_tokens = allocation.first_position + num_run
        cache.commit(request.request_id, request.token_ids, request.num_computed_tokens)
    return hidden


def _check(model: CausalLM, requests: Sequence[Request]) -> None:
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
    model: CausalLM,
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
    model: CausalLM,
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


# -- what the loop of notebook 02 calls -----------------------------------------------------------

# Runs all that is not computed yet of each request → logits of each one's last token, [S, V] fp32
Run = Callable[[Sequence[Request]], Tensor]


def run_with_cache(model: CausalLM, cache: KVMemory, chunk_size: int | None = None) -> Run:
    """Each token is run once: `prefill`, then one token at a time. For one loop at a time."""
    attention = fast_attention(model.device, cache.storage, model.dtype)
    return lambda requests: prefill(model, cache, requests, chunk_size, attention)


def run_without_cache(model: CausalLM) -> Run:
    """Nothing stays computed, all of it runs each time. The oracle."""

    @torch.inference_mode()
    def run(requests: Sequence[Request]) -> Tensor:
        batch = Batch.from_sequences([r.token_ids for r in requests], device=model.device)
        return model.compute_logits(model(batch)[list(batch.last_token_indices)])

    return run
