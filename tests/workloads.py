"""Random workloads for the engine, and the check that every request comes out as if alone.

`check` runs one workload and asserts all that the engine promises; `workloads` draws them, for
hypothesis. test_engine_properties.py runs some thousands, long_run.py as many as you like.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from engines import poison, random_model
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache_config import CacheConfig
from tutorial_engine.checkpoint import load_tokenizer
from tutorial_engine.clock import VirtualClock
from tutorial_engine.engine import EngineConfig, LLMEngine, StepOutput
from tutorial_engine.generate import GenerationOutput, generate
from tutorial_engine.kv_cache import Allocation
from tutorial_engine.kv_manager import RowManager
from tutorial_engine.kv_storage import KVStorage
from tutorial_engine.model import Qwen3ForCausalLM
from tutorial_engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.replay import EngineState, states
from tutorial_engine.request import Request, RequestOutput
from tutorial_engine.runner import CachedRunner, make_runner
from tutorial_engine.sampling import SampledToken, Sampler
from tutorial_engine.sampling_params import SamplingParams
from tutorial_engine.scheduler import Scheduler
from tutorial_engine.trace import (
    Admitted,
    Preempted,
    Recorder,
    Scheduled,
    Setting,
    StepEnded,
    Trace,
)

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

    @classmethod
    def of(cls, model: Qwen3ForCausalLM, max_len: int) -> "NotingRunner":
        inner = make_runner(model, max_len=max_len)
        assert isinstance(inner, CachedRunner)
        poison(inner.cache)
        runner = cls(model, inner.cache)
        runner.seen = []
        return runner

    seen: list[Tensor]

    def prefill(self, *args: Any, **options: Any) -> Tensor:
        logits = super().prefill(*args, **options)
        self.seen.append(logits[0].clone())
        return logits

    def decode(self, *args: Any, **options: Any) -> Tensor:
        logits = super().decode(*args, **options)
        self.seen.append(logits[0].clone())
        return logits


def run_alone(asked: Asked, limit: int) -> tuple[GenerationOutput, list[Tensor]]:
    """The loop without a scheduler, on this one prompt; and the logits that it saw."""
    runner = NotingRunner.of(small_model(), limit)
    (output,) = generate(
        runner, [asked.prompt], asked.params, tokenizer=the_tokenizer(), max_len=limit
    )
    return output, runner.seen


def is_safe(asked: Asked, output: GenerationOutput, seen: Sequence[Tensor]) -> bool:
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
def alone(index: int, limit: int) -> GenerationOutput:
    """What request `index` of the pool gives when nobody else is there."""
    return run_alone(pool()[index], limit)[0]


# -- memory that runs out -------------------------------------------------------------------------


class SharedRows:
    """Rows that together hold `capacity` tokens at most: what runs may have to give way.

    A request is let in only if all its tokens fit now (semantics of pages, without the pages). What
    a freed row held becomes NaN: nobody reads it unnoticed.
    """

    def __init__(self, rows: RowManager, capacity: int | None = None) -> None:
        self.rows, self.capacity = rows, capacity
        self.held: dict[str, int] = {}  # request_id -> tokens that it has room for
        poison(rows.cache)

    @property
    def storage(self) -> KVStorage:
        return self.rows.storage

    @property
    def max_len(self) -> int:
        return min(self.rows.max_len, self.capacity or self.rows.max_len)

    def allocate(self, request: Request, max_new_tokens: int) -> Allocation | None:
        held = self.held.get(request.request_id)
        end = request.num_computed_tokens + max_new_tokens
        wanted = request.num_tokens if held is None else max(held, end)
        others = sum(self.held.values()) - (held or 0)
        if self.capacity is not None and others + wanted > self.capacity:
            return None
        allocation = self.rows.allocate(request, max_new_tokens)
        if allocation is not None:
            self.held[request.request_id] = max(held or 0, end)
        return allocation

    def commit(self, request: Request, num_tokens: int) -> None:
        self.rows.commit(request, num_tokens)

    def fork(self, parent: Request, child: Request) -> int:
        return self.rows.fork(parent, child)

    @property
    def settings(self) -> Mapping[str, Setting]:
        return self.rows.settings

    def free(self, request: Request) -> None:
        self.held.pop(request.request_id, None)
        for row in self.rows.table_of(request):
            for shelf in self.rows.cache.rows():  # [layers, rows, H_kv, max_len, D]
                shelf[:, row] = float("nan")
        self.rows.free(request)

    def slots_of(self, request: Request) -> tuple[int, ...]:
        return self.rows.slots_of(request)

    def table_of(self, request: Request) -> tuple[int, ...]:
        return self.rows.table_of(request)

    def check_integrity(self) -> None:
        self.rows.check_integrity()
        used = self.rows.cache.num_rows - self.rows.num_free_rows
        assert used == len(self.held), f"{used} rows are taken by {sorted(self.held)}"
        total = sum(self.held.values())
        assert self.capacity is None or total <= self.capacity, f"{total} of {self.capacity}"
        stored = sum(self.rows.cache.seq_lens)
        assert stored <= total, f"{stored} tokens are stored, {total} have room"


# -- workloads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """A request of the pool: when it comes, and when it is aborted, if it is.

    `aborted_at` counts steps; `kills` is the visitor whom its first token's callback aborts.
    """

    index: int
    arrival: int = 0
    aborted_at: int | None = None
    kills: int | None = None


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
    def max_steps(self) -> int:
        """More steps than any right engine can need.

        The first of those that run is never thrown out, and each step runs a token of it at least;
        only PrefillFirst has steps in between that let others in, at most one per seat.
        """
        own = len(self.visitors) * self.limit
        pauses = self.max_num_seqs + 1 if self.policy == "PrefillFirst" else 1
        return max((v.arrival for v in self.visitors), default=0) + own * pauses + 2


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Any workload; two of five are a crowd whose memory runs out."""
    crowd = draw(st.sampled_from([False, False, False, True, True]))
    n = draw(st.integers(3, 7) if crowd else st.integers(1, 6))
    visitors = tuple(draw(_visitors(n, 2 if crowd else 7)) for _ in range(n))
    limit = draw(st.sampled_from(LIMITS))
    others = ["StaticBatching", "PrefillFirst", *([] if crowd else ["OneByOne"])]
    policy = draw(st.sampled_from(["Scheduler", "Scheduler", *others]))
    chunked = draw(st.sampled_from([True, True, False]))
    whole = policy == "PrefillFirst" or not chunked  # or most would be refused
    budgets = [8, 13, 20, 34, 500] if whole else [1, 2, 3, 5, 8, 13, 34, 500]
    room = [None, limit, limit + 4, limit + 11, 2 * limit]
    return Workload(
        visitors,
        policy,
        draw(st.integers(3, 6) if crowd else st.integers(1, 5)),
        draw(st.sampled_from(budgets[2:] if crowd else budgets)),
        limit,
        draw(st.sampled_from([None, None, 1, 3, 7])),
        chunked,
        draw(st.sampled_from(room[1:3] if crowd else room)),
        draw(st.booleans()),
    )


