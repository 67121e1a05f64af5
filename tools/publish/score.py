"""A learner's score over all notebooks: `python -m ...learn.score`.

The saved notebooks are the record: verdicts below exercises, answers below questions. Nothing else
is kept, and nothing leaves this machine. Knows cells and their outputs; runs nothing.
"""

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from tools.publish.build import LESSONS, NOTEBOOKS, QUESTION

# what reading any other file raises
FOREIGN = (OSError, ValueError, TypeError, AttributeError, LookupError, nbformat.ValidationError)


class Score(NamedTuple):
    """Of one notebook: exercises that are done, predictions that were made and that came true."""

    notebook: str
    done: int
    exercises: int
    right: int
    made: int
    questions: int


def score(path: Path) -> Score:
    """Read a saved notebook. ValueError, with the file's name, for what is none of ours."""
    try:
        cells = nbformat.read(path, as_version=4).cells
        return _score(path.name, cells)
    except FOREIGN as problem:
        raise ValueError(f"{path}: not a notebook of this course") from problem


def _score(name: str, cells: Sequence[NotebookNode]) -> Score:
    exercises = [i for i, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])]
    verdicts = [_said(cells[i + 1]) for i in exercises]
    found = [(kind, cell) for cell in cells for kind, _ in QUESTION.findall(cell.source)]
    said = [_said(cell).partition("\n")[0] for kind, cell in found if kind == "reveal"]
    right = sum(line.endswith("✔ As you predicted.") for line in said)
    wrong = sum("✘ You predicted: " in line for line in said)
    done = sum(text.startswith("✔") for text in verdicts)
    asked = sum(kind == "ask" for kind, _ in found)
    return Score(name, done, len(exercises), right, right + wrong, asked)


def _said(cell: NotebookNode) -> str:
    """What the first output of a cell says."""
    for output in cell.get("outputs", []):
        return output.get("text") or output.get("data", {}).get("text/plain", "")
    return ""


def scores_of(paths: Iterable[Path]) -> list[Score]:
    """Of these notebooks, and of all below a folder; a file that is none is named and left out.

    Where two files have the same name, as in a folder for each student, the score has the path.
    """
    files = list[Path]()
    for path in paths:
        notebooks = [
            file for file in sorted(path.rglob("*.ipynb")) if ".ipynb_checkpoints" not in file.parts
        ]
        files += notebooks if path.is_dir() else [path]
    names, scores = Counter(file.name for file in files), list[Score]()
    for file in files:
        try:
            found = score(file)
        except ValueError as problem:
            print(f"{problem}, left out", file=sys.stderr)
        else:
            scores.append(found._replace(notebook=str(file)) if names[file.name] > 1 else found)
    return scores


def best(folder: Path = NOTEBOOKS) -> list[Score]:
    """The best score of each lesson: copies of a notebook (`my_01.ipynb`) count beside it."""
    found = []
    for lesson in LESSONS:
        home = (folder / lesson.notebook).parent
        scores = scores_of(sorted(home.glob(f"*{lesson.code}*.ipynb")))
        if scores:
            found.append(max(scores, key=lambda score: (score.done, score.right, score.made)))
    return found


def table(scores: Sequence[Score]) -> str:
    """A line for each notebook, and the sum."""
    total = Score("all", *(sum(values) for values in zip(*(s[1:] for s in scores), strict=True)))
    wide = max(len(score.notebook) for score in scores) + 2
    lines = [f"{'notebook':<{wide}}exercises   predictions right, of those made (of all)"]
    for score in [*scores, total]:
        exercises = f"{score.done} of {score.exercises}"
        predictions = f"{score.right} of {score.made} (of {score.questions})"
        lines.append(f"{score.notebook:<{wide}}{exercises:<12}{predictions}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of these files, or of the notebooks here; --csv writes it to a file, too."""
    parser = argparse.ArgumentParser(description="Score of saved notebooks; nothing is sent.")
    parser.add_argument(
        "files", nargs="*", type=Path, help="notebooks, or folders of them (none: this clone's)"
    )
    parser.add_argument("--csv", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    scores = scores_of(options.files) if options.files else best()
    if not scores:
        sys.exit(f"there is no notebook in {', '.join(map(str, options.files)) or NOTEBOOKS}")
    print(table(scores))
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Score._fields, *scores])
        if not options.files:
            print(f"wrote {options.csv}; to hand it in, give the file your family name")


if __name__ == "__main__":
    main()
