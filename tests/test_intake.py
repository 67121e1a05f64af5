"""What becomes of what callers hand in: requests that can run, or an error with the value."""

import re
from typing import Any

import pytest
import torch
from engines import random_model
from tokenizers import Tokenizer
from tutorial_engine.engine.intake import (
    Intake,
    check_token_ids,
    params_for_each,
    prompt_token_ids,
    sample_ids,
)

from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.request import Request, RequestStatus
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import Finish

VOCAB, MAX_LEN = 97, 12


def intake(tokenizer: Tokenizer | None = None, vocab_size: int = VOCAB) -> Intake:
    def check(name: str, prompt_len: int) -> None:
        if prompt_len >= MAX_LEN:
            raise ValueError(f"{name} is too long: {prompt_len}")

    return Intake(tokenizer, vocab_size, (5,), MAX_LEN, check)


def make(prompt: Any = (1,), params: SamplingParams | None = None, **options: Any) -> Request:
    (request,) = intake().make("a", prompt, params, **options).samples
    return request


def test_a_request_waits_with_its_prompt_and_nothing_else() -> None:
    request = make([1, 2, 3])
    assert request.token_ids == [1, 2, 3] and request.num_prompt_tokens == 3
    assert request.status is RequestStatus.WAITING and request.num_computed_tokens == 0
    assert request.params == SamplingParams() and request.group.on_token is None


def test_each_sample_has_a_sampler_and_a_stop_checker_of_its_own() -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=2)
    told: list[Any] = []
    group = intake().make("a", [1], params, on_token=told.append)
    first, second = group.samples
    assert [first.request_id, second.request_id] == sample_ids("a", 2) == ["a", "a.1"]
    assert first.sampler is not second.sampler and first.checker is not second.checker
    assert [one.params for one in group.samples] == [params.sample(0), params.sample(1)]
    assert (params.sample(1).seed, params.sample(1).n) == (4, 1)
    assert SamplingParams(seed=2**64 - 1, n=2, temperature=1.0).sample(1).seed == 0
    assert SamplingParams(n=2, temperature=1.0).sample(1).seed is None
    first.append(SampledToken(1), 0.0)
    assert (first.checker.num_tokens, second.checker.num_tokens) == (1, 0)
    assert group.on_token == told.append and group.unqueued == [second]


def test_samplers_may_be_handed_in_one_for_each_sample() -> None:
    mine = Sampler(SamplingParams())
    assert make(sampler=mine).sampler is mine
    for samplers in (mine, [mine] * 3):
        many = 1 if samplers is mine else 3
        with pytest.raises(ValueError, match=f"2 continuations, but {many} samplers"):
            intake().make("a", [1], SamplingParams(n=2, temperature=1.0), sampler=samplers)


def test_the_models_end_tokens_stop_it_but_not_before_min_tokens() -> None:
    assert make().append(SampledToken(5), 0.0) == Finish("stop")
    assert make(params=SamplingParams(ignore_eos=True)).append(SampledToken(5), 0.0) is None
    assert make(params=SamplingParams(min_tokens=1)).sampler._enders == {5}


def test_it_ends_where_the_model_or_the_memory_does() -> None:
    request = make([1] * 10, SamplingParams(max_tokens=100))
    assert request.append(SampledToken(1), 0.0) is None
    assert request.append(SampledToken(1), 0.0) == Finish("length")
    assert request.num_tokens == MAX_LEN


@pytest.mark.parametrize("bad", [5, "warm", {"max_tokens": 5}, [None, 5], (5, 5)])
def test_params_of_another_kind_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"must be SamplingParams.* got"):
        params_for_each(bad, 2)
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        intake().make("a", [1], bad)
    assert params_for_each([None, SamplingParams(n=1)], 2) == [SamplingParams()] * 2


@pytest.mark.parametrize("bad", [None, 1.5, 7, b"ab", {1}, {1: 2}, iter([1]), torch.tensor(1)])
def test_one_prompt_of_another_kind_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 (must be|is the number)"):
        make(bad)


