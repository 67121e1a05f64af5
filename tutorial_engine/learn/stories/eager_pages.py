"""The naive admission: let a request in as soon as its first chunk fits.

Kept beside PagedKVCache, which asks for room for all tokens. Both give the same tokens; what the
naive one costs is read from a trace.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Preempted, Recorder, Scheduled, TokenSampled, Trace

USERS = (
    "Once upon a time Anna had a red kite.",
    "Ben had a blue ball.",
    "One day Anna and Ben went to the park.",
    "The little dog was very happy.",
)
REPEATS = 36  # sentences of the long text


class EagerPages(PagedKVCache):
    """Pages that let a request in when the tokens it would run NOW fit. Right, and slow.

    The rest of its prompt needs blocks in the next steps. If none is free, who was let in last
    gives way, often this request itself. It is let in again when a chunk fits, and starts anew.
    """

    def tokens_to_admit(self, token_ids: Sequence[int], num_new: int) -> Sequence[int]:
        """What is found in the cache and the first chunk, and no more."""
        known = len(self.blocks.find(token_ids)) * self.block_size
        return token_ids[: known + num_new]


class Cost(NamedTuple):
    """What a run did, and did in vain: of `num_tokens` run, `num_recomputed` had been run before.

    `num_preemptions` counts all; `preempted` is request_id → how often, for those who gave way.
    `milliseconds` until the last one was done, on the engine's clock.
    """

    num_steps: int
    num_preemptions: int
    preempted: dict[str, int]
    num_recomputed: int
    num_tokens: int
    milliseconds: float


def cost(trace: Trace) -> Cost:
    """Count preemptions, tokens that were run, and those that were run again, in a trace."""
    gave_way = Counter(e.request_id for e in trace.events if isinstance(e, Preempted))
    ran, ends = 0, dict[str, int]()
    for event in trace.events:
        if isinstance(event, Scheduled):
            ran += len(event.slots)
            end = event.first_position + len(event.slots)
            ends[event.request_id] = max(ends.get(event.request_id, 0), end)
    again, took = ran - sum(ends.values()), trace.events[-1].time - trace.events[0].time
    return Cost(trace.num_steps, gave_way.total(), dict(gave_way), again, ran, 1000 * took)


def tokens(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Request_id → the tokens that it got, from a trace."""
    got: dict[str, tuple[int, ...]] = {}
    for event in trace.events:
        if isinstance(event, TokenSampled):
            got[event.request_id] = (*got.get(event.request_id, ()), event.token_id)
    return got


def crowd(
    pages: type[PagedKVCache],
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_blocks: int = 5,
    max_tokens: int | Sequence[int] = 8,
    budget: int = 6,
    chunk: int = 3,
    prefix_caching: bool = False,
    scheduler: type[Scheduler] = Scheduler,
) -> Trace:
    """Serve the prompts (A, B, C ...) in blocks of 4, in a pool too small for all, in chunks.

    Greedy, and time is VirtualClock's: the same trace on every machine. `max_tokens` is one for
    all or one each. Without prefix caching a request that was thrown out runs all its tokens again.
    """
    recorder = Recorder()
    memory = pages.from_config(
        model.config,
        block_size=4,
        num_blocks=num_blocks,
        dtype=model.dtype,
        device=model.device,
        prefix_caching=prefix_caching,
        trace=recorder,
    )
    config = EngineConfig(max_num_batched_tokens=budget, long_prefill_token_threshold=chunk)
    clock = VirtualClock()
    engine = LLMEngine(model, config=config, scheduler=scheduler, memory=memory, clock=clock)
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    for i, (prompt, limit) in enumerate(zip(prompts, most, strict=True)):
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        engine.add_request(chr(ord("A") + i), prompt, params)
    engine.run()
    return recorder.trace()


def drama(model: CausalLM, tokenizer: Tokenizer, prefix_caching: bool = False) -> dict[str, Trace]:
    """Four users decode, and E brings a text that needs nearly the whole pool. Under both rules.

    E's whole prompt does not fit beside them, its first chunk does. So the naive rule lets E in and
    runs a chunk. The next chunk finds no room, and E, the last of those that run, gives way itself
    and is let in again: every second step carries hundreds of tokens that are thrown away, and the
    users wait for them. vLLM's pull request 37307 reports the same from a server, and cures it in
    the same way. With a prefix cache, what E finds and its next chunk are its whole prompt, so the
    naive rule asks for as much as ours; until the users have taken many of the blocks that E left.
    """
    sentences = [tokenizer.encode(text).ids for text in USERS]
    long = [token for i in range(REPEATS) for token in sentences[i % len(sentences)]]
    sizes: dict[str, Any] = {
        "num_blocks": 100,
        "max_tokens": [32, 32, 32, 32, 4],
        "budget": 512,
        "chunk": 256,
        "prefix_caching": prefix_caching,
    }
    rules = {"the whole prompt must fit": PagedKVCache, "the first chunk fits": EagerPages}
    return {name: crowd(pages, model, [*sentences, long], **sizes) for name, pages in rules.items()}
