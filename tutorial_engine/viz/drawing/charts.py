"""What the plots share: panels, lines, bars, hatches, token cells.

Everything here is matplotlib in our style; knows no engine. A plot function is decorated with
`house_style()` and ends with `finish(figure, caption)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from tutorial_engine.viz.drawing.style import DASHES, INK, PAPER, RULE, SERIES, new_figure
from tutorial_engine.viz.tokens import cut_label
from tutorial_engine.viz.words import si

MARKS = ("o", "s", "^", "D", "v", "P")
HATCH: dict[str, Any] = {"facecolor": PAPER, "hatch": "////"}  # idle, repeated, refused
MIDDLE: dict[str, Any] = {"ha": "center", "va": "center"}
ROUND = FuncFormatter(lambda value, _: f"{value:,.10g}")
SI = FuncFormatter(lambda value, _: si(value))
LYING = 5  # letters of a label that fit across a cell


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of that many inches, and its axes row by row."""
    figure = new_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **more).ravel())


def line_look(i: int) -> dict[str, Any]:
    """Colour, dashes and mark of the i-th line: no two of the first six share any of them."""
    return {"color": SERIES[i % 6], "linestyle": DASHES[i % 6], "marker": MARKS[i % 6]}


def log_marks(ax: Axes, low: float, high: float, words: Callable[[float, int], str]) -> None:
    """Write the powers of ten on a logarithmic y axis; where these are too few, 2 and 5 as well."""
    few = high / low < 100

    def minor(value: float, place: int) -> str:
        return words(value, place) if few and f"{value:e}"[0] in "25" else ""

    ax.set(yscale="log", ylim=(low, high))
    ax.yaxis.set_major_formatter(FuncFormatter(words))
    ax.yaxis.set_minor_formatter(FuncFormatter(minor))


def dial_axis(ax: Axes, values: Sequence[float], largest: int, label: str) -> None:
    """An x axis with the values named, at most so many; logarithmic if they grow by factors."""
    values = sorted(set(values))
    if values[0] > 0 and values[-1] / values[0] >= 8 and len(values) > 2:
        ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    thin = values[::-1][:: -(-len(values) // largest)]
    ax.set_xticks(thin, [f"{value:g}" for value in thin])
    ax.set_xlabel(label + ", logarithmic" * (ax.get_xscale() == "log"))


def rows_of_bars(ax: Axes, names: Sequence[str], largest: float) -> None:
    """Make room for a horizontal bar per name, the first on top, none longer than `largest`."""
    ax.set_yticks(range(len(names)), names, color=INK)
    ax.set(xlim=(0, largest), ylim=(len(names) - 0.4, -0.6))
    ax.tick_params(left=False)


def no_axis(ax: Axes, *sides: str) -> None:
    """Take away the lines at these sides, and the marks on them."""
    ax.spines[list(sides)].set_visible(False)
    if "bottom" in sides:
        ax.set_xticks([])
    if "left" in sides:
        ax.tick_params(left=False)


def label_bars(ax: Axes, bars: BarContainer, words: Sequence[str], **look: Any) -> None:
    """Words at the end of each bar."""
    ax.bar_label(bars, words, **{"padding": 4, "fontsize": 9.5, **look})


def cell_height(labels: Sequence[str], letters: int = LYING) -> float:
    """How high token cells must be, as a multiple of their width: long labels stand upright.

    So many `letters` fit across a cell.
    """
    longest = max(len(cut_label(label)) for label in labels)
    return 0.6 if longest <= letters else 0.22 * longest


def token_cell(ax: Axes, x: float, y: float, tall: float, label: str, **look: Any) -> None:
    """One token as a cell of width 1 with its label, on paper where the cell is hatched."""
    ax.add_patch(Rectangle((x + 0.05, y), 0.9, tall, **look))
    paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5} if "hatch" in look else None
    turn = 0 if tall <= 0.6 else 90
    middle = (x + 0.5, y + tall / 2)
    ax.text(*middle, cut_label(label), rotation=turn, fontsize=9, bbox=paper, **MIDDLE)


def lines_across(ax: Axes) -> None:
    """Thin horizontal lines at the marks of the y axis."""
    ax.grid(axis="y", color=RULE, linewidth=0.8)
