"""What a learner wrote in one notebook, running in a later one.

Reads the learner's own notebook file: the cells of its exercises are run, after the helpers and
numbers of the notebook that they read, and what they define is checked as it was there.
"""

import ast
import json
import symtable
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tutorial_engine.learn.exercises import lesson_01, lesson_02, lesson_03, lesson_04
from tutorial_engine.learn.exercises.lesson_04_block_attention import check_block_attention
from tutorial_engine.learn.exercises.lesson_05_blocks import check_free, check_take
from tutorial_engine.learn.exercises.lesson_05_find import check_find
from tutorial_engine.learn.exercises.lesson_05_give_way import check_slots_for
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.parts.cache import CACHES
from tutorial_engine.learn.parts.engine import OwnEngine
from tutorial_engine.learn.parts.server import OwnServer
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.config import ModelConfig

Checks = dict[str, Callable[..., Verdict]]

# notebook -> the parts that a later one can take over; no policy: each lesson chooses its own
CHECKS: dict[str, Checks] = {
    "01": {
        "project": lesson_01.check_project,
        "attention": lesson_01.check_attention,
        "window_mask": lesson_01.check_window_mask,
        "kv_head": lesson_01.check_kv_head,
        "rope": lesson_01.check_rope,
        "layer": lesson_01.check_layer,
    },
    "02": {
        "MyCache": lesson_02.check_cache,
        "MyStaticCache": lesson_02.check_static_cache,  # the later one runs, where a file has both
        "run_new": lesson_02.check_run_new,
        "keep_top_p": lesson_02.check_top_p,
        "why_finished": lesson_02.check_why_finished,
    },
    "03": {
        "num_tokens_to_run": lesson_03.check_num_tokens,
        "plan_step": lesson_03.check_plan,
        "ttft_and_tpot": lesson_03.check_metrics,
    },
    "04": {
        "num_blocks": lesson_04.check_num_blocks,
        "slots": lesson_04.check_slots,
        "allocate": lesson_04.check_allocate,
        "block_attention": check_block_attention,
    },
    "05": {
        "find": check_find,
        "free": check_free,
        "take": check_take,
        "slots_for": check_slots_for,
    },
}


class Brought(dict[str, Verdict]):
    """Part → what its check says of the function that came from a notebook file.

    `wanted` are the parts that the notebook has, and this engine too; of two caches the one in use.
    `file` is the path that was read, or looked for: `found` says which.
    """

    def __init__(self, wanted: Sequence[str], file: Path, number: str) -> None:
        super().__init__()
        self.wanted, self.file, self.number, self.found = wanted, file, number, file.is_file()

    def __repr__(self) -> str:
        right = [name for name in self.wanted if name in self and self[name].ok]
        lines = [f"✔ yours from {self.file.name}: {', '.join(right)}"] if right else []
        lines += [repr(verdict) for verdict in self.values() if verdict.ok is False]
        left = [name for name in self.wanted if name not in right]
        if left:
            lines.append(f"☐ these are still the package's: {', '.join(left)}{self._why()}")
        return "\n".join(lines)

    def _why(self) -> str:
        """Why no part is the learner's, where none was even tried; else ""."""
        copy = f"my_{self.number}.ipynb"
        if not self.found:
            return f" (there is no file {self.file}, and no {copy} beside it)"
        if any(verdict.ok is not None for verdict in self.values()):
            return ""
        is_copy = self.file.name.startswith("my_")
        ask = "was it saved?" if is_copy else f"is yours called {copy}, in the same folder?"
        return f" (no exercise is done in {self.file.name}; {ask})"


def own_file(path: Path, number: str) -> Path:
    """The learner's file of a notebook: the newest my_NN*.ipynb beside it, else the path itself."""
    mine = path.parent.glob(f"my_{number}*.ipynb")
    return max(mine, key=lambda file: file.stat().st_mtime, default=path)


