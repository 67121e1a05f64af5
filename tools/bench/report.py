"""What was measured, as plain figures for JSON.

Knows races and the machine; measures nothing and writes no text (record does).
"""

import platform
import statistics
from typing import Any

import torch

from tools.bench.race import PEER, Race
from tutorial_engine.lab.doctor import installed_version, processor_name
from tutorial_engine.lab.roofline import forward_bytes, forward_flops, weight_bytes
from tutorial_engine.model.config import ModelConfig

Figures = dict[str, Any]


def machine(dtype: str, device: str = "cpu") -> Figures:
    """What a figure means nothing without: processor (of a GPU its name), threads, versions."""
    return {
        "processor": processor_name() if device == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "llama-cpp-python": installed_version("llama-cpp-python"),
    }


def one_request(config: ModelConfig, itemsize: int, result: Race) -> dict[str, list[Figures]]:
    """The race of one request: a row for its prefill and one for its decode, checks, floors.

    A floor is what no engine beats on this machine, in seconds. Prefill: all operations at the
    speed of one large matmul. Decode: all weights read once at full speed; `with_cache` counts the
    K and V, read beside them. Weights that fit into the processor's caches, as a tiny model's,
    could be read faster.
    """
    assert result.roofline is not None, "the race of one request has a probe"
    (asked,) = result.requests
    context = len(asked.prompt)
    alone = {name: [done[0] for done in rounds] for name, rounds in result.answers.items()}
    first = {name: [answer.seconds[0] for answer in done] for name, done in alone.items()}
    later = {name: [answer.per_token for answer in done] for name, done in alone.items()}
    check = {
        "context": context,
        "new_tokens": asked.new_tokens,
        "tokens_equal": {name: tokens for name, (_, tokens) in result.agreement(PEER).items()},
        "warm_up": result.warm_up,
        "failed": result.failed,
    }
    bandwidth, peak = result.roofline
    read = weight_bytes(config, itemsize) / bandwidth
    moved = forward_bytes(config, 1, context, itemsize) / bandwidth
    compute = forward_flops(config, context) / peak
    return {
        "rows": [
            {"phase": phase, "context": context, **_timed(samples)}
            for phase, samples in (("prefill", first), ("decode", later))
        ],
        "checks": [check],
        "floors": [
            {"phase": phase, "context": context, "seconds": seconds, "with_cache": with_cache}
            for phase, seconds, with_cache in (
                ("prefill", compute, compute),
                ("decode", read, moved),
            )
        ],
        "rooflines": [{"context": context, "bandwidth": bandwidth, "peak_flops": peak}],
    }


def many_requests(result: Race, reference: str) -> Figures:
    """The race of many requests: medians, samples, and how far all agree with the reference."""
    return {
        "num_requests": len(result.requests),
        "prompt_tokens": sum(len(request.prompt) for request in result.requests),
        "wanted_tokens": sum(request.new_tokens for request in result.requests),
        **_timed(result.samples),
        "reference": reference,
        "agreement": {
            name: agreement._asdict() for name, agreement in result.agreement(reference).items()
        },
        "failed": result.failed,
    }


def _timed(samples: dict[str, list[float]]) -> Figures:
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {"seconds": median, "samples": samples}
