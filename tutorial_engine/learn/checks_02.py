"""Introduced in notebook 02. The checks of notebook 02: each knows the usual mistakes by name.

Every check hands out copies, so that an answer that works in place is as good as another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.learn.checks_01 import TEXT_IDS, tiny_model
from tutorial_engine.learn.own import why_finished as right_reason
from tutorial_engine.learn.own_cache import MyCache as RightCache
from tutorial_engine.learn.own_cache import WriteAndRead, same_memory
from tutorial_engine.learn.verdict import Verdict, close, guarded, not_done
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.sampler import top_p

# -- MyCache --------------------------------------------------------------------------------------


def check_cache(make_cache: Callable[[], Any]) -> Verdict:
    """Check a learner's class with update(layer, k, v, batch) → [(all k, all v)], one sequence."""
    update = getattr(make_cache, "update", None)

    def run() -> Verdict:
        draw = torch.Generator().manual_seed(1)
        theirs, ours, first = make_cache(), GrowingKVCache(), 0
        for new in (4, 1, 2, 1):
            allocation = ours.allocate("a", [0] * (first + new), first, new)
            batch = Batch.from_allocations([[0] * new], [allocation], ["a"])
            for layer in (0, 1):
                k, v = (torch.randn(new, 2, 8, generator=draw) for _ in "kv")
                try:
                    got = theirs.update(layer, k.clone(), v.clone(), batch)
                except KeyError as error:
                    if first:
                        raise
                    return Verdict(
                        False,
                        f"update raised KeyError: {error}: the first time, layer {layer} has "
                        "nothing old; ask first whether it has",
                    )
                bad = not_done("update", got, update) or _wrong_pairs(got)
                if bad is not None:
                    return bad
                ours.write(layer, k, v, batch)
                bad = _wrong_history(got[0], ours.read(layer, batch, 0), (k, v), layer)
                if bad is not None:
                    return bad
            first += new
        k, batch = torch.zeros(1, 2, 8), Batch.from_sequences([[0]])
        if make_cache().update(0, k.clone(), k.clone(), batch)[0][0].shape != k.shape:
            return Verdict(
                False,
                "update: a second cache begins with the tokens of the first; make the dict in "
                "__init__ (self.kv = {}), so that each cache has its own",
            )
        return Verdict(True, f"update: {first} tokens in 4 steps, 2 layers, nothing lost")

    return guarded("update", run, update, "k and v are [tokens, heads, head_dim]: join axis 0.")


def _wrong_pairs(got: object) -> Verdict | None:
    form = "update must return a list with one pair, [(k, v)]"
    if isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], Tensor):
        return Verdict(False, f"{form}; got the pair without the list around it")
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
        if a.shape[1:] != b.shape[1:]:
            return Verdict(
                False,
                f"update: layer {layer} gives {name} of shape {list(a.shape)}, expected "
                f"{list(b.shape)}; the tokens are the first axis",
            )
        if a.shape[0] != b.shape[0]:
            return Verdict(
                False,
                f"update: layer {layer} has {name} of {a.shape[0]} tokens, expected {b.shape[0]}; "
                "does each layer keep its own?",
            )
        if got[0].shape == want[1].shape and close(got[0], want[1], 0):
            return Verdict(False, "update: k and v are swapped; the pair is (k, v)")
        if name == "v" and close(a, got[0], 0):
            return Verdict(False, "update: v is a copy of k")
        return Verdict(False, f"update: layer {layer} mixes up {name}; first the old, then the new")
    return None


# -- MyStaticCache --------------------------------------------------------------------------------

ROOM = 12  # slots of the cache that is checked


def check_static_cache(make_cache: Callable[..., Any]) -> Verdict:
    """Check a learner's class (config, max_len) with update(layer, k, v, batch) → [(all k, all v)].

    One sequence; what `update` gives are views of memory that was allocated once.
    """
    update = getattr(make_cache, "update", None)
    config = replace(
        tiny_model().config,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )

    def run() -> Verdict:
        try:
            theirs = make_cache(config, ROOM)
        except TypeError as error:
            return Verdict(
                False, f"MyStaticCache(config, max_len) raised TypeError: {error}; it takes both"
            )
        try:
            return _wrong_update(theirs, update) or Verdict(
                True, "update: 8 tokens in 4 steps, 2 layers, and no old key or value was copied"
            )
        except AttributeError as error:
            return Verdict(
                False,
                f"update raised AttributeError: {error}; make the memory in __init__, as self.k "
                "and self.v",
            )

    hint = "A buffer of a layer is [max_len, K/V heads, head_dim]; k and v are [T, heads, head_dim]"
    return guarded("update", run, update, f"{hint}.")


