"""Workloads for the engine, and the check that every request comes out as if alone.

`check` runs one, on rows, pages or cells, and asserts all that the engine promises: whatever
callers, samplers, stop logic, devices and Ctrl-C do. fuzz.py draws them.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from at_line import AtLine, Moment
from checkpoints import BASE, FAMILY, hf_config
from engines import poison, random_model
from memories import SharedRows, check_empty, poison_cells, poison_pages
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import serve
from tutorial_engine.engine.inputs import InputProcessor
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.replay import ReplayRunner
from tutorial_engine.engine.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    ScheduledRequest,
)
from tutorial_engine.engine.runner import run_with_cache
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batched_attention import (
    AlikeTogether,
    BatchedAttention,
    varlen_by_sequence,
)
from tutorial_engine.model.checkpoint import load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.tiny.train import hugging_face_tensors
from tutorial_engine.trace.events import (
    Admitted,
    BlockTaken,
    Forked,
    Recorder,
    Scheduled,
    StepEnded,
    TokenSampled,
    Trace,
)
from tutorial_engine.trace.history import Replay, history

POLICIES: dict[str, type[Scheduler]] = {
    policy.__name__: policy for policy in (Scheduler, StaticBatching, OneByOne, PrefillFirst)
}
MEMORIES = ("rows", "pages", "cells")
WAYS = ("add", "stream", "generate")
WHOLE = 0  # a block size: the whole row
BLOCK_SIZES = (1, 2, 3, 4, 16, WHOLE)
BACKENDS: dict[str, Callable[[Any], AttentionBackend] | None] = {
    "gathered": None,  # the engine's own
    "in a loop": NaivePagedAttention,
    "many at a time": PagedAttention,
    "end to end": lambda memory: BatchedAttention(memory.storage, varlen_by_sequence),
    "padded": lambda memory: BatchedAttention(memory.storage),
    "alike": lambda memory: AlikeTogether(memory.storage, few=1, most_padding=SOME_PADDING),
}
SOME_PADDING = 2**10  # bytes of a layer's K and V: steps of one group and of several
IN_PLACE = ("in a loop", "many at a time")  # they read blocks, and copy nothing
LIMITS = (22, 26, 32)  # tokens of a request, prompt and output
EOS = (86, 5, 105)  # the first one is told of otherwise than the others
POOL_SIZE = 44
LONGEST_PROMPT = 20


class Drawn:
    """What the random numbers of model and pool begin with."""

    seed = 2


def draw_anew(seed: int) -> None:
    """Another model and another pool, from now on."""
    Drawn.seed = seed
    for known in (small_model, pool, alone, most_samples):
        known.cache_clear()


@cache
def small_model() -> CausalLM:
    """Random, two small layers; some ids are bytes that are no character alone."""
    return random_model(seed=Drawn.seed + 2, eos=EOS, **small_sizes())


def small_sizes() -> dict[str, Any]:
    """Its sizes; each seed has another kind of the family, and the first one is Qwen3."""
    kinds = [{"model_type": "qwen3"}, *FAMILY.values()]
    kind = kinds[(Drawn.seed - 2) % len(kinds)]
    if "rope" in kind:  # scaled from a context on that these requests reach
        kind = kind | {"rope": kind["rope"] | {"original_max_position_embeddings": 16}}
    return kind | {
        "tie_word_embeddings": False,
        "vocab_size": 112,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max(LIMITS),
    }


@cache
def the_tokenizer() -> Tokenizer:
    return load_tokenizer()


# -- the pool: requests whose tokens rounding cannot change ---------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt and what is asked of it."""

    prompt: tuple[int, ...]
    params: SamplingParams


def run_alone(asked: Asked, limit: int) -> tuple[CompletionOutput, list[Tensor]]:
    """The loop without a scheduler, on this one prompt; and the logits [V] that it saw."""
    model, logits_seen = small_model(), list[Tensor]()
    run = run_with_cache(model, poison(StaticKVCache.from_config(model.config, max_len=limit)))

    def run_and_note(requests: Sequence[Request]) -> Tensor:
        logits = run(requests)
        logits_seen.append(logits[0].clone())
        return logits

    inputs = InputProcessor(the_tokenizer(), model.config.vocab_size, EOS, limit, lambda *_: None)
    (request,) = inputs.process("alone", asked.prompt, asked.params).samples
    for _ in serve(run_and_note, [request]):
        pass
    return request.completion(), logits_seen


