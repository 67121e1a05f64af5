"""Walks one forward pass and writes down every shape it meets.

Works on the meta device too: a 0.6B model is walked without a byte of weights.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM


class ShapeStep(NamedTuple):
    """One stop of the walk: where, the shapes in and out, and the weights it holds."""

    name: str
    inputs: str
    output: str
    num_parameters: int


class _WatchedAttention:
    """Passes everything on to another backend and notes the shapes of the first layer."""

    def __init__(self, inner: AttentionBackend, steps: list[ShapeStep]) -> None:
        self.inner, self.steps = inner, steps

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = self.inner.attend(layer, q, k, v, batch)
        if layer == 0:
            self.steps.append(ShapeStep("  attention: q", _shape(q), _shape(out), 0))
            self.steps.append(ShapeStep("  attention: k and v", _shape(k), "", 0))
        return out


@torch.inference_mode()
def shape_walk(model: CausalLM, batch: Batch) -> list[ShapeStep]:
    """Run the batch and return the stops from ids to logits.

    The stops of the first layer are indented and stand for all layers.
    """
    steps: list[ShapeStep] = []

    def note(name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            first = output[0] if isinstance(output, tuple) else output
            owned = sum(weight.numel() for weight in module.state_dict().values())
            place = "  " + name.split(".")[-1] if name.startswith("layers.") else name
            steps.append(ShapeStep(place, _shape(inputs[0]), _shape(first), owned))

        return hook

    handles = [
        module.register_forward_hook(note(name))
        for name, module in model.model.named_modules()
        if not list(module.children()) and (name.startswith("layers.0.") or "layers" not in name)
        if name != "rotary_emb"
    ]
    try:
        hidden = model(batch, _WatchedAttention(model.default_attention, steps))
    finally:
        for handle in handles:
            handle.remove()
    last = hidden[list(batch.last_token_indices)]
    logits = model.compute_logits(last)
    tied = model.config.tie_word_embeddings
    head_params = 0 if tied else model.lm_head.weight.numel()
    head = "lm_head, last rows" + (" (= embed)" if tied else "")
    steps.append(ShapeStep(head, _shape(last), _shape(logits), head_params))
    return steps


def meta_shape_walk(config: ModelConfig, num_tokens: int) -> list[ShapeStep]:
    """The same walk for a model that is not here, computed from its config alone."""
    with torch.device("meta"):
        model = CausalLM(config).to("meta")
        batch = Batch(
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.arange(num_tokens),
            (0, num_tokens),
        )
    return shape_walk(model, batch)


def walk_table(steps: Sequence[ShapeStep]) -> str:
    """The walk as aligned text, one stop a line."""
    head = ShapeStep("step", "in", "out", 0)
    widths = [max(len(str(row[i])) for row in [head, *steps]) for i in range(3)]
    lines = [
        "  ".join(str(row[i]).ljust(widths[i]) for i in range(3))
        + ("" if row is head else f"  {row.num_parameters:>11,}" if row.num_parameters else "")
        for row in [head, *steps]
    ]
    lines[0] += f"  {'weights':>11}"
    return "\n".join(line.rstrip() for line in lines)


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"