def _wrong_update(theirs: Any, update: Any) -> Verdict | None:
    """Four steps of one sequence in two layers, each beside the right cache."""
    draw, right, first = torch.Generator().manual_seed(1), RightCache(), 0
    seen: dict[int, Sequence[Tensor]] = {}
    for new in (4, 1, 2, 1):
        batch = Batch.from_sequences([[0] * new], [first])
        for layer in (0, 1):
            k, v = (torch.randn(new, 2, 8, generator=draw) for _ in "kv")
            got = theirs.update(layer, k.clone(), v.clone(), batch)
            bad = not_done("update", got, update) or _wrong_pairs(got)
            if bad is not None:
                return bad
            want = right.update(layer, k, v, batch)[0]
            bad = _wrong_writing(got[0], want, (k, v), right.kv.get(1 - layer), layer)
            bad = bad or _wrong_history(got[0], want, (k, v), layer)
            bad = bad or _moved(got[0], seen.get(layer))
            if bad is not None:
                return bad
            seen[layer] = got[0]
        first += new
    return None


def _wrong_writing(
    got: Sequence[Tensor],
    want: Sequence[Tensor],
    new: Sequence[Tensor],
    others: Sequence[Tensor] | None,
    layer: int,
) -> Verdict | None:
    """What goes wrong with places alone; `others` is what the other layer holds so far."""
    for which, (name, a, b) in enumerate(zip("kv", got, want, strict=True)):
        total, n = len(b), len(new[which])
        if a.shape[1:] != b.shape[1:] or (a.shape == b.shape and close(a, b, 0)):
            continue
        said = None
        if len(a) == ROOM:
            said = f"{name} of all {ROOM} slots; those behind the text hold nothing: return [:end]"
        elif len(a) == total + n and layer == 1 and total == n:
            said = (
                f"{name} of {len(a)} tokens, expected {total}; all layers write to the same "
                "positions, so a count must not advance in each of them: ask batch.positions"
            )
        elif len(a) == total - 1 and close(a, b[:-1], 0):
            said = f"{name} of {len(a)} tokens, one too few: the end is the last position + 1"
        elif a.shape == b.shape and n < total and close(a[:n], b[-n:], 0):
            said = f"{name} with the new tokens in slot 0 again: write them at batch.positions"
        elif a.shape == b.shape and n > 1 and close(a[: n - 1], b[1:n], 0):
            said = f"{name} one slot too early: position p belongs into slot p"
        elif a.shape == b.shape and n > 1 and close(a[1:n], b[: n - 1], 0):
            said = f"{name} one slot too late: position p belongs into slot p"
        elif a.shape == b.shape and others is not None and n < total:
            end = min(total - n, len(others[which]))
            if close(a[:end], others[which][:end], 0):
                said = f"{name} of another layer: each layer needs a buffer of its own"
            elif close(a[: total - n], torch.zeros_like(a[: total - n]), 0):
                said = f"old {name} that are all 0: make the memory in __init__, once for all calls"
        if said is not None:
            return Verdict(False, f"update: layer {layer} gives {said}")
    return None


def _moved(got: Sequence[Tensor], before: Sequence[Tensor] | None) -> Verdict | None:
    for name, a, old in zip("kv", got, before or (), strict=False):
        if not same_memory(a, old):
            return Verdict(
                False,
                f"update: the right {name}, but in new memory, so the old ones were copied; write "
                "into the memory that __init__ made, and return a view of it: [:end]",
            )
    return None


# -- run_new --------------------------------------------------------------------------------------


class _Watched(SdpaAttention):
    """Attention over a cache that notes which tokens run, and at which positions."""

    def __init__(self) -> None:
        super().__init__(WriteAndRead(RightCache()))
        self.ids: list[int] = []
        self.positions: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """As AttentionBackend.attend."""
        if layer == 0:
            self.ids += batch.input_ids.tolist()
            self.positions += batch.positions.tolist()
        return super().attend(layer, q, k, v, batch)


