"""Ctrl-C: the first waits for the end of bookkeeping, a second ends what never ends.

Whenever it comes, nothing is lost, and the engine works on or says that a new one is needed.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from at_line import AtLine
from engines import poison, random_model
from workloads import LIMITS, Visitor, Workload, check

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import WallClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.interrupts import interrupts_wait
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler

pytestmark = pytest.mark.slow

usual_handler = signal.default_int_handler
MODEL = random_model()
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


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


# -- the block ------------------------------------------------------------------------------------


def test_the_first_waits_for_the_end_of_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        with interrupts_wait():
            ctrl_c()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_the_second_comes_at_once_and_by_the_handler_that_was_there() -> None:
    seen = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append((number, frame is not None))

    signal.signal(signal.SIGINT, mine)
    with interrupts_wait():
        ctrl_c()
        assert seen == []
        ctrl_c()
        assert seen == [(signal.SIGINT, True)]
    assert len(seen) == 1 and signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, usual_handler)


def test_no_interrupt_is_lost_to_an_exception() -> None:
    with pytest.raises(KeyboardInterrupt) as interrupt, interrupts_wait():
        ctrl_c()
        raise ArithmeticError("mine")
    assert isinstance(interrupt.value.__context__, ArithmeticError)


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [usual_handler]
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, handler)
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, usual_handler)


# -- one Ctrl-C, at any line ----------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["rows", "pages"])
def test_ctrl_c_at_any_line_loses_nothing(memory: str) -> None:
    """At one moment in forty, and each of the loop's own; long_run.py takes others of others."""
    visitors = [Visitor(i, i // 3, aborted_at=2 if i == 1 else None) for i in range(3)]
    visitors += [Visitor(4, 1, way="stream", leaves=2), Visitor(5, 2, way="generate")]
    limits = {"budget": 9, "capacity": max(LIMITS), "limit": max(LIMITS), "block_size": 4}
    workload, at = Workload(tuple(visitors), memory=memory, **limits), AtLine()
    assert check(workload, at)["StepEnded"]
    moments = at.moments()
    loop = [m for m in moments if m.line.function in ("step", "_serve", "_leave", "generate")]
    interrupts = 0
    for moment in {*moments[::40], *loop}:
        interrupts += check(replace(workload, interrupt=moment))["interrupts"]
    assert interrupts > 15


def test_what_ended_in_an_interrupted_run_is_returned_by_the_next() -> None:
    engine = small_engine()
    for name, many in (("a", 1), ("b", 4), ("c", 2)):
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=many, ignore_eos=True))
    handle = MODEL.register_forward_pre_hook(lambda *_: ctrl_c() if engine.num_steps == 2 else None)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    handle.remove()
    assert [output.request_id for output in engine.run()] == ["a", "c", "b"]


class Broken(Exception):
    """Raised inside a forward."""


@pytest.mark.parametrize("fault", [KeyboardInterrupt, Broken])
@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("num_layers_done", range(MODEL.config.num_hidden_layers + 1))
def test_what_a_broken_forward_promised_is_never_found(
    num_layers_done: int, goes_on: bool, fault: type[BaseException]
) -> None:
    """Requests of one step share what it was to write; NaN is where nobody did."""
    memory = poison(PagedKVCache.from_config(MODEL.config, block_size=4, num_blocks=16))
    engine = LLMEngine(MODEL, None, EngineConfig(max_model_len=24), memory=memory)
    alike = [[*range(1, 10), last] for last in (20, 21, 22)]
    alone = [LLMEngine(MODEL).generate([p], FIVE)[0].outputs[0].token_ids for p in alike]
    engine.add_request("first", alike[0], FIVE)
    engine.step()
    for name, prompt in zip("ab", alike[1:], strict=True):
        engine.add_request(name, [9, *prompt], FIVE)
    parts = [*MODEL.model.layers, MODEL.model.norm]

    def breaks(*_: object) -> None:
        raise fault

    handle = parts[num_layers_done].register_forward_pre_hook(breaks)
    with pytest.raises(fault):
        engine.step()
    handle.remove()
    engine.check_integrity()
    if not goes_on:
        engine.abort_request(["a", "b"])
    engine.add_request("c", [9, *alike[2]], FIVE)
    said = {out.request_id: out.outputs[0].token_ids for out in engine.run()}
    late = LLMEngine(MODEL).generate([[9, *p] for p in alike[1:]], FIVE)
    want = [output.outputs[0].token_ids for output in late]
    assert said["first"] == alone[0] and said["c"] == want[1]
    if goes_on:
        assert [said["a"], said["b"]] == want
    assert memory.blocks.num_free == memory.blocks.num_blocks, "blocks leaked"


def test_a_promise_that_is_kept_would_be_seen() -> None:
    keeps = patch.object(BlockManager, "_take_back", lambda self, seq_id: None)
    with keeps, pytest.raises(AssertionError):
        test_what_a_broken_forward_promised_is_never_found(1, False, Broken)


# -- what never ends ------------------------------------------------------------------------------

