"""The checks of notebook 02, and what they know of usual mistakes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.learn.exercises.facts import AsIs, alike
from tutorial_engine.learn.exercises.judge import SHORT, Slips, judge, read_number, slips_of
from tutorial_engine.learn.exercises.lesson_01 import TEXT_IDS, tiny_model
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, has_gap, must_answer
from tutorial_engine.learn.parts.cache import (
    Memory,
    MyCache,
    MyStaticCache,
    WriteAndRead,
    same_memory,
)
from tutorial_engine.learn.parts.cache import transplant as right_transplant
from tutorial_engine.learn.parts.holder import number, whole
from tutorial_engine.learn.parts.model import run_new as right_run
from tutorial_engine.learn.parts.model import why_finished as right_reason
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.viz.words import counted

# -- MyCache and MyStaticCache --------------------------------------------------------------------

CACHE_SLIPS: Slips = slips_of(
    MyCache,
    """
    self.kv[layer] = k, v → pass
        gives the new k and v alone; all tokens so far are asked for
    self.kv[layer] = k, v → self.kv.setdefault(layer, (k, v))
        gives the first k and v with the newest behind them; those between belong there, too
        ▸ self.kv[layer] = (k, v)
    zip(self.kv[layer], → zip([self.kv[layer][0]] * 2,
        gives a v that is the old k with the new v behind it; the new v belongs behind the old v
    (k, v), strict → (v, k), strict
        puts the new v behind the old k, and the new k behind the old v; k gets the new k, and v the
        new v
    (k, v), strict → (k, torch.cat((self.kv[layer][0], k))), strict
        puts all of k behind the old v; the new v alone belongs there
    if layer in → if (layer := 0) in
        keeps one k and one v for all layers; each layer has its own
    pair) for → pair[::-1]) for
        puts the new before the old; the tokens stand in the order of the text
    [(k, v)] → [(k, k)]
        gives k in the place of v, too; the pair is (k, v)
    [(k, v)] → [(v, k)]
        gives k and v swapped; the pair is (k, v)
    """,
)
STATIC_SLIPS: Slips = slips_of(
    MyStaticCache,
    """
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer], self.v[layer])]
        gives k and v of all slots; those behind the last token are not written yet
        ▸ self.k[layer, :end]
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer, :end-1], self.v[layer, :end-1])]
        leaves out the last token; up to position p there are p + 1 tokens
        ▸ int(batch.positions[-1]) + 1
    [(self.k[layer, :end], self.v[layer, :end])] → [(k, v)]
        gives the new k and v alone; all tokens so far are asked for ▸ self.k[layer, :end]
    :end], self.v[layer, :end])] → :len(k)], self.v[layer, :len(k)])]
        gives the first tokens of the text, as many as are new; all tokens so far are asked for
        ▸ int(batch.positions[-1]) + 1
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer, :end+1], self.v[layer, :end+1])]
        gives one slot too many, while there is one; behind the last token nothing is written yet
        ▸ int(batch.positions[-1]) + 1
    ] = k, v → ] = v, v
        gives v in the place of k, too; the pair is (k, v)
    self.k[layer, start:end], self.v[layer, start:end] → self.k[layer, W], self.v[layer, W]
    self.k[layer, W], → W = batch.positions - 1; self.k[layer, W],
        writes each token one slot too early; the token at position p goes into slot p
        ▸ self.k[layer, batch.positions] = k
    self.k[layer, start:end], self.v[layer, start:end] → self.k[layer, W], self.v[layer, W]
    self.k[layer, W], → W = slice(len(k)); self.k[layer, W],
        writes the new tokens over the old ones, from slot 0 on; the token at position p goes into
        slot p ▸ self.k[layer, batch.positions] = k
    start = int( → layer = 0; start = int(
        has one memory for all layers, so each writes over the layer before it; each layer has its
        own slots
    heads, dim = config → self.used = 0; heads, dim = config
    int(batch.positions[0]) → self.used
    end = start + len(k) → end = self.used = start + len(k)
        writes each layer behind the layer before it; the token at position p has slot p in each
        layer ▸ self.k[layer, batch.positions] = k
    start = int( → self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v); start = int(
        loses in every call what was written before it; all tokens so far are asked for
    ] = k, v → ] = v, k
        gives k and v swapped; the pair is (k, v)
    """,
)
Calls = Sequence[tuple[int, int]]  # of `update`: the layer and how many new tokens
Pair = Sequence[Tensor]


class Size(NamedTuple):
    """What a cache is made for."""

    layers: int
    heads: int
    dim: int
    room: int  # max_len

    def as_arguments(self) -> tuple[ModelConfig, int]:
        """What a static cache is made of: a config and max_len."""
        names: dict[str, Any] = {"num_attention_heads": 2 * self.heads}
        names |= {"num_key_value_heads": self.heads, "head_dim": self.dim}
        names |= {"num_hidden_layers": self.layers}
        return replace(tiny_model().config, **names), self.room


def _calls(layers: int, *new: int) -> Calls:
    """Those of a text that grows by so many tokens in each step."""
    return [(layer, count) for count in new for layer in range(layers)]


SIZES = (Size(5, 2, 8, 43), Size(3, 3, 4, 29))  # none of these can be guessed
LARGE = [(_calls(size.layers, 4, 1, 2, 1), size) for size in SIZES]
GROWN = (
    (
        _calls(2, 1, 1),
        Size(2, 1, 4, 5),
    ),  # one token first; each layer has its own
    (_calls(1, 2, 1), Size(1, 1, 4, 5)),
    (_calls(1, 2, 1), Size(1, 1, 4, 3)),  # the last slot is used
    *LARGE,
)
# each case is the answer of one call, so that the shortest wrong one ends with the first wrong call
CACHE_CASES = [(calls, size, i) for calls, size in GROWN for i in range(len(calls))]


class _Watch(TorchDispatchMode):
    """Notes the most numbers that one operation in the block moves; memory of `torch.empty` is NaN.

    It may hold tensors of an earlier check, and these would be taken for what was written.
    """

    most_moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name.startswith(("empty", "new_empty")) and result.is_floating_point():
            result.fill_(torch.nan)
        if name in ("cat", "stack", "clone", "copy_", "index_put_"):
            moved = args[2] if name == "index_put_" else result
            self.most_moved = max(self.most_moved, moved.numel())
        return result


class _Played:
    """A text that grew in a fresh cache: what each call of `update` gave, up to an error."""

    def __init__(
        self, make_cache: Callable[..., Any], calls: Calls, size: Size, sized: bool, seed: int = 1
    ) -> None:
        self.calls, self.size = calls, size
        self.names: dict[bytes, tuple[str, int]] = {}  # of each row that was given; its layer
        self.pairs: list[Pair] = []
        self.texts: list[str] = []
        self.error: Exception | None = None
        try:
            self._play(make_cache, size.as_arguments() if sized else (), seed)
        except Exception as error:  # of the learner's
            self.error = error

    def _play(self, make_cache: Callable[..., Any], sizes: tuple[Any, ...], seed: int) -> None:
        try:
            with _Watch():
                cache = make_cache(*sizes)
        except TypeError as error:
            given = f"{make_cache.__name__}({'config, max_len' if sizes else ''})"
            raise CannotBe(f"{given} raised TypeError: {error}") from error
        _, heads, dim, _ = self.size
        draw, lengths = torch.Generator().manual_seed(seed), Counter[int]()
        for call, (layer, new) in enumerate(self.calls):
            first = lengths[layer]
            lengths[layer] += new
            k, v = (torch.randn(new, heads, dim, generator=draw) for _ in "kv")
            for letter, rows in zip("kv", (k, v), strict=True):
                for i, row in enumerate(rows):
                    self.names[_bytes(row)] = f"{letter}{first + i}", layer
            got = cache.update(layer, k, v, Batch.from_sequences([[0] * new], [first]))
            must_answer("update", got, make_cache.update)  # type: ignore[attr-defined]
            pair = _pair(got)
            for letter, x in zip("kv", pair, strict=True):
                if x.dim() != 3 or x.shape[1:] != (heads, dim):
                    raise CannotBe(
                        f"after {counted(lengths[layer], 'token')} in all it gives {letter} of "
                        f"shape {list(x.shape)}, expected {[lengths[layer], heads, dim]}: "
                        "tokens, K/V heads, head_dim"
                    )
                if x.dtype in SHORT:
                    raise CannotBe(
                        f"it gives {letter} in {x.dtype}, which keeps {SHORT[x.dtype][1]} digits; "
                        "k and v came in torch.float32"
                    )
            self.pairs.append(pair)
            self.texts.append(self.text(call))

    def text(self, call: int) -> str:
        """What this call gave: `k = k0 k1, v = v0 v1`; `—` is a row that nobody gave."""

        def name(row: Tensor) -> str:
            known, layer = self.names.get(_bytes(row), ("—", of_call))
            return known if layer == of_call else f"{known}(layer {layer})"

        of_call = self.calls[call][0]
        each = zip("kv", self.pairs[call], strict=True)
        return AsIs(
            ", ".join(f"{letter} = {' '.join(map(name, x)) or 'nothing'}" for letter, x in each)
        )

    def answer(self, call: int) -> str:
        """What this call gave, in words; raises what it or one before it raised."""
        if call < len(self.texts):
            return self.texts[call]
        raise self.error or IndexError(call)


def _bytes(row: Tensor) -> bytes:
    return bytes(row.detach().to(torch.float64, copy=True).contiguous().numpy().data)


def _pair(got: object) -> Pair:
    form = "it must return a list with one pair, [(k, v)]"
    if isinstance(got, list | tuple) and len(got) == 2 and isinstance(got[0], Tensor):
        raise CannotBe(f"{form}; got the pair without the list around it")
    if not isinstance(got, list | tuple) or len(got) != 1:
        count = f" of {len(got)} pairs" if isinstance(got, list | tuple) else ""
        raise CannotBe(f"{form}; got {type(got).__name__}{count}")
    (pair,) = got
    if not isinstance(pair, list | tuple) or [isinstance(x, Tensor) for x in pair] != [True, True]:
        raise CannotBe(f"{form}; its only entry is no pair of tensors")
    return pair


def _second_begins_with_first(
    make_cache: Callable[..., Any], calls: Calls, size: Size, sized: bool
) -> bool:
    """Does a second cache give the tokens of the first, and its own behind them?"""
    first, second = (_Played(make_cache, calls, size, sized, seed) for seed in (1, 2))
    if not first.pairs or not second.pairs:
        return False
    old, new = first.pairs[0][0], second.pairs[0][0]
    return len(new) > len(old) and torch.equal(new[: len(old)], old)


def _views_that_change(make_cache: Callable[..., Any], sized: bool) -> str:
    """Right numbers: do they stay what they are? "" if so."""
    played = _Played(make_cache, *LARGE[0], sized)
    for call, text in enumerate(played.texts):
        if played.text(call) != text:
            now = played.text(call)
            return f"what a call gave has changed after later calls: it was {text}, now {now}"
    return ""


def _calls_in_words(calls: Calls, size: Size, call: int, sized: bool) -> Mapping[str, object]:
    """The calls up to this one, as code where they are few; k0 is the row of token 0."""
    lengths, each = Counter[int](), []
    for layer, new in calls[: call + 1]:
        tokens = range(lengths[layer], lengths[layer] + new)
        rows = (" ".join(f"{letter}{i}" for i in tokens) for letter in "kv")
        each.append(f"update({layer}, {', '.join(rows)})")
        lengths[layer] += new
    made = f"{counted(size.layers, 'layer')}, {counted(size.heads, 'K/V head')} of {size.dim}"
    found: dict[str, object] = {"config": AsIs(made), "max_len": size.room} if sized else {}
    if len(each) > 4:
        steps = [new for layer, new in calls[: call + 1] if layer == 0]
        before = f"{len(each) - 1} calls of update in {size.layers} layers, {steps} tokens each"
        return found | {"before": AsIs(before), "call": AsIs(each[-1])}
    return found | {"calls": AsIs(", ".join(each))}


def _judge_cache(
    make_cache: Callable[..., Any], right: Any, slips: Slips, done: str, then: Callable[..., str]
) -> Verdict:
    played: dict[tuple[Any, Size], _Played] = {}

    def answer(make: Callable[..., Any], calls: Calls, size: Size, call: int, sized: bool) -> str:
        case = (calls, size, sized)
        if make is make_cache and not call and _second_begins_with_first(make, *case):
            raise CannotBe(
                "a second cache begins with the tokens of the first, so they share what is kept; "
                "each must have its own"
            )
        if (make, size) not in played:
            played[make, size] = _Played(make, *case)
        return played[make, size].answer(call)

    return judge(
        *("update", make_cache, right),
        *([(*case, right is MyStaticCache) for case in CACHE_CASES], slips, done),
        call=answer,
        inputs=_calls_in_words,
        also={"—": lambda got, *_: AsIs("no row that was given") if "—" in got else None},
        then=then,
        body=getattr(make_cache, "update", None),
    )


def check_cache(make_cache: Callable[[], Any]) -> Verdict:
    """Check a learner's class with update(layer, k, v, batch) → [(all k, all v)], one sequence."""
    return _judge_cache(
        *(make_cache, MyCache, CACHE_SLIPS),
        "update: 8 tokens in 4 steps, 5 layers, nothing lost",
        lambda made: _views_that_change(made, False),
    )


def _why_not_static(make_cache: Callable[..., Any]) -> str:
    """Right numbers: in memory that was allocated once, and of the right size? "" if so."""
    calls, size = LARGE[0]
    layers, heads, dim, room = size
    found = _Played(make_cache, calls, size, True).pairs
    for before, after in zip(found, found[layers:], strict=False):
        for name, old, new in zip("kv", before, after, strict=True):
            if not same_memory(old, new):
                return (
                    f"the right {name}, but in new memory: the old ones were copied. A view of "
                    "the memory that __init__ made is asked for ▸ self.k[layer, :end]"
                )
    cache = make_cache(*size.as_arguments())

    def writes(tokens: int, first: int) -> Pair:
        k, v = torch.ones(2, tokens, heads, dim)
        return _pair(cache.update(0, k, v, Batch.from_sequences([[0] * tokens], [first])))

    writes(8, 0)
    with _Watch() as watch:
        writes(1, 8)
    if any(bool((x > 1).any()) for x in writes(1, 8)):
        return "a slot that is written again holds the sum of old and new; the new alone is asked"
    if watch.most_moved > 2 * heads * dim:
        return "the right k and v, but the old ones are written again, into the same memory"
    every = {x.untyped_storage().data_ptr(): x for pair in found for x in pair}
    if not all(x.untyped_storage().resizable() for x in every.values()):
        return "its memory is numpy's, which no GPU can hold; make it with torch.zeros"
    held = sum(x.untyped_storage().nbytes() // x.element_size() for x in every.values())
    if held == (needed := 2 * layers * room * heads * dim):
        return _views_that_change(make_cache, True)
    return (
        f"its memory has {held:,} numbers; K and V of {room} slots in {layers} layers, {heads} K/V "
        f"heads of {dim}, are {needed:,}"
    )


def check_static_cache(make_cache: Callable[..., Any]) -> Verdict:
    """Check a learner's class (config, max_len) with update(layer, k, v, batch) → [(all k, all v)].

    One sequence; what `update` gives are views of memory that was allocated once.
    """
    return _judge_cache(
        *(make_cache, MyStaticCache, STATIC_SLIPS),
        "update: 8 tokens in 4 steps, 5 layers and 3, and no old key or value was copied",
        _why_not_static,
    )


# -- transplant -----------------------------------------------------------------------------------

TRANSPLANTS = (  # layers, slots, K/V heads; layer, slots, which
    ((2, 4, 3), 0, [1], "K"),
    ((2, 4, 3), 0, [1], "V"),
    ((2, 4, 3), 1, [2], "KV"),  # both letters count; a layer that is not the first
    ((2, 4, 3), 0, [2, 0], "K"),  # more than one slot, and not in order
    ((5, 6, 6), 2, [4], "K"),
    ((5, 6, 6), 0, [5, 2], "V"),
    ((5, 6, 6), 4, [0, 3], "KV"),
)
TRANSPLANT_SLIPS: Slips = slips_of(
    right_transplant,
    """
    k[slots] = donor_k[slots] → k[slots] = donor_v[slots]
        gives K the donor's V; K is copied to K, and V to V
    v[slots] = donor_v[slots] → v[slots] = donor_k[slots]
        gives V the donor's K; K is copied to K, and V to V
    k[slots] = donor_k[slots] → k[slots] = donor_v[slots]
    v[slots] = donor_v[slots] → v[slots] = donor_k[slots]
        gives K the donor's V, and V the donor's K; K is copied to K, and V to V
    k, v = memory → v, k = memory
    donor_k, donor_v = → donor_v, donor_k =
        copies V where "K" is asked for, and K where "V" is; the pair is (k, v)
    if "K" in which → if True
    if "V" in which → if True
        copies K and V, whatever `which` is; "K" means K alone, and "V" means V alone
    "K" in which → which == "K"
    "V" in which → which == "V"
        copies nothing where `which` is "KV"; "KV" means both K and V ▸ "K" in which
    k[slots] = donor_k[slots] → k[:] = donor_k
    v[slots] = donor_v[slots] → v[:] = donor_v
        copies all slots; those that are not in `slots` stay as they are ▸ k[slots] = ...
    k[slots] = donor_k[slots] → k[slots[0]] = donor_k[slots[0]]
    v[slots] = donor_v[slots] → v[slots[0]] = donor_v[slots[0]]
        copies only the first of the slots; each slot in `slots` is copied
    k[slots] = donor_k[slots] → pass
    v[slots] = donor_v[slots] → pass
        returns a memory in which nothing has changed; its slots get the donor's numbers
        ▸ k[slots] = ...
    k[slots] = donor_k[slots] → donor_k[slots] = k[slots]
    v[slots] = donor_v[slots] → donor_v[slots] = v[slots]
        copies from the memory into the donor; the donor stays as it is, and `memory` changes
    k[slots] = donor_k[slots] → donor_k[slots] = k[slots]
    v[slots] = donor_v[slots] → donor_v[slots] = v[slots]
    return memory → return donor
        changes the donor and returns it; the donor stays as it is, and `memory` changes
    return memory → return donor
        returns the donor itself; the changed `memory` is asked for
    k[slots] = donor_k[slots] → k[slots], donor_k[slots] = donor_k[slots], k[slots]
    v[slots] = donor_v[slots] → v[slots], donor_v[slots] = donor_v[slots], v[slots]
        swaps the slots of memory and donor; the donor stays as it is
    """,
)


def two_memories(layers: int, slots: int, heads: int) -> tuple[Memory, Memory]:
    """A memory and a donor."""
    draw = torch.Generator().manual_seed(3)
    k, v, donor_k, donor_v = torch.randn(4, layers, slots, heads, 4, generator=draw)
    return dict(enumerate(zip(k, v, strict=True))), dict(
        enumerate(zip(donor_k, donor_v, strict=True))
    )


def _transplanted(function: Callable[..., Any], sizes: Any, layer: int, *where: Any) -> Any:
    """What has changed in memory and donor, in words; None if the function gives None."""
    memory, donor = two_memories(*sizes)
    got = function(memory, donor, layer, *where)
    if got is None or got is ...:
        return got
    before, after = two_memories(*sizes), (got, donor)
    if not isinstance(got, dict) or sorted(got) != sorted(donor):
        kind = f"a dict with layers {sorted(got)}" if isinstance(got, dict) else type(got).__name__
        raise CannotBe(
            f"it must return the whole memory, a dict of layers {sorted(donor)}; got {kind}"
        )
    tensors = {
        (owner, letter, at): x
        for owner, memory in zip(("", "donor_"), before, strict=True)
        for at, pair in memory.items()
        for letter, x in zip("KV", pair, strict=True)
    }

    def name(owner: str, letter: str, at: int) -> str:
        return f"{owner}{letter}" + f"(layer {at})" * (at != layer)

    rows = {_bytes(row): (name(*key), i) for key, x in tensors.items() for i, row in enumerate(x)}
    found: list[str] = []
    for (owner, letter, at), was in tensors.items():
        pair = after[bool(owner)][at]
        kinds = [isinstance(x, Tensor) for x in pair] if isinstance(pair, list | tuple) else []
        if kinds != [True, True]:
            raise CannotBe(f"layer {at} of what it returns must be a pair (k, v) of tensors")
        now, mine = pair["KV".index(letter)], name(owner, letter, at)
        if now.shape != was.shape:
            shape = f"{letter} of shape {list(now.shape)}, expected {list(was.shape)}"
            raise CannotBe(f"layer {at} of what it returns has {shape}")
        sources = [rows.get(_bytes(row), ("other numbers", -1)) for row in now]
        changed = [(i, *source) for i, source in enumerate(sources) if source != (mine, i)]
        for source in dict.fromkeys(theirs for _, theirs, _ in changed):
            slots = [(i, other) for i, theirs, other in changed if theirs == source]
            to, of = ([pair[n] for pair in slots] for n in (0, 1))
            if source == "other numbers":
                found.append(f"{mine}{to} = {source}")
            elif to == of == [*range(len(was))]:
                found.append(f"{mine} = {source}")
            else:
                found.append(f"{mine}{to} = {source}{of}")
    return AsIs("; ".join(found) or "nothing has changed")


def check_transplant(function: Callable[..., Memory]) -> Verdict:
    """Check a learner's function(memory, donor, layer, slots, which) → the changed memory."""
    return judge(
        *("transplant", function, right_transplant, TRANSPLANTS, TRANSPLANT_SLIPS),
        "transplant: K, V and both, in 3 of 5 layers, and the donor stays as it was",
        call=_transplanted,
        inputs=lambda sizes, layer, slots, which: {
            "memory": AsIs(f"{sizes[0]} layers; k and v [{sizes[1]}, {sizes[2]}, 4], as in donor"),
            **{"layer": layer, "slots": slots, "which": which},
        },
    )


# -- run_new --------------------------------------------------------------------------------------

RUN_SLIPS: Slips = slips_of(
    right_run,
    """
    [token_ids[num_computed:]], [num_computed] → [token_ids], [0]
        runs all tokens again; k and v of the first `num_computed` tokens are in the cache already
        ▸ token_ids[num_computed:]
    [token_ids[num_computed:]], [num_computed] → [token_ids[-1:]], [len(token_ids) - 1]
        runs the last token alone; none of the tokens from `num_computed` on is computed yet
        ▸ token_ids[num_computed:]
    , [num_computed] →
        lets the positions start at 0 again; the first new token stands at position `num_computed`
        ▸ [num_computed]
    , [num_computed] → , [num_computed + 1]
        runs the new tokens one position too late; the first one stands at position `num_computed`
        ▸ [num_computed]
    (batch, attention) → (batch)
        runs no token through the given attention; it holds the keys and values of the earlier
        tokens ▸ model(batch, attention)
    [-1:])[0] → )
        gives the logits of all new tokens; those of the last token alone are asked for
        ▸ hidden[-1:]
    [-1:])[0] → )[0]
        gives the logits of the first new token; those of the last one are asked for ▸ hidden[-1:]
    [-1:])[0] → [-1:])
        gives the right logits as a row of a matrix, [1, V]; [V] is asked for ▸ logits[0]
    model.compute_logits(model(batch, attention)[-1:])[0] → model(batch, attention)[-1]
        gives the hidden state of the last token; its logits are asked for
        ▸ model.compute_logits(hidden)
    [-1:])[0] → [-1:])[0].softmax(-1)
        gives the softmax of the right logits; the logits themselves are asked for
    [-1:])[0] → [-1:])[0].log_softmax(-1)
        gives the logarithm of the softmax of the right logits; the logits themselves are asked for
    [-1:])[0] → [-1:])[0].argmax()
        gives the number of the likeliest token; the logits of all V tokens are asked for
    """,
)


class _Watched(SdpaAttention):
    """Attention over a cache that notes which tokens run, and at which positions."""

    def __init__(self) -> None:
        super().__init__(WriteAndRead(MyCache()))
        self.ran: list[list[int]] = [[], []]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if layer == 0:
            self.ran[0] += batch.input_ids.tolist()
            self.ran[1] += batch.positions.tolist()
        return super().attend(layer, q, k, v, batch)


@dataclass(eq=False)
class _Run:
    """Which tokens ran, at which positions, and what was returned."""

    ids: list[int]
    positions: list[int]
    answer: Any

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Run)
            and (self.ids, self.positions) == (other.ids, other.positions)
            and alike(self.answer, other.answer, 1e-4)
        )

    def __repr__(self) -> str:
        ran = f"{self.ids} ran at positions {self.positions}" if self.ids else "no token ran"
        if not isinstance(self.answer, Tensor):
            return f"{ran}; returned {type(self.answer).__name__}"
        if not self.answer.dim():
            return f"{ran}; returned the number {self.answer.item():.4g}"
        first = ", ".join(f"{x:.3g}" for x in self.answer.flatten()[:3].tolist())
        return f"{ran}; returned {list(self.answer.shape)}: {first}, ..."


