"""The checks of notebook 02, and what they know of usual mistakes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tutorial_engine.learn.checks_01 import TEXT_IDS, tiny_model
from tutorial_engine.learn.judge import CODE, Slips, alike, judge, read_number, slips_of
from tutorial_engine.learn.own import run_new as right_run
from tutorial_engine.learn.own import why_finished as right_reason
from tutorial_engine.learn.own_cache import (
    Memory,
    MyCache,
    MyStaticCache,
    WriteAndRead,
    same_memory,
)
from tutorial_engine.learn.own_cache import transplant as right_transplant
from tutorial_engine.learn.parts import number, whole
from tutorial_engine.learn.verdict import (
    SHAPES,
    CannotBe,
    Explain,
    Verdict,
    explained,
    must_answer,
)
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.viz.words import counted, listed, numbered

# -- MyCache and MyStaticCache --------------------------------------------------------------------

NEW = (4, 1, 2, 1)  # tokens of each step
SIZES = ((5, 2, 8, 43), (3, 3, 4, 29))  # layers, K/V heads, head_dim, slots: none can be guessed

CACHE_SLIPS: Slips = slips_of(
    MyCache,
    """
    self.kv[layer] = k, v → pass
        it gives only the new k and v; keep the old
    self.kv[layer] = k, v → self.kv.setdefault(layer, (k, v))
        what was joined is not stored; store it in every call ▸ self.kv[layer] = (k, v)
    zip(self.kv[layer], → zip([self.kv[layer][0]] * 2,
        the new v is joined behind the old k
    (k, v), strict → (v, k), strict
        k gets the new v, and v the new k
    (k, v), strict → (k, torch.cat((self.kv[layer][0], k))), strict
        all of k is joined behind the old v; v must get the new v
    if layer in → if (layer := 0) in
        all layers share one k and one v; each layer keeps its own
    pair) for → pair[::-1]) for
        the new is joined before the old; first the old, then the new
    [(k, v)] → [(k, k)]
        v is a copy of k
    [(k, v)] → [(v, k)]
        k and v are swapped; the pair is (k, v)
    [(k, v)] → [(k.transpose(0, 1), v.transpose(0, 1))]
        the heads come first; the tokens are the first axis
    """,
)
STATIC_SLIPS: Slips = slips_of(
    MyStaticCache,
    """
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer], self.v[layer])]
        k and v of all slots; those behind the text hold nothing
        ▸ self.k[layer, :end]
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer, :end-1], self.v[layer, :end-1])]
        k and v are one token too few; a slice ends one behind its last entry
        ▸ int(batch.positions[-1]) + 1
    [(self.k[layer, :end], self.v[layer, :end])] → [(k, v)]
        only the new k and v; return all tokens so far ▸ self.k[layer, :end]
    :end], self.v[layer, :end])] → :len(k)], self.v[layer, :len(k)])]
        as many k and v as are new; return all tokens so far ▸ int(batch.positions[-1]) + 1
    [(self.k[layer, :end], self.v[layer, :end])] → [(self.k[layer, :end+1], self.v[layer, :end+1])]
        k and v are one token too many; a slice ends one behind its last entry, and the last token
        stands at batch.positions[-1] ▸ int(batch.positions[-1]) + 1
    self.k.clone() → self.k
        k and v share one memory; make two
    self.k[layer, start:end], self.v[layer, start:end] → self.k[layer, W], self.v[layer, W]
    self.k[layer, W], → W = batch.positions - 1; self.k[layer, W],
        k and v are one slot too early: position p belongs into slot p
    self.k[layer, start:end], self.v[layer, start:end] → self.k[layer, W], self.v[layer, W]
    self.k[layer, W], → W = batch.positions + 1; self.k[layer, W],
        k and v are one slot too late: position p belongs into slot p
    self.k[layer, start:end], self.v[layer, start:end] → self.k[layer, W], self.v[layer, W]
    self.k[layer, W], → W = slice(len(k)); self.k[layer, W],
        the new tokens are in slot 0 again; write them where they stand in the text
        ▸ self.k[layer, batch.positions] = k
    start = int( → layer = 0; start = int(
        k and v are those of another layer: each layer needs a buffer of its own
    heads, dim = config → self.used = 0; heads, dim = config
    int(batch.positions[0]) → self.used
    end = start + len(k) → end = self.used = start + len(k)
        all layers write to the same positions, so a count must not advance in each of them
        ▸ batch.positions
    start = int( → self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v); start = int(
        old k and v that are all 0: make the memory in __init__, once for all calls
    ] = k, v → ] = v, k
        k and v are swapped; the pair is (k, v)
    """,
    ("torch.zeros(", "torch.nan * torch.ones("),  # what nobody wrote may be anything
    ("torch.zeros_like(self.k)", "self.k.clone()"),
)


def _updates(make_cache: Callable[..., Any], *sizes: Any) -> list[Sequence[Tensor]]:
    """What `update` gives, step by step and layer by layer; sizes: a config and max_len."""
    layers, heads, dim, _ = SIZES[0]
    if sizes:
        config = sizes[0]
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        dim = config.head_dim
    try:
        with _Watch():
            cache = make_cache(*sizes)
    except TypeError as error:
        given = f"{make_cache.__name__}({'config, max_len' if sizes else ''})"
        raise CannotBe(f"{given} raised TypeError: {error}") from error
    draw, first, found = torch.Generator().manual_seed(1), 0, list[Sequence[Tensor]]()
    for new in NEW:
        for layer in range(layers):
            k, v = (torch.randn(new, heads, dim, generator=draw) for _ in "kv")
            got = cache.update(layer, k, v, Batch.from_sequences([[0] * new], [first]))
            must_answer("update", got, make_cache.update)  # type: ignore[attr-defined]
            found.append(_pair(got))
        first += new
    return found


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


def _pair(got: object) -> Sequence[Tensor]:
    form = "it must return a list with one pair, [(k, v)]"
    if isinstance(got, list | tuple) and len(got) == 2 and isinstance(got[0], Tensor):
        raise CannotBe(f"{form}; got the pair without the list around it")
    if not isinstance(got, list | tuple) or len(got) != 1:
        raise CannotBe(f"{form}; got {type(got).__name__}")
    (pair,) = got
    if not isinstance(pair, list | tuple) or [isinstance(x, Tensor) for x in pair] != [True, True]:
        raise CannotBe(f"{form}; its only entry is no pair of tensors")
    return pair


def _why_no_history(
    got: Sequence[Sequence[Tensor]], want: Sequence[Sequence[Tensor]], *_: Any
) -> str:
    """What is wrong with the first tensor that is."""
    layers = len(want) // len(NEW)
    for step, (mine, right) in enumerate(zip(got, want, strict=True)):
        layer, new = step % layers, NEW[step // layers]
        for name, a, b, others in zip("kv", mine, right, right[::-1], strict=True):
            if a.shape[1:] != b.shape[1:]:
                shapes = f"{list(a.shape)}, expected {list(b.shape)}"
                return (
                    f"layer {layer} gives {name} of shape {shapes}; the tokens are the first axis"
                )
            if alike(a, b, 0):
                continue
            if a.shape == b.shape and a.dtype != b.dtype and alike(a, b, 0.02):
                return f"layer {layer} gives {name} in {a.dtype}, and rounds it; keep its dtype"
            return f"layer {layer}: {_wrong_tokens(name, a, b, others, new)}"
    return ""


def _wrong_tokens(name: str, got: Tensor, want: Tensor, others: Tensor, new: int) -> str:
    """What is wrong with k (or v) of a layer; `others` is the right v (or k), `new` its tokens."""
    other = "v" if name == "k" else "k"
    lacks_new = not _among(want[-new:], got).any()
    if lacks_new and _among(others[-new:], got).any():
        return f"{name} gets the new {other}; it must get the new {name}"
    if _among(others, got).any():
        return f"{name} has {other} in it; only {name} belongs there"
    if len(got) != len(want):
        more = "; does each layer keep its own?" * (len(got) > len(want))
        return f"{name} has {counted(len(got), 'token')}, expected {len(want)}{more}"
    if lacks_new:
        return f"the new {name} is not written into the memory"
    if _among(want, got).all():
        return f"{name} is mixed up; first the old, then the new"
    wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not alike(a, b, 0)]
    return f"{name} of {numbered(wrong, 'token')} is wrong"


def _among(rows: Tensor, many: Tensor) -> Tensor:
    """Which of these rows are among many."""
    return (rows[:, None] == many).flatten(2).all(-1).any(-1)


def _second_is_empty(make_cache: Callable[[], Any]) -> str:
    k, batch = torch.zeros(1, 2, 8), Batch.from_sequences([[0]])
    if make_cache().update(0, k, k, batch)[0][0].shape == k.shape:
        return ""
    return (
        "a second cache begins with the tokens of the first; make the dict in __init__, "
        f"so that each cache has its own{CODE}self.kv = {{}}"
    )


CACHE_ERRORS: Explain = {
    "cat()": "torch.cat takes one tuple with both tensors in it",
    "but got tuple": "self.kv[layer] is a pair: join k to its first tensor, and v to its second",
    "size of tensor a": "`+` adds numbers; torch.cat joins",
    SHAPES: "k and v are [tokens, heads, head_dim]: join axis 0.",
}


def _why_cache_raised(error: Exception) -> str:
    """A key that is no layer is a mistake of another kind."""
    if isinstance(error, KeyError) and [type(key) for key in error.args] == [int]:
        return f"The first time, layer {error} has nothing old; ask first whether it has"
    return explained(error, CACHE_ERRORS)


def check_cache(make_cache: Callable[[], Any]) -> Verdict:
    """Check a learner's class with update(layer, k, v, batch) → [(all k, all v)], one sequence."""
    return judge(
        *("update", make_cache, MyCache, [()], CACHE_SLIPS),
        "update: 8 tokens in 4 steps, 5 layers, nothing lost",
        call=_updates,
        tolerance=0,
        otherwise=_why_no_history,
        explain=_why_cache_raised,
        then=_second_is_empty,
        body=getattr(make_cache, "update", None),
    )


def _sizes(layers: int, heads: int, dim: int, room: int) -> tuple[ModelConfig, int]:
    """What a static cache is made of: a config and max_len."""
    names: dict[str, Any] = {"num_attention_heads": 2 * heads, "num_key_value_heads": heads}
    names |= {"num_hidden_layers": layers, "head_dim": dim}
    return replace(tiny_model().config, **names), room


def _why_not_static(make_cache: Callable[..., Any]) -> str:
    """Right numbers: in memory that was allocated once, and of the right size? "" if so."""
    layers, heads, dim, room = SIZES[0]
    found = _updates(make_cache, *_sizes(*SIZES[0]))
    for before, after in zip(found, found[layers:], strict=False):
        for name, old, new in zip("kv", before, after, strict=True):
            if not same_memory(old, new):
                return (
                    f"the right {name}, but in new memory, so the old ones were copied; write into "
                    "the memory that __init__ made, and return a view of it"
                    f"{CODE}self.k[layer, :end]"
                )
    cache = make_cache(*_sizes(*SIZES[0]))

    def writes(tokens: int, first: int) -> Sequence[Tensor]:
        k, v = torch.ones(2, tokens, heads, dim)
        return _pair(cache.update(0, k, v, Batch.from_sequences([[0] * tokens], [first])))

    writes(8, 0)
    with _Watch() as watch:
        writes(1, 8)
    if any(bool((x > 1).any()) for x in writes(1, 8)):
        return (
            "a slot that is written again holds the sum of old and new: write with `=`, and not "
            "with `+=`"
        )
    if watch.most_moved > 2 * heads * dim:
        return "it writes old k and v again, into the same memory; write only the new ones"
    every = {x.untyped_storage().data_ptr(): x for pair in found for x in pair}
    if not all(x.untyped_storage().resizable() for x in every.values()):
        return "its memory is numpy's, which no GPU can hold; make it with torch.zeros"
    held = sum(x.untyped_storage().nbytes() // x.element_size() for x in every.values())
    if held == (needed := 2 * layers * room * heads * dim):
        return ""
    return (
        f"its memory has {held:,} numbers, and K and V of {room} slots in {layers} layers are "
        f"{needed:,}; is a size typed in? config and max_len say all of them"
    )


SIZE_TYPED = "Is a size typed in? config has the number of layers, and max_len the slots"
STATIC_ERRORS: Explain = {
    "no attribute 'k'": "Make the memory in __init__, as self.k and self.v",
    "no attribute 'v'": "Make the memory in __init__, as self.k and self.v",
    "only integer tensors": (
        "batch.positions are as many as the new tokens; the last one says where the text ends"
        f"{CODE}int(batch.positions[-1]) + 1"
    ),
    "out of bounds for dimension 0": (
        f"k and v hold the new tokens only, so k[batch.positions] is not there. {SIZE_TYPED}"
    ),
    "out of bounds": SIZE_TYPED,
    "dtypes": "Keep the dtype of k and v: torch.zeros makes float32",
    SHAPES: "A buffer of a layer is [max_len, K/V heads, head_dim]; k is [T, K/V heads, head_dim]",
}


def check_static_cache(make_cache: Callable[..., Any]) -> Verdict:
    """Check a learner's class (config, max_len) with update(layer, k, v, batch) → [(all k, all v)].

    One sequence; what `update` gives are views of memory that was allocated once.
    """
    return judge(
        *("update", make_cache, MyStaticCache, [_sizes(*sizes) for sizes in SIZES], STATIC_SLIPS),
        "update: 8 tokens in 4 steps, 5 layers and 3, and no old key or value was copied",
        call=_updates,
        tolerance=0,
        otherwise=_why_no_history,
        explain=STATIC_ERRORS,
        then=_why_not_static,
        body=getattr(make_cache, "update", None),
    )


# -- transplant -----------------------------------------------------------------------------------

WHERE = ((2, [4], "K"), (0, [5, 2], "V"), (4, [0, 3], "KV"))  # layer, slots, which
TRANSPLANT_SLIPS: Slips = slips_of(
    right_transplant,
    """
    k[slots] = donor_k[slots] → k[slots] = donor_v[slots]
        K gets the donor's V; K is copied to K, and V to V
    v[slots] = donor_v[slots] → v[slots] = donor_k[slots]
        V gets the donor's K; V is copied to V, and K to K
    k[slots] = donor_k[slots] → k[slots] = donor_v[slots]
    v[slots] = donor_v[slots] → v[slots] = donor_k[slots]
        K and V of the donor have changed places
    k[slots] = donor_k[slots] → pass
    v[slots] = donor_v[slots] → pass
        the memory is as it was; is a condition never true (`which` is "K", "V" or "KV")? Or does
        `k = ...` only give a name to another tensor? ▸ k[slots] = ...
    k[slots] = donor_k[slots] → donor_k[slots] = k[slots]
    v[slots] = donor_v[slots] → donor_v[slots] = v[slots]
        it copies from the memory into the donor; the other way round is asked
    k[slots] = donor_k[slots] → donor_k[slots] = k[slots]
    v[slots] = donor_v[slots] → donor_v[slots] = v[slots]
    return memory → return donor
        it changes the donor and returns it; change `memory`, and return that
    return memory → return donor
        the memory is right, and the donor was returned
    k[slots] = donor_k[slots] → k[:, slots] = donor_k[:, slots]
    v[slots] = donor_v[slots] → v[:, slots] = donor_v[:, slots]
        slots are the first axis; these are heads of all slots ▸ k[slots] = ...
    k[slots] = donor_k[slots] → k[slots], donor_k[slots] = donor_k[slots], k[slots]
    v[slots] = donor_v[slots] → v[slots], donor_v[slots] = donor_v[slots], v[slots]
        the donor has changed, too; copy, and do not swap
    """,
)


def _two_memories() -> tuple[Memory, Memory]:
    """A memory and a donor: 5 layers, 6 slots."""
    k, v, donor_k, donor_v = torch.randn(4, 5, 6, 6, 4, generator=torch.Generator().manual_seed(3))
    return dict(enumerate(zip(k, v, strict=True))), dict(
        enumerate(zip(donor_k, donor_v, strict=True))
    )


def _transplanted(function: Callable[..., Any], layer: int, *where: Any) -> Any:
    """What it gives for two memories, and the donor after it; None if it gives None."""
    memory, donor = _two_memories()
    got = function(memory, donor, layer, *where)
    return got if got is None or got is ... else [got, donor]


def _copied(pairs: Sequence[Sequence[Tensor]]) -> list[str]:
    """What is the donor's in a memory, in words: a tensor and its slots each."""
    _, donor = _two_memories()
    found = []
    for layer, pair in enumerate(pairs):
        for letter, mine, theirs in zip("KV", pair, donor[layer], strict=True):
            if mine.shape == theirs.shape and (
                slots := [i for i, row in enumerate(mine) if alike(row, theirs[i], 0)]
            ):
                found.append(f"{letter} of {numbered(slots, 'slot')} in layer {layer}")
    return found


def check_transplant(function: Callable[..., Memory]) -> Verdict:
    """Check a learner's function(memory, donor, layer, slots, which) → the changed memory."""

    def read(answer: Sequence[Any]) -> list[Any]:
        got, donor = answer
        if not isinstance(got, dict) or sorted(got) != sorted(donor):
            kind = (
                f"a dict with layers {sorted(got)}" if isinstance(got, dict) else type(got).__name__
            )
            raise CannotBe(f"return the whole memory, a dict with all its layers; got {kind}")
        return [[_pair([one[layer]]) for layer in sorted(one)] for one in (got, donor)]

    def otherwise(got: list[Any], want: list[Any], _: int, __: list[int], which: str) -> str:
        mine, asked = (_copied(one[0]) for one in (got, want))
        if mine == asked:
            return "the right slots are copied, and others have changed"
        both = f'; of "{which}" each letter counts' * (which == "KV")
        return f"asked: {listed(asked)}; copied: {listed(mine or ['nothing'])}{both}"

    return judge(
        *("transplant", function, right_transplant, WHERE, TRANSPLANT_SLIPS),
        "transplant: K, V and both, in 3 of 5 layers, and the donor stays as it was",
        call=_transplanted,
        read=read,
        tolerance=0,
        otherwise=otherwise,
        explain={
            "tuple": f"memory[layer] is a pair (k, v): write into its tensors{CODE}k[slots] = ...",
            SHAPES: "k and donor_k are [tokens, heads, head_dim]: take the same slots of both",
        },
    )


# -- run_new --------------------------------------------------------------------------------------

RUN_SLIPS: Slips = slips_of(
    right_run,
    """
    [token_ids[num_computed:]], [num_computed] → [token_ids], [0]
        it runs all tokens again; the first ones are in the cache
    [token_ids[num_computed:]], [num_computed] → [token_ids[-1:]], [len(token_ids) - 1]
        it runs the last token alone; others are not computed yet
    , [num_computed] →
        positions must go on where the computed ones end, not start at 0 again
    , [num_computed] → , [num_computed + 1]
        positions are one too late: the first new token stands at num_computed
    (batch, attention) → (batch)
        the attention, with its cache, was not handed over ▸ model(batch, attention)
    [-1:])[0] → )
        it returns the logits of all new tokens; only the last one's are asked
    [-1:])[0] → )[0]
        these are the logits of the first new token; the last one's choose the next
    [-1:])[0] → [-1:])
        it returns [1, V], and [V] is asked ▸ logits[0]
    model.compute_logits(model(batch, attention)[-1:])[0] → model(batch, attention)[-1]
        it returns hidden states, and logits are asked ▸ model.compute_logits(hidden)
    [-1:])[0] → [-1:])[0].softmax(-1)
        these are probabilities; return the logits themselves
    [-1:])[0] → [-1:])[0].log_softmax(-1)
        these are log-probabilities; return the logits themselves
    [-1:])[0] → [-1:])[0].argmax()
        it returns one number; return the logits of all entries of the vocabulary
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


def _ran(function: Callable[..., Tensor], first: int, last: int) -> list[Any] | None:
    """Which tokens ran, at which positions, and what was returned; None if nothing was."""
    model, ids, attention = tiny_model(), list(TEXT_IDS[:last]), _Watched()
    if first:
        right_run(model, attention, ids[:first], 0)
    attention.ran = [[], []]
    got = function(model, attention, ids, first)
    if ids != list(TEXT_IDS[:last]):
        raise CannotBe("it changes token_ids, the caller's list; make a new one of a part of it")
    return None if got is None or got is ... else [*attention.ran, got]


NEW_TOKENS = "The new tokens are those from token_ids[num_computed] to the end"
A_BATCH = "The model takes a Batch, and Batch.from_sequences makes one"
LISTS_OF_IDS = "Batch.from_sequences wants lists of ids: it makes the tensors itself"
IN_LISTS = (
    "Batch.from_sequences takes a list of sequences and a list of positions: put the one list of "
    "ids into a list, and the one position, too"
)
RUN_ERRORS: Explain = {
    "is empty": NEW_TOKENS,
    "starts at position": NEW_TOKENS,
    "'input_ids'": A_BATCH,
    "'query_start_loc'": A_BATCH,
    "'<' not supported between instances of": (
        "Batch.from_sequences wants one position for each sequence, that of its first token; it "
        f"counts on from there{CODE}[num_computed]"
    ),
    "value of Tensor": LISTS_OF_IDS,
    "holds tensor(": LISTS_OF_IDS,
    "sequences but": IN_LISTS,
    "object is not iterable": IN_LISTS,
    "has no len()": IN_LISTS,
    "token ids are whole": IN_LISTS,
}


@torch.no_grad()
def check_run_new(function: Callable[..., Tensor]) -> Verdict:
    """Check a learner's function(model, attention, token_ids, num_computed) → logits [V].

    It runs the tokens from num_computed on, at their positions; the logits are the last token's.
    """

    def otherwise(got: list[Any], want: list[Any], first: int, last: int) -> str:
        if got[0] != want[0]:
            many = f"{counted(len(got[0]), 'token')}, expected {last - first}"
            return f"it runs {many}: all from token_ids[num_computed] on"
        if got[1] != want[1]:
            return f"expected positions {want[1]}"
        if not isinstance(got[2], Tensor):
            return f"it must return a tensor of {len(want[2])} logits, got {type(got[2]).__name__}"
        if got[2].shape != want[2].shape:
            return f"it returned shape {list(got[2].shape)}, expected {list(want[2].shape)}"
        return "other logits; does the model see the whole batch and the given attention?"

    return judge(
        *("run_new", function, right_run, [(0, 5), (5, 6), (6, 9), (9, 10)], RUN_SLIPS),
        "run_new: a prefill of 5 tokens, a decode, a chunk of 3, a decode",
        call=_ran,
        tolerance=1e-4,
        where=lambda got, first, last: (
            f"new: {numbered(range(first, last), 'token')}; positions {got[1]} ran"
        ),
        otherwise=otherwise,
        explain=RUN_ERRORS,
    )


# -- slots ----------------------------------------------------------------------------------------


def _slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
    slots: list[int] = []
    for r, (old, n) in enumerate(zip(cached, new, strict=True)):
        start = r * max_len + old
        slots += range(start, start + n)
    return slots


SLOT_CASES = (([0], [4], 8), ([4], [1], 8), ([0, 0], [2, 2], 8), ([5, 0, 2], [1, 3, 2], 16))
SLOT_SLIPS: Slips = slips_of(
    _slots,
    """
    max_len + old → max_len
        the cached tokens are overwritten
    max_len + old → max_len
    start + n) → start + old + n)
        only the new tokens are written, not the cached
    r * max_len + old → sum(cached[:r]) + sum(new[:r]) + old
        the rows are packed one after the other, but row r begins at r * max_len, however few slots
        are used before it
    range(start, start + n) → [r * max_len] * n
        these are where rows begin; each token needs its own
    max_len + old → max_len + old + 1
        one too far; the first free slot is number cached
    max_len + old → max_len + old - 1
        one too early; slots are counted from 0
    r * max_len → r * 8
        rows have max_len slots, not always 8
    start + n) → start + n + 1)
        one slot too many; a range leaves out its end
    r * max_len → (r + 1) * max_len
        rows are counted from 0: row r begins at slot r * max_len
    range(start, start + n) → range(start, r * max_len + n)
        a row's new tokens end cached[r] + new[r] slots behind its beginning
    start + n) → start + 1)
        one slot for each row; each new token needs one
    r * max_len + old → old
        row r begins at slot r * max_len
    slots += range(start, start + n) → slots += range(start, start + n); break
        only row 0 is there; is the answer returned in the loop, or does a range end too early?
    """,
)


def check_slots_to_write(function: Callable[[list[int], list[int], int], Iterable[int]]) -> Verdict:
    """Check a learner's function(cached, new, max_len) → the slots to write, rows 0, 1, ..."""

    def read(answer: Iterable[Any]) -> list[float | None]:
        given = list(answer)
        known = [number(x) if whole(x) is None else whole(x) for x in given]
        if None in known or isinstance(answer, dict):
            raise CannotBe(f"got {answer}; one flat list is asked, no list for each row")
        return known

    return judge(
        *("slots_to_write", function, _slots, SLOT_CASES, SLOT_SLIPS),
        "slots_to_write: prefill, decode, two prefills and a mixed batch",
        read=read,
        explain={
            IndexError: "Count the rows: `for r in cached` gives numbers of tokens, and no row"
            f"{CODE}for r in range(len(cached))"
        },
        where=lambda got, cached, new, max_len: (
            f"cached={cached}, new={new}, max_len={max_len}: got {got}"
        ),
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
        nothing is sorted; the likeliest tokens must come first
        ▸ probs.sort(descending=True)
    descending=True →
        the sum begins at the unlikeliest token ▸ descending=True
    return keep → return ~keep
        it is inverted; True = kept
    - values < p → - values > p
        turned around; a token stays if the sum before it is below p
    return keep → return probs > p
        each probability is compared with p alone; add them up from the likeliest down
    return keep → return probs < p
        each probability is compared with p alone, and the unlikely ones stay; add them up from the
        likeliest down
    - values < p → <= p
        the token that crosses p stays, and so the likeliest always does
    keep[order] → keep[:]
        the right number, but of other tokens; put the answer back into the first order
        ▸ keep[order] = ...
    keep[order] = values.cumsum(-1) - values < p → keep = (values.cumsum(-1) - values < p)[order]
        [order] on the right sorts once more; the answer must go back into the first order
        ▸ keep[order] = ...
    probs.sort → probs.softmax(-1).sort
        probs are probabilities already: no softmax
    < p → < 1 - p
        p is how much is kept, and not how much is dropped
    return keep → return probs >= p * probs.max()
        that is the rule of min_p; top_p adds the probabilities up
    return keep → return order[values.cumsum(-1) - values < p]
        these are the numbers of the kept tokens; a bool for each token is asked
        ▸ keep[order] = ...
    < p → <= p
        one too many; when the sum before it is p, a token goes
    return keep → return probs * keep
        which are kept is asked, and not what is left of them
    return keep → return keep.nonzero().flatten()
        these are the numbers of the tokens that are kept; a bool for each token is asked
        ▸ keep = torch.zeros_like(probs, dtype=torch.bool); keep[these] = True
    """,
)


def check_top_p(function: Callable[[Tensor, float], Tensor]) -> Verdict:
    """Check a learner's function(probabilities [V], p) → bool [V], True = kept."""
    spread = torch.rand(12, generator=torch.Generator().manual_seed(2)).pow(3)
    falling = torch.tensor([0.5, 0.3, 0.125, 0.05, 0.025])
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])  # exact: two reach 0.75
    cases = [(falling, 0.1), (halves, 0.75), (falling, 0.7), (falling.flip(0), 0.9)]
    cases.append((spread / spread.sum(), 0.6))

    def otherwise(got: Tensor, want: Tensor, *_: Any) -> str:
        if got.dtype != torch.bool:
            return f"it must return a bool tensor [{len(want)}], True = kept; got {got.dtype}"
        kept, right = int(got.sum()), int(want.sum())
        if kept == right:
            return "the right number, but of other tokens; the likeliest are kept"
        more = "; the token that crosses p stays" if kept < right else ""
        return f"it keeps {counted(kept, 'token')}, expected {right}{more}"

    return judge(
        *("keep_top_p", function, _nucleus, cases, TOP_P_SLIPS),
        "keep_top_p: five distributions, sorted and not",
        where=lambda got, probs, p: f"p={p} of {[round(float(x), 3) for x in probs]}",
        otherwise=otherwise,
        explain={
            "return_types.sort": (
                "sort gives two things, the values and their order"
                f"{CODE}values, order = probs.sort(descending=True)"
            ),
            "dtypes": "The answer is a tensor of bools",
        },
    )


