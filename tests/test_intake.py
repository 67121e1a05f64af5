"""What becomes of what callers hand in: a request that can run, or an error; never half a list."""

import re
from typing import Any

import pytest
from engines import random_model
from tokenizers import Tokenizer

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.memory import RowManager
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.intake import Intake
from tutorial_engine.engine.request import RequestStatus
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import Finish

CONFIG = random_model(num_hidden_layers=1, eos=(5,)).config  # 97 ids
MAX_LEN = 12


def intake(
    config: ModelConfig = CONFIG, tokenizer: Tokenizer | None = None, **limits: Any
) -> Intake:
    memory = RowManager.from_config(config, CacheConfig(max_seqs=2, max_len=MAX_LEN))
    clock = VirtualClock()
    clock.wait_until(3.0)
    scheduler = Scheduler(SchedulerConfig(**limits), memory, clock.now)
    return Intake(config, tokenizer, scheduler, clock)


def test_a_request_waits_with_its_prompt_and_nothing_else() -> None:
    request = intake().make([1, 2, 3])
    assert request.token_ids == [1, 2, 3] and request.num_prompt_tokens == 3
    assert request.status is RequestStatus.WAITING and request.num_computed_tokens == 0
    assert request.params == SamplingParams()


def test_making_puts_nothing_in_a_queue() -> None:
    desk = intake()
    desk.make([1, 2, 3])
    desk.make_all([[1], [2]], None)
    assert not desk.scheduler.has_unfinished


def test_text_becomes_token_ids(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    request = intake(model.config, tokenizer).make("One day")
    assert request.token_ids == tokenizer.encode("One day").ids


def test_ids_are_numbers_unless_given() -> None:
    desk = intake()
    names = [desk.make([1], request_id=name).request_id for name in (None, "mine", None)]
    assert names == ["r0", "mine", "r1"]


def test_an_id_that_is_taken_is_skipped_when_numbers_are_given() -> None:
    desk = intake()
    desk.taken = {"r0", "r2"}
    assert [desk.make([1]).request_id for _ in range(3)] == ["r1", "r3", "r4"]


@pytest.mark.parametrize("bad", ["", 7, ("a",)])
def test_an_id_that_is_no_text_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"a request_id is a text .* got {re.escape(repr(bad))}"):
        intake().make([1], request_id=bad)


def test_a_number_is_never_an_id_that_is_here_already() -> None:
    """Who gives no id cannot be told to choose another."""
    model = random_model(num_hidden_layers=1)
    engine = LLMEngine(model, config=EngineConfig(max_num_seqs=2, max_model_len=MAX_LEN))
    engine.add_request([1], request_id="r0")
    engine.add_request([2], request_id="r1")
    names = {engine.add_request([3]), engine.add_request([4])}
    assert len(names | {"r0", "r1"}) == 4


def test_its_arrival_is_now_unless_given() -> None:
    desk = intake()
    assert desk.make([1]).arrival == 3.0
    assert desk.make([1], arrival=1.5).arrival == 1.5
    assert desk.make([1], arrival=0.0).arrival == 0.0


def test_each_request_has_a_sampler_and_a_stop_checker_of_its_own() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    a, b = intake().make_all([[1], [2]], params)
    assert a.sampler is not b.sampler and a.checker is not b.checker
    assert a.params == b.params == params
    a.append(SampledToken(1), 0.0)
    assert (a.checker.num_tokens, b.checker.num_tokens) == (1, 0)


def test_a_sampler_may_be_handed_in() -> None:
    mine = Sampler(SamplingParams())
    assert intake().make([1], sampler=mine).sampler is mine


def test_the_callback_comes_along() -> None:
    told: list[Any] = []
    assert intake().make([1], on_token=told.append).on_token == told.append
    assert intake().make([1]).on_token is None


def test_the_models_end_tokens_stop_it() -> None:
    assert intake().make([1]).append(SampledToken(5), 0.0) == Finish("stop")
    ignoring = intake().make([1], SamplingParams(ignore_eos=True))
    assert ignoring.append(SampledToken(5), 0.0) is None


def test_the_end_tokens_cannot_be_sampled_before_min_tokens() -> None:
    request = intake().make([1], SamplingParams(min_tokens=1))
    assert request.sampler._enders == {5}


def test_it_ends_where_the_model_or_the_memory_does() -> None:
    request = intake().make([1] * 10, SamplingParams(max_tokens=100))
    assert request.append(SampledToken(1), 0.0) is None
    assert request.append(SampledToken(1), 0.0) == Finish("length")
    assert request.num_tokens == MAX_LEN
    short = intake(max_model_len=4).make([1, 2, 3])
    assert short.append(SampledToken(1), 0.0) == Finish("length")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt 0 is empty"),
        ("One day", "text: pass tokenizer"),
        ([1, 97], "request r0 holds 97; .* from 0 to 96"),
        ([1, -1], "request r0 holds -1;"),
        ([1] * 12, "request r0 has 12 tokens.* limited to 12"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        intake().make(prompt)


def test_errors_name_the_id_that_was_given() -> None:
    with pytest.raises(ValueError, match="request mine holds 97"):
        intake().make([97], request_id="mine")


def test_a_prompt_that_cannot_be_chunked_is_refused() -> None:
    desk = intake(max_num_batched_tokens=4, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match=r"5 tokens .* at most 4"):
        desk.make([1] * 5)
    assert desk.make([1] * 4).num_tokens == 4


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        intake().make([1], SamplingParams(stop="x"))


def test_all_prompts_get_the_same_params_or_each_its_own() -> None:
    one, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    desk = intake()
    assert [r.params for r in desk.make_all([[1], [2]], None)] == [SamplingParams()] * 2
    assert [r.params for r in desk.make_all([[1], [2]], one)] == [one, one]
    assert [r.params for r in desk.make_all([[1], [2]], [one, other])] == [one, other]


def test_requests_come_in_the_order_of_the_prompts_with_different_ids() -> None:
    requests = intake().make_all([[3], [1], [2]], None)
    assert [request.token_ids for request in requests] == [[3], [1], [2]]
    assert len({request.request_id for request in requests}) == 3


def test_a_single_text_is_one_request(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    (request,) = intake(model.config, tokenizer).make_all("One day", None)
    assert request.token_ids == tokenizer.encode("One day").ids


@pytest.mark.parametrize("count", [0, 1, 3])
def test_params_that_are_not_one_per_prompt_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"2 prompts but {count} SamplingParams"):
        intake().make_all([[1], [2]], [SamplingParams()] * count)


@pytest.mark.parametrize("bad", [[97], [1] * 12, []])
def test_one_bad_prompt_refuses_all(bad: list[int]) -> None:
    with pytest.raises(ValueError):
        intake().make_all([[1], bad, [2]], None)
    with pytest.raises(ValueError, match="no prompt given"):
        intake().make_all([], None)
