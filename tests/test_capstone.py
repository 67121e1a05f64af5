"""The acceptance test of somebody's engine: ours passes, and each wrong one is told what it is."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from tutorial_engine.cache import PagedKVCache, StaticKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne
from tutorial_engine.learn import capstone
from tutorial_engine.learn.capstone import (
    Adapted,
    Factory,
    Limits,
    check_engine,
    package_engine,
    workload,
)
from tutorial_engine.learn.parts.server import OwnServer
from tutorial_engine.learn.stories.bugs import Zoo, planted
from tutorial_engine.learn.stories.bugs_02 import BUGS_02
from tutorial_engine.learn.stories.bugs_03 import BUGS_03
from tutorial_engine.learn.stories.bugs_04 import BUGS_04
from tutorial_engine.model.attention import SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling import SamplingParams

SEED = 1


@pytest.fixture(autouse=True, scope="module")
def drawn_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capstone, "workload", cache(workload))
        yield


def on(model: CausalLM, limits: Limits, memory: Any = None, **parts: Any) -> LLMEngine:
    return LLMEngine(model, config=EngineConfig(**limits._asdict()), memory=memory, **parts)


def pages(model: CausalLM, limits: Limits) -> Adapted:
    """So few that requests are preempted."""
    memory = PagedKVCache.from_config(model.config, num_blocks=40, block_size=4)
    return Adapted(on(model, limits, memory))


def many_pages(model: CausalLM, limits: Limits) -> Adapted:
    return Adapted(on(model, limits, PagedKVCache.from_config(model.config, num_blocks=200)))


def own(model: CausalLM, limits: Limits, tokenizer: Tokenizer | None = None) -> Adapted:
    server = OwnServer(model, tokenizer, "pages", num_blocks=60, block_size=8)
    return Adapted(server.engine(**limits._asdict()))


class Scratch:
    """An engine of thirty lines: known tokens, how many are computed, and a row for each."""

    def __init__(self, model: CausalLM, limits: Limits) -> None:
        sizes = {"max_seqs": limits.max_num_seqs, "max_len": limits.max_model_len}
        self.cache = StaticKVCache.from_config(model.config, **sizes)
        self.model, self.limits = model, limits
        self.requests: dict[str, tuple[list[int], int, int]] = {}  # tokens, computed, whole length

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        self.requests[request_id] = (prompt_token_ids, 0, len(prompt_token_ids) + max_tokens)

    def step(self) -> list[tuple[str, int]]:
        budget, plan = self.limits.max_num_batched_tokens, dict[str, int]()
        for name, (ids, computed, _) in list(self.requests.items())[: self.limits.max_num_seqs]:
            if budget:
                plan[name] = min(len(ids) - computed, budget)
                budget -= plan[name]
        if not plan:
            return []
        parts, places = [], []
        for name, count in plan.items():
            ids, computed, _ = self.requests[name]
            parts.append(ids[computed : computed + count])
            places.append(self.cache.allocate(name, ids, computed, count))
        batch = Batch.from_allocations(parts, [p for p in places if p], list(plan))
        hidden = self.model(batch, SdpaAttention(self.cache.storage))
        best = self.model.compute_logits(
            hidden[[end - 1 for end in batch.query_start_loc[1:]]]
        ).argmax(-1)
        told = []
        for (name, count), token in zip(plan.items(), best.tolist(), strict=True):
            ids, computed, length = self.requests[name]
            if computed + count == len(ids):
                ids = [*ids, token]
                told.append((name, token))
            self.requests[name] = (ids, computed + count, length)
            if told and told[-1] == (name, ids[-1]) and self.is_over(ids, length):
                del self.requests[name]
                self.cache.free(name)
        return told

    def is_over(self, ids: list[int], length: int) -> bool:
        return len(ids) == length or ids[-1] in self.model.config.eos_token_ids


def policy(scheduler: Any) -> Factory:
    return lambda model, limits: Adapted(on(model, limits, scheduler=scheduler))


@pytest.mark.parametrize(
    "factory",
    [package_engine, pages, own, Scratch],
    ids=["rows", "pages", "own", "from scratch"],
)
def test_right_engines_are_accepted(factory: Factory, model: CausalLM) -> None:
    report = check_engine(factory, SEED, rounds=1)
    assert report.ok and repr(report).count("✔") == 5 and repr(report).endswith("\nAccepted.")


class Changed(Adapted):
    """Ours, with a change in what it is given or gives out."""

    def __init__(self, model: CausalLM, limits: Limits) -> None:
        super().__init__(on(model, limits))


class Raises(Changed):
    def step(self) -> list[tuple[str, int]]:
        raise KeyError("block 3")


class Dictionary(Changed):
    def step(self) -> Any:
        return [name for name, _ in super().step()]


class Loses(Changed):
    """Who comes while others run is forgotten."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        if len(self.engine.requests) < 3:
            super().add_request(request_id, prompt_token_ids, max_tokens)


