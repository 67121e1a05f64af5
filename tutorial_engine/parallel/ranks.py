"""Introduced in notebook 04. Ranks on this machine: `python -m tutorial_engine.parallel --ranks 2`.

Started by hand it starts torchrun, which starts it again as every rank; `run_ranks` does the same
from a notebook. Nothing leaves the machine. Knows processes and files; knows no weight. By one
name: what parallel_model, parallel_run and parallel_report have.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tutorial_engine.model.checkpoint import TINY, resolve_checkpoint
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.parallel.run import PROMPTS, Job, run_rank
from tutorial_engine.parallel.tensor_parallel import (
    Fault,
    ParallelError,
    RankGroup,
    RowParallelLinear,
    Traffic,
    check_divides,
    shard,
    shard_config,
)
from tutorial_engine.sampling.params import SamplingParams

__all__ = [
    "Fault",
    "Job",
    "ParallelError",
    "ParallelPath",
    "ParallelReport",
    "RankGroup",
    "RowParallelLinear",
    "Traffic",
    "check_divides",
    "parallel_paths",
    "run_ranks",
    "shard",
    "shard_config",
]

JOB, REPORT, LOGITS, OUTPUT = "job.json", "report.json", "logits.safetensors", "output.txt"


def run_ranks(tp_size: int = 2, job: Job | None = None, timeout_s: float = 120) -> ParallelReport:
    """Run a job (three short stories, unless told) on so many processes → what came of it.

    ValueError, before a process starts, where tp_size does not divide; ParallelError, naming the
    rank, when one dies or hangs, and after timeout_s in any case. No process is left over.
    """
    return _run(tp_size, job or Job(), timeout_s)[0]


def _run(tp_size: int, job: Job, timeout_s: float) -> tuple[ParallelReport, list[Tensor]]:
    """As run_ranks, and rank 0's logits [tokens, V] for each prompt."""
    check_divides(ModelConfig.from_pretrained(resolve_checkpoint(job.checkpoint)), tp_size)
    if job.device != "cpu" and torch.cuda.device_count() < tp_size:
        raise ValueError(
            f"{tp_size} ranks on {job.device!r} need a GPU each, and {torch.cuda.device_count()} "
            "are there: use device 'cpu'"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / JOB).write_text(job.to_json(), encoding="utf-8")
        with (folder / OUTPUT).open("wb") as output, _torchrun(tp_size, folder, output) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise ParallelError(
                    f"{tp_size} ranks were not done after {timeout_s:g} s and were ended. "
                    f"{_last_lines(folder)}"
                ) from None
        if code:
            raise _what_went_wrong(folder, code)
        report = ParallelReport.from_json((folder / REPORT).read_text(encoding="utf-8"))
        logits = load_file(folder / LOGITS)
        return report, [logits[str(i)] for i in range(len(logits))]


@contextmanager
def _torchrun(tp_size: int, folder: Path, output: IO[bytes]) -> Iterator[subprocess.Popen]:
    """torchrun with so many ranks, ended with all of them when the block is left."""
    ranks = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(tp_size)]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, "--max-restarts", "0"]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // tp_size)),
        "GLOO_SOCKET_IFNAME": loopback,  # localhost only, whatever the machine's name resolves to
    }
    package = str(Path(__file__).parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [*command, "-m", "tutorial_engine.parallel", "--job", str(folder)],
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
    )  # fmt: skip
    try:
        yield process
    finally:
        if (
            process.poll() is None
        ):  # it is asked first, and ends its ranks; they watch the folder, too
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_lines(folder: Path, count: int = 12) -> str:
    lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(["The last lines of its output:", *lines[-count:]])


def _what_went_wrong(folder: Path, code: int) -> Exception:
    """From what the ranks wrote before they ended, and what torchrun says of those that could not.

    A ValueError if that is what every rank raised: then the job is at fault, not a rank.
    """
    told = {int(f.suffix[1:]): f.read_text() for f in sorted(folder.glob("error.*"))}
    output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
    codes = re.findall(r"rank\s*: (\d+) \(local_rank.*?exitcode\s*: (-?\d+)", output, re.S)
    killed = {
        int(rank): signal.Signals(-int(number)).name
        for rank, number in codes
        if int(number) < 0 and -int(number) != signal.SIGTERM  # by which torchrun ends the others
    }
    if told and not killed and all(text.startswith("ValueError: ") for text in told.values()):
        return ValueError(next(iter(told.values())).removeprefix("ValueError: "))
    said = [f"rank {rank} was killed ({name})" for rank, name in killed.items()]
    said += [f"rank {rank} says: {text}" for rank, text in told.items()]
    if not said:
        said = [f"torchrun ended with exit code {code}. {_last_lines(folder)}"]
    return ParallelError("\n".join(said))


