"""Introduced in notebook 03. The engine: requests come and go, each step is one forward for all.

Knows how scheduler, runner, samplers and trace work together; decides nothing itself.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from tutorial_engine.cache.config import length_for
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.checks import check_time
from tutorial_engine.engine.clock import Clock, VirtualClock, WallClock
from tutorial_engine.engine.delivery import Inbox, Update, interrupts_wait
from tutorial_engine.engine.intake import (
    Intake,
    Prompt,
    params_for_each,
    prompt_token_ids,
    sample_ids,
)
from tutorial_engine.engine.request import (
    Request,
    RequestOutput,
    SampleGroup,
    ScheduledRequest,
    StepOutput,
    TokenCallback,
)
from tutorial_engine.engine.runner import ModelOutput, ModelRunner, runner_for
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig
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


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """A SchedulerConfig, and the rows that an engine makes of it."""

    def rows(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """A row for each request that may run at once, as StaticKVCache.from_config takes it."""
        sizes = {"max_seqs": self.max_num_seqs, "max_len": self.max_model_len}
        return {**sizes, "dtype": dtype, "device": device}


class LLMEngine:
    """Serves many requests, each as if it were alone. For one thread.

    What a step brings is delivered once: by `step()`, or by the `generate` or `stream` that the
    request came with. Scheduler, memory, clock and runner can be exchanged; a memory serves one
    engine at a time. A Recorder gets the trace: `trace` for the rows that the engine makes; a
    memory of your own is made with its own. ValueError for what does not fit together.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        scheduler: type[Scheduler] = Scheduler,
        memory: KVMemory | None = None,
        clock: Clock | None = None,
        trace: Recorder | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig, got {config!r}")
        rows = config.rows(model.dtype, model.device)
        self.config = replace(config, max_model_len=length_for(model.config, config.max_model_len))
        if memory is None:
            memory = StaticKVCache.from_config(model.config, **rows, trace=trace)
        elif not isinstance(memory, KVMemory):
            raise ValueError(f"memory must be a KVMemory (rows, pages, cells), got {memory!r}")
        elif trace is not None and trace is not memory.trace:
            raise ValueError(
                "this memory was made without that recorder, so its blocks would be absent from "
                "the trace: give trace= to the memory when you make it, the engine takes it over"
            )
        self.model, self.tokenizer, self.memory, self.trace = model, tokenizer, memory, memory.trace
        self.clock = WallClock() if clock is None else clock
        self.scheduler = scheduler(self.config, memory, self.clock.now, self.trace)
        self.runner = runner_for(model, memory.storage, runner)
        self.requests: dict[str, Request] = {}  # request_id -> until its prompt's samples are over
        self.num_steps = 0
        self._intake = Intake(
            tokenizer,
            model.config.vocab_size,
            model.config.eos_token_ids,
            self.scheduler.max_len,
            self.scheduler.check,
        )
        self._names = map("r{}".format, count())  # a generator ends with a Ctrl-C in it
        self._inbox = Inbox(self._fail)
        self._in_step, self._thread = False, 0  # who runs the step that is under way
        self._to_sweep: list[SampleGroup] = []  # their generate or stream is over
        self._take_memory()
        if self.trace is not None:
            self.trace.bind(self.clock.now, self.settings)

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
        """Is there anything left to run, or to take?"""
        return self.scheduler.has_unfinished or self._inbox.is_pending

    # -- requests come and go

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
        with interrupts_wait():
            name = self._new_id(params) if request_id is None else request_id
            group = self._intake.make(name, prompt, params, on_token=on_token, sampler=sampler)
            self._enter(group, self.clock.now() if arrival is None else arrival)
        return name

    def _new_id(self, params: SamplingParams | None) -> str:
        n = params.n if isinstance(params, SamplingParams) else 1
        return next(x for x in self._names if self.requests.keys().isdisjoint(sample_ids(x, n)))

    def _enter(self, group: SampleGroup, arrival: float) -> None:
        check_time("arrival", arrival)
        samples = {sample.request_id: sample for sample in group.samples}
        if here := sorted(samples.keys() & self.requests.keys()):
            raise ValueError(f"request {here[0]!r} is here already: choose another id")
        if self.memory.user is not self:
            self._take_memory()
        for sample in group.samples:
            sample.arrival = arrival
        self.scheduler.add(group.samples[0])
        self.requests |= samples

    def _take_memory(self) -> None:
        """From now on it is this engine's. ValueError while it serves another one, or holds things.

        Requests of two engines have the same names: each would write over the other's.
        """
        user, held = self.memory.user, self.memory.seq_ids
        if isinstance(user, LLMEngine) and user.scheduler.has_unfinished:
            raise ValueError(
                f"this memory serves another engine (memory.user), whose requests "
                f"{sorted(user.requests)} are not over: finish or abort them, or make a new memory"
            )
        if held:
            raise ValueError(
                f"this memory holds the sequences {list(held)}, which are not this engine's: free "
                "them (memory.free(name)), or make a new memory"
            )
        self.memory.user = self

    def abort(self, request_id: str) -> None:
        """End a request in any state, now, with all its samples. The end comes like a token."""
        if not isinstance(request_id, str) or request_id not in self.requests:
            raise ValueError(f"no request {request_id!r} is here: it never was, or it is over")
        with interrupts_wait():
            left = [s for s in self.requests[request_id].group.samples if not s.is_over]
            updates = [self.scheduler.abort(sample) for sample in left]
            self._forget(self.requests[request_id].group)
            self._inbox.deliver(updates)

    # -- what an engine is

    def step(self) -> list[StepOutput]:
        """One forward for everything that is scheduled → what it brought to whoever calls this.

        [] also when it only ran a part of a prompt: loop on `has_unfinished_requests`.
        """
        self._step()
        return self._inbox.take()

    def _step(self) -> None:
        """What an engine does: schedule, one forward for all, sample, update, deliver."""
        if self._in_step:
            raise RuntimeError(self._why_not_now())
        self._in_step, self._thread = True, threading.get_ident()
        try:
            scheduled = self._schedule()
            if scheduled:
                output = self.runner.run(scheduled)
                with interrupts_wait():
                    sampled = self._sample(output)
                    updates = self._update(scheduled, sampled)
                    self._inbox.deliver(updates)
        finally:
            self._in_step = False
            if self._to_sweep:
                self._sweep()

    def _why_not_now(self) -> str:
        if self._thread == threading.get_ident():
            return "a step is under way: a callback cannot run another one"
        return "another thread runs a step of this engine: take turns, or use an engine each"

    def _schedule(self) -> list[ScheduledRequest]:
        """Who runs how many tokens, and where they go."""
        if not self.scheduler.has_unfinished:
            return []
        with interrupts_wait():
            if self.trace is not None:
                self.trace.record(StepBegan)
            scheduled = self.scheduler.schedule()
            if not scheduled:
                raise RuntimeError(self.scheduler.why_nothing_runs())
            if self.trace is not None:
                self.trace.record(Planned)
        return scheduled

    def _sample(self, output: ModelOutput) -> dict[str, SampledToken | Exception]:
        """The next token, by request id, of each request that is due one; or what went wrong."""
        if not output.ready:
            return dict(output.faults)
        requests = [one.request for one in output.ready]
        tokens = sample_each(output.logits, [request.sampler for request in requests])
        ids = [request.request_id for request in requests]
        return dict(zip(ids, tokens, strict=True)) | output.faults

    def _update(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: Mapping[str, SampledToken | Exception],
    ) -> list[Update]:
        """Count what was run, append the tokens, end what is over → what happened to whom."""
        num_tokens = sum(one.num_tokens for one in scheduled)
        self.clock.forward_done(num_tokens)
        updates = self.scheduler.update(scheduled, sampled)
        for request, _ in updates:
            if request.finish is not None:
                self._forget(request.group)
        if self.trace is not None:
            self.trace.record(StepEnded, num_tokens)
            self.trace.step += 1
        self.num_steps += 1
        return updates

    def _forget(self, group: SampleGroup) -> None:
        if group.is_over:
            for sample in group.samples:
                self.requests.pop(sample.request_id, None)

    def _fail(self, request: Request, fault: Exception) -> Update:
        update = self.scheduler.fail(request, fault)
        self._forget(request.group)
        return update

    # -- until all is done

    def run(self, max_steps: int | None = None) -> list[RequestOutput]:
        """Step until all is done, or max_steps are → the outputs of what ended, in that order.

        After an interrupt they are still there, for the next call.
        """
        end = None if max_steps is None else self.num_steps + max_steps
        while self.scheduler.has_unfinished and (end is None or self.num_steps < end):
            self._step()
        return [result.output for result in self._inbox.take() if result.output is not None]

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
        groups = self._groups(prompts, params)
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(groups), unit="request", disable=not progress) as bar:
            for result in self._serve(groups):
                if result.output is not None:
                    outputs[result.request_id] = result.output
                    bar.update()
        return [outputs[group.request_id] for group in groups]

    def stream(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StepOutput]:
        """As `generate`, token by token, in the order in which they come. Errors come at once.

        The requests enter with the first token; leaving the loop early (or closing it) aborts them.
        """
        return self._serve(self._groups(prompts, params))

    def _groups(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SampleGroup]:
        """The samples of each prompt, all prompts or none."""
        sequences = prompt_token_ids(prompts, self.tokenizer)
        pairs = enumerate(zip(sequences, params_for_each(params, len(sequences)), strict=True))
        make = self._intake.make
        return [make(self._new_id(own), ids, own, name=f"prompt {i}") for i, (ids, own) in pairs]

    def _serve(self, groups: Sequence[SampleGroup]) -> Iterator[StepOutput]:
        """Enter the groups, step until each has its output, and yield what comes."""
        left, owner = len(groups), object()
        try:
            with interrupts_wait():
                for group in groups:
                    group.owner = owner
                    self._enter(group, self.clock.now())
            while left:
                results = self._inbox.take(owner)
                if not results:
                    self._step()
                for result in results:
                    left -= result.output is not None
                    yield result
        finally:
            self._to_sweep += groups  # after a normal end there is nothing to abort
            self._sweep()

    def _sweep(self) -> None:
        """Abort what a generate or stream left behind; one that ends within a step, after it."""
        if self._in_step or not self._to_sweep:
            return
        with interrupts_wait():  # one for all: a second Ctrl-C leaves none of them behind
            while self._to_sweep:
                group = self._to_sweep.pop()
                if self.requests.get(group.request_id) in group.samples:
                    self.abort(group.request_id)
                self._inbox.drop(group)

    def state(self) -> EngineState:
        """Queues and unfinished requests as they stand, in the form that a replay has."""
        return self.scheduler.state()

    def check_integrity(self) -> None:
        """AssertionError if queues, requests and memory do not agree."""
        self.scheduler.check_integrity()
        queued = {r.request_id for r in [*self.scheduler.waiting, *self.scheduler.running]}
        here = [r for r in self.requests.values() if not r.is_over and r not in r.group.unqueued]
        known = {request.request_id for request in here}
        assert queued == known, f"{queued} are queued, {known} known"
