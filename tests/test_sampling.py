"""The sampler: kept sets equal transformers', one draw per token, and rows that are no scores."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tutorial_engine.engine.request import Request
from tutorial_engine.sampling.sampler import (
    SampledToken,
    Sampler,
    SamplingParams,
    apply_temperature,
    best_of_each,
    filter_logits,
    min_p,
    next_token,
    top_k,
    top_p,
)
from tutorial_engine.sampling.stopping import StopChecker

NEAR = 1e-6  # closer to a limit than this, rounding decides; see the pinned cases


def kept(logits: Tensor) -> list[int]:
    return (logits > -math.inf).nonzero()[:, -1].tolist()


def logits_of(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log().float()


def token_ids(sampler: Sampler, rows: Tensor) -> list[int]:
    return [sampler.sample(row).token_id for row in rows]


def tokens_of(logits: Tensor, samplers: list[Sampler]) -> list[SampledToken]:
    """The next token of each, as the loop and the engine ask for them."""
    rows = zip(samplers, best_of_each(logits), strict=True)
    return [next_token(sampler, logits, row, best) for row, (sampler, best) in enumerate(rows)]


# -- against transformers -----------------------------------------------------------------------


def top_p_is_near(logits: Tensor, p: float) -> bool:
    """Does a sum of the best probabilities [V] come as close to p as rounding does?"""
    ranked = logits.double().softmax(-1).sort(descending=True).values
    sums = ranked.cumsum(-1)[:-1]
    border = int((sums < p - NEAR).sum())  # the first that is dropped, unless it ties
    tie = border + 1 < len(ranked) and bool((ranked[border] - ranked[border + 1]).abs() < 1e-12)
    return tie or bool(((sums - p).abs() < NEAR).any())


def min_p_is_near(logits: Tensor, p: float) -> bool:
    """Is a probability [V] as close to p times the best, relatively, as rounding is?"""
    probs = logits.double().softmax(-1)
    return bool(((probs / (p * probs.max()) - 1).abs() < 2 * NEAR).any())


WARPERS: dict[str, tuple[Any, Callable[[Tensor, float], bool]]] = {
    "temperature": (TemperatureLogitsWarper, lambda logits, amount: False),
    "top_k": (TopKLogitsWarper, lambda logits, amount: False),
    "top_p": (TopPLogitsWarper, top_p_is_near),
    "min_p": (MinPLogitsWarper, min_p_is_near),
}


def warped(logits: Tensor, asked: dict[str, float]) -> Tensor | None:
    """What transformers makes of logits [V]; None where rounding would decide."""
    for name, amount in asked.items():
        warper, is_near = WARPERS[name]
        if is_near(logits[logits > -math.inf], amount):
            return None
        logits = warper(amount)(None, logits[None])[0]
    return logits


def test_kept_set_is_that_of_transformers_in_4000_cases() -> None:
    num_near = 0
    for seed in range(4000):
        draw = random.Random(seed)
        size = draw.randint(2, 200)
        logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        logits = logits * draw.uniform(0.1, 5) + draw.uniform(-9, 9)
        asked: dict[str, Any] = {
            "temperature": draw.uniform(0.1, 2),
            "top_k": draw.randint(1, size + size // 2),
            "top_p": draw.uniform(0.01, 1),
            "min_p": draw.uniform(0.01, 1) ** 4,  # mostly small, as people set it
        }
        if seed % 2:  # one of the filters alone
            only = draw.choice(["top_k", "top_p", "min_p"])
            asked = {"temperature": 1.0, only: asked[only]}
        want = warped(logits, asked)
        num_near += want is None
        got = filter_logits(logits, SamplingParams(**asked))
        assert want is None or torch.equal(got, want), asked
    assert num_near <= 40, "too many were near a border"


# -- the borders, by hand -----------------------------------------------------------------------


HALVES, TWINS = (0.5, 0.3, 0.1, 0.05, 0.05), (0.1, 0.2, 0.4, 0.2, 0.1)
TIED = (0.1, 0.35, 0.2, 0.15, 0.2)  # two share the second place
BORDERS: list[tuple[Callable[[Tensor, float], Tensor], tuple[float, ...], dict[float, str]]] = [
    # dropped when better ones hold exactly p; equal ones stay or go together
    (top_p, HALVES, {0.8: "01", 0.81: "012", 0.5: "0", 0.51: "01", 1e-9: "0", 1: "01234"}),
    (top_p, TWINS, {0.4: "2", 0.5: "123", 0.8: "123", 0.81: "01234"}),
    # ties with the last one stay; below 1 and above V it is off
    (top_k, TIED, {1: "1", 2: "124", 3: "124", 4: "1234", 5: "01234", 9: "01234", 0: "01234"}),
    # exactly at the limit stays
    (
        min_p,
        (0.5, 0.3, 0.05, 0.005, 1e-9),
        {0.1: "012", 0.1001: "01", 0.6: "01", 0.61: "0", 1: "0"},
    ),
]


@pytest.mark.parametrize("shift", [0.0, 7.3, -11.1])
def test_borders_of_the_filters_by_hand(shift: float) -> None:
    for filtered, probs, cases in BORDERS:
        for amount, stay in cases.items():
            left = kept(filtered(logits_of(*probs) + shift, amount))
            assert left == [int(i) for i in stay], (filtered.__name__, amount)


def test_filters_work_row_by_row_on_any_shape_and_leave_their_input_alone() -> None:
    logits = torch.randn(2, 3, 20) * 2
    before = logits.clone()
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05)
    together = filter_logits(logits, params)
    for i, j in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        assert torch.equal(together[i, j], filter_logits(logits[i, j], params))
    assert torch.equal(logits, before)


def test_temperature_divides_and_0_is_refused() -> None:
    assert apply_temperature(torch.tensor([1.0, -3.0]), 0.5).tolist() == [2.0, -6.0]
    with pytest.raises(ValueError, match=r"temperature 0; greedy takes the argmax"):
        apply_temperature(torch.zeros(3), 0)


# -- parameters ---------------------------------------------------------------------------------


def test_stops_are_tuples_afterwards() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4)) and hash(params)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", -0.1, "temperature must be from 0 .* got -0.1"),
        ("temperature", 1e-9, "temperature 1e-09 overflows fp32; for greedy use 0"),
        ("temperature", True, "temperature must be a number .* got True"),
        ("top_k", 2.0, "top_k must be a whole number .* got 2.0"),
        ("top_p", 0, "for greedy use temperature=0"),
        ("top_p", 1.1, "top_p must be from 0 to 1 .* got 1.1"),
        ("min_p", -0.1, "min_p must be from 0 to 1 .* got -0.1"),
        ("seed", 1.5, "seed must be a whole number .* got 1.5"),
        ("max_tokens", 0, "max_tokens must be from 1 .* got 0"),
        ("min_tokens", 17, "min_tokens 17 is over max_tokens 16"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("stop", ["a", ""], r"not empty, got \['a', ''\]"),
        ("stop", 3, "stop must be strings .* got 3"),
        ("stop", "a\ufffd", "holds U[+]FFFD"),
        ("stop_token_ids", [-1], r"stop_token_ids .* got \[-1\]"),
        ("logprobs", -1, "logprobs must be from 0 .* got -1"),
    ],
)
def test_params_that_mean_nothing_are_refused(field: str, value: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


# -- greedy -------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        row = torch.zeros(1000, dtype=dtype)
        row[[613, 77, 900]] = 2.5
        assert Sampler(SamplingParams()).sample(row).token_id == 77
        with_logprobs = Sampler(SamplingParams(logprobs=2)).sample(row)  # not the fast path
        assert [i for i, _ in with_logprobs.top_logprobs] == [with_logprobs.token_id, 613]


# -- drawing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "num_draws"), [(1.0, 7), (0.0, 0)])
@pytest.mark.parametrize("vocab_size", [3, 1000])
def test_one_draw_per_token_and_none_for_greedy(
    temperature: float, num_draws: int, vocab_size: int
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=2, seed=4, logprobs=1))
    token_ids(sampler, torch.randn(7, vocab_size))
    plain = torch.Generator().manual_seed(4)
    for _ in range(num_draws):
        torch.rand((), dtype=torch.float64, generator=plain)
    assert torch.equal(sampler._generator.get_state(), plain.get_state())


def test_batch_is_each_request_alone() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=2, logprobs=0),
        SamplingParams(min_tokens=4, stop_token_ids=[1, 2, 3]),
    ]
    together, alone = [Sampler(p) for p in kinds], [Sampler(p) for p in kinds]
    assert [s.takes_best for s in together] == [True, False, False, False, False]
    for _ in range(10):
        logits = torch.randn(len(kinds), 12)
        rows = zip(logits, alone, strict=True)
        assert tokens_of(logits, together) == [s.sample(row) for row, s in rows]
    assert [s.num_sampled for s in together] == [10] * len(kinds)
    assert together[4].takes_best, "its min_tokens are there: one max for all is enough again"


def test_draws_follow_the_filtered_softmax() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, seed=0)
    row = torch.tensor([0.5, -1.0, 1.2, 0.0, 0.9, -0.3, -4.0])
    expected = filter_logits(row, params).double().softmax(-1) * 8000
    sampler = Sampler(params)
    counts = torch.bincount(torch.tensor(token_ids(sampler, row.expand(8000, -1))), minlength=7)
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    chi_square = ((counts - expected)[there] ** 2 / expected[there]).sum()
    assert int(there.sum()) == 5 and chi_square < 18.5  # 4 degrees of freedom: 1 in 1000 is above


@pytest.mark.parametrize(("u", "token_id"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_any_draw_lands_on_a_token_that_is_kept(
    u: float, token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(u, dtype=torch.float64))
    row = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert Sampler(SamplingParams(temperature=1.0)).sample(row).token_id == token_id


# -- logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_best", [0, 4, 99])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_logprobs_are_those_of_the_model_itself(temperature: float, num_best: int) -> None:
    """Where tokens are equal, they share a rank."""
    params = SamplingParams(temperature=temperature, top_k=10, seed=0, logprobs=num_best)
    sampler, ranks = Sampler(params), set()
    for row in (torch.randn(25, 30) * 4).round():
        token = sampler.sample(row)
        raw = row.double().log_softmax(-1)
        best, ids = raw.sort(descending=True, stable=True)
        assert token.logprob == pytest.approx(raw[token.token_id].item(), abs=1e-5)
        assert token.rank == 1 + (row > row[token.token_id]).sum()
        assert [i for i, _ in token.top_logprobs] == ids[:num_best].tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(
            best[:num_best].tolist(), abs=1e-5
        )
        ranks.add(token.rank)
    assert ranks == {1} if temperature == 0 else len(ranks) > 2
    assert Sampler(replace(params, logprobs=None)).sample(row)[1:] == (None, None, ())


# -- min_tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_and_stop_ids_wait_for_min_tokens(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=0, min_tokens=2, stop_token_ids=[3, 999], logprobs=1
    )
    sampler = Sampler(params, eos_token_ids=[0])
    row = torch.tensor([60.0, 1.0, 20.0, 40.0, 0.0])
    tokens = [sampler.sample(row) for _ in range(4)]
    assert [t.token_id for t in tokens] == [2, 2, 0, 0]
    assert tokens[0].top_logprobs[0][0] == 0 and tokens[0].rank == 3  # raw: the mask does not show
    assert tokens[0].logprob == pytest.approx(row.log_softmax(-1)[2].item())


def test_ignored_eos_waits_for_min_tokens_too_and_something_must_be_left() -> None:
    """As in vLLM, for each of several ends of text; of equal ones the lowest id that is left."""
    ignoring = Sampler(SamplingParams(min_tokens=2, ignore_eos=True), eos_token_ids=[1, 0])
    row = torch.tensor([2.0, 2.0, 1.0, 1.0])
    assert [ignoring.takes_best, ignoring.sample(row).token_id] == [False, 2]
    assert [ignoring.takes_best, ignoring.sample(row).token_id] == [False, 2]
    assert [ignoring.takes_best, ignoring.sample(row).token_id] == [True, 0]
    sampler = Sampler(SamplingParams(min_tokens=1, stop_token_ids=[0]), eos_token_ids=[1])
    for row in ([0.0, 2.0], [0.0, 2.0, -math.inf]):
        with pytest.raises(ValueError, match="min_tokens=1 masks every possible token"):
            sampler.sample(torch.tensor(row))
    assert sampler.num_sampled == 0


# -- rows that are no scores --------------------------------------------------------------------

BAD = {
    "one NaN": [0.0, math.nan, 1.0],
    "NaN at the end": [9.0, 0.0, math.nan],
    "plus infinity": [0.0, 1.0, math.inf],
    "all minus infinity": [-math.inf] * 3,
    "all NaN": [math.nan] * 3,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_row_is_refused_and_the_next_call_works(bad: list[float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, logprobs=1, min_tokens=3)
    sampler, twin = Sampler(params, [0]), Sampler(params, [0])
    for row in torch.randn(6, 30):
        with pytest.raises(ValueError, match=r"these logits are not numbers.*look at"):
            sampler.sample(torch.tensor(bad))
        assert sampler.sample(row) == twin.sample(row)
    assert sampler.num_sampled == 6


def test_scores_that_overflow_or_are_all_filtered_out_are_refused() -> None:
    params = SamplingParams(temperature=0.1, seed=0)
    sampler, twin = Sampler(params), Sampler(params)
    with pytest.raises(ValueError, match=r"overflow fp32 when divided by temperature 0\.1"):
        sampler.sample(torch.tensor([3e38, 0.0]))
    sampler.filters = (lambda logits, p: torch.full_like(logits, -math.inf),)
    sampler.filters[0].__name__ = "top_p"
    with pytest.raises(ValueError, match="no token is left after the filters top_p"):
        sampler.sample(torch.tensor([3.0, 0.0]))
    sampler.filters = twin.filters
    rows = torch.randn(5, 50)
    assert token_ids(sampler, rows) == token_ids(twin, rows)


def test_what_a_row_or_a_filter_cannot_be_is_named() -> None:
    for shape in ((), (2, 3), (1, 3), (0,)):
        with pytest.raises(ValueError, match=r"V\], got"):
            Sampler(SamplingParams()).sample(torch.zeros(shape))
    for gives in (lambda logits, p: None, lambda logits, p: logits[:3]):
        gives.__name__ = "top_p"
        with pytest.raises(ValueError, match=r"filter top_p gave .*logits \[97\] are wanted"):
            filter_logits(torch.zeros(97), SamplingParams(temperature=1.0), [gives])
    for made in (Sampler, StopChecker, lambda params: Request("a", [1], params)):
        with pytest.raises(ValueError, match=r"params must be SamplingParams\(.* got"):
            made({"max_tokens": 5})
