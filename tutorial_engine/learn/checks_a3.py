"""The checks of the exercises beside vLLM: free blocks, what a burst finds, a line of its log."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from tutorial_engine.lab.vllm import recorded_run
from tutorial_engine.learn.judge import Slips, judge, read_numbers, slips_of
from tutorial_engine.learn.parts import listed, whole_numbers
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.trace.events import Added

FreeOrder = Callable[[Sequence[int], Sequence[Sequence[int]], set[int]], list[int]]
Hits = Callable[[Sequence[Sequence[int]], int], list[int]]


def _as_list(answer: object) -> object:
    """A list, of whatever gives its items one by one; what is none stays as it is."""
    items = [*answer] if isinstance(answer, deque | OrderedDict | Iterator) else answer
    return items if (found := listed(items)) is None else found


def right_free_order(
    queue: Sequence[int], tables: Sequence[Sequence[int]], with_hash: set[int]
) -> list[int]:
    """The free blocks as they are taken, when these tables are given back one after the other."""
    front: list[int] = []
    end: list[int] = []
    for i, table in enumerate(tables):
        later = {block for other in tables[i + 1 :] for block in other}
        gone = [block for block in reversed(table) if block not in later]
        without = [block for block in gone if block not in with_hash]
        found = [block for block in gone if block in with_hash]
        front = without + front
        end = end + found
    return [*front, *queue, *end]


FREE_ORDER_SLIPS: Slips = slips_of(
    right_free_order,
    """
    [*front, *queue, *end] → [*queue, *front, *end]
        a block without a hash goes to the front, before the blocks that are free already
    [*front, *queue, *end] → [*front, *end, *queue]
        a block with a hash goes to the end, behind the blocks that are free already
    [*front, *queue, *end] → [*end, *queue, *front]
        blocks without a hash are taken first, and blocks with a hash last: they may still be found
    front = without + front → front = front + without
    [*front, *queue, *end] → sorted([*queue, *front, *end], key=lambda block: block in with_hash)
        do not sort the queue: it stays between the blocks without a hash and those with one
    [*front, *queue, *end] → [*front, *end]
        the blocks that were free before stay in the queue
    in reversed(table) → in table
        in both parts the tail of a table goes before its head
    end = end + found → end = end + found[::-1]
        the tail of a table goes before its head among the blocks with a hash, too
    front = without + front → front = without[::-1] + front
        the tail of a table goes before its head among the blocks without a hash, too
    front = without + front → front = front + without
        each table's blocks without a hash go before all others, those of earlier tables as well
    end = end + found → end = found + end
        each table's blocks with a hash go behind all others, those of earlier tables as well
    in enumerate(tables) → in enumerate(tables := tables[::-1])
        the tables are given back in this order: the first one's blocks are in the queue already
    in enumerate(tables) → in enumerate(tables[:1])
        all tables are given back, not only the first one
    for other in tables[i + 1 :] → for other in tables[i + 1 : i + 2]
        all later tables count, not only the next one: a block that one of them has is not free yet
    for other in tables[i + 1 :] → for other in tables[:i]
        a block of several tables is free when the last of them is given back, not the first one
    for other in tables[i + 1 :] → for other in []
        a block of several tables comes into the queue once: when the last one is given back
    for other in tables[i + 1 :] → for other in [*tables[:i], *tables[i + 1 :]]
        a block of several tables is free, too, when the last of them is given back
    [*front, *queue, *end] → [*queue, *front[::-1], *end]
        blocks without a hash go before the queue so far, and the tail of a table before its head
    """,
)
FREE_ORDER_CASES: tuple[tuple[list[int], list[list[int]], set[int]], ...] = (
    ([2], [[0, 4], [1, 3]], {0, 1, 2}),  # recorded: small_pool, step 23
    ([*range(6, 16)], [[0, 1, 2], [0, 1, 3], [0, 4, 5]], {0, 1, 4}),  # recorded: burst, step 11
    ([6, 1], [[2, 7, 4, 5], [3, 9, 0, 8]], {1, 2, 7, 3, 9}),
    ([], [[2, 4, 1]], {2}),
    ([5, 3], [[4, 1, 0], [2, 6]], {0, 1, 2, 3, 4, 6}),
    ([9], [[0, 1], [2, 5], [0, 3]], {0, 2}),  # not the next table has block 0, but a later one
)


def _wrong_order(
    got: object,
    want: list[int],
    queue: Sequence[int],
    tables: Sequence[Sequence[int]],
    with_hash: set[int],
) -> str:
    found = whole_numbers(got)
    if found is None or sorted(found) != sorted(want):
        return f"expected {want}: return a list of the free blocks, each once"
    if [block for block in found if block in queue] != list(queue):
        return "the blocks that were free before keep their order"
    back = [block for table in tables for block in table]
    for block in back:
        before = found[: found.index(block)]
        if block not in with_hash and any(other in queue for other in before):
            return f"block {block} has no hash: it goes before the blocks that were free already"
        if block in with_hash and any(other not in before for other in queue):
            return f"block {block} has a hash: it goes behind the blocks that were free already"
    return f"expected {want}: which block of a table is taken first, and whose table?"


def check_free_order(function: FreeOrder) -> Verdict:
    """Check a learner's free_order(queue, tables, with_hash) → the free blocks, as taken."""
    return judge(
        *("free_order", function, right_free_order, FREE_ORDER_CASES, FREE_ORDER_SLIPS),
        "free_order: as vLLM's queue after step 23 of this run, and after step 11 of a burst",
        read=_as_list,
        where=lambda got, queue, tables, with_hash: (
            f"queue {queue}, tables {tables}, with a hash {sorted(with_hash)}, got {got!r}"
        ),
        otherwise=_wrong_order,
    )


