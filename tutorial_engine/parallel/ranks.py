"""Introduced in notebook A1. Ranks as processes of this machine, over its loopback interface.

`run_ranks` starts them and waits: whatever becomes of them, it says which rank it was, and none is
left over. Knows processes and files; knows no weight (tensor_parallel) and no engine (job).
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

from tutorial_engine.lab.ledger import LedgerPath
from tutorial_engine.model.checkpoint import TINY, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.parallel.job import Job, run_rank
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.tensor_parallel import ParallelError, RankGroup, check_divides
from tutorial_engine.sampling.params import SamplingParams

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
RESULT = "result.pickle"
GRACE_S = 2.0  # after the first rank that fails, the others may say what they saw of it


def run_ranks(tp_size: int = 2, job: Job | None = None, timeout_s: float = 120) -> ParallelReport:
    """Run a job (three short stories, unless told) on so many processes → what came of it.

    ValueError, before a process starts, where tp_size does not divide; ParallelError, naming the
    rank, when one dies or hangs, and after timeout_s in any case. No process is left over. In a
    script it belongs under `if __name__ == "__main__":`, for each rank imports the script.
    """
    return _run(tp_size, job or Job(), timeout_s)[0]


def parallel_paths(checkpoint: str | Path = TINY, tp_size: int = 2) -> dict[str, LedgerPath]:
    """A row for the ledger, name -> path: the engine on tp_size processes that load a checkpoint.

    The ledger's model must be this one, in fp32. ParallelError if the ranks did not have the same
    logits, bit by bit.
    """

    def path(
        prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        job = Job(
            prompts=prompts,
            params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            checkpoint=str(checkpoint),
            forced=None if tokens is None else tokens.tolist(),
            max_num_batched_tokens=64,
            compare=False,
        )
        report, logits = _run(tp_size, job)
        if not report.ranks_agree:
            raise ParallelError(f"the ranks had different logits: {report.logits_digests}")
        return torch.stack(logits)

    return {"two ranks" if tp_size == 2 else f"{tp_size} ranks": path}


def _run(tp_size: int, job: Job, timeout_s: float = 120) -> tuple[ParallelReport, list[Tensor]]:
    """As run_ranks, and rank 0's logits [tokens, V] for each prompt."""
    check_divides(ModelConfig.from_pretrained(resolve_checkpoint(job.checkpoint)), tp_size)
    if job.device != "cpu" and torch.cuda.device_count() < tp_size:
        raise ValueError(
            f"{tp_size} ranks on {job.device!r} need a GPU each, and {torch.cuda.device_count()} "
            "are there: use device 'cpu'"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, ends = Path(name), time.monotonic() + timeout_s
        context = start_processes(
            rank_process, (tp_size, job, folder), tp_size, join=False, daemon=True
        )
        try:
            _wait(context.processes, ends)
            codes = [process.exitcode for process in context.processes]
            if any(codes):
                raise _what_went_wrong(folder, codes)
            if None in codes:
                raise ParallelError(
                    f"{tp_size} ranks were not done after {timeout_s:g} s and were ended"
                )
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        if not (folder / RESULT).exists():
            raise ParallelError("the ranks were interrupted")
        return pickle.loads((folder / RESULT).read_bytes())


def _wait(processes: Sequence[Any], ends: float) -> None:
    """Until all are done, or it is too late; after one failed the others have GRACE_S left."""
    while running := [process for process in processes if process.exitcode is None]:
        left = ends - time.monotonic()
        if left <= 0:
            return
        connection.wait([process.sentinel for process in running], left)
        if any(process.exitcode for process in processes):
            ends = min(ends, time.monotonic() + GRACE_S)


def rank_process(rank: int, size: int, job: Job, folder: Path) -> None:
    """The process of one rank: rank 0's results, and every rank's error, go into the folder."""
    if sys.platform == "linux":  # the system ends it with its parent, even while it is stopped
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threading.Thread(target=_end_with_the_parent, args=(folder,), daemon=True).start()
    with (folder / f"output.{rank}").open("wb") as output:
        for stream in (1, 2):  # the libraries' own words, too: they are shown if the rank dies
            os.dup2(output.fileno(), stream)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    try:
        result = join_and_run(job, rank, size, f"file://{folder}/ranks")
    except Exception as error:
        (folder / f"error.{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(1)  # at once: nothing is left to be tidied up
    if rank == 0:
        (folder / RESULT).write_bytes(pickle.dumps(result))


def join_and_run(
    job: Job, rank: int, size: int, init_method: str
) -> tuple[ParallelReport, list[Tensor]]:
    """Be this rank of `size`, for one job. Ranks of one machine speak over its loopback alone."""
    if os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    group = RankGroup(rank, size, job.device, job.timeout_s, init_method)
    result = run_rank(job, group)
    group.leave()
    return result


def _end_with_the_parent(folder: Path) -> None:
    """A rank does not outlive the run_ranks that waits for it, even if that was killed."""
    parent = multiprocessing.parent_process()
    while folder.exists() and (parent is None or parent.is_alive()):
        time.sleep(0.2)
    os._exit(1)


def _what_went_wrong(folder: Path, codes: Sequence[int | None]) -> Exception:
    """From how the ranks ended (exit codes; None: still running), and what they wrote before.

    A ValueError if that is what every rank raised: then the job is at fault, not a rank.
    """
    killed, said, errors = [], [], []
    for rank, code in enumerate(codes):
        error = folder / f"error.{rank}"
        if error.exists():
            errors.append(error.read_text(encoding="utf-8"))
            said.append(f"rank {rank} says: {errors[-1]}")
        elif code is None:
            said.append(f"rank {rank} said nothing within {GRACE_S:g} s of that, and was ended")
        elif code < 0:
            killed.append(f"rank {rank} was killed ({signal.Signals(-code).name})")
        elif code > 0:
            said.append(f"rank {rank} ended with exit code {code}. {_last_lines(folder, rank)}")
    if errors and not killed and all(text.startswith("ValueError: ") for text in errors):
        return ValueError(errors[0].removeprefix("ValueError: "))
    return ParallelError("\n".join(killed + said))


def _last_lines(folder: Path, rank: int, count: int = 12) -> str:
    file = folder / f"output.{rank}"
    if not file.exists():
        return 'It did not begin: in a script, call this under `if __name__ == "__main__":`'
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines:
        return "It wrote nothing."
    return "\n".join(["The last lines of its output:", *lines[-count:]])