def is_safe(asked: Asked, output: CompletionOutput, seen: Sequence[Tensor]) -> bool:
    """Do the tokens stay the same when the logits are a little different?

    Greedy: the best is more than 1e-3 ahead. Sampled: twelve times other noise of 2e-4, a hundred
    times what batches make of a logit, moves no draw over a border and no token out of a filter.
    """

    def again(change: Callable[[Tensor, int], Tensor]) -> bool:
        sampler = Sampler(asked.params, EOS)
        pairs = zip(seen, output.token_ids, strict=True)
        return all(sampler.sample(change(row, own)).token_id == own for row, own in pairs)

    def lowered(row: Tensor, own: int) -> Tensor:
        row = row.clone()
        row[own] -= 1e-3
        return row

    if asked.params.temperature == 0:
        return again(lowered)
    noise = torch.Generator().manual_seed(0)
    return all(
        again(lambda row, _: row + 4e-4 * (torch.rand(row.shape, generator=noise) - 0.5))
        for _ in range(12)
    )


def _random_params(draw: random.Random, number: int) -> SamplingParams:
    """Greedy for every third, and nothing else asked for every sixth; else drawn, with filters."""
    if number % 6 == 0:
        return SamplingParams(max_tokens=10)
    most = draw.choice([1, 2, 4, 6, 8, 10, 10, 10])
    options: dict[str, Any] = {
        "max_tokens": most,
        "logprobs": draw.choice([None, 0, 1, 3]),
        "ignore_eos": draw.random() < 0.2,
    }
    if number % 3:
        options |= {
            "temperature": draw.choice([0.7, 1.0, 1.6]),
            "seed": draw.randrange(1000),
            "top_k": draw.choice([0, 5, 30]),
            "top_p": draw.choice([1.0, 0.9, 0.6]),
            "min_p": draw.choice([0.0, 0.0, 0.05]),
        }
    if number % 4 == 1:
        options["min_tokens"] = draw.randint(1, most)
    if number % 5 == 2:
        options["stop_token_ids"] = draw.sample(range(112), 20)
    if number % 5 == 3:
        options["stop"] = draw.sample("abcdefgiostvwXYZB!?.,+", 12)
        options["include_stop_str_in_output"] = draw.random() < 0.5
    return SamplingParams(**options)


@cache
def pool() -> tuple[Asked, ...]:
    """Requests of all kinds, each checked to be safe; some share a prompt, or begin alike."""
    draw = random.Random(Drawn.seed)
    found: list[Asked] = []
    number = 0
    while len(found) < POOL_SIZE:
        number += 1
        length = draw.choice([1, 2, 3, 3, 5, 5, 8, 8, 12, 16, LONGEST_PROMPT])
        prompt = tuple(draw.randrange(112) for _ in range(length))
        if found and number % 6 == 0:
            prompt = found[-1].prompt
        elif found and number % 6 == 3:
            prompt = (found[-1].prompt + prompt)[:LONGEST_PROMPT]
        asked = Asked(prompt, _random_params(draw, number))
        output, seen = run_alone(asked, max(LIMITS))
        if len(output.token_ids) < 5 and number % 2:
            continue  # most should stay for a while
        if is_safe(asked, output, seen):
            found.append(asked)
    return tuple(found)


@cache
def alone(index: int, limit: int, sample: int = 0) -> CompletionOutput:
    """What request `index` of the pool gives when nobody else is there; or a sample of it."""
    asked = pool()[index]
    return run_alone(replace(asked, params=asked.params.sample(sample)), limit)[0]


@cache
def most_samples(index: int) -> int:
    """Continuations, 3 at most, that a request of the pool can have: all of them are safe."""
    asked, found = pool()[index], 1
    while found < 3 and asked.params.temperature > 0:
        other = replace(asked, params=asked.params.sample(found))
        if not is_safe(other, *run_alone(other, max(LIMITS))):
            break
        found += 1
    return found


