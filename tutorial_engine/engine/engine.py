"""The engine: requests come and go, each step is one forward for all.

Knows how scheduler, runner, samplers and trace work together; decides nothing itself.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from tutorial_engine.as_vllm import check_keywords
from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.checks import check_time
from tutorial_engine.engine.args import EngineArgs
from tutorial_engine.engine.clock import Clock, VirtualClock, WallClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.inputs import (
    InputProcessor,
    Prompt,
    check_model,
    check_part,
    list_of_prompts,
    params_for_each,
    sample_ids,
)
from tutorial_engine.engine.interrupts import interrupts_wait
from tutorial_engine.engine.replay import ReplayRunner
from tutorial_engine.engine.request import Request, RequestOutput, SampleGroup, ScheduledRequest
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler, best_of_each, next_token
from tutorial_engine.trace.events import (
    EngineState,
    Planned,
    Recorder,
    Setting,
    StepBegan,
    StepEnded,
)


class LLMEngine:
    """Serves many requests, each as if it were alone. For one thread.

    Scheduler, memory, clock and runner can be exchanged; a memory serves one engine at a time. A
    Recorder gets the trace: `trace` for the rows that the engine makes; a memory of your own is
    made with its own. `eos_token_ids` take the place of the model's. ValueError for what does not
    fit together.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        scheduler: type[Scheduler] = Scheduler,
        memory: KVMemory | None = None,
        clock: Clock | None = None,
        trace: Recorder | None = None,
        runner: ModelRunner | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        config = EngineConfig() if config is None else config
        _check_parts(model, config, scheduler, clock, trace, runner)
        self.config = replace(config, max_model_len=length_for(model.config, config.max_model_len))
        if memory is None:
            memory = StaticKVCache.from_config(
                model.config,
                max_seqs=config.max_num_seqs,
                max_len=config.max_model_len,
                dtype=model.dtype,
                device=model.device,
                trace=trace,
            )
        _check_fits(model, memory, trace, runner)
        self.model, self.tokenizer, self.memory, self.trace = model, tokenizer, memory, memory.trace
        self.clock = WallClock() if clock is None else clock
        self.scheduler = scheduler(self.config, memory, self.clock.now, self.trace)
        if runner is None:
            replays = model.device.type == "cuda" and config.cuda_graphs
            runner = (ReplayRunner if replays else ModelRunner)(model, memory.storage)
        self.runner = runner
        self.requests: dict[str, Request] = {}  # request_id -> until its prompt's samples are over
        self.num_steps = 0
        self._inputs = InputProcessor(
            tokenizer,
            model.config.vocab_size,
            model.config.eos_token_ids if eos_token_ids is None else eos_token_ids,
            self.scheduler.max_len,
            self.scheduler.check,
        )
        self._numbers = count()  # of requests that come without an id
        self._next_seed: int | None = None  # for requests that come without a seed
        self._news: dict[str, SampleGroup] = {}  # request_id -> what `step` tells of next
        self._is_torn = False  # was bookkeeping broken off?
        self._take_memory()
        if self.trace is not None:
            self.trace.bind(self.clock.now, self.settings)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **not_here: Any) -> "LLMEngine":
        """An engine on pages, as vLLM's: model, memory and limits are what the arguments say."""
        check_keywords("LLMEngine.from_engine_args", not_here)
        if not isinstance(engine_args, EngineArgs):
            raise ValueError(f"engine_args are an EngineArgs(model=...), got {engine_args!r}")
        engine = cls(
            engine_args.model,
            engine_args.tokenizer,
            engine_args.config,
            memory=engine_args.memory,
            trace=engine_args.trace,
            eos_token_ids=engine_args.eos_token_ids,
        )
        engine._next_seed = engine_args.seed
        return engine

    @property
    def settings(self) -> dict[str, Setting]:
        """What a trace should know of its engine."""
        limits = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        prices = self.clock.prices if isinstance(self.clock, VirtualClock) else {}
        return {"policy": type(self.scheduler).__name__, **limits, **prices, **self.memory.settings}

    # -- requests come and go

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        *,
        sampler: Sampler | Sequence[Sampler] | None = None,
        **not_here: Any,
    ) -> str:
        """Put a request (text or token ids) in the queue, at any time → its id (None: a new one).

        `sampler` (n of them, if params.n) is used in place of what params describe. ValueError for
        what can never run, for an id that is still here, and for what only vLLM has.
        """
        check_keywords("LLMEngine.add_request", not_here)
        name = self._new_id(params) if request_id is None else request_id
        group = self._inputs.process(name, prompt, self._seeded(params), sampler)
        self._enter([group], self.clock.now() if arrival_time is None else arrival_time)
        return name

    def abort_request(self, request_ids: str | Sequence[str], **not_here: Any) -> None:
        """End requests in any state, now, with all their samples; `step` returns what they have."""
        check_keywords("LLMEngine.abort_request", not_here)
        if not isinstance(request_ids, str | list | tuple):
            raise ValueError(f"abort_request takes an id or a list of ids, got {request_ids!r}")
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for name in names:
            if name not in self.requests:
                raise ValueError(f"no request {name!r} is here: it never was, or it is over")
        with self._undivided():
            for group in dict.fromkeys(self.requests[name].group for name in names):
                self._end(group)
                self._has_news(group)

    def has_unfinished_requests(self) -> bool:
        """Is there anything left to run, or to return?"""
        return self.scheduler.has_unfinished or bool(self._news)

    def get_num_unfinished_requests(self) -> int:
        """Prompts that are not over."""
        return len({id(request.group) for request in self.requests.values()})

    def _seeded(self, params: SamplingParams | None) -> SamplingParams | None:
        """The same, with a seed where the engine has one to give and the request has none."""
        if not isinstance(params, SamplingParams) or params.seed is not None:
            return params
        if self._next_seed is None or params.temperature == 0:
            return params
        seed, self._next_seed = self._next_seed, self._next_seed + params.n  # sample i: seed + i
        return replace(params, seed=seed)

    def _new_id(self, params: SamplingParams | None) -> str:
        n = params.n if isinstance(params, SamplingParams) else 1
        while True:
            name = f"r{next(self._numbers)}"
            if self.requests.keys().isdisjoint(sample_ids(name, n)):
                return name

    def _enter(self, groups: Sequence[SampleGroup], arrival: float) -> None:
        check_time("arrival_time", arrival)
        samples = {sample.request_id: sample for group in groups for sample in group.samples}
        if here := sorted(samples.keys() & (self.requests.keys() | self._news.keys())):
            raise ValueError(f"request {here[0]!r} is here already: choose another id")
        with self._undivided():
            self._take_memory()
            for sample in samples.values():
                sample.arrival = arrival
            for group in groups:
                self.scheduler.add(group.samples[0])
                self.requests |= {sample.request_id: sample for sample in group.samples}

    def _end(self, group: SampleGroup) -> None:
        for sample in group.samples:
            if not sample.is_over:
                self.scheduler.abort(sample)
        self._forget(group)

    def _forget(self, group: SampleGroup) -> None:
        for sample in group.samples:
            self.requests.pop(sample.request_id, None)

    def _has_news(self, group: SampleGroup) -> None:
        """Behind those that are there: what ended first comes first."""
        request_id = group.request_id
        self._news.pop(request_id, None)
        self._news[request_id] = group

    def _take_memory(self) -> None:
        """From now on it is this engine's. ValueError while it serves another one, or holds things.

        Requests of two engines have the same names: each would write over the other's.
        """
        user, held = self.memory.user, self.memory.seq_ids
        if user is self:
            return
        if isinstance(user, LLMEngine) and user.scheduler.has_unfinished:
            raise ValueError(
                f"this memory serves another engine (memory.user), whose requests "
                f"{sorted(user.requests)} are not over: make a new memory, or finish or abort them "
                "(an engine that was broken off cannot)"
            )
        if held:
            raise ValueError(
                f"this memory holds the sequences {list(held)}, which are not this engine's: free "
                "them (memory.free(name)), or make a new memory"
            )
        self.memory.user = self

    # -- what an engine is

    def step(self) -> list[RequestOutput]:
        """Schedule, one forward for all, sample, update → each request that got a token or ended.

        As far as it has come. [] also when only parts of prompts ran: loop on
        `has_unfinished_requests()`. What it raises leaves the engine as it was before the step.
        """
        self._run_step()
        outputs = [group.output() for group in self._news.values()]
        self._news = {}
        return outputs

    def _run_step(self) -> None:
        """The step itself. What it brings is kept, so that no Ctrl-C on its way out can lose it."""
        if self.scheduler.has_unfinished:
            scheduled = self._schedule()
            logits = self.runner.run(scheduled)
            self._update(scheduled, logits)

    def _schedule(self) -> list[ScheduledRequest]:
        """Who runs how many tokens, and where they go."""
        with self._undivided():
            self.scheduler.begin_plan()
            if self.trace is not None:
                self.trace.record(StepBegan)
            scheduled = self.scheduler.schedule()
            self.scheduler.check_plan(scheduled)
            if self.trace is not None:
                self.trace.record(Planned)
        return scheduled

    def _update(self, scheduled: Sequence[ScheduledRequest], logits: Tensor) -> None:
        """Sample, count what was run, append the tokens, end what is over."""
        ready = [item.request for item in scheduled if item.yields_token]
        num_tokens = sum(item.num_tokens for item in scheduled)
        assert len(logits) == len(ready), f"{len(logits)} rows of logits for {len(ready)} requests"
        with self._undivided():
            self.clock.forward_done(num_tokens)
            self.scheduler.commit(scheduled)
            self.scheduler.update(scheduled, self._sample(ready, logits))
            for group in dict.fromkeys(request.group for request in ready):
                if group.is_over:
                    self._forget(group)
                self._has_news(group)
            if self.trace is not None:
                self.trace.record(StepEnded, num_tokens)
                self.trace.step += 1
            self.num_steps += 1

    def _sample(self, ready: Sequence[Request], logits: Tensor) -> dict[str, SampledToken]:
        """The next token of each request, by its id. One that cannot be sampled ends alone."""
        sampled = {}
        for row, (request, best) in enumerate(zip(ready, best_of_each(logits), strict=True)):
            try:
                sampled[request.request_id] = next_token(request.sampler, logits, row, best)
            except Exception as fault:
                self.scheduler.fail(request, fault)
        return sampled

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Requests, queues and memory change together: a Ctrl-C waits until they have.

        A second one does not: it ends an endless loop in a policy, sampler or memory of your own.
        Then nobody knows what has changed. RuntimeError from then on.
        """
        if self._is_torn:
            raise RuntimeError(
                "a second Ctrl-C broke this engine off in the middle of its bookkeeping: make a "
                "new one, with a new memory"
            )
        with interrupts_wait():
            try:
                yield
            except KeyboardInterrupt:  # the second one: the first would be raised at the end
                self._is_torn = True
                raise

    def warm_up(self) -> None:
        """Record decode steps of all sizes now, with a bar, and not when each is first needed.

        On a GPU: elsewhere nothing is recorded.
        """
        if isinstance(self.runner, ReplayRunner):
            self.runner.warm_up(self.config.max_num_seqs, self.scheduler.max_len)

    # -- until all is done

    def run(self, max_steps: int | None = None) -> list[RequestOutput]:
        """Step until all is done, or max_steps are → the outputs of what ended, in that order.

        After an interrupt they are still there, for the next call.
        """
        if max_steps is not None and (not isinstance(max_steps, int) or max_steps < 0):
            raise ValueError(f"max_steps is a number of steps or None, got {max_steps!r}")
        end = None if max_steps is None else self.num_steps + max_steps
        while self.scheduler.has_unfinished and (end is None or self.num_steps < end):
            self._run_step()
        ended = [group.output() for group in self._news.values() if group.is_over]
        self._news = {}
        return ended

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt until it stops → one output each, in the order of the prompts.

        Requests that were here before run along. ValueError, before anything runs, for what cannot
        work; whatever ends it early aborts what this call brought in, and nothing else.
        """
        groups = self._groups(prompts, params)
        with tqdm(total=len(groups), unit="request", disable=not progress) as bar:
            for _ in self._serve(groups, final_only=True):
                bar.update()
        outputs = [group.output() for group in groups]
        for i, output in enumerate(outputs):
            if output.error is not None:
                warnings.warn(f"prompt {i} ended with an error: {output.error}", stacklevel=2)
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, step by step: each of its requests that got a token, so far as it is.

        They enter with the first token; leaving the loop early (or closing it) aborts them.
        """
        return self._serve(self._groups(prompts, params))

    def _groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SampleGroup]:
        """The samples of each prompt, all prompts or none."""
        prompts = list_of_prompts(prompts)
        pairs = zip(prompts, params_for_each(params, len(prompts)), strict=True)
        return [
            self._inputs.process(
                self._new_id(wanted), prompt, self._seeded(wanted), name=f"prompt {i}"
            )
            for i, (prompt, wanted) in enumerate(pairs)
        ]

    def _serve(
        self, groups: Sequence[SampleGroup], final_only: bool = False
    ) -> Iterator[RequestOutput]:
        """Enter the groups and step until they are over → what those have that got on, or ended."""
        names = {group.request_id for group in groups}
        is_over = not groups
        try:
            self._enter(groups, self.clock.now())
            while not is_over:
                self._run_step()
                is_over = all(group.is_over for group in groups)
                mine = [name for name in self._news if name in names]
                # what is another's stays, for whoever steps next
                for group in [self._news.pop(name) for name in mine]:
                    if group.is_over or not final_only:
                        yield group.output()
        finally:
            try:
                self._leave(groups)
            except KeyboardInterrupt:  # it came before a Ctrl-C had to wait
                self._leave(groups)
                raise

    def _leave(self, groups: Sequence[SampleGroup]) -> None:
        """Abort those that are not over, and return nothing of them."""
        if self._is_torn:
            return
        with self._undivided():
            mine = [g for g in groups if self.requests.get(g.request_id) in g.samples]
            for group in mine:
                self._end(group)
            for group in groups:
                self._news.pop(group.request_id, None)

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


def _check_parts(
    model: object, config: object, scheduler: object, clock: object, trace: object, runner: object
) -> None:
    """ValueError for parts of another kind."""
    check_model(model)
    check_part("clock", clock, "now", "forward_done", "wait_until")
    check_part("trace", trace, "bind", "record")
    check_part("runner", runner, "run")
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config must be an EngineConfig, got {config!r}")
    if not (isinstance(scheduler, type) and issubclass(scheduler, Scheduler)):
        raise ValueError(f"scheduler must be the class Scheduler or a subclass: {scheduler!r}")


def _check_fits(
    model: CausalLM, memory: object, trace: Recorder | None, runner: ModelRunner | None
) -> None:
    """ValueError for parts with which an engine would give wrong answers, or a trace with holes."""
    if not isinstance(memory, KVMemory):
        raise ValueError(f"memory must be a KVMemory (rows, pages, cells), got {memory!r}")
    spec = getattr(memory.storage, "spec", None)
    fits = KVCacheSpec.from_model(model.config, model.dtype)
    if spec is not None and spec != fits:
        raise ValueError(f"this memory is for another model: it stores {spec}, needed is {fits}")
    if trace is not None and trace is not memory.trace:
        raise ValueError(
            "this memory was made without that recorder, so its blocks would be absent from the "
            "trace: give trace= to the memory when you make it, the engine takes it over"
        )
    if getattr(runner, "storage", memory.storage) is not memory.storage:
        raise ValueError(
            "this runner reads another memory than the engine's, so the answers would be wrong: "
            "give LLMEngine memory=memory, and the runner memory.storage of the same memory"
        )
