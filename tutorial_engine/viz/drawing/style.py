"""One look for all pictures: colours, fonts, deterministic files.

Colours are Okabe and Ito's, which survive colour blindness; magnitudes are cividis. No picture
relies on colour alone.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tutorial_engine.viz.drawing.letters import FONT, wrapped
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.png import small_png
from tutorial_engine.viz.tokens import written

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED = "#56B4E9", "#D55E00"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY)
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))  # so that grey-scale still reads
INK, QUIET, RULE, PAPER = "#1b2733", "#5b6770", "#d3d9de", "#ffffff"
MAGNITUDE = "cividis"
DPI = 100
CAPTION = 9.5  # points: the letters of a plot's caption
PLAIN = FuncFormatter(lambda value, _: f"{value:g}" if value >= 0.01 else f"{value:.0e}")

RC = {
    "font.family": FONT,
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a prompt with two dollar signs is text, not a formula
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "svg.hashsalt": "tutorial_engine",
    "svg.fonttype": "path",
    "figure.facecolor": PAPER,
}


@contextmanager
def house_style() -> Iterator[None]:
    """matplotlib with our settings inside the block, and the caller's own afterwards."""
    with matplotlib.rc_context(dict[Any, Any](RC)):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, off screen, laid out without overlaps."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert engine is not None, "layout=constrained gives one"
    engine.set(w_pad=0.09, h_pad=0.09)  # type: ignore[call-arg]
    return figure


def finish(figure: Figure, caption: str) -> Picture:
    """Write the caption under the figure and turn it into a Picture, deterministically."""
    width, caption = figure.get_size_inches()[0], written(caption)
    lines = wrapped(caption, 0.97 * DPI * width, CAPTION * DPI / 72)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION, color=INK)
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(svg.getvalue().decode(), small_png(png.getvalue()), caption)
