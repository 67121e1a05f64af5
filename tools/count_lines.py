"""How long the house is, room by room: `python tools/count_lines.py`.

Lines are all lines of the .py files; code lines are those that are neither blank, comment nor
docstring. What belongs together is counted together: the tensor-parallel model is part of what runs
a request, the ranks that run it are an instrument.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tutorial_engine"
WEIGHTS = f"{PACKAGE}/parallel/tensor_parallel.py"

# group -> folders and files; a file that is named belongs to no other group
GROUPS: dict[str, list[str]] = {
    "model + sampling + trace + cache + engine + tensor_parallel": [
        *(f"{PACKAGE}/{room}" for room in ("model", "sampling", "trace", "cache", "engine")),
        f"{PACKAGE}/checks.py",
        WEIGHTS,
    ],
    "lab + ranks": [f"{PACKAGE}/lab", f"{PACKAGE}/parallel"],
    "viz": [f"{PACKAGE}/viz"],
    "learn": [f"{PACKAGE}/learn"],
    "bench": [f"{PACKAGE}/bench"],
    "tiny": [f"{PACKAGE}/tiny"],
    "syllabus": [f"{PACKAGE}/syllabus.py", f"{PACKAGE}/__init__.py"],
    "tests": ["tests"],
    "tools": ["tools"],
}


class Size(NamedTuple):
    """Of one file, or of many."""

    files: int = 0
    lines: int = 0
    code: int = 0


def files_of(group: str) -> list[Path]:
    """The files of a group, without those that another group names."""
    named = {
        ROOT / p for name, ps in GROUPS.items() if name != group for p in ps if p[-3:] == ".py"
    }
    found = set()
    for place in GROUPS[group]:
        path = ROOT / place
        found |= {path} if path.is_file() else set(path.rglob("*.py"))
    return sorted(found - named)


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


def total(files: list[Path]) -> Size:
    """The size of all of them together."""
    return Size(*(sum(numbers) for numbers in zip(Size(), *map(size, files), strict=True)))


def main() -> None:
    """Print the table."""
    width = max(map(len, GROUPS))
    print(f"| {'':<{width}} | files | lines  | code   |")
    print(f"|{'-' * (width + 2)}|------:|-------:|-------:|")
    for group in GROUPS:
        found = total(files_of(group))
        print(f"| {group:<{width}} | {found.files:>5} | {found.lines:>6,} | {found.code:>6,} |")


if __name__ == "__main__":
    main()
