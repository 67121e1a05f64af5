"""Introduced in notebook 02. Prompts in, text out: the only loop without a scheduler.

Run all prompts, then sample, ask whether to stop, and run the new tokens of those left. Knows
runners and requests; knows no cache layout and no layer. The oracle of the engine (notebook 03).
"""

import time
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from tqdm.auto import tqdm

from tutorial_engine.cache.config import length_for
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.intake import Intake, Prompt, params_for_each, prompt_token_ids
from tutorial_engine.engine.request import Request, RequestOutput, RequestStatus, StepOutput
from tutorial_engine.engine.runner import Runner, make_runner
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import sample_each


def generate(
    model: Qwen3ForCausalLM | Runner,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
    max_len: int | None = None,
    chunk_size: int | None = None,
    progress: bool = False,
) -> list[RequestOutput]:
    """Continue every prompt (text, or token ids) until it stops → one output each, in order.

    `params` is one for all or one each (greedy unless told otherwise); `max_len` limits prompt +
    output; `progress` shows a bar. ValueError, before anything runs, for what cannot work.
    """
    runner, requests = _prepare(model, prompts, params, tokenizer, use_cache, max_len, chunk_size)
    total = sum(request.params.max_tokens for request in requests)
    with tqdm(total=total, unit="token", disable=not progress) as bar:
        for _ in serve(runner, requests, chunk_size):
            bar.update()
    return [request.group.output() for request in requests]


def stream(
    model: Qwen3ForCausalLM | Runner,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
    max_len: int | None = None,
    chunk_size: int | None = None,
) -> Iterator[StepOutput]:
    """As `generate`, token by token; the requests are "0", "1", ... in the order of the prompts.

    The texts of a request, joined, are its output's text. Errors come at once. Streams of one
    Runner use the same cache: where a second one has begun, going on with the first is a
    ValueError.
    """
    runner, requests = _prepare(model, prompts, params, tokenizer, use_cache, max_len, chunk_size)
    return serve(runner, requests, chunk_size)


def serve(
    runner: Runner, requests: Sequence[Request], chunk_size: int | None = None
) -> Iterator[StepOutput]:
    """The loop itself: run what is known, sample what comes next, until every request is over.

    The requests are RUNNING. Who has stopped costs nothing.
    """
    running = list(requests)
    while running:
        logits = runner.run(running, chunk_size)  # [S, V]; prefill first, then decode
        sampled = sample_each(logits, [request.sampler for request in running])
        now = time.perf_counter()
        for request, token in zip(running, sampled, strict=True):
            if isinstance(token, Exception):
                raise token
            finish = request.append(token, now)  # the first token and the last one, too
            if finish is not None:
                request.end(RequestStatus.FINISHED, finish, now)
            output = request.group.output() if finish is not None else None
            text = request.checker.take_text()
            yield StepOutput(request.request_id, token, text, finish, output)
        running = [request for request in running if not request.is_over]


def _prepare(
    model: Qwen3ForCausalLM | Runner,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    use_cache: bool,
    max_len: int | None,
    chunk_size: int | None,
) -> tuple[Runner, list[Request]]:
    """A request per prompt, and a runner with room for all of them. ValueError for a bad one."""
    sequences = prompt_token_ids(prompts, tokenizer)
    one_each = params_for_each(params, len(sequences))
    if isinstance(model, Qwen3ForCausalLM):
        pairs = zip(sequences, one_each, strict=True)
        longest = max(len(ids) + own.max_tokens for ids, own in pairs)
        limit = length_for(model.config, max_len)
        runner: Runner = make_runner(model, use_cache, len(sequences), min(limit, longest))
    elif not use_cache:
        raise ValueError("use_cache=False is for a model; this Runner decides by itself")
    else:
        runner, limit = model, min(model.max_len, max_len or model.max_len)
    if chunk_size is not None:
        at_least_one("chunk_size", chunk_size)
        if not runner.can_chunk:
            raise ValueError("chunked prefill needs a cache (use_cache=True)")

    def check(name: str, prompt_len: int) -> None:
        if prompt_len >= limit:
            raise ValueError(
                f"{name} has {prompt_len} tokens, but prompt and output together are limited to "
                f"{limit}: shorten it, or raise max_len where the model allows more"
            )

    intake = Intake(tokenizer, runner.vocab_size, runner.eos_token_ids, limit, check)
    now, requests = time.perf_counter(), []
    for i, (ids, own) in enumerate(zip(sequences, one_each, strict=True)):
        if own.n > 1:
            raise ValueError(f"this loop gives one continuation a prompt; n {own.n}: use LLMEngine")
        (request,) = intake.make(str(i), ids, own, name=f"prompt {i}").samples
        request.status = RequestStatus.RUNNING
        request.arrival = request.first_scheduled = now
        requests.append(request)
    return runner, requests
