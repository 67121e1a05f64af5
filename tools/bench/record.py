"""Figures as Markdown: what the bench prints in the end, and its pages.

`python -m tools.bench.record` writes docs/bench/README.md from the figures that lie there as JSON,
with a verdict for each goal. A goal is a ratio of two things that were measured in the same run, or
microseconds of bookkeeping. Measures nothing.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.bench.race import LLAMA
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.engine.replay import Size
from tutorial_engine.lab import on_gpu
from tutorial_engine.lab.roofline import weight_bytes
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model.config import ModelConfig

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "bench"
PAGE = "README.md"
Figures = Mapping[str, Any]  # what `python -m tools.bench --json` writes
# shape -> phase -> at least so many times the speed of (transformers, llama.cpp)
SPEED: dict[str, dict[str, tuple[float, float | None]]] = {
    "tiny": {"decode": (1.6, None), "ragged": (1.6, None)},
    "smollm2": {"decode": (1.5, None), "ragged": (1.6, None)},
    "qwen3-0.6b": {"prefill": (0.95, None), "decode": (1.0, 0.95), "ragged": (2.0, None)},
}
ON_GPU: dict[str, tuple[float, float | None]] = {"decode": (8.0, None), "ragged": (3.5, None)}
PAGES_RAGGED, PAGES_LONG = 1.10, 1.25  # at most, times the seconds on rows
STEP = 20.0  # at most, µs per running request of a step without its forward
HEAD = """# Measured speed

Written by `python -m tools.bench.record` from the files beside it. Each section is one run of the
bench on one machine; all contenders of a run were timed in turns in the same process. A figure is
the median of the rounds, with the least and the most in brackets. Machines differ, and one machine
differs within minutes: compare within a section, not between sections.
Beside vLLM: [vllm.md](vllm.md). On a GPU: [gpu.md](gpu.md).

- **tokens/s:** of many requests, the tokens that were asked for; padding does not count.
- **× transformers:** how many times as fast as transformers. The other columns with × read alike.
- **÷ limit:** its time divided by the least that the machine needs: for a prefill all operations at
  the speed of a large matmul, for a decode all weights read once.
- **same tokens:** how many are those of transformers, before the first other one.
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
        return f"{mark} {self.what}: {self.measured:#.3g}{self.unit} ({goal})"


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
    parts = ("\n".join(section(one, f"docs/bench/{name}")) for name, one in files.items())
    return "\n".join([HEAD, *parts])


def section(figures: Figures, file: str = "") -> Iterator[str]:
    """A run, as the bench prints it in the end and as the page has it: lines of Markdown.

    `file` is where its figures are, for the command that measures them anew.
    """
    machine, settings, serving = figures["machine"], figures["settings"], figures.get("serving")
    yield f"## {settings['shape']}, {machine['dtype']}, {machine['processor']}\n"
    versions = ("python", "torch", "transformers", "llama-cpp-python")
    told = ", ".join(f"{key} {machine[key] or 'not installed'}" for key in versions)
    yield f"- **Machine:** {machine['processor']}, {machine['threads']} threads; {told}."
    options = {key: value for key, value in settings.items() if key not in ("peer", "ours")}
    options |= {"dtype": machine["dtype"], "requests": serving["num_requests"] if serving else 0}
    options |= {"json": file} if file else {}
    command = "python -m tools.bench"
    for key, value in options.items():
        words = value if isinstance(value, list) else [value]
        command += f" --{key.replace('_', '-')} {' '.join(map(str, words))}"
    yield f"- **Command:** `{command}`\n"
    yield from _notes("One request", figures["contenders"])
    for context in dict.fromkeys(row["context"] for row in figures["rows"]):
        yield from _one_request(figures, context)
    if serving:
        yield from _notes("Many requests", serving["contenders"])
        yield from many(f"{serving['num_requests']} ragged requests", serving)
    if memory := figures.get("memory"):
        ragged, prefix, long = (memory[name] for name in ("ragged", "prefix", "long_context"))
        yield from many(f"{ragged['num_requests']} ragged requests", ragged)
        share = f"{prefix['num_requests']} requests, {memory['shared']:.0%} of each prompt shared"
        yield from many(share, prefix)
        yield f"A decode step of {long['shape']}:\n"
        yield from many(f"{long['batch']} contexts of {long['context']}", long, ["ms"])
    yield "Goals:\n"
    yield from (f"- {verdict}" for verdict in verdicts(figures))
    yield ""


