"""Introduced in notebook 01. The attention explorer: prompt, layer, head, and one query a step."""

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.explorer import Explorer, number, text
from tutorial_engine.viz.parts import (
    BOLD,
    FAINT,
    RIGHT,
    Sheet,
    shade,
)
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import BLUE, INK, QUIET, RULE
from tutorial_engine.viz.tokens import token_labels

MAX_TOKENS = 56  # more would not be readable
LEFT, TOP = 122.0, 128.0  # where the matrix begins, in pixels
BARS, NAMES = 190.0, 120.0  # widths of the bars and of the keys' names before them


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
        super().__init__(
            {
                "prompt": text("prompt", prompt),
                "layer": number("layer", layer, 0, config.num_hidden_layers - 1),
                "head": number("head", head, 0, config.num_attention_heads - 1),
            }
        )

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
            self.weights = attention_weights(self.model, ids)
            self.labels = token_labels(self.tokenizer, ids)
            self.ran_prompt = prompt
        return len(self.labels)

    def _now(self) -> list[list[float]]:
        """The weights of the chosen head, by query and key."""
        return self.weights[self.value("layer"), self.value("head")].tolist()

    def scene(self, step: int) -> Scene:
        """The head's map with the query's row framed, and that row as bars."""
        n = self.num_steps
        side = max(430.0, 9.5 * n)
        pitch = side / n
        size = min(12.5, max(8.0, pitch * 0.62))  # letters that fit beside a cell
        scene = Sheet(LEFT + side + BARS + 180, TOP + side + 34, tip_at=(LEFT, TOP + side + 24))
        scene.hint = "hover over a cell or a bar to read its weight"
        layer, head = self.value("layer"), self.value("head")
        scene.heading(f"layer {layer}, head {head}: row = query, column = key", size=14)
        group = self.model.config.group_size
        reads = f"this head reads K/V head {head} // {group} = {head // group}"
        scene.note("gqa", 10, 40, f"query {step} of {n - 1} · {reads}", 12)
        weights = self._now()
        for row in range(n):
            self._row(scene, row, weights[row], pitch, size, BOLD if row == step else FAINT)
        scene.outline("frame", (LEFT, TOP + step * pitch, side, pitch), stroke_width=2.5)
        self._bars(scene, step, weights[step], LEFT + side + NAMES + 10, pitch, size)
        self._legend(scene, scene.width - 300)
        return scene

    def _legend(self, scene: Sheet, x: float) -> None:
        scene.note("least", x - 6, 20, "weight 0", **RIGHT)
        scene.colour_scale("scale", (x, 10, 121, 12), 11)
        scene.note("most", x + 127, 20, "1")
        scene.cell("forbidden", (x + 160, 10, 20, 12), "reserved", rx=0)
        scene.note("forbidden.words", x + 186, 20, "forbidden")

    def _row(
        self, scene: Sheet, row: int, weights: list[float], pitch: float, size: float, look: dict
    ) -> None:
        """A token as query and as key, its weights, and one hatched box for what it may not see."""
        y, label, last = TOP + row * pitch, self.labels[row], self.num_steps - 1
        half = pitch / 2 + size * 0.35
        scene.text(f"row{row}", LEFT - 6, y + half, label, size, **RIGHT, **look)
        x = LEFT + row * pitch + half
        turn = f"rotate(-90 {x:.1f} {TOP - 6:.1f})"
        scene.text(f"column{row}", x, TOP - 6, label, size, **FAINT, transform=turn)
        who = f"query {row} “{label}”"
        for key in range(row + 1):
            tip = f"{who} → key {key} “{self.labels[key]}”: weight {weights[key]:.3f}"
            box = (LEFT + key * pitch, y, pitch, pitch)
            scene.rect(f"w{row}.{key}", box, shade(weights[key]), tip, class_="te-cell")
        if row < last:
            tip = f"{who} may not look at keys {row + 1} to {last}: they come later"
            box = (LEFT + (row + 1) * pitch, y, (last - row) * pitch, pitch)
            scene.cell(f"future{row}", box, "reserved", tip=tip, rx=0, stroke="none")

    def _bars(
        self, scene: Sheet, step: int, weights: list[float], left: float, pitch: float, size: float
    ) -> None:
        """The weights of one query, with their numbers."""
        title = f"query {step} “{self.labels[step]}” looks at"
        scene.text("bars", left - NAMES, TOP - 22, title, 12.5, **BOLD)
        scene.note("zero", left, TOP - 6, "0", 10)
        scene.note("one", left + BARS, TOP - 6, "1", 10, **RIGHT)
        for key, label in enumerate(self.labels):
            y, weight = TOP + key * pitch, weights[key]
            box, base = (left, y + 0.15 * pitch, BARS, 0.7 * pitch), y + pitch / 2 + size * 0.35
            name, ink = f"key {key} “{label}”", INK if key <= step else RULE
            scene.text(f"key{key}", left - 6, base, label, size, **RIGHT, fill=ink)
            if key > step:
                tip = f"{name}: later, hidden"
                scene.cell(f"later{key}", box, "reserved", tip=tip, rx=0, stroke="none")
                continue
            scene.bar(f"bar{key}", box, weight, BLUE, f"{name}: weight {weight:.3f}")
            ink = INK if weight >= 0.1 else QUIET
            scene.text(f"n{key}", left + BARS + 6, base, f"{weight:.2f}", size, fill=ink)

    def caption(self, step: int) -> str:
        """Where this query's attention goes, in numbers."""
        weights = self._now()[step]
        best = weights.index(max(weights))
        return (
            f"Layer {self.value('layer')}, head {self.value('head')}: query {step} "
            f"“{self.labels[step]}” may look at {step + 1} of {self.num_steps} keys and gives "
            f"{weights[best]:.2f} of its attention to key {best} “{self.labels[best]}”."
        )
