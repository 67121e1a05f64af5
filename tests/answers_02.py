"""The exercises of notebook 02: answers that are right, and wrong ones."""

from typing import Any

import numpy as np
import torch
from exercises import RIGHT, Exercise, but
from torch import Tensor

from tutorial_engine.learn.exercises import lesson_02 as c2
from tutorial_engine.learn.exercises.judge import rewritten
from tutorial_engine.learn.exercises.lesson_02_cache_test import check_cache_test
from tutorial_engine.learn.parts.cache import MyCache, MyStaticCache, transplant
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig

# -- notebook 02 ---------------------------------------------------------------------------------


class WritesInPlace:
    """A right cache by other means: one tensor of room, and a tuple of lists."""

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


def cache_with(*changes: tuple[str, str]) -> Any:
    return rewritten(MyCache, *changes)


def static_cache(*changes: tuple[str, str]) -> Any:
    return rewritten(MyStaticCache, *changes)


def static_with(written: str) -> Any:
    """A static cache in which this stands where k and v are written."""
    return static_cache(("self.k[layer, start:end], self.v[layer, start:end] = k, v", written))


def in_memory(dtype: str, *changes: tuple[str, str]) -> Any:
    return static_cache(("heads, dim)", f"heads, dim, dtype={dtype})"), *changes)


PUT = ("self.k[layer, start:end]", "self.k[layer, batch.positions]")  # wants one dtype
IN_NUMPY = "torch.from_numpy(self.k.numpy().copy())"


class IntoACopy(static_with("self.k[layer][batch.positions].copy_(k)")):  # type: ignore[misc]
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__(config, max_len)
        self.k, self.v = torch.empty_like(self.k), torch.empty(self.v.shape)


class Shared(MyCache):
    kv: dict[int, tuple[Tensor, Tensor]] = {}  # noqa: RUF012  the mistake

    def __init__(self) -> None:
        pass


