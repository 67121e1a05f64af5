"""Each result reaches its owner once, and a callback that raises harms nobody else."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer
from tutorial_engine.engine.delivery import Inbox, Update

from tutorial_engine.engine.request import Request, RequestStatus, SampleGroup, StepOutput
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken
from tutorial_engine.sampling.stopping import Finish, StopChecker


class Desk:
    """An inbox, and as much of a scheduler as it needs: tokens come, requests end."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []
        self.inbox = Inbox(self.fail)

    def fail(self, request: Request, fault: Exception) -> Update:
        self.failed.append((request.request_id, str(fault)))
        error = f"{type(fault).__name__}: {fault}"
        request.end(RequestStatus.ERROR, Finish("error"), 0.0, error)
        return Update(request, None)

    def tokens(self, *tokens: tuple[Request, int]) -> None:
        """A step: one token more for each, and the end when it is the last; delivered together."""
        updates = []
        for request, token_id in tokens:
            token = SampledToken(token_id)
            finish = request.append(token, 0.0)
            if finish is not None:
                request.end(RequestStatus.FINISHED, finish, 0.0)
            updates.append(Update(request, token))
        self.inbox.deliver(updates)

    def abort(self, request: Request) -> None:
        request.end(RequestStatus.ABORTED, Finish("abort"), 0.0)
        self.inbox.deliver([Update(request, None)])


def make(
    name: str,
    max_tokens: int = 2,
    on_token: Callable[[StepOutput], None] | None = None,
    owner: object = None,
) -> Request:
    request = Request(name, [1], SamplingParams(max_tokens=max_tokens))
    request.status = RequestStatus.RUNNING
    request.group = SampleGroup([request], on_token)
    request.group.owner = owner
    return request


def brief(results: list[StepOutput]) -> list[tuple[str, int | None, str | None]]:
    """Id, token and finish reason of each."""
    return [
        (r.request_id, r.token and r.token.token_id, r.finish and r.finish.reason) for r in results
    ]


def test_each_result_is_taken_once_in_the_order_of_coming() -> None:
    desk, a, b = Desk(), make("a"), make("b", max_tokens=1)
    assert not desk.inbox.is_pending and desk.inbox.take() == []
    desk.tokens((a, 7), (b, 8))
    assert desk.inbox.is_pending
    taken = desk.inbox.take()
    assert brief(taken) == [("a", 7, None), ("b", 8, "length")]
    assert not desk.inbox.is_pending and desk.inbox.take() == []
    desk.tokens((a, 9))
    assert brief(desk.inbox.take()) == [("a", 9, "length")]
    assert brief(taken)[0] == ("a", 7, None), "what was taken does not change any more"


def test_the_output_comes_with_the_last_result_only_also_without_a_token() -> None:
    desk, a, b = Desk(), make("a"), make("b")
    desk.tokens((a, 7), (b, 7))
    desk.tokens((a, 8))
    desk.abort(b)
    live, _, last, aborted = desk.inbox.take()
    assert live.output is None and live.finish is None
    assert last.output == a.group.output() and last.finish == Finish("length")
    assert last.output.outputs[0].token_ids == (7, 8)
    assert brief([aborted]) == [("b", None, "abort")] and aborted.output == b.group.output()


def test_the_output_of_several_samples_comes_with_the_last_of_all() -> None:
    desk, first, second = Desk(), make("a"), make("a.1")
    group = SampleGroup([first, second])
    desk.tokens((second, 7), (first, 7))
    desk.tokens((second, 8), (first, 8))
    results = desk.inbox.take()
    assert [(r.request_id, r.sample) for r in results] == [("a", 1), ("a", 0)] * 2
    assert [r.output for r in results] == [None, None, None, group.output()]


def test_owners_get_their_own_and_whoever_steps_the_rest() -> None:
    mine, yours = object(), object()
    desk = Desk()
    a, b, c, d = make("a", owner=mine), make("b"), make("c", owner=yours), make("d", owner=mine)
    desk.tokens((a, 7), (b, 7), (c, 7), (d, 8))
    assert brief(desk.inbox.take(mine)) == [("a", 7, None), ("d", 8, None)]
    assert desk.inbox.is_pending and brief(desk.inbox.take()) == [("b", 7, None)]
    assert not desk.inbox.is_pending, "what is an owner's waits for nobody else"
    assert desk.inbox.take(mine) == [] and brief(desk.inbox.take(yours)) == [("c", 7, None)]


def test_what_is_dropped_is_gone_and_only_that() -> None:
    desk, a, b = Desk(), make("a"), make("b")
    desk.tokens((a, 7), (b, 7))
    desk.inbox.drop(a.group)
    desk.tokens((a, 8))
    assert brief(desk.inbox.take()) == [("b", 7, None), ("a", 8, "length")]


def test_texts_put_together_are_the_text(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=6, stop=["never said"])  # holds characters back
    a = Request("a", [1], params, checker=StopChecker(params, tokenizer=tokenizer))
    a.status, desk = RequestStatus.RUNNING, Desk()
    ids = tokenizer.encode("One day Anna found a big box").ids[:6]
    for token_id in ids:
        desk.tokens((a, token_id))
    results = desk.inbox.take()
    assert results[0].text == "" and results[-1].output is not None
    text = results[-1].output.outputs[0].text
    assert "".join(result.text for result in results) == text == tokenizer.decode(ids)