@pytest.mark.parametrize("bad", ["", 7, ("a",)])
def test_an_id_that_is_no_text_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"a request_id is a text .* got {re.escape(repr(bad))}"):
        intake().make(bad, [1])


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt 0 is empty"),
        ("One day", "text: pass tokenizer"),
        ([1, 97], "request a holds 97; .* from 0 to 96"),
        ([1, -1], "request a holds -1;"),
        ([1] * 12, "request a is too long: 12"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(prompt)


def test_errors_have_the_name_that_was_given() -> None:
    with pytest.raises(ValueError, match="prompt 7 holds 97"):
        make([97], name="prompt 7")
    with pytest.raises(ValueError, match="need a tokenizer"):
        make(params=SamplingParams(stop="x"))


# -- ids that the engine gives --------------------------------------------------------------------


def engine() -> LLMEngine:
    model = random_model(num_hidden_layers=1)
    return LLMEngine(model, config=EngineConfig(max_num_seqs=2, max_model_len=MAX_LEN))


def test_ids_are_numbers_unless_given_and_never_one_that_is_here() -> None:
    """Who gives no id cannot be told to choose another."""
    made = engine()
    for name in ("r0", "r2"):
        made.add_request([1], request_id=name)
    assert [made.add_request([3]) for _ in range(3)] == ["r1", "r3", "r4"]


def test_the_arrival_is_now_unless_given() -> None:
    made = engine()
    made.clock.now = lambda: 3.0  # type: ignore[method-assign]
    for arrival, want in ((None, 3.0), (1.5, 1.5), (0.0, 0.0)):
        assert made.requests[made.add_request([1], arrival=arrival)].arrival == want


@pytest.mark.parametrize("bad", [[97], [1] * 12, []])
def test_one_bad_prompt_refuses_all(bad: list[int]) -> None:
    made = engine()
    with pytest.raises(ValueError, match="prompt 1 "):
        made.generate([[1], bad, [2]])
    assert not made.requests and not made.has_unfinished_requests


# -- prompts and params ---------------------------------------------------------------------------


def test_all_prompts_get_the_same_params_or_each_its_own() -> None:
    one, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert params_for_each(None, 2) == [SamplingParams()] * 2
    assert params_for_each(one, 2) == [one, one]
    assert params_for_each((one, other), 2) == [one, other]
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"2 prompts but {count} SamplingParams"):
            params_for_each([one] * count, 2)


def test_texts_and_ids_may_be_mixed_and_are_copied(tokenizer: Tokenizer) -> None:
    ids, mine = tokenizer.encode("One day").ids, [5]
    assert prompt_token_ids("One day", tokenizer) == [ids]
    got = prompt_token_ids(["One day", (3, 4), mine, range(2)], tokenizer)
    assert got == [ids, [3, 4], [5], [0, 1]]
    got[2].append(3)
    assert mine == [5] and prompt_token_ids([[1, 2], [3]], None) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "no prompt given"),
        ((), "no prompt given"),
        (None, "no prompt given"),
        ([[1], ""], "prompt 1 is empty"),
        ([[1], ()], "prompt 1 is empty"),
        ([7, 8], r"prompt 0 is the number 7: pass a list of token id"),
        (7, r"prompts are a text, or a list .* got 7 \(int\)"),
        (1.5, r"got 1.5 \(float\)"),
        (b"One day", r"got b'One day' \(bytes\)"),
        (iter(["One day"]), "iterator"),
        ((text for text in ["One day"]), "generator"),
        ({"One day"}, r"got {'One day'} \(set\)"),
        ({"One day": 1}, r"\(dict\)"),
        (torch.tensor(3), r"got tensor\(3\) \(Tensor\); of a tensor: .tolist"),
        (torch.tensor([3, 4]), r"of a tensor: .tolist"),
        ([None], r"prompt 0 must be a text or a list of ids, got None"),
        ([[1], 1.5], r"prompt 1 must be .* got 1.5 \(float\)"),
        ([b"One day"], r"prompt 0 must be .* \(bytes\)"),
        ([bytearray(b"One day")], r"\(bytearray\)"),
        ([{1, 2}], r"got {1, 2} \(set\)"),
        ([{1: 2}], r"\(dict\)"),
        ([iter([1, 2])], "iterator"),
        ([torch.tensor(3)], r"got tensor\(3\) .*tolist"),
        ([torch.tensor([3, 4])], r"of a tensor: .tolist"),
        (["One day", "a\ud800b"], r"prompt 1 holds '.ud800' at character 1.*half of a character"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_number(
    prompts: Any, says: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=says):
        prompt_token_ids(prompts, tokenizer)
    with pytest.raises(ValueError, match="prompt 1 is text: pass tokenizer"):
        prompt_token_ids([[1], "One day"], None)


@pytest.mark.parametrize("bad", [-1, 10, 10**9, 1.0, True, None, "3"])
def test_an_id_that_is_none_of_the_vocabulary_is_refused(bad: Any) -> None:
    check_token_ids("it", [0, 9], vocab_size=10)
    with pytest.raises(ValueError) as error:
        check_token_ids("the prompt of request r7", [0, 9, bad, -5], vocab_size=10)
    assert str(error.value).startswith(f"the prompt of request r7 holds {bad!r};")
    assert "from 0 to 9" in str(error.value)
