"""Introduced in notebook 04. The check of the exercise on the prefix cache: what is found there."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.own_memory import NameOf
from tutorial_engine.learn.own_memory import find as right_find
from tutorial_engine.learn.parts import CannotBe, listed, whole
from tutorial_engine.learn.verdict import Verdict, guarded, not_done

Tokens = tuple[int, ...]
Case = tuple[Tokens, int, dict[Tokens, int]]  # prompt, block_size, beginning in the cache → block
Find = Callable[..., object]

# a, b, c and d are full blocks. Of the beginning a b d c the third block is not there any more.
a, b, c, d = (11, 12, 13, 14), (21, 22, 23, 24), (31, 32, 33, 34), (41, 42, 43, 44)
KNOWN: dict[Tokens, int] = {a: 5, a + b: 0, a + b + c: 3, b: 2, a + b + d + c: 6}
PROMPTS = (
    (*a, *b, *c, 9),
    a + b + c,
    (*a, *b, 9, 9),
    (*a, *a, 9),
    (*b, *a, 9),
    (*a, *b, *d, *c, 9),
    (*c, 9),
    a,
    (9,),
    (),
)
PAIRS: dict[Tokens, int] = {(1, 2): 0, (1, 2, 3, 4): 7}
CASES: tuple[Case, ...] = (
    *((prompt, 4, KNOWN) for prompt in PROMPTS),
    ((1, 2, 3, 4, 5), 2, PAIRS),
    ((1, 2, 3, 4), 2, PAIRS),
)


def _until_a_miss(names: Iterable[Any], cached: dict[Any, int]) -> list[int]:
    found: list[int] = []
    for name in names:
        if name not in cached:
            break
        found.append(cached[name])
    return found


def _chain(tokens: Sequence[int], size: int, name_of: NameOf, end: int) -> list[Any]:
    """The names of the blocks that end before `end`."""
    names: list[Any] = [None]
    for stop in range(size, end, size):
        names.append(name_of(names[-1], tokens[stop - size : stop]))
    return names[1:]


def _past_misses(
    tokens: Sequence[int], size: int, name_of: NameOf, cached: dict[Any, int]
) -> list[int]:
    """After a miss the next block is looked for as the child of the last one that was found."""
    found, parent = [], None
    for end in range(size, len(tokens), size):
        name = name_of(parent, tokens[end - size : end])
        if name in cached:
            found.append(cached[name])
            parent = name
    return found


# what to say → the function that makes this mistake
MISTAKES: dict[str, Find] = {
    "a name stands for all that is before the block, too: give name_of the name of the block "
    "before it, and None only for the first block": lambda t, s, n, c: _until_a_miss(
        (n(None, t[e - s : e]) for e in range(s, len(t), s)), c
    ),
    "all of its tokens are found, and then no token is left to run: without one there are no "
    "logits": lambda t, s, n, c: _until_a_miss(_chain(t, s, n, len(t) + 1), c),
    "one token that is left to run is enough: a block may end just before the last token": (
        lambda t, s, n, c: _until_a_miss(_chain(t, s, n, len(t) - 1), c)
    ),
    "the last block that is found counts, too": lambda t, s, n, c: right_find(t, s, n, c)[:-1],
    "there are more blocks than the first": lambda t, s, n, c: right_find(t, s, n, c)[:1],
    "stop at the first miss: a later block is of no use without the ones before it": (
        lambda t, s, n, c: [c[name] for name in _chain(t, s, n, len(t)) if name in c]
    ),
    "after a miss nothing more is looked for: the next block would be found at a place where "
    "it does not belong": _past_misses,
    "these are names: return the blocks that `cached` has for them": (
        lambda t, s, n, c: _chain(t, s, n, len(t))[: len(right_find(t, s, n, c))]
    ),
    "these are logical blocks: return the physical blocks that `cached` has": (
        lambda t, s, n, c: list(range(len(right_find(t, s, n, c))))
    ),
    "the block of the first tokens comes first": lambda t, s, n, c: right_find(t, s, n, c)[::-1],
    "block 0 is a block like all others: a miss is a name that is not in `cached`": (
        lambda t, s, n, c: _until_a_miss(
            _chain(t, s, n, len(t)), {name: block for name, block in c.items() if block}
        )
    ),
    "return the list of blocks, not how many there are": lambda t, s, n, c: len(
        right_find(t, s, n, c)
    ),
    "return the list of blocks, not the number of tokens in them": lambda t, s, n, c: (
        s * len(right_find(t, s, n, c))
    ),
}


def _names_for(size: int) -> NameOf:
    """BlockManager.hash_of. CannotBe for a parent that is no name, and for more than one block."""
    name_of = BlockManager(1, size).hash_of

    def watched(parent: object, tokens: Iterable[int]) -> bytes:
        own = list(tokens)
        if parent is not None and not isinstance(parent, bytes):
            raise CannotBe(
                f"name_of got {parent!r} as the parent; that is the name of the block before "
                "(what name_of gave for it), or None for the first block"
            )
        if len(own) > size:
            raise CannotBe(
                f"name_of got {len(own)} tokens in blocks of {size}; give it the tokens of one "
                "block alone, because the name before it stands for all earlier tokens"
            )
        return name_of(parent, own)

    return watched


def _cached(known: dict[Tokens, int], size: int) -> dict[bytes, int]:
    """Name of the last block of each beginning → its block."""
    name_of = _names_for(size)
    return {_chain(tokens, size, name_of, len(tokens) + 1)[-1]: n for tokens, n in known.items()}


def _random_cases(count: int) -> list[Case]:
    """Prompts of two tokens only, so that much is found; some blocks are gone again."""
    draw, cases = random.Random(0), []
    for _ in range(count):
        size, known = draw.randint(1, 3), dict[Tokens, int]()
        for _ in range(6):
            tokens = tuple(draw.choices((0, 1), k=draw.randint(0, 9)))
            ends = range(size, len(tokens) + 1, size)
            known |= {tokens[:end]: len(known) + i for i, end in enumerate(ends)}
        gone = draw.sample(sorted(known), len(known) // 6)
        left = {tokens: block for tokens, block in known.items() if tokens not in gone}
        cases.append((tuple(draw.choices((0, 1), k=draw.randint(0, 12))), size, left))
    return cases


def check_find(function: Find) -> Verdict:
    """Check find(token_ids, block_size, name_of, cached) → blocks: by hand, then at random."""
    cases = [*CASES, *_random_cases(40)]

    def run() -> Verdict:
        answers: list[Any] = []
        for tokens, size, known in cases:
            cached = _cached(known, size)
            try:
                answer = function(list(tokens), size, _names_for(size), cached)
            except CannotBe as error:
                return Verdict(False, f"find: {error}")
            except KeyError as error:
                if error.args[0] in cached or not isinstance(error.args[0], bytes):
                    raise
                told = "find: KeyError: there is no such name in `cached`, which is the first miss"
                return Verdict(False, told)
            bad = not_done("find", answer, function)
            if bad is not None:
                return bad
            if cached != _cached(known, size):
                return Verdict(False, "find: `cached` has changed; find only looks")
            found = listed(answer)
            answers.append(answer if found is None else [_plain(one) for one in found])
        pairs = list(zip(cases, answers, strict=True))
        for (tokens, size, known), got in pairs:
            want = _by(right_find, tokens, size, known)
            if got == want:
                continue
            same = (w for w, f in MISTAKES.items() if all(_by(f, *one) == it for one, it in pairs))
            why = next(same, f"expected {want}")
            if why.startswith("expected") and not isinstance(got, list):
                why = "find must return a list of blocks"
            where = f"{list(tokens)} in blocks of {size}"
            return Verdict(False, f"find: {where}: got {_told(got)}; {why}")
        return Verdict(True, f"find: {len(cases)} prompts, each up to its first miss")

    return guarded("find", run, function)


def _plain(one: object) -> object:
    """A block as an int; a name as it is."""
    block = whole(one)
    return one if block is None else block


def _told(answer: object) -> str:
    """An answer to be read: the first characters of a name are enough."""
    if not isinstance(answer, list):
        return repr(answer)
    short = (one.hex()[:6] if isinstance(one, bytes) else repr(one) for one in answer)
    return f"[{', '.join(short)}]"


def _by(find: Find, tokens: Tokens, size: int, known: dict[Tokens, int]) -> object:
    return find(list(tokens), size, _names_for(size), _cached(known, size))
