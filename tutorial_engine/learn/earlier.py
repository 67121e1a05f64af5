"""Introduced in notebook 02. The parts that a learner wrote in notebook 01, running in a later one.

Reads the learner's own notebook file: the cells of its exercises are run, and what they define is
checked as it was there.
"""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
import torch

from tutorial_engine.learn.checks_01 import (
    check_attention,
    check_kv_head,
    check_layer,
    check_project,
    check_rope,
    check_window_mask,
)
from tutorial_engine.learn.own import IN_01, OwnEngine
from tutorial_engine.learn.verdict import Verdict

CHECKS: dict[str, Callable[..., Verdict]] = {
    "window_mask": check_window_mask,
    "attention": check_attention,
    "kv_head": check_kv_head,
    "rope": check_rope,
    "project": check_project,
    "layer": check_layer,
}


class Brought(dict[str, Verdict]):
    """Part → what its check says of the function that came from a notebook file."""

    def __repr__(self) -> str:
        right = [name for name, verdict in self.items() if verdict.ok]
        lines = [f"✔ yours from notebook 01: {', '.join(right)}"] if right else []
        lines += [repr(verdict) for verdict in self.values() if verdict.ok is False]
        left = [name for name in IN_01 if name not in right]
        if left:
            lines.append(f"☐ the package's run for: {', '.join(left)}")
        return "\n".join(lines)


def bring(mine: OwnEngine, notebook: str) -> Brought:
    """Put the right functions of the exercises of notebook 01 (a file that was saved) into `mine`.

    An exercise that is not done or not right, or a file that is not there, leaves the package's
    part where it is.
    """
    path = Path(notebook)
    cells = nbformat.read(path, as_version=4).cells if path.is_file() else []
    code = [cell for cell in cells if cell.cell_type == "code"]
    exercises = [cell.source for cell in code if "exercise" in cell.metadata.get("tags", [])]
    # what notebook 01 begins with
    scope: dict[str, Any] = {"torch": torch, "model": mine.package, "c": mine.package.config}
    found = Brought()
    for source in [*_helpers([cell.source for cell in code], exercises), *exercises]:
        try:
            exec(compile(source, path.name, "exec"), scope)
        except Exception as error:  # the learner's code may raise anything at all
            first = source.strip().splitlines()[0]
            told = f"{first!r} of {path.name} raised {type(error).__name__}: {error}"
            found[first] = Verdict(False, told)
    for name, check in CHECKS.items():
        if name in scope:
            found[name] = mine.use(scope[name], check).verdict
    return found


def _helpers(sources: Sequence[str], exercises: Sequence[str]) -> list[str]:
    """The imports and functions of a notebook that bind a name which its exercises read."""
    trees = [tree for source in exercises if (tree := _parsed(source)) is not None]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = []
    for tree in map(_parsed, sources):
        for node in [] if tree is None else tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound = {(name.asname or name.name).split(".")[0] for name in node.names}
            elif isinstance(node, ast.FunctionDef):
                bound = {node.name}
            else:
                continue
            if bound & used:
                found.append(ast.unparse(node))
    return found


def _parsed(source: str) -> ast.Module | None:
    """The syntax tree of a cell; None where it is no plain Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None
