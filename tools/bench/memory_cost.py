"""What pages cost beside rows, and what a shared prefix saves on them.

Knows this engine with its memories, and the race of servers. The two other parts of the account
are its neighbours: long contexts (`long_context`), and the memories alone (`allocation_cost`).
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tools.bench.allocation_cost import AllocationCost, measure_allocation
from tools.bench.long_context import (
    LongContext,
    measure_long_context,
    random_model,
    slice_of,
)
from tools.bench.servers import OurServer, serving_config
from tools.bench.serving import Asked, Serving, Tokens, measure_serving
from tools.bench.shapes import SHAPES
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.engine import EngineConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

ROWS, PAGES = "rows", "pages"
NO_CACHE, CACHE = "no prefix cache", "prefix cache"
BLOCK_SIZE = 16  # tokens
PREFIX, OWN, NEW = 512, 128, 16  # tokens of a prompt that all share, of its own, wanted ones
SHARING = 16  # requests with that prefix, at most
BATCH, CONTEXT = 8, 2048  # of the decode step over long contexts
SHAPE, LAYERS = "qwen3-0.6b", 4  # whose decode step, and how much of it
ALMOST_ALL = 0.95  # of the requests say the same in fp32: a tie may be broken the other way


class ColdServer(OurServer):
    """The same on pages that forget, before each run, what the one before left in them."""

    def __init__(self, model: Qwen3ForCausalLM, config: EngineConfig, memory: PagedKVCache) -> None:
        super().__init__(model, config, memory)
        self.memory = memory

    def serve(self, requests: Sequence[Asked]) -> Sequence[Tokens]:
        """As Server.serve."""
        self.memory.blocks.reset()
        return super().serve(requests)


class MemoryCost(NamedTuple):
    """The whole account: ragged requests on rows and on pages; pages without and with their
    prefix cache; a decode step over long contexts; allocate, commit and free alone.

    `shared` is the part of each prompt that is the same, `long_shape` whose decode step it is.
    """

    ragged: Serving
    prefix: Serving
    shared: float
    long_context: LongContext
    long_shape: str
    allocation: list[AllocationCost]


def measure_memory(
    model: Qwen3ForCausalLM, requests: Sequence[Asked], serving_rounds: int, rounds: int
) -> MemoryCost:
    """All four, each of them interleaved. ValueError where two memories give different answers."""
    num_shared = min(max(len(requests) // 2, 2), SHARING)
    shared = shared_prefix_requests(num_shared, model.config.vocab_size)
    ragged = race_layouts(model, requests, serving_rounds)
    prefix = race_prefix_cache(model, shared, serving_rounds)
    part = random_model(slice_of(SHAPES[SHAPE], LAYERS), model.dtype)
    long_context = measure_long_context(part, BATCH, CONTEXT, rounds, BLOCK_SIZE)
    about = f"{LAYERS} layers of {SHAPE} and their share of its head"
    sharing = PREFIX / (PREFIX + OWN)
    return MemoryCost(ragged, prefix, sharing, long_context, about, measure_allocation())


def race_layouts(model: Qwen3ForCausalLM, requests: Sequence[Asked], rounds: int) -> Serving:
    """The same requests on rows and on pages, each in its own layout, with as many slots.

    The prefix cache is on and has nothing to find.
    """
    config = serving_config(requests)
    servers = {
        ROWS: OurServer(model, config),
        PAGES: ColdServer(model, config, _pages(model, config, prefix_caching=True)),
    }
    return _checked(measure_serving(servers, requests, rounds, ROWS, peer=ROWS), model.dtype)


def race_prefix_cache(model: Qwen3ForCausalLM, requests: Sequence[Asked], rounds: int) -> Serving:
    """The same requests on pages without a prefix cache, and with one, empty before every run."""
    config = serving_config(requests)
    servers = {
        NO_CACHE: OurServer(model, config, _pages(model, config, prefix_caching=False)),
        CACHE: ColdServer(model, config, _pages(model, config, prefix_caching=True)),
    }
    return _checked(
        measure_serving(servers, requests, rounds, NO_CACHE, peer=NO_CACHE), model.dtype
    )


def shared_prefix_requests(num_requests: int, vocab_size: int) -> list[Asked]:
    """Prompts of random ids of which four fifths are the same, the same in every run."""
    draw = random.Random(0)
    prefix = draw.choices(range(vocab_size), k=PREFIX)
    return [
        Asked((*prefix, *draw.choices(range(vocab_size), k=OWN)), NEW) for _ in range(num_requests)
    ]


def _pages(model: Qwen3ForCausalLM, config: EngineConfig, prefix_caching: bool) -> PagedKVCache:
    """As many slots as the rows of that config have."""
    assert config.max_model_len is not None, "serving_config says how long a row is"
    return PagedKVCache.from_config(
        model.config,
        block_size=BLOCK_SIZE,
        num_blocks=config.max_num_seqs * -(-config.max_model_len // BLOCK_SIZE),
        dtype=model.dtype,
        device=model.device,
        prefix_caching=prefix_caching,
    )


def _checked(serving: Serving, dtype: torch.dtype) -> Serving:
    """The same; ValueError for fp32 answers that differ by more than a few broken ties."""
    for name, (requests, tokens) in serving.agreement.items():
        if dtype == torch.float32 and requests < ALMOST_ALL * serving.num_requests:
            raise ValueError(
                f"{name}: only {requests} of {serving.num_requests} requests and {tokens} of "
                f"{serving.wanted_tokens} tokens are those of {serving.reference}: one is wrong"
            )
    return serving