def check_transformers() -> Counter[str]:
    """The pool alone is as transformers has it: what is greedy token by token, and all logprobs.

    transformers runs each prompt with its answer, without any cache, and has to agree.
    """
    ours = small_model()
    theirs = AutoModelForCausalLM.from_config(hf_config({**BASE, **small_sizes()})).eval()
    theirs.load_state_dict(hugging_face_tensors(ours, torch.float32))
    counts: Counter[str] = Counter()
    for index, asked in enumerate(pool()):
        got = alone(index, max(LIMITS))
        rows = theirs(torch.tensor([[*asked.prompt, *got.token_ids]])).logits[0].log_softmax(-1)
        for number, token_id in enumerate(got.token_ids):
            row = rows[len(asked.prompt) - 1 + number]
            if asked.params.temperature == 0 and not asked.params.min_tokens:
                assert int(row.argmax()) == token_id, f"request {index}: {got.token_ids}"
                counts["greedy tokens as transformers"] += 1
            for known_id, logprob in (got.logprobs[number] if got.logprobs else {}).items():
                assert abs(float(row[known_id]) - logprob.logprob) < 1e-4
                counts["logprobs as transformers"] += 1
    return counts


# -- workloads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """A request of the pool: when it comes, with how many samples, and what goes wrong.

    `aborted_at` counts steps. `fails` are a sample and the number of the token that its sampler
    fails to choose, `stumbles` those of the token that its stop checker cannot take. It comes by
    add_request, stream or generate; `leaves` is the number of outputs after which a stream is left.
    """

    index: int
    arrival: int = 0
    aborted_at: int | None = None
    n: int = 1
    fails: tuple[int, int] | None = None
    stumbles: tuple[int, int] | None = None
    way: str = "add"
    leaves: int | None = None

    @property
    def params(self) -> SamplingParams:
        """What it asks for."""
        return replace(pool()[self.index].params, n=self.n)

    def alone(self, limit: int) -> list[CompletionOutput]:
        """What each of its samples gives when nobody else is there."""
        return [alone(self.index, limit, sample) for sample in range(self.n)]


@dataclass(frozen=True)
class Workload:
    """Who comes when, and the engine that they come to.

    `capacity` is the pool in tokens, rounded up to blocks (None: enough). `breaks` is the forward
    that raises; `interrupt` is when Ctrl-C comes.
    """

    visitors: tuple[Visitor, ...]
    policy: str = "Scheduler"
    max_num_seqs: int = 3
    budget: int = 16
    limit: int = max(LIMITS)
    threshold: int | None = None
    chunked: bool = True
    capacity: int | None = None
    memory: str = "rows"  # any of MEMORIES
    block_size: int = 4  # of pages
    prefix_caching: bool = True  # of pages
    attention: str = "gathered"  # one of BACKENDS; IN_PLACE on pages only
    breaks: int | None = None
    interrupt: Moment | None = None

    @property
    def can_chunk(self) -> bool:
        return self.chunked and self.policy != "PrefillFirst"

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return (self.block_size or self.limit) if self.memory == "pages" else 1

    @property
    def num_blocks(self) -> int:
        """Blocks, or cells, or tokens in rows."""
        return -(-(self.capacity or self.limit * self.max_num_seqs) // self.size)

    @property
    def longest(self) -> int:
        """Tokens that a request can have, prompt and output: the pool may be smaller than that."""
        return min(self.limit, self.num_blocks * self.size)

    @property
    def in_place(self) -> bool:
        """Are blocks read where they are?"""
        return self.memory == "pages" and self.attention in IN_PLACE

    @property
    def max_steps(self) -> int:
        """More steps than any right engine can need.

        The first of those that run is never thrown out, and each step runs a token of it at least;
        only PrefillFirst has steps in between that let others in, at most one per seat. A broken
        forward and a Ctrl-C cost a step.
        """
        tokens = sum(visitor.n for visitor in self.visitors) * self.limit
        pauses = self.max_num_seqs + 1 if self.policy == "PrefillFirst" else 1
        return max(visitor.arrival for visitor in self.visitors) + tokens * pauses + 4


class Differs(AssertionError):
    """A request did not come out as if it were alone."""


class FailingSampler(Sampler):
    """Fails to choose token number `at`, and notes that it did."""

    def __init__(self, params: SamplingParams, at: int, note: Callable[[], object]) -> None:
        super().__init__(params, EOS)
        self.at, self.note = at, note

    def sample(self, logits: Tensor) -> SampledToken:
        if self.num_sampled == self.at:
            self.note()
            raise RuntimeError("out of luck")
        return super().sample(logits)


class BreakingRunner(ReplayRunner):
    """Its forward number `at`, counted from 0, raises once, when K and V are written already.

    Decode steps are replayed where attention is one call for all.
    """

    at: int | None = None
    num_broken = 0
    most = 0  # forwards: a generate that never ends is noticed, too

    def run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        logits = super().run(scheduled)
        assert self.num_forwards <= self.most, f"still running after {self.most} forwards"
        if self.num_forwards - 1 == self.at:
            self.num_broken += 1
            self.num_tokens -= sum(item.num_tokens for item in scheduled)
            raise RuntimeError("the device is gone")
        return logits


class Party:
    """One workload in its engine, from the first arrival to the last end.

    `at` notes the lines that the engine runs. Visitor number i is request "r<i>".
    """

    memory: Any

    def __init__(self, workload: Workload, at: AtLine | None = None) -> None:
        self.workload, self.recorder = workload, Recorder()
        self.memory = self.make_memory()
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
        )
        self.runner = BreakingRunner(small_model(), self.memory.storage, self.make_attention())
        self.runner.at, self.runner.most = workload.breaks, 2 * workload.max_steps
        self.engine = LLMEngine(
            small_model(),
            the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            runner=self.runner,
        )
        self.delivered: dict[str, list[RequestOutput]] = {}  # of each that was let in
        self.streams: dict[str, Iterator[RequestOutput]] = {}
        self.aborted: set[str] = set()
        self.left: set[str] = set()  # whose stream or generate did not come to its end
        self.faulty: set[tuple[str, int]] = set()  # samples whose sampler or stop checker raised
        self.refused = 0
        moment = workload.interrupt
        self.at = AtLine(moment) if moment is not None else at
        self.interrupted = False
        self.replay, self.num_replayed = Replay(), 0

    def make_memory(self) -> Any:
        """Poisoned."""
        workload, config = self.workload, small_model().config
        if workload.memory == "cells":
            cells = CellKVCache.from_config(config, workload.num_blocks, trace=self.recorder)
            return poison_cells(cells)
        if workload.memory == "pages":
            pages = PagedKVCache.from_config(
                config,
                block_size=workload.size,
                num_blocks=workload.num_blocks,
                prefix_caching=workload.prefix_caching,
                trace=self.recorder,
            )
            return poison_pages(pages)
        sizes = {"max_seqs": workload.max_num_seqs, "max_len": workload.limit}
        rows = StaticKVCache.from_config(config, **sizes, trace=self.recorder)
        return SharedRows(rows, workload.capacity)

    def make_attention(self) -> AttentionBackend | None:
        """A backend over the memory; None: the engine's own."""
        name = self.workload.attention
        backend = None if name in IN_PLACE and not self.workload.in_place else BACKENDS[name]
        return None if backend is None else backend(self.memory)

    def run(self) -> None:
        """Let them come, go and run; look at everything after every step."""
        engine, workload, now = self.engine, self.workload, 0
        last = max(visitor.arrival for visitor in workload.visitors)
        while now <= last or engine.has_unfinished_requests() or self.streams:
            assert now <= workload.max_steps, f"still running after {now} steps"
            for number, visitor in enumerate(workload.visitors):
                if visitor.arrival == now:
                    self.enter(f"r{number}", number, visitor)
                if visitor.aborted_at == now:
                    self.abort(f"r{number}")
            for number, visitor in enumerate(workload.visitors):
                if f"r{number}" in self.streams:
                    self.pull(f"r{number}", visitor)
            if len(self.recorder.events) > self.num_replayed:  # some came, or went
                self.look()
            self.step()
            self.look()
            now += 1

    def watching(self) -> AbstractContextManager[None]:
        """Lines of the engine are counted, or interrupted."""
        return nullcontext() if self.at is None else self.at.watching()

    def note(self, error: BaseException) -> None:
        """A Ctrl-C, or the broken forward: nothing else may reach a caller."""
        if isinstance(error, KeyboardInterrupt):
            self.interrupted = True
        elif "the device is gone" not in str(error):
            raise error

    def deliver(self, output: RequestOutput) -> None:
        """Outputs are cumulative: each continues the last."""
        name, delivered = output.request_id, self.delivered[output.request_id]
        if delivered:
            before = delivered[-1]
            assert not before.finished, f"{name} gets more after its end"
            for old, new in zip(before.outputs, output.outputs, strict=True):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids, f"{name} lost tokens"
                assert new.text.startswith(old.text), f"{name}: {new.text!r} after {old.text!r}"
        assert output.finished == all(one.finished() for one in output.outputs), name
        delivered.append(output)

    def step(self) -> None:
        """One of the engine's. What it could not return, the next one does."""
        outputs: list[RequestOutput] = []
        try:
            with self.watching():
                outputs = self.engine.step()
        except (KeyboardInterrupt, RuntimeError) as error:
            self.note(error)
        for output in outputs:
            self.deliver(output)

    def pull(self, name: str, visitor: Visitor) -> None:
        """The next output of a stream; or it is left."""
        stream = self.streams[name]
        try:
            with self.watching():
                if len(self.delivered[name]) == visitor.leaves:
                    self.left.add(name)
                    del self.streams[name]
                    stream.close()  # type: ignore[attr-defined]
                else:
                    self.deliver(next(stream))
        except StopIteration:
            del self.streams[name]
        except (KeyboardInterrupt, RuntimeError) as error:
            self.note(error)
            self.left.add(name)
            self.streams.pop(name, None)
            assert name not in self.engine.requests, "what it brought is still there"

    def enter(self, name: str, number: int, visitor: Visitor) -> None:
        asked, workload, engine = pool()[visitor.index], self.workload, self.engine
        never = len(asked.prompt) >= workload.longest or (
            not workload.can_chunk and len(asked.prompt) > workload.budget
        )
        self.delivered[name] = []
        engine._numbers = iter([number])  # type: ignore[assignment]  # streams choose their names
        try:
            with self.watching():
                if visitor.way == "stream":
                    self.streams[name] = engine.stream([asked.prompt], visitor.params)
                elif visitor.way == "generate":
                    (output,) = engine.generate([asked.prompt], visitor.params)
                    self.deliver(output)
                else:
                    samplers = self.samplers(name, visitor)
                    engine.add_request(name, asked.prompt, visitor.params, sampler=samplers)
        except ValueError as error:
            assert never and f"{len(asked.prompt)} tokens" in str(error), error
            self.refused += 1
            del self.delivered[name]
        except (KeyboardInterrupt, RuntimeError) as error:
            self.note(error)
            if visitor.way != "add" or name not in engine.requests:
                self.left.add(name)
                assert name not in engine.requests, "what it brought is still there"
        else:
            assert not never, f"{name} can never run"
        if visitor.stumbles is not None and name in engine.requests:
            self.make_stumble(name, *visitor.stumbles)

    def samplers(self, name: str, visitor: Visitor) -> list[Sampler] | None:
        """One of them fails, if that is this visitor's fate."""
        if visitor.fails is None:
            return None
        which, at = visitor.fails
        each = [visitor.params.sample(i) for i in range(visitor.n)]
        samplers = [Sampler(params, EOS) for params in each]
        samplers[which] = FailingSampler(each[which], at, lambda: self.faulty.add((name, which)))
        return samplers

    def make_stumble(self, name: str, which: int, at: int) -> None:
        """Its stop checker raises when it is given token number `at`."""
        checker = self.engine.requests[name].group.samples[which].checker
        update = checker.update

        def update_or_raise(token_id: int) -> Any:
            if checker.num_tokens == at:
                self.faulty.add((name, which))
                raise LookupError("cannot read this")
            return update(token_id)

        checker.update = update_or_raise  # type: ignore[method-assign]

    def abort(self, name: str) -> None:
        if name not in self.engine.requests:
            return
        try:
            with self.watching():
                self.engine.abort_request(name)
        except KeyboardInterrupt:
            self.interrupted = True
        if name not in self.engine.requests:
            self.aborted.add(name)

    def look(self) -> None:
        """The books are right, and what a replay of the trace has is what is there."""
        self.engine.check_integrity()
        for event in self.recorder.events[self.num_replayed :]:
            self.replay.apply(event)
        self.num_replayed = len(self.recorder.events)
        assert self.replay.state.unfinished() == self.engine.state(), "the replay differs"
        if self.workload.memory == "cells":  # the tables are compared: there is nothing else
            tables = [request.table for request in self.replay.state.requests.values()]
            assert self.memory.table.num_used == len({cell for table in tables for cell in table})
        elif self.workload.memory == "pages":
            self.look_at_blocks()

    def look_at_blocks(self) -> None:
        """Who holds what is as a replay has it."""
        blocks, replay = self.memory.blocks, self.replay
        for number, block in enumerate(blocks.blocks):
            assert block.ref_cnt == replay.ref_cnts.get(number, 0), f"block {number}: {block}"
            key = None if block.hash is None else block.hash.hex()[:12]
            assert replay.hashes.get(number) == key, f"block {number}: {block}"
        assert tuple(blocks.free_queue) == replay.free_queue(blocks.num_blocks), "the free queue"

    # ---- afterwards

    def check(self) -> None:
        """All that is promised about a run that is over."""
        engine, workload = self.engine, self.workload
        assert not engine.requests and not engine._news, "something is left over"
        assert engine.step() == [], "an empty engine has nothing to return"
        check_empty(self.memory)
        if workload.in_place:
            assert self.memory.storage.bytes_gathered == 0, "K and V were copied"
        assert self.at is None or self.at.came == self.interrupted, "a Ctrl-C was swallowed"
        for number, visitor in enumerate(workload.visitors):
            name = f"r{number}"
            if name in self.left:
                self.check_left(name, visitor)
            elif name in self.delivered:
                self.check_request(name, visitor)
        self.check_trace()

    def check_left(self, name: str, visitor: Visitor) -> None:
        """What it got before it was left is right."""
        for output in self.delivered[name][-1:]:
            wanted = visitor.alone(self.workload.longest)
            for got, want in zip(output.outputs, wanted, strict=True):
                same_tokens(f"{name} sample {got.index}", got, want, len(got.token_ids))

    def check_request(self, name: str, visitor: Visitor) -> None:
        delivered, wanted = self.delivered[name], visitor.alone(self.workload.longest)
        assert delivered and delivered[-1].finished, f"{name} never ended"
        output = delivered[-1]
        assert output.prompt_token_ids == list(pool()[visitor.index].prompt)
        assert [got.index for got in output.outputs] == list(range(visitor.n))
        times, began = output.metrics.token_times, output.metrics.first_scheduled
        mine = [
            event for event in self.recorder.events if getattr(event, "request_id", None) == name
        ]
        assert times == tuple(e.time for e in mine if isinstance(e, TokenSampled))
        assert all(a < b for a, b in pairwise(times)), "a token's first time counts"
        assert began == next((e.time for e in mine if isinstance(e, Scheduled)), None)
        for got, want in zip(output.outputs, wanted, strict=True):
            self.check_sample(f"{name} sample {got.index}" if got.index else name, got, want)
        reasons = [got.finish_reason for got in output.outputs]
        assert ("abort" in reasons) == (name in self.aborted), f"{name} ended with {reasons}"
        faulty = ["error" for sample, _ in self.faulty if sample == name]
        assert reasons.count("error") == len(faulty) and bool(output.error) == bool(faulty), reasons

    def check_sample(self, name: str, got: CompletionOutput, want: CompletionOutput) -> None:
        if got.logprobs is not None:
            assert len(got.logprobs) == len(got.token_ids), name
            total = sum(known[i].logprob for known, i in zip(got.logprobs, got.token_ids))  # noqa: B905
            assert abs((got.cumulative_logprob or 0.0) - total) < 1e-9, "a sum over all tokens"
        if got.finish_reason in ("abort", "error"):
            same_tokens(name, got, want, len(got.token_ids))
            assert the_tokenizer().decode(list(got.token_ids)).startswith(got.text)
        else:
            same_completion(name, got, want)

    def check_trace(self) -> None:
        trace = self.recorder.trace()
        if trace.num_steps % 4 == 0:  # for some: it takes long
            assert Trace.from_json(trace.to_json()) == trace
        steps = list(history(trace))
        assert len(steps) == trace.num_steps == self.engine.num_steps
        for step in steps:
            ended = step.results[-1]
            assert isinstance(ended, StepEnded)
            assert 1 <= ended.num_tokens == step.num_tokens <= self.workload.budget, (
                f"{step.num_tokens} planned, {ended.num_tokens} run of {self.workload.budget}"
            )
            if self.workload.policy == "PrefillFirst":
                entered = {name in step.by_request(Admitted) for name in step.scheduled}
                assert len(entered) == 1, "prefill beside decode"
        if not self.interrupted:  # one forward a step
            assert self.runner.num_forwards == self.engine.num_steps + self.runner.num_broken
            assert self.runner.num_tokens == sum(step.num_tokens for step in steps)

    def count(self) -> Counter[str]:
        """What happened, in numbers."""
        workload, events = self.workload, self.recorder.events
        counts = Counter(type(event).__name__ for event in events)
        outputs = [delivered[-1] for delivered in self.delivered.values() if delivered]
        counts += Counter(
            {
                f"on {workload.memory}": 1,
                f"read {workload.attention}": workload.memory == "pages",
                "samples": sum(len(output.outputs) for output in outputs),
                "refused": self.refused,
                "aborts": len(self.aborted),
                "faults": len(self.faulty),
                "broken forwards": self.runner.num_broken,
                "interrupts": self.interrupted,
                "left": len(self.left),
                "evictions": sum(isinstance(e, BlockTaken) and e.evicted for e in events),
            }
        )
        counts.update(f"by {workload.visitors[int(name[1:])].way}" for name in self.delivered)
        forks = {event.request_id: event for event in events if isinstance(event, Forked)}
        counts["forks that share"] = sum(fork.num_tokens > 0 for fork in forks.values())
        admitted = set[str]()
        for event in events:
            if isinstance(event, Admitted):
                counts["resumed"] += event.request_id in admitted
                admitted.add(event.request_id)
                kind = "forks that keep it" if event.request_id in forks else "hits"
                counts[kind] += event.num_cached > 0
        for step in history(self.recorder.trace()):
            prefill = set()
            for name, event in step.scheduled.items():
                prompt_len = step.planned.requests[name].num_prompt_tokens
                prefill.add(event.first_position < prompt_len)
                counts["chunked prefills"] += event.first_position + len(event.slots) < prompt_len
            counts["mixed steps"] += len(prefill) == 2
        return counts