SECOND_AFTER, AT_MOST = 0.15, 1.5  # seconds; the second bound is for a busy machine


def small_engine(**parts: Any) -> LLMEngine:
    return LLMEngine(MODEL, config=EngineConfig(max_num_seqs=3, max_model_len=20), **parts)


def for_ever(*_: object) -> Any:
    while True:
        pass


def looping(base: type, method: str) -> Any:
    """A part of one's own that never comes back from one of its methods."""
    return type("Looping", (base,), {method: for_ever})


def with_checker() -> LLMEngine:
    engine = small_engine()
    engine.add_request("a", [1, 2], FIVE)
    engine.requests["a"].checker.update = for_ever  # type: ignore[method-assign]
    return engine


def with_sampler() -> LLMEngine:
    engine = small_engine()
    engine.add_request("a", [1, 2], FIVE, sampler=looping(Sampler, "sample")(FIVE))
    return engine


def without_preemption() -> LLMEngine:
    """`preempt` does nothing: `schedule_running` asks for ever."""
    policy = type("Idle", (Scheduler,), {"preempt": lambda self, victim: None})
    pool = CellKVCache.from_config(MODEL.config, 12)
    engine = small_engine(memory=pool, scheduler=policy)
    for name in "ab":
        engine.add_request(name, [1, 2, 3, 4, 5], SamplingParams(max_tokens=6))
    return engine


LOOPS: dict[str, Callable[[], LLMEngine]] = {
    "policy": lambda: small_engine(scheduler=looping(Scheduler, "next_waiting")),
    "memory": lambda: small_engine(
        memory=looping(CellKVCache, "allocate").from_config(MODEL.config, 40)
    ),
    "clock": lambda: small_engine(clock=looping(WallClock, "forward_done")()),
    "sampler": with_sampler,
    "stop checker": with_checker,
    "preemption": without_preemption,
}


@contextmanager
def pressing(times: int) -> Iterator[queue.Queue[float]]:
    """Ctrl-C is pressed so often, by a thread of its own; when."""
    pressed: queue.Queue[float] = queue.Queue()
    done = threading.Event()

    def press() -> None:
        for _ in range(times):
            if done.wait(SECOND_AFTER):
                return
            pressed.put(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield pressed
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("where", LOOPS)
def test_an_endless_loop_ends_with_the_second_ctrl_c(where: str) -> None:
    engine = LOOPS[where]()
    with pressing(2) as pressed, pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2]], FIVE)
    ended = time.monotonic()
    while not pressed.empty():
        last = pressed.get()
    assert ended - last < AT_MOST
    for use in (
        engine.step,
        lambda: engine.generate([[1]], FIVE),
        lambda: engine.add_request("z", [1]),
    ):
        with pytest.raises(RuntimeError, match=r"second Ctrl-C broke this engine off.*make a new"):
            use()
    assert len(small_engine().generate([[1, 2]], FIVE)[0].outputs[0].token_ids) == 5


def test_a_loop_in_the_model_ends_with_the_first_and_the_engine_works_on() -> None:
    engine = small_engine()
    engine.add_request("a", [1, 2], FIVE)
    handle = MODEL.register_forward_pre_hook(for_ever)
    try:
        with pressing(1), pytest.raises(KeyboardInterrupt):
            engine.run()
    finally:
        handle.remove()
    (output,) = engine.run()
    assert output.outputs[0].token_ids == engine.generate([[1, 2]], FIVE)[0].outputs[0].token_ids


IN_A_NOTEBOOK = """
from tutorial_engine.engine import LLMEngine
from tutorial_engine.model import load_model
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import forward
from tutorial_engine.engine.scheduler import Scheduler
class Mine(Scheduler):
    def next_waiting(self):
        print("ready", flush=True)
        while True:
            pass
model = load_model()
engine = LLMEngine(model, scheduler=Mine)
engine.generate([[1, 2, 3]])
"""


def test_stop_pressed_twice_in_a_notebook_ends_a_loop_in_a_policy() -> None:
    """In a real kernel, as nbclient drives it."""
    jupyter = pytest.importorskip("jupyter_client")
    manager, client = jupyter.manager.start_new_kernel(kernel_name="python3", startup_timeout=120)

    def error_of(message_id: str) -> str | None:
        while True:
            reply = client.get_shell_msg(timeout=60)
            if reply["parent_header"]["msg_id"] == message_id:
                return reply["content"].get("ename")

    try:
        # or the kernel would drop what comes right after an error
        loop = client.execute(IN_A_NOTEBOOK, stop_on_error=False)
        text = ""
        while "ready" not in text:
            text = client.get_iopub_msg(timeout=120)["content"].get("text", "")
        for _ in range(2):
            time.sleep(0.3)
            manager.interrupt_kernel()
        began = time.monotonic()
        assert error_of(loop) == "KeyboardInterrupt"
        assert time.monotonic() - began < AT_MOST
        assert error_of(client.execute("engine.step()", stop_on_error=False)) == "RuntimeError"
        assert error_of(client.execute("LLMEngine(model).generate([[1]])")) is None
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
