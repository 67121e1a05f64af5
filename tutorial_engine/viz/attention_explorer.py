"""The attention explorer: prompt, layer, head, and one query a step.

Beside what a head looks at stands what the model predicts, so that the two can be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import ipywidgets as widgets
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.attention import AttentionBackend, NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.explorer import Explorer, button, number, text
from tutorial_engine.viz.parts import BOLD, FAINT, RIGHT, Sheet, shade
from tutorial_engine.viz.request_look import cut_to, tint
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, GREEN, INK, PAPER, QUIET, RED, RULE
from tutorial_engine.viz.tokens import token_labels, token_names

MAX_TOKENS = 64
MAX_HEADS = 144  # that have a button each
MAX_BARS = 24  # a longer prompt has bars for its largest weights only
MAX_NAMES = 30  # a longer prompt names only the chosen row and column of the map
LEVELS = 64  # colours of the small cells of such a map
SHOWN = 3  # predictions
WIDE, SIDE = 1000.0, 408.0  # of the picture and of the map
LEFT, TOP = 100.0, 124.0  # where the map begins
BARS, NUMBERS = 646.0, 112.0  # where the bars begin, and how wide they are
NEXT = 846.0  # where the predictions begin


class Look(NamedTuple):
    """One run: attention [layers, heads, n, n] and the next token's probabilities [n, V]."""

    weights: Tensor
    probs: Tensor


@torch.inference_mode()
def look_inside(
    model: Qwen3ForCausalLM,
    ids: Sequence[int],
    backend: Callable[..., AttentionBackend] = NaiveAttention,
    positions: Sequence[int] | None = None,
) -> Look:
    """Run one sequence of n ids; keep every head's attention and every token's prediction.

    The backend is called with `observe=`, as NaiveAttention is. RoPE turns by `positions` [n]
    (0 .. n − 1); the mask is causal in any case.
    """
    config, n = model.config, len(ids)
    kept = torch.zeros(config.num_hidden_layers, config.num_attention_heads, n, n)

    def keep(layer: int, _sequence: int, weights: Tensor) -> None:
        kept[layer] = weights

    batch = Batch.from_sequences([ids], device=model.device)
    if positions is not None:
        batch = replace(batch, positions=torch.tensor(positions, device=model.device))
    logits = model.compute_logits(model(batch, backend(observe=keep)))
    return Look(kept, logits.softmax(-1).cpu())


def attention_weights(
    model: Qwen3ForCausalLM, ids: Sequence[int], positions: Sequence[int] | None = None
) -> Tensor:
    """Attention of every layer and head over one sequence of n ids, [layers, heads, n, n]."""
    return look_inside(model, ids, positions=positions).weights


