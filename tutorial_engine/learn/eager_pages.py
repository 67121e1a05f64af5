"""Introduced in notebook 04. The naive admission: let a request in as soon as its first chunk fits.

Kept beside PagedKVCache, which asks for room for all tokens. Both give the same tokens; what the
naive one costs is read from a trace.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Preempted, Recorder, Scheduled, TokenSampled, Trace


class EagerPages(PagedKVCache):
    """Pages that let a request in when the tokens it would run NOW fit. Right, and slow.

    The rest of its prompt needs blocks in the next steps. Others hold them: somebody is thrown out,
    is let in again at once, and starts anew.
    """

    def tokens_to_admit(self, token_ids: Sequence[int], num_new: int) -> Sequence[int]:
        """What is found in the cache and the first chunk, and no more."""
        known = len(self.blocks.find(token_ids)) * self.block_size
        return token_ids[: known + num_new]


class Cost(NamedTuple):
    """What a run did, and did in vain: `num_recomputed` tokens were run more than once.

    `num_preemptions` counts all; `preempted` is request_id → how often, for those who gave way.
    """

    num_steps: int
    num_preemptions: int
    preempted: dict[str, int]
    num_recomputed: int


def cost(trace: Trace) -> Cost:
    """Count preemptions, and tokens that were run again, in a trace."""
    gave_way = Counter(e.request_id for e in trace.events if isinstance(e, Preempted))
    ran, ends = 0, dict[str, int]()
    for event in trace.events:
        if isinstance(event, Scheduled):
            ran += len(event.slots)
            end = event.first_position + len(event.slots)
            ends[event.request_id] = max(ends.get(event.request_id, 0), end)
    return Cost(trace.num_steps, gave_way.total(), dict(gave_way), ran - sum(ends.values()))


def tokens(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Request_id → the tokens that it got, from a trace."""
    got: dict[str, tuple[int, ...]] = {}
    for event in trace.events:
        if isinstance(event, TokenSampled):
            got[event.request_id] = (*got.get(event.request_id, ()), event.token_id)
    return got


def crowd(
    pages: type[PagedKVCache],
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    num_blocks: int = 5,
    max_tokens: int = 8,
    budget: int = 6,
    chunk: int = 3,
    prefix_caching: bool = False,
) -> Trace:
    """Serve the prompts (A, B, C ...) in blocks of 4, in a pool too small for all, in chunks.

    Greedy, and time is VirtualClock's: the same trace on every machine. Without prefix caching a
    request that was thrown out runs all its tokens again.
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
    engine = LLMEngine(model, config=config, memory=memory, clock=VirtualClock())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, params, chr(ord("A") + i))
    engine.run()
    return recorder.trace()
