"""The shape walk says what the model does, stop by stop, and leaves no trace in it."""

from dataclasses import replace

import pytest
import torch
from checkpoints import QWEN3_06B
from torch import Tensor

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.shapes import ShapeStep, meta_shape_walk, shape_walk, walk_table


def by_hand(
    tokens: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> list[ShapeStep]:
    """The stops of any dense Qwen3, written down from the architecture; a layer is indented."""
    flat, out = f"[{tokens}, {hidden}]", heads * head_dim
    q, kv = f"[{tokens}, {heads}, {head_dim}]", f"[{tokens}, {kv_heads}, {head_dim}]"
    qkv = out + 2 * kv_heads * head_dim
    both, half = f"[{tokens}, {2 * mlp}]", f"[{tokens}, {mlp}]"
    return [
        ShapeStep("embed_tokens", f"[{tokens}]", flat, vocab * hidden),
        ShapeStep("  input_layernorm", flat, flat, hidden),
        ShapeStep("  qkv_proj", flat, f"[{tokens}, {qkv}]", hidden * qkv),
        ShapeStep("  q_norm", q, q, head_dim),
        ShapeStep("  k_norm", kv, kv, head_dim),
        ShapeStep("  attention: q", q, q, 0),
        ShapeStep("  attention: k and v", kv, "", 0),
        ShapeStep("  o_proj", f"[{tokens}, {out}]", flat, out * hidden),
        ShapeStep("  post_attention_layernorm", flat, flat, hidden),
        ShapeStep("  gate_up_proj", flat, both, 2 * hidden * mlp),
        ShapeStep("  act_fn", both, half, 0),
        ShapeStep("  down_proj", half, flat, mlp * hidden),
        ShapeStep("norm", flat, flat, hidden),
        ShapeStep("lm_head, last rows (= embed)", f"[1, {hidden}]", f"[1, {vocab}]", 0),
    ]


def total(steps: list[ShapeStep], layers: int) -> int:
    """Weights of the whole model, the first layer counted once for each."""
    return sum(s.num_parameters * (layers if s.name.startswith(" ") else 1) for s in steps)


def hooks(model: Qwen3ForCausalLM) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_walk_of_the_tiny_model_is_as_by_hand(model: Qwen3ForCausalLM) -> None:
    steps = shape_walk(model, Batch.from_sequences([list(range(1, 11))]))
    assert steps == by_hand(10, hidden=192, mlp=512, heads=6, kv_heads=2, head_dim=32, vocab=512)
    assert total(steps, layers=4) == model.num_parameters()


def test_walk_is_the_same_with_plain_weights(model: Qwen3ForCausalLM) -> None:
    batch = Batch.from_sequences([[5, 6, 7]])
    assert shape_walk(load_model(fast=False), batch) == shape_walk(model, batch)


def test_walk_of_two_sequences_ends_with_two_rows(model: Qwen3ForCausalLM) -> None:
    last = shape_walk(model, Batch.from_sequences([[1, 2, 3], [4, 5]]))[-1]
    assert (last.inputs, last.output) == ("[2, 192]", "[2, 512]")


def test_walk_of_qwen3_06b_needs_only_its_config() -> None:
    steps = meta_shape_walk(QWEN3_06B, num_tokens=10)
    assert steps == by_hand(
        10, hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128, vocab=151_936
    )
    assert total(steps, layers=28) == 596_049_920


def test_walk_counts_an_untied_head() -> None:
    untied = replace(QWEN3_06B, tie_word_embeddings=False)
    assert total(meta_shape_walk(untied, 2), layers=28) == 596_049_920 + 151_936 * 1024


def test_walk_leaves_no_hook_behind(model: Qwen3ForCausalLM) -> None:
    shape_walk(model, Batch.from_sequences([[1, 2]]))
    assert hooks(model) == 0


def test_walk_leaves_no_hook_behind_when_the_model_raises(model: Qwen3ForCausalLM) -> None:
    seen = []

    class Broken:
        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
            seen.append(hooks(model))
            raise RuntimeError("broken attention")

    right, model.default_attention = model.default_attention, Broken()
    try:
        with pytest.raises(RuntimeError, match="broken attention"):
            shape_walk(model, Batch.from_sequences([[1, 2]]))
    finally:
        model.default_attention = right
    assert seen[0] > 0 and hooks(model) == 0


def test_walk_does_not_change_the_logits(model: Qwen3ForCausalLM) -> None:
    batch = Batch.from_sequences([[1, 2, 3]])
    before = model.compute_logits(model(batch))
    shape_walk(model, batch)
    assert torch.equal(model.compute_logits(model(batch)), before)


def test_table_has_a_line_a_stop_in_columns(model: Qwen3ForCausalLM) -> None:
    steps = shape_walk(model, Batch.from_sequences([[1, 2, 3]]))
    lines = walk_table(steps).splitlines()
    assert len(lines) == 1 + len(steps) and lines[0].split() == ["step", "in", "out", "weights"]
    inputs, outputs = lines[0].index("in"), lines[0].index("out")
    for line, step in zip(lines[1:], steps, strict=True):
        weights = f"{step.num_parameters:,}" if step.num_parameters else ""
        assert line[:inputs].rstrip() == step.name
        assert line[inputs:outputs].rstrip() == step.inputs
        assert line[outputs:].split("  ")[0] == step.output
        assert line.endswith(weights or step.output or step.inputs)
    assert len({len(line) for line in lines if line[-1] not in "]"}) == 1, "weights are aligned"
