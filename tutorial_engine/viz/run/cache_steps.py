"""What the cache explorer shows: the engine run once, written down.

Knows prefill, decode and a static cache, and says in a sentence what a step did; draws nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.tokens import token_names
from tutorial_engine.viz.words import counted, listed, tokens

BEST = 6  # tokens of the next-token distribution that are kept
NAMES = "ABCDEF"
Best = tuple[tuple[int, float], ...]  # (token id, probability), likeliest first


class Part(NamedTuple):
    """What one request runs in a forward: token ids, their positions, the slots of their K and V.

    `reads` are the first slot that it reads and how many.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    reads: tuple[int, int]


class CacheStep(NamedTuple):
    """One forward of the engine, by row: what ran, and the next token where one was asked for."""

    kind: str  # "prefill" or "decode"
    parts: Mapping[int, Part]
    best: Mapping[int, Best]

    @property
    def num_tokens(self) -> int:
        """Tokens that ran, of all requests."""
        return sum(len(part.ids) for part in self.parts.values())


def _parts(batch: Batch) -> dict[int, Part]:
    """A batch that went through the model, request by request."""
    assert batch.slot_mapping is not None, "a cache gave it slots"
    columns = (batch.input_ids, batch.positions, batch.slot_mapping)
    by_request = zip(*(tuple(x.split(batch.query_lens)) for x in columns), strict=True)
    found = {}
    for name, context, rows in zip(batch.seq_ids, batch.context_slots, by_request, strict=True):
        assert isinstance(context, slice), "rows are neighbours in memory"
        ids, positions, slots = (tuple(x.tolist()) for x in rows)
        reads = (context.start, context.stop - context.start)
        found[NAMES.index(name)] = Part(ids, positions, slots, reads)
    return found


