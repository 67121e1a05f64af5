"""The context shift put to the test: is it a fresh run, or is it not?

Forget the first tokens of a sequence, move the others to the front, turn their keys (K-shift), and
compare with a model that never saw the forgotten ones. In one layer they agree; above the first
layer every key and value has already taken in what is forgotten, and no rotation takes it out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.cell_table import SeqId
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM


class ShiftGap(NamedTuple):
    """How far a shifted cache is from a fresh one: largest differences, all 0 if they agree.

    `logits` of the next token; `keys` and `values` of the tokens that stayed, one number a layer.
    `largest_logit` is the fresh run's, to compare with.
    """

    num_layers: int
    logits: float
    keys: tuple[float, ...]
    values: tuple[float, ...]
    largest_logit: float


Shift = Callable[[CellKVCache, SeqId, int, int], object]  # (cache, seq_id, keep, discard)


def context_shift(cache: CellKVCache, seq_id: SeqId, keep: int, discard: int) -> None:
    """Keep a sequence's first positions, drop the next `discard`, and move the others down.

    Its cells only: whoever calls this shortens token_ids and num_computed_tokens, too.
    """
    cache.seq_rm(seq_id, keep, keep + discard)
    cache.seq_add(seq_id, keep + discard, -1, -discard)


def shift_gap(
    model: CausalLM,
    token_ids: Sequence[int],
    discard: int,
    shift: Shift | None = None,
) -> ShiftGap:
    """Run all tokens but the last, forget the first `discard`, shift, run the last; and afresh.

    `shift` changes the cells (None: context_shift). ValueError unless at least one token is
    forgotten and one stays before the last.
    """
    both = _both(model, token_ids, discard, shift)
    shifted, fresh = (decode(model, cache, [request]) for cache, request in both)
    keys, values = [], []
    for layer in range(model.config.num_hidden_layers):
        ours, theirs = (_kv(cache, layer, len(token_ids) - 1 - discard) for cache, _ in both)
        keys.append(_largest(ours[0] - theirs[0]))
        values.append(_largest(ours[1] - theirs[1]))
    return ShiftGap(
        len(keys), _largest(shifted - fresh), tuple(keys), tuple(values), _largest(fresh)
    )


class ShiftedText(NamedTuple):
    """What a model says after a shift, and what it says if it never saw what is forgotten.

    `forgotten` and `kept` are the two parts of the text before. `num_same`: how many tokens of the
    two continuations are the same from the start, of `num_tokens`. `gap` is of the first of them.
    """

    forgotten: str
    kept: str
    shifted: str
    fresh: str
    num_same: int
    num_tokens: int
    gap: ShiftGap


def shifted_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    discard: int,
    max_tokens: int = 16,
    shift: Shift | None = None,
) -> ShiftedText:
    """Forget the first `discard` tokens of a text and go on, greedily: by a shift, and afresh.

    `shift` and ValueError as shift_gap.
    """
    token_ids = tokenizer.encode(text).ids if isinstance(text, str) else list(text)
    continuations = []
    for cache, request in _both(model, token_ids, discard, shift, max_tokens):
        for _ in range(max_tokens):
            request.token_ids.append(int(decode(model, cache, [request]).argmax()))
        continuations.append(request.token_ids[-max_tokens:])
    pairs = enumerate(zip(*continuations, strict=True))
    same = next((i for i, (a, b) in pairs if a != b), max_tokens)
    parts = (token_ids[:discard], token_ids[discard:], *continuations)
    forgotten, kept, shifted, fresh = (
        tokenizer.decode(part, skip_special_tokens=False) for part in parts
    )
    gap = shift_gap(model, token_ids, discard, shift)
    return ShiftedText(forgotten, kept, shifted, fresh, same, max_tokens, gap)


def random_model(num_layers: int, seed: int = 0) -> CausalLM:
    """A small random model of so many layers, with weights large enough for logits that differ."""
    config = ModelConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        eos_token_ids=(0,),
    )
    model = CausalLM(config).draw_weights()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:  # so that what comes out of a matrix [out, in] is as large as what goes in
            std = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            parameter.data.normal_(std=std, generator=generator)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _both(
    model: CausalLM,
    token_ids: Sequence[int],
    discard: int,
    shift: Shift | None = None,
    max_tokens: int = 0,
) -> list[tuple[CellKVCache, Request]]:
    """Two caches and requests with the last token left to run: shifted, and afresh.

    The first has run all tokens, then the first ones are forgotten and the others moved down (the
    keys are turned before anything reads them). The second never had those which are forgotten.
    """
    kept = len(token_ids) - 1 - discard
    if discard < 1 or kept < 1:
        raise ValueError(
            f"of {len(token_ids)} tokens {discard} cannot be forgotten: forget at least 1, and "
            "leave at least 1 before the last"
        )
    both = []
    for start in (0, discard):
        cache = CellKVCache.from_config(
            model.config, len(token_ids) + max_tokens, dtype=model.dtype, device=model.device
        )
        request = Request("A", token_ids[start:-1])
        prefill(model, cache, [request])
        both.append((cache, request))
    (shift or context_shift)(both[0][0], "A", 0, discard)
    for _, request in both:
        request.token_ids, request.num_computed_tokens = list(token_ids[discard:]), kept
    return both


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _kv(cache: CellKVCache, layer: int, n: int) -> tuple[Tensor, Tensor]:
    """K and V [n, H_kv, D] of the first n tokens, as numbers that can be compared."""
    cells = torch.tensor(cache.describe("A").slots[:n], device=cache.storage.device)
    k, v = cache.storage.read_slots(layer, cells)
    return k.float(), v.float()
