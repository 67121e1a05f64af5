"""Where each thing of this engine is in vLLM, and what vLLM does more there.

vllm_places.toml has them. Each name of ours is checked to be there.
"""

import textwrap
import tomllib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tutorial_engine.learn.stories.elsewhere import find


class Place(NamedTuple):
    """One thing: our function, vLLM's in its file (below vllm/), what it does more, and why."""

    what: str
    ours: str  # room.module.name, below tutorial_engine; "" where there is none
    file: str
    theirs: Mapping[str, int]  # a name there -> the line where to read
    more: str


DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
OPENED, SOURCE, TO_BEGIN_WITH = (DATA[name] for name in ("opened", "source", "to_begin_with"))
PLACES = [Place(**row) for row in DATA["place"]]


def in_vllm() -> str:
    """The parts of our scheduler and vLLM's, a line each. Errors as `find`."""
    decides = ("engine.scheduler.", "cache.paged.PagedKVCache.allocate")
    scheduler = [place for place in PLACES if place.ours.startswith(decides)]
    lines = [f"{'here':24}{OPENED}"]
    for place in scheduler:
        find(place.ours)
        theirs = ", ".join(place.theirs)
        lines.append(f"{place.ours.rpartition('.')[2]:24}{theirs}, vllm/{place.file}")
    return "\n".join(lines)


class Places:
    """All of them, as a table in a notebook, else as text."""

    def __init__(self) -> None:
        for place in PLACES:
            if place.ours:
                find(place.ours)

    def __repr__(self) -> str:
        lines = []
        for what, ours, file, theirs, more in PLACES:
            there = ", ".join(f"{name} (line {line})" for name, line in theirs.items())
            lines += [what, f"  here  {ours or 'nothing'}", f"  there {there}, vllm/{file}"]
            lines += textwrap.wrap(more, 92, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in ("what", "here", OPENED, "what vLLM adds, and why"))
        first, others = "", ""
        for what, ours, file, theirs, more in PLACES:
            links = [
                f'<a href="{SOURCE}vllm/{file}#L{line}"><code>{escape(name)}</code></a>'
                for name, line in theirs.items()
            ]
            cells = (
                f"<b>{escape(what)}</b>",
                f"<code>{escape(ours)}</code>" if ours else "nothing",
                f"{', '.join(links)}<br/>vllm/{escape(file)}",
                escape(more),
            )
            row = "".join(f'<td style="text-align:left;vertical-align:top">{c}</td>' for c in cells)
            if what in TO_BEGIN_WITH:
                first += f"<tr>{row}</tr>"
            else:
                others += f"<tr>{row}</tr>"
        more = f"<summary>{len(PLACES) - len(TO_BEGIN_WITH)} more</summary>"
        return (
            f"<div><table><tr>{head}</tr>{first}</table>"
            f"<details>{more}<table><tr>{head}</tr>{others}</table></details></div>"
        )
