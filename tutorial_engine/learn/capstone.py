"""The acceptance test of an engine that a learner built.

`check_engine` serves random requests with any object that has `add_request` and `step`, and says in
sentences what is wrong. Knows the model as something that runs batches; knows no engine's inside.
"""

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.learn.exercises.verdict import Verdict
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.tiny.corpus import story
from tutorial_engine.viz.words import listed

MIN_MARGIN = 0.005  # of two log-probabilities: closer ones may change places by rounding
MAX_WORK, MAX_FORWARDS = 2.0, 0.75  # times what is enough; times what one by one takes
AGAIN = "which came before it"
AFTER = 3  # steps that are tried when all is over


class Limits(NamedTuple):
    """What the engine must keep to: requests and tokens of one forward, tokens of one request."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 128


class Engine(Protocol):
    """What is tested. Decoding is greedy; a request is over after `max_tokens` new tokens, or after
    the end-of-text token, which is given out as well (`model.config.eos_token_ids`).
    """

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Put a request in the queue. It may come at any time."""

    def step(self) -> Sequence[tuple[str, int]]:
        """One forward → (request_id, new token) of each request that got one; [] if none did."""


Factory = Callable[[CausalLM, Limits], Engine]


class Adapted:
    """An LLMEngine (the package's, or an OwnServer's `engine()`) as the test wants an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.engine.add_request(request_id, prompt_token_ids, params)

    def step(self) -> list[tuple[str, int]]:
        got = [(output.request_id, output.outputs[0]) for output in self.engine.step()]
        return [(name, out.token_ids[-1]) for name, out in got if out.finish_reason != "error"]


def package_engine(model: CausalLM, limits: Limits) -> Adapted:
    """The factory of the package's own engine, on rows."""
    return Adapted(LLMEngine(model, config=EngineConfig(**limits._asdict())))


class Job(NamedTuple):
    """A request, the step before which it comes, what is special in it, and its tokens alone."""

    name: str
    prompt: list[int]
    max_tokens: int
    from_step: int
    special: str
    tokens: list[int]


