"""What pages cost beside rows, what a shared prefix saves, and what a step costs beside the model.

Each of them is a race of our engine with itself. Knows this engine and its memories.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.bench.contenders import SHAPES, OurServer, serving_config
from tools.bench.race import Answer, Asked, Race, race
from tools.bench.report import Figures, many_requests
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import Request, ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.sampling.params import SamplingParams

ROWS, PAGES = "rows", "pages"
NO_CACHE, CACHE = "no prefix cache", "prefix cache"
LOOP, MANY_BLOCKS = "in place, loop", "in place, many blocks"
BLOCK_SIZE = 16  # tokens
PREFIX, OWN, NEW = 512, 128, 16  # tokens of a prompt that all share, of its own, wanted ones
SHARING = 16  # requests with that prefix, at most
BATCH, CONTEXT = 8, 2048  # of the decode step over long contexts
SHAPE, LAYERS = "qwen3-0.6b", 4  # whose decode step, and how much of it
ALMOST_ALL = 0.95  # of the requests say the same in fp32: a tie may be broken the other way
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of logits, which are about 1 here
RUNNING = (16, 256, 4096)  # requests
STEPS = 24  # timed
VOCAB = 8
NO_MODEL: dict[str, Any] = {  # a real model, as small as can be: it is never run
    **{"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
    "max_position_embeddings": 4096,
}


def measure(model: CausalLM, requests: Sequence[Asked], rounds: int, steps: int) -> Figures:
    """All of it: so many rounds of requests, and of the step over long contexts."""
    num_shared = min(max(len(requests) // 2, 2), SHARING)
    long = race_long_contexts(part_of_shape(model.dtype), BATCH, CONTEXT, steps)
    shape = f"{LAYERS} layers of {SHAPE} and their share of its head"
    memory = {
        "ragged": many_requests(race_layouts(model, requests, rounds), ROWS),
        "prefix": many_requests(race_prefix_cache(model, num_shared, rounds), NO_CACHE),
        "shared": PREFIX / (PREFIX + OWN),
        "long_context": {
            **many_requests(long, ROWS),
            **{"batch": BATCH, "context": CONTEXT, "shape": shape},
        },
    }
    return {"memory": memory, "step_costs": [measure_step_cost(running) for running in RUNNING]}


# -- the same requests on two memories ------------------------------------------------------------


class ColdServer(OurServer):
    """Our engine on pages that forget, before each run, what the one before left in them."""

    def __init__(self, model: CausalLM, config: EngineConfig, memory: PagedKVCache) -> None:
        super().__init__(model, config, memory)
        self.blocks = memory.blocks

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        self.blocks.reset()
        return super().serve(requests)


def race_layouts(model: CausalLM, requests: Sequence[Asked], rounds: int) -> Race:
    """The same requests on rows and on pages, with as many slots; no prefix is there to be found.

    ValueError where the two give different answers.
    """
    config = serving_config(requests)
    pages = pages_for(model, config, prefix_caching=True)
    servers = {ROWS: OurServer(model, config), PAGES: ColdServer(model, config, pages)}
    return checked(race(servers, requests, rounds), ROWS, model.dtype)


def race_prefix_cache(model: CausalLM, num_requests: int, rounds: int) -> Race:
    """Prompts that share four fifths, on pages without a prefix cache, and with an empty one."""
    requests = shared_prefix_requests(num_requests, model.config.vocab_size)
    config = serving_config(requests)
    servers = {
        name: ColdServer(model, config, pages_for(model, config, prefix_caching=name == CACHE))
        for name in (NO_CACHE, CACHE)
    }
    return checked(race(servers, requests, rounds), NO_CACHE, model.dtype)


def shared_prefix_requests(num_requests: int, vocab_size: int) -> list[Asked]:
    """Prompts of random ids of which PREFIX are the same, the same in every run."""
    draw = random.Random(0)
    prefix = draw.choices(range(vocab_size), k=PREFIX)
    return [
        Asked((*prefix, *draw.choices(range(vocab_size), k=OWN)), NEW) for _ in range(num_requests)
    ]


def pages_for(model: CausalLM, config: EngineConfig, prefix_caching: bool) -> PagedKVCache:
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


def checked(result: Race, reference: str, dtype: torch.dtype) -> Race:
    """The same; ValueError for fp32 answers that differ by more than a few broken ties."""
    for name, (requests, tokens) in result.agreement(reference).items():
        if dtype == torch.float32 and requests < ALMOST_ALL * len(result.requests):
            raise ValueError(
                f"{name}: only {requests} of {len(result.requests)} requests and {tokens} tokens "
                f"are those of {reference}: one is wrong"
            )
    return result


# -- one decode step over long contexts -----------------------------------------------------------


def part_of_shape(dtype: torch.dtype) -> CausalLM:
    """Random weights in SHAPE, with fewer layers and a vocabulary smaller by as much.

    So a step's time divides among layers, head and attention as it does in the whole model.
    """
    shape = SHAPES[SHAPE]
    vocab = shape["vocab_size"] * LAYERS // shape["num_hidden_layers"]
    changes = {"model_type": "qwen3", "num_hidden_layers": LAYERS, "vocab_size": vocab}
    torch.manual_seed(0)
    model = CausalLM(ModelConfig.from_dict({**shape, **changes})).draw_weights()
    model.to(dtype).requires_grad_(False).eval()
    use_fast_layers(model)
    return model


class OneStep:
    """The last token of each context, on one memory: the same step in every run."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        step: Sequence[ScheduledRequest],
        attention: AttentionBackend | None = None,
    ) -> None:
        self.runner, self.step = ModelRunner(model, storage, attention), step
        self.logits = torch.empty(0)

    def serve(self, requests: Sequence[Asked]) -> Sequence[Answer]:
        self.logits = self.runner.run(self.step)
        return [Answer((token,)) for token in self.logits.argmax(-1).tolist()]


