"""Introduced in notebook 03. Ctrl-C at a good moment: never in the middle of bookkeeping.

Knows signals; knows nothing else of the engine.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
