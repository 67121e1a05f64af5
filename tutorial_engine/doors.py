"""How a room hands out names of its modules: each is imported when it is first asked for.

So the doctor runs, and says so, where torch is not installed, and a plot loads no explorer.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def hands_out(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """A package's `__getattr__` and `__all__`. homes: module → its names, "one, two as public_two".

    A function that is called like its module needs another public name: whoever imports the module
    first would get that.
    """
    where = {
        entry.split()[-1]: (module, entry.split()[0])
        for module, entries in homes.items()
        for entry in entries.split(", ")
    }

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = where[name]
        return getattr(import_module(f"{package}.{module}"), there)

    return get, sorted(where)