def _notes(title: str, notes: Mapping[str, str]) -> Iterator[str]:
    yield f"{title}:\n"
    yield from (f"- {name}: {note}" for name, note in notes.items())
    yield ""


def _one_request(figures: Figures, context: int) -> Iterator[str]:
    """All about one prompt: its prefill, its decode, the machine's limits in the same rounds."""
    rows, floors, (check,), (limits,), steps = (
        [one for one in figures.get(key, []) if one["context"] == context]
        for key in ("rows", "floors", "checks", "rooflines", "gpu_steps")
    )
    same = {name: f"{n} of {check['new_tokens']}" for name, n in check["tokens_equal"].items()}
    for row, floor in zip(rows, floors, strict=True):
        units = ["ms", "tokens/s"] if row["phase"] == "prefill" else ["ms"]
        more = {"÷ limit": {n: f"{s / floor['seconds']:.2f}" for n, s in row["seconds"].items()}}
        more["same tokens"] = same
        yield from table(f"{row['phase']} at {context}", row, units, more)
    yield from _failed(check)
    yield (
        f"Limits in these rounds: {limits['peak_flops'] / 1e9:.0f} GFLOP/s in a large matmul, "
        f"memory {limits['bandwidth'] / 1e9:.0f} GB/s; all weights are read in "
        f"{short(1000 * floors[1]['seconds'])} ms, with K and V in "
        f"{short(1000 * floors[1]['with_cache'])} ms.\n"
    )
    for name, step in ((name, step) for one in steps for name, step in one["of"].items()):
        busy, seconds = step["busy"], step["seconds"]
        yield (
            f"- {name}: {step['launches']:.0f} launches a token; the GPU works {1000 * busy:.2f} "
            f"of {1000 * seconds:.2f} ms and waits {1 - busy / seconds:.0%}; warm-up "
            f"{check['warm_up'][name]:.1f} s"
        )
    yield from [""] * len(steps)


def many(
    title: str, race: Figures, units: Sequence[str] = ("seconds", "tokens/s")
) -> Iterator[str]:
    """The table of a race of many requests, and who could not run."""
    more = {}
    if "first_run" in race:
        first = race["first_run"].items()
        more["first run, tokens/s"] = {n: short(race["wanted_tokens"] / s) for n, s in first}
    if "agreement" in race:
        more[f"same tokens as {race['reference']}"] = {
            name: f"{same['tokens']} of {race['wanted_tokens']} "
            f"({same['requests']} of {race['num_requests']} requests)"
            for name, same in race["agreement"].items()
        }
    yield from table(title, race, units, more)
    yield from _failed(race)


def _failed(race: Figures) -> Iterator[str]:
    failed = race.get("failed", {})
    yield from (f"- {name} could not run: {why}" for name, why in failed.items())
    yield from [""] * bool(failed)


def table(
    title: str, race: Figures, units: Sequence[str], more: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """A line for each contender: medians, its speed beside the first one's and llama.cpp's, more.

    Plain Markdown, its columns as wide as their cells, so that it can be read in a terminal too.
    """
    seconds, samples = race["seconds"], race["samples"]
    tokens = race.get("wanted_tokens", race.get("context"))
    scale = {"ms": lambda s: 1000 * s, "seconds": lambda s: s, "tokens/s": lambda s: tokens / s}
    columns = [[title, *seconds]]
    columns += [[unit, *(_spread(map(scale[unit], samples[n])) for n in seconds)] for unit in units]
    peers = dict.fromkeys([next(iter(seconds)), *({LLAMA} & seconds.keys())])
    for peer in peers:
        columns.append([f"× {peer}", *(f"{seconds[peer] / s:.2f}" for s in seconds.values())])
    columns += [[head, *(cells[name] for name in seconds)] for head, cells in more.items()]
    widths = [max(map(len, column)) for column in columns]
    lines = [*zip(*columns, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    for line in lines:
        yield f"| {' | '.join(map(str.ljust, line, widths))} |"
    yield ""


def _spread(values: Iterable[float]) -> str:
    """The median, the least and the most."""
    numbers = [*values]
    low, mid, high = (
        short(value) for value in (min(numbers), statistics.median(numbers), max(numbers))
    )
    return f"{mid} ({low}–{high})"


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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


def stored() -> dict[str, Any]:
    """File name → figures, of the JSON files beside the page, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


if __name__ == "__main__":
    (FOLDER / PAGE).write_text(page(stored()), encoding="utf-8")
    (FOLDER / "gpu.md").write_text(gpu_page(), encoding="utf-8")
