"""Introduced in notebook 02. Prefill and decode: new tokens in, logits out, cached or not.

Knows the model, and caches only as TokenCache; knows no sampling and no text. A Runner is what
`generate` drives; ours are here, transformers' is in peers.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import StaticKVCache, TokenCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.blocked_attention import fast_attention
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM, check_ids


@torch.inference_mode()
def forward(
    model: Qwen3ForCausalLM,
    cache: TokenCache,
    sequences: Sequence[Sequence[int]],
    seq_ids: Sequence[int] | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """One forward over each sequence's next tokens → hidden state of its last one, [S, hidden].

    Prefill and decode are both this: they differ in how many tokens are new. A backend of your own
    must be made with this cache.
    """
    batch = cache.batch(sequences, seq_ids)
    largest = max(max(sequence) for sequence in sequences)
    if largest >= model.config.vocab_size:  # on a GPU the embedding itself would kill the process
        check_ids(torch.tensor([largest]), model.config.vocab_size)
    hidden = model(batch, attention or fast_attention(model.device, cache))
    cache.commit(batch)
    if batch.num_tokens == batch.num_seqs:  # decode: every token is a last one
        return hidden
    return hidden[list(batch.last_token_indices)]


@torch.inference_mode()
def prefill(
    model: Qwen3ForCausalLM,
    cache: TokenCache,
    prompts: Sequence[Sequence[int]],
    seq_ids: Sequence[int] | None = None,
    chunk_size: int | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run whole prompts, filling the cache → logits of each one's last token, [S, V] fp32.

    With a chunk_size at most so many tokens of each prompt go into one forward; the logits agree up
    to rounding. They are inference tensors: clone() before you write to them. ValueError, before
    anything runs, for a prompt that is empty or longer than the cache.
    """
    if chunk_size is None:
        return model.compute_logits(forward(model, cache, prompts, seq_ids, attention))
    at_least_one("chunk_size", chunk_size)
    whole = cache.batch(prompts, seq_ids)  # all of it must be possible before a part of it runs
    check_ids(whole.input_ids, model.config.vocab_size)
    last: dict[int, Tensor] = {}  # seq_id -> hidden state of the last token so far
    for start in range(0, max(whole.query_lens), chunk_size):
        chunks = {
            seq_id: prompt[start : start + chunk_size]
            for seq_id, prompt in zip(whole.seq_ids, prompts, strict=True)
            if start < len(prompt)
        }
        hidden = forward(model, cache, list(chunks.values()), list(chunks), attention)
        last.update(zip(chunks, hidden, strict=True))
    return model.compute_logits(torch.stack([last[seq_id] for seq_id in whole.seq_ids]))


@torch.inference_mode()
def decode(
    model: Qwen3ForCausalLM,
    cache: TokenCache,
    tokens: Sequence[int],
    seq_ids: Sequence[int] | None = None,
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Run ONE new token of each sequence against the cache → logits [S, V] fp32."""
    hidden = forward(model, cache, [[token] for token in tokens], seq_ids, attention)
    return model.compute_logits(hidden)


class Runner(Protocol):
    """Something that can prefill and decode: our model, or anybody's (peers.TransformersRunner)."""

    vocab_size: int
    max_len: int  # tokens that a sequence can have, prompt and output
    eos_token_ids: tuple[int, ...]
    can_chunk: bool  # whether prefill takes a chunk_size

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        """Whole prompts → logits of each one's last token, [S, V] fp32."""
        ...

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        """One new token each → logits [S, V] fp32."""
        ...


class CachedRunner:
    """Our model with a cache: each token is run once."""

    def __init__(self, model: Qwen3ForCausalLM, cache: TokenCache) -> None:
        self.model, self.cache = model, cache
        self.attention = fast_attention(model.device, cache)
        self.vocab_size, self.can_chunk = model.config.vocab_size, True
        limit = model.config.max_position_embeddings
        self.max_len = limit if cache.max_len is None else min(limit, cache.max_len)
        self.eos_token_ids = model.config.eos_token_ids

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        """As Runner.prefill; whatever the cache held for these sequences is forgotten."""
        for seq_id in seq_ids:
            self.cache.reset(seq_id)
        return prefill(self.model, self.cache, prompts, seq_ids, chunk_size, self.attention)

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        """As Runner.decode."""
        return decode(self.model, self.cache, tokens, seq_ids, self.attention)


class RecomputeRunner:
    """Our model without a cache: every step runs the whole sequence again. The oracle."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self.vocab_size, self.can_chunk = model.config.vocab_size, False
        self.max_len = model.config.max_position_embeddings
        self.eos_token_ids = model.config.eos_token_ids
        self.sequences: dict[int, list[int]] = {}
        self.tokens_run = 0

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        """As Runner.prefill; chunks would save nothing here, so chunk_size is refused."""
        if chunk_size is not None:
            raise ValueError("chunked prefill needs a cache (use_cache=True)")
        return self._run({s: list(prompt) for s, prompt in zip(seq_ids, prompts, strict=True)})

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        """As Runner.decode, at the price of a prefill."""
        pairs = zip(seq_ids, tokens, strict=True)
        unknown = [s for s in seq_ids if s not in self.sequences]
        if unknown:
            raise ValueError(f"sequence {unknown[0]} was never prefilled")
        return self._run({s: [*self.sequences[s], token] for s, token in pairs})

    @torch.inference_mode()
    def _run(self, sequences: dict[int, list[int]]) -> Tensor:
        batch = Batch.from_sequences(list(sequences.values()), device=self.model.device)
        hidden = self.model(batch)
        self.sequences.update(sequences)  # only now: a refused token leaves no trace
        self.tokens_run += batch.num_tokens
        return self.model.compute_logits(hidden[list(batch.last_token_indices)])


def make_runner(
    model: Qwen3ForCausalLM, use_cache: bool = True, num_seqs: int = 1, max_len: int | None = None
) -> CachedRunner | RecomputeRunner:
    """A runner for our model, with a static cache of num_seqs rows of max_len, or with none."""
    if not use_cache:
        return RecomputeRunner(model)
    config = CacheConfig(max_seqs=num_seqs, max_len=max_len, dtype=model.dtype, device=model.device)
    return CachedRunner(model, StaticKVCache.from_config(model.config, config))
