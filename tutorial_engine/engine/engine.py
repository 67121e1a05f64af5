"""Introduced in notebook 03. The engine: requests come and go, each step is one forward for all.

Knows how scheduler, model runner, samplers and trace work together; decides nothing itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from tutorial_engine.cache.memory import KVCacheManager, RowManager
from tutorial_engine.engine.clock import Clock, VirtualClock, WallClock
from tutorial_engine.engine.delivery import Delivery
from tutorial_engine.engine.intake import Intake
from tutorial_engine.engine.interrupts import interrupts_wait, uninterrupted
from tutorial_engine.engine.model_runner import ModelRunner, Outcome
from tutorial_engine.engine.prompts import Prompt
from tutorial_engine.engine.request import Request, RequestOutput, StepOutput, TokenCallback
from tutorial_engine.engine.scheduler import ScheduledRequest, Scheduler
from tutorial_engine.engine.step_plan import EngineConfig, Update
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler, sample_each
from tutorial_engine.trace.events import (
    EngineState,
    Planned,
    Recorder,
    Setting,
    StepBegan,
    StepEnded,
)

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "StepOutput"]


class LLMEngine:
    """Serves many requests, each as if it were alone. For one thread.

    What a step brings is delivered once: by `step()`, or by the `generate` or `stream` that the
    request came with. Scheduler, memory and clock can be exchanged; a Recorder gets the trace.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        scheduler: type[Scheduler] = Scheduler,
        memory: KVCacheManager | None = None,
        clock: Clock | None = None,
        trace: Recorder | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {config!r}")
        cache = config.rows(model.dtype, model.device)
        self.config = replace(config, max_model_len=cache.length_for(model.config))
        self.model, self.tokenizer, self.trace = model, tokenizer, trace
        self.clock = WallClock() if clock is None else clock
        self.memory = RowManager.from_config(model.config, cache) if memory is None else memory
        self.memory.trace = trace
        self.scheduler = scheduler(self.config, self.memory, self.clock.now, trace)
        self.model_runner = ModelRunner(model, self.memory.storage)
        self.requests: dict[str, Request] = {}  # request_id -> those that are not over
        self.num_steps = 0
        self._intake = Intake(model.config, tokenizer, self.scheduler, self.clock, self.requests)
        self._delivery = Delivery(self._fail)
        self._in_step = False
        self._gone: list[Request] = []  # their generate or stream is over
        if trace is not None:
            trace.bind(self.clock.now, self.settings)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path = TINY,
        config: EngineConfig | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "LLMEngine":
        """An engine for a checkpoint: a folder, a hub id, or the shipped model."""
        return cls(load_model(path_or_id, device, dtype), load_tokenizer(path_or_id), config)

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of its engine."""
        limits = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        prices = self.clock.prices if isinstance(self.clock, VirtualClock) else {}
        return {"policy": type(self.scheduler).__name__, **limits, **prices, **self.memory.settings}

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there anything left to run, or to deliver?"""
        return self.scheduler.has_unfinished or self._delivery.is_pending

    @uninterrupted
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        arrival: float | None = None,
        on_token: TokenCallback | None = None,
        sampler: Sampler | Sequence[Sampler] | None = None,
    ) -> str:
        """Put a request (text or token ids) in the queue, at any time → its id.

        `on_token` is called with each of its StepOutputs; if it raises, this request alone ends.
        `sampler` (n of them, if params.n) is used in place of what params describe. ValueError for
        what can never run, and for an id that is still here.
        """
        request = self._intake.make(prompt, params, request_id, arrival, on_token, sampler)
        self._enter(request)
        return request.request_id

    @uninterrupted
    def abort(self, request_id: str) -> None:
        """End a request in any state, now, with all its samples. The end comes like a token."""
        if request_id not in self.requests:
            raise ValueError(f"no request {request_id!r} is here: it never was, or it is over")
        left = [sample for sample in self.requests[request_id].samples if not sample.is_over]
        interrupt = self._deliver_all([self.scheduler.abort(sample) for sample in left])
        if interrupt is not None:
            raise interrupt

    def step(self) -> list[StepOutput]:
        """One forward for everything that is scheduled → what it brought; [] when all is done."""
        self._guarded_step()
        return self._delivery.take()

    def _step(self) -> None:
        """What an engine is: schedule, one forward for all, sample, update; again and again."""
        scheduled = self._schedule()
        if scheduled:
            outcome = self.model_runner.run(scheduled)
            with interrupts_wait():
                sampled = self._sample(outcome)
                self._update(scheduled, sampled)

    def _guarded_step(self) -> None:
        if self._in_step:
            raise RuntimeError("a step is under way: a callback cannot run another one")
        self._in_step = True
        try:
            self._step()
        finally:
            self._in_step = False
            self._sweep()

    @uninterrupted
    def _schedule(self) -> list[ScheduledRequest]:
        if not self.scheduler.has_unfinished:
            return []
        if self.trace is not None:
            self.trace.record(StepBegan)
        scheduled = self.scheduler.schedule()
        assert scheduled, "a step without tokens: the scheduler is stuck"
        if self.trace is not None:
            self.trace.record(Planned)
        return scheduled

    def _sample(self, outcome: Outcome) -> dict[str, SampledToken | Exception]:
        """The next token, by request id, of each request that is due one; or what went wrong."""
        samplers = [share.request.sampler for share in outcome.ready]
        ids = [share.request.request_id for share in outcome.ready]
        tokens = zip(ids, sample_each(outcome.logits, samplers), strict=True)
        return dict(tokens) | outcome.faults

    def _update(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: Mapping[str, SampledToken | Exception],
    ) -> None:
        """Tell the scheduler, and deliver what comes of it."""
        num_tokens = sum(share.num_tokens for share in scheduled)
        self.clock.forward_done(num_tokens)
        interrupt = self._deliver_all(self.scheduler.update(scheduled, sampled))
        if self.trace is not None:
            self.trace.record(StepEnded, num_tokens)
            self.trace.step += 1
        self.num_steps += 1
        if interrupt is not None:
            raise interrupt

    def _deliver_all(self, updates: Iterable[Update]) -> BaseException | None:
        """Deliver each → a Ctrl-C that a callback raised: first all are told."""
        interrupt: BaseException | None = None
        for update in updates:
            try:
                self._deliver(update.request, update.token)
            except BaseException as error:
                interrupt = error
        return interrupt

    def _deliver(self, request: Request, token: SampledToken | None) -> None:
        if request.is_over:
            self._forget(request)
        self._delivery.deliver(request, token)

    def _fail(self, request: Request, fault: Exception) -> None:
        self.scheduler.fail(request, fault)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if all(sample.is_over for sample in request.samples):
            for sample in request.samples:
                self.requests.pop(sample.request_id, None)

    def run(self, max_steps: int | None = None) -> list[RequestOutput]:
        """Step until all is done, or max_steps are → the outputs of what ended, in that order.

        After an interrupt they are still there, for the next call.
        """
        end = None if max_steps is None else self.num_steps + max_steps
        while self.scheduler.has_unfinished and (end is None or self.num_steps < end):
            self._guarded_step()
        return [result.output for result in self._delivery.take() if result.output is not None]

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt until it stops → one output each, in the order of the prompts.

        Requests that were here before run along. ValueError, before anything runs, for what cannot
        work; an interrupt aborts what this call brought in, and nothing else.
        """
        requests = self._intake.make_all(prompts, params)
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
            for result in self._serve(requests):
                if result.output is not None:
                    outputs[result.request_id] = result.output
                    bar.update()
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StepOutput]:
        """As `generate`, token by token, in the order in which they come. Errors come at once.

        The requests enter with the first token; leaving the loop early (or closing it) aborts them.
        """
        return self._serve(self._intake.make_all(prompts, params))

    def _serve(self, requests: Sequence[Request]) -> Iterator[StepOutput]:
        inbox: list[StepOutput] = []
        left = {request.request_id for request in requests}
        try:
            for request in requests:
                for sample in request.samples:
                    sample.arrival = self.clock.now()
                self._enter(request, inbox)
            while left:
                if not inbox:
                    self._guarded_step()
                delivered = inbox.copy()
                inbox.clear()
                for result in delivered:
                    if result.output is not None:
                        left.discard(result.request_id)
                    yield result
        finally:
            self._gone += requests
            self._sweep()

    @uninterrupted
    def _sweep(self) -> None:
        """Abort what a generate or stream left behind; one that ends within a step, after it."""
        while self._gone and not self._in_step:
            request = self._gone.pop()
            if self.requests.get(request.request_id) is request:
                self.abort(request.request_id)

    def state(self) -> EngineState:
        """Queues and unfinished requests as they stand, in the form that a replay has."""
        return self.scheduler.state()

    def check_integrity(self) -> None:
        """AssertionError if queues, requests and memory do not agree."""
        self.scheduler.check_integrity()
        queued = {r.request_id for r in [*self.scheduler.waiting, *self.scheduler.running]}
        known = {k for k, r in self.requests.items() if r.is_queued and not r.is_over}
        assert queued == known, f"{queued} are queued, {known} known"

    @uninterrupted
    def _enter(self, request: Request, inbox: list[StepOutput] | None = None) -> None:
        samples = {sample.request_id: sample for sample in request.samples}
        if here := sorted(samples.keys() & self.requests.keys()):
            raise ValueError(f"request {here[0]!r} is here already: choose another id")
        self.scheduler.add(request)
        self.requests |= samples
        if inbox is not None:
            self._delivery.register(request, inbox)
