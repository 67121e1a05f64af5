"""Introduced in notebook 02. What was measured, as a text table and as JSON.

Knows the rows and the machine; measures nothing and draws nothing (viz.bench_plots does).
"""

import platform
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from tutorial_engine.bench.measure import PEER, Measurement, Row
from tutorial_engine.bench.memory_cost import MemoryCost
from tutorial_engine.bench.roofline import (
    Roofline,
    decode_floor,
    forward_bytes,
    forward_flops,
    weight_bytes,
)
from tutorial_engine.bench.scheduler_cost import StepCost
from tutorial_engine.bench.serving import Serving
from tutorial_engine.lab.doctor import installed_version, processor_name
from tutorial_engine.model.config import ModelConfig

OURS = "ours"
LLAMA = "llama.cpp"


class Floor(NamedTuple):
    """What no engine beats on this machine in one phase, in seconds, and how near each came.

    Prefill: all operations at the speed of one large matmul. Decode: all weights read once at full
    speed; `with_cache` counts the K and V, read beside them. `times` are ratios to `seconds`.
    Weights that fit into the processor's caches, as a tiny model's, could be read faster.
    """

    phase: str
    context: int
    seconds: float
    with_cache: float
    weight_bytes: int
    times: dict[str, float]


def floors(config: ModelConfig, itemsize: int, measured: Measurement) -> list[Floor]:
    """The floors of both phases, from the roofline of the same rounds; none without a roofline."""
    limits, weights = measured.roofline, weight_bytes(config, itemsize)
    if limits is None:
        return []
    context = measured.decode.context
    compute = forward_flops(config, context) / limits.peak_flops
    read = decode_floor(weights, limits.bandwidth)
    moved = decode_floor(forward_bytes(config, 1, context, itemsize), limits.bandwidth)
    return [
        _floor(measured.prefill, compute, compute, weights),
        _floor(measured.decode, read, moved, weights),
    ]


def _floor(row: Row, seconds: float, with_cache: float, weights: int) -> Floor:
    times = {name: took / seconds for name, took in row.seconds.items()}
    return Floor(row.phase, row.context, seconds, with_cache, weights, times)


def machine(dtype: str) -> dict[str, Any]:
    """What a figure means nothing without: processor, threads, versions."""
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "llama-cpp-python": installed_version("llama-cpp-python"),
    }


def table(config: ModelConfig, itemsize: int, measured: Measurement) -> str:
    """All about one context: a line per contender, the floors, and what failed."""
    check, names = measured.check, list(measured.decode.seconds)
    rows, found = (measured.prefill, measured.decode), floors(config, itemsize, measured)
    titles = [
        f"×{PEER[:6]}.",
        f"×{LLAMA[:5]}." if LLAMA in names else "",
        "÷floor" if found else "",
    ]
    first = f"context {check.context}: prefill"
    text = [_line(first, ["tokens/s", *titles], ["decode ms", *titles], "same tokens, |Δ logit|")]
    for name in names:
        prefill, decode = (_ratios(row, floor, name) for row, floor in zip_longest(rows, found))
        speeds = (
            f"{rows[0].tokens_per_second[name]:.0f}",
            f"{rows[1].seconds[name] * 1000:.2f}",
        )
        same = f"{check.tokens_equal[name]} of {check.new_tokens}, "
        same += f"{check.logit_difference[name]:.0e}"
        text.append(_line(name, [speeds[0], *prefill], [speeds[1], *decode], same))
    text += [f"{name} could not run: {why}" for name, why in check.failed.items()]
    return "\n".join(text + _floor_lines(found, measured.roofline))


def _line(name: str, prefill: Sequence[str], decode: Sequence[str], same: str) -> str:
    halves = ("".join(f"{cell:>9}" for cell in half) for half in (prefill, decode))
    return f"{name:<23}" + "  ".join(halves) + f"   {same}"


def _ratios(row: Row, floor: Floor | None, name: str) -> list[str]:
    """How many times the peer's speed, llama.cpp's speed, the floor's time."""
    mine = row.seconds[name]
    return [
        f"{row.ratio[name]:.2f}×",
        f"{row.seconds[LLAMA] / mine:.2f}×" if LLAMA in row.seconds else "",
        f"{floor.times[name]:.2f}×" if floor else "",
    ]


def _floor_lines(found: Sequence[Floor], limits: Roofline | None) -> list[str]:
    if limits is None:
        return []
    prefill, decode = found
    return [
        f"floor of prefill: {prefill.context / prefill.seconds:.0f} tokens/s, a large matmul's "
        f"{limits.peak_flops / 1e9:.0f} GFLOP/s",
        f"floor of decode: {decode.seconds * 1000:.3g} ms, {decode.weight_bytes / 1e9:.3g} GB of "
        f"weights at {limits.bandwidth / 1e9:.1f} GB/s (with K and V "
        f"{decode.with_cache * 1000:.3g} ms)",
    ]


