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
            blocks = [[f"{line:{_wide(table)}}" for line in table] for table in tables]
            padded = [block + [" " * _wide(block)] * (tall - len(block)) for block in blocks]
            lines.extend(f"  {'    '.join(row)}".rstrip() for row in zip(*padded, strict=True))
            tables.clear()

    for name, value in facts.items():
        rows = _rows_of(value)
        if len(rows) == 1 and not _is_matrix(value):
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


def _rows_of(value: object) -> list[str]:
    """A value in a line, or a small matrix as a table; of a large tensor its shape."""
    if isinstance(value, Tensor):
        if value.dim() == 2 and 0 < value.shape[0] <= ROWS and 0 < value.shape[1] <= COLUMNS:
            cells = [[number_text(x) for x in row] for row in value.tolist()]
            wide = max(len(cell) for row in cells for cell in row)
            return [" ".join(f"{cell:>{wide}}" for cell in row) for row in cells]
        if value.dim() != 2 and value.numel() <= COLUMNS:
            return [_line(value.tolist())]
        return [f"a tensor {list(value.shape)}"]
    return [_line(value)]


def in_a_line(value: object) -> str | None:
    """A value as it is written in a line of text; None where it needs a table."""
    rows = _rows_of(value)
    return None if len(rows) > 1 or _is_matrix(value) else rows[0]


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _line(value: object) -> str:
    text = _written(value)
    return text if len(text) <= WIDE else f"{text[: WIDE - 4]} ..."


def _written(value: object) -> str:
    """As Python writes it, but for floats, which have four digits, and short tensors and hashes."""
    if isinstance(value, bool | float):
        return number_text(value)
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
    return shown(value)


def shown(value: object) -> str:
    """As Python writes it; of a generator or a filter, how it becomes a list."""
    kind = type(value).__name__
    return f"a {kind}: put list(...) around it" if isinstance(value, Iterator) else repr(value)


def number_text(value: object, digits: int = 4) -> str:
    """A number as it is written: a float that is whole in full, others with so many digits."""
    if not isinstance(value, float):
        return str(value)
    whole = value.is_integer() and abs(value) < 1e9
    return str(int(value)) if whole else f"{value:.{digits}g}"  # no -0


def plain(value: Any) -> Any:
    """Tensors, arrays, tuples and ranges as lists, and their numbers as Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | range) else value


def alike(got: Any, want: Any, tolerance: float = 1e-5, of_one_kind: bool = False) -> bool:
    """Is an answer the wanted one? Numbers may differ by the tolerance, of 1 or of the largest.

    NaN is like NaN alone. `of_one_kind`: what is not wanted as a float must be of the same type,
    so that 1.0 and True are no 1.
    """
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape:
            return False
        return not want.numel() or bool(_near(got, want, tolerance).all())
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(want):
            return False
        pairs = zip(got, want, strict=True)
        return all(alike(*pair, tolerance, of_one_kind) for pair in pairs)
    if isinstance(want, dict) and isinstance(got, dict):
        if got.keys() != want.keys():
            return False
        return all(alike(got[key], item, tolerance, of_one_kind) for key, item in want.items())
    if isinstance(want, float) and isinstance(got, float | int) and not isinstance(got, bool):
        return abs(got - want) <= tolerance * max(1.0, abs(want))
    return bool(got == want) and (not of_one_kind or type(got) is type(want))


def _near(got: Tensor, want: Tensor, tolerance: float) -> Tensor:
    """Which numbers of two tensors of one shape are alike; none where one alone is a mask."""
    if torch.bool in (got.dtype, want.dtype):
        return (got == want) & (got.dtype == want.dtype)
    wanted = want.double()
    size = max(1.0, float(wanted.nan_to_num(0, 0, 0).abs().max()))
    near = (got.double() - wanted).abs() <= tolerance * size
    return near | (got == want) | (got.isnan() & want.isnan())  # inf is near nothing


def first_difference(got: Any, want: Any, tolerance: float = 1e-5, place: str = "") -> str:
    """Where two answers that are not `alike` differ first: a kind, a shape, a length, a number."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor):
            return f"{place or 'yours'} is {_kind(got)}, expected {_kind(want)}"
        if got.shape != want.shape:
            return f"{place}shape {list(got.shape)}, expected {list(want.shape)}"
        if (torch.bool in (got.dtype, want.dtype)) and got.dtype != want.dtype:
            return f"{place}dtype {got.dtype}, expected {want.dtype}"
        differ = (~_near(got, want, tolerance)).nonzero().tolist() if want.numel() else []
        if not differ:
            return ""
        at = tuple(differ[0])
        return f"{place}{list(at)}: {_told_apart(got[at].item(), want[at].item())}"
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{place or 'yours'} is {_kind(got)}, expected {_kind(want)}"
        for i, pair in enumerate(zip(got, want, strict=False)):
            if not alike(*pair, tolerance):
                return first_difference(*pair, tolerance, f"{place}[{i}] ")
        if len(got) != len(want):
            is_seen = not place and max(len(got), len(want)) <= COLUMNS
            return "" if is_seen else f"{place}{len(got)} items, expected {len(want)}"
    return f"{place.rstrip()}: {_told_apart(got, want)}" if place else ""


def _told_apart(got: object, want: object) -> str:
    """Two values in a line, with all digits where four are the same."""
    both = [_line(value) for value in (got, want)]
    return ", expected ".join(both if both[0] != both[1] else [repr(got), repr(want)])


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return {"NoneType": "None"}.get(type(value).__name__, f"of type {type(value).__name__}")


# -- an error -------------------------------------------------------------------------------------


def where_raised(error: BaseException, function: object) -> str:
    """The learner's line that raised, and what its names held; "" where it cannot be read."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    found = [
        (line.line or "", frame)
        for line, frame in _frames(error)
        if frame.f_code.co_filename == file and line.line
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