_NOT_NESTED = ("sequences but", "object is not iterable", "has no len()", "token ids are whole")


def check_run_new(function: Callable[..., Tensor]) -> Verdict:
    """Check a learner's function(model, attention, token_ids, num_computed) → logits [V].

    It runs the tokens from num_computed on, at their positions; the logits are the last token's.
    """

    @torch.no_grad()
    def run() -> Verdict:
        model, ids, attention = tiny_model(), list(TEXT_IDS), _Watched()
        everything = model.compute_logits(model(Batch.from_sequences([ids])))  # [T, V]
        for first, last in ((0, 5), (5, 6), (6, 9), (9, 10)):
            attention.ids, attention.positions = [], []
            try:
                got = function(model, attention, ids[:last], first)
            except (TypeError, ValueError) as error:
                if not any(words in str(error) for words in _NOT_NESTED):
                    raise
                return Verdict(
                    False,
                    f"run_new raised {type(error).__name__}: {error}; Batch.from_sequences takes "
                    "a list of sequences and a list of positions: put the one list of ids into "
                    "a list, and the one position, too",
                )
            bad = not_done("run_new", got, function)
            if bad is not None:
                return bad
            why = _wrong_run(attention, ids[:last], first)
            why = why or _wrong_logits(got, everything[first:last])
            if why is not None:
                return Verdict(False, f"run_new, tokens {first} to {last - 1} are new: {why}")
        return Verdict(True, "run_new: a prefill of 5 tokens, a decode, a chunk of 3, a decode")

    return guarded("run_new", run, function)


def _wrong_run(seen: _Watched, ids: list[int], first: int) -> str | None:
    new, where = ids[first:], list(range(first, len(ids)))
    if not seen.ids:
        return "the attention, with its cache, was not handed over: model(batch, attention)"
    if seen.ids == new and seen.positions == where:
        return None
    if seen.ids == new:
        stand = f"positions are {seen.positions}, expected {where}"
        if seen.positions[0] == 0:
            return f"{stand}; they must go on where the computed ones end, not start at 0 again"
        if seen.positions == [p + 1 for p in where]:
            return f"{stand}; one too late: the first new token stands at num_computed"
        return stand
    if seen.ids == ids:
        return f"it runs all {len(ids)} tokens again; the first {first} are in the cache"
    if seen.ids == ids[-1:]:
        return f"it runs the last token alone; {len(new)} tokens are not computed yet"
    return (
        f"it runs {len(seen.ids)} tokens, expected {len(new)}: all from token_ids[num_computed] on"
    )


def _wrong_logits(got: object, rows: Tensor) -> str | None:
    """What is wrong with the logits when `rows` [new, V] are those of all new tokens."""
    model, want = tiny_model(), rows[-1]
    size, hidden = len(want), model.config.hidden_size
    if not isinstance(got, Tensor):
        return f"it must return a tensor of {size} logits, got {type(got).__name__}"
    if got.numel() == 1:
        return f"it returns one number; return the logits of all {size} entries of the vocabulary"
    if got.shape[-1] == hidden:
        return f"it returns hidden states of {hidden} numbers; model.compute_logits makes logits"
    if got.shape == (1, size):
        return f"it returns [1, {size}]; take row 0, so that it is [{size}]"
    if got.shape == rows.shape:
        return f"it returns the logits of all {len(rows)} new tokens; only the last one's are asked"
    if got.shape != want.shape:
        return f"it returned shape {list(got.shape)}, expected [{size}]"
    if close(got, want, 1e-3):
        return None
    if close(got, rows[0], 1e-3):
        return "these are the logits of the first new token; the last one's choose the next"
    if close(got, want.softmax(-1), 1e-3) or close(got, want.log_softmax(-1), 1e-3):
        return "these are probabilities; return the logits themselves"
    return "other logits; does the model see the whole batch and the given attention?"


# -- slots ----------------------------------------------------------------------------------------


