"""What ranks run in tests, in place of `rank_process`: something goes wrong, or much is asked.

Child processes import this module, so it imports little.
"""

import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tutorial_engine.parallel import ranks
from tutorial_engine.parallel.job import Job, run_rank
from tutorial_engine.parallel.tensor_parallel import ParallelError, RankGroup

CALL = 20  # the all-reduce, from 1, at which a rank goes wrong
all_reduce = RankGroup.all_reduce


def at_call(number: int, go_wrong: Callable[[], None]) -> None:
    """This process goes wrong before so many all-reduces."""

    def faulty(group: RankGroup, x: Tensor) -> Tensor:
        if group.traffic.calls + 1 == number:
            go_wrong()
        return all_reduce(group, x)

    RankGroup.all_reduce = faulty  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(3600)


def rank_1_dies(rank: int, *args: Any) -> None:
    if rank == 1:
        at_call(CALL, die)
    ranks.rank_process(rank, *args)


def rank_1_hangs(rank: int, *args: Any) -> None:
    if rank == 1:
        at_call(CALL, hang)
    ranks.rank_process(rank, *args)


def all_hang(rank: int, *args: Any) -> None:
    """At once; a file named after its pid says that it is there."""
    (Path(os.environ["PIDS"]) / str(os.getpid())).touch()
    at_call(1, hang)
    ranks.rank_process(rank, *args)


def several_jobs(rank: int, folder: Path, jobs: Mapping[str, Job]) -> None:
    """A report of each job by rank 0; then rank 1 dies, and rank 0 tries twice to go on."""
    os.environ["GLOO_SOCKET_IFNAME"] = ranks.LOOPBACK
    group = RankGroup(rank, 2, timeout_s=30, init_method=f"file://{folder}/store")
    for name, job in jobs.items():
        report, _ = run_rank(job, group)
        if rank == 0:
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(report))
    if rank == 1:
        at_call(group.traffic.calls + 5, die)
    start, last = time.monotonic(), list(jobs.values())[-1]
    for _ in range(2):  # the second time the group knows that it is broken
        try:
            run_rank(last, group)
        except ParallelError as error:
            (folder / "error").write_text(f"{time.monotonic() - start:.2f} {error}")
