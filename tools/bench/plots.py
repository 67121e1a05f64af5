"""The benchmark's figures as bars: bench.json in, Picture out.

As a command: `python -m tools.bench.plots bench.json OUT.png` (or OUT.svg). Knows
what `tools.bench --json` writes; measures nothing.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import BarContainer

from tools.bench.record import short
from tutorial_engine.viz.drawing.charts import label_bars, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, PAPER, SERIES, finish, house_style
from tutorial_engine.viz.words import listed

WIDTH = 9.0  # inches: 900 pixels, as wide as a README shows
HATCHES = ("////", "....", "xxxx", "\\\\\\\\", "oo", "++")  # ours has none
PHASES = {
    "decode": "Decode: milliseconds per token, lower is better",
    "prefill": "Prefill: tokens per second, higher is better",
}

Figures = Mapping[str, Any]  # what the benchmark writes
Rows = Sequence[Mapping[str, Any]]  # of one phase, a row per context


@house_style()
def bench_picture(figures: Figures) -> Picture:
    """Bars per context, one per contender, for decode and prefill; the floors as lines.

    A third panel has a bar per server, where the ragged workload ran. ValueError for figures
    without rows.
    """
    if not figures.get("rows"):
        raise ValueError("the figures have no rows: write them with tools.bench --json")
    names = [name for row in figures["rows"] for name in row["seconds"]]
    names = _last(figures["settings"]["ours"], names)
    serving = figures.get("serving")
    count = 3 if serving else 2
    figure, axes = panels(WIDTH, 9.4 if serving else 6.6, rows=count)
    for ax, phase in zip(axes, PHASES, strict=False):
        _bars(ax, figures, phase, names)
    if serving:
        _servers(axes[-1], serving, names)
    for ax in axes:
        ax.margins(y=0.14)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9.5)
    return finish(figure, _caption(figures))


def _last(ours: str, names: Iterable[str]) -> list[str]:
    """Each name once, in their order, ours last."""
    return [name for name in dict.fromkeys(names) if name != ours] + [ours]


def _value(row: Mapping[str, Any], name: str) -> float:
    """What is drawn: ms per token of a decode, tokens per second of a prefill."""
    if row["phase"] == "decode":
        return row["seconds"][name] * 1000
    return row["context"] / row["seconds"][name]


def _of(figures: Figures, phase: str, what: str = "rows") -> Rows:
    """The rows, or the floors, of one phase."""
    return [row for row in figures.get(what, ()) if row["phase"] == phase]


def _bars(ax: Axes, figures: Figures, phase: str, names: Sequence[str]) -> None:
    """A group of bars per context, and a line across each: this machine's limit."""
    rows = _of(figures, phase)
    width, small = 0.86 / len(names), 9 if len(names) * len(rows) <= 15 else 7
    for i, name in enumerate(names):
        there = [(group, row) for group, row in enumerate(rows) if name in row["seconds"]]
        left = [group - 0.43 + (i + 0.5) * width for group, _ in there]
        heights = [_value(row, name) for _, row in there]
        bars = ax.bar(left, heights, 0.92 * width, label=name, **_look(name, names))
        _say_heights(ax, bars, small, name == names[-1])
    for group, floor in enumerate(_of(figures, phase, "floors")):
        seconds = floor["seconds"]
        y = seconds * 1000 if phase == "decode" else floor["context"] / seconds
        label = "_" if group else "this machine's limit"  # one entry in the legend
        ax.plot((group - 0.46, group + 0.46), (y, y), "--", color=INK, linewidth=2, label=label)
    ax.set_title(PHASES[phase])
    ax.set_xticks(range(len(rows)), [f"context {row['context']}" for row in rows])


def _servers(ax: Axes, serving: Mapping[str, Any], names: Sequence[str]) -> None:
    """A bar per server, ours last, named below it: wanted tokens per second."""
    ours, wanted = names[-1], serving["wanted_tokens"]
    speeds = {name: wanted / seconds for name, seconds in serving["seconds"].items()}
    order, known = _last(ours, speeds), _last(ours, [*names, *speeds])
    for x, name in enumerate(order):
        bars = ax.bar([x], [speeds[name]], 0.6, **_look(name, known))
        _say_heights(ax, bars, 9, name == ours)
    title = f"{serving['num_requests']} ragged requests at once: wanted tokens per second"
    ax.set_title(f"{title}, higher is better")
    ax.set_xticks(range(len(order)), [name.replace(" ", "\n", 1) for name in order])


def _look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """How a contender's bars look: ours, the last name, solid, the others each in its own way."""
    if name == names[-1]:
        return {"color": SERIES[0], "edgecolor": SERIES[0]}
    i = names.index(name)
    colour = SERIES[1:][i % (len(SERIES) - 1)]
    return {"color": PAPER, "edgecolor": colour, "hatch": HATCHES[i % len(HATCHES)]}


def _say_heights(ax: Axes, bars: BarContainer, size: float, bold: bool) -> None:
    # a paper background, where the line of the limit runs through
    paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
    weight = "bold" if bold else "normal"
    heights = [short(bar.get_height()) for bar in bars]
    label_bars(ax, bars, heights, padding=2, fontsize=size, bbox=paper, fontweight=weight)


def _caption(figures: Figures) -> str:
    """One sentence, from the same numbers; the tables of the run have the others."""
    machine, settings, decode = figures["machine"], figures["settings"], _of(figures, "decode")
    took = listed(short(_value(row, settings["ours"])) for row in decode)
    return (
        f"{settings['shape']} in {machine['dtype']} on {machine['threads']} threads of "
        f"{machine['processor']}, medians of {settings['rounds']} rounds: after a prompt of "
        f"{listed(str(row['context']) for row in decode)} tokens each new one takes us {took} ms."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """bench.json and a .png or .svg to write; 1, with a word, when that does not work."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.plots", description="draw bench.json"
    )
    parser.add_argument("figures", type=Path, help="what tools.bench --json wrote")
    parser.add_argument("out", type=Path, help="the picture, .png or .svg")
    args = parser.parse_args(argv)
    if args.out.suffix not in (".png", ".svg"):
        parser.error(f"the picture must end in .png or .svg, got {str(args.out)!r}")
    try:
        picture = bench_picture(json.loads(args.figures.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        print(f"bench_plots: {error}", file=sys.stderr)
        return 1
    is_svg = args.out.suffix == ".svg"
    args.out.write_bytes(picture.svg.encode() if is_svg else picture.png)
    print(f"{args.out}: {picture.caption}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
