"""A request on its way: what may follow what, and what it knows of itself."""

from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from tutorial_engine.engine.request import (
    TRANSITIONS,
    Request,
    RequestOutput,
    RequestStatus,
    SampleGroup,
    ScheduledRequest,
)
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken
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
    checker = StopChecker(params, [0], tokenizer)
    return Request("a", [5, 6], params, checker=checker, arrival=1.0)


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
    prompt = [1, 2]
    requests = [Request(name, prompt) for name in "ab"]
    assert requests[0].sampler is not requests[1].sampler
    assert requests[0].checker is not requests[1].checker
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


def end(request: Request, now: float = 9.0) -> RequestOutput:
    request.status = RUNNING
    assert request.checker.finish is not None
    request.end(FINISHED, request.checker.finish, now)
    return SampleGroup([request]).output()


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
    request = Request("a", [5], params, checker=StopChecker(params, [0], tokenizer))
    request.append(SampledToken(8), 1.0)
    assert request.append(SampledToken(9), 2.0) == Finish("stop", 9)
    (completion,) = end(request).outputs
    assert completion.token_ids == (8, 9) and completion.text == tokenizer.decode([8])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 9)
    assert completion.cumulative_logprob is None


def test_there_is_no_output_before_the_end() -> None:
    request = make()
    assert not request.group.is_over and request.group.samples == (request,)
    with pytest.raises(ValueError, match="request a is waiting: run it to its end"):
        request.completion()


def test_an_end_from_outside_lets_the_text_out_that_was_held_back(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["never said"])
    request = Request("a", [5], params, checker=StopChecker(params, tokenizer=tokenizer))
    ids = tokenizer.encode(" red kite").ids[:2]
    for token_id in ids:
        request.append(SampledToken(token_id), 1.0)
    assert request.checker.take_text() == ""
    request.end(ABORTED, Finish("abort"), 2.0)
    (completion,) = request.group.output().outputs
    assert completion.text == request.checker.take_text() == tokenizer.decode(ids)
    assert (completion.finish_reason, request.finished, request.error) == ("abort", 2.0, None)
    with pytest.raises(ValueError, match="a is aborted and cannot become error"):
        request.end(ERROR, Finish("error"), 3.0, "no")
    assert (request.finished, request.error) == (2.0, None)


def test_the_output_of_several_samples_has_the_last_ones_end_and_the_first_error() -> None:
    first, second = make(max_tokens=1), make(max_tokens=1)
    group = SampleGroup([first, second])
    assert first.group is second.group is group and group.samples == (first, second)
    assert group.unqueued == [second] and group.request_id == "a"
    for request in (first, second):
        request.append(SampledToken(7), 4.0)
    first.status = RUNNING
    first.end(FINISHED, Finish("length"), 5.0)
    assert not group.is_over and not second.is_over
    second.end(ERROR, Finish("error"), 9.0, "no")
    output = group.output()
    assert [one.index for one in output.outputs] == [0, 1] and output.error == "no"
    assert output.metrics == first.metrics._replace(finished=9.0)


def test_an_output_cannot_be_changed() -> None:
    request = make(max_tokens=1)
    request.append(SampledToken(7), 4.0)
    output = end(request)
    with pytest.raises(AttributeError):
        output.error = "no"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        output.outputs[0].text = "no"  # type: ignore[misc]


# -- what a step runs of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "num_tokens", "outputs", "token_ids", "yields"),
    [
        (0, 6, 0, [10, 11, 12, 13, 14, 15], True),  # a whole prompt
        (0, 4, 0, [10, 11, 12, 13], False),  # its beginning
        (2, 3, 0, [12, 13, 14], False),  # its middle
        (5, 1, 0, [15], True),  # its end
        (7, 1, 2, [51], True),  # a decode
        (0, 8, 2, [10, 11, 12, 13, 14, 15, 50, 51], True),  # resumed, all again
        (0, 6, 2, [10, 11, 12, 13, 14, 15], False),  # resumed, its prompt only
    ],
)
def test_what_reaches_the_newest_token_yields_one(
    first: int, num_tokens: int, outputs: int, token_ids: list[int], yields: bool
) -> None:
    request = Request("a", range(10, 16))
    for i in range(outputs):
        request.append(SampledToken(50 + i), 0.0)
    end = first + num_tokens
    one = ScheduledRequest(request, num_tokens, Allocation(first, range(first, end), slice(0, end)))
    assert one.token_ids == token_ids and one.yields_token is yields
