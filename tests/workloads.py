"""Workloads for the engine, and the check that every request comes out as if alone.

`check` runs one, on rows, pages or cells, and asserts all that the engine promises: whatever
callers, samplers, callbacks, devices and Ctrl-C do. fuzz.py draws them.
"""

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import count as numbers_from
from itertools import pairwise
from typing import Any

import torch
from at_line import AtLine, Moment
from checkpoints import HfQwen3, hf_config
from engines import poison, random_model
from memories import SharedRows, check_empty, poison_cells, poison_pages
from mistakes import make_a_mistake
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    ScheduledRequest,
    StepOutput,
)
from tutorial_engine.engine.runner import CachedRunner, ModelOutput, ModelRunner, make_runner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.many_blocks import PagedAttention
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.checkpoint import load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.tiny.train import hugging_face_tensors
from tutorial_engine.trace.events import (
    Admitted,
    BlockCopied,
    BlockShared,
    BlockTaken,
    CellsShared,
    Forked,
    Preempted,
    Recorder,
    Scheduled,
    StepBegan,
    StepEnded,
    Trace,
)
from tutorial_engine.trace.history import Replay

POLICIES: dict[str, type[Scheduler]] = {
    policy.__name__: policy for policy in (Scheduler, StaticBatching, OneByOne, PrefillFirst)
}
MEMORIES = ("rows", "pages", "cells")
WAYS = ("add", "stream", "generate")
WHOLE = 0  # a block size: the whole row
BLOCK_SIZES = (1, 2, 3, 4, 16, WHOLE)
BACKENDS = {  # how attention reads blocks
    "gathered": None,
    "in a loop": NaivePagedAttention,
    "many at a time": PagedAttention,
}
LIMITS = (22, 26, 32)  # tokens of a request, prompt and output
EOS = (5, 86, 105)
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
def small_model() -> Qwen3ForCausalLM:
    """Random, untied, two small layers; some ids are bytes that are no character alone."""
    return random_model(
        seed=Drawn.seed + 2,
        eos=EOS,
        vocab_size=112,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max(LIMITS),
    )


@cache
def the_tokenizer() -> Tokenizer:
    return load_tokenizer()


# -- the pool: requests whose tokens rounding cannot change ---------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt and what is asked of it."""

    prompt: tuple[int, ...]
    params: SamplingParams


class NotingRunner(CachedRunner):
    """Keeps the logits [V] of every step of one sequence."""

    def __init__(self, model: Qwen3ForCausalLM, max_len: int) -> None:
        super().__init__(model, poison(make_runner(model, max_len=max_len).cache))
        self.seen: list[Tensor] = []

    def run(self, requests: Sequence[Request], chunk_size: int | None = None) -> Tensor:
        logits = super().run(requests, chunk_size)
        self.seen.append(logits[0].clone())
        return logits


