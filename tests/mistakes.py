"""Callers' mistakes: a value that does not belong there, in any place of any call.

Whatever is handed in, an engine takes it or answers with a ValueError that is a sentence. Never
another exception, an endless loop, or a request that is half in.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler


class Odd:
    """Knows nothing, and says so in two lines."""

    def __repr__(self) -> str:
        return "<odd\nthing>"


async def coroutine(result: object) -> None:
    raise AssertionError("nobody awaits it")


def odd_values() -> list[Any]:
    """What a caller may hand in by mistake; made anew, for some can be used once."""
    return [
        None, True, False, -1, 0, 1, 3, 2**31, 2**64, -(2**64), 10**30, 10**400,
        0.0, -0.0, 0.5, 1.5, 1e308, 1e-30, math.nan, math.inf, -math.inf, 1 + 2j,
        "", "warm", "One day", "a\ud800b", "\x00", "\ufffd", "r0", b"ab", bytearray(b"ab"),
        [], (), [None], [[]], [[1]], [1, 2], (3, 4), [1.0], [True], ["a"], ["a", 1], [-1], [10**6],
        range(3), range(0), {}, {"max_tokens": 5}, set(), {1, 2}, frozenset({1}), iter([1]),
        (one for one in [1]), slice(1), ..., NotImplemented, object(), Odd(), Odd, int, len,
        lambda: 1, coroutine, ValueError("mine"), np.int64(3), np.float32(0.5), np.array([1, 2]),
        np.array(3), torch.tensor(3), torch.tensor([1, 2]), torch.empty(0), torch.tensor(math.nan),
        torch.float16, torch.device("cpu"), "cuda:99", "meta", SamplingParams(), [SamplingParams()],
        [SamplingParams(), None, 5], Sampler(SamplingParams()), [Sampler(SamplingParams())],
        EngineConfig(max_model_len=8),
    ]  # fmt: skip


def odd(draw: random.Random) -> Any:
    return draw.choice(odd_values())


def sometimes(draw: random.Random, good: Any) -> Any:
    """It, or something odd in its place, or in one of its places."""
    if draw.random() < 0.3 and isinstance(good, list):
        return [*good, odd(draw)] if draw.random() < 0.5 else [odd(draw), *good]
    return good if draw.random() < 0.5 else odd(draw)


def one_field_odd(kind: type, draw: random.Random) -> Any:
    """A dataclass of settings, with one or two odd ones."""
    names = draw.sample([field.name for field in fields(kind)], draw.choice([1, 1, 2]))
    return kind(**{name: odd(draw) for name in names})


def adds(engine: LLMEngine, draw: random.Random) -> list[str]:
    """→ what is in the engine now that should not stay."""
    options = {
        "params": SamplingParams(max_tokens=2),
        "request_id": f"h{draw.randrange(10**6)}",
        "arrival": 0.0,
        "on_token": None,
        "sampler": None,
    }
    wrong = draw.choice([None, *options])
    if wrong is not None:
        options[wrong] = odd(draw)
    prompt = [1, 2, 3] if wrong is not None else sometimes(draw, [1, 2, 3])
    return [engine.add_request(prompt, **options)]  # type: ignore[arg-type]


def serves(engine: LLMEngine, draw: random.Random) -> list[str]:
    """All together: a generate or a stream, begun or not."""
    prompts = sometimes(draw, [[1, 2, 3], [4, 5]])
    params = sometimes(draw, draw.choice([None, [SamplingParams(max_tokens=2)] * 2]))
    if draw.random() < 0.3:
        engine.generate(prompts, params)
        return []
    stream = engine.stream(prompts, params)
    if draw.random() < 0.5:
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    return []


def aborts(engine: LLMEngine, draw: random.Random) -> list[str]:
    name = odd(draw)
    if not isinstance(name, str) or name not in engine.requests:
        engine.abort(name)
    return []


def makes_engines(engine: LLMEngine, draw: random.Random) -> list[str]:
    """On the memory that is in use; or with something odd in place of a part."""
    parts = {"tokenizer": None, "config": None, "memory": engine.memory, "clock": None}
    parts |= {"trace": None, "runner": None}
    wrong = draw.choice([None, "config", "memory"])
    if wrong is not None:
        parts |= {"memory": None, wrong: odd(draw)}
    LLMEngine(engine.model, **parts)  # type: ignore[arg-type]
    assert wrong or not engine.scheduler.has_unfinished, "one memory serves two engines at a time"
    return []


def makes_memories(engine: LLMEngine, draw: random.Random) -> list[str]:
    config = engine.model.config
    if draw.random() < 0.5:
        sizes = {"num_blocks": 4, "block_size": 4}
        sizes[draw.choice([*sizes, "memory_bytes"])] = odd(draw)
        PagedKVCache.from_config(config, **sizes)
    else:
        CellKVCache.from_config(config, odd(draw))
    return []


def runs_the_loop(engine: LLMEngine, draw: random.Random) -> list[str]:
    options = {"max_len": None, "chunk_size": None, "tokenizer": None}
    options[draw.choice(["max_len", "chunk_size"])] = odd(draw)
    generate(engine.model, sometimes(draw, [[1, 2, 3]]), SamplingParams(max_tokens=2), **options)  # type: ignore[arg-type]
    return []


def setting(kind: type) -> Callable[[LLMEngine, random.Random], list[str]]:
    return lambda engine, draw: one_field_odd(kind, draw) and []


CALLS: Sequence[Callable[[LLMEngine, random.Random], list[str]]] = (
    adds,
    adds,
    serves,
    serves,
    aborts,
    setting(SamplingParams),
    setting(EngineConfig),
    makes_engines,
    makes_memories,
    runs_the_loop,
)


def make_a_mistake(engine: LLMEngine, draw: random.Random) -> bool:
    """A call with something odd in it → was it taken? What it brought in is aborted.

    AssertionError for an answer that is no sentence of a ValueError.
    """
    call = draw.choice(CALLS)
    with sentences_only():
        for name in call(engine, draw):
            if name in engine.requests:
                engine.abort(name)
        return True
    return False


@contextmanager
def sentences_only() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        told = str(error)
        assert len(told.split()) >= 4, f"{type(error).__name__} says {told!r} alone"
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"a caller meets {type(error).__name__}: {error}") from error
