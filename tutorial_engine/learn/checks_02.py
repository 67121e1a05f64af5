"""Introduced in notebook 02. The checks of notebook 02: each knows the usual mistakes by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.sampling.sampler import top_p


def check_cache(make_cache: Callable[[], Any]) -> Verdict:
    """Check a learner's class with update(layer, k, v, batch) → [(all k, all v)], one sequence."""

    def run() -> Verdict:
        draw = torch.Generator().manual_seed(1)
        theirs, ours, first = make_cache(), GrowingKVCache(), 0
        for new in (4, 1, 2, 1):
            allocation = ours.allocate("a", [0] * (first + new), first, new)
            batch = Batch.from_allocations([[0] * new], [allocation], ["a"])
            for layer in (0, 1):
                k, v = (torch.randn(new, 2, 8, generator=draw) for _ in "kv")
                got = theirs.update(layer, k, v, batch)
                bad = not_done("update", got) or _wrong_pairs(got)
                if bad is not None:
                    return bad
                bad = _wrong_history(got[0], ours.update(layer, k, v, batch)[0], (k, v), layer)
                if bad is not None:
                    return bad
            first += new
        return Verdict(True, f"update: {first} tokens in 4 steps, 2 layers, nothing lost")

    return guarded("update", run)


def _wrong_pairs(got: object) -> Verdict | None:
    form = "update must return a list with one pair, [(k, v)]"
    if not isinstance(got, list | tuple) or len(got) != 1:
        return Verdict(False, f"{form}; got {type(got).__name__}")
    pair = got[0]
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return Verdict(False, f"{form}; its only entry is no pair")
    if not all(isinstance(x, Tensor) for x in pair):
        return Verdict(False, f"{form}, two tensors")
    return None


def _wrong_history(
    got: Sequence[Tensor], want: Sequence[Tensor], new: Sequence[Tensor], layer: int
) -> Verdict | None:
    for name, a, b, n in zip("kv", got, want, new, strict=True):
        if a.shape == b.shape and close(a, b, 0):
            continue
        if a.shape == n.shape and close(a, n, 0) and a.shape != b.shape:
            return Verdict(False, f"update: layer {layer} gives only the new {name}; keep the old")
        if a.shape[0] != b.shape[0]:
            return Verdict(
                False,
                f"update: layer {layer} has {name} of {a.shape[0]} tokens, expected {b.shape[0]}; "
                "does each layer keep its own, and is the token axis the first?",
            )
        if name == "v" and close(a, got[0], 0):
            return Verdict(False, "update: v is a copy of k")
        return Verdict(False, f"update: layer {layer} mixes up {name}; first the old, then the new")
    return None


def check_slots(function: Callable[[list[int], list[int], int], list[int]]) -> Verdict:
    """Check a learner's function(cached, new, max_len) → the slots to write, rows 0, 1, ..."""

    def slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
        pairs = enumerate(zip(cached, new, strict=True))
        return [row * max_len + old + i for row, (old, n) in pairs for i in range(n)]

    def run() -> Verdict:
        for cached, new, max_len in (([0], [4], 8), ([4], [1], 8), ([5, 0, 2], [1, 3, 2], 16)):
            got, want = function(list(cached), list(new), max_len), slots(cached, new, max_len)
            where = f"cached={cached}, new={new}, max_len={max_len}"
            bad = not_done("slots_to_write", got)
            if bad is not None:
                return bad
            got = [int(x) for x in got]
            if got == want:
                continue
            if got == slots([0] * len(cached), new, max_len):
                return Verdict(False, f"{where}: the cached tokens are overwritten: {got}")
            if got == [x + 1 for x in want]:
                return Verdict(False, f"{where}: one too far; the first free slot is number cached")
            if len(cached) > 1 and sorted(got) != got:
                return Verdict(False, f"{where}: {got}; row r begins at slot r * max_len")
            return Verdict(False, f"{where}: expected {want}, got {got}")
        return Verdict(True, "slots_to_write: prefill, decode and a mixed batch")

    return guarded("slots_to_write", run)


