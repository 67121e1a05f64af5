"""Random workloads for the engine, and the check that every request comes out as if alone.

`check` runs one workload on rows and asserts all that the engine promises; `workloads` draws them,
for hypothesis. test_engine_properties.py runs some thousands, long_run.py as many as you like.
memory_runs.py has the same on pages and cells.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count as numbers_from
from itertools import pairwise
from typing import Any

import torch
from engines import poison, random_model
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import CompletionOutput, Request, RequestOutput, StepOutput
from tutorial_engine.engine.runner import CachedRunner, ModelRunner, make_runner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Allocation
from tutorial_engine.model.checkpoint import load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.trace.events import (
    Admitted,
    Forked,
    Preempted,
    Recorder,
    Scheduled,
    StepEnded,
    Trace,
)
from tutorial_engine.trace.history import Replay

POLICIES: dict[str, type[Scheduler]] = {
    policy.__name__: policy for policy in (Scheduler, StaticBatching, OneByOne, PrefillFirst)
}
LIMITS = (22, 26, 32)  # tokens of a request, prompt and output
EOS = (5, 86, 105)
POOL_SIZE = 44
LONGEST_PROMPT = 20


@cache
def small_model() -> Qwen3ForCausalLM:
    """Random, untied, two small layers; some ids are bytes that are no character alone."""
    return random_model(
        seed=4,
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
    draw = random.Random(2)
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


# -- memory that runs out -------------------------------------------------------------------------


class SharedRows:
    """Rows that together hold `capacity` tokens at most: what runs may have to give way.

    A request is let in only if all its tokens fit now (semantics of pages, without the pages). What
    a freed row held becomes NaN: nobody reads it unnoticed.
    """

    def __init__(self, rows: StaticKVCache, capacity: int | None = None) -> None:
        self.rows, self.capacity = poison(rows), capacity
        self.room: dict[str, int] = {}  # seq_id -> tokens that it has room for
        self.storage, self.trace, self.settings = rows.storage, rows.trace, rows.settings
        self.commit, self.fork, self.describe = rows.commit, rows.fork, rows.describe
        self.max_len = min(rows.max_len, capacity or rows.max_len)
        self.user: object = None

    @property
    def seq_ids(self) -> tuple[int | str, ...]:
        return self.rows.seq_ids

    def allocate(
        self, seq_id: str, token_ids: Sequence[int], num_computed: int, num_new: int
    ) -> Allocation | None:
        own = self.room.get(seq_id)
        end = num_computed + num_new
        wanted = len(token_ids) if own is None else max(own, end)
        others = sum(self.room.values()) - (own or 0)
        if self.capacity is not None and others + wanted > self.capacity:
            return None
        allocation = self.rows.allocate(seq_id, token_ids, num_computed, num_new)
        if allocation is not None:
            self.room[seq_id] = max(own or 0, end)
        return allocation

    def free(self, seq_id: str) -> None:
        self.room.pop(seq_id, None)
        for row in self.rows.describe(seq_id).table:
            for tensor in self.rows.by_rows():  # [layers, rows, H_kv, max_len, D]
                tensor[:, row] = float("nan")
        self.rows.free(seq_id)

    def check_integrity(self) -> None:
        self.rows.check_integrity()
        used = self.rows.num_rows - self.rows.num_free_rows
        assert used == len(self.room), f"{used} rows are taken by {sorted(self.room)}"
        total = sum(self.room.values())
        assert self.capacity is None or total <= self.capacity, f"{total} of {self.capacity}"

    def check_empty(self) -> None:
        """Nothing is anybody's."""
        assert not self.room and self.rows.num_free_rows == self.rows.num_rows, "rows leaked"


