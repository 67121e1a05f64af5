"""The sampler: kept sets equal transformers', one draw per token, and rows that are no scores."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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


def theirs(warper: Any, logits: Tensor) -> Tensor:
    return warper(None, logits[None])[0]


def check_top_k(logits: Tensor, pick: Callable[[float, float], float]) -> bool:
    k = int(pick(1, len(logits) + 1))
    assert kept(top_k(logits, k)) == kept(theirs(TopKLogitsWarper(k), logits))
    return True


def check_top_p(logits: Tensor, pick: Callable[[float, float], float]) -> bool:
    p = pick(0, 1)
    if p == 0 or top_p_is_near(logits, p):
        return False
    assert kept(top_p(logits, p)) == kept(theirs(TopPLogitsWarper(p), logits))
    return True


def check_min_p(logits: Tensor, pick: Callable[[float, float], float]) -> bool:
    p = pick(0, 1) ** 4  # mostly small, as people set it
    if p == 0 or min_p_is_near(logits, p):
        return False
    assert kept(min_p(logits, p)) == kept(theirs(MinPLogitsWarper(p), logits))
    return True


def check_chain(logits: Tensor, pick: Callable[[float, float], float]) -> bool:
    t, k, p, m = pick(0.1, 2), int(pick(1, 1.5 * len(logits))), pick(0.3, 1), pick(0, 0.7) ** 4
    row = theirs(TemperatureLogitsWarper(t), logits)
    row = theirs(TopKLogitsWarper(k), row)
    if top_p_is_near(row[row > -math.inf], p):
        return False
    row = theirs(TopPLogitsWarper(p), row)
    if m == 0 or min_p_is_near(row[row > -math.inf], m):
        return False
    row = theirs(MinPLogitsWarper(m), row)
    ours = filter_logits(logits, SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m))
    assert torch.equal(ours, row)
    return True


@pytest.mark.parametrize("check", [check_top_k, check_top_p, check_min_p, check_chain])
def test_kept_set_is_that_of_transformers_in_2000_cases_each(
    check: Callable[[Tensor, Callable[[float, float], float]], bool],
) -> None:
    near = 0
    for seed in range(2000):
        generator = torch.Generator().manual_seed(seed)

        def pick(low: float, high: float, draw: torch.Generator = generator) -> float:
            return low + (high - low) * torch.rand((), generator=draw).item()

        logits = torch.randn(int(pick(2, 200)), generator=generator) * pick(0.1, 5) + pick(-9, 9)
        near += not check(logits, pick)
    assert near <= 20, "too many were near a border"


# -- the borders, and what comes in filtered ----------------------------------------------------


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


@pytest.mark.parametrize("filtered", [top_k, top_p, min_p], ids=lambda f: f.__name__)
@given(seed=st.integers(0, 10**9))
def test_dropped_entries_change_nothing_for_the_others(
    filtered: Callable[[Tensor, float], Tensor], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(30, generator=generator)
    there = torch.rand(30, generator=generator) < 0.5
    there[0] = True
    amount = 4 if filtered is top_k else 0.7
    holes = filtered(row.masked_fill(~there, -math.inf), amount)
    assert kept(holes[there]) == kept(filtered(row[there], amount))
    assert not holes.isnan().any() and kept(holes[~there]) == []
    assert torch.equal(holes[holes > -math.inf], row[holes > -math.inf])


def test_filters_work_row_by_row_on_any_shape_and_leave_their_input_alone() -> None:
    logits = torch.randn(2, 3, 20) * 2
    before = logits.clone()
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05)
    together = filter_logits(logits, params)
    for i, j in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        assert torch.equal(together[i, j], filter_logits(logits[i, j], params))
    assert torch.equal(logits, before)


def test_filters_that_are_off_drop_nothing_and_temperature_divides() -> None:
    logits = torch.randn(20, dtype=torch.bfloat16)
    out = filter_logits(logits, SamplingParams(temperature=1.0))
    assert out.dtype == torch.float32 and torch.equal(out, logits.float())
    assert apply_temperature(torch.tensor([1.0, -3.0]), 0.5).tolist() == [2.0, -6.0]
    for temperature in (0, 0.0, -1):
        named = rf"temperature {temperature}; greedy takes the argmax"
        with pytest.raises(ValueError, match=named):
            apply_temperature(torch.zeros(3), temperature)


# -- parameters ---------------------------------------------------------------------------------


def test_params_are_greedy_by_default_frozen_and_by_name_only() -> None:
    assert SamplingParams().temperature == 0
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]
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


def test_greedy_skips_filters_and_draws_nothing() -> None:
    sampler = Sampler(SamplingParams(top_k=1, top_p=0.1, min_p=1.0, seed=3, logprobs=0))
    state = sampler._generator.get_state()
    rows = torch.randn(6, 40)
    assert token_ids(sampler, rows) == rows.argmax(-1).tolist()
    assert torch.equal(sampler._generator.get_state(), state)
    assert sampler.num_sampled == 6


class Recorder(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_greedy_batch_is_one_max_without_a_softmax() -> None:
    logits = torch.randn(5, 300)
    with Recorder() as recorder:
        tokens = tokens_of(logits, [Sampler(SamplingParams()) for _ in range(5)])
    assert tokens == [SampledToken(i) for i in logits.argmax(-1).tolist()]
    assert recorder.names.count("aten.max.dim") == 1
    assert len(recorder.names) <= 6, recorder.names  # as many for five rows as for one
    assert not [n for n in recorder.names if "softmax" in n or "sort" in n or "topk" in n]


# -- drawing ------------------------------------------------------------------------------------


def test_one_draw_per_token_whatever_the_vocabulary() -> None:
    states = []
    for vocab in (3, 1000):
        sampler = Sampler(SamplingParams(temperature=1.0, top_k=2, seed=4, logprobs=1))
        token_ids(sampler, torch.randn(7, vocab))
        states.append(sampler._generator.get_state())
    plain = torch.Generator().manual_seed(4)
    for _ in range(7):
        torch.rand((), dtype=torch.float64, generator=plain)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], plain.get_state())
    rows = torch.randn(30, 50)
    seeds = (5, 5, 6, None, None)
    said = [token_ids(Sampler(SamplingParams(temperature=1.0, seed=i)), rows) for i in seeds]
    assert said[0] == said[1] and len({*map(tuple, said)}) == 4


def test_batch_is_each_request_alone() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=2, logprobs=0),
        SamplingParams(min_tokens=4, stop_token_ids=[1, 2, 3]),
    ]
    together, alone = [Sampler(p) for p in kinds], [Sampler(p) for p in kinds]
    for _ in range(10):
        logits = torch.randn(len(kinds), 12)
        rows = zip(logits, alone, strict=True)
        assert tokens_of(logits, together) == [s.sample(row) for row, s in rows]
    logits = torch.randn(len(kinds), 12)
    logits[1, 4] = math.nan  # ends this one alone
    best = best_of_each(logits)
    for row, (one, twin) in enumerate(zip(together, alone, strict=True)):
        if row == 1:
            with pytest.raises(ValueError, match="not numbers, the largest is nan"):
                next_token(one, logits, row, best[row])
        else:
            assert next_token(one, logits, row, best[row]) == twin.sample(logits[row])
    assert [s.num_sampled for s in together] == [11, 10, 11, 11, 11]


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


@pytest.mark.parametrize("temperature", [0.0, 0.5, 3.0])
def test_logprobs_are_those_of_the_model_itself(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=10, seed=0, logprobs=4)
    sampler = Sampler(params)
    ranks = set()
    for row in torch.randn(25, 30) * 2:
        token = sampler.sample(row)
        raw = row.double().log_softmax(-1)
        best = raw.topk(4)
        assert token.logprob == pytest.approx(raw[token.token_id].item(), abs=1e-5)
        assert token.rank == raw.sort(descending=True).indices.tolist().index(token.token_id) + 1
        assert [i for i, _ in token.top_logprobs] == best.indices.tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
        ranks.add(token.rank)
    assert ranks == {1} if temperature == 0 else len(ranks) > 2


def test_there_are_as_many_logprobs_as_wanted_best_first() -> None:
    row = torch.tensor([0.0, 2.0, 1.0])
    assert Sampler(SamplingParams(temperature=1.0)).sample(row)[1:] == (None, None, ())
    assert Sampler(SamplingParams(logprobs=0)).sample(row).top_logprobs == ()
    all_of_them = Sampler(SamplingParams(logprobs=99)).sample(row).top_logprobs
    assert [i for i, _ in all_of_them] == [1, 2, 0]


def test_equal_tokens_share_a_rank() -> None:
    row = torch.tensor([1.0, 4.0, 3.0, 3.0, 0.0])
    found = set()
    sampler = Sampler(SamplingParams(temperature=5.0, seed=0, logprobs=0))
    for _ in range(60):
        token = sampler.sample(row)
        found.add((token.token_id, token.rank))
    assert found == {(1, 1), (2, 2), (3, 2), (0, 4), (4, 5)}


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


def test_ignored_eos_may_be_chosen_at_any_time_and_something_must_be_left() -> None:
    ignoring = Sampler(SamplingParams(min_tokens=2, ignore_eos=True), eos_token_ids=[1])
    assert ignoring.sample(torch.tensor([0.0, 2.0])).token_id == 1
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


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_and_dtype_of_equal_logits_gives_the_same_tokens(device: str) -> None:
    rows = torch.randn(20, 500).bfloat16().float()
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=3, logprobs=2),
        SamplingParams(min_tokens=16, seed=1),
    ):
        here = token_ids(Sampler(params, [0]), rows)
        moved = rows.to(device, torch.bfloat16)  # nothing is lost: the numbers fit
        assert token_ids(Sampler(params, [0]), moved) == here