def _ran(function: Callable[..., Tensor], first: int, last: int) -> _Run | None:
    """How it went; None if nothing was returned."""
    model, ids, attention = tiny_model(), list(TEXT_IDS[:last]), _Watched()
    if first:
        right_run(model, attention, ids[:first], 0)
    attention.ran = [[], []]
    got = function(model, attention, ids, first)
    if ids != list(TEXT_IDS[:last]):
        raise CannotBe(f"it must leave the caller's {list(TEXT_IDS[:last])} as it is; now {ids}")
    return None if got is None or got is ... else _Run(attention.ran[0], attention.ran[1], got)


@torch.no_grad()
def check_run_new(function: Callable[..., Tensor]) -> Verdict:
    """Check a learner's function(model, attention, token_ids, num_computed) → logits [V].

    It runs the tokens from num_computed on, at their positions; the logits are the last token's.
    """
    cases = [
        *((0, 2), (2, 3)),  # a prefill and a decode
        (1, 3),  # a chunk: neither from the beginning, nor the last token alone
        *((0, 5), (5, 6), (6, 9), (9, 10)),
    ]
    return judge(
        *("run_new", function, right_run, cases, RUN_SLIPS),
        "run_new: a prefill of 5 tokens, a decode, a chunk of 3, a decode",
        call=_ran,
        inputs=lambda first, last: {"token_ids": list(TEXT_IDS[:last]), "num_computed": first},
    )


