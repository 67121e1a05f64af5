"""Introduced in notebook 02. The benchmark's figures as bars: bench.json in, Picture out.

As a command: `python -m tutorial_engine.viz.bench_plots bench.json OUT.png` (or OUT.svg). Knows
what `tutorial_engine.bench --json` writes; measures nothing.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.style import INK, PAPER, SERIES, finish, house_style, new_figure

WIDTH = 9.0  # inches: 900 pixels, as wide as a README shows
HATCHES = ("////", "....", "xxxx", "\\\\\\\\", "oo", "++")  # ours has none
PHASES = {
    "decode": "Decode: milliseconds per token, lower is better",
    "prefill": "Prefill: tokens per second, higher is better",
}

Figures = Mapping[str, Any]  # what the benchmark writes


def bench_picture(figures: Figures) -> Picture:
    """Bars per context, one per contender, for decode and prefill; the floors as lines.

    A third panel has a bar per server, where the ragged workload ran. ValueError for figures
    without rows.
    """
    names = _names(figures)
    serving = figures.get("serving")
    with house_style():
        figure = new_figure(WIDTH, 9.4 if serving else 6.6)
        axes = figure.subplots(3 if serving else 2, 1)
        for ax, phase in zip(axes, PHASES, strict=False):
            _bars(ax, figures, phase, names)
        if serving:
            _servers(axes[-1], serving, names)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9.5)
        return finish(figure, _caption(figures))


def _names(figures: Figures) -> list[str]:
    """Everyone who finished in any context, in the benchmark's order, ours last."""
    if not figures.get("rows"):
        raise ValueError("the figures have no rows: write them with tutorial_engine.bench --json")
    names = dict.fromkeys(name for row in figures["rows"] for name in row["seconds"])
    ours = figures["settings"]["ours"]
    return [name for name in names if name != ours] + [ours]


def _value(row: Mapping[str, Any], name: str) -> float:
    """What is drawn: ms per token of a decode, tokens per second of a prefill."""
    if row["phase"] == "decode":
        return row["seconds"][name] * 1000
    return row["tokens_per_second"][name]


def _bars(ax: Axes, figures: Figures, phase: str, names: Sequence[str]) -> None:
    rows = [row for row in figures["rows"] if row["phase"] == phase]
    width = 0.86 / len(names)
    for i, name in enumerate(names):
        there = [(group, row) for group, row in enumerate(rows) if name in row["seconds"]]
        left = [group - 0.43 + (i + 0.5) * width for group, _ in there]
        heights = [_value(row, name) for _, row in there]
        bars = ax.bar(left, heights, 0.92 * width, label=name, **_look(name, names))
        small = 9 if len(names) * len(rows) <= 15 else 7
        _say_heights(ax, bars, small, name == names[-1])
    _floors(ax, figures, phase)
    ax.set_title(PHASES[phase])
    ax.set_xticks(range(len(rows)), [f"context {row['context']}" for row in rows])
    ax.margins(y=0.14)


def _look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """How a contender's bars look: ours, the last name, solid, the others each in its own way."""
    if name == names[-1]:
        return {"color": SERIES[0], "edgecolor": SERIES[0]}
    i = names.index(name)
    colour = SERIES[1:][i % (len(SERIES) - 1)]
    return {"color": PAPER, "edgecolor": colour, "hatch": HATCHES[i % len(HATCHES)]}


def _say_heights(ax: Axes, bars: BarContainer, size: float, bold: bool) -> None:
    heights = [_short(bar.get_height()) for bar in bars]
    for text in ax.bar_label(bars, heights, padding=2, fontsize=size):
        text.set_fontweight("bold" if bold else "normal")
        # a paper background, where the line of the limit runs through
        text.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.8})


