"""From what a caller hands in to requests that can run, or an error.

The one wall: prompts and parameters are checked here, where they are typed, and trusted behind it.
Knows texts, token ids, the tokenizer and what a model takes; knows no cache and no queue.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from tokenizers import Tokenizer

from tutorial_engine.checks import check_not_here, check_text
from tutorial_engine.engine.request import Request, SampleGroup
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import WHAT_HAS_ROOM, SamplingParams, check_params
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker


class TextPrompt(TypedDict):
    """A prompt as vLLM writes it: text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as vLLM writes it: token ids."""

    prompt_token_ids: Sequence[int]


# Text needs a tokenizer; a table is one of the two above.
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class InputProcessor:
    """Makes requests: prompts become token ids, each gets its own sampler and stop checker.

    `max_len` limits prompt and output. `check` (name in messages, tokens of the prompt) refuses
    what can never run.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: Sequence[int]
    max_len: int
    check: Callable[[str, int], None]

    def __post_init__(self) -> None:
        check_part("tokenizer", self.tokenizer, "encode", "decode")
        if isinstance(self.tokenizer, Tokenizer):  # load_tokenizer has done so
            for name in ("truncation", "padding"):
                if getattr(self.tokenizer, name) is not None:
                    raise ValueError(
                        f"the tokenizer changes prompts by its {name} "
                        f"{getattr(self.tokenizer, name)}: call tokenizer.no_{name}() first"
                    )

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        sampler: Sampler | Sequence[Sampler] | None = None,
        name: str = "",
    ) -> SampleGroup:
        """The params.n continuations of a prompt, which may be given their samplers, as many.

        ValueError for a bad prompt, which the message calls `name`.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"a request_id is a text that is not empty, got {request_id!r}")
        (params,) = params_for_each(params, 1)
        name = name or f"the prompt of request {request_id}"
        token_ids = token_ids_of(prompt, self.tokenizer, name)
        check_token_ids(name, token_ids, self.vocab_size)
        check_token_ids(f"stop_token_ids of {name}", params.stop_token_ids, self.vocab_size)
        self.check(name, len(token_ids))
        room = self.max_len - len(token_ids)
        if params.max_tokens == WHAT_HAS_ROOM:
            params = replace(params, max_tokens=room)
        of_each = [params] if params.n == 1 else [params.sample(i) for i in range(params.n)]
        samplers = sampler if isinstance(sampler, list | tuple) else [sampler]
        if sampler is None:
            samplers = [Sampler(sample_params, self.eos_token_ids) for sample_params in of_each]
        if len(samplers) != params.n or not all(isinstance(s, Sampler) for s in samplers):
            raise ValueError(f"{params.n} continuations need as many Samplers, got {sampler!r}")
        samples = []
        ids = sample_ids(request_id, params.n)
        for sample_id, sample_params, drawer in zip(ids, of_each, samplers, strict=True):
            checker = StopChecker(
                sample_params, self.eos_token_ids, self.tokenizer, room, token_ids
            )
            samples.append(
                Request(sample_id, token_ids, sample_params, sampler=drawer, checker=checker)
            )
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return SampleGroup(samples, text if isinstance(text, str) else None)


def token_ids_of(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    name: str = "the prompt",
    add_special_tokens: bool = True,
) -> list[int]:
    """A prompt's token ids. ValueError, which calls it `name`, for what is no prompt.

    A text that a chat template wrote has its special tokens: add_special_tokens=False.
    """
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not known:
            raise ValueError(f'{name} is a table without "prompt" or "prompt_token_ids"')
        for key in prompt.keys() - {"prompt_token_ids", "prompt"}:
            check_not_here(f"{key} of {name}", prompt[key])
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name} is text: pass tokenizer=load_tokenizer(...) as well")
        check_text(name, prompt)
        options = {} if add_special_tokens else {"add_special_tokens": False}
        token_ids = tokenizer.encode(prompt, **options).ids
    elif isinstance(prompt, list | tuple | range):
        token_ids = list(prompt)
    else:
        hint = ": use .tolist()" if hasattr(prompt, "tolist") else ""
        raise ValueError(f"{name} must be a text or a list of token ids, got {prompt!r}{hint}")
    if not token_ids:
        raise ValueError(f"{name} is empty: a prompt needs at least one token")
    return token_ids


def sample_ids(request_id: str, n: int) -> list[str]:
    """The ids of a prompt's n continuations: the first has the request's own."""
    return [request_id, *(f"{request_id}.{i}" for i in range(1, n))]


def list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many → a list. ValueError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(
            f"prompts are a text, or a list of texts or token id lists, got {prompts!r}"
        )
    for prompt in prompts:
        if isinstance(prompt, int | float):
            raise ValueError(
                f"{prompt!r} is a number and no prompt: pass a list of token id lists, [[1, 2, 3]]"
            )
    return list(prompts)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for all, or one each (greedy unless told otherwise). ValueError for another number."""
    each: Sequence[Any] = params if isinstance(params, list | tuple) else [params] * num_prompts
    if len(each) != num_prompts:
        raise ValueError(f"{num_prompts} prompts but {len(each)} SamplingParams")
    each = [SamplingParams() if given is None else given for given in each]
    for given in each:
        check_params(given)
    return each


def check_model(model: object) -> None:
    """ValueError for what is no model of ours: a name, or None."""
    if not isinstance(model, CausalLM):
        raise ValueError(f"model must be a loaded model (load_model()), got {model!r}")


def check_part(name: str, part: object, *methods: str) -> None:
    """ValueError for a part of another kind: a name, a number, a class that nobody called."""
    fits = not isinstance(part, type) and all(hasattr(part, method) for method in methods)
    if part is not None and not fits:
        raise ValueError(
            f"{name} must be an object with {', '.join(methods)} (of a class make one first: "
            f"Name()), got {part!r}"
        )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """ValueError, naming it and the first bad one, for ids that are none of the vocabulary's."""
    for token in token_ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}; token ids are whole numbers from 0 to "
                f"{vocab_size - 1} (of a tensor: .tolist()). Was the text tokenized for another "
                "model?"
            )
