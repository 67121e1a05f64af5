"""What the checks say of right answers with one edit: does each verdict show what is wrong?

    python -m tools.mutants [exercise ...]

Without a name: the exercises of notebooks 01 to 05. The right answers are those of the tests, and
others below, as a learner may write them. Prints each edit with today's verdict, and how many edits
were accepted: each is a hole in the check, unless EQUIVALENT says that it changes no answer.
"""

import ast
import difflib
import inspect
import linecache
import math
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tutorial_engine.learn.exercises.judge import wrong_answers
from tutorial_engine.learn.exercises.verdict import Verdict

TESTS = Path(__file__).parent.parent / "tests"
MODULES = ("answers_01", "answers_02", "answers_03", "answers_04")
ADDS_LISTS = ("free",)  # here a + b is not b + a
APPENDICES = ("rank_mlp", "end_to_end", "size", "make_step", "hits", "log")
STYLES = 2  # answers of the tests that are edited, of each exercise
SECONDS = 5  # that a check may take

# answers in another style than the package's
WRITTEN: Mapping[str, str] = {
    "attention": """
def attention(q, k, v, mask):
    scores = q @ k.T / math.sqrt(q.shape[1])
    scores[~mask] = -torch.inf
    e = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
    shares = e / e.sum(dim=1, keepdim=True)
    return shares @ v
""",
    "rope": """
def rope(x, angles):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
    first = a * cos - b * sin
    second = b * cos + a * sin
    return torch.cat((first, second), dim=-1)
""",
    "keep_top_p": """
def keep_top_p(probs, p):
    values, order = probs.sort(descending=True)
    before = values.cumsum(0) - values
    keep = torch.zeros(len(probs), dtype=torch.bool)
    keep[order[before < p]] = True
    return keep
""",
    "cache_test": """
def cache_test(logits_of):
    sequence, new, size = [65, 66, 67, 68], [], 2
    return logits_of(sequence, new, chunk_size=size)
""",
    "largest_budget": """
def largest_budget(max_gap_ms):
    decoding = 10
    return int(max_gap_ms - decoding)
""",
    "allocate": """
def allocate(block_table, free_blocks, block_size, pos):
    i = pos // block_size
    offset = pos % block_size
    if i >= len(block_table):
        if len(free_blocks) == 0:
            return None
        block_table.append(free_blocks.pop(0))
    return block_table[i] * block_size + offset
""",
    "find": """
def find(token_ids, block_size, hash_of, cached):
    found = []
    parent = None
    start = 0
    while start + block_size < len(token_ids):
        tokens = token_ids[start : start + block_size]
        h = hash_of(parent, tokens)
        if h not in cached:
            return found
        found.append(cached[h])
        parent = h
        start += block_size
    return found
""",
}
# reasons why an edit changes nothing
ANY_ORDER = "in any order it is the same number"
SHIFTED = "a row of scores may be shifted by any number"
SIZES = "they have the same size"
ROOM = "it is only as large as needed, or larger"
ASSERTED = "it is said to a reader and to mypy only"
EMPTY = "an empty cell belongs to no sequence"
# exercise -> the end of an edit, as it is printed -> why it changes no right answer
EQUIVALENT: Mapping[str, Mapping[str, str]] = {
    "attention": {
        "mask).out[:, -1]": "there is one head",
        "(float(key @ query) / math.sqrt(len(key))) for key in k]": ANY_ORDER,
        "math.sqrt(len(query))) for key in k]": "a query is as long as a key",
        "math.sqrt(k.shape[1])": "a query is as long as a key",
        "math.sqrt(v.shape[1])": "a value is as long as a key",
        "torch.exp(scores + scores.max(dim=1, keepdim=True).values)": SHIFTED,
        "torch.exp(scores - q.max(dim=1, keepdim=True).values)": SHIFTED,
    },
    "window_mask": {"kv_len - q_len - late": "late is 0"},
    "project": {"unflatten(1, (-1, head_dim)) for w in (w_q, w_k, w_v))": "it has two dimensions"},
    "whole_layer": {
        "scores.softmax(-1), v).flatten(2, 2)": "the layer makes one row of it",
        "scores.softmax(-1), v).flatten(1, 3)": "the layer makes one row of it",
        "scores.softmax(-1), v).flatten(1, 1)": "the layer makes one row of it",
        "q.unflatten(1, (v.shape[1], -1))": "there are as many heads of v as of k",
        "/ k.shape[-1] ** 0.5": "a query is as long as a key",
        "/ v.shape[-1] ** 0.5": "a query is as long as a value",
        "causal_mask(*[len(q)] * 3)))": "a window of all tokens",
        "causal_mask(*[len(k)] * 2)))": "as many queries as keys",
        "causal_mask(*[len(v)] * 2)))": "as many queries as values",
    },
    "MyCache": {
        "moved: self.used = {} (-3,0 +4)": "one has nothing to do with the other",
        "moved: start = self.used.get(layer, 0) (-7,0 +8)": "one has nothing to do with the other",
        "k.zero_()  =>": "k is a copy by then",
        "moved: return ([room[0, :end], room[1, :end]],) (-11,0 +12)": "k is a copy by then",
        "=>  v.zero_()": "v is a copy by then",
        "torch.zeros(3, 16, *k.shape[1:]))": ROOM,
        "torch.zeros(2, 17, *k.shape[1:]))": ROOM,
        "torch.zeros(2, 15, *k.shape[1:]))": ROOM,
        "torch.zeros(2, 16, *v.shape[1:]))": "v has the shape of k",
        "start + len(v)": "v has the shape of k",
    },
    "transplant": {"v[slots] = donor_v[slots] (-3,0 +4,2)": "K and V are two tensors"},
    "MyStaticCache": {"start + len(v)": "v has the shape of k"},
    "run_new": {"model.compute_logits(model(batch, attention)[-1:])[-1]": "there is one row"},
    "keep_top_p": {
        "probs.zero_()  =>": "probs is a copy",
        "moved: return torch.tensor(kept) (-6,0 +7)": "probs is a copy",
        "if mass <= p - 1e-09:": "1e-9 is below what a check can tell",
        "sorted(range(len(kept)), key=lambda i: -probs[i].item()):": SIZES,
        "values.cumsum(-1) - values": "there is one dimension",
        "torch.zeros(len(before), dtype=torch.bool)": SIZES,
        "torch.zeros(len(order), dtype=torch.bool)": SIZES,
        "torch.zeros(len(values), dtype=torch.bool)": SIZES,
    },
    "why_finished": {
        "while limit and new_ids[-1] in eos or any(map(text.__contains__, stop)):": (
            "the limit is 1 at least"
        ),
        "while eos and new_ids[-1] in eos or any(map(text.__contains__, stop)):": (
            "there is a new token whenever it is asked"
        ),
    },
    "plan_step": {
        "waiting[:max(-1, max_num_seqs - len(running))]]:": ("no more run than max_num_seqs")
    },
    "ttft_and_tpot": {
        "'there are two tokens at least'  =>": ASSERTED,
        "moved: return (metrics.ttft, metrics.tpot) (-2,0 +3)": ASSERTED,
        "metrics.ttft is not None or metrics.tpot is not None, 'there are two tokens at least'": (
            ASSERTED
        ),
    },
    "largest_budget": {
        "range(2, 100) if measured_gap(budget) <= most))": "no limit is so low",
        "range(0, 100) if measured_gap(budget) <= most))": "the largest one is looked for",
        "range(1, 101) if measured_gap(budget) <= most))": "no limit is so high",
        "range(1, 99) if measured_gap(budget) <= most))": "no limit is so high",
    },
    "allocate": {"moved: offset = pos % block_size (-3 +2,0)": "no line between them changes pos"},
    "free": {
        "moved: with_hash = [block for block in gone if hashes[block] is not None] (-4,0 +5)": (
            "one has nothing to do with the other"
        ),
        "free_queue.insert(len(names) if names[block] else place, block)": (
            "insert behind the end puts it at the end"
        ),
    },
    "find": {
        "moved: parent = h (-9,0 +10)": "one has nothing to do with the other",
        "keys[-1] if start else None": "there are keys from the second block on",
        "if key not in cached), len(tokens))": "min with the blocks that may be found",
        "if key not in cached), len(cached))": "all keys are in it then",
    },
    "block_attention": {
        "block_size = v_pool.shape[1]": SIZES,
        "min(kv_len, kv_len - start)": "a slice ends where the block ends",
        "torch.zeros_like(k_pool[0, 0]))": SIZES,
        "torch.zeros_like(v_pool[1, 0]))": "any slot has this shape",
        "torch.zeros_like(v_pool[-1, 0]))": "any slot has this shape",
        "torch.zeros_like(v_pool[0, 1]))": "any slot has this shape",
        "torch.zeros_like(v_pool[0, -1]))": "any slot has this shape",
        "/ math.sqrt(len(out))": SIZES,
    },
    "visible": {
        "if cells is not None and seq_id in own and (p <= pos)]": EMPTY,
        "if seq_id is not None and seq_id in own and (p <= pos)]": EMPTY,
        "if pos is not None and seq_id in own and (p <= pos)]": EMPTY,
        "if i is not None and seq_id in own and (p <= pos)]": EMPTY,
        "if own is not None and seq_id in own and (p <= pos)]": EMPTY,
        "cells.clear()  =>": "cells is a copy",
        "moved: return tuple((found[p] for p in range(pos + 1) if p in found)) (-2,0 +3)": (
            "cells is a copy"
        ),
    },
    "context_shift": {
        "cache.seq_add(seq_id, keep + discard, -2, -discard)": "below 0: to the end",
        "cells.seq_add(seq_id, keep, -2, -1)": "below 0: to the end",
    },
    "cache_test": {
        f"sequence, new, size = ([{ids}], [], 2)": "another prompt that shows all bugs"
        for ids in (
            *("66, 66, 67, 68", "64, 66, 67, 68", "65, 67, 67, 68", "65, 65, 67, 68"),
            *("65, 66, 68, 68", "65, 66, 66, 68", "65, 66, 67, 69", "65, 66, 67, 67"),
        )
    }
    | {"logits_of(sequence, sequence, chunk_size=size)": "new tokens hide no bug"},
    "hits": {
        "for end in range(best, len(prompt), block_size):": "0 tokens, or those found, are equal",
        "range(block_size, len(prompt) + 2, block_size)}": "such an end is no end of a block",
    },
}

