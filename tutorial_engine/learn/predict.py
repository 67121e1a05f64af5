"""Commit to an answer, run the cell, see who was right.

Knows questions and the learner's choices; knows no engine. The truth is handed in by the cell that
computed it.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from tutorial_engine.viz.explorers.explorer import live_view
from tutorial_engine.viz.tokens import escape

UNDECIDED = "(not decided)"
REVEAL = "TE_REVEAL"  # set where nobody chooses: to 1 in the solved notebooks, to 0 in a build


class Question:
    """One question with its options: radio buttons when live, plain text otherwise."""

    def __init__(self, text: str, options: Sequence[str]) -> None:
        self.text, self.options = text, tuple(options)
        self.truth: str | None = None
        self.buttons = widgets.RadioButtons(
            options=[*self.options, UNDECIDED],
            value=UNDECIDED,
            layout=widgets.Layout(width="max-content"),
        )
        self.view = widgets.VBox([widgets.HTML(f"<b>Predict:</b> {escape(text)}"), self.buttons])

    @property
    def choice(self) -> str | None:
        """What the learner chose, None while undecided."""
        return None if self.buttons.value == UNDECIDED else self.buttons.value

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        lines = "\n".join(f"  ( ) {option}" for option in self.options)
        return live_view(self.view, **options) | {"text/plain": f"Predict: {self.text}\n{lines}"}


class Predictions:
    """The learner's predictions in one notebook, kept and scored.

    With the notebook's number ("03") each choice is also kept in a file beside the notebook,
    my_predictions_03.json, and is there again after a restart. Who deletes it begins afresh.
    """

    def __init__(self, notebook: str | None = None) -> None:
        self.questions: dict[str, Question] = {}
        self.file: Path | None = None
        if notebook is not None and REVEAL not in os.environ:
            self.file = Path.cwd() / f"my_predictions_{notebook}.json"
        self.kept = {} if self.file is None else _read(self.file)

    def ask(self, name: str, text: str, options: Sequence[str]) -> Question:
        """Show a question. Asking again (its cell is run again) keeps the choice and the answer."""
        earlier = self.questions.get(name)
        question = Question(text, options)
        if earlier is not None and earlier.choice in question.options:
            question.buttons.value = earlier.choice
            question.truth, question.buttons.disabled = earlier.truth, earlier.buttons.disabled
        elif self.kept.get(name) in question.options:
            question.buttons.value = self.kept[name]
        question.buttons.observe(lambda _: self._keep(name, question.choice), "value")
        self.questions[name] = question
        return question

    def _keep(self, name: str, choice: str | None) -> None:
        """Write the choices to the file; where that is not possible they last as long as this."""
        self.kept[name] = choice
        if self.file is not None:
            with suppress(OSError):
                self.file.write_text(json.dumps(self.kept, indent=1), encoding="utf-8")

    def reveal(self, name: str, truth: Any) -> bool:
        """Print the right answer beside the learner's choice, which can no longer be changed.

        `truth` is the text of an option, its index, or a value that is written as an option is. Who
        has not chosen is asked to, and the return value is False: keep what would give the answer
        away behind it. With TE_REVEAL=1 in the environment the answer shows without a choice.

        ValueError for a question that was not asked and for a truth that is none of its options.
        """
        if name not in self.questions:
            raise ValueError(f"no question {name!r} was asked; run its cell first")
        question = self.questions[name]
        question.truth = _option(question.options, truth)
        if os.environ.get(REVEAL) == "1":
            question.buttons.value = question.truth
            said = ""
        elif question.choice is None:
            print("Choose an answer above, then run this cell again.")
            return False
        elif question.choice == question.truth:
            said = " ✔ As you predicted."
        else:
            said = f" ✘ You predicted: {question.choice}. Read on to see why."
        question.buttons.disabled = True
        print(f"Answer: {question.truth}.{said}")
        return True

    def made(self, name: str) -> bool:
        """Whether the learner has chosen an answer: for what comes after `reveal`."""
        return self.questions[name].choice is not None

    def score(self) -> str:
        """How many predictions were made and how many came true."""
        asked = [q for q in self.questions.values() if q.truth is not None]
        made = [q for q in asked if q.choice is not None]
        right = sum(q.choice == q.truth for q in made)
        return f"{right} of {len(made)} predictions were right; {len(asked) - len(made)} not made."


def _read(file: Path) -> dict[str, str | None]:
    """Question → choice; nothing where there is no such file, or something else in it."""
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _option(options: Sequence[str], truth: Any) -> str:
    """The option that is meant by its text, its index or a value of that text."""
    value = truth.item() if hasattr(truth, "item") else truth  # a number of torch or numpy
    if str(value) in options:
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
        return options[value]
    raise ValueError(f"{truth!r} is none of the options {options}, nor the index of one")
