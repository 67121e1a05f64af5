"""Introduced in notebook 03. One request: what was asked, what came so far, and where it stands.

Knows its own tokens, parameters and times; knows no queue, no cache and no model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tutorial_engine.engine.metrics import RequestMetrics
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
    """One request on its way. Only the scheduler changes it.

    `token_ids` are prompt and output; the K and V of the first `num_computed_tokens` are in the
    cache. Their difference is the work that is left: the only thing that the scheduler looks at.
    Of n continuations of one prompt each is such a request: see `join`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampler: Sampler,
        checker: StopChecker,
        arrival: float = 0.0,
        on_token: TokenCallback | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.sampler, self.checker, self.on_token = sampler, checker, on_token
        self.arrival = arrival
        self.first_scheduled: float | None = None
        self.finished: float | None = None
        self.token_times: list[float] = []
        self.tokens: list[SampledToken] = []
        self.finish: Finish | None = None
        self.error: str | None = None
        self.index = 0  # among the continuations of its prompt
        self.is_queued = False
        self.is_told = False  # its end was delivered
        self._samples: tuple[Request, ...] = ()
        self._status = RequestStatus.WAITING

    @staticmethod
    def join(samples: Sequence["Request"]) -> "Request":
        """Make these the continuations of one prompt → the first, which stands for all.

        The others are queued when it has computed the prompt, which they then share.
        """
        for i, sample in enumerate(samples):
            sample.index, sample._samples = i, tuple(samples)
        return samples[0]

    @property
    def samples(self) -> tuple["Request", ...]:
        """All continuations of its prompt, itself among them."""
        return self._samples or (self,)

    @property
    def held(self) -> tuple["Request", ...]:
        """Those that wait for it to compute the prompt."""
        if self.index or not self._samples:
            return ()
        return tuple(s for s in self._samples[1:] if not (s.is_queued or s.is_over))

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.checker.params

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

    def output(self) -> RequestOutput | None:
        """What became of it and of all its samples; None as long as one is not over."""
        first, *_ = samples = self.samples
        if not all(sample.is_over for sample in samples):
            return None
        metrics = first.metrics
        if len(samples) > 1:
            metrics = metrics._replace(finished=max(sample.finished or 0 for sample in samples))
        prompt = tuple(first.token_ids[: first.num_prompt_tokens])
        errors = (sample.error for sample in samples if sample.error is not None)
        completions = tuple(sample._completion() for sample in samples)
        return RequestOutput(first.request_id, prompt, completions, metrics, next(errors, None))

    def _completion(self) -> CompletionOutput:
        assert self.finish is not None, f"request {self.request_id} is not over"
        return CompletionOutput(
            index=self.index,
            text=self.checker.text,
            token_ids=self.output_token_ids,
            finish_reason=self.finish.reason,
            stop_reason=self.finish.stop_reason,
            tokens=tuple(self.tokens),
            cumulative_logprob=self._cumulative_logprob(),
        )

    def _cumulative_logprob(self) -> float | None:
        """Of the tokens that it has; its sampler may have drawn one more that nobody got."""
        if self.params.logprobs is None:
            return None
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)
