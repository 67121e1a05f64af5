"""The engine under random workloads, for as long as you like. A failure says how to see it again.

    .venv/bin/python tests/long_run.py --minutes 60 --seed 1
    .venv/bin/python tests/long_run.py --seed 1 --only 4711

Memories, policies, samples, streams, failing samplers, checkers and forwards, aborts and Ctrl-C
are mixed (fuzz.py); each request must come out as if it were alone, and alone it says what
transformers says. Prints what happened, in numbers, at the end. Exit status 1 if anything failed.
"""

import argparse
import signal
import sys
import time
import traceback
from collections import Counter
from types import FrameType

import torch
from fuzz import run_one

MOST_SECONDS = 120  # for one run: more than any needs, the slowest machine's too
MOST_FAILURES = 20  # then it is enough


class TakesForEver(BaseException):
    """Nothing catches it on its way."""


def too_long(number: int, frame: FrameType | None) -> None:
    raise TakesForEver(f"more than {MOST_SECONDS} seconds")


def try_one(seed: int, number: int) -> Counter[str]:
    """Run it; tell of a failure, and how to see it again."""
    signal.alarm(MOST_SECONDS)
    try:
        return run_one(seed, number)
    except (Exception, TakesForEver) as error:
        print(f"FAILED: .venv/bin/python tests/long_run.py --seed {seed} --only {number}")
        traceback.print_exception(error, limit=-6, file=sys.stdout)
        sys.stdout.flush()
        return Counter(failures=1)
    finally:
        signal.alarm(0)


def run_for(seconds: float, seed: int) -> Counter[str]:
    """Run after run, until the time is over → what happened."""
    counts, began, told = Counter[str](), time.monotonic(), 0.0
    while (passed := time.monotonic() - began) < seconds and counts["failures"] < MOST_FAILURES:
        if passed - told > 60:
            told = passed
            print(f"{passed / 60:.0f} min: {counts['runs']:,} runs, {counts['failures']} failures")
            sys.stdout.flush()
        counts += try_one(seed, counts["runs"])
        counts["runs"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1_000, help="the tests use small ones")
    parser.add_argument("--only", type=int, help="this run of the seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGALRM, too_long)
    if asked.only is not None:
        counts = try_one(asked.seed, asked.only)
    else:
        counts = run_for(60 * asked.minutes, asked.seed)
    for name, number in counts.items():
        print(f"{name:<34}{number:>12,}")
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
