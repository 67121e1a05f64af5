"""The equality ledger: every path against one reference, in numbers.

A path is a function from prompts to the logits of every step: through a runner (notebook 02),
through the engine (03), through its memories (04). Another one is one more function; nothing else
has to change. Knows runners, the engine and its memories from outside.
"""

import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.replay import ReplayRunner
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import ModelRunner, Run, run_with_cache, run_without_cache
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batched_attention import (
    AlikeTogether,
    BatchedAttention,
    Varlen,
    varlen_by_sequence,
    varlen_kernel,
)
from tutorial_engine.model.checkpoint import without_weights
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.events import Admitted, Event, Forked, Preempted, Recorder

REFERENCE = "no cache"
BLOCK_SIZES = (1, 4, 16, 256)

MakeMemory = Callable[[int, Recorder], KVMemory]  # (tokens that it should hold, trace)


class LedgerPath(Protocol):
    """One way to the same tokens."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """Logits of every step, [S, num_tokens, V]; fed with tokens [S, num_tokens], or its own."""
        ...


# -- verdicts -------------------------------------------------------------------------------------


class LedgerRow(NamedTuple):
    """What one path gave, against the reference, over all prompts and steps.

    `difference` is the largest |Δ| of any logit; `tolerance` 1e-4 · max(1, largest logit). `equal`
    counts steps whose greedy token is the reference's; `margin` is the smallest top1 − top2.
    """

    path: str
    difference: float
    tolerance: float
    equal: int
    steps: int
    margin: float
    is_reference: bool = False

    @property
    def within(self) -> bool:
        """Logits within the tolerance; never when one of them is NaN or infinite."""
        return self.difference <= self.tolerance < math.inf

    @property
    def ok(self) -> bool:
        """Logits within the tolerance, and all tokens equal."""
        return self.within and self.equal == self.steps

    @property
    def is_safe(self) -> bool:
        """Two logits that are off by the tolerance each cannot change places."""
        return self.margin > 2 * self.tolerance


def ledger(
    paths: Mapping[str, LedgerPath],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    reference: str = REFERENCE,
) -> list[LedgerRow]:
    """Every path over the same prompts, num_tokens greedy tokens each → a row per path.

    The reference chooses the tokens; all others are fed with these (teacher forcing), so that one
    difference does not hide the next. Tokens that are equal step by step here are equal in a free
    run as well. ValueError when the reference is none of the paths.
    """
    if reference not in paths:
        raise ValueError(f"no path {reference!r}; there are {sorted(paths)}")
    want = paths[reference](prompts, num_tokens)
    tokens = want.argmax(-1)  # [S, steps]
    best = want.topk(2).values
    margin = float((best[..., 0] - best[..., 1]).min())
    tolerance = 1e-4 * max(1.0, float(want.abs().max()))
    rows = []
    for name, path in paths.items():
        got = path(prompts, num_tokens, tokens)
        difference = float((got - want).abs().max())
        equal = int((got.argmax(-1) == tokens).sum())
        counts = (difference, tolerance, equal, tokens.numel(), margin)
        rows.append(LedgerRow(name, *counts, is_reference=name == reference))
    return rows


def table(rows: Sequence[LedgerRow]) -> str:
    """The ledger as text: verdicts, integers and bounds, no digits that differ between machines."""
    lines = [f"{'path':<40}{'max |Δ logit|':<16}{'greedy tokens':<16}"]
    for row in rows:
        bound = f"≤ {bound_of(row.difference):g}" if row.within else "> tolerance"
        verdict = "reference" if row.within and row.is_reference else bound
        mark = "✔" if row.ok else "✘"
        lines.append(f"{row.path:<40}{verdict:<16}{row.equal} of {row.steps} {mark}")
    tolerance, margin = rows[0].tolerance, rows[0].margin
    twice = "more than" if rows[0].is_safe else "BELOW"
    lines.append(f"tolerance: {tolerance:.2g} (the largest logit / 10,000)")
    lines.append(f"smallest top1 − top2: above {_floor(margin):g}, {twice} twice the tolerance")
    return "\n".join(lines)


def _floor(margin: float) -> float:
    """Its first digit, rounded down: the others differ between machines."""
    digit = 10.0 ** math.floor(math.log10(margin)) if margin > 0 else 1.0
    return math.floor(margin / digit) * digit


def bound_of(difference: float) -> float:
    """A power of ten that is not below; from 1e-4 on, as processors differ in smaller ones."""
    return 10.0 ** max(-4, math.ceil(math.log10(difference))) if difference > 0 else 1e-4


# -- notebook 02: through the loop ----------------------------------------------------------------


def our_paths(model: CausalLM, max_len: int = 128) -> dict[str, LedgerPath]:
    """Name → path without a scheduler: the reference, the caches, chunks and batches."""

    def rows(num_seqs: int, chunk_size: int | None = None) -> Run:
        cache = StaticKVCache.from_config(
            model.config, max_seqs=num_seqs, max_len=max_len, dtype=model.dtype, device=model.device
        )
        return run_with_cache(model, cache, chunk_size)

    return {
        REFERENCE: loop_path(lambda _: run_without_cache(model)),
        "torch.cat cache": loop_path(lambda _: run_with_cache(model, GrowingKVCache())),
        "static cache": loop_path(rows),
        "chunked, 3 tokens": loop_path(lambda n: rows(n, 3)),
        "batched, unequal prompts": loop_path(rows, together=True),
        "batched and chunked": loop_path(lambda n: rows(n, 2), together=True),
    }


def layer_paths(model: CausalLM) -> dict[str, LedgerPath]:
    """Name → path without a cache, as the reference: the layers of `layers.py`, and their twins.

    Of Linear there are two, each for matrices of every size: packed, and by columns.
    """

    def path(pack_from: int | None) -> LedgerPath:
        twin = without_weights(model.config)  # the same weights; of packed ones, a plain copy
        twin.load_state_dict(model.state_dict(), assign=True)
        twin.requires_grad_(False).eval()
        if pack_from is not None:
            use_fast_layers(twin, pack_from)
        return loop_path(lambda _: run_without_cache(twin))

    return {
        "textbook layers": path(None),
        "fast layers, weights packed": path(0),
        "fast layers, weights by columns": path(sys.maxsize),
    }


def loop_path(make_run: Callable[[int], Run], together: bool = False) -> LedgerPath:
    """Through the loop without a scheduler: all prompts in one batch, or each alone.

    `make_run` makes what runs n sequences, anew for each batch.
    """

    def path(
        prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        if not together and len(prompts) > 1:
            alone = [
                path([prompt], num_tokens, None if tokens is None else tokens[s : s + 1])
                for s, prompt in enumerate(prompts)
            ]
            return torch.cat(alone)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        requests = [Request(str(s), prompt, params) for s, prompt in enumerate(prompts)]
        run = make_run(len(prompts))
        steps = [run(requests)]
        for step in range(num_tokens - 1):
            chosen = steps[-1].argmax(-1) if tokens is None else tokens[:, step]
            for request, token in zip(requests, chosen.tolist(), strict=True):
                request.append(SampledToken(token), now=0.0)
            steps.append(run(requests))
        return torch.stack(steps, dim=1)

    return path


# -- notebook 03: through the engine --------------------------------------------------------------


class ForcedSampler(Sampler):
    """Says given tokens (its own greedy ones where none are given) and keeps the logits it saw."""

    def __init__(self, params: SamplingParams, tokens: Iterable[int] | None = None) -> None:
        super().__init__(params)
        self.logits: list[Tensor] = []
        self._tokens = None if tokens is None else list(tokens)

    def sample(self, logits: Tensor) -> SampledToken:
        """As Sampler.sample; logits [V] that are no numbers are refused there."""
        token = super().sample(logits)
        self.logits.append(logits.clone())
        return token if self._tokens is None else SampledToken(self._tokens[len(self.logits) - 1])


def engine_paths(
    model: CausalLM, neighbours: Sequence[Sequence[int]], max_len: int = 128
) -> dict[str, LedgerPath]:
    """Name → path through the engine; `neighbours` are other prompts for two of them."""

    def engine(budget: int) -> Callable[[], LLMEngine]:
        config = EngineConfig(max_model_len=max_len, max_num_batched_tokens=budget)
        return lambda: LLMEngine(model, config=config)

    def shuffled(n: int) -> list[int]:
        return random.Random(n).sample(range(n), n)

    return {
        "engine, batched": engine_path(engine(512)),
        "engine, chunked prefill, budget 4": engine_path(engine(4)),
        "engine, random arrival order": engine_path(engine(16), order=shuffled, apart=2),
        "engine, neighbours": engine_path(engine(16), neighbours=neighbours),
        "engine, a neighbour aborted": engine_path(
            engine(16), neighbours=neighbours, abort_after=3
        ),
    }


def engine_path(
    make_engine: Callable[[], LLMEngine],
    order: Callable[[int], Sequence[int]] = range,
    apart: int = 0,
    neighbours: Sequence[Sequence[int]] = (),
    abort_after: int | None = None,
    samples: int = 1,
) -> LedgerPath:
    """Through an engine, each of its steps followed by an integrity check.

    The prompts come in this `order`, `apart` steps from one to the next (0: all at once).
    `neighbours` are prompts that run along until `abort_after` steps (None: to the end). Several
    `samples` of a prompt run the same tokens: ValueError if one has other logits than the last.
    """

    def path(
        prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        engine = make_engine()
        params = greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        if samples > 1:  # who draws is chosen below
            params = replace(params, n=samples, temperature=1.0)
        forced = [None] * len(prompts) if tokens is None else tokens.tolist()
        samplers = [[ForcedSampler(greedy, ids) for _ in range(samples)] for ids in forced]
        watched = list(chain.from_iterable(samplers))
        long = SamplingParams(max_tokens=10**6, ignore_eos=True)
        others = {engine.add_request(None, prompt, long) for prompt in neighbours}
        to_come, step = list(order(len(prompts))), 0
        while to_come or any(len(sampler.logits) < num_tokens for sampler in watched):
            while to_come and step >= apart * (len(prompts) - len(to_come)):
                i = to_come.pop(0)
                engine.add_request(None, prompts[i], params, sampler=samplers[i])
            if step == abort_after:
                engine.abort_request([*(others & engine.requests.keys())])
            if not to_come and not engine.has_unfinished_requests():
                raise ValueError(
                    f"a request ended before its {num_tokens} tokens: raise max_len (or are its "
                    "logits NaN?)"
                )
            engine.step()
            engine.check_integrity()
            step += 1
        logits = torch.stack([torch.stack(sampler.logits) for sampler in watched])
        return _the_last(logits.unflatten(0, (-1, samples)), engine.model.dtype)

    return path


def _the_last(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Of samples that ran the same tokens, [P, samples, ...], the last. ValueError if they differ.

    Each has shared blocks, and copied those that it wrote to: a copy that is none shows here.
    """
    differ = float((logits - logits[:, -1:]).abs().max())
    if not differ <= (1e-3 if dtype == torch.float32 else 0.5):  # NaN is not
        raise ValueError(
            f"logits of two samples that run the same tokens differ by {differ:.4g}: one of them "
            "reads what the other one wrote"
        )
    return logits[:, -1]


