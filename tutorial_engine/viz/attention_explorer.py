"""Introduced in notebook 01. The attention explorer: prompt, layer, head, and one query a step."""

import ipywidgets as widgets
import matplotlib
import torch
from matplotlib.colors import to_hex
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.scene import HATCHED, Scene
from tutorial_engine.viz.style import BLUE, INK, MAGNITUDE, QUIET, RULE
from tutorial_engine.viz.tokens import token_labels

MAX_TOKENS = 56  # more would not be readable
LEFT, TOP = 122.0, 128.0  # where the matrix begins, in pixels


@torch.inference_mode()
def attention_weights(model: Qwen3ForCausalLM, ids: list[int]) -> Tensor:
    """Attention of every layer and head over one sequence of n ids, [layers, heads, n, n]."""
    config, n = model.config, len(ids)
    kept = torch.zeros(config.num_hidden_layers, config.num_attention_heads, n, n)

    def keep(layer: int, _sequence: int, weights: Tensor) -> None:
        kept[layer] = weights

    model(Batch.from_sequences([ids], device=model.device), NaiveAttention(observe=keep))
    return kept


class AttentionExplorer(Explorer):
    """Who looks at whom: the whole map of a head on the left, one query's weights on the right."""

    title = "Attention explorer"
    step_name = "query"

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer,
        prompt: str,
        layer: int = 0,
        head: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.labels: list[str] = []
        self.ran_prompt: str | None = None
        config = model.config
        wide = widgets.Layout(width="640px")
        text = widgets.Text(prompt, description="prompt", continuous_update=False, layout=wide)

        def knob(name: str, value: int, choices: int) -> widgets.BoundedIntText:
            narrow = widgets.Layout(width="150px")
            return widgets.BoundedIntText(
                value, min=0, max=choices - 1, description=name, layout=narrow
            )

        super().__init__(
            {
                "prompt": text,
                "layer": knob("layer", layer, config.num_hidden_layers),
                "head": knob("head", head, config.num_attention_heads),
            }
        )

    def rerun(self) -> None:
        """Run the model on the prompt with the backend that shows its weights."""
        prompt = self.value("prompt")
        if prompt == self.ran_prompt:
            return
        ids = self.tokenizer.encode(prompt).ids
        if not ids:
            raise ValueError("The prompt is empty: type at least one character.")
        if len(ids) > MAX_TOKENS:
            raise ValueError(
                f"The prompt has {len(ids)} tokens; the picture holds {MAX_TOKENS}. Shorten it."
            )
        self.weights = attention_weights(self.model, ids)
        self.labels = token_labels(self.tokenizer, ids)
        self.ran_prompt = prompt

    @property
    def num_steps(self) -> int:
        """One step a query token."""
        return len(self.labels)

    @property
    def start_step(self) -> int:
        """The last token: the one whose logits choose the next."""
        return self.num_steps - 1

    def _now(self) -> Tensor:
        return self.weights[self.value("layer"), self.value("head")]  # [n, n]

    def scene(self, step: int) -> Scene:
        """The head's map with the query's row framed, and that row as bars."""
        n = self.num_steps
        side = max(430.0, 9.5 * n)
        scene = Scene(LEFT + side + 370, TOP + side + 34, tip_at=(LEFT, TOP + side + 24))
        scene.hint = "hover over a cell or a bar to read its weight"
        layer, head = self.value("layer"), self.value("head")
        title = f"layer {layer}, head {head}: row = query, column = key"
        scene.text("title", 8, 20, title, 14, font_weight="bold")
        group = self.model.config.group_size
        reads = f"this head reads K/V head {head} // {group} = {head // group}"
        scene.text("gqa", 8, 39, f"query {step} of {n - 1} · {reads}", 12, fill=QUIET)
        self._matrix(scene, step, side / n)
        self._bars(scene, step, side / n)
        self._legend(scene)
        return scene

    def _legend(self, scene: Scene) -> None:
        x, colors = scene.width - 300, matplotlib.colormaps[MAGNITUDE]
        scene.text("legend0", x - 6, 20, "weight 0", 11, fill=QUIET, text_anchor="end")
        for i in range(11):
            scene.rect(f"legend.{i}", (x + 11 * i, 10, 11, 12), to_hex(colors(i / 10)))
        scene.text("legend1", x + 127, 20, "1", 11, fill=QUIET)
        scene.rect("legend2", (x + 160, 10, 20, 12), HATCHED, stroke=RULE)
        scene.text("legend3", x + 186, 20, "forbidden", 11, fill=QUIET)

    def _matrix(self, scene: Scene, step: int, cell: float) -> None:
        n, size = self.num_steps, _text_size(cell)
        for row, label in enumerate(self.labels):
            y = TOP + (row + 0.5) * cell + size * 0.35
            strong = {"font_weight": "bold"} if row == step else {"fill": QUIET}
            scene.text(f"row{row}", LEFT - 6, y, label, size, text_anchor="end", **strong)
            x = LEFT + (row + 0.5) * cell + size * 0.35
            turn = f"rotate(-90 {x:.1f} {TOP - 6:.1f})"
            scene.text(f"column{row}", x, TOP - 6, label, size, fill=QUIET, transform=turn)
            self._row(scene, row, cell)
        frame = (LEFT, TOP + step * cell, n * cell, cell)
        scene.rect("frame", frame, "none", stroke=INK, stroke_width=2.5, pointer_events="none")

    def _row(self, scene: Scene, row: int, cell: float) -> None:
        """One query's weights as cells, and one hatched cell for all that it may not see."""
        weights, colors, n = self._now()[row], matplotlib.colormaps[MAGNITUDE], self.num_steps
        y, who = TOP + row * cell, f"query {row} “{self.labels[row]}”"
        for column in range(row + 1):
            weight = float(weights[column])
            tip = f"{who} → key {column} “{self.labels[column]}”: weight {weight:.3f}"
            box = (LEFT + column * cell, y, cell, cell)
            scene.rect(f"w{row}.{column}", box, to_hex(colors(weight)), tip, class_="te-cell")
        if row + 1 < n:
            tip = f"{who} may not look at keys {row + 1} to {n - 1}: they come later"
            box = (LEFT + (row + 1) * cell, y, (n - row - 1) * cell, cell)
            scene.rect(f"future{row}", box, HATCHED, tip)

    def _bars(self, scene: Scene, step: int, cell: float) -> None:
        left, width, weights = LEFT + self.num_steps * cell + 130.0, 190.0, self._now()[step]
        size, title = _text_size(cell), f"query {step} “{self.labels[step]}” looks at"
        scene.text("bars", left - 120, TOP - 22, title, 12.5, font_weight="bold")
        scene.text("scale", left, TOP - 6, "0", 10, fill=QUIET)
        scene.text("scale1", left + width, TOP - 6, "1", 10, fill=QUIET, text_anchor="end")
        for key, label in enumerate(self.labels):
            top, weight, allowed = TOP + (key + 0.15) * cell, float(weights[key]), key <= step
            y = TOP + (key + 0.5) * cell + size * 0.35
            ink = INK if allowed else RULE
            scene.text(f"key{key}", left - 6, y, label, size, text_anchor="end", fill=ink)
            tip = f"key {key} “{label}”: " + (
                f"weight {weight:.3f}" if allowed else "later, hidden"
            )
            track = "#e3e8ec" if allowed else HATCHED
            scene.rect(f"track{key}", (left, top, width, cell * 0.7), track, tip)
            if allowed:
                bar = (left, top, max(width * weight, 0.5), cell * 0.7)
                scene.rect(f"bar{key}", bar, BLUE, pointer_events="none")
                ink = INK if weight >= 0.1 else QUIET
                scene.text(f"n{key}", left + width + 6, y, f"{weight:.2f}", size, fill=ink)

    def caption(self, step: int) -> str:
        """Where this query's attention goes, in numbers."""
        weights = self._now()[step]
        best = int(weights.argmax())
        return (
            f"Layer {self.value('layer')}, head {self.value('head')}: query {step} "
            f"“{self.labels[step]}” may look at {step + 1} of {self.num_steps} keys and gives "
            f"{float(weights[best]):.2f} of its attention to key {best} “{self.labels[best]}”."
        )


def _text_size(cell: float) -> float:
    """Letters that fit beside a cell of that many pixels, and can still be read."""
    return min(12.5, max(8.0, cell * 0.62))