def run_alone(asked: Asked, limit: int) -> tuple[CompletionOutput, list[Tensor]]:
    """The loop without a scheduler, on this one prompt; and the logits that it saw."""
    runner = NotingRunner(small_model(), limit)
    (output,) = generate(
        runner, [asked.prompt], asked.params, tokenizer=the_tokenizer(), max_len=limit
    )
    return output.outputs[0], runner.seen


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
        if number % 6 == 0:
            prompt = found[-1].prompt
        elif number % 6 == 3:
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

    transformers runs each prompt with what was said, without any cache, and has to say the same.
    """
    ours = small_model()
    sizes = {name: size for name, size in asdict(ours.config).items() if name != "eos_token_ids"}
    theirs = HfQwen3(hf_config(sizes)).eval()
    theirs.load_state_dict(hugging_face_tensors(ours, torch.float32))
    counts: Counter[str] = Counter()
    for index, asked in enumerate(pool()):
        said = alone(index, max(LIMITS))
        rows = theirs(torch.tensor([[*asked.prompt, *said.token_ids]])).logits[0].log_softmax(-1)
        for at, token in enumerate(said.tokens, len(asked.prompt) - 1):
            if asked.params.temperature == 0 and not asked.params.min_tokens:
                best = int(rows[at].argmax())
                assert best == token.token_id, f"request {index}: {said.token_ids}, not {best}"
                counts["greedy tokens as transformers"] += 1
            if token.logprob is not None:
                assert abs(float(rows[at, token.token_id]) - token.logprob) < 1e-4
                counts["logprobs as transformers"] += 1
    return counts


# -- workloads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """A request of the pool: when it comes, with how many samples, and what goes wrong.

    `aborted_at` counts steps; `kills` is the visitor whom its first token's callback aborts.
    `fails` are a sample and the number of the token that its sampler fails to choose; `raises` is
    the number of the call in which its callback does. It comes by add_request, stream or generate;
    `leaves` is the number of results after which a stream is left.
    """

    index: int
    arrival: int = 0
    aborted_at: int | None = None
    kills: int | None = None
    n: int = 1
    fails: tuple[int, int] | None = None
    raises: int | None = None
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

    `capacity` is the pool in tokens, rounded up to blocks (None: enough). `mistakes` are callers'
    (step, number of the mistake); `breaks` is the forward that raises, and is not to be missed;
    `interrupt` is when Ctrl-C comes.
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
    attention: str = "gathered"  # on pages, any of BACKENDS
    mistakes: tuple[tuple[int, int], ...] = ()
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
        return self.memory == "pages" and self.attention != "gathered"

    @property
    def max_steps(self) -> int:
        """More steps than any right engine can need.

        The first of those that run is never thrown out, and each step runs a token of it at least;
        only PrefillFirst has steps in between that let others in, at most one per seat.
        """
        own = sum(visitor.n for visitor in self.visitors) * self.limit
        pauses = self.max_num_seqs + 1 if self.policy == "PrefillFirst" else 1
        last = max((visitor.arrival for visitor in self.visitors), default=0)
        return max([last, *(step for step, _ in self.mistakes)]) + own * pauses + 2


class Differs(AssertionError):
    """A request did not come out as if it were alone."""


@dataclass
class Diary:
    """What was delivered to one visitor, sample by sample."""

    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    output: RequestOutput | None = None
    results: list[StepOutput] = field(default_factory=list)
    told: list[StepOutput] = field(default_factory=list)  # what its callback heard

    def write_all(self, output: RequestOutput) -> None:
        """Of a generate."""
        self.output = output
        self.tokens = {one.index: list(one.tokens) for one in output.outputs}
        self.texts = {one.index: one.text for one in output.outputs}

    def write(self, result: StepOutput) -> None:
        self.results.append(result._replace(output=None))
        name, sample = result.request_id, result.sample
        assert self.output is None and sample not in self.ended, f"{name} gets more after its end"
        self.tokens.setdefault(sample, [])
        if result.token is not None:
            self.tokens[sample].append(result.token)
        self.texts[sample] = self.texts.get(sample, "") + result.text
        if result.finish is not None:
            self.ended.add(sample)
        assert result.output is None or result.finish is not None, f"{name} ends with no reason"
        self.output = result.output


class Faulty(Sampler):
    """Fails to choose token number `at`, and tells it."""

    def __init__(self, params: SamplingParams, at: int, tell: Callable[[], object]) -> None:
        super().__init__(params, EOS)
        self.at, self.tell = at, tell

    def sample(self, logits: Tensor) -> SampledToken:
        if self.num_sampled == self.at:
            self.tell()
            raise RuntimeError("out of luck")
        return super().sample(logits)


class Breaking(ModelRunner):
    """Its forward number `at`, counted from 0, raises once, when K and V are written already."""

    at: int | None = None
    ran_alone = 0  # of those that were in it

    def run_once(self, scheduled: Sequence[ScheduledRequest]) -> ModelOutput:
        output = super().run_once(scheduled)
        if self.at is not None and self.num_forwards > self.at:
            self.at, self.ran_alone = None, len(scheduled)
            self.num_tokens -= sum(one.num_tokens for one in scheduled)
            raise RuntimeError("the device is gone")
        return output


class Party:
    """One workload in its engine, from the first arrival to the last end.

    `at` notes the lines that the engine runs.
    """

    memory: Any

    def __init__(
        self, workload: Workload, tokenizer: Tokenizer | None = None, at: AtLine | None = None
    ) -> None:
        self.workload, self.recorder = workload, Recorder()
        self.memory = self.make_memory()
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
        )
        runner = Breaking(small_model(), self.memory.storage, self.make_attention())
        runner.at = workload.breaks
        self.engine = LLMEngine(
            small_model(),
            tokenizer or the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            runner=runner,
        )
        self.diaries: dict[str, Diary] = {}
        self.streams: dict[str, Iterator[StepOutput]] = {}
        self.aborted: set[str] = set()
        self.left: set[str] = set()  # whose stream or generate did not come to its end
        self.refused = self.mistakes = 0
        moment = workload.interrupt
        self.at = AtLine(moment) if moment is not None else at
        self.interrupted = False
        self.may_lose = self.has_lost = False  # results on their way to whoever was interrupted

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
        rows = StaticKVCache.from_config(
            config, max_seqs=workload.max_num_seqs, max_len=workload.limit, trace=self.recorder
        )
        return SharedRows(rows, workload.capacity)

    def make_attention(self) -> AttentionBackend | None:
        """A backend over the memory; None: the engine's own."""
        backend = BACKENDS[self.workload.attention]
        return backend(self.memory) if self.workload.in_place and backend is not None else None

    def run(self) -> None:
        """Let them come, go and run; look at everything after every step."""
        engine, workload, now = self.engine, self.workload, 0
        self.replay, self.seen = Replay(), 0
        self.broken: set[tuple[str, int]] = set()  # requests' samples whose sampler or callback was
        last = max([v.arrival for v in workload.visitors] + [step for step, _ in workload.mistakes])
        while now <= last or engine.has_unfinished_requests or self.streams:
            assert now <= workload.max_steps, f"still running after {now} steps"
            for number, visitor in enumerate(workload.visitors):
                if visitor.arrival == now:
                    self.enter(number, visitor)
                if visitor.aborted_at == now:
                    self.abort(number)
            for step, number in workload.mistakes:
                if step == now:
                    self.blunder(number)
            for number, visitor in enumerate(workload.visitors):
                if f"v{number}" in self.streams:
                    self.pull(f"v{number}", visitor)
            if len(self.recorder.events) > self.seen:  # some came, or went
                self.look()
            self.step()
            self.look()
            now += 1

    def watching(self) -> AbstractContextManager[None]:
        """Lines of the engine are counted, or interrupted."""
        return nullcontext() if self.at is None else self.at.watching()

    def step(self) -> None:
        """One of the engine's; results of one that is interrupted may be lost when it has ended."""
        before = len(self.recorder.events)
        try:
            with self.watching():
                results = self.engine.step()
        except KeyboardInterrupt:
            self.note_interrupt(before)
            return
        for result in results:
            if result.request_id.startswith("v"):  # who is there by mistake is nobody's
                self.diaries[result.request_id].write(result)

    def note_interrupt(self, num_events: int) -> None:
        """One came, after so many events. At the end of a step its results may be lost."""
        new = {type(event) for event in self.recorder.events[num_events:]}
        self.interrupted, self.may_lose = True, StepBegan not in new or StepEnded in new

    def pull(self, name: str, visitor: Visitor) -> None:
        """The next result of a stream; or it is left."""
        diary, stream = self.diaries[name], self.streams[name]
        try:
            with self.watching():
                if len(diary.results) == visitor.leaves:
                    self.left.add(name)
                    del self.streams[name]
                    stream.close()  # type: ignore[attr-defined]
                else:
                    diary.write(next(stream))
        except StopIteration:
            self.streams.pop(name)
        except KeyboardInterrupt:
            self.interrupted = True
            self.left.add(name)
            self.streams.pop(name, None)

    def blunder(self, number: int) -> None:
        """A caller's mistake: a ValueError, and nothing else changes."""
        engine = self.engine

        def state() -> object:
            return engine.state(), sorted(engine.requests), engine.memory.seq_ids, engine.num_steps

        before = state()
        self.mistakes += 1
        events_before = len(self.recorder.events)
        try:
            taken = make_a_mistake(engine, random.Random(number))
        except KeyboardInterrupt:  # a callback's, in a step that this caller made
            self.note_interrupt(events_before)
            return
        if not taken:
            assert state() == before, f"mistake {number} changed something"

    def look(self) -> None:
        """The books are right, and what a replay of the trace has is what is there."""
        self.engine.check_integrity()
        for event in self.recorder.events[self.seen :]:
            self.replay.apply(event)
        self.seen = len(self.recorder.events)
        assert self.replay.state.unfinished() == self.engine.state(), "the replay differs"
        if self.workload.memory == "cells":  # the tables are compared: there is nothing else
            tables = [request.table for request in self.replay.state.requests.values()]
            assert self.memory.table.num_used == len({cell for table in tables for cell in table})
        elif self.workload.memory == "pages":
            self.look_at_blocks()

    def look_at_blocks(self) -> None:
        """Who holds what is as a replay has it."""
        there, told = self.memory.blocks, self.replay
        for number, block in enumerate(there.blocks):
            assert block.ref_cnt == told.ref_cnts.get(number, 0), f"block {number}: {block}"
            key = None if block.hash is None else block.hash.hex()[:12]
            assert told.hashes.get(number) == key, f"block {number}: {block}"
        fresh = [n for n in range(there.num_blocks) if n not in told.ref_cnts]
        assert list(there.free_queue) == fresh + list(told.free_queue), "the free queue"

    def enter(self, number: int, visitor: Visitor) -> None:
        asked, workload = pool()[visitor.index], self.workload
        never = len(asked.prompt) >= workload.longest or (
            not workload.can_chunk and len(asked.prompt) > workload.budget
        )
        name, engine = f"v{number}", self.engine
        diary = self.diaries[name] = Diary()
        engine._names = iter([name])  # streams and generates choose their own
        try:
            with self.watching():
                if visitor.way == "stream":
                    self.streams[name] = engine.stream([asked.prompt], visitor.params)
                elif visitor.way == "generate":
                    (output,) = engine.generate([asked.prompt], visitor.params)
                    diary.write_all(output)
                else:
                    engine.add_request(
                        asked.prompt,
                        visitor.params,
                        name,
                        on_token=self.callback(name, visitor),
                        sampler=self.samplers(name, visitor),
                    )
        except ValueError as error:
            assert never and f"{len(asked.prompt)} tokens" in str(error), error
            self.refused += 1
            del self.diaries[name]
        except KeyboardInterrupt:
            self.interrupted = True
            if visitor.way != "add" or name not in engine.requests:
                self.left.add(name)
        else:
            assert not never, f"{name} can never run"
        finally:
            engine._names = map("h{}".format, numbers_from())  # of whoever comes by mistake

    def callback(self, name: str, visitor: Visitor) -> Callable[[StepOutput], None]:
        """One that listens; aborts its victim when called first; raises when its time has come."""
        left, calls = [] if visitor.kills is None else [visitor.kills], numbers_from(0)

        def callback(result: StepOutput) -> None:
            self.diaries[name].told.append(result._replace(output=None))
            if left:
                self.abort(left.pop())
            if next(calls) == visitor.raises:
                self.broken.add((name, result.sample))
                raise RuntimeError("out of luck")

        return callback

    def samplers(self, name: str, visitor: Visitor) -> list[Sampler] | None:
        """One of them fails, if that is this visitor's fate."""
        if visitor.fails is None:
            return None
        which, at = visitor.fails
        each = [visitor.params.sample(i) for i in range(visitor.n)]
        samplers = [Sampler(params, EOS) for params in each]
        samplers[which] = Faulty(each[which], at, lambda: self.broken.add((name, which)))
        return samplers

    def abort(self, number: int) -> None:
        name = f"v{number}"
        if name not in self.engine.requests:
            return
        try:
            with self.watching():
                self.engine.abort(name)
        except KeyboardInterrupt:
            self.interrupted = True
        if name not in self.engine.requests:
            self.aborted.add(name)

    # ---- afterwards

    def check(self) -> None:
        """All that is promised about a run that is over."""
        engine, at = self.engine, self.at
        assert not engine.requests, "something is left over"
        assert not (engine._inbox._results or engine._to_sweep or engine._in_step), "not all taken"
        check_empty(self.memory)
        if self.workload.in_place:
            assert self.memory.storage.bytes_gathered == 0, "K and V were copied"
        assert engine.step() == [], "an empty engine has nothing to deliver"
        assert at is None or at.came == self.interrupted, "a Ctrl-C was swallowed"
        if not self.interrupted:
            forwards = engine.num_steps + engine.runner.ran_alone  # type: ignore[attr-defined]
            assert engine.runner.num_forwards == forwards, "one forward per step"
        for number, visitor in enumerate(self.workload.visitors):
            name = f"v{number}"
            if name not in self.diaries:
                continue
            if name in self.left:
                self.check_left(name, visitor)
            elif self.may_lose and self.diaries[name].output is None:
                self.has_lost = True
                self.check_left(name, visitor)
            else:
                self.check_told(name, number, visitor)
                self.check_request(name, self.diaries[name], *visitor.alone(self.workload.longest))
        self.check_trace()

    def check_left(self, name: str, visitor: Visitor) -> None:
        """What it got before it was left is right."""
        for index, tokens in self.diaries[name].tokens.items():
            want = visitor.alone(self.workload.longest)[index]
            same_tokens(f"{name} sample {index}", tokens, want.tokens[: len(tokens)])

    def check_told(self, name: str, number: int, visitor: Visitor) -> None:
        """Its callback heard what steps returned, in this order, until it broke or had enough."""
        diary = self.diaries[name]
        assert diary.output is not None, f"{name} never ended"
        assert diary.output.prompt_token_ids == pool()[visitor.index].prompt
        if visitor.way != "add" or self.may_lose:
            return
        assert diary.told == diary.results[: len(diary.told)], f"{name} was told something else"
        if visitor.raises is None and visitor.kills != number:
            assert len(diary.told) == len(diary.results), f"{name} was not told all"

    def check_request(self, name: str, diary: Diary, *wanted: CompletionOutput) -> None:
        output = diary.output
        assert output is not None, f"{name} never ended"
        assert [got.index for got in output.outputs] == list(range(len(wanted)))
        times = output.metrics.token_times
        assert len(times) == len(output.outputs[0].tokens)
        assert all(a < b for a, b in pairwise(times))
        for got, want in zip(output.outputs, wanted, strict=True):
            self.check_sample(name, diary, got, want)
        reasons = [got.finish_reason for got in output.outputs]
        assert ("abort" in reasons) == (name in self.aborted), f"{name} ended with {reasons}"
        assert output.error or "error" not in reasons, f"{name} does not say what went wrong"
        assert not output.error or any((name, i) in self.broken for i in range(len(wanted)))

    def check_sample(
        self, name: str, diary: Diary, got: CompletionOutput, want: CompletionOutput
    ) -> None:
        told = diary.tokens.get(got.index, []), diary.texts.get(got.index, "")
        name = f"{name} sample {got.index}" if got.index else name
        if self.may_lose:
            left = iter(got.tokens)
            assert all(token in left for token in told[0]), f"{name}: not in order, or not once"
            self.has_lost = self.has_lost or tuple(told[0]) != got.tokens
        else:
            assert tuple(told[0]) == got.tokens, f"{name}: not every token was delivered once"
            assert told[1] == got.text, f"{name}: {told[1]!r} was delivered of {got.text!r}"
        if got.cumulative_logprob is not None:
            total = sum(token.logprob for token in got.tokens if token.logprob is not None)
            assert abs(got.cumulative_logprob - total) < 1e-9, "a sum over what was delivered"
        if got.finish_reason in ("abort", "error"):
            same_tokens(name, got.tokens, want.tokens[: len(got.tokens)])
            assert len(got.tokens) <= len(want.tokens)
            assert the_tokenizer().decode(list(got.token_ids)).startswith(got.text)
            return
        same_completion(name, got, want)
        total, wanted = got.cumulative_logprob, want.cumulative_logprob
        assert (total is None) == (wanted is None)
        assert total is None or wanted is None or abs(total - wanted) <= 1e-3

    def check_trace(self) -> None:
        trace = self.recorder.trace()
        if trace.num_steps % 4 == 0:  # for some: it takes long
            assert Trace.from_json(trace.to_json()) == trace
        if self.interrupted:
            return  # a step that did not end counts nowhere
        assert trace.num_steps == self.engine.num_steps
        ran = [event.num_tokens for event in trace.events if isinstance(event, StepEnded)]
        assert all(1 <= n <= self.workload.budget for n in ran), f"{ran} of {self.workload.budget}"
        planned = [0] * len(ran)
        for event in trace.events:
            if isinstance(event, Scheduled):
                planned[event.step] += len(event.slots)
        assert planned == ran and sum(ran) == self.engine.runner.num_tokens

    def count(self) -> Counter[str]:
        """What happened, in numbers."""
        workload, events = self.workload, self.recorder.events
        counts: Counter[str] = Counter(
            {
                "workloads": 1,
                f"on {workload.memory}": 1,
                "requests": len(self.diaries),
                "refused": self.refused,
                "aborts": len(self.aborted),
                "steps": self.engine.num_steps,
                "tokens": sum(
                    len(ids) for diary in self.diaries.values() for ids in diary.tokens.values()
                ),
                "samples": sum(len(diary.tokens) for diary in self.diaries.values()),
                "faults": len(self.broken),
                "mistakes": self.mistakes,
                "broken forwards": self.engine.runner.ran_alone > 0,  # type: ignore[attr-defined]
                "interrupts": self.interrupted,
                "interrupts that lose a result": self.has_lost,
                "left": len(self.left),
            }
        )
        if workload.memory == "pages":
            counts[f"read {workload.attention}"] = 1
            counts["bytes gathered"] = self.memory.storage.bytes_gathered
        visitors = {f"v{number}": visitor for number, visitor in enumerate(workload.visitors)}
        for name in self.diaries:
            counts[f"by {visitors[name].way}"] += 1
        kinds: dict[int, set[str]] = {}
        admitted: set[str] = set()
        kept: set[str] = set()
        forked = {event.request_id for event in events if isinstance(event, Forked)}
        parents = {event.parent_id for event in events if isinstance(event, Forked)}
        for event in events:
            match event:
                case Preempted():
                    counts["preemptions"] += 1
                case Forked():
                    counts["forks"] += 1
                    counts["forks that share"] += event.num_tokens > 0
                case BlockShared():
                    counts["blocks shared"] += 1
                case CellsShared():
                    counts["cells shared"] += len(event.cells)
                case BlockCopied():
                    counts["copies"] += 1
                case BlockTaken():
                    counts["evictions"] += event.evicted
                case Admitted():
                    counts["resumed"] += event.request_id in admitted
                    if event.num_cached and event.request_id not in forked:
                        counts["hits"] += 1
                        counts["hit tokens"] += event.num_cached
                    elif event.num_cached:
                        kept.add(event.request_id)
                    admitted.add(event.request_id)
                case Scheduled() if (name := event.request_id.split(".")[0]) in visitors:
                    prompt_len = len(pool()[visitors[name].index].prompt)
                    prefill = event.first_position < prompt_len
                    kinds.setdefault(event.step, set()).add("prefill" if prefill else "decode")
                    end = event.first_position + len(event.slots)
                    counts["chunked prefills"] += end < prompt_len
        counts["mixed steps"] = sum(len(found) == 2 for found in kinds.values())
        counts["forks that keep it"] = len(kept)
        counts["runs that preempt"] = counts["preemptions"] > 0
        families = {name for name, visitor in visitors.items() if visitor.n > 1}
        counts["families aborted after the fork"] = len(self.aborted & families & parents)
        counts["families aborted before it"] = len((self.aborted & families) - parents)
        return counts


