"""How a room hands out names of its modules: each is imported when it is first asked for.

So the doctor runs, and says so, where torch is not installed, and a plot loads no explorer.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, read from the imports under its `TYPE_CHECKING`.

    An editor reads the same imports, so it knows the package. A function that is called like its
    module needs another public name: whoever imports the module first would get that.
    """
    here = sys.modules[package]
    homes = {
        alias.asname or alias.name: (line.module or "", alias.name)
        for block in ast.parse(inspect.getsource(here)).body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = homes[name]
        try:
            return getattr(import_module(module), there)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("tutorial_engine"):
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}, which is not installed: "
                "python -m pip install 'tutorial-engine[notebooks]'",
                name=error.name,
            ) from error

    def names() -> list[str]:
        return sorted({*vars(here), *homes} - {"TYPE_CHECKING", "lazy_exports"})

    return get, names