@dataclass(frozen=True)
class ParallelPath:
    """A ledger path: the engine on `tp_size` processes, over a checkpoint that all of them load.

    ParallelError if the ranks did not have the same logits, bit by bit.
    """

    checkpoint: str | Path = TINY
    tp_size: int = 2
    block_size: int = 16
    max_num_batched_tokens: int = 64
    timeout_s: float = 120

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """As ledger.AnyPath.run."""
        job = Job(
            prompts=tuple(tuple(ids) for ids in prompts),
            params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            checkpoint=str(self.checkpoint),
            forced=None if tokens is None else tokens.tolist(),
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            compare=False,
        )
        report, logits = _run(self.tp_size, job, self.timeout_s)
        if not report.ranks_agree:
            raise ParallelError(f"the ranks had different logits: {report.logits_digests}")
        return torch.stack(logits)


def parallel_paths(checkpoint: str | Path = TINY) -> dict[str, ParallelPath]:
    """Rows for the ledger, name -> path. The model must be this checkpoint's, in fp32."""
    return {"two ranks": ParallelPath(checkpoint)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: starts the ranks, or is one of them. 0 if all is well and all are equal."""
    options = _parser().parse_args(arguments)
    if options.job is not None:
        return _be_a_rank(Job.from_json((options.job / JOB).read_text()), options.job, None)
    try:
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
        )
        job = Job(
            prompts=options.prompt or PROMPTS,
            params=params,
            checkpoint=str(options.checkpoint),
            block_size=options.block_size,
            dtype=options.dtype,
            device=options.device,
            timeout_s=options.timeout,
            fault=options.fault,
        )
        if "RANK" in os.environ:  # torchrun started it
            return _be_a_rank(job, None, options.json)
        report = run_ranks(options.ranks, job)
    except (ParallelError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return _tell(report, options.json)


def _tell(report: ParallelReport, file: Path | None) -> int:
    print(report.summary())
    for prompt, text in enumerate(report.texts):
        print(f"{prompt}: {text!r}")
    if file is not None:
        file.write_text(report.to_json(), encoding="utf-8")
    return 0 if report.ok else 1


def _be_a_rank(job: Job, folder: Path | None, file: Path | None) -> int:
    """What torchrun starts. Results and errors go into the folder, if there is one."""
    if folder is not None:
        threading.Thread(target=_end_with, args=(folder,), daemon=True).start()
    rank = os.environ["RANK"]
    try:
        group = RankGroup(job.device, job.timeout_s, job.fault)
        report, logits = run_rank(job, group)
        group.leave()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        print(f"rank {rank}: {told}", file=sys.stderr, flush=True)
        if folder is not None:
            (folder / f"error.{rank}").write_text(told, encoding="utf-8")
        return 1
    if rank != "0":
        return 0
    if folder is None:
        return _tell(report, file)
    save_file({str(i): rows for i, rows in enumerate(logits)}, folder / LOGITS)
    (folder / REPORT).write_text(report.to_json(), encoding="utf-8")
    return 0


def _end_with(folder: Path) -> None:
    """A rank does not outlive the run_ranks that waits for it, even if torchrun cannot end it."""
    while (folder / JOB).exists():
        time.sleep(0.2)
    os._exit(1)


def _fault(text: str) -> Fault:
    kind, rank, call = text.split(":")
    return Fault(kind, int(rank), int(call))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tutorial_engine.parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes, unless torchrun says it")
    parser.add_argument("--checkpoint", default=TINY, help="a folder or hub id")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="else rank 0 draws one for all")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cpu (gloo), or cuda (nccl)")
    parser.add_argument("--timeout", type=float, default=20, help="seconds to wait for each other")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument(
        "--fault", type=_fault, help="kill:1:20: rank 1 dies at all-reduce 20; or hang:1:20"
    )
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
