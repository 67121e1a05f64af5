"""The command line: `python -m tutorial_engine.parallel --ranks 2`.

With --folder this is one rank of several, which torchrun has started for `run_ranks`.
"""

import argparse
import ctypes
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.parallel.job import PROMPTS, Job, run_rank
from tutorial_engine.parallel.ranks import run_ranks
from tutorial_engine.parallel.tensor_parallel import RankGroup
from tutorial_engine.sampling.params import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them. 0 if all is well and all are equal."""
    options = _parser().parse_args(arguments)
    if options.folder:
        _be_a_rank(options.folder)
        return 0
    try:
        job = Job(
            prompts=options.prompt or PROMPTS,
            params=SamplingParams(
                max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
            ),
            checkpoint=str(options.checkpoint),
            block_size=options.block_size,
            dtype=options.dtype,
            device=options.device,
        )
        report = run_ranks(options.ranks, job, options.timeout)
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(report.summary())
    for number, text in enumerate(report.texts):
        print(f"{number}: {text!r}")
    return 0 if report.ok else 1


@record  # torchrun shows the traceback of the rank that failed first
def _be_a_rank(folder: Path) -> None:
    """A rank's part of the job in the folder, where rank 0's results go."""
    if sys.platform == "linux":  # a rank never outlives torchrun, even if that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    job: Job = pickle.loads((folder / "job").read_bytes())
    group = RankGroup(job.device)
    result = run_rank(job, group)
    dist.destroy_process_group()
    if group.rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_engine.parallel", description="one model on several processes"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--checkpoint", default=TINY, help="a folder or hub id")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="else rank 0 draws one for all")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="cpu (gloo), or cuda (nccl)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds, then all are ended")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of run_ranks
    return parser


if __name__ == "__main__":
    sys.exit(main())
