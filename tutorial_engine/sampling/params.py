"""What a request asks for: how its tokens are chosen and when it ends.

Knows names and ranges; knows no logits, no text and no model.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, TypeGuard

from tutorial_engine.as_vllm import check_keywords


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends; ValueError names what does not fit.

    temperature 0 is greedy, and the default: the same text comes out on every machine. top_k ≤ 0
    or ≥ V is off. max_tokens and min_tokens count sampled tokens. `stop` is one string or several;
    it and stop_token_ids are tuples afterwards. logprobs=N asks for the N best and the sampled one.
    n continuations of the prompt: an engine's (notebook 05); number i draws with seed + i.

    As in vLLM, max_tokens=None is as many as have room, and seed=-1 is none. What only vLLM has
    (penalties, logit_bias, ...) is taken with a value that asks for nothing, else refused.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    says_temperature: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_whole("n", self.n, 1, 1024, "one continuation at least")
        _check_number("temperature", self.temperature, 0, 1e6, "0 is greedy")
        _check_whole("top_k", self.top_k, -math.inf, math.inf, "0 is off")
        _check_number("top_p", self.top_p, 0, 1, "1 is off; for greedy use temperature=0")
        _check_number("min_p", self.min_p, 0, 1, "0 is off")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1, "None is another one each time")
        _check_whole("max_tokens", self.max_tokens, 1, math.inf, "one is sampled at least")
        _check_whole("min_tokens", self.min_tokens, 0, math.inf, "0 is off")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, math.inf, "None is off")
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature {self.temperature} overflows fp32; for greedy use 0")
        if self.top_p == 0:
            raise ValueError("top_p 0 would keep no token; for greedy use temperature=0")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n {self.n} at temperature 0 is {self.n} times the same: state a higher one "
                "(where none is stated, it is 0 here)"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}")
        for flag in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(f"{flag} must be True or False, got {getattr(self, flag)!r}")
        stop, ids = [self.stop] if isinstance(self.stop, str) else self.stop, self.stop_token_ids
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")
        if any("\ufffd" in s for s in stop):
            raise ValueError(f"stop {self.stop!r} holds U+FFFD, which stands for bytes, not text")
        if not isinstance(ids, list | tuple) or not all(_is_whole(i) and i >= 0 for i in ids):
            raise ValueError(f"stop_token_ids must be whole numbers from 0 up, got {ids!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @staticmethod
    def from_optional(**asked: Any) -> "SamplingParams":
        """The same with None for everything that is not asked, as vLLM has it."""
        kept = {name: value for name, value in asked.items() if value is not None}
        if "max_tokens" in asked:  # None is as many as have room, there too
            kept["max_tokens"] = asked["max_tokens"]
        return SamplingParams(**kept)

    def clone(self) -> "SamplingParams":
        """Another one that is equal."""
        return copy(self)

    def sample(self, index: int) -> "SamplingParams":
        """Those of continuation `index` alone: n is 1, and a seed is its own."""
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return replace(self, n=1, seed=seed)


WHAT_HAS_ROOM = 2**31 - 1  # tokens: max_tokens=None


def _as_vllm(init: Callable[..., None]) -> Callable[..., None]:
    """The same, for what scripts for vLLM write.

    A written __init__ that ends in **not_here would hide a wrong keyword from mypy.
    """
    written = {f.name for f in fields(SamplingParams) if f.init}

    @wraps(init)
    def accept(self: SamplingParams, **asked: Any) -> None:
        check_keywords("SamplingParams", {k: asked.pop(k) for k in asked.keys() - written})
        for name in ("stop", "stop_token_ids"):
            if asked.get(name, ()) is None:
                del asked[name]
        if asked.get("max_tokens", 1) is None:
            asked["max_tokens"] = WHAT_HAS_ROOM
        if asked.get("seed") == -1:
            asked["seed"] = None
        init(self, **asked)
        object.__setattr__(self, "says_temperature", "temperature" in asked)

    return accept


SamplingParams.__init__ = _as_vllm(SamplingParams.__init__)  # type: ignore[method-assign]


def check_params(params: object) -> None:
    """ValueError for anything but SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ValueError(
            "params must be SamplingParams(temperature=..., max_tokens=..., ...), or a list of "
            f"them, one for each prompt, got {params!r}"
        )


def _check_whole(name: str, value: object, low: float, high: float, hint: str) -> None:
    if not _is_whole(value):
        raise ValueError(f"{name} must be a whole number ({hint}), got {value!r}")
    _check_number(name, value, low, high, hint)


def _check_number(name: str, value: object, low: float, high: float, hint: str) -> None:
    if not _is_whole(value) and not isinstance(value, float):
        raise ValueError(f"{name} must be a number ({hint}), got {value!r}")
    if not low <= value <= high:  # NaN is not either
        raise ValueError(f"{name} must be from {low} to {high} ({hint}), got {value!r}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
