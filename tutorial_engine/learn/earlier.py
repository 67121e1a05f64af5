"""What a learner wrote in one notebook, running in a later one.

Reads the learner's own notebook file: the cells of its exercises are run, and what they define is
checked as it was there.
"""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
import torch

from tutorial_engine.learn import checks_01, checks_02, checks_03, checks_04
from tutorial_engine.learn.block_attention_check import check_block_attention
from tutorial_engine.learn.own_cache import CACHES
from tutorial_engine.learn.own_engine import OwnEngine
from tutorial_engine.learn.own_scheduler import POLICIES
from tutorial_engine.learn.own_server import OwnServer
from tutorial_engine.learn.verdict import Verdict

Checks = dict[str, Callable[..., Verdict]]

# notebook -> the parts that a later one can take over
CHECKS: dict[str, Checks] = {
    "01": {
        "project": checks_01.check_project,
        "attention": checks_01.check_attention,
        "window_mask": checks_01.check_window_mask,
        "kv_head": checks_01.check_kv_head,
        "rope": checks_01.check_rope,
        "layer": checks_01.check_layer,
    },
    "02": {
        "MyCache": checks_02.check_cache,
        "MyStaticCache": checks_02.check_static_cache,  # the later one runs, where a file has both
        "run_new": checks_02.check_run_new,
        "keep_top_p": checks_02.check_top_p,
        "why_finished": checks_02.check_why_finished,
    },
    "03": {
        "num_tokens_to_run": checks_03.check_num_tokens,
        "plan_step": checks_03.check_plan,
        "ttft_and_tpot": checks_03.check_metrics,
        "ShortestFirst": checks_03.check_shortest,
        "Fair": checks_03.check_fair,
    },
    "04": {
        "num_blocks": checks_04.check_num_blocks,
        "slots": checks_04.check_slots,
        "block_attention": check_block_attention,
    },
}


class Brought(dict[str, Verdict]):
    """Part → what its check says of the function that came from a notebook file.

    `wanted` are the parts that the notebook has, and this engine too; of two caches the one in use.
    `missing` is the notebook's path where no such file is there, else "".
    """

    def __init__(self, number: str, wanted: Sequence[str], missing: str = "") -> None:
        super().__init__()
        self.number, self.wanted, self.missing = number, wanted, missing

    def __repr__(self) -> str:
        right = [name for name in self.wanted if name in self and self[name].ok]
        lines = [f"✔ yours from notebook {self.number}: {', '.join(right)}"] if right else []
        lines += [repr(verdict) for verdict in self.values() if verdict.ok is False]
        left = [name for name in self.wanted if name not in right]
        if left:
            why = f" (there is no file {self.missing})" if self.missing else ""
            lines.append(f"☐ the package's run for: {', '.join(left)}{why}")
        return "\n".join(lines)


def bring(mine: OwnEngine | OwnServer, notebook: str, *names: str) -> Brought:
    """Put the right functions of the exercises of a notebook (a file that was saved) into `mine`.

    The number in the file's name (01 to 04) says which one it is, `names` which parts (none
    given: all that both have, but no policy). An exercise that is not done or not right, or a file
    that is not there, leaves the package's part where it is. ValueError for a name without one.
    """
    path = Path(notebook)
    number = next((code for code in CHECKS if code in path.name), None)
    if number is None:
        raise ValueError(f"{path.name!r} must have one of {sorted(CHECKS)} in its name")
    checks = {
        name: check
        for name, check in CHECKS[number].items()
        if name in mine.parts.package and (name in names if names else name not in POLICIES)
    }
    cells = nbformat.read(path, as_version=4).cells if path.is_file() else []
    code_cells = [cell for cell in cells if cell.cell_type == "code"]
    exercises = [cell.source for cell in code_cells if "exercise" in cell.metadata.get("tags", [])]
    # what a notebook begins with
    model = mine.package if isinstance(mine, OwnEngine) else mine.model
    scope: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "c": model.config,
        "tokenizer": mine.tokenizer,
        "__name__": path.stem,  # classes are defined in a module
    }
    found = Brought(number, tuple(checks), "" if path.is_file() else str(path))
    for source in [*_helpers([cell.source for cell in code_cells], exercises), *exercises]:
        try:
            exec(compile(source, path.name, "exec"), scope)
        except Exception as error:  # the learner's code may raise anything at all
            first = source.strip().splitlines()[0]
            message = f"{first!r} of {path.name} raised {type(error).__name__}: {error}"
            found[first] = Verdict(False, message)
    for name, check in checks.items():
        if name in scope:
            found[name] = mine.use(scope[name], check).verdict
    if isinstance(mine, OwnEngine):
        idle = {*CACHES} - {mine.cache_part}
        found.wanted = tuple(name for name in checks if name not in idle)
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