class AttentionExplorer(Explorer):
    """Who looks at whom: a head's map, one query's weights, and what the model predicts there."""

    title = "Attention explorer"
    step_name = "query"
    stands = "last"  # the token whose logits choose the next

    def __init__(
        self,
        model: Qwen3ForCausalLM,
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
            (i, j): button("", f"show layer {i}, head {j}", partial(self._choose, i, j))
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

    def _choose(self, layer: int, head: int) -> None:
        self.turn(layer=layer, head=head)

    def _grid(self, layers: int, heads: int) -> widgets.Widget:
        """A button for each head, a row for each layer; folded until somebody opens it."""
        children = [widgets.Label(""), *map(_label, range(heads))]
        for layer in range(layers):
            children.append(widgets.Label(f"layer {layer}"))
            children += [self.heads[layer, head] for head in range(heads)]
        for one in self.heads.values():
            one.layout = widgets.Layout(width="auto", height="26px", margin="1px", padding="0")
        columns = f"70px repeat({heads}, 58px)"
        grid = widgets.GridBox(children, layout=widgets.Layout(grid_template_columns=columns))
        return widgets.Accordion([grid], titles=["every head's largest share: choose a head"])

    def _draw(self) -> None:
        super()._draw()
        if self._changing or not self.heads:
            return
        largest = self.look.weights[:, :, self.step].amax(-1).tolist()
        chosen = self.value("layer"), self.value("head")
        for (layer, head), one in self.heads.items():
            weight, now = largest[layer][head], (layer, head) == chosen
            with one.hold_sync(), one.style.hold_sync():
                one.description = f"▸{weight:.2f}" if now else f"{weight:.2f}"
                one.style.button_color = shade(weight)
                one.style.text_color = PAPER if weight < 0.6 else INK
                one.style.font_weight = "bold" if now else "normal"
                one.layout.border = f"3px solid {RED}" if now else f"1px solid {RULE}"

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
        scene = Sheet(WIDE, TOP + SIDE + 34, tip_at=(LEFT, TOP + SIDE + 24))
        scene.hint = "hover over the map or a bar to read its share"
        layer, head = self.value("layer"), self.value("head")
        scene.heading(f"layer {layer}, head {head}: row = query, column = key", size=14)
        place = "the last; " * (step == self.num_steps - 1) + "counted from 0"
        scene.note("step", 10, 40, f"query {step} ({place})", 12)
        weights = self._now()
        best = weights[step].index(max(weights[step]))
        self._map(scene, step, best, weights)
        y = self._bars(scene, step, best, weights[step])
        self._next(scene, step, best, y)
        self._legend(scene, WIDE - 306)
        low, top = TOP + SIDE - 50, TOP - 44
        scene.parts = [
            [(0, 46, LEFT + SIDE + 8, low + 62)],
            [(BARS - 116, top, WIDE - BARS + 116, low)],
        ]
        scene.keys = [(WIDE - 362, 6, 200, 20), (WIDE - 150, 6, 90, 20)]
        return scene

    def _legend(self, scene: Sheet, x: float) -> None:
        scene.note("least", x - 6, 20, "share 0", **RIGHT)
        scene.colour_scale("scale", (x, 10, 121, 12), 11)
        scene.note("most", x + 127, 20, "1")
        scene.cell("forbidden", (x + 160, 10, 20, 12), "reserved", rx=0)
        scene.note("forbidden.words", x + 186, 20, "forbidden")

    def _map(self, scene: Sheet, step: int, best: int, weights: list[list[float]]) -> None:
        """The chosen query is framed; a long prompt names only it and the key it looks at most."""
        n = self.num_steps
        pitch = SIDE / n if n <= MAX_NAMES else SIDE // n  # whole pixels for small cells
        size = min(12.5, max(11.0, pitch * 0.62))
        for place, label in enumerate(self.labels):
            middle = place * pitch + pitch / 2 + size * 0.35
            if n <= MAX_NAMES or place == step:
                style, words = BOLD if place == step else FAINT, cut_to(label, 84, size)
                scene.text(f"row{place}", LEFT - 6, TOP + middle, words, size, **RIGHT, **style)
            if n <= MAX_NAMES or place == best:
                style, words = BOLD if place == best else FAINT, cut_to(label, 64, size)
                turn = {"transform": f"rotate(-90 {LEFT + middle:.1f} {TOP - 6:.1f})"}
                scene.text(f"column{place}", LEFT + middle, TOP - 6, words, size, **style, **turn)
        if n <= MAX_NAMES:
            self._cells(scene, weights, pitch)
        else:
            self._small_cells(scene, weights, pitch)
        for row in range(n - 1):
            tip = f"{self._who(row)} may not look at keys {row + 1} to {n - 1}: they come later"
            box = (LEFT + (row + 1) * pitch, TOP + row * pitch, (n - 1 - row) * pitch, pitch)
            scene.cell(f"future{row}", box, "reserved", tip=tip, rx=0, stroke="none")
        chosen = (LEFT, TOP + step * pitch, n * pitch, pitch)
        scene.outline("frame", chosen, 1, stroke=RED, stroke_width=2.5)

    def _who(self, row: int) -> str:
        return f"query {row} “{self.labels[row]}”"

    def _cells(self, scene: Sheet, weights: list[list[float]], pitch: float) -> None:
        """A cell for each weight, which says it under the pointer."""
        for row in range(self.num_steps):
            who = self._who(row)
            for key, weight in enumerate(weights[row][: row + 1]):
                tip = f"{who} → key {key} “{self.labels[key]}”: share {weight:.3f}"
                box = (LEFT + key * pitch, TOP + row * pitch, pitch, pitch)
                scene.rect(f"w{row}.{key}", box, shade(weight), tip, class_="te-cell")

    def _small_cells(self, scene: Sheet, weights: list[list[float]], pitch: float) -> None:
        """All cells of one colour as one path: two thousand elements would make a browser slow.

        A whole row says under the pointer where it looks most.
        """
        squares: dict[int, list[str]] = {}
        for row in range(self.num_steps):
            for key, weight in enumerate(weights[row][: row + 1]):
                place = f"M{LEFT + key * pitch:g} {TOP + row * pitch:g}"
                squares.setdefault(round(LEVELS * weight), []).append(place)
        for level, places in sorted(squares.items()):
            square = f"h{pitch:g}v{pitch:g}h-{pitch:g}z"
            look = {"fill": shade(level / LEVELS), "shape_rendering": "crispEdges"}
            scene.add(f"level{level}", "path", d="".join(f"{p}{square}" for p in places), **look)
        for row in range(self.num_steps):
            key = max(range(row + 1), key=weights[row].__getitem__)
            tip = f"{self._who(row)} → most to key {key} “{self.labels[key]}”: share "
            box = (LEFT, TOP + row * pitch, (row + 1) * pitch, pitch)
            scene.rect(f"w{row}", box, "transparent", f"{tip}{weights[row][key]:.3f}")

    def _bars(self, scene: Sheet, step: int, best: int, weights: list[float]) -> float:
        """The weights of one query with their numbers -> at what height the largest stands."""
        n = self.num_steps
        title = cut_to(f"query {step} “{self.labels[step]}” looks at", 300, 12.5, True, True)
        scene.text("bars", BARS - 110, TOP - 26, title, 12.5, **BOLD)
        scene.note("zero", BARS, TOP - 6, "0")
        scene.note("one", BARS + NUMBERS, TOP - 6, "1", **RIGHT)
        keys = list(range(n))
        if n > MAX_BARS:  # the largest, in the order of the text
            keys = sorted(sorted(range(step + 1), key=lambda k: -weights[k])[: MAX_BARS - 1])
        pitch = min(26.0, SIDE / min(n, MAX_BARS))
        for place, key in enumerate(keys):
            y, label = TOP + place * pitch, self.labels[key]
            name, ink = f"key {key} “{label}”", INK if key <= step else RULE
            look = BOLD if key == best else {}
            words = cut_to(f"{key}  {label}", 104, 12, key == best, keep=True)
            scene.text(
                f"key{key}", BARS - 6, y + pitch / 2 + 4.3, words, 12, **RIGHT, **look, fill=ink
            )
            box = (BARS, y + 0.15 * pitch, NUMBERS, 0.7 * pitch)
            if key > step:
                tip = f"{name}: later, hidden"
                scene.cell(f"later{key}", box, "reserved", tip=tip, rx=0, stroke="none")
            else:
                self._bar(scene, str(key), box, weights[key], f"{name}: share {weights[key]:.3f}")
        others = step + 1 - len(keys)
        if others > 0:
            rest, y = sum(weights) - sum(weights[key] for key in keys), TOP + len(keys) * pitch
            words = f"{others} other keys"
            scene.note("others", BARS - 6, y + pitch / 2 + 4.3, words, 12, **RIGHT)
            box = (BARS, y + 0.15 * pitch, NUMBERS, 0.7 * pitch)
            self._bar(scene, "others", box, rest, f"{words} together: share {rest:.3f}")
        return TOP + (keys.index(best) + 0.5) * pitch

    def _bar(
        self,
        scene: Sheet,
        name: str,
        box: tuple[float, float, float, float],
        weight: float,
        tip: str,
    ) -> None:
        scene.bar(f"bar{name}", box, weight, BLUE, tip)
        ink, base = INK if weight >= 0.1 else QUIET, box[1] + box[3] / 2 + 4.3
        scene.text(f"n{name}", BARS + NUMBERS + 6, base, f"{weight:.2f}", 12, fill=ink)

    def _next(self, scene: Sheet, step: int, best: int, y: float) -> None:
        """The likeliest next tokens; an arrow to the first if it is what the head looks at most."""
        wide, tall, top = WIDE - NEXT - 10, 30.0, TOP + SIDE / 2 - 62
        scene.text("next", NEXT, top - 26, "the model predicts", 12.5, **BOLD)
        scene.note("next.words", NEXT, top - 10, "as the next token", 12)
        for i, (_, label, p) in enumerate(self._predicted(step)):
            box = (NEXT, top + 38 * i, wide, tall)
            tip = f"next token “{label}”: probability {p:.3f}"
            scene.bar(f"next{i}", box, p, tint(GREEN, 0.5), tip)
            base, look = box[1] + tall / 2 + 4.5, {} if i else BOLD
            words = cut_to(label, wide - 48, 12.5, not i)
            scene.text(f"next{i}.label", NEXT + 6, base, words, 12.5, **look)
            scene.text(f"next{i}.p", NEXT + wide - 6, base, f"{p:.2f}", 12.5, **RIGHT, **look)
        same = self._predicted(step)[0][0] == self.ids[best]
        scene.outline("next.top", (NEXT, top, wide, tall), stroke_width=1.8)
        if same:  # an arrow would say that one thing leads to the other
            begin, turn, middle = BARS + NUMBERS + 38, NEXT - 26, top + tall / 2
            points = [(begin, y), (turn, y), (turn, middle), (NEXT - 3, middle)]
            scene.arrow("leads", points, GREEN, 2)
            scene.text("same", NEXT, top + 134, "= the token that", 12, **BOLD)
            scene.text("same.more", NEXT, top + 150, "this head looks at", 12, **BOLD)

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


def _label(head: int) -> widgets.Label:
    return widgets.Label(f"head {head}", layout=widgets.Layout(justify_content="center"))