OTHER: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.MatMult: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Answer(NamedTuple):
    """A right answer: its source without types, and the names that it may use."""

    code: str
    known: Mapping[str, Any]


class Mutant(NamedTuple):
    """A right answer with one edit, and what the edit is."""

    code: str
    edit: str
    reason: str = ""  # why it is equivalent, if its kind says so


class Judged(NamedTuple):
    """What a check said, and what kind of word that is: one of KINDS."""

    kind: str
    said: str


KINDS = ("accepted", "equivalent", "a slip", "an error", "other facts", "open", "raised", "no end")


class TimeIsUp(BaseException):
    """No `except Exception` of a check or of an answer stops it."""


# -- answers --------------------------------------------------------------------------------------


def exercises() -> dict[str, Any]:
    """The exercises of the tests, by name: check, right answers, slips."""
    sys.path.insert(0, str(TESTS))
    found: dict[str, Any] = {}
    for name in MODULES:
        found |= import_module(name).EXERCISES
    return found


def answers(name: str, exercise: Any) -> list[Answer]:
    """Right answers of the tests that are written out, and the one of this file."""
    right = import_module("exercises").RIGHT.get(name)
    found: dict[str, Answer] = {}
    for one in [right, *exercise.right]:
        is_own = isinstance(one, type) or (isinstance(one, FunctionType) and not one.__closure__)
        if not is_own or getattr(one, "__name__", "<lambda>") == "<lambda>":
            continue
        try:
            source = dedent(inspect.getsource(one))
        except (OSError, TypeError):  # made by exec or by type(...)
            continue
        code = plain(source)
        found.setdefault(code, Answer(code, vars(sys.modules[one.__module__])))
    several = [*found.values()][:STYLES]
    if name in WRITTEN:
        several.append(Answer(plain(WRITTEN[name].strip()), {"torch": torch, "math": math}))
    return several


