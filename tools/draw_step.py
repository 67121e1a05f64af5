"""Draws docs/decode_step.png, and puts the outline of a decode step into docs/architecture.md.

    python -m tools.draw_step

Both come from tools/trace_step.py: one `LLMEngine.step` of two requests on pages, as it ran. The
picture has a lane for each room; a box is a stay in one file, with the functions that are entered
there for the first time; time runs down.
"""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from tools.trace_step import Hop, Outline, decode_step

DOCS = Path(__file__).parent.parent / "docs"
LANES = ("engine", "cache", "model", "sampling")
COLOURS = {"engine": "#56B4E9", "cache": "#E69F00", "model": "#009E73", "sampling": "#CC79A7"}
LINE, GAP, HEAD = 0.19, 0.10, 0.24  # inches: a function, between boxes, a file's name
LANE = 2.75


def draw(outline: Outline, file: Path) -> None:
    """Boxes from top to bottom, an arrow from each to the next."""
    stays = [(name, list(hops)) for name, hops in groupby(outline.hops, lambda hop: hop.file)]
    height = 0.75 + sum(HEAD + LINE * len(hops) + GAP for _, hops in stays)
    figure = plt.figure(figsize=(LANE * len(LANES) + 0.3, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, LANE * len(LANES) + 0.3), ylim=(height, 0))
    axes.axis("off")
    counts = f"{len(outline.files)} files, {len(outline.calls)} functions"
    title = f"One decode step of two requests on pages, as it ran: {counts}"
    axes.text(0.15, 0.22, title, fontsize=12, weight="bold", va="center")
    for i, room in enumerate(LANES):
        x = 0.15 + LANE * i
        axes.axvspan(x, x + LANE - 0.1, 0, 1 - 0.4 / height, color=COLOURS[room], alpha=0.08)
        axes.text(x + 0.08, 0.54, f"{room}/", fontsize=11, weight="bold", va="center")
    y, before = 0.75, None
    for name, hops in stays:
        y, before = _box(axes, name, hops, y, before)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)  # a third as large


def _box(
    axes: plt.Axes, name: str, hops: list[Hop], y: float, before: tuple[float, float] | None
) -> tuple[float, tuple[float, float]]:
    """One stay in a file → where the next begins, and where its arrow comes from."""
    room, module = name.split("/")
    x, tall = 0.23 + LANE * LANES.index(room), HEAD + LINE * len(hops)
    style = "round,pad=0,rounding_size=0.05"
    look: dict[str, Any] = {"facecolor": "white", "edgecolor": COLOURS[room], "linewidth": 1.6}
    axes.add_patch(FancyBboxPatch((x, y), LANE - 0.26, tall - 0.02, boxstyle=style, **look))
    axes.text(x + 0.07, y + HEAD / 2, module, fontsize=9, weight="bold", va="center")
    for i, hop in enumerate(hops):
        at = y + HEAD + LINE * (i + 0.4)
        axes.text(x + 0.15, at, hop.function, fontsize=8, va="center", family="monospace")
    entry = (x + 0.9, y)
    if before is not None:
        arrow = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.0, "shrinkA": 0}
        axes.annotate("", entry, before, arrowprops=arrow)
    return y + tall + GAP, (entry[0], y + tall - 0.02)


def insert(outline: Outline, page: Path) -> None:
    """The outline, in the page's one block of code that is marked for it."""
    text = page.read_text(encoding="utf-8")
    block = f"<!-- tools/draw_step.py -->\n```\n{outline.text()}\n```\n"
    text, found = re.subn(
        r"<!-- tools/draw_step\.py -->\n```\n.*?```\n", lambda _: block, text, flags=re.DOTALL
    )
    assert found == 1, f"{page} has {found} places for the outline"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    """Draw, and insert."""
    with torch.inference_mode():
        outline = decode_step()
    draw(outline, DOCS / "decode_step.png")
    insert(outline, DOCS / "architecture.md")


if __name__ == "__main__":
    main()
