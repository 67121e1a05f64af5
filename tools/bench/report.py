"""What was measured, as plain figures for JSON and as text tables.

Knows races and the machine; measures nothing and draws nothing (plots does).
"""

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tools.bench.race import PEER, Race
from tutorial_engine.lab.doctor import installed_version, processor_name
from tutorial_engine.lab.roofline import forward_bytes, forward_flops, weight_bytes
from tutorial_engine.model.config import ModelConfig

OURS, LLAMA = "ours", "llama.cpp"
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

    A floor is what no engine beats on this machine, in seconds, and how near each came. Prefill:
    all operations at the speed of one large matmul. Decode: all weights read once at full speed;
    `with_cache` counts the K and V, read beside them. Weights that fit into the processor's caches,
    as a tiny model's, could be read faster.
    """
    (asked,) = result.requests
    context = len(asked.prompt)
    alone = {name: [done[0] for done in rounds] for name, rounds in result.answers.items()}
    first = {name: [answer.seconds[0] for answer in done] for name, done in alone.items()}
    later = {name: [answer.per_token for answer in done] for name, done in alone.items()}
    rows = [_row("prefill", context, context, first), _row("decode", context, 1, later)]
    equal = {name: tokens for name, (_, tokens) in result.agreement(PEER).items()}
    check = {"context": context, "new_tokens": asked.new_tokens, "tokens_equal": equal}
    check["warm_up"] = result.warm_up
    found: dict[str, list[Figures]] = {"rows": rows, "checks": [{**check, "failed": result.failed}]}
    if result.roofline is None:
        return {**found, "floors": [], "rooflines": []}
    bandwidth, peak = result.roofline
    weights = weight_bytes(config, itemsize)
    moved = forward_bytes(config, 1, context, itemsize) / bandwidth
    compute, read = forward_flops(config, context) / peak, weights / bandwidth
    floors = [
        {
            "phase": row["phase"],
            "context": context,
            "seconds": seconds,
            "with_cache": with_cache,
            "weight_bytes": weights,
            "times": {name: took / seconds for name, took in row["seconds"].items()},
        }
        for row, seconds, with_cache in zip(rows, (compute, read), (compute, moved), strict=True)
    ]
    return {
        **found,
        "floors": floors,
        "rooflines": [{"context": context, "bandwidth": bandwidth, "peak_flops": peak}],
    }


def _row(phase: str, context: int, tokens: int, samples: dict[str, list[float]]) -> Figures:
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "phase": phase,
        "context": context,
        "seconds": median,
        "tokens_per_second": {name: tokens / seconds for name, seconds in median.items()},
        "ratio": {name: median[PEER] / seconds for name, seconds in median.items()},
        "samples": samples,
    }


def many_requests(result: Race, peer: str, reference: str) -> Figures:
    """The race of many requests: medians, ratios to the peer, agreement with the reference."""
    median = {name: statistics.median(values) for name, values in result.samples.items()}
    wanted = sum(request.new_tokens for request in result.requests)
    return {
        "num_requests": len(result.requests),
        "prompt_tokens": sum(len(request.prompt) for request in result.requests),
        "wanted_tokens": wanted,
        "seconds": median,
        "wanted_per_second": {name: wanted / seconds for name, seconds in median.items()},
        "ratio": {name: median[peer] / seconds for name, seconds in median.items()},
        "samples": result.samples,
        "reference": reference,
        "agreement": {
            name: agreement._asdict() for name, agreement in result.agreement(reference).items()
        },
        "failed": result.failed,
    }


# -- as text --------------------------------------------------------------------------------------


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A title line and lines of cells: a name, numbers, and at the end what is said beside them."""
    text = []
    for name, *cells, said in [titles, *lines]:
        text.append(f"{name:<26}" + "".join(f"{cell:>10}" for cell in cells) + f"   {said}")
    return "\n".join(line.rstrip() for line in text)


def _speeds(seconds: Mapping[str, float], name: str) -> list[str]:
    """How many times as fast as transformers, and as llama.cpp."""
    peers = (PEER, LLAMA)
    return [f"{seconds[p] / seconds[name]:.2f}×" if p in seconds else "" for p in peers]


def one_request_table(found: dict[str, list[Figures]]) -> str:
    """All about one context: a line per contender, the floors, and what failed."""
    (prefill, decode), (check,), floors = found["rows"], found["checks"], found["floors"]
    titles = [f"×{PEER[:6]}.", f"×{LLAMA[:5]}.", "÷floor"]
    lines = []
    for name in decode["seconds"]:
        over = [f"{floor['times'][name]:.2f}×" for floor in floors] or ["", ""]
        speed, ms = prefill["tokens_per_second"][name], 1000 * decode["seconds"][name]
        cells = [f"{speed:.0f}", *_speeds(prefill["seconds"], name), over[0]]
        cells += [f"{ms:.2f}", *_speeds(decode["seconds"], name), over[1]]
        lines.append([name, *cells, f"{check['tokens_equal'][name]} of {check['new_tokens']}"])
    first = f"context {check['context']}: prefill"
    text = [table([first, "tokens/s", *titles, "decode ms", *titles, "same tokens"], lines)]
    text += [f"{name} could not run: {why}" for name, why in check["failed"].items()]
    for floor, limits in zip(floors[1:], found["rooflines"], strict=True):
        text.append(
            f"this machine: {limits['peak_flops'] / 1e9:.0f} GFLOP/s in a large matmul, "
            f"{limits['bandwidth'] / 1e9:.1f} GB/s; the weights are read in "
            f"{floor['seconds'] * 1000:.3g} ms (with K and V {floor['with_cache'] * 1000:.3g} ms)"
        )
    return "\n".join(text)


def many_requests_table(title: str, found: Figures) -> str:
    """A line per contender: wanted tokens per second, seconds, ratios, how far all agree."""
    seconds, num_requests = found["seconds"], found["num_requests"]
    first = next(iter(seconds))
    lines = []
    for name, took in seconds.items():
        ratio = f"{seconds[first] / took:.2f}×"
        same = found["agreement"][name]
        said = f"{same['requests']} of {num_requests}, {same['tokens']} of {found['wanted_tokens']}"
        lines.append([name, f"{found['wanted_per_second'][name]:.1f}", f"{took:.2f}", ratio, said])
    told = f"same as {found['reference']}: requests, tokens before the first other one"
    text = [table([title, "wanted/s", "seconds", f"×{first[:8]}", told], lines)]
    text += [f"{name} could not run: {why}" for name, why in found["failed"].items()]
    return "\n".join(text)


def memory_tables(memory: Figures, step_costs: Sequence[Figures]) -> str:
    """Pages beside rows, a shared prefix, long contexts, and a step without its forward."""
    ragged, prefix, long = memory["ragged"], memory["prefix"], memory["long_context"]
    shared = f"{prefix['num_requests']} with {memory['shared']:.0%} shared"
    steps = [[name, f"{1000 * s:.1f}", f"{long['ratio'][name]:.2f}×", ""]
             for name, s in long["seconds"].items()]  # fmt: skip
    costs = [[f"{cost['running']} running", f"{cost['step']:.1f}", ""] for cost in step_costs]
    title = f"batch {long['batch']} at {long['context']}"
    return "\n\n".join(
        [
            many_requests_table(f"{ragged['num_requests']} ragged requests", ragged),
            many_requests_table(shared, prefix),
            table([title, "ms", "÷rows", f"one decode step, {long['shape']}"], steps),
            table(["a step without its forward", "µs", "per running request"], costs),
        ]
    )
