"""The sampling explorer shows what the engine's own filters and sampler do, step by step."""

import math

import pytest
import torch
from explorers import caption_of, check_places, items, place, turn, words

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler, filter_logits
from tutorial_engine.viz.sampling_explorer import MOST_DRAWS, SamplingExplorer, stages
from tutorial_engine.viz.tokens import token_label
from tutorial_engine.viz.words import percent

FLAT = "One day"  # any name may follow
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


@pytest.fixture(scope="module")
def shared() -> SamplingExplorer:
    return SamplingExplorer(load_model(), load_tokenizer(), FLAT)


@pytest.fixture
def explorer(shared: SamplingExplorer) -> SamplingExplorer:
    """The tiny model at a flat place, every filter off, at the last step."""
    shared._set_draws(10)
    return turn(shared, 4, prompt=FLAT, **OFF)


def kept(explorer: SamplingExplorer) -> list[int]:
    """Tokens of the lines that are drawn as kept."""
    return [
        token
        for i, token in enumerate(explorer.shown_ids)
        if "text-decoration" not in explorer.shown.items[f"token{i}"].attributes
    ]


SETTINGS = [
    {"top_k": 7},
    {"top_p": 0.5},
    {"min_p": 0.5},
    {"temperature": 0.5, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.3},
]


@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_last_step_is_what_the_engine_samples_from(explorer: SamplingExplorer, knobs: dict) -> None:
    turn(explorer, **knobs)
    params = SamplingParams(**{k: v for k, v in (OFF | knobs).items()})
    want = filter_logits(explorer.logits, params)
    last = explorer.stages[-1]
    assert torch.equal(last.kept, want.isfinite())
    assert (last.probs - want.double().softmax(-1)).abs().max() < 1e-9
    assert kept(explorer) == [i for i in explorer.shown_ids if want[i].isfinite()]
    left = int(want.isfinite().sum())
    assert words(explorer, "title") == [f"after min-p, {left} of 512 tokens can be drawn"]
    warm = (explorer.logits / params.temperature).softmax(-1)
    lost = float(warm[~want.isfinite()].sum())
    assert f"{percent(1 - lost)} of the probability is kept" in words(explorer, "mass")[0]
    assert f"{percent(lost)} is lost" in words(explorer, "mass")[0]


@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_bars_and_mass_are_in_proportion(explorer: SamplingExplorer, knobs: dict) -> None:
    turn(explorer, **knobs)
    for step in range(5):
        turn(explorer, step)
        parts = items(explorer, r"mass\d")
        widths = {name: place(explorer, name)[2] for name in parts}
        full = sum(widths.values())
        assert full == pytest.approx(940) and all(width > 0 for width in widths.values())
        assert widths["mass0"] / full == pytest.approx(explorer.stages[step].mass)
        probs = explorer.stages[step].probs
        for i, token in enumerate(explorer.shown_ids):
            if token in kept(explorer):
                part = place(explorer, f"after{i}")[2] / place(explorer, f"after{i}.track")[2]
                assert part == pytest.approx(float(probs[token]) / explorer.most, abs=0.003)
                assert words(explorer, f"after{i}.n") == [f"{100 * float(probs[token]):.1f} %"]
        check_places(explorer.shown)


def test_each_dropped_token_says_who_dropped_it(explorer: SamplingExplorer) -> None:
    turn(explorer, top_k=15, top_p=0.95, min_p=0.5)
    steps = [int(stage.num_kept) for stage in explorer.stages]
    assert steps[0] == 512 and steps[2] == 15 > steps[3] > steps[4], "each of them drops some"
    said = words(explorer, r"after\d+\.n")
    want = [
        f"× {name}"
        for n, name in ((4, "min-p"), (3, "top-p"))
        for _ in range(steps[n - 1] - steps[n])
    ]
    assert said[steps[4] :] == want + ["× top-k"] * (20 - 15)
    for step, dropped in ((1, 0), (2, 5), (3, 20 - steps[3])):
        turn(explorer, step)
        assert 20 - len(kept(explorer)) == dropped


