"""Why 16? What small blocks cost in time, and large ones in memory.

Requests of some hundred tokens, on the tables alone: no model runs. Waste and table entries are
counted, bookkeeping and gathering are measured on this machine. And a decode step of a model over a
long context in scattered blocks, measured for each way to read them.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_SIZES = (1, 4, 16, 64, 128)
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


Ways = Mapping[str, Callable[[PagedKVCache], AttentionBackend] | None]  # None: gather


def decode_times(
    model: CausalLM,
    ways: Ways,
    block_sizes: Sequence[int] = DECODE_SIZES,
    num_tokens: int = 960,
    steps: int = 11,
) -> dict[str, dict[int, float]]:
    """Way → block size → milliseconds of a decode step over a context in scattered blocks.

    The median of so many steps, which are taken in turn: what disturbs the machine for a moment
    disturbs all alike. Seconds of this process count, so other programs do not.
    """
    engines = {
        (way, size): _long_context(model, backend, size, num_tokens, steps)
        for way, backend in ways.items()
        for size in block_sizes
    }
    taken: dict[tuple[str, int], list[float]] = {which: [] for which in engines}
    for _ in range(steps):
        for which, engine in engines.items():
            began = time.process_time()
            engine.step()
            taken[which].append(time.process_time() - began)
    return {way: {size: 1000 * median(taken[way, size]) for size in block_sizes} for way in ways}


def _long_context(
    model: CausalLM,
    backend: Callable[[PagedKVCache], AttentionBackend] | None,
    size: int,
    num_tokens: int,
    steps: int,
) -> LLMEngine:
    """An engine whose only request has run its prompt, and one decode step to get warm."""
    most = num_tokens + steps + 2
    num_blocks = -(-4 * most // (3 * size))  # a third more than needed: the blocks lie apart
    memory = PagedKVCache.from_config(
        model.config, num_blocks=num_blocks, block_size=size, prefix_caching=False
    )
    for block in random.Random(0).sample(range(num_blocks), num_blocks):  # the queue, shuffled
        memory.blocks.free_queue.move_to_end(block)
    config = EngineConfig(max_model_len=most, max_num_seqs=1, max_num_batched_tokens=most)
    engine = LLMEngine(model, None, config, memory=memory, clock=VirtualClock())
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
    engine.add_request("A", [65] * num_tokens, params)
    engine.step()  # the prompt, gathered: one way to read it is as good as another
    if backend is not None:
        engine.runner = ModelRunner(model, memory.storage, backend(memory))
    engine.step()
    return engine


def decode_table(times: Mapping[str, Mapping[int, float]]) -> str:
    """A line for each way, a column for each block size."""
    sizes = list(next(iter(times.values())))
    lines = [f"{'ms, with blocks of':18}" + "".join(f"{size:8}" for size in sizes)]
    lines += [
        f"{way:18}" + "".join(f"{of[size]:8.1f}" for size in sizes) for way, of in times.items()
    ]
    return "\n".join(lines)


def table(trades: Sequence[Trade]) -> str:
    """A line for each block size."""
    lines = ["block size  waste %  table entries  bookkeeping, µs a token  gathering, µs a token"]
    for size, waste, entries, bookkeeping, gathering in trades:
        row = f"{size:10}{waste:9.1f}{entries:15.0f}{bookkeeping:25.2f}{gathering:23.2f}"
        lines.append(row)
    return "\n".join(lines)
