"""Each result reaches its inbox once, and a callback that raises harms nobody else."""

from collections.abc import Callable

import pytest

from tutorial_engine.engine.delivery import Delivery
from tutorial_engine.engine.request import Request, RequestStatus, StepOutput
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken, Sampler
from tutorial_engine.sampling.stopping import Finish, StopChecker


class Desk:
    """A delivery, and as much of a scheduler as it needs: tokens come, requests end."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []
        self.delivery = Delivery(self.fail)

    def fail(self, request: Request, fault: Exception) -> None:
        self.failed.append((request.request_id, str(fault)))
        request.error = f"{type(fault).__name__}: {fault}"
        self.end(request, RequestStatus.ERROR, Finish("error"))

    def end(self, request: Request, status: RequestStatus, finish: Finish) -> None:
        request.status, request.finish = status, finish
        if request.checker.finish is None:
            request.checker.end(finish)

    def token(self, request: Request, token_id: int) -> SampledToken:
        """One token more, and the end when it is the last; delivered."""
        token = SampledToken(token_id)
        finish = request.append(token, 0.0)
        if finish is not None:
            self.end(request, RequestStatus.FINISHED, finish)
        self.delivery.deliver(request, token)
        return token

    def abort(self, request: Request) -> None:
        self.end(request, RequestStatus.ABORTED, Finish("abort"))
        self.delivery.deliver(request, None)


def make(
    name: str, max_tokens: int = 2, on_token: Callable[[StepOutput], None] | None = None
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(name, [1], Sampler(params), StopChecker(params), on_token=on_token)
    request.status = RequestStatus.RUNNING
    return request


def brief(results: list[StepOutput]) -> list[tuple[str, int | None, str | None]]:
    """Id, token and finish reason of each."""
    return [
        (r.request_id, r.token and r.token.token_id, r.finish and r.finish.reason) for r in results
    ]


def test_each_result_is_taken_once_in_the_order_of_coming() -> None:
    desk, a, b = Desk(), make("a"), make("b", max_tokens=1)
    assert not desk.delivery.is_pending and desk.delivery.take() == []
    desk.token(a, 7)
    desk.token(b, 8)
    assert desk.delivery.is_pending
    assert brief(desk.delivery.take()) == [("a", 7, None), ("b", 8, "length")]
    assert not desk.delivery.is_pending and desk.delivery.take() == []
    desk.token(a, 9)
    assert brief(desk.delivery.take()) == [("a", 9, "length")]


def test_what_was_taken_does_not_change_any_more() -> None:
    desk, a = Desk(), make("a")
    desk.token(a, 7)
    taken = desk.delivery.take()
    desk.token(a, 8)
    assert brief(taken) == [("a", 7, None)]


def test_the_output_comes_with_the_last_result_only() -> None:
    desk, a = Desk(), make("a")
    desk.token(a, 7)
    desk.token(a, 8)
    live, last = desk.delivery.take()
    assert live.output is None and live.finish is None
    assert last.output == a.output() and last.finish == Finish("length")
    assert last.output is not None and last.output.outputs[0].token_ids == (7, 8)


def test_an_end_without_a_token_is_delivered_too() -> None:
    desk, a = Desk(), make("a")
    desk.token(a, 7)
    desk.abort(a)
    results = desk.delivery.take()
    assert brief(results) == [("a", 7, None), ("a", None, "abort")]
    assert results[1].output == a.output()


def test_own_inboxes_get_their_own_and_the_common_one_the_rest() -> None:
    desk, a, b, c = Desk(), make("a"), make("b"), make("c")
    mine: list[StepOutput] = []
    yours: list[StepOutput] = []
    desk.delivery.register(a, mine)
    desk.delivery.register(c, yours)
    for request in (a, b, c):
        desk.token(request, 7)
    assert (brief(mine), brief(yours)) == ([("a", 7, None)], [("c", 7, None)])
    assert brief(desk.delivery.take()) == [("b", 7, None)]


def test_a_full_own_inbox_is_not_pending() -> None:
    desk, a = Desk(), make("a")
    desk.delivery.register(a, [])
    desk.token(a, 7)
    assert not desk.delivery.is_pending and desk.delivery.take() == []


def test_several_requests_may_share_an_inbox() -> None:
    desk, a, b = Desk(), make("a"), make("b")
    inbox: list[StepOutput] = []
    for request in (a, b):
        desk.delivery.register(request, inbox)
        desk.token(request, 7)
    assert brief(inbox) == [("a", 7, None), ("b", 7, None)]


def test_an_inbox_is_forgotten_when_its_request_is_over() -> None:
    desk, inbox = Desk(), list[StepOutput]()
    first = make("a", max_tokens=1)
    desk.delivery.register(first, inbox)
    desk.token(first, 7)
    desk.token(make("a"), 8)  # the id is used again, by a request without an inbox
    assert brief(inbox) == [("a", 7, "length")]
    assert brief(desk.delivery.take()) == [("a", 8, None)]


# -- callbacks ------------------------------------------------------------------------------------


def test_a_callback_is_told_what_the_inbox_gets() -> None:
    told: list[StepOutput] = []
    desk, a = Desk(), make("a", on_token=told.append)
    desk.token(a, 7)
    desk.token(a, 8)
    assert told == desk.delivery.take() and len(told) == 2


def test_the_result_is_in_the_inbox_before_the_callback_is_told() -> None:
    desk = Desk()
    seen: list[int] = []
    a = make("a", on_token=lambda result: seen.append(len(desk.delivery.take())))
    desk.token(a, 7)
    assert seen == [1]


class Broken:
    """A callback that raises from the n-th call on."""

    def __init__(self, from_call: int = 1) -> None:
        self.from_call, self.calls = from_call, 0

    def __call__(self, result: StepOutput) -> None:
        self.calls += 1
        if self.calls >= self.from_call:
            raise LookupError("my printer is out of paper")


@pytest.mark.parametrize("own", [False, True])
def test_a_callback_that_raises_ends_its_request_after_the_token(own: bool) -> None:
    callback, inbox = Broken(), list[StepOutput]()
    desk, a, b = Desk(), make("a", 5, callback), make("b", 5)
    if own:
        desk.delivery.register(a, inbox)
    desk.token(a, 7)
    desk.token(b, 8)
    results = inbox + desk.delivery.take()
    assert brief(results) == [("a", 7, None), ("a", None, "error"), ("b", 8, None)]
    assert a.status is RequestStatus.ERROR and b.status is RequestStatus.RUNNING
    output = results[1].output
    assert output is not None and output.error == "LookupError: my printer is out of paper"
    assert output.outputs[0].token_ids == (7,)
    assert desk.failed == [("a", "my printer is out of paper")] and callback.calls == 1


@pytest.mark.parametrize("own", [False, True])
def test_a_callback_that_raises_at_the_end_is_told_of_in_the_output(own: bool) -> None:
    callback, inbox = Broken(from_call=2), list[StepOutput]()
    desk, a = Desk(), make("a", 2, callback)
    if own:
        desk.delivery.register(a, inbox)
    desk.token(a, 7)
    desk.token(a, 8)
    results = inbox + desk.delivery.take()
    assert brief(results) == [("a", 7, None), ("a", 8, "length")]
    output = results[1].output
    assert output is not None and output.error == "LookupError: my printer is out of paper"
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].token_ids == (7, 8)
    assert a.status is RequestStatus.FINISHED and desk.failed == []


def test_a_callback_that_raises_at_an_abort_is_told_of_in_the_output() -> None:
    desk, a = Desk(), make("a", on_token=Broken())
    desk.abort(a)
    (result,) = desk.delivery.take()
    assert result.output is not None
    assert (result.output.error or "").startswith("LookupError")
    assert a.status is RequestStatus.ABORTED


def test_an_interrupt_in_a_callback_is_no_fault_of_the_request() -> None:
    def interrupted(result: StepOutput) -> None:
        raise KeyboardInterrupt

    desk, a = Desk(), make("a", on_token=interrupted)
    with pytest.raises(KeyboardInterrupt):
        desk.token(a, 7)
    assert brief(desk.delivery.take()) == [("a", 7, None)]
    assert a.status is RequestStatus.RUNNING and desk.failed == []


def test_a_callback_may_end_another_request() -> None:
    desk, b = Desk(), make("b", 5)
    a = make("a", 5, lambda result: None if b.is_over else desk.abort(b))
    desk.token(b, 8)
    desk.token(a, 7)
    assert brief(desk.delivery.take()) == [("b", 8, None), ("a", 7, None), ("b", None, "abort")]


def test_a_callback_may_end_its_own_request_and_is_not_told_of_it() -> None:
    desk, told = Desk(), list[StepOutput]()

    def enough(result: StepOutput) -> None:
        told.append(result)
        desk.abort(a)

    a = make("a", 5, enough)
    desk.token(a, 7)
    assert brief(told) == [("a", 7, None)]
    assert brief(desk.delivery.take()) == [("a", 7, None), ("a", None, "abort")]


def test_a_callback_may_raise_in_a_callback() -> None:
    """a's callback ends b, whose callback raises: the error is b's."""
    desk = Desk()
    b = make("b", 5, Broken())
    a = make("a", 5, lambda result: None if b.is_over else desk.abort(b))
    desk.token(a, 7)
    live, end = desk.delivery.take()
    assert brief([live, end]) == [("a", 7, None), ("b", None, "abort")]
    assert end.output is not None and (end.output.error or "").startswith("LookupError")
    assert a.status is RequestStatus.RUNNING


def test_texts_put_together_are_the_text(tokenizer) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(max_tokens=6, stop=["never said"])  # holds characters back
    checker = StopChecker(params, tokenizer=tokenizer)
    desk, a = Desk(), Request("a", [1], Sampler(params), checker)
    a.status = RequestStatus.RUNNING
    ids = (tokenizer.encode("One day Anna found a big box").ids)[:6]
    for token_id in ids:
        desk.token(a, token_id)
    results = desk.delivery.take()
    assert results[0].text == "" and results[-1].finish == Finish("length")
    assert "".join(result.text for result in results) == tokenizer.decode(ids)
    assert results[-1].output is not None
    assert results[-1].output.outputs[0].text == tokenizer.decode(ids)


def test_a_callback_that_was_interrupted_is_told_of_the_next_token() -> None:
    desk, told = Desk(), list[StepOutput]()

    def impatient(result: StepOutput) -> None:
        told.append(result)
        if len(told) == 1:
            raise KeyboardInterrupt

    a = make("a", 5, impatient)
    with pytest.raises(KeyboardInterrupt):
        desk.token(a, 7)
    desk.token(a, 8)
    assert brief(told) == [("a", 7, None), ("a", 8, None)]
    assert desk.delivery.take() == told