def same_tokens(
    name: str, got: CompletionOutput, want: CompletionOutput, num_tokens: int | None = None
) -> None:
    """The same (first num_tokens) ids; logprobs to 1e-4 of each other. Differs otherwise."""
    if got.token_ids != want.token_ids[:num_tokens]:
        raise Differs(f"{name}: tokens {got.token_ids}, alone {want.token_ids}")
    assert (got.logprobs is None) == (want.logprobs is None), f"{name}: are logprobs asked for?"
    for token_id, ours, theirs in zip(
        got.token_ids, got.logprobs or (), want.logprobs or (), strict=False
    ):
        assert next(iter(ours)) == token_id, f"{name}: the sampled token comes first"
        for known_id in ours.keys() & theirs.keys():  # equals at the end may have changed places
            one, other = ours[known_id], theirs[known_id]
            near = abs(one.logprob - other.logprob) <= 1e-4  # NaN is near nothing
            if not near or one.decoded_token != other.decoded_token:
                raise Differs(f"{name}: logprobs {one}, alone {other}")
        best = [sorted(one.logprob for one in known.values())[1:] for known in (ours, theirs)]
        if any(abs(a - b) > 1e-4 for a, b in zip(*best, strict=False)):
            raise Differs(f"{name}: logprobs of {token_id} are {ours}, alone {theirs}")


def same_completion(name: str, got: CompletionOutput, want: CompletionOutput) -> None:
    """The same tokens, the same text, the same end. Differs otherwise."""
    same_tokens(name, got, want)
    ended = (got.text, got.finish_reason, got.stop_reason)
    if ended != (want.text, want.finish_reason, want.stop_reason):
        raise Differs(f"{name} ended with {ended}, alone {want}")


def check(workload: Workload, at: AtLine | None = None) -> Counter[str]:
    """Run one workload; AssertionError, or whatever the engine raises, if anything is wrong.

    `at` notes the lines that the engine runs.
    """
    party = Party(workload, at=at)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        party.run()
    finally:
        signal.signal(signal.SIGINT, before)
    party.check()
    return party.count()
