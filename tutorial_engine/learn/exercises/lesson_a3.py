"""The checks of the exercises beside vLLM: what a burst finds, a line of its log."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tutorial_engine.lab.vllm import recorded_run
from tutorial_engine.learn.exercises.judge import Slips, judge, read_numbers, slips_of
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.learn.parts.holder import listed
from tutorial_engine.trace.events import Added

Hits = Callable[[Sequence[Sequence[int]], int], list[int]]


def _as_list(answer: object) -> object:
    """A list, of whatever gives its items one by one; what is none stays as it is."""
    items = [*answer] if isinstance(answer, deque | OrderedDict | Iterator) else answer
    return items if (found := listed(items)) is None else found


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
        single tokens are found, and not only full blocks
    found.append(best) → found.append(len(prompt) - best)
        the tokens that are left to run, in place of those that are found
    found.append(best) → found.append(best // block_size)
        the number of blocks, in place of the tokens in them
    range(block_size, len(prompt), block_size) → range(block_size, len(prompt) + 1, block_size)
        the last token can be found as well: none may be left to run
    prompts[:i] → prompts[:1]
        each prompt finds what the first one has, and the first one finds itself
    prompts[:i] → prompts[: min(i, 1)]
        each prompt finds what the first one has, and no other
    prompts[:i] → prompts[i - 1 : i]
        a prompt finds what the one before it has, and no other
    prompts[:i] → prompts[:i] + prompts[i + 1 :]
        a prompt finds what those have that come after it
    prompts[:i] → ()
        nothing is ever found
    list(prompt[:end]) == list(earlier[:end]) → list(prompt[: end - 1]) == list(earlier[: end - 1])
        a block is found whatever its last token is
    list(prompt[:end]) == list(earlier[:end]) → sorted(prompt[:end]) == sorted(earlier[:end])
        the same tokens are found in any order
    best = 0 → best = max(found, default=0)
        what a prompt before it found is the least that a prompt finds
    best = 0 → best = max(found, default=0)
    found.append(best) → found.append(min(best, (len(prompt) - 1) // block_size * block_size))
        what a prompt before it found is the least that a prompt finds, if it is as long
    best = max(best, end) → best += block_size
        a block that two earlier prompts have is found twice
    prompt[:end] → prompt[end - block_size : end]
    earlier[:end] → earlier[end - block_size : end]
        a block is found by its own tokens at its place, whatever is before it
    list(prompt[:end]) == → _blocks_of(block_size, prompt[:end]) <=
    list(earlier[:end]) → _blocks_of(block_size, *prompts[:i])
        a block is found wherever it stands in an earlier prompt, whatever is before it
    best = max(best, end) → best = end
        of several earlier prompts the last one that fits counts, not the longest beginning
    prompts[:i] → [p for p in prompts[:i] if p[:block_size] == prompt[:block_size]][:1]
        of several earlier prompts the first one that fits counts, not the longest beginning
    """,
)


def burst_cases() -> list[tuple[list[list[int]], int]]:
    """Bursts that can be read and that tell every slip apart, and vLLM's own."""
    trace = recorded_run("burst")
    theirs = [list(e.prompt_token_ids) for e in trace.events if isinstance(e, Added)]
    a, b, c, d = [1, 2], [3, 4], [5, 6], [7, 8]  # blocks
    return [
        ([[1, 2, 3], [1, 2, 4]], 2),  # one block is found
        ([[1, 2, 3], [1, 2]], 2),  # all is known: one token is left to run
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2),
        ([[1, 2], [1, 2, 3]], 2),  # the earlier one is shorter
        ([[1, 2, 3], [1, 4, 3]], 2),  # only the first token of the block
        ([[1, 2, 3], [2, 1, 3]], 2),  # another order
        ([[1, 2, 3], [5, 6, 7], [1, 2, 4]], 2),  # not in the prompt before
        ([[5, 6, 7], [1, 2, 3], [1, 2, 4]], 2),  # not in the first prompt
        ([[1, 2, 3], [1, 2, 4], [5, 6, 7]], 2),  # nothing after a hit
        ([[*a, *c, 9], [*b, *c, 9]], 2),  # a known block behind another one
        ([[*a, *b, 9], [*c, *d, 9], [*a, *d, 9]], 2),  # each block is known, not together
        ([[*b, *c, 9], [*c, 9]], 2),  # known at another place
        ([[*a, *b, 9], [*a, 9], [*a, *b, 8]], 2),  # the first fits better than the next
        ([[*a, 9], [*a, *b, 9], [*a, *b, 8]], 2),
        ([[*a, *b, 9], [*a, *b, *c, 9], [*a, *b, *d, 9]], 2),  # two that fit alike
        (theirs, 32),
    ]