# -- slots ----------------------------------------------------------------------------------------


def _slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
    slots: list[int] = []
    for r, (old, n) in enumerate(zip(cached, new, strict=True)):
        start = r * max_len + old
        slots += range(start, start + n)
    return slots


SLOT_CASES = (
    ([0], [2], 4),  # a prefill
    ([2], [1], 4),  # a decode: behind the cached ones
    ([0, 0], [1, 2], 4),  # two rows
    ([1, 2], [1, 2], 4),  # two rows with cached ones; the last slot is used
    ([1, 2], [0, 1], 4),  # a row without new tokens
    *(([0], [4], 8), ([4], [1], 8), ([0, 0], [2, 2], 8), ([5, 0, 2], [1, 3, 2], 16)),
)
SLOT_SLIPS: Slips = slips_of(
    _slots,
    """
    max_len + old → max_len
        begins each row at its first slot; the cached tokens lie there, and must stay
        ▸ r * max_len + cached[r]
    max_len + old → max_len
    start + n) → start + old + n)
        gives the slots of the cached tokens, too; the new tokens alone are written
    r * max_len + old → sum(cached[:r]) + sum(new[:r]) + old
        puts the rows close together, with no free slots between them; each row has `max_len` slots,
        used or not ▸ r * max_len
    range(start, start + n) → [r * max_len] * n
        gives the first slot of the row for each new token; each token needs a slot of its own
    max_len + old → max_len + old + 1
        gives slots that are one too far; a row's first free slot is right behind its cached tokens
    max_len + old → max_len + old - 1
        gives slots that are one too early; a row's first free slot is right behind its cached
        tokens
    r * max_len → r * 8
        lets each row have 8 slots; a row has `max_len` slots ▸ r * max_len
    start + n) → start + n + 1)
        gives one slot too many for each row; row r has `new[r]` new tokens
    r * max_len → (r + 1) * max_len
        begins each row where the next one does; rows count from 0, and row 0 begins at slot 0
        ▸ r * max_len
    range(start, start + n) → range(start, r * max_len + n)
        gives the slots from `cached[r]` up to `new[r]` of each row; `new[r]` counts tokens, and is
        no end ▸ cached[r] + new[r]
    start + n) → start + 1)
        gives one slot for each row; each of its `new[r]` tokens needs one
        ▸ range(start, start + new[r])
    r * max_len + old → old
        begins each row at slot 0; each row has `max_len` slots of its own ▸ r * max_len
    slots += range(start, start + n) → slots += range(start, start + n); break
        gives the slots of row 0 alone; those of all rows are asked for, row after row
    """,
)