def right_hits(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """The tokens that each prompt finds when all come at once to an empty pool, in this order."""
    found = []
    for i, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:i]:
            for end in range(block_size, len(prompt), block_size):
                if list(prompt[:end]) == list(earlier[:end]):
                    best = max(best, end)
        found.append(best)
    return found


def _blocks_of(size: int, *prompts: Sequence[int]) -> set[tuple[int, ...]]:
    """The full blocks of all these prompts, whatever is before them."""
    ends = ((prompt, end) for prompt in prompts for end in range(size, len(prompt) + 1, size))
    return {tuple(prompt[end - size : end]) for prompt, end in ends}


HITS_SLIPS: Slips = slips_of(
    right_hits,
    """
    end in range(block_size, len(prompt), block_size) → end in range(1, len(prompt))
        only full blocks have a hash: with blocks of 32, of 70 common tokens 64 are found
    found.append(best) → found.append(len(prompt) - best)
        these are the tokens that are left to run: those that are found are wanted
    range(block_size, len(prompt), block_size) → range(block_size, len(prompt) + 1, block_size)
        one token at least is left to run, or there would be no logits: with blocks of 32, of 64
        known tokens 32 are found
    prompts[:i] → prompts[:1]
        a prompt finds what any earlier one has, not only the first one
    prompts[:i] → prompts[: min(i, 1)]
        a prompt finds what any earlier one has, not only the first prompt of all
    prompts[:i] → prompts[i - 1 : i]
        a prompt finds what any earlier one has, not only the one before it
    prompts[:i] → prompts[:i] + prompts[i + 1 :]
        those that come later have computed nothing yet
    prompts[:i] → ()
        all come at once, but a block can be found as soon as its tokens are planned
    list(prompt[:end]) == list(earlier[:end]) → list(prompt[: end - 1]) == list(earlier[: end - 1])
        a block is found if all of its tokens are equal, the last one as well
    list(prompt[:end]) == list(earlier[:end]) → sorted(prompt[:end]) == sorted(earlier[:end])
        the same tokens in another order are another block
    best = 0 → best = max(found, default=0)
        each prompt begins with nothing found: set it back to 0 for each one
    best = 0 → best = max(found, default=0)
    found.append(best) → found.append(min(best, (len(prompt) - 1) // block_size * block_size))
        each prompt begins with nothing found: set it back to 0 for each one, and it needs no limit
    best = max(best, end) → best += block_size
        two earlier prompts with the same beginning do not count twice
    prompt[:end] → prompt[end - block_size : end]
    earlier[:end] → earlier[end - block_size : end]
        a hash stands for the block and for all that is before it: that must be equal, too
    list(prompt[:end]) == → _blocks_of(block_size, prompt[:end]) <=
    list(earlier[:end]) → _blocks_of(block_size, *prompts[:i])
        each block is known, but behind another one: of the same block after other blocks the keys
        and values differ, so look it up together with all blocks before it
    best = max(best, end) → best = end
        the longest beginning counts, whichever of the earlier prompts has it, not the last one
    prompts[:i] → [p for p in prompts[:i] if p[:block_size] == prompt[:block_size]][:1]
        the longest beginning counts: look at all earlier prompts, not up to the first that fits
    """,
)


