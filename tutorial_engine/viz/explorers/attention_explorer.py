"""The attention explorer: prompt, layer, head, and one query a step.

Beside what a head looks at stands what the model predicts, so that the two can be compared.
"""

from functools import partial
from typing import Any

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.flow import (
    Piece,
    bar,
    cell,
    column,
    framed,
    panel,
    row,
    show,
    table,
    words,
)
from tutorial_engine.viz.drawing.letters import cut_to
from tutorial_engine.viz.drawing.parts import (
    BOLD,
    DEAF,
    FAINT,
    MARGIN,
    RIGHT,
    SHADE,
    Grid,
    Sheet,
    Style,
    shade,
)
from tutorial_engine.viz.drawing.scene import Scene
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.explorers.explorer import Explorer, button, number, text
from tutorial_engine.viz.run.attention_weights import look_inside
from tutorial_engine.viz.tokens import token_labels, token_names

MAX_TOKENS = 64
MAX_HEADS = 144  # that have a button each
MAX_BARS = 24  # a longer prompt has bars for its largest weights only
MAX_NAMES = 30  # a longer prompt names only the chosen row and column of the map
LEVELS = 64  # colours of the small cells of such a map
SHOWN = 3  # predictions
WIDE, SIDE, NAMES, ABOVE = 1000.0, 408.0, 100.0, 72.0  # picture, map, names of its rows and columns
SIZE = 13.0  # of their letters: on a screen of 390 pixels they are 9 high
NUMBERS, NEXT = 112.0, 138.0  # how wide the bars and the predictions are