class HeadsFirstView(MyStaticCache):
    """Right: its memory has the heads before the tokens, and update gives a turned view."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        sizes = (config.num_key_value_heads, max_len, config.head_dim)
        self.kv = [torch.full((2, *sizes), torch.nan) for _ in range(config.num_hidden_layers)]

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
        for i, position in enumerate(batch.positions.tolist()):
            self.kv[layer][:, :, position] = torch.stack((k[i], v[i]))
        both = self.kv[layer][:, :, : position + 1].transpose(1, 2)
        return ((both[0], both[1]),)


class Grows(MyCache):
    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()


class CopiesInPlace(MyStaticCache):
    """The old ones come back from a second memory, each step."""

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> Any:
        start = int(batch.positions[0])
        old = torch.empty(2, start, *k.shape[1:])
        old[0], old[1] = self.k[layer, :start], self.v[layer, :start]
        self.k[layer, :start], self.v[layer, :start] = old
        return super().update(layer, k, v, batch)


def transplant_anew(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    """Right: a new dict of lists, in float64, slot by slot; the memory stays as it was."""
    new = {one: [x.double() for x in pair] for one, pair in memory.items()}
    for i, slot in ((i, slot) for i in range(2) if "KV"[i] in which for slot in slots):
        new[layer][i][slot] = donor[layer][i][slot]
    return new


def heads_of_all_slots(memory: Any, donor: Any, layer: int, slots: Any, which: str) -> Any:
    for i in (i for i in range(2) if "KV"[i] in which):
        memory[layer][i][:, slots] = donor[layer][i][:, slots]
    return memory


def token_by_token(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    for i in range(num_computed, len(token_ids)):
        hidden = model(Batch.from_sequences([[token_ids[i]]], [i]), attention)
    return model.compute_logits(hidden).squeeze(0)


def slots_in_rows(cached: list[int], new: list[int], m: int) -> list[list[int]]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [[r * m + old + i for i in range(n)] for r, (old, n) in pairs]


def slots_to_write(*case: Any) -> list[int]:
    return [slot for row in slots_in_rows(*case) for slot in row]


def nucleus_by_loop(probs: Tensor, p: float) -> Tensor:
    kept, mass = [False] * len(probs), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i].item()):
        if mass < p - 1e-9:
            kept[i] = True
        mass += probs[i].item()
    probs.zero_()  # it is a copy
    return torch.tensor(kept)


def why_numpy(new_ids: list[int], text: str, eos: Any, stop: Any, limit: int) -> Any:
    while (new_ids and new_ids[-1] in eos) or any(map(text.__contains__, stop)):
        return np.str_("stop")
    return None if np.int64(len(new_ids)) < limit else np.str_("length")


def why(old: str, new: str) -> Any:
    """The right reason with this change."""
    return rewritten(RIGHT["why_finished"], (old, new))


STOPS = "any(one in text for one in stop)"
NEWEST = "new_ids[-1] in eos_ids"

EXERCISES: dict[str, Exercise] = {
    "MyCache": Exercise(
        c2.check_cache,
        [MyCache, WritesInPlace],
        c2.CACHE_SLIPS,
        [
            (cache_with(("[(k, v)]", "[k, v]")), "without the list"),
            (cache_with(("[(k, v)]", "torch.cat(k, v)")), "raised TypeError"),
            (Shared, "a second cache begins with the tokens of the first"),
            (cache_with(("torch.cat(pair)", "pair[0] + pair[1]")), ""),
            (cache_with(("torch.cat(pair)", "torch.cat((pair, pair))")), "raised TypeError"),
            (cache_with(("(k, v), strict", "(k, k), strict")), "k = k0 k1 k2, v = v0 v1 k2"),
            (cache_with(("(k, v), strict", "(k, torch.cat((k, v))), strict")), "v = v0 v1 k2 v2"),
            (
                cache_with(("if layer in", "if len(k) < 3 and (layer := 0) in")),
                "k = k0(layer 0) k0",
            ),
            (cache_with(("(torch.cat(pair) for", "(torch.cat(pair).flip(0) for")), "k = k2 k1 k0"),
            (
                cache_with(("[(k, v)]", "[(k.transpose(0, 1), v.transpose(0, 1))]")),
                "k of shape [1, 2, 4], expected [2, 1, 4]",
            ),
            (cache_with(("[(k, v)]", "[(k, v.bfloat16())]")), "in torch.bfloat16, which keeps 3"),
        ],
    ),
    "transplant": Exercise(
        c2.check_transplant,
        [transplant, transplant_anew],
        c2.TRANSPLANT_SLIPS,
        [
            (lambda memory, donor, layer, *_: {layer: memory[layer]}, "a dict with layers [0]"),
            (lambda memory, donor, layer, *_: {**memory, layer: donor[layer][0]}, "must be a pair"),
            (
                lambda memory, donor, layer, slots, _: (
                    memory[layer][0][:, slots].copy_(donor[layer][0][:, slots]) is None or memory
                ),
                "nothing has changed",  # a list as an index makes a copy
            ),
            (heads_of_all_slots, "K[0, 1, 2, 3] = other numbers"),
            (lambda memory, donor, layer, *_: {**memory, layer: donor[layer]}, "K = donor_K; V ="),
            (
                lambda memory, donor, layer, slots, _: memory[layer][0].__setitem__(
                    slots, donor[layer][0]
                ),
                "raised RuntimeError",
            ),
            (lambda memory, donor, layer, slots, _: memory[layer][slots], "raised TypeError"),
        ],
    ),
    "MyStaticCache": Exercise(
        c2.check_static_cache,
        [MyStaticCache, HeadsFirstView, in_memory("torch.float64")],
        c2.STATIC_SLIPS,
        [
            (Grows, "the right k, but in new memory"),
            (static_cache(("config.num_hidden_layers", "4")), "raised IndexError"),
            (static_cache((", max_len, heads", ", 4096, heads")), "its memory has"),
            (in_memory("torch.bfloat16"), "in torch.bfloat16, which keeps 3 digits"),
            (in_memory("torch.float64", PUT), "raised RuntimeError"),
            (CopiesInPlace, "the old ones are written again"),
            (static_cache(("torch.zeros_like(self.k)", IN_NUMPY)), "make it with torch.zeros"),
            (static_with("self.k[layer, start:end] = k"), "k = k0, v = —"),
            (IntoACopy, "k = —, v = —"),
            (
                static_with("self.k[layer, start:end] = self.v[layer, start:end] = k"),
                "k = k0, v = k0",
            ),
            (
                static_with("self.k[layer, end - 1], self.v[layer, end - 1] = k[-1], v[-1]"),
                "k = — k1, v = — v1",
            ),
            (
                static_with("p = batch.positions; self.k[layer, p] += k; self.v[layer, p] += v"),
                "holds the sum of old and new",
            ),
            (static_with("self.k[layer, batch.position] = k"), "Did you mean 'positions'?"),
            (
                static_with("return self.k[layer, : batch.positions]"),
                "a list with one pair, [(k, v)]; got Tensor",
            ),
            (
                static_cache(("self.k = torch", "k = torch"), ("(self.k)", "(k)")),
                "has no attribute 'k'",
            ),
            (
                static_cache(("num_key_value_heads", "num_attention_heads")),
                "shape [1, 2, 4], expected [1, 1, 4]",
            ),
        ],
    ),
    "run_new": Exercise(
        c2.check_run_new,
        [RIGHT["run_new"], token_by_token],
        c2.RUN_SLIPS,
        [
            (
                lambda m, a, ids, n: RIGHT["run_new"](m, a, ids, max(0, n - 1)),
                "ran at positions [1, 2]; returned",
            ),
            (lambda m, a, ids, n: m(Batch.from_sequences(ids[n:], [n]), a), "raised "),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([ids[n:]], [[*range(n, 9)]]), a),
                "raised ",
            ),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([torch.tensor(ids[n:])], [n]), a),
                "raised ",
            ),
            (lambda m, a, ids, n: m(ids[n:], a), "raised "),
            (lambda m, a, ids, n: m(Batch([ids[n:]], [n]), a), "raised "),
            (but("run_new", lambda logits: logits + 1), ""),
            (
                lambda m, a, ids, n: (RIGHT["run_new"](m, a, ids, n), ids.append(1))[0],
                "must leave the caller's",
            ),
        ],
    ),
    "cache_test": Exercise(
        check_cache_test,
        [
            lambda run: run([9, 8, 7, 6], [], chunk_size=2),
            lambda run: run(range(3, 15), [5, 6], 4)[-1],
            lambda run: torch.cat((run([9, 8, 7], [5]), run(range(40), (), 8))),
        ],
        wrong=[
            (lambda run: run([9, 8, 7, 6], []), "0 of 4"),
            (lambda run: run([9, 8, 7], [5]), "and keys of each forward      3 and 3, 1 and 4"),
            (lambda run: run([9, 8, 7], [5]), "two or more queries and earlier keys  in none"),
            (lambda run: run([65] * 4, [], 2), "2 of 4 bugs are caught. Not caught: decode starts"),
            (lambda run: run([9, 8, 7, 6], [], 2).argmax(-1), "the logits, and not tokens"),
            (lambda run: run([9], []) + torch.rand(1), "without a bug give different"),
            (lambda run: run([9, 8, 7, 6], [], 2).tolist(), "a tensor; got list"),
            (lambda run: run([9] * 300, []), "at most 256 tokens"),
            (lambda run: run([], [9]), "at least one token of a prompt"),
        ],
    ),
    "slots_to_write": Exercise(
        c2.check_slots_to_write,
        [
            slots_to_write,
            lambda *case: tuple(np.float64(slot) for slot in slots_to_write(*case)),
        ],
        c2.SLOT_SLIPS,
        [
            (slots_in_rows, "one flat list of numbers"),
            (
                lambda c, new, m: [r * m + c[r] + i for r in c for i in range(new[r])],
                "raised IndexError",
            ),
        ],
    ),
    "keep_top_p": Exercise(
        c2.check_top_p,
        [
            *(RIGHT["keep_top_p"], nucleus_by_loop),
        ],
        c2.TOP_P_SLIPS,
        [
            (lambda probs, p: probs >= max(p, 0.4), "yours keeps    none"),
            (but("keep_top_p", lambda keep: keep.int()), "dtype torch.int32, expected torch.bool"),
            (lambda probs, p: probs.index_put_((probs > 0,), probs > 1), "raised RuntimeError"),
            (lambda probs, p: probs.sort(descending=True).cumsum(-1) < p, "raised AttributeError"),
        ],
    ),
    "why_finished": Exercise(
        c2.check_why_finished,
        [RIGHT["why_finished"], why_numpy],
        c2.REASON_SLIPS,
        [
            (lambda *case: "stop" if case[0][-1] == case[2] else None, "None for all 26 inputs"),
            (lambda ids, text, eos, stop, limit: stop[0] in text, "raised IndexError"),
            (but("why_finished", lambda reason: reason and reason.upper()), "'STOP'"),
            (why(NEWEST, "any(i in eos_ids for i in new_ids[:-1])"), ""),
            (why(NEWEST, "new_ids[-1] <= max(eos_ids)"), ""),
            (why(NEWEST, "new_ids[-1] in (0, 3)"), ""),
            (why(NEWEST, "new_ids[-1] in {*eos_ids} & {0, 3}"), ""),
            (why(STOPS, '__import__("re").search("|".join(stop) or "^$", text)'), ""),
            (why(STOPS, "stop in text"), "raised TypeError"),
            (why(STOPS, "all(one in text for one in stop)"), ""),
            (why(STOPS, "any(one.strip() in text for one in stop)"), r"('\n',)"),
            (why(STOPS, "any(one.rstrip(chr(10)) in text for one in stop)"), r"('\n',)"),
            (why(STOPS, "any(one.rstrip(' ') in text for one in stop)"), "('coat ',)"),
            (why(STOPS, "any(one in text.strip() for one in stop)"), r"('\n',)"),
            (why(STOPS, "any(one in text.split() for one in stop)"), ""),
        ],
    ),
    "least_seconds": Exercise(
        c2.check_floor,
        [
            c2.least_seconds,
            lambda *case: torch.tensor(c2.least_seconds(*case)),
        ],
        c2.FLOOR_SLIPS,
        [
            (lambda *case: (c2.least_seconds(*case), "memory"), "return one number"),
            (lambda *case: c2.least_seconds(*case) + 1, "reading "),
        ],
    ),
}
