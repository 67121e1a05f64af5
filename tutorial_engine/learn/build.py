"""Introduced in notebook 01. Makes the notebooks: `python -m tutorial_engine.learn.build`.

From each readable source in notebooks/src come two executed notebooks: the learner's, with the
exercises open, and the one with solutions. Knows cells and files; knows no lesson.
"""

import re
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from tqdm import tqdm

from tutorial_engine.syllabus import LESSONS
from tutorial_engine.viz.picture import WIDGET_VIEW

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION\n?", re.M | re.S)
MARKS = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION\n?", re.M)
REVEALS = "predictions.reveal("  # in the cell that answers a question


def sources() -> dict[str, Path]:
    """Lesson name → its source. ValueError when a lesson of the syllabus has none."""
    found = {lesson.notebook: NOTEBOOKS / "src" / f"{lesson.notebook}.py" for lesson in LESSONS}
    missing = [str(path) for path in found.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"no notebook sources at {missing}: run this in a clone of the repository, installed "
            "with `pip install -e`"
        )
    return found


def target(name: str, solved: bool) -> Path:
    """Where the built notebook of a lesson lies."""
    return NOTEBOOKS / ("solutions" if solved else "") / f"{name}.ipynb"


def make_notebook(source: Path, solved: bool) -> NotebookNode:
    """The notebook of a source, not yet run.

    Unsolved, a marked solution becomes one `...`, and the outputs of a cell that reveals the answer
    to a prediction are folded away until it is run.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:03d}"  # jupytext draws ids at random; ours never differ
        if solved:
            cell.source = MARKS.sub("", cell.source + "\n").rstrip("\n")
        else:
            cell.source = SOLUTION.sub(r"\1...\n", cell.source + "\n").rstrip("\n")
            if REVEALS in cell.source:
                cell.metadata["jupyter"] = {"outputs_hidden": True}
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def execute(notebook: NotebookNode) -> None:
    """Run it top to bottom in a fresh kernel, in place; a cell that raises stops the build."""
    NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        store_widget_state=False,
        coalesce_streams=True,  # prints that came in two pieces are one output
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()


def tidy(notebook: NotebookNode) -> None:
    """Drop what differs from run to run and means nothing: times, counts, live widget ids.

    What an explorer leaves behind is its picture and caption, which show without a kernel.
    """
    count = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET_VIEW, None)
            if "execution_count" in output:
                output.execution_count = count
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})


def build(name: str, source: Path, solved: bool) -> Path:
    """Make, run, tidy and write one notebook; returns its path."""
    notebook = make_notebook(source, solved)
    execute(notebook)
    tidy(notebook)
    path = target(name, solved)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def main() -> None:
    """Build all of them."""
    jobs = [(name, src, solved) for name, src in sources().items() for solved in (False, True)]
    for name, source, solved in tqdm(jobs, desc="notebooks"):
        build(name, source, solved)


if __name__ == "__main__":
    main()