# -- why_finished ---------------------------------------------------------------------------------

EOS_IDS = (0, 3)  # a model may have several end-of-text tokens
REASON_SLIPS: Slips = slips_of(
    right_reason,
    """
    len(new_ids) → len(text)
        max_tokens counts tokens, and not the characters of the text
    """,
)


class Ending(NamedTuple):
    """A state of one request, and what may be wrong with an answer to it."""

    what: str
    hint: str
    ids: list[int]
    text: str = "Anna had a coat"
    stop: tuple[str, ...] = ()
    limit: int = 8
    eos_ids: tuple[int, ...] = EOS_IDS


TWO = [5, 6]  # two tokens of eight, and none of them ends a text
ENDINGS = (
    Ending(
        "2 of 8 tokens, nothing special",
        "it goes on: return None (and all() of no strings is True)",
        TWO,
        "Anna",
    ),
    Ending(
        "the newest token is an end-of-text token",
        "it alone ends the request: look at new_ids[-1]",
        [5, 6, 0],
    ),
    Ending("it is the second of the end-of-text ids", "eos_ids may hold several", [5, 6, 3]),
    Ending("the first token is an end-of-text token", "the first one is checked too", [0]),
    Ending(
        "the newest id is 1, and eos_ids is (0, 3)",
        "only the ids in eos_ids end the text: ask `in`, not which is larger",
        [5, 6, 1],
    ),
    Ending(
        "another model: eos_ids is (6,), and the newest id is 3",
        "3 ends no text of this model; are ids typed in?",
        [5, 3],
        eos_ids=(6,),
    ),
    Ending(
        "another model: eos_ids is (6,), and the newest id is 6",
        "6 ends a text of this model; are ids typed in?",
        TWO,
        eos_ids=(6,),
    ),
    Ending(
        "an end-of-text token stands before the newest",
        "the newest token decides: look at new_ids[-1] alone",
        [0, 5, 6],
    ),
    Ending("7 of 8 tokens", "one token is still allowed", [5] * 7),
    Ending("8 of 8 tokens", "len(new_ids) has reached max_tokens: the last one counts", [5] * 8),
    Ending("1 of 1 token", "the limit may be reached at the first token", [5], limit=1),
    Ending("the text ends with the stop string", "look for it in text", TWO, stop=("coat",)),
    Ending(
        "the stop string is the end of a line",
        "search the text as it is: strip() and split() take such characters away",
        TWO,
        "Anna had a coat\n",
        ("\n",),
    ),
    Ending(
        "the last token goes on after the stop string",
        "a token may end behind it: search the whole text, not its end",
        TWO,
        "Anna had a coat. One",
        ("coat.",),
    ),
    Ending(
        "the stop string is “coat.”, and the text has “coats”",
        "a dot stands for itself, as in `one in text`",
        TWO,
        "Anna had coats",
        ("coat.",),
    ),
    Ending(
        "the text begins with the stop string",
        "text.find gives 0 there, and that is found, too: ask `one in text`",
        TWO,
        stop=("Anna",),
    ),
    Ending(
        "the second of two stop strings is in the text",
        "look for each of them",
        TWO,
        stop=("kite", "coat"),
    ),
    Ending(
        "a stop string that is not in the text",
        "not every text is stopped: return None",
        TWO,
        stop=("kite",),
    ),
    Ending(
        "the stop string is “anna”, and the text has “Anna”",
        "large and small letters differ: search the text as it is",
        TWO,
        stop=("anna",),
    ),
    Ending("the last token allowed is end-of-text", "stop wins over length", [*[5] * 7, 0]),
    Ending(
        "the last token allowed completes the stop string",
        "stop wins over length, for stop strings as well",
        [5] * 8,
        stop=("coat",),
    ),
)


