"""Introduced in notebook 01. The attention explorer: prompt, layer, head, and one query a step."""

import ipywidgets as widgets
import matplotlib
import torch
from matplotlib.colors import to_hex
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.attention import NaiveAttention
from tutorial_engine.batch import Batch
from tutorial_engine.model import Qwen3ForCausalLM
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
        super().__init__(
            {
                "prompt": widgets.Text(
                    prompt,
                    description="prompt",
                    continuous_update=False,
                    layout=widgets.Layout(width="640px"),
                ),
                "layer": widgets.BoundedIntText(
                    layer,
                    min=0,
                    max=config.num_hidden_layers - 1,
                    description="layer",
                    layout=widgets.Layout(width="150px"),
                ),
                "head": widgets.BoundedIntText(
                    head,
                    min=0,
                    max=config.num_attention_heads - 1,
                    description="head",
                    layout=widgets.Layout(width="150px"),
                ),
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
        scene.text(
            "title",
            8,
            20,
            f"layer {layer}, head {head}: row = query, column = key",
            14,
            font_weight="bold",
        )
        group = self.model.config.group_size
        scene.text(
            "gqa",
            8,
            39,
            f"query {step} of {n - 1} · this head reads K/V head "
            f"{head} // {group} = {head // group}",
            12,
            fill=QUIET,
        )
        self._matrix(scene, step, side / n)
        self._bars(scene, step, side / n)
        self._legend(scene)
        return scene

    def _legend(self, scene: Scene) -> None:
        x, colors = scene.width - 300, matplotlib.colormaps[MAGNITUDE]
        scene.text("legend0", x - 6, 20, "weight 0", 11, fill=QUIET, text_anchor="end")
        for i in range(11):
            scene.add(
                f"legend.{i}",
                "rect",
                x=x + 11 * i,
                y=10,
                width=11,
                height=12,
                fill=to_hex(colors(i / 10)),
            )
        scene.text("legend1", x + 127, 20, "1", 11, fill=QUIET)
        scene.add(
            "legend2", "rect", x=x + 160, y=10, width=20, height=12, fill=HATCHED, stroke=RULE
        )
        scene.text("legend3", x + 186, 20, "forbidden", 11, fill=QUIET)

    def _matrix(self, scene: Scene, step: int, cell: float) -> None:
        weights, colors = self._now(), matplotlib.colormaps[MAGNITUDE]
        n, size = self.num_steps, min(12.5, max(8.0, cell * 0.62))
        for row in range(n):
            y = TOP + row * cell
            strong = {"font_weight": "bold"} if row == step else {"fill": QUIET}
            label = self.labels[row]
            scene.text(
                f"row{row}",
                LEFT - 6,
                y + cell * 0.5 + size * 0.35,
                label,
                size,
                text_anchor="end",
                **strong,
            )
            x = LEFT + (row + 0.5) * cell + size * 0.35
            scene.text(
                f"column{row}",
                x,
                TOP - 6,
                label,
                size,
                fill=QUIET,
                transform=f"rotate(-90 {x:.1f} {TOP - 6:.1f})",
            )
            for column in range(row + 1):
                weight = float(weights[row, column])
                scene.add(
                    f"w{row}.{column}",
                    "rect",
                    x=LEFT + column * cell,
                    y=y,
                    width=cell,
                    height=cell,
                    fill=to_hex(colors(weight)),
                    class_="te-cell",
                    tip=f"query {row} “{label}” → key {column} “{self.labels[column]}”: "
                    f"weight {weight:.3f}",
                )
            if row + 1 < n:
                scene.add(
                    f"future{row}",
                    "rect",
                    x=LEFT + (row + 1) * cell,
                    y=y,
                    height=cell,
                    width=(n - row - 1) * cell,
                    fill=HATCHED,
                    tip=f"query {row} “{label}” may not look at keys {row + 1} to {n - 1}: "
                    "they come later",
                )
        scene.add(
            "frame",
            "rect",
            x=LEFT,
            y=TOP + step * cell,
            width=n * cell,
            height=cell,
            fill="none",
            stroke=INK,
            stroke_width=2.5,
            pointer_events="none",
        )

    def _bars(self, scene: Scene, step: int, cell: float) -> None:
        left, width, weights = LEFT + self.num_steps * cell + 130.0, 190.0, self._now()[step]
        size = min(12.5, max(8.0, cell * 0.62))
        scene.text(
            "bars",
            left - 120,
            TOP - 22,
            f"query {step} “{self.labels[step]}” looks at",
            12.5,
            font_weight="bold",
        )
        scene.text("scale", left, TOP - 6, "0", 10, fill=QUIET)
        scene.text("scale1", left + width, TOP - 6, "1", 10, fill=QUIET, text_anchor="end")
        for column, label in enumerate(self.labels):
            y, weight = TOP + column * cell, float(weights[column])
            allowed = column <= step
            scene.text(
                f"key{column}",
                left - 6,
                y + cell * 0.5 + size * 0.35,
                label,
                size,
                text_anchor="end",
                fill=INK if allowed else RULE,
            )
            scene.add(
                f"track{column}",
                "rect",
                x=left,
                y=y + cell * 0.15,
                width=width,
                height=cell * 0.7,
                fill="#f2f4f6" if allowed else HATCHED,
                tip=f"key {column} “{label}”: "
                + (f"weight {weight:.3f}" if allowed else "later, hidden"),
            )
            if allowed:
                scene.add(
                    f"bar{column}",
                    "rect",
                    x=left,
                    y=y + cell * 0.15,
                    fill=BLUE,
                    width=max(width * weight, 0.5),
                    height=cell * 0.7,
                    pointer_events="none",
                )
                scene.text(
                    f"n{column}",
                    left + width + 6,
                    y + cell * 0.5 + size * 0.35,
                    f"{weight:.2f}",
                    size,
                    fill=INK if weight >= 0.1 else QUIET,
                )

    def caption(self, step: int) -> str:
        """Where this query's attention goes, in numbers."""
        weights = self._now()[step]
        best = int(weights.argmax())
        return (
            f"Layer {self.value('layer')}, head {self.value('head')}: query {step} "
            f"“{self.labels[step]}” may look at {step + 1} of {self.num_steps} keys and gives "
            f"{float(weights[best]):.2f} of its attention to key {best} “{self.labels[best]}”."
        )
