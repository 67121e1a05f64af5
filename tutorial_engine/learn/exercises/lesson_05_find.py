"""The check of the exercise on the prefix cache: what is found there."""

import random
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.exercises.facts import AsIs, told
from tutorial_engine.learn.exercises.judge import Slips, judge, slips_of
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict
from tutorial_engine.learn.parts.holder import listed, whole
from tutorial_engine.learn.parts.memory import HashOf
from tutorial_engine.learn.parts.memory import find as right_find

Tokens = tuple[int, ...]
Case = tuple[Tokens, int, dict[Tokens, int]]  # prompt, block_size, beginning in the cache → block
Find = Callable[..., object]
MANY = 100  # tokens: more than a beginning in a case has

# a, b, c and d are full blocks. Of the beginning a b d c the third block is not there any more.
a, b, c, d = (1, 2), (3, 4), (5, 6), (7, 8)
KNOWN: dict[Tokens, int] = {a: 5, a + b: 0, a + b + c: 3, b: 2, a + b + d + c: 6}
PROMPTS = (
    (*a, *b, *c, 9),
    a + b + c,
    (*a, *b, 9, 9),
    a + b + d,
    (*a, *a, 9),
    (*b, *a, 9),
    (*a, *b, *d, *c, 9),
    (*c, 9),
    a,
    (9,),
)
CASES: tuple[Case, ...] = (
    ((1, 9), 1, {(1,): 3}),
    ((1,), 1, {(1,): 3}),  # all of it is cached, and a token must be left to run
    ((1, 9), 1, {(1,): 0}),  # block 0
    ((2, 9), 1, {(1,): 3}),  # nothing is found
    ((1, 2, 9), 1, {(1,): 5, (1, 2): 3}),
    ((2, 2, 9), 1, {(2,): 5}),  # the second block is no beginning
    ((1, 2, 3, 9), 1, {(1,): 5, (1, 2, 3): 4}),  # found again after a miss
    ((1, 2, 3), 2, {(1, 2): 5}),
    ((1, 2), 2, {(1, 2): 5}),
    *((prompt, 2, KNOWN) for prompt in PROMPTS),
    ((1, 2, 3, 4, 5, 6, 7), 3, {(1, 2, 3): 4, (1, 2, 3, 4, 5, 6): 0}),
    ((*range(8), 9), 4, {(0, 1, 2, 3): 4, (*range(8),): 0}),
)


FIND_SLIPS: Slips = slips_of(
    right_find,
    """
    hash_of(last, token_ids → hash_of(None, token_ids
        looks each block up as if it were the first of a prompt; `parent` is the hash of the block
        before it
    len(token_ids), → len(token_ids) - 1,
        leaves two tokens to run at least; one is enough, so a block may end just before the last
        token
    len(token_ids), → len(token_ids) - block_size,
        never looks up the last block that may be found; one token that is left to run is enough
    len(token_ids), → len(token_ids) - block_size + 1,
        leaves a whole block of tokens to run at least; one token is enough
    range(block_size, → range(2 * block_size,
        never looks up the first block; the search begins there, with None as its parent
    return found → return found[:-1]
        never gives the last block that is cached; it counts, too, if a token is left to run behind
        it
    len(token_ids), → len(token_ids) + 1,
    return found → return found if len(token_ids) % block_size else found[:-1]
        leaves out the last block found in any prompt of whole blocks; after a miss tokens are left
        to run anyway
    return found → return found[:1]
        never gives more than one block; the search ends at the first miss, and not before
    break → continue
        finds blocks behind a miss, too; they are of no use without the blocks before them
    last = hash_of(last → parent = last; last = hash_of(last
    break → last = parent; continue
        looks the block after a miss up as if it stood in the place of the missed one; the search
        ends at a miss
    break → return []
        gives nothing after a miss, not even the blocks before it; their tokens need not run again
    return found → return []
        never finds anything; a block is found if `cached` has its hash
    append(cached[last]) → append(last)
        gives hashes; the blocks that `cached` has for them are asked for
    return found → return list(range(len(found)))
        gives logical blocks; the physical ones that `cached` has are asked for
    return found → return found[::-1]
        gives the right blocks, the last one first; the block of the first tokens comes first
    if last not in cached → if not cached.get(last)
        takes block 0 for a miss; block 0 is a block like all others ▸ if key not in cached
    return found → return len(found)
        gives how many blocks there are; the blocks themselves are asked for
    return found → return block_size * len(found)
        gives how many tokens are cached; their blocks are asked for
    token_ids[end - block_size : end] → token_ids[:block_size]
        looks each block up by the tokens of the first block; each block has tokens of its own
    len(token_ids), → len(token_ids) + 1,
        leaves no token to run where all are cached; without one that runs there are no logits
    len(token_ids), → len(token_ids) - 1 + block_size,
        finds the last block of a prompt although no token is left to run; one must run, or there
        are no logits
    len(token_ids), → len(token_ids) + 1,
    return found → return found[:-1]
        always leaves out the last block found; it counts, too, if a token is left to run behind it
    """,
)


