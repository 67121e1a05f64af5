"""The checks and the bug zoo of notebook 02: right answers pass, each usual mistake is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import QWEN3_06B
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import GrowingKVCache, StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_02 import BUGS_02
from tutorial_engine.learn.checks_02 import (
    check_cache,
    check_fit,
    check_floor,
    check_slots,
    check_top_p,
)
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM


class Keeps:
    """The right cache; a subclass gets one thing wrong."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = (k, v)
        return [(k, v)]


class OnlyNew(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return [(k, v)]


class OneForAllLayers(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return super().update(0, k, v, batch)


class NewFirst(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        if layer in self.kv:
            k, v = (torch.cat(pair) for pair in zip((k, v), self.kv[layer], strict=True))
        self.kv[layer] = (k, v)
        return [(k, v)]


class NoList(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        return super().update(layer, k, v, batch)[0]


class KeyTwice(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any:
        all_k, _ = super().update(layer, k, v, batch)[0]
        return [(all_k, all_k)]


class Open(Keeps):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: object) -> Any: ...


def slots(cached: list[int], new: list[int], max_len: int) -> list[int]:
    pairs = enumerate(zip(cached, new, strict=True))
    return [r * max_len + old + i for r, (old, n) in pairs for i in range(n)]


def rows(config: ModelConfig, budget: int, max_len: int, factor: int = 4) -> int:
    numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return budget // (factor * numbers * max_len)


def nucleus(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) - values < p
    return keep


def still_sorted(probs: Tensor, p: float) -> Tensor:
    values = probs.sort(descending=True).values
    return values.cumsum(-1) - values < p


def one_too_few(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) <= p
    return keep


def fit(function: Callable[..., Any]) -> Verdict:
    return check_fit(function, QWEN3_06B)


RIGHT: list[tuple[Callable[..., Verdict], Any]] = [
    (check_cache, Keeps),
    (check_slots, slots),
    (fit, rows),
    (check_top_p, nucleus),
    (check_floor, lambda f, b, peak, width: max(f / peak, b / width)),
]
WRONG: list[tuple[Callable[..., Verdict], Any, str]] = [
    (check_cache, OnlyNew, "only the new k"),
    (check_cache, OneForAllLayers, "each layer keep its own"),
    (check_cache, NewFirst, "first the old"),
    (check_cache, NoList, "one pair"),
    (check_cache, KeyTwice, "copy of k"),
    (check_slots, lambda cached, new, m: slots([0] * len(new), new, m), "overwritten"),
    (check_slots, lambda cached, new, m: [s + 1 for s in slots(cached, new, m)], "one too far"),
    (check_slots, lambda cached, new, m: slots(cached, new, 8), "expected"),
    (fit, lambda c, b, m: rows(c, b, m, 2), "factor of 2 is missing"),
    (fit, lambda c, b, m: rows(c, b, m, 8), "2 bytes"),
    (fit, lambda c, b, m: b // (4 * c.num_key_value_heads * c.head_dim * m), "layers"),
    (fit, lambda c, b, m: rows(c, b, m) // c.group_size, "query heads"),
    (check_top_p, still_sorted, "other tokens"),
    (check_top_p, one_too_few, "crosses p stays"),
    (check_top_p, lambda probs, p: probs > p, "keeps 0 tokens, expected 2"),
    (check_top_p, lambda probs, p: probs, "bool tensor"),
    (check_floor, lambda f, b, peak, width: f / peak + b / width, "not the sum"),
    (check_floor, lambda f, b, peak, width: min(f / peak, b / width), "slower"),
    (check_floor, lambda f, b, peak, width: f / peak, "slower"),
    (check_floor, lambda f, b, peak, width: b / width, "slower"),
    (check_top_p, lambda probs, p: nucleus(probs, p + 1e-6), "keeps 3 tokens, expected 2"),
    (fit, lambda c, b, m: b // (4 * c.num_hidden_layers * c.hidden_size * m), "expected"),
]


@pytest.mark.parametrize(("check", "answer"), RIGHT)
def test_right_answer_is_accepted(check: Callable[..., Verdict], answer: Any) -> None:
    assert check(answer).ok is True


@pytest.mark.parametrize(("check", "answer", "words"), WRONG)
def test_mistake_is_named(check: Callable[..., Verdict], answer: Any, words: str) -> None:
    verdict = check(answer)
    assert verdict.ok is False
    assert words in verdict.message, verdict


@pytest.mark.parametrize("check", [check for check, _ in RIGHT[1:]])
def test_untouched_exercise_is_open(check: Callable[..., Verdict]) -> None:
    assert check(lambda *_: None).ok is None
    assert check_cache(Open).ok is None


@pytest.mark.parametrize("check", [check for check, _ in RIGHT])
def test_exception_becomes_a_verdict(check: Callable[..., Verdict]) -> None:
    def fails(*_: object) -> None:
        raise KeyError("boom")

    assert check(fails).ok is False
    assert "boom" in check(fails).message


def test_a_right_answer_runs_the_engine(model: Qwen3ForCausalLM) -> None:
    theirs, ours = Keeps(), GrowingKVCache()
    for first, last in ((0, 3), (3, 4), (4, 5)):
        token_ids = [5, 6, 7, 8, 9][:last]
        room = ours.allocate("a", token_ids, first, last - first)
        batch = Batch.from_allocations([token_ids[first:]], [room], ["a"])
        got = model(batch, SdpaAttention(theirs))
        assert torch.equal(got, model(batch, SdpaAttention(ours)))


def path(model: Qwen3ForCausalLM, chunk_size: int | None) -> Tensor:
    """Logits after a prefill of 8 tokens and 4 decodes, in memory that holds zeros."""
    cache = StaticKVCache.from_config(model.config, CacheConfig(max_len=16))
    cache.storage.k.zero_()
    cache.storage.v.zero_()
    request = Request("a", list(range(40, 48)))
    logits = [prefill(model, cache, [request], chunk_size=chunk_size)]
    for token in (50, 60, 70, 80):
        request.token_ids.append(token)
        logits.append(decode(model, cache, [request]))
    return torch.cat(logits)


@pytest.mark.parametrize("name", BUGS_02)
def test_bug_of_the_cache_is_found_by_logits_and_goes_again(
    model: Qwen3ForCausalLM, name: str
) -> None:
    chunk_size = 4 if "chunk" in name else None
    right = path(model, None)
    with planted(name, BUGS_02):
        wrong = path(model, chunk_size)
    assert torch.allclose(path(model, chunk_size), right, atol=1e-3)
    assert (wrong - right).abs().amax(-1)[1:].min() > 0.01
    if chunk_size is None:
        assert torch.allclose(wrong[0], right[0], atol=1e-3), "the first new token is right"