# -- notebook 04: through the engine's memories ---------------------------------------------------


def memory_paths(model: CausalLM, max_len: int = 128) -> dict[str, LedgerPath]:
    """Name → path on pages and on cells: blocks of each size, prefixes found, forks.

    And memory that runs out: that takes two prompts at least; the warm row a prompt of over 4
    tokens.
    """

    def path(make_memory: MakeMemory, **does: Any) -> LedgerPath:
        return memory_path(model, make_memory, max_len, **does)

    pages = partial(_pages, model)

    def cells(num_tokens: int, trace: Recorder) -> CellKVCache:
        return CellKVCache.from_config(
            model.config, num_tokens, dtype=model.dtype, device=model.device, trace=trace
        )

    return {
        **{f"pages, blocks of {size}": path(pages(size)) for size in BLOCK_SIZES},
        "pages, prefix cache, cold": path(pages(4, prefix_caching=True), warm=False),
        "pages, prefix cache, warm": path(pages(4, prefix_caching=True), warm=True),
        "pages, preempted and resumed": path(pages(2), scarce=True),
        "pages, forked": path(pages(4), forked=True),
        "cells": path(cells),
        "cells, preempted and resumed": path(cells, scarce=True),
        "cells, forked": path(cells, forked=True),
    }


def in_place_paths(model: CausalLM, max_len: int = 128) -> dict[str, LedgerPath]:
    """Name → path on pages whose blocks attention reads in place: by the loop, and many at a time.

    They need what `memory_paths` need. ValueError if one of them copied K or V.
    """
    pages, paths = partial(_pages, model), dict[str, LedgerPath]()
    for name, backend in (("loop", NaivePagedAttention), ("many blocks", PagedAttention)):
        path = partial(memory_path, model, max_len=max_len, in_place=backend)
        paths |= {
            **{f"in place, {name}, blocks of {size}": path(pages(size)) for size in BLOCK_SIZES},
            f"in place, {name}, chunked": path(pages(4), budget=4),
            f"in place, {name}, prefix cache, warm": path(pages(4, prefix_caching=True), warm=True),
            f"in place, {name}, preempted": path(pages(2), scarce=True),
            f"in place, {name}, forked": path(pages(4), forked=True),
        }
    return paths


