"""Why 16? What small blocks cost in time, and large ones in memory.

Requests of some hundred tokens, on the tables alone: no model runs. Waste and table entries are
counted, bookkeeping and gathering are measured on this machine.
"""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tutorial_engine.cache.blocks import BlockManager

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS, HEAD_DIM = 8, 64  # K of one layer and token: 2 KiB in fp32
READ = 2048  # tokens of the context that is gathered


class Trade(NamedTuple):
    """One block size. Counted: `waste`, the share of the slots held that have no token, in percent;
    `entries`, a request's table, on average. Measured, in microseconds per token: `bookkeeping`
    (admit, extend, commit, free), and `gathering`: copying K of a token in one layer, through a
    shuffled table.
    """

    block_size: int
    waste: float
    entries: float
    bookkeeping: float
    gathering: float


def block_size_trade(
    block_sizes: Sequence[int] = SIZES,
    num_requests: int = 32,
    prompt_lens: tuple[int, int] = (32, 512),
    output_lens: tuple[int, int] = (16, 128),
    repeats: int = 3,
) -> list[Trade]:
    """The same requests with blocks of each size; the best of some repeats, taken in turn."""
    draw = random.Random(0)
    lens = [(draw.randint(*prompt_lens), draw.randint(*output_lens)) for _ in range(num_requests)]
    requests = [(draw.choices(range(32_000), k=sum(pair)), pair[0]) for pair in lens]
    rounds = [
        {size: (_bookkeeping(requests, size), _gathering(size, draw)) for size in block_sizes}
        for _ in range(repeats)
    ]
    lengths = [sum(pair) for pair in lens]
    return [_trade(size, lengths, [run[size] for run in rounds]) for size in block_sizes]


def _trade(size: int, lengths: Sequence[int], runs: Sequence[tuple[float, float]]) -> Trade:
    entries = [-(-length // size) for length in lengths]
    held = size * sum(entries)
    waste = 100 * (held - sum(lengths)) / held
    bookkeeping, gathering = (1e6 * min(column) for column in zip(*runs, strict=True))
    return Trade(size, waste, sum(entries) / len(entries), bookkeeping, gathering)


def _bookkeeping(requests: Sequence[tuple[list[int], int]], size: int) -> float:
    """Seconds of this thread per token: each prompt is admitted, then decoded token by token."""
    blocks = BlockManager(sum(-(-len(ids) // size) for ids, _ in requests), size)
    began = time.thread_time()
    for i, (ids, prompt_len) in enumerate(requests):
        blocks.admit(str(i), ids[:prompt_len])
        blocks.cache_full_blocks(str(i), ids, prompt_len)
        blocks.commit(str(i), prompt_len)
        for end in range(prompt_len + 1, len(ids) + 1):
            blocks.extend(str(i), end - 1, end)
            blocks.cache_full_blocks(str(i), ids, end)
            blocks.commit(str(i), end)
    for i in range(len(requests)):
        blocks.free(str(i))
    return (time.thread_time() - began) / sum(len(ids) for ids, _ in requests)


def _gathering(size: int, draw: random.Random) -> float:
    """Seconds per token to gather a context whose blocks lie anywhere in the pool."""
    num_blocks = max(1, READ // size)
    pool = torch.zeros(4 * num_blocks, size * HEADS * HEAD_DIM)
    table = torch.tensor(draw.sample(range(4 * num_blocks), num_blocks))
    out = torch.empty(num_blocks, pool.shape[1])
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.index_select(pool, 0, table, out=out)
        times.append(time.perf_counter() - began)
    return min(times) / (num_blocks * size)


def table(trades: Sequence[Trade]) -> str:
    """A line for each block size."""
    lines = ["block size  waste %  table entries  bookkeeping, µs a token  gathering, µs a token"]
    for size, waste, entries, bookkeeping, gathering in trades:
        row = f"{size:10}{waste:9.1f}{entries:15.0f}{bookkeeping:25.2f}{gathering:23.2f}"
        lines.append(row)
    return "\n".join(lines)