class AttentionExplorer(Explorer):
    """Who looks at whom: a head's map, one query's weights, and what the model predicts there."""

    title = "Attention explorer"
    step_name = "query"
    stands = "last"  # the token whose logits choose the next

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompt: str,
        layer: int = 0,
        head: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ran_prompt: str | None = None
        config = model.config
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        self.heads = {
            (i, j): button("", f"show layer {i}, head {j}", partial(self.turn, layer=i, head=j))
            for i in range(layers)
            for j in range(heads)
            if layers * heads <= MAX_HEADS
        }
        super().__init__(
            {
                "prompt": text("prompt", prompt, "520px"),
                "layer": number("layer", layer, 0, layers - 1, "130px"),
                "head": number("head", head, 0, heads - 1, "130px"),
            },
            panel=self._grid(layers, heads) if self.heads else None,
        )

    # -- the grid of heads --------------------------------------------------------------------

    def _grid(self, layers: int, heads: int) -> widgets.Widget:
        """A button for each head, a row for each layer; folded until somebody opens it."""
        children, centre = [widgets.Label("")], widgets.Layout(justify_content="center")
        children += [widgets.Label(f"head {i}", layout=centre) for i in range(heads)]
        for layer in range(layers):
            children.append(widgets.Label(f"layer {layer}"))
            children += [self.heads[layer, head] for head in range(heads)]
        for weights in self.heads.values():
            weights.layout = widgets.Layout(width="auto", height="26px", margin="1px", padding="0")
        columns = f"70px repeat({heads}, 58px)"
        grid = widgets.GridBox(children, layout=widgets.Layout(grid_template_columns=columns))
        return widgets.Accordion([grid], titles=["every head's largest share: choose a head"])

    def _draw(self) -> None:
        super()._draw()
        if self._changing or not self.heads:
            return
        largest = self.look.weights[:, :, self.step].amax(-1).tolist()
        chosen = self.value("layer"), self.value("head")
        for (layer, head), weights in self.heads.items():
            weight, now = largest[layer][head], (layer, head) == chosen
            with weights.hold_sync(), weights.style.hold_sync():
                weights.description = f"▸{weight:.2f}" if now else f"{weight:.2f}"
                weights.style.button_color = shade(weight)
                weights.style.text_color = PAPER if weight < 0.6 else INK
                weights.style.font_weight = "bold" if now else "normal"
                weights.layout.border = f"3px solid {RED}" if now else f"1px solid {RULE}"

    # -- the picture --------------------------------------------------------------------------

    def rerun(self) -> int:
        """Run the model on a new prompt with the backend that shows its weights."""
        prompt = self.value("prompt")
        if prompt != self.ran_prompt:
            ids = self.tokenizer.encode(prompt).ids
            if not ids:
                raise ValueError("The prompt is empty: type at least one character.")
            if len(ids) > MAX_TOKENS:
                raise ValueError(
                    f"The prompt has {len(ids)} tokens; the picture holds {MAX_TOKENS}. Shorten it."
                )
            self.look = look_inside(self.model, ids)
            self.ids, self.labels = ids, token_labels(self.tokenizer, ids)
            self.ran_prompt = prompt
        return len(self.labels)

    def _now(self) -> list[list[float]]:
        """The weights of the chosen head, by query and key."""
        return self.look.weights[self.value("layer"), self.value("head")].tolist()

    def _predicted(self, step: int) -> list[tuple[int, str, float]]:
        """The likeliest next tokens: id, label and probability, the likeliest first."""
        top = self.look.probs[step].topk(min(SHOWN, self.look.probs.shape[-1]))
        ids = top.indices.tolist()
        names = token_names(self.tokenizer, ids)
        return [(i, names[i], p) for i, p in zip(ids, top.values.tolist(), strict=True)]

    def scene(self, step: int) -> Scene:
        """The head's map with the query's row framed, that row as bars, and the predictions."""
        layer, head, weights = self.value("layer"), self.value("head"), self._now()
        best = weights[step].index(max(weights[step]))
        sheet = Sheet(WIDE, 0)
        sheet.heading(f"layer {layer}, head {head}: row = query, column = key", size=14)
        place = "the last; " * (step == self.num_steps - 1) + "counted from 0"
        said = words(f"query {step} ({place})", 12, **FAINT).named("step")
        self._key(sheet)
        right = panel("", self._row(step, best, weights[step]))
        below = row(panel("", self._map(step, best, weights)), right, gap=42, align=1)
        return show(
            sheet, column(said, below, gap=3), 26, "hover over the map or a bar to read its share"
        )

    def _key(self, sheet: Sheet) -> None:
        """What the colours and the hatching mean, beside the heading."""
        scale = Piece(121, 12, lambda sheet, _, x, y: sheet.colour_scale("scale", (x, y, 121, 12)))
        least, largest, later = (words(each, 11, **FAINT) for each in ("share 0", "1", "forbidden"))
        x = WIDE - MARGIN
        keys = row(cell(20, 12, "reserved", rx=0), later), row(least, scale, largest)
        for name, piece in zip(("later", "shares"), keys, strict=True):
            x -= piece.wide
            piece.draw(sheet, name, x, 8)
            sheet.keys.insert(0, (x - 4, 5, piece.wide + 8, 20))
            x -= 28

    def _map(self, step: int, best: int, weights: list[list[float]]) -> Piece:
        """The chosen query is framed; a long prompt names only it and the key it looks at most."""
        n = self.num_steps
        pitch = SIDE / n if n <= MAX_NAMES else SIDE // n  # whole pixels for small cells

        def draw(sheet: Sheet, _: str, x: float, y: float) -> None:
            x, y = x + NAMES, y + ABOVE
            for i, label in enumerate(self.labels):
                at = (i + 0.5) * pitch + 0.35 * SIZE
                turned = Style(transform=f"rotate(-90 {x + at:.1f} {y - 6:.1f})")
                for name, chosen, room, where, style in (
                    ("row", step, NAMES - 6, (x - 6, y + at), RIGHT),
                    ("column", best, ABOVE - 6, (x + at, y - 6), turned),
                ):
                    if n <= MAX_NAMES or i == chosen:
                        look = style | (BOLD if i == chosen else FAINT)
                        sheet.text(f"{name}{i}", *where, cut_to(label, room, SIZE), SIZE, **look)
            grid = Grid(x, y, pitch, pitch, n)
            self._cells(sheet, weights, grid)
            for query in range(n - 1):
                box, who = grid.box(query * (n + 1) + 1, n - 1 - query), self._named("query", query)
                tip = f"{who} may not look at keys {query + 1} to {n - 1}: they come later"
                sheet.cell(f"future{query}", box, "reserved", tip=tip, rx=0, stroke="none")
            sheet.outline("frame", grid.box(step * n, n), 1, stroke=RED, stroke_width=2.5)

        return Piece(NAMES + SIDE, ABOVE + SIDE, draw)

    def _named(self, what: str, place: int) -> str:
        return f"{what} {place} “{self.labels[place]}”"

    def _cells(self, sheet: Sheet, weights: list[list[float]], grid: Grid) -> None:
        """A cell for each weight, which says it under the pointer.

        In a large map all cells of one colour are one path, for two thousand elements would make a
        browser slow: there a whole row says under the pointer where it looks most.
        """
        n, squares = self.num_steps, dict[int, list[str]]()
        for query, shares in enumerate(weights):
            who = self._named("query", query)
            for key, weight in enumerate(shares[: query + 1]):
                x, y, side, _ = box = grid.box(query * n + key)
                if n > MAX_NAMES:
                    square = f"M{x:g} {y:g}h{side:g}v{side:g}h-{side:g}z"
                    squares.setdefault(round(LEVELS * weight), []).append(square)
                else:
                    tip = f"{who} → {self._named('key', key)}: share {weight:.3f}"
                    sheet.rect(f"w{query}.{key}", box, shade(weight), tip, class_="te-cell")
        for level, drawn in sorted(squares.items()):
            look = SHADE | Style(fill=shade(level / LEVELS), shape_rendering="crispEdges")
            sheet.add(f"level{level}", "path", d="".join(drawn), **look)
        for query, shares in enumerate(weights if squares else []):
            largest, box = max(shares), grid.box(query * n, query + 1)
            most_to = self._named("key", shares.index(largest))
            who = f"{self._named('query', query)} → most to {most_to}"
            sheet.rect(f"w{query}", box, "transparent", f"{who}: share {largest:.3f}")

    def _row(self, step: int, best: int, weights: list[float]) -> Piece:
        """The weights of one query as bars; an arrow to the likeliest next token if they agree."""
        n, keys, lines = self.num_steps, list(range(self.num_steps)), list[list[Piece]]()
        if n > MAX_BARS:  # the largest, in the order of the text
            keys = sorted(sorted(range(step + 1), key=lambda k: -weights[k])[: MAX_BARS - 1])
        pitch, others = min(26.0, SIDE / min(n, MAX_BARS)), step + 1 - len(keys)
        tall, predicted = 0.7 * pitch, self._predicted(step)
        for key in keys:
            name, who = f"{key}  {self.labels[key]}", self._named("key", key)
            line = self._bar(name, who, weights[key], tall, **(BOLD if key == best else {}))
            hide = cell(NUMBERS, tall, "reserved", tip=f"{who}: later, hidden", rx=0, stroke="none")
            lines.append(line if key <= step else [words(name, 12, 104, **FAINT), hide])
        if others > 0:
            rest, name = sum(weights) - sum(weights[key] for key in keys), f"{others} other keys"
            lines.append(self._bar(name, f"{name} together", rest, tall, **FAINT))
        bars = table(lines, 6, 0, (104, NUMBERS, 28), pitch, across=[1])._replace(tall=SIDE)
        looks = words(f"{self._named('query', step)} looks at", 12.5, 280, **BOLD)
        ends = [words(each, 11, **FAINT) for each in ("", "0", "1")]
        scale = table([ends], 0, 0, (110, 56, 56), across=[0, 0, 1])
        left = column(looks._replace(wide=0), scale, bars, gap=3)
        same = predicted[0][0] == self.ids[best]
        heads = words("the model predicts", 12.5, **BOLD), words("as the next token", 12, **FAINT)
        title = column(*heads, gap=0)
        boxes = self._next(predicted, same)
        right = column(title, *boxes, gap=8)
        begin = left.tall - SIDE + (keys.index(best) + 0.5) * pitch
        end = (left.tall - right.tall) / 2 + title.tall + 8 + boxes[0].tall / 2

        def lead(sheet: Sheet, name: str, x: float, y: float) -> None:
            turns = ((6, begin), (14, begin), (14, end), (33, end))
            sheet.arrow(name, [(x + right, y + down) for right, down in turns], GREEN, 2)

        arrow = Piece(36, left.tall, lead if same else lambda *_: None).named("leads")
        return row(left, arrow, right, gap=0)

    def _bar(self, name: str, who: str, weight: float, tall: float, **look: Any) -> list[Piece]:
        said = words(f"{weight:.2f}", 12, fill=INK if weight >= 0.1 else QUIET)
        shown = bar(weight, NUMBERS, BLUE, f"{who}: share {weight:.3f}", tall)
        return [words(name, 12, 104, **look), shown, said]

    def _next(self, predicted: list[tuple[int, str, float]], same: bool) -> list[Piece]:
        """The likeliest next tokens, and whether the first is what the head looks at most."""
        found = list[Piece]()
        for i, (_, label, p) in enumerate(predicted):
            tip, look = f"next token “{label}”: probability {p:.3f}", DEAF | ({} if i else BOLD)
            said = words(label, 12.5, NEXT - 58, **look), words(f"{p:.2f}", 12.5, **look)
            line = table([said], 0, least=(NEXT - 48, 32), across=[0, 1])
            inside = column(line, bar(p, NEXT - 16, GREEN, tip, 6), gap=2)
            edge = Style(stroke=RULE) if i else Style(stroke=INK, stroke_width=1.8)
            found.append(framed(inside, NEXT, 8, fill=PAPER, **edge))
        mark = words("= the token that this head looks at" * same, 12, NEXT, 2, **BOLD)
        return [*found, mark._replace(tall=34).named("same")]

    def caption(self, step: int) -> str:
        """Where this query's attention goes, and what the model predicts after it, in numbers."""
        weights = self._now()[step]
        best = weights.index(max(weights))
        token, label, p = self._predicted(step)[0]
        same = ", the token that this head looks at" * (token == self.ids[best])
        return (
            f"Layer {self.value('layer')}, head {self.value('head')}: query {step} "
            f"“{self.labels[step]}” may look at {step + 1} of {self.num_steps} keys and gives "
            f"{weights[best]:.2f} of its attention to key {best} “{self.labels[best]}”; the model "
            f"predicts “{label}” with probability {p:.2f}{same}."
        )