def race_long_contexts(model: CausalLM, batch: int, context: int, rounds: int) -> Race:
    """The same decode step on rows, and on pages in each way of reading.

    ValueError unless all give the same logits, and the same tokens in fp32.
    """
    draw = random.Random(0)
    vocab = range(model.config.vocab_size)
    requests = [Asked(tuple(draw.choices(vocab, k=context)), 1) for _ in range(batch)]
    config = EngineConfig(max_num_seqs=batch, max_model_len=context)
    on_rows = StaticKVCache.from_config(
        model.config, max_seqs=batch, max_len=context, dtype=model.dtype, device=model.device
    )
    pages = pages_for(model, config, prefix_caching=False)
    row_step, page_step = (fill(memory, requests) for memory in (on_rows, pages))
    ways = {
        ROWS: OneStep(model, on_rows.storage, row_step),
        PAGES: OneStep(model, pages.storage, page_step),
        LOOP: OneStep(model, pages.storage, page_step, NaivePagedAttention(pages)),
        MANY_BLOCKS: OneStep(model, pages.storage, page_step, PagedAttention(pages)),
    }
    done = race(ways, requests, rounds)
    difference = max(float((way.logits - ways[ROWS].logits).abs().max()) for way in ways.values())
    if difference > TOLERANCE[model.dtype]:
        raise ValueError(
            f"rows and pages disagree by {difference:.1e} in their logits: the comparison would "
            "not be fair"
        )
    return checked(done, ROWS, model.dtype)


def fill(memory: StaticKVCache | PagedKVCache, asked: Sequence[Asked]) -> list[ScheduledRequest]:
    """Fill a memory with contexts → the step that runs the last token of each.

    The contexts grew together, a block at a time, as those of requests that are served side by
    side: so no two blocks of one table are neighbours. Each has the same random K and V on each
    memory, position by position.
    """
    requests = [Request(str(i), list(one.prompt)) for i, one in enumerate(asked)]
    last = len(requests[0].token_ids) - 1
    for start in range(0, last, BLOCK_SIZE):
        end = min(start + BLOCK_SIZE, last)
        for request in requests:
            memory.allocate(request.request_id, request.token_ids[:end], start, end - start)
            memory.commit(request.request_id, request.token_ids[:end], end)
    spec, generator = memory.storage.spec, torch.Generator().manual_seed(0)
    step = []
    for request in requests:
        request.num_computed_tokens = last
        slots = torch.tensor(memory.describe(request.request_id).slots[:last])
        for layer in range(spec.num_layers):
            k, v = (
                torch.randn(len(slots), spec.num_kv_heads, dim, generator=generator)
                for dim in (spec.k_head_dim, spec.v_head_dim)
            )
            memory.storage.write_slots(layer, slots, k.to(spec.dtype), v.to(spec.dtype))
        room = memory.allocate(request.request_id, request.token_ids, last, 1)
        assert room is not None, "there is memory for all"
        step.append(ScheduledRequest(request, 1, room))
    return step


# -- a step without its forward -------------------------------------------------------------------


class NoForward(CausalLM):
    """A model that computes nothing: its logits are always the same."""

    def forward(self, batch: Batch, *rest: Any) -> Tensor:
        return torch.zeros(len(batch.input_ids), self.config.hidden_size)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.eye(1, VOCAB).expand(len(hidden), -1)


def engine_in_decode(running: int, steps: int) -> LLMEngine:
    """An engine whose requests have all run their prompts and want more than `steps` tokens."""
    prompt, wanted = (1, 2, 3, 4), steps + 3
    config = EngineConfig(
        max_num_seqs=running,
        max_num_batched_tokens=running * len(prompt),
        max_model_len=len(prompt) + wanted,
    )
    engine = LLMEngine(NoForward(ModelConfig(**NO_MODEL)).draw_weights(), config=config)
    for _ in range(running):
        engine.add_request(None, prompt, SamplingParams(max_tokens=wanted, ignore_eos=True))
    for _ in range(2):  # the prompts, and a decode that warms up
        engine.step()
    return engine


@torch.inference_mode()
def measure_step_cost(running: int, steps: int = STEPS) -> dict[str, Any]:
    """Microseconds per running request of a decode step without its forward: the median.

    A real engine's whole step: plan, the batch's tensors, greedy choice among 8 logits, update,
    outputs. Only the model does nothing.
    """
    engine = engine_in_decode(running, steps)
    samples = []
    for _ in range(steps):
        began = time.perf_counter()
        results = engine.step()
        samples.append(1e6 * (time.perf_counter() - began) / running)
        assert len(results) == running, f"{len(results)} of {running} requests got a token"
    return {"running": running, "step": statistics.median(samples), "samples": samples}