def test_the_place_of_top_p_in_the_order_is_told(explorer: SamplingExplorer) -> None:
    turn(explorer, 3, top_k=30, top_p=0.8)
    first = explorer.logits.softmax(-1).sort(descending=True).values
    after = first[:30] / first[:30].sum()
    count = [int((p.cumsum(-1) - p < 0.8).sum()) for p in (after, first)]
    assert count[0] < count[1], "top-k made a difference"
    assert f"Top-p 0.8 keeps {count[0]} of the 30 tokens" in caption_of(explorer)
    assert f"before top-k it would have kept {count[1]}" in caption_of(explorer)
    turn(explorer, 4)
    assert "the reverse order of the filters would keep" in caption_of(explorer)
    both = min(30, count[1])  # the nucleus of all, then the 30 best of it
    assert f"would keep {both};" in caption_of(explorer)
    turn(explorer, 3, top_k=0)
    assert "before top-k" not in caption_of(explorer)


def test_draws_are_those_of_the_engines_sampler(explorer: SamplingExplorer) -> None:
    turn(explorer, temperature=1.5, top_k=9, seed=7)
    sampler = Sampler(SamplingParams(temperature=1.5, top_k=9, seed=7))
    want = [sampler.sample(explorer.logits).token_id for _ in range(20)]
    explorer.buttons["draw"].click()
    assert explorer.draws(4) == want
    assert words(explorer, "head2") == ["20 draws, seed 7"]
    for i, token in enumerate(explorer.shown_ids):
        count = want.count(token)
        assert words(explorer, rf"drawn{i}\.n") == ([str(count)] if count else [])
    turn(explorer, 0)  # the model's own distribution: no temperature, no filter
    plain = Sampler(SamplingParams(temperature=1.0, seed=7))
    assert explorer.draws(0) == [plain.sample(explorer.logits).token_id for _ in range(20)]
    explorer.buttons["clear"].click()
    assert explorer.draws(0) == [] and caption_of(explorer).endswith("nothing is drawn.")
    explorer._set_draws(MOST_DRAWS - 5)
    explorer.buttons["draw"].click()
    assert len(explorer.draws(0)) == MOST_DRAWS


def test_temperature_zero_is_greedy_and_skips_the_filters(explorer: SamplingExplorer) -> None:
    turn(explorer, 1, temperature=0.0, top_k=5, min_p=0.5)
    best = token_label(explorer.tokenizer, int(explorer.logits.argmax()))
    assert caption_of(explorer).startswith(f"Temperature 0 is greedy: the likeliest token, “{best}")
    assert [stage.num_kept for stage in explorer.stages] == [512, 1, 1, 1, 1]
    assert kept(explorer) == [int(explorer.logits.argmax())]
    turn(explorer, 4)
    assert "min-p is skipped" in caption_of(explorer)
    assert caption_of(explorer).endswith(f"10 draws with seed 0 gave only “{best}”.")


def test_the_model_on_a_typed_prompt(explorer: SamplingExplorer) -> None:
    turn(explorer, 0, prompt="Anna had a")
    model, ids = explorer.model, explorer.tokenizer.encode("Anna had a").ids
    p = model.compute_logits(model(Batch.from_sequences([ids]))[-1:])[0].softmax(-1)
    assert explorer.shown_ids[0] == int(p.argmax())
    assert words(explorer, r"before0\.n") == [f"{100 * float(p.max()):.1f} %"]
    assert f"has {percent(float(p.max()))}" in caption_of(explorer)


def test_equal_scores_and_tiny_vocabularies_have_stages() -> None:
    logits = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]).log()
    found = stages(logits, SamplingParams(temperature=1.0, top_p=0.8))
    assert [stage.num_kept for stage in found] == [5, 5, 5, 2, 2]
    assert math.isclose(found[-1].mass, 0.8, abs_tol=1e-6)
    assert [stage.is_off for stage in found] == [False, True, True, False, True]