class GoesOn(Changed):
    """The end-of-text token ends nobody."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(request_id, prompt_token_ids, params)


class Swaps(Changed):
    """The names of a step are in another order than its tokens."""

    def step(self) -> list[tuple[str, int]]:
        told = super().step()
        names = [name for name, _ in told]
        return [(name, token) for name, (_, token) in zip(names[::-1], told, strict=True)]


class Recomputes(Changed):
    """No cache: each forward runs all that is known."""

    def __init__(self, model: CausalLM, limits: Limits) -> None:
        self.model, self.all = model, dict[str, tuple[list[int], int]]()

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        self.all[request_id] = (prompt_token_ids, max_tokens)

    def step(self) -> list[tuple[str, int]]:
        told = []
        for name, (ids, left) in list(self.all.items())[:1]:
            hidden = self.model(Batch.from_sequences([ids]))
            token = int(self.model.compute_logits(hidden[-1:]).argmax())
            told.append((name, token))
            self.all[name] = ([*ids, token], left - 1)
            if left == 1 or token in self.model.config.eos_token_ids:
                del self.all[name]
        return told


def bug(zoo: Zoo, name: str, make: Callable[..., Adapted] = package_engine) -> Factory:
    """The engine runs with the bug; what the tokens are compared with does not."""

    class Planted(Adapted):
        def __init__(self, model: CausalLM, limits: Limits) -> None:
            super().__init__(make(model, limits).engine)

        def step(self) -> list[tuple[str, int]]:
            with planted(name, zoo):
                return super().step()

    return Planted


ALONE, TOGETHER = "^✘ each .* no\\. .*", "^✘ all .* no\\. .*"
WRONG = {
    "raises": (Raises, ALONE + "step raised KeyError: 'block 3'"),
    "names only": (Dictionary, ALONE + r"it must return pairs \(request_id, token\)"),
    "loses": (Loses, TOGETHER + "tokens are still lacking, of .* steps gave none"),
    "goes on": (GoesOn, TOGETHER + "one more token after its end-of-text token"),
    "swaps": (Swaps, TOGETHER + "the right tokens to the wrong requests"),
    "recomputes": (Recomputes, "^✘ a forward .* tokens of 1 requests"),
    "one by one": (policy(OneByOne), "^✘ requests share .* One request after the other takes"),
    "late": (
        bug(BUGS_02, "decode starts one position late"),
        ALONE + "right positions and mask",
    ),
    "early": (bug(BUGS_03, "a half-read prompt answers"), ALONE + "after the last part only"),
    "neighbour": (bug(BUGS_03, "a neighbour's row is read"), TOGETHER + "of another request"),
    "budget": (bug(BUGS_03, "each request has the whole budget"), "^✘ a forward .* runs"),
    "parent": (bug(BUGS_04, "a hash of own tokens only", many_pages), TOGETHER + "found again"),
    "stale": (bug(BUGS_04, "a taken block keeps its hash", pages), TOGETHER + "found again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_engines_are_told_apart(name: str, model: CausalLM) -> None:
    factory, said = WRONG[name]
    report = check_engine(factory, SEED, rounds=1)
    assert not report.ok and re.search(said, repr(report), re.M), report
