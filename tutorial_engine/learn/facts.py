"""What a check shows of an answer: the input, both answers, the first place that differs.

Everything here is read from values; nothing is guessed. Knows numbers and tensors; knows no
exercise.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 6, 10  # of a tensor that is shown as a table
WIDE = 88  # characters of a value that is shown in a line


def told(facts: Mapping[str, object]) -> str:
    """Names and values: a line each, but tables side by side, as many as fit."""
    lines: list[str] = []
    tables: list[list[str]] = []  # that are not written yet, each with its name on top
    left = max(map(len, facts), default=0) + 2

    def write_tables() -> None:
        if tables:
            tall = max(map(len, tables))
            blocks = [[f"{line:{_wide(one)}}" for line in one] for one in tables]
            padded = [one + [" " * _wide(one)] * (tall - len(one)) for one in blocks]
            lines.extend(f"  {'    '.join(row)}".rstrip() for row in zip(*padded, strict=True))
            tables.clear()

    for name, value in facts.items():
        rows = shown(value)
        if len(rows) == 1 and not (isinstance(value, Tensor) and value.dim() == 2):
            write_tables()
            lines.append(f"  {name:{left}}{rows[0]}")
            continue
        if sum(map(_wide, tables)) + 4 * len(tables) + max(map(len, [name, *rows])) > WIDE:
            write_tables()
        tables.append([name, *rows])
    write_tables()
    return "\n".join(lines)


def _wide(table: list[str]) -> int:
    return max(map(len, table))


def shown(value: object) -> list[str]:
    """A value in a line, or a small matrix as a table; of a large tensor its shape."""
    if isinstance(value, Tensor):
        if value.dim() == 2 and 0 < value.shape[0] <= ROWS and 0 < value.shape[1] <= COLUMNS:
            cells = [[_number(x) for x in row] for row in value.tolist()]
            wide = max(len(cell) for row in cells for cell in row)
            return [" ".join(f"{cell:>{wide}}" for cell in row) for row in cells]
        if value.dim() < 2 and value.numel() <= COLUMNS:
            return [_line(value.tolist())]
        return [f"a tensor {list(value.shape)}"]
    return [_line(value)]


def _line(value: object) -> str:
    text = _written(value)
    return text if len(text) <= WIDE else f"{text[: WIDE - 4]} ..."


def _written(value: object) -> str:
    """As Python writes it, but for floats, which have four digits, and short tensors and hashes."""
    if isinstance(value, bool | float):
        return _number(value)
    if isinstance(value, bytes):  # a hash
        return value.hex()[:6]
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(k)}: {_written(v)}' for k, v in value.items())}}}"
    if isinstance(value, Tensor):
        whole = value.tolist() if value.numel() <= COLUMNS else None
        return f"a tensor {list(value.shape)}" if whole is None else _written(whole)
    return repr(value)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def first_difference(got: Any, want: Any, alike: Any, place: str = "") -> str:
    """Where two answers differ first, in words: a kind, a shape, a length, or a number."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor):
            return f"{place or 'yours'} is {_kind(got)}, expected {_kind(want)}"
        if got.shape != want.shape:
            return f"{place}shape {list(got.shape)}, expected {list(want.shape)}"
        if (torch.bool in (got.dtype, want.dtype)) and got.dtype != want.dtype:
            return f"{place}dtype {got.dtype}, expected {want.dtype}"
        for index in torch.cartesian_prod(*map(torch.arange, want.shape)).view(-1, want.dim()):
            at = tuple(index.tolist())
            if not alike(got[at], want[at]):
                mine, right = (_number(x[at].item()) for x in (got, want))
                return f"{place}{list(at)}: {mine}, expected {right}"
        return ""
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{place or 'yours'} is {_kind(got)}, expected {_kind(want)}"
        for i, pair in enumerate(zip(got, want, strict=False)):
            if not alike(*pair):
                return first_difference(*pair, alike, f"{place}[{i}] ")
        if len(got) != len(want):
            return f"{place}{len(got)} items, expected {len(want)}"
    return f"{place.rstrip()}: {_line(got)}, expected {_line(want)}" if place else ""


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return {"NoneType": "None"}.get(type(value).__name__, f"of type {type(value).__name__}")


# -- an error -------------------------------------------------------------------------------------


def where_raised(error: BaseException, function: object) -> str:
    """The learner's line that raised, and what its names held; "" where it cannot be read."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    found = [
        (line.line or "", frame)
        for line, frame in _frames(error)
        if frame.f_code.co_filename == own and line.line
    ]
    if not found:
        return ""
    line, frame = found[-1]
    held = [
        f"{name} {held}"
        for name in dict.fromkeys(re.findall(r"\b[^\W\d]\w*\b", line))
        if name in frame.f_locals and (held := _held(frame.f_locals[name]))
    ]
    where = f"\n  there: {'; '.join(held)}" if held else ""
    return f"  in the line: {line.strip()}{where}"


class AsIs(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _held(value: object) -> str:
    """The shape of a tensor, or a short value; "" of anything else."""
    if isinstance(value, Tensor):
        return f"is a tensor {list(value.shape)}"
    if isinstance(value, bool | int | float | str | list | tuple | dict) or value is None:
        text = _written(value)
        return f"= {text}" if len(text) <= 40 else ""
    return ""


def _frames(error: BaseException) -> Iterator[tuple[traceback.FrameSummary, FrameType]]:
    for (frame, _), line in zip(
        traceback.walk_tb(error.__traceback__),
        traceback.extract_tb(error.__traceback__),
        strict=True,
    ):
        yield line, frame