def check_slots(function: Callable[[list[int], list[int], int], Iterable[int]]) -> Verdict:
    """Check a learner's function(cached, new, max_len) → the slots to write, rows 0, 1, ..."""

    def run() -> Verdict:
        for cached, new, max_len in (
            ([0], [4], 8),
            ([4], [1], 8),
            ([0, 0], [2, 2], 8),
            ([5, 0, 2], [1, 3, 2], 16),
        ):
            answer = function([*cached], [*new], max_len)
            bad = not_done("slots_to_write", answer, function)
            if bad is not None:
                return bad
            got = [_number(x) for x in answer]
            if got != _slots(cached, new, max_len):
                where = f"slots_to_write: cached={cached}, new={new}, max_len={max_len}"
                return Verdict(False, f"{where}: {_wrong_slots(got, cached, new, max_len)}")
        return Verdict(True, "slots_to_write: prefill, decode, two prefills and a mixed batch")

    return guarded("slots_to_write", run, function)


def _slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [row * max_len + old + i for row, (old, n) in pairs for i in range(n)]


def _wrong_slots(got: list[Any], cached: list[int], new: list[int], max_len: int) -> str:
    """The usual mistakes, the first that gives these slots; of several rows where it says so."""
    want, none, several = _slots(cached, new, max_len), [0] * len(cached), len(cached) > 1
    if any(isinstance(x, list | tuple | range | Tensor) for x in got):
        return f"got {got}; one flat list is asked, no list for each row"
    lens = [old + n for old, n in zip(cached, new, strict=True)]
    ends = zip(accumulate(lens), new, strict=True)
    packed = [x for end, n in ends for x in range(end - n, end)]
    begins = [r * max_len for r, n in enumerate(new) for _ in range(n)]
    for is_so, words in (
        (got == _slots(none, new, max_len), f"the cached tokens are overwritten: {got}"),
        (
            got == _slots(none, lens, max_len),
            f"got {got}; only the new tokens are written, not the cached",
        ),
        (
            several and got == packed,
            f"got {got}; the rows are packed one after the other, but row r begins at r * max_len, "
            "however few slots are used before it",
        ),
        (
            len(want) > 1 and got == begins,
            f"got {got}; these are where rows begin; each token needs its own",
        ),
        (got == [x + 1 for x in want], "one too far; the first free slot is number cached"),
        (got == [x - 1 for x in want], "one too early; slots are counted from 0"),
        (got == _slots(cached, new, 8), f"got {got}; rows have max_len slots, not always 8"),
        (len(got) == len(new) < len(want), "one slot for each row; each new token needs one"),
        (
            several and [x % max_len for x in got] == [x % max_len for x in want],
            f"got {got}; row r begins at slot r * max_len",
        ),
        (several and sorted(got) != got, f"got {got}; each row has max_len = {max_len} slots"),
    ):
        if is_so:
            return words
    return f"expected {want}, got {got}"


def _number(x: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as it is."""
    return x.item() if hasattr(x, "item") and getattr(x, "ndim", 0) == 0 else x


# -- keep_top_p -----------------------------------------------------------------------------------


def check_top_p(function: Callable[[Tensor, float], Tensor]) -> Verdict:
    """Check a learner's function(probabilities [V], p) → bool [V], True = kept."""

    def run() -> Verdict:
        draw = torch.Generator().manual_seed(2)
        spread = torch.rand(12, generator=draw).pow(3)
        sorted_ones = torch.tensor([0.5, 0.3, 0.125, 0.05, 0.025])
        halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])  # exact: two reach 0.75
        for probs, p in (
            (sorted_ones, 0.1),
            (halves, 0.75),
            (sorted_ones, 0.7),
            (sorted_ones.flip(0), 0.9),
            (spread, 0.6),
        ):
            probs = probs / probs.sum()
            got, want = function(probs.clone(), p), top_p(probs.log(), p).isfinite()
            bad = not_done("keep_top_p", got, function)
            if bad is not None:
                return bad
            why = _not_bool(got, probs) or _wrong_nucleus(got, want, probs, p)
            if why is not None:
                shown = [round(float(x), 3) for x in probs]
                return Verdict(False, f"keep_top_p: p={p} of {shown}: {why}")
        return Verdict(True, "keep_top_p: five distributions, sorted and not")

    return guarded("keep_top_p", run, function)