def _visitors(n: int, latest: int) -> st.SearchStrategy[Visitor]:
    """One of n; every fifth or so is aborted, or has another one aborted."""
    seldom = st.integers(0, 9)
    return st.builds(
        lambda index, arrival, leaves, when, victim: Visitor(
            index, arrival, when if leaves == 8 else None, victim if leaves == 9 else None
        ),
        st.integers(0, POOL_SIZE - 1),
        st.integers(0, latest),
        seldom,
        st.integers(0, 14),
        st.integers(0, n - 1),
    )


class Differs(AssertionError):
    """A request did not come out as if it were alone."""


@dataclass
class Diary:
    """What was delivered to one visitor."""

    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    output: RequestOutput | None = None

    def write(self, result: StepOutput) -> None:
        assert self.output is None, f"{result.request_id} gets something after its end"
        if result.token is not None:
            self.tokens.append(result.token)
        self.text += result.text
        assert (result.finish is None) == (result.output is None)
        self.output = result.output


class Party:
    """One workload in its engine, from the first arrival to the last end."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.recorder = Recorder()
        model = small_model()
        rows = RowManager.from_config(
            model.config,
            CacheConfig(
                max_seqs=workload.max_num_seqs,
                max_len=workload.limit,
                slots_first=workload.slots_first,
            ),
            self.recorder,
        )
        self.memory = SharedRows(rows, workload.capacity)
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
            slots_first=workload.slots_first,
        )
        self.engine = LLMEngine(
            model,
            the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            trace=self.recorder,
        )
        self.diaries: dict[str, Diary] = {}
        self.aborted: set[str] = set()
        self.refused = 0
        self.live: list[EngineState] = []

    def run(self) -> None:
        """Let them come, go and run; look at everything after every step."""
        engine, workload, now = self.engine, self.workload, 0
        last = max(visitor.arrival for visitor in workload.visitors)
        while now <= last or engine.has_unfinished_requests:
            assert now <= workload.max_steps, f"still running after {now} steps"
            for number, visitor in enumerate(workload.visitors):
                if visitor.arrival == now:
                    self.enter(number, visitor)
                if visitor.aborted_at == now:
                    self.abort(number)
            engine.check_integrity()
            before = engine.num_steps
            for result in engine.step():
                self.diaries[result.request_id].write(result)
            engine.check_integrity()
            if engine.num_steps > before:
                self.live.append(engine.state())
            now += 1

    def enter(self, number: int, visitor: Visitor) -> None:
        asked, workload = pool()[visitor.index], self.workload
        never = len(asked.prompt) >= workload.limit or (
            not workload.can_chunk and len(asked.prompt) > workload.budget
        )

        name, engine = f"v{number}", self.engine
        callback = None if visitor.kills is None else self.once(visitor.kills)
        try:
            engine.add_request(asked.prompt, asked.params, name, on_token=callback)
        except ValueError as error:
            assert never and f"{len(asked.prompt)} tokens" in str(error), error
            self.refused += 1
        else:
            assert not never, f"{name} can never run"
            self.diaries[name] = Diary()

    def once(self, victim: int) -> Callable[[StepOutput], None]:
        """A callback that aborts the victim when it is called first."""
        left = [victim]

        def callback(result: StepOutput) -> None:
            if left:
                self.abort(left.pop())

        return callback

    def abort(self, number: int) -> None:
        name = f"v{number}"
        if name in self.engine.requests:
            self.engine.abort(name)
            self.aborted.add(name)

    # ---- afterwards

    def check(self) -> None:
        """All that is promised about a run that is over."""
        engine = self.engine
        assert not engine.requests and not self.memory.held, "something is left over"
        assert self.memory.rows.num_free_rows == self.workload.max_num_seqs, "rows leaked"
        assert engine.step() == [], "an empty engine has nothing to deliver"
        assert engine.model_runner.num_forwards == engine.num_steps, "one forward per step"
        for number, visitor in enumerate(self.workload.visitors):
            name = f"v{number}"
            if name in self.diaries:
                want = alone(visitor.index, self.workload.limit)
                self.check_request(name, self.diaries[name], want)
        self.check_trace()

    def check_request(self, name: str, diary: Diary, want: GenerationOutput) -> None:
        assert diary.output is not None, f"{name} never ended"
        (got,) = diary.output.outputs
        assert diary.output.error is None and diary.output.prompt_token_ids == want.prompt_token_ids
        assert tuple(diary.tokens) == got.tokens, f"{name}: not every token was delivered once"
        assert diary.text == got.text, f"{name}: {diary.text!r} was delivered of {got.text!r}"
        times = diary.output.metrics.token_times
        assert len(times) == len(got.tokens) and all(a < b for a, b in pairwise(times))
        if got.cumulative_logprob is not None:
            told = sum(token.logprob for token in got.tokens if token.logprob is not None)
            assert abs(got.cumulative_logprob - told) < 1e-9, "a sum over what was delivered"
        if name in self.aborted:
            same_tokens(name, got.tokens, want.tokens[: len(got.tokens)])
            assert got.finish_reason == "abort" and len(got.tokens) <= len(want.tokens)
            assert the_tokenizer().decode(list(got.token_ids)).startswith(got.text)
            return
        same_tokens(name, got.tokens, want.tokens)
        ended = (got.text, got.finish_reason, got.stop_reason)
        if ended != (want.text, want.finish_reason, want.stop_reason):
            raise Differs(f"{name} ended with {ended}, alone {want}")
        total, wanted = got.cumulative_logprob, want.cumulative_logprob
        assert (total is None) == (wanted is None)
        assert total is None or wanted is None or abs(total - wanted) <= 1e-3

    def check_trace(self) -> None:
        trace = self.recorder.trace()
        assert Trace.from_json(trace.to_json()) == trace
        assert [state.unfinished() for state in states(trace)] == self.live
        assert trace.num_steps == self.engine.num_steps
        ran = [event.num_tokens for event in trace.events if isinstance(event, StepEnded)]
        assert all(1 <= n <= self.workload.budget for n in ran), f"{ran} of {self.workload.budget}"
        planned = [0] * len(ran)
        for event in trace.events:
            if isinstance(event, Scheduled):
                planned[event.step] += len(event.slots)
        assert planned == ran and sum(ran) == self.engine.model_runner.num_tokens

    def count(self) -> Counter[str]:
        """What happened, in numbers."""
        events = self.recorder.events
        counts: Counter[str] = Counter(
            workloads=1,
            requests=len(self.diaries),
            refused=self.refused,
            aborts=len(self.aborted),
            steps=self.engine.num_steps,
            tokens=sum(len(diary.tokens) for diary in self.diaries.values()),
        )
        prompt_lens = {
            f"v{number}": len(pool()[visitor.index].prompt)
            for number, visitor in enumerate(self.workload.visitors)
        }
        kinds: dict[int, set[str]] = {}
        admitted: set[str] = set()
        for event in events:
            if isinstance(event, Preempted):
                counts["preemptions"] += 1
            elif isinstance(event, Admitted):
                counts["resumed"] += event.request_id in admitted
                admitted.add(event.request_id)
            elif isinstance(event, Scheduled):
                prompt_len = prompt_lens[event.request_id]
                prefill = event.first_position < prompt_len
                kinds.setdefault(event.step, set()).add("prefill" if prefill else "decode")
                counts["chunked prefills"] += event.first_position + len(event.slots) < prompt_len
        counts["mixed steps"] = sum(len(found) == 2 for found in kinds.values())
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
    for name in (
        *("workloads", "requests", "refused", "aborts", "steps", "tokens"),
        *("chunked prefills", "mixed steps", "preemptions", "resumed"),
    ):
        yield f"{name:<20}{counts[name]:>12,}"
