"""What vLLM's methods take beside what this engine has: one table, and one check for all of them.

vllm_takes.json is vLLM's own: the parameters and defaults of each method that this engine has, too
(`make vllm` compares it with the vLLM that is installed). A keyword without a meaning here is taken
with a value that asks for nothing, and refused with any other.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from tutorial_engine.checks import check_not_here

FILE = Path(__file__).with_name("vllm_takes.json")

# Whatever their value is, the answer is the same: logs, loading, the machine.
HARMLESS: dict[str, tuple[str, ...]] = {
    "SamplingParams": ("output_text_buffer_length", "skip_clone"),
    "LLMEngine.from_engine_args": ("enable_multiprocessing", "usage_context"),
    "EngineArgs": (
        *("gpu_memory_utilization", "trust_remote_code", "download_dir", "hf_token"),
        *("served_model_name", "max_logprobs", "disable_custom_all_reduce", "attention_backend"),
        *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        *("optimization_level", "max_parallel_loading_workers", "use_tqdm_on_load"),
        *("disable_log_stats", "disable_log_requests", "log_level", "logging_config"),
        *("swap_space", "max_seq_len_to_capture"),  # of older versions
    ),
}
# Values that ask for nothing, beside None, empty ones and vLLM's defaults; () for what an older
# version had.
ALSO: dict[str, dict[str, tuple[object, ...]]] = {
    "SamplingParams": {
        "skip_reading_prefix_cache": (False,),
        "watermarking": (False,),
        **dict.fromkeys(("best_of", "guided_decoding", "logits_processors"), ()),
        "truncate_prompt_tokens": (),
    },
    "EngineArgs": {
        "async_scheduling": (False,),
        "distributed_executor_backend": ("mp", "uni"),
        "generation_config": ("vllm",),  # its ends of text count all the same
        "load_format": ("safetensors",),
        "revision": ("main",),
        "runner": ("generate",),
        "task": ("auto", "generate"),
        "tokenizer_revision": ("main",),
    },
    "LLM.chat": {"chat_template_content_format": ("string",)},
}


@cache
def recorded() -> dict[str, Any]:
    """All of the file: vLLM's version, and the table."""
    told: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return told


def takes(method: str) -> dict[str, Any]:
    """vLLM's parameters of a method and their defaults; those of EngineArgs are LLM's, too."""
    table: dict[str, dict[str, Any]] = recorded()["takes"]
    return {**table["LLM"], **table[method]} if method == "EngineArgs" else table[method]


def check_keywords(method: str, given: Mapping[str, object]) -> None:
    """ValueError for a keyword that would change the answer, and for one that vLLM has not either.

    `given` are those that the method here does not name.
    """
    also = ALSO.get(method, {})
    for name, value in given.items():
        if name in HARMLESS.get(method, ()):
            continue
        table = takes(method)
        if name not in table and name not in also:
            near = get_close_matches(name, table, n=1)
            hint = f"is {near[0]} meant?" if near else f"see help({method})"
            version = recorded()["vllm"]
            raise ValueError(f"{method} takes no {name!r}, here or in vLLM {version}: {hint}")
        check_not_here(name, value, (table.get(name), [], {}, (), "", *also.get(name, ())))
