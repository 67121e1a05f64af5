"""The learner's functions run in the real model; a wrong one is told, and the package's runs."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from learners import Spy, greedy, named, passes, raises_at
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.engine.generate import generate
from tutorial_engine.lab.ledger import ledger, our_paths, runner_path
from tutorial_engine.learn import own
from tutorial_engine.learn.checks_01 import (
    check_attention,
    check_layer,
    check_rope,
    check_window_mask,
)
from tutorial_engine.learn.checks_02 import (
    check_run_new,
    check_static_cache,
    check_top_p,
    check_why_finished,
)
from tutorial_engine.learn.earlier import CHECKS as EARLIER
from tutorial_engine.learn.own import PARTS, LayerWeights, rms_norm
from tutorial_engine.learn.own_cache import CACHES
from tutorial_engine.learn.own_engine import IN_01, OwnEngine
from tutorial_engine.learn.parts import PartFailed, Plugged
from tutorial_engine.learn.verdict import Verdict
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams

PROMPT = "Once upon a time Anna had a red kite."
Parts = dict[str, Callable[..., Any]]


# -- right answers to all exercises, as a learner writes them ------------------------------------


def window_mask(q_len: int, kv_len: int, window: int) -> Tensor:
    back = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)[None, :]
    return (back >= 0) & (back < window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.T / k.shape[-1] ** 0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


def kv_head(h: int, num_heads: int, num_kv_heads: int) -> int:
    return h * num_kv_heads // num_heads


def rope(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def project(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    return tuple((x @ w.T).unflatten(-1, (-1, head_dim)) for w in (w_q, w_k, w_v))


def layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Any) -> Tensor:
    q, k, v = project(rms_norm(x, w.input_norm), w.q, w.k, w.v, len(w.q_norm))
    q, k = rope(rms_norm(q, w.q_norm), angles), rope(rms_norm(k, w.k_norm), angles)
    x = x + attend(q, k, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (torch.nn.functional.silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T


class MyCache:
    updates = 0

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        MyCache.updates += 1
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer] = (k, v)
        return [(k, v)]


class MyStaticCache:
    updates = 0

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        sizes = (config.num_hidden_layers, max_len, config.num_key_value_heads, config.head_dim)
        self.k, self.v = torch.empty(sizes), torch.empty(sizes)

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        MyStaticCache.updates += 1
        end = int(batch.positions[-1]) + 1
        self.k[layer, batch.positions], self.v[layer, batch.positions] = k, v
        return [(self.k[layer, :end], self.v[layer, :end])]


def run_new(model: Any, attention: Any, token_ids: list[int], num_computed: int) -> Tensor:
    batch = Batch.from_sequences([token_ids[num_computed:]], [num_computed])
    return model.compute_logits(model(batch, attention))[-1]


def keep_top_p(probs: Tensor, p: float) -> Tensor:
    values, order = probs.sort(descending=True)
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = values.cumsum(-1) - values < p
    return keep


def why_finished(
    new_ids: list[int], text: str, eos_ids: Sequence[int], stop: Sequence[str], max_tokens: int
) -> str | None:
    if new_ids[-1] in eos_ids or any(one in text for one in stop):
        return "stop"
    return "length" if len(new_ids) == max_tokens else None


CHECKS: dict[str, Callable[..., Verdict]] = {**EARLIER["01"], **EARLIER["02"]}
RIGHT: Parts = {name: globals()[name] for name in CHECKS}


@pytest.fixture
def mine(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer)


@pytest.fixture
def cached(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> OwnEngine:
    return OwnEngine(model, tokenizer, cached=True)


def told(mine: OwnEngine, capsys: pytest.CaptureFixture[str], *args: Any, **more: Any) -> str:
    capsys.readouterr()
    mine.tell(*args, **more)
    return capsys.readouterr().out


# -- the package's parts are the model -----------------------------------------------------------


def test_every_part_has_an_exercise_with_a_check_and_the_packages_own_passes_it() -> None:
    assert set(PARTS) == set(CHECKS)
    for name, check in CHECKS.items():
        assert check(PARTS[name]).ok is True


def test_model_made_of_parts_is_the_model(mine: OwnEngine, model: Qwen3ForCausalLM) -> None:
    batch = Batch.from_sequences([[40, 7, 99, 250, 7, 13], [5, 6]], [0, 3])
    want = model.compute_logits(model(batch))
    assert torch.allclose(mine.model.compute_logits(mine.model(batch)), want, atol=1e-4)
    assert torch.allclose(mine.last_logits([5, 6], window=2), mine.last_logits([5, 6]))
    assert not torch.allclose(mine.last_logits([5, 6], window=1), mine.last_logits([5, 6]))
    assert set(mine.parts.calls) == set(IN_01) and not mine.parts.own


# -- the learner's are called --------------------------------------------------------------------


def test_learners_parts_of_01_run_and_tell_what_transformers_tells(
    mine: OwnEngine,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    model: Qwen3ForCausalLM,
) -> None:
    spies = {name: Spy(RIGHT[name]) for name in IN_01 if name != "layer"}
    for name, spy in spies.items():
        plugged = mine.use(spy, CHECKS[name])
        assert repr(plugged).endswith(f"\nYour {name} runs in the model now."), plugged
        spy.calls.clear()
    said = told(mine, capsys, PROMPT)
    c, steps = model.config, 24
    ids = tokenizer.encode(PROMPT).ids
    want = greedy(ids, steps)
    assert tokenizer.decode([*ids, *want]) in said
    assert said.endswith("✔ 24 of 24 tokens are those of the package's engine.\n")
    per_layer = steps * c.num_hidden_layers
    assert len(spies["project"].calls) == len(spies["window_mask"].calls) == per_layer
    assert len(spies["rope"].calls) == 2 * per_layer
    per_head = c.num_attention_heads * per_layer
    assert len(spies["attention"].calls) == len(spies["kv_head"].calls) == per_head
    for name, spy in spies.items():
        assert f"{name} ({len(spy.calls):,} calls)" in said
    assert "; the package's: layer\n" in said
    lengths = [len(call[0]) for call in spies["project"].calls[:: c.num_hidden_layers]]
    assert lengths == [len(ids) + i for i in range(steps)], "everything runs again for each token"
    weights = LayerWeights.of(model.model.layers[0])  # type: ignore[arg-type]
    assert torch.equal(spies["project"].calls[0][1], weights.q), "the real weights"


def test_learners_layer_runs_with_the_learners_other_functions_inside(
    mine: OwnEngine,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    model: Qwen3ForCausalLM,
) -> None:
    spies = {name: Spy(RIGHT[name]) for name in reversed(IN_01)}
    for name, spy in spies.items():
        assert mine.use(spy, CHECKS[name]).verdict.ok is True
        spy.calls.clear()
    said = told(mine, capsys, PROMPT)
    per_layer = 24 * model.config.num_hidden_layers
    assert len(spies["layer"].calls) == per_layer
    assert len(spies["attention"].calls) == model.config.num_attention_heads * per_layer
    line = said.split("yours: ")[1].splitlines()[0]
    assert re.findall(r"(\w+) \((.*?)\)", line) == [
        (
            name,
            "inside layer" if name in ("project", "rope") else f"{len(spies[name].calls):,} calls",
        )
        for name in IN_01
    ], "in the order of the exercises"
    assert "the package's" not in line and mine.label == "your engine (6 of 6 parts yours)"
    ids = tokenizer.encode(PROMPT).ids
    assert [*mine.generate(PROMPT).output_token_ids] == greedy(ids, 24)


@pytest.mark.parametrize("cache", CACHES)
def test_all_of_the_learners_parts_run_with_a_cache(
    cached: OwnEngine,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    cache: str,
) -> None:
    spies = {name: Spy(RIGHT[name]) for name in PARTS if name not in CACHES}
    for name, spy in spies.items():
        assert cached.use(spy, CHECKS[name]).verdict.ok is True
        spy.calls.clear()
    theirs: Any = RIGHT[cache]
    assert cached.use(theirs, CHECKS[cache]).verdict.ok is True
    theirs.updates = 0
    ids = tokenizer.encode(PROMPT).ids
    said = told(cached, capsys, PROMPT)
    assert [call[3] for call in spies["run_new"].calls] == [0, *range(len(ids), len(ids) + 23)]
    lengths = [len(call[0]) for call in spies["layer"].calls[:: len(cached.model.layer_weights)]]
    assert lengths == [len(ids)] + [1] * 23, "each token runs once"
    assert theirs.updates == 24 * len(cached.model.layer_weights)
    assert f"{cache} ({theirs.updates} calls)" in said and "why_finished (24 calls)" in said
    assert len(spies["why_finished"].calls) == 24
    assert not spies["keep_top_p"].calls and "keep_top_p" not in said, "greedy asks no filter"
    assert "the package's" not in said.split("yours: ")[1].splitlines()[0]
    assert [*cached.generate(PROMPT).output_token_ids] == greedy(ids, 24)


def test_all_of_the_learners_parts_run_in_a_model_of_another_size(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    config = replace(cached.package.config, num_hidden_layers=2, **sizes)
    other = Qwen3ForCausalLM(config).draw_weights().requires_grad_(False).eval()
    drawn = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=3)
    assert "yours: none yet" in told(cached.moved_to(other), capsys, PROMPT, drawn)
    for name, part in RIGHT.items():
        cached.use(part, CHECKS[name])
    said = told(cached.moved_to(other), capsys, PROMPT, drawn)
    line = said.split("yours: ")[1].splitlines()[0]
    assert all(f"{name} (" in line for name in {*PARTS} - {"MyCache"})
    assert "the package's" not in line and "MyCache" not in line, "the later cache runs"
    cached.parts.own["kv_head"] = lambda h, num_heads, num_kv_heads: h // 3  # 6 to 2 heads only
    said = told(cached.moved_to(other), capsys, PROMPT, drawn)
    assert "The package's kv_head runs in its place." in said
    assert "kv_head" in cached.parts.own, "it stays where it is right"


def test_learners_top_p_and_the_packages_draw_the_same_tokens(
    cached: OwnEngine,
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spy = Spy(keep_top_p)
    cached.use(spy, check_top_p)
    spy.calls.clear()
    params = SamplingParams(temperature=1.2, top_p=0.9, seed=7, max_tokens=24)
    want = generate(model, PROMPT, params, tokenizer=tokenizer)[0].outputs[0]
    assert cached.generate(PROMPT, params).output_token_ids == want.token_ids
    assert len(spy.calls) == 24
    for probs, p in spy.calls:
        assert p == 0.9 and probs.sum() == pytest.approx(1, abs=1e-4)
    said = told(cached, capsys, PROMPT, params)
    assert "keep_top_p (24 calls)" in said and want.text in said
    cached.use(named("keep_top_p", lambda probs, p: probs >= probs.max()), passes)
    best = cached.generate(PROMPT, params).output_token_ids
    assert best == cached.generate(PROMPT).output_token_ids != want.token_ids, "it decides"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, stop=("kite.", "coat.")),
        SamplingParams(max_tokens=24, stop="e t"),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=8, stop_token_ids=(300,)),
        SamplingParams(max_tokens=60, ignore_eos=True),
    ],
)
def test_learners_why_finished_ends_where_the_package_ends(
    cached: OwnEngine, model: Qwen3ForCausalLM, tokenizer: Tokenizer, params: SamplingParams
) -> None:
    spy = Spy(why_finished)
    cached.use(spy, check_why_finished)
    spy.calls.clear()
    request = cached.generate("Once upon a time Rado had an old", params)
    want = generate(model, "Once upon a time Rado had an old", params, tokenizer=tokenizer)[
        0
    ].outputs[0]
    assert request.output_token_ids == want.token_ids
    assert request.checker.text == want.text
    assert request.checker.finish is not None
    assert request.checker.finish.reason == want.finish_reason
    assert [len(call[0]) for call in spy.calls] == list(range(1, len(want.token_ids) + 1))


def test_window_is_the_learners_mask_and_nothing_is_compared(
    mine: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    spy = Spy(window_mask)
    mine.use(spy, check_window_mask)
    whole = mine.generate(PROMPT).output_token_ids
    spy.calls.clear()
    said = told(mine, capsys, PROMPT, window=3)
    assert {call[2] for call in spy.calls} == {3} and "✔" not in said and "✘" not in said
    assert mine.generate(PROMPT, window=3).output_token_ids != whole
    assert mine.generate(PROMPT, window=1000).output_token_ids == whole


def test_learners_engine_is_a_row_of_the_ledger(
    mine: OwnEngine, cached: OwnEngine, model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    for engine in (mine, cached):
        for name, part in RIGHT.items():
            engine.use(part, CHECKS[name])
    paths = {
        "no cache": our_paths(model)["no cache"],
        "yours, no cache": runner_path(lambda n: mine.runner()),
        "yours, cached": runner_path(lambda n: cached.runner()),
        "yours, together": runner_path(lambda n: cached.runner(), together=True),
    }
    prompts = [tokenizer.encode(text).ids for text in (PROMPT, "Ben had a blue ball.")]
    rows = ledger(paths, prompts, num_tokens=8)
    assert all(row.ok and row.steps == 16 for row in rows), rows
    cached.use(named("layer", lambda x, w, a, attend: layer(x, w, 1.1 * a, attend)), passes)
    assert not ledger(paths, prompts, num_tokens=8)[2].ok, "the row is the learner's"


def test_bytes_that_a_cache_copies_are_counted_of_the_one_that_runs(cached: OwnEngine) -> None:
    c = cached.package.config
    per_token = 2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    by_cat = per_token * sum(range(20))
    assert cached.bytes_copied(20) == by_cat, "the package's"
    for cache, copied in ((MyStaticCache, 0), (MyCache, by_cat), (MyStaticCache, 0)):
        cached.use(cache, CHECKS[cache.__name__])
        assert cached.bytes_copied(20) == copied and {*cached.parts.own} == {cache.__name__}
    cached.use(named("MyStaticCache", RaisingCache), passes)
    with pytest.raises(PartFailed, match="moth"):
        cached.bytes_copied(20)
    cached.use(named("MyStaticCache", lambda *_: None), check_static_cache)
    assert cached.bytes_copied(20) == 0, "the package's"


def test_a_story_told_live_comes_token_by_token_and_is_the_same(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.use(run_new, check_run_new)
    pieces: list[str] = []

    def keep(words: str, end: str = "\n", flush: bool = False) -> None:
        pieces.append(words + end)

    for params in (SamplingParams(max_tokens=8), SamplingParams(max_tokens=24, stop="coat.")):
        whole = told(cached, capsys, PROMPT, params)
        pieces.clear()
        monkeypatch.setattr("builtins.print", keep)
        cached.tell(PROMPT, params, live=True)
        monkeypatch.undo()
        assert "".join(pieces) == whole
        assert len(pieces) > 8 and pieces[0] == PROMPT


# -- unusual right parts -------------------------------------------------------------------------


def in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k /= math.sqrt(k.shape[-1])
    scores = q @ k.T
    mask.logical_not_()
    scores[mask] = -1e9
    return scores.softmax(-1) @ v


def double_layer(x: Tensor, w: LayerWeights, angles: Tensor, attend: Any) -> Tensor:
    doubles = LayerWeights(*(one.double() for one in w))
    return layer(x.double(), doubles, angles, lambda q, k, v: attend(q, k, v).double())


class Doubles(MyCache):
    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return super().update(layer, k.double(), v.double(), batch)


UNUSUAL: list[tuple[str, Callable[..., Any]]] = [
    ("attention", in_place),
    ("attention", lambda q, k, v, mask: attention(q.double(), k.double(), v.double(), mask)),
    ("rope", lambda x, angles: rope(x.double(), angles.double())),
    ("project", lambda x, *w: [part.double() for part in project(x, *w)]),
    ("layer", double_layer),
    ("MyCache", Doubles),
    ("run_new", lambda *args: run_new(*args).double()),
    ("keep_top_p", lambda probs, p: keep_top_p(probs.mul_(1.0), p)),
]


@pytest.mark.parametrize(("name", "part"), UNUSUAL)
def test_unusual_right_part_runs_in_the_model_too(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str, part: Callable[..., Any]
) -> None:
    part.__name__ = name
    assert cached.use(part, CHECKS[name]).verdict.ok is True
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=8)
    said = told(cached, capsys, PROMPT, params)
    assert "✘" not in said and f"yours: {name} (" in said
    assert said.endswith("✔ 8 of 8 tokens are those of the package's engine.\n")


# -- what is wrong is told and replaced ----------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_or_untouched_part_is_told_and_the_packages_runs(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    class Untouched:
        def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any: ...

    class Wrong:
        def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
            return [(k, v)]

    untouched: Any = Untouched if name in CACHES else lambda *_: None
    wrong: Any = Wrong if name in CACHES else lambda *args: args[0]
    for part, mark in ((untouched, "☐ not done yet: "), (wrong, "✘ ")):
        cached.use(RIGHT[name], CHECKS[name])  # was right, is changed for the worse
        plugged = cached.use(named(name, part), CHECKS[name])
        assert repr(plugged).startswith(mark)
        assert repr(plugged).endswith(f"\nThe package's {name} runs in the model now.")
        assert name not in cached.parts.own
    said = told(cached, capsys, PROMPT, SamplingParams(max_tokens=4))
    assert said.endswith("\n4 of 4 tokens are those of the package's engine.\n")
    assert "yours: none yet; the package's: " in said and "✘" not in said


def test_function_of_another_name_is_no_part(mine: OwnEngine) -> None:
    with pytest.raises(ValueError, match="'my_rope' is no part of the engine; the parts are"):
        mine.use(named("my_rope", lambda x, angles: x), check_rope)


class RaisingCache(MyCache):
    def __init__(self, *sizes: Any) -> None:
        super().__init__()

    def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        if len(k) == 1:
            raise KeyError("moth")
        return super().update(layer, k, v, batch)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "among the learner's others"])
def test_part_that_raises_in_the_model_is_told_and_taken_out(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str, others: bool
) -> None:
    if others:
        for other, part in RIGHT.items():
            if (other, name) not in (("layer", "rope"), ("layer", "project")):
                cached.use(part, CHECKS[other])
    broken = RaisingCache if name in CACHES else raises_at(1, RIGHT[name])
    cached.use(named(name, broken), passes)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=4)
    said = told(cached, capsys, PROMPT, params)
    assert said.startswith(f"✘ your {name} raised KeyError in the model: 'moth'\n")
    assert f"  The package's {name} runs in its place.\n" in said and said.count("✘") == 1
    assert said.endswith("4 of 4 tokens are those of the package's engine.\n")
    assert name not in cached.parts.own and len(cached.parts.own) == (
        0 if not others else 8 if name in ("rope", "project") else 9
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("window_mask", lambda q_len, kv_len, window: window_mask(q_len, kv_len, 2)),
        ("attention", lambda q, k, v, mask: v[: len(q)]),
        ("attention", lambda q, k, v, mask: attention(q, k, v, mask).squeeze()),
        ("kv_head", lambda h, num_heads, num_kv_heads: h % num_kv_heads),
        ("kv_head", lambda h, num_heads, num_kv_heads: h),
        ("rope", lambda x, angles: x),
        ("project", lambda *args: [project(*args)[i] for i in (0, 2, 1)]),
        ("project", lambda *args: None),
        ("layer", lambda x, w, angles, attend: x),
        ("MyCache", None),
        ("MyStaticCache", None),
        ("run_new", lambda model, attention, ids, n: run_new(model, attention, ids, 0)[:7]),
        ("run_new", lambda model, attention, ids, n: run_new(model, attention, ids[:-1], 0) * 0),
        ("keep_top_p", lambda probs, p: probs >= probs.max()),
        ("keep_top_p", lambda probs, p: probs.nonzero()),
        ("why_finished", lambda ids, *rest: "length" if len(ids) == 2 else None),
        ("why_finished", lambda *state: None),
        ("why_finished", lambda *state: "over"),
    ],
)
def test_part_that_a_check_let_through_is_found_by_its_tokens(
    cached: OwnEngine, capsys: pytest.CaptureFixture[str], name: str, part: Any
) -> None:
    class OnlyNew:
        def __init__(self, *sizes: Any) -> None: ...

        def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
            return [(k, v)]

    cached.use(RIGHT["attention"], check_attention)
    cached.use(RIGHT["run_new"], check_run_new)
    cached.use(named(name, part or OnlyNew), passes)
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=1, max_tokens=6)
    said = told(cached, capsys, "One day", params)
    assert said.startswith("✘ ") and said.count("✘") == 1
    assert f"  The package's {name} runs in its place.\n" in said
    assert said.endswith("✔ 6 of 6 tokens are those of the package's engine.\n")
    left = {"attention", "run_new"} - {name}
    assert set(cached.parts.own) == left, "and only this one was taken out"


def test_two_wrong_parts_are_both_taken_out(
    mine: OwnEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.use(named("rope", lambda x, angles: x), passes)
    mine.use(named("attention", lambda q, k, v, mask: v[: len(q)]), passes)
    said = told(mine, capsys, PROMPT)
    assert said.startswith("✘ With your rope and attention the tokens are not the package's.\n")
    assert not mine.parts.own
    assert said.endswith("\n24 of 24 tokens are those of the package's engine.\n")


def test_an_error_of_the_package_is_not_blamed_on_the_learner(mine: OwnEngine) -> None:
    mine.use(rope, check_rope)
    with pytest.raises(ValueError, match="tokens"):
        mine.tell(PROMPT * 200)
    assert mine.parts.own == {"rope": rope}


@pytest.mark.parametrize("name", IN_01)
def test_a_wrong_part_can_be_heard_and_does_not_stay(
    mine: OwnEngine, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine.use(RIGHT["layer"], check_layer)
    wrong = {"attention": lambda q, k, v, mask: v[: len(q)], "layer": lambda x, *_: x}
    wrong |= {"project": lambda *args: [project(*args)[i] for i in (0, 2, 1)]}
    wrong |= {"kv_head": lambda h, *_: h % 2, "rope": lambda x, angles: x}
    wrong |= {"window_mask": lambda q, kv, _: window_mask(q, kv, 2)}
    for part in (RIGHT[name], wrong[name], raises_at(1, RIGHT[name])):
        mine.hear(PROMPT, **{name: part})
    mine.hear(PROMPT, **{name: lambda *_: ...})
    right, other, raised, untouched = capsys.readouterr().out.splitlines()
    assert right == PROMPT + mine.generate(PROMPT).checker.text
    assert other.startswith(PROMPT) and other != right
    assert raised.startswith(f"✘ your {name} raised KeyError")
    assert untouched == f"☐ not done yet: the body of {name} is still `...`"
    assert mine.parts.own == {"layer": RIGHT["layer"]}
    with pytest.raises(ValueError, match="no parts of the engine"):
        mine.hear(PROMPT, my_rope=rope)


def test_plugged_says_whose_part_runs() -> None:
    assert repr(Plugged(Verdict(True, "fine"), "rope")) == (
        "✔ fine\nYour rope runs in the model now."
    )
    assert own.PARTS["rope"] is own.rope