def same_tokens(
    name: str, got: Sequence[SampledToken], want: Sequence[SampledToken], atol: float = 1e-4
) -> None:
    """The same ids; logprobs to 1e-4 of each other. Differs otherwise."""
    ids, wanted = [t.token_id for t in got], [t.token_id for t in want]
    if ids != wanted:
        raise Differs(f"{name}: tokens {ids}, alone {wanted}")
    for position, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        pairs = [(ours.logprob, theirs.logprob)]
        tops = (ours.top_logprobs, theirs.top_logprobs)
        pairs += [(a[1], b[1]) for a, b in zip(*tops, strict=True)]
        known = dict(theirs.top_logprobs)
        pairs += [(value, known[i]) for i, value in ours.top_logprobs if i in known]
        for a, b in pairs:
            if (a is None) != (b is None) or not (a is b or abs(a - b) <= atol):  # type: ignore[operator]
                raise Differs(f"{name}: logprobs of token {position} are {ours}, alone {theirs}")


def same_completion(name: str, got: CompletionOutput, want: CompletionOutput) -> None:
    """The same tokens, the same text, the same end. Differs otherwise."""
    same_tokens(name, got.tokens, want.tokens)
    ended = (got.text, got.finish_reason, got.stop_reason)
    if ended != (want.text, want.finish_reason, want.stop_reason):
        raise Differs(f"{name} ended with {ended}, alone {want}")


def same_as_alone(name: str, got: CompletionOutput, index: int) -> None:
    """It came out as request `index` of the pool does alone."""
    same_completion(name, got, alone(index, max(LIMITS)))


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


def several(numbers: Sequence[int], **options: Any) -> Workload:
    """These requests of the pool, all at once."""
    return Workload(tuple(Visitor(number) for number in numbers), **options)


def counted(counts: Counter[str]) -> Iterator[str]:
    """Lines for people."""
    for name, number in counts.items():
        yield f"{name:<34}{number:>12,}"