def check_hits(function: Hits) -> Verdict:
    """Check a learner's hits(prompts, block_size) → tokens that each prompt of a burst finds."""
    return judge(
        *("hits", function, right_hits, burst_cases(), HITS_SLIPS),
        "hits: 0, 64, 32 and 64 tokens, as vLLM found them",
        read=_as_list,
    )


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
        whole requests only: the second number has no fraction
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size + 1)
        a request takes one block more than it needs where its last block is full
        ▸ -(-max_model_len // block_size)
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len / block_size)
        a request takes a part of its last block, and not the whole block
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size)
        the last block of a request does not count where it is not full
    num_bytes // (bytes_per_token * block_size) → num_bytes / (bytes_per_token * block_size)
        a part of a block counts: 2.5 blocks have room in the memory, and not 2
    num_bytes // (bytes_per_token * block_size) → round(num_bytes / (bytes_per_token * block_size))
        the number of blocks is rounded, up as well
    num_bytes // (bytes_per_token * block_size) → num_bytes // (bytes_per_token * block_size) - 1
        one block less, as if the null block did not count
    blocks / -(-max_model_len // block_size) → num_bytes // bytes_per_token / max_model_len
        tokens that have room, divided by max_model_len, as if there were no blocks
    num_bytes // (bytes_per_token * block_size) → num_bytes
        bytes in place of blocks
    num_bytes // (bytes_per_token * block_size) → num_bytes // bytes_per_token
        tokens in place of blocks
    int(requests * max_model_len) → int(requests) * max_model_len
        the first number has the tokens of whole requests only
    int(requests * max_model_len) → round(requests * max_model_len)
        the first number is rounded, up as well, and not cut off
    int(requests * max_model_len) → requests * max_model_len
        the first number has a fraction
    [int(requests * max_model_len), requests] → [blocks * block_size, requests]
        the first number has all slots of all blocks
    requests * max_model_len → blocks * block_size - int(requests) * (-max_model_len % block_size)
        the first number has the tokens of whole requests, and all slots of the blocks that are left
    [int(requests * max_model_len), requests] → [blocks, requests]
        the first number is the number of blocks
    [int(requests * max_model_len), requests] → [int(requests * max_model_len), round(requests, 2)]
        the second number is rounded
    blocks / -(-max_model_len // block_size) → round(blocks / -(-max_model_len // block_size), 2)
        the second number is rounded, and the first one follows from the rounded one
    [int(requests * max_model_len), requests] → [requests, int(requests * max_model_len)]
        first the requests, then the tokens: they have changed places
    """,
)
LOG_CASES = (
    (8, 1, 2, 2),  # 4 blocks, and one for each request
    (8, 1, 2, 3),  # the last block of a request is not full
    (8, 1, 2, 4),  # it is full
    (7, 1, 2, 2),  # 3.5 blocks
    (6, 1, 2, 3),  # 1.5 requests of 3 tokens: 4.5
    (10, 1, 2, 3),  # 7.5 tokens: rounded they are 8
    (16, 2, 2, 2),  # a token of two bytes
    (10, 1, 2, 5),  # 1.666... requests
    (2**30, 2048, 32, 300),
    (10**9, 3000, 16, 320),
    (10**9, 2048, 32, 300),  # 15,258.8 blocks
    (10**9, 3000, 128, 320),
    (10**7, 3000, 16, 110),  # 29.714 requests of 3268.57 tokens: rounded they are others
    (10**7, 3000, 16, 1110),  # 2.9714 requests: of 2.97 the tokens are others
)


def _tokens_and_requests(answer: Any) -> list[float]:
    """The two numbers; the first one as a whole number where it is one."""
    tokens, requests = _two_numbers(answer)
    return [int(tokens) if tokens.is_integer() else tokens, requests]


_two_numbers = read_numbers(2, "it must return two numbers, the tokens and the requests")


def check_log(function: Callable[[int, int, int, int], tuple[int, float]]) -> Verdict:
    """Check log(num_bytes, bytes_per_token, block_size, max_model_len) → vLLM's two numbers."""
    return judge(
        *("log", function, right_log, list(LOG_CASES), LOG_SLIPS),
        "log: 491,520 tokens and 1638.40 requests, as vLLM wrote them",
        read=_tokens_and_requests,
        also={"second number": _in_full},
    )


def _in_full(got: list[float], *case: int) -> str | None:
    """The second number with all its digits, if four are not enough to tell it apart."""
    mine, right = got[1], right_log(*case)[1]
    is_shown_alike = mine != right and f"{mine:.4g}" == f"{right:.4g}"
    return f"{mine}, expected {right}" if is_shown_alike else None
