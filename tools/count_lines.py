"""How long the house is, beside what was set as its size: `python tools/count_lines.py`.

Lines are all lines of the .py files; code lines are those that are neither blank, comment nor
docstring. A size is a reason to delete an idea, never to golf.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tutorial_engine"
CORE = ("model", "sampling", "cache", "engine", "trace")


class Size(NamedTuple):
    """Of one file, or of many."""

    files: int = 0
    lines: int = 0
    code: int = 0


# row -> folders, and the most lines that it should have; None where none was set
ROWS: dict[str, tuple[list[Path], int | None]] = {
    "model": ([PACKAGE / "model"], 1_150),
    "sampling": ([PACKAGE / "sampling"], 480),
    "cache": ([PACKAGE / "cache"], 1_600),
    "engine": ([PACKAGE / "engine"], 1_450),
    "trace": ([PACKAGE / "trace"], 700),
    "core: these five": ([PACKAGE / room for room in CORE], 5_400),
    "lab + parallel": ([PACKAGE / "lab", PACKAGE / "parallel"], 3_500),
    "learn": ([PACKAGE / "learn"], 5_000),
    "viz": ([PACKAGE / "viz"], 7_000),
    "the package": ([PACKAGE], None),
    "tests": ([ROOT / "tests"], 20_000),
    "tools": ([ROOT / "tools"], None),
    "all Python but notebooks": ([PACKAGE, ROOT / "tests", ROOT / "tools", ROOT / "docs"], 44_000),
}


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """The numbers of the lines that docstrings take."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def size(file: Path) -> Size:
    """The size of one file."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    docstrings = set(docstring_lines(ast.parse(text)))
    code = [
        line
        for number, line in enumerate(lines, 1)
        if number not in docstrings and line.strip() and not line.lstrip().startswith("#")
    ]
    return Size(1, len(lines), len(code))


def total(folders: list[Path]) -> Size:
    """The size of all .py files below these folders."""
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return Size(*(sum(numbers) for numbers in zip(Size(), *map(size, files), strict=True)))


def main() -> None:
    """Print the table."""
    width = max(map(len, ROWS))
    print(f"| {'':<{width}} | files | lines  | code   | at most |   |")
    print(f"|{'-' * (width + 2)}|------:|-------:|-------:|--------:|---|")
    for name, (folders, most) in ROWS.items():
        found = total(folders)
        mark, said = " ", ""
        if most is not None:
            mark, said = "✔" if found.lines <= most else "✘", f"{most:,}"
        print(
            f"| {name:<{width}} | {found.files:>5} | {found.lines:>6,} | {found.code:>6,} "
            f"| {said:>7} | {mark} |"
        )


if __name__ == "__main__":
    main()
