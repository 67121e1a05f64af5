"""Introduced in notebook 03. From what a caller hands in to a request that can run, or an error.

Knows the model's limits, the tokenizer and what the scheduler refuses; puts nothing in a queue.
"""

import math
from collections.abc import Container, Sequence
from itertools import count

from tokenizers import Tokenizer

from tutorial_engine.engine.clock import Clock
from tutorial_engine.engine.prompts import Prompt, check_token_ids, prompt_token_ids
from tutorial_engine.engine.request import Request, TokenCallback
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker


class Intake:
    """Makes requests: prompts become token ids, each gets its own sampler and stop checker.

    `taken` are the ids of requests that are here.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        clock: Clock,
        taken: Container[str] = (),
    ) -> None:
        self.config, self.tokenizer, self.taken = config, tokenizer, taken
        self.scheduler, self.clock = scheduler, clock
        self._numbers = count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        arrival: float | None = None,
        on_token: TokenCallback | None = None,
        sampler: Sampler | Sequence[Sampler] | None = None,
        what: str | None = None,
    ) -> Request:
        """One request; a number is its id, and now its arrival, unless given.

        With n continuations it is the first of its `samples`, and `sampler` a list of n.
        ValueError for a bad one, which the message calls `what`.
        """
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params must be SamplingParams, got {params!r}; an id is request_id=")
        params = SamplingParams() if params is None else params
        name = self._fresh_id(params.n) if request_id is None else request_id
        if not isinstance(name, str) or not name:
            raise ValueError(f"a request_id is a text that is not empty, got {name!r}")
        if not isinstance(prompt, str | int) and any(isinstance(part, str) for part in prompt):
            raise ValueError("this takes one prompt: call it once for each text, or use generate")
        if arrival is not None and not math.isfinite(arrival):
            raise ValueError(f"arrival must be a time in seconds, got {arrival}")
        what = what or f"the prompt of request {name}"
        (token_ids,) = prompt_token_ids([prompt], self.tokenizer)
        check_token_ids(what, token_ids, self.config.vocab_size)
        self.scheduler.check(what, len(token_ids))
        arrival = self.clock.now() if arrival is None else arrival
        own = [params] if params.n == 1 else [params.sample(i) for i in range(params.n)]
        eos = self.config.eos_token_ids
        samplers = [Sampler(one, eos) for one in own] if sampler is None else sampler
        samplers = [samplers] if isinstance(samplers, Sampler) else samplers
        if len(samplers) != params.n:
            raise ValueError(f"{params.n} continuations, but {len(samplers)} samplers")
        room = self.scheduler.max_len - len(token_ids)
        samples = []
        for i, (one, chooses) in enumerate(zip(own, samplers, strict=True)):
            checker = StopChecker(one, eos, self.tokenizer, max_new_tokens=room)
            its = _sample_id(name, i)
            samples.append(Request(its, token_ids, chooses, checker, arrival, on_token))
        return Request.join(samples) if len(samples) > 1 else samples[0]

    def _fresh_id(self, n: int) -> str:
        names = (f"r{i}" for i in self._numbers)
        return next(x for x in names if all(_sample_id(x, i) not in self.taken for i in range(n)))

    def make_all(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """A request per prompt, all or none. ValueError if one is bad."""
        sequences = prompt_token_ids(prompts, self.tokenizer)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(sequences)
        if isinstance(params, str) or not isinstance(params, Sequence):
            raise ValueError(f"params must be SamplingParams, or a list of them, got {params!r}")
        if len(params) != len(sequences):
            raise ValueError(f"{len(sequences)} prompts but {len(params)} SamplingParams")
        pairs = enumerate(zip(sequences, params, strict=True))
        return [self.make(ids, own, what=f"prompt {i}") for i, (ids, own) in pairs]


def _sample_id(name: str, index: int) -> str:
    """The first of a prompt's samples has the request's own id."""
    return f"{name}.{index}" if index else name
