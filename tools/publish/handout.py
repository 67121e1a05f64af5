"""What a teacher hands out: `python -m tools.publish.handout`.

handout/students.zip is all that `make lab` needs, without a solution; handout/solutions.zip has the
solved notebooks and the answer key. Knows files and cells; knows no lesson.
"""

import html
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from tools.publish.answers import PAGE
from tools.publish.build import NOTEBOOKS, SOLUTION, sources, target

ROOT = NOTEBOOKS.parent
OUT = ROOT / "handout"
# what a learner needs beside the notebooks; tests and notebooks/src have the answers in them
FILES = ("Makefile", "LICENSE", "pyproject.toml", "constraints.txt", "environment.yml")
CHAT = "examples/chat.py"  # what `make chat` runs
FOLDERS = ("tutorial_engine", "tools", "figures", "docs")
TEACHERS = ROOT / "docs" / "teaching"  # plans with answers, not for students
README, CAPSTONE = TEACHERS / "students.md", TEACHERS / "capstone.md"  # but for these two
MOST = 0.7  # of a solution's lines: hints and the package's own code share a few with it


def solutions(source: Path) -> list[list[str]]:
    """The lines of each marked solution of a lesson's source, without blanks around them."""
    text = source.read_text(encoding="utf-8")
    found = [match[0].splitlines()[1:-1] for match in SOLUTION.finditer(text)]
    return [[line.strip() for line in lines if line.strip()] for lines in found]


def leaks(notebook: NotebookNode, secrets: list[list[str]]) -> list[str]:
    """Where a notebook says nearly all of a solution: in code, prose, outputs or metadata."""
    found = []
    for place, text in _texts(notebook, "notebook"):
        plain = html.unescape(re.sub(r"<[^>]+>", "\n", text))
        lines = {line.strip() for line in [*text.splitlines(), *plain.splitlines()]}
        for number, secret in enumerate(secrets, 1):
            if sum(line in lines for line in secret) >= math.ceil(MOST * len(secret)):
                found.append(f"{place} has solution {number}")
    return found


def _texts(thing: Any, place: str) -> Iterator[tuple[str, str]]:
    """Every text in it but pictures, and where it stands."""
    if isinstance(thing, str):
        yield place, thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            if key != "image/png":
                yield from _texts(key, place)
                yield from _texts(value, f"{place}.{key}")
    elif isinstance(thing, list):
        for number, value in enumerate(thing):
            yield from _texts(value, f"{place}[{number}]")


def is_for_students(path: Path) -> bool:
    """Whether a file of the repository may go into their archive: no teacher's page, no cache."""
    return path == CAPSTONE or not (TEACHERS in path.parents or "__pycache__" in path.parts)


def students_files() -> list[Path]:
    """What goes to the students. ValueError when one of their notebooks tells a solution."""
    files = [ROOT / name for name in (*FILES, CHAT)]
    for folder in FOLDERS:
        files += filter(is_for_students, sorted((ROOT / folder).rglob("*")))
    for name, source in sources().items():
        path = target(name, solved=False)
        told = leaks(nbformat.read(path, as_version=4), solutions(source))
        if told:
            raise ValueError(f"{path.name} tells {told}")
        files.append(path)
    return [path for path in files if path.is_file()]


def pack(files: list[Path], archive: Path, readme: Path | None = None) -> None:
    """Put the files into a zip, named as in the repository; `readme` becomes its README.md."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as box:
        for path in files:
            box.write(path, Path("tutorial_engine") / path.relative_to(ROOT))
        if readme is not None:
            box.write(readme, "tutorial_engine/README.md")
    print(f"wrote {archive.parent.name}/{archive.name}: {len(files)} files")


def main() -> None:
    """Write both archives."""
    pack(students_files(), OUT / "students.zip", README)
    pack([*(target(name, solved=True) for name in sources()), PAGE], OUT / "solutions.zip")


if __name__ == "__main__":
    main()
