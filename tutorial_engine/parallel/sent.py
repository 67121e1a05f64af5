"""A learner's function, sent to processes that cannot import it: the notebook is not theirs.

Its compiled code goes, and what that reads: functions beside it as code, plain values, and modules
and what is imported from them by name. Knows Python functions; knows no rank.
"""

import builtins
import dis
import io
import marshal
import pickle
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Sent(NamedTuple):
    """A function taken apart. `modules`: name in its code → module; `others`: name → value."""

    name: str
    code: bytes
    defaults: tuple[Any, ...] | None
    named_defaults: Mapping[str, Any] | None
    modules: Mapping[str, str]
    others: Mapping[str, Any]

    def received(self) -> Callable[..., Any]:
        """The function again, in this process, which runs the same Python."""
        scope: dict[str, Any] = {}
        function = FunctionType(marshal.loads(self.code), scope, self.name, self.defaults)
        function.__kwdefaults__ = dict(self.named_defaults or {})
        scope |= {"__builtins__": builtins, self.name: function}  # it may call itself
        scope |= {name: import_module(module) for name, module in self.modules.items()}
        for name, value in self.others.items():
            scope[name] = value.received() if isinstance(value, Sent) else value
        return function


class _Elsewhere(pickle.Unpickler):
    """Reads as another process does, which has nothing that was defined in the module `home`."""

    home = ""

    def find_class(self, module: str, name: str) -> Any:
        if module == self.home:
            raise ValueError(f"{name} is defined here")
        return super().find_class(module, name)


def send(function: Callable[..., Any]) -> Sent:
    """ValueError for what is no plain function, or one that reads what another process has not.

    That is a variable of a function around it (as a decorator's function has), or a class or an
    object of the notebook.
    """
    sent = _taken_apart(function)
    try:
        reader = _Elsewhere(io.BytesIO(pickle.dumps(sent)))
        reader.home = function.__module__
        reader.load()
    except Exception as error:  # what pickle cannot do has many names
        raise ValueError(f"{function!r} cannot be sent: {error}") from error
    return sent


def _taken_apart(function: Callable[..., Any]) -> Sent:
    if not isinstance(function, FunctionType) or function.__closure__:
        raise ValueError(f"{function!r} cannot be sent: define it as a function of its own")
    modules, others = dict[str, str](), dict[str, Any]()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            modules[name] = value.__name__
        elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
            if value is not function:
                others[name] = _taken_apart(value)
        elif name in function.__globals__:
            others[name] = value
    code = marshal.dumps(function.__code__)
    defaults = function.__defaults__, function.__kwdefaults__
    return Sent(function.__name__, code, *defaults, modules, others)


def _names(code: CodeType) -> Iterator[str]:
    """The globals that a code reads, and that functions inside it read; no attributes."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
