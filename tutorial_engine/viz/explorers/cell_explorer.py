"""The cells explorer: change the table by hand, see K and V.

Runs the real model over real cells; each operation is a step that can be looked at again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import prefill
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.explorers.explorer import Explorer, button, number, text
from tutorial_engine.viz.run.cell_steps import (
    CellsSnapshot,
    Changes,
    describe,
    find_changes,
    take_snapshot,
)
from tutorial_engine.viz.tokens import token_names, visible
from tutorial_engine.viz.views.cell_view import (
    MAX_CELLS,
    MAX_LAYERS,
    Scale,
    cells_scene,
    heat_scale,
)

MAX_POS, MAX_SEQ = 999, 5  # larger numbers would not fit into the table; looks differ up to here

APPEND, SHIFT, RESET, AGAIN = "append", "apply K-shift", "reset", "start over"
# operation -> the knobs it reads, and what it does
OPERATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    APPEND: (("seq", "text"), "run the text's tokens through the model, at the sequence's end"),
    "seq_rm": (("seq", "p0", "p1"), "the sequence leaves its cells at positions p0 to p1 − 1"),
    "seq_cp": (("seq", "dst", "p0", "p1"), "dst shares these cells of seq; nothing is copied"),
    "seq_keep": (("seq",), "all other sequences leave their cells"),
    "seq_add": (("seq", "p0", "p1", "delta"), "positions p0 to p1 − 1 move by delta"),
    "seq_unshare": (("seq", "p0", "p1"), "cells of its own for what seq shares: K, V are copied"),
    SHIFT: ((), "turn the keys that lag, in every layer; a forward does it by itself"),
    RESET: ((), "empty all cells"),
}


class Operation(NamedTuple):
    """One thing to do with the cells: a key of OPERATIONS, and the knobs that it reads."""

    name: str
    seq: int = 0
    dst: int = 1
    p0: int = 0
    p1: int = -1
    delta: int = 0
    text: str = ""

    def __str__(self) -> str:
        """As a call: `seq_cp(0, 1, 0, 4)`."""
        knobs = OPERATIONS[self.name][0]
        if self.name == APPEND:
            return f"append “{visible(self.text)}” to sequence {self.seq}"
        if not knobs:
            return self.name
        numbers = [str(getattr(self, knob)).replace("-", "−") for knob in knobs]
        return f"{self.name}({', '.join(numbers)})"


class CellStep(NamedTuple):
    """A moment of the history: what was done, and what was there afterwards."""

    done: str
    cells: CellsSnapshot
    changes: Changes


def story(text: str, num_tokens: int) -> list[Operation]:
    """A text, a second sequence that shares all of it but the last token, a hole, and its filling.

    Needs as many cells as tokens, and two more.
    """
    shared = num_tokens - 1
    return [
        Operation(APPEND, 0, text=text),
        Operation(APPEND, 0, text=" Ben"),
        Operation("seq_cp", 0, 1, 0, shared),
        Operation(APPEND, 1, text=" Anna"),
        Operation("seq_rm", 0, p0=shared),
        Operation(APPEND, 1, text=" and"),
    ]


def append_tokens(
    model: CausalLM, cells: CellKVCache, seq_id: int, token_ids: Sequence[int]
) -> None:
    """Run tokens at the end of a sequence that was made by hand: its cells say where it ends.

    ValueError where there is no room for them.
    """
    start = cells.table.next_pos(seq_id)
    request = Request(seq_id, [0] * start + [*token_ids])  # type: ignore[arg-type]  # by number
    request.num_computed_tokens = start  # what is before has run, and is not looked at
    prefill(model, cells, [request])


class CellExplorer(Explorer):
    """Append, share, remove and move tokens by hand; see the table and every layer's K and V.

    It opens on the end of a `script`: unless told otherwise, the story of `text`, a second sequence
    that shares its beginning, and a hole that is filled.
    """

    title = "Cells explorer"
    zoom = 1.0
    stands = "last"  # the newest operation

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        text: str = "How are you",
        num_cells: int = 8,
        script: Sequence[Operation] | None = None,
        most_layers: int = MAX_LAYERS,
    ) -> None:
        if not 1 <= num_cells <= MAX_CELLS:
            raise ValueError(f"give 1 to {MAX_CELLS} cells, more cannot be seen; got {num_cells}")
        self.model, self.tokenizer, self.num_cells = model, tokenizer, num_cells
        self.most_layers = most_layers
        count = len(tokenizer.encode(text).ids)
        if count < 2 and script is None:
            raise ValueError(f"the story needs a text of at least 2 tokens, {text!r} has {count}")
        self.script = story(text, count) if script is None else list(script)
        self.steps: list[CellStep] = []
        self._wanted: Operation | None = None
        tips = {AGAIN: "the recorded beginning, without what you did"}
        for name, (reads, what) in OPERATIONS.items():
            tips[name] = f"{what} ({', '.join(reads)})" if reads else what
        buttons = {
            name: button(name, tip, partial(self._press, name)) for name, tip in tips.items()
        }
        super().__init__(_knobs(" Ella"), buttons)

    def rerun(self) -> int:
        """Do the operation whose button was pressed, if one was; knobs alone change nothing."""
        wanted, self._wanted = self._wanted, None
        if not self.steps:
            self._start()
        elif wanted is not None:
            self._apply(wanted)
        return len(self.steps)

    def scene(self, step: int) -> Scene:
        """Table, K and V after the step's operation, with what it changed outlined."""
        moment = self.steps[step]
        title = f"step {step} of {self.num_steps - 1} · {moment.done}"
        texts, layers = self._num_texts, self.most_layers
        return cells_scene(moment.cells, moment.changes, title, self._scale, texts, layers)

    def caption(self, step: int) -> str:
        """What was done, what changed by it, and what the cells hold."""
        moment = self.steps[step]
        before = self.steps[step - 1].cells if step else None
        return (
            f"Step {step} of {self.num_steps - 1}, {moment.done}: {describe(moment.cells, before)}"
        )

    # -- inside

    def _press(self, name: str) -> None:
        """A button: its operation with the present knobs."""
        if name == AGAIN:
            self.steps = []
        else:
            used = {knob: self.value(knob) for knob in OPERATIONS[name][0]}
            self._wanted = Operation(name, **used)
        self._rerun()

    def _start(self) -> None:
        """New cells, and the script's operations."""
        self.cache = CellKVCache.from_config(
            self.model.config, self.num_cells, dtype=self.model.dtype, device=self.model.device
        )
        self.labels: dict[int, str] = {}
        self._note("the beginning")
        for operation in self.script:
            self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        """Do it to the cells and note what came of it. ValueError, and nothing done, else."""
        try:
            self._actions[operation.name](operation)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}.") from error
        self._note(str(operation))

    @property
    def _actions(self) -> dict[str, Callable[[Operation], Any]]:
        cells = self.cache
        return {
            APPEND: self._append,
            "seq_rm": lambda o: cells.seq_rm(o.seq, o.p0, o.p1),
            "seq_cp": lambda o: cells.seq_cp(o.seq, o.dst, o.p0, o.p1),
            "seq_keep": lambda o: cells.seq_keep(o.seq),
            "seq_add": self._add,
            "seq_unshare": self._unshare,
            SHIFT: lambda _: cells.apply_shifts(),
            RESET: lambda _: [cells.seq_rm(seq_id) for seq_id in cells.table.seq_ids],
        }

    def _append(self, operation: Operation) -> None:
        ids = self.tokenizer.encode(operation.text).ids
        if not ids:
            raise ValueError("there is no text: type some, with a blank before a new word")
        if self.cache.table.next_pos(operation.seq) + len(ids) - 1 > MAX_POS:
            raise ValueError(f"positions end at {MAX_POS} here")
        empty = self.num_cells - self.cache.table.num_used
        if len(ids) > empty:
            raise ValueError(
                f"{len(ids)} tokens need a cell each, {empty} of {self.num_cells} are empty: "
                "remove a sequence, or make more cells"
            )
        append_tokens(self.model, self.cache, operation.seq, ids)
        new = self.cache.table.cells_of(operation.seq)[-len(ids) :]
        names = token_names(self.tokenizer, ids)
        self.labels |= {cell: names[i] for cell, i in zip(new, ids, strict=True)}

    def _add(self, operation: Operation) -> None:
        if self.cache.table.next_pos(operation.seq) - 1 + operation.delta > MAX_POS:
            raise ValueError(f"positions end at {MAX_POS} here")
        self.cache.seq_add(operation.seq, operation.p0, operation.p1, operation.delta)

    def _unshare(self, operation: Operation) -> None:
        for old, new in self.cache.seq_unshare(operation.seq, operation.p0, operation.p1):
            self.labels[new] = self.labels[old]

    def _note(self, done: str) -> None:
        """Write down what the cells hold now, as the history's newest step."""
        before = self.steps[-1].cells if self.steps else None
        now = take_snapshot(self.cache, self.labels, before)
        changes = find_changes(before, now) if before is not None else Changes((), (), ())
        self.steps.append(CellStep(done, now, changes))
        moments = [step.cells for step in self.steps]
        self._scale: Scale = heat_scale(moments)  # one for all steps: equal numbers, equal colours
        self._num_texts = max(len(moment.seq_ids) for moment in moments)


def _knobs(words: str) -> dict[str, Any]:
    """What the operations read: numbers that fit the table, and a text."""
    return {
        "text": text("text", words, "240px"),
        "seq": number("seq", 0, 0, MAX_SEQ, "110px"),
        "dst": number("dst", 1, 0, MAX_SEQ, "110px"),
        "p0": number("p0", 0, -1, MAX_POS, "110px"),
        "p1": number("p1", -1, -1, MAX_POS, "110px"),
        "delta": number("delta", -1, -MAX_POS, MAX_POS, "110px"),
    }
