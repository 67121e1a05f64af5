"""Introduced in notebook 03. Who gets what a step brought: each result exactly once.

Knows requests, inboxes and callbacks; knows no queue, no cache and no model.
"""

from collections.abc import Callable
from dataclasses import replace

from tutorial_engine.engine.request import Request, StepOutput, TokenCallback
from tutorial_engine.sampling.sampler import SampledToken


class Delivery:
    """Puts results into inboxes: a request's own, if it came with one, or the common one.

    `fail` ends a request whose callback raised.
    """

    def __init__(self, fail: Callable[[Request, Exception], object]) -> None:
        self._fail = fail
        self._own: dict[str, list[StepOutput]] = {}  # request_id -> its inbox
        self._common: list[StepOutput] = []

    @property
    def is_pending(self) -> bool:
        """Does the common inbox hold something?"""
        return bool(self._common)

    def register(self, request: Request, inbox: list[StepOutput]) -> None:
        """What happens to this request, and to its other samples, goes there."""
        self._own |= {sample.request_id: inbox for sample in request.samples}

    def take(self) -> list[StepOutput]:
        """Empty the common inbox."""
        taken, self._common = self._common, []
        return taken

    def deliver(self, request: Request, token: SampledToken | None) -> None:
        """A new token, or the end, or both: into the inbox, then to the request's callback.

        A callback that raises ends its request; if it was the end already, the output says so.
        """
        request.is_told = is_last = request.is_over
        is_last = is_last and all(sample.is_told for sample in request.samples)
        output = request.output() if is_last else None
        text, name = request.checker.take_text(), request.samples[0].request_id
        result = StepOutput(name, token, text, request.finish, output, request.index)
        inbox = self._own.get(request.request_id, self._common)
        inbox.append(result)
        if request.is_over:
            self._own.pop(request.request_id, None)
        callback = request.on_token
        if callback is None:
            return
        _set_callback(request, None)  # it is not told of what it does itself
        try:
            callback(result)
        except KeyboardInterrupt:  # not a fault of the callback: the next token is for it again
            _set_callback(request, callback)
            raise
        except Exception as fault:
            _set_callback(request, callback)
            request.on_token = None
            if not request.is_over:
                self._fail(request, fault)
                self.deliver(request, None)
            elif output is None:  # other samples go on: their output will tell
                request.error = f"{type(fault).__name__}: {fault}"
            else:  # it is complete, but its owner should know
                told = replace(output, error=f"{type(fault).__name__}: {fault}")
                inbox[inbox.index(result)] = result._replace(output=told)
        else:
            _set_callback(request, callback)


def _set_callback(request: Request, callback: TokenCallback | None) -> None:
    """Of all samples of a prompt: it is one and the same."""
    for sample in request.samples:
        sample.on_token = callback