def _reason(function: Callable[..., Any], _what: str, _hint: str, *state: Any) -> list[Any]:
    """The answer in a list: None is one too."""
    ids, text, stop, limit, eos_ids = state
    return [function(ids, text, eos_ids, stop, limit)]


def check_why_finished(function: Callable[..., str | None]) -> Verdict:
    """Check a learner's function(new_ids, text, eos_ids, stop, max_tokens) → why it ended.

    "stop", "length", or None as long as it goes on.
    """

    def otherwise(got: list[Any], want: list[Any], _: str, hint: str, *state: Any) -> str:
        if all(_reason(function, *ending)[0] in (None, ...) for ending in ENDINGS):
            return "it returns None, always; is no condition ever true, or is there no `return`?"
        if got[0] is not None and got[0] not in ("stop", "length"):
            return f'got {got[0]!r}; answer "stop", "length" or None'
        return f"expected {want[0]!r}, got {got[0]!r}; {hint}"

    return judge(
        *("why_finished", function, right_reason, ENDINGS, REASON_SLIPS),
        f"why_finished: {len(ENDINGS)} endings, the first and the last token",
        call=_reason,
        where=lambda got, what, *_: what,
        otherwise=otherwise,
        explain={
            IndexError: "stop may be empty: the request has no stop string then",
            "requires string as left operand": (
                "stop is a tuple of strings: look in text for each of them, not for the tuple"
            ),
        },
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
        in the best case both overlap completely: not the sum
    (4 * num_weights + kv_bytes) / → 4 * num_weights / bandwidth, kv_bytes /
        weights and cache go through the same memory, one after the other: add their bytes
    (4 * num_weights + kv_bytes) / → (4 * (num_weights + num_tokens) + kv_bytes) /
        the bytes are those of the weights and of the cache; add none for the tokens
    max( → min(
        the slower of the two decides: max, not min
    / peak →
    / bandwidth →
        these are amounts, no seconds: FLOPs / peak, bytes / bandwidth
    / peak → * peak
    / bandwidth → * bandwidth
        a rate is per second: divide by it
    / peak → / (bandwidth)
    / bandwidth → / peak
        peak and bandwidth are swapped: FLOPs / peak and bytes / bandwidth
    2 * num_weights * num_tokens / peak → peak / (2 * num_weights * num_tokens)
    (4 * num_weights + kv_bytes) / bandwidth → bandwidth / (4 * num_weights + kv_bytes)
        upside down: amount / rate
    / peak → // peak
    / band → // band
        // gives whole seconds only: use /
    max( → 1e3 * max(
        these are milliseconds; seconds are asked
    max( → 1e6 * max(
        these are microseconds; seconds are asked
    """,
)


def _amounts(function: Callable[..., Any]) -> str:
    """Which amount it counts wrong, seen alone: the other rate is so high that it takes no time."""
    weights, tokens, kv, rest = 10**9, 7, 10**8, 1e99
    flops = float(function(weights, tokens, 0, 1.0, rest))
    read = float(function(weights, tokens, 0, rest, 1.0))
    cache = float(function(weights, tokens, kv, rest, 1.0)) - read
    for got, want, what, why in (
        (flops, 14e9, "FLOPs", "two for each weight and token, and FLOPs are divided by peak"),
        (read, 4e9, "bytes", "a weight in fp32 has 4 bytes, and all tokens of a forward share it"),
        (cache, 1e8, "bytes", "they are bytes already, of K and V together, and of all tokens"),
    ):
        if abs(got - want) > 1e-3 * want:
            of = f"{kv:,} kv_bytes" if got is cache else f"{weights:,} weights and {tokens} tokens"
            return f"of {of} it counts {got:,.0f} {what} in place of {want:,.0f}; {why}"
    return ""


def check_floor(function: Callable[[int, int, int, float, float], float]) -> Verdict:
    """Check a learner's function(num_weights, num_tokens, kv_bytes, peak, bandwidth) → seconds."""
    sizes = (7 * 10**8, 1, 10**9), (10**9, 256, 10**9), (10**8, 2, 10**10), (1000, 500, 0)
    rates = (3e11, 5e10), (2e11, 4e10), (3e11, 6e10), (1e12, 1e9)  # peak, bandwidth
    cases = [(*size, *rate) for size, rate in zip(sizes, rates, strict=True)]

    def otherwise(got: float, want: float, weights: int, tokens: int, *rest: Any) -> str:
        is_flops = want == 2 * weights * tokens / rest[1]
        given = f"{weights:,} weights, {counted(tokens, 'token')}, {rest[0]:,} kv_bytes"
        decides = f"expected {want:.4g}: here the {'arithmetic' if is_flops else 'memory'} decides"
        return _amounts(function) or f"{given}: got {got:.4g} s, {decides}"

    return judge(
        *("least_seconds", function, least_seconds, cases, FLOOR_SLIPS),
        "least_seconds: once memory decides, once arithmetic, once the cache",
        tolerance=1e-6,
        read=read_number("return one number, the time that decides"),
        otherwise=otherwise,
    )