class _Hash(bytes):
    """A hash that says which beginning it stands for."""

    tokens: Tokens = ()

    def __repr__(self) -> str:
        return f"hash of {_spaced(self.tokens)}"


def _spaced(tokens: Tokens) -> str:
    return " ".join(map(str, tokens))


def _hashes_for(size: int, num_tokens: int = MANY) -> HashOf:
    """BlockManager.hash_of. CannotBe for a parent that is no hash, and for more than one block.

    Also for far more calls than a prompt of `num_tokens` has blocks: a loop that does not go on.
    """
    hash_of, calls = BlockManager(1, size).hash_of, count(1)

    def watched(parent: Any, tokens: Any = None) -> bytes:
        if next(calls) > 4 * num_tokens + 4:
            raise CannotBe("hash_of is called again and again, and the loop does not end")
        if parent is not None and not isinstance(parent, bytes):
            raise CannotBe(f"hash_of got {parent!r} as the parent, which is no hash and not None")
        try:
            token_ids = list(tokens)
        except TypeError:
            raise CannotBe(f"hash_of got {tokens!r} as the tokens, which is no list") from None
        if len(token_ids) > size:
            raise CannotBe(f"hash_of got {len(token_ids)} tokens in blocks of {size}")
        if parent is None and len(token_ids) < size < num_tokens:
            count_of = f"{len(token_ids)} token{'s' * (len(token_ids) != 1)}"
            raise CannotBe(f"hash_of got {count_of} for the first block, in blocks of {size}")
        key = _Hash(hash_of(parent, token_ids))
        key.tokens = (*getattr(parent, "tokens", ()), *map(int, token_ids))
        return key

    return watched


def _cached(known: dict[Tokens, int], size: int) -> dict[bytes, int]:
    """Hash of the last block of each beginning → its block."""
    hash_of, cached = _hashes_for(size), dict[bytes, int]()
    for tokens, block in known.items():
        last = hash_of(None, tokens[:size])
        for end in range(2 * size, len(tokens) + 1, size):
            last = hash_of(last, tokens[end - size : end])
        cached[last] = block
    return cached


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
        cases.append((tuple(draw.choices((0, 1), k=draw.randint(1, 12))), size, left))
    return cases


def _has_miss(tokens: Tokens, size: int, known: dict[Tokens, int]) -> bool:
    ends = range(size, len(tokens), size)
    return any(tokens[:end] not in known for end in ends)


def _found(find: Find, tokens: Tokens, size: int, known: dict[Tokens, int]) -> object:
    """What it gave. To what an instrument saw the input is added."""
    cached = _cached(known, size)
    try:
        answer = find(list(tokens), size, _hashes_for(size, len(tokens)), cached)
        if answer is None and _has_miss(tokens, size, known):
            raise CannotBe("it returns None at a miss")
        if answer is not None and cached != _cached(known, size):
            raise CannotBe("`cached` has changed")
    except CannotBe as error:
        raise CannotBe(f"{error}; the input was\n{told(_inputs(tokens, size, known))}") from None
    found = listed(answer)
    return answer if found is None else [x if (n := whole(x)) is None else n for x in found]


def _inputs(tokens: Tokens, size: int, known: dict[Tokens, int]) -> dict[str, object]:
    begins = (f"{_spaced(tokens)} → {block}" for tokens, block in known.items())
    in_cache = AsIs(", ".join(begins) or "nothing")
    return {"token_ids": list(tokens), "block_size": size, "in cache": in_cache}


def _left(got: list[int], tokens: Tokens, size: int, _: object) -> str | None:
    return "no token" if got and len(got) * size >= len(tokens) else None


def _asked(find: Find, tokens: Tokens, size: int, known: dict[Tokens, int]) -> str | None:
    """The beginnings that it looks up, if one is not among them that has to be."""
    mine, wanted = (
        _looked_up(find, tokens, size, known),
        _looked_up(right_find, tokens, size, known),
    )
    missed = [beginning for beginning in wanted if beginning not in mine]
    return f"{_all(mine) or 'nothing'}; not looked up: {_all(missed)}" if missed else None


def _looked_up(find: Find, tokens: Tokens, size: int, known: dict[Tokens, int]) -> list[Tokens]:
    """The beginnings whose hashes it makes."""
    hash_of, made = _hashes_for(size, len(tokens)), list[Tokens]()

    def noted(parent: Any, tokens: Any = None) -> bytes:
        key = hash_of(parent, tokens)
        made.append(getattr(key, "tokens", ()))
        return key

    find(list(tokens), size, noted, _cached(known, size))
    return made


def _all(beginnings: Iterable[Tokens]) -> str:
    return ", ".join(map(_spaced, beginnings))


def check_find(function: Find) -> Verdict:
    """Check find(token_ids, block_size, hash_of, cached) → blocks: by hand, then at random."""
    cases = [*CASES, *_random_cases(40)]
    return judge(
        *("find", function, right_find, cases, FIND_SLIPS),
        f"find: {len(cases)} prompts, each up to its first miss",
        call=_found,
        inputs=_inputs,
        also={"left to run": _left, "looked up": lambda _, *case: _asked(function, *case)},
    )