def bring(mine: OwnEngine | OwnServer, notebook: str) -> Brought:
    """Put the right functions of the exercises of a notebook (a file that was saved) into `mine`.

    The number in the file's name (01 to 05) says which one it is; a file my_01.ipynb beside it
    is read in its place. An exercise that is not done or not right, or a file that is not there,
    leaves the package's part where it is. ValueError for a name without a number.
    """
    path = Path(notebook)
    number = next((code for code in CHECKS if code in path.name), None)
    if number is None:
        raise ValueError(f"{path.name!r} must have one of {sorted(CHECKS)} in its name")
    path = own_file(path, number)
    checks = {n: check for n, check in CHECKS[number].items() if n in mine.parts.package}
    # plain JSON: nbformat takes a second to be imported
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else []
    code = [(c["metadata"], "".join(c["source"])) for c in cells if c["cell_type"] == "code"]
    exercises = [source for metadata, source in code if "exercise" in metadata.get("tags", [])]
    model = mine.package if isinstance(mine, OwnEngine) else mine.model
    found = Brought(tuple(checks), path, number)
    others = [source for _, source in code if source not in exercises]

    def defined(c: ModelConfig) -> dict[str, Any]:
        """What the cells define, when the notebook's `c` is this; their errors are in `found`."""
        scope: dict[str, Any] = {
            **{"torch": torch, "model": model, "c": c, "tokenizer": mine.tokenizer},
            "__name__": path.stem,  # classes are defined in a module
        }
        for source in [*_helpers(others, exercises, {*scope}), *exercises]:
            try:
                exec(compile(source, path.name, "exec"), scope)
            except Exception as error:  # the learner's code may raise anything at all
                first = source.strip().splitlines()[0]
                message = f"{first!r} of {path.name} raised {type(error).__name__}: {error}"
                found[first] = Verdict(False, message)
        return scope

    # checked with the numbers that the lesson had; what runs has those of this model
    lesson = ModelConfig.from_pretrained(TINY)
    scope = defined(lesson)
    here = scope if model.config == lesson else defined(model.config)
    for name, check in checks.items():
        if name in scope:
            found[name] = mine.use(scope[name], check).verdict
            if name in here and name in mine.parts.own:
                mine.parts.own[name] = here[name]
                mine.checks[name] = lambda _, check=check, part=scope[name]: check(part)
    if isinstance(mine, OwnEngine):
        idle = {*CACHES} - {mine.cache_part}
        found.wanted = tuple(name for name in checks if name not in idle)
    return found


def _helpers(others: Sequence[str], exercises: Sequence[str], given: set[str]) -> list[str]:
    """What the exercises read of the other cells, in their order: imports, functions and numbers.

    And what these read in turn. Names that are given, and that an exercise defines, are left out.
    """
    statements = [
        (ast.unparse(node), bound)
        for tree in map(_parsed, others)
        for node in (tree.body if tree else ())
        if (bound := _bound(node))
    ]
    wanted = set().union(*map(_read, exercises)) - given
    taken: set[int] = set()
    while True:
        new = [i for i, (_, bound) in enumerate(statements) if bound & wanted and i not in taken]
        if not new:
            return [statements[i][0] for i in sorted(taken)]
        taken.update(new)
        wanted |= set().union(*(_read(statements[i][0]) for i in new)) - given


def _bound(node: ast.stmt) -> set[str]:
    """The names that an import, a function, a class or an assignment binds; none for all others."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(name.asname or name.name).split(".")[0] for name in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (name for target in targets for name in ast.walk(target))
        return {name.id for name in names if isinstance(name, ast.Name)}
    return set()


def _read(source: str) -> set[str]:
    """The global names that a piece of code reads, also in its functions; none if it is no Python.

    A name that is only an argument, or only bound in a function, is not global.
    """
    if _parsed(source) is None:
        return set()
    names, tables = set(), [symtable.symtable(source, "cell", "exec")]
    while tables:
        table = tables.pop()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_top or symbol.is_global()):
                names.add(symbol.get_name())
        tables += table.get_children()
    return names


def _parsed(source: str) -> ast.Module | None:
    """The syntax tree of a cell; None where it is no plain Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None
