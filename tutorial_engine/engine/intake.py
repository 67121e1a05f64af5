"""Introduced in notebook 02. From what a caller hands in to requests that can run, or an error.

Knows texts, token ids, the tokenizer and what a model takes; knows no cache, and puts nothing in a
queue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction

from tokenizers import Tokenizer

from tutorial_engine.checks import check_text
from tutorial_engine.engine.request import Request, SampleGroup, TokenCallback
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker

Prompt = str | Sequence[int]  # text needs a tokenizer
BYTES = (bytes, bytearray, memoryview)  # sequences of numbers, and no token ids


@dataclass(frozen=True)
class Intake:
    """Makes requests: prompts become token ids, each gets its own sampler and stop checker.

    `max_len` limits prompt and output. `check` (name in messages, tokens of the prompt) refuses
    what can never run.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: Sequence[int]
    max_len: int
    check: Callable[[str, int], None]

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
        on_token: TokenCallback | None = None,
        sampler: Sampler | Sequence[Sampler] | None = None,
    ) -> SampleGroup:
        """The params.n continuations of a prompt, which may be given their samplers, as many.

        ValueError for a bad prompt, which the message calls `name`.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"a request_id is a text that is not empty, got {request_id!r}")
        check_text("request_id", request_id)
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params must be SamplingParams, got {params!r}; an id is request_id=")
        if isinstance(prompt, list | tuple) and any(isinstance(part, str) for part in prompt):
            raise ValueError("this takes one prompt: call it once for each text, or use generate")
        if on_token is not None and (not callable(on_token) or iscoroutinefunction(on_token)):
            raise ValueError(
                f"on_token is a plain function of one StepOutput (no coroutine), got {on_token!r}"
            )
        params = SamplingParams() if params is None else params
        name = name or f"the prompt of request {request_id}"
        (token_ids,) = prompt_token_ids([prompt], self.tokenizer)
        check_token_ids(name, token_ids, self.vocab_size)
        self.check(name, len(token_ids))
        own = [params] if params.n == 1 else [params.sample(i) for i in range(params.n)]
        if sampler is None:
            sampler = [Sampler(one, self.eos_token_ids) for one in own]
        samplers = [sampler] if isinstance(sampler, Sampler) else sampler
        known = isinstance(samplers, list | tuple) and all(isinstance(s, Sampler) for s in samplers)
        if not known:
            raise ValueError(f"sampler must be a Sampler, or a list of them, got {sampler!r}")
        if len(samplers) != params.n:
            raise ValueError(f"{params.n} continuations, but {len(samplers)} samplers")
        room = self.max_len - len(token_ids)
        samples = []
        for i, (one, its) in enumerate(zip(own, samplers, strict=True)):
            checker = StopChecker(one, self.eos_token_ids, self.tokenizer, max_new_tokens=room)
            sample_id = sample_ids(request_id, params.n)[i]
            samples.append(Request(sample_id, token_ids, one, sampler=its, checker=checker))
        return SampleGroup(samples, on_token)


def sample_ids(request_id: str, n: int) -> list[str]:
    """The ids of a prompt's n continuations: the first has the request's own."""
    return [request_id, *(f"{request_id}.{i}" for i in range(1, n))]


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for all, or one each (greedy unless told otherwise). ValueError for another number."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise ValueError(f"params must be SamplingParams, or a list of them, got {params!r}")
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts but {len(params)} SamplingParams")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams | None):
            raise ValueError(f"params of prompt {i} must be SamplingParams, got {one!r}")
    return [one or SamplingParams() for one in params]


def prompt_token_ids(
    prompts: str | Sequence[Prompt], tokenizer: Tokenizer | None
) -> list[list[int]]:
    """Every prompt as token ids. ValueError, with its number, for what is no prompt."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if prompts is None or (isinstance(prompts, Sequence) and len(prompts) == 0):
        raise ValueError("no prompt given: pass a text, or a list of texts or token id lists")
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise ValueError(
            f"prompts are a text, or a list of texts or token id lists, got {_told(prompts)}"
        )
    sequences: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, int):
            raise ValueError(
                f"prompt {i} is the number {prompt}: pass a list of token id lists, [[1, 2, 3]]"
            )
        if not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
            raise ValueError(f"prompt {i} must be a text or a list of ids, got {_told(prompt)}")
        if not isinstance(prompt, str):
            ids = list(prompt)
        elif tokenizer is None:
            raise ValueError(f"prompt {i} is text: pass tokenizer=load_tokenizer(...) as well")
        else:
            check_text(f"prompt {i}", prompt)
            ids = tokenizer.encode(prompt).ids
        if not ids:
            raise ValueError(f"prompt {i} is empty: a prompt needs at least one token")
        sequences.append(ids)
    return sequences


def _told(value: object) -> str:
    """A value as an error says it, with its type, cut where it is long."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    hint = "; of a tensor: .tolist()" if hasattr(value, "tolist") else ""
    return f"{shown} ({type(value).__name__}){hint}"


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """ValueError, naming it and the first bad one, for ids that are none of the vocabulary's."""
    for token in token_ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}; token ids are whole numbers from 0 to "
                f"{vocab_size - 1} (of a tensor: .tolist()). Was the text tokenized for another "
                "model?"
            )
