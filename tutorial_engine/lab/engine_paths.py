"""Introduced in notebook 03. The engine's rows of the equality ledger.

Knows the engine from outside, and how to make it say given tokens; knows no scheduler rule.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler


class ForcedSampler(Sampler):
    """Says given tokens (its own greedy ones where none are given) and keeps the logits it saw."""

    def __init__(self, params: SamplingParams, tokens: Iterable[int] | None = None) -> None:
        super().__init__(params)
        self.logits: list[Tensor] = []
        self._tokens = None if tokens is None else list(tokens)

    def sample(self, logits: Tensor) -> SampledToken:
        """As Sampler.sample; logits [V] that are no numbers are refused there."""
        token = super().sample(logits)
        self.logits.append(logits.clone())
        return token if self._tokens is None else SampledToken(self._tokens[len(self.logits) - 1])


@dataclass(frozen=True)
class EnginePath:
    """A path through the engine, each of its steps followed by an integrity check.

    The prompts come in this `order`, `apart` steps from one to the next (0: all at once).
    `neighbours` are prompts that run along until `abort_after` steps (None: to the end). With
    several `samples` of each prompt the logits are the last one's.
    """

    make_engine: Callable[[], LLMEngine]
    order: Callable[[int], Sequence[int]] = range
    apart: int = 0
    neighbours: Sequence[Sequence[int]] = ()
    abort_after: int | None = None
    samples: int = 1

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """As ledger.AnyPath.run."""
        engine = self.make_engine()
        params = greedy = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        if self.samples > 1:  # who draws is chosen below
            params = replace(params, n=self.samples, temperature=1.0)
        forced = [None] * len(prompts) if tokens is None else tokens.tolist()
        several = [[ForcedSampler(greedy, own) for _ in range(self.samples)] for own in forced]
        samplers = [own[-1] for own in several]
        long = SamplingParams(max_tokens=10**6, ignore_eos=True)
        others = {engine.add_request(prompt, long) for prompt in self.neighbours}
        to_come, step = list(self.order(len(prompts))), 0
        while to_come or any(len(sampler.logits) < num_tokens for sampler in samplers):
            while to_come and step >= self.apart * (len(prompts) - len(to_come)):
                i = to_come.pop(0)
                engine.add_request(prompts[i], params, sampler=several[i])
            if step == self.abort_after:
                for request_id in others & engine.requests.keys():
                    engine.abort(request_id)
            if not to_come and not engine.has_unfinished_requests:
                raise ValueError(f"a request ended before its {num_tokens} tokens: raise max_len")
            engine.step()
            engine.check_integrity()
            step += 1
        return torch.stack([torch.stack(sampler.logits) for sampler in samplers])


def engine_paths(
    model: Qwen3ForCausalLM, neighbours: Sequence[Sequence[int]], max_len: int = 128
) -> dict[str, EnginePath]:
    """Rows for the ledger, name -> path; `neighbours` are other prompts for two of them."""

    def path(budget: int, **how: Any) -> EnginePath:
        config = EngineConfig(max_model_len=max_len, max_num_batched_tokens=budget)
        return EnginePath(lambda: LLMEngine(model, config=config), **how)

    def shuffled(n: int) -> list[int]:
        return random.Random(n).sample(range(n), n)

    return {
        "engine, batched": path(512),
        "engine, chunked prefill, budget 4": path(4),
        "engine, random arrival order": path(16, order=shuffled, apart=2),
        "engine, neighbours": path(16, neighbours=neighbours),
        "engine, a neighbour aborted": path(16, neighbours=neighbours, abort_after=3),
    }
