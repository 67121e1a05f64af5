"""Our pieces and ways beside those of vLLM, SGLang and llama.cpp.

A table of names to search for, and boxes where we differ: elsewhere.toml has them. Each name of
ours is checked to be there.
"""

import textwrap
import tomllib
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
VLLM, SGLANG, LLAMA_CPP = (DATA["versions"][name] for name in ("vllm", "sglang", "llama_cpp"))
BOXES, READ = DATA["box"], DATA["read"]


def find(name: str) -> object:
    """Our piece itself. AttributeError or ModuleNotFoundError if it is called otherwise now."""
    room, module, *path = name.split(".")
    thing: object = import_module(f"tutorial_engine.{room}.{module}")
    for part in path:
        fields = getattr(thing, "__dataclass_fields__", {})
        thing = fields[part] if part in fields else getattr(thing, part)
    return thing


class Names:
    """All pieces: what each is, and its names. A table in a notebook, else as text."""

    def __init__(self) -> None:
        for piece in DATA["piece"]:
            find(piece["ours"])
        self.head = ("what it is (notebook)", "here", "vLLM", "SGLang", "llama.cpp")
        self.lines = [
            (
                *(piece["what"], piece["ours"].split(".", 2)[2]),
                *(piece[engine] or "–" for engine in DATA["versions"]),
            )
            for piece in DATA["piece"]
        ]

    def __repr__(self) -> str:
        lines = [self.head, *self.lines]
        wide = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
        rows = ("".join(f"{cell:<{wide[i]}}" for i, cell in enumerate(line)) for line in lines)
        return "\n".join(row.rstrip() for row in rows)

    def _repr_html_(self) -> str:
        left = ' style="text-align:left"'
        rows = "".join(f"<th{left}>{cell}</th>" for cell in self.head)
        for what, *names in self.lines:
            cells = (f"<code>{escape(name)}</code>" if name != "–" else name for name in names)
            rows += f"</tr><tr><td{left}>{escape(what)}</td>"
            rows += "".join(f"<td{left}>{cell}</td>" for cell in cells)
        return f"<table><tr>{rows}</tr></table>"


def names_elsewhere() -> Names:
    """All pieces, a line each: what it is, and the names. Errors as `find`."""
    return Names()


class Told:
    """A box to be shown: folded below its sentence in a notebook, in full as text."""

    def __init__(self, box: dict[str, str]) -> None:
        self.title, self.gist = box["title"] + "." * (box["title"][-1] != "?"), box["gist"]
        self.engines = {f"here ({box['piece']})": box["ours"]}
        self.engines |= {version: box[engine] for engine, version in DATA["versions"].items()}

    def __repr__(self) -> str:
        lines = textwrap.wrap(f"In other engines (read in {READ}): {self.title} {self.gist}", 92)
        for name, text in self.engines.items():
            lines += textwrap.wrap(
                f"{name}: {text}",
                92,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        each = (f"<li><b>{escape(w)}</b>: {escape(how)}</li>" for w, how in self.engines.items())
        head = f"<b>In other engines (read in {READ}): {escape(self.title)}</b> {escape(self.gist)}"
        return f"<details><summary>{head}</summary><ul>{''.join(each)}</ul></details>"


def box(topic: str) -> Told:
    """What we do, and what vLLM, SGLang and llama.cpp do, with file and function.

    ValueError, with the topics there are, for another one.
    """
    if topic not in BOXES:
        raise ValueError(f"there is no box {topic!r}; there are {', '.join(BOXES)}")
    find(BOXES[topic]["piece"])
    return Told(BOXES[topic])
