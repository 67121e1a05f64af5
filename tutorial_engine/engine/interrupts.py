"""When a Ctrl-C takes effect: not in the middle of bookkeeping.

Knows the signal; knows no request, no queue and no memory.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """The first Ctrl-C that comes inside takes effect at the end of the block, a second at once.

    So what must change together does, and an endless loop inside can still be ended. In other
    threads than the main one nothing changes: no Ctrl-C comes there.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(previous):  # ignored, the system's own, or not set from Python
        yield
        return
    came: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        came.append((number, frame))
        if len(came) > 1:
            previous(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if len(came) == 1:
            previous(*came[0])
