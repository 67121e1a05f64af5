"""Looking into the model while it runs: the residual stream, and heads that say something else.

Activation patching: what some heads give in one text is put in their place in another text. What
the model then predicts was carried by these heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams


@torch.inference_mode()
def residual_stream(model: CausalLM, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """The stream [T, hidden] of the ids after the embedding and after each layer, with its name."""
    batch = Batch.from_sequences([list(ids)], device=model.device)
    angles = model.model.rotary_emb(batch.positions)
    added, stream = model.model.embed_tokens(batch.input_ids), None
    yield "embedding", added
    for number, layer in enumerate(model.model.layers):
        # the layer adds what the one before it computed, and gives what it computed itself
        added, stream = layer(added, stream, angles, batch, NaiveAttention())
        yield f"after layer {number}", stream + added


class Patched(NaiveAttention):
    """Attention in which heads of one layer give, at the last token, what they gave elsewhere.

    `gave` [heads, D] is what they computed here.
    """

    def __init__(self, layer: int, heads: Sequence[int], elsewhere: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.heads, self.elsewhere = layer, list(heads), elsewhere

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Compute as always, then put in what was given elsewhere."""
        out = super().attend(layer, q, k, v, batch)
        if layer == self.layer:
            self.gave = out[-1, self.heads].clone()
            if self.elsewhere is not None:
                out[-1, self.heads] = self.elsewhere
        return out


class Patch(NamedTuple):
    """What follows the text when some heads give what they gave in another text.

    The text went on with `piece`, the most probable token, and then by itself with `rest`.
    """

    name: str
    piece: str
    probability: float
    rest: str


@torch.inference_mode()
def patch_heads(
    model: CausalLM,
    tokenizer: Tokenizer,
    text: str,
    others: Mapping[str, str],
    layer: int,
    heads: Sequence[int],
) -> list[Patch]:
    """Run each of the other texts, and put what these heads give at its end into the text's end.

    `others`: name → text. Only the first new token is predicted so; the rest is the model's own.
    """

    def last_logits(words: str, attention: Patched) -> Tensor:
        batch = Batch.from_sequences([tokenizer.encode(words).ids], device=model.device)
        return model.compute_logits(model(batch, attention)[-1:])[0]

    found = []
    for name, other in others.items():
        there = Patched(layer, heads)
        last_logits(other, there)
        probs = last_logits(text, Patched(layer, heads, there.gave)).softmax(-1)
        piece = tokenizer.decode([int(probs.argmax())])
        params = SamplingParams(max_tokens=12)
        (rest,) = generate(model, text + piece, params, tokenizer=tokenizer)
        found.append(Patch(name, piece, float(probs.max()), rest.outputs[0].text))
    return found