def _not_bool(got: object, probs: Tensor) -> str | None:
    form = f"it must return a bool tensor [{len(probs)}], True = kept"
    if not isinstance(got, Tensor):
        return f"{form}; got {type(got).__name__}"
    if got.dtype == torch.bool and got.shape == probs.shape:
        return None
    if got.is_floating_point() and got.shape == probs.shape:
        return f"{form}; got numbers: which are kept, and not what is left of them"
    if got.dtype == torch.bool:
        return f"{form}; got shape {list(got.shape)}"
    return f"{form}; got whole numbers: make keep = zeros of bool, then keep[these] = True"


def _wrong_nucleus(got: Tensor, want: Tensor, probs: Tensor, p: float) -> str | None:
    if torch.equal(got, want):
        return None
    kept, expected = int(got.sum()), int(want.sum())
    values, order = probs.sort()
    if torch.equal(got[order], values.cumsum(-1) - values < p):
        return "the sum begins at the unlikeliest token; sort with descending=True"
    if torch.equal(got, ~want):
        return "it is inverted; True = kept"
    if any(torch.equal(got, alone) for alone in (probs > p, probs < p)):
        return "each probability is compared with p alone; add them up from the likeliest down"
    if kept == 0:
        return "it keeps 0 tokens; the token that crosses p stays, and so the likeliest always does"
    if kept == expected:
        return "the right number, but of other tokens; put the answer back into the first order"
    if kept == expected - 1:
        return f"it keeps {kept} tokens, one too few: the token that crosses p stays"
    if kept == expected + 1 and p == 0.75:
        return f"it keeps {kept} tokens, one too many; when the sum before it is p, a token goes"
    return f"it keeps {kept} tokens, expected {expected}"


# -- why_finished ---------------------------------------------------------------------------------

EOS_IDS = (0, 3)  # a model may have several end-of-text tokens


class Ending:
    """A state of one request, and what may be wrong with an answer to it."""

    def __init__(
        self,
        what: str,
        hint: str,
        ids: Sequence[int],
        text: str = "Anna had a coat",
        stop: Sequence[str] = (),
        limit: int = 8,
    ) -> None:
        self.what, self.hint = what, hint
        self.args = (list(ids), text, EOS_IDS, tuple(stop), limit)
        self.want = right_reason(*self.args)


ENDINGS = (
    Ending("2 of 8 tokens, nothing special", "it goes on: return None", [5, 6]),
    Ending("the newest token is an end-of-text token", "look at new_ids[-1] as well", [5, 6, 0]),
    Ending("it is the second of the end-of-text ids", "eos_ids may hold several", [5, 6, 3]),
    Ending("the first token is an end-of-text token", "the first one is checked too", [0]),
    Ending(
        "an end-of-text token stands before the newest",
        "the newest token decides: look at new_ids[-1] alone",
        [0, 5, 6],
    ),
    Ending("7 of 8 tokens", "one token is still allowed", [5] * 7),
    Ending("8 of 8 tokens", "len(new_ids) has reached max_tokens: the last one counts", [5] * 8),
    Ending("1 of 1 token", "the limit may be reached at the first token", [5], limit=1),
    Ending("the text ends with the stop string", "look for it in text", [5, 6], stop=["coat"]),
    Ending(
        "the stop string is the end of a line",
        "search the text as it is: strip() takes such characters away",
        [5, 6],
        "Anna had a coat\n",
        ["\n"],
    ),
    Ending(
        "the last token goes on after the stop string",
        "a token may end behind it: search the whole text, not its end",
        [5, 6],
        "Anna had a coat. One",
        ["coat."],
    ),
    Ending(
        "the text begins with the stop string",
        "text.find gives 0 there, and that is found, too: ask `one in text`",
        [5, 6],
        stop=["Anna"],
    ),
    Ending(
        "the second of two stop strings is in the text",
        "look for each of them",
        [5, 6],
        stop=["kite", "coat"],
    ),
    Ending(
        "a stop string that is not in the text",
        "not every text is stopped: return None",
        [5, 6],
        stop=["kite"],
    ),
    Ending("the last token allowed is end-of-text", "stop wins over length", [*[5] * 7, 0]),
    Ending(
        "the last token allowed completes the stop string",
        "stop wins over length, for stop strings as well",
        [5] * 8,
        stop=["coat"],
    ),
)