# -- workloads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """A request of the pool: when it comes, with how many samples, and what goes wrong.

    `aborted_at` counts steps; `kills` is the visitor whom its first token's callback aborts.
    `fails` are a sample and the number of the token that its sampler fails to choose; `raises` is
    the number of the call in which its callback does.
    """

    index: int
    arrival: int = 0
    aborted_at: int | None = None
    kills: int | None = None
    n: int = 1
    fails: tuple[int, int] | None = None
    raises: int | None = None

    @property
    def params(self) -> SamplingParams:
        """What it asks for."""
        return replace(pool()[self.index].params, n=self.n)

    def alone(self, limit: int) -> list[CompletionOutput]:
        """What each of its samples gives when nobody else is there."""
        return [alone(self.index, limit, sample) for sample in range(self.n)]


@dataclass(frozen=True)
class Workload:
    """Who comes when, and the engine that they come to."""

    visitors: tuple[Visitor, ...]
    policy: str = "Scheduler"
    max_num_seqs: int = 3
    budget: int = 16
    limit: int = max(LIMITS)
    threshold: int | None = None
    chunked: bool = True
    capacity: int | None = None
    slots_first: bool = False

    @property
    def can_chunk(self) -> bool:
        return self.chunked and self.policy != "PrefillFirst"

    @property
    def longest(self) -> int:
        """Tokens that a request can have, prompt and output."""
        return self.limit

    @property
    def max_steps(self) -> int:
        """More steps than any right engine can need.

        The first of those that run is never thrown out, and each step runs a token of it at least;
        only PrefillFirst has steps in between that let others in, at most one per seat.
        """
        own = sum(visitor.n for visitor in self.visitors) * self.limit
        pauses = self.max_num_seqs + 1 if self.policy == "PrefillFirst" else 1
        return max((v.arrival for v in self.visitors), default=0) + own * pauses + 2


@st.composite
def workloads(draw: st.DrawFn, faults: bool = False) -> Workload:
    """Any workload; two of five are a crowd whose memory runs out.

    With `faults` some have several samples, samplers that fail, or callbacks that raise.
    """
    crowd = draw(st.sampled_from([False, False, False, True, True]))
    budget = draw(st.sampled_from([3, 4, 5] if crowd else range(8)))
    n = draw(st.integers(3, 5) if crowd else st.integers(1, 3 if budget < 2 else 5))
    visitors = draw(_visitors(n, 2 if crowd else 7, faults))
    limit = draw(st.sampled_from(LIMITS))
    others = ["StaticBatching", "PrefillFirst", *([] if crowd else ["OneByOne"])]
    policy = draw(st.sampled_from(["Scheduler", "Scheduler", *others]))
    chunked = draw(st.sampled_from([True, True, False]))
    whole = policy == "PrefillFirst" or not chunked  # or most would be refused
    budgets = [8, 13, 20, 20, 34, 34, 500, 500] if whole else [1, 2, 3, 5, 8, 13, 34, 500]
    room = [None, limit, limit + 4, limit + 11, 2 * limit]
    return Workload(
        visitors,
        policy,
        draw(st.integers(3, 6) if crowd else st.integers(1, 5)),
        budgets[budget],
        limit,
        draw(st.sampled_from([None, None, 1, 3, 7])),
        chunked,
        draw(st.sampled_from(room[1:3] if crowd else room)),
        draw(st.booleans()),
    )


def _visitors(n: int, latest: int, faults: bool) -> st.SearchStrategy[tuple[Visitor, ...]]:
    """n of them; every fifth is aborted or has another one aborted, as long as it is there.

    All are in seven bytes each, which hypothesis draws ten times faster than seven numbers.
    """

    def visitor(drawn: bytes) -> Visitor:
        index, arrival, fate, when, victim, samples, which = drawn
        index, fate, many = index % POOL_SIZE, fate % 20, 1
        aborted_at = when % 15 if fate in (16, 17) else None
        kills = victim % n if fate in (18, 19) else None
        one = Visitor(index, arrival % (latest + 1), aborted_at, kills)
        if not faults:
            return one
        if samples % 8 > 5:  # 2 or 3
            many = min(samples % 8 - 4, most_samples(index))
        fails = (which % many, when % 8) if fate == 15 else None
        return replace(one, n=many, fails=fails, raises=when % 10 if fate == 14 else None)

    return st.binary(min_size=7 * n, max_size=7 * n).map(
        lambda drawn: tuple(visitor(drawn[7 * i : 7 * i + 7]) for i in range(n))
    )


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


class Party:
    """One workload in its engine, from the first arrival to the last end."""

    memory: Any

    def __init__(self, workload: Workload, tokenizer: Tokenizer | None = None) -> None:
        self.workload, self.recorder = workload, Recorder()
        self.memory = self.make_memory()
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
            slots_first=workload.slots_first,
        )
        self.engine = LLMEngine(
            small_model(),
            tokenizer or the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            runner=ModelRunner(small_model(), self.memory.storage, self.make_attention()),
        )
        self.diaries: dict[str, Diary] = {}
        self.aborted: set[str] = set()
        self.refused = 0

    def make_memory(self) -> Any:
        """Rows, poisoned."""
        workload = self.workload
        config = CacheConfig(
            max_seqs=workload.max_num_seqs,
            max_len=workload.limit,
            slots_first=workload.slots_first,
        )
        rows = StaticKVCache.from_config(small_model().config, config, self.recorder)
        return SharedRows(rows, workload.capacity)

    def make_attention(self) -> AttentionBackend | None:
        """A backend over the memory; None: the engine's own."""
        return None

    def run(self) -> None:
        """Let them come, go and run; look at everything after every step."""
        engine, workload, now = self.engine, self.workload, 0
        self.replay, self.seen = Replay(), 0
        self.broken: set[tuple[str, int]] = set()  # requests' samples whose sampler or callback was
        last = max(visitor.arrival for visitor in workload.visitors)
        while now <= last or engine.has_unfinished_requests:
            assert now <= workload.max_steps, f"still running after {now} steps"
            for number, visitor in enumerate(workload.visitors):
                if visitor.arrival == now:
                    self.enter(number, visitor)
                if visitor.aborted_at == now:
                    self.abort(number)
            if len(self.recorder.events) > self.seen:  # some came, or went
                self.look()
            for result in engine.step():
                self.diaries[result.request_id].write(result)
            self.look()
            now += 1

    def look(self) -> None:
        """The books are right, and what a replay of the trace has is what is there."""
        self.engine.check_integrity()
        for event in self.recorder.events[self.seen :]:
            self.replay.apply(event)
        self.seen = len(self.recorder.events)
        assert self.replay.state.unfinished() == self.engine.state(), "the replay differs"

    def enter(self, number: int, visitor: Visitor) -> None:
        asked, workload = pool()[visitor.index], self.workload
        never = len(asked.prompt) >= workload.longest or (
            not workload.can_chunk and len(asked.prompt) > workload.budget
        )
        name, engine = f"v{number}", self.engine
        self.diaries[name] = Diary()
        try:
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
        else:
            assert not never, f"{name} can never run"

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
        if name in self.engine.requests:
            self.engine.abort(name)
            self.aborted.add(name)

    # ---- afterwards

    def check(self) -> None:
        """All that is promised about a run that is over."""
        engine = self.engine
        assert not engine.requests, "something is left over"
        self.check_memory()
        assert engine.step() == [], "an empty engine has nothing to deliver"
        assert engine.runner.num_forwards == engine.num_steps, "one forward per step"
        for number, visitor in enumerate(self.workload.visitors):
            name = f"v{number}"
            if name in self.diaries:
                self.check_told(name, number, visitor)
                self.check_request(name, self.diaries[name], *visitor.alone(self.workload.longest))
        self.check_trace()

    def check_memory(self) -> None:
        """All is free."""
        self.memory.check_empty()

    def check_told(self, name: str, number: int, visitor: Visitor) -> None:
        """Its callback heard what steps returned, in this order, until it broke or had enough."""
        diary = self.diaries[name]
        assert diary.output is not None, f"{name} never ended"
        assert diary.output.prompt_token_ids == pool()[visitor.index].prompt
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
        events = self.recorder.events
        counts: Counter[str] = Counter(
            workloads=1,
            requests=len(self.diaries),
            refused=self.refused,
            aborts=len(self.aborted),
            steps=self.engine.num_steps,
            tokens=sum(
                len(ids) for diary in self.diaries.values() for ids in diary.tokens.values()
            ),
        )
        counts["samples"] = sum(len(diary.tokens) for diary in self.diaries.values())
        counts["faults"] = len(self.broken)
        prompt_lens = {
            f"v{number}": len(pool()[visitor.index].prompt)
            for number, visitor in enumerate(self.workload.visitors)
        }
        kinds: dict[int, set[str]] = {}
        admitted: set[str] = set()
        for event in events:
            if isinstance(event, Preempted):
                counts["preemptions"] += 1
            elif isinstance(event, Forked):
                counts["forks"] += 1
            elif isinstance(event, Admitted):
                counts["resumed"] += event.request_id in admitted
                admitted.add(event.request_id)
            elif isinstance(event, Scheduled):
                prompt_len = prompt_lens[event.request_id.split(".")[0]]
                prefill = event.first_position < prompt_len
                kinds.setdefault(event.step, set()).add("prefill" if prefill else "decode")
                counts["chunked prefills"] += event.first_position + len(event.slots) < prompt_len
        counts["mixed steps"] = sum(len(found) == 2 for found in kinds.values())
        counts["runs that preempt"] = counts["preemptions"] > 0
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


def check(workload: Workload) -> Counter[str]:
    """Run one workload; AssertionError, or whatever the engine raises, if anything is wrong."""
    party = Party(workload)
    party.run()
    party.check()
    return party.count()


def several(numbers: Sequence[int], **options: Any) -> Workload:
    """These requests of the pool, all at once."""
    return Workload(tuple(Visitor(number) for number in numbers), **options)


def counted(counts: Counter[str]) -> Iterator[str]:
    """Lines for people."""
    for name, number in counts.items():
        yield f"{name:<34}{number:>12,}"