def burst_cases() -> list[tuple[list[list[int]], int]]:
    """vLLM's own burst first, then bursts that tell every slip apart."""
    trace = recorded_run("burst")
    theirs = [list(e.prompt_token_ids) for e in trace.events if isinstance(e, Added)]
    one, other = list(range(8)), list(range(50, 59))
    half = [*one[:4], *other]
    return [
        (theirs, 32),
        ([[*one, 1], one, [*one, 9, 9, 9]], 4),
        ([one, other, [*one, 30], [*other, 31], [*other, 32]], 4),
        ([[*one, 9], [*one, 9], other, [*one, 9]], 4),
        ([[*one, 9], [*one[:7], 99, 9], [*one[3::-1], *one[4:], 9]], 4),
        ([[*one, 9], [*other[:4], *one[4:], 9]], 4),
        ([half, [*one, 30], [*one, 31]], 4),
        ([[*one, 30], half, [*one, 31]], 4),
        ([[*one, 30], [*other[:8], 30], [*one[:4], *other[4:8], 30]], 4),
    ]


def check_hits(function: Hits) -> Verdict:
    """Check a learner's hits(prompts, block_size) → tokens that each prompt of a burst finds."""
    return judge(
        *("hits", function, right_hits, burst_cases(), HITS_SLIPS),
        "hits: 0, 64, 32 and 64 tokens, as vLLM found them",
        read=_as_list,
        where=lambda got, prompts, size: (
            f"prompts {prompts if max(map(len, prompts)) < 16 else [len(p) for p in prompts]}, "
            f"blocks of {size}, got {got}"
        ),
        otherwise=_wrong_hits,
    )


