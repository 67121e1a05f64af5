"""The exercises of notebook 02: answers that are right, and wrong ones."""

from typing import Any

import numpy as np
import torch
from exercises import RIGHT, Exercise, but
from torch import Tensor

from tutorial_engine.learn import checks_02 as c2
from tutorial_engine.learn.cache_test_check import check_cache_test
from tutorial_engine.learn.judge import rewritten, slips_of
from tutorial_engine.learn.own_cache import MyCache, MyStaticCache, transplant
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig

# -- notebook 02 ---------------------------------------------------------------------------------


TRANSPLANT_SLIPS = slips_of(  # told by what of the memory is the donor's
    transplant,
    """
    k, v = memory → v, k = memory
    donor_k, donor_v = → donor_v, donor_k =
        asked: K of slot 4 in layer 2; copied: V of slot 4 in layer 2
    if "K" in which → if True
    if "V" in which → if True
        copied: K of slot 4 in layer 2 and V of slot 4 in layer 2
    "K" in which → which == "K"
    "V" in which → which == "V"
        copied: nothing; of "KV" each letter counts
    k[slots] = donor_k[slots] → k[:] = donor_k
    v[slots] = donor_v[slots] → v[:] = donor_v
        copied: K of slots 0 to 5 in layer 2
    k[slots] = donor_k[slots] → k[slots[0]] = donor_k[slots[0]]
    v[slots] = donor_v[slots] → v[slots[0]] = donor_v[slots[0]]
        asked: V of slots 2 and 5 in layer 0; copied: V of slot 5 in layer 0
    """,
)
FLOOR_SLIPS = slips_of(  # told by an amount that is counted alone
    c2.least_seconds,
    """
    2 * num → 4 * num
        it counts 28,000,000,000 FLOPs in place of 14,000,000,000; two for each weight and token
    4 * num → 2 * num
        it counts 2,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes
    (4 * num_weights + kv_bytes) → ((4 * num_weights + kv_bytes) * num_tokens)
        it counts 28,000,000,000 bytes in place of 4,000,000,000; a weight in fp32 has 4 bytes, and
    + kv_bytes →
        of 100,000,000 kv_bytes it counts 0 bytes
    """,
)


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
        type(self).kv = {} if len(Shared.kv.get(0, [[]])[0]) != 8 else Shared.kv


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


WHY_SLIPS = slips_of(  # each hint of an ending, and a function that it helps
    RIGHT["why_finished"],
    """
    >= max_tokens → > max_tokens
        the last one counts
    >= max_tokens → >= max_tokens - 1
        one token is still allowed
    new_ids[-1] in eos_ids → any(i in eos_ids for i in new_ids[:-1])
        it alone ends the request
    new_ids[-1] in eos_ids → new_ids[-1] == eos_ids[0]
        eos_ids may hold several
    new_ids[-1] in eos_ids → any(i in eos_ids for i in new_ids)
        look at new_ids[-1] alone
    any(one in text for one in stop) → text.endswith(tuple(stop))
        search the whole text
    one in text for → text.find(one) > 0 for
        text.find gives 0 there
    any(one in text for one in stop) → __import__("re").search("|".join(stop) or "^$", text)
        a dot stands for itself
    any(one in text for one in stop) → stop in text
        stop is a tuple of strings
    any(one in text for one in stop) → stop and stop[0] in text
        look for each of them
    any(one in text for one in stop) → False
        look for it in text
    new_ids[-1] in eos_ids → new_ids[-1] <= max(eos_ids)
        only the ids in eos_ids end the text
    new_ids[-1] in eos_ids → new_ids[-1] in (0, 3)
        3 ends no text of this model; are ids typed in?
    new_ids[-1] in eos_ids → new_ids[-1] in {*eos_ids} & {0, 3}
        6 ends a text of this model; are ids typed in?
    one in text for → one.lower() in text.lower() for
        large and small letters differ
    if new_ids → if len(new_ids) < max_tokens and new_ids
        stop wins over length
    else None → else "length"
        it goes on: return None
    """,
)

