"""The check of the exercise on the prefix cache: what is found there."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.learn.judge import Slips, judge, slips_of
from tutorial_engine.learn.own_memory import HashOf
from tutorial_engine.learn.own_memory import find as right_find
from tutorial_engine.learn.parts import listed, shown, whole
from tutorial_engine.learn.verdict import CannotBe, Verdict

Tokens = tuple[int, ...]
Case = tuple[Tokens, int, dict[Tokens, int]]  # prompt, block_size, beginning in the cache → block
Find = Callable[..., object]
MANY = 100  # tokens: more than a beginning in a case has

# a, b, c and d are full blocks. Of the beginning a b d c the third block is not there any more.
a, b, c, d = (11, 12, 13, 14), (21, 22, 23, 24), (31, 32, 33, 34), (41, 42, 43, 44)
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
PAIRS: dict[Tokens, int] = {(1, 2): 0, (1, 2, 3, 4): 7}
CASES: tuple[Case, ...] = (
    *((prompt, 4, KNOWN) for prompt in PROMPTS),
    ((1, 2, 3, 4, 5), 2, PAIRS),
    ((1, 2, 3, 4), 2, PAIRS),
)


FIND_SLIPS: Slips = slips_of(
    right_find,
    """
    token_ids[end - block_size : end] → token_ids[end : end + block_size]
        `end` is where a block ends: its tokens are those before `end`
    hash_of(last, token_ids → hash_of(None, token_ids
        a hash stands for all that is before the block, too: give hash_of the hash of the block
        before it, and None only for the first block
    len(token_ids), → len(token_ids) - 1,
        one token that is left to run is enough: a block may end just before the last token
    return found → return found[:-1]
        the last block that is found counts, too
    len(token_ids), → len(token_ids) + 1,
    return found → return found if len(token_ids) % block_size else found[:-1]
        there was a miss, so a token is left to run anyway: leave out the last block only if all
        tokens are found
    return found → return found[:1]
        there are more blocks than the first: is `return` inside the loop?
    break → continue
        stop at the first miss: a later block is of no use without the ones before it
    last = hash_of(last → parent = last; last = hash_of(last
    break → last = parent; continue
        after a miss nothing more is looked for: the next block would be found at a place where it
        does not belong
    break → return []
        at a miss it returns []: return what was found so far
    return found → return []
        nothing is ever found: look for what `hash_of` gives among the keys of `cached`
    append(cached[last]) → append(last)
        these are hashes: return the blocks that `cached` has for them
    return found → return list(range(len(found)))
        these are logical blocks: return the physical blocks that `cached` has
    return found → return found[::-1]
        the block of the first tokens comes first
    if last not in cached → if not cached.get(last)
        block 0 is a block like all others: a miss is a hash that is not in `cached`
    return found → return len(found)
        return the list of blocks, not how many there are
    return found → return block_size * len(found)
        return the list of blocks, not the number of tokens in them
    token_ids[end - block_size : end] → token_ids[:block_size]
        each turn hashes the same tokens: go on to the next block
    """,
)


def _hashes_for(size: int, num_tokens: int = MANY) -> HashOf:
    """BlockManager.hash_of. CannotBe for a parent that is no hash, and for more than one block.

    Also for far more calls than a prompt of `num_tokens` has blocks: a loop that does not go on.
    """
    hash_of, calls = BlockManager(1, size).hash_of, count(1)

    def watched(parent: Any, tokens: Any = None) -> bytes:
        if next(calls) > 4 * num_tokens + 4:
            raise CannotBe(
                "hash_of is called again and again, and the loop does not end: go on to the next "
                "block"
            )
        is_hash = parent is None or isinstance(parent, bytes)
        if not is_hash and (tokens is None or isinstance(tokens, bytes)):
            raise CannotBe(
                "hash_of(parent, tokens) is given the tokens first: the hash of the block before "
                "comes first"
            )
        if not is_hash:
            raise CannotBe(
                f"hash_of got {parent!r} as the parent; that is the hash of the block before "
                "(what hash_of gave for it), or None for the first block"
            )
        try:
            token_ids = list(tokens)
        except TypeError:
            message = "in hash_of(parent, tokens), `tokens` is the list of the tokens of one block"
            raise CannotBe(f"hash_of got {tokens!r} as the tokens; {message}") from None
        if len(token_ids) > size:
            raise CannotBe(
                f"hash_of got {len(token_ids)} tokens in blocks of {size}; give it the tokens of "
                "one block alone, because the hash before it stands for all earlier tokens"
            )
        if parent is None and len(token_ids) < size < num_tokens:
            raise CannotBe(
                f"hash_of got {len(token_ids)} of the first tokens in blocks of {size}: a hash "
                "belongs to a full block, so give it all tokens of the block"
            )
        return hash_of(parent, token_ids)

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
    cached = _cached(known, size)
    try:
        answer = find(list(tokens), size, _hashes_for(size, len(tokens)), cached)
    except KeyError as error:
        if error.args[0] in cached or not isinstance(error.args[0], bytes):
            raise
        message = "KeyError: there is no such hash in `cached`, which is the first miss"
        raise CannotBe(message) from error
    if answer is None and _has_miss(tokens, size, known):
        raise CannotBe("it returns None at a miss: return what was found so far")
    if answer is not None and cached != _cached(known, size):
        raise CannotBe("`cached` has changed; find only looks")
    found = listed(answer)
    return answer if found is None else [x if (n := whole(x)) is None else n for x in found]


def check_find(function: Find) -> Verdict:
    """Check find(token_ids, block_size, hash_of, cached) → blocks: by hand, then at random."""
    cases = [*CASES, *_random_cases(40)]
    return judge(
        *("find", function, right_find, cases, FIND_SLIPS),
        f"find: {len(cases)} prompts, each up to its first miss",
        call=_found,
        where=lambda got, tokens, size, known: (
            f"{list(tokens)} in blocks of {size}: got {_told(got)}"
        ),
        otherwise=_why,
        explain={KeyError: "the keys of `cached` come from `hash_of`"},
    )


def _why(got: object, want: list[int], tokens: Tokens, size: int, known: Any) -> str:
    """What is wrong with an answer that is none of a known slip."""
    if not isinstance(got, list):
        return "find must return a list of blocks"
    if got[:-1] == want and size * len(got) == len(tokens):
        return (
            "all of its tokens are found, and then no token is left to run: without one there are "
            "no logits"
        )
    if got == want[:-1]:
        return f"expected {want}: the last block counts, too, if a token is left behind it"
    return f"expected {want}"


def _told(answer: object) -> str:
    """An answer to be read: the first characters of a hash are enough."""
    if not isinstance(answer, list):
        return shown(answer)
    short = (block.hex()[:6] if isinstance(block, bytes) else repr(block) for block in answer)
    return f"[{', '.join(short)}]"
