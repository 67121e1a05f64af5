"""The record of speed: `python -m tools.bench.record` writes docs/bench/README.md.

From the figures that lie there as JSON, with a verdict for each goal. A goal is a ratio of two
things that were measured in the same run, or microseconds of bookkeeping. Measures nothing.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.engine.replay import Size
from tutorial_engine.lab import on_gpu
from tutorial_engine.lab.roofline import weight_bytes
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model.config import ModelConfig

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "bench"
PAGE = "README.md"
LLAMA = "llama.cpp"
Figures = Mapping[str, Any]  # what `python -m tools.bench --json` writes
# shape -> phase -> at least so many times the speed of (transformers, llama.cpp)
SPEED: dict[str, dict[str, tuple[float, float | None]]] = {
    "tiny": {"decode": (1.6, None), "ragged": (1.6, None)},
    "qwen3-0.6b": {"prefill": (0.95, None), "decode": (1.0, 0.95), "ragged": (2.0, None)},
}
ON_GPU: dict[str, tuple[float, float | None]] = {"decode": (8.0, None), "ragged": (3.5, None)}
PAGES_RAGGED, PAGES_LONG = 1.10, 1.25  # at most, times the seconds on rows
STEP = 20.0  # at most, µs per running request of a step without its forward
HEAD = """# Measured speed

Written by `python -m tools.bench.record` from the files beside it. Each section is one run of the
bench on one machine; all contenders of a run were timed in turns in the same process. A figure is
the median of the rounds, with the fastest and the slowest round in brackets. Machines differ, and
one machine differs within minutes: compare within a section, not between sections.
Beside vLLM: [vllm.md](vllm.md). On a GPU: [gpu.md](gpu.md).
"""
GPU_HEAD = f"""# On a GPU

Written by `python -m tools.bench.record` from the figures in `tutorial_engine/lab/on_gpu.py`.
Measured on one {on_gpu.CARD} with {on_gpu.BANDWIDTH / 1e12:.2f} TB/s (a copy):
{on_gpu.MEASURED_WITH}.