def batched_paths(model: CausalLM, max_len: int = 128) -> dict[str, LedgerPath]:
    """Name → path whose attention is one call for many sequences.

    One call for all is what a GPU does, decode steps replayed: where there is none the kernel's
    work is done sequence by sequence, and a step is called again in place of being replayed. One
    for those of about a length is what a CPU does with more than a few.
    """

    def engine(kind: str, make_runner: Callable[[KVStorage], ModelRunner]) -> LLMEngine:
        config = EngineConfig(max_model_len=max_len, max_num_batched_tokens=16)
        place: Any = {"dtype": model.dtype, "device": model.device, "trace": Recorder()}
        memory: KVMemory = StaticKVCache.from_config(
            model.config, max_seqs=config.max_num_seqs, max_len=max_len, **place
        )
        if kind == "pages":
            memory = PagedKVCache.from_config(model.config, block_size=4, num_blocks=256, **place)
        elif kind == "cells":
            memory = CellKVCache.from_config(model.config, 1024, **place)
        assert isinstance(memory.storage, KVStorage), "so is each of the three"
        runner = make_runner(memory.storage)
        return LLMEngine(model, config=config, memory=memory, runner=runner)

    def replayed(varlen: Varlen | None) -> Callable[[KVStorage], ModelRunner]:
        return lambda storage: ReplayRunner(model, storage, BatchedAttention(storage, varlen))

    def together(storage: KVStorage) -> ModelRunner:
        return ModelRunner(model, storage, AlikeTogether(storage, few=1))

    kernel = varlen_kernel(model.device, model.dtype)[0] or varlen_by_sequence
    ways = {
        "one call, end to end": (replayed(kernel), ("rows", "pages", "cells")),
        "one call, padded": (replayed(None), ("rows", "pages", "cells")),
        "alike together": (together, ("pages", "cells")),
    }
    return {
        f"{how}, on {kind}": engine_path(partial(engine, kind, make_runner), apart=2)
        for how, (make_runner, kinds) in ways.items()
        for kind in kinds
    }