def check_slots_to_write(function: Callable[[list[int], list[int], int], Iterable[int]]) -> Verdict:
    """Check a learner's function(cached, new, max_len) → the slots to write, rows 0, 1, ..."""

    def read(answer: Iterable[Any]) -> list[float | None]:
        given = list(answer)
        known = [number(x) if whole(x) is None else whole(x) for x in given]
        if None in known or isinstance(answer, dict):
            raise CannotBe(f"it must return one flat list of numbers, got {answer}")
        return known

    return judge(
        *("slots_to_write", function, _slots, SLOT_CASES, SLOT_SLIPS),
        "slots_to_write: prefill, decode, two prefills and a mixed batch",
        read=read,
    )


# -- keep_top_p -----------------------------------------------------------------------------------


def _nucleus(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) - values < p
    return keep


TOP_P_SLIPS: Slips = slips_of(
    _nucleus,
    """
    values, order = probs.sort(descending=True) → values, order = probs, torch.arange(len(probs))
        sums the probabilities up as they stand; the sum begins with the likeliest token
        ▸ probs.sort(descending=True)
    descending=True →
        sums up from the unlikeliest token; the sum begins with the likeliest ▸ descending=True
    return keep → return ~keep
        gives True for the tokens that go; True means that a token is kept
    - values < p → - values > p
        keeps a token where the sum before it is above p; a token stays where this sum is below p
    return keep → return probs > p
        keeps each token whose own probability is above p; what counts is the sum of all likelier
        ones
    return keep → return probs < p
        keeps each token whose own probability is below p; what counts is the sum of all likelier
        ones
    - values < p → <= p
        lets the token that crosses p go; it stays, because the sum before it is below p
    - values < p → < p
        lets the token go with which the sum reaches p; it stays, because the sum before it is below
        p ▸ values.cumsum(-1) - values
    keep[order] → keep[:]
        gives the answer for the sorted tokens; each entry belongs to the token at its place in
        `probs` ▸ keep[order] = ...
    keep[order] = values.cumsum(-1) - values < p → keep = (values.cumsum(-1) - values < p)[order]
        gives the answer for the sorted tokens, sorted once more; each entry belongs to its place in
        `probs` ▸ keep[order] = ...
    probs.sort → probs.softmax(-1).sort
        takes a softmax of `probs`; they are probabilities already
    < p → < 1 - p
        keeps tokens up to 1 − p; p says how much is kept, and not how much goes
    return keep → return probs >= p * probs.max()
        keeps what has p times the largest probability; that is the rule of min_p, and top-p looks
        at sums
    return keep → return order[values.cumsum(-1) - values < p]
        gives the numbers of the kept tokens, from the likeliest down; True or False for each token
        is asked for ▸ keep[order] = ...
    < p → <= p
        keeps a token where the sum before it is p; a token stays only where this sum is below p
    return keep → return probs * keep
        gives the probabilities, with 0 for those that go; True or False for each token is asked for
    return keep → return keep.nonzero().flatten()
        gives the numbers of the kept tokens; True or False for each token is asked for
        ▸ keep = torch.zeros_like(probs, dtype=torch.bool); keep[these] = True
    """,
)


