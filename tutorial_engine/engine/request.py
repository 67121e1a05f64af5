"""Introduced in notebook 02. One request: what was asked, what came so far, and where it stands.

The sequence object of the plain loop and of the engine. Knows its own tokens, parameters and times;
knows no queue, no cache and no model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import Finish, StopChecker


class RequestStatus(Enum):
    """Where a request stands; what may follow is in TRANSITIONS."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    ERROR = "error"


_ENDS = {RequestStatus.ABORTED, RequestStatus.ERROR}

# status -> those that may follow it
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, *_ENDS}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED, *_ENDS}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, *_ENDS}),
    RequestStatus.FINISHED: frozenset(),
    RequestStatus.ABORTED: frozenset(),
    RequestStatus.ERROR: frozenset(),
}


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt. `finish_reason` is "stop", "length", "abort" or "error".

    The stop token is in token_ids and not in text; `stop_reason` is the stop id or string, if one
    ended it; `tokens` has the log-probabilities, where they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    tokens: tuple[SampledToken, ...] = field(repr=False)
    cumulative_logprob: float | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of a request: its continuations and its times. `error` says what went wrong.

    Of several continuations the metrics have the first one's tokens and the last one's end.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    error: str | None = None


class StepOutput(NamedTuple):
    """What a step brought to one request: a token and the text that is safe to show, or its end.

    Put together, the texts of a request's outputs are its text; of its continuation `sample`, if it
    has several. `output` comes with the last one of all.
    """

    request_id: str
    token: SampledToken | None
    text: str
    finish: Finish | None
    output: RequestOutput | None
    sample: int = 0


TokenCallback = Callable[[StepOutput], None]


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
        self.tokens: list[SampledToken] = []
        self.finish: Finish | None = None
        self.error: str | None = None
        self.group = SampleGroup([self])
        self._status = RequestStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are known and not computed: many before the prompt is done, 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The tokens sampled so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def status(self) -> RequestStatus:
        """Where it stands."""
        return self._status

    @status.setter
    def status(self, to: RequestStatus) -> None:
        """ValueError for a state that TRANSITIONS does not allow from here."""
        if to not in TRANSITIONS[self._status]:
            raise ValueError(
                f"request {self.request_id} is {self._status.value} and cannot become {to.value}"
            )
        self._status = to

    @property
    def is_over(self) -> bool:
        """Finished, aborted or failed: nothing may follow."""
        return not TRANSITIONS[self._status]

    @property
    def metrics(self) -> RequestMetrics:
        """Its times so far."""
        times = tuple(self.token_times)
        return RequestMetrics(self.arrival, self.first_scheduled, times, self.finished)

    def append(self, token: SampledToken, now: float) -> Finish | None:
        """One sampled token more; why it is the last one, if it is."""
        finish = self.checker.update(token.token_id)  # may raise: then nothing was appended
        self.token_ids.append(token.token_id)
        self.tokens.append(token)
        self.token_times.append(now)
        return finish

    def end(
        self, status: RequestStatus, finish: Finish, now: float, error: str | None = None
    ) -> None:
        """Nothing follows. What the checker held back of the text is text now."""
        self.status = status
        if self.checker.finish is None:
            self.checker.end(finish)
        self.finish, self.finished, self.error = finish, now, error

    def completion(self) -> CompletionOutput:
        """What became of it. ValueError before it is over."""
        if self.finish is None:
            raise ValueError(f"request {self.request_id} is {self.status.value}: run it to its end")
        known = [token.logprob for token in self.tokens if token.logprob is not None]
        return CompletionOutput(
            index=self.group.samples.index(self),
            text=self.checker.text,
            token_ids=self.output_token_ids,
            finish_reason=self.finish.reason,
            stop_reason=self.finish.stop_reason,
            tokens=tuple(self.tokens),
            cumulative_logprob=None if self.params.logprobs is None else math.fsum(known),
        )


class SampleGroup:
    """The continuations of one prompt, one for most. The first computes the prompt for all.

    `unqueued` are the others until it has; then they fork from it. `owner` is who takes the
    results: a `generate` or `stream`; None is whoever calls `step()`.
    """

    def __init__(self, samples: Sequence[Request], on_token: TokenCallback | None = None) -> None:
        self.samples, self.on_token = tuple(samples), on_token
        self.unqueued = list(samples[1:])
        self.owner: object = None
        self.num_told = 0  # samples whose end was delivered
        for sample in samples:
            sample.group = self

    @property
    def request_id(self) -> str:
        """The first one's, by which callers know them all."""
        return self.samples[0].request_id

    @property
    def is_over(self) -> bool:
        """Are all of them?"""
        return all(sample.is_over for sample in self.samples)

    def output(self) -> RequestOutput:
        """What became of them, once all are over."""
        first = self.samples[0]
        ends = [sample.finished for sample in self.samples if sample.finished is not None]
        errors = (sample.error for sample in self.samples if sample.error is not None)
        return RequestOutput(
            self.request_id,
            tuple(first.token_ids[: first.num_prompt_tokens]),
            tuple(sample.completion() for sample in self.samples),
            first.metrics._replace(finished=max(ends)),
            next(errors, None),
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