@dataclass
class Report:
    """The verdicts in order, and the seed with which the same requests come again."""

    seed: int
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Is the engine accepted?"""
        return all(verdict.ok for verdict in self.verdicts)

    def __repr__(self) -> str:
        last = "Accepted." if self.ok else f"Not accepted. The same again: seed={self.seed}"
        return "\n".join([*map(repr, self.verdicts), last])


def check_engine(factory: Factory, seed: int | None = None, rounds: int = 3) -> Report:
    """Serve random workloads with the engines that `factory(model, limits)` makes, and judge them.

    In each round each request has a fresh engine to itself, then all come over time to one. The
    seed is drawn where none is given. What the engine raises becomes a verdict.
    """
    limits, model, tokenizer = Limits(), load_model(), load_tokenizer()
    first = secrets.randbelow(10**6) if seed is None else seed
    titles = (
        "each request alone has the right tokens",
        "all requests together have the same tokens",
        f"a forward has at most {limits.max_num_batched_tokens} tokens of {limits.max_num_seqs} "
        "requests",
        "no token runs more often than it must",
        "requests share their forwards",
    )
    for seed in range(first, first + rounds):
        found = _faults(factory, model, limits, workload(model, tokenizer, seed, limits))
        if found is not None:
            place, why = found
            right = [Verdict(True, title) for title in titles[:place]]
            left = [Verdict(None, f"not tried: {title}") for title in titles[place + 1 :]]
            return Report(seed, [*right, Verdict(False, f"{titles[place]}: no. {why}"), *left])
    return Report(first, [Verdict(True, title) for title in titles])


def workload(model: CausalLM, tokenizer: Tokenizer, seed: int, limits: Limits) -> list[Job]:
    """Nine requests that come over time; among them each case that engines get wrong.

    They are drawn again as long as a token is a close choice (MIN_MARGIN), which rounding may turn,
    and as long as the text that should end by itself does not.
    """
    rng = random.Random(seed)
    while True:
        drawn = _draw(tokenizer, rng, limits)
        params = [SamplingParams(max_tokens=job.max_tokens, logprobs=2) for job in drawn]
        prompts = [job.prompt for job in drawn]
        alone = [
            completion.outputs[0]
            for completion in generate(model, prompts, params, use_cache=False)
        ]
        tables = [table.values() for completion in alone for table in completion.logprobs or ()]
        close = any(abs(first.logprob - second.logprob) < MIN_MARGIN for first, second in tables)
        if not close and alone[4].finish_reason == "stop":
            both = zip(drawn, alone, strict=True)
            return [job._replace(tokens=list(completion.token_ids)) for job, completion in both]


def _draw(tokenizer: Tokenizer, rng: random.Random, limits: Limits) -> list[Job]:
    names = [f"r{i}" for i in rng.sample(range(100, 1000), 9)]
    budget = limits.max_num_batched_tokens
    texts = [tokenizer.encode(story(rng)).ids for _ in names]
    for i in (0, 3, 5, 6):  # after nonsense the model is unsure, and small faults show
        texts[i] = [rng.randrange(256, tokenizer.get_vocab_size()) for _ in range(40)]
    cut, new = rng.randint(9, 12), rng.randint(8, 12)
    drawn = [
        (cut, new, 0, "it is short"),
        (cut + rng.randint(3, 8), 6, 0, f"its prompt begins like that of {names[0]}"),
        (rng.randint(2 * budget + 1, 3 * budget), 6, 1, f"its prompt has over {budget} tokens"),
        (rng.randint(4, 8), 1, rng.randint(0, 4), "it wants one token only"),
        (len(texts[4]) - rng.randint(2, 5), 24, rng.randint(0, 4), "its text ends by itself"),
        (35, rng.randint(3, 6), rng.randint(0, 6), "its prompt is long"),
        (20, rng.randint(3, 6), rng.randint(0, 6), "it is short"),
        (cut, new, 24, f"its prompt is that of {names[0]}, {AGAIN}"),
        (35, 6, 26, f"its prompt begins like {names[6]} and goes on like {names[5]}, {AGAIN}"),
    ]  # fmt: skip
    texts[1] = texts[7] = texts[0]
    texts[8] = texts[6][:16] + texts[5][16:]
    longest = limits.max_model_len - 24
    made = []
    for name, ids, (length, new_tokens, step, special) in zip(names, texts, drawn, strict=True):
        made.append(Job(name, ids[:length][-longest:], new_tokens, step, special, []))
    return made


# -- serving, and what can go wrong

Fault = tuple[int, str]  # the place of the criterion, and what is wrong


class _Wrong(Exception):
    """The engine did something that ends the test."""


class _Run(NamedTuple):
    received: dict[str, list[int]]
    batches: list[Batch]


def _faults(factory: Factory, model: CausalLM, limits: Limits, jobs: Sequence[Job]) -> Fault | None:
    """The first criterion that does not hold, and why."""
    for place, together in ((0, [[job._replace(from_step=0)] for job in jobs]), (1, [jobs])):
        for group in together:
            try:
                run = _serve(factory, model, limits, group)
            except _Wrong as wrong:
                return place, str(wrong)
            for job in group:
                if not _agree(run.received[job.name], job):
                    return place, _why(job, run.received[job.name], len(group) > 1, limits)
    return _over_limits(run.batches, limits) or _wasteful(run.batches, jobs, limits)


def _agree(got: Sequence[int], job: Job) -> bool:
    """Are these its tokens, as far as they go?"""
    return list(got) == job.tokens[: len(got)]


def _serve(factory: Factory, model: CausalLM, limits: Limits, jobs: Sequence[Job]) -> _Run:
    """All jobs to their end. _Wrong when the engine raises, stalls, or gives out too much."""
    received: dict[str, list[int]] = {job.name: [] for job in jobs}
    by_name = {job.name: job for job in jobs}
    waiting = sorted(jobs, key=lambda job: job.from_step)
    enough = sum(len(job.prompt) + job.max_tokens for job in jobs)
    with watched(model) as batches:
        engine = _blamed("the factory", factory, model, limits)
        step = silent = 0
        while any(len(received[job.name]) < len(job.tokens) for job in jobs):
            while waiting and (waiting[0].from_step <= step or silent):
                job = waiting.pop(0)
                _blamed("add_request", engine.add_request, job.name, [*job.prompt], job.max_tokens)
                silent = 0
            results = _blamed("step", engine.step)
            _deliver(results, received, by_name)
            step, silent = step + 1, 0 if results else silent + 1
            if silent > enough or step > 3 * enough:
                if not all(_agree(received[job.name], job) for job in jobs):
                    break  # a wrong end-of-text token, for example
                left = [job.name for job in jobs if len(received[job.name]) < len(job.tokens)]
                silence = f"the last {silent} steps gave none" if silent else "no end is near"
                raise _Wrong(
                    f"After {step} steps tokens are still lacking, of {listed(left)}, and "
                    f"{silence}. Is a request lost, or does it wait for a place that stays taken?"
                )
        for _ in range(AFTER):
            with suppress(Exception):  # nothing is left to do, so it may refuse
                results = engine.step()
                _deliver(results, received, by_name)
    return _Run(received, batches)


def _deliver(results: Any, received: dict[str, list[int]], jobs: dict[str, Job]) -> None:
    """Take in what a step gave. _Wrong for what is no result, or comes after the end."""
    try:
        pairs = [(str(name), int(token)) for name, token in results]
    except (TypeError, ValueError):
        raise _Wrong(
            f"step() returned {results!r}; it must return pairs (request_id, token)."
        ) from None
    wanted = []
    for name, _ in pairs:
        if name not in jobs:
            raise _Wrong(f"step() gave a token to {name!r}, and nobody has this name.")
        job, has = jobs[name], len(received[name])
        if has == len(job.tokens) and received[name] == job.tokens:
            limit = has == job.max_tokens
            why = f"all {has} tokens" if limit else "its end-of-text token"
            raise _Wrong(f"{name} got one more token after {why}: nobody noticed that it is over.")
        wanted.append(job.tokens[has] if has < len(job.tokens) else None)
    given = [token for _, token in pairs]
    if given != wanted and sorted(given) == sorted(token for token in wanted if token is not None):
        names = listed([name for name, _ in pairs])
        raise _Wrong(f"A step gave the right tokens to the wrong requests, among {names}.")
    for name, token in pairs:
        received[name].append(token)


def _blamed(who: str, call: Callable[..., Any], *given: Any) -> Any:
    try:
        return call(*given)
    except Exception as error:  # somebody's engine may raise anything at all
        raise _Wrong(f"{who} raised {type(error).__name__}: {error}") from error


@contextmanager
def watched(model: CausalLM) -> Iterator[list[Batch]]:
    """Inside the block, every batch that the model runs is put into the list."""
    batches: list[Batch] = []
    handle = model.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    try:
        yield batches
    finally:
        handle.remove()


# -- why


def _why(job: Job, got: Sequence[int], together: bool, limits: Limits) -> str:
    """What is wrong with a job's tokens, and where to look first."""
    i = next(i for i, (a, b) in enumerate(zip(got, job.tokens, strict=False)) if a != b)
    if together and AGAIN in job.special:
        where = "Alone it is right, so look at what is kept of earlier requests and found again."
    elif together:
        where = (
            "Alone it is right, so something of another request gets in: its slots, its positions, "
            "its row of the logits, or a place that both were given."
        )
    elif i == 0 and len(job.prompt) > limits.max_num_batched_tokens:
        where = (
            "Its prompt runs in parts: does each part have the right positions and mask, and does "
            "the token come after the last part only?"
        )
    elif i == 0:
        where = "So its prompt is run wrongly: positions, mask, or the row of the logits."
    else:
        where = (
            "Its prompt was right, so look at what a new token changes: its position, the slot of "
            "its K and V, and which slots its query reads."
        )
    is_wrong = f"new token number {i + 1} is {got[i]}, not {job.tokens[i]}"
    return f"{job.name} ({job.special}): {is_wrong}. {where}"


