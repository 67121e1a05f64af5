"""VLLM's options become an engine's parts: model, limits, pages.

Knows the names of vLLM's options and what becomes of each here; knows no request and no step.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tutorial_engine.as_vllm import check_keywords
from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.tokenizer import end_ids, eos_token_id
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder

CACHE_BYTES = 2**32  # at most so many for K and V, unless the blocks are counted: as vLLM on a CPU
BLOCK_SIZE = 16  # tokens
AS_LONG_AS_FITS = -1  # as max_model_len, in vLLM too


class EngineArgs:
    """What vLLM's class of this name takes, as far as this engine has it.

    `model` is a folder, a hub id, or a model that is loaded already (then `tokenizer` is one, too).
    Without a tokenizer (`skip_tokenizer_init`) prompts are token ids, and there is no text. A
    tokenizer's folder has its end of text and its chat template, too.
    `dtype` "auto" is that of its files. K and V lie in pages of `block_size`, with a prefix cache:
    as many as max_num_seqs requests need, up to 4 GiB. `max_model_len` is the model's where it is
    not stated, or as many tokens as 4 GiB hold. `num_gpu_blocks_override` states how many blocks
    there are, with vLLM's null block, which no request gets: n are n − 1 for requests, and one of
    max_model_len tokens must fit; −1 is as long as fits. `memory` is another KVMemory
    for this model. `trace` gets what the engine decides (docs/python.md). ValueError for what vLLM
    has and this engine has not, and for an option that nobody knows.
    """

    def __init__(
        self,
        model: str | Path | CausalLM = TINY,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        max_num_seqs: int | None = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int | None = EngineConfig.max_num_batched_tokens,
        max_model_len: int | None = None,
        long_prefill_token_threshold: int | None = EngineConfig.long_prefill_token_threshold,
        enable_chunked_prefill: bool | None = EngineConfig.enable_chunked_prefill,
        enable_prefix_caching: bool | None = True,
        block_size: int | None = BLOCK_SIZE,
        num_gpu_blocks_override: int | None = None,
        enforce_eager: bool = False,
        seed: int | None = None,
        memory: KVMemory | None = None,
        trace: Recorder | None = None,
        **options: Any,
    ) -> None:
        check_keywords("EngineArgs", options)
        SamplingParams(seed=seed)  # refuses what is no seed
        block_size = BLOCK_SIZE if block_size is None else block_size
        limits: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "long_prefill_token_threshold": long_prefill_token_threshold or None,
            "enable_chunked_prefill": enable_chunked_prefill,
        }
        stated = {name: limit for name, limit in limits.items() if limit is not None}
        length = None if max_model_len == AS_LONG_AS_FITS else max_model_len
        self.config = EngineConfig(**stated, max_model_len=length, cuda_graphs=not enforce_eager)
        self.text_folder, eos = None, None
        if isinstance(model, CausalLM):
            config = model.config
        else:
            model = self.text_folder = resolve_checkpoint(model)
            config = ModelConfig.from_pretrained(model)
            tokenizer = model if tokenizer is None and not skip_tokenizer_init else tokenizer
        if isinstance(tokenizer, str | Path):
            self.text_folder = resolve_checkpoint(tokenizer, weights=False)
            tokenizer = load_tokenizer(self.text_folder)
        if isinstance(tokenizer, Tokenizer) and self.text_folder is not None:
            eos = eos_token_id(self.text_folder, tokenizer)
        self.tokenizer = tokenizer
        self.eos_token_ids = end_ids(eos, config.eos_token_ids, config.vocab_size)
        if isinstance(model, CausalLM):
            self.model = model
        else:
            config = replace(config, eos_token_ids=self.eos_token_ids)
            self.model = load_model(model, device, dtype, config=config)
        self.seed, self.memory, self.trace = seed, memory, trace
        if memory is None:
            at_least_one("block_size", block_size)
            config = self.model.config
            spec = KVCacheSpec.from_model(config, self.model.dtype)
            num_blocks, longest = _pages(
                length_for(config, length),
                max_model_len,
                self.config.max_num_seqs,
                block_size,
                spec.bytes_per_token,
                num_gpu_blocks_override,
            )
            self.config = replace(self.config, max_model_len=longest)
            self.memory = PagedKVCache.from_config(
                config,
                block_size=block_size,
                num_blocks=num_blocks,
                dtype=self.model.dtype,
                device=self.model.device,
                prefix_caching=True if enable_prefix_caching is None else enable_prefix_caching,
                trace=trace,
            )


def _pages(
    length: int,
    max_model_len: int | None,
    max_num_seqs: int,
    block_size: int,
    bytes_per_token: int,
    num_gpu_blocks: int | None,
) -> tuple[int, int]:
    """(blocks for requests, tokens of the longest request), where `length` of them are wanted.

    A length that is not stated is cut to 4 GiB, and one that is to fit to the blocks that are
    stated. ValueError if those do not hold the longest request.
    """
    fits = max_model_len == AS_LONG_AS_FITS
    if num_gpu_blocks is None:
        in_bytes = max(1, CACHE_BYTES // (bytes_per_token * block_size))
        if fits or max_model_len is None:
            length = min(length, in_bytes * block_size)
        for_one = -(-length // block_size)
        return max(for_one, min(for_one * max_num_seqs, in_bytes)), length
    at_least_one("num_gpu_blocks_override", num_gpu_blocks)
    usable = num_gpu_blocks - 1  # one is vLLM's null block
    if fits:
        length = min(length, max(1, usable) * block_size)
    for_one = -(-length // block_size)
    if usable < for_one:
        raise ValueError(
            f"num_gpu_blocks_override={num_gpu_blocks} leaves {usable} blocks for requests (one is "
            f"vLLM's null block), but a request of max_model_len={length} tokens needs {for_one}: "
            f"raise it to {for_one + 1}, or lower max_model_len"
        )
    return usable, length
