"""Makes the notebooks: `python -m tools.publish.build`, or `... 02` for one of them.

From each readable source in notebooks/src come two executed notebooks: the one with solutions and
the learner's, with the exercises open and the answers to questions folded. Knows cells and files;
knows no lesson.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from tqdm import tqdm

from tutorial_engine.lab.real import NOT_HERE, needs_real, where_it_is
from tutorial_engine.learn.predict import REVEAL
from tutorial_engine.viz.drawing.picture import WIDGET_VIEW
from tutorial_engine.viz.tokens import escape

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION\n?", re.M | re.S)
MARKS = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION\n?", re.M)
MEASURED = "nbval-ignore-output"  # the tag of cells whose output depends on the machine
ELSEWHERE = "<p>Measured once, when this notebook was built. Your run has other numbers.</p>"
REPOSITORY = "https://github.com/OWNER/tutorial_engine"
INSTALL = f"""# One thread: with a model this small, more of them only wait for each other.
# On Google Colab this cell also installs the package.
import os
import subprocess
import sys
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if "google.colab" in sys.modules and find_spec("tutorial_engine") is None:
    package = "tutorial-engine[colab] @ git+{REPOSITORY}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)"""
# the last line of that cell in a copy with solutions: nobody has to choose there
SOLVED = f'os.environ["{REVEAL}"] = "1"  # this copy shows the answers to its questions'
QUESTION = re.compile(r"predictions\.(ask|reveal)\(\s*\"([\w-]+)\"")


class Lesson(NamedTuple):
    """A notebook by its source's name in notebooks/src: "02_kv_cache", "appendix/A1_two_ranks"."""

    notebook: str

    @property
    def code(self) -> str:
        """ "01" for `01_attention_rope`, "A1" for `appendix/A1_two_ranks`."""
        return self.notebook.rpartition("/")[2][:2]


def lessons() -> tuple[Lesson, ...]:
    """The lessons that have a source, in the order of reading; the appendices come last."""
    folder = NOTEBOOKS / "src"
    found = [*sorted(folder.glob("[0-9][0-9]_*.py")), *sorted(folder.glob("*/[A-Z][0-9]_*.py"))]
    return tuple(Lesson(str(path.relative_to(folder).with_suffix(""))) for path in found)


LESSONS = lessons()


def left_out(lesson: Lesson) -> str:
    """Why a lesson cannot be run here: it needs a real model that is not here. "" if it can."""
    if where_it_is().is_dir() or not needs_real(sources()[lesson.notebook]):
        return ""
    return f"{lesson.notebook} is left as it is: {NOT_HERE}"


def sources() -> dict[str, Path]:
    """Lesson name → its source."""
    return {lesson.notebook: NOTEBOOKS / "src" / f"{lesson.notebook}.py" for lesson in LESSONS}


def target(name: str, solved: bool) -> Path:
    """Where the built notebook of a lesson lies; that of an appendix in its folder there."""
    return NOTEBOOKS / ("solutions" if solved else "") / f"{name}.ipynb"


