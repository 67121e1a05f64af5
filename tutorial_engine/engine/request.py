"""One request: what was asked, what came so far, and where it stands.

The sequence object of the plain loop and of the engine. Knows its own tokens, parameters and times;
knows no queue, no cache and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import MOST_BYTES, Finish, StopChecker


class RequestStatus(Enum):
    """Where a request stands. Nothing follows the last three."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    ERROR = "error"


class Logprob(NamedTuple):
    """The natural log of a token's probability, its rank (1: the likeliest), and its own text.

    Of the tokens of one character the last has its text, and the others have none.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One continuation of a prompt, as far as it has come. The fields are vLLM's.

    `text` is what is safe to show: it only grows. The stop token is in token_ids, and in text only
    where include_stop_str_in_output asks for it.
    `logprobs` has a table {token id: Logprob} for each token, where they were asked for.
    `finish_reason` is None until it is "stop", "length", "abort" or "error"; `stop_reason` is the
    stop id or string, if one ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def finished(self) -> bool:
        """Is it over?"""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request, as far as it has come: its continuations and its times. The fields are vLLM's.

    `prompt` is None where token ids were given. `num_cached_tokens` of the prompt were found in the
    cache. `error` says what went wrong, if something did. Of several continuations the metrics have
    the first one's tokens and the last one's end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    error: str | None = None
    prompt_logprobs: None = None  # vLLM can tell them; this engine keeps no logits of a prompt


class Request:
    """One sequence on its way: a prompt, and one continuation of it.

    `token_ids` are prompt and output; K and V of the first `num_computed_tokens` are in the cache.
    Their difference is the work that is left: the only thing that a loop or scheduler looks at.
    Without a sampler and checker it gets those that `params` describe.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        sampler: Sampler | None = None,
        checker: StopChecker | None = None,
        arrival: float = 0.0,
    ) -> None:
        params = SamplingParams() if params is None else params
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.params = params
        self.sampler = Sampler(params) if sampler is None else sampler
        self.checker = StopChecker(params) if checker is None else checker
        self.arrival = arrival
        self.first_scheduled: float | None = None
        self.finished: float | None = None
        self.token_times: list[float] = []
        self.logprobs: list[dict[int, Logprob]] = []  # of each token, if they were asked for
        self.cumulative_logprob = 0.0
        self.finish: Finish | None = None
        self.error: str | None = None
        self.num_cached_tokens: int | None = None  # found in the cache when it was first admitted
        self.status = RequestStatus.WAITING
        self.group = SampleGroup([self])

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are known and not computed: many before the prompt is done, 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_over(self) -> bool:
        """Finished, aborted or failed: nothing may follow."""
        return self.finish is not None

    @property
    def metrics(self) -> RequestMetrics:
        """Its times so far."""
        times = tuple(self.token_times)
        return RequestMetrics(self.arrival, self.first_scheduled, times, self.finished)

    def append(self, token: SampledToken, now: float) -> Finish | None:
        """One sampled token more; why it is the last one, if it is."""
        finish = self.checker.update(token.token_id)  # may raise: then nothing was appended
        self.token_ids.append(token.token_id)
        self.token_times.append(now)
        if token.logprob is not None:
            self.cumulative_logprob += token.logprob
            self.logprobs.append(self._logprobs_of(token))
        return finish

    def end(
        self, status: RequestStatus, finish: Finish, now: float, error: str | None = None
    ) -> None:
        """Nothing follows. What the checker held back of the text is text now."""
        assert not self.is_over, f"request {self.request_id} has ended: {self.finish}"
        self.status, self.finish, self.finished, self.error = status, finish, now, error
        if self.checker.finish is None:
            self.checker.end(finish)

    def completion(self, index: int = 0) -> CompletionOutput:
        """What came of it so far, as the continuation `index` of its prompt."""
        asked, finish = self.params.logprobs is not None, self.finish
        return CompletionOutput(
            index=index,
            text=self.checker.text,
            token_ids=self.output_token_ids,
            cumulative_logprob=self.cumulative_logprob if asked else None,
            logprobs=list(self.logprobs) if asked else None,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
        )

    def _logprobs_of(self, token: SampledToken) -> dict[int, Logprob]:
        """The sampled token first, then the best ones."""
        assert token.logprob is not None and token.rank is not None, "one does not come alone"
        found = {token.token_id: (token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top_logprobs, 1):
            found.setdefault(token_id, (logprob, rank))
        first = max(self.num_prompt_tokens, self.num_tokens - 1 - MOST_BYTES)
        before = self.token_ids[first:-1]
        return {i: Logprob(*known, self.checker.decode(i, before)) for i, known in found.items()}


class SampleGroup:
    """The continuations of one prompt, one for most. The first computes the prompt for all.

    `unqueued` are the others until it has; then they fork from it.
    """

    def __init__(self, samples: Sequence[Request], prompt: str | None = None) -> None:
        self.samples, self.prompt = tuple(samples), prompt
        self.request_id = samples[0].request_id  # the first one's: callers know them all by it
        self.unqueued = list(samples[1:])
        for sample in samples:
            sample.group = self

    @property
    def is_over(self) -> bool:
        """Are all of them?"""
        return all([sample.is_over for sample in self.samples])

    def output(self) -> RequestOutput:
        """What came of them so far."""
        first, is_over = self.samples[0], self.is_over
        metrics = first.metrics
        if len(self.samples) > 1:
            last = max(sample.finished or 0.0 for sample in self.samples)
            metrics = metrics._replace(finished=last if is_over else None)
        errors = [sample.error for sample in self.samples if sample.error is not None]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[sample.completion(i) for i, sample in enumerate(self.samples)],
            finished=is_over,
            metrics=metrics,
            num_cached_tokens=first.num_cached_tokens or 0,
            error=errors[0] if errors else None,
        )


class ScheduledRequest(NamedTuple):
    """What a step runs of a request: num_tokens at allocation.first_position, and their slots."""

    request: Request
    num_tokens: int
    allocation: Allocation

    @property
    def token_ids(self) -> list[int]:
        """The tokens to run."""
        first = self.allocation.first_position
        return self.request.token_ids[first : first + self.num_tokens]

    @property
    def yields_token(self) -> bool:
        """Does it reach its newest token? Only then do its logits say what comes next."""
        return self.allocation.first_position + self.num_tokens == len(self.request.token_ids)
