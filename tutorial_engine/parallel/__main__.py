"""Introduced in notebook A1. The command line: `python -m tutorial_engine.parallel --ranks 2`.

torchrun can start it as well: `torchrun --nproc-per-node 2 -m tutorial_engine.parallel`. Knows what
can be asked for; the ranks are its neighbours.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.parallel.job import PROMPTS, Job
from tutorial_engine.parallel.ranks import join_and_run, run_ranks
from tutorial_engine.parallel.tensor_parallel import ParallelError
from tutorial_engine.sampling.params import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one that torchrun has started. 0 if all is well and all are equal."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.json is not None and not _can_write(options.json):
        parser.error(f"--json {options.json}: this file cannot be written")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no check mark
    rank = int(os.environ.get("RANK", "0"))
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
            timeout_s=options.timeout,
        )
        if "RANK" in os.environ:
            report, _ = join_and_run(job, rank, int(os.environ["WORLD_SIZE"]), "env://")
        else:
            report = run_ranks(options.ranks, job)
    except (ParallelError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(report.summary())
        for number, text in enumerate(report.texts):
            print(f"{number}: {text!r}")
        if options.json is not None:
            options.json.write_text(report.to_json(), encoding="utf-8")
    return 0 if report.ok else 1


def _can_write(path: Path) -> bool:
    """Asked before the work. A file that is there is not touched, a new one is not left."""
    try:
        is_new = not path.exists()
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tutorial_engine.parallel", description="one model on several processes"
    )
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
