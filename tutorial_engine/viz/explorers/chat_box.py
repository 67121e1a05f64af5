"""A chat in a notebook: a box to write in, the answer as it comes, and what each turn took.

Stock ipywidgets around a `lab.conversation.Conversation`; saved or exported it is its text.
"""

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from tutorial_engine.lab.conversation import Conversation, Turn
from tutorial_engine.viz.explorers.explorer import button, live_view
from tutorial_engine.viz.tokens import escape


class ChatBox:
    """Send a line, and read the answer while it is computed. `stop` is the kernel's interrupt.

    It runs in the kernel as a cell does: other cells wait until the answer is there.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.line = widgets.Text(
            placeholder="write to the model, then Enter or Send",
            layout=widgets.Layout(width="min(620px, 80%)"),
        )
        self.send = button("Send", "run the model", self._send, "80px")
        self.log = widgets.HTML(layout=widgets.Layout(max_width="720px"))
        self.line.on_msg(self._heard)
        self.view = widgets.VBox([self.log, widgets.HBox([self.line, self.send])])
        self._show("", "")

    def _heard(self, _: object, content: Any, __: object) -> None:
        """Enter was pressed. (`value` changes when the box loses the focus, too.)"""
        if content.get("event") == "submit":
            self._send()

    def _send(self) -> None:
        question = self.line.value.strip()
        if not question:
            return
        self.line.value, self.line.disabled, self.send.disabled = "", True, True
        self._show(question, "…")
        try:
            self.conversation.say(question, lambda text: self._show(question, text))
        except Exception as error:  # no room for the prompt; or what runs in the engine raised
            self.line.value = question
            self._show("", "", f"{type(error).__name__}: {error}")
        else:
            self._show("", "")
        finally:
            self.line.disabled = self.send.disabled = False

    def _show(self, question: str, answer: str, error: str = "") -> None:
        """All turns, and the one that is being answered."""
        turns = [_as_html(turn.question, turn.answer, turn.line) for turn in self.turns]
        if question:
            turns.append(_as_html(question, answer, ""))
        if error:
            turns.append(f'<p role="alert" style="color:#D55E00">{escape(error)}</p>')
        self.log.value = f'<div aria-live="polite">{"".join(turns)}</div>'

    @property
    def turns(self) -> Sequence[Turn]:
        """What was said so far."""
        return self.conversation.turns

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.turns)) or "A chat: nothing was said yet."

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return live_view(self.view, **options) | {"text/plain": repr(self)}


def _as_html(question: str, answer: str, line: str) -> str:
    style = "margin:.3em 0;padding:.3em .6em;border-radius:.4em;white-space:pre-wrap"
    return (
        f'<p style="{style};background:#0072B222"><b>you</b> {escape(question)}</p>'
        f'<p style="{style};background:#009E7322"><b>model</b> {escape(answer)}</p>'
        f'<p style="margin:0 .6em .6em;font-size:.85em;opacity:.75">{escape(line)}</p>'
    )
