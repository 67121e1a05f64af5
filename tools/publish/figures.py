"""Writes the notebooks' pictures into figures/.

Runs the cells of each source and saves what the cells tagged `figure-NAME` show, so that a file in
figures/ is the notebook's own picture and cannot disagree with it.

    python -m tools.publish.figures          all of them, and the readme's moving picture
    python -m tools.publish.figures 05 A3    those of these lessons
"""

import argparse
import ast
import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from tools.publish.build import LESSONS, NOTEBOOKS, left_out, make_notebook, sources, target
from tools.publish.players import show_of
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.png import at_night
from tutorial_engine.viz.drawing.scene import Frame, Scene, Value, plain
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.explorers.moving import moving

FIGURES = NOTEBOOKS.parent / "figures"
TAG = "figure-"
MOVES, MOVING = "pages", "moving"  # the player that the readme shows, and how its files are called
BEGINS = 9  # there the block tables cross; the last step is left out, for its pool is empty
PHONE = (312, 56, 446, 362)  # tables and pool, when they are as near as this leaves them:
LINES, SHORTER = (352, 556), 120  # from where to where lines lead; how much shorter a phone's are
# which the readme shows on dark pages, too
DARK = {"03_places", "05_leak", "06_fact"}


def shown(code: str, scope: dict[str, Any]) -> Any:
    """Run a cell in `scope` and return the value of its last line, as a notebook shows it."""
    tree = ast.parse(TransformerManager().transform_cell(code))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), scope)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)


def pictures(source: Path) -> Iterator[tuple[str, Picture]]:
    """(name, picture) of each tagged cell of a source, with its solutions, in order."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in make_notebook(source, solved=True).cells:
        if cell.cell_type != "code":
            continue
        value = shown(cell.source, scope)
        for tag in cell.metadata.get("tags", []):
            if tag.startswith(TAG):
                picture = value.picture() if isinstance(value, Explorer) else value
                if not isinstance(picture, Picture):
                    raise ValueError(f"the cell tagged {tag!r} in {source.name} shows no picture")
                yield tag.removeprefix(TAG), picture


def moving_pictures(frames: Sequence[Frame]) -> dict[str, str]:
    """The readme's moving picture of these frames: the whole, a phone's, each by day and night.

    The loop begins in the middle of the run, and its end leads to its beginning.
    """
    words, loop = show_of(MOVES).words, [*frames[BEGINS:-1], *frames[:BEGINS]]
    near = [Frame(nearer(frame.scene), frame.caption) for frame in loop]
    whole = {MOVING: moving(loop, words), f"{MOVING}-phone": moving(near, words, box=PHONE)}
    dark = {f"{name}-dark": at_night(svg) for name, svg in whole.items()}
    return {f"{name}.svg": svg for name, svg in (whole | dark).items()}


def nearer(scene: Scene) -> Scene:
    """The same with shorter lines: what stands right of them moves to the left."""
    begin, end = LINES

    def at(x: float) -> float:
        return x - SHORTER * min(max((x - begin) / (end - begin), 0), 1)

    def put(key: str, value: Value) -> Value:
        if key in ("x", "cx"):
            return at(float(value))
        if key == "d":  # a line: its points
            point = r"([\d.]+) ([\d.]+)"
            return re.sub(point, lambda m: f"{plain(at(float(m[1])))} {m[2]}", str(value))
        return value

    moved = copy(scene)
    moved.items = {
        name: replace(item, attributes={k: put(k, v) for k, v in item.attributes.items()})
        for name, item in scene.items.items()
    }
    return moved


def main() -> None:
    """Write figures/NN_NAME.svg and .png for every tagged cell, and the readme's moving picture."""
    codes = [lesson.code for lesson in LESSONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="*", metavar="NN", help=f"of {', '.join(codes)}; or all")
    asked = parser.parse_args().lessons
    if unknown := set(asked) - set(codes):
        parser.error(f"no lesson {sorted(unknown)}: there are {', '.join(codes)}")
    if not asked:
        frames = show_of(MOVES).make(load_model(), load_tokenizer()).runs[0]
        for file, svg in moving_pictures(frames).items():
            (FIGURES / file).write_text(svg, encoding="utf-8")
            print(f"figures/{file}: {show_of(MOVES).words}")
    for lesson in LESSONS:
        if asked and lesson.code not in asked:
            continue
        if why := left_out(lesson):
            print(why)
            continue
        name, source = lesson.notebook, sources()[lesson.notebook]
        here = contextlib.chdir(target(name, solved=True).parent)  # where its neighbours are
        with here, contextlib.redirect_stdout(io.StringIO()):  # the cells print; pictures count
            found = list(pictures(source))
        for title, picture in found:
            name = f"{lesson.code}_{title}"
            picture.save(FIGURES, name)
            if name in DARK:
                (FIGURES / f"{name}-dark.svg").write_text(at_night(picture.svg), encoding="utf-8")
            print(f"figures/{lesson.code}_{title}: {picture.caption}")


if __name__ == "__main__":
    main()