def check_why_finished(function: Callable[..., str | None]) -> Verdict:
    """Check a learner's function(new_ids, text, eos_ids, stop, max_tokens) → why it ended.

    "stop", "length", or None as long as it goes on.
    """

    def run() -> Verdict:
        try:
            told = [_number(function(*_copied(ending.args))) for ending in ENDINGS]
        except TypeError as error:
            if "requires string as left operand" not in str(error):
                raise
            said = "stop is a tuple of strings: look in text for each of them, not for the tuple"
            return Verdict(False, f"why_finished raised TypeError: {error}; {said}")
        if all(answer is None or answer is ... for answer in told):
            return not_done("why_finished", None, function) or Verdict(None, "not done yet")
        for ending, got in zip(ENDINGS, told, strict=True):
            if got is not None and got not in ("stop", "length"):
                return Verdict(
                    False,
                    f'why_finished: {ending.what}: got {got!r}; answer "stop", "length" or None',
                )
            if got != ending.want:
                return Verdict(
                    False,
                    f"why_finished: {ending.what}: expected {ending.want!r}, got {got!r}; "
                    f"{ending.hint}",
                )
        return Verdict(True, f"why_finished: {len(ENDINGS)} endings, the first and the last token")

    return guarded("why_finished", run, function)


def _copied(args: tuple[Any, ...]) -> Iterator[Any]:
    return (list(one) if isinstance(one, list) else one for one in args)


# -- the least time -------------------------------------------------------------------------------


def least_seconds(
    num_weights: int, num_tokens: int, kv_bytes: int, peak: float, bandwidth: float
) -> float:
    """Seconds that a forward in fp32 takes at the least; the FLOPs of attention are left out."""
    return max(2 * num_weights * num_tokens / peak, (4 * num_weights + kv_bytes) / bandwidth)


def check_floor(function: Callable[[int, int, int, float, float], float]) -> Verdict:
    """Check a learner's function(num_weights, num_tokens, kv_bytes, peak, bandwidth) → seconds."""

    def run() -> Verdict:
        peak, bandwidth = 3e11, 5e10
        for weights, tokens, kv in ((7 * 10**8, 1, 10**9), (10**9, 256, 10**9), (10**8, 2, 10**10)):
            got = function(weights, tokens, kv, peak, bandwidth)
            bad = not_done("least_seconds", got, function)
            if bad is not None:
                return bad
            if isinstance(got, list | tuple | str):
                return Verdict(
                    False, f"least_seconds: got {got!r}; return one number, the time that decides"
                )
            flops, moved = 2 * weights * tokens, 4 * weights + kv
            compute, memory = flops / peak, moved / bandwidth
            least = max(compute, memory)
            if abs(got - least) <= 1e-6 * least:
                continue
            known = {
                compute + memory: "in the best case both overlap completely: not the sum",
                min(compute, memory): "the slower of the two decides: max, not min",
                max(compute / 2, memory): "each weight costs two FLOPs a token: once multiplied, "
                "once added",
                max(compute, 4 * weights / bandwidth): "the K and V in the cache are read, too",
                max(compute, (weights + kv) / bandwidth): "a weight in fp32 has 4 bytes",
                max(2 * weights / peak, memory): "each of the tokens needs its own FLOPs",
                max(compute, (4 * weights * tokens + kv) / bandwidth): "all tokens of a forward "
                "share the weights: they are read once",
                max(flops / bandwidth, moved / peak): "peak and bandwidth are swapped: FLOPs / "
                "peak and bytes / bandwidth",
                max(flops // peak, moved // bandwidth): "// gives whole seconds only: use /",
                1e3 * least: "these are milliseconds; seconds are asked",
                1e6 * least: "these are microseconds; seconds are asked",
                max(peak / flops, bandwidth / moved): "upside down: amount / rate",
            }
            near = [why for value, why in known.items() if abs(got - value) <= 1e-6 * value]
            why = near[0] if near else f"expected {least:g} s: the slower of the two decides"
            case = f"{weights:g} weights, tokens: {tokens}, K/V bytes: {kv:g}"
            return Verdict(False, f"least_seconds: {case}: got {got:g}; {why}")
        return Verdict(True, "least_seconds: once memory decides, once arithmetic, once the cache")

    return guarded("least_seconds", run, function)
