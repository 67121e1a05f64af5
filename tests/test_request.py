"""A request on its way: what may follow what, and what it knows of itself."""

from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from tutorial_engine.engine.request import TRANSITIONS, Request, RequestOutput, RequestStatus
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import Finish, StopChecker

WAITING, RUNNING, PREEMPTED = (
    RequestStatus.WAITING,
    RequestStatus.RUNNING,
    RequestStatus.PREEMPTED,
)
FINISHED, ABORTED, ERROR = RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.ERROR

# Written down once more, by hand: the code's own table must say the same.
LEGAL = {
    (WAITING, RUNNING),
    (WAITING, ABORTED),
    (WAITING, ERROR),
    (RUNNING, PREEMPTED),
    (RUNNING, FINISHED),
    (RUNNING, ABORTED),
    (RUNNING, ERROR),
    (PREEMPTED, RUNNING),
    (PREEMPTED, ABORTED),
    (PREEMPTED, ERROR),
}
WAY_TO = {  # a walk from the start to each status
    WAITING: [],
    RUNNING: [RUNNING],
    PREEMPTED: [RUNNING, PREEMPTED],
    FINISHED: [RUNNING, FINISHED],
    ABORTED: [ABORTED],
    ERROR: [RUNNING, ERROR],
}


def make(
    max_tokens: int = 3, tokenizer: Tokenizer | None = None, logprobs: int | None = None
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
    return Request("a", [5, 6], Sampler(params), StopChecker(params, [0], tokenizer), arrival=1.0)


def at(status: RequestStatus) -> Request:
    request = make()
    for step in WAY_TO[status]:
        request.status = step
    assert request.status is status
    return request


def test_the_table_of_transitions_is_about_every_status() -> None:
    assert TRANSITIONS.keys() == set(RequestStatus)
    assert {(a, b) for a, after in TRANSITIONS.items() for b in after} == LEGAL


@pytest.mark.parametrize("start", RequestStatus)
@pytest.mark.parametrize("to", RequestStatus)
def test_every_transition_is_walked_or_refused(start: RequestStatus, to: RequestStatus) -> None:
    request = at(start)
    if (start, to) in LEGAL:
        request.status = to
        assert request.status is to
        return
    before = dict(vars(request))
    with pytest.raises(ValueError, match=f"a is {start.value} and cannot become {to.value}"):
        request.status = to
    assert vars(request) == before


def test_a_request_may_be_preempted_and_resumed_again_and_again() -> None:
    request = make()
    for _, status in pairwise([WAITING, RUNNING, PREEMPTED, RUNNING, PREEMPTED, RUNNING]):
        request.status = status
    request.status = FINISHED


@pytest.mark.parametrize("status", RequestStatus)
def test_what_is_over_has_no_way_out(status: RequestStatus) -> None:
    assert at(status).is_over == (status in {FINISHED, ABORTED, ERROR})
    assert at(status).is_over == (not any(a is status for a, _ in LEGAL))


def test_prompt_and_output_are_one_sequence() -> None:
    request = make()
    assert (request.num_prompt_tokens, request.num_tokens, request.num_new_tokens) == (2, 2, 2)
    assert request.output_token_ids == ()
    request.num_computed_tokens = 2
    request.append(SampledToken(9), 4.0)
    assert request.token_ids == [5, 6, 9] and request.output_token_ids == (9,)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_new_tokens) == (2, 3, 1)


def test_a_request_has_its_own_copy_of_the_prompt() -> None:
    params = SamplingParams()
    prompt = [1, 2]
    requests = [Request(n, prompt, Sampler(params), StopChecker(params)) for n in "ab"]
    requests[0].append(SampledToken(3), 0.0)
    assert prompt == requests[1].token_ids == [1, 2]
    assert requests[1].tokens == [] and requests[1].token_times == []


def test_append_says_why_a_token_was_the_last_one() -> None:
    request = make(max_tokens=2)
    assert request.append(SampledToken(7), 4.0) is None
    assert request.append(SampledToken(8), 5.0) == Finish("length")
    assert request.token_times == [4.0, 5.0]
    assert make().append(SampledToken(0), 4.0) == Finish("stop")


def test_a_token_that_is_refused_is_not_appended() -> None:
    request = make(max_tokens=1)
    request.append(SampledToken(7), 4.0)
    with pytest.raises(ValueError, match="after the end"):
        request.append(SampledToken(8), 5.0)
    assert request.token_ids == [5, 6, 7]
    assert request.tokens == [SampledToken(7)] and request.token_times == [4.0]


def test_its_times_are_its_metrics() -> None:
    request = make()
    assert request.metrics == (1.0, None, (), None)
    request.first_scheduled = 2.0
    request.append(SampledToken(7), 4.0)
    request.finished = 6.0
    assert request.metrics == (1.0, 2.0, (4.0,), 6.0)


def end(request: Request) -> RequestOutput:
    request.finish = request.checker.finish
    request.finished = 9.0
    for status in (RequestStatus.RUNNING, RequestStatus.FINISHED):
        request.status = status
    output = request.output()
    assert output is not None
    return output


def test_the_output_has_all_of_it(tokenizer: Tokenizer) -> None:
    request = make(max_tokens=2, tokenizer=tokenizer, logprobs=1)
    tokens = [SampledToken(i, -0.5, 1) for i in tokenizer.encode(" red kite").ids[:2]]
    for token in tokens:
        request.append(token, 4.0)
    output = end(request)
    (completion,) = output.outputs
    assert (output.request_id, output.prompt_token_ids, output.error) == ("a", (5, 6), None)
    assert output.metrics == request.metrics
    ids = tuple(token.token_id for token in tokens)
    assert completion.token_ids == ids and completion.tokens == tuple(tokens)
    assert completion.text == tokenizer.decode(list(ids)) != ""
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.cumulative_logprob == -1.0


def test_the_stop_token_is_in_the_ids_and_not_in_the_text(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop_token_ids=[9])
    request = Request("a", [5], Sampler(params), StopChecker(params, [0], tokenizer))
    request.append(SampledToken(8), 1.0)
    assert request.append(SampledToken(9), 2.0) == Finish("stop", 9)
    (completion,) = end(request).outputs
    assert completion.token_ids == (8, 9) and completion.text == tokenizer.decode([8])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 9)
    assert completion.cumulative_logprob is None


def test_there_is_no_output_before_the_end() -> None:
    assert make().output() is None


def test_the_output_of_several_samples_comes_when_all_are_over() -> None:
    first, second = make(max_tokens=1), make(max_tokens=1)
    assert first.samples == (first,) and Request.join([first, second]) is first
    assert first.samples == second.samples == (first, second)
    assert first.held == (second,) and second.held == ()
    for request in (first, second):
        request.append(SampledToken(7), 4.0)
    for status in (RequestStatus.RUNNING, RequestStatus.FINISHED):
        first.status = status
    assert first.output() is None
    first.finish = first.checker.finish
    first.finished = 5.0
    output = end(second)
    assert [one.index for one in output.outputs] == [0, 1]
    assert output.metrics == first.metrics._replace(finished=9.0)


def test_an_output_cannot_be_changed() -> None:
    request = make(max_tokens=1)
    request.append(SampledToken(7), 4.0)
    output = end(request)
    with pytest.raises(AttributeError):
        output.error = "no"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        output.outputs[0].text = "no"  # type: ignore[misc]
