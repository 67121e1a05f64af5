"""The cells of a lesson as code: what they bind and read, which others they need, and a run."""

import ast
import contextlib
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

from nbformat import NotebookNode

from tools.publish.build import make_notebook, sources
from tutorial_engine.learn.parts.earlier import _read


@cache
def fresh(name: str, solved: bool) -> NotebookNode:
    return make_notebook(sources()[name], solved)


def loads(node: ast.AST) -> set[str]:
    """Global names that a statement or an expression reads, its functions' included."""
    return _read(ast.unparse(node))


def binds(node: ast.AST | None) -> set[str]:
    """Names that a statement or a target binds at the top level of a cell."""
    if node is None:
        return set()
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif isinstance(child, ast.FunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.alias):
            found.add((child.asname or child.name).split(".")[0])
    return found


@cache
def defined_and_used(code: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a cell binds, and names that it reads before it binds them."""
    bound: set[str] = set()
    used: set[str] = set()

    def scan(body: Sequence[ast.stmt]) -> None:
        for statement in body:
            first: list[tuple[ast.expr, ast.expr | None]] = []  # what is read, and then bound
            if isinstance(statement, ast.For):
                first = [(statement.iter, statement.target)]
            elif isinstance(statement, ast.With):
                first = [(item.context_expr, item.optional_vars) for item in statement.items]
            elif isinstance(statement, ast.If | ast.While):
                first = [(statement.test, None)]
            elif not isinstance(statement, ast.Try):
                used.update(loads(statement) - binds_own(statement) - bound)
                bound.update(binds(statement))
            for read, given in first:
                used.update(loads(read) - bound)
                bound.update(binds(given))
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                for inner in (statement, *getattr(statement, "handlers", [])):
                    for field in ("body", "orelse", "finalbody"):
                        scan(getattr(inner, field, []))

    def binds_own(statement: ast.stmt) -> set[str]:
        return binds(statement) if isinstance(statement, ast.FunctionDef | ast.ClassDef) else set()

    scan(ast.parse(code).body)
    return frozenset(bound), frozenset(used)


def needed(codes: Sequence[str], place: int) -> set[int]:
    """The cells that this one needs: those that bound its names last, and what they need."""
    found, waiting = {place}, [place]
    while waiting:
        here = waiting.pop()
        missing = set(defined_and_used(codes[here])[1])
        for earlier in range(here - 1, -1, -1):
            given = missing & defined_and_used(codes[earlier])[0]
            missing -= given
            if given and earlier not in found:
                found.add(earlier)
                waiting.append(earlier)
    return found


def run_cell(code: str, namespace: dict[str, Any]) -> object:
    """Run it in silence → the value of its last line, if that is an expression."""
    body = ast.parse(code)
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(body, "cell", "exec"), namespace)
        if last is None:
            return None
        return eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