def check_fit(function: Callable[[ModelConfig, int, int], int], config: ModelConfig) -> Verdict:
    """Check a learner's function(config, budget_bytes, max_len) → whole rows that fit, in bf16."""

    heads = 4 * config.num_key_value_heads  # groups of 4, and a hidden size of its own
    wide = replace(config, num_attention_heads=heads, hidden_size=3 * config.hidden_size)

    def run() -> Verdict:
        per_token = KVCacheSpec.from_model(wide, torch.bfloat16).bytes_per_token
        for budget, max_len in ((10 * 2**30, 4096), (2**30, 1000), (per_token * 64 - 1, 64)):
            got, want = function(wide, budget, max_len), budget // (per_token * max_len)
            bad = not_done("rows_that_fit", got)
            if bad is not None:
                return bad
            where = f"{budget:,} bytes, rows of {max_len}, {heads} query heads"
            if got == want and isinstance(got, int):
                continue
            known = {
                budget // (per_token // config.num_hidden_layers * max_len): "forgot the layers",
                budget // (per_token * 2 * max_len): "bf16 has 2 bytes a number, not 4",
                budget // (per_token // 2 * max_len): "a factor of 2 is missing (K and V, 2 bytes)",
                budget // (per_token * wide.group_size * max_len): "K/V heads, not query heads",
            }
            why = known.get(int(got), f"expected {want} whole rows")
            return Verdict(False, f"{where}: got {got}; {why}")
        return Verdict(True, f"rows_that_fit: {10 * 2**30 // (per_token * 4096)} rows in 10 GiB")

    return guarded("rows_that_fit", run)


def check_top_p(function: Callable[[Tensor, float], Tensor]) -> Verdict:
    """Check a learner's function(probabilities [V], p) → bool [V], True = kept."""

    def run() -> Verdict:
        draw = torch.Generator().manual_seed(2)
        spread = torch.rand(12, generator=draw).pow(3)
        sorted_ones = torch.tensor([0.5, 0.3, 0.125, 0.05, 0.025])
        halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])  # exact: two reach 0.75
        for probs, p in (
            (halves, 0.75),
            (sorted_ones, 0.7),
            (sorted_ones.flip(0), 0.9),
            (spread, 0.6),
        ):
            probs = probs / probs.sum()
            got, want = function(probs.clone(), p), top_p(probs.log(), p).isfinite()
            bad = not_done("keep_top_p", got)
            if bad is not None:
                return bad
            if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != torch.bool:
                return Verdict(False, f"keep_top_p must return a bool tensor {list(want.shape)}")
            if torch.equal(got, want):
                continue
            which = f"p={p} of {[round(float(x), 3) for x in probs]}"
            if int(got.sum()) == int(want.sum()):
                return Verdict(
                    False, f"{which}: the right number, but of other tokens; unsort them"
                )
            if int(got.sum()) == int(want.sum()) - 1:
                return Verdict(False, f"{which}: one too few; the token that crosses p stays")
            return Verdict(
                False, f"{which}: keeps {int(got.sum())} tokens, expected {int(want.sum())}"
            )
        return Verdict(True, "keep_top_p: four distributions, sorted and not")

    return guarded("keep_top_p", run)


def check_floor(function: Callable[[float, float, float, float], float]) -> Verdict:
    """Check a learner's function(flops, num_bytes, peak, bandwidth) → seconds at the very least."""

    def run() -> Verdict:
        for flops, num_bytes, peak, bandwidth in ((1e9, 1e9, 4e11, 5e10), (8e12, 1e9, 4e11, 5e10)):
            got = function(flops, num_bytes, peak, bandwidth)
            bad = not_done("least_seconds", got)
            if bad is not None:
                return bad
            compute, memory = flops / peak, num_bytes / bandwidth
            if abs(got - max(compute, memory)) <= 1e-9:
                continue
            known = {
                compute + memory: "they overlap: not the sum",
                min(compute, memory): "the slower of the two decides",
            }
            near = [why for value, why in known.items() if abs(got - value) < 1e-9]
            why = near[0] if near else "the slower of the two decides"
            case = f"{flops:g} FLOPs at {peak:g}/s, {num_bytes:g} bytes at {bandwidth:g}/s"
            return Verdict(False, f"{case}: got {got:g} s; {why}")
        return Verdict(True, "least_seconds: once memory decides, once arithmetic")

    return guarded("least_seconds", run)
