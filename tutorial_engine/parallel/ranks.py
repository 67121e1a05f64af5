"""Ranks as processes of this machine, started by torchrun.

Knows processes and files; knows no weight (tensor_parallel) and no engine (job).
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tutorial_engine.lab.ledger import LedgerPath
from tutorial_engine.model.checkpoint import TINY, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.parallel.job import Job
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.sent import send
from tutorial_engine.parallel.tensor_parallel import shard_config
from tutorial_engine.sampling.params import SamplingParams

ROOT_CAUSE, LINE = "Root Cause (first observed failure):", "-=\n "  # as torchrun says it
LOOPBACK = "127.0.0.1"  # this machine's own name need not be known
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def run_ranks(
    tp_size: int = 2,
    job: Job | None = None,
    timeout_s: float = 120,
    mlp: Callable[..., Tensor] | None = None,
) -> ParallelReport:
    """Run a job (three short stories, unless told) on so many processes → what came of it.

    `mlp`: a function that computes a rank's part of each MLP, as the exercise of notebook A1 says.
    ValueError, before a process starts, where tp_size does not divide; RuntimeError, with its
    traceback, when a rank fails. After timeout_s, and by Ctrl-C, all processes end.
    """
    sent = None if mlp is None else send(mlp)
    return _run(tp_size, replace(job or Job(), mlp=sent), timeout_s)[0]


def parallel_paths(checkpoint: str | Path = TINY, tp_size: int = 2) -> dict[str, LedgerPath]:
    """A row for the ledger, name -> path: the engine on tp_size processes that load a checkpoint.

    The ledger's model must be this one, in fp32. RuntimeError if the ranks did not have the same
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
            raise RuntimeError(f"the ranks had different logits: {report.digests}")
        return torch.stack(logits)

    return {"two ranks" if tp_size == 2 else f"{tp_size} ranks": path}


def _run(tp_size: int, job: Job, timeout_s: float = 120) -> tuple[ParallelReport, list[Tensor]]:
    """As run_ranks, and rank 0's logits [tokens, V] for each prompt."""
    shard_config(ModelConfig.from_pretrained(resolve_checkpoint(job.checkpoint)), tp_size)
    if job.device != "cpu" and torch.cuda.device_count() < tp_size:
        raise ValueError(
            f"{tp_size} ranks on {job.device!r} need a GPU each, and {torch.cuda.device_count()} "
            "are there: use device 'cpu'"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        torchrun = f"-m torch.distributed.run --nproc-per-node={tp_size} --rdzv-backend=c10d"
        torchrun += f" --rdzv-endpoint={LOOPBACK}:0 --local-addr={LOOPBACK} --log-dir={name}"
        rank = ["-m", "tutorial_engine.parallel", f"--folder={name}"]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *torchrun.split(), *rank],
                env=ENVIRONMENT | os.environ,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends torchrun
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired as late:
                raise RuntimeError(f"{tp_size} ranks were not done after {timeout_s:g} s") from late
            finally:  # torchrun ends its ranks when it is told to end, not when it is killed
                process.terminate()
                process.wait()
        if code != 0:
            output_text = (folder / "output").read_text(encoding="utf-8", errors="replace")
            cause = output_text.rpartition(ROOT_CAUSE)[2].strip(LINE)
            raise RuntimeError(f"a rank failed: {cause}")
        return pickle.loads((folder / "result").read_bytes())