def _best(logits: Tensor) -> list[Best]:
    """The likeliest of each row of logits [S, V]."""
    p, order = logits.float().softmax(-1).sort(descending=True, stable=True)
    pairs = zip(order[:, :BEST].tolist(), p[:, :BEST].tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


@torch.inference_mode()
def record_steps(
    model: CausalLM,
    prompts: Sequence[list[int]],
    new_tokens: int,
    chunk: int,
    max_len: int,
) -> list[CacheStep]:
    """Greedy generation, a row of max_len slots for each prompt → a CacheStep a forward.

    The batches are those that the model got. EOS ends a request early; the last token of each is
    chosen and never run. chunk 0 runs the prompts in one forward.
    """
    cache = StaticKVCache.from_config(
        model.config,
        max_seqs=len(prompts),
        max_len=max_len,
        dtype=model.dtype,
        device=model.device,
    )
    running = [Request(name, ids) for name, ids in zip(NAMES, prompts, strict=False)]
    ran: list[dict[int, Part]] = []

    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        ran.append(_parts(arguments[0]))

    hook = model.register_forward_pre_hook(note)
    try:
        logits = prefill(model, cache, running, chunk_size=chunk or None)
        steps = [CacheStep("prefill", parts, {}) for parts in ran[:-1]]
        rows = range(len(running))
        steps.append(CacheStep("prefill", ran[-1], dict(zip(rows, _best(logits), strict=True))))
        for _ in range(new_tokens - 1):
            chosen = logits.argmax(-1).tolist()
            pairs = list(zip(running, chosen, strict=True))
            pairs = [pair for pair in pairs if pair[1] not in model.config.eos_token_ids]
            if not pairs:
                break
            for request, token in pairs:
                request.token_ids.append(token)
            running = [request for request, _ in pairs]
            logits = decode(model, cache, running)
            best = dict(zip(ran[-1], _best(logits), strict=True))
            steps.append(CacheStep("decode", ran[-1], best))
    finally:
        hook.remove()
    return steps


class Stored(NamedTuple):
    """A slot in use: whose token, where it stands, and the step that wrote it."""

    token: int
    position: int
    step: int


class CacheRun:
    """All steps of some prompts, each in a row of row_len slots. Step 0 is the empty cache."""

    def __init__(
        self,
        steps: list[CacheStep],
        num_rows: int,
        row_len: int,
        spec: KVCacheSpec,
        labels: Mapping[int, str],  # token id -> how it is written
    ) -> None:
        self.steps, self.num_rows, self.row_len = steps, num_rows, row_len
        self.spec, self.labels = spec, labels

    @property
    def num_slots(self) -> int:
        """Slots of all rows."""
        return self.num_rows * self.row_len

    @cached_property
    def stored(self) -> dict[int, Stored]:
        """Slot -> what was written there, in the order of writing."""
        return {
            slot: Stored(token, position, number)
            for number, step in enumerate(self.steps, 1)
            for part in step.parts.values()
            for token, position, slot in zip(part.ids, part.positions, part.slots, strict=True)
        }

    def used(self, step: int) -> int:
        """Slots in use after a step."""
        return sum(stored.step <= step for stored in self.stored.values())

    def used_in_row(self, step: int, row: int) -> int:
        """Slots of a row in use after a step."""
        return sum(
            stored.step <= step and slot // self.row_len == row
            for slot, stored in self.stored.items()
        )

    def tokens_run(self, step: int) -> tuple[int, int]:
        """Tokens that went through the model up to this step: with the cache, and without one.

        Without a cache every next token costs a run of all that its request has.
        """
        again = 0
        for number, forward in enumerate(self.steps[:step], 1):
            again += sum(self.used_in_row(number, row) for row in forward.best)
        return self.used(step), again or self.used(step)

    def sum_of(self, row: int, position: int) -> str:
        """How a slot is found: row · row length + position."""
        return f"{row} · {self.row_len} + {position} = {row * self.row_len + position}"

    def caption(self, step: int) -> str:
        """What ran, where the newest tokens were written, and what is in use."""
        start = f"Step {step} of {len(self.steps)}"
        if not step:
            rows, layers = counted(self.num_rows, "row"), self.spec.num_layers
            rows = f"{rows} of {self.row_len} slots"
            size = self.num_slots * self.spec.bytes_per_token / 1024
            prefills = [s for s in self.steps if s.kind == "prefill"]
            waits = [
                sum(len(s.parts[row].ids) for s in prefills if row in s.parts)
                for row in range(self.num_rows)
            ]
            prompts = f"prompts of {listed(map(str, waits))} tokens"
            if len(waits) == 1:
                prompts = f"a prompt of {tokens(*waits)}"
            return (
                f"{start}: each of {layers} layers reserves {rows}, together {size:.0f} "
                f"KiB, and no slot is used; still to run: {prompts}."
            )
        now = self.steps[step - 1]
        row, part = list(now.parts.items())[-1]  # where slot and position differ most
        many, counts = tokens(now.num_tokens), {NAMES[r]: len(p.ids) for r, p in now.parts.items()}
        shares = [f"{count} of {r}" for r, count in counts.items()]
        ran = f"{many} ({listed(shares)})"
        if now.kind == "decode":
            ran = f"{many} (1 each of {listed(counts)})"
        if len(shares) == 1:
            ran = f"{many} of {NAMES[row]}"
        run = "{ran} runs in one forward" if now.num_tokens == 1 else "{ran} run in one forward"
        return (
            f"{start}, {now.kind}: {run.format(ran=ran)}; “{self.labels[part.ids[-1]]}” of "
            f"{NAMES[row]} has position {part.positions[-1]} and is written to slot "
            f"{self.sum_of(row, part.positions[-1])}, in every layer; {self.used(step)} of "
            f"{self.num_slots} slots are used."
        )


def record_run(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    new_tokens: int,
    chunk: int,
    max_len: int,
) -> CacheRun:
    """Record the prompts in rows whose length is a multiple of 4 and at most `max_len`.

    ValueError for a prompt that is empty or does not fit.
    """
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    room = min(max_len, model.config.max_position_embeddings)
    for name, ids in zip(NAMES, encoded, strict=False):
        if not ids:
            raise ValueError(f"The prompt of {name} is empty: type at least one character.")
        need = len(ids) + new_tokens
        if need > room:
            large = (
                "The prompt of {name} has {tokens}; with {new} new that is {need}, and a row of "
                "the picture holds {room} slots. Shorten it."
            )
            fields = {"tokens": tokens(len(ids)), "new": new_tokens, "need": need, "room": room}
            raise ValueError(large.format(name=name, **fields))
    need = max(map(len, encoded)) + new_tokens
    row_len = min(-(-need // 4) * 4, room)
    steps = record_steps(model, encoded, new_tokens, chunk, row_len)
    ran = {token for step in steps for part in step.parts.values() for token in part.ids}
    likely = {token for step in steps for best in step.best.values() for token, _ in best}
    labels = token_names(tokenizer, ran | likely)
    spec = KVCacheSpec.from_model(model.config, model.dtype)
    return CacheRun(steps, len(encoded), row_len, spec, labels)