def _servers(ax: Axes, serving: Mapping[str, Any], names: Sequence[str]) -> None:
    """A bar per server, ours last, named below it: wanted tokens per second."""
    speeds = serving["wanted_per_second"]
    ours = names[-1]
    order = [name for name in speeds if name != ours] + [ours]
    known = [*names[:-1], *(name for name in order if name not in names), ours]
    for x, name in enumerate(order):
        bars = ax.bar([x], [speeds[name]], 0.6, **_look(name, known))
        _say_heights(ax, bars, 9, name == ours)
    ax.set_title(
        f"{serving['num_requests']} ragged requests at once: wanted tokens per second, higher is "
        "better"
    )
    ax.set_xticks(range(len(order)), [name.replace(" ", "\n", 1) for name in order])
    ax.margins(y=0.14)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _floors(ax: Axes, figures: Figures, phase: str) -> None:
    """A line across each context's bars: this machine's limit."""
    floors = [floor for floor in figures.get("floors", ()) if floor["phase"] == phase]
    for group, floor in enumerate(floors):
        seconds = floor["seconds"]
        y = seconds * 1000 if phase == "decode" else floor["context"] / seconds
        label = "_" if group else "this machine's limit"  # one entry in the legend
        ends = (group - 0.46, group + 0.46)
        ax.plot(ends, (y, y), color=INK, linewidth=2, linestyle="--", label=label)


def _caption(figures: Figures) -> str:
    """One sentence, from the same numbers."""
    machine, settings = figures["machine"], figures["settings"]
    ours = settings["ours"]
    decode, prefill = (
        [row for row in figures["rows"] if row["phase"] == phase] for phase in PHASES
    )
    contexts = _list([str(row["context"]) for row in decode])
    times = [f["times"][ours] for f in figures.get("floors", ()) if f["phase"] == "decode"]
    floor = f", {_list([f'{t:.2f}' for t in times])}× the limit set by memory" if times else ""
    return (
        f"{settings['shape']} in {machine['dtype']} on {machine['threads']} threads of "
        f"{machine['processor']}, medians of {settings['rounds']} rounds: after a prompt of "
        f"{contexts} tokens each new one takes us {_list(_values(decode, ours))} ms"
        f"{_against(decode, settings)}{floor}; the prompt itself runs at "
        f"{_list(_values(prefill, ours))} tokens/s{_against(prefill, settings)}"
        f"{_many(figures)}."
    )


def _many(figures: Figures) -> str:
    """The ragged workload in words; "" where it did not run."""
    serving, settings = figures.get("serving"), figures["settings"]
    if not serving:
        return ""
    speeds, ours = serving["wanted_per_second"], settings["ours"]
    told = f"; {serving['num_requests']} ragged requests at once get {_short(speeds[ours])} "
    told += f"wanted tokens/s (medians of {settings['serving_rounds']} rounds)"
    for other in (settings["peer"], "llama.cpp"):
        if other in speeds:
            told += f", {speeds[ours] / speeds[other]:.2f}× as many as from {other}"
    return told


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return [_short(_value(row, name)) for row in rows]


def _list(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _against(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """`, 3.50 and 3.20× as fast as transformers`, and as llama.cpp, where it ran everywhere."""
    told = ""
    for other in (settings["peer"], "llama.cpp"):
        if all(other in row["seconds"] for row in rows):
            ratios = [row["seconds"][other] / row["seconds"][settings["ours"]] for row in rows]
            told += f", {_list([f'{r:.2f}' for r in ratios])}× as fast as {other}"
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """bench.json and a .png or .svg to write; 1, with a word, when that does not work."""
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_engine.viz.bench_plots", description="draw bench.json"
    )
    parser.add_argument("figures", type=Path, help="what tutorial_engine.bench --json wrote")
    parser.add_argument("out", type=Path, help="the picture, .png or .svg")
    args = parser.parse_args(argv)
    if args.out.suffix not in (".png", ".svg"):
        parser.error(f"the picture must end in .png or .svg, got {str(args.out)!r}")
    try:
        picture = bench_picture(json.loads(args.figures.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        print(f"bench_plots: {error}", file=sys.stderr)
        return 1
    if args.out.suffix == ".svg":
        args.out.write_text(picture.svg, encoding="utf-8")
    else:
        args.out.write_bytes(picture.png)
    print(f"{args.out}: {picture.caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
