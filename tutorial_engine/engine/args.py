"""VLLM's options become an engine's parts: model, limits, pages.

Knows the names of vLLM's options and what becomes of each here; knows no request and no step.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.checks import at_least_one, check_not_here
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

CACHE_BYTES = 2**32  # at most so many for K and V, unless the blocks are counted: as vLLM on a CPU

# Options of vLLM that change nothing here; and those that would, with values that ask for nothing.
HARMLESS = (
    *("gpu_memory_utilization", "disable_log_stats", "swap_space"),
    *("trust_remote_code", "download_dir", "served_model_name", "max_logprobs"),
    *("disable_custom_all_reduce", "max_seq_len_to_capture", "compilation_config"),
)
NOT_HERE: dict[str, tuple[object, ...]] = {  # None asks for nothing, too
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "quantization": (),
    "kv_cache_dtype": ("auto",),
    "enable_lora": (False,),
    "speculative_config": (),
    "tokenizer_mode": ("auto",),
    "revision": ("main",),
    "tokenizer_revision": ("main",),
    "generation_config": ("auto", "vllm"),
    "runner": ("auto", "generate"),
    "model_impl": ("auto",),
    "async_scheduling": (False,),
    "distributed_executor_backend": ("mp", "uni"),
    "kv_cache_memory_bytes": (),
    "kv_transfer_config": (),
    "logits_processors": ([],),
    "load_format": ("auto", "safetensors"),
    "scheduling_policy": ("fcfs",),
    "hf_overrides": ({},),
    "cpu_offload_gb": (0,),
}


class EngineArgs:
    """What vLLM's class of this name takes, as far as this engine has it.

    `model` is a folder, a hub id, or a model that is loaded already (then `tokenizer` is one, too).
    Without a tokenizer (`skip_tokenizer_init`) prompts are token ids, and there is no text.
    `dtype` "auto" is that of its files. K and V lie in pages of `block_size`, with a prefix cache:
    as many as max_num_seqs requests need, up to 4 GiB. `num_gpu_blocks_override` states how many
    blocks there are, with vLLM's null block, which no request gets: n are n − 1 for requests, and
    one of max_model_len tokens must fit. `memory` is another KVMemory for this model. ValueError
    for what vLLM has and this engine has not, and for an option that nobody knows.
    """

    def __init__(
        self,
        model: str | Path | Qwen3ForCausalLM = TINY,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        max_num_seqs: int | None = 16,
        max_num_batched_tokens: int | None = 512,
        max_model_len: int | None = None,
        long_prefill_token_threshold: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool | None = True,
        block_size: int | None = 16,
        num_gpu_blocks_override: int | None = None,
        enforce_eager: bool = False,
        seed: int | None = None,
        memory: KVMemory | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        SamplingParams(seed=seed)  # refuses what is no seed
        longest = 2048 if max_model_len is None else max_model_len  # None is vLLM's default
        max_num_seqs = 16 if max_num_seqs is None else max_num_seqs
        block_size = 16 if block_size is None else block_size
        self.config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512
            if max_num_batched_tokens is None
            else max_num_batched_tokens,
            max_model_len=longest,
            long_prefill_token_threshold=long_prefill_token_threshold or None,
            enable_chunked_prefill=enable_chunked_prefill,
            cuda_graphs=not enforce_eager,
        )
        if isinstance(model, Qwen3ForCausalLM):
            self.model = model
        else:
            self.model = load_model(model, device, dtype)
            tokenizer = model if tokenizer is None and not skip_tokenizer_init else tokenizer
        self.tokenizer = (
            load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        )
        self.seed, self.memory = seed, memory
        if memory is None:
            at_least_one("block_size", block_size)
            config = self.model.config
            spec = KVCacheSpec.from_model(config, self.model.dtype)
            for_one = -(-length_for(config, longest) // block_size)
            in_bytes = CACHE_BYTES // (spec.bytes_per_token * block_size)
            self.memory = PagedKVCache.from_config(
                config,
                block_size=block_size,
                num_blocks=max(for_one, min(for_one * max_num_seqs, in_bytes))
                if num_gpu_blocks_override is None
                else _usable(num_gpu_blocks_override, for_one, longest),
                dtype=self.model.dtype,
                device=self.model.device,
                prefix_caching=True if enable_prefix_caching is None else enable_prefix_caching,
            )


def _usable(num_gpu_blocks: int, for_one: int, max_model_len: int) -> int:
    """Blocks without vLLM's null block. ValueError if they do not hold the longest request."""
    at_least_one("num_gpu_blocks_override", num_gpu_blocks)
    if num_gpu_blocks - 1 < for_one:
        raise ValueError(
            f"num_gpu_blocks_override={num_gpu_blocks} leaves {num_gpu_blocks - 1} blocks for "
            f"requests (one is vLLM's null block), but a request of max_model_len={max_model_len} "
            f"tokens needs {for_one}: raise it to {for_one + 1}, or lower max_model_len"
        )
    return num_gpu_blocks - 1


def _check_options(options: dict[str, Any]) -> None:
    """ValueError for an option of vLLM that this engine has not, and for a wrong name."""
    for name, value in options.items():
        if name not in HARMLESS and name not in NOT_HERE:
            raise ValueError(
                f"no option {name!r} is known here, though vLLM may have it; see help(EngineArgs)"
            )
        if name in NOT_HERE:
            check_not_here(name, value, NOT_HERE[name])