def plain(source: str) -> str:
    """The source without types, docstrings and decorators."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None and len(node.body) > 1:
                del node.body[0]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, field, [_without_type(item) for item in value])
    return ast.unparse(ast.fix_missing_locations(tree))


def _without_type(node: Any) -> Any:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.Assign([node.target], node.value)
    return node


# -- edits ----------------------------------------------------------------------------------------


def mutants(code: str) -> Iterator[Mutant]:
    """The code with each edit, every result once."""
    tree = ast.parse(code)
    seen = {code}
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        inside = [*ast.walk(function)]
        stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names = [*(arg.arg for arg in function.args.args), *sorted(stored)]
        for node in inside:
            is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            for fields in changes(node, names):
                old = {field: getattr(node, field) for field in fields}
                _set(node, fields)
                new = ast.unparse(tree)
                _set(node, old)
                if new not in seen:
                    seen.add(new)
                    why = ANY_ORDER if is_sum and "left" in fields else ""
                    yield Mutant(new, edit(code, new), why)


def _set(node: ast.AST, fields: Mapping[str, object]) -> None:
    for field, value in fields.items():
        setattr(node, field, value)


def changes(node: ast.AST, names: list[str]) -> Iterator[Mapping[str, object]]:
    """The edits of a node: fields and what stands there then."""
    match node:
        case ast.BinOp():
            if other := OTHER.get(type(node.op)):
                yield {"op": other()}
            if not isinstance(node.op, ast.Mult):
                yield {"left": node.right, "right": node.left}
        case ast.BoolOp():
            yield {"op": OTHER[type(node.op)]()}
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield {"ops": [OTHER[type(op)]()]}
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield {"value": value + 1}
            yield {"value": value - 1}
        case ast.Name(id=name, ctx=ast.Load()) if name in names:
            yield from ({"id": other} for other in names if other != name)
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.UnaryOp):
            yield {field: value.operand}
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.UnaryOp):
                    yield {field: [*value[:i], item.operand, *value[i + 1 :]]}
            if len(value) > 1 and all(isinstance(item, ast.stmt) for item in value):
                yield from ({field: lines} for lines in _dropped_or_swapped(value))


def _dropped_or_swapped(lines: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    for i, line in enumerate(lines):
        if not isinstance(line, ast.Return):
            yield [*lines[:i], *lines[i + 1 :]]
        if i and not _is_in_any_order(lines[i - 1], line):
            yield [*lines[: i - 1], line, lines[i - 1], *lines[i + 1 :]]


def _is_in_any_order(one: ast.stmt, other: ast.stmt) -> bool:
    """Two assignments that have nothing to do with one another."""
    if not all(isinstance(line, ast.Assign | ast.AugAssign) for line in (one, other)):
        return False
    named = [{n.id for n in ast.walk(line) if isinstance(n, ast.Name)} for line in (one, other)]
    stored = [{_root(n) for n in ast.walk(line) if _is_stored(n)} for line in (one, other)]
    if all(any(isinstance(n, ast.Call) for n in ast.walk(line)) for line in (one, other)):
        return not named[0] & named[1]  # a call may change what it gets
    return not (stored[0] & named[1] or named[0] & stored[1])


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, ast.Tuple)


def _root(node: ast.AST) -> str:
    """The name that `name.field[0]` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return ast.unparse(node)