def figures(
    config: ModelConfig, itemsize: int, measured: Sequence[Measurement]
) -> dict[str, list[dict[str, Any]]]:
    """Everything that was measured, as plain lists and dicts."""
    return {
        "rows": [row._asdict() for m in measured for row in (m.prefill, m.decode)],
        "checks": [m.check._asdict() for m in measured],
        "floors": [floor._asdict() for m in measured for floor in floors(config, itemsize, m)],
        "rooflines": [
            {"context": m.decode.context, **m.roofline._asdict()} for m in measured if m.roofline
        ],
    }


def serving_table(serving: Serving) -> str:
    """A line per server: wanted tokens per second, seconds, ratios, and how far all agree."""
    seconds, names = serving.seconds, list(serving.seconds)
    first = f"{serving.num_requests} ragged requests"
    titles = ["wanted/s", "seconds", f"×{PEER[:6]}.", f"×{LLAMA[:5]}." if LLAMA in names else ""]
    same = f"same as {serving.reference}: requests, tokens before the first other one"
    text = [_line(first, titles, [], same)]
    for name in names:
        cells = [
            f"{serving.wanted_per_second[name]:.1f}",
            f"{seconds[name]:.2f}",
            f"{serving.ratio[name]:.2f}×",
            f"{seconds[LLAMA] / seconds[name]:.2f}×" if LLAMA in names else "",
        ]
        requests, tokens = serving.agreement[name]
        same = f"{requests} of {serving.num_requests}, {tokens} of {serving.wanted_tokens}"
        text.append(_line(name, cells, [], same))
    text += [f"{name} could not run: {why}" for name, why in serving.failed.items()]
    return "\n".join(text)


def cost_table(costs: Sequence[StepCost]) -> str:
    """What a step costs beside the model, a line per number of running requests."""
    titles = ["schedule", "batch", "update", "together", "step"]
    text = [_line("µs per running request", titles, [], "")]
    for cost in costs:
        cells = [cost.schedule, cost.batch, cost.update, cost.bookkeeping, cost.step]
        text.append(_line(f"{cost.running} running", [f"{cell:.1f}" for cell in cells], [], ""))
    return "\n".join(line.rstrip() for line in text)


def serving_figures(
    serving: Serving, notes: dict[str, str], costs: Sequence[StepCost]
) -> dict[str, Any]:
    """The ragged race and the scheduler's cost, as plain lists and dicts."""
    agreement = {name: own._asdict() for name, own in serving.agreement.items()}
    return {
        "serving": {**serving._asdict(), "agreement": agreement, "contenders": notes},
        "step_costs": [cost._asdict() for cost in costs],
    }


def memory_table(cost: MemoryCost) -> str:
    """Pages beside rows, a shared prefix, long contexts, and what a memory alone costs."""
    ragged, prefix, long = cost.ragged, cost.prefix, cost.long_context
    text = [
        _line(f"{ragged.num_requests} ragged requests", ["wanted/s", "seconds", "÷rows"], [], "")
    ]
    text += _race_lines(ragged, {name: 1 / ratio for name, ratio in ragged.ratio.items()})
    shared = f"{prefix.num_requests} with {cost.shared:.0%} shared"
    text += ["", _line(shared, ["wanted/s", "seconds", "×speed"], [], "")]
    text += _race_lines(prefix, prefix.ratio)
    first = f"batch {long.batch} at {long.context}"
    about = f"one decode step, {cost.long_shape}"
    text += ["", _line(first, ["ms", "÷rows", "÷pages"], [], about)]
    for name, seconds in long.seconds.items():
        ratios = (seconds / long.seconds[other] for other in ("rows", "pages"))
        cells = [f"{seconds * 1000:.1f}", *(f"{ratio:.2f}×" for ratio in ratios)]
        copied = f"{long.gathered[name] / 1e6:.3g} MB of K and V copied"
        text.append(_line(name, cells, [], copied))
    titles = ["allocate", "commit", "free", "together"]
    text += ["", _line("µs per running request", titles, [], "")]
    for own in cost.allocation:
        cells = [f"{cell:.1f}" for cell in (own.allocate, own.commit, own.free, own.together)]
        text.append(_line(own.memory, cells, [], ""))
    return "\n".join(line.rstrip() for line in text)


def _race_lines(serving: Serving, ratio: dict[str, float]) -> list[str]:
    """A line for each of two memories in the same race."""
    lines = []
    for name, seconds in serving.seconds.items():
        cells = [f"{serving.wanted_per_second[name]:.1f}", f"{seconds:.2f}", f"{ratio[name]:.2f}×"]
        requests, tokens = serving.agreement[name]
        same = f"same answers: {requests} of {serving.num_requests} requests, {tokens} tokens"
        lines.append(_line(name, cells, [], same))
    return lines


def memory_figures(cost: MemoryCost) -> dict[str, Any]:
    """The memories' account, as plain lists and dicts."""
    races = {
        name: {**race._asdict(), "agreement": {k: v._asdict() for k, v in race.agreement.items()}}
        for name, race in (("ragged", cost.ragged), ("prefix", cost.prefix))
    }
    parts = {
        "shared": cost.shared,
        "long_context": {**cost.long_context._asdict(), "shape": cost.long_shape},
        "allocation": [own._asdict() for own in cost.allocation],
    }
    return {"memory": {**races, **parts}}
