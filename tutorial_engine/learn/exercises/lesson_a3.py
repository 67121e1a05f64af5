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
        counts equal tokens that fill no block; only full blocks can be found
    found.append(best) → found.append(len(prompt) - best)
        gives the tokens that are left to run; those that are found are asked for
    found.append(best) → found.append(best // block_size)
        gives the number of blocks; the number of tokens in them is asked for
    range(block_size, len(prompt), block_size) → range(block_size, len(prompt) + 1, block_size)
        finds the last token as well; at least one token must be left to run
    range(block_size, len(prompt), block_size) → range(1, len(prompt) + 1)
        counts equal tokens that fill no block, also the last one; only full blocks can be found,
        and at least one token must be left to run
    range(block_size, len(prompt), block_size) → range(1)
    list(prompt[:end]) == list(earlier[:end]) → True
    max(best, end) → max(best, sum(a == b for a, b in zip(prompt, earlier, strict=False)))
        counts equal tokens wherever they stand, also behind the first that differs; a block is
        found only if it is full and all before it is equal
    prompts[:i] → prompts[:1]
        finds what the first prompt has, and that one finds itself; what any EARLIER prompt has is
        found
    prompts[:i] → prompts[: min(i, 1)]
        finds what the first prompt has, and no other; what any earlier prompt has is found
    prompts[:i] → prompts[i - 1 : i]
        finds what the prompt just before has, and no other; what any earlier prompt has is found
    prompts[:i] → prompts[:i] + prompts[i + 1 :]
        finds what later prompts have, too; they have computed nothing yet
    prompts[:i] → ()
        never finds anything; what any earlier prompt has is found, also one of the same step
    range(block_size, len(prompt), block_size) → range(block_size, len(prompt) - 1, block_size)
        leaves two tokens to run at least; one is enough
    list(prompt[:end]) == list(earlier[:end]) → list(prompt[: end - 1]) == list(earlier[: end - 1])
        finds a block whatever its last token is; all of its tokens must be equal
    list(prompt[:end]) == list(earlier[:end]) → sorted(prompt[:end]) == sorted(earlier[:end])
        finds the same tokens in any order; in another order they are another block
    best = 0 → best = max(found, default=0)
        finds at least what a prompt before it found; each prompt begins with nothing found
    best = 0 → best = max(found, default=0)
    found.append(best) → found.append(min(best, (len(prompt) - 1) // block_size * block_size))
        finds at least what a prompt before it found, if it is as long; each prompt begins with
        nothing found
    best = max(best, end) → best += block_size
        counts a block twice that two earlier prompts have; it is one beginning, and counts once
    prompt[:end] → prompt[end - block_size : end]
    earlier[:end] → earlier[end - block_size : end]
        finds a block by its own tokens at its place; all tokens before it must be equal, too
    list(prompt[:end]) == → _blocks_of(block_size, prompt[:end]) <=
    list(earlier[:end]) → _blocks_of(block_size, *prompts[:i])
        finds a block wherever it stands in an earlier prompt; all tokens before it must be equal,
        too
    best = max(best, end) → best = end
        takes the last of several earlier prompts that fit; the longest beginning counts
    prompts[:i] → [p for p in prompts[:i] if p[:block_size] == prompt[:block_size]][:1]
        takes the first of several earlier prompts that fit; the longest beginning counts
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
        gives whole requests only; a part of a request counts in the second number
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size + 1)
        counts one block too many for a request whose last block is full; a full block needs no
        other behind it ▸ -(-max_model_len // block_size)
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len / block_size)
        counts a part of a request's last block; a request takes whole blocks
    blocks / -(-max_model_len // block_size) → blocks / (max_model_len // block_size)
        leaves out a request's last block where it is not full; a request takes the whole block
    num_bytes // (bytes_per_token * block_size) → num_bytes / (bytes_per_token * block_size)
        counts a part of a block; memory for 2.5 blocks has room for 2
    num_bytes // (bytes_per_token * block_size) → round(num_bytes / (bytes_per_token * block_size))
        rounds the number of blocks, up as well; a part of a block is no block
    num_bytes // (bytes_per_token * block_size) → num_bytes // (bytes_per_token * block_size) - 1
        counts one block less, as if without the null block; the log counts all blocks
    blocks / -(-max_model_len // block_size) → num_bytes // bytes_per_token / max_model_len
        divides the tokens that have room by `max_model_len`, as if there were no blocks; a request
        takes whole blocks
    num_bytes // (bytes_per_token * block_size) → num_bytes
        takes bytes for blocks; a block takes the bytes of `block_size` tokens
    num_bytes // (bytes_per_token * block_size) → num_bytes // bytes_per_token
        takes tokens for blocks; a block has `block_size` tokens
    int(requests * max_model_len) → int(requests) * max_model_len
        counts the tokens of whole requests alone in the first number; a part of a request counts,
        too
    int(requests * max_model_len) → round(requests * max_model_len)
        rounds the first number, up as well; the first number is cut off, not rounded
    int(requests * max_model_len) → requests * max_model_len
        gives a first number with a fraction; the first number is whole
    [int(requests * max_model_len), requests] → [num_bytes // bytes_per_token, requests]
        gives the tokens that have room as the first number; a request counts `max_model_len`
        tokens, and the empty slots of its last block do not count
    [int(requests * max_model_len), requests] → [blocks * block_size, requests]
        gives all slots of all blocks as the first number; a request counts `max_model_len` tokens,
        not its slots
    requests * max_model_len → blocks * block_size - int(requests) * (-max_model_len % block_size)
        counts all slots behind the whole requests in the first number; a part of a request counts
        in proportion
    [int(requests * max_model_len), requests] → [blocks, requests]
        gives the number of blocks as the first number; the first number is a number of tokens
    [int(requests * max_model_len), requests] → [int(requests * max_model_len), round(requests, 2)]
        rounds the second number; the second number is not rounded
    blocks / -(-max_model_len // block_size) → round(blocks / -(-max_model_len // block_size), 2)
        rounds the second number, and makes the first one of it; the second number is not rounded
    [int(requests * max_model_len), requests] → [requests, int(requests * max_model_len)]
        gives the requests first, and the tokens second; the tokens come first
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
    )
