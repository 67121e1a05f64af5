"""The checks and the bug zoo of notebook 02: right answers pass, each usual mistake is named."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_02 import BUGS_02
from tutorial_engine.learn.checks_02 import (
    check_cache,
    check_floor,
    check_run_new,
    check_slots,
    check_static_cache,
    check_top_p,
    check_why_finished,
)
from tutorial_engine.learn.own_cache import WriteAndRead
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


class Keeps:
    """The right cache; a subclass gets one thing wrong."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        return [(k, v)]


class OnlyNew(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return [(k, v)]


class OneForAllLayers(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return super().update(0, k, v, batch)


class NewFirst(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip((k, v), self.kv[layer], strict=True))
        self.kv[layer] = (k, v)
        return [(k, v)]


class NoList(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return super().update(layer, k, v, batch)[0]


class KeyTwice(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        all_k, _ = super().update(layer, k, v, batch)[0]
        return [(all_k, all_k)]


class Swapped(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        all_k, all_v = super().update(layer, k, v, batch)[0]
        return [(all_v, all_k)]


class AlongHeads(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        if layer in self.kv:
            k, v = (torch.cat(pair, dim=-1) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        return [(k, v)]


class HeadsFirst(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        all_k, all_v = super().update(layer, k, v, batch)[0]
        return [(all_k.transpose(0, 1), all_v.transpose(0, 1))]


def shared_by_all() -> Any:
    """A class, made anew, whose dict belongs to the class: all its caches share it."""

    class Shared(Keeps):
        kv: dict[int, tuple[Tensor, Tensor]] = {}  # noqa: RUF012  the mistake

        def __init__(self) -> None:
            """Nothing: the dict is made above."""

    return Shared


class Forgets(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        super().update(layer, k, v, batch)


class NothingOld(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        old_k, old_v = self.kv[layer]
        self.kv[layer] = torch.cat((old_k, k)), torch.cat((old_v, v))
        return [self.kv[layer]]


class Writes(Keeps):
    """A right one by other means: one tensor of room, written in place, and a tuple of lists."""

    def __init__(self) -> None:
        self.room: dict[int, Tensor] = {}
        self.used: dict[int, int] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        room = self.room.setdefault(layer, torch.zeros(2, 16, *k.shape[1:]))
        start = self.used.get(layer, 0)
        end = self.used[layer] = start + len(k)
        room[0, start:end], room[1, start:end] = k, v
        k.zero_()  # it is a copy
        return ([room[0, :end], room[1, :end]],)


class Static:
    """The right static cache; a subclass gets one thing wrong."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        sizes = (config.num_hidden_layers, max_len, config.num_key_value_heads, config.head_dim)
        self.k, self.v = torch.empty(sizes), torch.empty(sizes)

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        return self.put(layer, k, v, batch.positions, int(batch.positions[-1]) + 1)

    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        self.k[layer, where], self.v[layer, where] = k, v
        return [(self.k[layer, :end], self.v[layer, :end])]


class HeadsFirstView(Static):
    """Right: its memory has the heads before the tokens, and update gives a turned view."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        sizes = (config.num_key_value_heads, max_len, config.head_dim)
        self.kv = [torch.full((2, *sizes), torch.nan) for _ in range(config.num_hidden_layers)]

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        for i, position in enumerate(batch.positions.tolist()):
            self.kv[layer][:, :, position] = torch.stack((k[i], v[i]))
        both = self.kv[layer][:, :, : position + 1].transpose(1, 2)
        return ((both[0], both[1]),)


class CountsItself(Static):
    """Right: asks no batch, and counts for each layer; in place, of the copies it is given."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.used = [0] * config.num_hidden_layers

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        start = self.used[layer]
        self.used[layer] += len(k)
        found = self.put(layer, k, v, slice(start, start + len(k)), start + len(k))
        k.zero_()
        return found


class BothInOne(Static):
    """Right: one flat tensor for all layers, K and V, in doubles."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = torch.stack((self.k, self.v)).double()

    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k.double(), v.double(), where, end)


class Grows(Keeps):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()


class WholeBuffer(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k, v, where, len(self.k[0]))


class OneEarly(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k, v, where - 1, end)


class OneLate(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k, v, where + 1, end)


class EndIsLast(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k, v, where, end - 1)


class AtZero(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, k, v, slice(len(k)), end)


class OneBuffer(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(0, k, v, where, end)


class CountsInLayers(CountsItself):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        start, self.used[0] = self.used[0], self.used[0] + len(k)
        return self.put(layer, k, v, slice(start, start + len(k)), start + len(k))


class AllocatesInUpdate(Static):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v)
        return super().update(layer, k, v, batch)


class NoMemory(Static):
    def __init__(self, config: ModelConfig, max_len: int) -> None: ...


class QueryHeads(Static):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        heads = config.num_attention_heads
        super().__init__(replace(config, num_key_value_heads=heads), max_len)


class SwappedBuffers(Static):
    def put(self, layer: int, k: Tensor, v: Tensor, where: Any, end: int) -> Any:
        return super().put(layer, v, k, where, end)


class Open(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any: ...


def run(model: Any, attention: Any, ids: list[int], first: int, shift: int = 0) -> Tensor:
    """Hidden states of ids[first:]; with a shift their positions are wrong."""
    return model(Batch.from_sequences([ids[first:]], [first + shift]), attention)


def run_new(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    return model.compute_logits(run(model, attention, token_ids, num_computed))[-1]


def token_by_token(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    for i in range(num_computed, len(token_ids)):
        hidden = model(Batch.from_sequences([[token_ids[i]]], [i]), attention)
    return model.compute_logits(hidden).squeeze(0)


def consumes(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    first = num_computed
    del token_ids[:first]  # it is a copy
    return model.compute_logits(run(model, attention, [0] * first + token_ids, first))[-1].double()


def why(
    new_ids: Sequence[int], text: str, eos_ids: Sequence[int], stop: Sequence[str], limit: int
) -> str | None:
    if any(new_ids[-1] == eos for eos in eos_ids):
        return "stop"
    for one in stop:
        if text.find(one) >= 0:
            return "stop"
    return "length" if limit - len(new_ids) <= 0 else None


def why_numpy(new_ids: list[int], text: str, eos: Any, stop: Any, limit: int) -> Any:
    while (new_ids and new_ids[-1] in eos) or any(map(text.__contains__, stop)):
        return np.str_("stop")
    return None if np.int64(len(new_ids)) < limit else np.str_("length")


def why_but(**changes: Callable[..., bool]) -> Callable[..., str | None]:
    """A why_finished from three conditions, some of them wrong; the order is theirs."""
    right: dict[str, Callable[..., bool]] = {
        "eos": lambda ids, text, eos, stop, limit: ids[-1] in eos,
        "stop": lambda ids, text, eos, stop, limit: any(one in text for one in stop),
        "length": lambda ids, text, eos, stop, limit: len(ids) >= limit,
    }
    conditions = changes | {name: c for name, c in right.items() if name not in changes}

    def function(*state: Any) -> str | None:
        for name, holds in conditions.items():
            if holds(*state):
                return "length" if name == "length" else "stop"
        return None

    return function


def slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [r * max_len + old + i for r, (old, n) in pairs for i in range(n)]


def packed(cached: list[int], new: list[int], max_len: int) -> list[int]:
    found: list[int] = []
    start = 0
    for old, n in zip(cached, new, strict=True):
        found += range(start + old, start + old + n)
        start += old + n
    return found


def nucleus(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) - values < p
    return keep


def still_sorted(probs: Tensor, p: float) -> Tensor:
    values = probs.sort(descending=True).values
    return values.cumsum(-1) - values < p


def ascending(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort()
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) - values < p
    return keep


def one_too_few(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) <= p
    return keep


def by_loop(probs: Tensor, p: float) -> Tensor:
    kept, mass = [False] * len(probs), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i].item()):
        if mass < p - 1e-9:
            kept[i] = True
        mass += probs[i].item()
    probs.zero_()  # it is a copy
    return torch.tensor(kept)


def indices(probs: Tensor, p: float) -> Tensor:
    return nucleus(probs, p).nonzero().flatten()


def nested(cached: list[int], new: list[int], m: int) -> list[list[int]]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [[r * m + old + i for i in range(n)] for r, (old, n) in pairs]


def seconds(
    weights: int, tokens: int, kv: int, peak: float, width: float, flops: int = 2, size: int = 4
) -> float:
    return max(flops * weights * tokens / peak, (size * weights + kv) / width)


RIGHT: list[tuple[Callable[..., Verdict], Any]] = [
    (check_cache, Keeps),
    (check_run_new, run_new),
    (check_static_cache, Static),
    (check_slots, slots),
    (check_top_p, nucleus),
    (check_why_finished, why),
    (check_floor, seconds),
]
UNUSUAL: list[tuple[Callable[..., Verdict], Any]] = [
    (check_cache, Writes),
    (check_run_new, token_by_token),
    (check_run_new, consumes),
    (check_static_cache, HeadsFirstView),
    (check_static_cache, CountsItself),
    (check_static_cache, BothInOne),
    (check_slots, lambda *args: np.array(slots(*args))),
    (check_slots, lambda *args: torch.tensor(slots(*args))),
    (check_slots, lambda *args: (float(slot) for slot in slots(*args))),
    (check_slots, lambda *args: tuple(np.float64(slot) for slot in slots(*args))),
    (check_top_p, by_loop),
    (check_top_p, lambda probs, p: nucleus(probs.double(), p)),
    (check_why_finished, why_numpy),
    (check_floor, lambda *args: torch.tensor(seconds(*args))),
    (check_floor, lambda *args: np.float32(seconds(*args))),
]
WRONG: list[tuple[Callable[..., Verdict], Any, str]] = [
    (check_cache, OnlyNew, "only the new k"),
    (check_cache, OneForAllLayers, "each layer keep its own"),
    (check_cache, NewFirst, "first the old"),
    (check_cache, NoList, "without the list around it"),
    (check_cache, KeyTwice, "copy of k"),
    (check_cache, Swapped, "k and v are swapped"),
    (check_cache, AlongHeads, "k and v are [tokens, heads, head_dim]: join axis 0."),
    (check_cache, HeadsFirst, "the tokens are the first axis"),
    (check_cache, shared_by_all(), "make the dict in __init__"),
    (check_cache, NothingOld, "the first time, layer 0 has nothing old"),
    (check_cache, Forgets, "update returns None: does it end with `return`?"),
    (check_run_new, lambda m, a, ids, n: run_new(m, a, ids, 0), "runs all 6 tokens again"),
    (check_run_new, lambda m, a, ids, n: run_new(m, a, ids, len(ids) - 1), "last token alone"),
    (
        check_run_new,
        lambda m, a, ids, n: m.compute_logits(run(m, a, ids, n, int(n > 0)))[-1],
        "one too late",
    ),
    (
        check_run_new,
        lambda m, a, ids, n: m.compute_logits(run(m, a, ids, n, -n))[-1],
        "not start at 0 again",
    ),
    (check_run_new, lambda m, a, ids, n: run_new(m, None, ids, n), "was not handed over"),
    (check_run_new, lambda m, a, ids, n: run_new(m, a, ids, max(0, n - 1)), "runs 2 tokens"),
    (
        check_run_new,
        lambda m, a, ids, n: m.compute_logits(run(m, a, ids, n)),
        "logits of all 5 new tokens",
    ),
    (
        check_run_new,
        lambda m, a, ids, n: m.compute_logits(run(m, a, ids, n))[0],
        "logits of the first new token",
    ),
    (
        check_run_new,
        lambda m, a, ids, n: m.compute_logits(run(m, a, ids, n))[-1:],
        "it returns [1, 512]; take row 0",
    ),
    (check_run_new, lambda m, a, ids, n: run(m, a, ids, n)[-1], "hidden states"),
    (
        check_run_new,
        lambda m, a, ids, n: m(Batch.from_sequences(ids[n:], [n]), a),
        "5 sequences but 1 first positions; Batch.from_sequences takes a list of sequences",
    ),
    (
        check_run_new,
        lambda m, a, ids, n: m(Batch.from_sequences([ids[n:]], n), a),
        "not iterable; Batch.from_sequences takes a list of sequences",
    ),
    (check_run_new, lambda *args: run_new(*args).softmax(-1), "these are probabilities"),
    (check_run_new, lambda *args: run_new(*args).argmax(), "it returns one number"),
    (check_run_new, lambda *args: run_new(*args).tolist(), "got list"),
    (check_run_new, lambda *args: run_new(*args) + 1, "other logits"),
    (check_slots, lambda cached, new, m: slots([0] * len(new), new, m), "overwritten"),
    (check_slots, lambda cached, new, m: [s + 1 for s in slots(cached, new, m)], "one too far"),
    (check_slots, lambda cached, new, m: [s - 1 for s in slots(cached, new, m)], "too early"),
    (check_slots, lambda cached, new, m: slots(cached, new, 8), "not always 8"),
    (check_slots, lambda cached, new, m: slots(cached, new, 0), "got [0, 1, 0, 1]; row r begins"),
    (check_slots, lambda c, n, m: slots(c, [1] * len(n), m), "each new token needs one"),
    (
        check_slots,
        lambda c, n, m: slots([0] * len(n), [*map(sum, zip(c, n, strict=True))], m),
        "only the new",
    ),
    (check_slots, packed, "the rows are packed"),
    (check_slots, lambda c, n, m: [r * m for r in range(len(n)) for _ in range(n[r])], "its own"),
    (check_slots, nested, "no list for each row"),
    (check_slots, lambda cached, new, m: [7] * sum(new), "expected [0, 1, 2, 3], got [7"),
    (check_top_p, still_sorted, "put the answer back"),
    (check_top_p, one_too_few, "keeps 0 tokens; the token that crosses p stays"),
    (check_top_p, lambda probs, p: one_too_few(probs, max(p, 0.5)), "one too few: the token"),
    (check_top_p, lambda probs, p: probs > p, "with p alone"),
    (check_top_p, lambda probs, p: probs * nucleus(probs, p), "which are kept, and not"),
    (check_top_p, ascending, "sort with descending=True"),
    (check_top_p, indices, "got whole numbers"),
    (check_top_p, lambda probs, p: ~nucleus(probs, p), "it is inverted"),
    (check_top_p, lambda probs, p: nucleus(probs, p).tolist(), "got list"),
    (check_top_p, lambda probs, p: nucleus(probs, p)[:3], "got shape [3]"),
    (check_top_p, lambda probs, p: nucleus(probs, p + 1e-6), "one too many; when the sum"),
    (check_top_p, lambda probs, p: nucleus(probs, 1.0), "keeps 5 tokens, expected 1"),
    (
        check_why_finished,
        why_but(length=lambda ids, text, eos, stop, limit: len(ids) >= limit),
        "stop wins over length",
    ),
    (
        check_why_finished,
        why_but(length=lambda ids, text, eos, stop, limit: len(ids) > limit),
        "the last one counts",
    ),
    (
        check_why_finished,
        why_but(length=lambda ids, text, eos, stop, limit: len(ids) >= limit - 1),
        "one token is still allowed",
    ),
    (
        check_why_finished,
        why_but(length=lambda ids, text, eos, stop, limit: len(ids) >= 8),
        "reached at the first token",
    ),
    (
        check_why_finished,
        why_but(eos=lambda ids, text, eos, stop, limit: any(i in eos for i in ids[:-1])),
        "look at new_ids[-1] as well",
    ),
    (
        check_why_finished,
        why_but(eos=lambda ids, text, eos, stop, limit: len(ids) > 1 and ids[-1] in eos),
        "the first one is checked too",
    ),
    (
        check_why_finished,
        why_but(eos=lambda ids, text, eos, stop, limit: ids[-1] == eos[0]),
        "eos_ids may hold several",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: text.endswith(tuple(stop))),
        "search the whole text",
    ),
    (
        check_why_finished,
        why_but(eos=lambda ids, text, eos, stop, limit: any(i in eos for i in ids)),
        "look at new_ids[-1] alone",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: any(text.find(s) > 0 for s in stop)),
        "text.find gives 0 there",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: any(s in text.strip() for s in stop)),
        "strip() takes such characters away",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: stop in text),
        "stop is a tuple of strings",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: bool(stop) and stop[0] in text),
        "look for each of them",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: bool(stop)),
        "not every text is stopped",
    ),
    (
        check_why_finished,
        why_but(stop=lambda ids, text, eos, stop, limit: False),
        "look for it in text",
    ),
    (check_why_finished, lambda *state: why(*state) or False, 'answer "stop", "length" or None'),
    (check_why_finished, lambda *state: why(*state) or "length", "it goes on: return None"),
    (
        check_why_finished,
        lambda ids, text, eos, stop, limit: (
            "stop"
            if ids[-1] in eos
            else "length"
            if len(ids) >= limit
            else why(ids, text, eos, stop, limit)
        ),
        "stop wins over length, for stop strings as well",
    ),
    (check_static_cache, Grows, "the right k, but in new memory"),
    (check_static_cache, WholeBuffer, "gives k of all 12 slots"),
    (check_static_cache, OneEarly, "gives k one slot too early"),
    (check_static_cache, OneLate, "gives k one slot too late"),
    (check_static_cache, EndIsLast, "gives k of 3 tokens, one too few: the end is"),
    (check_static_cache, AtZero, "new tokens in slot 0 again"),
    (check_static_cache, OneBuffer, "layer 0 gives k of another layer"),
    (check_static_cache, CountsInLayers, "a count must not advance in each of them"),
    (check_static_cache, AllocatesInUpdate, "old k that are all 0: make the memory in __init__"),
    (check_static_cache, NoMemory, "has no attribute 'k'; make the memory in __init__"),
    (check_static_cache, QueryHeads, "A buffer of a layer is [max_len, K/V heads, head_dim]"),
    (check_static_cache, SwappedBuffers, "k and v are swapped"),
    (check_static_cache, OnlyNew, "raised TypeError"),
    (check_floor, lambda w, t, kv, p, b: 2 * w * t / p + (4 * w + kv) / b, "not the sum"),
    (check_floor, lambda w, t, kv, p, b: min(2 * w * t / p, (4 * w + kv) / b), "max, not min"),
    (check_floor, lambda *args: 1e3 * seconds(*args), "these are milliseconds"),
    (check_floor, lambda *args: 1e6 * seconds(*args), "these are microseconds"),
    (check_floor, lambda *args: seconds(*args, flops=1), "two FLOPs a token"),
    (check_floor, lambda *args: seconds(*args, size=1), "has 4 bytes"),
    (check_floor, lambda w, t, kv, p, b: seconds(w, t, 0, p, b), "the K and V in the cache"),
    (check_floor, lambda w, t, kv, p, b: seconds(w, 1, kv, p, b), "needs its own FLOPs"),
    (
        check_floor,
        lambda w, t, kv, p, b: max(2 * w * t / p, (4 * w * t + kv) / b),
        "they are read once",
    ),
    (check_floor, lambda w, t, kv, p, b: max(p / w / t / 2, b / (4 * w + kv)), "upside down"),
    (check_floor, lambda w, t, kv, p, b: seconds(w, t, kv, b, p), "are swapped"),
    (check_floor, lambda w, t, kv, p, b: max(2 * w * t // p, (4 * w + kv) // b), "use /"),
    (check_floor, lambda *args: (seconds(*args), "memory"), "return one number"),
    (check_floor, lambda *args: 1.5, "s: the slower of the two decides"),
]
CACHES = [check_cache, check_static_cache]
NEVER_RETURNS = [check for check, _ in RIGHT if check not in CACHES]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_is_accepted(check: Callable[..., Verdict], answer: Any) -> None:
    assert check(answer).ok is True


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_mistake_is_named(check: Callable[..., Verdict], answer: Any, words: str) -> None:
    verdict = check(answer)
    assert verdict.ok is False
    assert words in verdict.message, verdict


@pytest.mark.parametrize(("check", "answer"), UNUSUAL)
def test_unusual_right_answer_is_accepted(check: Callable[..., Verdict], answer: Any) -> None:
    verdict = check(answer)
    assert verdict.ok is True, verdict


def test_each_mistake_has_a_message_of_its_own_and_each_check_enough_of_them() -> None:
    for check, _ in RIGHT:
        told = [check(answer).message for c, answer, _ in WRONG if c is check]
        assert len(told) >= 4, check
        assert len(set(told)) == len(told), sorted(told)
    assert {check for check, _ in UNUSUAL} == {check for check, _ in RIGHT}


def forgotten(*args: Any) -> None:
    answer = args[0]
    assert answer is not None


@pytest.mark.parametrize("check", NEVER_RETURNS)
def test_untouched_exercise_is_open_and_a_forgotten_return_is_wrong(
    check: Callable[..., Verdict],
) -> None:
    verdict = check(lambda *_: None)
    assert verdict.ok is None and verdict.message.startswith("not done yet: ")
    verdict = check(forgotten)
    assert verdict.ok is False
    assert verdict.message.endswith("returns None: does it end with `return`?")


def always_none(*args: Any) -> None:
    return None


@pytest.mark.parametrize("check", NEVER_RETURNS)
def test_return_none_is_an_answer_and_not_an_untouched_body(
    check: Callable[..., Verdict],
) -> None:
    verdict = check(always_none)
    assert verdict.ok is False
    assert verdict.message.endswith("returns None whatever it is asked")


@pytest.mark.parametrize("check", CACHES)
def test_untouched_cache_is_open(check: Callable[..., Verdict]) -> None:
    verdict = check(Open)
    assert verdict.ok is None and verdict.message.startswith("not done yet: ")


@pytest.mark.parametrize("check", [check for check, _ in RIGHT])
def test_exception_becomes_a_verdict(check: Callable[..., Verdict]) -> None:
    def fails(*_: object) -> None:
        raise KeyError("boom")

    assert check(fails).ok is False
    assert "boom" in check(fails).message


def test_a_right_answer_runs_the_engine(model: Qwen3ForCausalLM) -> None:
    theirs, ours = Keeps(), GrowingKVCache()
    for first, last in ((0, 3), (3, 4), (4, 5)):
        token_ids = [5, 6, 7, 8, 9][:last]
        room = ours.allocate("a", token_ids, first, last - first)
        batch = Batch.from_allocations([token_ids[first:]], [room], ["a"])
        got = model(batch, SdpaAttention(WriteAndRead(theirs)))
        assert torch.equal(got, model(batch, SdpaAttention(ours)))


def path(model: Qwen3ForCausalLM, chunk_size: int | None) -> Tensor:
    """Logits after a prefill of 8 tokens and 4 decodes, in memory that holds zeros."""
    cache = StaticKVCache.from_config(model.config, max_len=16)
    cache.storage.k.zero_()
    cache.storage.v.zero_()
    request = Request("a", list(range(40, 48)))
    logits = [prefill(model, cache, [request], chunk_size=chunk_size)]
    for token in (50, 60, 70, 80):
        request.token_ids.append(token)
        logits.append(decode(model, cache, [request]))
    return torch.cat(logits)


@pytest.mark.parametrize("name", BUGS_02)
def test_bug_of_the_cache_is_found_by_logits_and_goes_again(
    model: Qwen3ForCausalLM, name: str
) -> None:
    chunk_size = 4 if "chunk" in name else None
    right = path(model, None)
    with planted(name, BUGS_02):
        wrong = path(model, chunk_size)
    assert torch.allclose(path(model, chunk_size), right, atol=1e-3)
    assert (wrong - right).abs().amax(-1)[1:].min() > 0.01
    if chunk_size is None:
        assert torch.allclose(wrong[0], right[0], atol=1e-3), "the first new token is right"