EXERCISES: dict[str, Exercise] = {
    "MyCache": Exercise(
        c2.check_cache,
        [MyCache, WritesInPlace],
        c2.CACHE_SLIPS,
        [
            (cache_with(("[(k, v)]", "[k, v]")), "without the list"),
            (cache_with(("[(k, v)]", "torch.cat(k, v)")), "one tuple"),
            (Shared, "make the dict in __init__"),
            (cache_with(("torch.cat(pair)", "pair[0] + pair[1]")), "`+` adds numbers"),
            (cache_with(("torch.cat(pair)", "torch.cat((pair, pair))")), "join k to its first"),
            (cache_with(("(k, v), strict", "(k, k), strict")), "v gets the new k; it must get"),
            (
                cache_with(("(k, v), strict", "(k, torch.cat((k, v))), strict")),
                "layer 0: v has k in it; only v belongs there",
            ),
            (
                cache_with(("if layer in", "if len(k) < 3 and (layer := 0) in")),
                "layer 1: k has 6 tokens, expected 5; does each layer keep its own?",
            ),
            (
                cache_with(("(torch.cat(pair) for", "(torch.cat(pair).flip(0) for")),
                "layer 0: k is mixed up; first the old, then the new",
            ),
        ],
    ),
    "transplant": Exercise(
        c2.check_transplant,
        [transplant, transplant_anew],
        {**c2.TRANSPLANT_SLIPS, **TRANSPLANT_SLIPS},
        [
            (lambda memory, donor, layer, *_: {layer: memory[layer]}, "a dict with layers [2]"),
            (lambda memory, donor, layer, *_: {**memory, layer: donor[layer][0]}, "no pair"),
            (
                lambda memory, donor, layer, slots, _: memory[layer][0].__setitem__(
                    slots, donor[layer][0]
                ),
                "take the same slots of both",
            ),
            (lambda memory, donor, layer, slots, _: memory[layer][slots], "is a pair (k, v)"),
        ],
    ),
    "MyStaticCache": Exercise(
        c2.check_static_cache,
        [MyStaticCache, HeadsFirstView, in_memory("torch.float64")],
        c2.STATIC_SLIPS,
        [
            (Grows, "the right k, but in new memory"),
            (static_cache(("config.num_hidden_layers", "4")), "config has the number of layers"),
            (static_cache((", max_len, heads", ", 4096, heads")), "is a size typed in?"),
            (in_memory("torch.bfloat16"), "in torch.bfloat16, and rounds it"),
            (in_memory("torch.float64", PUT), "Keep the dtype of k and v"),
            (CopiesInPlace, "it writes old k and v again"),
            (static_cache(("torch.zeros_like(self.k)", IN_NUMPY)), "make it with torch.zeros"),
            (static_with("self.k[layer, start:end] = k"), "the new v is not written into the"),
            (IntoACopy, "layer 0: the new k is not written into the memory"),
            (
                static_with("self.k[layer, start:end] = self.v[layer, start:end] = k"),
                "layer 0: v gets the new k; it must get the new v",
            ),
            (
                static_with("self.k[layer, end - 1], self.v[layer, end - 1] = k[-1], v[-1]"),
                "layer 0: k of tokens 0 to 2 is wrong",
            ),
            (
                static_with("p = batch.positions; self.k[layer, p] += k; self.v[layer, p] += v"),
                "write with `=`, and not with `+=`",
            ),
            (static_with("self.k[layer, batch.position] = k"), "Did you mean 'positions'?"),
            (
                static_with("return self.k[layer, : batch.positions]"),
                "where the text ends",
            ),
            (
                static_cache(("self.k = torch", "k = torch"), ("(self.k)", "(k)")),
                "has no attribute 'k'. Make the memory in __init__",
            ),
            (
                static_cache(("num_key_value_heads", "num_attention_heads")),
                "A buffer of a layer is [max_len, K/V heads, head_dim]",
            ),
        ],
    ),
    "run_new": Exercise(
        c2.check_run_new,
        [RIGHT["run_new"], token_by_token],
        c2.RUN_SLIPS,
        [
            (lambda m, a, ids, n: RIGHT["run_new"](m, a, ids, max(0, n - 1)), "runs 2 tokens"),
            (lambda m, a, ids, n: m(Batch.from_sequences(ids[n:], [n]), a), "a list of sequences"),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([ids[n:]], [[*range(n, 9)]]), a),
                "wants one position for each sequence, that of its first token",
            ),
            (
                lambda m, a, ids, n: m(Batch.from_sequences([torch.tensor(ids[n:])], [n]), a),
                "wants lists of ids",
            ),
            (lambda m, a, ids, n: m(ids[n:], a), "The model takes a Batch"),
            (lambda m, a, ids, n: m(Batch([ids[n:]], [n]), a), "Batch.from_sequences makes one"),
            (but("run_new", lambda logits: logits + 1), "other logits"),
            (
                lambda m, a, ids, n: (RIGHT["run_new"](m, a, ids, n), ids.append(1))[0],
                "the caller's",
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
            (slots_in_rows, "no list for each row"),
            (
                lambda c, new, m: [r * m + c[r] + i for r in c for i in range(new[r])],
                "Count the rows: `for r in cached` gives numbers of tokens",
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
            (lambda probs, p: probs >= max(p, 0.4), "expected 2; the token that crosses p stays"),
            (but("keep_top_p", lambda keep: keep.int()), "True = kept; got torch.int32"),
            (lambda probs, p: probs.index_put_((probs > 0,), probs > 1), "a tensor of bools"),
            (lambda probs, p: probs.sort(descending=True).cumsum(-1) < p, "sort gives two things"),
        ],
    ),
    "why_finished": Exercise(
        c2.check_why_finished,
        [RIGHT["why_finished"], why_numpy],
        {**c2.REASON_SLIPS, **WHY_SLIPS},
        [
            (lambda *case: "stop" if case[0][-1] == case[2] else None, "it returns None, always"),
            (lambda ids, text, eos, stop, limit: stop[0] in text, "stop may be empty"),
        ],
    ),
    "least_seconds": Exercise(
        c2.check_floor,
        [
            c2.least_seconds,
            lambda *case: torch.tensor(c2.least_seconds(*case)),
        ],
        {**c2.FLOOR_SLIPS, **FLOOR_SLIPS},
        [
            (lambda *case: (c2.least_seconds(*case), "memory"), "return one number"),
            (lambda *case: c2.least_seconds(*case) + 1, ": here the memory decides"),
        ],
    ),
}