def _over_limits(batches: Sequence[Batch], limits: Limits) -> Fault | None:
    for number, batch in enumerate(batches):
        tokens, requests = sum(batch.query_lens), len(batch.query_lens)
        if tokens > limits.max_num_batched_tokens or requests > limits.max_num_seqs:
            return 2, f"Forward {number} runs {tokens} tokens of {requests} requests."
    return None


def _wasteful(batches: Sequence[Batch], jobs: Sequence[Job], limits: Limits) -> Fault | None:
    """Far more tokens than known ones, or as many forwards as one request after the other takes."""
    if not batches:
        return 3, "Nothing ran through model(batch, ...), so no token could be counted."
    ran = sum(sum(batch.query_lens) for batch in batches)
    enough = sum(len(job.prompt) + len(job.tokens) - 1 for job in jobs)
    if ran > MAX_WORK * enough:
        return 3, f"{ran} tokens ran, and {enough} are enough: are K and V kept and used?"
    budget = limits.max_num_batched_tokens
    alone = sum(-(-len(job.prompt) // budget) + len(job.tokens) - 1 for job in jobs)
    if len(batches) > MAX_FORWARDS * alone:
        return 4, (
            f"{len(batches)} forwards ran. One request after the other takes {alone}, so hardly "
            "any forward was shared: can a request join before the others are over?"
        )
    return None
