"""Introduced in notebook 02. What the cache explorer shows: the engine run once, written down.

Knows prefill, decode and a static cache, and says in a sentence what a step did; draws nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig, KVCacheSpec
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.tokens import token_names
from tutorial_engine.viz.words import percent, tokens

BEST = 6  # tokens of the next-token distribution that are kept
Best = tuple[tuple[int, float], ...]  # (token id, probability), likeliest first


@dataclass(frozen=True)
class CacheStep:
    """One forward of the engine: what ran, where it was written, what the cache then held.

    `keys` and `values` are the lengths of the vectors in the slots that it read, [layers, H_kv, n].
    `best` is empty where nobody asked for logits: in a part of the prompt that is not its last.
    """

    kind: str  # "prefill" or "decode"
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    keys: Tensor
    values: Tensor
    best: Best

    @property
    def used(self) -> int:
        """Slots filled after this forward."""
        return self.keys.shape[-1]


class _WatchedCache(StaticKVCache):
    """A static cache that notes the lengths of K and V that it holds after every forward."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.seen: list[tuple[Tensor, Tensor]] = []  # of K and of V, [layers, H_kv, n]

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        super().commit(seq_id, token_ids, num_computed)
        slots = torch.tensor(self.describe(seq_id).slots[:num_computed], device=self.storage.device)
        layers = [self.storage.read(i, slots) for i in range(self.storage.spec.num_layers)]
        k, v = (torch.stack(x).float().norm(dim=-1).mT.cpu() for x in zip(*layers, strict=True))
        self.seen.append((k, v))


@torch.inference_mode()
def record_steps(
    model: Qwen3ForCausalLM, ids: list[int], new_tokens: int, chunk: int, max_len: int
) -> list[CacheStep]:
    """Greedy generation with one row of max_len slots → a CacheStep a forward; EOS ends it early.

    The last token is chosen and never run. chunk 0 runs the prompt in one forward.
    """
    config = CacheConfig(max_len=max_len, dtype=model.dtype, device=model.device)
    cache = _WatchedCache.from_config(model.config, config)
    assert isinstance(cache, _WatchedCache), "from_config makes its own class"
    request = Request("A", ids)
    logits = [prefill(model, cache, [request], chunk_size=chunk or None)]
    chunks = len(cache.seen)
    while len(logits) < new_tokens:
        token = int(logits[-1].argmax())
        if token in model.config.eos_token_ids:
            break
        request.token_ids.append(token)
        logits.append(decode(model, cache, [request]))
    best: list[Best] = [()] * (chunks - 1)
    for row in logits:
        p, order = row[0].float().softmax(-1).sort(descending=True, stable=True)
        best.append(tuple(zip(order[:BEST].tolist(), p[:BEST].tolist(), strict=True)))
    slots, steps, start = cache.describe("A").slots, list[CacheStep](), 0
    for i, (keys, values) in enumerate(cache.seen):
        end = keys.shape[-1]
        run, kind = tuple(request.token_ids[start:end]), "prefill" if i < chunks else "decode"
        positions = tuple(range(start, end))
        steps.append(CacheStep(kind, run, positions, slots[start:end], keys, values, best[i]))
        start = end
    return steps


@dataclass(frozen=True)
class CacheRun:
    """All steps of one prompt in one row of num_slots slots. Step 0 is the empty cache."""

    steps: list[CacheStep]
    num_slots: int
    spec: KVCacheSpec
    labels: dict[int, str]  # token id -> how it is written

    @cached_property
    def tokens(self) -> list[tuple[str, int, int]]:
        """By slot: label, position, and the step that wrote it."""
        return [
            (self.labels[token], position, number)
            for number, step in enumerate(self.steps, 1)
            for token, position in zip(step.ids, step.positions, strict=True)
        ]

    def tokens_run(self, step: int) -> tuple[int, int]:
        """Tokens that went through the model up to this step: with the cache, and without one."""
        if step == 0:
            return 0, 0
        done = self.steps[:step]
        return done[-1].used, sum(s.used for s in done if s.best) or done[-1].used

    def caption(self, step: int) -> str:
        """What ran, where it was written, what it read, and what comes next."""
        start = f"Step {step} of {len(self.steps)}"
        if not step:
            size = self.num_slots * self.spec.bytes_per_token / 1024
            waits = tokens(sum(len(s.ids) for s in self.steps if s.kind == "prefill"))
            return (
                f"{start}: the row has {self.num_slots} slots in each of {self.spec.num_layers} "
                f"layers, {size:.0f} KiB, all reserved and none used; a prompt of {waits} waits."
            )
        now = self.steps[step - 1]
        first, last, slot = now.positions[0], now.positions[-1], now.slots[-1]
        if len(now.ids) == 1:
            ran = (
                f"“{self.labels[now.ids[0]]}” runs alone at position {first}, is written to slot "
                f"{slot} in every layer, and reads {now.used} slot{'s' * (now.used > 1)}"
            )
        else:
            ran = (
                f"{len(now.ids)} tokens run together at positions {first} to {last}, are written "
                f"to slots {now.slots[0]} to {slot} in every layer, and the last of them reads "
                f"{now.used} slots"
            )
        so_far = f"{now.used} of {self.num_slots} slots are used"
        then = "no token is chosen, for the prompt goes on"
        if now.best:
            then = f"next comes “{self.labels[now.best[0][0]]}” ({percent(now.best[0][1])})"
            then += ", the last, which never runs" * (step == len(self.steps))
        return f"{start}, {now.kind}: {ran}; {so_far}; {then}."


def record_run(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    chunk: int,
    most: int,
) -> CacheRun:
    """Record the prompt in a row that is a multiple of 4 and at most `most` slots long.

    ValueError for a prompt that is empty or does not fit.
    """
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError("The prompt is empty: type at least one character.")
    room, need = min(most, model.config.max_position_embeddings), len(ids) + new_tokens
    if need > room:
        raise ValueError(
            f"The prompt has {tokens(len(ids))}; with {new_tokens} new that is {need}, and "
            f"the picture holds {room} slots. Shorten it."
        )
    num_slots = min(-(-need // 4) * 4, room)
    steps = record_steps(model, ids, new_tokens, chunk, num_slots)
    ran = {token for step in steps for token in step.ids}
    named = token_names(tokenizer, ran | {token for step in steps for token, _ in step.best})
    return CacheRun(steps, num_slots, KVCacheSpec.from_model(model.config, model.dtype), named)
