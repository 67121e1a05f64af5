"""A notebook that needs the real model, run where that is not here: what it showed stands.

Each cell says in one line what to do, and shows again what the notebook's file has below it. Knows
IPython's cells and the files of notebooks; knows no lesson.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from tutorial_engine.lab.real import NOT_HERE, where_it_is
from tutorial_engine.learn.parts.earlier import own_file
from tutorial_engine.viz.drawing.picture import WIDGET_VIEW

LINE = (
    "This cell needs the real model: `make real` brings it once (93 MB). Then restart the kernel."
)
SHOWN = ("stream", "display_data", "execute_result")  # an error is not shown again
BRINGS = re.compile(r"^\s*(!|%pip\b)|\breal_model\(", re.M)  # a learner's cell that brings it, runs
Output = dict[str, Any]  # as a notebook's file has it


def the_real_model(notebook: str) -> Path | None:
    """Its folder. Where it is not here: None, and from here on no cell of this kernel is run.

    Each says LINE instead, and shows its stored outputs again: those of the notebook, a file in
    this folder, or of the learner's own copy beside it. ValueError where there are no cells.
    """
    try:
        folder = where_it_is()
    except ValueError:  # the package that knows the place is not installed
        pass
    else:
        if folder.is_dir():
            return folder
    shell: Any = get_ipython()
    if not hasattr(shell, "get_parent"):  # plain Python, or a terminal
        raise ValueError(NOT_HERE)
    path = str(Path(notebook).resolve())
    _leave_out_later_cells(shell, path)
    _leave_out_the_rest(shell)
    say_again(path)
    return None


def _leave_out_later_cells(shell: Any, path: str) -> None:
    """Each is replaced before IPython reads it, so that not even its syntax matters."""
    module = f"from {__name__} import say_again\n"

    def instead(lines: list[str]) -> list[str]:
        is_silent = shell.get_parent().get("content", {}).get("silent")  # asked by an editor
        if is_silent or BRINGS.search("".join(lines)):
            return lines
        return [module, f"say_again({path!r})\n"]

    shell.input_transformers_cleanup.insert(0, instead)


def _leave_out_the_rest(shell: Any) -> None:
    """Of the cell that is running: IPython runs it statement by statement."""

    async def nothing(*_: Any, **__: Any) -> bool:
        return False  # no error

    def end() -> None:
        del shell.run_code  # the class has the real one
        shell.events.unregister("post_execute", end)

    shell.run_code = nothing
    shell.events.register("post_execute", end)


def say_again(path: str) -> None:
    """What a cell does without the model: LINE, then its outputs in the notebook at `path`."""
    shell: Any = get_ipython()
    request = shell.get_parent()
    cell_id = request.get("metadata", {}).get("cellId")  # JupyterLab sends it
    print(LINE)
    for output in stored_outputs(Path(path), cell_id, request["content"]["code"]):
        if output["output_type"] == "stream":
            file = sys.stderr if output["name"] == "stderr" else sys.stdout
            print(output["text"], end="", file=file)
        else:
            display(output["data"], metadata=output.get("metadata", {}), raw=True)


def stored_outputs(path: Path, cell_id: str | None, source: str) -> list[Output]:
    """What a cell shows in the learner's own copy, else in the notebook; found by id, or source.

    A copy whose outputs were cleared, or that cannot be read, damages nothing.
    """
    for file in (own_file(path, path.name[:2]), path):
        try:
            cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
            same_id = [cell for cell in cells if cell_id and cell.get("id") == cell_id]
            same = [cell for cell in cells if "".join(cell["source"]).strip() == source.strip()]
            outputs = (same_id + same)[0].get("outputs", [])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # no such file, no notebook, or no such cell in it
        if found := [*_to_show(outputs)]:
            return found
    return []


def _to_show(outputs: Iterable[Output]) -> Iterable[Output]:
    """Without errors, live widgets, and the LINE of an earlier run that was saved."""
    for output in outputs:
        if output["output_type"] not in SHOWN:
            continue
        if output["output_type"] == "stream":
            if text := "".join(output["text"]).removeprefix(f"{LINE}\n"):
                yield output | {"text": text}
            continue
        kinds = output["data"].items()
        data = {k: "".join(v) if isinstance(v, list) else v for k, v in kinds if k != WIDGET_VIEW}
        yield output | {"data": data}
