"""Introduced in notebook 02. Prompts in, text out: the only loop without a scheduler.

Prefill all prompts, then sample, ask whether to stop, and decode those left. Knows runners,
samplers and stop checkers; knows no cache layout and no layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.checks import at_least_one
from tutorial_engine.engine.prompts import Prompt, check_token_ids, prompt_token_ids
from tutorial_engine.engine.runner import Runner, decode, make_runner, prefill
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.sampler import SampledToken, Sampler, SamplingParams, sample_batch
from tutorial_engine.sampling.stopping import Finish, StopChecker

__all__ = ["GenerationOutput", "StreamEvent", "decode", "generate", "prefill", "stream"]


@dataclass(frozen=True)
class GenerationOutput:
    """What became of one prompt. `text` is empty without a tokenizer; a stop token is in the ids.

    `finish_reason` is "stop" or "length"; `stop_reason` the stop id or string that ended it, if one
    did. `tokens` has the log-probabilities, where they were asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    tokens: tuple[SampledToken, ...]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the raw log-probabilities; None where they were not asked for."""
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) if logprobs else None


class StreamEvent(NamedTuple):
    """One new token of prompt number seq_id, and the text that is safe to show now (often "")."""

    seq_id: int
    token: SampledToken
    text: str
    finish: Finish | None


class _Row(NamedTuple):
    """One prompt on its way: who chooses its tokens and who says when to stop."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampler: Sampler
    checker: StopChecker


def stream(
    model: Qwen3ForCausalLM | Runner,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
    max_len: int | None = None,
    chunk_size: int | None = None,
) -> Iterator[StreamEvent]:
    """As `generate`, token by token: yields an event for each token of each prompt as it comes.

    The texts of a prompt's events, joined, are its output's text. Errors come at once. Streams of
    one Runner share its cache: finish one before you begin the next.
    """
    runner, rows = _plan(model, prompts, params, tokenizer, use_cache, max_len)
    _check(runner, rows, chunk_size)
    return _loop(runner, rows, chunk_size)


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
) -> list[GenerationOutput]:
    """Continue every prompt (text, or token ids) until it stops → one output each, in order.

    `params` is one for all or one each (greedy unless told otherwise); `max_len` limits prompt +
    output; `progress` shows a bar. ValueError, before anything runs, for what cannot work.
    """
    runner, rows = _plan(model, prompts, params, tokenizer, use_cache, max_len)
    _check(runner, rows, chunk_size)
    events: list[list[StreamEvent]] = [[] for _ in rows]
    total = sum(row.max_tokens for row in rows)
    with tqdm(total=total, unit="token", desc="prefill", disable=not progress) as bar:
        for event in _loop(runner, rows, chunk_size):
            events[event.seq_id].append(event)
            bar.set_description("decode", refresh=False)
            bar.update()
    return [_output(row, made) for row, made in zip(rows, events, strict=True)]


@torch.inference_mode()
def _loop(runner: Runner, rows: Sequence[_Row], chunk_size: int | None) -> Iterator[StreamEvent]:
    """Prefill all, then decode those that are left. A row that has stopped costs nothing more."""
    seq_ids: Sequence[int] = range(len(rows))
    logits = runner.prefill([row.prompt for row in rows], seq_ids, chunk_size)  # [S, V]
    while seq_ids:
        sampled = sample_batch(logits, [rows[s].sampler for s in seq_ids])
        left: dict[int, int] = {}  # seq_id -> its newest token, which has not been run yet
        for seq_id, token in zip(seq_ids, sampled, strict=True):
            checker = rows[seq_id].checker
            finish = checker.update(token.token_id)  # the first token and the last one, too
            if finish is None:
                left[seq_id] = token.token_id
            yield StreamEvent(seq_id, token, checker.take_text(), finish)
        seq_ids = list(left)
        if seq_ids:
            logits = runner.decode(list(left.values()), seq_ids)


def _plan(
    model: Qwen3ForCausalLM | Runner,
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    use_cache: bool,
    max_len: int | None,
) -> tuple[Runner, list[_Row]]:
    """A row per prompt and a runner with room for all. ValueError for a prompt that is too long."""
    sequences = prompt_token_ids(prompts, tokenizer)
    if params is None or isinstance(params, SamplingParams):
        one_each = [params or SamplingParams()] * len(sequences)
    else:
        one_each = list(params)
    if len(one_each) != len(sequences):
        raise ValueError(f"{len(sequences)} prompts but {len(one_each)} SamplingParams")
    if isinstance(model, Qwen3ForCausalLM):
        longest = max(
            len(ids) + own.max_tokens for ids, own in zip(sequences, one_each, strict=True)
        )
        config = CacheConfig(max_seqs=len(sequences), max_len=max_len)  # refuses nonsense
        limit = config.length_for(model.config)
        runner: Runner = make_runner(model, use_cache, len(sequences), min(limit, longest))
    elif not use_cache:
        raise ValueError("use_cache=False is for a model; this Runner decides by itself")
    else:
        runner, limit = model, min(model.max_len, max_len or model.max_len)
    rows = []
    for i, (ids, own) in enumerate(zip(sequences, one_each, strict=True)):
        if own.n > 1:
            raise ValueError(f"this loop gives one continuation a prompt; n {own.n}: use LLMEngine")
        if len(ids) >= limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, but prompt and output together are limited to "
                f"{limit}: shorten it, or raise max_len where the model allows more"
            )
        eos = runner.eos_token_ids
        room = limit - len(ids)
        checker = StopChecker(own, eos, tokenizer, max_new_tokens=room)
        rows.append(_Row(tuple(ids), min(own.max_tokens, room), Sampler(own, eos), checker))
    return runner, rows


def _check(runner: Runner, rows: Sequence[_Row], chunk_size: int | None) -> None:
    """ValueError for ids that are none of the vocabulary's, and chunks that cannot be."""
    for i, row in enumerate(rows):
        check_token_ids(f"prompt {i}", row.prompt, runner.vocab_size)
    if chunk_size is not None:
        at_least_one("chunk_size", chunk_size)
        if not runner.can_chunk:
            raise ValueError("chunked prefill needs a cache (use_cache=True)")


def _output(row: _Row, events: Sequence[StreamEvent]) -> GenerationOutput:
    finish = events[-1].finish
    assert finish is not None, "the loop ends when every row has a reason to"
    return GenerationOutput(
        prompt_token_ids=row.prompt,
        token_ids=tuple(event.token.token_id for event in events),
        text=row.checker.text,
        finish_reason=finish.reason,
        stop_reason=finish.stop_reason,
        tokens=tuple(event.token for event in events),
    )