# -- callbacks ------------------------------------------------------------------------------------


def test_a_callback_is_told_what_the_inbox_has_already() -> None:
    told: list[StepOutput] = []
    seen: list[StepOutput] = []

    def callback(result: StepOutput) -> None:
        told.append(result)
        seen.extend(desk.inbox.take())

    desk, a, b = Desk(), make("a", on_token=callback), make("b", on_token=callback)
    desk.tokens((a, 7), (b, 7))
    assert brief(seen) == [("a", 7, None), ("b", 7, None)], "the whole step, at the first call"
    desk.tokens((a, 8), (b, 8))
    assert told == seen and len(told) == 4


class Broken:
    """A callback that raises from the n-th call on."""

    def __init__(self, from_call: int = 1) -> None:
        self.from_call, self.calls = from_call, 0

    def __call__(self, result: StepOutput) -> None:
        self.calls += 1
        if self.calls >= self.from_call:
            raise LookupError("my printer is out of paper")


@pytest.mark.parametrize("owner", [None, "mine"])
def test_a_callback_that_raises_ends_its_request_after_the_token(owner: object) -> None:
    callback = Broken()
    desk, a, b = Desk(), make("a", 5, callback, owner), make("b", 5, owner=owner)
    desk.tokens((a, 7), (b, 8))
    results = desk.inbox.take(owner)
    assert brief(results) == [("a", 7, None), ("b", 8, None), ("a", None, "error")]
    assert a.status is RequestStatus.ERROR and b.status is RequestStatus.RUNNING
    output = results[-1].output
    assert output is not None and output.error == "LookupError: my printer is out of paper"
    assert output.outputs[0].token_ids == (7,)
    assert desk.failed == [("a", "my printer is out of paper")] and callback.calls == 1


@pytest.mark.parametrize("end", ["length", "abort"])
def test_a_callback_that_raises_at_the_end_is_told_of_in_the_output(end: str) -> None:
    desk, a = Desk(), make("a", 2, Broken(from_call=2))
    desk.tokens((a, 7))
    if end == "length":
        desk.tokens((a, 8))
    else:
        desk.abort(a)
    _, last = desk.inbox.take()
    assert last.output is not None and last.output.outputs[0].finish_reason == end
    assert last.output.error == "LookupError: my printer is out of paper" and desk.failed == []


def test_an_interrupt_in_a_callback_comes_out_when_all_were_told_and_harms_nobody() -> None:
    told: list[StepOutput] = []

    def impatient(result: StepOutput) -> None:
        told.append(result)
        if len(told) == 1:
            raise KeyboardInterrupt

    desk, a, b = Desk(), make("a", 5, impatient), make("b", 5, told.append)
    with pytest.raises(KeyboardInterrupt):
        desk.tokens((a, 7), (b, 7))
    desk.tokens((a, 8))
    assert brief(told) == [("a", 7, None), ("b", 7, None), ("a", 8, None)]
    assert desk.inbox.take() == told and desk.failed == []


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_a_callback_brings_about_is_told_after_what_came_before(first: str) -> None:
    """a's callback ends b, whose token of this step is on its way."""
    desk, told = Desk(), list[StepOutput]()
    b = make("b", 5, told.append)

    def kill(result: StepOutput) -> None:
        told.append(result)
        if not b.is_over:
            desk.abort(b)

    a = make("a", 5, kill)
    desk.tokens(*[(a, 7), (b, 8)][:: 1 if first == "a" else -1])
    assert told == desk.inbox.take()
    assert [r for r in brief(told) if r[0] == "b"] == [("b", 8, None), ("b", None, "abort")]


def test_a_callback_may_end_its_own_request_and_is_told_nothing_more() -> None:
    """Neither of the end, nor of a sample's token that is on its way: it would end it again."""
    desk, told = Desk(), list[StepOutput]()

    def enough(result: StepOutput) -> None:
        told.append(result)
        for request in (first, second):
            desk.abort(request)

    first, second = make("a", 5), make("a.1", 5)
    group = SampleGroup([first, second], enough)
    desk.tokens((first, 7), (second, 8))
    assert brief(told) == [("a", 7, None)]
    results = desk.inbox.take()
    told_to_all = [r[1:] for r in brief(results)]
    assert told_to_all == [(7, None), (8, None), (None, "abort"), (None, "abort")]
    assert results[-1].output == group.output() and group.output().error is None


def test_an_error_is_of_the_callback_that_raised_also_within_another_ones_doing() -> None:
    """a's callback ends b, whose callback raises: the error is b's."""
    desk = Desk()
    b = make("b", 5, Broken())
    a = make("a", 5, lambda result: None if b.is_over else desk.abort(b))
    desk.tokens((a, 7))
    live, end = desk.inbox.take()
    assert brief([live, end]) == [("a", 7, None), ("b", None, "abort")]
    assert end.output is not None and (end.output.error or "").startswith("LookupError")
    assert a.status is RequestStatus.RUNNING
