"""The learner's own copies of the notebooks: `python -m tools.mine`; `tools.lab` makes them, too.

`notebooks/01_attention_rope.ipynb` is copied once, to `notebooks/my_01.ipynb`, and an appendix
within its folder. A copy that is there is never written; git ignores it. Runs no notebook.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

LESSON = re.compile(r"(\d\d|[A-Z]\d)_\w+\.ipynb")
OF = "tutorial_engine_lesson"  # in a copy's metadata: the text that it was made of


def lessons(folder: Path) -> Iterator[tuple[str, Path]]:
    """(code, notebook) of each lesson: "01" and those after it, then the appendices."""
    for path in [*sorted(folder.glob("*.ipynb")), *sorted(folder.glob("appendix/*.ipynb"))]:
        if found := LESSON.fullmatch(path.name):
            yield found[1], path


def text_of(notebook: NotebookNode) -> str:
    """A hash of what its cells say, without their outputs."""
    cells = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(cells.encode()).hexdigest()[:16]


def copy_of(code: str) -> str:
    """The name of a lesson's copy."""
    return f"my_{code}.ipynb"


def make_copies(folder: Path) -> list[str]:
    """Copy each lesson that has no copy yet → sentences about what was made, and what is older.

    A copy that cannot be read is the learner's, too: it stays, and nothing is said about it.
    """
    said, made = [], []
    for code, path in lessons(folder):
        lesson, copy = nbformat.read(path, as_version=4), path.with_name(copy_of(code))
        if not copy.exists():
            lesson.metadata[OF] = text_of(lesson)
            nbformat.write(lesson, copy)
            made.append(copy.name)
            continue
        try:
            of = json.loads(copy.read_text(encoding="utf-8"))["metadata"][OF]
        except (ValueError, KeyError, TypeError):
            continue
        if of != text_of(lesson):
            said.append(
                f"Lesson {code} is newer than your copy {copy.name}, which stays as it is. For the "
                f"new text, rename your copy (for instance to my_old_{code}.ipynb) and run this "
                "again."
            )
    if made:
        said.insert(0, f"Your own copies, which no update touches: {', '.join(made)}.")
    return said


def main() -> None:
    """In the folder that is named, or in notebooks."""
    for sentence in make_copies(Path(sys.argv[1] if sys.argv[1:] else "notebooks")):
        print(sentence)


if __name__ == "__main__":
    main()
