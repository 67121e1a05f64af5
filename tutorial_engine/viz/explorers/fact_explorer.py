"""An explorer of where the cache holds what a text says.

It replaces cells of one layer a step; `fact_picture` shows all cells. Knows `lab.two_texts`, which
replaces.
"""

from typing import NamedTuple

import ipywidgets as widgets
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import BOLD, MARGIN, RIGHT, Sheet
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.explorers.explorer import Explorer, choice, text
from tutorial_engine.viz.tokens import token_names
from tutorial_engine.viz.views.fact_picture import (
    SHOWN,
    WIDE,
    Cells,
    Fact,
    Likely,
    draw_top,
    ink_of,
    likely,
)
from tutorial_engine.viz.views.transplant_picture import PARTS

TEXT = "The capital of France is the city of"
OTHER = "The capital of Italy is the city of"
MAX_TOKENS = 48  # of a text: each cell runs the rest of it
ALL = "all"


# -- the explorer ---------------------------------------------------------------------------------


class Layers(NamedTuple):
    """A choice, in each layer alone: the next tokens, and P [layers] of the other answer."""

    after: tuple[Likely, ...]
    wanted: Tensor


class FactExplorer(Explorer):
    """Type two texts; replace K, V or both of a head or all in one layer a step.

    What is replaced is the slots in which they differ. All layers of a choice run at once, and are
    kept.
    """

    title = "Fact explorer"
    step_name = "layer"
    stands = "same"

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        first: str = TEXT,
        second: str = OTHER,
        replace: str = "V",
    ) -> None:
        """`replace`: "V", "K" or "K and V"."""
        self.model, self.tokenizer = model, tokenizer
        self.heads = tuple(range(model.config.num_key_value_heads))
        self.ran: tuple[str, str] | None = None  # the texts that are drawn
        head = widgets.Dropdown(
            options=[ALL, *self.heads],
            value=ALL,
            description="head",
            layout=widgets.Layout(width="150px", margin="2px 12px 2px 0"),
        )
        super().__init__(
            {
                "text": text("text", first, "420px"),
                "other": text("other text", second, "420px"),
                "replace": choice("replace", [*PARTS], replace, "190px"),
                "head": head,
            }
        )

    def rerun(self) -> int:
        """Run new texts with each cell replaced; for another choice, each of its layers."""
        texts = self.value("text"), self.value("other")
        if texts != self.ran:
            self._run(*texts)
            self.ran = texts
        answer, other = self.two.answers
        if answer == other:
            self.note = (
                "Both texts have the same answer, so nothing can be seen: change one of them."
            )
        head = self.value("head")
        self.which = PARTS[self.value("replace")]
        self.replaced = self.heads if head == ALL else (head,)
        self.layers = self._layers(self.which, self.replaced)
        return len(self.layers.after)

    def _run(self, first: str, second: str) -> None:
        count = len(self.tokenizer.encode(first).ids)
        if count > MAX_TOKENS:
            raise ValueError(
                f"The text has {count} tokens; each cell runs it, and {MAX_TOKENS} are the most. "
                "Shorten it."
            )
        two = TwoTexts.of(self.model, self.tokenizer, first, second)
        self.two, self.known = two, dict[tuple[str, tuple[int, ...]], Layers]()
        parts = [
            torch.stack([self._layers(kind, (head,)).wanted for head in self.heads], 1)
            for kind in "kv"
        ]
        before = likely(two.after([dict])[0])
        self.fact = Fact(two, self.tokenizer, torch.stack(parts, -1), before)

    def _layers(self, which: str, heads: tuple[int, ...]) -> Layers:
        """Each layer's replacement alone, kept for these texts."""
        if (which, heads) not in self.known:
            layers = range(self.model.config.num_hidden_layers)
            edits = [self.two.replace([layer], which, heads) for layer in layers]
            probs = self.two.after(edits)
            after = tuple(likely(row) for row in probs)
            self.known[which, heads] = Layers(after, probs[:, self.two.answers[1]].clone())
        return self.known[which, heads]

    def _chosen(self, step: int) -> Cells:
        return Cells(step, self.which, self.replaced)

    def scene(self, step: int) -> Scene:
        """The grid with what is replaced framed, and the next tokens before it and after it."""
        fact, chosen, after = self.fact, self._chosen(step), self.layers.after[step]
        sheet = Sheet(WIDE, 0)
        y = 18 + draw_top(sheet, fact, chosen, f"Layer {step}: {fact.told(after)}", 18)
        _likeliest(sheet, "before", fact, MARGIN, y, "the next token as it is", fact.before)
        title = f"after {fact.numbers_of(chosen):,} numbers are replaced"
        _likeliest(sheet, "after", fact, WIDE / 2 + MARGIN, y, title, after)
        sheet.height = y + 24 * (SHOWN + 1) + 34
        sheet.tip_at, sheet.hint = (MARGIN, sheet.height - 10), "hover over a cell to read it"
        sheet.parts = [[(0, 0, WIDE, sheet.height)]]
        return sheet

    def caption(self, step: int) -> str:
        """What is replaced, and what is answered then."""
        fact, chosen, after = self.fact, self._chosen(step), self.layers.after[step]
        word, other = fact.slot_words
        p = f", and {fact.wanted} has {float(self.layers.wanted[step]):.3f}"
        return (
            f"{fact.called(chosen)}, {fact.numbers_of(chosen):,} of the "
            f"{fact.numbers(fact.cells.numel()):,} numbers that the cache holds for {word}, are "
            f"replaced by those of {other}: {fact.told(after)}"
            f"{'' if after.ids[0] == fact.two.answers[1] else p}."
        )


def _likeliest(
    sheet: Sheet, name: str, fact: Fact, x: float, y: float, title: str, likely: Likely
) -> None:
    """The likeliest next tokens, a bar each."""
    sheet.text(f"{name}.title", x, y + 14, title, 14, **BOLD)
    labels = token_names(fact.tokenizer, likely.ids)
    for i, (token, p) in enumerate(zip(likely.ids, likely.probs, strict=True)):
        at = y + 24 * (i + 1)
        label = cut_to(labels[token], 100, 14)
        sheet.text(f"{name}.{i}.token", x + 104, at + 15, label, 14, **RIGHT)
        sheet.bar(f"{name}.{i}", (x + 114, at + 3, 190, 15), p, ink_of(fact, token))
        sheet.text(f"{name}.{i}.p", x + 312, at + 15, f"{p:.3f}", 14)