def _pages(model: CausalLM, block_size: int, prefix_caching: bool = False) -> MakeMemory:
    """Makes a pool for a model, of as many blocks as the tokens need."""
    return lambda num_tokens, trace: PagedKVCache.from_config(
        model.config,
        block_size=block_size,
        num_blocks=-(-num_tokens // block_size),
        dtype=model.dtype,
        device=model.device,
        prefix_caching=prefix_caching,
        trace=trace,
    )


def memory_path(
    model: CausalLM,
    make_memory: MakeMemory,
    max_len: int,
    *,
    budget: int = 64,
    in_place: Callable[[Any], AttentionBackend] | None = None,
    warm: bool | None = None,
    scarce: bool = False,
    forked: bool = False,
) -> LedgerPath:
    """Through an engine on a memory. ValueError if it did not do what its name says.

    `make_memory` is told how many tokens it should hold. `in_place`: a backend that is made of the
    memory, and copies no K or V. `warm`: all prompts were served before, and are found. `scarce`:
    the memory holds one request, so that others give way and are computed again. `forked`: two
    continuations of each prompt, and the logits are the second one's.
    """
    samples = 2 if forked else 1

    def path(
        prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        longest = max(len(prompt) for prompt in prompts) + num_tokens
        room = longest if scarce else max_len * (samples * len(prompts) + 1)
        config = EngineConfig(max_model_len=max_len, max_num_batched_tokens=budget)
        recorder = Recorder()
        memory = make_memory(room, recorder)
        backend = None if in_place is None else in_place(memory)
        runner = ModelRunner(model, memory.storage, backend)
        engine = LLMEngine(model, config=config, memory=memory, runner=runner)
        if warm:
            engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        before = len(recorder.events)
        logits = engine_path(lambda: engine, samples=samples)(prompts, num_tokens, tokens)
        _check_deeds(recorder.events[before:], warm, scarce, forked)
        if in_place is not None:
            assert isinstance(memory.storage, KVStorage), "there are blocks to read"
            if copied := memory.storage.bytes_gathered:
                raise ValueError(f"{copied} bytes of K and V were copied: it is not in place")
        return logits

    return path


def _check_deeds(events: Sequence[Event], warm: bool | None, scarce: bool, forked: bool) -> None:
    """ValueError if no tokens were found, nobody gave way or nothing was shared, as promised."""
    hits = sum(event.num_cached for event in events if isinstance(event, Admitted))
    if warm is not None and warm != (hits > 0):
        raise ValueError(f"{hits} tokens were found: the prompts are too short, or alike")
    if scarce and not any(isinstance(event, Preempted) for event in events):
        raise ValueError("nobody gave way: give more prompts, or ask for more tokens")
    if forked and not any(event.num_tokens for event in events if isinstance(event, Forked)):
        raise ValueError("nothing was shared: the prompts are too short")
