"""Introduced in notebook 03. Who gets what a step brought: each result exactly once.

Whatever callbacks do, and whenever Ctrl-C comes. Knows requests, their owners and callbacks; knows
no queue, no cache and no model.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tutorial_engine.engine.request import Request, SampleGroup, StepOutput
from tutorial_engine.sampling.sampler import SampledToken


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A Ctrl-C that comes inside takes effect at the end. In other threads there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, the system's own, or not set from Python
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            previous(*came[0])


class Update(NamedTuple):
    """What happened to one request: a new token, or the end, or both."""

    request: Request
    token: SampledToken | None


class _Result(NamedTuple):
    """An update as it is told, without the output, which a callback may still add an error to."""

    request: Request
    told: StepOutput
    is_last: bool  # all samples are over, and were told of

    def whole(self) -> StepOutput:
        output = self.request.group.output() if self.is_last else None
        return self.told._replace(output=output)


class Inbox:
    """Results wait here for the owner of their request; callbacks are told at once.

    `fail` ends a request whose callback raised.
    """

    def __init__(self, fail: Callable[[Request, Exception], Update]) -> None:
        self._fail = fail
        self._results: list[_Result] = []
        self._to_tell: deque[_Result] = deque()  # results whose callback was not called yet
        self._telling: SampleGroup | None = None  # whose callback runs now

    @property
    def is_pending(self) -> bool:
        """Does something wait for `step()`?"""
        return any(result.request.group.owner is None for result in self._results)

    def take(self, owner: object = None) -> list[StepOutput]:
        """All that waits for this owner, in the order in which it came."""
        mine = [result for result in self._results if result.request.group.owner is owner]
        self._results = [r for r in self._results if r.request.group.owner is not owner]
        return [result.whole() for result in mine]

    def drop(self, group: SampleGroup) -> None:
        """Nobody will take these."""
        self._results = [r for r in self._results if r.request.group is not group]

    def deliver(self, updates: Iterable[Update]) -> None:
        """File all, then tell the callbacks: whatever these do, no result is lost or told twice.

        A callback may abort or add requests: what comes of it is told after it, in the order of the
        inbox. One that ends its own request is not called again. One that raises ends its request;
        if it was the end already, the output says so. An interrupt is raised when all were told.
        """
        for result in [self._file(update) for update in updates]:
            if result.request.group is self._telling:
                self._telling.on_token = None
            if result.request.group.on_token is not None:
                self._to_tell.append(result)
        if self._to_tell and self._telling is None:  # else a callback brought this about
            self._tell()

    def _tell(self) -> None:
        interrupt: BaseException | None = None
        while self._to_tell:
            result = self._to_tell.popleft()
            request, group = result.request, result.request.group
            if group.on_token is None:
                continue
            self._telling = group
            try:
                group.on_token(result.whole())
            except Exception as fault:
                group.on_token = None
                if request.is_over:
                    request.error = f"{type(fault).__name__}: {fault}"
                else:
                    self._file(self._fail(request, fault))
            except BaseException as error:
                interrupt = error
            finally:
                self._telling = None
        if interrupt is not None:
            raise interrupt

    def _file(self, update: Update) -> _Result:
        request, token = update
        group, text = request.group, request.checker.take_text()
        group.num_told += request.finish is not None
        index = group.samples.index(request)
        told = StepOutput(group.samples[0].request_id, token, text, request.finish, None, index)
        result = _Result(request, told, group.num_told == len(group.samples))
        self._results.append(result)
        return result