**What was measured is not this version.** Rows "earlier engine" are an earlier version, before its
attention became one call a layer. Rows "prototype" are a sketch of what
`model/batched_attention.py` and `engine/replay.py` do now. These two have not run on a GPU yet:
`make bench DEVICE=cuda SHAPE=qwen3-0.6b DTYPE=bfloat16` measures them. Rows that are read in place
are a part of the prototype that this version does not have.
"""


class Verdict(NamedTuple):
    """A goal, what a run measured, and the bound: at least that much, or at most."""

    what: str
    measured: float
    bound: float
    at_least: bool
    unit: str = "×"

    @property
    def is_met(self) -> bool:
        """On the right side of the bound?"""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        mark, sign = "✔" if self.is_met else "✘", "≥" if self.at_least else "≤"
        goal = f"goal {sign} {self.bound:g}{self.unit}"
        return f"{mark} {self.what}: {self.measured:.2f}{self.unit} ({goal})"


def verdicts(figures: Figures) -> list[Verdict]:
    """Each goal that this run says something about. A contender that is missing has none."""
    settings, serving = figures["settings"], figures.get("serving")
    goals, ours = SPEED.get(settings["shape"], {}), settings["ours"]
    if settings.get("device", "cpu") != "cpu":
        goals = ON_GPU
    races = [(f"{row['phase']} at {row['context']}", row["phase"], row) for row in figures["rows"]]
    if serving:
        races.append((f"{serving['num_requests']} ragged requests", "ragged", serving))
    found = []
    for what, phase, race in races:
        peers = zip((settings["peer"], LLAMA), goals.get(phase, (None, None)), strict=True)
        for peer, least in peers:
            if least is not None and peer in race["seconds"]:
                ratio = race["seconds"][peer] / race["seconds"][ours]
                found.append(Verdict(f"{what}, {peer}", ratio, least, True))
    if "memory" in figures:
        ragged, long = figures["memory"]["ragged"], figures["memory"]["long_context"]
        contexts = f"{long['batch']} contexts of {long['context']}"
        for what, race, most in (
            ("ragged requests", ragged, PAGES_RAGGED),
            (contexts, long, PAGES_LONG),
        ):
            ratio = race["seconds"]["pages"] / race["seconds"]["rows"]
            found.append(Verdict(f"{what} on pages, time on rows", ratio, most, False))
    for cost in figures.get("step_costs", []):
        what = f"a step without its forward, per request of {cost['running']}"
        found.append(Verdict(what, cost["step"], STEP, False, " µs"))
    return found


def page(files: Mapping[str, Figures]) -> str:
    """The whole page, a section for each file of figures. Plain Markdown."""
    return "\n".join([HEAD, *("\n".join(_section(*each)) for each in files.items())])


def gpu_page() -> str:
    """The page of what was measured on a GPU. Plain Markdown."""
    step, bandwidth = on_gpu.ONE_BY_ONE, on_gpu.BANDWIDTH
    assert step.launches is not None and step.busy is not None, "it was looked at"
    shape = ModelConfig.from_dict({**QWEN3_06B, "model_type": "qwen3"})
    floor = weight_bytes(shape, itemsize=2) / bandwidth
    least, most = on_gpu.WHOLE_ENGINE_MS
    copied = Size.of(on_gpu.NUM_SERVED, 513).num_slots
    written = copied * KVCacheSpec.from_model(shape, torch.bfloat16).bytes_per_token
    lines = [
        GPU_HEAD,
        f"One step of the earlier version: {step.launches} launches in "
        f"{1000 * step.seconds:.1f} ms, in which the GPU works for {1000 * step.busy:.1f} ms. "
        f"Reading all weights once takes {1000 * floor:.2f} ms.",
        "",
        f"| one request, after a prompt of {', '.join(map(str, on_gpu.CONTEXTS))} | ms a token |",
        "|---|---|",
        *(f"| {what} | {' / '.join(map(str, ms))} |" for what, ms in on_gpu.DECODE_MS.items()),
        "",
        f"Through the whole engine of the prototype a token took {least} to {most} ms. "
        "At which context the one of 3.2 ms was measured is not noted.",
        "",
        f"| {on_gpu.NUM_SERVED} ragged requests, wanted tokens/s | first run | second run |",
        "|---|---|---|",
        *(f"| {one.what} | {one.first:,.0f} | {one.second:,.0f} |" for one in on_gpu.SERVING),
        "",
        *(
            f"“{one.what}” is the best of several trials; the lowest were {one.least[0]:,} and "
            f"{one.least[1]:,}."
            for one in on_gpu.SERVING
            if one.least is not None
        ),
        "",
        "Computed, not measured: a recorded step of this version copies keys and values of as many "
        "slots as it has rows times its longest context, both rounded up to a power of two. With "
        f"{on_gpu.NUM_SERVED} requests, one of which passes 512 tokens, these are {copied:,} slots:"
        f" {written / 1e9:.1f} GB to write, which is {1000 * written / bandwidth:.1f} ms at full "
        "bandwidth.",
        "",
    ]
    return "\n".join(lines)


def _section(name: str, figures: Figures) -> Iterator[str]:
    machine, settings, serving = figures["machine"], figures["settings"], figures.get("serving")
    yield f"## {settings['shape']}, {machine['dtype']}, {machine['processor']}\n"
    versions = ("python", "torch", "transformers", "llama-cpp-python")
    told = ", ".join(f"{key} {machine[key] or 'not installed'}" for key in versions)
    yield f"- **Machine:** {machine['processor']}, {machine['threads']} threads; {told}."
    for roofline in figures["rooflines"][:1]:
        yield (
            f"- **Its limits in this run:** memory {roofline['bandwidth'] / 1e9:.0f} GB/s, a large "
            f"matmul {roofline['peak_flops'] / 1e9:.0f} GFLOP/s."
        )
    command = f"python -m tools.bench --shape {settings['shape']} --dtype {machine['dtype']}"
    if settings.get("device", "cpu") != "cpu":
        command += f" --device {settings['device']}"
    command += f" --lengths {' '.join(map(str, settings['lengths']))} --rounds {settings['rounds']}"
    if serving:
        command += f" --requests {serving['num_requests']}"
        command += f" --serving-rounds {settings['serving_rounds']}"
    yield f"- **Command:** `{command} --json docs/bench/{name}`\n"
    for row in figures["rows"]:
        title = f"{row['phase']} at {row['context']}"
        yield from _table([title, "ms"], row, 1000)
    memory = figures.get("memory", {})
    for race in filter(None, (serving, memory.get("ragged"), memory.get("prefix"))):
        title = f"{race['num_requests']} requests"
        yield from _table([title, "seconds", "wanted tokens/s"], race, 1, race["wanted_per_second"])
    if memory:
        long = memory["long_context"]
        title = f"decode, {long['batch']} contexts of {long['context']}, {long['shape']}"
        yield from _table([title, "ms"], long, 1000)
    yield "Goals:\n"
    yield from (f"- {verdict}" for verdict in verdicts(figures))
    yield ""


def _table(
    titles: list[str], race: Figures, scale: float, more: Mapping[str, float] | None = None
) -> Iterator[str]:
    """A line for each contender: its median and spread, and its speed beside the first one's."""
    first = next(iter(race["seconds"]))
    lines: Iterable[Sequence[str]] = (
        [
            who,
            _spread(race["samples"][who], scale),
            *([f"{more[who]:.0f}"] if more else []),
            f"{race['seconds'][first] / seconds:.2f}",
        ]
        for who, seconds in race["seconds"].items()
    )
    titles = [*titles, f"× {first}"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    yield from (f"| {' | '.join(line)} |" for line in lines)
    yield ""


def _spread(samples: Sequence[float], scale: float) -> str:
    """Median, fastest and slowest round."""
    numbers = (min(samples), statistics.median(samples), max(samples))
    low, mid, high = (f"{scale * value:.3g}" for value in numbers)
    return f"{mid} ({low} to {high})"


def stored() -> dict[str, Any]:
    """File name → figures, of the JSON files beside the page, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


if __name__ == "__main__":
    (FOLDER / PAGE).write_text(page(stored()), encoding="utf-8")
    (FOLDER / "gpu.md").write_text(gpu_page(), encoding="utf-8")
