"""The property of test_engine_properties.py on as many random workloads as you like.

    python tests/long_run.py --workloads 20000

Prints what happened so far every few hundred workloads; a failure is shrunk and shown.
"""

import argparse
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from workloads import Workload, check, counted, workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1_000, help="the tests use 0 to 7")
    parser.add_argument("--batch", type=int, default=500, help="workloads per seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    total: Counter[str] = Counter()
    began = time.perf_counter()
    number = asked.seed
    while (left := asked.workloads - total["workloads"]) > 0:

        @seed(number)
        @settings(
            max_examples=min(asked.batch, left),
            phases=[Phase.generate, Phase.shrink],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(workloads())
        def property_(workload: Workload) -> None:
            total.update(check(workload))

        property_()
        number += 1
        seconds = time.perf_counter() - began
        print(f"{total['workloads']:,} of {asked.workloads:,} in {seconds:.0f} s", flush=True)
    print(*counted(total), sep="\n")
    print("every request came out as if it were alone")


if __name__ == "__main__":
    main()
