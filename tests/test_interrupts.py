"""Ctrl-C waits for the end of a shielded block; and whenever it comes, the engine stays whole."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

import pytest
from at_line import AtLine
from tutorial_engine.engine.delivery import interrupts_wait
from workloads import LIMITS, Visitor, Workload, check

pytestmark = pytest.mark.slow

usual_handler = signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own handler, whatever the test runner has; and every test leaves it as it was."""
    before = signal.signal(signal.SIGINT, usual_handler)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is usual_handler, "a handler was left behind"


def test_an_interrupt_waits_for_the_end_and_then_is_at_once_again() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            ctrl_c()
            done.append("the rest of the block")
        done.append("what comes after it")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is usual_handler
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_an_impatient_user_interrupts_once_and_by_the_handler_that_is_back() -> None:
    seen = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append((number, frame is not None, signal.getsignal(signal.SIGINT)))

    signal.signal(signal.SIGINT, mine)
    with interrupts_wait():
        for _ in range(5):
            ctrl_c()
        assert seen == []
    signal.signal(signal.SIGINT, usual_handler)
    assert seen == [(signal.SIGINT, True, mine)]


def test_nested_blocks_wait_for_the_outermost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        with interrupts_wait():
            ctrl_c()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_exceptions_pass_and_no_interrupt_is_lost_to_them() -> None:
    with pytest.raises(ArithmeticError, match="mine"), interrupts_wait():
        raise ArithmeticError("mine")
    with pytest.raises(KeyboardInterrupt) as interrupt, interrupts_wait():
        ctrl_c()
        raise ArithmeticError("mine")
    assert isinstance(interrupt.value.__context__, ArithmeticError)


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [usual_handler]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_interrupt_that_is_not_pythons_stays_so(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is handler
            if handler is signal.SIG_IGN:
                ctrl_c()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, usual_handler)


def test_ctrl_c_at_any_line_leaves_the_engine_whole() -> None:
    """At one line in twelve of two workloads; long_run.py takes others of others."""
    counts: Counter[str] = Counter()
    for memory in ("rows", "pages"):
        visitors = [Visitor(i, i // 3) for i in range(4)]
        visitors[1] = replace(visitors[1], aborted_at=2)
        visitors += [Visitor(4, 1, way="stream", leaves=2), Visitor(5, 2, way="generate")]
        limits = {"budget": 9, "capacity": max(LIMITS), "limit": max(LIMITS), "block_size": 4}
        workload, at = Workload(tuple(visitors), memory=memory, **limits), AtLine()
        counts += check(workload, at)
        for moment in at.moments()[::12]:
            counts += check(replace(workload, interrupt=moment))
    assert counts["interrupts"] > 60 and counts["preemptions"], counts
    assert counts["interrupts that lose a result"] <= 12, "only at the end of a step"