def make_notebook(source: Path, solved: bool) -> NotebookNode:
    """The notebook of a source, not yet run. Unsolved, a marked solution becomes one `...`.

    Its first code cell, folded in JupyterLab, sets the threads, and installs the package on Colab.
    The solved one lets it show the answers, too.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:03d}"  # jupytext draws ids at random; ours never differ
        if solved:
            cell.source = MARKS.sub("", cell.source + "\n").rstrip("\n")
            cell.source = cell.source.replace("../docs/", "../../docs/")  # one folder deeper
        else:
            cell.source = SOLUTION.sub(r"\1...\n", cell.source + "\n").rstrip("\n")
    first = f"{INSTALL}\n{SOLVED}" if solved else INSTALL
    install = nbformat.v4.new_code_cell(first, id="install")
    install.metadata.jupyter = {"source_hidden": True}
    notebook.cells.insert(1, install)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def execute(notebook: NotebookNode, folder: Path = NOTEBOOKS) -> None:
    """Run it top to bottom in a fresh kernel, in place; a cell that raises stops the build.

    It runs in the folder where it will lie: notebook 02 reads its neighbour 01.

    In the learner's copy nobody has chosen an answer, and no choice is read from a file.
    """
    NotebookClient(
        notebook,
        timeout=600,  # a cell takes seconds; a small and busy machine may need minutes
        kernel_name="python3",
        store_widget_state=False,
        coalesce_streams=True,  # prints that came in two pieces are one output
        resources={"metadata": {"path": str(folder)}},
    ).execute(env=os.environ | {REVEAL: "0"})


def answers(solved: NotebookNode, shown: NotebookNode) -> dict[str, NotebookNode]:
    """Name of a question → its answer, folded, as an output: what the solved notebook's cell says.

    A reader who runs nothing opens it below the question. It goes when the question is run. A
    picture that `shown`, the learner's notebook, shows anyway is left out.
    """
    found = {}
    seen = {_picture(output) for cell in shown.cells for output in cell.get("outputs", [])}
    for cell in solved.cells:
        for kind, name in QUESTION.findall(cell.source):
            if kind == "reveal":
                hidden = [
                    output for output in cell.outputs if _picture(output) not in seen - {None}
                ]
                inside = "".join(map(_as_html, hidden))
                if MEASURED in cell.metadata.get("tags", []):
                    inside += ELSEWHERE
                folded = f"<details><summary>Answer</summary>{inside}</details>"
                data = {"text/plain": "The answer is folded.", "text/html": folded}
                found[name] = nbformat.v4.new_output("display_data", data)
    return found


def _picture(output: NotebookNode) -> str | None:
    return output.get("data", {}).get("image/png")


def _as_html(output: NotebookNode) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    text = escape(data["text/plain"].rstrip())
    if "image/png" not in data:
        return f"<pre>{text}</pre>"
    image = data["image/png"].strip()
    look = 'style="max-width: 100%"'
    if "keep" in output.metadata.get("image/png", {}):
        look += ' class="te-shaded"'  # a dark JupyterLab turns the others (labextension/)
    return f'<img src="data:image/png;base64,{image}" alt="{text}" {look}>'


def fold_answers(notebook: NotebookNode, solved: NotebookNode) -> None:
    """Put the answers below the questions of the learner's notebook, in place.

    ValueError for a question that the solved notebook does not answer.
    """
    found = answers(solved, notebook)
    for cell in notebook.cells:
        for kind, name in QUESTION.findall(cell.source):
            if kind == "ask":
                if name not in found:
                    raise ValueError(
                        f"the solved notebook has no answer to {name!r}; build it first"
                    )
                cell.outputs.append(found[name])


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
    """Make, run, tidy and write one notebook; returns its path. Build the solved one first."""
    notebook, path = make_notebook(source, solved), target(name, solved)
    path.parent.mkdir(parents=True, exist_ok=True)
    execute(notebook, path.parent)
    tidy(notebook)
    if not solved:
        fold_answers(notebook, nbformat.read(target(name, solved=True), as_version=4))
    nbformat.write(notebook, path)
    return path


def main(codes: Sequence[str] = ()) -> None:
    """Build the lessons "01", "A1" ..., or all."""
    known = {lesson.code: lesson.notebook for lesson in LESSONS}
    if unknown := set(codes) - known.keys():
        sys.exit(f"there is no lesson {', '.join(unknown)}; there are {', '.join(known)}")
    jobs = []
    for lesson in LESSONS:
        if lesson.code not in (codes or known):
            continue
        if why := left_out(lesson):
            print(why)
            continue
        name = lesson.notebook
        jobs += [(name, sources()[name], solved) for solved in (True, False)]
    for name, source, solved in tqdm(jobs, desc="notebooks"):
        build(name, source, solved)


if __name__ == "__main__":
    main(sys.argv[1:])