def _kept(keep: Any, probs: Tensor, _: float) -> str | None:
    """The probabilities of the kept ones, the largest first, and their sum."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        return None
    kept = sorted(probs[keep].tolist(), reverse=True)
    if not kept:
        return "none"
    return f"{', '.join(f'{x:.3g}' for x in kept)}; together {sum(kept):.3g}"


def check_top_p(function: Callable[[Tensor, float], Tensor]) -> Verdict:
    """Check a learner's function(probabilities [V], p) → bool [V], True = kept."""
    spread = torch.rand(10, generator=torch.Generator().manual_seed(2)).pow(3)
    falling = torch.tensor([0.5, 0.3, 0.125, 0.05, 0.025])
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])  # exact: two reach 0.75
    three = torch.tensor([0.25, 0.125, 0.625])  # not sorted, and exact
    cases = [
        (three, 0.5),  # the likeliest crosses p, and stays
        (three, 0.75),  # the second one crosses p
        (three, 0.625),  # the sum before the second one is p
        (torch.tensor([0.125, 0.375, 0.3125, 0.1875]), 0.5),  # none reaches p alone
        *((falling, 0.1), (halves, 0.75), (falling, 0.7), (falling.flip(0), 0.9)),
        (spread / spread.sum(), 0.6),
    ]
    return judge(
        *("keep_top_p", function, _nucleus, cases, TOP_P_SLIPS),
        f"keep_top_p: {len(cases)} distributions, sorted and not",
        also={"yours keeps": _kept},
    )