def edit(old: str, new: str) -> str:
    """The lines that differ, `old => new`; or the one that was moved, and to where."""
    diff = [*difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")][2:]
    gone, come = ([d[1:].strip() for d in diff if d[0] == sign] for sign in "-+")
    if gone == come:
        at = next(d for d in diff if d.startswith("@@ -") and "+" in d).split()
        return f"moved: {' | '.join(gone)} ({' '.join(at[1:-1])})"
    return f"{' | '.join(gone)}  =>  {' | '.join(come)}".rstrip()


# -- verdicts -------------------------------------------------------------------------------------


def made(code: str, known: Mapping[str, Any], file: str) -> Any:
    """The function or class that the code defines; its source can be read."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    space = dict(known)
    exec(compile(code, file, "exec"), space)
    tree = ast.parse(code).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.ClassDef)
    return space[tree.name]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeIsUp if what is inside takes longer."""

    def stop(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(name: str, check: Callable[[Any], Verdict], mutant: Mutant, answer: Answer) -> Judged:
    """What the check says of a mutant at the first try."""
    wrong_answers.cache_clear()
    try:
        with at_most(SECONDS):
            verdict = check(made(mutant.code, answer.known, f"<{name}: {mutant.edit}>"))
    except TimeIsUp:
        return Judged("no end", f"stopped after {SECONDS} seconds")
    except (Exception, SystemExit) as error:  # a check must not
        return Judged("raised", f"the check raised {type(error).__name__}: {error}")
    said = repr(verdict)
    if verdict.ok is None:
        return Judged("open", said)
    if verdict.ok:
        reason = _equivalent(name, mutant.edit) or mutant.reason * (name not in ADDS_LISTS)
        return Judged("equivalent", f"{said}\n  {reason}") if reason else Judged("accepted", said)
    if "(a function with only this mistake " in said:
        return Judged("a slip", said)
    return Judged("an error" if " raised " in said.partition("\n")[0] else "other facts", said)


def _equivalent(name: str, edit: str) -> str:
    known = EQUIVALENT.get(name, {})
    return next((why for end, why in known.items() if edit.endswith(end)), "")


def main(names: list[str]) -> int:
    """Print every edit with its verdict, and how many there are of each kind, by exercise.

    1 if an edit was accepted, or a check raised.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the mutants
    known = exercises()
    if unknown := [name for name in names if name not in known]:
        print(f"no such exercise: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    counts: dict[str, Counter[str]] = {}
    for name in names or [name for name in known if name not in APPENDICES]:
        counts[name] = Counter()
        for style, answer in enumerate(answers(name, known[name]), 1):
            unchanged = judged(name, known[name].check, Mutant(answer.code, ""), answer)
            if unchanged.kind != "accepted":
                print(f"[{name} {style}] the right answer itself:\n{unchanged.said}\n")
                counts[name]["raised"] += 1
                continue
            for i, mutant in enumerate(mutants(answer.code), 1):
                found = judged(name, known[name].check, mutant, answer)
                counts[name][found.kind] += 1
                print(f"[{name} {style}.{i}: {found.kind}] {mutant.edit}\n{found.said}\n")
    print(table(counts))
    return int(any(count["accepted"] or count["raised"] for count in counts.values()))


def table(counts: Mapping[str, Counter[str]]) -> str:
    """A line for each exercise and one for all: mutants, and how many of each kind."""
    rows = {**counts, "all": sum(counts.values(), Counter[str]())}
    wide = max(map(len, rows))
    lines = [f"{'':{wide}}  mutants  {'  '.join(KINDS)}"]
    for name, count in rows.items():
        cells = "  ".join(f"{count[kind]:{len(kind)}}" for kind in KINDS)
        lines.append(f"{name:{wide}}  {count.total():7}  {cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
