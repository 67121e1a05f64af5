"""The record of speed: `python -m tools.bench.page`.

Writes docs/bench/README.md from the figures that lie there as JSON. Knows files and figures;
measures nothing.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.goals import Figures, verdicts

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "bench"
PAGE = "README.md"
HEAD = """# Measured speed

Written by `python -m tools.bench.page` from the files beside it. Each section is one run
of the bench on one machine; all contenders of a run were timed in turns in the same process. A
figure is the median of the rounds, with the fastest and the slowest round in brackets. Machines
differ, and one machine differs within minutes: compare within a section, not between sections.
"""


def page(files: Mapping[str, Figures]) -> str:
    """The whole page, a section for each file of figures. Plain Markdown."""
    parts = [HEAD]
    for name, figures in files.items():
        parts += ["\n".join(_section(name, figures))]
    return "\n".join(parts)


def _section(name: str, figures: Figures) -> Iterator[str]:
    machine, settings = figures["machine"], figures["settings"]
    yield f"## {settings['shape']}, {machine['dtype']}, {machine['processor']}\n"
    versions = ("python", "torch", "transformers", "llama-cpp-python")
    told = ", ".join(f"{key} {machine[key] or 'not installed'}" for key in versions)
    yield f"- **Machine:** {machine['processor']}, {machine['threads']} threads; {told}."
    for roofline in figures["rooflines"][:1]:
        yield (
            f"- **Its limits in this run:** memory {roofline['bandwidth'] / 1e9:.0f} GB/s, a large "
            f"matmul {roofline['peak_flops'] / 1e9:.0f} GFLOP/s."
        )
    yield f"- **Command:** `{_command(name, figures)}`\n"
    yield from _table(
        ["what", "context", "ms", f"× {settings['peer']}"],
        (
            [
                f"{row['phase']}, {who}",
                str(row["context"]),
                _spread(row["samples"][who], 1000),
                f"{row['ratio'][who]:.2f}",
            ]
            for row in figures["rows"]
            for who in row["seconds"]
        ),
    )
    memory = figures.get("memory", {})
    for race in (figures.get("serving"), memory.get("ragged"), memory.get("prefix")):
        if race:
            first = next(iter(race["seconds"]))
            yield from _table(
                [f"{race['num_requests']} requests", "wanted tokens/s", "seconds", f"× {first}"],
                (
                    [
                        who,
                        f"{race['wanted_per_second'][who]:.0f}",
                        _spread(race["samples"][who], 1),
                        f"{race['seconds'][first] / seconds:.2f}",
                    ]
                    for who, seconds in race["seconds"].items()
                ),
            )
    if memory:
        long = memory["long_context"]
        title = f"decode, {long['batch']} contexts of {long['context']}, {long['shape']}"
        yield from _table(
            [title, "ms", "× rows"],
            (
                [who, _spread(long["samples"][who], 1000), f"{1 / long['ratio'][who]:.2f}"]
                for who in long["seconds"]
            ),
        )
    yield "Goals:\n"
    yield from (f"- {verdict}" for verdict in verdicts(figures))
    yield ""


def _command(name: str, figures: Figures) -> str:
    settings, dtype = figures["settings"], figures["machine"]["dtype"]
    lengths = " ".join(map(str, settings["lengths"]))
    command = f"python -m tools.bench --shape {settings['shape']} --dtype {dtype}"
    command += f" --lengths {lengths} --rounds {settings['rounds']}"
    if "serving" in figures:
        command += f" --requests {figures['serving']['num_requests']}"
        command += f" --serving-rounds {settings['serving_rounds']}"
    return f"{command} --json docs/bench/{name}"


def _spread(samples: Sequence[float], scale: float) -> str:
    """Median, fastest and slowest round."""
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    low, mid, high = (f"{scale * value:.3g}" for value in (ordered[0], middle, ordered[-1]))
    return f"{mid} ({low} to {high})"


def _table(titles: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def stored(folder: Path = FOLDER) -> dict[str, Any]:
    """File name → figures, of the JSON files of a folder, by name. ValueError when it has none."""
    files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not files:
        raise ValueError(f"{folder} has no figures: python -m tools.bench --json FILE")
    return files


if __name__ == "__main__":
    try:
        (FOLDER / PAGE).write_text(page(stored()))
    except ValueError as error:
        sys.exit(f"bench.page: {error}")