# -- why_finished ---------------------------------------------------------------------------------

REASON_SLIPS: Slips = slips_of(
    right_reason,
    """
    len(new_ids) → len(text)
        counts the characters of the text; `max_tokens` is a number of tokens ▸ len(new_ids)
    >= max_tokens → > max_tokens
        says "length" one token too late; with `max_tokens` new tokens the request ends
    >= max_tokens → >= max_tokens - 1
        says "length" one token too early; a request may have `max_tokens` new tokens
    else None → else "length"
        says "length" where the request goes on; None means that it goes on
    if new_ids → if len(new_ids) < max_tokens and (new_ids
    for one in stop): → for one in stop)):
        says "length" where both are true; then "stop" wins
    new_ids[-1] in eos_ids or →
        takes no end-of-text token for an end; the request ends when its newest token is one
    new_ids[-1] in eos_ids → any(i in eos_ids for i in new_ids)
        counts an end-of-text token wherever it stands; the newest token alone decides ▸ new_ids[-1]
    new_ids[-1] in eos_ids → new_ids[-1] == eos_ids[0]
        counts only the first of `eos_ids`; each of them ends a text
    any(one in text for one in stop) → False
        takes no stop string for an end; the request ends when its text contains one
    any(one in text for one in stop) → stop and stop[0] in text
        counts only the first stop string; each of them ends a text
    any(one in text for one in stop) → text.endswith(tuple(stop))
        counts a stop string only at the end of the text; a token may go on behind it ▸ one in text
    one in text for → text.find(one) > 0 for
        does not count a stop string at the beginning of the text; it counts wherever it stands
        ▸ one in text
    one in text for → one.lower() in text.lower() for
        takes large and small letters for the same; in a stop string they differ
    """,
)
TEXT, TWO, EOS_IDS = "Anna had a coat", [5, 6], (0, 3)
ENDINGS: Sequence[tuple[list[int], str, tuple[int, ...], tuple[str, ...], int]] = (
    ([0], TEXT, EOS_IDS, (), 8),  # the first token is checked too
    ([0], "", EOS_IDS, (), 8),  # also where the text is empty, as that of an end-of-text token is
    (TWO, "Anna", EOS_IDS, (), 8),  # nothing special: it goes on
    ([5, 6, 0], TEXT, EOS_IDS, (), 8),  # the newest token is an end-of-text token
    ([5, 6, 3], TEXT, EOS_IDS, (), 8),  # it is the second of eos_ids
    ([5, 6, 1], TEXT, EOS_IDS, (), 8),  # between the ids, and none of them
    ([5, 3], TEXT, (6,), (), 8),  # another model: 3 ends no text of it
    (TWO, TEXT, (6,), (), 8),  # and 6 does
    ([0, 5, 6], TEXT, EOS_IDS, (), 8),  # an end-of-text token before the newest
    ([5, 6, 7], "Anna", EOS_IDS, (), 4),  # one token is still allowed; as many characters as tokens
    ([5] * 7, TEXT, EOS_IDS, (), 8),
    ([5] * 8, TEXT, EOS_IDS, (), 8),  # the last one counts
    ([5], TEXT, EOS_IDS, (), 1),  # the limit is reached at the first token
    (TWO, TEXT, EOS_IDS, ("coat",), 8),  # at the end of the text
    (TWO, "Anna had a coat\n", EOS_IDS, ("\n",), 8),  # strip() and split() would take it away
    (TWO, TEXT, EOS_IDS, ("\n",), 8),  # and of this stop string they would leave nothing
    (TWO, TEXT, EOS_IDS, ("coat ",), 8),  # or too little
    (TWO, "Anna had a coat. One", EOS_IDS, ("coat.",), 8),  # the last token goes on behind it
    (TWO, "Anna had coats", EOS_IDS, ("coat.",), 8),  # a dot stands for itself
    (TWO, TEXT, EOS_IDS, ("Anna",), 8),  # at the beginning, where text.find gives 0
    (TWO, TEXT, EOS_IDS, ("kite", "coat"), 8),  # the second of two
    (TWO, TEXT, EOS_IDS, ("kite",), 8),  # not in the text
    (TWO, TEXT, EOS_IDS, ("anna",), 8),  # large and small letters differ
    ([*[5] * 7, 0], TEXT, EOS_IDS, (), 8),  # stop wins over length
    ([5] * 8, TEXT, EOS_IDS, ("coat",), 8),  # for stop strings as well
    ([5] * 8, TEXT, EOS_IDS, ("kite",), 8),  # there are stop strings, and none of them came
)


