"""Prompts in, text out: the only loop without a scheduler.

Run all prompts, then sample, ask whether to stop, and run the new tokens of those left. Knows
requests and a function that runs them; knows no cache layout and no layer. The oracle of the engine
(notebook 03).
"""

import time
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from tqdm import tqdm

from tutorial_engine.cache.config import length_for
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.inputs import (
    InputProcessor,
    Prompt,
    check_model,
    list_of_prompts,
    params_for_each,
)
from tutorial_engine.engine.request import Request, RequestOutput, RequestStatus
from tutorial_engine.engine.runner import Run, run_with_cache, run_without_cache
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import best_of_each, next_token


def generate(
    model: CausalLM,
    prompts: Prompt | Sequence[Prompt],
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
    run, requests = _prepare(model, prompts, params, tokenizer, use_cache, max_len, chunk_size)
    total = sum(request.params.max_tokens for request in requests)
    with tqdm(total=total, unit="token", disable=not progress) as bar:
        for _ in serve(run, requests):
            bar.update()
    return [request.group.output() for request in requests]


def stream(
    model: CausalLM,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
    max_len: int | None = None,
    chunk_size: int | None = None,
) -> Iterator[RequestOutput]:
    """As `generate`, token by token: each time the request that got one, as far as it has come.

    The requests are "0", "1", ... in the order of the prompts. Errors come at once.
    """
    run, requests = _prepare(model, prompts, params, tokenizer, use_cache, max_len, chunk_size)
    return (request.group.output() for request in serve(run, requests))


def serve(run: Run, requests: Sequence[Request]) -> Iterator[Request]:
    """The loop itself: run what is known, sample what comes next, until every request is over.

    Each request that got a token is yielded. Who has stopped costs nothing.
    """
    running = list(requests)
    for request in running:
        request.status = RequestStatus.RUNNING
    while running:
        logits = run(running)  # [S, V]; prefill first, then decode
        best, now = best_of_each(logits), time.perf_counter()
        for row, request in enumerate(running):
            token = next_token(request.sampler, logits, row, best[row])
            finish = request.append(token, now)  # the first token and the last one, too
            if finish is not None:
                request.end(RequestStatus.FINISHED, finish, now)
            yield request
        running = [request for request in running if not request.is_over]


def _prepare(
    model: CausalLM,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    use_cache: bool,
    max_len: int | None,
    chunk_size: int | None,
) -> tuple[Run, list[Request]]:
    """A request per prompt, and what runs them, with room for all. ValueError for a bad one."""
    check_model(model)
    prompts = list_of_prompts(prompts)
    each = params_for_each(params, len(prompts))
    limit = length_for(model.config, max_len)
    if chunk_size is not None:
        at_least_one("chunk_size", chunk_size)
        if not use_cache:
            raise ValueError("chunked prefill needs a cache (use_cache=True)")

    def check(name: str, prompt_len: int) -> None:
        if prompt_len >= limit:
            raise ValueError(
                f"{name} has {prompt_len} tokens, but prompt and output together are limited to "
                f"{limit}: shorten it, or raise max_len where the model allows more"
            )

    config, now, requests = model.config, time.perf_counter(), []
    inputs = InputProcessor(tokenizer, config.vocab_size, config.eos_token_ids, limit, check)
    for i, (prompt, prompt_params) in enumerate(zip(prompts, each, strict=True)):
        if prompt_params.n > 1:
            n = prompt_params.n
            raise ValueError(f"this loop gives one continuation a prompt; n {n}: use LLMEngine")
        (request,) = inputs.process(str(i), prompt, prompt_params, name=f"prompt {i}").samples
        request.arrival = request.first_scheduled = now
        requests.append(request)
    if not use_cache or not requests:
        return run_without_cache(model), requests
    longest = max(request.num_tokens + request.params.max_tokens for request in requests)
    cache = StaticKVCache.from_config(
        config,
        max_seqs=len(requests),
        max_len=min(limit, longest),
        dtype=model.dtype,
        device=model.device,
    )
    return run_with_cache(model, cache, chunk_size), requests