def _wrong_hits(got: object, want: list[int], prompts: Sequence[Sequence[int]], size: int) -> str:
    found = whole_numbers(got)
    if found is None or len(found) != len(want):
        return f"a list of {len(prompts)} numbers is wanted, one for each prompt"
    if found == [n // size for n in want]:
        return "these are numbers of blocks: return the tokens in them"
    if any(n % size for n in found):
        return f"only full blocks can be found: each number is a multiple of {size}"
    i = next(i for i, pair in enumerate(zip(found, want, strict=True)) if pair[0] != pair[1])
    if found[i] < want[i]:
        why = f"shares its first {want[i]} tokens with an earlier one"
    elif found[i] >= len(prompts[i]):
        why = f"has {len(prompts[i])} tokens, and one at least is left to run"
    else:
        why = f"shares its first {found[i]} tokens with no earlier one"
    return f"expected {want}: prompt {i} (counted from 0) {why}"


def right_log(
    num_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int
) -> list[float]:
    """vLLM's get_kv_cache_capacity: requests of the longest kind, and so many times its tokens."""
    blocks = num_bytes // (bytes_per_token * block_size)
    requests = blocks / -(-max_model_len // block_size)
    return [int(requests * max_model_len), requests]


LOG_SLIPS: Slips = slips_of(
    right_log,
    """
    blocks / -(-max_model_len // block_size) → blocks // -(-max_model_len // block_size)
        the second number has a fraction: divide with /
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size + 1)
        a request whose last block is full needs no block more: -(-max_model_len // block_size)
    num_bytes // (bytes_per_token * block_size) → num_bytes / (bytes_per_token * block_size)
        only whole blocks count: divide the bytes with //
    num_bytes // (bytes_per_token * block_size) → round(num_bytes / (bytes_per_token * block_size))
        a block that does not fit whole does not count: divide the bytes with //
    int(requests * max_model_len) → int(requests) * max_model_len
        multiply first, then cut off the fraction
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len / block_size)
        the last block of a request is its own, even if it is not full: round up
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size)
        the last block of a request counts whole, even if it is not full: round up, not down
    num_bytes // (bytes_per_token * block_size) → num_bytes // (bytes_per_token * block_size) - 1
        the null block is one of the blocks that the log counts: take none away
    [int(requests * max_model_len), requests] → [int(requests * max_model_len), round(requests, 2)]
        vLLM rounds the second number only when it writes it: do not round it
    int(requests * max_model_len) → round(requests * max_model_len)
        the first number is without its fraction: int() cuts it off, round() may round it up
    int(requests * max_model_len) → requests * max_model_len
        the first number is a number of tokens, without a fraction: int()
    [int(requests * max_model_len), requests] → [blocks * block_size, requests]
        the empty slots at the end of a last block do not count: requests · max_model_len
    requests * max_model_len → blocks * block_size - int(requests) * (-max_model_len % block_size)
        the part of a request that still fits counts, too: requests · max_model_len
    [int(requests * max_model_len), requests] → [blocks, requests]
        the first number counts tokens, and this one counts blocks: requests · max_model_len
    blocks / -(-max_model_len // block_size) → round(blocks / -(-max_model_len // block_size), 2)
        vLLM rounds the second number only when it writes it: do not count on with a rounded one
    blocks / -(-max_model_len // block_size) → num_bytes // bytes_per_token / max_model_len
        the memory is given out in blocks: divide the bytes into blocks first
    [int(requests * max_model_len), requests] → [requests, int(requests * max_model_len)]
        first the tokens, then the requests
    num_bytes // (bytes_per_token * block_size) → num_bytes
        these are bytes: how many blocks have room in them?
    num_bytes // (bytes_per_token * block_size) → num_bytes // bytes_per_token
        these are tokens: how many blocks do they make?
    """,
)
LOG_CASES = (
    (2**30, 2048, 32, 300),
    (10**9, 3000, 16, 320),
    (10**9, 2048, 32, 300),  # 15,258.8 blocks
    (10**9, 3000, 128, 320),
    (10**7, 3000, 16, 110),  # 29.714 requests of 3268.57 tokens: rounded they are others
    (10**7, 3000, 16, 1110),  # 2.9714 requests: of 2.97 the tokens are others
)


def check_log(function: Callable[[int, int, int, int], tuple[int, float]]) -> Verdict:
    """Check log(num_bytes, bytes_per_token, block_size, max_model_len) → vLLM's two numbers."""
    return judge(
        *("log", function, right_log, list(LOG_CASES), LOG_SLIPS),
        "log: 491,520 tokens and 1638.40 requests, as vLLM wrote them",
        read=read_numbers(2, "two numbers are wanted, the tokens and the requests"),
        where=lambda got, *case: (
            f"{case[0]:,} bytes, {case[1]:,} a token, blocks of {case[2]}, {case[3]} long, "
            f"got {got[0]:,.10g}, {got[1]:.10g}"
        ),
        otherwise=lambda got, want, *_: f"expected {want[0]:,.0f} and {want[1]:.4f}",
    )