def check_why_finished(function: Callable[..., str | None]) -> Verdict:
    """Check a learner's function(new_ids, text, eos_ids, stop, max_tokens) → why it ended.

    "stop", "length", or None as long as it goes on.
    """

    def goes_on(state: Any) -> bool:
        try:
            return function(*deepcopy(state)) in (None, ...)
        except Exception:
            return False

    def reason(asked: Callable[..., Any], *state: Any) -> list[Any]:
        """The answer in a list: None is one too."""
        if asked is function and state == ENDINGS[0] and all(map(goes_on, ENDINGS)):
            if has_gap(function):
                must_answer("why_finished", None, function)
            raise CannotBe(
                f"it returns None for all {len(ENDINGS)} inputs; is no condition ever true, or is "
                "there no `return`?"
            )
        return [asked(*state)]

    return judge(
        *("why_finished", function, right_reason, ENDINGS, REASON_SLIPS),
        f"why_finished: {len(ENDINGS)} endings, the first and the last token",
        call=reason,
        read=lambda answer: answer[0],
    )


# -- the least time -------------------------------------------------------------------------------


def least_seconds(
    num_weights: int, num_tokens: int, kv_bytes: int, peak: float, bandwidth: float
) -> float:
    """Seconds that a forward in fp32 takes at the least; the FLOPs of attention are left out."""
    return max(2 * num_weights * num_tokens / peak, (4 * num_weights + kv_bytes) / bandwidth)


FLOOR_SLIPS: Slips = slips_of(
    least_seconds,
    """
    / peak, (4 → / peak + (4
    max( → (
        gives the sum of both times; in the best case both go on at once, and the longer one decides
    (4 * num_weights + kv_bytes) / → 4 * num_weights / bandwidth, kv_bytes /
        takes weights and cache for two times; their bytes go through the same memory, and add up
    (4 * num_weights + kv_bytes) / → (4 * (num_weights + num_tokens) + kv_bytes) /
        counts 4 bytes more for each token; the bytes are those of the weights and of the cache
        alone
    max( → min(
        gives the shorter of the two times; the forward is done when the longer one is over
    / peak →
    / bandwidth →
        compares FLOPs with bytes; a time is FLOPs / peak, or bytes / bandwidth
    / peak → * peak
    / bandwidth → * bandwidth
        multiplies by peak and bandwidth; both are rates, and a time is an amount divided by its
        rate
    / peak → / (bandwidth)
    / bandwidth → / peak
        gives FLOPs / bandwidth and bytes / peak; `peak` is FLOPs per second, and `bandwidth` bytes
        per second
    2 * num_weights * num_tokens / peak → peak / (2 * num_weights * num_tokens)
    (4 * num_weights + kv_bytes) / bandwidth → bandwidth / (4 * num_weights + kv_bytes)
        gives peak / FLOPs and bandwidth / bytes; a time is an amount divided by its rate
    / peak → // peak
    / band → // band
        gives whole seconds only; a time may have a fraction
    max( → 1e3 * max(
        gives milliseconds; seconds are asked for
    max( → 1e6 * max(
        gives microseconds; seconds are asked for
    2 * num → num
        counts one FLOP for each weight and token; there are two, a product and a sum
    2 * num → 4 * num
        counts four FLOPs for each weight and token; there are two, a product and a sum
    2 * num_weights * num_tokens → 2 * num_weights
        counts the FLOPs of one token; each of the `num_tokens` tokens needs them
    4 * num → 2 * num
        counts 2 bytes for each weight, as in 16 bits; a weight in fp32 has 4
    4 * num_weights → num_weights
        counts one byte for each weight; a weight in fp32 has 4
    (4 * num_weights + kv_bytes) → ((4 * num_weights + kv_bytes) * num_tokens)
        counts all bytes again for each token; a forward moves them once for all its tokens
    4 * num_weights → 4 * num_weights * num_tokens
        counts the weights again for each token; a forward reads each weight once for all its tokens
    + kv_bytes → + 4 * kv_bytes
        counts 4 bytes for each of the `kv_bytes`; they are bytes already
    + kv_bytes → + 2 * kv_bytes
        counts the `kv_bytes` twice; they are bytes of K and of V already
    + kv_bytes →
        leaves out the `kv_bytes`; they go through the same memory as the weights
    """,
)


def check_floor(function: Callable[[int, int, int, float, float], float]) -> Verdict:
    """Check a learner's function(num_weights, num_tokens, kv_bytes, peak, bandwidth) → seconds."""
    cases = [
        (10, 3, 0, 2.0, 40.0),  # arithmetic decides: 30 s, not 1 s
        (10, 3, 0, 60.0, 4.0),  # memory decides, with no cache: 10 s, not 1 s
        (10, 3, 20, 60.0, 4.0),  # and with one: 15 s
        (10, 1, 8, 10.0, 20.0),  # no whole seconds: 2.4 s
        *((7 * 10**8, 1, 10**9, 3e11, 5e10), (10**9, 256, 10**9, 2e11, 4e10)),
        *((10**8, 2, 10**10, 3e11, 6e10), (1000, 500, 0, 1e12, 1e9)),
    ]
    return judge(
        *("least_seconds", function, least_seconds, cases, FLOOR_SLIPS),
        "least_seconds: once memory decides, once arithmetic, once the cache",
        tolerance=1e-6,
        read=read_number("return one number, the time that decides"),
        also={
            "arithmetic": lambda _, n, t, kv, peak, __: f"{2 * n * t / peak:.4g} s",
            "reading": lambda _, n, t, kv, __, bandwidth: f"{(4 * n + kv) / bandwidth:.4g} s",
        },
    )
